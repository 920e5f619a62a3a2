// SPDX-License-Identifier: MIT
// index_patterns() and list_patterns(): the plain choice (device/plain_patterns.h) over the contents of device memory.
#include <algorithm>
#include <vector>

#include "device/plain_patterns.h"
#include "device/stand_in_call.h"
#include "reference/stored_row.h"

namespace stand_in {
namespace {

using namespace tandem;
using test::ChosenKeys;
using test::PlainPattern;
using test::Row;

constexpr uint32_t kKnownKinds =
    TANDEM_PATTERN_FULL | TANDEM_PATTERN_A_SHAPE | TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE;

PatternChoices choices_of(const DevicePatterns& call) {
  return {call.sequences.max_keys, call.sequences.max_q_len, kPatternBlock};
}

const DeviceHeadPattern* heads_of(const DevicePatterns& call) {
  return on_device(call.heads, call.layer->n_q_heads * int64_t{sizeof(DeviceHeadPattern)},
                   "head patterns are no device memory");
}

uint32_t* choices_at(const DevicePatterns& call, int64_t sequence, int64_t head) {
  const int64_t n_words = choices_of(call).n_words();
  return on_device(call.choices + (sequence * call.layer->n_q_heads + head) * n_words, n_words * 4,
                   "choices are no device memory");
}

PlainPattern pattern_of(const DevicePatterns& call, const DeviceSequence& sequence, const WindowRows& rows, int32_t head) {
  const int32_t kv_head = head / call.layer->group_size, dim = call.layer->k_head_dim;
  PlainPattern pattern;
  pattern.head = heads_of(call)[head];
  pattern.end = sequence.end;
  pattern.q_len = sequence.q_len;
  pattern.scale = static_cast<double>(call.layer->sm_scale);
  pattern.key = [&rows, &sequence, kv_head, dim](int64_t token) {
    require(token < sequence.end, "an index looks at a key behind the last");
    const int32_t type = window_layer(rows.layer).k_type;
    const std::byte* scales = reference::has_groups(type) ? rows.row(kPlaneKScales, kv_head, token) : nullptr;
    Row row(static_cast<size_t>(dim));
    reference::load_row(type, rows.row(kPlaneK, kv_head, token), scales, dim, row.data());
    return row;
  };
  pattern.query = [&call, &sequence, head, dim](int64_t query) {
    Row row(static_cast<size_t>(dim));
    reference::load_all(call.q.dtype, row_at(call.q, sequence.first_row + query, head, dim, "q is no device memory"), dim,
                        row.data());
    return row;
  };
  return pattern;
}

void store_bits(const std::vector<int64_t>& chosen, uint32_t* words, int64_t n_words) {
  std::fill(words, words + n_words, 0u);
  for (const int64_t i : chosen) words[i / 32] |= 1u << i % 32;
}

std::vector<int64_t> load_bits(const uint32_t* words, int64_t n_words) {
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < n_words * 32; ++i)
    if ((words[i / 32] >> i % 32 & 1) != 0) chosen.push_back(i);
  return chosen;
}

ChosenKeys load_choices(const PatternChoices& layout, const PlainPattern& pattern, const uint32_t* words) {
  ChosenKeys chosen;
  if (pattern.has(TANDEM_PATTERN_VERTICAL_SLASH)) {
    chosen.tokens = load_bits(words, layout.token_words);
    chosen.bands = load_bits(words + layout.bands_at(), layout.band_words);
  }
  for (int64_t b = 0; b < pattern.n_blocks() && pattern.has(TANDEM_PATTERN_BLOCK_SPARSE); ++b)
    chosen.key_blocks.push_back(load_bits(words + layout.blocks_at() + b * layout.block_words, layout.block_words));
  return chosen;
}

void check_sequence(const DevicePatterns& call, const DeviceSequence& sequence) {
  check_table(call.sequences, sequence, call.pages.page_len);
  require(sequence.begin == 0 && sequence.n_after == 0, "a sequence's keys are not all in the window");
  require(sequence.q_len <= call.sequences.max_q_len && sequence.end <= call.sequences.max_keys,
          "a sequence is longer than the call says");
}

// Calls visit(index of the sequence, sequence, its keys) for each sequence that has queries.
template <typename Visit>
void for_sequences(const DevicePatterns& call, Visit visit) {
  const DeviceSequence* sequences = read_sequences(call.sequences, -1);
  for (int32_t s = 0; s < call.sequences.n_sequences; ++s) {
    if (sequences[s].q_len == 0) continue;
    check_sequence(call, sequences[s]);
    visit(s, sequences[s], WindowRows(call, sequences[s]));
  }
}

// The lists of one query head of a sequence.
struct HeadLists {
  const DevicePatterns& call;
  const DeviceSequence& sequence;
  int32_t sequence_idx, list;

