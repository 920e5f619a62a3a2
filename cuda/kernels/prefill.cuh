// SPDX-License-Identifier: MIT
// Attention of many queries over the keys in pages: bound by matrix products. Serves every storage type, from compute
// capability 8.0 on.
//
// A block has a tile of query rows (prefill_work.cuh) and goes through its keys, kTileKeys at a time. The rows of the next
// tile of keys travel to shared memory while the tensor cores work on the current tile. Each warp has 16 * kMTiles query
// rows of its own, so a softmax crosses four lanes:
//
//   S [rows x keys] = q [rows x dims] K^T [dims x keys]      softmax over keys: along the rows
//   O [rows x dims] += P [rows x keys] V [keys x dims]       P: S, already in the right registers
//
// An A fragment of 16 keys (or dims of V) from the readers of stored.cuh holds the B fragments of two times 8: a[0] and
// a[2] are the first eight, a[1] and a[3] the others.
//
// Weights are rounded to V's type if V has 16 bits and q has one such summand. Sums of weights are not rounded. Otherwise
// weights are split into two summands, as in decode, and a query of f32 into two or three.
#pragma once

#include "cuda/kernels/far_weights.cuh"
#include "cuda/kernels/prefill_finish.cuh"
#include "cuda/kernels/shared_sizes.cuh"
#include "cuda/kernels/stored.cuh"

