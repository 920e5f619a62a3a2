// SPDX-License-Identifier: MIT
// Moves every pointer of every call by one byte. The call must name the pointer with INVALID_ARGUMENT and must not read or
// write through it. The undefined-behaviour sanitizer also detects such accesses.
#include <memory>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;

template <typename T>
T* moved(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 1);
}

// A valid value whose bytes are moved by one.
template <typename T>
class Moved {
 public:
  explicit Moved(const T& value) { std::memcpy(bytes_ + 1, &value, sizeof value); }
  T* get() { return moved(reinterpret_cast<T*>(bytes_)); }

 private:
  alignas(64) unsigned char bytes_[sizeof(T) + 64] = {};
};

class Cases {
 public:
  Cases(const World& world, const char* function) : world_(world), function_(function) {}
  Cases& add(const char* field, std::function<int32_t(tandem_error**)> call) {
    cases_.push_back({field, function_, kInvalid, field, "not aligned", std::move(call)});
    return *this;
  }
  ~Cases() { check_all_refused(world_, cases_, nullptr); }

 private:
  const World& world_;
  const char* function_;
  std::vector<Refused> cases_;
};

void test_tensor_and_engine(void**) {
  World w;
  Outputs out;
  const int64_t shape[2] = {2, 3};
  float data[6] = {};
  tandem_tensor tensor;
  Cases(w, "tandem_tensor_init")
      .add("tensor", [&](auto** e) { return tandem_tensor_init(moved(&tensor), TANDEM_F32, data, 2, shape, e); })
      .add("shape", [&](auto** e) { return tandem_tensor_init(&tensor, TANDEM_F32, data, 2, moved(shape), e); })
      .add("tensor.data", [&](auto** e) { return tandem_tensor_init(&tensor, TANDEM_F32, moved(data), 2, shape, e); });
  Moved<tandem_engine_options> options(small_engine_options());
  auto** engine = out.at<tandem_engine*>();
  Cases(w, "tandem_engine_create")
      .add("engine", [&](auto** e) { return tandem_engine_create(moved(engine), nullptr, e); })
      .add("options", [&](auto** e) { return tandem_engine_create(engine, options.get(), e); });
  Cases(w, "tandem_engine_report").add("needed_bytes", [&](auto** e) {
    return tandem_engine_report(out.at<char>(), 8, moved(out.at<size_t>(64)), w.engine, e);
  });
  out.expect_untouched();
}

void test_model(void**) {
  World w;
  Outputs out;
  auto** model = out.at<tandem_model*>();
  Moved<tandem_layer_options> layers(plain_layer());
  const std::vector<float> floats(4096, 0.5f);
  const std::vector<uint16_t> weights(static_cast<size_t>(kKvHeads * kDim * 64));
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  projection.hidden_dim = 64;
  projection.w_type = TANDEM_BF16;
  projection.w_k = projection.w_v = weights.data();
  projection.norm = TANDEM_NORM_LAYER;
  Moved<tandem_layer_projection> moved_projection(projection);
  const auto with_layer = [&](std::function<void(tandem_layer_options&)> change) {
    return [&, change](tandem_error** e) {
      tandem_layer_options layer = plain_layer();
      change(layer);
      return tandem_model_create(model, &layer, 1, e);
    };
  };
  const auto with = [&](std::function<void(tandem_layer_projection&)> change) {
    return [&, change](tandem_error** e) {
      tandem_layer_options layer = plain_layer();
      tandem_layer_projection changed = projection;
      change(changed);
      layer.projection = &changed;
      return tandem_model_create(model, &layer, 1, e);
    };
  };
  Cases(w, "tandem_model_create")
      .add("model",
           [&](auto** e) {
             const auto l = plain_layer();
             return tandem_model_create(moved(model), &l, 1, e);
           })
      .add("layers", [&](auto** e) { return tandem_model_create(model, layers.get(), 1, e); })
      .add("layers[0].sinks", with_layer([&](auto& l) { l.sinks = moved(floats.data()); }))
      .add("layers[0].rope_inv_freq", with_layer([&](auto& l) {
             l.rope = TANDEM_ROPE_HALVES;
             l.rope_inv_freq = moved(floats.data());
           }))
      .add("layers[0].projection", with_layer([&](auto& l) { l.projection = moved_projection.get(); }))
      .add("layers[0].projection.b_k", with([&](auto& p) { p.b_k = moved(floats.data()); }))
      .add("layers[0].projection.b_v", with([&](auto& p) { p.b_v = moved(floats.data()); }))
      .add("layers[0].projection.norm_weight", with([&](auto& p) { p.norm_weight = moved(floats.data()); }))
      .add("layers[0].projection.norm_bias", with([&](auto& p) { p.norm_bias = moved(floats.data()); }));
  out.expect_untouched();
}

