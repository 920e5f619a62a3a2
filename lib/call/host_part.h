// SPDX-License-Identifier: MIT
// The host part of an attend call: everything that the host does for it once its queries are there. Where tensors are in
// host memory the calling thread runs it. Where they are in device memory each chunk of the call has a host part, and the
// thread that meets the device runs it when the chunk's ticket has arrived (lib/device/hand_over.h).
//
// clang-format off
//   lay out    the calling thread says what is attended: jobs with addresses, and the runs of all keys that are known by then.
//              Where the ticket may bring indices of named keys, jobs are made when it has arrived
//   take rows  new rows go from the ticket's slot to the store
//   choose     selected keys join the jobs: nobody knows what is selected before the queries are there
//   attend     the jobs; then states over different keys are merged, where the host has both
//   observe    the selectors learn from the call: weights and queries go to what they know of the sequences
// clang-format on
//
// From lay out on a host part holds addresses, and copies of what later calls change. So it takes no lock of the cache's.
// After that choose() and observe() may ask for memory, and attend() where the ticket may bring indices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/call/named_jobs.h"
#include "lib/call/sequence_call.h"
#include "lib/call/ticket_rows.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"
#include "lib/tables/device.h"

namespace tandem {

class HostPart {
 public:
  // Of the call.
  struct Facts {
    const Cache* cache = nullptr;
    const Layer* layer = nullptr;
    int32_t heads_per_kv = 1;          // as in NamedJobs
    const HeadKinds* heads = nullptr;  // null: the layer has no streaming heads
    int32_t layer_idx = 0;
    // Not 0: the calls are those of a layer so many before this one, and in a step it is planned like that. None of them has
    // a part for the host, and nothing is selected.
    int32_t n_ahead = 0;
    Selector* selector = nullptr;
    bool selects = false;         // the policy selects keys head by head
    bool selector_names = false;  // or names them, block of queries by block of queries
    bool keeps_maw = false;       // the selector learns of each call
    bool is_speculative = false;
    bool q_is_bf16 = false;  // the caller's queries are exact in bf16
    // The keys that the caller names; null: those of the policy. Of a ticket its slot brings the indices, and this says no
    // more than that there are some.
    const NamedKeys* named = nullptr;
    bool may_name = false;  // a ticket may bring indices; whether it does is known when it arrives
    int64_t sink_len = 0, window_len = 0;
    // [n_kv_heads] What a single query attends on a device, where some head attends less than all keys; null: all do.
    const std::vector<DecodeKeys>* decode_keys = nullptr;

    bool operator==(const Facts& other) const = default;
  };

  // Forgets the call before, and keeps its memory.
  void begin(const Facts& facts, const HostSlot& slot);
  // The cache's mutex is held. calls: stay where they are; their addresses (q, o, ...) are set, but for a slot's.
  void lay_out(std::span<SequenceCall> calls);
  TicketRows& rows() { return rows_; }
  // What the ticket needs of a call that is laid out, to be filled; with keeps_pages its page table is copied already.
  TicketCopy& keep_copy(size_t call, bool keeps_pages);
  bool has_jobs() const { return !jobs_.empty() || (facts_.may_name && has_cpu_part(calls_)); }
  bool selects() const { return facts_.selects && !calls_.empty(); }  // choose() has keys to add
  // On a device: observe() comes when the device has observed.
  bool observes() const { return slot_.data != nullptr && facts_.keeps_maw && !calls_.empty(); }

  int64_t take_rows() const {  // returns how many bytes these have
    return rows_.take(facts_.cache->engine().cpu(), facts_.cache->store().planes(facts_.layer_idx), slot_);
  }
  // May throw bad_alloc. Tensors in host memory: the cache's mutex is held, shared.
  void choose();
  NamedJobs& named() { return named_; }  // of a call on host tensors; attend() comes behind their last batch
  bool brings_named() const;             // the ticket that has arrived brings indices of named keys
  Status attend(const Watch* watch);     // null: nobody watches
  void lose();                           // the states of what was not attended become NaN
  void observe();                        // may throw bad_alloc

  // Of a ticket, when it is answered: what its call has named, if it has named keys. May throw bad_alloc.
  void note_named();
  // What nobody could count before: keys that choose() has added, and keys that a ticket's call has named.
  struct ReadBytes {
    int64_t host = 0, resident = 0;

    bool operator==(const ReadBytes& other) const = default;
  };
  const ReadBytes& read() const { return read_; }

 private:
  bool is_on_device() const { return slot_.data != nullptr; }
  bool streams(int32_t kv_head) const { return facts_.heads != nullptr && facts_.heads->streams(kv_head); }
  void lay_out_jobs();
  void begin_named();
  void point_to_slot(SequenceCall* call) const;
  void lay_out_window(const SequenceCall& call);
  void lay_out_for_device(const SequenceCall& call);
  AttendJob& add_job(const SequenceCall& call, int32_t kv_head, float* o, float* lse);
  void find_tokens(const SequenceCall& call, TokenRange tokens, std::vector<TokenRun>* found) const;
  void find_streaming_tokens(const SequenceCall& call);
  void add_runs(const SequenceCall& call, const std::vector<TokenRun>& found, int32_t kv_head);
  void add_merge(const SequenceCall& call, int32_t kv_head);
  void finish_runs();
  size_t call_idx_of(const SequenceCall& call) const { return static_cast<size_t>(&call - calls_.data()); }

  Facts facts_;
  int32_t n_nodes_ = 1;  // of the machine
  HostSlot slot_;
  std::span<SequenceCall> calls_;
  TicketRows rows_;
  std::vector<TokenRun> tokens_, host_tokens_, streaming_tokens_, narrow_tokens_;  // of the call that is laid out
  std::vector<KvRun> runs_, late_runs_;
  std::vector<AttendJob> jobs_;
  std::vector<size_t> first_runs_;  // [n_jobs] index into runs_
  struct SelectedJob {              // gets what a KV head of a call has selected
    size_t job, call;
    int32_t kv_head;
  };
  std::vector<SelectedJob> selected_jobs_;
  std::vector<MergeJob> merges_;
  std::vector<const float*> states_;  // o and lse pointers of the merges, two of each per job
  std::vector<TicketCopy> late_;      // [n_calls] or more
  std::vector<std::byte*> bases_;     // of the store's extents, for calls that are late
  bool has_bases_ = false;            // they are of this call
  ObserveScratch observed_;
  NamedJobs named_;
  std::vector<StoreView> views_;  // [n_calls]
  ReadBytes read_;
};

}  // namespace tandem
