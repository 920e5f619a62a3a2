// SPDX-License-Identifier: MIT
// Caches of random keys, sessions on them with a window on the device, and calls on host and device tensors, for tests and
// benches of whole calls through the C ABI. Layers have 32 query heads and 8 KV heads of 128 dims in bf16, unless a shape
// says otherwise.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "graph_time.h"
#include "tandem/tandem.h"

namespace tandem::test {

inline constexpr int32_t kQHeads = 32, kKvHeads = 8, kDim = 128;
inline constexpr int64_t kTokenBytes = 2 * kKvHeads * kDim * 2;

struct HybridShape {
  int32_t n_q_heads = kQHeads, n_kv_heads = kKvHeads, dim = kDim;
  int64_t token_bytes() const { return int64_t{4} * n_kv_heads * dim; }  // bytes of a token's K and V
};

#define TANDEM(function, ...)                                    \
  do {                                                           \
    tandem_error* error = nullptr;                               \
    if (function(__VA_ARGS__, &error) != TANDEM_OK) {            \
      std::fprintf(stderr, "%s\n", tandem_error_message(error)); \
      std::exit(1);                                              \
    }                                                            \
  } while (false)

using Clock = std::chrono::steady_clock;
inline double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Returns the number with the given share of all numbers below it.
inline double at_share(std::vector<double> x, double share) {
  std::sort(x.begin(), x.end());
  return x[std::min(x.size() - 1, static_cast<size_t>(share * static_cast<double>(x.size())))];
}
inline double median(const std::vector<double>& x) { return at_share(x, 0.5); }

inline std::vector<int64_t> numbers_of(const char* list) {
  std::vector<int64_t> numbers;
  for (const std::string& word : words_of(list)) numbers.push_back(std::atoll(word.c_str()));
  return numbers;
}

inline tandem_engine* make_engine(const char* module, int32_t n_threads) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.backend = "cuda";
  options.backend_path = module;
  options.n_threads = n_threads;
  tandem_engine* engine = nullptr;
  TANDEM(tandem_engine_create, &engine, &options);
  return engine;
}

inline tandem_tensor tensor_of(void* data, int64_t n_tokens, int32_t n_heads, bool on_device, int32_t dim = kDim) {
  const int64_t shape[] = {n_tokens, n_heads, dim};
  tandem_tensor tensor;
  TANDEM(tandem_tensor_init, &tensor, TANDEM_BF16, data, 3, shape);
  tensor.device_type = on_device ? TANDEM_DEVICE_CUDA : TANDEM_DEVICE_HOST;
  return tensor;
}

inline std::vector<__nv_bfloat16> random_rows(int64_t n, uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<__nv_bfloat16> rows(static_cast<size_t>(n));
  for (auto& x : rows) x = __float2bfloat16(normal(bits));
  return rows;
}

// Queries, new rows and outputs of a call, in host and in device memory.
struct Call {
  std::vector<__nv_bfloat16> q, k, v, o;
  void* device[4];
  tandem_tensor host_view[4], device_view[4];

  explicit Call(int64_t n, uint64_t seed = 1, const HybridShape& shape = {}) {
    q = random_rows(n * shape.n_q_heads * shape.dim, seed);
    k = random_rows(n * shape.n_kv_heads * shape.dim, seed + 1);
    v = random_rows(n * shape.n_kv_heads * shape.dim, seed + 2);
    o.assign(q.size(), __float2bfloat16(NAN));  // outputs are NaN in both memories until a call writes them
    std::vector<__nv_bfloat16>* all[] = {&q, &k, &v, &o};
    for (int i = 0; i < 4; ++i) {
      const int32_t n_heads = i % 3 == 0 ? shape.n_q_heads : shape.n_kv_heads;
      must(cudaMalloc(&device[i], all[i]->size() * 2));
      must(cudaMemcpy(device[i], all[i]->data(), all[i]->size() * 2, cudaMemcpyHostToDevice));
      host_view[i] = tensor_of(all[i]->data(), n, n_heads, false, shape.dim);
      device_view[i] = tensor_of(device[i], n, n_heads, true, shape.dim);
    }
  }
  Call(const Call&) = delete;
  ~Call() {
    for (void* data : device) cudaFree(data);
  }
  std::vector<__nv_bfloat16> device_output() const {
    std::vector<__nv_bfloat16> rows(o.size());
    must(cudaMemcpy(rows.data(), device[3], rows.size() * 2, cudaMemcpyDeviceToHost));
    return rows;
  }
};

