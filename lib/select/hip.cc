// SPDX-License-Identifier: MIT
// Hierarchical pruning with cached lists (Lee et al., "InfiniteHiP: extending language model context up to 3 million tokens
// on a single GPU", arXiv 2502.08910, algorithms 1 to 4).
//
// Departures from the paper:
// - A stage may judge chunks by bounds of their keys or by all of their keys. The paper's search misses single keys whose
// neighbours score low.
// - Each KV head has its own list.
// - Where a list serves several query heads, the last exact stage weighs a head's logits against all that the head attends.
// - The window of a query block begins window_tokens - 1 tokens before its first query, for all of its queries. So every key
// is in the window or a candidate.
#include "lib/select/hip.h"

#include <algorithm>
#include <bit>

#include "lib/store/cache.h"

namespace tandem {
namespace {

// Makes bounds for each chunk length of stages that judge by bounds.
std::vector<ChunkBounds> bounds_of(const PruningOfLayer& pruning) {
  std::vector<ChunkBounds> made;
  for (const PruningRecord* record : {&pruning.decode, &pruning.append})
    for (const PruningStage& stage : record->stages) {
      if (stage.judge != Judge::kBounds) continue;
      const auto found =
          std::find_if(made.begin(), made.end(), [&](const ChunkBounds& of) { return of.chunk_len() == stage.chunk_len; });
      if (found == made.end())
        made.emplace_back(stage.chunk_len, stage.from_len, stage.to_len);
      else
        found->include(stage.from_len, stage.to_len);
    }
  return made;
}

SelectorBytes bytes_of(const Layer& layer, const PolicyOptions& options, size_t layer_idx, int64_t kv_len) {
  SelectorBytes bytes;
  for (const ChunkBounds& of : bounds_of(options.pruning.layers[layer_idx])) bytes.state += of.bytes(layer, kv_len);
  return bytes;
}

}  // namespace

const Policy kPolicyHip = {
    .name = "hip",
    .keeps_maw = false,
    .host_keys = [](bool) { return HostKeys::kNamed; },
    .make = [](const SelectorSetup& setup) -> std::unique_ptr<Selector> { return std::make_unique<Hip>(setup); },
    .bytes = bytes_of,
    .prunes = true,
};

const Backend& Hip::cpu() const { return cache().engine().cpu(); }

HipState::HipState(Hip& of) : hip_(of), bounds_(bounds_of(of.pruning())) {}

bool HipState::has_room(int64_t n_tokens) const {
  return std::all_of(bounds_.begin(), bounds_.end(), [&](const ChunkBounds& of) { return of.has_room(n_tokens); });
}

Status HipState::grow(int64_t n_tokens, const Watch& watch) {
  for (ChunkBounds& of : bounds_) TANDEM_TRY(of.reserve(hip_.cache().host_tier(), hip_.layer(), n_tokens, watch));
  return {};
}

Status HipState::copy_from(const SelectState& other) {
  const auto& from = static_cast<const HipState&>(other);
  for (size_t i = 0; i < bounds_.size(); ++i)
    TANDEM_TRY(bounds_[i].copy_from(hip_.cache().host_tier(), hip_.layer(), from.bounds_[i]));
  cached_ = from.cached_;
  names_are_cached_ = false;
  return {};
}

// The saved lists have the chunks and stages of this record.
Status HipState::visit_record(StateVisitor& visitor) const {
  const PruningRecord& record = hip_.pruning().decode;
  const std::string decode = element_name("pruning.decode", hip_.layer_idx());  // the layer's
  TANDEM_TRY(visitor.same("pruning.shared_lists", hip_.shares_lists() ? 1 : 0));
  TANDEM_TRY(visitor.same((decode + ".sink_tokens").c_str(), record.sink_len));
  TANDEM_TRY(visitor.same((decode + ".window_tokens").c_str(), record.window_len));
  TANDEM_TRY(visitor.same((decode + ".n_stages").c_str(), std::ssize(record.stages)));
  for (size_t j = 0; j < record.stages.size(); ++j) {
    const PruningStage& stage = record.stages[j];
    const std::string name = element_name((decode + ".stages").c_str(), static_cast<int64_t>(j));
    TANDEM_TRY(visitor.same((name + ".judge").c_str(), static_cast<int64_t>(stage.judge)));
    TANDEM_TRY(visitor.same((name + ".plus_next").c_str(), stage.plus_next ? 1 : 0));
    TANDEM_TRY(visitor.same((name + ".chunk_tokens").c_str(), stage.chunk_len));
    TANDEM_TRY(visitor.same((name + ".keep_tokens").c_str(), stage.keep_len));
    TANDEM_TRY(visitor.same((name + ".refresh_interval").c_str(), stage.interval));
    TANDEM_TRY(visitor.same((name + ".from_tokens").c_str(), stage.from_len));
    TANDEM_TRY(visitor.same((name + ".to_tokens").c_str(), stage.to_len));
  }
  return {};
}

// Bounds are not saved. The next call computes them again from the keys.
Status HipState::visit(StateVisitor& visitor, const Sequence& sequence, int64_t) {
  const int64_t length = sequence.lengths[static_cast<size_t>(hip_.layer_idx())];
  const std::vector<PruningStage>& stages = hip_.pruning().decode.stages;
  TANDEM_TRY(visit_record(visitor));
  TANDEM_TRY(visitor.flag(&cached_.are_valid, "are_valid"));
  if (!cached_.are_valid) return {};
  const int64_t n_lists = hip_.shares_lists() ? 1 : hip_.layer().n_kv_heads;
  auto n = static_cast<int64_t>(cached_.n);
  TANDEM_TRY(visitor.number(&n, 0, std::ssize(stages), "n_stages"));
  cached_.n = static_cast<size_t>(n);
  for (size_t i = 0; i < cached_.n; ++i) {
    CachedLists::Stage& stage = cached_.stages[i];
    auto place = static_cast<int64_t>(stage.place);
    TANDEM_TRY(visitor.number(&place, 0, std::ssize(stages) - 1, "place of a stage"));
    stage.place = static_cast<size_t>(place);
    TANDEM_TRY(visitor.number(&stage.ran_at, 0, length - 1, "ran_at of a stage"));
    stage.of_list.resize(static_cast<size_t>(n_lists));
    const int64_t n_chunks = length / stages[stage.place].chunk_len + 1;
    for (ChunkList& list : stage.of_list) {
      TANDEM_TRY(visitor.list(&list, n_chunks, "n_chunks of a list"));
      for (size_t c = 0; visitor.is_loading() && c < list.size(); ++c)
        if (list[c] < (c == 0 ? 0 : list[c - 1] + 1) || list[c] >= n_chunks) return visitor.corrupt("chunks do not ascend");
    }
  }
  return {};
}

void HipState::cut(const Sequence&, int64_t n_tokens, int64_t) {
  for (ChunkBounds& of : bounds_) of.cut(n_tokens);
  cached_.are_valid = false;
}

void HipState::erase(const Sequence&, int64_t first, int64_t) {
  for (ChunkBounds& of : bounds_) of.cut(first);
  cached_.are_valid = false;
}

int64_t HipState::n_selected(int32_t kv_head) const {
  if (!cached_.are_valid || cached_.n == 0) return 0;
  const CachedLists::Stage& last = cached_.stages[cached_.n - 1];
  const ChunkList& list = last.of_list[last.of_list.size() == 1 ? 0 : static_cast<size_t>(kv_head)];
  return std::ssize(list) * hip_.pruning().decode.stages[last.place].chunk_len;
}

// Other calls may grow the store during the search, so this copies the extents. The sequence itself is in flight.
Status HipState::prepare_on_host(SequenceCall* call, bool is_speculative) {
  const auto l = static_cast<size_t>(hip_.layer_idx());
  const Sequence& sequence = *call->sequence;
  const PageStore& store = hip_.cache().store();
  is_guess_ = is_speculative;
  appends_ = !is_speculative && sequence.lengths[l] == call->first_query;
  is_decode_ = appends_ && call->q_len == 1;
  extents_.assign(store.bases().begin(), store.bases().end());
  stored_ = store.view(sequence.pages, sequence.positions, extents_);
  return {};
}

// Computes bounds of the keys that stages may read: in an append up to those of its last block, in a guess those before its
// first query.
Status HipState::bound_chunks(const SequenceCall& call, const Watch& watch) {
  const int64_t end = !is_guess_ && call.q_len > 1 ? call.length : call.first_query;
  for (ChunkBounds& of : bounds_) {
    const int64_t n = std::min(end, of.wanted(call.length)) / of.chunk_len();
    TANDEM_TRY(of.fill(hip_.cpu(), hip_.layer(), stored_, hip_.layer_idx(), n, watch));
  }
  return {};
}

Status HipState::name_keys(const SequenceCall& call, const Watch& watch) {
  const bool is_single = call.q_len == 1 || is_guess_;
  const PruningRecord& record = is_single ? hip_.pruning().decode : hip_.pruning().append;
  SearchedCall searched;
  searched.cpu = &hip_.cpu();
  searched.layer = &hip_.layer();
  searched.layer_idx = hip_.layer_idx();
  searched.stored = &stored_;
  searched.bounds = bounds_;
  searched.record = &record;
  searched.shares_lists = hip_.shares_lists();
  searched.q = call.q;
  searched.q_len = call.q_len;
  searched.first_query = call.first_query;
  searched.overlaps = is_single;
  searched.is_guess = is_guess_;
  TANDEM_TRY(bound_chunks(call, watch));
  const bool may_be_cached = is_decode_ || (is_guess_ && searched.has_one_block());
  n_stages_ = StagePlaces(record, call.first_query + 1).size();
  n_run_ = may_be_cached ? n_due_stages(searched, cached_) : 0;
  judged_bytes_ = 0;
  if (may_be_cached && n_stages_ > 0 && n_run_ == 0 && may_keep_names()) return {};
  names_are_cached_ = false;
  (void)hip_.search().take_judged_bytes();  // left over from a failed call
  if (may_be_cached) {
    TANDEM_TRY(hip_.search().search_cached(searched, cached_, watch, &ran_, &lists_));
  } else {
    TANDEM_TRY(hip_.search().search(searched, watch, &lists_));
  }
  judged_bytes_ = hip_.search().take_judged_bytes();
  write_names(record);
  return {};
}

// Returns whether names_, written for the last decode call, serve this call too. They do not if they name chunks longer than
// the finest ones. The last of such chunks is cut where the candidates end, and this end moves with each token.
bool HipState::may_keep_names() const {
  return names_are_cached_ &&
         hip_.pruning().decode.stages[cached_.stages[cached_.n - 1].place].chunk_len == lists_.chunk_len;
}

void HipState::write_names(const PruningRecord& record) {
  const auto n_lists = static_cast<size_t>(hip_.shares_lists() ? 1 : hip_.layer().n_kv_heads);
  size_t n_idx = 1;
  for (const ChunkList& list : lists_.of_block) n_idx = std::max(n_idx, list.size());
  idx_.assign(lists_.of_block.size() * n_idx, -1);
  for (size_t i = 0; i < lists_.of_block.size(); ++i)
    std::copy(lists_.of_block[i].begin(), lists_.of_block[i].end(), idx_.begin() + static_cast<std::ptrdiff_t>(i * n_idx));
  names_ = {};
  names_.keys.idx = idx_.data();
  names_.keys.n_idx = names_.keys.head_stride = static_cast<int64_t>(n_idx);
  names_.keys.token_stride = static_cast<int64_t>(n_lists * n_idx);
  names_.keys.n_heads = static_cast<int32_t>(n_lists);
  names_.keys.unit_shift = std::countr_zero(static_cast<uint64_t>(lists_.chunk_len));
  names_.keys.plus_window = true;
  names_.version = ++n_written_;
  names_.query_block = lists_.query_block;
  names_.window_queries = lists_.window_queries.data();
  names_.sink_len = record.sink_len;
  names_.window_len = record.window_len;
}

void HipState::committed(const SequenceCall& call, bool) {
  if (call.is_on_device()) {  // the device has searched
    cached_.are_valid = false;
    return;
  }
  for (ChunkBounds& of : bounds_) of.keep();
  hip_.sums().judged_bytes += judged_bytes_;
  if (is_decode_) {
    hip_.sums().n_refreshes += static_cast<int64_t>(n_run_);
    cached_.take(&ran_, n_stages_, n_run_);
    names_are_cached_ = true;
  } else if (appends_) {
    cached_.are_valid = false;
  }
}

// Frees the lists of an append, which may be long and are not needed any more.
void HipState::finish(const SequenceCall& call, const Watch&) {
  if (call.q_len <= kMostQueryBlock) return;
  lists_ = {};
  idx_ = {};
  names_ = {};
}

}  // namespace tandem
