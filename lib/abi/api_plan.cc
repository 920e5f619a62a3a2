// SPDX-License-Identifier: MIT
// Entry points: memory plan and capabilities.
#include <cstdio>

#include "lib/abi/api_session.h"
#include "lib/attend/session.h"
#include "lib/base/layer_refusal.h"
#include "lib/base/options.h"
#include "lib/plan/memory_plan.h"
#include "lib/store/cache.h"

namespace tandem {
namespace {

// Returns a layer that every build can serve, for callers that ask only about cache and session.
tandem_layer_options plain_layer() {
  tandem_layer_options layer = AbiStruct<tandem_layer_options>::defaults();
  layer.n_q_heads = layer.n_kv_heads = 1;
  layer.k_head_dim = 64;
  return layer;
}

Status check_kv_lens(const int64_t* kv_lens, int64_t n_sequences) {
  TANDEM_TRY(require_range("n_sequences", n_sequences, 0, INT32_MAX));
  TANDEM_TRY(n_sequences > 0 ? require(kv_lens, "kv_lens") : require_aligned(kv_lens, "kv_lens"));
  for (int64_t i = 0; i < n_sequences; ++i) {
    if (kv_lens[i] >= 0 && kv_lens[i] <= kMaxTokens) continue;
    const std::string field = element_name("kv_lens", i);
    return require_range(field.c_str(), kv_lens[i], 0, kMaxTokens);
  }
  return {};
}

std::string plan_json(const tandem_memory_plan& plan) {
  char text[768];
  std::snprintf(text, sizeof text,
                "{\"host_kv_bytes\":%lld,\"host_session_bytes\":%lld,\"selection_max_bytes\":%lld,"
                "\"device_window_bytes\":%lld,\"device_work_bytes\":%lld,\"kv_token_bytes\":%lld,\"shared_bytes\":%lld,"
                "\"device_stream_bytes\":%lld,\"device_weights_bytes\":%lld,\"x_token_bytes\":%lld,"
                "\"device_window_max_bytes\":%lld,\"judged_kv_bytes\":%lld,\"judged_first_bytes\":%lld,"
                "\"judged_max_bytes\":%lld}",
                static_cast<long long>(plan.host_kv_bytes), static_cast<long long>(plan.host_session_bytes),
                static_cast<long long>(plan.selection_max_bytes), static_cast<long long>(plan.device_window_bytes),
                static_cast<long long>(plan.device_work_bytes), static_cast<long long>(plan.kv_token_bytes),
                static_cast<long long>(plan.shared_bytes), static_cast<long long>(plan.device_stream_bytes),
                static_cast<long long>(plan.device_weights_bytes), static_cast<long long>(plan.x_token_bytes),
                static_cast<long long>(plan.device_window_max_bytes), static_cast<long long>(plan.judged_kv_bytes),
                static_cast<long long>(plan.judged_first_bytes), static_cast<long long>(plan.judged_max_bytes));
  return text;
}

std::string route_json(const tandem_route_plan& plan) {
  char text[1024];
  std::snprintf(text, sizeof text,
                "{\"resident_tokens\":%lld,\"host_tokens\":%lld,\"stream_tokens\":%lld,\"host_bytes\":%lld,"
                "\"stream_bytes\":%lld,\"host_ns\":%lld,\"bus_ns\":%lld,\"device_ns\":%lld,\"total_ns\":%lld,"
                "\"host_alone_ns\":%lld,\"stream_alone_ns\":%lld,\"recompute_tokens\":%lld,\"recompute_bytes\":%lld,"
                "\"recompute_alone_ns\":%lld}",
                static_cast<long long>(plan.resident_tokens), static_cast<long long>(plan.host_tokens),
                static_cast<long long>(plan.stream_tokens), static_cast<long long>(plan.host_bytes),
                static_cast<long long>(plan.stream_bytes), static_cast<long long>(plan.host_ns),
                static_cast<long long>(plan.bus_ns), static_cast<long long>(plan.device_ns),
                static_cast<long long>(plan.total_ns), static_cast<long long>(plan.host_alone_ns),
                static_cast<long long>(plan.stream_alone_ns), static_cast<long long>(plan.recompute_tokens),
                static_cast<long long>(plan.recompute_bytes), static_cast<long long>(plan.recompute_alone_ns));
  return text;
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_plan_memory(tandem_memory_plan* plan, const tandem_engine* engine, const tandem_model* model,
                           const tandem_cache_options* cache, const tandem_session_options* session, const int64_t* kv_lens,
                           int64_t n_sequences, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(plan, "plan"));
    std::shared_ptr<Engine> engine_object;
    std::shared_ptr<const Model> model_object;
    TANDEM_TRY(resolve(engine, "engine", &engine_object));
    TANDEM_TRY(resolve(model, "model", &model_object));
    tandem_cache_options cache_copy;
    tandem_session_options session_copy;
    TANDEM_TRY(copy_in_or_default(cache, "cache.", &cache_copy));
    TANDEM_TRY(copy_in_or_default(session, "session.", &session_copy));
    TANDEM_TRY(check_session_options(session_copy));
    TANDEM_TRY(check_kv_lens(kv_lens, n_sequences));
    tandem_memory_plan known = AbiStruct<tandem_memory_plan>::defaults();
    Status status = plan_memory(*engine_object, model_object->layers(), cache_copy, &session_copy,
                                {kv_lens, static_cast<size_t>(n_sequences)}, &known);
    if (status.ok() || status.code() == TANDEM_ERROR_CAPACITY) copy_out(known, plan);
    return status;
  });
}

