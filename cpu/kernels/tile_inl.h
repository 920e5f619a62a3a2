// SPDX-License-Identifier: MIT
// The two inner loops: logits of a tile of query rows x keys, and the weighted sum of V rows.
//
// Memory bounds both, so K and V pass through the registers once for all query rows of a tile:
//
//   dots   4 rows x 4 keys (2 keys with 16 registers): every vector of K is multiplied by 4 of q, every vector of q by 4
//          of K. The 16 sums are folded together at the end of the row.
//   weigh  4 rows x 64 dims of o in registers (two halves for head_dim 128) while 64 keys go by: a vector of V is multiplied
//          by the 4 rows' weights of its key.
//
// Types with groups load codes. The codes of K become numbers as they are read. So do the codes of V if a table of 16
// numbers fits a vector. Elsewhere the 4 rows' weights are multiplied by the scale, once for each group, before V is read.
//
// Rows are given by pointers, one per key, so a run's end, a page or a gap costs nothing here. While a tile is computed, the
// rows ahead are prefetched, every cache line, one prefetch at a time between the multiplications. Prefetches in bursts
// stall the loads behind them (half the speed). Without prefetches the hardware's prefetcher leaves half of the bandwidth
// unused.
//
// A row's arithmetic does not depend on the other rows of its tile. So every cut along the rows gives the same results.
#pragma once

#include <type_traits>

#include "cpu/kernels/prefetch_inl.h"
#include "cpu/kernels/stored_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr size_t kLanes = HWY_MAX_BYTES / sizeof(float);
#if HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_AVX2
inline constexpr bool kManyRegisters = false;  // 16
#else
inline constexpr bool kManyRegisters = true;  // 32
#endif
static_assert(kLanes >= 4 && kLanes <= 16, "tiles are cut for vectors of 4 to 16 floats");

// Keys of a block: row pointers, dense, and what to prefetch of K while the logits are computed. The scales of K are stored
// key by key, unless they are between the codes. The scales of V are a row of kBlockKeys for each scale of a key.
struct KeyList {
  const Row* k;
  const Row* v;
  Prefetcher k_ahead;
  int64_t n;
  const float* k_scales;  // [n][n_k_scales]
  int64_t n_k_scales;
  const float* v_scales;  // [n_v_scales][kBlockKeys]
};

// Row pointers and scales, from the first of some keys on.
struct KeyRows {
  const Row* rows;
  const float* scales;
  int64_t n_scales;
  KeyRows after(int64_t n) const { return {rows + n, scales + n * n_scales, n_scales}; }
};

// Returns the sums of a, b, c and d over their lanes.
HWY_INLINE hn::Vec<hn::Full128<float>> fold(Vec a, Vec b, Vec c, Vec d) {
  const F32 df;
  const hn::Repartition<uint64_t, F32> du64;
  const auto pairs = [&](Vec x, Vec y)
                         HWY_ATTR { return hn::Add(hn::InterleaveLower(df, x, y), hn::InterleaveUpper(df, x, y)); };
  const auto ab = hn::BitCast(du64, pairs(a, b)), cd = hn::BitCast(du64, pairs(c, d));
  const Vec all = hn::Add(hn::BitCast(df, hn::InterleaveLower(du64, ab, cd)),
                          hn::BitCast(df, hn::InterleaveUpper(du64, ab, cd)));  // a b c d in every 128-bit block
#if HWY_MAX_BYTES == 16
  return all;
#else
  const hn::Half<F32> dh;
  const auto half = hn::Add(hn::LowerHalf(dh, all), hn::UpperHalf(dh, all));
#if HWY_MAX_BYTES == 32
  return half;
#else
  const hn::Half<decltype(dh)> dq;
  return hn::Add(hn::LowerHalf(dq, half), hn::UpperHalf(dq, half));
#endif
#endif
}

// Returns the rows of the next tile: 4, and at the end 3, 2 or 1. A tile of three rows needs more than 16 registers.
HWY_INLINE int64_t tile_rows(int64_t n_left) {
  constexpr int64_t kMost[5] = {0, 1, 2, kManyRegisters ? 3 : 2, 4};
  return kMost[n_left < 4 ? n_left : 4];
}

