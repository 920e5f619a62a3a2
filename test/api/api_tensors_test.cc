// SPDX-License-Identifier: MIT
// tandem_attend_tensors() against attention in double precision: types, strides, masks, several sequences.
//
// Elements that no query may read are NaN: gaps between rows, keys after a sequence's length, and keys that a mask hides
// from every query. Gaps of o must stay unchanged.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "api_world.h"
#include "reference/attention_reference.h"
#include "reference/gate.h"
#include "reference/random.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace {

using reference::Random;
using tandem_test::expect_ok;

constexpr float kHidden = -std::numeric_limits<float>::infinity();

int64_t unit_elements(int32_t type) { return reference::has_groups(type) ? reference::group_elements(type) : 1; }
int64_t unit_bytes(int32_t type) {
  if (!reference::has_groups(type)) return reference::element_bytes(type);
  const int64_t n = reference::group_elements(type);
  return reference::code_bytes(type, n) + reference::scale_bytes(type, n);
}

// A tensor [n_sequences, n_rows, n_heads, dim], or without its first dimension. All its bytes start as 0xff, NaN in every
// type.
struct Rows {
  std::vector<uint8_t> bytes;
  std::vector<float> values;  // [n_sequences * n_rows, n_heads, dim], as stored
  tandem_tensor view = {};
  int64_t n_rows = 0, n_heads = 0, dim = 0;

  void make(Random& random, int32_t type, bool padded, const std::vector<int64_t>& shape, bool head_major) {
    n_rows = shape[1];
    n_heads = shape[2];
    dim = shape[3];
    const int64_t unit = unit_elements(type), gap = random.chance(0.5) ? unit * random.integer(1, 3) : 0;
    const int64_t row = dim + gap;
    const int64_t token = head_major ? row : row * n_heads + (random.chance(0.3) ? unit : 0);
    const int64_t head = head_major ? row * std::max<int64_t>(n_rows, 1) : row;
    const int64_t sequence = (head_major ? head * n_heads : token * std::max<int64_t>(n_rows, 1)) + gap;
    bytes.assign(static_cast<size_t>(sequence * shape[0] / unit * unit_bytes(type) + 64), 0xff);
    values.assign(static_cast<size_t>(shape[0] * n_rows * n_heads * dim), 0.0f);
    view.struct_size = sizeof view;
    view.dtype = type;
    view.data = bytes.data();
    view.n_dims = padded ? 4 : 3;
    const int64_t shapes[4] = {shape[0], n_rows, n_heads, dim}, strides[4] = {sequence, token, head, 1};
    for (int d = 0; d < view.n_dims; ++d) {
      view.shape[d] = shapes[d + (padded ? 0 : 1)];
      view.stride[d] = strides[d + (padded ? 0 : 1)];
    }
  }
  int64_t sequence_stride() const { return view.n_dims == 4 ? view.stride[0] : 0; }
  uint8_t* at(int64_t sequence, int64_t row, int64_t head, int64_t d = 0) {
    const int tokens = view.n_dims == 4 ? 1 : 0;
    const int64_t element = sequence * sequence_stride() + row * view.stride[tokens] + head * view.stride[tokens + 1] + d;
    return bytes.data() + element / unit_elements(view.dtype) * unit_bytes(view.dtype);
  }
  float* value(int64_t sequence, int64_t row, int64_t head) {
    return values.data() + ((sequence * n_rows + row) * n_heads + head) * dim;
  }
  void set(Random& random, int64_t sequence, int64_t row, int64_t head) {
    std::vector<double> x(static_cast<size_t>(dim));
    for (double& each : x) each = static_cast<float>(random.normal());
    const int32_t type = view.dtype;
    if (reference::has_groups(type)) {
      const std::vector<uint8_t> blocks = reference::block_row(type, x.data(), dim);
      std::memcpy(at(sequence, row, head), blocks.data(), blocks.size());
      reference::round_row(type, x.data(), dim);
    } else {
      reference::round_all(type, x.data(), dim);
      reference::store_all(type, x.data(), dim, at(sequence, row, head));
    }
    std::copy(x.begin(), x.end(), value(sequence, row, head));
  }
};

enum class MaskKind { kNone, kCausal, kWindow, kPrefix, kHoles, kSequences, kTree, kRandom, kValues, kCount };

