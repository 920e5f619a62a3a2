// SPDX-License-Identifier: MIT
// Handles: which ones are refused and what they keep alive. A stale handle never refers to a newer object.
#include <set>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kHandle = TANDEM_ERROR_INVALID_HANDLE;

// Every call that takes a handle, with everything else valid.
struct Handles {
  tandem_engine* engine;
  tandem_model* model;
  tandem_cache* cache;
  tandem_session* session;
};

struct Call {
  const char* function;
  const char* parameter;
  std::function<int32_t(const Handles&, tandem_error**)> call;
};

struct Room {
  tandem_engine* engine = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t number = 0;
  int64_t numbers[8] = {};
  uint64_t digest = 0;
  int32_t count = 0;
  char text[64] = "";
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  tandem_route_plan routes = TANDEM_ROUTE_PLAN_INIT;
  tandem_cache_stats cache_stats = TANDEM_CACHE_STATS_INIT;
  tandem_session_stats session_stats = TANDEM_SESSION_STATS_INIT;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  Tensor k{{1, kKvHeads, kDim}}, v{{1, kKvHeads, kDim}}, o{{1, kQHeads, kDim}}, lse{{1, kQHeads}};
  const tandem_tensor* os[1] = {&o.view};
  const tandem_tensor* lses[1] = {&lse.view};
};

std::vector<Call> all_calls(Room& r, int64_t sequence) {
  const auto s = sequence;
  return {
      {"tandem_engine_drain", "engine", [](auto& h, auto e) { return tandem_engine_drain(h.engine, 0, e); }},
      {"tandem_engine_report", "engine",
       [&r](auto& h, auto e) { return tandem_engine_report(r.text, sizeof r.text, nullptr, h.engine, e); }},
      {"tandem_cache_create", "engine",
       [&r](auto& h, auto e) { return tandem_cache_create(&r.cache, h.engine, h.model, nullptr, e); }},
      {"tandem_cache_create", "model",
       [&r](auto& h, auto e) { return tandem_cache_create(&r.cache, h.engine, h.model, nullptr, e); }},
      {"tandem_sequence_create", "cache", [&r](auto& h, auto e) { return tandem_sequence_create(&r.number, h.cache, e); }},
      {"tandem_sequence_fork", "cache", [&r, s](auto& h, auto e) { return tandem_sequence_fork(&r.number, h.cache, s, e); }},
      {"tandem_sequence_drop", "cache", [s](auto& h, auto e) { return tandem_sequence_drop(h.cache, s, e); }},
      {"tandem_sequence_reserve", "cache", [s](auto& h, auto e) { return tandem_sequence_reserve(h.cache, s, 1, e); }},
      {"tandem_sequence_truncate", "cache", [s](auto& h, auto e) { return tandem_sequence_truncate(h.cache, s, 1, e); }},
      {"tandem_sequence_remove", "cache", [s](auto& h, auto e) { return tandem_sequence_remove(h.cache, s, 0, 1, 0, e); }},
      {"tandem_sequence_append", "cache",
       [&r, s](auto& h, auto e) { return tandem_sequence_append(h.cache, s, 0, &r.k.view, &r.v.view, nullptr, e); }},
      {"tandem_sequence_read", "cache",
       [&r, s](auto& h, auto e) { return tandem_sequence_read(&r.k.view, &r.v.view, h.cache, s, 0, 0, e); }},
      {"tandem_sequence_length", "cache",
       [&r, s](auto& h, auto e) { return tandem_sequence_length(&r.number, h.cache, s, 0, e); }},
      {"tandem_sequence_digest", "cache",
       [&r, s](auto& h, auto e) { return tandem_sequence_digest(&r.digest, h.cache, s, e); }},
      {"tandem_session_create", "cache",
       [&r](auto& h, auto e) { return tandem_session_create(&r.session, h.cache, nullptr, e); }},
      {"tandem_plan", "session",
       [&r](auto& h, auto e) { return tandem_plan(&r.routes, h.session, 0, r.numbers, nullptr, 1, e); }},
      {"tandem_attend", "session", [&r](auto& h, auto e) { return tandem_attend(h.session, &r.args, e); }},
      {"tandem_session_commit", "session",
       [&r, s](auto& h, auto e) { return tandem_session_commit(h.session, s, r.numbers, 0, e); }},
      {"tandem_step_begin", "session",
       [&r](auto& h, auto e) { return tandem_step_begin(h.session, r.numbers, r.numbers, 0, nullptr, e); }},
      {"tandem_step_end", "session", [](auto& h, auto e) { return tandem_step_end(h.session, nullptr, e); }},
      {"tandem_merge", "engine",
       [&r](auto& h, auto e) { return tandem_merge(&r.o.view, &r.lse.view, r.os, r.lses, 1, h.engine, nullptr, e); }},
      {"tandem_plan_memory", "engine",
       [&r](auto& h, auto e) { return tandem_plan_memory(&r.plan, h.engine, h.model, nullptr, nullptr, nullptr, 0, e); }},
      {"tandem_plan_memory", "model",
       [&r](auto& h, auto e) { return tandem_plan_memory(&r.plan, h.engine, h.model, nullptr, nullptr, nullptr, 0, e); }},
      {"tandem_supports", "engine", [](auto& h, auto e) { return tandem_supports(h.engine, nullptr, nullptr, nullptr, e); }},
      {"tandem_cache_get_stats", "cache",
       [&r](auto& h, auto e) { return tandem_cache_get_stats(&r.cache_stats, h.cache, e); }},
      {"tandem_session_get_stats", "session",
       [&r](auto& h, auto e) { return tandem_session_get_stats(&r.session_stats, h.session, e); }},
      {"tandem_session_selection", "session",
       [&r, s](auto& h, auto e) {
         return tandem_session_selection(r.numbers, nullptr, 8, &r.number, h.session, s, 0, 0, 0, e);
       }},
  };
}

