// SPDX-License-Identifier: MIT
// observe() of the stand-in: each rule on numbers that are worked out by hand, its refusals, and its place in the handshake.
// test/cuda/observe_test.cc compares arbitrary windows with double precision, on the stand-in as well.
#include <cmath>
#include <limits>
#include <string>

#include "device/hand_over.h"
#include "with_cmocka.h"

namespace {

using namespace stand_in;
using namespace tandem;

constexpr int32_t kPageLen = 64, kDim = 4;
constexpr float kNone = std::numeric_limits<float>::quiet_NaN(), kInfinite = std::numeric_limits<float>::infinity();

struct Sequence {
  int64_t begin, end;
  int32_t q_len;
  int64_t n_evicted = 0;
};

Layer small_layer(int32_t n_q_heads, int32_t n_kv_heads) {
  Layer layer;
  layer.n_q_heads = n_q_heads;
  layer.n_kv_heads = n_kv_heads;
  layer.group_size = n_q_heads / n_kv_heads;
  layer.k_head_dim = layer.v_head_dim = kDim;
  layer.k_type = layer.v_type = TANDEM_F32;
  return layer;
}

// A logit is the product of a key's and a query's number. So a key of log(w) has weight w for a query of 1 with lse = 0.
// Averages are 0.8 and queries are 1 unless a test sets them. Each sequence has two pages, in reverse order.
class Small {
 public:
  explicit Small(const std::vector<Sequence>& spans, int32_t n_q_heads = 1, int32_t n_kv_heads = 1)
      : layer(small_layer(n_q_heads, n_kv_heads)), hand_over(&host, layer, 2, 8, 9) {
    const auto n_pages = static_cast<int64_t>(2 * spans.size());
    k_bytes_ = int64_t{n_kv_heads} * kPageLen * kDim * 4;
    page_bytes_ = k_bytes_ + int64_t{n_q_heads} * kPageLen * 4;
    pool_ = host.allocate(n_pages * page_bytes_);
    for (int64_t i = 0; i < n_pages; ++i) tables_.push_back((n_pages - 1 - i) * page_bytes_);
    int32_t first_row = 0, first_evicted = 1;
    for (const Sequence& from : spans) {
      DeviceSequence to;
      to.begin = from.begin;
      to.end = from.end;
      to.q_len = from.q_len;
      to.first_row = first_row;
      to.table_begin = static_cast<int32_t>(2 * descriptors_.size());
      to.table_len = 2;
      to.evict_end = from.n_evicted > 0 ? from.begin + from.n_evicted : 0;
      to.first_evicted = first_evicted;
      first_row += from.q_len;
      first_evicted += static_cast<int32_t>(from.n_evicted);
      descriptors_.push_back(to);
    }
    make_call(n_q_heads);
    for (size_t s = 0; s < spans.size(); ++s)
      for (int64_t token = spans[s].begin; token < spans[s].end; ++token) {
        for (int32_t head = 0; head < n_kv_heads; ++head) key(token, 0.0f, head, s);
        for (int32_t head = 0; head < n_q_heads; ++head) maw(token, head, s) = 0.8f;
      }
  }

  void key(int64_t token, float logit, int32_t kv_head = 0, size_t s = 0) {
    auto* row = reinterpret_cast<float*>(page(token, s)) + (kv_head * kPageLen + token % kPageLen) * kDim;
    std::fill_n(row, kDim, 0.0f);
    row[1] = logit;
  }
  void weights(const std::vector<double>& of_tokens) {
    for (size_t i = 0; i < of_tokens.size(); ++i)
      key(descriptors_[0].begin + static_cast<int64_t>(i), static_cast<float>(std::log(of_tokens[i])));
  }
  float& maw(int64_t token, int32_t head = 0, size_t s = 0) {
    return reinterpret_cast<float*>(page(token, s) + k_bytes_)[head * kPageLen + token % kPageLen];
  }
  void query(int64_t row, float factor, float lse_of_row) {
    for (int32_t head = 0; head < layer.n_q_heads; ++head) {
      float* q = static_cast<float*>(call.q.data) + row * call.q.token_stride + head * call.q.head_stride;
      std::fill_n(q, kDim, 7.0f);
      q[1] = factor;
      lse[row * layer.n_q_heads + head] = lse_of_row;
    }
  }

