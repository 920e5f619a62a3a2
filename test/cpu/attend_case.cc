// SPDX-License-Identifier: MIT
#include "cpu/attend_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "lib/model/dtype.h"
#include "reference/stored_row.h"

namespace tandem::test {

double Random::normal() { return std::sqrt(-2.0 * std::log(1.0 - uniform())) * std::cos(6.283185307179586 * uniform()); }

std::string CaseOptions::text() const {
  char text[400];
  std::snprintf(
      text, sizeof text,
      "k %s v %s dims %d/%d alias %d group %d q_len %d keys %lld mask %d runs %d cap %g peak %g rope %d/%d factor %g "
      "positions %d from %lld seed %llu",
      find_dtype(k_type)->name, find_dtype(v_type)->name, k_dim, v_dim, v_aliases_k, group_size, q_len,
      static_cast<long long>(n_keys), static_cast<int>(mask), static_cast<int>(runs), static_cast<double>(soft_cap), peak,
      rope, rope_dims, attn_factor, static_cast<int>(positions), static_cast<long long>(first_position),
      static_cast<unsigned long long>(seed));
  return text;
}

AttendCase::AttendCase(const CaseOptions& given) : options(given) {
  Random random{options.seed * 0x9e3779b97f4a7c15ULL | 1};
  n_rows = int64_t{options.group_size} * options.q_len;
  layer.n_q_heads = layer.group_size = options.group_size;
  layer.n_kv_heads = 1;
  layer.k_head_dim = options.k_dim;
  layer.v_head_dim = options.v_dim;
  layer.v_aliases_k = options.v_aliases_k;
  layer.k_type = options.k_type;
  layer.v_type = options.v_type;
  layer.sm_scale = static_cast<float>(1.0 / std::sqrt(options.k_dim));
  layer.soft_cap = options.soft_cap;
  if (options.rope != TANDEM_ROPE_CALLER) {
    const int32_t n_pairs = (options.rope_dims > 0 ? options.rope_dims : options.k_dim) / 2;
    for (int32_t i = 0; i < n_pairs; ++i) inv_freq_.push_back(std::pow(10000.0, -static_cast<double>(i) / n_pairs));
    rope_table_ = make_rope_table(inv_freq_.data(), n_pairs, options.rope == TANDEM_ROPE_INTERLEAVED,
                                  static_cast<float>(options.attn_factor));
    layer.rope = &rope_table_;
  }
  q_.resize(static_cast<size_t>(n_rows * options.k_dim));
  for (float& x : q_) x = static_cast<float>(random.normal() * options.peak);
  make_runs(random);
  make_mask(random);
  make_keys(random);
  make_answers();
}

void AttendCase::make_runs(Random& random) {
  int64_t token = random.below(3) == 0 ? random.below(50) : 0;
  int64_t stretch = options.first_position;
  const auto given_position = [&] {
    if (options.positions == Positions::kScattered) return random.below(100000);
    const int64_t gap = random.below(12) == 0 ? random.below(600) - 300 : random.below(12) == 0 ? random.below(4) : 0;
    return stretch = std::max<int64_t>(0, stretch + 1 + gap);
  };
  for (int64_t left = options.n_keys; left > 0;) {
    int64_t n = left;
    if (options.runs == Runs::kPages16) n = 16;
    if (options.runs == Runs::kPages128) n = 128;
    if (options.runs == Runs::kRandom) n = random.below(10) == 0 ? 0 : 1 + random.below(random.below(2) ? 40 : 700);
    if (options.runs == Runs::kTiny) n = options.seed % 2 == 0 ? 1 : 1 + random.below(3);
    n = std::min(n, left);
    left -= n;
    KvRun run;
    run.n_tokens = n;
    run.token_idx = token;
    run.first_position = options.first_position + token;
    const bool scattered = options.runs == Runs::kRandom || options.runs == Runs::kTiny;
    if (scattered && options.mask != Mask::kNone && random.below(6) == 0) run.token_idx = -1;
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < n; ++i) {
      token_of_.push_back(run.token_idx < 0 ? -1 : token + i);
      const int64_t position = options.positions == Positions::kOfTokens ? run.first_position + i : given_position();
      positions.push_back(static_cast<int32_t>(position));
      position_of_.push_back(position);
    }
    positions_.push_back(std::move(positions));
    runs_.push_back(run);
    token += n + (scattered && random.below(3) == 0 ? random.below(300) : 0);
  }
  if (options.positions != Positions::kOfTokens)
    for (size_t i = 0; i < runs_.size(); ++i) runs_[i].positions = positions_[i].data();
}

