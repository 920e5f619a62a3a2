// SPDX-License-Identifier: MIT
// exp(x) for x <= 0, the core of the softmax, in about 14 instructions per vector:
//   n = round(x / ln 2), r = x - n ln 2 (ln 2 in two parts, |r| <= 0.35), exp(x) = 2^n (1 + r + r^2 Q(r)),
// Q has degree 4, fitted at Chebyshev nodes (error 2^-26.5, so rounding dominates). Adding 1.5 * 2^23 rounds and leaves n in
// the low mantissa bits; a shift makes the exponent of them. Below -87 the result is 0 by selection. Clamping the argument
// would hide a NaN.
//
// tanh(x) for the soft cap: x + x^3 R(x^2) up to 0.6 (error 2^-26), beyond it (1 - e) / (1 + e) with e = exp(-2 |x|).
#include "cpu/kernels/softmax_tile.h"

#include <stdint.h>
#include <string.h>
#include <strings.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/softmax_tile.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "cpu/kernels/product_tile_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu::tile {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Df = hn::ScalableTag<float>;
using Du = hn::RebindToUnsigned<Df>;
using Vf = hn::Vec<Df>;
using Vu = hn::Vec<Du>;

constexpr uint32_t kNegativeInfBits = 0xff800000u;

HWY_INLINE Vf exp_nonpositive(Df d, Vf x) {
  const Du du;
  const Vf round = hn::Set(d, 12582912.0f);  // 1.5 * 2^23
  const Vf t = hn::MulAdd(x, hn::Set(d, 0x1.715476p+0f), round);
  const Vf n = hn::Sub(t, round);
  Vf r = hn::NegMulAdd(n, hn::Set(d, 0x1.62ep-1f), x);
  r = hn::NegMulAdd(n, hn::Set(d, 0x1.0bfbe8p-15f), r);
  Vf q = hn::MulAdd(r, hn::Set(d, 0x1.6d117cp-10f), hn::Set(d, 0x1.120be2p-7f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.555518p-5f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.5554dcp-3f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1p-1f));
  const Vf p = hn::MulAdd(hn::Mul(r, r), q, hn::Add(r, hn::Set(d, 1.0f)));
  const Vu exponent = hn::Add(hn::ShiftLeft<23>(hn::BitCast(du, t)), hn::Set(du, 127u << 23));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), hn::Mul(p, hn::BitCast(d, exponent)));
}

HWY_INLINE Vf tanh(Df d, Vf x) {
  const Vf size = hn::Abs(x), one = hn::Set(d, 1.0f), z = hn::Mul(x, x);
  Vf r = hn::MulAdd(z, hn::Set(d, -0x1.9ada6p-8f), hn::Set(d, 0x1.59e1c8p-6f));
  r = hn::MulAdd(r, z, hn::Set(d, -0x1.b955dcp-5f));
  r = hn::MulAdd(r, z, hn::Set(d, 0x1.110eep-3f));
  r = hn::MulAdd(r, z, hn::Set(d, -0x1.555554p-2f));
  const Vf near = hn::MulAdd(hn::Mul(x, z), r, x);
  const Vf e = exp_nonpositive(d, hn::Mul(size, hn::Set(d, -2.0f)));
  const Vf far = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.6f)), near, far);
}

void cap_logits(float* s, int64_t n, float scale, float soft_cap) {
  const Df d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float inner = soft_cap > 0.0f ? scale / soft_cap : 0.0f;
  for (int64_t i = 0; i < n; i += lanes) {  // n is a multiple of kColumnStep
    const Vf x = hn::LoadU(d, s + i);
    Vf y;
    if (soft_cap > 0.0f) {
      const Vf poison = hn::Mul(x, hn::Zero(d));  // NaN where x is not finite
      y = hn::MulAdd(tanh(d, hn::Mul(x, hn::Set(d, inner))), hn::Set(d, soft_cap), poison);
    } else {
      y = hn::Mul(x, hn::Set(d, scale));
    }
    hn::StoreU(y, d, s + i);
  }
}

