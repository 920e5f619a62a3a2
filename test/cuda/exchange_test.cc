// SPDX-License-Identifier: MIT
// append(), merge() and what they need of a module: bytes against a model, states against double precision, and the
// handshake with a host that is late or never answers.
//
//   exchange_test [MODULE]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "exchange_case.h"
#include "lib/model/dtype.h"
#include "lib/tables/lost_tickets.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace {

using namespace tandem::test;
using tandem::DeviceError;

OpenDevice* device = nullptr;

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr int32_t kTensorTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16};
constexpr int32_t kDims[] = {64, 80, 96, 112, 128, 192, 256};

// Ragged sequences: without tokens, with first new tokens that are not resident, and with tables that wrap around.
const std::vector<ExchangeSequence> kRagged = {{0, 3, 3, true},     {0, 200, 1, false}, {5, 5, 0, true},
                                               {300, 520, 5, true}, {64, 65, 4, false}, {90, 131, 2, true}};

ExchangeOptions options_of(int32_t type, int32_t dim, std::vector<ExchangeSequence> sequences) {
  ExchangeOptions options;
  options.layer.n_kv_heads = 3;
  options.layer.n_q_heads = 6;
  options.layer.k_head_dim = options.layer.v_head_dim = dim;
  options.layer.k_type = options.layer.v_type = type;
  options.sequences = std::move(sequences);
  return options;
}

// Fails the test if there is an error text.
void assert_fine(const std::string& wrong) {
  if (!wrong.empty()) fail_msg("%s", wrong.c_str());
}
void must_run(ExchangeCase& c, int32_t code) { device->must(code, c.error); }

void rows_are_rounded_as_the_host_rounds_them(void**) {
  uint64_t seed = 1;
  for (const int32_t type : kTypes)
    for (const int32_t dim : kDims)
      for (const int32_t tensor_type : kTensorTypes) {
        ExchangeOptions options = options_of(type, dim, kRagged);
        options.tensor_type = tensor_type;
        options.gap = static_cast<int32_t>(seed % 5);  // odd gaps put rows at odd addresses
        options.is_wild = true;
        options.seed = seed++;
        ExchangeCase c(*device, options);
        must_run(c, c.append());
        device->wait();
        c.expect_append(0);
        assert_int_equal(c.arrived(), 1);
        const std::string wrong = c.check_memory();
        if (!wrong.empty())
          fail_msg("%s of %d from %s: %s", tandem::find_dtype(type)->name, dim, tandem::find_dtype(tensor_type)->name,
                   wrong.c_str());
      }
}

void types_and_dims_of_k_and_v_may_differ(void**) {
  for (const int32_t k_type : kTypes)
    for (const int32_t v_type : kTypes) {
      ExchangeOptions options = options_of(k_type, 192, kRagged);
      options.layer.v_type = v_type;
      options.layer.v_head_dim = 128;
      options.layer.n_q_heads = 12;
      options.page_len = 128;
      ExchangeCase c(*device, options);
      must_run(c, c.append());
      device->wait();
      c.expect_append(0);
      assert_fine(c.check_memory());
    }
}

// More rows than one block takes, and more than all blocks have warps, however few blocks are asked for.
void many_tokens(void**) {
  for (const int32_t leaves_room : {0, 1, 2})
    for (const int32_t q_len : {30, 200}) {
      ExchangeOptions options = options_of(TANDEM_Q8_0, 64, {});
      for (int i = 0; i < (q_len == 30 ? 40 : 5); ++i) options.sequences.push_back({0, 210 + i, q_len, i % 3 != 0});
      options.n_slots = 3;
      ExchangeCase c(*device, options);
      c.append_call.leaves_room = leaves_room;
      for (int i = 0; i < 2; ++i) {  // the second call finds the counters of the first one's blocks
        must_run(c, c.append());
        device->wait();
        c.expect_append(0);
        assert_int_equal(c.arrived(), i + 1);
        assert_fine(c.check_memory());
      }
    }
}

