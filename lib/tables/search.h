// SPDX-License-Identifier: MIT
// What a device is told of a search for the chunks that queries attend (policy "hip"; pruning.h of the ABI has the rules).
// kDeviceAbi changes with the structs here, too.
//
// A search works on query blocks. A block is up to 64 queries of one sequence, side by side, and has a DeviceSequence of its
// own: its queries are the last q_len tokens of [0, end), and first_row is the row of the first. The token of its first
// query is p0 = end - q_len. Keys [0, end) are all in the window: begin and n_after are 0.
//
//     tokens   0 ....... sink_len ............... window_begin .... candidates_end ....... p0 ... end
//              |  sinks  |  chunks that stages judge                |
//                                                 | window, from p0 + 1 - window_len on            |
//
//     candidates_end = p0 + 1 - window_len + overlap, overlap = the longest interval - 1 of the stages that are there, where
//     the search keeps its lists; else 0. Nothing is judged where candidates_end <= sink_len.
//
// A stage is there if from_len <= p0 + 1 < to_len (0: no limit). The first stage that is there judges the chunks
// [sink_len >> chunk_shift, candidates_end rounded up to a chunk); each later one judges the parts of the chunks that the
// stage before it has kept, but for parts that begin at candidates_end or behind it. It keeps keep_len >> chunk_shift of
// them (half as many with plus_next, and with each of these the next chunk, if that begins before candidates_end), of equal
// scores the lower one, and of scores that are NaN all before the others. A stage whose candidates have no more than
// keep_len tokens in all, counted as whole chunks, keeps all of them and judges none.
//
// The score of a chunk is the largest, over the rows of the list (each query of the block, each query head of the list's KV
// heads), of
//   bounds    q . max(low, high) taken dim by dim where q is negative or positive: an upper bound of the logits in the chunk
//   exact     the largest logit of the chunk's keys. In the last stage that is there, where a list has several query heads:
//             less the row's log-sum-exp over the keys of the sinks, of the candidates (whole chunks) and of the window up
//             to token p0, each key once
//   descent   for each query head: low = 0; for half = length / 2, length / 4 .. 1: low += half where key low + half has a
//             larger logit, each the largest over the block's queries, than key low; the logit of key `low` in the end
// Logits are layer->scale * q . k, before soft caps, in f32. A query sees keys up to its own token.
//
// Where each list serves one KV head there are n_kv_heads lists; with shares_lists there is one for all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

inline constexpr int32_t kMostSearchStages = 8;

// Bounds of the keys of chunks of 1 << chunk_shift tokens, in the window's pages: of each chunk a row
// [smallest number of each dimension | largest number of each] in bf16, rounded outward. The row of a chunk is in the page
// of its first token: row (token % page_len) >> chunk_shift of data + head * head_stride. Keys are as the window has them.
struct DeviceBounds {
  std::byte* data = nullptr;  // of KV head 0, in the page that tables call 0; null: none are kept
  int64_t head_stride = 0;    // bytes
  int32_t chunk_shift = 0;
  int32_t reserved = 0;
};

struct DeviceSearchStage {
  int32_t judge = 0;  // TANDEM_JUDGE_*
  int32_t chunk_shift = 0;
  int32_t interval = 1;
  int32_t plus_next = 0;
  int64_t keep_len = 0;
  int64_t from_len = 0, to_len = 0;
  int64_t lists_at = 0;     // bytes from DeviceSequence::kept_lists to the stage's lists
  int32_t most_kept = 0;    // chunks that a list has room for: keep_len >> chunk_shift
  int32_t bounds_idx = -1;  // of the search's bounds; -1: the judge needs none
};

// Lists are kept with the sequence. A stage's lists lie at DeviceSequence::kept_lists + lists_at, one for each of the
// search's lists, kept_list_bytes() apart: a KeptList, and behind it its chunks, ascending.
struct KeptList {
  uint32_t mark = 0;    // DeviceSequence::kept_mark of the search that made it; 0: no search has made it
  uint32_t places = 0;  // bit i: stage i was there
  int64_t ran_at = 0;   // p0 of the search that made it
  int32_t n = 0;        // chunks
  int32_t reserved = 0;
};
constexpr int64_t kept_list_bytes(int64_t most_kept) {
  return static_cast<int64_t>(sizeof(KeptList)) + (most_kept * static_cast<int64_t>(sizeof(int32_t)) + 7) / 8 * 8;
}

}  // namespace tandem
