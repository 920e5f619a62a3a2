// SPDX-License-Identifier: MIT
// A long append under policy "hip" over keys that the window has, through the C ABI: milliseconds of one layer.
//
//   pruned_prefill_bench MODULE [threads [lengths [presets [queries]]]]     lists with commas
//
// A layer of 32 query heads and 8 KV heads of 128 dims in bf16. One call, not planned, appends `queries` tokens (32,768),
// the last of which is a sequence's length-th: with length = queries that is a prompt from its first token on. A call ends
// when its output is there. Medians of five calls, beside those of the same calls under policy "all". A line of JSON for
// each length and preset.
//
// Before that, the output of the call's last 64 queries is compared with what the CPU's own search and attention make of the
// same queries over the host store.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kBlock = 64, kRoom = 64;
constexpr int kCalls = 5;

tandem_tensor last_rows(tandem_tensor of, int64_t n) {
  of.data = static_cast<std::byte*>(of.data) + (of.shape[0] - n) * of.shape[1] * of.shape[2] * 2;
  of.shape[0] = n;
  return of;
}

// Appends of the same tokens, over and over.
class Prompt {
 public:
  Prompt(const HybridCache& cache, const tandem_session_options& options, Call& call)
      : session_(cache, options), call_(call), n_(call.host_view[0].shape[0]) {}

  double us() {
    std::vector<double> times;
    for (int i = -1; i < kCalls; ++i) {
      begin_anew(session_.on.length);
      session_.wait();
      const auto begin = Clock::now();
      append(n_, call_.device_view, true);
      session_.wait();
      if (i >= 0) times.push_back(us_since(begin));
    }
    return median(times);
  }
  // Of the last queries' outputs, from the CPU's. NaN where either has written nothing.
  double error() {
    const std::vector<__nv_bfloat16> all = call_.device_output();
    const auto n_last = static_cast<size_t>(kBlock * kQHeads * kDim);
    const std::vector<__nv_bfloat16> got(all.end() - static_cast<std::ptrdiff_t>(n_last), all.end());
    begin_anew(session_.on.length + n_ - kBlock);
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i) views[i] = last_rows(call_.host_view[i], kBlock);
    append(kBlock, views, false);
    return distance(got, {call_.o.end() - static_cast<std::ptrdiff_t>(n_last), call_.o.end()});
  }

 private:
  void begin_anew(int64_t length) { TANDEM(tandem_sequence_truncate, session_.on.cache, session_.on.sequences[0], length); }
  void append(int64_t n, const tandem_tensor* views, bool on_device) {
    session_.q_lens[0] = n;
    session_.attend(0, views, true, on_device);
  }

  HybridSession session_;
  Call& call_;
  int64_t n_;
};

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
      const double dense_us = Prompt(cache, options, call).us();
      for (const std::string& name : words_of(argc > 4 ? argv[4] : "small,3k")) {
        tandem_pruning pruning = TANDEM_PRUNING_INIT;
        pruning.preset = name.c_str();
        options.policy = "hip";
        options.pruning = &pruning;
        Prompt prompt(cache, options, call);
        const double us = prompt.us(), error = prompt.error();
        const bool is_right = error < 1e-2;  // NaN is not
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