// Calls use(std::integral_constant) with that number of rows.
template <class Use>
HWY_INLINE void with_tile_rows(int64_t n_left, const Use& use) {
  switch (tile_rows(n_left)) {
    case 4:
      return use(std::integral_constant<int, 4>());
    case 3:
      return use(std::integral_constant < int, kManyRegisters ? 3 : 2 > ());
    case 2:
      return use(std::integral_constant<int, 2>());
    default:
      return use(std::integral_constant<int, 1>());
  }
}

// Packs the rows of a tile side by side, vector by vector in the order of the keys' type, so that one pointer serves them
// all. Each tile begins where its first row would: q [n_rows, dim] -> packed, the same size.
template <class Stored>
void pack_rows(const float* q, int64_t n_rows, size_t dim, float scale, float* packed) {
  const F32 d;
  const Vec factor = hn::Set(d, scale);
  for (int64_t row = 0; row < n_rows;) {
    const auto n = static_cast<size_t>(tile_rows(n_rows - row));
    const size_t first = static_cast<size_t>(row) * dim;
    for (size_t r = 0; r < n; ++r) {
      const float* from = q + first + r * dim;
      float* to = packed + first + r * kLanes;
      size_t i = 0;
      for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        Vec a = hn::Mul(factor, hn::LoadU(d, from + i)), b = hn::Mul(factor, hn::LoadU(d, from + i + kLanes));
        unsort_pair<Stored>(d, a, b);
        hn::StoreU(a, d, to + i * n);
        hn::StoreU(b, d, to + (i + kLanes) * n);
      }
      if (i < dim) hn::StoreU(hn::Mul(factor, hn::LoadU(d, from + i)), d, to + i * n);
    }
    row += static_cast<int64_t>(n);
  }
}

template <int kRows>
inline constexpr int kTileKeys = kManyRegisters || kRows <= 2 ? 4 : 2;

// Stores the sums of a tile over the lanes; rows of logits are kBlockKeys apart.
template <int kRows, int kKeys>
HWY_INLINE void store_sums(SizedVec (&sum)[kRows][kKeys], float* HWY_RESTRICT logits) {
  const hn::Full128<float> d4;
  if constexpr (kKeys == 4) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      hn::StoreU(fold(sum[r][0], sum[r][1], sum[r][2], sum[r][3]), d4, logits + r * kBlockKeys);
  } else {
    const hn::Half<hn::Full128<float>> d2;
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r += 2) {
      const auto two = fold(sum[r][0], sum[r][1], sum[r + 1][0], sum[r + 1][1]);
      hn::StoreU(hn::LowerHalf(d2, two), d2, logits + r * kBlockKeys);
      hn::StoreU(hn::UpperHalf(d2, two), d2, logits + (r + 1) * kBlockKeys);
    }
  }
}

// Returns the f16 scale at the beginning of a block.
HWY_INLINE float scale_of_block(Row block) {
  const hn::CappedTag<float, 1> d1;
  return hn::GetLane(StoredF16::load(d1, block, 0));
}

// The place of a vector in a row: `half` of the pair at element `pair`.
struct VectorAt {
  size_t pair, half;
  bool in_pair;
};

// Loads the vector at place `at` of the elements from `first` on, where `first` is a multiple of kStep. If kStep is a whole
// number of groups, the offset of the vector within its block is a constant.
template <class Stored, size_t kStep, class D>
HWY_INLINE auto load_from(D d, Row row, size_t first, const VectorAt& at) {
  if constexpr (Stored::kInBlocks) {
    if (kStep % Stored::kGroup == 0 && first % Stored::kGroup == 0) {
      row += byte_of<Stored>(first);
      first = 0;
    }
  }
  return at.in_pair ? Stored::load_half(d, row, first + at.pair, at.half)
                    : Stored::load(d, row, first + at.pair + at.half * hn::Lanes(d));
}

