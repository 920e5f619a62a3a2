// SPDX-License-Identifier: MIT
#include "safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "json_text.h"
#include "text_file.h"

namespace generate {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

// Returns 0 for a type that the format lacks, or a sub-byte type, which this code cannot use.
size_t element_bytes(const std::string& dtype) {
  static constexpr struct {
    const char* name;
    size_t n_bytes;
  } kTypes[] = {{"F64", 8}, {"I64", 8}, {"U64", 8}, {"F32", 4},     {"I32", 4},     {"U32", 4}, {"F16", 2}, {"BF16", 2},
                {"I16", 2}, {"U16", 2}, {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U8", 1},  {"BOOL", 1}};
  for (const auto& type : kTypes)
    if (dtype == type.name) return type.n_bytes;
  return 0;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t{half} >> 15 << 31, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) {  // zero and subnormal: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

// Parses {"dtype": "BF16", "shape": [256, 384], "data_offsets": [first, last + 1]}, whose data must be within n_data_bytes.
// Returns "", or what is wrong.
std::string parse_entry(const Json& json, const std::byte* data, uint64_t n_data_bytes, WeightView* view) {
  if (!json.is_object()) return "is not an object";
  const auto dtype = json.find("dtype"), shape = json.find("shape"), offsets = json.find("data_offsets");
  if (dtype == json.end() || !dtype->is_string()) return "has no dtype";
  if (shape == json.end() || !shape->is_array() || shape->size() > 8) return "has no shape";
  if (offsets == json.end() || !offsets->is_array() || offsets->size() != 2) return "has no data_offsets";
  view->dtype = dtype->get<std::string>();
  uint64_t n_bytes = element_bytes(view->dtype);
  if (n_bytes == 0) return "has dtype " + brief(*dtype) + ", which is unknown";
  for (const Json& length : *shape) {
    if (!length.is_number_unsigned() || length.get<uint64_t>() > INT64_MAX)
      return "has shape " + brief(*shape) + ", which is not one of lengths";
    view->shape.push_back(length.get<int64_t>());
    if (__builtin_mul_overflow(n_bytes, length.get<uint64_t>(), &n_bytes))
      return "has shape " + brief(*shape) + ", too large";
  }
  for (const Json& offset : *offsets)
    if (!offset.is_number_unsigned()) return "has data_offsets " + brief(*offsets) + ", which are not offsets";
  const uint64_t first = (*offsets)[0].get<uint64_t>(), end = (*offsets)[1].get<uint64_t>();
  if (first > end || end > n_data_bytes)
    return "has data_offsets " + brief(*offsets) + " outside the " + std::to_string(n_data_bytes) + " bytes of data";
  if (end - first != n_bytes)
    return "has data_offsets " + brief(*offsets) + ", but shape " + brief(*shape) + " of " + view->dtype + " takes " +
           std::to_string(n_bytes) + " bytes";
  view->data = data + first;
  view->n_bytes = n_bytes;
  return "";
}

// Returns the header, or "discarded". *twice gets a key that the header, or one of its tensors, has twice: Json keeps only
// the last.
Json parse_json(const char* first, const char* last, std::string* twice) {
  std::set<std::string> tensor_keys, header_keys;
  const auto watch = [&](int depth, Json::parse_event_t event, const Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::object_start) tensor_keys.clear();
    if (event != Json::parse_event_t::key || depth > 2) return true;
    const std::string key = parsed.get<std::string>();
    if (!(depth == 1 ? header_keys : tensor_keys).insert(key).second) *twice = key;
    return true;
  };
  return Json::parse(first, last, watch, false);
}

struct Range {
  uint64_t first, end;  // range in the data, in bytes
  std::string name;
};

// Checks that the ranges follow one another from the first byte of the data to the last. Returns "", or what is wrong.
std::string cover_refusal(std::vector<Range> ranges, uint64_t n_data_bytes) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return std::tie(a.first, a.end) < std::tie(b.first, b.end); });
  const auto bytes = [](uint64_t first, uint64_t end) {
    return "bytes " + std::to_string(first) + " to " + std::to_string(end);
  };
  uint64_t covered = 0;
  const Range* before = nullptr;
  for (const Range& range : ranges) {
    if (range.first < covered)
      return "tensor " + brief(range.name) + " at " + bytes(range.first, range.end) + " overlaps tensor " +
             brief(before->name) + " at " + bytes(before->first, before->end);
    if (range.first > covered) return bytes(covered, range.first) + " of the data belong to no tensor";
    covered = range.end;
    before = &range;
  }
  return covered == n_data_bytes ? "" : bytes(covered, n_data_bytes) + " of the data belong to no tensor";
}

}  // namespace

WeightFiles::~WeightFiles() {
  for (const Mapping& mapping : mappings_) munmap(mapping.data, mapping.n_bytes);
}

Failure WeightFiles::open_directory(const std::string& directory) {
  const std::string single = directory + "/model.safetensors", index = single + ".index.json";
  if (access(single.c_str(), F_OK) == 0) {
    GENERATE_TRY(open_file(single));
  } else if (access(index.c_str(), F_OK) == 0) {
    GENERATE_TRY(open_index(directory, index));
  } else {
    return {single + ": " + std::strerror(errno)};
  }
  source_ = directory;
  return {};
}

