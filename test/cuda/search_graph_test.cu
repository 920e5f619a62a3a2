// SPDX-License-Identifier: MIT
// A search that is captured once and replayed while its sequences grow. Each replay must use what device memory holds then.
//
//   search_graph_test [MODULE]
#include "device/search_case.h"
#include "graph_time.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;
using test::SearchCase;

const test::OpenDevice* device = nullptr;

void replays_search_what_is_there_then(void**) {
  const PruningRecord kRecords[] = {
      {64,
       160,
       {PruningStage{Judge::kBounds, 64, 512, 16}, PruningStage{Judge::kBounds, 16, 256, 8},
        PruningStage{Judge::kExact, 8, 128, 4}}},
      {64, 160, {PruningStage{Judge::kDescent, 64, 512, 8}, PruningStage{Judge::kDescent, 8, 128, 4}}},
  };
  for (const PruningRecord& record : kRecords) {
    test::SearchOptions options;
    options.record = record;
    options.n_kv_heads = 4;
    options.lengths = {3000, 1500, 700};
    options.n_blocks = 3;
    SearchCase c(*device, options);
    const std::string fault = c.bound({{0, 2960}, {0, 1460}, {0, 660}});
    if (!fault.empty()) fail_msg("%s", fault.c_str());
    const test::Graph graph([&](cudaStream_t stream) { c.call_search(stream); });
    for (int64_t step = 1; step <= 40; ++step) {
      const std::vector<test::SearchBlock> blocks = {
          {0, 2960 + step, 1, 5}, {1, 1460 + step / 2, step % 2 == 0 ? 1 : 0, 6}, {2, 660 + step, 1, step < 20 ? 7u : 8u}};
      c.prepare(blocks);
      graph.replay();
      const std::string found = c.check_search(blocks);
      if (!found.empty()) fail_msg("replay %d: %s", static_cast<int>(step), found.c_str());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const test::OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {cmocka_unit_test(replays_search_what_is_there_then)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
