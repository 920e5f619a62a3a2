// SPDX-License-Identifier: MIT
// The stand-in's attention against double precision. Later the core's use of devices is compared with the stand-in.
//
// The pages of the pool are shuffled and unused slots are NaN. A sequence's page table is a ring, so tokens that are far
// apart share its entries.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "device/named_keys.h"
#include "device/named_tiles.h"
#include "device/stand_in_host.h"
#include "reference/attention_reference.h"
#include "reference/random.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;
using stand_in::Host;

struct Span {
  int64_t begin, end;
  int32_t q_len;
};

struct Case {
  const char* name;
  int32_t k_type = TANDEM_F32, v_type = TANDEM_F32;
  int32_t k_dim = 64, v_dim = 64;
  int32_t n_q_heads = 4, n_kv_heads = 2;
  int32_t page_len = 64, table_len = 4;
  int32_t q_type = TANDEM_F32, o_type = TANDEM_F32;
  int64_t sliding_window = 0;
  float soft_cap = 0.0f;
  bool has_sinks = false, has_lse = true;
  std::vector<Span> spans;
  tandem::test::ListOptions lists = {};
  tandem::test::TileOptions tiles = {};
};

class Problem {
 public:
  Problem(const Case& of, uint64_t seed) : case_(of), random_(seed) {
    set_layer();
    make_pool();
    for (const Span& span : case_.spans) add_sequence(span);
    make_rows(&call.q, case_.q_type, case_.k_dim, 3);
    make_rows(&call.o, case_.o_type, case_.v_dim, 5);
    fill_queries();
    if (case_.lists.n_heads > 0) name_keys();
    if (case_.tiles.n_heads > 0) name_tiles();
    finish_call();
  }

  // Checks every row of o and lse and the bytes between them.
  void check() {
    const int32_t status = host.table.attend(host.self, &call, nullptr, &host.error);
    if (status != TANDEM_OK || host.wait() != TANDEM_OK) fail_msg("%s: %s", case_.name, host.error.message);
    for (size_t i = 0; i < case_.spans.size(); ++i) check_sequence(i);
    check_between();
  }

  KeyTile& tile() { return const_cast<KeyTile&>(*call.tiles.keys); }  // the first tile

  Host host;
  DeviceAttend call;
  DeviceSequence* sequences = nullptr;  // [n_sequences]

 private:
  struct Stored {
    std::vector<float> k, v;  // [end, n_kv_heads, dim], NaN before begin
  };

  void set_layer() {
    layer_.n_q_heads = case_.n_q_heads;
    layer_.n_kv_heads = case_.n_kv_heads;
    layer_.group_size = case_.n_q_heads / case_.n_kv_heads;
    layer_.k_head_dim = case_.k_dim;
    layer_.v_head_dim = case_.v_dim;
    layer_.k_type = case_.k_type;
    layer_.v_type = case_.v_type;
    layer_.sm_scale = 0.17f;
    layer_.soft_cap = case_.soft_cap;
    layer_.sliding_window = case_.sliding_window;
    for (int32_t h = 0; h < case_.n_q_heads; ++h) sinks_.push_back(static_cast<float>(random_.normal()));
    reference_.n_q_heads = case_.n_q_heads;
    reference_.n_kv_heads = case_.n_kv_heads;
    reference_.k_head_dim = case_.k_dim;
    reference_.v_head_dim = case_.v_dim;
    reference_.k_type = layer_.k_type;
    reference_.v_type = layer_.v_type;
    reference_.sm_scale = layer_.sm_scale;
    reference_.soft_cap = layer_.soft_cap;
    if (case_.has_sinks) reference_.sinks = sinks_;
  }

