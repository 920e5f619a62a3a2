// SPDX-License-Identifier: MIT
// The header of a saved sequence: its size, the model and the storage types. All numbers are little endian.
// docs/saved-sequences.md describes the format for readers of files.
//
//   SavedHeader | SavedLayer [n_layers] | checksum of both
#pragma once

#include <cstdint>
#include <vector>

#include "lib/model/layer.h"
#include "lib/store/saved_stream.h"

namespace tandem {

inline constexpr uint32_t kSavedVersion = 1;
inline constexpr uint32_t kSavedPositions = 1, kSavedStatistics = 2;  // flags

struct SavedHeader {
  char magic[8] = {'T', 'A', 'N', 'D', 'E', 'M', 'S', 'Q'};
  uint32_t version = kSavedVersion;
  uint32_t header_bytes = 64, layer_bytes = 128;  // bytes of this struct and of a SavedLayer
  uint32_t n_layers = 0;
  int64_t n_tokens = 0;
  int64_t bytes = 0;      // size of the whole file, with this header
  uint64_t model_id = 0;  // from the caller
  uint32_t n_sections = 0;
  uint32_t flags = 0;
  uint64_t reserved = 0;
};
static_assert(sizeof(SavedHeader) == 64);

// The shape and types of a layer's K and V, and the numbers that attention uses.
struct SavedLayer {
  int32_t n_q_heads = 0, n_kv_heads = 0, k_head_dim = 0, v_head_dim = 0;
  int32_t v_aliases_k = 0, k_type = 0, v_type = 0, k_rotation = 0;
  int32_t x_type = 0, hidden_dim = 0, rope = 0, rope_dims = 0;
  float sm_scale = 0.0f, soft_cap = 0.0f;
  int64_t sliding_window_tokens = 0;
  uint64_t sinks = 0;          // checksum of the learned sinks; 0: none
  uint64_t rope_inv_freq = 0;  // checksum of the radians per position of each pair, as f32; 0: the caller applies RoPE
  double rope_attn_factor = 0.0;
  uint64_t reserved[5] = {};

  explicit SavedLayer(const Layer& layer);
  SavedLayer() = default;
};
static_assert(sizeof(SavedLayer) == 128);

// Writes the header. The caller sets n_tokens, flags, model_id and n_sections, and this function sets the rest. more_bytes:
// bytes of the sections that are not rows or positions, with their frames.
Status write_saved_header(const std::vector<Layer>& layers, int64_t more_bytes, SavedHeader* header, SavedWriter* writer);

// The file that a cache with these layers, and a caller with this model_id, can load. file_bytes: size of the file if the
// caller knows it; -1: unknown.
struct ExpectedFile {
  const std::vector<Layer>& layers;
  uint64_t model_id = 0;
  int64_t file_bytes = -1;
};
// Fails with CORRUPT, UNSUPPORTED (version), or INVALID_ARGUMENT if the file is of another model or stored in other types,
// naming the member that differs.
Status read_saved_header(const ExpectedFile& expected, SavedReader* reader, SavedHeader* header);

}  // namespace tandem
