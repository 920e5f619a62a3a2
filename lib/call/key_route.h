// SPDX-License-Identifier: MIT
// A route by which keys outside the window come to the device. A session has one object for each route.
//
// lib/routes/route_table.cc lists the routes. lib/attend/split.h decides which processor attends which keys. A route is
// given its tokens, cuts them into pieces and attends the pieces one by one:
//
// clang-format off
//   try_out    measures what the planner needs to know, once for an engine
//   hold       gets buffers and weights for a call
//   reserve    computes the call's share of the session's work space; the memory plan asks it too
//   choose     cuts a chunk's tokens into pieces
//   describe   writes the kernels' descriptors of the pieces, after the chunk's own descriptors
//   begin      sends the first pieces, before anything else of the chunk is launched
//   open       runs after the window's attention and before the first piece
//   attend     attends a piece; sends a piece that had no room before
//   close      runs after the last piece
//   wait_after_failure    waits until the device has finished all work of the route
// clang-format on
//
// A route owns its buffers and streams. It knows the chunk and the session's device, but no session and no selector.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/call/call_plan.h"
#include "lib/policy/streaming_heads.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/device.h"

namespace tandem {

class Cache;
class DeviceSession;
class ProjectionWeights;
struct CallShape;
struct Device;
struct HandOverTask;
struct Reservation;
struct RouteOptions;
struct RoutesTaken;
struct SequenceCall;
struct SequenceShape;
struct SizeTerms;
struct StreamLayout;

inline constexpr size_t kMostRoutes = 4;  // size of the table

// Keys of one sequence of a chunk that take a route, in the given heads.
struct KeyPart {
  size_t call = 0;  // index in the chunk
  std::span<const HeadRun> heads;
  TokenRange tokens;
  // If has_ranges: only these tokens are attended and sent, in ascending order.
  bool has_ranges = false;
  std::span<const TokenRange> ranges = {};
};

// One launch of attention over a piece of a route.
struct Launch {
  size_t route = 0;
  size_t piece = 0;
};
// Orders the pieces of all routes. Routes take turns in proportion to their pieces, so bus and device finish together.
void order_launches(const std::array<size_t, kMostRoutes>& n_pieces, std::vector<Launch>* launches);

// A route's notes on a chunk, kept until the whole chunk is launched. A task owns them and reuses them.
struct RouteNotes {
  virtual ~RouteNotes() = default;
};

// Where the states of a chunk's tokens go: rows of n_heads query heads, starting with these.
struct HeadStates {
  float* o = nullptr;
  float* lse = nullptr;
  int64_t n_heads = 0;
};
void point_states(const HeadStates& to, DeviceAttend* call);
// Returns `call` restricted to the KV heads [first_head, first_head + n_heads). Fills *layer with only these heads.
DeviceAttend restrict_to_heads(const DeviceAttend& call, int32_t first_head, int32_t n_heads, Layer* layer);

// A chunk, as routes see it.
struct RouteCall {
  DeviceSession& device;
  const Cache& cache;  // its store needs no lock for pages that the task keeps
  const Layer& layer;  // with all heads
  size_t layer_idx;
  std::span<SequenceCall> calls;
  HandOverTask& task;
  void* stream;  // the caller's
};

// A call that needs buffers. The cache's mutex is held exclusively.
struct RouteHold {
  DeviceSession& device;
  Cache& cache;
  const SizeTerms& terms;
  const CallShape& shape;
  std::span<SequenceShape> sequences;  // of the shape
  std::span<const SequenceCall> calls;
};

struct RouteBytes {
  int64_t buffers = 0, weights = 0;
};

class KeyRoute {
 public:
  explicit KeyRoute(size_t idx) : idx_(idx) {}
  virtual ~KeyRoute() = default;

  size_t idx() const { return idx_; }
  // Returns the layouts of pieces of K and V, [n_layers]; empty if the route sends something else.
  virtual std::span<const StreamLayout> layouts() const { return {}; }

  virtual Status try_out(Cache&, DeviceSession*, size_t /*layer_idx*/) { return {}; }
  // Returns what the planner needs to know about pieces in a layer.
  virtual RebuildTerms terms(size_t /*layer_idx*/) const { return {}; }

  virtual Status hold(const RouteHold& call) = 0;
  // Gives up the route for lack of memory, in a session with route "auto". Returns whether other routes may still be used.
  virtual bool give_up(Cache& cache, const Status& why) = 0;
  virtual void reserve(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken,
                       Reservation* needs) const = 0;
  // Returns the bytes of buffers and weights if calls of these layers take the route.
  virtual RouteBytes bytes(const SizeTerms& terms, const std::vector<Layer>& layers) const = 0;

  virtual std::unique_ptr<RouteNotes> make_notes() const = 0;
  // Cuts the tokens of `parts`, all of which take this route. layout: of pieces of K and V. Stores in the task the number of
  // pieces and the flag that tells when they have left the host.
  virtual void choose(const RouteCall& call, std::span<const KeyPart> parts, const StreamLayout& layout) = 0;
  // Writes to `upload` the bytes that are copied to `descriptors` on the device. Returns the number of bytes.
  virtual int64_t describe(const RouteCall& call, std::byte* upload, const std::byte* descriptors) = 0;
  virtual Status begin(const RouteCall& call) = 0;
  virtual Status open(const RouteCall&) { return {}; }
  virtual Status attend(const RouteCall& call, const DeviceAttend& window, size_t piece, const HeadStates& to) = 0;
  // Returns the tokens of a piece.
  virtual TokenRange tokens_of(const RouteCall&, size_t /*piece*/) const { return {}; }
  // Returns which of a chunk's states a piece has: rows and query heads.
  virtual DeviceAccumulate states_of(const RouteCall& call, size_t piece) const = 0;
  virtual Status close(const RouteCall&) { return {}; }
  virtual void wait_after_failure(const RouteCall& call) noexcept = 0;

 private:
  const size_t idx_;
};

// What routes are made from. All of it outlives them.
struct RouteSetup {
  const Device& device;
  const std::vector<Layer>& layers;
  const LayerPolicies& policies;
  const RouteOptions& options;
  int64_t extent_len = 0;  // tokens of the store's extents
  bool has_streaming_heads = false;
  const ProjectionWeights* weights = nullptr;  // null in a memory plan
};

using Routes = std::array<std::unique_ptr<KeyRoute>, kMostRoutes>;
Status make_routes(const RouteSetup& setup, Routes* routes);
// Returns the layouts of the route that sends K and V; empty if no route does.
std::span<const StreamLayout> layouts_of(const Routes& routes);

}  // namespace tandem
