// SPDX-License-Identifier: MIT
// Policy "hip" on device tensors: outputs are the host's in calls of all kinds, in planned steps and in graph replays, and a
// refused call leaves nothing behind. Also calls on host tensors in an engine with a device.
#include <numeric>

#include "api/pruned_world.h"
#include "device/device_side.h"
#include "device/step_runner.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

std::vector<tandem_pruning_stage> some_stages() {
  return {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96, 3), stage_of(TANDEM_JUDGE_EXACT, 8, 32, 2)};
}

// Three stages, each from some length on, with one more before them. The window that queries always attend is short.
std::vector<tandem_pruning_stage> more_stages() {
  std::vector<tandem_pruning_stage> stages = {
      stage_of(TANDEM_JUDGE_BOUNDS, 32, 160, 8), stage_of(TANDEM_JUDGE_DESCENT, 16, 96, 4),
      stage_of(TANDEM_JUDGE_EXACT, 8, 48, 2), stage_of(TANDEM_JUDGE_BOUNDS, 8, 64, 3)};
  for (tandem_pruning_stage& stage : stages) stage.from_tokens = 320;
  stages[2].plus_next = 1;
  stages[3].from_tokens = 0;
  stages[3].to_tokens = 320;
  return stages;
}

void use_policy(Side* side, const Pruned& pruned) { change_session(side, pruned.options); }

// A session on the device and its twin on the host, which get the same calls.
struct Twins {
  Side side{true}, twin{false};
  int64_t seed = 1;

  explicit Twins(const Pruned& pruned) {
    use_policy(&side, pruned);
    use_policy(&twin, pruned);
  }
  void attend(int64_t n, bool appends = true) {
    Call on_device(n, seed), on_host(n, seed);
    ++seed;
    for (Call* call : {&on_device, &on_host})
      for (float& x : call->q.values) x *= 8.0f;  // so that softmax prefers some keys
    on_device.to_device();
    for (const auto& [call, of] : {std::pair(&on_device, &side), std::pair(&on_host, &twin)}) {
      tandem_attend_args args = call->args(*of);
      if (!appends) args.k = args.v = nullptr;
      OK(tandem_attend, of->session, &args);
    }
    assert_close_to(on_device.output(), on_host.output(), "call " + std::to_string(seed - 1));
  }
  void truncate(int64_t n) {
    for (Side* each : {&side, &twin}) OK(tandem_sequence_truncate, each->cache, each->sequence, n);
  }
};

void answers_as_on_the_host(std::vector<tandem_pruning_stage> stages, int32_t shares_lists) {
  Pruned pruned(32, kWindow + 8, std::move(stages));
  pruned.pruning.shared_lists = shares_lists;
  Twins twins(pruned);
  for (const int64_t n : {30, 1, 1, 1, 200, 1, 1, 1, 1, 1, 5, 1, 1, 600, 1}) twins.attend(n);
  for (int i = 0; i < 40; ++i) twins.attend(1);
  twins.attend(1, false);
  twins.attend(70, false);
  twins.truncate(700);
  for (int i = 0; i < 10; ++i) twins.attend(1);
  twins.attend(64);
  for (int i = 0; i < 10; ++i) twins.attend(1);
  assert_true(twins.side.digest() == twins.twin.digest());
}

void calls_answer_as_on_the_host(void**) { answers_as_on_the_host(some_stages(), 0); }
void many_stages_answer_as_on_the_host(void**) { answers_as_on_the_host(more_stages(), 0); }
void shared_lists_answer_as_on_the_host(void**) { answers_as_on_the_host(more_stages(), 1); }

// Appends of thousands of tokens, which the device takes some thousands at a time.
void long_appends_answer_as_on_the_host(void**) {
  const Pruned pruned(32, 5000, more_stages());
  Twins twins(pruned);
  for (const int64_t n : {2700, 1, 1, 700, 1}) twins.attend(n);
  assert_in_range(counts.largest_search, 1 + 512 / 64, 2048 / 64);
  assert_true(twins.side.digest() == twins.twin.digest());
}

