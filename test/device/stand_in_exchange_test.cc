// SPDX-License-Identifier: MIT
// append() and merge() of the stand-in, byte by byte and row by row, and their refusals.
#include <algorithm>
#include <cmath>

#include "device/exchange_problem.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace {

using namespace stand_in;

// Checks every byte of the pool and of the slot after one append(), also the bytes between rows.
class AppendedBytes : public ExchangeProblem {
 public:
  explicit AppendedBytes(const ExchangeCase& of) : ExchangeProblem(of, kSpans, 26, 3) {}

  void check(bool appends) {
    const std::vector<double> q = draw(append.n_tokens * int64_t{of_.n_q_heads} * of_.k_dim);
    const std::vector<double> k = draw(append.n_tokens * int64_t{of_.n_kv_heads} * of_.k_dim);
    const std::vector<double> v = draw(append.n_tokens * int64_t{of_.n_kv_heads} * of_.v_dim);
    append.q.data = host.upload(spread(append.q, q, of_.n_q_heads, of_.k_dim));
    append.k.data = appends ? host.upload(spread(append.k, k, of_.n_kv_heads, of_.k_dim)) : nullptr;
    append.v.data = appends ? host.upload(spread(append.v, v, of_.n_kv_heads, of_.v_dim)) : nullptr;
    append.tag = 77;
    const int64_t window_bytes = host.counts.window_bytes;
    host.expect_ok(host.table.append(host.self, &append, nullptr, &host.error));
    host.expect_ok(host.wait());
    assert_int_equal(hand_over.arrived(), 1);

    pool_image_.assign(static_cast<size_t>(pool_bytes), std::byte{0xff});
    slot_image_.assign(static_cast<size_t>(hand_over.exchange.slot_bytes), std::byte{0xff});
    const SlotHeader header = {0, 77, static_cast<int32_t>(kSpans.size()), 0, {}};
    std::memcpy(slot_image_.data(), &header, sizeof header);
    const std::vector<DeviceSequence> sequences = describe(kSpans);
    for (const DeviceSequence& sequence : sequences) {
      if (sequence.has_host_part != 0) place_queries(sequence, q);
      if (!appends) continue;
      place_rows(sequence, kPlaneK, of_.k_type, of_.k_dim, k);
      place_rows(sequence, kPlaneV, of_.v_type, of_.v_dim, v);
    }
    assert_memory_equal(hand_over.slot(0), slot_image_.data(), slot_image_.size());
    assert_memory_equal(pool, pool_image_.data(), pool_image_.size());
    assert_int_equal(host.counts.window_bytes - window_bytes, placed_);
  }

 private:
  void place_queries(const DeviceSequence& sequence, const std::vector<double>& q) {
    auto* to = slot_image_.data() + hand_over.exchange.q_at + int64_t{4} * sequence.first_row * of_.n_q_heads * of_.k_dim;
    for (int32_t kv_head = 0; kv_head < of_.n_kv_heads; ++kv_head)
      for (int32_t t = 0; t < sequence.q_len; ++t)
        for (int32_t g = 0; g < layer_.group_size; ++g, to += int64_t{4} * of_.k_dim) {
          const int64_t row = int64_t{sequence.first_row + t} * of_.n_q_heads + kv_head * layer_.group_size + g;
          reference::store_all(TANDEM_F32, q.data() + row * of_.k_dim, of_.k_dim, to);
        }
  }

