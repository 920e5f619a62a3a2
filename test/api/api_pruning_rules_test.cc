// SPDX-License-Identifier: MIT
// The rules of pruning.h one by one: the end of the candidates, the chunks that a stage keeps, the calls in which it runs,
// the start of windows, and refused records.
#include <limits>

#include "pruned_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kDescent = TANDEM_JUDGE_DESCENT, kBounds = TANDEM_JUDGE_BOUNDS, kExact = TANDEM_JUDGE_EXACT;
constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;

// One sequence whose keys are small except where a test plants others. Every query is `strength` in dim 0 and zero
// elsewhere, so the first number of a key determines its logit.
struct Planted {
  Machine machine{{plain_layer()}};
  Keeper keeper;
  int64_t length = 0;
  float strength = 8.0f;

  explicit Planted(const Pruned& pruned) : keeper(machine, pruned.options, short_pages()) {}

  // Appends n tokens. `planted` gives some keys a number in dim 0. Returns the outputs.
  std::vector<float> append(int64_t n, const std::vector<std::pair<int64_t, float>>& planted = {}, bool attends = true) {
    Batch batch(machine, 0, {{keeper.ids[0], n}}, length + 1);
    std::fill(batch.q.values.begin(), batch.q.values.end(), 0.0f);
    for (size_t i = 0; i < batch.q.values.size(); i += kDim) batch.q.values[i] = strength;
    for (size_t i = 0; i < batch.k.values.size(); i += kDim) batch.k.values[i] *= 0.01f;
    for (const auto& [token, value] : planted)
      for (int64_t h = 0; h < kKvHeads; ++h)
        batch.k.values[static_cast<size_t>(((token - length) * kKvHeads + h) * kDim)] = value;
    length += n;
    if (attends)
      OK(tandem_attend, keeper.session, &batch.args);
    else
      OK(tandem_sequence_append, keeper.cache, keeper.ids[0], 0, &batch.k.view, &batch.v.view, nullptr);
    return batch.answers();
  }
  bool lists(int64_t token, int32_t kv_head = 0) const {
    const auto listed = keeper.listed(keeper.ids[0], kv_head);
    return std::binary_search(listed.begin(), listed.end(), token);
  }
  // Returns the tokens between sinks and window that the last query attends.
  std::vector<int64_t> between(int64_t sinks, int64_t window) const {
    std::vector<int64_t> tokens;
    for (const int64_t t : keeper.listed(keeper.ids[0]))
      if (t >= sinks && t < length - window) tokens.push_back(t);
    return tokens;
  }
};

// The strongest key is attended wherever it is, also as the first one after the sinks or the last one before the window.
// This holds in every call, while the window moves and stages wait.
void forgets_no_key(void**) {
  for (const int32_t judge : {kDescent, kBounds, kExact})
    for (const int64_t place : {32, 33, 200, 367, 368, 369, 370, 400, 430, 431}) {
      if (judge == kDescent && place % 8 != 0) continue;  // descents only see first keys of high-scoring halves
      const Pruned pruned(32, 64, {stage_of(judge, 8, 16, 5)});
      Planted planted(pruned);
      using Keys = std::vector<std::pair<int64_t, float>>;
      planted.append(431, place < 431 ? Keys{{place, 4.0f}} : Keys{}, false);
      for (int i = 0; i < 70; ++i) {
        planted.append(1, i == 0 && place == 431 ? Keys{{place, 4.0f}} : Keys{});
        assert_true(planted.lists(place));
      }
    }
}

