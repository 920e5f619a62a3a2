// SPDX-License-Identifier: MIT
// An engine with or without the stand-in as its device, and calls on it.
#pragma once

#include <algorithm>
#include <memory>

#include "api/api_world.h"
#include "device/open_device.h"
#include "device/stand_in_host.h"

namespace tandem_test {

inline constexpr int64_t kWindow = 64, kPrompt = 200;
inline constexpr int32_t kLayer = 0;

// Returns the number of tokens outside the window of a session with kWindow, for a sequence of this length before a call.
inline int64_t outside_of(int64_t length) { return std::max<int64_t>(0, length - kWindow) / (kWindow / 8) * (kWindow / 8); }

inline std::unique_ptr<tandem::test::OpenDevice> device;

inline void wait_for(void* stream) {
  tandem::DeviceError error;
  device->must(device->table->wait(device->self, stream, &error), error);
}

inline const stand_in::Controls& controls = *stand_in::find_function<stand_in::ControlsFn>(stand_in::kControlsSymbol)();
inline const stand_in::Counts& counts = *stand_in::find_function<stand_in::CountsFn>(stand_in::kCountsSymbol)();

// Makes the engine of a Side. Tests that watch their engine replace this function.
inline tandem_engine* (*make_engine)(const tandem_engine_options& options) = [](const tandem_engine_options& options) {
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, &options);
  return engine;
};

// An engine, one layer of 4 query heads and 2 KV heads, a session with a small window, and a sequence.
struct Side {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  bool is_second = false;

  explicit Side(bool has_device, const char* policy = "all", int64_t device_cap_bytes = 0, int32_t n_layers = 1,
                int64_t window_tokens = kWindow, int32_t rope = TANDEM_ROPE_CALLER) {
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = 2;
    if (has_device) {
      options.backend = stand_in::kName;
      options.backend_path = STAND_IN_MODULES "/libtandem-standin.so";
    }
    engine = make_engine(options);
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = kQHeads;
    layer.n_kv_heads = kKvHeads;
    layer.k_head_dim = kDim;
    layer.rope = rope;
    const std::vector<tandem_layer_options> layers(static_cast<size_t>(n_layers), layer);
    OK(tandem_model_create, &model, layers.data(), n_layers);
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.device_cap_bytes = device_cap_bytes;
    OK(tandem_cache_create, &cache, engine, model, &cache_options);
    tandem_session_options session_options = options_of(policy);
    session_options.window_tokens = window_tokens;
    OK(tandem_session_create, &session, cache, &session_options);
    OK(tandem_sequence_create, &sequence, cache);
  }
  Side(const Side&) = delete;
  // Makes another cache, session and sequence on the engine and model of `first`.
  Side(const Side& first, const char* policy, int64_t window_tokens = kWindow)
      : engine(first.engine), model(first.model), is_second(true) {
    const tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    OK(tandem_cache_create, &cache, engine, model, &cache_options);
    tandem_session_options session_options = options_of(policy);
    session_options.window_tokens = window_tokens;
    OK(tandem_session_create, &session, cache, &session_options);
    OK(tandem_sequence_create, &sequence, cache);
  }
  ~Side() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    if (is_second) return;
    tandem_model_release(model);
    tandem_engine_release(engine);
  }

  static tandem_session_options options_of(const char* policy) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = policy;
    options.window_tokens = kWindow;
    options.halo_tokens = 2;  // with a longer halo a strong key would keep all other keys here
    options.beta = 0.5f;      // with a larger beta these random queries would keep no key
    return options;
  }
  int64_t length(int32_t layer_idx = kLayer) const {
    int64_t n = -1;
    OK(tandem_sequence_length, &n, cache, sequence, layer_idx);
    return n;
  }
  tandem_session_stats stats() const {
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &stats, session);
    return stats;
  }
  uint64_t digest() const {
    uint64_t digest = 0;
    OK(tandem_sequence_digest, &digest, cache, sequence);
    return digest;
  }
};

// Returns the bytes of device memory in the plan.
inline int64_t planned_bytes(const tandem_memory_plan& plan) {
  return plan.device_window_bytes + plan.device_work_bytes + plan.device_stream_bytes + plan.device_weights_bytes;
}

