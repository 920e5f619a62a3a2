// SPDX-License-Identifier: MIT
// A failure as a value: one line that names the file or flag and the field; empty if nothing failed. A usage failure (exit
// code 2) is a command line that is wrong on every machine and with all files. An interruption is Ctrl-C or SIGTERM
// (interrupt.h).
#ifndef EXAMPLES_GENERATE_FAILURE_H_
#define EXAMPLES_GENERATE_FAILURE_H_

#include <tandem/tandem.h>

#include <string>
#include <utility>

namespace generate {

struct [[nodiscard]] Failure {
  std::string message;
  bool is_usage = false, is_interruption = false;
  explicit operator bool() const { return !message.empty(); }
  // False after an interruption too, which the caller handles: figures so far are still shown.
  bool is_error() const { return *this && !is_interruption; }
};

inline Failure as_usage(Failure failure) {
  failure.is_usage = true;
  return failure;
}

// Turns the result of a tandem_* call into a Failure and releases the error object.
inline Failure from_tandem(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) return {};
  Failure failure{error ? tandem_error_message(error) : ""};
  if (!failure) failure.message = tandem_status_name(status);
  tandem_error_release(error);
  return failure;
}

}  // namespace generate

#define GENERATE_TRY(expression)                                                \
  do {                                                                          \
    if (::generate::Failure failure_ = (expression); failure_) return failure_; \
  } while (false)

// GENERATE_TANDEM(tandem_attend(session, &args, &error)): `error` is declared here.
#define GENERATE_TANDEM(call)                              \
  do {                                                     \
    tandem_error* error = nullptr;                         \
    const int32_t status_ = (call);                        \
    GENERATE_TRY(::generate::from_tandem(status_, error)); \
  } while (false)

#endif  // EXAMPLES_GENERATE_FAILURE_H_
