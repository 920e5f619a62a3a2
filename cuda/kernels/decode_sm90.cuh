// SPDX-License-Identifier: MIT
// Decode for compute capability 9.0: what decode.cuh does, brought by the copy engine and turned by 90 degrees.
//
// A block has a multiprocessor to itself, and of its piece (decode_work.cuh) every warp every kWarps-th unit of kKeys keys.
// A warp's units travel through kStages stages of its own, as boxes that one lane asks for; nothing in the loop waits for
// another warp. Keys are the columns of the logits, so that weights come out of the softmax as the next product takes them:
//
//   S [16 x 8 keys]    = q [16 x dims] K [dims x 8 keys]        softmax over keys: along a row, which 4 lanes share
//   O [dims x 8 rows] += V [dims x 16 keys] P [16 keys x 8 rows]
//
// Of the 16 rows of q, 8 are a tile of query rows and 8 another, or, where there is but one, the second summand of the
// first.
//
// Codes are multiplied with their offset (stored_panels.cuh). That of K is taken off by where sums begin, which depends on q
// alone. That of V adds up in a row of its own, from the very weights that multiply V, and is taken off at the end.
//
// A call is short beside what surrounds reading: a block looks up its piece, asks for its keys, and stages q meanwhile; its
// warps' states become one, and the last block of an item loads all states of a row at once. The kernel behind may start
// before this one ends.
#pragma once

#include "cuda/kernels/decode_work.cuh"
#include "cuda/kernels/query_rows.cuh"
#include "cuda/kernels/stored_panels.cuh"

namespace tandem::cuda {

__host__ __device__ constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// What a kernel is made for. kTiles: query rows / 8.
template <class K_, class V_, int kKDim_, int kVDim_, int kTiles_>
struct DecodeSm90Shape {
  using K = K_;
  using V = V_;
  static constexpr int kKDim = kKDim_, kVDim = kVDim_, kTiles = kTiles_, kRows = 8 * kTiles_;
  static constexpr int kKeys = K::kBits < 16 ? 32 : 16, kUnitKeys = kKeys;
  using KRows = Panels<kKDim * K::kBits / 8, kKeys>;
  using VRows = Panels<kVDim * V::kBits / 8, kKeys>;
  static constexpr int kKSteps = round_up((kKDim + 15) / 16, K::kRound), kVSteps = round_up((kVDim + 15) / 16, V::kRound);
  static constexpr int kKScales = K::kGroup > 0 ? (kKDim + 31) / 32 : 0, kVScales = V::kGroup > 0 ? (kVDim + 31) / 32 : 0;
  static constexpr int kQParts = K::KeyNumber::kNarrow ? 2 : 3, kPParts = 2;
  static constexpr int kQuads = kTiles == 2 ? kQParts : (kQParts + 1) / 2;  // fragments of q for a step

  static constexpr int kBoxBytes = KRows::kBytes + VRows::kBytes, kScaleBytes = 2 * kKeys * (kKScales + kVScales);
  static constexpr int kStageBytes = kBoxBytes + kScaleBytes;
  static constexpr int kQBytes = kQuads * kKSteps * 512, kStartBytes = kKScales * 64;
  static constexpr int kRoom = 227 * 1024 - kQBytes - kStartBytes - 2048;
  // Conversions take instructions: more warps hide more of what these wait for. Else the longer pipelines do.
  static constexpr int kMostWarps = K::kBits < 8 ? 12 : 8;
  static constexpr int kWarps = 2 * kMostWarps * kStageBytes <= kRoom ? kMostWarps : 16 * kStageBytes <= kRoom ? 8 : 4;
  static constexpr int kFit = kRoom / (kWarps * kStageBytes), kStages = kFit < 4 ? kFit : 4;
  static_assert(kStages >= 2);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLeastUnits = kWarps / 2, kPieceUnits = 2 * kWarps, kTails = kTailsOfBlock,
                       kTailedUnits = 16 * kWarps;

