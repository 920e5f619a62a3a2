// SPDX-License-Identifier: MIT
// Derives rates of CPU and bus from the times of parts, on a simulated clock. Then plans steps on simulated machines whose
// rates are unknown, from the times of their parts. Steps must be as fast as the best split, at no length slower than one
// route alone, and as fast as predicted.
#include "lib/rates/part_times.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lib/call/call_plan.h"
#include "with_cmocka.h"

using namespace tandem;

namespace {

constexpr double kUs = 1000.0;

PartMoments moments(double asked, double arrived, double host_end, double streamed) {
  PartMoments part;
  part.n_queries = 1;
  part.asked = asked * kUs;
  part.arrived = arrived * kUs;
  part.has_host = host_end > 0.0;
  part.host_end = host_end * kUs;
  part.has_stream = streamed > 0.0;
  part.n_pieces = 2;
  part.streamed = streamed * kUs;
  return part;
}

void assert_reading(const PartReading& got, double host, double total, double bus, double late, bool is_steady) {
  const double wanted[] = {host, total, bus, late, bus - late};
  const double read[] = {got.host, got.total, got.bus, got.late, got.ahead};
  for (size_t i = 0; i < 5; ++i)
    if (std::abs(read[i] - wanted[i] * kUs) > 1.0) fail_msg("number %zu is %g us, not %g", i, read[i] / kUs, wanted[i]);
  if (bus > 0.0) assert_int_equal(got.is_steady, is_steady);
}

void one_after_another(void**) {
  PartTimes times;
  assert_true(times.ahead_ns(0, 1) == 0.0);
  // A part alone: the bus counts from the request.
  assert_reading(times.note(moments(100, 130, 400, 500)), 270, 370, 400, 370, true);
  assert_true(times.ahead_ns(0, 1) == 30 * kUs);
  // Requested long ago: the bus continues after the previous part. The gap counts from the end of that part.
  assert_reading(times.note(moments(110, 700, 900, 1000)), 200, 300, 500, 300, true);
  assert_true(std::abs(times.ahead_ns(0, 1) - (30 + 0.3 * 80) * kUs) < 1.0);  // a gap of 200 counts as 110
  // The CPU ended last, so the bus had longer than the gap.
  assert_reading(times.note(moments(120, 1400, 1700, 1600)), 300, 300, 600, 200, true);
  // All keys had crossed the bus before the queries came.
  assert_reading(times.note(moments(130, 1900, 1950, 1850)), 50, 50, 250, 0, true);
  // The buffers were full, so the bus paused until the queries came.
  assert_reading(times.note(moments(140, 2200, 2300, 2250)), 100, 100, 310, 50, false);
  // The CPU alone, then no keys at all.
  assert_reading(times.note(moments(150, 2500, 2700, 0)), 200, 200, 0, 0, true);
  assert_reading(times.note(moments(160, 2900, 0, 0)), 0, 0, 0, 0, true);
  // A call that comes after all of these.
  assert_reading(times.note(moments(3000, 3010, 0, 3300)), 0, 290, 300, 290, true);
}

void gaps_are_known_by_call(void**) {
  PartTimes times;
  double now = 0.0;
  const auto call = [&](int32_t layer_idx, int64_t n_queries, double gap) {
    PartMoments part = moments(1, now + gap, now + gap + 100, 0);
    part.layer_idx = layer_idx;
    part.n_queries = n_queries;
    now += gap + 100;
    times.note(part);
  };
  call(0, 1, 10);
  for (int step = 0; step < 30; ++step)
    for (int32_t l = 0; l < 4; ++l) call(l, 1, l == 0 ? 50 : 200);
  for (int32_t l = 0; l < 4; ++l)
    assert_true(std::abs(times.ahead_ns(l, 1) - (l == 0 ? 110 : 260) * kUs) < kUs);  // includes the end of a stream
  call(1, 300, 5);
  assert_true(std::abs(times.ahead_ns(1, 512) - 65 * kUs) < 1.0 && std::abs(times.ahead_ns(1, 1) - 260 * kUs) < kUs);
  assert_true(times.ahead_ns(1, 256) == 0.0);
  // One long pause of the caller does not change the estimate at once.
  call(1, 1, 1e6);
  assert_true(times.ahead_ns(1, 1) < 400 * kUs);
}

// Tickets of a long append arrive with its rows. The bus is busy with its pieces, but only other calls define gaps.
void rows_tell_no_gap(void**) {
  PartTimes times;
  PartMoments rows = moments(100, 700, 0, 0);
  rows.is_rows = true;
  rows.n_queries = 512;
  times.note(rows);
  assert_true(times.ahead_ns(0, 512) == 0.0);
  PartMoments last = moments(100, 800, 0, 900);
  last.is_rows = true;
  last.n_queries = 300;
  assert_reading(times.note(last), 0, 100, 800, 100, true);
  assert_true(times.ahead_ns(0, 512) == 0.0);
  assert_reading(times.note(moments(110, 1000, 0, 1200)), 0, 200, 300, 200, true);
  assert_true(times.ahead_ns(0, 1) == 100 * kUs);
}

// ---- a machine -----------------------------------------------------------------------------------------------------------

constexpr int64_t kKeyBytes = 2048;
constexpr double kTailNs = 60'000;   // of the device, after the last key
constexpr double kFreedNs = 48'000;  // of the device, until it has attended the first piece

// ns of a key. gap: time of the device from a layer's end to the next layer's queries. There are two buffers of piece_keys.
struct Machine {
  double host_ns, host_begin_ns, bus_ns, host_slowed, bus_slowed, gap_ns;
  int64_t piece_keys;
};

// Simulates the calls of consecutive decode steps with equal layers. The CPU works from the arrival of the queries, and the
// bus as soon as a buffer is free. Each slows the other.
class Steps {
 public:
  explicit Steps(const Machine& machine) : machine_(machine) {}

