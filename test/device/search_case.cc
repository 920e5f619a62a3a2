// SPDX-License-Identifier: MIT
#include "device/search_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace tandem::test {

namespace {

constexpr std::byte kNothing{0xff};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

void SearchCounts::include(const SearchCounts& more) {
  n_strict += more.n_strict;
  n_loose += more.n_loose;
  n_stages_run += more.n_stages_run;
  n_stages_kept += more.n_stages_kept;
  n_judged += more.n_judged;
}

// ---- arguments of a call -----------------------------------------------------------------------------------------------

SearchCase::SearchCase(const OpenDevice& device, const SearchOptions& options)
    : MemoryImage(device),
      options_(options),
      random_(options.seed),
      n_put_(options.lengths.size(), 0),
      n_bounded_(options.lengths.size(), 0) {
  make_layer();
  make_stages();
  make_pages();
  make_parts();
  for (size_t s = 0; s < options_.lengths.size(); ++s) make_keys(s);
  make_call();
}

void SearchCase::make_layer() {
  layer_.n_kv_heads = options_.n_kv_heads;
  layer_.group_size = options_.group_size;
  layer_.n_q_heads = options_.n_kv_heads * options_.group_size;
  layer_.k_head_dim = layer_.v_head_dim = options_.dim;
  layer_.k_type = layer_.v_type = options_.k_type;
  layer_.sm_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(options_.dim)));
  layer_.soft_cap = 3.0f;  // a search ignores it
  rope_.n_pairs = options_.dim / 2;
  if (options_.is_rotated) layer_.rope = &rope_;
  row_bytes_ = plane_bytes(window_layer(layer_));
  call_.layer = &layer_;
}

// Bounds are kept for each length that a stage judges by.
void SearchCase::make_stages() {
  const auto bounds_of = [&](int64_t chunk_len) {
    const int32_t shift = std::countr_zero(static_cast<uint64_t>(chunk_len));
    for (int32_t i = 0; i < call_.n_bounds; ++i)
      if (call_.bounds[i].chunk_shift == shift) return i;
    call_.bounds[call_.n_bounds].chunk_shift = shift;
    return call_.n_bounds++;
  };
  for (const PruningStage& from : options_.record.stages) {
    DeviceSearchStage& to = call_.stages[call_.n_stages++];
    to.judge = static_cast<int32_t>(from.judge);
    to.chunk_shift = std::countr_zero(static_cast<uint64_t>(from.chunk_len));
    to.interval = static_cast<int32_t>(from.interval);
    to.plus_next = from.plus_next ? 1 : 0;
    to.keep_len = from.keep_len;
    to.from_len = from.from_len;
    to.to_len = from.to_len;
    to.most_kept = static_cast<int32_t>(from.keep_len >> to.chunk_shift);
    to.lists_at = lists_bytes_;
    if (from.judge == Judge::kBounds) to.bounds_idx = bounds_of(from.chunk_len);
    lists_bytes_ += n_lists() * kept_list_bytes(to.most_kept) + 40;
  }
  lists_bytes_ = round_up(lists_bytes_, 256);
  for (const int32_t chunk_len : options_.more_bounds) bounds_of(chunk_len);
  call_.sink_len = options_.record.sink_len;
  call_.window_len = options_.record.window_len;
  call_.shares_lists = options_.shares_lists ? 1 : 0;
  call_.keeps_lists = options_.keeps_lists ? 1 : 0;
  call_.list_queries = list_queries();
}

