// SPDX-License-Identifier: MIT
// Storage types at the ABI: names and sizes, reading and writing rows of blocks, rounding, and refusals.
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "api_world.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

using namespace tandem_test;

namespace {

constexpr int64_t kRows = 70;  // tokens x heads of one head
constexpr int32_t kBlockTypes[] = {TANDEM_Q8_0, TANDEM_Q4_0};

// A cache of one layer with one KV head, on the world's engine.
struct TypedCache {
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  int64_t sequence = 0;

  TypedCache(const World& world, int32_t k_type, int32_t v_type, int32_t k_dim = 128, int32_t v_dim = 64) {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = layer.n_kv_heads = 1;
    layer.k_head_dim = k_dim;
    layer.v_head_dim = v_dim;
    OK(tandem_model_create, &model, &layer, 1);
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.k_rotation = TANDEM_ROTATION_NONE;  // rows are compared with the arithmetic of their type
    options.k_type = k_type;
    options.v_type = v_type;
    OK(tandem_cache_create, &cache, world.engine, model, &options);
    OK(tandem_sequence_create, &sequence, cache);
  }
  ~TypedCache() {
    tandem_cache_release(cache);
    tandem_model_release(model);
  }
  TypedCache(const TypedCache&) = delete;
  TypedCache& operator=(const TypedCache&) = delete;

  void append(const tandem_tensor& k, const tandem_tensor& v) const {
    OK(tandem_sequence_append, cache, sequence, 0, &k, &v, nullptr);
  }
};

// [kRows, 1, dim] of any type.
struct AnyTensor {
  std::vector<uint8_t> bytes;
  tandem_tensor view = {};

