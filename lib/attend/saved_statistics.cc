// SPDX-License-Identifier: MIT
#include "lib/attend/saved_statistics.h"

#include <algorithm>
#include <cstring>
#include <shared_mutex>

namespace tandem {
namespace {

class Measurer final : public StateVisitor {
 public:
  Measurer() : StateVisitor(false) {}
  Status bytes(void*, int64_t n) override {
    n_bytes += n;
    return {};
  }
  Status corrupt(const std::string&) const override { return {}; }
  int64_t n_bytes = 0;
};

class Saver final : public StateVisitor {
 public:
  explicit Saver(SavedWriter& writer) : StateVisitor(false), writer_(writer) {}
  Status bytes(void* data, int64_t n) override { return writer_.put(data, n); }
  Status corrupt(const std::string&) const override { return {}; }

 private:
  SavedWriter& writer_;
};

class Loader final : public StateVisitor {
 public:
  explicit Loader(SavedReader& reader) : StateVisitor(true), reader_(reader) {}
  Status bytes(void* data, int64_t n) override {
    if (n > reader_.left()) return reader_.corrupt("it ends within what a policy has saved");
    return reader_.take(data, n);
  }
  Status corrupt(const std::string& what) const override { return reader_.corrupt(what); }

 private:
  SavedReader& reader_;
};

Status visit_layer(const SessionCore& core, size_t l, const Sequence& sequence, LayerState& state, StateVisitor& visitor) {
  char name[16] = {};
  std::strncpy(name, core.policies[l].name, sizeof name - 1);
  char saved[sizeof name];
  std::memcpy(saved, name, sizeof name);
  TANDEM_TRY(visitor.bytes(saved, sizeof saved));
  if (std::memcmp(saved, name, sizeof name) != 0) {
    saved[sizeof saved - 1] = 0;
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "session",
                "session: layer %zu has policy \"%s\", the session that was saved \"%s\"", l, name, saved);
  }
  const int64_t length = sequence.lengths[l];
  TANDEM_TRY(visitor.number(&state.window_begin, 0, length, "window_begin"));
  TANDEM_TRY(state.selection->visit(visitor, sequence, state.window_begin));
  // With a longer window, tokens that were outside are in the window now and are removed from the selection. With a shorter
  // one, the next call evicts the oldest tokens.
  const int64_t latest = std::max<int64_t>(0, length - core.options.window_len);
  if (!visitor.is_loading() || state.window_begin <= latest) return {};
  const std::shared_lock lock(core.cache->mutex());
  state.window_begin = latest;
  state.selection->cut(sequence, length, latest);
  return {};
}

}  // namespace

Status measure_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state,
                          std::vector<int64_t>* bytes) {
  for (size_t l = 0; l < core.layers.size(); ++l) {
    Measurer measurer;
    TANDEM_TRY(visit_layer(core, l, sequence, state.layers[l], measurer));
    bytes->push_back(measurer.n_bytes);
  }
  return {};
}

Status save_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state,
                       const std::vector<int64_t>& bytes, SavedWriter* writer) {
  Saver saver(*writer);
  for (size_t l = 0; l < core.layers.size(); ++l) {
    TANDEM_TRY(writer->begin({SavedKind::kStatistics, static_cast<int32_t>(l), bytes[l]}));
    TANDEM_TRY(visit_layer(core, l, sequence, state.layers[l], saver));
    TANDEM_TRY(writer->end());
  }
  return {};
}

Status load_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state, SavedReader* reader) {
  Loader loader(*reader);
  for (size_t l = 0; l < core.layers.size(); ++l) {
    SavedSection section{SavedKind::kStatistics, static_cast<int32_t>(l), -1};
    TANDEM_TRY(reader->begin(&section));
    Status status = visit_layer(core, l, sequence, state.layers[l], loader);
    // Data that does not fit may have been damaged, so a checksum error takes precedence.
    const bool may_be_changed = status.code() == TANDEM_ERROR_INVALID_ARGUMENT || status.code() == TANDEM_ERROR_CORRUPT;
    if (!status.ok() && !may_be_changed) return status;
    if (may_be_changed) TANDEM_TRY(reader->skip(reader->left()));
    TANDEM_TRY(reader->end());
    if (may_be_changed) return status;
  }
  return {};
}

}  // namespace tandem
