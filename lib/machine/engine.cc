// SPDX-License-Identifier: MIT
#include "lib/machine/engine.h"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace tandem {
namespace {

Status check_lent_threads(const tandem_engine_options& options) {
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
  if (options.run == nullptr)
    return options.run_user == nullptr ? Status()
                                       : fail(kInvalid, "run_user", "run_user = %p is given without run", options.run_user);
  if (options.n_threads == 0) return fail(kInvalid, "n_threads", "n_threads = 0 with run: say how many threads it has");
  if (options.pin_threads == 1)
    return fail(kInvalid, "pin_threads", "pin_threads = 1 with run: the threads are the caller's");
  return {};
}

}  // namespace

Status Engine::create(const tandem_engine_options& options, std::shared_ptr<Engine>* engine) {
  if (options.backend == nullptr && options.backend_path != nullptr)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "backend_path", "backend_path = \"%s\" is given without backend",
                options.backend_path);
  if ((options.alloc == nullptr) != (options.free == nullptr))
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, options.alloc ? "free" : "alloc", "alloc and free must be given together");
  if (options.spin_ns < -1)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "spin_ns", "spin_ns = %lld is negative and not -1",
                static_cast<long long>(options.spin_ns));
  if (options.pin_threads < -1 || options.pin_threads > 1)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "pin_threads", "pin_threads = %d is not -1, 0 or 1", options.pin_threads);
  TANDEM_TRY(check_lent_threads(options));
  CpuOptions cpu;
  cpu.n_threads = options.n_threads;
  cpu.n_others = options.backend != nullptr ? 1 : 0;  // a thread waits for the device while another calls the workers
  cpu.isa = options.cpu_isa;
  if (options.spin_ns >= 0) cpu.spin_ns = options.spin_ns;
  cpu.pin_threads = options.pin_threads != 0;
  cpu.matmul_rows = options.matmul_rows;
  cpu.run = options.run;
  cpu.run_user = options.run_user;
  auto made = std::make_shared<Engine>();  // made first, so that later objects have an owner even if memory runs out
  TANDEM_TRY(create_cpu_backend(cpu, &made->cpu_));
  return complete(std::move(made), options, engine);
}

Status Engine::create_on(const Backend& cpu, const tandem_engine_options& options, std::shared_ptr<Engine>* engine) {
  auto made = std::make_shared<Engine>();
  made->cpu_ = cpu;
  return complete(std::move(made), options, engine);
}

Status Engine::complete(std::shared_ptr<Engine> made, const tandem_engine_options& options,
                        std::shared_ptr<Engine>* engine) {
  made->allocator_ = {options.alloc, options.free, options.alloc_user};
  made->log_ = options.log;
  made->log_user_ = options.log_user;
  if (options.backend != nullptr) TANDEM_TRY(DeviceOwner::open(options.backend, options.backend_path, &made->device_));
  TANDEM_TRY(Worker::create("tandem-bg", true, &made->worker_));
  if (made->device_ != nullptr) TANDEM_TRY(Worker::create("tandem-pin", false, &made->pinner_));
  *engine = std::move(made);
  return {};
}

Engine::~Engine() {
  worker_.reset();
  pinner_.reset();
  device_.reset();
  if (cpu_.table != nullptr) cpu_.table->destroy(cpu_.self);
}

Status Engine::drain(int64_t timeout_ns) {
  const auto begin = std::chrono::steady_clock::now();
  const auto left = [&] {
    const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - begin;
    return timeout_ns < 0 ? timeout_ns : std::max<int64_t>(0, timeout_ns - spent.count());
  };
  const char* what = "calls on device tensors under way";
  if (device_calls_.drain(timeout_ns)) {
    what = "released sessions whose memory the device may still use";
    if (endings_->drain(left())) {
      if (worker_->drain(left())) return {};
      what = "background work unfinished";
    }
  }
  return fail(TANDEM_ERROR_TIMEOUT, "timeout_ns", "timeout_ns = %lld has passed with %s", static_cast<long long>(timeout_ns),
              what);
}

std::string Engine::report() const {
  std::string cpu(static_cast<size_t>(cpu_.table->report(cpu_.self, nullptr, 0)), '\0');
  cpu_.table->report(cpu_.self, cpu.data(), static_cast<int64_t>(cpu.size()) + 1);
  char version[32];
  std::snprintf(version, sizeof version, "%d.%d.%d", TANDEM_VERSION_MAJOR, TANDEM_VERSION_MINOR, TANDEM_VERSION_PATCH);
  std::string json = std::string("{\"version\":\"") + version + "\",\"cpu\":" + cpu;
  json.append(",\"devices\":").append(device_ != nullptr ? device_->devices_json() : "[]");
  json += ",\"backends\":[{\"name\":\"cpu\",\"state\":\"ready\"}";
  if (device_ != nullptr) json.append(",").append(device_->module_json());
  if (device_ == nullptr || std::strcmp(device_->backend(), "cuda") != 0)
    json += ",{\"name\":\"cuda\",\"state\":\"not asked for\"}";
  return json + "]}";
}

void Engine::log(int32_t level, const char* format, ...) const {
  if (log_ == nullptr) return;
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  log_(level, text, log_user_);
}

}  // namespace tandem