namespace tandem::cuda {

// A block's warps, a warp's tiles of 16 query rows, and the keys of a tile.
struct PrefillTile {
  int warps = 4, m_tiles = 2, keys = 64;
};

// The compile-time sizes of a kernel. kQParts: the most summands of a query's numbers. kOfMultiprocessor: shared memory, as
// in shared_sizes.cuh.
template <class K_, class V_, int kKDim_, int kVDim_, int kQParts_, int kOfMultiprocessor_>
struct PrefillShape {
  static constexpr int kOfMultiprocessor = kOfMultiprocessor_;
  using K = K_;
  using V = V_;
  using Number = typename V::ValueNumber;  // type of the summands of weights
  static constexpr int kKDim = kKDim_, kVDim = kVDim_, kQParts = kQParts_;
  using KRow = RowShape<K, kKDim>;
  using VRow = RowShape<V, kVDim>;
  static constexpr int kPParts = V::kParts > 2 ? V::kParts : kQParts == 1 && V::kBits == 16 ? 1 : 2;
  // An f32 is three bf16, in a fragment and in a weight, so registers and shared memory hold fewer of them.
  static constexpr bool kIsSmall = kVDim <= 128 && K::kParts == 1;
  static constexpr int kMostKeys = K::kParts > 1 ? 16 : kVDim > 128 ? 32 : 64;
  static constexpr int used_bytes(const PrefillTile& tile) {
    return kQParts * 16 * tile.m_tiles * tile.warps * KRow::kSteps * 32 +
           2 * tile.keys / 16 * (KRow::kSliceBytes + VRow::kSliceBytes);
  }
  static constexpr PrefillTile choose_tile() {
    PrefillTile tile = {4, kIsSmall ? 2 : 1, kMostKeys};
    while (used_bytes(tile) > kOfMultiprocessor - 2048) {
      if (tile.m_tiles > 1)
        tile.m_tiles = 1;
      else if (tile.keys > 16)
        tile.keys /= 2;
      else
        tile.warps /= 2;
    }
    return tile;
  }
  static constexpr PrefillTile kTile = choose_tile();
  static constexpr int kWarps = kTile.warps, kThreads = 32 * kWarps, kMTiles = kTile.m_tiles;
  static constexpr int kRows = 16 * kMTiles * kWarps;
  static constexpr int kTileKeys = kTile.keys, kSlices = kTileKeys / 16;
  static constexpr int kStageBytes = kSlices * (KRow::kSliceBytes + VRow::kSliceBytes), kStages = 2;
  static constexpr int kQBytes = kQParts * kRows * KRow::kSteps * 32;
  static constexpr int kStateStride = kVDim + (40 - kVDim % 32) % 32;  // rows 8 banks apart
  static constexpr int kStateFloats = kRows * (kStateStride + 2);  // floats of a block's state: o, then m and l of each row
  static constexpr int kUsedBytes = kQBytes + kStages * kStageBytes;
  static constexpr int kSharedBytes = kUsedBytes > 4 * kStateFloats ? kUsedBytes : 4 * kStateFloats;
  static constexpr int kBlocks =
      kSharedBytes <= kOfMultiprocessor / 2 - 1536 ? 2 : 1;  // on a multiprocessor; limits registers
  static constexpr bool kSharesByLength = false, kHasGranules = false;
  static constexpr float kTilesOfMerge = 0.0f;  // all blocks of an item share its keys, however few
  static constexpr int kStatesAtOnce = 4;
  __device__ static bool has_tiles(const PrefillCall& call) { return call.tiles.lists != nullptr; }
  __device__ static void sync() { __syncthreads(); }
  __device__ static bool sync_any(bool x) { return __syncthreads_or(x) != 0; }
};

// ---- queries -----------------------------------------------------------------------------------------------------------

__device__ inline float load_number(const DeviceRows& rows, int64_t at) {
  if (rows.dtype == TANDEM_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[at]);
  if (rows.dtype == TANDEM_F16) return __half2float(static_cast<const __half*>(rows.data)[at]);
  return static_cast<const float*>(rows.data)[at];
}

// Writes the warp's rows to shared memory in the order of A fragments, [kQParts][kRows / 16][kSteps][32 lanes]. scale:
// undoes the scaling of rows into the range of f16, for rows g and g + 8 of each tile.
template <class Shape>
__device__ void stage_rows(const PrefillCall& call, const Piece& piece, uint4* fragments,
                           float (&scale)[Shape::kMTiles][2]) {
  using Number = typename Shape::K::KeyNumber;
  constexpr int kSteps = Shape::KRow::kSteps;
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m) {
    const int tile = static_cast<int>(threadIdx.x / 32) * Shape::kMTiles + m;
    float x[2][kSteps][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 16 * tile + lane / 4 + 8 * i;
      const int64_t at = r < piece.n_rows ? row_offset(call, piece, r, call.q.token_stride, call.q.head_stride) : 0;
      float largest = 0.0f;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
        for (int k = 0; k < 4; ++k) {
          const int dim = Shape::K::key_dim(j, t, k);
          x[i][j][k] = r < piece.n_rows && dim < Shape::kKDim ? load_number(call.q, at + dim) : 0.0f;
          largest = fmaxf(largest, fabsf(x[i][j][k]));
        }
      for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      const int exponent = Number::kNarrow ? to_range(largest) : 0;
      scale[m][i] = power_of_two(-exponent);
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
        for (int k = 0; k < 4; ++k) x[i][j][k] *= power_of_two(exponent);
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      uint32_t a[4][Shape::kQParts];
      for (int i = 0; i < 4; ++i) split<Number>(x[i % 2][j][i / 2 * 2], x[i % 2][j][i / 2 * 2 + 1], a[i]);
#pragma unroll
      for (int p = 0; p < Shape::kQParts; ++p)
        fragments[((p * (Shape::kRows / 16) + tile) * kSteps + j) * 32 + lane] =
            make_uint4(a[0][p], a[1][p], a[2][p], a[3][p]);
    }
  }
  __syncwarp();
}

// ---- keys --------------------------------------------------------------------------------------------------------------