void AttendCase::make_mask(Random& random) {
  int64_t n_tokens = 0;
  for (const int64_t token : token_of_) n_tokens = std::max(n_tokens, token + 1);
  const int32_t q_len = options.q_len;
  const int64_t past = std::max<int64_t>(0, n_tokens - q_len);
  const int64_t window = 1 + random.below(n_tokens / 2 + 2);
  for (int32_t t = 0; t < q_len; ++t) {
    int64_t begin = 0, end = past + t + 1;
    if (options.mask == Mask::kWindow) begin = std::max<int64_t>(0, end - window);
    if (options.mask == Mask::kTree) end = n_tokens;
    if (options.mask == Mask::kSparseRows) {
      end = t == 0 ? 0 : std::max(end_.back(), random.below(n_tokens + 2));
      begin = t == 0 ? 0 : std::max(begin_.back(), random.below(n_tokens + 2));
    }
    begin_.push_back(begin);
    end_.push_back(end);
  }
  if (options.mask == Mask::kWindow && random.below(2)) visibility_.sink_end = random.below(80);
  if (options.mask == Mask::kTree) {
    visibility_.tree_begin = std::max<int64_t>(0, n_tokens - std::min<int64_t>(q_len + 60, n_tokens));
    visibility_.tree_words = 1;
    for (int32_t t = 0; t < q_len; ++t) tree_bits_.push_back(random.next() | 1);
    visibility_.tree_bits = tree_bits_.data();
  }
  visibility_.begin = begin_.data();
  visibility_.end = end_.data();
  for (int64_t row = 0; row < n_rows; ++row) {
    const auto t = static_cast<size_t>(row / options.group_size);
    for (const int64_t j : token_of_) {
      bool sees = (j < visibility_.sink_end || j >= begin_[t]) && j < end_[t];
      if (sees && j >= visibility_.tree_begin) {
        const int64_t bit = j - visibility_.tree_begin;
        sees = bit < 64 && (tree_bits_[t] >> bit & 1);
      }
      visible_.push_back(options.mask == Mask::kNone || j < 0 || sees);
    }
  }
}

void AttendCase::make_keys(Random& random) {
  const int64_t k_row = row_bytes(options.k_type, options.k_dim);
  const int64_t v_row = options.v_aliases_k ? k_row : row_bytes(options.v_type, options.v_dim);
  const int64_t k_scale_row = scale_bytes(options.k_type, options.k_dim);
  const int64_t v_scale_row = options.v_aliases_k ? k_scale_row : scale_bytes(options.v_type, options.v_dim);
  int64_t bytes = 256;
  for (const KvRun& run : runs_) bytes += run.n_tokens * (k_row + v_row + k_scale_row + v_scale_row) + 800;
  arena_.assign(static_cast<size_t>(bytes), 0xff);  // NaN in every type
  int64_t at = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(arena_.data()) & 63);
  const auto place = [&](int64_t plane_bytes) {
    at += 4 * random.below(20);
    uint8_t* plane = arena_.data() + at;
    at += plane_bytes;
    return plane;
  };
  std::vector<double> row;
  const auto fill = [&](int32_t type, int32_t dim, uint8_t* codes, uint8_t* scales) {
    row.resize(static_cast<size_t>(dim));
    for (double& x : row) x = random.normal();
    reference::store_row(type, row.data(), dim, codes, scales);
  };
  for (KvRun& run : runs_) {
    uint8_t *k = place(run.n_tokens * k_row), *k_scales = place(run.n_tokens * k_scale_row), *v = k, *v_scales = k_scales;
    if (!options.v_aliases_k) v = place(run.n_tokens * v_row), v_scales = place(run.n_tokens * v_scale_row);
    run.k = k, run.k_scales = k_scales, run.v = v, run.v_scales = v_scales;
    for (int64_t i = 0; i < run.n_tokens; ++i) {
      fill(options.k_type, options.k_dim, k, k_scales);
      if (!options.v_aliases_k) fill(options.v_type, options.v_dim, v, v_scales);
      values_.resize(values_.size() + static_cast<size_t>(options.v_dim));
      reference::load_row(options.v_type, v, v_scales, options.v_dim, values_.data() + values_.size() - options.v_dim);
      k_at_.push_back(k), k_scales_at_.push_back(k_scales);
      v_at_.push_back(v), v_scales_at_.push_back(v_scales);
      k += k_row, k_scales += k_scale_row, v += v_row, v_scales += v_scale_row;
    }
  }
}

