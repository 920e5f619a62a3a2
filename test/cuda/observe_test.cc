// SPDX-License-Identifier: MIT
// observe() against double precision, every byte of the window and of the slots.
//
//   observe_test [MODULE] [few]
//
// few: only the first rounds of each test, for slow tools.
#include <algorithm>
#include <cstring>
#include <functional>

#include "exchange_case.h"
#include "lib/model/dtype.h"
#include "lib/tables/lost_tickets.h"
#include "observe_case.h"
#include "with_cmocka.h"

namespace {

using namespace tandem::test;

OpenDevice* device = nullptr;
bool is_few = false;

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr int32_t kTensorTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16};
constexpr int32_t kDims[] = {64, 80, 96, 112, 128, 192, 256, 4, 28, 36, 100, 252};

// Ragged sequences, across the ends of pages and rings: with nothing to do, with nothing resident, with nothing to count but
// averages to hand over, and with all averages handed over.
const std::vector<ObserveSequence> kRagged = {{0, 3, 3, 0},     {7, 200, 1, 64}, {5, 5, 0, 0},     {300, 520, 5, 20},
                                              {90, 131, 2, 41}, {63, 65, 1, 1},  {70, 100, 0, 10}, {400, 401, 40, 0},
                                              {0, 100, 70, 3},  {5, 60, 0, 0}};

ObserveOptions options_of(int32_t type, int32_t dim) {
  ObserveOptions options;
  options.layer.n_kv_heads = 2;
  options.layer.n_q_heads = 6;
  options.layer.k_head_dim = dim;
  options.layer.v_head_dim = 64;
  options.layer.k_type = type;
  options.layer.v_type = TANDEM_BF16;
  options.sequences = kRagged;
  return options;
}

void assert_fine(const ObserveOptions& options, const std::string& wrong) {
  if (wrong.empty()) return;
  fail_msg("%s of %d, q %s, groups of %d, alpha %g, %d counted, cap %g: %s", tandem::find_dtype(options.layer.k_type)->name,
           options.layer.k_head_dim, tandem::find_dtype(options.q_type)->name, options.layer.group_size(),
           static_cast<double>(options.alpha), options.n_counted, static_cast<double>(options.layer.soft_cap),
           wrong.c_str());
}

void must_run(ObserveCase& c, int32_t code) { device->must(code, c.error); }

void check_one(const ObserveOptions& options) {
  ObserveCase c(*device, options);
  must_run(c, c.append());
  device->wait();
  const ObserveCase::Memory before = c.memory();
  must_run(c, c.observe());
  device->wait();
  assert_int_equal(c.observed(), 1);
  assert_fine(options, c.check(before, 0));
}

void every_type_and_dim(void**) {
  uint64_t seed = 1;
  for (const int32_t type : kTypes)
    for (const int32_t dim : kDims) {
      if (is_few && dim != 64 && dim != 100) continue;
      ObserveOptions options = options_of(type, dim);
      options.q_type = kTensorTypes[seed % 3];
      options.gap = static_cast<int32_t>(seed % 5);  // odd gaps put rows at odd addresses
      options.has_appended = seed % 2 == 0;
      options.seed = seed++;
      check_one(options);
    }
}

// For tools that watch every memory access.
void every_kernel(void**) {
  for (const int32_t type : kTypes)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t q_type : {TANDEM_BF16, TANDEM_F32}) {
        ObserveOptions options = options_of(type, dim);
        options.q_type = q_type;
        check_one(options);
      }
}

// Varies groups, page lengths, the number and weight of counted queries, soft caps, and sizes of logits.
void any_call(void**) {
  reference::Random random(7);
  for (int i = 0; i < (is_few ? 4 : 60); ++i) {
    const int32_t type = kTypes[random.integer(0, 5)];
    ObserveOptions options = options_of(type, static_cast<int32_t>(4 * random.integer(1, 64)));
    options.layer.n_kv_heads = random.pick({1, 2, 3});
    options.layer.n_q_heads = options.layer.n_kv_heads * random.pick({1, 2, 4, 5, 8});
    options.layer.soft_cap = random.chance(0.3) ? 2.0f : 0.0f;
    options.q_type = kTensorTypes[random.integer(0, 2)];
    options.q_size = random.pick({0.1, 1.0, 6.0});
    options.page_len = random.pick({64, 128, 192});
    options.alpha = random.pick({0.3f, 1.0f, 0.001f, 0.75f});
    options.n_counted = random.pick({1, 3, 20, 1000});
    options.has_appended = random.chance(0.5);
    options.max_keys = random.chance(0.5) ? INT32_MAX : int64_t{options.page_len} * options.table_len;
    options.seed = static_cast<uint64_t>(i);
    options.sequences.clear();
    const int64_t most = int64_t{options.page_len} * (options.table_len - 1);
    for (int64_t s = random.integer(1, 5); s > 0; --s) {
      const auto q_len = static_cast<int32_t>(random.chance(0.2) ? 0 : random.integer(1, random.pick({1, 4, 70})));
      const int64_t begin = random.integer(0, 2000), n = random.integer(0, most);
      const int64_t end = std::max<int64_t>(begin + n, q_len);
      options.sequences.push_back(
          {begin, std::min(end, begin + most), q_len, random.chance(0.5) ? random.integer(0, n) : 0});
      if (options.sequences.back().end < q_len) options.sequences.back().q_len = 0;
    }
    check_one(options);
  }
}

