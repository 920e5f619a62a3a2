// SPDX-License-Identifier: MIT
// What the route "recompute" has on the device.
#include <algorithm>
#include <chrono>

#include "lib/device_status.h"
#include "lib/routes/recompute.h"

namespace tandem {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The parts of a layer's projection, one behind the other in device memory.
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
  for (const PartOfProjection& part : parts_of(layer, &ignored)) bytes += aligned(part.bytes);
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
  to->projection.w_k = p.w_k;  // the caller's, where they are there already
  to->projection.w_v = p.w_v;
  if (const int64_t bytes = projection_bytes(layer); bytes > 0)
    TANDEM_TRY(Buffer::create(tier, bytes, Use::kWeights, &to->memory));
  int64_t at = 0;
  for (const PartOfProjection& part : parts_of(layer, &to->projection)) {
    std::byte* const data = to->memory.data() + at;
    TANDEM_TRY(copy_and_wait(device, data, part.from, part.bytes));
    *part.to = data;
    at += aligned(part.bytes);
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

namespace {

struct RebuildBytes {
  int64_t x = 0, pages = 0, workspace = 0;

  RebuildBytes(const Device& device, const std::vector<Layer>& layers, const std::vector<RebuildLayout>& layouts) {
    for (size_t l = 0; l < layers.size(); ++l) {
      const int64_t positions = layers[l].projection->rope != nullptr ? aligned(layouts[l].n_pages * 8) : 0;
      x = std::max(x, layouts[l].positions_at() + positions);
      pages = std::max(pages, aligned(layouts[l].n_pages * layouts[l].page_bytes));
      workspace = std::max(workspace, aligned(device.table->rebuild_bytes(device.self, &layers[l], layouts[l].n_rows())));
    }
  }
};

}  // namespace

int64_t RebuildBuffers::bytes_of(const Device& device, const std::vector<Layer>& layers,
                                 const std::vector<RebuildLayout>& layouts) {
  const RebuildBytes bytes(device, layers, layouts);
  return StreamBuffers::kBuffers * bytes.x + bytes.pages + bytes.workspace;
}

Status RebuildBuffers::create(const Device& device, Tier& tier, const std::vector<Layer>& layers,
                              const std::vector<RebuildLayout>& layouts, std::unique_ptr<RebuildBuffers>* buffers) {
  const RebuildBytes bytes(device, layers, layouts);
  std::unique_ptr<RebuildBuffers> made(new RebuildBuffers(device));
  TANDEM_TRY(StreamBuffers::create(device, tier, bytes.x, &made->x_));
  TANDEM_TRY(Buffer::create(tier, bytes.pages + bytes.workspace, Use::kStream, &made->memory_));
  made->workspace_at_ = bytes.pages;
  TANDEM_TRY(SideStream::create(device, &made->side_));
  *buffers = std::move(made);
  return {};
}

Status RebuildBuffers::measure(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection,
                               double* ns) {
  constexpr int kRounds = 3;
  void* const stream = nullptr;
  std::byte* const positions = x_->next() + layout.positions_at();
  if (layer.projection->rope != nullptr)
    TANDEM_TRY(call_device(device_, &DeviceTable::fill, positions, 0, layout.n_pages * 8, stream));
  DeviceRebuild rebuild;
  rebuild.layer = &layer;
  rebuild.projection = projection;
  rebuild.x = x_->next();
  rebuild.n_rows = layout.n_rows();
  rebuild.pages = pages_of(layout, pages());
  rebuild.page_bytes = layout.page_bytes;
  rebuild.page_positions = reinterpret_cast<const int64_t*>(positions);
  rebuild.workspace = workspace();
  TANDEM_TRY(call_device(device_, &DeviceTable::fill, x_->next(), 0, layout.n_rows() * layout.x_bytes, stream));
  std::chrono::steady_clock::time_point begin;
  for (int i = 0; i <= kRounds; ++i) {  // the first is not counted
    TANDEM_TRY(call_device(device_, &DeviceTable::rebuild, &rebuild, stream));
    if (i > 0) continue;
    TANDEM_TRY(call_device(device_, &DeviceTable::wait, stream));
    begin = std::chrono::steady_clock::now();
  }
  TANDEM_TRY(call_device(device_, &DeviceTable::wait, stream));
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
  *ns = spent.count() / static_cast<double>(kRounds * layout.n_rows());
  return {};
}

void RebuildBuffers::settle(void* stream) {
  x_->settle(stream);
  side_->settle();
}

}  // namespace tandem
