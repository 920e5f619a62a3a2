// SPDX-License-Identifier: MIT
// Long appends whose queries name keys, most of them in host memory, through the C ABI: milliseconds per call. Compared with
// dense appends over as many keys as the union of the named units has. These are streamed, and every query attends them.
//
//   long_selection_bench MODULE [threads [keys [queries]]]
//
// A layer of 64 query heads and 4 KV heads of 128 dims in bf16. Each query names 16 blocks of 128 tokens for each KV head,
// its own block included. Indices are in device memory; window 4,096; route "stream". Cases: random blocks, whose union is
// all blocks, and clustered blocks, where 64 consecutive queries share 14 blocks and all queries draw from 256. Rounds of
// both sides take turns, each in its own layer, which grows by a call each time. Before that, the last query's answer is
// compared with the CPU's.
#include "listed_cache.cuh"

using namespace tandem::test;

namespace {

constexpr int64_t kUnit = 128, kIdx = 16;
constexpr int kRounds = 5, kUncounted = 2;

struct Side : ListedCache {
  tandem_session* session = nullptr;
  int64_t length;

  Side(tandem_engine* engine, int64_t n_keys, int64_t n_more) : ListedCache(engine, 1, n_keys, n_more), length(n_keys) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.window_tokens = 4096;
    options.route = "stream";
    TANDEM(tandem_session_create, &session, cache, &options);
  }
  ~Side() { tandem_session_release(session); }
  // Appends and returns milliseconds. selection: null, or that of the call.
  double append(const tandem_tensor* views, int64_t n, const tandem_selection* selection, cudaStream_t stream) {
    const auto begin = Clock::now();
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &n;
    args.q = &views[0];
    args.k = &views[1];
    args.v = &views[2];
    args.o = &views[3];
    args.stream = stream;
    args.selection = selection;
    TANDEM(tandem_attend, session, &args);
    must(cudaStreamSynchronize(stream));
    length += n;
    return us_since(begin) * 1e-3;
  }
  double streamed_mb() const {
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    TANDEM(tandem_session_get_stats, &stats, session);
    return static_cast<double>(stats.streamed_kv_bytes) * 1e-6;
  }
};

// Draws rows of indices for queries from token `first` on. *n_union gets the number of units in their union.
std::vector<int32_t> draw(int64_t first, int64_t n, bool is_clustered, uint64_t seed, int64_t* n_union) {
  std::mt19937_64 bits(seed);
  const auto below = [&](int64_t end) { return static_cast<int32_t>(bits() % static_cast<uint64_t>(end)); };
  const int64_t n_units = first / kUnit;
  std::vector<int32_t> pool(256);
  for (int32_t& unit : pool) unit = below(n_units);
  std::vector<int32_t> idx, common[kListHeads];
  std::vector<bool> named(static_cast<size_t>(n_units + n / kUnit + 2), false);
  for (int64_t t = 0; t < n; ++t)
    for (int32_t h = 0; h < kListHeads; ++h) {
      const auto one = [&] { return is_clustered ? pool[static_cast<size_t>(below(256))] : below(n_units); };
      if (t % 64 == 0) common[h].clear();
      std::vector<int32_t> row = is_clustered ? common[h] : std::vector<int32_t>();
      while (std::ssize(row) < kIdx - 1) {
        const int32_t unit = one();
        if (std::find(row.begin(), row.end(), unit) != row.end()) continue;
        row.push_back(unit);
        if (std::ssize(common[h]) < kIdx - 2) common[h].push_back(unit);
      }
      row.push_back(static_cast<int32_t>((first + t) / kUnit));
      std::sort(row.begin(), row.end());
      for (const int32_t unit : row) named[static_cast<size_t>(unit)] = true;
      idx.insert(idx.end(), row.begin(), row.end());
    }
  *n_union = std::count(named.begin(), named.end(), true);
  return idx;
}

struct Tensors {
  int64_t n;
  void* device[4];
  tandem_tensor views[4];
  explicit Tensors(int64_t n_tokens) : n(n_tokens) {
    for (int i = 0; i < 4; ++i) {
      const int32_t n_heads = i % 3 == 0 ? kQueryHeads : kListHeads;
      const std::vector<__nv_bfloat16> rows = random_rows(n * n_heads * kDim, static_cast<uint64_t>(i) + 11);
      must(cudaMalloc(&device[i], rows.size() * 2));
      must(cudaMemcpy(device[i], rows.data(), rows.size() * 2, cudaMemcpyHostToDevice));
      views[i] = tensor_of(device[i], n, n_heads, true);
    }
  }
  Tensors(const Tensors&) = delete;
  ~Tensors() {
    for (void* data : device) cudaFree(data);
  }
};

