// SPDX-License-Identifier: MIT
// The CPU quota, read from the test's own trees in a temporary folder.
#include "cpu/cgroup.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "with_cmocka.h"

namespace {

using tandem::cpu::cpu_quota;

constexpr const char* kV2Mount = "31 22 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr const char* kV1Mount = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n";

// A machine's files in a temporary folder, removed at the end.
class Tree {
 public:
  Tree() {
    char pattern[] = "/tmp/tandem-cgroup-XXXXXX";
    folder_ = mkdtemp(pattern);
  }
  ~Tree() { std::filesystem::remove_all(folder_); }
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = folder_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void folder(const std::string& path) const { std::filesystem::create_directories(folder_ + path); }
  void process(const std::string& cgroup, const std::string& mountinfo) const {
    write("/proc/self/cgroup", cgroup);
    write("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo);
  }
  int32_t quota() const { return cpu_quota({folder_ + "/proc/self", folder_}); }

 private:
  std::string folder_;
};

int32_t v2_quota(const std::string& text) {
  const Tree tree;
  tree.process("0::/app\n", kV2Mount);
  tree.write("/sys/fs/cgroup/app/cpu.max", text);
  return tree.quota();
}

int32_t v1_quota(const std::string& quota, const std::string& period) {
  const Tree tree;
  tree.process("5:memory:/app\n4:cpu,cpuacct:/app\n", kV1Mount);
  tree.write("/sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us", quota);
  tree.write("/sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us", period);
  return tree.quota();
}

void v2_rounds_down_but_not_to_zero(void**) {
  assert_int_equal(v2_quota("400000 100000\n"), 4);
  assert_int_equal(v2_quota("399999 100000\n"), 3);
  assert_int_equal(v2_quota("100000 100000\n"), 1);
  assert_int_equal(v2_quota("99999 100000\n"), 1);
  assert_int_equal(v2_quota("1000 100000\n"), 1);
  assert_int_equal(v2_quota("50000 10000\n"), 5);
  assert_int_equal(v2_quota("200000\n"), 2);
  assert_int_equal(v2_quota("9223372036854775806 1\n"), INT32_MAX);
}

void v2_max_is_no_limit(void**) {
  assert_int_equal(v2_quota("max 100000\n"), 0);
  assert_int_equal(v2_quota("max\n"), 0);
}

void garbage_is_no_limit(void**) {
  for (const char* text :
       {"", "\n", " ", "abc def\n", "200000 0\n", "200000 -1\n", "-1 100000\n", "0 100000\n", "2e5 100000\n",
        "200000 100000 7\n", "99999999999999999999 100000\n", "200000 abc\n", "0x10 1\n"}) {
    assert_int_equal(v2_quota(text), 0);
  }
  assert_int_equal(v2_quota(std::string("200\0000 1\n", 8)), 0);
  assert_int_equal(v2_quota(std::string(1 << 20, '7')), 0);
  for (const char* text : {"", "\n", "x\n", "1 2\n", "200000\n100000\n"}) {
    assert_int_equal(v1_quota(text, "100000\n"), 0);
    assert_int_equal(v1_quota("200000\n", text), 0);
  }
}

void v1_quota_over_period(void**) {
  assert_int_equal(v1_quota("250000\n", "100000\n"), 2);
  assert_int_equal(v1_quota("50000\n", "100000\n"), 1);
  assert_int_equal(v1_quota("60000\n", "20000\n"), 3);
  assert_int_equal(v1_quota("-1\n", "100000\n"), 0);
  assert_int_equal(v1_quota("200000\n", "0\n"), 0);
}

void the_tightest_group_up_to_the_root_counts(void**) {
  const Tree tree;
  tree.process("0::/a/b/c\n", kV2Mount);
  tree.write("/sys/fs/cgroup/a/b/c/cpu.max", "800000 100000\n");
  assert_int_equal(tree.quota(), 8);
  tree.write("/sys/fs/cgroup/a/cpu.max", "350000 100000\n");
  assert_int_equal(tree.quota(), 3);
  tree.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  assert_int_equal(tree.quota(), 3);
  tree.write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  assert_int_equal(tree.quota(), 2);
  tree.write("/sys/fs/cgroup/other/cpu.max", "100000 100000\n");
  tree.write("/sys/fs/cgroup/a/b/c/d/cpu.max", "100000 100000\n");
  assert_int_equal(tree.quota(), 2);
}

void v1_and_v2_together(void**) {
  const Tree tree;
  tree.process("4:cpu,cpuacct:/app\n1:name=systemd:/init\n0::/app\n",
               std::string("31 22 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n") + kV1Mount +
                   "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us", "600000\n");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us", "100000\n");
  tree.write("/sys/fs/cgroup/cpuset/app/cpu.cfs_quota_us", "100000\n");
  tree.write("/sys/fs/cgroup/cpuset/app/cpu.cfs_period_us", "100000\n");
  assert_int_equal(tree.quota(), 6);
  tree.write("/sys/fs/cgroup/unified/app/cpu.max", "500000 100000\n");
  assert_int_equal(tree.quota(), 5);
}

// A container without a namespace of its own sees the host's path, while its group is mounted as the root.
void a_mount_of_a_part_of_the_tree(void**) {
  const Tree tree;
  tree.process("0::/docker/1f/job\n", "31 22 0:27 /docker/1f /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("/sys/fs/cgroup/cpu.max", "700000 100000\n");
  assert_int_equal(tree.quota(), 7);
  tree.write("/sys/fs/cgroup/job/cpu.max", "300000 100000\n");
  assert_int_equal(tree.quota(), 3);
}

void blanks_in_paths_are_escaped(void**) {
  const Tree tree;
  tree.process("0::/my job\n", "31 22 0:27 / /sys/fs/c\\040group\\134 rw - cgroup2 cgroup2 rw\n");
  tree.write("/sys/fs/c group\\/my job/cpu.max", "300000 100000\n");
  assert_int_equal(tree.quota(), 3);
  tree.process("0::/my job/a\n", "31 22 0:27 /my\\040job /sys/fs/c\\04 rw - cgroup2 cgroup2 rw\n");  // an incomplete escape
  tree.write("/sys/fs/c\\04/a/cpu.max", "200000 100000\n");
  assert_int_equal(tree.quota(), 2);
}

void a_group_outside_of_the_mount_uses_the_mount(void**) {
  const Tree tree;
  tree.write("/sys/fs/cgroup/cpu.max", "400000 100000\n");
  tree.write("/sys/fs/cpu.max", "100000 100000\n");
  for (const char* group : {"0::/../../x\n", "0::/gone (deleted)\n", "0::\n", "0::relative\n", "0::/\n"}) {
    tree.process(group, kV2Mount);
    assert_int_equal(tree.quota(), 4);
  }
  tree.process("0::/docker/1fff\n", "31 22 0:27 /docker/1f /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  assert_int_equal(tree.quota(), 4);
}

void missing_or_broken_tables_are_no_limit(void**) {
  const Tree tree;
  assert_int_equal(tree.quota(), 0);
  tree.write("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  tree.process("garbage\n:\n0:\n\n::::\n", kV2Mount);
  assert_int_equal(tree.quota(), 1);  // "::::" is a v2 line of a group outside of the mount
  tree.process("0::/\n", "31 22\n - \n31 22 0:27 / /sys/fs/cgroup rw - cgroup2\n-\n");
  assert_int_equal(tree.quota(), 0);
  tree.process("0::/\n", kV2Mount);
  assert_int_equal(tree.quota(), 1);
  tree.folder("/sys/fs/cgroup/app/cpu.max");  // a folder in the place of a file
  tree.process("0::/app\n", kV2Mount);
  assert_int_equal(tree.quota(), 1);
}

void this_machine_does_not_crash(void**) { assert_true(cpu_quota() >= 0); }

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(v2_rounds_down_but_not_to_zero),
      cmocka_unit_test(v2_max_is_no_limit),
      cmocka_unit_test(garbage_is_no_limit),
      cmocka_unit_test(v1_quota_over_period),
      cmocka_unit_test(the_tightest_group_up_to_the_root_counts),
      cmocka_unit_test(v1_and_v2_together),
      cmocka_unit_test(a_mount_of_a_part_of_the_tree),
      cmocka_unit_test(blanks_in_paths_are_escaped),
      cmocka_unit_test(a_group_outside_of_the_mount_uses_the_mount),
      cmocka_unit_test(missing_or_broken_tables_are_no_limit),
      cmocka_unit_test(this_machine_does_not_crash),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
