// SPDX-License-Identifier: MIT
// A signal handler may run on any thread, at any instruction of a call, and changes nothing.
//
// One to four threads append, decode and refresh. A sender sends SIGUSR1 to them. To every thread of the process, the
// library's workers included, the sender also sends the signal by which glibc changes a program's user or groups. The
// handlers check the stack that they run on, because a frame outside the thread's stack overwrites other memory. (oneDNN's
// f32 products move the stack pointer into the heap: cpu/signals_held.h.) Every answer is compared with the answer without
// signals.
//
// TANDEM_STORM_SECONDS: duration of each storm (four for each instruction set). The default is half a second.
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "api_world.h"

using namespace tandem_test;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSetxid = 33;  // reserved by glibc, not available to sigaction()
constexpr int64_t kChunk = 256;
constexpr int kAppends = 2, kDecodes = 4;

std::atomic<int64_t> n_handled{0}, n_outside{0}, n_internal{0};
uintptr_t stack_bytes = 0;  // of every thread except the first one, which gets no signal

// glibc keeps a thread's control block at the upper end of its stack.
void look_where(int signal) {
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const auto top = reinterpret_cast<uintptr_t>(pthread_self());
  volatile unsigned char used[2048];  // memory that a real handler would write
  for (volatile unsigned char& byte : used) byte = 0xee;
  n_handled.fetch_add(1, std::memory_order_relaxed);
  if (signal == kSetxid) n_internal.fetch_add(1, std::memory_order_relaxed);
  if (frame > top || top - frame > stack_bytes) n_outside.fetch_add(1, std::memory_order_relaxed);
}

// The kernel's struct of a signal action. Its handler is copied from a signal that sigaction() can set, to a signal that it
// cannot.
struct KernelAction {
  void* handler;
  unsigned long flags;
  void* restorer;
  uint64_t mask;
};

void handle_signals() {
  std::thread([] {}).join();  // glibc sets its handler only when the first thread starts
  struct sigaction action = {};
  action.sa_handler = look_where;
  action.sa_flags = SA_RESTART;
  assert_int_equal(sigaction(SIGUSR1, &action, nullptr), 0);
  KernelAction as_set = {};
  assert_int_equal(syscall(SYS_rt_sigaction, SIGUSR1, nullptr, &as_set, sizeof as_set.mask), 0);
  assert_int_equal(syscall(SYS_rt_sigaction, kSetxid, &as_set, nullptr, sizeof as_set.mask), 0);
  pthread_attr_t attributes;
  size_t bytes = 0;
  assert_int_equal(pthread_getattr_default_np(&attributes), 0);
  assert_int_equal(pthread_attr_getstacksize(&attributes, &bytes), 0);
  pthread_attr_destroy(&attributes);
  stack_bytes = bytes;
}

std::vector<pid_t> other_threads() {
  std::vector<pid_t> threads;
  DIR* directory = opendir("/proc/self/task");
  assert_non_null(directory);
  while (const dirent* entry = readdir(directory)) {
    const auto id = static_cast<pid_t>(std::atoi(entry->d_name));
    if (id > 0 && id != getpid() && id != gettid()) threads.push_back(id);
  }
  closedir(directory);
  return threads;
}

tandem_engine_options storm_engine(const char* isa, int32_t n_threads) {
  tandem_engine_options options = small_engine_options();
  options.cpu_isa = isa;
  options.n_threads = n_threads;
  options.matmul_rows = 32;
  return options;
}

// Converts tensors to the type of the products. The upper halves of floats are bf16.
void narrow(Tensor& tensor) {
  auto* const to = reinterpret_cast<uint16_t*>(tensor.values.data());
  for (size_t i = 0; i < tensor.values.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &tensor.values[i], sizeof bits);
    to[i] = static_cast<uint16_t>(bits >> 16);
  }
  tensor.view.dtype = TANDEM_BF16;
}

