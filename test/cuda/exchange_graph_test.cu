// SPDX-License-Identifier: MIT
// append(), merge() and observe() in graphs that are replayed while their data changes. Also what calls leave of the
// caller's state: captures that go on, and the current context.
#include <cudaTypedefs.h>

#include <cstring>
#include <thread>

#include "exchange_case.h"
#include "graph_time.h"
#include "lib/model/dtype.h"
#include "observe_case.h"
#include "with_cmocka.h"

namespace {

using namespace tandem::test;
using tandem::DeviceError;

OpenDevice* device = nullptr;

void assert_fine(const std::string& wrong) {
  if (!wrong.empty()) fail_msg("%s", wrong.c_str());
}

// Returns sequences of any lengths up to those of the call. Some have nothing to do.
std::vector<ExchangeSequence> any_sequences(reference::Random& random) {
  std::vector<ExchangeSequence> sequences;
  for (int i = 0; i < 3; ++i) {
    const auto q_len = static_cast<int32_t>(random.integer(0, 4));
    const int64_t begin = random.integer(0, 300);
    sequences.push_back({begin, begin + random.integer(q_len, 250), q_len, random.chance(0.6)});
  }
  return sequences;
}

// Replays give the bits of single calls, and what the model says.
void replays_are_as_calls(void**) {
  uint64_t seed = 1;
  for (const int32_t type : {TANDEM_BF16, TANDEM_Q8_0}) {
    ExchangeOptions options;
    options.layer.n_q_heads = 12;
    options.layer.n_kv_heads = 3;
    options.layer.k_head_dim = options.layer.v_head_dim = 128;
    options.layer.k_type = options.layer.v_type = type;
    options.sequences.assign(3, {0, 0, 0, false});
    options.max_tokens = 12;
    options.n_batches = 7;
    options.n_slots = 3;
    ExchangeCase eager(*device, options), replayed(*device, options);
    const AnsweringHost of_eager(eager.flags, eager.leaves_states()), of_replayed(replayed.flags, replayed.leaves_states());
    const Graph graph([&](cudaStream_t stream) {
      int32_t is_capturing = 0;
      device->must(device->table->capturing(device->self, stream, &is_capturing, &replayed.error), replayed.error);
      assert_int_equal(is_capturing, 1);
      device->must(replayed.append(0, stream), replayed.error);
      device->must(replayed.merge(stream), replayed.error);
    });
    reference::Random random(seed++);
    for (int32_t i = 0; i < 50; ++i) {
      const std::vector<ExchangeSequence> sequences = any_sequences(random);
      for (ExchangeCase* c : {&eager, &replayed}) {
        c->set_sequences(sequences);
        c->load_batch(i % options.n_batches);
        c->load_window_states(static_cast<uint64_t>(i));
        c->clear_output();
        c->expect_append(i % options.n_batches);
        c->expect_states(static_cast<uint64_t>(i));
      }
      device->must(eager.append(), eager.error);
      device->must(eager.merge(), eager.error);
      device->wait();
      graph.replay();
      for (ExchangeCase* c : {&eager, &replayed}) {
        assert_int_equal(c->arrived(), i + 1);
        c->wait_for_host();
        assert_fine(c->check_merge(static_cast<uint64_t>(i)));
        assert_fine(c->check_memory());
      }
      assert_true(eager.output() == replayed.output());
    }
  }
}

// A graph knows no lengths: its call says that they have no limit.
void averages_are_replayed(void**) {
  reference::Random random(3);
  for (const int32_t type : {TANDEM_BF16, TANDEM_Q8_0}) {
    ObserveOptions options;
    options.layer.n_q_heads = 8;
    options.layer.n_kv_heads = 2;
    options.layer.k_head_dim = 128;
    options.layer.k_type = type;
    options.sequences.assign(3, {0, 0, 0});
    options.max_tokens = 12;
    options.is_full = true;
    ObserveCase c(*device, options);
    const Graph graph([&](cudaStream_t stream) {
      device->must(c.append(stream), c.error);
      device->must(c.observe(stream), c.error);
    });
    for (uint64_t ticket = 0; ticket < 30; ++ticket) {
      std::vector<ObserveSequence> sequences;
      for (int i = 0; i < 3; ++i) {
        const auto q_len = static_cast<int32_t>(random.integer(0, 4));
        const int64_t begin = random.integer(0, 2000), n = random.integer(q_len, 4 * 64);
        sequences.push_back({begin, begin + n, q_len, random.chance(0.5) ? random.integer(0, n) : 0});
      }
      c.set_sequences(sequences);
      ObserveCase::Memory before = c.memory();
      const tandem::SlotHeader header{ticket, 0, 3, 0, {}};
      std::memcpy(before.slots.data() + static_cast<int64_t>(ticket % 2) * c.observe_call.exchange.slot_bytes, &header,
                  sizeof header);
      graph.replay();
      assert_int_equal(c.observed(), ticket + 1);
      assert_fine(c.check(before, ticket));
      c.answer(ticket + 1);
    }
  }
}

// A capture forbids many driver calls, on every thread if it is a global one.
void questions_do_not_end_a_capture(void**) {
  cudaStream_t stream;
  cudaGraph_t graph;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  int32_t n_capturing = 0;
  const auto ask = [&] {
    DeviceError error;
    int32_t is_capturing = 0;
    device->must(device->table->check(device->self, &error), error);
    device->must(device->table->capturing(device->self, stream, &is_capturing, &error), error);
    n_capturing += is_capturing;
  };
  ask();
  std::thread(ask).join();
  assert_int_equal(n_capturing, 2);
  must(cudaStreamEndCapture(stream, &graph));
  must(cudaGraphDestroy(graph));
  must(cudaStreamDestroy(stream));
}

template <class Function>
Function driver(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  must(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  assert_int_equal(found, cudaDriverEntryPointSuccess);
  return reinterpret_cast<Function>(function);
}

// Without a current context, and with one of the caller's own on the same device.
void calls_leave_the_context_as_it_was(void**) {
  const auto set = driver<PFN_cuCtxSetCurrent_v4000>("cuCtxSetCurrent", 4000);
  const auto get = driver<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
  const auto create = driver<PFN_cuCtxCreate_v3020>("cuCtxCreate", 3020);
  const auto destroy = driver<PFN_cuCtxDestroy_v4000>("cuCtxDestroy", 4000);
  CUcontext before = nullptr, own = nullptr, now = nullptr;
  assert_int_equal(get(&before), CUDA_SUCCESS);
  assert_int_equal(create(&own, 0, 0), CUDA_SUCCESS);
  // Setting no context makes the thread's previous context current, so this is repeated until none is left.
  for (now = own; now != nullptr;) {
    assert_int_equal(set(nullptr), CUDA_SUCCESS);
    assert_int_equal(get(&now), CUDA_SUCCESS);
  }
  for (const CUcontext current : {CUcontext{nullptr}, own}) {
    assert_int_equal(set(current), CUDA_SUCCESS);
    DeviceError error;
    void* memory = device->allocate(1000);  // makes several driver calls
    device->must(device->table->check(device->self, &error), error);
    device->table->release(device->self, memory);
    assert_int_equal(get(&now), CUDA_SUCCESS);
    assert_ptr_equal(now, current);
  }
  assert_int_equal(destroy(own), CUDA_SUCCESS);
  assert_int_equal(set(before), CUDA_SUCCESS);
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {
      cmocka_unit_test(replays_are_as_calls),
      cmocka_unit_test(averages_are_replayed),
      cmocka_unit_test(questions_do_not_end_a_capture),
      cmocka_unit_test(calls_leave_the_context_as_it_was),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