// Stores 2 vectors rounded to nearest. p >= 0, and a tie (one value in 65,536) goes up.
HWY_INLINE void store_bf16(Vf p0, Vf p1, uint16_t* to) {
  const Du du;
  const hn::Repartition<uint16_t, Df> d16;
  const Vu half = hn::Set(du, 0x8000u);
  const Vu bits0 = hn::Add(hn::BitCast(du, p0), half), bits1 = hn::Add(hn::BitCast(du, p1), half);
#if HWY_TARGET == HWY_SCALAR
  to[0] = static_cast<uint16_t>(hn::GetLane(bits0) >> 16);
  to[1] = static_cast<uint16_t>(hn::GetLane(bits1) >> 16);
  (void)d16;
#else
  hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, bits1), hn::BitCast(d16, bits0)), d16, to);
#endif
}

// Returns the largest s * scale of a row. Sets *poison to NaN if a visible product is not finite, else to 0.
template <bool kMasked>
HWY_INLINE float row_maximum(const float* s, const SoftmaxTile& tile, float* poison) {
  const Df d;
  const Du du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Vf scale = hn::Set(d, tile.scale), hidden = hn::BitCast(d, hn::Set(du, kNegativeInfBits)), zero = hn::Zero(d);
  Vf max0 = hidden, max1 = hidden, poison0 = zero, poison1 = zero;
  const auto step = [&](int64_t c, Vf& max, Vf& bad) HWY_ATTR {
    Vf x = hn::LoadU(d, s + c);
    if (kMasked) {
      const Vf keep = hn::BitCast(d, hn::LoadU(du, tile.visible + c));
      x = hn::And(x, keep);
      max = hn::Max(max, hn::Or(hn::And(hn::Mul(x, scale), keep), hn::AndNot(keep, hidden)));
    } else {
      max = hn::Max(max, hn::Mul(x, scale));
    }
    bad = hn::MulAdd(x, zero, bad);
  };
  for (int64_t c = 0; c < tile.n_columns; c += 2 * lanes) {
    step(c, max0, poison0);
    step(c + lanes, max1, poison1);
  }
  *poison = hn::GetLane(hn::SumOfLanes(d, hn::Add(poison0, poison1)));
  const Vf max = hn::Max(max0, max1);
  // The maximum over lanes in Highway's portable target never falls below the lowest finite number.
  if (hn::AllTrue(d, hn::Eq(max, hidden))) return hn::GetLane(hidden);
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

// Turns a row into p in place and returns its sum. bf16 values are written behind the reads: 2 bytes for every 4.
template <bool kMasked, bool kBf16>
HWY_INLINE float row_exponentials(float* s, const SoftmaxTile& tile, float shift) {
  const Df d;
  const Du du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Vf scale = hn::Set(d, tile.scale), shifts = hn::Set(d, shift);
  uint16_t* p16 = reinterpret_cast<uint16_t*>(s);
  Vf sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  // Not fused: the product is rounded as in row_maximum(), so the largest has exponent 0 whatever its size.
  const auto p_at = [&](int64_t c) HWY_ATTR {
    const Vf p = exp_nonpositive(d, hn::Sub(hn::Mul(hn::LoadU(d, s + c), scale), shifts));
    return kMasked ? hn::And(p, hn::BitCast(d, hn::LoadU(du, tile.visible + c))) : p;
  };
  for (int64_t c = 0; c < tile.n_columns; c += 2 * lanes) {
    const Vf p0 = p_at(c), p1 = p_at(c + lanes);
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
    if (kBf16) {
      store_bf16(p0, p1, p16 + c);
    } else {
      hn::StoreU(p0, d, s + c);
      hn::StoreU(p1, d, s + c + lanes);
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

HWY_INLINE void scale_row(float* row, int64_t n, float factor) {
  const Df d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, row + i), hn::Set(d, factor)), d, row + i);
  for (; i < n; ++i) row[i] *= factor;
}

template <bool kMasked, bool kBf16>
void softmax_rows(const SoftmaxTile& tile) {
  const Df d;
  for (int64_t r = 0; r < tile.n_rows; ++r) {
    float* s = tile.s + r * tile.stride_s;
    const float max_before = tile.row_max[r];
    float poison;
    float max = row_maximum<kMasked>(s, tile, &poison);
    if (!(max >= max_before)) max = max_before;  // also if max_before is NaN, which stays
    max += poison;
    if (!(max == max_before)) {  // so max is not -inf; if max stays -inf, every column is hidden and p = 0 by selection
      const float factor = hn::GetLane(exp_nonpositive(d, hn::Set(d, max_before - max)));
      tile.row_max[r] = max;
      tile.row_sum[r] *= factor;
      scale_row(tile.o + r * tile.o_dim, tile.o_dim, factor);
    }
    tile.row_sum[r] += row_exponentials<kMasked, kBf16>(s, tile, max);
  }
}

void softmax(const SoftmaxTile& tile) {
  if (tile.visible != nullptr) {
    tile.p_is_bf16 ? softmax_rows<true, true>(tile) : softmax_rows<true, false>(tile);
  } else {
    tile.p_is_bf16 ? softmax_rows<false, true>(tile) : softmax_rows<false, false>(tile);
  }
}

// The angle of a position is the angle of its upper digits plus that of its lowest one.
void rotate(const RotateRows& job) {
  const Df d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t n = job.n_pairs;
  for (int64_t r = 0; r < job.n_rows; ++r) {
    float* row = job.rows + r * job.stride;
    const float *high = job.high, *low = job.low + r * 2 * n;
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      const Vf ch = hn::LoadU(d, high + i), sh = hn::LoadU(d, high + n + i);
      const Vf cl = hn::LoadU(d, low + i), sl = hn::LoadU(d, low + n + i);
      const Vf c = hn::NegMulAdd(sl, sh, hn::Mul(cl, ch)), s = hn::MulAdd(sl, ch, hn::Mul(cl, sh));
      Vf x, y;
      if (job.interleaved) {
        hn::LoadInterleaved2(d, row + 2 * i, x, y);
        hn::StoreInterleaved2(hn::NegMulAdd(y, s, hn::Mul(x, c)), hn::MulAdd(y, c, hn::Mul(x, s)), d, row + 2 * i);
      } else {
        x = hn::LoadU(d, row + i);
        y = hn::LoadU(d, row + n + i);
        hn::StoreU(hn::NegMulAdd(y, s, hn::Mul(x, c)), d, row + i);
        hn::StoreU(hn::MulAdd(y, c, hn::Mul(x, s)), d, row + n + i);
      }
    }
    for (; i < n; ++i) {
      const float c = low[i] * high[i] - low[n + i] * high[n + i], s = low[n + i] * high[i] + low[i] * high[n + i];
      float *a = row + (job.interleaved ? 2 * i : i), *b = row + (job.interleaved ? 2 * i + 1 : i + n);
      const float x = *a, y = *b;
      *a = x * c - y * s;
      *b = y * c + x * s;
    }
  }
}

