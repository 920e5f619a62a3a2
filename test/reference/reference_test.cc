// SPDX-License-Identifier: MIT
// Compares the oracle with results worked out by hand.
#include <cmath>
#include <cstring>
#include <limits>

#include "reference/attention_reference.h"
#include "reference/gate.h"
#include "reference/hgca_model.h"
#include "reference/rounding.h"
#include "reference/sequence_model.h"
#include "with_cmocka.h"

namespace {

using reference::load;
using reference::RefLayer;
using reference::round_to;
using reference::SequenceModel;
using reference::store;

double from_bits(int32_t dtype, uint16_t bits) { return load(dtype, &bits); }

// Every number of a 16-bit type is its own nearest number. The middle between two neighbours goes to the even one, and
// numbers beside the middle go to the nearer one. Together this is rounding to nearest even.
void test_rounding(void**) {
  for (int32_t dtype : {TANDEM_F16, TANDEM_BF16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const double x = from_bits(dtype, static_cast<uint16_t>(bits));
      uint16_t back = 0;
      store(dtype, x, &back);
      if (std::isnan(x)) {
        assert_true(std::isnan(from_bits(dtype, back)));
        continue;
      }
      assert_int_equal(back, bits);
      const double above = from_bits(dtype, static_cast<uint16_t>(bits + 1));
      if ((bits & 0x7FFF) == 0x7FFF || !std::isfinite(x) || !std::isfinite(above) || (bits == 0x7FFF)) continue;
      const double middle = (x + above) / 2;
      assert_true(round_to(dtype, middle) == (bits % 2 ? above : x));
      assert_true(round_to(dtype, std::nextafter(middle, x)) == x);
      assert_true(round_to(dtype, std::nextafter(middle, above)) == above);
    }
  }
  assert_true(from_bits(TANDEM_F16, 0x3C00) == 1.0 && from_bits(TANDEM_F16, 0x0001) == 0x1p-24);
  assert_true(from_bits(TANDEM_BF16, 0x3F80) == 1.0 && from_bits(TANDEM_BF16, 0x0001) == 0x1p-133);
  assert_true(std::isinf(round_to(TANDEM_F16, 65520.0)) && round_to(TANDEM_F16, 65519.99) == 65504.0);
}

// f32 is rounded as the compiler does it.
void test_f32_rounding(void**) {
  for (double x : {1.0 / 3.0, 1e-40, -1e-45, 3.4028235e38, 1e300, -0.1, 16777217.0}) {
    float bits = 0.0f;
    store(TANDEM_F32, x, &bits);
    assert_true(bits == static_cast<float>(x));
    assert_true(load(TANDEM_F32, &bits) == static_cast<double>(bits));
  }
}

struct Small {
  std::vector<RefLayer> layers{1};
  SequenceModel model{&layers};
  Small() {
    layers[0].sm_scale = 1.0f;
    layers[0].k_head_dim = layers[0].v_head_dim = 2;
  }
  void append(double k0, double k1, double v) {
    const double k[] = {k0, k1}, values[] = {v, -v};
    model.append(0, 1, k, values);
  }
  reference::Truth ask(const std::vector<float>& q, const reference::Scope& scope = {}) {
    return model.attend(0, static_cast<int64_t>(q.size()) / 2, q.data(), scope);
  }
};

void expect_near(double got, double wanted) { assert_true(std::fabs(got - wanted) <= 1e-12 * (1.0 + std::fabs(wanted))); }

void test_softmax(void**) {
  Small small;
  small.append(1.0, 0.0, 3.0);
  expect_near(small.ask({5.0f, 7.0f}).o[0], 3.0);
  expect_near(small.ask({5.0f, 7.0f}).lse[0], 5.0);
  small.append(2.0, 0.0, 10.0);
  const double weight = 1.0 / (1.0 + std::exp(-1.0));
  const reference::Truth truth = small.ask({1.0f, 0.0f});
  expect_near(truth.o[0], 3.0 + 7.0 * weight);
  expect_near(truth.o[1], -truth.o[0]);
  expect_near(truth.mass[1], truth.o[0]);
  expect_near(truth.lse[0], 2.0 + std::log1p(std::exp(-1.0)));
  // The last two queries. The first of them does not see the second key.
  expect_near(small.ask({1.0f, 0.0f, 1.0f, 0.0f}).o[0], 3.0);
}

void test_cap_scale_and_sink(void**) {
  Small small;
  small.layers[0].soft_cap = 2.0f;
  small.layers[0].sm_scale = 0.5f;
  small.layers[0].sinks = {1.0f};
  small.append(3.0, 0.0, 4.0);
  const double logit = 2.0 * std::tanh(0.5 * 3.0 / 2.0), weight = 1.0 / (1.0 + std::exp(1.0 - logit));
  expect_near(small.ask({1.0f, 0.0f}).o[0], 4.0 * weight);
  expect_near(small.ask({1.0f, 0.0f}).lse[0], std::log(std::exp(logit) + std::exp(1.0)));
}

// Rotated logits depend only on the distance. A quarter turn makes parallel vectors orthogonal.
void test_rope(void**) {
  for (int32_t rope : {TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED}) {
    Small small;
    small.layers[0].rope = rope;
    small.layers[0].rope_inv_freq = {static_cast<float>(1.5707963267948966)};
    small.append(1.0, 0.0, 1.0);
    expect_near(small.ask({1.0f, 0.0f}).lse[0], 1.0);
    small.append(-50.0, 0.0, 1.0);
    small.model.remove(0, 1, false);  // only the second token, still at position 1
    assert_true(small.model.position(0) == 1);
    small.append(1.0, 0.0, 1.0);
    const reference::Truth truth = small.ask({1.0f, 0.0f});
    // The query at position 2 attends position 1, a quarter turn away, with logit 0 (to f32 accuracy of the frequency), and
    // itself with logit 1.
    assert_true(std::fabs(truth.lse[0] - std::log(std::exp(1.0) + std::exp(0.0))) < 1e-4);
    small.layers[0].rope_attn_factor = 2.0;
    assert_true(std::fabs(small.ask({1.0f, 0.0f}).lse[0] - std::log(std::exp(4.0) + std::exp(0.0))) < 1e-3);
  }
}

std::vector<int64_t> seen(const SequenceModel& model, int64_t index, const reference::Scope& scope = {}) {
  std::vector<int64_t> keys;
  model.visible(0, index, scope, &keys);
  return keys;
}

void test_visibility(void**) {
  Small small;
  for (int i = 0; i < 6; ++i) small.append(0.0, 0.0, i);
  assert_true(seen(small.model, 5, {true, 2, 1}) == (std::vector<int64_t>{0, 4, 5}));
  assert_true(seen(small.model, 5, {true, 0, 1}) == (std::vector<int64_t>{0}));
  small.layers[0].sliding_window = 3;
  assert_true(seen(small.model, 5) == (std::vector<int64_t>{3, 4, 5}));
  small.model.remove(4, 1, false);  // positions 0 1 2 3 5
  assert_true(seen(small.model, 4) == (std::vector<int64_t>{3, 4}));
  const double zeros[8] = {};
  const int32_t parents[] = {-1, 0, -1, 1};
  small.model.append_pending(0, 4, zeros, zeros, parents);  // positions 6 7 6 8
  assert_true(seen(small.model, 5) == (std::vector<int64_t>{4, 5}));
  assert_true(seen(small.model, 7) == (std::vector<int64_t>{4, 7}));
  assert_true(seen(small.model, 8) == (std::vector<int64_t>{5, 6, 8}));
  small.layers[0].sliding_window = 0;
  assert_true(seen(small.model, 8, {true, 2, 1}) == (std::vector<int64_t>{0, 6, 8}));
  small.model.commit({0, 1, 3});
  assert_true(small.model.length(0) == 8 && small.model.position(7) == 8);
}

// One head, window 2, block 1: two keys of weight 0.5 each at eviction, judged against beta / 2.
void test_hgca_rule(void**) {
  std::vector<RefLayer> layers(1);
  for (double beta : {0.2, 0.8}) {
    reference::HgcaModel model(&layers, {2, 0, 0.5f, static_cast<float>(beta), 16});
    const auto weights = [](int64_t n, double each) {
      return reference::QueryWeights{n, {std::vector<double>(static_cast<size_t>(n), each)}};
    };
    model.after_decode(0, weights(1, 1.0), 1);
    assert_true(model.maw(0, 0, 0) == 0.5);
    model.after_decode(0, weights(2, 0.5), 2);
    assert_true(model.maw(0, 0, 0) == 0.5 && model.maw(0, 0, 1) == 0.25 && model.window_begin(0) == 0);
    model.after_decode(0, weights(3, 0.1), 3);
    assert_true(model.window_begin(0) == 1);
    assert_true(std::fabs(model.maw(0, 0, 0) - 0.3) < 1e-12);
    assert_true(model.selected(0, 0).size() == (beta < 0.5 ? 1u : 0u));
    // Keys that have left the window are not counted until an append judges them anew.
    model.after_decode(0, weights(4, 0.9), 4);
    assert_true(std::fabs(model.maw(0, 0, 0) - 0.3) < 1e-12);
    model.after_append(0, {weights(5, 1.0), weights(6, 1.0)}, 6, false);
    assert_true(std::fabs(model.maw(0, 0, 0) - 0.825) < 1e-12 && model.window_begin(0) == 4);
    assert_true(model.selected(0, 0).size() == 4);
  }
}

// The gate accepts right outputs and rejects wrong ones.
void test_gate(void**) {
  Small small;
  for (int i = 0; i < 10; ++i) small.append(0.1 * i, 0.2, 1.0 + i);
  const reference::Truth truth = small.ask({1.0f, 1.0f});
  reference::GateCall call;
  call.truth = &truth;
  call.layer = &small.layers[0];
  double o_error = 0.0, lse_error = 0.0;
  call.o = [&](int64_t, int32_t, int32_t dim) { return truth.o[static_cast<size_t>(dim)] + o_error; };
  call.lse = [&](int64_t, int32_t) { return truth.lse[0] + lse_error; };
  assert_true(check_gate(call).pass);
  o_error = 1.3e-5;
  assert_false(check_gate(call).pass);
  o_error = std::nan("");
  assert_false(check_gate(call).pass);
  o_error = 0.0;
  lse_error = 1e-4;
  assert_false(check_gate(call).pass);
  lse_error = std::nan("");
  assert_false(check_gate(call).pass);
  lse_error = std::numeric_limits<double>::infinity();
  assert_false(check_gate(call).pass);
}

// With a key of weight 1, the plain computation for a device that may round has exactly the error of rounding V, otherwise
// none.
void test_device_rounding(void**) {
  RefLayer layer;
  layer.n_q_heads = 8;
  layer.n_kv_heads = 1;
  layer.k_head_dim = layer.v_head_dim = 2;
  const auto error_of = [&](int32_t type, int32_t q_type, int64_t n_queries) {
    layer.k_type = layer.v_type = type;
    const float k[] = {1.0f, 2.0f}, v[] = {1.0f / 3.0f, -1.0f / 3.0f}, q[16] = {};
    const int64_t position = 0;
    const reference::LayerRows rows{&layer, 1, k, v, &position};
    reference::Queries queries;
    queries.n_tokens = 1;
    queries.q = q;
    queries.positions = &position;
    queries.visible = [](int64_t, int32_t, std::vector<int64_t>* keys) { keys->push_back(0); };
    queries.naive_rounds_p = reference::device_rounds_p(layer, q_type, n_queries);
    return attend_reference(rows, queries).naive_error;
  };
  const double third = static_cast<double>(1.0f / 3.0f), lost = std::fabs(round_to(TANDEM_F16, third) - third);
  for (const int32_t type : {TANDEM_Q8_0, TANDEM_Q4_0}) {
    assert_true(lost > 0.0 && error_of(type, TANDEM_BF16, 9) == lost && error_of(type, TANDEM_F16, 9) == lost);
    assert_true(error_of(type, TANDEM_F32, 9) == 0.0 && error_of(type, TANDEM_BF16, 8) == 0.0);
    assert_true(reference::device_mass_epsilon(layer, true) > reference::device_mass_epsilon(layer, false));
  }
  for (const int32_t type : {TANDEM_E4M3, TANDEM_BF16, TANDEM_F16}) assert_true(error_of(type, TANDEM_BF16, 9) == 0.0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_rounding),           cmocka_unit_test(test_f32_rounding), cmocka_unit_test(test_softmax),
      cmocka_unit_test(test_cap_scale_and_sink), cmocka_unit_test(test_rope),         cmocka_unit_test(test_visibility),
      cmocka_unit_test(test_hgca_rule),          cmocka_unit_test(test_gate),         cmocka_unit_test(test_device_rounding),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
