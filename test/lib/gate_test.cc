// SPDX-License-Identifier: MIT
// The numerics gate of the public attend call, over types, head dims, head ratios, lengths, masks and instruction sets.
//
// Each test sweeps one or two dimensions completely and draws the others from a seed. A failure prints the case and its
// seed. TANDEM_TEST_FILTER=test_drawn TANDEM_TEST_SEED=<seed> runs only that drawn case. TANDEM_TEST_FULL=1 widens every
// sweep. The engine's host memory starts as NaN, and the allocator detects writes outside its blocks.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "lib/gate_case.h"
#include "lib/harness.h"
#include "one_in.h"
#include "with_cmocka.h"

namespace {

using harness::Data;
using harness::GateCase;
using harness::keep_to_common_scopes;
using harness::random_case;
using reference::GateShares;

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16};
constexpr int32_t kInputTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3};
constexpr int32_t kStorageTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr int32_t kHeadDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr int32_t kRatios[] = {1, 2, 3, 4, 7, 8, 32};

struct Fixture {
  harness::NanAllocator allocator;
  std::unique_ptr<harness::Engine> engine;
};
Fixture* fixture = nullptr;

// TANDEM_TEST_FULL=2 runs every case.
bool leaves_none_out() { return harness::full_factor() > 1; }

double flop_limit() { return (leaves_none_out() ? 1e8 : harness::full_run() ? 2.5e7 : 1.5e7) / harness::kSlowness; }

int64_t n_run = 0;
tandem::test::TakesOneIn takes_case;

void run_as_is(GateCase c, GateShares* shares) {
  if (!takes_case()) return;
  ++n_run;
  harness::limit_flops(&c, flop_limit());
  shares->include(harness::run_case(c, *fixture->engine));
  harness::expect(fixture->allocator.fault().empty(), harness::describe(c) + ": " + fixture->allocator.fault());
}

void run(GateCase c, GateShares* shares) {
  keep_to_common_scopes(&c);
  run_as_is(c, shares);
}

void report(const char* name, const GateShares& shares) {
  std::printf("%-28s %6lld cases; share of the bound used: naive %.3f, eps mass %.3f, lse %.3f\n", name,
              static_cast<long long>(n_run), shares.naive, shares.mass, shares.lse);
  harness::expect(n_run > 0, "no case was run");
  n_run = 0;
  takes_case = {};
}

void set_ratio(GateCase* c, int32_t ratio, int32_t n_kv_heads) {
  c->layer.n_kv_heads = n_kv_heads;
  c->layer.n_q_heads = n_kv_heads * ratio;
  if (!c->layer.sinks.empty()) c->layer.sinks.resize(static_cast<size_t>(c->layer.n_q_heads), 0.5f);
}

void set_k_dim(GateCase* c, int32_t dim) {
  c->layer.k_head_dim = dim;
  if (c->layer.rope_dims > dim) c->layer.rope_dims = dim;
  if (!c->layer.rope_inv_freq.empty()) c->layer.rope_inv_freq.resize(static_cast<size_t>(c->layer.rotated_dims() / 2), 0.1f);
}

// Every storage type of K x every one of V, every head dim, every ratio.
void test_types_dims_ratios(void**) {
  GateShares shares;
  int64_t n = 0;
  for (int32_t k_type : kStorageTypes)
    for (int32_t v_type : kStorageTypes)
      for (int32_t dim : kHeadDims)
        for (int32_t ratio : kRatios) {
          ++n;
          if (n % (leaves_none_out() ? 1 : harness::full_run() ? 3 : 23) != 0) continue;
          GateCase c = random_case(static_cast<uint64_t>(n), flop_limit());
          c.layer.k_type = k_type;
          c.layer.v_type = v_type;
          set_k_dim(&c, dim);
          if (n % 3) c.layer.v_head_dim = dim;
          set_ratio(&c, ratio, ratio == 1 ? 4 : ratio == 32 ? 1 : 2);
          run(c, &shares);
        }
  report("types x dims x ratios", shares);
}

// Every pair of head dims of K and V.
void test_different_head_dims(void**) {
  GateShares shares;
  int64_t n = 0;
  for (int32_t k_dim : kHeadDims)
    for (int32_t v_dim : kHeadDims) {
      ++n;
      if (!harness::full_run() && n % 4 != 0) continue;
      GateCase c = random_case(1000 + static_cast<uint64_t>(n), flop_limit());
      set_k_dim(&c, k_dim);
      c.layer.v_head_dim = v_dim;
      run(c, &shares);
    }
  report("K dim x V dim", shares);
}

