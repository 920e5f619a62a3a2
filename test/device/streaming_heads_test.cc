// SPDX-License-Identifier: MIT
// Streaming heads beside retrieval heads, through the C ABI, without a device and with one, by every route, in single calls
// and in planned steps. Outputs are compared with double precision over the keys that each head sees. Also the bytes that
// cross the bus, memory plans, and refusals. streaming_heads_test [MODULE]: on the stand-in, or on the GPU of the CUDA
// module.
#include <array>
#include <cmath>
#include <random>

#include "device/device_side.h"

using namespace tandem_test;

namespace {

const char* cuda_module = nullptr;
constexpr const char* kStandIn = STAND_IN_MODULES "/libtandem-standin.so";
constexpr int32_t kHeads = 5, kGroup = 2;
constexpr int64_t kSinks = 8, kBufferBytes = int64_t{64} * kDim * 4 * 2 * 3;  // 64 tokens of three KV heads
constexpr std::array<uint8_t, 3 * kHeads> kFlags = {0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1};
constexpr int32_t kHeadLayers = 3;  // layers in which some heads stream, none, and all
constexpr std::array<float, kHeads* kGroup> kLearned = {-1.0f, 0.5f, 0.0f, 1.0f, -2.0f, 0.25f, 0.75f, -0.5f, 1.5f, 0.0f};

struct Options {
  const char* route = nullptr;  // null: without a device
  int64_t sinks = kSinks, window = kWindow;
  bool has_learned = false;
  int64_t append_tokens = 0;
  // not null: no head streams and outputs are not checked, because other sessions are compared with this one
  const char* policy = nullptr;
  bool rotates = false;  // the library rotates, and logits have a soft cap
};

// All keys and values of a sequence, layer by layer, as they were given.
struct History {
  std::vector<float> k[kHeadLayers], v[kHeadLayers];
};

class Heads {
 public:
  explicit Heads(const Options& options) : options_(options) {
    tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
    engine_options.n_threads = 2;
    if (options.route != nullptr) {
      engine_options.backend = cuda_module != nullptr ? "cuda" : stand_in::kName;
      engine_options.backend_path = cuda_module != nullptr ? cuda_module : kStandIn;
    }
    OK(tandem_engine_create, &engine, &engine_options);
    std::vector<tandem_layer_options> layers(kHeadLayers, TANDEM_LAYER_OPTIONS_INIT);
    for (tandem_layer_options& layer : layers) {
      layer.n_q_heads = kHeads * kGroup;
      layer.n_kv_heads = kHeads;
      layer.k_head_dim = kDim;
      if (options.has_learned) layer.sinks = kLearned.data();
      if (options.rotates) layer.rope = TANDEM_ROPE_HALVES;
      if (options.rotates) layer.soft_cap = 2.0f;
    }
    OK(tandem_model_create, &model, layers.data(), kHeadLayers);
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.k_type = TANDEM_F32;
    OK(tandem_cache_create, &cache, engine, model, &cache_options);
    const tandem_session_options session_options = this->session_options();
    OK(tandem_session_create, &session, cache, &session_options);
    for (int64_t& id : ids) OK(tandem_sequence_create, &id, cache);
  }
  Heads(const Heads&) = delete;
  ~Heads() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
    tandem_engine_release(engine);
  }

