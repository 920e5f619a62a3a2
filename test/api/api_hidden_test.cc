// SPDX-License-Identifier: MIT
// Hidden states in a cache: refused projections and tensors, hidden states that stay with their tokens through all changes
// of a sequence, and their counts.
#include <algorithm>
#include <cmath>

#include "api_world.h"
#include "reference/random.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kUnsupported = TANDEM_ERROR_UNSUPPORTED;
constexpr int32_t kHidden = 72;
constexpr int64_t kXBytes = 2 * kHidden;
constexpr int32_t kLongHidden = 704;  // more than a row of K may have, and a multiple of the group size

// Layer 0 has a projection, layer 1 has none.
struct HiddenWorld {
  int32_t x_type, n_hidden;
  World world;
  std::vector<uint16_t> w = std::vector<uint16_t>(static_cast<size_t>(kLongHidden) * kKvHeads * kDim, 0x3c00);
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  std::vector<tandem_layer_options> layers = std::vector<tandem_layer_options>(2, plain_layer());
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;

  explicit HiddenWorld(int32_t kept_type = TANDEM_BF16, int32_t hidden_dim = kHidden)
      : x_type(kept_type), n_hidden(hidden_dim) {
    projection.hidden_dim = n_hidden;
    projection.w_type = TANDEM_F16;
    projection.w_k = projection.w_v = w.data();
    layers[0].projection = &projection;
    OK(tandem_model_create, &model, layers.data(), 2);
    options.x_type = x_type;
    options.page_tokens = 16;
    OK(tandem_cache_create, &cache, world.engine, model, &options);
    tandem_session_options session_options = TANDEM_SESSION_OPTIONS_INIT;
    session_options.window_tokens = 24;
    OK(tandem_session_create, &session, cache, &session_options);
  }
  HiddenWorld(const HiddenWorld&) = delete;
  ~HiddenWorld() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
};

void refuses_projections(void**) {
  HiddenWorld hidden;
  const World& world = hidden.world;
  const float vector[kHidden] = {};
  struct Case {
    int32_t status;
    const char *member, *value;
    std::function<void(tandem_layer_projection&, tandem_layer_options&)> change;
  };
  const std::vector<Case> wrong = {
      {kInvalid, "projection.struct_size", "4", [](auto& p, auto&) { p.struct_size = 4; }},
      {kInvalid, "projection.hidden_dim", "0", [](auto& p, auto&) { p.hidden_dim = 0; }},
      {kInvalid, "projection.hidden_dim", "-8", [](auto& p, auto&) { p.hidden_dim = -8; }},
      {kInvalid, "projection.hidden_dim", "100", [](auto& p, auto&) { p.hidden_dim = 100; }},
      {kInvalid, "projection.hidden_dim", "65544", [](auto& p, auto&) { p.hidden_dim = 65544; }},
      {kInvalid, "projection.w_type", "0", [](auto& p, auto&) { p.w_type = 0; }},
      {kInvalid, "projection.w_type", "99", [](auto& p, auto&) { p.w_type = 99; }},
      {kUnsupported, "projection.w_type", "f32", [](auto& p, auto&) { p.w_type = TANDEM_F32; }},
      {kUnsupported, "projection.w_type", "q4_64", [](auto& p, auto&) { p.w_type = TANDEM_Q4_64; }},
      {kInvalid, "projection.w_order", "2", [](auto& p, auto&) { p.w_order = 2; }},
      {kInvalid, "projection.device_type", "-1", [](auto& p, auto&) { p.device_type = -1; }},
      {kInvalid, "projection.norm", "3", [](auto& p, auto&) { p.norm = 3; }},
      {kInvalid, "projection.norm_eps", "-1", [](auto& p, auto&) { p.norm_eps = -1.0f; }},
      {kInvalid, "projection.norm_eps", "nan", [](auto& p, auto&) { p.norm_eps = NAN; }},
      {kInvalid, "projection.norm_eps", "inf", [](auto& p, auto&) { p.norm_eps = INFINITY; }},
      {kInvalid, "projection.k_rope", "3", [](auto& p, auto&) { p.k_rope = 3; }},
      {kInvalid, "projection.k_rope", "the library rotates",
       [](auto& p, auto& l) { p.k_rope = TANDEM_ROPE_HALVES, l.rope = TANDEM_ROPE_HALVES; }},
      {kInvalid, "rope_theta", "makes angles infinite",
       [](auto& p, auto& l) { p.k_rope = TANDEM_ROPE_HALVES, l.rope_position_scale = 1e-305; }},
      {kInvalid, "projection.w_k", "NULL", [](auto& p, auto&) { p.w_k = nullptr; }},
      {kInvalid, "projection.w_v", "NULL", [](auto& p, auto&) { p.w_v = nullptr; }},
      {kInvalid, "projection.w_v", "multiple of 16",
       [](auto& p, auto&) {
         p.device_type = TANDEM_DEVICE_CUDA, p.w_k = reinterpret_cast<void*>(4096), p.w_v = reinterpret_cast<void*>(4104);
       }},
      {kInvalid, "projection.norm_weight", "without a norm", [&](auto& p, auto&) { p.norm_weight = vector; }},
      {kInvalid, "projection.norm_bias", "without TANDEM_NORM_LAYER",
       [&](auto& p, auto&) { p.norm = TANDEM_NORM_RMS, p.norm_bias = vector; }},
      {kUnsupported, "projection", "V aliases K", [](auto&, auto& l) { l.v_aliases_k = 1; }},
  };
  for (const Case& one : wrong) {
    tandem_layer_projection projection = hidden.projection;
    std::vector<tandem_layer_options> layers = hidden.layers;
    layers[1] = layers[0];
    layers[1].projection = &projection;
    one.change(projection, layers[1]);
    tandem_model* model = nullptr;
    const std::string in_model = std::string("layers[1].") + one.member, alone = std::string("layer.") + one.member;
    check_all_refused(world, {{"model", "tandem_model_create", one.status, in_model.c_str(), one.value,
                               [&](tandem_error** e) { return tandem_model_create(&model, layers.data(), 2, e); }},
                              {"supports", "tandem_supports", one.status, alone.c_str(), one.value, [&](tandem_error** e) {
                                 return tandem_supports(world.engine, &layers[1], nullptr, nullptr, e);
                               }}});
    assert_null(model);
  }
  OK(tandem_supports, world.engine, &hidden.layers[0], &hidden.options, nullptr);
}

