// SPDX-License-Identifier: MIT
// How a round runs, and why nobody waits for a worker without a task.
//
//   caller                                 worker w
//   round = {n_tasks, work, ...}           sees news
//   open = 1; ++news; wake sleepers        inside[w] = 1; open? else leave
//   take tasks until none is left          take tasks until none is left
//   open = 0                               inside[w] = 0
//   wait until inside[w] == 0 for all w
//
// A worker writes `inside` before it reads `open`. The caller writes `open` before it reads `inside`. Both are sequentially
// consistent. So either the worker sees that the round is closed, or the caller sees that the worker is inside and waits.
// The round's description does not change while a worker inside may read it, and a worker that sleeps or is descheduled
// costs the caller nothing. Tasks are taken with an atomic counter that starts at 0 in every round.
//
// Idle workers watch `news`, first spinning, then in a futex. The caller wakes at most two sleepers. Each worker that was
// asleep wakes two more while there are tasks left. So the caller starts its own tasks at once, and all workers are awake
// after log2 steps.
//
// An exception that work throws, on a worker or on the caller, is kept until the round is closed and all workers have left.
// Then the caller throws it. No exception leaves a round open or ends a thread. No worker takes a task after the first
// throw.
//
// Each worker has `inside` in its own cache line, so entering and leaving a round touches no line that other threads write.
#include "cpu/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/pool_modes.h"
#include "cpu/pool_seams.h"
#include "lib/base/signals.h"

namespace tandem::cpu {
namespace {

constexpr int32_t kMaxThreads = 4096;
// Longest spin between wake() and rest() without a run(). Longer would starve the threads that the caller itself uses
// between its calls: a runtime's own matrix products of a prefill take milliseconds on the same cores.
constexpr int64_t kMaxAwakeNs = 1'000'000;
constexpr int kSpinsPerClock = 32;
// Number of CPUs from which on PoolOptions::n_others of them are left to other threads. With fewer CPUs, that would take too
// large a part from the workers.
constexpr int32_t kEnoughToLeave = 4;
// If too few CPUs are left to other threads, a spinning worker yields its own every kLooksPerYield looks.
constexpr int kLooksPerYield = 16;
constexpr size_t kLineBytes = 128;  // pairs of lines are prefetched together

constinit std::atomic<StartThreadFn> start_thread_override{nullptr};

int start_thread(pthread_t* thread, void* (*body)(void*), void* argument) {
  const StartThreadFn start = start_thread_override.load();
  return start != nullptr ? start(thread, body, argument) : pthread_create(thread, nullptr, body, argument);
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int n_threads) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, n_threads, nullptr, nullptr, 0);
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");
#endif
}

// Spins until done() or until limit_ns() have passed. Returns true if done.
template <class Done, class Limit>
bool spin_until(Done done, Limit limit_ns) {
  if (done()) return true;
  if (limit_ns() <= 0) return false;
  const int64_t start = now_ns();
  for (;;) {
    for (int i = 0; i < kSpinsPerClock; ++i) {
      pause_cpu();
      if (done()) return true;
    }
    if (now_ns() - start >= limit_ns()) return false;
  }
}

constexpr uint32_t kOut = 0;
constexpr uint32_t kInside = 1;
constexpr uint32_t kAwaited = 2;  // inside, and the caller sleeps until the worker leaves

class WorkerPool;

struct alignas(kLineBytes) Worker {
  std::atomic<uint32_t> inside{kOut};
  WorkerPool* pool = nullptr;
  int32_t idx = 0;
  Seat seat;
  bool bound = false;
  int bind_error = 0;
  pthread_t thread{};
};

struct alignas(kLineBytes) Cursor {
  std::atomic<int64_t> next{0};
};

struct Round {
  int64_t n_tasks = 0;
  WorkFn work = nullptr;
  void* context = nullptr;
  const int32_t* task_node = nullptr;  // null: nodes do not matter
};

class WorkerPool final : public Pool {
 public:
  WorkerPool(const PoolOptions& options, const PoolSeams& seams, std::unique_ptr<Topology> topology);
  ~WorkerPool() override;
  Status start();

  int32_t n_workers() const override { return static_cast<int32_t>(workers_.size()); }
  int32_t n_nodes() const override { return static_cast<int32_t>(cursors_.size()) - 1; }
  void share(int64_t n_tasks, WorkFn work, void* context, const int32_t* task_node) override;
  void wake() override;
  void rest() override;
  void place(void* data, int64_t bytes, int32_t node) override;
  void keep_clear() override;
  std::string report() const override;

