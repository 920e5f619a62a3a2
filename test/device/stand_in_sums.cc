// SPDX-License-Identifier: MIT
#include "device/stand_in_sums.h"

namespace stand_in {

// Adds up four independent sums, so the additions need not wait for each other.
double dot(const double* a, const double* b, size_t n) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    sums[0] += a[i] * b[i];
    sums[1] += a[i + 1] * b[i + 1];
    sums[2] += a[i + 2] * b[i + 2];
    sums[3] += a[i + 3] * b[i + 3];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

void add_scaled(double* to, double scale, const double* row, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] += scale * row[i];
}

}  // namespace stand_in
