// SPDX-License-Identifier: MIT
// Steps: the same number of tokens is appended in every layer, or in none.
//
// A step on device tensors is planned: all host work is done when the step begins. Only a few kernels a layer remain,
// whether they are called one by one or replayed as a graph.
//
//   begin    the plan (lib/attend/step_plan.h)
//   attend   launches the kernels of the next layer, on descriptors at fixed addresses
//   end      leaves a mark on the stream: a layer that has not arrived by then is missing (lib/device/hand_over.cc)
#pragma once

#include <span>

#include "lib/attend/step_plan.h"

namespace tandem {

class Steps {
 public:
  Steps(SessionCore& core, DeviceLane& lane) : core_(core), plan_(core, lane) {}

  // q_lens: [sequences.size()]. stream: null if the step is not planned.
  Status begin(std::span<const int64_t> sequences, const int64_t* q_lens, void* stream);
  Status end(void* stream);

 private:
  Status find_sequences(std::span<const int64_t> sequences, const int64_t* q_lens, std::vector<OpenStep::Sequence>* step);
  Status end_plan(void* stream);
  // The first layer of a sequence that got another number of tokens than the step has declared.
  struct Missing {
    bool any = false;
    int64_t sequence = 0;
    size_t layer_idx = 0;
    int64_t n_got = 0, n_declared = 0;
  };
  Missing find_missing(const std::vector<OpenStep::Sequence>& sequences) const;
  void take_back(const std::vector<OpenStep::Sequence>& ended);

  SessionCore& core_;
  StepPlan plan_;
  std::vector<Sequence*> found_;  // sequences of the step that begins
};

}  // namespace tandem
