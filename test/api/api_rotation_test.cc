// SPDX-License-Identifier: MIT
// Rotated keys at the ABI: attention gives the results of unrotated keys, outlier dims cost the other dims less precision,
// rows are read back as they were written, and keys that cannot be rotated are refused.
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "api_world.h"
#include "reference/attention_reference.h"
#include "reference/gate.h"
#include "reference/stored_row.h"

using namespace tandem_test;

namespace {

constexpr int32_t kHadamard = TANDEM_ROTATION_HADAMARD;
constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr int32_t kVDim = 64;
constexpr float kOutlier = 6.0f;  // every other element is within 0.5

struct Setup {
  int32_t k_type = TANDEM_F32, v_type = TANDEM_F32, k_dim = 64, k_rotation = kHadamard;
  const char* policy = "all";
};

// Rows [n_tokens, n_heads, dim] in f32 or, on request, in bf16 with the same values.
struct Rows {
  std::vector<float> values;
  std::vector<uint16_t> halves;
  tandem_tensor view = {};

  Rows(int64_t n_tokens, int32_t n_heads, int32_t dim, float scale, int64_t seed, int32_t dtype = TANDEM_F32) {
    for (int64_t i = 0; i < n_tokens * n_heads * dim; ++i) {
      const auto bits = std::bit_cast<uint32_t>(scale * noise(i, seed)) & (dtype == TANDEM_BF16 ? 0xFFFF0000u : ~0u);
      values.push_back(std::bit_cast<float>(bits));
      halves.push_back(static_cast<uint16_t>(bits >> 16));
    }
    const int64_t shape[3] = {n_tokens, n_heads, dim};
    void* data = dtype == TANDEM_BF16 ? static_cast<void*>(halves.data()) : values.data();
    OK(tandem_tensor_init, &view, dtype, data, 3, shape);
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
};

// Keys with outliers at dims first, first + period, and so on.
std::unique_ptr<Rows> keys(int64_t n_tokens, int32_t dim, int64_t seed, int32_t first = 5, int32_t period = 32) {
  auto rows = std::make_unique<Rows>(n_tokens, kKvHeads, dim, 1.0f, seed);
  for (int64_t row = 0; row < n_tokens * kKvHeads; ++row)
    for (int32_t i = first; i < dim; i += period) rows->values[static_cast<size_t>(row * dim + i)] += kOutlier;
  return rows;
}

struct Attended {
  std::vector<float> o, lse;
};

// One layer of kQHeads / kKvHeads heads with a session, on the world's engine.
struct Lane {
  Setup setup;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;

