// SPDX-License-Identifier: MIT
// Streaming heads (Xiao et al., "DuoAttention"; HeadInfer's extension) under policy "all". Queries of a streaming KV head
// see the first sink_len tokens and the newest window_len up to their own. The layer's other KV heads are retrieval heads
// and attend every key. Routes and planner know only the retrieval heads' keys outside the window.
//
//   on the host      a job of a streaming head has its sinks and newest keys instead of all keys
//   on a device      each KV head has a key list. A streaming head's range begins later and has a sliding window. One launch
//                    serves all heads, except in long appends with pieces. The CPU attends the streaming heads' sinks
//   over the bus     pieces have retrieval heads only
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"
#include "lib/policy/policy.h"

namespace tandem {

// Neighbouring KV heads of one kind.
struct HeadRun {
  int32_t first = 0, n = 0;
  bool streams = false;
};

// The kinds of a layer's KV heads.
struct HeadKinds {
  std::vector<HeadRun> runs;  // empty: all are retrieval heads
  std::vector<HeadRun> retrieval_runs;
  std::vector<uint8_t> flags;
  Layer retrieval;  // the layer with its retrieval heads only; 0 heads if all stream

  bool any() const { return !runs.empty(); }
  bool streams(int32_t kv_head) const { return any() && flags[static_cast<size_t>(kv_head)] != 0; }
  int32_t n_streaming(const Layer& layer) const { return any() ? layer.n_kv_heads - retrieval.n_kv_heads : 0; }
};

// Keys of queries that see only sinks and newest keys: [0, sink_end) and [newest_begin, length).
struct SinksAndNewest {
  int64_t sink_end = 0, newest_begin = 0;
};
// least: where the first query's newest keys begin. On a device, one processor attends the sinks and another the newest
// keys. So the range of newest keys leaves out the sinks, unless it covers all keys. On the host, ranges that touch become
// one: sink_end and newest_begin are then 0.
SinksAndNewest sinks_and_newest(const PolicyOptions& options, int64_t sink_len, int64_t least, int64_t length,
                                bool on_device);

// kinds: [n_layers], or empty if no head streams. INVALID_ARGUMENT (n_streaming_heads, streaming_heads[i]), UNSUPPORTED
// (streaming_heads: with a policy other than "all").
Status resolve_streaming_heads(const tandem_session_options& options, const LayerPolicies& policies,
                               const std::vector<Layer>& layers, std::vector<HeadKinds>* kinds);

// Kinds of layer l, null if none of its heads stream. retrieval_layer(): the layer whose keys outside the window count.
inline const HeadKinds* kinds_of_layer(std::span<const HeadKinds> kinds, size_t l) {
  return kinds.empty() || !kinds[l].any() ? nullptr : &kinds[l];
}
inline const Layer& retrieval_layer(const HeadKinds* kinds, const Layer& layer) {
  return kinds == nullptr ? layer : kinds->retrieval;
}
// Runs of a layer's heads. A layer without streaming heads is one run.
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

  const std::vector<HeadRun>* runs_;  // null: one run of all heads
  HeadRun whole_;
};

}  // namespace tandem
