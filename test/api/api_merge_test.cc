// SPDX-License-Identifier: MIT
// tandem_merge(): the formula over types, strides and blocks, outputs in place, and refusals.
#include <algorithm>
#include <limits>

#include "api_world.h"
#include "fp_modes_of_caller.h"
#include "one_in.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
constexpr float kInf = std::numeric_limits<float>::infinity();

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Values that every type holds exactly: multiples of 1/64 below 2.
float exact(int64_t i, int64_t seed) { return std::nearbyint(noise(i, seed) * 128.0f) / 64.0f; }

uint16_t f16_of(float value) {  // for the values above
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000;
  if ((bits & 0x7fffffff) == 0) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | ((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff));
}

float f16_to(uint16_t half) {
  if ((half & 0x7fff) == 0) return from_bits(static_cast<uint32_t>(half) << 16);
  if ((half & 0x7c00) == 0) return std::ldexp(static_cast<float>(half & 0x3ff), -24) * (half & 0x8000 ? -1.0f : 1.0f);
  return from_bits((half & 0x8000u) << 16 | ((half >> 10 & 0x1fu) + 112) << 23 | (half & 0x3ffu) << 13);
}

int64_t size_of(int32_t dtype) { return dtype == TANDEM_F32 ? 4 : 2; }

void put(void* data, int32_t dtype, int64_t idx, float value) {
  auto* bytes = static_cast<unsigned char*>(data) + idx * size_of(dtype);
  const uint16_t half = dtype == TANDEM_F16 ? f16_of(value) : static_cast<uint16_t>(to_bits(value) >> 16);
  std::memcpy(bytes, dtype == TANDEM_F32 ? static_cast<const void*>(&value) : &half, static_cast<size_t>(size_of(dtype)));
}

float get(const void* data, int32_t dtype, int64_t idx) {
  const auto* bytes = static_cast<const unsigned char*>(data) + idx * size_of(dtype);
  if (dtype == TANDEM_F32) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return dtype == TANDEM_F16 ? f16_to(half) : from_bits(static_cast<uint32_t>(half) << 16);
}

struct Shape {
  int64_t n_tokens, n_heads, head_dim;
  int64_t token_gap = 0, head_gap = 0;  // unused elements, which hold NaN

  int64_t head_stride() const { return head_dim + head_gap; }
  int64_t token_stride() const { return std::max<int64_t>(1, n_heads * head_stride() + token_gap); }
};

// A state's o, or its lse (head_dim 1), with gaps.
struct Part {
  std::vector<unsigned char> bytes;
  tandem_tensor view = {};
  Shape shape;

  Part(const Shape& of, int32_t dtype, bool is_lse) : shape(of) {
    if (is_lse) shape.head_dim = 1;
    const int64_t n = shape.n_tokens * shape.token_stride() + 16;
    bytes.assign(static_cast<size_t>(n * size_of(dtype)), 0xff);  // NaN in every type
    view.struct_size = sizeof view;
    view.dtype = dtype;
    view.data = bytes.data();
    view.n_dims = is_lse ? 2 : 3;
    const int64_t lengths[] = {shape.n_tokens, shape.n_heads, shape.head_dim};
    const int64_t strides[] = {shape.token_stride(), shape.head_stride(), 1};
    std::copy_n(lengths, 3, view.shape);
    std::copy_n(strides, 3, view.stride);
    if (is_lse) view.shape[2] = view.stride[2] = 0, view.stride[1] = 1;
    if (is_lse) shape.head_gap = 0, view.stride[0] = shape.token_stride();
  }
  int64_t at(int64_t row, int64_t d) const {
    return row / shape.n_heads * shape.token_stride() + row % shape.n_heads * shape.head_stride() + d;
  }
  void set(int64_t row, int64_t d, float value) { put(bytes.data(), view.dtype, at(row, d), value); }
  float value(int64_t row, int64_t d) const { return get(bytes.data(), view.dtype, at(row, d)); }
};

