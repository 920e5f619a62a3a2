// SPDX-License-Identifier: MIT
// Policy "patterns" on device tensors: the same answers, keys and counts as on host tensors, in appends, decode calls,
// planned steps and the replays of a graph.
#include "api/patterned_world.h"
#include "device/device_side.h"
#include "device/step_runner.h"

using namespace tandem_test;

namespace {

// Of each query head: those of the second KV head have one form, so its decode calls attend less.
std::vector<tandem_head_pattern> some_heads() { return {kFull, a_shape(20, 90), a_shape(4, 30), a_shape(20, 60)}; }
std::vector<tandem_head_pattern> without_sinks() { return {a_shape(0, 70), kFull, a_shape(0, 50), a_shape(0, 50)}; }

// The heads of each group are, so one launch serves them.
std::vector<tandem_head_pattern> alike() { return {kFull, kFull, a_shape(12, 80), a_shape(12, 80)}; }

// Heads whose keys the device chooses, beside others. Every KV head attends all keys in decode calls.
std::vector<tandem_head_pattern> choosing() {
  return {vertical_slash(12, 40), block_sparse(2), both(vertical_slash(5, 16), a_shape(20, 90)), kFull};
}
std::vector<tandem_head_pattern> more_choosing() {
  return {both(block_sparse(1), vertical_slash(30, 0)), a_shape(3, 40), both(block_sparse(3), a_shape(9, 200)),
          vertical_slash(0, 100)};
}

bool chooses(const Patterned& patterned) {
  return std::any_of(patterned.heads.begin(), patterned.heads.end(), [](const tandem_head_pattern& head) {
    return (head.kinds & (TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE)) != 0;
  });
}

std::vector<int64_t> listed(const Side& side, int32_t q_head) {
  std::vector<int64_t> tokens(1 << 13);
  int64_t n = 0;
  constexpr int32_t kGroup = kQHeads / kKvHeads;
  OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, side.session, side.sequence, 0,
     q_head / kGroup, q_head % kGroup);
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

// A call on the device and its twin's on the host.
struct Twins {
  Side side{true}, twin{false};
  const bool chooses_keys;  // whose appends' lists are the device's alone
  int64_t seed = 1;

