// SPDX-License-Identifier: MIT
// A stream of a session's own, for what may go on beside the caller's stream.
//
//   caller's   what comes before | ... attend ... attend ... |  what comes behind
//   side                         fork()  append, append ...  join()
#pragma once

#include <memory>

#include "lib/machine/device_owner.h"

namespace tandem {

class SideStream {
 public:
  static Status create(const Device& device, std::unique_ptr<SideStream>* stream);
  ~SideStream();
  SideStream(const SideStream&) = delete;

  void* get() const { return stream_; }
  Status fork(void* stream);        // what is asked of this one comes behind what `stream` was asked for
  Status join(void* stream) const;  // and what `stream` is asked for, behind what this one was
  void settle();                    // after a failure: nothing is under way here any more

 private:
  explicit SideStream(const Device& device) : device_(device) {}

  const Device& device_;
  void *stream_ = nullptr, *forked_ = nullptr, *joined_ = nullptr;
  bool has_stream_ = false;
};

}  // namespace tandem
