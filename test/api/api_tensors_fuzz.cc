// SPDX-License-Identifier: MIT
// Random calls of tandem_attend_tensors(). Half of them are valid by construction. They must succeed and write exactly
// their outputs. Under AddressSanitizer they must read no byte outside of the tensors, each of which ends where its memory
// ends. The other calls have one to three errors, small or large. They must be refused and leave o and lse unchanged.
//
// TANDEM_FUZZ_SECONDS: duration, 20 s by default. TANDEM_FUZZ_SEED: the only case to run.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <limits>
#include <memory>

#include "api_world.h"
#include "reference/random.h"

using namespace tandem_test;
using reference::Random;

namespace {

constexpr uint8_t kUnwritten = 0xa5;
constexpr float kHiddenLogit = -std::numeric_limits<float>::infinity();

int64_t unit_elements(int32_t type) { return type == TANDEM_Q8_0 || type == TANDEM_Q4_0 ? 32 : 1; }
int64_t unit_bytes(int32_t type) {
  switch (type) {
    case TANDEM_F32:
      return 4;
    case TANDEM_E4M3:
      return 1;
    case TANDEM_Q8_0:
      return 34;
    case TANDEM_Q4_0:
      return 18;
    default:
      return 2;
  }
}

// A tensor whose memory ends with its last byte, so that the sanitizer detects a read of the next byte.
struct Exact {
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* bytes = nullptr;
  int64_t n_bytes = 0;
  tandem_tensor view = {};

