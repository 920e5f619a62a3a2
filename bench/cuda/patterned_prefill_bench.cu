// SPDX-License-Identifier: MIT
// A prompt under policy "patterns" over keys in the window, through the C ABI: milliseconds of one layer.
//
//   patterned_prefill_bench MODULE [threads [lengths [patterns [queries [runs]]]]]     lists with commas
//
// A layer of 32 query heads and 8 KV heads of 128 dims in bf16. One unplanned call appends `queries` tokens, after which the
// sequence has `length` tokens; queries = 0 (the default) is a prompt from its first token on. All heads have the pattern
//
//   a-SINKS-WINDOW      v-COLUMNS-DIAGONALS      b-BLOCKS
//
// If half- precedes the pattern, every second KV head has it and the others attend all keys, as in files of DuoAttention. A
// call ends with its output. Prints medians of three calls, or one call from 1,000,000 keys on, after an untimed one, beside
// those of the same calls under policy "all". A line of JSON for each length and pattern:
//
//   speedup    over policy "all"
//   allowed    pairs of a query and a key under policy "all", divided by the pairs that heads attend
//   in_tiles   the same, where a block of 128 queries attends tiles of 128 keys, as in kernels. Heads that choose their keys
//              count with a block's average number, so this is up to 15 % too high for them
//
// Queries and keys are noise (seeds 1 to 5), so diagonals with large weights are scattered. With `runs` logits rise where
// query and key are nearly a multiple of 4,096 tokens apart. Diagonals with large weights then come in runs of 64 and more.
//
// Before that, the output of the call's last block of queries is compared with the CPU's for the same queries. So `queries`
// must be a multiple of a block.
#include "timed_append.h"

using namespace tandem::test;

namespace {

constexpr int64_t kBlock = TANDEM_PATTERN_BLOCK, kRoom = 64, kTile = 128;
constexpr int kCalls = 3;

// Replaces the first 32 numbers of each row by cosines and sines of the row's token. The product of two such rows is a sum
// of cosines of the distance between query and key. It is largest at multiples of 4,096 and falls to nothing within some 130
// tokens.
void add_runs(std::vector<__nv_bfloat16>* rows, int32_t n_heads, int64_t first_token) {
  constexpr int kFrequencies = 16, kPeriod = 4096;
  constexpr double kSize = 2.5;
  static_assert(kPeriod == HybridCache::kPiece);  // all pieces of the cache's keys have the same rows
  const auto n_tokens = static_cast<int64_t>(rows->size()) / (n_heads * kDim);
  for (int64_t t = 0; t < n_tokens; ++t)
    for (int f = 0; f < kFrequencies; ++f) {
      const double angle = 2.0 * M_PI * static_cast<double>((f + 1) * ((first_token + t) % kPeriod)) / kPeriod;
      for (int32_t h = 0; h < n_heads; ++h) {
        __nv_bfloat16* const row = rows->data() + (t * n_heads + h) * kDim;
        row[2 * f] = __float2bfloat16(static_cast<float>(kSize * std::cos(angle)));
        row[2 * f + 1] = __float2bfloat16(static_cast<float>(kSize * std::sin(angle)));
      }
    }
}

void add_runs(Call* call, int64_t first_token) {
  add_runs(&call->q, kQHeads, first_token);
  add_runs(&call->k, kKvHeads, first_token);
  must(cudaMemcpy(call->device[0], call->q.data(), call->q.size() * 2, cudaMemcpyHostToDevice));
  must(cudaMemcpy(call->device[1], call->k.data(), call->k.size() * 2, cudaMemcpyHostToDevice));
}

struct Shape {
  std::string name;
  tandem_head_pattern head = TANDEM_HEAD_PATTERN_INIT;
  bool is_half = false;

