// SPDX-License-Identifier: MIT
// Makes key lists (lib/tables/key_list.h) of the units that the caller of a call names: a block for each query and list.
//
//   tokens    sinks              named units                 newest
//             |xxxxxxxx|    |xxxx|     |xx|  |xxxx|          [range_begin .. end)
//             granules      granules                         the list's range
//
// Without plus_window there are no sinks and no range.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/list_granules.cuh"

namespace tandem::cuda {

// A query and the keys that its list may name.
struct NamingQuery {
  int64_t own = 0;                        // the query's token
  int64_t begin = 0, end = 0;             // of the resident keys
  int64_t sink_end = 0, range_begin = 0;  // tokens before sink_end, and from range_begin on, are attended anyway
  const int32_t* idx = nullptr;           // the query's row of indices
  int list = 0;                           // index of the list in the call
};

__device__ inline NamingQuery find_query(const DeviceNamedKeys& call, const DeviceSequence& sequence, int head) {
  NamingQuery query;
  query.own = sequence.end + sequence.n_after - 1;
  query.begin = sequence.begin;
  query.end = sequence.end;
  query.range_begin = query.end;
  query.sink_end = query.begin;
  query.idx = call.idx.data + sequence.first_row * call.idx.token_stride + head * call.idx.head_stride;
  query.list = static_cast<int>(blockIdx.x) * call.idx.n_heads + head;
  if (call.idx.plus_window == 0) return query;
  int64_t newest = query.own;
  if (call.positions != nullptr) newest = query.end + call.positions[sequence.first_row] - sequence.position;
  query.range_begin = min(max(newest + 1 - call.window_len, query.begin), query.end);
  query.sink_end = min(max(call.sink_len, query.begin), query.range_begin);
  return query;
}

// True if index i is wrong: it names no token up to the query's own, does not ascend, or follows a pad.
__device__ inline bool is_bad_index(const DeviceIndices& idx, const NamingQuery& query, int i) {
  const int32_t unit = query.idx[i], before = i > 0 ? query.idx[i - 1] : -2;
  if (unit == -1) return false;
  return unit < 0 || (int64_t{unit} << idx.unit_shift) > query.own || (i > 0 && unit <= before) || before == -1;
}

__device__ inline void report_bad_index(const DeviceNamedKeys& call, const DeviceSequence& sequence,
                                        const NamingQuery& query, int head, int place) {
  BadIndex* const bad = &call.flags->bad_index;
  Word* const n_told = reinterpret_cast<Word*>(call.state + kBadIndices);
  const Word n_taken = load_busy(&bad->n_taken);
  if (atomicCAS(n_told, n_taken, n_taken + 1) != n_taken) return;  // the host has not taken the one before
  bad->layer_idx = call.layer_idx;
  bad->head = head;
  bad->value = query.idx[place];
  bad->row = call.first_row + sequence.first_row;
  bad->place = place;
  bad->own = query.own;
  fence_system();
  store_system(&bad->n_told, static_cast<uint32_t>(n_taken) + 1);
}

__global__ void __launch_bounds__(32 * kNameWarps) name_keys_kernel(const __grid_constant__ DeviceNamedKeys call) {
  __shared__ int of_warps[kNameWarps];
  __shared__ int first_bad;
  let_next_start();
  const DeviceSequence sequence = call.sequences.sequences[blockIdx.x];
  const int head = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  if (thread == 0) first_bad = INT32_MAX;
  wait_for_before();
  if (sequence.q_len == 0) {  // of a graph that is replayed for fewer sequences
    if (thread == 0) call.keys[static_cast<int>(blockIdx.x) * call.idx.n_heads + head] = {};
    return;
  }
  const NamingQuery query = find_query(call, sequence, head);
  KeyGranule* const granules = call.granules + int64_t{query.list} * call.n_granules;
  const auto put = [&](int at, KeyGranule granule) {
    if (at >= call.n_granules) return;  // only a wrong row needs more
    const int page_idx = granule.token / call.page_len;
    granule.page = call.sequences.page_tables[sequence.table_begin + page_idx % sequence.table_len];
    granules[at] = granule;
  };
  const int64_t first_sink = query.begin / kGranuleKeys * kGranuleKeys;
  const int n_sinks =
      query.sink_end > query.begin ? static_cast<int>((query.sink_end - first_sink + kGranuleKeys - 1) / kGranuleKeys) : 0;
  for (int i = thread; i < n_sinks; i += 32 * kNameWarps) {
    const int64_t token = first_sink + i * kGranuleKeys;
    put(i, {static_cast<int32_t>(token), granule_bits(token, query.begin, query.sink_end), 0});
  }
  __syncthreads();
  int n = n_sinks;
  const int64_t shared_token = n_sinks > 0 ? first_sink + int64_t{n_sinks - 1} * kGranuleKeys : -1;
  const NamedUnits units = {query.idx, call.idx.n_idx, call.idx.unit_shift};
  const int in_unit = max(call.idx.unit_shift - NamedUnits::kGranuleShift, 0), n_items = units.n_items();
  for (int first = 0; first < n_items; first += 32 * kNameWarps) {
    const int item = first + thread;
    KeyGranule granule = {};
    if (item < n_items) {
      granule = find_granule(units, item, query.sink_end, query.range_begin);
      const bool leads = (item & ((1 << in_unit) - 1)) == 0;
      if (leads && is_bad_index(call.idx, query, item >> in_unit)) atomicMin(&first_bad, item >> in_unit);
    }
    const bool is_shared = granule.keys != 0 && granule.token == shared_token;  // with the last granule of the sinks
    if (is_shared) atomicOr(&granules[n_sinks - 1].keys, granule.keys);
    const int at = place_in_block(granule.keys != 0 && !is_shared, of_warps, &n);
    if (granule.keys != 0 && !is_shared) put(at, granule);
  }
  __syncthreads();
  if (thread != 0) return;
  const bool is_bad = first_bad != INT32_MAX;
  if (is_bad) report_bad_index(call, sequence, query, head, first_bad);
  const auto begin = static_cast<int32_t>(is_bad ? query.end : query.range_begin);
  call.keys[query.list] = {query.list * call.n_granules, is_bad ? -1 : min(n, call.n_granules), begin, 0};
}

}  // namespace tandem::cuda