  // order: outer dimensions, from the innermost one outwards.
  void make(Random& random, int32_t type, const std::vector<int64_t>& shape) {
    view.struct_size = sizeof view;
    view.dtype = type;
    view.n_dims = static_cast<int32_t>(shape.size());
    std::vector<size_t> order;
    for (size_t d = shape.size() - 1; d-- > 0;) order.push_back(d);
    for (size_t i = order.size(); i > 1 && random.chance(0.7); --i)
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    const int64_t unit = unit_elements(type);
    int64_t span = shape.back();
    view.shape[shape.size() - 1] = shape.back();
    view.stride[shape.size() - 1] = 1;
    for (const size_t d : order) {
      const int64_t gap = random.chance(0.3) ? unit * random.integer(1, 5) : 0;
      view.shape[d] = shape[d];
      view.stride[d] = std::max(span, unit) + gap;
      span += std::max<int64_t>(shape[d] - 1, 0) * view.stride[d];
    }
    bool is_empty = false;
    for (const int64_t length : shape) is_empty = is_empty || length == 0;
    n_bytes = is_empty ? 0 : span / unit * unit_bytes(type);
    const int64_t skew = random.chance(0.5) ? 4 * random.integer(1, 15) : 0;  // aligned only to an element
    memory.reset(new uint8_t[static_cast<size_t>(skew + n_bytes)]);
    bytes = memory.get() + skew;
    view.data = bytes;
    if (is_empty && random.chance(0.5)) view.data = nullptr;
  }
  // Fills with numbers of moderate size in any type, neither NaN nor infinite.
  void fill(Random& random) {
    const bool is_e4m3 = view.dtype == TANDEM_E4M3;
    for (int64_t i = 0; i < n_bytes; ++i) bytes[i] = static_cast<uint8_t>(random.integer(0, is_e4m3 ? 0x47 : 0xff));
    if (view.dtype == TANDEM_F32 || view.dtype == TANDEM_F16 || view.dtype == TANDEM_BF16) {
      const int64_t size = unit_bytes(view.dtype);
      for (int64_t i = size - 1; i < n_bytes; i += size) bytes[i] = static_cast<uint8_t>((bytes[i] & 0x80) | 0x3c);
    }
    if (unit_elements(view.dtype) > 1)
      for (int64_t i = 0; i < n_bytes; i += unit_bytes(view.dtype)) bytes[i + 1] = 0x2c;  // the scale's upper byte
  }
  // Returns the byte offset of the element at an index.
  int64_t at(std::initializer_list<int64_t> idx) const {
    int64_t element = 0;
    int d = 0;
    for (const int64_t i : idx) element += i * view.stride[d++];
    return element / unit_elements(view.dtype) * unit_bytes(view.dtype);
  }
};

struct Case {
  uint64_t seed = 0;
  bool padded = false, has_v = true, has_mask = false, has_lse = true;
  std::vector<int64_t> q_lens, kv_lens;
  std::vector<float> sinks, slopes;
  Exact q, k, v, mask, o, lse;
  std::unique_ptr<int32_t> cancel;
  int64_t n_progress = 0;
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;
};

int32_t count_progress(int64_t done, int64_t total, void* user) {
  ++static_cast<Case*>(user)->n_progress;
  return done < 0 || done > total ? 1 : 0;
}

struct Geometry {
  int64_t n = 1, n_tokens = 0, n_keys = 0, q_heads = 1, kv_heads = 1, k_dim = 64, v_dim = 64;
};

std::vector<int64_t> shape_of(const Case& c, int64_t n, std::vector<int64_t> rest) {
  if (c.padded) rest.insert(rest.begin(), n);
  return rest;
}

void choose_lengths(Case& c, Random& random, Geometry* g) {
  g->n = random.chance(0.05) ? random.integer(c.padded ? 0 : 1, 20) : random.integer(1, 4);
  int64_t most_q = 0, most_kv = 0, n_q = 0, n_kv = 0;
  for (int64_t i = 0; i < g->n; ++i) {
    c.q_lens.push_back(random.pick<int64_t>({0, 1, 1, 1, 2, 3, 16, 17, random.integer(1, 60)}));
    c.kv_lens.push_back(random.pick<int64_t>({0, 1, 2, 15, 16, 17, 64, 255, 257, random.integer(1, 400)}));
    n_q += c.q_lens.back();
    n_kv += c.kv_lens.back();
    most_q = std::max(most_q, c.q_lens.back());
    most_kv = std::max(most_kv, c.kv_lens.back());
  }
  g->n_tokens = c.padded ? most_q + random.integer(0, 2) : n_q;
  g->n_keys = c.padded ? most_kv + random.integer(0, 3) : n_kv;
}

void choose_types(Case& c, Random& random, Geometry* g, int32_t* k_type, int32_t* v_type) {
  const auto any = [&] { return random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0}); };
  *k_type = any();
  *v_type = random.chance(0.5) ? *k_type : any();
  g->kv_heads = random.integer(1, 3);
  g->q_heads = g->kv_heads * random.integer(1, 5);
  c.has_v = random.chance(0.85);
  const auto dim = [&](bool blocks) {
    return blocks ? random.pick<int64_t>({64, 96, 128, 192, 256}) : random.pick<int64_t>({64, 80, 96, 112, 128, 192, 256});
  };
  g->k_dim = dim(unit_elements(*k_type) > 1);
  g->v_dim = c.has_v ? dim(unit_elements(*v_type) > 1) : g->k_dim;
  if (!c.has_v && random.chance(0.3)) g->v_dim = random.pick<int64_t>({64, 80, 96, g->k_dim});
  g->v_dim = c.has_v ? g->v_dim : std::min(g->v_dim, g->k_dim);
  if (c.has_v || !random.chance(0.2)) return;
  g->k_dim = 576;  // MLA
  g->v_dim = 512;
}

void fill_mask(Case& c, Random& random, const Geometry& g) {
  int64_t longest = 0;
  for (const int64_t kv_len : c.kv_lens) longest = std::max(longest, kv_len);
  const int64_t n_columns = longest + random.integer(0, 40);
  const int64_t n = random.chance(0.5) ? 1 : g.n, heads = random.chance(0.7) ? 1 : g.q_heads;
  c.mask.make(
      random, random.pick({TANDEM_F32, TANDEM_F16}),
      c.padded ? std::vector<int64_t>{n, heads, g.n_tokens, n_columns} : std::vector<int64_t>{g.n_tokens, n_columns});
  const double hidden = random.pick({0.0, 0.1, 0.5, 0.95, 1.0}), valued = random.chance(0.5) ? 0.0 : 0.3;
  const int64_t size = unit_bytes(c.mask.view.dtype);
  float value = 0;
  for (int64_t i = 0; i + size <= c.mask.n_bytes; i += size) {
    if (i % 7 == 0) value = random.chance(hidden) ? kHiddenLogit : random.chance(valued) ? 0.5f : 0.0f;  // runs of keys
    const uint16_t f16 = value == 0 ? 0 : value == 0.5f ? 0x3800 : 0xfc00;
    std::memcpy(c.mask.bytes + i, size == 4 ? static_cast<const void*>(&value) : &f16, static_cast<size_t>(size));
  }
}

