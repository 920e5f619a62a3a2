// SPDX-License-Identifier: MIT
// The plan of a step, made on the host when the step begins: keys, rows and jobs of every layer; descriptors of all layers
// in one copy; lengths. All tasks are posted, in order.
//
// Two layers share a plan if they are alike (SessionLayer::like), their windows hold the same tokens of every sequence, and
// the host has no part in them. The first such layer is planned and the others follow it: they copy its descriptors, their
// tasks share its calls, and they get its lengths and windows. Each step finds the followers anew. After its step a plan
// only keeps its work space, and the calls that tasks share until these tasks end.
#pragma once

#include <span>
#include <vector>

#include "lib/attend/device_lane.h"

namespace tandem {

class StepPlan {
 public:
  StepPlan(SessionCore& core, DeviceLane& lane) : core_(core), lane_(lane) {}

  // Plans the open step. sequences: in its order, with their pages. The cache's mutex is held exclusively.
  Status make(std::span<Sequence* const> sequences, void* stream);

 private:
  Status check(void* stream) const;
  Status check_lengths(const CallShape& shape) const;
  Status reserve(void* stream);
  void find_first();
  Status plan_layers(AttendArgs* args);
  Status bound_chunks_of_layers(AttendArgs* args);
  Status plan_layer(Call& call);
  Status add_sequences(Call& call) const;
  void describe(Call& call);
  void follow(const Call& call);
  void commit(AttendArgs* args);
  void commit_followers(const Call& call);
  StepCalls* calls_of(size_t layer_idx);
  void give_calls(const Call& call);

  SessionCore& core_;
  DeviceLane& lane_;
  std::span<Sequence* const> sequences_;  // this and the next members are of the step that is planned
  std::vector<SequenceState*> states_;    // [n_sequences]
  std::vector<SequenceShape> shapes_;     // [n_sequences]
  std::vector<size_t> first_;             // [n_layers] the layer that it follows; its own index if it is planned itself
  std::vector<bool> leads_;               // [n_layers] other layers may follow it
  std::vector<int64_t> n_followers_;      // [n_layers]
  std::vector<size_t> followers_;         // of the current layer
  std::byte* upload_ = nullptr;           // descriptors to copy to the device
  int64_t n_entries_ = 0;                 // of the page tables, which all layers share
};

}  // namespace tandem
