// SPDX-License-Identifier: MIT
#include "lib/attend/search_call.h"

#include <algorithm>
#include <bit>

#include "lib/attend/device_launch.h"
#include "lib/attend/pattern_call.h"
#include "lib/attend/searched_keys.h"
#include "lib/machine/device_status.h"
#include "lib/pieces/search_layout.h"

namespace tandem {
namespace {

const PruningOfLayer& pruning_of(const Call& call) { return call.session.options.pruning.layers[call.facts.idx]; }

// An append's last chunk may have one query, so the call's kind decides.
bool is_append(const Call& call) { return !call.calls().empty() && call.calls()[0].is_append; }

const PruningRecord& record_of(const Call& call) {
  return is_append(call) ? pruning_of(call).append : pruning_of(call).decode;
}

// Returns whether lists stay with their sequences: only if the call appends one token to each, which is its query.
bool keeps_lists(const Call& call) { return call.appends() && !is_append(call); }

int64_t list_bytes(const PruningRecord& record, int64_t n_lists) {
  DeviceSearch search;
  return describe_record(record, {}, n_lists, &search);
}

int32_t bounds_on(const DeviceSession& device, size_t layer_idx, DeviceBounds* bounds) {
  const auto& kept = device.geometry().layers[layer_idx].bounds;
  for (const auto& of : kept) {
    bounds->data = device.pages(layer_idx).planes[kPlaneK] - device.geometry().layers[layer_idx].at[kPlaneK] + of.at;
    bounds->head_stride = of.head_stride;
    bounds->chunk_shift = std::countr_zero(static_cast<uint64_t>(of.chunk_len));
    ++bounds;
  }
  return static_cast<int32_t>(kept.size());
}

// Returns a search with the fields that all searches of the layer by this record share.
DeviceSearch make_search(const SizeTerms& terms, size_t layer_idx, const PruningRecord& record) {
  const PruningOfLayer& pruning = terms.options.pruning.layers[layer_idx];
  DeviceSearch search;
  search.layer = &terms.layers[layer_idx];
  search.pages.page_len = kDevicePageLen;
  search.shares_lists = terms.options.pruning.shares_lists ? 1 : 0;
  describe_record(record, bounded_lengths(pruning), n_key_lists(*search.layer, terms.options.pruning), &search);
  search.most_keys = most_searched(terms.options);
  return search;
}

// Returns the lengths of blocks and their parts, without counts. most_rows: query rows of a part.
SearchBlocks no_blocks(const PruningRecord& record, const Layer& layer, int64_t most_rows) {
  const int64_t block = record.stages[0].query_block;
  return {block, std::clamp<int64_t>(most_rows / layer.group_size, 1, block), 0, 0};
}

// Returns the query rows of a part: as many as the module takes with the chunk's queries.
int64_t most_part_rows(const Call& chunk) {
  const Device& device = chunk.device().device();
  const DeviceRows q = attended_q(append_of(chunk, {}));
  return device.table->most_list_rows(device.self, &chunk.device().layer(chunk.facts.idx, false), &q);
}

}  // namespace

Status check_searched(const SessionLayer& layer) {
  if (!layer.policy.prunes || layer.layer.group_size <= kMostListRows) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "q.device_type",
              "q is in device memory, and layer %zu has policy \"%s\" and %d query heads to a KV head: %d at most there",
              layer.idx, layer.policy.name, layer.layer.group_size, kMostListRows);
}

Status check_search(const Call& call) {
  if (!call.facts.policy.names_keys()) return {};
  const int32_t l = call.args.layer_idx;
  TANDEM_TRY(check_searched(call.facts));
  TANDEM_TRY(check_patterns(call.session, call.facts));
  if (call.args.speculative)
    return fail(
        TANDEM_ERROR_UNSUPPORTED, "flags",
        "flags = TANDEM_ATTEND_SPECULATIVE in layer %d, which has policy \"%s\": on device tensors it takes no guesses", l,
        call.facts.policy.name);
  const int64_t most_queries = *std::max_element(call.args.q_lens, call.args.q_lens + call.args.n_sequences);
  if (call.args.partial && most_queries <= 1)
    return fail(
        TANDEM_ERROR_UNSUPPORTED, "flags",
        "flags = TANDEM_ATTEND_PARTIAL in layer %d, which has policy \"%s\": on device tensors an append has several "
        "queries of some sequence",
        l, call.facts.policy.name);
  if (!call.facts.policy.prunes) return {};
  const int64_t* const q_lens = call.args.q_lens;
  const bool has_append = std::any_of(q_lens, q_lens + call.args.n_sequences, [](int64_t n) { return n > 1; });
  if (!has_append || has_one_query_block(pruning_of(call).append)) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "q.device_type",
              "q is in device memory, and stages of layer %d have different query_block: there they have one", l);
}