void AttendCase::make_answers() {
  const auto dim = static_cast<size_t>(options.k_dim);
  std::vector<double> k(k_at_.size() * dim);
  std::vector<float> k_float(k.size());
  for (size_t j = 0; j < k_at_.size(); ++j) {
    reference::load_row(options.k_type, k_at_[j], k_scales_at_[j], options.k_dim, k.data() + j * dim);
    std::copy_n(k.begin() + static_cast<std::ptrdiff_t>(j * dim), dim,
                k_float.begin() + static_cast<std::ptrdiff_t>(j * dim));
    if (layer.rope == nullptr) continue;
    rope_rotate(rope_table_, position_of_[j], k_float.data() + j * dim);
    const bool interleaved = options.rope == TANDEM_ROPE_INTERLEAVED;
    for (size_t i = 0; i < inv_freq_.size(); ++i) {
      double& a = k[j * dim + (interleaved ? 2 * i : i)];
      double& b = k[j * dim + (interleaved ? 2 * i + 1 : i + inv_freq_.size())];
      const double angle = static_cast<double>(position_of_[j]) * inv_freq_[i];
      const double c = std::cos(angle) * options.attn_factor, s = std::sin(angle) * options.attn_factor;
      const double x = a, y = b;
      a = x * c - y * s;
      b = x * s + y * c;
    }
  }
  for (int64_t row = 0; row < n_rows; ++row) answers_.push_back(answer(row, k, k_float));
}

AttendCase::RowAnswer AttendCase::answer(int64_t row, const std::vector<double>& k,
                                         const std::vector<float>& k_float) const {
  const auto k_dim = static_cast<size_t>(options.k_dim), v_dim = static_cast<size_t>(options.v_dim);
  const auto n = static_cast<size_t>(options.n_keys);
  RowAnswer out;
  out.logits.assign(n, -INFINITY);
  std::vector<float> plain(n, -INFINITY);
  double m = -INFINITY;
  float m_plain = -INFINITY;
  for (size_t j = 0; j < n; ++j) {
    if (!sees(row, static_cast<int64_t>(j))) continue;
    const float* q = q_.data() + static_cast<size_t>(row) * k_dim;
    double dot = 0.0, magnitude = 0.0;
    float dot_plain = 0.0f;
    for (size_t c = 0; c < k_dim; ++c) {
      dot += static_cast<double>(q[c]) * k[j * k_dim + c];
      magnitude += std::fabs(static_cast<double>(q[c]) * k[j * k_dim + c]);
      dot_plain += q[c] * k_float[j * k_dim + c];
    }
    dot *= static_cast<double>(layer.sm_scale);
    dot_plain *= layer.sm_scale;
    if (layer.soft_cap > 0.0f) {
      dot = static_cast<double>(layer.soft_cap) * std::tanh(dot / static_cast<double>(layer.soft_cap));
      dot_plain = layer.soft_cap * std::tanh(dot_plain / layer.soft_cap);
    }
    out.logits[j] = dot;
    plain[j] = dot_plain;
    m = std::max(m, dot);
    m_plain = std::max(m_plain, dot_plain);
    out.condition = std::max(out.condition, magnitude * static_cast<double>(layer.sm_scale));
  }
  double sum = 0.0;
  float sum_plain = 0.0f;
  for (size_t j = 0; j < n; ++j) {
    if (out.logits[j] == -INFINITY) continue;
    sum += std::exp(out.logits[j] - m);
    sum_plain += std::exp(plain[j] - m_plain);
  }
  out.lse = sum == 0.0 ? -INFINITY : m + std::log(sum);
  out.o.assign(v_dim, 0.0);
  out.magnitude.assign(v_dim, 0.0);
  std::vector<float> naive(v_dim, 0.0f);
  for (size_t j = 0; j < n; ++j) {
    if (out.logits[j] == -INFINITY) continue;
    const double p = std::exp(out.logits[j] - m) / sum;
    const float p_plain = std::exp(plain[j] - m_plain) / sum_plain;
    for (size_t c = 0; c < v_dim; ++c) {
      out.o[c] += p * values_[j * v_dim + c];
      out.magnitude[c] += p * std::fabs(values_[j * v_dim + c]);
      naive[c] += p_plain * static_cast<float>(values_[j * v_dim + c]);
    }
  }
  out.naive.assign(naive.begin(), naive.end());
  return out;
}

