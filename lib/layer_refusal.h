// SPDX-License-Identifier: MIT
// Refusals of members of one layer: "layers[3].n_q_heads = 7 ...", or "layer." where there is only one.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>

#include "lib/status.h"

namespace tandem {

class LayerRefusal {
 public:
  explicit LayerRefusal(int64_t layer_idx) {
    if (layer_idx >= 0)
      std::snprintf(prefix_, sizeof prefix_, "layers[%lld].", static_cast<long long>(layer_idx));
    else
      std::snprintf(prefix_, sizeof prefix_, "layer.");
  }
  const char* prefix() const { return prefix_; }
  [[gnu::format(printf, 4, 5)]] Status operator()(int32_t code, const char* member, const char* format, ...) const {
    char text[256];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    const std::string field = std::string(prefix_) + member;
    return fail(code, field.c_str(), "%s = %s", field.c_str(), text);
  }

 private:
  char prefix_[40];
};

// Arrays of the caller may lie anywhere.
template <typename T>
T read_element(const T* array, int64_t idx) {
  T value;
  __builtin_memcpy(&value, reinterpret_cast<const char*>(array) + idx * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

}  // namespace tandem
