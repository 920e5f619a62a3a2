// SPDX-License-Identifier: MIT
// Sequences of random keys and queries in device memory, and index_patterns() and list_patterns() over them beside double
// precision.
//
// All memory of a call is one block with gaps between its parts. Pages are in any order. Memory that holds nothing is 0xff,
// which is NaN in every type. After a call every byte must be unchanged or have its expected value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/memory_image.h"
#include "device/plain_patterns.h"
#include "lib/tables/device.h"
#include "reference/random.h"

namespace tandem::test {

struct PatternSequence {
  int64_t end = 0;
  int32_t q_len = 0;  // 0: the call leaves the sequence out
};

struct PatternOptions {
  int32_t k_type = TANDEM_BF16, q_type = TANDEM_BF16;
  int32_t dim = 128, n_kv_heads = 1, group_size = 1;
  bool is_rotated = false;  // true: keys are f32 in the window, whatever k_type is
  int32_t page_len = 128;
  int32_t q_gap = 0;                     // numbers between the query rows of two tokens
  std::vector<DeviceHeadPattern> heads;  // for each query head
  std::vector<PatternSequence> sequences;
  int64_t more_keys = 0;  // max_keys of the call is the longest sequence's plus this
  int32_t list_queries = 32;
  int32_t n_granules = 0;      // room of a list; 0: room for all keys
  bool has_keys = true;        // false: only list_patterns() is called
  int64_t period = 0;          // a key equals the key this many tokens before; 0: all keys differ
  int64_t nan_token = -1;      // token of the first sequence whose keys are NaN; -1: none
  bool has_nan_query = false;  // true: the last query of each sequence is NaN
  uint64_t seed = 1;
};

struct PatternLists {
  int32_t first_head = 0, head_step = 1, n_lists = 1;
};

class PatternCase : private MemoryImage {
 public:
  PatternCase(const OpenDevice& device, const PatternOptions& options);

  // Each makes a call and returns an error text about its results, or "" if they are right.
  std::string index();
  std::string list(const PatternLists& lists);
  void choose_any(double share);  // writes random bits in place of the choices of index()
  DevicePatterns& call() { return call_; }
  std::string describe() const;

 private:
  void make_layer();
  void make_pages();
  void make_rows();
  void make_parts();
  void make_keys(size_t sequence);
  void make_queries();
  void make_call();
  void put_sequences();

  int64_t parts_of(int64_t n_queries) const { return (n_queries + options_.list_queries - 1) / options_.list_queries; }
  int64_t key_at(size_t sequence, int64_t token, int32_t kv_head, int32_t plane) const;
  PatternChoices layout() const;
  int64_t choices_at(size_t sequence, int32_t head) const;
  const uint32_t* choices(const std::vector<std::byte>& image, size_t sequence, int32_t head) const;
  PlainPattern pattern_of(size_t sequence, int32_t head) const;
  std::string check_choices(size_t sequence, int32_t head) const;
  ChosenKeys chosen_keys(const PlainPattern& pattern, size_t sequence, int32_t head) const;
  void expect_list(const PatternLists& lists, size_t sequence, int32_t list, uint64_t (&totals)[2]);

  PatternOptions options_;
  Layer layer_;
  RopeTable rope_;
  reference::Random random_;
  PlaneBytes row_bytes_;
  DevicePatterns call_;
  int64_t page_bytes_ = 0, plane_at_[kPlanes] = {}, n_rows_ = 0, n_attended_ = 0, n_places_ = 0;
  std::vector<int64_t> pages_;                   // pages of all sequences, in bytes from the pool's begin
  std::vector<size_t> table_begin_;              // for each sequence
  std::vector<int64_t> first_row_, first_list_;  // for each sequence
  std::vector<std::vector<double>> keys_;        // for each sequence [token][kv_head][dim], as stored
  std::vector<double> q_;                        // [row][head][dim], as stored
  Part pool_, tables_, sequences_, queries_, heads_, choices_, lists_, granules_, totals_, workspace_;
};

}  // namespace tandem::test
