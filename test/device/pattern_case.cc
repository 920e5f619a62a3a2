// SPDX-License-Identifier: MIT
#include "device/pattern_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace tandem::test {

namespace {

constexpr std::byte kNothing{0xff};
// counters at the begin of a work space; searches and patterns must leave them zero
constexpr int64_t kCounterBytes = 65536 * 4;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

std::vector<int64_t> load_bits(const uint32_t* words, int64_t n_words) {
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < n_words * 32; ++i)
    if ((words[i / 32] >> i % 32 & 1) != 0) chosen.push_back(i);
  return chosen;
}

// Returns an error text about the choice of n candidates, or "". Scores that differ by no more than rounding may take each
// other's place. Of equal scores the lower candidates must be chosen. are_rounded: the device may round equal numbers to
// different scores.
std::string check_chosen(const std::vector<double>& plain, int64_t n, const std::vector<int64_t>& chosen,
                         bool are_rounded = false) {
  const int64_t n_candidates = std::ssize(plain), n_wanted = std::min(n, n_candidates);
  const auto text = [](int64_t i) { return std::to_string(i); };
  if (std::ssize(chosen) != n_wanted) return text(std::ssize(chosen)) + " are chosen of " + text(n_wanted);
  if (n_wanted == 0) return "";
  if (chosen.back() >= n_candidates) return text(chosen.back()) + " is chosen and is none";
  std::vector<double> scores = plain;
  for (double& score : scores)
    if (std::isnan(score)) score = -INFINITY;
  std::vector<bool> is_chosen(scores.size());
  for (const int64_t i : chosen) is_chosen[static_cast<size_t>(i)] = true;
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  const double last = scores[order[static_cast<size_t>(n_wanted) - 1]];
  const double tolerance = std::isinf(last) ? 0.0 : 1e-4 * std::abs(last) + 1e-6;
  for (size_t at = 0; at < order.size(); ++at) {
    const size_t i = order[at];
    const std::string what = text(static_cast<int64_t>(i)) + " with " + std::to_string(scores[i]) + ", the last being " +
                             std::to_string(last) + ", is ";
    if (is_chosen[i] && scores[i] < last - tolerance) return what + "chosen";
    if (!is_chosen[i] && scores[i] > last + tolerance) return what + "not chosen";
    if (are_rounded && !std::isinf(scores[i])) continue;
    if (at > 0 && is_chosen[i] && !is_chosen[order[at - 1]] && scores[order[at - 1]] == scores[i])
      return what + "chosen, but not " + text(static_cast<int64_t>(order[at - 1])) + ", which is equal";
  }
  return "";
}

}  // namespace

// ---- what a call is given ----------------------------------------------------------------------------------------------

PatternCase::PatternCase(const OpenDevice& device, const PatternOptions& options)
    : MemoryImage(device), options_(options), random_(options.seed) {
  make_layer();
  make_pages();
  make_rows();
  make_parts();
  for (size_t s = 0; s < options_.sequences.size() && options_.has_keys; ++s) make_keys(s);
  make_queries();
  make_call();
  put_sequences();
}

void PatternCase::make_layer() {
  layer_.n_kv_heads = options_.n_kv_heads;
  layer_.group_size = options_.group_size;
  layer_.n_q_heads = options_.n_kv_heads * options_.group_size;
  layer_.k_head_dim = layer_.v_head_dim = options_.dim;
  layer_.k_type = layer_.v_type = options_.k_type;
  layer_.sm_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(options_.dim)));
  layer_.soft_cap = 3.0f;  // patterns ignore it
  rope_.n_pairs = options_.dim / 2;
  if (options_.is_rotated) layer_.rope = &rope_;
  row_bytes_ = plane_bytes(window_layer(layer_));
  call_.layer = &layer_;
}

// Each sequence has one page more than it needs.
void PatternCase::make_pages() {
  call_.pages.page_len = options_.page_len;
  for (int32_t p = 0; p < kPlanes; ++p) {
    plane_at_[p] = page_bytes_;
    call_.pages.head_stride[p] = row_bytes_.of[p] * options_.page_len;
    page_bytes_ += call_.pages.head_stride[p] * layer_.n_kv_heads;
  }
  page_bytes_ = round_up(page_bytes_, 256);
  if (!options_.has_keys) page_bytes_ = 256;
  for (const PatternSequence& sequence : options_.sequences) {
    table_begin_.push_back(pages_.size());
    const int64_t n_pages = (sequence.end + options_.page_len - 1) / options_.page_len + 1;
    for (int64_t i = 0; i < n_pages; ++i) pages_.push_back(static_cast<int64_t>(pages_.size()) * page_bytes_);
  }
  table_begin_.push_back(pages_.size());
  for (size_t i = pages_.size(); i > 1; --i)
    std::swap(pages_[i - 1], pages_[static_cast<size_t>(random_.integer(0, static_cast<int64_t>(i) - 1))]);
}

