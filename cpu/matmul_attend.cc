// SPDX-License-Identifier: MIT
#include "cpu/matmul_attend.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "cpu/matmul_block.h"
#include "cpu/matrix_block.h"
#include "cpu/onednn.h"
#include "cpu/pool_modes.h"

namespace tandem::cpu {
namespace {

class MatmulAttendImpl final : public MatmulAttend {
 public:
  MatmulAttendImpl(const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels)
      : kernels_(kernels), tile_kernels_(tile_kernels) {}

  // Allocates scratch for the largest dims so far. The new scratch is complete before the old one is freed.
  Status prepare(const Layer& layer, int32_t n_workers) override {
    n_workers = std::max(n_workers, static_cast<int32_t>(workers_.size()));
    const int32_t k_head_dim = std::max(k_head_dim_, layer.k_head_dim), v_head_dim = std::max(v_head_dim_, layer.v_head_dim);
    const bool larger = k_head_dim > k_head_dim_ || v_head_dim > v_head_dim_;
    std::vector<std::unique_ptr<Scratch>> made;
    for (size_t i = larger ? 0 : workers_.size(); i < static_cast<size_t>(n_workers); ++i) {
      made.push_back(std::make_unique<Scratch>());
      TANDEM_TRY(made.back()->allocate(k_head_dim, v_head_dim));
    }
    if (larger) {
      workers_.swap(made);
    } else {
      workers_.reserve(workers_.size() + made.size());
      for (auto& scratch : made) workers_.push_back(std::move(scratch));
    }
    k_head_dim_ = k_head_dim;
    v_head_dim_ = v_head_dim;
    return {};
  }

  void attend(const Span& span, int32_t worker_idx) override {
    const SingleThread single;
    assert(static_cast<size_t>(worker_idx) < workers_.size());
    Scratch& scratch = *workers_[static_cast<size_t>(worker_idx)];
    for (int32_t row = span.row_begin; row < span.row_end; row += kTaskRows) {
      const Span block = rows_of(span, row, std::min(span.row_end, row + kTaskRows));
      attend_block({block, kernels_, tile_kernels_, scratch, has_bf16_});
    }
  }

 private:
  const KernelTable& kernels_;
  const SoftmaxTileKernels& tile_kernels_;
  std::vector<std::unique_ptr<Scratch>> workers_;
  int32_t k_head_dim_ = 0, v_head_dim_ = 0;  // largest so far
  const bool has_bf16_ = has_bf16_products(tile_kernels_);
};

}  // namespace

Status MatmulAttend::create(const KernelTable& kernels, std::unique_ptr<MatmulAttend>* attend) {
  const bool best = (kernels.target & kMatrixUnit) != 0;  // processors with a matrix unit have the best instruction set, too
  const SoftmaxTileKernels* tile_kernels = softmax_tile_kernels(best ? nullptr : kernels.name);
  if (tile_kernels == nullptr)
    return fail(TANDEM_ERROR_NOT_FOUND, "cpu_isa", "cpu_isa = \"%s\" is unknown or not on this processor", kernels.name);
  if (kernels.matrix != nullptr) {
    *attend = make_matrix_attend(kernels, *tile_kernels);
    return {};
  }
  TANDEM_TRY(prepare_sgemm());
  *attend = std::make_unique<MatmulAttendImpl>(kernels, *tile_kernels);
  return {};
}

}  // namespace tandem::cpu
