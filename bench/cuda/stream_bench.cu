// SPDX-License-Identifier: MIT
// Appends over long host contexts, by route: milliseconds per call, through the C ABI.
//
//   stream_bench MODULE [threads [lengths [queries [buffers]]]]     lists with commas; buffers in MiB
//
// One layer of 32 query heads and 8 KV heads of 128 dims in bf16, window 4,096. Compared with the bus, as copies of 64 MiB
// from pinned memory, and with the plain way in CUDA calls. That copies K and V of the whole layer, also from pinned memory,
// and then attends them in one call of the module's kernels; its lower bound is the copy. A share of the bus counts the
// bytes outside the window. Before a length is timed, the route's outputs are compared with the CPU's. The appended tokens
// are truncated away after each call, untimed.
#include "layer_rival.h"

using namespace tandem::test;

namespace {

constexpr int64_t kWindow = 4096;
constexpr int kRounds = 7;

struct Measured {
  double us = 0.0, streamed_bytes = 0.0, stream_us = 0.0;
  std::vector<__nv_bfloat16> o;
};

// Times appends of the same rows, which are removed after each.
Measured time_route(const HybridCache& cache, const Call& call, int64_t n_queries, const char* route, int64_t buffer_bytes) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = kWindow;
  options.route = route;
  options.stream_buffer_bytes = buffer_bytes;
  HybridSession session(cache, options);
  session.q_lens.assign(1, n_queries);
  Measured measured;
  std::vector<double> times;
  tandem_session_stats before = TANDEM_SESSION_STATS_INIT;
  for (int i = 0; i < kRounds + 2; ++i) {  // the first rounds fill the window, pin and measure
    if (i == 2) before = session.stats();
    const auto begin = Clock::now();
    session.attend(0, call.device_view, true, true);
    session.wait();
    if (i >= 2) times.push_back(us_since(begin));
    if (i == 0) measured.o = call.device_output();
    TANDEM(tandem_sequence_truncate, cache.cache, cache.sequences[0], cache.length);
  }
  const tandem_session_stats after = session.stats();
  const auto n = static_cast<double>(std::max<int64_t>(1, after.n_stream_parts - before.n_stream_parts));
  measured.us = median(times);
  measured.streamed_bytes = static_cast<double>(after.streamed_kv_bytes - before.streamed_kv_bytes) / n;
  measured.stream_us = static_cast<double>(after.stream_part_ns - before.stream_part_ns) * 1e-3 / n;
  return measured;
}

void measure(const OpenDevice& device, const HybridCache& cache, int64_t n_queries, const std::vector<int64_t>& buffers) {
  constexpr double kMostDistance = 0.01;
  const Call call(n_queries, 7);
  const Measured host = time_route(cache, call, n_queries, "host", 0);
  const int64_t host_bytes = (cache.length - kWindow) * kTokenBytes;
  double bus = 0.0, rival_us = 0.0;
  {
    LayerRival rival(device, cache.length, n_queries);
    bus = time_bus(rival.from(), cache.length * kTokenBytes, rival.keys());
    rival_us = rival.time_copied(cache.length * kTokenBytes, kRounds);
  }
  std::printf("%8lld keys + %-4lld host %8.3f ms  rival %8.3f  copy alone %8.3f  bus %.1f GB/s\n",
              static_cast<long long>(cache.length), static_cast<long long>(n_queries), host.us * 1e-3, rival_us * 1e-3,
              static_cast<double>(cache.length * kTokenBytes) / bus * 1e-3, bus * 1e-3);
  const auto report = [&](const char* route, int64_t buffer_mib, double best) {
    const Measured got = time_route(cache, call, n_queries, route, buffer_mib << 20);
    const double error = distance(got.o, host.o);
    if (!(error < kMostDistance)) {
      std::printf("route %s: relative distance %.2e from the CPU's answer\n", route, error);
      std::exit(1);
    }
    std::printf(
        "    %-6s %3lld MiB %8.3f ms  of the bus %.3f  copies %.3f  / best of the others %.3f  streamed %5.0f MB  error "
        "%.1e\n",
        route, static_cast<long long>(buffer_mib), got.us * 1e-3, static_cast<double>(host_bytes) / bus / got.us,
        got.stream_us > 0 ? got.streamed_bytes / bus / got.stream_us : 0.0, got.us / best, got.streamed_bytes * 1e-6, error);
    std::fflush(stdout);
    return got.us;
  };
  double best = std::min(host.us, rival_us);
  for (const int64_t buffer : buffers) best = std::min(best, report("stream", buffer, std::min(host.us, rival_us)));
  report("auto", 0, best);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "stream_bench MODULE [threads [lengths [queries [buffers]]]]\n");
    return 2;
  }
  const OpenDevice device(argv[1]);
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "65536,131072,262144")) {
    const HybridCache cache(engine, 1, length, 1);
    for (const int64_t n_queries : numbers_of(argc > 4 ? argv[4] : "16,64,128,512"))
      measure(device, cache, n_queries, numbers_of(argc > 5 ? argv[5] : "16"));
  }
  tandem_engine_release(engine);
  return 0;
}