// Copies a tile's rows of K and V. Slices of 16 keys are dealt to the warps, those of K first.
template <class Shape>
__device__ inline void copy_tile(const PrefillCall& call, const PrefillItem& item, TilePlace place, uint32_t stage) {
  using KRow = typename Shape::KRow;
  using VRow = typename Shape::VRow;
  const auto plane = [&](int p, int row_bytes, int slot) {
    return call.planes[p] + place.page + item.piece.head * call.head_stride[p] + slot * row_bytes;
  };
#pragma unroll
  for (int first = 0; first < 2 * Shape::kSlices; first += Shape::kWarps) {
    const int job = first + static_cast<int>(threadIdx.x / 32), slice = job % Shape::kSlices;
    const int key = place.key + 16 * slice, slot = place.slot + 16 * slice;
    const int lo = item.lo - key, hi = item.hi - key;
    if (job < Shape::kSlices)
      copy_slice<KRow>(stage + slice * KRow::kSliceBytes, plane(kPlaneK, KRow::kBytes, slot),
                       plane(kPlaneKScales, 2 * KRow::kScales, slot), lo, hi);
    else if (job < 2 * Shape::kSlices)
      copy_slice<VRow>(stage + Shape::kSlices * KRow::kSliceBytes + slice * VRow::kSliceBytes,
                       plane(kPlaneV, VRow::kBytes, slot), plane(kPlaneVScales, 2 * VRow::kScales, slot), lo, hi);
  }
}

// ---- softmax -----------------------------------------------------------------------------------------------------------

// A thread's part of its warp's state: rows g and g + 8 of each tile, and of o columns 2 t and 2 t + 1 of every 8 dims.
template <class Shape>
struct RowsState {
  float o[Shape::kMTiles][Shape::VRow::kSteps][2][4];
  float m[Shape::kMTiles][2];  // largest logit so far, in units of ln 2
  float l[Shape::kMTiles][2];  // sum of weights, of this thread's keys
};

template <class Shape>
using Logits = float[Shape::kMTiles][2 * Shape::kSlices][4];

// Adds the sums of a slice to its logits. Where K has scales, first multiplies by the keys' scales of a group of dims.
template <class Shape>
__device__ inline void add_apart(uint32_t k, const float (&apart)[Shape::kMTiles][2][4], int slice, int group,
                                 Logits<Shape>& s) {
  using Row = typename Shape::KRow;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 8 * half + threadIdx.x % 4 * 2 + i;
      const float scale = Row::kScales > 0 ? load_scale(k + 16 * Row::kStride + 2 * (key * Row::kScales + group)) : 1.0f;
#pragma unroll
      for (int m = 0; m < Shape::kMTiles; ++m)
        for (int row = 0; row < 4; row += 2) s[m][2 * slice + half][i + row] += scale * apart[m][half][i + row];
    }
}

// s += q.k. k: the tile's slices.
template <class Shape>
__device__ inline void multiply_queries(uint32_t k, const uint4* fragments, int n_q_parts, Logits<Shape>& s) {
  using Stored = typename Shape::K;
  using Row = typename Shape::KRow;
  constexpr int kSteps = Row::kSteps;
  const int lane = threadIdx.x % 32;
  // Sums are kept apart where scales are applied to them. They are also kept apart where q has the bits of an f32, as
  // products truncate sums and do not round them. Then registers have room for the sums of one slice. Otherwise q is read
  // from shared memory once for all slices.
  constexpr bool kIsApart = Stored::kGroup > 0 || Stored::kBits >= 16 && Shape::kQParts > 1;
  constexpr int kGroupSteps = Stored::kGroup > 0 ? Stored::kGroup / 16 : kIsApart ? 1 : kSteps;
  constexpr int kPass = kIsApart ? 1 : Shape::kSlices;
#pragma unroll
  for (int first_slice = 0; first_slice < Shape::kSlices; first_slice += kPass)
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroupSteps) {
      float apart[Shape::kMTiles][2][4] = {};
#pragma unroll
      for (int j = first; j < first + kGroupSteps && j < kSteps; ++j) {
        uint4 q[Shape::kQParts][Shape::kMTiles];
#pragma unroll
        for (int p = 0; p < Shape::kQParts; ++p)
#pragma unroll
          for (int m = 0; m < Shape::kMTiles; ++m) {
            const int tile = static_cast<int>(threadIdx.x / 32) * Shape::kMTiles + m;
            if (p == 0 || p < n_q_parts) q[p][m] = fragments[((p * (Shape::kRows / 16) + tile) * kSteps + j) * 32 + lane];
          }
#pragma unroll
        for (int slice = 0; slice < kPass; ++slice) {
          uint32_t b[Stored::kParts][4];
          Stored::keys(b, k + (first_slice + slice) * Row::kSliceBytes, Row::kStride, j, lane);
#pragma unroll
          for (int p = 0; p < Shape::kQParts; ++p) {
            if (p > 0 && p >= n_q_parts) break;
#pragma unroll
            for (int part = 0; part < Stored::kParts && part + p < 3; ++part)
#pragma unroll
              for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                  Stored::KeyNumber::multiply(kIsApart ? apart[m][half] : s[m][2 * slice + half],
                                              {q[p][m].x, q[p][m].y, q[p][m].z, q[p][m].w},
                                              {b[part][half], b[part][half + 2]});
          }
        }
      }
      if constexpr (kIsApart)
        add_apart<Shape>(k + first_slice * Row::kSliceBytes, apart, first_slice, first / kGroupSteps, s);
    }
}

