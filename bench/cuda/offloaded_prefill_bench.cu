// SPDX-License-Identifier: MIT
// A prompt under a file of head patterns, with K and V in host memory and with K and V on the device, through the C ABI.
//
//   offloaded_prefill_bench MODULE PATTERNS [threads [layers [tokens [chunks [window]]]]]     chunks: a list with commas
//
// PATTERNS is a file for 32 query heads (docs/patterns.md). The bench takes `layers` (4) of its layers at equal distances.
// Each has 8 KV heads of 128 dims in bf16. A prompt of `tokens` (131,072) comes in calls of `chunk` (131,072 and 8,192)
// queries, layer after layer, as from a model. A prompt's time ends with its last output. Prints medians of three, after an
// untimed one. The contestants take turns:
//
//   resident    the window has all keys
//   offloaded   the window has `window` (4,096) tokens
//   dense       policy "all" with such a window: keys outside it are streamed
//
// A line of JSON for each chunk: milliseconds, and the bytes of K and V that crossed the bus to the device. Before that, the
// last layer's last block of queries is compared: offloaded with resident, and with the CPU's output for the same queries.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kBlock = TANDEM_PATTERN_BLOCK;
constexpr int kPrompts = 3;

struct Settings {
  std::vector<tandem_head_pattern> heads;  // patterns of the layers that are used
  int32_t n_layers = 4;
  int64_t n_tokens = 131072, window = 4096;
  const char* card = "";
};

// Reads the patterns of n_layers layers of the file.
std::vector<tandem_head_pattern> read_heads(const char* file, int32_t n_layers) {
  int64_t n_heads = 0, n_in_file = 0;
  const tandem_head_pattern empty = TANDEM_HEAD_PATTERN_INIT;
  std::vector<tandem_head_pattern> all(1 << 16, empty);
  TANDEM(tandem_patterns_read, all.data(), std::ssize(all), &n_heads, &n_in_file, file, nullptr);
  if (n_heads != n_in_file * kQHeads || n_layers < 1 || n_layers > n_in_file) {
    std::fprintf(stderr, "%s: not for 32 query heads, or fewer than %d layers\n", file, n_layers);
    std::exit(2);
  }
  std::vector<tandem_head_pattern> heads;
  for (int64_t l = 0; l < n_layers; ++l) {
    const auto first = all.begin() + l * n_in_file / n_layers * kQHeads;
    heads.insert(heads.end(), first, first + kQHeads);
  }
  return heads;
}

tandem_tensor rows_of(tandem_tensor of, int64_t first, int64_t n) {
  of.data = static_cast<std::byte*>(of.data) + first * of.shape[1] * of.shape[2] * 2;
  of.shape[0] = n;
  return of;
}

class Contestant {
 public:
  Contestant(const HybridCache& cache, const tandem_session_options& options, int64_t n_tokens)
      : session_(cache, options), n_tokens_(n_tokens) {}

  // Returns milliseconds. call: the rows that every chunk uses. Counts the bytes that cross the bus.
  double prompt(const Call& call) {
    TANDEM(tandem_sequence_truncate, session_.on.cache, session_.on.sequences[0], 0);
    session_.wait();
    const int64_t before = bytes(), chunk = call.host_view[0].shape[0];
    const auto begin = Clock::now();
    session_.q_lens[0] = chunk;
    for (int64_t t = 0; t < n_tokens_; t += chunk) session_.attend_layers(call.device_view, true, true);
    session_.wait();
    const double ms = us_since(begin) / 1e3;
    n_bytes = bytes() - before;
    return ms;
  }
  // Attends the last layer's last block again, on the host.
  void check(Call& call) {
    TANDEM(tandem_sequence_truncate, session_.on.cache, session_.on.sequences[0], n_tokens_ - kBlock);
    session_.q_lens[0] = kBlock;
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i) views[i] = rows_of(call.host_view[i], call.host_view[i].shape[0] - kBlock, kBlock);
    session_.attend(session_.on.n_layers - 1, views, true, false);
  }

  std::vector<double> ms;
  int64_t n_bytes = 0;

 private:
  int64_t bytes() const {
    const tandem_session_stats stats = session_.stats();
    return stats.filled_kv_bytes + stats.streamed_kv_bytes;
  }

  HybridSession session_;
  const int64_t n_tokens_;
};

