// SPDX-License-Identifier: MIT
#include "matmul_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>

#include "cpu/isa.h"
#include "lib/model/dtype.h"
#include "reference/stored_row.h"

namespace tandem::test {

// Test data need not be rounded to nearest, because the stored values are the truth.
void to_storage(int32_t dtype, float value, void* data, int64_t i) {
  if (dtype == TANDEM_F32) {
    std::memcpy(static_cast<char*>(data) + 4 * i, &value, 4);
    return;
  }
  uint16_t bits;
  const uint32_t wide = std::bit_cast<uint32_t>(value);
  if (dtype == TANDEM_BF16) {
    bits = static_cast<uint16_t>(wide >> 16);
    if (std::isnan(value)) bits |= 0x40;
  } else {
    const auto sign = static_cast<uint16_t>(wide >> 16 & 0x8000);
    const double size = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) {
      bits = 0x7e00;
    } else if (size >= 65520.0) {
      bits = 0x7c00;
    } else if (size < 0x1p-14) {
      bits = static_cast<uint16_t>(size * 0x1p24);
    } else {
      int exponent;
      const double fraction = std::frexp(size, &exponent);  // [0.5, 1)
      bits = static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(fraction * 2048) & 1023));
    }
    bits |= sign;
  }
  std::memcpy(static_cast<char*>(data) + 2 * i, &bits, 2);
}

std::string describe(const CaseOptions& o) {
  char text[256];
  std::snprintf(
      text, sizeof text, "k %s v %s dims %d/%d rows %d group %d keys %lld mask %d cap %g rope %d%s%s%s%s%s%s%s seed %u",
      find_dtype(o.k_type)->name, find_dtype(o.v_type)->name, o.k_head_dim, o.v_head_dim, o.n_rows, o.group_size,
      static_cast<long long>(o.n_keys), static_cast<int>(o.mask), static_cast<double>(o.soft_cap), o.rope_pairs,
      o.interleaved ? " interleaved" : "", o.positions ? " positions" : "", o.q_is_bf16 ? " bf16-q" : "",
      o.v_aliases_k ? " alias" : "", o.one_run ? " one-run" : "", o.gaps ? " gaps" : "", o.logits ? " logits" : "", o.seed);
  return text;
}

Case::Case(const CaseOptions& given) : options(given), random(given.seed) {
  make_layer();
  const std::vector<int64_t> lengths = make_places();
  int64_t token = 0;
  for (size_t i = 0; i < lengths.size(); ++i) token = make_run(i, lengths[i], token);
  make_queries(token);
}

void Case::make_layer() {
  layer.n_q_heads = layer.group_size = options.group_size;
  layer.n_kv_heads = 1;
  layer.k_head_dim = options.k_head_dim;
  layer.v_head_dim = options.v_head_dim;
  layer.v_aliases_k = options.v_aliases_k;
  layer.k_type = options.k_type;
  layer.v_type = options.v_aliases_k ? options.k_type : options.v_type;
  layer.sm_scale = 1.0f / std::sqrt(static_cast<float>(options.k_head_dim));
  layer.soft_cap = options.soft_cap;
  if (options.rope_pairs == 0) return;
  for (int32_t i = 0; i < options.rope_pairs; ++i) inv_freq.push_back(std::pow(10000.0, -i / double(options.rope_pairs)));
  rope = make_rope_table(inv_freq.data(), options.rope_pairs, options.interleaved, 1.25f);
  layer.rope = &rope;
}

