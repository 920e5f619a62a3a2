// SPDX-License-Identifier: MIT
// Selections of thousands of tokens: copies in several chunks, moving averages in several blocks, and no wait after an
// append.
#include <cmath>
#include <string>
#include <vector>

#include "reference/random.h"
#include "tandem/tandem.hpp"
#include "with_cmocka.h"

namespace {

constexpr int64_t kQHeads = 4, kKvHeads = 2, kGroup = 2, kDim = 64, kWindow = 16, kSinks = 4;
constexpr float kAlpha = 0.3f;

tandem_engine_options engine_options(int32_t n_threads) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = n_threads;
  return options;
}

std::vector<tandem_layer_options> layer_options() {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kQHeads, layer.n_kv_heads = kKvHeads, layer.k_head_dim = kDim;
  return {layer};
}

tandem_cache_options cache_options(int64_t cap_bytes) {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.k_type = TANDEM_F32;
  options.page_tokens = 16;
  options.host_cap_bytes = cap_bytes;
  return options;
}

tandem_session_options session_options(const char* policy, float beta) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.window_tokens = kWindow;
  options.sink_tokens = kSinks;
  options.alpha = kAlpha;
  options.beta = beta;
  options.halo_tokens = 0;
  return options;
}

// With beta = 0 every attended key is selected, so the answer equals that of all keys.
struct World {
  tandem::Engine engine;
  tandem::Model model;
  tandem::Cache cache;
  tandem::Session sparse, dense;
  int64_t sequence;
  reference::Random random{7};
  std::vector<float> q, k, v;  // of the last call

  explicit World(float beta, int32_t n_threads = 2, int64_t cap_bytes = 0)
      : engine(engine_options(n_threads)),
        model(layer_options()),
        cache(engine, model, cache_options(cap_bytes)),
        sparse(cache, session_options("hgca", beta)),
        dense(cache, session_options("all", 0.0f)),
        sequence(cache.create_sequence()) {}

  void draw(int64_t n, std::vector<float>* rows) {
    rows->resize(static_cast<size_t>(n));
    for (float& x : *rows) x = static_cast<float>(random.normal());
  }
  std::vector<float> attend(tandem::Session& session, int64_t n, bool appends) {
    std::vector<float> o(static_cast<size_t>(n * kQHeads * kDim));
    const tandem_tensor q_view = tandem::tensor(q.data(), {n, kQHeads, kDim}),
                        o_view = tandem::tensor(o.data(), {n, kQHeads, kDim}),
                        k_view = tandem::tensor(k.data(), {n, kKvHeads, kDim}),
                        v_view = tandem::tensor(v.data(), {n, kKvHeads, kDim});
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &n;
    args.q = &q_view, args.o = &o_view;
    if (appends) args.k = &k_view, args.v = &v_view;
    session.attend(args);
    return o;
  }
  std::vector<float> feed(int64_t n) {
    draw(n * kQHeads * kDim, &q);
    draw(n * kKvHeads * kDim, &k);
    draw(n * kKvHeads * kDim, &v);
    return attend(sparse, n, true);
  }
  void feed_and_compare(int64_t n_steps) {
    for (int64_t i = 0; i < n_steps; ++i) {
      const std::vector<float> got = feed(1);
      if (i % 5 != 0 && i + 1 != n_steps) continue;
      const std::vector<float> wanted = attend(dense, 1, false);
      for (size_t j = 0; j < got.size(); ++j) assert_true(std::fabs(got[j] - wanted[j]) <= 2e-5f);
    }
  }
  int64_t outside() const { return cache.length(sequence) - kWindow - 2; }  // a lower bound; blocks have 2 tokens
  int64_t copied_bytes() {  // call it at rest: while rows move to a larger chunk, both chunks exist
    engine.drain();
    return cache.stats().selection_bytes;
  }
};

constexpr int64_t kRowBytes = kKvHeads * 2 * kDim * static_cast<int64_t>(sizeof(float));

void copies_grow_in_chunks(void**) {
  World world(0.0f);
  world.feed(40);
  world.feed_and_compare(1500);
  assert_true(world.copied_bytes() >= (world.outside() - kSinks) * kRowBytes);
  assert_true(world.copied_bytes() <= (world.outside() + 2) * kRowBytes);  // the plan's promise
  // A fork has copies of its own. Both sequences continue.
  const int64_t first = world.sequence, fork = world.cache.fork(first);
  world.sequence = fork;
  world.feed_and_compare(20);
  world.sequence = first;
  world.feed_and_compare(20);
  // Truncates within a chunk. Then rows move across a border of chunks, and growth begins again.
  world.cache.truncate(first, 1300);
  world.feed_and_compare(20);
  world.cache.remove(first, 300, 400);
  world.feed_and_compare(700);
  world.feed(40);  // judges and copies all keys anew
  world.feed_and_compare(600);
  world.sequence = fork;
  world.feed_and_compare(1);
}

