// SPDX-License-Identifier: MIT
// An engine on threads that the caller lends. It gives the same bits as an engine with its own workers, starts no thread
// and no more tasks than announced. A failure on a lent thread becomes the call's error.
#include <atomic>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

#include "api_world.h"
#include "failing_new.h"

using namespace tandem_test;

namespace {

constexpr int32_t kThreads = 3;
constexpr int64_t kPrompt = 300;

// Record of an engine's requests to its threads.
struct Lent {
  std::atomic<int64_t> n_rounds{0}, most_tasks{0};
  std::atomic<int32_t> n_inside{0};
  std::atomic<bool> is_wrong{false};  // rounds overlapped, or a task ran on another thread

  void enter(int64_t n_tasks) {
    if (n_inside.fetch_add(1) != 0 || n_tasks < 1) is_wrong.store(true);
    n_rounds.fetch_add(1);
    if (n_tasks > most_tasks.load()) most_tasks.store(n_tasks);
  }
  void leave() { n_inside.fetch_sub(1); }
};

// Runs the tasks on one thread, the last task first.
void run_in_turn(int64_t n_tasks, tandem_task_fn task, void* context, void* user) {
  Lent& lent = *static_cast<Lent*>(user);
  lent.enter(n_tasks);
  for (int64_t i = n_tasks - 1; i >= 0; --i) task(i, context);
  lent.leave();
}

// n_threads threads that wait for tasks. The thread that calls run() runs no task itself. Allocates nothing during a run.
class Crew : public Lent {
 public:
  explicit Crew(int n_threads) {
    for (int i = 0; i < n_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  Crew(const Crew&) = delete;
  ~Crew() {
    {
      const std::lock_guard lock(mutex_);
      has_ended_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  static void run(int64_t n_tasks, tandem_task_fn task, void* context, void* user) {
    Crew& crew = *static_cast<Crew*>(static_cast<Lent*>(user));
    crew.enter(n_tasks);
    std::unique_lock lock(crew.mutex_);
    crew.task_ = task;
    crew.context_ = context;
    crew.next_ = 0;
    crew.n_open_ = crew.n_tasks_ = n_tasks;
    crew.wake_.notify_all();
    crew.done_.wait(lock, [&] { return crew.n_open_ == 0; });
    crew.leave();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return has_ended_ || next_ < n_tasks_; });
      if (has_ended_) return;
      const int64_t mine = next_++;
      lock.unlock();
      task_(mine, context_);
      lock.lock();
      if (--n_open_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  tandem_task_fn task_ = nullptr;
  void* context_ = nullptr;
  int64_t next_ = 0, n_tasks_ = 0, n_open_ = 0;
  bool has_ended_ = false;
};

tandem_engine_options own_options(int32_t matmul_rows) {
  tandem_engine_options options = small_engine_options();
  options.n_threads = kThreads;
  options.matmul_rows = matmul_rows;
  return options;
}

tandem_engine_options lent_options(int32_t matmul_rows, tandem_run_fn run, Lent* lent) {
  tandem_engine_options options = own_options(matmul_rows);
  options.run = run;
  options.run_user = lent;
  return options;
}

// Attends 80 queries over 1,000 keys of two sequences in one call. Half of the keys are hidden. The second sequence's mask
// is large enough that several threads scan it and allocate.
struct TensorsCall {
  Tensor q{{80, kQHeads, kDim}, 1}, k{{1000, kKvHeads, kDim}, 2}, v{{1000, kKvHeads, kDim}, 3}, mask{{80, 600}},
      o{{80, kQHeads, kDim}}, lse{{80, kQHeads}};
  int64_t q_lens[2] = {20, 60}, kv_lens[2] = {400, 600};
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;

  TensorsCall() {
    for (size_t i = 0; i < mask.values.size(); ++i) mask.values[i] = (i * 2654435761u >> 7) % 2 == 0 ? 0.0f : -INFINITY;
    for (Tensor* output : {&o, &lse}) std::memset(output->values.data(), 0xff, output->values.size() * sizeof(float));
    args.n_sequences = 2;
    args.q_lens = q_lens;
    args.kv_lens = kv_lens;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.mask = &mask.view;
    args.o = &o.view;
    args.lse = &lse.view;
  }
  TensorsCall(const TensorsCall&) = delete;
  bool is_untouched() const {
    for (const Tensor* output : {&o, &lse})
      for (const float x : output->values)
        if (!std::isnan(x)) return false;
    return true;
  }
};

void add(std::vector<float>* all, const Tensor& tensor) {
  all->insert(all->end(), tensor.values.begin(), tensor.values.end());
}

// Answers of a prompt and five tokens in each layer of a world, and of attention over tensors.
std::vector<float> answers(const tandem_engine_options& options) {
  World world(&options);
  std::vector<float> all;
  for (int32_t layer_idx = 0; layer_idx < kLayers; ++layer_idx)
    for (int64_t i = 0; i < 6; ++i) {
      const LayerCall call(world.sequence, layer_idx, i == 0 ? kPrompt : 1, 50 + 4 * i);
      OK(tandem_attend, world.session, &call.args);
      add(&all, call.o);
      add(&all, call.lse);
    }
  const TensorsCall call;
  OK(tandem_attend_tensors, world.engine, &call.args);
  add(&all, call.o);
  add(&all, call.lse);
  OK(tandem_engine_drain, world.engine, -1);
  return all;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  assert_int_equal(a.size(), b.size());
  assert_memory_equal(a.data(), b.data(), a.size() * sizeof(float));
}

void test_same_bits_as_own_workers(void**) {
  for (const int32_t matmul_rows : {0, 16, INT32_MAX}) {
    const std::vector<float> own = answers(own_options(matmul_rows));
    for (const float x : own) assert_true(std::isfinite(x));
    Lent in_turn;
    expect_same_bits(own, answers(lent_options(matmul_rows, run_in_turn, &in_turn)));
    Crew crew(kThreads), two(2);  // as many threads as tasks, and fewer threads than tasks
    expect_same_bits(own, answers(lent_options(matmul_rows, Crew::run, &crew)));
    expect_same_bits(own, answers(lent_options(matmul_rows, Crew::run, &two)));
    for (const Lent* lent : {&in_turn, static_cast<Lent*>(&crew), static_cast<Lent*>(&two)}) {
      assert_true(lent->n_rounds.load() > 0 && lent->most_tasks.load() == kThreads);
      assert_false(lent->is_wrong.load());
    }
  }
}

int64_t n_threads_of_process() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("Threads:", 0) == 0) return std::stoll(line.substr(8));
  return -1;
}

void test_no_worker_is_started(void**) {
  Lent lent;
  const tandem_engine_options lent_threads = lent_options(16, run_in_turn, &lent), own = own_options(16);
  const int64_t before = n_threads_of_process();
  if (before < 0) skip();
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, &lent_threads);
  const TensorsCall call;
  OK(tandem_attend_tensors, engine, &call.args);
  assert_int_equal(n_threads_of_process(), before + 1);  // one thread makes selections in the background
  tandem_engine_release(engine);
  OK(tandem_engine_create, &engine, &own);
  assert_int_equal(n_threads_of_process(), before + 1 + kThreads - 1);  // the calling thread is one of the workers
  tandem_engine_release(engine);
}

thread_local bool is_caller = false;

// Makes every allocation of the call fail in turn, including those on lent threads.
int64_t fail_each_allocation(const tandem_engine_options& options, bool (*is_watched)()) {
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, &options);
  TensorsCall expected;
  OK(tandem_attend_tensors, engine, &expected.args);
  tandem_engine_release(engine);
  int64_t n_refused = 0;
  for (int64_t n = 1;; ++n) {
    OK(tandem_engine_create, &engine, &options);  // its work space is empty and has to grow
    TensorsCall call;
    failing_new::is_watched = is_watched;
    failing_new::n_news.store(0);
    failing_new::fails_at.store(n);
    failing_new::armed.store(true);
    const int32_t status = tandem_attend_tensors(engine, &call.args, nullptr);
    failing_new::armed.store(false);
    failing_new::is_watched = nullptr;
    const bool has_failed = failing_new::n_news.load() >= n;
    if (status != TANDEM_OK) {
      assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
      assert_true(has_failed && call.is_untouched());
      ++n_refused;
      OK(tandem_attend_tensors, engine, &call.args);  // the engine still works
    }
    tandem_engine_release(engine);
    expect_same_bits(expected.o.values, call.o.values);
    expect_same_bits(expected.lse.values, call.lse.values);
    if (!has_failed) return n_refused;
  }
}

void test_what_fails_on_a_lent_thread_reaches_the_caller(void**) {
  is_caller = true;
  Lent in_turn;
  Crew crew(kThreads);
  const auto anywhere = [] { return true; };
  const auto on_lent_threads = [] { return !is_caller; };
  assert_true(fail_each_allocation(lent_options(16, run_in_turn, &in_turn), anywhere) > 10);
  assert_true(fail_each_allocation(lent_options(INT32_MAX, Crew::run, &crew), on_lent_threads) > 0);
  assert_true(fail_each_allocation(own_options(16), anywhere) > 10);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_same_bits_as_own_workers),
      cmocka_unit_test(test_no_worker_is_started),
      cmocka_unit_test(test_what_fails_on_a_lent_thread_reaches_the_caller),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
