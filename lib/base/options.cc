// SPDX-License-Identifier: MIT
#include "lib/base/options.h"

#include <algorithm>
#include <cstring>

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr int32_t kMaxThreads = 4096;

Status check_string(const char* field, const char* value) {
  if (value == nullptr || *value != '\0') return {};
  return fail(kInvalid, field, "%s = \"\" is empty: NULL is the default", field);
}

template <typename T>
void init(T* options) {
  constexpr T kDefaults = AbiStruct<T>::defaults();
  if (options != nullptr) std::memcpy(static_cast<void*>(options), &kDefaults, sizeof kDefaults);  // may be misaligned
}

}  // namespace

Status check_reserved(const char* field, int64_t value) {
  if (value == 0) return {};
  return fail(kInvalid, field, "%s = %lld, must be 0", field, static_cast<long long>(value));
}

Status check_struct_size(const void* data, const std::string& prefix, const StructSizes& sizes, uint32_t* struct_size) {
  if (reinterpret_cast<uintptr_t>(data) % sizes.alignment != 0)
    return refuse_misaligned(data, sizes.alignment,
                             prefix.empty() ? "options" : prefix.substr(0, prefix.size() - 1).c_str());
  uint32_t size;
  std::memcpy(&size, data, sizeof size);
  const std::string field = prefix + "struct_size";
  if (size < sizes.first_bytes || size > kMaxStructBytes)
    return fail(kInvalid, field.c_str(), "%s = %u is not a size of %s (%u in this version)", field.c_str(), size,
                sizes.type_name, sizes.known_bytes);
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (uint32_t i = sizes.known_bytes; i < size; ++i)
    if (bytes[i] != 0)
      return fail(kInvalid, field.c_str(), "%s = %u: byte %u is not zero, but this version of %s ends at %u", field.c_str(),
                  size, i, sizes.type_name, sizes.known_bytes);
  *struct_size = size;
  return {};
}

Status check_stride(const void* element, const std::string& prefix, const std::string& array, uint32_t stride) {
  uint32_t size = 0;
  std::memcpy(&size, element, sizeof size);
  if (size == stride) return {};
  return fail(kInvalid, (prefix + "struct_size").c_str(), "%sstruct_size = %u differs from %s[0].struct_size = %u",
              prefix.c_str(), size, array.c_str(), stride);
}

Status copy_struct_in(const void* from, const std::string& prefix, const StructSizes& sizes, void* known) {
  uint32_t size = 0;
  TANDEM_TRY(check_struct_size(from, prefix, sizes, &size));
  std::memcpy(known, from, std::min(size, sizes.known_bytes));
  std::memcpy(known, &sizes.known_bytes, sizeof sizes.known_bytes);
  return {};
}

void copy_struct_out(const void* known, uint32_t known_bytes, void* to) {
  uint32_t size;
  std::memcpy(&size, to, sizeof size);
  const size_t skip = sizeof size;  // struct_size keeps the caller's value
  std::memcpy(static_cast<char*>(to) + skip, static_cast<const char*>(known) + skip, std::min(size, known_bytes) - skip);
}

Status check_engine_options(const tandem_engine_options& options) {
  if (options.matmul_rows < -1)
    return fail(kInvalid, "matmul_rows", "matmul_rows = %d is not -1, 0 or more", options.matmul_rows);
  if (options.n_threads < 0 || options.n_threads > kMaxThreads)
    return fail(kInvalid, "n_threads", "n_threads = %d is not from 0 to %d", options.n_threads, kMaxThreads);
  TANDEM_TRY(check_string("cpu_isa", options.cpu_isa));
  TANDEM_TRY(check_string("backend", options.backend));
  return check_string("backend_path", options.backend_path);
}

Status check_session_options(const tandem_session_options& options) {
  if (options.sleep_between_calls != 0 && options.sleep_between_calls != 1)
    return fail(kInvalid, "sleep_between_calls", "sleep_between_calls = %d is neither 0 nor 1", options.sleep_between_calls);
  TANDEM_TRY(check_string("policy", options.policy));
  return check_string("route", options.route);
}

}  // namespace tandem

void tandem_engine_options_init(tandem_engine_options* options) { tandem::init(options); }

void tandem_layer_options_init(tandem_layer_options* options) { tandem::init(options); }

void tandem_layer_projection_init(tandem_layer_projection* projection) { tandem::init(projection); }

void tandem_cache_options_init(tandem_cache_options* options) { tandem::init(options); }

void tandem_session_options_init(tandem_session_options* options) { tandem::init(options); }

void tandem_attend_args_init(tandem_attend_args* args) { tandem::init(args); }
void tandem_selection_init(tandem_selection* selection) { tandem::init(selection); }

void tandem_pruning_stage_init(tandem_pruning_stage* stage) { tandem::init(stage); }
void tandem_pruning_record_init(tandem_pruning_record* record) { tandem::init(record); }
void tandem_pruning_init(tandem_pruning* pruning) { tandem::init(pruning); }

void tandem_head_pattern_init(tandem_head_pattern* pattern) { tandem::init(pattern); }
void tandem_patterns_init(tandem_patterns* patterns) { tandem::init(patterns); }
void tandem_pattern_file_options_init(tandem_pattern_file_options* options) { tandem::init(options); }

void tandem_attend_tensors_args_init(tandem_attend_tensors_args* args) { tandem::init(args); }

void tandem_weights_options_init(tandem_weights_options* options) { tandem::init(options); }
void tandem_saved_blob_init(tandem_saved_blob* blob) { tandem::init(blob); }
void tandem_save_options_init(tandem_save_options* options) { tandem::init(options); }
void tandem_load_options_init(tandem_load_options* options) { tandem::init(options); }
