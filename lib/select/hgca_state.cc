// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstring>

#include "lib/select/hgca.h"

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

Status CopiedRows::create(Tier& tier, const PlaneBytes& bytes, int64_t first, int64_t n_rows, CopiedRows* rows) {
  CopiedRows made;
  made.first = first;
  made.n_rows = n_rows;
  for (int32_t p = 0; p < kPlanes; ++p)
    if (bytes.of[p] > 0) TANDEM_TRY(Buffer::create(tier, n_rows * bytes.of[p], Use::kSelection, &made.planes[p]));
  *rows = std::move(made);
  return {};
}

Status HeadSelection::reserve(Tier& tier, int64_t n_wanted) {
  if (room() >= n_wanted) return {};
  Buffer made;
  TANDEM_TRY(Buffer::create(tier, n_wanted * static_cast<int64_t>(sizeof(int32_t)), Use::kSession, &made));
  std::copy_n(token_idx.as<int32_t>(), n_tokens, made.as<int32_t>());
  token_idx.swap(made);
  return {};
}

Status HeadSelection::copy_from(Tier& tier, const PlaneBytes& bytes, const HeadSelection& from) {
  TANDEM_TRY(reserve(tier, from.room()));
  std::copy_n(from.token_idx.as<int32_t>(), from.n_tokens, token_idx.as<int32_t>());
  n_tokens = from.n_tokens;
  if (from.n_copied == 0) return {};
  for (const CopiedRows& block : from.blocks) {
    CopiedRows copy;
    TANDEM_TRY(CopiedRows::create(tier, bytes, block.first, block.n_rows, &copy));
    const int64_t n = std::min(block.n_rows, from.n_copied - block.first);
    if (n > 0) copy_rows(block.row(bytes, block.first), copy.row(bytes, block.first), bytes, n);
    blocks.push_back(std::move(copy));
  }
  n_copied = from.n_copied;
  return {};
}

void HeadSelection::cut(int64_t end) {
  const int32_t* idx = token_idx.as<int32_t>();
  n_tokens = std::lower_bound(idx, idx + n_tokens, end) - idx;
  n_copied = std::min(n_copied, n_tokens);
}

// Also drops tokens that become sinks.
void HeadSelection::erase(const PlaneBytes& bytes, int64_t first, int64_t n_erased, int64_t sink_len) {
  auto* idx = token_idx.as<int32_t>();
  const int64_t last = first + n_erased;
  int64_t n = 0, n_kept_copies = 0;
  for (int64_t i = 0; i < n_tokens; ++i) {
    const int64_t moved = idx[i] >= last ? idx[i] - n_erased : idx[i];
    if ((idx[i] >= first && idx[i] < last) || moved < sink_len) continue;
    if (i < n_copied) {
      if (n != i) copy_rows(row(bytes, i), row(bytes, n), bytes, 1);
      n_kept_copies = n + 1;
    }
    idx[n++] = static_cast<int32_t>(moved);
  }
  n_tokens = n;
  n_copied = n_kept_copies;
}

void HeldQueries::reserve(const Layer& layer, int64_t capacity) {
  const auto n_rows = static_cast<size_t>(capacity * layer.n_q_heads);
  q.resize(n_rows * static_cast<size_t>(layer.k_head_dim));
  lse.resize(n_rows);
  begin.resize(static_cast<size_t>(capacity));
  end.resize(static_cast<size_t>(capacity));
}

void HeldQueries::add(const Layer& layer, const SequenceCall& call) {
  const auto capacity = static_cast<int64_t>(begin.size());
  const int64_t n_new = std::min(call.q_len, capacity), n_old = std::min(n, capacity - n_new), n_gone = n - n_old;
  const int64_t group = layer.group_size, row = group * layer.k_head_dim, first = call.q_len - n_new;
  for (int64_t h = 0; h < layer.n_kv_heads; ++h) {
    float* to_q = q.data() + h * capacity * row;
    float* to_lse = lse.data() + h * capacity * group;
    std::memmove(to_q, to_q + n_gone * row, static_cast<size_t>(n_old * row) * sizeof(float));
    std::memmove(to_lse, to_lse + n_gone * group, static_cast<size_t>(n_old * group) * sizeof(float));
    std::copy_n(call.q + (h * call.q_len + first) * row, n_new * row, to_q + n_old * row);
    std::copy_n(call.lse + (h * call.q_len + first) * group, n_new * group, to_lse + n_old * group);
  }
  std::memmove(begin.data(), begin.data() + n_gone, static_cast<size_t>(n_old) * sizeof(int64_t));
  std::memmove(end.data(), end.data() + n_gone, static_cast<size_t>(n_old) * sizeof(int64_t));
  std::copy_n(call.visibility.begin + first, n_new, begin.data() + n_old);
  std::copy_n(call.visibility.end + first, n_new, end.data() + n_old);
  n = n_old + n_new;
  n_skipped += n_gone + first;
  end_token = call.length;
}

void HeldQueries::cut(int64_t n_tokens) {
  while (n > 0 && end[static_cast<size_t>(n) - 1] > n_tokens) --n;
  if (n == 0) n_skipped = 0;
}

}  // namespace tandem
