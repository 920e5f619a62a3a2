// SPDX-License-Identifier: MIT
// See matmul_attend.h for the method.
#include "cpu/matmul_block.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/tile_rows.h"

namespace tandem::cpu {

namespace {
constexpr float kNegativeInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kTileQ = MatmulAttend::kTileQ, kTileKv = MatmulAttend::kTileKv;
constexpr int32_t kStep = kTileColumns[0];
constexpr int32_t kMaxTiles = MatmulAttend::kTaskRows / kTileQ;

size_t element_bytes(bool bf16) { return bf16 ? sizeof(uint16_t) : sizeof(float); }
}  // namespace

Status Scratch::allocate(int32_t k_head_dim, int32_t v_head_dim, size_t scratchpad_bytes) {
  size_t total = 0;
  const auto place = [&](size_t bytes) {
    const size_t at = total;
    total += (bytes + 63) / 64 * 64;
    return at;
  };
  const auto dk = static_cast<size_t>(k_head_dim), dv = static_cast<size_t>(v_head_dim);
  const size_t at_q = place(kRows * dk * 4), at_k = place(kKeys * dk * 4), at_v = place(kKeys * std::max(dk, dv) * 4);
  const size_t at_o = place(kRows * dv * 4), at_s = place(size_t{kTileQ} * kStrideS * 4), at_max = place(size_t{kRows} * 4);
  const size_t at_sum = place(size_t{kRows} * 4), at_angles = place(dk * 4), at_value = place(dv * 4),
               at_visible = place(size_t{kKeys} * 4);
  const size_t at_odd = place(size_t{kKeys} * 4), at_segments = place(kKeys * sizeof(KeySegment));
  TANDEM_TRY(allocate_aligned(total, &data_));
  std::byte* base = data_.get();
  const auto floats = [&](size_t at) { return reinterpret_cast<float*>(base + at); };
  q = base + at_q;
  k = base + at_k;
  v = base + at_v;
  o = floats(at_o);
  s = floats(at_s);
  row_max = floats(at_max);
  row_sum = floats(at_sum);
  angles = floats(at_angles);
  value = floats(at_value);
  visible = reinterpret_cast<uint32_t*>(base + at_visible);
  odd_columns = reinterpret_cast<int32_t*>(base + at_odd);
  segments = reinterpret_cast<KeySegment*>(base + at_segments);
  return reserve_scratchpad(scratchpad_bytes);
}

Status Scratch::reserve_scratchpad(size_t bytes) {
  if (bytes <= scratchpad_bytes_) return {};
  TANDEM_TRY(allocate_aligned(bytes, &scratchpad_data_));
  scratchpad = scratchpad_data_.get();
  scratchpad_bytes_ = bytes;
  return {};
}

namespace {

class Block {
 public:
  explicit Block(const BlockJob& block)
      : block_(block),
        span_(block.span),
        job_(*block.span.job),
        layer_(*block.span.job->layer),
        scratch_(block.scratch),
        kernels_(block.tile_kernels),
        k_source_(key_source(layer_)),
        v_source_(value_source(layer_)),
        n_rows_(block.span.row_end - block.span.row_begin) {
    const bool bf16 = job_.q_is_bf16 && block.geometry.bf16 != nullptr;
    k_bf16_ = bf16 && layer_.k_type == TANDEM_BF16 && layer_.rope == nullptr;
    v_bf16_ = bf16 && layer_.v_type == TANDEM_BF16;
    n_tiles_ = (n_rows_ + kTileQ - 1) / kTileQ;
  }

  // All of the block's sums begin at 0, and what it writes outside its scratch comes last or is written again: a block can
  // be done anew. plainly: without oneDNN. Whether every sum is right.
  [[nodiscard]] bool run(bool plainly) {
    plainly_ = plainly;
    start();
    KeyWalker walker(span_, tokens(0, n_rows_));
    tile_.segments = scratch_.segments;
    while (walker.next(&tile_, kTileKv)) {
      if (span_.ends_early()) return true;
      bool partly_hidden = false;
      for (int32_t i = 0; i < n_tiles_; ++i) {
        views_[i] = view_of(job_.visibility, tile_, tokens(i * kTileQ, std::min((i + 1) * kTileQ, n_rows_)));
        partly_hidden = partly_hidden || !views_[i].all;
      }
      k_ = load(k_source_, k_bf16_, scratch_.k);
      if (layer_.rope != nullptr)
        rotate_tile(kernels_, layer_, tile_, reinterpret_cast<float*>(scratch_.k), scratch_.angles);
      v_ = values_in_keys(layer_) ? k_ : load(v_source_, v_bf16_, scratch_.v);
      n_odd_ = 0;
      if (partly_hidden) take_out_nonfinite_values();
      const SignalsHeld held(!k_bf16_ || !v_bf16_);
      for (int32_t i = 0; i < n_tiles_; ++i)
        if (views_[i].begin < views_[i].end && !step(i, held)) return false;
    }
    finish();
    return true;
  }

