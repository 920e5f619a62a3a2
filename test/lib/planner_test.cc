// SPDX-License-Identifier: MIT
// Compares the planner's splits of keys with all other splits. None may take less time.
#include "lib/rates/planner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "with_cmocka.h"

using namespace tandem;

namespace {

// Computes the time of a split independently, by simulating both engines. moved: [n_groups][kPlanColumns] keys.
double simulate(const std::vector<PlanGroup>& groups, const PlanRates& rates,
                const std::vector<std::array<int64_t, kPlanColumns>>& moved) {
  double host = 0.0, bus = 0.0, device = 0.0;
  bool has_host = false, has_moved = false;
  for (size_t g = 0; g < groups.size(); ++g) {
    int64_t left = groups[g].n_keys;
    for (int32_t c = 0; c < kPlanColumns; ++c) {
      left -= moved[g][static_cast<size_t>(c)];
      has_moved = has_moved || moved[g][static_cast<size_t>(c)] > 0;
      bus += static_cast<double>(moved[g][static_cast<size_t>(c)]) * rates.columns[c].bus_ns;
      device += static_cast<double>(moved[g][static_cast<size_t>(c)]) * rates.columns[c].device_ns;
    }
    host += static_cast<double>(left) * groups[g].host_ns;
    has_host = has_host || left > 0;
  }
  if (has_host) host += rates.host_begin_ns;
  bus = std::max(0.0, bus - rates.bus_ahead_ns);
  if (has_moved) bus += rates.bus_begin_ns, device += rates.device_begin_ns;
  double now = 0.0;
  while (host > 0.0 && bus > 0.0) {
    const double step = std::min(host * rates.host_slowed, bus * rates.bus_slowed);
    host = step == host * rates.host_slowed ? 0.0 : host - step / rates.host_slowed;
    bus = step == bus * rates.bus_slowed ? 0.0 : bus - step / rates.bus_slowed;
    now += step;
  }
  return std::max(now + host + bus, device);
}

// Returns the least time of all ways to move multiples of `unit` keys of each group by each column.
double least_of_all(const std::vector<PlanGroup>& groups, const PlanRates& rates, int64_t unit,
                    std::vector<std::array<int64_t, kPlanColumns>>* moved) {
  const size_t g = moved->size();
  if (g == groups.size()) return simulate(groups, rates, *moved);
  double least = INFINITY;
  const bool streams = rates.columns[kPlanStream].is_allowed, recomputes = rates.columns[kPlanRecompute].is_allowed;
  for (int64_t s = 0; s <= (streams ? groups[g].n_keys : 0); s += unit)
    for (int64_t r = 0; s + r <= (recomputes ? groups[g].n_keys : s); r += unit) {
      if (!rates.host_is_allowed && s + r < groups[g].n_keys) continue;
      moved->push_back({s, r});
      least = std::min(least, least_of_all(groups, rates, unit, moved));
      moved->pop_back();
    }
  return least;
}

double of(std::mt19937_64* bits, std::initializer_list<double> numbers) {
  return numbers.begin()[(*bits)() % numbers.size()];
}

PlanRates draw_rates(std::mt19937_64* bits) {
  PlanRates rates;
  rates.columns[kPlanStream] = {(*bits)() % 8 != 0, of(bits, {10, 40, 75, 300}), of(bits, {0, 1, 30, 200})};
  rates.columns[kPlanRecompute] = {(*bits)() % 2 != 0, of(bits, {10, 37, 75, 100}), of(bits, {1, 30, 150})};
  rates.host_is_allowed = (*bits)() % 8 != 0 || (!rates.columns[0].is_allowed && !rates.columns[1].is_allowed);
  rates.host_slowed = of(bits, {1, 1.1, 1.5, 3});
  rates.bus_slowed = of(bits, {1, 1.2, 2, 4});
  rates.host_begin_ns = of(bits, {0, 10, 1000});
  rates.bus_begin_ns = of(bits, {0, 40, 4000});
  rates.device_begin_ns = of(bits, {0, 20});
  rates.bus_ahead_ns = of(bits, {0, 0, 500, 5000, 1e6});
  return rates;
}

void none_is_faster(void**) {
  std::mt19937_64 bits(7);
  for (int i = 0; i < 4000; ++i) {
    const PlanRates rates = draw_rates(&bits);
    std::vector<PlanGroup> groups;
    const size_t n_groups = 1 + bits() % 2;
    for (size_t g = 0; g < n_groups; ++g)
      groups.push_back({static_cast<int64_t>(1 + bits() % 12) * 10, of(&bits, {5, 27, 60, 500})});
    std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.host_ns > b.host_ns; });
    const RoutePlan plan = plan_routes(groups, rates);
    std::vector<std::array<int64_t, kPlanColumns>> moved;
    const double least = least_of_all(groups, rates, 10, &moved);
    // One key more or less than the optimum of the linear program, which divides keys.
    const double key = 3.0 * (groups[0].host_ns * rates.host_slowed + (75.0 + 300.0) * rates.bus_slowed + 200.0);
    if (!(plan.total_ns <= least + key * 1e-9 + 1e-6 * least))
      fail_msg("problem %d: %g ns planned, %g possible", i, plan.total_ns, least);
    // The plan's time is right: moving its keys in the order of the groups takes that long.
    int64_t left[] = {plan.moved_keys[0], plan.moved_keys[1]};
    for (const PlanGroup& group : groups) {
      const int64_t s = std::min(left[0], group.n_keys), r = std::min(left[1], group.n_keys - s);
      moved.push_back({s, r});
      left[0] -= s;
      left[1] -= r;
    }
    assert_int_equal(left[0] + left[1], 0);
    const double taken = simulate(groups, rates, moved);
    if (!(std::abs(taken - plan.total_ns) <= key)) fail_msg("problem %d: %g ns planned, %g taken", i, plan.total_ns, taken);
    assert_int_equal(plan.host_keys + plan.n_moved(), groups[0].n_keys + (n_groups > 1 ? groups[1].n_keys : 0));
  }
}

