// SPDX-License-Identifier: MIT
#include "tools/common/result.h"

#include <cstdarg>
#include <cstdio>

#include "examples/generate/interrupt.h"

namespace tools {
namespace {

std::string format_text(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  const int n = std::vsnprintf(nullptr, 0, format, arguments);
  std::string out(n > 0 ? static_cast<size_t>(n) : 0, '\0');
  std::vsnprintf(out.data(), out.size() + 1, format, again);
  va_end(again);
  return out;
}

}  // namespace

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string out = format_text(format, arguments);
  va_end(arguments);
  return out;
}

Result refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string message = format_text(format, arguments);
  va_end(arguments);
  return {std::move(message), Result::Kind::kFailed};
}

Result usage_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string message = format_text(format, arguments);
  va_end(arguments);
  return {std::move(message), Result::Kind::kUsage};
}

Result interrupted(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string message = format_text(format, arguments);
  va_end(arguments);
  return {std::move(message), Result::Kind::kInterrupted};
}

Result check_interrupted() { return generate::is_interrupted() ? interrupted("interrupted") : Result(); }

tandem_error** ErrorSlot::out() {
  tandem_error_release(error_);
  error_ = nullptr;
  return &error_;
}

Result ErrorSlot::check(int32_t status) const {
  if (status == TANDEM_OK) return {};
  if (status == TANDEM_ERROR_CANCELLED) TOOL_TRY(check_interrupted());
  return refuse("%s: %s", tandem_status_name(status), tandem_error_message(error_));
}

}  // namespace tools
