// SPDX-License-Identifier: MIT
#include "lib/store/saved_format.h"

#include <bit>
#include <charconv>
#include <cstring>

#include "lib/store/row_cursor.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little, "files are written as numbers lie in memory");

constexpr uint32_t kMostLayers = 65536;
constexpr int64_t kMostBytes = int64_t{1} << 60;  // so that sums of sizes do not overflow

struct RowsOfModel {
  int64_t n_sections = 0, bytes_per_token = 0;

  int64_t bytes(int64_t n_tokens) const { return n_sections * kSavedFrameBytes + n_tokens * bytes_per_token; }
};

RowsOfModel rows_of(const std::vector<Layer>& layers) {
  RowsOfModel rows;
  for (const Layer& layer : layers)
    for (const StoredPlane& plane : LayerPlanes(layer).planes) {
      if (plane.row_bytes == 0) continue;
      ++rows.n_sections;
      rows.bytes_per_token += std::ssize(plane.at) * plane.row_bytes;
    }
  return rows;
}

int64_t positions_bytes(const SavedHeader& header) {  // without the section's frame
  return (header.flags & kSavedPositions) == 0 ? 0 : 4 * header.n_tokens;
}

// So many digits that two numbers which differ look different.
template <typename Float>
std::string digits_of(Float value) {
  char text[40];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

int64_t head_bytes(const SavedHeader& header) {
  return static_cast<int64_t>(sizeof(SavedHeader) + header.n_layers * sizeof(SavedLayer) + sizeof(uint64_t));
}

// file, cache: the member's values in the file and in the cache.
Status differs(size_t layer_idx, const char* member, const std::string& file, const std::string& cache) {
  const std::string field = element_name("layers", static_cast<int64_t>(layer_idx)) + "." + member;
  return fail_with(TANDEM_ERROR_INVALID_ARGUMENT, 0, field.c_str(),
                   field + " is " + file + " in the file, " + cache +
                       " in the cache: the sequence is of another model, or of a cache with other types");
}

std::string text_of(const char* member, int64_t value) {
  const DtypeInfo* const type = std::strstr(member, "_type") != nullptr ? find_dtype(static_cast<int32_t>(value)) : nullptr;
  return type != nullptr ? type->name : std::to_string(value);
}

Status compare_layer(size_t l, const SavedLayer& file, const SavedLayer& cache) {
  struct Member {
    const char* name;
    int32_t SavedLayer::*value;
  };
  constexpr Member kMembers[] = {
      {"n_q_heads", &SavedLayer::n_q_heads},
      {"n_kv_heads", &SavedLayer::n_kv_heads},
      {"k_head_dim", &SavedLayer::k_head_dim},
      {"v_head_dim", &SavedLayer::v_head_dim},
      {"v_aliases_k", &SavedLayer::v_aliases_k},
      {"k_type", &SavedLayer::k_type},
      {"v_type", &SavedLayer::v_type},
      {"k_rotation", &SavedLayer::k_rotation},
      {"x_type", &SavedLayer::x_type},
      {"hidden_dim", &SavedLayer::hidden_dim},
      {"rope", &SavedLayer::rope},
      {"rope_dims", &SavedLayer::rope_dims},
  };
  for (const Member& member : kMembers)
    if (file.*member.value != cache.*member.value)
      return differs(l, member.name, text_of(member.name, file.*member.value), text_of(member.name, cache.*member.value));
  const auto numbers = [&](const char* name, auto of_file, auto of_cache) {
    return of_file == of_cache ? Status() : differs(l, name, digits_of(of_file), digits_of(of_cache));
  };
  TANDEM_TRY(numbers("sm_scale", file.sm_scale, cache.sm_scale));
  TANDEM_TRY(numbers("soft_cap", file.soft_cap, cache.soft_cap));
  TANDEM_TRY(numbers("rope_attn_factor", file.rope_attn_factor, cache.rope_attn_factor));
  if (file.sliding_window_tokens != cache.sliding_window_tokens)
    return differs(l, "sliding_window_tokens", std::to_string(file.sliding_window_tokens),
                   std::to_string(cache.sliding_window_tokens));
  if (file.sinks != cache.sinks) return differs(l, "sinks", "one list of numbers", "another");
  if (file.rope_inv_freq != cache.rope_inv_freq)
    return differs(l, "rope_inv_freq", "one list of numbers (or rope_theta, rope_position_scale)", "another");
  return std::memcmp(file.reserved, cache.reserved, sizeof file.reserved) == 0 ? Status()
                                                                               : differs(l, "reserved", "not zero", "zero");
}

// Checks numbers that are needed before the checksum can be verified, and before memory is allocated by them.
Status check_numbers(const SavedHeader& header, const SavedReader& reader) {
  const SavedHeader known;
  if (std::memcmp(header.magic, known.magic, sizeof known.magic) != 0)
    return reader.corrupt("it begins with other bytes than TANDEMSQ: no saved sequence");
  if (header.version != kSavedVersion)
    return fail(TANDEM_ERROR_UNSUPPORTED, "version", "version = %u of the format: this library reads version %u",
                header.version, kSavedVersion);
  if (header.header_bytes != known.header_bytes || header.layer_bytes != known.layer_bytes)
    return reader.corrupt("header_bytes = " + std::to_string(header.header_bytes) +
                          ", layer_bytes = " + std::to_string(header.layer_bytes) + ", in version 1 64 and 128");
  if (header.n_layers < 1 || header.n_layers > kMostLayers)
    return reader.corrupt("n_layers = " + std::to_string(header.n_layers) + " is not 1 to 65536");
  return {};
}

// Checks sizes. The checksum is right by then, but a caller may have made the file.
Status check_sizes(const SavedHeader& header, const ExpectedFile& expected, const SavedReader& reader) {
  if (header.n_tokens < 0 || header.n_tokens > INT32_MAX)
    return reader.corrupt("n_tokens = " + std::to_string(header.n_tokens) + " is not 0 to 2^31 - 1");
  if (header.bytes < 0 || header.bytes > kMostBytes)
    return reader.corrupt("bytes = " + std::to_string(header.bytes) + " is not 0 to 2^60");
  if ((header.flags & ~(kSavedPositions | kSavedStatistics)) != 0 || header.reserved != 0)
    return reader.corrupt("flags = " + std::to_string(header.flags) + " or reserved = " + std::to_string(header.reserved) +
                          " have bits that version 1 does not know");
  const RowsOfModel rows = rows_of(expected.layers);
  if (rows.bytes_per_token > 0 && header.n_tokens > header.bytes / rows.bytes_per_token)
    return reader.corrupt("bytes = " + std::to_string(header.bytes) +
                          " is less than the rows of n_tokens = " + std::to_string(header.n_tokens) + " tokens take");
  const int64_t n_sections = rows.n_sections + ((header.flags & kSavedPositions) != 0 ? 1 : 0) +
                             ((header.flags & kSavedStatistics) != 0 ? std::ssize(expected.layers) : 0);
  if (header.n_sections < n_sections)
    return reader.corrupt("n_sections = " + std::to_string(header.n_sections) + " is less than the " +
                          std::to_string(n_sections) + " of rows and statistics");
  const int64_t least = head_bytes(header) + rows.bytes(header.n_tokens) + positions_bytes(header) +
                        (header.n_sections - rows.n_sections) * kSavedFrameBytes;
  if (header.bytes < least)
    return reader.corrupt("bytes = " + std::to_string(header.bytes) + " is less than the " + std::to_string(least) +
                          " that its sections take");
  if (expected.file_bytes >= 0 && expected.file_bytes != header.bytes)
    return reader.corrupt("bytes = " + std::to_string(header.bytes) + ", but the file has " +
                          std::to_string(expected.file_bytes));
  return {};
}

Status check_model(const SavedHeader& header, const std::vector<SavedLayer>& layers, const ExpectedFile& expected) {
  if (layers.size() != expected.layers.size())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_layers", "n_layers is %zu in the file, %zu in the cache", layers.size(),
                expected.layers.size());
  for (size_t l = 0; l < layers.size(); ++l) TANDEM_TRY(compare_layer(l, layers[l], SavedLayer(expected.layers[l])));
  if (header.model_id == expected.model_id) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "model_id", "model_id is %llu in the file, %llu in the options",
              static_cast<unsigned long long>(header.model_id), static_cast<unsigned long long>(expected.model_id));
}

}  // namespace