  void place_rows(const DeviceSequence& sequence, int32_t plane, int32_t dtype, int32_t dim, const std::vector<double>& x) {
    const int64_t bytes[] = {reference::code_bytes(dtype, dim), reference::scale_bytes(dtype, dim)};
    std::vector<std::byte> rows[] = {std::vector<std::byte>(static_cast<size_t>(bytes[0])),
                                     std::vector<std::byte>(static_cast<size_t>(bytes[1]))};
    for (int32_t head = 0; head < of_.n_kv_heads; ++head) {
      for (int32_t t = 0; t < sequence.q_len; ++t) {
        const int64_t row = sequence.first_row + t, token = sequence.end - sequence.q_len + t;
        reference::store_row(dtype, x.data() + (row * of_.n_kv_heads + head) * dim, dim, rows[0].data(), rows[1].data());
        for (int32_t i = 0; i < 2; ++i) {
          const int64_t slot_row = int64_t{head} * append.n_tokens + row;
          std::copy(rows[i].begin(), rows[i].end(),
                    slot_image_.begin() + hand_over.exchange.rows_at[plane + i] + slot_row * bytes[i]);
          if (token < sequence.begin) continue;
          const int64_t page = page_tables_[static_cast<size_t>(sequence.table_begin + token / kPageLen % kTableLen)];
          const int64_t at = append.pages.planes[plane + i] - pool + page + head * append.pages.head_stride[plane + i];
          std::copy(rows[i].begin(), rows[i].end(), pool_image_.begin() + at + token % kPageLen * bytes[i]);
          placed_ += bytes[i];
        }
      }
    }
  }

  // A first token; tokens past the end of a page and of the ring; tokens that leave the window at once; no tokens.
  inline static const std::vector<Span> kSpans = {{0, 1, 1}, {200, 260, 10}, {30, 40, 15}, {5, 9, 0}};
  std::vector<std::byte> pool_image_, slot_image_;
  int64_t placed_ = 0;
};

void appends_bytes(void**) {
  for (const int32_t type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0}) {
    AppendedBytes({.name = "K", .k_type = type, .v_type = TANDEM_F16}).check(true);
    AppendedBytes({.name = "V", .k_type = TANDEM_Q8_0, .v_type = type, .k_dim = 96, .tensor_type = TANDEM_BF16}).check(true);
  }
  AppendedBytes({.name = "queries alone", .tensor_type = TANDEM_F16}).check(false);
}

// States of every kind: empty on one side or both, with any o; far apart; lse near 0. If observe() follows, merged lse
// replace the window's. For every second sequence with a host part they replace the host's, too.
class MergedStates : public ExchangeProblem {
 public:
  explicit MergedStates(const ExchangeCase& of) : ExchangeProblem(of, kSpans, kTokens, 5) {}

  void check(bool is_observed = false) {
    merge.is_observed = is_observed ? 1 : 0;
    for (size_t i = 0; i < kSpans.size(); ++i) descriptors[i].wants_lse = i % 2 == 0 ? 1 : 0;
    host.expect_ok(host.table.append(host.self, &append, nullptr, &host.error));
    hand_over.await(1);
    host.expect_ok(host.wait());
    auto* o = static_cast<float*>(attend.o.data);
    const int64_t n_rows = int64_t{kTokens} * of_.n_q_heads;
    draw_states(o, attend.lse, n_rows);
    float* host_lse = hand_over.floats(0, hand_over.exchange.lse_at);
    draw_states(hand_over.floats(0, hand_over.exchange.o_at), host_lse, n_rows);
    lse_.assign(merge.lse, merge.lse + n_rows);
    host_lse_.assign(host_lse, host_lse + n_rows);
    host.expect_ok(host.table.merge(host.self, &merge, nullptr, &host.error));
    hand_over.answer(1);
    host.expect_ok(host.wait());
    int64_t slot_row = 0;
    for (const DeviceSequence& sequence : describe(kSpans))
      for (int32_t kv_head = 0; kv_head < of_.n_kv_heads; ++kv_head)
        for (int32_t t = 0; t < sequence.q_len; ++t)
          for (int32_t g = 0; g < layer_.group_size; ++g, ++slot_row)
            check_row(sequence.first_row + t, kv_head * layer_.group_size + g, sequence.has_host_part != 0 ? slot_row : -1);
    if (is_observed) expect_merged_lse();
    check_rest();
    assert_memory_equal(merge.lse, lse_.data(), lse_.size() * 4);
    assert_memory_equal(host_lse, host_lse_.data(), host_lse_.size() * 4);
  }

