// SPDX-License-Identifier: MIT
#include "cuda_transformer.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <unordered_map>

#include "cublas_products.h"
#include "cuda_weights.h"
#include "layer_kernels.h"

namespace generate {
namespace {

constexpr int64_t kTokensAt = offsetof(ChunkInput, tokens);

int64_t used_bytes() {
  size_t n_free = 0, n_total = 0;
  must(cudaMemGetInfo(&n_free, &n_total), "cudaMemGetInfo");
  return static_cast<int64_t>(n_total - n_free);
}

// A stream. wait() spins for 1 ms, then sleeps, so that longer steps leave the core to Tandem's workers.
class Stream {
 public:
  Stream() {
    must(cudaStreamCreateWithFlags(&get, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    cudaEventDestroy(done_);
    cudaStreamDestroy(get);
  }
  void wait() const {
    must(cudaEventRecord(done_, get), "cudaEventRecord");
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
    while (cudaEventQuery(done_) == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    }
    must(cudaEventSynchronize(done_), "what was under way");
  }

  cudaStream_t get = nullptr;

 private:
  cudaEvent_t done_ = nullptr;
};

struct EndGraph {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, EndGraph>;

// T: float or __nv_bfloat16.
template <class T>
class CudaTransformer : public Transformer {
 public:
  CudaTransformer(const ModelConfig& config, const CudaOptions& options);
  Failure load();
  Failure forward(const Chunk& chunk) override;
  const float* logits(int64_t first, int64_t n) override;
  int32_t most_likely(int64_t row) override { return has_answer_ ? *answer_token_.get() : Transformer::most_likely(row); }
  void meet(const tandem_session* session) override { steps_.erase(session); }
  DeviceUse device_use() override;
  int32_t hidden_type() const override { return kIsF32 ? TANDEM_F16 : TANDEM_BF16; }
  Failure projection(int64_t layer_idx, LayerProjection* projection) override;

 private:
  static constexpr bool kIsF32 = std::is_same_v<T, float>;
  static constexpr cudaDataType_t kType = kIsF32 ? CUDA_R_32F : CUDA_R_16BF;
  static constexpr int32_t kTandemType = kIsF32 ? TANDEM_F32 : TANDEM_BF16;
  // Decode steps of one session.
  struct Steps {
    bool is_warm = false;  // a step has run kernel by kernel, so all code is on the device
    Graph graph;
  };

  Failure decode(const Chunk& chunk);
  Failure capture(const Chunk& chunk, Graph* graph);
  Failure run_step(const Chunk& chunk);
  Failure run_layers(const Chunk& chunk);
  Failure attend(const Chunk& chunk, int64_t layer_idx);
  void multiply(const T* weight, const T* x, T* y, int64_t n_rows, int64_t n_in, int64_t n_out);
  void multiply(const T* weight, const T* x, float* y, bool adds, int64_t n_rows, int64_t n_in, int64_t n_out);
  void run_head(int64_t first, int64_t n, float* logits);
  tandem_tensor view(T* data, int64_t n_tokens, int64_t n_heads, int64_t row_stride) const;

  CudaOptions options_;
  int64_t before_bytes_;
  Stream stream_;
  CublasProducts products_;
  CudaWeights<T> weights_;
  CudaArray<float> inv_freq_;

  // Activations of the current chunk, one row per token. Graphs hold their addresses.
  CudaArray<char> input_;
  CudaArray<char, Side::kPinned> input_pinned_;
  CudaArray<float> x_;
  CudaArray<T> normed_, qkv_, o_, gate_up_, ffn_;
  // Results of a decode step: logits and the most likely token.
  CudaArray<float> step_logits_;
  CudaArray<int32_t> step_token_;
  CudaArray<float, Side::kPinned> answer_;
  CudaArray<int32_t, Side::kPinned> answer_token_;
  bool has_answer_ = false;  // the last chunk was a decode step
  // Logits requested by logits().
  CudaArray<float> some_logits_;
  std::vector<float> logits_;

  std::unordered_map<const tandem_session*, Steps> steps_;
  DeviceUse use_;
};

template <class T>
CudaTransformer<T>::CudaTransformer(const ModelConfig& config, const CudaOptions& options)
    : Transformer(config), options_(options), before_bytes_(used_bytes()), products_(stream_.get) {}

template <class T>
Failure CudaTransformer<T>::load() {
  GENERATE_TRY(weights_.load(config_, options_, stream_.get));
  const std::vector<float> inv_freq = inverse_frequencies(config_);
  inv_freq_ = CudaArray<float>(static_cast<int64_t>(inv_freq.size()));
  must(cudaMemcpy(inv_freq_.get(), inv_freq.data(), inv_freq_.bytes(), cudaMemcpyHostToDevice), "frequencies");
  const int64_t n = options_.chunk_tokens;
  input_ = CudaArray<char>(kTokensAt + 4 * n);
  input_pinned_ = CudaArray<char, Side::kPinned>(kTokensAt + 4 * n);
  x_ = CudaArray<float>(n * config_.hidden_size);
  normed_ = CudaArray<T>(n * config_.hidden_size);
  qkv_ = CudaArray<T>(n * config_.qkv_size());
  o_ = CudaArray<T>(n * config_.q_size());
  gate_up_ = CudaArray<T>(n * 2 * config_.ffn_size);
  ffn_ = CudaArray<T>(n * config_.ffn_size);
  step_logits_ = CudaArray<float>(config_.vocab_size);
  step_token_ = CudaArray<int32_t>(1);
  answer_ = CudaArray<float, Side::kPinned>(config_.vocab_size);
  answer_token_ = CudaArray<int32_t, Side::kPinned>(1);
  use_.is_used = true;
  use_.loaded_bytes = used_bytes() - before_bytes_;
  return {};
}

template <class T>
DeviceUse CudaTransformer<T>::device_use() {
  use_.runtime_bytes = weights_.bytes() + products_.bytes() + inv_freq_.bytes() + input_.bytes() + x_.bytes() +
                       normed_.bytes() + qkv_.bytes() + o_.bytes() + gate_up_.bytes() + ffn_.bytes() + step_logits_.bytes() +
                       step_token_.bytes() + some_logits_.bytes();
  if (Failure failure = weights_.get_stats(&use_.weights)) throw std::runtime_error(failure.message);
  use_.runtime_bytes += use_.weights.device_bytes;
  use_.now_bytes = used_bytes() - before_bytes_;
  return use_;
}

// Attends a chunk of several tokens call by call, inside a step that rolls them back on failure. A single token is a planned
// step, unless by_calls is set.
template <class T>
Failure CudaTransformer<T>::forward(const Chunk& chunk) {
  const int64_t n_tokens = static_cast<int64_t>(chunk.tokens.size());
  if (n_tokens > options_.chunk_tokens)
    return {"a chunk of " + std::to_string(n_tokens) + " tokens, room is for " + std::to_string(options_.chunk_tokens)};
  has_answer_ = n_tokens == 1 && chunk.flags == 0;
  auto* input = reinterpret_cast<ChunkInput*>(input_pinned_.get());
  input->position = chunk.position;
  std::copy(chunk.tokens.begin(), chunk.tokens.end(), input->tokens);
  void* const stream = has_answer_ && !options_.by_calls ? stream_.get : nullptr;
  GENERATE_TANDEM(tandem_step_begin(chunk.session, &chunk.sequence, &n_tokens, 1, stream, &error));
  Failure failure;
  try {
    failure = has_answer_ ? decode(chunk) : run_layers(chunk);
  } catch (const std::exception& exception) {
    failure.message = exception.what();
  }
  if (failure) {  // the step is incomplete, so closing it rolls back the sequence
    has_answer_ = false;
    tandem_step_end(chunk.session, stream, nullptr);
    return failure;
  }
  GENERATE_TANDEM(tandem_step_end(chunk.session, stream, &error));
  stream_.wait();
  return {};
}

template <class T>
Failure CudaTransformer<T>::decode(const Chunk& chunk) {
  Steps& steps = steps_[chunk.session];
  if (options_.eager || options_.by_calls || options_.engine != nullptr || !steps.is_warm) {
    GENERATE_TRY(run_step(chunk));
    steps.is_warm = true;
    ++use_.n_launched;
    return {};
  }
  if (!steps.graph) GENERATE_TRY(capture(chunk, &steps.graph));
  must(cudaGraphLaunch(steps.graph.get(), stream_.get), "cudaGraphLaunch");
  ++use_.n_replayed;
  return {};
}

template <class T>
Failure CudaTransformer<T>::capture(const Chunk& chunk, Graph* graph) {
  must(cudaStreamBeginCapture(stream_.get, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  Failure failure;
  try {
    failure = run_step(chunk);
  } catch (const std::exception& exception) {
    failure.message = exception.what();
  }
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaError_t result = cudaStreamEndCapture(stream_.get, &captured);  // after a failure too: ends the capture
  if (!failure && result == cudaSuccess) result = cudaGraphInstantiate(&made, captured, 0);
  if (captured != nullptr) cudaGraphDestroy(captured);
  GENERATE_TRY(failure);
  must(result, "capture of a step");
  graph->reset(made);
  return {};
}

// Runs the layers and the head. Logits and the most likely token go to host memory.
template <class T>
Failure CudaTransformer<T>::run_step(const Chunk& chunk) {
  GENERATE_TRY(run_layers(chunk));
  run_head(0, 1, step_logits_.get());
  find_most_likely(step_token_.get(), step_logits_.get(), config_.vocab_size, stream_.get);
  must(cudaMemcpyAsync(answer_.get(), step_logits_.get(), answer_.bytes(), cudaMemcpyDeviceToHost, stream_.get), "logits");
  must(cudaMemcpyAsync(answer_token_.get(), step_token_.get(), 4, cudaMemcpyDeviceToHost, stream_.get), "a token");
  return {};
}

template <class T>
Failure CudaTransformer<T>::run_layers(const Chunk& chunk) {
  const int64_t n = static_cast<int64_t>(chunk.tokens.size());
  const int64_t hidden = config_.hidden_size, ffn = config_.ffn_size, q_size = config_.q_size();
  const auto eps = static_cast<float>(config_.rms_eps);
  const auto* input = reinterpret_cast<const ChunkInput*>(input_.get());
  cudaStream_t const stream = stream_.get;
  const Rotation rotation{input, inv_freq_.get(), config_.n_q_heads + config_.n_kv_heads, config_.head_dim,
                          config_.qkv_size()};
  must(cudaMemcpyAsync(input_.get(), input_pinned_.get(), kTokensAt + 4 * n, cudaMemcpyHostToDevice, stream), "tokens");
  embed(x_.get(), weights_.embedding.get(), input, n, hidden, stream);
  for (int64_t layer_idx = 0; layer_idx < config_.n_layers; ++layer_idx) {
    const typename CudaWeights<T>::Layer& layer = weights_.layers[layer_idx];
    normalize(normed_.get(), x_.get(), layer.attention_norm.get(), eps, n, hidden, stream);
    typename CudaWeights<T>::Pair matrices;
    GENERATE_TRY(weights_.use(layer_idx, CudaWeights<T>::kAttention, stream, &matrices));
    multiply(matrices.first, normed_.get(), qkv_.get(), n, hidden, config_.qkv_size());
    if (layer.qkv_bias.size() > 0) add_bias(qkv_.get(), layer.qkv_bias.get(), n, config_.qkv_size(), stream);
    if (!options_.library_rope) rotate(qkv_.get(), rotation, n, stream);
    GENERATE_TRY(attend(chunk, layer_idx));
    multiply(matrices.second, o_.get(), x_.get(), true, n, q_size, hidden);
    GENERATE_TRY(weights_.done(layer_idx, CudaWeights<T>::kAttention, stream));
    normalize(normed_.get(), x_.get(), layer.ffn_norm.get(), eps, n, hidden, stream);
    GENERATE_TRY(weights_.use(layer_idx, CudaWeights<T>::kMlp, stream, &matrices));
    multiply(matrices.first, normed_.get(), gate_up_.get(), n, hidden, 2 * ffn);
    gate(ffn_.get(), gate_up_.get(), n, ffn, stream);
    multiply(matrices.second, ffn_.get(), x_.get(), true, n, ffn, hidden);
    GENERATE_TRY(weights_.done(layer_idx, CudaWeights<T>::kMlp, stream));
  }
  must(cudaGetLastError(), "the layers");
  return {};
}

template <class T>
tandem_tensor CudaTransformer<T>::view(T* data, int64_t n_tokens, int64_t n_heads, int64_t row_stride) const {
  tandem_tensor tensor = heads_view(data, kTandemType, n_tokens, n_heads, config_.head_dim, row_stride);
  tensor.device_type = TANDEM_DEVICE_CUDA;
  return tensor;
}

template <class T>
Failure CudaTransformer<T>::attend(const Chunk& chunk, int64_t layer_idx) {
  const int64_t n_tokens = static_cast<int64_t>(chunk.tokens.size()), qkv_size = config_.qkv_size();
  T *const q_rows = qkv_.get(), *const k_rows = q_rows + config_.q_size(), *const v_rows = k_rows + config_.kv_size();
  HeadsOfChunk heads;
  heads.q = view(q_rows, n_tokens, config_.n_q_heads, qkv_size);
  heads.k = view(k_rows, n_tokens, config_.n_kv_heads, qkv_size);
  heads.v = view(v_rows, n_tokens, config_.n_kv_heads, qkv_size);
  heads.o = view(o_.get(), n_tokens, config_.n_q_heads, config_.q_size());
  heads.x = rows_view(normed_.get(), kTandemType, n_tokens, config_.hidden_size);
  heads.x.device_type = TANDEM_DEVICE_CUDA;
  heads.has_x = options_.keeps_hidden;
  return attend_chunk(chunk, layer_idx, heads, stream_.get);
}

template <class T>
Failure CudaTransformer<T>::projection(int64_t layer_idx, LayerProjection* projection) {
  GENERATE_TRY(weights_.get_projection(config_, layer_idx, stream_.get, projection));
  if (!options_.library_rope) projection->options.k_rope = TANDEM_ROPE_HALVES;
  return {};
}

template <class T>
void CudaTransformer<T>::multiply(const T* weight, const T* x, T* y, int64_t n_rows, int64_t n_in, int64_t n_out) {
  products_.apply({weight, x, y, n_rows, n_in, n_out, kType, kType, false});
}

template <class T>
void CudaTransformer<T>::multiply(const T* weight, const T* x, float* y, bool adds, int64_t n_rows, int64_t n_in,
                                  int64_t n_out) {
  products_.apply({weight, x, y, n_rows, n_in, n_out, kType, CUDA_R_32F, adds});
}

template <class T>
void CudaTransformer<T>::run_head(int64_t first, int64_t n, float* logits) {
  const int64_t hidden = config_.hidden_size;
  const CudaArray<T>& head = config_.tied_embeddings ? weights_.embedding : weights_.head;
  normalize(normed_.get(), x_.get() + first * hidden, weights_.final_norm.get(), static_cast<float>(config_.rms_eps), n,
            hidden, stream_.get);
  multiply(head.get(), normed_.get(), logits, false, n, hidden, config_.vocab_size);
  must(cudaGetLastError(), "logits");
}

template <class T>
const float* CudaTransformer<T>::logits(int64_t first, int64_t n) {
  if (has_answer_) return answer_.get();
  const int64_t n_logits = n * config_.vocab_size;
  if (some_logits_.size() < n_logits) some_logits_ = CudaArray<float>(n_logits);
  logits_.resize(std::max<size_t>(logits_.size(), n_logits));
  run_head(first, n, some_logits_.get());
  must(cudaMemcpyAsync(logits_.data(), some_logits_.get(), 4 * n_logits, cudaMemcpyDeviceToHost, stream_.get), "logits");
  stream_.wait();
  return logits_.data();
}

template <class T>
Failure make(const ModelConfig& config, const CudaOptions& options, std::unique_ptr<Transformer>* transformer) {
  auto made = std::make_unique<CudaTransformer<T>>(config, options);
  GENERATE_TRY(made->load());
  *transformer = std::move(made);
  return {};
}

}  // namespace

Failure check_cuda_built() { return {}; }

Failure make_cuda_transformer(const ModelConfig& config, const CudaOptions& options,
                              std::unique_ptr<Transformer>* transformer) {
  must(cudaFree(nullptr), "the first call");  // creates the device's context, which must not be measured
  return options.dtype == TANDEM_F32 ? make<float>(config, options, transformer)
                                     : make<__nv_bfloat16>(config, options, transformer);
}

}  // namespace generate