// Chooses the lengths of the runs. The runs lie in random order, with unused bytes between them.
std::vector<int64_t> Case::make_places() {
  const int64_t n = options.n_keys, k_row = row_bytes(layer.k_type, layer.k_head_dim);
  const int64_t v_row = row_bytes(layer.v_type, layer.v_head_dim);
  std::vector<int64_t> lengths;
  for (int64_t done = 0; done < n; done += lengths.back()) {
    const int64_t wanted = options.one_run ? n : options.run_len > 0 ? options.run_len : 16 + below(113);
    lengths.push_back(std::min(n - done, wanted));
  }
  std::vector<size_t> order(lengths.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  std::vector<size_t> k_places(lengths.size()), v_places(lengths.size());
  size_t k_end = 64, v_end = 64;
  for (size_t i : order) {
    k_places[i] = k_end;
    v_places[i] = v_end;
    k_end += static_cast<size_t>(lengths[i] * k_row + 16 * (1 + below(20)));
    v_end += static_cast<size_t>(lengths[i] * v_row + 16 * (1 + below(20)));
  }
  k_bytes.assign(k_end, 0xff);
  v_bytes.assign(options.v_aliases_k ? 0 : v_end, 0xff);
  positions.reserve(static_cast<size_t>(n));
  const int64_t k_scale_row = scale_bytes(layer.k_type, layer.k_head_dim);
  const int64_t v_scale_row = scale_bytes(layer.v_type, layer.v_head_dim);
  k_scale_bytes.assign((static_cast<size_t>(n) + lengths.size()) * static_cast<size_t>(k_scale_row), 0xff);
  v_scale_bytes.assign((static_cast<size_t>(n) + lengths.size()) * static_cast<size_t>(v_scale_row), 0xff);
  size_t run_at = 0;  // rows, with an unused row after each run
  for (size_t i = 0; i < lengths.size(); ++i) {
    KvRun run;
    run.n_tokens = lengths[i];
    run.k = k_bytes.data() + k_places[i];
    run.v = options.v_aliases_k ? run.k : v_bytes.data() + v_places[i];
    const auto scales_at = [&](std::vector<uint8_t>& bytes, int64_t row) -> void* {
      return row == 0 ? nullptr : bytes.data() + run_at * static_cast<size_t>(row);
    };
    run.k_scales = scales_at(k_scale_bytes, k_scale_row);
    run.v_scales = options.v_aliases_k ? run.k_scales : scales_at(v_scale_bytes, v_scale_row);
    run_at += static_cast<size_t>(lengths[i]) + 1;
    runs.push_back(run);
  }
  return lengths;
}

namespace {
uint8_t* row_at(const void* plane, int64_t offset) {
  return plane == nullptr ? nullptr : const_cast<uint8_t*>(static_cast<const uint8_t*>(plane)) + offset;
}
}  // namespace

void Case::fill_row(int32_t dtype, int64_t n, uint8_t* codes, uint8_t* scales) {
  std::normal_distribution<float> normal;
  std::vector<double> row(static_cast<size_t>(n));
  for (double& x : row) x = static_cast<double>(normal(random));
  if (dtype == TANDEM_F32 || dtype == TANDEM_F16 || dtype == TANDEM_BF16)
    for (int64_t d = 0; d < n; ++d) to_storage(dtype, static_cast<float>(row[static_cast<size_t>(d)]), codes, d);
  else
    reference::store_row(dtype, row.data(), n, codes, scales);
}

// Fills run i, whose first token is at least `token`. Returns the token after the run.
int64_t Case::make_run(size_t i, int64_t length, int64_t token) {
  const int64_t dk = layer.k_head_dim, dv = layer.v_head_dim;
  const int64_t k_row = row_bytes(layer.k_type, dk), v_row = row_bytes(layer.v_type, dv);
  KvRun& run = runs[i];
  if (options.gaps) token += below(40);
  run.token_idx = options.unconditional_runs && below(3) == 0 ? -1 : token;
  run.first_position = options.rope_pairs > 0 ? token + 200 : 0;
  if (options.positions) run.positions = positions.data() + positions.size();
  for (int64_t r = 0; r < length; ++r) {
    uint8_t* k = row_at(run.k, r * k_row);
    uint8_t* v = options.v_aliases_k ? k : row_at(run.v, r * v_row);
    uint8_t* k_scales = row_at(run.k_scales, r * scale_bytes(layer.k_type, dk));
    uint8_t* v_scales = options.v_aliases_k ? k_scales : row_at(run.v_scales, r * scale_bytes(layer.v_type, dv));
    fill_row(layer.k_type, dk, k, k_scales);
    if (!options.v_aliases_k) fill_row(layer.v_type, dv, v, v_scales);
    k_values.resize(k_values.size() + static_cast<size_t>(dk));
    reference::load_row(layer.k_type, k, k_scales, dk, k_values.data() + k_values.size() - dk);
    v_values.resize(v_values.size() + static_cast<size_t>(dv));
    reference::load_row(layer.v_type, v, v_scales, dv, v_values.data() + v_values.size() - dv);
    positions.push_back(static_cast<int32_t>(token + r + (token + r) / 7 * 1000));
    const int64_t position = options.positions ? positions.back() : run.first_position + r;
    keys.push_back({k, v, k_scales, v_scales, run.token_idx < 0 ? -1 : run.token_idx + r, position});
  }
  return token + length;
}

// The query tokens are the newest tokens before n_tokens. If there are few keys, the first query tokens see no key.
void Case::make_queries(int64_t n_tokens) {
  std::normal_distribution<float> normal;
  const int64_t q_len = (options.n_rows + options.group_size - 1) / options.group_size;
  const int64_t n_rows = q_len * options.group_size;
  const bool tree = options.mask == Mask::kTree;
  for (int64_t t = 0; t < q_len; ++t) {
    const int64_t position = n_tokens - q_len + t;
    begin.push_back(options.mask == Mask::kSliding ? std::max<int64_t>(0, position + 1 - options.window) : 0);
    end.push_back(tree ? n_tokens : std::max<int64_t>(0, position + 1));
    for (int word = 0; word < 3 && tree; ++word) tree_bits.push_back(uint64_t{random()} << 32 | random());
  }
  visibility.begin = begin.data();
  visibility.end = end.data();
  if (options.mask == Mask::kSliding) visibility.sink_end = options.sink_len;
  if (tree) {
    visibility.tree_begin = std::max<int64_t>(0, n_tokens - 150);
    visibility.tree_bits = tree_bits.data();
    visibility.tree_words = 3;
  }
  q.resize(static_cast<size_t>(n_rows * layer.k_head_dim));
  for (float& x : q) {
    x = options.q_size * normal(random);
    if (options.q_is_bf16) x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffff0000u);
  }
  o.assign(static_cast<size_t>(n_rows * layer.v_head_dim), NAN);
  lse.assign(static_cast<size_t>(n_rows), NAN);
  if (options.logits) logits.assign(static_cast<size_t>(n_rows * options.n_keys), NAN);
  job.layer = &layer;
  job.q = q.data();
  job.n_rows = static_cast<int32_t>(n_rows);
  job.q_is_bf16 = options.q_is_bf16;
  job.n_runs = static_cast<int32_t>(runs.size());
  job.runs = runs.data();
  job.n_keys = options.n_keys;
  job.visibility = options.mask == Mask::kNone ? nullptr : &visibility;
  job.o = o.data();
  job.lse = lse.data();
  job.logits = options.logits ? logits.data() : nullptr;
}