  // Places planes one after another within a page, with small gaps between heads. The pool has twice as many pages as are
  // used, in any order.
  void make_pool() {
    const PlaneBytes bytes = plane_bytes(layer_);
    const int64_t n_pages = 2 * case_.table_len * static_cast<int64_t>(case_.spans.size());
    int64_t offsets[kPlanes];
    for (int32_t p = 0; p < kPlanes; ++p) {
      offsets[p] = page_bytes_;
      call.pages.head_stride[p] = case_.page_len * bytes.of[p] + 32;
      page_bytes_ += case_.n_kv_heads * call.pages.head_stride[p];
    }
    std::byte* pool = host.allocate(n_pages * page_bytes_);
    for (int32_t p = 0; p < kPlanes; ++p) call.pages.planes[p] = bytes.of[p] > 0 ? pool + offsets[p] : nullptr;
    call.pages.page_len = case_.page_len;
    free_pages_.resize(static_cast<size_t>(n_pages));
    std::iota(free_pages_.begin(), free_pages_.end(), 0);
    for (size_t i = free_pages_.size(); i > 1; --i)
      std::swap(free_pages_[i - 1], free_pages_[static_cast<size_t>(random_.integer(0, static_cast<int64_t>(i) - 1))]);
  }

  void add_sequence(const Span& span) {
    DeviceSequence sequence;
    sequence.begin = span.begin;
    sequence.end = span.end;
    sequence.q_len = span.q_len;
    sequence.first_row = static_cast<int32_t>(n_tokens_);
    sequence.table_begin = static_cast<int32_t>(page_tables_.size());
    sequence.table_len = case_.table_len;
    for (int32_t i = 0; i < case_.table_len; ++i) {
      page_tables_.push_back(free_pages_.back() * page_bytes_);
      free_pages_.pop_back();
    }
    n_tokens_ += span.q_len;
    sequences_.push_back(sequence);
    stored_.emplace_back();
    Stored& stored = stored_.back();
    stored.k.resize(static_cast<size_t>(span.end * case_.n_kv_heads * case_.k_dim), NAN);
    stored.v.resize(static_cast<size_t>(span.end * case_.n_kv_heads * case_.v_dim), NAN);
    for (int64_t token = span.begin; token < span.end; ++token)
      for (int32_t head = 0; head < case_.n_kv_heads; ++head) store_token(sequence, token, head, &stored);
  }

  void store_token(const DeviceSequence& sequence, int64_t token, int32_t head, Stored* stored) {
    const int64_t slot = token % case_.page_len, entry = token / case_.page_len % case_.table_len;
    const int64_t page = page_tables_[static_cast<size_t>(sequence.table_begin + entry)];
    const PlaneBytes bytes = plane_bytes(layer_);
    const auto at = [&](int32_t plane) {
      return call.pages.planes[plane] + page + head * call.pages.head_stride[plane] + slot * bytes.of[plane];
    };
    const auto store = [&](int32_t plane, int32_t dtype, int32_t dim, std::vector<float>* widened) {
      std::vector<double> row(static_cast<size_t>(dim));
      for (double& x : row) x = random_.normal();
      reference::store_row(dtype, row.data(), dim, at(plane), reference::has_groups(dtype) ? at(plane + 1) : nullptr);
      reference::round_row(dtype, row.data(), dim);
      std::copy(row.begin(), row.end(), widened->begin() + (token * case_.n_kv_heads + head) * dim);
    };
    store(kPlaneK, layer_.k_type, case_.k_dim, &stored->k);
    store(kPlaneV, layer_.v_type, case_.v_dim, &stored->v);
  }

  void make_rows(DeviceRows* rows, int32_t dtype, int32_t dim, int64_t gap) {
    rows->dtype = dtype;
    rows->head_stride = dim + gap;
    rows->token_stride = case_.n_q_heads * rows->head_stride + gap;
    rows->data = host.allocate((n_tokens_ + 1) * rows->token_stride * reference::element_bytes(dtype));
  }

  static std::byte* row(const DeviceRows& rows, int64_t token, int64_t head) {
    return static_cast<std::byte*>(rows.data) +
           (token * rows.token_stride + head * rows.head_stride) * reference::element_bytes(rows.dtype);
  }

  void fill_queries() {
    std::vector<double> values(static_cast<size_t>(case_.k_dim));
    for (int64_t token = 0; token < n_tokens_; ++token) {
      for (int32_t head = 0; head < case_.n_q_heads; ++head) {
        for (double& x : values) x = reference::round_to(case_.q_type, random_.normal());
        reference::store_all(case_.q_type, values.data(), case_.k_dim, row(call.q, token, head));
        q_.insert(q_.end(), values.begin(), values.end());
      }
    }
  }

