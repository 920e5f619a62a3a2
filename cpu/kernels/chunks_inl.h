// SPDX-License-Identifier: MIT
// The largest logit of each chunk of keys over some query rows, and descents to a representative of each chunk (ChunkJob and
// DescentJob in lib/tables/backend.h).
//
// Rows are taken kSpanRows at a time, and K is read once for each such span. Without `normalises` the maximum over the rows
// of a span is taken block by block. With it a row's shift is known when all of its keys have been seen: until then the row
// keeps its chunks' largest logits apart.
#pragma once

#include "cpu/kernels/weights_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

static_assert(kSpanRows == kJudgedRows);

// to[i] = the largest of to[i] and from[i] - shift.
inline void raise(const float* from, float shift, int64_t n, float* to) {
  const F32 d;
  const Vec less = hn::Set(d, shift);
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes)
    hn::StoreU(hn::Max(hn::LoadU(d, to + i), hn::Sub(hn::LoadU(d, from + i), less)), d, to + i);
  for (; i < n; ++i) to[i] = from[i] - shift > to[i] ? from[i] - shift : to[i];
}

// x[i] = the larger of x[2 i] and x[2 i + 1], for n results, up to a whole vector.
inline void halve(float* x, int64_t n) {
  const F32 d;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec a = hn::LoadU(d, x + 2 * i), b = hn::LoadU(d, x + 2 * i + kLanes);
    hn::StoreU(hn::Max(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a)), d, x + i);
  }
}

// to[c] = the larger of to[c] and the largest logit of the c-th chunk of a block.
inline void raise_chunks(const float* logits, int64_t chunk_keys, int64_t n_chunks, float* to) {
  HWY_ALIGN float largest[kBlockKeys + 2 * kLanes];
  if (n_chunks == 0) return;
  if (chunk_keys == 1) return raise(logits, 0.0f, n_chunks, to);
  memcpy(largest, logits, static_cast<size_t>(n_chunks * chunk_keys) * sizeof(float));
  for (int64_t len = chunk_keys / 2; len > 0; len /= 2) halve(largest, n_chunks * len);
  raise(largest, 0.0f, n_chunks, to);
}

// A row's log of the sum of exponentials, block by block.
struct RunningSum {
  float largest[kSpanRows];
  float sum[kSpanRows];
};

inline void count_logits(RunningSum& of, int64_t row, float* logits, int64_t n) {
  const Layer plain;  // logits are judged before the soft cap
  const float most = finish_logits(plain, {nullptr, 1.0f}, logits, n);
  if (!(most > -HUGE_VALF)) return;
  if (most > of.largest[row]) {
    of.sum[row] *= of.largest[row] == -HUGE_VALF ? 0.0f : exp_of(of.largest[row] - most);
    of.largest[row] = most;
  }
  Prefetcher nothing{};
  of.sum[row] += exp_and_sum(logits, n, of.largest[row], nothing, 0);
}

// Rows [row_begin, row_end), at most kSpanRows, over all keys.
inline void judge_rows(const ChunkJob& job, int32_t row_begin, int32_t row_end, bool by_tiles, SpanScratch& s) {
  const Layer& layer = *job.layer;
  s.packed_begin = s.packed_end = -1;
  BlockLoop loop;
  open_block_loop(loop, layer);
  KeyStream& stream = loop.stream;
  start(stream, job.runs, {}, job.n_keys, layer, false);
  RunningSum sums;
  for (int64_t r = 0; job.normalises && r < row_end - row_begin; ++r) {
    sums.largest[r] = -HUGE_VALF;
    sums.sum[r] = 0.0f;
    fill_lowest(job.row_largest + r * job.n_chunks, job.n_chunks);
  }
  const int64_t n_judged = job.n_chunks * job.chunk_keys;
  for (int64_t at = 0; next_block(stream); at += stream.n) {
    open_views(loop.views, stream, nullptr, row_begin, row_end);
    load_block(loop, layer, s.scales);
    View view;
    next_view(loop.views, stream, &view);
    attach_scales(s.scales, layer, view, s.seen_scales);
    attach_positions(view, loop.rotator);
    view.keys.k_ahead = start_prefetch(stream.k, stream.k_lead, stream.k_bytes);
    dot_view(layer, job.q, view, by_tiles, loop.rotator, s);
    const int64_t n_left = n_judged - at < stream.n ? n_judged - at : stream.n;
    const int64_t first = at / job.chunk_keys, n_chunks = n_left > 0 ? n_left / job.chunk_keys : 0;
    for (int64_t r = 0; r < row_end - row_begin; ++r) {
      float* const logits = s.logits + r * kBlockKeys;
      float* const to = job.normalises ? job.row_largest + r * job.n_chunks : job.largest;
      raise_chunks(logits, job.chunk_keys, n_chunks, to + first);
      if (job.normalises) count_logits(sums, r, logits, stream.n);
    }
  }
  for (int64_t r = 0; job.normalises && r < row_end - row_begin; ++r) {
    if (job.row_sums != nullptr) {
      job.row_sums[2 * r] = sums.largest[r];
      job.row_sums[2 * r + 1] = sums.sum[r];
      continue;
    }
    const float shift = sums.largest[r] + logf(sums.sum[r]);
    const float* const from = job.row_largest + r * job.n_chunks;
    raise(from, shift, job.n_chunks, job.largest);
  }
}