// Without a ticket, pages and a buffer get the rows that pages and a slot get with one.
void rows_of_chunks_are_those_of_tickets(void**) {
  uint64_t seed = 1;
  for (const int32_t type : kTypes)
    for (const int32_t dim : kDims)
      for (const int32_t tensor_type : kTensorTypes) {
        const int64_t begin = seed % 3 == 0 ? 200 : 0;  // the first new tokens may be older than the window
        ExchangeOptions options = options_of(type, dim, {{begin, 345, 201, false}});
        options.tensor_type = tensor_type;
        options.gap = static_cast<int32_t>(seed % 5);
        options.table_len = 6;
        options.is_wild = true;
        options.seed = seed++;
        ExchangeCase by_ticket(*device, options), chunk(*device, options);
        must_run(by_ticket, by_ticket.append());
        tandem::DeviceExchange& to = chunk.append_call.exchange;
        std::vector<std::byte> rows(static_cast<size_t>(to.slot_bytes), std::byte{0xff});
        void* const buffer = device->allocate(to.slot_bytes);
        device->upload(buffer, rows.data(), to.slot_bytes);
        to.flags = nullptr;
        to.slots = static_cast<std::byte*>(buffer);
        must_run(chunk, chunk.append());
        device->wait();
        device->download(rows.data(), buffer, to.slot_bytes);
        assert_true(chunk.pool() == by_ticket.pool());
        constexpr size_t kHeader = sizeof(tandem::SlotHeader);
        assert_memory_equal(rows.data() + kHeader, by_ticket.host_slot(0) + kHeader, rows.size() - kHeader);
        assert_int_equal(chunk.arrived(), 0);
        device->release(buffer);
      }
}

void without_rows_only_queries_go_out(void**) {
  ExchangeOptions options = options_of(TANDEM_BF16, 128, kRagged);
  options.has_rows = false;
  ExchangeCase c(*device, options);
  must_run(c, c.append());
  device->wait();
  c.expect_append(0);
  assert_fine(c.check_memory());
}

void hidden_states_go_out_with_new_rows(void**) {
  uint64_t seed = 1;
  for (const int32_t tensor_type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16})
    for (const int32_t x_type : {TANDEM_F16, TANDEM_BF16, TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64})
      for (const int32_t hidden_dim : {8, 256, 776, 832, 4096}) {
        if (reference::has_groups(x_type) && hidden_dim % tandem::kHiddenUnit != 0) continue;
        ExchangeOptions options = options_of(TANDEM_BF16, 64, kRagged);
        options.tensor_type = tensor_type;
        options.x_type = x_type;
        options.hidden_dim = hidden_dim;
        options.gap = static_cast<int32_t>(seed % 5);
        options.is_wild = true;
        options.seed = seed++;
        options.has_rows = seed % 4 != 0;
        ExchangeCase c(*device, options);
        must_run(c, c.append());
        device->wait();
        c.expect_append(0);
        assert_fine(c.check_memory());
      }
}

void states_merge(void**) {
  uint64_t seed = 1;
  for (const int32_t dim : kDims)
    for (const int32_t o_type : kTensorTypes)
      for (const bool has_sinks : {false, true}) {
        ExchangeOptions options = options_of(TANDEM_BF16, dim, kRagged);
        options.o_type = o_type;
        options.gap = static_cast<int32_t>(seed % 5);
        options.seed = seed++;
        if (has_sinks) options.layer.sinks = {-1.0f, 2.0f, -INFINITY, 0.5f, 60.0f, -60.0f};
        ExchangeCase c(*device, options);
        const AnsweringHost host(c.flags, c.leaves_states());
        must_run(c, c.append());
        must_run(c, c.merge());
        device->wait();
        const std::string wrong = c.check_merge(0);
        if (!wrong.empty())
          fail_msg("%d dims, o %s, %s: %s", dim, tandem::find_dtype(o_type)->name, has_sinks ? "sinks" : "no sinks",
                   wrong.c_str());
      }
}

