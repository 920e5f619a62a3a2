// SPDX-License-Identifier: MIT
// Measures the rate of dense matrix products on the machine's cores, the limit of appends and prefills.
//
// Every thread of the team, bound to its core, multiplies its own matrices with oneDNN, with the weights in oneDNN's
// preferred layout. Calibration tries a few shapes, from the tiles of attention to one with a long inner dimension, and
// keeps the fastest. So the limit is the machine's and not that of one shape.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/bench/pinned_team.h"
#include "tools/common/result.h"

namespace tools {

class MatmulRate {
 public:
  // dtype: TANDEM_F32, or TANDEM_BF16 for products of bf16 summed in f32 (refused if oneDNN has none on this machine).
  static Result create(PinnedTeam* team, int32_t dtype, std::unique_ptr<MatmulRate>* probe);
  ~MatmulRate();

  double measure();  // GFLOP/s of one pass of a few milliseconds with the best shape
  std::string best_shape() const;

 private:
  struct Product;
  explicit MatmulRate(PinnedTeam* team);
  Result prepare(int32_t dtype);
  void calibrate();
  double pass(size_t shape_idx);

  PinnedTeam* team_;
  std::vector<std::vector<std::unique_ptr<Product>>> products_;  // [shape][thread]
  std::vector<int64_t> n_rounds_;                                // [shape]: executions in a pass
  size_t best_shape_ = 0;
};

}  // namespace tools
