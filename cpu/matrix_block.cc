// SPDX-License-Identifier: MIT
// matrix_block.h explains the method.
#include "cpu/matrix_block.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "cpu/kernels/matrix_kernels.h"
#include "cpu/matrix_scratch.h"
#include "cpu/tile_rows.h"

namespace tandem::cpu {
namespace {

constexpr float kNegativeInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kKeys = kMatrixKeys, kRows = kMatrixRows, kStep = kMatrixDepth;
constexpr int32_t kPairRows = 2 * kRows;  // two column groups are multiplied at a time

int32_t n_planes(int32_t dtype) {
  if (dtype == TANDEM_BF16 || dtype == TANDEM_E4M3) return 1;
  return dtype == TANDEM_F16 ? 2 : kMaxPlanes;
}

class Block {
 public:
  Block(const Span& span, const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels, MatrixScratch& scratch)
      : span_(span),
        job_(*span.job),
        layer_(*span.job->layer),
        kernels_(kernels),
        matrix_(*kernels.matrix),
        tile_kernels_(tile_kernels),
        scratch_(scratch),
        k_source_(key_source(layer_)),
        v_source_(value_source(layer_)),
        n_rows_(span.row_end - span.row_begin),
        n_groups_((n_rows_ + kRows - 1) / kRows),
        k_stride_((int64_t{layer_.k_head_dim} + kStep - 1) / kStep * kStep),
        q_planes_(job_.q_is_bf16 ? 1 : kMaxPlanes),
        k_planes_(layer_.rope != nullptr ? kMaxPlanes : n_planes(layer_.k_type)),
        v_planes_(n_planes(layer_.v_type)),
        p_planes_(job_.q_is_bf16 && layer_.v_type == TANDEM_BF16 ? 1 : kMaxPlanes) {
    // the factor of the exponential is then ordinary, too
    const bool ordinary = layer_.sm_scale > 1e-20f && layer_.sm_scale < 1e20f;
    finished_logits_ = layer_.soft_cap > 0.0f || job_.logits != nullptr || !ordinary;
    scale_ = finished_logits_ ? 1.0f : layer_.sm_scale;
  }

  void run();

 private:
  TokenRange tokens(int32_t row_begin, int32_t row_end) const {
    const int64_t group = layer_.group_size, first = span_.row_begin;
    return {(first + row_begin) / group, (first + row_end - 1) / group};
  }
  int32_t padded_keys() const { return (tile_.n_keys + kStep - 1) / kStep * kStep; }
  int64_t q_group_bytes() const { return q_planes_ * k_stride_ / kStep * kMatrixTileBytes; }
  float* o_of(int32_t group) const { return scratch_.o + int64_t{group} * kRows * layer_.v_head_dim; }
  float* s_of(int32_t side) const { return scratch_.s + int64_t{side} * kRows * kKeys; }
  uint16_t* p_of(int32_t side) const { return scratch_.p + int64_t{side} * kMaxPlanes * kRows * kKeys; }

  void start();
  void load_keys();
  void use_keys_in_place();
  void split_f16_keys();
  void split_keys();
  void load_values();
  bool is_odd_value(const KeySegment& segment, int32_t column);
  void use_values_in_place();
  void split_values();
  void list_ahead();
  void step(int32_t group, const TileView& view);
  void multiply_queries(int32_t group, int32_t n_groups, int32_t begin, int32_t end);
  void softmax(int32_t group, int32_t side, int32_t begin, int32_t end, bool masked);
  void find_visible(int32_t group, int32_t begin, int32_t end);
  void put_logits(int32_t group, int32_t side, int32_t begin, int32_t end, bool masked);
  void multiply_values(int32_t group, int32_t n_groups, int32_t begin, int32_t end);
  void add_nonfinite_values(int32_t group, int32_t side, int32_t begin, int32_t end);
  void finish();

