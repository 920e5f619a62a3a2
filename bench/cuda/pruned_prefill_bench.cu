// SPDX-License-Identifier: MIT
// A long append under policy "hip" over keys in the window, through the C ABI: milliseconds of one layer.
//
//   pruned_prefill_bench MODULE [threads [lengths [presets [queries]]]]     lists with commas
//
// A layer of 32 query heads and 8 KV heads of 128 dims in bf16. One unplanned call appends `queries` tokens (32,768), after
// which the sequence has `length` tokens. With length = queries this is a prompt from its first token on. A call ends with
// its output. Prints medians of five calls, beside those of the same calls under policy "all". A line of JSON for each
// length and preset.
//
// Before that, the output of the call's last 64 queries is compared with that of the CPU's own search and attention for the
// same queries over the host store.
#include "timed_append.h"

using namespace tandem::test;

namespace {

constexpr int64_t kBlock = 64, kRoom = 64;
constexpr int kCalls = 5;

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 6) {
    std::fprintf(stderr, "pruned_prefill_bench MODULE [threads [lengths [presets [queries]]]]\n");
    return 2;
  }
  const int32_t n_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  const int64_t n_queries = argc > 5 ? std::atoll(argv[5]) : 32768;
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  Call call(n_queries);
  bool are_right = true;
  for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "32768,131072,1048576")) {
    tandem_engine* engine = make_engine(argv[1], n_threads);
    {
      const HybridCache cache(engine, 1, std::max<int64_t>(0, length - n_queries), 1);
      TANDEM(tandem_sequence_reserve, cache.cache, cache.sequences[0], n_queries + kRoom);
      tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
      options.window_tokens = length + kRoom;
      options.route = "host";
      const double dense_us = TimedAppend(cache, options, call, kBlock).us(kCalls);
      for (const std::string& name : words_of(argc > 4 ? argv[4] : "small,3k")) {
        tandem_pruning pruning = TANDEM_PRUNING_INIT;
        pruning.preset = name.c_str();
        options.policy = "hip";
        options.pruning = &pruning;
        TimedAppend append(cache, options, call, kBlock);
        const double us = append.us(kCalls), error = append.error();
        const bool is_right = error < 1e-2;  // false for NaN
        std::printf(
            "{\"preset\": \"%s\", \"keys\": %lld, \"queries\": %lld, \"card\": \"%s\", \"ms\": %.3f, \"dense_ms\": %.3f, "
            "\"error\": %.1e, \"is_right\": %s}\n",
            name.c_str(), static_cast<long long>(length), static_cast<long long>(n_queries), device.name, us / 1e3,
            dense_us / 1e3, std::isfinite(error) ? error : 1e9, is_right ? "true" : "false");
        std::fflush(stdout);
        are_right = is_right && are_right;
      }
    }
    tandem_engine_release(engine);
  }
  return are_right ? 0 : 1;
}