struct States {
  std::vector<Part> o, lse;
  std::vector<const tandem_tensor*> o_views, lse_views;

  States(const Shape& shape, const std::vector<int32_t>& dtypes) {
    for (size_t i = 0; i < dtypes.size(); ++i) {
      o.emplace_back(shape, dtypes[i], false);
      lse.emplace_back(shape, TANDEM_F32, true);
    }
    for (size_t i = 0; i < dtypes.size(); ++i) {
      for (int64_t row = 0; row < shape.n_tokens * shape.n_heads; ++row) {
        for (int64_t d = 0; d < shape.head_dim; ++d)
          o[i].set(row, d, exact(row * shape.head_dim + d, static_cast<int64_t>(i)));
        const float empty = (row + static_cast<int64_t>(i)) % 5 == 0 ? -kInf : 0.0f;
        lse[i].set(row, 0, 20.0f * noise(row, 100 + static_cast<int64_t>(i)) + empty);
      }
      o_views.push_back(&o[i].view);
      lse_views.push_back(&lse[i].view);
    }
  }
  // Merges in double precision.
  double merged(int64_t row, int64_t d, double* out_lse) const {
    double m = -INFINITY, sum = 0.0, result = 0.0;
    for (const Part& part : lse) m = std::max(m, static_cast<double>(part.value(row, 0)));
    *out_lse = m;
    if (m == -INFINITY) return 0.0;
    for (size_t i = 0; i < o.size(); ++i) {
      const double w = std::exp(static_cast<double>(lse[i].value(row, 0)) - m);
      sum += w;
      if (w > 0) result += w * static_cast<double>(o[i].value(row, d));
    }
    *out_lse = m + std::log(sum);
    return result / sum;
  }
};

void check_merge(const World& world, const Shape& shape, const std::vector<int32_t>& dtypes, int32_t out_dtype,
                 bool in_place) {
  static tandem::test::TakesOneIn takes_case;
  if (!takes_case()) return;
  States states(shape, dtypes);
  const int64_t n_rows = shape.n_tokens * shape.n_heads;
  std::vector<double> expected, expected_lse;
  for (int64_t row = 0; row < n_rows; ++row) {
    double lse = 0;
    for (int64_t d = 0; d < shape.head_dim; ++d) expected.push_back(states.merged(row, d, &lse));
    expected_lse.push_back(lse);
  }
  Part o_out(shape, out_dtype, false), lse_out(shape, TANDEM_F32, true);
  Part& o = in_place ? states.o[0] : o_out;
  Part& lse = in_place ? states.lse[0] : lse_out;
  OK(tandem_merge, &o.view, &lse.view, states.o_views.data(), states.lse_views.data(), static_cast<int32_t>(dtypes.size()),
     world.engine, nullptr);
  const double eps = o.view.dtype == TANDEM_F32 ? 4e-7 : o.view.dtype == TANDEM_F16 ? 6e-4 : 5e-3;
  for (int64_t row = 0; row < n_rows; ++row) {
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      const double want = expected[static_cast<size_t>(row * shape.head_dim + d)],
                   got = static_cast<double>(o.value(row, d));
      if (!(std::fabs(got - want) <= eps * (1.0 + std::fabs(want)) + 2e-6)) {
        print_error("row %d dim %d: %.9g, not %.9g\n", static_cast<int>(row), static_cast<int>(d), got, want);
        assert_true(false);
      }
    }
    const double want = expected_lse[static_cast<size_t>(row)], got = static_cast<double>(lse.value(row, 0));
    assert_true(want == got || std::fabs(got - want) <= 1e-5 * (1.0 + std::fabs(want)));
  }
  // The call wrote nothing between the rows.
  std::vector<bool> is_row(o.bytes.size());
  const auto size = static_cast<size_t>(size_of(o.view.dtype));
  for (int64_t row = 0; row < n_rows; ++row)
    std::fill_n(is_row.begin() + static_cast<int64_t>(size) * o.at(row, 0), static_cast<int64_t>(size) * shape.head_dim,
                true);
  for (size_t i = 0; i < is_row.size(); ++i) assert_true(is_row[i] || o.bytes[i] == 0xff);
}

