// SPDX-License-Identifier: MIT
#include "cpu/matrix_scratch.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tandem::cpu {

Status MatrixScratch::allocate(int32_t k_head_dim, int32_t v_head_dim) {
  struct Part {
    void** pointer;
    size_t bytes;
  };
  constexpr size_t kPlanes = kMaxPlanes, kR = kRows, kK = kKeys, kGroup = kMatrixRows;
  const auto dk = static_cast<size_t>(k_head_dim), dv = static_cast<size_t>(v_head_dim);
  const size_t steps = (dk + kMatrixDepth - 1) / kMatrixDepth * kMatrixDepth;
  const auto part = [](auto*& pointer, size_t n) { return Part{reinterpret_cast<void**>(&pointer), n * sizeof(*pointer)}; };
  const Part parts[] = {part(q, kPlanes * kR * steps),
                        part(q_rows, kPlanes * kGroup * dk),
                        part(k, kPlanes * kK * steps),
                        part(v, kPlanes * kK * dv),
                        part(v_tiles, kPlanes * kK * dv),
                        part(widened, kK * std::max(dk, dv)),
                        part(s, 2 * kK * kGroup),
                        part(p, 2 * kPlanes * kK * kGroup),
                        part(o, kR * dv),
                        part(max, kR),
                        part(sum, kR),
                        part(angles, dk),
                        part(value, dv),
                        part(zeros, 2 * dv),
                        part(visible, kK),
                        part(columns, kK),
                        part(odd_columns, kK),
                        part(v_rows, kK),
                        part(ahead, kMaxAheadBlocks),
                        part(segments[0], kK),
                        part(segments[1], kK)};
  const auto padded = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  size_t total = 0;
  for (const Part& each : parts) total += padded(each.bytes);
  TANDEM_TRY(allocate_aligned(total, &data_));
  std::byte* at = data_.get();
  for (const Part& each : parts) {
    *each.pointer = at;
    at += padded(each.bytes);
  }
  std::memset(zeros, 0, 2 * dv);
  return {};
}

}  // namespace tandem::cpu
