// SPDX-License-Identifier: MIT
// The options of tandem-plan and of tandem-info --plan: a model, its cache, a session and its calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/engine_flags.h"
#include "tools/patterns/pattern_heads.h"

namespace tools {

struct PlanOptions {
  // The model: a folder with a config.json, or the flags below.
  std::string model_dir;
  int64_t n_layers = 32;
  int64_t n_q_heads = 32;
  int64_t n_kv_heads = 8;
  int64_t head_dim = 128;
  int64_t v_head_dim = 0;  // 0: head_dim
  bool v_aliases_k = false;
  int64_t hidden_dim = 0;  // 0: n_q_heads * head_dim
  // The cache.
  int32_t kv_type = 0;      // 0: bf16
  int32_t v_type = 0;       // 0: kv_type
  int32_t x_type = 0;       // of hidden states; 0: none are kept
  int64_t page_tokens = 0;  // 0: the library's default
  double host_cap_gib = 0;  // 0: no cap
  double device_cap_gib = 0;
  // The session.
  int32_t policy = 0;         // index of tandem_policy_name()
  std::string pruning;        // a preset for policy "hip"; empty: the library's default
  std::string patterns_path;  // a file of head patterns, for policy "patterns"
  PatternHeads heads;         // the heads of that file
  int64_t window = -1;        // -1: the library's default
  int64_t sinks = -1;
  int32_t route = -1;  // -1: the library's default
  double stream_share = -1;
  double recompute_share = 0;
  // Its calls.
  std::vector<int64_t> kv_lens;  // one plan for each
  int64_t batch = 1;             // sequences of that length
  int64_t q_len = 1;             // new tokens of each

  bool prunes() const;
  bool follows_patterns() const;
  const char* route_name() const;  // NULL: the library's default
  void declare(std::vector<Flag>* flags);
  // given: the flags of the command line. Sets the defaults that depend on other flags, and reads the config.json and the
  // file of head patterns.
  Result check(const std::vector<std::string>& given, const EngineFlags& engine);

 private:
  Result check_policy(const std::vector<std::string>& given, const EngineFlags& engine) const;
};

}  // namespace tools
