// SPDX-License-Identifier: MIT
#include "attend_node.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

namespace tandem_ggml_module {
namespace {

struct Params {
  float scale, max_bias, soft_cap;
};

Params params_of(const ggml_tensor& node) {
  Params params;
  static_assert(sizeof(params) <= sizeof(node.op_params));
  std::memcpy(&params, node.op_params, sizeof params);
  return params;
}

int32_t dtype_of(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return TANDEM_F32;
    case GGML_TYPE_F16:
      return TANDEM_F16;
    case GGML_TYPE_BF16:
      return TANDEM_BF16;
    case GGML_TYPE_Q8_0:
      return TANDEM_Q8_0;
    case GGML_TYPE_Q4_0:
      return TANDEM_Q4_0;
    default:
      return 0;
  }
}

bool is_plain(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }

// Returns whether a tandem_tensor can describe the tensor: rows are contiguous, and strides are whole elements or blocks.
bool has_rows(const ggml_tensor& tensor) {
  const size_t block_bytes = ggml_type_size(tensor.type);
  if (tensor.nb[0] != block_bytes || tensor.ne[0] % ggml_blck_size(tensor.type) != 0) return false;
  for (int i = 1; i < GGML_MAX_DIMS; ++i)
    if (tensor.ne[i] > 1 && (tensor.nb[i] == 0 || tensor.nb[i] % block_bytes != 0)) return false;
  return true;
}

// Returns whether there are kernels for these head dims, by making a model of one layer. Cached per shape, because a
// scheduler asks about every node of every graph.
bool has_kernels(int64_t n_q_heads, int64_t n_kv_heads, int64_t k_head_dim, int64_t v_head_dim) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 4>, bool> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = known.try_emplace({n_q_heads, n_kv_heads, k_head_dim, v_head_dim}, false);
  if (is_new) {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = static_cast<int32_t>(n_q_heads);
    layer.n_kv_heads = static_cast<int32_t>(n_kv_heads);
    layer.k_head_dim = static_cast<int32_t>(k_head_dim);
    layer.v_head_dim = static_cast<int32_t>(v_head_dim);
    tandem_model* model = nullptr;
    entry->second = tandem_model_create(&model, &layer, 1, nullptr) == TANDEM_OK;
    tandem_model_release(model);
  }
  return entry->second;
}

bool is_mask(const ggml_tensor& mask, const ggml_tensor& q, const ggml_tensor& k) {
  return mask.type == GGML_TYPE_F16 && has_rows(mask) && mask.ne[0] >= k.ne[1] && mask.ne[1] >= q.ne[1] &&
         (mask.ne[2] == 1 || mask.ne[2] == q.ne[2]) && (mask.ne[3] == 1 || mask.ne[3] == q.ne[3]);
}

// Returns one slope per query head, by ggml's formula.
std::vector<float> alibi_slopes(float max_bias, int64_t n_q_heads) {
  std::vector<float> slopes;
  if (max_bias <= 0.0f) return slopes;
  const int64_t n_even = int64_t{1} << static_cast<int>(std::floor(std::log2(static_cast<double>(n_q_heads))));
  const float even = std::pow(2.0f, -max_bias / static_cast<float>(n_even));
  const float odd = std::pow(2.0f, -max_bias / 2.0f / static_cast<float>(n_even));
  for (int64_t head = 0; head < n_q_heads; ++head)
    slopes.push_back(head < n_even ? std::pow(even, static_cast<float>(head + 1))
                                   : std::pow(odd, static_cast<float>(2 * (head - n_even) + 1)));
  return slopes;
}

// Describes a tensor as [tensor.ne[3], tensor.ne[token_dim], tensor.ne[head_dim], tensor.ne[0]].
tandem_tensor view_of(const ggml_tensor& tensor, int token_dim, int head_dim) {
  tandem_tensor view = {};
  view.struct_size = sizeof view;
  view.dtype = dtype_of(tensor.type);
  view.data = tensor.data;
  view.n_dims = 4;
  const int order[4] = {3, token_dim, head_dim, 0};
  const auto block_bytes = static_cast<int64_t>(ggml_type_size(tensor.type));
  int64_t extent = tensor.ne[0];
  for (int i = 0; i < 4; ++i) {
    const int dim = order[i];
    view.shape[i] = tensor.ne[dim];
    view.stride[i] = dim == 0 ? 1 : static_cast<int64_t>(tensor.nb[dim]) / block_bytes * ggml_blck_size(tensor.type);
    if (view.shape[i] > 1) extent = std::max(extent, view.shape[i] * view.stride[i]);
  }
  for (int i = 0; i < 3; ++i)  // ggml may leave any stride in a dimension of length 1
    if (view.shape[i] == 1) view.stride[i] = extent;
  return view;
}

}  // namespace

bool can_attend(const ggml_tensor& node) {
  if (node.op != GGML_OP_FLASH_ATTN_EXT) return false;
  const ggml_tensor &q = *node.src[0], &k = *node.src[1], &v = *node.src[2];
  const ggml_tensor *mask = node.src[3], *sinks = node.src[4];
  const Params params = params_of(node);
  const bool types_fit = is_plain(q.type) && dtype_of(k.type) != 0 && dtype_of(v.type) != 0 && node.type == GGML_TYPE_F32;
  const bool shapes_fit = k.ne[2] == v.ne[2] && k.ne[1] == v.ne[1] && k.ne[3] == q.ne[3] && v.ne[3] == q.ne[3] &&
                          q.ne[2] % k.ne[2] == 0 && k.ne[1] > 0 && q.ne[1] > 0;
  const bool params_fit = params.scale > 0.0f && std::isfinite(params.scale) && params.soft_cap >= 0.0f &&
                          std::isfinite(params.soft_cap) && (params.max_bias <= 0.0f || mask != nullptr);
  return types_fit && shapes_fit && params_fit && has_rows(q) && has_rows(k) && has_rows(v) && has_rows(node) &&
         (mask == nullptr || is_mask(*mask, q, k)) &&
         (sinks == nullptr || (sinks->type == GGML_TYPE_F32 && sinks->nb[0] == sizeof(float))) &&
         has_kernels(q.ne[2], k.ne[2], k.ne[0], v.ne[0]);
}

AttendNode::AttendNode(const ggml_tensor& node) {
  const ggml_tensor &q = *node.src[0], &k = *node.src[1], *mask = node.src[3], *sinks = node.src[4];
  const Params params = params_of(node);
  q_ = view_of(q, 1, 2);
  k_ = view_of(k, 1, 2);
  v_ = view_of(*node.src[2], 1, 2);
  o_ = view_of(node, 2, 1);
  if (mask != nullptr) {
    mask_ = view_of(*mask, 2, 1);  // [streams, heads, tokens, keys]
    mask_.shape[2] = q.ne[1];      // further rows and columns are padding
    mask_.shape[3] = k.ne[1];
    args_.mask = &mask_;
  }
  slopes_ = alibi_slopes(params.max_bias, q.ne[2]);
  args_.sm_scale = params.scale;
  args_.soft_cap = params.soft_cap;
  args_.alibi_slopes = slopes_.empty() ? nullptr : slopes_.data();
  args_.sinks = sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data);
  args_.q = &q_;
  args_.k = &k_;
  args_.v = &v_;
  args_.o = &o_;
}

}  // namespace tandem_ggml_module
