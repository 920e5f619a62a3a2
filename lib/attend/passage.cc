// SPDX-License-Identifier: MIT
#include "lib/attend/passage.h"

#include "lib/attend/session_states.h"

namespace tandem {

Status Passage::enter() {
  const AttendArgs& args = call_.args;
  const size_t l = call_.facts.idx;
  std::vector<SequenceCall>& calls = call_.calls();
  calls.clear();
  calls.reserve(static_cast<size_t>(args.n_sequences));
  int64_t first_row = 0;
  for (int32_t i = 0; i < args.n_sequences; ++i) {
    SequenceCall of;
    const int64_t id = args.sequences[i];
    of.sequence = call_.cache().find(id);
    if (of.sequence == nullptr)
      return fail(TANDEM_ERROR_NOT_FOUND, "sequences", "sequences[%d] = %lld is not in this cache", i,
                  static_cast<long long>(id));
    const Sequence& sequence = *of.sequence;
    const bool foreign = sequence.writer != nullptr && sequence.writer != call_.session.states;
    if (sequence.is_being_saved)
      return fail(TANDEM_ERROR_BUSY, "sequences", "sequences[%d] = %lld is being saved", i, static_cast<long long>(id));
    if (foreign || (call_.appends() && sequence.n_readers > 0))
      return fail(TANDEM_ERROR_BUSY, "sequences", "sequences[%d] = %lld is in flight in another session", i,
                  static_cast<long long>(id));
    of.q_len = args.q_lens[i];
    of.first_row = first_row;
    first_row += of.q_len;
    if (of.q_len == 0) continue;
    of.length = sequence.lengths[l] + (call_.appends() ? of.q_len : 0);
    of.first_query = of.length - of.q_len;
    of.is_append = !args.speculative && (of.q_len > 1 || args.partial);
    TANDEM_TRY(check_state(of));
    calls.push_back(of);
  }
  for (SequenceCall& of : calls) {
    of.writer_before = of.sequence->writer;
    if (call_.appends())
      of.sequence->writer = call_.session.states;
    else
      ++of.sequence->n_readers;
  }
  is_marked_ = true;
  return {};
}

Status Passage::check_state(const SequenceCall& of) const {
  const Sequence& sequence = *of.sequence;
  const AttendArgs& args = call_.args;
  const size_t l = call_.facts.idx;
  const auto id = static_cast<long long>(sequence.id);
  if (args.speculative && call_.facts.heads != nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "flags", "flags = TANDEM_ATTEND_SPECULATIVE: layer %d has streaming heads",
                args.layer_idx);
  if (sequence.speculative[l] != 0)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequences",
                "sequence %lld has %lld speculative tokens in layer %d: commit them first", id,
                static_cast<long long>(sequence.speculative[l]), args.layer_idx);
  if (args.speculative && sequence.speculator != nullptr && sequence.speculator != call_.session.states)
    return fail(TANDEM_ERROR_BUSY, "sequences", "sequence %lld has speculative tokens of another session", id);
  if (of.first_query < 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "q_lens",
                "q_lens = %lld queries are more than the %lld tokens of sequence %lld", static_cast<long long>(of.q_len),
                static_cast<long long>(of.length), id);
  if (!call_.appends() || !call_.session.step.is_open) return {};
  for (const OpenStep::Sequence& step : call_.session.step.sequences) {
    if (step.id != sequence.id) continue;
    const int64_t left = step.length + step.q_len - sequence.lengths[l];
    if (of.q_len <= left) return {};
    return fail(TANDEM_ERROR_INVALID_STATE, "q_lens", "q_lens = %lld for sequence %lld: the step has %lld left in layer %d",
                static_cast<long long>(of.q_len), id, static_cast<long long>(left), args.layer_idx);
  }
  return fail(TANDEM_ERROR_INVALID_STATE, "sequences", "sequence %lld is not part of the open step", id);
}

Passage::~Passage() {
  if (!is_marked_) return;
  std::unique_lock lock(call_.cache().mutex());
  for (SequenceCall& of : call_.calls()) {
    if (call_.appends())
      of.sequence->writer = of.writer_before;
    else
      --of.sequence->n_readers;
    auto& positions = of.sequence->positions;
    if (static_cast<int64_t>(positions.size()) > of.sequence->longest())
      positions.resize(static_cast<size_t>(of.sequence->longest()));
  }
}

}  // namespace tandem
