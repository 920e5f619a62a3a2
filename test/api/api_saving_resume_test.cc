// SPDX-License-Identifier: MIT
// A loaded sequence continues like the saved one, bit for bit, under every policy: decode steps, appends, partial appends
// and speculative tokens. Saving itself changes nothing: a twin that was never saved gives the same bits.
#include "patterned_world.h"
#include "saved_world.h"

using namespace tandem_test;

namespace {

const char* const kPolicies[] = {"all", "streaming", "hgca", "hip", "patterns"};

struct Policies {
  Pruned pruned{16, 64, {stage_of(TANDEM_JUDGE_BOUNDS, 16, 128, 7), stage_of(TANDEM_JUDGE_EXACT, 8, 64, 3)}};
  Patterned patterned{int64_t{kQHeads} * kLayers, {vertical_slash(64, 64), a_shape(16, 64), kFull, block_sparse(3)}};

  tandem_session_options of(const std::string& policy) const {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    if (policy == "hip") options = pruned.options;
    if (policy == "patterns") options = patterned.options;
    for (const char* name : kPolicies)
      if (policy == name) options.policy = name;
    options.window_tokens = 100;
    if (policy == "hgca" || policy == "streaming") options.sink_tokens = 4;
    if (policy == "hgca") options.halo_tokens = 3, options.beta = 0.8f;
    return options;
  }
};

tandem_cache_options pages(int32_t page_tokens) {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.page_tokens = page_tokens;
  return options;
}

std::vector<tandem_layer_options> layers_of(const std::string& policy) {
  auto layers = world_layers();
  if (policy == "hgca") layers[1].soft_cap = 30;
  return layers;
}

void partial(const Keeper& keeper, int64_t n, int64_t seed) {
  for (int32_t l = 0; l < kLayers; ++l) {
    Batch batch(keeper.machine, l, {{keeper.ids[0], n}}, seed + 100 * l);
    batch.args.flags = TANDEM_ATTEND_PARTIAL;
    OK(tandem_attend, keeper.session, &batch.args);
  }
}

using Life = void (*)(const Keeper&);
constexpr Life kLives[] = {
    [](const Keeper&) {},
    [](const Keeper& keeper) { (void)keeper.turn({700}, 1); },
    [](const Keeper& keeper) {
      (void)keeper.turn({700}, 1);
      for (int i = 0; i < 31; ++i) (void)keeper.turn({1}, 10 + i);
    },
    [](const Keeper& keeper) {  // queries wait to be counted
      partial(keeper, 400, 1);
      partial(keeper, 21, 2);
    },
    [](const Keeper& keeper) {  // positions with a gap, and a token decoded after the gap
      (void)keeper.turn({600}, 1);
      OK(tandem_sequence_remove, keeper.cache, keeper.ids[0], 50, 30, 0);
      (void)keeper.turn({1}, 2);
    },
};

void guess(const Keeper& keeper, int64_t seed, std::vector<float>* all) {
  for (int32_t l = 0; l < kLayers; ++l) {
    Batch batch(keeper.machine, l, {{keeper.ids[0], 3}}, seed + 100 * l);
    batch.args.flags = TANDEM_ATTEND_SPECULATIVE;
    OK(tandem_attend, keeper.session, &batch.args);
    const auto answers = batch.answers();
    all->insert(all->end(), answers.begin(), answers.end());
  }
  const int64_t kept[] = {0, 1};
  OK(tandem_session_commit, keeper.session, keeper.ids[0], kept, 2);
}

// Returns the following answers and the keys that the next query would attend.
std::vector<float> go_on(const Keeper& keeper) {
  std::vector<float> all;
  const auto add = [&](const std::vector<float>& more) { all.insert(all.end(), more.begin(), more.end()); };
  for (int i = 0; i < 40; ++i) add(keeper.turn({1}, 100 + i));
  guess(keeper, 200, &all);
  add(keeper.turn({1}, 300));
  add(keeper.turn({7}, 400));
  for (int i = 0; i < 20; ++i) add(keeper.turn({1}, 500 + i));
  for (int32_t l = 0; l < kLayers; ++l)
    for (int32_t h = 0; h < kKvHeads; ++h)
      for (const int64_t token : keeper.listed(keeper.ids[0], h, l)) all.push_back(static_cast<float>(token));
  return all;
}

bool are_same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void goes_on_as_before(void**) {
  const Policies policies;
  for (const char* policy : kPolicies) {
    const Machine machine(layers_of(policy));
    const tandem_session_options options = policies.of(policy);
    for (size_t life = 0; life < std::size(kLives); ++life) {
      Keeper keeper(machine, options, pages(16)), twin(machine, options, pages(16)), other(machine, options, pages(64), 0);
      keeper.scatter();
      kLives[life](keeper);
      kLives[life](twin);
      MemoryFile file = save(keeper.cache, keeper.ids[0], keeper.session);
      other.ids = {load(other.cache, file, other.session)};
      assert_true(save(other.cache, other.ids[0], other.session) == file);
      const int64_t original = keeper.ids[0], loaded = load(keeper.cache, file, keeper.session);
      const std::vector<float> expected = go_on(twin);
      if (!are_same(go_on(keeper), expected)) fail_msg("%s, life %zu: saving has changed the sequence", policy, life);
      if (!are_same(go_on(other), expected)) fail_msg("%s, life %zu: loaded elsewhere", policy, life);
      keeper.ids[0] = loaded;
      if (!are_same(go_on(keeper), expected)) fail_msg("%s, life %zu: loaded beside the original", policy, life);
      assert_true(keeper.digest(original) == keeper.digest(loaded));
    }
  }
}

// Under "hgca" a session with a longer or shorter window accepts the statistics of another session. No key is attended
// twice: the lists ascend, and the window's tokens are consecutive up to the end.
void windows_may_differ(void**) {
  const Policies policies;
  const Machine machine(world_layers());
  const tandem_session_options options = policies.of("hgca");
  Keeper keeper(machine, options, pages(16));
  kLives[2](keeper);
  MemoryFile file = save(keeper.cache, keeper.ids[0], keeper.session);
  for (const int64_t window : {20, 99, 101, 300, 5000}) {
    tandem_session_options changed = options;
    changed.window_tokens = window;
    Keeper other(machine, changed, pages(16), 0);
    other.ids = {load(other.cache, file, other.session)};
    for (int i = 0; i < 5; ++i) {
      (void)other.turn({1}, 100 + i);
      for (int32_t h = 0; h < kKvHeads; ++h) {
        const std::vector<int64_t> tokens = other.listed(other.ids[0], h);
        assert_true(std::adjacent_find(tokens.begin(), tokens.end(), std::greater_equal<>()) == tokens.end());
        const int64_t length = other.length(other.ids[0]), n_newest = std::min(window, length);
        assert_true(std::ssize(tokens) >= n_newest);
        assert_int_equal(tokens[tokens.size() - static_cast<size_t>(n_newest)], length - n_newest);
      }
    }
  }
}

// The rows are loaded even without a session's statistics.
void without_statistics(void**) {
  const Policies policies;
  const Machine machine(world_layers());
  Keeper hgca(machine, policies.of("hgca"), pages(16)), all(machine, policies.of("all"), pages(16));
  kLives[2](hgca);
  kLives[2](all);
  MemoryFile file = save(hgca.cache, hgca.ids[0], hgca.session);
  Keeper loaded(machine, policies.of("all"), pages(32), 0);
  loaded.ids = {load(loaded.cache, file)};
  const std::vector<float> expected = all.turn({1}, 9), got = loaded.turn({1}, 9);
  assert_int_equal(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) assert_true(std::fabs(got[i] - expected[i]) < 1e-4f);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(goes_on_as_before),
      cmocka_unit_test(windows_may_differ),
      cmocka_unit_test(without_statistics),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
