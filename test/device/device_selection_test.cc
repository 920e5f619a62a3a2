// SPDX-License-Identifier: MIT
// Keys that the caller names, in calls on device tensors, whose indices are in host or in device memory: answers against
// those of the same calls on host tensors, which gate_test compares with the reference. Prompts, decode, guesses, planned
// steps and captured graphs, with removals in between; indices that are wrong; what is refused.
// device_selection_test [MODULE]: on the stand-in, or on the GPU of the CUDA module.
#include <array>
#include <cmath>
#include <random>

#include "device/device_side.h"

using namespace tandem_test;

namespace {

const char* cuda_module = nullptr;
constexpr const char* kStandIn = STAND_IN_MODULES "/libtandem-standin.so";
constexpr int32_t kHeads = 2, kGroup = 3, kNamedLayers = 2;
constexpr int32_t kUnsupported = TANDEM_ERROR_UNSUPPORTED, kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;

struct Setup {
  int32_t k_type = TANDEM_F32;
  int64_t window = 64, sinks = 5;
  int64_t unit = 4, n_idx = 6;
  bool shared = false, any_order = false, plus_window = false;
  bool host_idx = false;  // of calls on device tensors
  int64_t sliding = 0;    // in the second layer
  int32_t rope = TANDEM_ROPE_CALLER;
  bool has_learned = false;
  int64_t in_steps = 0;
  int32_t first_heads = kHeads;  // KV heads of the first layer; query heads are as many in both