void test_types_and_strides(void**) {
  World world;
  const int32_t types[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16};
  const Shape shapes[] = {{3, 5, 64},       {1, 1, 1},  {7, 4, 128, 0, 3}, {7, 4, 80, 5, 0},
                          {2, 3, 33, 1, 7}, {0, 4, 64}, {4, 0, 64}};
  for (const Shape& shape : shapes) {
    for (const int32_t type : types) {
      for (const int32_t out : types) check_merge(world, shape, {type, type, type}, out, false);
      check_merge(world, shape, {type, TANDEM_F16, TANDEM_F32, TANDEM_BF16}, type, true);
      check_merge(world, shape, {type}, type, false);
      check_merge(world, shape, {type}, type, true);
    }
  }
}

// Merges more rows than the work space holds at once.
void test_blocks(void**) {
  World world;
  const Shape shape{700, 9, 128, 11, 0};
  check_merge(world, shape, {TANDEM_F16, TANDEM_BF16, TANDEM_F32}, TANDEM_F32, false);
  check_merge(world, shape, {TANDEM_F16, TANDEM_BF16, TANDEM_F32}, TANDEM_F16, true);
  check_merge(world, {300, 2, 64}, std::vector<int32_t>(50, TANDEM_BF16), TANDEM_BF16, false);
}

void test_special_values(void**) {
  World world;
  const Shape shape{1, 4, 64};
  for (const int32_t type : {TANDEM_F32, TANDEM_BF16}) {
    States s(shape, {type, type});
    for (int64_t d = 0; d < 64; ++d) {
      s.o[0].set(0, d, NAN), s.o[1].set(0, d, 3.0f);   // row 0: an empty state that holds NaN
      s.o[0].set(1, d, NAN), s.o[1].set(1, d, NAN);    // row 1: all empty
      s.o[0].set(2, d, 1.0f), s.o[1].set(2, d, 2.0f);  // row 2: a gap of more than 88.7
      s.o[0].set(3, d, 1.0f), s.o[1].set(3, d, NAN);   // row 3: NaN is passed on
    }
    const float lse[2][4] = {{-kInf, -kInf, 300.0f, 0.0f}, {5.0f, -kInf, -300.0f, 0.0f}};
    for (size_t i = 0; i < 2; ++i)
      for (int64_t row = 0; row < 4; ++row) s.lse[i].set(row, 0, lse[i][row]);
    Part o(shape, type, false), out_lse(shape, TANDEM_F32, true);
    OK(tandem_merge, &o.view, &out_lse.view, s.o_views.data(), s.lse_views.data(), 2, world.engine, nullptr);
    for (int64_t d = 0; d < 64; ++d) {
      assert_true(o.value(0, d) == 3.0f);
      assert_true(o.value(1, d) == 0.0f);
      assert_true(o.value(2, d) == 1.0f);
      assert_true(std::isnan(o.value(3, d)));
    }
    assert_true(out_lse.value(0, 0) == 5.0f);
    assert_true(out_lse.value(1, 0) == -kInf);
    assert_true(out_lse.value(2, 0) == 300.0f);
  }
}

