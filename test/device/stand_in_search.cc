// SPDX-License-Identifier: MIT
// bound_chunks() and search(): the plain search (device/plain_search.h) over the contents of device memory.
#include <algorithm>
#include <limits>
#include <vector>

#include "device/plain_search.h"
#include "device/stand_in_call.h"
#include "reference/stored_row.h"
#include "tandem/pruning.h"

namespace stand_in {
namespace {

using namespace tandem;
using test::PlainList;
using test::PlainSearch;
using test::Row;

constexpr int64_t kMostBlockQueries = 64;

// The keys and bounds of one sequence.
struct SearchedRows {
  WindowRows window;
  const DeviceBounds* bounds;

  template <typename DeviceCall>
  SearchedRows(const DeviceCall& call, const DeviceSequence& sequence) : window(call, sequence), bounds(call.bounds) {}

  int64_t dim() const { return window.layer.k_head_dim; }
  Row key(int64_t token, int32_t kv_head) const {
    const int32_t type = window_layer(window.layer).k_type;
    const std::byte* scales = reference::has_groups(type) ? window.row(kPlaneKScales, kv_head, token) : nullptr;
    Row row(static_cast<size_t>(dim()));
    reference::load_row(type, window.row(kPlaneK, kv_head, token), scales, dim(), row.data());
    return row;
  }
  std::byte* bounds_row(const DeviceBounds& of, int64_t chunk, int32_t kv_head) const {
    const int32_t page_len = window.pages.page_len;
    const int64_t token = chunk << of.chunk_shift, bytes = 4 * dim();
    std::byte* head = of.data + window.table[token / page_len % window.table_len] + kv_head * of.head_stride;
    return on_device(head + (token % page_len >> of.chunk_shift) * bytes, bytes, "a row of bounds is no device memory");
  }
  Row load_bounds(const DeviceBounds& of, int64_t chunk, int32_t kv_head) const {
    Row row(static_cast<size_t>(2 * dim()));
    reference::load_all(TANDEM_BF16, bounds_row(of, chunk, kv_head), 2 * dim(), row.data());
    return row;
  }
  void bound(const DeviceBounds& of, int64_t chunk) const;
};

// Returns the nearest bf16 number that is not above x.
double bf16_below(double x) {
  const double nearest = reference::round_to(TANDEM_BF16, x);
  if (!(nearest > x)) return nearest;
  uint16_t code = 0;
  reference::store(TANDEM_BF16, nearest, &code);
  const bool is_zero = (code & 0x7fff) == 0, is_negative = code >> 15 != 0;
  code = static_cast<uint16_t>(is_zero ? 0x8001 : is_negative ? code + 1 : code - 1);
  return reference::load(TANDEM_BF16, &code);
}

// Writes the bounds of a chunk in all KV heads.
void SearchedRows::bound(const DeviceBounds& of, int64_t chunk) const {
  const auto n = static_cast<size_t>(dim());
  for (int32_t head = 0; head < window.layer.n_kv_heads; ++head) {
    Row least(n, std::numeric_limits<double>::infinity()), most(n, -std::numeric_limits<double>::infinity());
    for (int64_t token = chunk << of.chunk_shift; token < (chunk + 1) << of.chunk_shift; ++token) {
      const Row row = key(token, head);
      for (size_t d = 0; d < n; ++d) {
        least[d] = std::min(row[d], least[d]);
        most[d] = std::max(row[d], most[d]);
      }
    }
    Row both(2 * n);
    for (size_t d = 0; d < n; ++d) {
      both[d] = bf16_below(least[d]);
      both[n + d] = -bf16_below(-most[d]);
    }
    reference::store_all(TANDEM_BF16, both.data(), 2 * dim(), bounds_row(of, chunk, head));
  }
}

void check_bounds(const DeviceBounds* bounds, int32_t n_bounds) {
  require(n_bounds >= 0 && n_bounds <= kMostSearchStages, "bounds of more lengths than a search has");
  for (int32_t i = 0; i < n_bounds; ++i) {
    require(bounds[i].data != nullptr && bounds[i].head_stride > 0, "bounds that are nowhere");
    require(bounds[i].chunk_shift >= 0 && bounds[i].chunk_shift <= 8, "bounds of chunks that there are not");
  }
}

void check_stage(const DeviceSearch& call, const DeviceSearchStage& stage) {
  require(stage.judge >= TANDEM_JUDGE_DESCENT && stage.judge <= TANDEM_JUDGE_EXACT, "a judge that there is not");
  require(stage.chunk_shift >= 0 && stage.chunk_shift <= 8 && stage.interval >= 1, "a stage of no chunks or no interval");
  require(stage.keep_len > 0 && stage.keep_len % (int64_t{stage.plus_next != 0 ? 2 : 1} << stage.chunk_shift) == 0,
          "keep_len is no multiple of chunks");
  require(stage.most_kept == stage.keep_len >> stage.chunk_shift, "a list has not as much room as its stage keeps");
  require(call.keeps_lists == 0 || (stage.lists_at >= 0 && stage.lists_at % 8 == 0), "lists begin where they cannot");
  require(call.sink_len % (int64_t{1} << stage.chunk_shift) == 0, "the sinks end within a chunk");
  const int64_t overlap = call.keeps_lists != 0 ? stage.interval - 1 : 0;
  require(call.window_len >= (int64_t{2} << stage.chunk_shift) + overlap, "the window is shorter than a stage wants");
  if (stage.judge != TANDEM_JUDGE_BOUNDS) return;
  require(stage.bounds_idx >= 0 && stage.bounds_idx < call.n_bounds, "a stage judges by bounds that there are not");
  require(call.bounds[stage.bounds_idx].chunk_shift == stage.chunk_shift, "a stage has bounds of another length");
}

int32_t n_lists_of(const DeviceSearch& call) { return call.shares_lists != 0 ? 1 : call.layer->n_kv_heads; }

void check_block(const DeviceSearch& call, const DeviceSequence& block) {
  require(block.begin == 0 && block.n_after == 0, "a block's keys are not all in the window");
  require(block.end <= call.most_keys, "a block has more keys than the work space is for");
  require(block.q_len <= (call.keeps_lists != 0 ? 1 : kMostBlockQueries), "a block has too many queries");
  require(block.bounded >= 0 && block.first_list >= 0, "a block has bounds of fewer tokens than none, or lists before all");
  require(call.keeps_lists == 0 || block.kept_mark != 0, "a block's mark is that of no list");
  check_table(call.sequences, block, call.pages.page_len);
}

// Returns the address of a stage's list in the sequence's memory.
std::byte* kept_list(const DeviceSearch& call, const DeviceSequence& block, const DeviceSearchStage& stage, int32_t list) {
  const int64_t bytes = kept_list_bytes(stage.most_kept);
  require(reinterpret_cast<uintptr_t>(block.kept_lists) % 8 == 0 && block.kept_lists != nullptr, "lists are kept nowhere");
  require(list < n_lists_of(call), "a list that there is not");
  return on_device(block.kept_lists + stage.lists_at + list * bytes, bytes, "kept lists are no device memory");
}

// Loads the lists. The chunks of a list that was never made, or has another mark, may be anything.
std::vector<PlainList> load_lists(const DeviceSearch& call, const DeviceSequence& block, int32_t list) {
  std::vector<PlainList> lists(static_cast<size_t>(call.n_stages));
  for (size_t i = 0; call.keeps_lists != 0 && i < lists.size(); ++i) {
    const std::byte* from = kept_list(call, block, call.stages[i], list);
    lists[i].head = *reinterpret_cast<const KeptList*>(from);
    if (lists[i].head.mark != block.kept_mark) continue;
    require(lists[i].head.n >= 0 && lists[i].head.n <= call.stages[i].most_kept, "a kept list has too many chunks");
    const auto* chunks = reinterpret_cast<const int32_t*>(from + sizeof(KeptList));
    lists[i].chunks.assign(chunks, chunks + lists[i].head.n);
  }
  return lists;
}

void store_lists(const DeviceSearch& call, const DeviceSequence& block, int32_t list, const std::vector<PlainList>& lists) {
  for (size_t i = 0; call.keeps_lists != 0 && i < lists.size(); ++i) {
    if (!lists[i].has_run) continue;
    std::byte* to = kept_list(call, block, call.stages[i], list);
    *reinterpret_cast<KeptList*>(to) = lists[i].head;
    std::copy(lists[i].chunks.begin(), lists[i].chunks.end(), reinterpret_cast<int32_t*>(to + sizeof(KeptList)));
  }
}

PlainSearch plain_search(const DeviceSearch& call, const DeviceSequence& block, const SearchedRows& rows) {
  PlainSearch search;
  search.stages.assign(call.stages, call.stages + call.n_stages);
  search.sink_len = call.sink_len;
  search.window_len = call.window_len;
  search.shares_lists = call.shares_lists != 0;
  search.keeps_lists = call.keeps_lists != 0;
  search.n_kv_heads = call.layer->n_kv_heads;
  search.group_size = call.layer->group_size;
  search.scale = static_cast<double>(call.layer->sm_scale);
  search.p0 = block.end - block.q_len;
  search.q_len = block.q_len;
  search.key = [&](int64_t token, int32_t kv_head) {
    require(token < block.end, "a search looks at a key behind the last");
    return rows.key(token, kv_head);
  };
  search.query = [&](int64_t query, int32_t head) {
    Row row(static_cast<size_t>(rows.dim()));
    const auto dim = static_cast<int32_t>(rows.dim());
    reference::load_all(call.q.dtype, row_at(call.q, block.first_row + query, head, dim, "q is no device memory"), dim,
                        row.data());
    return row;
  };
  search.bounds = [&](int32_t bounds_idx, int64_t chunk, int32_t kv_head) {
    return rows.load_bounds(call.bounds[bounds_idx], chunk, kv_head);
  };
  return search;
}

// Writes the key list of a block for attend(), once for each of attend()'s sequences that use it.
void write_keys(const DeviceSearch& call, const DeviceSequence& block, int32_t list, const PlainSearch& search,
                const std::vector<PlainList>& lists) {
  const int64_t at = (&block - call.sequences.sequences) * n_lists_of(call) + list;
  DeviceKeys keys = {static_cast<int32_t>(at * call.n_granules), 0, static_cast<int32_t>(search.window_begin()), 0};
  const int64_t* table = call.sequences.page_tables + block.table_begin;
  write_granules({table, block.table_len, call.pages.page_len, call.n_granules, call.granules + keys.first},
                 test::named_tokens(search, lists), &keys);
  const int32_t n_sequences = (block.q_len + call.list_queries - 1) / call.list_queries;
  for (int32_t i = 0; i < n_sequences; ++i)
    *on_device(call.keys + int64_t{block.first_list + i} * n_lists_of(call) + list, sizeof keys,
               "a key list is no device memory") = keys;
}

}  // namespace

// Returns so many bytes for each query block that a session which reserves too little is found out.
int64_t search_bytes(const DeviceSearch& call) {
  constexpr int64_t kOfBlock = 64 << 10;
  return kOfBlock * std::max(1, call.sequences.n_sequences);
}

void check(const DeviceBoundChunks& call) {
  check_sequences(call.sequences);
  check_pages(call.pages);
  check_bounds(call.bounds, call.n_bounds);
}

bool perform(const DeviceBoundChunks& call) {
  const DeviceSequence* sequences = read_sequences(call.sequences, -1);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    const DeviceSequence& sequence = sequences[i];
    check_table(call.sequences, sequence, call.pages.page_len);
    require(sequence.begin == 0 && sequence.bounded >= 0, "a sequence's keys are not all in the window");
    const SearchedRows rows(call, sequence);
    for (int32_t b = 0; b < call.n_bounds; ++b) {
      const DeviceBounds& bounds = call.bounds[b];
      const int64_t end = sequence.end >> bounds.chunk_shift;
      for (int64_t chunk = sequence.bounded >> bounds.chunk_shift; chunk < end; ++chunk) rows.bound(bounds, chunk);
    }
  }
  return true;
}

