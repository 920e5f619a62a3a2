// SPDX-License-Identifier: MIT
// Rotation of rows, by a table of angles in device memory and in double precision.
#pragma once

#include <complex>

#include "device/stand_in_call.h"

namespace stand_in {

inline void rotate(const tandem::RopeTable& table, const float* cos_sin, int64_t position, double* x) {
  const int64_t n = table.n_pairs;
  for (int64_t i = 0; i < n; ++i) {
    std::complex<double> angle(static_cast<double>(table.attn_factor));
    for (int64_t digit = 0; digit < tandem::RopeTable::kDigits; ++digit) {
      const float* row = cos_sin + (digit * 256 + (position >> 8 * digit & 255)) * 2 * n + i;
      angle *= std::complex<double>(static_cast<double>(row[0]), static_cast<double>(row[n]));
    }
    double &a = x[table.interleaved ? 2 * i : i], &b = x[table.interleaved ? 2 * i + 1 : i + n];
    const std::complex<double> rotated = std::complex<double>(a, b) * angle;
    a = rotated.real();
    b = rotated.imag();
  }
}

}  // namespace stand_in