// If the device attends lists with any number of query rows, appends are attended one query block at a time.
void whole_blocks_answer_as_on_the_host(void**) {
  answers_as_on_the_host(some_stages(), 0);
  assert_in_range(counts.largest_list_rows, 1, 64);
  controls.take_long_lists();
  for (const int32_t shares_lists : {0, 1}) answers_as_on_the_host(more_stages(), shares_lists);
  assert_int_equal(counts.largest_list_rows, 64 * kQHeads / kKvHeads);
}

// Returns the keys that the sequence's last query attended, for each KV head.
std::vector<std::vector<int64_t>> listed(const Side& side, int64_t sequence, int32_t layer_idx = kLayer) {
  std::vector<std::vector<int64_t>> all;
  for (int32_t head = 0; head < kKvHeads; ++head) {
    std::vector<int64_t>& tokens = all.emplace_back(1 << 12);
    int64_t n = 0;
    OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, side.session, sequence, layer_idx, head, 0);
    tokens.resize(static_cast<size_t>(n));
  }
  return all;
}

// The counts of two sessions since the last look, side by side. The last chunk that a stage keeps may have parts that the
// next stage leaves out. A device counts these parts as judged: here less than 16 keys of 2 bytes a dim.
struct CountedTwins {
  const Side &side, &twin;
  tandem_session_stats before = side.stats(), before_twin = twin.stats();

  void expect_alike(const std::string& context, int64_t n_blocks) {
    const int64_t most_above = n_blocks * kKvHeads * 16 * 2 * kDim;
    const tandem_session_stats now = side.stats(), now_twin = twin.stats();
    const int64_t judged = now.judged_kv_bytes - before.judged_kv_bytes;
    const int64_t judged_twin = now_twin.judged_kv_bytes - before_twin.judged_kv_bytes;
    if (now.n_refreshes - before.n_refreshes != now_twin.n_refreshes - before_twin.n_refreshes ||
        now.selected_keys != now_twin.selected_keys || judged < judged_twin || judged > judged_twin + most_above)
      fail_msg("%s: %lld stages, %lld keys, %lld bytes; on the host %lld, %lld, %lld", context.c_str(),
               static_cast<long long>(now.n_refreshes - before.n_refreshes), static_cast<long long>(now.selected_keys),
               static_cast<long long>(judged), static_cast<long long>(now_twin.n_refreshes - before_twin.n_refreshes),
               static_cast<long long>(now_twin.selected_keys), static_cast<long long>(judged_twin));
    before = now, before_twin = now_twin;
  }
};

// Stages begin and end to exist as the length changes, lists grow old, and the kept keys can be asked for.
void tell_what_they_have_found(std::vector<tandem_pruning_stage> stages, int32_t shares_lists) {
  Pruned pruned(32, kWindow + 8, std::move(stages));
  pruned.pruning.shared_lists = shares_lists;
  Twins twins(pruned);
  CountedTwins counted{twins.side, twins.twin};
  const auto decode = [&](int n) {
    for (int i = 0; i < n; ++i) {
      twins.attend(1);
      const std::string context = "call " + std::to_string(twins.seed - 1);
      counted.expect_alike(context, 1);
      if (listed(twins.side, twins.side.sequence) != listed(twins.twin, twins.twin.sequence))
        fail_msg("%s: other keys", context.c_str());
    }
  };
  twins.attend(300);
  counted.expect_alike("the first prompt", 300 / 64 + 1);
  decode(60);
  twins.attend(400);
  counted.expect_alike("the second prompt", 400 / 64 + 1);
  decode(20);
  twins.truncate(700);
  decode(3);
}

void tells_what_searches_have_found(void**) { tell_what_they_have_found(some_stages(), 0); }
void tells_what_many_stages_have_found(void**) { tell_what_they_have_found(more_stages(), 0); }
void tells_what_is_in_shared_lists(void**) { tell_what_they_have_found(more_stages(), 1); }