  Lane(const World& world, const Setup& wanted) : setup(wanted) {
    tandem_layer_options layer = plain_layer();
    layer.k_head_dim = setup.k_dim;
    layer.v_head_dim = kVDim;
    OK(tandem_model_create, &model, &layer, 1);
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.k_type = setup.k_type;
    options.v_type = setup.v_type;
    options.k_rotation = setup.k_rotation;
    options.page_tokens = 16;
    OK(tandem_cache_create, &cache, world.engine, model, &options);
    tandem_session_options how = world_session_options();
    how.policy = setup.policy;
    OK(tandem_session_create, &session, cache, &how);
  }
  ~Lane() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  int64_t create() const {
    int64_t sequence = 0;
    OK(tandem_sequence_create, &sequence, cache);
    return sequence;
  }
  void append(int64_t sequence, int64_t n_tokens, int64_t seed) const {
    const auto k = keys(n_tokens, setup.k_dim, seed);
    const Rows v(n_tokens, kKvHeads, kVDim, 1.0f, seed + 1);
    OK(tandem_sequence_append, cache, sequence, 0, &k->view, &v.view, nullptr);
  }
  struct Call {
    std::vector<int64_t> sequences, q_lens;
    bool appends = true;
    uint32_t flags = 0;
    const int32_t* parent_idx = nullptr;
  };
  Attended attend(const Call& call, int64_t seed) const {
    int64_t n = 0;
    for (const int64_t q_len : call.q_lens) n += q_len;
    const Rows q(n, kQHeads, setup.k_dim, 8.0f, seed);
    return attend(call, q.view, seed);
  }
  Attended attend(const Call& call, const tandem_tensor& q, int64_t seed) const {
    const int64_t n = q.shape[0];
    const auto k = keys(n, setup.k_dim, seed + 1);
    const Rows v(n, kKvHeads, kVDim, 1.0f, seed + 2);
    Tensor o({n, kQHeads, kVDim}), lse({n, kQHeads});
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = static_cast<int32_t>(call.sequences.size());
    args.sequences = call.sequences.data();
    args.q_lens = call.q_lens.data();
    args.flags = call.flags;
    args.parent_idx = call.parent_idx;
    args.q = &q;
    args.k = call.appends ? &k->view : nullptr;
    args.v = call.appends ? &v.view : nullptr;
    args.o = &o.view;
    args.lse = &lse.view;
    OK(tandem_attend, session, &args);
    return {o.values, lse.values};
  }
  Tensor read_k(int64_t sequence) const {
    Tensor k({length(sequence), kKvHeads, setup.k_dim});
    OK(tandem_sequence_read, &k.view, nullptr, cache, sequence, 0, 0);
    return k;
  }
  Tensor read_v(int64_t sequence) const {
    Tensor v({length(sequence), kKvHeads, kVDim});
    OK(tandem_sequence_read, nullptr, &v.view, cache, sequence, 0, 0);
    return v;
  }
  int64_t length(int64_t sequence) const {
    int64_t n = 0;
    OK(tandem_sequence_length, &n, cache, sequence, 0);
    return n;
  }
  uint64_t digest(int64_t sequence) const {
    uint64_t value = 0;
    OK(tandem_sequence_digest, &value, cache, sequence);
    return value;
  }
};

// Rotates a row by the definition.
void rotate(double* row, int32_t n) {
  std::vector<double> out(static_cast<size_t>(n));
  for (uint32_t i = 0; i < static_cast<uint32_t>(n); ++i)
    for (uint32_t j = 0; j < static_cast<uint32_t>(n); ++j)
      out[i] += (std::popcount(i & j) % 2 == 0 ? row[j] : -row[j]) / std::sqrt(static_cast<double>(n));
  std::copy(out.begin(), out.end(), row);
}

// ---- what queries see ----

void check_against_truth(const Lane& lane, int64_t sequence, const Rows& q, const Attended& got) {
  reference::RefLayer layer;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = lane.setup.k_dim;
  layer.v_head_dim = kVDim;
  layer.k_type = lane.setup.k_type;
  layer.v_type = lane.setup.v_type;
  const Tensor k = lane.read_k(sequence), v = lane.read_v(sequence);
  const int64_t n = lane.length(sequence), q_len = q.view.shape[0];
  const std::vector<int64_t> positions(static_cast<size_t>(n), 0);
  const reference::LayerRows rows{&layer, n, k.values.data(), v.values.data(), positions.data()};
  reference::Queries queries;
  queries.n_tokens = q_len;
  queries.q = q.values.data();
  queries.positions = positions.data();
  queries.visible = [&](int64_t t, int32_t, std::vector<int64_t>* seen) {
    for (int64_t j = 0; j <= n - q_len + t; ++j) seen->push_back(j);
  };
  const reference::Truth truth = attend_reference(rows, queries);
  const auto at = [](int64_t token, int32_t head) { return static_cast<size_t>(token * kQHeads + head); };
  reference::GateCall gate;
  gate.truth = &truth;
  gate.layer = &layer;
  gate.o = [&](int64_t token, int32_t head, int32_t dim) {
    return static_cast<double>(got.o[at(token, head) * kVDim + static_cast<size_t>(dim)]);
  };
  gate.lse = [&](int64_t token, int32_t head) { return static_cast<double>(got.lse[at(token, head)]); };
  const reference::GateVerdict verdict = check_gate(gate);
  if (verdict.pass) return;
  print_error("%s, dim %d, %lld queries of %s: %s\n", tandem_dtype_name(lane.setup.k_type), lane.setup.k_dim,
              static_cast<long long>(q_len), tandem_dtype_name(q.view.dtype), verdict.message.c_str());
  _fail(__FILE__, __LINE__);
}

// Attends the stored keys, rotated back, with unrotated queries: one query, a few, and enough for matrix products.
void attends_the_stored_keys(void**) {
  const World world;
  for (const int32_t type : kTypes) {
    for (const int32_t k_dim : {64, 128, 256}) {
      for (const int32_t q_type : {TANDEM_F32, TANDEM_BF16}) {
        const Lane lane(world, {type, type, k_dim});
        const int64_t sequence = lane.create();
        lane.append(sequence, 150, 1);
        for (const int64_t q_len : {1, 3, 40}) {
          const Rows q(q_len, kQHeads, k_dim, 4.0f, 20 + q_len, q_type);
          check_against_truth(lane, sequence, q, lane.attend({{sequence}, {q_len}}, q.view, 30 + q_len));
        }
      }
    }
  }
}

// Makes the same calls with and without rotation.
class Twins {
 public:
  Twins(const World& world, const char* policy)
      : rotated_(world, {TANDEM_F32, TANDEM_F32, 64, kHadamard, policy}),
        plain_(world, {TANDEM_F32, TANDEM_F32, 64, TANDEM_ROTATION_NONE, policy}) {}

