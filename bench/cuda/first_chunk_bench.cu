// SPDX-License-Identifier: MIT
// First chunks of a prompt through tandem_attend(): microseconds per layer, for eight layers in a row.
//
//   first_chunk_bench MODULE [threads [tokens [window]]]     tokens: a list with commas; window 0: 1,024 tokens
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16. A line has medians for one length, over rounds that take
// turns:
//
//   kernel    the attention kernel alone, over the same shape
//   bus       the new rows of a layer from the device to pinned memory, as many bytes in copies of 512 KiB
//   layer     of eight calls in a row, until the caller's stream is done
//   stored    as layer, but until the host's store has all rows too
//   spaced    a call on the caller's stream, with matrix products of about 2 ms before each call
//
// Uncounted first rounds pin the store. The last output of a round is compared with the first round's. The store's digest is
// compared with that of the same rows appended in calls of 512 tokens.
#include <mma.h>

#include <memory>

#include "cuda/hybrid_case.h"
#include "cuda/window_case.h"
#include "lib/model/dtype.h"

using namespace tandem::test;

namespace {

constexpr int32_t kLayers = 8;
constexpr int kRounds = 9, kUncounted = 2;
constexpr double kProductsUs = 2000.0;

// Part of a matrix product: a warp has a tile of 64 x 16 and reads its operands from memory.
__global__ void multiply(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int n, int n_times) {
  using namespace nvcuda::wmma;
  fragment<accumulator, 16, 16, 16, float> sum[4];
  for (auto& tile : sum) fill_fragment(tile, 0.0f);
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32), row = warp * 64 % n;
  for (int i = 0; i < n_times; ++i) {
    const int k = i * 16 % n;
    fragment<matrix_b, 16, 16, 16, __nv_bfloat16, col_major> right;
    load_matrix_sync(right, b + k, static_cast<unsigned>(n));
    for (int t = 0; t < 4; ++t) {
      fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major> left;
      load_matrix_sync(left, a + int64_t{(row + 16 * t) % n} * n + k, static_cast<unsigned>(n));
      mma_sync(sum[t], left, right, sum[t]);
    }
  }
  for (int t = 0; t < 4; ++t) store_matrix_sync(c + int64_t{warp} * 1024 + 256 * t, sum[t], 16, mem_row_major);
}

class Products {
 public:
  explicit Products(cudaStream_t stream) : stream_(stream) {
    must(cudaMalloc(&a_, kN * kN * 2));
    must(cudaMalloc(&c_, kBlocks * kWarps * 4096));
    must(cudaMemset(a_, 0, kN * kN * 2));
    for (int i = 0; i < 4; ++i) n_times_ = std::max(1, static_cast<int>(n_times_ * kProductsUs / time()));
    us = time();
  }
  Products(const Products&) = delete;
  ~Products() {
    cudaFree(a_);
    cudaFree(c_);
  }
  void run() const { multiply<<<kBlocks, 32 * kWarps, 0, stream_>>>(a_, a_, c_, kN, n_times_); }
  double us = 0.0;

 private:
  static constexpr int kN = 4096, kWarps = 8, kBlocks = 132 * 4;
  double time() const {
    run();
    must(cudaStreamSynchronize(stream_));
    const auto begin = Clock::now();
    for (int i = 0; i < 8; ++i) run();
    must(cudaStreamSynchronize(stream_));
    return us_since(begin) / 8;
  }
  cudaStream_t stream_;
  __nv_bfloat16* a_;
  float* c_;
  int n_times_ = 256;
};

// Times the attention kernel alone, eight calls in a row.
class Kernel {
 public:
  Kernel(const OpenDevice& device, int64_t n)
      : window_(device, options_of(n)), graph_([this](cudaStream_t stream) {
          for (int i = 0; i < kLayers; ++i) window_.attend(0, stream);
        }) {}
  double us() const {
    const auto begin = Clock::now();
    graph_.replay();
    return us_since(begin) / kLayers;
  }

 private:
  static WindowOptions options_of(int64_t n) {
    WindowOptions options;
    options.layer.n_q_heads = kQHeads;
    options.layer.n_kv_heads = kKvHeads;
    options.layer.k_head_dim = options.layer.v_head_dim = kDim;
    options.layer.k_type = options.layer.v_type = TANDEM_BF16;
    options.q_type = options.o_type = TANDEM_BF16;
    options.sequences = {{0, n, static_cast<int>(n)}};
    options.n_distinct = 1000;
    return options;
  }
  WindowCase window_;
  Graph graph_;
};

double bus_us(int64_t n) {
  constexpr size_t kPiece = size_t{512} << 10;
  const size_t bytes = static_cast<size_t>(n * kTokenBytes);
  void *device = nullptr, *host = nullptr;
  cudaStream_t stream;
  must(cudaMalloc(&device, bytes));
  must(cudaMallocHost(&host, bytes));
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<double> times;
  for (int round = 0; round < 7; ++round) {
    const auto begin = Clock::now();
    for (int i = 0; i < 8; ++i)
      for (size_t at = 0; at < bytes; at += kPiece)
        must(cudaMemcpyAsync(static_cast<char*>(host) + at, static_cast<char*>(device) + at, std::min(kPiece, bytes - at),
                             cudaMemcpyDeviceToHost, stream));
    must(cudaStreamSynchronize(stream));
    times.push_back(us_since(begin) / 8);
  }
  must(cudaStreamDestroy(stream));
  must(cudaFreeHost(host));
  must(cudaFree(device));
  return median(times);
}