  void name_keys() {
    named_ = std::make_unique<tandem::test::NamedKeys>(case_.lists, sequences_, page_tables_, case_.page_len, random_);
    call.lists.keys = host.upload(named_->keys());
    call.lists.granules = host.upload(named_->granules());
    call.lists.n_heads = call.lists.per_sequence = case_.lists.n_heads;
    call.lists.has_granules = case_.lists.share > 0.0 ? 1 : 0;
  }

  // Makes keys that no row names NaN.
  void name_tiles() {
    int32_t max_q_len = 0;
    for (const Span& span : case_.spans) max_q_len = std::max(max_q_len, span.q_len);
    tiles_ = std::make_unique<tandem::test::NamedTiles>(case_.tiles, layer_.group_size, max_q_len, sequences_, random_);
    const tandem::test::NamedTiles::Made made = tiles_->make(sequences_, page_tables_, case_.page_len);
    call.tiles = made.described;
    call.tiles.lists = host.upload(made.lists);
    call.tiles.keys = host.upload(made.keys);
    const int64_t bytes = plane_bytes(layer_).of[kPlaneK];
    for (size_t i = 0; i < sequences_.size(); ++i)
      for (int64_t token = sequences_[i].begin; token < sequences_[i].end; ++token)
        for (int32_t head = 0; head < case_.n_kv_heads; ++head) {
          if (tiles_->has_any(i, head, token)) continue;
          const int64_t entry = sequences_[i].table_begin + token / case_.page_len % case_.table_len;
          std::memset(call.pages.planes[kPlaneK] + page_tables_[static_cast<size_t>(entry)] +
                          head * call.pages.head_stride[kPlaneK] + token % case_.page_len * bytes,
                      0xff, static_cast<size_t>(bytes));
        }
  }

  bool is_by_head() const { return case_.tiles.n_heads > 0 && case_.tiles.classes_by == kByHead; }

  // head: of the reference. It has one KV head for each query head if query heads have keys of their own.
  bool names(size_t idx, int64_t query, int32_t head, int64_t token) const {
    const int32_t per_kv = is_by_head() ? layer_.group_size : 1;
    return (named_ == nullptr || named_->has(idx, head, token)) &&
           (tiles_ == nullptr || tiles_->has(idx, head / per_kv, query, head % per_kv, token));
  }

  void finish_call() {
    call.layer = &layer_;
    call.sequences.sequences = sequences = host.upload(sequences_);
    call.sequences.page_tables = host.upload(page_tables_);
    call.sequences.n_sequences = static_cast<int32_t>(sequences_.size());
    for (const Span& span : case_.spans) {
      call.sequences.max_q_len = std::max(call.sequences.max_q_len, span.q_len);
      call.sequences.max_keys = std::max(call.sequences.max_keys, span.end - span.begin);
    }
    if (case_.has_lse) {
      call.lse_head_stride = 2;
      call.lse_token_stride = 2 * case_.n_q_heads + 1;
      call.lse = reinterpret_cast<float*>(host.allocate((n_tokens_ + 1) * call.lse_token_stride * 4));
    }
    if (case_.has_sinks) call.sinks = host.upload(sinks_);
    const int64_t bytes = host.table.workspace_bytes(host.self, &call);
    call.workspace = host.allocate(bytes);
    host.expect_ok(host.table.fill(host.self, call.workspace, 0, bytes, nullptr, &host.error));
    host.expect_ok(host.wait());
  }