  const Span& span_;
  const AttendJob& job_;
  const Layer& layer_;
  const KernelTable& kernels_;
  const MatrixKernels& matrix_;
  const SoftmaxTileKernels& tile_kernels_;
  MatrixScratch& scratch_;
  const TileSource k_source_, v_source_;
  const int32_t n_rows_, n_groups_;
  const int64_t k_stride_;  // dims of K, rounded up to whole steps
  const int32_t q_planes_, k_planes_, v_planes_, p_planes_;
  bool finished_logits_;  // products are scaled and capped before the softmax
  float scale_;           // of the softmax
  KeyTile tile_, next_;
  bool partly_hidden_ = false;
  int32_t n_odd_ = 0;  // columns whose values are not finite and were taken out
  int32_t n_ahead_ = 0;
  const uint8_t* k_blocks_[kKeys / kRows];
  const uint8_t* v_blocks_[kMaxHeadDim / kRows];
};

// Lists planes i of A and j of B with i + j <= 2. The pairs of one plane of A are consecutive, the largest planes first.
// Planes of A are `a` bytes apart, those of B `b` bytes.
void pair_planes(int32_t a_planes, int64_t a, int32_t b_planes, int64_t b, MatrixProduct* product) {
  product->n_pairs = 0;
  for (int32_t i = 0; i < a_planes; ++i)
    for (int32_t j = 0; j < b_planes && i + j < kMaxPlanes; ++j) product->pairs[product->n_pairs++] = {i * a, j * b};
}

void Block::run() {
  matrix_.open();
  start();
  KeyWalker walker(span_, tokens(0, n_rows_));
  tile_.segments = scratch_.segments[0];
  next_.segments = scratch_.segments[1];
  bool more = walker.next(&tile_, kKeys);
  while (more) {
    more = walker.next(&next_, kKeys);
    if (!more) next_.n_keys = next_.n_segments = 0;
    if (span_.ends_early()) break;
    partly_hidden_ = tile_.n_keys != padded_keys();
    std::array<TileView, MatmulAttend::kTaskRows / kPairRows> views;
    for (int32_t row = 0; row < n_rows_; row += kPairRows) {
      TileView& view = views[static_cast<size_t>(row / kPairRows)];
      view = view_of(job_.visibility, tile_, tokens(row, std::min(row + kPairRows, n_rows_)));
      partly_hidden_ = partly_hidden_ || !view.all;
    }
    load_keys();
    load_values();
    list_ahead();
    for (int32_t group = 0; group < n_groups_; group += 2) {
      const TileView& view = views[static_cast<size_t>(group / 2)];
      if (view.begin < view.end) step(group, view);
    }
    std::swap(tile_, next_);
  }
  finish();
  matrix_.close();
}

// Packs q as B, with zeros in the rows past the last one, and sets every row to the empty state.
void Block::start() {
  const int64_t dims = layer_.k_head_dim, plane = kRows * dims, n_steps = k_stride_ / kStep;
  for (int32_t group = 0; group < n_groups_; ++group) {
    const int32_t row = group * kRows, n = std::min(kRows, n_rows_ - row);
    std::memset(scratch_.q_rows, 0, static_cast<size_t>(q_planes_ * plane) * sizeof(uint16_t));
    matrix_.split(job_.q + (span_.row_begin + row) * dims, n * dims, q_planes_, scratch_.q_rows, plane);
    for (int32_t p = 0; p < q_planes_; ++p)
      matrix_.pack_queries(scratch_.q_rows + p * plane, dims, dims,
                           scratch_.q + (int64_t{group} * q_planes_ + p) * n_steps * (kMatrixTileBytes / 2));
  }
  std::fill_n(scratch_.o, int64_t{n_groups_} * kRows * layer_.v_head_dim, 0.0f);
  std::fill_n(scratch_.max, n_groups_ * kRows, kNegativeInf);
  std::fill_n(scratch_.sum, n_groups_ * kRows, 0.0f);
  for (int64_t row = span_.row_begin; job_.logits != nullptr && row < span_.row_end; ++row)
    std::fill_n(job_.logits + row * job_.n_keys + span_.key_begin, span_.key_end - span_.key_begin, kNegativeInf);
}

void Block::load_keys() {
  const bool as_stored = layer_.rope == nullptr && k_stride_ == layer_.k_head_dim;
  if (as_stored && layer_.k_type == TANDEM_BF16) return use_keys_in_place();
  if (as_stored && layer_.k_type == TANDEM_F16)
    split_f16_keys();
  else
    split_keys();
  for (int32_t column = 0; column < padded_keys(); column += kRows)
    k_blocks_[column / kRows] = reinterpret_cast<const uint8_t*>(scratch_.k + column * k_stride_);
}

// Sixteen keys of one run are multiplied in place. Where runs meet, or rows have gaps, keys are copied together first.
void Block::use_keys_in_place() {
  const auto row = static_cast<size_t>(k_source_.row_bytes());
  auto* copies = reinterpret_cast<std::byte*>(scratch_.k);
  int32_t i = 0;
  for (int32_t column = 0; column < padded_keys(); column += kRows) {
    while (i < tile_.n_segments && column >= tile_.segments[i].column + tile_.segments[i].n_keys) ++i;
    const bool whole = k_source_.side_by_side() && i < tile_.n_segments &&
                       column + kRows <= tile_.segments[i].column + tile_.segments[i].n_keys;
    const std::byte* at = copies + static_cast<size_t>(column) * row;
    if (whole) {
      at = stored_row(k_source_, tile_.segments[i], column);
    } else {
      int32_t of = i;
      for (int32_t c = column; c < column + kRows; ++c) {
        while (of < tile_.n_segments && c >= tile_.segments[of].column + tile_.segments[of].n_keys) ++of;
        std::byte* to = copies + static_cast<size_t>(c) * row;
        if (of < tile_.n_segments)
          std::memcpy(to, stored_row(k_source_, tile_.segments[of], c), row);
        else
          std::memset(to, 0, row);
      }
    }
    k_blocks_[column / kRows] = reinterpret_cast<const uint8_t*>(at);
  }
}

void Block::split_f16_keys() {
  const int64_t plane = kKeys * k_stride_;
  for (int32_t i = 0; i < tile_.n_segments; ++i) {
    const KeySegment& segment = tile_.segments[i];
    const int32_t step = k_source_.side_by_side() ? segment.n_keys : 1;
    for (int32_t column = segment.column; column < segment.column + segment.n_keys; column += step) {
      const auto* rows = reinterpret_cast<const uint8_t*>(stored_row(k_source_, segment, column));
      matrix_.split_halves(rows, step * k_stride_, scratch_.k + column * k_stride_, plane);
    }
  }
  for (int32_t p = 0; p < k_planes_; ++p)
    std::fill_n(scratch_.k + p * plane + tile_.n_keys * k_stride_, (padded_keys() - tile_.n_keys) * k_stride_, uint16_t{0});
}

void Block::split_keys() {
  const int64_t dims = layer_.k_head_dim, plane = kKeys * k_stride_;
  widen_tile(kernels_, k_source_, tile_, scratch_.widened);
  if (layer_.rope != nullptr) rotate_tile(tile_kernels_, layer_, tile_, scratch_.widened, scratch_.angles);
  std::fill_n(scratch_.widened + tile_.n_keys * dims, (padded_keys() - tile_.n_keys) * dims, 0.0f);
  if (k_stride_ == dims) {
    matrix_.split(scratch_.widened, padded_keys() * dims, k_planes_, scratch_.k, plane);
  } else {
    for (int32_t j = 0; j < padded_keys(); ++j) {
      uint16_t* row = scratch_.k + j * k_stride_;
      matrix_.split(scratch_.widened + j * dims, dims, k_planes_, row, plane);
      for (int32_t p = 0; p < k_planes_; ++p) std::fill_n(row + p * plane + dims, k_stride_ - dims, uint16_t{0});
    }
  }
}

void Block::load_values() {
  const int64_t dims = layer_.v_head_dim, plane = kKeys * dims;
  n_odd_ = 0;
  if (layer_.v_type == TANDEM_BF16) {
    use_values_in_place();
    matrix_.transpose_values(scratch_.v_rows, padded_keys(), layer_.v_head_dim, scratch_.v_tiles);
  } else if (layer_.v_type == TANDEM_F16) {
    use_values_in_place();
    matrix_.transpose_halves(scratch_.v_rows, padded_keys(), layer_.v_head_dim, scratch_.v_tiles, plane);
  } else {
    split_values();
    for (int32_t p = 0; p < v_planes_; ++p) {
      for (int32_t j = 0; j < padded_keys(); ++j)
        scratch_.v_rows[j] = reinterpret_cast<const uint8_t*>(scratch_.v + p * plane + j * dims);
      matrix_.transpose_values(scratch_.v_rows, padded_keys(), layer_.v_head_dim, scratch_.v_tiles + p * plane);
    }
  }
  for (int32_t d = 0; d < dims; d += kRows)
    v_blocks_[d / kRows] = reinterpret_cast<const uint8_t*>(scratch_.v_tiles + int64_t{d} * kKeys);
}

bool Block::is_odd_value(const KeySegment& segment, int32_t column) {
  widen_row(kernels_, v_source_, segment, column, layer_.v_head_dim, scratch_.value);
  return tile_kernels_.has_nonfinite(scratch_.value, layer_.v_head_dim, false);
}

// Values that are not finite and that only some rows see are zeros in the products, and are added row by row.
void Block::use_values_in_place() {
  for (int32_t i = 0; i < tile_.n_segments; ++i) {
    const KeySegment& segment = tile_.segments[i];
    for (int32_t column = segment.column; column < segment.column + segment.n_keys; ++column) {
      const std::byte* row = stored_row(v_source_, segment, column);
      const bool odd = partly_hidden_ && is_odd_value(segment, column);
      if (odd) scratch_.odd_columns[n_odd_++] = column;
      scratch_.v_rows[column] = odd ? scratch_.zeros : reinterpret_cast<const uint8_t*>(row);
    }
  }
  std::fill(scratch_.v_rows + tile_.n_keys, scratch_.v_rows + padded_keys(), scratch_.zeros);
}

void Block::split_values() {
  const int64_t dims = layer_.v_head_dim, plane = kKeys * dims;
  float* rows = scratch_.widened;
  widen_tile(kernels_, v_source_, tile_, rows);
  std::fill_n(rows + tile_.n_keys * dims, (padded_keys() - tile_.n_keys) * dims, 0.0f);
  for (int32_t column = 0; partly_hidden_ && column < tile_.n_keys; ++column) {
    if (!tile_kernels_.has_nonfinite(rows + column * dims, dims, false)) continue;
    std::fill_n(rows + column * dims, dims, 0.0f);
    scratch_.odd_columns[n_odd_++] = column;
  }
  matrix_.split(rows, padded_keys() * dims, v_planes_, scratch_.v, plane);
}

// Lists the rows that the next tile reads, in blocks of sixteen rows.
void Block::list_ahead() {
  n_ahead_ = 0;
  if (!k_source_.side_by_side() || !v_source_.side_by_side()) return;
  for (int32_t i = 0; i < next_.n_segments; ++i) {
    const KeySegment& segment = next_.segments[i];
    for (int32_t j = 0; j < segment.n_keys && n_ahead_ + 2 <= MatrixScratch::kMaxAheadBlocks; j += kRows) {
      scratch_.ahead[n_ahead_++] = reinterpret_cast<const uint8_t*>(stored_row(k_source_, segment, segment.column + j));
      if (!layer_.v_aliases_k)
        scratch_.ahead[n_ahead_++] = reinterpret_cast<const uint8_t*>(stored_row(v_source_, segment, segment.column + j));
    }
  }
}

// Attends the tile with two column groups.
void Block::step(int32_t group, const TileView& view) {
  const int32_t n_groups = std::min(2, n_groups_ - group);
  const int32_t begin = view.begin / kStep * kStep, end = (view.end + kStep - 1) / kStep * kStep;
  const bool masked = !view.all || end > tile_.n_keys;
  multiply_queries(group, n_groups, begin, end);
  for (int32_t side = 0; side < n_groups; ++side) softmax(group + side, side, begin, end, masked);
  multiply_values(group, n_groups, begin, end);
  for (int32_t side = 0; side < n_groups && n_odd_ > 0; ++side) {
    find_visible(group + side, begin, end);
    add_nonfinite_values(group + side, side, begin, end);
  }
}

void Block::multiply_queries(int32_t group, int32_t n_groups, int32_t begin, int32_t end) {
  MatrixProduct product;
  product.a = k_blocks_ + begin / kRows;
  product.a_stride = k_stride_ * 2;
  product.a_step = int64_t{kStep} * 2;
  product.n_blocks = (end - begin) / kRows;
  product.n_groups = n_groups;
  product.b = reinterpret_cast<const uint8_t*>(scratch_.q) + group * q_group_bytes();
  product.b_group = q_group_bytes();
  product.n_steps = static_cast<int32_t>(k_stride_ / kStep);
  pair_planes(k_planes_, kKeys * k_stride_ * 2, q_planes_, product.n_steps * kMatrixTileBytes, &product);
  product.c = s_of(0) + int64_t{begin} * kRows;
  product.c_group = s_of(1) - s_of(0);
  matrix_.multiply(product);
}

void Block::softmax(int32_t group, int32_t side, int32_t begin, int32_t end, bool masked) {
  float* s = s_of(side) + int64_t{begin} * kRows;
  if (finished_logits_) tile_kernels_.cap_logits(s, int64_t{end - begin} * kRows, layer_.sm_scale, layer_.soft_cap);
  if (masked) find_visible(group, begin, end);
  if (job_.logits != nullptr) put_logits(group, side, begin, end, masked);
  MatrixSoftmax softmax;
  softmax.s = s;
  softmax.visible = masked ? scratch_.visible + begin : nullptr;
  softmax.n_keys = end - begin;
  softmax.scale = scale_;
  softmax.max = scratch_.max + int64_t{group} * kRows;
  softmax.sum = scratch_.sum + int64_t{group} * kRows;
  softmax.o = o_of(group);
  softmax.o_dim = layer_.v_head_dim;
  softmax.p = p_of(side) + int64_t{begin} * kRows;
  softmax.plane = int64_t{kRows} * kKeys;
  softmax.n_planes = p_planes_;
  const int32_t first = n_ahead_ * group / n_groups_;
  softmax.ahead = scratch_.ahead + first;
  softmax.n_ahead = n_ahead_ * (group + 1) / n_groups_ - first;
  softmax.ahead_bytes = kRows * k_source_.row_bytes();
  matrix_.softmax(softmax);
}

// Sets visible[column]: a bit for each row of the group that sees the column.
void Block::find_visible(int32_t group, int32_t begin, int32_t end) {
  std::fill(scratch_.visible + begin, scratch_.visible + end, uint16_t{0});
  const int64_t first = span_.row_begin + group * kRows, last = std::min(first + kRows, int64_t{span_.row_end});
  for (int64_t row = first; row < last;) {
    const int64_t token = row / layer_.group_size, end_of_token = std::min((token + 1) * layer_.group_size, last);
    const auto bits = static_cast<uint16_t>((1u << (end_of_token - first)) - (1u << (row - first)));
    visible_columns(job_.visibility, tile_, token, begin, end, scratch_.columns);
    for (int32_t c = begin; c < end; ++c) scratch_.visible[c] |= static_cast<uint16_t>(scratch_.columns[c] & bits);
    row = end_of_token;
  }
}

void Block::put_logits(int32_t group, int32_t side, int32_t begin, int32_t end, bool masked) {
  const int32_t n = std::min(kRows, n_rows_ - group * kRows);
  for (int32_t r = 0; r < n; ++r) {
    const float* s = s_of(side) + r;
    for (int32_t i = 0; i < tile_.n_segments; ++i) {
      const KeySegment& segment = tile_.segments[i];
      float* out = job_.logits + (span_.row_begin + group * kRows + r) * job_.n_keys + segment.key_idx - segment.column;
      const int32_t last = std::min(end, segment.column + segment.n_keys);
      for (int32_t c = std::max(begin, segment.column); c < last; ++c)
        if (!masked || (scratch_.visible[c] >> r & 1) != 0) out[c] = s[int64_t{c} * kRows];
    }
  }
}

void Block::multiply_values(int32_t group, int32_t n_groups, int32_t begin, int32_t end) {
  constexpr int64_t kPlaneBytes = int64_t{kRows} * kKeys * 2;
  const int64_t dims = layer_.v_head_dim, tile = begin / kStep * kMatrixTileBytes;
  const uint8_t* a[kMaxHeadDim / kRows];
  for (int32_t i = 0; i < dims / kRows; ++i) a[i] = v_blocks_[i] + tile;
  MatrixProduct product;
  product.a = a;
  product.a_stride = int64_t{kStep} * 2;
  product.a_step = kMatrixTileBytes;
  product.n_blocks = static_cast<int32_t>(dims) / kRows;
  product.n_groups = n_groups;
  product.b = reinterpret_cast<const uint8_t*>(p_of(0)) + tile;
  product.b_group = kMaxPlanes * kPlaneBytes;
  product.n_steps = (end - begin) / kStep;
  pair_planes(v_planes_, kKeys * dims * 2, p_planes_, kPlaneBytes, &product);
  product.c = o_of(group);
  product.c_group = kRows * dims;
  product.accumulate = true;
  matrix_.multiply(product);
}

// Adds the part of o += p v that was left out of the products, to the rows that see it.
void Block::add_nonfinite_values(int32_t group, int32_t side, int32_t begin, int32_t end) {
  const int64_t dims = layer_.v_head_dim;
  const int32_t n = std::min(kRows, n_rows_ - group * kRows);
  int32_t segment_idx = 0;
  for (int32_t i = 0; i < n_odd_; ++i) {
    const int32_t column = scratch_.odd_columns[i];
    if (column < begin || column >= end) continue;
    while (column >= tile_.segments[segment_idx].column + tile_.segments[segment_idx].n_keys) ++segment_idx;
    widen_row(kernels_, v_source_, tile_.segments[segment_idx], column, dims, scratch_.value);
    for (int32_t r = 0; r < n; ++r) {
      if ((scratch_.visible[column] >> r & 1) == 0) continue;
      float p = 0.0f;
      for (int32_t plane = p_planes_; plane-- > 0;) {
        const uint16_t* of = p_of(side) + int64_t{plane} * kRows * kKeys;
        p += std::bit_cast<float>(uint32_t{of[column / 2 * 2 * kRows + 2 * r + column % 2]} << 16);
      }
      for (int64_t d = 0; d < dims; ++d) o_of(group)[d * kRows + r] += p * scratch_.value[d];
    }
  }
}

void Block::finish() {
  const bool is_part = span_.m != nullptr;
  for (int32_t group = 0; group < n_groups_; ++group) {
    alignas(64) float factor[kRows];
    const int32_t row = group * kRows, n = std::min(kRows, n_rows_ - row);
    for (int32_t r = 0; r < kRows; ++r) {
      const float sum = scratch_.sum[row + r], most = scratch_.max[row + r], max = most * scale_;
      const bool empty = most == kNegativeInf;
      factor[r] = is_part ? 1.0f : empty ? 0.0f : 1.0f / sum;
      if (r >= n) continue;
      if (is_part) {
        span_.m[row + r] = max;
        span_.sum[row + r] = sum;
      } else {
        span_.lse[row + r] = empty ? kNegativeInf : max + std::log(sum);
      }
    }
    matrix_.put_rows(o_of(group), layer_.v_head_dim, factor, n, span_.o + int64_t{row} * layer_.v_head_dim);
  }
}

class MatrixAttend final : public MatmulAttend {
 public:
  MatrixAttend(const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels)
      : kernels_(kernels), tile_kernels_(tile_kernels) {}