 private:
  static void* thread_body(void* worker);
  void serve(Worker* worker);
  uint32_t await_news(uint32_t seen, bool* slept);
  void wake_sleepers(int64_t n_wanted);
  bool enter(Worker* worker);
  void leave(Worker* worker);
  void await_leave(Worker* worker);
  void find_clear_seats();
  int bind(const Seat& seat) const;
  int32_t node_of_caller() const;
  class Taker;
  void take_tasks(const Worker& worker, int32_t own_node) noexcept;
  void close_round();
  int64_t claim_on(int32_t node);
  int32_t node_of_task(int64_t task_idx) const;
  bool has_unclaimed() const;
  bool should_pin() const { return pin_threads_ && n_workers() <= topology_->n_cpus(); }

  // Written by the caller in every round and read by all workers: one line.
  alignas(kLineBytes) std::atomic<uint32_t> news_{0};
  std::atomic<uint32_t> open_{0};
  std::atomic<uint32_t> stop_{0};
  Round round_;
  std::atomic<bool> has_thrown_{false};  // in this round
  // the first exception; written only by the thread that set has_thrown_, then by the caller
  std::exception_ptr thrown_;
  // Changed when a worker falls asleep or wakes up.
  alignas(kLineBytes) std::atomic<int32_t> n_asleep_{0};
  std::atomic<int32_t> n_wakes_{0};  // wake() calls without their rest()
  // Constant after start().
  alignas(kLineBytes) bool may_spin_ = false;
  bool pin_threads_ = false;
  bool prefers_nodes_ = false;  // true: there are several nodes, and every worker is bound to its own
  int32_t quota_ = 0;
  int32_t n_others_ = 0, n_left_ = 0;  // other busy threads; CPUs left for them
  bool is_crowded_ = false;            // true: too few CPUs for all of these threads
  int64_t spin_ns_ = 0;
  pid_t pid_ = 0;
  int32_t n_started_ = 1;  // worker 0 is the caller
  std::atomic<uint32_t> n_ready_{1};
  std::unique_ptr<Topology> topology_;
  std::vector<Worker> workers_;
  std::vector<Seat> clear_seats_;  // seats to which no worker is bound
  std::vector<Cursor> cursors_;    // one for each node, and one for kAllNodes
  PoolSeams seams_;
  std::atomic<int64_t> n_unplaced_{0};
  alignas(kLineBytes) std::mutex callers_;
};

// If there are fewer CPUs than workers, or less quota, a spinning worker takes the time of one that has a task. Then idle
// workers sleep at once.
WorkerPool::WorkerPool(const PoolOptions& options, const PoolSeams& seams, std::unique_ptr<Topology> topology)
    : pin_threads_(options.pin_threads),
      quota_(cpu_quota(seams.cgroup)),
      pid_(getpid()),
      topology_(std::move(topology)),
      seams_(seams) {
  const int32_t quota_or_all = quota_ > 0 ? quota_ : INT32_MAX;
  const int32_t n_cpus = std::min(topology_->n_cpus(), quota_or_all);
  n_left_ = options.n_threads == 0 && n_cpus >= kEnoughToLeave ? options.n_others : 0;
  const int32_t n_workers =
      options.n_threads > 0 ? options.n_threads : std::max(1, std::min(topology_->n_cores(), n_cpus - n_left_));
  n_others_ = options.n_others;
  is_crowded_ = n_others_ > 0 && n_workers + n_others_ > n_cpus;
  may_spin_ = n_workers <= std::min(topology_->n_real_cpus(), quota_or_all);
  spin_ns_ = may_spin_ ? options.spin_ns : 0;
  workers_ = std::vector<Worker>(n_workers);
  for (int32_t i = 0; i < n_workers; ++i) {
    workers_[i].pool = this;
    workers_[i].idx = i;
    workers_[i].seat = topology_->seats()[i % topology_->n_cpus()];
  }
  cursors_ = std::vector<Cursor>(std::min(n_workers, topology_->n_nodes()) + 1);
}