// A fork on a device begins with lists of its own. So does the host's here, because no truncation comes before it.
void forks_answer_as_on_the_host(void**) {
  const Pruned pruned(16, kWindow, {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96), stage_of(TANDEM_JUDGE_EXACT, 8, 32)});
  Twins twins(pruned);
  for (const int64_t n : {300, 1, 1}) twins.attend(n);
  for (Side* each : {&twins.side, &twins.twin}) {
    int64_t fork = 0;
    OK(tandem_sequence_fork, &fork, each->cache, each->sequence);
    each->sequence = fork;
  }
  for (const int64_t n : {1, 1, 90, 1}) twins.attend(n);
}

// Calls alternate between device tensors and host tensors.
void tensors_may_change_sides(void**) {
  const Pruned pruned(16, kWindow, {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96), stage_of(TANDEM_JUDGE_EXACT, 8, 32)});
  Twins twins(pruned);
  for (const int64_t n : {150, 1, 1, 100, 1, 1, 1}) {
    twins.attend(n);
    Call own(n, twins.seed + 50), wanted(n, twins.seed + 50);
    attend(twins.side, own);
    attend(twins.twin, wanted);
    assert_close_to(own.output(), wanted.output(), "on the host");
  }
}

// Planned steps of two sequences of different lengths, call by call and as replays of one graph, give the host's outputs.
// Meanwhile stages begin to exist, chunks fill up and lists grow old. After some steps the sequences get tokens in another
// way.
void planned_steps_answer_as_on_the_host(void**) {
  const Pruned pruned(32, kWindow + 8, more_stages());
  Runner planned(280), replayed(280);
  HostTwin twin(280, "all");
  for (Side* side : {&planned.side, &replayed.side, &twin.side}) use_policy(side, pruned);
  constexpr int64_t kOneEach[] = {1, 1};
  int64_t n_bounded = 0;
  for (int64_t step = 0; step < 120; ++step) {
    if (step == 1) n_bounded = counts.n_bounded;
    if (step == 60) assert_int_equal(counts.n_bounded, n_bounded);  // searches made the bounds of all chunks since
    for (Runner* runner : {&planned, &replayed}) {
      runner->set_inputs(step);
      runner->begin(kOneEach);
      if (runner == &planned) {
        runner->attend_layers(kOneEach);
      } else {
        if (runner->graph == nullptr) runner->capture(kOneEach);
        assert_true(controls.launch(runner->graph, runner->stream));
      }
      runner->end();
    }
    const std::vector<float> wanted = twin.run_step(step);
    assert_close_to(planned.outputs(), wanted, "step " + std::to_string(step));
    assert_close_to(replayed.outputs(), wanted, "replayed step " + std::to_string(step));
    if (step != 60) continue;
    for (int32_t l = 0; l < kStepLayers; ++l) {
      const Tensor k({90, kKvHeads, kDim}, 300 + l), v({90, kKvHeads, kDim}, 400 + l);
      for (const auto& [side, ids] :
           {std::pair(&planned.side, planned.ids), std::pair(&replayed.side, replayed.ids), std::pair(&twin.side, twin.ids)})
        OK(tandem_sequence_append, side->cache, ids[0], l, &k.view, &v.view, nullptr);
    }
  }
  for (int i = 0; i < 2; ++i) assert_true(planned.digest(i) == replayed.digest(i));
}

// Counts and keys of steps, call by call and replayed, are the host's. While a step is open the keys cannot be asked for.
void steps_tell_what_they_have_found(void**) {
  const Pruned pruned(32, kWindow + 8, more_stages());
  Runner planned(300), replayed(300);
  HostTwin twin(300, "all");
  for (Side* side : {&planned.side, &replayed.side, &twin.side}) use_policy(side, pruned);
  CountedTwins counted{planned.side, twin.side}, counted_replays{replayed.side, twin.side};
  for (int64_t step = 0; step < 40; ++step) {
    constexpr int64_t kOneEach[] = {1, 1};
    planned.run_step(step);
    replayed.set_inputs(step);
    replayed.begin(kOneEach);
    if (replayed.graph == nullptr) replayed.capture(kOneEach);
    assert_true(controls.launch(replayed.graph, replayed.stream));
    int64_t n = 0;
    tandem_error* error = nullptr;
    const int32_t status =
        tandem_session_selection(nullptr, nullptr, 0, &n, replayed.side.session, replayed.ids[0], 0, 0, 0, &error);
    assert_refused(status, error, TANDEM_ERROR_BUSY, "sequence", "in flight");
    replayed.end();
    twin.run_step(step);
    const std::string context = "step " + std::to_string(step);
    counted.expect_alike(context, 2 * kStepLayers);
    counted_replays.expect_alike(context + ", replayed", 2 * kStepLayers);
    for (size_t i = 0; i < 2; ++i)
      for (int32_t l = 0; l < kStepLayers; ++l) {
        const auto wanted = listed(twin.side, twin.ids[i], l);
        assert_true(listed(planned.side, planned.ids[i], l) == wanted);
        assert_true(listed(replayed.side, replayed.ids[i], l) == wanted);
      }
  }
}

