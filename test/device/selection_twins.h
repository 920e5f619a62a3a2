// SPDX-License-Identifier: MIT
// Shared by the tests of calls with named keys: the same sequences attended with device tensors and with host tensors.
#pragma once

#include <array>
#include <cmath>
#include <random>

#include "device/device_side.h"

namespace tandem_test {

inline const char* cuda_module = nullptr;
inline constexpr const char* kStandIn = STAND_IN_MODULES "/libtandem-standin.so";
inline constexpr int32_t kHeads = 2, kGroup = 3, kNamedLayers = 2;
inline constexpr int32_t kUnsupported = TANDEM_ERROR_UNSUPPORTED, kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;

struct Setup {
  int32_t k_type = TANDEM_F32;
  int64_t window = 64, sinks = 5;
  int64_t unit = 4, n_idx = 6;
  bool shared = false, any_order = false, plus_window = false;
  bool host_idx = false;  // true: the indices are in host memory, also in calls on device tensors
  int64_t sliding = 0;    // sliding window of the second layer
  int32_t rope = TANDEM_ROPE_CALLER;
  bool has_learned = false;
  int64_t in_steps = 0;
  const char* route = nullptr;
  int64_t append_tokens = 0;
  int32_t first_heads = kHeads;  // KV heads of the first layer; both layers have as many query heads

  int32_t n_heads(int32_t layer) const { return layer == 0 ? first_heads : kHeads; }
  int32_t n_lists(int32_t layer) const { return shared ? 1 : n_heads(layer); }
};

// The tensors of a call and its indices, in host or device memory.
struct NamedCall {
  std::array<int64_t, 2> q_lens;
  int64_t n;
  Tensor q, k, v, o, lse;
  std::vector<int32_t> idx;
  std::vector<int32_t> parents;
  tandem_tensor idx_view = {};
  tandem_selection selection = TANDEM_SELECTION_INIT;
  std::vector<void*> memory;

  NamedCall(std::array<int64_t, 2> lens, int64_t seed, int32_t n_kv_heads = kHeads)
      : q_lens(lens),
        n(lens[0] + lens[1]),
        q({n, kHeads * kGroup, kDim}, seed),
        k({n, n_kv_heads, kDim}, seed + 1),
        v({n, n_kv_heads, kDim}, seed + 2),
        o({n, kHeads * kGroup, kDim}, seed + 3),
        lse({n, kHeads * kGroup}, seed + 4) {
    for (float& x : q.values) x *= 4.0f;
  }
  NamedCall(const NamedCall&) = delete;
  ~NamedCall() {
    for (void* data : memory) device->release(data);
  }
  template <typename T>
  void move(tandem_tensor* view, const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    memory.push_back(device->allocate(std::max<int64_t>(bytes, 4)));
    device->upload(memory.back(), values.data(), bytes);
    view->device_type = TANDEM_DEVICE_CUDA;
    view->data = memory.back();
  }
  void view_idx(const Setup& setup, std::vector<int32_t> indices) {
    idx = std::move(indices);
    const int64_t n_lists = setup.n_idx == 0 ? 1 : std::ssize(idx) / (n * setup.n_idx), shape[] = {n, n_lists, setup.n_idx};
    OK(tandem_tensor_init, &idx_view, TANDEM_I32, idx.data(), 3, shape);
    selection.idx = &idx_view;
    selection.unit_tokens = setup.unit;
    selection.flags =
        (setup.any_order ? TANDEM_SELECTION_ANY_ORDER : 0) | (setup.plus_window ? TANDEM_SELECTION_PLUS_WINDOW : 0);
  }
  void to_device(bool idx_too) {
    for (Tensor* tensor : {&q, &k, &v, &o, &lse}) move(&tensor->view, tensor->values);
    if (idx_too && selection.idx != nullptr) move(&idx_view, idx);
  }
  tandem_attend_args args(int32_t layer, const std::array<int64_t, 2>& ids) const {
    tandem_attend_args made = TANDEM_ATTEND_ARGS_INIT;
    made.layer_idx = layer;
    made.n_sequences = 2;
    made.sequences = ids.data();
    made.q_lens = q_lens.data();
    made.q = &q.view;
    made.k = &k.view;
    made.v = &v.view;
    made.o = &o.view;
    made.lse = &lse.view;
    made.selection = selection.idx != nullptr ? &selection : nullptr;
    if (!parents.empty()) made.flags = TANDEM_ATTEND_SPECULATIVE, made.parent_idx = parents.data();
    return made;
  }
  void read_back() {
    device->download(o.values.data(), o.view.data, static_cast<int64_t>(o.values.size() * sizeof(float)));
    device->download(lse.values.data(), lse.view.data, static_cast<int64_t>(lse.values.size() * sizeof(float)));
  }
};

inline void assert_same(const std::vector<float>& got, const std::vector<float>& wanted, const char* what, int64_t seed) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i]))) continue;
    if (!(std::fabs(got[i] - wanted[i]) <= 2e-5f))
      fail_msg("call %lld: %s[%zu] is %g, not %g", static_cast<long long>(seed), what, i, static_cast<double>(got[i]),
               static_cast<double>(wanted[i]));
  }
}