// Returns once every thread has bound itself and made its first allocations, so that report() is complete.
Status WorkerPool::start() {
  int error = 0;
  {
    const SignalsBlocked blocked;  // the new threads inherit this
    while (error == 0 && n_started_ < n_workers()) {
      Worker* worker = &workers_[n_started_];
      error = start_thread(&worker->thread, thread_body, worker);
      if (error == 0) ++n_started_;
    }
  }
  if (error != 0) {
    return fail_system(TANDEM_ERROR_SYSTEM, error, "n_threads", "n_threads = %d: thread %d could not be started: %s",
                       n_workers(), n_started_, std::strerror(error));
  }
  for (uint32_t n_ready; (n_ready = n_ready_.load()) < workers_.size();) futex_wait(&n_ready_, n_ready);
  const auto is_bound = [](const Worker& worker) { return worker.bound; };
  prefers_nodes_ = n_nodes() > 1 && std::all_of(workers_.begin() + 1, workers_.end(), is_bound);
  find_clear_seats();
  return {};
}

// Finds the CPUs on cores without a worker. If every core has one, takes the CPUs beside the workers on their cores. Worker
// 0 is not bound.
void WorkerPool::find_clear_seats() {
  for (const bool beside : {false, true}) {
    for (const Seat& seat : topology_->seats()) {
      const auto is_in_the_way = [&](const Worker& worker) {
        return worker.bound && (beside ? worker.seat.cpu == seat.cpu : worker.seat.core == seat.core);
      };
      if (std::none_of(workers_.begin(), workers_.end(), is_in_the_way)) clear_seats_.push_back(seat);
    }
    if (!clear_seats_.empty()) return;
  }
}

int WorkerPool::bind(const Seat& seat) const {
  return seams_.bind_this_thread != nullptr ? seams_.bind_this_thread(seat) : topology_->bind_this_thread(seat);
}

// After fork() the threads of a pool do not exist in the child.
WorkerPool::~WorkerPool() {
  if (getpid() != pid_) return;
  stop_.store(1);
  news_.fetch_add(1);
  futex_wake(&news_, INT_MAX);
  for (int32_t i = 1; i < n_started_; ++i) pthread_join(workers_[i].thread, nullptr);
}

void* WorkerPool::thread_body(void* argument) {
  Worker* worker = static_cast<Worker*>(argument);
  WorkerPool* pool = worker->pool;
  char name[16];
  std::snprintf(name, sizeof name, "tandem-%d", worker->idx);
  pthread_setname_np(pthread_self(), name);
  if (pool->should_pin()) {
    worker->bind_error = pool->bind(worker->seat);
    worker->bound = worker->bind_error == 0;
  }
  omp_set_num_threads(1);
  const TaskModes modes;
  pool->n_ready_.fetch_add(1);
  futex_wake(&pool->n_ready_, 1);
  pool->serve(worker);
  return nullptr;
}

void WorkerPool::serve(Worker* worker) {
  for (uint32_t seen = 0;;) {
    bool slept = false;
    seen = await_news(seen, &slept);
    if (stop_.load()) return;
    if (slept && n_wakes_.load() > 0) wake_sleepers(2);
    if (!enter(worker)) continue;
    if (slept && has_unclaimed()) wake_sleepers(2);
    take_tasks(*worker, worker->seat.node);
    leave(worker);
  }
}

uint32_t WorkerPool::await_news(uint32_t seen, bool* slept) {
  int n_looks = 0;
  const auto is_new = [&] {
    if (is_crowded_ && ++n_looks % kLooksPerYield == 0) sched_yield();
    return news_.load(std::memory_order_acquire) != seen;
  };
  const auto limit_ns = [&] {
    const bool awake = may_spin_ && n_wakes_.load(std::memory_order_relaxed) > 0;
    return awake ? std::max(kMaxAwakeNs, spin_ns_) : spin_ns_;
  };
  if (!spin_until(is_new, limit_ns)) {
    n_asleep_.fetch_add(1);  // before the last look at news_: a thread that changes news_ looks at n_asleep_ afterwards
    while (news_.load() == seen) futex_wait(&news_, seen);
    n_asleep_.fetch_sub(1);
    *slept = true;
  }
  return news_.load(std::memory_order_acquire);
}

void WorkerPool::wake_sleepers(int64_t n_wanted) {
  if (n_wanted > 0 && n_asleep_.load() > 0) futex_wake(&news_, static_cast<int>(std::min<int64_t>(n_wanted, 2)));
}

bool WorkerPool::enter(Worker* worker) {
  if (!open_.load(std::memory_order_relaxed)) return false;
  worker->inside.store(kInside);
  if (open_.load()) return true;
  leave(worker);
  return false;
}

void WorkerPool::leave(Worker* worker) {
  if (worker->inside.exchange(kOut) == kAwaited) futex_wake(&worker->inside, 1);
}

