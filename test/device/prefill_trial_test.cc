// SPDX-License-Identifier: MIT
// The trial of long appends, on the stand-in: its calls to the device, its results, and what it leaves behind.
#include "lib/routes/prefill_trial.h"

#include "device/stand_in_tier.h"

namespace {

using namespace tandem;
using namespace stand_in;

Layer layer_of(int32_t type) {
  Layer layer;
  layer.n_q_heads = 64;
  layer.n_kv_heads = 2;
  layer.group_size = 32;
  layer.k_head_dim = layer.v_head_dim = 32;
  layer.k_type = layer.v_type = type;
  return layer;
}

// The stand-in ends without a fault, so every call of the trial is one that a module serves.
void measures_every_type(void**) {
  OnStandIn on;
  for (const int32_t type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0}) {
    double ns = 0.0;
    const int64_t before = on.host.counts.n_attended;
    assert_true(try_prefill(on.device, on.tier, layer_of(type), &ns).ok());
    assert_true(ns > 0.0);
    assert_true(on.host.counts.n_attended > before);
    assert_int_equal(on.tier.total(), 0);
    assert_true(on.tier.peak() > 0);
  }
}

// The device waits before each call. The trial counts that time, less a piece's begin and end, as time of its tiles.
void counts_what_calls_take(void**) {
  constexpr int64_t kDelay = 20'000'000;
  OnStandIn on;
  on.host.controls.set_delay(kDelay);
  double ns = 0.0;
  assert_true(try_prefill(on.device, on.tier, layer_of(TANDEM_BF16), &ns).ok());
  on.host.controls.set_delay(0);
  assert_true(ns >= (kDelay - 100e3) / 128.0);
}

void says_what_is_missing(void**) {
  OnStandIn on;
  const Layer layer = layer_of(TANDEM_BF16);
  double ns = 1.0;
  Layer unserved = layer;
  unserved.k_type = TANDEM_Q4_64;
  assert_true(try_prefill(on.device, on.tier, unserved, &ns).ok());
  assert_true(ns == 0.0);
  Tier small("device_cap_bytes", 1000, {OnStandIn::allocate, OnStandIn::release, &on.device});
  assert_int_equal(try_prefill(on.device, small, layer, &ns).code(), TANDEM_ERROR_CAPACITY);
  for (const stand_in::Call failing : {kAllocate, kFill, kCopy, kWait, kAttend}) {
    on.host.controls.fail_call(failing, 1, TANDEM_ERROR_BACKEND);
    assert_false(try_prefill(on.device, on.tier, layer, &ns).ok());
    assert_int_equal(on.tier.total(), 0);
  }
  on.host.controls.reset();
  assert_true(try_prefill(on.device, on.tier, layer, &ns).ok());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(measures_every_type), cmocka_unit_test(counts_what_calls_take),
                              cmocka_unit_test(says_what_is_missing)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