// Planes come first, then bounds. Each sequence has one page more than it needs.
void SearchCase::make_pages() {
  call_.pages.page_len = options_.page_len;
  for (int32_t p = 0; p < kPlanes; ++p) {
    plane_at_[p] = page_bytes_;
    call_.pages.head_stride[p] = row_bytes_.of[p] * options_.page_len;
    page_bytes_ += call_.pages.head_stride[p] * layer_.n_kv_heads;
  }
  for (int32_t i = 0; i < call_.n_bounds; ++i) {
    of_page_[i] = page_bytes_;
    const int64_t n_rows = std::max(1, options_.page_len >> call_.bounds[i].chunk_shift);
    call_.bounds[i].head_stride = n_rows * 4 * options_.dim + 32;
    page_bytes_ += call_.bounds[i].head_stride * layer_.n_kv_heads;
  }
  page_bytes_ = round_up(page_bytes_, 256);
  for (const int64_t length : options_.lengths) {
    table_begin_.push_back(pages_.size());
    const int64_t n_pages = (length + options_.page_len - 1) / options_.page_len + 1;
    for (int64_t i = 0; i < n_pages; ++i) pages_.push_back(static_cast<int64_t>(pages_.size()) * page_bytes_);
  }
  table_begin_.push_back(pages_.size());
  for (size_t i = pages_.size(); i > 1; --i)
    std::swap(pages_[i - 1], pages_[static_cast<size_t>(random_.integer(0, static_cast<int64_t>(i) - 1))]);
}

// A list has granules enough for any tokens of the longest sequence.
void SearchCase::make_parts() {
  const int64_t longest = *std::max_element(options_.lengths.begin(), options_.lengths.end());
  const int64_t n_sequences = std::max<int64_t>(options_.n_blocks, std::ssize(options_.lengths));
  call_.n_granules = static_cast<int32_t>(longest / kGranuleKeys + 1);
  call_.most_keys = call_.sequences.max_keys = longest;
  call_.sequences.n_sequences = options_.n_blocks;
  call_.sequences.max_q_len = most_queries();
  pool_ = add_part("pages", std::ssize(pages_) * page_bytes_);
  tables_ = add_part("page tables", std::ssize(pages_) * 8);
  sequences_ = add_part("sequences", n_sequences * static_cast<int64_t>(sizeof(DeviceSequence)));
  const int64_t token_stride = int64_t{layer_.n_q_heads} * options_.dim + options_.q_gap;
  call_.q = {nullptr, options_.q_type, 0, token_stride, options_.dim};
  queries_ = add_part(
      "queries", int64_t{options_.n_blocks} * most_queries() * token_stride * reference::element_bytes(options_.q_type));
  lists_ = add_part("kept lists", options_.n_blocks * lists_bytes_);
  named_ = add_part("key lists",
                    int64_t{options_.n_blocks} * most_attended() * n_lists() * static_cast<int64_t>(sizeof(DeviceKeys)));
  granules_ = add_part("granules",
                       int64_t{options_.n_blocks} * n_lists() * call_.n_granules * static_cast<int64_t>(sizeof(KeyGranule)));
  workspace_ = add_part("work space", device_.table->search_bytes(device_.self, &call_));
  allocate(kNothing);
}

// Returns the distance from a token back to the token whose key it repeats. 0: its key is its own.
int64_t SearchCase::distance_to_repeated(int64_t token) const {
  const int64_t twin = options_.twin_distance;
  if (options_.period > 0 && token >= options_.period) return options_.period;
  return twin > 0 && token % (2 * twin) == twin ? twin : 0;
}

// Neighbouring keys are alike and some are large, so chunks differ for every judge.
void SearchCase::make_keys(size_t sequence) {
  const int64_t n = options_.lengths[sequence], n_heads = layer_.n_kv_heads, dim = options_.dim;
  keys_.emplace_back(static_cast<size_t>(n * n_heads * dim));
  if (keys_image_.empty()) keys_image_.assign(static_cast<size_t>(pool_.bytes), kNothing);
  Row centre(static_cast<size_t>(n_heads * dim));
  for (int64_t token = 0; token < n; ++token) {
    if (token % 24 == 0)
      for (double& x : centre) x = 0.7 * random_.normal();
    const double size = random_.chance(0.05) ? 2.0 : 0.7;
    for (int32_t head = 0; head < n_heads; ++head) {
      Row made(static_cast<size_t>(dim));
      for (size_t d = 0; d < made.size(); ++d)
        made[d] = centre[static_cast<size_t>(head) * made.size() + d] + size * random_.normal();
      make_key(sequence, token, head, made);
    }
  }
}