void WorkerPool::await_leave(Worker* worker) {
  const auto is_out = [&] { return worker->inside.load() == kOut; };
  while (!spin_until(is_out, [&] { return spin_ns_; })) {
    uint32_t inside = kInside;
    if (worker->inside.compare_exchange_strong(inside, kAwaited) || inside == kAwaited)
      futex_wait(&worker->inside, kAwaited);
  }
}

void WorkerPool::share(int64_t n_tasks, WorkFn work, void* context, const int32_t* task_node) {
  if (n_tasks <= 0) return;
  const std::lock_guard<std::mutex> lock(callers_);
  const TaskModes modes;
  if (n_tasks == 1 || n_workers() == 1) {
    TasksInTurn tasks(n_tasks);
    return work(context, tasks, 0);
  }
  round_ = {n_tasks, work, context, prefers_nodes_ ? task_node : nullptr};
  for (Cursor& cursor : cursors_) cursor.next.store(0, std::memory_order_relaxed);
  open_.store(1);
  news_.fetch_add(1);
  wake_sleepers(n_tasks - (n_workers() - n_asleep_.load()));
  take_tasks(workers_[0], round_.task_node != nullptr ? node_of_caller() : kAllNodes);
  close_round();
}

// The caller is not bound. On a CPU without a node of the pool its node is kAllNodes.
int32_t WorkerPool::node_of_caller() const {
  const int32_t node = topology_->node_of_cpu(seams_.current_cpu != nullptr ? seams_.current_cpu() : sched_getcpu());
  return node < n_nodes() ? node : kAllNodes;
}

// Takes tasks of the worker's own node first, then those of all nodes, then those left on other nodes.
class WorkerPool::Taker final : public TaskSource {
 public:
  Taker(WorkerPool& pool, int32_t own_node) : pool_(pool), own_node_(own_node) {}
  int64_t next() override {
    const Round& round = pool_.round_;
    if (pool_.has_thrown_.load(std::memory_order_relaxed)) return -1;
    if (round.task_node == nullptr) {
      const int64_t i = pool_.cursors_[0].next.fetch_add(1, std::memory_order_relaxed);
      return i < round.n_tasks ? i : -1;
    }
    const int32_t n_nodes = pool_.n_nodes();
    for (; place_ < n_nodes + 2; ++place_) {
      const int32_t node = place_ == 0 ? own_node_ : place_ == 1 ? kAllNodes : (own_node_ + place_ - 1) % n_nodes;
      const int64_t i = pool_.claim_on(node);
      if (i < round.n_tasks) return i;
    }
    return -1;
  }

 private:
  WorkerPool& pool_;
  int32_t own_node_, place_ = 0;
};

void WorkerPool::take_tasks(const Worker& worker, int32_t own_node) noexcept {
  Taker tasks(*this, own_node);
  try {
    round_.work(round_.context, tasks, worker.idx);
  } catch (...) {
    if (!has_thrown_.exchange(true)) thrown_ = std::current_exception();  // the caller reads this once this worker has left
  }
}

// Closes the round, waits until all workers have left, and throws the kept exception.
void WorkerPool::close_round() {
  open_.store(0);
  for (size_t i = 1; i < workers_.size(); ++i) await_leave(&workers_[i]);
  if (!has_thrown_.load(std::memory_order_relaxed)) return;
  has_thrown_.store(false, std::memory_order_relaxed);
  std::rethrow_exception(std::exchange(thrown_, nullptr));
}

// Claims the next task of the node and returns its index, or n_tasks. The node's cursor stands behind the last task taken.
// It only grows during a round, so a compare-and-swap cannot succeed with an outdated value.
int64_t WorkerPool::claim_on(int32_t node) {
  std::atomic<int64_t>& next = cursors_[node == kAllNodes ? n_nodes() : node].next;
  const int64_t n_tasks = round_.n_tasks;
  for (int64_t from = next.load(std::memory_order_relaxed);;) {
    int64_t i = from;
    while (i < n_tasks && node_of_task(i) != node) ++i;
    if (from == n_tasks) return n_tasks;
    if (next.compare_exchange_weak(from, std::min(i + 1, n_tasks), std::memory_order_relaxed)) return i;
  }
}

int32_t WorkerPool::node_of_task(int64_t task_idx) const {
  const int32_t node = round_.task_node[task_idx];
  return node >= 0 && node < n_nodes() ? node : kAllNodes;
}

bool WorkerPool::has_unclaimed() const {
  const size_t n = round_.task_node == nullptr ? 1 : cursors_.size();
  for (size_t i = 0; i < n; ++i) {
    if (cursors_[i].next.load(std::memory_order_relaxed) < round_.n_tasks) return true;
  }
  return false;
}

