// SPDX-License-Identifier: MIT
// The end of a stage. The last block of a list keeps the best candidates and, in the last stage, writes the key list.
#pragma once

#include "cuda/kernels/list_granules.cuh"
#include "cuda/kernels/radix_select.cuh"
#include "cuda/kernels/search_job.cuh"

namespace tandem::cuda {

static_assert(kSearchWarps == kNameWarps);  // place_in_block() needs as many warps
inline constexpr int kSearchThreads = 32 * kSearchWarps;
using KeepRoom = SelectRoom<kSearchWarps>;

// ---- scores ------------------------------------------------------------------------------------------------------------

// Computes each row's log-sum-exp from the sums of all pieces. It takes the place of the first piece's largest logit.
__device__ inline void finish_sums(const SearchCall& call, const SearchJob& job) {
  const int n_rows = job.sequence.q_len * call.group_size;
  for (int i = static_cast<int>(threadIdx.x); i < n_rows * job.n_heads; i += kSearchThreads) {
    const int head = job.first_head + i / n_rows, row = i % n_rows;
    float_pair* const of_row = sums_of(call, head, 0) + row;
    float most = -INFINITY, sum = 0.0f;
    for (int p = 0; p < call.n_pieces; ++p) {
      const float2 of = __ldcg(reinterpret_cast<const float2*>(of_row + p * call.most_rows));
      if (of.x == -INFINITY && of.y == 0.0f) continue;
      const float larger_most = fmaxf(most, of.x);
      sum = sum * expf(most - larger_most) + of.y * expf(of.x - larger_most);
      most = larger_most;
    }
    of_row->most = most + logf(sum);
  }
  __syncthreads();
}

// True if scores are of rows, and each row's log-sum-exp still has to be subtracted.
__device__ inline bool has_row_scores(const SearchCall& call, const SearchJob& job) {
  return job.normalises != 0 && call.has_sums == 0;
}

__device__ inline uint32_t ordered_score(const SearchCall& call, const SearchJob& job, int i) {
  uint32_t most = 0;
  for (int h = job.first_head; h < job.first_head + job.n_heads; ++h) {
    const float* const scores = scores_of(call, h);
    if (!has_row_scores(call, job)) {
      most = max(most, ordered(__ldcg(scores + i)));
      continue;
    }
    const float_pair* const sums = sums_of(call, h, 0);
    const int n_rows = job.sequence.q_len * call.group_size;
#pragma unroll 4
    for (int row = 0; row < n_rows; ++row)
      most = max(most, ordered(__ldcg(scores + int64_t{row} * job.from.n + i) - sums[row].most));
  }
  return most;
}

// The numbers of a list's candidates, for find_last() and take_kept(). The work space keeps them.
struct CandidateNumbers {
  const SearchCall& call;
  const SearchJob& job;
  uint32_t* kept;

  __device__ CandidateNumbers(const SearchCall& of_call, const SearchJob& of_job)
      : call(of_call),
        job(of_job),
        kept(call.ordered + (int64_t{blockIdx.z} * call.n_lists + job.list) * call.most_candidates) {}
  __device__ uint32_t first(int i) const { return kept[i] = ordered_score(call, job, i); }
  __device__ uint32_t again(int i) const { return kept[i]; }
};

// ---- kept chunks ---------------------------------------------------------------------------------------------------------

// Adds to the best chunks the next one of each, if it begins among the candidates. Each chunk is written once. Returns
// their number.
__device__ inline int add_next(const int32_t* best, int n_best, int64_t end_chunk, KeepRoom& room, int32_t* to) {
  int n = 0;
  for (int first = 0; first < n_best; first += kSearchThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int chunk = i < n_best ? best[i] : 0;
    const bool has_next = i < n_best && chunk + 1 < end_chunk && !(i + 1 < n_best && best[i + 1] == chunk + 1);
    int total = 0;
    const int at = n + sum_before(i < n_best ? 1 + has_next : 0, room.of_warps[0], &total);
    if (i < n_best) to[at] = chunk;
    if (has_next) to[at + 1] = chunk + 1;
    n += total;
  }
  return n;
}

// Finishes the stage's list. All threads know its length before they read it. n: its chunks.
__device__ inline void finish_list(const SearchJob& job, int n) {
  if (threadIdx.x == 0) {
    job.own->mark = job.sequence.kept_mark;
    job.own->places = job.places;
    job.own->ran_at = job.p0;
    job.own->n = n;
    job.own->reserved = 0;
  }
  __syncthreads();
}

__device__ inline void keep_all(const SearchJob& job) {
  for (int i = static_cast<int>(threadIdx.x); i < job.from.n; i += kSearchThreads) chunks_of(job.own)[i] = job.from.chunk(i);
  finish_list(job, job.from.n);
}

__device__ inline void keep_best(const SearchCall& call, const SearchJob& job, KeepRoom& room) {
  const DeviceSearchStage& stage = call.search.stages[call.stage];
  const bool plus_next = stage.plus_next != 0;
  const auto n_kept = static_cast<int>(stage.keep_len >> (stage.chunk_shift + (plus_next ? 1 : 0)));
  int32_t* const best =
      plus_next ? call.best + (int64_t{blockIdx.z} * call.n_lists + job.list) * call.most_best : chunks_of(job.own);
  if (has_row_scores(call, job)) finish_sums(call, job);
  const CandidateNumbers numbers(call, job);
  const LastKept last = find_last(numbers, job.from.n, n_kept, room);
  const int lane = static_cast<int>(threadIdx.x % 32);
  take_kept(numbers, job.from.n, last, room, [&](int first, unsigned kept, int at) {
    if ((kept >> lane & 1) != 0) best[at + __popc(kept & ((1u << lane) - 1))] = job.from.chunk(first + lane);
  });
  const int64_t end_chunk = (job.end + (int64_t{1} << stage.chunk_shift) - 1) >> stage.chunk_shift;
  finish_list(job, plus_next ? add_next(best, n_kept, end_chunk, room, chunks_of(job.own)) : n_kept);
}

// ---- key lists -----------------------------------------------------------------------------------------------------------

// Writes granules of a list, and counts them.
struct GranuleWriter {
  const SearchCall* call;
  const SearchJob* job;
  KeyGranule* granules;

