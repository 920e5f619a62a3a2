// SPDX-License-Identifier: MIT
// An append within a sequence's reservation, or within the lengths of an open step, never lacks memory. The cache's cap is
// nearly used up, and sequences are created, forked, appended and selected in the meantime.
#include <algorithm>
#include <array>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kPageTokens = 16;
constexpr int64_t kExtentTokens = 2048, kMawTokens = 2048;  // units in which memory is allocated

// Returns a cap for `extents` extents of pages and for the MAW and selections of about `states` blocks of a layer.
int64_t cap_of(int64_t extents, int64_t states) {
  const int64_t token_bytes = kLayers * kKvHeads * kDim * 2 * 2;
  const int64_t state_bytes = kMawTokens * (kQHeads + kKvHeads) * 4;
  return extents * kExtentTokens * token_bytes + states * state_bytes;
}

struct CappedWorld {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;

  explicit CappedWorld(int64_t cap_bytes) {
    tandem_engine_options engine_options = small_engine_options();
    engine_options.n_threads = 1;
    OK(tandem_engine_create, &engine, &engine_options);
    const std::vector<tandem_layer_options> layers(kLayers, plain_layer());
    OK(tandem_model_create, &model, layers.data(), kLayers);
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.page_tokens = kPageTokens;
    options.host_cap_bytes = cap_bytes;
    OK(tandem_cache_create, &cache, engine, model, &options);
  }
  ~CappedWorld() {
    tandem_cache_release(cache);
    tandem_model_release(model);
    tandem_engine_release(engine);
  }
  CappedWorld(const CappedWorld&) = delete;

  tandem_session* session(const char* policy, int32_t expected = TANDEM_OK) const {
    tandem_session* made = nullptr;
    assert_int_equal(try_session(policy, &made), expected);
    return made;
  }
  int32_t try_session(const char* policy, tandem_session** made) const {
    tandem_session_options options = world_session_options();
    options.policy = policy;
    return tandem_session_create(made, cache, &options, nullptr);
  }
  int64_t sequence() const {
    int64_t made = 0;
    OK(tandem_sequence_create, &made, cache);
    return made;
  }
  int32_t append(int64_t sequence, int32_t layer_idx, int64_t n) const {
    const Tensor k({n, kKvHeads, kDim}), v({n, kKvHeads, kDim}, 1);
    return tandem_sequence_append(cache, sequence, layer_idx, &k.view, &v.view, nullptr, nullptr);
  }
  static int32_t attend(tandem_session* session, int64_t sequence, int32_t layer_idx, int64_t n) {
    LayerCall call(sequence, layer_idx, n, 7);
    call.args.v = &call.v.view;
    return tandem_attend(session, &call.args, nullptr);
  }
  // Uses up the rest of the cap with pages of other sequences.
  void fill() const {
    for (int64_t n = kExtentTokens; n > 0;)
      if (tandem_sequence_reserve(cache, sequence(), n, nullptr) != TANDEM_OK) n /= 2;
  }
};

void test_a_session_is_refused_instead(void**) {
  const CappedWorld world(cap_of(1, 1));
  const int64_t sequence = world.sequence();
  OK(tandem_sequence_reserve, world.cache, sequence, 600);
  tandem_cache_stats before = TANDEM_CACHE_STATS_INIT, after = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &before, world.cache);
  (void)world.session("hgca", TANDEM_ERROR_CAPACITY);  // each of two layers needs a block
  OK(tandem_cache_get_stats, &after, world.cache);
  assert_int_equal(before.host_session_bytes, after.host_session_bytes);
  tandem_session* all = world.session("all");  // this session needs no memory
  for (int32_t l = 0; l < kLayers; ++l) {
    assert_int_equal(world.append(sequence, l, 300), TANDEM_OK);
    assert_int_equal(CappedWorld::attend(all, sequence, l, 300), TANDEM_OK);
  }
  tandem_session_release(all);
}

