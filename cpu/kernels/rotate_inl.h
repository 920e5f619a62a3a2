// SPDX-License-Identifier: MIT
// Library RoPE: logits of keys that are rotated in registers just before they are multiplied.
//
// A part of a key's rotation R(p), with p its position, may be moved to the query. For any base b
//
//   q . R(p) k = (R(-b) q) . R(p - b) k
//
// Most keys stand at consecutive positions. For each stretch of such keys q is rotated back by the position of the first
// key, and the keys by the few positions that they are ahead of it. The angles of these few positions are rows of the
// table's lowest digit (lib/model/rope.h). So no angles are computed key by key, nothing accumulates, and the rows stay in
// the caches.
//
//   positions      1000 1001 ... 1127 | 1128 1129 ... 1255 | 1256 ...
//   q, packed      R(-1000) q         | R(-1128) q         | R(-1256) q
//   row of angles     0    1 ...  127 |    0    1 ...  127 |    0
//
// Keys are taken four at a time. For four keys with gaps too large for a stretch, the angles of p - b are computed. Each is
// the product of the angles of its base-256 digits. The product of all digits but the lowest is kept for the next key. b
// stays as it was.
//
// The first tile of query rows multiplies the keys as they are widened and rotated, vector by vector of pairs. If there are
// more rows, the rotated keys are also stored in f32 rows, which the other tiles read from the first-level cache. For 4 rows
// of 128 dims a pair of vectors takes 12 multiplications instead of 8. Other costs are kept low, too: angles are read once,
// their rows are listed a stretch at a time, and bf16 takes one instruction a vector to widen, also in order if the
// processor can.
//
// q is also multiplied by the attention factor and reordered like a rotated row (Pairs).
#pragma once

#include "cpu/kernels/scales_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kStretch = 128;  // in keys; a longer stretch takes fewer rotations of q and more rows of angles
static_assert(kStretch <= 256, "rows of one digit");

struct alignas(64) Rotator {
  const RopeTable* table;
  int64_t base;              // positions that the packed q is rotated back by; -1: no q is packed
  int64_t stretch_end;       // keys of the view before this index belong to the stretch of base, or come before the stretch
  int64_t high_position;     // position >> 8 of `high`; -1: none
  float high[kMaxPlainDim];  // cos row, then sin row
  float angles[4][kMaxPlainDim];
  float rotated[4 * kMaxPlainDim];  // keys
  const int64_t* seen;              // positions of the view's keys:
  int64_t block[kBlockKeys];        // all keys of the block,
  int64_t picked[kBlockKeys];       //   or some of them
  const float* rows[kBlockKeys];    // angles of the view's keys relative to base, up to stretch_end
};

// Rows of q, and where they are packed for the tiles.
struct RotatedQuery {
  const float* q;  // [n_rows, dim]
  int64_t n_rows;
  int64_t dim;
  float scale;
  float* packed;
};

HWY_INLINE void open_rotator(Rotator& rotator, const RopeTable* table) {
  rotator.table = table;
  rotator.high_position = -1;
}

// Loads the positions of the stream's block.
inline void load_positions(const KeyStream& s, Rotator& rotator) {
  const KvRun* run = s.block_run;
  int64_t offset = s.block_offset;
  for (int64_t at = 0; at < s.n; ++run, offset = 0) {
    const int64_t n = run->n_tokens - offset < s.n - at ? run->n_tokens - offset : s.n - at;
    const int32_t* listed = run->positions;
    for (int64_t i = 0; i < n; ++i)
      rotator.block[at + i] = listed != nullptr ? listed[offset + i] : run->first_position + offset + i;
    at += n;
  }
}

// Chooses the positions of a view.
inline void attach_positions(const View& view, Rotator& rotator) {
  rotator.seen = view.picked == nullptr ? rotator.block : rotator.picked;
  if (view.picked == nullptr || rotator.table == nullptr) return;
  for (int64_t j = 0; j < view.keys.n; ++j) rotator.picked[j] = rotator.block[view.picked[j]];
}

