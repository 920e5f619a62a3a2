// SPDX-License-Identifier: MIT
// Computes the largest logit of each chunk of keys over some query rows, and descents to a representative of each chunk
// (ChunkJob and DescentJob in lib/tables/backend.h).
//
// Rows are taken kSpanRows at a time, and K is read once for each such span. Without `normalises` the maximum over the rows
// of a span is taken block by block. With `normalises` a row's shift is known only after all of its keys. Until then the row
// keeps the largest logits of its chunks apart.
#pragma once

#include "cpu/kernels/weights_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

static_assert(kSpanRows == kJudgedRows);

// Returns the larger number of each lane, or NaN where one of the two is NaN.
inline Vec larger_or_nan(Vec a, Vec b) {
  return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, hn::Max(a, b)));
}

// Sets to[i] to the larger of to[i] and from[i] - shift, or to NaN where one of the two is NaN: a chunk with a NaN is kept.
inline void raise_or_nan(const float* from, float shift, int64_t n, float* to) {
  const F32 d;
  const Vec less = hn::Set(d, shift);
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes)
    hn::StoreU(larger_or_nan(hn::LoadU(d, to + i), hn::Sub(hn::LoadU(d, from + i), less)), d, to + i);
  for (; i < n; ++i) {
    const float x = from[i] - shift;
    if (x > to[i] || x != x) to[i] = x;
  }
}

// Sets to[i] to the larger of to[i] and from[i] - shift.
inline void raise(const float* from, float shift, int64_t n, float* to) {
  const F32 d;
  const Vec less = hn::Set(d, shift);
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes)
    hn::StoreU(hn::Max(hn::LoadU(d, to + i), hn::Sub(hn::LoadU(d, from + i), less)), d, to + i);
  for (; i < n; ++i) to[i] = from[i] - shift > to[i] ? from[i] - shift : to[i];
}

// Sets x[i] to the larger of x[2 i] and x[2 i + 1], or to NaN, for n results, up to a whole vector.
inline void halve(float* x, int64_t n) {
  const F32 d;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec a = hn::LoadU(d, x + 2 * i), b = hn::LoadU(d, x + 2 * i + kLanes);
    hn::StoreU(larger_or_nan(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a)), d, x + i);
  }
}

// Sets to[c] to the larger of to[c] and the largest logit of the c-th chunk of a block.
inline void raise_chunks(const float* logits, int64_t chunk_keys, int64_t n_chunks, float* to) {
  HWY_ALIGN float largest[kBlockKeys + 2 * kLanes];
  if (n_chunks == 0) return;
  if (chunk_keys == 1) return raise_or_nan(logits, 0.0f, n_chunks, to);
  memcpy(largest, logits, static_cast<size_t>(n_chunks * chunk_keys) * sizeof(float));
  for (int64_t len = chunk_keys / 2; len > 0; len /= 2) halve(largest, n_chunks * len);
  raise_or_nan(largest, 0.0f, n_chunks, to);
}

// The log of the sum of exponentials of each row, computed block by block.
struct RunningSum {
  float largest[kSpanRows];
  float sum[kSpanRows];
};

// Returns whether one of n numbers is finite.
inline bool has_finite(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (x[i] - x[i] == 0.0f) return true;
  return false;
}

// Adds a block's logits to the sums of a row. Logits that are not finite are left out: one such key would make the row's sum
// NaN, and so the scores of all chunks.
inline void count_logits(RunningSum& of, int64_t row, float* logits, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!(logits[i] - logits[i] == 0.0f)) logits[i] = -HUGE_VALF;
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

// Judges rows [row_begin, row_end), at most kSpanRows, over all keys.
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
      if (!has_finite(logits, stream.n)) continue;  // a query with NaN chooses nothing
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
    if (!(sums.sum[r] > 0.0f)) continue;
    const float shift = sums.largest[r] + logf(sums.sum[r]);
    const float* const from = job.row_largest + r * job.n_chunks;
    raise_or_nan(from, shift, job.n_chunks, job.largest);
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

// A path is the descent of one head in one chunk. Each step of a path reads a key whose address the previous step has found.
// So one path alone would wait for memory all the time. Many paths take their steps in turn: each step prefetches the key of
// the path's next step, which arrives while the other paths take theirs. Heads of the same chunk step directly one after
// another. They begin with the same two keys, which then come from memory once.
//
// Keys of the first steps lie a power of two apart and share a few sets of the first-level cache, where they would evict
// each other. So they are prefetched to the second level.
inline constexpr int64_t kPaths = 128;         // paths that take turns
inline constexpr int64_t kPathsTogether = 32;  // paths of a head that take a step together
inline constexpr int64_t kHeadsTogether = kPaths / kPathsTogether;

struct Paths {      // [heads][chunks of the block]
  Row at[kPaths];   // the key that the next step judges
  Row low[kPaths];  // the best key so far
  float of_low[kPaths];
};

