// SPDX-License-Identifier: MIT
// Device and host together. Sequences grow step by step, the stream is steps ahead of the host, and the slots are reused in
// turn. Outputs must be attention over all keys in double precision. The steps run eagerly, and from one graph that is
// replayed while descriptors and tensors change.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "device/exchange_problem.h"
#include "reference/attention_reference.h"
#include "reference/stored_row.h"

namespace {

using namespace stand_in;

constexpr int32_t kSteps = 12;
constexpr int32_t kTokens = 240;  // of the longest step

// Returns the spans of all sequences in each step. The first step is a prefill, whose oldest tokens may never be in the
// window. Later steps have a few tokens each.
std::vector<std::vector<Span>> plan_steps(int64_t window_len, uint64_t seed) {
  reference::Random random(seed);
  std::vector<int64_t> ends(3, 0);
  std::vector<std::vector<Span>> steps;
  for (int32_t step = 0; step < kSteps; ++step) {
    steps.emplace_back();
    for (size_t i = 0; i < ends.size(); ++i) {
      constexpr int32_t kFirst[] = {130, 101, 1};
      const auto q_len = step == 0 ? kFirst[i] : static_cast<int32_t>(random.integer(0, step == 4 ? 40 : 3));
      ends[i] += q_len;
      steps.back().push_back({std::max<int64_t>(0, ends[i] - window_len), ends[i], q_len});
    }
  }
  return steps;
}

class Loop : public ExchangeProblem {
 public:
  Loop(const ExchangeCase& of, uint64_t seed, int64_t window_len = 100)
      : ExchangeProblem(of, std::vector<Span>(3), kTokens, seed),
        steps_(plan_steps(window_len, seed)),
        asks_host_(window_len < kTokens),
        stored_(3) {
    for (const std::vector<Span>& spans : steps_) inputs_.push_back(draw_step(spans));
    results_ = host.allocate(kSteps * out_bytes());
    lse_results_ = reinterpret_cast<float*>(host.allocate(kSteps * lse_floats() * 4));
    stream_ = host.controls.create_stream();
  }
  ~Loop() { host.controls.destroy_stream(stream_); }

  void check() {
    const int64_t n_merged = host.counts.n_merged, n_attended = host.counts.n_attended;
    void* graph = of_.is_replayed ? record() : nullptr;
    std::thread host_part([this] {
      for (uint64_t ticket = 0; ticket < kSteps; ++ticket) answer(ticket);
    });
    for (size_t step = 0; step < kSteps; ++step) run_step(step, graph);
    host_part.join();
    host.expect_ok(host.wait(stream_));
    host.controls.free_graph(graph);
    assert_int_equal(hand_over.fault(), 0);
    assert_int_equal(host.counts.n_attended, n_attended + kSteps);
    assert_int_equal(host.counts.n_merged, n_merged + kSteps);
    assert_true(asks_host_ ? n_host_parts_ > 10 : n_host_parts_ == 0);
    for (size_t step = 0; step < kSteps; ++step) check_step(step);
  }

 private:
  struct Inputs {
    std::vector<double> q, k, v;  // [n_tokens of the step, n_heads, dim]
  };
  struct Stored {
    std::vector<float> k, v;  // [kv_len, n_kv_heads, dim], as the host has stored them
  };
  enum Attends { kHostPart, kAll };

  Inputs draw_step(const std::vector<Span>& spans) {
    int64_t n = 0;
    for (const Span& span : spans) n += span.q_len;
    return {draw(n * of_.n_q_heads * of_.k_dim), draw(n * of_.n_kv_heads * of_.k_dim), draw(n * of_.n_kv_heads * of_.v_dim)};
  }

  void upload_rows(const DeviceRows& rows, const std::vector<double>& values, int32_t n_heads, int32_t dim) {
    const std::vector<std::byte> bytes = spread(rows, values, n_heads, dim);
    host.expect_ok(
        host.table.copy(host.self, rows.data, bytes.data(), static_cast<int64_t>(bytes.size()), stream_, &host.error));
  }

  void make_calls() {
    host.expect_ok(host.table.append(host.self, &append, stream_, &host.error));
    host.expect_ok(host.table.attend(host.self, &attend, stream_, &host.error));
    host.expect_ok(host.table.merge(host.self, &merge, stream_, &host.error));
  }

  void* record() {
    assert_true(host.controls.begin_capture(stream_));
    make_calls();
    return host.controls.end_capture(stream_);
  }