void refuses_x_types(void**) {
  const HiddenWorld hidden;
  tandem_cache* cache = nullptr;
  const auto create = [&](const tandem_model* model, int32_t x_type) {
    return [&hidden, &cache, model, x_type](tandem_error** e) {
      tandem_cache_options options = hidden.options;
      options.x_type = x_type;
      return tandem_cache_create(&cache, hidden.world.engine, model, &options, e);
    };
  };
  const char* name = "tandem_cache_create";
  check_all_refused(hidden.world, {{"unknown", name, kInvalid, "x_type", "77", create(hidden.model, 77)},
                                   {"negative", name, kInvalid, "x_type", "-1", create(hidden.model, -1)},
                                   {"f32", name, kUnsupported, "x_type", "f32", create(hidden.model, TANDEM_F32)},
                                   {"e4m3", name, kUnsupported, "x_type", "e4m3", create(hidden.model, TANDEM_E4M3)},
                                   {"short group", name, kUnsupported, "x_type", "hidden_dim = 72 is not a multiple of 64",
                                    create(hidden.model, TANDEM_Q4_64)},
                                   {"nobody's", name, kInvalid, "x_type", "no layer has a projection",
                                    create(hidden.world.model, TANDEM_F16)}});
  assert_null(cache);
}

void refuses_tensors(void**) {
  const HiddenWorld hidden;
  int64_t sequence = 0;
  OK(tandem_sequence_create, &sequence, hidden.cache);
  const Tensor k({3, kKvHeads, kDim}, 1), v({3, kKvHeads, kDim}, 2);
  Tensor x({3, kHidden}, 3), longer({4, kHidden}, 3), wider({3, kHidden + 8}, 3);
  const auto append = [&](int32_t layer, const tandem_tensor* with) {
    return [&hidden, sequence, layer, with, &k, &v](tandem_error** e) {
      return tandem_sequence_append_x(hidden.cache, sequence, layer, &k.view, &v.view, with, nullptr, e);
    };
  };
  tandem_tensor device = x.view, codes = x.view;
  device.device_type = TANDEM_DEVICE_CUDA;
  codes.dtype = TANDEM_Q8_0;
  const char *name = "tandem_sequence_append_x", *attend = "tandem_attend", *read = "tandem_sequence_read_x";
  const auto call_with = [&](int32_t layer, const tandem_tensor* with, bool appends) {
    return [&hidden, sequence, layer, with, appends](tandem_error** e) {
      LayerCall call(sequence, layer, 3, 5);
      call.args.v = &call.v.view;
      if (!appends) call.args.k = call.args.v = nullptr;
      call.args.x = with;
      return tandem_attend(hidden.session, &call.args, e);
    };
  };
  const auto read_to = [&](int32_t layer, const tandem_tensor* to, int64_t first) {
    return [&hidden, sequence, layer, to, first](tandem_error** e) {
      return tandem_sequence_read_x(to, hidden.cache, sequence, layer, first, e);
    };
  };
  check_all_refused(
      hidden.world,
      {{"missing", name, kInvalid, "x", "NULL", append(0, nullptr)},
       {"missing", "tandem_sequence_append", kInvalid, "x", "x_type = 3",
        [&](tandem_error** e) { return tandem_sequence_append(hidden.cache, sequence, 0, &k.view, &v.view, nullptr, e); }},
       {"nobody's", name, kInvalid, "x", "no projection", append(1, &x.view)},
       {"length", name, kInvalid, "x.shape[0]", "4", append(0, &longer.view)},
       {"width", name, kInvalid, "x.shape[1]", "80", append(0, &wider.view)},
       {"device", name, kUnsupported, "x.device_type", "1", append(0, &device)},
       {"blocks", name, kInvalid, "x.dtype", "5", append(0, &codes)},
       {"attend without", attend, kInvalid, "x", "x_type = 3", call_with(0, nullptr, true)},
       {"attend with nobody's", attend, kInvalid, "x", "no projection", call_with(1, &x.view, true)},
       {"attend of other length", attend, kInvalid, "x.shape[0]", "4", call_with(0, &longer.view, true)},
       {"attend without k", attend, kInvalid, "x", "without k", call_with(0, &x.view, false)},
       {"read none", read, kInvalid, "x", "NULL", read_to(0, nullptr, 0)},
       {"read nobody's", read, kInvalid, "x", "no projection", read_to(1, &x.view, 0)},
       {"read what is not there", read, kInvalid, "first", "3 tokens", read_to(0, &x.view, 0)},
       {"read before", read, kInvalid, "first", "-1", read_to(0, &x.view, -1)}});
  int64_t length = -1;
  OK(tandem_sequence_length, &length, hidden.cache, sequence, 0);
  assert_int_equal(length, 0);
}