struct Indices {
  void* data = nullptr;
  tandem_tensor view;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  Indices(const std::vector<int32_t>& idx, int64_t n) {
    const int64_t shape[] = {n, kListHeads, kIdx};
    must(cudaMalloc(&data, idx.size() * 4));
    must(cudaMemcpy(data, idx.data(), idx.size() * 4, cudaMemcpyHostToDevice));
    TANDEM(tandem_tensor_init, &view, TANDEM_I32, data, 3, shape);
    view.device_type = TANDEM_DEVICE_CUDA;
    selection.idx = &view;
    selection.unit_tokens = kUnit;
  }
  Indices(const Indices&) = delete;
  ~Indices() { cudaFree(data); }
};

// Compares the last query's answer with the CPU's, for the same keys from host tensors.
double check(Side& side, const Tensors& call, const std::vector<int32_t>& idx) {
  std::vector<__nv_bfloat16> q(kQueryHeads * kDim), o(q.size()), wanted(q.size());
  const int64_t last = (call.n - 1) * kQueryHeads * kDim * 2, one = 1;
  must(cudaMemcpy(q.data(), static_cast<char*>(call.device[0]) + last, q.size() * 2, cudaMemcpyDeviceToHost));
  must(cudaMemcpy(o.data(), static_cast<char*>(call.device[3]) + last, o.size() * 2, cudaMemcpyDeviceToHost));
  std::vector<int32_t> row(idx.end() - kListHeads * kIdx, idx.end());
  const int64_t shape[] = {1, kListHeads, kIdx};
  tandem_tensor idx_view, q_view = tensor_of(q.data(), 1, kQueryHeads, false),
                          o_view = tensor_of(wanted.data(), 1, kQueryHeads, false);
  TANDEM(tandem_tensor_init, &idx_view, TANDEM_I32, row.data(), 3, shape);
  tandem_selection selection = TANDEM_SELECTION_INIT;
  selection.idx = &idx_view;
  selection.unit_tokens = kUnit;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &side.sequence;
  args.q_lens = &one;
  args.q = &q_view;
  args.o = &o_view;
  args.selection = &selection;
  TANDEM(tandem_attend, side.session, &args);
  return distance(o, wanted);
}

bool measure(tandem_engine* engine, int64_t n_keys, int64_t n, bool is_clustered) {
  const int64_t n_more = (kRounds + kUncounted + 1) * n;
  int64_t n_union = 0;
  draw(n_keys, n, is_clustered, 1, &n_union);
  Side named(engine, n_keys, n_more), dense(engine, std::min(n_union * kUnit, n_keys), n_more);
  const Tensors call(n);
  cudaStream_t stream;
  must(cudaStreamCreate(&stream));
  std::vector<double> with, without;
  double error = 0.0, sent_mb = 0.0;
  for (int round = 0; round < kRounds + kUncounted; ++round) {
    const std::vector<int32_t> idx = draw(named.length, n, is_clustered, static_cast<uint64_t>(round) + 1, &n_union);
    const Indices indices(idx, n);
    const double before = named.streamed_mb(), ms = named.append(call.views, n, &indices.selection, stream);
    sent_mb = named.streamed_mb() - before;
    if (round == 0) error = check(named, call, idx);
    const double dense_ms = dense.append(call.views, n, nullptr, stream);
    if (round < kUncounted) continue;
    with.push_back(ms);
    without.push_back(dense_ms);
  }
  must(cudaStreamDestroy(stream));
  const bool is_right = error < 0.01;
  std::printf(
      "{\"keys\": %lld, \"queries\": %lld, \"blocks\": \"%s\", \"union_tokens\": %lld, \"streamed_mb\": %.0f, \"named_ms\": "
      "%.2f, \"dense_ms\": %.2f, \"named_over_dense\": %.3f, \"error\": %.1e, \"is_right\": %s}\n",
      static_cast<long long>(n_keys), static_cast<long long>(n), is_clustered ? "clustered" : "random",
      static_cast<long long>(n_union * kUnit), sent_mb, median(with), median(without), median(with) / median(without), error,
      is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "long_selection_bench MODULE [threads [keys [queries]]]\n");
    return 2;
  }
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  const int64_t n_keys = argc > 3 ? std::atoll(argv[3]) : 131072, n = argc > 4 ? std::atoll(argv[4]) : 4096;
  const bool random_is_right = measure(engine, n_keys, n, false), clustered_is_right = measure(engine, n_keys, n, true);
  tandem_engine_release(engine);
  return random_is_right && clustered_is_right ? 0 : 1;
}
