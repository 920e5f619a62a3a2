// SPDX-License-Identifier: MIT
// Every key: exact attention. The window only says where keys are.
#include "lib/policy/policy.h"

namespace tandem {

const Policy kPolicyAll = {
    .name = "all",
    .keeps_maw = false,
    .host_keys = [](bool) { return HostKeys::kAll; },
    .make = nullptr,
    .bytes = nullptr,
};

}  // namespace tandem
