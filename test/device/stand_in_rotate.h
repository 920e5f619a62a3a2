// SPDX-License-Identifier: MIT
// Rotation of rows: by a table of angles in device memory, in double precision, and by a Walsh-Hadamard matrix, bit for bit
// as on the host.
#pragma once

#include <algorithm>
#include <complex>
#include <vector>

#include "device/stand_in_call.h"
#include "lib/model/hadamard.h"

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

inline void hadamard(std::vector<double>* x) {
  std::vector<float> row(x->begin(), x->end());
  tandem::hadamard_rotate(row.data(), static_cast<int64_t>(row.size()));
  std::copy(row.begin(), row.end(), x->begin());
}

}  // namespace stand_in
