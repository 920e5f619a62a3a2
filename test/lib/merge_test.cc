// SPDX-License-Identifier: MIT
// Tests tandem_merge over a million random partitions.
//
// There are two kinds of rows. For the first kind a small attention problem is cut into parts. The parts' states are
// computed in double and rounded to the tensors' types, and the merged state must be that of the whole. For the second kind
// the states are drawn directly: log-sum-exps far apart, within 1e-6 of zero, or -inf with garbage as output. There the
// truth is the merge formula in double. Every row of every call is its own partition.
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>

#include "lib/harness.h"
#include "one_in.h"
#include "reference/rounding.h"
#include "with_cmocka.h"

namespace {

using harness::Tensor;
using reference::Random;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEps = 0x1p-23;

std::unique_ptr<harness::Engine> engine, single_threaded;

struct State {
  std::vector<double> o;
  double lse = -kInfinity;
};

// Merges by the formula of the header, in double.
State merge_exactly(const std::vector<State>& states, size_t head_dim, std::vector<double>* mass) {
  State merged;
  merged.o.assign(head_dim, 0.0);
  mass->assign(head_dim, 0.0);
  double largest = -kInfinity, sum = 0.0;
  for (const State& state : states) largest = std::max(largest, state.lse);
  if (largest == -kInfinity) return merged;
  for (const State& state : states) sum += std::exp(state.lse - largest);
  for (const State& state : states) {
    if (state.lse == -kInfinity) continue;
    const double weight = std::exp(state.lse - largest) / sum;
    for (size_t d = 0; d < head_dim; ++d) {
      merged.o[d] += weight * state.o[d];
      (*mass)[d] += weight * std::fabs(state.o[d]);
    }
  }
  merged.lse = largest + std::log(sum);
  return merged;
}

// n_states x rows of states as the tensors hold them, and the state of the whole if it is known.
struct Problem {
  int64_t n_tokens = 0, n_heads = 0, head_dim = 0;
  int32_t n_states = 0;
  int32_t o_type = TANDEM_F32, out_type = TANDEM_F32;
  std::vector<Tensor> o, lse;
  std::vector<std::vector<State>> states;  // [row][state], rounded
  std::vector<State> whole;                // [row]; lse = NaN if the states were drawn
  std::string text;
};

double draw_lse(Random* random) {
  switch (random->integer(0, 7)) {
    case 0:
      return -kInfinity;
    case 1:
      return 1e-6 * (2.0 * random->uniform() - 1.0);
    case 2:
      return 0.0;
    case 3:
      return 88.7 + 20.0 * random->uniform();
    case 4:
      return -88.7 - 20.0 * random->uniform();
    case 5:
      return 1000.0 * random->normal();
    default:
      return 3.0 * random->normal();
  }
}

void draw_states(size_t head_dim, std::vector<State>* states, Random* random) {
  for (State& state : *states) {
    state.lse = draw_lse(random);
    for (size_t d = 0; d < head_dim; ++d) state.o.push_back(random->normal());
  }
}

// Draws an attention problem of up to 12 keys and cuts it at random. A key may go to any part, so parts may be empty.
State cut_problem(size_t head_dim, std::vector<State>* states, Random* random) {
  const int64_t n_keys = random->integer(0, 12);
  const double spread = random->pick({0.0, 1.0, 30.0, 200.0});
  std::vector<std::vector<State>> parts(states->size());
  std::vector<State> all;
  for (int64_t i = 0; i < n_keys; ++i) {
    State key;
    key.lse = spread * random->normal();
    for (size_t d = 0; d < head_dim; ++d) key.o.push_back(random->normal());
    all.push_back(key);
    parts[static_cast<size_t>(random->integer(0, static_cast<int64_t>(states->size()) - 1))].push_back(key);
  }
  std::vector<double> mass;
  for (size_t i = 0; i < parts.size(); ++i) (*states)[i] = merge_exactly(parts[i], head_dim, &mass);
  return merge_exactly(all, head_dim, &mass);
}

Problem draw_problem(uint64_t seed, int64_t n_rows) {
  Random random(seed);
  Problem p;
  p.n_states = static_cast<int32_t>(random.pick<int64_t>({1, 2, 2, 2, 3, 4, 5, 9}));
  p.head_dim = random.chance(0.1) ? random.pick<int64_t>({64, 80, 128, 256}) : random.integer(1, 9);
  if (p.head_dim > 9) n_rows = n_rows / 16 + 1;
  p.n_heads = random.integer(1, 7);
  p.n_tokens = (n_rows + p.n_heads - 1) / p.n_heads;
  p.o_type = random.chance(0.6) ? TANDEM_F32 : random.pick({TANDEM_F16, TANDEM_BF16});
  p.out_type = random.chance(0.7) ? p.o_type : random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16});
  p.text = "merge seed " + std::to_string(seed) + ": " + std::to_string(p.n_states) + " states of [" +
           std::to_string(p.n_tokens) + ", " + std::to_string(p.n_heads) + ", " + std::to_string(p.head_dim) + "] " +
           reference::dtype_name(p.o_type) + " to " + reference::dtype_name(p.out_type);
  for (int32_t i = 0; i < p.n_states; ++i) {
    p.o.emplace_back(p.o_type, p.n_tokens, p.n_heads, p.head_dim, harness::random_layout(&random));
    p.lse.emplace_back(TANDEM_F32, p.n_tokens, p.n_heads, 0, harness::random_layout(&random));
  }
  for (int64_t row = 0; row < p.n_tokens * p.n_heads; ++row) {
    std::vector<State> states(static_cast<size_t>(p.n_states));
    State whole;
    if (random.chance(0.5)) {
      whole = cut_problem(static_cast<size_t>(p.head_dim), &states, &random);
    } else {
      whole.lse = std::numeric_limits<double>::quiet_NaN();
      draw_states(static_cast<size_t>(p.head_dim), &states, &random);
    }
    const int64_t t = row / p.n_heads, h = row % p.n_heads;
    for (int32_t i = 0; i < p.n_states; ++i) {
      State& state = states[static_cast<size_t>(i)];
      state.lse = reference::round_to(TANDEM_F32, state.lse);
      p.lse[static_cast<size_t>(i)].set(t, h, 0, state.lse);
      const bool garbage = state.lse == -kInfinity && random.chance(0.7);  // otherwise 0 or finite
      for (int64_t d = 0; d < p.head_dim; ++d) {
        double& x = state.o[static_cast<size_t>(d)];
        x = reference::round_to(p.o_type, x);
        const double stored = !garbage ? x : random.chance(0.5) ? std::nan("") : random.pick({kInfinity, -kInfinity, 6e4});
        p.o[static_cast<size_t>(i)].set(t, h, d, stored);
      }
    }
    p.states.push_back(std::move(states));
    p.whole.push_back(std::move(whole));
  }
  return p;
}