// Sequences and their expected tokens, each with a hidden state of its own.
class Tokens {
 public:
  explicit Tokens(const HiddenWorld& hidden) : hidden_(hidden) { create(); }

  struct One {
    int64_t id = 0;
    std::vector<int64_t> tokens;
  };
  std::vector<One> all;

  void create() {
    One& made = all.emplace_back();
    OK(tandem_sequence_create, &made.id, hidden_.cache);
  }
  void append(One& to, int64_t n) {
    const std::vector<int64_t> made = draw(n);
    const Tensor k({n, kKvHeads, kDim}, made[0]), v({n, kKvHeads, kDim}, made[0] + 1), x = rows(made);
    OK(tandem_sequence_append_x, hidden_.cache, to.id, 0, &k.view, &v.view, &x.view, nullptr);
    OK(tandem_sequence_append, hidden_.cache, to.id, 1, &k.view, &v.view, nullptr);
    to.tokens.insert(to.tokens.end(), made.begin(), made.end());
  }
  void attend(One& to, int64_t n, uint32_t flags = 0) {
    const std::vector<int64_t> made = draw(n);
    for (int32_t layer = 0; layer < 2; ++layer) {
      LayerCall call(to.id, layer, n, made[0]);
      const Tensor x = rows(made);
      call.args.v = &call.v.view;
      call.args.x = layer == 0 ? &x.view : nullptr;
      call.args.flags = flags;
      OK(tandem_attend, hidden_.session, &call.args);
    }
    to.tokens.insert(to.tokens.end(), made.begin(), made.end());
  }
  void speculate(One& to, reference::Random& random) {
    const auto before = static_cast<int64_t>(to.tokens.size()), n = random.integer(1, 9);
    attend(to, n, TANDEM_ATTEND_SPECULATIVE);
    const int64_t n_kept = random.integer(0, n);  // a chain
    std::vector<int64_t> kept;
    for (int64_t i = 0; i < n_kept; ++i) kept.push_back(i);
    OK(tandem_session_commit, hidden_.session, to.id, kept.data(), n_kept);
    to.tokens.resize(static_cast<size_t>(before + n_kept));
  }
  void check() const {
    const int32_t n_hidden = hidden_.n_hidden;
    for (const One& one : all) {
      const auto n = static_cast<int64_t>(one.tokens.size());
      Tensor got({std::max<int64_t>(n, 1), n_hidden});
      got.view.shape[0] = n;
      OK(tandem_sequence_read_x, &got.view, hidden_.cache, one.id, 0, 0);
      for (int64_t t = 0; t < n; ++t) {
        std::vector<double> wanted;
        for (int32_t i = 0; i < n_hidden; ++i)
          wanted.push_back(static_cast<double>(noise(i, one.tokens[static_cast<size_t>(t)])));
        reference::round_row(hidden_.x_type, wanted.data(), n_hidden);
        for (int32_t i = 0; i < n_hidden; ++i) {
          const auto x = static_cast<double>(got.values[static_cast<size_t>(t * n_hidden + i)]);
          if (const double y = wanted[static_cast<size_t>(i)]; x != y)
            fail_msg("token %lld, element %d: %g, not %g", static_cast<long long>(t), i, x, y);
        }
      }
    }
  }

