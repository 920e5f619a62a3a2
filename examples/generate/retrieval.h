// SPDX-License-Identifier: MIT
// Compares several policies on the same context.
//
// An append attends every key under both "all" and "hgca", so both have the same keys and values of a prefilled text. One
// prefill therefore serves all policies. A dense session prefills the common part once, which is then forked. Only the last
// kTailTokens are appended once per policy, to give its moving averages their queries: 64 are enough, as (1 - 0.3)^64 is
// 1e-10.
//
//   dense session    |== text ==================|
//   policy A                         fork       |-- tail --|  question, answer, ...
//   policy B                         fork       |-- tail --|  question, answer, ...
#ifndef EXAMPLES_GENERATE_RETRIEVAL_H_
#define EXAMPLES_GENERATE_RETRIEVAL_H_

#include <string>
#include <vector>

#include "generation.h"
#include "haystack.h"
#include "runtime.h"

namespace generate {

constexpr int64_t kTailTokens = 512;

// One policy and its results so far.
struct Contestant {
  PolicyOptions policy;
  Session session;
  Context context;  // after the text
  int64_t n_right = 0, n_asked = 0;
  Work decode;      // all its decode steps
  Work scored;      // its steps over known text
  double bits = 0;  // bits of the known text
  double bits_per_byte() const { return scored.n_tokens ? bits / static_cast<double>(scored.n_tokens) : 0; }
};

// Splits "all,hgca" into a list.
std::vector<std::string> split_names(const std::string& names);

// Makes one contestant per name in "all,hgca", with the settings of `common`.
Failure make_contestants(Runtime* runtime, const std::string& names, const PolicyOptions& common,
                         std::vector<Contestant>* contestants);

// Forks the prefilled context and appends the tail to the fork.
Failure enter(Runtime* runtime, const Context& prefilled, std::string_view tail, Contestant* contestant);

// Decodes text[first, first + n) after contestant->context, and scores the byte after each.
Failure score_known(Runtime* runtime, std::string_view text, int64_t first, int64_t n, Contestant* contestant);

// Asks in a fork, which is then dropped, or kept in *kept. *answer: five digits and the text after them.
Failure ask(Runtime* runtime, const Fact& fact, Contestant* contestant, std::string* answer, Context* kept = nullptr);

// Returns "73194.": the answer up to the end of its line, for a table.
std::string shown(const std::string& answer);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_RETRIEVAL_H_