  int32_t n_heads(int32_t layer) const { return layer == 0 ? first_heads : kHeads; }
  int32_t n_lists(int32_t layer) const { return shared ? 1 : n_heads(layer); }
};

// Tensors of a call and its indices, for either place.
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

void wait_for(void* stream) {
  tandem::DeviceError error;
  device->must(device->table->wait(device->self, stream, &error), error);
}

void assert_same(const std::vector<float>& got, const std::vector<float>& wanted, const char* what, int64_t seed) {
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

// The same two sequences twice on one engine: in calls on device tensors and in calls on host tensors.
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
  // A row of indices for the query that is token `own`.
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
  // A call on both, of keys that are named or of all, and the same answers.
  void attend(int32_t layer, std::array<int64_t, 2> n, int64_t seed, bool names, std::vector<int32_t> parents = {}) {
    NamedCall there(n, seed, setup.n_heads(layer)), here(n, seed, setup.n_heads(layer));
    for (NamedCall* call : {&there, &here}) call->parents = parents;
    if (names) {
      const std::vector<int32_t> idx = draw(layer, n);
      for (NamedCall* call : {&there, &here}) call->view_idx(setup, idx);
    }
    there.to_device(!setup.host_idx);
    const tandem_attend_args device_args = there.args(layer, on_device.ids), host_args = here.args(layer, on_host.ids);
    OK(tandem_attend, on_device.session, &device_args);
    OK(tandem_attend, on_host.session, &host_args);
    device->wait();
    there.read_back();
    assert_same(there.o.values, here.o.values, "o", seed);
    assert_same(there.lse.values, here.lse.values, "lse", seed);
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

std::vector<Setup> setups() {
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

// Prompts, appends that evict, decode; dense calls between; truncations, removals and forks.
void answers_are_those_of_host_tensors(void**) {
  int64_t seed = 1;
  for (const Setup& setup : setups()) {
    Twins twins(setup, static_cast<uint64_t>(seed));
    for (const std::array<int64_t, 2> n :
         {std::array<int64_t, 2>{70, 3}, {1, 1}, {30, 150}, {1, 1}, {1, 0}, {5, 2}, {1, 1}, {1, 1}})
      seed += 100, twins.attend_all(n, seed, seed % 300 != 1);
    twins.truncate(0, 80);
    twins.attend_all({1, 1}, seed += 100, true);
    twins.fork(1);
    twins.attend_all({2, 1}, seed += 100, true);
    if (setup.rope == TANDEM_ROPE_HALVES || setup.sliding == 0) twins.remove(0, 20, 30);
    twins.attend_all({1, 1}, seed += 100, true);
    twins.attend_all({40, 2}, seed += 100, true);
  }
}

void guesses_see_what_they_name(void**) {
  int64_t seed = 1;
  for (Setup setup : setups()) {
    setup.sliding = 0;
    Twins twins(setup, static_cast<uint64_t>(seed) + 7);
    twins.guess(3, seed += 100, true);
    twins.attend_all({90, 70}, seed += 100, true);
    for (const bool as_tree : {true, false}) {
      twins.guess(7, seed += 100, as_tree);
      twins.attend_all({1, 1}, seed += 100, true);
    }
  }
}

// Values of keys that no row names are NaN, in the window and outside.
void other_keys_are_not_read(void**) {
  Twins twins({TANDEM_F32, 64, 0, 1, 20});
  NamedCall prompt({200, 200}, 5);
  for (int64_t t = 0; t < 400; ++t)
    if (t % 3 != 0)
      for (int64_t i = 0; i < int64_t{kHeads} * kDim; ++i)
        prompt.k.values[static_cast<size_t>(t * kHeads * kDim + i)] =
            prompt.v.values[static_cast<size_t>(t * kHeads * kDim + i)] = NAN;
  prompt.to_device(false);
  const tandem_attend_args append = prompt.args(0, twins.on_device.ids);
  OK(tandem_attend, twins.on_device.session, &append);
  NamedCall query({1, 1}, 9);
  std::vector<int32_t> idx;
  for (int64_t row = 0; row < 2 * kHeads; ++row)
    for (int32_t i = 0; i < 20; ++i)
      idx.push_back(static_cast<int32_t>(row < kHeads ? 9 * i + 3 * row : 9 * i + 1 + 3 * (row % 2)));
  query.view_idx(twins.setup, idx);
  query.to_device(true);
  const tandem_attend_args args = query.args(0, twins.on_device.ids);
  OK(tandem_attend, twins.on_device.session, &args);
  device->wait();
  query.read_back();
  for (const float x : query.o.values) assert_true(std::isfinite(x));
}

struct Wrong {
  const char* what;
  const char* told;
  std::vector<int32_t> row;
};

// The row is NaN in its heads, all else is as it should be, and the next call says why and does nothing.
void wrong_indices_are_told_later(void**) {
  const std::vector<Wrong> cases = {{"behind its own", "selection.idx[1, 0, 1] = 201", {5, 201, -1}},
                                    {"far away", "selection.idx[1, 0, 2] = 2147483647", {5, 6, INT32_MAX}},
                                    {"twice", "selection.idx[1, 0, 1] = 7", {7, 7, 190}},
                                    {"descends", "selection.idx[1, 0, 2] = 3", {180, 190, 3}},
                                    {"behind a pad", "selection.idx[1, 0, 2] = 9", {8, -1, 9}},
                                    {"below -1", "selection.idx[1, 0, 0] = -2", {-2, 5, 6}}};
  for (const Wrong& wrong : cases) {
    Twins twins({TANDEM_F32, 64, 0, 1, 3});
    twins.attend_all({200, 200}, 50, false);
    NamedCall there({1, 1}, 70), here({1, 1}, 70);
    std::vector<int32_t> idx = {1, 50, 180, 2, 3, 199, 4, 150, 160, 10, 20, -1};
    here.view_idx(twins.setup, idx);
    std::copy(wrong.row.begin(), wrong.row.end(), idx.begin() + 6);  // of the second sequence's query, head 0
    there.view_idx(twins.setup, idx);
    there.to_device(true);
    const tandem_attend_args device_args = there.args(0, twins.on_device.ids), host_args = here.args(0, twins.on_host.ids);
    OK(tandem_attend, twins.on_device.session, &device_args);
    OK(tandem_attend, twins.on_host.session, &host_args);
    device->wait();
    there.read_back();
    for (size_t head = 0; head < size_t{2} * kHeads * kGroup; ++head) {
      const bool is_wrong = head / kGroup == kHeads;
      if (is_wrong != std::isnan(there.lse.values[head])) fail_msg("%s: lse of head %zu", wrong.what, head);
      for (size_t d = 0; d < kDim; ++d) {
        const float got = there.o.values[head * kDim + d];
        if (is_wrong ? !std::isnan(got) : std::fabs(got - here.o.values[head * kDim + d]) > 2e-5f)
          fail_msg("%s: o of head %zu is %g", wrong.what, head, static_cast<double>(got));
      }
    }
    tandem_error* error = nullptr;
    const int32_t got = tandem_attend(twins.on_device.session, &device_args, &error);
    assert_refused(got, error, kInvalid, "selection.idx", wrong.told);
    assert_int_equal(twins.length(1, 0), 201);
    twins.attend(0, {1, 1}, 90, true);
  }
}

// What is refused at once, and nothing has grown.
void refuses(void**) {
  Twins twins({TANDEM_F32, 64, 0, 1, 3, false, false, false, true});
  twins.attend_all({20, 20}, 50, false);
  NamedCall call({1, 1}, 70);
  call.view_idx(twins.setup, {1, 2, 3, 2, 3, 21, 4, 5, 6, 1, 2, -1});
  call.to_device(false);
  const tandem_attend_args args = call.args(0, twins.on_device.ids);
  tandem_error* error = nullptr;
  int32_t got = tandem_attend(twins.on_device.session, &args, &error);
  assert_refused(got, error, kInvalid, "selection.idx", "selection.idx[0, 1, 2] = 21 names no token");
  twins.attend(0, {1, 1}, 90, true);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.selection_indices = -1;
  tandem_session* session = nullptr;
  got = tandem_session_create(&session, twins.on_host.cache, &options, &error);
  assert_refused(got, error, kInvalid, "selection_indices", "selection_indices = -1");
}

// Planned steps, some of whose layers name keys; on the stand-in as a graph that is replayed, with other indices each time.
void attends_in_planned_steps(void**) {
  int64_t seed = 1;
  for (Setup setup : setups()) {
    if (setup.any_order || setup.n_idx == 0) continue;
    setup.host_idx = false;
    setup.in_steps = setup.n_idx;
    Twins twins(setup, static_cast<uint64_t>(seed));
    twins.attend_all({60, 150}, seed += 100, true);
    void* stream = nullptr;
    tandem::DeviceError error;
    device->must(device->table->create_stream(device->self, &stream, &error), error);
    const std::array<int64_t, 2> one = {1, 1};
    const bool captures = cuda_module == nullptr;
    void* graph = nullptr;
    std::unique_ptr<NamedCall> held[kNamedLayers];
    for (int64_t i = 0; i < 12; ++i) {
      std::unique_ptr<NamedCall> here[kNamedLayers];
      for (int32_t l = 0; l < kNamedLayers; ++l) {
        seed += 10;
        const bool names = l == 0 || i % 3 != 0 || captures;
        here[l] = std::make_unique<NamedCall>(one, seed);
        auto there = std::make_unique<NamedCall>(one, seed);
        if (names) here[l]->view_idx(setup, twins.draw(l, one));
        if (names) there->view_idx(setup, here[l]->idx);
        if (graph == nullptr) {
          there->to_device(true);
          held[l] = std::move(there);
          continue;
        }
        const std::array<std::pair<const std::vector<float>*, const tandem_tensor*>, 3> tensors = {
            {{&there->q.values, &held[l]->q.view},
             {&there->k.values, &held[l]->k.view},
             {&there->v.values, &held[l]->v.view}}};
        for (const auto& [values, view] : tensors)
          device->upload(view->data, values->data(), static_cast<int64_t>(values->size() * sizeof(float)));
        device->upload(held[l]->idx_view.data, there->idx.data(), static_cast<int64_t>(there->idx.size() * sizeof(int32_t)));
      }
      OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream);
      if (graph == nullptr) {
        if (captures) assert_true(controls.begin_capture(stream));
        for (int32_t l = 0; l < kNamedLayers; ++l) {
          tandem_attend_args args = held[l]->args(l, twins.on_device.ids);
          args.stream = stream;
          OK(tandem_attend, twins.on_device.session, &args);
        }
        if (captures) graph = controls.end_capture(stream);
      }
      if (captures) assert_true(controls.launch(graph, stream));
      OK(tandem_step_end, twins.on_device.session, stream);
      wait_for(stream);
      for (int32_t l = 0; l < kNamedLayers; ++l) {
        const tandem_attend_args args = here[l]->args(l, twins.on_host.ids);
        OK(tandem_attend, twins.on_host.session, &args);
        held[l]->read_back();
        assert_same(held[l]->o.values, here[l]->o.values, "o of a step", seed);
        assert_same(held[l]->lse.values, here[l]->lse.values, "lse of a step", seed);
      }
    }
    if (graph != nullptr) controls.free_graph(graph);
    device->table->destroy_stream(device->self, stream);
  }
}

void* make_stream() {
  void* stream = nullptr;
  tandem::DeviceError error;
  device->must(device->table->create_stream(device->self, &stream, &error), error);
  return stream;
}

// A step of one sequence behind calls of two, in layers of one KV head and of two: lists lie where they have room.
void steps_may_have_fewer_sequences(void**) {
  Setup setup;
  setup.first_heads = 1;
  setup.in_steps = setup.n_idx;
  Twins twins(setup);
  twins.attend_all({150, 120}, 50, false);
  twins.attend(0, {1, 1}, 70, true);
  twins.attend(1, {1, 1}, 80, false);
  void* stream = make_stream();
  const int64_t one = 1;
  for (int64_t i = 0; i < 3; ++i) {
    OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), &one, 1, stream);
    for (int32_t l = 0; l < kNamedLayers; ++l) {
      NamedCall there({1, 0}, 100 + 10 * i + l, setup.n_heads(l)), here({1, 0}, 100 + 10 * i + l, setup.n_heads(l));
      here.view_idx(setup, twins.draw(l, {1, 0}));
      there.view_idx(setup, here.idx);
      there.to_device(true);
      tandem_attend_args args = there.args(l, twins.on_device.ids), host_args = here.args(l, twins.on_host.ids);
      args.stream = stream;
      args.n_sequences = host_args.n_sequences = 1;
      OK(tandem_attend, twins.on_device.session, &args);
      OK(tandem_attend, twins.on_host.session, &host_args);
      wait_for(stream);
      there.read_back();
      assert_same(there.o.values, here.o.values, "o of a step", i);
    }
    OK(tandem_step_end, twins.on_device.session, stream);
    wait_for(stream);
  }
  device->table->destroy_stream(device->self, stream);
}

// Sinks and window alone.
void steps_may_name_no_units(void**) {
  Setup setup;
  setup.n_idx = 0;
  setup.plus_window = true;
  for (const int64_t in_steps : {2, 0}) {
    setup.in_steps = in_steps;
    Twins twins(setup);
    twins.attend_all({150, 120}, 50, false);
    void* stream = make_stream();
    const std::array<int64_t, 2> one = {1, 1};
    OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream);
    for (int32_t l = 0; l < kNamedLayers; ++l) {
      NamedCall there(one, 100 + l), here(one, 100 + l);
      if (in_steps > 0) there.view_idx(setup, {});
      if (in_steps > 0) here.view_idx(setup, {});
      there.to_device(true);
      tandem_attend_args args = there.args(l, twins.on_device.ids);
      args.stream = stream;
      if (in_steps == 0) {
        NamedCall refused(one, 100 + l);
        refused.view_idx(setup, {});
        refused.to_device(true);
        tandem_attend_args with_none = refused.args(l, twins.on_device.ids);
        with_none.stream = stream;
        tandem_error* error = nullptr;
        const int32_t got = tandem_attend(twins.on_device.session, &with_none, &error);
        assert_refused(got, error, TANDEM_ERROR_CAPACITY, "selection.idx.shape[2]", "has room for 0");
      }
      OK(tandem_attend, twins.on_device.session, &args);
      wait_for(stream);
      there.read_back();
      const tandem_attend_args host_args = here.args(l, twins.on_host.ids);
      OK(tandem_attend, twins.on_host.session, &host_args);
      assert_same(there.o.values, here.o.values, "o of a step", l);
    }
    OK(tandem_step_end, twins.on_device.session, stream);
    wait_for(stream);
    device->table->destroy_stream(device->self, stream);
  }
}