// Types of q, k, v and o as tensors, independent of storage.
void test_tensor_types(void**) {
  GateShares shares;
  int64_t n = 0;
  for (int32_t q_type : kTypes)
    for (int32_t o_type : kTypes)
      for (int32_t k_in : kInputTypes)
        for (int32_t store : kStorageTypes) {
          ++n;
          if (n % (leaves_none_out() ? 1 : harness::full_run() ? 2 : 7) != 0) continue;
          GateCase c = random_case(2000 + static_cast<uint64_t>(n), flop_limit() / 4);
          c.q_type = q_type;
          c.o_type = o_type;
          c.k_in_type = c.v_in_type = k_in;
          c.layer.k_type = c.layer.v_type = store;
          run(c, &shares);
        }
  report("tensor types", shares);
}

std::vector<int64_t> boundary_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n <= 40; ++n) lengths.push_back(n);
  for (int64_t boundary : {48, 64, 80, 96, 112, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 2048, 2560, 3072, 4096, 4864})
    for (int64_t off : {-17, -9, -2, -1, 0, 1, 2, 9, 17}) lengths.push_back(boundary + off);
  for (int64_t n : {300, 777, 1500, 3333, 4999, 5000}) lengths.push_back(n);
  return lengths;
}

// Lengths around every page and vector boundary, every q_len, every page size.
void test_lengths(void**) {
  GateShares shares;
  int64_t n = 0;
  for (int64_t kv_len : boundary_lengths())
    for (int64_t q_len : {1, 2, 3, 17, 64, 200}) {
      ++n;
      if (!harness::full_run() && n % 11 != 0) continue;
      GateCase c = random_case(3000 + static_cast<uint64_t>(n), 1e18);
      constexpr int32_t kPages[] = {16, 64, 128, 256};
      c.page_tokens = kPages[n % 4];
      c.no_append = false;
      c.kv_lens = {kv_len};
      c.q_lens = {q_len};
      if (kv_len * q_len > 20000) {
        set_k_dim(&c, 64);
        c.layer.v_head_dim = 64;
        set_ratio(&c, c.layer.group_size() > 4 ? 2 : c.layer.group_size(), 1);
      }
      run(c, &shares);
    }
  report("lengths x q_len x page", shares);
}

template <typename Change>
void sweep(const char* name, uint64_t first_seed, int64_t n_full, Change change) {
  GateShares shares;
  const int64_t n_cases = harness::full_run() ? n_full : (n_full + 5) / 6;
  for (int64_t i = 0; i < n_cases; ++i) {
    GateCase c = random_case(first_seed + static_cast<uint64_t>(i), flop_limit() / 2);
    change(&c, i);
    run(c, &shares);
  }
  report(name, shares);
}

void test_soft_cap(void**) {
  sweep("soft cap", 10000, 60, [](GateCase* c, int64_t i) {
    constexpr float kCaps[] = {0.5f, 5.0f, 30.0f, 50.0f};
    c->layer.soft_cap = kCaps[i % 4];
  });
}

void test_sliding_window(void**) {
  sweep("sliding window", 11000, 90, [](GateCase* c, int64_t i) {
    constexpr int64_t kWindows[] = {1, 2, 15, 16, 17, 64, 127, 128, 129, 1024};
    c->layer.sliding_window = kWindows[i % 10];
  });
}

void test_learned_sinks(void**) {
  sweep("learned sinks", 12000, 60, [](GateCase* c, int64_t i) {
    constexpr float kLogits[] = {-100.0f, -3.0f, 0.0f, 5.0f, 95.0f};
    c->layer.sinks.assign(static_cast<size_t>(c->layer.n_q_heads), kLogits[i % 5]);
    c->layer.sinks[0] = -c->layer.sinks[0];
  });
}

void test_streaming_scope(void**) {
  sweep("streaming", 13000, 90, [](GateCase* c, int64_t i) {
    constexpr int64_t kWindows[] = {0, 1, 2, 15, 16, 64, 129, 1000};
    constexpr int64_t kSinks[] = {0, 1, 4, 16, 17, 64, 300};
    c->scope = {true, kWindows[i % 8], kSinks[i % 7]};
  });
}

// window_tokens = 0 is an empty window: a query sees only the sinks, not even itself.
void test_streaming_without_window(void**) {
  GateShares shares;
  for (uint64_t seed = 13500; seed < 13516; ++seed) {
    GateCase c = random_case(seed, flop_limit() / 8);
    c.layer.sliding_window = 0;
    c.scope = {true, 0, static_cast<int64_t>(seed % 4) * 5};
    run_as_is(c, &shares);
  }
  report("streaming, no window", shares);
}

// A key must be within the layer's sliding window and within the policy's scope. Sinks belong to the scope.
void test_streaming_in_sliding_layer(void**) {
  GateShares shares;
  for (uint64_t seed = 13600; seed < 13616; ++seed) {
    GateCase c = random_case(seed, flop_limit() / 8);
    c.layer.sliding_window = 1000;
    c.scope = {true, 16, 4};
    run_as_is(c, &shares);
  }
  report("streaming, sliding layer", shares);
}