  AnyTensor(int32_t dtype, int64_t row_bytes, int64_t dim) : bytes(static_cast<size_t>(kRows * row_bytes), 0xEE) {
    const int64_t shape[3] = {kRows, 1, dim};
    OK(tandem_tensor_init, &view, dtype, bytes.data(), 3, shape);
  }
};

std::vector<double> numbers(int64_t dim, int64_t seed) {
  std::vector<double> x;
  for (int64_t i = 0; i < kRows * dim; ++i) {
    const double size = i / dim % 7 == 3 ? 0.0 : std::ldexp(1.0, static_cast<int>(i / dim % 30) - 15);
    x.push_back(static_cast<double>(static_cast<float>(static_cast<double>(noise(i, seed)) * size)));
  }
  return x;
}

AnyTensor f32_tensor(const std::vector<double>& x, int64_t dim) {
  AnyTensor tensor(TANDEM_F32, 4 * dim, dim);
  for (size_t i = 0; i < x.size(); ++i) {
    const auto value = static_cast<float>(x[i]);
    std::memcpy(tensor.bytes.data() + 4 * i, &value, 4);
  }
  return tensor;
}

int64_t block_row_bytes(int32_t dtype, int64_t dim) { return dim / 32 * (dtype == TANDEM_Q8_0 ? 34 : 18); }

AnyTensor block_tensor(int32_t dtype, const std::vector<double>& x, int64_t dim) {
  AnyTensor tensor(dtype, block_row_bytes(dtype, dim), dim);
  uint8_t* to = tensor.bytes.data();
  for (int64_t row = 0; row < kRows; ++row) {
    const std::vector<uint8_t> blocks = reference::block_row(dtype, x.data() + row * dim, dim);
    to = std::copy(blocks.begin(), blocks.end(), to);
  }
  return tensor;
}

void expect_values(const AnyTensor& f32, std::vector<double> x, int64_t dim, int32_t dtype) {
  for (int64_t row = 0; row < kRows; ++row) reference::round_row(dtype, x.data() + row * dim, dim);
  for (size_t i = 0; i < x.size(); ++i) {
    float got;
    std::memcpy(&got, f32.bytes.data() + 4 * i, 4);
    if (std::isnan(x[i]) ? std::isnan(got) : static_cast<double>(got) == x[i]) continue;
    print_error("%s: element %zu is %.9g, should be %.9g\n", tandem_dtype_name(dtype), i, static_cast<double>(got), x[i]);
    _fail(__FILE__, __LINE__);
  }
}

void names_and_sizes(void**) {
  const struct {
    int32_t dtype;
    const char* name;
    int64_t bytes_of_128, bytes_of_80;
  } types[] = {{TANDEM_F32, "f32", 512, 320},  {TANDEM_F16, "f16", 256, 160},  {TANDEM_BF16, "bf16", 256, 160},
               {TANDEM_E4M3, "e4m3", 128, 80}, {TANDEM_Q8_0, "q8_0", 136, 86}, {TANDEM_Q4_0, "q4_0", 72, 46},
               {TANDEM_Q4_64, "q4_64", 72, 48}};
  for (const auto& type : types) {
    assert_string_equal(tandem_dtype_name(type.dtype), type.name);
    assert_int_equal(tandem_dtype_row_bytes(type.dtype, 128), type.bytes_of_128);
    assert_int_equal(tandem_dtype_row_bytes(type.dtype, 80), type.bytes_of_80);
    assert_int_equal(tandem_dtype_row_bytes(type.dtype, 0), 0);
    assert_int_equal(tandem_dtype_row_bytes(type.dtype, -5), 0);
  }
  for (const int32_t none : {0, -1, 8, INT32_MAX}) {
    assert_null(tandem_dtype_name(none));
    assert_int_equal(tandem_dtype_row_bytes(none, 128), 0);
  }
}

// Writes f32 into a cache of the type and reads it back as f32 and as blocks. Expects the documented arithmetic (q8_0,
// q4_0: ggml's).
void rounds_as_documented(void**) {
  const World world;
  for (const int32_t dtype : kBlockTypes) {
    const TypedCache cache(world, dtype, dtype);
    const std::vector<double> k = numbers(128, 1), v = numbers(64, 2);
    cache.append(f32_tensor(k, 128).view, f32_tensor(v, 64).view);
    AnyTensor k_out(TANDEM_F32, 512, 128), v_out(TANDEM_F32, 256, 64);
    OK(tandem_sequence_read, &k_out.view, &v_out.view, cache.cache, cache.sequence, 0, 0);
    expect_values(k_out, k, 128, dtype);
    expect_values(v_out, v, 64, dtype);
    AnyTensor blocks(dtype, block_row_bytes(dtype, 128), 128);
    OK(tandem_sequence_read, &blocks.view, nullptr, cache.cache, cache.sequence, 0, 0);
    const AnyTensor want = block_tensor(dtype, k, 128);
    assert_memory_equal(blocks.bytes.data(), want.bytes.data(), want.bytes.size());
  }
}

// Blocks written to a cache of their type are read back bit for bit. In another type they are rounded once more.
void blocks_pass_through(void**) {
  const World world;
  for (const int32_t dtype : kBlockTypes) {
    const std::vector<double> k = numbers(128, 3), v = numbers(64, 4);
    const AnyTensor k_in = block_tensor(dtype, k, 128), v_in = block_tensor(dtype, v, 64);
    const TypedCache same(world, dtype, dtype);
    same.append(k_in.view, v_in.view);
    AnyTensor k_out(dtype, block_row_bytes(dtype, 128), 128), v_out(dtype, block_row_bytes(dtype, 64), 64);
    OK(tandem_sequence_read, &k_out.view, &v_out.view, same.cache, same.sequence, 0, 0);
    assert_memory_equal(k_out.bytes.data(), k_in.bytes.data(), k_in.bytes.size());
    assert_memory_equal(v_out.bytes.data(), v_in.bytes.data(), v_in.bytes.size());

    std::vector<double> dequantised = k;
    for (int64_t row = 0; row < kRows; ++row) reference::round_row(dtype, dequantised.data() + row * 128, 128);
    for (const int32_t stored : {TANDEM_F16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0}) {
      if (stored == dtype) continue;
      const TypedCache other(world, stored, TANDEM_BF16);
      other.append(k_in.view, v_in.view);
      AnyTensor out(TANDEM_F32, 512, 128);
      OK(tandem_sequence_read, &out.view, nullptr, other.cache, other.sequence, 0, 0);
      expect_values(out, dequantised, 128, stored);
    }
  }
}

// NaN, infinity and numbers that f16 cannot scale make their group NaN and no other.
void a_bad_element_spoils_its_group(void**) {
  const World world;
  for (const int32_t dtype : kBlockTypes) {
    for (const double bad :
         {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY), 1e30}) {
      const TypedCache cache(world, dtype, dtype, 80, 64);
      std::vector<double> k = numbers(80, 5), v = numbers(64, 6);
      k[5 * 80 + 70] = bad;  // in the short group
      v[6 * 64 + 31] = bad;
      cache.append(f32_tensor(k, 80).view, f32_tensor(v, 64).view);
      AnyTensor k_out(TANDEM_F32, 320, 80), v_out(TANDEM_F32, 256, 64);
      OK(tandem_sequence_read, &k_out.view, &v_out.view, cache.cache, cache.sequence, 0, 0);
      expect_values(k_out, k, 80, dtype);
      expect_values(v_out, v, 64, dtype);
      float element;
      std::memcpy(&element, k_out.bytes.data() + 4 * (5 * 80 + 64), 4);
      assert_true(std::isnan(element));
      std::memcpy(&element, k_out.bytes.data() + 4 * (5 * 80 + 63), 4);
      assert_false(std::isnan(element));
    }
  }
}

