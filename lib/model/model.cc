// SPDX-License-Identifier: MIT
#include "lib/model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

#include "lib/base/layer_refusal.h"
#include "lib/base/options.h"

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr int32_t kHeadDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr int32_t kLatentKDim = 576, kLatentVDim = 512;  // MLA: V is the latent part of K, the other 64 dims carry RoPE
constexpr int32_t kMaxHeads = 65536;
constexpr int64_t kMaxLayers = 65536;
constexpr double kDefaultTheta = 10000.0;

double or_default(double value, double otherwise) { return value == 0.0 ? otherwise : value; }

int32_t v_dim_of(const tandem_layer_options& layer) { return layer.v_head_dim == 0 ? layer.k_head_dim : layer.v_head_dim; }
int32_t rope_dims_of(const tandem_layer_options& layer) { return layer.rope_dims == 0 ? layer.k_head_dim : layer.rope_dims; }

Status check_heads(const tandem_layer_options& l, const LayerRefusal& refuse) {
  if (l.n_q_heads < 1 || l.n_q_heads > kMaxHeads)
    return refuse(kInvalid, "n_q_heads", "%d is not from 1 to %d", l.n_q_heads, kMaxHeads);
  if (l.n_kv_heads < 1 || l.n_kv_heads > kMaxHeads)
    return refuse(kInvalid, "n_kv_heads", "%d is not from 1 to %d", l.n_kv_heads, kMaxHeads);
  if (l.n_q_heads % l.n_kv_heads != 0)
    return refuse(kInvalid, "n_q_heads", "%d is not a multiple of n_kv_heads = %d", l.n_q_heads, l.n_kv_heads);
  return {};
}

Status check_head_dim(int32_t head_dim, const char* member, const LayerRefusal& refuse) {
  if (head_dim < 1) return refuse(kInvalid, member, "%d is not positive", head_dim);
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), head_dim) == std::end(kHeadDims))
    return refuse(TANDEM_ERROR_UNSUPPORTED, member, "%d has no kernels (64, 80, 96, 112, 128, 192, 256 have)", head_dim);
  return {};
}

Status check_dims(const tandem_layer_options& l, const LayerRefusal& refuse) {
  if (l.v_aliases_k != 0 && l.v_aliases_k != 1) return refuse(kInvalid, "v_aliases_k", "%d is not 0 or 1", l.v_aliases_k);
  if (l.v_head_dim < 0) return refuse(kInvalid, "v_head_dim", "%d is negative", l.v_head_dim);
  const int32_t v_dim = v_dim_of(l);
  if (l.v_aliases_k == 1 && v_dim > l.k_head_dim)
    return refuse(kInvalid, "v_head_dim", "%d is more than k_head_dim = %d, but V aliases K", v_dim, l.k_head_dim);
  if (l.k_head_dim == kLatentKDim) {
    if (v_dim == kLatentVDim && l.v_aliases_k == 1) return {};
    return refuse(TANDEM_ERROR_UNSUPPORTED, "k_head_dim",
                  "576 has kernels with v_head_dim = 512 and v_aliases_k = 1 (MLA), not with %d and %d", v_dim,
                  l.v_aliases_k);
  }
  TANDEM_TRY(check_head_dim(l.k_head_dim, "k_head_dim", refuse));
  return check_head_dim(v_dim, "v_head_dim", refuse);
}

Status check_logits(const tandem_layer_options& l, const LayerRefusal& refuse) {
  if (!(l.sm_scale >= 0.0f) || std::isinf(l.sm_scale))
    return refuse(kInvalid, "sm_scale", "%g must be finite and at least 0", static_cast<double>(l.sm_scale));
  if (!(l.soft_cap >= 0.0f) || std::isinf(l.soft_cap) || (l.soft_cap > 0.0f && std::isinf(1.0f / l.soft_cap)))
    return refuse(kInvalid, "soft_cap", "%g is not 0 or a positive number whose inverse is finite too",
                  static_cast<double>(l.soft_cap));
  if (l.sliding_window_tokens < 0)
    return refuse(kInvalid, "sliding_window_tokens", "%lld is negative", static_cast<long long>(l.sliding_window_tokens));
  TANDEM_TRY(refuse.misaligned(l.sinks, "sinks"));
  for (int32_t head = 0; l.sinks != nullptr && head < l.n_q_heads; ++head) {
    const float sink = l.sinks[head];
    if (std::isnan(sink) || sink == INFINITY) {
      const std::string member = element_name("sinks", head);
      return refuse(kInvalid, member.c_str(), "%g is not a logit", static_cast<double>(sink));
    }
  }
  return {};
}

Status check_positive(double value, const char* member, const LayerRefusal& refuse) {
  if (value >= 0.0 && !std::isinf(value)) return {};
  return refuse(kInvalid, member, "%g is not finite and positive (0: the default)", value);
}