// A caller that flushes denormals to zero and traps on every exception (where supported) gets the same bits. Its
// floating-point modes are restored.
void test_modes_of_the_caller(void**) {
  World world;
  const Shape shape{1, 2, 64};
  States s(shape, {TANDEM_F32, TANDEM_F32});
  constexpr float kDenormal = 1e-40f;
  for (int64_t d = 0; d < 64; ++d) {
    s.o[0].set(0, d, kDenormal), s.o[1].set(0, d, kDenormal);
    s.o[0].set(1, d, 1.0f), s.o[1].set(1, d, 3.0f);
  }
  for (size_t i = 0; i < 2; ++i) s.lse[i].set(0, 0, 0.0f), s.lse[i].set(1, 0, i == 0 ? -kInf : 0.1f);
  Part o(shape, TANDEM_F32, false), out_lse(shape, TANDEM_F32, true);
  const uint64_t before = fp_modes();
  set_fp_modes(kTrapping);
  const int32_t status =
      tandem_merge(&o.view, &out_lse.view, s.o_views.data(), s.lse_views.data(), 2, world.engine, nullptr, nullptr);
  const uint64_t after = fp_modes();
  set_fp_modes(before);
  assert_int_equal(status, TANDEM_OK);
  assert_int_equal(after, kTrapping);
  for (int64_t d = 0; d < 64; ++d) {
    assert_int_equal(to_bits(o.value(0, d)), to_bits(kDenormal));
    assert_true(o.value(1, d) == 3.0f);
  }
}

struct MergeCase {
  const char* name;
  int32_t status;
  const char* field;
  const char* value;
  std::function<void(struct Merge&)> change;
};

struct Merge {
  Tensor o0{{3, 2, 64}, 1}, o1{{3, 2, 64}, 2}, lse0{{3, 2}, 3}, lse1{{3, 2}, 4};
  tandem_tensor o_out, lse_out;
  const tandem_tensor* o[2] = {&o0.view, &o1.view};
  const tandem_tensor* lse[2] = {&lse0.view, &lse1.view};
  const tandem_tensor *o_out_ptr = &o_out, *lse_out_ptr = &lse_out;
  const tandem_tensor* const* o_ptr = o;
  const tandem_tensor* const* lse_ptr = lse;
  int32_t n_states = 2;
  void* stream = nullptr;

  explicit Merge(Outputs& out) {
    const int64_t o_shape[] = {3, 2, 64}, lse_shape[] = {3, 2};
    OK(tandem_tensor_init, &o_out, TANDEM_F32, out.at<float>(), 3, o_shape);
    OK(tandem_tensor_init, &lse_out, TANDEM_F32, out.at<float>(32768), 2, lse_shape);
  }
  Merge(const Merge&) = delete;
};