Status check_resident(const SessionCore& core, const SessionLayer& layer, int64_t length, bool may_bring) {
  if (!layer.policy.names_keys() || length <= most_searched(core.options)) return {};
  if (layer.policy.follows_patterns && may_bring && layer.layer.rope == nullptr) return {};
  return fail(
      TANDEM_ERROR_CAPACITY, "window_tokens",
      "window_tokens = %lld: under policy \"%s\" of layer %zu the device's window has all tokens, up to %lld, and these "
      "are %lld",
      static_cast<long long>(core.options.window_len), layer.policy.name, layer.idx,
      static_cast<long long>(most_searched(core.options)), static_cast<long long>(length));
}

bool searches(const Call& chunk) {
  if (!chunk.facts.policy.prunes) return false;
  const bool is_planned = chunk.task == nullptr || chunk.task->step > 0;
  if (is_planned) return true;
  const PruningRecord& record = record_of(chunk);
  const auto have_kernels = [&](int64_t q_len) {
    int64_t n = 0;
    return chunk.device().most_queries(chunk.facts.idx, q_len, &n).ok() && n == q_len;
  };
  return std::any_of(chunk.calls().begin(), chunk.calls().end(), [&](const SequenceCall& of) {
    return !keeps_all(record, of.length, !of.is_append) || !have_kernels(of.q_len);
  });
}

void reserve_search(const SizeTerms& terms, const CallShape& shape, int64_t most_tokens, Reservation* needs) {
  const size_t l = shape.layer_idx;
  if (terms.policies[l].follows_patterns) return reserve_patterns(terms, shape, most_tokens, needs);
  if (!terms.policies[l].prunes) return;
  const Layer& layer = *shape.layer;
  const int64_t n_lists = n_key_lists(layer, terms.options.pruning), n_sequences = std::ssize(shape.sequences);
  const auto add = [&](const PruningRecord& record, const SearchBlocks& blocks) {
    const auto [block_len, part_len, n_blocks, n_parts] = blocks;
    DeviceSearch search = make_search(terms, l, record);
    search.sequences.n_sequences = static_cast<int32_t>(n_blocks);
    search.sequences.max_q_len = static_cast<int32_t>(block_len);
    search.list_queries = static_cast<int32_t>(part_len);
    needs->search_bytes = std::max(needs->search_bytes, terms.device->table->search_bytes(terms.device->self, &search));
    needs->block_list_bytes = std::max(needs->block_list_bytes, n_blocks * list_bytes(record, n_lists));
    needs->n_lists = std::max(needs->n_lists, n_parts * n_lists);
    needs->n_granules = std::max(needs->n_granules, n_blocks * n_lists * most_granules(record, terms.options.window_len));
  };
  const PruningOfLayer& pruning = terms.options.pruning.layers[l];
  const int64_t n_single = std::max({n_sequences, needs->step_sequences, shape.held_sequences});
  add(pruning.decode, {1, 1, n_single, n_single});
  if (shape.max_q_len() == 1) return;
  SearchBlocks blocks = no_blocks(pruning.append, layer, kMostListRows);
  const int64_t n_rows = std::min(shape.n_tokens(), most_tokens);
  blocks.n_blocks = n_rows / blocks.block_len + n_sequences;
  blocks.n_parts = n_rows / blocks.part_len + blocks.n_blocks;
  add(pruning.append, blocks);
  needs->add_descriptors(blocks.n_blocks + blocks.n_parts, 0);
  // The part length is known once the call has its queries: from part_len queries to whole blocks. Work space is sized for
  // both.
  for (const auto& [n, q_len] : {std::pair(blocks.n_parts, blocks.part_len), {blocks.n_blocks, blocks.block_len}})
    needs->workspace_bytes = std::max(needs->workspace_bytes, workspace_bytes(*terms.device, layer, n, q_len));
}