  // States: o, then m and l of each row. Those of warps lie in the pipeline's place, rows 4 banks apart.
  static constexpr int kStateStride = kVDim, kStateFloats = kRows * (kVDim + 2);
  static constexpr int kWarpStride = kVDim + 4, kWarpFloats = kRows * (kWarpStride + 2);
  static constexpr int kStagesBytes = kWarps * kStages * kBoxBytes;
  static constexpr int kPipelineBytes =
      round_up(kStagesBytes > 4 * kWarps * kWarpFloats ? kStagesBytes : 4 * kWarps * kWarpFloats, 128);
  static constexpr int kScalesAt = kPipelineBytes, kQAt = kScalesAt + kWarps * kStages * kScaleBytes;
  static constexpr int kStartAt = kQAt + kQBytes, kSharedBytes = kStartAt + kStartBytes;
};

// ---- queries -----------------------------------------------------------------------------------------------------------

// What is staged of q: fragments [kQuads][kKSteps][32], the beginnings of sums [kKScales][8], and what takes products to
// logits in units of ln 2 (without a soft cap).
struct StagedQueries {
  uint4* fragments;
  float2* starts;
  float* scale;  // [kRows]
};

template <class Shape>
inline constexpr int kQueryItems = (4 * Shape::kKSteps + 31) / 32;  // of four numbers, of a lane

template <class Shape, class T>
__device__ inline void load_row(const DecodeCall& call, const Piece& piece, int r, float (&x)[kQueryItems<Shape>][4]) {
  const bool is_row = r < piece.n_rows;
  const T* from = static_cast<const T*>(call.q.data) +
                  (is_row ? row_offset(call, piece, r, call.q.token_stride, call.q.head_stride) : 0);
#pragma unroll
  for (int k = 0; k < kQueryItems<Shape>; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int item = threadIdx.x % 32 + 32 * k, dim = Shape::K::key_dim(item / 4, item % 4, i);
      x[k][i] = is_row && item < 4 * Shape::kKSteps && dim < Shape::kKDim ? static_cast<float>(from[dim]) : 0.0f;
    }
}

// Puts a lane's numbers of a row where products take them, and adds up what the offset of codes makes of them.
template <class Shape>
__device__ inline void stage_row(int r, const float (&x)[kQueryItems<Shape>][4], const StagedQueries& staged) {
  using K = typename Shape::K;
  using Number = typename K::KeyNumber;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kQueryItems<Shape>; ++k) {
    const int item = lane + 32 * k, j = item / 4;
    uint32_t low[4] = {}, high[4] = {};  // kQParts of them; the fourth is 0
    uint32_t(&low_parts)[Shape::kQParts] = reinterpret_cast<uint32_t(&)[Shape::kQParts]>(low);
    uint32_t(&high_parts)[Shape::kQParts] = reinterpret_cast<uint32_t(&)[Shape::kQParts]>(high);
    split<Number>(x[k][0] * K::key_factor(0), x[k][1] * K::key_factor(1), low_parts);
    split<Number>(x[k][2] * K::key_factor(2), x[k][3] * K::key_factor(3), high_parts);
    uint4* const to = staged.fragments + j * 32 + r % 8 * 4 + item % 4;
    if (item < 4 * Shape::kKSteps) {
#pragma unroll
      for (int quad = 0; quad < Shape::kQuads; ++quad) {
        uint4* const at = to + quad * Shape::kKSteps * 32;
        if (Shape::kTiles == 1) {
          *at = make_uint4(low[2 * quad], low[2 * quad + 1], high[2 * quad], high[2 * quad + 1]);
        } else {
          reinterpret_cast<uint32_t*>(at)[r / 8] = low[quad];
          reinterpret_cast<uint32_t*>(at)[2 + r / 8] = high[quad];
        }
      }
    }
    if (Shape::kKScales == 0) continue;
    float sums[2] = {};
#pragma unroll
    for (int p = 0; p < Shape::kQParts; ++p) {
      const float2 a = Number::unpack(low[p]), b = Number::unpack(high[p]);
      sums[Shape::kTiles == 1 ? p : 0] += (a.x + a.y) / K::key_factor(0) + (b.x + b.y) / K::key_factor(2);
    }
#pragma unroll
    for (int p = 0; p < (Shape::kTiles == 1 ? 2 : 1); ++p) {
      for (int mask = 4; mask > 0; mask /= 2) sums[p] += __shfl_xor_sync(~0u, sums[p], mask);
      const float start = sums[p] * (-static_cast<float>(K::kOffset) / static_cast<float>(1 << K::kKeyExponent));
      float* const at = reinterpret_cast<float*>(staged.starts + item / 8 * 8 + r % 8);
      if (lane % 8 == 0 && item < 4 * Shape::kKSteps) at[Shape::kTiles == 1 ? p : r / 8] = start;
    }
  }
}

// The numbers of a warp's rows. They are asked for before keys are, as they would arrive behind all of these.
template <class Shape>
struct LoadedQueries {
  static constexpr int kOfWarp = (Shape::kRows + Shape::kWarps - 1) / Shape::kWarps;
  float x[kOfWarp][kQueryItems<Shape>][4];

  __device__ static int row(int i) { return static_cast<int>(threadIdx.x / 32) + i * Shape::kWarps; }
  template <class T>
  __device__ void load_as(const DecodeCall& call, const Piece& piece) {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) load_row<Shape, T>(call, piece, row(i), x[i]);
  }
  __device__ void load(const DecodeCall& call, const Piece& piece) {
    if (call.q.dtype == TANDEM_BF16)
      load_as<__nv_bfloat16>(call, piece);
    else if (call.q.dtype == TANDEM_F16)
      load_as<__half>(call, piece);
    else
      load_as<float>(call, piece);
  }
};