void lse_may_stay(void**) {
  ExchangeCase c(*device, options_of(TANDEM_BF16, 128, kRagged));
  float* const lse = std::exchange(c.merge_call.lse_out, nullptr);
  const AnsweringHost host(c.flags, c.leaves_states());
  must_run(c, c.append());
  must_run(c, c.merge());
  device->wait();
  c.merge_call.lse_out = lse;
  const std::vector<std::byte> without = c.output();
  must_run(c, c.merge());
  device->wait();
  assert_fine(c.check_merge(0));
  const std::vector<std::byte> with = c.output();
  const auto o_end = (c.merge_call.n_tokens + 1) * c.merge_call.o_out.token_stride * 4;
  assert_true(std::equal(with.begin(), with.begin() + o_end, without.begin()));
  assert_true(std::all_of(without.begin() + o_end, without.end(), [](std::byte x) { return x == std::byte{0xff}; }));
}

// States [n_tokens, n_heads, dim]. Some are empty, with any o, and some have NaN.
struct SomeStates {
  std::vector<float> o, lse;

  SomeStates(reference::Random& random, int64_t n_rows, int64_t dim) {
    for (int64_t i = 0; i < n_rows; ++i) {
      const bool is_empty = random.chance(0.3);
      lse.push_back(is_empty ? -INFINITY : random.chance(0.03) ? NAN : static_cast<float>(20.0 * random.normal()));
      for (int64_t d = 0; d < dim; ++d) o.push_back(is_empty ? NAN : static_cast<float>(random.normal()));
    }
  }
};

bool is_sum(double a, double b, double sum, double bound) {
  return std::isnan(a + b) ? std::isnan(sum) : std::fabs(sum - (a + b)) <= bound;
}

// Adds states of some heads of some rows. The other states stay as they are.
void states_add_up(void**) {
  constexpr int64_t kTokens = 70, kHeads = 6;
  reference::Random random(5);
  for (const int32_t dim : kDims) {
    const ExchangeCase shape(*device, options_of(TANDEM_BF16, dim, kRagged));
    const SomeStates before(random, kTokens * kHeads, dim), part(random, kTokens * kHeads, dim);
    const auto n_lse = static_cast<int64_t>(before.lse.size()) * 4, n_o = n_lse * dim;
    float* memory[4];
    const std::vector<float>* from[] = {&before.o, &before.lse, &part.o, &part.lse};
    for (int i = 0; i < 4; ++i) {
      memory[i] = static_cast<float*>(device->allocate(i % 2 == 0 ? n_o : n_lse));
      device->upload(memory[i], from[i]->data(), i % 2 == 0 ? n_o : n_lse);
    }
    const tandem::DeviceAccumulate call{shape.append_call.layer, 3, 60, 1, 4, memory[0], memory[1], memory[2], memory[3]};
    DeviceError error;
    device->must(device->table->accumulate(device->self, &call, nullptr, &error), error);
    device->wait();
    std::vector<float> o(before.o.size()), lse(before.lse.size());
    device->download(o.data(), memory[0], n_o);
    device->download(lse.data(), memory[1], n_lse);
    for (float* data : memory) device->release(data);
    for (int64_t i = 0; i < kTokens * kHeads; ++i) {
      const auto at = static_cast<size_t>(i);
      const double a = before.lse[at], b = part.lse[at], most = std::fmax(a, b);
      const bool is_own = i / kHeads >= 3 && i / kHeads < 63 && i % kHeads >= 1 && i % kHeads < 5;
      const auto first = static_cast<int64_t>(at) * dim;
      if (!is_own || b == -INFINITY) {
        assert_memory_equal(&lse[at], &before.lse[at], 4);
        assert_memory_equal(o.data() + first, before.o.data() + first, static_cast<size_t>(dim) * 4);
        continue;
      }
      const double of_a = a == -INFINITY ? 0.0 : std::exp(a - most), of_b = std::exp(b - most);
      assert_true(is_sum(most, std::log(of_a + of_b), lse[at], 0x1p-21 * (1.0 + std::fabs(most))));
      for (auto d = static_cast<size_t>(first); d < static_cast<size_t>(first + dim); ++d) {
        const double x = of_a == 0.0 ? 0.0 : of_a / (of_a + of_b) * static_cast<double>(before.o[d]),
                     y = of_b / (of_a + of_b) * static_cast<double>(part.o[d]);
        assert_true(is_sum(x, y, o[d], 1e-5 * (std::fabs(x) + std::fabs(y)) + 1e-30));
      }
    }
  }
}

