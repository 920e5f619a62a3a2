// SPDX-License-Identifier: MIT
// The options of tandem-bench.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/bench/bench_patterns.h"
#include "tools/common/flags.h"
#include "tools/common/result.h"

namespace tools {

enum class Mode : int32_t { kDecode, kAppend, kPrefill, kWake };
enum class Output : int32_t { kMarkdown, kCsv, kJson };

struct BenchOptions {
  Mode mode = Mode::kDecode;
  std::string mode_name;
  Asked asked = Asked::kNothing;
  int64_t n_q_heads = 32;
  int64_t n_kv_heads = 8;
  int64_t head_dim = 128;
  int64_t v_head_dim = 0;  // 0: head_dim
  bool v_aliases_k = false;
  double rope_theta = 0;          // theta of the library's RoPE; 0: the caller rotates
  std::vector<int64_t> kv_lens;   // keys that the last query sees, its own included; empty: the mode's default
  int64_t q_len = 0;              // 0: the mode's default
  std::vector<int32_t> kv_types;  // empty: bf16
  int32_t v_type = 0;             // for all kv_types; 0: the type of the keys
  int32_t k_rotation = TANDEM_ROTATION_DEFAULT;
  int64_t page_tokens = 128;
  int32_t io_type = 0;  // type of q, k, v, o; 0: bf16
  int64_t batch = 1;
  bool ragged = false;   // kv_lens are means
  int64_t n_layers = 0;  // 0: enough layers for cold reads
  std::string policy = "all";
  BenchPatterns patterns;  // for policy "patterns"
  int64_t window = 4096;
  int64_t sinks = 64;
  double alpha = 0.3;
  double beta = 1;
  int64_t threads = 0;  // 0: the engine decides
  int64_t repeats = 30;
  bool interleave = false;
  int64_t probe_mib = 0;  // 0: enough for reads from memory
  std::string isa;        // empty: the best
  Output output = Output::kMarkdown;

  int32_t v_type_beside(int32_t kv_type) const { return v_type == 0 ? kv_type : v_type; }
  int32_t k_rotation_of(int32_t kv_type) const;  // the library's default, unless given
};

Result parse_bench_options(int argc, const char* const* argv, BenchOptions* options);
std::string bench_help();

}  // namespace tools