template <class Shape>
__device__ void stage_queries(const DecodeCall& call, LoadedQueries<Shape>& loaded, const StagedQueries& staged) {
  using Loaded = LoadedQueries<Shape>;
#pragma unroll
  for (int n = 0; n < Loaded::kOfWarp; ++n) {
    const int r = Loaded::row(n);
    if (r >= Shape::kRows) break;
    float(&x)[kQueryItems<Shape>][4] = loaded.x[n];
    int exponent = 0;
    if (Shape::K::KeyNumber::kNarrow) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < kQueryItems<Shape>; ++k)
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(x[k][i]));
      for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      exponent = to_range(largest);
#pragma unroll
      for (int k = 0; k < kQueryItems<Shape>; ++k)
        for (int i = 0; i < 4; ++i) x[k][i] *= power_of_two(exponent);
    }
    if (threadIdx.x % 32 == 0)
      staged.scale[r] = power_of_two(-exponent) * static_cast<float>(1 << Shape::K::kKeyExponent) * call.sm_scale *
                        (call.soft_cap > 0.0f ? 1.0f : kLog2E);
    stage_row<Shape>(r, x, staged);
  }
}

// ---- keys --------------------------------------------------------------------------------------------------------------

// A warp's stages: of boxes, of scales, and a barrier each.
template <class Shape>
struct Pipeline {
  uint32_t boxes, scales, barriers;
  int stage = 0, parity = 0;  // of the unit that is read next

  __device__ uint32_t box(int s) const { return boxes + s * Shape::kBoxBytes; }
  __device__ uint32_t scale(int s) const { return scales + s * Shape::kScaleBytes; }
  __device__ uint32_t barrier(int s) const { return barriers + 8 * s; }
  __device__ void advance() {
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
  }
};

struct KeyMaps {
  const CUtensorMap* k;
  const CUtensorMap* v;
};

// A warp's way through the pages: lane i knows where its i-th unit from `base` on is. At first none is known.
struct UnitPlaces {
  const std::byte* head[kPlanes];  // of the page called 0
  int base = -32;
  int slot = 0;
  int64_t page = 0;  // bytes from the page called 0
};

// first: the warp's first unit, of the sequence's from token 0 on.
template <class Shape>
__device__ inline void look_up(const DecodeCall& call, const Piece& piece, int first, int i, UnitPlaces& places) {
  places.base = i;
  const int unit = first + (i + static_cast<int>(threadIdx.x % 32)) * Shape::kWarps;
  const int page_units = call.page_len / Shape::kKeys, page_idx = divide(unit, page_units);
  places.slot = (unit - page_idx * page_units) * Shape::kKeys;
  if (piece.sequence.begin < piece.sequence.end && int64_t{unit} * Shape::kKeys < piece.sequence.end) {
    const int table_len = piece.sequence.table_len, rounds = page_idx < table_len ? 0 : page_idx / table_len;
    places.page = call.page_tables[piece.sequence.table_begin + page_idx - rounds * table_len];
  }
}

// Asks for the warp's i-th unit.
template <class Shape>
__device__ inline void ask_for_keys(const DecodeCall& call, const KeyMaps& maps, const Piece& piece, int first, int i,
                                    UnitPlaces& places, const Pipeline<Shape>& pipeline, int stage) {
  if (i - places.base >= 32) look_up<Shape>(call, piece, first, i, places);
  const int64_t page = __shfl_sync(~0u, places.page, i - places.base);
  const int slot = __shfl_sync(~0u, places.slot, i - places.base);
  if (!is_elected()) return;
  const uint32_t barrier = pipeline.barrier(stage);
  const auto rows_of = [&](int p, int row_bytes) { return places.head[p] + page + slot * row_bytes; };
  expect_bytes(barrier, Shape::kStageBytes);
  const auto ask = [&](auto rows, const CUtensorMap* map, int p, uint32_t to) {
    using Rows = decltype(rows);
    const std::byte* const at = rows_of(p, Rows::kRowBytes);
#pragma unroll
    for (int panel = 0; panel < Rows::kCount; ++panel)
      copy_box(to + panel * Rows::kPanelBytes, map, panel * Rows::kWidth, at, barrier);
  };
  ask(typename Shape::KRows{}, maps.k, kPlaneK, pipeline.box(stage));
  ask(typename Shape::VRows{}, maps.v, kPlaneV, pipeline.box(stage) + Shape::KRows::kBytes);
  const auto ask_scales = [&](int n_scales, int p, uint32_t to) {
    if (n_scales > 0) copy_bytes(to, rows_of(p, 2 * n_scales), static_cast<uint32_t>(2 * n_scales * Shape::kKeys), barrier);
  };
  ask_scales(Shape::kKScales, kPlaneKScales, pipeline.scale(stage));
  ask_scales(Shape::kVScales, kPlaneVScales, pipeline.scale(stage) + 2 * Shape::kKeys * Shape::kKScales);
}