void test_cache_and_sequences(void**) {
  World w;
  Outputs out;
  auto** cache = out.at<tandem_cache*>();
  Moved<tandem_cache_options> options(TANDEM_CACHE_OPTIONS_INIT);
  const int32_t types[kLayers] = {TANDEM_BF16, TANDEM_BF16};
  const auto with = [&](std::function<void(tandem_cache_options&)> change) {
    return [&, change](tandem_error** e) {
      tandem_cache_options changed = TANDEM_CACHE_OPTIONS_INIT;
      change(changed);
      return tandem_cache_create(cache, w.engine, w.model, &changed, e);
    };
  };
  Cases(w, "tandem_cache_create")
      .add("cache", [&](auto** e) { return tandem_cache_create(moved(cache), w.engine, w.model, nullptr, e); })
      .add("options", [&](auto** e) { return tandem_cache_create(cache, w.engine, w.model, options.get(), e); })
      .add("layer_k_types", with([&](auto& o) { o.layer_k_types = moved(types); }))
      .add("layer_v_types", with([&](auto& o) { o.layer_v_types = moved(types); }));
  auto* number = moved(out.at<int64_t>(64));
  const Tensor k({1, kKvHeads, kDim}), v({1, kKvHeads, kDim});
  Moved<tandem_tensor> moved_k(k.view), moved_v(v.view);
  Cases(w, "tandem_sequence_create").add("sequence", [&](auto** e) { return tandem_sequence_create(number, w.cache, e); });
  Cases(w, "tandem_sequence_fork").add("fork", [&](auto** e) {
    return tandem_sequence_fork(number, w.cache, w.sequence, e);
  });
  Cases(w, "tandem_sequence_length").add("n_tokens", [&](auto** e) {
    return tandem_sequence_length(number, w.cache, w.sequence, 0, e);
  });
  Cases(w, "tandem_sequence_digest").add("digest", [&](auto** e) {
    return tandem_sequence_digest(reinterpret_cast<uint64_t*>(number), w.cache, w.sequence, e);
  });
  Cases(w, "tandem_sequence_append")
      .add("k", [&](auto** e) { return tandem_sequence_append(w.cache, w.other, 0, moved_k.get(), &v.view, nullptr, e); })
      .add("v", [&](auto** e) { return tandem_sequence_append(w.cache, w.other, 0, &k.view, moved_v.get(), nullptr, e); });
  Cases(w, "tandem_sequence_read")
      .add("k", [&](auto** e) { return tandem_sequence_read(moved_k.get(), &v.view, w.cache, w.sequence, 0, 0, e); })
      .add("v", [&](auto** e) { return tandem_sequence_read(&k.view, moved_v.get(), w.cache, w.sequence, 0, 0, e); });
  Moved<tandem_cache_stats> stats(TANDEM_CACHE_STATS_INIT);
  Cases(w, "tandem_cache_get_stats").add("stats", [&](auto** e) { return tandem_cache_get_stats(stats.get(), w.cache, e); });
  out.expect_untouched();
}

// Hidden states of a layer that keeps them.
void test_hidden_states(void**) {
  World w;
  tandem_layer_options layer = plain_layer();
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  const std::vector<uint16_t> weights(static_cast<size_t>(kKvHeads * kDim * 64));
  projection.hidden_dim = 64;
  projection.w_type = TANDEM_BF16;
  projection.w_k = projection.w_v = weights.data();
  layer.projection = &projection;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.x_type = TANDEM_BF16;
  OK(tandem_model_create, &model, &layer, 1);
  OK(tandem_cache_create, &cache, w.engine, model, &options);
  OK(tandem_session_create, &session, cache, nullptr);
  OK(tandem_sequence_create, &sequence, cache);
  LayerCall call(sequence, 0, 1, 3);
  const Tensor x({1, 64});
  Moved<tandem_tensor> moved_x(x.view);
  Cases(w, "tandem_sequence_append_x").add("x", [&](auto** e) {
    return tandem_sequence_append_x(cache, sequence, 0, &call.k.view, &call.v.view, moved_x.get(), nullptr, e);
  });
  Cases(w, "tandem_sequence_read_x").add("x", [&](auto** e) {
    return tandem_sequence_read_x(moved_x.get(), cache, sequence, 0, 0, e);
  });
  call.args.x = moved_x.get();
  Cases(w, "tandem_attend").add("x", [&](auto** e) { return tandem_attend(session, &call.args, e); });
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
}