// In a tree the window counts places. An ancestor that is a whole window away is not visible, whatever its index.
void test_streaming_trees(void**) {
  GateShares shares;
  for (uint64_t seed = 13700; seed < 13716; ++seed) {
    GateCase c = random_case(seed, flop_limit() / 8);
    c.layer.sliding_window = 0;
    c.tree = true;
    c.chain = c.no_append = false;
    c.q_lens.assign(c.kv_lens.size(), 12);
    c.scope = {true, static_cast<int64_t>(1 + seed % 4), static_cast<int64_t>(seed % 3)};
    run_as_is(c, &shares);
  }
  report("streaming trees", shares);
}

// The same under a layer's own sliding window. A token's window begins at its depth, so it may begin earlier than that of
// the token before.
void test_sliding_trees(void**) {
  GateShares shares;
  for (uint64_t seed = 13800; seed < 13832; ++seed) {
    GateCase c = random_case(seed, flop_limit() / 8);
    c.layer.sliding_window = static_cast<int64_t>(1 + (seed % 8) * (seed % 8) * 3);
    c.tree = true;
    c.chain = c.no_append = false;
    c.scope = {};
    c.q_lens.assign(c.kv_lens.size(), 17);
    if (seed % 2) set_ratio(&c, 32, 1);  // enough rows for a matmul
    run_as_is(c, &shares);
  }
  report("sliding trees", shares);
}

void test_trees(void**) {
  sweep("tree mask", 14000, 120, [](GateCase* c, int64_t i) {
    c->tree = i % 6 != 0;
    c->chain = !c->tree;
    c->no_append = false;
    for (int64_t& q_len : c->q_lens)
      if (q_len == 1) q_len = 2 + i % 70;
  });
}

void test_ragged_batches(void**) {
  sweep("ragged batches", 15000, 90, [](GateCase* c, int64_t i) {
    reference::Random random(static_cast<uint64_t>(i));
    c->q_lens.clear();
    c->kv_lens.clear();
    for (int64_t s = 0; s <= i % 9; ++s) {
      c->kv_lens.push_back(random.integer(0, random.chance(0.2) ? 2000 : 200));
      c->q_lens.push_back(random.pick<int64_t>({0, 1, 1, 2, 3, 17, 64}));
    }
  });
}

void test_rope(void**) {
  sweep("library RoPE", 16000, 120, [](GateCase* c, int64_t i) {
    c->layer.rope = i % 2 ? TANDEM_ROPE_HALVES : TANDEM_ROPE_INTERLEAVED;
    c->layer.rope_dims = i % 3 ? 0 : static_cast<int32_t>(2 * (1 + i) % c->layer.k_head_dim);
    if (c->layer.rope_dims == 0) c->layer.rope_dims = c->layer.k_head_dim;
    c->layer.rope_inv_freq.clear();
    if (i % 5 == 0)
      for (int32_t pair = 0; pair < c->layer.rotated_dims() / 2; ++pair)
        c->layer.rope_inv_freq.push_back(1.0f / static_cast<float>(1 + pair));
  });
}

void test_v_aliases_k(void**) {
  sweep("V aliases K", 17000, 40, [](GateCase* c, int64_t i) {
    c->layer.v_aliases_k = true;
    c->layer.v_type = c->layer.k_type;
    set_k_dim(c, kHeadDims[i % 7]);
    c->layer.v_head_dim = kHeadDims[(i / 7) % 7];
    if (c->layer.v_head_dim > c->layer.k_head_dim) c->layer.v_head_dim = c->layer.k_head_dim;
  });
}

// MLA's shape: 1 to 128 query heads of one KV head, lengths around every boundary of blocks, tiles and pieces.
void test_latent_keys(void**) {
  GateShares shares;
  int64_t n = 0;
  for (int32_t type : kStorageTypes)
    for (int32_t ratio : {1, 4, 16, 128})
      for (int64_t kv_len : {0, 1, 15, 127, 254, 255, 256, 510, 511, 512, 1023, 1024, 1535, 2048}) {
        ++n;
        if (!harness::full_run() && n % 5 != 0) continue;
        GateCase c = random_case(17500 + static_cast<uint64_t>(n), 1e18);
        harness::set_latent(&c.layer);
        c.layer.k_type = c.layer.v_type = type;
        set_ratio(&c, ratio, n % 7 == 0 ? 2 : 1);
        c.no_append = false;
        c.kv_lens = {kv_len};
        c.q_lens = {ratio == 128 ? 1 + n % 2 : 1 + n % 3};
        if (n % 3 == 0) c.q_type = TANDEM_BF16;
        run(c, &shares);
      }
  report("MLA", shares);
}

