// SPDX-License-Identifier: MIT
#include "cpu/matmul_attend.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "cpu/matmul_block.h"
#include "cpu/matrix_block.h"

namespace tandem::cpu {
namespace {

Status create_matmul(const MatmulShape& shape, int32_t n_workers, Matmul* matmul) {
  TANDEM_TRY(Matmul::create(shape, matmul));
  return matmul->prepare(n_workers);
}

MatmulShape qk_shape(int64_t m, int64_t n, int64_t k_head_dim, bool bf16) {
  return {m, n, k_head_dim, k_head_dim, 1, k_head_dim, kStrideS, bf16, false};
}

// p lies at the start of each row of logits, so in bf16 the rows are twice as many elements apart.
MatmulShape pv_shape(int64_t m, int64_t n, const Layer& layer, bool bf16) {
  const int64_t dim = layer.v_head_dim;
  return {m, dim, n, bf16 ? 2 * kStrideS : kStrideS, v_tile_stride(layer), 1, dim, bf16, true};
}

Status create_products(const Layer& layer, bool bf16, int32_t n_workers, TileProducts* products) {
  for (int32_t m = 0; m < kSizesM; ++m) {
    for (int32_t n = 0; n < kSizesN; ++n) {
      TANDEM_TRY(
          create_matmul(qk_shape(kTileRows[m], kTileColumns[n], layer.k_head_dim, bf16), n_workers, &products->qk[m][n]));
      TANDEM_TRY(create_matmul(pv_shape(kTileRows[m], kTileColumns[n], layer, bf16), n_workers, &products->pv[m][n]));
    }
  }
  return {};
}

size_t scratchpad_bytes(const TileProducts& products) {
  size_t bytes = 0;
  for (int32_t m = 0; m < kSizesM; ++m)
    for (int32_t n = 0; n < kSizesN; ++n)
      bytes = std::max({bytes, products.qk[m][n].scratchpad_bytes(), products.pv[m][n].scratchpad_bytes()});
  return bytes;
}

class MatmulAttendImpl final : public MatmulAttend {
 public:
  MatmulAttendImpl(const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels)
      : kernels_(kernels), tile_kernels_(tile_kernels) {}

  Status prepare(const Layer& layer, bool bf16, int32_t n_workers) override {
    bf16 = bf16 && onednn_has_fast_bf16();
    n_workers = std::max(n_workers, static_cast<int32_t>(workers_.size()));
    TANDEM_TRY(prepare_workers(layer, n_workers));
    for (const auto& geometry : geometries_) TANDEM_TRY(extend(*geometry, n_workers));
    Geometry* geometry = find(layer);
    if (geometry == nullptr) {
      auto made = std::make_unique<Geometry>();
      made->k_head_dim = layer.k_head_dim;
      made->v_head_dim = layer.v_head_dim;
      made->v_stride = v_tile_stride(layer);
      TANDEM_TRY(add_products(layer, false, n_workers, &made->f32));
      geometries_.push_back(std::move(made));
      geometry = geometries_.back().get();
    }
    if (bf16 && geometry->bf16 == nullptr) TANDEM_TRY(add_products(layer, true, n_workers, &geometry->bf16));
    return {};
  }

  void attend(const Span& span, int32_t worker_idx) override {
    const SingleThread single;
    const Geometry* geometry = find(*span.job->layer);
    assert(geometry != nullptr && static_cast<size_t>(worker_idx) < workers_.size());
    Scratch& scratch = *workers_[static_cast<size_t>(worker_idx)];
    for (int32_t row = span.row_begin; row < span.row_end; row += kTaskRows) {
      const Span block = rows_of(span, row, std::min(span.row_end, row + kTaskRows));
      attend_block({block, *geometry, kernels_, tile_kernels_, scratch, worker_idx});
    }
  }

 private:
  Geometry* find(const Layer& layer) const {
    for (const auto& geometry : geometries_)
      if (geometry->k_head_dim == layer.k_head_dim && geometry->v_head_dim == layer.v_head_dim &&
          geometry->v_stride == v_tile_stride(layer))
        return geometry.get();
    return nullptr;
  }

  static Status extend(Geometry& geometry, int32_t n_workers) {
    for (TileProducts* products : {geometry.f32.get(), geometry.bf16.get()}) {
      if (products == nullptr) continue;
      for (auto* set : {&products->qk, &products->pv})
        for (auto& row : *set)
          for (Matmul& matmul : row) TANDEM_TRY(matmul.prepare(n_workers));
    }
    return {};
  }

  // Scratch for the largest dims so far. The new one is complete before the old one goes.
  Status prepare_workers(const Layer& layer, int32_t n_workers) {
    const int32_t k_head_dim = std::max(k_head_dim_, layer.k_head_dim), v_head_dim = std::max(v_head_dim_, layer.v_head_dim);
    const bool larger = k_head_dim > k_head_dim_ || v_head_dim > v_head_dim_;
    std::vector<std::unique_ptr<Scratch>> made;
    for (size_t i = larger ? 0 : workers_.size(); i < static_cast<size_t>(n_workers); ++i) {
      made.push_back(std::make_unique<Scratch>());
      TANDEM_TRY(made.back()->allocate(k_head_dim, v_head_dim, scratchpad_bytes_));
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

  // Published only when complete, and when every worker has room for its scratchpad.
  Status add_products(const Layer& layer, bool bf16, int32_t n_workers, std::unique_ptr<TileProducts>* products) {
    auto made = std::make_unique<TileProducts>();
    TANDEM_TRY(create_products(layer, bf16, n_workers, made.get()));
    scratchpad_bytes_ = std::max(scratchpad_bytes_, tandem::cpu::scratchpad_bytes(*made));
    for (const auto& worker : workers_) TANDEM_TRY(worker->reserve_scratchpad(scratchpad_bytes_));
    *products = std::move(made);
    return {};
  }

  const KernelTable& kernels_;
  const SoftmaxTileKernels& tile_kernels_;
  std::vector<std::unique_ptr<Scratch>> workers_;
  std::vector<std::unique_ptr<Geometry>> geometries_;
  int32_t k_head_dim_ = 0, v_head_dim_ = 0;  // largest so far
  size_t scratchpad_bytes_ = 64;
};

}  // namespace

Status MatmulAttend::create(const KernelTable& kernels, std::unique_ptr<MatmulAttend>* attend) {
  const bool best = (kernels.target & kMatrixUnit) != 0;  // which those who have it have
  const SoftmaxTileKernels* tile_kernels = softmax_tile_kernels(best ? nullptr : kernels.name);
  if (tile_kernels == nullptr)
    return fail(TANDEM_ERROR_NOT_FOUND, "cpu_isa", "cpu_isa = \"%s\" is unknown or not on this processor", kernels.name);
  if (kernels.matrix != nullptr)
    *attend = make_matrix_attend(kernels, *tile_kernels);
  else
    *attend = std::make_unique<MatmulAttendImpl>(kernels, *tile_kernels);
  return {};
}

}  // namespace tandem::cpu
