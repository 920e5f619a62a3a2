// SPDX-License-Identifier: MIT
// Compares what calls over a SearchCase leave with what they should leave.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "device/kept_check.h"
#include "device/search_case.h"
#include "lib/model/dtype.h"
#include "reference/rounding.h"

namespace tandem::test {

namespace {

// Returns the bf16 number n_steps above x, or below.
double stepped(double x, int32_t n_steps) {
  uint16_t code = 0;
  reference::store(TANDEM_BF16, x, &code);
  const int32_t size = code & 0x7fff, place = (code >> 15 != 0 ? -size : size) + n_steps;
  code = static_cast<uint16_t>(place < 0 ? 0x8000 - place : place);
  return reference::load(TANDEM_BF16, &code);
}

std::string place_of(int64_t row, int64_t list) {
  return "block " + std::to_string(row) + ", list " + std::to_string(list) + ": ";
}

}  // namespace

std::string SearchCase::describe() const {
  char text[200];
  std::snprintf(text, sizeof text, "seed %llu: K %s, dim %d, %d KV heads of %d, pages of %d, %d stages%s%s%s",
                static_cast<unsigned long long>(options_.seed), find_dtype(options_.k_type)->name, options_.dim,
                options_.n_kv_heads, options_.group_size, options_.page_len, call_.n_stages,
                options_.is_rotated ? ", rotated" : "", options_.shares_lists ? ", shared lists" : "",
                options_.keeps_lists ? "" : ", lists of one call");
  return text;
}

// ---- bounds ------------------------------------------------------------------------------------------------------------

std::string SearchCase::check_bounds_row(size_t sequence, int64_t chunk, int32_t kv_head, int32_t bounds_idx) const {
  const int64_t len = int64_t{1} << call_.bounds[bounds_idx].chunk_shift;
  const auto dim = static_cast<size_t>(options_.dim);
  Row least(dim, INFINITY), most(dim, -INFINITY), found(2 * dim);
  for (int64_t token = chunk * len; token < (chunk + 1) * len; ++token) {
    const Row row = key(sequence, token, kv_head);
    for (size_t d = 0; d < dim; ++d) {
      if (std::isnan(row[d])) return "";
      least[d] = std::min(least[d], row[d]);
      most[d] = std::max(most[d], row[d]);
    }
  }
  reference::load_all(TANDEM_BF16, found_.data() + bounds_at(sequence, chunk, kv_head, bounds_idx), 2 * options_.dim,
                      found.data());
  for (size_t d = 0; d < dim; ++d) {
    const double low = found[d], high = found[dim + d];
    if (low <= least[d] && stepped(low, 2) > least[d] && high >= most[d] && stepped(high, -2) < most[d]) continue;
    char text[200];
    std::snprintf(text, sizeof text,
                  "bounds of chunk %lld of %lld tokens, sequence %zu, head %d, dim %zu: %g to %g instead of %g to %g",
                  static_cast<long long>(chunk), static_cast<long long>(len), sequence, kv_head, d, low, high, least[d],
                  most[d]);
    return text;
  }
  return "";
}

std::string SearchCase::check_bounds(size_t sequence, int64_t chunk, int32_t bounds_idx) {
  for (int32_t head = 0; head < layer_.n_kv_heads; ++head) {
    const std::string fault = check_bounds_row(sequence, chunk, head, bounds_idx);
    if (!fault.empty()) return fault;
    accept(bounds_at(sequence, chunk, head, bounds_idx), 4 * options_.dim);
  }
  return "";
}

// ---- key lists ---------------------------------------------------------------------------------------------------------

int64_t SearchCase::named_at(size_t nth, int32_t attended, int32_t list) const {
  const int64_t first = (options_.n_blocks - 1 - static_cast<int64_t>(nth)) * most_attended();
  return named_.at + ((first + attended) * n_lists() + list) * static_cast<int64_t>(sizeof(DeviceKeys));
}

// Checks a block without queries: its lists name nothing, or were not written.
std::string SearchCase::check_idle(size_t nth, int64_t end) {
  for (int32_t attended = 0; attended < most_attended(); ++attended)
    for (int32_t list = 0; list < n_lists(); ++list) {
      const int64_t at = named_at(nth, attended, list);
      if (std::memcmp(found_.data() + at, expected_.data() + at, sizeof(DeviceKeys)) == 0) continue;
      DeviceKeys keys;
      std::memcpy(&keys, found_.data() + at, sizeof keys);
      if (keys.n != 0 || keys.begin < end)
        return place_of(static_cast<int64_t>(nth), list) + "names keys, and has no queries";
      accept(at, sizeof keys);
    }
  return "";
}

std::string SearchCase::take_granules(const DeviceKeys& keys, size_t nth, std::vector<int64_t>* tokens) const {
  DeviceSequence block;
  std::memcpy(&block, expected_.data() + sequences_.at + static_cast<int64_t>(nth * sizeof block), sizeof block);
  int64_t before = -1;
  for (int32_t i = 0; i < keys.n; ++i) {
    KeyGranule granule;
    std::memcpy(&granule, found_.data() + granules_.at + (int64_t{keys.first} + i) * static_cast<int64_t>(sizeof granule),
                sizeof granule);
    if (granule.token % kGranuleKeys != 0 || granule.token <= before) return "granules are not in order";
    if (granule.token >= keys.begin || granule.keys >= 1u << kGranuleKeys) return "a granule is of tokens in the range";
    before = granule.token;
    const size_t page = static_cast<size_t>(block.table_begin) + static_cast<size_t>(granule.token / options_.page_len);
    if (granule.page != pages_[page] - pages_[0]) return "the page of a granule is not that of its tokens";
    for (int32_t bit = 0; bit < kGranuleKeys; ++bit)
      if ((granule.keys >> bit & 1) != 0) tokens->push_back(granule.token + bit);
  }
  return "";
}

// Reads the tokens that a key list names before its range. All of attend()'s sequences of the block must have the same list.
std::string SearchCase::take_keys(const PlainSearch& search, size_t nth, int32_t list, std::vector<int64_t>* tokens) {
  const int64_t own = static_cast<int64_t>(nth) * n_lists() + list, room = call_.n_granules;
  const auto n_attended = static_cast<int32_t>((search.q_len + list_queries() - 1) / list_queries());
  DeviceKeys keys;
  std::memcpy(&keys, found_.data() + named_at(nth, 0, list), sizeof keys);
  for (int32_t attended = 0; attended < n_attended; ++attended) {
    if (std::memcmp(found_.data() + named_at(nth, attended, list), &keys, sizeof keys) != 0)
      return "sequences of a block have different lists";
    accept(named_at(nth, attended, list), sizeof keys);
  }
  const bool has_all = search.places() == 0 && keys.begin == 0 && keys.n == 0;  // no stage exists: the range has all tokens
  for (int64_t token = 0; has_all && token < search.window_begin(); ++token) tokens->push_back(token);
  if (!has_all && keys.begin != search.window_begin())
    return "the range begins at " + std::to_string(keys.begin) + ", not at " + std::to_string(search.window_begin());
  if (keys.n < 0 || keys.n > room || keys.sliding_window != 0) return std::to_string(keys.n) + " granules";
  if (keys.first != own * room) return "the list is at granule " + std::to_string(keys.first);
  const std::string fault = take_granules(keys, nth, tokens);
  const auto bytes = static_cast<int64_t>(sizeof(KeyGranule));
  accept(granules_.at + own * room * bytes, room * bytes);
  return fault;
}

// n_open: tokens of chunks that a search with rounding may have kept in place of others.
std::string SearchCase::check_named(const PlainSearch& search, size_t nth, int32_t list, const std::vector<PlainList>& lists,
                                    int64_t n_open) {
  std::vector<int64_t> tokens, differing;
  if (const std::string fault = take_keys(search, nth, list, &tokens); !fault.empty()) return fault;
  const std::vector<int64_t> wanted = named_tokens(search, lists);
  std::set_symmetric_difference(tokens.begin(), tokens.end(), wanted.begin(), wanted.end(), std::back_inserter(differing));
  if (std::ssize(differing) <= 4 * n_open) return "";
  const bool is_wanted = std::binary_search(wanted.begin(), wanted.end(), differing[0]);
  return std::to_string(tokens.size()) + " tokens are named instead of " + std::to_string(wanted.size()) + ", and token " +
         std::to_string(differing[0]) + (is_wanted ? " is not" : " is");
}

// ---- stages ------------------------------------------------------------------------------------------------------------

PlainList SearchCase::load_list(const std::vector<std::byte>& from, size_t nth, size_t stage, int32_t list) const {
  PlainList loaded;
  const std::byte* const data = from.data() + list_at(nth, stage, list);
  std::memcpy(&loaded.head, data, sizeof(KeptList));
  if (loaded.head.n < 0 || loaded.head.n > call_.stages[stage].most_kept) return loaded;
  for (int32_t i = 0; i < loaded.head.n; ++i) {
    int32_t chunk = 0;
    std::memcpy(&chunk, data + sizeof(KeptList) + i * sizeof chunk, sizeof chunk);
    loaded.chunks.push_back(chunk);
  }
  return loaded;
}

// Checks the header of a list that a stage has made.
std::string SearchCase::check_run(const PlainSearch& search, size_t stage, const PlainList& found,
                                  const KeptList& wanted) const {
  const KeptList& head = found.head;
  if (head.mark == wanted.mark && head.places == wanted.places && head.ran_at == wanted.ran_at &&
      std::ssize(found.chunks) == head.n)
    return "";
  char text[200];
  std::snprintf(text, sizeof text, "stage %zu at token %lld: mark %u, places %x, ran_at %lld, %d chunks", stage,
                static_cast<long long>(search.p0), head.mark, head.places, static_cast<long long>(head.ran_at), head.n);
  return text;
}

// Checks each stage with the chunks that the device kept for the stage before it.
std::string SearchCase::check_stages(const PlainSearch& search, const SearchBlock& block, size_t nth, int32_t list) {
  std::vector<PlainList> lists(search.stages.size());
  int64_t before = -1;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (!search.is_there(i)) continue;
    lists[i] = load_list(expected_, nth, i, list);
    const PlainList* const parent = before < 0 ? nullptr : &lists[static_cast<size_t>(before)];
    const bool runs = stage_runs(search, i, lists[i].head, block.mark, parent != nullptr && parent->has_run);
    ++(runs ? counts_.n_stages_run : counts_.n_stages_kept);
    if (runs) {
      lists[i] = load_list(found_, nth, i, list);
      lists[i].has_run = true;
      std::string fault = check_run(search, i, lists[i], {block.mark, search.places(), search.p0});
      if (!fault.empty()) return fault;
      size_t n_open = 0;
      const Chunks candidates = find_candidates(search, i, before, parent == nullptr ? Chunks() : parent->chunks);
      counts_.n_judged += keeps_all(search, i, candidates) ? 0 : 1;
      fault = check_kept(search, i, list, candidates, lists[i].chunks, &n_open);
      ++(n_open == 0 ? counts_.n_strict : counts_.n_loose);
      if (!fault.empty()) return "stage " + std::to_string(i) + " at token " + std::to_string(search.p0) + ": " + fault;
      accept(list_at(nth, i, list), kept_list_bytes(search.stages[i].most_kept));
    }
    before = static_cast<int64_t>(i);
  }
  return check_named(search, nth, list, lists, 0);
}

