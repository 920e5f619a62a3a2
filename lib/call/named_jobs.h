// SPDX-License-Identifier: MIT
// Jobs of a call whose keys are named (lib/call/named_keys.h) by the caller or by a selector. There is one job for each KV
// head and block of queries that share their names, and a second one where such a block has capped keys
// (SequenceCall::CappedKeys). The pool makes the jobs in batches, as the runs of all jobs may take more memory than the
// keys.
//
// For a call on device tensors the jobs attend only the named keys outside its window. A row of wrong indices gets no keys
// here; the device's part of its answer is NaN.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/call/sequence_call.h"

namespace tandem {

class Cache;

class NamedJobs {
 public:
  struct Facts {
    const Backend* cpu = nullptr;
    const Layer* layer = nullptr;
    int32_t heads_per_kv = 1;  // KV heads that read the same keys; above 1 in a layer by query heads
    int32_t layer_idx = 0;
    int32_t n_ahead = 0;                   // if not 0: the calls are those of the layer n_ahead layers before this one
    const NamedKeys* named = nullptr;      // the caller's; null: each sequence's selector has named its keys
    int64_t sink_len = 0, window_len = 0;  // of the session, for plus_window of the caller's names
    bool q_is_bf16 = false, on_device = false, is_speculative = false;
    int32_t n_nodes = 1;
  };

  // Begins a call's batches. The caller has set the addresses in `calls` (q, o, lse; on a device q, host_o, host_lse), and
  // does not move `calls` before note() has returned.
  void begin(const Facts& facts, std::span<const SequenceCall> calls);
  // Starts a call with the indices that a ticket's slot has brought.
  void begin_brought(Facts facts, const HostSlot& slot, std::span<const SequenceCall> calls);
  static bool are_brought(const HostSlot& slot) { return header_of(slot).idx_heads > 0; }
  // Makes the next batch. Returns false if no queries are left. views: of the calls' sequences. May throw bad_alloc.
  bool next(std::span<const StoreView> views);
  bool had_all() const { return call_ == calls_.size(); }  // no batch is left
  bool next(const Cache& cache);                           // the cache's mutex is held, shared
  // Attends the batch. watch: null, or the call's own, which gets the progress over all batches.
  Status attend(const Watch* watch);

  // Called after the last batch. Counts the keys of calls without jobs here, and records the keys that each sequence's last
  // query has named. May throw bad_alloc.
  void note();
  // Named keys of all jobs so far, outside and inside the windows. On host tensors the jobs attend both.
  int64_t n_outside() const { return n_outside_; }
  int64_t n_resident() const { return n_resident_; }

 private:
  static const SlotHeader& header_of(const HostSlot& slot) { return *reinterpret_cast<const SlotHeader*>(slot.data); }
  struct HeadQueries {  // a block of queries in one head
    int64_t query, n_queries;
    int32_t kv_head;
  };
  struct Job {
    size_t call;
    int64_t query, n_queries;
    int32_t kv_head;
    size_t first_run = 0, n_runs = 0;
    bool is_capped = false;
    int64_t n_keys = 0, n_resident = 0;
    Visibility visibility{};  // where the job has several queries
  };

  int64_t n_jobs() const;  // of the whole call
  bool has_jobs(const SequenceCall& call) const { return !facts_.on_device || call.has_cpu_part(); }
  // Returns whether the block of queries needs a second job for its capped keys.
  static bool has_capped_job(const SequenceCall& call, int64_t query, int64_t n_queries) {
    return call.capped.any_before(query + n_queries - 1);
  }
  const Layer& layer_of(const Job& job) const { return job.is_capped ? unrotated_ : *facts_.layer; }
  int64_t most_runs(size_t call, int64_t query, int32_t head) const;
  QueryNames names_of(const SequenceCall& call) const;
  SeenTokens seen_by(const SequenceCall& call, const QueryNames& names, const HeadQueries& of) const;
  template <typename Visit>
  void for_tokens(const SequenceCall& call, const HeadQueries& of, Visit visit) const;
  TokenRange window_of(const SequenceCall& call) const;
  int64_t n_in_window(const SequenceCall& call, TokenRange tokens) const;
  void fill(Job* job);
  void add_runs(TokenRange tokens, Job* job);
  AttendJob attend_job(const Job& job) const;

  Facts facts_;
  Layer unrotated_;  // the layer without RoPE, for capped keys
  NamedKeys brought_;
  std::span<const SequenceCall> calls_;
  std::span<const StoreView> views_;  // of the batch
  std::vector<StoreView> own_views_;
  size_t call_ = 0;  // of the next job
  int64_t query_ = 0;
  int32_t kv_head_ = 0;
  int64_t n_done_ = 0, n_outside_ = 0, n_resident_ = 0;
  std::vector<Job> batch_;
  std::vector<KvRun> runs_;
  std::vector<AttendJob> jobs_;
};

}  // namespace tandem