 private:
  void expect_merged_lse() {
    int64_t slot_row = 0;
    const std::vector<DeviceSequence> sequences = describe(kSpans);
    for (size_t i = 0; i < sequences.size(); ++i)
      for (int32_t kv_head = 0; kv_head < of_.n_kv_heads; ++kv_head)
        for (int32_t t = 0; t < sequences[i].q_len; ++t)
          for (int32_t g = 0; g < layer_.group_size; ++g, ++slot_row) {
            const int64_t token = sequences[i].first_row + t, head = kv_head * layer_.group_size + g;
            const float lse = merge.lse_out[token * merge.lse_token_stride + head * merge.lse_head_stride];
            lse_[static_cast<size_t>(token * of_.n_q_heads + head)] = lse;
            if (sequences[i].has_host_part != 0 && i % 2 == 0) host_lse_[static_cast<size_t>(slot_row)] = lse;
          }
  }

  void draw_states(float* o, float* lse, int64_t n_rows) {
    for (int64_t i = 0; i < n_rows; ++i) {
      lse[i] = random_.pick({-INFINITY, -INFINITY, 1e-8f, -3.0f, 90.0f, -90.0f, 1e4f, static_cast<float>(random_.normal())});
      for (int32_t c = 0; c < of_.v_dim; ++c)
        o[i * of_.v_dim + c] = lse[i] == -INFINITY ? NAN : static_cast<float>(random_.normal());
    }
  }

  void check_row(int64_t token, int32_t head, int64_t slot_row) {
    const int64_t row = token * of_.n_q_heads + head;
    const float* o[] = {merge.o + row * of_.v_dim,
                        hand_over.floats(0, hand_over.exchange.o_at) + std::max<int64_t>(slot_row, 0) * of_.v_dim};
    const double none = -INFINITY;
    const double lse[] = {static_cast<double>(lse_[static_cast<size_t>(row)]),
                          slot_row < 0 ? none : static_cast<double>(host_lse_[static_cast<size_t>(slot_row)]),
                          of_.has_sinks ? static_cast<double>(sinks_[static_cast<size_t>(head)]) : none};
    const double m = *std::max_element(lse, lse + 3);
    double sum = 0.0;
    for (const double part : lse) sum += m == none ? 0.0 : std::exp(part - m);
    std::vector<double> got(static_cast<size_t>(of_.v_dim));
    reference::load_all(of_.tensor_type, out_row(static_cast<const std::byte*>(merge.o_out.data), token, head), of_.v_dim,
                        got.data());
    for (int32_t c = 0; c < of_.v_dim; ++c) {
      double wanted = 0.0;
      for (int i = 0; i < 2; ++i)
        if (lse[i] != none) wanted += std::exp(lse[i] - m) / sum * static_cast<double>(o[i][c]);
      if (!(std::fabs(got[static_cast<size_t>(c)] - wanted) <=
            0.51 * reference::epsilon(of_.tensor_type) * std::fabs(wanted) + 1e-7))
        fail_msg("%s: token %lld, head %d, dim %d: %.9g for %.9g", of_.name, static_cast<long long>(token), head, c,
                 got[static_cast<size_t>(c)], wanted);
    }
    if (merge.lse_out == nullptr) return;
    const double wanted = m == none ? none : m + std::log(sum);
    const auto is = static_cast<double>(merge.lse_out[token * merge.lse_token_stride + head * merge.lse_head_stride]);
    if (!(is == wanted || std::fabs(is - wanted) <= 1e-7 * (1.0 + std::fabs(wanted))))
      fail_msg("%s: token %lld, head %d: lse %.9g for %.9g", of_.name, static_cast<long long>(token), head, is, wanted);
  }

  // Checks rows of no sequence and the bytes between rows.
  void check_rest() {
    const auto* out = static_cast<const std::byte*>(merge.o_out.data);
    const auto is_untouched = [](const std::byte* from, const std::byte* to) {
      return std::all_of(from, to, [](std::byte b) { return b == std::byte{0xff}; });
    };
    for (int64_t token = 0; token + 1 < kTokens; ++token)
      for (int32_t head = 0; head < of_.n_q_heads; ++head)
        assert_true(is_untouched(out_row(out, token, head) + of_.v_dim * size_of(),
                                 head + 1 < of_.n_q_heads ? out_row(out, token, head + 1) : out_row(out, token + 1, 0)));
    assert_true(is_untouched(out_row(out, kTokens - 1, 0), out + out_bytes()));
  }

