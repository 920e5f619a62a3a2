// SPDX-License-Identifier: MIT
// Decode over keys that the caller names, most of them in host memory, through the C ABI: microseconds per layer.
//
//   selection_bench MODULE [threads [lengths [indices [unit]]]]     lists with commas
//
// The layer of a model with its own indexer: 64 query heads and 4 KV heads of 128 dims in bf16, 16 blocks of 128 tokens for
// each KV head and query, window 4,096. 16 layers run in turn, replayed as a graph in planned steps. The indices are in
// device memory and are drawn again for each layer and step, so that reads rotate over the whole cache. Compared with: the
// same graph with padded rows, which hands over the queries and attends nothing; the rate at which as many threads read
// memory; the same calls one by one; and the same keys from host tensors. Before that, an output is compared with the CPU's.
#include <thread>

#include "listed_cache.cuh"

using namespace tandem::test;

namespace {

constexpr int32_t kLayers = 16;
constexpr int64_t kRowBytes = int64_t{2} * kDim * 2;  // a token's K and V in a KV head
constexpr int kRounds = 41;

// Returns the bytes per second that n threads read from buffers that no cache holds.
double read_rate(int n) {
  constexpr size_t kBytes = size_t{256} << 20;
  std::vector<std::vector<uint64_t>> buffers(static_cast<size_t>(n));
  std::vector<uint64_t> sums(static_cast<size_t>(n));
  const auto on_all = [&](auto work) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < buffers.size(); ++i) threads.emplace_back([&, i] { work(i); });
    for (std::thread& thread : threads) thread.join();
  };
  on_all([&](size_t i) { buffers[i].assign(kBytes / 8, i); });
  std::vector<double> us;
  for (int round = 0; round < 5; ++round) {
    const auto begin = Clock::now();
    on_all([&](size_t i) {
      uint64_t parts[8] = {};
      for (size_t x = 0; x < buffers[i].size(); x += 8)
        for (size_t p = 0; p < 8; ++p) parts[p] ^= buffers[i][x + p];
      for (const uint64_t part : parts) sums[i] ^= part;
    });
    us.push_back(us_since(begin));
  }
  if (sums[0] == 1) std::printf("\n");  // uses the sums
  return static_cast<double>(n) * kBytes / median(us) * 1e6;
}

struct Selected : ListedCache {
  int64_t length, n_idx, unit;
  tandem_session* session = nullptr;
  cudaStream_t stream;
  cudaGraphExec_t replay = nullptr;
  std::vector<__nv_bfloat16> host[4];
  void* device[4];
  tandem_tensor host_view[4], device_view[4], host_idx[kLayers], device_idx[kLayers];
  std::vector<int32_t> idx[kLayers];
  tandem_selection on_host[kLayers], on_device[kLayers];
  std::mt19937_64 bits{7};