// o += P V. v: the tile's slices. Keys are in [lo, hi) of the tile. The scales of other keys are undefined, and count as 0.
template <class Shape>
__device__ inline void multiply_weights(uint32_t v, const Logits<Shape>& p, int lo, int hi, RowsState<Shape>& state) {
  using Stored = typename Shape::V;
  using Number = typename Stored::ValueNumber;
  using Row = typename Shape::VRow;
  const int lane = threadIdx.x % 32;
  constexpr int kGroupSteps = Stored::kGroup > 0 ? Stored::kGroup / 16 : Row::kSteps;
#pragma unroll
  for (int slice = 0; slice < Shape::kSlices; ++slice)
#pragma unroll
    for (int first = 0; first < Row::kSteps; first += kGroupSteps) {
      const uint32_t rows = v + slice * Row::kSliceBytes;
      float scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      if (Stored::kGroup > 0)
        for (int i = 0; i < 4; ++i) {
          const int key = i / 2 * 8 + lane % 4 * 2 + i % 2, in_tile = 16 * slice + key;
          scale[i] = load_scale(rows + 16 * Row::kStride + 2 * (key * Row::kScales + first / kGroupSteps));
          if (in_tile < lo || in_tile >= hi) scale[i] = 0.0f;
        }
      uint32_t a[Shape::kPParts][Shape::kMTiles][4];
#pragma unroll
      for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* weights = &p[m][2 * slice + i / 2][i % 2 * 2];
          uint32_t parts[Shape::kPParts];
          split<Number>(weights[0] * scale[i / 2 * 2], weights[1] * scale[i / 2 * 2 + 1], parts);
          for (int part = 0; part < Shape::kPParts; ++part) a[part][m][i] = parts[part];
        }
#pragma unroll
      for (int block = first; block < first + kGroupSteps && block < Row::kSteps; ++block) {
        uint32_t b[Stored::kParts][4];
        Stored::values(b, rows, Row::kStride, block, lane);
#pragma unroll
        for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // The sums of a product are truncated, not rounded. Over many keys that would show in an f32's last bits.
            float apart[4] = {};
            float(&sum)[4] = Stored::kParts > 1 ? apart : state.o[m][block][half];
#pragma unroll
            for (int part = 0; part < Stored::kParts; ++part)
#pragma unroll
              for (int weight = 0; weight + part < Shape::kPParts; ++weight)
                Number::multiply(sum, a[weight][m], {b[part][half], b[part][half + 2]});
            if (Stored::kParts > 1)
              for (int i = 0; i < 4; ++i) state.o[m][block][half][i] += apart[i];
          }
      }
    }
}

// o += P V, for a slice's weights that are far (far_weights.cuh). Sets these to 0 in p. rows: of the slice.
template <class Shape>
__device__ inline void multiply_far(uint32_t rows, int slice, Logits<Shape>& p, RowsState<Shape>& state) {
  using Stored = typename Shape::V;
  using Row = typename Shape::VRow;
  static_assert(Stored::kGroup == 0, "weights meet no scales");
  bool has_far = false;
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m)
    has_far |= any_far<Stored>(p[m][2 * slice]) || any_far<Stored>(p[m][2 * slice + 1]);
  if (!__any_sync(~0u, has_far)) return;
  uint32_t a[2][Shape::kMTiles][4];
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* weights = &p[m][2 * slice + i / 2][i % 2 * 2];
      uint32_t parts[2];
      split<Bfloat>(take_far<Stored>(weights[0]), take_far<Stored>(weights[1]), parts);
      for (int part = 0; part < 2; ++part) a[part][m][i] = parts[part];
    }
