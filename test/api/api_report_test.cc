// SPDX-License-Identifier: MIT
// Texts for callers, the memory plan compared with the memory in use, and statistics in larger structs.
#include <algorithm>
#include <cstring>

#include "api_world.h"

using namespace tandem_test;

namespace {

using Report = std::function<int32_t(char*, size_t, size_t*, tandem_error**)>;

// A report writes at most buffer_bytes, its final 0 included, and always returns the full size.
void check_buffers(const Report& report) {
  size_t needed = 0;
  OK(report, nullptr, 0, &needed);
  assert_true(needed > 20);
  std::vector<char> whole(needed + 8, '#');
  OK(report, whole.data(), needed, nullptr);
  assert_int_equal(whole[needed - 1], '\0');
  assert_int_equal(whole[needed], '#');
  assert_int_equal(std::strlen(whole.data()), needed - 1);
  assert_int_equal(whole[0], '{');
  assert_int_equal(whole[needed - 2], '}');
  for (const size_t size : {size_t{0}, size_t{1}, size_t{2}, size_t{10}, needed - 1, needed + 5}) {
    std::vector<char> part(needed + 8, '#');
    size_t told = 0;
    OK(report, part.data(), size, &told);
    assert_int_equal(told, needed);
    const size_t n_text = size == 0 ? 0 : std::min(size - 1, needed - 1);
    assert_memory_equal(part.data(), whole.data(), n_text);
    if (size > 0) assert_int_equal(part[n_text], '\0');
    for (size_t i = size == 0 ? 0 : n_text + 1; i < part.size(); ++i) assert_int_equal(part[i], '#');
  }
}

void test_reports(void**) {
  World world;
  check_buffers([&](char* buffer, size_t bytes, size_t* needed, tandem_error** e) {
    return tandem_engine_report(buffer, bytes, needed, world.engine, e);
  });
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  plan.host_kv_bytes = INT64_MAX;
  plan.device_work_bytes = 12345;
  check_buffers([&](char* buffer, size_t bytes, size_t* needed, tandem_error** e) {
    return tandem_plan_report(buffer, bytes, needed, &plan, e);
  });
  char text[512];
  OK(tandem_plan_report, text, sizeof text, nullptr, &plan);
  assert_string_equal(text,
                      "{\"host_kv_bytes\":9223372036854775807,\"host_session_bytes\":0,\"selection_max_bytes\":0,"
                      "\"device_window_bytes\":0,\"device_work_bytes\":12345,\"kv_token_bytes\":0,\"shared_bytes\":0,"
                      "\"device_stream_bytes\":0,\"device_weights_bytes\":0,\"x_token_bytes\":0,"
                      "\"device_window_max_bytes\":0,\"judged_kv_bytes\":0,\"judged_first_bytes\":0,"
                      "\"judged_max_bytes\":0}");
}

void test_route_report(void**) {
  tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
  plan.resident_tokens = 1;
  plan.host_tokens = 2;
  plan.stream_tokens = 3;
  plan.host_bytes = 4;
  plan.stream_bytes = INT64_MAX;
  plan.host_ns = 6;
  plan.bus_ns = 7;
  plan.device_ns = 8;
  plan.total_ns = 9;
  plan.host_alone_ns = 10;
  plan.stream_alone_ns = 11;
  plan.recompute_tokens = 12;
  plan.recompute_bytes = 13;
  plan.recompute_alone_ns = 14;
  check_buffers([&](char* buffer, size_t bytes, size_t* needed, tandem_error** e) {
    return tandem_route_report(buffer, bytes, needed, &plan, e);
  });
  char text[768];
  OK(tandem_route_report, text, sizeof text, nullptr, &plan);
  assert_string_equal(text,
                      "{\"resident_tokens\":1,\"host_tokens\":2,\"stream_tokens\":3,\"host_bytes\":4,"
                      "\"stream_bytes\":9223372036854775807,\"host_ns\":6,\"bus_ns\":7,\"device_ns\":8,\"total_ns\":9,"
                      "\"host_alone_ns\":10,\"stream_alone_ns\":11,\"recompute_tokens\":12,\"recompute_bytes\":13,"
                      "\"recompute_alone_ns\":14}");
}

// The memory in use equals the plan.
void test_plan_holds(void**) {
  World world;
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
  cache_options.page_tokens = 16;
  const tandem_session_options session_options = world_session_options();
  for (const int64_t kv_len : {0, 1, 16, 17, 2048, 2049, 5000}) {
    const int64_t lens[] = {kv_len, kv_len / 2};
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    OK(tandem_plan_memory, &plan, world.engine, world.model, &cache_options, &session_options, lens, 2);
    // bf16: K and V of layer 0, K of layer 1
    assert_int_equal(plan.kv_token_bytes, 3 * kKvHeads * kDim * 2);
    tandem_cache* cache = nullptr;
    tandem_session* session = nullptr;
    OK(tandem_cache_create, &cache, world.engine, world.model, &cache_options);
    OK(tandem_session_create, &session, cache, &session_options);
    for (const int64_t n : lens) {
      int64_t sequence = 0;
      OK(tandem_sequence_create, &sequence, cache);
      OK(tandem_sequence_reserve, cache, sequence, n);
    }
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    OK(tandem_cache_get_stats, &stats, cache);
    assert_int_equal(stats.host_kv_bytes, plan.host_kv_bytes);
    assert_int_equal(stats.host_session_bytes, plan.host_session_bytes);
    assert_int_equal(stats.n_sequences, 2);
    tandem_session_release(session);
    tandem_cache_release(cache);
  }
}

void test_supports(void**) {
  World world;
  const tandem_layer_options layer = plain_layer();
  const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  OK(tandem_supports, world.engine, nullptr, nullptr, nullptr);
  const std::vector<tandem_head_pattern> heads(kQHeads, tandem_head_pattern(TANDEM_HEAD_PATTERN_INIT));
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  patterns.heads = heads.data();
  patterns.n_heads = std::ssize(heads);
  for (int32_t i = 0; tandem_policy_name(i) != nullptr; ++i) {
    tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
    session.policy = tandem_policy_name(i);
    if (std::strcmp(session.policy, "patterns") == 0) session.patterns = &patterns;
    OK(tandem_supports, world.engine, &layer, &cache, &session);
  }
  int n_available = 0;
  for (int32_t i = 0; tandem_cpu_isa_name(i) != nullptr; ++i) {
    tandem_engine_options options = small_engine_options();
    options.cpu_isa = tandem_cpu_isa_name(i);
    const bool available = tandem_cpu_isa_available(options.cpu_isa) == 1;
    tandem_engine* engine = nullptr;
    const int32_t status = tandem_engine_create(&engine, &options, nullptr);
    assert_int_equal(status, available ? TANDEM_OK : TANDEM_ERROR_NOT_FOUND);
    n_available += available;
    tandem_engine_release(engine);
  }
  assert_true(n_available > 0);
}

void test_drain(void**) {
  World world;
  for (const int64_t timeout_ns : {int64_t{-1}, int64_t{1000000000}, INT64_MAX, INT64_MIN})
    OK(tandem_engine_drain, world.engine, timeout_ns);
}

// Writes at most `capacity` entries of a selection and always returns their number.
void test_selection_capacity(void**) {
  World world;
  int64_t whole[128], n_all = 0, n = 0;
  float maw[128];
  OK(tandem_session_selection, whole, maw, 128, &n_all, world.session, world.sequence, 0, 0, 0);
  assert_true(n_all >= 32 + 4 && n_all <= kTokens);
  for (int64_t i = 1; i < n_all; ++i) assert_true(whole[i - 1] < whole[i]);
  for (const int64_t capacity : {int64_t{0}, int64_t{1}, n_all - 1, n_all, n_all + 1}) {
    int64_t part[128];
    std::fill_n(part, 128, -7);
    OK(tandem_session_selection, part, nullptr, capacity, &n, world.session, world.sequence, 0, 0, 0);
    assert_int_equal(n, n_all);
    const int64_t n_written = std::min(capacity, n_all);
    assert_memory_equal(part, whole, static_cast<size_t>(n_written) * sizeof(int64_t));
    for (int64_t i = n_written; i < 128; ++i) assert_int_equal(part[i], -7);
  }
  OK(tandem_session_selection, nullptr, nullptr, 0, &n, world.session, world.sequence, 1, 1, 1);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_reports),  cmocka_unit_test(test_route_report), cmocka_unit_test(test_plan_holds),
      cmocka_unit_test(test_supports), cmocka_unit_test(test_drain),        cmocka_unit_test(test_selection_capacity),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
