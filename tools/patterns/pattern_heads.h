// SPDX-License-Identifier: MIT
// The heads of a file of head patterns, and the name of a head's pattern.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/result.h"

namespace tools {

struct PatternHeads {
  std::vector<tandem_head_pattern> heads;  // layer by layer
  int64_t n_layers = 0;
  int64_t n_heads = 0;  // heads of a layer

  const tandem_head_pattern& at(int64_t layer, int64_t head) const {
    return heads[static_cast<size_t>(layer * n_heads + head)];
  }
};

struct PatternLetter {
  char letter;
  const char* name;   // in JSON
  const char* words;  // for people
  const char* color;  // in the picture
};
// F, A, V, B, and U for heads with several patterns.
inline constexpr int kLetters = 5;
extern const PatternLetter kPatternLetters[kLetters];

Result read_heads(const std::string& path, const tandem_pattern_file_options& options, PatternHeads* heads);

// The model of the file that --patterns names.
struct HeadCounts {
  int64_t n_layers = 0;  // 0: any
  int64_t n_q_heads = 0, n_kv_heads = 0;
};
// Reads the heads of a file. Gates in the file are those of KV heads. Refuses a file of a model with other counts, naming
// both.
Result read_model_heads(const std::string& path, const HeadCounts& model, PatternHeads* heads);

// Returns an index of kPatternLetters.
int letter_of(const tandem_head_pattern& head);

// Returns the name of a head's pattern: "V 1000/6096", "F", "A 4/1020 + B 100".
std::string pattern_name(const tandem_head_pattern& head);

}  // namespace tools
