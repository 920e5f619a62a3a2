// SPDX-License-Identifier: MIT
#include "lib/store/cache_options.h"

#include <string>
#include <utility>

#include "lib/base/options.h"
#include "lib/model/dtype.h"
#include "lib/model/hadamard.h"

namespace tandem {
namespace {

Status check_storage_type(const std::string& name, int32_t type) {
  if (find_dtype(type) != nullptr) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, name.c_str(), "%s = %d is not a storage type (%s)", name.c_str(), type,
              key_type_names());
}

Status check_key_type(const std::string& name, int32_t type) {
  TANDEM_TRY(check_storage_type(name, type));
  if (is_key_type(type)) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, name.c_str(), "%s = %d (%s): keys and values are stored as %s", name.c_str(), type,
              find_dtype(type)->name, key_type_names());
}

// Returns the rotation that TANDEM_ROTATION_DEFAULT means in a layer whose types are known. A layer that keeps hidden states
// is not rotated: they are for route "recompute", which makes keys as they were before a rotation.
int32_t default_rotation(const Layer& layer, int32_t x_type) {
  const bool can_rotate = hadamard_has(layer.k_head_dim) && layer.rope == nullptr && !layer.v_aliases_k;
  const bool keeps_hidden = x_type != 0 && layer.projection != nullptr;
  return layer.k_type == TANDEM_Q4_0 && can_rotate && !keeps_hidden ? TANDEM_ROTATION_HADAMARD : TANDEM_ROTATION_NONE;
}

Status check_rotation(const Layer& layer, size_t l) {
  constexpr const char* kName = "k_rotation";
  if (layer.k_rotation == TANDEM_ROTATION_NONE) return {};
  if (layer.k_rotation != TANDEM_ROTATION_HADAMARD)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, kName, "k_rotation = %d is not a TANDEM_ROTATION_ value (layer %zu)",
                layer.k_rotation, l);
  const auto refuse = [&](const char* why) {
    return fail(TANDEM_ERROR_UNSUPPORTED, kName, "k_rotation = %d, but %s (layer %zu)", layer.k_rotation, why, l);
  };
  if (!hadamard_has(layer.k_head_dim))
    return refuse(("k_head_dim = " + std::to_string(layer.k_head_dim) + " is not a power of two").c_str());
  if (layer.rope != nullptr)
    return refuse("the library applies RoPE at attend time: keys would be rotated before it, not after");
  if (layer.v_aliases_k) return refuse("V aliases K and would be rotated with it");
  return {};
}

// Sets the type of hidden states in layers that have a projection.
Status resolve_x_type(int32_t x_type, std::vector<Layer>* layers) {
  if (x_type == 0) return {};
  TANDEM_TRY(check_storage_type("x_type", x_type));
  const DtypeInfo& info = *find_dtype(x_type);
  if (!is_hidden_type(info))
    return fail(TANDEM_ERROR_UNSUPPORTED, "x_type",
                "x_type = %d (%s): hidden states are kept as f16, bf16, q8_0, q4_0 or q4_64", x_type, info.name);
  bool is_any = false;
  for (size_t l = 0; l < layers->size(); ++l) {
    Layer& layer = (*layers)[l];
    if (layer.projection == nullptr) continue;
    layer.x_type = x_type;
    if (info.group > 0 && layer.hidden_dim() % kHiddenUnit != 0)
      return fail(TANDEM_ERROR_UNSUPPORTED, "x_type",
                  "x_type = %d (%s), but hidden_dim = %d is not a multiple of %d (layer %zu)", x_type, info.name,
                  layer.hidden_dim(), kHiddenUnit, l);
    is_any = true;
  }
  if (is_any) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "x_type", "x_type = %d (%s), but no layer has a projection", x_type,
              find_dtype(x_type)->name);
}

}  // namespace

Status resolve_cache_options(const tandem_cache_options& options, std::vector<Layer>* layers, int64_t* page_len) {
  *page_len = options.page_tokens == 0 ? 128 : options.page_tokens;
  if (*page_len < 16 || *page_len > 4096 || (*page_len & (*page_len - 1)) != 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "page_tokens", "page_tokens = %d is not a power of two from 16 to 4096",
                options.page_tokens);
  for (const auto& [name, bytes] :
       {std::pair{"host_cap_bytes", options.host_cap_bytes}, std::pair{"device_cap_bytes", options.device_cap_bytes}})
    if (bytes < 0)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, name, "%s = %lld is negative", name, static_cast<long long>(bytes));
  TANDEM_TRY(require_aligned(options.layer_k_types, "layer_k_types"));
  TANDEM_TRY(require_aligned(options.layer_v_types, "layer_v_types"));
  const int32_t k_type = options.k_type == 0 ? TANDEM_BF16 : options.k_type;
  const int32_t v_type = options.v_type == 0 ? k_type : options.v_type;
  for (size_t l = 0; l < layers->size(); ++l) {
    Layer& layer = (*layers)[l];
    layer.k_type = options.layer_k_types != nullptr ? options.layer_k_types[l] : k_type;
    layer.v_type = options.layer_v_types != nullptr ? options.layer_v_types[l] : options.v_type == 0 ? layer.k_type : v_type;
    const std::string k_name = options.layer_k_types != nullptr ? element_name("layer_k_types", l) : "k_type";
    const std::string v_name = options.layer_v_types != nullptr ? element_name("layer_v_types", l) : "v_type";
    TANDEM_TRY(check_key_type(k_name, layer.k_type));
    TANDEM_TRY(check_key_type(v_name, layer.v_type));
    if (layer.v_aliases_k && layer.v_type != layer.k_type)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, v_name.c_str(),
                  "%s = %s differs from %s = %s where V aliases K (layer %zu)", v_name.c_str(),
                  find_dtype(layer.v_type)->name, k_name.c_str(), find_dtype(layer.k_type)->name, l);
    layer.k_rotation = options.k_rotation;
    if (layer.k_rotation == TANDEM_ROTATION_DEFAULT) layer.k_rotation = default_rotation(layer, options.x_type);
    TANDEM_TRY(check_rotation(layer, l));
  }
  return resolve_x_type(options.x_type, layers);
}

}  // namespace tandem