void expect_no_selection(const Side& side) {
  int64_t n = 0;
  tandem_error* error = nullptr;
  const int32_t status =
      tandem_session_selection(nullptr, nullptr, 0, &n, side.session, side.sequence, kLayer, 0, 0, &error);
  assert_refused(status, error, TANDEM_ERROR_UNSUPPORTED, "sequence", "whose lists policy");
}

// The keys can be asked for when all keys are attended. Lists of appends, and lists that a fork does not have, are refused.
void tells_no_keys_that_are_gone(void**) {
  const Pruned pruned(16, kWindow, some_stages());
  Side side(true);
  use_policy(&side, pruned);
  const auto attend_some = [&](int64_t n, bool appends) {
    Call call(n, n);
    call.to_device();
    tandem_attend_args args = call.args(side);
    if (!appends) args.k = args.v = nullptr;
    OK(tandem_attend, side.session, &args);
  };
  attend_some(30, true);
  std::vector<int64_t> all(30);
  std::iota(all.begin(), all.end(), 0);
  assert_true(listed(side, side.sequence) == std::vector<std::vector<int64_t>>(kKvHeads, all));
  attend_some(300, true);
  expect_no_selection(side);
  assert_int_equal(side.stats().selected_keys, 0);
  attend_some(1, false);
  expect_no_selection(side);
  attend_some(1, true);
  assert_true(side.stats().selected_keys > 0 && std::ssize(listed(side, side.sequence)[0]) < 331);
  const int64_t sequence = side.sequence;
  OK(tandem_sequence_fork, &side.sequence, side.cache, sequence);
  expect_no_selection(side);
}

// Returns a side that has attended a prompt and some tokens, so that it has kept lists.
std::unique_ptr<Side> prompted(bool has_device, const Pruned& pruned) {
  auto side = std::make_unique<Side>(has_device);
  use_policy(side.get(), pruned);
  for (const int64_t n : {250, 1, 1}) {
    Call call(n, 90 + n);
    if (has_device) call.to_device();
    attend(*side, call);
    if (has_device) device->wait();
  }
  return side;
}

// Here stages run in every call, as they do in the first call after a failure.
void failures_take_all_back(void**) {
  using namespace stand_in;
  const Pruned pruned(16, kWindow, {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96), stage_of(TANDEM_JUDGE_EXACT, 8, 32)});
  for (const int64_t n : {1, 150}) {
    const auto twin = prompted(false, pruned);
    const RetriedCalls calls(*twin, n, 1);
    const auto next = [](int64_t nth) { return nth + tandem::test::one_in(); };
    const auto make = [&] { return prompted(true, pruned); };
    if (n == 1)
      take_back_what_fails({kCopy, kAppend, kSearch, kAttend}, calls, make, next);
    else
      take_back_what_fails({kCopy, kAppend, kBoundChunks, kSearch, kAttend}, calls, make, next);
  }
}

// Sequences are so short that stages would keep all chunks. Steps are planned as if they were longer.
void short_sequences_are_bounded_by_searches(void**) {
  const Pruned pruned(16, kWindow, {stage_of(TANDEM_JUDGE_BOUNDS, 8, 4096, 3)});
  Runner planned(20);
  HostTwin twin(20, "all");
  for (Side* side : {&planned.side, &twin.side}) use_policy(side, pruned);
  int64_t n_bounded = 0;
  for (int64_t step = 0; step < 100; ++step) {
    if (step == 1) n_bounded = counts.n_bounded;
    planned.run_step(step);
    assert_close_to(planned.outputs(), twin.run_step(step), "step " + std::to_string(step));
  }
  assert_int_equal(counts.n_bounded, n_bounded);
}