void test_session(void**) {
  World w;
  Outputs out;
  auto** session = out.at<tandem_session*>();
  Moved<tandem_session_options> options(world_session_options());
  Cases(w, "tandem_session_create")
      .add("session", [&](auto** e) { return tandem_session_create(moved(session), w.cache, nullptr, e); })
      .add("options", [&](auto** e) { return tandem_session_create(session, w.cache, options.get(), e); });
  const int64_t numbers[2] = {0, 1}, q_len = 1;
  Cases(w, "tandem_session_commit").add("kept_idx", [&](auto** e) {
    return tandem_session_commit(w.session, w.sequence, moved(numbers), 1, e);
  });
  Cases(w, "tandem_step_begin")
      .add("sequences", [&](auto** e) { return tandem_step_begin(w.session, moved(&w.sequence), &q_len, 1, nullptr, e); })
      .add("q_lens", [&](auto** e) { return tandem_step_begin(w.session, &w.sequence, moved(&q_len), 1, nullptr, e); });
  auto *tokens = out.at<int64_t>(64), *n_kept = out.at<int64_t>(8192);
  auto* maw = out.at<float>(4096);
  const auto select = [&](int64_t* t, float* m, int64_t* n, tandem_error** e) {
    return tandem_session_selection(t, m, 100, n, w.session, w.sequence, 0, 0, 0, e);
  };
  Cases(w, "tandem_session_selection")
      .add("token_idx", [&](auto** e) { return select(moved(tokens), maw, n_kept, e); })
      .add("maw", [&](auto** e) { return select(tokens, moved(maw), n_kept, e); })
      .add("n_kept", [&](auto** e) { return select(tokens, maw, moved(n_kept), e); });
  Moved<tandem_session_stats> stats(TANDEM_SESSION_STATS_INIT);
  Cases(w, "tandem_session_get_stats").add("stats", [&](auto** e) {
    return tandem_session_get_stats(stats.get(), w.session, e);
  });
  out.expect_untouched();
}

void test_attend(void**) {
  World w;
  const auto with = [&](std::function<void(LayerCall&)> change) {
    return [&, change](tandem_error** e) {
      LayerCall call(w.sequence, 0, 2, 5);
      change(call);
      return tandem_attend(w.session, &call.args, e);
    };
  };
  const int32_t parents[3] = {-1, 0, 0}, cancel[2] = {};
  Cases cases(w, "tandem_attend");
  const auto tensor = [&](const char* name, const tandem_tensor* tandem_attend_args::*member) {
    cases.add(name, with([member](LayerCall& call) {
                // Lives as long as the test, because the call runs after this function has returned.
                static std::vector<std::unique_ptr<Moved<tandem_tensor>>> kept;
                kept.push_back(std::make_unique<Moved<tandem_tensor>>(*(call.args.*member)));
                call.args.*member = kept.back()->get();
              }));
  };
  tensor("q", &tandem_attend_args::q);
  tensor("k", &tandem_attend_args::k);
  tensor("v", &tandem_attend_args::v);
  tensor("o", &tandem_attend_args::o);
  tensor("lse", &tandem_attend_args::lse);
  cases
      .add("args",
           [&](auto** e) {
             const LayerCall call(w.sequence, 0, 2, 5);
             Moved<tandem_attend_args> args(call.args);
             return tandem_attend(w.session, args.get(), e);
           })
      .add("sequences", with([](LayerCall& call) { call.args.sequences = moved(call.args.sequences); }))
      .add("q_lens", with([](LayerCall& call) { call.args.q_lens = moved(call.args.q_lens); }))
      .add("parent_idx", with([&](LayerCall& call) {
             call.args.flags = TANDEM_ATTEND_SPECULATIVE;
             call.args.parent_idx = moved(parents);
           }))
      .add("cancel", with([&](LayerCall& call) { call.args.cancel = moved(cancel); }))
      .add("q.data", with([](LayerCall& call) {
             call.q.values.push_back(0);
             call.q.view.data = moved(call.q.values.data());
           }));
}