// Chunks that begin inside the window of an append are not candidates. A decode call also leaves out those inside its
// overlap.
void looks_up_to_the_window(void**) {
  const Pruned pruned(32, 64, {stage_of(kExact, 1, 3, 5)});
  Planted planted(pruned);
  // An append of one block at token 400: candidates end at 400 + 1 - 64 = 337. For a decode call there, they end at 341.
  planted.append(400, {{100, 3.0f}, {336, 2.0f}, {337, 5.0f}, {340, 4.0f}, {341, 5.0f}}, false);
  planted.append(2);
  const auto listed = planted.keeper.listed(planted.keeper.ids[0]);
  assert_true(planted.lists(100) && planted.lists(336));
  assert_int_equal(listed.size(), 32 + 3 + (402 - 337));
  OK(tandem_sequence_truncate, planted.keeper.cache, planted.keeper.ids[0], 400);
  planted.length = 400;
  planted.append(1);
  assert_true(planted.between(32, 64) == std::vector<int64_t>{100});  // 337 and 340 are in the list and in the window
}

void keeps_the_best_and_the_lower(void**) {
  for (const int32_t judge : {kDescent, kBounds, kExact}) {
    const Pruned pruned(32, 64, {stage_of(judge, 8, 24)});
    Planted planted(pruned);
    planted.append(300, {{40, 1.0f}, {80, 2.0f}, {120, 2.0f}, {160, 2.0f}, {200, 1.5f}}, false);
    planted.append(1);
    std::vector<int64_t> wanted;
    for (const int64_t chunk : {80, 120, 160})
      for (int64_t t = 0; t < 8; ++t) wanted.push_back(chunk + t);
    assert_true(planted.between(32, 64) == wanted);
    const Pruned fewer(32, 64, {stage_of(judge, 8, 16)});
    Planted equal(fewer);
    equal.append(300, {{80, 2.0f}, {120, 2.0f}, {160, 2.0f}}, false);
    equal.append(1);
    wanted.resize(16);
    assert_true(equal.between(32, 64) == wanted);
  }
}

// A key whose logit is not finite is kept with its chunk, and the others are judged as without it. Bounds leave NaN out, so
// a stage of bounds does not see it.
void a_bad_number_hides_no_other_key(void**) {
  for (const int32_t judge : {kBounds, kExact})
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const Pruned pruned(32, 64, {stage_of(judge, 8, 24)});
      Planted planted(pruned);
      planted.append(3000, {{123, 3.0f}, {1404, bad}, {2009, 2.0f}}, false);
      planted.append(1);
      assert_true(planted.lists(123) && planted.lists(2009));
      assert_int_equal(planted.lists(1404), judge == kExact || !std::isnan(bad));
    }
}

// Each chunk brings the chunk after it, only once if both have high scores, and none after the last candidate.
void plus_next_takes_the_chunk_behind(void**) {
  tandem_pruning_stage stage = stage_of(kExact, 8, 48);
  stage.plus_next = 1;
  const Pruned pruned(32, 64, {stage});
  Planted planted(pruned);
  planted.append(300, {{82, 2.0f}, {160, 3.0f}, {168, 3.0f}}, false);
  planted.append(1);
  std::vector<int64_t> wanted;
  for (const int64_t chunk : {80, 88, 160, 168, 176})
    for (int64_t t = 0; t < 8; ++t) wanted.push_back(chunk + t);
  assert_true(planted.between(32, 64) == wanted);
}

// Numbers that bf16 cannot represent: a bound is never below the logit, for positive and for negative queries.
void bounds_are_rounded_outward(void**) {
  const Pruned pruned(16, 64, {stage_of(kBounds, 1, 1)});
  for (const float sign : {1.0f, -1.0f}) {
    Planted planted(pruned);
    planted.strength = 8.0f * sign;
    planted.append(200, {{50, sign}, {100, sign * (1.0f + 0x1p-12f)}}, false);
    planted.append(1);
    assert_true(planted.between(16, 64) == std::vector<int64_t>{100});
  }
}

