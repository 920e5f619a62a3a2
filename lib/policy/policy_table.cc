// SPDX-License-Identifier: MIT
// All policies, by which sessions find them and in which order they are listed.
#include "lib/policy/policy.h"

namespace tandem {

std::span<const Policy* const> policy_table() {
  static constexpr const Policy* kPolicies[] = {
      &kPolicyAll,
      &kPolicyStreaming,
      &kPolicyHgca,
      &kPolicyHip,
      &kPolicyPatterns,
  };
  return kPolicies;
}

}  // namespace tandem