// More runs of keys than blocks, and more pairs than blocks at a time.
void large_windows(void**) {
  if (is_few) return;
  for (const int32_t type : {TANDEM_BF16, TANDEM_Q8_0}) {
    ObserveOptions options = options_of(type, 128);
    options.sequences = {{1000, 9000, 2, 500}, {0, 100, 1}};
    options.page_len = 128;
    options.table_len = 66;
    check_one(options);
    options.sequences.assign(300, {30, 160, 1, 10});
    options.page_len = 64;
    options.table_len = 4;
    check_one(options);
  }
}

void nothing_at_all(void**) {
  ObserveOptions options = options_of(TANDEM_BF16, 128);
  options.sequences = {{0, 0, 0}};
  options.max_tokens = 1;
  check_one(options);
  ObserveCase c(*device, options);
  c.append_call.sequences.n_sequences = c.observe_call.sequences.n_sequences = 0;
  must_run(c, c.append());
  must_run(c, c.observe());
  device->wait();
  assert_int_equal(c.observed(), 1);
}

// Tickets come in turn, each in its slot, and averages go on from call to call.
void tickets_go_on(void**) {
  ObserveOptions options = options_of(TANDEM_F16, 96);
  options.sequences = {{30, 200, 1, 8}, {0, 90, 2, 0}};
  options.is_full = true;
  ObserveCase c(*device, options);
  for (uint64_t ticket = 0; ticket < 7; ++ticket) {
    must_run(c, c.append());
    device->wait();
    assert_int_equal(c.observed(), ticket);
    const ObserveCase::Memory before = c.memory();
    must_run(c, c.observe());
    device->wait();
    assert_int_equal(c.observed(), ticket + 1);
    assert_fine(options, c.check(before, ticket));
    c.answer(ticket + 1);
    for (ObserveSequence& sequence : options.sequences) {
      sequence.begin += sequence.n_evicted;
      sequence.end += sequence.q_len;
    }
    c.set_sequences(options.sequences);
  }
}

void bits_are_the_same_each_time(void**) {
  for (const int32_t type : {TANDEM_BF16, TANDEM_Q4_0}) {
    ObserveOptions options = options_of(type, 128);
    options.n_counted = 10;
    ObserveCase c(*device, options);
    must_run(c, c.append());
    device->wait();
    const ObserveCase::Memory before = c.memory();
    ObserveCase::Memory first;
    for (int i = 0; i < (is_few ? 3 : 250); ++i) {
      c.restore(before);
      must_run(c, c.observe());
      device->wait();
      if (i == 0) first = c.memory();
      assert_true(c.memory() == first);
    }
    assert_fine(options, c.check(before, 0));
  }
}

// The host does not answer. The third append finds no free slot, and from then on nothing is written.
void after_a_fault_nothing_is_done(void**) {
  ObserveOptions options = options_of(TANDEM_BF16, 64);
  options.sequences = {{0, 100, 1, 10}};
  ObserveCase c(*device, options);
  c.append_call.exchange.timeout_ns = 50'000'000;
  for (int i = 0; i < 2; ++i) must_run(c, c.append());
  device->wait();
  assert_int_equal(c.flags->arrived, 1);
  assert_int_equal(c.flags->fault, tandem::kFaultSlot);
  const ObserveCase::Memory before = c.memory();
  must_run(c, c.observe());
  device->wait();
  assert_int_equal(c.observed(), 0);
  assert_true(c.memory() == before);
}

// The host has lost the second ticket. Calls go on, and weights no longer count.
void what_is_lost_does_not_count(void**) {
  for (const uint64_t first_lost : {uint64_t{1}, uint64_t{2}}) {
    ObserveOptions options = options_of(TANDEM_BF16, 64);
    options.sequences = {{0, 100, 1, 10}};
    ObserveCase c(*device, options);
    c.answer(tandem::kLostTickets + first_lost);
    for (int i = 0; i < 2; ++i) must_run(c, c.append());
    device->wait();
    const ObserveCase::Memory before = c.memory();
    must_run(c, c.observe());
    device->wait();
    assert_int_equal(c.observed(), 2);
    if (first_lost == 1)
      assert_true(c.memory() == before);
    else
      assert_fine(options, c.check(before, 1));
  }
}

