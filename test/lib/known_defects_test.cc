// SPDX-License-Identifier: MIT
// Defects that other implementations have shipped, with one test for each.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>

#include "lib/harness.h"
#include "reference/rounding.h"
#include "with_cmocka.h"

namespace {

using harness::Cache;
using harness::Session;
using harness::Tensor;
using reference::RefLayer;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

harness::NanAllocator* allocator = nullptr;
std::unique_ptr<harness::Engine> engine;

// Two states of one row and dim; returns (o, lse).
struct Pair {
  double o, lse;
};
Pair merge_two(Pair a, Pair b) {
  Tensor o[3], lse[3];
  for (int i = 0; i < 3; ++i) {
    o[i] = Tensor(TANDEM_F32, 1, 1, 1);
    lse[i] = Tensor(TANDEM_F32, 1, 1, 0);
  }
  o[0].set(0, 0, 0, a.o);
  o[1].set(0, 0, 0, b.o);
  lse[0].set(0, 0, 0, a.lse);
  lse[1].set(0, 0, 0, b.lse);
  const tandem_tensor views[] = {o[0].view(), o[1].view(), o[2].view(), lse[0].view(), lse[1].view(), lse[2].view()};
  const tandem_tensor* os[] = {&views[0], &views[1]};
  const tandem_tensor* lses[] = {&views[3], &views[4]};
  TANDEM_EXPECT("merge", TANDEM_OK, tandem_merge(&views[2], &views[5], os, lses, 2, *engine, nullptr, &error));
  return {o[2].get(0, 0, 0), lse[2].get(0, 0, 0)};
}

void near(double got, double wanted, double bound, const char* what) {
  char text[160];
  std::snprintf(text, sizeof text, "%s: got %.9g, wanted %.9g, bound %.3g", what, got, wanted, bound);
  harness::expect(std::fabs(got - wanted) <= bound, text);
}

// One layer and one head of 64 dims. Keys are `logit` along the first dim and queries are 1 there, so each logit is as
// given.
struct OneHead {
  RefLayer layer;
  std::unique_ptr<Cache> cache;
  std::unique_ptr<Session> session;
  int64_t id = 0;

  explicit OneHead(int32_t type = TANDEM_F32, const reference::Scope& scope = {}, int32_t page_tokens = 16) {
    layer.sm_scale = 1.0f;
    layer.k_type = layer.v_type = type;
    cache = std::make_unique<Cache>(*engine, std::vector<RefLayer>{layer}, harness::CacheSetup{page_tokens});
    session = std::make_unique<Session>(*cache, harness::scope_options(scope));
    id = cache->create_sequence("one head");
  }
  void append(const std::vector<double>& logits, const std::vector<double>& values) {
    const auto n = static_cast<int64_t>(logits.size());
    Tensor k(TANDEM_F32, n, 1, 64), v(TANDEM_F32, n, 1, 64);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t d = 0; d < 64; ++d) {
        k.set(t, 0, d, d == 0 ? logits[static_cast<size_t>(t)] : 0.0);
        v.set(t, 0, d, values[static_cast<size_t>(t)]);
      }
    const tandem_tensor k_view = k.view(), v_view = v.view();
    TANDEM_EXPECT("append", TANDEM_OK, tandem_sequence_append(*cache, id, 0, &k_view, &v_view, nullptr, &error));
  }
  // Queries the last q_len tokens. Returns o (dim 0) and lse of each.
  std::vector<Pair> ask(int64_t q_len = 1) {
    Tensor q(TANDEM_F32, q_len, 1, 64), o(TANDEM_F32, q_len, 1, 64), lse(TANDEM_F32, q_len, 1, 0);
    for (int64_t t = 0; t < q_len; ++t)
      for (int64_t d = 0; d < 64; ++d) q.set(t, 0, d, d == 0 ? 1.0 : 0.0);
    const tandem_tensor q_view = q.view(), o_view = o.view(), lse_view = lse.view();
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &id;
    args.q_lens = &q_len;
    args.q = &q_view;
    args.o = &o_view;
    args.lse = &lse_view;
    TANDEM_EXPECT("attend", TANDEM_OK, tandem_attend(*session, &args, &error));
    std::vector<Pair> out;
    for (int64_t t = 0; t < q_len; ++t) out.push_back({o.get(t, 0, 0), lse.get(t, 0, 0)});
    return out;
  }
};