// The slot of a lost ticket has the states of another ticket, so its output must be NaN. The output of a ticket that was
// answered before the loss is right, even if the device had not yet read the answer.
void outputs_of_what_is_lost_are_nan(void**) {
  for (const uint64_t first_lost : {uint64_t{2}, uint64_t{3}}) {
    ExchangeOptions options = options_of(TANDEM_BF16, 128, {{0, 100, 2, true}, {0, 9, 1, true}});
    options.n_slots = 2;
    ExchangeCase c(*device, options);
    const std::function<void(uint64_t)> leave = c.leaves_states();
    {
      const AnsweringHost host(c.flags, leave);
      for (int i = 0; i < 2; ++i) {
        must_run(c, c.append());
        must_run(c, c.merge());
      }
      device->wait();
      c.wait_for_host();
    }
    must_run(c, c.append());
    device->wait();
    assert_int_equal(c.arrived(), 3);
    if (first_lost == 3) leave(2);
    std::atomic_ref<uint64_t>(c.flags->answered).store(tandem::kLostTickets + first_lost, std::memory_order_release);
    must_run(c, c.merge());
    device->wait();
    assert_int_equal(c.flags->fault, 0);
    assert_fine(first_lost == 2 ? c.check_all_nan() : c.check_merge(2));
  }
}

// Few slots, a slow host, and other rows in every ticket: each slot must hold the rows of its ticket.
void tickets_go_round_a_ring(void**) {
  for (const bool has_host_part : {false, true}) {
    ExchangeOptions options = options_of(TANDEM_BF16, 128, {{0, 150, 2, has_host_part}, {0, 9, 1, has_host_part}});
    options.n_batches = 23;
    ExchangeCase c(*device, options);
    uint64_t n_in_order = 0;
    const auto answer = [&, leave = c.leaves_states()](uint64_t ticket) {
      if (ticket % 5 == 3) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      n_in_order += c.host_finds(ticket, static_cast<int32_t>(ticket));
      leave(ticket);
    };
    {
      const AnsweringHost host(c.flags, answer);
      for (int32_t i = 0; i < options.n_batches; ++i) {
        must_run(c, c.append(i));
        must_run(c, c.merge());
      }
      device->wait();
      assert_fine(c.check_merge(22));
      c.wait_for_host();
    }
    assert_int_equal(n_in_order, 23);
    assert_int_equal(c.flags->fault, 0);
    for (int32_t i = 0; i < options.n_batches; ++i) {
      c.expect_append(i);
      c.expect_states(static_cast<uint64_t>(i));
    }
    assert_fine(c.check_memory());
  }
}

// The host never answers. Sequences without a host part do not wait.
void sequences_without_a_host_part_do_not_wait(void**) {
  ExchangeOptions options = options_of(TANDEM_BF16, 128, {{0, 100, 1, false}, {0, 64, 2, false}});
  options.n_slots = 9;
  ExchangeCase c(*device, options);
  for (int i = 0; i < 8; ++i) {
    must_run(c, c.append());
    must_run(c, c.merge());
  }
  device->wait();
  assert_int_equal(c.arrived(), 8);
  assert_int_equal(c.flags->fault, 0);
  assert_fine(c.check_merge(7));
}

double milliseconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

