// SPDX-License-Identifier: MIT
// In a child made by fork() every call is refused with a reason and releases return. The parent continues as before.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "api_world.h"

// A child loses memory that the parent's threads own. This suppresses reports of the OpenMP runtime's part.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libgomp"; }

using namespace tandem_test;

namespace {

// Ends the child at the first call that is not refused. The exit code is that call's number.
void expect_refused(int32_t status, tandem_error* error) {
  static int n = 0;
  ++n;
  const std::string value = "process = " + std::to_string(getpid());
  const bool good = status == TANDEM_ERROR_INVALID_STATE && tandem_error_status(error) == status &&
                    std::strcmp(tandem_error_field(error), "process") == 0 &&
                    std::strstr(tandem_error_message(error), value.c_str()) != nullptr &&
                    std::strstr(tandem_error_message(error), "fork") != nullptr;
  tandem_error_release(error);
  if (!good) _exit(n);
}
#define REFUSED(function, ...)                            \
  do {                                                    \
    tandem_error* error = nullptr;                        \
    const int32_t status = function(__VA_ARGS__, &error); \
    expect_refused(status, error);                        \
  } while (0)

void creation_is_refused(World& w) {
  tandem_tensor t;
  float data[64];
  const int64_t shape = 1;
  int64_t sequence = 0;
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  const tandem_layer_options layer = plain_layer();
  REFUSED(tandem_tensor_init, &t, TANDEM_F32, data, 1, &shape);
  REFUSED(tandem_engine_create, &engine, nullptr);
  REFUSED(tandem_model_create, &model, &layer, 1);
  REFUSED(tandem_cache_create, &cache, w.engine, w.model, nullptr);
  REFUSED(tandem_session_create, &session, w.cache, nullptr);
  REFUSED(tandem_sequence_create, &sequence, w.cache);
  REFUSED(tandem_sequence_fork, &sequence, w.cache, w.sequence);
}

void engine_is_refused(World& w) {
  tandem_tensor t;
  const tandem_tensor* tensors[] = {&t};
  char text[16];
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  REFUSED(tandem_engine_drain, w.engine, -1);
  REFUSED(tandem_engine_report, text, sizeof text, nullptr, w.engine);
  REFUSED(tandem_merge, &t, &t, tensors, tensors, 1, w.engine, nullptr);
  REFUSED(tandem_plan_memory, &plan, w.engine, w.model, nullptr, nullptr, nullptr, 0);
  tandem_route_plan routes = TANDEM_ROUTE_PLAN_INIT;
  REFUSED(tandem_plan_report, text, sizeof text, nullptr, &plan);
  REFUSED(tandem_plan, &routes, w.session, 0, nullptr, nullptr, 0);
  REFUSED(tandem_route_report, text, sizeof text, nullptr, &routes);
  REFUSED(tandem_supports, w.engine, nullptr, nullptr, nullptr);
}

void cache_is_refused(World& w) {
  tandem_tensor t;
  const int64_t s = w.sequence;
  int64_t number = 0;
  uint64_t digest = 0;
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  REFUSED(tandem_sequence_drop, w.cache, s);
  REFUSED(tandem_sequence_reserve, w.cache, s, 1);
  REFUSED(tandem_sequence_truncate, w.cache, s, 1);
  REFUSED(tandem_sequence_remove, w.cache, s, 0, 1, 0);
  REFUSED(tandem_sequence_append, w.cache, s, 0, &t, &t, nullptr);
  REFUSED(tandem_sequence_read, &t, &t, w.cache, s, 0, 0);
  REFUSED(tandem_sequence_length, &number, w.cache, s, 0);
  REFUSED(tandem_sequence_digest, &digest, w.cache, s);
  REFUSED(tandem_cache_get_stats, &stats, w.cache);
}

void session_is_refused(World& w) {
  float maw[4];
  int64_t n_kept = 0, numbers[4] = {};
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
  REFUSED(tandem_attend, w.session, &args);
  REFUSED(tandem_session_commit, w.session, w.sequence, nullptr, 0);
  REFUSED(tandem_step_begin, w.session, numbers, numbers, 0, nullptr);
  REFUSED(tandem_step_end, w.session, nullptr);
  REFUSED(tandem_session_get_stats, &stats, w.session);
  REFUSED(tandem_session_selection, numbers, maw, 4, &n_kept, w.session, w.sequence, 0, 0, 0);
}

// Returns the exit code of the child, 0 if all calls behaved.
int child(World& w) {
  creation_is_refused(w);
  engine_is_refused(w);
  cache_is_refused(w);
  session_is_refused(w);
  const tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  if (tandem_attend(w.session, &args, nullptr) != TANDEM_ERROR_INVALID_STATE) return 100;
  if (std::strcmp(tandem_policy_name(0), "all") != 0) return 101;
  // Handles that are null or invalid are refused for the same reason.
  if (tandem_sequence_drop(nullptr, w.sequence, nullptr) != TANDEM_ERROR_INVALID_STATE) return 102;
  tandem_session_release(w.session);
  tandem_cache_release(w.cache);
  tandem_model_release(w.model);
  tandem_engine_release(w.engine);
  tandem_engine_release(w.engine);
  return 0;
}

void test_child(void**) {
  World world;
  const Snapshot before(world);
  for (const bool in_step : {false, true}) {  // workers asleep, workers spinning
    const int64_t one = 1;
    if (in_step) OK(tandem_step_begin, world.session, &world.other, &one, 1, nullptr);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
      alarm(30);  // ends a child that hangs
      _exit(child(world));
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    if (in_step) assert_int_equal(tandem_step_end(world.session, nullptr, nullptr), TANDEM_ERROR_INVALID_STATE);
  }
  const Snapshot after(world);
  assert_true(before.digest == after.digest);
  assert_memory_equal(before.lengths, after.lengths, sizeof before.lengths);
  OK(attend_once, world, world.sequence, 0, 1, 0);
}

// A child may end by exit(), which runs exit handlers. The library must not wait for threads that the child does not have.
void test_exit_of_child(void**) {
  World world;
  const pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    alarm(30);
    std::exit(0);
  }
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Before the first handle exists, a fork breaks nothing.
void test_fork_before_use(void**) {
  const pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    alarm(60);
    tandem_engine_options options = small_engine_options();
    tandem_engine* engine = nullptr;
    const int32_t status = tandem_engine_create(&engine, &options, nullptr);
    tandem_engine_release(engine);
    _exit(status == TANDEM_OK ? 0 : 1);
  }
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_fork_before_use),
      cmocka_unit_test(test_child),
      cmocka_unit_test(test_exit_of_child),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
