// SPDX-License-Identifier: MIT
// What the library's own threads do with a device when the process ends.
//
// Released sessions are taken down by a thread of theirs, and calls that are under way have one that waits for their
// tickets: main() may return meanwhile, or somebody calls exit(). From then on the device goes away under these threads. Of
// the CUDA runtime: it undoes its own state in a handler of exit(), after which its functions return
// cudaErrorCudartUnloading (the driver's CUDA_ERROR_DEINITIALIZED), pinned memory is no longer mapped, and a call that
// another thread is in just then is undefined. So none may be in one by then, and none may look at memory that device and
// host share.
//
// Waiting when the last handle of an engine is released would not do: handles may be released in any order, by a thread
// that decodes in another engine, and a program may end without releasing anything. So one handler runs at exit, the only
// thing of the library that does, and only where a device has been opened. It is registered after the device's own, and
// exit() goes backwards. It says that the process ends, and waits until no thread is at work with a device: they take theirs
// for lost, which gets them out of every wait, and what they have not yet begun to take down stays, as the memory goes with
// the process. It waits for kMostAtExit at most: a thread may be in a call that waits for a device which is busy with other
// things, and a process is never kept from ending. What is released after that, by destructors of static objects, gives
// nothing back to the device. A child after fork() has none of the threads.
#pragma once

#include <chrono>

namespace tandem {

inline constexpr std::chrono::seconds kMostAtExit(10);

// From now on. A device is open. Throws bad_alloc.
void watch_exit();
bool process_ends() noexcept;
// What is not taken down any more; leak checkers, which look behind the handler, find it here.
void leave_behind(void* object) noexcept;

// While a thread of the library is at work with a device.
class AtWork {
 public:
  AtWork() noexcept;
  ~AtWork();
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;
  bool may_begin() const { return may_begin_; }  // else the process ends: no device is there any more

 private:
  bool may_begin_;
};

}  // namespace tandem