  tandem_session_options session_options() const {
    tandem_session_options made = TANDEM_SESSION_OPTIONS_INIT;
    made.window_tokens = options_.window;
    made.sink_tokens = options_.sinks;
    made.route = options_.route;
    if (options_.route != nullptr && std::strcmp(options_.route, "host+stream") == 0) made.stream_fraction = 0.6;
    made.stream_buffer_bytes = kBufferBytes;
    made.append_tokens = options_.append_tokens;
    made.policy = options_.policy;
    if (options_.policy != nullptr) return made;
    made.streaming_heads = kFlags.data();
    made.n_streaming_heads = kFlags.size();
    return made;
  }
  tandem_session_stats stats() const {
    tandem_session_stats known = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &known, session);
    return known;
  }

  // Attends a layer with n tokens of each sequence and compares the output with double precision. Returns the output.
  std::vector<float> attend(int32_t layer, std::array<int64_t, 2> n, int64_t seed, void* stream = nullptr) {
    const int64_t n_tokens = n[0] + n[1];
    Tensor tensors[] = {Tensor({n_tokens, kHeads * kGroup, kDim}, seed), Tensor({n_tokens, kHeads, kDim}, seed + 1),
                        Tensor({n_tokens, kHeads, kDim}, seed + 2), Tensor({n_tokens, kHeads * kGroup, kDim}, seed + 3)};
    auto& [q, k, v, o] = tensors;
    for (float& x : q.values) x *= 4.0f;
    for (size_t s = 0, row = 0; s < ids.size(); row += static_cast<size_t>(n[s++]))
      for (const auto& [from, to] : {std::pair(&k, &past[s].k[layer]), std::pair(&v, &past[s].v[layer])})
        to->insert(to->end(), from->values.begin() + static_cast<std::ptrdiff_t>(row) * kHeads * kDim,
                   from->values.begin() + static_cast<std::ptrdiff_t>(row + static_cast<size_t>(n[s])) * kHeads * kDim);
    const bool on_device = options_.route != nullptr;
    const auto bytes_of = [](const Tensor& tensor) { return static_cast<int64_t>(tensor.values.size() * sizeof(float)); };
    for (Tensor& tensor : tensors) {
      if (!on_device) break;
      tensor.view.data = device->allocate(bytes_of(tensor));
      tensor.view.device_type = TANDEM_DEVICE_CUDA;
      device->upload(tensor.view.data, tensor.values.data(), bytes_of(tensor));
    }
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = layer;
    args.n_sequences = 2;
    args.sequences = ids.data();
    args.q_lens = n.data();
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o.view;
    args.stream = stream;
    OK(tandem_attend, session, &args);
    if (on_device) {
      wait_for(stream);
      device->download(o.values.data(), o.view.data, bytes_of(o));
      for (const Tensor& tensor : tensors) device->release(tensor.view.data);
    }
    if (options_.policy == nullptr && !options_.rotates) check(layer, n, q.values, o.values);
    return o.values;
  }
  // Runs a planned step of one token of each sequence in every layer.
  void step(int64_t seed, void* stream) {
    constexpr std::array<int64_t, 2> kOneEach = {1, 1};
    OK(tandem_step_begin, session, ids.data(), kOneEach.data(), 2, stream);
    for (int32_t l = 0; l < kHeadLayers; ++l) attend(l, kOneEach, seed + 10 * l, stream);
    OK(tandem_step_end, session, stream);
  }
  void all_layers(std::array<int64_t, 2> n, int64_t seed) {
    for (int32_t l = 0; l < kHeadLayers; ++l) attend(l, n, seed + 10 * l);
  }

  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  std::array<int64_t, 2> ids = {};
  History past[2];

 private:
  bool sees(int32_t layer, int32_t head, int64_t token, int64_t key) const {
    if (kFlags[static_cast<size_t>(layer * kHeads + head)] == 0) return key <= token;
    return key <= token && (key < options_.sinks || key > token - options_.window);
  }
  void check(int32_t layer, std::array<int64_t, 2> n, const std::vector<float>& q, const std::vector<float>& o) const {
    int64_t row = 0;
    for (size_t s = 0; s < ids.size(); ++s) {
      const auto length = static_cast<int64_t>(past[s].k[layer].size()) / (kHeads * kDim);
      for (int64_t t = length - n[s]; t < length; ++t, ++row) {
        if (n[s] > 100 && t % 13 != 0 && t + 2 < length) continue;  // of many tokens only some are checked
        for (int32_t h = 0; h < kHeads * kGroup; ++h)
          check_row(layer, past[s], h, t, q.data() + (row * kHeads * kGroup + h) * kDim,
                    o.data() + (row * kHeads * kGroup + h) * kDim);
      }
    }
  }
  void check_row(int32_t layer, const History& keys, int32_t q_head, int64_t token, const float* q, const float* o) const {
    const int32_t head = q_head / kGroup;
    double sum = options_.has_learned ? std::exp(kLearned[static_cast<size_t>(q_head)]) : 0.0;
    double wanted[kDim] = {};
    for (int64_t j = 0; j <= token; ++j) {
      if (!sees(layer, head, token, j)) continue;
      const float* k = keys.k[layer].data() + (j * kHeads + head) * kDim;
      const float* v = keys.v[layer].data() + (j * kHeads + head) * kDim;
      double dot = 0.0;
      for (int32_t d = 0; d < kDim; ++d) dot += static_cast<double>(q[d]) * k[d];
      const double weight = std::exp(dot / std::sqrt(kDim));
      sum += weight;
      for (int32_t d = 0; d < kDim; ++d) wanted[d] += weight * v[d];
    }
    for (int32_t d = 0; d < kDim; ++d) {
      const double right = sum == 0.0 ? 0.0 : wanted[d] / sum;
      if (!(std::abs(o[d] - right) <= (cuda_module != nullptr ? 1e-5 : 2e-6)))  // one key more or less would change 1e-3
        fail_msg("layer %d, query head %d, token %lld, dim %d: %.9g instead of %.9g", layer, q_head,
                 static_cast<long long>(token), d, static_cast<double>(o[d]), right);
    }
  }

  Options options_;
};

