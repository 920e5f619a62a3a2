// SPDX-License-Identifier: MIT
// Long chunks that see no key outside the window, on the stand-in: the first ones of a prompt, for every route and layer.
// Their rows leave by copies if the store can be pinned, else by tickets of 512. In both cases outputs and the store's bytes
// are the host's, and later calls find the rows.
#include "device/device_side.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

constexpr int64_t kTokenBytes = kKvHeads * kDim * 2 * 2;

struct Setup {
  int32_t k_type = TANDEM_BF16, v_type = TANDEM_BF16, rope = TANDEM_ROPE_CALLER;
  int32_t k_rotation = TANDEM_ROTATION_NONE;
  int64_t sliding_window = 0, window = kWindow;
  const char* policy = "all";
  const char* route = "host";
  double stream_fraction = -1.0;
};

// A side with two layers of this setup.
struct Prompted : Side {
  Prompted(bool has_device, const Setup& setup, int32_t n_layers = 2) : Side(has_device, "all", 0, n_layers) {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.rope = setup.rope;
    layer.sliding_window_tokens = setup.sliding_window;
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.k_type = setup.k_type;
    cache_options.v_type = setup.v_type;
    cache_options.k_rotation = setup.k_rotation;
    tandem_session_options options = options_of(setup.policy);
    options.window_tokens = setup.window;
    if (has_device) options.route = setup.route;
    if (has_device) options.stream_fraction = setup.stream_fraction;
    make_anew(this, layer, n_layers, cache_options, options);
  }
};

struct Twins {
  Prompted side, twin;

  explicit Twins(const Setup& setup) : side(true, setup), twin(false, setup) {}
  // Attends both layers and does not wait between them.
  void attend(int64_t n_tokens, int64_t seed) const {
    Call on_device[] = {Call(n_tokens, seed), Call(n_tokens, seed + 1)},
         on_host[] = {Call(n_tokens, seed), Call(n_tokens, seed + 1)};
    for (int32_t l = 0; l < 2; ++l) {
      on_device[l].to_device();
      tandem_test::attend(side, on_device[l], l);
    }
    for (int32_t l = 0; l < 2; ++l) {
      tandem_test::attend(twin, on_host[l], l);
      assert_close(on_device[l].output(), on_host[l].output());
    }
  }
  void assert_same_rows() const { assert_true(side.digest() == twin.digest()); }
};

const Setup kSetups[] = {
    {},
    {.window = 4096, .route = "auto"},
    {.window = 2000, .route = "stream"},
    {.window = 700, .route = "host+stream", .stream_fraction = 0.5},
    {.k_type = TANDEM_Q8_0, .v_type = TANDEM_Q4_0, .window = 1500},
    {.rope = TANDEM_ROPE_HALVES},
    {.rope = TANDEM_ROPE_INTERLEAVED, .window = 4096},
    {.k_type = TANDEM_Q8_0, .k_rotation = TANDEM_ROTATION_HADAMARD, .window = 4096},
    {.k_rotation = TANDEM_ROTATION_HADAMARD},
    {.sliding_window = 300},
    {.sliding_window = 1000, .window = 4096},
    {.window = 128, .policy = "hgca"},
    {.window = 4096, .policy = "hgca"},
    {.policy = "streaming"},
    {.rope = TANDEM_ROPE_HALVES, .window = 128, .policy = "hgca"},
    {.rope = TANDEM_ROPE_HALVES, .window = 4096, .policy = "hgca"},
    {.k_rotation = TANDEM_ROTATION_HADAMARD, .window = 4096, .policy = "hgca"},
};

// Prompts and the calls that may follow: single tokens at once, another long chunk, which may see keys outside the window,
// steps, a fork, a truncation.
void answers_are_the_hosts(void**) {
  tandem::test::TakesOneIn is_taken;
  for (const Setup& setup : kSetups) {
    if (!is_taken()) continue;
    const Twins both(setup);
    both.attend(1030, 1);
    both.attend(1, 10);
    both.attend(2, 12);
    both.attend(560, 14);
    both.assert_same_rows();
    for (const Side* one : {static_cast<const Side*>(&both.side), static_cast<const Side*>(&both.twin)})
      OK(tandem_sequence_truncate, one->cache, one->sequence, 700);
    both.attend(530, 20);
    both.attend(1, 22);
    both.assert_same_rows();
  }
}

