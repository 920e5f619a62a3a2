// SPDX-License-Identifier: MIT
#include "retrieval.h"

#include "progress_bar.h"
#include "sampler.h"

namespace generate {

std::vector<std::string> split_names(const std::string& names) {
  std::vector<std::string> out;
  for (size_t first = 0; first <= names.size();) {
    const size_t comma = std::min(names.find(',', first), names.size());
    out.push_back(names.substr(first, comma - first));
    first = comma + 1;
  }
  return out;
}

Failure make_contestants(Runtime* runtime, const std::string& names, const PolicyOptions& common,
                         std::vector<Contestant>* contestants) {
  for (const std::string& name : split_names(names)) {
    Contestant contestant;
    contestant.policy = common;
    contestant.policy.set(name);
    GENERATE_TRY(runtime->new_session(contestant.policy, &contestant.session));
    contestants->push_back(std::move(contestant));
  }
  return {};
}

Failure enter(Runtime* runtime, const Context& prefilled, std::string_view tail, Contestant* contestant) {
  GENERATE_TRY(runtime->fork(prefilled, contestant->session.get(), &contestant->context));
  return runtime->append(&contestant->context, tail);
}

Failure score_known(Runtime* runtime, std::string_view text, int64_t first, int64_t n, Contestant* contestant) {
  const int64_t vocab_size = runtime->config().vocab_size;
  ProgressBar bar("decode, " + contestant->policy.policy, n, "tokens", runtime->options().progress);
  const WorkMeter meter(contestant->context);
  for (int64_t i = first; i < first + n; ++i) {
    GENERATE_TRY(runtime->step_byte(&contestant->context, text[i]));
    contestant->bits += bits_of(runtime->last_logits(), vocab_size, static_cast<uint8_t>(text[i + 1]));
    bar.show(i + 1 - first);
  }
  GENERATE_TRY(check_bits(*runtime, contestant->context, contestant->bits));
  Work work;
  GENERATE_TRY(meter.finish(contestant->context, &work));
  contestant->scored.add(work);
  contestant->decode.add(work);
  return {};
}

Failure ask(Runtime* runtime, const Fact& fact, Contestant* contestant, std::string* answer, Context* kept) {
  Context context;
  GENERATE_TRY(runtime->fork(contestant->context, contestant->session.get(), &context));
  GENERATE_TRY(runtime->append(&context, fact.question));
  SamplingOptions sampling;
  sampling.n_predict = static_cast<int64_t>(fact.value.size()) + 3;
  Outcome outcome;
  GENERATE_TRY(continue_text(runtime, &context, sampling, &outcome));
  contestant->decode.add(outcome.decode);
  contestant->n_asked += 1;
  contestant->n_right += is_right(fact, outcome.answer);
  *answer = outcome.answer;
  if (kept == nullptr) return runtime->drop(context);
  *kept = context;
  return {};
}

std::string shown(const std::string& answer) {
  std::string out;
  for (const char c : answer.substr(0, answer.find('\n'))) out.push_back(c >= 32 && c < 127 ? c : '?');
  return out;
}

}  // namespace generate