SavedLayer::SavedLayer(const Layer& layer)
    : n_q_heads(layer.n_q_heads),
      n_kv_heads(layer.n_kv_heads),
      k_head_dim(layer.k_head_dim),
      v_head_dim(layer.v_head_dim),
      v_aliases_k(layer.v_aliases_k ? 1 : 0),
      k_type(layer.k_type),
      v_type(layer.v_type),
      k_rotation(layer.k_rotation),
      x_type(layer.x_type),
      hidden_dim(layer.hidden_dim()),
      sm_scale(layer.sm_scale),
      soft_cap(layer.soft_cap),
      sliding_window_tokens(layer.sliding_window) {
  if (layer.sinks != nullptr) sinks = checksum_of(layer.sinks, int64_t{4} * layer.n_q_heads);
  if (layer.rope == nullptr) return;
  rope = layer.rope->interleaved ? TANDEM_ROPE_INTERLEAVED : TANDEM_ROPE_HALVES;
  rope_dims = 2 * layer.rope->n_pairs;
  rope_inv_freq = checksum_of(layer.rope->inv_freq.data(), int64_t{4} * layer.rope->n_pairs);
  rope_attn_factor = layer.rope->attn_factor;
}

Status write_saved_header(const std::vector<Layer>& layers, int64_t more_bytes, SavedHeader* header, SavedWriter* writer) {
  header->n_layers = static_cast<uint32_t>(layers.size());
  const RowsOfModel rows = rows_of(layers);
  const bool has_positions = (header->flags & kSavedPositions) != 0;
  header->n_sections += static_cast<uint32_t>(rows.n_sections + (has_positions ? 1 : 0));
  header->bytes = head_bytes(*header) + rows.bytes(header->n_tokens) + (has_positions ? kSavedFrameBytes : 0) +
                  positions_bytes(*header) + more_bytes;
  TANDEM_TRY(writer->put(header, sizeof *header));
  for (const Layer& layer : layers) {
    const SavedLayer saved(layer);
    TANDEM_TRY(writer->put(&saved, sizeof saved));
  }
  return writer->end();
}

Status read_saved_header(const ExpectedFile& expected, SavedReader* reader, SavedHeader* header) {
  TANDEM_TRY(reader->take(header, sizeof *header));
  TANDEM_TRY(check_numbers(*header, *reader));
  std::vector<SavedLayer> layers;
  for (uint32_t l = 0; l < header->n_layers; ++l) {
    layers.emplace_back();
    TANDEM_TRY(reader->take(&layers.back(), sizeof(SavedLayer)));
  }
  const uint64_t sum = reader->checksum();
  uint64_t found = 0;
  TANDEM_TRY(reader->take(&found, sizeof found));
  if (found != sum) return reader->corrupt("its checksum is wrong");
  TANDEM_TRY(check_model(*header, layers, expected));
  TANDEM_TRY(check_sizes(*header, expected, *reader));
  reader->set_total(header->bytes);
  return {};
}

}  // namespace tandem
