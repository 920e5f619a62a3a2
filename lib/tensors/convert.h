// SPDX-License-Identifier: MIT
// Converts rows between tensors and storage, with one rounding, or none if the types are equal.
//
// A stored row has codes and, for types with groups, separate scales. A tensor's row of such a type is a row of blocks, the
// layout that other software uses for it (lib/model/block_row.h). Rows of rotated keys are rotated in f32 before they are
// rounded, and rotated back after they are widened. So outside the cache keys are always as the caller knows them, in any
// tensor type.
#pragma once

#include <cstdint>

#include "lib/tables/backend.h"

namespace tandem {

struct StoredRow {
  int32_t dtype;
  void* codes;
  void* scales;  // null for types without groups
  int32_t rotation = TANDEM_ROTATION_NONE;
};

// Converts between types without groups.
void convert_row(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* to, int64_t n);
// n: the row's elements, at most 576.
void store_row(const Backend& cpu, int32_t from_type, const void* from, const StoredRow& to, int64_t n);
void load_row(const Backend& cpu, const StoredRow& from, int32_t to_type, void* to, int64_t n);
// For hidden states of any length: whole groups, with the scales behind all codes.
void store_hidden(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* row, int64_t n);
void load_hidden(const Backend& cpu, int32_t from_type, const void* row, int32_t to_type, void* to, int64_t n);

}  // namespace tandem
