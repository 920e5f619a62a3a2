// SPDX-License-Identifier: MIT
// A session's memory on its device: windows of its sequences, memory that device and host share, work space of calls.
//
//   shared memory   flags | kSlots slots | uploads (descriptors on their way to the device) of tasks | of steps | flags of
//                   tasks, a byte each
//   work space      the module's words | descriptors of a call | of a step | states of the window | rotated queries |
//                   states of a piece, if keys come in pieces | area of long appends | key lists of named keys, and
//                   indices from host memory | lists of query blocks that no sequence keeps | work space of search() | work
//                   space of attend()
//
// The memory grows only when a call is larger than all before. It never grows once a call has been captured, as a graph
// holds addresses. Calls also make room for a planned step of their sequences. So a session takes the same memory with
// planned steps and without.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/call/reserve.h"
#include "lib/device/hand_over.h"
#include "lib/pieces/device_window.h"
#include "lib/pieces/side_stream.h"

namespace tandem {

class Cache;

int64_t constants_bytes(const std::vector<Layer>& layers);  // learned sinks, and angles of RoPE

struct SessionWork {
  int64_t slot_bytes = 0, upload_bytes = 0, step_bytes = 0, shared_bytes = 0;
  int64_t flags_at = 0;  // in the shared memory: [kTaskFlags], a byte for each task
  int64_t descriptors_at = 0, step_at = 0, o_at = 0, lse_at = 0, q_at = 0, part_o_at = 0, part_lse_at = 0, prefill_at = 0,
          list_keys_at = 0, granules_at = 0, sent_idx_at = 0, block_lists_at = 0, search_at = 0, workspace_at = 0;
  int64_t n_lists = 0, n_granules = 0;  // key lists of named keys
  int64_t work_bytes = 0;
};
SessionWork make_session_work(const std::vector<Layer>& layers, const Reservation& needs);
// Flags of a task in shared memory, set by the device in stream order. One for each route: all its pieces have left the
// host. kMergedFlag: the task's states are merged.
inline constexpr size_t kMergedFlag = kMostRoutes, kTaskFlags = kMostRoutes + 1;
int64_t n_tasks_of(size_t n_layers);  // at least two steps' tasks
int64_t n_steps_of(size_t n_layers);  // more steps than these tasks belong to

// UNSUPPORTED if the device could attend no call of some layer, with the module's reason and the layer's types and dims.
Status check_layers(const Device& device, const std::vector<Layer>& layers);
// Returns the layer as kernels see it in calls with several queries per sequence.
Layer windowed_layer(const Layer& layer, const Policy& policy, const PolicyOptions& options);
// Returns in *n how many queries per sequence the module's kernels take, a power of two up to kMostTicketTokens.
// UNSUPPORTED.
Status most_queries(const Device& device, const Layer& windowed, int64_t* n);

// The host's view of the memory that host and device share.
struct SharedArea {
  static constexpr int32_t kSlots = 4;
  std::byte *host, *device;  // start addresses
  const SessionWork& at;
  int64_t n_tasks, n_steps;

  std::byte* slot(uint64_t ticket) const;
  std::byte* upload(uint64_t task_idx) const;
  std::byte* step_upload(uint64_t step) const;
  // Address of a task's flag, for the host and for the device.
  uint8_t* flag(size_t kind, uint64_t task_idx) const;
  std::byte* flag_on_device(size_t kind, uint64_t task_idx) const;
  // Value of kMergedFlag once it is set. A task may end before its flag is set, so the next task in that place uses another
  // value.
  uint8_t merged_mark(uint64_t task_idx) const {
    return static_cast<uint8_t>(1 + task_idx / static_cast<uint64_t>(n_tasks) % 255);
  }
};

// Device memory of a session for the current chunk. Addresses are null as long as nothing is held.
struct WorkSpace {
  std::byte* begin;
  const SessionWork& at;

  std::byte* descriptors() const { return begin + at.descriptors_at; }
  std::byte* step_descriptors() const { return begin + at.step_at; }
  float* o() const { return floats(at.o_at); }
  float* lse() const { return floats(at.lse_at); }
  float* part_o() const { return floats(at.part_o_at); }
  float* part_lse() const { return floats(at.part_lse_at); }
  float* rotated_q() const { return floats(at.q_at); }
  std::byte* prefill_area() const { return begin + at.prefill_at; }
  DeviceKeys* list_keys() const { return reinterpret_cast<DeviceKeys*>(begin + at.list_keys_at); }
  KeyGranule* granules() const { return reinterpret_cast<KeyGranule*>(begin + at.granules_at); }
  int32_t* sent_idx() const { return reinterpret_cast<int32_t*>(begin + at.sent_idx_at); }
  std::byte* block_lists() const { return begin + at.block_lists_at; }
  void* search_space() const { return begin + at.search_at; }
  void* workspace() const { return begin + at.workspace_at; }