std::vector<__nv_bfloat16> last_block(const std::vector<__nv_bfloat16>& rows) {
  return {rows.end() - kBlock * kQHeads * kDim, rows.end()};
}

bool measure(tandem_engine* engine, int64_t chunk, const Settings& settings) {
  Call call(chunk);
  HybridCache cache(engine, settings.n_layers, 0, 1);
  TANDEM(tandem_sequence_reserve, cache.cache, cache.sequences[0], settings.n_tokens);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = settings.window;
  Contestant dense(cache, options, settings.n_tokens);
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  patterns.heads = settings.heads.data();
  patterns.n_heads = std::ssize(settings.heads);
  options.policy = "patterns";
  options.patterns = &patterns;
  Contestant offloaded(cache, options, settings.n_tokens);
  options.window_tokens = settings.n_tokens;
  Contestant resident(cache, options, settings.n_tokens);
  resident.prompt(call);
  const std::vector<__nv_bfloat16> wanted = last_block(call.device_output());
  offloaded.prompt(call);
  const std::vector<__nv_bfloat16> got = last_block(call.device_output());
  offloaded.check(call);
  const double error = distance(got, wanted), cpu_error = distance(got, last_block(call.o));
  dense.prompt(call);
  for (int i = 0; i < kPrompts; ++i)
    for (Contestant* each : {&resident, &offloaded, &dense}) each->ms.push_back(each->prompt(call));
  const bool is_right = error < 1e-3 && cpu_error < 1e-2;  // false for NaN
  const double resident_ms = median(resident.ms), offloaded_ms = median(offloaded.ms);
  std::printf(
      "{\"tokens\": %lld, \"chunk\": %lld, \"layers\": %d, \"window\": %lld, \"card\": \"%s\", \"resident_ms\": %.2f, "
      "\"offloaded_ms\": %.2f, \"of_resident_speed\": %.3f, \"dense_streamed_ms\": %.2f, \"resident_bytes\": %lld, "
      "\"offloaded_bytes\": %lld, \"dense_bytes\": %lld, \"error\": %.1e, \"cpu_error\": %.1e, \"is_right\": %s}\n",
      static_cast<long long>(settings.n_tokens), static_cast<long long>(chunk), settings.n_layers,
      static_cast<long long>(settings.window), settings.card, resident_ms, offloaded_ms, resident_ms / offloaded_ms,
      median(dense.ms), static_cast<long long>(resident.n_bytes), static_cast<long long>(offloaded.n_bytes),
      static_cast<long long>(dense.n_bytes), std::isfinite(error) ? error : 1e9, std::isfinite(cpu_error) ? cpu_error : 1e9,
      is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 8) {
    std::fprintf(stderr, "offloaded_prefill_bench MODULE PATTERNS [threads [layers [tokens [chunks [window]]]]]\n");
    return 2;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  Settings settings;
  settings.card = device.name;
  if (argc > 4) settings.n_layers = std::atoi(argv[4]);
  if (argc > 5) settings.n_tokens = std::atoll(argv[5]);
  if (argc > 7) settings.window = std::atoll(argv[7]);
  settings.heads = read_heads(argv[2], settings.n_layers);
  tandem_engine* engine = make_engine(argv[1], argc > 3 ? std::atoi(argv[3]) : 0);
  bool are_right = true;
  for (const int64_t chunk : numbers_of(argc > 6 ? argv[6] : "131072,8192")) {
    if (chunk < kBlock || settings.n_tokens % chunk != 0) {
      std::fprintf(stderr, "chunk %lld: not a divisor of the tokens, or less than a block\n", static_cast<long long>(chunk));
      return 2;
    }
    are_right = measure(engine, chunk, settings) && are_right;
  }
  tandem_engine_release(engine);
  return are_right ? 0 : 1;
}
