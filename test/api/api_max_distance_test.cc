// SPDX-License-Identifier: MIT
// tandem_patterns::max_distance through the C ABI: answers compared with double precision over every distance, storage
// types, scattered pages, stopped calls, forks and truncation. py_max_distance_test.py has more cases.
#include "patterned_world.h"

using namespace tandem_test;

namespace {

constexpr int64_t kMost = 100, kSinks = 10, kWindow = 40;  // sinks are named in units of 8
constexpr double kFactor = 1.25;

tandem_layer_options rotated_layer(int32_t rope = TANDEM_ROPE_HALVES) {
  tandem_layer_options layer = plain_layer();
  layer.rope = rope;
  layer.rope_theta = 300;
  layer.rope_attn_factor = kFactor;
  return layer;
}

struct Capped : Patterned {
  explicit Capped(const Machine& machine, int64_t most = kMost, int64_t window = kWindow)
      : Patterned(n_heads_of(machine.layers), {a_shape(kSinks, window), a_shape(0, window)}) {
    patterns.max_distance = most;
  }
};

// All rows that were appended to a sequence.
struct Rows {
  std::vector<float> k, v;  // [n_tokens, n_kv_heads, dim]

  int64_t n_tokens() const { return std::ssize(k) / (int64_t{kKvHeads} * kDim); }
  void take(const Batch& batch) {
    k.insert(k.end(), batch.k.values.begin(), batch.k.values.end());
    v.insert(v.end(), batch.v.values.begin(), batch.v.values.end());
  }
};

// Returns q . k under RoPE by halves, for a query at the given distance after the key.
double logit_at(const float* q, const float* k, int64_t distance) {
  double sum = 0;
  for (int32_t i = 0; i < kDim / 2; ++i) {
    const double angle = static_cast<double>(distance) * std::pow(300.0, -2.0 * i / kDim);
    const double a = double{q[i]} * std::cos(angle) - double{q[i + kDim / 2]} * std::sin(angle);
    const double b = double{q[i]} * std::sin(angle) + double{q[i + kDim / 2]} * std::cos(angle);
    sum += a * k[i] + b * k[i + kDim / 2];
  }
  return sum * kFactor * kFactor / std::sqrt(double{kDim});
}

// Attends the query of one head at token `own`, in a block that begins at token `begin`. -1: the query alone, with the
// group's sinks.
std::vector<double> attend(const Rows& rows, const float* q, int32_t head, int64_t own, int64_t begin, int64_t most) {
  const int64_t n_sinks = head % 2 == 0 || begin < 0 ? (kSinks + 7) / 8 * 8 : 0;
  if (begin < 0) begin = own;
  std::vector<double> o(kDim, 0.0);
  double total = 0;
  for (int64_t t = 0; t <= own; ++t) {
    if (t >= n_sinks && t < begin + 1 - kWindow) continue;
    const int64_t at = (t * kKvHeads + head / (kQHeads / kKvHeads)) * kDim;
    const double weight = std::exp(logit_at(q, rows.k.data() + at, std::min(own - t, most)));
    total += weight;
    for (int32_t d = 0; d < kDim; ++d) o[static_cast<size_t>(d)] += weight * double{rows.v[static_cast<size_t>(at + d)]};
  }
  for (double& x : o) x /= total;
  return o;
}

// Returns the largest difference from the exact answer with this limit.
double error_of(const Batch& batch, const Rows& rows, int64_t most) {
  const int64_t first = rows.n_tokens() - batch.n;
  double error = 0;
  for (int64_t t = 0; t < batch.n; ++t)
    for (int32_t head = 0; head < kQHeads; ++head) {
      const int64_t at = (t * kQHeads + head) * kDim, own = first + t;
      const int64_t begin = batch.n > 1 ? first + t / TANDEM_PATTERN_BLOCK * TANDEM_PATTERN_BLOCK : -1;
      const std::vector<double> expected = attend(rows, batch.q.values.data() + at, head, own, begin, most);
      for (int32_t d = 0; d < kDim; ++d)
        error = std::max(error,
                         std::abs(expected[static_cast<size_t>(d)] - double{batch.o.values[static_cast<size_t>(at + d)]}));
    }
  return error;
}

void answers_are_those_of_the_distances(void**) {
  const Machine machine({rotated_layer()});
  const Capped capped(machine);
  const Keeper kept(machine, capped.options, short_pages());
  kept.scatter();
  Rows rows;
  int64_t seed = 1;
  for (const int64_t n : {90, 1, 3, 129, 1, 20, 1}) {
    Batch batch(machine, 0, {{kept.ids[0], n}}, seed += 10);
    OK(tandem_attend, kept.session, &batch.args);
    rows.take(batch);
    assert_true(error_of(batch, rows, kMost) < 2e-5);
    if (rows.n_tokens() > 150) assert_true(error_of(batch, rows, INT64_MAX) > 1e-2);
  }
}

// A limit above all distances changes no bit. A limit that some distances exceed changes those answers, in every type.
void limits_that_are_not_met(void**) {
  const Machine machine({rotated_layer(), rotated_layer(TANDEM_ROPE_INTERLEAVED)});
  for (const int32_t type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0}) {
    const auto answers = [&](int64_t most) {
      const Capped capped(machine, most);
      const Keeper kept(machine, capped.options, short_pages(type));
      kept.scatter();
      std::vector<float> all;
      for (const int64_t n : {100, 200, 1}) {
        const std::vector<float> more = kept.turn({n}, 10 * n);
        all.insert(all.end(), more.begin(), more.end());
      }
      return all;
    };
    const std::vector<float> expected = answers(0);
    assert_same_bits(answers(300), expected, "a limit that no distance passes");
    assert_false(answers(299) == expected);
  }
}