  std::vector<float> lse_, host_lse_;  // as given, and as they should be afterwards

  static constexpr int32_t kTokens = 41;  // one more than the sequences have
  inline static const std::vector<Span> kSpans = {{7, 90, 20}, {0, 30, 5}, {3, 3, 0}, {70, 90, 15}};
};

void merges_states(void**) {
  MergedStates({.name = "plain"}).check();
  MergedStates({.name = "observed"}).check(true);
  MergedStates({.name = "observed, sinks", .n_q_heads = 6, .has_sinks = true}).check(true);
  MergedStates({.name = "sinks", .v_dim = 80, .n_q_heads = 6, .has_sinks = true}).check();
  MergedStates({.name = "bf16", .tensor_type = TANDEM_BF16, .has_lse = false}).check();
  MergedStates({.name = "f16", .n_q_heads = 8, .n_kv_heads = 1, .tensor_type = TANDEM_F16, .has_sinks = true}).check();
}

const std::vector<Span> kAsking = {{7, 90, 3}};

// The host does not answer. The device stops waiting, reports which wait it was, and does nothing from then on.
void gives_up(void**) {
  for (const uint32_t fault : {kFaultSlot, kFaultAnswer}) {
    ExchangeProblem problem({.name = "two slots"}, kAsking, 3, 9);
    Host& host = problem.host;
    const int64_t n_appended = host.counts.n_appended, n_merged = host.counts.n_merged;
    problem.append.exchange.timeout_ns = problem.merge.exchange.timeout_ns = 20 * 1000 * 1000;
    const auto append = [&] { host.expect_ok(host.table.append(host.self, &problem.append, nullptr, &host.error)); };
    const auto merge = [&] { host.expect_ok(host.table.merge(host.self, &problem.merge, nullptr, &host.error)); };
    append();
    if (fault == kFaultSlot) append();
    merge();
    host.expect_ok(host.wait());
    assert_int_equal(problem.hand_over.fault(), fault);
    problem.hand_over.answer(1);  // too late
    append();
    merge();
    host.expect_ok(host.wait());
    assert_int_equal(problem.hand_over.arrived(), 1);
    assert_int_equal(problem.hand_over.fault(), fault);
    assert_int_equal(host.counts.n_appended, n_appended + 1);
    assert_int_equal(host.counts.n_merged, n_merged);
    const auto* out = static_cast<const std::byte*>(problem.merge.o_out.data);
    assert_true(std::all_of(out, out + problem.out_bytes(), [](std::byte b) { return b == std::byte{0xff}; }));
  }
}

// A fault that a test puts into a call.
struct Spoilt {
  ExchangeProblem& problem;
  DeviceSequences& sequences;
  DeviceExchange& exchange;
};

struct Bad {
  const char* in_message;
  bool at_once, in_append, in_merge;
  void (*spoil)(Spoilt s);
};

void check_bad(const Bad& bad, bool in_append) {
  ExchangeProblem problem({.name = "bad"}, kAsking, 3, 9);
  Host& host = problem.host;
  int32_t status = TANDEM_OK;
  if (in_append) {
    bad.spoil({problem, problem.append.sequences, problem.append.exchange});
    status = host.table.append(host.self, &problem.append, nullptr, &host.error);
  } else {
    host.expect_ok(host.table.append(host.self, &problem.append, nullptr, &host.error));
    host.expect_ok(host.wait());
    problem.hand_over.answer(1);
    bad.spoil({problem, problem.merge.sequences, problem.merge.exchange});
    status = host.table.merge(host.self, &problem.merge, nullptr, &host.error);
  }
  if (bad.at_once) {
    host.expect_refused(status, TANDEM_ERROR_INTERNAL, bad.in_message);
  } else {
    assert_int_equal(status, TANDEM_OK);
    host.expect_fault(bad.in_message);
  }
}

