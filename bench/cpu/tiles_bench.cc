// SPDX-License-Identifier: MIT
// Time to make lists of tiles (lib/call/key_tiles.h). 4,096 queries of 64 heads over 4 KV heads name keys among 131,072: 16
// units of 128 tokens for each query and KV head. On one thread, and on one thread for each KV head, which includes starting
// the threads. Each line is first checked against sets of units.
//
//   random     each query has its own units
//   clustered  64 consecutive queries share 14 of their units
//
//   tiles_bench [rounds]
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>

#include "bench/cpu/bench_clock.h"
#include "lib/call/key_tiles.h"
#include "reference/random.h"

namespace tandem::test {
namespace {

constexpr int32_t kQueries = 4096, kHeads = 4, kGroup = 16, kUnits = 16, kShift = 7, kPageLen = 128;
constexpr int64_t kKeys = 131072;

struct Problem {
  std::vector<int32_t> idx;  // [query][head][kUnits]
  std::vector<int64_t> table;
  NamedKeys named;
  TileQueries queries;

  explicit Problem(int32_t n_shared) {
    reference::Random random(1);
    std::set<int32_t> shared[kHeads];
    const auto add = [&](std::set<int32_t>* units, size_t n) {
      while (units->size() < n) units->insert(static_cast<int32_t>(random.integer(0, (kKeys >> kShift) - 1)));
    };
    for (int32_t query = 0; query < kQueries; ++query)
      for (std::set<int32_t>& of_head : shared) {
        if (query % 64 == 0) of_head.clear(), add(&of_head, static_cast<size_t>(n_shared));
        std::set<int32_t> units = of_head;
        add(&units, kUnits);
        idx.insert(idx.end(), units.begin(), units.end());
      }
    for (int64_t page = 0; page < kKeys / kPageLen; ++page) table.push_back(page * 1000);
    named.idx = idx.data();
    named.n_idx = named.head_stride = kUnits;
    named.n_heads = kHeads;
    named.token_stride = kHeads * kUnits;
    named.unit_shift = kShift;
    queries.named = &named;
    queries.n_queries = kQueries;
    queries.group_size = kGroup;
    queries.tokens = {0, kKeys};
    queries.page_table = table.data();
    queries.table_len = static_cast<int32_t>(table.size());
    queries.page_len = kPageLen;
  }
};

struct Tiles {
  std::vector<DeviceTiles> lists;
  std::vector<KeyTile> keys;
  TileMaker makers[kHeads];

  explicit Tiles(const Problem& problem) {
    makers[0].begin(problem.queries);
    lists.resize(static_cast<size_t>(kHeads * makers[0].n_lists()));
    keys.resize(static_cast<size_t>(kHeads * makers[0].most_entries()));
  }
  void make_head(int32_t head, TileMaker* maker) {
    maker->make(head, head * maker->most_entries(), lists.data() + head * maker->n_lists(), keys.data());
  }
  void make(const Problem& problem) {
    makers[0].begin(problem.queries);
    for (int32_t head = 0; head < kHeads; ++head) make_head(head, &makers[0]);
  }
  void make_by_threads(const Problem& problem) {
    std::vector<std::thread> threads;
    for (int32_t head = 0; head < kHeads; ++head)
      threads.emplace_back([&, head] {
        makers[head].begin(problem.queries);
        make_head(head, &makers[head]);
      });
    for (std::thread& thread : threads) thread.join();
  }
  int64_t n() const {
    int64_t sum = 0;
    for (const DeviceTiles& list : lists) sum += list.n;
    return sum;
  }
  // Each list must have the units of its queries, two tiles for each unit, and two class bits for each index.
  bool are_right(const Problem& problem) const {
    constexpr int32_t kOfList = kTileRows / kGroup, kPerHead = kQueries / kOfList;
    for (int32_t list = 0; list < kHeads * kPerHead; ++list) {
      std::set<int32_t> units;
      for (int32_t query = 0; query < kOfList; ++query) {
        const auto row = problem.named.row(list % kPerHead * kOfList + query, list / kPerHead);
        units.insert(row.begin(), row.end());
      }
      const DeviceTiles& own = lists[static_cast<size_t>(list)];
      if (own.n != 2 * static_cast<int32_t>(units.size())) return false;
      const KeyTile* tile = keys.data() + own.first;
      int n_bits = 0;
      for (const int32_t unit : units)
        for (int half = 0; half < 2; ++half, ++tile) {
          n_bits += __builtin_popcount(tile->classes);
          if (tile->token != 128 * unit + 64 * half || tile->page != problem.table[static_cast<size_t>(unit)]) return false;
        }
      if (n_bits != 2 * kOfList * kUnits) return false;
    }
    return true;
  }
};

int run(int n_rounds) {
  bool all_right = true;
  for (const int32_t n_shared : {0, 14})
    for (const bool by_threads : {false, true}) {
      const Problem problem(n_shared);
      Tiles tiles(problem);
      const auto make = [&] { by_threads ? tiles.make_by_threads(problem) : tiles.make(problem); };
      const char* name = n_shared == 0 ? "random" : "clustered";
      make();
      if (!tiles.are_right(problem)) std::printf("%-9s WRONG\n", name), all_right = false;
      std::vector<double> ns;
      for (int i = 0; i < n_rounds; ++i) {
        Stretch stretch;
        make();
        stretch.end();
        ns.push_back(stretch.wall);
      }
      if (all_right && n_rounds > 0)
        std::printf("%-9s %d threads %8lld tiles  median %6.3f ms, least %6.3f ms\n", name, by_threads ? kHeads : 1,
                    static_cast<long long>(tiles.n()), median(ns) * 1e-6, *std::min_element(ns.begin(), ns.end()) * 1e-6);
    }
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) { return tandem::test::run(argc > 1 ? std::atoi(argv[1]) : 101); }
