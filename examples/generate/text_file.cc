// SPDX-License-Identifier: MIT
#include "text_file.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

namespace generate {

Failure refuse_irregular(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) return {path + ": is not a regular file"};
  return {};
}

Failure read_text_file(const std::string& path, std::string* text) {
  constexpr size_t kMaxBytes = size_t{1} << 30, kPieceBytes = size_t{1} << 20;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) return {path + ": " + std::strerror(errno)};
  text->clear();
  while (text->size() < kMaxBytes) {
    const size_t before = text->size();
    text->resize(before + kPieceBytes);
    const size_t n_read = std::fread(text->data() + before, 1, kPieceBytes, file.get());
    text->resize(before + n_read);
    if (n_read < kPieceBytes) break;
  }
  if (std::ferror(file.get())) return {path + ": " + std::strerror(errno)};  // a directory opens, and fails here
  if (text->size() >= kMaxBytes) return {path + ": is larger than 1 GiB"};
  return {};
}

}  // namespace generate