// A row that belongs to no sequence comes before the rows of each sequence.
void PatternCase::make_rows() {
  const int64_t parts = parts_of(kPatternBlock);
  for (const PatternSequence& sequence : options_.sequences) {
    first_row_.push_back(++n_rows_);
    first_list_.push_back(n_attended_);
    n_rows_ += sequence.q_len;
    const int64_t n_blocks = (sequence.q_len + kPatternBlock - 1) / kPatternBlock;
    if (n_blocks == 0) continue;
    n_attended_ += (n_blocks - 1) * parts + parts_of(sequence.q_len - (n_blocks - 1) * kPatternBlock);
    n_places_ = first_list_.back() / parts + std::ssize(first_list_) - 1 + n_blocks;
  }
}

void PatternCase::make_parts() {
  DeviceSequences& sequences = call_.sequences;
  sequences.n_sequences = static_cast<int32_t>(std::ssize(options_.sequences));
  for (const PatternSequence& each : options_.sequences) {
    sequences.max_keys = std::max(sequences.max_keys, each.end + options_.more_keys);
    sequences.max_q_len = std::max(sequences.max_q_len, each.q_len);
  }
  for (const DeviceHeadPattern& head : options_.heads) call_.kinds |= head.kinds;
  call_.n_granules =
      options_.n_granules > 0 ? options_.n_granules : static_cast<int32_t>(sequences.max_keys / kGranuleKeys + 1);
  call_.list_queries = options_.list_queries;
  const int64_t token_stride = int64_t{layer_.n_q_heads} * options_.dim + options_.q_gap;
  call_.q = {nullptr, options_.q_type, 0, token_stride, options_.dim};
  pool_ = add_part("pages", std::ssize(pages_) * page_bytes_);
  tables_ = add_part("page tables", std::ssize(pages_) * 8);
  sequences_ = add_part("sequences", sequences.n_sequences * int64_t{sizeof(DeviceSequence)});
  queries_ = add_part("queries", n_rows_ * token_stride * reference::element_bytes(options_.q_type));
  heads_ = add_part("heads", std::ssize(options_.heads) * int64_t{sizeof(DeviceHeadPattern)});
  choices_ = add_part("choices", sequences.n_sequences * int64_t{layer_.n_q_heads} * layout().n_words() * 4);
  lists_ = add_part("key lists", n_attended_ * layer_.n_q_heads * int64_t{sizeof(DeviceKeys)});
  granules_ = add_part("granules", n_places_ * layer_.n_q_heads * call_.n_granules * int64_t{sizeof(KeyGranule)});
  totals_ = add_part("totals", 2 * sizeof(uint64_t));
  workspace_ = add_part("work space", device_.table->pattern_bytes(device_.self, &call_));
  allocate(kNothing);
}

// Some tokens, and some distances, get much more weight than others. Neighbouring keys are alike.
void PatternCase::make_keys(size_t sequence) {
  const int64_t n = options_.sequences[sequence].end, n_heads = layer_.n_kv_heads, dim = options_.dim;
  const int32_t type = window_layer(layer_).k_type;
  keys_.emplace_back(static_cast<size_t>(n * n_heads * dim));
  Row centre(static_cast<size_t>(n_heads * dim)), made(static_cast<size_t>(dim));
  for (int64_t token = 0; token < n; ++token) {
    if (token % 24 == 0)
      for (double& x : centre) x = 0.7 * random_.normal();
    const double size = random_.chance(0.05) ? 2.0 : 0.7;
    for (int32_t head = 0; head < n_heads; ++head) {
      double* const x = keys_[sequence].data() + (token * n_heads + head) * dim;
      for (size_t d = 0; d < made.size(); ++d)
        made[d] = centre[static_cast<size_t>(head) * made.size() + d] + size * random_.normal();
      if (options_.period > 0 && token >= options_.period)
        std::copy_n(x - options_.period * n_heads * dim, dim, made.data());
      std::byte* planes[2];
      for (int32_t plane = 0; plane < 2; ++plane) planes[plane] = expected_.data() + key_at(sequence, token, head, plane);
      if (sequence == 0 && token == options_.nan_token) {
        std::fill_n(x, dim, NAN);
        continue;
      }
      reference::store_row(type, made.data(), dim, planes[0], planes[1]);
      reference::load_row(type, planes[0], planes[1], dim, x);
    }
  }
}