void choose_rest(Case& c, Random& random, const Geometry& g) {
  tandem_attend_tensors_args& a = c.args;
  a.sm_scale = random.chance(0.3) ? 0.05f : 0.0f;
  a.soft_cap = random.chance(0.2) ? 10.0f : 0.0f;
  if (random.chance(0.4)) {
    c.has_mask = true;
    fill_mask(c, random, g);
    a.mask = &c.mask.view;
  } else if (random.chance(0.6)) {
    a.flags = TANDEM_TENSORS_CAUSAL;
    if (random.chance(0.3)) a.sliding_window_tokens = random.integer(1, 200);
  }
  for (int64_t h = 0; h < g.q_heads; ++h) {
    c.sinks.push_back(static_cast<float>(random.normal()));
    c.slopes.push_back(static_cast<float>(std::fabs(random.normal())));
  }
  c.sinks.shrink_to_fit();
  c.slopes.shrink_to_fit();
  if (random.chance(0.2)) a.sinks = c.sinks.data();
  if (random.chance(0.2)) a.alibi_slopes = c.slopes.data();
  if (random.chance(0.1)) {
    c.cancel = std::make_unique<int32_t>(0);
    a.cancel = c.cancel.get();
  }
  if (random.chance(0.1)) {
    a.progress = count_progress;
    a.progress_user = &c;
  }
}

std::unique_ptr<Case> valid_case(uint64_t seed) {
  Random random(seed);
  auto made = std::make_unique<Case>();
  Case& c = *made;
  Geometry g;
  int32_t k_type = 0, v_type = 0;
  c.seed = seed;
  c.padded = random.chance(0.5);
  choose_lengths(c, random, &g);
  choose_types(c, random, &g, &k_type, &v_type);
  const auto floats = [&] { return random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16}); };
  c.q.make(random, floats(), shape_of(c, g.n, {g.n_tokens, g.q_heads, g.k_dim}));
  c.k.make(random, k_type, shape_of(c, g.n, {g.n_keys, g.kv_heads, g.k_dim}));
  if (c.has_v) c.v.make(random, v_type, shape_of(c, g.n, {g.n_keys, g.kv_heads, g.v_dim}));
  c.o.make(random, floats(), shape_of(c, g.n, {g.n_tokens, g.q_heads, g.v_dim}));
  c.has_lse = random.chance(0.8);
  c.lse.make(random, TANDEM_F32, shape_of(c, g.n, {g.n_tokens, g.q_heads}));
  for (Exact* input : {&c.q, &c.k, &c.v}) input->fill(random);
  for (Exact* output : {&c.o, &c.lse}) std::fill_n(output->bytes, static_cast<size_t>(output->n_bytes), kUnwritten);
  c.q_lens.shrink_to_fit();
  c.kv_lens.shrink_to_fit();
  c.args.n_sequences = c.padded && random.chance(0.5) ? 0 : static_cast<int32_t>(g.n);
  c.args.q_lens = c.q_lens.data();
  c.args.kv_lens = c.kv_lens.data();
  c.args.q = &c.q.view;
  c.args.k = &c.k.view;
  c.args.v = c.has_v ? &c.v.view : nullptr;
  c.args.o = &c.o.view;
  c.args.lse = c.has_lse ? &c.lse.view : nullptr;
  choose_rest(c, random, g);
  return made;
}

// Checks that the call wrote every row of a query in o and lse, and no other byte.
void check_written(const Case& c, const Exact& output, int64_t row_bytes) {
  std::vector<bool> is_row(static_cast<size_t>(output.n_bytes), false);
  int64_t first = 0;
  const int64_t n_heads = output.view.shape[c.padded ? 2 : 1];
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    for (int64_t t = 0; t < c.q_lens[i]; ++t)
      for (int64_t h = 0; h < n_heads; ++h) {
        const int64_t at = c.padded ? output.at({static_cast<int64_t>(i), t, h}) : output.at({first + t, h});
        std::fill_n(is_row.begin() + at, row_bytes, true);
        int64_t n_same = 0;
        for (int64_t b = 0; b < row_bytes; ++b) n_same += output.bytes[at + b] == kUnwritten;
        if (n_same == row_bytes) fail_msg("seed %" PRIu64 ": a row of an output was not written", c.seed);
      }
    first += c.q_lens[i];
  }
  for (int64_t b = 0; b < output.n_bytes; ++b)
    if (!is_row[static_cast<size_t>(b)] && output.bytes[b] != kUnwritten)
      fail_msg("seed %" PRIu64 ": byte %" PRId64 " of a gap of an output was written", c.seed, b);
}

