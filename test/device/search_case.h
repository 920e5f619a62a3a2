// SPDX-License-Identifier: MIT
// Sequences of random keys in device memory, and bound_chunks() and search() over them beside double precision.
//
// All memory of a call is one block with gaps between its parts. Pages are in any order. Memory that holds nothing is 0xff,
// which is NaN in every type. After a call every byte must be unchanged or have its expected value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/memory_image.h"
#include "device/plain_search.h"
#include "lib/policy/pruning.h"
#include "lib/tables/device.h"
#include "reference/random.h"

namespace tandem::test {

struct SearchOptions {
  int32_t k_type = TANDEM_BF16, q_type = TANDEM_BF16;
  int32_t dim = 128, n_kv_heads = 2, group_size = 4;
  bool is_rotated = false;  // true: keys are f32 in the window, whatever k_type is
  int32_t page_len = 128;
  int32_t q_gap = 0;  // numbers between the query rows of two tokens
  bool shares_lists = false, keeps_lists = true;
  PruningRecord record;
  std::vector<int32_t> more_bounds;    // lengths of chunks that get bounds besides those that the record's stages judge by
  std::vector<int64_t> lengths;        // room of each sequence, in tokens
  int32_t n_blocks = 1;                // query blocks of each search
  int64_t period = 0;                  // a key equals the key this many tokens before; 0: all keys differ
  int64_t twin_distance = 0;           // d > 0: token 2 d n + d has the key of token 2 d n; 0: no such twins
  int64_t nan_begin = 0, nan_end = 0;  // tokens of the first sequence whose keys are NaN: whole chunks of every length
  bool has_nan_query = false;          // true: the query heads of KV head 0 are NaN
  uint64_t seed = 1;
};

struct SearchBlock {
  size_t sequence = 0;
  int64_t end = 0;  // length of the sequence up to the block's last query
  int32_t q_len = 1;
  uint32_t mark = 1;
};

struct BoundedTokens {
  int64_t bounded = 0, end = 0;
};

// Counts of the lists that a search made. A list is loose if rounding may change it, else strict.
struct SearchCounts {
  int64_t n_strict = 0, n_loose = 0;
  int64_t n_stages_run = 0, n_stages_kept = 0, n_judged = 0;
  void include(const SearchCounts& more);
};

class SearchCase : private MemoryImage {
 public:
  SearchCase(const OpenDevice& device, const SearchOptions& options);

  // Each makes a call and returns an error text about its results, or "" if they are right.
  std::string bound(const std::vector<BoundedTokens>& of_sequences);
  std::string search(const std::vector<SearchBlock>& blocks);
  // The same in three steps, so that the call in the middle can be captured and replayed.
  void prepare(const std::vector<SearchBlock>& blocks);
  void call_search(void* stream);
  std::string check_search(const std::vector<SearchBlock>& blocks);
  DeviceSearch& call() { return call_; }

  const SearchCounts& counts() const { return counts_; }
  std::string describe() const;

 private:
  void make_layer();
  void make_stages();
  void make_parts();
  void make_pages();
  int64_t distance_to_repeated(int64_t token) const;
  void make_keys(size_t sequence);
  void make_key(size_t sequence, int64_t token, int32_t kv_head, const Row& made);
  void put_keys(size_t sequence, int64_t end);
  void put_queries(const std::vector<SearchBlock>& blocks);
  void make_call();
  void put_blocks(const std::vector<SearchBlock>& blocks);
  DeviceSequence describe_sequence(size_t sequence, int64_t end) const;

  int32_t n_lists() const { return options_.shares_lists ? 1 : options_.n_kv_heads; }
  int32_t most_queries() const { return options_.keeps_lists ? 1 : 64; }
  int32_t list_queries() const { return options_.keeps_lists ? 1 : 64 / options_.group_size; }
  // described sequences of a block
  int32_t most_attended() const { return (most_queries() + list_queries() - 1) / list_queries(); }
  int64_t page_of(size_t sequence, int64_t token) const;
  int64_t key_at(size_t sequence, int64_t token, int32_t kv_head, int32_t plane) const;
  int64_t bounds_at(size_t sequence, int64_t chunk, int32_t kv_head, int32_t bounds_idx) const;
  int64_t list_at(size_t block, size_t stage, int32_t list) const;
  Row key(size_t sequence, int64_t token, int32_t kv_head) const;
  PlainSearch plain_search(const SearchBlock& block, size_t nth) const;
  template <typename T>
  T* on_device(int64_t at) const {
    return reinterpret_cast<T*>(base_ + at);
  }

  std::string check_bounds(size_t sequence, int64_t chunk, int32_t bounds_idx);
  std::string check_bounds_row(size_t sequence, int64_t chunk, int32_t kv_head, int32_t bounds_idx) const;
  std::string check_block(const SearchBlock& block, size_t nth);
  PlainList load_list(const std::vector<std::byte>& from, size_t nth, size_t stage, int32_t list) const;
  std::string check_run(const PlainSearch& search, size_t stage, const PlainList& found, const KeptList& wanted) const;
  std::string check_stages(const PlainSearch& search, const SearchBlock& block, size_t nth, int32_t list);
  std::string check_unkept(const PlainSearch& search, size_t nth, int32_t list);
  std::string check_idle(size_t nth, int64_t end);
  std::string take_keys(const PlainSearch& search, size_t nth, int32_t list, std::vector<int64_t>* tokens);
  std::string take_granules(const DeviceKeys& keys, size_t nth, std::vector<int64_t>* tokens) const;
  int64_t named_at(size_t nth, int32_t attended, int32_t list) const;
  std::string check_named(const PlainSearch& search, size_t nth, int32_t list, const std::vector<PlainList>& lists,
                          int64_t n_open);

  SearchOptions options_;
  Layer layer_;
  RopeTable rope_;
  reference::Random random_;
  PlaneBytes row_bytes_;
  DeviceSearch call_;
  int64_t page_bytes_ = 0, plane_at_[kPlanes] = {}, of_page_[kMostSearchStages] = {}, lists_bytes_ = 0;
  std::vector<int64_t> pages_;             // pages of all sequences, in bytes from the pool's begin
  std::vector<size_t> table_begin_;        // for each sequence
  std::vector<std::vector<double>> keys_;  // for each sequence [token][kv_head][dim], as stored
  std::vector<double> q_;                  // [row][head][dim], as stored
  std::vector<int64_t> n_put_;             // for each sequence, tokens whose keys are in the pool
  std::vector<int64_t> n_bounded_;         // for each sequence, tokens whose complete chunks have bounds
  Part pool_, tables_, sequences_, queries_, lists_, named_, granules_, workspace_;
  std::vector<std::byte> keys_image_;  // the pool with the keys of all tokens
  SearchCounts counts_;
};

}  // namespace tandem::test