// Asserts that the cache holds exactly the device memory of the plan.
inline void assert_held(const Side& side, const tandem_memory_plan& plan) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  assert_int_equal(stats.device_window_bytes, plan.device_window_bytes);
  assert_int_equal(stats.device_work_bytes, plan.device_work_bytes);
  assert_int_equal(stats.device_stream_bytes, plan.device_stream_bytes);
  assert_int_equal(stats.device_weights_bytes, plan.device_weights_bytes);
}

// Asserts, besides, that the cache's peak of device memory is the plan's sum.
inline void assert_never_more(const Side& side, const tandem_memory_plan& plan) {
  assert_held(side, plan);
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  assert_int_equal(stats.device_peak_bytes, planned_bytes(plan));
}

// Replaces the side's model, cache, session and sequence. The layer's types and other options come from `layer`, heads and
// dims stay the side's.
inline void make_anew(Side* side, tandem_layer_options layer, int32_t n_layers, const tandem_cache_options& cache_options,
                      const tandem_session_options& session_options) {
  tandem_session_release(side->session);
  tandem_cache_release(side->cache);
  tandem_model_release(side->model);
  side->session = nullptr;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  const std::vector<tandem_layer_options> layers(static_cast<size_t>(n_layers), layer);
  OK(tandem_model_create, &side->model, layers.data(), n_layers);
  OK(tandem_cache_create, &side->cache, side->engine, side->model, &cache_options);
  OK(tandem_session_create, &side->session, side->cache, &session_options);
  OK(tandem_sequence_create, &side->sequence, side->cache);
}

inline void change_session(Side* side, const tandem_session_options& options) {
  tandem_session_release(side->session);
  side->session = nullptr;
  OK(tandem_session_create, &side->session, side->cache, &options);
}

// Asserts that tandem_session_create() refuses these options.
inline void refuse_session(const Side& side, const tandem_session_options& options, int32_t status, const char* field,
                           const char* text) {
  tandem_session* session = nullptr;
  tandem_error* error = nullptr;
  const int32_t got = tandem_session_create(&session, side.cache, &options, &error);
  assert_refused(got, error, status, field, text);
}

// Asserts that tandem_step_begin() refuses a planned step of a session that streams, before it does anything.
inline void refuse_step(const Side& side) {
  void* stream = controls.create_stream();
  const int64_t one = 1;
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_begin(side.session, &side.sequence, &one, 1, stream, &error), TANDEM_ERROR_UNSUPPORTED);
  assert_string_equal(tandem_error_field(error), "route");
  tandem_error_release(error);
  assert_true(controls.destroy_stream(stream));
}

// The tensors q, k, v and o of n tokens. A seed always gives the same numbers.
struct Call {
  int64_t n;
  Tensor q, k, v, o;
  std::vector<void*> memory;

  Call(int64_t n_tokens, int64_t seed)
      : n(n_tokens),
        q({n, kQHeads, kDim}, seed),
        k({n, kKvHeads, kDim}, seed + 1),
        v({n, kKvHeads, kDim}, seed + 2),
        o({n, kQHeads, kDim}, seed + 3) {}
  Call(const Call&) = delete;
  ~Call() {
    for (void* data : memory) device->release(data);
  }
  void to_device() {
    for (Tensor* tensor : {&q, &k, &v, &o}) {
      const auto bytes = static_cast<int64_t>(tensor->values.size() * sizeof(float));
      memory.push_back(device->allocate(bytes));
      device->upload(memory.back(), tensor->values.data(), bytes);
      tensor->view.device_type = TANDEM_DEVICE_CUDA;
      tensor->view.data = memory.back();
    }
  }
  tandem_attend_args args(const Side& side, int32_t layer_idx = kLayer) const {
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = layer_idx;
    args.n_sequences = 1;
    args.sequences = &side.sequence;
    args.q_lens = &n;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o.view;
    return args;
  }
  // Fills o with NaN before the same tensors are used again.
  void forget_output() const {
    const std::vector<float> none(o.values.size(), NAN);
    device->upload(memory[3], none.data(), static_cast<int64_t>(none.size() * sizeof(float)));
  }
  std::vector<float> output() const {
    if (memory.empty()) return o.values;
    std::vector<float> values(o.values.size());
    device->wait();
    device->download(values.data(), memory[3], static_cast<int64_t>(values.size() * sizeof(float)));
    return values;
  }
};