#pragma unroll
  for (int block = 0; block < Row::kSteps; ++block) {
    uint32_t b[1][4];
    Stored::values(b, rows, Row::kStride, block, threadIdx.x % 32);
    const WideFragment<Stored> wide(b[0]);
#pragma unroll
    for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int part = 0; part < wide.kParts; ++part)
#pragma unroll
          for (int weight = 0; weight + part < 2; ++weight)
            Bfloat::multiply(state.o[m][block][half], a[weight][m], {wide.of[part][half], wide.of[part][half + 2]});
  }
}

// Turns logits into weights, and updates their sums and largest logits. o fades where the largest logit grew. scale: of
// products, positive.
template <class Shape>
__device__ inline void weigh(const float (&scale)[Shape::kMTiles][2], Logits<Shape>& s, RowsState<Shape>& state) {
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < 2 * Shape::kSlices; ++n) largest = fmaxf(largest, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
      for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      const float before = state.m[m][i], now = fmaxf(before, largest * scale[m][i]);
      const float from = now == -INFINITY ? 0.0f : now - Shape::Number::kShift;  // no key is seen yet
      const float faded = now == before ? 1.0f : exp2_fast(before - now);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2 * Shape::kSlices; ++n)
#pragma unroll
        for (int k = 2 * i; k < 2 * i + 2; ++k) {
          s[m][n][k] = exp2_fast(fmaf(s[m][n][k], scale[m][i], -from));
          sum += s[m][n][k];
        }
      state.m[m][i] = now;
      state.l[m][i] = state.l[m][i] * faded + sum;
      if (__any_sync(~0u, faded != 1.0f)) {
#pragma unroll
        for (int b = 0; b < Shape::VRow::kSteps; ++b)
          for (int k = 0; k < 4; ++k) state.o[m][b][k / 2][2 * i + k % 2] *= faded;
      }
    }
}

// The keys that a thread's rows see, and the factors from their products to logits.
template <class Shape>
struct RowsView {
  RowKeys keys[Shape::kMTiles][2];
  int classes[Shape::kMTiles][2];
  float scale[Shape::kMTiles][2];
};

template <class Shape>
__device__ inline void attend_tile(const PrefillCall& call, const PrefillItem& item, const RowsView<Shape>& view, int tile,
                                   uint32_t stage, const uint4* fragments, RowsState<Shape>& state) {
  NamedUnit named[Shape::kMTiles][2];
  if (Shape::has_tiles(call)) {
#pragma unroll
    for (int m = 0; m < Shape::kMTiles; ++m)
      for (int i = 0; i < 2; ++i) named[m][i] = find_named<Shape::kTileKeys>(call, item, tile, view.classes[m][i]);
  }
  Logits<Shape> s = {};
  multiply_queries<Shape>(stage, fragments, call.n_q_parts, s);
  const int base = Shape::has_tiles(call) ? named[0][0].token : tile * Shape::kTileKeys, lane = threadIdx.x % 32;
  if (call.soft_cap > 0.0f) {
#pragma unroll
    for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < 2 * Shape::kSlices; ++n)
        for (int i = 0; i < 4; ++i) s[m][n][i] = call.soft_cap * kLog2E * tanhf(s[m][n][i] * view.scale[m][i / 2]);
  }
  if (Shape::has_tiles(call) || base < item.common_lo || base + Shape::kTileKeys > item.common_hi) {
#pragma unroll
    for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < 2 * Shape::kSlices; ++n)
        for (int i = 0; i < 4; ++i) {
          const int key = base + 8 * n + lane % 4 * 2 + i % 2;
          const bool is_named = !Shape::has_tiles(call) || named[m][i / 2].has(view.classes[m][i / 2]);
          if (!is_named || key < view.keys[m][i / 2].lo || key >= view.keys[m][i / 2].hi) s[m][n][i] = -INFINITY;
        }
  }
  if (call.soft_cap > 0.0f) {
    float one[Shape::kMTiles][2];
    for (int m = 0; m < Shape::kMTiles; ++m) one[m][0] = one[m][1] = 1.0f;
    weigh<Shape>(one, s, state);
  } else {
    weigh<Shape>(view.scale, s, state);
  }
  const uint32_t v = stage + Shape::kSlices * Shape::KRow::kSliceBytes;
  if constexpr (kHasFar<typename Shape::V>)
