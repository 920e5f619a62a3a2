// SPDX-License-Identifier: MIT
// Pieces of streamed keys: every key of every head occurs once, in its place, and there are as few copies as possible.
#include "lib/pieces/stream_pieces.h"

#include <array>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "with_cmocka.h"

using namespace tandem;

namespace {

Layer layer_of(int32_t n_kv_heads, int32_t k_type, int32_t v_type, int32_t dim = 64) {
  Layer layer;
  layer.n_kv_heads = n_kv_heads;
  layer.group_size = 2;
  layer.n_q_heads = 2 * n_kv_heads;
  layer.k_head_dim = layer.v_head_dim = dim;
  layer.k_type = k_type;
  layer.v_type = v_type;
  return layer;
}

StreamLayout layout_of(const Layer& layer, int64_t buffer_bytes) {
  StreamLayout layout;
  const Status status = make_stream_layout(layer, 2048, buffer_bytes, &layout);
  if (!status.ok()) fail_msg("%s", status.info().message.c_str());
  return layout;
}

void layouts_fit(void**) {
  for (const int32_t type : {TANDEM_F32, TANDEM_BF16, TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_E4M3})
    for (const int32_t n_heads : {1, 2, 5, 8})
      for (int64_t bytes = 64 * plane_bytes(layer_of(1, type, TANDEM_BF16)).total(); bytes < int64_t{1} << 25; bytes *= 3) {
        const Layer layer = layer_of(n_heads, type, TANDEM_BF16);
        const StreamLayout layout = layout_of(layer, bytes);
        assert_int_equal(layout.page_len % 64, 0);
        assert_in_range(layout.page_len, 64, 2048);
        assert_in_range(layout.n_heads, 1, n_heads);
        assert_true(layout.n_pages >= 1 && layout.n_pages * layout.page_bytes <= bytes);
        int64_t end = 0;  // planes and heads follow each other
        for (int32_t p = 0; p < kPlanes; ++p) {
          assert_int_equal(layout.at[p], end);
          assert_int_equal(layout.at[p] % 16, 0);
          assert_int_equal(layout.head_stride[p] % 16, 0);
          end += layout.n_heads * layout.head_stride[p];
        }
        assert_int_equal(end, layout.page_bytes);
        if (layout.n_heads < n_heads) assert_true((layout.n_heads + 1) * layout.page_bytes / layout.n_heads > bytes / 2);
      }
  StreamLayout none;
  const Status status = make_stream_layout(layer_of(1, TANDEM_BF16, TANDEM_BF16), 2048, 64 * 256 - 1, &none);
  assert_int_equal(status.code(), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_non_null(std::strstr(status.info().message.c_str(), "stream_buffer_bytes = 16383"));
}

// Checks that the pieces have the heads in `runs` and no others.
void check_pieces(const StreamLayout& layout, std::span<const HeadRun> runs, TokenRange range) {
  std::vector<StreamPiece> pieces;
  cut_pieces(layout, runs, 3, range, &pieces);
  assert_int_equal(pieces.size(), count_pieces(layout, runs, range.begin, range.end));
  std::map<int32_t, int64_t> next;  // next token of each head
  for (const StreamPiece& piece : pieces) {
    assert_int_equal(piece.call, 3);
    assert_true(piece.begin < piece.end && piece.n_heads > 0);
    assert_int_equal(piece.begin / layout.piece_len(), (piece.end - 1) / layout.piece_len());
    for (int32_t h = piece.first_head; h < piece.first_head + piece.n_heads; ++h) {
      assert_int_equal(next.count(h) > 0 ? next[h] : range.begin, piece.begin);
      next[h] = piece.end;
    }
  }
  size_t n_heads = 0;
  for (const HeadRun& run : runs) {
    n_heads += static_cast<size_t>(run.n);
    for (int32_t h = run.first; h < run.first + run.n; ++h) assert_int_equal(next.count(h), range.begin < range.end ? 1 : 0);
  }
  assert_int_equal(next.size(), range.begin < range.end ? n_heads : 0);
  for (const auto& [head, end] : next) assert_int_equal(end, range.end);
}

void pieces_have_every_key_once(void**) {
  const Layer layer = layer_of(5, TANDEM_BF16, TANDEM_BF16);
  const std::vector<std::vector<HeadRun>> kinds = {{{0, 5}}, {{0, 1}, {3, 2}}, {{1, 3}}, {}};
  for (const int64_t bytes : {16384, 40000, 100000, 1 << 20, 1 << 24}) {
    const StreamLayout layout = layout_of(layer, bytes);
    for (const TokenRange range : {TokenRange{0, 1}, {0, 64}, {63, 65}, {100, 1000}, {2047, 5000}, {128, 128}})
      for (const std::vector<HeadRun>& runs : kinds) check_pieces(layout, runs, range);
  }
}

// Pages are no longer than the longest sequence needs, and a buffer has as many heads as fit.
void pages_of_short_sequences_are_short(void**) {
  const Layer layer = layer_of(40, TANDEM_F16, TANDEM_F16, 128);
  const StreamLayout layout = layout_of(layer, int64_t{8} << 20);
  assert_int_equal(layout.page_len, 2048);
  assert_int_equal(layout.n_heads, 8);
  struct Expected {
    int64_t longest, page_len, n_heads, n_pages;
  };
  for (const Expected& expected : {Expected{5000, 2048, 8, 1},
                                   {2048, 2048, 8, 1},
                                   {1025, 2048, 8, 1},
                                   {1024, 1024, 14, 1},
                                   {1008, 1024, 14, 1},
                                   {500, 512, 20, 1},
                                   {112, 128, 40, 3},
                                   {1, 64, 40, 6}}) {
    const StreamLayout made = shorten_pages(layer, layout, expected.longest);
    assert_int_equal(made.page_len, expected.page_len);
    assert_int_equal(made.n_heads, expected.n_heads);
    assert_int_equal(made.n_pages, expected.n_pages);
    assert_true(made.n_pages * made.page_bytes <= int64_t{8} << 20);
    const HeadRun all{0, 40};
    assert_true(count_pieces(made, {&all, 1}, 0, expected.longest) <= count_pieces(layout, {&all, 1}, 0, expected.longest));
  }
  StreamLayout few;  // only some heads of the layer
  assert_true(make_stream_layout(layer, 2048, int64_t{8} << 20, &few, 3).ok());
  assert_int_equal(shorten_pages(layer, few, 100).n_heads, 3);
}

// Executes a list of copies, byte by byte.
void copies_are_joined(void**) {
  std::vector<std::byte> from(4096), to(4096), wanted(4096);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 % 251);
  const auto run = [&](const std::vector<std::array<int64_t, 3>>& rows, size_t n_copies) {
    CopyList list;
    std::fill(to.begin(), to.end(), std::byte{0});
    std::fill(wanted.begin(), wanted.end(), std::byte{0});
    for (const auto& [at, of, bytes] : rows) {
      list.add(to.data() + at, from.data() + of, bytes);
      std::memcpy(wanted.data() + at, from.data() + of, static_cast<size_t>(bytes));
    }
    for (const StridedCopy& copy : list.copies())
      for (int64_t i = 0; i < copy.n_rows; ++i)
        std::memcpy(static_cast<std::byte*>(copy.to) + i * copy.to_stride,
                    static_cast<const std::byte*>(copy.from) + i * copy.from_stride, static_cast<size_t>(copy.row_bytes));
    assert_int_equal(list.copies().size(), n_copies);
    assert_memory_equal(to.data(), wanted.data(), to.size());
  };
  run({{0, 100, 50}, {50, 150, 50}, {100, 200, 7}}, 1);                  // side by side
  run({{0, 0, 50}, {100, 200, 50}, {200, 400, 50}}, 1);                  // at equal distances
  run({{0, 0, 50}, {100, 200, 50}, {201, 400, 50}}, 2);                  // at different distances
  run({{0, 0, 50}, {100, 200, 50}, {200, 400, 49}}, 2);                  // of different lengths
  run({{100, 200, 50}, {0, 0, 50}}, 2);                                  // backwards
  run({{0, 0, 50}, {50, 100, 50}, {100, 150, 50}}, 2);                   // adjacent only at one end
  run({{0, 0, 50}, {50, 50, 50}, {200, 300, 100}, {400, 600, 100}}, 1);  // the third is as long as the first two together
}

// Memory whose allocations are adjacent, as a device's may be.
struct SideBySide {
  alignas(4096) std::byte memory[1 << 14];
  size_t n_taken = 0;

