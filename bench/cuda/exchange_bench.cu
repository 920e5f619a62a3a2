// SPDX-License-Identifier: MIT
// Cost of a hand-over: microseconds of an append and a merge, with nothing between them, and of an observe.
//
//   exchange_bench MODULE
//
// A graph has 32 pairs of calls for one token of 32 query heads and 8 KV heads of 128 dims. Prints the median of nine
// replays: without a host part; with a host part, where the host answers at once with states of 0; and both with new rows.
// States are checked before. With 2 slots a pair waits until the previous pair has been answered. Lines with a session's
// number of slots are marked.
//
// Then moving averages of a window of 4,096 keys in bf16. A graph has 32 observe() calls. Each has its own window, so K
// comes from memory; or all have the same window, so K is in the cache if it fits, as after an attend of the same layer.
#include <cstring>
#include <utility>

#include "cuda/exchange_case.h"
#include "cuda/graph_time.h"
#include "cuda/observe_case.h"
#include "lib/device/device_session.h"

namespace {

using namespace tandem;
using namespace tandem::test;

constexpr int kPairs = 32;

ExchangeOptions options_of(bool has_host_part, bool has_rows, int n_slots) {
  ExchangeOptions options;
  options.layer.n_q_heads = 32;
  options.layer.n_kv_heads = 8;
  options.layer.k_head_dim = options.layer.v_head_dim = 128;
  options.layer.k_type = options.layer.v_type = TANDEM_BF16;
  options.sequences = {{0, 100, 1, has_host_part}};
  options.n_slots = n_slots;
  options.has_rows = has_rows;
  return options;
}

bool is_right(const OpenDevice& device, const ExchangeOptions& options) {
  ExchangeCase c(device, options);
  const AnsweringHost host(c.flags, c.leaves_states());
  device.must(c.append(), c.error);
  device.must(c.merge(), c.error);
  device.wait();
  c.wait_for_host();
  c.expect_append(0);
  c.expect_states(0);
  return c.check_merge(0).empty() && c.check_memory().empty();
}

bool measure(const OpenDevice& device, const ExchangeOptions& options) {
  ExchangeCase c(device, options);
  const int64_t lse_end = c.append_call.exchange.lse_at + 32 * 4, o_at = c.append_call.exchange.o_at;
  const bool has_host_part = options.sequences[0].has_host_part;
  const AnsweringHost host(c.flags, [&](uint64_t ticket) {
    if (has_host_part) std::memset(c.host_slot(ticket) + o_at, 0, static_cast<size_t>(lse_end - o_at));
  });
  const double us = time_of([&](cudaStream_t stream) {
                      for (int i = 0; i < kPairs; ++i) {
                        device.must(c.append(0, stream), c.error);
                        device.must(c.merge(stream), c.error);
                      }
                    }) /
                    kPairs;
  const bool right = c.flags->fault == 0 && is_right(device, options);
  std::printf("%-22s %-9s %d slots%s %8.2f us a pair  %s\n", has_host_part ? "queries out, states in" : "no host part",
              options.has_rows ? "new rows" : "no rows", options.n_slots,
              options.n_slots == SharedArea::kSlots ? ", a session's" : "", us, right ? "ok" : "WRONG");
  return right;
}

bool measure_observe(const OpenDevice& device, int n_sequences, int n_copies) {
  ObserveOptions options;
  options.layer.n_q_heads = 32;
  options.layer.n_kv_heads = 8;
  options.layer.k_head_dim = options.layer.v_head_dim = 128;
  options.layer.k_type = options.layer.v_type = TANDEM_BF16;
  options.sequences.assign(static_cast<size_t>(n_sequences), {1000, 1000 + 4096, 1});
  options.page_len = 128;
  options.table_len = 33;
  options.is_full = true;
  options.n_distinct = 40;
  options.n_copies = n_copies;
  ObserveCase c(device, options);
  device.must(c.append(), c.error);
  device.wait();
  const ObserveCase::Memory before = c.memory();
  device.must(c.observe(), c.error);
  device.wait();
  const std::string wrong = c.check(before, 0);
  const double us = time_of([&](cudaStream_t stream) {
                      for (int i = 0; i < kPairs; ++i) device.must(c.observe(stream, i % n_copies), c.error);
                    }) /
                    kPairs;
  std::printf("observe, %2d sequences, %2d windows %8.2f us, K at %5.0f GB/s  %s\n", n_sequences, n_copies, us,
              static_cast<double>(c.k_bytes()) / us / 1e3, wrong.empty() ? "ok" : wrong.c_str());
  return wrong.empty();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "exchange_bench MODULE\n");
    return 2;
  }
  const OpenDevice device(argv[1]);
  std::printf("%s\n", device.info.name);
  bool all_right = true;
  for (const bool has_host_part : {false, true})
    for (const bool has_rows : {false, true})
      for (const int n_slots : {2, SharedArea::kSlots, 8})
        all_right &= measure(device, options_of(has_host_part, has_rows, n_slots));
  for (const auto& [n_sequences, n_copies] : {std::pair{1, 32}, std::pair{1, 1}, std::pair{32, 2}})
    all_right &= measure_observe(device, n_sequences, n_copies);
  return all_right ? 0 : 1;
}