void WorkerPool::wake() {
  n_wakes_.fetch_add(1);
  if (!may_spin_ || n_asleep_.load() == 0) return;
  news_.fetch_add(1);
  wake_sleepers(2);
}

void WorkerPool::rest() {
  int32_t n = n_wakes_.load();
  while (n > 0 && !n_wakes_.compare_exchange_weak(n, n - 1)) {
  }
}

void WorkerPool::place(void* data, int64_t bytes, int32_t node) {
  if (n_nodes() > 1 && data != nullptr && topology_->bind_memory(data, bytes, node) != 0) n_unplaced_.fetch_add(1);
}

// Does nothing if the other threads would have to share the clear CPUs.
void WorkerPool::keep_clear() {
  if (clear_seats_.size() > static_cast<size_t>(n_others_))
    topology_->bind_this_thread(clear_seats_.data(), clear_seats_.size());
}

std::string WorkerPool::report() const {
  char text[256];
  std::string json = "{\"n_workers\":" + std::to_string(n_workers()) + ",\"n_nodes\":" + std::to_string(n_nodes());
  json += std::string(",\"prefers_nodes\":") + (prefers_nodes_ ? "true" : "false");
  json += ",\"n_unplaced\":" + std::to_string(n_unplaced_.load());
  json += ",\"topology\":\"" + topology_->summary() + "\",\"this_system\":" + (topology_->this_system() ? "true" : "false");
  json +=
      ",\"allowed_cpus\":\"" + topology_->allowed_list() + "\",\"n_allowed_cpus\":" + std::to_string(topology_->n_cpus());
  json += ",\"n_allowed_cores\":" + std::to_string(topology_->n_cores());
  json += ",\"n_left_cpus\":" + std::to_string(n_left_);
  json += n_left_ > 0 ? ",\"left_to\":\"the program's thread, while another one calls the workers for the device\"" : "";
  json += ",\"quota_cpus\":" + (quota_ > 0 ? std::to_string(quota_) : "null");
  json += ",\"spin_ns\":" + std::to_string(spin_ns_) + ",\"oversubscribed\":" + (may_spin_ ? "false" : "true");
  json += ",\"workers\":[";
  for (const Worker& worker : workers_) {
    std::snprintf(
        text, sizeof text, "%s{\"worker\":%d,\"caller\":%s,\"cpu\":%d,\"core\":%d,\"node\":%d,\"numa_node\":%d,\"bound\":%s",
        worker.idx == 0 ? "" : ",", worker.idx, worker.idx == 0 ? "true" : "false", worker.seat.cpu, worker.seat.core,
        worker.seat.node, topology_->node_os_idx(worker.seat.node), worker.bound ? "true" : "false");
    json += text;
    if (worker.bind_error != 0) json += ",\"bind_errno\":" + std::to_string(worker.bind_error);
    json += '}';
  }
  return json + "]}";
}

}  // namespace

void set_start_thread(StartThreadFn start) { start_thread_override.store(start); }

Status create_pool(const PoolOptions& options, const PoolSeams& seams, std::unique_ptr<Pool>* pool) {
  if (options.n_threads < 0 || options.n_threads > kMaxThreads) {
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_threads", "n_threads = %d is not in 0 to %d", options.n_threads,
                kMaxThreads);
  }
  if (options.spin_ns < 0) {
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "spin_ns", "spin_ns = %lld is negative",
                static_cast<long long>(options.spin_ns));
  }
  std::unique_ptr<Topology> topology;
  TANDEM_TRY(Topology::load(seams.topology, &topology));
  auto made = std::make_unique<WorkerPool>(options, seams, std::move(topology));
  TANDEM_TRY(made->start());
  *pool = std::move(made);
  return {};
}

void Pool::run(int64_t n_tasks, TaskFn task, void* context, const int32_t* task_node) {
  struct Call {
    TaskFn task;
    void* context;
  } call{task, context};
  const auto work = [](void* of, TaskSource& tasks, int32_t worker_idx) {
    const Call& each = *static_cast<const Call*>(of);
    for (int64_t i; (i = tasks.next()) >= 0;) each.task(each.context, i, worker_idx);
  };
  share(n_tasks, work, &call, task_node);
}

Status Pool::create(const PoolOptions& options, std::unique_ptr<Pool>* pool) { return create_pool(options, {}, pool); }

}  // namespace tandem::cpu
