// SPDX-License-Identifier: MIT
// Shared by the tests of the C ABI: an engine, a model, a filled cache, a session with selections, and a check that a
// refused call explains itself and changes nothing.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tandem/tandem.h"
#include "with_cmocka.h"

namespace tandem_test {

// Returns small numbers that differ from element to element and are the same in every run.
inline float noise(int64_t i, int64_t seed = 0) {
  auto x = static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed + 1) * 0xbf58476d1ce4e5b9u;
  x ^= x >> 31;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 29;
  return static_cast<float>(static_cast<double>(x >> 40) / (1 << 24) - 0.5);
}

// Fails the test with the library's error message unless the status is TANDEM_OK.
inline void expect_ok(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) {
    assert_null(error);
    return;
  }
  const std::string message = tandem_error_message(error);
  tandem_error_release(error);
  print_error("%s: %s\n", tandem_status_name(status), message.c_str());
  _fail(__FILE__, __LINE__);
}
#define OK(function, ...)                                       \
  do {                                                          \
    tandem_error* ok_error = nullptr;                           \
    const int32_t ok_status = function(__VA_ARGS__, &ok_error); \
    ::tandem_test::expect_ok(ok_status, ok_error);              \
  } while (0)

// Asserts status, field and text of an error, then releases the error.
inline void assert_refused(int32_t got, tandem_error* error, int32_t status, const char* field, const char* text) {
  const std::string message = tandem_error_message(error), named = tandem_error_field(error);
  tandem_error_release(error);
  if (got != status || named != field || message.find(text) == std::string::npos)
    fail_msg("%d \"%s\" (%s) instead of %d \"%s\" (%s)", got, message.c_str(), named.c_str(), status, text, field);
}

// A change to a valid tensor, with the member and the value that the refusal must name.
struct TensorCase {
  int32_t status;
  const char* member;
  const char* value;
  std::function<void(tandem_tensor&)> change;
};

// An owned f32 tensor of two or three dimensions.
struct Tensor {
  std::vector<float> values;
  tandem_tensor view = {};

  Tensor() = default;
  explicit Tensor(std::vector<int64_t> shape, int64_t seed = 0) {
    int64_t n = 1;
    for (const int64_t length : shape) n *= length;
    for (int64_t i = 0; i < n; ++i) values.push_back(noise(i, seed));
    OK(tandem_tensor_init, &view, TANDEM_F32, values.data(), static_cast<int32_t>(shape.size()), shape.data());
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
};

constexpr int32_t kQHeads = 4, kKvHeads = 2, kDim = 64, kLayers = 2;
constexpr int64_t kTokens = 90;

// Everything that a call can be given. Layer 0 is plain. In layer 1 V aliases K and the library rotates.
struct World {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;  // kTokens tokens in both layers
  int64_t other = 0;     // empty
  int64_t dropped = 0;

  explicit World(const tandem_engine_options* options = nullptr);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;
};

inline tandem_layer_options plain_layer() {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  return layer;
}

inline std::vector<tandem_layer_options> world_layers() {
  std::vector<tandem_layer_options> layers(kLayers, plain_layer());
  layers[1].v_aliases_k = 1;
  layers[1].rope = TANDEM_ROPE_HALVES;
  return layers;
}

inline tandem_session_options world_session_options() {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = "hgca";
  options.window_tokens = 32;
  options.sink_tokens = 4;
  return options;
}

inline tandem_engine_options small_engine_options() {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = 2;
  options.pin_threads = 0;
  return options;
}

// An append of q_len tokens to one layer, with its tensors. The seeds of q, k and v are consecutive numbers.
struct LayerCall {
  Tensor q, k, v, o, lse;
  int64_t sequence, q_len;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;