SearchBlocks blocks_of(const Call& chunk) {
  SearchBlocks blocks = no_blocks(record_of(chunk), chunk.layer(), most_part_rows(chunk));
  for (const SequenceCall& of : chunk.calls()) {
    const int64_t n_whole = of.q_len / blocks.block_len, n_left = of.q_len % blocks.block_len;
    blocks.n_blocks += n_whole + (n_left > 0 ? 1 : 0);
    blocks.n_parts += n_whole * ceil_div(blocks.block_len, blocks.part_len) + ceil_div(n_left, blocks.part_len);
  }
  return blocks;
}

namespace {

// Describes queries [first, first + n) of a sequence as a sequence of their own.
DeviceSequence some_queries(const DeviceSequence& whole, const SequenceCall& of, int64_t first, int64_t n) {
  DeviceSequence some = whole;
  some.q_len = static_cast<int32_t>(n);
  some.first_row += static_cast<int32_t>(first);
  some.begin = 0;
  some.end = of.first_query + first + n;
  some.position = of.sequence->position(of.first_query + first);
  return some;
}

}  // namespace

int64_t n_described(const Call& chunk) {
  if (!searches(chunk) || !is_append(chunk)) return 0;
  const SearchBlocks blocks = blocks_of(chunk);
  return blocks.n_blocks + blocks.n_parts;
}

void describe_search(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences, int64_t n_between) {
  const DeviceSession& device = chunk.device();
  const size_t l = chunk.facts.idx;
  const int64_t n_lists = n_key_lists(chunk.layer(), chunk.session.options.pruning);
  const int64_t of_block = list_bytes(record_of(chunk), n_lists);
  const auto n_calls = static_cast<int32_t>(chunk.calls().size());
  for (int32_t i = 0; i < n_calls; ++i) {
    const SequenceCall& of = chunk.calls()[static_cast<size_t>(i)];
    DeviceSequence& to = sequences[i];
    to.bounded = of.window->bounded(l);
    to.kept_mark = keeps_lists(chunk) ? of.window->kept_mark(l) : chunk.session.next_mark();
    to.kept_lists = keeps_lists(chunk) ? of.window->kept_lists().data() + device.geometry().layers[l].kept_at
                                       : device.work().block_lists() + i * of_block;
    to.first_list = i;
  }
  if (!is_append(chunk)) return;
  const SearchBlocks blocks = blocks_of(chunk);
  DeviceSequence *block = sequences + n_calls + n_between, *const first_part = block + blocks.n_blocks, *part = first_part;
  int64_t n_lists_given = 0;
  for (int32_t i = 0; i < n_calls; ++i) {
    const SequenceCall& of = chunk.calls()[static_cast<size_t>(i)];
    for (int64_t t = 0; t < of.q_len; t += blocks.block_len, ++block, ++n_lists_given) {
      const int64_t end = std::min(of.q_len, t + blocks.block_len);
      *block = some_queries(sequences[i], of, t, end - t);
      block->kept_lists = device.work().block_lists() + n_lists_given * of_block;
      block->first_list = static_cast<int32_t>(part - first_part);
      for (int64_t p = t; p < end; p += blocks.part_len, ++part)
        *part = some_queries(sequences[i], of, p, std::min(end, p + blocks.part_len) - p);
    }
  }
  chunk.blocks = chunk.queries = on_device;
  chunk.blocks.sequences += n_calls + n_between;
  chunk.blocks.n_sequences = static_cast<int32_t>(blocks.n_blocks);
  chunk.blocks.max_q_len = static_cast<int32_t>(blocks.block_len);
  chunk.queries.sequences += n_calls + n_between + blocks.n_blocks;
  chunk.queries.n_sequences = static_cast<int32_t>(blocks.n_parts);
  int64_t longest = 0;
  for (const SequenceCall& of : chunk.calls()) longest = std::max(longest, of.q_len);
  chunk.queries.max_q_len = static_cast<int32_t>(std::min(blocks.part_len, longest));
}

