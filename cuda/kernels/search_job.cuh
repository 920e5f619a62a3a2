// SPDX-License-Identifier: MIT
// The job of a block in the launch of a stage. The block derives it from what earlier searches have left.
#pragma once

#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/search_call.h"

namespace tandem::cuda {

// The candidates of a stage: chunks [first, first + n), or n parts of the chunks that the stage before has kept.
struct Candidates {
  const int32_t* parents = nullptr;
  int first = 0, n = 0;
  int part_shift = 0;

  __device__ int chunk(int i) const {
    if (parents == nullptr) return first + i;
    return (__ldcg(parents + (i >> part_shift)) << part_shift) + (i & ((1 << part_shift) - 1));
  }
};

enum class SearchTask : int32_t { kNone, kWriteList, kKeepAll, kJudge };

struct SearchJob {
  DeviceSequence sequence;
  int64_t p0, end;   // the first query's token; the end of the candidates
  KeptList* own;     // the stage's list; null: no stage is there
  KeptList* before;  // list of the last earlier stage that is there; null: none is
  int place_before;  // index of that stage; -1: none is there
  Candidates from;
  uint32_t places;          // bit i: stage i is there
  int list;                 // index among the block's lists
  int first_head, n_heads;  // KV heads that the list serves
  int32_t is_last;          // 1: this is the last stage that is there
  int32_t normalises;       // 1: each row's log-sum-exp is subtracted from its scores
  SearchTask task;
};

__device__ inline int32_t* chunks_of(KeptList* list) { return reinterpret_cast<int32_t*>(list + 1); }

// Returns a stage's list.
__device__ inline KeptList* list_of(const SearchCall& call, const DeviceSequence& sequence, int stage, int list) {
  return reinterpret_cast<KeptList*>(sequence.kept_lists + call.search.stages[stage].lists_at +
                                     list * call.list_bytes[stage]);
}

__device__ inline bool is_there(const DeviceSearchStage& stage, int64_t n_seen) {
  return n_seen >= stage.from_len && (stage.to_len == 0 || n_seen < stage.to_len);
}

// Returns the last stage before stage `before` that is there, -1 if none is.
__device__ inline int last_place(uint32_t places, int before) {
  return 31 - __clz(static_cast<int>(places & ((1u << before) - 1)));
}

// The head of a list, which a block needs before it looks at the chunks. All fields are loaded at once.
struct ListHead {
  uint32_t mark = 0, places = 0;
  int64_t ran_at = -1;
  int n = 0;
};
__device__ inline ListHead load_head(const KeptList* list) {
  ListHead head;
  if (list == nullptr) return head;
  const uint2 made = __ldcg(reinterpret_cast<const uint2*>(&list->mark));
  head.ran_at = __ldcg(&list->ran_at);
  head.n = __ldcg(&list->n);
  head.mark = made.x, head.places = made.y;
  return head;
}

// True if the stage runs. If the stage before it has a later ran_at, that stage has run in this search, or in an earlier
// one after this stage ran.
__device__ inline bool is_due(const SearchCall& call, const SearchJob& job, const ListHead& own, const ListHead& before) {
  if (call.search.keeps_lists == 0) return true;
  const bool is_kept = (own.mark == job.sequence.kept_mark) & (own.places == job.places);
  return !is_kept | (before.ran_at > own.ran_at) | (job.p0 - own.ran_at >= call.search.stages[call.stage].interval);
}

// Finds the stage's candidates. Parents ascend, and only the last ones may have parts that begin at the candidates' end or
// behind it.
__device__ inline Candidates find_candidates(const SearchCall& call, const SearchJob& job, int n_before) {
  const int shift = call.search.stages[call.stage].chunk_shift;
  const int64_t end = (job.end + (int64_t{1} << shift) - 1) >> shift;  // in chunks
  Candidates from;
  if (job.before == nullptr) {
    from.first = static_cast<int>(call.search.sink_len >> shift);
    from.n = static_cast<int>(max(end - from.first, int64_t{0}));
    return from;
  }
  from.parents = chunks_of(job.before);
  from.part_shift = call.search.stages[job.place_before].chunk_shift - shift;
  for (int n = n_before; n > 0; --n) {
    const int64_t first = int64_t{__ldcg(from.parents + n - 1)} << from.part_shift;
    if (first >= end) continue;
    from.n = static_cast<int>((int64_t{n - 1} << from.part_shift) + min(end - first, int64_t{1} << from.part_shift));
    break;
  }
  return from;
}

// Called by one thread. Sets the parts of the job that follow from the sequence and the call alone.
__device__ inline void describe_job(const SearchCall& call, SearchJob& job) {
  const DeviceSearch& search = call.search;
  const bool shares = search.shares_lists != 0;
  const int head = static_cast<int>(blockIdx.y);
  job.task = SearchTask::kNone;
  job.list = shares ? 0 : head;
  job.first_head = shares ? 0 : head;
  job.n_heads = shares ? call.n_kv_heads : 1;
  job.own = job.before = nullptr;
  job.places = 0;
  if (job.sequence.q_len == 0) return;
  job.p0 = job.sequence.end - job.sequence.q_len;
  int64_t overlap = 0;
  for (int i = 0; i < search.n_stages; ++i) {
    if (!is_there(search.stages[i], job.p0 + 1)) continue;
    job.places |= 1u << i;
    if (search.keeps_lists != 0) overlap = max(overlap, int64_t{search.stages[i].interval} - 1);
  }
  job.end = job.p0 + 1 - search.window_len + overlap;
  if (job.places != 0) job.own = list_of(call, job.sequence, call.stage, job.list);
  job.is_last = last_place(job.places, search.n_stages) == call.stage;
  const bool is_exact = search.stages[call.stage].judge == TANDEM_JUDGE_EXACT;
  job.normalises = job.is_last && is_exact && call.group_size * job.n_heads > 1;
  job.place_before = last_place(job.places, call.stage);
  if (job.place_before >= 0) job.before = list_of(call, job.sequence, job.place_before, job.list);
}

// Called by the same thread, once the results of earlier launches are there. All blocks of a list come to the same result:
// its head changes only after all of them have read it, or in a way that leaves them no work.
__device__ inline void find_task(const SearchCall& call, SearchJob& job) {
  if (job.sequence.q_len == 0) return;
  const DeviceSearchStage& stage = call.search.stages[call.stage];
  const bool is_first_block = blockIdx.x == 0 && static_cast<int>(blockIdx.y) == job.first_head;
  if (job.places == 0 && call.stage == 0 && is_first_block) job.task = SearchTask::kWriteList;
  if ((job.places >> call.stage & 1) == 0) return;
  const ListHead own = load_head(job.own), before = load_head(job.before);
  if (!is_due(call, job, own, before)) {
    if (job.is_last != 0 && is_first_block) job.task = SearchTask::kWriteList;
    return;
  }
  job.from = find_candidates(call, job, before.n);
  if (int64_t{job.from.n} << stage.chunk_shift > stage.keep_len)
    job.task = SearchTask::kJudge;
  else if (is_first_block)
    job.task = SearchTask::kKeepAll;
}

// Return the places of the scores and of the sums of a KV head, for the block's queries.
__device__ inline float* scores_of(const SearchCall& call, int head) {
  return call.scores + (int64_t{blockIdx.z} * call.n_kv_heads + head) * call.head_scores;
}
__device__ inline float_pair* sums_of(const SearchCall& call, int head, int piece) {
  return call.sums + ((int64_t{blockIdx.z} * call.n_kv_heads + head) * call.n_pieces + piece) * call.most_rows;
}

// Called after all writes of the block. Returns true if all other blocks of the list have come here before.
__device__ inline bool is_last_block(const SearchCall& call, const SearchJob& job) {
  __shared__ int32_t is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* const counter = call.counters + int64_t{blockIdx.z} * call.n_lists + job.list;
    fence_device();
    is_last = atomicAdd(counter, 1) + 1 == call.n_pieces * job.n_heads;
    if (is_last != 0) *counter = 0;
    fence_device();
  }
  __syncthreads();
  return is_last != 0;
}

}  // namespace tandem::cuda
