// SPDX-License-Identifier: MIT
// Speed of prefill over the window: microseconds per call, and FLOPs over unmasked pairs of query and key.
//
//   prefill_bench MODULE [types [dims [queries [keys]]]]     lists with commas; types: bf16, q8_0, ..., or
//                                                            K's and V's: q8_0/q4_0
//   prefill_bench MODULE tiles [types [dims]]
//
// tiles: 4,096 queries of 64 heads over 4 KV heads and 131,072 keys, each query with its own keys (lib/tables/key_list.h),
// beside the dense call of the same shape. Of 1,024 units of 128 tokens a query names 16 ("random"), 16 of which 64
// consecutive queries share 14 ("clustered"), every second one ("half"), or all.
//
// 32 query heads and 8 KV heads, causal. Queries belong to the last keys and are bf16, or f16 if keys are f16. A line is the
// median of nine replays of a graph. Each type and dim is first checked against double precision in a small case.
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

WindowOptions options_of(const std::string& type, int dim, WindowSequence sequence) {
  WindowOptions options;
  const std::string k_type = type.substr(0, type.find('/')), v_type = type.substr(type.find('/') + 1);  // npos + 1 is 0
  for (const DtypeInfo& info : kDtypes) {
    if (k_type == info.name) options.layer.k_type = info.dtype;
    if (v_type == info.name) options.layer.v_type = info.dtype;
  }
  options.layer.n_q_heads = 32;
  options.layer.n_kv_heads = 8;
  options.layer.k_head_dim = options.layer.v_head_dim = dim;
  options.q_type = options.layer.k_type == TANDEM_F16 ? TANDEM_F16 : TANDEM_BF16;
  options.sequences = {sequence};
  return options;
}

bool is_right(const OpenDevice& device, const std::string& type, int dim) {
  WindowCase window(device, options_of(type, dim, {0, 700, 300}));
  window.clear_output();
  window.attend(0);
  const reference::GateVerdict verdict = window.check();
  if (!verdict.pass) std::printf("%s of %d: WRONG: %s\n", type.c_str(), dim, verdict.message.c_str());
  return verdict.pass;
}

void measure(const OpenDevice& device, const std::string& type, int dim, int q_len, int64_t n_keys) {
  WindowOptions options = options_of(type, dim, {0, n_keys, q_len});
  options.n_distinct = 1000;
  options.o_type = TANDEM_BF16;
  WindowCase window(device, options);
  const double pairs = static_cast<double>(q_len) * (static_cast<double>(n_keys) - 0.5 * (q_len - 1));
  const double flops = pairs * 32 * 4 * dim;
  const int n_calls = std::clamp(static_cast<int>(2e12 / flops), 1, 100);
  const double us = time_of([&](cudaStream_t stream) {
                      for (int i = 0; i < n_calls; ++i) window.attend(0, stream);
                    }) /
                    n_calls;
  std::printf("tandem %-9s %3d  %6d x %7lld %11.1f us %6.1f TFLOP/s\n", type.c_str(), dim, q_len,
              static_cast<long long>(n_keys), us, flops / us * 1e-6);
  std::fflush(stdout);
}

struct TileCase {
  const char* name;
  TileOptions tiles;
};
constexpr TileCase kTileCases[] = {
    {"random", {.n_heads = 4, .unit = 128, .share = 0.0, .n_own = 16, .hides_others = false}},
    {"clustered", {.n_heads = 4, .unit = 128, .share = 14.0 / 1024, .n_shared = 64, .n_own = 2, .hides_others = false}},
    {"half", {.n_heads = 4, .unit = 128, .share = 0.5, .hides_others = false}},
    {"all", {.n_heads = 1, .unit = 128, .share = 1.0, .hides_others = false}}};

WindowOptions tiles_of(const std::string& type, int dim, WindowSequence sequence) {
  WindowOptions options = options_of(type, dim, sequence);
  options.layer.n_q_heads = 64;
  options.layer.n_kv_heads = 4;
  options.n_distinct = 1000;
  options.o_type = TANDEM_BF16;
  return options;
}

// Times the dense call and the call with tiles in turn, twice.
bool measure_tiles(const OpenDevice& device, const std::string& type, int dim) {
  const WindowSequence sequence = {0, 131072, 4096};
  for (const TileCase& of : kTileCases) {
    WindowOptions options = tiles_of(type, dim, {0, 3000, 300});
    options.tiles = of.tiles;
    WindowCase small(device, options);
    small.clear_output();
    small.attend(0);
    const reference::GateVerdict verdict = small.check();
    if (!verdict.pass) std::printf("%s: WRONG: %s\n", of.name, verdict.message.c_str());
    if (!verdict.pass) return false;
  }
  WindowCase dense(device, tiles_of(type, dim, sequence));
  const auto us_of = [](WindowCase& window) { return time_of([&](cudaStream_t stream) { window.attend(0, stream); }); };
  for (const TileCase& of : kTileCases) {
    WindowOptions options = tiles_of(type, dim, sequence);
    options.tiles = of.tiles;
    WindowCase window(device, options);
    for (int i = 0; i < 2; ++i) {
      const double before = us_of(dense), us = us_of(window);
      std::printf("tandem %-9s %3d  %-9s %11.1f us, dense %11.1f us: %.3f\n", type.c_str(), dim, of.name, us, before,
                  us / before);
    }
    std::fflush(stdout);
  }
  return true;
}

int main_of_tiles(const OpenDevice& device, const char* types, const char* dims) {
  bool all_right = true;
  for (const std::string& type : words_of(types))
    for (const std::string& dim : words_of(dims)) all_right &= measure_tiles(device, type, std::atoi(dim.c_str()));
  return all_right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "prefill_bench MODULE [types [dims [queries [keys]]]]\n");
    return 2;
  }
  const OpenDevice device(argv[1]);
  std::printf("%s\n", device.info.name);
  if (argc > 2 && argv[2] == std::string("tiles"))
    return main_of_tiles(device, argc > 3 ? argv[3] : "bf16", argc > 4 ? argv[4] : "128");
  bool all_right = true;
  for (const std::string& type : words_of(argc > 2 ? argv[2] : "bf16,f16,e4m3,q8_0,q4_0,q8_0/q4_0"))
    for (const std::string& dim : words_of(argc > 3 ? argv[3] : "128")) {
      if (!is_right(device, type, std::atoi(dim.c_str()))) {
        all_right = false;
        continue;
      }
      for (const std::string& q_len : words_of(argc > 4 ? argv[4] : "8192"))
        for (const std::string& n_keys : words_of(argc > 5 ? argv[5] : "8192,65536,131072"))
          if (std::atoll(n_keys.c_str()) >= std::atoll(q_len.c_str()))
            measure(device, type, std::atoi(dim.c_str()), std::atoi(q_len.c_str()), std::atoll(n_keys.c_str()));
    }
  return all_right ? 0 : 1;
}