// A stage runs when its interval has passed, and then the later stages run too.
void runs_when_it_is_due(void**) {
  const Pruned pruned(32, 96, {stage_of(kBounds, 16, 160, 6), stage_of(kDescent, 8, 80, 4), stage_of(kExact, 8, 40, 2)});
  Planted planted(pruned);
  planted.append(500, {}, false);
  std::vector<int64_t> n_run;
  int64_t before = 0;
  for (int i = 0; i < 15; ++i) {
    planted.append(1);
    const int64_t now = planted.keeper.stats().n_refreshes;
    n_run.push_back(now - before);
    before = now;
  }
  //                                         0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
  assert_true(n_run == std::vector<int64_t>({3, 0, 1, 0, 2, 0, 3, 0, 1, 0, 2, 0, 3, 0, 1}));
  planted.append(2);
  planted.append(1);
  assert_int_equal(planted.keeper.stats().n_refreshes - before, 3);  // after an append
}

// A list does not contain a new key until its stage runs again.
void lists_wait_for_their_stage(void**) {
  const Pruned pruned(32, 64, {stage_of(kExact, 8, 16, 20)});
  Planted planted(pruned);
  planted.append(400, {{100, 2.0f}, {200, 2.0f}, {300, 1.0f}}, false);
  planted.append(1);
  planted.strength = -8.0f;  // all other keys score higher now
  for (int i = 1; i < 20; ++i) {
    planted.append(1);
    assert_true(planted.lists(100) && planted.lists(200));
  }
  planted.append(1);
  assert_false(planted.lists(100) || planted.lists(200));
}

// The queries of one largest block share the start of their window, whatever the blocks of later stages are.
void windows_begin_with_the_largest_block(void**) {
  const Pruned pruned(16, 64, {stage_of(kDescent, 16, 64, 0, 64), stage_of(kExact, 8, 16, 0, 16)});
  Planted planted(pruned);
  planted.append(500, {}, false);
  planted.append(64);
  const auto listed = planted.keeper.listed(planted.keeper.ids[0]);
  for (int64_t t = 500 + 1 - 64; t < 564; ++t) assert_true(planted.lists(t));
  assert_true(std::ssize(listed) >= 16 + 63 + 64);
  planted.append(70);
  for (int64_t t = 564 + 64 + 1 - 64; t < 634; ++t) assert_true(planted.lists(t));  // the second block
}

// Stages that only apply to some lengths.
void stages_come_and_go_with_the_length(void**) {
  tandem_pruning_stage low = stage_of(kExact, 8, 16), high = stage_of(kExact, 8, 32);
  low.to_tokens = 301;
  high.from_tokens = 311;
  const Pruned pruned(16, 64, {low, high});
  Planted planted(pruned);
  planted.append(295, {}, false);
  for (int64_t n_seen = 296; n_seen < 320; ++n_seen) {
    planted.append(1);
    const int64_t n = std::ssize(planted.between(16, 64));
    assert_int_equal(n, n_seen < 301 ? 16 : n_seen < 311 ? n_seen - 16 - 64 : 32);
  }
}

// Each layer has its own records, for decode calls and for appends.
void each_layer_has_its_records(void**) {
  const Machine machine({plain_layer(), plain_layer()});
  const Pruned one(16, 64, {stage_of(kExact, 8, 16)}), two(16, 64, {stage_of(kExact, 8, 24)}),
      three(16, 64, {stage_of(kExact, 8, 32)}), four(16, 64, {stage_of(kExact, 8, 40)});
  const tandem_pruning_record decode[] = {one.record, two.record}, append[] = {three.record, four.record};
  Pruned pruned(16, 64, {});
  pruned.pruning.decode = decode;
  pruned.pruning.append = append;
  pruned.pruning.n_decode = pruned.pruning.n_append = 2;
  const Keeper keeper(machine, pruned.options, short_pages());
  keeper.append(keeper.ids[0], 300, 1);
  // The last chunk may reach into the window.
  const auto n_chunks = [&](int32_t layer, int64_t n_window) {
    return (std::ssize(keeper.listed(keeper.ids[0], 1, layer)) - 16 - n_window + 7) / 8;
  };
  for (const int64_t n : {1, 2, 1}) {
    (void)keeper.turn({n}, 50 + n);
    assert_int_equal(n_chunks(0, 63 + n), n == 1 ? 2 : 4);
    assert_int_equal(n_chunks(1, 63 + n), n == 1 ? 3 : 5);
  }
}

