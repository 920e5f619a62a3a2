// SPDX-License-Identifier: MIT
#include "lib/patterns/pattern_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "lib/base/options.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr size_t kMostElements = 4;  // of a list: kind, size, size, score

struct Size {
  const char* name;  // nullptr: the number is ignored
  int64_t tandem_head_pattern::*member;
  int64_t least;
};

struct Kind {
  const char* name;
  uint32_t bit;
  size_t n_sizes;  // required sizes
  Size sizes[2];
};

constexpr Kind kKinds[] = {
    {"vertical_and_slash",
     TANDEM_PATTERN_VERTICAL_SLASH,
     2,
     {{"vertical", &tandem_head_pattern::vertical_tokens, 0}, {"slash", &tandem_head_pattern::slash_tokens, 0}}},
    {"stream_llm",
     TANDEM_PATTERN_A_SHAPE,
     2,
     {{"sinks", &tandem_head_pattern::sink_tokens, 0}, {"window", &tandem_head_pattern::window_tokens, 1}}},
    {"block_sparse", TANDEM_PATTERN_BLOCK_SPARSE, 2, {{"blocks", &tandem_head_pattern::n_blocks, 0}, {}}},
    {"full", TANDEM_PATTERN_FULL, 0, {}},
};

// Text of a value for a message: short and ASCII. It does not descend into the value, as a hostile file may nest deeper than
// the stack.
std::string shown(const Json& value) {
  constexpr size_t kMostShown = 40;
  if (value.is_structured()) return value.is_array() ? "[...]" : "{...}";
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= kMostShown ? text : text.substr(0, kMostShown) + "...";
}

Status refuse(const std::string& why) { return fail_with(kInvalid, 0, "path", why); }

Status read_size(const Json& value, const Size& size, tandem_head_pattern* head) {
  if (size.name == nullptr) return value.is_number() ? Status() : refuse(shown(value) + " is not a number");
  const bool is_known = value.is_number_integer() && value >= size.least && value <= INT32_MAX;
  if (is_known) head->*size.member = value.get<int64_t>();
  return is_known ? Status()
                  : refuse(std::string(size.name) + " = " + shown(value) + " is not a whole number from " +
                           std::to_string(size.least) + " to " + std::to_string(INT32_MAX));
}

// [kind, size, size, score]
Status add_pattern(const Json& list, tandem_head_pattern* head) {
  if (!list.is_array() || list.empty() || !list[0].is_string())
    return refuse(shown(list) + " is not a list of a kind and its sizes");
  const auto kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) { return list[0] == k.name; });
  if (kind == std::end(kKinds)) return refuse("kind " + shown(list[0]) + " is unknown");
  const std::string name = kind->name;
  if (list.size() < 1 + kind->n_sizes || list.size() > kMostElements)
    return refuse("a list of " + name + " has " + std::to_string(list.size()) + " elements, not from " +
                  std::to_string(1 + kind->n_sizes) + " to " + std::to_string(kMostElements));
  if ((head->kinds & kind->bit) != 0) return refuse(name + " is there twice");
  head->kinds |= kind->bit;
  for (size_t i = 1; i < list.size(); ++i)
    TANDEM_TRY(read_size(list[i], i <= std::size(kind->sizes) ? kind->sizes[i - 1] : Size{}, head).in(name.c_str()));
  return {};
}

// One list, or several lists whose patterns are united.
Status read_head(const Json& value, tandem_head_pattern* head) {
  if (!value.is_array() || value.empty() || !value[0].is_array()) return add_pattern(value, head);
  for (const Json& list : value) TANDEM_TRY(add_pattern(list, head));
  return {};
}

Status read_layer(const Json& layer, std::vector<tandem_head_pattern>* heads) {
  if (!layer.is_object()) return refuse(shown(layer) + " is not an object of heads");
  if (layer.empty()) return refuse("there are no heads");
  for (size_t h = 0; h < layer.size(); ++h) {
    const std::string name = std::to_string(h);
    const auto head = layer.find(name);
    if (head == layer.end())
      return refuse("head " + name + " is missing: the layer has " + std::to_string(layer.size()) + " members");
    heads->push_back(AbiStruct<tandem_head_pattern>::defaults());
    TANDEM_TRY(read_head(*head, &heads->back()).in(("head " + name).c_str()));
  }
  return {};
}

struct TooMany {};  // thrown out of the parser

// Finds names that occur twice in an object while the parser reads: afterwards only the last of them is left. Also limits
// the members of a list or an object, as the parser's time grows with the square of their number. Published models have less
// than 200 layers and 200 heads.
class NamesSeen {
 public:
  static constexpr int64_t kMostMembers = 4096;

  void note(int depth, Json::parse_event_t event, const Json& value) {
    const bool begins = event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (begins || event == Json::parse_event_t::value) {
      const auto level = static_cast<size_t>(depth);
      if (n_members_.size() < level + 2) n_members_.resize(level + 2);
      if (++n_members_[level] > kMostMembers) throw TooMany();
      if (begins) n_members_[level + 1] = 0;
    }
    if (event == Json::parse_event_t::object_start) names_.clear();
    if (event == Json::parse_event_t::key && !names_.insert(value.get<std::string>()).second && twice_.ok()) {
      const std::string where = depth > 1 ? "layer " + std::to_string(n_members_[1] - 1) + ": " : "";
      twice_ = refuse(where + shown(value) + " is there twice");
    }
  }
  Status take() { return std::move(twice_); }

 private:
  std::vector<int64_t> n_members_;  // members so far of the innermost list or object at each depth
  std::set<std::string> names_;     // of the present object
  Status twice_;
};

Status parse_json(const std::string& text, Json* json) {
  NamesSeen names;
  try {
    *json = Json::parse(text, [&](int depth, Json::parse_event_t event, const Json& value) {
      names.note(depth, event, value);
      return true;
    });
  } catch (const Json::parse_error& error) {
    const auto at = static_cast<std::ptrdiff_t>(std::clamp<size_t>(error.byte, 1, text.size() + 1) - 1);
    const auto line_start = std::find(std::make_reverse_iterator(text.begin() + at), text.rend(), '\n').base();
    return refuse("line " + std::to_string(1 + std::count(text.begin(), text.begin() + at, '\n')) + ", column " +
                  std::to_string(1 + (text.begin() + at - line_start)) + ": this is not JSON");
  } catch (const TooMany&) {
    return refuse("a list or an object has more than " + std::to_string(NamesSeen::kMostMembers) + " members");
  } catch (const Json::exception&) {
    return refuse("a number is out of the range of floating point");
  }
  return names.take();
}

}  // namespace

Status parse_pattern_json(const std::string& text, std::vector<tandem_head_pattern>* heads, int64_t* n_layers) {
  Json layers;
  TANDEM_TRY(parse_json(text, &layers));
  if (!layers.is_array()) return refuse(shown(layers) + " is not a list of layers");
  if (layers.empty()) return refuse("there are no layers");
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::string where = "layer " + std::to_string(l);
    TANDEM_TRY(read_layer(layers[l], heads).in(where.c_str()));
    if (layers[l].size() != layers[0].size())
      return refuse(where + " has " + std::to_string(layers[l].size()) + " heads, but layer 0 has " +
                    std::to_string(layers[0].size()));
  }
  *n_layers = static_cast<int64_t>(layers.size());
  return {};
}

}  // namespace tandem