 private:
  std::vector<int64_t> draw(int64_t n) {
    std::vector<int64_t> made;
    for (int64_t i = 0; i < n; ++i) made.push_back(next_ += 7);
    return made;
  }
  Tensor rows(const std::vector<int64_t>& tokens) const {
    const int32_t n_hidden = hidden_.n_hidden;
    Tensor x({static_cast<int64_t>(tokens.size()), n_hidden});
    for (size_t t = 0; t < tokens.size(); ++t)
      for (int32_t i = 0; i < n_hidden; ++i)
        x.values[t * static_cast<size_t>(n_hidden) + static_cast<size_t>(i)] = noise(i, tokens[t]);
    return x;
  }

  const HiddenWorld& hidden_;
  int64_t next_ = 100;
};

void check_random_use(const HiddenWorld& hidden, uint64_t seed, int n_steps) {
  Tokens tokens(hidden);
  reference::Random random(seed);
  for (int step = 0; step < n_steps; ++step) {
    Tokens::One& one = tokens.all[static_cast<size_t>(random.integer(0, static_cast<int64_t>(tokens.all.size()) - 1))];
    const auto n = static_cast<int64_t>(one.tokens.size());
    switch (random.integer(0, 7)) {
      case 0:
        tokens.append(one, random.integer(1, 50));
        break;
      case 1:
      case 2:
        tokens.attend(one, random.integer(1, 4));
        break;
      case 3:
        tokens.speculate(one, random);
        break;
      case 4: {
        if (tokens.all.size() > 6) break;
        Tokens::One made{0, one.tokens};
        OK(tandem_sequence_fork, &made.id, hidden.cache, one.id);
        tokens.all.push_back(made);
        break;
      }
      case 5:
        one.tokens.resize(static_cast<size_t>(random.integer(n / 2, n)));
        OK(tandem_sequence_truncate, hidden.cache, one.id, static_cast<int64_t>(one.tokens.size()));
        break;
      case 6: {
        const int64_t first = random.integer(0, n), count = random.integer(0, n - first);
        OK(tandem_sequence_remove, hidden.cache, one.id, first, count, 0);
        one.tokens.erase(one.tokens.begin() + first, one.tokens.begin() + first + count);
        break;
      }
      default:
        tokens.create();
    }
    tokens.check();
  }
}