// Values outside [lo, hi), which may be NaN, become 0: of rows, or of their scales where codes have some.
template <class Shape>
__device__ inline void clear_values(uint32_t values, uint32_t scales, int lo, int hi) {
  using Rows = typename Shape::VRows;
  constexpr int kPieces = Rows::kWidth / 16;
  const int lane = threadIdx.x % 32;
  const auto is_outside = [&](int key) { return key < lo || key >= hi; };
  if (Shape::kVScales > 0) {
    for (int at = lane; at < Shape::kKeys * Shape::kVScales; at += 32)
      if (is_outside(at / (Shape::kVScales > 0 ? Shape::kVScales : 1)))
        asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(scales + 2 * at), "h"(uint16_t{0}) : "memory");
  } else {
    for (int at = lane; at < Rows::kBytes / 16; at += 32)
      if (is_outside(at / kPieces % Shape::kKeys))
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(values + 16 * at), "r"(0) : "memory");
  }
  order_before_copies();
  __syncwarp();
}

// ---- products ----------------------------------------------------------------------------------------------------------

// A lane's part of its warp's state: m and l of row g of each tile, l of its own keys; o of rows 2 t, 2 t + 1 and dims
// value_dim(b, g), (b, g + 8); of `off`, row i is what the offset of codes makes of group i.
template <class Shape>
struct RowState {
  float o[Shape::kTiles][Shape::kVSteps][4];
  float off[Shape::kTiles][4];
  float m[Shape::kTiles], l[Shape::kTiles];
};

template <class Shape>
__device__ inline void clear(RowState<Shape>& state) {
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    state.m[n] = -INFINITY, state.l[n] = 0.0f;
    for (int i = 0; i < 4; ++i) state.off[n][i] = 0.0f;
    for (int b = 0; b < Shape::kVSteps; ++b)
      for (int i = 0; i < 4; ++i) state.o[n][b][i] = 0.0f;
  }
}

// Scales of a key's groups, in pairs.
template <int kScales>
struct KeyScales {
  static constexpr int kPairs = (kScales + 1) / 2;
  uint32_t pairs[kPairs > 0 ? kPairs : 1];

  __device__ void load(uint32_t at) {
    if constexpr (kScales % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
        const uint2 words = load_two_words(at + 4 * i);
        pairs[i] = words.x, pairs[i + 1] = words.y;
      }
    } else if constexpr (kScales % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] = load_word(at + 4 * i);
    } else {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        uint16_t bits;
        asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(at + 2 * i) : "memory");
        pairs[i / 2] = i % 2 == 0 ? bits : pairs[i / 2] | static_cast<uint32_t>(bits) << 16;
      }
    }
  }
  __device__ float at(int group) const {
    const float2 both = Half::unpack(pairs[group / 2]);
    return group % 2 == 0 ? both.x : both.y;
  }
};

// The keys of a unit are, for a lane, places 2 t and 2 t + 1 of every 8.
template <class Shape, int kScales>
__device__ inline void load_scales(uint32_t scales, KeyScales<kScales> (&to)[Shape::kKeys / 8][2]) {
  if constexpr (kScales > 0) {
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[n][i].load(scales + 2 * kScales * (8 * n + Shape::K::key_of(static_cast<int>(threadIdx.x % 4) * 2 + i)));
  }
}

template <class Shape>
using Logits = float[Shape::kTiles][Shape::kKeys / 8][2];

