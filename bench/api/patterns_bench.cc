// SPDX-License-Identifier: MIT
// A prompt under policy "patterns" on the CPU: whole calls of tandem_attend() in a layer of 32 query heads over 8 KV heads
// of 128, K and V in bf16, beside policy "all".
//
//   pairs    pairs of a query and a key that the call attends, as a share of policy "all" (the session's statistics)
//   of pairs speedup over policy "all", divided by the factor by which the pairs are fewer
//
// All heads have the same pattern. Queries and keys are noise. Each query resembles the keys that are a multiple of 1,024
// tokens before it, so there are diagonals to find. First the bench checks that a window longer than the prompt gives the
// outputs of "all".
//
//   patterns_bench [threads] [tokens] [pattern,pattern...] [rounds]
//
// pattern: a-SINKS-WINDOW, v-COLUMNS-DIAGONALS or b-BLOCKS. Not a test.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/cpu/bench_clock.h"
#include "tandem/tandem.h"

namespace tandem::test {
namespace {

constexpr int32_t kQHeads = 32, kKvHeads = 8, kDim = 128;
constexpr int64_t kPeriod = 1024;

void check(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) return;
  std::fprintf(stderr, "%s\n", tandem_error_message(error));
  std::exit(1);
}
#define CHECKED(function, ...)                          \
  do {                                                  \
    tandem_error* error = nullptr;                      \
    const int32_t code = function(__VA_ARGS__, &error); \
    check(code, error);                                 \
  } while (0)

tandem_head_pattern pattern_of(const std::string& text) {
  tandem_head_pattern pattern = TANDEM_HEAD_PATTERN_INIT;
  long long a = 0, b = 0;
  if (std::sscanf(text.c_str(), "a-%lld-%lld", &a, &b) == 2) {
    pattern.kinds = TANDEM_PATTERN_A_SHAPE, pattern.sink_tokens = a, pattern.window_tokens = b;
  } else if (std::sscanf(text.c_str(), "v-%lld-%lld", &a, &b) == 2) {
    pattern.kinds = TANDEM_PATTERN_VERTICAL_SLASH, pattern.vertical_tokens = a, pattern.slash_tokens = b;
  } else if (std::sscanf(text.c_str(), "b-%lld", &a) == 1) {
    pattern.kinds = TANDEM_PATTERN_BLOCK_SPARSE, pattern.n_blocks = a;
  } else {
    std::fprintf(stderr, "%s is no pattern of this bench\n", text.c_str());
    std::exit(2);
  }
  return pattern;
}

// Makes rows that repeat after kPeriod tokens, with noise.
std::vector<float> make_rows(int64_t n_tokens, int32_t n_heads, uint64_t seed) {
  std::vector<float> rows(static_cast<size_t>(n_tokens * n_heads * kDim)), base(kPeriod * kDim);
  uint64_t state = 88172645463325252u;
  const auto next = [&] {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<float>(static_cast<double>(state >> 40) / (1 << 23) - 1.0);
  };
  for (float& x : base) x = next();
  state += seed;
  for (int64_t t = 0; t < n_tokens; ++t)
    for (int32_t h = 0; h < n_heads; ++h)
      for (int32_t d = 0; d < kDim; ++d)
        rows[static_cast<size_t>((t * n_heads + h) * kDim + d)] =
            base[static_cast<size_t>(t % kPeriod * kDim + d)] + 0.5f * next();
  return rows;
}

tandem_tensor tensor(std::vector<float>& rows, int32_t n_heads) {
  const int64_t shape[3] = {std::ssize(rows) / (n_heads * kDim), n_heads, kDim};
  tandem_tensor view;
  CHECKED(tandem_tensor_init, &view, TANDEM_F32, rows.data(), 3, shape);
  return view;
}

struct Prompt {
  std::vector<float> q, k, v, o;
  explicit Prompt(int64_t n)
      : q(make_rows(n, kQHeads, 1)), k(make_rows(n, kKvHeads, 2)), v(make_rows(n, kKvHeads, 3)), o(q.size()) {}
};

struct Measured {
  double ms = 0.0;
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
  std::vector<float> o;
};

Measured measure(tandem_cache* cache, Prompt& prompt, const char* policy, const tandem_patterns* patterns, int n_rounds) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.patterns = patterns;
  tandem_session* session = nullptr;
  CHECKED(tandem_session_create, &session, cache, &options);
  std::vector<double> times;
  Measured made;
  for (int round = 0; round < n_rounds; ++round) {
    int64_t sequence = 0;
    CHECKED(tandem_sequence_create, &sequence, cache);
    tandem_tensor q = tensor(prompt.q, kQHeads), k = tensor(prompt.k, kKvHeads), v = tensor(prompt.v, kKvHeads),
                  o = tensor(prompt.o, kQHeads);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    const int64_t q_len = q.shape[0];
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &q_len;
    args.q = &q, args.k = &k, args.v = &v, args.o = &o;
    const double begin = now_ns();
    CHECKED(tandem_attend, session, &args);
    times.push_back((now_ns() - begin) / 1e6);
    CHECKED(tandem_sequence_drop, cache, sequence);
  }
  made.ms = median(times);
  CHECKED(tandem_session_get_stats, &made.stats, session);
  made.o = prompt.o;
  tandem_session_release(session);
  return made;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0.0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(static_cast<double>(a[i]) - b[i]));
  return most;
}