// Rows of no sequence are NaN.
void PatternCase::make_queries() {
  const int64_t dim = options_.dim, size = reference::element_bytes(options_.q_type);
  q_.assign(static_cast<size_t>(n_rows_ * layer_.n_q_heads * dim), NAN);
  for (size_t s = 0; s < options_.sequences.size(); ++s)
    for (int64_t query = 0; query < options_.sequences[s].q_len; ++query)
      for (int64_t head = 0; head < layer_.n_q_heads; ++head) {
        const int64_t row = first_row_[s] + query;
        double* const x = q_.data() + (row * layer_.n_q_heads + head) * dim;
        for (int64_t d = 0; d < dim; ++d) x[d] = 0.2 + 1.5 * random_.normal();
        if (options_.has_nan_query && query == options_.sequences[s].q_len - 1) x[3] = NAN;
        reference::round_row(options_.q_type, x, dim);
        const int64_t at = row * call_.q.token_stride + head * call_.q.head_stride;
        reference::store_all(options_.q_type, x, dim, expected_.data() + queries_.at + at * size);
      }
}

void PatternCase::make_call() {
  device_.upload(base_, expected_.data(), bytes_);
  const auto on_device = [&](const Part& part) { return base_ + part.at; };
  for (int32_t p = 0; p < kPlanes; ++p) call_.pages.planes[p] = base_ + pool_.at + pages_[0] + plane_at_[p];
  std::vector<int64_t> tables;
  // page 0 of the tables is the first sequence's first page
  for (const int64_t page : pages_) tables.push_back(page - pages_[0]);
  write(tables_.at, tables.data(), tables_.bytes);
  write(heads_.at, options_.heads.data(), heads_.bytes);
  call_.sequences.sequences = reinterpret_cast<const DeviceSequence*>(on_device(sequences_));
  call_.sequences.page_tables = reinterpret_cast<const int64_t*>(on_device(tables_));
  call_.q.data = on_device(queries_);
  call_.heads = reinterpret_cast<const DeviceHeadPattern*>(on_device(heads_));
  call_.choices = reinterpret_cast<uint32_t*>(on_device(choices_));
  call_.keys = reinterpret_cast<DeviceKeys*>(on_device(lists_));
  call_.granules = reinterpret_cast<KeyGranule*>(on_device(granules_));
  call_.totals = reinterpret_cast<uint64_t*>(on_device(totals_));
  call_.workspace = on_device(workspace_);
  const std::vector<std::byte> zeros(static_cast<size_t>(std::max(workspace_.bytes, totals_.bytes)));
  write(workspace_.at, zeros.data(), workspace_.bytes);
  write(totals_.at, zeros.data(), totals_.bytes);
}

void PatternCase::put_sequences() {
  std::vector<DeviceSequence> described(options_.sequences.size());
  for (size_t s = 0; s < described.size(); ++s) {
    DeviceSequence& to = described[s];
    to.end = options_.sequences[s].end;
    to.q_len = options_.sequences[s].q_len;
    to.first_row = static_cast<int32_t>(first_row_[s]);
    to.table_begin = static_cast<int32_t>(table_begin_[s]);
    to.table_len = static_cast<int32_t>(table_begin_[s + 1] - table_begin_[s]);
    to.position = to.end - to.q_len;
    to.first_list = static_cast<int32_t>(first_list_[s]);
  }
  write(sequences_.at, described.data(), sequences_.bytes);
}

void PatternCase::choose_any(double share) {
  std::vector<uint32_t> words(static_cast<size_t>(choices_.bytes / 4));
  for (uint32_t& word : words)
    for (int bit = 0; bit < 32; ++bit) word |= random_.chance(share) ? 1u << bit : 0u;
  write(choices_.at, words.data(), choices_.bytes);
}

// ---- what it leaves -----------------------------------------------------------------------------------------------------