  explicit Shape(const std::string& text) : name(text) {
    is_half = text.rfind("half-", 0) == 0;
    const char* const size = text.c_str() + (is_half ? 5 : 0);
    long long a = 0, b = 0;
    if (std::sscanf(size, "a-%lld-%lld", &a, &b) == 2 && b > 0) {
      head.kinds = TANDEM_PATTERN_A_SHAPE;
      head.sink_tokens = a, head.window_tokens = b;
    } else if (std::sscanf(size, "v-%lld-%lld", &a, &b) == 2) {
      head.kinds = TANDEM_PATTERN_VERTICAL_SLASH;
      head.vertical_tokens = a, head.slash_tokens = b;
    } else if (std::sscanf(size, "b-%lld", &a) == 1) {
      head.kinds = TANDEM_PATTERN_BLOCK_SPARSE;
      head.n_blocks = a;
    } else {
      std::fprintf(stderr, "%s is no pattern of this bench\n", text.c_str());
      std::exit(2);
    }
  }
  std::vector<tandem_head_pattern> heads() const {
    std::vector<tandem_head_pattern> heads(kQHeads, TANDEM_HEAD_PATTERN_INIT);
    for (size_t h = 0; h < heads.size(); ++h)
      if (!is_half || h / (kQHeads / kKvHeads) % 2 == 0) heads[h] = head;
    return heads;
  }
  // Returns pairs of policy "all" divided by those of kernel tiles. keys: what a block attends on average, by the counted
  // pairs.
  double allowed_in_tiles(int64_t first, int64_t end, double keys) const {
    double narrow = 0.0, all = 0.0;
    const auto tiles = [](double n) { return std::ceil(n / static_cast<double>(kTile)); };
    for (int64_t t = first; t < end; t += kBlock) {
      const double of_all = tiles(static_cast<double>(std::min(end, t + kBlock)));
      const int64_t begin = head.kinds == TANDEM_PATTERN_A_SHAPE ? std::max<int64_t>(0, t + 1 - head.window_tokens) : t;
      const double of_range = of_all - std::floor(static_cast<double>(begin / kTile));
      const double named = head.kinds == TANDEM_PATTERN_A_SHAPE ? static_cast<double>(head.sink_tokens) : keys;
      const double of_shape = std::min(of_all, tiles(named) + of_range);
      all += of_all;
      narrow += is_half ? (of_all + of_shape) / 2 : of_shape;
    }
    return all / narrow;
  }
};

struct Settings {
  std::vector<std::string> patterns;
  int64_t n_queries = 0;  // 0: the whole prompt
  bool has_runs = false;
  const char* card = "";
};

bool measure(tandem_engine* engine, int64_t length, const Settings& settings) {
  const int64_t n_queries = settings.n_queries > 0 ? std::min(settings.n_queries, length) : length;
  const int64_t first = length - n_queries;
  const int n_calls = length < 1000000 ? kCalls : 1;
  bool are_right = true;
  Call call(n_queries);
  HybridKeys keys;
  if (settings.has_runs) {
    add_runs(&call, first);
    keys.change_k = [](std::vector<__nv_bfloat16>* rows) { add_runs(rows, kKvHeads, 0); };
  }
  const HybridCache cache(engine, 1, first, 1, keys);
  TANDEM(tandem_sequence_reserve, cache.cache, cache.sequences[0], n_queries + kRoom);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = length + kRoom;
  options.route = "host";
  const double dense_us = TimedAppend(cache, options, call, kBlock).us(n_calls);
  for (const std::string& name : settings.patterns) {
    const Shape shape(name);
    const std::vector<tandem_head_pattern> heads = shape.heads();
    tandem_patterns patterns = TANDEM_PATTERNS_INIT;
    patterns.heads = heads.data();
    patterns.n_heads = kQHeads;
    options.policy = "patterns";
    options.patterns = &patterns;
    TimedAppend append(cache, options, call, kBlock);
    const double us = append.us(n_calls);
    const tandem_session_stats stats = append.stats();
    const auto n_pairs = static_cast<double>(stats.pattern_pairs), n_dense = static_cast<double>(stats.pattern_dense_pairs);
    const double n_own = static_cast<double>(kBlock + 1) / 2;  // keys of the block itself, on average
    const double keys = n_pairs / static_cast<double>((n_calls + 1) * n_queries * kQHeads) - n_own;
    const double error = append.error();
    const bool is_right = error < 1e-2;  // false for NaN
    std::printf(
        "{\"pattern\": \"%s\", \"tokens\": %lld, \"queries\": %lld, \"diagonals\": \"%s\", \"card\": \"%s\", \"ms\": %.3f, "
        "\"dense_ms\": %.3f, "
        "\"speedup\": %.2f, \"allowed\": %.2f, \"in_tiles\": %.2f, \"error\": %.1e, \"is_right\": %s}\n",
        name.c_str(), static_cast<long long>(length), static_cast<long long>(n_queries),
        settings.has_runs ? "in runs" : "scattered", settings.card, us / 1e3, dense_us / 1e3, dense_us / us,
        n_dense / n_pairs, shape.allowed_in_tiles(first, length, keys), std::isfinite(error) ? error : 1e9,
        is_right ? "true" : "false");
    std::fflush(stdout);
    are_right = is_right && are_right;
  }
  return are_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 7) {
    std::fprintf(stderr, "patterned_prefill_bench MODULE [threads [lengths [patterns [queries [runs]]]]]\n");
    return 2;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  bool are_right = true;
  Settings settings;
  settings.patterns = words_of(argc > 4 ? argv[4] : "a-100-800,half-a-128-256,v-30-800,v-1000-6096,b-100");
  settings.n_queries = argc > 5 ? std::atoll(argv[5]) : 0;
  settings.has_runs = argc > 6 && std::string(argv[6]) == "runs";
  settings.card = device.name;
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "8192,32768,131072"))
    are_right = measure(engine, length, settings) && are_right;
  tandem_engine_release(engine);
  return are_right ? 0 : 1;
}