  template <typename Do>
  void both(Do&& call) {
    call(rotated_);
    call(plain_);
  }
  void attend(const Lane::Call& call) {
    ++seed_;
    const Attended a = rotated_.attend(call, 100 * seed_), b = plain_.attend(call, 100 * seed_);
    compare("o", a.o, b.o);
    compare("lse", a.lse, b.lse);
  }
  void decode(int64_t sequence, int n) {
    for (int i = 0; i < n; ++i) attend({{sequence}, {1}});
  }
  // The sequences have the same ids in both caches.
  int64_t fork(int64_t sequence) {
    int64_t ids[2] = {}, *id = ids;
    both([&](const Lane& lane) { OK(tandem_sequence_fork, id++, lane.cache, sequence); });
    assert_int_equal(ids[0], ids[1]);
    return ids[0];
  }
  // Compares the keys that each head would attend, and their shares.
  void compare_selections(int64_t sequence) {
    for (int32_t head = 0; head < kQHeads; ++head) {
      std::vector<std::vector<int64_t>> kept;
      std::vector<std::vector<float>> shares;
      both([&](const Lane& lane) {
        int64_t n_kept = 0;
        std::vector<int64_t>& tokens = kept.emplace_back(1000);
        std::vector<float>& share = shares.emplace_back(1000);
        OK(tandem_session_selection, tokens.data(), share.data(), 1000, &n_kept, lane.session, sequence, 0,
           head / (kQHeads / kKvHeads), head % (kQHeads / kKvHeads));
        tokens.resize(static_cast<size_t>(n_kept));
        share.resize(static_cast<size_t>(n_kept));
      });
      assert_true(kept[0] == kept[1]);
      compare("share", shares[0], shares[1]);
    }
  }

 private:
  void compare(const char* what, const std::vector<float>& rotated, const std::vector<float>& plain) const {
    assert_int_equal(rotated.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      if (std::fabs(rotated[i] - plain[i]) <= 1e-5f * std::max(1.0f, std::fabs(plain[i]))) continue;
      print_error("%s, call %lld: %s[%zu] is %.9g, without rotation %.9g\n", plain_.setup.policy,
                  static_cast<long long>(seed_), what, i, static_cast<double>(rotated[i]), static_cast<double>(plain[i]));
      _fail(__FILE__, __LINE__);
    }
  }