// There is one append for pages and buffer and one for the ticket, not one for every 512 tokens.
void rows_leave_by_copies(void**) {
  for (const Setup& setup : {Setup{}, Setup{.window = 4096}, Setup{.rope = TANDEM_ROPE_HALVES}}) {
    const Twins both(setup);
    const int64_t before = counts.strided_bytes, n_before = counts.n_appended;
    both.attend(2000, 1);
    assert_int_equal(counts.n_appended - n_before, 2 * 2);
    assert_int_equal(both.side.stats().staged_kv_bytes, 2 * 2000 * kTokenBytes);
    assert_true(counts.strided_bytes - before >= 2 * 2000 * kTokenBytes);
    assert_true(counts.n_pinned > 0);
    both.assert_same_rows();
  }
}

// On a device that pins nothing, rows leave by tickets. A warning says so once.
void without_pins_by_tickets(void**) {
  for (const Setup& setup : kSetups) {
    const Twins both(setup);
    controls.fail_call(stand_in::kPin, 1, TANDEM_ERROR_OUT_OF_MEMORY);
    both.attend(700, 1);
    controls.fail_call(stand_in::kPin, INT64_MAX, TANDEM_OK);
    both.attend(1, 10);
    both.attend(520, 12);
    both.assert_same_rows();
  }
}

// The copies are slow. Later operations of the caller's stream wait for them if they take a ticket or need the copies'
// buffer.
void slow_copies(void**) {
  const Twins both({.window = 4096});
  controls.set_delay(3'000'000);
  for (int64_t i = 0; i < 4; ++i) both.attend(i % 2 == 0 ? 600 : 900, 10 * i);
  both.attend(1, 50);
  controls.set_delay(0);
  both.assert_same_rows();
}

void failures_take_all_back(void**) {
  using namespace stand_in;
  const Twins expected({.window = 700});
  const RetriedCalls calls(expected.twin, 600, 1);
  take_back_what_fails(
      {kAllocateShared, kAllocate, kCopy, kFill, kAppend, kAttend, kCreateStream, kCreateEvent, kRecordEvent, kWaitEvent,
       kCopyStrided},
      calls, [] { return std::make_unique<Prompted>(true, Setup{.window = 700}); },
      [](int64_t nth) { return nth + tandem::test::one_in(); });
}

// With append_tokens, plans have room for first chunks too.
void takes_what_is_planned(void**) {
  for (const int64_t appended : {700, 2000}) {
    Prompted side(true, {});
    tandem_session_options options = Side::options_of("all");
    options.append_tokens = appended;
    options.route = "host";
    change_session(&side, options);
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    OK(tandem_plan_memory, &plan, side.engine, side.model, nullptr, &options, &appended, 1);
    Call call(appended, 3);
    call.to_device();
    for (const int32_t layer : {0, 1}) attend(side, call, layer);
    assert_never_more(side, plan);
  }
}

// Graphs hold addresses. A session that has captured one takes prompts as if it had no memory for long chunks.
void graphs_stay(void**) {
  void* const stream = controls.create_stream();
  const Twins both({});
  both.attend(512, 1);
  const int64_t one = 1;
  Call on_device[] = {Call(1, 5), Call(1, 6)}, on_host[] = {Call(1, 5), Call(1, 6)};
  for (Call& call : on_device) call.to_device();
  OK(tandem_step_begin, both.side.session, &both.side.sequence, &one, 1, stream);
  assert_true(controls.begin_capture(stream));
  for (int32_t l = 0; l < 2; ++l) attend(both.side, on_device[l], l, stream);
  void* const graph = controls.end_capture(stream);
  assert_true(controls.launch(graph, stream));
  OK(tandem_step_end, both.side.session, stream);
  wait_for(stream);
  for (int32_t l = 0; l < 2; ++l) {
    attend(both.twin, on_host[l], l);
    assert_close(on_device[l].output(), on_host[l].output());
  }
  both.attend(500, 20);
  both.attend(700, 30);
  both.assert_same_rows();
  controls.free_graph(graph);
  assert_true(controls.destroy_stream(stream));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(answers_are_the_hosts, forget),
      cmocka_unit_test_teardown(rows_leave_by_copies, forget),
      cmocka_unit_test_teardown(without_pins_by_tickets, forget),
      cmocka_unit_test_teardown(slow_copies, forget),
      cmocka_unit_test_teardown(failures_take_all_back, forget),
      cmocka_unit_test_teardown(takes_what_is_planned, forget),
      cmocka_unit_test_teardown(graphs_stay, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
