// SPDX-License-Identifier: MIT
#include "lib/base/module_file.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <vector>

namespace tandem {
namespace {

using FileHeader = ElfW(Ehdr);
using SegmentHeader = ElfW(Phdr);
using SectionHeader = ElfW(Shdr);

constexpr unsigned char kClass = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
constexpr unsigned char kByteOrder = std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
#if defined(__x86_64__)
constexpr unsigned kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr unsigned kMachine = EM_AARCH64;
#else
constexpr unsigned kMachine = EM_NONE;  // not checked here: the dynamic linker refuses another machine without a signal
#endif

std::string system_error_text() { return std::generic_category().message(errno); }

class File {
 public:
  // O_NONBLOCK: opening a pipe without a writer would block.
  explicit File(const std::string& path)
      : fd_(TEMP_FAILURE_RETRY(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY))) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }

  // Returns "", or why the file cannot be read.
  std::string measure() {
    struct stat info;
    if (fd_ < 0 || fstat(fd_, &info) != 0) return system_error_text();
    if (!S_ISREG(info.st_mode)) return "not a regular file";
    n_bytes_ = static_cast<uint64_t>(info.st_size);
    return "";
  }

  uint64_t n_bytes() const { return n_bytes_; }
  bool has(uint64_t offset, uint64_t n_bytes) const { return offset <= n_bytes_ && n_bytes <= n_bytes_ - offset; }

  // Reads bytes that the file has. Returns "", or why they cannot be read.
  std::string read(uint64_t offset, size_t n_bytes, void* data) const {
    for (size_t done = 0; done < n_bytes;) {
      const ssize_t n =
          TEMP_FAILURE_RETRY(pread(fd_, static_cast<char*>(data) + done, n_bytes - done, static_cast<off_t>(offset + done)));
      if (n < 0) return system_error_text();
      if (n == 0) return "became shorter while it was read";
      done += static_cast<size_t>(n);
    }
    return "";
  }

 private:
  const int fd_;
  uint64_t n_bytes_ = 0;
};

std::string truncated(const char* part, uint64_t offset, uint64_t n_bytes, const File& file) {
  return std::string("truncated: ") + part + " takes " + std::to_string(n_bytes) + " bytes from byte " +
         std::to_string(offset) + ", the file has " + std::to_string(file.n_bytes());
}

std::string header_refusal(const FileHeader& header) {
  const unsigned char* ident = header.e_ident;
  const auto differs = [](const char* what, unsigned value, unsigned wanted) {
    return std::string("invalid ELF header: ") + what + " is " + std::to_string(value) + ", not " + std::to_string(wanted);
  };
  if (std::memcmp(ident, ELFMAG, SELFMAG) != 0) return "invalid ELF header: not an ELF file";
  if (ident[EI_CLASS] != kClass) return differs("its class", ident[EI_CLASS], kClass);
  if (ident[EI_DATA] != kByteOrder) return differs("its byte order", ident[EI_DATA], kByteOrder);
  if (kMachine != EM_NONE && header.e_machine != kMachine) return differs("its machine", header.e_machine, kMachine);
  if (header.e_type != ET_DYN) return differs("its type", header.e_type, ET_DYN);
  if (header.e_phentsize != sizeof(SegmentHeader))
    return differs("the size of a program header", header.e_phentsize, sizeof(SegmentHeader));
  return "";
}

// Section headers are not loaded. They come last in a file, so they reveal a file that was truncated behind its segments.
std::string tables_refusal(const FileHeader& header, const File& file) {
  const uint64_t segments = uint64_t{header.e_phnum} * sizeof(SegmentHeader),
                 sections = uint64_t{header.e_shnum} * sizeof(SectionHeader);
  if (!file.has(header.e_phoff, segments)) return truncated("the table of program headers", header.e_phoff, segments, file);
  if (header.e_shoff != 0 && !file.has(header.e_shoff, sections))
    return truncated("the table of section headers", header.e_shoff, sections, file);
  return "";
}

std::string segments_refusal(const FileHeader& header, const File& file) {
  std::vector<SegmentHeader> segments(header.e_phnum);
  const std::string unread = file.read(header.e_phoff, segments.size() * sizeof(SegmentHeader), segments.data());
  if (!unread.empty()) return unread;
  for (const SegmentHeader& segment : segments)
    if (segment.p_type == PT_LOAD && !file.has(segment.p_offset, segment.p_filesz))
      return truncated("a segment", segment.p_offset, segment.p_filesz, file);
  return "";
}

}  // namespace

std::string module_file_refusal(const std::string& path) {
  File file(path);
  std::string reason = file.measure();
  if (!reason.empty()) return reason;
  FileHeader header = {};
  if (!file.has(0, sizeof header))
    return "file too short: it has " + std::to_string(file.n_bytes()) + " bytes, an ELF header takes " +
           std::to_string(sizeof header);
  reason = file.read(0, sizeof header, &header);
  if (reason.empty()) reason = header_refusal(header);
  if (reason.empty()) reason = tables_refusal(header, file);
  return reason.empty() ? segments_refusal(header, file) : reason;
}

}  // namespace tandem
