// SPDX-License-Identifier: MIT
#include "lib/select/patterns.h"

#include <algorithm>

#include "lib/store/cache.h"

namespace tandem {
namespace {

// Returns how many tokens of the units lie before newest_begin.
int64_t n_tokens_of(std::span<const int32_t> units, int64_t newest_begin) {
  if (units.empty()) return 0;
  return std::ssize(units) * kPatternUnit - std::max<int64_t>(0, (units.back() + 1) * kPatternUnit - newest_begin);
}

Layer without_cap(Layer layer) {
  layer.soft_cap = 0.0f;
  return layer;
}

}  // namespace

const Policy kPolicyPatterns = {
    .name = "patterns",
    .keeps_maw = false,
    .host_keys = [](bool) { return HostKeys::kNamed; },
    .make = [](const SelectorSetup& setup) -> std::unique_ptr<Selector> { return std::make_unique<HeadPatterns>(setup); },
    .bytes = [](const Layer&, const PolicyOptions&, size_t, int64_t) { return SelectorBytes(); },
    .follows_patterns = true,
};

HeadPatterns::HeadPatterns(const SelectorSetup& setup)
    : setup_(setup), layer_(setup.cache->layers()[setup.layer_idx]), probed_(without_cap(by_q_head(layer_))) {}

std::unique_ptr<SelectState> HeadPatterns::make_state() { return std::make_unique<PatternState>(*this); }

const Backend& HeadPatterns::cpu() const { return cache().engine().cpu(); }

// Other calls may grow the store while probes read it, so this copies the extents. The sequence itself is in flight.
Status PatternState::prepare_on_host(SequenceCall* call, bool) {
  const Sequence& sequence = *call->sequence;
  const PageStore& store = of_.cache().store();
  extents_.assign(store.bases().begin(), store.bases().end());
  stored_ = store.view(sequence.pages, sequence.positions, extents_);
  return {};
}

Status PatternState::name_keys(const SequenceCall& call, const Watch& watch) {
  names_ = {};
  names_.keys.unit_shift = kPatternUnitShift;
  names_.keys.plus_window = true;
  if (!call.is_append) {
    name_by_kv_head(call);
    return {};
  }
  names_.keys.n_heads = call.by_q_head ? of_.layer().n_q_heads : of_.layer().n_kv_heads;
  names_.query_block = kPatternBlock;
  heads_.resize(static_cast<size_t>(names_.keys.n_heads));
  for (HeadUnits& head : heads_) head.units.clear(), head.ends.clear(), head.newest_begins.clear(), head.pairs = {};
  ProbeRunner prober;  // destroyed with the call, as the logits of a head with all keys take much memory
  for (int64_t first = 0; first < call.q_len; first += kPatternChunk) TANDEM_TRY(name_chunk(call, first, watch, &prober));
  write_rows((call.q_len + kPatternBlock - 1) / kPatternBlock);
  return {};
}

// Names keys for a single query, or for a guess, whose queries all attend the keys of the first.
void PatternState::name_by_kv_head(const SequenceCall& call) {
  const std::vector<DecodeKeys>& heads = of_.patterns().decode;
  // In a call that also has an append, rows belong to query heads.
  const int32_t n_alike = call.by_q_head ? of_.layer().group_size : 1;
  names_.keys.n_heads = of_.layer().n_kv_heads * n_alike;
  names_.query_block = call.q_len;
  int64_t most_units = 0;
  for (const DecodeKeys& keys : heads) most_units = std::max(most_units, pattern_units(keys.sink_len));
  sinks_.clear();
  for (int64_t unit = 0; unit < most_units; ++unit) sinks_.push_back(static_cast<int32_t>(unit));
  rows_.clear();
  for (const DecodeKeys& keys : heads) {
    const int64_t begin = keys.are_all ? 0 : std::max<int64_t>(0, call.first_query + 1 - keys.window_len);
    rows_.insert(rows_.end(), static_cast<size_t>(n_alike), {sinks_.data(), pattern_units(keys.sink_len), begin});
  }
  names_.rows = rows_.data();
}

// Names keys for queries [first, first + kPatternChunk) of the call, or for those that are left. Logits are computed head by
// head, as those of one head with all keys take much memory. Keys are then named for all heads at once.
Status PatternState::name_chunk(const SequenceCall& call, int64_t first, const Watch& watch, ProbeRunner* prober) {
  const Layer& layer = of_.probed();
  const Backend& cpu = of_.cpu();
  const int64_t end = std::min(call.q_len, first + kPatternChunk);
  HeadChunk chunk;
  chunk.queries = {call.first_query + first, call.first_query + end};
  chunk.dim = layer.k_head_dim;
  for (int32_t h = 0; h < names_.keys.n_heads; ++h) {
    HeadUnits& head = heads_[static_cast<size_t>(h)];
    chunk.pattern = &of_.patterns().of_list(h);
    if (call.by_q_head) chunk.q = call.q + (h * call.q_len + first) * layer.k_head_dim;
    head.indices.clear();
    for (const Pattern* pattern : pattern_table()) {
      if (!chunk.pattern->has(pattern->kind)) continue;
      std::unique_ptr<PatternIndex> index = pattern->make(chunk);
      const Probe probe = index->probe(chunk);
      TANDEM_TRY(
          prober->run({&cpu, &layer, of_.layer_idx(), h / of_.layer().group_size, &stored_}, probe, watch, index.get()));
      head.indices.push_back(std::move(index));
    }
  }
  struct Run {
    PatternState& state;
    TokenRange chunk;
  } run{*this, chunk.queries};
  const auto name_one = [](void* of, int64_t h, int32_t) {
    Run& all = *static_cast<Run*>(of);
    HeadUnits& head = all.state.heads_[static_cast<size_t>(h)];
    for (const std::unique_ptr<PatternIndex>& index : head.indices) index->finish();
    all.state.name_blocks(&head, all.chunk);
    head.indices.clear();
  };
  cpu.table->run(cpu.self, names_.keys.n_heads, name_one, &run);
  return watch.check();
}

void PatternState::name_blocks(HeadUnits* head, TokenRange chunk) const {
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kPatternBlock) {
    const TokenRange block{begin, std::min(chunk.end, begin + kPatternBlock)};
    head->keys.clear(begin);
    for (const std::unique_ptr<PatternIndex>& index : head->indices) index->name(block, &head->keys);
    const auto first = static_cast<std::ptrdiff_t>(head->units.size());
    head->keys.append_units(&head->units);
    head->ends.push_back(head->units.size());
    head->newest_begins.push_back(head->keys.newest_begin());
    head->pairs.add(block.begin, block.end,
                    n_tokens_of({head->units.begin() + first, head->units.end()}, head->keys.newest_begin()),
                    head->keys.newest_begin());
  }
}

void PatternState::write_rows(int64_t n_blocks) {
  rows_.clear();
  rows_.reserve(static_cast<size_t>(n_blocks) * heads_.size());
  for (size_t block = 0; block < static_cast<size_t>(n_blocks); ++block)
    for (const HeadUnits& head : heads_) {
      const size_t first = block == 0 ? 0 : head.ends[block - 1];
      rows_.push_back(
          {head.units.data() + first, static_cast<int64_t>(head.ends[block] - first), head.newest_begins[block]});
    }
  names_.rows = rows_.data();
}

void PatternState::committed(const SequenceCall& call, bool) {
  if (!call.is_append || call.is_on_device()) return;
  const int32_t n_alike = call.by_q_head ? 1 : of_.layer().group_size;
  for (const HeadUnits& head : heads_) of_.count({head.pairs.n * n_alike, head.pairs.n_dense * n_alike});
}

// Frees the lists of an append, which may be long and are not needed any more.
void PatternState::finish(const SequenceCall& call, const Watch&) {
  if (call.q_len <= kPatternBlock) return;
  std::vector<HeadUnits>().swap(heads_);
  rows_ = {};
  names_ = {};
}

}  // namespace tandem