struct Merged {
  Tensor o, lse;
};

int32_t call_merge(const tandem_tensor* o_out, const tandem_tensor* lse_out, const std::vector<const Tensor*>& o,
                   const std::vector<const Tensor*>& lse, tandem_engine* on, tandem_error** error) {
  std::vector<tandem_tensor> views;
  for (const Tensor* tensor : o) views.push_back(tensor->view());
  for (const Tensor* tensor : lse) views.push_back(tensor->view());
  std::vector<const tandem_tensor*> o_list, lse_list;
  for (size_t i = 0; i < o.size(); ++i) o_list.push_back(&views[i]);
  for (size_t i = 0; i < lse.size(); ++i) lse_list.push_back(&views[o.size() + i]);
  return tandem_merge(o_out, lse_out, o_list.data(), lse_list.data(), static_cast<int32_t>(o.size()), on, nullptr, error);
}

Merged merge(const Problem& p, const std::vector<const Tensor*>& o, const std::vector<const Tensor*>& lse, int32_t out_type,
             tandem_engine* on) {
  Merged merged;
  Random random(p.states.size());
  merged.o = Tensor(out_type, p.n_tokens, p.n_heads, p.head_dim, harness::random_layout(&random));
  merged.lse = Tensor(TANDEM_F32, p.n_tokens, p.n_heads, 0, harness::random_layout(&random));
  const tandem_tensor o_out = merged.o.view(), lse_out = merged.lse.view();
  TANDEM_EXPECT(p.text, TANDEM_OK, call_merge(&o_out, &lse_out, o, lse, on, &error));
  TANDEM_CHECK(merged.o.padding_untouched() && merged.lse.padding_untouched(), p.text + ": padding was written");
  return merged;
}

