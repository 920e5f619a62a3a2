// SPDX-License-Identifier: MIT
#include "lib/patterns/pattern_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string_view>
#include <system_error>

#include "lib/base/json_string.h"
#include "lib/base/options.h"
#include "lib/patterns/pattern_json.h"

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr size_t kMostBytes = size_t{64} << 20;  // published files are below 100 KiB
constexpr int64_t kMostGroupSize = 4096;
constexpr size_t kMostHeads = size_t{1} << 24;
constexpr int64_t kSinkTokens = 128, kWindowTokens = 256;  // defaults of options

struct Option {
  const char* field;
  int64_t fallback, low, high;  // the value that stands for the default, and the range of all others
};

Status check_option(const Option& option, int64_t value) {
  if (value == option.fallback || (value >= option.low && value <= option.high)) return {};
  return fail(kInvalid, option.field, "%s = %lld is neither %lld, the default, nor from %lld to %lld", option.field,
              static_cast<long long>(value), static_cast<long long>(option.fallback), static_cast<long long>(option.low),
              static_cast<long long>(option.high));
}

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

std::string_view without_end(std::string_view text) {
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// ---- gates ----

using Gates = std::vector<double>;

Status parse_gate(std::string_view word, size_t n_line, Gates* gates) {
  constexpr size_t kMostShown = 40;
  double gate = 0.0;
  const char* const end = word.data() + word.size();
  const bool has_plus = word.size() > 1 && word[0] == '+' && word[1] != '-';  // from_chars() knows no plus
  const auto [stop, error] = std::from_chars(word.data() + (has_plus ? 1 : 0), end, gate);
  if (error == std::errc() && stop == end && std::isfinite(gate)) {
    gates->push_back(gate);
    return {};
  }
  const bool is_out_of_range = error == std::errc::result_out_of_range && stop == end;
  return fail(kInvalid, "path", "line %zu: %s is %s", n_line, json_string(word.substr(0, kMostShown)).c_str(),
              is_out_of_range ? "out of the range of floating point" : "not a finite number");
}

Status parse_line(std::string_view line, size_t n_line, Gates* gates) {
  while (true) {
    while (!line.empty() && is_blank(line.front())) line.remove_prefix(1);
    if (line.empty()) return {};
    const size_t n = static_cast<size_t>(std::find_if(line.begin(), line.end(), is_blank) - line.begin());
    TANDEM_TRY(parse_gate(line.substr(0, n), n_line, gates));
    line.remove_prefix(n);
  }
}

// Parses all gates, line by line. Every line must have the same number.
Status parse_lines(std::string_view text, Gates* gates, size_t* n_lines) {
  size_t n_first = 0;
  for (*n_lines = 0; !text.empty();) {
    const size_t n = std::min(text.find('\n'), text.size()), n_before = gates->size();
    TANDEM_TRY(parse_line(text.substr(0, n), ++*n_lines, gates));
    text.remove_prefix(std::min(n + 1, text.size()));
    const size_t n_gates = gates->size() - n_before;
    if (*n_lines == 1) n_first = n_gates;
    if (n_gates == 0) return fail(kInvalid, "path", "line %zu has no gates", *n_lines);
    if (n_gates != n_first)
      return fail(kInvalid, "path", "line %zu has %zu gates, but line 1 has %zu", *n_lines, n_gates, n_first);
  }
  return {};
}

// For an even number of gates, returns the mean of the two in the middle.
double median_of(Gates gates) {
  const auto middle = gates.begin() + static_cast<std::ptrdiff_t>(gates.size() / 2);
  std::nth_element(gates.begin(), middle, gates.end());
  if (gates.size() % 2 != 0) return *middle;
  return std::midpoint(*std::max_element(gates.begin(), middle), *middle);
}

Status parse_gates(std::string_view text, const tandem_pattern_file_options& options, PatternFile* file) {
  Gates gates;
  size_t n_lines = 0;
  TANDEM_TRY(parse_lines(text, &gates, &n_lines));
  const auto group_size = static_cast<size_t>(std::max<int64_t>(options.group_size, 1));
  if (gates.size() > kMostHeads / group_size)
    return fail(kInvalid, "path", "%zu gates with group_size = %zu are of more than %zu heads", gates.size(), group_size,
                kMostHeads);
  tandem_head_pattern full = AbiStruct<tandem_head_pattern>::defaults(), a_shape = full;
  full.kinds = TANDEM_PATTERN_FULL;
  a_shape.kinds = TANDEM_PATTERN_A_SHAPE;
  a_shape.sink_tokens = options.sink_tokens < 0 ? kSinkTokens : options.sink_tokens;
  a_shape.window_tokens = options.window_tokens < 0 ? kWindowTokens : options.window_tokens;
  const double threshold = options.threshold < 0.0 ? median_of(gates) : options.threshold;
  for (const double gate : gates) file->heads.insert(file->heads.end(), group_size, gate >= threshold ? full : a_shape);
  file->n_layers = static_cast<int64_t>(n_lines);
  return {};
}

// ---- files ----

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

Status refuse_file(int error) {
  return fail_system(TANDEM_ERROR_IO, error, "path", "%s", std::generic_category().message(error).c_str());
}

Status read_text(const char* path, std::string* text) {
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // does not wait for a pipe's writer
  if (descriptor < 0) return refuse_file(errno);
  const std::unique_ptr<std::FILE, Close> file(fdopen(descriptor, "rb"));
  if (file == nullptr) {
    const int error = errno;
    close(descriptor);
    return refuse_file(error);
  }
  struct stat about;
  if (fstat(descriptor, &about) != 0) return refuse_file(errno);
  if (!S_ISREG(about.st_mode)) return fail(TANDEM_ERROR_IO, "path", "this is not a regular file");
  char part[16384];
  while (const size_t n = std::fread(part, 1, sizeof part, file.get())) {
    text->append(part, n);
    if (text->size() > kMostBytes) return fail(kInvalid, "path", "the file has more than %zu bytes", kMostBytes);
  }
  return std::ferror(file.get()) != 0 ? refuse_file(errno) : Status();
}

}  // namespace

