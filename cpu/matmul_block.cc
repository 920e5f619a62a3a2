// SPDX-License-Identifier: MIT
// matmul_attend.h explains the method.
#include "cpu/matmul_block.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/onednn.h"
#include "cpu/tile_rows.h"

namespace tandem::cpu {

namespace {
constexpr float kNegativeInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kTileQ = MatmulAttend::kTileQ, kTileKv = MatmulAttend::kTileKv;
constexpr int32_t kStep = kKeyStep;
constexpr int32_t kMaxTiles = MatmulAttend::kTaskRows / kTileQ;

size_t element_bytes(bool bf16) { return bf16 ? sizeof(uint16_t) : sizeof(float); }
}  // namespace

Status Scratch::allocate(int32_t k_head_dim, int32_t v_head_dim) {
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
  const size_t at_panels = place(kKeys * dk * 4), at_pairs = place(kKeys / 2 * dv * 4);
  const size_t at_odd = place(size_t{kKeys} * 4), at_segments = place(kKeys * sizeof(KeySegment));
  TANDEM_TRY(allocate_aligned(total, &data_));
  std::byte* base = data_.get();
  const auto floats = [&](size_t at) { return reinterpret_cast<float*>(base + at); };
  q = base + at_q;
  k = base + at_k;
  v = base + at_v;
  k_panels = floats(at_panels);
  v_pairs = reinterpret_cast<uint32_t*>(base + at_pairs);
  o = floats(at_o);
  s = floats(at_s);
  row_max = floats(at_max);
  row_sum = floats(at_sum);
  angles = floats(at_angles);
  value = floats(at_value);
  visible = reinterpret_cast<uint32_t*>(base + at_visible);
  odd_columns = reinterpret_cast<int32_t*>(base + at_odd);
  segments = reinterpret_cast<KeySegment*>(base + at_segments);
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
    const bool bf16 = job_.q_is_bf16 && block.bf16;
    k_bf16_ = bf16 && layer_.k_type == TANDEM_BF16 && layer_.rope == nullptr;
    v_bf16_ = bf16 && layer_.v_type == TANDEM_BF16;
    n_tiles_ = (n_rows_ + kTileQ - 1) / kTileQ;
  }

