// SPDX-License-Identifier: MIT
// lib/select/policy_table.cc with one line more.
#include "lib/select/policy.h"

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