  // Returns the ns from the end of the previous part to the end of this one.
  double run(int64_t host_keys, int64_t bus_keys, PartMoments* part) {
    const double begin = end_, arrives = end_ + machine_.gap_ns;
    double host = host_keys > 0 ? static_cast<double>(host_keys) * machine_.host_ns + machine_.host_begin_ns : 0.0;
    std::vector<double> pieces;
    for (int64_t k = 0; k < bus_keys; k += machine_.piece_keys)
      pieces.push_back(static_cast<double>(std::min(machine_.piece_keys, bus_keys - k)) * machine_.bus_ns);
    const double freed = (bus_keys > machine_.piece_keys ? last_arrived_ : before_arrived_) + kFreedNs;
    double host_end = arrives, now = std::max(bus_free_, freed);
    size_t n_sent = 0, n_ahead = 0;  // n_ahead: pieces sent before the queries come
    while (n_sent < pieces.size() || host > 0.0) {
      const bool is_host_busy = now >= arrives && host > 0.0,
                 may_send = n_sent < pieces.size() && (n_ahead < 2 || now >= arrives + kFreedNs);
      double step = is_host_busy ? host * (may_send ? machine_.host_slowed : 1.0) : INFINITY;
      const double slow = is_host_busy ? machine_.bus_slowed : 1.0;
      if (may_send) step = std::min(step, pieces[n_sent] * slow);
      for (const double change : {arrives, arrives + kFreedNs})
        if (now < change) step = std::min(step, change - now);
      now += step;
      if (is_host_busy) host -= step / (may_send ? machine_.host_slowed : 1.0);
      if (host < 1e-3) host_end = host > -1.0 && is_host_busy ? now : host_end, host = 0.0;
      if (may_send && (pieces[n_sent] -= step / slow) < 1e-3) ++n_sent, n_ahead += now <= arrives, bus_free_ = now;
    }
    *part = {};
    part->n_queries = 1;
    part->asked = asked_;
    part->arrived = arrives;
    part->has_host = host_keys > 0;
    part->host_end = host_end;
    part->has_stream = bus_keys > 0;
    part->n_pieces = static_cast<int64_t>(pieces.size());
    part->streamed = bus_free_;
    end_ = std::max(host_end, bus_keys > 0 ? std::max(bus_free_, arrives) + kTailNs : arrives);
    before_arrived_ = bus_keys > machine_.piece_keys ? arrives : last_arrived_;
    last_arrived_ = arrives;
    return end_ - begin;
  }

 private:
  Machine machine_;
  double asked_ = 0.0, end_ = 0.0, bus_free_ = 0.0, last_arrived_ = -1e6, before_arrived_ = -1e6;
};

double steady_ns(const Machine& machine, int64_t n_keys, int64_t bus_keys) {
  Steps steps(machine);
  PartMoments ignored;
  double sum = 0.0;
  for (int i = 0; i < 20; ++i) {
    const double ns = steps.run(n_keys - bus_keys, bus_keys, &ignored);
    if (i >= 10) sum += ns;
  }
  return sum / 10;
}

Layer layer_of_e4m3() {
  Layer layer;
  layer.n_kv_heads = 8;
  layer.group_size = 4;
  layer.n_q_heads = 32;
  layer.k_head_dim = layer.v_head_dim = 128;
  layer.k_type = layer.v_type = TANDEM_E4M3;
  return layer;
}

// Learns as HandOver::learn() does.
void learn(const PartReading& reading, const PartMoments& part, int64_t host_keys, int64_t bus_keys, const BusAhead& ahead,
           Profile* profile) {
  const Layer layer = layer_of_e4m3();
  const int64_t bus_bytes = bus_keys * kKeyBytes;
  const JointPart joint = {1, host_keys, reading.host, bus_bytes, reading.late, reading.ahead, ahead.bytes};
  if (part.has_host && !part.has_stream)
    profile->note_host(layer, 1, host_keys, reading.host);
  else if (part.has_host && reading.late == 0.0)
    profile->note_ahead(layer, joint);
  else if (part.has_host && reading.is_steady)
    profile->note_joint(layer, joint);
  if (part.has_stream && !part.has_host && reading.late > 0.0 && reading.is_steady)
    profile->note_bus(bus_bytes, reading.bus);
  else if (part.has_stream)
    profile->note_bus_at_most(bus_bytes, reading.bus);
  if (part.has_stream && !part.has_host) profile->note_idle_host(layer, 1);
}

struct Outcome {
  double taken = 0.0, predicted = 0.0, worst = 0.0;
  int64_t host_keys = 0;
};

// trial: result of the trials as a multiple of the true time.
void try_machine(const Machine& machine, double trial, Profile* profile) {
  const Layer layer = layer_of_e4m3();
  profile->note_bus_trial(static_cast<double>(kKeyBytes) / (machine.bus_ns * trial));
  profile->note_begin_trial(layer, 1, machine.host_begin_ns);
  profile->note_trial(layer, 1, 16'384, (machine.host_ns * 16'384 + machine.host_begin_ns) * trial);
}

