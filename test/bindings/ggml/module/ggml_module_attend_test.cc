// SPDX-License-Identifier: MIT
// The outputs of a node that the module computes, against double precision: strides with NaN between rows, types, streams,
// masks, slopes, sinks, soft cap; on ggml's threads and on the library's.
#include <algorithm>

#include "lent_engine.h"
#include "module_world.h"

namespace {

using namespace ggml_module_test;
using stand_in_ggml::state;

constexpr double kHidden = -INFINITY;

// Makes the mask causal. The tokens are the last ones of each stream's keys.
void make_causal(const Node& of) {
  const ggml_tensor& mask = of.mask->view;
  for (int64_t s = 0; s < mask.ne[3]; ++s)
    for (int64_t h = 0; h < mask.ne[2]; ++h)
      for (int64_t t = 0; t < mask.ne[1]; ++t)
        for (int64_t key = 0; key < mask.ne[0]; ++key)
          of.mask->set(key <= mask.ne[0] - mask.ne[1] + t ? 0.0 : kHidden, key, t, h, s);
}

double slope_of(int64_t head, int64_t n_heads, double max_bias) {
  int64_t n_even = 1;
  while (2 * n_even <= n_heads) n_even *= 2;
  const double exponent = head < n_even
                              ? max_bias * static_cast<double>(head + 1) / static_cast<double>(n_even)
                              : max_bias / 2 * static_cast<double>(2 * (head - n_even) + 1) / static_cast<double>(n_even);
  return max_bias > 0.0 ? std::exp2(-exponent) : 1.0;
}

struct Row {
  int64_t stream, head, token;
};

std::vector<double> logits_of(const Node& of, const Shape& shape, const Row& row) {
  const int64_t kv_head = row.head / (shape.n_q_heads / shape.n_kv_heads);
  std::vector<double> logits;
  for (int64_t key = 0; key < shape.n_keys; ++key) {
    double x = 0.0;
    for (int64_t d = 0; d < shape.k_dim; ++d)
      x += of.q.value(d, row.token, row.head, row.stream) * of.k.value(d, key, kv_head, row.stream);
    x *= static_cast<double>(shape.scale);
    const double cap = static_cast<double>(shape.soft_cap);
    if (cap > 0.0) x = cap * std::tanh(x / cap);
    if (shape.has_mask)
      x += slope_of(row.head, shape.n_q_heads, static_cast<double>(shape.max_bias)) *
           of.mask->value(key, row.token, row.head % shape.mask_heads, row.stream % shape.mask_streams);
    logits.push_back(x);
  }
  return logits;
}

std::vector<double> truth_of(const Node& of, const Shape& shape, const Row& row) {
  const int64_t kv_head = row.head / (shape.n_q_heads / shape.n_kv_heads);
  const std::vector<double> logits = logits_of(of, shape, row);
  const double sink = shape.has_sinks ? of.sinks->value(row.head, 0) : kHidden;
  const double most = std::max(sink, *std::max_element(logits.begin(), logits.end()));
  std::vector<double> o(static_cast<size_t>(shape.v_dim), 0.0);
  if (std::isinf(most)) return o;
  double sum = std::exp(sink - most);
  for (int64_t key = 0; key < shape.n_keys; ++key) {
    const double p = std::exp(logits[static_cast<size_t>(key)] - most);
    sum += p;
    if (p == 0.0) continue;
    for (int64_t d = 0; d < shape.v_dim; ++d) o[static_cast<size_t>(d)] += p * of.v.value(d, key, kv_head, row.stream);
  }
  for (double& x : o) x /= sum;
  return o;
}

void expect_truth(const Node& of, const Shape& shape, double most_error = 2e-5) {
  for (int64_t s = 0; s < shape.n_streams; ++s)
    for (int64_t h = 0; h < shape.n_q_heads; ++h)
      for (int64_t t = 0; t < shape.n_tokens; ++t) {
        const std::vector<double> truth = truth_of(of, shape, {s, h, t});
        for (int64_t d = 0; d < shape.v_dim; ++d) {
          const double error = std::fabs(of.o->value(d, h, t, s) - truth[static_cast<size_t>(d)]);
          if (!(error <= most_error))
            fail_msg("stream %d head %d token %d dim %d: %g off", int(s), int(h), int(t), int(d), error);
        }
      }
}

void expect_attends(const Shape& shape, bool is_causal = true, double most_error = 2e-5) {
  const Node made(shape);
  if (is_causal) make_causal(made);
  assert_true(supports(made.node()));
  state().log.clear();
  if (Backend().compute(&made.node()) != GGML_STATUS_SUCCESS) fail_msg("%s", state().log.c_str());
  expect_truth(made, shape, most_error);
}

void attends_every_type(void**) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    Shape shape;
    shape.k_type = shape.v_type = type;
    expect_attends(shape);
    shape.n_tokens = 1;
    expect_attends(shape);
  }
  Shape mixed;
  mixed.k_type = GGML_TYPE_Q8_0, mixed.v_type = GGML_TYPE_Q4_0, mixed.k_dim = 192, mixed.v_dim = 128;
  expect_attends(mixed);
}

