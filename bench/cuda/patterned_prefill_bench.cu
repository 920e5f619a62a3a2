// SPDX-License-Identifier: MIT
// A prompt under policy "patterns" over keys that the window has, through the C ABI: milliseconds of one layer.
//
//   patterned_prefill_bench MODULE [threads [lengths [patterns]]]     lists with commas
//
// A layer of 32 query heads and 8 KV heads of 128 dims in bf16. One call, not planned, appends a whole prompt. All heads
// have the pattern a-SINKS-WINDOW, or with half- before it every second KV head has it and the others attend all keys, as in
// files of DuoAttention. A call ends when its output is there. Medians of three calls, beside those of the same calls under
// policy "all". A line of JSON for each length and pattern:
//
//   speedup    how much faster than policy "all"
//   allowed    pairs of a query and a key under policy "all", divided by the pairs that heads attend
//   in_tiles   the same, where a block of 128 queries attends tiles of 128 keys, as kernels do
//
// Before that, the output of the prompt's last block of queries is compared with what the CPU makes of the same queries. So
// lengths are multiples of a block.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kBlock = TANDEM_PATTERN_BLOCK, kRoom = 64, kTile = 128;
constexpr int kCalls = 3;

struct Shape {
  std::string name;
  long long sinks = 0, window = 0;
  bool is_half = false;

  explicit Shape(const std::string& text) : name(text) {
    is_half = text.rfind("half-", 0) == 0;
    if (std::sscanf(text.c_str() + (is_half ? 5 : 0), "a-%lld-%lld", &sinks, &window) == 2 && window > 0) return;
    std::fprintf(stderr, "%s is no pattern of this bench\n", text.c_str());
    std::exit(2);
  }
  std::vector<tandem_head_pattern> heads() const {
    std::vector<tandem_head_pattern> heads(kQHeads, TANDEM_HEAD_PATTERN_INIT);
    for (size_t h = 0; h < heads.size(); ++h) {
      if (is_half && h / (kQHeads / kKvHeads) % 2 == 1) continue;
      heads[h].kinds = TANDEM_PATTERN_A_SHAPE;
      heads[h].sink_tokens = sinks;
      heads[h].window_tokens = window;
    }
    return heads;
  }
  // Pairs of policy "all" over those of kernel tiles.
  double allowed_in_tiles(int64_t length) const {
    double narrow = 0.0, all = 0.0;
    const auto tiles = [](int64_t n) { return static_cast<double>((n + kTile - 1) / kTile); };
    for (int64_t t = 0; t < length; t += kBlock) {
      const int64_t begin = std::max<int64_t>(0, t + 1 - window), end = std::min(length, t + kBlock);
      const double of_all = tiles(end),
                   of_shape = tiles(sinks) + tiles(end) - std::floor(static_cast<double>(begin / kTile));
      all += of_all;
      narrow += is_half ? (of_all + std::min(of_all, of_shape)) / 2 : std::min(of_all, of_shape);
    }
    return all / narrow;
  }
};

tandem_tensor last_rows(tandem_tensor of, int64_t n) {
  of.data = static_cast<std::byte*>(of.data) + (of.shape[0] - n) * of.shape[1] * of.shape[2] * 2;
  of.shape[0] = n;
  return of;
}

class Prompt {
 public:
  Prompt(const HybridCache& cache, const tandem_session_options& options, Call& call)
      : session_(cache, options), call_(call), n_(call.host_view[0].shape[0]) {}

  double us() {
    std::vector<double> times;
    for (int i = -1; i < kCalls; ++i) {
      TANDEM(tandem_sequence_truncate, session_.on.cache, session_.on.sequences[0], 0);
      session_.wait();
      const auto begin = Clock::now();
      append(n_, call_.device_view, true);
      session_.wait();
      if (i >= 0) times.push_back(us_since(begin));
    }
    return median(times);
  }
  // Of the last queries' outputs, from the CPU's, whose prompt ends a block before these. NaN where either has written
  // nothing.
  double error() {
    const std::vector<__nv_bfloat16> all = call_.device_output();
    const auto n_last = static_cast<size_t>(kBlock * kQHeads * kDim);
    const std::vector<__nv_bfloat16> got(all.end() - static_cast<std::ptrdiff_t>(n_last), all.end());
    TANDEM(tandem_sequence_truncate, session_.on.cache, session_.on.sequences[0], n_ - kBlock);
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i) views[i] = last_rows(call_.host_view[i], kBlock);
    append(kBlock, views, false);
    return distance(got, {call_.o.end() - static_cast<std::ptrdiff_t>(n_last), call_.o.end()});
  }
  double allowed() const {
    const tandem_session_stats stats = session_.stats();
    return static_cast<double>(stats.pattern_dense_pairs) / static_cast<double>(stats.pattern_pairs);
  }

 private:
  void append(int64_t n, const tandem_tensor* views, bool on_device) {
    session_.q_lens[0] = n;
    session_.attend(0, views, true, on_device);
  }

  HybridSession session_;
  Call& call_;
  int64_t n_;
};

bool measure(tandem_engine* engine, int64_t length, const std::vector<std::string>& names, const char* card) {
  bool are_right = true;
  Call call(length);
  const HybridCache cache(engine, 1, 0, 1);
  TANDEM(tandem_sequence_reserve, cache.cache, cache.sequences[0], length + kRoom);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = length + kRoom;
  options.route = "host";
  const double dense_us = Prompt(cache, options, call).us();
  for (const std::string& name : names) {
    const Shape shape(name);
    const std::vector<tandem_head_pattern> heads = shape.heads();
    tandem_patterns patterns = TANDEM_PATTERNS_INIT;
    patterns.heads = heads.data();
    patterns.n_heads = kQHeads;
    options.policy = "patterns";
    options.patterns = &patterns;
    Prompt prompt(cache, options, call);
    const double us = prompt.us(), allowed = prompt.allowed(), error = prompt.error();
    const bool is_right = error < 1e-2;  // NaN is not
    std::printf(
        "{\"pattern\": \"%s\", \"tokens\": %lld, \"card\": \"%s\", \"ms\": %.3f, \"dense_ms\": %.3f, \"speedup\": %.2f, "
        "\"allowed\": %.2f, \"in_tiles\": %.2f, \"error\": %.1e, \"is_right\": %s}\n",
        name.c_str(), static_cast<long long>(length), card, us / 1e3, dense_us / 1e3, dense_us / us, allowed,
        shape.allowed_in_tiles(length), std::isfinite(error) ? error : 1e9, is_right ? "true" : "false");
    std::fflush(stdout);
    are_right = is_right && are_right;
  }
  return are_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 5) {
    std::fprintf(stderr, "patterned_prefill_bench MODULE [threads [lengths [patterns]]]\n");
    return 2;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  bool are_right = true;
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "8192,32768,131072"))
    are_right = measure(engine, length, words_of(argc > 4 ? argv[4] : "a-100-800,half-a-128-256"), device.name) && are_right;
  tandem_engine_release(engine);
  return are_right ? 0 : 1;
}