// Sets out = a * b as complex numbers, rows of cos and sin.
HWY_INLINE void multiply_angles(const float* a, const float* b, int64_t n, float* out) {
  const F32 d;
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes) {
    const Vec ac = hn::LoadU(d, a + i), as = hn::LoadU(d, a + n + i);
    const Vec bc = hn::LoadU(d, b + i), bs = hn::LoadU(d, b + n + i);
    hn::StoreU(hn::NegMulAdd(as, bs, hn::Mul(ac, bc)), d, out + i);
    hn::StoreU(hn::MulAdd(ac, bs, hn::Mul(as, bc)), d, out + n + i);
  }
  for (; i < n; ++i) {
    const float ac = a[i], as = a[n + i], bc = b[i], bs = b[n + i];
    out[i] = ac * bc - as * bs;
    out[n + i] = ac * bs + as * bc;
  }
}

// Computes the angles of a position. A negative position rotates back.
inline void compute_angles(Rotator& rotator, int64_t position, float* out) {
  const RopeTable& table = *rotator.table;
  const int64_t n = table.n_pairs, size = position < 0 ? -position : position;
  if (rotator.high_position != size >> 8) {
    rotator.high_position = size >> 8;
    memcpy(rotator.high, table.row(1, static_cast<int32_t>(size >> 8 & 255)), static_cast<size_t>(2 * n) * sizeof(float));
    for (int32_t digit = 2; digit < RopeTable::kDigits; ++digit) {
      const auto value = static_cast<int32_t>((size >> (8 * digit)) & 255);
      if (value != 0) multiply_angles(rotator.high, table.row(digit, value), n, rotator.high);
    }
  }
  multiply_angles(table.row(0, static_cast<int32_t>(size & 255)), rotator.high, n, out);
  for (int64_t i = n; position < 0 && i < 2 * n; ++i) out[i] = -out[i];
}

// The number of keys that are rotated together.
inline constexpr int kFour = 4;
struct RotatedKeys {
  KeyRows keys;
  const float* const* angles;  // of each key: cos row, then sin row
  const Row* ahead;            // the row to prefetch of the first of kFour streams, or null
  int64_t apart;
  RotatedKeys after(int64_t n) const {
    return {keys.after(n), angles + n, ahead == nullptr ? nullptr : ahead + n * apart, apart};
  }
};

// The rotated pairs of a row. If the pairs fill whole vectors, a rotated row has a vector of first elements and one of
// second elements in turn. Otherwise it has all first elements, then all second ones. The dims that are not rotated follow.
struct Pairs {
  int64_t n;
  int64_t dim;
  bool are_whole;
};

HWY_INLINE Pairs pairs_of(const RopeTable& table, int64_t dim) {
  return {table.n_pairs, dim, table.n_pairs % int64_t{kLanes} == 0};
}

// Returns elements [at, at + kLanes) of a row.
template <class Stored>
HWY_INLINE Vec load_scaled(Row codes, const float* scales, int64_t at) {
  const F32 d;
  const auto values = Stored::load(d, codes, static_cast<size_t>(at));
  if constexpr (Stored::kGroup == 0)
    return values;
  else
    return Stored::group(d, scales + at / Stored::kGroup).of(d, values);
}

// Vectors of the first and the second elements of some pairs.
struct PairVecs {
  SizedVec a, b;
};

// Returns pairs [i, i + kLanes) of n.
template <class Stored, bool kInterleaved>
HWY_INLINE PairVecs load_pairs(Row codes, const float* scales, int64_t i, int64_t n) {
  const F32 d;
  if (!kInterleaved) return {load_scaled<Stored>(codes, scales, i), load_scaled<Stored>(codes, scales, n + i)};
  if constexpr (Stored::kOddEven) {
    const auto a = Stored::load_half(d, codes, static_cast<size_t>(2 * i), 0);
    const auto b = Stored::load_half(d, codes, static_cast<size_t>(2 * i), 1);
    if constexpr (Stored::kGroup == 0) {
      return {a, b};
    } else {
      const auto group = Stored::group(d, scales + 2 * i / Stored::kGroup);
      return {group.of(d, a), group.of(d, b)};
    }
  }
  const Vec x = load_scaled<Stored>(codes, scales, 2 * i);
  const Vec y = load_scaled<Stored>(codes, scales, 2 * i + int64_t{kLanes});
  return {hn::ConcatEven(d, y, x), hn::ConcatOdd(d, y, x)};
}