  void write(const PlainPattern& pattern, const ChosenKeys& chosen, int64_t block) const;
};

// Writes the key lists of a block: one for each part of its queries.
void HeadLists::write(const PlainPattern& pattern, const ChosenKeys& chosen, int64_t block) const {
  const int64_t n_queries = std::min(kPatternBlock, pattern.q_len - block * kPatternBlock);
  const int64_t parts = (kPatternBlock + call.list_queries - 1) / call.list_queries;
  const int64_t first = sequence.first_list + block * parts, place = sequence.first_list / parts + sequence_idx + block;
  const std::vector<int64_t> tokens = test::named_tokens(pattern, chosen, block);
  DeviceKeys keys = {static_cast<int32_t>((place * call.n_lists + list) * call.n_granules), 0,
                     static_cast<int32_t>(test::range_begin(pattern, block)), 0};
  KeyGranule* const granules =
      on_device(call.granules + keys.first, call.n_granules * int64_t{sizeof(KeyGranule)}, "granules are no device memory");
  const int64_t* table = call.sequences.page_tables + sequence.table_begin;
  write_granules({table, sequence.table_len, call.pages.page_len, call.n_granules, granules}, tokens, &keys);
  for (int64_t p = 0; p * call.list_queries < n_queries; ++p)
    *on_device(call.keys + (first + p) * call.n_lists + list, sizeof keys, "a key list is no device memory") = keys;
  uint64_t* const totals = on_device(call.totals, 16, "totals are no device memory");
  totals[0] += static_cast<uint64_t>(n_queries) * tokens.size();
  totals[1] += tokens.size();
}

}  // namespace

// Returns so many bytes that a session which reserves too little is found out.
int64_t pattern_bytes(const DevicePatterns& call) { return call.sequences.max_keys * call.layer->n_q_heads; }

void check(const DevicePatterns& call) {
  check_sequences(call.sequences);
  check_pages(call.pages);
  require((call.kinds & ~kKnownKinds) == 0, "a pattern that the device does not know");
  require(call.sequences.max_q_len <= kPatternChunk, "more queries than a chunk has");
  on_device(static_cast<std::byte*>(call.workspace), pattern_bytes(call), "the work space is no device memory");
}

void index_patterns(const DevicePatterns& call) {
  const PatternChoices layout = choices_of(call);
  for_sequences(call, [&](int32_t s, const DeviceSequence& sequence, const WindowRows& rows) {
    for (int32_t head = 0; head < call.layer->n_q_heads; ++head) {
      const PlainPattern pattern = pattern_of(call, sequence, rows, head);
      require((pattern.head.kinds & ~call.kinds) == 0, "a head has a pattern that the call does not tell of");
      const ChosenKeys chosen = test::choose_keys(pattern);
      uint32_t* const words = choices_at(call, s, head);
      store_bits(chosen.tokens, words, layout.token_words);
      store_bits(chosen.bands, words + layout.bands_at(), layout.band_words);
      for (size_t b = 0; b < chosen.key_blocks.size(); ++b)
        store_bits(chosen.key_blocks[b], words + layout.blocks_at() + static_cast<int64_t>(b) * layout.block_words,
                   layout.block_words);
    }
  });
}

void list_patterns(const DevicePatterns& call) {
  const PatternChoices layout = choices_of(call);
  for_sequences(call, [&](int32_t s, const DeviceSequence& sequence, const WindowRows& rows) {
    for (int32_t list = 0; list < call.n_lists; ++list) {
      const int32_t head = call.first_head + list * call.head_step;
      require(head < call.layer->n_q_heads, "a list of a head that there is not");
      const PlainPattern pattern = pattern_of(call, sequence, rows, head);
      const ChosenKeys chosen = load_choices(layout, pattern, choices_at(call, s, head));
      for (int64_t block = 0; block < pattern.n_blocks(); ++block)
        HeadLists{call, sequence, s, list}.write(pattern, chosen, block);
    }
  });
}

}  // namespace stand_in