void test_merge(void**) {
  World w;
  const Tensor o({1, 2, kDim}), lse({1, 2}), o_out({1, 2, kDim}), lse_out({1, 2});
  const tandem_tensor* const os[2] = {&o.view, &o.view};
  const tandem_tensor* const lses[2] = {&lse.view, &lse.view};
  Moved<tandem_tensor> moved_o(o.view), moved_lse(lse.view), moved_o_out(o_out.view), moved_lse_out(lse_out.view);
  const tandem_tensor* const moved_os[1] = {moved_o.get()};
  const tandem_tensor* const moved_lses[1] = {moved_lse.get()};
  const auto merge = [&](const tandem_tensor* to, const tandem_tensor* lse_to, const tandem_tensor* const* o_of,
                         const tandem_tensor* const* lse_of,
                         tandem_error** e) { return tandem_merge(to, lse_to, o_of, lse_of, 1, w.engine, nullptr, e); };
  Cases(w, "tandem_merge")
      .add("o_out", [&](auto** e) { return merge(moved_o_out.get(), &lse_out.view, os, lses, e); })
      .add("lse_out", [&](auto** e) { return merge(&o_out.view, moved_lse_out.get(), os, lses, e); })
      .add("o", [&](auto** e) { return merge(&o_out.view, &lse_out.view, moved(os), lses, e); })
      .add("lse", [&](auto** e) { return merge(&o_out.view, &lse_out.view, os, moved(lses), e); })
      .add("o[0]", [&](auto** e) { return merge(&o_out.view, &lse_out.view, moved_os, lses, e); })
      .add("lse[0]", [&](auto** e) { return merge(&o_out.view, &lse_out.view, os, moved_lses, e); });
}

void test_plans(void**) {
  World w;
  Outputs out;
  tandem_memory_plan memory = TANDEM_MEMORY_PLAN_INIT;
  tandem_route_plan route = TANDEM_ROUTE_PLAN_INIT;
  Moved<tandem_memory_plan> moved_memory(memory);
  Moved<tandem_route_plan> moved_route(route);
  Moved<tandem_cache_options> cache(TANDEM_CACHE_OPTIONS_INIT);
  Moved<tandem_session_options> session(world_session_options());
  Moved<tandem_layer_options> layer(plain_layer());
  const int64_t lens[2] = {64, 64};
  const auto plan = [&](tandem_memory_plan* to, const tandem_cache_options* c, const tandem_session_options* s,
                        const int64_t* kv_lens,
                        tandem_error** e) { return tandem_plan_memory(to, w.engine, w.model, c, s, kv_lens, 1, e); };
  Cases(w, "tandem_plan_memory")
      .add("plan", [&](auto** e) { return plan(moved_memory.get(), nullptr, nullptr, lens, e); })
      .add("cache", [&](auto** e) { return plan(&memory, cache.get(), nullptr, lens, e); })
      .add("session", [&](auto** e) { return plan(&memory, nullptr, session.get(), lens, e); })
      .add("kv_lens", [&](auto** e) { return plan(&memory, nullptr, nullptr, moved(lens), e); });
  Cases(w, "tandem_plan_report")
      .add("plan", [&](auto** e) { return tandem_plan_report(nullptr, 0, nullptr, moved_memory.get(), e); })
      .add("needed_bytes", [&](auto** e) { return tandem_plan_report(nullptr, 0, moved(out.at<size_t>()), &memory, e); });
  Cases(w, "tandem_plan")
      .add("plan", [&](auto** e) { return tandem_plan(moved_route.get(), w.session, 0, lens, lens, 1, e); })
      .add("kv_lens", [&](auto** e) { return tandem_plan(&route, w.session, 0, moved(lens), lens, 1, e); })
      .add("q_lens", [&](auto** e) { return tandem_plan(&route, w.session, 0, lens, moved(lens), 1, e); });
  Cases(w, "tandem_route_report")
      .add("plan", [&](auto** e) { return tandem_route_report(nullptr, 0, nullptr, moved_route.get(), e); })
      .add("needed_bytes", [&](auto** e) { return tandem_route_report(nullptr, 0, moved(out.at<size_t>()), &route, e); });
  Cases(w, "tandem_supports")
      .add("layer", [&](auto** e) { return tandem_supports(w.engine, layer.get(), nullptr, nullptr, e); })
      .add("cache", [&](auto** e) { return tandem_supports(w.engine, nullptr, cache.get(), nullptr, e); })
      .add("session", [&](auto** e) { return tandem_supports(w.engine, nullptr, nullptr, session.get(), e); });
  out.expect_untouched();
}

