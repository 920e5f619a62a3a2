// SPDX-License-Identifier: MIT
// Writes and reads the bytes of a saved sequence with the caller's functions (docs/saved-sequences.md has the format).
//
//   header | section | section | ...      section: {kind, layer, bytes of its payload} | payload | checksum of both
//
// Large pieces go directly between the caller's function and the store, small ones through a buffer. The checksum covers a
// piece while it is in the processor's cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/checksum.h"
#include "lib/base/status.h"

namespace tandem {

// The numbers are those of the format. The first five are a layer's planes, in the order of LayerPlanes.
enum class SavedKind : uint32_t { kK = 1, kKScales, kV, kVScales, kHidden, kPositions, kStatistics, kBlob };

struct SavedSection {
  SavedKind kind = SavedKind::kBlob;
  int32_t layer_idx = -1;  // -1: belongs to no layer
  int64_t bytes = 0;       // size of the payload

  std::string name() const;  // "k of layer 3"
};
// A section's bytes besides its payload.
inline constexpr int64_t kSavedFrameBytes = sizeof(SavedSection) + sizeof(uint64_t);
static_assert(sizeof(SavedSection) == 16);

class SavedWriter {
 public:
  SavedWriter(tandem_write_fn write, void* user) : write_(write), user_(user) { buffer_.reserve(kBufferBytes); }

  Status put(const void* data, int64_t bytes);
  Status begin(const SavedSection& section);
  Status end();  // ends the section with its checksum
  Status flush();

  // kMostBytes: the most for one call of the caller's function.
  static constexpr int64_t kBufferBytes = 1 << 18, kMostBytes = 1 << 26;

 private:
  Status send(const std::byte* data, int64_t bytes);

  tandem_write_fn write_;
  void* user_;
  std::vector<std::byte> buffer_;
  Checksum checksum_;
};

class SavedReader {
 public:
  SavedReader(tandem_read_fn read, void* user) : read_(read), user_(user), buffer_(SavedWriter::kBufferBytes) {}

  // The input has `bytes` bytes in all, counted from the first byte that was taken. Later bytes are not read.
  void set_total(int64_t bytes) { total_ = bytes; }
  Status take(void* to, int64_t bytes);
  Status skip(int64_t bytes);
  // Begins the next section, which must be this one. bytes = -1: it may have any size, and *wanted gets the size.
  Status begin(SavedSection* wanted);
  Status end();
  int64_t left() const { return section_left_; }  // bytes of the section's payload that are not taken yet
  int64_t n_taken() const { return n_taken_; }
  uint64_t checksum() const { return checksum_.value(); }
  // Returns CORRUPT for the current section.
  Status corrupt(const std::string& what) const;

 private:
  Status fetch(std::byte* to, int64_t least, int64_t most, int64_t* n_fetched);

  tandem_read_fn read_;
  void* user_;
  std::vector<std::byte> buffer_;
  int64_t at_ = 0, end_ = 0;  // offsets in the buffer
  int64_t n_fetched_ = 0, n_taken_ = 0, total_ = 0, section_left_ = 0;
  std::string where_ = "header";
  Checksum checksum_;
};

}  // namespace tandem