// The numbers are checked even if the caller rotates keys: a NaN here is a mistake in either case.
Status check_rope(const tandem_layer_options& l, const LayerRefusal& refuse) {
  if (l.rope < TANDEM_ROPE_CALLER || l.rope > TANDEM_ROPE_INTERLEAVED)
    return refuse(kInvalid, "rope", "%d is not a TANDEM_ROPE_ value", l.rope);
  if (l.rope_dims < 0 || l.rope_dims > l.k_head_dim || l.rope_dims % 2 != 0)
    return refuse(kInvalid, "rope_dims", "%d is not even and from 0 to k_head_dim = %d", l.rope_dims, l.k_head_dim);
  TANDEM_TRY(refuse.misaligned(l.rope_inv_freq, "rope_inv_freq"));
  TANDEM_TRY(check_positive(l.rope_theta, "rope_theta", refuse));
  TANDEM_TRY(check_positive(l.rope_position_scale, "rope_position_scale", refuse));
  TANDEM_TRY(check_positive(l.rope_attn_factor, "rope_attn_factor", refuse));
  if (l.rope == TANDEM_ROPE_CALLER && projected_rope(l) == 0) return {};
  if (l.k_head_dim == kLatentKDim)
    return refuse(
        TANDEM_ERROR_UNSUPPORTED, "rope",
        "%d rotates the first dims of a key, MLA's k_head_dim = 576 has RoPE in its last 64: rotate them before the "
        "append (TANDEM_ROPE_CALLER)",
        l.rope);
  const auto factor = static_cast<float>(or_default(l.rope_attn_factor, 1.0));
  if (!(factor > 0.0f) || std::isinf(factor))
    return refuse(kInvalid, "rope_attn_factor", "%g is not an f32 number", l.rope_attn_factor);
  const double scale = or_default(l.rope_position_scale, 1.0);
  for (int32_t i = 0; i < rope_dims_of(l) / 2; ++i) {
    const double frequency = l.rope_inv_freq != nullptr
                                 ? static_cast<double>(l.rope_inv_freq[i])
                                 : std::pow(or_default(l.rope_theta, kDefaultTheta), -2.0 * i / rope_dims_of(l));
    if (std::isfinite(frequency / scale * 0x1p32)) continue;
    if (l.rope_inv_freq == nullptr)
      return refuse(kInvalid, "rope_theta", "%g with rope_position_scale = %g makes angles infinite", l.rope_theta, scale);
    const std::string member = element_name("rope_inv_freq", i);
    return refuse(kInvalid, member.c_str(), "%g makes angles that are not finite", frequency);
  }
  return {};
}

// Returns radians per position for each pair.
std::vector<double> rope_frequencies(const tandem_layer_options& l) {
  const int32_t dims = rope_dims_of(l);
  const double scale = or_default(l.rope_position_scale, 1.0);
  std::vector<double> inv_freq(static_cast<size_t>(dims / 2));
  for (int32_t i = 0; i < dims / 2; ++i) {
    const double frequency = l.rope_inv_freq != nullptr ? static_cast<double>(l.rope_inv_freq[i])
                                                        : std::pow(or_default(l.rope_theta, kDefaultTheta), -2.0 * i / dims);
    inv_freq[static_cast<size_t>(i)] = frequency / scale;
  }
  return inv_freq;
}

}  // namespace

Layer resolve_layer(const tandem_layer_options& l) {
  Layer layer;
  layer.n_q_heads = l.n_q_heads;
  layer.n_kv_heads = l.n_kv_heads;
  layer.group_size = l.n_q_heads / l.n_kv_heads;
  layer.k_head_dim = l.k_head_dim;
  layer.v_head_dim = v_dim_of(l);
  layer.v_aliases_k = l.v_aliases_k == 1;
  layer.sm_scale = l.sm_scale == 0.0f ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(l.k_head_dim))) : l.sm_scale;
  layer.soft_cap = l.soft_cap;
  layer.sliding_window = l.sliding_window_tokens;
  return layer;
}

Status check_layer(const tandem_layer_options& layer, const LayerRefusal& refuse) {
  TANDEM_TRY(check_heads(layer, refuse));
  TANDEM_TRY(check_dims(layer, refuse));
  TANDEM_TRY(check_logits(layer, refuse));
  TANDEM_TRY(check_projection(layer, refuse));
  return check_rope(layer, refuse);
}

// Makes one table for each distinct description.
const RopeTable* Model::angles(const tandem_layer_options& options, int32_t rope) {
  const bool is_interleaved = rope == TANDEM_ROPE_INTERLEAVED;
  const auto factor = static_cast<float>(or_default(options.rope_attn_factor, 1.0));
  std::tuple description(is_interleaved, factor, rope_frequencies(options));
  const RopeTable*& table = tables_[description];
  if (table == nullptr) {
    const std::vector<double>& inv_freq = std::get<2>(description);
    rope_tables_.push_back(std::make_unique<RopeTable>(
        make_rope_table(inv_freq.data(), static_cast<int32_t>(inv_freq.size()), is_interleaved, factor)));
    table = rope_tables_.back().get();
  }
  return table;
}

Status Model::create(const std::vector<tandem_layer_options>& layers, std::shared_ptr<const Model>* model) {
  const auto n_layers = static_cast<int64_t>(layers.size());
  if (n_layers < 1 || n_layers > kMaxLayers)
    return fail(kInvalid, "n_layers", "n_layers = %lld is not from 1 to %lld", static_cast<long long>(n_layers),
                static_cast<long long>(kMaxLayers));
  for (int64_t i = 0; i < n_layers; ++i) TANDEM_TRY(check_layer(layers[static_cast<size_t>(i)], LayerRefusal(i)));

  auto made = std::make_shared<Model>();
  made->layers_.reserve(layers.size());
  made->sinks_.resize(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const tandem_layer_options& options = layers[i];
    Layer layer = resolve_layer(options);
    if (options.sinks != nullptr) {
      made->sinks_[i].resize(static_cast<size_t>(options.n_q_heads));
      std::memcpy(made->sinks_[i].data(), options.sinks, made->sinks_[i].size() * sizeof(float));
      layer.sinks = made->sinks_[i].data();
    }
    const int32_t projected = projected_rope(options);
    if (options.rope != TANDEM_ROPE_CALLER) layer.rope = made->angles(options, options.rope);
    if (options.projection != nullptr) {
      const RopeTable* rope = projected != 0 ? made->angles(options, projected) : nullptr;
      made->projections_.push_back(own_projection(options, rope));
      layer.projection = &made->projections_.back()->plain;
    }
    made->layers_.push_back(layer);
  }
  *model = std::move(made);
  return {};
}

}  // namespace tandem