void check(const DeviceSearch& call) {
  check_sequences(call.sequences);
  check_pages(call.pages);
  check_bounds(call.bounds, call.n_bounds);
  require(call.n_stages >= 0 && call.n_stages <= kMostSearchStages, "a search has more stages than there may be");
  for (int32_t i = 0; i < call.n_stages; ++i) check_stage(call, call.stages[i]);
  require(call.sink_len >= 0 && call.list_queries > 0 && call.most_keys >= 0, "a negative length, or lists of no queries");
  on_device(call.workspace, search_bytes(call), "the work space is no device memory");
  const int64_t n_granules = int64_t{call.sequences.n_sequences} * n_lists_of(call) * call.n_granules;
  require(n_granules <= INT32_MAX, "more granules than a key list can point at");
  on_device(call.granules, n_granules * static_cast<int64_t>(sizeof(KeyGranule)), "granules are no device memory");
}

bool perform(const DeviceSearch& call) {
  note_largest(&counts.largest_search, call.sequences.n_sequences);
  const auto* workspace = static_cast<const std::byte*>(call.workspace);
  require(std::all_of(workspace, workspace + search_bytes(call), [](std::byte b) { return b == std::byte{0}; }),
          "the work space is not zero");
  const DeviceSequence* blocks = read_sequences(call.sequences, -1);
  for (int32_t b = 0; b < call.sequences.n_sequences; ++b) {
    const DeviceSequence& block = blocks[b];
    if (block.q_len == 0) continue;
    check_block(call, block);
    const SearchedRows rows(call, block);
    const PlainSearch search = plain_search(call, block, rows);
    for (int32_t list = 0; list < n_lists_of(call); ++list) {
      std::vector<PlainList> lists = load_lists(call, block, list);
      test::search_list(search, list, block.kept_mark, &lists);
      store_lists(call, block, list, lists);
      write_keys(call, block, list, search, lists);
    }
    for (int32_t i = 0; call.keeps_lists != 0 && i < call.n_bounds; ++i)
      if (const int64_t n = search.p0 >> call.bounds[i].chunk_shift; n > 0) rows.bound(call.bounds[i], n - 1);
  }
  return true;
}

}  // namespace stand_in
