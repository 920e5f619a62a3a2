// SPDX-License-Identifier: MIT
// What a planned step needs on the host's side, made when the step begins: of every layer keys, rows, jobs; descriptors of
// all layers in one copy; lengths; all tasks posted, in order.
//
// Layers that are alike (SessionLayer::like), whose windows hold the same tokens of every sequence and that leave nothing to
// the host, differ in nothing but their number. The first of them is planned; the others follow it: they get a copy of its
// descriptors, their tasks share its calls, and their lengths and windows become what its are. Which layers follow is found
// anew in each step. Beyond its step a plan leaves its work space and the calls that tasks share, until these tasks end.
#pragma once

#include <span>
#include <vector>

#include "lib/attend/device_lane.h"

namespace tandem {

class StepPlan {
 public:
  StepPlan(SessionCore& core, DeviceLane& lane) : core_(core), lane_(lane) {}

  // Of the open step. sequences: in its order; they have their pages. The cache's mutex is held exclusively.
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
  std::span<Sequence* const> sequences_;  // as what follows, of the step that is planned
  std::vector<SequenceState*> states_;    // [n_sequences]
  std::vector<SequenceShape> shapes_;     // likewise
  std::vector<size_t> first_;             // [n_layers] the layer that each follows; its own index: it is planned itself
  std::vector<bool> leads_;               // [n_layers] others may follow it
  std::vector<int64_t> n_followers_;      // [n_layers]
  std::vector<size_t> followers_;         // of the layer at hand
  std::byte* upload_ = nullptr;           // descriptors on their way to the device
  int64_t n_entries_ = 0;                 // of its page tables, which all layers share
};

}  // namespace tandem
