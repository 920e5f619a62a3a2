// SPDX-License-Identifier: MIT
// The command line of `tandem patterns profile`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/engine_flags.h"
#include "tools/common/result.h"

namespace tools {

// One layer and the settings of its measurement.
struct ProfileLayer {
  int64_t n_q_heads = 32, n_kv_heads = 8, head_dim = 128;
  int32_t kv_type = TANDEM_BF16;
  int32_t io_type = TANDEM_BF16;  // type of q, k, v and o
  int64_t chunk = 8192;           // queries of a call
  int64_t repeats = 3;
  EngineFlags engine;  // with a backend, calls use tensors in its device's memory

  bool on_device() const { return !engine.backend.empty(); }
};

struct ProfileOptions {
  Asked asked = Asked::kNothing;
  bool json = false, append = false;
  ProfileLayer layer;
  std::string heads_path;                     // a file of head patterns
  std::vector<tandem_head_pattern> patterns;  // from --pattern
  std::vector<int64_t> lengths = {8192, 32768, 131072};
  std::string out, svg;
  std::string from;         // a profile to read; nothing is measured
  std::vector<int64_t> at;  // lengths to interpolate for
};

// argv[0] is "profile".
Result parse_profile_options(int argc, const char* const* argv, ProfileOptions* options);
std::string profile_help();

}  // namespace tools
