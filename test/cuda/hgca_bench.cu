// SPDX-License-Identifier: MIT
// Decode steps of policy "hgca" with a window on the device, replayed as a graph: microseconds a layer.
//
//   hgca_bench MODULE [threads [windows [lengths [batches [shares]]]]]     lists with commas; shares in percent
//
// beta is searched so that the wanted share of the host's keys is kept of random ones, after an append of 16 queries has
// judged them all. Beside each figure, of the same run: the 99th percentile of the steps, evictions and refreshes among
// them; dense attention with everything on the device; K and V of all tokens once over the bus, from pinned memory. Before
// it is timed, an output is compared with that of the CPU for the same selection.
#include "hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int kSteps = 400;
constexpr int64_t kAppend = 16;

tandem_session_options options_of(const char* policy, int64_t window, float beta) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.window_tokens = window;
  options.halo_tokens = 0;
  options.beta = beta;
  return options;
}

// The last tokens' queries again: everything outside the window is judged.
void judge(HybridSession& session, int32_t n_layers) {
  Call call(kAppend * session.on.batch, 70);
  session.q_lens.assign(session.on.sequences.size(), kAppend);
  for (int32_t l = 0; l < n_layers; ++l) session.attend(l, call.device_view, false, true);
  session.wait();
  session.q_lens.assign(session.on.sequences.size(), 1);
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

// Microseconds a layer of each step.
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

double time_bus(int64_t bytes) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  void *host = nullptr, *device = nullptr;
  must(cudaMallocHost(&host, kPiece));
  must(cudaMalloc(&device, kPiece));
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
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

void measure(const HybridCache& cache, int64_t window, double percent, double dense, double bus) {
  const float beta = find_beta(cache, window, percent / 100.0);
  HybridSession session(cache, options_of("hgca", window, beta));
  Call call(cache.batch);
  judge(session, cache.n_layers);
  session.attend(0, call.device_view, false, true);
  session.wait();
  HybridSession twin(cache, options_of("hgca", window, beta));  // judged by the CPU
  Call queries(kAppend * cache.batch, 70);
  twin.q_lens.assign(cache.sequences.size(), kAppend);
  twin.attend(0, queries.host_view, false, false);
  twin.q_lens.assign(cache.sequences.size(), 1);
  twin.attend(0, call.host_view, false, false);
  const double error = distance_of(call);
  time_steps(session, call, 5);
  const tandem_session_stats before = session.stats();
  const std::vector<double> times = time_steps(session, call, kSteps);
  const tandem_session_stats after = session.stats();
  const double host_us = static_cast<double>(after.host_part_ns - before.host_part_ns) * 1e-3 /
                         static_cast<double>(std::max<int64_t>(1, after.n_host_parts - before.n_host_parts));
  std::printf(
      "%7lld window %8lld keys x %-3lld kept %5.2f %%  step %8.1f us  p99 / median %.2f  CPU part %8.1f  dense %8.1f  "
      "step / dense %.2f  bus %9.1f  bus / step %6.1f  error %.1e\n",
      static_cast<long long>(window), static_cast<long long>(cache.length), static_cast<long long>(cache.batch),
      100.0 * share_of(session), median(times), at_share(times, 0.99) / median(times), host_us, dense, median(times) / dense,
      bus, bus / median(times), error);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "hgca_bench MODULE [threads [windows [lengths [batches [shares]]]]]\n");
    return 2;
  }
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t batch : numbers_of(argc > 5 ? argv[5] : "1"))
    for (const int64_t length : numbers_of(argc > 4 ? argv[4] : "131072,262144")) {
      const HybridCache cache(engine, 2, length, batch);
      const double dense = time_dense(cache), bus = time_bus(length * batch * kTokenBytes);
      for (const int64_t window : numbers_of(argc > 3 ? argv[3] : "4096"))
        for (const int64_t share : numbers_of(argc > 6 ? argv[6] : "5,2"))
          measure(cache, window, static_cast<double>(share), dense, bus);
    }
  tandem_engine_release(engine);
  return 0;
}
