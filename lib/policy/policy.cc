// SPDX-License-Identifier: MIT
#include "lib/policy/policy.h"

#include <cmath>
#include <cstring>
#include <string>

namespace tandem {
namespace {

constexpr const char* kTokens = "-1 or in 0 to 2^31 - 1";

Status out_of_range(const char* field, float value, const char* wanted) {
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, field, "%s = %.9g is not %s", field, static_cast<double>(value), wanted);
}

Status out_of_range(const char* field, int64_t value, const char* wanted) {
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, field, "%s = %lld is not %s", field, static_cast<long long>(value), wanted);
}

Status find_named(const char* field, const char* name, const Policy** policy) {
  for (const Policy* known : policy_table())
    if (std::strcmp(known->name, name) == 0) {
      *policy = known;
      return {};
    }
  std::string names;
  for (const Policy* known : policy_table()) names += names.empty() ? known->name : std::string(", ") + known->name;
  return fail(TANDEM_ERROR_NOT_FOUND, field, "%s = \"%.64s\" is not one of %s", field, name, names.c_str());
}

}  // namespace

LayerPolicies LayerPolicies::all_of(const Policy& policy, const std::vector<Layer>& layers) {
  LayerPolicies made;
  for (const Layer& layer : layers)
    made.policies_.push_back(layer.sliding_window > 0 && policy.make != nullptr ? &kPolicyAll : &policy);
  return made;
}

std::vector<bool> LayerPolicies::prune() const {
  std::vector<bool> prune;
  for (const Policy* policy : policies_) prune.push_back(policy->prunes);
  return prune;
}

std::vector<bool> LayerPolicies::follow_patterns() const {
  std::vector<bool> follow;
  for (const Policy* policy : policies_) follow.push_back(policy->follows_patterns);
  return follow;
}

Status LayerPolicies::resolve(const tandem_session_options& options, const std::vector<Layer>& layers,
                              LayerPolicies* policies) {
  const Policy* policy = nullptr;
  TANDEM_TRY(find_named("policy", options.policy != nullptr ? options.policy : "all", &policy));
  LayerPolicies made = all_of(*policy, layers);
  const auto n = static_cast<long long>(options.n_layer_policies);
  if (options.layer_policies == nullptr && n != 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "layer_policies", "layer_policies = NULL with n_layer_policies = %lld", n);
  if (options.layer_policies != nullptr && n != std::ssize(layers))
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_layer_policies", "n_layer_policies = %lld, the model has %zu layers", n,
                layers.size());
  for (size_t l = 0; l < static_cast<size_t>(n); ++l) {
    const char* name = options.layer_policies[l];
    const std::string field = element_name("layer_policies", static_cast<int64_t>(l));
    if (name == nullptr) return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = NULL", field.c_str());
    TANDEM_TRY(find_named(field.c_str(), name, &policy));
    made.policies_[l] = all_of(*policy, {layers[l]}).policies_[0];
  }
  *policies = std::move(made);
  return {};
}

int64_t counted_queries(float alpha) {
  constexpr int64_t kLeast = 64, kMost = 4096;
  if (alpha >= 1.0f) return kLeast;
  const double n = std::ceil(std::log(1e-6) / std::log1p(-static_cast<double>(alpha)));
  return std::clamp(n < static_cast<double>(kMost) ? static_cast<int64_t>(n) : kMost, kLeast, kMost);
}

Status resolve_policy_options(const tandem_session_options& options, PolicyOptions* resolved) {
  constexpr int64_t kMostSelection = int64_t{1} << 20;
  PolicyOptions made;
  if (options.window_tokens < -1 || options.window_tokens > INT32_MAX)
    return out_of_range("window_tokens", options.window_tokens, kTokens);
  if (options.window_tokens >= 0) made.window_len = options.window_tokens;
  if (options.sink_tokens < -1 || options.sink_tokens > INT32_MAX)
    return out_of_range("sink_tokens", options.sink_tokens, kTokens);
  if (options.sink_tokens >= 0) made.sink_len = options.sink_tokens;
  if (options.halo_tokens < -1 || options.halo_tokens > INT32_MAX)
    return out_of_range("halo_tokens", options.halo_tokens, kTokens);
  if (options.halo_tokens >= 0) made.halo_len = options.halo_tokens;
  if (options.selection_indices < 0 || options.selection_indices > kMostSelection)
    return out_of_range("selection_indices", options.selection_indices, "in 0 to 2^20");
  made.selection_len = options.selection_indices;
  if (!(options.alpha >= 0.0f && options.alpha <= 1.0f)) return out_of_range("alpha", options.alpha, "in 0 to 1");
  if (options.alpha > 0.0f) made.alpha = options.alpha;
  if (!(options.beta == -1.0f || options.beta >= 0.0f) || std::isinf(options.beta))
    return out_of_range("beta", options.beta, "-1 or a finite number from 0 on");
  if (options.beta >= 0.0f) made.beta = options.beta;
  *resolved = made;
  return {};
}

}  // namespace tandem