  void check_sequence(size_t idx) {
    const Span& span = case_.spans[idx];
    std::vector<int64_t> positions(static_cast<size_t>(span.end));
    std::iota(positions.begin(), positions.end(), 0);
    const int64_t first_query = span.end - span.q_len;
    Stored stored = stored_[idx];
    reference::RefLayer layer = reference_;
    if (is_by_head()) {
      layer.n_kv_heads = layer.n_q_heads;
      stored = {tandem::test::repeat_heads(stored.k, layer_.group_size, case_.k_dim),
                tandem::test::repeat_heads(stored.v, layer_.group_size, case_.v_dim)};
    }
    reference::LayerRows rows;
    rows.layer = &layer;
    rows.n_tokens = span.end;
    rows.k = stored.k.data();
    rows.v = stored.v.data();
    rows.positions = positions.data();
    reference::Queries queries;
    queries.n_tokens = span.q_len;
    queries.q = q_.data() + static_cast<int64_t>(sequences[idx].first_row) * case_.n_q_heads * case_.k_dim;
    queries.positions = positions.data() + first_query;
    queries.visible = [&](int64_t t, int32_t kv_head, std::vector<int64_t>* keys) {
      const int64_t self = first_query + t;
      const auto of_layer = static_cast<int32_t>(case_.sliding_window);
      const int32_t window = named_ == nullptr ? of_layer : named_->sliding_window(kv_head, of_layer);
      keys->clear();
      for (int64_t j = span.begin; j <= self; ++j)
        if ((window == 0 || self - j < window) && names(idx, t, kv_head, j)) keys->push_back(j);
    };
    const reference::Truth truth = reference::attend_reference(rows, queries);
    for (int64_t t = 0; t < span.q_len; ++t)
      for (int32_t head = 0; head < case_.n_q_heads; ++head) check_row(truth, idx, t, head);
  }

  // Both sums are in double precision, so only the stored types round.
  void check_row(const reference::Truth& truth, size_t idx, int64_t t, int32_t head) {
    const int64_t token = sequences[idx].first_row + t;
    const auto at = static_cast<size_t>(t * case_.n_q_heads + head);
    std::vector<double> o(static_cast<size_t>(case_.v_dim));
    reference::load_all(case_.o_type, row(call.o, token, head), case_.v_dim, o.data());
    for (size_t c = 0; c < o.size(); ++c) {
      const double wanted = truth.o[at * o.size() + c];
      const double bound = 0.51 * reference::epsilon(case_.o_type) * std::fabs(wanted) + 1e-12;
      if (!(std::fabs(o[c] - wanted) <= bound))
        fail_msg("%s: sequence %zu, query %lld, head %d, dim %zu: %.9g for %.9g", case_.name, idx, static_cast<long long>(t),
                 head, c, o[c], wanted);
    }
    if (!case_.has_lse) return;
    const auto lse = static_cast<double>(call.lse[token * call.lse_token_stride + head * call.lse_head_stride]);
    if (!(lse == truth.lse[at] || std::fabs(lse - truth.lse[at]) <= 1e-7 * (1.0 + std::fabs(truth.lse[at]))))
      fail_msg("%s: sequence %zu, query %lld, head %d: lse %.9g for %.9g", case_.name, idx, static_cast<long long>(t), head,
               lse, truth.lse[at]);
  }

  // Memory that was not written is 0xff.
  void check_between() {
    const auto is_untouched = [](const std::byte* from, const std::byte* to) {
      return std::all_of(from, to, [](std::byte b) { return b == std::byte{0xff}; });
    };
    const int64_t row_size = case_.v_dim * reference::element_bytes(case_.o_type);
    for (int64_t token = 0; token < n_tokens_; ++token) {
      for (int32_t head = 0; head < case_.n_q_heads; ++head) {
        const bool is_last = head + 1 == case_.n_q_heads;
        const std::byte* next = is_last ? row(call.o, token + 1, 0) : row(call.o, token, head + 1);
        assert_true(is_untouched(row(call.o, token, head) + row_size, next));
        if (!case_.has_lse) continue;
        const float* lse = call.lse + token * call.lse_token_stride + head * call.lse_head_stride;
        assert_true(is_untouched(reinterpret_cast<const std::byte*>(lse + 1), reinterpret_cast<const std::byte*>(lse + 2)));
      }
    }
    assert_true(is_untouched(row(call.o, n_tokens_, 0), row(call.o, n_tokens_ + 1, 0)));
    const auto* workspace = static_cast<const std::byte*>(call.workspace);
    assert_true(
        std::all_of(workspace, workspace + stand_in::kWorkspaceBytes, [](std::byte b) { return b == std::byte{0}; }));
  }

