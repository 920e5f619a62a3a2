// SPDX-License-Identifier: MIT
// Of each chunk of consecutive keys, the smallest and the largest number that its keys have in each dimension: with them
// goes an upper bound of every logit in the chunk. As Quest's pages (Tang et al.), in a tree's upper levels.
//
// A row of bounds is [smallest of each dimension | largest of each dimension] in bf16, rounded outward, so that the bound
// holds. Keys are as attention sees them: rotated where the library rotates. Against a row [min(q, 0) | max(q, 0)] the dot
// product is the bound, so kernels for keys read bounds too (bounded_layer(), bounded_queries()).
//
//   blocks of 2,048 tokens, so that growing never copies:  KV head 0: its chunks' rows | KV head 1 | ...
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lib/base/memory.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// Rows of bounds as keys of a layer, and what rows of queries [n_rows, k_head_dim] are against them.
Layer bounded_layer(const Layer& layer);
void bounded_queries(const float* q, int64_t n_rows, int64_t head_dim, float* to);  // to: [n_rows, 2 * head_dim]

class ChunkBounds {
 public:
  static constexpr int64_t kBlock = 2048;  // tokens

  // Chunks are judged by their bounds in sequences of from_len tokens and more, and fewer than to_len; 0: there is no limit.
  ChunkBounds(int64_t chunk_len, int64_t from_len, int64_t to_len)
      : chunk_len_(chunk_len), from_len_(from_len), to_len_(to_len) {}
  int64_t chunk_len() const { return chunk_len_; }
  // Some stage judges by them in sequences of these lengths, too.
  void include(int64_t from_len, int64_t to_len);
  // The first tokens of a sequence of n_tokens that bounds are wanted of.
  int64_t wanted(int64_t n_tokens) const {
    return n_tokens < from_len_ ? 0 : to_len_ == 0 ? n_tokens : std::min(n_tokens, to_len_);
  }
  int64_t bytes(const Layer& layer, int64_t n_tokens) const;  // of a sequence of n_tokens

  bool has_room(int64_t n_tokens) const { return wanted(n_tokens) <= capacity(); }
  Status reserve(Tier& tier, const Layer& layer, int64_t n_tokens, const Watch& watch);
  Status copy_from(Tier& tier, const Layer& layer, const ChunkBounds& from);
  void cut(int64_t n_tokens) { n_chunks_ = std::min(n_chunks_, n_tokens / chunk_len_); }

  // Chunks up to the n-th get their bounds, if they have none. All of their keys are in the store, but a call may yet take
  // them back: keep() says that it has succeeded.
  Status fill(const Backend& cpu, const Layer& layer, const StoreView& stored, int32_t layer_idx, int64_t n,
              const Watch& watch);
  void keep() { n_chunks_ = n_filled_; }
  // The rows of chunks [first, first + n), as many as lie side by side.
  KvRun run(const Layer& layer, int32_t kv_head, int64_t first, int64_t n) const;

 private:
  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * kBlock; }
  static int64_t n_blocks(int64_t n_tokens) { return (n_tokens + kBlock - 1) / kBlock; }
  int64_t block_bytes(const Layer& layer) const;
  Status take_blocks(Tier& tier, const Layer& layer, int64_t n, const Watch& watch);
  uint16_t* row(const Layer& layer, int32_t kv_head, int64_t chunk) const;

  int64_t chunk_len_, from_len_, to_len_;
  std::vector<Buffer> blocks_;
  int64_t n_chunks_ = 0;  // that have bounds
  int64_t n_filled_ = 0;  // with those of the call under way
};

}  // namespace tandem