void call_all_after_a_fault(ExchangeCase& c, uint64_t arrived) {
  const std::vector<std::byte> before = c.pool();
  const double ms = milliseconds_of([&] {
    for (int i = 0; i < 10; ++i) {
      must_run(c, c.append());
      must_run(c, c.merge());
    }
    device->wait();
  });
  assert_true(ms < 1500.0);  // each wait would take 400 ms
  assert_int_equal(c.arrived(), arrived);
  assert_true(c.pool() == before);
  assert_fine(c.check_all_nan());
}

void a_slot_that_does_not_come_is_a_fault(void**) {
  for (const int32_t n_tokens : {2, 60}) {
    ExchangeOptions options = options_of(TANDEM_Q4_0, 128, {{0, 100, n_tokens, false}});
    options.timeout_ns = 400'000'000;
    options.n_slots = 3;
    ExchangeCase c(*device, options);
    for (int i = 0; i < 2; ++i) {
      must_run(c, c.append());
      must_run(c, c.merge());
    }
    device->wait();
    assert_int_equal(c.flags->fault, 0);
    assert_fine(c.check_merge(1));
    const double ms = milliseconds_of([&] {
      must_run(c, c.append());
      device->wait();
    });
    assert_true(ms > 300.0 && ms < 5000.0);
    assert_int_equal(c.flags->fault, tandem::kFaultSlot);
    call_all_after_a_fault(c, 2);
    for (int i = 0; i < 2; ++i) c.expect_append(0);
    assert_fine(c.check_memory());
  }
}

void an_answer_that_does_not_come_is_a_fault(void**) {
  ExchangeOptions options = options_of(TANDEM_BF16, 128, {{0, 100, 1, true}, {0, 30, 1, false}});
  options.timeout_ns = 400'000'000;
  ExchangeCase c(*device, options);
  must_run(c, c.append());
  must_run(c, c.merge());
  device->wait();
  assert_int_equal(c.arrived(), 1);
  assert_int_equal(c.flags->fault, tandem::kFaultAnswer);
  call_all_after_a_fault(c, 1);
}

void what_has_no_kernel_is_refused(void**) {
  const auto refused = [](const char* field, const std::function<void(tandem::Layer&)>& spoil) {
    ExchangeCase c(*device, options_of(TANDEM_BF16, 128, kRagged));
    tandem::Layer layer = *c.append_call.layer;
    spoil(layer);
    c.append_call.layer = &layer;
    assert_int_equal(c.append(), TANDEM_ERROR_UNSUPPORTED);
    assert_string_equal(c.error.field, field);
    const std::string reason = c.error.message;
    assert_int_equal(device->table->supports(device->self, &layer, 1, &c.error), TANDEM_ERROR_UNSUPPORTED);
    assert_string_equal(c.error.field, field);
    assert_true(c.error.message == reason);
    device->wait();
    assert_int_equal(c.arrived(), 0);
  };
  refused("k_type", [](tandem::Layer& layer) { layer.k_type = TANDEM_Q4_64; });
  refused("v_type", [](tandem::Layer& layer) { layer.v_type = TANDEM_Q4_64; });
  refused("k_rotation", [](tandem::Layer& layer) {  // the number of dims is no power of two
    layer.k_rotation = TANDEM_ROTATION_HADAMARD;
    layer.k_head_dim = 96;
  });
  refused("v_aliases_k", [](tandem::Layer& layer) { layer.v_aliases_k = true; });
  refused("k_head_dim", [](tandem::Layer& layer) { layer.k_head_dim = 576; });
}

