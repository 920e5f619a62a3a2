// SPDX-License-Identifier: MIT
// Buffers in which a session with the route "recompute" rebuilds keys.
#include <algorithm>
#include <chrono>

#include "lib/machine/device_status.h"
#include "lib/pieces/rebuilt_pieces.h"

namespace tandem {
namespace {

struct RebuildBytes {
  int64_t x = 0, pages = 0, workspace = 0;

  RebuildBytes(const Device& device, const std::vector<Layer>& layers, std::span<const RebuildLayout> layouts) {
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
                                 std::span<const RebuildLayout> layouts) {
  const RebuildBytes bytes(device, layers, layouts);
  return kBuffers * bytes.x + kLanes * (bytes.pages + bytes.workspace);
}

Status RebuildBuffers::create(const Device& device, Tier& tier, const std::vector<Layer>& layers,
                              const std::vector<RebuildLayout>& layouts, std::unique_ptr<RebuildBuffers>* buffers) {
  const RebuildBytes bytes(device, layers, layouts);
  std::unique_ptr<RebuildBuffers> made(new RebuildBuffers(device));
  TANDEM_TRY(StreamBuffers::create(device, tier, bytes.x, kBuffers, &made->x_));
  TANDEM_TRY(Buffer::create(tier, kLanes * (bytes.pages + bytes.workspace), Use::kStream, &made->memory_));
  made->lane_bytes_ = bytes.pages + bytes.workspace;
  made->workspace_at_ = bytes.pages;
  for (Lane& lane : made->lanes_) {
    TANDEM_TRY(call_device(device, &DeviceTable::create_event, &lane.freed));
    TANDEM_TRY(SideStream::create(device, &lane.side));
  }
  *buffers = std::move(made);
  return {};
}

RebuildBuffers::~RebuildBuffers() {
  for (Lane& lane : lanes_) {
    lane.side.reset();
    if (lane.freed != nullptr) device_.table->destroy_event(device_.self, lane.freed);
  }
}

Status RebuildBuffers::fork() {
  for (int64_t i = 1; i < kLanes; ++i) TANDEM_TRY(lanes_[i].side->fork(first_stream()));
  return {};
}

Status RebuildBuffers::join() {
  for (int64_t i = 1; i < kLanes; ++i) TANDEM_TRY(lanes_[i].side->join(first_stream()));
  return {};
}

Status RebuildBuffers::take_pages_back(void* stream) {
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, lanes_[lane_idx()].freed, stream));
  ++n_pieces_;
  return {};
}

DeviceRebuild RebuildBuffers::call_of(const Layer& layer, const RebuildLayout& layout,
                                      const DeviceProjection& projection) const {
  DeviceRebuild call;
  call.layer = &layer;
  call.projection = projection;
  call.pages = layout.pages(pages(), RebuildLayout::kPageLen);
  call.page_bytes = layout.page_bytes;
  call.workspace = pages() + workspace_at_;
  return call;
}

Status RebuildBuffers::measure(const Layer& layer, const RebuildLayout& layout, const DeviceProjection& projection,
                               double* ns) {
  constexpr int64_t kRounds = 4;
  TANDEM_TRY(put_numbers(layer, layout));
  std::chrono::steady_clock::time_point begin;
  for (int64_t i = 0; i <= kRounds; ++i) {  // the first round is not counted
    for (int64_t l = 0; l < kLanes; ++l) {
      DeviceRebuild rebuild = call_of(layer, layout, projection);
      rebuild.x = x_->next();
      rebuild.n_rows = layout.n_rows();
      rebuild.page_positions = reinterpret_cast<const int64_t*>(x_->next() + layout.positions_at());
      TANDEM_TRY(call_device(device_, &DeviceTable::rebuild, &rebuild, stream()));
      ++n_pieces_;
    }
    if (i > 0 && i < kRounds) continue;
    for (const Lane& lane : lanes_) TANDEM_TRY(call_device(device_, &DeviceTable::wait, lane.side->get()));
    if (i == 0) begin = std::chrono::steady_clock::now();
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
  *ns = spent.count() / static_cast<double>(kRounds * kLanes * layout.n_rows());
  return {};
}

// Fills the buffer with realistic hidden states, as products of equal numbers take less time. A word is a number, codes of
// any value, or a scale.
Status RebuildBuffers::put_numbers(const Layer& layer, const RebuildLayout& layout) {
  void* const stream = nullptr;
  std::vector<uint16_t> x(static_cast<size_t>(layout.n_rows() * layout.x_bytes / 2));
  uint32_t state = 1;
  const bool is_coded = find_dtype(layer.x_type)->group > 0;
  const auto row_words = static_cast<size_t>(layout.x_bytes / 2), n_codes = static_cast<size_t>(layer.x_code_bytes() / 2);
  for (size_t i = 0; i < x.size(); ++i) {
    state = state * 1664525 + 1013904223;
    x[i] = static_cast<uint16_t>(state >> 16);
    if (!is_coded || i % row_words >= n_codes) x[i] = static_cast<uint16_t>(0x3e00 | (x[i] & 0x81ff));  // up to 2 in 16 bits
  }
  TANDEM_TRY(call_device(device_, &DeviceTable::copy, x_->next(), x.data(), layout.n_rows() * layout.x_bytes, stream));
  if (layer.projection->rope != nullptr)
    TANDEM_TRY(call_device(device_, &DeviceTable::fill, x_->next() + layout.positions_at(), 0, layout.n_pages * 8, stream));
  return call_device(device_, &DeviceTable::wait, stream);
}

void RebuildBuffers::settle(void* stream) {
  x_->settle(stream);
  for (const Lane& lane : lanes_) lane.side->settle();
}

}  // namespace tandem