bool Case::sees(int64_t row, int64_t key) const {
  const int64_t j = keys[static_cast<size_t>(key)].token_idx;
  if (job.visibility == nullptr || j < 0) return true;
  const auto t = static_cast<size_t>(row / options.group_size);
  if (!((j < visibility.sink_end || j >= begin[t]) && j < end[t])) return false;
  if (j < visibility.tree_begin) return true;
  const int64_t bit = j - visibility.tree_begin;
  return tree_bits[t * 3 + static_cast<size_t>(bit / 64)] >> (bit % 64) & 1;
}

double Case::k_at(int64_t key, int64_t dim) const { return k_values[static_cast<size_t>(key * layer.k_head_dim + dim)]; }
double Case::v_at(int64_t key, int64_t dim) const { return v_values[static_cast<size_t>(key * layer.v_head_dim + dim)]; }

namespace {

// Rotates a key in arithmetic of type T. The exact answer uses angles in double.
template <typename T>
std::vector<T> key_vector(const Case& c, int64_t key) {
  std::vector<T> k(static_cast<size_t>(c.layer.k_head_dim));
  for (size_t d = 0; d < k.size(); ++d) k[d] = static_cast<T>(c.k_at(key, static_cast<int64_t>(d)));
  for (size_t i = 0; i < c.inv_freq.size(); ++i) {
    const double angle = static_cast<double>(c.keys[static_cast<size_t>(key)].position) * c.inv_freq[i];
    const auto cosine = static_cast<T>(std::cos(angle) * 1.25), sine = static_cast<T>(std::sin(angle) * 1.25);
    const size_t a = c.options.interleaved ? 2 * i : i, b = c.options.interleaved ? 2 * i + 1 : i + c.inv_freq.size();
    const T x = k[a], y = k[b];
    k[a] = x * cosine - y * sine;
    k[b] = x * sine + y * cosine;
  }
  return k;
}

template <typename T>
T logit(const Case& c, int64_t row, int64_t key) {
  const std::vector<T> k = key_vector<T>(c, key);
  T sum = 0;
  for (size_t d = 0; d < k.size(); ++d) sum += static_cast<T>(c.q[static_cast<size_t>(row) * k.size() + d]) * k[d];
  sum *= static_cast<T>(c.layer.sm_scale);
  const T cap = static_cast<T>(c.layer.soft_cap);
  return cap > 0 ? cap * std::tanh(sum / cap) : sum;
}

}  // namespace

