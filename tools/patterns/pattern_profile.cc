// SPDX-License-Identifier: MIT
#include "tools/patterns/pattern_profile.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "examples/generate/interrupt.h"
#include "tools/bench/machine_facts.h"
#include "tools/common/flags.h"
#include "tools/common/run_tool.h"
#include "tools/patterns/pattern_heads.h"
#include "tools/patterns/pattern_show.h"
#include "tools/patterns/profile_file.h"
#include "tools/patterns/profile_measure.h"
#include "tools/patterns/profile_options.h"
#include "tools/patterns/profile_pattern.h"
#include "tools/patterns/profile_picture.h"

namespace tools {
namespace {

// Prints rows as text, as wide as the longest name, or as JSON lines.
class RowPrinter {
 public:
  RowPrinter(bool is_json, const std::vector<std::string>& names) : is_json_(is_json) {
    for (const std::string& name : names) width_ = std::max(width_, static_cast<int>(name.size()));
  }
  Result print(const Json& row) {
    if (is_json_) {
      std::puts(row.dump().c_str());
      return flush_stdout();
    }
    const bool has_pairs = row.contains("pairs");
    if (!has_header_) {
      std::printf("| %-*s |    keys |         ms | us of a head |%s\n", width_, "pattern", has_pairs ? " pairs, % |" : "");
      std::printf("|-%s-|--------:|-----------:|-------------:|%s\n", std::string(static_cast<size_t>(width_), '-').c_str(),
                  has_pairs ? "---------:|" : "");
      has_header_ = true;
    }
    std::printf("| %-*s | %7lld | %10.3f | %12.1f |", width_, row["pattern"].get<std::string>().c_str(),
                row["kv_len"].get<long long>(), row["ns"].get<double>() / 1e6, row["ns_of_head"].get<double>() / 1e3);
    if (has_pairs) std::printf(" %8.2f |", 100.0 * row["pairs"].get<double>() / row["dense_pairs"].get<double>());
    std::puts("");
    return flush_stdout();
  }

 private:
  bool is_json_, has_header_ = false;
  int width_ = 7;  // of "pattern"
};

Result write_picture(const std::string& path, const Profile& profile, const std::vector<std::string>& patterns) {
  if (path.empty()) return {};
  std::ofstream file(path, std::ios::binary);
  file << profile_svg(profile, patterns) << std::flush;
  return file.good() ? Result() : refuse("--svg = %s cannot be written", path.c_str());
}

// The device is null if the CPU attends: a profile is that of one processor.
Result facts_of(const ProfileLayer& layer, const tandem_engine* engine, Json* facts) {
  Json report, device;
  TOOL_TRY(engine_report(engine, &report));
  if (layer.on_device()) {
    EngineDevice opened;
    TOOL_TRY(open_device_of(report, &opened));
    device = opened.name;
  }
  const std::vector<int32_t> cpus = cpus_by_core();
  (*facts)["machine"] = {{"processor", processor_name()},
                         {"isa", find_member(report, "isa")},
                         {"cpus", cpus.size()},
                         {"cache_bytes", last_level_cache_bytes(cpus)},
                         {"device", device}};
  (*facts)["shape"] = {{"q_heads", layer.n_q_heads}, {"kv_heads", layer.n_kv_heads}, {"head_dim", layer.head_dim}};
  (*facts)["kv_type"] = dtype_name(layer.kv_type);
  (*facts)["io_type"] = dtype_name(layer.io_type);
  (*facts)["threads"] = find_member(report, "n_workers");
  (*facts)["chunk"] = layer.chunk;
  return {};
}

Json row_of(const ProfileLayer& layer, int64_t kv_len, const tandem_head_pattern& pattern, const ProfileTime& time) {
  Json row;
  row["pattern"] = profile_name(pattern);
  row.update(head_json(pattern));
  row["kv_len"] = kv_len;
  row["ns"] = std::llround(time.ns);
  row["ns_of_head"] = std::llround(row["ns"].get<double>() / static_cast<double>(layer.n_q_heads));
  row["pairs"] = time.pairs;
  row["dense_pairs"] = time.dense_pairs;
  row["repeats"] = layer.repeats;
  return row;
}

std::vector<std::string> names_of(const std::vector<tandem_head_pattern>& patterns) {
  std::vector<std::string> names;
  for (const tandem_head_pattern& pattern : patterns) names.push_back(profile_name(pattern));
  return names;
}

// Lists FULL first, then the patterns of the file, then those of the command line.
Result patterns_to_measure(const ProfileOptions& options, std::vector<tandem_head_pattern>* patterns) {
  add_distinct(patterns, TANDEM_HEAD_PATTERN_INIT);
  if (!options.heads_path.empty()) {
    PatternHeads heads;
    TOOL_TRY(read_heads(options.heads_path, TANDEM_PATTERN_FILE_OPTIONS_INIT, &heads));
    for (const tandem_head_pattern& head : heads.heads) add_distinct(patterns, head);
  }
  for (const tandem_head_pattern& pattern : options.patterns) add_distinct(patterns, pattern);
  return {};
}

// One measurement: the patterns and lengths that the profile lacks.
struct Measurement {
  const ProfileOptions& options;
  std::vector<tandem_head_pattern> patterns;
  std::unique_ptr<ProfileBench> bench;
  Profile profile;

