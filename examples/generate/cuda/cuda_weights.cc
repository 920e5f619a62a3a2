// SPDX-License-Identifier: MIT
#include "cuda_weights.h"

#include <cuda_fp16.h>

#include <cstring>

#include "layer_kernels.h"

namespace generate {
namespace {

constexpr float kDeviation = 0.02f;  // of random weights, as at the start of training of these models

// Fills device arrays with tensors of the files, one after another, or with random numbers.
struct Loader {
  const CudaOptions& options;
  cudaStream_t stream;
  std::vector<float> values = {};
  CudaArray<float> uploaded = {};
  uint64_t n_random = 0;

  template <class T>
  Failure matrix(const std::string& name, int64_t n_out, int64_t n_in, T* to) {
    return load(name, {n_out, n_in}, to);
  }
  Failure norm(const std::string& name, int64_t n, CudaArray<float>* to) {
    *to = CudaArray<float>(n);
    if (options.weights != nullptr) return load(name, {n}, to->get());
    values.assign(n, 1.0f);
    upload(to->get());
    return {};
  }
  template <class T>
  Failure load(const std::string& name, const std::vector<int64_t>& shape, T* to) {
    if (options.weights == nullptr) {
      const int64_t n = shape[0] * shape[1];
      fill_random(to, n, (options.seed << 32) + (n_random++ << 16), kDeviation, stream);
      must(cudaGetLastError(), "random weights");
      return {};
    }
    GENERATE_TRY(options.weights->read_f32(name, shape, &values));
    if constexpr (std::is_same_v<T, float>) {
      upload(to);
    } else {
      const int64_t n = static_cast<int64_t>(values.size());
      if (uploaded.size() < n) uploaded = CudaArray<float>(n);
      upload(uploaded.get());
      store(to, uploaded.get(), n, stream);
      must(cudaGetLastError(), "weights");
    }
    return {};
  }
  void upload(float* to) {
    must(cudaMemcpyAsync(to, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice, stream), "weights");
    must(cudaStreamSynchronize(stream), "weights");  // the next tensor overwrites the values
  }
};

template <class T>
Failure load_layer(const ModelConfig& config, int64_t layer_idx, Loader* loader, typename CudaWeights<T>::Layer* layer) {
  const std::string prefix = "model.layers." + std::to_string(layer_idx) + ".";
  const int64_t hidden = config.hidden_size, ffn = config.ffn_size;
  const int64_t q_size = config.q_size(), kv_size = config.kv_size();
  const WeightFiles* files = loader->options.weights;
  const bool has_bias = files != nullptr && files->has(prefix + "self_attn.q_proj.bias");
  layer->qkv = CudaArray<T>(config.qkv_size() * hidden);
  if (has_bias) layer->qkv_bias = CudaArray<float>(config.qkv_size());
  int64_t first = 0;
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
    const int64_t n_out = name[0] == 'q' ? q_size : kv_size;
    const std::string tensor = prefix + "self_attn." + name;
    GENERATE_TRY(loader->matrix(tensor + ".weight", n_out, hidden, layer->qkv.get() + first * hidden));
    if (has_bias) GENERATE_TRY(loader->load(tensor + ".bias", {n_out}, layer->qkv_bias.get() + first));
    first += n_out;
  }
  layer->out = CudaArray<T>(hidden * q_size);
  layer->gate_up = CudaArray<T>(2 * ffn * hidden);
  layer->down = CudaArray<T>(hidden * ffn);
  GENERATE_TRY(loader->matrix(prefix + "self_attn.o_proj.weight", hidden, q_size, layer->out.get()));
  GENERATE_TRY(loader->matrix(prefix + "mlp.gate_proj.weight", ffn, hidden, layer->gate_up.get()));
  GENERATE_TRY(loader->matrix(prefix + "mlp.up_proj.weight", ffn, hidden, layer->gate_up.get() + ffn * hidden));
  GENERATE_TRY(loader->matrix(prefix + "mlp.down_proj.weight", hidden, ffn, layer->down.get()));
  GENERATE_TRY(loader->norm(prefix + "input_layernorm.weight", hidden, &layer->attention_norm));
  return loader->norm(prefix + "post_attention_layernorm.weight", hidden, &layer->ffn_norm);
}

// Moves the first and second matrix of a block from the device to host memory.
template <class T>
std::vector<T> move_to_host(CudaArray<T>* first, CudaArray<T>* second, cudaStream_t stream) {
  std::vector<T> block(static_cast<size_t>(first->size() + second->size()));
  T* to = block.data();
  for (CudaArray<T>* matrix : {first, second}) {
    must(cudaMemcpyAsync(to, matrix->get(), matrix->bytes(), cudaMemcpyDeviceToHost, stream), "weights");
    to += matrix->size();
  }
  must(cudaStreamSynchronize(stream), "weights");
  *first = CudaArray<T>();
  *second = CudaArray<T>();
  return block;
}

}  // namespace

