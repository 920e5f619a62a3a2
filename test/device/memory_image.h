// SPDX-License-Identifier: MIT
// A block of device memory of a test. Its parts have names and gaps between them. A copy on the host says what every byte
// must be.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "device/open_device.h"

namespace tandem::test {

class MemoryImage {
 public:
  explicit MemoryImage(const OpenDevice& device) : device_(device) {}
  ~MemoryImage() { device_.release(base_); }
  MemoryImage(const MemoryImage&) = delete;

 protected:
  static constexpr int64_t kGap = 512;
  struct Part {
    const char* name = "";
    int64_t at = 0, bytes = 0;
  };

  Part add_part(const char* name, int64_t bytes) {
    const Part part = {name, bytes_, bytes};
    bytes_ = (bytes_ + bytes + 255) / 256 * 256 + kGap;
    parts_.push_back(part);
    return part;
  }
  // Allocates the block after all parts are added. `nothing`: the value of each byte before it is written.
  void allocate(std::byte nothing) {
    expected_.assign(static_cast<size_t>(bytes_), nothing);
    base_ = static_cast<std::byte*>(device_.allocate(bytes_));
  }
  // Writes to the device and to the expected copy.
  void write(int64_t at, const void* from, int64_t bytes) {
    if (bytes == 0) return;
    std::memcpy(expected_.data() + at, from, static_cast<size_t>(bytes));
    device_.upload(base_ + at, expected_.data() + at, bytes);
  }
  void download() {
    found_.resize(expected_.size());
    device_.download(found_.data(), base_, bytes_);
  }
  // Accepts the bytes that a call left in this range, after the caller checked them. From now on they are expected.
  void accept(int64_t at, int64_t bytes) {
    if (bytes > 0) std::memcpy(expected_.data() + at, found_.data() + at, static_cast<size_t>(bytes));
  }
  std::string check_bytes() const {
    const auto at = std::mismatch(expected_.begin(), expected_.end(), found_.begin()).first - expected_.begin();
    if (at == std::ssize(expected_)) return "";
    const auto behind = std::upper_bound(parts_.begin(), parts_.end(), at, [](auto x, const Part& of) { return x < of.at; });
    if (behind == parts_.begin()) return "a byte in front of everything has changed";
    const Part& part = *(behind - 1);
    return "byte " + std::to_string(at - part.at) + " of " + std::to_string(part.bytes) + " of the " + part.name +
           " has changed";
  }

  const OpenDevice& device_;
  std::vector<Part> parts_;
  int64_t bytes_ = kGap;
  std::byte* base_ = nullptr;
  std::vector<std::byte> expected_, found_;
};

}  // namespace tandem::test
