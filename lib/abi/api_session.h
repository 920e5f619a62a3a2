// SPDX-License-Identifier: MIT
// What the entry points of a session share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lib/abi/api.h"
#include "lib/attend/session.h"

namespace tandem {

struct SessionObject {
  ~SessionObject() { Session::let_go(std::move(session)); }

  std::unique_ptr<Session> session;
  std::atomic<bool> in_use{false};
  std::vector<int64_t> sorted;  // work space of check_sequences()
};

// One call on a session: a reference to it, and the refusal of a second thread meanwhile.
class SessionCall {
 public:
  SessionCall() = default;
  SessionCall(const SessionCall&) = delete;
  SessionCall& operator=(const SessionCall&) = delete;
  ~SessionCall();

  Status begin(const tandem_session* session);
  Session* operator->() const { return object_->session.get(); }
  std::vector<int64_t>* sorted() const { return &object_->sorted; }

 private:
  std::shared_ptr<SessionObject> object_;
};

// Arrays [n_sequences]: given, lengths in range, each sequence once. Allocates only where the list is not ascending and
// longer than any before.
Status check_sequences(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, std::vector<int64_t>* sorted);

}  // namespace tandem