void test_lse_gap_beyond_exp(void**) {
  for (double gap : {88.0, 88.73, 89.0, 104.0, 1e3, 1e5, 1e30}) {
    for (double sign : {1.0, -1.0}) {
      const Pair ahead = merge_two({1.5, sign * gap}, {-2.0, 0.0});
      near(ahead.o, sign > 0 ? 1.5 : -2.0, 1e-6, "o of the larger state");
      near(ahead.lse, sign > 0 ? gap : 0.0, 1e-6 * gap, "lse of the larger state");
      OneHead head;
      head.append({sign * gap, 0.0, sign * gap}, {1.5, -2.0, 1.5});
      const Pair got = head.ask()[0];
      near(got.o, sign > 0 ? 1.5 : -2.0, 1e-6, "o of the largest keys");
      near(got.lse, sign > 0 ? gap + std::log(2.0) : 0.0, 1e-5 * (1.0 + gap), "lse of the largest keys");
    }
  }
}

void test_lse_near_zero_is_not_empty(void**) {
  for (double lse : {0.0, -0.0, 1e-7, -1e-7, 9e-7, 1e-38, 1e-45}) {
    const Pair got = merge_two({3.0, lse}, {5.0, -kInfinity});
    near(got.o, 3.0, 0.0, "the only state");
    near(got.lse, static_cast<double>(static_cast<float>(lse)), 0.0, "its lse");
    near(merge_two({3.0, lse}, {5.0, 0.0}).o, 4.0, 1e-5, "two equal states");
    OneHead head;
    head.append({lse}, {3.0});
    near(head.ask()[0].o, 3.0, 0.0, "a key of logit 0");
  }
}

void test_natural_log(void**) {
  for (int64_t n : {1, 2, 3, 100, 1000}) {
    OneHead head;
    head.append(std::vector<double>(static_cast<size_t>(n), 0.0), std::vector<double>(static_cast<size_t>(n), 1.0));
    near(head.ask()[0].lse, std::log(static_cast<double>(n)), 1e-5 * (1.0 + std::log(static_cast<double>(n))),
         "lse of n equal keys");
  }
  near(merge_two({1.0, 1.0}, {3.0, 1.0}).lse, 1.0 + std::log(2.0), 1e-6, "lse of two equal states");
  near(merge_two({0.0, 0.0}, {1.0, 1.0}).o, 1.0 / (1.0 + std::exp(-1.0)), 1e-6, "weights are powers of e");
}

// An exp with an error of 1.7 %, or with a nonzero result for scores far away.
void test_exp_accuracy(void**) {
  for (int i = 0; i <= 400; ++i) {
    const double gap = 0.21 * i, weight = std::exp(-static_cast<double>(static_cast<float>(gap)));
    const double wanted = weight / (1.0 + weight), bound = 1e-6 * wanted + 1e-37;
    near(merge_two({0.0, 0.0}, {1.0, -gap}).o, wanted, bound, "weight of a merged state");
    OneHead head;
    head.append({0.0, -gap}, {0.0, 1.0});
    near(head.ask()[0].o, wanted, bound, "weight of a key");
  }
  for (double far : {110.0, 1e3, 1e6, 1e20, 3e38}) {
    OneHead head;
    head.append({0.0, -far, 0.0}, {2.0, 1e30, 2.0});
    near(head.ask()[0].o, 2.0, 1e-6, "a key far away has no weight");
    near(merge_two({2.0, 0.0}, {1e30, -far}).o, 2.0, 1e-6, "a state far away has no weight");
  }
}

