// SPDX-License-Identifier: MIT
// A cache plus a policy: how its sequences are attended, and what was learned about each.
//
// A session is used by one thread at a time, but the cache may tell it about changes from another thread; states_ is
// therefore touched under the cache's mutex alone, and a sequence in flight cannot change.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "lib/cache.h"
#include "lib/device_session.h"
#include "lib/routes/call_plan.h"
#include "lib/routes/route.h"
#include "lib/routes/routes_taken.h"
#include "lib/select/policy.h"
#include "lib/select/selector.h"
#include "lib/sequence_state.h"
#include "lib/streaming_heads.h"
#include "lib/tensor.h"
#include "lib/weights.h"

namespace tandem {

// Arguments of an attend, checked: shapes agree with the model and with each other, nothing overlaps.
struct AttendArgs {
  int32_t layer_idx = 0;
  bool speculative = false;
  bool partial = false;
  int32_t n_sequences = 0;
  const int64_t* sequences = nullptr;   // [n_sequences]
  const int64_t* q_lens = nullptr;      // [n_sequences]
  const int32_t* parent_idx = nullptr;  // [n_tokens] or null
  TensorView q, o;                      // [n_tokens, n_q_heads, ...]
  const TensorView* k = nullptr;        // null: nothing is appended
  const TensorView* v = nullptr;        // null where V aliases K, or nothing is appended
  const TensorView* x = nullptr;        // null where the layer keeps no hidden states, or nothing is appended
  float* lse = nullptr;                 // null: not wanted
  int64_t lse_token_stride = 0;         // elements
  int64_t lse_head_stride = 0;
  bool on_device = false;   // every tensor is in the device's memory
  void* stream = nullptr;   // then; NULL is a stream too
  bool is_watched = false;  // then there is something in:
  Watch watch;
};

// The head whose keys are listed.
struct HeadOfSequence {
  int64_t sequence;
  int32_t layer_idx;
  int32_t kv_head;
  int32_t q_head_of_group;
};

// Kept keys, ascending, in arrays of the caller: as many as fit, counted all.
struct KeptKeys {
  int64_t* token_idx;  // [capacity]
  float* maw;          // [capacity], or null: not wanted
  int64_t capacity;
  int64_t n = 0;

  void put(int64_t token, float share) {
    if (n < capacity) {
      token_idx[n] = token;
      if (maw != nullptr) maw[n] = share;
    }
    ++n;
  }
};

// Calls that somebody might make: sequences of kv_lens tokens, the last q_lens of them new.
struct PlannedCalls {
  size_t layer_idx = 0;
  std::span<const int64_t> kv_lens;
  const int64_t* q_lens = nullptr;  // null: 1 each

  int64_t q_len(size_t i) const { return q_lens != nullptr ? q_lens[i] : 1; }
};

struct AttendScratch;

// Where W_K and W_V of a layer are that the model has not got.
struct ProjectionBlocks {
  std::shared_ptr<Weights> weights;  // null: nobody has said
  int32_t w_k = 0, w_v = 0;
};

class Session final : public CacheListener {
 public:
  static Status create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                       std::unique_ptr<Session>* session);
  ~Session() override;
  // The end of a session that nobody has any more: at once for whoever looks at the cache. What its device still does is
  // waited for by the thread that meets it, without the cache's mutex, and its memory is given back after that.
  static void let_go(std::unique_ptr<Session> session);

  Status attend(const AttendArgs& args);  // lib/attend.cc
  Status commit(int64_t sequence, const int64_t* kept_idx, int64_t n_kept);
  // stream: the step is planned for device tensors there (lib/step_device.cc); null: it is not.
  Status step_begin(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, void* stream);
  Status step_end(void* stream);
  Status stats(tandem_session_stats* stats);
  // Of a call that is not made (lib/routes/plan_ahead.cc). Fills all but struct_size.
  Status plan(const PlannedCalls& calls, tandem_route_plan* plan);
  Status selection(const HeadOfSequence& head, KeptKeys* kept);
  Status set_weights(size_t layer_idx, const ProjectionBlocks& blocks);  // lib/routes/recompute.cc

  Cache& cache() const { return *cache_; }
  const PolicyOptions& options() const { return options_; }
  const Policy& layer_policy(size_t layer_idx) const { return policies_[layer_idx]; }

