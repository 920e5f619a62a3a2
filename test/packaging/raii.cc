// SPDX-License-Identifier: MIT
// A program on tandem.hpp: one decode step, a refused one, and everything released in the wrong order.
#include <cmath>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "tandem/tandem.hpp"

static_assert(!std::is_copy_constructible<tandem::Session>::value, "a session has one owner");
static_assert(std::is_nothrow_move_constructible<tandem::Session>::value, "a session can be handed on");

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      return 1;                                                             \
    }                                                                       \
  } while (0)

namespace {

constexpr int64_t kHeads = 2, kDim = 64;

tandem_layer_options two_heads() {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = layer.n_kv_heads = static_cast<int32_t>(kHeads);
  layer.k_head_dim = static_cast<int32_t>(kDim);
  return layer;
}

// One token attends itself: o = v, whatever q and k are.
int attend_one(tandem::Session& session, int64_t sequence, float value, float* seen) {
  std::vector<float> q(kHeads * kDim, 0.5f), k(kHeads * kDim, 0.25f), v(kHeads * kDim, value), o(kHeads * kDim);
  const tandem_tensor qt = tandem::tensor(q.data(), {1, kHeads, kDim}), kt = tandem::tensor(k.data(), {1, kHeads, kDim});
  const tandem_tensor vt = tandem::tensor(v.data(), {1, kHeads, kDim}), ot = tandem::tensor(o.data(), {1, kHeads, kDim});
  const int64_t q_len = 1;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &qt;
  args.k = &kt;
  args.v = &vt;
  args.o = &ot;
  tandem::Step step(session, {sequence}, {q_len});
  session.attend(args);
  step.end();
  *seen = o[0];
  return 0;
}

// The last token attends the key that is named, and gets its value. An index that names no token is refused.
int attend_named(tandem::Session& session, int64_t sequence, int32_t named, float expected) {
  std::vector<float> q(kHeads * kDim, 0.5f), o(kHeads * kDim);
  const tandem_tensor qt = tandem::tensor(q.data(), {1, kHeads, kDim}), ot = tandem::tensor(o.data(), {1, kHeads, kDim});
  const tandem_tensor idx = tandem::tensor(TANDEM_I32, &named, {1, 1, 1});
  const int64_t q_len = 1;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  selection.idx = &idx;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &qt;
  args.o = &ot;
  args.selection = &selection;
  session.attend(args);
  CHECK(std::fabs(o[0] - expected) < 1e-6f);
  try {
    named = 1000;
    session.attend(args);
    CHECK(!"there is no token 1000");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_INVALID_ARGUMENT && error.field() == "selection.idx");
  }
  return 0;
}

void run_in_turn(int64_t n_tasks, tandem_task_fn task, void* context, void* user) {
  ++*static_cast<int*>(user);
  for (int64_t i = 0; i < n_tasks; ++i) task(i, context);
}

// On a lent thread: each of 40 queries sees the keys up to its own, whose values are their numbers.
int attend_tensors() {
  const int64_t n = 40;
  int n_rounds = 0;
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  tandem::lend_threads(options, 2, run_in_turn, &n_rounds);
  tandem::Engine engine(options);
  std::vector<float> q(n * kHeads * kDim, 0.5f), k(n * kHeads * kDim, 0.25f), v(n * kHeads * kDim), o(n * kHeads * kDim);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / (kHeads * kDim));
  const tandem_tensor qt = tandem::tensor(q.data(), {n, kHeads, kDim}), kt = tandem::tensor(k.data(), {n, kHeads, kDim});
  const tandem_tensor vt = tandem::tensor(v.data(), {n, kHeads, kDim}), ot = tandem::tensor(o.data(), {n, kHeads, kDim});
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;
  args.flags = TANDEM_TENSORS_CAUSAL;
  args.q = &qt;
  args.k = &kt;
  args.v = &vt;
  args.o = &ot;
  engine.attend_tensors(args);
  for (int64_t t = 0; t < n; ++t)
    CHECK(std::fabs(o[static_cast<std::size_t>(t * kHeads * kDim)] - static_cast<float>(t) / 2) < 1e-4f);
  CHECK(n_rounds > 0);
  try {
    args.o = &qt;
    engine.attend_tensors(args);
    CHECK(!"o overlaps q");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_INVALID_ARGUMENT && error.field() == "o.data");
  }
  return 0;
}

int run() {
  CHECK(attend_tensors() == 0);
  tandem::Engine engine;
  tandem::Model model({two_heads()});
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = TANDEM_F32;
  tandem::Cache cache(engine, model, options);
  tandem::Session first(cache);
  tandem::Session session(std::move(first));
  CHECK(first.get() == nullptr && session.get() != nullptr);  // NOLINT(bugprone-use-after-move): null by its contract

  const int64_t sequence = cache.create_sequence();
  float seen = 0;
  CHECK(attend_one(session, sequence, 3.0f, &seen) == 0 && std::fabs(seen - 3.0f) < 1e-6f);
  CHECK(attend_one(session, sequence, 5.0f, &seen) == 0 && std::fabs(seen - 4.0f) < 1e-6f);
  CHECK(cache.length(sequence) == 2 && session.stats().n_attends == 2);
  CHECK(attend_named(session, sequence, 0, 3.0f) == 0 && attend_named(session, sequence, 1, 5.0f) == 0);
  CHECK(session.selection(sequence, 0, 0) == std::vector<int64_t>{1});
  const int64_t fork = cache.fork(sequence);
  CHECK(cache.digest(fork) == cache.digest(sequence));
  cache.truncate(fork, 1);
  CHECK(cache.length(fork) == 1 && cache.length(sequence) == 2);
  CHECK(engine.report().front() == '{' && engine.report().back() == '}');

  try {
    cache.length(sequence + 1000);
    CHECK(!"an unknown sequence has no length");
  } catch (const tandem::Error& error) {
    CHECK(error.status() == TANDEM_ERROR_NOT_FOUND && error.message() == error.what() && !error.message().empty());
  }
  try {
    options.k_type = 99;
    tandem::Cache refused(engine, model, options);
    CHECK(!"there is no storage type 99");
  } catch (const tandem::Error& error) {
    CHECK(error.field() == "k_type");
  }
  tandem::Engine taken(std::move(engine));
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