  __device__ void put(int at, KeyGranule granule) const {
    if (at >= call->search.n_granules) return;
    const int page_idx = granule.token / call->keys.page_len;
    granule.page = call->search.sequences.page_tables[job->sequence.table_begin + page_idx % job->sequence.table_len];
    granules[at] = granule;
  }

  // Writes sinks, and then the list's chunks, both below window_begin. A granule that the last sinks share with chunks has
  // the bits of both. Returns the number of granules.
  __device__ int write(int64_t sink_end, int64_t window_begin, int (&of_warps)[kNameWarps]) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int n_sinks = static_cast<int>((sink_end + kGranuleKeys - 1) / kGranuleKeys);
    for (int i = thread; i < n_sinks; i += kSearchThreads)
      put(i, {i * kGranuleKeys, granule_bits(int64_t{i} * kGranuleKeys, 0, sink_end), 0});
    __syncthreads();
    int n = n_sinks;
    const NamedUnits units = {chunks_of(job->own), __ldcg(&job->own->n), call->search.stages[call->stage].chunk_shift};
    for (int first = 0; first < units.n_items(); first += kSearchThreads) {
      KeyGranule granule = {};
      if (first + thread < units.n_items()) granule = find_granule(units, first + thread, sink_end, window_begin);
      const bool is_shared = granule.keys != 0 && n_sinks > 0 && granule.token == (n_sinks - 1) * kGranuleKeys;
      if (is_shared) atomicOr(&granules[n_sinks - 1].keys, granule.keys);
      const int at = place_in_block(granule.keys != 0 && !is_shared, of_warps, &n);
      if (granule.keys != 0 && !is_shared) put(at, granule);
    }
    return n;
  }
};

// Writes the key list of the block's queries for the current window, which moves on while lists stay. Where no stage is
// there, the range has all tokens.
__device__ inline void write_list(const SearchCall& call, const SearchJob& job, KeepRoom& room) {
  const DeviceSearch& search = call.search;
  const int64_t window_begin = job.own == nullptr ? 0 : max(job.p0 + 1 - search.window_len, int64_t{0});
  const int64_t list = int64_t{blockIdx.z} * call.n_lists + job.list;
  const GranuleWriter writer = {&call, &job, search.granules + list * search.n_granules};
  int n = 0;
  if (window_begin > 0) n = writer.write(min(search.sink_len, window_begin), window_begin, room.of_warps[0]);
  const DeviceKeys keys = {static_cast<int32_t>(list * search.n_granules), min(n, search.n_granules),
                           static_cast<int32_t>(window_begin), 0};
  const int n_sequences = (job.sequence.q_len + search.list_queries - 1) / search.list_queries;
  for (int i = static_cast<int>(threadIdx.x); i < n_sequences; i += kSearchThreads)
    search.keys[int64_t{job.sequence.first_list + i} * call.n_lists + job.list] = keys;
}

}  // namespace tandem::cuda
