// SPDX-License-Identifier: MIT
// Weight files: 8 bytes of header length (little-endian), a JSON header with every tensor's type, shape and byte range, then
// the data. The files are mapped, so only tensors that are read are loaded. Files are untrusted input: every number of the
// header is checked against the file before use. As in the format's reference implementation, no key may appear twice, and
// the tensors cover the data without overlaps or holes.
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

  // Opens model.safetensors, or the files that model.safetensors.index.json names.
  Failure open_directory(const std::string& directory);
  Failure open_file(const std::string& path);

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  // Finds a tensor. Refuses a missing tensor or another shape.
  Failure find(const std::string& name, const std::vector<int64_t>& shape, WeightView* view) const;
  // The same, converted to f32 from BF16, F16 or F32.
  Failure read_f32(const std::string& name, const std::vector<int64_t>& shape, std::vector<float>* values) const;
  // Refuses a layer's tensor that was never read: without it (a bias, another norm) the results would be wrong.
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

  std::string source_;  // the directory or file, for messages
  std::vector<Mapping> mappings_;
  std::map<std::string, Entry> tensors_;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_SAFETENSORS_H_
