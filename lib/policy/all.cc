// SPDX-License-Identifier: MIT
// Exact attention: queries attend every key. The window only says where keys lie.
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
