// SPDX-License-Identifier: MIT
// Times long appends over keys in host memory, in ms, beside the same calls with all keys on the device. Uses the C ABI.
//
//   append_bench MODULE [threads [lengths [appended [call_lens [heads [buffers [layers]]]]]]]     lists with commas;
//     buffers in MiB
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16, one after the other as in a model. Times are for one layer.
// "lengths" are the keys outside the window of 4,096 when an append begins. The append comes in calls of call_len tokens.
// heads: KV heads that are streamed at a time, 0: the library's choice. For comparison, plain CUDA calls on the module's
// kernels: all keys of the layer are copied and then attended; or they are copied for the next layer while this one is
// attended; or they are attended only. Before anything is timed, the outputs are compared with those of resident keys. After
// each append the tokens are truncated away, untimed, and an append of one token fills the window.
#include <memory>

#include "layer_rival.h"

using namespace tandem::test;

namespace {

constexpr int64_t kWindow = 4096;
constexpr int kRounds = 3;

struct Measured {
  double us = 0.0;
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
  tandem_cache_stats held = TANDEM_CACHE_STATS_INIT;
  std::vector<__nv_bfloat16> o;
};

// The append in calls of call_len tokens.
struct Append {
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<int64_t> lens;
  int64_t n = 0;

  Append(int64_t appended, int64_t call_len) : n(appended) {
    for (int64_t first = 0; first < n; first += call_len) {
      lens.push_back(std::min(call_len, n - first));
      calls.push_back(std::make_unique<Call>(lens.back(), 7 + first));
    }
  }
  // Sends a call through all layers before the next call.
  template <typename F>
  void run(HybridSession& session, F after_layer) const {
    for (size_t i = 0; i < calls.size(); ++i) {
      session.q_lens.assign(1, lens[i]);
      for (int32_t l = 0; l < session.on.n_layers; ++l) {
        session.attend(l, calls[i]->device_view, true, true);
        after_layer(*calls[i]);
      }
    }
  }
};

Measured time_session(const HybridCache& cache, const Append& append, const tandem_session_options& options) {
  HybridSession session(cache, options);
  const Call one(1, 3);
  Measured measured;
  std::vector<double> times;
  for (int i = 0; i < kRounds + 2; ++i) {  // the first rounds take memory and pin
    session.q_lens.assign(1, 1);
    session.attend_layers(one.device_view, true, true);
    session.wait();
    const auto begin = Clock::now();
    append.run(session, [&](const Call& call) {
      if (i > 0) return;
      session.wait();
      const auto o = call.device_output();
      measured.o.insert(measured.o.end(), o.begin(), o.end());
    });
    session.wait();
    if (i >= 2) times.push_back(us_since(begin) / cache.n_layers);
    if (i == kRounds + 1) {
      measured.stats = session.stats();
      TANDEM(tandem_cache_get_stats, &measured.held, cache.cache);
    }
    TANDEM(tandem_sequence_truncate, cache.cache, cache.sequences[0], cache.length);
  }
  measured.us = median(times);
  return measured;
}

// Largest and root mean square difference, relative to the root mean square of b.
struct Distance {
  double largest = 0.0, mean = 0.0;
};
Distance distance(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  double most = 0.0, error = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(static_cast<double>(__bfloat162float(a[i])) - static_cast<double>(__bfloat162float(b[i])));
    most = d > most || !(d == d) ? d : most;
    error += d * d;
    size += std::pow(static_cast<double>(__bfloat162float(b[i])), 2);
  }
  const double root = std::sqrt(size / static_cast<double>(a.size()));
  return {most / root, std::sqrt(error / size)};
}

struct Lists {
  std::vector<int64_t> call_lens, heads, buffers;
  int32_t n_layers = 1;
};

tandem_session_options options_of(const char* route, int64_t window) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = window;
  options.route = route;
  return options;
}

void measure_streams(const HybridCache& cache, const Append& append, const Measured& resident, const Lists& lists) {
  for (const int64_t heads : lists.heads)
    for (const int64_t buffer : lists.buffers) {
      tandem_session_options options = options_of("stream", kWindow);
      options.stream_buffer_bytes = buffer << 20;
      options.stream_heads = heads;
      const Measured got = time_session(cache, append, options);
      const Distance far = distance(got.o, resident.o);
      if (!(far.mean < 0.01) || !(far.largest < 0.2)) {
        std::printf("heads %lld: relative distance %.2e, largest %.2e\n", static_cast<long long>(heads), far.mean,
                    far.largest);
        std::exit(1);
      }
      std::printf("    heads %lld %3lld MiB %8.3f ms  / resident %.3f  streamed %6.0f MB a run  work %5.1f MB  error %.1e\n",
                  static_cast<long long>(heads), static_cast<long long>(buffer), got.us * 1e-3, got.us / resident.us,
                  static_cast<double>(got.stats.streamed_kv_bytes) / (kRounds + 2) / cache.n_layers * 1e-6,
                  static_cast<double>(got.held.device_work_bytes) * 1e-6, far.mean);
      std::fflush(stdout);
    }
}

void measure(const OpenDevice& device, tandem_engine* engine, int64_t offloaded, int64_t appended, const Lists& lists) {
  const HybridCache cache(engine, lists.n_layers, offloaded + kWindow, 1);
  const int64_t all = cache.length + appended;
  double copied = 0.0, two_layers = 0.0, alone = 0.0, bus = 0.0;
  {
    LayerRival rival(device, (all + 127) / 128 * 128, appended);
    bus = time_bus(rival.from(), cache.length * kTokenBytes, rival.keys());
    copied = rival.time_copied(cache.length * kTokenBytes, kRounds);
    two_layers = rival.time_two_layers(cache.length * kTokenBytes, kRounds);
    alone = rival.time_resident(kRounds);
  }
  std::printf(
      "%lld keys outside + %lld: kernel alone %.3f ms, layer copied first %.3f, next layer copied meanwhile %.3f, bus "
      "%.1f GB/s\n",
      static_cast<long long>(offloaded), static_cast<long long>(appended), alone * 1e-3, copied * 1e-3, two_layers * 1e-3,
      bus * 1e-3);
  for (const int64_t call_len : lists.call_lens) {
    const Append append(appended, call_len);
    const Measured resident = time_session(cache, append, options_of("host", all + kWindow));
    std::printf("  calls of %lld: resident %.3f ms\n", static_cast<long long>(call_len), resident.us * 1e-3);
    measure_streams(cache, append, resident, lists);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "append_bench MODULE [threads [lengths [appended [call_lens [heads [buffers [layers]]]]]]]\n");
    return 2;
  }
  const auto list = [&](int at, const char* otherwise) { return numbers_of(argc > at ? argv[at] : otherwise); };
  const OpenDevice device(argv[1]);
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t length : list(3, "10240,40960,102400,409600,1048576"))
    for (const int64_t appended : list(4, "10240"))
      measure(device, engine, length, appended,
              {list(5, "10240,4096"), list(6, "0,1,2,4,8"), list(7, "16"), argc > 8 ? std::atoi(argv[8]) : 1});
  tandem_engine_release(engine);
  return 0;
}
