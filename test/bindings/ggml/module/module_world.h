// SPDX-License-Identifier: MIT
// Shared by the tests of the ggml module: tensors in memory of their own, which holds NaN until it is written, a node over
// such tensors, and the module's device and backend.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "api/api_world.h"
#include "reference/rounding.h"
#include "stand_in_ggml.h"
#include "with_cmocka.h"

namespace ggml_module_test {

using tandem_test::noise;

inline int32_t dtype_of(ggml_type type) {
  const int32_t types[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_Q8_0, TANDEM_Q4_0};
  return types[type];
}

// A tensor [dim, n_tokens, n_heads, n_streams] as llama.cpp views its cache: a token's heads lie side by side. A gap of one
// row follows each token and a gap of two tokens follows each stream. Gaps stay NaN.
class Tensor {
 public:
  Tensor(ggml_type type, int64_t dim, int64_t n_tokens, int64_t n_heads = 1, int64_t n_streams = 1) {
    view.type = type;
    const size_t row = static_cast<size_t>(dim / ggml_blck_size(type)) * ggml_type_size(type);
    const size_t token = static_cast<size_t>(n_heads + 1) * row, stream = static_cast<size_t>(n_tokens + 2) * token;
    const int64_t ne[] = {dim, n_tokens, n_heads, n_streams};
    const size_t nb[] = {ggml_type_size(type), token, row, stream};
    std::copy(ne, ne + 4, view.ne);
    std::copy(nb, nb + 4, view.nb);
    memory_.assign(static_cast<size_t>(n_streams) * stream, 0xff);
    view.data = memory_.data();
  }
  // Makes a contiguous tensor, as mask, sinks and the node itself are.
  static std::unique_ptr<Tensor> contiguous(int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, ggml_type type) {
    auto made = std::make_unique<Tensor>(type, ne0, 1, 1, 1);
    const int64_t ne[] = {ne0, ne1, ne2, ne3};
    size_t bytes = ggml_type_size(type);
    for (int i = 0; i < 4; ++i) {
      made->view.ne[i] = ne[i];
      made->view.nb[i] = bytes;
      bytes *= static_cast<size_t>(ne[i]);
    }
    made->memory_.assign(bytes, 0xff);
    made->view.data = made->memory_.data();
    return made;
  }

