// SPDX-License-Identifier: MIT
// The route "stream" (HeadInfer): keys outside the window cross the bus in pieces, and the device attends them.
//
//   send       copies a piece on a stream of the session's own, into the next free buffer
//   attend     attends the piece like a window. Its states are added to those of the window, which come first, in the order
//              of the pieces, so the sum does not depend on which data arrives first
//
// Streamed keys lie before the queries, unless the queries' tokens were in the cache before the call. The kernels keep
// causal order, as for the window (DeviceSequence::n_after). Sinks are merged once, at the end.
//
// The task is not finished while copies are in flight, so the pages do not change (lib/device/hand_over.h).
#pragma once

#include <memory>
#include <vector>

#include "lib/call/key_route.h"
#include "lib/pieces/stream_buffers.h"
#include "lib/pieces/stream_pieces.h"

namespace tandem {

class StreamRoute final : public KeyRoute {
 public:
  static Status make(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route);

  std::span<const StreamLayout> layouts() const override { return layouts_; }
  Status hold(const RouteHold& call) override;
  bool give_up(Cache& cache, const Status& why) override;
  void reserve(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken, Reservation* needs) const override;
  RouteBytes bytes(const SizeTerms& terms, const std::vector<Layer>& layers) const override;
  std::unique_ptr<RouteNotes> make_notes() const override;
  void choose(const RouteCall& call, std::span<const KeyPart> parts, const StreamLayout& layout) override;
  int64_t describe(const RouteCall& call, std::byte* upload, const std::byte* descriptors) override;
  Status begin(const RouteCall& call) override;
  Status attend(const RouteCall& call, const DeviceAttend& window, size_t piece, const HeadStates& to) override;
  TokenRange tokens_of(const RouteCall& call, size_t piece) const override;
  DeviceAccumulate states_of(const RouteCall& call, size_t piece) const override;
  void wait_after_failure(const RouteCall& call) noexcept override;

 private:
  struct Notes;
  StreamRoute(size_t idx, std::vector<StreamLayout> layouts, int64_t buffer_bytes)
      : KeyRoute(idx), layouts_(std::move(layouts)), buffer_bytes_(buffer_bytes) {}
  Notes& notes_of(const RouteCall& call) const;
  static void keep_ranges(const KeyPart& part, size_t first_piece, Notes* notes);
  void list_copies(const RouteCall& call, const StreamPiece& piece, TokenRange tokens, std::byte* buffer,
                   CopyList* copies) const;
  Status send_next(const RouteCall& call);

  const std::vector<StreamLayout> layouts_;
  const int64_t buffer_bytes_;
  std::unique_ptr<StreamBuffers> buffers_;  // null until a call needs them
};

}  // namespace tandem