Status bound_chunks(const Call& call, const DeviceSequences& sequences) {
  const DeviceSession& device = call.device();
  const size_t l = call.facts.idx;
  DeviceBoundChunks bounds;
  bounds.n_bounds = bounds_on(device, l, bounds.bounds);
  if (bounds.n_bounds == 0) return {};
  // A search that keeps lists also makes the bounds of the newest chunk of each length.
  const auto lacks = [&](const SequenceCall& of) {
    const int64_t end = keeps_lists(call) ? of.first_query : of.length;
    return std::any_of(bounds.bounds, bounds.bounds + bounds.n_bounds, [&](const DeviceBounds& level) {
      const int64_t n = (end >> level.chunk_shift) - (of.window->bounded(l) >> level.chunk_shift);
      return keeps_lists(call) ? n > 1 : n > 0;
    });
  };
  if (std::none_of(call.calls().begin(), call.calls().end(), lacks)) return {};
  bounds.layer = &device.layer(l, false);
  bounds.pages = device.pages(l);
  bounds.sequences = sequences;
  bounds.sequences.max_keys = 0;  // of this call only, as it is never replayed
  for (const SequenceCall& of : call.calls()) bounds.sequences.max_keys = std::max(bounds.sequences.max_keys, of.length);
  return call_device(device.device(), &DeviceTable::bound_chunks, &bounds, call.args.stream);
}

Status search_keys(Call& call, const DeviceSequences& sequences, const DeviceRows& q, const DeviceAppend& append) {
  if (!searches(call)) return {};
  const DeviceSession& device = call.device();
  const size_t l = call.facts.idx;
  const bool has_blocks = call.blocks.sequences != nullptr;
  const PruningRecord& record = has_blocks ? pruning_of(call).append : pruning_of(call).decode;
  const int64_t n_lists = n_key_lists(call.layer(), call.session.options.pruning);
  const bool has_begun = call.task == nullptr;  // a planned step has bounded chunks before its first layer
  if (!has_begun) TANDEM_TRY(bound_chunks(call, sequences));
  DeviceSearch search = make_search(call.session.terms(), l, record);
  search.layer = &device.layer(l, false);
  search.pages = device.pages(l);
  search.sequences = has_blocks ? call.blocks : sequences;
  search.q = q;
  search.n_bounds = bounds_on(device, l, search.bounds);
  search.keeps_lists = has_blocks ? 0 : 1;
  search.workspace = device.work().search_space();
  search.keys = device.work().list_keys();
  search.granules = device.work().granules();
  search.n_granules = static_cast<int32_t>(most_granules(record, call.session.options.window_len));
  search.list_queries = has_blocks ? call.queries.max_q_len : 1;
  if (append.epoch != 0) search.append = &append;
  const auto n = static_cast<int32_t>(n_lists);
  call.lists = {search.keys, search.granules, n, n, 1, 1};
  TANDEM_TRY(call_device(device.device(), &DeviceTable::search, &search, call.args.stream));
  return has_begun || !keeps_lists(call) ? Status() : follow_searches(call.session, call.args.stream);
}

namespace {

// Counts the judged bytes. Each query block of an append has one search.
void count_judged(const Call& chunk, const SequenceCall& of) {
  const size_t l = chunk.facts.idx;
  const PruningRecord& record = record_of(chunk);
  const Layer windowed = window_layer(chunk.layer());
  SelectorSums& sums = chunk.session.selector_sums;
  CountedSearch search{record, windowed, chunk.session.options.pruning.shares_lists, !is_append(chunk), of.first_query, 1};
  if (keeps_lists(chunk)) {
    search.mark = of.window->kept_mark(l);
    const SearchCounts counts = count_search(search, &of.window->kept_stages(l));
    sums.n_refreshes += counts.n_stages;
    sums.judged_bytes += counts.judged_bytes;
    return;
  }
  const int64_t block_len = record.stages[0].query_block;
  for (; search.p0 < of.length; search.p0 += block_len) {
    KeptStages none;
    sums.judged_bytes += count_search(search, &none).judged_bytes;
  }
}

}  // namespace

void commit_search(const Call& chunk, const SequenceCall& of) {
  if (follows_patterns(chunk)) return commit_patterns(chunk, of);
  if (!chunk.facts.policy.names_keys() || chunk.args.speculative) return;
  const size_t l = chunk.facts.idx;
  const int64_t n_bounded = keeps_lists(chunk) ? of.first_query : of.length;
  of.state->named_end = of.length;
  of.state->on_device = NamedOnDevice::kAll;
  if (!searches(chunk)) return;  // no chunk got bounds
  of.state->on_device = keeps_lists(chunk) ? NamedOnDevice::kKept : NamedOnDevice::kGone;
  of.window->set_bounded(l, std::max(of.window->bounded(l), n_bounded));
  count_judged(chunk, of);
}

}  // namespace tandem
