// SPDX-License-Identifier: MIT
#include "lib/policy/streaming_heads.h"

#include <algorithm>
#include <string>

#include "lib/base/options.h"

namespace tandem {
namespace {

Status check_flags(const tandem_session_options& options, const LayerPolicies& policies, const std::vector<Layer>& layers) {
  int64_t n_heads = 0;
  for (const Layer& layer : layers) n_heads += layer.n_kv_heads;
  if (options.n_streaming_heads != n_heads)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_streaming_heads",
                "n_streaming_heads = %lld, the layers have %lld KV heads in all",
                static_cast<long long>(options.n_streaming_heads), static_cast<long long>(n_heads));
  size_t i = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    if (policies[l].host_keys(false) != HostKeys::kAll)
      return fail(TANDEM_ERROR_UNSUPPORTED, "streaming_heads",
                  "streaming_heads with policy \"%s\" in layer %zu: they are for \"all\"", policies[l].name, l);
    for (int32_t h = 0; h < layer.n_kv_heads; ++h, ++i) {
      const uint8_t flag = options.streaming_heads[i];
      if (flag == 0 || (flag == 1 && layer.sliding_window == 0)) continue;
      const std::string field = element_name("streaming_heads", static_cast<int64_t>(i));
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = %d: %s", field.c_str(), flag,
                  flag == 1 ? "its layer has a sliding window" : "neither 0 nor 1");
    }
  }
  return {};
}

HeadKinds kinds_of(const Layer& layer, const uint8_t* flags) {
  HeadKinds kinds;
  kinds.retrieval = layer;
  const auto n_streaming = static_cast<int32_t>(std::count(flags, flags + layer.n_kv_heads, 1));
  if (n_streaming == 0) return kinds;
  kinds.flags.assign(flags, flags + layer.n_kv_heads);
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    const bool streams = flags[h] != 0;
    if (h == 0 || kinds.runs.back().streams != streams) kinds.runs.push_back({h, 0, streams});
    ++kinds.runs.back().n;
  }
  for (const HeadRun& run : kinds.runs)
    if (!run.streams) kinds.retrieval_runs.push_back(run);
  kinds.retrieval.n_kv_heads -= n_streaming;
  kinds.retrieval.n_q_heads = kinds.retrieval.n_kv_heads * layer.group_size;
  return kinds;
}

}  // namespace

Status resolve_streaming_heads(const tandem_session_options& options, const LayerPolicies& policies,
                               const std::vector<Layer>& layers, std::vector<HeadKinds>* kinds) {
  kinds->clear();
  if (options.streaming_heads == nullptr) {
    if (options.n_streaming_heads == 0) return {};
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "streaming_heads", "streaming_heads = NULL with n_streaming_heads = %lld",
                static_cast<long long>(options.n_streaming_heads));
  }
  TANDEM_TRY(check_flags(options, policies, layers));
  const uint8_t* flags = options.streaming_heads;
  std::vector<HeadKinds> made;
  for (const Layer& layer : layers) {
    made.push_back(kinds_of(layer, flags));
    flags += layer.n_kv_heads;
  }
  if (std::any_of(made.begin(), made.end(), [](const HeadKinds& one) { return one.any(); })) *kinds = std::move(made);
  return {};
}

SinksAndNewest sinks_and_newest(const PolicyOptions& options, int64_t sink_len, int64_t least, int64_t length,
                                bool on_device) {
  if (!on_device) return least > sink_len ? SinksAndNewest{sink_len, least} : SinksAndNewest{};
  const int64_t sink_end = length > options.window_len ? std::min(sink_len, length) : 0;
  return {sink_end, std::min(std::max({least, sink_end, int64_t{0}}), length)};
}

}  // namespace tandem
