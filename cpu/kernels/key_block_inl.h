// SPDX-License-Identifier: MIT
// Turns runs of keys into blocks of row pointers, and finds the keys of a block that each query token sees.
//
// A block is up to kBlockKeys keys of a job, in order, wherever their runs begin and end. The list of row pointers continues
// past the block. So the tiles can prefetch across run ends and, at the end of the span, the thread's next rows
// (cpu/kernels/prefetch_inl.h explains the order).
//
//   k:  [ block: n pointers | ahead pointers ]      the next block begins with the ahead pointers
//
// Masks: a block that a token sees whole goes through the tiles as it is. If a token sees a part of a block, the visible
// keys are listed and the list goes through the same tiles. A masked key is never read, so it contributes nothing, not even
// a NaN. Rows of one token see the same keys. Tokens that see all of a block are taken together.
#pragma once

#include "cpu/kernels/tile_inl.h"
#include "lib/model/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

struct KeyStream {
  // Set by start():
  const KvRun* run;  // run of the next key that gets a pointer; offset: the key's index in it
  int64_t offset;
  int64_t n_left;  // keys without a pointer yet
  NextKeys next;   // after the span, once asked for: the next key there that gets a pointer
  NextKeys after;  // the first of the keys after the span
  NextKeys (*ask_next)(void* context);
  void* next_context;
  int64_t k_stride, v_stride;  // bytes between rows of a run
  int64_t k_bytes, v_bytes;    // bytes of a row to prefetch
  Lead k_lead, v_lead;         // how far ahead rows are prefetched
  // The block:
  const KvRun* block_run;  // run of its first key; block_offset: the key's index in it
  int64_t block_offset;
  int64_t n;            // keys
  int64_t n_remaining;  // keys behind the block
  int64_t n_pointers;
  Row k[kBlockKeys + kMaxAhead];
  Row v[kBlockKeys + kMaxAhead];
};

HWY_INLINE void write_rows(Row* to, const void* base, int64_t offset, int64_t stride, int64_t n) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset * stride);
  for (int64_t i = 0; i < n; ++i) to[i] = reinterpret_cast<Row>(first + static_cast<uintptr_t>(i * stride));
}

inline constexpr uintptr_t kListAhead = kBlockKeys * sizeof(KvRun);

// Writes pointers of the next runs of one key each, up to the n-th pointer. A list of such runs is a tenth of the bytes that
// are read. It still lies in the caches of the core that wrote it, so it is prefetched a block ahead.
HWY_INLINE void write_single_keys(KeyStream& s, int64_t n) {
  const int64_t first = s.n_pointers, count = s.n_left < n - first ? s.n_left : n - first;
  const KvRun* run = s.run;
  int64_t i = 0;
  for (; i < count && run->n_tokens == 1; ++i, ++run) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(run) + kListAhead));
    s.k[first + i] = static_cast<Row>(run->k);
    s.v[first + i] = static_cast<Row>(run->v);
  }
  s.run = run;
  s.n_pointers += i;
  s.n_left -= i;
}

// Writes pointers up to the n-th. Past the span they point to the keys of the next runs, and past those to the last key
// again.
inline void write_pointers(KeyStream& s, int64_t n) {
  while (s.n_pointers < n) {
    const bool inside = s.n_left > 0;
    if (!inside && s.ask_next != nullptr) {
      s.next = s.after = s.ask_next(s.next_context);
      s.ask_next = nullptr;
    }
    if (inside && s.offset == 0 && s.run->n_tokens == 1) {
      write_single_keys(s, n);
      continue;
    }
    const KvRun* run = inside ? s.run : s.next.run;
    int64_t& offset = inside ? s.offset : s.next.offset;
    if (run == nullptr) {
      for (int64_t i = s.n_pointers; i < n; ++i) {
        s.k[i] = s.k[i - 1];
        s.v[i] = s.v[i - 1];
      }
      s.n_pointers = n;
      return;
    }
    int64_t count = run->n_tokens - offset;
    if (count > n - s.n_pointers) count = n - s.n_pointers;
    if (inside && count > s.n_left) count = s.n_left;
    write_rows(s.k + s.n_pointers, run->k, offset, s.k_stride, count);
    write_rows(s.v + s.n_pointers, run->v, offset, s.v_stride, count);
    s.n_pointers += count;
    offset += count;
    if (inside) {
      s.n_left -= count;
      if (offset == run->n_tokens) {
        ++s.run;
        offset = 0;
      }
    } else if (offset == run->n_tokens) {
      s.next = --s.next.n_runs > 0 ? NextKeys{run + 1, 0, s.next.n_runs} : NextKeys{};
    }
  }
}