// Keys that the caller names, with all other options drawn, trees and sliding windows included.
void test_named_keys(void**) {
  sweep("named keys", 19000, 240, [](GateCase* c, int64_t i) {
    constexpr int64_t kUnits[] = {1, 1, 2, 8, 16, 64, 256};
    c->named.unit = kUnits[i % 7];
    c->named.n_idx = i % 11 == 0 ? 0 : 1 + i * 37 % 300 / c->named.unit;
    c->named.share = i % 5 == 0 ? 1.0 : i % 5 == 1 ? 0.0 : 0.6;
    c->named.shared = i % 3 == 0;
    c->named.any_order = i % 4 == 0;
    c->named.plus_window = i % 2 == 0;
    c->scope = {c->named.plus_window, 1 + i * 13 % 150, i % 6};
    c->tree = i % 8 == 3 || i % 8 == 4;
    c->chain = !c->tree && i % 8 == 5;
    c->no_append = !c->tree && !c->chain && c->no_append;
    if (i % 9 == 0) c->layer.sliding_window = 1 + i * 29 % 300;
  });
}

void test_hard_data(void**) {
  sweep("peaked, diffuse, rising", 18000, 120, [](GateCase* c, int64_t i) { c->data = static_cast<Data>(1 + i % 4); });
}

// All options drawn, or one seed alone.
void test_drawn(void**) {
  const uint64_t only = harness::seed_override(0);
  if (only) {
    GateShares shares;
    run(random_case(only, flop_limit()), &shares);
    report("one seed", shares);
    return;
  }
  sweep("drawn", 20000, 600, [](GateCase*, int64_t) {});
}

// The other sequences of a batch change no bit.
void test_batch_mates(void**) {
  const int64_t n_wanted = tandem::test::some_of(harness::full_run() ? 30 : 4);
  int64_t n = 0;
  for (uint64_t seed = 40000; n < n_wanted && seed < 42000; ++seed) {  // a smaller limit gives fewer batches
    GateCase c = random_case(seed, flop_limit() / 4);
    if (c.q_lens.size() < 2) continue;
    c.tree = c.chain = c.no_append = c.shift = false;
    keep_to_common_scopes(&c);
    harness::check_batch_mates(c, *fixture->engine);
    ++n;
  }
  std::printf("batch mates                  %6lld cases\n", static_cast<long long>(n));
  harness::expect(n == n_wanted, "too few batches were drawn");
}

// Runs the same cases on every instruction set of this processor, each with an engine of its own.
void test_instruction_sets(void**) {
  const std::unique_ptr<harness::Engine> kept = std::move(fixture->engine);
  for (const char* isa : harness::available_isas()) {
    fixture->engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, isa, &fixture->allocator});
    sweep(isa, 30000, 150, [](GateCase* c, int64_t i) {
      c->layer.k_type = kStorageTypes[i % 6];
      c->layer.v_type = kStorageTypes[(i / 6) % 6];
      set_k_dim(c, kHeadDims[i % 7]);
    });
    fixture->engine.reset();
  }
  fixture->engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, nullptr, &fixture->allocator});
}

int set_up(void**) {
  fixture = new Fixture;
  fixture->engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, nullptr, &fixture->allocator});
  return 0;
}

int tear_down(void**) {
  fixture->engine.reset();
  const std::string fault = fixture->allocator.fault();
  const bool leaked = fixture->allocator.n_live() != 0 && !harness::any_stopped(),
             used = fixture->allocator.n_allocated() != 0;
  if (!fault.empty()) std::fprintf(stderr, "allocator: %s\n", fault.c_str());
  if (leaked) std::fprintf(stderr, "allocator: blocks are left after the engine's release\n");
  if (!used) std::fprintf(stderr, "allocator: was never called\n");
  delete fixture;
  return fault.empty() && !leaked && used ? 0 : 1;
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_types_dims_ratios),
      cmocka_unit_test(test_different_head_dims),
      cmocka_unit_test(test_tensor_types),
      cmocka_unit_test(test_lengths),
      cmocka_unit_test(test_soft_cap),
      cmocka_unit_test(test_sliding_window),
      cmocka_unit_test(test_learned_sinks),
      cmocka_unit_test(test_streaming_scope),
      cmocka_unit_test(test_streaming_without_window),
      cmocka_unit_test(test_streaming_in_sliding_layer),
      cmocka_unit_test(test_streaming_trees),
      cmocka_unit_test(test_sliding_trees),
      cmocka_unit_test(test_trees),
      cmocka_unit_test(test_ragged_batches),
      cmocka_unit_test(test_rope),
      cmocka_unit_test(test_v_aliases_k),
      cmocka_unit_test(test_latent_keys),
      cmocka_unit_test(test_named_keys),
      cmocka_unit_test(test_hard_data),
      cmocka_unit_test(test_drawn),
      cmocka_unit_test(test_batch_mates),
      cmocka_unit_test(test_instruction_sets),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
