// SPDX-License-Identifier: MIT
// Turns a FLASH_ATTN_EXT node of ggml into a call of tandem_attend_tensors() on ggml's own memory.
//
// ggml counts dimensions from the innermost one. llama.cpp passes views of a cache whose rows are tokens:
//
//   q    [k_head_dim, n_tokens, n_q_heads,  n_streams]     src[0], f32
//   k    [k_head_dim, n_keys,   n_kv_heads, n_streams]     src[1], a view: the keys of a head lie a row of all heads apart
//   v    [v_head_dim, n_keys,   n_kv_heads, n_streams]     src[2], a view like k
//   mask [n_keys, n_tokens, 1 or n_q_heads, 1 or n_streams]  src[3], f16, added to the logits; or none
//   sinks [n_q_heads]                                      src[4], f32; or none
//   o    [v_head_dim, n_q_heads, n_tokens, n_streams]      the node, f32
//
// A stream is a sequence of tandem_attend_tensors()'s padded form. The code reads no tensor values, because support is
// decided before memory is allocated.
#pragma once

#include <ggml.h>

#include <vector>

#include "tandem/tandem.h"

namespace tandem_ggml_module {

// Returns whether the library supports the node: types, head dims, strides and parameters. It supports every mask value.
bool can_attend(const ggml_tensor& node);

// The arguments of the node's call. They point into this object and into the node's tensors.
class AttendNode {
 public:
  explicit AttendNode(const ggml_tensor& node);
  AttendNode(const AttendNode&) = delete;
  AttendNode& operator=(const AttendNode&) = delete;
  const tandem_attend_tensors_args& args() const { return args_; }

 private:
  tandem_attend_tensors_args args_ = TANDEM_ATTEND_TENSORS_ARGS_INIT;
  tandem_tensor q_, k_, v_, mask_, o_;
  std::vector<float> slopes_;
};

}  // namespace tandem_ggml_module
