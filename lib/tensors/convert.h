// SPDX-License-Identifier: MIT
// Rows of tensors to and from storage: one rounding, none where the types are equal.
//
// A stored row is codes and, for types with groups, scales apart from them. A tensor's row in such a type is a row of
// blocks, the layout that its users have (lib/model/block_row.h). Rows of rotated keys are rotated in f32 before they are
// rounded, and back after they are widened: whatever type a tensor has, outside the cache they are as the caller knows them.
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

// Between types without groups.
void convert_row(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* to, int64_t n);
// n: the row's elements, at most 576.
void store_row(const Backend& cpu, int32_t from_type, const void* from, const StoredRow& to, int64_t n);
void load_row(const Backend& cpu, const StoredRow& from, int32_t to_type, void* to, int64_t n);
// Hidden states: of any length, whole groups, scales behind all of the codes.
void store_hidden(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* row, int64_t n);
void load_hidden(const Backend& cpu, int32_t from_type, const void* row, int32_t to_type, void* to, int64_t n);

}  // namespace tandem
