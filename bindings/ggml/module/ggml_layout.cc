// SPDX-License-Identifier: MIT
#include "ggml_layout.h"

#include <cstring>

namespace tandem_ggml_module {
namespace {

constexpr char kBuiltFor[] = TANDEM_GGML_VERSION;
// ggml_tensor_overhead() counts this beside the tensor: ggml's record of an object in a context.
constexpr size_t kObjectBytes = 32;

bool is_named(const char* name, const char* expected) { return name != nullptr && std::strcmp(name, expected) == 0; }

bool numbers_are_equal() {
  return is_named(ggml_op_name(GGML_OP_FLASH_ATTN_EXT), "FLASH_ATTN_EXT") &&
         is_named(ggml_type_name(GGML_TYPE_F16), "f16") && is_named(ggml_type_name(GGML_TYPE_BF16), "bf16") &&
         is_named(ggml_type_name(GGML_TYPE_Q8_0), "q8_0") && is_named(ggml_type_name(GGML_TYPE_Q4_0), "q4_0");
}

bool members_are_found(ggml_backend_reg_t reg) {
  ggml_backend_dev_t device = reg->iface.get_device(reg, 0);
  ggml_backend backend = {};
  backend.device = device;
  return ggml_backend_dev_backend_reg(device) == reg && ggml_backend_get_device(&backend) == device &&
         ggml_tensor_overhead() == kObjectBytes + sizeof(ggml_tensor);
}

}  // namespace

std::string layout_mismatch(ggml_backend_reg_t reg) {
  const std::string built = std::string("libggml-tandem was built for ggml ") + kBuiltFor;
  if (!is_named(ggml_version(), kBuiltFor))
    return built + ", and this is ggml " + ggml_version() + " (commit " + ggml_commit() +
           "): build it with this one's headers";
  if (!numbers_are_equal() || !members_are_found(reg))
    return built + ", and this ggml has that version but other structs (commit " + ggml_commit() +
           "): build it with this one's headers";
  return "";
}

}  // namespace tandem_ggml_module