int64_t PatternCase::key_at(size_t sequence, int64_t token, int32_t kv_head, int32_t plane) const {
  return pool_.at + pages_[table_begin_[sequence] + static_cast<size_t>(token / options_.page_len)] + plane_at_[plane] +
         kv_head * call_.pages.head_stride[plane] + token % options_.page_len * row_bytes_.of[plane];
}

PatternChoices PatternCase::layout() const { return {call_.sequences.max_keys, call_.sequences.max_q_len, kPatternBlock}; }

int64_t PatternCase::choices_at(size_t sequence, int32_t head) const {
  return choices_.at + (static_cast<int64_t>(sequence) * layer_.n_q_heads + head) * layout().n_words() * 4;
}

const uint32_t* PatternCase::choices(const std::vector<std::byte>& image, size_t sequence, int32_t head) const {
  return reinterpret_cast<const uint32_t*>(image.data() + choices_at(sequence, head));
}

PlainPattern PatternCase::pattern_of(size_t sequence, int32_t head) const {
  const int64_t n_heads = layer_.n_kv_heads, kv_head = head / layer_.group_size, dim = options_.dim;
  PlainPattern pattern;
  pattern.head = options_.heads[static_cast<size_t>(head)];
  pattern.end = options_.sequences[sequence].end;
  pattern.q_len = options_.sequences[sequence].q_len;
  pattern.scale = static_cast<double>(layer_.sm_scale);
  pattern.key = [=, this](int64_t token) {
    const auto first = keys_[sequence].begin() + (token * n_heads + kv_head) * dim;
    return Row(first, first + dim);
  };
  pattern.query = [=, this](int64_t query) {
    const auto first = q_.begin() + ((first_row_[sequence] + query) * layer_.n_q_heads + head) * dim;
    return Row(first, first + dim);
  };
  return pattern;
}

std::string PatternCase::check_choices(size_t sequence, int32_t head) const {
  const PlainPattern pattern = pattern_of(sequence, head);
  const PatternChoices of = layout();
  const uint32_t* const words = choices(found_, sequence, head);
  const std::string where = "sequence " + std::to_string(sequence) + ", head " + std::to_string(head) + ": ";
  if (pattern.has(TANDEM_PATTERN_VERTICAL_SLASH)) {
    const WeightSums sums = sum_weights(pattern);
    if (const std::string fault = check_chosen(sums.tokens, pattern.head.n_tokens, load_bits(words, of.token_words));
        !fault.empty())
      return where + "token " + fault;
    const std::vector<int64_t> bands = load_bits(words + of.bands_at(), of.band_words);
    if (const std::string fault = check_chosen(sums.bands, pattern.head.n_bands, bands, true); !fault.empty())
      return where + "band " + fault;
  }
  for (int64_t b = 0; b < pattern.n_blocks() && pattern.has(TANDEM_PATTERN_BLOCK_SPARSE); ++b) {
    const std::vector<int64_t> found = load_bits(words + of.blocks_at() + b * of.block_words, of.block_words);
    if (const std::string fault = check_chosen(score_key_blocks(pattern, b), pattern.head.n_blocks, found); !fault.empty())
      return where + "of block " + std::to_string(b) + ", key block " + fault;
  }
  return "";
}

// Makes the call twice, which must give the same bits.
std::string PatternCase::index() {
  DeviceError error;
  device_.must(device_.table->index_patterns(device_.self, &call_, nullptr, &error), error);
  download();
  for (size_t s = 0; s < options_.sequences.size(); ++s)
    for (int32_t head = 0; head < layer_.n_q_heads && options_.sequences[s].q_len > 0; ++head)
      if (const std::string fault = check_choices(s, head); !fault.empty()) return fault;
  accept(choices_.at, choices_.bytes);
  accept(workspace_.at + kCounterBytes, workspace_.bytes - kCounterBytes);
  if (const std::string fault = check_bytes(); !fault.empty()) return fault;
  device_.must(device_.table->index_patterns(device_.self, &call_, nullptr, &error), error);
  download();
  accept(workspace_.at + kCounterBytes, workspace_.bytes - kCounterBytes);
  const std::string fault = check_bytes();
  return fault.empty() ? "" : "again: " + fault;
}

