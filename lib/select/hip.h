// SPDX-License-Identifier: MIT
// State of policy "hip" for one layer of a sequence: bounds of chunks, and the lists of the last decode calls. The search is
// in lib/select/hip_search.h. The ABI's pruning.h has the rules.
//
// clang-format off
//   name_keys   gets the lists of a call's query blocks: cached ones where no stage is due, else by a search
//   committed   caches the lists of a decode call; any other call that has appended clears the cache
// clang-format on
#pragma once

#include <memory>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/call/sequence_call.h"
#include "lib/policy/policy.h"
#include "lib/policy/selector.h"
#include "lib/select/chunk_bounds.h"
#include "lib/select/hip_search.h"

namespace tandem {

class Hip;

struct HipState final : SelectState {
  explicit HipState(Hip& hip);

  bool has_room(int64_t n_tokens) const override;
  Status grow(int64_t n_tokens, const Watch& watch) override;
  Status copy_from(const SelectState& from) override;
  Status visit(StateVisitor& visitor, const Sequence& sequence, int64_t window_begin) override;
  void cut(const Sequence& sequence, int64_t n_tokens, int64_t window_begin) override;
  void erase(const Sequence& sequence, int64_t first, int64_t n_tokens) override;
  int64_t n_selected(int32_t kv_head) const override;
  Status prepare_on_host(SequenceCall* call, bool is_speculative) override;
  Status name_keys(const SequenceCall& call, const Watch& watch) override;
  const QueryNames* names() const override { return &names_; }
  void committed(const SequenceCall& call, bool is_speculative) override;
  void finish(const SequenceCall& call, const Watch& watch) override;

 private:
  Status bound_chunks(const SequenceCall& call, const Watch& watch);
  bool may_keep_names() const;
  Status visit_record(StateVisitor& visitor) const;
  void write_names(const PruningRecord& record);

  Hip& hip_;
  std::vector<ChunkBounds> bounds_;  // one for each chunk length of stages that judge by bounds
  CachedLists cached_, ran_;         // lists of the last decode call, and of the stages that ran in the call in progress
  bool names_are_cached_ = false;    // names_ come from cached_ and were written for the last decode call
  // The call in progress.
  bool is_guess_ = false;
  bool appends_ = false;    // appends tokens that are not speculative
  bool is_decode_ = false;  // one query, for a token that the call appends
  StoreView stored_;
  std::vector<std::byte*> extents_;
  size_t n_stages_ = 0, n_run_ = 0;  // numbers of active stages, and of those that run; used if lists may be cached
  int64_t judged_bytes_ = 0;
  BlockLists lists_;
  QueryNames names_;
  int64_t n_written_ = 0;     // how often names_ have been written
  std::vector<int32_t> idx_;  // the indices that names_ points to
};

class Hip final : public Selector {
 public:
  explicit Hip(const SelectorSetup& setup) : setup_(setup), layer_(setup.cache->layers()[setup.layer_idx]) {}
  std::unique_ptr<SelectState> make_state() override { return std::make_unique<HipState>(*this); }

  Cache& cache() const { return *setup_.cache; }
  const Backend& cpu() const;
  const Layer& layer() const { return layer_; }
  int32_t layer_idx() const { return static_cast<int32_t>(setup_.layer_idx); }
  bool shares_lists() const { return setup_.options->pruning.shares_lists; }
  const PruningOfLayer& pruning() const { return setup_.options->pruning.layers[setup_.layer_idx]; }
  SelectorSums& sums() const { return *setup_.sums; }
  HipSearch& search() { return search_; }

 private:
  const SelectorSetup setup_;
  const Layer& layer_;
  HipSearch search_;  // serves one call at a time
};

}  // namespace tandem
