// SPDX-License-Identifier: MIT
// Decode over keys in host memory, by route: milliseconds per layer, through the C ABI.
//
//   plan_bench MODULE [threads [lengths [bytes [fractions]]]]     lists with commas; bytes of keys in all, in MiB
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16; all keys but a window of 512 tokens are on the host. Calls
// rotate over several layers that together have at least `bytes`, and routes take turns, so that no CPU cache has the data
// of the next call. A length whose layers have less is marked warm. Each call appends a token and ends before the next one
// begins. The tokens are truncated away after each round, untimed. In the same run and on the same memory the bench also
// measures the CPU reading alone, the bus copying alone, and both at once. The sum of both is the bound for any route that
// uses both.
//
// First, each route's output is compared with attention in double precision over the same keys.
#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kWindow = 512;
constexpr int kRounds = 12;
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

// ---- limits: memory of the bench's own, read and copied as calls would ----

class Limits {
 public:
  // The bus uses the first third, which is enough for it. The CPU uses the rest.
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

  // Return GB/s. both() measures them concurrently.
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

  // Copies for about this long.
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
  // Returns GB/s of threads that already run, until goes_on() returns false.
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
  // Reads the four quarters of a chunk side by side, one cache line of each in turn, and prefetches kAhead bytes ahead.
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

// Pieces have values of different size, so that keys that are left out or counted twice show.
int exponent_of(int64_t piece) { return static_cast<int>(piece % 5); }

// Attends the cache's keys and the call's own in double precision: [kQHeads, kDim].
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

// Runs a route in turns with the others, so that all routes see the same speed of a shared machine.
class Runner {
 public:
  Runner(const HybridCache& cache, const RouteCase& one) : one_(one), session_(cache, options_of(one)) {}
  double ms() const { return median(times_) * 1e-3; }

  // Runs all layers, each after the previous one has ended; then again in a row.
  void run(const Call& call, const std::vector<double>& wanted, bool counts) {
    for (int32_t l = 0; l < session_.on.n_layers; ++l) {
      must(cudaMemset(call.device[3], 0xff, call.o.size() * 2));
      must(cudaDeviceSynchronize());
      const tandem_session_stats before = session_.stats();
      const auto begin = Clock::now();
      session_.attend(l, call.device_view, true, true);
      session_.wait();
      if (counts) times_.push_back(us_since(begin));
      if (counts) shares_.push_back(streamed_since(before));
      check(call, wanted, one_);
    }
    go_back();
    const auto begin = Clock::now();
    session_.attend_layers(call.device_view, true, true);
    session_.wait();
    if (counts) in_a_row_.push_back(us_since(begin) / session_.on.n_layers);
    check(call, wanted, one_);
    go_back();
  }
  void print() const {
    const tandem_session_stats s = session_.stats();
    std::printf(
        "  %-11s %5.2f  %7.3f ms (0.9: %7.3f)  in a row %7.3f  streamed %.3f (0.1: %.3f, 0.9: %.3f)  predicted/taken %.2f\n",
        one_.route, one_.fraction, ms(), at_share(times_, 0.9) * 1e-3, median(in_a_row_) * 1e-3, median(shares_),
        at_share(shares_, 0.1), at_share(shares_, 0.9),
        s.planned_part_ns > 0 ? static_cast<double>(s.predicted_part_ns) / static_cast<double>(s.planned_part_ns) : 0.0);
  }

 private:
  double streamed_since(const tandem_session_stats& before) const {
    const tandem_session_stats now = session_.stats();
    const auto moved = static_cast<double>(now.stream_part_tokens - before.stream_part_tokens),
               left = static_cast<double>(now.host_part_tokens - before.host_part_tokens);
    return moved + left > 0.0 ? moved / (moved + left) : 0.0;
  }
  void go_back() {
    const HybridCache& cache = session_.on;
    TANDEM(tandem_sequence_truncate, cache.cache, cache.sequences[0], cache.length);
  }

  RouteCase one_;
  HybridSession session_;
  std::vector<double> times_, in_a_row_, shares_;
};

void measure(tandem_engine* engine, Limits& limits, int64_t length, int64_t least_bytes,
             const std::vector<double>& fractions) {
  const int64_t layer_bytes = length * kTokenBytes;
  const auto n_layers = static_cast<int32_t>(std::min<int64_t>(64, (least_bytes + layer_bytes - 1) / layer_bytes));
  const HybridCache cache(engine, n_layers, length, 1, {kSeed, TANDEM_ROPE_CALLER, exponent_of});
  const Call call(1, 7);
  const std::vector<double> wanted = exact(call, length, kSeed);
  std::vector<std::unique_ptr<Runner>> runners;
  for (const char* route : {"host", "stream", "auto"})
    runners.push_back(std::make_unique<Runner>(cache, RouteCase{route, -1.0}));
  for (const double fraction : fractions)
    runners.push_back(std::make_unique<Runner>(cache, RouteCase{"host+stream", fraction}));
  std::vector<double> cpus, buses, sums, shares;
  std::vector<Runner*> order;
  for (const auto& runner : runners) order.push_back(runner.get());
  std::minstd_rand random(kSeed);
  for (int round = -1; round < kRounds; ++round) {  // the first round fills windows, pins and measures
    for (Runner* const runner : order) runner->run(call, wanted, round >= 0);
    // A processor that rests during one route is slower at the start of the next one.
    std::shuffle(order.begin(), order.end(), random);
    double cpu = 0.0, bus = 0.0;
    cpus.push_back(limits.cpu());
    buses.push_back(limits.bus());
    limits.both(&cpu, &bus);
    sums.push_back(cpu + bus);
    shares.push_back(bus);
  }
  std::printf("%lld keys, %d layers%s\n", static_cast<long long>(length), n_layers,
              n_layers * layer_bytes < least_bytes ? " (warm)" : "");
  for (const auto& runner : runners) runner->print();
  const double single = std::min(runners[0]->ms(), runners[1]->ms()), automatic = runners[2]->ms();
  double best_fixed = INFINITY;
  for (size_t i = 3; i < runners.size(); ++i) best_fixed = std::min(best_fixed, runners[i]->ms());
  const double bytes = static_cast<double>((length - kWindow) * kTokenBytes), bound = bytes / median(sums) * 1e-6;
  std::printf(
      "  CPU %.0f  bus %.1f  together %.0f (bus %.1f) GB/s: %.3f ms  together / auto %.2f  auto / best single %.2f  auto / "
      "best fixed %.2f\n",
      median(cpus), median(buses), median(sums), median(shares), bound, bound / automatic, automatic / single,
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
