// SPDX-License-Identifier: MIT
// Decode with the newest tokens on the device and the rest in host memory, through the C ABI: microseconds a call.
//
//   hybrid_bench MODULE [threads [lengths [batches]]]     lists with commas
//
// One layer shape of 32 query heads and 8 KV heads of 128 dims in bf16, window 4,096; one query a sequence. Layers are as
// many as it takes for K and V to be many times the cache of the last level, and calls go through them in turn. Beside each
// figure: the same with all layers replayed as a graph in planned steps; what the CPU's part took inside the calls, and how
// much longer the calls were; the same keys attended by the CPU alone (host tensors, window and all), and the calls against
// its share of keys outside the window. Before a length is timed, an output is compared with that of the CPU alone.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tandem/tandem.h"

namespace {

constexpr int32_t kQHeads = 32, kKvHeads = 8, kDim = 128;
constexpr int64_t kWindow = 4096, kTokenBytes = 2 * kKvHeads * kDim * 2;
constexpr int64_t kLeastBytes = int64_t{2500} << 20;
constexpr int kRounds = 9;

void must(cudaError_t result) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(result));
  std::exit(1);
}

#define TANDEM(function, ...)                                    \
  do {                                                           \
    tandem_error* error = nullptr;                               \
    if (function(__VA_ARGS__, &error) != TANDEM_OK) {            \
      std::fprintf(stderr, "%s\n", tandem_error_message(error)); \
      std::exit(1);                                              \
    }                                                            \
  } while (false)

using Clock = std::chrono::steady_clock;
double us_since(Clock::time_point begin) { return std::chrono::duration<double, std::micro>(Clock::now() - begin).count(); }
double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

std::vector<int64_t> numbers_of(const char* list) {
  std::vector<int64_t> numbers;
  std::stringstream stream(list);
  for (std::string word; std::getline(stream, word, ',');) numbers.push_back(std::atoll(word.c_str()));
  return numbers;
}

tandem_tensor tensor_of(void* data, int64_t n_tokens, int32_t n_heads, bool on_device) {
  const int64_t shape[] = {n_tokens, n_heads, kDim};
  tandem_tensor tensor;
  TANDEM(tandem_tensor_init, &tensor, TANDEM_BF16, data, 3, shape);
  tensor.device_type = on_device ? TANDEM_DEVICE_CUDA : TANDEM_DEVICE_HOST;
  return tensor;
}

std::vector<__nv_bfloat16> random_rows(int64_t n, uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<__nv_bfloat16> rows(static_cast<size_t>(n));
  for (auto& x : rows) x = __float2bfloat16(normal(bits));
  return rows;
}

// Queries, new rows and outputs of a call, on both sides.
struct Call {
  std::vector<__nv_bfloat16> q, k, v, o;
  void* device[4];
  tandem_tensor host_view[4], device_view[4];

  explicit Call(int64_t n) {
    q = random_rows(n * kQHeads * kDim, 1);
    k = random_rows(n * kKvHeads * kDim, 2);
    v = random_rows(n * kKvHeads * kDim, 3);
    o = q;
    std::vector<__nv_bfloat16>* all[] = {&q, &k, &v, &o};
    for (int i = 0; i < 4; ++i) {
      const int32_t n_heads = i % 3 == 0 ? kQHeads : kKvHeads;
      must(cudaMalloc(&device[i], all[i]->size() * 2));
      must(cudaMemcpy(device[i], all[i]->data(), all[i]->size() * 2, cudaMemcpyHostToDevice));
      host_view[i] = tensor_of(all[i]->data(), n, n_heads, false);
      device_view[i] = tensor_of(device[i], n, n_heads, true);
    }
  }
  ~Call() {
    for (void* data : device) cudaFree(data);
  }
};

struct Bench {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int32_t n_layers;
  int64_t length, batch;
  std::vector<int64_t> sequences, q_lens;
  cudaStream_t stream;
  cudaGraphExec_t replay = nullptr;