// ---- what is refused ---------------------------------------------------------------------------------------------------

struct Wrong {
  const char* field;
  const char* value;
  std::function<void(Pruned&)> change;
};

const std::vector<Wrong>& wrong_records() {
  static const std::vector<Wrong> all = {
      {"pruning.decode[0].stages[0].judge", "0", [](Pruned& p) { p.stages[0].judge = 0; }},
      {"pruning.decode[0].stages[1].judge", "4", [](Pruned& p) { p.stages[1].judge = 4; }},
      {"pruning.decode[0].stages[0].chunk_tokens", "0", [](Pruned& p) { p.stages[0].chunk_tokens = 0; }},
      {"pruning.decode[0].stages[0].chunk_tokens", "512", [](Pruned& p) { p.stages[0].chunk_tokens = 512; }},
      {"pruning.decode[0].stages[1].chunk_tokens", "24", [](Pruned& p) { p.stages[1].chunk_tokens = 24; }},
      {"pruning.decode[0].stages[1].chunk_tokens", "32 is more", [](Pruned& p) { p.stages[1].chunk_tokens = 32; }},
      {"pruning.decode[0].stages[0].query_block", "48", [](Pruned& p) { p.stages[0].query_block = 48; }},
      {"pruning.decode[0].stages[0].query_block", "128", [](Pruned& p) { p.stages[0].query_block = 128; }},
      {"pruning.decode[0].stages[1].query_block", "64 is more", [](Pruned& p) { p.stages[0].query_block = 32; }},
      {"pruning.decode[0].stages[0].plus_next", "2", [](Pruned& p) { p.stages[0].plus_next = 2; }},
      {"pruning.decode[0].stages[0].plus_next", "not the last", [](Pruned& p) { p.stages[0].plus_next = 1; }},
      {"pruning.decode[0].stages[1].keep_tokens", "72 is not a multiple of twice",
       [](Pruned& p) { p.stages[1].plus_next = 1, p.stages[1].keep_tokens = 72; }},
      {"pruning.decode[0].stages[0].keep_tokens", "100", [](Pruned& p) { p.stages[0].keep_tokens = 100; }},
      {"pruning.decode[0].stages[0].keep_tokens", "0", [](Pruned& p) { p.stages[0].keep_tokens = 0; }},
      {"pruning.decode[0].stages[0].refresh_interval", "-1", [](Pruned& p) { p.stages[0].refresh_interval = -1; }},
      {"pruning.decode[0].stages[0].from_tokens", "-1", [](Pruned& p) { p.stages[0].from_tokens = -1; }},
      {"pruning.decode[0].stages[0].to_tokens", "7 is neither",
       [](Pruned& p) { p.stages[0].from_tokens = p.stages[0].to_tokens = 7; }},
      {"pruning.decode[0].sink_tokens", "24", [](Pruned& p) { p.record.sink_tokens = 24; }},
      {"pruning.decode[0].sink_tokens", "-2", [](Pruned& p) { p.record.sink_tokens = -2; }},
      {"pruning.decode[0].window_tokens", "34", [](Pruned& p) { p.record.window_tokens = 34; }},
      {"pruning.decode[0].window_tokens", "-2", [](Pruned& p) { p.record.window_tokens = -2; }},
      {"pruning.decode[0].n_stages", "0", [](Pruned& p) { p.record.n_stages = 0; }},
      {"pruning.decode[0].n_stages", "9", [](Pruned& p) { p.record.n_stages = 9; }},
      {"pruning.decode[0].stages", "NULL", [](Pruned& p) { p.record.stages = nullptr; }},
      {"pruning.decode[0].reserved", "1", [](Pruned& p) { p.record.reserved = 1; }},
      {"pruning.n_decode", "2", [](Pruned& p) { p.pruning.n_decode = 2; }},
      {"pruning.n_append", "3", [](Pruned& p) { p.pruning.append = nullptr, p.pruning.n_append = 3; }},
      {"pruning.shared_lists", "2", [](Pruned& p) { p.pruning.shared_lists = 2; }},
  };
  return all;
}