  const Case case_;
  reference::Random random_;
  Layer layer_;
  reference::RefLayer reference_;
  std::vector<DeviceSequence> sequences_;
  std::vector<int32_t> free_pages_;
  std::vector<int64_t> page_tables_;  // in bytes from page 0
  int64_t page_bytes_ = 0;
  std::vector<Stored> stored_;
  std::vector<float> sinks_, q_;
  std::unique_ptr<tandem::test::NamedKeys> named_;   // null: the call has no key lists
  std::unique_ptr<tandem::test::NamedTiles> tiles_;  // null: the call has no tiles
  int64_t n_tokens_ = 0;
};

// In a ring of 4 pages of 64 tokens.
const std::vector<Span> kDecode = {{0, 1, 1}, {0, 64, 1}, {3, 200, 1}, {710, 950, 1}};
const std::vector<Span> kRagged = {{0, 7, 7}, {0, 130, 1}, {257, 500, 19}, {100, 100, 0}, {64, 320, 3}};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int32_t type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0}) {
    all.push_back({.name = "decode", .k_type = type, .v_type = type, .spans = kDecode});
    all.push_back({.name = "append", .k_type = type, .v_type = TANDEM_Q8_0, .k_dim = 96, .v_dim = 80, .spans = kRagged});
  }
  all.push_back(
      {.name = "bf16 tensors", .k_type = TANDEM_BF16, .q_type = TANDEM_BF16, .o_type = TANDEM_BF16, .spans = kRagged});
  all.push_back({.name = "f16 tensors", .q_type = TANDEM_F16, .o_type = TANDEM_F16, .has_lse = false, .spans = kDecode});
  all.push_back({.name = "window", .n_q_heads = 8, .sliding_window = 50, .spans = kRagged});
  all.push_back({.name = "window of one", .sliding_window = 1, .spans = kRagged});
  all.push_back({.name = "soft cap", .soft_cap = 1.5f, .spans = kRagged});
  all.push_back({.name = "sinks", .sliding_window = 30, .has_sinks = true, .spans = kRagged});
  all.push_back({.name = "longer pages", .page_len = 128, .table_len = 3, .spans = {{1000, 1270, 40}, {0, 384, 384}}});
  all.push_back({.name = "lists", .spans = kDecode, .lists = {.n_heads = 2, .newest = 20}});
  all.push_back({.name = "a list of units", .sliding_window = 90, .spans = kRagged, .lists = {.n_heads = 1, .unit = 16}});
  all.push_back({.name = "lists of ranges",
                 .spans = kRagged,
                 .lists = {.n_heads = 2, .share = 0.0, .newest = 80, .sliding_window = 9}});
  const std::vector<Span> long_ones = {{0, 7, 7}, {257, 490, 70}, {100, 100, 0}, {64, 300, 150}};
  all.push_back({.name = "tiles", .spans = long_ones, .tiles = {.n_heads = 2}});
  all.push_back({.name = "tiles of all heads",
                 .sliding_window = 90,
                 .has_sinks = true,
                 .spans = long_ones,
                 .tiles = {.n_heads = 1, .unit = 128}});
  for (const int32_t n_q_heads : {2, 6, 10, 64})  // groups of 1, 3, 5 and 32
    all.push_back({.name = "tiles of groups",
                   .k_dim = 8,
                   .v_dim = 8,
                   .n_q_heads = n_q_heads,
                   .spans = long_ones,
                   .tiles = {.n_heads = 2}});
  all.push_back({.name = "tiles by heads",
                 .k_dim = 16,
                 .v_dim = 16,
                 .n_q_heads = 10,
                 .spans = long_ones,
                 .tiles = {.n_heads = 2, .classes_by = kByHead}});
  // Queries whose own tokens are no longer resident, or not yet: the first queries see nothing.
  all.push_back({.name = "empty rows", .spans = {{40, 60, 30}, {9, 9, 5}}});
  all.push_back({.name = "empty rows, sinks", .has_sinks = true, .spans = {{40, 60, 30}, {9, 9, 5}}});
  return all;
}

void attends(void**) {
  uint64_t seed = 1;
  for (const Case& one : cases()) Problem(one, seed++).check();
}

