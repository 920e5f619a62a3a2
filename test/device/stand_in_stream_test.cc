// SPDX-License-Identifier: MIT
// Memory and streams of the stand-in: order, late completion, capture, loss of the device, and calls that are made to fail.
// If a test needs a stream that has not passed a point, the stream waits there for the host's answer.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "device/gate.h"
#include "device/hand_over.h"

namespace {

using namespace tandem;
using namespace stand_in;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMillisecond = 1000 * 1000;

Layer small_layer() {
  Layer layer;
  layer.n_q_heads = layer.n_kv_heads = layer.group_size = 1;
  layer.k_head_dim = layer.v_head_dim = 64;
  layer.k_type = layer.v_type = TANDEM_F32;
  return layer;
}

// One query that asks the host, in append() and merge().
class Question {
 public:
  explicit Question(Host* host) : host_(*host) {
    DeviceSequence sequence;
    sequence.q_len = sequence.has_host_part = 1;
    sequence.end = 1;
    sequence.table_len = 1;
    sequence.begin = 1;  // the window is empty
    append.layer = merge.layer = &layer_;
    append.sequences.sequences = host->upload(std::vector{sequence});
    append.sequences.n_sequences = append.sequences.max_q_len = 1;
    merge.sequences = append.sequences;
    append.n_tokens = merge.n_tokens = 1;
    append.q.data = host->upload(std::vector<float>(64, 2.0f));
    merge.o = host->upload(std::vector<float>(64, 0.0f));
    merge.lse = host->upload(std::vector<float>(1, -INFINITY));
    merge.o_out.data = const_cast<float*>(out_);
    append.exchange = merge.exchange = hand_over.exchange;
  }
  int32_t ask(void* stream) {
    const int32_t status = host_.table.append(host_.self, &append, stream, &host_.error);
    return status != TANDEM_OK ? status : host_.table.merge(host_.self, &merge, stream, &host_.error);
  }
  void answer(uint64_t ticket, float o) {
    hand_over.await(ticket + 1);
    std::fill_n(hand_over.floats(ticket, hand_over.exchange.o_at), 64, o);
    *hand_over.floats(ticket, hand_over.exchange.lse_at) = 1.0f;
    hand_over.answer(ticket + 1);
  }
  float answered() const { return out_[63]; }
  void forget_calls() {
    append = {};
    merge = {};
    layer_ = {};
  }

 private:
  Host& host_;
  Layer layer_ = small_layer();
  const float* out_ = host_.upload(std::vector<float>(64, NAN));

