// SPDX-License-Identifier: MIT
// Policy "patterns" in a layer: names the keys of each block of an append's queries, for each query head by its patterns
// (lib/patterns/pattern.h). Nothing is kept between calls.
#pragma once

#include <memory>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/call/sequence_call.h"
#include "lib/patterns/pattern.h"
#include "lib/policy/policy.h"
#include "lib/policy/selector.h"
#include "lib/select/probe.h"

namespace tandem {

class HeadPatterns final : public Selector {
 public:
  explicit HeadPatterns(const SelectorSetup& setup);
  std::unique_ptr<SelectState> make_state() override;

  Cache& cache() const { return *setup_.cache; }
  const Backend& cpu() const;
  const Layer& layer() const { return layer_; }
  const Layer& probed() const { return probed_; }
  int32_t layer_idx() const { return static_cast<int32_t>(setup_.layer_idx); }
  const PatternsOfLayer& patterns() const { return setup_.options->patterns[setup_.layer_idx]; }
  AttendedPairs pairs() const override { return pairs_; }
  void count(const AttendedPairs& more) override { pairs_.n += more.n, pairs_.n_dense += more.n_dense; }

 private:
  const SelectorSetup setup_;
  const Layer& layer_;
  const Layer probed_;  // the layer that probes use: one KV head for each query head, no soft cap
  AttendedPairs pairs_;
};

class PatternState final : public SelectState {
 public:
  explicit PatternState(HeadPatterns& of) : of_(of) {}

  Status prepare_on_host(SequenceCall* call, bool is_speculative) override;
  Status name_keys(const SequenceCall& call, const Watch& watch) override;
  const QueryNames* names() const override { return &names_; }
  void committed(const SequenceCall& call, bool is_speculative) override;
  void finish(const SequenceCall& call, const Watch& watch) override;

 private:
  // The units of a head's blocks one after another, and the end of each block in them.
  struct HeadUnits {
    std::vector<int32_t> units;
    std::vector<size_t> ends;
    std::vector<int64_t> newest_begins;
    AttendedPairs pairs;
    BlockKeys keys;  // work space
    std::vector<std::unique_ptr<PatternIndex>> indices;
  };

  void name_by_kv_head(const SequenceCall& call);
  Status name_chunk(const SequenceCall& call, int64_t first, const Watch& watch, ProbeRunner* prober);
  void name_blocks(HeadUnits* head, TokenRange chunk) const;
  void write_rows(int64_t n_blocks);

  HeadPatterns& of_;
  StoreView stored_;
  std::vector<std::byte*> extents_;
  std::vector<HeadUnits> heads_;
  std::vector<NamedRow> rows_;
  std::vector<int32_t> sinks_;  // units of the sinks, in calls by KV head
  QueryNames names_;
};

}  // namespace tandem