// Keeps the compiler from reading each angle a second time to save a register. With 32 registers that would cost 8 %.
HWY_INLINE PairVecs rotate_pairs(const PairVecs& x, const float* angles, int64_t i, int64_t n) {
  const F32 d;
  const Vec c = hn::LoadU(d, angles + i), s = hn::LoadU(d, angles + n + i);
  if (kManyRegisters) __atomic_signal_fence(__ATOMIC_SEQ_CST);
  return {hn::NegMulAdd(x.b, s, hn::Mul(x.a, c)), hn::MulAdd(x.b, c, hn::Mul(x.a, s))};
}

// Rotates pairs of a row of f32.
template <bool kInterleaved>
HWY_INLINE PairVecs rotate_pairs_of(const float* x, const float* angles, int64_t i, int64_t n) {
  return rotate_pairs(load_pairs<StoredF32, kInterleaved>(reinterpret_cast<Row>(x), nullptr, i, n), angles, i, n);
}

// Rotates a row of f32 whose pairs do not fill whole vectors.
template <bool kInterleaved>
inline void rotate_row(const float* x, const float* angles, const Pairs& pairs, float* HWY_RESTRICT to) {
  const F32 d;
  const int64_t n = pairs.n;
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes) {
    const PairVecs pair = rotate_pairs_of<kInterleaved>(x, angles, i, n);
    hn::StoreU(pair.a, d, to + i);
    hn::StoreU(pair.b, d, to + n + i);
  }
  for (; i < n; ++i) {
    const float a = x[kInterleaved ? 2 * i : i], b = x[kInterleaved ? 2 * i + 1 : n + i];
    to[i] = a * angles[i] - b * angles[n + i];
    to[n + i] = a * angles[n + i] + b * angles[i];
  }
  memcpy(to + 2 * n, x + 2 * n, static_cast<size_t>(pairs.dim - 2 * n) * sizeof(float));
}

// As dot_tile(), for keys that are rotated on the way. If `to` is given, the rotated keys are also stored there in rows
// `dim` apart.
template <class Stored, bool kInterleaved, int kRows>
HWY_NOINLINE void rotate_tile(const float* HWY_RESTRICT q, const Pairs& pairs, const RotatedKeys& keys,
                              float* HWY_RESTRICT to, float* HWY_RESTRICT logits) {
  constexpr int kKeys = kTileKeys<kRows>;
  const F32 d;
  const int64_t n = pairs.n, dim = pairs.dim;
  const float *angles[kKeys], *scales[kKeys];
  Row codes[kKeys], ahead[kKeys];
  for (int j = 0; j < kKeys; ++j) {
    codes[j] = keys.keys.rows[j];
    scales[j] = keys.keys.scales + j * keys.keys.n_scales;
    angles[j] = keys.angles[j];
    ahead[j] = keys.ahead == nullptr ? nullptr : keys.ahead[j * keys.apart];
  }
  int64_t fetched = 0;
  const auto fetch_to = [&](int64_t element) HWY_ATTR {
    for (; ahead[0] != nullptr && fetched < element * Stored::kBits / 8; fetched += static_cast<int64_t>(kLine))
      for (int j = 0; j < kKeys; ++j) prefetch_line(ahead[j] + fetched);
  };
  SizedVec sum[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) sum[r][j] = hn::Zero(d);

  for (int64_t i = 0; i < n; i += kLanes) {
    const float* rows = q + 2 * i * kRows;
    fetch_to(2 * (i + int64_t{kLanes}));
    SizedVec q_a[kRows], q_b[kRows];
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
      q_a[r] = hn::LoadU(d, rows + r * kLanes);
      q_b[r] = hn::LoadU(d, rows + (kRows + r) * kLanes);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      const PairVecs key = rotate_pairs(load_pairs<Stored, kInterleaved>(codes[j], scales[j], i, n), angles[j], i, n);
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) {
        sum[r][j] = hn::MulAdd(q_a[r], key.a, sum[r][j]);
        sum[r][j] = hn::MulAdd(q_b[r], key.b, sum[r][j]);
      }
      if (to == nullptr) continue;
      hn::StoreU(key.a, d, to + j * dim + 2 * i);
      hn::StoreU(key.b, d, to + j * dim + 2 * i + kLanes);
    }
  }
  for (int64_t i = 2 * n; i < dim; i += kLanes) {
    fetch_to(i + int64_t{kLanes});
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      const Vec key = load_scaled<Stored>(codes[j], scales[j], i);
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) sum[r][j] = hn::MulAdd(hn::LoadU(d, q + i * kRows + r * kLanes), key, sum[r][j]);
      if (to != nullptr) hn::StoreU(key, d, to + j * dim + i);
    }
  }
  store_sums<kRows, kKeys>(sum, logits);
}