  void run() {
    host.expect_ok(host.table.append(host.self, &append, nullptr, &host.error));
    host.expect_ok(host.table.observe(host.self, &call, nullptr, &host.error));
    host.expect_ok(host.wait());
    assert_int_equal(observed(), hand_over.arrived());
  }
  void expect(int64_t token, double wanted, int32_t head = 0, size_t s = 0) {
    const auto is = static_cast<double>(maw(token, head, s));
    if (!(std::fabs(is - wanted) <= 1e-6))
      fail_msg("token %d, head %d: %.9g for %.9g", static_cast<int>(token), head, is, wanted);
  }
  float evicted(int32_t column, int32_t head = 0) const {
    return hand_over.floats(hand_over.arrived() - 1, call.exchange.maw_at)[head * call.exchange.n_evicted + column];
  }
  uint64_t observed() const { return std::atomic_ref(hand_over.flags->observed).load(std::memory_order_acquire); }

  Host host;
  const Layer layer;
  HandOver hand_over;
  DeviceAppend append;
  DeviceObserve call;
  DeviceSequence* sequences = nullptr;
  float* lse = nullptr;

 private:
  std::byte* page(int64_t token, size_t s) const {
    return pool_ + tables_[static_cast<size_t>(descriptors_[s].table_begin + token / kPageLen % 2)];
  }

  void make_call(int32_t n_q_heads) {
    call.layer = append.layer = &layer;
    call.exchange = append.exchange = hand_over.exchange;
    call.n_tokens = append.n_tokens = 8;
    sequences = host.upload(descriptors_);
    call.sequences.sequences = sequences;
    call.sequences.page_tables = host.upload(tables_);
    call.sequences.n_sequences = static_cast<int32_t>(descriptors_.size());
    call.sequences.max_q_len = 8;
    call.sequences.max_keys = INT32_MAX;
    append.sequences = call.sequences;
    call.pages.page_len = kPageLen;
    call.pages.planes[kPlaneK] = pool_;
    call.pages.head_stride[kPlaneK] = int64_t{kPageLen} * kDim * 4;
    call.pages.maw = reinterpret_cast<float*>(pool_ + k_bytes_);
    call.q.dtype = TANDEM_F32;
    call.q.head_stride = kDim + 1;
    call.q.token_stride = n_q_heads * call.q.head_stride + 2;
    call.q.data = host.allocate(8 * call.q.token_stride * 4);
    lse = reinterpret_cast<float*>(host.allocate(int64_t{8} * n_q_heads * 4));
    call.lse = lse;
    call.alpha = 0.5f;
    call.n_counted = 100;
    call.has_appended = 1;
    for (int64_t row = 0; row < 8; ++row) query(row, 1.0f, 0.0f);
  }