void begin_anew(const HybridSession& session) {
  TANDEM(tandem_sequence_truncate, session.on.cache, session.on.sequences[0], 0);
  must(cudaDeviceSynchronize());
}

struct Run {
  double layer_us, stored_us;
};
Run attend_in_a_row(HybridSession& session, const Call& chunk) {
  begin_anew(session);
  const auto begin = Clock::now();
  session.attend_layers(chunk.device_view, true, true);
  session.wait();
  const double layer_us = us_since(begin) / kLayers;
  must(cudaDeviceSynchronize());
  return {layer_us, us_since(begin) / kLayers};
}

double attend_spaced(HybridSession& session, const Call& chunk, const Products& products) {
  begin_anew(session);
  std::vector<cudaEvent_t> events(2 * kLayers);
  for (cudaEvent_t& event : events) must(cudaEventCreate(&event));
  for (int32_t l = 0; l < kLayers; ++l) {
    products.run();
    must(cudaEventRecord(events[2 * l], session.stream));
    session.attend(l, chunk.device_view, true, true);
    must(cudaEventRecord(events[2 * l + 1], session.stream));
  }
  must(cudaDeviceSynchronize());
  double us = 0.0;
  for (int32_t l = 0; l < kLayers; ++l) {
    float ms = 0.0f;
    must(cudaEventElapsedTime(&ms, events[2 * l], events[2 * l + 1]));
    us += 1e3 * static_cast<double>(ms) / kLayers;
  }
  for (const cudaEvent_t event : events) must(cudaEventDestroy(event));
  return us;
}

uint64_t digest_of(const HybridCache& cache) {
  uint64_t digest = 0;
  TANDEM(tandem_sequence_digest, &digest, cache.cache, cache.sequences[0]);
  return digest;
}

// Appends in calls of 512 tokens, which are not long chunks.
uint64_t digest_of_short_calls(tandem_engine* engine, const Call& chunk, int64_t n, const tandem_session_options& options) {
  const HybridCache cache(engine, kLayers, 0, 1);
  HybridSession session(cache, options);
  for (int64_t first = 0; first < n; first += 512) {
    const int64_t n_tokens = std::min<int64_t>(512, n - first);
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i) {
      const int32_t n_heads = i % 3 == 0 ? kQHeads : kKvHeads;
      views[i] = tensor_of(static_cast<__nv_bfloat16*>(chunk.device[i]) + first * n_heads * kDim, n_tokens, n_heads, true);
    }
    session.q_lens.assign(1, n_tokens);
    session.attend_layers(views, true, true);
  }
  session.wait();
  return digest_of(cache);
}

bool measure(tandem_engine* engine, const OpenDevice& device, int64_t n, const tandem_session_options& options) {
  const Call chunk(n, 5);
  const uint64_t wanted = digest_of_short_calls(engine, chunk, n, options);
  const std::vector<__nv_bfloat16> short_calls = chunk.device_output();
  const HybridCache cache(engine, kLayers, 0, 1);
  TANDEM(tandem_sequence_reserve, cache.cache, cache.sequences[0], n);
  HybridSession session(cache, options);
  session.q_lens.assign(1, n);
  const Products products(session.stream);
  const Kernel kernel(device, n);
  std::vector<double> alone, layer, stored, spaced;
  for (int round = 0; round < kRounds + kUncounted; ++round) {
    const double kernel_us = kernel.us(), spaced_us = attend_spaced(session, chunk, products);
    const Run run = attend_in_a_row(session, chunk);
    if (round < kUncounted) continue;
    alone.push_back(kernel_us);
    layer.push_back(run.layer_us);
    stored.push_back(run.stored_us);
    spaced.push_back(spaced_us);
  }
  const double bus = bus_us(n), limit = std::max(median(alone), bus);
  const bool is_right = digest_of(cache) == wanted && distance(chunk.device_output(), short_calls) < 0.01;
  std::printf(
      "{\"tokens\": %lld, \"window\": %lld, \"kernel_us\": %.0f, \"bus_us\": %.0f, \"layer_us\": %.0f, \"stored_us\": %.0f, "
      "\"spaced_us\": %.0f, \"layer_over_limit\": %.3f, \"spaced_over_kernel\": %.3f, \"is_right\": %s}\n",
      static_cast<long long>(n), static_cast<long long>(options.window_tokens), median(alone), bus, median(layer),
      median(stored), median(spaced), median(layer) / limit, median(spaced) / median(alone), is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "first_chunk_bench MODULE [threads [tokens [window]]]\n");
    return 2;
  }
  const OpenDevice device(argv[1]);
  std::printf("%s\n", device.info.name);
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  const int64_t window = argc > 4 ? std::atoll(argv[4]) : 65536;
  options.window_tokens = window == 0 ? 1024 : window;
  bool all_right = true;
  for (const int64_t n : numbers_of(argc > 3 ? argv[3] : "3333,8192"))
    all_right = measure(engine, device, n, options) && all_right;
  tandem_engine_release(engine);
  return all_right ? 0 : 1;
}
