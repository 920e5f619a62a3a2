// SPDX-License-Identifier: MIT
// Adds a head pattern that the library lacks, as a contributor would: a file, and a line in a table.
#include <cmath>
#include <random>
#include <vector>

#include "tandem/tandem.h"
#include "with_cmocka.h"

namespace {

constexpr int32_t kQHeads = 4, kKvHeads = 2, kDim = 64;
constexpr uint32_t kCheckerboard = 16;
constexpr int64_t kBlock = 128, kTokens = 900;

#define OK(function, ...)                                                                        \
  do {                                                                                           \
    tandem_error* error = nullptr;                                                               \
    if (function(__VA_ARGS__, &error) != TANDEM_OK) fail_msg("%s", tandem_error_message(error)); \
  } while (false)

struct Rows {
  std::vector<float> x;
  tandem_tensor view;

  Rows(int32_t n_heads, uint32_t seed) : x(static_cast<size_t>(kTokens * n_heads * kDim)) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal;
    for (float& one : x) one = normal(bits);
    const int64_t shape[3] = {kTokens, n_heads, kDim};
    OK(tandem_tensor_init, &view, TANDEM_F32, x.data(), 3, shape);
  }
  const float* row(int64_t token, int32_t head, int32_t n_heads) const { return x.data() + (token * n_heads + head) * kDim; }
};

bool is_seen(int64_t query, int64_t key) {
  const int64_t field = query / kBlock, of_key = key / kBlock;
  return key <= query && (of_key == field || (field - of_key) % 2 == 0);
}

// Returns the largest difference of a query head's outputs from attention in double precision.
double distance(const Rows& q, const Rows& k, const Rows& v, const Rows& o, int32_t head) {
  const int32_t kv_head = head / (kQHeads / kKvHeads);
  double most = 0.0;
  for (int64_t t = 0; t < kTokens; t += 7) {
    std::vector<double> sums(kDim, 0.0);
    double weights = 0.0;
    for (int64_t j = 0; j <= t; ++j) {
      if (!is_seen(t, j)) continue;
      double logit = 0.0;
      for (int32_t d = 0; d < kDim; ++d) logit += double{q.row(t, head, kQHeads)[d]} * k.row(j, kv_head, kKvHeads)[d];
      const double weight = std::exp(logit / std::sqrt(double{kDim}));
      weights += weight;
      for (size_t d = 0; d < kDim; ++d) sums[d] += weight * v.row(j, kv_head, kKvHeads)[d];
    }
    for (size_t d = 0; d < kDim; ++d) most = std::max(most, std::fabs(sums[d] / weights - o.row(t, head, kQHeads)[d]));
  }
  return most;
}

void a_pattern_is_a_file_and_a_line(void**) {
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, nullptr);
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kQHeads, layer.n_kv_heads = kKvHeads, layer.k_head_dim = kDim;
  tandem_model* model = nullptr;
  OK(tandem_model_create, &model, &layer, 1);
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.k_type = cache_options.v_type = TANDEM_F32;
  tandem_cache* cache = nullptr;
  OK(tandem_cache_create, &cache, engine, model, &cache_options);
  std::vector<tandem_head_pattern> heads(kQHeads, TANDEM_HEAD_PATTERN_INIT);
  heads[1].kinds = heads[2].kinds = kCheckerboard;
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  patterns.heads = heads.data();
  patterns.n_heads = kQHeads;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = "patterns";
  options.patterns = &patterns;
  tandem_session* session = nullptr;
  OK(tandem_session_create, &session, cache, &options);
  int64_t sequence = 0;
  OK(tandem_sequence_create, &sequence, cache);
  Rows q(kQHeads, 1), k(kKvHeads, 2), v(kKvHeads, 3), o(kQHeads, 4);
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &kTokens;
  args.q = &q.view, args.k = &k.view, args.v = &v.view, args.o = &o.view;
  OK(tandem_attend, session, &args);
  assert_true(distance(q, k, v, o, 1) < 1e-5 && distance(q, k, v, o, 2) < 1e-5);
  assert_true(distance(q, k, v, o, 0) > 1e-2);  // it attends all keys
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(a_pattern_is_a_file_and_a_line)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