template <class T>
Failure CudaWeights<T>::load(const ModelConfig& config, const CudaOptions& options, cudaStream_t stream) {
  Loader loader{options, stream};
  const int64_t n = config.vocab_size * config.hidden_size;
  embedding = CudaArray<T>(n);
  GENERATE_TRY(loader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size, embedding.get()));
  GENERATE_TRY(loader.norm("model.norm.weight", config.hidden_size, &final_norm));
  layers.resize(config.n_layers);
  std::vector<std::vector<T>> blocks;
  for (int64_t layer_idx = 0; layer_idx < config.n_layers; ++layer_idx) {
    Layer& layer = layers[layer_idx];
    GENERATE_TRY(load_layer<T>(config, layer_idx, &loader, &layer));
    if (options.engine == nullptr) continue;
    second_at_.insert(second_at_.end(), {layer.qkv.size(), layer.gate_up.size()});
    blocks.push_back(move_to_host(&layer.qkv, &layer.out, stream));
    blocks.push_back(move_to_host(&layer.gate_up, &layer.down, stream));
  }
  if (!config.tied_embeddings) {
    head = CudaArray<T>(n);
    GENERATE_TRY(loader.matrix("lm_head.weight", config.vocab_size, config.hidden_size, head.get()));
  }
  must(cudaStreamSynchronize(stream), "weights");
  if (options.engine != nullptr) GENERATE_TRY(offload(blocks, options));
  return options.weights == nullptr ? Failure{} : options.weights->refuse_unread();
}

template <class T>
Failure CudaWeights<T>::offload(const std::vector<std::vector<T>>& blocks, const CudaOptions& options) {
  std::vector<const void*> data;
  std::vector<int64_t> n_bytes;
  double total = 0;
  for (const std::vector<T>& block : blocks) {
    data.push_back(block.data());
    n_bytes.push_back(static_cast<int64_t>(block.size() * sizeof(T)));
    total += static_cast<double>(n_bytes.back());
  }
  tandem_weights_options weights_options = TANDEM_WEIGHTS_OPTIONS_INIT;
  weights_options.resident_bytes = static_cast<int64_t>(options.resident_share * total);
  tandem_weights* made = nullptr;
  GENERATE_TANDEM(tandem_weights_create(&made, options.engine, data.data(), n_bytes.data(),
                                        static_cast<int32_t>(data.size()), &weights_options, &error));
  offloaded_.reset(made);
  return {};
}

template <class T>
Failure CudaWeights<T>::use(int64_t layer_idx, Part part, cudaStream_t stream, Pair* pair) {
  if (!offloaded_) {
    const Layer& layer = layers[layer_idx];
    *pair = part == kAttention ? Pair{layer.qkv.get(), layer.out.get()} : Pair{layer.gate_up.get(), layer.down.get()};
    return {};
  }
  const int32_t block = block_of(layer_idx, part);
  void* data = nullptr;
  GENERATE_TANDEM(tandem_weights_use(&data, offloaded_.get(), block, stream, &error));
  *pair = {static_cast<const T*>(data), static_cast<const T*>(data) + second_at_[block]};
  return {};
}

template <class T>
Failure CudaWeights<T>::done(int64_t layer_idx, Part part, cudaStream_t stream) {
  if (!offloaded_) return {};
  GENERATE_TANDEM(tandem_weights_done(offloaded_.get(), block_of(layer_idx, part), stream, &error));
  return {};
}

template <class T>
Failure CudaWeights<T>::get_stats(tandem_weights_stats* stats) const {
  if (!offloaded_) return {};
  GENERATE_TANDEM(tandem_weights_get_stats(stats, offloaded_.get(), &error));
  return {};
}

template <class T>
Failure CudaWeights<T>::get_projection(const ModelConfig& config, int64_t layer_idx, cudaStream_t stream,
                                       LayerProjection* projection) {
  constexpr bool kIsF32 = std::is_same_v<T, float>;
  const int64_t kv_size = config.kv_size(), n = kv_size * config.hidden_size;
  tandem_layer_projection& to = projection->options;
  to.hidden_dim = static_cast<int32_t>(config.hidden_size);
  to.w_type = kIsF32 ? TANDEM_F16 : TANDEM_BF16;
  to.w_order = TANDEM_WEIGHTS_OUT_IN;
  const CudaArray<float>& bias = layers[layer_idx].qkv_bias;
  if (bias.size() > 0) {
    projection->bias.resize(2 * kv_size);
    must(cudaMemcpy(projection->bias.data(), bias.get() + config.q_size(), 8 * kv_size, cudaMemcpyDeviceToHost), "biases");
    to.b_k = projection->bias.data();
    to.b_v = to.b_k + kv_size;
  }
  Pair matrices;
  GENERATE_TRY(use(layer_idx, kAttention, stream, &matrices));
  const T* const w_k = matrices.first + config.q_size() * config.hidden_size;
  if (!kIsF32 && !offloaded_) {
    to.device_type = TANDEM_DEVICE_CUDA;
    to.w_k = w_k;
    to.w_v = w_k + n;
    return done(layer_idx, kAttention, stream);
  }
  std::vector<T> rows(2 * n);
  must(cudaMemcpyAsync(rows.data(), w_k, rows.size() * sizeof(T), cudaMemcpyDeviceToHost, stream), "weights");
  GENERATE_TRY(done(layer_idx, kAttention, stream));
  must(cudaStreamSynchronize(stream), "weights");
  projection->weights.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if constexpr (kIsF32) {
      const __half half = __float2half(rows[i]);
      std::memcpy(&projection->weights[i], &half, 2);
    } else {
      std::memcpy(&projection->weights[i], &rows[i], 2);
    }
  }
  to.w_k = projection->weights.data();
  to.w_v = projection->weights.data() + n;
  return {};
}

template <class T>
int64_t CudaWeights<T>::bytes() const {
  int64_t sum = embedding.bytes() + head.bytes() + final_norm.bytes();
  for (const Layer& layer : layers)
    sum += layer.attention_norm.bytes() + layer.ffn_norm.bytes() + layer.qkv.bytes() + layer.qkv_bias.bytes() +
           layer.out.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return sum;
}

template struct CudaWeights<float>;
template struct CudaWeights<__nv_bfloat16>;

}  // namespace generate
