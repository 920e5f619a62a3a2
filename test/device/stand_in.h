// SPDX-License-Identifier: MIT
// A device module without a device: its memory is the host's and its streams are threads, but what it does, it does as
// lib/tables/device.h says and as a device would: later than it is asked to, with addresses of its own, on what memory holds
// when an operation runs. Where a device would read anything, it checks what it is handed. Compiled once as it should be and
// once for each way in which a module is of no use.
//
//   stand_in_module.cc     the table, and what tests control
//   stand_in_stream.h      streams, graphs, the loss of the device
//   stand_in_memory.h      whose memory is where
//   stand_in_call.h        what calls have in common; stand_in_attend.cc, stand_in_exchange.cc, stand_in_observe.cc,
//                          stand_in_patterns.cc, stand_in_rebuild.cc, stand_in_search.cc: the calls
//   stand_in_sums.h        what they spend their time with
#pragma once

#include <atomic>
#include <cstdint>

#include "lib/tables/device.h"

namespace stand_in {

inline constexpr char kName[] = "standin";
inline constexpr int64_t kWorkspaceBytes = 256;

// Since the module was loaded. Operations of streams count when they have run, once for each launch of a graph.
struct Counts {
  std::atomic<int64_t> n_opened{0}, n_closed{0};
  std::atomic<int64_t> n_allocated{0}, n_released{0};
  std::atomic<int64_t> n_shared{0}, n_unshared{0};
  std::atomic<int64_t> n_copied{0}, copied_bytes{0};
  std::atomic<int64_t> n_waits{0};  // calls of wait()
  std::atomic<int64_t> n_appended{0}, n_attended{0}, n_merged{0}, n_observed{0}, n_named{0};
  std::atomic<int64_t> n_bounded{0}, n_searched{0}, n_indexed{0}, n_listed{0};
  std::atomic<int64_t> largest_list_rows{0};  // query rows of a sequence in a call with granules
  std::atomic<int64_t> largest_search{0};     // query blocks of a call of search()
  std::atomic<int64_t> window_bytes{0};       // written to pages by append()
  std::atomic<int64_t> n_accumulated{0}, n_strided{0}, strided_bytes{0};
  std::atomic<int64_t> n_rebuilt{0}, n_rebuilt_rows{0};
  std::atomic<int64_t> n_pinned{0}, n_unpinned{0};
  std::atomic<int64_t> largest_pinned{0};          // of one call
  std::atomic<int64_t> n_streams{0}, n_events{0};  // that are there
};

// Exported by every module of these; dlsym() finds it by this name.
inline constexpr char kCountsSymbol[] = "stand_in_counts";
using CountsFn = const Counts* (*)();

// Functions of the table that can be made to fail.
enum Call : int32_t {
  kAnyCall,
  kOpen,
  kAllocate,
  kAllocateShared,
  kCopy,
  kFill,
  kWait,
  kCheck,
  kCapturing,
  kSupports,
  kAppend,
  kAttend,
  kMerge,
  kObserve,
  kAccumulate,
  kCreateStream,
  kCreateEvent,
  kRecordEvent,
  kWaitEvent,
  kCopyStrided,
  kPin,
  kSupportsRebuild,
  kRebuild,
  kNameKeys,
  kBoundChunks,
  kSearch,
  kIndexPatterns,
  kListPatterns,
};
inline constexpr int64_t kLostUnderlying = 700, kCaptureUnderlying = 900, kInjectedUnderlying = 999;

// What a test does to the device: at any time, on any thread, to all who have opened the module.
struct Controls {
  void (*reset)();                // a device that is there, does not tarry, does not fail, has found nothing wrong
  void (*set_delay)(int64_t ns);  // before each operation of a stream
  void (*lose_device)();          // what is queued does not run, what waits gives up; DEVICE_LOST until reset()
  void (*fail_call)(Call call, int64_t nth, int32_t status);  // the nth from now on, before it does anything
  const char* (*fault)();  // the first thing that operations found wrong with what they were handed; "": nothing
  void* (*create_stream)();
  bool (*destroy_stream)(void* stream);  // after what is queued; false: there is no such stream
  // Between these two, calls on the stream are recorded and not run. The default stream cannot be captured. False and null:
  // the stream is not in a state for it.
  bool (*begin_capture)(void* stream);
  void* (*end_capture)(void* stream);
  bool (*launch)(const void* graph, void* stream);
  void (*free_graph)(void* graph);
  // That is there now, whoever asked for it.
  int64_t (*device_bytes)();
  int64_t (*shared_bytes)();
  // From now on it ends with the process, as a driver does: in a handler of exit() that is registered here. What is queued
  // does not run, memory is gone, and a call that is made then or has not returned ends the process by abort().
  void (*end_with_process)();
  // Until reset(): how long pin() takes.
  void (*set_pin_delay)(int64_t ns);
  // Until reset(): what is pinned counts as locked memory, of which RLIMIT_MEMLOCK allows so much, and pin() fails beyond.
  void (*obey_memlock)();
  // Until reset(): attend() takes lists with granules of any number of query rows, not of 64 at most.
  void (*take_long_lists)();
};

inline constexpr char kControlsSymbol[] = "stand_in_controls";
using ControlsFn = const Controls* (*)();

}  // namespace stand_in