void forks_and_truncation(void**) {
  const Machine machine({rotated_layer()});
  const Capped capped(machine);
  Keeper kept(machine, capped.options, short_pages()), twin(machine, capped.options, short_pages());
  (void)kept.turn({300}, 10);
  (void)twin.turn({300}, 10);
  (void)kept.turn({200}, 20);
  OK(tandem_sequence_truncate, kept.cache, kept.ids[0], 300);
  int64_t fork = 0;
  OK(tandem_sequence_fork, &fork, kept.cache, kept.ids[0]);
  const std::vector<float> expected = twin.turn({133}, 30);
  assert_same_bits(kept.turn({133}, 30), expected, "cut");
  kept.ids[0] = fork;
  assert_same_bits(kept.turn({133}, 30), expected, "fork");
}

struct Progress {
  int64_t left, last = 0, total = 0;
  static int32_t tell(int64_t done, int64_t total, void* user) {
    auto& self = *static_cast<Progress*>(user);
    assert_true(done >= self.last && done <= total);
    self.last = done;
    self.total = total;
    return self.left-- == 0 ? 1 : 0;
  }
};

// A stopped call changes nothing. A call that runs to its end reports all its work. After a gap in the positions a call may
// have so many runs that its jobs need several batches.
void stopped_calls_leave_nothing(void**) {
  const Machine machine({rotated_layer()}, 3);
  const Capped capped(machine, kMost, 3000);
  const Keeper kept(machine, capped.options, short_pages()), twin(machine, capped.options, short_pages());
  for (const Keeper* each : {&kept, &twin}) {
    each->append(each->ids[0], 3000, 10);
    OK(tandem_sequence_remove, each->cache, each->ids[0], 500, 1, 0);
  }
  bool was_stopped = true;
  for (int64_t at = 0; was_stopped; ++at) {
    const uint64_t digest = kept.digest(kept.ids[0]);
    Progress progress{at};
    Batch batch(machine, 0, {{kept.ids[0], 1500}}, 20);
    batch.args.progress = Progress::tell;
    batch.args.progress_user = &progress;
    const int32_t status = tandem_attend(kept.session, &batch.args, nullptr);
    was_stopped = status == TANDEM_ERROR_CANCELLED;
    assert_true(was_stopped || status == TANDEM_OK);
    if (was_stopped) {
      assert_true(digest == kept.digest(kept.ids[0]));
      continue;
    }
    assert_true(at > 1 && progress.last == progress.total);
    assert_same_bits(batch.answers(), twin.turn({1500}, 20), "after calls that were stopped");
  }
}

void assert_refuses(const Machine& machine, Patterned& patterned, int32_t status, const char* field) {
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  tandem_error* error = nullptr;
  OK(tandem_cache_create, &cache, machine.engine, machine.model, nullptr);
  assert_int_equal(tandem_session_create(&session, cache, &patterned.options, &error), status);
  assert_string_equal(tandem_error_field(error), field);
  tandem_error_release(error);
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const int64_t kv_len = 100;
  assert_int_equal(
      tandem_plan_memory(&plan, machine.engine, machine.model, nullptr, &patterned.options, &kv_len, 1, nullptr), status);
  tandem_cache_release(cache);
}

void what_is_refused(void**) {
  const Machine rotated({rotated_layer()}), plain({rotated_layer(), plain_layer()});
  Capped negative(rotated, -1), by_caller(plain);
  assert_refuses(rotated, negative, TANDEM_ERROR_INVALID_ARGUMENT, "patterns.max_distance");
  assert_refuses(plain, by_caller, TANDEM_ERROR_UNSUPPORTED, "patterns.max_distance");
  for (const tandem_head_pattern& other :
       {kFull, block_sparse(2), both(a_shape(2, 30), block_sparse(2)), vertical_slash(1, 1)}) {
    Capped mixed(rotated);
    mixed.heads[3] = other;
    assert_refuses(rotated, mixed, TANDEM_ERROR_UNSUPPORTED, "patterns.heads[3].kinds");
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(answers_are_those_of_the_distances),
      cmocka_unit_test(limits_that_are_not_met),
      cmocka_unit_test(forks_and_truncation),
      cmocka_unit_test(stopped_calls_leave_nothing),
      cmocka_unit_test(what_is_refused),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