inline void prefetch_key(Row key, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += int64_t{kLine}) prefetch_line(key + line, true);
}

// Heads whose rows are packed, and the chunks of their paths.
struct DescentBlock {
  int64_t n_heads;
  int64_t first, n;  // chunks
};

struct Step {
  const DescentJob& job;
  int64_t len;  // keys that a path can still choose from
};

// Paths [i, i + n) of one head, whose packed rows are q, judge their current keys. In the first step, and where the current
// key's logit exceeds that of the path's best key, the current key becomes the best key. Then the path moves to the key
// step.len / 2 keys behind the best one.
inline void step_paths(const Step& step, const float* q, Paths& paths, int64_t i, int64_t n, SpanScratch& s) {
  const DescentJob& job = step.job;
  const Layer& layer = *job.layer;
  const bool is_first = step.len == job.chunk_keys;
  const int64_t half = step.len / 2;
  const int64_t stride = k_stride_of(layer), bytes = row_bytes(layer.k_type, layer.k_head_dim);
  const KeyList keys{paths.at + i, paths.at + i, {}, n, nullptr, 0, nullptr};
  dots_of(layer.k_type, q, job.n_rows, static_cast<size_t>(layer.k_head_dim), keys, s.logits);
  for (int32_t r = 1; r < job.n_rows; ++r) raise(s.logits + r * kBlockKeys, 0.0f, n, s.logits);
  for (int64_t j = 0; j < n; ++j) {
    const bool goes_on = is_first || s.logits[j] > paths.of_low[i + j];
    paths.low[i + j] = goes_on ? paths.at[i + j] : paths.low[i + j];
    paths.of_low[i + j] = goes_on ? s.logits[j] : paths.of_low[i + j];
    paths.at[i + j] = paths.low[i + j] + half * stride;
  }
  for (int64_t j = 0; j < n && half > 0; ++j) prefetch_key(paths.at[i + j], bytes);
}

// Prefetches the two keys that all heads begin with, in chunks [first, end).
inline void prefetch_starts(const DescentJob& job, int64_t first, int64_t end) {
  const Layer& layer = *job.layer;
  const int64_t bytes = row_bytes(layer.k_type, layer.k_head_dim), to_half = job.chunk_keys / 2 * k_stride_of(layer);
  for (int64_t c = first; c < end && c < job.n_chunks; ++c) {
    prefetch_key(static_cast<Row>(job.first_keys[c]), bytes);
    prefetch_key(static_cast<Row>(job.first_keys[c]) + to_half, bytes);
  }
}

inline void descend_block(const DescentJob& job, const DescentBlock& block, Paths& paths, SpanScratch& s) {
  for (int64_t h = 0; h < block.n_heads; ++h)
    for (int64_t c = 0; c < block.n; ++c) paths.at[h * block.n + c] = static_cast<Row>(job.first_keys[block.first + c]);
  for (int64_t len = job.chunk_keys; len > 0; len /= 2) {
    if (len == 1) prefetch_starts(job, block.first + block.n, block.first + 2 * block.n);
    for (int64_t h = 0; h < block.n_heads; ++h)
      for (int64_t c = 0; c < block.n; c += kPathsTogether) {
        const int64_t n = block.n - c < kPathsTogether ? block.n - c : kPathsTogether;
        step_paths({job, len}, s.q + h * job.n_rows * job.layer->k_head_dim, paths, h * block.n + c, n, s);
      }
  }
  for (int64_t h = 0; h < block.n_heads; ++h) raise(paths.of_low + h * block.n, 0.0f, block.n, job.largest + block.first);
}

void descend_chunks(const DescentJob& job, SpanScratch& s) {
  const Layer& layer = *job.layer;
  const int64_t rows_of_head = job.n_rows, dim = layer.k_head_dim;
  const int64_t most_heads = kSpanRows / rows_of_head < kHeadsTogether ? kSpanRows / rows_of_head : kHeadsTogether;
  Paths paths;
  s.target = kTarget;
  s.packed_begin = s.packed_end = -1;
  fill_lowest(job.largest, job.n_chunks);
  for (int64_t head = 0; head < job.n_heads; head += most_heads) {
    const int64_t n_heads = job.n_heads - head < most_heads ? job.n_heads - head : most_heads, n = kPaths / n_heads;
    for (int64_t h = 0; h < n_heads; ++h)  // the rows of each head are packed separately
      pack_rows_of(layer.k_type, job.q + (head + h) * rows_of_head * dim, rows_of_head, static_cast<size_t>(dim),
                   layer.sm_scale, s.q + h * rows_of_head * dim);
    prefetch_starts(job, 0, n);
    for (int64_t first = 0; first < job.n_chunks; first += n)
      descend_block(job, {n_heads, first, job.n_chunks - first < n ? job.n_chunks - first : n}, paths, s);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