void what_cannot_be_is_refused(void**) {
  const auto refused = [](int32_t code, const char* field, const std::function<void(ObserveCase&, tandem::Layer&)>& spoil) {
    ObserveCase c(*device, options_of(TANDEM_BF16, 64));
    must_run(c, c.append());
    tandem::Layer layer = *c.observe_call.layer;
    spoil(c, layer);
    c.observe_call.layer = &layer;
    assert_int_equal(c.observe(), code);
    assert_string_equal(c.error.field, field);
    device->wait();
    assert_int_equal(c.observed(), 0);
  };
  refused(TANDEM_ERROR_UNSUPPORTED, "sliding_window", [](ObserveCase&, tandem::Layer& layer) { layer.sliding_window = 9; });
  refused(TANDEM_ERROR_UNSUPPORTED, "k_type", [](ObserveCase&, tandem::Layer& layer) { layer.k_type = TANDEM_Q4_64; });
  refused(TANDEM_ERROR_INTERNAL, "", [](ObserveCase& c, tandem::Layer&) { c.observe_call.exchange.n_slots = 1; });
  refused(TANDEM_ERROR_INTERNAL, "", [](ObserveCase& c, tandem::Layer&) { c.observe_call.n_counted = 0; });
}

// merge() leaves lse for observe(), and for the host if the host wants it.
void merged_lse_stay(void**) {
  for (const bool is_observed : {true, false}) {
    ExchangeOptions options;
    options.layer.n_kv_heads = 3;
    options.layer.n_q_heads = 6;
    options.layer.k_head_dim = options.layer.v_head_dim = 64;
    options.layer.k_type = options.layer.v_type = TANDEM_BF16;
    options.layer.sinks = {-1.0f, 2.0f, -INFINITY, 0.5f, 60.0f, -60.0f};
    options.sequences = {{0, 200, 2, false, true}, {300, 500, 5, true, true}, {64, 95, 3, true, false}};
    options.max_tokens = 12;  // two rows of no sequence
    ExchangeCase c(*device, options);
    c.merge_call.is_observed = is_observed;
    std::vector<float> before(12 * 6), after(12 * 6);
    device->download(before.data(), c.merge_call.lse, 12 * 6 * 4);
    const AnsweringHost host(c.flags, c.leaves_states());
    device->must(c.append(), c.error);
    device->must(c.merge(), c.error);
    device->wait();
    const std::string wrong = c.check_merge(0);
    if (!wrong.empty()) fail_msg("%s", wrong.c_str());
    device->download(after.data(), c.merge_call.lse, 12 * 6 * 4);
    std::vector<std::byte> given(static_cast<size_t>(c.append_call.exchange.slot_bytes), std::byte{0xff});
    c.leaves_states_in(0, given.data());
    const auto of_host = [&](const std::byte* slot) {
      std::vector<float> lse(12 * 6);
      std::memcpy(lse.data(), slot + c.append_call.exchange.lse_at, lse.size() * 4);
      return lse;
    };
    std::vector<float> wanted = before, wanted_of_host = of_host(given.data());
    const std::vector<std::byte> output = c.output();
    const auto* lse_out = reinterpret_cast<const float*>(output.data() + output.size() - 13 * 13 * 4);
    for (int row = 0; row < 10 && is_observed; ++row)
      for (int head = 0; head < 6; ++head) {
        const float merged = lse_out[row * 13 + 2 * head];
        wanted[static_cast<size_t>(row) * 6 + static_cast<size_t>(head)] = merged;
        if (row >= 2 && row < 7)
          wanted_of_host[12 + 2 * static_cast<size_t>(head / 2 * 5 + row - 2) + static_cast<size_t>(head % 2)] = merged;
      }
    assert_memory_equal(after.data(), wanted.data(), wanted.size() * 4);
    assert_memory_equal(of_host(c.host_slot(0)).data(), wanted_of_host.data(), wanted_of_host.size() * 4);
  }
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  is_few = argc > 2 && std::strcmp(argv[2], "few") == 0;
  const CMUnitTest tests[] = {
      cmocka_unit_test(every_type_and_dim),
      cmocka_unit_test(every_kernel),
      cmocka_unit_test(any_call),
      cmocka_unit_test(large_windows),
      cmocka_unit_test(nothing_at_all),
      cmocka_unit_test(tickets_go_on),
      cmocka_unit_test(bits_are_the_same_each_time),
      cmocka_unit_test(after_a_fault_nothing_is_done),
      cmocka_unit_test(what_is_lost_does_not_count),
      cmocka_unit_test(what_cannot_be_is_refused),
      cmocka_unit_test(merged_lse_stay),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
