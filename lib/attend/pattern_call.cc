// SPDX-License-Identifier: MIT
#include "lib/attend/pattern_call.h"

#include <algorithm>
#include <utility>

#include "lib/attend/device_launch.h"
#include "lib/attend/searched_keys.h"
#include "lib/machine/device_status.h"
#include "lib/tables/planes.h"

namespace tandem {
namespace {

const PatternsOfLayer& patterns_of(const Call& call) { return call.session.options.patterns[call.facts.idx]; }

constexpr int64_t kEntriesOfHead = sizeof(DeviceHeadPattern) / sizeof(DeviceKeys);
static_assert(sizeof(DeviceHeadPattern) % sizeof(DeviceKeys) == 0);

bool is_append(const Call& chunk) { return !chunk.calls().empty() && chunk.calls()[0].is_append; }

// Returns the layer with one query head for each KV head.
Layer one_of_group(Layer layer) {
  layer.n_q_heads = layer.n_kv_heads;
  layer.group_size = 1;
  return layer;
}

int32_t n_launches(const PatternsOfLayer& patterns, const Layer& layer) {
  return patterns.groups_are_alike ? 1 : layer.group_size;
}

// Returns the number of queries of a part.
int64_t part_len(const Call& chunk) {
  const Device& device = chunk.device().device();
  const DeviceRows q = attended_q(append_of(chunk, {}));
  const int64_t most_rows = device.table->most_list_rows(device.self, &chunk.device().layer(chunk.facts.idx, false), &q);
  const int64_t of_query = chunk.layer().group_size / n_launches(patterns_of(chunk), chunk.layer());  // rows
  return std::clamp<int64_t>(most_rows / of_query, 1, kPatternBlock);
}

// Calls visit(i, block, t, n) for each part. i: its sequence in the chunk. block: the first query of its block. t: its first
// query. n: its number of queries.
template <typename Visit>
void for_parts(const Call& chunk, Visit visit) {
  const int64_t of_part = part_len(chunk);
  for (size_t i = 0; i < chunk.calls().size(); ++i) {
    const int64_t q_len = chunk.calls()[i].q_len;
    for (int64_t block = 0; block < q_len; block += kPatternBlock)
      for (int64_t t = block; t < std::min(q_len, block + kPatternBlock); t += of_part)
        visit(i, block, t, std::min({of_part, q_len - t, block + kPatternBlock - t}));
  }
}

SinksAndRange keys_of_block(const HeadPattern& head, int64_t first_query) {
  return {!head.has(TANDEM_PATTERN_A_SHAPE), head.sink_len, first_query + 1 - head.window_len};
}

// Makes the list of the keys from resident_begin on. The host attends earlier keys.
DeviceKeys list_of(const SinksAndRange& keys, int64_t first_granule, int64_t resident_begin) {
  const int64_t n_gone = std::min(keys.n_units, resident_begin / kPatternUnit);
  DeviceKeys list;
  list.first = static_cast<int32_t>(first_granule + n_gone);
  list.n = static_cast<int32_t>(keys.n_units - n_gone);
  list.begin = static_cast<int32_t>(std::max(keys.begin, resident_begin));
  return list;
}

// Writes granules for the first n_units units of each sequence, as far as the window has their keys.
void write_granules(const Call& chunk, int64_t n_units, KeyGranule* to) {
  for (const SequenceCall& of : chunk.calls())
    for (int64_t unit = 0; unit < n_units; ++unit, ++to) {
      *to = {};
      const int64_t token = unit * kPatternUnit, n_gone = std::clamp<int64_t>(of.resident_begin - token, 0, kPatternUnit);
      if (token >= of.length || n_gone == kPatternUnit) continue;
      to->token = static_cast<int32_t>(token);
      to->keys = (0xffu << n_gone) & 0xffu;
      to->page = chunk.device().page_offset(chunk.whole_layer != nullptr ? chunk.page_of_whole_layer(token)
                                                                         : of.window->page_of(token));
    }
}

constexpr uint32_t kKnownToDevices =
    TANDEM_PATTERN_FULL | TANDEM_PATTERN_A_SHAPE | TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE;

int64_t n_bands_of(const HeadPattern& head) {
  return head.has(TANDEM_PATTERN_VERTICAL_SLASH) ? std::max<int64_t>(1, ceil_div(head.slash_len, kPatternBand)) : 0;
}

DeviceHeadPattern on_device(const HeadPattern& head) {
  DeviceHeadPattern to;
  to.kinds = head.kinds;
  to.n_tokens = static_cast<int32_t>(head.vertical_len);
  to.n_bands = static_cast<int32_t>(n_bands_of(head));
  to.n_blocks = static_cast<int32_t>(head.n_blocks);
  to.sink_len = head.sink_len;
  to.window_len = head.window_len;
  return to;
}

// Returns the most granules of a key list: units before a query block's window, in a sequence of n_tokens.
int64_t most_units(const PatternsOfLayer& patterns, int64_t n_tokens) {
  constexpr int64_t kOfBand = ceil_div(kPatternBlock + kPatternBand - 1, kPatternUnit) + 1;
  int64_t most = 0;
  for (const HeadPattern& head : patterns.heads)
    most = std::max(most, pattern_units(head.sink_len) + head.vertical_len + n_bands_of(head) * kOfBand +
                              head.n_blocks * (kPatternKeyBlock / kPatternUnit));
  return std::min(most, pattern_units(n_tokens));
}

// Returns the most keys of a sequence in lists, where the longest sequence has n_tokens.
int64_t most_keys_of(const PolicyOptions& options, int64_t n_tokens) {
  return std::max(most_searched(options), n_tokens > options.window_len ? whole_layer_tokens(n_tokens) : 0);
}

PatternChoices choices_of(int64_t most_keys, int64_t most_queries) { return {most_keys, most_queries, kPatternBlock}; }

// Returns where a block's range begins, if its first query is token p0 (lib/tables/pattern_lists.h).
int64_t range_begin(const HeadPattern& head, int64_t p0) {
  if (head.has(TANDEM_PATTERN_FULL)) return 0;
  int64_t begin = p0;
  if (head.has(TANDEM_PATTERN_A_SHAPE)) begin = std::clamp<int64_t>(p0 + 1 - head.window_len, 0, begin);
  if (head.has(TANDEM_PATTERN_BLOCK_SPARSE)) begin = std::min(begin, p0 / kPatternKeyBlock * kPatternKeyBlock);
  return begin;
}

DeviceLists lists_of(const Call& chunk, const std::byte* place, int64_t n_lists) {
  DeviceLists lists;
  lists.keys = reinterpret_cast<const DeviceKeys*>(place);
  lists.granules = reinterpret_cast<const KeyGranule*>(lists.keys + n_lists);
  lists.n_heads = lists.per_sequence = chunk.layer().n_kv_heads;
  lists.has_granules = patterns_of(chunk).most_sink_units() > 0 ? 1 : 0;
  return lists;
}

}  // namespace

Status check_patterns(const SessionCore& core, const SessionLayer& layer) {
  if (!layer.policy.follows_patterns) return {};
  const char* why = nullptr;
  for (const HeadPattern& head : core.options.patterns[layer.idx].heads)
    if ((head.kinds & ~kKnownToDevices) != 0) why = "a pattern that the CPU alone follows";
  if (core.options.patterns[layer.idx].max_distance > 0) why = "patterns.max_distance, which the CPU alone keeps to";
  if (layer.layer.sinks != nullptr) why = "learned sinks, with which the CPU alone follows head patterns";
  if (layer.layer.group_size > kMostListRows) why = "more than 64 query heads to a KV head";
  if (why == nullptr) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "q.device_type", "q is in device memory, and layer %zu has policy \"%s\" and %s",
              layer.idx, layer.policy.name, why);
}

