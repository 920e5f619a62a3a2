// SPDX-License-Identifier: MIT
// The same context under several policies.
//
// An append attends every key whatever HGCA's settings are, so the keys and values of a prefilled text are the same under
// "all" and "hgca", and one prefill serves them: the common part is prefilled once by a dense session and forked; only its
// last kTailTokens are appended once per policy, which is where that policy's moving averages come from (64 queries are
// enough for them: (1 - 0.3)^64 is 1e-10).
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

// One policy and what it has done so far.
struct Contestant {
  PolicyOptions policy;
  Session session;
  Context context;  // after the text
  int64_t n_right = 0, n_asked = 0;
  Work decode;      // all of its decode steps
  Work scored;      // those over known text
  double bits = 0;  // of the known text
  double bits_per_byte() const { return scored.n_tokens ? bits / static_cast<double>(scored.n_tokens) : 0; }
};

// "all,hgca" as a list.
std::vector<std::string> split_names(const std::string& names);

// One contestant per name in "all,hgca", with the settings of `common`.
Failure make_contestants(Runtime* runtime, const std::string& names, const PolicyOptions& common,
                         std::vector<Contestant>* contestants);

// Forks the prefilled context and appends the tail to the fork.
Failure enter(Runtime* runtime, const Context& prefilled, std::string_view tail, Contestant* contestant);

// Decodes text[first, first + n) after contestant->context, scoring the byte after each.
Failure score_known(Runtime* runtime, std::string_view text, int64_t first, int64_t n, Contestant* contestant);

// Asks in a fork that is dropped afterwards (or kept in *kept). *answer: five digits and what follows.
Failure ask(Runtime* runtime, const Fact& fact, Contestant* contestant, std::string* answer, Context* kept = nullptr);

// "73194.": the answer up to the end of its line, for a table.
std::string shown(const std::string& answer);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_RETRIEVAL_H_
