// SPDX-License-Identifier: MIT
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "device/stand_in.h"

namespace {

using namespace tandem;

constexpr std::string_view kFault = STAND_IN_FAULT;  // "": none
constexpr int64_t kAlignment = 256;

stand_in::Counts counts;

struct Self {
  int32_t device_idx;
};

int32_t refuse(DeviceError* error, int32_t code, int64_t underlying, const char* message) {
  error->code = code;
  error->underlying = underlying;
  std::snprintf(error->message, sizeof error->message, "%s", message);
  return code;
}

int32_t n_devices(DeviceError* error) {
  if (kFault == "no_devices") return 0;
  if (kFault != "devices_fail") return 2;
  refuse(error, TANDEM_ERROR_SYSTEM, 803, "the driver is\nolder than the module");
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
  if (kFault == "open_fails") return refuse(error, TANDEM_ERROR_OUT_OF_MEMORY, 2, "its memory is taken");
  auto* made = static_cast<Self*>(std::malloc(sizeof(Self)));
  if (made == nullptr) return refuse(error, TANDEM_ERROR_OUT_OF_MEMORY, 2, "no memory");
  *made = {device_idx};
  *self = made;
  ++counts.n_opened;
  return TANDEM_OK;
}

void close(void* self) {
  std::free(self);
  ++counts.n_closed;
}

// Filled with what is NaN in every type: what is read before it was written shows.
int32_t allocate(void*, int64_t bytes, void** data, DeviceError* error) {
  const int64_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* made = bytes > 0 ? std::aligned_alloc(kAlignment, static_cast<size_t>(whole)) : nullptr;
  if (made == nullptr) return refuse(error, TANDEM_ERROR_OUT_OF_MEMORY, 2, "no memory");
  *data = std::memset(made, 0xff, static_cast<size_t>(whole));
  ++counts.n_allocated;
  return TANDEM_OK;
}

void release(void*, void* data) {
  std::free(data);
  counts.n_released += data != nullptr;
}

int32_t copy(void*, void* to, const void* from, int64_t bytes, void*, DeviceError*) {
  std::memmove(to, from, static_cast<size_t>(bytes));
  return TANDEM_OK;
}

int32_t fill(void*, void* data, int32_t byte, int64_t bytes, void*, DeviceError*) {
  std::memset(data, byte, static_cast<size_t>(bytes));
  return TANDEM_OK;
}

int32_t wait(void*, void*, DeviceError*) { return TANDEM_OK; }

int32_t supports(void*, const Layer* layer, int32_t, DeviceError* error) {
  if (layer->rope == nullptr) return TANDEM_OK;
  return refuse(error, TANDEM_ERROR_UNSUPPORTED, 0, "keys that the library rotates: pages carry no positions");
}

int64_t workspace_bytes(void*, const DeviceAttend*) { return stand_in::kWorkspaceBytes; }

int32_t attend(void*, const DeviceAttend* call, void*, DeviceError* error) {
  const char* reason = stand_in::attend(*call);
  if (*reason != '\0') return refuse(error, TANDEM_ERROR_INTERNAL, 0, reason);
  ++counts.n_attended;
  return TANDEM_OK;
}

int32_t allocate_shared(void*, int64_t, void**, void**, DeviceError* error) {
  return refuse(error, TANDEM_ERROR_UNSUPPORTED, 0, "not yet");
}
void release_shared(void*, void*) {}
int32_t check(void*, DeviceError*) { return TANDEM_OK; }
int32_t capturing(void*, void*, int32_t* is_capturing, DeviceError*) {
  *is_capturing = 0;
  return TANDEM_OK;
}
int32_t append(void*, const DeviceAppend*, void*, DeviceError* error) {
  return refuse(error, TANDEM_ERROR_UNSUPPORTED, 0, "not yet");
}
int32_t merge(void*, const DeviceMerge*, void*, DeviceError* error) {
  return refuse(error, TANDEM_ERROR_UNSUPPORTED, 0, "not yet");
}

constexpr DeviceTable kTable = {
    kFault == "other_abi" ? kDeviceAbi + 1 : kDeviceAbi,
    sizeof(DeviceTable) - (kFault == "short_table" ? 8 : 0),
    kFault == "other_name" ? "abacus" : stand_in::kName,
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
    check,
    capturing,
    kFault == "null_function" ? nullptr : supports,
    workspace_bytes,
    append,
    attend,
    merge,
};

}  // namespace

#define EXPORTED extern "C" [[gnu::visibility("default")]]

EXPORTED const DeviceTable* STAND_IN_ENTRY(uint32_t abi) {
  return abi == kDeviceAbi && kFault != "no_table" ? &kTable : nullptr;
}

EXPORTED const stand_in::Counts* stand_in_counts() { return &counts; }