// A search that keeps no lists shows only its final result, so only that is checked.
std::string SearchCase::check_unkept(const PlainSearch& search, size_t nth, int32_t list) {
  std::vector<PlainList> lists(search.stages.size());
  int64_t n_open = 0, before = -1;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (!search.is_there(i)) continue;
    const Chunks candidates =
        find_candidates(search, i, before, before < 0 ? Chunks() : lists[static_cast<size_t>(before)].chunks);
    lists[i].chunks = candidates;
    before = static_cast<int64_t>(i);
    ++counts_.n_stages_run;
    if (keeps_all(search, i, candidates)) continue;
    ++counts_.n_judged;
    const std::vector<ChunkScore> scores = judge_chunks(search, i, list, candidates);
    lists[i].chunks = add_next(search, i, keep_best(search, i, candidates, scores));
    n_open += std::ssize(find_right(candidates, scores, n_best(search.stages[i])).open) << search.stages[i].chunk_shift;
  }
  ++(n_open == 0 ? counts_.n_strict : counts_.n_loose);
  return check_named(search, nth, list, lists, n_open);
}

std::string SearchCase::check_block(const SearchBlock& block, size_t nth) {
  if (block.q_len == 0) return check_idle(nth, block.end);
  const PlainSearch search = plain_search(block, nth);
  for (int32_t list = 0; list < n_lists(); ++list) {
    const std::string fault =
        options_.keeps_lists ? check_stages(search, block, nth, list) : check_unkept(search, nth, list);
    if (!fault.empty()) return place_of(static_cast<int64_t>(nth), list) + fault;
  }
  for (int32_t i = 0; i < call_.n_bounds && options_.keeps_lists; ++i) {
    const int64_t n_complete = search.p0 >> call_.bounds[i].chunk_shift;
    if (n_complete == 0) continue;
    if (const std::string fault = check_bounds(block.sequence, n_complete - 1, i); !fault.empty()) return fault;
  }
  int64_t& n_bounded = n_bounded_[block.sequence];
  n_bounded = std::min(n_bounded, block.end);
  if (options_.keeps_lists && search.p0 <= n_bounded + 1) n_bounded = search.p0;
  return "";
}

// The lists of calls that keep none are unspecified afterwards.
std::string SearchCase::check_search(const std::vector<SearchBlock>& blocks) {
  download();
  for (size_t b = 0; b < blocks.size(); ++b)
    if (const std::string fault = check_block(blocks[b], b); !fault.empty()) return fault;
  accept(workspace_.at, workspace_.bytes);
  if (!options_.keeps_lists) accept(lists_.at, lists_.bytes);
  return check_bytes();
}

}  // namespace tandem::test
