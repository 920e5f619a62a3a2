// SPDX-License-Identifier: MIT
#include "lib/pieces/side_stream.h"

#include "lib/machine/device_status.h"

namespace tandem {

Status SideStream::create(const Device& device, std::unique_ptr<SideStream>* stream) {
  std::unique_ptr<SideStream> made(new SideStream(device));
  TANDEM_TRY(call_device(device, &DeviceTable::create_stream, &made->stream_));
  made->has_stream_ = true;
  TANDEM_TRY(call_device(device, &DeviceTable::create_event, &made->forked_));
  TANDEM_TRY(call_device(device, &DeviceTable::create_event, &made->joined_));
  *stream = std::move(made);
  return {};
}

SideStream::~SideStream() {
  settle();
  for (void* event : {forked_, joined_})
    if (event != nullptr) device_.table->destroy_event(device_.self, event);
  if (has_stream_) device_.table->destroy_stream(device_.self, stream_);
}

Status SideStream::fork(void* stream) {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, forked_, stream));
  return call_device(device_, &DeviceTable::wait_event, forked_, stream_);
}

Status SideStream::join(void* stream) const {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, joined_, stream_));
  return call_device(device_, &DeviceTable::wait_event, joined_, stream);
}

// A device that is lost does nothing any more either.
void SideStream::settle() {
  DeviceError ignored;
  if (has_stream_) device_.table->wait(device_.self, stream_, &ignored);
}

}  // namespace tandem