ChosenKeys PatternCase::chosen_keys(const PlainPattern& pattern, size_t sequence, int32_t head) const {
  const PatternChoices of = layout();
  const uint32_t* const words = choices(expected_, sequence, head);
  ChosenKeys chosen;
  if (pattern.has(TANDEM_PATTERN_VERTICAL_SLASH)) {
    chosen.tokens = load_bits(words, of.token_words);
    chosen.bands = load_bits(words + of.bands_at(), of.band_words);
  }
  for (int64_t b = 0; b < pattern.n_blocks() && pattern.has(TANDEM_PATTERN_BLOCK_SPARSE); ++b)
    chosen.key_blocks.push_back(load_bits(words + of.blocks_at() + b * of.block_words, of.block_words));
  return chosen;
}

void PatternCase::expect_list(const PatternLists& lists, size_t sequence, int32_t list, uint64_t (&totals)[2]) {
  const int32_t head = lists.first_head + list * lists.head_step;
  const PlainPattern pattern = pattern_of(sequence, head);
  const ChosenKeys chosen = chosen_keys(pattern, sequence, head);
  const int64_t parts = parts_of(kPatternBlock);
  for (int64_t b = 0; b < pattern.n_blocks(); ++b) {
    const int64_t n_queries = std::min(kPatternBlock, pattern.q_len - b * kPatternBlock);
    const int64_t place = first_list_[sequence] / parts + static_cast<int64_t>(sequence) + b;
    const std::vector<int64_t> tokens = named_tokens(pattern, chosen, b);
    std::vector<KeyGranule> granules;
    for (const int64_t token : tokens) {
      const auto first = static_cast<int32_t>(token / kGranuleKeys * kGranuleKeys);
      const size_t page = table_begin_[sequence] + static_cast<size_t>(token / options_.page_len);
      if (granules.empty() || granules.back().token != first) granules.push_back({first, 0, pages_[page] - pages_[0]});
      granules.back().keys |= 1u << (token - first);
    }
    DeviceKeys keys;
    keys.first = static_cast<int32_t>((place * lists.n_lists + list) * call_.n_granules);
    keys.n = std::ssize(granules) > call_.n_granules ? -1 : static_cast<int32_t>(std::ssize(granules));
    keys.begin = static_cast<int32_t>(range_begin(pattern, b));
    const Part of_list = {"", granules_.at + keys.first * int64_t{sizeof(KeyGranule)},
                          call_.n_granules * int64_t{sizeof(KeyGranule)}};
    if (keys.n < 0)
      accept(of_list.at, of_list.bytes);
    else if (keys.n > 0)
      std::memcpy(expected_.data() + of_list.at, granules.data(), granules.size() * sizeof(KeyGranule));
    for (int64_t p = 0; p < parts_of(n_queries); ++p) {
      const int64_t entry = (first_list_[sequence] + b * parts + p) * lists.n_lists + list;
      std::memcpy(expected_.data() + lists_.at + entry * int64_t{sizeof keys}, &keys, sizeof keys);
    }
    totals[0] += static_cast<uint64_t>(n_queries * std::ssize(tokens));
    totals[1] += static_cast<uint64_t>(std::ssize(tokens));
  }
}

std::string PatternCase::list(const PatternLists& lists) {
  call_.first_head = lists.first_head;
  call_.head_step = lists.head_step;
  call_.n_lists = lists.n_lists;
  DeviceError error;
  device_.must(device_.table->list_patterns(device_.self, &call_, nullptr, &error), error);
  download();
  uint64_t totals[2];
  std::memcpy(totals, expected_.data() + totals_.at, sizeof totals);
  for (size_t s = 0; s < options_.sequences.size(); ++s)
    for (int32_t i = 0; i < lists.n_lists; ++i) expect_list(lists, s, i, totals);
  std::memcpy(expected_.data() + totals_.at, totals, sizeof totals);
  return check_bytes();
}

std::string PatternCase::describe() const {
  std::string text = "seed " + std::to_string(options_.seed) + ", K " + reference::dtype_name(options_.k_type) + ", q " +
                     reference::dtype_name(options_.q_type) + ", dim " + std::to_string(options_.dim) + ", heads " +
                     std::to_string(options_.n_kv_heads) + " x " + std::to_string(options_.group_size) + ", pages of " +
                     std::to_string(options_.page_len);
  for (const PatternSequence& each : options_.sequences)
    text += "; " + std::to_string(each.q_len) + " queries to " + std::to_string(each.end);
  for (const DeviceHeadPattern& head : options_.heads) text += ", kinds " + std::to_string(head.kinds);
  return text;
}

}  // namespace tandem::test
