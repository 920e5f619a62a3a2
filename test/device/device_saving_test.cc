// SPDX-License-Identifier: MIT
// Sequences of sessions on device tensors, on the stand-in. They are saved with the state that only the device has, and
// loaded into sessions with and without a device. Windows are not in the file.
#include "api/saved_world.h"
#include "device/device_side.h"

using namespace tandem_test;

namespace {

std::vector<float> decode(const Side& side, bool on_device, int64_t seed, int64_t n = 1) {
  Call call(n, seed);
  for (float& x : call.q.values) x *= 8;
  if (on_device) call.to_device();
  attend(side, call);
  return call.output();
}

MemoryFile save(const Side& side) { return tandem_test::save(side.cache, side.sequence, side.session); }

void load(Side* side, MemoryFile& file) {
  OK(tandem_sequence_drop, side->cache, side->sequence);
  side->sequence = tandem_test::load(side->cache, file, side->session);
}

void prompt(const Side& side, bool on_device) { (void)decode(side, on_device, 1, kPrompt); }
void prompt_and_steps(const Side& side, bool on_device) {
  prompt(side, on_device);
  for (int i = 0; i < 30; ++i) (void)decode(side, on_device, 10 + i);
}
void steps_alone(const Side& side, bool on_device) {
  for (int i = 0; i < 90; ++i) (void)decode(side, on_device, 10 + i);
}

void compare(const char* policy, int32_t rope, void (*life)(const Side&, bool)) {
  const auto make = [&](bool has_device) { return std::make_unique<Side>(has_device, policy, 0, 1, kWindow, rope); };
  const auto saved = make(true), never_saved = make(true), on_host = make(false), elsewhere = make(true), twin = make(false);
  life(*saved, true);
  life(*never_saved, true);
  life(*twin, false);
  MemoryFile file = save(*saved);
  load(on_host.get(), file);
  load(elsewhere.get(), file);
  assert_true(elsewhere->digest() == saved->digest());
  assert_true(save(*elsewhere) == file);
  assert_true(save(*on_host) == file);
  for (int i = 0; i < 40; ++i) {
    const int64_t n = i == 20 ? 5 : 1;  // an append among the steps
    const std::vector<float> expected = decode(*never_saved, true, 100 + i, n);
    assert_true(decode(*saved, true, 100 + i, n) == expected);
    const std::vector<float> got = decode(*elsewhere, true, 100 + i, n);
    // When a window is filled, the host rotates its keys, so the bits may differ.
    if (rope == TANDEM_ROPE_CALLER) assert_true(got == expected);
    assert_close(got, expected);
    const std::vector<float> without = decode(*twin, false, 100 + i, n);
    assert_close(decode(*on_host, false, 100 + i, n), without);
    assert_close(expected, without);
  }
}

// ---- tests -------------------------------------------------------------------------------------------------------------

void goes_on_with_a_device_and_without(void**) {
  for (const char* policy : {"all", "streaming", "hgca"})
    for (const int32_t rope : {TANDEM_ROPE_CALLER, TANDEM_ROPE_HALVES})
      for (const auto life : {prompt, prompt_and_steps, steps_alone}) compare(policy, rope, life);
}

// A file of a session without a device, loaded into a session with one.
void a_host_file_on_a_device(void**) {
  for (const char* policy : {"all", "hgca"}) {
    Side host(false, policy), twin(false, policy), side(true, policy);
    prompt_and_steps(host, false);
    prompt_and_steps(twin, false);
    MemoryFile file = save(host);
    load(&side, file);
    for (int i = 0; i < 30; ++i) assert_close(decode(side, true, 100 + i), decode(twin, false, 100 + i));
  }
}

// A loaded session searches anew for keys that the device had found, as after a fork.
void lists_of_a_device_are_made_again(void**) {
  Side side(true, "hip", 0, 1, 1024), elsewhere(true, "hip", 0, 1, 1024);
  prompt_and_steps(side, true);
  MemoryFile file = save(side);
  load(&elsewhere, file);
  OK(tandem_sequence_fork, &side.sequence, side.cache, side.sequence);
  for (int i = 0; i < 20; ++i) assert_true(decode(elsewhere, true, 100 + i) == decode(side, true, 100 + i));
}

// A save waits for rows in flight. A sequence in an open step is refused.
void waits_for_the_device(void**) {
  const Side side(true, "hgca");
  prompt(side, true);
  controls.set_delay(2'000'000);
  Call late(1, 5);
  late.to_device();
  attend(side, late);
  MemoryFile file = save(side);
  controls.set_delay(0);
  Side other(false, "hgca");
  load(&other, file);
  assert_int_equal(other.length(), kPrompt + 1);
  assert_true(other.digest() == side.digest());
  void* stream = controls.create_stream();
  const int64_t one = 1;
  OK(tandem_step_begin, side.session, &side.sequence, &one, 1, stream);
  MemoryFile none;
  tandem_error* error = nullptr;
  const int32_t status = tandem_sequence_save(side.cache, side.sequence, write_to_memory, &none, nullptr, &error);
  assert_refused(status, error, TANDEM_ERROR_BUSY, "sequence", "in flight");
  attend(side, late, kLayer, stream);
  OK(tandem_step_end, side.session, stream);
  OK(tandem_engine_drain, side.engine, -1);
  wait_for(stream);
  assert_true(controls.destroy_stream(stream));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(goes_on_with_a_device_and_without, forget),
      cmocka_unit_test_teardown(a_host_file_on_a_device, forget),
      cmocka_unit_test_teardown(lists_of_a_device_are_made_again, forget),
      cmocka_unit_test_teardown(waits_for_the_device, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