// A cache, a session and two sequences.
struct Half {
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  std::array<int64_t, 2> ids = {};
};

// The same two sequences twice on one engine: one pair gets calls on device tensors, the other calls on host tensors.
class Twins {
 public:
  explicit Twins(const Setup& of, uint64_t seed = 1) : setup(of), random_(seed) {
    tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
    engine_options.n_threads = 2;
    engine_options.backend = cuda_module != nullptr ? "cuda" : stand_in::kName;
    engine_options.backend_path = cuda_module != nullptr ? cuda_module : kStandIn;
    OK(tandem_engine_create, &engine, &engine_options);
    std::vector<tandem_layer_options> layers(kNamedLayers, TANDEM_LAYER_OPTIONS_INIT);
    const std::array<float, kHeads* kGroup> learned = {-1.0f, 0.5f, 0.0f, 1.0f, -2.0f, 0.25f};
    for (tandem_layer_options& layer : layers) {
      layer.n_q_heads = kHeads * kGroup;
      layer.n_kv_heads = kHeads;
      layer.k_head_dim = kDim;
      layer.rope = setup.rope;
      if (setup.has_learned) layer.sinks = learned.data();
    }
    layers[0].n_kv_heads = setup.first_heads;
    layers[1].sliding_window_tokens = setup.sliding;
    OK(tandem_model_create, &model, layers.data(), kNamedLayers);
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.k_type = setup.k_type;
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.window_tokens = setup.window;
    options.sink_tokens = setup.sinks;
    options.selection_indices = setup.in_steps;
    options.route = setup.route;
    options.append_tokens = setup.append_tokens;
    for (Half* half : {&on_device, &on_host}) {
      OK(tandem_cache_create, &half->cache, engine, model, &cache_options);
      OK(tandem_session_create, &half->session, half->cache, &options);
      for (int64_t& id : half->ids) OK(tandem_sequence_create, &id, half->cache);
    }
  }
  Twins(const Twins&) = delete;
  ~Twins() {
    for (const Half* half : {&on_device, &on_host}) {
      tandem_session_release(half->session);
      tandem_cache_release(half->cache);
    }
    tandem_model_release(model);
    tandem_engine_release(engine);
  }

