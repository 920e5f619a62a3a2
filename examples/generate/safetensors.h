// SPDX-License-Identifier: MIT
// Weight files: 8 bytes of header length (little-endian), a JSON header that gives every tensor its type, shape and byte
// range, then the bytes. The files are mapped, so only what is read is loaded. A file is input like any other: every
// number of the header is checked against the file before it is used. As in the format's reference implementation, no key
// may appear twice, and the tensors cover the data without overlaps and without holes.
#ifndef EXAMPLES_GENERATE_SAFETENSORS_H_
#define EXAMPLES_GENERATE_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "failure.h"

namespace generate {

// One tensor inside a mapped file; valid while its WeightFiles lives.
struct WeightView {
  std::string dtype;  // "BF16", "F16", "F32", "U8", ...
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  size_t n_bytes = 0;
};

class WeightFiles {
 public:
  WeightFiles() = default;
  WeightFiles(const WeightFiles&) = delete;
  WeightFiles& operator=(const WeightFiles&) = delete;
  ~WeightFiles();

  // model.safetensors, or the files that model.safetensors.index.json names.
  Failure open_directory(const std::string& directory);
  Failure open_file(const std::string& path);

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  // Refuses a tensor that is missing or not of this shape.
  Failure find(const std::string& name, const std::vector<int64_t>& shape, WeightView* view) const;
  // The same, converted to f32 from BF16, F16 or F32.
  Failure read_f32(const std::string& name, const std::vector<int64_t>& shape, std::vector<float>* values) const;
  // Refuses a layer's tensor that nobody has read: computing without it would give wrong answers (a bias, another norm).
  Failure refuse_unread() const;

 private:
  struct Mapping {
    void* data;
    size_t n_bytes;
  };
  struct Entry {
    WeightView view;
    std::string path;
    mutable bool was_read = false;
  };

  Failure open_index(const std::string& directory, const std::string& index_path);
  Failure parse_header(const std::string& path, const Mapping& mapping);

  std::string source_;  // for messages: the directory or file
  std::vector<Mapping> mappings_;
  std::map<std::string, Entry> tensors_;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_SAFETENSORS_H_
