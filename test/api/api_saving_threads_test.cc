// SPDX-License-Identifier: MIT
// One thread attends sequences in a session. Other threads save and load other sequences with the same session. Each thread
// must get the results that it would get alone. For use with ThreadSanitizer.
#include <atomic>
#include <thread>

#include "saved_world.h"

using namespace tandem_test;

namespace {

constexpr int kSavers = 3, kRounds = 12;

int64_t prompted(const World& world, int64_t n_tokens, int64_t seed) {
  int64_t made = 0;
  OK(tandem_sequence_create, &made, world.cache);
  for (int32_t l = 0; l < kLayers; ++l) OK(attend_once, world, made, l, n_tokens, seed);
  return made;
}

// Only counts errors, because these threads must not fail the test.
struct Saver {
  const World* world;
  int64_t sequence;
  int n_wrong = 0;

  void run() {
    tandem_save_options to_save = TANDEM_SAVE_OPTIONS_INIT;
    tandem_load_options to_load = TANDEM_LOAD_OPTIONS_INIT;
    to_save.session = to_load.session = world->session;
    MemoryFile first;
    for (int i = 0; i < kRounds; ++i) {
      MemoryFile file;
      n_wrong += tandem_sequence_save(world->cache, sequence, write_to_memory, &file, &to_save, nullptr) != TANDEM_OK;
      if (i == 0) first = file;
      n_wrong += file.bytes != first.bytes;
      int64_t loaded = 0;
      n_wrong += tandem_sequence_load(&loaded, world->cache, read_from_memory, &file, &to_load, nullptr) != TANDEM_OK;
      n_wrong += tandem_sequence_drop(world->cache, sequence, nullptr) != TANDEM_OK;
      sequence = loaded;
    }
  }
};

void others_attend_meanwhile(void**) {
  const World world, alone;
  Saver savers[kSavers];
  for (int i = 0; i < kSavers; ++i) savers[i] = {&world, prompted(world, 200 + i, 50 * i)};
  const int64_t talking = prompted(world, 70, 7), twin = prompted(alone, 70, 7);
  std::vector<std::thread> threads;
  std::atomic<int> n_running{kSavers};
  for (Saver& saver : savers)
    threads.emplace_back([&] {
      saver.run();
      --n_running;
    });
  int n_steps = 0, n_wrong = 0;
  for (; n_running > 0 || n_steps < 30; ++n_steps)
    for (int32_t l = 0; l < kLayers; ++l) {
      LayerCall a(talking, l, 1, 100 + n_steps), b(twin, l, 1, 100 + n_steps);
      n_wrong += tandem_attend(world.session, &a.args, nullptr) != TANDEM_OK;
      n_wrong += tandem_attend(alone.session, &b.args, nullptr) != TANDEM_OK || a.o.values != b.o.values;
    }
  for (std::thread& thread : threads) thread.join();
  assert_int_equal(n_wrong, 0);
  for (const Saver& saver : savers) assert_int_equal(saver.n_wrong, 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(others_attend_meanwhile)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