struct Case {
  uint64_t seed = 0;
  bool padded = false, per_head = false, shared_mask = false, has_sinks = false, has_slopes = false, aliases = false;
  MaskKind kind = MaskKind::kNone;
  int32_t mask_type = TANDEM_F32, q_type = 0, k_type = 0, v_type = 0, o_type = 0;
  int64_t n_sequences = 1;
  std::vector<int64_t> q_lens, kv_lens;
  reference::RefLayer layer;
  Rows q, k, v, o;
  std::vector<float> lse, slopes, mask;  // mask: [n_sequences or 1, heads or 1, rows, columns]
  std::vector<uint16_t> mask_f16;
  int64_t n_mask_heads = 1, n_mask_rows = 0, n_columns = 0, window = 0;
  tandem_tensor lse_view = {}, mask_view = {};

  int64_t first(const std::vector<int64_t>& lens, int64_t sequence) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < sequence && !padded; ++i) sum += lens[static_cast<size_t>(i)];
    return sum;
  }
  float mask_at(int64_t sequence, int32_t head, int64_t t, int64_t j) const {
    const int64_t row = padded ? ((shared_mask ? 0 : sequence) * n_mask_heads + (per_head ? head : 0)) * n_mask_rows + t
                               : first(q_lens, sequence) + t;
    return mask[static_cast<size_t>(row * n_columns + j)];
  }
  bool has_mask() const { return kind >= MaskKind::kPrefix; }
};

float mask_value(Random& random, const Case& c, size_t sequence, int64_t t, int64_t j) {
  const int64_t q_len = c.q_lens[sequence], kv_len = c.kv_lens[sequence], own = kv_len - q_len + t;
  const uint64_t salt = c.seed % 7;
  switch (c.kind) {
    case MaskKind::kPrefix:
      return j <= own ? 0.0f : kHidden;
    case MaskKind::kHoles:  // the same for every query, and causal
      return j <= own && (j * 2654435761u + salt) % 11 > 2 ? (j % 2 == 0 ? 0.0f : -0.0f) : kHidden;
    case MaskKind::kSequences:  // neighbouring queries see different cells
      return j * 4 / std::max<int64_t>(kv_len, 1) == t % 4 ? 0.0f : kHidden;
    case MaskKind::kTree:  // all see the common beginning, branches differ
      return j < kv_len - q_len || (j <= own && ((own - j) % 3 == 0 || j % 5 == 0)) ? 0.0f : kHidden;
    case MaskKind::kRandom:
      return random.chance(0.4) ? 0.0f : kHidden;
    default:
      return random.chance(0.2) ? kHidden : static_cast<float>(0.125 * static_cast<double>(random.integer(-24, 24)));
  }
}

void fill_mask(Case& c, Random& random) {
  if (!c.has_mask()) return;
  c.per_head = c.padded && random.chance(0.25);
  c.shared_mask = c.padded && random.chance(0.3);
  c.n_mask_heads = c.per_head ? c.layer.n_q_heads : 1;
  c.n_mask_rows = c.padded ? c.q.n_rows : c.q.n_rows;
  int64_t longest = 0;
  for (const int64_t n : c.kv_lens) longest = std::max(longest, n);
  c.n_columns = longest + random.integer(0, 70);
  const int64_t n_masks = c.padded ? (c.shared_mask ? 1 : c.n_sequences) * c.n_mask_heads : 1;
  c.mask.assign(static_cast<size_t>(n_masks * c.n_mask_rows * c.n_columns), std::nanf(""));
  for (int64_t m = 0; m < n_masks; ++m)
    for (int64_t i = 0; i < c.n_sequences; ++i) {
      const auto at = static_cast<size_t>(i);
      if (c.padded && !c.shared_mask && m / c.n_mask_heads != i) continue;
      for (int64_t t = 0; t < c.q_lens[at]; ++t)
        for (int64_t j = 0; j < c.kv_lens[at]; ++j) {
          const int64_t row = c.padded ? m * c.n_mask_rows + t : c.first(c.q_lens, i) + t;
          c.mask[static_cast<size_t>(row * c.n_columns + j)] = mask_value(random, c, at, t, j);
        }
    }
  c.mask_type = random.pick({TANDEM_F32, TANDEM_F16});
  for (const float x : c.mask) {
    uint16_t f16;
    reference::store(TANDEM_F16, static_cast<double>(x), &f16);
    c.mask_f16.push_back(f16);
  }
  tandem_tensor& view = c.mask_view;
  view = {};
  view.struct_size = sizeof view;
  view.dtype = c.mask_type;
  view.data = c.mask_type == TANDEM_F32 ? static_cast<void*>(c.mask.data()) : c.mask_f16.data();
  view.n_dims = c.padded ? 4 : 2;
  const int64_t shape[4] = {c.shared_mask ? 1 : c.n_sequences, c.n_mask_heads, c.n_mask_rows, c.n_columns};
  for (int d = view.n_dims - 1, s = 3; d >= 0; --d, --s) {
    view.shape[d] = shape[s];
    view.stride[d] = s == 3 ? 1 : view.stride[d + 1] * std::max<int64_t>(1, view.shape[d + 1]);
  }
}