  explicit Twins(const Patterned& patterned) : chooses_keys(chooses(patterned)) {
    change_session(&side, patterned.options);
    change_session(&twin, patterned.options);
  }
  void attend(int64_t n) {
    Call on_device(n, seed), on_host(n, seed);
    ++seed;
    for (Call* call : {&on_device, &on_host})
      for (float& x : call->q.values) x *= 8.0f;  // so that softmax prefers some keys
    on_device.to_device();
    for (const auto& [call, of] : {std::pair(&on_device, &side), std::pair(&on_host, &twin)}) {
      const tandem_attend_args args = call->args(*of);
      OK(tandem_attend, of->session, &args);
    }
    const std::string context = "call " + std::to_string(seed - 1);
    assert_close_to(on_device.output(), on_host.output(), context);
    for (int32_t h = 0; h < kQHeads && (n == 1 || !chooses_keys); ++h)
      if (listed(side, h) != listed(twin, h)) fail_msg("%s: other keys of head %d", context.c_str(), h);
    const tandem_session_stats now = side.stats(), now_twin = twin.stats();
    assert_int_equal(now.pattern_pairs, now_twin.pattern_pairs);
    assert_int_equal(now.pattern_dense_pairs, now_twin.pattern_dense_pairs);
    assert_int_equal(now.resident_kv_bytes_read + now.host_kv_bytes_read,
                     now_twin.resident_kv_bytes_read + now_twin.host_kv_bytes_read);
  }
};

void answers_as_on_the_host(const std::vector<tandem_head_pattern>& heads) {
  const Patterned patterned(kQHeads, heads);
  Twins twins(patterned);
  for (const int64_t n : {30, 1, 1, 200, 1, 5, 2, 600, 1, 129, 1}) twins.attend(n);
  for (Side* each : {&twins.side, &twins.twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, 700);
  for (const int64_t n : {1, 130, 1}) twins.attend(n);
  assert_true(twins.side.digest() == twins.twin.digest());
}

void calls_answer_as_on_the_host(void**) {
  answers_as_on_the_host(some_heads());
  answers_as_on_the_host(without_sinks());
  answers_as_on_the_host({kFull, kFull, kFull, kFull});
  answers_as_on_the_host(alike());
  assert_int_equal(counts.n_indexed, 0);
  answers_as_on_the_host(choosing());
  answers_as_on_the_host(more_choosing());
  assert_true(counts.n_indexed > 0);
  assert_in_range(counts.largest_list_rows, 1, 64);
  controls.take_long_lists();
  answers_as_on_the_host(some_heads());
  answers_as_on_the_host(choosing());
  assert_int_equal(counts.largest_list_rows, TANDEM_PATTERN_BLOCK);
  answers_as_on_the_host(alike());
  assert_int_equal(counts.largest_list_rows, TANDEM_PATTERN_BLOCK * kQHeads / kKvHeads);
}

// Appends that the device takes some thousands of tokens at a time.
void long_appends_answer_as_on_the_host(void**) {
  for (const auto& heads : {some_heads(), alike(), choosing()}) {
    Patterned patterned(kQHeads, heads);
    patterned.options.window_tokens = 12000;
    Twins twins(patterned);
    for (const int64_t n : {2700, 1, 700, 8300, 1}) twins.attend(n);
    assert_true(twins.side.digest() == twins.twin.digest());
  }
}

void planned_steps_answer_as_on_the_host(void**) {
  constexpr int64_t kOneEach[] = {1, 1};
  for (const auto& heads : {some_heads(), without_sinks(), choosing(), std::vector<tandem_head_pattern>(kQHeads, kFull)}) {
    const Patterned patterned(int64_t{kStepLayers} * kQHeads, heads);
    Runner planned(300), replayed(300);
    HostTwin twin(300, "all");
    for (Side* side : {&planned.side, &replayed.side, &twin.side}) change_session(side, patterned.options);
    for (int64_t step = 0; step < 6; ++step) {
      planned.run_step(step);
      replayed.set_inputs(step);
      replayed.begin(kOneEach);
      if (replayed.graph == nullptr) replayed.capture(kOneEach);
      assert_true(controls.launch(replayed.graph, replayed.stream));
      replayed.end();
      const std::vector<float> wanted = twin.run_step(step);
      assert_close_to(planned.outputs(), wanted, "step " + std::to_string(step));
      assert_close_to(replayed.outputs(), wanted, "replayed step " + std::to_string(step));
    }
  }
}

// One sequence has a query, the other many.
void attend_both_kinds(const std::vector<tandem_head_pattern>& heads) {
  const Patterned patterned(kQHeads, heads);
  Side side(true), twin(false);
  std::vector<float> answers[2];
  for (Side* each : {&side, &twin}) {
    change_session(each, patterned.options);
    int64_t ids[2] = {each->sequence, 0};
    OK(tandem_sequence_create, &ids[1], each->cache);
    const int64_t first[2] = {250, 40}, then[2] = {1, 333}, both_many[2] = {140, 65};
    for (const int64_t* q_lens : {first, then, both_many}) {
      Call call(q_lens[0] + q_lens[1], q_lens[0]);
      if (each == &side) call.to_device();
      tandem_attend_args args = call.args(*each);
      args.n_sequences = 2;
      args.sequences = ids;
      args.q_lens = q_lens;
      OK(tandem_attend, each->session, &args);
      answers[each == &side ? 0 : 1] = call.output();
    }
  }
  assert_close_to(answers[0], answers[1], "calls of both kinds");
}

void calls_of_both_kinds(void**) {
  attend_both_kinds(some_heads());
  attend_both_kinds(choosing());
  attend_both_kinds(more_choosing());
}

void assert_refuses(const Patterned& patterned, int64_t n, int32_t status, const char* field, const char* text,
                    int32_t rope = TANDEM_ROPE_CALLER) {
  Side side(true, "all", 0, 1, kWindow, rope);
  change_session(&side, patterned.options);
  Call call(n, 1);
  call.to_device();
  const tandem_attend_args args = call.args(side);
  tandem_error* error = nullptr;
  const int32_t got = tandem_attend(side.session, &args, &error);
  assert_refused(got, error, status, field, text);
  assert_int_equal(side.length(), 0);
}

// Single queries stand before, between and behind appends, and three appends have more rows than a ticket.
void sequences_of_any_order(void**) {
  const std::vector<int64_t> all_q_lens[] = {{300, 300, 300}, {1, 140, 1}, {65, 1, 150}};
  for (const auto& heads : {some_heads(), choosing()}) {
    const Patterned patterned(kQHeads, heads);
    Side side(true), twin(false);
    std::vector<std::vector<float>> answers[2];
    for (Side* each : {&side, &twin}) {
      change_session(each, patterned.options);
      int64_t ids[3] = {each->sequence, 0, 0};
      for (int s = 1; s < 3; ++s) OK(tandem_sequence_create, &ids[s], each->cache);
      for (const std::vector<int64_t>& q_lens : all_q_lens) {
        Call call(q_lens[0] + q_lens[1] + q_lens[2], q_lens[1]);
        if (each == &side) call.to_device();
        tandem_attend_args args = call.args(*each);
        args.n_sequences = 3;
        args.sequences = ids;
        args.q_lens = q_lens.data();
        OK(tandem_attend, each->session, &args);
        answers[each == &side ? 0 : 1].push_back(call.output());
      }
    }
    for (size_t i = 0; i < answers[0].size(); ++i)
      assert_close_to(answers[0][i], answers[1][i], "call " + std::to_string(i));
  }
}

void what_is_refused(void**) {
  Patterned narrow(kQHeads, some_heads());
  narrow.options.window_tokens = 64;
  assert_refuses(narrow, 100, TANDEM_ERROR_CAPACITY, "window_tokens", "policy \"patterns\"");
  Patterned capped(kQHeads, {a_shape(4, 30)});
  capped.patterns.max_distance = 50;
  for (const int64_t n : {1, 100})
    assert_refuses(capped, n, TANDEM_ERROR_UNSUPPORTED, "q.device_type", "patterns.max_distance", TANDEM_ROPE_HALVES);
  Side side(true);
  const Patterned chosen(kQHeads, choosing());
  change_session(&side, chosen.options);
  Call call(1, 1);
  call.to_device();
  tandem_attend_args args = call.args(side);
  args.flags = TANDEM_ATTEND_PARTIAL;
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "flags", "several queries");
  assert_int_equal(side.length(), 0);
}

// Lists that the device has made of an append give way to those of the next call.
void tells_no_keys_that_the_device_has_chosen(void**) {
  const Patterned patterned(kQHeads, choosing());
  Side side(true);
  change_session(&side, patterned.options);
  Call call(200, 1);
  call.to_device();
  const tandem_attend_args args = call.args(side);
  OK(tandem_attend, side.session, &args);
  int64_t n = 0;
  tandem_error* error = nullptr;
  const int32_t status = tandem_session_selection(nullptr, nullptr, 0, &n, side.session, side.sequence, 0, 0, 0, &error);
  assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "sequence", "policy \"patterns\"");
}

