// SPDX-License-Identifier: MIT
// Random key lists (lib/tables/key_list.h) for the sequences of a call.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/tables/device.h"
#include "reference/random.h"

namespace tandem::test {

struct ListOptions {
  int32_t n_heads = 0;         // lists of a sequence: 1, or one for each KV head; 0: the call has no lists
  int64_t unit = 1;            // tokens of a unit, which are named together; units begin at multiples of it
  double share = 0.5;          // part of the units before the range that is named
  int64_t newest = 0;          // tokens of the range
  int32_t sliding_window = 0;  // of every second list
  bool hides_others = true;    // true: keys that no list names are NaN
  bool by_kernels = false;     // true: the call says that kernels write the lists
};

class NamedKeys {
 public:
  // tables: page tables of all sequences, in bytes from page 0.
  NamedKeys(const ListOptions& options, const std::vector<DeviceSequence>& sequences, const std::vector<int64_t>& tables,
            int32_t page_len, reference::Random& random);

  bool has(size_t sequence, int64_t kv_head, int64_t token) const;
  int32_t sliding_window(int64_t kv_head, int32_t of_layer) const;
  int64_t n_keys(size_t sequence) const;  // sum over its lists

  const std::vector<DeviceKeys>& keys() const { return keys_; }
  const std::vector<KeyGranule>& granules() const { return granules_; }
  static int64_t most_granules(const ListOptions& options, const std::vector<DeviceSequence>& sequences);

 private:
  int64_t list_of(int64_t kv_head) const { return options_.n_heads == 1 ? 0 : kv_head; }

  ListOptions options_;
  std::vector<int64_t> begins_;           // for each sequence
  std::vector<std::vector<bool>> named_;  // [sequence * n_heads + list][token - begin]
  std::vector<DeviceKeys> keys_;
  std::vector<KeyGranule> granules_;
};

}  // namespace tandem::test