// Repeated keys have equal bits. The image has no bytes for keys that are NaN.
void SearchCase::make_key(size_t sequence, int64_t token, int32_t kv_head, const Row& made) {
  const int32_t type = window_layer(layer_).k_type;
  const int64_t repeated = distance_to_repeated(token), row = token * layer_.n_kv_heads + kv_head, dim = options_.dim;
  double* const x = keys_[sequence].data() + row * dim;
  std::byte* planes[2];
  for (int32_t plane = 0; plane < 2; ++plane) {
    const auto in_image = [&](int64_t of) { return keys_image_.data() + key_at(sequence, of, kv_head, plane) - pool_.at; };
    planes[plane] = in_image(token);
    if (repeated > 0) std::copy_n(in_image(token - repeated), row_bytes_.of[plane], planes[plane]);
  }
  if (repeated > 0) {
    std::copy_n(x - repeated * layer_.n_kv_heads * dim, dim, x);
  } else if (sequence == 0 && token >= options_.nan_begin && token < options_.nan_end) {
    std::fill_n(x, dim, NAN);
  } else {
    reference::store_row(type, made.data(), dim, planes[0], planes[1]);
    reference::load_row(type, planes[0], planes[1], dim, x);
  }
}

void SearchCase::make_call() {
  for (int32_t p = 0; p < kPlanes; ++p) call_.pages.planes[p] = base_ + pool_.at + pages_[0] + plane_at_[p];
  for (int32_t i = 0; i < call_.n_bounds; ++i) call_.bounds[i].data = base_ + pool_.at + pages_[0] + of_page_[i];
  std::vector<int64_t> tables;
  // page 0 of the tables is the first sequence's first page
  for (const int64_t page : pages_) tables.push_back(page - pages_[0]);
  write(tables_.at, tables.data(), tables_.bytes);
  call_.sequences.sequences = on_device<DeviceSequence>(sequences_.at);
  call_.sequences.page_tables = on_device<int64_t>(tables_.at);
  call_.q.data = base_ + queries_.at;
  call_.keys = on_device<DeviceKeys>(named_.at);
  call_.granules = on_device<KeyGranule>(granules_.at);
  call_.workspace = base_ + workspace_.at;
  const std::vector<std::byte> zeros(static_cast<size_t>(workspace_.bytes));
  write(workspace_.at, zeros.data(), workspace_.bytes);
}

// Writes the keys of tokens up to `end`. Many keys are written as whole pages.
void SearchCase::put_keys(size_t sequence, int64_t end) {
  constexpr int64_t kFew = 16;
  int64_t& n_put = n_put_[sequence];
  const bool are_few = end - n_put <= kFew;
  const bool puts_any = end > n_put;
  for (; n_put < end; ++n_put)
    for (int32_t head = 0; head < layer_.n_kv_heads; ++head)
      for (int32_t plane = 0; plane < 2; ++plane) {
        const int64_t at = key_at(sequence, n_put, head, plane), bytes = row_bytes_.of[plane];
        const std::byte* from = keys_image_.data() + at - pool_.at;
        if (are_few)
          write(at, from, bytes);
        else
          std::memcpy(expected_.data() + at, from, static_cast<size_t>(bytes));
      }
  if (puts_any && !are_few) device_.upload(base_ + pool_.at, expected_.data() + pool_.at, pool_.bytes);
}

