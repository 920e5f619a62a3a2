// SPDX-License-Identifier: MIT
// Compares tiles made from queries' indices with tiles found token by token (test/device/named_tiles.h).
#include "lib/call/key_tiles.h"

#include <numeric>

#include "device/named_tiles.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;
using tandem::test::NamedTiles;
using tandem::test::TileOptions;

struct Case {
  TileOptions options;
  int32_t group_size, q_len, page_len;
  int64_t begin, end;
};

// Returns the indices of all queries, in rows with gaps between them.
std::vector<int32_t> indices_of(const NamedTiles& tiles, const Case& c, NamedKeys* named) {
  named->n_idx = tiles.n_idx();
  named->n_heads = c.options.n_heads;
  named->unit_shift = c.options.unit == 64 ? 6 : c.options.unit == 128 ? 7 : 8;
  named->head_stride = named->n_idx + 3;
  named->token_stride = named->n_heads * named->head_stride + 5;
  std::vector<int32_t> idx(static_cast<size_t>(named->token_stride * c.q_len), INT32_MAX);
  for (int64_t query = 0; query < c.q_len; ++query)
    for (int32_t head = 0; head < named->n_heads; ++head) {
      const std::vector<int32_t> row = tiles.indices(0, head, query);
      std::copy(row.begin(), row.end(), idx.begin() + query * named->token_stride + head * named->head_stride);
    }
  return idx;
}

void check_piece(const Case& c, const NamedTiles& tiles, const NamedKeys& named, DeviceSequence sequence,
                 const std::vector<int64_t>& table, TileMaker* maker) {
  const NamedTiles::Made wanted = tiles.make({sequence}, table, c.page_len);
  TileQueries queries;
  queries.named = &named;
  queries.n_queries = c.q_len;
  queries.group_size = c.group_size;
  queries.tokens = {sequence.begin, sequence.end};
  queries.page_table = table.data();
  queries.table_len = sequence.table_len;
  queries.page_len = c.page_len;
  maker->begin(queries);
  assert_int_equal(maker->n_lists(), wanted.described.per_head);
  assert_true(maker->most_tiles() >= wanted.described.most_tiles);
  std::vector<DeviceTiles> lists(wanted.lists.size());
  std::vector<KeyTile> keys(static_cast<size_t>(c.options.n_heads * maker->most_entries()) + 1);
  int64_t n = 0;
  for (int32_t head = 0; head < c.options.n_heads; ++head)
    n = maker->make(head, n, lists.data() + head * maker->n_lists(), keys.data());
  assert_int_equal(n, wanted.keys.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    assert_int_equal(lists[i].first, wanted.lists[i].first);
    assert_int_equal(lists[i].n, wanted.lists[i].n);
  }
  for (size_t i = 0; i < wanted.keys.size(); ++i) {
    assert_int_equal(keys[i].token, wanted.keys[i].token);
    assert_int_equal(keys[i].classes, wanted.keys[i].classes);
    assert_int_equal(keys[i].page, wanted.keys[i].page);
  }
}

void check(const Case& c, uint64_t seed, TileMaker* maker) {
  reference::Random random(seed);
  DeviceSequence sequence;
  sequence.begin = c.begin;
  sequence.end = c.end;
  sequence.q_len = c.q_len;
  sequence.table_len = static_cast<int32_t>((c.end - c.begin) / c.page_len + 2);
  std::vector<int64_t> table(static_cast<size_t>(sequence.table_len));
  std::iota(table.begin(), table.end(), 1000);
  const NamedTiles tiles(c.options, c.group_size, c.q_len, {sequence}, random);
  NamedKeys named;
  const std::vector<int32_t> idx = indices_of(tiles, c, &named);
  named.idx = idx.data();
  check_piece(c, tiles, named, sequence, table, maker);
  for (int i = 0; i < 4; ++i) {  // cuts of the keys, from any token to any later one
    DeviceSequence piece = sequence;
    piece.begin = random.integer(c.begin, c.end);
    piece.end = random.integer(piece.begin, c.end);
    check_piece(c, tiles, named, piece, table, maker);
  }
}

void tiles_are_those_of_every_token(void**) {
  TileMaker maker;
  uint64_t seed = 1;
  for (const int32_t group_size : {1, 2, 3, 4, 5, 16, 48, 200})
    for (const int32_t unit : {64, 128, 256})
      for (const int32_t q_len : {1, 31, 200})
        check({{.n_heads = seed % 2 == 0 ? 1 : 2, .unit = unit, .share = seed % 3 == 0 ? 0.02 : 0.4},
               group_size,
               q_len,
               seed % 5 == 0 ? 192 : unit,
               seed % 2 == 0 ? 0 : 777,
               5000 + static_cast<int64_t>(seed)},
              seed++, &maker);
}

void queries_that_name_nothing_have_empty_lists(void**) {
  TileMaker maker;
  check({{.n_heads = 1, .share = 0.0}, 4, 70, 128, 0, 900}, 1, &maker);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tiles_are_those_of_every_token),
      cmocka_unit_test(queries_that_name_nothing_have_empty_lists),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