// s = q.k before scale, of row g of each tile.
template <class Shape>
__device__ inline void multiply_keys(const DecodeCall& call, uint32_t k, uint32_t scales, const StagedQueries& staged,
                                     Logits<Shape>& s) {
  using K = typename Shape::K;
  constexpr int kBlocks = Shape::kKeys / 8, kSumSteps = 2;  // sums are cut off, not rounded: so many steps are one
  const int lane = threadIdx.x % 32;
  const uint32_t row = K::template key_row<typename Shape::KRows>(k, lane);
  KeyScales<Shape::kKScales> scale[kBlocks][2];
  load_scales<Shape>(scales, scale);
#pragma unroll
  for (int first = 0; first < Shape::kKSteps; first += kSumSteps) {
    const float2 start = K::kGroup > 0 ? staged.starts[first / 2 * 8 + lane / 4] : make_float2(0.0f, 0.0f);
    const float begin[4] = {start.x, start.x, start.y, start.y};
    float sum[kBlocks][4];
#pragma unroll
    for (int j = first; j < first + kSumSteps && j < Shape::kKSteps; j += K::kKeySteps) {
      uint32_t b[K::kKeySteps][kBlocks][2];
      K::template keys<typename Shape::KRows>(b, row, j);
#pragma unroll
      for (int quad = 0; quad < Shape::kQuads; ++quad) {
        if (quad > 0 && call.n_q_parts <= (Shape::kTiles == 1 ? 2 : 1) * quad) break;
#pragma unroll
        for (int i = 0; i < K::kKeySteps; ++i) {
          const uint4 q = staged.fragments[(quad * Shape::kKSteps + j + i) * 32 + lane];
#pragma unroll
          for (int n = 0; n < kBlocks; ++n)
            if (quad == 0 && j + i == first)
              K::KeyNumber::multiply(sum[n], {q.x, q.y, q.z, q.w}, b[i][n], begin);
            else
              K::KeyNumber::multiply(sum[n], {q.x, q.y, q.z, q.w}, b[i][n]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float each = K::kGroup > 0 ? scale[n][i].at(first / 2) : 1.0f;
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) {
          const float x = Shape::kTiles == 1 ? sum[n][i] + sum[n][i + 2] : sum[n][i + 2 * tile];
          s[tile][n][i] = first == 0 ? each * x : K::kGroup > 0 ? s[tile][n][i] + each * x : s[tile][n][i] + x;
        }
      }
  }
}

// Weights, times the scales of a group, as the summands of a product.
template <class Shape>
struct WeightParts {
  uint32_t of[Shape::kPParts][Shape::kTiles][Shape::kKeys / 8];

  __device__ void make(const Logits<Shape>& p, const KeyScales<Shape::kVScales> (&scale)[Shape::kKeys / 8][2], int group) {
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile) {
        const float first = Shape::kVScales > 0 ? scale[n][0].at(group) : 1.0f;
        const float second = Shape::kVScales > 0 ? scale[n][1].at(group) : 1.0f;
        uint32_t parts[Shape::kPParts];
        split<typename Shape::V::ValueNumber>(p[tile][n][0] * first, p[tile][n][1] * second, parts);
#pragma unroll
        for (int part = 0; part < Shape::kPParts; ++part) of[part][tile][n] = parts[part];
      }
  }
  __device__ void multiply(int tile, int k, const uint32_t (&a)[4], float (&sum)[4]) const {
#pragma unroll
    for (int part = 0; part < Shape::kPParts; ++part)
      Shape::V::ValueNumber::multiply(sum, a, {of[part][tile][2 * k], of[part][tile][2 * k + 1]});
  }
};

// o += V P.
template <class Shape>
__device__ inline void multiply_values(uint32_t v, uint32_t scales, const Logits<Shape>& p, RowState<Shape>& state) {
  using V = typename Shape::V;
  const int lane = threadIdx.x % 32;
  const uint32_t row = V::template value_row<typename Shape::VRows, typename Shape::K>(v, lane);
  KeyScales<Shape::kVScales> scale[Shape::kKeys / 8][2];
  load_scales<Shape>(scales, scale);
  WeightParts<Shape> weights;
#pragma unroll
  for (int first = 0; first < Shape::kVSteps; first += V::kValueSteps) {
    uint32_t a[Shape::kKeys / 16][V::kValueSteps][4];
    V::template values<typename Shape::VRows>(a, row, first);
#pragma unroll
    for (int i = 0; i < V::kValueSteps; ++i) {
      const int block = first + i;
      if (block >= Shape::kVSteps) break;
      if (block == 0 || (V::kGroup > 0 && block % 2 == 0)) weights.make(p, scale, block / 2);
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile)
#pragma unroll
        for (int k = 0; k < Shape::kKeys / 16; ++k) {
          weights.multiply(tile, k, a[k][i], state.o[tile][block]);
          if (V::kGroup == 0 || block % 2 != 0) continue;
          const uint32_t off = lane / 4 == block / 2 ? V::kOffset * 0x10001u : 0;
          weights.multiply(tile, k, {off, 0, off, 0}, state.off[tile]);
        }
    }
  }
}

// ---- softmax -----------------------------------------------------------------------------------------------------------

// Which keys a lane's rows see, and how products become powers of 2.
template <class Shape>
struct SeenKeys {
  float scale[Shape::kTiles];
  int64_t lo[Shape::kTiles], hi[Shape::kTiles];
  int64_t all_lo, all_hi;  // what every row sees
};

template <class Shape>
__device__ SeenKeys<Shape> see_keys(const DecodeCall& call, const Piece& piece, const float* scale) {
  SeenKeys<Shape> seen;
  const DeviceSequence& sequence = piece.sequence;
  seen.all_lo = sequence.begin;
  seen.all_hi = sequence.end - sequence.q_len + 1;
  if (call.sliding_window > 0) seen.all_lo = max(seen.all_lo, sequence.end - call.sliding_window);
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    const int r = 8 * n + threadIdx.x % 32 / 4;
    seen.scale[n] = scale[r];
    seen.hi[n] = seen.all_hi + (piece.first_row + r) / call.group_size;
    seen.lo[n] = call.sliding_window > 0 ? max(sequence.begin, seen.hi[n] - call.sliding_window) : sequence.begin;
  }
  return seen;
}