void run_valid(tandem_engine* engine, uint64_t seed) {
  const std::unique_ptr<Case> c = valid_case(seed);
  tandem_error* error = nullptr;
  if (tandem_attend_tensors(engine, &c->args, &error) != TANDEM_OK)
    fail_msg("seed %" PRIu64 " is valid: %s", seed, tandem_error_message(error));
  check_written(*c, c->o, c->o.view.shape[c->o.view.n_dims - 1] * unit_bytes(c->o.view.dtype));
  if (c->has_lse) check_written(*c, c->lse, 4);
}

int64_t wild(Random& random) {
  return random.pick<int64_t>({INT64_MIN, INT64_MIN + 1, -1, -64, INT64_MAX, INT64_MAX - 1, INT64_MAX / 2, INT64_MAX / 64,
                               INT64_C(1) << 62, INT64_C(1) << 40, INT64_C(1) << 32, INT32_MAX, INT64_C(-1) << 31});
}

// Makes one thing of a tensor invalid. A mask may have any number of columns.
void spoil_tensor(Random& random, tandem_tensor& t, bool may_be_wide) {
  const auto d = static_cast<int32_t>(random.integer(0, t.n_dims - 1));
  switch (random.integer(0, 9)) {
    case 0:
      t.struct_size = random.pick<uint32_t>({0, 1, 95});
      break;
    case 1:
      t.dtype = random.pick({-1, 0, 8, 99, INT32_MAX, INT32_MIN});
      break;
    case 2:
      t.device_type = random.pick({-1, 1, 2, INT32_MAX});
      break;
    case 3:
      t.device_index = random.pick({-1, 1, INT32_MIN});
      break;
    case 4:
      t.reserved = random.pick({-1, 1});
      break;
    case 5:
      t.n_dims = random.pick({-1, 0, 1, 5, INT32_MAX, INT32_MIN});
      break;
    case 6:
      t.shape[d] = -random.integer(1, 100);
      break;
    case 7:
      if (may_be_wide && d == t.n_dims - 1) return spoil_tensor(random, t, may_be_wide);
      t.shape[d] = random.pick<int64_t>({INT64_MAX, INT64_C(1) << 62, INT64_C(1) << 50});
      break;
    case 8:
      t.stride[d] = random.pick<int64_t>({0, -1, -64, INT64_MIN, INT64_MIN + 1});
      break;
    default:
      t.stride[t.n_dims - 1] = random.pick<int64_t>({0, 2, INT64_MAX, INT64_MIN});
  }
}

void spoil_args(Random& random, Case& c) {
  tandem_attend_tensors_args& a = c.args;
  const auto i = static_cast<size_t>(random.integer(0, static_cast<int64_t>(c.q_lens.size()) - 1));
  switch (random.integer(0, 13)) {
    case 0:
      a.struct_size = random.pick<uint32_t>({0, 4, 143});
      break;
    case 1:
      a.flags |= random.pick<uint32_t>({2, 4, 0x80000000u});
      break;
    case 2:
      a.n_sequences = random.pick({-1, INT32_MIN, 65537, INT32_MAX});
      break;
    case 3:
      a.sm_scale = random.pick({-1.0f, NAN, INFINITY});
      break;
    case 4:
      a.soft_cap = random.pick({-1.0f, NAN, INFINITY});
      break;
    case 5:
      a.reserved = random.pick({1, -1});
      break;
    case 6:
      a.sliding_window_tokens = random.pick<int64_t>({-1, INT64_MIN});
      break;
    case 7:
      a.stream = &c;
      break;
    case 8:
      a.progress = nullptr;
      a.progress_user = &c;
      break;
    case 9:
      (random.chance(0.5) ? c.q_lens[i] : c.kv_lens[i]) = random.pick<int64_t>({-1, INT64_MIN, INT64_MAX, INT64_C(1) << 40});
      break;
    case 10:
      c.sinks[0] = random.chance(0.5) ? NAN : INFINITY;
      a.sinks = c.sinks.data();
      break;
    case 11:
      c.slopes.back() = random.pick<float>({NAN, INFINITY, kHiddenLogit});
      a.alibi_slopes = c.slopes.data();
      break;
    case 12:
      (random.chance(0.5) ? a.q : random.chance(0.5) ? a.k : a.o) = nullptr;
      break;
    default:
      a.flags |= TANDEM_TENSORS_CAUSAL;
      a.mask = &c.mask.view;  // refused before the mask is looked at
  }
}