void test_weights(void**) {
  World w;
  Outputs out;
  auto** weights = out.at<tandem_weights*>();
  const void* const data[2] = {&w, &w};
  const int64_t bytes[2] = {8, 8};
  Moved<tandem_weights_options> options(TANDEM_WEIGHTS_OPTIONS_INIT);
  Cases(w, "tandem_weights_create")
      .add("weights", [&](auto** e) { return tandem_weights_create(moved(weights), w.engine, data, bytes, 1, nullptr, e); })
      .add("options", [&](auto** e) { return tandem_weights_create(weights, w.engine, data, bytes, 1, options.get(), e); })
      .add("data", [&](auto** e) { return tandem_weights_create(weights, w.engine, moved(data), bytes, 1, nullptr, e); })
      .add("n_bytes", [&](auto** e) { return tandem_weights_create(weights, w.engine, data, moved(bytes), 1, nullptr, e); });
  Cases(w, "tandem_weights_use").add("data", [&](auto** e) {
    return tandem_weights_use(moved(out.at<void*>(64)), nullptr, 0, nullptr, e);
  });
  Moved<tandem_weights_stats> stats(TANDEM_WEIGHTS_STATS_INIT);
  Cases(w, "tandem_weights_get_stats").add("stats", [&](auto** e) {
    return tandem_weights_get_stats(stats.get(), nullptr, e);
  });
  out.expect_untouched();
}

// If `error` itself is misaligned, the error object cannot be returned.
void test_error(void**) {
  World w;
  Outputs out;
  int64_t length = 0;
  assert_int_equal(tandem_sequence_length(&length, w.cache, w.sequence, 0, moved(out.at<tandem_error*>())), kInvalid);
  assert_int_equal(length, 0);
  out.expect_untouched();
}

// A function that only fills in a struct works at any address.
template <typename Options>
void check_init(void (*init)(Options*), const Options& expected) {
  Moved<Options> options(Options{});
  init(options.get());
  assert_memory_equal(static_cast<void*>(options.get()), &expected, sizeof expected);
}

void test_init(void**) {
  check_init<tandem_engine_options>(tandem_engine_options_init, TANDEM_ENGINE_OPTIONS_INIT);
  check_init<tandem_layer_options>(tandem_layer_options_init, TANDEM_LAYER_OPTIONS_INIT);
  check_init<tandem_layer_projection>(tandem_layer_projection_init, TANDEM_LAYER_PROJECTION_INIT);
  check_init<tandem_cache_options>(tandem_cache_options_init, TANDEM_CACHE_OPTIONS_INIT);
  check_init<tandem_session_options>(tandem_session_options_init, TANDEM_SESSION_OPTIONS_INIT);
  check_init<tandem_attend_args>(tandem_attend_args_init, TANDEM_ATTEND_ARGS_INIT);
  check_init<tandem_attend_tensors_args>(tandem_attend_tensors_args_init, TANDEM_ATTEND_TENSORS_ARGS_INIT);
  check_init<tandem_head_pattern>(tandem_head_pattern_init, TANDEM_HEAD_PATTERN_INIT);
  check_init<tandem_patterns>(tandem_patterns_init, TANDEM_PATTERNS_INIT);
  check_init<tandem_pattern_file_options>(tandem_pattern_file_options_init, TANDEM_PATTERN_FILE_OPTIONS_INIT);
  check_init<tandem_weights_options>(tandem_weights_options_init, TANDEM_WEIGHTS_OPTIONS_INIT);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_tensor_and_engine),
      cmocka_unit_test(test_model),
      cmocka_unit_test(test_cache_and_sequences),
      cmocka_unit_test(test_hidden_states),
      cmocka_unit_test(test_session),
      cmocka_unit_test(test_attend),
      cmocka_unit_test(test_merge),
      cmocka_unit_test(test_plans),
      cmocka_unit_test(test_weights),
      cmocka_unit_test(test_error),
      cmocka_unit_test(test_init),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
