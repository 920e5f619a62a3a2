// SPDX-License-Identifier: MIT
// The largest logit of each chunk of keys, over some query rows (ChunkJob in lib/tables/backend.h).
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

// NaN where either is.
HWY_INLINE float larger(float a, float b) { return a != a || a > b ? a : b; }

// to[i] = the larger of to[i] and the largest logit of its chunk, for the chunks of a block.
inline void raise_chunks(const float* logits, int64_t chunk_keys, int64_t n_chunks, float* to) {
  if (chunk_keys == 1) {
    for (int64_t c = 0; c < n_chunks; ++c) to[c] = larger(to[c], logits[c]);
    return;
  }
  for (int64_t c = 0; c < n_chunks; ++c) {
    float most = to[c];
    for (int64_t j = 0; j < chunk_keys; ++j) most = larger(most, logits[c * chunk_keys + j]);
    to[c] = most;
  }
}

// A row's log of the sum of exponentials, block by block.
struct RunningSum {
  float largest[kSpanRows];
  float sum[kSpanRows];
};

inline void count_logits(RunningSum& of, int64_t row, float* logits, int64_t n) {
  Layer plain;
  plain.soft_cap = 0.0f;
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
    const float shift = sums.largest[r] + logf(sums.sum[r]);
    const float* const from = job.row_largest + r * job.n_chunks;
    for (int64_t c = 0; c < job.n_chunks; ++c) job.largest[c] = larger(job.largest[c], from[c] - shift);
  }
}

void judge_chunks(const ChunkJob& job, SpanScratch& s) {
  const bool by_tiles = takes_tiles(*job.layer);
  s.target = kTarget;
  fill_lowest(job.largest, job.n_chunks);
  if (by_tiles) open_tiles();
  for (int32_t r = 0; r < job.n_rows; r += kSpanRows)
    judge_rows(job, r, r + kSpanRows < job.n_rows ? r + kSpanRows : job.n_rows, by_tiles, s);
  if (by_tiles) close_tiles();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