// Computes logits[r][0..kKeys) = q[r] . k[0..kKeys); rows of logits are kBlockKeys apart. q is packed (pack_rows). ahead:
// the row to prefetch of the first of kKeys streams.
template <class Stored, int kRows, bool kPrefetch>
HWY_NOINLINE void dot_tile(const float* HWY_RESTRICT q, size_t dim, const KeyRows& keys, const Row* ahead, int64_t apart,
                           float* HWY_RESTRICT logits) {
  constexpr int kKeys = kTileKeys<kRows>;
  constexpr int kLineVecs = static_cast<int>(8 * kLine / (kLanes * Stored::kBits));  // vectors per cache line of K
  const F32 d;
  const Row* k = keys.rows;
  // Loads the vec-th vector of key j from element `first` on. A group begins there, or for vec < 2 a pair.
  const auto load = [&](int j, size_t first, size_t vec, bool in_pair) HWY_ATTR {
    const size_t pair = (vec & ~size_t{1}) * kLanes;
    const auto codes = load_from<Stored, kLineVecs * kLanes>(d, k[j], first, {pair, vec % 2, in_pair});
    if constexpr (Stored::kInBlocks) {
      const float scale = scale_of_block(k[j] + byte_of<Stored>(first) + byte_of<Stored>(pair));
      return Stored::group(d, &scale).of(d, codes);
    } else if constexpr (Stored::kGroup > 0) {
      const size_t group = first / Stored::kGroup + pair / Stored::kGroup;  // two terms, because the second is a constant
      const float* scales = keys.scales + j * keys.n_scales + group;
      return Stored::group(d, scales).of(d, codes);
    } else {
      return codes;
    }
  };
  Row streams[kKeys];
  if (kPrefetch)
    for (int s = 0; s < kKeys; ++s) streams[s] = ahead[s * apart];
  SizedVec sum[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) sum[r][j] = hn::Zero(d);

  size_t i = 0;
  for (; i + kLineVecs * kLanes <= dim; i += kLineVecs * kLanes) {
#pragma GCC unroll 8
    for (int vec = 0; vec < kLineVecs; ++vec) {
      const size_t at = i + static_cast<size_t>(vec) * kLanes;
      SizedVec rows[kRows];
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) rows[r] = hn::LoadU(d, q + at * kRows + r * kLanes);
#pragma GCC unroll 4
      for (int j = 0; j < kKeys; ++j) {
        const Vec key = load(j, i, static_cast<size_t>(vec), kLineVecs > 1);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][j] = hn::MulAdd(rows[r], key, sum[r][j]);
        if (kPrefetch && (vec * kKeys + j) % kLineVecs == 0)
          prefetch_line(streams[(vec * kKeys + j) / kLineVecs] + i * Stored::kBits / 8);
      }
    }
  }
  if (kPrefetch && i < dim)
    for (int s = 0; s < kKeys; ++s) prefetch_line(streams[s] + i * Stored::kBits / 8);
  for (size_t half = 0; i < dim; i += kLanes, half ^= 1) {
    const bool in_pair = half == 1 || i + 2 * kLanes <= dim;
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      const Vec key = load(j, i - half * kLanes, half, in_pair);
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) sum[r][j] = hn::MulAdd(hn::LoadU(d, q + i * kRows + r * kLanes), key, sum[r][j]);
    }
  }
  store_sums<kRows, kKeys>(sum, logits);
}

// A lane sums at most this many dims. Sums of more products would lose bits.
inline constexpr size_t kSummedDims = 256;

