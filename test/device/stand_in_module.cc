// SPDX-License-Identifier: MIT
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "device/stand_in.h"
#include "device/stand_in_call.h"

namespace {

using namespace tandem;
using namespace stand_in;

constexpr std::string_view kFault = STAND_IN_FAULT;  // the module's fault; "": none

struct Self {
  int32_t device_idx;
};

int32_t refuse(DeviceError* error, const Failure& failure) {
  *error = {};
  error->code = failure.code;
  error->underlying = failure.underlying;
  std::snprintf(error->field, sizeof error->field, "%s", failure.field);
  std::snprintf(error->message, sizeof error->message, "%s", failure.message);
  return failure.code;
}

// The call that a test makes fail.
struct Injected {
  std::mutex mutex;
  Call call = kAnyCall;
  int64_t n_left = 0;  // calls until the failure; 0: none
  int32_t status = TANDEM_OK;
} injected;

void fail_call(Call call, int64_t nth, int32_t status) {
  const std::lock_guard lock(injected.mutex);
  injected.call = call;
  injected.n_left = nth;
  injected.status = status;
}

void check_injected(Call call) {
  const std::lock_guard lock(injected.mutex);
  if (injected.n_left == 0 || (injected.call != kAnyCall && injected.call != call)) return;
  if (--injected.n_left == 0) throw Failure{injected.status, kInjectedUnderlying, "", "as the test has asked"};
}

std::atomic<bool> obeys_memlock{false}, takes_long_lists{false};
std::atomic<int64_t> pin_delay_ns{0};

// The end of the process, for tests in which the device ends with it.
constinit std::atomic<bool> is_gone{false};
constinit std::atomic<int64_t> n_inside{0};  // calls that have not returned

class Inside {
 public:
  Inside() {
    ++n_inside;
    if (!is_gone) return;
    std::fputs("a call of a device that is gone\n", stderr);
    std::abort();
  }
  ~Inside() { --n_inside; }
};

void end_with_process() {
  std::atexit([] {
    is_gone = true;
    if (n_inside > 0) {
      std::fputs("the device goes under a call\n", stderr);
      std::abort();
    }
    lose_device();
    drain_streams();
    unmap_all_memory();
  });
}

// Runs the body of a function of the table and converts what it throws to the function's error.
template <typename Body>
int32_t guarded(Call call, DeviceError* error, const Body& body) {
  const Inside inside;
  try {
    check_injected(call);
    check_device();
    body();
    return TANDEM_OK;
  } catch (const Failure& failure) {
    return refuse(error, failure);
  } catch (const std::bad_alloc&) {
    return refuse(error, {TANDEM_ERROR_OUT_OF_MEMORY, 2, "", "no memory"});
  } catch (const std::system_error& failure) {
    return refuse(error, {TANDEM_ERROR_SYSTEM, failure.code().value(), "", "no thread for a stream"});
  }
}

constexpr Failure kInCapture = {TANDEM_ERROR_BACKEND, kCaptureUnderlying, "", "not while a stream is captured"};
constexpr Failure kNoMemory = {TANDEM_ERROR_OUT_OF_MEMORY, 2, "", "no memory"};

void check_not_capturing(Stream& stream) {
  if (stream.is_capturing()) throw kInCapture;
}

void check_none_capturing() {
  if (is_any_capturing()) throw kInCapture;
}

int32_t n_devices(DeviceError* error) {
  if (kFault == "no_devices") return 0;
  if (kFault != "devices_fail") return 2;
  refuse(error, {TANDEM_ERROR_SYSTEM, 803, "", "the driver is\nolder than the module"});
  return -1;
}

void describe(int32_t device_idx, DeviceInfo* info) {
  std::snprintf(info->name, sizeof info->name, "Stand-in \"%d\"", device_idx);
  info->memory_bytes = (device_idx + 1) * (INT64_C(1) << 30);
  info->n_multiprocessors = 1;
  info->compute_capability = 90 + device_idx;
  const bool is_refused = kFault == "all_refused" || (kFault == "first_refused" && device_idx == 0);
  if (is_refused) std::snprintf(info->refusal, sizeof info->refusal, "too old by %d years", device_idx + 3);
}

int32_t open(int32_t device_idx, void** self, DeviceError* error) {
  if (kFault == "open_fails") return refuse(error, {TANDEM_ERROR_OUT_OF_MEMORY, 2, "", "its memory is taken"});
  return guarded(kOpen, error, [&] {
    *self = new Self{device_idx};
    ++counts.n_opened;
  });
}

void close(void* self) {
  const Inside inside;
  drain_streams();
  delete static_cast<Self*>(self);
  if (++counts.n_closed == counts.n_opened) stop_default_stream();
}

int32_t allocate(void*, int64_t bytes, void** data, DeviceError* error) {
  return guarded(kAllocate, error, [&] {
    check_none_capturing();
    void* made = allocate_memory(bytes);
    if (made == nullptr) throw kNoMemory;
    *data = made;
    ++counts.n_allocated;
  });
}

// Waits for all queued operations, then releases the memory.
void give_back(void* data, bool (*give)(void*), std::atomic<int64_t>* count) {
  if (data == nullptr) return;
  const Inside inside;
  drain_streams();
  if (is_any_capturing()) note_fault("memory is released while a stream is captured");
  if (give(data))
    ++*count;
  else
    note_fault("memory is released that was not allocated");
}

void release(void*, void* data) { give_back(data, release_memory, &counts.n_released); }

int32_t allocate_shared(void*, int64_t bytes, void** host, void** device, DeviceError* error) {
  return guarded(kAllocateShared, error, [&] {
    check_none_capturing();
    if (!share_memory(bytes, host, device)) throw kNoMemory;
    ++counts.n_shared;
  });
}

void release_shared(void*, void* host) { give_back(host, unshare_memory, &counts.n_unshared); }

void wait_for(Stream& stream) {
  stream.drain();
  check_device();
  require(*fault() == '\0', fault());
}

// Memory that the device does not know is read at once, and is written before the call returns.
int32_t copy(void*, void* to, const void* from, int64_t bytes, void* handle, DeviceError* error) {
  return guarded(kCopy, error, [&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    check_not_capturing(*stream);
    require(bytes >= 0, "a copy of less than nothing");
    if (bytes == 0) return;
    const bool knows_from = is_known_memory(from, bytes), knows_to = is_known_memory(to, bytes);
    require(knows_from || !is_known_memory(from, 1), "a copy from behind the end of memory");
    require(knows_to || !is_known_memory(to, 1), "a copy to behind the end of memory");
    const auto size = static_cast<size_t>(bytes);
    const auto count = [bytes] {
      ++counts.n_copied;
      counts.copied_bytes += bytes;
    };
    if (knows_from) {
      stream->submit([=] {
        std::memmove(to, from, size);
        count();
      });
    } else {
      const auto* first = static_cast<const std::byte*>(from);
      stream->submit([=, staged = std::vector<std::byte>(first, first + size)] {
        std::memcpy(to, staged.data(), size);
        count();
      });
    }
    if (!knows_to) wait_for(*stream);
  });
}

int32_t fill(void*, void* data, int32_t byte, int64_t bytes, void* handle, DeviceError* error) {
  return guarded(kFill, error, [&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    check_not_capturing(*stream);
    require(bytes >= 0 && is_known_memory(data, bytes), "what is filled is no device memory");
    stream->submit([=] {
      if (bytes == 1) return std::atomic_ref(*static_cast<uint8_t*>(data)).store(static_cast<uint8_t>(byte));  // a flag
      std::memset(data, byte, static_cast<size_t>(bytes));
    });
  });
}

int32_t wait(void*, void* handle, DeviceError* error) {
  ++counts.n_waits;
  return guarded(kWait, error, [&] {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    check_not_capturing(*stream);
    wait_for(*stream);
  });
}

int32_t check_open_device(void*, DeviceError* error) {
  return guarded(kCheck, error, [] { require(*fault() == '\0', fault()); });  // calls that check the device get its fault
}

int32_t capturing(void*, void* handle, int32_t* is_capturing, DeviceError* error) {
  return guarded(kCapturing, error, [&] { *is_capturing = find_stream(handle)->is_capturing() ? 1 : 0; });
}

int32_t supports(void*, const Layer* layer, int32_t, DeviceError* error) {
  return guarded(kSupports, error, [&] { check_layer(*layer); });
}

int64_t workspace_bytes(void*, const DeviceAttend*) { return kWorkspaceBytes; }

int32_t rows_of_lists(void*, const Layer*, const DeviceRows* q) {
  const bool is_known = q->dtype == TANDEM_F32 || q->dtype == TANDEM_F16 || q->dtype == TANDEM_BF16;
  return is_known ? stand_in::most_list_rows() : 0;
}

// The operation copies the call and its layer, because both may be gone when it runs.
template <typename DeviceCall>
int32_t submit(Call name, const DeviceCall* call, std::atomic<int64_t>* count, void* handle, DeviceError* error) {
  return guarded(name, error, [&] {
    stand_in::check(*call);
    find_stream(handle)->submit([copy = *call, layer = *call->layer, count]() mutable {
      copy.layer = &layer;
      *count += perform(copy) ? 1 : 0;
    });
  });
}

int32_t append(void*, const DeviceAppend* call, void* stream, DeviceError* error) {
  return submit(kAppend, call, &counts.n_appended, stream, error);
}

int32_t attend(void*, const DeviceAttend* call, void* stream, DeviceError* error) {
  return submit(kAttend, call, &counts.n_attended, stream, error);
}

int32_t merge(void*, const DeviceMerge* call, void* stream, DeviceError* error) {
  return submit(kMerge, call, &counts.n_merged, stream, error);
}

int32_t observe(void*, const DeviceObserve* call, void* stream, DeviceError* error) {
  return submit(kObserve, call, &counts.n_observed, stream, error);
}

int32_t name_keys(void*, const DeviceNamedKeys* call, void* stream, DeviceError* error) {
  return guarded(kNameKeys, error, [&] {
    stand_in::check(*call);
    find_stream(stream)->submit([copy = *call] { counts.n_named += perform(copy) ? 1 : 0; });
  });
}

int32_t bound_chunks(void*, const DeviceBoundChunks* call, void* stream, DeviceError* error) {
  return submit(kBoundChunks, call, &counts.n_bounded, stream, error);
}

int64_t bytes_of_search(void*, const DeviceSearch* call) { return stand_in::search_bytes(*call); }

int32_t search(void*, const DeviceSearch* call, void* stream, DeviceError* error) {
  return submit(kSearch, call, &counts.n_searched, stream, error);
}

int64_t bytes_of_patterns(void*, const DevicePatterns* call) { return stand_in::pattern_bytes(*call); }

int32_t index_head_patterns(void*, const DevicePatterns* call, void* stream, DeviceError* error) {
  return guarded(kIndexPatterns, error, [&] {
    stand_in::check(*call);
    find_stream(stream)->submit([copy = *call] {
      index_patterns(copy);
      ++counts.n_indexed;
    });
  });
}

int32_t list_head_patterns(void*, const DevicePatterns* call, void* stream, DeviceError* error) {
  return guarded(kListPatterns, error, [&] {
    stand_in::check(*call);
    find_stream(stream)->submit([copy = *call] {
      list_patterns(copy);
      ++counts.n_listed;
    });
  });
}

int32_t accumulate(void*, const DeviceAccumulate* call, void* stream, DeviceError* error) {
  return submit(kAccumulate, call, &counts.n_accumulated, stream, error);
}

int32_t create_a_stream(void*, void** stream, DeviceError* error) {
  return guarded(kCreateStream, error, [&] {
    *stream = create_stream();
    ++counts.n_streams;
  });
}

void destroy_a_stream(void*, void* stream) {
  const Inside inside;
  if (!destroy_stream(stream)) return note_fault("a stream is destroyed that is none");
  --counts.n_streams;
}

int32_t create_an_event(void*, void** event, DeviceError* error) {
  return guarded(kCreateEvent, error, [&] {
    *event = create_event();
    ++counts.n_events;
  });
}

void destroy_an_event(void*, void* event) {
  const Inside inside;
  if (!destroy_event(event)) return note_fault("an event is destroyed that is none");
  --counts.n_events;
}

int32_t record_event(void*, void* event, void* stream, DeviceError* error) {
  return guarded(kRecordEvent, error, [&] { find_event(event)->record(*find_stream(stream)); });
}

int32_t wait_event(void*, void* event, void* stream, DeviceError* error) {
  return guarded(kWaitEvent, error, [&] { find_event(event)->wait_in(*find_stream(stream)); });
}

// Rows of pinned memory are read when the stream gets there, other rows at once.
int32_t copy_strided(void*, const StridedCopy* copy, void* handle, DeviceError* error) {
  return guarded(kCopyStrided, error, [&] {
    const StridedCopy& c = *copy;
    require(
        c.row_bytes > 0 && c.n_rows > 0 && (c.n_rows == 1 || (c.to_stride >= c.row_bytes && c.from_stride >= c.row_bytes)),
        "rows of a copy overlap");
    const int64_t from_bytes = (c.n_rows - 1) * c.from_stride + c.row_bytes;
    const int64_t to_bytes = (c.n_rows - 1) * c.to_stride + c.row_bytes;
    require(is_device_memory(c.to, to_bytes) || (is_known_memory(c.to, to_bytes) && is_device_memory(c.from, from_bytes)),
            "a copy to what is neither device memory nor pinned");
    const bool is_pinned = is_known_memory(c.from, from_bytes);
    const auto* first = static_cast<const std::byte*>(c.from);
    require(is_pinned || (!is_known_memory(first, 1) && !is_known_memory(first + from_bytes - 1, 1)),
            "a copy of rows that two allocations have, or that are pinned in part");
    std::vector<std::byte> staged;  // only the rows, so writes between them do no harm
    for (int64_t i = 0; i < c.n_rows && !is_pinned; ++i)
      staged.insert(staged.end(), first + i * c.from_stride, first + i * c.from_stride + c.row_bytes);
    find_stream(handle)->submit([c, first, is_pinned, staged = std::move(staged)] {
      require(!is_pinned || is_known_memory(first, 1), "a copy from memory that is pinned no longer");
      for (int64_t i = 0; i < c.n_rows; ++i)
        std::memcpy(static_cast<std::byte*>(c.to) + i * c.to_stride,
                    is_pinned ? first + i * c.from_stride : staged.data() + i * c.row_bytes,
                    static_cast<size_t>(c.row_bytes));
      ++counts.n_strided;
      counts.strided_bytes += c.n_rows * c.row_bytes;
    });
  });
}

int32_t copy_batch(void* self, const StridedCopy* copies, int64_t n_copies, void* stream, DeviceError* error) {
  for (int64_t i = 0; i < n_copies; ++i)
    if (const int32_t code = copy_strided(self, &copies[i], stream, error); code != TANDEM_OK) return code;
  return TANDEM_OK;
}

int32_t pin(void*, void* data, int64_t bytes, DeviceError* error) {
  return guarded(kPin, error, [&] {
    if (pin_delay_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(pin_delay_ns));
    rlimit limit = {};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (obeys_memlock && static_cast<rlim_t>(memory_bytes().pinned + bytes) > limit.rlim_cur) throw kNoMemory;
    require(pin_memory(data, bytes), "memory is pinned that is already known");
    note_largest(&counts.largest_pinned, bytes);
    ++counts.n_pinned;
  });
}

void unpin(void*, void* data) { give_back(data, unpin_memory, &counts.n_unpinned); }

int32_t supports_rebuild(void*, const Layer* layer, DeviceError* error) {
  return guarded(kSupportsRebuild, error, [&] { check_rebuilt(*layer); });
}

int64_t rebuild_bytes(void*, const Layer* layer, int64_t n_rows) { return rebuild_work_bytes(*layer, n_rows); }

int32_t rebuild(void*, const DeviceRebuild* call, void* stream, DeviceError* error) {
  counts.n_rebuilt_rows += call->n_rows;
  return guarded(kRebuild, error, [&] {
    stand_in::check(*call);
    const auto rows = std::make_shared<HiddenRows>();
    const auto submit_step = [&, layer = *call->layer](auto step) {
      find_stream(stream)->submit([copy = *call, layer, rows, step]() mutable {
        copy.layer = &layer;
        step(copy, *rows);
      });
    };
    submit_step([](const DeviceRebuild& one, HiddenRows& x) { x = read_hidden(one); });
    const bool is_read_early = call->page_positions == nullptr;
    if (is_read_early && call->read != nullptr) find_event(call->read)->record(*find_stream(stream));
    if (call->writable != nullptr) find_event(call->writable)->wait_in(*find_stream(stream));
    submit_step([](const DeviceRebuild& one, HiddenRows& x) {
      write_rebuilt(one, x);
      ++counts.n_rebuilt;
    });
    if (!is_read_early && call->read != nullptr) find_event(call->read)->record(*find_stream(stream));
  });
}

constexpr DeviceTable kTable = {
    kFault == "other_abi" ? kDeviceAbi + 1 : kDeviceAbi,
    sizeof(DeviceTable) - (kFault == "short_table" ? 8 : 0),
    kFault == "other_name" ? "abacus" : kName,
    n_devices,
    describe,
    open,
    close,
    allocate,
    release,
    copy,
    fill,
    wait,
    allocate_shared,
    release_shared,
    check_open_device,
    capturing,
    kFault == "null_function" ? nullptr : supports,
    workspace_bytes,
    rows_of_lists,
    append,
    attend,
    merge,
    observe,
    accumulate,
    create_a_stream,
    destroy_a_stream,
    create_an_event,
    destroy_an_event,
    record_event,
    wait_event,
    copy_strided,
    copy_batch,
    pin,
    unpin,
    supports_rebuild,
    rebuild_bytes,
    rebuild,
    name_keys,
    bound_chunks,
    bytes_of_search,
    search,
    bytes_of_patterns,
    index_head_patterns,
    list_head_patterns,
};

void obey_memlock() { obeys_memlock = true; }

void take_long_lists() { takes_long_lists = true; }

void set_pin_delay(int64_t ns) { pin_delay_ns = ns; }

void reset() {
  obeys_memlock = takes_long_lists = false;
  pin_delay_ns = 0;
  fail_call(kAnyCall, 0, TANDEM_OK);
  reset_device();
}

// Runs the body on a stream. False also if the stream does not exist.
template <typename Body>
bool control(void* handle, const Body& body) {
  try {
    return body(*find_stream(handle));
  } catch (const Failure&) {
    return false;
  }
}

bool begin_capture(void* handle) {
  return handle != nullptr && control(handle, [](Stream& stream) { return stream.begin_capture(); });
}

void* end_capture(void* handle) {
  std::unique_ptr<Graph> graph;
  control(handle, [&](Stream& stream) { return (graph = stream.end_capture()) != nullptr; });
  return graph.release();
}

bool launch(const void* graph, void* handle) {
  return control(handle, [&](Stream& stream) { return stream.launch(*static_cast<const Graph*>(graph)); });
}

void free_graph(void* graph) { delete static_cast<Graph*>(graph); }

int64_t device_bytes() { return memory_bytes().device; }

int64_t shared_bytes() { return memory_bytes().shared; }

constexpr Controls kControls = {
    reset,          set_delay,        lose_device,   fail_call,    fault,           create_stream,
    destroy_stream, begin_capture,    end_capture,   launch,       free_graph,      device_bytes,
    shared_bytes,   end_with_process, set_pin_delay, obey_memlock, take_long_lists,
};

}  // namespace

int32_t stand_in::most_list_rows() { return takes_long_lists ? INT32_MAX : 64; }

#define EXPORTED extern "C" [[gnu::visibility("default")]]

EXPORTED const DeviceTable* STAND_IN_ENTRY(uint32_t abi) {
  return abi == kDeviceAbi && kFault != "no_table" ? &kTable : nullptr;
}

EXPORTED const stand_in::Counts* stand_in_counts() { return &counts; }

EXPORTED const stand_in::Controls* stand_in_controls() { return &kControls; }