// Rows of no block are NaN.
void SearchCase::put_queries(const std::vector<SearchBlock>& blocks) {
  const int64_t dim = options_.dim, size = reference::element_bytes(options_.q_type);
  std::vector<std::byte> image(static_cast<size_t>(queries_.bytes), kNothing);
  q_.assign(static_cast<size_t>(int64_t{options_.n_blocks} * most_queries() * layer_.n_q_heads * dim), NAN);
  for (size_t b = 0; b < blocks.size(); ++b)
    for (int64_t query = 0; query < blocks[b].q_len; ++query)
      for (int64_t head = 0; head < layer_.n_q_heads; ++head) {
        const int64_t row = static_cast<int64_t>(b) * most_queries() + query;
        double* x = q_.data() + (row * layer_.n_q_heads + head) * dim;
        for (int64_t d = 0; d < dim; ++d) x[d] = 1.5 * random_.normal();
        reference::round_row(options_.q_type, x, dim);
        if (options_.has_nan_query && head < layer_.group_size) x[3] = NAN;
        const int64_t at = row * call_.q.token_stride + head * call_.q.head_stride;
        reference::store_all(options_.q_type, x, dim, image.data() + at * size);
      }
  write(queries_.at, image.data(), queries_.bytes);
}

DeviceSequence SearchCase::describe_sequence(size_t sequence, int64_t end) const {
  DeviceSequence described;
  described.end = end;
  described.table_begin = static_cast<int32_t>(table_begin_[sequence]);
  described.table_len = static_cast<int32_t>(table_begin_[sequence + 1] - table_begin_[sequence]);
  described.bounded = std::min(n_bounded_[sequence], end);
  return described;
}

// Describes the blocks. Their lists for attend() are in the opposite order.
void SearchCase::put_blocks(const std::vector<SearchBlock>& blocks) {
  std::vector<DeviceSequence> described;
  for (size_t b = 0; b < blocks.size(); ++b) {
    DeviceSequence block = describe_sequence(blocks[b].sequence, blocks[b].end);
    block.q_len = blocks[b].q_len;
    block.first_row = static_cast<int32_t>(b) * most_queries();
    block.position = block.end - block.q_len;
    block.kept_lists = base_ + lists_.at + static_cast<int64_t>(b) * lists_bytes_;
    block.kept_mark = blocks[b].mark;
    block.first_list = (options_.n_blocks - 1 - static_cast<int32_t>(b)) * most_attended();
    described.push_back(block);
  }
  write(sequences_.at, described.data(), std::ssize(described) * static_cast<int64_t>(sizeof(DeviceSequence)));
}

void SearchCase::prepare(const std::vector<SearchBlock>& blocks) {
  for (const SearchBlock& block : blocks) put_keys(block.sequence, block.end);
  put_queries(blocks);
  put_blocks(blocks);
}

void SearchCase::call_search(void* stream) {
  DeviceError error;
  device_.must(device_.table->search(device_.self, &call_, stream, &error), error);
}

std::string SearchCase::search(const std::vector<SearchBlock>& blocks) {
  prepare(blocks);
  call_search(nullptr);
  return check_search(blocks);
}

// Bounds of NaN keys are unspecified, so they are set to NaN after the check.
std::string SearchCase::bound(const std::vector<BoundedTokens>& of_sequences) {
  std::vector<DeviceSequence> described;
  for (size_t s = 0; s < of_sequences.size(); ++s) {
    put_keys(s, of_sequences[s].end);
    described.push_back(describe_sequence(s, of_sequences[s].end));
    described.back().bounded = of_sequences[s].bounded;
  }
  write(sequences_.at, described.data(), std::ssize(described) * static_cast<int64_t>(sizeof(DeviceSequence)));
  DeviceBoundChunks call;
  call.layer = &layer_;
  call.pages = call_.pages;
  call.sequences = call_.sequences;
  call.sequences.n_sequences = static_cast<int32_t>(of_sequences.size());
  std::copy_n(call_.bounds, call_.n_bounds, call.bounds);
  call.n_bounds = call_.n_bounds;
  DeviceError error;
  device_.must(device_.table->bound_chunks(device_.self, &call, nullptr, &error), error);
  download();
  for (size_t s = 0; s < of_sequences.size(); ++s)
    for (int32_t i = 0; i < call_.n_bounds; ++i) {
      const int64_t len = int64_t{1} << call_.bounds[i].chunk_shift;
      for (int64_t chunk = 0; (chunk + 1) * len <= of_sequences[s].end; ++chunk) {
        if ((chunk + 1) * len - 1 < of_sequences[s].bounded) continue;
        if (const std::string fault = check_bounds(s, chunk, i); !fault.empty()) return fault;
      }
      n_bounded_[s] = of_sequences[s].end;
    }
  if (const std::string fault = check_bytes(); !fault.empty()) return fault;
  const std::vector<std::byte> nothing(static_cast<size_t>(4 * options_.dim), kNothing);
  for (int32_t i = 0; i < call_.n_bounds; ++i)
    for (int64_t token = options_.nan_begin; token < options_.nan_end; token += int64_t{1} << call_.bounds[i].chunk_shift)
      for (int32_t head = 0; head < layer_.n_kv_heads; ++head)
        write(bounds_at(0, token >> call_.bounds[i].chunk_shift, head, i), nothing.data(), 4 * options_.dim);
  return "";
}

