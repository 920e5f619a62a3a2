// SPDX-License-Identifier: MIT
// Shared by the entry points of a session.
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

// One call on a session. Holds a reference to it and refuses a second thread meanwhile.
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

// Checks arrays [n_sequences]: non-null, lengths in range, each sequence once. Allocates only if the list is not ascending
// and longer than any list before.
Status check_sequences(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, std::vector<int64_t>* sorted);

}  // namespace tandem
