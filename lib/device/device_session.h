// SPDX-License-Identifier: MIT
// What a session has on its device: windows of its sequences, memory that device and host share, work space of calls.
//
//   shared memory   flags | kSlots slots | uploads, descriptors on their way to the device: of tasks | of steps | flags of
//                   tasks, a byte each
//   work space      the module's words | descriptors of a call | of a step | states of the window | rotated queries |
//                   states of a piece, where keys come in pieces | what long appends take | key lists of named keys, and
//                   indices from host memory | lists of query blocks that no sequence keeps | what search() asks for | what
//                   attend() asks for
//
// All of it is taken when a call is larger than any before, never in between, and not at all once a call has been captured:
// a graph holds addresses. Calls make room for a planned step of their sequences, so that a session takes as much whether
// its steps are planned or not.
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
int64_t pair_totals_bytes(const Patterns& patterns);        // 0 where the host makes all key lists of head patterns

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
int64_t n_tasks_of(size_t n_layers);  // two steps' at least
int64_t n_steps_of(size_t n_layers);  // more than these tasks are of

// UNSUPPORTED where the device could attend no call of some layer, with the module's reason, the layer's types and dims.
Status check_layers(const Device& device, const std::vector<Layer>& layers);
// As kernels are told of a layer in calls of several queries a sequence.
Layer windowed_layer(const Layer& layer, const Policy& policy, const PolicyOptions& options);
// The most queries of a sequence, a power of two up to kMostTicketTokens, that the module has kernels for. UNSUPPORTED.
Status most_queries(const Device& device, const Layer& windowed, int64_t* n);

// Memory that host and device share, as the host sees it.
struct SharedArea {
  static constexpr int32_t kSlots = 4;
  std::byte *host, *device;  // where it begins
  const SessionWork& at;
  int64_t n_tasks, n_steps;

  std::byte* slot(uint64_t ticket) const;
  std::byte* upload(uint64_t task_idx) const;
  std::byte* step_upload(uint64_t step) const;
  // A flag of a task: as the host sees it, as the device does.
  uint8_t* flag(size_t kind, uint64_t task_idx) const;
  std::byte* flag_on_device(size_t kind, uint64_t task_idx) const;
  // The value of kMergedFlag once it is set. A task may end before its flag is set, so the next one there uses another
  // value.
  uint8_t merged_mark(uint64_t task_idx) const {
    return static_cast<uint8_t>(1 + task_idx / static_cast<uint64_t>(n_tasks) % 255);
  }
};

// Device memory of a session for the chunk at hand; null addresses where nothing is held yet.
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

// In a step's upload and in its descriptors: sequences of each layer, key lists of each layer, page tables.
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
  // The cache's mutex is held exclusively.
  static Status create(Cache& cache, const LayerPolicies& policies, const PolicyOptions& options,
                       std::unique_ptr<DeviceSession>* session);
  ~DeviceSession();

  const Device& device() const { return device_; }
  HandOver& hand_over() { return *hand_over_; }
  const WindowGeometry& geometry() const { return geometry_; }
  // The layer as kernels see it. For several queries a sequence they apply the sliding window; for a single query the
  // descriptor says where the keys begin.
  const Layer& layer(size_t layer_idx, bool has_several) const {
    return has_several ? windowed_layers_[layer_idx] : plain_layers_[layer_idx];
  }
  // As many as wanted, or as the module has kernels for.
  Status most_queries(size_t layer_idx, int64_t wanted, int64_t* n);
  // Allocates memory for calls of this size: waits for the stream where there was less. CAPACITY once it is frozen.
  Status hold(const Reservation& needs, void* stream);
  const Reservation& held() const { return held_; }
  void freeze() { is_frozen_ = true; }
  bool is_frozen() const { return is_frozen_; }
  // After a fault that calls may follow, or where the work space has moved; the stream is idle. Tickets begin with 0, in the
  // memory whose addresses graphs hold.
  Status start_over(void* stream);
  // As DeviceWindow::reserve(); length is 1 at least.
  Status reserve_window(DeviceWindow& window, int64_t n_places, int64_t end, int64_t length);

  DeviceExchange exchange(size_t layer_idx) const;
  SharedArea shared() const;
  WorkSpace work() const { return {work_.data(), layout_}; }
  StepLayout steps() const { return {plain_layers_.size(), held_}; }
  Status reserve_side();
  SideStream* side() const { return side_.get(); }  // null until reserve_side()
  Status mark_merged(uint64_t task_idx, void* stream) const;
  // The host sees, in the stream's order, that a step has ended.
  Status end_step(uint64_t step, void* stream) const;
  DevicePages pages(size_t layer_idx) const;
  // Room for a page of MAW on its way to the host, taken in advance: rolling back must not allocate.
  std::vector<float>& maw_page() { return maw_page_; }
  // Bytes from the page called 0: what page tables of this session hold. Of a place that has no page nobody reads it.
  int64_t page_offset(int64_t page) const { return page == 0 ? 0 : page - base_; }
  // What key lists that the device has made have named, of a layer (DevicePatterns::totals); null where it makes none.
  uint64_t* pair_totals(size_t layer_idx) const {
    return pair_totals_.data() == nullptr ? nullptr : pair_totals_.as<uint64_t>() + 2 * layer_idx;
  }
  const float* sinks(size_t layer_idx) const { return constant(sinks_at_[layer_idx]); }  // in device memory, or null
  const float* rope(size_t layer_idx) const { return constant(rope_at_[layer_idx]); }

 private:
  DeviceSession(const Device& device, const std::vector<Layer>& layers, const LayerPolicies& policies,
                const PolicyOptions& options, Tier& device_tier);
  Status upload_constants();
  Status clear_pair_totals(const Patterns& patterns);
  Status make_room_for_work(Status lack, int64_t bytes, void* stream, Buffer* work);
  const float* constant(int64_t at) const { return at < 0 ? nullptr : constants_.as<float>() + at; }

  const Device& device_;
  std::vector<Layer> plain_layers_, windowed_layers_;
  Tier& device_tier_;
  WindowGeometry geometry_;
  Reservation held_;
  bool is_frozen_ = false;
  SessionWork layout_;
  std::byte* shared_ = nullptr;         // as the host sees it
  std::byte* shared_device_ = nullptr;  // as the device does
  Buffer work_, constants_, pair_totals_;
  std::unique_ptr<SideStream> side_;
  std::vector<int64_t> sinks_at_, rope_at_;  // [n_layers] floats in constants_; -1: none
  std::vector<int64_t> most_queries_;        // [n_layers] 0: not asked yet
  std::vector<float> maw_page_;              // [most query heads][kDevicePageLen], where MAW are kept
  int64_t base_ = 0;
  std::unique_ptr<HandOver> hand_over_;  // declared last: stops first
};

// Before a call takes a ticket on `stream`: tickets that the side stream has yet to take come first.
inline Status join_side(const DeviceSession& device, void* stream) {
  return device.side() != nullptr ? device.side()->join_if_ahead(stream) : Status();
}

}  // namespace tandem