#pragma unroll
    for (int slice = 0; slice < Shape::kSlices; ++slice)
      multiply_far<Shape>(v + slice * Shape::VRow::kSliceBytes, slice, s, state);
  multiply_weights<Shape>(v, s, item.lo - base, item.hi - base, state);
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// Stores rows to memory: o [kRows][kStateStride], then m and l [kRows].
template <class Shape>
__device__ void store_rows(const RowsState<Shape>& state, float* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = static_cast<int>(threadIdx.x / 32) * 16 * Shape::kMTiles + 16 * m + 8 * i + lane / 4;
      float l = state.l[m][i];
      for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(~0u, l, mask);
      if (lane % 4 == 0) {
        to[Shape::kRows * Shape::kStateStride + 2 * r] = state.m[m][i];
        to[Shape::kRows * Shape::kStateStride + 2 * r + 1] = l;
      }
#pragma unroll
      for (int b = 0; b < Shape::VRow::kSteps; ++b)
        for (int k = 0; k < 4; ++k) {
          const int dim = Shape::V::value_dim(b, k / 2 * 8 + lane % 4 * 2 + k % 2);
          if (dim < Shape::kVDim) to[r * Shape::kStateStride + dim] = state.o[m][b][k / 2][2 * i + k % 2];
        }
    }
}

template <class Shape>
__device__ __forceinline__ void attend_item(const PrefillCall& call) {
  extern __shared__ __align__(128) std::byte shared[];
  const PrefillItem item = find_item<Shape>(call);
  if (item.piece.n_rows == 0) return;
  auto* const fragments = reinterpret_cast<uint4*>(shared);
  const uint32_t stages = shared_address(shared + Shape::kQBytes);
  const auto place = [&](int tile) {
    return tile < item.end_tile ? place_of<Shape, Shape::kTileKeys>(call, item, tile) : TilePlace{0, 0, 0};
  };
  const auto copy = [&](int tile, TilePlace at) {
    if (tile < item.end_tile) copy_tile<Shape>(call, item, at, stages + tile % 2 * Shape::kStageBytes);
    commit_copies();
  };
  copy(item.first_tile, place(item.first_tile));
  RowsView<Shape> view;
  stage_rows<Shape>(call, item.piece, fragments, view.scale);
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m)
    for (int i = 0; i < 2; ++i) {
      const int row = (static_cast<int>(threadIdx.x / 32) * Shape::kMTiles + m) * 16 + 8 * i + threadIdx.x % 32 / 4;
      view.keys[m][i] = keys_of_row(call, item, row);
      view.classes[m][i] = class_of_row(call, item, row);
      view.scale[m][i] *= logit_scale(call);
    }
  RowsState<Shape> state = {};
  for (int m = 0; m < Shape::kMTiles; ++m) state.m[m][0] = state.m[m][1] = -INFINITY;
  TilePlace next = place(item.first_tile + 1);
  for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
    wait_for_copies<0>();
    __syncthreads();
    copy(tile + 1, next);
    next = place(tile + 2);
    attend_tile<Shape>(call, item, view, tile, stages + tile % 2 * Shape::kStageBytes, fragments, state);
  }
  __syncthreads();
  float* own =
      call.n_splits == 1 ? reinterpret_cast<float*>(shared) : call.states + int64_t{blockIdx.x} * Shape::kStateFloats;
  store_rows<Shape>(state, own);
  finish_item<Shape>(call, item, own);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) prefill_kernel(const __grid_constant__ PrefillCall call) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsForThisCode<Shape::kOfMultiprocessor>) attend_item<Shape>(call);
#endif
}

}  // namespace tandem::cuda
