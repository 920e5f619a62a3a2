// SPDX-License-Identifier: MIT
// Offloaded weights on the stand-in, whose streams are late. Each use copies its block to a place of its own. At the end
// each copy must be the block, although other blocks were sent over its place since.
#include <random>

#include "device/device_side.h"
#include "tandem/tandem.hpp"

using namespace tandem_test;

namespace {

struct Block {
  std::vector<unsigned char> bytes;
};

std::vector<Block> make_blocks(std::mt19937_64& random, int n_blocks, int64_t most_bytes) {
  std::vector<Block> blocks(static_cast<size_t>(n_blocks));
  for (Block& block : blocks) {
    block.bytes.resize(1 + random() % static_cast<uint64_t>(most_bytes));
    for (unsigned char& byte : block.bytes) byte = static_cast<unsigned char>(random());
  }
  return blocks;
}

int32_t create(tandem_weights** weights, tandem_engine* engine, const std::vector<Block>& blocks,
               const tandem_weights_options& options, tandem_error** error) {
  std::vector<const void*> data;
  std::vector<int64_t> n_bytes;
  for (const Block& block : blocks) {
    data.push_back(block.bytes.data());
    n_bytes.push_back(static_cast<int64_t>(block.bytes.size()));
  }
  return tandem_weights_create(weights, engine, data.data(), n_bytes.data(), static_cast<int32_t>(blocks.size()), &options,
                               error);
}

tandem_weights_stats stats_of(const tandem_weights* weights) {
  tandem_weights_stats stats = TANDEM_WEIGHTS_STATS_INIT;
  OK(tandem_weights_get_stats, &stats, weights);
  return stats;
}

int64_t in_use() {
  return counts.n_allocated - counts.n_released + counts.n_pinned - counts.n_unpinned + counts.n_streams + counts.n_events;
}

#define REFUSED(call, wanted, field, text)                             \
  do {                                                                 \
    tandem_error* error = nullptr;                                     \
    const int32_t status = call;                                       \
    assert_refused(status, error, TANDEM_ERROR_##wanted, field, text); \
  } while (0)

// The copy that one use of a block has made.
struct Seen {
  int32_t block_idx;
  void* at;
};

tandem_weights* create(tandem_engine* engine, const std::vector<Block>& blocks, const tandem_weights_options& options) {
  tandem_weights* weights = nullptr;
  tandem_error* error = nullptr;
  assert_int_equal(create(&weights, engine, blocks, options, &error), TANDEM_OK);
  return weights;
}

// Returns six blocks of one length with different bytes.
std::vector<Block> six_blocks(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Block> blocks(6);
  for (Block& block : blocks) block.bytes.assign(4096, static_cast<unsigned char>(random()));
  return blocks;
}

// A walk over the blocks: mostly to the next block, at times over some or back. Up to two blocks are in use.
struct Walk {
  const std::vector<Block>& blocks;
  tandem_weights* weights;
  void* stream;
  std::vector<int32_t> held = {};
  std::vector<Seen> seen = {};

  void use(int32_t b) {
    void* data = nullptr;
    OK(tandem_weights_use, &data, weights, b, stream);
    copy(b, data);
  }
  void copy(int32_t b, void* data) {
    assert_int_equal(reinterpret_cast<uintptr_t>(data) % 256, 0);
    const auto bytes = static_cast<int64_t>(blocks[static_cast<size_t>(b)].bytes.size());
    void* const at = device->allocate(bytes);
    device->wait();  // another stream has filled it
    tandem::DeviceError error;
    device->must(device->table->copy(device->self, at, data, bytes, stream, &error), error);
    seen.push_back({b, at});
    held.push_back(b);
  }
  void done() {
    OK(tandem_weights_done, weights, held.front(), stream);
    held.erase(held.begin());
  }
  // Uses a block of a device that may fail. A refused use holds nothing. A refused end can be repeated.
  bool use_again(int32_t b) {
    void* data = nullptr;
    const bool fails = tandem_weights_use(&data, weights, b, stream, nullptr) != TANDEM_OK;
    if (fails) {
      assert_null(data);
      assert_int_equal(tandem_weights_done(weights, b, stream, nullptr), TANDEM_ERROR_INVALID_STATE);
      use(b);
    } else {
      copy(b, data);
    }
    return fails;
  }
  bool done_again() {
    const bool fails = tandem_weights_done(weights, held.front(), stream, nullptr) != TANDEM_OK;
    if (fails) OK(tandem_weights_done, weights, held.front(), stream);
    held.erase(held.begin());
    return fails;
  }
  void check() {
    tandem::DeviceError error;
    device->must(device->table->wait(device->self, stream, &error), error);
    for (const Seen& one : seen) {
      const std::vector<unsigned char>& wanted = blocks[static_cast<size_t>(one.block_idx)].bytes;
      std::vector<unsigned char> got(wanted.size());
      device->download(got.data(), one.at, static_cast<int64_t>(got.size()));
      if (got != wanted)
        fail_msg("use %d: block %d is not what was given", static_cast<int>(&one - seen.data()), one.block_idx);
      device->release(one.at);
    }
  }
};

void walk(tandem_engine* engine, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<Block> blocks = make_blocks(random, 1 + static_cast<int>(random() % 9), 5000);
  int64_t total = 0, largest = 0;
  for (const Block& block : blocks) {
    total += static_cast<int64_t>(block.bytes.size());
    largest = std::max(largest, (static_cast<int64_t>(block.bytes.size()) + 255) / 256 * 256);
  }
  tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.resident_bytes = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(total + 3000));
  const int64_t least = 2 * largest;  // two are in use at times, and places follow each other in a ring
  options.buffer_bytes = random() % 2 == 0 ? 0 : 2 * least + static_cast<int64_t>(random() % 8000);
  tandem_weights* weights = nullptr;
  tandem_error* error = nullptr;
  if (create(&weights, engine, blocks, options, &error) != TANDEM_OK) fail_msg("%s", tandem_error_message(error));
  controls.set_delay(random() % 2 == 0 ? 0 : 200'000);
  Walk walk{blocks, weights, controls.create_stream()};
  const auto n = static_cast<int32_t>(blocks.size());
  int32_t next = 0;
  for (int i = 0; i < 40; ++i) {
    walk.use(next);
    const bool holds_two = walk.held.size() == 1 && options.buffer_bytes > 0 && random() % 3 == 0;
    while (walk.held.size() > (holds_two ? 1u : 0u)) walk.done();
    next = random() % 6 == 0 ? static_cast<int32_t>(random() % static_cast<uint64_t>(n)) : (next + 1) % n;
    if (!walk.held.empty() && next == walk.held[0]) walk.done();
  }
  while (!walk.held.empty()) walk.done();
  walk.check();
  const tandem_weights_stats stats = stats_of(weights);
  assert_int_equal(stats.n_uses, 40);
  assert_true(stats.resident_bytes <= options.resident_bytes);
  tandem_weights_release(weights);
  assert_true(controls.destroy_stream(walk.stream));
  controls.set_delay(0);
}

// ---- tests -------------------------------------------------------------------------------------------------------------

void blocks_are_what_was_given(void**) {
  const Side side(true);
  const int64_t before = in_use();
  for (uint64_t seed = 0; seed < 60; ++seed) walk(side.engine, seed);
  assert_int_equal(in_use(), before);
}

// Blocks that are used in order are on the device or in flight when they are asked for, and cross the bus once a round.
void is_ahead(void**) {
  const Side side(true);
  const std::vector<Block> blocks = six_blocks(7);
  tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.resident_bytes = 2 * 4096 + 100;
  tandem_weights* const weights = create(side.engine, blocks, options);
  tandem_weights_stats stats = stats_of(weights);
  assert_int_equal(stats.n_resident, 2);
  assert_int_equal(stats.resident_bytes, 2 * 4096);
  assert_int_equal(stats.buffer_bytes, 3 * 4096);
  assert_int_equal(stats.device_bytes, 5 * 4096);
  assert_int_equal(stats.host_bytes, 4 * 4096);
  Walk walk{blocks, weights, nullptr};
  for (int32_t i = 0; i < 60; ++i) {
    walk.use(i % 6);
    walk.done();
  }
  walk.check();
  stats = stats_of(weights);
  assert_int_equal(stats.n_streamed_uses, 40);
  assert_int_equal(stats.n_ahead, 40);
  assert_in_range(stats.streamed_bytes, 40 * 4096, 43 * 4096);
  tandem_weights_release(weights);
}

void refuses(void**) {
  const Side side(true), without(false);
  const std::vector<Block> blocks(3, {std::vector<unsigned char>(1000, 1)});
  tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
  tandem_weights* weights = nullptr;
  REFUSED(create(&weights, without.engine, blocks, options, &error), UNSUPPORTED, "engine", "has no device");
  REFUSED(tandem_weights_create(&weights, side.engine, nullptr, nullptr, 0, &options, &error), INVALID_ARGUMENT, "n_blocks",
          "n_blocks = 0");
  const void* data[2] = {blocks[0].bytes.data(), nullptr};
  int64_t n_bytes[2] = {1000, 1000};
  REFUSED(tandem_weights_create(&weights, side.engine, data, n_bytes, 2, &options, &error), INVALID_ARGUMENT, "data[1]",
          "data[1] = NULL");
  n_bytes[0] = -5;
  REFUSED(tandem_weights_create(&weights, side.engine, data, n_bytes, 2, &options, &error), INVALID_ARGUMENT, "n_bytes[0]",
          "n_bytes[0] = -5");
  options.reserved = 3;
  REFUSED(create(&weights, side.engine, blocks, options, &error), INVALID_ARGUMENT, "reserved", "reserved = 3");
  options.reserved = 0;
  options.struct_size = 4;
  REFUSED(create(&weights, side.engine, blocks, options, &error), INVALID_ARGUMENT, "struct_size", "struct_size = 4");
  options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.buffer_bytes = 1023;
  REFUSED(create(&weights, side.engine, blocks, options, &error), INVALID_ARGUMENT, "buffer_bytes", "less than the 1024");
  options.buffer_bytes = -1;
  REFUSED(create(&weights, side.engine, blocks, options, &error), INVALID_ARGUMENT, "buffer_bytes", "buffer_bytes = -1");
  options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.device_cap_bytes = 3071;
  REFUSED(create(&weights, side.engine, blocks, options, &error), CAPACITY, "device_cap_bytes", "device_cap_bytes = 3071");
  options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.host_cap_bytes = 2999;
  REFUSED(create(&weights, side.engine, blocks, options, &error), CAPACITY, "host_cap_bytes", "host_cap_bytes = 2999");
  assert_null(weights);

  options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.buffer_bytes = 2048;
  tandem_error* none = nullptr;
  assert_int_equal(create(&weights, side.engine, blocks, options, &none), TANDEM_OK);
  void *at = nullptr, *other = nullptr;
  REFUSED(tandem_weights_use(&at, weights, 3, nullptr, &error), INVALID_ARGUMENT, "block_idx", "block_idx = 3");
  REFUSED(tandem_weights_done(weights, 0, nullptr, &error), INVALID_STATE, "block_idx", "block_idx = 0 is not in use");
  OK(tandem_weights_use, &at, weights, 0, nullptr);
  OK(tandem_weights_use, &at, weights, 1, nullptr);
  REFUSED(tandem_weights_use(&other, weights, 2, nullptr, &error), INVALID_STATE, "block_idx", "in use (0, 1)");
  OK(tandem_weights_use, &other, weights, 1, nullptr);  // again, at the same place
  assert_ptr_equal(at, other);
  OK(tandem_weights_done, weights, 0, nullptr);
  OK(tandem_weights_use, &other, weights, 2, nullptr);
  void* const stream = controls.create_stream();
  assert_true(controls.begin_capture(stream));
  REFUSED(tandem_weights_use(&other, weights, 2, stream, &error), INVALID_STATE, "stream", "is being captured");
  controls.free_graph(controls.end_capture(stream));
  assert_true(controls.destroy_stream(stream));
  tandem_weights_release(weights);
  REFUSED(tandem_weights_use(&other, weights, 2, nullptr, &error), INVALID_HANDLE, "weights", "has been released");
}

// A block that stays in use keeps exactly its own room while others come and go after it.
void one_may_stay_in_use(void**) {
  const Side side(true);
  const std::vector<Block> blocks = six_blocks(5);
  tandem_weights* const weights = create(side.engine, blocks, TANDEM_WEIGHTS_OPTIONS_INIT);
  controls.set_delay(50'000);
  Walk walk{blocks, weights, controls.create_stream()};
  walk.use(0);
  for (int32_t i = 1; i < 40; ++i) {
    walk.use(1 + i % 5);
    OK(tandem_weights_done, weights, walk.held.back(), walk.stream);
    walk.held.pop_back();
  }
  walk.done();
  walk.check();
  tandem_weights_release(weights);
  assert_true(controls.destroy_stream(walk.stream));
}

// A block that was skipped has not waited for anything yet, because pieces of a session go first. The data sent next to its
// place must wait in its stead: until the blocks that were there have been read, on a stream that is late.
void left_out_blocks_hand_on_what_they_wait_for(void**) {
  Side side(true);
  tandem_session_options session_options = Side::options_of("all");
  session_options.route = "stream";
  change_session(&side, session_options);
  Call prompt(kPrompt, 1);
  prompt.to_device();
  attend(side, prompt);
  const std::vector<Block> blocks = six_blocks(3);
  tandem_weights* const weights = create(side.engine, blocks, TANDEM_WEIGHTS_OPTIONS_INIT);
  Walk walk{blocks, weights, controls.create_stream()};
  for (int32_t i = 0; i < 6; ++i) {  // so the library knows that pieces come before each block
    Call call(1, 10 + i);
    call.to_device();
    attend(side, call);
    walk.use(i);
    walk.done();
    call.output();
  }
  controls.set_delay(2'000'000);
  void* const word = device->allocate(4);
  for (int i = 0; i < 50; ++i) {
    tandem::DeviceError failed;
    device->must(device->table->fill(device->self, word, i, 4, walk.stream, &failed), failed);
  }
  walk.use(0);
  walk.use(1);
  for (const int32_t b : {1, 0}) OK(tandem_weights_done, weights, b, walk.stream);
  walk.held.clear();
  walk.use(4);  // skips 2 and 3; 3 was to take the place of 0
  walk.done();
  controls.set_delay(0);
  walk.check();
  device->release(word);
  tandem_weights_release(weights);
  assert_true(controls.destroy_stream(walk.stream));
}

// The C++ layer: guards of blocks, and errors that throw.
void guards_end_uses(void**) {
  tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
  engine_options.n_threads = 1;
  engine_options.backend = stand_in::kName;
  engine_options.backend_path = STAND_IN_MODULES "/libtandem-standin.so";
  const std::vector<unsigned char> bytes(1000, 7);
  tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.buffer_bytes = 2048;
  tandem::Weights weights(tandem::Engine(engine_options), {bytes.data(), bytes.data(), bytes.data()}, {1000, 1000, 1000},
                          options);
  auto first = std::make_unique<tandem::Block>(weights, 0);
  tandem::Block second(weights, 1);
  int32_t refused = TANDEM_OK;
  try {
    tandem::Block(weights, 2);
  } catch (const tandem::Error& error) {
    refused = error.status();
  }
  assert_int_equal(refused, TANDEM_ERROR_INVALID_STATE);
  first.reset();
  tandem::Block third(weights, 2);  // at the same place
  std::vector<unsigned char> got(bytes.size());
  tandem::DeviceError error;
  device->must(device->table->copy(device->self, got.data(), third.data(), 1000, nullptr, &error), error);
  device->wait();
  assert_true(got == bytes);
  second.done();
  assert_int_equal(weights.stats().n_uses, 3);
}

// Whichever call of the device fails, the blocks have their contents, and no block is held that the caller was not given.
void survives_failing_calls(void**) {
  using namespace stand_in;
  const Side side(true);
  std::mt19937_64 random(11);
  const std::vector<Block> blocks = make_blocks(random, 5, 5000);
  const tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
  for (const stand_in::Call failing : {kCapturing, kCopyStrided, kRecordEvent, kWaitEvent}) {
    int n_refused = 0;
    for (int64_t nth = 1; nth < 60; ++nth) {
      tandem_weights* const weights = create(side.engine, blocks, options);
      Walk walk{blocks, weights, controls.create_stream()};
      controls.fail_call(failing, nth, TANDEM_ERROR_BACKEND);
      for (int32_t i = 0; i < 15; ++i) {
        n_refused += walk.use_again(i % 5);
        n_refused += walk.done_again();
      }
      controls.fail_call(failing, INT64_MAX, TANDEM_OK);
      walk.check();
      tandem_weights_release(weights);
      assert_true(controls.destroy_stream(walk.stream));
    }
    if (n_refused == 0 && failing != kCopyStrided) fail_msg("call %d was never made to fail", failing);
  }
}

// Whichever call of the device fails, nothing is left behind.
void leaves_nothing(void**) {
  const Side side(true);
  const std::vector<Block> blocks(4, {std::vector<unsigned char>(3000, 2)});
  tandem_weights_options options = TANDEM_WEIGHTS_OPTIONS_INIT;
  options.resident_bytes = 3100;
  const int64_t before = in_use();
  bool has_failed = true;
  for (int64_t nth = 1; has_failed; ++nth) {
    controls.fail_call(stand_in::kAnyCall, nth, TANDEM_ERROR_OUT_OF_MEMORY);
    tandem_weights* weights = nullptr;
    tandem_error* error = nullptr;
    has_failed = create(&weights, side.engine, blocks, options, &error) != TANDEM_OK;
    if (has_failed) {
      assert_int_equal(tandem_error_status(error), TANDEM_ERROR_OUT_OF_MEMORY);
      assert_null(weights);
    } else if (stats_of(weights).pinned_bytes < 9000) {
      has_failed = true;  // only pinning was refused, so the copies cross more slowly
    }
    tandem_error_release(error);
    tandem_weights_release(weights);
    assert_int_equal(in_use(), before);
    assert_true(nth < 100);
  }
  controls.reset();
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(blocks_are_what_was_given, forget),
      cmocka_unit_test_teardown(is_ahead, forget),
      cmocka_unit_test_teardown(refuses, forget),
      cmocka_unit_test_teardown(one_may_stay_in_use, forget),
      cmocka_unit_test_teardown(left_out_blocks_hand_on_what_they_wait_for, forget),
      cmocka_unit_test_teardown(guards_end_uses, forget),
      cmocka_unit_test_teardown(survives_failing_calls, forget),
      cmocka_unit_test_teardown(leaves_nothing, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
