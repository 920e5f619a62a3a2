// SPDX-License-Identifier: MIT
// An attend call, or a chunk of one, while it runs: its arguments and the decisions made so far. Data only;
// lib/attend/executor.h has the order of work.
#pragma once

#include "lib/attend/session_core.h"
#include "lib/call/call_args.h"
#include "lib/routes/routes_taken.h"

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

inline constexpr int64_t kManyTokens = 4096;  // of a call: looping over so many takes noticeable time

struct Call {
  Call(SessionCore& core, const AttendArgs& asked, AttendScratch& work, HandOverTask* ticket = nullptr)
      : session(core), args(asked), facts(core.layers[static_cast<size_t>(asked.layer_idx)]), scratch(work), task(ticket) {}
  Call(const Call&) = delete;

  Cache& cache() const { return *session.cache; }
  const Layer& layer() const { return facts.layer; }
  // Returns the layer by which rows of queries and outputs in host memory are ordered.
  const Layer& row_layer() const { return by_q_head ? facts.by_q_head : facts.layer; }
  const Backend& cpu() const { return session.cache->engine().cpu(); }
  DeviceSession& device() const { return *session.device; }
  std::vector<SequenceCall>& calls() const { return scratch.calls; }
  bool appends() const { return args.k != nullptr; }
  // Returns whether the caller or the selector names keys.
  bool names_keys() const { return args.named != nullptr || facts.policy.names_keys(); }
  // Returns whether the ticket brings indices of named keys, or may do so in a planned step.
  bool may_name() const {
    return task != nullptr && (args.named != nullptr || (task->step > 0 && session.terms().names_in_steps(facts.idx)));
  }
  HostPart::Facts host_facts() const {
    return {.cache = &cache(),
            .layer = &row_layer(),
            .heads_per_kv = by_q_head ? layer().group_size : 1,
            .heads = facts.heads,
            .layer_idx = args.layer_idx,
            .selector = facts.selector.get(),
            .selects = facts.policy.make != nullptr && !facts.policy.names_keys(),
            .selector_names = facts.policy.names_keys() && !args.on_device,
            .keeps_maw = facts.policy.keeps_maw,
            .is_speculative = args.speculative,
            .q_is_bf16 = args.q.dtype == TANDEM_BF16,
            .named = args.named != nullptr ? &scratch.named : nullptr,
            .may_name = may_name(),
            .sink_len = session.options.sink_len,
            .window_len = session.options.window_len,
            .decode_keys = narrow_decode_keys()};
  }
  // Returns the keys of decode calls where head patterns narrow them, for calls on a device; else null.
  const std::vector<DecodeKeys>* narrow_decode_keys() const {
    if (!args.on_device || !facts.policy.follows_patterns) return nullptr;
    const PatternsOfLayer& patterns = session.options.patterns[facts.idx];
    return patterns.narrows_decode() ? &patterns.decode : nullptr;
  }
  // Returns the address of a page of whole_layer in the form that page tables of windows use.
  int64_t page_of_whole_layer(int64_t token) const {
    const WindowGeometry::LayerPlanes& planes = device().geometry().layers[facts.idx];
    return reinterpret_cast<intptr_t>(whole_layer + token / kDevicePageLen * planes.bytes) - planes.at[0];
  }
  RouteCall route_call() const { return {device(), cache(), layer(), facts.idx, scratch.calls, *task, args.stream}; }

  SessionCore& session;
  const AttendArgs& args;
  const SessionLayer& facts;
  AttendScratch& scratch;
  HandOverTask* const task;  // of a chunk on device tensors; null for a layer of a planned step once the step has begun
  RoutesTaken taken;         // by the call or the chunk
  int64_t most_queries = 0;  // of one sequence in one chunk
  int64_t n_layers = 1;      // in a planned step: this layer and the layers that follow its plan
  DeviceLists lists;         // key lists in device memory; null where each KV head attends the whole window
  // queries: each query described as a sequence of its own, in a speculative call on a device or where the caller names
  // keys. Where the selector names keys: the parts of an append's query blocks (lib/attend/search_call.h). blocks: these
  // query blocks.
  DeviceSequences queries, blocks;
  // In device memory. Set where the device makes an append's key lists from head patterns (lib/attend/pattern_call.h).
  const DeviceHeadPattern* head_patterns = nullptr;
  // In device memory: pages of all keys of the layer, if a long append has brought them (lib/attend/whole_layer.h).
  std::byte* whole_layer = nullptr;
  const int32_t* positions = nullptr;  // of all tokens of a speculative call on a device
  // The indices that the caller names, for calls on a device; in the caller's memory. has_host_idx: they are in host memory
  // until send_indices() has copied them.
  DeviceIndices indices;
  bool has_host_idx = false;
  bool by_q_head = false;                   // each query head has its own keys: an append that follows head patterns
  bool goes_short = false;                  // long chunks are not used, for lack of memory
  int64_t first_row = 0;                    // the row of the call that is the chunk's first row
  int64_t most_tokens = kMostTicketTokens;  // of a chunk
};

}  // namespace tandem
