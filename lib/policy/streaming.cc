// SPDX-License-Identifier: MIT
// Attention sinks and a sliding window (Xiao et al., "Efficient streaming language models with attention sinks"): each query
// sees the first sink_len tokens and the newest window_len up to its own, both in appends and in decode.
#include "lib/policy/policy.h"

namespace tandem {

const Policy kPolicyStreaming = {
    .name = "streaming",
    .keeps_maw = false,
    .host_keys = [](bool) { return HostKeys::kSinks; },
    .make = nullptr,
    .bytes = nullptr,
};

}  // namespace tandem
