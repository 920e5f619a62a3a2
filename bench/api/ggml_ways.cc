// SPDX-License-Identifier: MIT
// One graph serves all layers. Before each computation its K and V are pointed at the layer's data. So everything else in
// the graph, above all the logits, is in the same memory for each layer, as with a graph allocator.
#include "ggml_ways.h"

#include <ggml-cpu.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace rivals {
namespace {

struct Free {
  void operator()(void* data) const { std::free(data); }
  void operator()(ggml_context* context) const { ggml_free(context); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory allocate(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  return Memory(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, (bytes + kHugePage) / kHugePage * kHugePage)));
}

class Ggml final : public Rival {
 public:
  Ggml(const Pool& pool, Way way, const Shape& shape) : pool_(pool), way_(way), shape_(shape) {
    for (int64_t layer = 0; layer < shape.n_layers; ++layer) layers_.push_back(make_layer(layer));
    make_graph();
  }
  const char* name() const override {
    if (way_ == Way::kProducts) return "ggml, matrix products";
    return way_ == Way::kFlash ? "ggml, flash attention, head-major" : "ggml, flash attention, token-major (llama.cpp)";
  }
  // Peaked weights show a wrong mask. Diffuse weights have no limit: for few queries, flash attention sums V in f16, and
  // that sum stops growing after some thousand keys.
  Errors largest() const override { return {0.3, INFINITY}; }
  void take(const Floats& q) override {
    auto* to = static_cast<float*>(q_->data);  // [kQHeads, q_len, kDim]
    for (int64_t t = 0; t < shape_.q_len; ++t)
      for (int64_t head = 0; head < kQHeads; ++head)
        std::copy_n(q.data() + (t * kQHeads + head) * kDim, kDim, to + (head * shape_.q_len + t) * kDim);
  }
  void attend(int64_t idx) override {
    k_->data = layers_[static_cast<size_t>(idx)].k.get();
    v_->data = layers_[static_cast<size_t>(idx)].v.get();
    ggml_cplan plan = ggml_graph_plan(graph_, shape_.n_threads, nullptr);
    if (work_.size() < plan.work_size) work_.resize(plan.work_size);
    plan.work_data = work_.data();
    ggml_graph_compute(graph_, &plan);
  }
  void give(Floats* o) const override {
    const auto* from = static_cast<const float*>(o_->data);
    for (int64_t t = 0; t < shape_.q_len; ++t)
      for (int64_t head = 0; head < kQHeads; ++head) {
        const int64_t row = way_ == Way::kProducts ? head * shape_.q_len + t : t * kQHeads + head;
        std::copy_n(from + row * kDim, kDim, o->data() + (t * kQHeads + head) * kDim);
      }
  }

 private:
  struct Layer {
    Memory k, v;
  };

  // Fills every element of K and V, so no read finds memory without a value.
  Layer make_layer(int64_t idx) const {
    const size_t bytes = pool_.row_bytes * static_cast<size_t>(shape_.n_keys * kKvHeads);
    Layer layer{allocate(bytes), allocate(bytes)};
    place(idx, layer.k.get(), layer.v.get());
    return layer;
  }

  void place(int64_t layer, uint8_t* k, uint8_t* v) const {
    const size_t row = pool_.row_bytes;
    const int64_t n_keys = shape_.n_keys;
#pragma omp parallel for
    for (int64_t head = 0; head < kKvHeads; ++head) {
      for (int64_t t = 0; t < n_keys; ++t) {
        const int64_t at = way_ == Way::kFlashTokenMajor ? t * kKvHeads + head : head * n_keys + t;
        const uint8_t* from = pool_.row(pool_.stored_v, layer, t, head);
        std::memcpy(k + static_cast<size_t>(at) * row, pool_.row(pool_.stored_k, layer, t, head), row);
        if (way_ != Way::kProducts) {
          std::memcpy(v + static_cast<size_t>(at) * row, from, row);
          continue;
        }
        for (int64_t i = 0; i < kDim; ++i) std::memcpy(v + ((head * kDim + i) * n_keys + t) * 2, from + i * 2, 2);
      }
    }
  }

