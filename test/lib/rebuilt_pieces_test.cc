// SPDX-License-Identifier: MIT
// Cuts tokens into the pieces from which route "recompute" makes keys.
#include "lib/pieces/rebuilt_pieces.h"

#include <algorithm>
#include <set>

#include "lib/call/key_route.h"
#include "reference/random.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;

constexpr int64_t kPage = RebuildLayout::kPageLen;

RebuildLayout layout_of(int64_t n_pages) {
  RebuildLayout layout;
  layout.n_pages = n_pages;
  layout.x_bytes = 100;
  return layout;
}

// Each token occurs once and in order, no page occurs twice in a piece, and there are no more pieces than were counted.
void every_token_has_a_place(void**) {
  reference::Random random(5);
  for (int round = 0; round < 3000; ++round) {
    const RebuildLayout layout = layout_of(random.integer(1, 9));
    RebuiltPieces pieces;
    RebuiltCount count;
    std::vector<TokenRange> ranges;
    const bool is_planned = random.chance(0.5);
    for (int64_t i = random.integer(1, 8); i > 0; --i) {
      const int64_t begin = random.integer(0, 700), end = begin + (random.chance(0.2) ? 0 : random.integer(1, 1500));
      if (is_planned && end > begin) pieces.planned_pages += (end - 1) / kPage - begin / kPage + 1;
      count.add(end - begin, end > begin ? 1 : 0);
      ranges.push_back({begin, end});
    }
    for (size_t i = 0; i < ranges.size(); ++i) add_rebuilt(layout, i, ranges[i], i > 0 && random.chance(0.7), &pieces);
    std::vector<int64_t> next;
    for (const TokenRange& range : ranges) next.push_back(range.begin);
    size_t n_parts = 0;
    int64_t n_pages = 0;
    for (const RebuiltPiece& piece : pieces.pieces) {
      assert_int_equal(piece.first_part, n_parts);
      assert_int_equal(piece.first_page, n_pages);
      std::set<size_t> calls;
      int64_t first_free = 0;
      for (size_t i = 0; i < piece.n_parts; ++i, ++n_parts) {
        const RebuiltPart& part = pieces.parts[n_parts];
        assert_true(calls.insert(part.call).second);
        assert_int_equal(part.begin, next[part.call]);
        assert_true(part.end > part.begin);
        assert_int_equal(part.first_page, first_free);
        first_free += (part.end - 1) / kPage - part.begin / kPage + 1;
        next[part.call] = part.end;
      }
      assert_int_equal(piece.n_pages, first_free);
      assert_true(first_free <= layout.n_pages);
      n_pages += first_free;
    }
    assert_int_equal(n_parts, pieces.parts.size());
    assert_int_equal(n_pages, pieces.n_pages());
    for (size_t i = 0; i < ranges.size(); ++i) assert_int_equal(next[i], std::max(ranges[i].begin, ranges[i].end));
    assert_true(static_cast<int64_t>(n_parts) <= count.all_parts(layout));
    assert_true(n_pages <= count.n_pages);
  }
}

// However large a buffer is, a piece has at most as many hidden states as a device turns into keys at once.
void large_buffers_hold_what_devices_take(void**) {
  Projection projection;
  projection.hidden_dim = 8;
  Layer layer;
  layer.n_q_heads = layer.n_kv_heads = 65536;
  layer.group_size = 1;
  layer.k_head_dim = layer.v_head_dim = 256;
  layer.k_type = layer.v_type = TANDEM_F32;
  layer.x_type = TANDEM_BF16;
  layer.projection = &projection;
  for (const int64_t bytes : {int64_t{1} << 28, int64_t{1} << 39, int64_t{1} << 40}) {
    std::vector<RebuildLayout> layouts;
    assert_true(make_rebuild_layouts({layer}, bytes, &layouts).ok());
    assert_int_equal(layouts[0].n_rows(), 1 << 24);
  }
}

// Further sequences fill a piece before the next one begins.
void pieces_are_shared(void**) {
  RebuiltPieces pieces;
  const RebuildLayout layout = layout_of(4);
  for (size_t i = 0; i < 4; ++i) add_rebuilt(layout, i, {0, 2 * kPage}, i > 0, &pieces);
  assert_int_equal(pieces.pieces.size(), 2);
  add_rebuilt(layout, 4, {10, 11}, false, &pieces);
  assert_int_equal(pieces.pieces.size(), 3);
}

// The first and the last piece are short if the number of pieces is known.
void pieces_at_the_ends_are_short(void**) {
  for (int64_t n_pages = 1; n_pages <= 40; ++n_pages) {
    RebuiltPieces pieces;
    pieces.planned_pages = n_pages;
    add_rebuilt(layout_of(6), 0, {0, n_pages * kPage}, false, &pieces);
    assert_int_equal(pieces.n_pages(), n_pages);
    assert_true(pieces.pieces.front().n_pages <= 2 && pieces.pieces.back().n_pages <= 2);
    assert_in_range(pieces.pieces.size(), n_pages / 6, n_pages / 6 + 3);
  }
}

// Pieces of both kinds take turns until all are sent. Neither kind gets ahead of the other by more than one piece.
void pieces_take_turns(void**) {
  std::vector<Launch> launches;
  for (size_t n_streamed = 0; n_streamed <= 12; ++n_streamed)
    for (size_t n_rebuilt = 0; n_rebuilt <= 12; ++n_rebuilt) {
      order_launches({n_streamed, n_rebuilt}, &launches);
      assert_int_equal(launches.size(), n_streamed + n_rebuilt);
      size_t done[2] = {0, 0};
      for (const Launch& launch : launches) {
        assert_in_range(launch.route, 0, 1);
        assert_int_equal(launch.piece, done[launch.route]++);
        if (n_rebuilt == 0 || n_streamed == 0) continue;
        const size_t s = done[0] * n_rebuilt, r = done[1] * n_streamed;
        assert_true(r <= s + n_streamed && s <= r + n_rebuilt);
      }
      assert_true(done[0] == n_streamed && done[1] == n_rebuilt);
    }
}

void shares_end_with_pages(void**) {
  assert_int_equal(rebuilt_tokens(2000, 5, 1000), 995);
  assert_int_equal(rebuilt_tokens(995, 5, 1000), 995);
  assert_int_equal(rebuilt_tokens(500, 0, 1000), 512);
  assert_int_equal(rebuilt_tokens(500, 7, 1000), 505);  // rounded up to token 512
  assert_int_equal(rebuilt_tokens(1, 0, 1000), 128);
  assert_int_equal(rebuilt_tokens(1, 0, 50), 50);
  assert_int_equal(rebuilt_tokens(990, 0, 1000), 1000);
  assert_int_equal(rebuilt_tokens(0, 0, 1000), 0);
  assert_int_equal(rebuilt_tokens(-20, 0, 1000), 0);
  assert_int_equal(rebuilt_tokens(3, 4, 4), 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(every_token_has_a_place), cmocka_unit_test(large_buffers_hold_what_devices_take),
      cmocka_unit_test(pieces_are_shared),       cmocka_unit_test(pieces_at_the_ends_are_short),
      cmocka_unit_test(pieces_take_turns),       cmocka_unit_test(shares_end_with_pages)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
