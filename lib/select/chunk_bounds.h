// SPDX-License-Identifier: MIT
// Bounds of each chunk of consecutive keys: the smallest and the largest number that its keys have in each dimension. They
// give an upper bound of every logit in the chunk, as Quest's pages do (Tang et al.), here in a tree's upper levels.
//
// A row of bounds is [smallest of each dimension | largest of each dimension] in bf16, rounded outward, so that the bound
// holds. Keys are as attention sees them: rotated where the library rotates. The bound is the dot product of such a row with
// [min(q, 0) | max(q, 0)]. So kernels that read keys can read bounds too (bounded_layer(), bounded_queries()).
//
// Rows lie in blocks of 2,048 tokens, so growing never copies. In a block:  KV head 0: its chunks' rows | KV head 1 | ...
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lib/base/memory.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// Describe rows of bounds as a layer's keys, and convert queries [n_rows, k_head_dim] for a dot product with them.
Layer bounded_layer(const Layer& layer);
void bounded_queries(const float* q, int64_t n_rows, int64_t head_dim, float* to);  // to: [n_rows, 2 * head_dim]

class ChunkBounds {
 public:
  static constexpr int64_t kBlock = 2048;  // tokens

  // Stages judge chunks by bounds in sequences of from_len to to_len - 1 tokens. to_len = 0: no limit.
  ChunkBounds(int64_t chunk_len, int64_t from_len, int64_t to_len)
      : chunk_len_(chunk_len), from_len_(from_len), to_len_(to_len) {}
  int64_t chunk_len() const { return chunk_len_; }
  // Also covers the lengths of another stage that judges by these bounds.
  void include(int64_t from_len, int64_t to_len);
  // Returns how many of the first n_tokens tokens need bounds.
  int64_t wanted(int64_t n_tokens) const {
    return n_tokens < from_len_ ? 0 : to_len_ == 0 ? n_tokens : std::min(n_tokens, to_len_);
  }
  int64_t bytes(const Layer& layer, int64_t n_tokens) const;  // for a sequence of n_tokens

  bool has_room(int64_t n_tokens) const { return wanted(n_tokens) <= capacity(); }
  Status reserve(Tier& tier, const Layer& layer, int64_t n_tokens, const Watch& watch);
  Status copy_from(Tier& tier, const Layer& layer, const ChunkBounds& from);
  void cut(int64_t n_tokens) { n_chunks_ = std::min(n_chunks_, n_tokens / chunk_len_); }

  // Computes missing bounds of chunks [0, n), whose keys are all in the store. The call may still fail and take the keys
  // back. keep() makes the new bounds valid once the call has succeeded.
  Status fill(const Backend& cpu, const Layer& layer, const StoreView& stored, int32_t layer_idx, int64_t n,
              const Watch& watch);
  void keep() { n_chunks_ = n_filled_; }
  // Returns rows of chunks from `first` on: at most n, and only those that are contiguous in memory.
  KvRun run(const Layer& layer, int32_t kv_head, int64_t first, int64_t n) const;

 private:
  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * kBlock; }
  static int64_t n_blocks(int64_t n_tokens) { return (n_tokens + kBlock - 1) / kBlock; }
  int64_t block_bytes(const Layer& layer) const;
  Status take_blocks(Tier& tier, const Layer& layer, int64_t n, const Watch& watch);
  uint16_t* row(const Layer& layer, int32_t kv_head, int64_t chunk) const;

  int64_t chunk_len_, from_len_, to_len_;
  std::vector<Buffer> blocks_;
  int64_t n_chunks_ = 0;  // chunks with valid bounds
  int64_t n_filled_ = 0;  // the same, with those of the call in progress
};

}  // namespace tandem
