// SPDX-License-Identifier: MIT
// The worker pool runs each task once, for any caller and number of workers, and changes nothing of the caller's.
//
// Most tests run on this machine, if needed with more workers than CPUs (such workers sleep instead of spinning). In a
// meeting every task waits for all others, which proves that every worker comes when there is work for it.
#include <fcntl.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fp_modes_of_caller.h"
#include "one_in.h"

namespace {
std::atomic<int64_t> n_allocations{0};
}

[[gnu::noinline]] void* operator new(size_t bytes) {
  n_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* data = std::malloc(bytes)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

#include "cpu/pool_case.h"

namespace {

using namespace tandem::cpu;
using tandem::Status;

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

void meet(Pool* pool, void (*look)(void*, int32_t) = nullptr, void* context = nullptr) {
  Meeting meeting(pool->n_workers());
  meeting.look = look;
  meeting.context = context;
  pool->run(pool->n_workers(), Meeting::task, &meeting);
  assert_int_equal(meeting.n_here.load(), pool->n_workers());
}

void each_task_runs_once(void**) {
  for (int32_t n_threads = 1; n_threads <= 8; ++n_threads) {
    const auto pool = make_pool(n_threads);
    assert_int_equal(pool->n_workers(), n_threads);
    for (int64_t n_tasks = 0; n_tasks <= 1000; ++n_tasks) {
      Tally tally(n_tasks, n_threads);
      pool->run(n_tasks, Tally::task, &tally);
      tally.assert_each_once();
      for (const auto& order : tally.order) assert_true(std::is_sorted(order.begin(), order.end()));
    }
    Tally none(0, n_threads);
    pool->run(-5, Tally::task, &none);
    none.assert_each_once();
  }
}

void every_worker_comes(void**) {
  for (int32_t n_threads = 1; n_threads <= 8; ++n_threads) {
    const auto pool = make_pool(n_threads);
    for (int i = 0; i < 50; ++i) meet(pool.get());
    sleep_ms(5);  // all workers asleep
    meet(pool.get());
    pool->wake();
    meet(pool.get());
    pool->rest();
  }
}

void concurrent_callers_wait_their_turn(void**) {
  for (int32_t n_threads : {1, 2, 4}) {
    const auto pool = make_pool(n_threads);
    std::vector<std::atomic<int32_t>> busy(n_threads);
    std::atomic<int32_t> n_wrong{0};
    struct Shared {
      std::vector<std::atomic<int32_t>>* busy;
      std::atomic<int32_t>* n_wrong;
      std::atomic<int64_t> sum{0};
    };
    const auto task = [](void* context, int64_t i, int32_t worker) {
      Shared& shared = *static_cast<Shared*>(context);
      if ((*shared.busy)[worker].exchange(1) != 0) shared.n_wrong->fetch_add(1);
      if (i % 5 == 0) sched_yield();
      shared.sum.fetch_add(i + 1);
      (*shared.busy)[worker].store(0);
    };
    const auto caller = [&] {
      for (int64_t n_tasks = 1; n_tasks <= 150; ++n_tasks) {
        Shared shared{&busy, &n_wrong, {}};
        pool->run(n_tasks % 7, task, &shared);
        if (shared.sum.load() != (n_tasks % 7) * (n_tasks % 7 + 1) / 2) n_wrong.fetch_add(1);
      }
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) callers.emplace_back(caller);
    for (std::thread& thread : callers) thread.join();
    assert_int_equal(n_wrong.load(), 0);
  }
}

int64_t process_cpu_ms() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
}

// Returns the least CPU time of some stretches of 200 ms. An idle pool takes no more than this, while other processes may
// disturb a stretch.
int64_t cpu_ms_while_idle(int64_t enough) {
  int64_t least = INT64_MAX;
  for (int i = 0; i < 8 && least >= enough; ++i) {
    sleep_ms(30);
    const int64_t before = process_cpu_ms();
    sleep_ms(200);
    least = std::min(least, process_cpu_ms() - before);
  }
  return least;
}
constexpr int64_t kSleptMs = 10;

// Returns how often a thread has gone to sleep. Waiting for a core does not count.
int64_t n_sleeps(pid_t thread) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  const std::string name = "voluntary_ctxt_switches:";
  for (std::string line; std::getline(status, line);)
    if (line.rfind(name, 0) == 0) return std::stoll(line.substr(name.size()));
  fail_msg("/proc does not say how often a thread has slept");
  return -1;
}

