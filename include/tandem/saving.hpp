// SPDX-License-Identifier: MIT
//
// Sequences in files, for C++11 and later on POSIX systems. Part of tandem.hpp.
//
//   tandem::save_sequence(cache, sequence, "prompt.tandem", {&session});
//   int64_t again = tandem::load_sequence(cache, "prompt.tandem", {&session});
#ifndef TANDEM_SAVING_HPP_
#define TANDEM_SAVING_HPP_

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "tandem/tandem.hpp"

namespace tandem {
inline namespace cpp {

// Saved with a sequence: what a session has learned of it, a number for the model's weights, and named bytes of the caller.
struct SavedWith {
  const Session* session;
  uint64_t model_id;
  std::map<std::string, std::string> blobs;

  SavedWith(const Session* of = nullptr, uint64_t id = 0)  // NOLINT(google-explicit-constructor): it is an argument in braces
      : session(of), model_id(id) {}
};

namespace detail {

// Throws errno as a std::system_error with the path.
[[noreturn]] inline void fail_file(const std::string& path) {
  throw std::system_error(errno, std::generic_category(), path);
}

class File {
 public:
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail_file(path);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(fd_); }
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Returns errno, or 0 once everything is written.
inline int32_t write_file(const void* data, int64_t n_bytes, void* file) {
  const char* from = static_cast<const char*>(data);
  while (n_bytes > 0) {
    const ssize_t n = ::write(static_cast<File*>(file)->fd(), from, static_cast<std::size_t>(n_bytes));
    if (n < 0 && errno != EINTR) return errno;
    if (n > 0) from += n, n_bytes -= n;
  }
  return 0;
}

inline int64_t read_file(void* data, int64_t n_bytes, void* file) {
  for (;;) {
    const ssize_t n = ::read(static_cast<File*>(file)->fd(), data, static_cast<std::size_t>(n_bytes));
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
  }
}

inline int32_t take_blob(const char* name, const void* data, int64_t n_bytes, void* blobs) {
  try {
    (*static_cast<std::map<std::string, std::string>*>(blobs))[name] =
        n_bytes > 0 ? std::string(static_cast<const char*>(data), static_cast<std::size_t>(n_bytes)) : std::string();
    return 0;
  } catch (...) {  // no memory
    return 1;
  }
}

// A file name that no other save has. The destructor removes the file.
class PartName {
 public:
  explicit PartName(const std::string& path) {
    static std::atomic<unsigned> n_made(0);
    name_ = path + "." + std::to_string(::getpid()) + "." + std::to_string(n_made++) + ".part";
  }
  PartName(const PartName&) = delete;
  PartName& operator=(const PartName&) = delete;
  ~PartName() { ::unlink(name_.c_str()); }  // no file has this name after the rename
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

}  // namespace detail

// tandem_sequence_save() with the caller's function and the options of `with`.
inline void save_sequence(const Cache& cache, int64_t sequence, tandem_write_fn write, void* user,
                          const SavedWith& with = SavedWith()) {
  std::vector<tandem_saved_blob> blobs;
  for (const auto& blob : with.blobs) {
    tandem_saved_blob raw = TANDEM_SAVED_BLOB_INIT;
    raw.name = blob.first.c_str();
    raw.data = blob.second.data();
    raw.n_bytes = static_cast<int64_t>(blob.second.size());
    blobs.push_back(raw);
  }
  tandem_save_options options = TANDEM_SAVE_OPTIONS_INIT;
  options.session = with.session != nullptr ? with.session->get() : nullptr;
  options.model_id = with.model_id;
  options.blobs = blobs.empty() ? nullptr : blobs.data();
  options.n_blobs = static_cast<int64_t>(blobs.size());
  detail::call(tandem_sequence_save, cache.get(), sequence, write, user,
               static_cast<const tandem_save_options*>(&options));
}

// Saves to a file. Writes another file beside it (.part), and renames that file once it is complete and on the disk. Until
// then the path is the old file, or no file. If the process is killed, the .part file stays. Throws Error, and
// std::system_error if a file operation fails.
inline void save_sequence(const Cache& cache, int64_t sequence, const std::string& path,
                          const SavedWith& with = SavedWith()) {
  const detail::PartName part(path);
  {
    detail::File file(part.name(), O_WRONLY | O_CREAT | O_EXCL);
    save_sequence(cache, sequence, detail::write_file, &file, with);
    if (::fsync(file.fd()) != 0) detail::fail_file(part.name());
  }
  if (std::rename(part.name().c_str(), path.c_str()) != 0) detail::fail_file(path);
  const std::size_t slash = path.rfind('/');
  const detail::File folder(slash == std::string::npos ? "." : path.substr(0, slash + 1), O_RDONLY | O_DIRECTORY);
  if (::fsync(folder.fd()) != 0) detail::fail_file(path);
}

// tandem_sequence_load() with the caller's function. blobs: receives the blobs; null: not wanted.
inline int64_t load_sequence(Cache& cache, tandem_read_fn read, void* user, const SavedWith& with = SavedWith(),
                             std::map<std::string, std::string>* blobs = nullptr, int64_t file_bytes = -1) {
  std::map<std::string, std::string> found;
  tandem_load_options options = TANDEM_LOAD_OPTIONS_INIT;
  options.session = with.session != nullptr ? with.session->get() : nullptr;
  options.model_id = with.model_id;
  options.file_bytes = file_bytes;
  if (blobs != nullptr) options.blob = detail::take_blob, options.blob_user = &found;
  int64_t sequence = 0;
  detail::call(tandem_sequence_load, &sequence, cache.get(), read, user,
               static_cast<const tandem_load_options*>(&options));
  if (blobs != nullptr) blobs->swap(found);
  return sequence;
}

// Loads from a file.
inline int64_t load_sequence(Cache& cache, const std::string& path, const SavedWith& with = SavedWith(),
                             std::map<std::string, std::string>* blobs = nullptr) {
  detail::File file(path, O_RDONLY);
  struct stat info;
  if (::fstat(file.fd(), &info) != 0) detail::fail_file(path);
  return load_sequence(cache, detail::read_file, &file, with, blobs, static_cast<int64_t>(info.st_size));
}

}  // namespace cpp
}  // namespace tandem

#endif  // TANDEM_SAVING_HPP_
