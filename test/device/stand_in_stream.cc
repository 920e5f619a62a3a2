// SPDX-License-Identifier: MIT
#include "device/stand_in_stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "device/stand_in.h"

namespace stand_in {
namespace {

using Clock = std::chrono::steady_clock;

struct DeviceState {
  std::atomic<bool> is_lost{false};
  std::atomic<int64_t> delay_ns{0};
  std::atomic<const char*> fault{""};
} device;

struct Streams {
  std::mutex mutex;
  std::shared_ptr<Stream> of_default;
  std::vector<std::shared_ptr<Stream>> created;

  std::vector<std::shared_ptr<Stream>> all() {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Stream>> copy = created;
    if (of_default != nullptr) copy.push_back(of_default);
    return copy;
  }
};

Streams& streams() {
  // Never destroyed, as in a driver: released sessions may still end while the program ends.
  static Streams& all = *new Streams;
  return all;
}

// Waits in small steps, so a wait for a lost device ends soon.
void tarry() {
  const auto until = Clock::now() + std::chrono::nanoseconds(device.delay_ns);
  for (auto now = Clock::now(); now < until && !is_lost(); now = Clock::now())
    std::this_thread::sleep_for(std::min<Clock::duration>(until - now, std::chrono::milliseconds(1)));
}

}  // namespace

void reset_device() {
  device.delay_ns = 0;
  // otherwise a stream would run operations that wait for records which another stream has not run
  if (is_lost()) drain_streams();
  device.is_lost = false;
  device.fault = "";
}

void set_delay(int64_t ns) { device.delay_ns = ns; }
void lose_device() { device.is_lost = true; }
bool is_lost() { return device.is_lost; }

void note_fault(const char* text) {
  for (const char* none = device.fault; *none == '\0' && !device.fault.compare_exchange_weak(none, text);) {
  }
}

const char* fault() { return device.fault; }

void check_device() {
  if (is_lost()) throw Failure{TANDEM_ERROR_DEVICE_LOST, kLostUnderlying, "", "the device is lost"};
}

Stream::Stream() : thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::push(Operation operation) {
  queue_.push_back(std::move(operation));
  ++n_pushed_;
  changed_.notify_all();
}

void Stream::submit(Operation operation) {
  const std::lock_guard lock(mutex_);
  if (capture_ != nullptr)
    capture_->push_back(std::move(operation));
  else
    push(std::move(operation));
}

bool Stream::launch(const Graph& graph) {
  const std::lock_guard lock(mutex_);
  if (capture_ != nullptr) return false;
  for (const Operation& operation : graph) push(operation);
  return true;
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  const int64_t n = n_pushed_;
  changed_.wait(lock, [&] { return n_done_ >= n; });
}

bool Stream::begin_capture() {
  const std::lock_guard lock(mutex_);
  if (capture_ != nullptr) return false;
  capture_ = std::make_unique<Graph>();
  return true;
}

std::unique_ptr<Graph> Stream::end_capture() {
  const std::lock_guard lock(mutex_);
  return std::move(capture_);
}

bool Stream::is_capturing() {
  const std::lock_guard lock(mutex_);
  return capture_ != nullptr;
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stops_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    tarry();
    try {
      if (!is_lost()) operation();
    } catch (const Failure& failure) {
      note_fault(failure.message);
    }
    operation = nullptr;  // destroys it before waiters learn that it has run
    lock.lock();
    ++n_done_;
    changed_.notify_all();
  }
}

// Records of one event run in the order of the calls, or only the last one matters.
void Event::record(Stream& stream) {
  const int64_t n = ++n_asked_;
  stream.submit([state = state_, n] {
    const std::lock_guard lock(state->mutex);
    state->n_recorded = std::max(state->n_recorded, n);
    state->changed.notify_all();
  });
}

void Event::wait_in(Stream& stream) {
  stream.submit([state = state_, n = n_asked_] {
    std::unique_lock lock(state->mutex);
    while (state->n_recorded < n && !is_lost()) state->changed.wait_for(lock, std::chrono::milliseconds(1));
  });
}

namespace {

struct Events {
  std::mutex mutex;
  std::vector<std::shared_ptr<Event>> created;
};

Events& events() {
  static Events& all = *new Events;
  return all;
}

}  // namespace

std::shared_ptr<Event> find_event(void* handle) {
  const std::lock_guard lock(events().mutex);
  for (const std::shared_ptr<Event>& event : events().created)
    if (event.get() == handle) return event;
  throw Failure{TANDEM_ERROR_INTERNAL, 0, "", "an event that is none"};
}

void* create_event() {
  const std::lock_guard lock(events().mutex);
  events().created.push_back(std::make_shared<Event>());
  return events().created.back().get();
}

bool destroy_event(void* handle) {
  const std::lock_guard lock(events().mutex);
  return std::erase_if(events().created, [&](const std::shared_ptr<Event>& event) { return event.get() == handle; }) > 0;
}

std::shared_ptr<Stream> find_stream(void* handle) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  if (handle == nullptr) {
    if (all.of_default == nullptr) all.of_default = std::make_shared<Stream>();
    return all.of_default;
  }
  const auto is_it = [&](const std::shared_ptr<Stream>& stream) { return stream.get() == handle; };
  const auto found = std::find_if(all.created.begin(), all.created.end(), is_it);
  require(found != all.created.end(), "a stream that is none");
  return *found;
}

void* create_stream() {
  const std::lock_guard lock(streams().mutex);
  streams().created.push_back(std::make_shared<Stream>());
  return streams().created.back().get();
}

bool destroy_stream(void* handle) {
  std::shared_ptr<Stream> last;  // destroyed after the lock is released
  const std::lock_guard lock(streams().mutex);
  auto& created = streams().created;
  const auto is_it = [&](const std::shared_ptr<Stream>& stream) { return stream.get() == handle; };
  const auto found = std::find_if(created.begin(), created.end(), is_it);
  if (found == created.end()) return false;
  last = std::move(*found);
  created.erase(found);
  return true;
}

void stop_default_stream() {
  std::shared_ptr<Stream> last;
  const std::lock_guard lock(streams().mutex);
  last.swap(streams().of_default);
}

void drain_streams() {
  for (const std::shared_ptr<Stream>& stream : streams().all()) stream->drain();
}

bool is_any_capturing() {
  const auto all = streams().all();
  return std::any_of(all.begin(), all.end(), [](const std::shared_ptr<Stream>& stream) { return stream->is_capturing(); });
}

}  // namespace stand_in