// Rows that were NaN, and were then truncated or dropped with their sequence, have no effect.
void test_nan_in_unused_slots(void**) {
  const double nan = std::nan("");
  for (int64_t n_left : {0, 1, 15, 16, 17, 31}) {
    OneHead head;
    head.append(std::vector<double>(100, 0.0), std::vector<double>(100, 1.0));
    head.append(std::vector<double>(50, nan), std::vector<double>(50, nan));
    TANDEM_EXPECT("truncate", TANDEM_OK, tandem_sequence_truncate(*head.cache, head.id, n_left, &error));
    head.append({0.0}, {1.0});
    const Pair got = head.ask()[0];
    near(got.o, 1.0, 1e-6, "o after truncation");
    near(got.lse, std::log(static_cast<double>(n_left + 1)), 1e-4, "lse after truncation");
    const int64_t poisoned = head.cache->create_sequence("poisoned");
    const int64_t kept = head.id;
    head.id = poisoned;
    head.append(std::vector<double>(200, nan), std::vector<double>(200, nan));
    TANDEM_EXPECT("drop", TANDEM_OK, tandem_sequence_drop(*head.cache, poisoned, &error));
    head.id = kept;
    for (int i = 0; i < 40; ++i) head.append({0.0}, {1.0});
    near(head.ask()[0].o, 1.0, 1e-6, "o in pages that held NaN");
  }
}

// NaN in a row affects only the queries that see the row.
void test_nan_stays_where_it_is(void**) {
  for (int64_t poisoned : {0, 3, 20, 39}) {
    for (bool in_k : {true, false}) {
      OneHead head;
      for (int64_t t = 0; t < 40; ++t)
        head.append({t == poisoned && in_k ? std::nan("") : 0.0}, {t == poisoned && !in_k ? std::nan("") : 1.0});
      const std::vector<Pair> got = head.ask(40);
      for (int64_t t = 0; t < 40; ++t) {
        const Pair& row = got[static_cast<size_t>(t)];
        if (t >= poisoned) {
          harness::expect(std::isnan(row.o), "a row that sees NaN gives NaN");
        } else {
          near(row.o, 1.0, 1e-6, "a row that does not see it");
          near(row.lse, std::log(static_cast<double>(t + 1)), 1e-4, "lse of a row that does not see it");
        }
      }
    }
  }
}

// Infinity in a row affects only the queries that see the row. In k it gives NaN, or with a logit of -inf no weight. In v
// it may stay infinite.
void test_infinity_stays_where_it_is_seen(void**) {
  for (double x : {kInfinity, -kInfinity}) {
    for (bool in_k : {true, false}) {
      OneHead head;
      for (int64_t t = 0; t < 40; ++t) head.append({t == 20 && in_k ? x : 0.0}, {t == 20 && !in_k ? x : 1.0});
      const std::vector<Pair> got = head.ask(40);
      for (int64_t t = 0; t < 40; ++t) {
        const Pair& row = got[static_cast<size_t>(t)];
        if (t < 20)
          near(row.o, 1.0, 1e-6, "a row that does not see infinity");
        else
          harness::expect(in_k ? std::isnan(row.o) || (x < 0 && row.o == 1.0) : !std::isfinite(row.o),
                          std::string("infinity in ") + (in_k ? "k" : "v") + " reaches a row that sees it");
      }
    }
  }
}

void test_two_empty_parts(void**) {
  for (double garbage : {0.0, std::nan(""), kInfinity}) {
    const Pair got = merge_two({garbage, -kInfinity}, {garbage, -kInfinity});
    harness::expect(got.o == 0.0 && got.lse == -kInfinity, "empty with empty is empty");
  }
}

