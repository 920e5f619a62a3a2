// SPDX-License-Identifier: MIT
// Errors at the ABI: catches all exceptions and makes the error objects that callers own.
//
// If there is no memory for an error object, the caller gets a constant. There is one for each status, with a shorter
// message. Releasing a constant does nothing.
#include "lib/abi/api.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "lib/base/fp_modes.h"

struct tandem_error {
  int32_t status;
  int64_t underlying;
  const char* field;
  const char* message;
  tandem::ErrorInfo* info;  // owns field and message; null in the constants
};

namespace tandem {
namespace {

#define TANDEM_CONSTANT_ERROR(name) \
  { TANDEM_ERROR_##name, 0, "", "TANDEM_ERROR_" #name " (no memory for its message)", nullptr }

constinit tandem_error constant_errors[] = {
    TANDEM_CONSTANT_ERROR(INVALID_ARGUMENT),
    TANDEM_CONSTANT_ERROR(INVALID_HANDLE),
    TANDEM_CONSTANT_ERROR(INVALID_STATE),
    TANDEM_CONSTANT_ERROR(UNSUPPORTED),
    TANDEM_CONSTANT_ERROR(OUT_OF_MEMORY),
    TANDEM_CONSTANT_ERROR(CAPACITY),
    TANDEM_CONSTANT_ERROR(BUSY),
    TANDEM_CONSTANT_ERROR(NOT_FOUND),
    TANDEM_CONSTANT_ERROR(CANCELLED),
    TANDEM_CONSTANT_ERROR(TIMEOUT),
    TANDEM_CONSTANT_ERROR(DEVICE_LOST),
    TANDEM_CONSTANT_ERROR(BACKEND),
    TANDEM_CONSTANT_ERROR(IO),
    TANDEM_CONSTANT_ERROR(CORRUPT),
    TANDEM_CONSTANT_ERROR(SYSTEM),
    TANDEM_CONSTANT_ERROR(INTERNAL),
};

#undef TANDEM_CONSTANT_ERROR

tandem_error* constant_error(int32_t status) {
  for (tandem_error& error : constant_errors)
    if (error.status == status) return &error;
  return &constant_errors[std::size(constant_errors) - 1];
}

// Replaces control characters. Messages quote the caller's strings but must stay one line.
void make_printable(std::string* text) {
  std::replace_if(
      text->begin(), text->end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
}

int32_t report_error(const char* function, std::unique_ptr<ErrorInfo> info, tandem_error** error) {
  const int32_t status = info->code;
  if (error == nullptr) return status;
  *error = constant_error(status);
  if (info->message.find(info->field) == std::string::npos) info->message.insert(0, info->field + ": ");
  info->message.insert(0, std::string(function) + ": ");
  make_printable(&info->message);
  *error = new tandem_error{status, info->underlying, info->field.c_str(), info->message.c_str(), info.get()};
  info.release();
  return status;
}

int32_t report_constant(int32_t status, tandem_error** error) {
  if (error != nullptr) *error = constant_error(status);
  return status;
}

// Reports a failure, by a constant if there is no memory for an object.
int32_t try_report(const char* function, Status status, tandem_error** error) noexcept {
  const int32_t code = status.code();
  try {
    return report_error(function, status.take(), error);
  } catch (...) {
    return report_constant(code, error);
  }
}

Status refuse_child() {
  return fail(TANDEM_ERROR_INVALID_STATE, "process",
              "process = %d is a child made by fork(): threads and locks stayed behind", static_cast<int>(getpid()));
}

int32_t report_exception(const char* function, const char* what, tandem_error** error) noexcept {
  try {
    return try_report(function, fail(TANDEM_ERROR_INTERNAL, "", "a bug in Tandem: %s", what), error);
  } catch (...) {
    return report_constant(TANDEM_ERROR_INTERNAL, error);
  }
}

}  // namespace

int32_t run_guarded(const char* function, tandem_error** error, Status (*body)(void* context), void* context) noexcept {
  if (reinterpret_cast<uintptr_t>(error) % alignof(tandem_error*) != 0)
    return TANDEM_ERROR_INVALID_ARGUMENT;  // *error cannot hold an error object
  const DefaultFpModes modes;
  try {
    Status status = is_forked_child() ? refuse_child() : body(context);
    if (!status.ok()) return try_report(function, std::move(status), error);
    if (error != nullptr) *error = nullptr;
    return TANDEM_OK;
  } catch (const std::bad_alloc&) {
    try {
      return try_report(function, fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "out of memory"), error);
    } catch (...) {
      return report_constant(TANDEM_ERROR_OUT_OF_MEMORY, error);
    }
  } catch (const std::exception& exception) {
    return report_exception(function, exception.what(), error);
  } catch (...) {
    return report_exception(function, "unknown exception", error);
  }
}

Status refuse_null(const char* parameter) { return fail(TANDEM_ERROR_INVALID_ARGUMENT, parameter, "%s = NULL", parameter); }

Status refuse_misaligned(const void* pointer, size_t alignment, const char* parameter) {
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, parameter, "%s = %p is not aligned to %zu bytes", parameter, pointer,
              alignment);
}

Status require_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, field, "%s = %lld is not from %lld to %lld", field,
              static_cast<long long>(value), static_cast<long long>(low), static_cast<long long>(high));
}

Status require_tokens(const char* field, int64_t value) {
  if (value < 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, field, "%s = %lld is negative", field, static_cast<long long>(value));
  if (value > kMaxTokens)
    return fail(TANDEM_ERROR_CAPACITY, field, "%s = %lld is more than a sequence can hold (%lld)", field,
                static_cast<long long>(value), static_cast<long long>(kMaxTokens));
  return {};
}

Status require_host_stream(const void* stream) {
  if (stream == nullptr) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream", "stream = %p, must be NULL: nothing here runs on a device", stream);
}

Status check_text_buffer(const char* buffer, size_t buffer_bytes, const size_t* needed_bytes) {
  TANDEM_TRY(require_aligned(needed_bytes, "needed_bytes"));
  if (buffer != nullptr || buffer_bytes == 0) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "buffer", "buffer = NULL with buffer_bytes = %zu", buffer_bytes);
}

void write_text(const std::string& text, char* buffer, size_t buffer_bytes, size_t* needed_bytes) {
  if (needed_bytes != nullptr) *needed_bytes = text.size() + 1;
  if (buffer_bytes == 0) return;
  const size_t n = std::min(text.size(), buffer_bytes - 1);
  std::memcpy(buffer, text.data(), n);
  buffer[n] = '\0';
}

}  // namespace tandem

const char* tandem_error_message(const tandem_error* error) { return error == nullptr ? "" : error->message; }

const char* tandem_error_field(const tandem_error* error) { return error == nullptr ? "" : error->field; }

int32_t tandem_error_status(const tandem_error* error) { return error == nullptr ? TANDEM_OK : error->status; }

int64_t tandem_error_underlying(const tandem_error* error) { return error == nullptr ? 0 : error->underlying; }

void tandem_error_release(tandem_error* error) {
  if (error == nullptr || error->info == nullptr) return;
  delete error->info;
  delete error;
}
