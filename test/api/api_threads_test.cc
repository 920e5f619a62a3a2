// SPDX-License-Identifier: MIT
// One engine and 64 threads: first each thread has its own cache and session, then all have sessions on one cache. Every
// answer is compared with plain attention in double precision.
#include <atomic>
#include <memory>
#include <thread>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int kThreads = 64, kPrompt = 40, kSteps = 12;

// A conversation in f32 under policy "all": a prompt, then single tokens.
class Conversation {
 public:
  Conversation(tandem_cache* cache, tandem_session* session, int64_t seed) : cache_(cache), session_(session), seed_(seed) {}

  // Returns the number of wrong answers, or a status below 0.
  int run() {
    if (const int32_t status = tandem_sequence_create(&sequence_, cache_, nullptr); status != TANDEM_OK) return status;
    int n_wrong = attend(kPrompt);
    for (int i = 0; i < kSteps && n_wrong == 0; ++i) n_wrong = attend(1);
    if (n_wrong != 0) return n_wrong;
    return tandem_sequence_drop(cache_, sequence_, nullptr);
  }

 private:
  static void fill(std::vector<float>* to, int64_t n, int64_t seed) {
    for (int64_t i = 0; i < n; ++i) to->push_back(4.0f * noise(static_cast<int64_t>(to->size()), seed));
  }
  static tandem_tensor view(float* data, int64_t n_tokens, int64_t n_heads, int64_t head_dim) {
    tandem_tensor t;
    const int64_t shape[] = {n_tokens, n_heads, head_dim};
    return tandem_tensor_init(&t, TANDEM_F32, data, head_dim > 0 ? 3 : 2, shape, nullptr) == TANDEM_OK ? t : tandem_tensor{};
  }

  int attend(int64_t q_len) {
    const auto before = static_cast<int64_t>(k_.size()) / (kKvHeads * kDim);
    std::vector<float> q, o(static_cast<size_t>(q_len * kQHeads * kDim)), lse(static_cast<size_t>(q_len * kQHeads));
    fill(&q, q_len * kQHeads * kDim, seed_ + 1000 * before);
    fill(&k_, q_len * kKvHeads * kDim, seed_ + 1);
    fill(&v_, q_len * kKvHeads * kDim, seed_ + 2);
    const tandem_tensor q_view = view(q.data(), q_len, kQHeads, kDim), o_view = view(o.data(), q_len, kQHeads, kDim),
                        k_view = view(k_.data() + before * kKvHeads * kDim, q_len, kKvHeads, kDim),
                        v_view = view(v_.data() + before * kKvHeads * kDim, q_len, kKvHeads, kDim),
                        lse_view = view(lse.data(), q_len, kQHeads, 0);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence_;
    args.q_lens = &q_len;
    args.q = &q_view;
    args.k = &k_view;
    args.v = &v_view;
    args.o = &o_view;
    args.lse = &lse_view;
    if (const int32_t status = tandem_attend(session_, &args, nullptr); status != TANDEM_OK) return status;
    int n_wrong = 0;
    for (int64_t t = 0; t < q_len; ++t)
      for (int64_t h = 0; h < kQHeads; ++h)
        n_wrong += !is_right(&q[static_cast<size_t>((t * kQHeads + h) * kDim)], h, before + t + 1,
                             &o[static_cast<size_t>((t * kQHeads + h) * kDim)], lse[static_cast<size_t>(t * kQHeads + h)]);
    return n_wrong;
  }

  bool is_right(const float* q, int64_t head, int64_t n_keys, const float* o, float lse) const {
    const int64_t kv_head = head / (kQHeads / kKvHeads);
    const auto row = [&](const std::vector<float>& of, int64_t key) {
      return &of[static_cast<size_t>((key * kKvHeads + kv_head) * kDim)];
    };
    double sum = 0.0, out[kDim] = {};
    for (int64_t key = 0; key < n_keys; ++key) {
      double logit = 0.0;
      for (int d = 0; d < kDim; ++d) logit += static_cast<double>(q[d]) * static_cast<double>(row(k_, key)[d]);
      const double w = std::exp(logit / 8.0);  // 1 / sqrt(64)
      sum += w;
      for (int d = 0; d < kDim; ++d) out[d] += w * static_cast<double>(row(v_, key)[d]);
    }
    for (int d = 0; d < kDim; ++d)
      if (!(std::fabs(out[d] / sum - static_cast<double>(o[d])) <= 1e-5)) return false;
    return std::fabs(std::log(sum) - static_cast<double>(lse)) <= 1e-5 * (1.0 + std::fabs(std::log(sum)));
  }

  tandem_cache* cache_;
  tandem_session* session_;
  int64_t seed_;
  int64_t sequence_ = 0;
  std::vector<float> k_, v_;  // all tokens so far
};