AttendJob AttendCase::job(float* o, float* lse, float* logits) const {
  AttendJob job;
  job.layer = &layer;
  job.q = q_.data();
  job.n_rows = static_cast<int32_t>(n_rows);
  job.n_runs = static_cast<int32_t>(runs_.size());
  job.runs_are_keys = std::all_of(runs_.begin(), runs_.end(), [](const KvRun& run) { return run.n_tokens == 1; });
  job.runs = runs_.data();
  job.n_keys = options.n_keys;
  job.visibility = options.mask == Mask::kNone ? nullptr : &visibility_;
  job.o = o;
  job.lse = lse;
  job.logits = logits;
  return job;
}

std::string AttendCase::check(const Backend& backend, bool with_logits) const {
  const auto v_dim = static_cast<size_t>(options.v_dim), n_keys = static_cast<size_t>(options.n_keys);
  constexpr size_t kGuard = 16;
  std::vector<float> o(static_cast<size_t>(n_rows) * v_dim + kGuard, 12345.0f);
  std::vector<float> lse(static_cast<size_t>(n_rows) + kGuard, 12345.0f);
  std::vector<float> logits(with_logits ? static_cast<size_t>(n_rows) * n_keys + kGuard : 0, 12345.0f);
  const AttendJob one = job(o.data(), lse.data(), with_logits ? logits.data() : nullptr);
  if (!backend.table->attend(backend.self, &one, 1).ok()) return "attend failed";
  for (size_t i = 1; i <= kGuard; ++i)
    if (o[o.size() - i] != 12345.0f || lse[lse.size() - i] != 12345.0f ||
        (with_logits && logits[logits.size() - i] != 12345.0f))
      return "written past the end: " + options.text();
  if (with_logits) {
    for (size_t row = 0; row < static_cast<size_t>(n_rows); ++row) {
      for (size_t j = 0; j < n_keys; ++j) {
        const double want = answers_[row].logits[j], got = static_cast<double>(logits[row * n_keys + j]);
        if (want == got || std::fabs(want - got) <= 1e-5 * (1.0 + answers_[row].condition)) continue;
        return "logit " + std::to_string(got) + " for " + std::to_string(want) + ": " + options.text();
      }
    }
  }
  return compare(o, lse);
}

std::string AttendCase::compare(const std::vector<float>& o, const std::vector<float>& lse) const {
  const auto v_dim = static_cast<size_t>(options.v_dim);
  const double eps = std::max(find_dtype(options.k_type)->epsilon, find_dtype(options.v_type)->epsilon);
  double worst = 0.0, worst_naive = 0.0;
  char text[200] = "";
  for (size_t row = 0; row < static_cast<size_t>(n_rows); ++row) {
    const RowAnswer& want = answers_[row];
    const auto got_lse = static_cast<double>(lse[row]);
    if (!(got_lse == want.lse || std::fabs(got_lse - want.lse) <= 1e-5 * (1.0 + std::fabs(want.lse))))
      std::snprintf(text, sizeof text, "row %zu: lse %.9g for %.9g: ", row, got_lse, want.lse);
    for (size_t c = 0; c < v_dim; ++c) {
      const double error = std::fabs(static_cast<double>(o[row * v_dim + c]) - want.o[c]);
      const double bound = 4.0 * (eps + 0x1p-23 * want.condition) * want.magnitude[c];
      if (!(error <= bound))
        std::snprintf(text, sizeof text, "row %zu dim %zu: error %.3g over %.3g: ", row, c, error, bound);
      worst = std::max(worst, error);
      worst_naive = std::max(worst_naive, std::fabs(want.naive[c] - want.o[c]));
    }
  }
  const double limit = (options.soft_cap > 0.0f ? 3.0 : 2.0) * worst_naive + 1e-5;
  if (!(worst <= limit)) std::snprintf(text, sizeof text, "error %.3g over %.3g (naive %.3g): ", worst, limit, worst_naive);
  return *text ? text + options.text() : "";
}