bool makes_lists(const Call& chunk) {
  return follows_patterns(chunk) && is_append(chunk) && !patterns_of(chunk).are_known_ahead();
}

int64_t n_pattern_parts(const Call& chunk) {
  int64_t n = 0;
  if (follows_patterns(chunk) && is_append(chunk)) for_parts(chunk, [&](size_t, int64_t, int64_t, int64_t) { ++n; });
  return n;
}

void describe_parts(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences, int64_t n_between) {
  if (!is_append(chunk)) return;
  const auto n_before = std::ssize(chunk.calls()) + n_between;
  DeviceSequence* const first = sequences + n_before;
  DeviceSequence* part = first;
  int64_t longest = 0;
  for_parts(chunk, [&](size_t i, int64_t, int64_t t, int64_t n) {
    const SequenceCall& of = chunk.calls()[i];
    if (t == 0) sequences[i].first_list = static_cast<int32_t>(part - first);
    *part = sequences[i];
    part->q_len = static_cast<int32_t>(n);
    part->first_row += static_cast<int32_t>(t);
    part->begin = 0;
    part->end = of.first_query + t + n;
    part->position = of.sequence->position(of.first_query + t);
    longest = std::max(longest, n);
    ++part;
  });
  chunk.blocks = chunk.queries = on_device;
  chunk.queries.sequences += n_before;
  chunk.queries.n_sequences = static_cast<int32_t>(part - first);
  chunk.queries.max_q_len = static_cast<int32_t>(longest);
}

