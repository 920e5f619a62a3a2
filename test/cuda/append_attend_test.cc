// SPDX-License-Identifier: MIT
// attend() beside an append() that has an epoch. The bytes that append() leaves are compared with the model, and the outputs
// bit for bit with those of the two calls one after the other. Kernels for compute capability 9.0 attend while rows still go
// to the host.
//
// Prefill kernels share out the keys among fewer blocks in that case, so their outputs are compared as numbers.
//
//   append_attend_test [MODULE]
#include <algorithm>
#include <cmath>
#include <cstring>

#include "exchange_case.h"
#include "lib/model/dtype.h"
#include "with_cmocka.h"

namespace {

using namespace tandem::test;
using tandem::DeviceAttend;

OpenDevice* device = nullptr;

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr int32_t kTensorTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16};

// Ragged sequences: without tokens, with new tokens that are not resident, in windows without any key, in tables that wrap
// around, and in more units than there are warps.
const std::vector<ExchangeSequence> kRagged = {{0, 3, 3, true},     {0, 200, 1, false}, {5, 5, 0, true},
                                               {300, 520, 5, true}, {64, 65, 4, false}, {90, 131, 2, true},
                                               {70, 70, 2, false},  {0, 250, 1, true}};
// Sequences that attend only new tokens. All other keys of a case are NaN.
const std::vector<ExchangeSequence> kNewAlone = {
    {197, 200, 3, true}, {64, 65, 1, false}, {126, 130, 4, false}, {9, 9, 0, true}};

ExchangeOptions options_of(int32_t type, int32_t dim, const std::vector<ExchangeSequence>& sequences) {
  ExchangeOptions options;
  options.layer.n_kv_heads = 3;
  options.layer.n_q_heads = 6;
  options.layer.k_head_dim = options.layer.v_head_dim = dim;
  options.layer.k_type = options.layer.v_type = type;
  options.sequences = sequences;
  return options;
}

// The output and the work space of attention over a case's window.
class Attention {
 public:
  Attention(ExchangeCase& of, bool finishes) : case_(of) {
    const tandem::DeviceAppend& append = of.append_call;
    const int64_t dim = append.layer->v_head_dim, n_rows = int64_t{append.n_tokens} * append.layer->n_q_heads;
    bytes_ = n_rows * (dim + 1) * 4;
    for (void*& output : outputs_) output = device->allocate(bytes_);
    call_.layer = append.layer;
    call_.pages = append.pages;
    call_.sequences = append.sequences;
    call_.q = append.q;
    const tandem::DeviceOutput to[] = {output(0), output(1)};
    call_.o = to[0].o;
    call_.lse = to[0].lse;
    call_.lse_token_stride = to[0].lse_token_stride;
    call_.lse_head_stride = to[0].lse_head_stride;
    if (finishes) call_.finished = to[1];
    const int64_t n = device->table->workspace_bytes(device->self, &call_);
    workspace_ = call_.workspace = device->allocate(n);
    device->upload(workspace_, std::vector<char>(static_cast<size_t>(n)).data(), n);
  }
  ~Attention() {
    device->release(workspace_);
    for (void* output : outputs_) device->release(output);
  }
  Attention(const Attention&) = delete;

  void run(bool beside) {
    launch(beside, ++epoch_);
    device->wait();
  }
  void launch(bool beside, int64_t epoch) {
    case_.append_call.epoch = beside ? epoch : 0;
    device->must(case_.append(), case_.error);
    call_.append = beside ? &case_.append_call : nullptr;
    device->must(device->table->attend(device->self, &call_, nullptr, &case_.error), case_.error);
  }
  std::vector<char> bytes() const {
    std::vector<char> all(static_cast<size_t>(2 * bytes_));
    for (size_t i = 0; i < 2; ++i) device->download(all.data() + i * static_cast<size_t>(bytes_), outputs_[i], bytes_);
    return all;
  }
  // Returns the number of rows of o and lse in output i that are not NaN. Rows without numbers are untouched or NaN.
  int64_t n_finite(size_t i) const {
    std::vector<float> numbers(static_cast<size_t>(bytes_ / 4));
    device->download(numbers.data(), outputs_[i], bytes_);
    const int64_t dim = call_.layer->v_head_dim;
    return std::count_if(numbers.begin(), numbers.end(), [](float x) { return x == x; }) / (dim + 1);
  }

 private:
  tandem::DeviceOutput output(size_t i) const {
    const int32_t n_heads = case_.append_call.layer->n_q_heads, dim = case_.append_call.layer->v_head_dim;
    auto* const at = static_cast<float*>(outputs_[i]);
    return {{at, TANDEM_F32, 0, int64_t{n_heads} * dim, dim}, at + bytes_ / 4 / (dim + 1) * dim, n_heads, 1, nullptr};
  }

  ExchangeCase& case_;
  DeviceAttend call_;
  int64_t bytes_ = 0, epoch_ = 0;
  void *outputs_[2] = {}, *workspace_ = nullptr;
};

template <typename Visit>
void for_kinds(const std::vector<ExchangeSequence>& sequences, Visit visit) {
  uint64_t seed = 1;
  for (const int32_t type : kTypes)
    for (const int32_t dim : {64, 128, 256})
      for (const int32_t tensor_type : kTensorTypes) {
        ExchangeOptions options = options_of(type, dim, sequences);
        options.tensor_type = tensor_type;
        options.gap = static_cast<int32_t>(seed % 5);
        options.seed = seed++;
        visit(options);
      }
}

