// SPDX-License-Identifier: MIT
// A cache and a listener that is not a session: the cache's notifications, their order, and what the cache rolls back.
#include "lib/store/cache_listener.h"

#include <new>
#include <string>
#include <utility>

#include "lib/store/cache.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

constexpr int32_t kDim = 64;

class Listener final : public CacheListener {
 public:
  Status on_reserve(const Sequence&, int64_t n_tokens, const Watch&) override { return tell("reserve", n_tokens), Status(); }
  Status prepare_fork(const Sequence&, int64_t) override { return tell("fork"), Status(); }
  Status flush(const Sequence&) override { return tell("flush"), Status(); }
  void quiesce(const Sequence&) override { tell("quiesce"); }
  void on_cut(const Sequence& sequence, size_t layer_idx, int64_t n_tokens) override {
    if (std::exchange(fails, false)) throw std::bad_alloc();
    tell("cut", static_cast<int64_t>(layer_idx), n_tokens, sequence.lengths[layer_idx]);
  }
  void on_erase(const Sequence&, int64_t first, int64_t n_tokens) override { tell("erase", first, n_tokens); }
  void on_drop(int64_t) override { tell("drop"); }
  bool is_settled() const override { return lost.empty(); }
  bool has_lost() const override { return !lost.empty(); }
  bool has_open_step() const override { return false; }
  void settle() override { tell("settle"); }
  void for_rollbacks(const std::function<void(const Rollback&)>& note) const override {
    for (const Rollback& rollback : lost) note(rollback);
  }
  void restore_window(const Rollback& rollback) override { tell("window", rollback.layer_idx, rollback.window_begin); }
  void on_settled() override {
    tell("settled");
    lost.clear();
  }

  std::string take() { return std::exchange(told_, ""); }
  std::vector<Rollback> lost;
  bool fails = false;

 private:
  template <typename... Numbers>
  void tell(const char* what, Numbers... numbers) {
    told_ += what;
    ((told_ += " " + std::to_string(numbers)), ...);
    told_ += "; ";
  }
  std::string told_;
};

// Two layers with one sequence of eight tokens.
struct Case {
  std::shared_ptr<Cache> cache;
  Listener listener;
  int64_t sequence = 0;

  Case() {
    tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
    engine_options.n_threads = 1;
    std::shared_ptr<Engine> engine;
    assert_true(Engine::create(engine_options, &engine).ok());
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = layer.n_kv_heads = 1;
    layer.k_head_dim = layer.v_head_dim = kDim;
    std::shared_ptr<const Model> model;
    assert_true(Model::create({layer, layer}, &model).ok());
    const tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    assert_true(Cache::create(engine, model, cache_options, &cache).ok());
    assert_true(cache->create_sequence(&sequence).ok());
    assert_true(cache->attach(&listener).ok());
    std::vector<float> numbers(8 * kDim, 1.0f);
    const TensorView rows{reinterpret_cast<std::byte*>(numbers.data()), TANDEM_F32, 8, 1, kDim, 4 * kDim, 4 * kDim};
    for (const int32_t l : {0, 1}) assert_true(cache->append(sequence, l, {&rows, &rows, nullptr, 0, 8}).ok());
    assert_string_equal(listener.take().c_str(), "reserve 8; reserve 8; ");
  }
  int64_t length(int32_t layer_idx) const {
    int64_t n = 0;
    assert_true(cache->length(sequence, layer_idx, &n).ok());
    return n;
  }
};

void rollbacks_come_windows_first_then_lengths(void**) {
  Case c;
  c.listener.lost = {{c.sequence, 0, 5, 2}, {c.sequence, 1, 6, 3}, {c.sequence, 0, 7, 1}, {c.sequence + 1, 0, 0, 0}};
  assert_int_equal(c.length(0), 5);
  assert_int_equal(c.length(1), 6);
  assert_string_equal(c.listener.take().c_str(),
                      "settle; window 0 2; window 1 3; window 0 1; window 0 0; cut 0 5 8; cut 1 6 8; cut 0 5 5; settled; ");
  assert_int_equal(c.length(0), 5);
  assert_string_equal(c.listener.take().c_str(), "");
}

// Tokens that did not arrive are not visible in the cache.
void what_is_lost_is_rolled_back_before_a_change(void**) {
  Case c;
  c.listener.lost = {{c.sequence, 0, 5, 0}, {c.sequence, 1, 5, 0}};
  int64_t fork = 0;
  assert_true(c.cache->fork(c.sequence, &fork).ok());
  assert_string_equal(c.listener.take().c_str(), "settle; window 0 0; window 1 0; cut 0 5 8; cut 1 5 8; settled; fork; ");
  int64_t n = 0;
  assert_true(c.cache->length(fork, 1, &n).ok());
  assert_int_equal(n, 5);
}

void a_rollback_that_fails_is_made_again(void**) {
  Case c;
  c.listener.lost = {{c.sequence, 0, 5, 2}, {c.sequence, 1, 6, 3}};
  c.listener.fails = true;
  int64_t n = 0;
  bool has_thrown = false;
  try {
    (void)c.cache->length(c.sequence, 0, &n);
  } catch (const std::bad_alloc&) {
    has_thrown = true;
  }
  assert_true(has_thrown);
  assert_int_equal(c.length(0), 5);
  assert_int_equal(c.length(1), 6);
}

void every_change_is_told(void**) {
  Case c;
  assert_true(c.cache->reserve(c.sequence, 4).ok());
  assert_string_equal(c.listener.take().c_str(), "reserve 12; ");
  assert_true(c.cache->truncate(c.sequence, 7).ok());
  assert_string_equal(c.listener.take().c_str(), "cut 0 7 8; cut 1 7 8; ");
  assert_true(c.cache->remove(c.sequence, 2, 3, false).ok());
  assert_string_equal(c.listener.take().c_str(), "flush; erase 2 3; cut 0 4 7; cut 1 4 7; ");
  assert_true(c.cache->drop(c.sequence).ok());
  assert_string_equal(c.listener.take().c_str(), "drop; ");
  c.cache->detach(&c.listener);
  assert_true(c.cache->create_sequence(&c.sequence).ok());
  assert_true(c.cache->reserve(c.sequence, 4).ok());
  assert_string_equal(c.listener.take().c_str(), "");
}

}  // namespace
}  // namespace tandem

int main() {
  using namespace tandem;
  const CMUnitTest tests[] = {
      cmocka_unit_test(rollbacks_come_windows_first_then_lengths),
      cmocka_unit_test(what_is_lost_is_rolled_back_before_a_change),
      cmocka_unit_test(a_rollback_that_fails_is_made_again),
      cmocka_unit_test(every_change_is_told),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