 private:
  TokenRange tokens(int32_t row_begin, int32_t row_end) const {
    const int64_t group = layer_.group_size, first = span_.row_begin;
    return {(first + row_begin) / group, (first + row_end - 1) / group};
  }

  int32_t padded_keys() const { return (tile_.n_keys + kStep - 1) / kStep * kStep; }

  void start();
  const std::byte* load(const TileSource& source, bool bf16, std::byte* to);
  void copy_rows(const TileSource& source, std::byte* to);
  void take_out_nonfinite_values();
  bool step(int32_t tile_idx, const SignalsHeld& held);  // false: memory was missing, and the sums are undefined
  bool multiply(const Matmul& matmul, const std::byte* a, const std::byte* b, float* c, const SignalsHeld& held);
  void softmax(int32_t row, int32_t n_rows, int32_t begin, int32_t end);
  void put_logits(int32_t row, int32_t n_rows, int32_t begin, int32_t end, const uint32_t* visible);
  void add_nonfinite_values(int32_t row, int32_t n_rows, int32_t begin, int32_t end);
  void finish();

  const BlockJob& block_;
  const Span& span_;
  const AttendJob& job_;
  const Layer& layer_;
  Scratch& scratch_;
  const SoftmaxTileKernels& kernels_;
  const TileSource k_source_, v_source_;
  bool k_bf16_ = false, v_bf16_ = false;  // multiplied as bf16
  int32_t n_rows_;
  int32_t n_tiles_ = 0;
  KeyTile tile_;
  TileView views_[kMaxTiles];
  const std::byte* k_ = nullptr;  // [padded_keys, k_head_dim]
  const std::byte* v_ = nullptr;  // [padded_keys, v_head_dim], rows v_tile_stride() apart
  bool plainly_ = false;
  int32_t n_odd_ = 0;  // columns whose values are not finite and were taken out of v
};

// q in the products' type, padded with zeros to whole tiles; the empty state in every row.
void Block::start() {
  const int64_t padded = int64_t{n_tiles_} * kTileQ, dims = layer_.k_head_dim, n = n_rows_ * dims;
  const float* q = job_.q + span_.row_begin * dims;
  const size_t bytes = element_bytes(k_bf16_);
  if (k_bf16_) {
    auto* to = reinterpret_cast<uint16_t*>(scratch_.q);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(q[i]) >> 16);
  } else {
    std::memcpy(scratch_.q, q, static_cast<size_t>(n) * bytes);
  }
  std::memset(scratch_.q + static_cast<size_t>(n) * bytes, 0, static_cast<size_t>(padded * dims - n) * bytes);
  std::fill_n(scratch_.o, padded * layer_.v_head_dim, 0.0f);
  std::fill_n(scratch_.row_max, padded, kNegativeInf);
  std::fill_n(scratch_.row_sum, padded, 0.0f);
  for (int64_t row = span_.row_begin; job_.logits != nullptr && row < span_.row_end; ++row)
    std::fill_n(job_.logits + row * job_.n_keys + span_.key_begin, span_.key_end - span_.key_begin, kNegativeInf);
}

// The tile's rows, converted and followed by zeros up to a whole step; where a whole tile already lies so in the cache,
// there. (Steps of a tile could be taken from where they lie, too, but multiplying them one by one costs more than copying
// them.)
const std::byte* Block::load(const TileSource& source, bool bf16, std::byte* to) {
  const int64_t tile_row_bytes = source.head_dim * static_cast<int64_t>(element_bytes(bf16));
  const bool in_place = source.dtype == (bf16 ? TANDEM_BF16 : TANDEM_F32) && source.row_bytes == tile_row_bytes &&
                        (source.is_value || layer_.rope == nullptr);
  if (in_place && tile_.n_segments == 1 && tile_.n_keys == padded_keys()) return stored_row(source, tile_.segments[0], 0);
  if (bf16)
    copy_rows(source, to);
  else
    widen_tile(block_.kernels, source, tile_, reinterpret_cast<float*>(to));
  std::memset(to + tile_.n_keys * tile_row_bytes, 0, static_cast<size_t>((padded_keys() - tile_.n_keys) * tile_row_bytes));
  return to;
}

// Rows of bf16, side by side.
void Block::copy_rows(const TileSource& source, std::byte* to) {
  const auto row_size = 2 * static_cast<size_t>(source.head_dim);
  for (int32_t i = 0; i < tile_.n_segments; ++i) {
    const KeySegment& segment = tile_.segments[i];
    for (int32_t column = segment.column; column < segment.column + segment.n_keys; ++column, to += row_size)
      std::memcpy(to, stored_row(source, segment, column), row_size);
  }
}

// Zeroes the values that are not finite, keeping their columns.
void Block::take_out_nonfinite_values() {
  const bool bf16 = v_bf16_;
  const int64_t row_words = layer_.v_head_dim / (bf16 ? 2 : 1), stride_words = v_tile_stride(layer_) / (bf16 ? 2 : 1);
  if (!kernels_.has_nonfinite(v_, tile_.n_keys * stride_words, bf16)) return;
  if (v_ != scratch_.v) {
    std::memcpy(scratch_.v, v_, static_cast<size_t>(4 * (padded_keys() * stride_words)));
    v_ = scratch_.v;
  }
  for (int32_t column = 0; column < tile_.n_keys; ++column) {
    std::byte* row = scratch_.v + 4 * (column * stride_words);
    if (!kernels_.has_nonfinite(row, row_words, bf16)) continue;
    std::memset(row, 0, static_cast<size_t>(4 * row_words));
    scratch_.odd_columns[n_odd_++] = column;
  }
}

bool Block::multiply(const Matmul& matmul, const std::byte* a, const std::byte* b, float* c, const SignalsHeld& held) {
  if (!plainly_) return matmul.run(block_.worker_idx, a, b, c, scratch_.scratchpad, held);
  matmul.run_plainly(a, b, c);
  return true;
}

// One tile of rows against the tile of keys.
bool Block::step(int32_t tile_idx, const SignalsHeld& held) {
  const int32_t row = tile_idx * kTileQ, n_rows = std::min(kTileQ, n_rows_ - row);
  const int32_t size_m = n_rows <= kTileRows[0] ? 0 : n_rows <= kTileRows[1] ? 1 : 2;
  const int32_t begin = views_[tile_idx].begin / kStep * kStep, end = (views_[tile_idx].end + kStep - 1) / kStep * kStep;
  const auto products = [&](bool bf16) -> const TileProducts& {
    return bf16 ? *block_.geometry.bf16 : *block_.geometry.f32;
  };
  const size_t k_bytes = element_bytes(k_bf16_), v_bytes = element_bytes(v_bf16_);
  const auto dk = static_cast<size_t>(layer_.k_head_dim), dv = static_cast<size_t>(layer_.v_head_dim);
  const auto v_stride = static_cast<size_t>(v_tile_stride(layer_));
  const int32_t size_n = end - begin == kTileKv ? 1 : 0, width = kTileColumns[size_n];

  const Matmul& qk = products(k_bf16_).qk[size_m][size_n];
  const std::byte* q = scratch_.q + static_cast<size_t>(row) * dk * k_bytes;
  for (int32_t c = begin; c < end; c += width)
    if (!multiply(qk, q, k_ + static_cast<size_t>(c) * dk * k_bytes, scratch_.s + c, held)) return false;

  softmax(row, n_rows, begin, end);

  const Matmul& pv = products(v_bf16_).pv[size_m][size_n];
  const auto* p = reinterpret_cast<const std::byte*>(scratch_.s + begin);
  float* o = scratch_.o + static_cast<size_t>(row) * dv;
  for (int32_t c = begin; c < end; c += width) {
    const std::byte* v = v_ + static_cast<size_t>(c) * v_stride * v_bytes;
    if (!multiply(pv, p + static_cast<size_t>(c - begin) * v_bytes, v, o, held)) return false;
  }
  if (n_odd_ > 0) add_nonfinite_values(row, n_rows, begin, end);
  return true;
}

// Rows of one query token see the same columns and go together; without a mask all rows do.
void Block::softmax(int32_t row, int32_t n_rows, int32_t begin, int32_t end) {
  SoftmaxTile tile;
  tile.stride_s = kStrideS;
  tile.n_columns = end - begin;
  tile.scale = layer_.sm_scale;
  tile.p_is_bf16 = v_bf16_;
  tile.o_dim = layer_.v_head_dim;
  if (layer_.soft_cap > 0.0f || job_.logits != nullptr) {
    for (int32_t r = 0; r < n_rows; ++r)
      kernels_.cap_logits(scratch_.s + r * kStrideS + begin, end - begin, layer_.sm_scale, layer_.soft_cap);
    tile.scale = 1.0f;
  }
  const bool masked = !views_[row / kTileQ].all || end > tile_.n_keys;
  for (int32_t r = 0; r < n_rows; r += tile.n_rows) {
    const int64_t job_row = span_.row_begin + row + r, group = layer_.group_size;
    tile.n_rows = n_rows;
    if (masked) {
      tile.n_rows = static_cast<int32_t>(std::min<int64_t>(n_rows - r, group - job_row % group));
      visible_columns(job_.visibility, tile_, job_row / group, begin, end, scratch_.visible);
      tile.visible = scratch_.visible + begin;
    }
    tile.s = scratch_.s + r * kStrideS + begin;
    tile.row_max = scratch_.row_max + row + r;
    tile.row_sum = scratch_.row_sum + row + r;
    tile.o = scratch_.o + (row + r) * tile.o_dim;
    if (job_.logits != nullptr) put_logits(row + r, tile.n_rows, begin, end, masked ? scratch_.visible : nullptr);
    kernels_.softmax(tile);
  }
}

void Block::put_logits(int32_t row, int32_t n_rows, int32_t begin, int32_t end, const uint32_t* visible) {
  for (int32_t r = row; r < row + n_rows; ++r) {
    const float* s = scratch_.s + r % kTileQ * kStrideS;
    for (int32_t i = 0; i < tile_.n_segments; ++i) {
      const KeySegment& segment = tile_.segments[i];
      float* out = job_.logits + (span_.row_begin + r) * job_.n_keys + segment.key_idx - segment.column;
      const int32_t last = std::min(end, segment.column + segment.n_keys);
      for (int32_t c = std::max(begin, segment.column); c < last; ++c)
        if (visible == nullptr || visible[c] != 0) out[c] = s[c];
    }
  }
}

// The part of o += p v that was taken out of the matmul, in the rows that see it.
void Block::add_nonfinite_values(int32_t row, int32_t n_rows, int32_t begin, int32_t end) {
  const int64_t dims = layer_.v_head_dim;
  int32_t segment_idx = 0;
  for (int32_t i = 0; i < n_odd_; ++i) {
    const int32_t column = scratch_.odd_columns[i];
    if (column < begin || column >= end) continue;
    while (column >= tile_.segments[segment_idx].column + tile_.segments[segment_idx].n_keys) ++segment_idx;
    const KeySegment& segment = tile_.segments[segment_idx];
    const int64_t token_idx = segment.token_idx < 0 ? -1 : segment.token_idx + column - segment.column;
    widen_row(block_.kernels, v_source_, segment, column, dims, scratch_.value);
    for (int32_t r = 0; r < n_rows; ++r) {
      const int64_t token = (span_.row_begin + row + r) / layer_.group_size;
      if (!sees(job_.visibility, token, token_idx)) continue;
      const float* s = scratch_.s + r * kStrideS + begin;
      const int32_t at = column - begin;
      const float p = v_bf16_ ? std::bit_cast<float>(uint32_t{reinterpret_cast<const uint16_t*>(s)[at]} << 16) : s[at];
      float* o = scratch_.o + (row + r) * dims;
      for (int64_t d = 0; d < dims; ++d) o[d] += p * scratch_.value[d];
    }
  }
}

// o - o is 0, or NaN where o is not finite: Inf in a value comes out as NaN.
void Block::finish() {
  const int64_t dims = layer_.v_head_dim;
  const bool is_part = span_.m != nullptr;
  for (int32_t r = 0; r < n_rows_; ++r) {
    const float sum = scratch_.row_sum[r], max = scratch_.row_max[r];
    const bool empty = max == kNegativeInf;
    const float factor = is_part ? 1.0f : empty ? 0.0f : 1.0f / sum;
    const float* from = scratch_.o + r * dims;
    float* o = span_.o + r * dims;
    for (int64_t d = 0; d < dims; ++d) o[d] = from[d] * factor + (from[d] - from[d]);
    if (is_part) {
      span_.m[r] = max;
      span_.sum[r] = sum;
    } else {
      span_.lse[r] = empty ? kNegativeInf : max + std::log(sum);
    }
  }
}

}  // namespace

void attend_block(const BlockJob& block) {
  // Memory may have been missing for a moment. Without oneDNN it takes a hundred times as long, and needs none.
  for (const bool plainly : {false, false, true})
    if (Block(block).run(plainly)) return;
}

}  // namespace tandem::cpu
