// SPDX-License-Identifier: MIT
// The host part of an attend call: everything that the host does once the call's queries are available. For tensors in host
// memory the calling thread runs it. For device tensors each chunk has a host part, and the session's host thread runs it
// when the chunk's ticket arrives (lib/device/hand_over.h).
//
// clang-format off
//   lay out    the calling thread makes the jobs, with addresses, and the runs of all keys that are known by then. Where the
//              ticket may bring indices of named keys, jobs are made when the ticket arrives
//   take rows  copies new rows from the ticket's slot to the store
//   choose     adds selected keys to the jobs; the selection depends on the queries
//   attend     runs the jobs, then merges states over different keys where the host has several
//   observe    the selectors count the call's weights and keep its queries
// clang-format on
//
// After lay out, a host part holds only addresses and copies of data that later calls change. So it takes no lock of the
// cache. After lay out, choose() and observe() may allocate, and so may attend() where the ticket may bring indices.
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
  // Facts about the call.
  struct Facts {
    const Cache* cache = nullptr;
    const Layer* layer = nullptr;
    int32_t heads_per_kv = 1;          // as in NamedJobs
    const HeadKinds* heads = nullptr;  // null: the layer has no streaming heads
    int32_t layer_idx = 0;
    // If not 0, the calls are those of an earlier layer, n_ahead layers before this one, and this layer is planned like that
    // one. Such calls have no host part and select nothing.
    int32_t n_ahead = 0;
    Selector* selector = nullptr;
    bool selects = false;         // the policy selects keys head by head
    bool selector_names = false;  // or names them, one query block at a time
    bool keeps_maw = false;       // the selector observes each call
    bool is_speculative = false;
    bool q_is_bf16 = false;  // the caller's queries are exact in bf16
    // The keys that the caller names; null: the policy's. For a ticket this only says that keys are named: the slot brings
    // the indices.
    const NamedKeys* named = nullptr;
    bool may_name = false;  // the ticket may bring indices, which is known when it arrives
    int64_t sink_len = 0, window_len = 0;
    // [n_kv_heads] The keys of a single query on a device, where some head attends fewer than all; null: every head attends
    // all.
    const std::vector<DecodeKeys>* decode_keys = nullptr;

    bool operator==(const Facts& other) const = default;
  };

  // Clears the previous call and keeps its memory.
  void begin(const Facts& facts, const HostSlot& slot);
  // Makes the jobs. The cache's mutex is held. `calls` must not move. Their addresses (q, o, ...) are set, except for those
  // in a slot.
  void lay_out(std::span<SequenceCall> calls);
  TicketRows& rows() { return rows_; }
  // Returns the copies for call number `call` of a laid-out call, to be filled in. keeps_pages: also copies its page table.
  TicketCopy& keep_copy(size_t call, bool keeps_pages);
  bool has_jobs() const { return !jobs_.empty() || (facts_.may_name && has_cpu_part(calls_)); }
  bool selects() const { return facts_.selects && !calls_.empty(); }  // choose() adds keys
  // Returns whether observe() follows once the device has observed, which only calls on a device need.
  bool observes() const { return slot_.data != nullptr && facts_.keeps_maw && !calls_.empty(); }

  int64_t take_rows() const {  // returns the number of bytes
    return rows_.take(facts_.cache->engine().cpu(), facts_.cache->store().planes(facts_.layer_idx), slot_);
  }
  // May throw bad_alloc. For tensors in host memory the cache's mutex is held, shared.
  void choose();
  NamedJobs& named() { return named_; }  // for a call on host tensors; attend() follows their last batch
  bool brings_named() const;             // true if the ticket that has arrived brings indices of named keys
  Status attend(const Watch* watch);     // watch may be null
  void lose();                           // sets the states of unattended rows to NaN
  void observe();                        // may throw bad_alloc

  // Records the keys that the ticket's call has named, if any. Called when the ticket is answered. May throw bad_alloc.
  void note_named();
  // Bytes that cannot be counted earlier: keys that choose() has added and keys that a ticket's call has named.
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
  int32_t n_nodes_ = 1;  // NUMA nodes of the machine
  HostSlot slot_;
  std::span<SequenceCall> calls_;
  TicketRows rows_;
  std::vector<TokenRun> tokens_, host_tokens_, streaming_tokens_, narrow_tokens_;  // of the call that is laid out
  std::vector<KvRun> runs_, late_runs_;
  std::vector<AttendJob> jobs_;
  std::vector<size_t> first_runs_;  // [n_jobs] index into runs_
  struct SelectedJob {              // receives the keys that a KV head of a call has selected
    size_t job, call;
    int32_t kv_head;
  };
  std::vector<SelectedJob> selected_jobs_;
  std::vector<MergeJob> merges_;
  std::vector<const float*> states_;  // o and lse pointers of the merges, two of each per merge
  std::vector<TicketCopy> late_;      // [n_calls] or more
  std::vector<std::byte*> bases_;     // of the store's extents, for host parts that run later
  bool has_bases_ = false;            // bases_ belongs to this call
  ObserveScratch observed_;
  NamedJobs named_;
  std::vector<StoreView> views_;  // [n_calls]
  ReadBytes read_;
};

}  // namespace tandem