struct HybridKeys {
  uint64_t seed = 4;
  int32_t rope = TANDEM_ROPE_CALLER;
  int (*v_exponent)(int64_t piece) = nullptr;                    // V of a piece is multiplied by 2 to this power
  void (*change_k)(std::vector<__nv_bfloat16>* rows) = nullptr;  // changes the rows of K; all pieces have the same rows
  HybridShape shape = {};
  std::vector<int64_t> lengths = {};  // tokens of each sequence; empty: kv_len each. kv_len must be the longest
};

// Sequences in layers of one shape. Every sequence and layer gets the same keys, and each piece of kPiece tokens repeats
// them.
class HybridCache {
 public:
  static constexpr int64_t kPiece = 4096;
  tandem_engine* engine;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  int32_t n_layers;
  int64_t length, batch;
  std::vector<int64_t> sequences;

  HybridCache(tandem_engine* on, int32_t layers, int64_t kv_len, int64_t n_sequences, const HybridKeys& keys = {})
      : engine(on), n_layers(layers), length(kv_len), batch(n_sequences) {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    const int32_t n_heads = keys.shape.n_kv_heads, dim = keys.shape.dim;
    layer.n_q_heads = keys.shape.n_q_heads;
    layer.n_kv_heads = n_heads;
    layer.k_head_dim = dim;
    layer.rope = keys.rope;
    const std::vector<tandem_layer_options> shapes(static_cast<size_t>(n_layers), layer);
    TANDEM(tandem_model_create, &model, shapes.data(), n_layers);
    TANDEM(tandem_cache_create, &cache, engine, model, nullptr);
    const int64_t n_made = std::min(kPiece, length) * n_heads * dim;
    std::vector<__nv_bfloat16> k = random_rows(n_made, keys.seed), v = random_rows(n_made, keys.seed + 1), scaled = v;
    if (keys.change_k != nullptr) keys.change_k(&k);
    for (int64_t i = 0; i < batch; ++i) {
      int64_t id = 0;
      const int64_t n_tokens = keys.lengths.empty() ? length : keys.lengths[static_cast<size_t>(i)];
      TANDEM(tandem_sequence_create, &id, cache);
      sequences.push_back(id);
      TANDEM(tandem_sequence_reserve, cache, id, n_tokens + 1000);
      for (int32_t l = 0; l < n_layers; ++l)
        for (int64_t t = 0; t < n_tokens; t += kPiece) {
          const int64_t n = std::min(kPiece, n_tokens - t);
          const float factor =
              keys.v_exponent != nullptr ? std::exp2(static_cast<float>(keys.v_exponent(t / kPiece))) : 1.0f;
          for (size_t x = 0; x < v.size() && keys.v_exponent != nullptr; ++x)
            scaled[x] = __float2bfloat16(factor * __bfloat162float(v[x]));
          const tandem_tensor k_view = tensor_of(k.data(), n, n_heads, false, dim),
                              v_view = tensor_of(scaled.data(), n, n_heads, false, dim);
          TANDEM(tandem_sequence_append, cache, id, l, &k_view, &v_view, nullptr);
        }
    }
  }
  // Makes forks of from's first sequence, cut to kv_len tokens. They are in the same cache and share its pages. `from` must
  // outlive them.
  HybridCache(const HybridCache& from, int64_t kv_len, int64_t n_sequences)
      : engine(from.engine),
        cache(from.cache),
        n_layers(from.n_layers),
        length(kv_len),
        batch(n_sequences),
        is_forked_(true) {
    for (int64_t i = 0; i < batch; ++i) {
      int64_t id = 0;
      TANDEM(tandem_sequence_fork, &id, cache, from.sequences[0]);
      TANDEM(tandem_sequence_truncate, cache, id, length);
      sequences.push_back(id);
    }
  }
  HybridCache(const HybridCache&) = delete;
  ~HybridCache() {
    if (is_forked_) {
      for (const int64_t id : sequences) TANDEM(tandem_sequence_drop, cache, id);
      return;
    }
    tandem_cache_release(cache);
    tandem_model_release(model);
  }