  // Following the cache (lib/cache_listener.h).
  Status on_reserve(const Sequence& sequence, int64_t n_tokens, const Watch& watch) override;
  Status prepare_fork(const Sequence& from, int64_t fork_id) override;
  Status flush(const Sequence& sequence) override;
  void quiesce(const Sequence& sequence) override;
  void on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) override;
  void on_erase(const Sequence& sequence, int64_t first, int64_t n_tokens) override;
  void on_drop(int64_t id) override;
  bool is_settled() const override;
  bool has_lost() const override;
  bool has_open_step() const override { return plan_.is_open.load(std::memory_order_relaxed); }
  void settle() override;
  void for_rollbacks(const std::function<void(const Rollback&)>& note) const override;
  void restore_window(const Rollback& rollback) override;
  void on_settled() override;

 private:
  friend class AttendCall;
  Session(std::shared_ptr<Cache> cache, LayerPolicies policies, const PolicyOptions& options, const RouteOptions& routes);

  SequenceState* state(int64_t id) const;
  Status flush_layer(const Sequence& sequence, LayerState& state);
  int64_t evicted_to(const LayerState& state, int64_t length) const;  // where the window begins after evict()
  void evict(LayerState& state, int64_t length) const;
  // MAW of the window, which the device has the newest of: to where those of other tokens are. Nothing is under way.
  void fetch_maw(const Sequence& sequence);

  // A step whose every layer has been prepared, for device tensors.
  struct Plan {
    std::atomic<bool> is_open{false};
    void* stream = nullptr;
    int32_t next_layer = 0, n_appended = 0;  // of layers: rows are sent before anything else is
    int64_t n_tokens = 0, max_q_len = 0;

    bool has_failed() const { return n_appended > next_layer; }  // a layer's call has, when its rows were sent
  };
  // Of what is under way on the device, said once where calls may follow it: they start over. The cache's mutex is held.
  Status meet_fault(void* stream);
  SizeTerms terms() const;
  struct LongParts;
  Status try_long(const Layer& layer) const;
  Status plan_long(size_t layer_idx, int64_t kv_len, int64_t q_len, int64_t* n, LongParts* parts) const;
  Status plan_calls(const PlannedCalls& calls, bool may_stream, CallPlan* split, LongParts* parts);
  static void fill_plan(const Layer& layer, const CallPlan& split, const LongParts& parts, tandem_route_plan* plan);
  // Keys made of hidden states (lib/routes/recompute.cc).
  Status try_rebuild(size_t layer_idx);
  Status give_rebuilds_up(Status status);
  RebuildTerms rebuild_terms(size_t layer_idx, bool may) const;
  BusAhead bus_ahead(size_t layer_idx, int64_t n_queries) const;  // the most of a sequence
  bool may_gain(size_t layer_idx) const;
  Status check_weights(size_t layer_idx) const;  // they are known
  Status use_weights(size_t layer_idx, WeightsInUse* weights, DeviceProjection* projection) const;
  const HeadKinds* head_kinds(size_t layer_idx) const {  // null: the layer has no streaming heads
    return kinds_of_layer(heads_, layer_idx);
  }
  // Its heads that keys outside the window are of.
  const Layer& outside_layer(size_t layer_idx) const {
    return retrieval_layer(head_kinds(layer_idx), cache_->layers()[layer_idx]);
  }
  Status reserve_window(const Sequence& sequence, int64_t q_len, int64_t* n_pages);
  void leave();
  void forget_all();
  Status reserve_step(void* stream);
  Status plan_step(void* stream);
  Status end_plan(void* stream);

  struct StepSequence {
    int64_t id;
    int64_t q_len;
    int64_t reserved;              // by the sequence, at begin
    std::vector<int64_t> lengths;  // [n_layers] likewise, speculative tokens not counted
  };

  std::shared_ptr<Cache> cache_;
  LayerPolicies policies_;
  PolicyOptions options_;
  std::vector<std::unique_ptr<Selector>> selectors_;  // [n_layers]
  RouteOptions routes_;
  std::vector<HeadKinds> heads_;                // [n_layers]; empty: no head streams
  std::vector<StreamLayout> stream_layouts_;    // [n_layers]; empty: nothing is ever streamed
  std::vector<RebuildLayout> rebuild_layouts_;  // [n_layers]; empty: no keys are made of hidden states
  std::vector<ProjectionBlocks> blocks_;        // [n_layers] or empty
  bool refuses_streams_ = false;                // there was no memory for them, which is said once
  bool refuses_prefill_ = false;                // likewise, for long appends' own chunks
  int64_t most_prefill_bytes_ = INT64_MAX;      // of what these take: there was no memory for more
  std::unordered_map<int64_t, std::unique_ptr<SequenceState>> states_;
  std::unordered_map<int64_t, std::unique_ptr<SequenceState>> forgotten_;  // it may have memory of the device
  std::unique_ptr<AttendScratch> scratch_;
  std::unique_ptr<DeviceSession> device_;  // null until a call has device tensors
  bool keeps_awake_ = true;                // the CPU workers, between the calls of a step without a stream
  bool in_step_ = false;
  bool has_left_ = false;                // guarded by the cache's mutex
  std::atomic<bool> is_leaving_{false};  // since then, until nothing is under way
  std::vector<StepSequence> step_;
  Plan plan_;
  uint64_t n_planned_ = 0;  // steps
  tandem_session_stats sums_ = {};
  SelectorSums selector_sums_;
};

}  // namespace tandem
