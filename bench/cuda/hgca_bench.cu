// SPDX-License-Identifier: MIT
// Decode steps of policy "hgca" with a window on the device, replayed as a graph: microseconds per layer.
//
//   hgca_bench MODULE [threads [windows [lengths [batches [shares]]]]]     lists with commas; shares in percent
//   hgca_bench MODULE grid [threads [windows [offloaded [batches [shares]]]]]
//
// The bench searches the beta with which the wanted share of the host's random keys is kept, after an append of 16 queries
// has judged them all. The same run also gives: the 99th percentile of the steps, evictions and refreshes included; dense
// attention with all keys on the device; K and V of all tokens once over the bus, from pinned memory. Before timing, an
// output is compared with that of the CPU for the same selection. Both must be equal except for rounding.
//
// The grid is that of HGCA's paper (figure 10): keys on the device, keys elsewhere, sequences. Prints the time for bringing
// the other keys over the bus divided by the time of a step, and the step's time. Its sequences are forks of one, so filling
// the store takes no time. Each sequence still has its own copies of the host's keys that steps read.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int kSteps = 400, kGridSteps = 30;
constexpr int64_t kAppend = 16;
constexpr double kRounding = 1.0 / 256;  // rounding of bf16 outputs

tandem_session_options options_of(const char* policy, int64_t window, float beta) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.window_tokens = window;
  options.halo_tokens = 0;
  options.beta = beta;
  return options;
}

// Attends the last tokens' queries again, so that all keys outside the window are judged.
void judge(HybridSession& session, int32_t n_layers) {
  Call call(kAppend * session.on.batch, 70);
  session.q_lens.assign(session.on.sequences.size(), kAppend);
  for (int32_t l = 0; l < n_layers; ++l) session.attend(l, call.device_view, false, true);
  session.wait();
  session.q_lens.assign(session.on.sequences.size(), 1);
  int64_t n = 0;
  for (int32_t l = 0; l < n_layers; ++l)  // asking for a selection has the keys judged
    for (const int64_t id : session.on.sequences)
      TANDEM(tandem_session_selection, nullptr, nullptr, 0, &n, session.session, id, l, 0, 0);
}

double share_of(const HybridSession& session) {
  const tandem_session_stats stats = session.stats();
  return static_cast<double>(stats.selected_keys) / static_cast<double>(std::max<int64_t>(1, stats.host_keys));
}

float find_beta(const HybridCache& cache, int64_t window, double share) {
  float low = 0.25f, high = 64.0f;
  for (int i = 0; i < 12; ++i) {
    const float middle = std::sqrt(low * high);
    HybridSession session(cache, options_of("hgca", window, middle));
    judge(session, 1);
    (share_of(session) > share ? low : high) = middle;
  }
  return std::sqrt(low * high);
}

// Returns microseconds per layer of each step.
std::vector<double> time_steps(HybridSession& session, const Call& call, int n_steps) {
  std::vector<double> times;
  for (int i = 0; i < n_steps; ++i) {
    const auto begin = Clock::now();
    session.step(call.device_view, true);
    session.wait();
    times.push_back(us_since(begin) / session.on.n_layers);
  }
  return times;
}

double time_dense(const HybridCache& cache) {
  HybridSession session(cache, options_of("all", cache.length + 1000, 1.0f));
  const Call call(cache.batch);
  session.attend_layers(call.device_view, true, true);
  time_steps(session, call, 3);
  return median(time_steps(session, call, 30));
}

double time_bus(int64_t bytes, int n_times) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  void *host = nullptr, *device = nullptr;
  must(cudaMallocHost(&host, kPiece));
  must(cudaMalloc(&device, kPiece));
  std::vector<double> times;
  for (int i = 0; i < n_times; ++i) {
    const auto begin = Clock::now();
    for (int64_t at = 0; at < bytes; at += kPiece)
      must(cudaMemcpyAsync(device, host, static_cast<size_t>(std::min(kPiece, bytes - at)), cudaMemcpyHostToDevice));
    must(cudaDeviceSynchronize());
    times.push_back(us_since(begin));
  }
  must(cudaFreeHost(host));
  must(cudaFree(device));
  return median(times);
}

struct Figures {
  double share = 0.0, step = 0.0, p99 = 0.0, host_part = 0.0, error = 0.0;
};

// Compares the call's output with that of a session that the CPU has judged, without new keys, after the same judgement.
double check(HybridSession& session, Call& call, int64_t window, float beta) {
  const HybridCache& cache = session.on;
  session.attend(0, call.device_view, false, true);
  session.wait();
  HybridSession twin(cache, options_of("hgca", window, beta));
  Call queries(kAppend * cache.batch, 70);
  twin.q_lens.assign(cache.sequences.size(), kAppend);
  twin.attend(0, queries.host_view, false, false);
  twin.q_lens.assign(cache.sequences.size(), 1);
  twin.attend(0, call.host_view, false, false);
  const double error = distance_of(call);
  if (error <= kRounding && session.stats().selected_keys > 0) return error;
  std::fprintf(stderr, "WRONG: %.1e from the CPU's output, %lld keys selected\n", error,
               static_cast<long long>(session.stats().selected_keys));
  std::exit(1);
}

