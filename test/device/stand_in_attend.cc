// SPDX-License-Identifier: MIT
// Attention over pages as the comments of the device's table say, one row of logits at a time. Storage types are read with
// the oracle's arithmetic.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "device/stand_in_call.h"
#include "device/stand_in_sums.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace stand_in {
namespace {

using namespace tandem;

// The keys that queries of one sequence and KV head read. Row i is token tokens[i].
struct Keys {
  std::vector<int64_t> tokens;
  std::vector<double> k;  // [n, k_head_dim]
  std::vector<double> v;  // [n, v_head_dim]
  int64_t sliding_window;
  bool is_wrong = false;  // the list is wrong: outputs are NaN
};

// Adds the tokens of granules, each from the page that the sequence's table names.
void add_granules(const DeviceAttend& call, const DeviceSequence& sequence, const DeviceKeys& own, Keys* keys) {
  const int64_t* table = call.sequences.page_tables + sequence.table_begin;
  require(own.n <= 0 || call.lists.has_granules == 1, "there are granules that the call has not announced");
  for (int32_t i = 0; i < own.n; ++i) {
    const KeyGranule& granule =
        *on_device(call.lists.granules + own.first + i, sizeof(KeyGranule), "a granule is no device memory");
    require(granule.token % kGranuleKeys == 0 && granule.keys < 256, "a granule does not begin where one may");
    require(granule.page == table[granule.token / call.pages.page_len % sequence.table_len],
            "a granule's page is not its token's");
    for (int32_t bit = 0; bit < kGranuleKeys; ++bit) {
      if ((granule.keys >> bit & 1) == 0) continue;
      const int64_t token = granule.token + bit;
      require(token >= sequence.begin && token < own.begin && (keys->tokens.empty() || keys->tokens.back() < token),
              "tokens of a list do not ascend, or are not before its range");
      keys->tokens.push_back(token);
    }
  }
}

const DeviceTiles& tiles_of(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head, int32_t row) {
  const DeviceTileLists& tiles = call.tiles;
  const int64_t s = &sequence - call.sequences.sequences, head = tiles.n_heads == 1 ? 0 : kv_head;
  return *on_device(tiles.lists + s * tiles.per_sequence + head * tiles.per_head + row / kTileRows, sizeof(DeviceTiles),
                    "a list of tiles is no device memory");
}

// Checks all entries of a list, whether or not this row reads them.
void check_tiles(const DeviceAttend& call, const DeviceSequence& sequence, const DeviceTiles& list) {
  const int64_t* table = call.sequences.page_tables + sequence.table_begin;
  const int32_t n_words = tile_words(call.layer->group_size, call.tiles.classes_by);
  require(list.n >= 0 && list.n <= call.tiles.most_tiles, "a list of tiles is longer than the call has said");
  int64_t before = -1;
  for (int32_t i = 0; i < list.n * n_words; ++i) {
    const KeyTile& tile = *on_device(call.tiles.keys + list.first + i, sizeof(KeyTile), "a tile is no device memory");
    require(tile.token % kTileTokens == 0, "a tile does not begin where one may");
    require(i % n_words == 0 ? tile.token > before : tile.token == before, "tiles do not ascend");
    require(tile.page == table[tile.token / call.pages.page_len % sequence.table_len], "a tile's page is not its token's");
    before = tile.token;
  }
}

// Adds the tokens of the tiles that name a row's class.
void add_tiles(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head, int32_t row, Keys* keys) {
  const DeviceTiles& list = tiles_of(call, sequence, kv_head, row);
  const int32_t group = call.layer->group_size, n_words = tile_words(group, call.tiles.classes_by);
  const int32_t own = call.tiles.classes_by == kByHead ? row % group : row / group - row / kTileRows * kTileRows / group;
  for (int32_t i = 0; i < list.n; ++i) {
    const KeyTile& tile = call.tiles.keys[list.first + i * n_words + own / 32];
    if ((tile.classes >> own % 32 & 1) == 0) continue;
    for (int64_t token = tile.token; token < tile.token + kTileTokens; ++token)
      if (token >= sequence.begin && token < sequence.end) keys->tokens.push_back(token);
  }
}

// row: one of the sequence's q_len * group_size rows.
void name_keys(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head, int32_t row, Keys* keys) {
  const DeviceLists& lists = call.lists;
  int64_t begin = sequence.begin;
  keys->sliding_window = call.layer->sliding_window;
  if (call.tiles.lists != nullptr) return add_tiles(call, sequence, kv_head, row, keys);
  if (lists.keys != nullptr) {
    const int64_t entry = (&sequence - call.sequences.sequences) * lists.per_sequence + (lists.n_heads == 1 ? 0 : kv_head);
    const DeviceKeys& own = *on_device(lists.keys + entry, sizeof(DeviceKeys), "a key list is no device memory");
    require(own.begin >= sequence.begin && own.begin <= sequence.end, "a list's range begins outside the sequence");
    require(own.n >= -1 && own.sliding_window >= 0, "a negative number of granules, or sliding window");
    keys->is_wrong = own.n == -1;
    add_granules(call, sequence, own, keys);
    begin = own.begin;
    if (own.sliding_window > 0) keys->sliding_window = own.sliding_window;
  }
  for (int64_t token = begin; token < sequence.end; ++token) keys->tokens.push_back(token);
}

Keys load_keys(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head, int32_t row) {
  const Layer& layer = *call.layer;
  Keys keys;
  name_keys(call, sequence, kv_head, row, &keys);
  const size_t n = keys.tokens.size();
  const auto k_dim = static_cast<size_t>(layer.k_head_dim), v_dim = static_cast<size_t>(layer.v_head_dim);
  const WindowRows window(call, sequence);
  keys.k.resize(n * k_dim);
  keys.v.resize(n * v_dim);
  const auto load = [&](Plane codes, Plane scales, int32_t dtype, int64_t token, double* to, int32_t dim) {
    const std::byte* of_scales = reference::has_groups(dtype) ? window.row(scales, kv_head, token) : nullptr;
    reference::load_row(dtype, window.row(codes, kv_head, token), of_scales, dim, to);
  };
  for (size_t i = 0; i < n; ++i) {
    const int64_t token = keys.tokens[i];
    load(kPlaneK, kPlaneKScales, window_layer(layer).k_type, token, keys.k.data() + i * k_dim, layer.k_head_dim);
    load(kPlaneV, kPlaneVScales, layer.v_type, token, keys.v.data() + i * v_dim, layer.v_head_dim);
  }
  return keys;
}

double logit(const Layer& layer, const std::vector<double>& q, const double* k) {
  const double x = dot(q.data(), k, q.size()) * static_cast<double>(layer.sm_scale);
  const auto cap = static_cast<double>(layer.soft_cap);
  return cap > 0.0 ? cap * std::tanh(x / cap) : x;
}

// The state of a row over other keys.
struct Before {
  double lse = -INFINITY;
  const float* o = nullptr;
};

Before find_before(const DeviceAttend& call, int64_t row, int32_t head) {
  if (call.before_o == nullptr) return {};
  const int64_t at = row * call.layer->n_q_heads + head, dim = call.layer->v_head_dim;
  return {static_cast<double>(*on_device(call.before_lse + at, 4, "lse of before is no device memory")),
          on_device(call.before_o + at * dim, 4 * dim, "o of before is no device memory")};
}

const DeviceOutput& output_of(const DeviceAttend& call, const DeviceOutput& out, const DeviceSequence& sequence) {
  return call.finished.o.data != nullptr && sequence.has_host_part == 0 ? call.finished : out;
}

// Attends query t of a sequence in one head.
void attend_row(const DeviceAttend& call, const DeviceSequence& sequence, const Keys& keys, int32_t t, int32_t head) {
  const Layer& layer = *call.layer;
  const int64_t row = sequence.first_row + t, self = sequence.end + sequence.n_after - sequence.q_len + t;
  std::vector<double> q(static_cast<size_t>(layer.k_head_dim)), o(static_cast<size_t>(layer.v_head_dim), 0.0);
  reference::load_all(call.q.dtype, row_at(call.q, row, head, layer.k_head_dim, "q is no device memory"), layer.k_head_dim,
                      q.data());
  const int64_t reach = keys.sliding_window > 0 ? keys.sliding_window : std::numeric_limits<int64_t>::max();
  const auto find = [&](int64_t token) { return std::lower_bound(keys.tokens.begin(), keys.tokens.end(), token); };
  const auto first = static_cast<size_t>(find(reach > self ? 0 : self - reach + 1) - keys.tokens.begin());
  const auto end = static_cast<size_t>(find(self + 1) - keys.tokens.begin());

  const Before before = find_before(call, row, head);
  const DeviceOutput all = {call.o, call.lse, call.lse_token_stride, call.lse_head_stride, call.sinks};
  const DeviceOutput& to = output_of(call, all, sequence);
  double m = to.sinks != nullptr ? static_cast<double>(to.sinks[head]) : -INFINITY;
  std::vector<double> logits;
  logits.reserve(end > first ? end - first : 0);
  for (size_t i = first; i < end; ++i) {
    logits.push_back(logit(layer, q, keys.k.data() + i * q.size()));
    m = std::max(m, logits.back());
  }
  m = std::max(m, before.lse);
  const double from = m == -INFINITY ? 0.0 : m;
  double sum = to.sinks != nullptr ? std::exp(static_cast<double>(to.sinks[head]) - from) : 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - from);
    const double* v = keys.v.data() + (first + i) * o.size();
    sum += p;
    add_scaled(o.data(), p, v, o.size());
  }
  if (before.lse != -INFINITY) {
    const double p = std::exp(before.lse - from);
    sum += p;
    for (size_t c = 0; c < o.size(); ++c) o[c] += p * static_cast<double>(before.o[c]);
  }
  if (keys.is_wrong) sum = NAN;
  if (sum != 0.0)  // NaN is not an empty state
    for (double& x : o) x /= sum;
  reference::store_all(to.o.dtype, o.data(), layer.v_head_dim,
                       row_at(to.o, row, head, layer.v_head_dim, "o is no device memory"));
  if (to.lse != nullptr)
    *on_device(to.lse + row * to.lse_token_stride + head * to.lse_head_stride, 4, "lse is no device memory") =
        sum != 0.0 ? static_cast<float>(from + std::log(sum)) : -std::numeric_limits<float>::infinity();
}