bool has_nonfinite(const void* words, int64_t n, bool packed_bf16) {
  const Du du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(du));
  const auto* at = static_cast<const uint8_t*>(words);
  const uint32_t upper = 0x7f800000u, lower = 0x7f80u;
  const Vu uppers = hn::Set(du, upper), lowers = hn::Set(du, lower);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const Vu word = hn::LoadU(du, reinterpret_cast<const uint32_t*>(at) + i);
    if (!hn::AllFalse(du, hn::Eq(hn::And(word, uppers), uppers))) return true;
    if (packed_bf16 && !hn::AllFalse(du, hn::Eq(hn::And(word, lowers), lowers))) return true;
  }
  for (; i < n; ++i) {
    uint32_t word;
    memcpy(&word, at + 4 * i, 4);
    if ((word & upper) == upper || (packed_bf16 && (word & lower) == lower)) return true;
  }
  return false;
}

void exp_array(const float* x, float* y, int64_t n) {
  const Df d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += lanes) {
    HWY_ALIGN float block[HWY_MAX_BYTES / 4] = {0};
    const int64_t count = n - i < lanes ? n - i : lanes;
    memcpy(block, x + i, static_cast<size_t>(count) * sizeof(float));
    hn::Store(exp_nonpositive(d, hn::Load(d, block)), d, block);
    memcpy(y + i, block, static_cast<size_t>(count) * sizeof(float));
  }
}

