// SPDX-License-Identifier: MIT
// The state that the parts of a session share: its options, its knowledge of the cache's sequences, and its device.
//
// clang-format off
//   Session          the interface for callers (lib/attend/session.h)
//   SessionStates    follows the cache; has the state of each sequence (lib/attend/session_states.h)
//   Executor         attend calls (lib/attend/executor.h)
//   Steps            steps (lib/attend/steps.h)
// clang-format on
//
// One thread at a time uses a session, but the cache may report changes from another thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lib/call/attend_scratch.h"
#include "lib/call/key_route.h"
#include "lib/device/device_session.h"
#include "lib/pieces/projection_weights.h"
#include "lib/pieces/route_options.h"
#include "lib/pieces/window_staging.h"
#include "lib/policy/policy.h"
#include "lib/policy/selector.h"
#include "lib/policy/streaming_heads.h"
#include "lib/store/cache.h"

namespace tandem {

class SessionStates;

// Facts that all calls of one layer share.
struct SessionLayer {
  size_t idx;
  // The first layer like this one: same types, dims, windows and policy, no streaming heads in either, and a policy that
  // names no keys. Calls of both take the same memory, and for the same tokens they see the same keys.
  size_t like;
  const Layer& layer;
  Layer by_q_head;         // the layer as if each query head had a KV head of its own
  const HeadKinds* heads;  // null where the layer has no streaming heads
  const Layer& outside;    // the layer with only the heads that attend keys outside the window
  HeadRuns outside_runs, all_runs;
  const Policy& policy;
  std::unique_ptr<Selector> selector;
};

// The step that is open, if any.
struct OpenStep {
  struct Sequence {
    int64_t id;
    int64_t q_len;
    int64_t reserved;  // tokens that the sequence had reserved at begin
    int64_t length;    // tokens of the sequence at begin, in every layer
  };
  bool is_open = false;
  std::vector<Sequence> sequences;
  // The step is on device tensors, and every layer has been prepared.
  std::atomic<bool> is_planned{false};
  void* stream = nullptr;
  // next_layer: the layer to attend next. n_appended: layers whose append, a layer's first launch, has been launched.
  int32_t next_layer = 0, n_appended = 0;
  int64_t n_tokens = 0, max_q_len = 0;
  uint64_t n_planned = 0;  // steps that the session has planned, this one included

  // A layer's append was launched and a later kernel of it was not.
  bool has_failed() const { return n_appended > next_layer; }
};

struct SessionCore {
  // Resolves the options. NOT_FOUND, INVALID_ARGUMENT, UNSUPPORTED: an option cannot be used.
  static Status create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                       std::unique_ptr<SessionCore>* core);
  explicit SessionCore(std::shared_ptr<Cache> of) : cache(std::move(of)), weights(cache->layers()) {}
  SessionCore(const SessionCore&) = delete;

  SizeTerms terms() const;
  HandOver& hand_over() const { return device->hand_over(); }
  // Returns where the window begins at `length` tokens, if it begins at window_begin before.
  int64_t evicted_to(int64_t window_begin, int64_t length) const {
    return outside_window(options.window_len, cache->page_len(), length, window_begin);
  }
  // n_layers: the layers planned together, this one included.
  void evict(int64_t* window_begin, int64_t length, int64_t n_layers = 1) {
    const int64_t before = *window_begin;
    *window_begin = evicted_to(before, length);
    sums.evicted_tokens += n_layers * (*window_begin - before);
  }
  uint32_t next_mark() { return ++last_mark; }  // for lists that no sequence keeps
  Status need_device();                         // makes the session's device part, once
  // Returns how long the bus can work before a call's queries arrive, as earlier calls went, and the bytes that the buffers
  // take.
  BusAhead bus_ahead(size_t layer_idx, int64_t n_queries) const;
  RebuildTerms rebuild_terms(size_t layer_idx, bool may) const;

  const std::shared_ptr<Cache> cache;
  LayerPolicies policies;
  PolicyOptions options;
  RouteOptions routes;
  bool keeps_awake = true;              // keep the CPU workers awake between the calls of a step without a stream
  std::vector<HeadKinds> heads;         // [n_layers]; empty: there are no streaming heads
  std::vector<SessionLayer> layers;     // [n_layers]
  ProjectionWeights weights;            // for layers whose model has none
  Routes key_routes;                    // null where the session cannot use one
  bool refuses_streams = false;         // no memory for streams; logged once
  bool refuses_long = false;            // no memory for chunks of long appends; logged once
  bool refuses_long_searches = false;   // the same for layers whose keys are searched for
  bool has_told_of_graphs = false;      // logged: long appends have no room, as captured graphs hold the memory
  bool refuses_row_copies = false;      // the device refused to pin the store, so rows go by tickets; logged once
  int64_t most_long_bytes = INT64_MAX;  // limit for chunks of long appends, lowered after a lack of memory
  SessionStates* states = nullptr;
  bool has_selectors = false;  // some layer has a selector
  // Calls that the tasks of a planned step share, [n_steps][n_layers]. The session's host thread reads them. They are
  // declared before `device` and so outlive it.
  std::vector<StepCalls> step_calls;
  // In device memory, [n_layers][2]: DevicePatterns::totals of each layer. Empty if the host makes all key lists of head
  // patterns. Kernels may add to them until `device` is destroyed, so they are declared before it.
  Buffer pair_totals;
  std::unique_ptr<DeviceSession> device;   // null until a call has device tensors
  std::unique_ptr<SideStream> searches;    // a stream after all work whose results the host reads later; null until needed
  std::unique_ptr<WindowStaging> staging;  // null until a window lacks rows
  AttendScratch scratch;                   // of calls on host tensors, and of whole calls on device tensors
  OpenStep step;
  tandem_session_stats sums = {};
  // Starts high, so a chunk number that another search's lists have left in memory is not taken for a mark.
  uint32_t last_mark = 1u << 31;
  SelectorSums selector_sums;
};

}  // namespace tandem