// Attends the rows of a sequence and KV head. The rows of one query have the same keys, unless their tiles come from
// different lists or name heads.
void attend_rows(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head) {
  const int32_t group = call.layer->group_size, n_rows = sequence.q_len * group;
  const bool has_tiles = call.tiles.lists != nullptr;
  for (int32_t row = 0; has_tiles && row < n_rows; row += kTileRows)
    check_tiles(call, sequence, tiles_of(call, sequence, kv_head, row));
  Keys keys;
  for (int32_t row = 0; row < n_rows; ++row) {
    const bool is_new = row % group == 0 || row % kTileRows == 0 || call.tiles.classes_by == kByHead;
    if (row == 0 || (has_tiles && is_new)) keys = load_keys(call, sequence, kv_head, row);
    attend_row(call, sequence, keys, row / group, kv_head * group + row % group);
  }
}

void check_lists(const DeviceTileLists& tiles, const DeviceAttend& call) {
  if (tiles.lists == nullptr) return require(tiles.keys == nullptr && tiles.n_heads == 0, "tiles without lists");
  const int64_t n_rows = int64_t{call.sequences.max_q_len} * call.layer->group_size;
  require(tiles.n_heads == 1 || tiles.n_heads == call.layer->n_kv_heads, "there are tiles for other heads than the layer's");
  require(call.lists.keys == nullptr, "there are both granules and tiles");
  require(tiles.per_head >= (n_rows + kTileRows - 1) / kTileRows, "a head has fewer lists of tiles than rows need");
  require(call.sequences.n_sequences <= 1 || tiles.per_sequence >= tiles.n_heads * tiles.per_head,
          "lists of tiles of two sequences are in one place");
  require(tiles.classes_by == kByQuery || (tiles.classes_by == kByHead && call.layer->group_size <= 32),
          "classes of tiles are neither queries nor up to 32 heads");
}

}  // namespace