  std::byte* pool_ = nullptr;
  int64_t k_bytes_ = 0, page_bytes_ = 0;
  std::vector<int64_t> tables_;
  std::vector<DeviceSequence> descriptors_;
};

// The new average is 0.5 old + 0.5 w. A new token has no old average.
void counts_a_query(void**) {
  Small small({{0, 3, 1}});
  small.weights({0.5, 0.25, 0.125});
  small.maw(1) = 0.2f;
  small.maw(2) = kNone;
  small.run();
  small.expect(0, 0.65);
  small.expect(1, 0.225);
  small.expect(2, 0.0625);
  small.call.has_appended = 0;
  small.hand_over.answer(1);
  small.run();
  small.expect(0, 0.575);
  small.expect(1, 0.2375);
  small.expect(2, 0.09375);
}

// The second query is 2 with lse = log 0.5. Keys of 0.5, 0.25 and 0.5 have weights 0.5, 0.125 and 0.5 for it. The first
// query does not see the last key.
void counts_queries_in_their_order(void**) {
  for (const int32_t n_counted : {2, 1}) {
    Small small({{0, 3, 2}});
    small.weights({0.5, 0.25, 0.5});
    small.query(1, 2.0f, static_cast<float>(std::log(0.5)));
    small.maw(1) = small.maw(2) = kNone;
    small.call.n_counted = n_counted;
    small.run();
    small.expect(0, n_counted == 2 ? 0.2 + 0.125 + 0.25 : 0.2 + 0.25);
    small.expect(1, n_counted == 2 ? 0.0625 + 0.0625 : 0.0625);
    small.expect(2, 0.25);
  }
}

void alpha_may_be_one(void**) {
  Small small({{0, 2, 1}});
  small.weights({0.5, 0.25});
  small.call.alpha = 1.0f;
  small.run();
  small.expect(0, 0.5);
  small.expect(1, 0.25);
}

// The query attended nothing, or its lse is no usable number: old averages fade and nothing is added.
void lse_that_are_not_finite_count_nothing(void**) {
  for (const float lse : {-kInfinite, kInfinite, kNone}) {
    Small small({{0, 2, 1}});
    small.query(0, 1.0f, lse);
    small.run();
    small.expect(0, 0.4);
    small.expect(1, 0.0);
  }
}

// tanh(log 0.5) = -0.6, and tanh(2 log 0.5) = -15 / 17.
void caps_and_scales_logits(void**) {
  for (const float scale : {1.0f, 2.0f}) {
    Small small({{0, 1, 1}});
    small.weights({0.5});
    Layer layer = small.layer;
    layer.soft_cap = 1.0f;
    layer.sm_scale = scale;
    small.call.layer = &layer;
    small.run();
    small.expect(0, 0.5 * std::exp(scale > 1.0f ? -15.0 / 17.0 : -0.6));
  }
}

// Heads of a group share their key. Each has lse of its own queries and averages of its own.
void heads_are_apart(void**) {
  Small small({{0, 1, 1}}, 4, 2);
  small.call.has_appended = 0;
  small.key(0, static_cast<float>(std::log(0.5)), 0);
  small.key(0, static_cast<float>(std::log(0.25)), 1);
  for (int32_t head = 0; head < 4; ++head) {
    small.maw(0, head) = 0.1f * static_cast<float>(head);
    small.lse[head] = static_cast<float>(head % 2 == 0 ? 0.0 : std::log(0.5));
  }
  small.run();
  small.expect(0, 0.0 + 0.25, 0);
  small.expect(0, 0.05 + 0.5, 1);
  small.expect(0, 0.1 + 0.125, 2);
  small.expect(0, 0.15 + 0.25, 3);
}

// Two sequences, the second without a query, hand over averages across the end of a page. The rest of the slot's rows stays
// as it was.
void hands_over_what_leaves(void**) {
  Small small({{62, 67, 1, 3}, {130, 140, 0, 2}}, 2, 1);
  small.key(64, static_cast<float>(std::log(0.5)));
  small.maw(131, 1, 1) = 0.3f;
  small.run();
  for (int32_t head = 0; head < 2; ++head) {
    const float wanted[] = {kNone, 0.9f, 0.9f, 0.65f, 0.8f, head == 1 ? 0.3f : 0.8f, kNone, kNone, kNone};
    for (int32_t column = 0; column < 9; ++column) {
      const float is = small.evicted(column, head), should = wanted[column];
      if (!(std::isnan(should) ? std::isnan(is) : std::fabs(is - should) <= 1e-6f))
        fail_msg("column %d, head %d: %g for %g", column, head, static_cast<double>(is), static_cast<double>(should));
    }
    small.expect(64, 0.65, head);
    small.expect(65, 0.9, head);
    small.expect(66, 0.5, head);
    small.expect(135, 0.8, head, 1);
  }
  assert_true(std::isnan(small.maw(67)) && std::isnan(small.maw(61)));
}

void nothing_resident_is_observed_too(void**) {
  Small small({{70, 70, 1}});
  small.run();
  assert_int_equal(small.observed(), 1);
}

// Late, in stream order, and from a graph, with the descriptors of that moment.
void streams_and_graphs(void**) {
  Small small({{0, 2, 1, 1}});
  Host& host = small.host;
  void* stream = host.controls.create_stream();
  const int64_t n_observed = host.counts.n_observed;
  assert_true(host.controls.begin_capture(stream));
  host.expect_ok(host.table.append(host.self, &small.append, stream, &host.error));
  host.expect_ok(host.table.observe(host.self, &small.call, stream, &host.error));
  void* graph = host.controls.end_capture(stream);
  assert_int_equal(host.counts.n_observed, n_observed);
  host.controls.set_delay(5'000'000);
  assert_true(host.controls.launch(graph, stream));
  assert_int_equal(small.observed(), 0);
  host.expect_ok(host.wait(stream));
  assert_int_equal(small.observed(), 1);
  small.expect(0, 0.9);
  assert_true(std::fabs(small.evicted(1) - 0.9f) < 1e-6f);
  small.hand_over.answer(1);
  small.sequences[0].begin = 1;
  small.sequences[0].evict_end = 0;
  assert_true(host.controls.launch(graph, stream));
  host.expect_ok(host.wait(stream));
  assert_int_equal(small.observed(), 2);
  small.expect(0, 0.9);
  assert_true(std::isnan(small.evicted(1)));
  assert_int_equal(host.counts.n_observed, n_observed + 2);
  host.controls.free_graph(graph);
  host.controls.destroy_stream(stream);
}

// With two slots, the second append waits for the first answer. Until then the host may read the observed averages.
void a_slot_is_free_one_ticket_later(void**) {
  Small small({{0, 2, 1}});
  Host& host = small.host;
  for (int i = 0; i < 2; ++i) host.expect_ok(host.table.append(host.self, &small.append, nullptr, &host.error));
  small.hand_over.await(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  assert_int_equal(small.hand_over.arrived(), 1);
  small.hand_over.answer(1);
  small.hand_over.await(2);
  host.expect_ok(host.wait());
}

void after_a_fault_nothing_is_done(void**) {
  Small small({{0, 2, 1}});
  Host& host = small.host;
  small.append.exchange.timeout_ns = 10'000'000;
  const int64_t n_observed = host.counts.n_observed;
  for (int i = 0; i < 2; ++i) host.expect_ok(host.table.append(host.self, &small.append, nullptr, &host.error));
  host.expect_ok(host.table.observe(host.self, &small.call, nullptr, &host.error));
  host.expect_ok(host.wait());
  assert_int_equal(small.hand_over.fault(), kFaultSlot);
  assert_int_equal(small.observed(), 0);
  assert_int_equal(host.counts.n_observed, n_observed);
  small.expect(0, 0.8);
}

void fails_as_others_do(void**) {
  Small small({{0, 2, 1}});
  Host& host = small.host;
  host.expect_ok(host.table.observe(host.self, &small.call, nullptr, &host.error));
  host.expect_fault("observe() without an append()");
  host.controls.fail_call(kObserve, 1, TANDEM_ERROR_BACKEND);
  host.expect_refused(host.table.observe(host.self, &small.call, nullptr, &host.error), TANDEM_ERROR_BACKEND, "asked");
  host.controls.lose_device();
  host.expect_refused(host.table.observe(host.self, &small.call, nullptr, &host.error), TANDEM_ERROR_DEVICE_LOST, "lost");
  host.controls.reset();
}

struct Bad {
  const char* in_message;
  bool at_once;
  void (*spoil)(Small& s);
};

void checks_calls(void**) {
  static float of_host[64];
  const Bad kBad[] = {
      {"sliding window", true, [](Small& s) { const_cast<Layer&>(s.layer).sliding_window = 5; }},
      {"page_len", true, [](Small& s) { s.call.pages.page_len = 65; }},
      {"no moving averages", true, [](Small& s) { s.call.pages.maw = nullptr; }},
      {"16 bytes", true, [](Small& s) { ++s.call.pages.maw; }},
      {"fewer than two slots", true, [](Small& s) { s.call.exchange.n_slots = 1; }},
      {"for fewer evicted", true, [](Small& s) { s.call.exchange.n_evicted = -1; }},
      {"more tokens", true, [](Small& s) { s.call.n_tokens = 9; }},
      {"has_appended", true, [](Small& s) { s.call.has_appended = 2; }},
      {"alpha", true, [](Small& s) { s.call.alpha = 0.0f; }},
      {"alpha", true, [](Small& s) { s.call.alpha = 1.01f; }},
      {"alpha", true, [](Small& s) { s.call.alpha = kNone; }},
      {"no query is counted", true, [](Small& s) { s.call.n_counted = 0; }},
      {"not in it", true, [](Small& s) { s.call.exchange.maw_at = s.call.exchange.slot_bytes - 8; }},
      {"not in it", true, [](Small& s) { s.call.exchange.maw_at = 0; }},
      {"overlap", true, [](Small& s) { s.call.exchange.maw_at = s.call.exchange.lse_at + 4; }},
      {"overlap", true, [](Small& s) { s.call.exchange.maw_at = s.call.exchange.q_at; }},
      {"overlap", true, [](Small& s) { s.call.exchange.maw_at = s.call.exchange.rows_at[kPlaneV]; }},
      {"merged lse", true, [](Small& s) { s.call.lse = of_host; }},
      {"sequences are no", true, [](Small& s) { s.call.sequences.n_sequences = 20; }},
      {"q is no", false, [](Small& s) { s.call.q.data = of_host; }},
      {"page is no", false, [](Small& s) { s.call.pages.planes[kPlaneK] += int64_t{1} << 40; }},
      {"averages are no", false, [](Small& s) { s.call.pages.maw += int64_t{1} << 40; }},
      {"table holds", false, [](Small& s) { s.sequences[0].table_len = 0; }},
      {"max_keys", false, [](Small& s) { s.call.sequences.max_keys = 2; }},
      {"rows that the call has not", false, [](Small& s) { s.sequences[0].first_row = 8; }},
      {"wants_lse is not", false, [](Small& s) { s.sequences[0].wants_lse = 2; }},
      {"that it has not", false, [](Small& s) { s.sequences[0].evict_end = 4; }},
      {"no room", false, [](Small& s) { s.sequences[0].first_evicted = 8; }},
      {"no room", false, [](Small& s) { s.sequences[0].first_evicted = -1; }},
      {"share a place", false, [](Small& s) { s.sequences[1].first_evicted = 2; }},
  };
  for (const Bad& bad : kBad) {
    Small small({{0, 3, 1, 2}, {0, 3, 1, 2}});
    Host& host = small.host;
    host.expect_ok(host.table.append(host.self, &small.append, nullptr, &host.error));
    host.expect_ok(host.wait());
    bad.spoil(small);
    const int32_t status = host.table.observe(host.self, &small.call, nullptr, &host.error);
    if (!bad.at_once) {
      host.expect_ok(status);
      host.expect_fault(bad.in_message);
    } else if (std::strstr(host.error.message, bad.in_message) == nullptr || status == TANDEM_OK) {
      fail_msg("%d: \"%s\" instead of \"%s\"", status, host.error.message, bad.in_message);
    }
    assert_int_equal(small.observed(), 0);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(counts_a_query),
      cmocka_unit_test(counts_queries_in_their_order),
      cmocka_unit_test(alpha_may_be_one),
      cmocka_unit_test(lse_that_are_not_finite_count_nothing),
      cmocka_unit_test(caps_and_scales_logits),
      cmocka_unit_test(heads_are_apart),
      cmocka_unit_test(hands_over_what_leaves),
      cmocka_unit_test(nothing_resident_is_observed_too),
      cmocka_unit_test(streams_and_graphs),
      cmocka_unit_test(a_slot_is_free_one_ticket_later),
      cmocka_unit_test(after_a_fault_nothing_is_done),
      cmocka_unit_test(fails_as_others_do),
      cmocka_unit_test(checks_calls),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