inline void attend(const Side& side, Call& call, int32_t layer_idx = kLayer, void* stream = nullptr) {
  tandem_attend_args args = call.args(side, layer_idx);
  args.stream = stream;
  OK(tandem_attend, side.session, &args);
}

// Returns the status of a call during which the nth call of one function of the device fails.
inline int32_t attend_failing(const Side& side, const tandem_attend_args& args, stand_in::Call failing, int64_t nth,
                              int64_t delay_ns = 0, int32_t answer = TANDEM_ERROR_BACKEND) {
  controls.set_delay(delay_ns);
  controls.fail_call(failing, nth, answer);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  tandem_error_release(error);
  controls.fail_call(failing, INT64_MAX, TANDEM_OK);
  return status;
}

inline void assert_close(const std::vector<float>& got, const std::vector<float>& wanted) {
  assert_int_equal(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    if (!(std::fabs(got[i] - wanted[i]) <= 1e-5f)) fail_msg("element %zu is %g, not %g", i, got[i], wanted[i]);
}

// A call and the next one, as device tensors and as host tensors. The host calls are made here, so their outputs are known.
struct RetriedCalls {
  Call call, next, on_host, next_on_host;

  // twin: a side without a device. Its answers do not change, so they are computed once.
  RetriedCalls(const Side& twin, int64_t n, int64_t n_next)
      : call(n, 2), next(n_next, 7), on_host(n, 2), next_on_host(n_next, 7) {
    for (Call* one : {&call, &next}) one->to_device();
    for (Call* one : {&on_host, &next_on_host}) attend(twin, *one);
  }
};

// Makes the call to the device fail at every place in turn, for each kind of function. Each time the call must report the
// failure, its append must be rolled back, and the next try must succeed. make(): returns a side that is ready for the
// calls. next_nth(nth): returns which call of the function fails after the nth.
template <typename Make>
void take_back_what_fails(std::initializer_list<stand_in::Call> kinds, const RetriedCalls& calls, Make make,
                          int64_t (*next_nth)(int64_t nth)) {
  for (const stand_in::Call failing : kinds) {
    int n_failed = 0;
    for (int64_t nth = 1;; nth = next_nth(nth)) {
      const auto side = make();
      const int64_t length = side->length();
      const uint64_t before = side->digest();
      for (const Call* one : {&calls.call, &calls.next}) one->forget_output();
      const auto attend_again = [&](const Call& call) {
        const tandem_attend_args args = call.args(*side);
        OK(tandem_attend, side->session, &args);
      };
      const int32_t status = attend_failing(*side, calls.call.args(*side), failing, nth, nth % 2 * 50'000);
      controls.set_delay(0);
      if (status != TANDEM_OK) {
        ++n_failed;
        assert_int_equal(status, TANDEM_ERROR_BACKEND);
        assert_int_equal(side->length(), length);
        assert_true(side->digest() == before);
        attend_again(calls.call);
      }
      assert_close(calls.call.output(), calls.on_host.output());
      attend_again(calls.next);
      assert_close(calls.next.output(), calls.next_on_host.output());
      if (status == TANDEM_OK) break;
    }
    if (n_failed == 0) fail_msg("call %d was never made to fail", failing);
  }
}

// Attends the same call on both sides and compares the outputs.
inline void attend_twins(const Side& side, const Side& twin, int64_t n_tokens, int64_t seed) {
  Call on_device(n_tokens, seed), on_host(n_tokens, seed);
  on_device.to_device();
  attend(side, on_device);
  attend(twin, on_host);
  assert_close(on_device.output(), on_host.output());
}

inline int open_stand_in(void**) {
  device = std::make_unique<tandem::test::OpenDevice>(STAND_IN_MODULES "/libtandem-standin.so");
  return 0;
}

inline int close_stand_in(void**) {
  device.reset();
  return 0;
}

// Ends a test. Fails if the stand-in found a fault, and resets the stand-in.
inline int forget(void**) {
  const bool is_right = *controls.fault() == '\0';
  controls.reset();
  return is_right ? 0 : -1;
}

}  // namespace tandem_test