DeviceLists pattern_lists_at(const Call& chunk, const std::byte* place, int64_t n_sequences) {
  if (makes_lists(chunk)) return {};
  if (is_append(chunk)) {
    const int64_t of_part = int64_t{chunk.layer().n_kv_heads} * n_launches(patterns_of(chunk), chunk.layer());
    return lists_of(chunk, place, n_pattern_parts(chunk) * of_part);
  }
  if (!patterns_of(chunk).narrows_decode()) return {};
  return lists_of(chunk, place, n_sequences * chunk.layer().n_kv_heads);
}

int64_t describe_pattern_lists(const Call& chunk, DeviceKeys* to, int64_t n_sequences) {
  const PatternsOfLayer& patterns = patterns_of(chunk);
  const Layer& layer = chunk.layer();
  const int64_t n_units = patterns.most_sink_units();
  if (makes_lists(chunk)) {
    auto* const heads = reinterpret_cast<DeviceHeadPattern*>(to);
    std::transform(patterns.heads.begin(), patterns.heads.end(), heads, on_device);
    return std::ssize(patterns.heads) * kEntriesOfHead;
  }
  DeviceKeys* list = to;
  if (is_append(chunk)) {
    for (int32_t g = 0; g < n_launches(patterns, layer); ++g)
      for_parts(chunk, [&](size_t i, int64_t block, int64_t, int64_t) {
        for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
          const HeadPattern& head = patterns.heads[static_cast<size_t>(h * layer.group_size + g)];
          *list++ = list_of(keys_of_block(head, chunk.calls()[i].first_query + block), static_cast<int64_t>(i) * n_units, 0);
        }
      });
  } else {
    if (!patterns.narrows_decode()) return 0;
    for (size_t i = 0; i < chunk.calls().size(); ++i)
      for (const DecodeKeys& head : patterns.decode)
        *list++ = list_of(keys_of_query(head, chunk.calls()[i].first_query), static_cast<int64_t>(i) * n_units,
                          chunk.calls()[i].resident_begin);
    std::fill(list, to + n_sequences * layer.n_kv_heads, DeviceKeys());
    list = to + n_sequences * layer.n_kv_heads;
  }
  write_granules(chunk, n_units, reinterpret_cast<KeyGranule*>(list));
  return list - to + std::ssize(chunk.calls()) * n_units;
}

namespace {

// Reserves the memory with which the device makes the lists of a launch.
void reserve_lists(const SizeTerms& terms, const CallShape& shape, int64_t n_blocks, int64_t n_parts, int64_t most_queries,
                   Reservation* needs) {
  const Layer& layer = *shape.layer;
  const int64_t n_sequences = std::ssize(shape.sequences), most_keys = most_keys_of(terms.options, shape.longest());
  DevicePatterns lists;
  lists.layer = &layer;
  lists.pages.page_len = kDevicePageLen;
  lists.sequences.n_sequences = static_cast<int32_t>(n_sequences);
  lists.sequences.max_q_len = static_cast<int32_t>(most_queries);
  lists.sequences.max_keys = most_keys;
  lists.kinds = terms.options.patterns[shape.layer_idx].kinds;
  needs->search_bytes = std::max(needs->search_bytes, terms.device->table->pattern_bytes(terms.device->self, &lists));
  const int64_t n_words = choices_of(most_keys, most_queries).n_words() * n_sequences * layer.n_q_heads;
  needs->block_list_bytes = std::max(needs->block_list_bytes, n_words * static_cast<int64_t>(sizeof(uint32_t)));
  needs->n_lists = std::max(needs->n_lists, n_parts * layer.n_kv_heads);
  const int64_t of_list = most_units(terms.options.patterns[shape.layer_idx], most_keys);
  needs->n_granules = std::max(needs->n_granules, (n_blocks + n_sequences) * layer.n_kv_heads * of_list);
  needs->add_lists(layer.n_q_heads * kEntriesOfHead);
}

}  // namespace

