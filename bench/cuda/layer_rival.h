// SPDX-License-Identifier: MIT
// Baselines for benches of streamed keys: the bus, and keys that are copied a layer at a time.
#pragma once

#include "cuda/hybrid_case.h"
#include "device/open_device.h"
#include "lib/tables/device.h"

namespace tandem::test {

// Pinned memory of the bench.
struct Pinned {
  std::byte* host = nullptr;
  explicit Pinned(int64_t bytes) {
    must(cudaMallocHost(&host, static_cast<size_t>(bytes)));
    // Multiplying zeros would take less power, and so less time.
    const std::vector<__nv_bfloat16> rows = random_rows(std::min<int64_t>(bytes, int64_t{8} << 20) / 2, 5);
    const auto n = static_cast<int64_t>(rows.size()) * 2;
    for (int64_t at = 0; at < bytes; at += n)
      std::memcpy(host + at, rows.data(), static_cast<size_t>(std::min(n, bytes - at)));
  }
  Pinned(const Pinned&) = delete;
  ~Pinned() { cudaFreeHost(host); }
};

// Returns bytes per microsecond.
inline double time_bus(const Pinned& from, int64_t bytes, std::byte* to) {
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

// The simple way: copies the whole layer to the device and attends it in one call of the module's kernels.
class LayerRival {
 public:
  LayerRival(const OpenDevice& device, int64_t length, int64_t n_queries) : device_(device), from_(length * kTokenBytes) {
    layer_.n_q_heads = kQHeads;
    layer_.n_kv_heads = kKvHeads;
    layer_.group_size = kQHeads / kKvHeads;
    layer_.k_head_dim = layer_.v_head_dim = kDim;
    layer_.k_type = layer_.v_type = TANDEM_BF16;
    layer_.sm_scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    must(cudaMalloc(&keys_, static_cast<size_t>(length * kTokenBytes)));
    must(cudaMalloc(&rows_, static_cast<size_t>(n_queries * kQHeads * kDim * 2)));
    const std::vector<__nv_bfloat16> q = random_rows(n_queries * kQHeads * kDim, 9);
    must(cudaMemcpy(rows_, q.data(), q.size() * 2, cudaMemcpyHostToDevice));
    must(cudaMemcpy(keys_, from_.host, static_cast<size_t>(length * kTokenBytes), cudaMemcpyHostToDevice));
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
  LayerRival(const LayerRival&) = delete;
  ~LayerRival() {
    for (void* data : {static_cast<void*>(keys_), rows_, o_, static_cast<void*>(described_), call_.workspace})
      cudaFree(data);
  }
  const Pinned& from() const { return from_; }
  std::byte* keys() const { return keys_; }
  // Runs layers one after the other: first the copy, then attention.
  double time_copied(int64_t bytes, int n_rounds) {
    return time(n_rounds, [&] {
      must(cudaMemcpyAsync(keys_, from_.host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
      attend(nullptr);
    });
  }
  double time_resident(int n_rounds) {
    return time(n_rounds, [&] { attend(nullptr); });
  }
  // The device has room for two layers of many: the next one is copied while this one is attended. Both have the same keys,
  // so always the first place is attended.
  double time_two_layers(int64_t bytes, int n_rounds) {
    constexpr int kLayers = 4;
    std::byte* other = nullptr;
    must(cudaMalloc(&other, static_cast<size_t>(bytes)));
    cudaStream_t copies, attends;
    must(cudaStreamCreate(&copies));
    must(cudaStreamCreate(&attends));
    cudaEvent_t filled[2], freed[2];
    for (cudaEvent_t* event : {&filled[0], &filled[1], &freed[0], &freed[1]}) must(cudaEventCreate(event));
    const double us = time(n_rounds, [&] {
      for (int l = 0; l < kLayers; ++l) {
        must(cudaStreamWaitEvent(copies, freed[l % 2], 0));
        must(cudaMemcpyAsync(l % 2 == 0 ? keys_ : other, from_.host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice,
                             copies));
        must(cudaEventRecord(filled[l % 2], copies));
        must(cudaStreamWaitEvent(attends, filled[l % 2], 0));
        attend(attends);
        must(cudaEventRecord(freed[l % 2], attends));
      }
    });
    for (cudaEvent_t event : {filled[0], filled[1], freed[0], freed[1]}) cudaEventDestroy(event);
    cudaStreamDestroy(copies);
    cudaStreamDestroy(attends);
    cudaFree(other);
    return us / kLayers;
  }

 private:
  void attend(cudaStream_t stream) {
    tandem::DeviceError error;
    device_.must(device_.table->attend(device_.self, &call_, stream, &error), error);
  }
  template <typename F>
  static double time(int n_rounds, F calls) {
    std::vector<double> times;
    for (int i = 0; i < n_rounds; ++i) {
      const auto begin = Clock::now();
      calls();
      must(cudaDeviceSynchronize());
      times.push_back(us_since(begin));
    }
    return median(times);
  }

  const OpenDevice& device_;
  Pinned from_;
  tandem::Layer layer_;
  std::byte *keys_ = nullptr, *described_ = nullptr;
  void *rows_ = nullptr, *o_ = nullptr;
  tandem::DeviceAttend call_;
};

}  // namespace tandem::test
