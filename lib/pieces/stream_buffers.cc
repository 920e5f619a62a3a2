// SPDX-License-Identifier: MIT
#include "lib/pieces/stream_buffers.h"

#include "lib/machine/device_status.h"

namespace tandem {

Status StreamBuffers::create(const Device& device, Tier& tier, int64_t buffer_bytes, int64_t n_buffers,
                             std::unique_ptr<StreamBuffers>* buffers) {
  std::unique_ptr<StreamBuffers> made(new StreamBuffers(device, buffer_bytes));
  TANDEM_TRY(Buffer::create(tier, n_buffers * buffer_bytes, Use::kStream, &made->memory_));
  TANDEM_TRY(call_device(device, &DeviceTable::create_stream, &made->stream_));
  made->has_stream_ = true;
  for (std::vector<void*>* events : {&made->filled_, &made->freed_}) {
    events->reserve(static_cast<size_t>(n_buffers));
    for (int64_t i = 0; i < n_buffers; ++i) {
      void* event = nullptr;
      TANDEM_TRY(call_device(device, &DeviceTable::create_event, &event));
      events->push_back(event);
    }
  }
  *buffers = std::move(made);
  return {};
}

StreamBuffers::~StreamBuffers() {
  DeviceError ignored;
  if (has_stream_) device_.table->wait(device_.self, stream_, &ignored);
  for (const std::vector<void*>* events : {&filled_, &freed_})
    for (void* event : *events) device_.table->destroy_event(device_.self, event);
  if (has_stream_) device_.table->destroy_stream(device_.self, stream_);
}

Status StreamBuffers::send(const std::vector<StridedCopy>& copies) {
  const size_t b = place(n_sent_);
  TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, freed_[b], stream_));
  TANDEM_TRY(call_device(device_, &DeviceTable::copy_batch, copies.data(), static_cast<int64_t>(copies.size()), stream_));
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, filled_[b], stream_));
  ++n_sent_;
  int64_t bytes = 0;
  for (const StridedCopy& copy : copies) bytes += copy.n_rows * copy.row_bytes;
  if (device_.bus != nullptr) device_.bus->sent(bytes, filled_[b]);
  return {};
}

Status StreamBuffers::take(void* stream, std::byte** piece) {
  *piece = at(n_taken_);
  return call_device(device_, &DeviceTable::wait_event, filled_[place(n_taken_)], stream);
}

Status StreamBuffers::done_with(void* stream) {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, freed_[place(n_taken_)], stream));
  ++n_taken_;
  return {};
}

Status StreamBuffers::mark(std::byte* flag) {
  return call_device(device_, &DeviceTable::fill, flag, 1, int64_t{1}, stream_);
}

// Errors are ignored: a lost device does no more work either.
void StreamBuffers::settle(void* stream) {
  DeviceError ignored;
  device_.table->wait(device_.self, stream_, &ignored);
  device_.table->wait(device_.self, stream, &ignored);
  n_taken_ = n_sent_;
}

}  // namespace tandem