void refuse_append(const TypedCache& cache, const tandem_tensor& k, const tandem_tensor& v, const char* field,
                   const char* words) {
  uint64_t before = 0, after = 0;
  OK(tandem_sequence_digest, &before, cache.cache, cache.sequence);
  tandem_error* error = nullptr;
  assert_int_equal(tandem_sequence_append(cache.cache, cache.sequence, 0, &k, &v, nullptr, &error),
                   TANDEM_ERROR_INVALID_ARGUMENT);
  assert_string_equal(tandem_error_field(error), field);
  const std::string message = tandem_error_message(error);
  if (message.find(words) == std::string::npos) {
    print_error("\"%s\" does not say \"%s\"\n", message.c_str(), words);
    _fail(__FILE__, __LINE__);
  }
  tandem_error_release(error);
  OK(tandem_sequence_digest, &after, cache.cache, cache.sequence);
  assert_true(before == after);
}

void refusals(void**) {
  const World world;
  const TypedCache cache(world, TANDEM_Q8_0, TANDEM_Q4_0);
  const AnyTensor k = block_tensor(TANDEM_Q8_0, numbers(128, 7), 128), v = block_tensor(TANDEM_Q4_0, numbers(64, 8), 64);
  tandem_tensor bad = k.view;
  bad.stride[0] = 129;
  refuse_append(cache, bad, v.view, "k.stride[0]", "129 is not a multiple of 32, a block of q8_0");
  bad = k.view;
  bad.data = static_cast<uint8_t*>(bad.data) + 1;
  refuse_append(cache, bad, v.view, "k.data", "is not aligned to q8_0");
  bad = v.view;
  bad.dtype = 8;
  refuse_append(cache, k.view, bad, "v.dtype", "8 is not a tensor type (f32, f16, bf16, e4m3, q8_0, q4_0)");

  const TypedCache odd(world, TANDEM_Q8_0, TANDEM_Q8_0, 80, 64);
  AnyTensor short_rows(TANDEM_Q8_0, 102, 96);
  short_rows.view.shape[2] = 80;
  refuse_append(odd, short_rows.view, v.view, "k.shape[2]", "80 is not a multiple of 32, a block of q8_0");
}

void expect_refused(int32_t status, tandem_error* error, int32_t wanted, const std::string& field,
                    const std::string& words) {
  assert_int_equal(status, wanted);
  assert_string_equal(tandem_error_field(error), field.c_str());
  const std::string message = tandem_error_message(error);
  if (message.find(words) == std::string::npos) fail_msg("\"%s\" does not say \"%s\"", message.c_str(), words.c_str());
  tandem_error_release(error);
}