void judge_chunks(const ChunkJob& job, SpanScratch& s) {
  const bool by_tiles = takes_tiles(*job.layer);
  s.target = kTarget;
  if (job.row_sums == nullptr) fill_lowest(job.largest, job.n_chunks);
  if (by_tiles) open_tiles();
  for (int32_t r = 0; r < job.n_rows; r += kSpanRows)
    judge_rows(job, r, r + kSpanRows < job.n_rows ? r + kSpanRows : job.n_rows, by_tiles, s);
  if (by_tiles) close_tiles();
}

// Chunks of a block, and where a head is in each.
struct Descent {
  Row first[kBlockKeys], at[kBlockKeys];
  int32_t low[kBlockKeys];
  HWY_ALIGN float of_low[kBlockKeys];
  HWY_ALIGN float of_high[kBlockKeys];
};

// The keys that lie `half` keys behind where the head is, to of: the largest logit over the packed rows.
inline void largest_at(const DescentJob& job, Descent& d, int64_t n, int32_t half, float* of, SpanScratch& s) {
  const Layer& layer = *job.layer;
  const int64_t stride = k_stride_of(layer), bytes = row_bytes(layer.k_type, layer.k_head_dim);
  for (int64_t i = 0; i < n; ++i) {
    d.at[i] = d.first[i] + (d.low[i] + half) * stride;
    for (int64_t line = 0; line < bytes; line += kLine) prefetch_line(d.at[i] + line);
  }
  const KeyList keys{d.at, d.at, {}, n, nullptr, 0, nullptr};
  dots_of(layer.k_type, s.q, job.n_rows, static_cast<size_t>(layer.k_head_dim), keys, s.logits);
  memcpy(of, s.logits, static_cast<size_t>(n) * sizeof(float));
  for (int32_t r = 1; r < job.n_rows; ++r) raise(s.logits + r * kBlockKeys, 0.0f, n, of);
}

// Chunks [block, block + n), for the head whose rows are packed.
inline void descend_block(const DescentJob& job, int64_t block, int64_t n, Descent& d, SpanScratch& s) {
  for (int64_t i = 0; i < n; ++i) {
    d.first[i] = static_cast<Row>(job.first_keys[block + i]);
    d.low[i] = 0;
  }
  largest_at(job, d, n, 0, d.of_low, s);
  for (auto half = static_cast<int32_t>(job.chunk_keys / 2); half > 0; half /= 2) {
    largest_at(job, d, n, half, d.of_high, s);
    for (int64_t i = 0; i < n; ++i) {
      const bool goes_on = d.of_high[i] > d.of_low[i];
      d.low[i] += goes_on ? half : 0;
      d.of_low[i] = goes_on ? d.of_high[i] : d.of_low[i];
    }
  }
  raise(d.of_low, 0.0f, n, job.largest + block);
}

void descend_chunks(const DescentJob& job, SpanScratch& s) {
  const Layer& layer = *job.layer;
  const auto dim = static_cast<size_t>(layer.k_head_dim);
  Descent d;
  s.target = kTarget;
  s.packed_begin = s.packed_end = -1;
  fill_lowest(job.largest, job.n_chunks);
  for (int64_t head = 0; head < job.n_heads; ++head) {
    const float* const q = job.q + head * job.n_rows * layer.k_head_dim;
    pack_rows_of(layer.k_type, q, job.n_rows, dim, layer.sm_scale, s.q);
    for (int64_t block = 0; block < job.n_chunks; block += kBlockKeys)
      descend_block(job, block, job.n_chunks - block < kBlockKeys ? job.n_chunks - block : kBlockKeys, d, s);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
