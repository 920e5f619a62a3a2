// SPDX-License-Identifier: MIT
// All policies, in the order in which they are listed. Sessions look up policies here.
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
