// SPDX-License-Identifier: MIT
// Long appends: the length of their chunks, the KV heads that go together, and the memory that they need.
#include "lib/routes/prefill_size.h"

#include <algorithm>

#include "lib/device/device_session.h"
#include "with_cmocka.h"

using namespace tandem;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

Layer layer_of(int32_t n_kv_heads, int32_t group_size, int32_t dim = 128) {
  Layer layer;
  layer.n_kv_heads = n_kv_heads;
  layer.group_size = group_size;
  layer.n_q_heads = group_size * n_kv_heads;
  layer.k_head_dim = layer.v_head_dim = dim;
  layer.k_type = layer.v_type = TANDEM_BF16;
  return layer;
}

PrefillTerms terms_of(const Layer& layer, int32_t piece_heads = 0, int64_t append_tokens = 0) {
  return {2048, 16 * kMiB, 132, piece_heads, append_tokens, plane_bytes(layer).total() * layer.n_kv_heads * kDevicePageLen};
}

PrefillSize size_of(const Layer& layer, const PrefillTerms& terms, int64_t n_queries, int64_t n_keys) {
  PrefillSize size;
  const Status status = size_prefill(layer, terms, n_queries, {n_keys, n_keys}, &size);
  if (!status.ok()) fail_msg("%s", status.info().message.c_str());
  return size;
}