 private:
  bool is_forked_ = false;
};

// A session and its stream. Each sequence has one query in a call, unless the test sets q_lens.
struct HybridSession {
  const HybridCache& on;
  tandem_session* session = nullptr;
  std::vector<int64_t> q_lens;
  cudaStream_t stream;
  cudaGraphExec_t replay = nullptr;

  HybridSession(const HybridCache& cache, const tandem_session_options& options) : on(cache) {
    TANDEM(tandem_session_create, &session, on.cache, &options);
    must(cudaStreamCreate(&stream));
    q_lens.assign(on.sequences.size(), 1);
  }
  HybridSession(const HybridSession&) = delete;
  ~HybridSession() {
    tandem_session_release(session);
    if (replay != nullptr) cudaGraphExecDestroy(replay);
    cudaStreamDestroy(stream);
  }
  tandem_session_stats stats() const {
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    TANDEM(tandem_session_get_stats, &stats, session);
    return stats;
  }
  void attend(int32_t layer, const tandem_tensor* views, bool appends, bool on_device) {
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = layer;
    args.n_sequences = static_cast<int32_t>(q_lens.size());
    args.sequences = on.sequences.data();
    args.q_lens = q_lens.data();
    args.q = &views[0];
    args.k = appends ? &views[1] : nullptr;
    args.v = appends ? &views[2] : nullptr;
    args.o = &views[3];
    args.stream = on_device ? stream : nullptr;
    TANDEM(tandem_attend, session, &args);
  }
  void attend_layers(const tandem_tensor* views, bool appends, bool on_device) {
    for (int32_t l = 0; l < on.n_layers; ++l) attend(l, views, appends, on_device);
  }
  // Attends all layers in a planned step. With replays, a graph that the first step captures is launched instead of the
  // calls.
  void step(const tandem_tensor* views, bool replays) {
    TANDEM(tandem_step_begin, session, on.sequences.data(), q_lens.data(), static_cast<int32_t>(q_lens.size()), stream);
    if (!replays) attend_layers(views, true, true);
    if (replays && replay == nullptr) {
      cudaGraph_t graph;
      must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      attend_layers(views, true, true);
      must(cudaStreamEndCapture(stream, &graph));
      must(cudaGraphInstantiate(&replay, graph, 0));
      must(cudaGraphDestroy(graph));
    }
    if (replays) must(cudaGraphLaunch(replay, stream));
    TANDEM(tandem_step_end, session, stream);
  }
  void wait() const { must(cudaStreamSynchronize(stream)); }
};

// Returns the relative distance of the rows from the wanted ones, or NaN if any number is NaN.
inline double distance(const std::vector<__nv_bfloat16>& got, const std::vector<__nv_bfloat16>& all_wanted) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double wanted = __bfloat162float(all_wanted[i]);
    error += std::pow(__bfloat162float(got[i]) - wanted, 2);
    size += wanted * wanted;
  }
  return std::sqrt(error / size);
}

// Returns the distance of the device call's output from the host call's, or NaN if either call has left numbers unwritten.
inline double distance_of(const Call& call) { return distance(call.device_output(), call.o); }

}  // namespace tandem::test