// A call whose index or lists fail leaves the sequence as it was, and is made again.
void failures_take_all_back(void**) {
  const Patterned patterned(kQHeads, choosing());
  for (const stand_in::Call failing : {stand_in::kIndexPatterns, stand_in::kListPatterns}) {
    Twins twins(patterned);
    twins.attend(150);
    Call call(140, 7);
    call.to_device();
    const tandem_attend_args args = call.args(twins.side);
    controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
    tandem_error* error = nullptr;
    const int32_t status = tandem_attend(twins.side.session, &args, &error);
    assert_refused(status, error, TANDEM_ERROR_BACKEND, "", "");
    assert_int_equal(twins.side.length(), 150);
    twins.attend(140);
    twins.attend(1);
  }
}

// The memory plan asks the functions that calls ask.
void expect_planned(const std::vector<tandem_head_pattern>& heads) {
  Patterned patterned(kQHeads, heads);
  patterned.options.window_tokens = 3000;
  patterned.options.append_tokens = 2000;
  Side side(true);
  change_session(&side, patterned.options);
  const int64_t kv_len = 2001;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  OK(tandem_plan_memory, &plan, side.engine, side.model, &cache, &patterned.options, &kv_len, 1);
  for (const int64_t n : {2000, 1}) {
    Call call(n, n);
    call.to_device();
    const tandem_attend_args args = call.args(side);
    OK(tandem_attend, side.session, &args);
  }
  assert_held(side, plan);
}

void plans_what_is_held(void**) {
  expect_planned(some_heads());
  expect_planned(choosing());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(long_appends_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(planned_steps_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(calls_of_both_kinds, forget),
      cmocka_unit_test_teardown(sequences_of_any_order, forget),
      cmocka_unit_test_teardown(what_is_refused, forget),
      cmocka_unit_test_teardown(tells_no_keys_that_the_device_has_chosen, forget),
      cmocka_unit_test_teardown(failures_take_all_back, forget),
      cmocka_unit_test_teardown(plans_what_is_held, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