  void make_graph() {
    const int64_t n_keys = shape_.n_keys, q_len = shape_.q_len;
    const int64_t n_logits = way_ == Way::kProducts ? kQHeads * q_len * n_keys : 0;
    const size_t bytes = static_cast<size_t>(n_logits + q_len * n_keys + 2 * kQHeads * q_len * kDim) * sizeof(float);
    const size_t room = bytes + (size_t{4} << 20);
    graph_memory_ = allocate(room);
    context_.reset(ggml_init({room, graph_memory_.get(), false}));
    ggml_context* c = context_.get();
    if (way_ == Way::kProducts)
      make_products(c);
    else
      make_flash(c);
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, o_);
  }

  // Makes a tensor for keys or values. Its data is set for each layer.
  ggml_tensor* stored(ggml_context* c, int64_t first, int64_t second, int64_t third) const {
    ggml_set_no_alloc(c, true);
    ggml_tensor* tensor = ggml_new_tensor_3d(c, pool_.type, first, second, third);
    ggml_set_no_alloc(c, false);
    return tensor;
  }

  // f16 for flash attention, which takes no other type. NULL for one query, which sees every key.
  ggml_tensor* mask(ggml_context* c, ggml_type type) const {
    if (shape_.q_len == 1) return nullptr;
    ggml_tensor* mask = ggml_new_tensor_2d(c, type, shape_.n_keys, shape_.q_len);
    for (int64_t t = 0; t < shape_.q_len; ++t) {
      for (int64_t key = 0; key < shape_.n_keys; ++key) {
        const float value = key <= shape_.n_keys - shape_.q_len + t ? 0.0f : -INFINITY;
        const int64_t at = t * shape_.n_keys + key;
        if (type == GGML_TYPE_F32)
          static_cast<float*>(mask->data)[at] = value;
        else
          static_cast<ggml_fp16_t*>(mask->data)[at] = ggml_fp32_to_fp16(value);
      }
    }
    return mask;
  }

  // A KV head has one product whose rows are the queries of its whole group, so each key is read once for all of them. The
  // mask belongs to one head, so softmax gets the heads separately. It overwrites the logits.
  void make_products(ggml_context* c) {
    const int64_t n_keys = shape_.n_keys, q_len = shape_.q_len;
    k_ = stored(c, kDim, n_keys, kKvHeads);
    v_ = stored(c, n_keys, kDim, kKvHeads);
    q_ = ggml_new_tensor_3d(c, GGML_TYPE_F32, kDim, q_len * kGroup, kKvHeads);
    ggml_tensor* logits = ggml_mul_mat(c, k_, q_);
    ggml_tensor* f32_mask = mask(c, GGML_TYPE_F32);
    // Threads split the rows of one head. Without a mask, a group's rows can count as one head's.
    if (f32_mask != nullptr) logits = ggml_reshape_3d(c, logits, n_keys, q_len, kQHeads);
    ggml_tensor* weights = ggml_soft_max_ext_inplace(c, logits, f32_mask, kScale, 0.0f);
    o_ = ggml_mul_mat(c, v_, ggml_reshape_3d(c, weights, n_keys, q_len * kGroup, kKvHeads));
  }

  void make_flash(ggml_context* c) {
    const int64_t n_keys = shape_.n_keys;
    const bool token_major = way_ == Way::kFlashTokenMajor;
    k_ = stored(c, kDim, n_keys, kKvHeads);
    v_ = stored(c, kDim, n_keys, kKvHeads);
    if (token_major)
      for (ggml_tensor* tensor : {k_, v_}) tensor->nb[1] = pool_.row_bytes * kKvHeads, tensor->nb[2] = pool_.row_bytes;
    q_ = ggml_new_tensor_3d(c, GGML_TYPE_F32, kDim, shape_.q_len, kQHeads);
    o_ = ggml_flash_attn_ext(c, q_, k_, v_, mask(c, GGML_TYPE_F16), kScale, 0.0f, 0.0f);
  }

  const Pool& pool_;
  Way way_;
  Shape shape_;
  std::vector<Layer> layers_;
  Memory graph_memory_;  // outlives context_
  std::unique_ptr<ggml_context, Free> context_;
  ggml_cgraph* graph_ = nullptr;
  ggml_tensor *k_ = nullptr, *v_ = nullptr, *q_ = nullptr, *o_ = nullptr;
  Bytes work_;
};

}  // namespace

std::unique_ptr<Rival> make_ggml(const Pool& pool, Way way, const Shape& shape) {
  return std::make_unique<Ggml>(pool, way, shape);
}

}  // namespace rivals
