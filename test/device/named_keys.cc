// SPDX-License-Identifier: MIT
#include "device/named_keys.h"

#include <algorithm>

namespace tandem::test {

NamedKeys::NamedKeys(const ListOptions& options, const std::vector<DeviceSequence>& sequences,
                     const std::vector<int64_t>& tables, int32_t page_len, reference::Random& random)
    : options_(options) {
  for (const DeviceSequence& sequence : sequences) {
    begins_.push_back(sequence.begin);
    for (int32_t list = 0; list < options.n_heads; ++list) {
      std::vector<bool>& named = named_.emplace_back(static_cast<size_t>(sequence.end - sequence.begin), false);
      const int64_t range = std::max(sequence.begin, sequence.end - random.integer(options.newest / 2, options.newest));
      DeviceKeys keys;
      keys.first = static_cast<int32_t>(granules_.size());
      keys.begin = static_cast<int32_t>(range);
      if (list % 2 == 1) keys.sliding_window = options.sliding_window;
      bool is_named = false;
      int64_t unit = -1;
      for (int64_t token = sequence.begin; token < sequence.end; ++token) {
        if (token / options.unit != unit) unit = token / options.unit, is_named = random.chance(options.share);
        if (token >= range) {
          named[static_cast<size_t>(token - sequence.begin)] = true;
          continue;
        }
        if (!is_named) continue;
        named[static_cast<size_t>(token - sequence.begin)] = true;
        const auto first = static_cast<int32_t>(token / kGranuleKeys * kGranuleKeys);
        if (keys.n == 0 || granules_.back().token != first) {
          const int64_t entry = sequence.table_begin + token / page_len % sequence.table_len;
          granules_.push_back({first, 0, tables[static_cast<size_t>(entry)]});
          ++keys.n;
        }
        granules_.back().keys |= 1u << (token - first);
      }
      keys_.push_back(keys);
    }
  }
}

bool NamedKeys::has(size_t sequence, int64_t kv_head, int64_t token) const {
  const size_t list = sequence * static_cast<size_t>(options_.n_heads) + static_cast<size_t>(list_of(kv_head));
  return named_[list][static_cast<size_t>(token - begins_[sequence])];
}

int32_t NamedKeys::sliding_window(int64_t kv_head, int32_t of_layer) const {
  return list_of(kv_head) % 2 == 1 && options_.sliding_window > 0 ? options_.sliding_window : of_layer;
}

int64_t NamedKeys::n_keys(size_t sequence) const {
  int64_t n = 0;
  for (int32_t list = 0; list < options_.n_heads; ++list) {
    const std::vector<bool>& named = named_[sequence * static_cast<size_t>(options_.n_heads) + static_cast<size_t>(list)];
    n += std::count(named.begin(), named.end(), true);
  }
  return n;
}

int64_t NamedKeys::most_granules(const ListOptions& options, const std::vector<DeviceSequence>& sequences) {
  int64_t n = 0;
  for (const DeviceSequence& sequence : sequences)
    n += options.n_heads * ((sequence.end - sequence.begin) / kGranuleKeys + 2);
  return n;
}

}  // namespace tandem::test