  LayerCall(int64_t of, int32_t layer_idx, int64_t n, int64_t seed)
      : q({n, kQHeads, kDim}, seed),
        k({n, kKvHeads, kDim}, seed + 1),
        v({n, kKvHeads, kDim}, seed + 2),
        o({n, kQHeads, kDim}),
        lse({n, kQHeads}),
        sequence(of),
        q_len(n) {
    args.layer_idx = layer_idx;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &q_len;
    args.q = &q.view;
    args.k = &k.view;
    args.v = layer_idx == 0 ? &v.view : nullptr;
    args.o = &o.view;
    args.lse = &lse.view;
  }
  LayerCall(const LayerCall&) = delete;  // args points into it
};

// Attends and ignores the outputs.
inline int32_t attend_once(const World& world, int64_t sequence, int32_t layer_idx, int64_t q_len, int64_t seed,
                           tandem_error** error) {
  const LayerCall call(sequence, layer_idx, q_len, seed);
  return tandem_attend(world.session, &call.args, error);
}

inline World::World(const tandem_engine_options* options) {
  const tandem_engine_options small = small_engine_options();
  OK(tandem_engine_create, &engine, options == nullptr ? &small : options);
  const auto layers = world_layers();
  OK(tandem_model_create, &model, layers.data(), kLayers);
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.page_tokens = 16;
  OK(tandem_cache_create, &cache, engine, model, &cache_options);
  const tandem_session_options session_options = world_session_options();
  OK(tandem_session_create, &session, cache, &session_options);
  OK(tandem_sequence_create, &sequence, cache);
  OK(tandem_sequence_create, &other, cache);
  OK(tandem_sequence_create, &dropped, cache);
  OK(tandem_sequence_drop, cache, dropped);
  for (int32_t l = 0; l < kLayers; ++l) {
    OK(attend_once, *this, sequence, l, kTokens - 2, 0);
    for (int i = 0; i < 2; ++i) OK(attend_once, *this, sequence, l, 1, 10 + i);
  }
}

inline World::~World() {
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
}

// State that a refused call must not change: content, statistics, and every byte that a call could have written.
struct Snapshot {
  uint64_t digest = 0;
  int64_t lengths[kLayers] = {};
  tandem_session_stats session = TANDEM_SESSION_STATS_INIT;
  tandem_cache_stats cache = TANDEM_CACHE_STATS_INIT;

  explicit Snapshot(const World& world) {
    OK(tandem_engine_drain, world.engine, -1);
    OK(tandem_sequence_digest, &digest, world.cache, world.sequence);
    for (int32_t l = 0; l < kLayers; ++l) OK(tandem_sequence_length, &lengths[l], world.cache, world.sequence, l);
    OK(tandem_session_get_stats, &session, world.session);
    OK(tandem_cache_get_stats, &cache, world.cache);
  }
  void expect_same(const Snapshot& now) const {
    assert_true(digest == now.digest);
    assert_memory_equal(lengths, now.lengths, sizeof lengths);
    assert_memory_equal(&session, &now.session, sizeof session);
    assert_memory_equal(&cache, &now.cache, sizeof cache);
  }
};

// Every byte of a refused call's outputs, before and after the call.
constexpr unsigned char kUntouched = 0xa5;
struct Outputs {
  alignas(64) unsigned char bytes[64 * 1024];
  Outputs() { std::memset(bytes, kUntouched, sizeof bytes); }
  template <typename T>
  T* at(size_t offset = 0) {
    return reinterpret_cast<T*>(bytes + offset);
  }
  void expect_untouched() const {
    for (const unsigned char byte : bytes) assert_int_equal(byte, kUntouched);
  }
};

// A call that must be refused. Its message must begin with the function's name and contain the field and the value.
struct Refused {
  const char* name;      // name of the case
  const char* function;  // "tandem_attend"
  int32_t status;
  const char* field;
  const char* value;  // as the message shows it
  std::function<int32_t(tandem_error**)> call;
};

// Reports every mismatch before the test fails, so that one run shows all of them.
inline int check_refused(const Refused& refused) {
  tandem_error* error = nullptr;
  const int32_t status = refused.call(&error);
  const std::string message = tandem_error_message(error), field = tandem_error_field(error);
  const bool consistent = tandem_error_status(error) == status;
  tandem_error_release(error);
  const bool silent = refused.call(nullptr) == status;
  const bool prefixed = message.rfind(std::string(refused.function) + ": ", 0) == 0;
  const bool named =
      field == refused.field && message.find(refused.field, std::strlen(refused.function)) != std::string::npos;
  const bool valued = message.find(refused.value, std::strlen(refused.function)) != std::string::npos;
  const bool one_line = message.find('\n') == std::string::npos;
  if (status == refused.status && consistent && silent && prefixed && named && valued && one_line) return 0;
  print_error("%s: wanted %s, field \"%s\", value \"%s\"; got %s, field \"%s\", \"%s\"%s%s\n", refused.name,
              tandem_status_name(refused.status), refused.field, refused.value, tandem_status_name(status), field.c_str(),
              message.c_str(), consistent ? "" : " (status of the error object differs)",
              silent ? "" : " (other status without error object)");
  return 1;
}

inline void check_all_refused(const World& world, const std::vector<Refused>& cases, const Outputs* outputs = nullptr) {
  const Snapshot before(world);
  int n_wrong = 0;
  for (const Refused& refused : cases) {
    n_wrong += check_refused(refused);
    if (outputs != nullptr) outputs->expect_untouched();
  }
  before.expect_same(Snapshot(world));
  assert_int_equal(n_wrong, 0);
}

}  // namespace tandem_test
