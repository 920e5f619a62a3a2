// SPDX-License-Identifier: MIT
// /proc/self/cgroup names the process's group in each hierarchy. /proc/self/mountinfo says where the hierarchies are
// mounted, and which part of each. A container often sees only its own group, mounted as the root.
//
//   0::/system.slice/app                                 cgroup2: <mount>/system.slice/app/cpu.max     "150000 100000"
//   4:cpu,cpuacct:/docker/1f                             cgroup:  <mount>/docker/1f/cpu.cfs_quota_us   "150000"
//
// Every group up to the root may have a quota, and all of these apply. Groups above the mount cannot be read.
#include "cpu/cgroup.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <vector>

namespace tandem::cpu {
namespace {

constexpr int64_t kNoLimit = INT64_MAX;
constexpr int64_t kDefaultPeriodUs = 100'000;

struct Mount {
  bool v2 = false;
  std::string root;  // the group that is visible at `point`
  std::string point;
};

struct Group {
  bool v2 = false;
  std::string path;
};

std::string read_file(const std::string& path) {
  std::string text;
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    char buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
    std::fclose(file);
  }
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool contains(const std::vector<std::string_view>& parts, std::string_view part) {
  return std::find(parts.begin(), parts.end(), part) != parts.end();
}

bool parse_number(std::string_view text, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// Decodes a path of mountinfo. Linux writes blanks, line ends and backslashes there as a backslash and three octal digits.
std::string unescaped(std::string_view field) {
  const auto digit = [&](size_t i) { return i < field.size() && field[i] >= '0' && field[i] <= '7'; };
  std::string text;
  for (size_t i = 0; i < field.size(); ++i) {
    if (field[i] == '\\' && digit(i + 1) && digit(i + 2) && digit(i + 3)) {
      text += static_cast<char>((field[i + 1] - '0') * 64 + (field[i + 2] - '0') * 8 + (field[i + 3] - '0'));
      i += 3;
    } else {
      text += field[i];
    }
  }
  return text;
}

// Parses lines of the form: 36 35 98:0 <root> <point> <options> [<tag>...] - <type> <source> <options>
std::vector<Mount> cgroup_mounts(const std::string& mountinfo) {
  std::vector<Mount> mounts;
  for (std::string_view line : split(mountinfo, '\n')) {
    const std::vector<std::string_view> fields = split(line, ' ');
    const size_t dash = std::find(fields.begin(), fields.end(), "-") - fields.begin();
    if (dash < 6 || dash + 3 >= fields.size()) continue;
    const bool v2 = fields[dash + 1] == "cgroup2";
    const bool v1 = fields[dash + 1] == "cgroup" && contains(split(fields[dash + 3], ','), "cpu");
    if (v1 || v2) mounts.push_back({v2, unescaped(fields[3]), unescaped(fields[4])});
  }
  return mounts;
}

// Parses lines of the form: <hierarchy>:<controllers>:<path>
std::vector<Group> own_groups(const std::string& cgroup) {
  std::vector<Group> groups;
  for (std::string_view line : split(cgroup, '\n')) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (v2 || contains(split(controllers, ','), "cpu")) groups.push_back({v2, std::string(line.substr(second + 1))});
  }
  return groups;
}

// Returns the path of the group below the mount point. Empty: the mount point itself, also if the group is outside of it.
std::string path_below_mount(const Group& group, const Mount& mount) {
  if (group.path.empty() || group.path[0] != '/' || contains(split(group.path, '/'), "..")) return {};
  const std::string root = mount.root == "/" ? "" : mount.root;
  if (group.path.compare(0, root.size(), root) != 0) return {};
  const std::string below = group.path.substr(root.size());
  return below.size() > 1 && below[0] == '/' ? below : std::string();
}

int64_t whole_cpus(int64_t quota_us, int64_t period_us) {
  if (quota_us <= 0 || period_us <= 0) return kNoLimit;
  return std::max<int64_t>(1, quota_us / period_us);
}

int64_t quota_of_folder(const std::string& folder, bool v2) {
  int64_t quota_us = 0;
  int64_t period_us = kDefaultPeriodUs;
  if (v2) {
    std::string text = read_file(folder + "/cpu.max");
    std::replace(text.begin(), text.end(), '\n', ' ');
    const std::vector<std::string_view> fields = split(text, ' ');
    if (fields.empty() || fields.size() > 2 || !parse_number(fields[0], &quota_us)) return kNoLimit;
    if (fields.size() == 2 && !parse_number(fields[1], &period_us)) return kNoLimit;
    return whole_cpus(quota_us, period_us);
  }
  const std::string quota = read_file(folder + "/cpu.cfs_quota_us");
  const std::string period = read_file(folder + "/cpu.cfs_period_us");
  const std::vector<std::string_view> quota_lines = split(quota, '\n');
  const std::vector<std::string_view> period_lines = split(period, '\n');
  if (quota_lines.size() != 1 || !parse_number(quota_lines[0], &quota_us)) return kNoLimit;
  if (period_lines.size() != 1 || !parse_number(period_lines[0], &period_us)) return kNoLimit;
  return whole_cpus(quota_us, period_us);
}

}  // namespace

int32_t cpu_quota(const CgroupPaths& paths) {
  const std::vector<Mount> mounts = cgroup_mounts(read_file(paths.proc + "/mountinfo"));
  int64_t n_cpus = kNoLimit;
  for (const Group& group : own_groups(read_file(paths.proc + "/cgroup"))) {
    for (const Mount& mount : mounts) {
      if (mount.v2 != group.v2) continue;
      for (std::string path = path_below_mount(group, mount);; path.resize(path.rfind('/'))) {
        n_cpus = std::min(n_cpus, quota_of_folder(paths.root + mount.point + path, group.v2));
        if (path.empty()) break;
      }
    }
  }
  return n_cpus == kNoLimit ? 0 : static_cast<int32_t>(std::min<int64_t>(n_cpus, INT32_MAX));
}

}  // namespace tandem::cpu
