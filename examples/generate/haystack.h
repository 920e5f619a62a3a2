// SPDX-License-Identifier: MIT
// A text with facts hidden in it, and the questions about them, worded as pico was taught (examples/models/pico/README.md).
#ifndef EXAMPLES_GENERATE_HAYSTACK_H_
#define EXAMPLES_GENERATE_HAYSTACK_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace generate {

struct Fact {
  std::string name;       // "pass key", "amber"
  std::string value;      // its digits
  std::string statement;  // the planted line
  std::string question;   // ends where the answer begins
  int64_t position = 0;   // of the statement in the finished text
};

Fact pass_key_fact(std::mt19937_64* random);
Fact number_fact(const std::string& name, std::mt19937_64* random);
// n different names for number_fact(), at most 24.
std::vector<std::string> fact_names(int64_t n, std::mt19937_64* random);

// n_bytes of text: the source once, then its paragraphs over and over, each time in another order.
std::string long_text(const std::string& source, int64_t n_bytes, uint64_t seed);

// The last line break of the text before `place`, where a fact can go without cutting a line.
int64_t line_end_before(const std::string& text, int64_t place);

// Hides the facts at equal distances, the first after 1/(2n) of the text; the text is cut to n_bytes with them in it.
std::string hide_facts(const std::string& text, int64_t n_bytes, std::vector<Fact>* facts);

// The answer begins with the value and nothing is added to the number.
bool is_right(const Fact& fact, const std::string& answer);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_HAYSTACK_H_