std::vector<const Tensor*> pointers(const std::vector<Tensor>& tensors) {
  std::vector<const Tensor*> list;
  for (const Tensor& tensor : tensors) list.push_back(&tensor);
  return list;
}

// Returns the spread of the states' lse. An f32 difference of lse has an error of eps / 2 times its size, which exp
// amplifies.
double spread_of(const std::vector<State>& states) {
  double low = kInfinity, high = -kInfinity;
  for (const State& state : states) {
    if (state.lse == -kInfinity) continue;
    low = std::min(low, state.lse);
    high = std::max(high, state.lse);
  }
  return high >= low ? high - low : 0.0;
}

std::string element_text(const Problem& p, int64_t row, int64_t d, double got, double wanted, double bound) {
  char text[200];
  std::snprintf(text, sizeof text, ": row %lld dim %lld: got %.9g, wanted %.9g, bound %.3g", static_cast<long long>(row),
                static_cast<long long>(d), got, wanted, bound);
  return p.text + text;
}

// extra_eps: allows for roundings of intermediate outputs to their type, if the merge took several calls.
void check_row(const Problem& p, const Merged& merged, int64_t row, double extra_eps) {
  const int64_t t = row / p.n_heads, h = row % p.n_heads;
  const auto at = static_cast<size_t>(row);
  std::vector<double> mass;
  const State truth = merge_exactly(p.states[at], static_cast<size_t>(p.head_dim), &mass);
  const double lse = merged.lse.get(t, h, 0), slack = std::max(1.0, spread_of(p.states[at]));
  if (truth.lse == -kInfinity) {
    TANDEM_CHECK(lse == -kInfinity, element_text(p, row, -1, lse, truth.lse, 0.0));
  } else {
    const double bound = 1e-5 * (1.0 + std::fabs(truth.lse));
    TANDEM_CHECK(std::fabs(lse - truth.lse) <= bound, element_text(p, row, -1, lse, truth.lse, bound));
  }
  const double eps_out = merged.o.dtype() == TANDEM_F32 ? 0.0 : reference::epsilon(merged.o.dtype());
  const double eps_in = p.o_type == TANDEM_F32 ? 0.0 : reference::epsilon(p.o_type);
  const bool whole_known = !std::isnan(p.whole[at].lse);
  for (int64_t d = 0; d < p.head_dim; ++d) {
    const auto i = static_cast<size_t>(d);
    const double got = merged.o.get(t, h, d);
    const double bound =
        (4.0 * kEps * slack + eps_out / 2 * 1.01 + extra_eps) * mass[i] + (truth.lse == -kInfinity ? 0.0 : 1e-7);
    TANDEM_CHECK(std::fabs(got - truth.o[i]) <= bound, element_text(p, row, d, got, truth.o[i], bound));
    if (!whole_known) continue;
    // The comparison with the whole includes the roundings of the inputs: of o, and of lse (eps / 2 of its size, up to
    // 600).
    double size = 1.0;
    for (const State& state : p.states[at]) size = std::max(size, state.lse == -kInfinity ? 0.0 : std::fabs(state.lse));
    const double wide = bound + (eps_in + 4.0 * kEps * size) * mass[i] + (eps_in > 0.0 ? 1e-6 : 0.0);
    TANDEM_CHECK(std::fabs(got - p.whole[at].o[i]) <= wide, element_text(p, row, d, got, p.whole[at].o[i], wide));
  }
}

void check_all(const Problem& p, const Merged& merged, double extra_eps = 0.0) {
  for (int64_t row = 0; row < p.n_tokens * p.n_heads; ++row) check_row(p, merged, row, extra_eps);
}