void test_a_session_that_comes_later_has_its_state(void**) {
  const CappedWorld world(cap_of(1, 2));
  const int64_t sequence = world.sequence();
  OK(tandem_sequence_reserve, world.cache, sequence, 600);
  tandem_session* later = world.session("hgca");
  world.fill();
  for (int32_t l = 0; l < kLayers; ++l) {
    assert_int_equal(world.append(sequence, l, 100), TANDEM_OK);
    assert_int_equal(CappedWorld::attend(later, sequence, l, 400), TANDEM_OK);
    for (int i = 0; i < 100; ++i) assert_int_equal(CappedWorld::attend(later, sequence, l, 1), TANDEM_OK);
  }
  tandem_session_release(later);
}

void test_an_open_step_has_reserved(void**) {
  const CappedWorld world(cap_of(1, 1));
  const int64_t sequence = world.sequence(), q_len = 20;
  tandem_session* session = world.session("all");
  OK(tandem_step_begin, session, &sequence, &q_len, 1, nullptr);
  (void)world.session("hgca", TANDEM_ERROR_CAPACITY);
  for (int32_t l = 0; l < kLayers; ++l) assert_int_equal(CappedWorld::attend(session, sequence, l, q_len), TANDEM_OK);
  OK(tandem_step_end, session, nullptr);
  tandem_session_release(session);
}

// A step that is rolled back and a removal from the middle keep the unused rest of a reservation.
void test_what_is_left_stays_reserved(void**) {
  const CappedWorld world(cap_of(1, 0));
  const int64_t sequence = world.sequence(), q_len = 5;
  tandem_session* session = world.session("all");
  OK(tandem_sequence_reserve, world.cache, sequence, 500);
  for (int32_t l = 0; l < kLayers; ++l) assert_int_equal(world.append(sequence, l, 100), TANDEM_OK);
  OK(tandem_step_begin, session, &sequence, &q_len, 1, nullptr);
  assert_int_equal(CappedWorld::attend(session, sequence, 0, q_len), TANDEM_OK);
  assert_int_equal(tandem_step_end(session, nullptr, nullptr), TANDEM_ERROR_INVALID_STATE);  // layer 1 is missing
  OK(tandem_sequence_remove, world.cache, sequence, 10, 30, 0);
  world.fill();
  for (int32_t l = 0; l < kLayers; ++l) assert_int_equal(CappedWorld::attend(session, sequence, l, 400), TANDEM_OK);
  int64_t length = 0;
  OK(tandem_sequence_length, &length, world.cache, sequence, 0);
  assert_int_equal(length, 470);
  tandem_session_release(session);
}

void test_a_truncation_gives_back(void**) {
  const CappedWorld world(cap_of(1, 0));
  const int64_t sequence = world.sequence(), other = world.sequence();
  OK(tandem_sequence_reserve, world.cache, sequence, kExtentTokens);
  assert_int_equal(tandem_sequence_reserve(world.cache, other, 1, nullptr), TANDEM_ERROR_CAPACITY);
  OK(tandem_sequence_truncate, world.cache, sequence, 0);
  OK(tandem_sequence_reserve, world.cache, other, kExtentTokens);
}

// Runs all operations that allocate memory in random order.
class Stream {
 public:
  Stream(const CappedWorld& world, int64_t seed) : world_(world), seed_(seed) {}
  ~Stream() {
    for (Party& party : parties_) tandem_session_release(party.session);
  }
  void run(int n_steps) {
    for (int i = 0; i < n_steps; ++i) (this->*kOps[static_cast<size_t>(pick(static_cast<int64_t>(std::size(kOps))))])();
    for (Party& party : parties_) end_step(party);
  }
  int64_t n_kept_promises = 0, n_refused_sessions = 0, n_refused = 0;

 private:
  struct Known {
    int64_t id = 0, reserved = 0;  // total tokens
    std::array<int64_t, kLayers> lengths{};
    bool in_step = false;
    bool is_even() const { return lengths[0] == lengths[1]; }
  };
  struct Party {
    tandem_session* session = nullptr;
    int64_t stepped = 0, q_len = 0;  // stepped: sequence of its open step; 0: no step is open
    int32_t n_layers = 0;            // layers attended in the step
  };
  using Op = void (Stream::*)();
  static const std::array<Op, 13> kOps;

