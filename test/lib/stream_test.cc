// SPDX-License-Identifier: MIT
// Random streams of calls compared with the oracle. TANDEM_TEST_SEED=<seed> TANDEM_TEST_FILTER=<test> repeats one stream.
// TANDEM_TEST_FULL=3 runs three times as many streams as TANDEM_TEST_FULL=1.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "lib/stream_world.h"
#include "one_in.h"
#include "with_cmocka.h"

namespace {

using harness::Policies;
using harness::StreamWorld;

harness::NanAllocator* allocator = nullptr;
std::unique_ptr<harness::Engine> engine;

void run_streams(const char* name, uint64_t first_seed, int64_t n_streams, int64_t n_operations, Policies policies) {
  reference::GateShares shares;
  int64_t n_attends = 0, n_uncertain = 0;
  const uint64_t only = harness::seed_override(0);
  for (int64_t i = 0; i < (only ? 1 : n_streams); ++i) {
    StreamWorld world(only ? only : first_seed + static_cast<uint64_t>(i), *engine, policies);
    world.run(n_operations);
    world.check_everything();
    shares.include(world.shares());
    n_attends += world.n_attends();
    n_uncertain += world.n_uncertain();
    const std::string fault = allocator->fault();
    harness::expect(fault.empty(), "stream seed " + std::to_string(first_seed + static_cast<uint64_t>(i)) + ": " + fault);
  }
  std::printf(
      "%-10s %lld streams, %lld attends, %lld close calls; share of the bound used: naive %.3f, eps mass %.3f, lse %.3f\n",
      name, static_cast<long long>(only ? 1 : n_streams), static_cast<long long>(n_attends),
      static_cast<long long>(n_uncertain), shares.naive, shares.mass, shares.lse);
}

int64_t n_streams_of(int64_t fast, int64_t full) {
  return tandem::test::some_of((harness::full_run() ? full * harness::full_factor() : fast) / harness::kSlowness);
}

void test_exact_streams(void**) { run_streams("exact", 1, n_streams_of(40, 500), 30, Policies::kExact); }

void test_hgca_streams(void**) { run_streams("hgca", 100001, n_streams_of(30, 400), 30, Policies::kHgca); }

// When more tokens are committed than the window holds, each query counts for the keys that were in the window at its time.
void test_hgca_long_trees(void**) { run_streams("long trees", 300001, n_streams_of(16, 100), 30, Policies::kHgcaLongTrees); }

// A partial chunk belongs to an append, whatever its length.
void test_hgca_short_chunks(void**) {
  run_streams("short chunks", 400001, n_streams_of(16, 100), 30, Policies::kHgcaShortChunks);
}

// The same calls give the same bits in a second run, and on one, two and four threads.
void test_same_bits(void**) {
  const int64_t n_streams = n_streams_of(8, 20);
  const harness::Engine threads[] = {harness::Engine({1, nullptr, nullptr}), harness::Engine({2, nullptr, nullptr}),
                                     harness::Engine({4, nullptr, nullptr})};
  for (int64_t i = 0; i < n_streams; ++i) {
    const auto seed = 200001 + static_cast<uint64_t>(i);
    const Policies policies = i % 2 ? Policies::kExact : Policies::kHgca;
    uint64_t hashes[4];
    for (int run = 0; run < 4; ++run) {
      StreamWorld world(seed, run < 3 ? threads[run] : threads[1], policies);
      world.run(20);
      hashes[run] = world.output_hash();
    }
    const std::string context = "stream seed " + std::to_string(seed);
    harness::expect(hashes[1] == hashes[3], context + ": a second run gives other bits");
    harness::expect(hashes[0] == hashes[1] && hashes[1] == hashes[2],
                    context + ": another number of threads gives other bits");
  }
}

int set_up(void**) {
  allocator = new harness::NanAllocator;
  engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, nullptr, allocator});
  return 0;
}

int tear_down(void**) {
  engine.reset();
  const bool clean = (allocator->n_live() == 0 || harness::any_stopped()) && allocator->fault().empty();
  if (!clean)
    std::fprintf(stderr, "allocator: %lld blocks left; %s\n", static_cast<long long>(allocator->n_live()),
                 allocator->fault().c_str());
  delete allocator;
  return clean ? 0 : 1;
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(test_exact_streams), cmocka_unit_test(test_hgca_streams),
                              cmocka_unit_test(test_hgca_long_trees), cmocka_unit_test(test_hgca_short_chunks),
                              cmocka_unit_test(test_same_bits)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