 public:
  HandOver hand_over{&host_, layer_, 2, 1};
  DeviceAppend append;
  DeviceMerge merge;
};

void moves_memory(void**) {
  Host host;
  std::byte *a = host.allocate(300), *b = host.allocate(300);
  assert_true(a[299] == std::byte{0xff});
  char text[] = "as it was";
  host.controls.set_delay(5 * kMillisecond);
  host.expect_ok(host.table.copy(host.self, a, text, sizeof text, nullptr, &host.error));
  host.expect_ok(host.table.copy(host.self, b, a, sizeof text, nullptr, &host.error));
  host.expect_ok(host.table.fill(host.self, a, 1, 300, nullptr, &host.error));
  std::memset(text, 0, sizeof text);  // memory that the device does not know was read when the call was made
  host.expect_ok(host.table.copy(host.self, text, b, sizeof text, nullptr, &host.error));
  assert_string_equal(text, "as it was");  // and is written before the call returns
  assert_true(a[299] == std::byte{1});
  void* none = nullptr;
  host.expect_refused(host.table.allocate(host.self, 0, &none, &host.error), TANDEM_ERROR_OUT_OF_MEMORY, "memory");
  host.expect_ok(host.table.copy(host.self, nullptr, nullptr, 0, nullptr, &host.error));
  host.expect_refused(host.table.copy(host.self, a + 1, b, 300, nullptr, &host.error), TANDEM_ERROR_INTERNAL, "to behind");
  host.expect_refused(host.table.copy(host.self, a, b + 1, 300, nullptr, &host.error), TANDEM_ERROR_INTERNAL, "from behind");
  host.expect_refused(host.table.fill(host.self, text, 0, 4, nullptr, &host.error), TANDEM_ERROR_INTERNAL,
                      "no device memory");
}

void shares_memory(void**) {
  Host host;
  const int64_t n_shared = host.counts.n_shared, n_unshared = host.counts.n_unshared;
  void *first = nullptr, *device = nullptr;
  host.expect_ok(host.table.allocate_shared(host.self, 5000, &first, &device, &host.error));
  assert_int_equal(reinterpret_cast<uintptr_t>(first) % 4096, 0);
  const auto* bytes = static_cast<const char*>(first);
  assert_true(std::all_of(bytes, bytes + 5000, [](char byte) { return byte == 0; }));
  host.expect_ok(host.table.fill(host.self, device, 7, 5000, nullptr, &host.error));
  host.expect_ok(host.wait());
  assert_int_equal(bytes[4999], 7);
#ifndef __SANITIZE_THREAD__
  assert_ptr_not_equal(first, device);
  // An address of one side is invalid on the other.
  Question question(&host);
  question.append.exchange.flags = question.hand_over.flags;
  host.expect_refused(question.ask(nullptr), TANDEM_ERROR_INTERNAL, "flags are no device memory");
#endif
  host.table.release_shared(host.self, first);
  assert_int_equal(host.counts.n_unshared, n_unshared + 1);
  assert_true(host.counts.n_shared > n_shared);
}

// Operations run in order, when the stream gets there, and each stream by itself.
void streams_are_queues(void**) {
  Host host;
  Question question(&host);
  void *stream = host.controls.create_stream(), *other = host.controls.create_stream();
  const Shared shared = host.share(64);
  std::byte* to = host.allocate(64);
  const int64_t n_copied = host.counts.n_copied;
  host.expect_ok(question.ask(stream));
  host.expect_ok(host.table.copy(host.self, to, shared.host, 64, stream, &host.error));
  host.expect_ok(host.table.copy(host.self, to + 32, to, 32, other, &host.error));
  host.expect_ok(host.wait(other));
  host.expect_ok(host.wait());
  assert_int_equal(host.counts.n_copied, n_copied + 1);
  std::memset(shared.host, 5, 64);
  question.answer(0, 3.0f);
  host.expect_ok(host.wait(stream));
  assert_int_equal(host.counts.n_copied, n_copied + 2);
  assert_true(to[0] == std::byte{5} && to[63] == std::byte{5});
  assert_true(question.answered() == 3.0f);
  assert_true(host.controls.destroy_stream(stream) && host.controls.destroy_stream(other));
  assert_false(host.controls.destroy_stream(stream));
  host.expect_refused(host.wait(stream), TANDEM_ERROR_INTERNAL, "a stream that is none");
}

// A wait for a device waits for all of its work.
void late_completions(void**) {
  Host host;
  void* stream = host.controls.create_stream();
  std::byte* data = host.allocate(64);
  void* other = nullptr;
  host.expect_ok(host.table.allocate(host.self, 64, &other, &host.error));
  const auto three_late_copies = [&] {
    const int64_t n = host.counts.n_copied;
    Gate gate(host.controls, stream);
    const auto begin = Clock::now();
    for (int i = 0; i < 3; ++i) host.expect_ok(host.table.copy(host.self, data, data + 32, 32, stream, &host.error));
    assert_int_equal(host.counts.n_copied, n);
    assert_false(gate.is_open());
    return begin;  // the gate opens here
  };
  const auto expect_late = [&](Clock::time_point begin, int64_t n_copied) {
    assert_true(Clock::now() - begin >= std::chrono::milliseconds(60));
    assert_int_equal(host.counts.n_copied, n_copied);
  };
  host.controls.set_delay(20 * kMillisecond);
  const int64_t n = host.counts.n_copied;
  auto begin = three_late_copies();
  host.expect_ok(host.wait(stream));
  expect_late(begin, n + 3);
  begin = three_late_copies();
  host.table.release(host.self, other);
  expect_late(begin, n + 6);
  begin = three_late_copies();
  host.controls.destroy_stream(stream);
  expect_late(begin, n + 9);
}

void captures(void**) {
  Host host;
  Question question(&host);
  void* stream = host.controls.create_stream();
  std::byte* data = host.allocate(64);
  int32_t is_capturing = -1;
  host.expect_ok(host.table.capturing(host.self, stream, &is_capturing, &host.error));
  assert_int_equal(is_capturing, 0);
  assert_null(host.controls.end_capture(stream));
  assert_false(host.controls.begin_capture(nullptr));
  assert_false(host.controls.begin_capture(&host));
  assert_true(host.controls.begin_capture(stream));
  assert_false(host.controls.begin_capture(stream));
  host.expect_ok(host.table.capturing(host.self, stream, &is_capturing, &host.error));
  assert_int_equal(is_capturing, 1);
  host.expect_ok(host.table.capturing(host.self, nullptr, &is_capturing, &host.error));
  assert_int_equal(is_capturing, 0);

  void *made = nullptr, *device = nullptr;
  const auto refused = [&](int32_t status) { host.expect_refused(status, TANDEM_ERROR_BACKEND, "captured"); };
  refused(host.table.copy(host.self, data, data + 32, 32, stream, &host.error));
  refused(host.table.fill(host.self, data, 0, 64, stream, &host.error));
  refused(host.wait(stream));
  refused(host.table.allocate(host.self, 64, &made, &host.error));
  refused(host.table.allocate_shared(host.self, 64, &made, &device, &host.error));
  host.expect_ok(host.table.fill(host.self, data, 0, 64, nullptr, &host.error));  // another stream
  host.expect_ok(host.wait());

  host.expect_ok(question.ask(stream));
  void* graph = host.controls.end_capture(stream);
  assert_non_null(graph);
  host.expect_ok(host.wait(stream));
  assert_int_equal(question.hand_over.arrived(), 0);
  question.forget_calls();  // the graph has copies of them
  for (uint64_t ticket = 0; ticket < 5; ++ticket) {
    assert_true(host.controls.launch(graph, stream));
    question.answer(ticket, static_cast<float>(ticket));
    host.expect_ok(host.wait(stream));
    assert_true(question.answered() == static_cast<float>(ticket));
  }
  assert_true(host.controls.begin_capture(stream));
  assert_false(host.controls.launch(graph, stream));
  host.table.release(host.self, &host);
  host.expect_fault("while a stream is captured");
  host.controls.free_graph(host.controls.end_capture(stream));
  host.controls.free_graph(graph);
  host.controls.destroy_stream(stream);
  host.table.release(host.self, &host);
  host.expect_fault("was not allocated");
  host.table.release_shared(host.self, data);
  host.expect_fault("was not allocated");
}

// Every function that can fail reports the loss. The others still work.
void loses_the_device(void**) {
  Host host;
  Question question(&host);
  void* stream = host.controls.create_stream();
  std::byte* data = host.allocate(64);
  const int64_t n_copied = host.counts.n_copied, n_merged = host.counts.n_merged;
  host.expect_ok(question.ask(stream));
  host.expect_ok(host.table.copy(host.self, data, data + 32, 32, stream, &host.error));
  question.hand_over.await(1);
  host.controls.lose_device();
  const Layer layer = small_layer();
  void *made = nullptr, *device = nullptr;
  int32_t is_capturing = 0;
  char text[4];
  const int32_t statuses[] = {
      host.wait(stream),
      host.wait(),
      host.table.check(host.self, &host.error),
      host.table.open(0, &made, &host.error),
      host.table.allocate(host.self, 64, &made, &host.error),
      host.table.allocate_shared(host.self, 64, &made, &device, &host.error),
      host.table.copy(host.self, data, text, 4, nullptr, &host.error),
      host.table.fill(host.self, data, 0, 4, nullptr, &host.error),
      host.table.capturing(host.self, nullptr, &is_capturing, &host.error),
      host.table.supports(host.self, &layer, 1, &host.error),
      host.table.append(host.self, &question.append, stream, &host.error),
      host.table.merge(host.self, &question.merge, stream, &host.error),
      question.ask(nullptr),
  };
  for (const int32_t status : statuses) host.expect_refused(status, TANDEM_ERROR_DEVICE_LOST, "lost");
  assert_int_equal(host.error.underlying, kLostUnderlying);
  host.controls.destroy_stream(stream);
  assert_int_equal(host.counts.n_copied, n_copied);
  assert_int_equal(host.counts.n_merged, n_merged);
  assert_true(std::isnan(question.answered()));
  assert_int_equal(question.hand_over.fault(), 0);
  host.controls.reset();
  host.expect_ok(host.table.check(host.self, &host.error));
  host.expect_ok(host.table.fill(host.self, data, 0, 4, nullptr, &host.error));
  host.expect_ok(host.wait());
}

void fails_calls(void**) {
  Host host;
  std::byte* data = host.allocate(64);
  const int64_t n = host.counts.n_allocated;
  void* made = nullptr;
  host.controls.fail_call(kAllocate, 2, TANDEM_ERROR_OUT_OF_MEMORY);
  host.allocate(64);
  host.expect_ok(host.table.check(host.self, &host.error));
  host.expect_refused(host.table.allocate(host.self, 64, &made, &host.error), TANDEM_ERROR_OUT_OF_MEMORY, "asked");
  assert_int_equal(host.error.underlying, kInjectedUnderlying);
  assert_null(made);
  host.allocate(64);
  assert_int_equal(host.counts.n_allocated, n + 2);
  host.controls.fail_call(kAnyCall, 3, TANDEM_ERROR_DEVICE_LOST);
  host.expect_ok(host.table.fill(host.self, data, 0, 4, nullptr, &host.error));
  host.expect_ok(host.table.check(host.self, &host.error));
  host.expect_refused(host.wait(), TANDEM_ERROR_DEVICE_LOST, "asked");
  host.expect_ok(host.wait());
}

// Every wait() reports the first fault until it is cleared.
void keeps_faults(void**) {
  Host host;
  Question question(&host);
  host.expect_ok(host.table.merge(host.self, &question.merge, nullptr, &host.error));
  question.append.n_tokens = 0;
  host.expect_ok(host.table.append(host.self, &question.append, nullptr, &host.error));
  for (int i = 0; i < 2; ++i) host.expect_refused(host.wait(), TANDEM_ERROR_INTERNAL, "merge() without an append()");
  host.expect_refused(host.table.check(host.self, &host.error), TANDEM_ERROR_INTERNAL, "without an append");
  host.expect_fault("merge() without an append()");
  host.expect_ok(host.wait());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(moves_memory),     cmocka_unit_test(shares_memory), cmocka_unit_test(streams_are_queues),
      cmocka_unit_test(late_completions), cmocka_unit_test(captures),      cmocka_unit_test(loses_the_device),
      cmocka_unit_test(fails_calls),      cmocka_unit_test(keeps_faults),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
