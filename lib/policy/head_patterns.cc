// SPDX-License-Identifier: MIT
#include "lib/policy/head_patterns.h"

#include <algorithm>
#include <string>

#include "lib/base/options.h"

namespace tandem {
namespace {

struct Size {
  const char* name;
  int64_t value;
  uint32_t kind;  // the pattern that uses the size
  int64_t least;
};

// name: the head's name, "patterns.heads[7]".
Status take_head(const tandem_head_pattern& from, uint32_t known_kinds, const std::string& name, HeadPattern* to) {
  const auto refuse = [&](const char* member, int64_t value, const char* why) {
    const std::string field = name + "." + member;
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = %lld %s", field.c_str(), static_cast<long long>(value),
                why);
  };
  if ((from.kinds & ~known_kinds) != 0) return refuse("kinds", from.kinds, "has bits that are no TANDEM_PATTERN_*");
  const Size sizes[] = {{"sink_tokens", from.sink_tokens, TANDEM_PATTERN_A_SHAPE, 0},
                        {"window_tokens", from.window_tokens, TANDEM_PATTERN_A_SHAPE, 1},
                        {"vertical_tokens", from.vertical_tokens, TANDEM_PATTERN_VERTICAL_SLASH, 0},
                        {"slash_tokens", from.slash_tokens, TANDEM_PATTERN_VERTICAL_SLASH, 0},
                        {"n_blocks", from.n_blocks, TANDEM_PATTERN_BLOCK_SPARSE, 0}};
  for (const Size& size : sizes) {
    const bool is_used = (from.kinds & size.kind) != 0;
    if (!is_used && size.value != 0) return refuse(size.name, size.value, "and the head has no pattern with that size");
    if (is_used && (size.value < size.least || size.value > INT32_MAX))
      return refuse(size.name, size.value, size.least == 1 ? "is not from 1 to 2^31 - 1" : "is not from 0 to 2^31 - 1");
  }
  const bool is_full = from.kinds == 0 || (from.kinds & TANDEM_PATTERN_FULL) != 0;
  *to = {is_full ? TANDEM_PATTERN_FULL : from.kinds,
         from.sink_tokens,
         from.window_tokens,
         from.vertical_tokens,
         from.slash_tokens,
         from.n_blocks};
  return {};
}

// Sets max_distance in layers that follow patterns. It stays 0 in other layers.
Status take_max_distance(int64_t max_distance, const std::vector<bool>& follows, const std::vector<Layer>& layers,
                         Patterns* patterns) {
  if (max_distance < 0 || max_distance > INT32_MAX)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "patterns.max_distance",
                "patterns.max_distance = %lld is not from 0 to 2^31 - 1", static_cast<long long>(max_distance));
  if (max_distance == 0) return {};
  int64_t first_head = 0;
  for (size_t l = 0; l < layers.size(); first_head += layers[l].n_q_heads, ++l) {
    if (!follows[l]) continue;
    if (layers[l].rope == nullptr)
      return fail(TANDEM_ERROR_UNSUPPORTED, "patterns.max_distance",
                  "patterns.max_distance = %lld: the keys of layer %zu were rotated by the caller and carry their position",
                  static_cast<long long>(max_distance), l);
    PatternsOfLayer& of = (*patterns)[l];
    of.max_distance = max_distance;
    const auto other = std::find_if(of.heads.begin(), of.heads.end(),
                                    [](const HeadPattern& head) { return head.kinds != TANDEM_PATTERN_A_SHAPE; });
    if (other == of.heads.end()) continue;
    const std::string field = element_name("patterns.heads", first_head + (other - of.heads.begin())) + ".kinds";
    return fail(TANDEM_ERROR_UNSUPPORTED, field.c_str(), "%s = %u with max_distance = %lld, which is for A_SHAPE alone",
                field.c_str(), other->kinds, static_cast<long long>(max_distance));
  }
  return {};
}

DecodeKeys keys_of_group(const HeadPattern* heads, int32_t group_size) {
  DecodeKeys keys;
  keys.are_all =
      !std::all_of(heads, heads + group_size, [](const HeadPattern& head) { return head.kinds == TANDEM_PATTERN_A_SHAPE; });
  for (int32_t g = 0; g < group_size && !keys.are_all; ++g) {
    keys.sink_len = std::max(keys.sink_len, heads[g].sink_len);
    keys.window_len = std::max(keys.window_len, heads[g].window_len);
  }
  return keys;
}

}  // namespace

int64_t PatternsOfLayer::most_sink_units() const {
  int64_t most = 0;
  for (const HeadPattern& head : heads) most = std::max(most, pattern_units(head.sink_len));
  return most;
}

bool PatternsOfLayer::are_known_ahead() const {
  return std::all_of(heads.begin(), heads.end(), [](const HeadPattern& head) { return head.is_known_ahead(); });
}

bool PatternsOfLayer::narrows_decode() const {
  return std::any_of(decode.begin(), decode.end(), [](const DecodeKeys& head) { return !head.are_all; });
}

Status resolve_patterns(const tandem_session_options& options, uint32_t known_kinds, const std::vector<bool>& follows,
                        const std::vector<Layer>& layers, Patterns* patterns) {
  *patterns = {};
  const bool any = std::find(follows.begin(), follows.end(), true) != follows.end();
  if (any != (options.patterns != nullptr))
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "patterns",
                any ? "patterns = NULL, and a layer has the policy that follows them"
                    : "patterns are given, and no layer has a policy that follows them");
  if (!any) return {};
  tandem_patterns given;
  TANDEM_TRY(copy_in(options.patterns, "patterns.", &given));
  TANDEM_TRY(check_reserved("patterns.reserved", given.reserved));
  int64_t n_heads = 0;
  for (const Layer& layer : layers) n_heads += layer.n_q_heads;
  if (given.n_heads != n_heads)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "patterns.n_heads", "patterns.n_heads = %lld, the model has %lld query heads",
                static_cast<long long>(given.n_heads), static_cast<long long>(n_heads));
  if (given.heads == nullptr)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "patterns.heads", "patterns.heads = NULL with n_heads = %lld",
                static_cast<long long>(n_heads));
  std::vector<tandem_head_pattern> heads;
  TANDEM_TRY(copy_array_in(given.heads, "patterns.heads", n_heads, &heads));
  Patterns made(layers.size());
  size_t at = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    for (int32_t h = 0; h < layers[l].n_q_heads; ++h, ++at)
      TANDEM_TRY(take_head(heads[at], known_kinds, element_name("patterns.heads", static_cast<int64_t>(at)),
                           &made[l].heads.emplace_back()));
    const int32_t group = layers[l].group_size;
    const auto is_like_first = [&](const HeadPattern& head) {
      const auto h = &head - made[l].heads.data();
      return head.is_known_ahead() && head == made[l].heads[static_cast<size_t>(h / group * group)];
    };
    for (const HeadPattern& head : made[l].heads) made[l].kinds |= head.kinds;
    made[l].groups_are_alike = std::all_of(made[l].heads.begin(), made[l].heads.end(), is_like_first);
    for (int32_t h = 0; h < layers[l].n_kv_heads; ++h)
      made[l].decode.push_back(keys_of_group(made[l].heads.data() + int64_t{h} * group, group));
  }
  TANDEM_TRY(take_max_distance(given.max_distance, follows, layers, &made));
  *patterns = std::move(made);
  return {};
}

}  // namespace tandem
