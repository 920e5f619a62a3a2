// SPDX-License-Identifier: MIT
// What a session of the route "recompute" rebuilds in.
#include <algorithm>
#include <chrono>

#include "lib/device_status.h"
#include "lib/routes/recompute.h"

namespace tandem {
namespace {

struct RebuildBytes {
  int64_t x = 0, pages = 0, workspace = 0;

  RebuildBytes(const Device& device, const std::vector<Layer>& layers, const std::vector<RebuildLayout>& layouts) {
    for (size_t l = 0; l < layers.size(); ++l) {
      const int64_t positions = layers[l].projection->rope != nullptr ? device_aligned(layouts[l].n_pages * 8) : 0;
      x = std::max(x, layouts[l].positions_at() + positions);
      pages = std::max(pages, device_aligned(layouts[l].n_pages * layouts[l].page_bytes));
      workspace =
          std::max(workspace, device_aligned(device.table->rebuild_bytes(device.self, &layers[l], layouts[l].n_rows())));
    }
  }
};

}  // namespace

int64_t RebuildBuffers::bytes_of(const Device& device, const std::vector<Layer>& layers,
                                 const std::vector<RebuildLayout>& layouts) {
  const RebuildBytes bytes(device, layers, layouts);
  return StreamBuffers::kBuffers * bytes.x + kSets * bytes.pages + bytes.workspace;
}

Status RebuildBuffers::create(const Device& device, Tier& tier, const std::vector<Layer>& layers,
                              const std::vector<RebuildLayout>& layouts, std::unique_ptr<RebuildBuffers>* buffers) {
  const RebuildBytes bytes(device, layers, layouts);
  std::unique_ptr<RebuildBuffers> made(new RebuildBuffers(device));
  TANDEM_TRY(StreamBuffers::create(device, tier, bytes.x, &made->x_));
  TANDEM_TRY(Buffer::create(tier, kSets * bytes.pages + bytes.workspace, Use::kStream, &made->memory_));
  made->set_bytes_ = bytes.pages;
  made->workspace_at_ = kSets * bytes.pages;
  for (void*& event : made->freed_) TANDEM_TRY(call_device(device, &DeviceTable::create_event, &event));
  TANDEM_TRY(SideStream::create(device, &made->side_));
  *buffers = std::move(made);
  return {};
}

RebuildBuffers::~RebuildBuffers() {
  side_.reset();
  for (void* event : freed_)
    if (event != nullptr) device_.table->destroy_event(device_.self, event);
}

Status RebuildBuffers::wait_for_pages() {
  return call_device(device_, &DeviceTable::wait_event, freed_[n_pieces_ % kSets], side_->get());
}

Status RebuildBuffers::take_pages_back(void* stream) {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, freed_[n_pieces_ % kSets], stream));
  ++n_pieces_;
  return {};
}

DeviceRebuild RebuildBuffers::call_of(const Layer& layer, const RebuildLayout& layout,
                                      const DeviceProjection& projection) const {
  DeviceRebuild call;
  call.layer = &layer;
  call.projection = projection;
  call.pages = pages_of(layout, pages());
  call.page_bytes = layout.page_bytes;
  call.workspace = memory_.data() + workspace_at_;
  return call;
}

Status RebuildBuffers::measure(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection,
                               double* ns) {
  constexpr int kRounds = 3;
  void* const stream = nullptr;
  std::byte* const positions = x_->next() + layout.positions_at();
  if (layer.projection->rope != nullptr)
    TANDEM_TRY(call_device(device_, &DeviceTable::fill, positions, 0, layout.n_pages * 8, stream));
  DeviceRebuild rebuild = call_of(layer, layout, projection);
  rebuild.x = x_->next();
  rebuild.n_rows = layout.n_rows();
  rebuild.page_positions = reinterpret_cast<const int64_t*>(positions);
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
