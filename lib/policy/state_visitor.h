// SPDX-License-Identifier: MIT
// A walk over a selector's state of a sequence, shared by saving and loading. Numbers are 64-bit integers.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "lib/base/status.h"

namespace tandem {

class StateVisitor {
 public:
  explicit StateVisitor(bool is_loading) : is_loading_(is_loading) {}
  virtual ~StateVisitor() = default;

  bool is_loading() const { return is_loading_; }
  virtual Status bytes(void* data, int64_t n) = 0;
  virtual Status corrupt(const std::string& what) const = 0;  // the error of a value that no save has written

  Status number(int64_t* value) { return bytes(value, sizeof *value); }
  // A number from low to high; the error names it.
  Status number(int64_t* value, int64_t low, int64_t high, const char* name) {
    TANDEM_TRY(number(value));
    if (!is_loading_ || (*value >= low && *value <= high)) return {};
    return corrupt(name + (" = " + std::to_string(*value)) + " is not from " + std::to_string(low) + " to " +
                   std::to_string(high));
  }
  Status flag(bool* value, const char* name) {
    int64_t number = *value ? 1 : 0;
    TANDEM_TRY(this->number(&number, 0, 1, name));
    *value = number == 1;
    return {};
  }
  // An option of the session that the saved state depends on. INVALID_ARGUMENT if the saved value differs.
  Status same(const char* option, int64_t value) {
    int64_t saved = value;
    TANDEM_TRY(number(&saved));
    if (saved == value) return {};
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "session", "session: its %s is %lld, that of the session that was saved %lld",
                option, static_cast<long long>(value), static_cast<long long>(saved));
  }
  // A list of at most `most` elements, its length first. name: of the length, for an error.
  template <typename T>
  Status list(std::vector<T>* list, int64_t most, const char* name) {
    int64_t n = std::ssize(*list);
    TANDEM_TRY(number(&n, 0, most, name));
    list->resize(static_cast<size_t>(n));
    return bytes(list->data(), n * static_cast<int64_t>(sizeof(T)));
  }

 private:
  const bool is_loading_;
};

}  // namespace tandem