// Prompts, decode calls, appends that evict, and lengths on either side of sinks and window.
void attends_calls(Heads& heads) {
  int64_t seed = 1;
  for (const std::array<int64_t, 2> n :
       {std::array<int64_t, 2>{3, 1}, {1, 1}, {20, 70}, {1, 1}, {45, 0}, {1, 1}, {130, 64}, {1, 1}, {1, 1}, {0, 90}, {1, 1}})
    heads.all_layers(n, seed += 100);
}

void attends_on_the_host(void**) {
  for (const Options& options :
       {Options{}, {nullptr, 0, kWindow, false}, {nullptr, kSinks, 0, false}, {nullptr, 100, 16, true}}) {
    Heads heads(options);
    attends_calls(heads);
  }
}

void attends_on_a_device(void**) {
  for (const char* route : {"host", "stream", "host+stream", "auto"})
    for (const Options& options : {Options{route, kSinks, kWindow, false},
                                   {route, 0, kWindow, true},
                                   {route, 100, 16, false},
                                   {route, kSinks, 0, false}}) {
      Heads heads(options);
      attends_calls(heads);
    }
}

// Appends of thousands of tokens, with sinks in the chunk itself, in the store, or in both; after tickets; from a late
// device.
void attends_long_appends(void**) {
  for (const Options& options : {Options{"stream", kSinks, kWindow, false},
                                 {"stream", 100, 16, true},
                                 {"stream", 0, 700, false},
                                 {"auto", kSinks, kWindow, false}}) {
    Heads heads(options);
    heads.all_layers({700, 5}, 1);
    heads.all_layers({600, 1}, 1000);
    heads.all_layers({1, 1}, 2000);
    controls.set_delay(cuda_module == nullptr ? 50'000 : 0);
    heads.all_layers({530, 900}, 3000);
    controls.set_delay(0);
  }
}

// Keys that the library rotates and logits with a soft cap: each head gives what the policy with the same keys gives.
void agrees_with_policies(void**) {
  for (const char* route : {static_cast<const char*>(nullptr), "host"}) {
    Heads both({route, kSinks, kWindow, false, 0, nullptr, true});
    Heads all({nullptr, kSinks, kWindow, false, 0, "all", true}),
        streaming({nullptr, kSinks, kWindow, false, 0, "streaming", true});
    int64_t seed = 1;
    for (const std::array<int64_t, 2> n : {std::array<int64_t, 2>{3, 90}, {150, 1}, {1, 1}, {1, 1}, {40, 70}, {1, 1}}) {
      seed += 100;
      for (int32_t l = 0; l < kHeadLayers; ++l) {
        const std::vector<float> got = both.attend(l, n, seed + l), exact = all.attend(l, n, seed + l),
                                 windowed = streaming.attend(l, n, seed + l);
        for (size_t i = 0; i < got.size(); ++i) {
          const size_t head = i / kDim % (kHeads * kGroup) / kGroup;
          const float wanted = kFlags[static_cast<size_t>(l * kHeads) + head] != 0 ? windowed[i] : exact[i];
          if (!(std::abs(got[i] - wanted) <= 1e-5f))
            fail_msg("layer %d, KV head %zu: %.9g instead of %.9g", l, head, static_cast<double>(got[i]),
                     static_cast<double>(wanted));
        }
      }
    }
  }
}

void attends_in_planned_steps(void**) {
  Heads heads({"host", kSinks, kWindow, true});
  heads.all_layers({60, 150}, 1);
  void* stream = nullptr;
  tandem::DeviceError error;
  device->must(device->table->create_stream(device->self, &stream, &error), error);
  for (int64_t i = 0; i < 30; ++i) heads.step(1000 + 100 * i, stream);
  heads.all_layers({1, 1}, 9000);
  device->table->destroy_stream(device->self, stream);
}

// Forks and truncations keep the kinds of heads, which belong to the session.
void follows_truncations(void**) {
  for (const char* route : {static_cast<const char*>(nullptr), "host", "stream"}) {
    Heads heads({route, kSinks, kWindow, false});
    heads.all_layers({190, 120}, 1);
    heads.all_layers({1, 1}, 500);
    OK(tandem_sequence_truncate, heads.cache, heads.ids[0], 100);
    for (auto* all : {heads.past[0].k, heads.past[0].v})
      for (int32_t l = 0; l < kHeadLayers; ++l) all[l].resize(size_t{100} * kHeads * kDim);
    heads.all_layers({1, 1}, 900);
    heads.all_layers({40, 2}, 1300);
  }
}

// For a layer with two retrieval heads the bytes of two heads cross the bus, for a layer without any no bytes.
void streams_retrieval_heads_alone(void**) {
  Heads heads({"stream", kSinks, kWindow, false});
  heads.all_layers({300, 300}, 1);
  constexpr int64_t kHeadBytes = kDim * 4 * 2;
  const int64_t outside = 2 * outside_of(300);
  int64_t before = heads.stats().streamed_kv_bytes;
  for (const auto& [layer, n_heads] : {std::pair(0, 2), std::pair(1, kHeads), std::pair(2, 0)}) {
    heads.attend(layer, {1, 1}, 700 + layer);
    const int64_t streamed = heads.stats().streamed_kv_bytes;
    assert_int_equal(streamed - before, outside * n_heads * kHeadBytes);
    before = streamed;
  }
  heads.attend(0, {600, 0}, 800);  // in one chunk
  assert_int_equal(heads.stats().streamed_kv_bytes - before, outside_of(301) * 2 * kHeadBytes);
  const std::array<int64_t, 2> kv_lens = {301, 301};
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  OK(tandem_plan, &plan, heads.session, 0, kv_lens.data(), nullptr, 2);
  assert_int_equal(plan.stream_bytes, outside * 2 * kHeadBytes);
  tandem_error* error = nullptr;
  const int32_t got = tandem_plan(&plan, heads.session, 2, kv_lens.data(), nullptr, 2, &error);
  assert_refused(got, error, TANDEM_ERROR_UNSUPPORTED, "layer_idx", "all of its heads stream");
}

void holds_what_was_planned(void**) {
  for (const Options& options : {Options{"host"}, {"stream"}, {"stream", kSinks, kWindow, false, 600}}) {
    Heads heads(options);
    const tandem_session_options made = heads.session_options();
    const int64_t n = std::max<int64_t>(1, options.append_tokens);
    const std::array<int64_t, 2> lengths = {300 + n, 300 + n};
    tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
    cache.k_type = TANDEM_F32;
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    OK(tandem_plan_memory, &plan, heads.engine, heads.model, &cache, &made, lengths.data(), 2);
    for (int32_t l = 0; l < kHeadLayers; ++l)
      for (size_t s = 0; s < 2; ++s) {
        const Tensor k({300, kHeads, kDim}, 7 + l), v({300, kHeads, kDim}, 8 + l);
        OK(tandem_sequence_append, heads.cache, heads.ids[s], l, &k.view, &v.view, nullptr);
        heads.past[s].k[l] = k.values;
        heads.past[s].v[l] = v.values;
      }
    if (options.append_tokens > 0) heads.all_layers({n, n}, 900);
    heads.all_layers({1, 1}, 1500);
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    OK(tandem_cache_get_stats, &stats, heads.cache);
    assert_int_equal(stats.device_window_bytes, plan.device_window_bytes);
    assert_int_equal(stats.device_work_bytes, plan.device_work_bytes);
    assert_int_equal(stats.device_stream_bytes, plan.device_stream_bytes);
  }
}

void refuse(const Heads& heads, const tandem_session_options& options, int32_t status, const char* field, const char* text) {
  tandem_session* session = nullptr;
  tandem_error* error = nullptr;
  const int32_t got = tandem_session_create(&session, heads.cache, &options, &error);
  assert_refused(got, error, status, field, text);
  assert_null(session);
}

void refuses(void**) {
  const Heads heads({"host", kSinks, kWindow, false});
  const tandem_session_options good = heads.session_options();
  tandem_session_options bad = good;
  bad.n_streaming_heads = 14;
  refuse(heads, bad, TANDEM_ERROR_INVALID_ARGUMENT, "n_streaming_heads", "14, the layers have 15");
  bad = good;
  bad.streaming_heads = nullptr;
  refuse(heads, bad, TANDEM_ERROR_INVALID_ARGUMENT, "streaming_heads", "NULL with n_streaming_heads = 15");
  std::array<uint8_t, kFlags.size()> flags = kFlags;
  flags[3] = 2;
  bad = good;
  bad.streaming_heads = flags.data();
  refuse(heads, bad, TANDEM_ERROR_INVALID_ARGUMENT, "streaming_heads[3]", "= 2: neither 0 nor 1");
  for (const char* policy : {"hgca", "streaming"}) {
    bad = good;
    bad.policy = policy;
    refuse(heads, bad, TANDEM_ERROR_UNSUPPORTED, "streaming_heads", policy);
  }
  Tensor q({1, kHeads * kGroup, kDim}), k({1, kHeads, kDim}), v({1, kHeads, kDim}), o({1, kHeads * kGroup, kDim});
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  const int64_t one = 1;
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  args.n_sequences = 1;
  args.sequences = heads.ids.data();
  args.q_lens = &one;
  args.q = &q.view;
  args.k = &k.view;
  args.v = &v.view;
  args.o = &o.view;
  tandem_error* error = nullptr;
  const int32_t got = tandem_attend(heads.session, &args, &error);
  assert_refused(got, error, TANDEM_ERROR_UNSUPPORTED, "flags", "streaming heads");
}

void refuses_sliding_windows(void**) {
  const Heads heads({});
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = layer.n_kv_heads = 2;
  layer.k_head_dim = kDim;
  layer.sliding_window_tokens = 32;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  OK(tandem_model_create, &model, &layer, 1);
  OK(tandem_cache_create, &cache, heads.engine, model, nullptr);
  const std::array<uint8_t, 2> flags = {0, 1};
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.streaming_heads = flags.data();
  options.n_streaming_heads = 2;
  tandem_session* session = nullptr;
  tandem_error* error = nullptr;
  const int32_t got = tandem_session_create(&session, cache, &options, &error);
  assert_refused(got, error, TANDEM_ERROR_INVALID_ARGUMENT, "streaming_heads[1]", "sliding window");
  tandem_cache_release(cache);
  tandem_model_release(model);
}

int open_device(void** state) {
  if (cuda_module == nullptr) return open_stand_in(state);
  device = std::make_unique<tandem::test::OpenDevice>(cuda_module);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cuda_module = argc > 1 ? argv[1] : nullptr;
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(attends_on_the_host, forget),
      cmocka_unit_test_teardown(attends_on_a_device, forget),
      cmocka_unit_test_teardown(attends_long_appends, forget),
      cmocka_unit_test_teardown(agrees_with_policies, forget),
      cmocka_unit_test_teardown(attends_in_planned_steps, forget),
      cmocka_unit_test_teardown(follows_truncations, forget),
      cmocka_unit_test_teardown(streams_retrieval_heads_alone, forget),
      cmocka_unit_test_teardown(holds_what_was_planned, forget),
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(refuses_sliding_windows, forget),
  };
  return cmocka_run_group_tests(tests, open_device, close_stand_in);
}