// Products to logits in units of ln 2; -inf where a row does not see the key.
template <class Shape>
__device__ inline void make_logits(const DecodeCall& call, const SeenKeys<Shape>& seen, int64_t key, bool is_whole,
                                   Logits<Shape>& s) {
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile)
    for (int n = 0; n < Shape::kKeys / 8; ++n)
      for (int i = 0; i < 2; ++i) s[tile][n][i] *= seen.scale[tile];
  if (call.soft_cap > 0.0f) {
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile)
      for (int n = 0; n < Shape::kKeys / 8; ++n)
        for (int i = 0; i < 2; ++i) s[tile][n][i] = call.soft_cap * tanhf(s[tile][n][i] / call.soft_cap) * kLog2E;
  }
  if (is_whole) return;
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile)
    for (int n = 0; n < Shape::kKeys / 8; ++n)
      for (int i = 0; i < 2; ++i) {
        const int64_t token = key + 8 * n + Shape::K::key_of(static_cast<int>(threadIdx.x % 4) * 2 + i);
        if (token < seen.lo[tile] || token >= seen.hi[tile]) s[tile][n][i] = -INFINITY;
      }
}

// Logits to weights, times 2^kShift; what there is of the state fades where a larger logit has come.
template <class Shape>
__device__ inline void weigh(Logits<Shape>& s, RowState<Shape>& state) {
#pragma unroll
  for (int tile = 0; tile < Shape::kTiles; ++tile) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(s[tile][n][0], s[tile][n][1]));
    for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    const float before = state.m[tile], now = fmaxf(before, largest);
    const float from = now == -INFINITY ? 0.0f : now - static_cast<float>(Shape::V::kShift);  // nothing is seen yet
    const float faded = now == before ? 1.0f : exp2_fast(before - now);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; ++n)
      for (int i = 0; i < 2; ++i) sum += s[tile][n][i] = exp2_fast(s[tile][n][i] - from);
    state.m[tile] = now;
    state.l[tile] = state.l[tile] * faded + sum;
    if (!__any_sync(~0u, faded != 1.0f)) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_column = __shfl_sync(~0u, faded, (threadIdx.x % 4 * 2 + i) * 4);
#pragma unroll
      for (int b = 0; b < Shape::kVSteps; ++b) state.o[tile][b][i] *= of_column, state.o[tile][b][i + 2] *= of_column;
      state.off[tile][i] *= of_column;
    }
  }
}

// A unit, from `key` on, into the warp's state.
template <class Shape>
__device__ inline void attend_unit(const DecodeCall& call, const Piece& piece, const SeenKeys<Shape>& seen, int64_t key,
                                   uint32_t boxes, uint32_t scales, const StagedQueries& staged, RowState<Shape>& state) {
  const uint32_t values = boxes + Shape::KRows::kBytes, value_scales = scales + 2 * Shape::kKeys * Shape::kKScales;
  const bool is_whole = key >= seen.all_lo && key + Shape::kKeys <= seen.all_hi;
  if (!is_whole)
    clear_values<Shape>(values, value_scales, static_cast<int>(max(piece.sequence.begin - key, int64_t{0})),
                        static_cast<int>(min(piece.sequence.end - key, int64_t{Shape::kKeys})));
  Logits<Shape> s;
  multiply_keys<Shape>(call, boxes, scales, staged, s);
  make_logits<Shape>(call, seen, key, is_whole, s);
  weigh<Shape>(s, state);
  multiply_values<Shape>(values, value_scales, s, state);
}

// ---- states ------------------------------------------------------------------------------------------------------------

// A warp's state to shared memory: o [kRows][kWarpStride], then m and l [kRows].
template <class Shape>
__device__ void store_state(const RowState<Shape>& state, float* to) {
  using V = typename Shape::V;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float l_factor = power_of_two(-V::kShift), o_factor = power_of_two(V::kValueExponent - V::kShift);
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) {
    float l = state.l[n];
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(~0u, l, mask);
    if (t == 0)
      reinterpret_cast<float2*>(to + Shape::kRows * Shape::kWarpStride)[8 * n + g] = make_float2(state.m[n], l * l_factor);
#pragma unroll
    for (int b = 0; b < Shape::kVSteps; ++b)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float off = V::kGroup > 0 ? __shfl_sync(~0u, state.off[n][i], b / 2 * 4 + t) : 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = V::value_dim(b, g + 8 * half);
          const float x = state.o[n][b][i + 2 * half] * V::value_factor(8 * half);
          if (dim < Shape::kVDim) to[(8 * n + 2 * t + i) * Shape::kWarpStride + dim] = (x - off) * o_factor;
        }
      }
  }
}

// A row of a state: a lane has dims 4 lane to 4 lane + 3, and so on 128 further.
template <class Shape>
struct MergedRow {
  static constexpr int kOfLane = (Shape::kVDim + 127) / 128;
  float4 o[kOfLane];
  float m, l;
};

__device__ inline void fade(float4& to, float by) { to.x *= by, to.y *= by, to.z *= by, to.w *= by; }
__device__ inline void add(float4& to, float weight, const float4& x) {
  to.x += weight * x.x, to.y += weight * x.y, to.z += weight * x.z, to.w += weight * x.w;
}

