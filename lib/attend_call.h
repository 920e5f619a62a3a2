// SPDX-License-Identifier: MIT
// One attend call. lib/attend.cc has its order of work, lib/attend_prepare.cc what comes before the first key is read.
#pragma once

#include "lib/attend_scratch.h"
#include "lib/device_session.h"
#include "lib/device_status.h"
#include "lib/routes/routes_taken.h"
#include "lib/session.h"
#include "lib/trace.h"

namespace tandem {

// Runs `action` at the end of a scope.
template <typename F>
class AtEnd {
 public:
  explicit AtEnd(F action) : action_(action) {}
  ~AtEnd() { action_(); }
  AtEnd(const AtEnd&) = delete;

 private:
  F action_;
};

// Where states of a call's tokens go: rows of n_heads query heads, of which these are the first.
struct HeadStates {
  float* o = nullptr;
  float* lse = nullptr;
  int64_t n_heads = 0;
};

// As kernels are told of a tensor; and n_rows rows of one.
DeviceRows rows_of(const TensorView& view);
TensorView from_row(const TensorView& view, int64_t row, int64_t n_rows);

// Rows of a call's tensors as a call of their own.
struct CutArgs {
  AttendArgs args;
  TensorView k, v, x;

  CutArgs(const AttendArgs& whole, int64_t first_row, int64_t n_rows);
  CutArgs(const CutArgs&) = delete;
};

// The call for the KV heads [first_head, first_head + n_heads) alone. layer: becomes theirs.
DeviceAttend of_heads(const DeviceAttend& call, int32_t first_head, int32_t n_heads, Layer* layer);
void point_states(const HeadStates& to, DeviceAttend* call);

inline constexpr int64_t kManyTokens = 4096;  // of a call: to go through them takes some time

class AttendCall {
 public:
  AttendCall(Session& session, const AttendArgs& args, AttendScratch& scratch);
  Status run();            // tensors in host memory
  Status run_on_device();  // lib/attend_device.cc
  // Of a step that is being planned (lib/step_device.cc).
  // streaming: descriptors for streaming heads, where the session has any.
  Status plan_layer(HandOverTask* task, DeviceSequence* to, DeviceSequence* streaming, int64_t* tables, int64_t* n_entries);
  void commit_chunk();

 private:
  // Before: everything that can fail and changes nothing. The cache's mutex is held exclusively from enter() on, except
  // while waiting for refreshes.
  Status enter();               // finds the sequences and marks them as in flight
  Status wait_for_refreshes();  // or until the call is cancelled
  Status prepare();
  void clear_scratch();
  Status check_state(const SequenceCall& call) const;
  void choose_keys(SequenceCall& call);
  void choose_streaming(SequenceCall& call);
  // Layers with heads of two kinds (lib/streaming_heads.cc).
  void choose_for_streaming_heads(SequenceCall& call);
  void describe_streaming_heads(const DeviceSequence* all, DeviceSequence* to) const;
  DeviceAttend of_run(const DeviceAttend& window, const HeadRun& run, Layer* layer) const;
  Status attend_window(const DeviceAttend& window, bool is_last);
  Status set_visibility(SequenceCall& call);
  void set_tree(SequenceCall& call);
  template <typename F>
  void lay_out(SequenceCall& call, F take) const;
  void lay_out_floats();
  void point_visibility();
  HostPart::Facts host_facts() const;

  // The work.
  void append_rows();
  void pack_queries();
  void write_outputs();

  // After: cannot fail.
  void commit_and_settle();
  void guess_tokens(const SequenceCall& call);
  void settle(SequenceCall& call);
  void count_bytes(const SequenceCall& call);
  void leave();

