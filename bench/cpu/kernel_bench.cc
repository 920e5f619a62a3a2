// SPDX-License-Identifier: MIT
// Decode speed as a share of the read bandwidth in the same run: 32 query heads over 8 KV heads of 128, K and V head-major
// in huge pages. Layers rotate over more memory than the caches hold. Rounds in which a thread waited for a core are left
// out. Not a test.
//
//   kernel_bench [threads] [isa] [keys] [type] [rounds] [rope]
//
// rope: keys are stored unrotated, and the library rotates them. 1: pairs of halves, 2: interleaved (TANDEM_ROPE_...).
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bench/cpu/bench_clock.h"
#include "cpu/isa_backends.h"
#include "lib/model/dtype.h"
#include "lib/model/rope.h"

namespace tandem::test {
namespace {

constexpr int32_t kHeads = 8, kGroup = 4, kDim = 128;
constexpr int64_t kCacheBytes = int64_t{8} * 32 << 20;

struct Bench {
  IsaBackend isa;
  LocalPool* pool;
  Layer layer;
  int64_t n_keys, n_layers, layer_bytes;
  uint8_t* memory;
  std::vector<float> q, o, lse;
  std::vector<KvRun> runs;
  std::vector<AttendJob> jobs;
};

struct ReadCall {
  const cpu::KernelTable* kernels;
  const uint8_t* data;
  int64_t bytes, piece;
  std::atomic<uint64_t> sum{0};
};

void read_task(void* context, int64_t i, int32_t) {
  ReadCall& call = *static_cast<ReadCall*>(context);
  call.sum += call.kernels->read_sum(call.data + i * call.piece, std::min(call.piece, call.bytes - i * call.piece));
}

void point_at_layer(Bench& bench, int64_t layer_idx) {
  const int64_t half = bench.layer_bytes / 2 / kHeads;
  uint8_t* at = bench.memory + layer_idx * bench.layer_bytes;
  for (int32_t h = 0; h < kHeads; ++h) {
    KvRun& run = bench.runs[static_cast<size_t>(h)];
    const int64_t codes = bench.n_keys * row_bytes(bench.layer.k_type, kDim);
    run.k = at + 2 * h * half;
    run.v = at + (2 * h + 1) * half;
    run.k_scales = at + 2 * h * half + codes;
    run.v_scales = at + (2 * h + 1) * half + codes;
  }
}

RopeTable angles_of(int32_t rope) {
  std::vector<double> inv_freq(kDim / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i) inv_freq[i] = std::pow(500000.0, -2.0 * static_cast<double>(i) / kDim);
  return make_rope_table(inv_freq.data(), kDim / 2, rope == TANDEM_ROPE_INTERLEAVED, 1.0f);
}

// Fills K and V with the same rows of noise.
void fill_run(const cpu::KernelTable& table, const KvRun& run, int32_t dtype, int64_t n_keys,
              const std::vector<float>& noise) {
  const auto bytes = [](const void* plane, int64_t offset) {
    return static_cast<uint8_t*>(const_cast<void*>(plane)) + offset;
  };
  const int64_t codes = row_bytes(dtype, kDim), scales = scale_bytes(dtype, kDim);
  for (int64_t i = 0; i < n_keys; ++i) {
    const float* row = noise.data() + i % 500 * kDim;
    table.from_f32(dtype, row, bytes(run.k, i * codes), bytes(run.k_scales, i * scales), kDim);
    table.from_f32(dtype, row, bytes(run.v, i * codes), bytes(run.v_scales, i * scales), kDim);
  }
}

void measure(const cpu::KernelTable& table, int32_t n_threads, int32_t dtype, int64_t n_keys, int n_rounds, int32_t rope) {
  const RopeTable angles = angles_of(rope);
  Bench b{IsaBackend(table, n_threads), nullptr, {}, n_keys, 0, 0, nullptr, {}, {}, {}, {}, {}};
  b.layer.n_q_heads = kHeads * kGroup, b.layer.n_kv_heads = kHeads, b.layer.group_size = kGroup;
  b.layer.k_head_dim = b.layer.v_head_dim = kDim;
  b.layer.k_type = b.layer.v_type = dtype;
  b.layer.sm_scale = 0.088f;
  b.layer.rope = rope == TANDEM_ROPE_CALLER ? nullptr : &angles;
  b.layer_bytes = 2 * kHeads * n_keys * (row_bytes(dtype, kDim) + scale_bytes(dtype, kDim));
  b.n_layers = std::max<int64_t>(2, kCacheBytes / b.layer_bytes + 1);
  const auto total = static_cast<size_t>(b.layer_bytes * b.n_layers);
  b.memory =
      static_cast<uint8_t*>(mmap(nullptr, total + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  b.memory = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(b.memory) + (2 << 20) - 1) & ~uintptr_t{(2 << 20) - 1});
  madvise(b.memory, total, MADV_HUGEPAGE);
  b.q.resize(kHeads * kGroup * kDim, 0.3f);
  b.o.resize(b.q.size()), b.lse.resize(kHeads * kGroup), b.runs.resize(kHeads), b.jobs.resize(kHeads);
  std::vector<float> noise(1 << 16);
  uint32_t state = 1;
  for (float& x : noise) x = static_cast<float>((state = state * 1664525 + 1013904223) >> 8) / 8388608.0f - 1.0f;
  for (int64_t l = 0; l < b.n_layers; ++l) {
    point_at_layer(b, l);
    for (const KvRun& run : b.runs) fill_run(table, run, dtype, n_keys, noise);
  }
  for (size_t h = 0; h < kHeads; ++h) {
    b.runs[h].n_tokens = n_keys;
    AttendJob& job = b.jobs[h];
    job.layer = &b.layer, job.q = b.q.data() + h * kGroup * kDim, job.n_rows = kGroup, job.n_runs = 1, job.runs = &b.runs[h];
    job.n_keys = n_keys, job.o = b.o.data() + h * kGroup * kDim, job.lse = b.lse.data() + h * kGroup;
  }
  std::vector<double> attend_ns, read_ns, shares;
  int64_t n_clean = 0;
  for (int64_t i = 0; i < 40 * n_rounds && attend_ns.size() < static_cast<size_t>(n_rounds); ++i) {
    point_at_layer(b, i % b.n_layers);
    Stretch attend;
    if (!b.isa.backend.table->attend(b.isa.backend.self, b.jobs.data(), kHeads).ok()) std::abort();
    attend.end();
    ReadCall call{&table, b.memory + (i + b.n_layers / 2) % b.n_layers * b.layer_bytes, b.layer_bytes, 1 << 20, {}};
    Stretch read;
    b.isa.backend.table->run(b.isa.backend.self, (b.layer_bytes + call.piece - 1) / call.piece, read_task, &call);
    read.end();
    if (i < 2) continue;
    const bool is_clean = attend.was_undisturbed(n_threads) && read.was_undisturbed(n_threads);
    n_clean += is_clean;
    if (!is_clean && i + n_rounds < 40 * n_rounds) continue;
    attend_ns.push_back(attend.wall), read_ns.push_back(read.wall);
    shares.push_back(read.wall / attend.wall);
  }
  const double bytes = static_cast<double>(b.layer_bytes);
  const double best_read = *std::min_element(read_ns.begin(), read_ns.end());
  std::printf(
      "%-8s %-5s threads %d keys %7lld clean %3lld %9.1f us  %6.2f GB/s  limit %6.2f (best %6.2f)  share %.3f (of best "
      "%.3f)\n",
      table.name, find_dtype(dtype)->name, n_threads, static_cast<long long>(n_keys), static_cast<long long>(n_clean),
      median(attend_ns) / 1e3, bytes / median(attend_ns), bytes / median(read_ns), bytes / best_read, median(shares),
      best_read / median(attend_ns));
  std::fflush(stdout);
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  using namespace tandem;
  const int32_t n_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const cpu::KernelTable* table = nullptr;
  if (!cpu::choose_isa(argc > 2 && *argv[2] ? argv[2] : nullptr, &table).ok()) return 1;
  const int64_t keys = argc > 3 ? std::atoll(argv[3]) : 0;
  const char* type = argc > 4 ? argv[4] : "";
  const int n_rounds = argc > 5 ? std::atoi(argv[5]) : 30;
  const int32_t rope = argc > 6 ? std::atoi(argv[6]) : TANDEM_ROPE_CALLER;
  for (const int64_t n_keys : {32768, 131072})
    for (const DtypeInfo& dtype : kDtypes)
      if (is_key_type(dtype.dtype) && (keys == 0 || keys == n_keys) &&
          (*type == '\0' ? dtype.bits <= 16 : std::strcmp(type, dtype.name) == 0))
        test::measure(*table, n_threads, dtype.dtype, n_keys, n_rounds, rope);
  return 0;
}