int64_t pair_totals_bytes(const Patterns& patterns) {
  const auto is_known_ahead = [](const PatternsOfLayer& of) { return of.are_known_ahead(); };
  if (std::all_of(patterns.begin(), patterns.end(), is_known_ahead)) return 0;
  return std::ssize(patterns) * 2 * static_cast<int64_t>(sizeof(uint64_t));
}

void reserve_patterns(const SizeTerms& terms, const CallShape& shape, int64_t most_tokens, Reservation* needs) {
  const PatternsOfLayer& patterns = terms.options.patterns[shape.layer_idx];
  const int64_t n_sequences = std::ssize(shape.sequences);
  if (shape.max_q_len() == 1) return;
  const int64_t n_one_by_one = n_launches(patterns, *shape.layer);
  const Layer layer = n_one_by_one > 1 ? one_of_group(*shape.layer) : *shape.layer;
  const int64_t least_part = std::clamp<int64_t>(kMostListRows / layer.group_size, 1, kPatternBlock);
  const int64_t n_rows = std::min(shape.n_tokens(), most_tokens), n_blocks = n_rows / kPatternBlock + n_sequences;
  const int64_t n_parts = n_rows / least_part + n_blocks;
  needs->add_descriptors(n_parts, 0);
  if (!patterns.are_known_ahead())
    reserve_lists(terms, shape, n_blocks, n_parts, std::min({shape.max_q_len(), n_rows, kPatternChunk}), needs);
  else
    needs->add_lists(n_parts * layer.n_kv_heads * n_one_by_one + n_sequences * patterns.most_sink_units());
  // The part length is known once the call has its queries: from least_part queries to whole blocks. Work space is sized for
  // both.
  for (const auto& [n, q_len] : {std::pair(n_parts, least_part), {n_blocks, kPatternBlock}})
    needs->workspace_bytes = std::max(needs->workspace_bytes, workspace_bytes(*terms.device, layer, n, q_len));
}

namespace {

// Chooses keys for all query heads. *lists then serves to make the lists of each launch.
Status index_patterns(const Call& chunk, const DeviceAttend& window, DevicePatterns* lists) {
  const DeviceSession& device = chunk.device();
  const Layer& layer = chunk.layer();
  lists->layer = window.layer;
  lists->pages = window.pages;
  lists->sequences = chunk.blocks;
  for (const SequenceCall& of : chunk.calls()) lists->sequences.max_keys = std::max(lists->sequences.max_keys, of.length);
  lists->q = window.q;
  lists->heads = chunk.head_patterns;
  lists->kinds = patterns_of(chunk).kinds;
  lists->workspace = device.work().search_space();
  lists->choices = reinterpret_cast<uint32_t*>(device.work().block_lists());
  lists->head_step = layer.group_size;
  lists->n_lists = layer.n_kv_heads;
  lists->list_queries = static_cast<int32_t>(part_len(chunk));
  lists->keys = device.work().list_keys();
  lists->granules = device.work().granules();
  lists->n_granules =
      static_cast<int32_t>(most_units(patterns_of(chunk), most_keys_of(chunk.session.options, lists->sequences.max_keys)));
  lists->totals = pair_totals(chunk.session, chunk.facts.idx);
  return call_device(device.device(), &DeviceTable::index_patterns, lists, chunk.args.stream);
}

}  // namespace

// Launches each head of a group separately, as they attend different keys.
static Status attend_head_by_head(const Call& chunk, const DeviceAttend& window) {
  const Layer layer = one_of_group(*window.layer);
  const int32_t group = chunk.layer().group_size;
  const auto of_head = [&](DeviceRows rows, int32_t g) {
    rows.data = static_cast<std::byte*>(rows.data) + g * row_bytes(rows.dtype, rows.head_stride);
    rows.head_stride *= group;
    return rows;
  };
  DevicePatterns made;
  if (makes_lists(chunk)) TANDEM_TRY(index_patterns(chunk, window, &made));
  for (int32_t g = 0; g < group; ++g) {
    DeviceAttend one = window;
    one.layer = &layer;
    one.q = of_head(window.q, g);
    one.o = of_head(window.o, g);
    if (window.lse != nullptr) one.lse = window.lse + g * window.lse_head_stride;
    one.lse_head_stride = window.lse_head_stride * group;
    if (makes_lists(chunk)) {
      made.first_head = g;
      TANDEM_TRY(call_device(chunk.device().device(), &DeviceTable::list_patterns, &made, chunk.args.stream));
      one.lists = {made.keys, made.granules, made.n_lists, made.n_lists, 1, 1};
    } else {
      one.lists.keys += int64_t{g} * window.sequences.n_sequences * chunk.layer().n_kv_heads;
    }
    TANDEM_TRY(attend_window(chunk, one));
  }
  return {};
}