// If the cap leaves no room for a copy or for its next chunk, rows are read from the store.
void cap_leaves_no_room(void**) {
  World whole(0.0f);
  whole.feed(40);
  whole.feed_and_compare(1500);
  const tandem_cache_stats used = whole.cache.stats();
  const int64_t without = used.host_kv_bytes + used.host_session_bytes;
  for (const int64_t room : {int64_t{0}, int64_t{100} * kRowBytes, int64_t{700} * kRowBytes, int64_t{1200} * kRowBytes}) {
    World world(0.0f, 2, without + room);
    world.feed(40);
    world.feed_and_compare(1500);
    assert_true(world.copied_bytes() <= room);
    assert_true(world.cache.stats().host_peak_bytes <= without + room);
  }
}

// Computes the weights of an append's queries in double, as shares of all selected keys.
void moving_averages_span_blocks(void**) {
  constexpr int64_t kPast = 5000, kNew = 50, kLength = kPast + kNew;
  World world(0.0f);
  // The first tokens fill the rest of memory that another sequence has begun. Runs of pages and blocks of the moving
  // average therefore end at different tokens.
  const int64_t sequence = world.sequence;
  world.sequence = world.cache.create_sequence();
  world.feed(10);
  world.sequence = sequence;
  world.draw(kPast * kKvHeads * kDim, &world.k);
  for (const int64_t first : {0, 16}) {
    const int64_t n = first == 0 ? 16 : kPast - first;
    const tandem_tensor past = tandem::tensor(world.k.data() + first * kKvHeads * kDim, {n, kKvHeads, kDim});
    world.cache.append(sequence, 0, &past, &past);
  }
  std::vector<float> keys = world.k;
  world.feed(kNew);
  keys.insert(keys.end(), world.k.begin(), world.k.end());
  for (const int32_t q_head : {1, 2}) {
    std::vector<double> maw(kLength), logits(kLength);
    for (int64_t t = 0; t < kNew; ++t) {
      double sum = 0.0;
      for (int64_t j = 0; j <= kPast + t; ++j) {
        double dot = 0.0;
        for (int64_t d = 0; d < kDim; ++d)
          dot += double{world.q[static_cast<size_t>((t * kQHeads + q_head) * kDim + d)]} *
                 double{keys[static_cast<size_t>((j * kKvHeads + q_head / kGroup) * kDim + d)]};
        logits[static_cast<size_t>(j)] = std::exp(dot / std::sqrt(double{kDim}));
        sum += logits[static_cast<size_t>(j)];
      }
      for (int64_t j = 0; j < kLength; ++j)
        maw[static_cast<size_t>(j)] +=
            double{kAlpha} * ((j <= kPast + t ? logits[static_cast<size_t>(j)] / sum : 0.0) - maw[static_cast<size_t>(j)]);
    }
    std::vector<int64_t> kept(kLength);
    std::vector<float> share(kLength);
    int64_t n_kept = 0;
    tandem::detail::call(tandem_session_selection, kept.data(), share.data(), kLength, &n_kept, world.sparse.get(),
                         world.sequence, 0, static_cast<int32_t>(q_head / kGroup), static_cast<int32_t>(q_head % kGroup));
    assert_int_equal(n_kept, kLength);
    const int64_t end = (kLength - kWindow) / 2 * 2;
    double sum = 0.0;
    for (int64_t j = kSinks; j < end; ++j) sum += maw[static_cast<size_t>(j)];
    for (int64_t j = kSinks; j < end; ++j) {
      const double wanted = maw[static_cast<size_t>(j)] / sum;
      assert_true(std::fabs(double{share[static_cast<size_t>(j)]} - wanted) <= 1e-4 * wanted);
    }
  }
}

// The bits are the same for any number of threads.
void same_for_any_number_of_threads(void**) {
  std::vector<std::vector<float>> answers;
  std::vector<std::vector<int64_t>> kept;
  for (const int32_t n_threads : {1, 2, 5}) {
    World world(1.0f, n_threads);
    world.feed(3000);
    answers.push_back(world.feed(1));
    world.feed(70);
    const std::vector<float> o = world.feed(1);
    answers.back().insert(answers.back().end(), o.begin(), o.end());
    kept.push_back(world.sparse.selection(world.sequence, 0, 1));
  }
  assert_true(kept[0].size() > 100 && kept[0].size() < 2900);
  for (size_t i = 1; i < answers.size(); ++i) {
    assert_true(answers[i] == answers[0]);
    assert_true(kept[i] == kept[0]);
  }
}

// A re-evaluation is done when its append returns. The statistics would count even a wait of one nanosecond.
void no_step_waits_for_an_append(void**) {
  World world(1.0f);
  world.feed(40);
  for (const int64_t n_tokens : {2, 64, 500}) {
    const tandem_session_stats before = world.sparse.stats();
    world.feed(n_tokens);
    world.feed(1);
    const tandem_session_stats after = world.sparse.stats();
    assert_int_equal(after.refresh_wait_ns, before.refresh_wait_ns);
    assert_true(after.n_refreshes > before.n_refreshes);
    assert_true(after.refresh_ns > before.refresh_ns);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(copies_grow_in_chunks), cmocka_unit_test(cap_leaves_no_room),
                              cmocka_unit_test(moving_averages_span_blocks),
                              cmocka_unit_test(same_for_any_number_of_threads),
                              cmocka_unit_test(no_step_waits_for_an_append)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