// dot_tile() for long rows: sums stretches of the rows separately. Stretches begin where groups begin.
template <class Stored, int kRows, bool kPrefetch>
HWY_NOINLINE void dot_long_tile(const float* q, size_t dim, const KeyRows& k, const Row* ahead, int64_t apart,
                                float* logits) {
  constexpr int kKeys = kTileKeys<kRows>;
  constexpr size_t kUnit = 64;
  const size_t n_stretches = (dim + kSummedDims - 1) / kSummedDims,
               length = (dim + n_stretches * kUnit - 1) / (n_stretches * kUnit) * kUnit;
  Row rows[kKeys], streams[kKeys] = {};
  float sums[kRows][kBlockKeys];
  for (size_t first = 0; first < dim; first += length) {
    const size_t bytes = byte_of<Stored>(first), n = std::min(length, dim - first);
    for (int j = 0; j < kKeys; ++j) {
      rows[j] = k.rows[j] + bytes;
      if (kPrefetch) streams[j] = ahead[j * apart] + bytes;
    }
    const float* scales = k.scales;
    if constexpr (Stored::kGroup > 0 && !Stored::kInBlocks) scales += first / Stored::kGroup;
    float* const to = first == 0 ? logits : sums[0];
    dot_tile<Stored, kRows, kPrefetch>(q + first * kRows, n, {rows, scales, k.n_scales}, streams, 1, to);
    for (int r = 0; r < kRows && first > 0; ++r)
      for (int j = 0; j < kKeys; ++j) logits[r * kBlockKeys + j] += sums[r][j];
  }
}

// Computes four keys for one tile of rows.
template <class Stored, int kRows, bool kPrefetch>
HWY_INLINE void dot_four(const float* q, size_t dim, const KeyRows& k, const Prefetcher& p, float* logits) {
  for (int j = 0; j < 4; j += kTileKeys<kRows>) {
    const Row* const ahead = kPrefetch ? p.group + p.row + j * p.apart : nullptr;
    if (dim > kSummedDims)
      dot_long_tile<Stored, kRows, kPrefetch>(q, dim, k.after(j), ahead, p.apart, logits + j);
    else
      dot_tile<Stored, kRows, kPrefetch>(q, dim, k.after(j), ahead, p.apart, logits + j);
  }
}

// Computes all rows for four keys. Only the first tile prefetches; K is in L1 for the others.
template <class Stored, bool kPrefetch>
HWY_INLINE void dot_rows(const float* q, int64_t n_rows, size_t dim, const KeyRows& k, const Prefetcher& ahead,
                         float* logits) {
  for (int64_t r = 0; r < n_rows; r += tile_rows(n_rows - r)) {
    const float* rows = q + static_cast<size_t>(r) * dim;
    with_tile_rows(n_rows - r, [&](auto n) HWY_ATTR {
      if (kPrefetch && r == 0)
        dot_four<Stored, n, true>(rows, dim, k, ahead, logits);
      else
        dot_four<Stored, n, false>(rows, dim, k, ahead, logits + r * kBlockKeys);
    });
  }
}

// Computes logits[r][j] = q[r] . k[j] for all rows and keys of the list, q packed. Overwrites up to three entries past the
// last key.
template <class Stored>
void dots(const float* q, int64_t n_rows, size_t dim, const KeyList& keys, float* logits) {
  static_assert(kStreams == 4, "four keys fetch a row of every stream");
  const int64_t n_whole = keys.n & ~int64_t{3};
  Prefetcher ahead = keys.k_ahead;
  const KeyRows k{keys.k, keys.k_scales, keys.n_k_scales};
  for (int64_t j = 0; j < n_whole; j += 4) {
    if (ahead.group != nullptr) {
      dot_rows<Stored, true>(q, n_rows, dim, k.after(j), ahead, logits + j);
      next_row(ahead);
    } else {
      dot_rows<Stored, false>(q, n_rows, dim, k.after(j), ahead, logits + j);
    }
  }
  if (n_whole == keys.n) return;
  Row last[4];
  for (int64_t j = 0; j < 4; ++j) last[j] = keys.k[n_whole + j < keys.n ? n_whole + j : keys.n - 1];
  dot_rows<Stored, false>(q, n_rows, dim, {last, k.after(n_whole).scales, k.n_scales}, ahead, logits + n_whole);
}

// Keys of a pass over V: few enough to stay in L1 for the passes over the other dims.
inline constexpr int64_t kGroupKeys = kManyRegisters ? 64 : 32;
static_assert(kGroupKeys % kLanes == 0 && kBlockKeys % kGroupKeys == 0);

