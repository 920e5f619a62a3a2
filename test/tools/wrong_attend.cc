// SPDX-License-Identifier: MIT
// Loaded before the library. Its tandem_attend() calls the real one and then corrupts an output, as $TANDEM_TEST_FAULT
// selects.
#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "tandem/tandem.h"

namespace {

int64_t n_elements(const tandem_tensor& tensor) {
  int64_t n = 1;
  for (int32_t i = 0; i < tensor.n_dims; ++i) n *= tensor.shape[i];
  return n;
}

// Adds `offset` to one element of a bf16 tensor.
void spoil(const tandem_tensor& tensor, int64_t element, float offset) {
  auto* bits = static_cast<uint16_t*>(tensor.data) + element;
  const uint32_t before = static_cast<uint32_t>(*bits) << 16;
  float value;
  std::memcpy(&value, &before, sizeof value);
  value += offset;
  uint32_t after;
  std::memcpy(&after, &value, sizeof after);
  *bits = static_cast<uint16_t>(after >> 16);
}

}  // namespace

extern "C" int32_t tandem_attend(tandem_session* session, const tandem_attend_args* args, tandem_error** error) {
  using AttendFn = int32_t (*)(tandem_session*, const tandem_attend_args*, tandem_error**);
  static const auto attend = reinterpret_cast<AttendFn>(dlsym(RTLD_NEXT, "tandem_attend"));
  const int32_t status = attend(session, args, error);
  const char* variable = std::getenv("TANDEM_TEST_FAULT");
  const std::string fault = variable ? variable : "";
  if (fault == "o") spoil(*args->o, 0, 0.1f);
  if (fault == "last_head") spoil(*args->o, n_elements(*args->o) - 1, 0.1f);
  if (fault == "last_layer" && args->layer_idx == 1) spoil(*args->o, 0, 0.1f);
  if (fault == "nan") spoil(*args->o, 0, std::numeric_limits<float>::quiet_NaN());
  if (fault == "lse") static_cast<float*>(args->lse->data)[0] *= std::log2(std::exp(1.0f));
  return status;
}