void stay_with_their_tokens(void**) {
  for (uint64_t seed = 1; seed <= 6; ++seed) check_random_use(HiddenWorld(), seed, 60);
}

void stay_what_their_type_makes_them(void**) {
  for (const int32_t x_type : {TANDEM_F16, TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64})
    check_random_use(HiddenWorld(x_type, kLongHidden), static_cast<uint64_t>(x_type), 40);
}

// A NaN or infinity spoils its group and no other. f16 is rounded as f32 is, and read as f32 is, rounded.
void lose_a_group_at_most(void**) {
  for (const int32_t x_type : {TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64}) {
    const HiddenWorld hidden(x_type, kLongHidden);
    const int32_t group = x_type == TANDEM_Q4_64 ? 64 : 32;
    const Tensor k({1, kKvHeads, kDim}, 1), v({1, kKvHeads, kDim}, 2);
    std::vector<double> x;
    for (int32_t i = 0; i < kLongHidden; ++i) x.push_back(reference::round_to(TANDEM_F16, static_cast<double>(noise(i, 3))));
    std::vector<uint16_t> halves(kLongHidden), read_halves(kLongHidden);
    reference::store_all(TANDEM_F16, x.data(), kLongHidden, reinterpret_cast<std::byte*>(halves.data()));
    halves[70] = 0x7e00;   // NaN
    halves[700] = 0xfc00;  // -infinity, after the first 576 elements
    tandem_tensor view = {}, read_view = {};
    const int64_t shape[] = {1, kLongHidden};
    OK(tandem_tensor_init, &view, TANDEM_F16, halves.data(), 2, shape);
    OK(tandem_tensor_init, &read_view, TANDEM_F16, read_halves.data(), 2, shape);
    int64_t id = 0;
    OK(tandem_sequence_create, &id, hidden.cache);
    OK(tandem_sequence_append_x, hidden.cache, id, 0, &k.view, &v.view, &view, nullptr);
    Tensor got({1, kLongHidden});
    OK(tandem_sequence_read_x, &got.view, hidden.cache, id, 0, 0);
    OK(tandem_sequence_read_x, &read_view, hidden.cache, id, 0, 0);
    std::vector<double> from_halves(kLongHidden);
    reference::load_all(TANDEM_F16, reinterpret_cast<const std::byte*>(read_halves.data()), kLongHidden, from_halves.data());
    reference::round_row(x_type, x.data(), kLongHidden);
    for (int32_t i = 0; i < kLongHidden; ++i) {
      const auto one = static_cast<double>(got.values[static_cast<size_t>(i)]), half = from_halves[static_cast<size_t>(i)];
      if (i / group == 70 / group || i / group == 700 / group) {
        assert_true(std::isnan(one) && std::isnan(half));
        continue;
      }
      assert_true(one == x[static_cast<size_t>(i)]);
      assert_true(half == reference::round_to(TANDEM_F16, one));
    }
  }
}

// Numbers around the largest that f16 can hold as a scale or a minimum. Row i's first group is low[i] except in one place.
void q4_64_ends_where_f16_does(void**) {
  constexpr double kLow[] = {-65519, -65520, 65504, 0, 0, -65504};
  constexpr double kHigh[] = {65504, 65504, 65520, 982700, 982900, 900000};
  constexpr bool kFits[] = {true, false, true, true, false, true};
  const HiddenWorld hidden(TANDEM_Q4_64, kLongHidden);
  const Tensor k({6, kKvHeads, kDim}, 1), v({6, kKvHeads, kDim}, 2);
  Tensor x({6, kLongHidden}, 3), got({6, kLongHidden});
  for (size_t row = 0; row < 6; ++row)
    for (size_t i = 0; i < 64; ++i) x.values[row * kLongHidden + i] = static_cast<float>(i == 40 ? kHigh[row] : kLow[row]);
  int64_t id = 0;
  OK(tandem_sequence_create, &id, hidden.cache);
  OK(tandem_sequence_append_x, hidden.cache, id, 0, &k.view, &v.view, &x.view, nullptr);
  OK(tandem_sequence_read_x, &got.view, hidden.cache, id, 0, 0);
  std::vector<double> want(x.values.begin(), x.values.end());
  for (int64_t row = 0; row < 6; ++row) reference::round_row(TANDEM_Q4_64, want.data() + row * kLongHidden, kLongHidden);
  for (size_t i = 0; i < want.size(); ++i) {
    const auto value = static_cast<double>(got.values[i]);
    assert_true(std::isnan(want[i]) ? std::isnan(value) : value == want[i]);
    assert_int_equal(std::isnan(value), i % kLongHidden < 64 && !kFits[i / kLongHidden]);
  }
}