// Returns the index of a tile's weight of key j for element `at` of V. Rows are kBlockKeys apart, or scaled (scale_weights).
template <class Stored>
HWY_INLINE int64_t weight_at(int64_t r, int64_t j, size_t at) {
  if constexpr (Stored::kScalesWeights) return (static_cast<int64_t>(at) / Stored::kGroup * 4 + r) * kGroupKeys + j;
  return r * kBlockKeys + j;
}

// Sets o[r][at..at + kVecs vectors) = o * rescale[r] + sum over keys of p[r][j] * v[j], with o in the order of the type.
template <class Stored, int kRows, int kVecs, bool kPrefetch>
HWY_NOINLINE void weigh_chunk(const float* HWY_RESTRICT p, const KeyList& keys, size_t at, size_t dim, float* HWY_RESTRICT o,
                              const float* HWY_RESTRICT rescale, Prefetcher& ahead) {
  constexpr int64_t kKeyBytes = kVecs * int64_t{kLanes} * Stored::kBits / 8;  // bytes of V that are read for a key
  constexpr int64_t kStep = kKeyBytes < 16 ? 64 / kKeyBytes : 4;              // keys
  constexpr int64_t kStepLines = kStep * kKeyBytes / int64_t{kLine};
  const F32 d;
  SizedVec sum[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) sum[r][c] = hn::Zero(d);

  const Row* v = keys.v;
  Prefetcher next = ahead;
  const auto load = [&](int64_t j, size_t c) HWY_ATTR {
    const size_t pair = (c & ~size_t{1}) * kLanes;
    const auto codes = load_from<Stored, kVecs * kLanes>(d, v[j], at, {pair, c & 1, kVecs > 1});
    if constexpr (Stored::kGroup == 0 || Stored::kScalesWeights) {
      return codes;
    } else {
      const auto group = static_cast<int64_t>(at / Stored::kGroup + pair / Stored::kGroup);
      return Stored::group(d, keys.v_scales + group * kBlockKeys + j).of(d, codes);
    }
  };
  const auto add_key = [&](int64_t j) HWY_ATTR {
    SizedVec value[kVecs];
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) value[c] = load(j, c);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (size_t c = 0; c < kVecs; ++c) {
        const Vec weight = hn::Set(d, p[weight_at<Stored>(r, j, at + (c & ~size_t{1}) * kLanes)]);
        sum[r][c] = hn::MulAdd(weight, value[c], sum[r][c]);
      }
    }
  };
  int64_t j = 0;
  const int64_t first_fetching = keys.n / kExpShare;  // the earlier lines were prefetched while the weights were computed
  for (; j + kStep <= keys.n; j += kStep) {
    const bool fetches = kPrefetch && j >= first_fetching;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kStep; ++i) {
      add_key(j + i);
      if (fetches)
        for (int64_t l = i * kStepLines / kStep; l < (i + 1) * kStepLines / kStep; ++l)
          prefetch_next(next, kStepLines % kStreams == 0 ? l % kStreams : next.stream++ % kStreams);
    }
  }
  for (; j < keys.n; ++j) add_key(j);
  if (kPrefetch) ahead = next;

#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    float* out = o + static_cast<size_t>(r) * dim + at;
    const Vec scale = hn::Set(d, rescale[r]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      float* lanes = out + static_cast<size_t>(c) * kLanes;
      hn::StoreU(hn::MulAdd(hn::LoadU(d, lanes), scale, sum[r][c]), d, lanes);
    }
  }
}

template <class Stored, int kRows, int kVecs>
HWY_INLINE void weigh_vecs(const float* p, const KeyList& keys, size_t at, size_t dim, float* o, const float* rescale,
                           Prefetcher& ahead) {
  if (ahead.group != nullptr)
    weigh_chunk<Stored, kRows, kVecs, true>(p, keys, at, dim, o, rescale, ahead);
  else
    weigh_chunk<Stored, kRows, kVecs, false>(p, keys, at, dim, o, rescale, ahead);
}