int64_t steady_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Makes rounds half a millisecond apart, like the layers of a step, and returns the share after which the worker has gone
// to sleep. Only rounds count whose next round could come within the millisecond for which an awake worker looks for it.
// Time that the worker waits for a core does not matter.
double share_of_sleeps(Pool& pool, pid_t worker) {
  constexpr int64_t kAwakeUs = 1000, kMostUs = 60'000'000;
  constexpr int kRounds = 200;
  int n_rounds = 0, n_slept = 0;
  for (const int64_t end = steady_us() + kMostUs; n_rounds < kRounds && steady_us() < end;) {
    const int64_t begin = steady_us();
    pool.run(
        2, [](void*, int64_t, int32_t) {}, nullptr);
    const int64_t before = n_sleeps(worker);
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    const int64_t after = n_sleeps(worker);
    if (steady_us() - begin >= kAwakeUs) continue;
    ++n_rounds;
    n_slept += after > before;
  }
  assert_int_equal(n_rounds, kRounds);
  return static_cast<double>(n_slept) / kRounds;
}

// A stopped process counts as asleep, and a worker that waits for a core goes to sleep late. A worker that is kept awake
// sleeps after hardly any counted round. Any other worker sleeps after nearly all, or on a busy machine after some rounds
// of one stretch.
constexpr double kSome = 0.1;

void expect_awake(Pool& pool, pid_t worker) { assert_true(share_of_sleeps(pool, worker) <= kSome); }

void expect_asleep(Pool& pool, pid_t worker) {
  double share = 0.0;
  for (int i = 0; i < 30 && share <= kSome; ++i) share = share_of_sleeps(pool, worker);
  assert_true(share > kSome);
}

void wake_keeps_workers_spinning_until_rest(void**) {
  const bool may_spin = !nlohmann::json::parse(make_pool(2)->report())["oversubscribed"].get<bool>();
  if (!may_spin || tandem::test::one_in() > 1) skip();  // slow workers spin otherwise
  const auto pool = make_pool(2);
  pid_t threads[2] = {};
  meet(
      pool.get(), [](void* of, int32_t worker) { static_cast<pid_t*>(of)[worker] = gettid(); }, threads);
  const pid_t worker = threads[1];
  assert_true(cpu_ms_while_idle(kSleptMs) < kSleptMs);
  expect_asleep(*pool, worker);
  pool->wake();
  assert_true(cpu_ms_while_idle(kSleptMs) < kSleptMs);  // no work came, so the cores belong to the caller again
  expect_awake(*pool, worker);
  pool->wake();
  pool->rest();
  expect_awake(*pool, worker);
  pool->rest();
  expect_asleep(*pool, worker);
  pool->rest();  // without its wake()
  pool->wake();
  expect_awake(*pool, worker);
  assert_true(cpu_ms_while_idle(kSleptMs) < kSleptMs);  // without a rest() the workers do not spin forever
  meet(pool.get());
  pool->rest();
}

void more_workers_than_cpus_never_spin(void**) {
  const int32_t n_threads = static_cast<int32_t>(std::thread::hardware_concurrency()) + 2;
  const auto pool = make_pool(n_threads, 10'000'000'000);
  const auto report = nlohmann::json::parse(pool->report());
  assert_true(report["oversubscribed"].get<bool>());
  assert_int_equal(report["spin_ns"].get<int64_t>(), 0);
  for (const auto& worker : report["workers"]) assert_false(worker["bound"].get<bool>());
  pool->wake();
  meet(pool.get());
  assert_true(cpu_ms_while_idle(kSleptMs) < kSleptMs);
  pool->rest();
}

int64_t n_threads_of_process() {
  int64_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) n += entry.is_directory();
  return n;
}

int64_t n_threads_at_start = 0;  // threads of the program before its first pool