Failure WeightFiles::open_index(const std::string& directory, const std::string& index_path) {
  std::string text;
  GENERATE_TRY(refuse_irregular(index_path));
  GENERATE_TRY(read_text_file(index_path, &text));
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    return {index_path + ": weight_map is missing"};
  std::set<std::string> files;
  for (const auto& [name, file] : json["weight_map"].items()) {
    if (!file.is_string()) return {index_path + ": weight_map: " + brief(name) + " has no file"};
    const std::string file_name = file.get<std::string>();
    if (file_name.empty() || file_name.find('/') != std::string::npos || file_name.find('\0') != std::string::npos)
      return {index_path + ": weight_map: " + brief(file_name) + " is not the name of a file beside it"};
    files.insert(file_name);
  }
  for (const std::string& file : files) GENERATE_TRY(open_file(directory + "/" + file));
  for (const auto& [name, file] : json["weight_map"].items())
    if (!has(name)) return {directory + "/" + file.get<std::string>() + ": tensor " + brief(name) + " is missing"};
  return {};
}

Failure WeightFiles::open_file(const std::string& path) {
  source_ = path;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // does not wait for a pipe's writer
  if (fd < 0) return {path + ": " + std::strerror(errno)};
  struct stat info = {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const size_t n_bytes = regular ? static_cast<size_t>(info.st_size) : 0;
  void* data = n_bytes >= 8 ? mmap(nullptr, n_bytes, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  const int map_errno = errno;
  close(fd);
  if (!regular) return {path + ": is not a regular file"};
  if (n_bytes < 8) return {path + ": has " + std::to_string(n_bytes) + " bytes, too few for a header length"};
  if (data == MAP_FAILED) return {path + ": " + std::strerror(map_errno)};
  mappings_.push_back({data, n_bytes});
  return parse_header(path, mappings_.back());
}

Failure WeightFiles::parse_header(const std::string& path, const Mapping& mapping) {
  uint64_t n_header_bytes = 0;
  std::memcpy(&n_header_bytes, mapping.data, 8);
  if (n_header_bytes > mapping.n_bytes - 8 || n_header_bytes > kMaxHeaderBytes)
    return {path + ": header length " + std::to_string(n_header_bytes) + " does not fit the file of " +
            std::to_string(mapping.n_bytes) + " bytes"};
  const char* header = static_cast<const char*>(mapping.data) + 8;
  std::string twice;
  const Json json = parse_json(header, header + n_header_bytes, &twice);
  if (!json.is_object()) return {path + ": header is not a JSON object"};
  if (!twice.empty()) return {path + ": header has the key " + brief(twice) + " twice"};
  const std::byte* data = reinterpret_cast<const std::byte*>(header) + n_header_bytes;
  const uint64_t n_data_bytes = mapping.n_bytes - 8 - n_header_bytes;
  std::vector<Range> ranges;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") continue;
    Entry entry;
    entry.path = path;
    const std::string wrong = parse_entry(value, data, n_data_bytes, &entry.view);
    if (!wrong.empty()) return {path + ": tensor " + brief(name) + " " + wrong};
    const auto first = static_cast<uint64_t>(entry.view.data - data);
    ranges.push_back({first, first + entry.view.n_bytes, name});
    if (!tensors_.emplace(name, std::move(entry)).second) return {path + ": tensor " + brief(name) + " is in two files"};
  }
  const std::string wrong = cover_refusal(std::move(ranges), n_data_bytes);
  return wrong.empty() ? Failure{} : Failure{path + ": " + wrong};
}

Failure WeightFiles::find(const std::string& name, const std::vector<int64_t>& shape, WeightView* view) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) return {source_ + ": tensor " + name + " is missing"};
  if (it->second.view.shape != shape)
    return {it->second.path + ": tensor " + name + " has shape " + shape_text(it->second.view.shape) +
            ", config.json asks for " + shape_text(shape)};
  *view = it->second.view;
  it->second.was_read = true;
  return {};
}

Failure WeightFiles::refuse_unread() const {
  for (const auto& [name, entry] : tensors_) {
    const bool in_layer = name.rfind("model.layers.", 0) == 0, table = name.find("rotary_emb.inv_freq") != std::string::npos;
    if (in_layer && !table && !entry.was_read)
      return {entry.path + ": tensor " + brief(name) + " is not part of the architecture that config.json describes"};
  }
  return {};
}

Failure WeightFiles::read_f32(const std::string& name, const std::vector<int64_t>& shape, std::vector<float>* values) const {
  WeightView view;
  GENERATE_TRY(find(name, shape, &view));
  const bool f32 = view.dtype == "F32", bf16 = view.dtype == "BF16";
  if (!f32 && !bf16 && view.dtype != "F16")
    return {tensors_.at(name).path + ": tensor " + name + " has dtype " + view.dtype + " (BF16, F16 and F32 are supported)"};
  values->resize(view.n_bytes / element_bytes(view.dtype));
  if (f32) {
    if (view.n_bytes > 0) std::memcpy(values->data(), view.data, view.n_bytes);
    return {};
  }
  for (size_t i = 0; i < values->size(); ++i) {
    uint16_t half = 0;  // tensors may start at odd addresses
    std::memcpy(&half, view.data + 2 * i, 2);
    (*values)[i] = bf16 ? std::bit_cast<float>(uint32_t{half} << 16) : f16_to_f32(half);
  }
  return {};
}

}  // namespace generate