  int64_t length(size_t sequence, int32_t layer) const {
    int64_t n = 0;
    OK(tandem_sequence_length, &n, on_host.cache, on_host.ids[sequence], layer);
    return n;
  }
  // Draws a row of indices for the query at token `own`.
  void draw_row(int64_t own, int32_t* row) {
    const int64_t n_units = own / setup.unit + 1;
    std::vector<int32_t> units;
    const auto wanted = std::min<int64_t>(n_units, static_cast<int64_t>(random_() % static_cast<uint64_t>(setup.n_idx + 1)));
    while (std::ssize(units) < wanted) {
      const auto unit = static_cast<int32_t>(random_() % static_cast<uint64_t>(n_units));
      if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
    }
    if (!setup.any_order) std::sort(units.begin(), units.end());
    std::fill_n(row, setup.n_idx, -1);
    std::copy(units.begin(), units.end(), row);
  }
  std::vector<int32_t> draw(int32_t layer, std::array<int64_t, 2> n, int64_t ahead = 0) {
    const int32_t n_heads = setup.n_lists(layer);
    std::vector<int32_t> idx(static_cast<size_t>((n[0] + n[1]) * n_heads * setup.n_idx));
    int32_t* row = idx.data();
    for (size_t s = 0; s < 2; ++s)
      for (int64_t t = 0; t < n[s]; ++t)
        for (int32_t head = 0; head < n_heads; ++head, row += setup.n_idx) draw_row(length(s, layer) + ahead + t, row);
    return idx;
  }
  // Makes the same call on both pairs and compares the outputs. names: the call names keys, else it attends all.
  void attend(int32_t layer, std::array<int64_t, 2> n, int64_t seed, bool names, std::vector<int32_t> parents = {}) {
    NamedCall there(n, seed, setup.n_heads(layer)), here(n, seed, setup.n_heads(layer));
    for (NamedCall* call : {&there, &here}) call->parents = parents;
    if (names) {
      const std::vector<int32_t> idx = draw(layer, n);
      for (NamedCall* call : {&there, &here}) call->view_idx(setup, idx);
    }
    there.to_device(!setup.host_idx);
    const std::array<int64_t, 2> bytes_before = {bytes_read(on_device), bytes_read(on_host)};
    const tandem_attend_args device_args = there.args(layer, on_device.ids), host_args = here.args(layer, on_host.ids);
    OK(tandem_attend, on_device.session, &device_args);
    OK(tandem_attend, on_host.session, &host_args);
    device->wait();
    there.read_back();
    assert_same(there.o.values, here.o.values, "o", seed);
    assert_same(there.lse.values, here.lse.values, "lse", seed);
    if (parents.empty()) assert_listed_alike(layer, seed, bytes_before, std::max(n[0], n[1]) > 512);
  }
  std::vector<int64_t> listed(const Half& half, size_t sequence, int32_t layer, int32_t head) const {
    std::vector<int64_t> tokens(static_cast<size_t>(length(sequence, layer)) + 1);
    int64_t n = 0;
    OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, half.session, half.ids[sequence], layer,
       head, 0);
    tokens.resize(static_cast<size_t>(n));
    return tokens;
  }
  int64_t bytes_read(const Half& half) const {
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &stats, half.session);
    return stats.resident_kv_bytes_read + stats.host_kv_bytes_read;
  }
  // Compares what both sessions list for the last call and how many bytes it read. bytes_before: bytes read before the call,
  // on the device's pair and on the host's.
  void assert_listed_alike(int32_t layer, int64_t seed, const std::array<int64_t, 2>& bytes_before, bool is_long) const {
    for (size_t s = 0; s < 2; ++s)
      for (int32_t head = 0; head < setup.n_heads(layer); ++head)
        if (listed(on_device, s, layer, head) != listed(on_host, s, layer, head))
          fail_msg("call %lld: other keys are listed for sequence %zu, head %d", static_cast<long long>(seed), s, head);
    if (is_long) return;  // its queries share the reading of a key
    const int64_t got = bytes_read(on_device) - bytes_before[0], wanted = bytes_read(on_host) - bytes_before[1];
    if (got != wanted)
      fail_msg("call %lld: %lld bytes read, not %lld", static_cast<long long>(seed), static_cast<long long>(got),
               static_cast<long long>(wanted));
  }
  void attend_all(std::array<int64_t, 2> n, int64_t seed, bool names) {
    for (int32_t l = 0; l < kNamedLayers; ++l) attend(l, n, seed + 10 * l, names);
  }
  void guess(int64_t n_tokens, int64_t seed, bool as_tree) {
    std::vector<int32_t> parents;
    for (size_t s = 0; s < 2; ++s)
      for (int64_t t = 0; t < n_tokens; ++t)
        parents.push_back(
            static_cast<int32_t>(as_tree ? static_cast<int64_t>(random_() % static_cast<uint64_t>(t + 1)) - 1 : t - 1));
    for (int32_t l = 0; l < kNamedLayers; ++l) attend(l, {n_tokens, n_tokens}, seed + 10 * l, true, parents);
    std::vector<int64_t> kept(1, 0);
    for (const Half* half : {&on_device, &on_host})
      for (const int64_t id : half->ids) OK(tandem_session_commit, half->session, id, kept.data(), std::ssize(kept));
  }
  void truncate(size_t sequence, int64_t n_tokens) const {
    for (const Half* half : {&on_device, &on_host}) OK(tandem_sequence_truncate, half->cache, half->ids[sequence], n_tokens);
  }
  void remove(size_t sequence, int64_t first, int64_t n_tokens) const {
    for (const Half* half : {&on_device, &on_host})
      OK(tandem_sequence_remove, half->cache, half->ids[sequence], first, n_tokens, 0);
  }
  void fork(size_t sequence) {
    for (Half* half : {&on_device, &on_host}) {
      int64_t made = 0;
      OK(tandem_sequence_fork, &made, half->cache, half->ids[sequence]);
      half->ids[sequence] = made;
    }
  }

  Setup setup;
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  Half on_device, on_host;

 private:
  std::mt19937_64 random_;
};

inline std::vector<Setup> setups() {
  return {{},
          {TANDEM_BF16, 64, 5, 1, 40, false, false, false, true},
          {TANDEM_F32, 64, 5, 8, 5, true, false, true},
          {TANDEM_F16, 16, 21, 2, 20, false, true, true, false},
          {TANDEM_F32, 0, 3, 16, 4, false, false, false, false, 0, TANDEM_ROPE_CALLER, true},
          {TANDEM_F32, 100, 9, 4, 9, false, true, true, true, 33},
          {TANDEM_F32, 1000, 9, 64, 3, true, false, true, false},
          {TANDEM_F32, 64, 3, 4, 12, false, false, true, false, 20, TANDEM_ROPE_HALVES},
          {TANDEM_Q8_0, 64, 3, 256, 2, true, false, false, false},
          {TANDEM_F32, 40, 0, 1, 0, false, false, true, false}};
}

inline int open_device(void**) {
  device = std::make_unique<tandem::test::OpenDevice>(cuda_module != nullptr ? cuda_module : kStandIn);
  return 0;
}

}  // namespace tandem_test
