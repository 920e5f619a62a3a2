// SPDX-License-Identifier: MIT
// A profile: the time of one append by the pattern of its heads and the length of its sequence. The file is a JSON object
// with the rows and the facts that all rows share (machine, shape, types, threads, chunk).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/engine_report.h"
#include "tools/patterns/profile_curve.h"

namespace tools {

struct ProfileRow {
  std::string pattern;  // profile_name() of the pattern
  int64_t kv_len = 0;   // keys that the last query sees
  double ns = 0;        // time of the call
  Json json;            // the whole row
};

struct Profile {
  Json facts;
  std::vector<ProfileRow> rows;

  int64_t n_q_heads() const { return facts["shape"]["q_heads"].get<int64_t>(); }
  bool has(const std::string& pattern, int64_t kv_len) const;
  std::vector<std::string> patterns() const;  // in the order of their first rows
  std::vector<ProfilePoint> points(const std::string& pattern) const;
};

// Adds a row. The row must have "pattern", "kv_len" and "ns". All other members are kept as they are.
Result add_row(Profile* profile, const Json& row);

// Error messages name `option` if the file cannot be read or is not a profile.
Result read_profile(const char* option, const std::string& path, Profile* profile);

// Writes the file atomically: a reader finds the old file or the new one, whenever the program ends.
Result write_profile(const std::string& path, const Profile& profile);

// Refuses to add rows with these facts to a file with other facts, and names the first fact that differs.
Result check_facts(const std::string& path, const Json& of_file, const Json& own);

}  // namespace tools
