// SPDX-License-Identifier: MIT
// Lists the sequences of a cache, and returns the memory that dropped and truncated sequences leave.
#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int64_t kExtentTokens = 2048;

int64_t host_bytes(const World& world) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, world.cache);
  return stats.host_kv_bytes;
}

int64_t trim(const World& world) {
  int64_t n_bytes = -1;
  OK(tandem_cache_trim, &n_bytes, world.cache);
  return n_bytes;
}

uint64_t digest(const World& world, int64_t sequence) {
  uint64_t digest = 0;
  OK(tandem_sequence_digest, &digest, world.cache, sequence);
  return digest;
}

void append(const World& world, int64_t sequence, int64_t n_tokens, int64_t seed) {
  const Tensor k({n_tokens, kKvHeads, kDim}, seed), v({n_tokens, kKvHeads, kDim}, seed + 1);
  for (int32_t l = 0; l < kLayers; ++l)
    OK(tandem_sequence_append, world.cache, sequence, l, &k.view, l == 0 ? &v.view : nullptr, nullptr);
}

int64_t new_sequence(const World& world, int64_t n_tokens, int64_t seed) {
  int64_t made = 0;
  OK(tandem_sequence_create, &made, world.cache);
  append(world, made, n_tokens, seed);
  return made;
}

std::vector<int64_t> sequences(const World& world) {
  int64_t n = -1;
  OK(tandem_cache_sequences, nullptr, 0, &n, world.cache);
  std::vector<int64_t> ids(static_cast<size_t>(n) + 1, -7);
  OK(tandem_cache_sequences, ids.data(), n, &n, world.cache);
  assert_int_equal(ids.back(), -7);
  ids.pop_back();
  return ids;
}

void sequences_are_listed(void**) {
  const World world;
  assert_true(sequences(world) == (std::vector<int64_t>{world.sequence, world.other}));
  const int64_t more = new_sequence(world, 1, 5);
  OK(tandem_sequence_drop, world.cache, world.other);
  assert_true(sequences(world) == (std::vector<int64_t>{world.sequence, more}));
  int64_t first = -1, n = -1;
  OK(tandem_cache_sequences, &first, 1, &n, world.cache);
  assert_int_equal(first, world.sequence);
  assert_int_equal(n, 2);
  OK(tandem_sequence_drop, world.cache, world.sequence);
  OK(tandem_sequence_drop, world.cache, more);
  assert_true(sequences(world).empty());
}

void memory_that_sequences_have_left_is_given_back(void**) {
  const World world;
  const int64_t first = new_sequence(world, kExtentTokens, 10), second = new_sequence(world, kExtentTokens, 20),
                third = new_sequence(world, kExtentTokens, 30);
  const int64_t all = host_bytes(world), of_extent = all / 4;  // the world's own sequence has an extent, too
  assert_int_equal(trim(world), 0);
  const uint64_t before = digest(world, third), of_world = digest(world, world.sequence);
  OK(tandem_sequence_drop, world.cache, second);
  assert_int_equal(host_bytes(world), all);
  assert_int_equal(trim(world), of_extent);
  assert_int_equal(host_bytes(world), all - of_extent);
  assert_int_equal(trim(world), 0);
  OK(tandem_sequence_truncate, world.cache, first, 5);
  assert_int_equal(trim(world), 0);  // a page of the extent is in use
  OK(tandem_sequence_drop, world.cache, first);
  OK(tandem_cache_trim, nullptr, world.cache);
  assert_int_equal(host_bytes(world), all - 2 * of_extent);
  assert_true(digest(world, third) == before);
  assert_true(digest(world, world.sequence) == of_world);
}

// Extents without memory are the first to be given memory again, and work like any other extent.
void memory_is_taken_anew(void**) {
  const World world;
  const int64_t kept = new_sequence(world, 100, 10), gone = new_sequence(world, 3 * kExtentTokens, 20);
  const uint64_t kept_digest = digest(world, kept);
  const int64_t all = host_bytes(world);
  const uint64_t wanted = digest(world, gone);
  OK(tandem_sequence_drop, world.cache, gone);
  const int64_t given = trim(world);
  assert_true(given > 0);
  const int64_t again = new_sequence(world, 3 * kExtentTokens, 20);
  assert_true(digest(world, again) == wanted);
  assert_int_equal(host_bytes(world), all);
  append(world, kept, 2 * kExtentTokens, 40);
  append(world, again, 2 * kExtentTokens, 50);
  OK(tandem_sequence_truncate, world.cache, kept, 100);
  OK(tandem_sequence_truncate, world.cache, again, 3 * kExtentTokens);
  assert_true(digest(world, kept) == kept_digest);
  assert_true(digest(world, again) == wanted);
  LayerCall call(world.sequence, 0, 3, 60);
  OK(tandem_attend, world.session, &call.args);
}

void an_empty_cache_gives_all_back(void**) {
  const World world;
  for (int i = 0; i < 3; ++i) {
    for (const int64_t id : sequences(world)) OK(tandem_sequence_drop, world.cache, id);
    const int64_t held = host_bytes(world);
    assert_true(held > 0);
    assert_int_equal(trim(world), held);
    assert_int_equal(host_bytes(world), 0);
    (void)new_sequence(world, 1 + i * kExtentTokens, i);
  }
}

void what_is_refused(void**) {
  const World world;
  int64_t n = -7;
  tandem_error* error = nullptr;
  int32_t status = tandem_cache_sequences(nullptr, 1, &n, world.cache, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "sequences", "NULL");
  status = tandem_cache_sequences(&n, -1, &n, world.cache, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "capacity", "-1");
  status = tandem_cache_sequences(nullptr, 0, nullptr, world.cache, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_ARGUMENT, "n_sequences", "NULL");
  status = tandem_cache_trim(&n, nullptr, &error);
  assert_refused(status, error, TANDEM_ERROR_INVALID_HANDLE, "cache", "NULL");
  assert_int_equal(n, -7);
}

static_assert(TANDEM_VERSION_AT_LEAST(0, 2, 0) && TANDEM_VERSION_AT_LEAST(0, 1, 200) && !TANDEM_VERSION_AT_LEAST(0, 2, 1) &&
              !TANDEM_VERSION_AT_LEAST(1, 0, 0));

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(sequences_are_listed), cmocka_unit_test(memory_that_sequences_have_left_is_given_back),
      cmocka_unit_test(memory_is_taken_anew), cmocka_unit_test(an_empty_cache_gives_all_back),
      cmocka_unit_test(what_is_refused),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