// The first layer keeps few keys, the second many. A step has the memory of the layer that takes most.
void layers_have_records_of_their_own(void**) {
  std::vector<tandem_pruning_stage> stages[kStepLayers] = {
      {stage_of(TANDEM_JUDGE_EXACT, 8, 16)},
      {stage_of(TANDEM_JUDGE_BOUNDS, 8, 4096)},
      {stage_of(TANDEM_JUDGE_BOUNDS, 16, 512), stage_of(TANDEM_JUDGE_EXACT, 8, 256)}};
  std::vector<tandem_pruning_record> records(kStepLayers, TANDEM_PRUNING_RECORD_INIT);
  for (size_t l = 0; l < records.size(); ++l) {
    records[l].sink_tokens = 16;
    records[l].window_tokens = kWindow;
    records[l].stages = stages[l].data();
    records[l].n_stages = std::ssize(stages[l]);
  }
  Pruned pruned(16, kWindow, some_stages());
  pruned.pruning.decode = pruned.pruning.append = records.data();
  pruned.pruning.n_decode = pruned.pruning.n_append = kStepLayers;
  Runner planned(900);
  HostTwin twin(900, "all");
  for (Side* side : {&planned.side, &twin.side}) use_policy(side, pruned);
  for (int64_t step = 0; step < 4; ++step) {
    planned.run_step(step);
    assert_close_to(planned.outputs(), twin.run_step(step), "step " + std::to_string(step));
  }
}

// A call of many sequences in a layer that does not prune makes room for steps of as many. Kernels of later steps are
// launched for that number, and searches have work space for it.
void steps_may_have_fewer_sequences_than_room(void**) {
  constexpr int64_t kOthers = 14;
  Pruned pruned(32, kWindow + 8, more_stages());
  const char* const policies[kStepLayers] = {"all", "hip", "hip"};
  pruned.options.layer_policies = policies;
  pruned.options.n_layer_policies = kStepLayers;
  Runner planned(400);
  HostTwin twin(400, "all");
  for (Side* side : {&planned.side, &twin.side}) use_policy(side, pruned);
  std::vector<int64_t> others(kOthers);
  const std::vector<int64_t> q_lens(kOthers, 1);
  for (int64_t& id : others) OK(tandem_sequence_create, &id, planned.side.cache);
  Call call(kOthers, 7);
  call.to_device();
  tandem_attend_args args = call.args(planned.side);
  args.n_sequences = kOthers;
  args.sequences = others.data();
  args.q_lens = q_lens.data();
  OK(tandem_attend, planned.side.session, &args);
  for (int64_t step = 0; step < 3; ++step) {
    planned.run_step(step);
    assert_close_to(planned.outputs(), twin.run_step(step), "step " + std::to_string(step));
  }
}

// A kernel is told only the position of a chunk's first query, so a chunk ends where positions have a gap.
void gaps_in_positions_end_a_chunk(void**) {
  const Pruned pruned(16, kWindow, {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96)});
  Side side(true, "all", 0, 1, kWindow, TANDEM_ROPE_HALVES);
  use_policy(&side, pruned);
  Call prompt(300, 1), again(250, 2);
  for (Call* call : {&prompt, &again}) call->to_device();
  attend(side, prompt);
  OK(tandem_sequence_remove, side.cache, side.sequence, 100, 10, 0);
  tandem_attend_args args = again.args(side);
  args.k = args.v = nullptr;
  OK(tandem_attend, side.session, &args);
  const std::vector<float> got = again.output();
  assert_true(std::all_of(got.begin(), got.end(), [](float x) { return std::isfinite(x); }));
}