// Returns the handles with `handle` in the place of `parameter`.
Handles with(const World& world, const std::string& parameter, void* handle) {
  Handles handles{world.engine, world.model, world.cache, world.session};
  if (parameter == "engine") handles.engine = static_cast<tandem_engine*>(handle);
  if (parameter == "model") handles.model = static_cast<tandem_model*>(handle);
  if (parameter == "cache") handles.cache = static_cast<tandem_cache*>(handle);
  if (parameter == "session") handles.session = static_cast<tandem_session*>(handle);
  return handles;
}

void test_refused(void**) {
  World world;
  Room room;
  World released;  // its handles are released below, while world stays alive
  void* const stale[] = {released.engine, released.model, released.cache, released.session};
  tandem_session_release(released.session);
  tandem_cache_release(released.cache);
  tandem_model_release(released.model);
  tandem_engine_release(released.engine);
  released.session = nullptr, released.cache = nullptr, released.model = nullptr, released.engine = nullptr;

  const std::string kinds[] = {"engine", "model", "cache", "session"};
  const char* const named[] = {"an engine", "a model", "a cache", "a session"};
  void* const live[] = {world.engine, world.model, world.cache, world.session};
  alignas(64) static unsigned char foreign[256];
  for (const Call& call : all_calls(room, world.sequence)) {
    std::vector<Refused> cases;
    const auto add = [&](const char* name, void* handle, const char* value) {
      const Handles handles = with(world, call.parameter, handle);
      cases.push_back({name, call.function, kHandle, call.parameter, value,
                       [&call, handles](tandem_error** e) { return call.call(handles, e); }});
    };
    add("null", nullptr, "NULL");
    add("foreign", foreign + 8, "not a handle of this library");
    add("low address", reinterpret_cast<void*>(uintptr_t{8}), "not a handle of this library");
    add("high address", reinterpret_cast<void*>(~uintptr_t{0}), "not a handle of this library");
    for (int i = 0; i < 4; ++i) {
      add("inside a handle", static_cast<char*>(live[i]) + 8, "not a handle of this library");
      add("released", stale[i], "has been released");
      if (kinds[i] != call.parameter) add("other kind", live[i], named[i]);
    }
    check_all_refused(world, cases);
  }
  assert_null(room.cache);
  assert_null(room.session);
}