  // Enqueues a step and never waits for the stream.
  void run_step(size_t step, void* graph) {
    const std::vector<DeviceSequence> sequences = describe(steps_[step]);
    const auto bytes = static_cast<int64_t>(sequences.size() * sizeof sequences[0]);
    host.expect_ok(host.table.copy(host.self, descriptors, sequences.data(), bytes, stream_, &host.error));
    upload_rows(append.q, inputs_[step].q, of_.n_q_heads, of_.k_dim);
    upload_rows(append.k, inputs_[step].k, of_.n_kv_heads, of_.k_dim);
    upload_rows(append.v, inputs_[step].v, of_.n_kv_heads, of_.v_dim);
    if (graph != nullptr)
      assert_true(host.controls.launch(graph, stream_));
    else
      make_calls();
    const auto at = static_cast<int64_t>(step);
    host.expect_ok(
        host.table.copy(host.self, results_ + at * out_bytes(), merge.o_out.data, out_bytes(), stream_, &host.error));
    host.expect_ok(
        host.table.copy(host.self, lse_results_ + at * lse_floats(), merge.lse_out, lse_floats() * 4, stream_, &host.error));
  }

  // The host's side of a ticket: takes the new rows into its store, then writes states of the keys outside the window. Makes
  // no assertions, because they jump and this is another thread.
  void answer(uint64_t ticket) {
    hand_over.await(ticket + 1);
    if (ticket % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    if (hand_over.header(ticket).ticket != ticket) ++n_wrong_headers_;
    const std::vector<DeviceSequence> sequences = describe(steps_[ticket]);
    for (size_t i = 0; i < sequences.size(); ++i) {
      take_rows(ticket, sequences[i], kPlaneK, of_.k_type, of_.k_dim, &stored_[i].k);
      take_rows(ticket, sequences[i], kPlaneV, of_.v_type, of_.v_dim, &stored_[i].v);
      if (sequences[i].has_host_part != 0) leave_states(ticket, i, sequences[i]);
    }
    hand_over.answer(ticket + 1);
  }

  void take_rows(uint64_t ticket, const DeviceSequence& sequence, int32_t plane, int32_t dtype, int32_t dim,
                 std::vector<float>* to) {
    const int64_t codes = reference::code_bytes(dtype, dim), scales = reference::scale_bytes(dtype, dim);
    std::vector<double> x(static_cast<size_t>(dim));
    for (int32_t t = 0; t < sequence.q_len; ++t) {
      for (int32_t head = 0; head < of_.n_kv_heads; ++head) {
        const int64_t row = int64_t{head} * append.n_tokens + sequence.first_row + t;
        const std::byte* slot = hand_over.slot(ticket);
        reference::load_row(dtype, slot + hand_over.exchange.rows_at[plane] + row * codes,
                            slot + hand_over.exchange.rows_at[plane + 1] + row * scales, dim, x.data());
        to->insert(to->end(), x.begin(), x.end());
      }
    }
  }

  // Attends the keys that a sequence's queries see among its first n_keys keys.
  reference::Truth attend_keys(const float* q, const Stored& keys, const Span& span, Attends what) {
    const reference::RefLayer layer = reference_of(of_, what == kAll ? sinks_ : std::vector<float>());
    std::vector<int64_t> positions(static_cast<size_t>(span.end));
    std::iota(positions.begin(), positions.end(), 0);
    const int64_t first_query = span.end - span.q_len;
    reference::LayerRows rows;
    rows.layer = &layer;
    rows.n_tokens = span.end;
    rows.k = keys.k.data();
    rows.v = keys.v.data();
    rows.positions = positions.data();
    reference::Queries queries;
    queries.n_tokens = span.q_len;
    queries.q = q;
    queries.positions = positions.data() + first_query;
    queries.naive_rows = 0;
    queries.visible = [&](int64_t t, int32_t, std::vector<int64_t>* seen) {
      const int64_t self = first_query + t, end = what == kAll ? self + 1 : std::min(self + 1, span.begin);
      seen->clear();
      for (int64_t j = of_.sliding_window > 0 ? std::max<int64_t>(0, self - of_.sliding_window + 1) : 0; j < end; ++j)
        seen->push_back(j);
    };
    return reference::attend_reference(rows, queries);
  }

  void leave_states(uint64_t ticket, size_t idx, const DeviceSequence& sequence) {
    const int64_t first = int64_t{sequence.first_row} * of_.n_q_heads, q_len = sequence.q_len, group = layer_.group_size;
    // Converts between [n_kv_heads][q_len][group_size] and [q_len][n_q_heads].
    const auto slot_row = [&](int64_t t, int64_t head) { return first + (head / group * q_len + t) * group + head % group; };
    std::vector<float> q;
    for (int64_t t = 0; t < q_len; ++t)
      for (int64_t head = 0; head < of_.n_q_heads; ++head) {
        const float* row = hand_over.floats(ticket, hand_over.exchange.q_at) + slot_row(t, head) * of_.k_dim;
        q.insert(q.end(), row, row + of_.k_dim);
      }
    const reference::Truth states = attend_keys(q.data(), stored_[idx], steps_[ticket][idx], kHostPart);
    n_host_parts_ += q_len > 0 ? 1 : 0;
    for (int64_t t = 0; t < q_len; ++t)
      for (int64_t head = 0; head < of_.n_q_heads; ++head) {
        const int64_t row = t * of_.n_q_heads + head, to = slot_row(t, head);
        std::copy_n(states.o.data() + row * of_.v_dim, of_.v_dim,
                    hand_over.floats(ticket, hand_over.exchange.o_at) + to * of_.v_dim);
        hand_over.floats(ticket, hand_over.exchange.lse_at)[to] = static_cast<float>(states.lse[static_cast<size_t>(row)]);
      }
  }

  void check_step(size_t step) {
    assert_int_equal(n_wrong_headers_, 0);
    const std::vector<DeviceSequence> sequences = describe(steps_[step]);
    const std::byte* out = results_ + static_cast<int64_t>(step) * out_bytes();
    const float* lse = lse_results_ + static_cast<int64_t>(step) * lse_floats();
    std::vector<double> o(static_cast<size_t>(of_.v_dim));
    for (size_t i = 0; i < sequences.size(); ++i) {
      const int64_t first = sequences[i].first_row;
      const std::vector<float> q(inputs_[step].q.begin(), inputs_[step].q.end());
      const reference::Truth truth =
          attend_keys(q.data() + first * of_.n_q_heads * of_.k_dim, stored_[i], steps_[step][i], kAll);
      for (int64_t row = 0; row < int64_t{sequences[i].q_len} * of_.n_q_heads; ++row) {
        const int64_t token = first + row / of_.n_q_heads, head = row % of_.n_q_heads;
        reference::load_all(of_.tensor_type, out_row(out, token, head), of_.v_dim, o.data());
        for (size_t c = 0; c < o.size(); ++c) {
          const double wanted = truth.o[static_cast<size_t>(row) * o.size() + c];
          if (!(std::fabs(o[c] - wanted) <= 0.51 * reference::epsilon(of_.tensor_type) * std::fabs(wanted) + 2e-6))
            fail_msg("%s: step %zu, sequence %zu, row %lld, dim %zu: %.9g for %.9g", of_.name, step, i,
                     static_cast<long long>(row), c, o[c], wanted);
        }
        const double wanted = truth.lse[static_cast<size_t>(row)];
        const auto is = static_cast<double>(lse[token * merge.lse_token_stride + head * merge.lse_head_stride]);
        if (!(std::fabs(is - wanted) <= 1e-6 * (1.0 + std::fabs(wanted))))
          fail_msg("%s: step %zu, sequence %zu, row %lld: lse %.9g for %.9g", of_.name, step, i, static_cast<long long>(row),
                   is, wanted);
      }
    }
  }

  const std::vector<std::vector<Span>> steps_;
  const bool
      asks_host_;  // true: the device waits for the host in every step; false: it runs ahead as far as the slots allow
  std::vector<Inputs> inputs_;
  std::vector<Stored> stored_;
  std::byte* results_ = nullptr;
  float* lse_results_ = nullptr;
  void* stream_ = nullptr;
  int64_t n_host_parts_ = 0, n_wrong_headers_ = 0;
};

void slots_go_round(void**) {
  Loop({.name = "two slots"}, 1).check();
  Loop({.name = "all resident", .n_slots = 3}, 6, kTokens).check();
  Loop({.name = "q8_0, window", .k_type = TANDEM_Q8_0, .v_type = TANDEM_BF16, .sliding_window = 115, .n_slots = 2}, 2)
      .check();
  Loop({.name = "sinks",
        .k_dim = 96,
        .v_dim = 32,
        .n_q_heads = 6,
        .tensor_type = TANDEM_F16,
        .soft_cap = 2.0f,
        .has_sinks = true,
        .n_slots = 5},
       3)
      .check();
}

void graphs_are_replayed(void**) {
  Loop({.name = "graph", .is_replayed = true, .n_slots = 3}, 4).check();
  Loop({.name = "graph, all resident", .is_replayed = true, .n_slots = 2}, 7, kTokens).check();
  Loop({.name = "graph, bf16",
        .k_type = TANDEM_BF16,
        .v_type = TANDEM_E4M3,
        .tensor_type = TANDEM_BF16,
        .has_sinks = true,
        .is_replayed = true,
        .n_slots = 2},
       5)
      .check();
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(slots_go_round),
      cmocka_unit_test(graphs_are_replayed),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
