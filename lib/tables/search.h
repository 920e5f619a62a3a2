// SPDX-License-Identifier: MIT
// A device's search for the chunks that queries attend (policy "hip"; the ABI's pruning.h has the rules). kDeviceAbi changes
// when these structs change.
//
// A search works on query blocks. A block is up to 64 consecutive queries of one sequence and has its own DeviceSequence.
// Its queries are the last q_len tokens of [0, end), and first_row is the row of the first. The token of its first query is
// p0 = end - q_len. Keys [0, end) are all in the window: begin and n_after are 0.
//
//     tokens   0 ....... sink_len ............... window_begin .... candidates_end ....... p0 ... end
//              |  sinks  |  chunks that stages judge                |
//                                                 | window, from p0 + 1 - window_len on            |
//
//     candidates_end = p0 + 1 - window_len + overlap. If the search keeps its lists, overlap is the longest interval of the
//     active stages less 1, else 0. Stages judge nothing where candidates_end <= sink_len.
//
// A stage is active if from_len <= p0 + 1 < to_len (0: no limit). The first active stage judges chunks [sink_len >>
// chunk_shift, candidates_end rounded up to a chunk). Each later stage judges the parts of the chunks that the stage before
// has kept, without parts that begin at candidates_end or later. A stage keeps the best keep_len >> chunk_shift chunks. With
// plus_next it keeps half as many, and with each of them the next chunk, if that begins before candidates_end. Ties go to
// the lower chunk. NaN ranks above all numbers. A stage whose candidates, counted as whole chunks, have at most keep_len
// tokens keeps all of them and judges none.
//
// The score of a chunk is the largest value over the rows of the list: each query of the block, each query head of the
// list's KV heads. The value depends on the judge:
//   bounds    q . max(low, high), where each dimension takes low if q is negative there, else high: an upper bound of the
//             logits in the chunk
//   exact     the largest logit of the chunk's keys. If this is the last active stage and a list has several query heads,
//             less the row's log-sum-exp over the keys of the sinks, the candidates (whole chunks) and the window up to
//             token p0, each key once
//   descent   for each query head: low = 0; for half = length / 2, length / 4 .. 1: low += half if key low + half has a
//             larger logit than key low. A logit is the largest over the block's queries. The value is that of key low.
// Logits are layer->scale * q . k, before soft caps, in f32. A query sees keys up to its own token.
//
// There are n_kv_heads lists, one for each KV head, or with shares_lists one list for all KV heads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

inline constexpr int32_t kMostSearchStages = 8;

// Bounds of the keys of chunks of 1 << chunk_shift tokens, in the window's pages. Each chunk has a row [smallest number of
// each dimension | largest number of each] in bf16, rounded outward. The row is in the page of the chunk's first token: row
// (token % page_len) >> chunk_shift of data + head * head_stride. Keys are as in the window.
struct DeviceBounds {
  std::byte* data = nullptr;  // rows of KV head 0, in the page that page tables call 0; null: none are kept
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
  int32_t most_kept = 0;    // room of a list, in chunks: keep_len >> chunk_shift
  int32_t bounds_idx = -1;  // index in the search's bounds; -1: the judge needs none
};

// Lists are kept with the sequence. A stage's lists begin at DeviceSequence::kept_lists + lists_at. There is one for each of
// the search's lists, kept_list_bytes() apart: a KeptList, followed by its chunks, ascending.
struct KeptList {
  uint32_t mark = 0;    // DeviceSequence::kept_mark of the search that made the list; 0: none has
  uint32_t places = 0;  // bit i: stage i was active
  int64_t ran_at = 0;   // p0 of the search that made the list
  int32_t n = 0;        // chunks
  int32_t reserved = 0;
};
constexpr int64_t kept_list_bytes(int64_t most_kept) {
  return static_cast<int64_t>(sizeof(KeptList)) + (most_kept * static_cast<int64_t>(sizeof(int32_t)) + 7) / 8 * 8;
}

}  // namespace tandem