// n_states states, the i-th at state(i), into one: a warp per row. kAtOnce states are loaded at once, weights and all: that
// is most of the time it takes. out(r, row) for every row.
template <class Shape, bool kGlobal, int kStride, class StateAt, class Out>
__device__ void merge_rows(int n_states, int n_rows, StateAt state, Out out) {
  using Row = MergedRow<Shape>;
  constexpr int kAtOnce = 16 / Row::kOfLane;
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < n_rows; r += Shape::kWarps) {
    Row row = {{}, -INFINITY, 0.0f};
    for (int first = 0; first < n_states; first += kAtOnce) {
      const int n = min(kAtOnce, n_states - first);
      float2 rest = make_float2(-INFINITY, 0.0f);
      if (lane < n)
        rest = load_state<kGlobal>(reinterpret_cast<const float2*>(state(first + lane) + Shape::kRows * kStride) + r);
      float4 x[kAtOnce][Row::kOfLane];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int k = 0; k < Row::kOfLane; ++k) {
          x[i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (i < n && 4 * lane + 128 * k < Shape::kVDim)
            x[i][k] = load_state<kGlobal>(reinterpret_cast<const float4*>(state(first + i) + r * kStride) + lane + 32 * k);
        }
      float m = rest.x;
      for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, mask));
      m = fmaxf(m, row.m);
      const float own = rest.x == -INFINITY ? 0.0f : exp2_fast(rest.x - m);
      const float faded = row.m == -INFINITY ? 0.0f : exp2_fast(row.m - m);
      row.m = m;
      row.l = row.l * faded + own * rest.y;
#pragma unroll
      for (int k = 0; k < Row::kOfLane; ++k) fade(row.o[k], faded);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(~0u, own, i);
#pragma unroll
        for (int k = 0; k < Row::kOfLane; ++k)
          if (weight != 0.0f) add(row.o[k], weight, x[i][k]);
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) row.l += __shfl_xor_sync(~0u, row.l, mask);
    out(r, row);
  }
}

// Of the states of a block's warps.
template <class Shape, class Out>
__device__ inline void merge_warps(int n_rows, const float* states, Out out) {
  merge_rows<Shape, false, Shape::kWarpStride>(
      Shape::kWarps, n_rows, [&](int i) { return states + i * Shape::kWarpFloats; }, out);
}

