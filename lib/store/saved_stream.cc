// SPDX-License-Identifier: MIT
#include "lib/store/saved_stream.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace tandem {

std::string SavedSection::name() const {
  constexpr const char* kNames[] = {"k", "k_scales", "v", "v_scales", "hidden", "positions", "statistics", "blob"};
  const uint32_t idx = static_cast<uint32_t>(kind) - 1;
  const std::string what = idx < std::size(kNames) ? kNames[idx] : "section of kind " + std::to_string(idx + 1);
  return layer_idx < 0 ? what : what + " of layer " + std::to_string(layer_idx);
}

Status SavedWriter::send(const std::byte* data, int64_t bytes) {
  while (bytes > 0) {
    const int64_t n = std::min(bytes, kMostBytes);
    if (const int32_t code = write_(data, n, user_); code != 0)
      return fail_system(TANDEM_ERROR_IO, code, "write", "write: the caller's function returned %d for %lld bytes", code,
                         static_cast<long long>(n));
    data += n;
    bytes -= n;
  }
  return {};
}

Status SavedWriter::flush() {
  TANDEM_TRY(send(buffer_.data(), std::ssize(buffer_)));
  buffer_.clear();
  return {};
}

Status SavedWriter::put(const void* data, int64_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  checksum_.add(from, bytes);
  if (std::ssize(buffer_) + bytes > kBufferBytes) TANDEM_TRY(flush());
  if (bytes > kBufferBytes / 4) {
    TANDEM_TRY(flush());
    return send(from, bytes);
  }
  buffer_.insert(buffer_.end(), from, from + bytes);
  return {};
}

Status SavedWriter::begin(const SavedSection& section) {
  checksum_.start();
  return put(&section, sizeof section);
}

Status SavedWriter::end() {
  const uint64_t value = checksum_.value();
  return put(&value, sizeof value);
}

Status SavedReader::corrupt(const std::string& what) const {
  return fail_with(TANDEM_ERROR_CORRUPT, 0, where_.c_str(), where_ + ": " + what);
}

// Reads between `least` and `most` bytes.
Status SavedReader::fetch(std::byte* to, int64_t least, int64_t most, int64_t* n_fetched) {
  int64_t n = 0;
  while (n < least) {
    const int64_t got = read_(to + n, std::min(most - n, SavedWriter::kMostBytes), user_);
    if (got < 0)
      return fail_system(TANDEM_ERROR_IO, -std::max(got, -INT64_MAX), "read",
                         "read: the caller's function returned %lld at byte %lld", static_cast<long long>(got),
                         static_cast<long long>(n_fetched_));
    if (got > most - n)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "read", "read: the caller's function returned %lld for %lld bytes",
                  static_cast<long long>(got), static_cast<long long>(most - n));
    if (got == 0) return corrupt("the file ends at byte " + std::to_string(n_fetched_));
    n += got;
    n_fetched_ += got;
  }
  *n_fetched = n;
  return {};
}

Status SavedReader::take(void* to, int64_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  while (bytes > 0) {
    int64_t n = std::min(bytes, end_ - at_);
    if (n > 0) {
      std::memcpy(out, buffer_.data() + at_, static_cast<size_t>(n));
      at_ += n;
    } else if (bytes > std::ssize(buffer_) / 4) {
      // Small enough that the checksum reads bytes in the processor's cache.
      n = std::min<int64_t>(bytes, SavedWriter::kBufferBytes);
      TANDEM_TRY(fetch(out, n, n, &n));
    } else {
      const int64_t ahead = std::clamp<int64_t>(total_ - n_fetched_, bytes, std::ssize(buffer_));
      at_ = end_ = 0;
      TANDEM_TRY(fetch(buffer_.data(), bytes, ahead, &end_));
      continue;
    }
    checksum_.add(out, n);
    out += n;
    bytes -= n;
    n_taken_ += n;
    section_left_ -= n;
  }
  return {};
}

Status SavedReader::skip(int64_t bytes) {
  std::vector<std::byte> page(static_cast<size_t>(std::min<int64_t>(bytes, 1 << 16)));
  for (; bytes > 0; bytes -= std::ssize(page)) {
    page.resize(static_cast<size_t>(std::min<int64_t>(bytes, std::ssize(page))));
    TANDEM_TRY(take(page.data(), std::ssize(page)));
  }
  return {};
}

Status SavedReader::begin(SavedSection* wanted) {
  where_ = wanted->name();
  checksum_.start();
  SavedSection found;
  TANDEM_TRY(take(&found, sizeof found));
  if (found.kind != wanted->kind || found.layer_idx != wanted->layer_idx) return corrupt("the file has " + found.name() + " here");
  const int64_t most = total_ - n_taken_ - static_cast<int64_t>(sizeof(uint64_t));
  if (wanted->bytes >= 0 ? found.bytes != wanted->bytes : found.bytes < 0 || found.bytes > most)
    return corrupt("its size is " + std::to_string(found.bytes) + " bytes, not " +
                   (wanted->bytes >= 0 ? std::to_string(wanted->bytes) : "0 to " + std::to_string(most)));
  *wanted = found;
  section_left_ = found.bytes;
  return {};
}

Status SavedReader::end() {
  if (section_left_ != 0) return corrupt(std::to_string(section_left_) + " bytes follow its last member");
  const uint64_t expected = checksum_.value();
  uint64_t found = 0;
  TANDEM_TRY(take(&found, sizeof found));
  return found == expected ? Status() : corrupt("its checksum is wrong");
}

}  // namespace tandem