 private:
  float* floats(int64_t offset) const { return reinterpret_cast<float*>(begin + offset); }
};

// Layout of a step's upload and of its descriptors: sequences of each layer, key lists of each layer, page tables.
struct StepLayout {
  size_t n_layers;
  const Reservation& held;

  int64_t layer_at(size_t layer_idx) const {
    return static_cast<int64_t>(layer_idx) * held.step_sequences * static_cast<int64_t>(sizeof(DeviceSequence));
  }
  int64_t lists_at(size_t layer_idx) const {
    return layer_at(n_layers) + static_cast<int64_t>(layer_idx) * held.step_sequences * held.step_lists *
                                    static_cast<int64_t>(sizeof(DeviceKeys));
  }
  int64_t tables_at() const { return lists_at(n_layers); }
};

class DeviceSession {
 public:
  // The caller holds the cache's mutex exclusively.
  static Status create(Cache& cache, const LayerPolicies& policies, const PolicyOptions& options,
                       std::unique_ptr<DeviceSession>* session);
  ~DeviceSession();

  const Device& device() const { return device_; }
  HandOver& hand_over() { return *hand_over_; }
  const WindowGeometry& geometry() const { return geometry_; }
  // Returns the layer as kernels see it. With several queries per sequence the kernels apply the sliding window. With a
  // single query the descriptor says where the keys begin.
  const Layer& layer(size_t layer_idx, bool has_several) const {
    return has_several ? windowed_layers_[layer_idx] : plain_layers_[layer_idx];
  }
  // Returns in *n how many of the `wanted` queries per sequence the module's kernels take.
  Status most_queries(size_t layer_idx, int64_t wanted, int64_t* n);
  // Allocates memory for calls of this size. Waits for the stream if the memory has to grow. CAPACITY if it would have to
  // grow after freeze().
  Status hold(const Reservation& needs, void* stream);
  const Reservation& held() const { return held_; }
  void freeze() { is_frozen_ = true; }
  bool is_frozen() const { return is_frozen_; }
  // Resets the session after a fault that allows further calls, or after the work space has moved. The stream is idle.
  // Tickets restart at 0, in the memory whose addresses graphs hold.
  Status start_over(void* stream);
  // Like DeviceWindow::reserve(). length: at least 1.
  Status reserve_window(DeviceWindow& window, int64_t n_places, int64_t end, int64_t length);

  DeviceExchange exchange(size_t layer_idx) const;
  SharedArea shared() const;
  WorkSpace work() const { return {work_.data(), layout_}; }
  StepLayout steps() const { return {plain_layers_.size(), held_}; }
  Status reserve_side();
  SideStream* side() const { return side_.get(); }  // null until reserve_side()
  Status mark_merged(uint64_t task_idx, void* stream) const;
  // Tells the host, in stream order, that a step has ended.
  Status end_step(uint64_t step, void* stream) const;
  DevicePages pages(size_t layer_idx) const;
  // Buffer for a page of MAW on its way to the host. Allocated in advance, as rolling back must not allocate.
  std::vector<float>& maw_page() { return maw_page_; }
  // Offset in bytes from the base address, as this session's page tables hold it. Kernels never read an entry without a page
  // (0).
  int64_t page_offset(int64_t page) const { return page == 0 ? 0 : page - base_; }
  const float* sinks(size_t layer_idx) const { return constant(sinks_at_[layer_idx]); }  // device address, or null
  const float* rope(size_t layer_idx) const { return constant(rope_at_[layer_idx]); }

 private:
  DeviceSession(const Device& device, const std::vector<Layer>& layers, const LayerPolicies& policies,
                const PolicyOptions& options, Tier& device_tier);
  Status upload_constants();
  Status make_room_for_work(Status lack, int64_t bytes, void* stream, Buffer* work);
  const float* constant(int64_t at) const { return at < 0 ? nullptr : constants_.as<float>() + at; }

  const Device& device_;
  std::vector<Layer> plain_layers_, windowed_layers_;
  Tier& device_tier_;
  WindowGeometry geometry_;
  Reservation held_;
  bool is_frozen_ = false;
  SessionWork layout_;
  std::byte* shared_ = nullptr;         // host address
  std::byte* shared_device_ = nullptr;  // device address
  Buffer work_, constants_;
  std::unique_ptr<SideStream> side_;
  std::vector<int64_t> sinks_at_, rope_at_;  // [n_layers] floats in constants_; -1: none
  std::vector<int64_t> most_queries_;        // [n_layers] 0: not asked yet
  std::vector<float> maw_page_;              // [most query heads][kDevicePageLen], if MAW are kept
  int64_t base_ = 0;
  std::unique_ptr<HandOver> hand_over_;  // declared last: stops first
};

// Called before a call takes a ticket on `stream`: tickets that the side stream has yet to take come first.
inline Status join_side(const DeviceSession& device, void* stream) {
  return device.side() != nullptr ? device.side()->join_if_ahead(stream) : Status();
}

}  // namespace tandem
