// SPDX-License-Identifier: MIT
// Programs that end while their sessions, released or not, still work on a device that ends with the program. exit_test
// [MODULE]: on the stand-in, or on the GPU of the CUDA module.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "with_cmocka.h"

namespace {

const char* module_path = nullptr;

// Returns the program's exit code, or minus the signal that ended it.
int run_program(const char* how, int64_t delay_ns, int64_t n_calls) {
  const std::string delay = std::to_string(delay_ns), n = std::to_string(n_calls);
  const pid_t pid = fork();
  if (pid == 0) {
    execl(EXIT_PROGRAM, EXIT_PROGRAM, how, delay.c_str(), n.c_str(), module_path, nullptr);
    _exit(127);
  }
  int status = 0;
  assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// No program crashes, and none waits for unfinished work of the device. That would take some seconds on a slow device.
void programs_end(const char* how) {
  constexpr int64_t kMs = 1'000'000;
  for (const int64_t delay_ns : {int64_t{0}, kMs / 20, kMs, 200 * kMs}) {
    for (const int64_t n_calls : {0, 1, 7}) {
      const auto begin = std::chrono::steady_clock::now();
      const int code = run_program(how, delay_ns, n_calls);
      if (code != 0) fail_msg("%s, %lld ns, %lld calls: %d", how, (long long)delay_ns, (long long)n_calls, code);
      assert_true(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));
    }
  }
}

void with_everything_released(void**) {
  for (int i = 0; i < 3; ++i) programs_end("all");
}
void with_sessions_that_select(void**) { programs_end("hgca"); }
void with_the_session_alone_released(void**) { programs_end("session"); }
void with_nothing_released(void**) { programs_end("nothing"); }
void with_releases_by_static_destructors(void**) { programs_end("static"); }
void with_a_lost_device(void**) {
  if (module_path != nullptr) skip();  // a GPU cannot be lost on request
  programs_end("lost");
}
void with_an_open_step(void**) { programs_end("open"); }
void with_a_step_that_was_not_done(void**) { programs_end("closed"); }

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) module_path = argv[1];
  const CMUnitTest tests[] = {
      cmocka_unit_test(with_everything_released),
      cmocka_unit_test(with_sessions_that_select),
      cmocka_unit_test(with_the_session_alone_released),
      cmocka_unit_test(with_nothing_released),
      cmocka_unit_test(with_releases_by_static_destructors),
      cmocka_unit_test(with_a_lost_device),
      cmocka_unit_test(with_an_open_step),
      cmocka_unit_test(with_a_step_that_was_not_done),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
