// SPDX-License-Identifier: MIT
// Attention over K and V that the caller owns: jobs for the CPU backend that point into the caller's tensors.
//
//   layout   where the sequences' rows of q, o and lse lie in work space
//   mask     rows of the mask to ranges of keys, tokens to groups (lib/tensors/mask_groups.h)
//   jobs     one for each sequence, KV head and group
//   pack     queries to f32, grouped by KV head
//   attend   states over the visible keys; learned sinks merged
//   write    o and lse in the caller's types
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
  TensorView q, k, v, o;            // v: not used where V aliases K
  float* lse = nullptr;             // of the first token and head; null: not wanted
  const std::byte* mask = nullptr;  // of the first token and head; null: none
};

struct MaskLayout {
  int32_t dtype = 0;                        // 0: no mask
  int64_t head_stride = 0, row_stride = 0;  // bytes
  bool per_head = false;
};

struct TensorsArgs {
  Layer layer;  // of the tensors, strides included. With a mask for each query head every query head is a KV head of its own
  int64_t heads_per_k = 1;  // KV heads of the layer for each head of k
  bool causal = false;
  const float* alibi_slopes = nullptr;  // [n_q_heads]
  MaskLayout mask;
  int64_t lse_token_stride = 0, lse_head_stride = 0;  // elements
  std::vector<TensorSequence> sequences;
  Watch watch;
};

// Work space of such calls, and the order of their steps. Calls run one after another.
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