  Lane rotated_, plain_;
  int64_t seed_ = 0;
};

void changes_no_answer(void**) {
  const World world;
  for (const char* policy : {"all", "streaming", "hgca"}) {
    Twins twins(world, policy);
    int64_t sequence = 0;
    twins.both([&](const Lane& lane) { sequence = lane.create(); });
    twins.attend({{sequence}, {60}, true, TANDEM_ATTEND_PARTIAL});
    twins.attend({{sequence}, {40}});
    twins.compare_selections(sequence);
    twins.decode(sequence, 20);
    twins.compare_selections(sequence);
    const int64_t fork = twins.fork(sequence);
    twins.decode(fork, 5);
    twins.attend({{sequence, fork}, {3, 1}});
    const int32_t parents[] = {-1, 0, 0, 1, 2};
    const int64_t kept[] = {0, 2, 4};
    twins.attend({{sequence}, {5}, true, TANDEM_ATTEND_SPECULATIVE, parents});
    twins.both([&](const Lane& lane) { OK(tandem_session_commit, lane.session, sequence, kept, 3); });
    twins.decode(sequence, 6);
    twins.compare_selections(sequence);
    twins.both([&](const Lane& lane) {
      OK(tandem_sequence_truncate, lane.cache, sequence, 90);
      lane.append(sequence, 7, 7);
      OK(tandem_sequence_remove, lane.cache, fork, 10, 20, 0);
    });
    twins.attend({{sequence}, {3}, false});
    twins.decode(sequence, 40);
    twins.decode(fork, 12);
    twins.compare_selections(sequence);
    twins.compare_selections(fork);
  }
}

// ---- what is stored ----

// Returns the root mean square error of logits of q4_0 keys. A sequence of one key has the logit as its lse.
double logit_error(const World& world, const Setup& setup, int32_t outlier_period) {
  const Lane lane(world, setup);
  constexpr int64_t kKeys = 64;
  const auto k = keys(kKeys, setup.k_dim, 3, 5, outlier_period);
  const Rows v(1, kKvHeads, kVDim, 1.0f, 4), q(1, kQHeads, setup.k_dim, 1.0f, 5);
  double squares = 0;
  for (int64_t token = 0; token < kKeys; ++token) {
    tandem_tensor one = k->view;
    one.shape[0] = 1;
    const float* key = k->values.data() + token * kKvHeads * setup.k_dim;
    one.data = const_cast<float*>(key);
    const int64_t sequence = lane.create();
    OK(tandem_sequence_append, lane.cache, sequence, 0, &one, &v.view, nullptr);
    const Attended got = lane.attend({{sequence}, {1}, false}, q.view, 0);
    for (int32_t head = 0; head < kQHeads; ++head) {
      double logit = 0;
      for (int32_t i = 0; i < setup.k_dim; ++i)
        logit += static_cast<double>(q.values[static_cast<size_t>(int64_t{head} * setup.k_dim + i)]) *
                 static_cast<double>(key[head / (kQHeads / kKvHeads) * setup.k_dim + i]);
      const double error = static_cast<double>(got.lse[static_cast<size_t>(head)]) - logit / std::sqrt(setup.k_dim);
      squares += error * error / (kKeys * kQHeads);
    }
  }
  return std::sqrt(squares);
}

// Returns the digest of the same keys stored with this type, dims and rotation.
uint64_t digest_of(const World& world, int32_t k_type, int32_t k_dim, int32_t k_rotation) {
  const Lane lane(world, {k_type, TANDEM_F32, k_dim, k_rotation});
  const int64_t sequence = lane.create();
  lane.append(sequence, 40, 5);
  return lane.digest(sequence);
}

void keys_of_4_bits_are_rotated_by_default(void**) {
  const World world;
  for (const int32_t type : kTypes)
    for (const int32_t k_dim : {64, 96, 256}) {
      const bool is_rotated = type == TANDEM_Q4_0 && k_dim != 96;
      const uint64_t by_default = digest_of(world, type, k_dim, TANDEM_ROTATION_DEFAULT);
      assert_int_equal(by_default == digest_of(world, type, k_dim, TANDEM_ROTATION_NONE), !is_rotated);
      if (k_dim != 96) assert_int_equal(by_default == digest_of(world, type, k_dim, kHadamard), is_rotated);
    }
}

// Tests 4-bit keys of one layer. is_refused: an explicit rotation is refused.
void assert_default_is_none(const tandem_layer_options& layer, int32_t x_type, bool is_refused) {
  const World world;
  tandem_model* model = nullptr;
  OK(tandem_model_create, &model, &layer, 1);
  uint64_t digests[2] = {};
  for (const int32_t rotation : {TANDEM_ROTATION_DEFAULT, TANDEM_ROTATION_NONE, kHadamard}) {
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.k_type = TANDEM_Q4_0;
    options.k_rotation = rotation;
    options.x_type = x_type;
    tandem_cache* cache = nullptr;
    const int32_t status = tandem_cache_create(&cache, world.engine, model, &options, nullptr);
    assert_int_equal(status, rotation == kHadamard && is_refused ? TANDEM_ERROR_UNSUPPORTED : TANDEM_OK);
    if (rotation != kHadamard) {
      int64_t sequence = 0;
      const auto k = keys(40, layer.k_head_dim, 5);
      const Rows v(40, kKvHeads, layer.k_head_dim, 1.0f, 6), x(40, 1, 128, 1.0f, 7);
      tandem_tensor hidden = {};
      const int64_t shape[2] = {40, 128};
      OK(tandem_tensor_init, &hidden, TANDEM_F32, x.view.data, 2, shape);
      OK(tandem_sequence_create, &sequence, cache);
      const tandem_tensor* const values = layer.v_aliases_k != 0 ? nullptr : &v.view;
      if (x_type != 0)
        OK(tandem_sequence_append_x, cache, sequence, 0, &k->view, values, &hidden, nullptr);
      else
        OK(tandem_sequence_append, cache, sequence, 0, &k->view, values, nullptr);
      OK(tandem_sequence_digest, &digests[rotation == TANDEM_ROTATION_NONE ? 1 : 0], cache, sequence);
    }
    tandem_cache_release(cache);
  }
  assert_true(digests[0] == digests[1]);
  tandem_model_release(model);
}

void the_default_rotates_nothing_that_cannot_be(void**) {
  tandem_layer_options layer = plain_layer();
  layer.rope = TANDEM_ROPE_HALVES;
  assert_default_is_none(layer, 0, true);
  layer = plain_layer();
  layer.v_aliases_k = 1;
  assert_default_is_none(layer, 0, true);
  // Hidden states are kept for route "recompute", which requires unrotated keys.
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  projection.hidden_dim = 128;
  projection.w_type = TANDEM_BF16;  // the weights are not used here
  layer = plain_layer();
  layer.projection = &projection;
  assert_default_is_none(layer, TANDEM_BF16, false);
}

// With an outlier in each group of 32 dims, the other dims of the group lose codes. With an outlier in only one group, only
// that group does.
void outliers_cost_less(void**) {
  const World world;
  for (const int32_t k_dim : {64, 128, 256}) {
    for (const int32_t period : {32, 256}) {
      const double plain = logit_error(world, {TANDEM_Q4_0, TANDEM_F32, k_dim, TANDEM_ROTATION_NONE}, period);
      const double rotated = logit_error(world, {TANDEM_Q4_0, TANDEM_F32, k_dim, kHadamard}, period);
      if ((period == 32 ? 3.0 : 2.0) * rotated < plain) continue;
      print_error("dim %d, an outlier every %d: error of logits %.4f, rotated %.4f\n", k_dim, period, plain, rotated);
      _fail(__FILE__, __LINE__);
    }
  }
}

// Rows are rotated by the definition, rounded, and rotated back. Some numbers fall on a rounding boundary, where the
// library's f32 and the test's double differ. This affects few rows.
void rows_come_back(void**) {
  const World world;
  constexpr int64_t kRows = 200;
  for (const int32_t type : kTypes) {
    const Lane lane(world, {type, type, 128}), plain(world, {type, type, 128, TANDEM_ROTATION_NONE});
    const int64_t sequence = lane.create(), unrotated = plain.create();
    lane.append(sequence, kRows / kKvHeads, 1);
    plain.append(unrotated, kRows / kKvHeads, 1);
    assert_true(lane.digest(sequence) != plain.digest(unrotated));
    assert_memory_equal(lane.read_v(sequence).values.data(), plain.read_v(unrotated).values.data(),
                        kRows * kVDim * sizeof(float));
    const auto k = keys(kRows / kKvHeads, 128, 1);
    const Tensor got = lane.read_k(sequence);
    int n_parted = 0;
    for (int64_t row = 0; row < kRows; ++row) {
      std::vector<double> want(k->values.begin() + row * 128, k->values.begin() + (row + 1) * 128);
      rotate(want.data(), 128);
      reference::round_row(type, want.data(), 128);
      rotate(want.data(), 128);
      double worst = 0;
      for (int64_t i = 0; i < 128; ++i)
        worst = std::max(worst, std::fabs(static_cast<double>(got.values[static_cast<size_t>(row * 128 + i)]) -
                                          want[static_cast<size_t>(i)]));
      n_parted += worst > 2e-6 ? 1 : 0;
    }
    if (n_parted > kRows / 20) {
      print_error("%s: %d of %lld rows differ\n", tandem_dtype_name(type), n_parted, static_cast<long long>(kRows));
      _fail(__FILE__, __LINE__);
    }
  }
}

// Blocks are widened, rotated and rounded again. Reading gives blocks of the stored values, rotated back.
void blocks_in_and_out(void**) {
  const World world;
  constexpr int64_t kRows = 40 * kKvHeads;
  for (const int32_t type : {TANDEM_Q8_0, TANDEM_Q4_0}) {
    const Lane lane(world, {TANDEM_F32, TANDEM_F32, 64});
    const auto k = keys(40, 64, 9);
    const Rows v(40, kKvHeads, kVDim, 1.0f, 10);
    std::vector<uint8_t> blocks;
    std::vector<double> widened(k->values.begin(), k->values.end());
    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<uint8_t> bytes = reference::block_row(type, widened.data() + row * 64, 64);
      blocks.insert(blocks.end(), bytes.begin(), bytes.end());
      reference::round_row(type, widened.data() + row * 64, 64);
    }
    tandem_tensor view = {};
    const int64_t shape[3] = {40, kKvHeads, 64};
    OK(tandem_tensor_init, &view, type, blocks.data(), 3, shape);
    const int64_t sequence = lane.create();
    OK(tandem_sequence_append, lane.cache, sequence, 0, &view, &v.view, nullptr);
    const Tensor got = lane.read_k(sequence);
    for (size_t i = 0; i < widened.size(); ++i)
      assert_true(std::fabs(static_cast<double>(got.values[i]) - widened[i]) < 4e-6);
    // Rotating and rotating back in f32 may move a number across the boundary between two codes. Few numbers are so close
    // to one.
    std::vector<uint8_t> out(blocks.size());
    view.data = out.data();
    OK(tandem_sequence_read, &view, nullptr, lane.cache, sequence, 0, 0);
    int n_different = 0;
    for (size_t i = 0; i < out.size(); ++i) n_different += out[i] != blocks[i] ? 1 : 0;
    assert_true(n_different <= static_cast<int>(out.size() / 20));
  }
}

// The first layer's keys can be rotated and the other layers' cannot. Sizes must equal those without rotation.
void rotation_changes_no_size(void**) {
  const World world;
  std::vector<tandem_layer_options> layers(3, plain_layer());
  layers[1].k_head_dim = 80;
  layers[2].v_aliases_k = 1;
  tandem_model* model = nullptr;
  OK(tandem_model_create, &model, layers.data(), 3);
  const int64_t kv_len = 1000;
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = TANDEM_Q4_0;
  tandem_memory_plan plans[2] = {TANDEM_MEMORY_PLAN_INIT, TANDEM_MEMORY_PLAN_INIT};
  OK(tandem_plan_memory, &plans[0], world.engine, model, &options, nullptr, &kv_len, 1);
  options.k_rotation = TANDEM_ROTATION_NONE;
  OK(tandem_plan_memory, &plans[1], world.engine, model, &options, nullptr, &kv_len, 1);
  assert_memory_equal(&plans[0], &plans[1], sizeof plans[0]);
  tandem_cache* cache = nullptr;
  OK(tandem_cache_create, &cache, world.engine, model, &options);
  tandem_cache_release(cache);
  tandem_model_release(model);
}

// ---- refusals ----

void refusals(void**) {
  const World world;
  Outputs out;
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kUnsupported = TANDEM_ERROR_UNSUPPORTED;
  tandem_layer_options narrow = plain_layer(), rope = plain_layer(), alias = plain_layer();
  narrow.k_head_dim = 96;
  rope.rope = TANDEM_ROPE_INTERLEAVED;
  alias.v_aliases_k = 1;
  tandem_cache_options hadamard = TANDEM_CACHE_OPTIONS_INIT, wrong = TANDEM_CACHE_OPTIONS_INIT;
  hadamard.k_rotation = kHadamard;
  wrong.k_rotation = 3;
  const auto supports = [&](const tandem_layer_options& layer, const tandem_cache_options& cache) {
    return [&](tandem_error** e) { return tandem_supports(world.engine, &layer, &cache, nullptr, e); };
  };
  const auto create = [&](const tandem_cache_options& cache) {
    return
        [&](tandem_error** e) { return tandem_cache_create(out.at<tandem_cache*>(), world.engine, world.model, &cache, e); };
  };
  const tandem_layer_options plain = plain_layer();
  check_all_refused(
      world,
      {
          {"value", "tandem_supports", kInvalid, "k_rotation", "3", supports(plain, wrong)},
          {"head_dim", "tandem_supports", kUnsupported, "k_rotation", "k_head_dim = 96 is not a power of two",
           supports(narrow, hadamard)},
          {"RoPE", "tandem_supports", kUnsupported, "k_rotation", "1, but the library applies RoPE",
           supports(rope, hadamard)},
          {"alias", "tandem_supports", kUnsupported, "k_rotation", "1, but V aliases K", supports(alias, hadamard)},
          {"value", "tandem_cache_create", kInvalid, "k_rotation", "3", create(wrong)},
          {"layer", "tandem_cache_create", kUnsupported, "k_rotation", "(layer 1)", create(hadamard)},
      },
      &out);
  OK(tandem_supports, world.engine, &plain, &hadamard, nullptr);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(attends_the_stored_keys),
      cmocka_unit_test(changes_no_answer),
      cmocka_unit_test(keys_of_4_bits_are_rotated_by_default),
      cmocka_unit_test(the_default_rotates_nothing_that_cannot_be),
      cmocka_unit_test(outliers_cost_less),
      cmocka_unit_test(rows_come_back),
      cmocka_unit_test(blocks_in_and_out),
      cmocka_unit_test(rotation_changes_no_size),
      cmocka_unit_test(refusals),
  };
  return cmocka_run_group_tests_name("api_rotation_test", tests, nullptr, nullptr);
}
