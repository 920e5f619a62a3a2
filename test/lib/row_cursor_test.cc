// SPDX-License-Identifier: MIT
// Compares walks over stored rows with the address of each single row.
#include "lib/store/row_cursor.h"

#include <random>
#include <string>
#include <utility>

#include "with_cmocka.h"

namespace tandem {
namespace {

constexpr int64_t kPageLen = 16, kExtentPages = 4, kExtentTokens = kPageLen * kExtentPages;
constexpr int32_t kHeads = 3;

// Returns a layer whose planes follow each other in an extent: K, V, their scales, and hidden states.
LayerPlanes make_planes(bool keeps_hidden) {
  static Projection projection;
  projection.hidden_dim = 32;
  Layer layer;
  layer.n_q_heads = layer.n_kv_heads = kHeads;
  layer.group_size = 1;
  layer.k_head_dim = 32;
  layer.v_head_dim = 64;
  layer.k_type = TANDEM_BF16;  // without scales
  layer.v_type = TANDEM_Q8_0;
  if (keeps_hidden) layer.projection = &projection, layer.x_type = TANDEM_F16;
  LayerPlanes planes(layer);
  int64_t bytes = 0;
  for (StoredPlane& plane : planes.planes)
    for (int64_t& at : plane.at) at = std::exchange(bytes, bytes + kExtentTokens * plane.row_bytes);
  return planes;
}

struct Walked {
  int32_t plane, head;
  int64_t token;
  const std::byte* row;
  bool operator==(const Walked& other) const = default;
};

class Case {
 public:
  explicit Case(unsigned seed) : random_(seed), planes_(make_planes(pick(2) == 0)) {
    const int64_t bytes = kExtentTokens * (planes_.token_bytes(Scope::kHead) + planes_.token_bytes(Scope::kLayer));
    memory_.resize(3);
    for (std::vector<std::byte>& extent : memory_) {
      extent.resize(static_cast<size_t>(bytes));
      extents_.push_back(extent.data());
    }
    // Half of the pages follow the page before them.
    for (int32_t i = 0; i < 12; ++i)
      pages_.push_back(i > 0 && pages_.back() < 11 && pick(2) == 0 ? pages_.back() + 1 : static_cast<int32_t>(pick(12)));
    int32_t position = 0;
    for (int64_t t = 0; t < 150; ++t) positions_.push_back(position += pick(20) == 0 ? 5 : 1);
  }

  int64_t pick(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random_); }
  StoreView view() const { return {&planes_, extents_, pages_, positions_, kPageLen, kExtentPages}; }

  // Walks token by token.
  Walked row_of(int32_t plane, int32_t head, int64_t token) const {
    const int32_t page = pages_[static_cast<size_t>(token / kPageLen)];
    std::byte* const extent = extents_[static_cast<size_t>(page / kExtentPages)];
    return {plane, head, token,
            planes_.planes[plane].row({extent, page % kExtentPages * kPageLen + token % kPageLen, token, 1}, head)};
  }

  std::vector<Walked> walk(RowCursor cursor) const {
    std::vector<Walked> rows;
    for (RowRun run; cursor.next(&run);) {
      const int64_t bytes = planes_.planes[run.plane].row_bytes;
      assert_true(run.n > 0 && run.bytes == run.n * bytes);
      assert_true(run.data >= run.piece && run.data + run.bytes <= run.piece + memory_[0].size());
      for (int64_t i = 0; i < run.n; ++i) rows.push_back({run.plane, run.head, run.token + i, run.data + i * bytes});
    }
    return rows;
  }