// Rates of one machine: 150 GB/s for the CPU, 55 for the bus, each 1.1 times slower when both run.
void engines_end_together(void**) {
  PlanRates rates;
  rates.columns[kPlanStream] = {true, 4096 / 55.0, 1.0};
  rates.host_slowed = rates.bus_slowed = 1.1;
  const std::vector<PlanGroup> groups = {{131072, 4096 / 150.0}};
  const RoutePlan plan = plan_routes(groups, rates);
  assert_true(std::abs(plan.host_ns / plan.bus_ns - 1.0) < 1e-3);
  assert_true(std::abs(plan.total_ns - 131072 * 4096 / (205.0 / 1.1)) < 1e-3 * plan.total_ns);
  assert_true(std::abs(static_cast<double>(plan.moved_keys[kPlanStream]) / 131072 - 55.0 / 205.0) < 1e-3);
  // A few keys are not worth the setup time of the bus. Many keys that are expensive on the CPU all go to the bus.
  rates.bus_begin_ns = 40'000.0;
  assert_int_equal(plan_routes(std::vector<PlanGroup>{{1000, 27.0}}, rates).n_moved(), 0);
  rates.host_begin_ns = 1e6;
  assert_int_equal(plan_routes(std::vector<PlanGroup>{{1000, 2700.0}}, rates).host_keys, 0);
}

// Transfers before the queries arrive cost the call no time, so the bus gets that many keys more. If the CPU would then have
// almost nothing to do, the bus gets all keys.
void bus_begins_ahead(void**) {
  PlanRates rates;
  rates.columns[kPlanStream] = {true, 40.0, 0.0};
  rates.host_slowed = 1.1, rates.bus_slowed = 1.05;
  rates.host_begin_ns = rates.bus_begin_ns = 20'000.0;
  const std::vector<PlanGroup> groups = {{40'000, 40.0}};
  const RoutePlan before = plan_routes(groups, rates);
  rates.bus_ahead_ns = 200'000.0;
  const RoutePlan plan = plan_routes(groups, rates);
  assert_true(plan.n_moved() > before.n_moved() && plan.host_keys > 0);
  assert_true(plan.total_ns < before.total_ns - 80'000.0);
  assert_true(std::abs(plan.bus_ns - rates.bus_ahead_ns - plan.total_ns) < 1e-6 * plan.total_ns);
  assert_true(std::abs(plan.host_ns - plan.total_ns) < 1e-3 * plan.total_ns);
  const RoutePlan few = plan_routes(std::vector<PlanGroup>{{5000, 40.0}}, rates);
  assert_int_equal(few.host_keys, 0);
  assert_true(few.total_ns == 20'000.0);
  rates.bus_begin_ns = 40'000.0;  // never ahead
  assert_int_equal(plan_routes(std::vector<PlanGroup>{{400, 40.0}}, rates).host_keys, 400);
}

void nothing_to_plan(void**) {
  PlanRates rates;
  rates.columns[kPlanStream] = {true, 75.0, 1.0};
  rates.host_begin_ns = rates.bus_begin_ns = rates.device_begin_ns = 1.0;
  const RoutePlan plan = plan_routes({}, rates);
  assert_int_equal(plan.host_keys, 0);
  assert_int_equal(plan.n_moved(), 0);
  assert_true(plan.total_ns == 0.0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(none_is_faster), cmocka_unit_test(engines_end_together),
                              cmocka_unit_test(bus_begins_ahead), cmocka_unit_test(nothing_to_plan)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
