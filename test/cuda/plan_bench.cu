// SPDX-License-Identifier: MIT
// Decode over keys in host memory, by route: milliseconds a layer, through the C ABI.
//
//   plan_bench MODULE [threads [lengths [bytes [fractions]]]]     lists with commas; bytes of keys in all, in MiB
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16; all but a window of 512 tokens is on the host. Calls go round
// several layers that together are `bytes` at least, so that no cache of the CPU has what the next call reads; a length
// whose layers are less is marked warm. Each call appends a token and ends before the next begins; the tokens are truncated
// away after each round, outside the time. Beside the routes, in the same run and on the same memory: the CPU reading alone,
// the bus copying alone, and both at once, whose sum is the bound of whoever uses both.
//
// First, each route's output is compared with attention in double precision over the same keys.
#include <atomic>
#include <thread>

#include "hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kWindow = 512;
constexpr int kRounds = 3;
constexpr uint64_t kSeed = 4;

struct RouteCase {
  const char* route;
  double fraction;
};

tandem_session_options options_of(const RouteCase& one) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = kWindow;
  options.route = one.route;
  options.stream_fraction = one.fraction;
  return options;
}

// ---- limits: memory of the bench's own, read and copied as calls would
// ----------------------------------------------------

class Limits {
 public:
  // The first third is for the bus, which needs no more, the rest for the CPU.
  Limits(int64_t bytes, int n_threads) : bytes_(bytes), n_threads_(n_threads) {
    must(cudaMallocHost(&host_, static_cast<size_t>(bytes)));
    must(cudaMalloc(&device_, kPiece));
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    std::memset(host_, 1, static_cast<size_t>(bytes));
  }
  Limits(const Limits&) = delete;
  ~Limits() {
    cudaStreamDestroy(stream_);
    cudaFreeHost(host_);
    cudaFree(device_);
  }