  std::vector<tandem_head_pattern> missing_at(int64_t kv_len) const {
    std::vector<tandem_head_pattern> missing;
    for (const tandem_head_pattern& pattern : patterns)
      if (!profile.has(profile_name(pattern), kv_len)) missing.push_back(pattern);
    return missing;
  }

  Result start() {
    TOOL_TRY(patterns_to_measure(options, &patterns));
    TOOL_TRY(ProfileBench::create(options.layer, &bench));
    TOOL_TRY(bench->check_memory(options.lengths.back()));
    TOOL_TRY(facts_of(options.layer, bench->engine(), &profile.facts));
    if (!options.append || !std::filesystem::exists(options.out)) return {};
    Profile kept;
    TOOL_TRY(read_profile("--out", options.out, &kept));
    TOOL_TRY(check_facts(options.out, kept.facts, profile.facts));
    profile.rows = std::move(kept.rows);
    std::fprintf(stderr, "rows kept of %s: %zu\n", options.out.c_str(), profile.rows.size());
    return {};
  }

  Result measure_length(int64_t kv_len, RowPrinter* printer) {
    const std::vector<tandem_head_pattern> missing = missing_at(kv_len);
    if (missing.empty()) return {};
    std::fprintf(stderr, "%lld keys; patterns: %zu; repeats: %lld\n", static_cast<long long>(kv_len), missing.size(),
                 static_cast<long long>(options.layer.repeats));
    std::vector<ProfileTime> times;
    TOOL_TRY(bench->measure(kv_len, missing, &times));
    for (size_t i = 0; i < missing.size(); ++i) {
      const Json row = row_of(options.layer, kv_len, missing[i], times[i]);
      TOOL_TRY(add_row(&profile, row));
      if (!options.out.empty()) TOOL_TRY(write_profile(options.out, profile));
      TOOL_TRY(printer->print(row));
    }
    return {};
  }

  Result run() {
    RowPrinter printer(options.json, names_of(patterns));
    const auto is_missing = [&](int64_t kv_len) { return !missing_at(kv_len).empty(); };
    if (std::any_of(options.lengths.begin(), options.lengths.end(), is_missing))
      TOOL_TRY(bench->check_outputs(options.lengths.front()));
    for (const int64_t kv_len : options.lengths) TOOL_TRY(measure_length(kv_len, &printer));
    return {};
  }
};

Result measure_profile(const ProfileOptions& options) {
  generate::catch_interrupts();
  Measurement measurement = {options, {}, nullptr, {}};
  TOOL_TRY(measurement.start());
  const Result measured = measurement.run();
  const Profile& profile = measurement.profile;
  if (!profile.rows.empty()) TOOL_TRY(write_picture(options.svg, profile, profile.patterns()));
  if (!measured.is_interrupted() || options.out.empty()) return measured;
  return interrupted("interrupted; rows in %s: %zu; --append measures the missing ones", options.out.c_str(),
                     profile.rows.size());
}

// Returns the patterns of --pattern, or all.
Result patterns_to_read(const ProfileOptions& options, const Profile& profile, std::vector<std::string>* patterns) {
  const std::vector<std::string> all = profile.patterns();
  *patterns = options.patterns.empty() ? all : names_of(options.patterns);
  for (const std::string& name : *patterns)
    if (std::find(all.begin(), all.end(), name) == all.end())
      return refuse("--pattern: %s is not in --from = %s", name.c_str(), options.from.c_str());
  if (patterns->empty()) return refuse("--from = %s has no rows", options.from.c_str());
  return {};
}

// Makes a row without pairs, because pairs were not counted at that length.
Result interpolated_row(const Profile& profile, const std::string& pattern, int64_t kv_len, Json* row) {
  const std::vector<ProfilePoint> points = profile.points(pattern);
  const std::optional<double> ns = time_at(points, kv_len);
  if (!ns)
    return refuse("--at = %lld: %s was measured from %lld to %lld keys", static_cast<long long>(kv_len), pattern.c_str(),
                  static_cast<long long>(points.front().kv_len), static_cast<long long>(points.back().kv_len));
  (*row)["pattern"] = pattern;
  (*row)["kv_len"] = kv_len;
  (*row)["ns"] = std::llround(*ns);
  (*row)["ns_of_head"] = std::llround(*ns / static_cast<double>(profile.n_q_heads()));
  return {};
}

Result read_times(const ProfileOptions& options) {
  Profile profile;
  TOOL_TRY(read_profile("--from", options.from, &profile));
  std::vector<std::string> patterns;
  TOOL_TRY(patterns_to_read(options, profile, &patterns));
  std::vector<Json> rows;  // all rows are computed before one is printed
  for (const int64_t kv_len : options.at)
    for (const std::string& pattern : patterns) {
      rows.emplace_back();
      TOOL_TRY(interpolated_row(profile, pattern, kv_len, &rows.back()));
    }
  TOOL_TRY(write_picture(options.svg, profile, patterns));
  RowPrinter printer(options.json, patterns);
  for (const Json& row : rows) TOOL_TRY(printer.print(row));
  return {};
}

}  // namespace

Result run_pattern_profile(int argc, const char* const* argv) {
  ProfileOptions options;
  TOOL_TRY(parse_profile_options(argc - 1, argv + 1, &options));
  if (options.asked != Asked::kNothing) return answer(options.asked, "tandem-patterns", profile_help());
  return options.from.empty() ? measure_profile(options) : read_times(options);
}

}  // namespace tools
