// SPDX-License-Identifier: MIT
// A profile: what one append takes, by the pattern of its heads and by the length of its sequence. As a file it is a JSON
// object: facts that all rows share (machine, shape, types, threads, chunk), and the rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/engine_report.h"
#include "tools/patterns/profile_curve.h"

namespace tools {

struct ProfileRow {
  std::string pattern;  // profile_name()
  int64_t kv_len = 0;   // keys that the last query sees
  double ns = 0;        // of the call
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

// A row has "pattern", "kv_len" and "ns". Anything else in it is kept as it is.
Result add_row(Profile* profile, const Json& row);

// option is named where the file cannot be read or is no profile.
Result read_profile(const char* option, const std::string& path, Profile* profile);

// A reader finds the old file or the new one, whenever the program ends.
Result write_profile(const std::string& path, const Profile& profile);

// Refuses to add rows with these facts to a file that has others, and names the first fact that differs.
Result check_facts(const std::string& path, const Json& of_file, const Json& own);

}  // namespace tools