// Chunks have equal lengths of whole tickets, and none is longer than requested. The states of a group are bounded.
void chunks(void**) {
  for (const int64_t wanted : {0, 100, 512, 700, 4096, 1 << 20})
    for (const int64_t n_queries : {1, 513, 5000, 16384, 16385, 100'000})
      for (const int32_t group_size : {1, 4, 32}) {
        const Layer layer = layer_of(8, group_size);
        const PrefillSize size = size_of(layer, terms_of(layer, 0, wanted), n_queries, 100'000);
        const int64_t most = wanted == 0 ? kMostAppend : wanted, ticket = std::min<int64_t>(512, most);
        assert_int_equal(size.n_tokens % ticket, 0);
        assert_in_range(size.n_tokens, ticket, std::max(ticket, most));
        assert_true(tickets_of(size.n_tokens) <= n_tasks_of(1));  // a session of one layer, whose tasks are all needed
        const int64_t n_chunks = (n_queries + size.n_tokens - 1) / size.n_tokens;
        assert_true(n_chunks * size.n_tokens - n_queries < n_chunks * ticket + ticket);  // no chunk is much shorter
        assert_true(size.lse_at - size.o_at <= 96 * kMiB);
        assert_in_range(size.room_tokens, size.n_tokens, std::max(ticket, most));
        if (wanted == 0) assert_int_equal(size.room_tokens, size.n_tokens);
        const int64_t lse_bytes = size.room_tokens * size.layout.n_heads * group_size * 4;
        assert_in_range(size.rows_at - size.lse_at, lse_bytes, lse_bytes + 255);
        const int64_t row_bytes = plane_bytes(layer).total() * layer.n_kv_heads * size.room_tokens;
        assert_in_range(size.rows_bytes, row_bytes, row_bytes + kPlanes * 255);
        assert_int_equal(size.area_bytes, size.rows_at + 2 * size.rows_bytes);
        assert_int_equal(size.o_at, (size.room_tokens + kDevicePageLen - 1) / kDevicePageLen *
                                        terms_of(layer, 0, wanted).layer_page_bytes);
      }
}

// Groups follow the request. Otherwise they are as large as the model allows without becoming slower.
void groups(void**) {
  const Layer layer = layer_of(8, 4);
  for (const int32_t heads : {1, 2, 3, 8, 100})
    assert_int_equal(size_of(layer, terms_of(layer, heads), 10'240, 100'000).layout.n_heads,
                     heads == 3 ? 3 : std::min(heads, 8));
  for (const int64_t n_queries : {600, 2048, 4096, 10'240, 16'384})
    for (const int64_t n_keys : {10'000, 40'000, 100'000, 1'000'000}) {
      const PrefillSize size = size_of(layer, terms_of(layer), n_queries, n_keys);
      for (const int32_t heads : {1, 2, 4}) {
        const PrefillSize other = size_of(layer, terms_of(layer, heads), n_queries, n_keys);
        if (other.lse_at - other.o_at > 96 * kMiB) continue;
        assert_true(size.assumed_ns <= other.assumed_ns);
      }
    }
}

// Memory is planned for appends of append_tokens. Longer appends use chunks of at most that length and need no more memory.
void takes_what_is_planned(void**) {
  PolicyOptions options;
  const Layer layer = layer_of(8, 4);
  for (const int64_t append_tokens : {700, 2000, 4096, 10'000, 10'240, 16'384, 50'000})
    for (const int64_t window_len : {512, 4096})
      for (const int64_t kv_len : {16'384, 20'480, 32'768, 65'536, 102'400, 409'600, 10'000'000})
        for (const int64_t n_queries : {append_tokens + 1, kv_len / 2, kv_len}) {
          options.window_len = window_len;
          const auto of = [&](int64_t n) {
            PrefillSize size;
            const Status status = size_prefill(layer, terms_of(layer, 0, append_tokens), n,
                                               keys_of_append(options, 128, planned_sequence(layer, kv_len, n)), &size);
            assert_true(status.ok());
            return size;
          };
          const int64_t n_planned = std::min(append_tokens, kv_len);
          const PrefillSize planned = of(n_planned), taken = of(std::clamp(n_queries, n_planned, kv_len));
          assert_int_equal(taken.layout.n_heads, planned.layout.n_heads);
          assert_in_range(taken.area_bytes, 1, planned.area_bytes);
          assert_in_range(taken.n_tokens, 1, planned.room_tokens);
          assert_int_equal(taken.room_tokens, planned.room_tokens);
        }
}

// No keys until the window is full. In layers with sliding windows, keys begin at the first query's window.
void keys_of_appends(void**) {
  PolicyOptions options;
  options.window_len = 1024;
  Layer layer = layer_of(8, 4);
  const auto of = [&](int64_t kv_len, int64_t n) {
    return keys_of_append(options, 128, planned_sequence(layer, kv_len, n));
  };
  assert_true(of(1000, 600).first == 0 && of(1000, 600).end == 0);
  assert_true(of(1024 + 1280 + 1, 640).first == 640 && of(1024 + 1280 + 1, 640).end == 1280);
  layer.sliding_window = 512;
  assert_true(of(8192, 600).first == 0 && of(8192, 600).end == 0);
  assert_true(of(8192, 2048).first == 0);
  layer.sliding_window = 2048;
  assert_true(of(8192, 600).first == 983 && of(8192, 600).end == 1495);
}

// As many tiles of a head as the device has blocks are efficient. A few more tiles cause a second wave.
void fills_the_device(void**) {
  const Layer layer = layer_of(8, 4);
  const auto ns = [&](int32_t heads, int64_t n_queries) {
    return prefill_ns(layer, size_of(layer, terms_of(layer, heads), n_queries, 100'000).layout, n_queries, 100'000, 132,
                      assumed_tile_ns(layer));
  };
  assert_true(ns(1, 4224) / 4224 < 0.8 * ns(1, 5120) / 5120);
  assert_true(size_of(layer, terms_of(layer), 10'240, 100'000).layout.n_heads > 1);
}

// If kernels take twice as long for a tile, because of other types or another device, the plan follows. A few queries still
// wait for the bus.
void follows_the_kernels(void**) {
  const Layer layer = layer_of(8, 4);
  const auto ns = [&](int64_t n_queries, double tile_ns) {
    return prefill_ns(layer, size_of(layer, terms_of(layer), n_queries, 100'000).layout, n_queries, 100'000, 132, tile_ns);
  };
  assert_true(ns(10'240, 3000.0) > 1.8 * ns(10'240, 1500.0));
  assert_true(ns(10'240, 3000.0) < 2.0 * ns(10'240, 1500.0));
  assert_true(ns(600, 300.0) == ns(600, 150.0));
  assert_true(assumed_tile_ns(layer_of(8, 4, 64)) == assumed_tile_ns(layer) / 2);
  // The measured time of a wave over a piece, run alone, becomes the planned time of pieces of one wave.
  const int64_t n_wave = queries_of_a_wave(layer_of(2, 4), 132), n_piece = 16'384;
  const StreamLayout of_two = size_of(layer, terms_of(layer, 2), n_wave, n_piece).layout;
  assert_int_equal(of_two.piece_len(), n_piece);
  const double tried = 400'000.0, planned = prefill_ns(layer, of_two, n_wave, n_piece, 132, tile_ns_of_wave(tried, n_piece));
  assert_true(planned > 0.999 * 4 * tried && planned < 1.001 * 4 * tried);
}

// Rows may be computed beside pieces that take long enough. If pieces of two heads are too short, four heads give the rows
// enough time.
void rows_may_have_time(void**) {
  const Layer layer = layer_of(8, 4);
  assert_true(size_of(layer, terms_of(layer), 10'240, 100'000).rows_have_time);
  assert_true(size_of(layer, terms_of(layer), 4096, 100'000).rows_have_time);
  assert_false(size_of(layer, terms_of(layer), 10'240, 10'000).rows_have_time);
  assert_int_equal(size_of(layer, terms_of(layer), 10'240, 100'000).layout.n_heads, 2);
  assert_int_equal(size_of(layer, terms_of(layer), 10'240, 10'000).layout.n_heads, 4);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(chunks),
                              cmocka_unit_test(groups),
                              cmocka_unit_test(takes_what_is_planned),
                              cmocka_unit_test(keys_of_appends),
                              cmocka_unit_test(fills_the_device),
                              cmocka_unit_test(follows_the_kernels),
                              cmocka_unit_test(rows_may_have_time)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