// The state of a side, for comparing it before and after a call.
struct Held {
  int64_t length;
  uint64_t digest;
  tandem_session_stats stats;
  explicit Held(const Side& side) : length(side.length()), digest(side.digest()), stats(side.stats()) {}
  void expect_same(const Side& side) const {
    const Held now(side);
    assert_true(length == now.length && digest == now.digest);
    assert_memory_equal(&stats, &now.stats, sizeof stats);
  }
};

void expect_refused(const Side& side, const tandem_attend_args& args, int32_t wanted, const char* field) {
  const Held before(side);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend(side.session, &args, &error);
  assert_refused(status, error, wanted, field, "layer 0");
  before.expect_same(side);
}

void refuses_what_no_search_takes(void**) {
  const Pruned pruned(16, kWindow, some_stages());
  {
    Side side(true);
    use_policy(&side, pruned);
    Call guess(3, 1);
    guess.to_device();
    tandem_attend_args args = guess.args(side);
    args.flags = TANDEM_ATTEND_SPECULATIVE;
    expect_refused(side, args, TANDEM_ERROR_UNSUPPORTED, "flags");
  }
  Side side(true);
  Pruned small(16, kWindow, {stage_of(TANDEM_JUDGE_BOUNDS, 16, 96), stage_of(TANDEM_JUDGE_EXACT, 8, 32)});
  small.options.window_tokens = 256;
  use_policy(&side, small);
  Call prompt(200, 1), too_many(57, 2), one(56, 3);
  for (Call* call : {&prompt, &too_many, &one}) call->to_device();
  attend(side, prompt);
  expect_refused(side, too_many.args(side), TANDEM_ERROR_CAPACITY, "window_tokens");
  attend(side, one);
}

void answers_host_tensors(void**) {
  const Pruned pruned(16, kWindow, some_stages());
  Side side(true), twin(false);
  for (Side* each : {&side, &twin}) use_policy(each, pruned);
  const tandem_session_options dense = Side::options_of("all");
  tandem_session *beside = nullptr, *beside_twin = nullptr;
  OK(tandem_session_create, &beside, side.cache, &dense);
  OK(tandem_session_create, &beside_twin, twin.cache, &dense);
  int64_t seed = 1;
  for (const int64_t n : {200, 1, 1, 70, 1, 300, 1, 1, 1, 1}) {
    Call own(n, seed), wanted(n, seed);
    attend(side, own);
    attend(twin, wanted);
    assert_same_bits(own.output(), wanted.output(), "call " + std::to_string(seed));
    Call on_device(n % 50, ++seed), on_host(n % 50, seed);  // for the other session
    on_device.to_device();
    const tandem_attend_args args = on_device.args(side), args_of_twin = on_host.args(twin);
    if (n % 50 > 0) OK(tandem_attend, beside, &args);
    if (n % 50 > 0) OK(tandem_attend, beside_twin, &args_of_twin);
    ++seed;
  }
  assert_true(side.digest() == twin.digest());
  tandem_session_release(beside);
  tandem_session_release(beside_twin);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(calls_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(many_stages_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(shared_lists_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(long_appends_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(whole_blocks_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(tells_what_searches_have_found, forget),
      cmocka_unit_test_teardown(tells_what_many_stages_have_found, forget),
      cmocka_unit_test_teardown(tells_what_is_in_shared_lists, forget),
      cmocka_unit_test_teardown(steps_tell_what_they_have_found, forget),
      cmocka_unit_test_teardown(tells_no_keys_that_are_gone, forget),
      cmocka_unit_test_teardown(planned_steps_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(forks_answer_as_on_the_host, forget),
      cmocka_unit_test_teardown(tensors_may_change_sides, forget),
      cmocka_unit_test_teardown(short_sequences_are_bounded_by_searches, forget),
      cmocka_unit_test_teardown(layers_have_records_of_their_own, forget),
      cmocka_unit_test_teardown(steps_may_have_fewer_sequences_than_room, forget),
      cmocka_unit_test_teardown(gaps_in_positions_end_a_chunk, forget),
      cmocka_unit_test_teardown(failures_take_all_back, forget),
      cmocka_unit_test_teardown(refuses_what_no_search_takes, forget),
      cmocka_unit_test_teardown(answers_host_tensors, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
