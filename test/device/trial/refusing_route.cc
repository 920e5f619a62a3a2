// SPDX-License-Identifier: MIT
// A route that shows what adding one takes. It refuses every call whose keys would have to use it. The whole route is this
// file and one line of route_table.cc.
#include "lib/call/key_route.h"
#include "lib/pieces/route_options.h"
#include "lib/pieces/stream_pieces.h"

namespace tandem {
namespace {

struct RefusingRoute final : KeyRoute {
  using KeyRoute::KeyRoute;
  Status hold(const RouteHold&) override {
    return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"refusing\": it takes no keys");
  }
  bool give_up(Cache&, const Status&) override { return true; }
  void reserve(const SizeTerms&, const CallShape&, const RoutesTaken&, Reservation*) const override {}
  RouteBytes bytes(const SizeTerms&, const std::vector<Layer>&) const override { return {}; }
  std::unique_ptr<RouteNotes> make_notes() const override { return std::make_unique<RouteNotes>(); }
  void choose(const RouteCall&, std::span<const KeyPart>, const StreamLayout&) override {}
  int64_t describe(const RouteCall&, std::byte*, const std::byte*) override { return 0; }
  Status begin(const RouteCall&) override { return {}; }
  Status attend(const RouteCall&, const DeviceAttend&, size_t, const HeadStates&) override { return {}; }
  DeviceAccumulate states_of(const RouteCall&, size_t) const override { return {}; }
  void wait_after_failure(const RouteCall&) noexcept override {}
};

}  // namespace

Status make_refusing_route(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route) {
  if (setup.options.asks_for(idx)) *route = std::make_unique<RefusingRoute>(idx);
  return {};
}

}  // namespace tandem
