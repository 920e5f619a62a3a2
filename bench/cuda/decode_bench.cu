// SPDX-License-Identifier: MIT
// Speed of decode from the window: microseconds per call, and the share of the speed of copying memory in the same run.
//
//   decode_bench MODULE [types [lengths [batches [lists]]]]     lists with commas
//
// types: bf16, q8_0, ...; or types of K and of V, with q in f32: f32/bf16, as in the window of a layer whose keys are
// rotated. lists: unit size of random key lists that name a tenth of the keys, one list for each KV head; 0: no lists, -1:
// lists of the whole range.
//
// Calls rotate over windows that are together many times larger than the second-level cache, as a graph of 32 calls. A line
// is the median of nine replays. Cases of up to 70,000 keys are checked against double precision.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/graph_time.h"
#include "cuda/window_case.h"
#include "lib/model/dtype.h"

namespace {

using namespace tandem;
using namespace tandem::test;

constexpr int kCalls = 32;
constexpr int64_t kMostChecked = 70'000;  // keys; computing the truth takes long

__global__ void copy_kernel(const float4* from, float4* to, size_t n) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += 4 * stride) {
    float4 x[4];
#pragma unroll
    for (size_t k = 0; k < 4; ++k)
      if (i + k * stride < n) x[k] = from[i + k * stride];
#pragma unroll
    for (size_t k = 0; k < 4; ++k)
      if (i + k * stride < n) to[i + k * stride] = x[k];
  }
}

double copy_bandwidth() {  // returns GB/s, reads and writes counted
  constexpr size_t kBytes = size_t{1} << 30;
  void *from, *to;
  must(cudaMalloc(&from, kBytes));
  must(cudaMalloc(&to, kBytes));
  must(cudaMemset(from, 1, kBytes));
  const double us = time_of([&](cudaStream_t stream) {
    for (int i = 0; i < 4; ++i)
      copy_kernel<<<132 * 16, 256, 0, stream>>>(static_cast<const float4*>(from), static_cast<float4*>(to), kBytes / 16);
  });
  must(cudaFree(from));
  must(cudaFree(to));
  return 8.0 * kBytes / us * 1e-3;
}

struct Line {
  std::string type;
  int64_t length;
  int batch;
  bool shuffled;
  int unit = 0;  // unit of key lists
};

bool measure(const OpenDevice& device, const Line& line, double copy) {
  WindowOptions options;
  const size_t slash = line.type.find('/');
  for (const DtypeInfo& info : kDtypes) {
    if (line.type.substr(0, slash) == info.name) options.layer.k_type = info.dtype;
    if (line.type.substr(slash == std::string::npos ? 0 : slash + 1) == info.name) options.layer.v_type = info.dtype;
  }
  if (slash != std::string::npos) options.q_type = TANDEM_F32;
  options.layer.n_q_heads = 32;
  options.layer.n_kv_heads = 8;
  options.layer.k_head_dim = options.layer.v_head_dim = 128;
  options.sequences.assign(static_cast<size_t>(line.batch), {0, line.length, 1});
  options.shuffled = line.shuffled;
  options.n_distinct = 1000;
  const double bytes =
      8.0 * 128 * 2 * static_cast<double>(line.length * line.batch) * find_dtype(options.layer.k_type)->bits / 8;
  options.n_layers = std::clamp(static_cast<int>(600e6 / bytes) + 1, 2, kCalls);
  options.o_type = TANDEM_BF16;
  if (line.unit != 0)
    options.lists = {8, std::max(line.unit, 1), line.unit > 0 ? 0.1 : 0.0, line.unit > 0 ? 0 : INT32_MAX, 0, false};
  WindowCase window(device, options);
  window.attend(0);
  const double us = time_of([&](cudaStream_t stream) {
                      for (int i = 0; i < kCalls; ++i) window.attend(i % options.n_layers, stream);
                    }) /
                    kCalls;
  window.clear_output();
  window.attend(0);
  const bool is_checked = line.length * line.batch <= kMostChecked, is_right = !is_checked || window.check().pass;
  const double rate = static_cast<double>(window.kv_bytes()) / us * 1e-3;
  std::printf("tandem %-8s %7lld x %2d %-10s %9.2f us %7.0f GB/s  %.3f of copy  %s%s\n", line.type.c_str(),
              static_cast<long long>(line.length), line.batch, line.shuffled ? "shuffled" : "contiguous", us, rate,
              rate / copy, is_checked ? (is_right ? "ok" : "WRONG") : "unchecked",
              line.unit != 0 ? (", lists of units of " + std::to_string(line.unit)).c_str() : "");
  std::fflush(stdout);
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "decode_bench MODULE [types [lengths [batches [lists]]]]\n");
    return 2;
  }
  const OpenDevice device(argv[1]);
  const double copy = copy_bandwidth();
  std::printf("%s: copying %.0f GB/s\n", device.info.name, copy);
  bool all_right = true;
  for (const std::string& batch : words_of(argc > 4 ? argv[4] : "1,16"))
    for (const std::string& type : words_of(argc > 2 ? argv[2] : "bf16,f16,e4m3,q8_0,q4_0"))
      for (const std::string& length : words_of(argc > 3 ? argv[3] : "4096,16384,65536,131072,262144"))
        for (const std::string& unit : words_of(argc > 5 ? argv[5] : "0"))
          for (const bool shuffled : {false, true}) {
            const Line line{type, std::atoll(length.c_str()), std::atoi(batch.c_str()), shuffled, std::atoi(unit.c_str())};
            if (line.length * line.batch > 4 << 20) continue;
            if (shuffled && (type != "bf16" || line.unit != 0)) continue;
            all_right &= measure(device, line, copy);
          }
  return all_right ? 0 : 1;
}