Figures measure(const HybridCache& cache, int64_t window, float beta, int n_steps) {
  HybridSession session(cache, options_of("hgca", window, beta));
  Call call(cache.batch);
  judge(session, cache.n_layers);
  Figures figures;
  figures.error = check(session, call, window, beta);
  time_steps(session, call, 5);
  const tandem_session_stats before = session.stats();
  const std::vector<double> times = time_steps(session, call, n_steps);
  const tandem_session_stats after = session.stats();
  figures.share = share_of(session);
  figures.step = median(times);
  figures.p99 = at_share(times, 0.99);
  figures.host_part = static_cast<double>(after.host_part_ns - before.host_part_ns) * 1e-3 /
                      static_cast<double>(std::max<int64_t>(1, after.n_host_parts - before.n_host_parts));
  return figures;
}

void print_lines(tandem_engine* engine, int argc, char** argv) {
  for (const int64_t batch : numbers_of(argc > 3 ? argv[3] : "1"))
    for (const int64_t length : numbers_of(argc > 2 ? argv[2] : "131072,262144")) {
      const HybridCache cache(engine, 2, length, batch);
      const double dense = time_dense(cache), bus = time_bus(length * batch * kTokenBytes, 5);
      for (const int64_t window : numbers_of(argc > 1 ? argv[1] : "4096"))
        for (const int64_t percent : numbers_of(argc > 4 ? argv[4] : "5,2")) {
          const float beta = find_beta(cache, window, static_cast<double>(percent) / 100.0);
          const Figures f = measure(cache, window, beta, kSteps);
          std::printf(
              "%7lld window %8lld keys x %-3lld kept %5.2f %%  step %8.1f us  p99 / median %.2f  CPU part %8.1f  dense "
              "%8.1f  "
              "step / dense %.2f  bus %9.1f  bus / step %6.1f  error %.1e\n",
              static_cast<long long>(window), static_cast<long long>(length), static_cast<long long>(batch), 100.0 * f.share,
              f.step, f.p99 / f.step, f.host_part, dense, f.step / dense, bus, bus / f.step, f.error);
          std::fflush(stdout);
        }
    }
}

// Rows of the table: window and batch; columns: offloaded keys.
void print_grid(tandem_engine* engine, int argc, char** argv) {
  const std::vector<int64_t> windows = numbers_of(argc > 1 ? argv[1] : "1024,4096,16384"),
                             offloaded = numbers_of(argc > 2 ? argv[2] : "4096,16384,65536,131072"),
                             batches = numbers_of(argc > 3 ? argv[3] : "1,8,32");
  const HybridCache all(
      engine, 2, *std::max_element(windows.begin(), windows.end()) + *std::max_element(offloaded.begin(), offloaded.end()),
      1);
  std::vector<double> bus;  // [offloaded][batches]
  for (const int64_t n : offloaded)
    for (const int64_t batch : batches) bus.push_back(time_bus(n * batch * kTokenBytes, 3));
  for (const int64_t percent : numbers_of(argc > 4 ? argv[4] : "5")) {
    std::printf("%lld %% kept: bus / step (step in us a layer); keys offloaded:\n%8s %6s", static_cast<long long>(percent),
                "window", "batch");
    for (const int64_t n : offloaded) std::printf(" %20lld", static_cast<long long>(n));
    for (const int64_t window : windows) {
      std::vector<float> betas;
      for (const int64_t n : offloaded)
        betas.push_back(find_beta(HybridCache(all, n + window, 1), window, static_cast<double>(percent) / 100.0));
      for (size_t b = 0; b < batches.size(); ++b) {
        std::printf("\n%8lld %6lld", static_cast<long long>(window), static_cast<long long>(batches[b]));
        for (size_t i = 0; i < offloaded.size(); ++i) {
          const Figures f = measure(HybridCache(all, offloaded[i] + window, batches[b]), window, betas[i], kGridSteps);
          std::printf(" %9.1f (%8.1f)", bus[i * batches.size() + b] / f.step, f.step);
          std::fflush(stdout);
        }
      }
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "hgca_bench MODULE [threads [windows [lengths [batches [shares]]]]]\n"
                 "hgca_bench MODULE grid [threads [windows [offloaded [batches [shares]]]]]\n");
    return 2;
  }
  const bool is_grid = argc > 2 && std::strcmp(argv[2], "grid") == 0;
  const int first = is_grid ? 3 : 2;
  tandem_engine* engine = make_engine(argv[1], argc > first ? std::atoi(argv[first]) : 0);
  (is_grid ? print_grid : print_lines)(engine, argc - first, argv + first);
  tandem_engine_release(engine);
  return 0;
}
