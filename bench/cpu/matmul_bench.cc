// SPDX-License-Identifier: MIT
// Speed of appends and prefills: GFLOP/s over unmasked pairs of query and key, and the share of the speed that oneDNN alone
// reaches in the same run on the inner tile (128 rows x 512 keys, both products). Keys are in the last-level cache (warm).
// tandem-bench append and prefill read them from memory. Times are processor time of the threads, so that neighbours on a
// shared machine matter less. Wall time is printed too. Each shape is checked.
// Arguments: names of shapes, default all, and numbers of threads, default 1 and 2.
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/isa.h"
#include "cpu/matmul_attend.h"
#include "cpu/matmul_case.h"
#include "onednn_matmul.h"

namespace tandem::test {
namespace {

using cpu::MatmulAttend;

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Returns the processor time of this thread.
double cpu_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Shape {
  const char* name;
  int32_t n_kv_heads, group_size, head_dim, q_len;
  int64_t kv_len;   // keys before the queries
  int32_t run_len;  // 0: one run
  bool q_is_bf16;
  int32_t aliased_dim = 0;  // dims of V within K; 0: V is separate and has K's dims
  int32_t kv_type = TANDEM_BF16;
  int32_t v_head_dim() const { return aliased_dim > 0 ? aliased_dim : head_dim; }
};

constexpr Shape kShapes[] = {
    {"append-32-bf16", 8, 4, 128, 32, 8192, 128, true},
    {"append-32-f32", 8, 4, 128, 32, 8192, 128, false},
    {"prefill-512-bf16", 8, 4, 128, 512, 8192, 128, true},
    {"prefill-512-f32", 8, 4, 128, 512, 8192, 128, false},
    {"prefill-512-bf16-1run", 8, 4, 128, 512, 8192, 0, true},
    {"prefill-4096-bf16", 2, 4, 128, 4096, 8192, 128, true},
    {"prefill-4096-f32", 2, 4, 128, 4096, 8192, 128, false},
    {"pico-512-f32", 2, 3, 64, 512, 16384, 128, false},
    {"append-32-f16", 8, 4, 128, 32, 8192, 128, false, 0, TANDEM_F16},
    {"prefill-512-f16", 8, 4, 128, 512, 8192, 128, false, 0, TANDEM_F16},
    {"append-32-bf16-64k", 4, 4, 128, 32, 65536, 128, true},
    {"append-32-f32-64k", 4, 4, 128, 32, 65536, 128, false},
    {"append-1-bf16", 8, 4, 128, 1, 8192, 128, true},
    {"append-4-bf16", 8, 4, 128, 4, 8192, 128, true},
    {"append-8-bf16", 8, 4, 128, 8, 8192, 128, true},
    {"append-16-bf16", 8, 4, 128, 16, 8192, 128, true},
    {"append-1-f32", 8, 4, 128, 1, 8192, 128, false},
    {"append-4-f32", 8, 4, 128, 4, 8192, 128, false},
    {"append-8-f32", 8, 4, 128, 8, 8192, 128, false},
    {"append-16-f32", 8, 4, 128, 16, 8192, 128, false},
    {"mla-1-bf16", 1, 128, 576, 1, 8192, 128, true, 512},
    {"mla-1-f32", 1, 128, 576, 1, 8192, 128, false, 512},
    {"mla-32-bf16", 1, 128, 576, 32, 8192, 128, true, 512},
    {"mla-32-f32", 1, 128, 576, 32, 8192, 128, false, 512},
};

// Both products of one tile, by oneDNN alone.
class TileRate {
 public:
  TileRate(int64_t k_dim, int64_t v_dim, bool bf16, int32_t n_threads)
      : dims_(k_dim + v_dim), memory_(static_cast<size_t>(n_threads)) {
    const int64_t m = MatmulAttend::kTileQ, n = MatmulAttend::kTileKv;
    const cpu::MatmulShape shapes[2] = {{m, n, k_dim, k_dim, 1, k_dim, n, bf16, false},
                                        {m, v_dim, n, n, v_dim, 1, v_dim, bf16, true}};
    for (int i = 0; i < 2; ++i)
      if (!cpu::Matmul::create(shapes[i], &matmuls_[i]).ok() || !matmuls_[i].prepare(n_threads).ok()) std::exit(1);
    for (auto& memory : memory_) memory.resize(3 << 20);
  }

