// SPDX-License-Identifier: MIT
#include "lib/pieces/window_staging.h"

#include <algorithm>

#include "lib/machine/device_status.h"

namespace tandem {

static int64_t bytes_of_buffer(const WindowGeometry& geometry) {
  int64_t bytes = staged_at_once;
  for (const WindowGeometry::LayerPlanes& layer : geometry.layers) bytes = std::max(bytes, layer.bytes);
  return device_aligned(bytes);
}

int64_t WindowStaging::bytes_of(const WindowGeometry& geometry) { return kBuffers * bytes_of_buffer(geometry); }

// All workers touch the memory, as the system clears it at the first touch.
Status WindowStaging::allocate(const Backend& cpu) {
  const int64_t bytes = kBuffers * buffer_bytes_;
  TANDEM_TRY(Buffer::create(tier_, bytes, Use::kSession, &own_));
  const auto touch = [](void* memory, int64_t task_idx, int32_t) {
    const Buffer& own = *static_cast<const Buffer*>(memory);
    const int64_t begin = task_idx * kHugePageBytes;
    std::fill_n(own.data() + begin, std::min(kHugePageBytes, own.bytes() - begin), std::byte{0});
  };
  cpu.table->run(cpu.self, (bytes + kHugePageBytes - 1) / kHugePageBytes, touch, &own_);
  DeviceError error;
  is_pinned_ = device_.table->pin(device_.self, own_.data(), bytes, &error) == TANDEM_OK;
  if (is_pinned_) return {};
  own_ = Buffer();
  void* ignored = nullptr;
  return call_device(device_, &DeviceTable::allocate_shared, bytes, &shared_, &ignored);
}

Status WindowStaging::create(const Device& device, const Backend& cpu, const WindowGeometry& geometry,
                             std::unique_ptr<WindowStaging>* staging) {
  std::unique_ptr<WindowStaging> made(new WindowStaging(device, bytes_of_buffer(geometry)));
  TANDEM_TRY(made->allocate(cpu));
  TANDEM_TRY(call_device(device, &DeviceTable::create_event, &made->forked_));
  for (Lane& lane : made->lanes_) {
    TANDEM_TRY(call_device(device, &DeviceTable::create_stream, &lane.stream));
    lane.has_stream = true;
    TANDEM_TRY(call_device(device, &DeviceTable::create_event, &lane.joined));
  }
  *staging = std::move(made);
  return {};
}

WindowStaging::~WindowStaging() {
  settle();
  for (const Lane& lane : lanes_) {
    if (lane.joined != nullptr) device_.table->destroy_event(device_.self, lane.joined);
    if (lane.has_stream) device_.table->destroy_stream(device_.self, lane.stream);
  }
  if (forked_ != nullptr) device_.table->destroy_event(device_.self, forked_);
  if (is_pinned_) device_.table->unpin(device_.self, own_.data());
  if (shared_ != nullptr) device_.table->release_shared(device_.self, shared_);
}

Status WindowStaging::fork(void* stream) {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, forked_, stream));
  for (const Lane& lane : lanes_) TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, forked_, lane.stream));
  return {};
}

Status WindowStaging::next(std::byte** buffer) {
  *buffer = (is_pinned_ ? own_.data() : static_cast<std::byte*>(shared_)) + next_ * buffer_bytes_;
  return call_device(device_, &DeviceTable::wait, lanes_[next_].stream);
}

Status WindowStaging::send(const CopyList& copies) {
  const Lane& lane = lanes_[next_];
  next_ = (next_ + 1) % kBuffers;
  for (const StridedCopy& copy : copies.copies())
    TANDEM_TRY(call_device(device_, &DeviceTable::copy_strided, &copy, lane.stream));
  return {};
}

Status WindowStaging::join(void* stream) {
  for (const Lane& lane : lanes_) {
    TANDEM_TRY(call_device(device_, &DeviceTable::record_event, lane.joined, lane.stream));
    TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, lane.joined, stream));
  }
  return {};
}

// Errors are ignored: a lost device does no more work either.
void WindowStaging::settle() {
  DeviceError ignored;
  for (const Lane& lane : lanes_)
    if (lane.has_stream) device_.table->wait(device_.self, lane.stream, &ignored);
}

}  // namespace tandem