bool sees(const Case& c, int64_t sequence, int32_t head, int64_t t, int64_t j) {
  const auto at = static_cast<size_t>(sequence);
  if (j >= c.kv_lens[at]) return false;
  if (c.has_mask()) return c.mask_at(sequence, head, t, j) != kHidden;
  if (c.kind == MaskKind::kNone) return true;
  const int64_t own = c.kv_lens[at] - c.q_lens[at] + t;
  return j <= own && (c.window == 0 || j > own - c.window);
}

// Returns whether any query sees the key.
bool is_seen(const Case& c, int64_t sequence, int64_t kv_head, int64_t j) {
  const int32_t group = c.layer.group_size();
  for (int64_t t = 0; t < c.q_lens[static_cast<size_t>(sequence)]; ++t)
    for (int32_t g = 0; g < group; ++g)
      if (sees(c, sequence, static_cast<int32_t>(kv_head) * group + g, t, j)) return true;
  return false;
}

void choose_geometry(Case& c, Random& random) {
  struct Heads {
    int32_t q, kv;
  };
  const Heads heads = random.pick<Heads>({{4, 2}, {9, 3}, {3, 1}, {2, 2}, {8, 1}});
  c.layer.n_q_heads = heads.q;
  c.layer.n_kv_heads = heads.kv;
  c.k_type = random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q8_0, TANDEM_Q4_0});
  c.v_type = random.chance(0.6) ? c.k_type
                                : random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0});
  const bool blocks = reference::has_groups(c.k_type) || reference::has_groups(c.v_type);
  c.layer.k_head_dim = blocks ? random.pick({64, 96, 128, 256}) : random.pick({64, 80, 112, 128, 192});
  c.layer.v_head_dim = random.chance(0.7) ? c.layer.k_head_dim : blocks ? 96 : 80;
  if (random.chance(0.06)) {  // MLA
    c.aliases = true;
    c.layer.n_q_heads = 16;
    c.layer.n_kv_heads = 1;
    c.layer.k_head_dim = 576;
    c.layer.v_head_dim = 512;
    c.v_type = c.k_type;
  }
  c.layer.v_aliases_k = c.aliases;
  c.layer.k_type = c.k_type;
  c.layer.v_type = c.v_type;
  c.q_type = random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16});
  c.o_type = random.pick({TANDEM_F32, TANDEM_F32, TANDEM_BF16});
  if (random.chance(0.3)) c.layer.soft_cap = 8.0f;
  if (random.chance(0.3)) c.layer.sm_scale = 0.05f;
  c.has_sinks = random.chance(0.2);
  for (int32_t h = 0; c.has_sinks && h < c.layer.n_q_heads; ++h)
    c.layer.sinks.push_back(static_cast<float>(random.normal()));
}