// If there are fewer queries than keys, the queries are at the end of the keys, not at their start.
void test_causal_mask_is_aligned_to_the_end(void**) {
  OneHead head;
  std::vector<double> values;
  for (int i = 0; i < 100; ++i) values.push_back(i);
  head.append(std::vector<double>(100, 0.0), values);
  const std::vector<Pair> got = head.ask(7);
  for (int64_t t = 0; t < 7; ++t)
    near(got[static_cast<size_t>(t)].o, static_cast<double>(93 + t) / 2.0, 1e-4, "mean of the visible values");
}

// Summing V in f16 gives an error of 0.88 in diffuse attention over 128K keys.
void test_long_diffuse_attention(void**) {
  const int64_t n = harness::full_run() ? 131072 : 20000;
  for (int32_t type : {TANDEM_F16, TANDEM_BF16}) {
    OneHead head(type, {}, 256);
    reference::Random random(7);
    double sum = 0.0;
    for (int64_t done = 0; done < n; done += 1000) {
      const int64_t part = std::min<int64_t>(1000, n - done);
      std::vector<double> values;
      for (int64_t i = 0; i < part; ++i) sum += values.emplace_back(reference::round_to(type, 1.0 + random.uniform()));
      head.append(std::vector<double>(static_cast<size_t>(part), 0.0), values);
    }
    const Pair got = head.ask()[0];
    near(got.o, sum / static_cast<double>(n), 1e-5, "mean of many values");
    near(got.lse, std::log(static_cast<double>(n)), 1e-4, "lse of many keys");
  }
}

// Element offsets past 2^31: tokens half a billion elements apart, in memory that is mapped but hardly used.
void test_offsets_beyond_32_bits(void**) {
  constexpr int64_t kStride = int64_t{1} << 30, kTokens = 5, kBytes = ((kTokens - 1) * kStride + 64) * 2;
  const auto map = [] {
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    harness::expect(at != MAP_FAILED, "address space for sparse tensors");
    return static_cast<uint16_t*>(at);
  };
  uint16_t* data[4] = {map(), map(), map(), map()};
  tandem_tensor tensors[4];
  for (int i = 0; i < 4; ++i) {
    tandem_tensor& tensor = tensors[i];
    tensor = {};
    tensor.struct_size = sizeof tensor;
    tensor.dtype = TANDEM_BF16;
    tensor.data = data[i];
    tensor.n_dims = 3;
    tensor.shape[0] = kTokens;
    tensor.shape[1] = 1;
    tensor.shape[2] = 64;
    tensor.stride[0] = kStride;
    tensor.stride[1] = 64;
    tensor.stride[2] = 1;
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t d = 0; d < 64; ++d)
        reference::store(TANDEM_BF16,
                         i == 0   ? d == 0
                         : i == 1 ? 0.0
                                  : static_cast<double>(t + 1),
                         data[i] + t * kStride + d);
  }
  OneHead head;
  const int64_t q_len = kTokens;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &head.id;
  args.q_lens = &q_len;
  args.q = &tensors[0];
  args.k = &tensors[1];
  args.v = &tensors[2];
  args.o = &tensors[3];
  TANDEM_EXPECT("attend", TANDEM_OK, tandem_attend(*head.session, &args, &error));
  for (int64_t t = 0; t < kTokens; ++t)
    near(reference::load(TANDEM_BF16, data[3] + t * kStride), static_cast<double>(t + 2) / 2.0, 0.01,
         "mean of the first values");
  const tandem_tensor *os[] = {&tensors[2], &tensors[2]}, *lses[2];
  Tensor lse(TANDEM_F32, kTokens, 1, 0), lse_out(TANDEM_F32, kTokens, 1, 0);
  for (int64_t t = 0; t < kTokens; ++t) lse.set(t, 0, 0, 0.0);
  const tandem_tensor lse_view = lse.view(), lse_out_view = lse_out.view();
  lses[0] = lses[1] = &lse_view;
  TANDEM_EXPECT("merge", TANDEM_OK, tandem_merge(&tensors[3], &lse_out_view, os, lses, 2, *engine, nullptr, &error));
  for (int64_t t = 0; t < kTokens; ++t)
    near(reference::load(TANDEM_BF16, data[3] + t * kStride), static_cast<double>(t + 1), 0.0, "merged row");
  Tensor none(TANDEM_F32, kTokens, 1, 64);
  const tandem_tensor read_k = tensors[1], read_v = tensors[3];
  TANDEM_EXPECT("read", TANDEM_OK, tandem_sequence_read(&read_k, &read_v, *head.cache, head.id, 0, 0, &error));
  for (int64_t t = 0; t < kTokens; ++t)
    near(reference::load(TANDEM_BF16, data[3] + t * kStride), static_cast<double>(t + 1), 0.0, "row read back");
  for (uint16_t* each : data) munmap(each, kBytes);
}