  int64_t pick(int64_t n) {
    const auto x = static_cast<int64_t>((noise(n_picked_++, seed_) + 0.5f) * 16777216.0f);
    return x % n;
  }
  Known* any() {
    if (known_.empty()) return nullptr;
    Known& found = known_[static_cast<size_t>(pick(static_cast<int64_t>(known_.size())))];
    return found.in_step ? nullptr : &found;
  }
  Known* find(int64_t id) {
    return &*std::find_if(known_.begin(), known_.end(), [&](const Known& k) { return k.id == id; });
  }
  Party* any_party() {
    return parties_.empty() ? nullptr : &parties_[static_cast<size_t>(pick(static_cast<int64_t>(parties_.size())))];
  }
  // Records an append of n tokens that ended with `status`.
  void note_append(Known& known, int32_t layer_idx, int64_t n, int32_t status) {
    int64_t& length = known.lengths[static_cast<size_t>(layer_idx)];
    if (length + n <= known.reserved) {
      ++n_kept_promises;
      assert_int_equal(status, TANDEM_OK);
    }
    if (status != TANDEM_OK) assert_int_equal(status, TANDEM_ERROR_CAPACITY);
    n_refused += status != TANDEM_OK;
    if (status == TANDEM_OK) length += n;
  }

  void create_sequence() {
    if (known_.size() < 6) known_.push_back({world_.sequence()});
  }
  void reserve() {
    Known* known = any();
    if (known == nullptr) return;
    const int64_t n = 1 + pick(pick(3) == 0 ? 2500 : 300),
                  longest = *std::max_element(known->lengths.begin(), known->lengths.end());
    const int32_t status = tandem_sequence_reserve(world_.cache, known->id, n, nullptr);
    n_refused += status != TANDEM_OK;
    if (status == TANDEM_OK) known->reserved = std::max(known->reserved, longest + n);
  }
  void append() {
    Known* known = any();
    if (known == nullptr) return;
    const auto layer_idx = static_cast<int32_t>(pick(kLayers));
    const int64_t n = 1 + pick(120);
    note_append(*known, layer_idx, n, world_.append(known->id, layer_idx, n));
  }
  void append_evenly() {
    Known* known = any();
    if (known == nullptr) return;
    for (int32_t l = 0; l < kLayers; ++l) {
      const int64_t n =
          *std::max_element(known->lengths.begin(), known->lengths.end()) + 1 - known->lengths[static_cast<size_t>(l)];
      note_append(*known, l, n, world_.append(known->id, l, n));
    }
  }
  void attend() {
    Known* known = any();
    Party* party = any_party();
    if (known == nullptr || party == nullptr || party->stepped != 0) return;
    const auto layer_idx = static_cast<int32_t>(pick(kLayers));
    const int64_t n = pick(2) == 0 ? 1 : 1 + pick(60);
    note_append(*known, layer_idx, n, CappedWorld::attend(party->session, known->id, layer_idx, n));
  }
  void begin_step() {
    Known* known = any();
    Party* party = any_party();
    if (known == nullptr || party == nullptr || party->stepped != 0 || !known->is_even()) return;
    const int64_t q_len = 1 + pick(40);
    const int32_t status = tandem_step_begin(party->session, &known->id, &q_len, 1, nullptr, nullptr);
    if (status != TANDEM_OK) return assert_int_equal(status, TANDEM_ERROR_CAPACITY);
    known->in_step = true;
    party->stepped = known->id;
    party->q_len = q_len;
    party->n_layers = 0;
  }
  void go_on_with_step() {
    Party* party = any_party();
    if (party == nullptr || party->stepped == 0 || party->n_layers == kLayers) return;
    const int32_t status = CappedWorld::attend(party->session, party->stepped, party->n_layers, party->q_len);
    assert_int_equal(status, TANDEM_OK);
    ++n_kept_promises;
    ++party->n_layers;
  }
  void end_step(Party& party) {
    if (party.stepped == 0) return;
    Known& known = *find(party.stepped);
    const bool is_whole = party.n_layers == kLayers;
    assert_int_equal(tandem_step_end(party.session, nullptr, nullptr), is_whole ? TANDEM_OK : TANDEM_ERROR_INVALID_STATE);
    for (int64_t& length : known.lengths) length += is_whole ? party.q_len : 0;
    known.in_step = false;
    party.stepped = 0;
  }
  void end_some_step() {
    if (Party* party = any_party(); party != nullptr) end_step(*party);
  }
  void create_session() {
    if (parties_.size() >= 3) return;
    Party party;
    const int32_t status = world_.try_session(pick(3) == 0 ? "all" : "hgca", &party.session);
    if (status == TANDEM_OK) return parties_.push_back(party);
    assert_int_equal(status, TANDEM_ERROR_CAPACITY);
    ++n_refused_sessions;
  }
  void release_session() {
    if (parties_.empty() || pick(4) != 0 || parties_.front().stepped != 0) return;
    tandem_session_release(parties_.front().session);
    parties_.erase(parties_.begin());
  }
  void fork() {
    Known* known = any();
    if (known == nullptr || !known->is_even() || known_.size() >= 6) return;
    Known made = *known;
    const int32_t status = tandem_sequence_fork(&made.id, world_.cache, known->id, nullptr);
    if (status != TANDEM_OK) return assert_int_equal(status, TANDEM_ERROR_CAPACITY);
    made.reserved = 0;
    known_.push_back(made);
  }
  void shorten() {
    Known* known = any();
    if (known == nullptr || pick(3) != 0) return;
    const int64_t shortest = *std::min_element(known->lengths.begin(), known->lengths.end());
    if (pick(3) == 0) {
      OK(tandem_sequence_drop, world_.cache, known->id);
      known_.erase(known_.begin() + (known - known_.data()));
    } else if (pick(2) == 0 || !known->is_even() || shortest < 3) {
      const int64_t n = pick(shortest + 1);
      OK(tandem_sequence_truncate, world_.cache, known->id, n);
      known->lengths.fill(n);
      known->reserved = n;
    } else {
      const int64_t first = pick(shortest - 1), n = 1 + pick(shortest - first - 1);
      const int32_t status = tandem_sequence_remove(world_.cache, known->id, first, n, 0, nullptr);
      if (status != TANDEM_OK) return assert_int_equal(status, TANDEM_ERROR_CAPACITY);
      for (int64_t& length : known->lengths) length -= n;
      known->reserved = std::max(known->lengths[0], known->reserved - n);
    }
  }

