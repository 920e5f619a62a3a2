// SPDX-License-Identifier: MIT
#include "tools/bench/bench_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "examples/generate/progress_bar.h"
#include "tools/common/random_rows.h"

namespace tools {
namespace {

constexpr int64_t kReadTokens = 2048;   // tokens per read-back
constexpr int64_t kManyTokens = 16384;  // beyond this only the last layer and sequence are checked

// Returns the row length of values as read back: that of the keys if V aliases K.
int64_t value_stride(const BenchOptions& options) { return options.v_aliases_k ? options.head_dim : options.v_head_dim; }

// One row of the output, with its true value.
struct Row {
  int32_t layer_idx = 0;
  int64_t sequence_idx = 0;
  int64_t token = 0;  // index of the query in its sequence's part of the call
  int64_t q_head = 0;
  int64_t position = 0;          // of the query
  bool round_weights = false;    // the plain computation rounds its weights
  std::vector<uint8_t> visible;  // [kv_len]
  std::vector<float> o;          // as written by the library
  float lse = 0;
  const float* q = nullptr;

  std::vector<double> logits, true_o, mass;  // mass: sum of p |v|
  std::vector<float> plain_logits, plain_o;
  double true_max = -std::numeric_limits<double>::infinity();
  double true_sum = 0, largest_logit = 0;
  float plain_max = -std::numeric_limits<float>::infinity();
  float plain_sum = 0;
};

struct Dots {
  double exact = 0;
  float plain = 0;
};

// Returns radians per position of every pair of dims. Empty: the library does not rotate.
std::vector<double> rope_frequencies(const BenchOptions& options) {
  std::vector<double> frequencies;
  const int64_t n_pairs = options.rope_theta > 0 ? options.head_dim / 2 : 0;
  for (int64_t i = 0; i < n_pairs; ++i)
    frequencies.push_back(std::pow(options.rope_theta, -static_cast<double>(i) / static_cast<double>(n_pairs)));
  return frequencies;
}

// Returns q.k for vectors of `dim`.
Dots plain_dot(const float* q, const float* key, int64_t dim) {
  Dots sum;
  for (int64_t d = 0; d < dim; ++d) {
    sum.exact += static_cast<double>(q[d]) * static_cast<double>(key[d]);
    sum.plain += q[d] * key[d];
  }
  return sum;
}

// Returns q.k after RoPE: of the query as it is, and the key rotated by the positions that it is ahead.
Dots rope_dot(const float* q, const float* key, const std::vector<double>& frequencies, int64_t n_ahead) {
  Dots sum;
  const size_t n_pairs = frequencies.size();
  for (size_t i = 0; i < n_pairs; ++i) {
    const double angle = static_cast<double>(n_ahead) * frequencies[i], c = std::cos(angle), s = std::sin(angle);
    const double q_a = static_cast<double>(q[i]), q_b = static_cast<double>(q[n_pairs + i]);
    const double a = static_cast<double>(key[i]), b = static_cast<double>(key[n_pairs + i]);
    sum.exact += q_a * (a * c - b * s) + q_b * (a * s + b * c);
    const float f32_c = static_cast<float>(c), f32_s = static_cast<float>(s);
    sum.plain += q[i] * (key[i] * f32_c - key[n_pairs + i] * f32_s);
    sum.plain += q[n_pairs + i] * (key[i] * f32_s + key[n_pairs + i] * f32_c);
  }
  return sum;
}

void take_keys(Row* row, const BenchOptions& options, const std::vector<float>& k, int64_t first, int64_t n_tokens) {
  const int64_t kv_head = row->q_head / (options.n_q_heads / options.n_kv_heads);
  const double true_scale = 1.0 / std::sqrt(static_cast<double>(options.head_dim));
  const float plain_scale = static_cast<float>(true_scale);
  const std::vector<double> frequencies = rope_frequencies(options);
  for (int64_t j = 0; j < n_tokens; ++j) {
    const auto key_idx = static_cast<size_t>(first + j);
    if (!row->visible[key_idx]) continue;
    const float* key = k.data() + (j * options.n_kv_heads + kv_head) * options.head_dim;
    const Dots sum = frequencies.empty() ? plain_dot(row->q, key, options.head_dim)
                                         : rope_dot(row->q, key, frequencies, first + j - row->position);
    row->logits[key_idx] = sum.exact * true_scale;
    row->plain_logits[key_idx] = sum.plain * plain_scale;
    row->true_max = std::max(row->true_max, row->logits[key_idx]);
    row->plain_max = std::max(row->plain_max, row->plain_logits[key_idx]);
    row->largest_logit = std::max(row->largest_logit, std::abs(row->logits[key_idx]));
  }
}

void take_values(Row* row, const BenchOptions& options, const std::vector<float>& v, int64_t first, int64_t n_tokens) {
  const int64_t kv_head = row->q_head / (options.n_q_heads / options.n_kv_heads);
  for (int64_t j = 0; j < n_tokens; ++j) {
    const auto key_idx = static_cast<size_t>(first + j);
    if (!row->visible[key_idx]) continue;
    const float* value = v.data() + (j * options.n_kv_heads + kv_head) * value_stride(options);
    const double p = std::exp(row->logits[key_idx] - row->true_max);
    float plain_p = std::exp(row->plain_logits[key_idx] - row->plain_max);
    row->true_sum += p;
    row->plain_sum += plain_p;
    if (row->round_weights) plain_p = f32_of(bf16_of(plain_p));
    for (size_t d = 0; d < row->true_o.size(); ++d) {
      row->true_o[d] += p * static_cast<double>(value[d]);
      row->mass[d] += p * std::abs(static_cast<double>(value[d]));
      row->plain_o[d] += plain_p * value[d];
    }
  }
}

void divide(Row* row) {
  if (row->true_sum == 0) return;  // sees no key: o = 0, lse = -inf
  for (size_t d = 0; d < row->true_o.size(); ++d) {
    row->true_o[d] /= row->true_sum;
    row->mass[d] /= row->true_sum;
    row->plain_o[d] /= row->plain_sum;
  }
}

// Reads K or V of a whole layer back, piece by piece. Calls take(row, options, piece, first, n_tokens) for every row.
template <typename Take>
Result read_back(Workload* workload, std::vector<Row*> rows, bool values, int64_t kv_len, const Take& take) {
  ErrorSlot error;
  const BenchOptions& options = workload->options();
  const int64_t head_dim = values ? value_stride(options) : options.head_dim;
  const bool of_v = values && !options.v_aliases_k;
  std::vector<float> piece(static_cast<size_t>(std::min(kReadTokens, kv_len) * options.n_kv_heads * head_dim));
  for (int64_t first = 0; first < kv_len; first += kReadTokens) {
    const int64_t n_tokens = std::min(kReadTokens, kv_len - first);
    const int64_t shape[3] = {n_tokens, options.n_kv_heads, head_dim};
    tandem_tensor tensor = {};
    TOOL_TRY(error.check(tandem_tensor_init(&tensor, TANDEM_F32, piece.data(), 3, shape, error.out())));
    TOOL_TRY(error.check(tandem_sequence_read(of_v ? nullptr : &tensor, of_v ? &tensor : nullptr, workload->cache(),
                                              workload->sequence(rows[0]->sequence_idx), rows[0]->layer_idx, first,
                                              error.out())));
    for (Row* row : rows) take(row, options, piece, first, n_tokens);
  }
  return {};
}

// Computes the truth for rows of one layer and sequence.
Result compute_truth(Workload* workload, std::vector<Row*> rows) {
  const BenchOptions& options = workload->options();
  const auto kv_len = static_cast<int64_t>(rows[0]->visible.size());
  for (Row* row : rows) {
    row->logits.assign(static_cast<size_t>(kv_len), 0);
    row->plain_logits.assign(static_cast<size_t>(kv_len), 0);
    row->true_o.assign(static_cast<size_t>(options.v_head_dim), 0);
    row->mass = row->true_o;
    row->plain_o.assign(static_cast<size_t>(options.v_head_dim), 0);
  }
  TOOL_TRY(read_back(workload, rows, false, kv_len, take_keys));
  TOOL_TRY(read_back(workload, rows, true, kv_len, take_values));
  for (Row* row : rows) divide(row);
  return {};
}

double output_rounding(int32_t io_type, double value) {
  return io_type == TANDEM_BF16 ? std::ldexp(std::abs(value), -8) + 1e-38 : 0.0;
}

std::string row_name(const Row& row) {
  return text("layer %d, sequence %lld, query %lld, head %lld", row.layer_idx, static_cast<long long>(row.sequence_idx),
              static_cast<long long>(row.token), static_cast<long long>(row.q_head));
}

// Returns the spacing at 1.0. For types with scales, whose values are read as f32, that of f32.
double epsilon_of(int32_t kv_type) {
  switch (kv_type) {
    case TANDEM_F16:
      return 0x1p-10;
    case TANDEM_BF16:
      return 0x1p-7;
    case TANDEM_E4M3:
      return 0x1p-3;
    default:
      return 0x1p-23;
  }
}

std::string gate(const BenchOptions& options, int32_t kv_type, const std::vector<Row>& rows) {
  double plain_error = 0;
  for (const Row& row : rows)
    for (size_t d = 0; d < row.o.size(); ++d)
      plain_error = std::max(plain_error, std::abs(static_cast<double>(row.plain_o[d]) - row.true_o[d]));
  const double eps = std::max(epsilon_of(kv_type), epsilon_of(options.v_type_beside(kv_type)));
  for (const Row& row : rows) {
    const double true_lse = row.true_max + std::log(row.true_sum);
    if (row.true_sum == 0 ? row.lse != -std::numeric_limits<float>::infinity()
                          : !(std::abs(static_cast<double>(row.lse) - true_lse) <= 1e-5 * (1 + std::abs(true_lse))))
      return text("failed: lse %.9g should be %.9g (%s)", static_cast<double>(row.lse), true_lse, row_name(row).c_str());
    const double logit_growth = eps == 0x1p-23 ? std::max(1.0, row.largest_logit) : 1.0;
    for (size_t d = 0; d < row.o.size(); ++d) {
      const double rounding = output_rounding(options.io_type, row.true_o[d]);
      const double bound = std::min(2 * plain_error + 1e-5, 4 * eps * logit_growth * row.mass[d]) + rounding;
      const double o = static_cast<double>(row.o[d]);
      if (!(std::abs(o - row.true_o[d]) <= bound))
        return text("failed: o %.9g should be %.9g, at most %.2g away (%s, dim %zu)", o, row.true_o[d], bound,
                    row_name(row).c_str(), d);
    }
  }
  return "ok";
}

// Asks the library which keys it selected for the next query of this head. Under "patterns" the answer is for the last
// query, whose block attends the same keys. A query sees no key after its own.
Result read_selection(Workload* workload, Row* row) {
  ErrorSlot error;
  const BenchOptions& options = workload->options();
  const int64_t group_size = options.n_q_heads / options.n_kv_heads;
  std::vector<int64_t> kept(row->visible.size());
  int64_t n_kept = 0;
  TOOL_TRY(error.check(tandem_session_selection(kept.data(), nullptr, static_cast<int64_t>(kept.size()), &n_kept,
                                                workload->session(), workload->sequence(row->sequence_idx), row->layer_idx,
                                                static_cast<int32_t>(row->q_head / group_size),
                                                static_cast<int32_t>(row->q_head % group_size), error.out())));
  std::fill(row->visible.begin(), row->visible.end(), uint8_t{0});
  for (int64_t i = 0; i < n_kept; ++i)
    row->visible[static_cast<size_t>(kept[static_cast<size_t>(i)])] = kept[static_cast<size_t>(i)] <= row->position;
  return {};
}

void mark_visible(const BenchOptions& options, int64_t q_len, Row* row) {
  const VisibleRange range =
      visible_range(options, {static_cast<int64_t>(row->visible.size()), q_len, row->token, row->q_head});
  std::fill_n(row->visible.begin(), range.sink_end, uint8_t{1});
  std::fill(row->visible.begin() + range.begin, row->visible.begin() + range.end, uint8_t{1});
}

// True if this call uses matrix products of bf16 weights, provided that the processor has them.
bool weights_may_round(const BenchOptions& options, const Case& geometry, const MatmulRows& matmul_rows) {
  const bool bf16_q = options.io_type == TANDEM_BF16 && options.rope_theta == 0 &&
                      options.k_rotation_of(geometry.kv_type) == TANDEM_ROTATION_NONE;
  if (!bf16_q || options.v_type_beside(geometry.kv_type) != TANDEM_BF16) return false;
  const int64_t n_rows = geometry.q_len * (options.n_q_heads / options.n_kv_heads);
  return n_rows >= (geometry.kv_type == TANDEM_BF16 ? matmul_rows.bf16 : matmul_rows.other);
}

bool searches(const BenchOptions& options, int64_t q_len, int64_t q_head) {
  return options.policy == "patterns" && !is_known_ahead(options.patterns.heads[static_cast<size_t>(q_head)], q_len);
}

// Under "patterns" also chooses one head of each other union of patterns.
std::set<int64_t> choose_heads(const BenchOptions& options) {
  std::set<int64_t> heads = {0, options.n_q_heads / 2, options.n_q_heads - 1};
  std::set<uint32_t> kinds;
  for (const int64_t q_head : heads)
    if (options.policy == "patterns") kinds.insert(options.patterns.heads[static_cast<size_t>(q_head)].kinds);
  for (size_t h = 0; h < options.patterns.heads.size(); ++h)
    if (kinds.insert(options.patterns.heads[h].kinds).second) heads.insert(static_cast<int64_t>(h));
  return heads;
}

// For a head that searches, the library tells only the keys of the call's last block.
std::set<int64_t> choose_tokens(const BenchOptions& options, int64_t q_len, int64_t q_head) {
  const int64_t first = searches(options, q_len, q_head) ? last_block(q_len) : 0;
  return {first, (first + q_len) / 2, q_len - 1};
}

std::vector<Row> choose_rows(const Workload& workload, const MatmulRows& matmul_rows) {
  const Case& geometry = workload.geometry();
  const BenchOptions& options = workload.options();
  const bool many = workload.kv_len(options.batch - 1) > kManyTokens;
  const bool round_weights = weights_may_round(options, geometry, matmul_rows);
  const std::set<int32_t> layers = {many ? geometry.n_layers - 1 : 0, geometry.n_layers - 1};
  const std::set<int64_t> sequences = {many ? options.batch - 1 : 0, options.batch - 1};
  const std::set<int64_t> heads = choose_heads(options);
  std::vector<Row> rows;
  for (const int32_t layer_idx : layers)
    for (const int64_t sequence_idx : sequences)
      for (const int64_t q_head : heads)
        for (const int64_t token : choose_tokens(options, geometry.q_len, q_head)) {
          Row row;
          row.layer_idx = layer_idx;
          row.sequence_idx = sequence_idx;
          row.token = token;
          row.q_head = q_head;
          row.position = workload.kv_len(sequence_idx) - geometry.q_len + token;
          row.round_weights = round_weights;
          row.visible.assign(static_cast<size_t>(workload.kv_len(sequence_idx)), 0);
          rows.push_back(std::move(row));
        }
  return rows;
}

void copy_output(const Workload& workload, int64_t q_len, Row* row) {
  const int64_t token = row->sequence_idx * q_len + row->token;
  row->q = workload.q_row(token, row->q_head);
  row->o = workload.o_row(token, row->q_head);
  row->lse = workload.lse(token, row->q_head);
}

// Runs the timed step. If the policy selects, the checked outputs are those of a second call with the same keys, because the
// library's selection is that for the next query.
Result run_step(Workload* workload, std::vector<Row>* rows) {
  const Case& geometry = workload->geometry();
  const bool selected = workload->selects_keys() && geometry.q_len == 1;
  TOOL_TRY(workload->step_begin());
  for (int32_t layer_idx = 0; layer_idx < geometry.n_layers; ++layer_idx) {
    TOOL_TRY(workload->attend(layer_idx));
    for (Row& row : *rows)
      if (row.layer_idx == layer_idx && !selected) copy_output(*workload, geometry.q_len, &row);
  }
  TOOL_TRY(workload->step_end());
  for (Row& row : *rows) {
    if (searches(workload->options(), geometry.q_len, row.q_head)) {
      TOOL_TRY(read_selection(workload, &row));
      continue;
    }
    if (!selected) {
      mark_visible(workload->options(), geometry.q_len, &row);
      continue;
    }
    TOOL_TRY(read_selection(workload, &row));
    TOOL_TRY(workload->attend_again(row.layer_idx));
    copy_output(*workload, 1, &row);
  }
  return {};
}

}  // namespace

VisibleRange visible_range(const BenchOptions& options, const QueryOfCall& query) {
  const int64_t first_query = query.kv_len - query.q_len, end = first_query + query.token + 1;
  if (options.policy == "patterns")
    return pattern_range(options.patterns.heads,
                         {query.q_head, options.n_q_heads / options.n_kv_heads, first_query, query.q_len, query.token});
  if (options.policy != "streaming") return {0, 0, end};
  const int64_t begin = std::max<int64_t>(0, end - options.window);
  return {std::min(options.sinks, begin), begin, end};
}

Result check_outputs(Workload* workload, const MatmulRows& matmul_rows, std::string* verdict) {
  std::vector<Row> rows = choose_rows(*workload, matmul_rows);
  TOOL_TRY(run_step(workload, &rows));
  generate::ProgressBar bar("check", std::ssize(rows), "rows");
  for (size_t first = 0; first < rows.size();) {
    TOOL_TRY(check_interrupted());
    bar.show(static_cast<int64_t>(first));
    std::vector<Row*> same;  // rows of one layer and sequence are consecutive
    for (; first < rows.size(); ++first) {
      if (!same.empty() &&
          (rows[first].layer_idx != same[0]->layer_idx || rows[first].sequence_idx != same[0]->sequence_idx))
        break;
      same.push_back(&rows[first]);
    }
    TOOL_TRY(compute_truth(workload, same));
  }
  *verdict = gate(workload->options(), workload->geometry().kv_type, rows);
  return {};
}

}  // namespace tools