  // All sums of the block start at 0, and only the end of the run writes outside the scratch, overwriting earlier results.
  // So a block can be run again. Returns false if oneDNN had no memory; the sums are then undefined.
  [[nodiscard]] bool run(bool has_onednn) {
    has_onednn_ = has_onednn;
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
      pack();
      const SignalsHeld held(by_onednn(k_bf16_) || by_onednn(v_bf16_));
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
  bool by_onednn(bool bf16) const { return !bf16 && has_onednn_; }
  void pack();
  [[nodiscard]] bool step(int32_t tile_idx, const SignalsHeld& held);
  [[nodiscard]] bool multiply_keys(int32_t row, int32_t n_rows, int32_t begin, int32_t end, const SignalsHeld& held);
  [[nodiscard]] bool multiply_values(int32_t row, int32_t n_rows, int32_t begin, int32_t end, const SignalsHeld& held);
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
  bool has_onednn_ = true;        // for f32 products
  int32_t n_odd_ = 0;             // columns whose values are not finite and were taken out of v
};

// Converts q to the products' type and sets every row to the empty state.
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

// Returns the tile's rows, converted and followed by zeros up to a whole step. If a whole tile already has this form in the
// cache, returns its place there. (Single steps of a tile could also be used in place, but multiplying them one by one costs
// more than copying them.)
const std::byte* Block::load(const TileSource& source, bool bf16, std::byte* to) {
  const int64_t tile_row_bytes = source.head_dim * static_cast<int64_t>(element_bytes(bf16));
  const bool in_place = source.dtype == (bf16 ? TANDEM_BF16 : TANDEM_F32) && source.stride == tile_row_bytes &&
                        (source.is_value || layer_.rope == nullptr);
  if (in_place && tile_.n_segments == 1 && tile_.n_keys == padded_keys()) return stored_row(source, tile_.segments[0], 0);
  if (bf16)
    copy_rows(source, to);
  else
    widen_tile(block_.kernels, source, tile_, reinterpret_cast<float*>(to));
  std::memset(to + tile_.n_keys * tile_row_bytes, 0, static_cast<size_t>((padded_keys() - tile_.n_keys) * tile_row_bytes));
  return to;
}

// Copies bf16 rows to lie side by side.
void Block::copy_rows(const TileSource& source, std::byte* to) {
  const auto row_size = 2 * static_cast<size_t>(source.head_dim);
  for (int32_t i = 0; i < tile_.n_segments; ++i) {
    const KeySegment& segment = tile_.segments[i];
    for (int32_t column = segment.column; column < segment.column + segment.n_keys; ++column, to += row_size)
      std::memcpy(to, stored_row(source, segment, column), row_size);
  }
}

// Zeroes the values that are not finite and records their columns.
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

// Packs the tile of keys for this library's own products.
void Block::pack() {
  const int64_t dk_words = layer_.k_head_dim / (k_bf16_ ? 2 : 1);
  if (!by_onednn(k_bf16_)) kernels_.pack_columns({k_, padded_keys(), dk_words, scratch_.k_panels});
  if (v_bf16_)
    kernels_.pack_pairs(
        {reinterpret_cast<const uint16_t*>(v_), v_tile_stride(layer_), padded_keys(), layer_.v_head_dim, scratch_.v_pairs});
}

// oneDNN is fastest with few different numbers of rows. The padding rows are zeros.
int32_t padded_rows(int32_t n_rows) { return n_rows <= 32 ? 32 : n_rows <= 64 ? 64 : kTileQ; }

// s = q k^T
bool Block::multiply_keys(int32_t row, int32_t n_rows, int32_t begin, int32_t end, const SignalsHeld& held) {
  const int64_t k_words = layer_.k_head_dim / (k_bf16_ ? 2 : 1);
  const float* q = reinterpret_cast<const float*>(scratch_.q) + row * k_words;
  float* s = scratch_.s + begin;
  if (by_onednn(k_bf16_)) {
    const float* keys = reinterpret_cast<const float*>(k_) + begin * k_words;
    return sgemm({padded_rows(n_rows), end - begin, k_words, q, k_words, keys, k_words, true, s, kStrideS, false}, held);
  }
  Product product;
  product.k = product.stride_a = k_words;
  product.a = q;
  product.b = scratch_.k_panels + begin * k_words;
  product.stride_b = kPanelColumns;
  product.panel_stride = k_words * kPanelColumns;
  product.c = s;
  product.stride_c = kStrideS;
  product.m = n_rows;
  product.n = end - begin;
  (k_bf16_ ? kernels_.multiply_bf16 : kernels_.multiply)(product);
  return true;
}

// o += p v
bool Block::multiply_values(int32_t row, int32_t n_rows, int32_t begin, int32_t end, const SignalsHeld& held) {
  const int64_t dim = layer_.v_head_dim, keys_in_word = v_bf16_ ? 2 : 1;
  const float* p = scratch_.s + begin;
  float* o = scratch_.o + row * dim;
  Product product;
  product.stride_b = v_bf16_ ? dim : v_tile_stride(layer_);
  const float* values = (v_bf16_ ? reinterpret_cast<const float*>(scratch_.v_pairs) : reinterpret_cast<const float*>(v_)) +
                        begin / keys_in_word * product.stride_b;
  if (by_onednn(v_bf16_))
    return sgemm({padded_rows(n_rows), dim, end - begin, p, kStrideS, values, product.stride_b, false, o, dim, true}, held);
  product.k = (end - begin) / keys_in_word;
  product.b = values;
  product.panel_stride = kPanelColumns;
  product.a = p;
  product.stride_a = kStrideS;
  product.c = o;
  product.stride_c = product.n = dim;
  product.m = n_rows;
  product.accumulate = true;
  (v_bf16_ ? kernels_.multiply_bf16 : kernels_.multiply)(product);
  return true;
}

// Attends the tile of keys with one tile of rows.
bool Block::step(int32_t tile_idx, const SignalsHeld& held) {
  const int32_t row = tile_idx * kTileQ, n_rows = std::min(kTileQ, n_rows_ - row);
  const int32_t begin = views_[tile_idx].begin / kStep * kStep, end = (views_[tile_idx].end + kStep - 1) / kStep * kStep;
  if (!multiply_keys(row, n_rows, begin, end, held)) return false;
  softmax(row, n_rows, begin, end);
  if (!multiply_values(row, n_rows, begin, end, held)) return false;
  if (n_odd_ > 0) add_nonfinite_values(row, n_rows, begin, end);
  return true;
}

// Rows of one query token see the same columns and are done together. Without a mask all rows are.
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

// Adds the part of o += p v that was left out of the product, to the rows that see it.
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

// o - o is 0, or NaN if o is not finite. So an Inf in a value gives NaN.
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
  for (const bool has_onednn : {true, false})
    if (Block(block).run(has_onednn)) return;
}

}  // namespace tandem::cpu