// Two sequences that differ only in a hidden state have different digests.
void are_part_of_the_digest(void**) {
  const HiddenWorld hidden;
  const Tensor k({20, kKvHeads, kDim}, 1), v({20, kKvHeads, kDim}, 2);
  Tensor x({20, kHidden}, 3);
  uint64_t digests[3];
  for (uint64_t& digest : digests) {
    int64_t id = 0;
    OK(tandem_sequence_create, &id, hidden.cache);
    if (&digest == &digests[2]) x.values[17 * kHidden + 5] += 1.0f;
    OK(tandem_sequence_append_x, hidden.cache, id, 0, &k.view, &v.view, &x.view, nullptr);
    OK(tandem_sequence_append, hidden.cache, id, 1, &k.view, &v.view, nullptr);
    OK(tandem_sequence_digest, &digest, hidden.cache, id);
  }
  assert_true(digests[0] == digests[1]);
  assert_true(digests[0] != digests[2]);
}

void check_counted(int32_t x_type, int32_t n_hidden, int64_t x_bytes) {
  const HiddenWorld hidden(x_type, n_hidden);
  const int64_t kv_len = 3000;
  tandem_memory_plan with = TANDEM_MEMORY_PLAN_INIT, without = TANDEM_MEMORY_PLAN_INIT;
  OK(tandem_plan_memory, &with, hidden.world.engine, hidden.model, &hidden.options, nullptr, &kv_len, 1);
  tandem_cache_options none = hidden.options;
  none.x_type = 0;
  OK(tandem_plan_memory, &without, hidden.world.engine, hidden.model, &none, nullptr, &kv_len, 1);
  assert_int_equal(with.x_token_bytes, x_bytes);
  assert_int_equal(without.x_token_bytes, 0);
  assert_int_equal(with.kv_token_bytes, without.kv_token_bytes);
  assert_true(with.host_kv_bytes - without.host_kv_bytes >= kv_len * x_bytes);
  assert_int_equal(with.device_weights_bytes, 0);
  int64_t id = 0;
  OK(tandem_sequence_create, &id, hidden.cache);
  OK(tandem_sequence_reserve, hidden.cache, id, kv_len);
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, hidden.cache);
  assert_int_equal(stats.host_kv_bytes, with.host_kv_bytes);
  // Keys and values alone would fit into this cap.
  tandem_cache_options capped = hidden.options;
  capped.host_cap_bytes = with.host_kv_bytes - 1;
  tandem_cache* cache = nullptr;
  OK(tandem_cache_create, &cache, hidden.world.engine, hidden.model, &capped);
  OK(tandem_sequence_create, &id, cache);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_sequence_reserve(cache, id, kv_len, &error), TANDEM_ERROR_CAPACITY);
  tandem_error_release(error);
  tandem_cache_release(cache);
}

void are_counted(void**) {
  check_counted(TANDEM_BF16, kHidden, kXBytes);
  check_counted(TANDEM_Q8_0, kLongHidden, kLongHidden / 32 * 34);
  check_counted(TANDEM_Q4_0, kLongHidden, kLongHidden / 32 * 18);
  check_counted(TANDEM_Q4_64, kLongHidden, kLongHidden / 64 * 36);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(refuses_projections),
                              cmocka_unit_test(refuses_x_types),
                              cmocka_unit_test(refuses_tensors),
                              cmocka_unit_test(stay_with_their_tokens),
                              cmocka_unit_test(stay_what_their_type_makes_them),
                              cmocka_unit_test(lose_a_group_at_most),
                              cmocka_unit_test(q4_64_ends_where_f16_does),
                              cmocka_unit_test(are_part_of_the_digest),
                              cmocka_unit_test(are_counted)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