  static void* allocate(size_t bytes, size_t, void* user) {
    auto& of = *static_cast<SideBySide*>(user);
    return of.memory + std::exchange(of.n_taken, of.n_taken + bytes);
  }
  static void release(void*, size_t, void*) {}
};

// A window that grew by one page at a time, and then by four.
void copies_end_with_the_allocation(void**) {
  static SideBySide side_by_side;
  Tier tier{"device_cap_bytes", 0, {SideBySide::allocate, SideBySide::release, &side_by_side}};
  constexpr int64_t kPageBytes = 512;
  WindowGeometry geometry;
  geometry.page_bytes = kPageBytes;
  geometry.layers.resize(1);
  DeviceWindow window;
  for (const int64_t n_pages : {1, 2, 6}) assert_true(window.reserve(tier, geometry, 6, 0, n_pages * kDevicePageLen).ok());
  assert_int_equal(window.page_of(5 * kDevicePageLen) - window.page_of(0), 5 * geometry.page_bytes);
  std::vector<std::byte> to(6 * kPageBytes);
  CopyList list;
  for (int64_t page = 0; page < 6; ++page) {
    const std::byte* const from = list.begin_page(window, page * kDevicePageLen, geometry.page_bytes);
    list.add(to.data() + page * kPageBytes, from, kPageBytes);
  }
  std::vector<int64_t> lengths;
  for (const StridedCopy& copy : list.copies()) lengths.push_back(copy.n_rows * copy.row_bytes);
  assert_true((lengths == std::vector<int64_t>{kPageBytes, kPageBytes, 4 * kPageBytes}));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(layouts_fit), cmocka_unit_test(pieces_have_every_key_once),
                              cmocka_unit_test(pages_of_short_sequences_are_short), cmocka_unit_test(copies_are_joined),
                              cmocka_unit_test(copies_end_with_the_allocation)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
