// SPDX-License-Identifier: MIT
// The sequences of an attend call, marked as in flight from enter() until the end of the scope.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

class Passage {
 public:
  explicit Passage(Call& call) : call_(call) {}
  ~Passage();
  Passage(const Passage&) = delete;

  // Finds the sequences and sets how many queries and tokens each has, in call.calls(). The cache's mutex is held
  // exclusively, and all tokens within lengths are in the store. NOT_FOUND, BUSY, INVALID_STATE, INVALID_ARGUMENT,
  // UNSUPPORTED: on error nothing is marked.
  Status enter();

 private:
  Status check_state(const SequenceCall& of) const;

  Call& call_;
  bool is_marked_ = false;
};

}  // namespace tandem
