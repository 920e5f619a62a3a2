// SPDX-License-Identifier: MIT
// A policy says which keys a query attends. It has a name and a few facts. A new policy needs its file, a line and a
// declaration in the source of the table (lib/policy/policy_table.cc), and a line in lib/CMakeLists.txt. A policy that
// selects keys head by head also makes selectors (lib/policy/selector.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"
#include "lib/policy/head_patterns.h"
#include "lib/policy/pruning.h"

namespace tandem {

// Session options with defaults filled in.
struct PolicyOptions {
  int64_t window_len = 4096;
  int64_t sink_len = 64;
  float alpha = 0.3f;
  float beta = 1.0f;
  int64_t halo_len = 128;
  int64_t selection_len = 0;  // limit of the indices that a query of a planned step names for a KV head
  Pruning pruning;
  Patterns patterns;
};

// Keys outside the window that a call attends.
enum class HostKeys {
  kAll,
  kSinks,     // only the first sink_len; the window is exact for each query
  kSelected,  // the sinks and the selection
  kNamed,     // only the keys that the selector names for each block of queries, in the window as well
};

class Selector;
struct SelectorSetup;

// Upper bound of the host memory that a policy takes for a sequence of a layer, in bytes.
struct SelectorBytes {
  int64_t state = 0;
  int64_t selection = 0;  // copies of selected rows
  int64_t growth = 0;     // temporary, in one layer at a time
};

struct Policy {
  const char* name;
  bool keeps_maw;  // the policy keeps a MAW per query head and token: calls count the attention weights of their queries
  HostKeys (*host_keys)(bool is_append);
  // Makes a selector; null unless host_keys() may be kSelected or kNamed. `bytes` may be null: no memory is counted then.
  std::unique_ptr<Selector> (*make)(const SelectorSetup& setup);
  SelectorBytes (*bytes)(const Layer& layer, const PolicyOptions& options, size_t layer_idx, int64_t kv_len);

  bool prunes = false;            // selects keys by the records of PolicyOptions::pruning
  bool follows_patterns = false;  // selects keys by PolicyOptions::patterns

  bool names_keys() const { return host_keys(false) == HostKeys::kNamed; }
};

// The policy of each layer of a session, [n_layers]. A layer with a sliding window bounds its own cost: under every policy
// but "streaming" queries attend the whole sliding window, as under "all".
class LayerPolicies {
 public:
  // NOT_FOUND (policy, layer_policies[i]), INVALID_ARGUMENT (n_layer_policies, layer_policies).
  static Status resolve(const tandem_session_options& options, const std::vector<Layer>& layers, LayerPolicies* policies);
  static LayerPolicies all_of(const Policy& policy, const std::vector<Layer>& layers);

  const Policy& operator[](size_t layer_idx) const { return *policies_[layer_idx]; }
  std::vector<bool> prune() const;            // [n_layers], true for policies that prune
  std::vector<bool> follow_patterns() const;  // [n_layers], true for policies that follow patterns
  template <typename F>
  bool any(F is_wanted) const {
    return std::any_of(policies_.begin(), policies_.end(), [&](const Policy* policy) { return is_wanted(*policy); });
  }

 private:
  std::vector<const Policy*> policies_;
};

Status resolve_policy_options(const tandem_session_options& options, PolicyOptions* resolved);

// Tokens evicted at once. The window grows to window_len + evict_len - 1 tokens and then evicts evict_len. So the newest
// window_len tokens are always in the window, and evictions come in blocks.
constexpr int64_t evict_len(int64_t window_len, int64_t page_len) {
  const int64_t eighth = window_len / 8;
  return eighth < 1 ? 1 : eighth < page_len ? eighth : page_len;
}
// Returns where the window begins for a sequence of `length` tokens, before a call appends to it, if the window began at
// `begin`.
constexpr int64_t outside_window(int64_t window_len, int64_t page_len, int64_t length, int64_t begin = 0) {
  const int64_t block = evict_len(window_len, page_len), over = length - begin - window_len;
  return begin + (over >= block ? over / block * block : 0);
}

// Window length of a policy whose queries see only sinks and the newest tokens; -1 for other policies.
inline int64_t exact_window(const Policy& policy, const PolicyOptions& options) {
  return policy.host_keys(false) == HostKeys::kSinks ? options.window_len : -1;
}

// Number of tokens whose MAW is judged as they leave a window.
inline int64_t evicted_at_once(const Policy& policy, const PolicyOptions& options, int64_t page_len) {
  return policy.keeps_maw ? evict_len(options.window_len, page_len) : 0;
}

// Number of last queries whose weights count. The weights of older queries have faded below 1e-6.
int64_t counted_queries(float alpha);

std::span<const Policy* const> policy_table();
extern const Policy kPolicyAll, kPolicyStreaming, kPolicyHgca, kPolicyHip, kPolicyPatterns;

}  // namespace tandem
