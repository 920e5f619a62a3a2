// SPDX-License-Identifier: MIT
// Products of small matrices with a packed b, for the tiles of attention (cpu/matmul_block.cc).
//
// The operands are words of 32 bits: an f32, or two bf16 whose two products are added. A block of 6 rows of c and 4 vectors
// of columns (2 if a processor has 16 vector registers) stays in registers while k advances. A step of k loads the vectors
// of b once and one word of a for each row:
//
//              b [k, n]   a panel of 64 columns, 128 rows at a time: they stay in the first-level cache
//                ####
//   a [m, k]  +  ....     c [m, n]
//   #         #  ....
//
// So 24 fused multiply-adds need 10 loads, and the multiply-adds bound the rate. Each sum adds its products in the order of
// k, so the number of rows and columns of the call does not change any bit.
//
// Nothing is allocated and nothing is prepared. bf16 products are computed here, and so are f32 products if oneDNN has no
// memory for them (cpu/onednn.h).
#if defined(TANDEM_PRODUCT_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_PRODUCT_TILE_INL_H_
#undef TANDEM_PRODUCT_TILE_INL_H_
#else
#define TANDEM_PRODUCT_TILE_INL_H_
#endif

#include <hwy/highway.h>
#include <stdint.h>

#include "cpu/kernels/softmax_tile.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu::tile {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Dw = hn::CappedTag<float, 16>;  // a panel holds 4 of them
using Vw = hn::Vec<Dw>;

constexpr int64_t kBlockDepth = 128;
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3  // 16 registers
constexpr int64_t kBlockVectors = 2;
#else
constexpr int64_t kBlockVectors = 4;
#endif

// The instruction is written in assembly. The compiler's function for it works only in code that may use the instruction
// everywhere, and processors with AVX-512 may lack it. Callers ask has_bf16_products().
#undef TANDEM_BF16_PRODUCTS
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define TANDEM_BF16_PRODUCTS 1
#else
#define TANDEM_BF16_PRODUCTS 0
#endif

template <bool kBf16>
HWY_INLINE Vw multiply_add(Vw a, Vw b, Vw c) {
#if TANDEM_BF16_PRODUCTS
  if constexpr (kBf16) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(c.raw) : "v"(a.raw), "v"(b.raw));
    return c;
  }
#endif
  return hn::MulAdd(a, b, c);
}

// c (+)= a b for kRows rows and kVectors vectors of columns. The compiler does not know the size of SVE vectors and allows
// no arrays of them, so each vector has a name. Unused ones cost nothing.
#define TANDEM_EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define TANDEM_FIRST(r, j) \
  (kRows > r && kVectors > j && p.accumulate ? hn::LoadU(d, c + r * p.stride_c + j * n) : hn::Zero(d))
#define TANDEM_START(r) \
  Vw s##r##0 = TANDEM_FIRST(r, 0), s##r##1 = TANDEM_FIRST(r, 1), s##r##2 = TANDEM_FIRST(r, 2), s##r##3 = TANDEM_FIRST(r, 3);
#define TANDEM_STEP(r)                                                         \
  if constexpr (kRows > r) {                                                   \
    const Vw x = hn::Set(d, a[r * p.stride_a]);                                \
    s##r##0 = multiply_add<kBf16>(x, b0, s##r##0);                             \
    if constexpr (kVectors > 1) s##r##1 = multiply_add<kBf16>(x, b1, s##r##1); \
    if constexpr (kVectors > 2) s##r##2 = multiply_add<kBf16>(x, b2, s##r##2); \
    if constexpr (kVectors > 3) s##r##3 = multiply_add<kBf16>(x, b3, s##r##3); \
  }
