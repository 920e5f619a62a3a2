// SPDX-License-Identifier: MIT
// What tandem-info is asked to print.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/result.h"

namespace tools {

struct InfoOptions {
  bool help = false;
  bool json = false;
  bool plan = false;
  int64_t threads = 0;
  std::string isa;
  std::string backend, backend_path;
  // The plan's model: a folder with a config.json, or the flags.
  std::string model_dir;
  int64_t n_layers = 32;
  int64_t n_q_heads = 32;
  int64_t n_kv_heads = 8;
  int64_t head_dim = 128;
  int64_t v_head_dim = 0;  // 0: head_dim
  bool v_aliases_k = false;
  std::vector<int64_t> kv_lens;  // one plan each
  int64_t batch = 1;             // sequences of that length
  int32_t kv_type = 0;           // 0: bf16
  int32_t v_type = 0;            // 0: kv_type
  int64_t page_tokens = 0;       // 0: the library's default
  std::string policy = "all";
  int64_t window = -1;  // -1: the library's default
  int64_t sinks = -1;
  double host_cap_gib = 0;  // 0: none
};

Result parse_info_options(int argc, const char* const* argv, InfoOptions* options);
std::string info_help();

}  // namespace tools
