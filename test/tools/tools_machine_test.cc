// SPDX-License-Identifier: MIT
// The free memory and the processor's name that the programs report, from trees of /proc and /sys as on machines and in
// containers.
#include <filesystem>
#include <fstream>

#include "tools/bench/machine_facts.h"
#include "with_cmocka.h"

namespace {

struct File {
  const char *path, *text;
};

std::string tree_of(std::initializer_list<File> files) {
  const std::string root = TANDEM_TEST_FOLDER "/tree";
  std::filesystem::remove_all(root);
  for (const File& file : files) {
    const std::filesystem::path path = root + file.path;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << file.text;
  }
  return root;
}

int64_t available_in(std::initializer_list<File> files) { return tools::available_memory_bytes(tree_of(files)); }

constexpr File kMeminfo = {"/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nHugePages_Total: 0\n"};
constexpr int64_t kOfMeminfo = INT64_C(8000000) << 10;

void no_limit_but_the_machines(void**) {
  assert_int_equal(available_in({kMeminfo}), kOfMeminfo);
  assert_int_equal(available_in({kMeminfo,
                                 {"/proc/self/cgroup", "0::/app\n"},
                                 {"/sys/fs/cgroup/app/memory.max", "max\n"},
                                 {"/sys/fs/cgroup/app/memory.current", "1000\n"}}),
                   kOfMeminfo);
  assert_int_equal(available_in({}), INT64_MAX);
}

void own_group(void**) {
  assert_int_equal(available_in({kMeminfo,
                                 {"/proc/self/cgroup", "0::/system.slice/app\n"},
                                 {"/sys/fs/cgroup/system.slice/app/memory.max", "3000000\n"},
                                 {"/sys/fs/cgroup/system.slice/app/memory.current", "1000000\n"}}),
                   2000000);
}

// The limits of all groups apply. An exceeded limit leaves no memory.
void groups_above(void**) {
  assert_int_equal(available_in({kMeminfo,
                                 {"/proc/self/cgroup", "0::/a/b/c\n"},
                                 {"/sys/fs/cgroup/a/b/c/memory.max", "3000000\n"},
                                 {"/sys/fs/cgroup/a/memory.max", "5000000\n"},
                                 {"/sys/fs/cgroup/a/memory.current", "4500000\n"}}),
                   500000);
  assert_int_equal(available_in({kMeminfo,
                                 {"/proc/self/cgroup", "0::/a\n"},
                                 {"/sys/fs/cgroup/a/memory.max", "3000\n"},
                                 {"/sys/fs/cgroup/a/memory.current", "4000\n"}}),
                   0);
}

// A container's own group is mounted as the root, whatever its path is.
void containers(void**) {
  for (const char* group : {"0::/\n", "0::/docker/1f\n"})
    assert_int_equal(available_in({kMeminfo,
                                   {"/proc/self/cgroup", group},
                                   {"/sys/fs/cgroup/memory.max", "700000\n"},
                                   {"/sys/fs/cgroup/memory.current", "100000\n"}}),
                     600000);
}

// Version 1 writes "no limit" as a number of 19 digits.
void version_1(void**) {
  assert_int_equal(available_in({kMeminfo,
                                 {"/proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/batch/7\n0::/\n"},
                                 {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
                                 {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000000\n"},
                                 {"/sys/fs/cgroup/memory/batch/7/memory.limit_in_bytes", "2000000\n"},
                                 {"/sys/fs/cgroup/memory/batch/7/memory.usage_in_bytes", "500000\n"}}),
                   1500000);
}

void processor_has_a_name(void**) {
  const File cpuinfo = {"/proc/cpuinfo", "processor\t: 0\nmodel\t\t: 17\nmodel name\t: A Processor @ 2 GHz\n"};
  assert_string_equal(tools::processor_name(tree_of({cpuinfo})).c_str(), "A Processor @ 2 GHz");
  assert_string_equal(tools::processor_name(tree_of({})).c_str(), "unknown");
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(no_limit_but_the_machines),
      cmocka_unit_test(own_group),
      cmocka_unit_test(groups_above),
      cmocka_unit_test(containers),
      cmocka_unit_test(version_1),
      cmocka_unit_test(processor_has_a_name),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