// Returns the bytes of a row to prefetch. A few bytes in a last line of their own come with the next row.
HWY_INLINE int64_t prefetched_bytes(int32_t dtype, int64_t head_dim) {
  const int64_t n = row_bytes(dtype, head_dim), whole = n & ~int64_t{kLine - 1};
  return stored_dtype(dtype).in_blocks && whole > 0 ? whole : n;
}

// is_scattered: most keys do not follow the key before them.
inline void start(KeyStream& s, const KvRun* runs, const KeyRef& first, int64_t n_keys, const Layer& layer,
                  bool is_scattered) {
  s.run = s.block_run = runs + first.run_idx;
  s.offset = s.block_offset = first.offset;
  s.n_left = s.n_remaining = n_keys;
  s.next = s.after = {};
  s.ask_next = nullptr;
  s.k_stride = k_stride_of(layer);
  s.v_stride = v_stride_of(layer);
  s.k_bytes = prefetched_bytes(layer.k_type, layer.k_head_dim);
  s.v_bytes = prefetched_bytes(layer.v_type, layer.v_head_dim);
  s.k_lead = lead_of(row_bytes(layer.k_type, layer.k_head_dim), s.k_stride, is_scattered);
  s.v_lead = lead_of(row_bytes(layer.v_type, layer.v_head_dim), s.v_stride, is_scattered);
  s.n = 0;
  s.n_pointers = 0;
}

// Moves n keys forward.
HWY_INLINE void skip_keys(const KvRun*& run, int64_t& offset, int64_t n) {
  while (n > 0) {
    const int64_t rest = run->n_tokens - offset;
    if (n < rest) {
      offset += n;
      return;
    }
    n -= rest;
    ++run;
    offset = 0;
  }
}

// Moves on to the next block. Returns false at the end.
inline bool next_block(KeyStream& s) {
  skip_keys(s.block_run, s.block_offset, s.n);
  s.n_pointers -= s.n;
  if (s.n > 0 && s.n_pointers > 0) {
    memmove(s.k, s.k + s.n, static_cast<size_t>(s.n_pointers) * sizeof(Row));
    memmove(s.v, s.v + s.n, static_cast<size_t>(s.n_pointers) * sizeof(Row));
  }
  s.n = s.n_remaining < kBlockKeys ? s.n_remaining : kBlockKeys;
  s.n_remaining -= s.n;
  if (s.n == 0) return false;
  // As many rows are prefetched as are computed: in groups, and in sixteens for the matrix unit.
  const int64_t apart = s.k_lead.apart > s.v_lead.apart ? s.k_lead.apart : s.v_lead.apart;
  const int64_t ahead = s.k_lead.ahead > s.v_lead.ahead ? s.k_lead.ahead : s.v_lead.ahead;
  const int64_t group = apart < 4 ? 16 : kStreams * apart;
  write_pointers(s, (s.n + group - 1) / group * group + ahead);
  return true;
}

// The tokens of a block's keys, as its masks need them; found once per block.
struct BlockTokens {
  int64_t min, max;   // over keys with a token index
  bool has_numbered;  // keys with a token index
  bool has_common;    // keys that every query sees
  bool is_listed;     // idx is filled
  int64_t idx[kBlockKeys];
};

inline void find_token_range(const KeyStream& s, BlockTokens& tokens) {
  tokens.min = INT64_MAX;
  tokens.max = INT64_MIN;
  tokens.has_numbered = tokens.has_common = false;
  const KvRun* run = s.block_run;
  int64_t offset = s.block_offset;
  for (int64_t left = s.n; left > 0; ++run, offset = 0) {
    const int64_t count = run->n_tokens - offset < left ? run->n_tokens - offset : left;
    left -= count;
    if (count == 0) continue;
    if (run->token_idx < 0) {
      tokens.has_common = true;
      continue;
    }
    tokens.has_numbered = true;
    const int64_t first = run->token_idx + offset;
    if (first < tokens.min) tokens.min = first;
    if (first + count - 1 > tokens.max) tokens.max = first + count - 1;
  }
}

inline void list_tokens(const KeyStream& s, BlockTokens& tokens) {
  const KvRun* run = s.block_run;
  int64_t offset = s.block_offset;
  for (int64_t at = 0; at < s.n; ++run, offset = 0) {
    const int64_t count = run->n_tokens - offset < s.n - at ? run->n_tokens - offset : s.n - at;
    for (int64_t i = 0; i < count; ++i) tokens.idx[at + i] = run->token_idx < 0 ? -1 : run->token_idx + offset + i;
    at += count;
  }
  tokens.is_listed = true;
}

enum class Sees { kNothing, kSome, kAll };

