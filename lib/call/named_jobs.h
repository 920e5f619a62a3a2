// SPDX-License-Identifier: MIT
// Jobs of a call whose keys are named (lib/call/named_keys.h), by the caller or by a selector: one for each KV head and
// block of queries that share their names, and one more for the keys that are further from their queries than RoPE is to see
// (SequenceCall::CappedKeys). They are made in batches, by the pool, as the runs of all of them may take more
// memory than the keys.
//
// Of a call on device tensors the jobs have the named keys that its window does not have, and of a row of indices that is
// wrong none: the device's part of the answer is NaN then.
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
    int32_t heads_per_kv = 1;  // of the layer's KV heads, those that read the same keys: above 1 in a layer by query heads
    int32_t layer_idx = 0;
    int32_t n_ahead = 0;                   // the calls are those of a layer so many before this one
    const NamedKeys* named = nullptr;      // the caller's; null: each sequence's selector has named its keys
    int64_t sink_len = 0, window_len = 0;  // of the session: what plus_window adds to the caller's
    bool q_is_bf16 = false, on_device = false, is_speculative = false;
    int32_t n_nodes = 1;
  };

  // calls: stay where they are; their addresses (q, o, lse, or host_o, host_lse on a device) are set.
  void begin(const Facts& facts, std::span<const SequenceCall> calls);
  // Likewise of a ticket, whose slot has brought the indices.
  void begin_brought(Facts facts, const HostSlot& slot, std::span<const SequenceCall> calls);
  static bool are_brought(const HostSlot& slot) { return header_of(slot).idx_heads > 0; }
  // Makes the next batch; false: all queries have had theirs. views: of the calls' sequences. May throw bad_alloc.
  bool next(std::span<const StoreView> views);
  bool had_all() const { return call_ == calls_.size(); }  // there is no next batch
  bool next(const Cache& cache);                           // its mutex is held, shared
  // Attends the batch. watch: null, or of the call, which is told of all batches.
  Status attend(const Watch* watch);

  // When all queries have had theirs: counts the keys of calls that have no jobs here, and notes what each sequence's last
  // query has named. May throw bad_alloc.
  void note();
  // Named keys of all jobs so far: outside the windows, and in them. On host tensors the jobs attend both.
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
    Visibility visibility{};  // of several queries
  };

  int64_t n_jobs() const;  // of the call
  bool has_jobs(const SequenceCall& call) const { return !facts_.on_device || call.has_cpu_part(); }
  // Whether the block of queries needs a second job, for its capped keys.
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
  Layer unrotated_;  // the layer, of capped keys
  NamedKeys brought_;
  std::span<const SequenceCall> calls_;
  std::span<const StoreView> views_;  // of the batch
  std::vector<StoreView> own_views_;
  size_t call_ = 0;  // the next job
  int64_t query_ = 0;
  int32_t kv_head_ = 0;
  int64_t n_done_ = 0, n_outside_ = 0, n_resident_ = 0;
  std::vector<Job> batch_;
  std::vector<KvRun> runs_;
  std::vector<AttendJob> jobs_;
};

}  // namespace tandem