void shared_memory_is_both_sides(void**) {
  DeviceError error;
  void *host = nullptr, *there = nullptr;
  device->must(device->table->allocate_shared(device->self, 10'000, &host, &there, &error), error);
  auto* bytes = static_cast<uint8_t*>(host);
  assert_int_equal(reinterpret_cast<uintptr_t>(bytes) % 256, 0);
  for (int i = 0; i < 10'000; ++i) assert_int_equal(bytes[i], 0);
  std::memset(bytes, 5, 10'000);
  void* memory = device->allocate(10'000);
  device->must(device->table->copy(device->self, memory, there, 10'000, nullptr, &error), error);
  device->must(device->table->fill(device->self, there, 9, 100, nullptr, &error), error);
  device->wait();
  std::vector<uint8_t> copy(10'000);
  device->download(copy.data(), memory, 10'000);
  assert_true(copy == std::vector<uint8_t>(10'000, 5));
  assert_int_equal(bytes[99], 9);
  assert_int_equal(bytes[100], 5);
  device->table->release(device->self, memory);
  device->table->release_shared(device->self, host);
}

// A kernel copies few bytes if both sides are aligned: exactly these bytes, and none beside them.
void copies_from_shared_memory_are_exact(void**) {
  constexpr int64_t kBytes = 600'000;
  DeviceError error;
  void *host = nullptr, *there = nullptr;
  device->must(device->table->allocate_shared(device->self, kBytes, &host, &there, &error), error);
  std::vector<uint8_t> expected(kBytes), got(kBytes);
  for (int64_t i = 0; i < kBytes; ++i) static_cast<uint8_t*>(host)[i] = static_cast<uint8_t>(i * 37 % 251);
  auto* const memory = static_cast<std::byte*>(device->allocate(kBytes));
  for (const int64_t bytes : {1, 8, 12, 100, 4096, 10'752, 262'144, 262'152, 500'001})
    for (const int64_t to : {0, 8, 4})
      for (const int64_t from : {0, 16, 3}) {
        device->must(device->table->fill(device->self, memory, 0xff, kBytes, nullptr, &error), error);
        device->must(
            device->table->copy(device->self, memory + to, static_cast<std::byte*>(there) + from, bytes, nullptr, &error),
            error);
        device->wait();
        device->download(got.data(), memory, kBytes);
        std::fill(expected.begin(), expected.end(), uint8_t{0xff});
        std::copy_n(static_cast<uint8_t*>(host) + from, bytes, expected.begin() + to);
        if (got != expected)
          fail_msg("%lld bytes from %lld to %lld", static_cast<long long>(bytes), static_cast<long long>(from),
                   static_cast<long long>(to));
      }
  device->table->release(device->self, memory);
  device->table->release_shared(device->self, host);
}

void a_device_that_is_there_says_so(void**) {
  DeviceError error;
  int32_t is_capturing = 1, of_thread = -1;
  assert_int_equal(device->table->check(device->self, &error), TANDEM_OK);
  std::thread([&] { of_thread = device->table->check(device->self, &error); }).join();
  assert_int_equal(of_thread, TANDEM_OK);
  assert_int_equal(device->table->capturing(device->self, nullptr, &is_capturing, &error), TANDEM_OK);
  assert_int_equal(is_capturing, 0);
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {
      cmocka_unit_test(rows_are_rounded_as_the_host_rounds_them),
      cmocka_unit_test(types_and_dims_of_k_and_v_may_differ),
      cmocka_unit_test(many_tokens),
      cmocka_unit_test(rows_of_chunks_are_those_of_tickets),
      cmocka_unit_test(without_rows_only_queries_go_out),
      cmocka_unit_test(hidden_states_go_out_with_new_rows),
      cmocka_unit_test(states_merge),
      cmocka_unit_test(lse_may_stay),
      cmocka_unit_test(states_add_up),
      cmocka_unit_test(outputs_of_what_is_lost_are_nan),
      cmocka_unit_test(tickets_go_round_a_ring),
      cmocka_unit_test(sequences_without_a_host_part_do_not_wait),
      cmocka_unit_test(a_slot_that_does_not_come_is_a_fault),
      cmocka_unit_test(an_answer_that_does_not_come_is_a_fault),
      cmocka_unit_test(what_has_no_kernel_is_refused),
      cmocka_unit_test(shared_memory_is_both_sides),
      cmocka_unit_test(copies_from_shared_memory_are_exact),
      cmocka_unit_test(a_device_that_is_there_says_so),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