// Plans with a new session. The calls of a step are planned before the first of them ends.
Outcome plan_steps(const Machine& machine, int64_t n_keys, Profile& profile) {
  constexpr int kSteps = 10, kSettling = 6, kCounted = 2, kLayers = 32;
  const Layer layer = layer_of_e4m3();
  PartTimes times;
  Steps steps(machine);
  Outcome out;
  for (int step = 0; step < kSteps; ++step) {
    const BusAhead ahead{times.ahead_ns(0, 1), 2 * machine.piece_keys * kKeyBytes};
    CallPlan plan;
    plan.clear(ahead);
    plan.add(0, 1, 0, n_keys);
    plan.make(profile, layer, kKeyBytes);
    const int64_t bus_keys = plan.n_streamed();
    out.host_keys = n_keys - bus_keys;
    for (int l = 0; l < kLayers; ++l) {
      PartMoments part;
      const double ns = steps.run(n_keys - bus_keys, bus_keys, &part);
      learn(times.note(part), part, n_keys - bus_keys, bus_keys, ahead, &profile);
      if (step >= kSettling) out.worst = std::max(out.worst, ns);
      if (step < kSteps - kCounted) continue;
      out.taken += ns / (kCounted * kLayers);
      out.predicted += (machine.gap_ns + plan.plan().total_ns) / (kCounted * kLayers);
    }
  }
  return out;
}

void steps_are_as_short_as_can_be(void**) {
  const Machine machines[] = {
      {45.0, 20'000, 37.0, 1.05, 1.1, 190'000, 8192},   // CPU and bus are equally fast
      {27.0, 10'000, 37.0, 1.15, 1.05, 190'000, 8192},  // a faster CPU
      {27.0, 10'000, 74.0, 1.1, 1.15, 5'000, 4096},     // no time between the layers
      {200.0, 60'000, 37.0, 1.0, 1.0, 190'000, 8192},   // a slow CPU
      {45.0, 20'000, 37.0, 1.05, 1.1, 2'000'000, 8192}  // much time between the layers, so buffers are full
  };
  for (const Machine& machine : machines)
    for (const double trial : {0.8, 1.0, 1.2}) {
      Profile longer;  // of sessions at one length after another
      try_machine(machine, trial, &longer);
      for (const int64_t n_keys : {2'048, 4'096, 6'144, 16'384, 36'864, 98'304, 4'096, 16'384}) {
        double best = INFINITY;
        for (int64_t bus_keys = 0; bus_keys <= n_keys; bus_keys += 512)
          best = std::min(best, steady_ns(machine, n_keys, bus_keys));
        Profile fresh;
        try_machine(machine, trial, &fresh);
        for (Profile* profile : {&fresh, &longer}) {
          const Outcome out = plan_steps(machine, n_keys, *profile);
          const char* wrong = out.taken > 1.05 * best + 10 * kUs                                 ? "slow"
                              : out.worst > 1.10 * best + 10 * kUs                               ? "unsteady"
                              : std::abs(out.predicted - out.taken) > 0.05 * out.taken + 5 * kUs ? "not predicted"
                                                                                                 : nullptr;
          if (wrong != nullptr)
            fail_msg(
                "host %g bus %g gap %g, %lld keys, trial %g, %s: %s: %g us, %g predicted, worst %g, best %g, host keys %lld",
                machine.host_ns, machine.bus_ns, machine.gap_ns, static_cast<long long>(n_keys), trial,
                profile == &fresh ? "fresh" : "used", wrong, out.taken / kUs, out.predicted / kUs, out.worst / kUs,
                best / kUs, static_cast<long long>(out.host_keys));
        }
      }
    }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(one_after_another), cmocka_unit_test(gaps_are_known_by_call),
                              cmocka_unit_test(rows_tell_no_gap), cmocka_unit_test(steps_are_as_short_as_can_be)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
