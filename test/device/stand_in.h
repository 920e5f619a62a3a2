// SPDX-License-Identifier: MIT
// A device module without a device. Its memory is the host's and its streams are threads. It does what lib/tables/device.h
// says, and as late as a device would: operations run some time after they are asked for, use addresses of their own, and
// read what memory holds when they run. It checks its arguments where a device would read anything. The module is compiled
// once as it should be, and once for each way in which a module can be unusable.
//
//   stand_in_module.cc     the table, and the controls for tests
//   stand_in_stream.h      streams, graphs, the loss of the device
//   stand_in_memory.h      memory, and which addresses are valid for whom
//   stand_in_call.h        code that calls share; stand_in_attend.cc, stand_in_exchange.cc, stand_in_observe.cc,
//                          stand_in_patterns.cc, stand_in_rebuild.cc, stand_in_search.cc: the calls
//   stand_in_sums.h        the loops that take most of the calls' time
#pragma once

#include <atomic>
#include <cstdint>

#include "lib/tables/device.h"

namespace stand_in {

inline constexpr char kName[] = "standin";
inline constexpr int64_t kWorkspaceBytes = 256;

// Counts since the module was loaded. Operations of streams count when they have run, once for each launch of a graph.
struct Counts {
  std::atomic<int64_t> n_opened{0}, n_closed{0};
  std::atomic<int64_t> n_allocated{0}, n_released{0};
  std::atomic<int64_t> n_shared{0}, n_unshared{0};
  std::atomic<int64_t> n_copied{0}, copied_bytes{0};
  std::atomic<int64_t> n_waits{0};  // calls of wait()
  std::atomic<int64_t> n_appended{0}, n_attended{0}, n_merged{0}, n_observed{0}, n_named{0};
  std::atomic<int64_t> n_bounded{0}, n_searched{0}, n_indexed{0}, n_listed{0};
  std::atomic<int64_t> largest_list_rows{0};  // most query rows of a sequence in a call with granules
  std::atomic<int64_t> largest_search{0};     // most query blocks in a call of search()
  std::atomic<int64_t> window_bytes{0};       // written to pages by append()
  std::atomic<int64_t> n_accumulated{0}, n_strided{0}, strided_bytes{0};
  std::atomic<int64_t> n_rebuilt{0}, n_rebuilt_rows{0};
  std::atomic<int64_t> n_pinned{0}, n_unpinned{0};
  std::atomic<int64_t> largest_pinned{0};          // by one call
  std::atomic<int64_t> n_streams{0}, n_events{0};  // that exist now
};

// Name under which every such module exports its Counts, for dlsym().
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

// Functions by which a test controls the device. They may be called at any time on any thread, and act on all users of the
// module.
struct Controls {
  void (*reset)();                // restores a present device without delays, failures or faults
  void (*set_delay)(int64_t ns);  // delay before each operation of a stream
  void (*lose_device)();          // queued operations do not run, waits end; calls return DEVICE_LOST until reset()
  void (*fail_call)(Call call, int64_t nth, int32_t status);  // fails the nth call from now on, before it does anything
  const char* (*fault)();  // the first fault that operations found in their arguments; "": none
  void* (*create_stream)();
  bool (*destroy_stream)(void* stream);  // waits for queued operations; false: the stream does not exist
  // Between these two calls, operations of the stream are recorded and not run. The default stream cannot be captured. False
  // and null: the stream is not in a state for it.
  bool (*begin_capture)(void* stream);
  void* (*end_capture)(void* stream);
  bool (*launch)(const void* graph, void* stream);
  void (*free_graph)(void* graph);
  // Bytes of all users that exist now.
  int64_t (*device_bytes)();
  int64_t (*shared_bytes)();
  // From now on the device ends with the process, as a driver's does: in a handler of exit() that this call registers.
  // Queued operations do not run and memory is unmapped. A call that runs then or comes later ends the process by abort().
  void (*end_with_process)();
  // Sets how long pin() takes, until reset().
  void (*set_pin_delay)(int64_t ns);
  // Until reset(), pinned bytes count as locked memory. pin() fails beyond the limit RLIMIT_MEMLOCK.
  void (*obey_memlock)();
  // Until reset(), attend() takes lists with granules for any number of query rows. Without this call it takes at most 64.
  void (*take_long_lists)();
};

inline constexpr char kControlsSymbol[] = "stand_in_controls";
using ControlsFn = const Controls* (*)();

}  // namespace stand_in