Status check_pattern_file_options(const tandem_pattern_file_options& options) {
  TANDEM_TRY(check_reserved("reserved", options.reserved));
  TANDEM_TRY(check_option({"group_size", 0, 1, kMostGroupSize}, options.group_size));
  if (options.threshold != -1.0 && !(options.threshold >= 0.0 && std::isfinite(options.threshold)))
    return fail(kInvalid, "threshold", "threshold = %g is neither -1 nor a finite number from 0 on", options.threshold);
  TANDEM_TRY(check_option({"sink_tokens", -1, 0, INT32_MAX}, options.sink_tokens));
  return check_option({"window_tokens", -1, 1, INT32_MAX}, options.window_tokens);
}

Status parse_patterns(const std::string& text, const tandem_pattern_file_options& options, PatternFile* file) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // which some editors write before UTF-8
  std::string_view known = without_end(text);
  if (known.starts_with(kByteOrderMark)) known.remove_prefix(kByteOrderMark.size());
  const auto first = std::find_if_not(known.begin(), known.end(), is_blank);
  if (first == known.end()) return fail(kInvalid, "path", "the file is empty");
  if (*first == '[' || *first == '{') return parse_pattern_json(text, &file->heads, &file->n_layers);
  return parse_gates(known, options, file);
}

Status read_pattern_file(const char* path, const tandem_pattern_file_options& options, PatternFile* file) {
  const std::string where = std::string("path = ") + path;
  if (*path == '\0') return fail(kInvalid, "path", "path = \"\" is empty");
  std::string text;
  TANDEM_TRY(read_text(path, &text).in(where.c_str()));
  return parse_patterns(text, options, file).in(where.c_str());
}

}  // namespace tandem