Case make_case(uint64_t seed) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.padded = random.chance(0.5);
  c.kind = static_cast<MaskKind>(random.integer(0, static_cast<int64_t>(MaskKind::kCount) - 1));
  choose_geometry(c, random);
  c.n_sequences = random.chance(0.5) ? 1 : random.integer(1, 4);
  int64_t n_q = 0, n_kv = 0, most_q = 0, most_kv = 0;
  for (int64_t i = 0; i < c.n_sequences; ++i) {
    c.q_lens.push_back(random.pick<int64_t>({0, 1, 1, 1, 2, 5, 17, 40, 130}));
    c.kv_lens.push_back(random.pick<int64_t>({0, 1, 3, 64, 255, 256, 300, random.integer(1, 700)}));
    n_q += c.q_lens.back();
    n_kv += c.kv_lens.back();
    most_q = std::max(most_q, c.q_lens.back());
    most_kv = std::max(most_kv, c.kv_lens.back());
  }
  const int64_t q_rows = c.padded ? most_q + random.integer(0, 2) : n_q,
                kv_rows = c.padded ? most_kv + random.integer(0, 9) : n_kv, n = c.padded ? c.n_sequences : 1;
  c.q.make(random, c.q_type, c.padded, {n, q_rows, c.layer.n_q_heads, c.layer.k_head_dim}, random.chance(0.5));
  c.k.make(random, c.k_type, c.padded, {n, kv_rows, c.layer.n_kv_heads, c.layer.k_head_dim}, random.chance(0.5));
  if (!c.aliases)
    c.v.make(random, c.v_type, c.padded, {n, kv_rows, c.layer.n_kv_heads, c.layer.v_head_dim}, random.chance(0.5));
  c.o.make(random, c.o_type, c.padded, {n, q_rows, c.layer.n_q_heads, c.layer.v_head_dim}, random.chance(0.5));
  if (c.kind == MaskKind::kWindow) c.window = random.integer(1, 100);
  fill_mask(c, random);
  c.has_slopes = random.chance(c.kind == MaskKind::kValues ? 0.5 : 0.1);
  for (int32_t h = 0; c.has_slopes && h < c.layer.n_q_heads; ++h) c.slopes.push_back(std::exp2(-static_cast<float>(h + 1)));
  c.lse.assign(static_cast<size_t>(n * q_rows * c.layer.n_q_heads), 77.0f);
  const int64_t lse_shape[3] = {n, q_rows, c.layer.n_q_heads};
  const int dims = c.padded ? 3 : 2;
  expect_ok(tandem_tensor_init(&c.lse_view, TANDEM_F32, c.lse.data(), dims, lse_shape + 3 - dims, nullptr), nullptr);
  for (int64_t i = 0; i < c.n_sequences; ++i) {
    const int64_t block = c.padded ? i : 0, q_at = c.first(c.q_lens, i), kv_at = c.first(c.kv_lens, i);
    for (int64_t t = 0; t < c.q_lens[static_cast<size_t>(i)]; ++t)
      for (int64_t h = 0; h < c.layer.n_q_heads; ++h) c.q.set(random, block, q_at + t, h);
    for (int64_t j = 0; j < c.kv_lens[static_cast<size_t>(i)]; ++j)
      for (int64_t h = 0; h < c.layer.n_kv_heads; ++h) {
        if (!is_seen(c, i, h, j)) continue;
        c.k.set(random, block, kv_at + j, h);
        if (!c.aliases) c.v.set(random, block, kv_at + j, h);
      }
  }
  return c;
}

tandem_attend_tensors_args args_of(Case& c) {
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;
  args.flags = c.kind == MaskKind::kCausal || c.kind == MaskKind::kWindow ? TANDEM_TENSORS_CAUSAL : 0;
  args.n_sequences = static_cast<int32_t>(c.n_sequences);
  args.sm_scale = c.layer.sm_scale;
  args.soft_cap = c.layer.soft_cap;
  args.sliding_window_tokens = c.window;
  args.sinks = c.has_sinks ? c.layer.sinks.data() : nullptr;
  args.alibi_slopes = c.has_slopes ? c.slopes.data() : nullptr;
  args.q_lens = c.q_lens.data();
  args.kv_lens = c.kv_lens.data();
  args.q = &c.q.view;
  args.k = &c.k.view;
  args.v = c.aliases ? nullptr : &c.v.view;
  args.o = &c.o.view;
  args.lse = &c.lse_view;
  args.mask = c.has_mask() ? &c.mask_view : nullptr;
  return args;
}