  Bench(tandem_engine* on, int64_t kv_len, int64_t n_sequences) : engine(on), length(kv_len), batch(n_sequences) {
    n_layers = static_cast<int32_t>(
        std::max<int64_t>(2, (kLeastBytes + length * batch * kTokenBytes - 1) / (length * batch * kTokenBytes)));
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = kQHeads;
    layer.n_kv_heads = kKvHeads;
    layer.k_head_dim = kDim;
    const std::vector<tandem_layer_options> layers(static_cast<size_t>(n_layers), layer);
    TANDEM(tandem_model_create, &model, layers.data(), n_layers);
    TANDEM(tandem_cache_create, &cache, engine, model, nullptr);
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.window_tokens = kWindow;
    TANDEM(tandem_session_create, &session, cache, &options);
    must(cudaStreamCreate(&stream));
    q_lens.assign(static_cast<size_t>(batch), 1);
    constexpr int64_t kPiece = 4096;
    std::vector<__nv_bfloat16> k = random_rows(kPiece * kKvHeads * kDim, 4), v = random_rows(kPiece * kKvHeads * kDim, 5);
    for (int64_t i = 0; i < batch; ++i) {
      int64_t id = 0;
      TANDEM(tandem_sequence_create, &id, cache);
      sequences.push_back(id);
      TANDEM(tandem_sequence_reserve, cache, id, length + 1000);
      for (int32_t l = 0; l < n_layers; ++l)
        for (int64_t t = 0; t < length; t += kPiece) {
          const int64_t n = std::min(kPiece, length - t);
          const tandem_tensor k_view = tensor_of(k.data(), n, kKvHeads, false),
                              v_view = tensor_of(v.data(), n, kKvHeads, false);
          TANDEM(tandem_sequence_append, cache, id, l, &k_view, &v_view, nullptr);
        }
    }
  }
  ~Bench() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
    if (replay != nullptr) cudaGraphExecDestroy(replay);
    cudaStreamDestroy(stream);
  }
  // All layers in a step; from the first one on as a replay.
  void step(const tandem_tensor* views) {
    TANDEM(tandem_step_begin, session, sequences.data(), q_lens.data(), static_cast<int32_t>(batch), stream);
    if (replay == nullptr) {
      cudaGraph_t graph;
      must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int32_t l = 0; l < n_layers; ++l) attend(l, views, true, true);
      must(cudaStreamEndCapture(stream, &graph));
      must(cudaGraphInstantiate(&replay, graph, 0));
      must(cudaGraphDestroy(graph));
    }
    must(cudaGraphLaunch(replay, stream));
    TANDEM(tandem_step_end, session, stream);
  }
  void attend(int32_t layer, const tandem_tensor* views, bool appends, bool on_device) {
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = layer;
    args.n_sequences = static_cast<int32_t>(batch);
    args.sequences = sequences.data();
    args.q_lens = q_lens.data();
    args.q = &views[0];
    args.k = appends ? &views[1] : nullptr;
    args.v = appends ? &views[2] : nullptr;
    args.o = &views[3];
    args.stream = on_device ? stream : nullptr;
    TANDEM(tandem_attend, session, &args);
  }
};

// The same query without new keys, on both: bf16 outputs, so a few roundings apart.
double check(Bench& bench, Call& call) {
  bench.attend(0, call.device_view, false, true);
  must(cudaStreamSynchronize(bench.stream));
  std::vector<__nv_bfloat16> o(call.o.size());
  must(cudaMemcpy(o.data(), call.device[3], o.size() * 2, cudaMemcpyDeviceToHost));
  bench.attend(0, call.host_view, false, false);
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < o.size(); ++i) {
    const double wanted = __bfloat162float(call.o[i]);
    error += std::pow(__bfloat162float(o[i]) - wanted, 2);
    size += wanted * wanted;
  }
  return std::sqrt(error / size);
}

void measure(tandem_engine* engine, int64_t length, int64_t batch) {
  Bench bench(engine, length, batch);
  Call call(batch);
  const double error = check(bench, call);
  const auto pass = [&](const tandem_tensor* views, bool on_device) {
    const auto begin = Clock::now();
    for (int32_t l = 0; l < bench.n_layers; ++l) bench.attend(l, views, true, on_device);
    if (on_device) must(cudaStreamSynchronize(bench.stream));
    return us_since(begin) / bench.n_layers;
  };
  pass(call.device_view, true);  // fills the windows
  const auto step = [&] {
    const auto begin = Clock::now();
    bench.step(call.device_view);
    must(cudaStreamSynchronize(bench.stream));
    return us_since(begin) / bench.n_layers;
  };
  step();
  std::vector<double> hybrid, alone, part, replayed;
  for (int i = 0; i < kRounds; ++i) {
    tandem_session_stats before = TANDEM_SESSION_STATS_INIT, after = TANDEM_SESSION_STATS_INIT;
    TANDEM(tandem_session_get_stats, &before, bench.session);
    hybrid.push_back(pass(call.device_view, true));
    TANDEM(tandem_session_get_stats, &after, bench.session);
    if (after.n_host_parts > before.n_host_parts)
      part.push_back(static_cast<double>(after.host_part_ns - before.host_part_ns) * 1e-3 /
                     static_cast<double>(after.n_host_parts - before.n_host_parts));
    replayed.push_back(step());
    alone.push_back(pass(call.host_view, false));
    pass(call.device_view, true);  // takes over what the CPU has appended
  }
  const double share = length > kWindow ? static_cast<double>(length - kWindow) / static_cast<double>(length) : 0.0;
  const double host = part.empty() ? 0.0 : median(part);
  std::printf(
      "%8lld keys x %-3lld %3d layers  hybrid %9.1f us  most %9.1f  replayed %9.1f  CPU part %9.1f  hybrid / part %.3f  CPU "
      "alone %9.1f"
      "  hybrid / its share %.3f  GB/s %.0f  error %.1e\n",
      static_cast<long long>(length), static_cast<long long>(batch), bench.n_layers, median(hybrid),
      *std::max_element(hybrid.begin(), hybrid.end()), median(replayed), host, host > 0 ? median(hybrid) / host : 0.0,
      median(alone), share > 0 ? median(hybrid) / (median(alone) * share) : 0.0,
      static_cast<double>((length - kWindow) * batch * kTokenBytes) / median(hybrid) * 1e-3, error);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "hybrid_bench MODULE [threads [lengths [batches]]]\n");
    return 2;
  }
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.backend = "cuda";
  options.backend_path = argv[1];
  options.n_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  tandem_engine* engine = nullptr;
  TANDEM(tandem_engine_create, &engine, &options);
  for (const int64_t batch : numbers_of(argc > 4 ? argv[4] : "1,8"))
    for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "4096,65536,131072")) measure(engine, length, batch);
  tandem_engine_release(engine);
  return 0;
}