int run(int32_t n_threads, int64_t n_tokens, const std::vector<std::string>& names, int n_rounds) {
  tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
  engine_options.n_threads = n_threads;
  tandem_engine* engine = nullptr;
  CHECKED(tandem_engine_create, &engine, &engine_options);
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kQHeads, layer.n_kv_heads = kKvHeads, layer.k_head_dim = kDim;
  tandem_model* model = nullptr;
  CHECKED(tandem_model_create, &model, &layer, 1);
  tandem_cache* cache = nullptr;
  CHECKED(tandem_cache_create, &cache, engine, model, nullptr);
  Prompt prompt(n_tokens);
  const Measured all = measure(cache, prompt, "all", nullptr, n_rounds);
  std::printf("%d threads, %lld tokens, policy all %.1f ms\n\n| | ms | pairs, %% | of pairs |\n|---|---|---|---|\n",
              n_threads, static_cast<long long>(n_tokens), all.ms);
  const std::string whole = "a-0-" + std::to_string(n_tokens);
  bool is_right = true;
  for (size_t i = 0; i <= names.size(); ++i) {
    const std::string& name = i == 0 ? whole : names[i - 1];
    const std::vector<tandem_head_pattern> heads(kQHeads, pattern_of(name));
    tandem_patterns patterns = TANDEM_PATTERNS_INIT;
    patterns.heads = heads.data();
    patterns.n_heads = kQHeads;
    const Measured one = measure(cache, prompt, "patterns", &patterns, n_rounds);
    const double share = static_cast<double>(one.stats.pattern_pairs) / static_cast<double>(one.stats.pattern_dense_pairs);
    if (i == 0) is_right = distance(one.o, all.o) < 2e-2;
    std::printf("| %s | %.1f | %.2f | %.2f |\n", name.c_str(), one.ms, 100.0 * share, all.ms / one.ms * share);
    std::fflush(stdout);
  }
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  if (!is_right) std::fprintf(stderr, "a window over the whole prompt gives other outputs than policy \"all\"\n");
  return is_right ? 0 : 1;
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  std::vector<std::string> patterns{"a-100-800", "v-30-800", "v-1000-6096", "b-100"};
  if (argc > 3) {
    patterns.clear();
    const std::string given = std::string(argv[3]) + ",";
    for (size_t first = 0; first < given.size(); first = given.find(',', first) + 1)
      patterns.push_back(given.substr(first, given.find(',', first) - first));
  }
  return tandem::test::run(argc > 1 ? std::atoi(argv[1]) : 2, argc > 2 ? std::atoll(argv[2]) : 32768, patterns,
                           argc > 4 ? std::atoi(argv[4]) : 3);
}
