// SPDX-License-Identifier: MIT
// Random attention jobs and their answers in double precision.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "lib/model/dtype.h"
#include "lib/tables/backend.h"

namespace tandem::test {

enum class Mask { kNone, kCausal, kSliding, kTree };

struct CaseOptions {
  int32_t k_type = TANDEM_BF16, v_type = TANDEM_BF16;
  int32_t k_head_dim = 128, v_head_dim = 128;
  int32_t n_rows = 128, group_size = 4;  // n_rows / group_size query tokens, rounded up to whole tokens
  int64_t n_keys = 513;
  Mask mask = Mask::kCausal;
  int32_t window = 100, sink_len = 0;  // kSliding
  float soft_cap = 0.0f;
  int32_t rope_pairs = 0;  // 0: none
  bool interleaved = false;
  bool positions = false;  // explicit positions instead of first_position
  bool q_is_bf16 = false;
  bool v_aliases_k = false;
  bool one_run = false;             // otherwise runs of 16 to 128 tokens at scattered addresses
  int32_t run_len = 0;              // tokens in each run; 0: 16 to 128
  bool gaps = false;                // tokens missing between runs
  bool unconditional_runs = false;  // some runs have token_idx = -1
  bool logits = false;
  float q_size = 2.0f;
  uint32_t seed = 1;
};

std::string describe(const CaseOptions& options);

// Owns everything an AttendJob points to. Bytes outside rows are NaN in every type.
struct Case {
  explicit Case(const CaseOptions& options);
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  CaseOptions options;
  Layer layer;
  RopeTable rope;
  std::vector<double> inv_freq;
  std::vector<float> q, o, lse, logits;
  std::vector<uint8_t> k_bytes, v_bytes, k_scale_bytes, v_scale_bytes;
  std::vector<KvRun> runs;
  std::vector<int32_t> positions;
  std::vector<int64_t> begin, end;
  std::vector<uint64_t> tree_bits;
  Visibility visibility;
  AttendJob job;

  // Location of key j of the job, its token (-1: visible to all queries) and its position.
  struct Key {
    void *k, *v, *k_scales, *v_scales;
    int64_t token_idx, position;
  };
  std::vector<Key> keys;

  std::vector<double> k_values, v_values;  // stored values: [n_keys, head_dim], keys before rotation

  bool sees(int64_t row, int64_t key) const;
  double k_at(int64_t key, int64_t dim) const;
  double v_at(int64_t key, int64_t dim) const;

 private:
  void make_layer();
  std::vector<int64_t> make_places();
  void fill_row(int32_t dtype, int64_t n, uint8_t* codes, uint8_t* scales);
  int64_t make_run(size_t i, int64_t length, int64_t token);
  void make_queries(int64_t n_tokens);
  int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }

  std::mt19937 random;
};

struct RowAnswer {
  std::vector<double> o;     // [v_head_dim]
  std::vector<double> size;  // [v_head_dim] sum of p |v|
  double lse;
  std::vector<double> logits;  // [n_keys]
};
RowAnswer exact(const Case& c, int64_t row);
// Computes the same by plain loops in f32. round_p: rounds p to bf16.
std::vector<float> naive(const Case& c, int64_t row, bool round_p);

void to_storage(int32_t dtype, float value, void* data, int64_t i);

// Sets whether kernels_of(nullptr) uses the processor's matrix unit, if the processor has one (the default), or leaves the
// products to oneDNN.
void use_matrix_unit(bool use);

// Returns the best kernels. With isa, the SIMD part is that of `isa`, with its own variants and without a matrix unit; null
// selects the best.
const cpu::KernelTable& kernels_of(const char* isa);

}  // namespace tandem::test