// Keys and values of type q4_64 can neither be stored nor passed. Hidden states can be stored in it (api_hidden_test).
void q4_64_is_not_for_keys_and_values(void**) {
  const World world;
  const int32_t by_layer[kLayers] = {TANDEM_F16, TANDEM_Q4_64};
  using Options = tandem_cache_options;
  const struct {
    const char* field;
    std::function<void(Options&)> change;
  } kCases[] = {
      {"k_type", [](Options& o) { o.k_type = TANDEM_Q4_64; }},
      {"v_type", [](Options& o) { o.v_type = TANDEM_Q4_64; }},
      {"layer_k_types[1]", [&](Options& o) { o.layer_k_types = by_layer; }},
      {"layer_v_types[1]", [&](Options& o) { o.layer_v_types = by_layer; }},
  };
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = layer.n_kv_heads = 1;
  layer.k_head_dim = 64;
  for (const auto& one : kCases) {
    const std::string words =
        std::string(one.field) + " = 7 (q4_64): keys and values are stored as f32, f16, bf16, e4m3, q8_0";
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    one.change(options);
    tandem_cache* cache = nullptr;
    tandem_error* error = nullptr;
    int32_t status = tandem_cache_create(&cache, world.engine, world.model, &options, &error);
    expect_refused(status, error, TANDEM_ERROR_UNSUPPORTED, one.field, words);
    assert_null(cache);
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    error = nullptr;
    status = tandem_plan_memory(&plan, world.engine, world.model, &options, nullptr, nullptr, 0, &error);
    expect_refused(status, error, TANDEM_ERROR_UNSUPPORTED, one.field, words);
    if (options.layer_k_types != nullptr || options.layer_v_types != nullptr) continue;
    error = nullptr;
    status = tandem_supports(world.engine, &layer, &options, nullptr, &error);
    expect_refused(status, error, TANDEM_ERROR_UNSUPPORTED, one.field, words);
  }
  const TypedCache cache(world, TANDEM_F16, TANDEM_F16, 64, 64);
  const AnyTensor good(TANDEM_F16, 128, 64), bad(TANDEM_Q4_64, 36, 64);
  for (const bool of_k : {true, false}) {
    const tandem_tensor *const k = of_k ? &bad.view : &good.view, *const v = of_k ? &good.view : &bad.view;
    const std::string field = of_k ? "k.dtype" : "v.dtype";
    tandem_error* error = nullptr;
    const int32_t status = tandem_sequence_append(cache.cache, cache.sequence, 0, k, v, nullptr, &error);
    expect_refused(status, error, TANDEM_ERROR_UNSUPPORTED, field, field + " = 7 (q4_64), must be one of f32");
  }
}

// Queries, outputs and states are f32, f16 or bf16.
void not_for_queries(void**) {
  const World world;
  const Tensor good({3, kQHeads, kDim});
  for (const int32_t dtype : {TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64}) {
    tandem_tensor q = good.view, o = good.view;
    Tensor out({3, kQHeads, kDim});
    const int64_t q_len = 3;
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &world.sequence;
    args.q_lens = &q_len;
    args.q = &q;
    args.o = &out.view;
    q.dtype = dtype;
    tandem_error* error = nullptr;
    assert_int_equal(tandem_attend(world.session, &args, &error), TANDEM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(tandem_error_field(error), "q.dtype");
    tandem_error_release(error);
    q.dtype = TANDEM_F32;
    o = out.view;
    o.dtype = dtype;
    args.o = &o;
    assert_int_equal(tandem_attend(world.session, &args, &error), TANDEM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(tandem_error_field(error), "o.dtype");
    tandem_error_release(error);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(names_and_sizes),
      cmocka_unit_test(rounds_as_documented),
      cmocka_unit_test(blocks_pass_through),
      cmocka_unit_test(a_bad_element_spoils_its_group),
      cmocka_unit_test(refusals),
      cmocka_unit_test(not_for_queries),
      cmocka_unit_test(q4_64_is_not_for_keys_and_values),
  };
  return cmocka_run_group_tests_name("api_dtype_test", tests, nullptr, nullptr);
}