int32_t tandem_plan_report(char* buffer, size_t buffer_bytes, size_t* needed_bytes, const tandem_memory_plan* plan,
                           tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(plan, "plan"));
    TANDEM_TRY(check_text_buffer(buffer, buffer_bytes, needed_bytes));
    tandem_memory_plan known;
    TANDEM_TRY(copy_in(plan, "", &known));
    write_text(plan_json(known), buffer, buffer_bytes, needed_bytes);
    return {};
  });
}

int32_t tandem_plan(tandem_route_plan* plan, tandem_session* session, int32_t layer_idx, const int64_t* kv_lens,
                    const int64_t* q_lens, int64_t n_sequences, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(plan, "plan"));
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    TANDEM_TRY(require_range("layer_idx", layer_idx, 0, static_cast<int64_t>(call->cache().layers().size()) - 1));
    TANDEM_TRY(check_kv_lens(kv_lens, n_sequences));
    TANDEM_TRY(require_aligned(q_lens, "q_lens"));
    tandem_route_plan known = AbiStruct<tandem_route_plan>::defaults();
    TANDEM_TRY(call->plan({static_cast<size_t>(layer_idx), {kv_lens, static_cast<size_t>(n_sequences)}, q_lens}, &known));
    copy_out(known, plan);
    return {};
  });
}

int32_t tandem_route_report(char* buffer, size_t buffer_bytes, size_t* needed_bytes, const tandem_route_plan* plan,
                            tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(plan, "plan"));
    TANDEM_TRY(check_text_buffer(buffer, buffer_bytes, needed_bytes));
    tandem_route_plan known;
    TANDEM_TRY(copy_in(plan, "", &known));
    write_text(route_json(known), buffer, buffer_bytes, needed_bytes);
    return {};
  });
}

// Calls the create functions themselves. Caches and sessions allocate their memory only when a sequence grows.
int32_t tandem_supports(const tandem_engine* engine, const tandem_layer_options* layer, const tandem_cache_options* cache,
                        const tandem_session_options* session, tandem_error** why) {
  return guarded(__func__, why, [&]() -> Status {
    std::shared_ptr<Engine> engine_object;
    TANDEM_TRY(resolve(engine, "engine", &engine_object));
    tandem_layer_options layer_copy = plain_layer();
    tandem_cache_options cache_copy;
    tandem_session_options session_copy;
    if (layer != nullptr) TANDEM_TRY(copy_in(layer, "layer.", &layer_copy));
    TANDEM_TRY(copy_in_or_default(cache, "cache.", &cache_copy));
    TANDEM_TRY(copy_in_or_default(session, "session.", &session_copy));
    TANDEM_TRY(check_layer(layer_copy, LayerRefusal("layer.")));
    TANDEM_TRY(check_session_options(session_copy).in("session"));
    std::shared_ptr<const Model> model_object;
    std::shared_ptr<Cache> cache_object;
    std::unique_ptr<Session> session_object;
    TANDEM_TRY(Model::create({layer_copy}, &model_object));
    TANDEM_TRY(Cache::create(std::move(engine_object), std::move(model_object), cache_copy, &cache_object).in("cache"));
    return Session::create(std::move(cache_object), session_copy, &session_object).in("session");
  });
}
