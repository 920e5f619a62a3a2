// SPDX-License-Identifier: MIT
// Attention of a few query rows over a span of keys, and the sums of attention weights.
//
// Two passes over each block of 256 keys: first the logits of the block for all rows, then their weights relative to the
// largest logit so far and o = o * rescale + weights * V. Rows that see no key keep m = -inf and sum = 0. All in f32.
//
// Extremes: a logit of -inf weighs exactly 0. A logit (or V) of NaN or +inf makes the rows that see the key NaN.
#pragma once

#include <math.h>

#include "cpu/kernels/rotate_inl.h"
#if defined(TANDEM_KERNELS_amx)
#include "cpu/kernels/amx_inl.h"
#else
#include "cpu/kernels/no_amx_inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// The bias added to a view's logits for one query token, before its factor, the slope of the query head.
struct BiasRow {
  const float* values;  // null: no bias
  float slope;
};

// Caps the logits, adds the bias, and puts -inf behind the last key up to a whole vector, in place. Returns the largest
// logit.
HWY_INLINE float finish_logits(const Layer& layer, const BiasRow& bias, float* x, int64_t n) {
  const F32 d;
  const Vec nothing = hn::Set(d, -HUGE_VALF);
  const int64_t n_whole = n - n % int64_t{kLanes};
  if (n_whole < n) {
    const auto inside = hn::FirstN(d, static_cast<size_t>(n - n_whole));
    hn::StoreU(hn::IfThenElse(inside, hn::LoadU(d, x + n_whole), nothing), d, x + n_whole);
  }
  if (layer.soft_cap > 0.0f) {
    const Vec cap = hn::Set(d, layer.soft_cap), inverse = hn::Set(d, 1.0f / layer.soft_cap);
    for (int64_t i = 0; i < n_whole; i += kLanes)
      hn::StoreU(hn::Mul(cap, tanh_of(d, hn::Mul(hn::LoadU(d, x + i), inverse))), d, x + i);
    for (int64_t i = n_whole; i < n; ++i) x[i] = layer.soft_cap * tanh_of(x[i] * (1.0f / layer.soft_cap));
  }
  if (bias.values != nullptr) {
    const Vec slope = hn::Set(d, bias.slope);
    for (int64_t i = 0; i < n; i += kLanes)
      hn::StoreU(hn::MulAdd(slope, hn::LoadU(d, bias.values + i), hn::LoadU(d, x + i)), d, x + i);
  }
  Vec largest = nothing;
  for (int64_t i = 0; i < n; i += kLanes) largest = hn::Max(largest, hn::LoadU(d, x + i));
  // The maximum over lanes in Highway's portable target never falls below the lowest finite number.
  if (hn::AllTrue(d, hn::Eq(largest, nothing))) return -HUGE_VALF;
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Sets x = exp(x - base), up to a whole vector, and returns the sum. ahead_bytes: bytes to prefetch for each vector.
HWY_INLINE float exp_and_sum(float* x, int64_t n, float base, Prefetcher& ahead, int64_t ahead_bytes) {
  const F32 d;
  const Vec shift = hn::Set(d, base);
  Vec sum = hn::Zero(d);
  int64_t due = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    if (ahead.group != nullptr) prefetch_due(ahead, due, ahead_bytes);
    const Vec p = exp_at_most_1(d, hn::Sub(hn::LoadU(d, x + i), shift));
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, x + i);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

inline void fill_lowest(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = -HUGE_VALF;
}

// Writes the logits of a view's row to the caller's row; `out` points to the block's first key in it.
inline void write_logits(const View& view, const float* logits, float* out) {
  if (view.picked == nullptr) {
    memcpy(out, logits, static_cast<size_t>(view.keys.n) * sizeof(float));
    return;
  }
  for (int64_t j = 0; j < view.keys.n; ++j) out[view.picked[j]] = logits[j];
}

// Converts the values of a mask's row at n columns to f32.
template <class Stored>
HWY_INLINE void gather_mask(const uint8_t* row, const int64_t* columns, int64_t n, float* to) {
  using Element = typename Stored::Element;
  if (columns[n - 1] - columns[0] == n - 1)
    return plain_to_f32<Stored>(row + static_cast<size_t>(columns[0]) * sizeof(Element), to, n);
  Element picked[kBlockKeys];
  for (int64_t j = 0; j < n; ++j)
    memcpy(picked + j, row + static_cast<size_t>(columns[j]) * sizeof(Element), sizeof(Element));
  plain_to_f32<Stored>(reinterpret_cast<const uint8_t*>(picked), to, n);
}

// Writes the bias of query token t for the keys of a view, and zeros behind them up to a whole vector. tokens: of the view's
// block.
inline void fill_bias(const LogitBias& bias, int64_t t, const View& view, const int64_t* tokens, float* to) {
  int64_t picked[kBlockKeys];
  const int64_t n = view.keys.n;
  if (view.picked != nullptr) {
    for (int64_t j = 0; j < n; ++j) picked[j] = tokens[view.picked[j]];
    tokens = picked;
  }
  if (bias.mask == nullptr) {
    const int64_t position = bias.first_position + t;
    for (int64_t j = 0; j < n; ++j)
      to[j] = -static_cast<float>(position < tokens[j] ? tokens[j] - position : position - tokens[j]);
  } else {
    const uint8_t* row = static_cast<const uint8_t*>(bias.mask) + t * bias.row_bytes;
    if (bias.mask_type == TANDEM_F32)
      gather_mask<StoredF32>(row, tokens, n, to);
    else
      gather_mask<StoredF16>(row, tokens, n, to);
  }
  for (int64_t j = n; j % int64_t{kLanes} != 0; ++j) to[j] = 0.0f;
}

inline constexpr int64_t kFollowing = 8;  // average keys of a run from which on they are read as one sequence

// The parts of an AttendJob or a WeightJob that the loop over blocks needs.
struct BlockLoop {
  KeyStream stream;
  Views views;
  Rotator rotator;
};

HWY_INLINE void open_block_loop(BlockLoop& loop, const Layer& layer) {
  loop.views.group_size = layer.group_size;
  open_rotator(loop.rotator, layer.rope);
}

// Loads the scales and positions of the keys of the stream's block, for its views.
HWY_INLINE void load_block(BlockLoop& loop, const Layer& layer, ScaleBlock& scales) {
  load_scales(loop.stream, layer, scales);
  if (layer.rope != nullptr) load_positions(loop.stream, loop.rotator);
}

// A span. by_tiles: the matrix unit multiplies its q and K.
struct SpanOf : Span {
  bool by_tiles;
};

// Writes the logits of a view, not yet capped, to s.logits. q: all rows of the job. Packs the rows of the view if other rows
// were packed.
inline void dot_view(const Layer& layer, const float* q, const View& view, bool by_tiles, Rotator& rotator, SpanScratch& s) {
  const int64_t n_rows = view.row_end - view.row_begin;
  const auto k_dim = static_cast<size_t>(layer.k_head_dim);
  const bool is_packed = s.packed_begin == view.row_begin && s.packed_end == view.row_end;
  q += static_cast<size_t>(view.row_begin) * k_dim;
  s.packed_begin = view.row_begin;
  s.packed_end = view.row_end;
  if (layer.rope != nullptr) {
    rotated_dots_of(layer.k_type, rotator, {q, n_rows, layer.k_head_dim, layer.sm_scale, s.q}, view.keys, s.logits);
  } else if (by_tiles) {
    if (!is_packed) pack_tiles(layer, q, n_rows, s);
    dots_by_tiles(layer, n_rows, view.keys, s);
  } else {
    if (!is_packed) pack_rows_of(layer.k_type, q, n_rows, k_dim, layer.sm_scale, s.q);
    dots_of(layer.k_type, s.q, n_rows, k_dim, view.keys, s.logits);
  }
}

// The place of a view: index in the job of its block's first key, and the token of each key of the block if the job has a
// bias.
struct ViewPlace {
  int64_t key_at;
  const int64_t* tokens;
};

// Attends one view of a block: updates m, sum and o of its rows. r counts rows of the span.
inline void attend_view(const SpanOf& span, const View& view, const ViewPlace& place, Prefetcher v_ahead, Rotator& rotator,
                        SpanScratch& s) {
  const AttendJob& job = *span.job;
  HWY_ALIGN float bias_values[kBlockKeys];
  BiasRow bias{nullptr, 1.0f};
  int64_t bias_token = -1;
  const Layer& layer = *job.layer;
  const int64_t n_rows = view.row_end - view.row_begin, first = view.row_begin - span.row_begin;
  const auto v_dim = static_cast<size_t>(layer.v_head_dim);
  dot_view(layer, job.q, view, span.by_tiles, rotator, s);
  for (int64_t i = 0; i < n_rows; ++i) {
    const int64_t r = first + i;
    float* logits = s.logits + i * kBlockKeys;
    if (job.bias != nullptr) {
      const int64_t row = view.row_begin + i, t = row / layer.group_size;
      if (t != bias_token) fill_bias(*job.bias, bias_token = t, view, place.tokens, bias_values);
      bias.values = bias_values;
      if (job.bias->slopes != nullptr) bias.slope = job.bias->slopes[row % layer.group_size];
    }
    const float largest = finish_logits(layer, bias, logits, view.keys.n);
    if (job.logits != nullptr) write_logits(view, logits, job.logits + (view.row_begin + i) * job.n_keys + place.key_at);
    const float m_before = s.m[r];
    if (largest > m_before) s.m[r] = largest;
    s.base[i] = s.m[r] == -HUGE_VALF ? 0.0f : s.m[r];
    // exp(-inf) passes through subnormal numbers, which the processor handles in slow microcode. So that case is taken out.
    s.rescale[i] = s.m[r] == m_before ? 1.0f : m_before == -HUGE_VALF ? 0.0f : exp_of(m_before - s.base[i]);
    s.sum[r] *= s.rescale[i];
  }
  // Computes weights group by group. All at once they would leave the memory idle for longer than its latency.
  const auto ahead_bytes = static_cast<int64_t>(v_ahead.row_bytes * kLanes) / (kExpShare * n_rows);
  for (int64_t at = 0; at < view.keys.n; at += kGroupKeys) {
    KeyList keys = view.keys;
    keys.v += at;
    keys.v_scales += at;
    keys.n = view.keys.n - at < kGroupKeys ? view.keys.n - at : kGroupKeys;
    if (stored_dtype(layer.v_type).in_blocks) {
      gather_v_scales(layer, keys.v, keys.n, s.scales.v + at);
      keys.v_scales = s.scales.v + at;
    }
    for (int64_t i = 0; i < n_rows; ++i)
      s.sum[first + i] += exp_and_sum(s.logits + i * kBlockKeys + at, keys.n, s.base[i], v_ahead, ahead_bytes);
    const WeighRows rows{s.logits + at, span.o + static_cast<size_t>(first) * v_dim, at == 0 ? s.rescale : s.ones, n_rows,
                         v_dim};
    weigh_of(layer.v_type, rows, keys, v_ahead);
  }
}

// Writes o / sum and lse, or o, m and sum as they are.
inline void finish_span(const Span& span, SpanScratch& s) {
  const F32 d;
  const int64_t n_rows = span.row_end - span.row_begin, dim = span.job->layer->v_head_dim;
  for (int64_t r = 0; r < n_rows; ++r) {
    if (!span.goes_on) sort_pairs_of(span.job->layer->v_type, span.o + r * dim, static_cast<size_t>(dim));
    if (span.m != nullptr) {
      span.m[r] = s.m[r];
      span.sum[r] = s.sum[r];
      continue;
    }
    const bool empty = s.sum[r] == 0.0f;
    span.lse[r] = empty ? -HUGE_VALF : s.m[r] + logf(s.sum[r]);
    const Vec inverse = hn::Set(d, empty ? 0.0f : 1.0f / s.sum[r]);
    float* o = span.o + r * dim;
    for (int64_t i = 0; i < dim; i += kLanes)
      hn::StoreU(empty ? hn::Zero(d) : hn::Mul(hn::LoadU(d, o + i), inverse), d, o + i);
  }
}

// Returns the K rows to prefetch while a block is attended. `at`: the block's first key, counted in the span.
HWY_INLINE Prefetcher k_ahead_of(const Span& span, const KeyStream& stream, int64_t at, SpanScratch& s) {
  if (span.k_ahead == nullptr) return start_prefetch(stream.k, stream.k_lead, stream.k_bytes);
  const Layer& layer = *span.job->layer;
  return prefetch_consecutive(s.k_ahead, span.k_ahead, at, row_bytes(layer.k_type, layer.k_head_dim));
}
HWY_INLINE Prefetcher v_ahead_of(const Span& span, const KeyStream& stream, int64_t at, SpanScratch& s) {
  if (span.v_ahead == nullptr) return start_prefetch(stream.v, stream.v_lead, stream.v_bytes);
  const Layer& layer = *span.job->layer;
  return prefetch_consecutive(s.v_ahead, span.v_ahead, at, row_bytes(layer.v_type, layer.v_head_dim));
}

inline void attend_blocks(const SpanOf& span, SpanScratch& s) {
  const AttendJob& job = *span.job;
  const Layer& layer = *job.layer;
  const int64_t n_rows = span.row_end - span.row_begin;
  if (!span.resumes) memset(span.o, 0, static_cast<size_t>(n_rows * layer.v_head_dim) * sizeof(float));
  for (int64_t r = 0; r < n_rows; ++r) {
    s.m[r] = span.resumes ? span.m[r] : -HUGE_VALF;
    s.sum[r] = span.resumes ? span.sum[r] : 0.0f;
    s.ones[r] = 1.0f;
  }
  s.packed_begin = s.packed_end = -1;
  s.target = kTarget;

  BlockLoop loop;
  open_block_loop(loop, layer);
  KeyStream& stream = loop.stream;
  start(stream, job.runs, span.first, span.key_end - span.key_begin, layer, job.n_keys < kFollowing * job.n_runs);
  stream.ask_next = span.next;
  stream.next_context = span.next_context;
  for (int64_t at = span.key_begin; next_block(stream); at += stream.n) {
    open_views(loop.views, stream, job.visibility, span.row_begin, span.row_end);
    if (job.logits != nullptr && !loop.views.all_see_all)
      for (int64_t r = span.row_begin; r < span.row_end; ++r) fill_lowest(job.logits + r * job.n_keys + at, stream.n);
    if (loop.views.all_see_nothing) continue;
    load_block(loop, layer, s.scales);
    if (job.bias != nullptr && !loop.views.tokens.is_listed) list_tokens(stream, loop.views.tokens);
    View view;
    bool is_fetched = false;
    while (next_view(loop.views, stream, &view)) {
      attach_scales(s.scales, layer, view, s.seen_scales);
      attach_positions(view, loop.rotator);
      Prefetcher v_ahead;
      if (view.picked == nullptr && !is_fetched) {
        view.keys.k_ahead = k_ahead_of(span, stream, at - span.key_begin, s);
        if (!layer.v_aliases_k) v_ahead = v_ahead_of(span, stream, at - span.key_begin, s);
        is_fetched = true;
      }
      attend_view(span, view, {at, loop.views.tokens.idx}, v_ahead, loop.rotator, s);
    }
  }
  finish_span(span, s);
}

void attend_span(const Span& span, SpanScratch& s) {
  const SpanOf own{span, takes_tiles(*span.job->layer)};
  if (own.by_tiles) open_tiles();
  attend_blocks(own, s);
  if (own.by_tiles) close_tiles();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