// Even after an error, the launches made so far have counted pairs, so readers must wait for them.
Status attend_patterns(const Call& chunk, const DeviceAttend& window) {
  if (!is_append(chunk) || patterns_of(chunk).groups_are_alike) return attend_window(chunk, window);
  Status attended = attend_head_by_head(chunk, window);
  if (!makes_lists(chunk)) return attended;
  Status followed = follow_searches(chunk.session, chunk.args.stream);
  return attended.ok() ? std::move(followed) : std::move(attended);
}

// Counts only the lists' ranges. The device counts the keys before them (DevicePatterns::totals).
static void count_ranges(const Call& chunk, const SequenceCall& of) {
  const int64_t key_bytes = plane_bytes(chunk.layer()).total();
  AttendedPairs pairs;
  for (int64_t t = of.first_query; t < of.length; t += kPatternBlock)
    for (const HeadPattern& head : patterns_of(chunk).heads) {
      const int64_t end = std::min(of.length, t + kPatternBlock), begin = range_begin(head, t);
      pairs.add(t, end, 0, begin);
      chunk.session.sums.resident_kv_bytes_read += (end - begin) * key_bytes;
    }
  chunk.facts.selector->count(pairs);
}

void commit_patterns(const Call& chunk, const SequenceCall& of) {
  const PatternsOfLayer& patterns = patterns_of(chunk);
  if (makes_lists(chunk)) {
    of.state->on_device = NamedOnDevice::kGone;
    of.state->named_end = of.length;
    return count_ranges(chunk, of);
  }
  of.state->on_device = NamedOnDevice::kByPattern;
  of.state->named_end = of.length;
  of.state->named_block = -1;
  const int64_t key_bytes = plane_bytes(chunk.layer()).total();
  const auto count = [&](const SinksAndRange& keys, int64_t end) {
    const int64_t n_host =
        std::min(keys.sink_end(), of.resident_begin) + std::max<int64_t>(0, of.resident_begin - keys.begin);
    chunk.session.sums.host_kv_bytes_read += n_host * key_bytes;
    chunk.session.sums.resident_kv_bytes_read += (keys.sink_end() + end - keys.begin - n_host) * key_bytes;
  };
  if (!is_append(chunk)) {
    for (const DecodeKeys& head : patterns.decode) count(keys_of_query(head, of.first_query), of.length);
    return;
  }
  AttendedPairs pairs;
  const int32_t n_launched = n_launches(patterns, chunk.layer()), n_lists = chunk.layer().n_kv_heads * n_launched;
  for (int64_t t = of.first_query; t < of.length; t += kPatternBlock)
    for (int32_t h = 0; h < n_lists; ++h) {
      const SinksAndRange keys = keys_of_block(patterns.of_list(h), t);
      const int64_t end = std::min(of.length, t + kPatternBlock);
      for (int32_t g = 0; g < chunk.layer().n_q_heads / n_lists; ++g) pairs.add(t, end, keys.sink_end(), keys.begin);
      count(keys, end);
    }
  chunk.facts.selector->count(pairs);
  of.state->named_block = of.first_query + (of.q_len - 1) / kPatternBlock * kPatternBlock;
}

void list_pattern_keys(const SessionCore& core, const HeadOfSequence& head, const LayerState& state, KeptKeys* kept) {
  const auto l = static_cast<size_t>(head.layer_idx);
  const PatternsOfLayer& patterns = core.options.patterns[l];
  const int32_t q_head = head.kv_head * core.layers[l].layer.group_size + head.q_head_of_group;
  const SinksAndRange keys = state.named_block < 0
                                 ? keys_of_query(patterns.decode[static_cast<size_t>(head.kv_head)], state.named_end - 1)
                                 : keys_of_block(patterns.heads[static_cast<size_t>(q_head)], state.named_block);
  for (int64_t t = 0; t < keys.sink_end(); ++t) kept->put(t, 0.0f);
  for (int64_t t = keys.begin; t < state.named_end; ++t) kept->put(t, 0.0f);
}

}  // namespace tandem
