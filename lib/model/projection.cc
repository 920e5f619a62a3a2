// SPDX-License-Identifier: MIT
#include "lib/model/projection.h"

#include <cmath>

#include "lib/base/layer_refusal.h"
#include "lib/base/options.h"
#include "lib/model/dtype.h"

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr int32_t kUnit = 8, kMostDims = 65536;
constexpr float kDefaultEps = 1e-5f;

struct Lengths {
  int64_t k, v, x;

  explicit Lengths(const tandem_layer_options& l, const tandem_layer_projection& p)
      : k(int64_t{l.n_kv_heads} * l.k_head_dim),
        v(int64_t{l.n_kv_heads} * (l.v_head_dim == 0 ? l.k_head_dim : l.v_head_dim)),
        x(p.hidden_dim) {}
};

Status check_weights(const tandem_layer_projection& p, const LayerRefusal& refuse) {
  if (p.hidden_dim < kUnit || p.hidden_dim > kMostDims || p.hidden_dim % kUnit != 0)
    return refuse(kInvalid, "projection.hidden_dim", "%d is not a multiple of %d from %d to %d", p.hidden_dim, kUnit, kUnit,
                  kMostDims);
  if (find_dtype(p.w_type) == nullptr) return refuse(kInvalid, "projection.w_type", "%d is not an element type", p.w_type);
  if (p.w_type != TANDEM_F16 && p.w_type != TANDEM_BF16)
    return refuse(TANDEM_ERROR_UNSUPPORTED, "projection.w_type", "%d (%s): products are of numbers in f16 or bf16", p.w_type,
                  find_dtype(p.w_type)->name);
  if (p.w_order != TANDEM_WEIGHTS_IN_OUT && p.w_order != TANDEM_WEIGHTS_OUT_IN)
    return refuse(kInvalid, "projection.w_order", "%d is not a TANDEM_WEIGHTS_ value", p.w_order);
  if (p.device_type != TANDEM_DEVICE_HOST && p.device_type != TANDEM_DEVICE_CUDA)
    return refuse(kInvalid, "projection.device_type", "%d is not a TANDEM_DEVICE_ value", p.device_type);
  if (p.w_k == nullptr && p.w_v == nullptr) return {};  // sessions are told where the weights are
  for (const auto& [name, w] : {std::pair{"projection.w_k", p.w_k}, std::pair{"projection.w_v", p.w_v}}) {
    if (w == nullptr) return refuse(kInvalid, name, "NULL, but the other is given: both are, or none");
    if (p.device_type == TANDEM_DEVICE_CUDA && reinterpret_cast<uintptr_t>(w) % 16 != 0)
      return refuse(kInvalid, name, "%p is not a multiple of 16", w);
  }
  return {};
}

Status check_alignment(const tandem_layer_projection& p, const LayerRefusal& refuse) {
  TANDEM_TRY(refuse.misaligned(p.b_k, "projection.b_k"));
  TANDEM_TRY(refuse.misaligned(p.b_v, "projection.b_v"));
  TANDEM_TRY(refuse.misaligned(p.norm_weight, "projection.norm_weight"));
  return refuse.misaligned(p.norm_bias, "projection.norm_bias");
}

Status check_norm(const tandem_layer_projection& p, const LayerRefusal& refuse) {
  if (p.norm < TANDEM_NORM_NONE || p.norm > TANDEM_NORM_LAYER)
    return refuse(kInvalid, "projection.norm", "%d is not a TANDEM_NORM_ value", p.norm);
  if (!(p.norm_eps >= 0.0f) || std::isinf(p.norm_eps))
    return refuse(kInvalid, "projection.norm_eps", "%g must be finite and at least 0", static_cast<double>(p.norm_eps));
  if (p.norm_weight != nullptr && p.norm == TANDEM_NORM_NONE)
    return refuse(kInvalid, "projection.norm_weight", "%p without a norm", static_cast<const void*>(p.norm_weight));
  if (p.norm_bias != nullptr && p.norm != TANDEM_NORM_LAYER)
    return refuse(kInvalid, "projection.norm_bias", "%p without TANDEM_NORM_LAYER", static_cast<const void*>(p.norm_bias));
  return {};
}

template <typename T>
void copy_bytes(const void* from, int64_t n, std::vector<T>* to, const T** at) {
  if (from == nullptr) return;
  const auto* first = static_cast<const std::byte*>(from);
  to->resize(static_cast<size_t>(n));
  std::copy(first, first + n * static_cast<int64_t>(sizeof(T)), reinterpret_cast<std::byte*>(to->data()));
  *at = to->data();
}

}  // namespace

Status check_projection(const tandem_layer_options& layer, const LayerRefusal& refuse) {
  if (layer.projection == nullptr) return {};
  tandem_layer_projection p;
  TANDEM_TRY(copy_in(layer.projection, (std::string(refuse.prefix()) + "projection.").c_str(), &p));
  if (layer.v_aliases_k == 1)
    return refuse(TANDEM_ERROR_UNSUPPORTED, "projection", "%p, but V aliases K: MLA's latents are not made again",
                  static_cast<const void*>(layer.projection));
  TANDEM_TRY(check_weights(p, refuse));
  TANDEM_TRY(check_alignment(p, refuse));
  TANDEM_TRY(check_norm(p, refuse));
  if (p.k_rope != 0 && p.k_rope != TANDEM_ROPE_HALVES && p.k_rope != TANDEM_ROPE_INTERLEAVED)
    return refuse(kInvalid, "projection.k_rope", "%d is not TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED or 0", p.k_rope);
  if (p.k_rope != 0 && layer.rope != TANDEM_ROPE_CALLER)
    return refuse(kInvalid, "projection.k_rope", "%d, but rope = %d: the library rotates the keys of this layer", p.k_rope,
                  layer.rope);
  return {};
}

std::unique_ptr<OwnedProjection> own_projection(const tandem_layer_options& layer, const RopeTable* rope) {
  tandem_layer_projection p;
  if (!copy_in(layer.projection, "", &p).ok()) return nullptr;  // checked before
  const Lengths n(layer, p);
  auto made = std::make_unique<OwnedProjection>();
  Projection& plain = made->plain;
  plain.hidden_dim = p.hidden_dim;
  plain.w_type = p.w_type;
  plain.is_out_by_in = p.w_order == TANDEM_WEIGHTS_OUT_IN;
  plain.is_on_device = p.device_type == TANDEM_DEVICE_CUDA;
  plain.norm = p.norm;
  plain.norm_eps = p.norm_eps == 0.0f ? kDefaultEps : p.norm_eps;
  plain.rope = rope;
  plain.w_k = p.w_k;
  plain.w_v = p.w_v;
  if (!plain.is_on_device) {
    const uint16_t* at = nullptr;
    copy_bytes(p.w_k, n.k * n.x, &made->w_k, &at);
    plain.w_k = at;
    copy_bytes(p.w_v, n.v * n.x, &made->w_v, &at);
    plain.w_v = at;
  }
  copy_bytes(p.b_k, n.k, &made->b_k, &plain.b_k);
  copy_bytes(p.b_v, n.v, &made->b_v, &plain.b_v);
  copy_bytes(p.norm_weight, n.x, &made->norm_weight, &plain.norm_weight);
  copy_bytes(p.norm_bias, n.x, &made->norm_bias, &plain.norm_bias);
  return made;
}

int32_t projected_rope(const tandem_layer_options& layer) {
  tandem_layer_projection p;
  if (layer.projection == nullptr || !copy_in(layer.projection, "", &p).ok()) return TANDEM_ROPE_CALLER;
  return p.k_rope;
}

}  // namespace tandem
