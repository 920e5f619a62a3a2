// SPDX-License-Identifier: MIT
// The processors of one embedding program: CPU backend, device, background worker, allocator, log.
#pragma once

#include <memory>
#include <string>

#include "lib/base/memory.h"
#include "lib/base/under_way.h"
#include "lib/machine/device_owner.h"
#include "lib/machine/worker.h"
#include "lib/rates/profile.h"
#include "lib/tables/backend.h"
#include "lib/tensors/attend_tensors.h"

namespace tandem {

class Engine {
 public:
  // options: complete, with struct_size checked. The strings still belong to the caller.
  static Status create(const tandem_engine_options& options, std::shared_ptr<Engine>* engine);
  // Makes an engine around a CPU backend, which the engine takes over. Tests pass a backend that watches its calls.
  static Status create_on(const Backend& cpu, const tandem_engine_options& options, std::shared_ptr<Engine>* engine);
  ~Engine();

  const Backend& cpu() const { return cpu_; }
  const Device* device() const { return device_ != nullptr ? &device_->device() : nullptr; }  // null: CPU only
  Worker& worker() const { return *worker_; }
  // Pins memory, in an engine that has a device. This thread must not yield: it would be suspended while the device's driver
  // waits for it.
  Worker& pinner() const { return *pinner_; }
  const Allocator& allocator() const { return allocator_; }
  UnderWay& device_calls() { return device_calls_; }
  Profile& profile() { return profile_; }
  TensorAttention& tensors() { return tensors_; }
  // Counts released sessions that still wait for their device. Shared: the thread that counts down no longer holds the
  // engine.
  const std::shared_ptr<UnderWay>& endings() const { return endings_; }
  // Waits until no call on device tensors is in flight, no released session waits for its device, and the background worker
  // has finished all jobs but hints. TIMEOUT.
  Status drain(int64_t timeout_ns);
  std::string report() const;  // JSON
  [[gnu::format(printf, 3, 4)]] void log(int32_t level, const char* format, ...) const;

 private:
  static Status complete(std::shared_ptr<Engine> made, const tandem_engine_options& options,
                         std::shared_ptr<Engine>* engine);

  Backend cpu_;
  std::unique_ptr<DeviceOwner> device_;
  UnderWay device_calls_;
  Profile profile_;
  TensorAttention tensors_;
  std::shared_ptr<UnderWay> endings_ = std::make_shared<UnderWay>();
  Allocator allocator_;
  tandem_log_fn log_ = nullptr;
  void* log_user_ = nullptr;
  std::unique_ptr<Worker> worker_, pinner_;  // declared last, so that they stop first
};

}  // namespace tandem
