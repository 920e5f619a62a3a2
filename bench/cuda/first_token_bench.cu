// SPDX-License-Identifier: MIT
// First tokens over keys in host memory, through the C ABI: milliseconds of a token through all layers, and the rate at
// which windows are filled.
//
//   first_token_bench MODULE [threads [keys x layers x window [routes]]]     lists with commas: 131072x32x4096
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16. K and V are appended from host tensors, in a new cache and
// engine for each case. A new session then decodes on device tensors, and its first token fills the windows. Prints that
// token, its layer 0, the tokens after it, the median of the last ones (`later`), and when the last memory was pinned.
// Further sessions on the same cache do the same, as they fill windows too. Where a window holds all keys, filling is also
// timed by itself: a first token minus a later one, which includes the windows' memory and everything that is done once. The
// store is not pinned then, but it is pinned for sessions that follow one of route `stream`. `bus` is copies of 64 MiB from
// pinned memory in the same run. At the end, an engine with a small cache times the trial of routes. One output of the first
// session is compared with the CPU's.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int kLater = 24, kLastOfLater = 9;

struct Case {
  int64_t length = 0, window = 0;
  int32_t n_layers = 0;
};

Case case_of(const std::string& word) {
  long long length = 0, window = 0;
  int n_layers = 0;
  if (std::sscanf(word.c_str(), "%lldx%dx%lld", &length, &n_layers, &window) != 3) {
    std::fprintf(stderr, "%s is no KEYSxLAYERSxWINDOW\n", word.c_str());
    std::exit(2);
  }
  return {length, window, n_layers};
}

// Returns GB/s.
double time_bus() {
  constexpr size_t kBytes = size_t{64} << 20;
  constexpr int kCopies = 16;
  void *from = nullptr, *to = nullptr;
  must(cudaMallocHost(&from, kBytes));
  must(cudaMalloc(&to, kBytes));
  std::memset(from, 1, kBytes);
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
    const auto begin = Clock::now();
    for (int c = 0; c < kCopies; ++c) must(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyHostToDevice));
    must(cudaDeviceSynchronize());
    times.push_back(us_since(begin));
  }
  cudaFreeHost(from);
  cudaFree(to);
  return static_cast<double>(kCopies * kBytes) / median(times) * 1e-3;
}

tandem_session_options options_of(const char* route, int64_t window) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.route = route;
  options.window_tokens = window;
  return options;
}

int64_t pinned_bytes(const HybridCache& cache) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  TANDEM(tandem_cache_get_stats, &stats, cache.cache);
  return stats.pinned_bytes;
}

void time_trial(const char* module, int32_t n_threads) {
  tandem_engine* engine = make_engine(module, n_threads);
  {
    const HybridCache cache(engine, 1, 4096, 1);
    HybridSession session(cache, options_of("auto", 1024));
    const int64_t length = 131072, q_len = 1;
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    const auto begin = Clock::now();
    TANDEM(tandem_plan, &plan, session.session, 0, &length, &q_len, 1);
    std::printf("trial of routes %.1f ms\n", us_since(begin) * 1e-3);
  }
  tandem_engine_release(engine);
}

struct Token {
  double layer_0 = 0.0, ms = 0.0;
};

Token decode(HybridSession& session, const Call& call) {
  Token token;
  const auto begin = Clock::now();
  session.attend(0, call.device_view, true, true);
  session.wait();
  token.layer_0 = us_since(begin) * 1e-3;
  for (int32_t l = 1; l < session.on.n_layers; ++l) session.attend(l, call.device_view, true, true);
  session.wait();
  token.ms = us_since(begin) * 1e-3;
  return token;
}

// Times the first token of a new session, and later tokens.
Token time_session(const HybridCache& cache, const char* route, int64_t window, bool checks) {
  Call call(1, 7);
  HybridSession session(cache, options_of(route, window));
  const int64_t pinned_before = pinned_bytes(cache);
  const Token first = decode(session, call);
  const tandem_session_stats stats = session.stats();
  double error = 0.0;
  if (checks) {  // checks the filled window and the keys outside it with a query without new rows
    session.attend(0, call.device_view, false, true);
    session.wait();
    session.attend(0, call.host_view, false, false);
    error = distance_of(call);
  }
  std::vector<double> later;
  const auto begin = Clock::now();
  double pinned_ms = 0.0;
  for (int64_t before = pinned_before; std::ssize(later) < kLater;) {
    later.push_back(decode(session, call).ms);
    if (pinned_bytes(cache) == before) continue;
    before = pinned_bytes(cache);
    pinned_ms = us_since(begin) * 1e-3;
  }
  const double settled = median(std::vector<double>(later.end() - kLastOfLater, later.end()));
  std::printf(
      "  route %-6s first %8.2f ms (layer 0 %7.2f, filled %6.0f MB)  then %.1f %.1f %.1f %.1f %.1f  later %8.2f  first / "
      "later "
      "%.2f  pinned %.2f GB more, the last %.0f ms behind the first token  error %.1e\n",
      route, first.ms, first.layer_0, static_cast<double>(stats.filled_kv_bytes) * 1e-6, later[0], later[1], later[2],
      later[3], later[4], settled, first.ms / settled, static_cast<double>(pinned_bytes(cache) - pinned_before) * 1e-9,
      pinned_ms, error);
  std::fflush(stdout);
  return {first.ms, settled};
}

// Compares a token that fills windows of all tokens with a later token.
void time_filling(const HybridCache& cache, int64_t window, double bus) {
  Call call(1, 7);
  std::vector<double> rates;
  for (int i = 0; i < 3; ++i) {
    HybridSession session(cache, options_of("host", window));
    const double first = decode(session, call).ms, later = decode(session, call).ms;
    rates.push_back(static_cast<double>(session.stats().filled_kv_bytes) * 1e-6 / (first - later));
  }
  std::printf("  filling windows, %.1f GB pinned: %.1f %.1f %.1f GB/s, bus %.1f: %.2f of it\n",
              static_cast<double>(pinned_bytes(cache)) * 1e-9, rates[0], rates[1], rates[2], bus, median(rates) / bus);
  std::fflush(stdout);
}

void measure(const char* module, int32_t n_threads, const Case& of, const std::vector<std::string>& routes) {
  tandem_engine* engine = make_engine(module, n_threads);
  {
    const double bus = time_bus();
    const auto begin = Clock::now();
    const HybridCache cache(engine, of.n_layers, of.length, 1);
    std::printf("%lld keys x %d layers, window %lld: %.2f GB, appended in %.0f ms; bus %.1f GB/s\n",
                static_cast<long long>(of.length), of.n_layers, static_cast<long long>(of.window),
                static_cast<double>(of.length * of.n_layers * kTokenBytes) * 1e-9, us_since(begin) * 1e-3, bus);
    bool is_first = true;
    for (const std::string& route : routes) {
      time_session(cache, route.c_str(), of.window, is_first);
      is_first = false;
    }
    if (of.window >= of.length) {
      time_filling(cache, of.window, bus);
      time_session(cache, "stream", 4096, false);  // pins the store, except the newest tokens
      time_filling(cache, of.window, bus);
    }
  }
  tandem_engine_release(engine);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "first_token_bench MODULE [threads [keys x layers x window [routes]]]\n");
    return 2;
  }
  const int32_t n_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  for (const std::string& word : words_of(argc > 3 ? argv[3] : "131072x32x4096,131072x8x131072"))
    measure(argv[1], n_threads, case_of(word), words_of(argc > 4 ? argv[4] : "auto,auto,host"));
  time_trial(argv[1], n_threads);
  return 0;
}