// The valid record has the shortest valid window: 2 * 16 + 4 - 1 = 35 tokens.
void refuses_wrong_records(void**) {
  const Machine machine;
  const Pruned right(16, 35, {stage_of(kBounds, 16, 64, 4), stage_of(kExact, 16, 32, 2)});
  const Keeper keeper(machine, right.options, short_pages());
  int n_wrong = 0;
  for (const Wrong& wrong : wrong_records()) {
    Pruned pruned(16, 35, {stage_of(kBounds, 16, 96, 4), stage_of(kExact, 16, 32, 2)});
    wrong.change(pruned);
    tandem_session* session = nullptr;
    n_wrong +=
        check_refused({wrong.field, "tandem_session_create", kInvalid, wrong.field, wrong.value,
                       [&](tandem_error** e) { return tandem_session_create(&session, keeper.cache, &pruned.options, e); }});
  }
  assert_int_equal(n_wrong, 0);
}

// Refuses bounds of MLA's keys, both explicit and from the preset. In a layer that does not prune they are accepted.
void refuses_bounds_of_long_keys(void**) {
  tandem_layer_options latent = plain_layer();
  latent.n_kv_heads = 1;
  latent.k_head_dim = 576;
  latent.v_head_dim = 512;
  latent.v_aliases_k = 1;
  const Machine machine({plain_layer(), latent});
  const Keeper keeper(machine, dense_options(), short_pages());
  const Pruned pruned(16, 64, {stage_of(kExact, 16, 64), stage_of(kBounds, 8, 32)});
  tandem_session_options by_preset = TANDEM_SESSION_OPTIONS_INIT;
  by_preset.policy = "hip";
  tandem_session* session = nullptr;
  const auto refused = [&](const char* field, const tandem_session_options& options) {
    return check_refused({field, "tandem_session_create", TANDEM_ERROR_UNSUPPORTED, field, "576",
                          [&](tandem_error** e) { return tandem_session_create(&session, keeper.cache, &options, e); }});
  };
  assert_int_equal(refused("pruning.decode[0].stages[1].judge", pruned.options), 0);
  assert_int_equal(refused("pruning.preset", by_preset), 0);
  const char* const policies[] = {"hip", "all"};
  for (tandem_session_options options : {pruned.options, by_preset}) {
    options.layer_policies = policies;
    options.n_layer_policies = 2;
    OK(tandem_session_create, &session, keeper.cache, &options);
    tandem_session_release(session);
  }
  by_preset.policy = "all";
  by_preset.pruning = &pruned.pruning;
  assert_int_equal(
      check_refused({"pruning", "tandem_session_create", kInvalid, "pruning", "no layer",
                     [&](tandem_error** e) { return tandem_session_create(&session, keeper.cache, &by_preset, e); }}),
      0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(forgets_no_key),
      cmocka_unit_test(looks_up_to_the_window),
      cmocka_unit_test(keeps_the_best_and_the_lower),
      cmocka_unit_test(a_bad_number_hides_no_other_key),
      cmocka_unit_test(plus_next_takes_the_chunk_behind),
      cmocka_unit_test(bounds_are_rounded_outward),
      cmocka_unit_test(runs_when_it_is_due),
      cmocka_unit_test(lists_wait_for_their_stage),
      cmocka_unit_test(windows_begin_with_the_largest_block),
      cmocka_unit_test(stages_come_and_go_with_the_length),
      cmocka_unit_test(each_layer_has_its_records),
      cmocka_unit_test(refuses_wrong_records),
      cmocka_unit_test(refuses_bounds_of_long_keys),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
