// SPDX-License-Identifier: MIT
// Appends over long host contexts, by route: milliseconds a call, through the C ABI.
//
//   stream_bench MODULE [threads [lengths [queries [buffers]]]]     lists with commas; buffers in MiB
//
// One layer of 32 query heads and 8 KV heads of 128 dims in bf16, window 4,096. Beside the routes: the bus, as copies of 64
// MiB from pinned memory; and the plain way with CUDA calls, which copies K and V of the whole layer, from pinned memory
// too, and then attends them in one call of the module's kernels: its lower bound is the copy. A share of the bus is that of
// the bytes outside the window. Before a length is timed, the route's outputs are compared with those of the CPU; the
// appended tokens are truncated away after each call, outside the time.
#include "device/open_device.h"
#include "hybrid_case.h"
#include "lib/device.h"

using namespace tandem::test;

namespace {

constexpr int64_t kWindow = 4096;
constexpr int kRounds = 7;

// Registered memory of the bench's own.
struct Pinned {
  std::byte* host = nullptr;
  explicit Pinned(int64_t bytes) {
    must(cudaMallocHost(&host, static_cast<size_t>(bytes)));
    std::memset(host, 0, static_cast<size_t>(bytes));
  }
  Pinned(const Pinned&) = delete;
  ~Pinned() { cudaFreeHost(host); }
};

// Bytes per microsecond.
double time_bus(const Pinned& from, int64_t bytes, std::byte* to) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
    const auto begin = Clock::now();
    for (int64_t at = 0; at < bytes; at += kPiece)
      must(cudaMemcpyAsync(to + at, from.host + at, static_cast<size_t>(std::min(kPiece, bytes - at)),
                           cudaMemcpyHostToDevice));
    must(cudaDeviceSynchronize());
    times.push_back(us_since(begin));
  }
  return static_cast<double>(bytes) / median(times);
}

// The whole layer to the device, then attention over it: what is simple.
class Rival {
 public:
  Rival(const OpenDevice& device, int64_t length, int64_t n_queries) : device_(device), from_(length * kTokenBytes) {
    layer_.n_q_heads = kQHeads;
    layer_.n_kv_heads = kKvHeads;
    layer_.group_size = kQHeads / kKvHeads;
    layer_.k_head_dim = layer_.v_head_dim = kDim;
    layer_.k_type = layer_.v_type = TANDEM_BF16;
    layer_.sm_scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    must(cudaMalloc(&keys_, static_cast<size_t>(length * kTokenBytes)));
    must(cudaMalloc(&rows_, static_cast<size_t>(n_queries * kQHeads * kDim * 2)));
    must(cudaMemset(rows_, 0, static_cast<size_t>(n_queries * kQHeads * kDim * 2)));
    must(cudaMalloc(&o_, static_cast<size_t>(n_queries * kQHeads * kDim * 2)));
    tandem::DeviceSequence sequence;
    sequence.end = length;
    sequence.q_len = static_cast<int32_t>(n_queries);
    sequence.table_len = 1;
    const int64_t table = 0;
    must(cudaMalloc(&described_, sizeof sequence + sizeof table));
    must(cudaMemcpy(described_, &sequence, sizeof sequence, cudaMemcpyHostToDevice));
    must(cudaMemcpy(described_ + sizeof sequence, &table, sizeof table, cudaMemcpyHostToDevice));
    call_.layer = &layer_;
    call_.pages.page_len = static_cast<int32_t>(length);
    for (const int plane : {0, 2}) {
      call_.pages.planes[plane] = keys_ + (plane == 0 ? 0 : length * kTokenBytes / 2);
      call_.pages.head_stride[plane] = length * kDim * 2;
    }
    call_.sequences.sequences = reinterpret_cast<tandem::DeviceSequence*>(described_);
    call_.sequences.page_tables = reinterpret_cast<int64_t*>(described_ + sizeof sequence);
    call_.sequences.n_sequences = 1;
    call_.sequences.max_q_len = sequence.q_len;
    call_.sequences.max_keys = length;
    call_.q = {rows_, TANDEM_BF16, 0, kQHeads * kDim, kDim};
    call_.o = {o_, TANDEM_BF16, 0, kQHeads * kDim, kDim};
    const int64_t bytes = device.table->workspace_bytes(device.self, &call_);
    must(cudaMalloc(&call_.workspace, static_cast<size_t>(bytes)));
    must(cudaMemset(call_.workspace, 0, static_cast<size_t>(bytes)));
  }
  Rival(const Rival&) = delete;
  ~Rival() {
    for (void* data : {static_cast<void*>(keys_), rows_, o_, static_cast<void*>(described_), call_.workspace})
      cudaFree(data);
  }
  const Pinned& from() const { return from_; }
  std::byte* keys() const { return keys_; }
  double time(int64_t bytes) {
    std::vector<double> times;
    for (int i = 0; i < kRounds; ++i) {
      const auto begin = Clock::now();
      must(cudaMemcpyAsync(keys_, from_.host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
      tandem::DeviceError error;
      device_.must(device_.table->attend(device_.self, &call_, nullptr, &error), error);
      must(cudaDeviceSynchronize());
      times.push_back(us_since(begin));
    }
    return median(times);
  }

 private:
  const OpenDevice& device_;
  Pinned from_;
  tandem::Layer layer_;
  std::byte *keys_ = nullptr, *described_ = nullptr;
  void *rows_ = nullptr, *o_ = nullptr;
  tandem::DeviceAttend call_;
};

struct Measured {
  double us = 0.0, streamed_bytes = 0.0, stream_us = 0.0;
  std::vector<__nv_bfloat16> o;
};

// Appends of the same rows, each taken back.
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
  for (int i = 0; i < kRounds + 2; ++i) {  // the first ones fill the window, pin and measure
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

double distance(const std::vector<__nv_bfloat16>& a, const std::vector<__nv_bfloat16>& b) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(__bfloat162float(a[i]) - __bfloat162float(b[i]), 2);
    size += std::pow(__bfloat162float(b[i]), 2);
  }
  return std::sqrt(error / size);
}

void measure(const OpenDevice& device, const HybridCache& cache, int64_t n_queries, const std::vector<int64_t>& buffers) {
  constexpr double kMostDistance = 0.01;
  const Call call(n_queries, 7);
  const Measured host = time_route(cache, call, n_queries, "host", 0);
  const int64_t host_bytes = (cache.length - kWindow) * kTokenBytes;
  double bus = 0.0, rival_us = 0.0;
  {
    Rival rival(device, cache.length, n_queries);
    bus = time_bus(rival.from(), cache.length * kTokenBytes, rival.keys());
    rival_us = rival.time(cache.length * kTokenBytes);
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