// The next step does not begin, and the one after it does.
void steps_tell_of_wrong_indices(void**) {
  Setup setup;
  setup.in_steps = setup.n_idx;
  Twins twins(setup);
  twins.attend_all({150, 120}, 50, false);
  void* stream = make_stream();
  const std::array<int64_t, 2> one = {1, 1};
  const auto begin = [&](tandem_error** error) {
    return tandem_step_begin(twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream, error);
  };
  tandem_error* error = nullptr;
  assert_int_equal(begin(&error), TANDEM_OK);
  for (int32_t l = 0; l < kNamedLayers; ++l) {
    NamedCall call(one, 70 + l);
    std::vector<int32_t> idx = twins.draw(l, one);
    if (l == 1) idx[static_cast<size_t>(3 * setup.n_idx)] = 1000;  // of the second sequence, head 1
    call.view_idx(setup, idx);
    call.to_device(true);
    tandem_attend_args args = call.args(l, twins.on_device.ids);
    args.stream = stream;
    OK(tandem_attend, twins.on_device.session, &args);
    wait_for(stream);
  }
  OK(tandem_step_end, twins.on_device.session, stream);
  wait_for(stream);
  const int32_t got = begin(&error);
  assert_refused(got, error, kInvalid, "selection.idx", "layer 1: selection.idx[1, 1, 0] = 1000");
  error = nullptr;
  assert_int_equal(begin(&error), TANDEM_OK);
  OK(tandem_step_end, twins.on_device.session, stream);  // nothing of it came: it is taken back
  device->table->destroy_stream(device->self, stream);
}

