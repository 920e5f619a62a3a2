// SPDX-License-Identifier: MIT
// The result of a step of a tool: nothing, or one line of text for the user.
#pragma once

#include <string>
#include <utility>

#include "tandem/tandem.h"

namespace tools {

class [[nodiscard]] Result {
 public:
  enum class Kind {
    kDone,
    kFailed,
    kUsage,       // the command line is wrong on every machine and with any files
    kInterrupted  // Ctrl-C or SIGTERM arrived
  };
  Result() = default;
  Result(std::string message, Kind kind) : kind_(kind), message_(std::move(message)) {}
  bool ok() const { return kind_ == Kind::kDone; }
  bool is_usage() const { return kind_ == Kind::kUsage; }
  bool is_interrupted() const { return kind_ == Kind::kInterrupted; }
  const std::string& message() const { return message_; }

 private:
  Kind kind_ = Kind::kDone;
  std::string message_;
};

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);
[[gnu::format(printf, 1, 2)]] Result refuse(const char* format, ...);
[[gnu::format(printf, 1, 2)]] Result usage_error(const char* format, ...);
[[gnu::format(printf, 1, 2)]] Result interrupted(const char* format, ...);
// Fails after Ctrl-C. Long work calls this before each of its parts, after generate::catch_interrupts().
Result check_interrupted();

// The last argument of calls into the library:
//   ErrorSlot error;
//   TOOL_TRY(error.check(tandem_engine_create(&engine, &options, error.out())));
class ErrorSlot {
 public:
  ErrorSlot() = default;
  ErrorSlot(const ErrorSlot&) = delete;
  ErrorSlot& operator=(const ErrorSlot&) = delete;
  ~ErrorSlot() { tandem_error_release(error_); }

  tandem_error** out();
  Result check(int32_t status) const;

 private:
  tandem_error* error_ = nullptr;
};

}  // namespace tools

#define TOOL_TRY(expression)                                                            \
  do {                                                                                  \
    if (::tools::Result try_result = (expression); !try_result.ok()) return try_result; \
  } while (0)
