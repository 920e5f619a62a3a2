// SPDX-License-Identifier: MIT
// Stores the rows of a long chunk: one sequence, thousands of tokens, no ticket (lib/tables/device.h, DeviceAppend).
// append.cuh looks up the place of each row. Here a block has the tokens of one page and of one head of K or V. Their rows
// lie side by side in the page and in the buffer. Rows that are in the storage type already are copied 16 bytes at a time.
// Other rows are rounded, one warp a row.
//
// Rows that are rotated, and hidden states, go through append.cuh.
#pragma once

#include "cuda/kernels/append.cuh"

namespace tandem::cuda {

// The rows of a block.
struct ChunkRows {
  int plane, head, n_rows;
  int first_row;               // its index in the tensor
  int first_resident;          // index among these rows; earlier rows go to the buffer alone
  std::byte *window, *buffer;  // place of the first row
  std::byte *window_scales, *buffer_scales;
};

__device__ inline ChunkRows rows_of_block(const AppendCall& call) {
  const DeviceAppend& append = call.append;
  const DeviceSequence& sequence = append.sequences.sequences[0];
  const int64_t first_key = sequence.end - sequence.q_len;
  const int page_len = append.pages.page_len, head = static_cast<int>(blockIdx.y);
  const int64_t page_idx = first_key / page_len + blockIdx.x, page_begin = page_idx * page_len;
  const int64_t begin = max(first_key, page_begin), end = min(sequence.end, page_begin + page_len);
  ChunkRows rows = {};
  if (begin >= end) return rows;
  rows.plane = head < call.n_kv_heads ? kPlaneK : kPlaneV;
  rows.head = head < call.n_kv_heads ? head : head - call.n_kv_heads;
  rows.n_rows = static_cast<int>(end - begin);
  rows.first_row = sequence.first_row + static_cast<int>(begin - first_key);
  std::byte** const to[2][2] = {{&rows.window, &rows.buffer}, {&rows.window_scales, &rows.buffer_scales}};
  rows.first_resident = static_cast<int>(min(max(sequence.begin - begin, int64_t{0}), end - begin));
  const int64_t page = append.sequences.page_tables[sequence.table_begin + page_idx % sequence.table_len];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int p = rows.plane + i;
    const int64_t bytes = call.row_bytes[p];
    *to[i][0] = append.pages.planes[p] + page + rows.head * append.pages.head_stride[p] + (begin - page_begin) * bytes;
    *to[i][1] = append.exchange.slots + append.exchange.rows_at[p] +
                (int64_t{rows.head} * append.exchange.n_rows + rows.first_row) * bytes;
  }
  return rows;
}

// Copies the rows unchanged but for NaNs, in units of 16 bytes.
__device__ inline void copy_chunk_rows(const ChunkRows& rows, const DeviceRows& from, int32_t type, int row_bytes) {
  constexpr int kAtOnce = 4;
  const int units = row_bytes / 16, n = rows.n_rows * units, step = static_cast<int>(blockDim.x);
  const int number_bytes = type == TANDEM_F32 ? 4 : 2;
  const std::byte* const first = static_cast<const std::byte*>(from.data) +
                                 (rows.first_row * from.token_stride + rows.head * from.head_stride) * number_bytes;
  const int64_t stride = from.token_stride * number_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kAtOnce * step) {
    uint4 found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int unit = i + j * step, row = unit / units;
      if (unit < n) found[j] = *reinterpret_cast<const uint4*>(first + row * stride + (unit - row * units) * 16);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t unit = i + j * step;
      if (unit >= n) continue;
      const uint4 x = quiet_numbers(type, found[j]);
      *reinterpret_cast<uint4*>(rows.buffer + unit * 16) = x;
      if (unit >= rows.first_resident * units) *reinterpret_cast<uint4*>(rows.window + unit * 16) = x;
    }
  }
}

__device__ inline void round_chunk_rows(const AppendCall& call, const ChunkRows& rows, const DeviceRows& from) {
  const int warp = static_cast<int>(threadIdx.x / 32), n_warps = static_cast<int>(blockDim.x / 32);
  const int dim = rows.plane == kPlaneK ? call.k_dim : call.v_dim, type = rows.plane == kPlaneK ? call.k_type : call.v_type;
  const int bytes = rows.plane == kPlaneK ? call.k_four_bytes : call.v_four_bytes;
  const int64_t row_bytes = call.row_bytes[rows.plane], scale_bytes = call.row_bytes[rows.plane + 1];
  const bool leads = scale_bytes > 0 && threadIdx.x % 8 == 0;
#pragma unroll 4
  for (int r = warp; r < rows.n_rows; r += n_warps) {
    const int64_t source = (rows.first_row + r) * from.token_stride + rows.head * from.head_stride;
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const bool is_there = first_of_four(j) < dim;
      if (!__any_sync(~0u, is_there)) continue;
      float x[kLaneNumbers];
      widen_four(from.dtype, is_there ? load_four(from.data, from.dtype, source + first_of_four(j)) : uint4{}, x);
      const StoredFour stored = round_four(type, x);
      if (!is_there) continue;
      const int four = first_of_four(j) / kLaneNumbers;
#pragma unroll
      for (int to = 0; to < 2; ++to) {
        std::byte* const codes = to == 0 ? rows.buffer : rows.window;
        std::byte* const scales = to == 0 ? rows.buffer_scales : rows.window_scales;
        if (to == 1 && r < rows.first_resident) continue;
        store_codes(codes + r * row_bytes + four * bytes, stored.codes, bytes);
        if (leads) store_codes(scales + r * scale_bytes + four / 8 * 2, make_uint4(stored.scale, 0, 0, 0), 2);
      }
    }
  }
}

// blockIdx: page of the chunk; head of K or, after those, of V.
__global__ void __launch_bounds__(32 * kAppendWarps) append_chunk_kernel(const __grid_constant__ AppendCall call) {
  begin_behind();
  const ChunkRows rows = rows_of_block(call);
  if (rows.n_rows == 0) return;
  const DeviceRows& from = rows.plane == kPlaneK ? call.append.k : call.append.v;
  const int type = rows.plane == kPlaneK ? call.k_type : call.v_type;
  const int row_bytes = static_cast<int>(call.row_bytes[rows.plane]), number_bytes = type == TANDEM_F32 ? 4 : 2;
  const bool is_copied = type == from.dtype && row_bytes % 16 == 0 &&
                         (reinterpret_cast<uintptr_t>(from.data) | static_cast<uintptr_t>(from.token_stride * number_bytes) |
                          static_cast<uintptr_t>(from.head_stride * number_bytes)) %
                                 16 ==
                             0;
  if (is_copied)
    copy_chunk_rows(rows, from, type, row_bytes);
  else
    round_chunk_rows(call, rows, from);
}

}  // namespace tandem::cuda