// A joined thread stays in /proc for a while.
void expect_threads(int64_t n) {
  for (int i = 0; i < 60'000 && n_threads_of_process() != n; ++i) sleep_ms(1);
  assert_int_equal(n_threads_of_process(), n);
}

std::atomic<int32_t> n_starts{0};
int32_t failing_start = 0;

int fail_nth_start(pthread_t* thread, void* (*body)(void*), void* argument) {
  if (++n_starts == failing_start) {
    std::memset(thread, 0x5a, sizeof *thread);  // undefined after a failure, so pthread_join() must not be called
    return EAGAIN;
  }
  return pthread_create(thread, nullptr, body, argument);
}

void a_thread_that_does_not_start_leaves_nothing_behind(void**) {
  tandem::cpu::set_start_thread(fail_nth_start);
  for (failing_start = 1; failing_start <= 5; ++failing_start) {
    n_starts = 0;
    std::unique_ptr<Pool> pool;
    const Status status = create_pool({6, 50'000, true}, {}, &pool);
    assert_int_equal(status.code(), TANDEM_ERROR_SYSTEM);
    assert_int_equal(status.info().underlying, EAGAIN);
    assert_string_equal(status.info().field.c_str(), "n_threads");
    assert_int_equal(n_starts.load(), failing_start);
    assert_null(pool.get());
    expect_threads(n_threads_at_start);
  }
  n_starts = 0;
  const auto pool = make_pool(6);  // starts five threads, so the sixth start never fails
  tandem::cpu::set_start_thread(nullptr);
  expect_threads(n_threads_at_start + 5);
  meet(pool.get());
}

void options_out_of_range_are_refused(void**) {
  std::unique_ptr<Pool> pool;
  for (const PoolOptions& options :
       {PoolOptions{-1, 0, true}, PoolOptions{4097, 0, true}, PoolOptions{INT32_MIN, 0, true}}) {
    const Status status = Pool::create(options, &pool);
    assert_int_equal(status.code(), TANDEM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(status.info().field.c_str(), "n_threads");
  }
  const Status status = Pool::create({1, -1, true}, &pool);
  assert_int_equal(status.code(), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_string_equal(status.info().field.c_str(), "spin_ns");
  assert_null(pool.get());
}

void affinity_and_signals_of_the_caller_stay(void**) {
  cpu_set_t cpus_before, cpus_after;
  sigset_t signals_before, signals_after;
  sched_getaffinity(0, sizeof cpus_before, &cpus_before);
  sigemptyset(&signals_before);
  sigaddset(&signals_before, SIGUSR2);
  pthread_sigmask(SIG_SETMASK, &signals_before, nullptr);
  {
    const auto pool = make_pool(0);
    meet(pool.get());
    sched_getaffinity(0, sizeof cpus_after, &cpus_after);
    assert_true(CPU_EQUAL(&cpus_before, &cpus_after));
  }
  sched_getaffinity(0, sizeof cpus_after, &cpus_after);
  pthread_sigmask(SIG_SETMASK, nullptr, &signals_after);
  pthread_sigmask(SIG_UNBLOCK, &signals_before, nullptr);
  assert_true(CPU_EQUAL(&cpus_before, &cpus_after));
  for (int i = 1; i < 32; ++i) assert_int_equal(sigismember(&signals_before, i), sigismember(&signals_after, i));
}

struct Seen {
  char name[16] = "";
  cpu_set_t cpus;
  sigset_t signals;
  int n_omp_threads = -1;
  uint64_t fp_modes = 0;

  static void look(void* context, int32_t worker) {
    Seen& seen = static_cast<Seen*>(context)[worker];
    pthread_getname_np(pthread_self(), seen.name, sizeof seen.name);
    sched_getaffinity(0, sizeof seen.cpus, &seen.cpus);
    pthread_sigmask(SIG_SETMASK, nullptr, &seen.signals);
    seen.n_omp_threads = omp_get_max_threads();
    seen.fp_modes = tandem_test::fp_modes();
  }
};

void workers_are_named_bound_and_deaf_to_signals(void**) {
  const auto pool = make_pool(0);
  const auto report = nlohmann::json::parse(pool->report());
  std::vector<Seen> seen(pool->n_workers());
  meet(pool.get(), Seen::look, seen.data());
  for (int32_t i = 1; i < pool->n_workers(); ++i) {
    assert_string_equal(seen[i].name, ("tandem-" + std::to_string(i)).c_str());
    for (int signal : {SIGINT, SIGTERM, SIGCHLD, SIGUSR1, SIGPROF}) assert_true(sigismember(&seen[i].signals, signal));
    assert_false(sigismember(&seen[i].signals, SIGSEGV));
    assert_int_equal(report["workers"][i]["bound"].get<bool>(), report["this_system"].get<bool>());
    if (!report["this_system"].get<bool>()) continue;  // the topology comes from hwloc's environment variables
    assert_int_equal(CPU_COUNT(&seen[i].cpus), 1);
    assert_true(CPU_ISSET(report["workers"][i]["cpu"].get<int>(), &seen[i].cpus));
    assert_false(CPU_ISSET(report["workers"][0]["cpu"].get<int>(), &seen[i].cpus));
  }
  std::unique_ptr<Pool> loose;
  assert_true(Pool::create({2, 50'000, false}, &loose).ok());
  cpu_set_t own;
  sched_getaffinity(0, sizeof own, &own);
  std::vector<Seen> of_loose(2);
  meet(loose.get(), Seen::look, of_loose.data());
  assert_true(CPU_EQUAL(&of_loose[1].cpus, &own));
  assert_false(nlohmann::json::parse(loose->report())["workers"][1]["bound"].get<bool>());
}

void tasks_have_one_omp_thread_and_default_fp_modes(void**) {
  const int n_before = omp_get_max_threads();
  for (int32_t n_threads : {1, 4}) {
    const auto pool = make_pool(n_threads);
    std::vector<Seen> seen(n_threads);
    omp_set_num_threads(3);
    const uint64_t fp_before = tandem_test::fp_modes();
    tandem_test::set_fp_modes(tandem_test::kFlushing);
    meet(pool.get(), Seen::look, seen.data());
    assert_int_equal(omp_get_max_threads(), 3);
    const uint64_t fp_after = tandem_test::fp_modes();
    tandem_test::set_fp_modes(fp_before);
    assert_int_equal(fp_after, tandem_test::kFlushing);
    for (const Seen& one : seen) assert_int_equal(one.fp_modes, tandem_test::kDefaultFpModes);
    for (const Seen& one : seen) assert_int_equal(one.n_omp_threads, 1);
  }
  omp_set_num_threads(n_before);
}

void nothing(void*, int64_t, int32_t) {}

void a_hundred_thousand_runs_allocate_nothing(void**) {
  for (int32_t n_threads : {2, 4}) {
    const auto pool = make_pool(n_threads);
    pool->run(4, nothing, nullptr);
    const int64_t n_before = n_allocations.load();
    for (int i = 0; i < (n_threads == 2 ? 100'000 : 10'000); ++i) {
      if (i % 1000 == 0) pool->wake();
      pool->run(i % 4, nothing, nullptr);
      if (i % 1000 == 500) pool->rest();
    }
    assert_int_equal(n_allocations.load(), n_before);
    Tally tally(100, n_threads);
    pool->run(100, Tally::task, &tally);
    tally.assert_each_once();
    meet(pool.get());
  }
}

void pools_end_in_every_state(void**) {
  for (int32_t n_threads : {1, 2, 6}) {
    for (int i = 0; i < 20; ++i) make_pool(n_threads);  // threads have hardly started
    auto pool = make_pool(n_threads);
    sleep_ms(5);
    pool.reset();  // asleep
    pool = make_pool(n_threads);
    pool->wake();
    pool.reset();  // awake
    pool = make_pool(n_threads, 0);
    meet(pool.get());
    pool.reset();  // just finished
  }
  expect_threads(n_threads_at_start);
}

void a_child_after_fork_can_destroy_it(void**) {
  auto pool = make_pool(3);
  meet(pool.get());
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    pool.reset();
    _exit(7);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 7);
  meet(pool.get());
}

void sized_by_cores_and_quota(void**) {
  char folder[] = "/tmp/tandem-pool-XXXXXX";
  assert_non_null(mkdtemp(folder));
  PoolSeams seams = on_machine("numa:2 core:4 pu:2");
  assert_int_equal(make_pool(0, 0, seams)->n_workers(), 8);
  assert_int_equal(make_pool(11, 0, seams)->n_workers(), 11);
  assert_int_equal(make_pool(1, 0, seams)->n_nodes(), 1);
  seams.cgroup = {std::string(folder) + "/proc", folder};
  std::filesystem::create_directories(seams.cgroup.proc);
  std::ofstream(seams.cgroup.proc + "/cgroup") << "0::/\n";
  std::ofstream(seams.cgroup.proc + "/mountinfo") << "31 22 0:27 / / rw - cgroup2 cgroup2 rw\n";
  for (const auto& [text, n_workers] : {std::pair("max 100000", 8), std::pair("390000 100000", 3), std::pair("9 100", 1)}) {
    std::ofstream(std::string(folder) + "/cpu.max") << text;
    const auto pool = make_pool(0, 0, seams);
    assert_int_equal(pool->n_workers(), n_workers);
    assert_int_equal(pool->n_nodes(), n_workers == 1 ? 1 : 2);
  }
  std::ofstream(std::string(folder) + "/cpu.max") << "100000 100000";
  const auto report = nlohmann::json::parse(make_pool(2, 50'000, seams)->report());
  assert_true(report["oversubscribed"].get<bool>());  // two busy threads would be stopped half of the time
  assert_int_equal(report["quota_cpus"].get<int>(), 1);
  std::filesystem::remove_all(folder);
}

// Leaves a CPU to each other thread if there are CPUs beside those of the workers, or if there are enough CPUs.
void leaves_room_for_others(void**) {
  const auto check = [](const char* machine, int32_t n_threads, int32_t n_workers, int32_t n_left) {
    std::unique_ptr<Pool> pool;
    assert_true(create_pool({n_threads, 0, true, 1}, on_machine(machine), &pool).ok());
    assert_int_equal(pool->n_workers(), n_workers);
    assert_int_equal(nlohmann::json::parse(pool->report())["n_left_cpus"].get<int>(), n_left);
  };
  check("numa:1 core:16 pu:1", 0, 15, 1);
  check("numa:1 core:16 pu:2", 0, 16, 1);  // the other half of a core is enough
  check("numa:1 core:4 pu:1", 0, 3, 1);
  check("numa:1 core:3 pu:1", 0, 3, 0);
  check("numa:1 core:1 pu:1", 0, 1, 0);
  check("numa:1 core:16 pu:1", 16, 16, 0);
}

void who_keeps_clear_is_where_no_worker_is(void**) {
  const auto pool = make_pool(0);
  const auto report = nlohmann::json::parse(pool->report());
  if (!report["this_system"].get<bool>()) return;
  cpu_set_t before, clear;
  sched_getaffinity(0, sizeof before, &before);
  std::thread([&] {
    pool->keep_clear();
    sched_getaffinity(0, sizeof clear, &clear);
  }).join();
  assert_true(CPU_ISSET(report["workers"][0]["cpu"].get<int>(), &clear));
  for (int32_t i = 1; i < pool->n_workers(); ++i) assert_false(CPU_ISSET(report["workers"][i]["cpu"].get<int>(), &clear));
  std::unique_ptr<Pool> loose;  // its workers are not bound, so every CPU is clear
  assert_true(Pool::create({2, 50'000, false}, &loose).ok());
  std::thread([&] {
    loose->keep_clear();
    sched_getaffinity(0, sizeof clear, &clear);
  }).join();
  assert_true(CPU_EQUAL(&clear, &before));
}

// Work in which one worker, or every worker, throws after all have come. The other workers continue for a while.
struct Throwing {
  std::atomic<int32_t> n_here{0}, n_inside{0};
  int32_t n_expected = 0, thrower = 0;  // thrower -1: all

  static void work(void* self, TaskSource& tasks, int32_t worker) {
    Throwing& call = *static_cast<Throwing*>(self);
    struct Inside {
      std::atomic<int32_t>& n;
      explicit Inside(std::atomic<int32_t>& count) : n(count) { ++n; }
      ~Inside() { --n; }
    } const inside(call.n_inside);
    if (tasks.next() < 0) return;  // a sleeping worker that comes late
    ++call.n_here;
    while (call.n_here.load() < call.n_expected) sched_yield();
    if (call.thrower < 0 || worker == call.thrower) throw std::bad_alloc();
    sleep_ms(3);
    while (tasks.next() >= 0) sched_yield();
  }
};

// The caller gets the exception after all workers have left the work, because the context may be gone afterwards. The next
// round works as usual.
void what_work_throws_reaches_the_caller(void**) {
  for (int32_t n_threads = 1; n_threads <= 4; ++n_threads) {
    const auto pool = make_pool(n_threads);
    for (int32_t thrower = -1; thrower < n_threads; ++thrower) {
      for (int round = 0; round < 20; ++round) {
        Throwing call;
        call.n_expected = n_threads;
        call.thrower = thrower;
        bool has_thrown = false;
        try {
          pool->share(round == 0 && n_threads == 1 ? 1 : 1'000'000'000'000, Throwing::work, &call);
        } catch (const std::bad_alloc&) {
          has_thrown = true;
        }
        assert_true(has_thrown);
        assert_int_equal(call.n_inside.load(), 0);
        if (round % 5 == 4) sleep_ms(2);  // all workers asleep
      }
      Tally tally(100, n_threads);
      pool->run(100, Tally::task, &tally);
      tally.assert_each_once();
      meet(pool.get());
    }
  }
}

void report_says_where_everyone_is(void**) {
  const auto pool = make_pool(5, 0, on_machine("pack:2 numa:1 l3:1 core:2 pu:2"));
  const auto report = nlohmann::json::parse(pool->report());
  assert_int_equal(report["n_workers"].get<int>(), 5);
  assert_int_equal(report["n_nodes"].get<int>(), 2);
  assert_string_equal(report["allowed_cpus"].get<std::string>().c_str(), "0-7");
  assert_true(report["quota_cpus"].is_null());
  assert_false(report["this_system"].get<bool>());
  assert_string_equal(report["topology"].get<std::string>().c_str(),
                      "2 packages, 2 NUMA nodes, 2 L3 caches, 4 cores, 8 PUs");
  const int cpus[] = {0, 4, 2, 6, 1};
  const int nodes[] = {0, 1, 0, 1, 0};
  for (int i = 0; i < 5; ++i) {
    const auto& worker = report["workers"][i];
    assert_int_equal(worker["cpu"].get<int>(), cpus[i]);
    assert_int_equal(worker["core"].get<int>(), cpus[i] / 2);
    assert_int_equal(worker["node"].get<int>(), nodes[i]);
    assert_int_equal(worker["caller"].get<bool>(), i == 0);
    assert_false(worker["bound"].get<bool>());  // not the real machine
    if (i > 0) assert_int_equal(worker["bind_errno"].get<int>(), ENOTSUP);
  }
}

}  // namespace

int main() {
  n_threads_at_start = n_threads_of_process();
  const CMUnitTest tests[] = {
      cmocka_unit_test(each_task_runs_once),
      cmocka_unit_test(every_worker_comes),
      cmocka_unit_test(concurrent_callers_wait_their_turn),
      cmocka_unit_test(wake_keeps_workers_spinning_until_rest),
      cmocka_unit_test(more_workers_than_cpus_never_spin),
      cmocka_unit_test(a_thread_that_does_not_start_leaves_nothing_behind),
      cmocka_unit_test(options_out_of_range_are_refused),
      cmocka_unit_test(affinity_and_signals_of_the_caller_stay),
      cmocka_unit_test(workers_are_named_bound_and_deaf_to_signals),
      cmocka_unit_test(tasks_have_one_omp_thread_and_default_fp_modes),
      cmocka_unit_test(a_hundred_thousand_runs_allocate_nothing),
      cmocka_unit_test(pools_end_in_every_state),
      cmocka_unit_test(a_child_after_fork_can_destroy_it),
      cmocka_unit_test(sized_by_cores_and_quota),
      cmocka_unit_test(leaves_room_for_others),
      cmocka_unit_test(who_keeps_clear_is_where_no_worker_is),
      cmocka_unit_test(what_work_throws_reaches_the_caller),
      cmocka_unit_test(report_says_where_everyone_is),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