// Computes four keys for the first kRows rows.
template <class Stored, bool kInterleaved, int kRows>
HWY_INLINE void rotate_four(const float* q, const Pairs& pairs, const RotatedKeys& keys, float* to, float* logits) {
  constexpr int kKeys = kTileKeys<kRows>;
  rotate_tile<Stored, kInterleaved, kRows>(q, pairs, keys, to, logits);
  if constexpr (kKeys < kFour)
    rotate_tile<Stored, kInterleaved, kRows>(q, pairs, keys.after(kKeys), to == nullptr ? nullptr : to + kKeys * pairs.dim,
                                             logits + kKeys);
}

// Packs a tile of whole pairs, as pack_rows() packs rows. angles: those by which q is rotated.
template <bool kInterleaved>
HWY_INLINE void pack_whole(const float* q, int64_t n_rows, const Pairs& pairs, const float* angles, float scale,
                           float* HWY_RESTRICT packed) {
  const F32 d;
  const int64_t n = pairs.n, dim = pairs.dim;
  for (int64_t i = 0; i < n; i += kLanes)
    for (int64_t r = 0; r < n_rows; ++r) {
      const PairVecs pair = rotate_pairs_of<kInterleaved>(q + r * dim, angles, i, n);
      float* to = packed + 2 * i * n_rows + r * int64_t{kLanes};
      hn::StoreU(pair.a, d, to);
      hn::StoreU(pair.b, d, to + n_rows * int64_t{kLanes});
    }
  for (int64_t i = 2 * n; i < dim; i += kLanes)
    for (int64_t r = 0; r < n_rows; ++r)
      hn::StoreU(hn::Mul(hn::LoadU(d, q + r * dim + i), hn::Set(d, scale)), d, packed + i * n_rows + r * int64_t{kLanes});
}

// Packs q rotated back by `base`.
template <bool kInterleaved>
void pack_rotated(Rotator& rotator, const RotatedQuery& query, int64_t base) {
  const Pairs pairs = pairs_of(*rotator.table, query.dim);
  const float factor = rotator.table->attn_factor * (pairs.are_whole ? query.scale : 1.0f);
  HWY_ALIGN float angles[kMaxPlainDim], rows[4 * kMaxPlainDim];
  compute_angles(rotator, base, angles);
  for (int64_t i = 0; i < pairs.n; ++i) {
    angles[i] *= factor;
    angles[pairs.n + i] *= -factor;
  }
  for (int64_t n_rows, row = 0; row < query.n_rows; row += n_rows) {
    n_rows = tile_rows(query.n_rows - row);
    const float* q = query.q + row * query.dim;
    float* packed = query.packed + row * query.dim;
    if (pairs.are_whole) {
      pack_whole<kInterleaved>(q, n_rows, pairs, angles, query.scale, packed);
      continue;
    }
    for (int64_t r = 0; r < n_rows; ++r) rotate_row<kInterleaved>(q + r * query.dim, angles, pairs, rows + r * query.dim);
    pack_rows<StoredF32>(rows, n_rows, static_cast<size_t>(query.dim), query.scale, packed);
  }
  rotator.base = base;
}

// Lists the angles, relative to q, of the view's keys [j, j + 4) of n. Where these keys begin a stretch, packs q anew and
// lists the angles of all keys of the stretch.
template <bool kInterleaved>
HWY_INLINE void find_angles(Rotator& rotator, const RotatedQuery& query, int64_t j, int64_t n) {
  const int64_t end = j + kFour < n ? j + kFour : n;
  if (end > rotator.stretch_end) {
    const int64_t* positions = rotator.seen;
    const float* first = rotator.table->row(0, 0);
    const int64_t row_size = rotator.table->row(0, 1) - first;
    int64_t stretch_end = j;
    for (; stretch_end < n; ++stretch_end) {
      const int64_t n_ahead = positions[stretch_end] - positions[j];
      if (static_cast<uint64_t>(n_ahead) >= uint64_t{kStretch}) break;
      rotator.rows[stretch_end] = first + n_ahead * row_size;
    }
    if (stretch_end >= end || rotator.base < 0) {
      pack_rotated<kInterleaved>(rotator, query, positions[j]);
      rotator.stretch_end = stretch_end;
    }
    for (int64_t i = 0; end > rotator.stretch_end && i < end - j; ++i) {
      compute_angles(rotator, positions[j + i] - rotator.base, rotator.angles[i]);
      rotator.rows[j + i] = rotator.angles[i];
    }
  }
  for (int64_t i = end; i < j + kFour; ++i) rotator.rows[i] = rotator.rows[end - 1];
}

