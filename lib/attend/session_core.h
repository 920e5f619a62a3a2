// SPDX-License-Identifier: MIT
// What the parts of a session share: what it was asked for, what it knows of its cache's sequences, and its device.
//
// clang-format off
//   Session          what callers of the library see (lib/attend/session.h)
//   SessionStates    follows the cache; has what is known of each sequence (lib/attend/session_states.h)
//   Executor         attend calls (lib/attend/executor.h)
//   Steps            steps (lib/attend/steps.h)
// clang-format on
//
// A session is used by one thread at a time, but the cache may tell it about changes from another thread.
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

// What calls of one layer have in common.
struct SessionLayer {
  size_t idx;
  // The first layer that is like this one: types, dims, windows and policy are the same, neither has streaming heads, and
  // the policy does not prune. So calls of both take the same memory, and with the same tokens they see the same keys.
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
    int64_t reserved;  // by the sequence, at begin
    int64_t length;    // likewise, in every layer
  };
  bool is_open = false;
  std::vector<Sequence> sequences;
  // For device tensors: every layer has been prepared.
  std::atomic<bool> is_planned{false};
  void* stream = nullptr;
  int32_t next_layer = 0, n_appended = 0;  // of layers: rows are sent before anything else is
  int64_t n_tokens = 0, max_q_len = 0;
  uint64_t n_planned = 0;  // steps of the session, up to this one

  // A layer's append was launched and a later kernel of it was not.
  bool has_failed() const { return n_appended > next_layer; }
};

struct SessionCore {
  // NOT_FOUND, INVALID_ARGUMENT, UNSUPPORTED: what the options ask for.
  static Status create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                       std::unique_ptr<SessionCore>* core);
  explicit SessionCore(std::shared_ptr<Cache> of) : cache(std::move(of)), weights(cache->layers()) {}
  SessionCore(const SessionCore&) = delete;

  SizeTerms terms() const;
  HandOver& hand_over() const { return device->hand_over(); }
  // Where the window begins with `length` tokens, if it begins at window_begin before.
  int64_t evicted_to(int64_t window_begin, int64_t length) const {
    return outside_window(options.window_len, cache->page_len(), length, window_begin);
  }
  // n_layers: that are like this one, with it.
  void evict(int64_t* window_begin, int64_t length, int64_t n_layers = 1) {
    const int64_t before = *window_begin;
    *window_begin = evicted_to(before, length);
    sums.evicted_tokens += n_layers * (*window_begin - before);
  }
  uint32_t next_mark() { return ++last_mark; }  // for lists that no sequence keeps
  Status need_device();                         // makes what the session has there, once
  // How long the bus can work before a call's queries arrive, as earlier calls went, and how many bytes the buffers take.
  BusAhead bus_ahead(size_t layer_idx, int64_t n_queries) const;
  RebuildTerms rebuild_terms(size_t layer_idx, bool may) const;

  const std::shared_ptr<Cache> cache;
  LayerPolicies policies;
  PolicyOptions options;
  RouteOptions routes;
  bool keeps_awake = true;              // the CPU workers, between the calls of a step without a stream
  std::vector<HeadKinds> heads;         // [n_layers]; empty: no head streams
  std::vector<SessionLayer> layers;     // [n_layers]
  ProjectionWeights weights;            // of layers whose model has none
  Routes key_routes;                    // null where the session cannot use one
  bool refuses_streams = false;         // there was no memory for them, which is said once
  bool refuses_long = false;            // likewise, for long appends' own chunks
  bool refuses_long_searches = false;   // likewise, in layers whose keys are searched for
  bool has_told_of_graphs = false;      // that long appends have no room, as captured calls hold the memory
  bool refuses_row_copies = false;      // the device refused to pin the store: rows go by tickets, which is said once
  int64_t most_long_bytes = INT64_MAX;  // of what these take: there was no memory for more
  SessionStates* states = nullptr;
  bool has_selectors = false;  // of any layer
  // Calls that the tasks of a planned step share, [n_steps][n_layers]. The thread that meets the device reads them, so they
  // are declared before `device` and outlive it.
  std::vector<StepCalls> step_calls;
  // In device memory, [n_layers][2]: DevicePatterns::totals of each layer. Empty where the host makes all key lists of head
  // patterns. Kernels may add to them until `device` is gone, so they are declared before it.
  Buffer pair_totals;
  std::unique_ptr<DeviceSession> device;  // null until a call has device tensors
  std::unique_ptr<SideStream> searches;  // behind work that leaves something for the host to read; null until there was some
  std::unique_ptr<WindowStaging> staging;  // null until a window lacks rows
  AttendScratch scratch;                   // of calls on host tensors, and of whole calls on device tensors
  OpenStep step;
  tandem_session_stats sums = {};
  uint32_t last_mark = 1u << 31;  // so that no chunk's number looks like a mark, where lists of other searches lay
  SelectorSums selector_sums;
};

}  // namespace tandem
