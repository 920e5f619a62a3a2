// SPDX-License-Identifier: MIT
#include "lib/sequence_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tandem {

Status Maw::reserve(Tier& tier, int32_t n_q_heads, int64_t n_tokens, const Watch& watch) {
  const auto n_blocks = static_cast<size_t>((n_tokens + kBlock - 1) / kBlock);
  if (n_blocks <= blocks_.size()) return {};
  blocks_.reserve(n_blocks);
  while (blocks_.size() < n_blocks) {
    TANDEM_TRY(watch.check());
    Buffer block;
    const int64_t bytes = int64_t{n_q_heads} * kBlock * static_cast<int64_t>(sizeof(float));
    TANDEM_TRY(Buffer::create(tier, bytes, Use::kSession, &block));
    std::memset(block.data(), 0, static_cast<size_t>(bytes));
    blocks_.push_back(std::move(block));
  }
  return {};
}

void Maw::clear(int32_t n_q_heads, int64_t begin, int64_t end) {
  end = std::min(end, capacity());
  for (int64_t t = begin; t < end;) {
    const int64_t n = std::min(kBlock - t % kBlock, end - t);
    for (int32_t h = 0; h < n_q_heads; ++h) std::fill_n(at(h, t), n, 0.0f);
    t += n;
  }
}

void Maw::erase(int32_t n_q_heads, int64_t first, int64_t n_tokens, int64_t length) {
  length = std::min(length, capacity());
  for (int32_t h = 0; h < n_q_heads; ++h)
    for (int64_t t = first + n_tokens; t < length; ++t) *at(h, t - n_tokens) = *at(h, t);
  clear(n_q_heads, std::max(first, length - n_tokens), length);
}

Status Maw::copy_from(Tier& tier, const Maw& from) {
  if (from.blocks_.empty()) return {};
  const auto bytes = from.blocks_[0].bytes();
  TANDEM_TRY(reserve(tier, static_cast<int32_t>(bytes / (kBlock * static_cast<int64_t>(sizeof(float)))), from.capacity()));
  for (size_t b = 0; b < from.blocks_.size(); ++b)
    std::memcpy(blocks_[b].data(), from.blocks_[b].data(), static_cast<size_t>(bytes));
  return {};
}

Status SelectionChunk::create(Tier& tier, const PlaneBytes& bytes, int64_t first, int64_t n_rows, SelectionChunk* chunk) {
  SelectionChunk made;
  made.first = first;
  made.n_rows = n_rows;
  for (int32_t p = 0; p < kPlanes; ++p)
    if (bytes.of[p] > 0) TANDEM_TRY(Buffer::create(tier, n_rows * bytes.of[p], Use::kSelection, &made.planes[p]));
  *chunk = std::move(made);
  return {};
}

void HeadSelection::cut(int64_t end) {
  const int32_t* idx = token_idx.as<int32_t>();
  n_tokens = std::lower_bound(idx, idx + n_tokens, end) - idx;
  n_copied = std::min(n_copied, n_tokens);
}

int64_t refresh_queries(float alpha) {
  constexpr int64_t kLeast = 64, kMost = 4096;
  if (alpha >= 1.0f) return kLeast;
  const double n = std::ceil(std::log(1e-6) / std::log1p(-static_cast<double>(alpha)));
  return std::clamp(n < static_cast<double>(kMost) ? static_cast<int64_t>(n) : kMost, kLeast, kMost);
}

}  // namespace tandem