// Speculative tokens change neither length nor digest until they are committed.
void test_digest_ignores_speculation(void**) {
  OneHead head;
  head.append({1.0, 2.0, 3.0}, {1.0, 2.0, 3.0});
  uint64_t before = 0, during = 0, after = 0;
  TANDEM_EXPECT("digest", TANDEM_OK, tandem_sequence_digest(&before, *head.cache, head.id, &error));
  Tensor q(TANDEM_F32, 2, 1, 64), k(TANDEM_F32, 2, 1, 64), v(TANDEM_F32, 2, 1, 64), o(TANDEM_F32, 2, 1, 64);
  reference::Random random(1);
  for (Tensor* tensor : {&q, &k, &v}) harness::fill(tensor, 1, 64, harness::draw_normal, 1.0, &random);
  const tandem_tensor q_view = q.view(), k_view = k.view(), v_view = v.view(), o_view = o.view();
  const int64_t q_len = 2;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  args.n_sequences = 1;
  args.sequences = &head.id;
  args.q_lens = &q_len;
  args.q = &q_view;
  args.k = &k_view;
  args.v = &v_view;
  args.o = &o_view;
  TANDEM_EXPECT("attend", TANDEM_OK, tandem_attend(*head.session, &args, &error));
  TANDEM_EXPECT("digest", TANDEM_OK, tandem_sequence_digest(&during, *head.cache, head.id, &error));
  harness::expect(during == before, "the digest changed with speculative tokens");
  const int64_t none = 0;
  TANDEM_EXPECT("commit", TANDEM_OK, tandem_session_commit(*head.session, head.id, &none, 0, &error));
  TANDEM_EXPECT("digest", TANDEM_OK, tandem_sequence_digest(&after, *head.cache, head.id, &error));
  harness::expect(after == before, "the digest changed with speculation given up");
}

int set_up(void**) {
  allocator = new harness::NanAllocator;
  engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, nullptr, allocator});
  return 0;
}

int tear_down(void**) {
  engine.reset();
  const bool clean = (allocator->n_live() == 0 || harness::any_stopped()) && allocator->fault().empty();
  if (!clean)
    std::fprintf(stderr, "allocator: %lld blocks left; %s\n", static_cast<long long>(allocator->n_live()),
                 allocator->fault().c_str());
  delete allocator;
  return clean ? 0 : 1;
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_lse_gap_beyond_exp),
      cmocka_unit_test(test_lse_near_zero_is_not_empty),
      cmocka_unit_test(test_natural_log),
      cmocka_unit_test(test_exp_accuracy),
      cmocka_unit_test(test_nan_in_unused_slots),
      cmocka_unit_test(test_nan_stays_where_it_is),
      cmocka_unit_test(test_infinity_stays_where_it_is_seen),
      cmocka_unit_test(test_two_empty_parts),
      cmocka_unit_test(test_causal_mask_is_aligned_to_the_end),
      cmocka_unit_test(test_long_diffuse_attention),
      cmocka_unit_test(test_offsets_beyond_32_bits),
      cmocka_unit_test(test_digest_ignores_speculation),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
