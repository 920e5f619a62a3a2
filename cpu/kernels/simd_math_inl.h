// SPDX-License-Identifier: MIT
// exp and tanh over f32 lanes.
//
// exp: x = n ln 2 + r with |r| <= ln 2 / 2. e^r is a polynomial of degree 6 (relative error 2^-26.5 before rounding). 2^n
// has two factors, so results pass through the subnormals down to 0 and up to inf. Results below x = -110 are exactly 0. NaN
// stays NaN.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using Vec = hn::Vec<F32>;
// The element type of arrays. A vector of SVE has no size unless its target and -msve-vector-bits give one.
#if HWY_TARGET == HWY_SVE_256
typedef Vec SizedVec __attribute__((arm_sve_vector_bits(8 * HWY_MAX_BYTES)));
#else
using SizedVec = Vec;
#endif

// Returns e^(x - n ln 2).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_of_rest(D d, V x, V n_float) {
  V r = hn::NegMulAdd(n_float, hn::Set(d, 0.693359375f), x);  // 10 bits: the product is exact
  r = hn::NegMulAdd(n_float, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::MulAdd(hn::Set(d, 1.392618181e-3f), r, hn::Set(d, 8.363177630e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.166655463e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.666657700e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  return hn::Add(hn::MulAdd(hn::Mul(r, r), p, r), hn::Set(d, 1.0f));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_of(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V bounded = hn::Min(hn::Max(x, hn::Set(d, -110.0f)), hn::Set(d, 90.0f));
  const auto n = hn::NearestInt(hn::Mul(bounded, hn::Set(d, 1.44269504f)));
  const V p = exp_of_rest(d, bounded, hn::ConvertTo(d, n));
  const auto half = hn::ShiftRight<1>(n);
  const auto bias = hn::Set(di, 127);
  const V low = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V high = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(n, half), bias)));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Mul(hn::Mul(p, low), high));
}

// exp_of() for x <= 0 or NaN, as softmax needs it: results below the normal numbers are 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_at_most_1(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V bounded = hn::Max(x, hn::Set(d, -88.0f));  // n = -127 there, whose factor is 0
  const auto n = hn::NearestInt(hn::Mul(bounded, hn::Set(d, 1.44269504f)));
  const V p = exp_of_rest(d, bounded, hn::ConvertTo(d, n));
  const V factor = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Mul(p, factor));
}

HWY_INLINE float exp_of(float x) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(exp_of(d, hn::Set(d, x)));
}

// tanh: small arguments by an odd polynomial (relative error 2^-30), others by (1 - e^-2y) / (1 + e^-2y).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V tanh_of(D d, V x) {
  const V y = hn::Abs(x), one = hn::Set(d, 1.0f);
  const V z = hn::Mul(x, x);
  V p = hn::MulAdd(hn::Set(d, 2.269501684e-3f), z, hn::Set(d, -8.323187058e-3f));
  p = hn::MulAdd(p, z, hn::Set(d, 2.176250291e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, -5.395846163e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, 1.333330015e-1f));
  p = hn::MulAdd(p, z, hn::Set(d, -3.333333315e-1f));
  const V small = hn::MulAdd(hn::Mul(x, z), p, x);
  const V e = exp_of(d, hn::Mul(y, hn::Set(d, -2.0f)));
  const V large = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Lt(y, hn::Set(d, 0.625f)), small, large);
}

HWY_INLINE float tanh_of(float x) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(tanh_of(d, hn::Set(d, x)));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