// A finished row.
template <class Shape>
__device__ void write_row(const DecodeCall& call, const Piece& piece, int r, const MergedRow<Shape>& row) {
  const int lane = threadIdx.x % 32;
  const RowEnd end = end_row(call, piece.head * call.group_size + (piece.first_row + r) % call.group_size, row.m, row.l, 0);
  const int64_t at = row_offset(call, piece, r, call.o.token_stride, call.o.head_stride) + 4 * lane;
#pragma unroll
  for (int k = 0; k < MergedRow<Shape>::kOfLane; ++k)
    if (4 * lane + 128 * k < Shape::kVDim) {
      const float x[4] = {row.o[k].x, row.o[k].y, row.o[k].z, row.o[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_number(call.o.data, call.o.dtype, at + 128 * k + i, end.factor == 0.0f ? 0.0f : x[i] * end.factor);
    }
  if (lane == 0 && call.lse != nullptr)
    call.lse[row_offset(call, piece, r, call.lse_token_stride, call.lse_head_stride)] = end.lse;
}

// The block's piece is one of several: leaves its state, and merges all of them if it is the last to do so.
template <class Shape>
__device__ void finish_among(const DecodeCall& call, const Piece& piece, const float* warp_states, int* is_last) {
  // A block's piece that does not begin its item is the block's first; one that does but goes on in the next is its last.
  // Behind all of these are the tails'.
  const int n_mains = piece.end_block - piece.first_block;
  const auto state_at = [&](int i) {
    const int slot = i < n_mains ? 2 * (piece.first_block + i) + (i == 0 ? 1 : 0)
                                 : 2 * static_cast<int>(gridDim.x) + piece.first_tail + i - n_mains;
    return call.states + slot * Shape::kStateFloats;
  };
  float* const own = state_at(piece.own_state);
  merge_warps<Shape>(piece.n_rows, warp_states, [&](int r, const MergedRow<Shape>& row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < MergedRow<Shape>::kOfLane; ++k)
      if (4 * lane + 128 * k < Shape::kVDim)
        reinterpret_cast<float4*>(own + r * Shape::kStateStride)[lane + 32 * k] = row.o[k];
    if (lane == 0) reinterpret_cast<float2*>(own + Shape::kRows * Shape::kStateStride)[r] = make_float2(row.m, row.l);
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = add_in_order(call.counters + 1 + piece.item, 1) == piece.n_states - 1;
    if (*is_last) call.counters[1 + piece.item] = 0;
  }
  __syncthreads();
  if (*is_last)
    merge_rows<Shape, true, Shape::kStateStride>(
        piece.n_states, piece.n_rows, state_at,
        [&](int r, const MergedRow<Shape>& row) { write_row<Shape>(call, piece, r, row); });
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

// The warp's units of a piece, one after another.
template <class Shape>
__device__ void attend_piece(const DecodeCall& call, const KeyMaps& maps, const Piece& piece, const StagedQueries& staged,
                             Pipeline<Shape>& pipeline, RowState<Shape>& state) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int n_units = max(0, piece.end_unit - piece.first_unit - warp + Shape::kWarps - 1) / Shape::kWarps;
  const int first = static_cast<int>(piece.key_begin / Shape::kKeys) + piece.first_unit + warp;
  UnitPlaces places;
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) places.head[p] = call.planes[p] + piece.head * call.head_stride[p];
  const auto ask = [&](int i, int stage) {
    if (i < n_units) ask_for_keys<Shape>(call, maps, piece, first, i, places, pipeline, stage);
  };
  LoadedQueries<Shape> loaded;
  loaded.load(call, piece);
#pragma unroll 1
  for (int i = 0; i < Shape::kStages; ++i) {
    const int stage = pipeline.stage + i;
    ask(i, stage < Shape::kStages ? stage : stage - Shape::kStages);
  }
  stage_queries<Shape>(call, loaded, staged);
  __syncthreads();
  const SeenKeys<Shape> seen = see_keys<Shape>(call, piece, staged.scale);
  for (int i = 0; i < n_units; ++i) {
    const int stage = pipeline.stage;
    wait_for_phase(pipeline.barrier(stage), static_cast<uint32_t>(pipeline.parity));
    attend_unit<Shape>(call, piece, seen, int64_t{first + i * Shape::kWarps} * Shape::kKeys, pipeline.box(stage),
                       pipeline.scale(stage), staged, state);
    __syncwarp();
    ask(i + Shape::kStages, stage);
    pipeline.advance();
  }
}

// The next tail that nobody has; -1: there is none. The last to hear that leaves the count as it was.
__device__ inline int take_tail(const DecodeCall& call, const Share& share) {
  const int taken = atomicAdd(call.counters, 1), n = share.n_tails * share.n_used;
  if (taken == n + share.n_used - 1) call.counters[0] = 0;
  return taken < n ? taken : -1;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode_sm90_kernel(const __grid_constant__ DecodeCall call, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ __align__(8) uint64_t barriers[Shape::kWarps * Shape::kStages];
  __shared__ float scale[Shape::kRows];
  __shared__ int is_last, next_tail;
  const int warp = static_cast<int>(threadIdx.x / 32), block = static_cast<int>(blockIdx.x);
  const KeyMaps maps = {&k_map, &v_map};
  const StagedQueries staged = {reinterpret_cast<uint4*>(shared + Shape::kQAt),
                                reinterpret_cast<float2*>(shared + Shape::kStartAt), scale};
  auto* const warp_states = reinterpret_cast<float*>(shared);
  const uint32_t base = shared_address(shared);
  Pipeline<Shape> pipeline = {base + warp * Shape::kStages * Shape::kBoxBytes,
                              base + Shape::kScalesAt + warp * Shape::kStages * Shape::kScaleBytes,
                              shared_address(barriers + warp * Shape::kStages)};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < Shape::kStages; ++i) init_barrier(pipeline.barrier(i));
    publish_barriers();
    if (warp == 0) {
      prefetch_map(maps.k), prefetch_map(maps.v);
      prefetch_line(call.sequences), prefetch_line(call.page_tables), prefetch_line(call.q.data);
    }
  }
  __syncwarp();
  let_next_kernel_start();
  wait_for_kernel_before();
  const Share share = Share::make<Shape>(call);
  int at = share.is_by_item ? 0 : share.begin_of(block), tail = -1;
  const int end = share.is_by_item ? 1 : share.begin_of(block + 1);
  RowState<Shape> state;
  while (at < end) {
    const Piece piece = find_piece<Shape>(call, share, at, tail);
    const int n_units = piece.end_unit - piece.first_unit;
    if (n_units == 0 && tail < 0) return;  // more blocks than there is work for
    clear(state);
    attend_piece<Shape>(call, maps, piece, staged, pipeline, state);
    if (threadIdx.x == 0 && share.n_tails > 0) next_tail = take_tail(call, share);
    __syncthreads();
    store_state<Shape>(state, warp_states + warp * Shape::kWarpFloats);
    __syncthreads();
    if (piece.n_states == 1)
      merge_warps<Shape>(piece.n_rows, warp_states,
                         [&](int r, const MergedRow<Shape>& row) { write_row<Shape>(call, piece, r, row); });
    else
      finish_among<Shape>(call, piece, warp_states, &is_last);
    order_before_copies();
    __syncthreads();
    tail = share.n_tails > 0 ? next_tail : -1;
    if (!share.is_by_item)
      at += n_units;
    else if (share.n_tails == 0 || tail < 0)
      at = end;
  }
#endif
}

}  // namespace tandem::cuda
