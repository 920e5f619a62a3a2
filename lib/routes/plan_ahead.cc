// SPDX-License-Identifier: MIT
// tandem_plan(): who would compute over the keys of a call, by the same program as calls go by.
#include <algorithm>
#include <mutex>

#include "lib/routes/call_plan.h"
#include "lib/routes/trial.h"
#include "lib/session.h"

namespace tandem {
namespace {

// Where the window begins before a call's tokens come, in a sequence that has always been attended by the session.
int64_t outside_window(const PolicyOptions& options, int64_t page_len, int64_t length) {
  const int64_t block = evict_len(options.window_len, page_len);
  return std::max<int64_t>(0, length - options.window_len) / block * block;
}

Status check_lens(std::span<const int64_t> kv_lens, const int64_t* q_lens) {
  for (size_t i = 0; i < kv_lens.size() && q_lens != nullptr; ++i) {
    if (q_lens[i] >= 1 && q_lens[i] <= kv_lens[i]) continue;
    const std::string field = "q_lens[" + std::to_string(i) + "]";
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = %lld is not from 1 to %lld, which the sequence has",
                field.c_str(), static_cast<long long>(q_lens[i]), static_cast<long long>(kv_lens[i]));
  }
  return {};
}

}  // namespace

Status Session::plan(int32_t layer_idx, std::span<const int64_t> kv_lens, const int64_t* q_lens, tandem_route_plan* plan) {
  Engine& engine = cache_->engine();
  const Layer& layer = cache_->layers()[static_cast<size_t>(layer_idx)];
  TANDEM_TRY(check_lens(kv_lens, q_lens));
  if (engine.device() == nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "session", "session: the engine has no device, there is one route");
  if (!can_stream(layer_policy(layer)))
    return fail(TANDEM_ERROR_UNSUPPORTED, "session", "session: policy \"%s\" chooses keys of layer %d when a call is made",
                layer_policy(layer).name, layer_idx);
  CallPlan split;
  int64_t longest = 1, n_outside = 0, resident = 0;
  for (size_t i = 0; i < kv_lens.size(); ++i) {
    const int64_t n = std::min(q_lens != nullptr ? q_lens[i] : 1, DeviceSession::kMostTokens), first = kv_lens[i] - n;
    if (first < 0) continue;
    const int64_t end = outside_window(options_, cache_->page_len(), first);
    const int64_t begin = layer.sliding_window > 0 ? std::clamp<int64_t>(first + 1 - layer.sliding_window, 0, end) : 0;
    split.add(i, n, begin, end);
    longest = std::max(longest, n);
    n_outside += end - begin;
    resident += kv_lens[i] - end;
  }
  const int64_t key_bytes = layer.n_kv_heads * plane_bytes(layer).total();
  const bool can = !stream_layouts_.empty() && layer.rope == nullptr && !refuses_streams_;
  if (device_ != nullptr) device_->hand_over().drain();
  TANDEM_TRY(try_routes(engine, cache_->device_tier(), layer, longest, routes_.buffer_bytes));
  if (can) {
    const std::unique_lock lock(cache_->mutex());
    TANDEM_TRY(try_rebuild(layer));
  }
  const RebuildTerms rebuild = rebuild_terms(layer, can);
  if (can && routes_.route == Route::kAuto && is_worth_planning(n_outside * key_bytes))
    split.make(engine.profile(), layer, key_bytes, rebuild);
  else
    split.give(engine.profile(), layer, key_bytes, can && routes_.always_streams() ? routes_.given_share() : 0.0, rebuild);
  plan->resident_tokens = resident;
  plan->recompute_tokens = split.n_rebuilt();
  plan->stream_tokens = split.n_streamed() - plan->recompute_tokens;
  plan->host_tokens = n_outside - split.n_streamed();
  plan->host_bytes = plan->host_tokens * key_bytes;
  plan->stream_bytes = plan->stream_tokens * key_bytes;
  plan->recompute_bytes = plan->recompute_tokens * layer.x_bytes();
  plan->host_ns = static_cast<int64_t>(split.plan().host_ns);
  plan->bus_ns = static_cast<int64_t>(split.plan().bus_ns);
  plan->device_ns = static_cast<int64_t>(split.plan().device_ns);
  plan->total_ns = static_cast<int64_t>(split.plan().total_ns);
  plan->host_alone_ns = static_cast<int64_t>(split.predict_ns(0.0));
  plan->stream_alone_ns = static_cast<int64_t>(split.predict_ns(1.0));
  plan->recompute_alone_ns = static_cast<int64_t>(split.predict_rebuilt_ns());
  return {};
}

}  // namespace tandem
