// SPDX-License-Identifier: MIT
// Saves sequences to memory and loads them from memory.
#pragma once

#include <algorithm>

#include "api_world.h"

namespace tandem_test {

// A file in memory. Each call of the functions below transfers at most `most` bytes, and call number fails_at fails.
struct MemoryFile {
  std::vector<unsigned char> bytes;
  size_t at = 0;
  int64_t n_calls = 0, fails_at = -1, most = INT64_MAX;

  void rewind() { at = 0, n_calls = 0; }
  bool operator==(const MemoryFile& other) const { return bytes == other.bytes; }
};

inline int32_t write_to_memory(const void* data, int64_t n_bytes, void* user) {
  auto& file = *static_cast<MemoryFile*>(user);
  if (file.n_calls++ == file.fails_at) return 28;
  const auto* from = static_cast<const unsigned char*>(data);
  file.bytes.insert(file.bytes.end(), from, from + n_bytes);
  return 0;
}

inline int64_t read_from_memory(void* data, int64_t n_bytes, void* user) {
  auto& file = *static_cast<MemoryFile*>(user);
  if (file.n_calls++ == file.fails_at) return -5;
  const int64_t n = std::min({n_bytes, file.most, static_cast<int64_t>(file.bytes.size() - file.at)});
  if (n > 0) std::memcpy(data, file.bytes.data() + file.at, static_cast<size_t>(n));
  file.at += static_cast<size_t>(n);
  return n;
}

inline MemoryFile save(tandem_cache* cache, int64_t sequence, tandem_session* session = nullptr) {
  MemoryFile file;
  tandem_save_options options = TANDEM_SAVE_OPTIONS_INIT;
  options.session = session;
  OK(tandem_sequence_save, cache, sequence, write_to_memory, &file, &options);
  return file;
}

inline int64_t load(tandem_cache* cache, MemoryFile& file, tandem_session* session = nullptr) {
  file.rewind();
  int64_t sequence = -1;
  tandem_load_options options = TANDEM_LOAD_OPTIONS_INIT;
  options.session = session;
  options.file_bytes = static_cast<int64_t>(file.bytes.size());
  OK(tandem_sequence_load, &sequence, cache, read_from_memory, &file, &options);
  assert_int_equal(file.at, file.bytes.size());
  return sequence;
}

inline uint64_t digest_of(tandem_cache* cache, int64_t sequence) {
  uint64_t digest = 0;
  OK(tandem_sequence_digest, &digest, cache, sequence);
  return digest;
}

inline std::vector<int64_t> sequences_of(tandem_cache* cache) {
  int64_t n = 0;
  OK(tandem_cache_sequences, nullptr, 0, &n, cache);
  std::vector<int64_t> ids(static_cast<size_t>(n));
  OK(tandem_cache_sequences, ids.data(), n, &n, cache);
  return ids;
}

}  // namespace tandem_test
