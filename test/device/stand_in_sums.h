// SPDX-License-Identifier: MIT
// The innermost loops of attention, where tests of the stand-in spend most of their time. They are compiled without
// sanitizers, so the caller must pass the right length of rows.
#pragma once

#include <cstddef>

namespace stand_in {

double dot(const double* a, const double* b, size_t n);
void add_scaled(double* to, double scale, const double* row, size_t n);  // to += scale * row

}  // namespace stand_in
