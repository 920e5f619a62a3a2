// SPDX-License-Identifier: MIT
// The engine's knowledge of its routes, the corrections by parts of calls, and the resulting plans.
#include "lib/rates/profile.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lib/call/call_plan.h"
#include "lib/pieces/rebuilt_pieces.h"
#include "with_cmocka.h"

using namespace tandem;

namespace {

constexpr int64_t kKeyBytes = 4096;

Layer layer_of(int32_t n_kv_heads) {
  Layer layer;
  layer.n_kv_heads = n_kv_heads;
  layer.group_size = 4;
  layer.n_q_heads = 4 * n_kv_heads;
  layer.k_head_dim = layer.v_head_dim = 128;
  layer.k_type = layer.v_type = TANDEM_BF16;
  return layer;
}

bool is_near(double a, double b, double share) { return std::abs(a - b) <= share * std::abs(b); }

// Rates of long appends are kept for the shape of a layer, not for the single layer.
void long_appends_have_their_own(void**) {
  Profile profile;
  Layer codes = layer_of(8);
  codes.k_type = TANDEM_E4M3;
  assert_true(profile.prefill_tile_ns(layer_of(8)) == 0.0);
  profile.note_prefill_trial(layer_of(8), 1700.0);
  profile.note_prefill_trial(codes, 2800.0);
  assert_true(profile.prefill_tile_ns(layer_of(8)) == 1700.0 && profile.prefill_tile_ns(codes) == 2800.0);
  assert_true(profile.prefill_tile_ns(layer_of(2)) == 0.0);
  // On a device that slows down under load, appends take longer than expected. The estimate grows step by step.
  for (int i = 0; i < 40; ++i)
    profile.note_prefill(codes, profile.prefill_tile_ns(codes), 1e6 * profile.prefill_tile_ns(codes), 1e6 * 3200.0);
  assert_true(is_near(profile.prefill_tile_ns(codes), 3200.0, 1e-3) && profile.prefill_tile_ns(layer_of(8)) == 1700.0);
  profile.note_prefill(layer_of(2), 1650.0, 1e6, 2e6);  // relative to the assumed rate, because there was no trial
  assert_true(profile.prefill_tile_ns(layer_of(2)) == 3300.0);
}

void parts_replace_trials(void**) {
  const Layer layer = layer_of(8), other = layer_of(2);
  Profile profile;
  constexpr int64_t kKeys = 100'000, kBytes = kKeys * kKeyBytes;
  assert_false(profile.knows_bus());
  assert_true(profile.stream_ns(kBytes) > 1e300);  // infinite until it is measured
  assert_true(profile.host_ns(layer, 16, kKeys) == 0.0);
  profile.note_bus_trial(50.0);
  assert_true(profile.knows_bus());
  profile.note_host(layer, 1, 1000, 30'000.0);       // 30 ns a key
  profile.note_host(layer, 512, 1000, 1'000'000.0);  // 1 us
  assert_true(profile.knows_host(layer, 1) && profile.knows_host(layer, 257) && profile.knows_host(layer, 512));
  assert_false(profile.knows_host(layer, 256) || profile.knows_host(other, 512));
  assert_true(profile.host_ns(layer, 1, kKeys) < profile.stream_ns(kBytes));
  assert_true(profile.host_ns(layer, 512, kKeys) > profile.stream_ns(kBytes));
  assert_true(profile.host_ns(other, 512, kKeys) == 0.0);
  // Half the queries of a known class, and a class without data, which uses the next one.
  const double whole = profile.host_ns(layer, 512, kKeys);
  assert_true(profile.host_ns(layer, 256, kKeys) == whole / 2);
  // A trial counts for less than a part. After the first part, trials change nothing.
  profile.note_trial(other, 512, 1000, 1'000'000.0);
  assert_true(is_near(profile.host_ns(other, 512, kKeys), 0.8 * whole, 1e-9));
  profile.note_host(other, 512, 1000, 1'100'000.0);
  profile.note_trial(other, 512, 1000, 1.0);
  assert_true(is_near(profile.host_ns(other, 512, kKeys), 1.1 * whole, 1e-9));
  // The CPU's own parts correct the measured rate, one step at a time.
  profile.note_host(layer, 512, 1000, 1.0);
  assert_true(profile.host_ns(layer, 512, kKeys) > 0.8 * whole);  // one part does not change the estimate much
  for (int i = 0; i < 40; ++i) profile.note_host(layer, 512, 1000, 10'000.0);
  assert_true(profile.host_ns(layer, 512, kKeys) < profile.stream_ns(kBytes));
  profile.note_host(layer, 512, 0, 10.0);  // a part without keys teaches nothing
  assert_true(profile.host_ns(layer, 512, kKeys) > 0.0);
}

// A machine whose rates the profile does not know: the times of its parts, and the splits that the profile derives from
// them.
struct Machine {
  double host_ns, bus_ns, host_slowed, bus_slowed;  // for one key

  JointPart run(const CallPlan& plan, int64_t n_keys) const {
    const int64_t streamed = plan.n_streamed();
    const double host = static_cast<double>(n_keys - streamed) * host_ns, bus = static_cast<double>(streamed) * bus_ns;
    const double a = host * host_slowed, b = bus * bus_slowed;
    const bool host_first = a <= b;
    return {1, n_keys - streamed, host_first ? a : host + b * (1 - 1 / host_slowed), streamed * kKeyBytes,
            host_first ? bus + a * (1 - 1 / bus_slowed) : b};
  }
  double least(int64_t n_keys) const {
    return static_cast<double>(n_keys) / (1 / (host_ns * host_slowed) + 1 / (bus_ns * bus_slowed));
  }
};

void splits_converge(void**) {
  constexpr int64_t kKeys = 131'072;
  const Layer layer = layer_of(8);
  for (const Machine& machine : {Machine{27, 74, 1.1, 1.15}, Machine{60, 74, 1.3, 1.05}, Machine{27, 74, 1.0, 1.0}})
    for (const double trial : {0.4, 1.0, 2.0}) {  // the trials' times as a multiple of the true ones
      Profile profile;
      profile.note_bus_trial(kKeyBytes / (machine.bus_ns * 1.05));
      profile.note_trial(layer, 1, 1000, 1000 * machine.host_ns * trial / 0.8);
      CallPlan plan;
      double taken = 0.0, slowest = 0.0;
      for (int call = 0; call < 30; ++call) {
        plan.clear();
        plan.add(0, 1, 0, kKeys);
        plan.make(profile, layer, kKeyBytes);
        const JointPart part = machine.run(plan, kKeys);
        taken = std::max(part.host_ns, part.bus_ns);
        if (call >= 10) slowest = std::max(slowest, taken);
        if (part.bus_bytes == 0)
          profile.note_host(layer, 1, part.host_keys, part.host_ns);
        else if (part.host_keys == 0)
          profile.note_bus(part.bus_bytes, part.bus_ns);
        else
          profile.note_joint(layer, part);
      }
      if (!(taken < 1.01 * machine.least(kKeys) && slowest < 1.05 * machine.least(kKeys)))
        fail_msg("host %g bus %g trial %g: %g, slowest %g of %g ns", machine.host_ns, machine.bus_ns, trial, taken, slowest,
                 machine.least(kKeys));
      assert_true(is_near(plan.plan().total_ns, taken, 0.05));
    }
}

// Parts of a model's layers, with time for the bus between them. A part includes the wake-up of the CPU's workers and the
// end of a copy.
struct Layers {
  Machine machine;
  double host_begin_ns, bus_end_ns, gap_ns;

  // Runs a part and notes its time as lib/device/hand_over.cc does. Returns that time.
  double run(Profile* profile, const Layer& layer, int64_t n_keys) const {
    CallPlan plan;
    constexpr int64_t kRoom = int64_t{32} << 20;
    plan.clear({gap_ns, kRoom});
    plan.add(0, 1, 0, n_keys);
    plan.make(*profile, layer, kKeyBytes);
    const int64_t streamed = plan.n_streamed(), host_keys = n_keys - streamed, bytes = streamed * kKeyBytes;
    const double work = static_cast<double>(streamed) * machine.bus_ns;
    const double ahead = std::min({work, gap_ns, static_cast<double>(kRoom) / kKeyBytes * machine.bus_ns});
    double host = host_keys > 0 ? static_cast<double>(host_keys) * machine.host_ns + host_begin_ns : 0.0;
    double late = work > ahead ? work - ahead + bus_end_ns : 0.0;
    const double a = host * machine.host_slowed, b = late * machine.bus_slowed;
    if (host_keys > 0 && late > 0.0) {
      host = a <= b ? a : host + b * (1 - 1 / machine.host_slowed);
      late = a <= b ? late + a * (1 - 1 / machine.bus_slowed) : b;
    }
    const JointPart part{1, host_keys, host, bytes, late, ahead, kRoom};
    if (host_keys > 0 && bytes == 0) profile->note_host(layer, 1, host_keys, host);
    if (host_keys > 0 && bytes > 0 && late == 0.0) profile->note_ahead(layer, part);
    if (host_keys > 0 && bytes > 0 && late > 0.0) profile->note_joint(layer, part);
    if (bytes > 0 && host_keys == 0 && late > 0.0)
      profile->note_bus(bytes, ahead + late);
    else if (bytes > 0)
      profile->note_bus_at_most(bytes, ahead + late);
    if (host_keys == 0) profile->note_idle_host(layer, 1);
    return std::max(host, late);
  }
};

// With few keys, setup and end dominate the time of a part. The estimates from such parts adapt soon when there are many
// keys.
void short_parts_mislead_not_for_long(void**) {
  const Layer layer = layer_of(8);
  for (const Machine& machine : {Machine{80, 74, 1.1, 1.15}, Machine{35, 74, 1.2, 1.2}, Machine{27, 74, 1.0, 1.0}})
    for (const double begin : {20'000.0, 100'000.0, 200'000.0})
      for (const double end : {20'000.0, 100'000.0}) {
        Profile profile;
        profile.note_bus_trial(kKeyBytes / machine.bus_ns);
        profile.note_begin_trial(layer, 1, 10'000.0);
        profile.note_trial(layer, 1, 1000, 1000 * machine.host_ns);
        profile.note_slowed_trial(layer, 1, {machine.host_slowed, machine.bus_slowed});
        const Layers layers{machine, begin, end, 190'000.0};
        for (int call = 0; call < 300; ++call) layers.run(&profile, layer, 4096 + call % 2048);
        double taken = 0.0;
        for (int call = 0; call < 100; ++call) taken = layers.run(&profile, layer, 131'072);
        const double least = machine.least(131'072) + begin + end;
        if (!(taken < 1.05 * least))
          fail_msg("host %g bus %g, begin %g, end %g: %g of %g ns", machine.host_ns, machine.bus_ns, begin, end, taken,
                   least);
      }
}

// A CPU that was busy with other work gets keys again later. It gets none while even the fewest keys would take it longer.
void what_was_slow_is_tried_again(void**) {
  constexpr int64_t kKeys = 131'072;
  const Layer layer = layer_of(8);
  const Machine machine{27, 74, 1.1, 1.15}, taken_by_others{2'700, 74, 1.1, 3.0};
  Profile profile;
  profile.note_bus_trial(kKeyBytes / machine.bus_ns);
  profile.note_begin_trial(layer, 1, 10'000.0);
  profile.note_trial(layer, 1, 1000, 1000 * machine.host_ns);
  profile.note_slowed_trial(layer, 1, {machine.host_slowed, machine.bus_slowed});
  const double by_bus = kKeys * machine.bus_ns + 60'000.0;
  double last_hundred = 0.0, taken = 0.0;
  for (int call = 0; call < 300; ++call) {
    taken = Layers{taken_by_others, 20'000.0, 60'000.0, 0.0}.run(&profile, layer, kKeys);
    if (call >= 200) last_hundred += taken / 100.0;
  }
  assert_true(last_hundred < 1.25 * by_bus);
  for (int call = 0; call < 300; ++call) taken = Layers{machine, 20'000.0, 60'000.0, 0.0}.run(&profile, layer, kKeys);
  assert_true(taken < 1.05 * (machine.least(kKeys) + 80'000.0));
}

void sequences_are_cut(void**) {
  const Layer layer = layer_of(8);
  Profile profile;
  profile.note_bus_trial(50.0);
  profile.note_host(layer, 1, 1000, 27'000.0);
  profile.note_host(layer, 16, 1000, 200'000.0);
  CallPlan plan;
  plan.add(0, 1, 100, 20'000);
  plan.add(1, 16, 0, 5'000);
  plan.add(2, 1, 0, 0);
  plan.add(3, 1, 0, 40'000);
  plan.make(profile, layer, kKeyBytes);
  const std::vector<PlannedKeys>& keys = plan.keys();  // most expensive keys first, then the longest
  assert_int_equal(keys.size(), 3);
  assert_int_equal(keys[0].call, 1);
  assert_int_equal(keys[0].cpu_begin, 5'000);  // all of the call's keys
  assert_int_equal(keys[1].call, 3);
  assert_true(keys[1].cpu_begin > 0 && keys[1].cpu_begin < 40'000 && keys[1].cpu_begin % 64 == 0);
  assert_int_equal(keys[2].call, 0);
  assert_int_equal(keys[2].cpu_begin, 100);
  // If keys are expensive, the CPU gets none when it could have only a few: the rounding of splits costs as much time.
  Profile dear;
  dear.note_bus_trial(50.0);
  dear.note_host(layer, 512, 1000, 20'000'000.0);
  CallPlan all;
  all.add(0, 512, 0, 40'000);
  all.make(dear, layer, kKeyBytes);
  assert_int_equal(all.n_streamed(), 40'000);
  // A given share applies to each call.
  plan.give(profile, layer, kKeyBytes, 0.25);
  for (const PlannedKeys& one : plan.keys()) {
    assert_true(std::abs(one.cpu_begin - one.begin - (one.end - one.begin) / 4) <= 8);
    assert_int_equal(one.cpu_begin % 16, 0);
  }
  plan.give(profile, layer, kKeyBytes, 1.0);
  assert_int_equal(plan.n_streamed(), 19'900 + 5'000 + 40'000);
  plan.give(profile, layer, kKeyBytes, 0.0);
  assert_int_equal(plan.n_streamed(), 0);
  // A given share of rebuilt keys applies to the total: whole sequences, and the last of them up to the end of a page.
  CallPlan rebuilt;
  for (size_t call = 0; call < 8; ++call) rebuilt.add(call, 1, 0, 112);
  for (const double share : {1e-3, 0.25, 0.3, 0.9, 1.0}) {
    rebuilt.give(profile, layer, kKeyBytes, 1.0, {true, share, 2048, 6144});
    const auto n_whole = static_cast<int64_t>(std::ceil(share * 8.0 - 1e-9));
    assert_int_equal(rebuilt.n_rebuilt(), n_whole * 112);
    for (const PlannedKeys& one : rebuilt.keys())
      assert_int_equal(one.rebuilt_end, static_cast<int64_t>(one.call) < n_whole ? 112 : 0);
  }
  // Without measurements the plan predicts no time.
  plan.give(Profile(), layer, kKeyBytes, 0.5);
  assert_true(plan.plan().total_ns == 0.0);
}

// Llama-3-8B has 8 KV heads, and its hidden states are twice as large as K and V. With 32 KV heads they are half as large.
void hidden_states_pay_where_they_are_less(void**) {
  constexpr int64_t kKeys = 100'000;
  Projection projection;
  projection.hidden_dim = 4096;
  for (const int32_t n_kv_heads : {8, 32}) {
    Layer layer = layer_of(n_kv_heads);
    layer.projection = &projection;
    layer.x_type = TANDEM_BF16;
    const int64_t key_bytes = int64_t{n_kv_heads} * 128 * 4;
    assert_true(is_rebuild_less(layer) == (n_kv_heads == 32));
    Profile profile;
    profile.note_bus_trial(50.0);
    profile.note_host(layer, 1, 1000, 1e9);
    const RebuildTerms terms{true, 0.0, 2048, 6144};
    CallPlan plan;
    plan.add(0, 1, 0, kKeys);
    plan.make(profile, layer, key_bytes, terms);
    assert_int_equal(plan.n_rebuilt(), 0);  // the time to make keys is unknown
    assert_false(profile.knows_rebuild(layer));
    profile.note_rebuild_trial(layer, 100.0);
    assert_true(profile.knows_rebuild(layer));
    assert_false(profile.knows_rebuild(layer_of(n_kv_heads)));
    plan.make(profile, layer, key_bytes, terms);
    assert_int_equal(plan.n_streamed(), kKeys);
    assert_int_equal(plan.n_rebuilt(), n_kv_heads == 32 ? kKeys : 0);
    assert_true((plan.predict_rebuilt_ns() < plan.predict_ns(1.0)) == (n_kv_heads == 32));
    // The bus, which is slower while products run, and then the making of the last piece's keys.
    const double expected = 60'000.0 + 1.15 * 8192.0 / 50.0 * kKeys + 2048 * 100.0;  // 60 us of setup
    assert_true(is_near(plan.predict_rebuilt_ns(), expected, 0.001));
    plan.make(profile, layer, key_bytes);  // a session that may not rebuild
    assert_int_equal(plan.n_rebuilt(), 0);
    // The device takes longer than the bus would take for K and V, so it makes at most a part of the keys.
    profile.note_rebuild_trial(layer, 400.0);
    plan.make(profile, layer, key_bytes, terms);
    const double of_bus = static_cast<double>(key_bytes) / 50.0, of_x = 1.15 * 8192.0 / 50.0;
    const double share = n_kv_heads == 32 ? of_bus / (of_bus - of_x + 400.0) : 0.0;
    assert_true(std::abs(static_cast<double>(plan.n_rebuilt()) - share * kKeys) < 0.01 * kKeys);
    // A given share is rounded to whole pages.
    plan.give(profile, layer, key_bytes, 1.0, {true, 0.25, 2048, 6144});
    assert_int_equal(plan.n_rebuilt(), (kKeys / 4 + 127) / 128 * 128);
    assert_int_equal(plan.n_streamed(), kKeys);
  }
}

// Parts show how slow the bus is while products run, and how long the device takes after it. If the device is the slower
// one, they show its time for a key. The prediction for such a part then equals its time.
void making_keys_is_learned(void**) {
  constexpr int64_t kKeys = 8192, kXBytes = 8192;
  Projection projection;
  projection.hidden_dim = 4096;
  Layer layer = layer_of(32);
  layer.projection = &projection;
  layer.x_type = TANDEM_BF16;
  Profile profile;
  profile.note_bus_trial(50.0);
  profile.note_host(layer, 1, 1000, 1e9);
  profile.note_rebuild_trial(layer, 100.0);
  const auto predicted = [&](double ahead_ns) {
    CallPlan plan;
    plan.clear({ahead_ns, int64_t{1} << 40});
    plan.add(0, 1, 0, kKeys);
    plan.give(profile, layer, 32 * 128 * 4, 1.0, {true, 1.0, 768, 6144});
    return plan.plan().total_ns;
  };
  // The bus brings 45 bytes per ns, starting 300 us before the queries come. The device ends 250 us after the bus.
  const double by_bus = static_cast<double>(kKeys * kXBytes) / 45.0;
  RebuiltTimes times{kKeys * kXBytes, kKeys, by_bus, by_bus - 300'000.0, 0.0, by_bus, true};
  for (int part = 0; part < 40; ++part) profile.note_rebuilt(layer, times);
  assert_true(is_near(predicted(300'000.0), by_bus, 0.01));
  assert_true(is_near(profile.stream_ns(50'000'000), 1e6 + 60'000.0, 1e-6));  // nothing is learned about other keys
  assert_int_equal(profile.as_keys(layer, 45'000), 50'000);
  // A part that shared the bus shows when it ended, but not the rate of either transfer.
  RebuiltTimes beside{0, kKeys, 1e7, 1e6, 1e6, 1e6 + 500'000.0, true};
  for (int part = 0; part < 40; ++part) profile.note_rebuilt(layer, beside);
  assert_true(is_near(predicted(300'000.0), by_bus + 200'000.0, 0.01));
  assert_int_equal(profile.as_keys(layer, 45'000), 50'000);
  // The CPU ended after both. The time after its answer only applies to splits.
  for (int part = 0; part < 40; ++part) profile.note_rebuilt(layer, {0, kKeys, 1e6, 1e6, 2e6, 2e6 + 120'000.0, true});
  assert_true(is_near(predicted(300'000.0), by_bus + 200'000.0, 0.01));
  assert_true(is_near(profile.rates(layer, 1, 32 * 128 * 4).rebuilt_host_end_ns, 120'000.0, 0.01));
  // If the bus waited, the part only shows the time of the device.
  times = {kKeys * kXBytes, kKeys, 3.0 * by_bus, 1e6, 0.0, 3.0 * by_bus, true};
  for (int part = 0; part < 40; ++part) profile.note_rebuilt(layer, times);
  assert_int_equal(profile.as_keys(layer, 45'000), 50'000);
  assert_true(is_near(predicted(300'000.0), 3.0 * by_bus + 768 * kXBytes / 45.0, 0.01));
  // The bus has become faster, which is noticed at once.
  times = {kKeys * kXBytes, kKeys, by_bus, by_bus - 300'000.0, 0.0, by_bus, true};
  for (int part = 0; part < 40; ++part) profile.note_rebuilt(layer, times);
  assert_true(is_near(predicted(300'000.0), by_bus + 768 * kXBytes / 45.0, 0.02));
  profile.note_rebuilt(layer, {kKeys * kXBytes, kKeys, by_bus, 0.0, 0.0, 0.0, true});  // its end was not measured
  assert_true(is_near(predicted(300'000.0), by_bus + 768 * kXBytes / 45.0, 0.02));
  // If all hidden states were there when the queries came, their keys may also have been made by then, however slow that
  // is. Nothing is learned.
  const double before = predicted(300'000.0);
  for (int part = 0; part < 40; ++part)
    profile.note_rebuilt(layer, {kKeys * kXBytes, kKeys, by_bus, 0.0, 0.0, 50'000.0, true});
  assert_true(is_near(predicted(300'000.0), before, 1e-6));
}

// A plan that rebuilds nothing only fills buffers of K and V ahead. A first part that took much longer than later parts
// does not keep later plans from rebuilding.
void making_keys_is_not_misjudged(void**) {
  constexpr int64_t kKeys = 20'000, kXBytes = 8192, kBytes = 32 * 128 * 4;
  Projection projection;
  projection.hidden_dim = 4096;
  Layer layer = layer_of(32);
  layer.projection = &projection;
  layer.x_type = TANDEM_BF16;
  const RebuildTerms terms{true, 0.0, 768, 6144};
  Profile profile;
  profile.note_bus_trial(50.0);
  profile.note_host(layer, 1, 1000, 400'000.0);
  profile.note_rebuild_trial(layer, 1e6);
  CallPlan with, without;
  for (CallPlan* plan : {&with, &without}) {
    plan->clear({600'000.0, int64_t{4} << 20});
    plan->add(0, 1, 0, kKeys);
  }
  with.make(profile, layer, kBytes, terms);
  without.make(profile, layer, kBytes);
  assert_int_equal(with.n_rebuilt(), 0);
  assert_true(without.n_streamed() > 0 && without.n_streamed() < kKeys);
  assert_int_equal(with.n_streamed(), without.n_streamed());
  profile.note_rebuild_trial(layer, 20.0);
  const double by_bus = static_cast<double>(kKeys * kXBytes) / 45.0;
  profile.note_rebuilt(layer, {kKeys * kXBytes, kKeys, by_bus, by_bus, 0.0, by_bus + 50e6, true});
  profile.note_rebuilt(layer, {0, kKeys, by_bus, by_bus, 5e6, by_bus + 50e6, true});
  with.make(profile, layer, kBytes, terms);
  assert_true(with.n_rebuilt() > 0);
  // Many such parts do not do so forever.
  for (int part = 0; part < 60; ++part) {
    profile.note_rebuilt(layer, {kKeys * kXBytes, kKeys, 1000.0 * by_bus, by_bus, 0.0, 1000.0 * by_bus, true});
    profile.note_rebuilt(layer, {0, kKeys, by_bus, by_bus, 5e6, by_bus + 50e6, true});
  }
  with.make(profile, layer, kBytes, terms);
  assert_int_equal(with.n_rebuilt(), 0);
  int n_parts = 0;
  for (; with.n_rebuilt() == 0 && n_parts < 400; ++n_parts) {
    profile.note_not_rebuilt(layer);
    with.make(profile, layer, kBytes, terms);
  }
  print_message("keys are made again behind %d parts\n", n_parts);
  assert_in_range(n_parts, 20, 399);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(long_appends_have_their_own),
                              cmocka_unit_test(parts_replace_trials),
                              cmocka_unit_test(splits_converge),
                              cmocka_unit_test(short_parts_mislead_not_for_long),
                              cmocka_unit_test(what_was_slow_is_tried_again),
                              cmocka_unit_test(sequences_are_cut),
                              cmocka_unit_test(hidden_states_pay_where_they_are_less),
                              cmocka_unit_test(making_keys_is_learned),
                              cmocka_unit_test(making_keys_is_not_misjudged)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
