// SPDX-License-Identifier: MIT
#include "tools/patterns/pattern_show.h"

#include <algorithm>
#include <array>
#include <map>

#include "tools/common/text_table.h"

namespace tools {
namespace {

// Counts of the patterns in some layers.
struct Counts {
  std::array<int64_t, kLetters> letters = {};
  std::map<std::string, int64_t> names;

  Counts(const PatternHeads& heads, int64_t first_layer, int64_t end_layer) {
    for (int64_t layer = first_layer; layer < end_layer; ++layer)
      for (int64_t head = 0; head < heads.n_heads; ++head) {
        ++letters[static_cast<size_t>(letter_of(heads.at(layer, head)))];
        ++names[pattern_name(heads.at(layer, head))];
      }
  }

  // Lists the most frequent first: "20 V 1000/6096, 12 A 4/1020".
  std::string text() const {
    std::vector<std::pair<int64_t, std::string>> sorted;
    for (const auto& [name, count] : names) sorted.emplace_back(-count, name);
    std::sort(sorted.begin(), sorted.end());
    std::string out;
    for (const auto& [count, name] : sorted) out += (out.empty() ? "" : ", ") + std::to_string(-count) + " " + name;
    return out;
  }
};

std::vector<std::string> table_row(const std::string& name, const Counts& counts, const Counts& all) {
  std::vector<std::string> row = {name};
  for (size_t i = 0; i < kLetters; ++i)
    if (all.letters[i] > 0) row.push_back(std::to_string(counts.letters[i]));
  row.push_back(counts.text());
  return row;
}

std::string picture(const PatternHeads& heads) {
  const size_t width = std::max<size_t>(5, std::to_string(heads.n_layers - 1).size());  // at least the width of "layer"
  std::string out;
  for (int64_t layer = 0; layer < heads.n_layers; ++layer) {
    const std::string number = std::to_string(layer);
    out += std::string(width - number.size(), ' ') + number + "  ";
    for (int64_t head = 0; head < heads.n_heads; ++head) out += kPatternLetters[letter_of(heads.at(layer, head))].letter;
    out += "\n";
  }
  return out;
}

}  // namespace

Json head_json(const tandem_head_pattern& head) {
  Json json;
  json["kinds"] = Json::array();
  for (int i = 0; i < kLetters - 1; ++i)
    if ((head.kinds & 1u << i) != 0) json["kinds"].push_back(kPatternLetters[i].name);
  const std::pair<const char*, int64_t> kSizes[] = {{"sink_tokens", head.sink_tokens},
                                                    {"window_tokens", head.window_tokens},
                                                    {"vertical_tokens", head.vertical_tokens},
                                                    {"slash_tokens", head.slash_tokens},
                                                    {"n_blocks", head.n_blocks}};
  const uint32_t of_kind[] = {TANDEM_PATTERN_A_SHAPE, TANDEM_PATTERN_A_SHAPE, TANDEM_PATTERN_VERTICAL_SLASH,
                              TANDEM_PATTERN_VERTICAL_SLASH, TANDEM_PATTERN_BLOCK_SPARSE};
  for (size_t i = 0; i < std::size(kSizes); ++i)
    if ((head.kinds & of_kind[i]) != 0) json[kSizes[i].first] = kSizes[i].second;
  return json;
}

std::string patterns_text(const PatternHeads& heads) {
  const Counts all(heads, 0, heads.n_layers);
  std::string out = text("head patterns: %lld layers of %lld heads\n\n", static_cast<long long>(heads.n_layers),
                         static_cast<long long>(heads.n_heads));
  TextTable table;
  table.header = {"layer"};
  for (size_t i = 0; i < kLetters; ++i)
    if (all.letters[i] > 0) table.header.emplace_back(kPatternLetters[i].words);
  table.right_aligned.assign(table.header.size(), true);
  table.header.emplace_back("heads and their sizes");
  table.right_aligned.push_back(false);
  for (int64_t layer = 0; layer < heads.n_layers; ++layer)
    table.rows.push_back(table_row(std::to_string(layer), Counts(heads, layer, layer + 1), all));
  table.rows.push_back(table_row("all", all, all));
  out += table.markdown() +
         "\nSizes: A sinks/window, V vertical/slash tokens, B blocks of 64 tokens; + unites.\n"
         "One letter a head, layers down:";
  for (size_t i = 0; i < kLetters; ++i)
    if (all.letters[i] > 0) out += text(" %c %s;", kPatternLetters[i].letter, kPatternLetters[i].words);
  out.back() = '.';
  return out + "\n\n" + picture(heads);
}

Json patterns_json(const PatternHeads& heads) {
  const Counts all(heads, 0, heads.n_layers);
  Json json;
  json["n_layers"] = heads.n_layers;
  json["n_heads"] = heads.n_heads;
  for (size_t i = 0; i < kLetters; ++i) json["counts"][kPatternLetters[i].name] = all.letters[i];
  json["layers"] = Json::array();
  for (int64_t layer = 0; layer < heads.n_layers; ++layer) {
    json["layers"].push_back(Json::array());
    for (int64_t head = 0; head < heads.n_heads; ++head) json["layers"].back().push_back(head_json(heads.at(layer, head)));
  }
  return json;
}

std::string patterns_svg(const PatternHeads& heads) {
  constexpr int64_t kCell = 12, kLeft = 40, kTop = 28;
  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  const int64_t width = std::max<int64_t>(kLeft + kCell * heads.n_heads + kCell, 520);
  std::string out = text(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %lld %lld\" font-family=\"sans-serif\" font-size=\"10\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      number(width), number(kTop + kCell * heads.n_layers + kCell));
  for (int i = 0; i < kLetters; ++i) {
    const int x = static_cast<int>(kLeft) + 96 * i;
    out += text("<rect x=\"%d\" y=\"8\" width=\"10\" height=\"10\" fill=\"%s\"/><text x=\"%d\" y=\"17\">%s</text>\n", x,
                kPatternLetters[i].color, x + 14, kPatternLetters[i].words);
  }
  for (int64_t layer = 0; layer < heads.n_layers; ++layer) {
    const int64_t y = kTop + kCell * layer;
    out += text("<text x=\"%lld\" y=\"%lld\" text-anchor=\"end\">%lld</text>\n", number(kLeft - 6), number(y + 9),
                number(layer));
    for (int64_t head = 0; head < heads.n_heads; ++head) {
      const tandem_head_pattern& one = heads.at(layer, head);
      out += text(
          "<rect x=\"%lld\" y=\"%lld\" width=\"10\" height=\"10\" fill=\"%s\"><title>layer %lld, head %lld: "
          "%s</title></rect>\n",
          number(kLeft + kCell * head), number(y), kPatternLetters[letter_of(one)].color, number(layer), number(head),
          pattern_name(one).c_str());
    }
  }
  return out + "</svg>\n";
}

}  // namespace tools