void test_release_twice(void**) {
  World world;
  tandem_engine_release(nullptr);
  tandem_model_release(nullptr);
  tandem_cache_release(nullptr);
  tandem_session_release(nullptr);
  // A handle of another kind: the release does nothing.
  tandem_engine_release(reinterpret_cast<tandem_engine*>(world.cache));
  tandem_session_release(reinterpret_cast<tandem_session*>(world.model));
  static int foreign;
  tandem_cache_release(reinterpret_cast<tandem_cache*>(&foreign));
  const Snapshot unchanged(world);

  tandem_session* session = nullptr;
  OK(tandem_session_create, &session, world.cache, nullptr);
  for (int i = 0; i < 3; ++i) tandem_session_release(session);
  // If the block were in the free list twice, two of these sessions would be the same.
  std::set<tandem_session*> made;
  for (int i = 0; i < 3000; ++i) {
    OK(tandem_session_create, &session, world.cache, nullptr);
    assert_true(made.insert(session).second);
  }
  for (tandem_session* one : made) tandem_session_release(one);
}

void test_kept_alive(void**) {
  World world;
  tandem_engine_release(world.engine);
  tandem_model_release(world.model);
  tandem_cache_release(world.cache);
  OK(attend_once, world, world.sequence, 0, 1, 0);
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
  OK(tandem_session_get_stats, &stats, world.session);
  assert_int_equal(stats.n_attends, 2 * 3 + 1);
  tandem_session_release(world.session);
  // A cache keeps its engine and model alive.
  World second;
  tandem_session_release(second.session);
  tandem_engine_release(second.engine);
  tandem_model_release(second.model);
  uint64_t digest = 0;
  OK(tandem_sequence_digest, &digest, second.cache, second.sequence);
  assert_true(digest != 0);
}

// A released block is reused only after more than a thousand other releases.
void test_stale_stays_stale(void**) {
  World world;
  tandem_session* stale = nullptr;
  OK(tandem_session_create, &stale, world.cache, nullptr);
  tandem_session_release(stale);
  for (int i = 0; i < 1000; ++i) {
    tandem_session* session = nullptr;
    OK(tandem_session_create, &session, world.cache, nullptr);
    assert_ptr_not_equal(session, stale);
    tandem_session_release(session);
    assert_int_equal(tandem_step_end(stale, nullptr, nullptr), kHandle);
  }
  // Blocks are reused in the end, so creating and releasing handles repeatedly does not use more and more memory.
  std::set<tandem_session*> addresses;
  for (int i = 0; i < 20000; ++i) {
    tandem_session* session = nullptr;
    OK(tandem_session_create, &session, world.cache, nullptr);
    addresses.insert(session);
    tandem_session_release(session);
  }
  assert_true(addresses.size() < 4500);
}

void test_names_in_messages(void**) {
  tandem_error* error = nullptr;
  assert_int_equal(tandem_sequence_drop(nullptr, 1, &error), kHandle);
  assert_string_equal(tandem_error_message(error), "tandem_sequence_drop: cache = NULL is not a handle");
  assert_string_equal(tandem_error_field(error), "cache");
  assert_int_equal(tandem_error_status(error), kHandle);
  assert_int_equal(tandem_error_underlying(error), 0);
  tandem_error_release(error);
  // Success clears the error that the caller passes in.
  error = reinterpret_cast<tandem_error*>(uintptr_t{1});
  tandem_tensor tensor;
  float data;
  const int64_t shape = 1;
  assert_int_equal(tandem_tensor_init(&tensor, TANDEM_F32, &data, 1, &shape, &error), TANDEM_OK);
  assert_null(error);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_stale_stays_stale),  // first, while few blocks have been released
      cmocka_unit_test(test_refused),           cmocka_unit_test(test_release_twice),     cmocka_unit_test(test_kept_alive),
      cmocka_unit_test(test_stale_stays_stale), cmocka_unit_test(test_names_in_messages),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