// Arguments that the core must not hand to a device. Faults of the call itself are found at once, faults in device memory
// when the device gets there.
void checks_calls(void**) {
  static float of_host[64];
  const struct {
    const char* in_message;
    bool at_once;
    void (*spoil)(Problem& problem);
  } kBad[] = {
      {"max_keys", false, [](Problem& p) { p.call.sequences.max_keys -= 1; }},
      {"max_q_len", false, [](Problem& p) { p.call.sequences.max_q_len -= 1; }},
      {"page table holds", false, [](Problem& p) { p.sequences[0].table_len = 3; }},
      {"page table is no", false, [](Problem& p) { p.sequences[0].table_begin = 4; }},
      {"page is no", false, [](Problem& p) { p.call.pages.planes[kPlaneV] += int64_t{1} << 40; }},
      {"than tokens", false, [](Problem& p) { p.sequences[0].begin = p.sequences[0].end = 4; }},
      {"not zero", false, [](Problem& p) { static_cast<std::byte*>(p.call.workspace)[255] = std::byte{1}; }},
      {"q is no", false, [](Problem& p) { p.call.q.data = of_host; }},
      {"o is no", false, [](Problem& p) { p.call.o.token_stride *= 1000; }},
      {"lse is no", false, [](Problem& p) { p.call.lse = of_host; }},
      {"sinks are no", true, [](Problem& p) { p.call.sinks = of_host; }},
      {"sequences are no", true, [](Problem& p) { ++p.call.sequences.n_sequences; }},
      {"no workspace", true, [](Problem& p) { p.call.workspace = nullptr; }},
      {"workspace is no", true, [](Problem& p) { p.call.workspace = of_host; }},
      {"page_len", true, [](Problem& p) { p.call.pages.page_len = 32; }},
      {"fewer lists of tiles", true, [](Problem& p) { p.call.tiles.per_head = 0; }},
      {"other heads than", true, [](Problem& p) { p.call.tiles.n_heads = 3; }},
      {"longer than the call", false, [](Problem& p) { p.call.tiles.most_tiles -= 1; }},
      {"not its token's", false, [](Problem& p) { p.tile().page += 1; }},
      {"do not ascend", false, [](Problem& p) { (&p.tile())[2] = p.tile(); }},
      {"16 bytes", true, [](Problem& p) { p.call.pages.head_stride[kPlaneK] += 4; }},
  };
  for (const auto& bad : kBad) {
    Problem problem({.name = "bad", .spans = {{0, 256, 8}}, .tiles = {.n_heads = 1, .share = 1.0}}, 7);
    Host& host = problem.host;
    bad.spoil(problem);
    const int32_t status = host.table.attend(host.self, &problem.call, nullptr, &host.error);
    if (bad.at_once) {
      host.expect_refused(status, TANDEM_ERROR_INTERNAL, bad.in_message);
    } else {
      assert_int_equal(status, TANDEM_OK);
      host.expect_fault(bad.in_message);
    }
  }
}

// Every function that takes a layer refuses these.
void refuses_layers(void**) {
  const struct {
    const char* field;
    void (*spoil)(Layer& layer);
  } kUnsupported[] = {
      {"v_aliases_k", [](Layer& layer) { layer.v_aliases_k = true; }},
      {"k_type", [](Layer& layer) { layer.k_type = TANDEM_Q4_64; }},
      {"v_type", [](Layer& layer) { layer.v_type = TANDEM_Q4_64; }},
      {"v_head_dim", [](Layer& layer) { layer.k_head_dim = 192, layer.v_head_dim = 128; }},
  };
  Host host;
  Layer layer;
  host.expect_ok(host.table.supports(host.self, &layer, 1, &host.error));
  for (const auto& one : kUnsupported) {
    Layer spoilt;
    one.spoil(spoilt);
    DeviceAppend append;
    DeviceAttend attend;
    DeviceMerge merge;
    append.layer = attend.layer = merge.layer = &spoilt;
    for (const int32_t status : {host.table.supports(host.self, &spoilt, 1, &host.error),
                                 host.table.append(host.self, &append, nullptr, &host.error),
                                 host.table.attend(host.self, &attend, nullptr, &host.error),
                                 host.table.merge(host.self, &merge, nullptr, &host.error)})
      assert_int_equal(status, TANDEM_ERROR_UNSUPPORTED);
    assert_string_equal(host.error.field, one.field);
    assert_string_not_equal(host.error.message, "");
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(attends),
      cmocka_unit_test(checks_calls),
      cmocka_unit_test(refuses_layers),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
