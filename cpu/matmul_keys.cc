// SPDX-License-Identifier: MIT
#include "cpu/matmul_keys.h"

#include <algorithm>

namespace tandem::cpu {
namespace {

// The smallest and the largest begin of query tokens [first, last].
struct BeginRange {
  int64_t least, most;
};
BeginRange begin_range(const Visibility& visibility, int64_t first, int64_t last) {
  BeginRange range{visibility.begin[first], visibility.begin[last]};
  for (int64_t t = first; visibility.tree_words > 0 && t <= last; ++t) {
    if (visibility.begin[t] < range.least) range.least = visibility.begin[t];
    if (visibility.begin[t] > range.most) range.most = visibility.begin[t];
  }
  return range;
}

}  // namespace

KeyWalker::KeyWalker(const Span& span, TokenRange tokens)
    : job_(*span.job),
      key_begin_(span.key_begin),
      key_end_(span.key_end),
      run_idx_(span.first.run_idx - 1),
      next_key_(span.key_begin - span.first.offset) {
  if (const Visibility* visibility = job_.visibility) {
    begin_ = begin_range(*visibility, tokens.first, tokens.last).least;
    end_ = visibility->end[tokens.last];
    sink_end_ = std::min(visibility->sink_end, end_);
  }
}

// Moves to the next run that has a visible key.
bool KeyWalker::refill() {
  while (run_idx_ + 1 < job_.n_runs && next_key_ < key_end_) {
    const KvRun& run = job_.runs[++run_idx_];
    const int64_t n = run.n_tokens;
    first_key_ = next_key_;
    next_key_ += n;
    const auto add = [&](int64_t from, int64_t to) {  // adds rows of the run that the span has
      from = std::max(from, key_begin_ - first_key_);
      to = std::min(to, key_end_ - first_key_);
      if (from < to) pieces_[n_pieces_++] = {from, to - from};
    };
    if (run.token_idx < 0 || job_.visibility == nullptr) {
      add(0, n);
    } else {
      const auto row_of = [&](int64_t token) { return std::clamp<int64_t>(token - run.token_idx, 0, n); };
      const int64_t sinks = row_of(sink_end_), window = std::max(row_of(begin_), sinks), end = row_of(end_);
      if (window == sinks) {
        add(0, end);
      } else {
        add(window, end);
        add(0, sinks);
      }
    }
    if (n_pieces_ > 0) return true;
  }
  return false;
}

bool KeyWalker::next(KeyTile* tile, int32_t max_keys) {
  tile->n_segments = tile->n_keys = 0;
  while (tile->n_keys < max_keys && (n_pieces_ > 0 || refill())) {
    Piece& piece = pieces_[n_pieces_ - 1];
    const KvRun& run = job_.runs[run_idx_];
    const auto n = static_cast<int32_t>(std::min<int64_t>(piece.n_keys, max_keys - tile->n_keys));
    tile->segments[tile->n_segments++] = {
        &run, piece.row, first_key_ + piece.row, run.token_idx < 0 ? -1 : run.token_idx + piece.row, tile->n_keys, n};
    tile->n_keys += n;
    piece.row += n;
    piece.n_keys -= n;
    if (piece.n_keys == 0) --n_pieces_;
  }
  return tile->n_keys > 0;
}

TileView view_of(const Visibility* visibility, const KeyTile& tile, TokenRange tokens) {
  if (visibility == nullptr) return {0, tile.n_keys, true};
  const auto [first_begin, last_begin] = begin_range(*visibility, tokens.first, tokens.last);
  const int64_t first_end = visibility->end[tokens.first], last_end = visibility->end[tokens.last];
  TileView view{tile.n_keys, 0, true};
  for (int32_t i = 0; i < tile.n_segments; ++i) {
    const KeySegment& segment = tile.segments[i];
    int32_t begin = 0, end = segment.n_keys;
    if (segment.token_idx >= 0) {
      const int64_t a = segment.token_idx, b = a + segment.n_keys;
      const bool seen_by_all = b <= first_end && b <= visibility->tree_begin &&
                               (a >= last_begin || b <= visibility->sink_end || last_begin <= visibility->sink_end);
      view.all = view.all && seen_by_all;
      if (a >= visibility->sink_end) begin = static_cast<int32_t>(std::clamp<int64_t>(first_begin - a, 0, segment.n_keys));
      end = static_cast<int32_t>(std::clamp<int64_t>(last_end - a, 0, segment.n_keys));
    }
    if (begin >= end) continue;
    view.begin = std::min(view.begin, segment.column + begin);
    view.end = std::max(view.end, segment.column + end);
  }
  return view;
}

bool sees(const Visibility* visibility, int64_t t, int64_t token_idx) {
  if (visibility == nullptr || token_idx < 0) return true;
  if (token_idx >= visibility->end[t]) return false;
  if (token_idx >= visibility->sink_end && token_idx < visibility->begin[t]) return false;
  const int64_t bit = token_idx - visibility->tree_begin;
  if (bit < 0) return true;
  const uint64_t* bits = visibility->tree_bits + t * visibility->tree_words;
  return bit < int64_t{64} * visibility->tree_words && (bits[bit / 64] >> (bit % 64) & 1) != 0;
}

void visible_columns(const Visibility* visibility, const KeyTile& tile, int64_t t, int32_t begin, int32_t end,
                     uint32_t* visible) {
  std::fill(visible + begin, visible + end, 0u);
  const auto show = [&](int64_t from, int64_t to) {
    from = std::max<int64_t>(from, begin);
    to = std::min<int64_t>(to, end);
    if (from < to) std::fill(visible + from, visible + to, ~0u);
  };
  for (int32_t i = 0; i < tile.n_segments; ++i) {
    const KeySegment& segment = tile.segments[i];
    if (segment.column >= end || segment.column + segment.n_keys <= begin) continue;
    if (visibility == nullptr || segment.token_idx < 0) {
      show(segment.column, segment.column + segment.n_keys);
      continue;
    }
    const auto column_of = [&](int64_t token) {
      return segment.column + std::clamp<int64_t>(token - segment.token_idx, 0, segment.n_keys);
    };
    const int64_t last = column_of(visibility->end[t]);
    show(segment.column, std::min(column_of(visibility->sink_end), last));
    show(column_of(visibility->begin[t]), last);
    const int64_t end_of_tree = std::min<int64_t>(last, end);
    for (int64_t c = std::max<int64_t>(column_of(visibility->tree_begin), begin); c < end_of_tree; ++c)
      if (!sees(visibility, t, segment.token_idx + c - segment.column)) visible[c] = 0;
  }
}

}  // namespace tandem::cpu
