// SPDX-License-Identifier: MIT
// Attention over K and V in the caller's tensors: makes jobs for the CPU backend that point into these tensors.
//
//   layout   places each sequence's rows of q, o and lse in work space
//   mask     turns rows of the mask into ranges of keys, and tokens into groups (lib/tensors/mask_groups.h)
//   jobs     makes one job for each sequence, KV head and group
//   pack     converts queries to f32, grouped by KV head
//   attend   computes states over the visible keys and merges learned sinks
//   write    writes o and lse in the caller's types
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"
#include "lib/tables/backend.h"
#include "lib/tensors/tensor.h"

namespace tandem {

// One sequence's part of the tensors.
struct TensorSequence {
  int64_t q_len = 0, kv_len = 0;
  TensorView q, k, v, o;            // v: not used if V aliases K
  float* lse = nullptr;             // for the first token and head; null: not wanted
  const std::byte* mask = nullptr;  // for the first token and head; null: none
};

struct MaskLayout {
  int32_t dtype = 0;                        // 0: no mask
  int64_t head_stride = 0, row_stride = 0;  // bytes
  bool per_head = false;
};

struct TensorsArgs {
  // Describes the tensors, strides included. If each query head has its own mask, each is a KV head of its own.
  Layer layer;
  int64_t heads_per_k = 1;  // KV heads of the layer that share a head of k
  bool causal = false;
  const float* alibi_slopes = nullptr;  // [n_q_heads]
  MaskLayout mask;
  int64_t lse_token_stride = 0, lse_head_stride = 0;  // elements
  std::vector<TensorSequence> sequences;
  Watch watch;
};

// Attends such calls and keeps their work space. Calls run one after another.
class TensorAttention {
 public:
  TensorAttention();
  ~TensorAttention();
  Status attend(const Backend& cpu, const TensorsArgs& args);

  struct Scratch;

 private:
  std::mutex mutex_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace tandem