// ---- places in memory --------------------------------------------------------------------------------------------------

int64_t SearchCase::page_of(size_t sequence, int64_t token) const {
  return pool_.at + pages_[table_begin_[sequence] + static_cast<size_t>(token / options_.page_len)];
}

int64_t SearchCase::key_at(size_t sequence, int64_t token, int32_t kv_head, int32_t plane) const {
  return page_of(sequence, token) + plane_at_[plane] + kv_head * call_.pages.head_stride[plane] +
         token % options_.page_len * row_bytes_.of[plane];
}

int64_t SearchCase::bounds_at(size_t sequence, int64_t chunk, int32_t kv_head, int32_t bounds_idx) const {
  const DeviceBounds& bounds = call_.bounds[bounds_idx];
  const int64_t token = chunk << bounds.chunk_shift;
  return page_of(sequence, token) + of_page_[bounds_idx] + kv_head * bounds.head_stride +
         (token % options_.page_len >> bounds.chunk_shift) * 4 * options_.dim;
}

int64_t SearchCase::list_at(size_t block, size_t stage, int32_t list) const {
  const DeviceSearchStage& of = call_.stages[stage];
  return lists_.at + static_cast<int64_t>(block) * lists_bytes_ + of.lists_at + list * kept_list_bytes(of.most_kept);
}

Row SearchCase::key(size_t sequence, int64_t token, int32_t kv_head) const {
  const auto first = keys_[sequence].begin() + (token * layer_.n_kv_heads + kv_head) * options_.dim;
  return {first, first + options_.dim};
}

PlainSearch SearchCase::plain_search(const SearchBlock& block, size_t nth) const {
  PlainSearch search;
  search.stages.assign(call_.stages, call_.stages + call_.n_stages);
  search.sink_len = call_.sink_len;
  search.window_len = call_.window_len;
  search.shares_lists = options_.shares_lists;
  search.keeps_lists = options_.keeps_lists;
  search.n_kv_heads = layer_.n_kv_heads;
  search.group_size = layer_.group_size;
  search.scale = static_cast<double>(layer_.sm_scale);
  search.p0 = block.end - block.q_len;
  search.q_len = block.q_len;
  search.key = [this, block](int64_t token, int32_t kv_head) { return key(block.sequence, token, kv_head); };
  search.query = [this, nth](int64_t query, int32_t head) {
    const int64_t row = static_cast<int64_t>(nth) * most_queries() + query;
    const auto first = q_.begin() + (row * layer_.n_q_heads + head) * options_.dim;
    return Row(first, first + options_.dim);
  };
  search.bounds = [this, block](int32_t bounds_idx, int64_t chunk, int32_t kv_head) {
    Row row(static_cast<size_t>(2 * options_.dim));
    reference::load_all(TANDEM_BF16, expected_.data() + bounds_at(block.sequence, chunk, kv_head, bounds_idx),
                        2 * options_.dim, row.data());
    return row;
  };
  return search;
}

}  // namespace tandem::test
