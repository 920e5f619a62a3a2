// SPDX-License-Identifier: MIT
// In a sandbox that refuses sched_getaffinity, engine creation fails with a reason. Without this check hwloc would retry
// forever.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int kNoSandbox = 77;  // exit status
constexpr unsigned kSeconds = 20;

bool refuse_affinity(int error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_sched_getaffinity, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof code / sizeof code[0], code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

int create_in_sandbox(int error) {
  if (!refuse_affinity(error)) return kNoSandbox;
  alarm(kSeconds);
  tandem_engine* engine = nullptr;
  tandem_error* reason = nullptr;
  const int32_t status = tandem_engine_create(&engine, nullptr, &reason);
  const bool is_named = std::strstr(tandem_error_message(reason), "sched_getaffinity") != nullptr;
  const bool has_errno = tandem_error_underlying(reason) == error;
  if (status != TANDEM_ERROR_SYSTEM || !is_named || !has_errno || engine != nullptr) {
    print_error("%s: %s\n", tandem_status_name(status), tandem_error_message(reason));
    return 1;
  }
  tandem_error_release(reason);
  return 0;
}

void expect_refused(int error) {
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) _exit(create_in_sandbox(error));
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) print_error("the child got signal %d\n", WTERMSIG(status));
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNoSandbox) skip();
  assert_int_equal(WEXITSTATUS(status), 0);
}

void test_not_permitted(void**) { expect_refused(EPERM); }
void test_not_implemented(void**) { expect_refused(ENOSYS); }
void test_invalid_for_every_size(void**) { expect_refused(EINVAL); }

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_not_permitted),
      cmocka_unit_test(test_not_implemented),
      cmocka_unit_test(test_invalid_for_every_size),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
