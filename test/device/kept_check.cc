// SPDX-License-Identifier: MIT
#include "device/kept_check.h"

#include <algorithm>
#include <cmath>

namespace tandem::test {

namespace {

enum Order { kBefore, kEither, kBehind };

bool has(const Chunks& chunks, int64_t chunk) { return std::binary_search(chunks.begin(), chunks.end(), chunk); }

// Tells how a search orders the i-th and the j-th candidate. Equal scores come from equal keys, so they stay equal after
// rounding.
Order order_of(const std::vector<ChunkScore>& scores, size_t i, size_t j) {
  const ChunkScore &a = scores[i], &b = scores[j];
  if (a.least == b.least && a.most == b.most) return i < j ? kBefore : kBehind;
  const auto is_above = [](double x, double y) {
    return std::isinf(x) || std::isinf(y) ? x > y : x > y + tolerance_of(x, y);
  };
  if (is_above(a.least, b.most)) return kBefore;
  return is_above(b.least, a.most) ? kBehind : kEither;
}

std::string text_of(const Chunks& chunks) {
  std::string text;
  for (const int64_t chunk : chunks) text.append(" ").append(std::to_string(chunk));
  return text;
}

// Checks the chunks kept by a search that may have chosen among nearly equal scores.
std::string check_open(const PlainSearch& search, size_t stage, const RightChunks& right, const Chunks& kept) {
  Chunks all = right.sure;
  all.insert(all.end(), right.open.begin(), right.open.end());
  std::sort(all.begin(), all.end());
  const Chunks least = add_next(search, stage, right.sure), most = add_next(search, stage, all);
  for (const int64_t chunk : least)
    if (!has(kept, chunk)) return "chunk " + std::to_string(chunk) + " is not kept";
  for (const int64_t chunk : kept)
    if (!has(most, chunk)) return "chunk " + std::to_string(chunk) + " is kept";
  const DeviceSearchStage& of = search.stages[stage];
  const int64_t n = n_best(of), n_kept = static_cast<int64_t>(kept.size());
  if (n_kept < n || n_kept > (of.plus_next != 0 ? 2 * n : n)) return std::to_string(n_kept) + " chunks are kept";
  return "";
}

}  // namespace

RightChunks find_right(const Chunks& candidates, const std::vector<ChunkScore>& scores, int64_t n_best) {
  RightChunks right;
  for (size_t i = 0; i < candidates.size(); ++i) {
    int64_t n_before = 0, n_either = 0;
    for (size_t j = 0; j < candidates.size(); ++j) {
      if (i == j) continue;
      const Order order = order_of(scores, j, i);
      n_before += order == kBefore ? 1 : 0;
      n_either += order == kEither ? 1 : 0;
    }
    if (n_before >= n_best) continue;
    (n_before + n_either < n_best ? right.sure : right.open).push_back(candidates[i]);
  }
  return right;
}

std::string check_kept(const PlainSearch& search, size_t stage, int32_t list, const Chunks& candidates, const Chunks& kept,
                       size_t* n_open) {
  *n_open = 0;
  if (std::adjacent_find(kept.begin(), kept.end(), std::greater_equal<>()) != kept.end())
    return "chunks do not ascend:" + text_of(kept);
  Chunks wanted = candidates;
  if (!keeps_all(search, stage, candidates)) {
    const RightChunks right =
        find_right(candidates, judge_chunks(search, stage, list, candidates), n_best(search.stages[stage]));
    *n_open = right.open.size();
    if (!right.is_strict()) return check_open(search, stage, right, kept);
    wanted = add_next(search, stage, right.sure);
  }
  return kept == wanted ? "" : "chunks kept:" + text_of(kept) + "\nand not:" + text_of(wanted);
}

}  // namespace tandem::test
