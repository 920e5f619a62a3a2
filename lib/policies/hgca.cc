// SPDX-License-Identifier: MIT
// HGCA (Deng et al., "HGCA: hybrid GPU-CPU attention for long context LLM inference", section 3.2).
//
// Each query head keeps a moving average of the attention weight (MAW) that every key in the window received. A key leaving
// the window takes its MAW along and stays in the sparse set of its head when it was salient:
//
//   at eviction        maw > beta / window size
//   after an append    maw > beta / host size, for every key outside the window: dropped ones may come back
//
// The threshold is a fraction of what a uniform head would give each key, so a peaked head keeps few keys and a flat one
// many: no top-k. Query heads that share a KV head also share what is read: the KV head keeps the union of what they keep.
// Attention over the kept keys is exact over them and never rescaled.
//
// Beyond the paper: a strongly attended key also keeps the halo_len keys after it. A head that copies (an induction
// head) attends one key now and the next key at the next step, which nobody had reason to attend before; without the halo
// the first digit of a number is found again and the second is not. Strong keys are few, so the halo costs little.
#include <algorithm>

#include "lib/policies/policy.h"

namespace tandem {
namespace {

constexpr float kStrong = 0.01f;  // of the moving average: at most 100 keys of a head are

int64_t select(const SelectInput& input, int32_t* kept) {
  const PolicyOptions& options = *input.options;
  const int64_t size = std::max<int64_t>(1, input.eviction ? options.window_len : input.host_len);
  const float threshold = options.beta / static_cast<float>(size);
  int64_t n_kept = 0, halo_left = *input.halo_left;
  for (int64_t j = 0; j < input.n_tokens; ++j) {
    float most = 0.0f;
    for (int32_t g = 0; g < input.group_size; ++g) most = std::max(most, input.maw[g][j]);
    if (most > threshold && most > kStrong) halo_left = std::max(halo_left, options.halo_len + 1);
    if (most > threshold || halo_left > 0) kept[n_kept++] = static_cast<int32_t>(j);
    halo_left = std::max<int64_t>(0, halo_left - 1);
  }
  *input.halo_left = halo_left;
  return n_kept;
}

}  // namespace

const Policy kPolicyHgca = {
    .name = "hgca",
    .keeps_maw = true,
    .host_keys = [](bool is_append) { return is_append ? HostKeys::kAll : HostKeys::kSelected; },
    .select = select,
};

}  // namespace tandem
