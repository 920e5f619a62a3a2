// SPDX-License-Identifier: MIT
#include "haystack.h"

#include <algorithm>
#include <cctype>

namespace generate {
namespace {

std::string random_digits(std::mt19937_64* random) {
  std::string out;
  for (int i = 0; i < 5; ++i) out.push_back(static_cast<char>('0' + (*random)() % 10));
  return out;
}

// Replaces std::shuffle, whose order differs between standard libraries.
template <typename Item>
void shuffle(std::vector<Item>* items, std::mt19937_64* random) {
  for (size_t i = items->size(); i > 1; --i) std::swap((*items)[i - 1], (*items)[(*random)() % i]);
}

}  // namespace

Fact pass_key_fact(std::mt19937_64* random) {
  const std::string key = random_digits(random);
  return {"pass key", key, "\nThe pass key is " + key + ". Remember it. " + key + " is the pass key.\n",
          "\nWhat is the pass key? The pass key is "};
}

Fact number_fact(const std::string& name, std::mt19937_64* random) {
  const std::string number = random_digits(random);
  return {name, number, "\nThe number of " + name + " is " + number + ".\n", "\nWhat is the number of " + name + "? It is "};
}

std::vector<std::string> fact_names(int64_t n, std::mt19937_64* random) {
  std::vector<std::string> names = {"amber",  "canyon", "falcon", "garden",  "harbor", "island",  "jasmine", "kettle",
                                    "lemon",  "magnet", "nectar", "orchid",  "pebble", "quartz",  "rabbit",  "saddle",
                                    "temple", "velvet", "walnut", "thunder", "copper", "dolphin", "marble",  "winter"};
  shuffle(&names, random);
  names.resize(std::min(names.size(), static_cast<size_t>(n)));
  return names;
}

std::string long_text(const std::string& source, int64_t n_bytes, uint64_t seed) {
  std::string out = source;
  std::vector<std::string> paragraphs;
  for (size_t first = 0; first < source.size();) {
    const size_t blank = source.find("\n\n", first), end = blank == std::string::npos ? source.size() : blank + 2;
    paragraphs.push_back(source.substr(first, end - first));
    first = end;
  }
  std::mt19937_64 random(seed);
  while (static_cast<int64_t>(out.size()) < n_bytes) {
    shuffle(&paragraphs, &random);
    for (const std::string& paragraph : paragraphs) out += "\n" + paragraph;
  }
  out.resize(n_bytes);
  return out;
}

int64_t line_end_before(const std::string& text, int64_t place) {
  const size_t found = text.rfind('\n', static_cast<size_t>(place));
  return found == std::string::npos ? 0 : static_cast<int64_t>(found);
}

std::string hide_facts(const std::string& text, int64_t n_bytes, std::vector<Fact>* facts) {
  const int64_t n = static_cast<int64_t>(facts->size());
  std::string out;
  int64_t taken = 0;  // bytes of text used so far
  for (int64_t i = 0; i < n; ++i) {
    Fact& fact = (*facts)[i];
    const int64_t place =
        std::max(taken, line_end_before(text, n_bytes * (2 * i + 1) / (2 * n) - static_cast<int64_t>(out.size()) + taken));
    out.append(text, taken, place - taken);
    taken = place;
    fact.position = static_cast<int64_t>(out.size());
    out += fact.statement;
  }
  out.append(text, taken);
  out.resize(n_bytes);
  return out;
}

bool is_right(const Fact& fact, const std::string& answer) {
  const size_t n = fact.value.size();
  return answer.compare(0, n, fact.value) == 0 &&
         (answer.size() == n || !std::isdigit(static_cast<unsigned char>(answer[n])));
}

}  // namespace generate
