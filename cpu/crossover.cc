// SPDX-License-Identifier: MIT
#include "cpu/crossover.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "cpu/aligned_bytes.h"
#include "cpu/matmul_attend.h"
#include "lib/model/dtype.h"

namespace tandem::cpu {
namespace {

constexpr int32_t kRowsTried[] = {8, 12, 16, 24, 32, 48, 64, 96, 128, 192};
constexpr int32_t kMostRows = 192, kDim = 128;
constexpr int64_t kKeys = 1024;
constexpr int kRepeats = 3;

// Results of measure_crossover() on Intel's Sapphire Rapids and on an AMD EPYC with AVX-512.
constexpr struct {
  const char* isa;
  Crossover on_intel, elsewhere;
} kUsual[] = {
    {"amx", {8, 16}, {8, 16}},
    {"avx3_dl", {2 * kMostRows, 32}, {8, 128}},
    {"avx3", {2 * kMostRows, 32}, {8, 128}},
    {"avx2", {16, 16}, {64, 64}},
};

bool is_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

// Times one KV head of 128 dims over 1,024 keys. These lie in the second-level cache, so from some tens of rows on
// arithmetic is the bound.
class Trial {
 public:
  Trial(const KernelTable& kernels, int32_t dtype, bool q_is_bf16) : kernels_(kernels) {
    layer_.n_q_heads = layer_.group_size = 4;
    layer_.n_kv_heads = 1;
    layer_.k_head_dim = layer_.v_head_dim = kDim;
    layer_.k_type = layer_.v_type = dtype;
    layer_.sm_scale = 0.09f;
    q_.assign(size_t{kMostRows} * kDim, 0.5f);
    o_.resize(size_t{kMostRows} * kDim);
    lse_.resize(kMostRows);
    keys_.assign(static_cast<size_t>(kKeys * row_bytes(dtype, kDim)), 0x3c);  // small ordinary numbers
    run_.k = run_.v = keys_.data();
    run_.n_tokens = kKeys;
    job_.layer = &layer_;
    job_.q = q_.data();
    job_.q_is_bf16 = q_is_bf16;
    job_.runs = &run_;
    job_.n_runs = 1;
    job_.n_keys = kKeys;
    job_.o = o_.data();
    job_.lse = lse_.data();
  }

  Status prepare() {
    TANDEM_TRY(allocate_aligned(sizeof(SpanScratch), &scratch_));
    TANDEM_TRY(MatmulAttend::create(kernels_, &matmul_));
    return matmul_->prepare(layer_, 1);
  }

  // Returns the least number of rows for which products are faster. If they never are, returns more than all numbers tried.
  int32_t crossover() {
    const auto* const end = std::end(kRowsTried);
    const auto* const found =
        std::lower_bound(std::begin(kRowsTried), end, 0, [&](int32_t rows, int32_t) { return !matmul_is_faster(rows); });
    return found == end ? 2 * kMostRows : *found;
  }

 private:
  bool matmul_is_faster(int32_t rows) {
    job_.n_rows = rows;
    double kernel_ns = 1e18, matmul_ns = 1e18;
    for (int i = 0; i < kRepeats; ++i) {
      kernel_ns = std::min(kernel_ns, ns([&] {
                             auto& scratch = *reinterpret_cast<SpanScratch*>(scratch_.get());
                             for (int32_t row = 0; row < rows; row += kSpanRows)
                               kernels_.attend_span(whole_span(job_, row, std::min(rows, row + kSpanRows)), scratch);
                           }));
      matmul_ns = std::min(matmul_ns, ns([&] { matmul_->attend(whole_span(job_, 0, rows), 0); }));
    }
    return matmul_ns < kernel_ns;
  }

  template <class Body>
  static double ns(const Body& body) {
    const auto from = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - from).count();
  }

  const KernelTable& kernels_;
  Layer layer_;
  KvRun run_;
  AttendJob job_;
  std::vector<float> q_, o_, lse_;
  std::vector<uint8_t> keys_;
  AlignedBytes scratch_;
  std::unique_ptr<MatmulAttend> matmul_;
};

}  // namespace

Crossover usual_crossover(const KernelTable& kernels) {
  for (const auto& usual : kUsual)
    if (std::strcmp(usual.isa, kernels.name) == 0) return is_intel() ? usual.on_intel : usual.elsewhere;
  return {};
}

Status measure_crossover(const KernelTable& kernels, Crossover* crossover) {
  Trial exact(kernels, TANDEM_BF16, true), others(kernels, TANDEM_F16, false);
  TANDEM_TRY(exact.prepare());
  TANDEM_TRY(others.prepare());
  *crossover = {exact.crossover(), others.crossover()};
  return {};
}

Status process_crossover(const KernelTable& kernels, Crossover* crossover) {
  static std::mutex mutex;
  static auto& measured =
      *new std::map<const KernelTable*, Crossover>;  // never destroyed, as calls may come while the process ends
  const std::lock_guard lock(mutex);
  const auto found = measured.find(&kernels);
  if (found != measured.end()) {
    *crossover = found->second;
    return {};
  }
  TANDEM_TRY(measure_crossover(kernels, crossover));
  measured[&kernels] = *crossover;
  return {};
}

}  // namespace tandem::cpu