void windows_and_slots_get_the_rows(void**) {
  for_kinds(kRagged, [](const ExchangeOptions& options) {
    ExchangeCase c(*device, options);
    Attention attention(c, false);
    attention.run(true);
    c.expect_append(0);
    assert_int_equal(c.arrived(), 1);
    if (const std::string wrong = c.check_memory(); !wrong.empty())
      fail_msg("%s of %d: %s", tandem::find_dtype(options.layer.k_type)->name, options.layer.k_head_dim, wrong.c_str());
  });
}

void outputs_are_those_of_two_calls(void**) {
  for_kinds(kNewAlone, [](const ExchangeOptions& options) {
    for (const bool finishes : {false, true}) {
      ExchangeCase one(*device, options), two(*device, options);
      Attention beside(one, finishes), apart(two, finishes);
      beside.run(true);
      apart.run(false);
      assert_true(one.pool() == two.pool());
      assert_true(beside.bytes() == apart.bytes());
      const int64_t with_host = 3 * options.layer.n_q_heads, without = 5 * options.layer.n_q_heads;
      assert_int_equal(beside.n_finite(0), finishes ? with_host : with_host + without);
      assert_int_equal(beside.n_finite(1), finishes ? without : 0);
    }
  });
}

// Asserts that numbers differ by no more than f32 rounding, with NaN where NaN is expected.
void expect_close(const std::vector<char>& got, const std::vector<char>& wanted) {
  assert_int_equal(got.size(), wanted.size());
  for (size_t i = 0; i + 4 <= got.size(); i += 4) {
    float a = 0.0f, b = 0.0f;
    std::memcpy(&a, &got[i], 4), std::memcpy(&b, &wanted[i], 4);
    if (!(a == b || (a != a && b != b) || std::abs(a - b) <= 1e-4f * std::max(1.0f, std::abs(b))))
      fail_msg("number %zu is %g, apart it is %g", i / 4, static_cast<double>(a), static_cast<double>(b));
  }
}

// Appends of 5 to 32 queries a sequence, with one block and with two, and with so many rows that attention waits for the
// whole append. In some sequences only new tokens are visible.
void appends_of_several_queries(void**) {
  const std::vector<std::vector<ExchangeSequence>> batches = {{{0, 250, 20, false}},
                                                              {{218, 250, 32, false}},
                                                              {{0, 900, 5, false}, {3, 70, 20, true}, {100, 130, 30, false}},
                                                              {{0, 200, 32, false}},
                                                              {{0, 2000, 32, true}, {1, 9, 8, false}}};
  uint64_t seed = 1;
  for (const int32_t dim : {64, 128, 256})
    for (const int32_t n_kv_heads : {1, 8})
      for (const int32_t tensor_type : {TANDEM_BF16, TANDEM_F32})
        for (const std::vector<ExchangeSequence>& sequences : batches) {
          ExchangeOptions options = options_of(TANDEM_BF16, dim, sequences);
          options.layer.n_kv_heads = n_kv_heads;
          options.layer.n_q_heads = 2 * n_kv_heads;
          options.tensor_type = tensor_type;
          options.table_len = 32;
          options.seed = seed++;
          ExchangeCase one(*device, options), two(*device, options);
          Attention beside(one, true), apart(two, true);
          beside.run(true);
          apart.run(false);
          one.expect_append(0);
          if (const std::string wrong = one.check_memory(); !wrong.empty()) fail_msg("%d dims: %s", dim, wrong.c_str());
          expect_close(beside.bytes(), apart.bytes());
        }
}

// Ticket numbers go on, also when a replay has no token.
void calls_follow_each_other(void**) {
  ExchangeOptions options = options_of(TANDEM_BF16, 128, kRagged);
  options.n_slots = 3;
  ExchangeCase c(*device, options);
  const AnsweringHost host(c.flags, [](uint64_t) {});
  Attention attention(c, false);
  for (uint64_t i = 0; i < 40; ++i) {
    std::vector<ExchangeSequence> sequences = kRagged;
    if (i % 4 == 3)
      for (ExchangeSequence& sequence : sequences) sequence.q_len = 0;
    c.set_sequences(sequences);
    attention.run(true);
    assert_int_equal(c.arrived(), i + 1);
    c.wait_for_host();
  }
}

// Calls as a graph replays a layer: one epoch, and a merge after each call. Each call has other rows, and the host waits for
// none of the calls.
void replays_attend_their_own_rows(void**) {
  ExchangeOptions options = options_of(TANDEM_BF16, 128, {{199, 200, 1, false}, {64, 65, 1, false}});
  options.n_slots = 3;
  options.n_batches = 3;
  ExchangeCase c(*device, options), truth(*device, options);
  const AnsweringHost host(c.flags, [](uint64_t) {}), other(truth.flags, [](uint64_t) {});
  Attention attention(c, true), apart(truth, true);
  for (int i = 0; i < 200; ++i) {
    c.load_batch(i % 3);
    attention.launch(true, 7);
    c.merge_call.leaves_finished = 1;
    device->must(c.merge(), c.error);
    if (i % 20 != 0) continue;
    truth.load_batch(i % 3);
    apart.run(false);
    assert_true(attention.bytes() == apart.bytes());
    assert_true(c.pool() == truth.pool());
  }
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {
      cmocka_unit_test(windows_and_slots_get_the_rows), cmocka_unit_test(outputs_are_those_of_two_calls),
      cmocka_unit_test(appends_of_several_queries),     cmocka_unit_test(calls_follow_each_other),
      cmocka_unit_test(replays_attend_their_own_rows),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
