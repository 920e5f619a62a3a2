// SPDX-License-Identifier: MIT
// Searches of the stand-in apart from their results: replays in graphs, and faults in the arguments. stand_in_search_test
// checks the results.
#include <cstring>
#include <functional>

#include "device/search_case.h"
#include "device/stand_in_host.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;
using test::SearchCase;

constexpr char kModule[] = STAND_IN_MODULES "/libtandem-standin.so";

test::SearchOptions options_of(uint64_t seed) {
  PruningStage first, second;
  first.judge = Judge::kBounds;
  first.chunk_len = 32;
  first.keep_len = 256;
  first.interval = 4;
  second = first;
  second.judge = Judge::kExact;
  second.chunk_len = 8;
  second.keep_len = 64;
  second.interval = 2;
  test::SearchOptions options;
  options.record = {32, 80, {first, second}};
  options.dim = 64;
  options.lengths = {900, 700};
  options.n_blocks = 2;
  options.seed = seed;
  return options;
}

void replays_search_what_is_there_then(void**) {
  const auto& controls = *stand_in::find_function<stand_in::ControlsFn>(stand_in::kControlsSymbol)();
  const test::OpenDevice device(kModule);
  DeviceError error;
  SearchCase c(device, options_of(1));
  assert_string_equal(c.bound({{0, 860}, {0, 660}}).c_str(), "");
  void* const stream = controls.create_stream();
  assert_true(controls.begin_capture(stream));
  c.call_search(stream);
  void* const graph = controls.end_capture(stream);
  for (int64_t step = 1; step <= 20; ++step) {
    const std::vector<test::SearchBlock> blocks = {{0, 860 + step, 1, 5}, {1, 660 + step / 2, step % 2 == 0 ? 1 : 0, 6}};
    c.prepare(blocks);
    assert_true(controls.launch(graph, stream));
    assert_int_equal(device.table->wait(device.self, stream, &error), TANDEM_OK);
    assert_string_equal(c.check_search(blocks).c_str(), "");
  }
  controls.free_graph(graph);
  assert_true(controls.destroy_stream(stream));
}

// Changes the call, or data that it reads in device memory. The call is refused at once, or its stream ends with a fault.
void what_no_device_can_use_is_found(void**) {
  const auto& controls = *stand_in::find_function<stand_in::ControlsFn>(stand_in::kControlsSymbol)();
  const test::OpenDevice device(kModule);
  const auto expect_fault = [&](const char* text, const std::function<void(DeviceSearch&, DeviceSequence&)>& change) {
    SearchCase c(device, options_of(2));
    assert_string_equal(c.bound({{0, 890}, {0, 690}}).c_str(), "");
    c.prepare({{0, 900, 1, 5}, {1, 700, 1, 5}});
    DeviceSearch call = c.call();
    DeviceSequence block;
    device.download(&block, call.sequences.sequences, sizeof block);
    change(call, block);
    device.upload(const_cast<DeviceSequence*>(call.sequences.sequences), &block, sizeof block);
    DeviceError error;
    int32_t status = device.table->search(device.self, &call, nullptr, &error);
    if (status == TANDEM_OK) status = device.table->wait(device.self, nullptr, &error);
    controls.reset();
    if (status != TANDEM_ERROR_INTERNAL || std::strstr(error.message, text) == nullptr)
      fail_msg("%d: \"%s\" instead of \"%s\"", status, status == TANDEM_OK ? "" : error.message, text);
  };
  static std::byte on_host[4096];
  expect_fault("the work space is no device memory", [](DeviceSearch& call, auto&) { call.workspace = on_host; });
  expect_fault("granules are no device memory",
               [](DeviceSearch& call, auto&) { call.granules = reinterpret_cast<KeyGranule*>(on_host); });
  expect_fault("a key list is no device memory",
               [](DeviceSearch& call, auto&) { call.keys = reinterpret_cast<DeviceKeys*>(on_host); });
  expect_fault("q is no device memory", [](DeviceSearch& call, auto&) { call.q.data = on_host; });
  expect_fault("a row of bounds is no device memory", [](DeviceSearch& call, auto&) { call.bounds[0].data = on_host; });
  expect_fault("a page is no device memory", [](DeviceSearch& call, auto&) { call.pages.planes[0] = on_host; });
  expect_fault("kept lists are no device memory", [](auto&, DeviceSequence& block) { block.kept_lists = on_host; });
  expect_fault("lists are kept nowhere", [](auto&, DeviceSequence& block) { block.kept_lists = nullptr; });
  expect_fault("a block's mark is that of no list", [](auto&, DeviceSequence& block) { block.kept_mark = 0; });
  expect_fault("more keys than the work space", [](DeviceSearch& call, auto&) { call.most_keys = 899; });
  expect_fault("more granules than there is room for", [](DeviceSearch& call, auto&) { call.n_granules = 11; });
  expect_fault("the window is shorter", [](DeviceSearch& call, auto&) { call.window_len = 66; });
  expect_fault("as much room as its stage keeps", [](DeviceSearch& call, auto&) { call.stages[1].most_kept = 7; });
  expect_fault("bounds of another length", [](DeviceSearch& call, auto&) { call.bounds[0].chunk_shift = 4; });
  expect_fault("keys are not all in the window", [](auto&, DeviceSequence& block) { block.begin = 64; });
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(replays_search_what_is_there_then),
      cmocka_unit_test(what_no_device_can_use_is_found),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