struct Shared {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;

  Shared() {
    tandem_engine_options options = small_engine_options();
    options.n_threads = 3;
    OK(tandem_engine_create, &engine, &options);
    const tandem_layer_options layer = plain_layer();
    OK(tandem_model_create, &model, &layer, 1);
    cache_options.k_type = TANDEM_F32;
    cache_options.page_tokens = 16;
  }
  ~Shared() {
    tandem_model_release(model);
    tandem_engine_release(engine);
  }
};

void run_threads(const std::function<int(int)>& body) {
  std::atomic<int> n_failed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      const int result = body(i);
      if (result != 0 && n_failed.fetch_add(1) == 0) print_error("thread %d: %d\n", i, result);
    });
  for (std::thread& thread : threads) thread.join();
  assert_int_equal(n_failed.load(), 0);
}

void test_own_caches(void**) {
  Shared shared;
  run_threads([&](int i) {
    tandem_cache* cache = nullptr;
    tandem_session* session = nullptr;
    int result = tandem_cache_create(&cache, shared.engine, shared.model, &shared.cache_options, nullptr);
    if (result == TANDEM_OK) result = tandem_session_create(&session, cache, nullptr, nullptr);
    tandem_cache_release(cache);  // the session keeps the cache alive
    if (result == TANDEM_OK) result = Conversation(cache, session, i).run() == TANDEM_ERROR_INVALID_HANDLE ? 0 : 1;
    tandem_session_release(session);
    if (result != 0) return result;
    result = tandem_cache_create(&cache, shared.engine, shared.model, &shared.cache_options, nullptr);
    if (result == TANDEM_OK) result = tandem_session_create(&session, cache, nullptr, nullptr);
    if (result == TANDEM_OK) result = Conversation(cache, session, i).run();
    tandem_session_release(session);
    tandem_cache_release(cache);
    return result;
  });
}

void test_one_cache(void**) {
  Shared shared;
  tandem_cache* cache = nullptr;
  OK(tandem_cache_create, &cache, shared.engine, shared.model, &shared.cache_options);
  run_threads([&](int i) {
    tandem_session* session = nullptr;
    int result = tandem_session_create(&session, cache, nullptr, nullptr);
    if (result == TANDEM_OK) result = Conversation(cache, session, 100 + i).run();
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    if (result == TANDEM_OK) result = tandem_cache_get_stats(&stats, cache, nullptr);
    tandem_session_release(session);
    return result;
  });
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, cache);
  assert_int_equal(stats.n_sequences, 0);
  assert_int_equal(stats.n_pages_used, 0);
  tandem_cache_release(cache);
}

// Threads use a handle while it is released. Each call either does its work or is refused.
void test_release_under_use(void**) {
  Shared shared;
  for (int round = 0; round < 20; ++round) {
    tandem_cache* cache = nullptr;
    OK(tandem_cache_create, &cache, shared.engine, shared.model, &shared.cache_options);
    std::atomic<bool> go{false};
    std::atomic<int> n_wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        while (!go.load()) {
        }
        int64_t sequence = 0;
        int32_t status = TANDEM_OK;
        while (status == TANDEM_OK) status = tandem_sequence_create(&sequence, cache, nullptr);
        n_wrong.fetch_add(status != TANDEM_ERROR_INVALID_HANDLE);
      });
    go.store(true);
    std::this_thread::yield();
    tandem_cache_release(cache);
    for (std::thread& thread : threads) thread.join();
    assert_int_equal(n_wrong.load(), 0);
  }
}

// Two threads use one session, which is an error of the caller. Each call either does its work or is refused, and the cache
// has the tokens of the calls that were not refused.
void test_one_session(void**) {
  World world;
  std::atomic<int64_t> n_done{0}, n_wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int step = 0; step < 200; ++step) {
        tandem_error* error = nullptr;
        const int32_t status = attend_once(world, world.other, 0, 1, 0, &error);
        if (status == TANDEM_OK)
          n_done.fetch_add(1);
        else if (status != TANDEM_ERROR_INVALID_STATE ||
                 std::strstr(tandem_error_message(error), "another thread") == nullptr)
          n_wrong.fetch_add(1);
        tandem_error_release(error);
      }
    });
  for (std::thread& thread : threads) thread.join();
  assert_int_equal(n_wrong.load(), 0);
  assert_true(n_done.load() > 0);
  int64_t length = 0;
  OK(tandem_sequence_length, &length, world.cache, world.other, 0);
  assert_int_equal(length, n_done.load());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_own_caches),
      cmocka_unit_test(test_one_cache),
      cmocka_unit_test(test_release_under_use),
      cmocka_unit_test(test_one_session),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