RowAnswer exact(const Case& c, int64_t row) {
  const int64_t n = c.job.n_keys;
  const auto dims = static_cast<size_t>(c.layer.v_head_dim);
  RowAnswer answer{std::vector<double>(dims), std::vector<double>(dims), -INFINITY, {}};
  double max = -INFINITY, sum = 0;
  for (int64_t j = 0; j < n; ++j) {
    answer.logits.push_back(c.sees(row, j) ? logit<double>(c, row, j) : -INFINITY);
    max = std::max(max, answer.logits.back());
  }
  if (max == -INFINITY) return answer;
  for (int64_t j = 0; j < n; ++j) {
    const double p = std::exp(answer.logits[static_cast<size_t>(j)] - max);
    if (!c.sees(row, j)) continue;
    sum += p;
    for (size_t d = 0; d < dims; ++d) {
      const double v = c.v_at(j, static_cast<int64_t>(d));
      answer.o[d] += p * v;
      answer.size[d] += p * std::fabs(v);
    }
  }
  for (size_t d = 0; d < dims; ++d) answer.o[d] /= sum, answer.size[d] /= sum;
  answer.lse = max + std::log(sum);
  return answer;
}

std::vector<float> naive(const Case& c, int64_t row, bool round_p) {
  const int64_t n = c.job.n_keys;
  const auto dims = static_cast<size_t>(c.layer.v_head_dim);
  std::vector<float> s, o(dims);
  float max = -INFINITY, sum = 0;
  for (int64_t j = 0; j < n; ++j) {
    s.push_back(c.sees(row, j) ? logit<float>(c, row, j) : -INFINITY);
    max = std::max(max, s.back());
  }
  if (max == -INFINITY) return o;
  for (int64_t j = 0; j < n; ++j) {
    if (!c.sees(row, j)) continue;
    float p = std::exp(s[static_cast<size_t>(j)] - max);
    sum += p;
    if (round_p) {
      const uint32_t bits = std::bit_cast<uint32_t>(p);
      p = std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
    }
    for (size_t d = 0; d < dims; ++d) o[d] += p * static_cast<float>(c.v_at(j, static_cast<int64_t>(d)));
  }
  for (float& x : o) x /= sum;
  return o;
}

namespace {
bool by_matrix_unit = true;
}

void use_matrix_unit(bool use) { by_matrix_unit = use; }

const cpu::KernelTable& kernels_of(const char* isa) {
  static std::deque<cpu::KernelTable> tables;  // static, because real tables exist for the whole process
  const cpu::KernelTable* best = nullptr;
  if (!cpu::choose_isa(nullptr, &best).ok()) std::abort();
  tables.push_back(*best);
  cpu::KernelTable& table = tables.back();
  if (isa != nullptr) {
    table.name = isa;
    table.target &= ~cpu::kMatrixUnit;
  }
  if (isa != nullptr || !by_matrix_unit) table.matrix = nullptr;
  return table;
}

}  // namespace tandem::test