// ggml leaves any number in the stride of a dimension of length 1.
void ignores_strides_of_single_rows(void**) {
  Shape shape;
  shape.n_tokens = 1, shape.n_q_heads = shape.n_kv_heads = 1;
  const Node made(shape);
  make_causal(made);
  for (ggml_tensor* view : {&made.q.view, &made.k.view, &made.v.view, &made.mask->view}) view->nb[2] = view->nb[3] = 0;
  made.q.view.nb[1] = made.mask->view.nb[1] = 0;
  assert_true(supports(made.node()));
  assert_int_equal(Backend().compute(&made.node()), GGML_STATUS_SUCCESS);
  expect_truth(made, shape);
}

void attends_without_a_mask(void**) {
  Shape shape;
  shape.has_mask = false;
  expect_attends(shape, false);
}

void attends_streams(void**) {
  Shape shape;
  shape.n_streams = shape.mask_streams = 3, shape.n_keys = 300;
  expect_attends(shape);
  shape.mask_streams = 1;
  expect_attends(shape);
}

void adds_what_the_mask_says(void**) {
  Shape shape;
  expect_attends(shape, false);
  shape.mask_heads = shape.n_q_heads;
  expect_attends(shape, false);
}

void attends_with_slopes_sinks_and_cap(void**) {
  Shape shape;
  shape.max_bias = 8.0f, shape.n_q_heads = 6;  // 6 heads: two beyond the power of 2
  expect_attends(shape, false);
  shape.has_sinks = true;
  expect_attends(shape, false);
  shape.max_bias = 0.0f, shape.soft_cap = 3.0f;
  expect_attends(shape);
}

void gives_0_where_all_keys_are_hidden(void**) {
  const Shape shape;
  const Node made(shape);
  make_causal(made);
  for (int64_t key = 0; key < shape.n_keys; ++key) made.mask->set(kHidden, key, 1);
  assert_int_equal(Backend().compute(&made.node()), GGML_STATUS_SUCCESS);
  assert_true(made.o->value(0, 0, 1) == 0.0);
  expect_truth(made, shape);
}

void computes_on_either_ones_threads(void**) {
  for (const bool has_openmp : {true, false}) {
    state().has_openmp = has_openmp;
#ifdef _OPENMP
    assert_int_equal(tandem_ggml_module::ggml_lends_threads(), has_openmp);
#endif
    for (const int n_threads : {1, 3}) {
      Shape shape;
      shape.n_keys = 2000;
      const Node made(shape);
      make_causal(made);
      assert_int_equal(Backend(n_threads).compute(&made.node()), GGML_STATUS_SUCCESS);
      expect_truth(made, shape);
    }
  }
  state().has_openmp = true;
}

void skips_nodes_that_are_not_to_be_computed(void**) {
  const Node made{Shape()};
  made.node().flags = 0;
  assert_int_equal(Backend().compute(&made.node()), GGML_STATUS_SUCCESS);
  assert_true(std::isnan(made.o->value(0, 0, 0)));
}

void says_why_a_node_failed(void**) {
  const Node made{Shape()};
  made.node().data = made.q.view.data;  // the library refuses this
  state().log.clear();
  assert_int_equal(Backend().compute(&made.node()), GGML_STATUS_FAILED);
  assert_non_null(
      std::strstr(state().log.c_str(), "tandem: node fa-7: TANDEM_ERROR_INVALID_ARGUMENT: tandem_attend_tensors: "));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(attends_every_type),
      cmocka_unit_test(ignores_strides_of_single_rows),
      cmocka_unit_test(attends_without_a_mask),
      cmocka_unit_test(attends_streams),
      cmocka_unit_test(adds_what_the_mask_says),
      cmocka_unit_test(attends_with_slopes_sinks_and_cap),
      cmocka_unit_test(gives_0_where_all_keys_are_hidden),
      cmocka_unit_test(computes_on_either_ones_threads),
      cmocka_unit_test(skips_nodes_that_are_not_to_be_computed),
      cmocka_unit_test(says_why_a_node_failed),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
