// SPDX-License-Identifier: MIT
// Shared by the tests of policy "patterns" on a device: sets of head patterns, and a session on the device and one on the
// host that get the same calls.
#pragma once

#include <numeric>

#include "api/patterned_world.h"
#include "device/device_side.h"
#include "device/step_runner.h"

namespace tandem_test {

// One pattern for each query head. The heads of the second KV head all attend sinks and a window, so its decode calls attend
// fewer keys.
inline std::vector<tandem_head_pattern> some_heads() { return {kFull, a_shape(20, 90), a_shape(4, 30), a_shape(20, 60)}; }
inline std::vector<tandem_head_pattern> without_sinks() { return {a_shape(0, 70), kFull, a_shape(0, 50), a_shape(0, 50)}; }

// All heads of a group have the same pattern, so one launch serves them.
inline std::vector<tandem_head_pattern> alike() { return {kFull, kFull, a_shape(12, 80), a_shape(12, 80)}; }

// Heads whose keys the device chooses, beside a head without choices. Every KV head attends all keys in decode calls.
inline std::vector<tandem_head_pattern> choosing() {
  return {vertical_slash(12, 40), block_sparse(2), both(vertical_slash(5, 16), a_shape(20, 90)), kFull};
}
inline std::vector<tandem_head_pattern> more_choosing() {
  return {both(block_sparse(1), vertical_slash(30, 0)), a_shape(3, 40), both(block_sparse(3), a_shape(9, 200)),
          vertical_slash(0, 100)};
}

inline bool chooses(const Patterned& patterned) {
  return std::any_of(patterned.heads.begin(), patterned.heads.end(), [](const tandem_head_pattern& head) {
    return (head.kinds & (TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE)) != 0;
  });
}

inline std::vector<int64_t> listed(const Side& side, int32_t q_head) {
  std::vector<int64_t> tokens(1 << 13);
  int64_t n = 0;
  constexpr int32_t kGroup = kQHeads / kKvHeads;
  OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, side.session, side.sequence, 0,
     q_head / kGroup, q_head % kGroup);
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

// A session on the device and its twin on the host, which get the same calls.
struct Twins {
  Side side{true}, twin{false};
  const bool chooses_keys;  // true: only the device knows the lists of appends
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

inline void expect_same_calls(const Patterned& patterned) {
  Twins twins(patterned);
  for (const int64_t n : {30, 1, 1, 200, 1, 5, 2, 600, 1, 129, 1}) twins.attend(n);
  for (Side* each : {&twins.side, &twins.twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, 700);
  for (const int64_t n : {1, 130, 1, 1}) twins.attend(n);
  assert_true(twins.side.digest() == twins.twin.digest());
}

// Compares appends so long that the device takes them some thousands of tokens at a time.
inline void expect_same_long_appends(const Patterned& patterned) {
  Twins twins(patterned);
  for (const int64_t n : {2700, 1, 700, 8300, 1}) twins.attend(n);
  assert_true(twins.side.digest() == twins.twin.digest());
}

// Compares planned steps of all layers, launched kernel by kernel and as a graph.
inline void expect_same_steps(const Patterned& patterned) {
  constexpr int64_t kOneEach[] = {1, 1};
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

// Makes the nth call of a function fail in an append of 140 tokens after 150. The append must be rolled back and must
// succeed when it is made again.
inline void expect_taken_back(const Patterned& patterned, stand_in::Call failing, int64_t nth) {
  Twins twins(patterned);
  twins.attend(150);
  Call call(140, 7);
  call.to_device();
  const tandem_attend_args args = call.args(twins.side);
  controls.fail_call(failing, nth, TANDEM_ERROR_BACKEND);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(twins.side.session, &args, &error);
  assert_refused(status, error, TANDEM_ERROR_BACKEND, "", "");
  assert_int_equal(twins.side.length(), 150);
  twins.attend(140);
  twins.attend(1);
}

// Makes calls with these query counts and asserts that the cache holds what the memory plan says. Returns the plan of a
// sequence as long as all calls together.
inline tandem_memory_plan expect_planned(const Patterned& patterned, const std::vector<int64_t>& q_lens) {
  Side side(true);
  change_session(&side, patterned.options);
  const int64_t kv_len = std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  OK(tandem_plan_memory, &plan, side.engine, side.model, &cache, &patterned.options, &kv_len, 1);
  for (const int64_t n : q_lens) {
    Call call(n, n);
    call.to_device();
    const tandem_attend_args args = call.args(side);
    OK(tandem_attend, side.session, &args);
  }
  assert_held(side, plan);
  return plan;
}

// Makes calls of several sequences, with query counts calls[i] in call i. Compares every output with that of a twin on the
// host. The last call has the flags flags_of_last.
inline void attend_batches(const Patterned& patterned, const std::vector<std::vector<int64_t>>& calls,
                           uint32_t flags_of_last = 0) {
  std::vector<std::vector<float>> answers[2];
  for (const bool on_device : {true, false}) {
    Side side(on_device);
    change_session(&side, patterned.options);
    std::vector<int64_t> ids(calls[0].size(), side.sequence);
    for (size_t s = 1; s < ids.size(); ++s) OK(tandem_sequence_create, &ids[s], side.cache);
    for (const std::vector<int64_t>& q_lens : calls) {
      Call call(std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0}), q_lens[0]);
      if (on_device) call.to_device();
      tandem_attend_args args = call.args(side);
      args.n_sequences = static_cast<int32_t>(ids.size());
      args.sequences = ids.data();
      args.q_lens = q_lens.data();
      args.flags = &q_lens == &calls.back() ? flags_of_last : 0;
      OK(tandem_attend, side.session, &args);
      answers[on_device].push_back(call.output());
    }
  }
  for (size_t i = 0; i < calls.size(); ++i) assert_close_to(answers[1][i], answers[0][i], "call " + std::to_string(i));
}

// One sequence has one query, the other many.
inline const std::vector<std::vector<int64_t>> kBothKinds = {{250, 40}, {1, 333}, {140, 65}, {1, 1}};
// Single queries come before, between and after appends, and one call has more rows than a ticket has room for.
inline const std::vector<std::vector<int64_t>> kAnyOrder = {{300, 300, 300}, {1, 140, 1}, {65, 1, 150}};

}  // namespace tandem_test
