// SPDX-License-Identifier: MIT
// One attention problem with its answer in double precision, and the gate of correctness.
//
// Keys lie in runs of one arena, at odd element offsets. All other bytes of the arena are NaN. The reference reads the
// stored, dequantised values. A kernel passes when for all rows
//
//   max|o - ref| <= 2 max|naive - ref| + 1e-5     (3 with a soft cap; naive: the plain computation in f32)
//   |o - ref| <= 4 (eps(type) + eps_f32 * c) sum_j p_j |v_j|,  c = largest sum_i |q_i k_ji| sm_scale of the row
//   |lse - ref| <= 1e-5 (1 + |lse|)
//
// The term with c is the error of f32 logits of that size. It only matters where K and V are f32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/tables/backend.h"

namespace tandem::test {

struct Random {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1dULL;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>((next() >> 11) % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal();
};

enum class Mask { kNone, kCausal, kWindow, kTree, kSparseRows };
enum class Runs { kOne, kPages16, kPages128, kRandom, kTiny };
// Positions of keys under RoPE: those of their tokens, or explicit ones. Explicit positions are scattered, or stretches of
// consecutive positions with gaps, ascending or descending.
enum class Positions { kOfTokens, kScattered, kStretches };

struct CaseOptions {
  int32_t k_type = TANDEM_F32, v_type = TANDEM_F32;
  int32_t k_dim = 64, v_dim = 64;
  bool v_aliases_k = false;
  int32_t group_size = 1, q_len = 1;
  int64_t n_keys = 0;
  Mask mask = Mask::kNone;
  Runs runs = Runs::kOne;
  float soft_cap = 0.0f;
  double peak = 1.0;  // factor on q; larger values make the attention weights more peaked
  int32_t rope = TANDEM_ROPE_CALLER;
  int32_t rope_dims = 0;
  double attn_factor = 1.0;
  Positions positions = Positions::kOfTokens;
  int64_t first_position = 0;
  uint64_t seed = 1;
  std::string text() const;
};

class AttendCase {
 public:
  explicit AttendCase(const CaseOptions& options);

  // Runs the job on a backend and checks o, lse and (if with_logits) the logits. Returns "" or a description of the error.
  std::string check(const Backend& backend, bool with_logits) const;
  // Compares sums of attention weights with the reference.
  std::string check_weights(const Backend& backend) const;
  // Compares the largest logits of chunks with the reference, with and without subtracting the rows' sums. Only for cases
  // without a mask and a soft cap.
  std::string check_chunks(const Backend& backend) const;
  // Overwrites one key's K or V with NaN. The reference stays unchanged.
  void poison(int64_t key, bool in_v);
  bool sees(int64_t row, int64_t key) const { return visible_[static_cast<size_t>(row * options.n_keys + key)]; }
  AttendJob job(float* o, float* lse, float* logits) const;

  CaseOptions options;
  Layer layer;
  int64_t n_rows;

 private:
  struct RowAnswer {
    std::vector<double> o, naive, magnitude;  // [v_dim]; magnitude: sum p |v|
    std::vector<double> logits;               // [n_keys]
    double lse = 0.0, condition = 0.0;
  };

  void make_runs(Random& random);
  void make_mask(Random& random);
  void make_keys(Random& random);
  void make_answers();
  RowAnswer answer(int64_t row, const std::vector<double>& k, const std::vector<float>& k_float) const;
  std::string compare(const std::vector<float>& o, const std::vector<float>& lse) const;

  RopeTable rope_table_;
  std::vector<double> inv_freq_;
  std::vector<uint8_t> arena_;
  std::vector<KvRun> runs_;
  std::vector<std::vector<int32_t>> positions_;  // of each run; empty unless explicit
  std::vector<int64_t> token_of_, position_of_;  // of each key
  std::vector<uint8_t*> k_at_, v_at_;            // of each key
  std::vector<uint8_t*> k_scales_at_, v_scales_at_;
  std::vector<int64_t> begin_, end_;
  std::vector<uint64_t> tree_bits_;
  Visibility visibility_;
  std::vector<bool> visible_;  // [n_rows, n_keys]
  std::vector<float> q_;
  std::vector<double> values_;  // [n_keys, v_dim]
  std::vector<RowAnswer> answers_;
};

}  // namespace tandem::test