Exact& tensor_of(Random& random, Case& c) {
  for (;;) {
    Exact* const tensors[] = {&c.q, &c.k, &c.v, &c.mask, &c.o, &c.lse};
    const int64_t which = random.integer(0, 5);
    if ((which == 2 && !c.has_v) || (which == 3 && !c.has_mask) || (which == 5 && !c.has_lse)) continue;
    return *tensors[which];
  }
}

bool is_unwritten(const Exact& output) {
  for (int64_t b = 0; b < output.n_bytes; ++b)
    if (output.bytes[b] != kUnwritten) return false;
  return true;
}

// Changes up to two numbers at random, then makes one thing invalid. Either may be the reason of the refusal.
void run_invalid(tandem_engine* engine, uint64_t seed) {
  Random random(seed ^ 0x5eedu);
  const std::unique_ptr<Case> made = valid_case(seed);
  Case& c = *made;
  if (c.q_lens.empty()) return;
  for (int64_t i = random.integer(0, 2); i > 0; --i) {
    tandem_tensor& t = tensor_of(random, c).view;
    const auto d = static_cast<size_t>(random.integer(0, 3));
    (random.chance(0.5) ? t.shape[d] : t.stride[d]) = wild(random);
  }
  Exact& spoilt = tensor_of(random, c);
  if (random.chance(0.5))
    spoil_tensor(random, spoilt.view, &spoilt == &c.mask);
  else
    spoil_args(random, c);
  tandem_error* error = nullptr;
  const int32_t status = tandem_attend_tensors(engine, &c.args, &error);
  const bool is_named = tandem_error_field(error)[0] != '\0' && tandem_error_message(error)[0] != '\0';
  if (status == TANDEM_OK) fail_msg("seed %" PRIu64 " is invalid, and was not refused", seed);
  if (status != TANDEM_ERROR_INVALID_ARGUMENT && status != TANDEM_ERROR_UNSUPPORTED && status != TANDEM_ERROR_CAPACITY)
    fail_msg("seed %" PRIu64 ": %s", seed, tandem_error_message(error));
  if (!is_named) fail_msg("seed %" PRIu64 ": the refusal names no field", seed);
  if (!is_unwritten(c.o) || !is_unwritten(c.lse)) fail_msg("seed %" PRIu64 ": a refused call has written", seed);
  tandem_error_release(error);
}

double seconds() {
  const char* text = std::getenv("TANDEM_FUZZ_SECONDS");
  return text != nullptr ? std::atof(text) : 20.0;
}

void fuzz(int32_t isa_idx, uint64_t first_seed, uint64_t n_cases, double limit) {
  tandem_engine_options options = small_engine_options();
  options.cpu_isa = tandem_cpu_isa_name(isa_idx);
  options.matmul_rows = isa_idx % 2 == 0 ? 16 : INT32_MAX;
  tandem_engine* engine = nullptr;
  OK(tandem_engine_create, &engine, &options);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit);
  uint64_t n = 0;
  for (; n < n_cases && (n == 0 || std::chrono::steady_clock::now() < end); ++n) {
    run_valid(engine, first_seed + n);
    run_invalid(engine, first_seed + n);
  }
  tandem_engine_release(engine);
  print_message("%s: %" PRIu64 " valid calls, %" PRIu64 " invalid ones\n", options.cpu_isa, n, n);
}

void test_random_calls(void**) {
  std::vector<int32_t> isas;
  for (int32_t i = 0; tandem_cpu_isa_name(i) != nullptr; ++i)
    if (tandem_cpu_isa_available(tandem_cpu_isa_name(i))) isas.push_back(i);
  const char* seed = std::getenv("TANDEM_FUZZ_SEED");
  const auto now = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  for (const int32_t isa : isas) {
    if (seed != nullptr)
      fuzz(isa, std::strtoull(seed, nullptr, 10), 1, 1);
    else
      fuzz(isa, now + static_cast<uint64_t>(isa) * 1000000007u, UINT64_MAX, seconds() / static_cast<double>(isas.size()));
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_random_calls),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
