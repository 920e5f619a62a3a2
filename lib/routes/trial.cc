// SPDX-License-Identifier: MIT
#include "lib/routes/trial.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "lib/machine/device_status.h"
#include "lib/machine/placement.h"
#include "lib/pieces/route_options.h"
#include "lib/tables/planes.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point begin) { return std::chrono::duration<double, std::nano>(Clock::now() - begin).count(); }

// Copies of one size from pinned memory, on a stream of their own.
class BusTrial {
 public:
  BusTrial(const Device& device, int64_t most_bytes) : device_(device), bytes_(std::min(most_bytes, kMostBytes)) {}
  ~BusTrial() {
    DeviceError ignored;
    if (has_stream_) {
      device_.table->wait(device_.self, stream_, &ignored);
      device_.table->destroy_stream(device_.self, stream_);
    }
    if (from_ != nullptr) device_.table->release_shared(device_.self, from_);
  }
  BusTrial(const BusTrial&) = delete;

  Status create(Tier& tier) {
    void* ignored = nullptr;
    TANDEM_TRY(Buffer::create(tier, bytes_, Use::kStream, &to_));
    TANDEM_TRY(call_device(device_, &DeviceTable::allocate_shared, bytes_, &from_, &ignored));
    TANDEM_TRY(call_device(device_, &DeviceTable::create_stream, &stream_));
    has_stream_ = true;
    double ns = 0.0;
    return time(1, &ns);  // one-time work
  }
  int64_t bytes() const { return bytes_; }
  Status begin(int64_t n_copies) {
    const StridedCopy copy{to_.data(), from_, bytes_, 1, bytes_, bytes_};
    for (int64_t i = 0; i < n_copies; ++i) TANDEM_TRY(call_device(device_, &DeviceTable::copy_strided, &copy, stream_));
    return {};
  }
  Status end() { return call_device(device_, &DeviceTable::wait, stream_); }
  Status time(int64_t n_copies, double* ns) {
    const auto start = Clock::now();
    TANDEM_TRY(begin(n_copies));
    TANDEM_TRY(end());
    *ns = ns_since(start);
    return {};
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{16} << 20;

  const Device& device_;
  int64_t bytes_;
  Buffer to_;
  void *from_ = nullptr, *stream_ = nullptr;
  bool has_stream_ = false;
};

// Queries over keys that are all zero, which cost as much as other keys. Each head's keys lie on the node where the store
// would put them.
class HostTrial {
 public:
  HostTrial(const Backend& cpu, const Layer& layer, int64_t n_queries, int64_t n_keys)
      : cpu_(cpu), layer_(layer), n_keys_(n_keys), rows_(n_queries * layer.group_size) {
    layer_.rope = nullptr;
    layer_.sinks = nullptr;
  }
  int64_t n_keys() const { return n_keys_; }

  Status create(Engine& engine) {
    const PlaneBytes bytes = plane_bytes(layer_);
    tier_ = std::make_unique<Tier>("", 0, engine.allocator());
    q_.assign(static_cast<size_t>(rows_ * layer_.k_head_dim), 0.0f);
    o_.resize(static_cast<size_t>(layer_.n_kv_heads * rows_ * layer_.v_head_dim));
    lse_.resize(static_cast<size_t>(layer_.n_kv_heads * rows_));
    runs_.resize(static_cast<size_t>(layer_.n_kv_heads));
    keys_.resize(runs_.size());
    for (int32_t h = 0; h < layer_.n_kv_heads; ++h) {
      const auto i = static_cast<size_t>(h);
      TANDEM_TRY(Buffer::create(*tier_, n_keys_ * bytes.total() + int64_t{64} * kPlanes, Use::kKv, &keys_[i]));
      const int32_t node = node_of_head(h, layer_.n_kv_heads, n_nodes(cpu_));
      place(cpu_, *tier_, keys_[i].data(), keys_[i].bytes(), node);
      Rows rows;
      std::byte* at = keys_[i].data();
      for (int32_t p = 0; p < kPlanes; ++p) {
        if (bytes.of[p] > 0) rows.of[p] = at;
        at += (n_keys_ * bytes.of[p] + 63) / 64 * 64;
      }
      point_run(rows, layer_, &runs_[i]);
      AttendJob& job = jobs_.emplace_back();
      job.layer = &layer_;
      job.q = q_.data();
      job.n_rows = static_cast<int32_t>(rows_);
      job.q_is_bf16 = layer_.k_rotation == TANDEM_ROTATION_NONE;
      job.node = node;
      job.n_runs = 1;
      job.runs = &runs_[i];
      job.o = o_.data() + h * rows_ * layer_.v_head_dim;
      job.lse = lse_.data() + h * rows_;
    }
    cpu_.table->run(cpu_.self, std::ssize(keys_) * kClearedAtOnce, clear, this);
    double ns = 0.0;
    return time(std::min<int64_t>(n_keys_, 256), &ns);  // one-time work
  }
  Status time(int64_t n_keys, double* ns) {
    for (size_t i = 0; i < jobs_.size(); ++i) runs_[i].n_tokens = jobs_[i].n_keys = n_keys;
    const auto start = Clock::now();
    TANDEM_TRY(cpu_.table->attend(cpu_.self, jobs_.data(), static_cast<int32_t>(jobs_.size())));
    *ns = ns_since(start);
    return {};
  }

