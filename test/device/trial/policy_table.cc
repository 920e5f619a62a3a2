// SPDX-License-Identifier: MIT
// lib/policy/policy_table.cc with one more line.
#include "lib/policy/policy.h"

namespace tandem {

extern const Policy kPolicyRandomBlocks;

std::span<const Policy* const> policy_table() {
  static constexpr const Policy* kPolicies[] = {
      &kPolicyAll,
      &kPolicyStreaming,
      &kPolicyHgca,
      &kPolicyRandomBlocks,
  };
  return kPolicies;
}

}  // namespace tandem
