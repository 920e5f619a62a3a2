// SPDX-License-Identifier: MIT
#include "tools/patterns/profile_pattern.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "tools/patterns/pattern_heads.h"

namespace tools {
namespace {

using Size = int64_t tandem_head_pattern::*;

// Kind i is bit i of kinds and has the name of kPatternLetters[i].
constexpr int kKinds = kLetters - 1;
struct KindSizes {
  int n_sizes;
  Size sizes[2];
  int64_t least[2];
};
constexpr KindSizes kSizes[kKinds] = {
    {0, {nullptr, nullptr}, {0, 0}},
    {2, {&tandem_head_pattern::sink_tokens, &tandem_head_pattern::window_tokens}, {0, 1}},
    {2, {&tandem_head_pattern::vertical_tokens, &tandem_head_pattern::slash_tokens}, {0, 0}},
    {1, {&tandem_head_pattern::n_blocks, nullptr}, {0, 0}},
};

bool parse_sizes(const std::string& text, int kind, tandem_head_pattern* pattern) {
  const char* at = text.data();
  const char* end = at + text.size();
  const KindSizes& of_kind = kSizes[kind];
  for (int i = 0; i < of_kind.n_sizes; ++i) {
    if (i > 0 && (at == end || *at++ != '/')) return false;
    int32_t size = 0;
    const auto [stop, error] = std::from_chars(at, end, size);
    if (error != std::errc() || size < of_kind.least[i]) return false;
    pattern->*of_kind.sizes[i] = size;
    at = stop;
  }
  return at == end;
}

// Parses one pattern, such as "a_shape=100/800".
bool parse_kind(const std::string& text, tandem_head_pattern* pattern) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals), sizes = equals == text.npos ? "" : text.substr(equals + 1);
  for (int kind = 0; kind < kKinds; ++kind) {
    if (name != kPatternLetters[kind].name || (pattern->kinds & 1u << kind) != 0) continue;
    if ((equals == text.npos) != (kSizes[kind].n_sizes == 0)) return false;
    pattern->kinds |= 1u << kind;
    return parse_sizes(sizes, kind, pattern);
  }
  return false;
}

}  // namespace

bool parse_pattern(const std::string& words, tandem_head_pattern* pattern) {
  tandem_head_pattern parsed = TANDEM_HEAD_PATTERN_INIT;
  for (size_t begin = 0; begin <= words.size();) {
    const size_t end = std::min(words.find('+', begin), words.size());
    if (!parse_kind(words.substr(begin, end - begin), &parsed)) return false;
    begin = end + 1;
  }
  *pattern = parsed;
  return true;
}

std::string profile_name(const tandem_head_pattern& pattern) {
  const uint32_t kinds = pattern.kinds == 0 ? TANDEM_PATTERN_FULL : pattern.kinds;
  std::string name;
  for (int kind = 0; kind < kKinds; ++kind) {
    if ((kinds & 1u << kind) == 0) continue;
    if (!name.empty()) name += " + ";
    name += kPatternLetters[kind].name;
    for (int i = 0; i < kSizes[kind].n_sizes; ++i)
      name += text("%c%lld", i == 0 ? ' ' : '/', static_cast<long long>(pattern.*kSizes[kind].sizes[i]));
  }
  return name;
}

void add_distinct(std::vector<tandem_head_pattern>* patterns, tandem_head_pattern pattern) {
  if (pattern.kinds == 0) pattern.kinds = TANDEM_PATTERN_FULL;
  const std::string name = profile_name(pattern);
  const auto is_there = [&](const tandem_head_pattern& other) { return profile_name(other) == name; };
  if (std::none_of(patterns->begin(), patterns->end(), is_there)) patterns->push_back(pattern);
}

}  // namespace tools