 private:
  // All workers clear the memory together, as the first token waits for this trial. Otherwise one thread would wait while
  // the system clears each page at its first write.
  static constexpr int64_t kClearedAtOnce = 8;  // parts of a head's keys
  static void clear(void* self, int64_t task_idx, int32_t) {
    const Buffer& keys = static_cast<HostTrial*>(self)->keys_[static_cast<size_t>(task_idx / kClearedAtOnce)];
    const int64_t part = task_idx % kClearedAtOnce, begin = keys.bytes() * part / kClearedAtOnce;
    std::fill_n(keys.data() + begin, keys.bytes() * (part + 1) / kClearedAtOnce - begin, std::byte{0});
  }

  const Backend& cpu_;
  Layer layer_;
  int64_t n_keys_, rows_;
  std::unique_ptr<Tier> tier_;
  std::vector<Buffer> keys_;
  std::vector<float> q_, o_, lse_;
  std::vector<KvRun> runs_;
  std::vector<AttendJob> jobs_;
};

// Returns the number of keys that take the CPU about a millisecond.
int64_t trial_keys(const Layer& layer, int64_t n_queries) {
  constexpr int64_t kLeastKeys = 256, kMostKeys = 16384, kWork = int64_t{1} << 20, kMostBytes = int64_t{64} << 20;
  const int64_t in_memory = kMostBytes / token_kv_bytes(layer);
  return std::max(kLeastKeys, std::min({std::max<int64_t>(2048, kWork / n_queries), kMostKeys, in_memory}));
}

// Takes the shorter of two runs: waiting for a core lengthens a run, and nothing shortens one.
template <typename Trial>
Status time_twice(Trial& trial, int64_t n, double* ns) {
  double again = 0.0;
  TANDEM_TRY(trial.time(n, ns));
  TANDEM_TRY(trial.time(n, &again));
  *ns = std::min(*ns, again);
  return {};
}

// Measures how CPU and bus slow each other. The copies take longer than the CPU's run. Those after its end go at the bus's
// lone pace and are left out.
Status try_both(BusTrial& bus, double copy_ns, HostTrial& host, double host_alone_ns, Slowed* slowed) {
  constexpr int64_t kMostCopies = 32;
  const auto n_copies =
      static_cast<int64_t>(std::clamp(1.5 * host_alone_ns / copy_ns + 1.0, 2.0, static_cast<double>(kMostCopies)));
  const auto start = Clock::now();
  TANDEM_TRY(bus.begin(n_copies));
  double host_ns = 0.0;
  TANDEM_TRY(host.time(host.n_keys(), &host_ns));
  TANDEM_TRY(bus.end());
  const double bus_ns = ns_since(start), alone_after = std::max(0.0, bus_ns - host_ns) / copy_ns;
  const double copies_before = static_cast<double>(n_copies) - alone_after;
  *slowed = {host_ns / host_alone_ns, copies_before > 0.5 ? std::min(host_ns, bus_ns) / (copies_before * copy_ns) : 1.0};
  return {};
}

}  // namespace

Status try_routes(Engine& engine, Tier& device_tier, const Layer& layer, int64_t n_queries, int64_t most_bytes) {
  constexpr int64_t kCopies = 4;
  Profile& profile = engine.profile();
  const bool tries_host = !profile.knows_host(layer, n_queries);
  if (!tries_host && profile.knows_bus()) return {};
  BusTrial bus(*engine.device(), most_bytes);
  TANDEM_TRY(bus.create(device_tier));
  double bus_ns = 0.0;
  TANDEM_TRY(time_twice(bus, kCopies, &bus_ns));
  if (!profile.knows_bus()) profile.note_bus_trial(static_cast<double>(kCopies * bus.bytes()) / bus_ns);
  if (!tries_host) return {};
  HostTrial host(engine.cpu(), layer, n_queries, trial_keys(layer, n_queries));
  TANDEM_TRY(host.create(engine));
  double host_ns = 0.0;
  Slowed slowed;
  TANDEM_TRY(time_twice(host, host.n_keys(), &host_ns));
  double few_ns = 0.0;
  const int64_t n_few = host.n_keys() / 8;
  TANDEM_TRY(time_twice(host, n_few, &few_ns));
  TANDEM_TRY(try_both(bus, bus_ns / kCopies, host, host_ns, &slowed));
  const double key_ns = (host_ns - few_ns) / static_cast<double>(host.n_keys() - n_few);
  profile.note_begin_trial(layer, n_queries, few_ns - key_ns * static_cast<double>(n_few));
  profile.note_trial(layer, n_queries, host.n_keys(), host_ns);
  profile.note_slowed_trial(layer, n_queries, slowed);
  return {};
}

}  // namespace tandem