  // On a device. What has been done so far of a call that goes in chunks:
  struct ChunkPlace {
    size_t call = 0;    // of scratch_.calls
    int64_t query = 0;  // of that call
  };
  Status check_device_call(bool* captures) const;
  Status check_planned(bool captures) const;
  Status run_in_plan(bool captures);
  CallShape make_shape();
  Status reserve_on_device(int64_t* most);
  void take_back();
  void evict_before(SequenceCall* call);
  size_t first_of_last_kind() const;
  Status run_chunk(int64_t most, ChunkPlace* place);
  void begin_task(HandOverTask* task) const;
  Status attend_chunk(HandOverTask* task);
  void prepare_chunk(HandOverTask* task);
  Status fill_window(const SequenceCall& call);
  Status copy_to_window(const SequenceCall& call, TokenRange range);
  // Where the library rotates keys (lib/window_rope.cc).
  Status copy_rotated(const SequenceCall& call, TokenRange range);
  static void rotate_task(void* context, int64_t task_idx, int32_t worker_idx);
  // Speculation (lib/speculate_device.cc).
  Status check_guess() const;
  static void leave_guess_to_host(SequenceCall* call);
  int64_t describe_guess(std::byte* upload, int64_t bytes, const DeviceSequences& sequences);
  void keep_guess(const SequenceCall& call);
  // Where MAW are kept (lib/observe_device.cc).
  Status flush_host_appends(const SequenceCall& call);
  Status give_maw(const SequenceCall& call);
  void fade_newer(const SequenceCall& call);
  void prepare_selection();
  void describe_sequences(DeviceSequence* to, int64_t* tables, int64_t* n_entries) const;
  Status upload_descriptors(HandOverTask* task, DeviceSequences* sequences);
  template <typename Function, typename DeviceCall>
  Status ask_device(const char* name, Function function, const DeviceCall* call) const {
    const TraceRange range(name, args_.layer_idx, "resident");
    return call_device(session_.device_->device(), function, call, args_.stream);
  }
  Status launch(const DeviceSequences& sequences, bool merges, HandOverTask* task);
  // Who computes over the keys outside the window (lib/routes/choose.cc).
  Status take_routes(const CallShape& shape);
  Status give_streams_up(Status status);
  Status try_unknown_routes(int64_t longest);
  void choose_route(HandOverTask* task);
  bool pin_streamed();
  bool accept_pins(bool is_pinned);
  void describe_part(HandOverTask* task) const;
  // Keys that cross the bus (lib/routes/stream.cc).
  void wait_for_streamed_rows();
  void describe_pieces(const HandOverTask& task, DeviceSequence* to, int64_t* table) const;
  Status begin_stream(HandOverTask* task);
  Status mark_stream(const HandOverTask& task, size_t n_sent);
  Status send_piece(const HandOverTask& task, const StreamPiece& piece);
  Status send_next(const HandOverTask& task, size_t* n_sent);
  Status attend_piece(const DeviceAttend& window, const HandOverTask& task, const StreamPiece& piece,
                      const std::byte* buffer, const DeviceSequence* described, const HeadStates& to);
  Status attend_streamed(const DeviceAttend& window, const HandOverTask& task, size_t idx);
  Status add_part(DeviceAccumulate sum);
  // Keys that are made of hidden states (lib/routes/recompute.cc).
  Status take_rebuilds(const CallShape& shape);
  int64_t follow_positions(const Sequence& sequence, TokenRange tokens) const;
  void cut_rebuilt(const RebuildLayout& layout, size_t i, TokenRange tokens, RebuiltPieces* pieces) const;
  int64_t choose_rebuilt(HandOverTask* task);
  int64_t describe_rebuilt(const HandOverTask& task, std::byte* to) const;
  Status send_hidden(const HandOverTask& task, const RebuiltPiece& piece);
  void order_pages(RebuiltPieces* rebuilt) const;
  Status begin_rebuilt(HandOverTask* task);
  Status rebuild_piece(const DeviceProjection& projection, const RebuiltPiece& piece);
  Status attend_pages(const DeviceAttend& window, const HandOverTask& task, const RebuiltPiece& piece);
  Status attend_rebuilt(const DeviceAttend& window, const HandOverTask& task, const DeviceProjection& projection,
                        size_t idx);
  Status attend_moved(const DeviceAttend& window, const HandOverTask& task);
  Status merge_and_observe(const DeviceAppend& append);
  Status observe(const DeviceAppend& append, const float* lse);
  // Appends of more tokens than a ticket has, where keys are streamed (lib/routes/prefill.cc).
  struct Prefill;
  Status take_prefill(const CallShape& shape);
  bool take_less_for_prefill(const Status& status);
  int64_t prefill_len(const ChunkPlace& place) const;  // of the next chunk; 0: it is none of these
  Status run_prefill(int64_t n_tokens, ChunkPlace* place);
  Status attend_prefill(HandOverTask* task);
  void prepare_prefill(HandOverTask* task);
  void expect_pieces(HandOverTask* task) const;
  Status describe_prefill(HandOverTask* task, Prefill* prefill);
  Status launch_prefill(Prefill& prefill);
  Status hand_over_rows(const Prefill& prefill);
  Status attend_group(Prefill& prefill, const HeadRun& heads);
  void point_output(int32_t first_head, DeviceAttend* call) const;
  Status keep_window();
  float* row_lse() const;
  Status give_lse() const;
  Status count_tail();
  void prepare_count(HandOverTask* task);
  Status launch_count(const float* lse, HandOverTask* task);
  int64_t prefill_pages_begin() const;

  void pack_token(int64_t row);
  void write_token(int64_t row);
  void for_tokens(void (AttendCall::*visit)(int64_t row));

  Session& session_;
  Cache& cache_;
  const AttendArgs& args_;
  const Layer& layer_;
  const size_t layer_idx_;
  const HeadKinds* const heads_;  // null where the layer has no streaming heads
  const Layer& outside_;          // the heads that keys outside the window are of
  const HeadRuns outside_runs_, all_runs_;
  const Policy& policy_;
  const Backend& cpu_;
  AttendScratch& scratch_;
  const DeviceSequence* streaming_sequences_ = nullptr;  // on the device: descriptors for streaming heads
  RoutesTaken taken_;                                    // by the call, or by the chunk at hand
  // Of a speculative call on a device: its queries, and the positions of all tokens.
  struct {
    DeviceSequences queries;
    const int32_t* positions = nullptr;
  } guess_;
};

}  // namespace tandem