void check_sequence(Case& c, int64_t i) {
  const auto at = static_cast<size_t>(i);
  const int64_t block = c.padded ? i : 0, q_at = c.first(c.q_lens, i), kv_at = c.first(c.kv_lens, i);
  if (c.q_lens[at] == 0) return;
  // The oracle computes one head at a time, because each head may have its own mask.
  for (int32_t h = 0; h < c.layer.n_q_heads; ++h) {
    reference::RefLayer layer = c.layer;
    layer.n_q_heads = layer.n_kv_heads = 1;
    if (c.has_sinks) layer.sinks = {c.layer.sinks[static_cast<size_t>(h)]};
    std::vector<float> q, k, v;
    const int64_t kv_head = h / c.layer.group_size();
    for (int64_t t = 0; t < c.q_lens[at]; ++t) {
      const float* row = c.q.value(block, q_at + t, h);
      q.insert(q.end(), row, row + layer.k_head_dim);
    }
    for (int64_t j = 0; j < c.kv_lens[at]; ++j) {
      const float* row = c.k.value(block, kv_at + j, kv_head);
      k.insert(k.end(), row, row + layer.k_head_dim);
      if (c.aliases) continue;
      row = c.v.value(block, kv_at + j, kv_head);
      v.insert(v.end(), row, row + layer.v_head_dim);
    }
    const std::vector<int64_t> positions(static_cast<size_t>(std::max(c.q_lens[at], c.kv_lens[at])), 0);
    reference::LayerRows rows{&layer, c.kv_lens[at], k.data(), c.aliases ? nullptr : v.data(), positions.data()};
    reference::Queries queries;
    queries.n_tokens = c.q_lens[at];
    queries.q = q.data();
    queries.positions = positions.data();
    queries.visible = [&](int64_t t, int32_t, std::vector<int64_t>* keys) {
      for (int64_t j = 0; j < c.kv_lens[at]; ++j)
        if (sees(c, i, h, t, j)) keys->push_back(j);
    };
    const float slope = c.has_slopes ? c.slopes[static_cast<size_t>(h)] : 1.0f;
    if (c.has_mask())
      queries.bias = [&, slope](int64_t t, int32_t, int64_t j) {
        return static_cast<double>(slope * c.mask_at(i, h, t, j));
      };
    else if (c.has_slopes)
      queries.bias = [&, slope](int64_t t, int32_t, int64_t j) {
        return -static_cast<double>(slope) * std::fabs(static_cast<double>(c.kv_lens[at] - c.q_lens[at] + t - j));
      };
    queries.naive_rounds_p = c.q_type == TANDEM_BF16 && c.v_type == TANDEM_BF16;
    const reference::Truth truth = attend_reference(rows, queries);
    reference::GateCall gate;
    gate.truth = &truth;
    gate.layer = &layer;
    gate.o_type = c.o_type;
    gate.o = [&](int64_t t, int32_t, int32_t d) { return reference::load(c.o_type, c.o.at(block, q_at + t, h, d)); };
    gate.lse = [&](int64_t t, int32_t) {
      return static_cast<double>(
          c.lse[static_cast<size_t>(((c.padded ? i * c.q.n_rows : 0) + q_at + t) * c.layer.n_q_heads + h)]);
    };
    const reference::GateVerdict verdict = check_gate(gate);
    if (!verdict.pass)
      fail_msg("seed %llu, mask %d, k %s, v %s, q %s, head %d of %d, %d dims, q_len %lld, kv_len %lld: %s",
               static_cast<unsigned long long>(c.seed), static_cast<int>(c.kind), tandem_dtype_name(c.k_type),
               tandem_dtype_name(c.v_type), tandem_dtype_name(c.q_type), h, c.layer.n_q_heads, layer.k_head_dim,
               static_cast<long long>(c.q_lens[at]), static_cast<long long>(c.kv_lens[at]), verdict.message.c_str());
  }
}

// Checks that bytes outside the queries' rows are unchanged.
void check_gaps(Case& c) {
  std::vector<bool> is_row(c.o.bytes.size(), false);
  const int64_t n_bytes = c.layer.v_head_dim * reference::element_bytes(c.o_type);
  for (int64_t i = 0; i < c.n_sequences; ++i)
    for (int64_t t = 0; t < c.q_lens[static_cast<size_t>(i)]; ++t)
      for (int64_t h = 0; h < c.layer.n_q_heads; ++h) {
        const int64_t first = c.o.at(c.padded ? i : 0, c.first(c.q_lens, i) + t, h) - c.o.bytes.data();
        std::fill_n(is_row.begin() + first, n_bytes, true);
      }
  for (size_t at = 0; at < is_row.size(); ++at)
    if (!is_row[at] && c.o.bytes[at] != 0xff)
      fail_msg("seed %llu: byte %zu of a gap of o was written", static_cast<unsigned long long>(c.seed), at);
}

void run_cases(tandem_engine* engine, uint64_t first, uint64_t n) {
  for (uint64_t seed = first; seed < first + n; ++seed) {
    Case c = make_case(seed);
    const tandem_attend_tensors_args args = args_of(c);
    OK(tandem_attend_tensors, engine, &args);
    for (int64_t i = 0; i < c.n_sequences; ++i) check_sequence(c, i);
    check_gaps(c);
  }
}

uint64_t n_cases() {
  const char* full = std::getenv("TANDEM_TEST_FULL");
  return full != nullptr ? 3000 : 150;
}

void test_random_cases_on_every_instruction_set(void**) {
  for (int32_t i = 0; tandem_cpu_isa_name(i) != nullptr; ++i) {
    if (!tandem_cpu_isa_available(tandem_cpu_isa_name(i))) continue;
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.cpu_isa = tandem_cpu_isa_name(i);
    options.n_threads = 2;
    options.matmul_rows = i % 2 == 0 ? 0 : 16;
    tandem_engine* engine = nullptr;
    OK(tandem_engine_create, &engine, &options);
    run_cases(engine, 1000 * static_cast<uint64_t>(i), n_cases() / (i == 0 ? 1 : 3));
    tandem_engine_release(engine);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_random_cases_on_every_instruction_set),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
