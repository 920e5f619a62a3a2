// SPDX-License-Identifier: MIT
#include "tools/patterns/pattern_heads.h"

#include <bit>

namespace tools {

const PatternLetter kPatternLetters[kLetters] = {{'F', "full", "full", "#c0392b"},
                                                 {'A', "a_shape", "A-shape", "#2e86ab"},
                                                 {'V', "vertical_slash", "vertical-slash", "#e9b44c"},
                                                 {'B', "block_sparse", "block-sparse", "#5b8c5a"},
                                                 {'U', "union", "several, united", "#6c5b7b"}};

Result read_heads(const std::string& path, const tandem_pattern_file_options& options, PatternHeads* heads) {
  ErrorSlot error;
  int64_t n_heads = 0;
  const auto read = [&](int64_t capacity) {
    return error.check(tandem_patterns_read(heads->heads.data(), capacity, &n_heads, &heads->n_layers, path.c_str(),
                                            &options, error.out()));
  };
  do {  // until the file keeps its length
    heads->heads.assign(static_cast<size_t>(n_heads), TANDEM_HEAD_PATTERN_INIT);
    TOOL_TRY(read(n_heads));
  } while (n_heads > static_cast<int64_t>(heads->heads.size()));
  heads->heads.resize(static_cast<size_t>(n_heads));
  heads->n_heads = n_heads / heads->n_layers;
  return {};
}

Result read_model_heads(const std::string& path, const HeadCounts& model, PatternHeads* heads) {
  tandem_pattern_file_options options = TANDEM_PATTERN_FILE_OPTIONS_INIT;
  options.group_size = model.n_q_heads / model.n_kv_heads;
  TOOL_TRY(read_heads(path, options, heads));
  const bool has_layers = model.n_layers == 0 || heads->n_layers == model.n_layers;
  if (has_layers && heads->n_heads == model.n_q_heads) return {};
  const auto layers_of = [](int64_t n) { return n == 0 ? "layers" : text("%lld layers", static_cast<long long>(n)); };
  return refuse("--patterns = %s has %s of %lld query heads, the model has %s of %lld", path.c_str(),
                layers_of(heads->n_layers).c_str(), static_cast<long long>(heads->n_heads),
                layers_of(model.n_layers).c_str(), static_cast<long long>(model.n_q_heads));
}

int letter_of(const tandem_head_pattern& head) {
  if (head.kinds == 0) return 0;
  return std::has_single_bit(head.kinds) ? std::countr_zero(head.kinds) : kLetters - 1;
}

std::string pattern_name(const tandem_head_pattern& head) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  std::string name;
  const auto add = [&](const std::string& pattern) { name += (name.empty() ? "" : " + ") + pattern; };
  if (head.kinds == 0 || (head.kinds & TANDEM_PATTERN_FULL) != 0) add("F");
  if ((head.kinds & TANDEM_PATTERN_A_SHAPE) != 0) add("A " + number(head.sink_tokens) + "/" + number(head.window_tokens));
  if ((head.kinds & TANDEM_PATTERN_VERTICAL_SLASH) != 0)
    add("V " + number(head.vertical_tokens) + "/" + number(head.slash_tokens));
  if ((head.kinds & TANDEM_PATTERN_BLOCK_SPARSE) != 0) add("B " + number(head.n_blocks));
  return name;
}

}  // namespace tools
