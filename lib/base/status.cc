// SPDX-License-Identifier: MIT
#include "lib/base/status.h"

#include <cstdio>

namespace tandem {
namespace {

Status make(int32_t code, int64_t underlying, const char* field, const char* format, va_list args) {
  char text[512];
  std::vsnprintf(text, sizeof text, format, args);
  return fail_with(code, underlying, field, text);
}

}  // namespace

Status&& Status::in(const char* context) && {
  if (info_) info_->message.insert(0, std::string(context) + ": ");
  return std::move(*this);
}

Status fail_with(int32_t code, int64_t underlying, const char* field, std::string message) {
  auto info = std::make_unique<ErrorInfo>();
  info->code = code;
  info->underlying = underlying;
  info->field = field;
  info->message = std::move(message);
  return Status(std::move(info));
}

std::string element_name(const char* array, int64_t idx) { return std::string(array) + "[" + std::to_string(idx) + "]"; }

Status fail(int32_t code, const char* field, const char* format, ...) {
  va_list args;
  va_start(args, format);
  Status status = make(code, 0, field, format, args);
  va_end(args);
  return status;
}

Status fail_system(int32_t code, int64_t underlying, const char* field, const char* format, ...) {
  va_list args;
  va_start(args, format);
  Status status = make(code, underlying, field, format, args);
  va_end(args);
  return status;
}

}  // namespace tandem