HWY_INLINE Sees sees(const Visibility& vis, int64_t t, const BlockTokens& tokens) {
  if (!tokens.has_numbered) return Sees::kAll;
  const int64_t begin = vis.begin[t], end = vis.end[t];
  const bool past_end = end <= tokens.min, before_begin = begin > tokens.max && vis.sink_end <= tokens.min;
  if (past_end || before_begin) return tokens.has_common ? Sees::kSome : Sees::kNothing;
  const bool from_begin = begin <= tokens.min || tokens.max < vis.sink_end || begin <= vis.sink_end;
  return from_begin && tokens.max < end && tokens.max < vis.tree_begin ? Sees::kAll : Sees::kSome;
}

HWY_INLINE bool is_visible(const Visibility& vis, int64_t t, int64_t token) {
  if (token < 0) return true;
  if (!(token < vis.sink_end || token >= vis.begin[t]) || token >= vis.end[t]) return false;
  if (token < vis.tree_begin) return true;
  const int64_t bit = token - vis.tree_begin;
  return bit < 64 * int64_t{vis.tree_words} && (vis.tree_bits[t * vis.tree_words + bit / 64] >> (bit % 64) & 1) != 0;
}

// The keys of a block that some rows see.
struct View {
  int64_t row_begin, row_end;  // rows of the job
  KeyList keys;
  const int32_t* picked;  // [keys.n] places in the block; null: the whole block
};

// Walks through the views of a block for rows [row_begin, row_end). Starts with row = row_begin.
struct Views {
  const Visibility* vis;
  int64_t group_size;
  int64_t row, row_end;
  bool all_see_all, all_see_nothing;
  BlockTokens tokens;
  Row k[kBlockKeys];
  Row v[kBlockKeys];
  int32_t picked[kBlockKeys];
};

inline void open_views(Views& views, const KeyStream& s, const Visibility* vis, int64_t row_begin, int64_t row_end) {
  views.vis = vis;
  views.row = row_begin;
  views.row_end = row_end;
  views.all_see_all = vis == nullptr;
  views.all_see_nothing = false;
  views.tokens.is_listed = false;
  if (vis == nullptr) return;
  find_token_range(s, views.tokens);
  // The tokens that see least and most decide for all tokens.
  const int64_t first = row_begin / views.group_size, last = (row_end - 1) / views.group_size;
  int64_t least_begin = vis->begin[first], most_begin = vis->begin[last];
  for (int64_t t = first; vis->tree_words > 0 && t <= last; ++t) {
    if (vis->begin[t] < least_begin) least_begin = vis->begin[t];
    if (vis->begin[t] > most_begin) most_begin = vis->begin[t];
  }
  const Visibility least{vis->sink_end, &most_begin, vis->end + first, vis->tree_begin, nullptr, 0};
  const Visibility most{vis->sink_end, &least_begin, vis->end + last, vis->tree_begin, nullptr, 0};
  views.all_see_all = sees(least, 0, views.tokens) == Sees::kAll;
  views.all_see_nothing = sees(most, 0, views.tokens) == Sees::kNothing;
}

// Writes the next view to *view. Returns false at the end.
inline bool next_view(Views& views, const KeyStream& s, View* view) {
  while (views.row < views.row_end) {
    view->row_begin = views.row;
    view->picked = nullptr;
    view->keys = {s.k, s.v, {}, s.n, nullptr, 0, nullptr};
    if (views.all_see_all) {
      view->row_end = views.row = views.row_end;
      return true;
    }
    const int64_t t = views.row / views.group_size;
    const auto end_of = [&](int64_t token) {
      const int64_t end = (token + 1) * views.group_size;
      return end < views.row_end ? end : views.row_end;
    };
    const Sees what = sees(*views.vis, t, views.tokens);
    views.row = view->row_end = end_of(t);
    if (what == Sees::kNothing) continue;
    if (what == Sees::kAll) {
      while (views.row < views.row_end && sees(*views.vis, views.row / views.group_size, views.tokens) == Sees::kAll)
        views.row = view->row_end = end_of(views.row / views.group_size);
      return true;
    }
    if (!views.tokens.is_listed) list_tokens(s, views.tokens);
    int64_t n = 0;
    for (int64_t j = 0; j < s.n; ++j) {
      if (!is_visible(*views.vis, t, views.tokens.idx[j])) continue;
      views.k[n] = s.k[j];
      views.v[n] = s.v[j];
      views.picked[n++] = static_cast<int32_t>(j);
    }
    if (n == 0) continue;
    view->keys = {views.k, views.v, {}, n, nullptr, 0, nullptr};
    view->picked = views.picked;
    return true;
  }
  return false;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