template <class Stored, int kRows>
void weigh_rows(const float* p, const KeyList& keys, size_t dim, float* o, const float* rescale, Prefetcher& ahead) {
  constexpr int kVecs = kManyRegisters || kRows <= 2 ? 4 : 2;
  size_t at = 0;
  for (; at + kVecs * kLanes <= dim; at += kVecs * kLanes)
    weigh_vecs<Stored, kRows, kVecs>(p, keys, at, dim, o, rescale, ahead);
  for (; at + 2 * kLanes <= dim; at += 2 * kLanes) weigh_vecs<Stored, kRows, 2>(p, keys, at, dim, o, rescale, ahead);
  for (; at < dim; at += kLanes) weigh_vecs<Stored, kRows, 1>(p, keys, at, dim, o, rescale, ahead);
}

// Computes p * scale for kRows rows and keys.n keys, for each group of V's elements.
template <class Stored, int kRows>
HWY_INLINE void scale_weights(const float* p, const KeyList& keys, size_t dim, float* scaled) {
  const F32 d;
  for (size_t at = 0; at < dim; at += Stored::kGroup) {
    const float* scales = keys.v_scales + static_cast<int64_t>(at) / Stored::kGroup * kBlockKeys;
    for (int64_t j = 0; j < keys.n; j += kLanes)
      for (int r = 0; r < kRows; ++r)
        hn::StoreU(hn::Mul(hn::LoadU(d, p + r * kBlockKeys + j), hn::LoadU(d, scales + j)), d,
                   scaled + weight_at<Stored>(r, j, at));
  }
}

// The weights of some rows and the destination of their sums.
struct WeighRows {
  const float* p;        // [n_rows], rows kBlockKeys apart
  float* o;              // [n_rows, dim]
  const float* rescale;  // [n_rows]
  int64_t n_rows;
  size_t dim;
};

// Weighs rows [r, r + kRows).
template <class Stored, int kRows>
HWY_INLINE void weigh_tile(const WeighRows& rows, int64_t r, const KeyList& keys, Prefetcher& ahead) {
  const float* p = rows.p + r * kBlockKeys;
  HWY_ALIGN float scaled[Stored::kScalesWeights ? kMaxScales * 4 * kGroupKeys : 1];
  if constexpr (Stored::kScalesWeights) {
    scale_weights<Stored, kRows>(p, keys, rows.dim, scaled);
    p = scaled;
  }
  weigh_rows<Stored, kRows>(p, keys, rows.dim, rows.o + static_cast<size_t>(r) * rows.dim, rows.rescale + r, ahead);
}

// Sets o[r] = o[r] * rescale[r] + sum over at most kGroupKeys keys of p[r][j] * v[j]. The passes of the first tile over the
// dims together prefetch as many lines as they read.
template <class Stored>
void weigh(const WeighRows& rows, const KeyList& keys, Prefetcher& ahead) {
  Prefetcher none;
  for (int64_t r = 0; r < rows.n_rows; r += tile_rows(rows.n_rows - r))
    with_tile_rows(rows.n_rows - r, [&](auto n) HWY_ATTR { weigh_tile<Stored, n>(rows, r, keys, r == 0 ? ahead : none); });
}

void pack_rows_of(int32_t dtype, const float* q, int64_t n_rows, size_t dim, float scale, float* packed) {
  with_key_type(dtype, [&](auto stored) HWY_ATTR { pack_rows<decltype(stored)>(q, n_rows, dim, scale, packed); });
}

void dots_of(int32_t dtype, const float* q, int64_t n_rows, size_t dim, const KeyList& keys, float* logits) {
  with_key_type(dtype, [&](auto stored) HWY_ATTR { dots<decltype(stored)>(q, n_rows, dim, keys, logits); });
}

void weigh_of(int32_t dtype, const WeighRows& rows, const KeyList& keys, Prefetcher& v_ahead) {
  with_key_type(dtype, [&](auto stored) HWY_ATTR { weigh<decltype(stored)>(rows, keys, v_ahead); });
}

// Puts o back into row order.
void sort_pairs_of(int32_t dtype, float* o, size_t dim) {
  with_key_type(dtype, [&](auto stored) HWY_ATTR { sort_pairs<decltype(stored)>(o, dim); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
