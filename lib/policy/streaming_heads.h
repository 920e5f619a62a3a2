// SPDX-License-Identifier: MIT
// Streaming heads (Xiao et al., "DuoAttention"; HeadInfer's extension): KV heads of policy "all" whose queries see the first
// sink_len tokens and the window_len newest up to their own. The other KV heads of the layer, its retrieval heads, attend
// every key, and theirs alone are the keys outside the window that routes and planner know of.
//
//   on the host      a job of a streaming head has its sinks and its newest keys, instead of all
//   on a device      each KV head has a key list. A streaming head's range begins later and has a sliding window. One launch
//                    serves all heads, except in long appends with pieces. Sinks of streaming heads are the CPU's
//   over the bus     pieces are of retrieval heads alone
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"
#include "lib/policy/policy.h"

namespace tandem {

// KV heads side by side of one kind.
struct HeadRun {
  int32_t first = 0, n = 0;
  bool streams = false;
};

// Of a layer.
struct HeadKinds {
  std::vector<HeadRun> runs;  // empty: all are retrieval heads
  std::vector<HeadRun> retrieval_runs;
  std::vector<uint8_t> flags;
  Layer retrieval;  // the layer as if it had these heads alone; 0 heads where all stream

  bool any() const { return !runs.empty(); }
  bool streams(int32_t kv_head) const { return any() && flags[static_cast<size_t>(kv_head)] != 0; }
  int32_t n_streaming(const Layer& layer) const { return any() ? layer.n_kv_heads - retrieval.n_kv_heads : 0; }
};

// What queries see that see sinks and newest keys alone: [0, sink_end) and [newest_begin, length).
struct SinksAndNewest {
  int64_t sink_end = 0, newest_begin = 0;
};
// least: where the first query's newest keys begin. On a device the newest are another processor's, and sinks are not among
// them unless everything is; on the host both are one range where they touch.
SinksAndNewest sinks_and_newest(const PolicyOptions& options, int64_t sink_len, int64_t least, int64_t length,
                                bool on_device);

// kinds: [n_layers], or empty where no head streams. INVALID_ARGUMENT (n_streaming_heads, streaming_heads[i]), UNSUPPORTED
// (streaming_heads: with another policy than "all").
Status resolve_streaming_heads(const tandem_session_options& options, const LayerPolicies& policies,
                               const std::vector<Layer>& layers, std::vector<HeadKinds>* kinds);

// Of layer l: its kinds, where any head streams; what keys outside the window are of, and where its heads are.
inline const HeadKinds* kinds_of_layer(std::span<const HeadKinds> kinds, size_t l) {
  return kinds.empty() || !kinds[l].any() ? nullptr : &kinds[l];
}
inline const Layer& retrieval_layer(const HeadKinds* kinds, const Layer& layer) {
  return kinds == nullptr ? layer : kinds->retrieval;
}
// Runs of its heads; a layer without streaming heads is one.
class HeadRuns {
 public:
  static HeadRuns retrieval(const HeadKinds* kinds, const Layer& layer) {
    return {kinds != nullptr ? &kinds->retrieval_runs : nullptr, layer};
  }
  static HeadRuns all(const HeadKinds* kinds, const Layer& layer) {
    return {kinds != nullptr ? &kinds->runs : nullptr, layer};
  }
  std::span<const HeadRun> get() const { return runs_ == nullptr ? std::span(&whole_, 1) : std::span(*runs_); }

 private:
  HeadRuns(const std::vector<HeadRun>* runs, const Layer& layer) : runs_(runs), whole_{0, layer.n_kv_heads, false} {}

  const std::vector<HeadRun>* runs_;  // null: one, of all heads
  HeadRun whole_;
};

}  // namespace tandem
