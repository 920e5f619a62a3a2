// SPDX-License-Identifier: MIT
// Saves a sequence of 512 MiB to memory and loads it: at least 1 GB/s, best of three, after the digests agree. Also reports
// the time of copying and of hashing the same number of bytes.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <chrono>

#include "saved_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kHeads = 8, kSpeedDim = 128, kSpeedLayers = 4;
constexpr int64_t kSpeedTokens = 32768;

struct Memory {
  std::vector<unsigned char> bytes;
  size_t at = 0;
};

int32_t put(const void* data, int64_t n_bytes, void* user) {
  auto& memory = *static_cast<Memory*>(user);
  const auto n = static_cast<size_t>(n_bytes);
  if (memory.bytes.size() - memory.at < n) return 1;
  std::memcpy(memory.bytes.data() + memory.at, data, n);
  memory.at += n;
  return 0;
}

int64_t get(void* data, int64_t n_bytes, void* user) {
  auto& memory = *static_cast<Memory*>(user);
  const size_t n = std::min(static_cast<size_t>(n_bytes), memory.bytes.size() - memory.at);
  std::memcpy(data, memory.bytes.data() + memory.at, n);
  memory.at += n;
  return static_cast<int64_t>(n);
}

template <typename F>
double seconds(F work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void saves_and_loads_at_memory_speed(void**) {
  const tandem_engine_options engine_options = small_engine_options();
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  OK(tandem_engine_create, &engine, &engine_options);
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = layer.n_kv_heads = kHeads, layer.k_head_dim = kSpeedDim;
  const std::vector<tandem_layer_options> layers(kSpeedLayers, layer);
  OK(tandem_model_create, &model, layers.data(), kSpeedLayers);
  OK(tandem_cache_create, &cache, engine, model, nullptr);
  int64_t sequence = 0;
  OK(tandem_sequence_create, &sequence, cache);
  constexpr int64_t kPart = 4096;
  const Tensor k({kPart, kHeads, kSpeedDim}, 1), v({kPart, kHeads, kSpeedDim}, 2);
  for (int64_t t = 0; t < kSpeedTokens; t += kPart)
    for (int32_t l = 0; l < kSpeedLayers; ++l) OK(tandem_sequence_append, cache, sequence, l, &k.view, &v.view, nullptr);
  Memory memory;
  memory.bytes.resize(static_cast<size_t>(kSpeedTokens * kSpeedLayers * kHeads * kSpeedDim * 4 + 4096), 1);
  double save = 1e9, load = 1e9, copy = 1e9, hash = 1e9;
  std::vector<unsigned char> other(memory.bytes.size(), 1);
  uint64_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    memory.at = 0;
    save = std::min(save, seconds([&] { OK(tandem_sequence_save, cache, sequence, put, &memory, nullptr); }));
    memory.bytes.resize(memory.at);
    memory.at = 0;
    int64_t loaded = 0;
    load = std::min(load, seconds([&] { OK(tandem_sequence_load, &loaded, cache, get, &memory, nullptr); }));
    assert_true(digest_of(cache, loaded) == digest_of(cache, sequence));
    OK(tandem_sequence_drop, cache, loaded);
    copy = std::min(copy, seconds([&] { std::memcpy(other.data(), memory.bytes.data(), memory.bytes.size()); }));
    hash = std::min(hash, seconds([&] { sum += XXH3_64bits(other.data(), other.size()); }));
  }
  const double gigabytes = static_cast<double>(memory.bytes.size()) * 1e-9;
  print_message("%.2f GB: save %.2f GB/s, load %.2f GB/s; a copy %.2f GB/s, a checksum %.2f GB/s (%d)\n", gigabytes,
                gigabytes / save, gigabytes / load, gigabytes / copy, gigabytes / hash, static_cast<int>(sum % 2));
  assert_true(gigabytes / save >= 1.0 && gigabytes / load >= 1.0);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(saves_and_loads_at_memory_speed)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