// As in stand_in_test.cc, faults are found at once, or when the device gets there.
void checks_calls(void**) {
  static float of_host[64];
  const Bad kBad[] = {
      {"fewer than two slots", true, true, true, [](Spoilt s) { s.exchange.n_slots = 1; }},
      {"never ends", true, true, true, [](Spoilt s) { s.exchange.timeout_ns = 0; }},
      {"without memory", true, true, true, [](Spoilt s) { s.exchange.state = nullptr; }},
      {"slots are no", true, true, true, [](Spoilt s) { s.exchange.slot_bytes *= 2; }},
      {"slots are not aligned", true, true, true, [](Spoilt s) { s.exchange.slot_bytes -= 4; }},
      {"flags are no", true, true, true, [](Spoilt s) { s.exchange.flags = reinterpret_cast<ExchangeFlags*>(of_host); }},
      {"not in it", true, true, true, [](Spoilt s) { s.exchange.o_at = s.exchange.slot_bytes - 8; }},
      {"not in it", true, true, true, [](Spoilt s) { s.exchange.lse_at = 0; }},
      {"not in it", true, true, false, [](Spoilt s) { s.exchange.rows_at[kPlaneV] = s.exchange.slot_bytes; }},
      {"overlap", true, true, true, [](Spoilt s) { s.exchange.lse_at = s.exchange.o_at + 4; }},
      {"overlap", true, true, false, [](Spoilt s) { s.exchange.q_at = s.exchange.rows_at[kPlaneK] + 4; }},
      {"one of k and v", true, true, false, [](Spoilt s) { s.problem.append.k.data = nullptr; }},
      {"page_len", true, true, false, [](Spoilt s) { s.problem.append.pages.page_len = 65; }},
      {"window's o", true, false, true, [](Spoilt s) { s.problem.merge.o = of_host; }},
      {"window's lse", true, false, true, [](Spoilt s) { s.problem.merge.lse = of_host; }},
      {"sinks are no", true, false, true, [](Spoilt s) { s.problem.merge.sinks = of_host; }},
      {"sequences are no", true, true, true, [](Spoilt s) { s.sequences.n_sequences = 20; }},
      {"not zero at first", false, true, true, [](Spoilt s) { s.exchange.state[7] = -1; }},
      {"rows that the call has not", false, true, true, [](Spoilt s) { s.problem.descriptors[0].first_row = 1; }},
      {"max_keys", false, true, true, [](Spoilt s) { s.sequences.max_keys = 82; }},
      {"not 0 or 1", false, true, true, [](Spoilt s) { s.problem.descriptors[0].has_host_part = 2; }},
      {"table holds", false, true, false, [](Spoilt s) { s.problem.descriptors[0].table_len = 1; }},
      {"page is no", false, true, false, [](Spoilt s) { s.problem.append.pages.planes[kPlaneK] += int64_t{1} << 40; }},
      {"16 bytes", false, true, false, [](Spoilt s) { const_cast<int64_t*>(s.sequences.page_tables)[1] -= 8; }},
      {"q is no", false, true, false, [](Spoilt s) { s.problem.append.q.data = of_host; }},
      {"k is no", false, true, false, [](Spoilt s) { s.problem.append.k.data = of_host; }},
      {"v is no", false, true, false, [](Spoilt s) { s.problem.append.v.data = of_host; }},
      {"o is no", false, false, true, [](Spoilt s) { s.problem.merge.o_out.data = of_host; }},
      {"lse is no", false, false, true, [](Spoilt s) { s.problem.merge.lse_out = of_host; }},
  };
  for (const Bad& bad : kBad) {
    if (bad.in_append) check_bad(bad, true);
    if (bad.in_merge) check_bad(bad, false);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(appends_bytes),
      cmocka_unit_test(merges_states),
      cmocka_unit_test(gives_up),
      cmocka_unit_test(checks_calls),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