void check(const DeviceAttend& call) {
  check_layer(*call.layer);
  check_pages(call.pages);
  check_sequences(call.sequences);
  require(call.workspace != nullptr, "there is no workspace");
  on_device(call.workspace, kWorkspaceBytes, "the workspace is no device memory");
  require((call.before_o == nullptr) == (call.before_lse == nullptr), "half a state of before");
  require(call.before_o == nullptr || call.finished.o.data == nullptr, "rows that are finished have states of before");
  require(call.append == nullptr || call.append->epoch != 0, "attention runs beside an append without an epoch");
  const DeviceLists& lists = call.lists;
  require(lists.keys == nullptr || lists.n_heads == 1 || lists.n_heads == call.layer->n_kv_heads,
          "there are lists for other heads than the layer's");
  const int64_t n_rows = int64_t{call.sequences.max_q_len} * call.layer->group_size;
  check_lists(call.tiles, call);
  require(lists.has_granules == 0 || call.before_o == nullptr, "there are granules, and states of before");
  require(lists.has_granules == 0 || n_rows <= most_list_rows(), "there are more query rows than lists with granules take");
  on_device(call.sinks, call.sinks != nullptr ? int64_t{4} * call.layer->n_q_heads : 0, "the sinks are no device memory");
}

bool perform(const DeviceAttend& call) {
  if (call.lists.has_granules != 0)
    note_largest(&counts.largest_list_rows, int64_t{call.sequences.max_q_len} * call.layer->group_size);
  const auto* workspace = static_cast<const std::byte*>(call.workspace);
  require(std::all_of(workspace, workspace + kWorkspaceBytes, [](std::byte b) { return b == std::byte{0}; }),
          "the workspace is not zero");
  const DeviceSequence* sequences = read_sequences(call.sequences, -1);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) check_table(call.sequences, sequences[i], call.pages.page_len);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    for (int32_t kv_head = 0; kv_head < call.layer->n_kv_heads; ++kv_head) attend_rows(call, sequences[i], kv_head);
  }
  return true;
}

}  // namespace stand_in