// Where a kernel is not launched, or indices are not sent, nothing has been appended, and later calls are right.
void failures_leave_nothing(void**) {
  if (cuda_module != nullptr) return;
  for (const stand_in::Call failing : {stand_in::kNameKeys, stand_in::kCopy, stand_in::kAppend, stand_in::kAttend})
    for (const bool host_idx : {false, true}) {
      Setup setup;
      setup.host_idx = host_idx;
      Twins twins(setup);
      twins.attend_all({90, 60}, 50, true);
      NamedCall call({2, 1}, 70);
      call.view_idx(setup, twins.draw(0, {2, 1}));
      call.to_device(!host_idx);
      const tandem_attend_args args = call.args(0, twins.on_device.ids);
      controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
      tandem_error* error = nullptr;
      assert_int_equal(tandem_attend(twins.on_device.session, &args, &error), TANDEM_ERROR_BACKEND);
      tandem_error_release(error);
      controls.fail_call(failing, INT64_MAX, TANDEM_OK);
      int64_t n = 0;
      OK(tandem_sequence_length, &n, twins.on_device.cache, twins.on_device.ids[0], 0);
      assert_int_equal(n, 90);
      twins.attend_all({2, 1}, 90, true);
    }
}

void refuses_in_planned_steps(void**) {
  Twins twins({TANDEM_F32, 64, 0, 1, 3, false, false, false, false, 0, TANDEM_ROPE_CALLER, false, 2});
  twins.attend_all({100, 100}, 50, true);
  void* stream = nullptr;
  tandem::DeviceError device_error;
  device->must(device->table->create_stream(device->self, &stream, &device_error), device_error);
  const std::array<int64_t, 2> one = {1, 1};
  OK(tandem_step_begin, twins.on_device.session, twins.on_device.ids.data(), one.data(), 2, stream);
  const auto refuse = [&](int32_t status, const char* field, const char* text, auto change) {
    NamedCall call(one, 70);
    Setup setup = twins.setup;
    setup.n_idx = 2;
    bool idx_on_device = true;
    change(&setup, &idx_on_device);
    call.view_idx(setup, std::vector<int32_t>(static_cast<size_t>(2 * kHeads * setup.n_idx), -1));
    call.to_device(idx_on_device);
    tandem_attend_args args = call.args(0, twins.on_device.ids);
    args.stream = stream;
    tandem_error* error = nullptr;
    const int32_t got = tandem_attend(twins.on_device.session, &args, &error);
    assert_refused(got, error, status, field, text);
  };
  refuse(TANDEM_ERROR_CAPACITY, "selection.idx.shape[2]", "= 3", [](Setup* setup, bool*) { setup->n_idx = 3; });
  refuse(kUnsupported, "selection.flags", "ANY_ORDER", [](Setup* setup, bool*) { setup->any_order = true; });
  refuse(kUnsupported, "selection.idx.device_type", "host memory", [](Setup*, bool* on_device) { *on_device = false; });
  for (int32_t l = 0; l < kNamedLayers; ++l) {
    NamedCall call(one, 80 + l);
    call.to_device(false);
    tandem_attend_args args = call.args(l, twins.on_device.ids);
    args.stream = stream;
    OK(tandem_attend, twins.on_device.session, &args);
    wait_for(stream);
  }
  OK(tandem_step_end, twins.on_device.session, stream);
  wait_for(stream);
  device->table->destroy_stream(device->self, stream);
}

int open_device(void**) {
  device = std::make_unique<tandem::test::OpenDevice>(cuda_module != nullptr ? cuda_module : kStandIn);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) cuda_module = argv[1];
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(answers_are_those_of_host_tensors, forget),
      cmocka_unit_test_teardown(guesses_see_what_they_name, forget),
      cmocka_unit_test_teardown(other_keys_are_not_read, forget),
      cmocka_unit_test_teardown(wrong_indices_are_told_later, forget),
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(attends_in_planned_steps, forget),
      cmocka_unit_test_teardown(steps_may_have_fewer_sequences, forget),
      cmocka_unit_test_teardown(steps_may_name_no_units, forget),
      cmocka_unit_test_teardown(steps_tell_of_wrong_indices, forget),
      cmocka_unit_test_teardown(failures_leave_nothing, forget),
      cmocka_unit_test_teardown(refuses_in_planned_steps, forget),
  };
  return cmocka_run_group_tests(tests, open_device, close_stand_in);
}