  const CappedWorld& world_;
  const int64_t seed_;
  int64_t n_picked_ = 0;
  std::vector<Known> known_;
  std::vector<Party> parties_;
};

const std::array<Stream::Op, 13> Stream::kOps = {
    &Stream::create_sequence,
    &Stream::reserve,
    &Stream::append,
    &Stream::append_evenly,
    &Stream::attend,
    &Stream::begin_step,
    &Stream::go_on_with_step,
    &Stream::go_on_with_step,
    &Stream::end_some_step,
    &Stream::create_session,
    &Stream::fork,
    &Stream::shorten,
    &Stream::release_session,
};

void test_every_order(void**) {
  int64_t n_kept_promises = 0, n_refused_sessions = 0, n_refused = 0;
  for (int64_t seed = 0; seed < 12; ++seed) {
    const CappedWorld world(cap_of(3, 6 + seed));
    Stream stream(world, seed);
    stream.run(500);
    n_kept_promises += stream.n_kept_promises;
    n_refused_sessions += stream.n_refused_sessions;
    n_refused += stream.n_refused;
  }
  print_message("%lld appends within reservations; %lld others and %lld sessions were refused\n",
                static_cast<long long>(n_kept_promises), static_cast<long long>(n_refused),
                static_cast<long long>(n_refused_sessions));
  assert_true(n_kept_promises > 500 && n_refused > 50 && n_refused_sessions > 10);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_a_session_is_refused_instead), cmocka_unit_test(test_a_session_that_comes_later_has_its_state),
      cmocka_unit_test(test_an_open_step_has_reserved),    cmocka_unit_test(test_what_is_left_stays_reserved),
      cmocka_unit_test(test_a_truncation_gives_back),      cmocka_unit_test(test_every_order),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
