// SPDX-License-Identifier: MIT
// name_keys(): key lists of the units that a caller names, token by token.
#include <algorithm>
#include <atomic>
#include <vector>

#include "device/stand_in_exchange.h"

namespace stand_in {
namespace {

using namespace tandem;

struct Row {
  const int32_t* idx;
  int32_t n_idx, unit_shift;

  bool names(int64_t token) const {
    return std::find(idx, idx + n_idx, static_cast<int32_t>(token >> unit_shift)) != idx + n_idx;
  }
  // Returns the first wrong place of the row, or -1.
  int32_t first_wrong(int64_t own) const {
    for (int32_t i = 0; i < n_idx; ++i) {
      if (idx[i] == -1) continue;
      if (idx[i] < 0 || int64_t{idx[i]} << unit_shift > own) return i;
      for (int32_t j = 0; j < i; ++j)
        if (idx[j] == -1 || idx[j] >= idx[i]) return i;
    }
    return -1;
  }
};

void report(const DeviceNamedKeys& call, const DeviceSequence& query, const Row& row, int32_t head, int32_t place) {
  BadIndex& bad = call.flags->bad_index;
  const std::atomic_ref n_told(bad.n_told);
  const uint32_t n = n_told.load(std::memory_order_relaxed);
  if (n != std::atomic_ref(bad.n_taken).load(std::memory_order_acquire)) return;
  bad.layer_idx = call.layer_idx;
  bad.head = head;
  bad.value = row.idx[place];
  bad.row = call.first_row + query.first_row;
  bad.place = place;
  bad.own = query.end + query.n_after - 1;
  n_told.store(n + 1, std::memory_order_release);
}

// Returns the tokens of the list in their order, and the begin of its range.
std::vector<int64_t> find_tokens(const DeviceNamedKeys& call, const DeviceSequence& query, const Row& row,
                                 int64_t* range_begin) {
  int64_t newest = query.end + query.n_after - 1;
  if (call.positions != nullptr)
    newest = query.end + *on_device(call.positions + query.first_row, 4, "positions are no device memory") - query.position;
  const bool plus = call.idx.plus_window != 0;
  *range_begin = plus ? std::clamp(newest + 1 - call.window_len, query.begin, query.end) : query.end;
  std::vector<int64_t> tokens;
  for (int64_t token = query.begin; token < *range_begin; ++token)
    if (row.names(token) || (plus && token < call.sink_len)) tokens.push_back(token);
  return tokens;
}

}  // namespace

void check(const DeviceNamedKeys& call) {
  check_sequences(call.sequences);
  require(call.page_len > 0 && call.page_len % 64 == 0, "page_len is no multiple of 64");
  require(call.idx.n_heads > 0 && call.idx.n_idx >= 0 && call.idx.unit_shift >= 0 && call.idx.unit_shift <= 8,
          "indices of no heads, fewer than none, or of units that there are not");
  const int64_t n_lists = int64_t{call.sequences.n_sequences} * call.idx.n_heads;
  require(n_lists <= call.n_lists, "more lists than there is room for");
  require((int64_t{call.idx.n_idx} << call.idx.unit_shift) <= INT32_MAX, "units of more tokens than a sequence has");
  on_device(call.keys, n_lists * static_cast<int64_t>(sizeof(DeviceKeys)), "key lists are no device memory");
  on_device(call.granules, n_lists * call.n_granules * static_cast<int64_t>(sizeof(KeyGranule)),
            "granules are no device memory");
  on_device(call.flags, sizeof *call.flags, "the flags are no device memory");
}

bool perform(const DeviceNamedKeys& call) {
  const DeviceSequence* queries = read_sequences(call.sequences, -1);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    const DeviceSequence& query = queries[i];
    require(query.q_len <= 1, "a query that is no sequence of its own names keys");
    check_table(call.sequences, query, call.page_len);
    for (int32_t head = 0; head < call.idx.n_heads; ++head) {
      const int32_t list = i * call.idx.n_heads + head;
      DeviceKeys& keys = call.keys[list];
      keys = {list * call.n_granules, 0, static_cast<int32_t>(query.end), 0};
      if (query.q_len == 0) continue;
      const int32_t* idx = call.idx.data + query.first_row * call.idx.token_stride + head * call.idx.head_stride;
      if (call.idx.n_idx > 0) on_device(idx, call.idx.n_idx * int64_t{4}, "indices are no device memory");
      const Row row{idx, call.idx.n_idx, call.idx.unit_shift};
      if (const int32_t wrong = row.first_wrong(query.end + query.n_after - 1); wrong >= 0) {
        report(call, query, row, head, wrong);
        keys.n = -1;
        continue;
      }
      int64_t range_begin = 0;
      const std::vector<int64_t> tokens = find_tokens(call, query, row, &range_begin);
      keys.begin = static_cast<int32_t>(range_begin);
      const int64_t* table = call.sequences.page_tables + query.table_begin;
      write_granules({table, query.table_len, call.page_len, call.n_granules, call.granules + keys.first}, tokens, &keys);
    }
  }
  return true;
}

}  // namespace stand_in
