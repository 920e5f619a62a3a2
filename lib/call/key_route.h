// SPDX-License-Identifier: MIT
// A route by which keys outside the window come to the device. One object per session and route.
//
// The routes of the library are in lib/routes/route_table.cc. What computes over which keys is decided in
// lib/attend/split.h; a route is told which tokens are its own, cuts them into pieces, and attends the pieces one by one:
//
// clang-format off
//   try_out    measures what the planner has to know, once in an engine
//   hold       buffers and weights, for a call
//   reserve    what the call needs of the session's work space: numbers, asked by the memory plan as well
//   choose     of a chunk: pieces
//   describe   what kernels read of the pieces, behind the descriptors of the chunk
//   begin      sends the first pieces, before anything else of the chunk is launched
//   open       behind the window, before the first piece
//   attend     to a piece; sends a piece that has had no room before
//   close      behind the last piece
//   wait_after_failure    the device has done with all that the route asked of it
// clang-format on
//
// A route owns its buffers and streams. It sees the chunk and the session's device, and knows no session and no selector.
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

inline constexpr size_t kMostRoutes = 4;  // that the table has room for

// Keys of one sequence of a chunk that take a route, in these heads.
struct KeyPart {
  size_t call = 0;  // index in the chunk
  std::span<const HeadRun> heads;
  TokenRange tokens;
  // Where only some of the tokens are attended: these, in order. The others are not sent.
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

// What a route keeps of a chunk until all of it has been launched; in a task, and used again.
struct RouteNotes {
  virtual ~RouteNotes() = default;
};

// Where states of a chunk's tokens go: rows of n_heads query heads, of which these are the first.
struct HeadStates {
  float* o = nullptr;
  float* lse = nullptr;
  int64_t n_heads = 0;
};
void point_states(const HeadStates& to, DeviceAttend* call);
// The call for the KV heads [first_head, first_head + n_heads) alone. layer: filled with these heads alone.
DeviceAttend restrict_to_heads(const DeviceAttend& call, int32_t first_head, int32_t n_heads, Layer* layer);

// A chunk as routes see it.
struct RouteCall {
  DeviceSession& device;
  const Cache& cache;  // its store, which needs no lock for pages that the task keeps
  const Layer& layer;  // all heads
  size_t layer_idx;
  std::span<SequenceCall> calls;
  HandOverTask& task;
  void* stream;  // the caller's
};

// A call that asks for buffers. The cache's mutex is held exclusively.
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
  // Layouts of pieces of K and V, [n_layers]; empty: the route sends something else.
  virtual std::span<const StreamLayout> layouts() const { return {}; }

  virtual Status try_out(Cache&, DeviceSession*, size_t /*layer_idx*/) { return {}; }
  // What the planner has to know of pieces in a layer.
  virtual RebuildTerms terms(size_t /*layer_idx*/) const { return {}; }

  virtual Status hold(const RouteHold& call) = 0;
  // For lack of memory, of a session that asked for "auto": there is less to choose from then. Returns whether other routes
  // may go on.
  virtual bool give_up(Cache& cache, const Status& why) = 0;
  virtual void reserve(const SizeTerms& terms, const CallShape& shape, const RoutesTaken& taken,
                       Reservation* needs) const = 0;
  // Of buffers and weights, where calls of these layers take the route.
  virtual RouteBytes bytes(const SizeTerms& terms, const std::vector<Layer>& layers) const = 0;

  virtual std::unique_ptr<RouteNotes> make_notes() const = 0;
  // parts: those of this route. layout: of pieces of K and V. Says in the task how many pieces there are and what tells that
  // they have left the host.
  virtual void choose(const RouteCall& call, std::span<const KeyPart> parts, const StreamLayout& layout) = 0;
  // Writes to `upload` what is copied to `descriptors` on the device; returns how many bytes.
  virtual int64_t describe(const RouteCall& call, std::byte* upload, const std::byte* descriptors) = 0;
  virtual Status begin(const RouteCall& call) = 0;
  virtual Status open(const RouteCall&) { return {}; }
  virtual Status attend(const RouteCall& call, const DeviceAttend& window, size_t piece, const HeadStates& to) = 0;
  // The tokens of a piece.
  virtual TokenRange tokens_of(const RouteCall&, size_t /*piece*/) const { return {}; }
  // Which of the states of a chunk a piece has: rows and query heads.
  virtual DeviceAccumulate states_of(const RouteCall& call, size_t piece) const = 0;
  virtual Status close(const RouteCall&) { return {}; }
  virtual void wait_after_failure(const RouteCall& call) noexcept = 0;

 private:
  const size_t idx_;
};

// What routes are made for. All of it outlives them.
struct RouteSetup {
  const Device& device;
  const std::vector<Layer>& layers;
  const LayerPolicies& policies;
  const RouteOptions& options;
  int64_t extent_len = 0;  // tokens of the store's extents
  bool has_streaming_heads = false;
  const ProjectionWeights* weights = nullptr;  // null: of a memory plan
};

using Routes = std::array<std::unique_ptr<KeyRoute>, kMostRoutes>;
Status make_routes(const RouteSetup& setup, Routes* routes);
// Of those that send K and V; empty where nothing is ever sent.
std::span<const StreamLayout> layouts_of(const Routes& routes);

}  // namespace tandem
