// SPDX-License-Identifier: MIT
// The rival of recomputation: FlexGen's way, as in KVPR's figures 3 and 4. Layers run one after the other, and so do a
// layer's batches. All of K and V of a batch and all weights of a layer cross the bus, while earlier work computes. Plain
// CUDA: pinned memory, two buffers for a batch's cache and two for a layer's weights, a stream for each, and one that takes
// new rows back. The bench makes the products. The module's kernel attends the keys that have arrived.
//
//   weights   | layer 0               | layer 1 ...
//   cache     | batch 0 | batch 1 | batch 2 | ...
//   compute             | batch 0 | batch 1 | ...
//   rows                          | batch 0 | batch 1 ...     to the host
#pragma once

#include "device/open_device.h"
#include "layer_rival.h"
#include "lib/tables/device.h"
#include "opt_step.cuh"

namespace tandem::test {

class FullStreaming {
 public:
  // All layers share the cache data of one layer, but each reads it again.
  FullStreaming(const OpenDevice& device, const OptLayer& layer, const HostWeights& weights, OptStep* step, int n_layers,
                int64_t length)
      : device_(device), step_(*step), n_layers_(n_layers), length_(length) {
    const Geometry& g = layer.geometry;
    heads_ = step->batch * g.n_heads;
    plane_bytes_ = heads_ * length * kHeadDim * 2;
    weight_bytes_ = layer_weight_bytes(g);
    must(cudaMallocHost(&cache_, static_cast<size_t>(2 * plane_bytes_ * step->n_batches)));
    must(cudaMallocHost(&weights_, static_cast<size_t>(n_layers * weight_bytes_)));
    for (int64_t b = 0; b < step->n_batches; ++b) fill_cache(layer, b);
    for (int l = 0; l < n_layers; ++l) fill_weights(layer, weights, l);
    for (int i = 0; i < 2; ++i) {
      must(cudaMalloc(&there_[i].cache, static_cast<size_t>(2 * plane_bytes_)));
      must(cudaMalloc(&there_[i].weights, static_cast<size_t>(weight_bytes_)));
    }
    for (cudaStream_t* stream : {&to_cache_, &to_weights_, &to_host_})
      must(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    for (There& there : there_)
      for (cudaEvent_t* event :
           {&there.cache_filled, &there.cache_freed, &there.weights_filled, &there.weights_freed, &there.rows})
        must(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    describe(g);
    send_weights();
    send_weights();
  }
  FullStreaming(const FullStreaming&) = delete;
  ~FullStreaming() {
    must(cudaDeviceSynchronize());
    for (There& there : there_) {
      for (cudaEvent_t event :
           {there.cache_filled, there.cache_freed, there.weights_filled, there.weights_freed, there.rows})
        cudaEventDestroy(event);
      cudaFree(there.cache);
      cudaFree(there.weights);
    }
    for (cudaStream_t stream : {to_cache_, to_weights_, to_host_}) cudaStreamDestroy(stream);
    cudaFree(described_);
    cudaFree(call_.workspace);
    cudaFreeHost(cache_);
    cudaFreeHost(weights_);
  }

  // Runs one token of all sequences. Sends the first batch's cache when called; the next step's weights are sent before.
  void step() {
    step_.reset();
    send_cache(0);
    for (int l = 0; l < n_layers_; ++l) {
      There& of_layer = there_[n_layers_done_ % 2];
      const auto* w = reinterpret_cast<const __half*>(of_layer.weights);
      const int64_t square = int64_t{step_.geometry.hidden} * step_.geometry.hidden;
      const WeightsThere weights{w, w + square, w + 2 * square, w + 4 * square};
      must(cudaStreamWaitEvent(step_.stream, of_layer.weights_filled, 0));
      for (int64_t b = 0; b < step_.n_batches; ++b) {
        const bool is_last = b + 1 == step_.n_batches;
        if (!is_last || l + 1 < n_layers_) send_cache(is_last ? 0 : b + 1);
        compute(b, weights);
      }
      must(cudaEventRecord(of_layer.weights_freed, step_.stream));
      ++n_layers_done_;
      send_weights();
    }
  }

 private:
  struct There {
    std::byte *cache = nullptr, *weights = nullptr;
    cudaEvent_t cache_filled, cache_freed, weights_filled, weights_freed, rows;
  };

  // [K, V][sequence][head][token]. A sequence begins where the library's does, and ends with the token that the step makes.
  void fill_cache(const OptLayer& layer, int64_t b) {
    const int64_t n_heads = layer.geometry.n_heads;
    for (int64_t i = 0; i < step_.batch; ++i)
      for (int64_t h = 0; h < n_heads; ++h)
        for (int64_t t = 0; t < length_; ++t) {
          const int64_t from = ((first_token(b * step_.batch + i) + t) * n_heads + h) * kHeadDim;
          std::byte* const to = cache_ + 2 * b * plane_bytes_ + ((i * n_heads + h) * length_ + t) * kHeadDim * 2;
          std::memcpy(to, layer.k.data() + from, kHeadDim * 2);
          std::memcpy(to + plane_bytes_, layer.v.data() + from, kHeadDim * 2);
        }
  }
  void fill_weights(const OptLayer& layer, const HostWeights& weights, int l) {
    std::byte* to = weights_ + l * weight_bytes_;
    for (const std::vector<__half>* part : {&layer.w_k, &layer.w_v, &weights.qo, &weights.mlp}) {
      std::memcpy(to, part->data(), part->size() * 2);
      to += part->size() * 2;
    }
  }
  void describe(const Geometry& g) {
    layer_.n_q_heads = layer_.n_kv_heads = g.n_heads;
    layer_.group_size = 1;
    layer_.k_head_dim = layer_.v_head_dim = kHeadDim;
    layer_.k_type = layer_.v_type = TANDEM_F16;
    layer_.sm_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
    std::vector<tandem::DeviceSequence> sequences(static_cast<size_t>(step_.batch));
    std::vector<int64_t> tables;
    for (size_t i = 0; i < sequences.size(); ++i) {
      sequences[i].end = length_;
      sequences[i].q_len = sequences[i].table_len = 1;
      sequences[i].first_row = sequences[i].table_begin = static_cast<int32_t>(i);
      tables.push_back(static_cast<int64_t>(i) * g.n_heads * length_ * kHeadDim * 2);
    }
    const size_t bytes = sequences.size() * sizeof(tandem::DeviceSequence);
    must(cudaMalloc(&described_, bytes + tables.size() * 8));
    must(cudaMemcpy(described_, sequences.data(), bytes, cudaMemcpyHostToDevice));
    must(cudaMemcpy(described_ + bytes, tables.data(), tables.size() * 8, cudaMemcpyHostToDevice));
    call_.layer = &layer_;
    call_.pages.page_len = static_cast<int32_t>(length_);
    for (const int plane : {0, 2}) call_.pages.head_stride[plane] = length_ * kHeadDim * 2;
    call_.sequences.sequences = reinterpret_cast<tandem::DeviceSequence*>(described_);
    call_.sequences.page_tables = reinterpret_cast<int64_t*>(described_ + bytes);
    call_.sequences.n_sequences = static_cast<int32_t>(step_.batch);
    call_.sequences.max_q_len = 1;
    call_.sequences.max_keys = length_;
    call_.q = {step_.views[0].data, TANDEM_F16, 0, int64_t{g.n_heads} * kHeadDim, kHeadDim};
    call_.o = {step_.views[3].data, TANDEM_F16, 0, int64_t{g.n_heads} * kHeadDim, kHeadDim};
    const auto workspace = static_cast<size_t>(device_.table->workspace_bytes(device_.self, &call_));
    must(cudaMalloc(&call_.workspace, workspace));
    must(cudaMemset(call_.workspace, 0, workspace));
  }
  void send_weights() {
    There& there = there_[n_weights_sent_ % 2];
    must(cudaStreamWaitEvent(to_weights_, there.weights_freed, 0));
    must(cudaMemcpyAsync(there.weights, weights_ + n_weights_sent_++ % n_layers_ * weight_bytes_,
                         static_cast<size_t>(weight_bytes_), cudaMemcpyHostToDevice, to_weights_));
    must(cudaEventRecord(there.weights_filled, to_weights_));
  }
  void send_cache(int64_t b) {
    There& there = there_[n_cache_sent_++ % 2];
    must(cudaStreamWaitEvent(to_cache_, there.cache_freed, 0));
    must(cudaMemcpyAsync(there.cache, cache_ + 2 * b * plane_bytes_, static_cast<size_t>(2 * plane_bytes_),
                         cudaMemcpyHostToDevice, to_cache_));
    must(cudaEventRecord(there.cache_filled, to_cache_));
  }
  // Writes new rows to the last places of each head, on the device and on the host.
  void compute(int64_t b, const WeightsThere& weights) {
    There& there = there_[n_computed_++ % 2];
    const size_t row = kHeadDim * 2, pitch = static_cast<size_t>(length_) * row, last = pitch - row;
    step_.make_k_v(b, weights);
    step_.make_q(weights);
    must(cudaStreamWaitEvent(step_.stream, there.cache_filled, 0));
    for (const bool is_k : {true, false}) {
      std::byte* const plane = there.cache + (is_k ? 0 : plane_bytes_);
      must(cudaMemcpy2DAsync(plane + last, pitch, is_k ? step_.k() : step_.v(), row, row, static_cast<size_t>(heads_),
                             cudaMemcpyDeviceToDevice, step_.stream));
      call_.pages.planes[is_k ? 0 : 2] = plane;
    }
    must(cudaEventRecord(there.rows, step_.stream));
    must(cudaStreamWaitEvent(to_host_, there.rows, 0));
    for (const bool is_k : {true, false})
      must(cudaMemcpy2DAsync(cache_ + 2 * b * plane_bytes_ + (is_k ? 0 : plane_bytes_) + last, pitch,
                             there.cache + (is_k ? 0 : plane_bytes_) + last, pitch, row, static_cast<size_t>(heads_),
                             cudaMemcpyDeviceToHost, to_host_));
    tandem::DeviceError error;
    device_.must(device_.table->attend(device_.self, &call_, step_.stream, &error), error);
    must(cudaEventRecord(there.rows, step_.stream));
    must(cudaStreamWaitEvent(to_host_, there.rows, 0));
    must(cudaEventRecord(there.cache_freed, to_host_));
    step_.add_attention(b, weights);
    step_.add_mlp(b, weights);
  }
  const OpenDevice& device_;
  OptStep& step_;
  int n_layers_;
  int64_t length_, heads_ = 0, plane_bytes_ = 0, weight_bytes_ = 0;
  std::byte *cache_ = nullptr, *weights_ = nullptr, *described_ = nullptr;
  There there_[2];
  cudaStream_t to_cache_, to_weights_, to_host_;
  int64_t n_cache_sent_ = 0, n_weights_sent_ = 0, n_computed_ = 0, n_layers_done_ = 0;
  tandem::Layer layer_;
  tandem::DeviceAttend call_;
};

}  // namespace tandem::test