  uint8_t* at(int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const {
    return static_cast<uint8_t*>(view.data) + static_cast<size_t>(i1) * view.nb[1] + static_cast<size_t>(i2) * view.nb[2] +
           static_cast<size_t>(i3) * view.nb[3];
  }
  double value(int64_t i0, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const {
    const uint8_t* row = at(i1, i2, i3);
    const size_t bytes = ggml_type_size(view.type);
    const uint8_t* block = row + static_cast<size_t>(i0 / ggml_blck_size(view.type)) * bytes;
    const int64_t i = i0 % 32;
    if (view.type == GGML_TYPE_Q8_0) return reference::load(TANDEM_F16, block) * static_cast<int8_t>(block[2 + i]);
    if (view.type == GGML_TYPE_Q4_0)
      return reference::load(TANDEM_F16, block) * ((i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4) - 8);
    return reference::load(dtype_of(view.type), block);
  }
  void set(double x, int64_t i0, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const {
    reference::store(dtype_of(view.type), x, at(i1, i2, i3) + static_cast<size_t>(i0) * view.nb[0]);
  }
  // Fills the tensor with noise. Quantized blocks get codes of noise and a fixed scale.
  void fill(int64_t seed) const {
    for (int64_t s = 0; s < view.ne[3]; ++s)
      for (int64_t h = 0; h < view.ne[2]; ++h)
        for (int64_t t = 0; t < view.ne[1]; ++t)
          fill_row(at(t, h, s), ((s * view.ne[2] + h) * view.ne[1] + t) * view.ne[0], seed);
  }

  mutable ggml_tensor view = {};

 private:
  void fill_row(uint8_t* row, int64_t first, int64_t seed) const {
    const size_t bytes = ggml_type_size(view.type);
    const int64_t block = ggml_blck_size(view.type);
    for (int64_t i = 0; i < view.ne[0]; ++i) {
      uint8_t* at = row + static_cast<size_t>(i / block) * bytes;
      const float x = noise(first + i, seed);
      if (block == 1) {
        reference::store(dtype_of(view.type), 2.0 * static_cast<double>(x), at);
      } else {
        if (i % block == 0) reference::store(TANDEM_F16, view.type == GGML_TYPE_Q8_0 ? 0.016 : 0.2, at);
        const int64_t j = i % block;
        if (view.type == GGML_TYPE_Q8_0)
          at[2 + j] = static_cast<uint8_t>(static_cast<int8_t>(x * 127.0f));
        else
          at[2 + j % 16] = static_cast<uint8_t>((j < 16 ? at[2 + j % 16] & 0xf0 : at[2 + j % 16] & 0x0f) |
                                                (static_cast<int>(7.5f + 7.0f * x) << (j < 16 ? 0 : 4)));
      }
    }
  }
  std::vector<uint8_t> memory_;
};

struct Shape {
  int64_t k_dim = 64, v_dim = 64, n_tokens = 3, n_keys = 700, n_q_heads = 4, n_kv_heads = 2, n_streams = 1;
  ggml_type k_type = GGML_TYPE_F16, v_type = GGML_TYPE_F16;
  float scale = 0.125f, max_bias = 0.0f, soft_cap = 0.0f;
  bool has_mask = true, has_sinks = false;
  int64_t mask_heads = 1, mask_streams = 1;
};

// A node FLASH_ATTN_EXT and all tensors that it reads.
struct Node {
  explicit Node(const Shape& of)
      : q(GGML_TYPE_F32, of.k_dim, of.n_tokens, of.n_q_heads, of.n_streams),
        k(of.k_type, of.k_dim, of.n_keys, of.n_kv_heads, of.n_streams),
        v(of.v_type, of.v_dim, of.n_keys, of.n_kv_heads, of.n_streams),
        mask(Tensor::contiguous(of.n_keys, of.n_tokens, of.mask_heads, of.mask_streams, GGML_TYPE_F16)),
        sinks(Tensor::contiguous(of.n_q_heads, 1, 1, 1, GGML_TYPE_F32)),
        o(Tensor::contiguous(of.v_dim, of.n_q_heads, of.n_tokens, of.n_streams, GGML_TYPE_F32)) {
    q.fill(1), k.fill(2), v.fill(3), mask->fill(4), sinks->fill(5);
    node().op = GGML_OP_FLASH_ATTN_EXT;
    node().flags = GGML_TENSOR_FLAG_COMPUTE;
    std::strcpy(node().name, "fa-7");
    const float params[] = {of.scale, of.max_bias, of.soft_cap};
    std::memcpy(node().op_params, params, sizeof params);
    node().src[0] = &q.view;
    node().src[1] = &k.view;
    node().src[2] = &v.view;
    node().src[3] = of.has_mask ? &mask->view : nullptr;
    node().src[4] = of.has_sinks ? &sinks->view : nullptr;
  }
  ggml_tensor& node() const { return o->view; }

  Tensor q, k, v;
  std::unique_ptr<Tensor> mask, sinks, o;
};

inline ggml_backend_dev_t device() {
  ggml_backend_reg_t reg = ggml_backend_init();
  assert_non_null(reg);
  return reg->iface.get_device(reg, 0);
}
inline bool supports(const ggml_tensor& node) { return device()->iface.supports_op(device(), &node); }

class Backend {
 public:
  explicit Backend(int n_threads = 2) : backend_(device()->iface.init_backend(device(), nullptr)) {
    assert_non_null(backend_);
    auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        device()->reg->iface.get_proc_address(device()->reg, "ggml_backend_set_n_threads"));
    assert_non_null(set);
    set(backend_, n_threads);
  }
  ~Backend() { backend_->iface.free(backend_); }
  Backend(const Backend&) = delete;
  ggml_status compute(ggml_tensor* node) const {
    ggml_tensor view = {};
    view.op = GGML_OP_VIEW;
    ggml_cgraph graph = {{&view, node}};
    return backend_->iface.graph_compute(backend_, &graph);
  }

 private:
  ggml_backend_t backend_;
};

}  // namespace ggml_module_test
