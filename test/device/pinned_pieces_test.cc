// SPDX-License-Identifier: MIT
// Memory is pinned in pieces, here of 256 KiB, and no copy is larger than a piece.
#include "device/device_side.h"
#include "lib/machine/device_memory.h"

using namespace tandem_test;

namespace {

constexpr int64_t kPiece = 256 << 10;

int64_t n_pieces(int64_t bytes) { return (bytes + kPiece - 1) / kPiece; }

void blocks_of_weights(void**) {
  const Side side(true);
  const int64_t n_pinned = counts.n_pinned, n_unpinned = counts.n_unpinned;
  const std::vector<int64_t> sizes = {1, kPiece - 1, kPiece, kPiece + 1, 5 * kPiece + 4097, 3 * kPiece};
  std::vector<std::vector<unsigned char>> blocks;
  std::vector<const void*> data;
  int64_t total = 0, wanted = 0;
  for (const int64_t size : sizes) {
    std::vector<unsigned char>& block = blocks.emplace_back(static_cast<size_t>(size));
    for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<unsigned char>(i * 7 + i / 251 + blocks.size());
    data.push_back(block.data());
    total += size;
    wanted += n_pieces(size);
  }
  tandem_weights* weights = nullptr;
  OK(tandem_weights_create, &weights, side.engine, data.data(), sizes.data(), static_cast<int32_t>(sizes.size()), nullptr);
  assert_int_equal(counts.n_pinned - n_pinned, wanted);
  tandem_weights_stats stats = TANDEM_WEIGHTS_STATS_INIT;
  OK(tandem_weights_get_stats, &stats, weights);
  assert_int_equal(stats.pinned_bytes, total);
  for (int round = 0; round < 3; ++round)
    for (size_t b = 0; b < blocks.size(); ++b) {
      void* at = nullptr;
      std::vector<unsigned char> got(blocks[b].size());
      OK(tandem_weights_use, &at, weights, static_cast<int32_t>(b), nullptr);
      device->wait();
      device->download(got.data(), at, sizes[b]);
      OK(tandem_weights_done, weights, static_cast<int32_t>(b), nullptr);
      assert_memory_equal(got.data(), blocks[b].data(), got.size());
    }
  tandem_weights_release(weights);
  assert_int_equal(counts.n_unpinned - n_unpinned, wanted);
}

// If pinning is refused in the middle, the pinned part stays and the rest is sent unpinned.
void blocks_that_are_pinned_in_part(void**) {
  const Side side(true);
  const int64_t size = 4 * kPiece + 100;
  const std::vector<unsigned char> block(static_cast<size_t>(size), 0x5a);
  const void* const data = block.data();
  controls.fail_call(stand_in::kPin, 3, TANDEM_ERROR_OUT_OF_MEMORY);
  tandem_weights* weights = nullptr;
  OK(tandem_weights_create, &weights, side.engine, &data, &size, 1, nullptr);
  tandem_weights_stats stats = TANDEM_WEIGHTS_STATS_INIT;
  OK(tandem_weights_get_stats, &stats, weights);
  assert_int_equal(stats.pinned_bytes, 2 * kPiece);
  void* at = nullptr;
  std::vector<unsigned char> got(block.size());
  OK(tandem_weights_use, &at, weights, 0, nullptr);
  device->wait();
  device->download(got.data(), at, size);
  OK(tandem_weights_done, weights, 0, nullptr);
  assert_memory_equal(got.data(), block.data(), got.size());
  tandem_weights_release(weights);
}

void pages_of_caches(void**) {
  Side side(true);
  const Side twin(false);
  tandem_session_options options = Side::options_of("all");
  options.route = "stream";
  change_session(&side, options);
  const int64_t n_pinned = counts.n_pinned;
  for (const int64_t n : {700, 1, 700, 1, 3}) attend_twins(side, twin, n, n);
  assert_true(side.stats().n_stream_parts > 0);
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, side.cache);
  assert_int_equal(stats.pinned_bytes, (counts.n_pinned - n_pinned) * kPiece);  // 512 tokens each
  assert_int_equal(counts.n_pinned - n_pinned, 3);
}

int nothing_was_more(void** state) {
  const bool is_in_pieces = counts.largest_pinned > 0 && counts.largest_pinned <= kPiece;
  return is_in_pieces ? forget(state) : -1;
}

}  // namespace

int main() {
  tandem::most_pinned_bytes = kPiece;
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(blocks_of_weights, nothing_was_more),
      cmocka_unit_test_teardown(blocks_that_are_pinned_in_part, nothing_was_more),
      cmocka_unit_test_teardown(pages_of_caches, nothing_was_more),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
