// SPDX-License-Identifier: MIT
// Decode with the newest tokens on the device and the rest in host memory, through the C ABI: microseconds per call.
//
//   hybrid_bench MODULE [threads [lengths [batches [streaming]]]]     lists with commas
//
// streaming: 0, or n: every n-th KV head streams, and is compared with the CPU under the same options.
// One layer shape of 32 query heads and 8 KV heads of 128 dims in bf16, window 4,096, one query per sequence. There are
// enough layers for K and V to be many times the last-level cache, and calls go through them in turn. Also printed: the time
// with all layers replayed as a graph in planned steps; the time of the CPU's part inside the calls, and the calls' time
// relative to it; the time of the CPU alone over the same keys (host tensors, window included), and the calls' time relative
// to its share of keys outside the window. Before a length is timed, an output is compared with that of the CPU alone.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kWindow = 4096;
constexpr int64_t kLeastBytes = int64_t{2500} << 20;
constexpr int kRounds = 9;

// Compares the same query without new keys on both. Outputs are bf16, so they differ by a few roundings.
double check(HybridSession& session, Call& call) {
  session.attend(0, call.device_view, false, true);
  session.wait();
  session.attend(0, call.host_view, false, false);
  return distance_of(call);
}

void measure(tandem_engine* engine, int64_t length, int64_t batch, int64_t streaming) {
  const int64_t layer_bytes = length * batch * kTokenBytes;
  const HybridCache cache(engine, static_cast<int32_t>(std::max<int64_t>(2, (kLeastBytes + layer_bytes - 1) / layer_bytes)),
                          length, batch);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = kWindow;
  std::vector<uint8_t> flags;
  for (int64_t h = 0; streaming > 0 && h < int64_t{cache.n_layers} * kKvHeads; ++h)
    flags.push_back(h % streaming == 0 ? 1 : 0);
  options.streaming_heads = flags.empty() ? nullptr : flags.data();
  options.n_streaming_heads = static_cast<int64_t>(flags.size());
  HybridSession session(cache, options);
  Call call(batch);
  const double error = check(session, call);
  const auto pass = [&](const tandem_tensor* views, bool on_device) {
    const auto begin = Clock::now();
    session.attend_layers(views, true, on_device);
    if (on_device) session.wait();
    return us_since(begin) / cache.n_layers;
  };
  pass(call.device_view, true);  // fills the windows
  const auto step = [&] {
    const auto begin = Clock::now();
    session.step(call.device_view, true);
    session.wait();
    return us_since(begin) / cache.n_layers;
  };
  step();
  std::vector<double> hybrid, alone, part, replayed;
  for (int i = 0; i < kRounds; ++i) {
    const tandem_session_stats before = session.stats();
    hybrid.push_back(pass(call.device_view, true));
    const tandem_session_stats after = session.stats();
    if (after.n_host_parts > before.n_host_parts)
      part.push_back(static_cast<double>(after.host_part_ns - before.host_part_ns) * 1e-3 /
                     static_cast<double>(after.n_host_parts - before.n_host_parts));
    replayed.push_back(step());
    alone.push_back(pass(call.host_view, false));
    pass(call.device_view, true);  // takes over the rows that the CPU has appended
  }
  const double share = length > kWindow ? static_cast<double>(length - kWindow) / static_cast<double>(length) : 0.0;
  const double host = part.empty() ? 0.0 : median(part);
  std::printf(
      "%8lld keys x %-3lld %3d layers  hybrid %9.1f us  most %9.1f  replayed %9.1f  CPU part %9.1f  hybrid / part %.3f  CPU "
      "alone %9.1f"
      "  hybrid / its share %.3f  GB/s %.0f  error %.1e  streaming %lld\n",
      static_cast<long long>(length), static_cast<long long>(batch), cache.n_layers, median(hybrid),
      *std::max_element(hybrid.begin(), hybrid.end()), median(replayed), host, host > 0 ? median(hybrid) / host : 0.0,
      median(alone), share > 0 ? median(hybrid) / (median(alone) * share) : 0.0,
      static_cast<double>((length - kWindow) * batch * kTokenBytes) / median(hybrid) * 1e-3, error,
      static_cast<long long>(streaming));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "hybrid_bench MODULE [threads [lengths [batches [streaming]]]]\n");
    return 2;
  }
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t streaming : numbers_of(argc > 5 ? argv[5] : "0"))
    for (const int64_t batch : numbers_of(argc > 4 ? argv[4] : "1,8"))
      for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "4096,65536,131072"))
        measure(engine, length, batch, streaming);
  tandem_engine_release(engine);
  return 0;
}