  void check() {
    const int64_t a = pick(193), b = pick(193);
    const TokenRange tokens{std::min(a, b), std::max(a, b)};
    HeadRange heads{static_cast<int32_t>(pick(kHeads)), 0};
    heads.n = static_cast<int32_t>(1 + pick(kHeads - heads.first));
    const auto set = static_cast<PlaneSet>(pick(32));
    const auto has = [&](int32_t p, Scope scope) {
      return (set >> p & 1) != 0 && planes_.planes[p].row_bytes > 0 && planes_.planes[p].scope == scope;
    };
    std::vector<Walked> by_head;
    for (int32_t h = heads.first; h < heads.first + heads.n; ++h)
      for (int32_t p = 0; p < kStoredPlanes; ++p)
        for (int64_t t = tokens.begin; has(p, Scope::kHead) && t < tokens.end; ++t) by_head.push_back(row_of(p, h, t));
    for (int64_t t = tokens.begin; has(kPlaneHidden, Scope::kLayer) && t < tokens.end; ++t)
      by_head.push_back(row_of(kPlaneHidden, 0, t));
    assert_true(walk({view(), 0, heads, tokens, set, RowOrder::kByHead}) == by_head);

    const int64_t unit = int64_t{8} << pick(4);
    RowCursor cursor(view(), 0, heads, tokens, set, RowOrder::kByRun);
    cursor.stop_at_multiples(unit);
    std::vector<Walked> by_run;
    for (int64_t t = tokens.begin, end = 0; t < tokens.end; t = end) {
      for (end = t + 1; end < tokens.end && end % unit != 0 && follows(end); ++end) continue;
      for (int32_t p = 0; p < kStoredPlanes; ++p) {
        for (int32_t h = heads.first; has(p, Scope::kHead) && h < heads.first + heads.n; ++h)
          for (int64_t i = t; i < end; ++i) by_run.push_back(row_of(p, h, i));
        for (int64_t i = t; has(p, Scope::kLayer) && i < end; ++i) by_run.push_back(row_of(p, 0, i));
      }
    }
    assert_true(walk(cursor) == by_run);
    check_gaps(tokens);
  }

 private:
  // Returns whether a token's row follows that of the token before it, in the same extent.
  bool follows(int64_t token) const {
    const int32_t page = pages_[static_cast<size_t>(token / kPageLen)];
    const int32_t before = pages_[static_cast<size_t>((token - 1) / kPageLen)];
    return token % kPageLen != 0 || (page == before + 1 && page % kExtentPages != 0);
  }

  void check_gaps(TokenRange tokens) const {
    int64_t token = tokens.begin;
    while (token < tokens.end) {
      TokenRun run = view().run_at(token, tokens.end);
      run.n = consecutive(positions_, token, run.n);
      assert_int_equal(run.token, token);
      for (int64_t i = 0; i < run.n; ++i, ++token) {
        assert_ptr_equal(planes_.planes[kPlaneK].row({run.extent, run.row + i, token, 1}, 1), row_of(kPlaneK, 1, token).row);
        assert_int_equal(position_of(positions_, token), position_of(positions_, run.token) + i);
      }
      const bool ends = token == tokens.end || !follows(token);  // otherwise a gap of positions ends it
      assert_true(ends || position_of(positions_, token) != position_of(positions_, token - 1) + 1);
    }
    assert_int_equal(token, tokens.end);
  }

  std::mt19937 random_;
  LayerPlanes planes_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> extents_;
  std::vector<int32_t> pages_, positions_;
};

void every_row_comes_once_and_in_order(void**) {
  for (unsigned seed = 0; seed < 400; ++seed) Case(seed).check();
}

void tokens_are_copied_with_all_that_is_stored_of_them(void**) {
  const LayerPlanes planes = make_planes(true);
  std::vector<std::byte> memory(1 << 16);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 7 % 251);
  std::byte* const extents[] = {memory.data()};
  const std::vector<int32_t> from = {2}, to = {0};
  const StoreView here{&planes, extents, from, {}, kPageLen, kExtentPages};
  const StoreView there{&planes, extents, to, {}, kPageLen, kExtentPages};
  copy_tokens(here, 3, there, 5, 0, 6);
  int64_t n_compared = 0;
  RowCursor rows(here, 0, planes.heads(), {3, 9}, kAllPlanes, RowOrder::kByHead);
  RowCursor copies(there, 0, planes.heads(), {5, 11}, kAllPlanes, RowOrder::kByHead);
  for (RowRun row, copy; rows.next(&row) && copies.next(&copy); n_compared += row.bytes) {
    assert_ptr_not_equal(row.data, copy.data);
    assert_memory_equal(row.data, copy.data, static_cast<size_t>(row.bytes));
  }
  assert_int_equal(n_compared, 6 * (kHeads * (64 + 64 + 4) + 64));
}

void planes_have_names_and_places(void**) {
  const LayerPlanes planes = make_planes(true);
  std::string names;
  for (const StoredPlane& plane : planes.planes) {
    names += std::string(plane.name) + (plane.on_device ? " " : ", host ");
    assert_int_equal(plane.at.size(), plane.scope == Scope::kHead ? kHeads : 1);
  }
  assert_string_equal(names.c_str(), "k k_scales v v_scales hidden, host ");
}

}  // namespace
}  // namespace tandem

int main() {
  using namespace tandem;
  const CMUnitTest tests[] = {
      cmocka_unit_test(every_row_comes_once_and_in_order),
      cmocka_unit_test(tokens_are_copied_with_all_that_is_stored_of_them),
      cmocka_unit_test(planes_have_names_and_places),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