#define TANDEM_END(r)                                                               \
  if constexpr (kRows > r) {                                                        \
    hn::StoreU(s##r##0, d, c + r * p.stride_c);                                     \
    if constexpr (kVectors > 1) hn::StoreU(s##r##1, d, c + r * p.stride_c + n);     \
    if constexpr (kVectors > 2) hn::StoreU(s##r##2, d, c + r * p.stride_c + 2 * n); \
    if constexpr (kVectors > 3) hn::StoreU(s##r##3, d, c + r * p.stride_c + 3 * n); \
  }

template <int kRows, int kVectors, bool kBf16>
HWY_INLINE void multiply_block(const Product& p, const float* a, const float* b, float* c) {
  const Dw d;
  const auto n = static_cast<int64_t>(hn::Lanes(d));
  TANDEM_EACH_ROW(TANDEM_START)
  for (int64_t l = 0; l < p.k; ++l, ++a, b += p.stride_b) {
    const Vw b0 = hn::LoadU(d, b), b1 = kVectors > 1 ? hn::LoadU(d, b + n) : b0,
             b2 = kVectors > 2 ? hn::LoadU(d, b + 2 * n) : b0, b3 = kVectors > 3 ? hn::LoadU(d, b + 3 * n) : b0;
    TANDEM_EACH_ROW(TANDEM_STEP)
  }
  TANDEM_EACH_ROW(TANDEM_END)
}

#undef TANDEM_EACH_ROW
#undef TANDEM_FIRST
#undef TANDEM_START
#undef TANDEM_STEP
#undef TANDEM_END

// Computes the columns of one block for all rows. p.b and p.c point to these columns.
template <int kRows, int kVectors, bool kBf16>
HWY_NOINLINE void multiply_rows(const Product& p, int64_t row) {
  const float *a = static_cast<const float*>(p.a) + row * p.stride_a, *b = static_cast<const float*>(p.b);
  float* c = p.c + row * p.stride_c;
  for (; row + kRows <= p.m; row += kRows, a += kRows * p.stride_a, c += kRows * p.stride_c)
    multiply_block<kRows, kVectors, kBf16>(p, a, b, c);
  if constexpr (kRows > 1)
    if (row < p.m) multiply_rows<kRows - 1, kVectors, kBf16>(p, row);
}

template <int kVectors, bool kBf16>
HWY_INLINE void multiply_columns(const Product& p, int64_t column) {
  Product part = p;
  const auto* a = static_cast<const float*>(p.a);
  const float* b = static_cast<const float*>(p.b) + column / kPanelColumns * p.panel_stride + column % kPanelColumns;
  part.c = p.c + column;
  for (int64_t l = 0; l < p.k; l += kBlockDepth) {
    part.k = p.k - l < kBlockDepth ? p.k - l : kBlockDepth;
    part.a = a + l;
    part.b = b + l * p.stride_b;
    part.accumulate = p.accumulate || l > 0;
    multiply_rows<6, kVectors, kBf16>(part, 0);
  }
}

template <bool kBf16>
void multiply(const Product& p) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Dw()));
  int64_t column = 0;
  for (; column + kBlockVectors * lanes <= p.n; column += kBlockVectors * lanes)
    multiply_columns<kBlockVectors, kBf16>(p, column);
  for (; column + lanes <= p.n; column += lanes) multiply_columns<1, kBf16>(p, column);
}

// Packs rows of words into panels of columns, 16 rows at a time, so that whole lines of a panel are written.
void pack_columns(const PackColumns& job) {
  const auto* from = static_cast<const uint32_t*>(job.rows);
  auto* to = static_cast<uint32_t*>(job.panels);
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < job.n_rows; ++i)
    for (int64_t l = 0; l < job.n_words; ++l)
      to[i / kPanelColumns * job.n_words * kPanelColumns + l * kPanelColumns + i % kPanelColumns] =
          from[i * job.n_words + l];
#else
  const hn::FixedTag<uint32_t, 4> d;
  const hn::Repartition<uint64_t, decltype(d)> d64;
  const int64_t n = job.n_words;
  const auto low = [&](auto x, auto y) HWY_ATTR {
    return hn::BitCast(d, hn::InterleaveLower(d64, hn::BitCast(d64, x), hn::BitCast(d64, y)));
  };
  const auto high = [&](auto x, auto y) HWY_ATTR {
    return hn::BitCast(d, hn::InterleaveUpper(d64, hn::BitCast(d64, x), hn::BitCast(d64, y)));
  };
  for (int64_t row = 0; row < job.n_rows; row += 16) {
    for (int64_t l = 0; l < n; l += 4) {
      const uint32_t* r = from + row * n + l;
      uint32_t* panel = to + row / kPanelColumns * n * kPanelColumns + l * kPanelColumns + row % kPanelColumns;
      for (int i = 0; i < 4; ++i, r += 4 * n, panel += 4) {
        const auto x0 = hn::LoadU(d, r), x1 = hn::LoadU(d, r + n), x2 = hn::LoadU(d, r + 2 * n),
                   x3 = hn::LoadU(d, r + 3 * n);
        const auto a0 = hn::InterleaveLower(d, x0, x1), a1 = hn::InterleaveUpper(d, x0, x1);
        const auto b0 = hn::InterleaveLower(d, x2, x3), b1 = hn::InterleaveUpper(d, x2, x3);
        hn::StoreU(low(a0, b0), d, panel);
        hn::StoreU(high(a0, b0), d, panel + kPanelColumns);
        hn::StoreU(low(a1, b1), d, panel + 2 * kPanelColumns);
        hn::StoreU(high(a1, b1), d, panel + 3 * kPanelColumns);
      }
    }
  }
#endif
}

// Makes rows 2 i and 2 i + 1 of bf16 into row i of words.
void pack_pairs(const PackPairs& job) {
  const hn::RebindToUnsigned<Dw> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < job.n_rows / 2; ++i) {
    const uint16_t *even = job.rows + 2 * i * job.stride, *odd = even + job.stride;
    for (int64_t c = 0; c < job.n_columns; c += lanes)
      hn::StoreU(
          hn::Or(hn::PromoteTo(d, hn::LoadU(d16, even + c)), hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(d16, odd + c)))),
          d, job.words + i * job.n_columns + c);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu::tile
HWY_AFTER_NAMESPACE();

#endif  // include guard, once for each target
