// SPDX-License-Identifier: MIT
// Errors are values. A Status is empty on success; otherwise it carries the error that the C ABI returns to the caller.
// Building an error may throw std::bad_alloc, which lib/abi/api.cc turns into TANDEM_ERROR_OUT_OF_MEMORY.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "tandem/tandem.h"

namespace tandem {

struct ErrorInfo {
  int32_t code = TANDEM_ERROR_INTERNAL;
  int64_t underlying = 0;  // errno or the code of the layer below
  std::string field;       // "k_type"; empty if no field applies
  std::string message;     // one line naming field and value
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  explicit Status(std::unique_ptr<ErrorInfo> info) : info_(std::move(info)) {}

  bool ok() const { return info_ == nullptr; }
  int32_t code() const { return info_ ? info_->code : TANDEM_OK; }
  const ErrorInfo& info() const { return *info_; }
  std::unique_ptr<ErrorInfo> take() { return std::move(info_); }
  // Puts "context: " before the message.
  Status&& in(const char* context) &&;

 private:
  std::unique_ptr<ErrorInfo> info_;
};

// True if the error is a lack of memory. Callers then do without the memory, or with less of it.
inline bool is_for_lack_of_memory(const Status& status) {
  return status.code() == TANDEM_ERROR_OUT_OF_MEMORY || status.code() == TANDEM_ERROR_CAPACITY;
}

// fail(TANDEM_ERROR_CAPACITY, "host_cap_bytes", "host_cap_bytes = %lld is less than ...", ...)
[[gnu::format(printf, 3, 4)]] Status fail(int32_t code, const char* field, const char* format, ...);
[[gnu::format(printf, 4, 5)]] Status fail_system(int32_t code, int64_t underlying, const char* field, const char* format,
                                                 ...);

// Like fail_system(), with a message of any length.
Status fail_with(int32_t code, int64_t underlying, const char* field, std::string message);

std::string element_name(const char* array, int64_t idx);  // name of an element as a field: "q_lens[3]"

}  // namespace tandem

#define TANDEM_TRY(expression)                                                           \
  do {                                                                                   \
    if (::tandem::Status try_status = (expression); !try_status.ok()) return try_status; \
  } while (0)