  Selected(tandem_engine* on, int64_t kv_len, int64_t indices, int64_t of_unit)
      : ListedCache(on, kLayers, kv_len, 1000), length(kv_len), n_idx(indices), unit(of_unit) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.window_tokens = 4096;
    options.selection_indices = n_idx;
    TANDEM(tandem_session_create, &session, cache, &options);
    must(cudaStreamCreate(&stream));
    for (int i = 0; i < 4; ++i) {
      const int32_t n_heads = i % 3 == 0 ? kQueryHeads : kListHeads;
      host[i] = random_rows(int64_t{n_heads} * kDim, static_cast<uint64_t>(i) + 1);
      must(cudaMalloc(&device[i], host[i].size() * 2));
      must(cudaMemcpy(device[i], host[i].data(), host[i].size() * 2, cudaMemcpyHostToDevice));
      host_view[i] = tensor_of(host[i].data(), 1, n_heads, false);
      device_view[i] = tensor_of(device[i], 1, n_heads, true);
    }
    for (int32_t l = 0; l < kLayers; ++l) {
      idx[l].assign(static_cast<size_t>(kListHeads * n_idx), -1);
      const int64_t shape[] = {1, kListHeads, n_idx};
      void* data = nullptr;
      must(cudaMalloc(&data, idx[l].size() * 4));
      TANDEM(tandem_tensor_init, &host_idx[l], TANDEM_I32, idx[l].data(), 3, shape);
      TANDEM(tandem_tensor_init, &device_idx[l], TANDEM_I32, data, 3, shape);
      device_idx[l].device_type = TANDEM_DEVICE_CUDA;
      on_host[l] = on_device[l] = TANDEM_SELECTION_INIT;
      on_host[l].idx = &host_idx[l];
      on_device[l].idx = &device_idx[l];
      on_host[l].unit_tokens = on_device[l].unit_tokens = unit;
    }
  }
  ~Selected() {
    tandem_session_release(session);
    if (replay != nullptr) cudaGraphExecDestroy(replay);
    for (void* data : device) cudaFree(data);
    for (const tandem_tensor& view : device_idx) cudaFree(view.data);
    cudaStreamDestroy(stream);
  }

  void draw(bool has_any) {
    const int64_t n_units = length / unit;
    for (int32_t l = 0; l < kLayers; ++l) {
      for (int64_t h = 0; h < kListHeads; ++h) {
        int32_t* const row = idx[l].data() + h * n_idx;
        std::fill_n(row, n_idx, -1);
        for (int64_t i = 0; has_any && i < n_idx;) {  // the first is the query's own block
          const auto drawn =
              static_cast<int32_t>(i == 0 ? n_units - 1 : static_cast<int64_t>(bits() % static_cast<uint64_t>(n_units)));
          if (std::find(row, row + i, drawn) == row + i) row[i++] = drawn;
        }
        if (has_any) std::sort(row, row + n_idx);
      }
      must(cudaMemcpy(device_idx[l].data, idx[l].data(), idx[l].size() * 4, cudaMemcpyHostToDevice));
    }
  }
  void attend(int32_t layer, bool is_on_device, bool appends) const {
    const int64_t one = 1;
    const tandem_tensor* views = is_on_device ? device_view : host_view;
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = layer;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &one;
    args.q = &views[0];
    args.k = appends ? &views[1] : nullptr;
    args.v = appends ? &views[2] : nullptr;
    args.o = &views[3];
    args.stream = is_on_device ? stream : nullptr;
    args.selection = is_on_device ? &on_device[layer] : &on_host[layer];
    TANDEM(tandem_attend, session, &args);
  }
  // Returns microseconds per layer.
  double calls(bool is_on_device) const {
    const auto begin = Clock::now();
    for (int32_t l = 0; l < kLayers; ++l) attend(l, is_on_device, true);
    must(cudaStreamSynchronize(stream));
    return us_since(begin) / kLayers;
  }
  double step() {
    const auto begin = Clock::now();
    const int64_t one = 1;
    TANDEM(tandem_step_begin, session, &sequence, &one, 1, stream);
    if (replay == nullptr) {
      cudaGraph_t graph;
      must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int32_t l = 0; l < kLayers; ++l) attend(l, true, true);
      must(cudaStreamEndCapture(stream, &graph));
      must(cudaGraphInstantiate(&replay, graph, 0));
      must(cudaGraphDestroy(graph));
    }
    must(cudaGraphLaunch(replay, stream));
    TANDEM(tandem_step_end, session, stream);
    must(cudaStreamSynchronize(stream));
    return us_since(begin) / kLayers;
  }
  // Returns the relative distance of the two answers to the same query.
  double check() {
    draw(true);
    attend(3, true, false);
    must(cudaStreamSynchronize(stream));
    attend(3, false, false);
    std::vector<__nv_bfloat16> o(host[3].size());
    must(cudaMemcpy(o.data(), device[3], o.size() * 2, cudaMemcpyDeviceToHost));
    return distance(o, host[3]);
  }
};

void measure(tandem_engine* engine, int64_t length, int64_t n_idx, int64_t unit, double rate) {
  Selected selected(engine, length, n_idx, unit);
  const double error = selected.check();
  selected.calls(true);  // fills the windows
  selected.step();
  std::vector<double> named, bare, eager, host;
  for (int i = 0; i < kRounds; ++i) {
    selected.draw(true);
    named.push_back(selected.step());
    selected.draw(false);
    bare.push_back(selected.step());
    if (i % 4 != 0) continue;
    selected.draw(true);
    eager.push_back(selected.calls(true));
    host.push_back(selected.calls(false));
    selected.calls(true);  // takes over the rows that the CPU has appended
  }
  const double bytes = static_cast<double>(kListHeads * n_idx * unit * kRowBytes), read_us = bytes / rate * 1e6;
  std::printf(
      "%8lld keys, %lld x %lld for each of %d KV heads: graph %7.1f us a layer, hand-over alone %6.1f, "
      "reading %.2f MB at %.0f GB/s %6.1f: (graph - hand-over) / reading %.2f  calls %7.1f  host tensors %7.1f  "
      "error %.1e\n",
      static_cast<long long>(length), static_cast<long long>(n_idx), static_cast<long long>(unit), kListHeads, median(named),
      median(bare), bytes * 1e-6, rate * 1e-9, read_us, (median(named) - median(bare)) / read_us, median(eager),
      median(host), error);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "selection_bench MODULE [threads [lengths [indices [unit]]]]\n");
    return 2;
  }
  const int n_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  const double rate = read_rate(n_threads > 0 ? n_threads : static_cast<int>(std::thread::hardware_concurrency()));
  tandem_engine* engine = make_engine(argv[1], n_threads);
  for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "65536,1048576"))
    measure(engine, length, argc > 4 ? std::atoll(argv[4]) : 16, argc > 5 ? std::atoll(argv[5]) : 128, rate);
  tandem_engine_release(engine);
  return 0;
}
