// SPDX-License-Identifier: MIT
// How the library's own threads treat a device when the process ends.
//
// A thread takes down each released session, and a session's thread waits for the tickets of calls in flight. Meanwhile
// main() may return or a thread may call exit(). The device then disappears under the library's threads. The CUDA
// runtime undoes its state in a handler of exit(). Afterwards its functions return cudaErrorCudartUnloading (the driver's
// CUDA_ERROR_DEINITIALIZED), and pinned memory is no longer mapped. A call that another thread is in at that moment is
// undefined. So by then no thread may be inside such a call or access memory that device and host share.
//
// Waiting at the release of an engine's last handle would not solve this. Handles may be released in any order, by a thread
// that decodes in another engine, and a program may end without releasing any. So the library has one handler that runs at
// exit, and only if a device has been opened. It is registered after the device's own handler, and exit() runs handlers in
// reverse order. The handler announces that the process ends and waits until no thread works with a device. Those threads
// treat their device as lost, which ends every wait. Objects whose teardown has not begun are left behind, as their memory
// goes with the process. The handler waits for at most kMostAtExit: a thread may be in a call that waits for a busy device,
// and the library never keeps a process from ending. Destructors of static objects may release handles after that. Such
// releases return nothing to the device. A child after fork() has none of the threads.
#pragma once

#include <chrono>

namespace tandem {

inline constexpr std::chrono::seconds kMostAtExit(10);

// Registers the handler. Called when a device is opened. Throws bad_alloc.
void watch_exit();
bool process_ends() noexcept;
// Keeps an object that will not be taken down. Leak checkers run after the handler and find the object here.
void leave_behind(void* object) noexcept;

// Lives while a thread of the library works with a device.
class AtWork {
 public:
  AtWork() noexcept;
  ~AtWork();
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;
  bool may_begin() const { return may_begin_; }  // false: the process ends and the device is gone

 private:
  bool may_begin_;
};

}  // namespace tandem