// Widens and rotates four keys of any number of pairs into rows of `to`.
template <class Stored, bool kInterleaved>
void rotate_rows(const RotatedKeys& keys, const Pairs& pairs, float* to) {
  HWY_ALIGN float wide[kMaxPlainDim];
  for (int j = 0; j < kFour; ++j) {
    for (int64_t at = 0; keys.ahead != nullptr && at < pairs.dim * Stored::kBits / 8; at += int64_t{kLine})
      prefetch_line(keys.ahead[j * keys.apart] + at);
    row_to_f32<Stored>(keys.keys.rows[j], keys.keys.scales + j * keys.keys.n_scales, wide, pairs.dim);
    rotate_row<kInterleaved>(wide, keys.angles[j], pairs, to + j * pairs.dim);
  }
}

// Computes all rows for four keys. The first tile takes the keys as they are rotated, the others read them from `rotated`.
template <class Stored, bool kInterleaved>
HWY_INLINE void rotated_dot_rows(const RotatedQuery& query, const Pairs& pairs, const RotatedKeys& keys, float* rotated,
                                 float* logits) {
  const float* q = query.packed;
  const auto dim = static_cast<size_t>(pairs.dim);
  int64_t r = 0;
  if (!pairs.are_whole) {
    rotate_rows<Stored, kInterleaved>(keys, pairs, rotated);
  } else {
    r = tile_rows(query.n_rows);
    with_tile_rows(query.n_rows, [&](auto n) HWY_ATTR {
      rotate_four<Stored, kInterleaved, n>(q, pairs, keys, query.n_rows > n ? rotated : nullptr, logits);
    });
  }
  if (r == query.n_rows) return;
  Row rows[kFour];
  for (size_t j = 0; j < kFour; ++j) rows[j] = reinterpret_cast<Row>(rotated + j * dim);
  dot_rows<StoredF32, false>(q + r * pairs.dim, query.n_rows - r, dim, {rows, nullptr, 0}, {}, logits + r * kBlockKeys);
}

// dots() for a view whose keys are rotated.
template <class Stored, bool kInterleaved>
void rotated_dots(Rotator& rotator, const RotatedQuery& query, const KeyList& keys, float* logits) {
  static_assert(kStreams == kFour, "four keys fetch a row of every stream");
  const Pairs pairs = pairs_of(*rotator.table, query.dim);
  const KeyRows k{keys.k, keys.k_scales, keys.n_k_scales};
  Prefetcher ahead = keys.k_ahead;
  rotator.base = -1;  // the packed q belongs to another view
  rotator.stretch_end = 0;
  for (int64_t j = 0; j < keys.n; j += kFour) {
    const bool is_whole = j + kFour <= keys.n, fetches = ahead.group != nullptr && is_whole;
    RotatedKeys four{k.after(j), rotator.rows + j, fetches ? ahead.group + ahead.row : nullptr, ahead.apart};
    Row last[kFour];
    if (!is_whole) {
      for (int64_t i = 0; i < kFour; ++i) last[i] = keys.k[j + i < keys.n ? j + i : keys.n - 1];
      four.keys.rows = last;
    }
    find_angles<kInterleaved>(rotator, query, j, keys.n);
    rotated_dot_rows<Stored, kInterleaved>(query, pairs, four, rotator.rotated, logits + j);
    if (fetches) next_row(ahead);
  }
}

// Computes logits[r][j] = q[r] . k[j], both rotated, for all rows and the keys of the view that was attached last.
inline void rotated_dots_of(int32_t dtype, Rotator& rotator, const RotatedQuery& query, const KeyList& keys, float* logits) {
  with_key_type(dtype, [&](auto stored) HWY_ATTR {
    if (rotator.table->interleaved)
      rotated_dots<decltype(stored), true>(rotator, query, keys, logits);
    else
      rotated_dots<decltype(stored), false>(rotator, query, keys, logits);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