void test_refused(void**) {
  World world;
  Outputs out;
  const std::vector<MergeCase> cases = {
      {"null", kInvalid, "o_out", "NULL", [](auto& m) { m.o_out_ptr = nullptr; }},
      {"null", kInvalid, "lse_out", "NULL", [](auto& m) { m.lse_out_ptr = nullptr; }},
      {"null", kInvalid, "o", "NULL", [](auto& m) { m.o_ptr = nullptr; }},
      {"null", kInvalid, "lse", "NULL", [](auto& m) { m.lse_ptr = nullptr; }},
      {"null", kInvalid, "o[1]", "NULL", [](auto& m) { m.o[1] = nullptr; }},
      {"null", kInvalid, "lse[0]", "NULL", [](auto& m) { m.lse[0] = nullptr; }},
      {"count", kInvalid, "n_states", "0", [](auto& m) { m.n_states = 0; }},
      {"count", kInvalid, "n_states", "-1", [](auto& m) { m.n_states = -1; }},
      {"more than anyone has", kInvalid, "n_states", "2147483647", [](auto& m) { m.n_states = INT32_MAX; }},
      {"more than anyone has", kInvalid, "n_states", "65537", [](auto& m) { m.n_states = 65537; }},
      {"stream", kInvalid, "stream", "must be NULL", [](auto& m) { m.stream = &m; }},
      {"shape", kInvalid, "o[1].shape[0]", "4, must be n_tokens = 3", [](auto& m) { m.o1.view.shape[0] = 4; }},
      {"shape", kInvalid, "o[0].shape[1]", "1, must be n_heads = 2", [](auto& m) { m.o0.view.shape[1] = 1; }},
      {"shape", kInvalid, "o[0].shape[2]", "63, must be head_dim = 64", [](auto& m) { m.o0.view.shape[2] = 63; }},
      {"shape", kInvalid, "lse[1].shape[1]", "1, must be n_heads = 2", [](auto& m) { m.lse1.view.shape[1] = 1; }},
      {"shape", kInvalid, "lse_out.shape[0]", "2, must be n_tokens = 3", [](auto& m) { m.lse_out.shape[0] = 2; }},
      {"shape", kInvalid, "o_out.stride[1]", "9223372036854775807", [](auto& m) { m.o_out.shape[2] = INT64_MAX; }},
      {"dims", kInvalid, "o_out.n_dims", "2", [](auto& m) { m.o_out.n_dims = 2; }},
      {"type", kInvalid, "o[0].dtype", "9", [](auto& m) { m.o0.view.dtype = 9; }},
      {"type", kInvalid, "lse[1].dtype", "must be f32", [](auto& m) { m.lse1.view.dtype = TANDEM_F16; }},
      {"type", kInvalid, "lse_out.dtype", "must be f32", [](auto& m) { m.lse_out.dtype = TANDEM_BF16; }},
      {"device", TANDEM_ERROR_UNSUPPORTED, "o[1].device_type", "takes host memory alone",
       [](auto& m) { m.o1.view.device_type = TANDEM_DEVICE_CUDA; }},
      {"size", kInvalid, "o[1].struct_size", "0", [](auto& m) { m.o1.view.struct_size = 0; }},
      {"aligned", kInvalid, "lse[0].data", "not aligned",
       [](auto& m) { m.lse0.view.data = static_cast<char*>(m.lse0.view.data) + 2; }},
      {"overlap", kInvalid, "o_out.data", "overlaps o[1]", [](auto& m) { m.o1.view.data = m.o_out.data; }},
      {"overlap", kInvalid, "o_out.data", "overlaps o[0]",
       [](auto& m) { m.o0.view.data = static_cast<float*>(m.o_out.data) + 1; }},
      {"overlap", kInvalid, "o_out.data", "overlaps o[0]",
       [](auto& m) { m.o0.view.data = m.o_out.data, m.o0.view.stride[0] = 129; }},
      {"overlap", kInvalid, "o_out.data", "overlaps o[0]",
       [](auto& m) { m.o0.view.data = m.o_out.data, m.o0.view.dtype = TANDEM_BF16; }},
      {"overlap", kInvalid, "o_out.data", "overlaps lse_out", [](auto& m) { m.lse_out.data = m.o_out.data; }},
      {"overlap", kInvalid, "o_out.data", "overlaps lse[1]", [](auto& m) { m.lse1.view.data = m.o_out.data; }},
      {"overlap", kInvalid, "lse_out.data", "overlaps lse[1]", [](auto& m) { m.lse1.view.data = m.lse_out.data; }},
      {"overlap", kInvalid, "lse_out.data", "overlaps o[0]", [](auto& m) { m.o0.view.data = m.lse_out.data; }},
  };
  std::vector<Refused> refused;
  for (const MergeCase& c : cases)
    refused.push_back({c.name, "tandem_merge", c.status, c.field, c.value, [&](tandem_error** e) {
                         Merge m(out);
                         c.change(m);
                         return tandem_merge(m.o_out_ptr, m.lse_out_ptr, m.o_ptr, m.lse_ptr, m.n_states, world.engine,
                                             m.stream, e);
                       }});
  check_all_refused(world, refused, &out);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_types_and_strides),   cmocka_unit_test(test_blocks),  cmocka_unit_test(test_special_values),
      cmocka_unit_test(test_modes_of_the_caller), cmocka_unit_test(test_refused),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
