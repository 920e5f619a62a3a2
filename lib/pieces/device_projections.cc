// SPDX-License-Identifier: MIT
#include "lib/pieces/device_projections.h"

#include "lib/machine/device_status.h"
#include "lib/pieces/device_window.h"

namespace tandem {
namespace {

// A part of a layer's projection. Parts lie one after another in device memory.
struct PartOfProjection {
  const void* from;
  int64_t bytes;
  const void** to;  // a member of a DeviceProjection
};

std::vector<PartOfProjection> parts_of(const Layer& layer, DeviceProjection* to) {
  const Projection& p = *layer.projection;
  const int64_t n_k = int64_t{layer.n_kv_heads} * layer.k_head_dim, n_v = int64_t{layer.n_kv_heads} * layer.v_head_dim;
  const auto vector = [](const float** member) { return reinterpret_cast<const void**>(member); };
  std::vector<PartOfProjection> parts;
  if (!p.is_on_device) {
    parts.push_back({p.w_k, 2 * n_k * p.hidden_dim, &to->w_k});
    parts.push_back({p.w_v, 2 * n_v * p.hidden_dim, &to->w_v});
  }
  parts.push_back({p.b_k, 4 * n_k, vector(&to->b_k)});
  parts.push_back({p.b_v, 4 * n_v, vector(&to->b_v)});
  parts.push_back({p.norm_weight, int64_t{4} * p.hidden_dim, vector(&to->norm_weight)});
  parts.push_back({p.norm_bias, int64_t{4} * p.hidden_dim, vector(&to->norm_bias)});
  std::erase_if(parts, [](const PartOfProjection& part) { return part.from == nullptr; });
  return parts;
}

int64_t projection_bytes(const Layer& layer) {
  DeviceProjection ignored;
  int64_t bytes = 0;
  for (const PartOfProjection& part : parts_of(layer, &ignored)) bytes += device_aligned(part.bytes);
  return bytes;
}

Status copy_and_wait(const Device& device, void* to, const void* from, int64_t bytes) {
  void* const stream = nullptr;
  TANDEM_TRY(call_device(device, &DeviceTable::copy, to, from, bytes, stream));
  return call_device(device, &DeviceTable::wait, stream);
}

}  // namespace

int64_t ProjectionsOnDevice::bytes_of(const std::vector<Layer>& layers) {
  int64_t bytes = 0;
  std::map<const RopeTable*, int64_t> angles;
  for (const Layer& layer : layers) {
    bytes += projection_bytes(layer);
    if (layer.projection->rope != nullptr) angles[layer.projection->rope] = 4 * n_floats(*layer.projection->rope);
  }
  for (const auto& [table, table_bytes] : angles) bytes += table_bytes;
  return bytes;
}

Status ProjectionsOnDevice::upload(const Device& device, Tier& tier, const Layer& layer, Uploaded* to) {
  const Projection& p = *layer.projection;
  to->projection.w_k = p.w_k;  // the caller's weights, if they are in device memory
  to->projection.w_v = p.w_v;
  if (const int64_t bytes = projection_bytes(layer); bytes > 0)
    TANDEM_TRY(Buffer::create(tier, bytes, Use::kWeights, &to->memory));
  int64_t at = 0;
  for (const PartOfProjection& part : parts_of(layer, &to->projection)) {
    std::byte* const data = to->memory.data() + at;
    TANDEM_TRY(copy_and_wait(device, data, part.from, part.bytes));
    *part.to = data;
    at += device_aligned(part.bytes);
  }
  if (p.rope == nullptr) return {};
  Buffer& angles = angles_[p.rope];
  if (angles.data() == nullptr) {
    Buffer made;
    TANDEM_TRY(Buffer::create(tier, 4 * n_floats(*p.rope), Use::kWeights, &made));
    TANDEM_TRY(copy_and_wait(device, made.data(), p.rope->cos_sin.get(), made.bytes()));
    angles.swap(made);
  }
  to->projection.rope = angles.as<float>();
  return {};
}

Status ProjectionsOnDevice::get(const Device& device, Tier& tier, const Layer& layer, const DeviceProjection** projection) {
  auto found = uploaded_.find(layer.projection);
  if (found == uploaded_.end()) {
    Uploaded made;
    TANDEM_TRY(upload(device, tier, layer, &made));
    found = uploaded_.emplace(layer.projection, std::move(made)).first;
  }
  *projection = &found->second.projection;
  return {};
}

}  // namespace tandem