// Merges in any order, and in pairs from either side. Each must give the same state within the gate.
void check_orders(const Problem& p) {
  std::vector<const Tensor*> o = pointers(p.o), lse = pointers(p.lse);
  const std::vector<const Tensor*> reversed_o(o.rbegin(), o.rend()), reversed_lse(lse.rbegin(), lse.rend());
  check_all(p, merge(p, reversed_o, reversed_lse, p.out_type, *engine));
  if (p.n_states < 3) return;
  const double step_eps = p.n_states * (p.o_type == TANDEM_F32 ? 4.0 * kEps * 100.0 : reference::epsilon(p.o_type));
  Merged left = merge(p, {o[0], o[1]}, {lse[0], lse[1]}, p.o_type, *engine);
  for (size_t i = 2; i < o.size(); ++i) left = merge(p, {&left.o, o[i]}, {&left.lse, lse[i]}, p.o_type, *engine);
  check_all(p, left, step_eps);
  Merged right = merge(p, {o[o.size() - 2], o.back()}, {lse[o.size() - 2], lse.back()}, p.o_type, *engine);
  for (size_t i = o.size() - 2; i-- > 0;) right = merge(p, {o[i], &right.o}, {lse[i], &right.lse}, p.o_type, *engine);
  check_all(p, right, step_eps);
}

// Writing over the first state gives the same bits, and so does one thread.
void check_in_place(Problem* p, const Merged& merged) {
  const Merged alone = merge(*p, pointers(p->o), pointers(p->lse), p->out_type, *single_threaded);
  TANDEM_CHECK(alone.o.payload() == merged.o.payload() && alone.lse.payload() == merged.lse.payload(),
               p->text + ": another number of threads gives other bits");
  if (p->out_type != p->o_type) return;
  const tandem_tensor o_out = p->o[0].view(), lse_out = p->lse[0].view();
  TANDEM_EXPECT(p->text + " in place", TANDEM_OK,
                call_merge(&o_out, &lse_out, pointers(p->o), pointers(p->lse), *engine, &error));
  TANDEM_CHECK(p->o[0].payload() == merged.o.payload() && p->lse[0].payload() == merged.lse.payload(),
               p->text + ": in place gives other bits");
}

void test_partitions(void**) {
  const int64_t wanted = tandem::test::some_of(harness::full_run() ? 1'000'000 : 60'000);
  int64_t n_partitions = 0;
  for (uint64_t seed = harness::seed_override(1); n_partitions < wanted; ++seed) {
    Problem p = draw_problem(seed, seed % 10 == 0 ? 4000 : 500);
    const Merged merged = merge(p, pointers(p.o), pointers(p.lse), p.out_type, *engine);
    check_all(p, merged);
    if (seed % 4 == 0) check_orders(p);
    check_in_place(&p, merged);
    n_partitions += p.n_tokens * p.n_heads;
  }
  std::printf("%lld partitions\n", static_cast<long long>(n_partitions));
}

// A single state, alone or among empty ones, is returned bit for bit.
void test_identity(void**) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const int64_t n_empty = random.integer(0, 3), dim = random.integer(1, 130), where = random.integer(0, n_empty);
    std::vector<Tensor> o, lse;
    for (int64_t i = 0; i <= n_empty; ++i) {
      o.emplace_back(TANDEM_F32, 3, 2, dim, harness::random_layout(&random));
      lse.emplace_back(TANDEM_F32, 3, 2, 0, harness::random_layout(&random));
      for (int64_t row = 0; row < 6; ++row) {
        lse.back().set(row / 2, row % 2, 0, i == where ? 20.0 * random.normal() : -kInfinity);
        for (int64_t d = 0; d < dim; ++d) o.back().set(row / 2, row % 2, d, i == where ? random.normal() : std::nan(""));
      }
    }
    Problem p;
    p.n_tokens = 3;
    p.n_heads = 2;
    p.head_dim = dim;
    p.text = "identity seed " + std::to_string(seed);
    const Merged merged = merge(p, pointers(o), pointers(lse), TANDEM_F32, *engine);
    const auto w = static_cast<size_t>(where);
    TANDEM_CHECK(merged.o.payload() == o[w].payload() && merged.lse.payload() == lse[w].payload(),
                 p.text + ": a single state changed");
  }
}

int set_up(void**) {
  engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, nullptr, nullptr});
  single_threaded = std::make_unique<harness::Engine>(harness::EngineSetup{1, nullptr, nullptr});
  return 0;
}

int tear_down(void**) {
  engine.reset();
  single_threaded.reset();
  return 0;
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(test_partitions), cmocka_unit_test(test_identity)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