  // GB/s. Both: while the other is at it.
  double cpu() {
    return read_while([this] { return us_since(begin_) < 30'000.0; });
  }
  double bus() {
    const auto begin = Clock::now();
    const int64_t n = copy(30'000.0);
    return static_cast<double>(n) / us_since(begin) * 1e-3;
  }
  void both(double* cpu, double* bus) {
    std::atomic<bool> is_over{false};
    std::thread copies([&] {
      const auto begin = Clock::now();
      const int64_t n = copy(40'000.0);
      *bus = static_cast<double>(n) / us_since(begin) * 1e-3;
      is_over = true;
    });
    *cpu = read_while([&] { return !is_over; });
    copies.join();
  }

 private:
  static constexpr int64_t kPiece = int64_t{16} << 20, kChunk = int64_t{1} << 20;

  // For about so long.
  int64_t copy(double us) {
    const auto begin = Clock::now();
    int64_t n = 0;
    for (int64_t at = 0; us_since(begin) < us; at = (at + 2 * kPiece) % (bytes_ / 3 / (2 * kPiece) * 2 * kPiece)) {
      for (int i = 0; i < 2; ++i)
        must(cudaMemcpyAsync(device_, host_ + at + i * kPiece, kPiece, cudaMemcpyHostToDevice, stream_));
      must(cudaStreamSynchronize(stream_));
      n += 2 * kPiece;
    }
    return n;
  }
  // GB/s of threads that are at it already and end when somebody says so.
  template <typename F>
  double read_while(F goes_on) {
    const int64_t first = bytes_ / 3 / kChunk * kChunk, share = (bytes_ - first) / n_threads_ / kChunk * kChunk;
    std::atomic<int64_t> n{0};
    std::atomic<int> n_ready{0};
    std::atomic<bool> starts{false}, stops{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads_; ++i)
      threads.emplace_back([&, i] {
        ++n_ready;
        while (!starts) {
        }
        uint64_t sum = 0;
        for (int64_t at = 0; !stops; at = (at + kChunk) % share) {
          sum += read(host_ + first + i * share + at);
          if (!stops) n += kChunk;
        }
        sum_ += sum;
      });
    while (n_ready < n_threads_) {
    }
    begin_ = Clock::now();
    starts = true;
    while (goes_on()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    stops = true;
    const double rate = static_cast<double>(n) / us_since(begin_) * 1e-3;
    for (std::thread& thread : threads) thread.join();
    return rate;
  }
  // Four rows of lines at a time, each far ahead of its use.
  static uint64_t read(const std::byte* data) {
    constexpr int64_t kAhead = 4096, kLine = 64, kRow = kChunk / 4;
    uint64_t sums[8] = {};
    for (int64_t at = 0; at < kRow; at += kLine)
      for (int64_t r = 0; r < 4; ++r) {
        const auto* words = reinterpret_cast<const uint64_t*>(data + r * kRow + at);
        __builtin_prefetch(data + r * kRow + at + kAhead);
        for (int j = 0; j < 8; ++j) sums[j] += words[j];
      }
    uint64_t sum = 0;
    for (const uint64_t one : sums) sum += one;
    return sum;
  }

  int64_t bytes_;
  int n_threads_;
  std::byte *host_ = nullptr, *device_ = nullptr;
  cudaStream_t stream_;
  Clock::time_point begin_;
  std::atomic<uint64_t> sum_{0};
};

// ---- routes --------------------------------------------------------------------------------------------------------------

// Values of a piece are larger than those of others, so that keys that are left out or count twice show.
int exponent_of(int64_t piece) { return static_cast<int>(piece % 5); }

// Over the cache's keys and the call's own, in double precision: [kQHeads, kDim].
std::vector<double> exact(const Call& call, int64_t length, uint64_t seed) {
  const int64_t n = HybridCache::kPiece, n_pieces = length / n;
  const std::vector<__nv_bfloat16> k = random_rows(n * kKvHeads * kDim, seed),
                                   v = random_rows(n * kKvHeads * kDim, seed + 1);
  double scale = 0.0;
  for (int64_t p = 0; p < n_pieces; ++p) scale += std::exp2(exponent_of(p));
  std::vector<double> o(static_cast<size_t>(kQHeads * kDim), 0.0);
  for (int64_t h = 0; h < kQHeads; ++h) {
    const int64_t kv = h / (kQHeads / kKvHeads);
    double sum = 0.0;
    double* const out = o.data() + h * kDim;
    const auto add = [&](const __nv_bfloat16* key, const __nv_bfloat16* value, double times, double weighed) {
      double logit = 0.0;
      for (int64_t d = 0; d < kDim; ++d)
        logit += double{__bfloat162float(call.q[static_cast<size_t>(h * kDim + d)])} * __bfloat162float(key[d]);
      const double weight = std::exp(logit / std::sqrt(double{kDim}));
      sum += weight * times;
      for (int64_t d = 0; d < kDim; ++d) out[d] += weight * weighed * __bfloat162float(value[d]);
    };
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = (t * kKvHeads + kv) * kDim;
      add(k.data() + row, v.data() + row, static_cast<double>(n_pieces), scale);
    }
    add(call.k.data() + kv * kDim, call.v.data() + kv * kDim, 1.0, 1.0);
    for (int64_t d = 0; d < kDim; ++d) out[d] /= sum;
  }
  return o;
}

void check(const Call& call, const std::vector<double>& wanted, const RouteCase& one) {
  constexpr double kMost = 4e-3;  // outputs are bf16
  const std::vector<__nv_bfloat16> o = call.device_output();
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < o.size(); ++i) {
    error += std::pow(__bfloat162float(o[i]) - wanted[i], 2);
    size += wanted[i] * wanted[i];
  }
  if (std::sqrt(error / size) < kMost) return;
  std::printf("route %s %g: relative distance %.2e from double precision\n", one.route, one.fraction,
              std::sqrt(error / size));
  std::exit(1);
}

struct Measured {
  double ms = 0.0, slowest_ms = 0.0, in_a_row_ms = 0.0;
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
};

Measured time_route(const HybridCache& cache, const Call& call, const std::vector<double>& wanted, const RouteCase& one,
                    int n_rounds) {
  HybridSession session(cache, options_of(one));
  const auto go_back = [&] { TANDEM(tandem_sequence_truncate, cache.cache, cache.sequences[0], cache.length); };
  std::vector<double> times, in_a_row;
  for (int round = -1; round < n_rounds; ++round) {  // the first fills windows, pins and measures
    for (int32_t l = 0; l < cache.n_layers; ++l) {
      must(cudaMemset(call.device[3], 0xff, call.o.size() * 2));
      must(cudaDeviceSynchronize());
      const auto begin = Clock::now();
      session.attend(l, call.device_view, true, true);
      session.wait();
      if (round >= 0) times.push_back(us_since(begin));
      if (round < 1) check(call, wanted, one);
    }
    go_back();
  }
  for (int round = 0; round < n_rounds; ++round) {
    const auto begin = Clock::now();
    session.attend_layers(call.device_view, true, true);
    session.wait();
    in_a_row.push_back(us_since(begin) / cache.n_layers);
    check(call, wanted, one);
    go_back();
  }
  return {median(times) * 1e-3, at_share(times, 0.9) * 1e-3, median(in_a_row) * 1e-3, session.stats()};
}

void measure(tandem_engine* engine, Limits& limits, int64_t length, int64_t least_bytes,
             const std::vector<double>& fractions) {
  const int64_t layer_bytes = length * kTokenBytes;
  const auto n_layers = static_cast<int32_t>(std::min<int64_t>(64, (least_bytes + layer_bytes - 1) / layer_bytes));
  const HybridCache cache(engine, n_layers, length, 1, {kSeed, TANDEM_ROPE_CALLER, exponent_of});
  const Call call(1, 7);
  const std::vector<double> wanted = exact(call, length, kSeed);
  std::vector<double> cpus, buses, sums, shares;
  const auto probe = [&] {
    double cpu = 0.0, bus = 0.0;
    cpus.push_back(limits.cpu());
    buses.push_back(limits.bus());
    limits.both(&cpu, &bus);
    sums.push_back(cpu + bus);
    shares.push_back(bus);
  };
  probe();
  double best = INFINITY, best_fixed = INFINITY;
  const auto report = [&](const RouteCase& one, int n_rounds) {
    const Measured got = time_route(cache, call, wanted, one, n_rounds);
    const tandem_session_stats& s = got.stats;
    const double moved = static_cast<double>(s.stream_part_tokens),
                 all = static_cast<double>(s.stream_part_tokens + s.host_part_tokens);
    std::printf(
        "  %-11s %5.2f  %7.3f ms (0.9: %7.3f)  in a row %7.3f  streamed %.3f  predicted/taken %.2f\n", one.route,
        one.fraction, got.ms, got.slowest_ms, got.in_a_row_ms, all > 0 ? moved / all : 0.0,
        s.planned_part_ns > 0 ? static_cast<double>(s.predicted_part_ns) / static_cast<double>(s.planned_part_ns) : 0.0);
    std::fflush(stdout);
    return got.ms;
  };
  std::printf("%lld keys, %d layers%s\n", static_cast<long long>(length), n_layers,
              n_layers * layer_bytes < least_bytes ? " (warm)" : "");
  for (const char* route : {"host", "stream"}) best = std::min(best, report({route, -1.0}, kRounds));
  for (const double fraction : fractions) best_fixed = std::min(best_fixed, report({"host+stream", fraction}, kRounds));
  probe();
  const double automatic = report({"auto", -1.0}, 2 * kRounds);
  probe();
  const double bytes = static_cast<double>((length - kWindow) * kTokenBytes), bound = bytes / median(sums) * 1e-6;
  std::printf(
      "  CPU %.0f  bus %.1f  together %.0f (bus %.1f) GB/s: %.3f ms  auto / together %.2f  auto / best single %.2f  auto / "
      "best fixed %.2f\n",
      median(cpus), median(buses), median(sums), median(shares), bound, bound / automatic, automatic / best,
      automatic / best_fixed);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "plan_bench MODULE [threads [lengths [MiB [fractions]]]]\n");
    return 2;
  }
  const int n_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  tandem_engine* engine = make_engine(argv[1], n_threads);
  std::vector<double> fractions;
  for (const std::string& word : words_of(argc > 5 ? argv[5] : "0.15,0.2,0.25,0.3,0.35,0.4,0.5"))
    fractions.push_back(std::atof(word.c_str()));
  const int64_t least_bytes = (argc > 4 ? std::atoll(argv[4]) : 2400) << 20;
  {
    Limits limits(int64_t{3} << 29, n_threads > 0 ? n_threads : static_cast<int>(std::thread::hardware_concurrency()));
    for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "65536,131072,262144,524288"))
      measure(engine, limits, length, least_bytes, fractions);
  }
  tandem_engine_release(engine);
  return 0;
}