  // The new scratch is complete before the old one is freed.
  Status prepare(const Layer& layer, int32_t n_workers) override {
    const int32_t k_dim = std::max(k_dim_, layer.k_head_dim), v_dim = std::max(v_dim_, layer.v_head_dim);
    const bool larger = k_dim > k_dim_ || v_dim > v_dim_;
    std::vector<std::unique_ptr<MatrixScratch>> made;
    const size_t n = std::max(static_cast<size_t>(n_workers), workers_.size()), n_kept = larger ? 0 : workers_.size();
    made.reserve(n);
    for (size_t i = n_kept; i < n; ++i) {
      made.push_back(std::make_unique<MatrixScratch>());
      TANDEM_TRY(made.back()->allocate(k_dim, v_dim));
    }
    made.insert(made.begin(), std::make_move_iterator(workers_.begin()),
                std::make_move_iterator(workers_.begin() + static_cast<ptrdiff_t>(n_kept)));
    workers_.swap(made);
    k_dim_ = k_dim;
    v_dim_ = v_dim;
    return {};
  }

  void attend(const Span& span, int32_t worker_idx) override {
    assert(static_cast<size_t>(worker_idx) < workers_.size());
    MatrixScratch& scratch = *workers_[static_cast<size_t>(worker_idx)];
    for (int32_t row = span.row_begin; row < span.row_end; row += kTaskRows) {
      const Span block = rows_of(span, row, std::min(span.row_end, row + kTaskRows));
      Block(block, kernels_, tile_kernels_, scratch).run();
    }
  }

 private:
  const KernelTable& kernels_;
  const SoftmaxTileKernels& tile_kernels_;
  std::vector<std::unique_ptr<MatrixScratch>> workers_;
  int32_t k_dim_ = 0, v_dim_ = 0;  // largest so far
};

}  // namespace

std::unique_ptr<MatmulAttend> make_matrix_attend(const KernelTable& kernels, const SoftmaxTileKernels& tile_kernels) {
  return std::make_unique<MatrixAttend>(kernels, tile_kernels);
}

}  // namespace tandem::cpu
