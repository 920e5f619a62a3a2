// SPDX-License-Identifier: MIT
// A text with hidden facts, and questions about them in the wording that pico was taught (examples/models/pico/README.md).
#ifndef EXAMPLES_GENERATE_HAYSTACK_H_
#define EXAMPLES_GENERATE_HAYSTACK_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace generate {

struct Fact {
  std::string name;       // "pass key", "amber"
  std::string value;      // digits of the answer
  std::string statement;  // the planted line
  std::string question;   // ends where the answer begins
  int64_t position = 0;   // of the statement, in the finished text
};

Fact pass_key_fact(std::mt19937_64* random);
Fact number_fact(const std::string& name, std::mt19937_64* random);
// Returns n different names for number_fact(), at most 24.
std::vector<std::string> fact_names(int64_t n, std::mt19937_64* random);

// Returns n_bytes of text: the source once, then its paragraphs again and again, in a new order each time.
std::string long_text(const std::string& source, int64_t n_bytes, uint64_t seed);

// Returns the last line break before `place`, where a fact can go without splitting a line.
int64_t line_end_before(const std::string& text, int64_t place);

// Hides the facts at equal distances, the first after 1/(2n) of the text. The result, facts included, is cut to n_bytes.
std::string hide_facts(const std::string& text, int64_t n_bytes, std::vector<Fact>* facts);

// Returns whether the answer begins with the value and the number ends there.
bool is_right(const Fact& fact, const std::string& answer);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_HAYSTACK_H_