// Covers all work of the processor in a call: appends by matrix products, decodes by kernels, refreshes of selections.
std::vector<float> answers_of(tandem_engine* engine, int32_t dtype) {
  tandem_layer_options layer = plain_layer();
  layer.k_head_dim = 128;
  layer.n_q_heads = 8;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  OK(tandem_model_create, &model, &layer, 1);
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.k_type = cache_options.v_type = dtype;
  OK(tandem_cache_create, &cache, engine, model, &cache_options);
  const tandem_session_options session_options = world_session_options();
  OK(tandem_session_create, &session, cache, &session_options);
  OK(tandem_sequence_create, &sequence, cache);
  std::vector<float> answers;
  for (int i = 0; i < kAppends + kDecodes; ++i) {
    const int64_t n = i < kAppends ? kChunk : 1;
    Tensor q({n, 8, 128}, i), k({n, kKvHeads, 128}, 50 + i), v({n, kKvHeads, 128}, 100 + i), o({n, 8, 128});
    for (Tensor* input : {&q, &k, &v})
      if (dtype == TANDEM_BF16) narrow(*input);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &n;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o.view;
    OK(tandem_attend, session, &args);
    answers.insert(answers.end(), o.values.begin(), o.values.end());
  }
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  return answers;
}

struct Caller {
  tandem_engine* engine;
  int32_t dtype;
  const std::vector<float>& quiet;
  std::atomic<bool>& stop;
  std::atomic<int>& n_left;
  int64_t n_rounds = 0, n_different = 0;

  void run() {
    while (!stop.load(std::memory_order_relaxed)) {
      const std::vector<float> now = answers_of(engine, dtype);
      ++n_rounds;
      for (size_t i = 0; i < now.size(); ++i) n_different += !(std::fabs(now[i] - quiet[i]) <= 1e-5f);
    }
    --n_left;
  }
};

double seconds_of_storm() {
  const char* seconds = std::getenv("TANDEM_STORM_SECONDS");
  return seconds == nullptr ? 0.5 : std::atof(seconds);
}

void send_until_left(const std::atomic<int>& n_left, std::atomic<bool>& stop) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds_of_storm());
  while (n_left > 0) {
    for (const pid_t thread : other_threads()) {
      syscall(SYS_tgkill, getpid(), thread, SIGUSR1);  // stays pending for the workers, which block it
      syscall(SYS_tgkill, getpid(), thread, kSetxid);
      const timespec pause = {0, 50'000};
      nanosleep(&pause, nullptr);
    }
    if (Clock::now() >= end) stop = true;
  }
}

void storm(const char* isa, int32_t dtype, int n_callers) {
  tandem_engine* engine = nullptr;
  const tandem_engine_options options = storm_engine(isa, 3);
  OK(tandem_engine_create, &engine, &options);
  const std::vector<float> quiet = answers_of(engine, dtype);
  std::atomic<bool> stop{false};
  std::atomic<int> n_left{n_callers};
  std::vector<Caller> callers(static_cast<size_t>(n_callers), Caller{engine, dtype, quiet, stop, n_left});
  std::vector<std::thread> threads;
  const int64_t n_before = n_handled;
  for (Caller& caller : callers) threads.emplace_back([&caller] { caller.run(); });
  send_until_left(n_left, stop);
  for (std::thread& thread : threads) thread.join();
  int64_t n_rounds = 0;
  for (const Caller& caller : callers) {
    n_rounds += caller.n_rounds;
    assert_int_equal(caller.n_different, 0);
  }
  print_message("%s, %s, %d callers: %lld rounds, %lld signals handled\n", isa, tandem_dtype_name(dtype), n_callers,
                static_cast<long long>(n_rounds), static_cast<long long>(n_handled - n_before));
  assert_true(n_handled - n_before > 100);
  tandem_engine_release(engine);
}

// The handler cannot check the main thread's stack, so the storm runs over threads that it starts.
void handlers_run_on_stacks(void**) {
  handle_signals();
  static const char* const kIsas[] = {"amx", "avx3_dl", "avx2", "ssse3", "neon"};
  int n_isas = 0;
  for (const char* isa : kIsas) {
    tandem_engine* engine = nullptr;
    const tandem_engine_options options = storm_engine(isa, 1);
    if (tandem_engine_create(&engine, &options, nullptr) != TANDEM_OK) continue;
    tandem_engine_release(engine);
    ++n_isas;
    for (const int32_t dtype : {TANDEM_F32, TANDEM_BF16})
      for (const int n_callers : {1, 4}) storm(isa, dtype, n_callers);
  }
  assert_true(n_isas > 0);
  assert_true(n_internal > 0);
  assert_int_equal(n_outside, 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(handlers_run_on_stacks)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
