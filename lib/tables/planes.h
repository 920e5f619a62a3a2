// SPDX-License-Identifier: MIT
// The rows that a cache keeps for a token in one layer and KV head: one in each of up to four planes.
//
//   K            the key's codes
//   K scales     the f16 numbers of each group of codes, where the storage type has groups (lib/model/dtype.h)
//   V, V scales  the same for the value; none where V aliases K: V is then read from K's planes
//
// Planes are separate, so that each is scanned linearly. Code that moves rows moves them plane by plane and need not know
// the type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lib/model/dtype.h"
#include "lib/model/layer.h"
#include "lib/tables/backend.h"

namespace tandem {

enum Plane : int32_t { kPlaneK, kPlaneKScales, kPlaneV, kPlaneVScales };
inline constexpr int32_t kPlanes = 4;

// Bytes of a row in each plane, 0 if the layer has no such plane.
struct PlaneBytes {
  int64_t of[kPlanes] = {};
  int64_t total() const { return of[kPlaneK] + of[kPlaneKScales] + of[kPlaneV] + of[kPlaneVScales]; }
};

inline PlaneBytes plane_bytes(const Layer& layer) {
  PlaneBytes bytes;
  bytes.of[kPlaneK] = row_bytes(layer.k_type, layer.k_head_dim);
  bytes.of[kPlaneKScales] = scale_bytes(layer.k_type, layer.k_head_dim);
  if (layer.v_aliases_k) return bytes;
  bytes.of[kPlaneV] = row_bytes(layer.v_type, layer.v_head_dim);
  bytes.of[kPlaneVScales] = scale_bytes(layer.v_type, layer.v_head_dim);
  return bytes;
}

// The first of consecutive rows in each plane, null if the layer has no such plane.
struct Rows {
  std::byte* of[kPlanes] = {};

  std::byte* v(const Layer& layer) const { return of[layer.v_aliases_k ? kPlaneK : kPlaneV]; }
  std::byte* v_scales(const Layer& layer) const { return of[layer.v_aliases_k ? kPlaneKScales : kPlaneVScales]; }
  // Returns the rows that begin n rows later.
  Rows after(const PlaneBytes& bytes, int64_t n) const {
    Rows rows = *this;
    for (int32_t p = 0; p < kPlanes; ++p)
      if (bytes.of[p] > 0) rows.of[p] += n * bytes.of[p];
    return rows;
  }
};

// Copies n consecutive rows between memory that does not overlap.
inline void copy_rows(const Rows& from, const Rows& to, const PlaneBytes& bytes, int64_t n) {
  for (int32_t p = 0; p < kPlanes; ++p)
    if (bytes.of[p] > 0) std::memcpy(to.of[p], from.of[p], static_cast<size_t>(n * bytes.of[p]));
}

// Convert rows to a run of keys as backends read it, and back.
inline void point_run(const Rows& rows, const Layer& layer, KvRun* run) {
  run->k = rows.of[kPlaneK];
  run->k_scales = rows.of[kPlaneKScales];
  run->v = rows.v(layer);
  run->v_scales = rows.v_scales(layer);
}
inline Rows rows_of(const KvRun& run) {
  const auto bytes = [](const void* plane) { return static_cast<std::byte*>(const_cast<void*>(plane)); };
  return {{bytes(run.k), bytes(run.k_scales), bytes(run.v), bytes(run.v_scales)}};
}

}  // namespace tandem
