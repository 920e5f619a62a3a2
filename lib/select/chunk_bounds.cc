// SPDX-License-Identifier: MIT
#include "lib/select/chunk_bounds.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "lib/model/dtype.h"
#include "lib/policy/pruning.h"
#include "lib/store/cache_rows.h"

namespace tandem {
namespace {

// bf16 is the upper half of a float, so cutting off the lower half rounds towards 0.
uint16_t bf16_at_most(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t cut = bits >> 16;
  const bool is_more = (bits & 0xffffu) != 0 && x < 0.0f;
  return static_cast<uint16_t>(is_more ? cut + 1 : cut);
}
uint16_t bf16_at_least(float x) { return bf16_at_most(-x) ^ 0x8000u; }

// Reads one key as attention sees it.
void read_key(const Backend& cpu, const Layer& layer, const KvRun& run, int64_t i, float* to) {
  const int64_t dim = layer.k_head_dim;
  const auto* const k = static_cast<const std::byte*>(run.k) + i * row_bytes(layer.k_type, dim);
  const auto* scales = static_cast<const std::byte*>(run.k_scales);
  if (scales != nullptr) scales += i * scale_bytes(layer.k_type, dim);
  cpu.table->to_f32(cpu.self, layer.k_type, k, scales, to, dim);
  if (layer.rope != nullptr)
    rope_rotate(*layer.rope, run.positions != nullptr ? run.positions[i] : run.first_position + i, to);
}

}  // namespace

Layer bounded_layer(const Layer& layer) {
  Layer bounded;
  bounded.n_q_heads = layer.n_q_heads;
  bounded.n_kv_heads = layer.n_kv_heads;
  bounded.group_size = layer.group_size;
  bounded.k_head_dim = bounded.v_head_dim = 2 * layer.k_head_dim;
  bounded.k_type = bounded.v_type = TANDEM_BF16;
  bounded.sm_scale = layer.sm_scale;
  return bounded;
}

void bounded_queries(const float* q, int64_t n_rows, int64_t head_dim, float* to) {
  for (int64_t r = 0; r < n_rows; ++r, q += head_dim, to += 2 * head_dim)
    for (int64_t d = 0; d < head_dim; ++d) {
      to[d] = q[d] < 0.0f ? q[d] : 0.0f;
      to[head_dim + d] = q[d] < 0.0f ? 0.0f : q[d];
    }
}

void ChunkBounds::include(int64_t from_len, int64_t to_len) {
  from_len_ = std::min(from_len_, from_len);
  to_len_ = to_len == 0 || to_len_ == 0 ? 0 : std::max(to_len_, to_len);
}

int64_t ChunkBounds::block_bytes(const Layer& layer) const {
  return kBlock / chunk_len_ * layer.n_kv_heads * 2 * layer.k_head_dim * static_cast<int64_t>(sizeof(uint16_t));
}

int64_t ChunkBounds::bytes(const Layer& layer, int64_t n_tokens) const {
  return n_blocks(wanted(n_tokens)) * block_bytes(layer);
}

Status ChunkBounds::take_blocks(Tier& tier, const Layer& layer, int64_t n, const Watch& watch) {
  blocks_.reserve(static_cast<size_t>(n));
  while (std::ssize(blocks_) < n) {
    TANDEM_TRY(watch.check());
    Buffer block;
    TANDEM_TRY(Buffer::create(tier, block_bytes(layer), Use::kSession, &block));
    blocks_.push_back(std::move(block));
  }
  return {};
}

Status ChunkBounds::reserve(Tier& tier, const Layer& layer, int64_t n_tokens, const Watch& watch) {
  const int64_t n = n_blocks(wanted(n_tokens));
  return n <= std::ssize(blocks_) ? Status() : take_blocks(tier, layer, n, watch);
}

Status ChunkBounds::copy_from(Tier& tier, const Layer& layer, const ChunkBounds& from) {
  TANDEM_TRY(take_blocks(tier, layer, std::ssize(from.blocks_), {}));
  for (size_t b = 0; b < from.blocks_.size(); ++b)
    std::memcpy(blocks_[b].data(), from.blocks_[b].data(), static_cast<size_t>(from.blocks_[b].bytes()));
  n_chunks_ = from.n_chunks_;
  return {};
}

uint16_t* ChunkBounds::row(const Layer& layer, int32_t kv_head, int64_t chunk) const {
  const int64_t of_block = kBlock / chunk_len_, row = kv_head * of_block + chunk % of_block;
  return blocks_[static_cast<size_t>(chunk / of_block)].as<uint16_t>() + row * 2 * layer.k_head_dim;
}

KvRun ChunkBounds::run(const Layer& layer, int32_t kv_head, int64_t first, int64_t n) const {
  const int64_t of_block = kBlock / chunk_len_;
  KvRun run;
  run.k = run.v = row(layer, kv_head, first);
  run.n_tokens = std::min(n, of_block - first % of_block);
  run.token_idx = -1;
  return run;
}

Status ChunkBounds::fill(const Backend& cpu, const Layer& layer, const StoreView& stored, int32_t layer_idx, int64_t n,
                         const Watch& watch) {
  constexpr int64_t kOfTask = 256;  // tokens
  n_filled_ = n_chunks_;
  if (n <= n_chunks_) return {};
  struct Fill {
    const ChunkBounds& bounds;
    const Backend& cpu;
    const Layer& layer;
    const StoreView& stored;
    const Watch& watch;
    int32_t layer_idx;
    int64_t first, end, of_task;  // chunks

    void one(int64_t chunk, int32_t kv_head) const {
      float least[kMostBoundedDim], most[kMostBoundedDim], key[kMostBoundedDim];
      const int64_t dim = layer.k_head_dim, len = bounds.chunk_len();
      std::fill_n(least, dim, INFINITY);
      std::fill_n(most, dim, -INFINITY);
      for (int64_t t = chunk * len; t < (chunk + 1) * len;) {
        const TokenRun at = key_tokens(stored, layer, {t, (chunk + 1) * len});
        const KvRun keys = keys_of(stored, layer, layer_idx, at, kv_head);
        for (int64_t i = 0; i < at.n; ++i) {
          read_key(cpu, layer, keys, i, key);
          for (int64_t d = 0; d < dim; ++d) {
            least[d] = key[d] < least[d] ? key[d] : least[d];
            most[d] = key[d] > most[d] ? key[d] : most[d];
          }
        }
        t += at.n;
      }
      uint16_t* const to = bounds.row(layer, kv_head, chunk);
      for (int64_t d = 0; d < dim; ++d) {
        to[d] = bf16_at_most(least[d]);
        to[dim + d] = bf16_at_least(most[d]);
      }
    }
  } fill{*this, cpu, layer, stored, watch, layer_idx, n_chunks_, n, std::max<int64_t>(1, kOfTask / chunk_len_)};
  const int64_t n_ranges = (fill.end - fill.first + fill.of_task - 1) / fill.of_task;
  const auto task = [](void* of, int64_t idx, int32_t) {
    const Fill& all = *static_cast<const Fill*>(of);
    if (all.watch.is_cancelled()) return;
    const auto kv_head = static_cast<int32_t>(idx % all.layer.n_kv_heads);
    const int64_t begin = all.first + idx / all.layer.n_kv_heads * all.of_task;
    for (int64_t chunk = begin; chunk < std::min(all.end, begin + all.of_task); ++chunk) all.one(chunk, kv_head);
  };
  const int64_t n_tasks = n_ranges * layer.n_kv_heads;
  if (fill.end - fill.first == 1 && layer.n_kv_heads * chunk_len_ <= kOfTask)  // a decode call that completes a chunk
    for (int64_t i = 0; i < n_tasks; ++i) task(&fill, i, 0);
  else
    cpu.table->run(cpu.self, n_tasks, task, &fill);
  TANDEM_TRY(watch.check());
  n_filled_ = n;
  return {};
}

}  // namespace tandem
