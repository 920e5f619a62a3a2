// SPDX-License-Identifier: MIT
// The route "recompute" (KVPR): hidden states cross the bus, and the device makes K and V from them.
// lib/pieces/rebuilt_pieces.h describes the pieces and the buffers.
#pragma once

#include <memory>
#include <vector>

#include "lib/call/key_route.h"
#include "lib/pieces/rebuilt_pieces.h"

namespace tandem {

class RecomputeRoute final : public KeyRoute {
 public:
  static Status make(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route);

  Status try_out(Cache& cache, DeviceSession* device, size_t layer_idx) override;
  RebuildTerms terms(size_t layer_idx) const override;
  Status hold(const RouteHold& call) override;
  bool give_up(Cache& cache, const Status& why) override;
  void reserve(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken, Reservation* needs) const override;
  RouteBytes bytes(const SizeTerms& terms, const std::vector<Layer>& layers) const override;
  std::unique_ptr<RouteNotes> make_notes() const override;
  void choose(const RouteCall& call, std::span<const KeyPart> parts, const StreamLayout& layout) override;
  int64_t describe(const RouteCall& call, std::byte* upload, const std::byte* descriptors) override;
  Status begin(const RouteCall& call) override;
  Status open(const RouteCall& call) override;
  Status attend(const RouteCall& call, const DeviceAttend& window, size_t piece, const HeadStates& to) override;
  DeviceAccumulate states_of(const RouteCall& call, size_t piece) const override;
  Status close(const RouteCall& call) override;
  void wait_after_failure(const RouteCall& call) noexcept override;

 private:
  struct Notes;
  RecomputeRoute(size_t idx, const RouteSetup& setup, std::vector<RebuildLayout> layouts);
  Notes& notes_of(const RouteCall& call) const;
  const RebuildLayout& layout_of(const RouteCall& call) const { return layouts_[call.layer_idx]; }
  bool may_gain(size_t layer_idx) const;
  void cut(const RouteCall& call, const KeyPart& part, RebuiltPieces* pieces) const;
  static void order_pages(const RouteCall& call, RebuiltPieces* pieces);
  Status send(const RouteCall& call, const RebuiltPiece& piece);
  Status rebuild(const RouteCall& call, const RebuiltPiece& piece);
  Status attend_pages(const RouteCall& call, const DeviceAttend& window, const RebuiltPiece& piece, const HeadStates& to);

  const Device& device_;
  const std::vector<Layer>& layers_;
  const bool is_asked_;         // the session asked for this route
  const double rebuilt_share_;  // share of the moving keys that this route makes, if is_asked_
  const ProjectionWeights* const weights_;
  std::vector<RebuildLayout> layouts_;                // [n_layers]; empty: the route has been given up
  std::vector<const DeviceProjection*> projections_;  // [n_layers] in device memory; null until a call needs them
  std::unique_ptr<RebuildBuffers> buffers_;           // null until a call needs them
};

}  // namespace tandem
