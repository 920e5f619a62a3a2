// SPDX-License-Identifier: MIT
// Errors about members of one layer: "layers[3].n_q_heads = 7 ...". Another prefix stands in for the index if the caller
// passes a single layer.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>

#include "lib/base/caller_pointer.h"
#include "lib/base/status.h"

namespace tandem {

class LayerRefusal {
 public:
  explicit LayerRefusal(int64_t layer_idx) {
    std::snprintf(prefix_, sizeof prefix_, "layers[%lld].", static_cast<long long>(layer_idx));
  }
  explicit LayerRefusal(const char* prefix) { std::snprintf(prefix_, sizeof prefix_, "%s", prefix); }
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
  template <typename T>
  Status misaligned(const T* array, const char* member) const {
    return require_aligned(array, (std::string(prefix_) + member).c_str());
  }

 private:
  char prefix_[40];
};

}  // namespace tandem