std::string AttendCase::check_weights(const Backend& backend) const {
  const auto n_keys = static_cast<size_t>(options.n_keys), group = static_cast<size_t>(options.group_size);
  std::vector<float> lse, coeff, out(group * n_keys + 1, 777.0f);
  for (const RowAnswer& row : answers_) lse.push_back(static_cast<float>(row.lse));
  for (int32_t t = 0; t < options.q_len; ++t) coeff.push_back(t % 5 == 4 ? 0.0f : 1.0f / static_cast<float>(t + 1));
  const AttendJob attend = job(nullptr, nullptr, nullptr);
  WeightJob one;
  one.layer = &layer;
  one.q = attend.q;
  one.n_rows = attend.n_rows;
  one.runs = attend.runs;
  one.n_keys = attend.n_keys;
  one.visibility = attend.visibility;
  one.lse = lse.data();
  one.coeff = coeff.data();
  one.out = out.data();
  one.out_stride = options.n_keys;
  backend.table->attn_weights(backend.self, &one, 1);
  if (out.back() != 777.0f) return "weights written past the end: " + options.text();
  for (size_t g = 0; g < group; ++g) {
    for (size_t j = 0; j < n_keys; ++j) {
      double want = 0.0, condition = 0.0;
      for (size_t t = 0; t < coeff.size(); ++t) {
        const RowAnswer& row = answers_[t * group + g];
        if (row.logits[j] == -INFINITY) continue;
        want += static_cast<double>(coeff[t]) * std::exp(row.logits[j] - row.lse);
        condition = std::max(condition, row.condition + std::fabs(row.lse));
      }
      const auto got = static_cast<double>(out[g * n_keys + j]);
      if (!(std::fabs(got - want) <= (1e-5 + 0x1p-22 * condition) * want + 1e-37))
        return "weight " + std::to_string(got) + " for " + std::to_string(want) + ": " + options.text();
    }
  }
  return "";
}

std::string AttendCase::check_chunks(const Backend& backend) const {
  if (options.mask != Mask::kNone || options.soft_cap != 0.0f) return "";
  const AttendJob attend = job(nullptr, nullptr, nullptr);
  for (const int64_t chunk_keys : {1, 2, 8, 64, 256}) {
    ChunkJob one;
    one.layer = &layer;
    one.q = attend.q;
    one.n_rows = attend.n_rows;
    one.runs = attend.runs;
    one.n_keys = attend.n_keys;
    one.chunk_keys = chunk_keys;
    one.n_chunks = std::max<int64_t>(0, attend.n_keys / chunk_keys - (chunk_keys == 8 ? 1 : 0));  // or chunks of all keys
    const auto n = static_cast<size_t>(one.n_chunks);
    std::vector<float> of_rows(64 * n, NAN), largest(n + 1, 777.0f);
    one.row_largest = of_rows.data();
    one.largest = largest.data();
    for (const bool normalises : {false, true}) {
      one.normalises = normalises;
      struct Judged {
        const Backend& backend;
        const ChunkJob& job;
      } judged{backend, one};
      const auto judge = [](void* of, int64_t, int32_t worker_idx) {
        const Judged& each = *static_cast<const Judged*>(of);
        each.backend.table->judge_chunks(each.backend.self, each.job, worker_idx);
      };
      backend.table->run_alone(backend.self, 1, judge, &judged);
      if (largest.back() != 777.0f) return "chunks written past the end: " + options.text();
      for (size_t c = 0; c < n; ++c) {
        double want = -INFINITY, condition = 0.0;
        for (const RowAnswer& row : answers_) {
          const auto first = row.logits.begin() + static_cast<std::ptrdiff_t>(c) * chunk_keys;
          want = std::max(want, *std::max_element(first, first + chunk_keys) - (normalises ? row.lse : 0.0));
          condition = std::max(condition, row.condition + std::fabs(row.lse));
        }
        const auto got = static_cast<double>(largest[c]);
        if (!(std::fabs(got - want) <= 1e-5 + 0x1p-22 * condition))
          return "largest " + std::to_string(got) + " for " + std::to_string(want) + " of a chunk of " +
                 std::to_string(chunk_keys) + ": " + options.text();
      }
    }
  }
  return "";
}

void AttendCase::poison(int64_t key, bool in_v) {
  const int32_t type = in_v ? options.v_type : options.k_type, dim = in_v ? options.v_dim : options.k_dim;
  const auto j = static_cast<size_t>(key);
  std::memset((in_v ? v_at_ : k_at_)[j], 0xff, static_cast<size_t>(row_bytes(type, dim)));
  std::memset((in_v ? v_scales_at_ : k_scales_at_)[j], 0xff, static_cast<size_t>(scale_bytes(type, dim)));
}

}  // namespace tandem::test