const SoftmaxTileKernels* table() {
  static constexpr SoftmaxTileKernels kTable = {
    HWY_TARGET,
    rotate,
    cap_logits,
    softmax,
    has_nonfinite,
    multiply<false>,
#if TANDEM_BF16_PRODUCTS
    multiply<true>,
#else
    nullptr,
#endif
    pack_columns,
    pack_pairs,
    exp_array,
  };
  return &kTable;
}

}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu::tile
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::cpu {
namespace {

struct Variant {
  int64_t target;  // lower is better
  const SoftmaxTileKernels* (*table)();
};

// Best first. Every processor of this architecture can run the last one.
constexpr Variant kVariants[] = {
#define TANDEM_VARIANT(name) {HWY_##name, tile::N_##name::table},
#if defined(HWY_AVX3_ZEN4) && (HWY_TARGETS & HWY_AVX3_ZEN4)
    TANDEM_VARIANT(AVX3_ZEN4)
#endif
#if HWY_TARGETS & HWY_AVX3_DL
        TANDEM_VARIANT(AVX3_DL)
#endif
#if HWY_TARGETS & HWY_AVX3
            TANDEM_VARIANT(AVX3)
#endif
#if HWY_TARGETS & HWY_AVX2
                TANDEM_VARIANT(AVX2)
#endif
#if HWY_TARGETS & HWY_SSE4
                    TANDEM_VARIANT(SSE4)
#endif
#if HWY_TARGETS & HWY_SSSE3
                        TANDEM_VARIANT(SSSE3)
#endif
#if HWY_TARGETS & HWY_SVE2_128
                            TANDEM_VARIANT(SVE2_128)
#endif
#if HWY_TARGETS & HWY_SVE_256
                                TANDEM_VARIANT(SVE_256)
#endif
#if HWY_TARGETS & HWY_SVE2
                                    TANDEM_VARIANT(SVE2)
#endif
#if HWY_TARGETS & HWY_SVE
                                        TANDEM_VARIANT(SVE)
#endif
#undef TANDEM_VARIANT
                                            {HWY_STATIC_TARGET, tile::HWY_STATIC_DISPATCH(table)},
};

// Maps "avx2" to HWY_AVX2, and so on; 0 if no target of this architecture has that name.
int64_t target_of(const char* isa) {
  for (int bit = 0; bit < 63; ++bit) {
    const char* name = hwy::TargetName(int64_t{1} << bit);
    if (strcasecmp(name, isa) == 0) return int64_t{1} << bit;
  }
  return 0;
}

}  // namespace

const SoftmaxTileKernels* softmax_tile_kernels(const char* isa) {
  const int64_t supported = hwy::SupportedTargets();
  const int64_t limit = isa != nullptr ? target_of(isa) : 1;
  if (limit == 0 || (isa != nullptr && (supported & limit) == 0)) return nullptr;
  for (const Variant& variant : kVariants)
    if (variant.target >= limit && ((supported & variant.target) != 0 || variant.target == HWY_STATIC_TARGET))
      return variant.table();
  return nullptr;
}

bool has_bf16_products(const SoftmaxTileKernels& kernels) {
#if HWY_ARCH_X86
  return kernels.multiply_bf16 != nullptr && __builtin_cpu_supports("avx512bf16") != 0;
#else
  return kernels.multiply_bf16 != nullptr;
#endif
}

}  // namespace tandem::cpu
#endif  // HWY_ONCE
