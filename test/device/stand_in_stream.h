// SPDX-License-Identifier: MIT
// Streams without a device. Each stream is a queue with a thread of its own, which runs operations in their order and some
// time after they are submitted. While a stream is captured, its operations go to a graph instead.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tandem/tandem.h"

namespace stand_in {

// Thrown when a call fails, or when an operation finds a fault that the call missed. Texts are literals.
struct Failure {
  int32_t code = TANDEM_ERROR_INTERNAL;
  int64_t underlying = 0;
  const char* field = "";
  const char* message = "";
};

// Throws if the core hands the device something that it must not.
inline void require(bool holds, const char* otherwise) {
  if (!holds) throw Failure{TANDEM_ERROR_INTERNAL, 0, "", otherwise};
}

using Operation = std::function<void()>;
using Graph = std::vector<Operation>;

// The device's state, for the controls.
void reset_device();
void set_delay(int64_t ns);
void lose_device();
bool is_lost();
void note_fault(const char* text);  // keeps the first
const char* fault();                // "": none
void check_device();                // throws DEVICE_LOST if the device is lost

class Stream {
 public:
  Stream();  // throws std::system_error if no thread can be made
  ~Stream();
  Stream(const Stream&) = delete;

  void submit(Operation operation);
  bool launch(const Graph& graph);  // false: the stream is being captured
  void drain();                     // waits until all operations submitted before have run
  bool begin_capture();
  std::unique_ptr<Graph> end_capture();  // null: no capture
  bool is_capturing();

 private:
  void push(Operation operation);  // the caller holds the mutex
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  std::unique_ptr<Graph> capture_;
  int64_t n_pushed_ = 0, n_done_ = 0;
  bool stops_ = false;
  std::thread thread_;  // the last member, because its thread uses the others
};

// A mark in a stream. wait_in() waits for all marks that record() was called for before.
class Event {
 public:
  void record(Stream& stream);
  void wait_in(Stream& stream);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int64_t n_recorded = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  int64_t n_asked_ = 0;  // calls of record(), counted by the calling thread
};
std::shared_ptr<Event> find_event(void* handle);  // throws if the handle is invalid
void* create_event();
bool destroy_event(void* handle);

// A handle is a stream's address. Null is the default stream, which exists from its first use until stop_default_stream().
std::shared_ptr<Stream> find_stream(void* handle);  // throws if the handle is invalid
void* create_stream();
bool destroy_stream(void* handle);
void stop_default_stream();
void drain_streams();
bool is_any_capturing();

}  // namespace stand_in
