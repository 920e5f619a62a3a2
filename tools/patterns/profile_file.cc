// SPDX-License-Identifier: MIT
#include "tools/patterns/profile_file.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace tools {

bool Profile::has(const std::string& pattern, int64_t kv_len) const {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const ProfileRow& row) { return row.kv_len == kv_len && row.pattern == pattern; });
}

std::vector<std::string> Profile::patterns() const {
  std::vector<std::string> names;
  for (const ProfileRow& row : rows)
    if (std::find(names.begin(), names.end(), row.pattern) == names.end()) names.push_back(row.pattern);
  return names;
}

std::vector<ProfilePoint> Profile::points(const std::string& pattern) const {
  std::vector<ProfilePoint> points;
  for (const ProfileRow& row : rows)
    if (row.pattern == pattern) points.push_back({row.kv_len, row.ns});
  std::sort(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.kv_len < b.kv_len; });
  return points;
}

Result add_row(Profile* profile, const Json& row) {
  if (!row.is_object()) return refuse("a row is no object");
  ProfileRow added;
  added.json = row;
  const auto member = [&](const char* name) { return row.contains(name) ? row[name] : Json(); };
  const Json pattern = member("pattern"), kv_len = member("kv_len"), ns = member("ns");
  if (!pattern.is_string()) return refuse("a row has no pattern");
  added.pattern = pattern.get<std::string>();
  if (!kv_len.is_number_integer() || kv_len.get<int64_t>() < 1)
    return refuse("a row of %s has no kv_len of 1 or more", added.pattern.c_str());
  added.kv_len = kv_len.get<int64_t>();
  if (!ns.is_number() || !(ns.get<double>() > 0))
    return refuse("the row of %s and %lld keys has no ns above 0", added.pattern.c_str(),
                  static_cast<long long>(added.kv_len));
  added.ns = ns.get<double>();
  if (profile->has(added.pattern, added.kv_len))
    return refuse("%s and %lld keys have two rows", added.pattern.c_str(), static_cast<long long>(added.kv_len));
  profile->rows.push_back(std::move(added));
  return {};
}

namespace {

Result parse_profile(const Json& json, Profile* profile) {
  if (!json.is_object()) return refuse("it is no JSON object");
  if (!json.contains("rows") || !json["rows"].is_array()) return refuse("it has no rows");
  profile->facts = json;
  profile->facts.erase("rows");
  const Json q_heads = json.contains("shape") ? find_member(json["shape"], "q_heads") : Json();
  if (!q_heads.is_number_integer() || q_heads.get<int64_t>() < 1) return refuse("its shape has no q_heads of 1 or more");
  for (const Json& row : json["rows"]) TOOL_TRY(add_row(profile, row));
  return {};
}

// Returns the first fact that differs, such as "machine.isa", with both values. Empty: equal.
std::string first_difference(const Json& of_file, const Json& own, const std::string& name) {
  if (of_file == own) return "";
  if (of_file.is_object() && own.is_object())
    for (const auto& [key, value] : own.items()) {
      const Json other = of_file.contains(key) ? of_file[key] : Json();
      const std::string inner = first_difference(other, value, (name.empty() ? "" : name + ".") + key);
      if (!inner.empty()) return inner;
    }
  else
    return text("%s is %s there and %s here", name.c_str(), of_file.dump().c_str(), own.dump().c_str());
  return "";
}

}  // namespace

Result read_profile(const char* option, const std::string& path, Profile* profile) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return refuse("%s = %s cannot be read", option, path.c_str());
  const Result parsed = parse_profile(Json::parse(file, nullptr, false), profile);
  if (parsed.ok()) return {};
  return refuse("%s = %s is no profile: %s", option, path.c_str(), parsed.message().c_str());
}

Result write_profile(const std::string& path, const Profile& profile) {
  std::string out = "{\n";
  for (const auto& [name, value] : profile.facts.items()) out += Json(name).dump() + ": " + value.dump() + ",\n";
  out += "\"rows\": [";
  for (size_t i = 0; i < profile.rows.size(); ++i) out += (i == 0 ? "\n" : ",\n") + profile.rows[i].json.dump();
  out += "\n]\n}\n";
  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::binary);
  file << out << std::flush;
  if (!file.good() || std::rename(partial.c_str(), path.c_str()) != 0) {
    std::remove(partial.c_str());
    return refuse("--out = %s cannot be written", path.c_str());
  }
  return {};
}

Result check_facts(const std::string& path, const Json& of_file, const Json& own) {
  const std::string difference = first_difference(of_file, own, "");
  if (difference.empty()) return {};
  return refuse("--append: the rows of --out = %s are of something else: %s", path.c_str(), difference.c_str());
}

}  // namespace tools
