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
  for (void*& event : made->sent_) TANDEM_TRY(call_device(device, &DeviceTable::create_event, &event));
  *stream = std::move(made);
  return {};
}

SideStream::~SideStream() {
  settle();
  for (void* event : {forked_, joined_, sent_[0], sent_[1]})
    if (event != nullptr) device_.table->destroy_event(device_.self, event);
  if (has_stream_) device_.table->destroy_stream(device_.self, stream_);
}

Status SideStream::fork(void* stream) {
  is_ahead_ = true;
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, forked_, stream));
  return call_device(device_, &DeviceTable::wait_event, forked_, stream_);
}

Status SideStream::join(void* stream) {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, joined_, stream_));
  TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, joined_, stream));
  is_ahead_ = false;
  return {};
}

Status SideStream::begin_turn(void* stream) const {
  return call_device(device_, &DeviceTable::wait_event, sent_[turn_], stream);
}

Status SideStream::end_turn() {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, sent_[turn_], stream_));
  turn_ = 1 - turn_;
  return {};
}

// The error is ignored: a lost device does no more work either.
void SideStream::wait() const {
  DeviceError ignored;
  if (has_stream_) device_.table->wait(device_.self, stream_, &ignored);
}

void SideStream::settle() {
  wait();
  is_ahead_ = false;
}

}  // namespace tandem
