// SPDX-License-Identifier: MIT
// Entry points: files of head patterns.
#include "lib/abi/api.h"
#include "lib/base/options.h"
#include "lib/patterns/pattern_file.h"

namespace tandem {
namespace {

Status write_heads(const std::vector<tandem_head_pattern>& known, tandem_head_pattern* heads) {
  std::vector<tandem_head_pattern> callers;
  TANDEM_TRY(copy_array_in(heads, "heads", static_cast<int64_t>(known.size()), &callers));
  const uint32_t stride = heads->struct_size;
  for (size_t i = 0; i < known.size(); ++i)
    copy_out(known[i], reinterpret_cast<tandem_head_pattern*>(reinterpret_cast<char*>(heads) + i * stride));
  return {};
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_patterns_read(tandem_head_pattern* heads, int64_t capacity, int64_t* n_heads, int64_t* n_layers,
                             const char* path, const tandem_pattern_file_options* options, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require_range("capacity", capacity, 0, INT64_MAX));
    tandem_head_pattern first;
    TANDEM_TRY(capacity > 0 ? require(heads, "heads") : require_aligned(heads, "heads"));
    if (capacity > 0) TANDEM_TRY(copy_in(heads, "heads[0].", &first));
    TANDEM_TRY(require(n_heads, "n_heads"));
    TANDEM_TRY(require(n_layers, "n_layers"));
    TANDEM_TRY(require(path, "path"));
    tandem_pattern_file_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    TANDEM_TRY(check_pattern_file_options(copy));
    PatternFile file;
    TANDEM_TRY(read_pattern_file(path, copy, &file));
    const auto n_known = static_cast<int64_t>(file.heads.size());
    if (capacity >= n_known) TANDEM_TRY(write_heads(file.heads, heads));
    *n_heads = n_known;
    *n_layers = file.n_layers;
    return {};
  });
}