  // Returns the seconds that one tile takes on this thread.
  double measure(int32_t worker_idx, int n) {
    float* at = memory_[static_cast<size_t>(worker_idx)].data();
    float *s = at + (1 << 18), *k = at + (1 << 19), *o = at + (1 << 20), *scratchpad = at + (1 << 21);
    const double start = cpu_seconds();
    for (int i = 0; i < n; ++i) {
      if (!matmuls_[0].run(worker_idx, at, k, s, scratchpad) || !matmuls_[1].run(worker_idx, s, k, o, scratchpad))
        std::exit(1);
    }
    return (cpu_seconds() - start) / n;
  }
  double flops() const { return 2.0 * MatmulAttend::kTileQ * MatmulAttend::kTileKv * static_cast<double>(dims_); }

 private:
  int64_t dims_;
  cpu::Matmul matmuls_[2];
  std::vector<std::vector<float>> memory_;
};

bool is_right(const Case& c) {
  for (int64_t row : {int64_t{0}, int64_t{c.job.n_rows / 2}, int64_t{c.job.n_rows - 1}}) {
    const RowAnswer answer = exact(c, row);
    for (size_t d = 0; d < answer.o.size(); ++d)
      if (!(std::fabs(static_cast<double>(c.o[static_cast<size_t>(row) * answer.o.size() + d]) - answer.o[d]) < 2e-3))
        return false;
    if (!(std::fabs(static_cast<double>(c.lse[static_cast<size_t>(row)]) - answer.lse) < 1e-4)) return false;
  }
  return true;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Body>
void on_threads(int32_t n_threads, const Body& body) {
  std::vector<std::thread> others;
  for (int32_t worker = 1; worker < n_threads; ++worker) others.emplace_back(body, worker);
  body(0);
  for (std::thread& other : others) other.join();
}

struct Task {
  const Case* head;
  int32_t begin, end;
};

// The KV heads of one shape, and the tasks into which they are divided.
struct Work {
  std::vector<std::unique_ptr<Case>> heads;
  std::vector<Task> tasks;
  double flops = 0;
};

Work make_work(const Shape& shape) {
  Work work;
  CaseOptions options;
  options.k_type = options.v_type = shape.kv_type;
  options.k_head_dim = shape.head_dim;
  options.v_head_dim = shape.v_head_dim();
  options.v_aliases_k = shape.aliased_dim > 0;
  options.group_size = shape.group_size;
  options.n_rows = shape.group_size * shape.q_len;
  options.n_keys = shape.kv_len + shape.q_len;
  options.run_len = shape.run_len;
  options.one_run = shape.run_len == 0;
  options.q_is_bf16 = shape.q_is_bf16;
  double pairs = 0;
  for (int32_t head = 0; head < shape.n_kv_heads; ++head) {
    options.seed = static_cast<uint32_t>(head) + 1;
    work.heads.push_back(std::make_unique<Case>(options));
    for (int64_t end : work.heads.back()->end) pairs += static_cast<double>(end) * shape.group_size;
  }
  work.flops = pairs * 2 * (shape.head_dim + shape.v_head_dim());
  for (auto& head : work.heads)
    for (int32_t row = 0; row < head->job.n_rows; row += MatmulAttend::kTaskRows)
      work.tasks.push_back({head.get(), row, std::min(row + MatmulAttend::kTaskRows, head->job.n_rows)});
  return work;
}

// Returns GFLOP/s of oneDNN alone, over all threads.
double tile_gflops_of(TileRate* tile, int32_t n_threads) {
  std::vector<double> tile_seconds(static_cast<size_t>(n_threads));
  on_threads(n_threads, [&](int32_t worker) {
    omp_set_num_threads(1);
    tile_seconds[static_cast<size_t>(worker)] = tile->measure(worker, 100);
  });
  double rate = 0;
  for (double each : tile_seconds) rate += tile->flops() / each * 1e-9;
  return rate;
}

// Returns the processor time per thread, in seconds, that all tasks take.
double attend_all(const std::vector<Task>& tasks, int32_t n_threads, MatmulAttend* attend) {
  std::vector<double> busy(static_cast<size_t>(n_threads));
  on_threads(n_threads, [&](int32_t worker) {
    omp_set_num_threads(1);
    const double from = cpu_seconds();
    for (size_t i = static_cast<size_t>(worker); i < tasks.size(); i += static_cast<size_t>(n_threads))
      attend->attend(cpu::whole_span(tasks[i].head->job, tasks[i].begin, tasks[i].end), worker);
    busy[static_cast<size_t>(worker)] = cpu_seconds() - from;
  });
  double elapsed = 0;
  for (double each : busy) elapsed += each / n_threads;
  return elapsed;
}

void run(const Shape& shape, int32_t n_threads) {
  const Work work = make_work(shape);
  std::unique_ptr<MatmulAttend> attend;
  const cpu::KernelTable* kernels = nullptr;
  if (!cpu::choose_isa(nullptr, &kernels).ok() || !MatmulAttend::create(*kernels, &attend).ok() ||
      !attend->prepare(work.heads[0]->layer, n_threads).ok())
    std::exit(1);
  TileRate tile(shape.head_dim, shape.v_head_dim(), shape.q_is_bf16 && cpu::onednn_has_fast_bf16(), n_threads);

  std::vector<double> gflops, tile_gflops, shares, wall;
  double spent = 0;
  for (int repeat = 0; repeat < 15 && (repeat < 3 || spent < 3); ++repeat) {
    tile_gflops.push_back(tile_gflops_of(&tile, n_threads));
    const double start = seconds();
    gflops.push_back(work.flops / attend_all(work.tasks, n_threads, attend.get()) * 1e-9);
    wall.push_back(seconds() - start);
    spent += wall.back();
    shares.push_back(gflops.back() / tile_gflops.back());
  }
  if (!is_right(*work.heads[0])) {
    std::printf("%s is WRONG\n", shape.name);
    std::exit(1);
  }
  const double kv_bytes = 2.0 * (shape.head_dim + (shape.aliased_dim > 0 ? 0 : shape.head_dim)) *
                          static_cast<double>(shape.kv_len + shape.q_len) * shape.n_kv_heads;
  const double us = work.flops / median(gflops) * 1e-3;
  std::printf("%-22s %d thread(s): %5.0f GFLOP/s of %5.0f, share %.2f; %8.0f us (wall %8.0f), K+V at %5.1f GB/s, warm\n",
              shape.name, n_threads, median(gflops), median(tile_gflops), median(shares), us, median(wall) * 1e6,
              kv_bytes / us * 1e-3);
  std::fflush(stdout);
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  std::vector<const char*> names;
  std::vector<int32_t> threads;
  for (int i = 1; i < argc; ++i) {
    if (std::atoi(argv[i]) > 0)
      threads.push_back(std::atoi(argv[i]));
    else
      names.push_back(argv[i]);
  }
  for (const char* name : names) {
    if (std::any_of(std::begin(tandem::test::kShapes), std::end(tandem::test::kShapes),
                    [&](const auto& shape) { return !std::strcmp(shape.name, name); }))
      continue;
    std::fprintf(stderr, "matmul_bench: shape = %s is none of", name);
    for (const auto& shape : tandem::test::kShapes) std::fprintf(stderr, " %s", shape.name);
    std::fprintf(stderr, "\n");
    return 2;
  }
  if (threads.empty()) threads = {1, 2};
  const auto wanted = [&](const char* name) {
    return names.empty() ||
           std::any_of(names.begin(), names.end(), [&](const char* each) { return !std::strcmp(each, name); });
  };
  for (const auto& shape : tandem::test::kShapes)
    for (const int32_t n_threads : threads)
      if (wanted(shape.name)) tandem::test::run(shape, n_threads);
}
