// SPDX-License-Identifier: MIT
// The rule of struct_size for every struct that a function reads or writes, and tandem_tensor_init().
#include <memory>

#include "api_world.h"

using namespace tandem_test;

namespace {

// A function that takes a struct of one type, as bytes of any length.
struct Taker {
  const char* function;
  const char* field;
  uint32_t size;                     // size of the struct in this version
  std::vector<unsigned char> valid;  // a struct that is accepted
  std::function<int32_t(const void*, tandem_error**)> call;
};

template <typename T>
std::vector<unsigned char> bytes_of(const T& value) {
  const auto* data = reinterpret_cast<const unsigned char*>(&value);
  return {data, data + sizeof value};
}

// A copy whose last byte is the last of its allocation.
class Copy {
 public:
  Copy(const std::vector<unsigned char>& bytes, size_t size, uint32_t struct_size) : data_(new unsigned char[size]) {
    std::memset(data_.get(), 0, size);
    std::memcpy(get(), bytes.data(), std::min(size, bytes.size()));
    std::memcpy(get(), &struct_size, std::min<size_t>(size, sizeof struct_size));
  }
  unsigned char* get() { return data_.get(); }

 private:
  std::unique_ptr<unsigned char[]> data_;
};

void add_create_calls(World& world, std::vector<Taker>* all) {
  all->push_back({"tandem_engine_create", "struct_size", sizeof(tandem_engine_options), bytes_of(small_engine_options()),
                  [](const void* p, tandem_error** e) {
                    tandem_engine* engine = nullptr;
                    const int32_t status = tandem_engine_create(&engine, static_cast<const tandem_engine_options*>(p), e);
                    tandem_engine_release(engine);
                    return status;
                  }});
  all->push_back({"tandem_model_create", "layers[0].struct_size", sizeof(tandem_layer_options), bytes_of(plain_layer()),
                  [](const void* p, tandem_error** e) {
                    tandem_model* model = nullptr;
                    const int32_t status = tandem_model_create(&model, static_cast<const tandem_layer_options*>(p), 1, e);
                    tandem_model_release(model);
                    return status;
                  }});
  const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  all->push_back(
      {"tandem_cache_create", "struct_size", sizeof cache, bytes_of(cache), [&world](const void* p, tandem_error** e) {
         tandem_cache* made = nullptr;
         const int32_t status =
             tandem_cache_create(&made, world.engine, world.model, static_cast<const tandem_cache_options*>(p), e);
         tandem_cache_release(made);
         return status;
       }});
  all->push_back({"tandem_session_create", "struct_size", sizeof(tandem_session_options), bytes_of(world_session_options()),
                  [&world](const void* p, tandem_error** e) {
                    tandem_session* made = nullptr;
                    const int32_t status =
                        tandem_session_create(&made, world.cache, static_cast<const tandem_session_options*>(p), e);
                    tandem_session_release(made);
                    return status;
                  }});
}

void add_attend_and_append(World& world, std::vector<Taker>* all) {
  const tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;  // no sequences, so the call does nothing
  all->push_back({"tandem_attend", "struct_size", sizeof args, bytes_of(args), [&world](const void* p, tandem_error** e) {
                    return tandem_attend(world.session, static_cast<const tandem_attend_args*>(p), e);
                  }});
  static Tensor k({0, kKvHeads, kDim}), v({0, kKvHeads, kDim});
  all->push_back({"tandem_sequence_append", "k.struct_size", sizeof(tandem_tensor), bytes_of(k.view),
                  [&world](const void* p, tandem_error** e) {
                    return tandem_sequence_append(world.cache, world.sequence, 0, static_cast<const tandem_tensor*>(p),
                                                  &v.view, nullptr, e);
                  }});
}

void add_plan_calls(World& world, std::vector<Taker>* all) {
  static int64_t kv_len = 10;
  static char text[512];
  const tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  all->push_back({"tandem_plan_report", "struct_size", sizeof plan, bytes_of(plan), [](const void* p, tandem_error** e) {
                    return tandem_plan_report(text, sizeof text, nullptr, static_cast<const tandem_memory_plan*>(p), e);
                  }});
  const tandem_route_plan routes = TANDEM_ROUTE_PLAN_INIT;
  all->push_back(
      {"tandem_route_report", "struct_size", sizeof routes, bytes_of(routes), [](const void* p, tandem_error** e) {
         return tandem_route_report(text, sizeof text, nullptr, static_cast<const tandem_route_plan*>(p), e);
       }});
  all->push_back(
      {"tandem_plan_memory", "struct_size", sizeof plan, bytes_of(plan), [&world](const void* p, tandem_error** e) {
         auto* out = const_cast<tandem_memory_plan*>(static_cast<const tandem_memory_plan*>(p));
         return tandem_plan_memory(out, world.engine, world.model, nullptr, nullptr, &kv_len, 1, e);
       }});
  all->push_back(
      {"tandem_plan_memory", "cache.struct_size", sizeof cache, bytes_of(cache), [&world](const void* p, tandem_error** e) {
         tandem_memory_plan out = TANDEM_MEMORY_PLAN_INIT;
         return tandem_plan_memory(&out, world.engine, world.model, static_cast<const tandem_cache_options*>(p), nullptr,
                                   &kv_len, 1, e);
       }});
  all->push_back({"tandem_plan_memory", "session.struct_size", sizeof(tandem_session_options),
                  bytes_of(world_session_options()), [&world](const void* p, tandem_error** e) {
                    tandem_memory_plan out = TANDEM_MEMORY_PLAN_INIT;
                    return tandem_plan_memory(&out, world.engine, world.model, nullptr,
                                              static_cast<const tandem_session_options*>(p), &kv_len, 1, e);
                  }});
  all->push_back({"tandem_supports", "layer.struct_size", sizeof(tandem_layer_options), bytes_of(plain_layer()),
                  [&world](const void* p, tandem_error** e) {
                    return tandem_supports(world.engine, static_cast<const tandem_layer_options*>(p), nullptr, nullptr, e);
                  }});
}

void add_stats_calls(World& world, std::vector<Taker>* all) {
  const tandem_cache_stats cache_stats = TANDEM_CACHE_STATS_INIT;
  all->push_back({"tandem_cache_get_stats", "struct_size", sizeof cache_stats, bytes_of(cache_stats),
                  [&world](const void* p, tandem_error** e) {
                    auto* out = const_cast<tandem_cache_stats*>(static_cast<const tandem_cache_stats*>(p));
                    return tandem_cache_get_stats(out, world.cache, e);
                  }});
  const tandem_session_stats session_stats = TANDEM_SESSION_STATS_INIT;
  all->push_back({"tandem_session_get_stats", "struct_size", sizeof session_stats, bytes_of(session_stats),
                  [&world](const void* p, tandem_error** e) {
                    auto* out = const_cast<tandem_session_stats*>(static_cast<const tandem_session_stats*>(p));
                    return tandem_session_get_stats(out, world.session, e);
                  }});
}

std::vector<Taker> takers(World& world) {
  std::vector<Taker> all;
  add_create_calls(world, &all);
  add_attend_and_append(world, &all);
  add_plan_calls(world, &all);
  add_stats_calls(world, &all);
  return all;
}

void test_sizes(void**) {
  World world;
  for (const Taker& taker : takers(world)) {
    const uint32_t size = taker.size;
    // The struct itself, and the larger struct of a newer caller whose added members are zero.
    for (const uint32_t good : {size, size + 8, size + 100, 4096u}) {
      Copy copy(taker.valid, good, good);
      tandem_error* error = nullptr;
      const int32_t status = taker.call(copy.get(), &error);
      expect_ok(status, error);
      uint32_t kept;
      std::memcpy(&kept, copy.get(), sizeof kept);
      assert_int_equal(kept, good);
      for (uint32_t i = size; i < good; ++i) assert_int_equal(copy.get()[i], 0);
    }
    std::vector<Refused> cases;
    for (const uint32_t bad : {0u, 1u, 4u, size - 1, 4097u, 0x80000000u, UINT32_MAX}) {
      const std::string value = "struct_size = " + std::to_string(bad);
      Copy copy(taker.valid, std::max<size_t>(size, 4), bad);
      const std::vector<unsigned char> before(copy.get(), copy.get() + size);
      check_all_refused(world, {{"size", taker.function, TANDEM_ERROR_INVALID_ARGUMENT, taker.field, value.c_str(),
                                 [&](tandem_error** e) { return taker.call(copy.get(), e); }}});
      assert_memory_equal(copy.get(), before.data(), size);
    }
    // The struct of a newer caller that uses a member unknown to this version.
    for (const uint32_t at : {size, size + 7}) {
      Copy copy(taker.valid, size + 8, size + 8);
      copy.get()[at] = 1;
      const std::string value = "byte " + std::to_string(at) + " is not zero";
      check_all_refused(world, {{"tail", taker.function, TANDEM_ERROR_INVALID_ARGUMENT, taker.field, value.c_str(),
                                 [&](tandem_error** e) { return taker.call(copy.get(), e); }}});
    }
  }
}

// All layers have the same size, the caller's.
void test_layer_sizes(void**) {
  World world;
  std::vector<tandem_layer_options> layers(3, plain_layer());
  layers[2].struct_size = sizeof(tandem_layer_options) + 8;
  tandem_model* model = nullptr;
  check_all_refused(world, {{"unequal", "tandem_model_create", TANDEM_ERROR_INVALID_ARGUMENT, "layers[2].struct_size", "96",
                             [&](tandem_error** e) { return tandem_model_create(&model, layers.data(), 3, e); }}});
  assert_null(model);
  // Larger structs: their size is the stride.
  constexpr size_t kLarge = sizeof(tandem_layer_options) + 16;
  std::vector<unsigned char> large(3 * kLarge);
  for (int i = 0; i < 3; ++i) {
    tandem_layer_options layer = plain_layer();
    layer.struct_size = kLarge;
    layer.n_q_heads = i == 2 ? 3 : kQHeads;  // not a multiple of two
    std::memcpy(large.data() + static_cast<size_t>(i) * kLarge, &layer, sizeof layer);
  }
  check_all_refused(
      world,
      {{"strided", "tandem_model_create", TANDEM_ERROR_INVALID_ARGUMENT, "layers[2].n_q_heads", "3", [&](tandem_error** e) {
          return tandem_model_create(&model, reinterpret_cast<tandem_layer_options*>(large.data()), 3, e);
        }}});
}

void test_reserved(void**) {
  World world;
  tandem_session_options session = world_session_options();
  session.sleep_between_calls = 6;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  plan.reserved = 7;
  tandem_route_plan routes = TANDEM_ROUTE_PLAN_INIT;
  routes.reserved = 11;
  tandem_cache_stats cache_stats = TANDEM_CACHE_STATS_INIT;
  cache_stats.reserved = 8;
  tandem_session_stats session_stats = TANDEM_SESSION_STATS_INIT;
  session_stats.reserved = 9;
  Tensor k({1, kKvHeads, kDim}), v({1, kKvHeads, kDim});
  k.view.reserved = 10;
  Outputs out;
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
  const std::vector<Refused> cases = {
      {"session", "tandem_session_create", kInvalid, "sleep_between_calls", "6",
       [&](tandem_error** e) { return tandem_session_create(out.at<tandem_session*>(), world.cache, &session, e); }},
      {"plan", "tandem_plan_memory", kInvalid, "reserved", "7",
       [&](tandem_error** e) {
         return tandem_plan_memory(&plan, world.engine, world.model, nullptr, nullptr, nullptr, 0, e);
       }},
      {"report", "tandem_plan_report", kInvalid, "reserved", "7",
       [&](tandem_error** e) { return tandem_plan_report(out.at<char>(), 100, nullptr, &plan, e); }},
      {"routes", "tandem_plan", kInvalid, "reserved", "11",
       [&](tandem_error** e) { return tandem_plan(&routes, world.session, 0, nullptr, nullptr, 0, e); }},
      {"route report", "tandem_route_report", kInvalid, "reserved", "11",
       [&](tandem_error** e) { return tandem_route_report(out.at<char>(), 100, nullptr, &routes, e); }},
      {"cache stats", "tandem_cache_get_stats", kInvalid, "reserved", "8",
       [&](tandem_error** e) { return tandem_cache_get_stats(&cache_stats, world.cache, e); }},
      {"session stats", "tandem_session_get_stats", kInvalid, "reserved", "9",
       [&](tandem_error** e) { return tandem_session_get_stats(&session_stats, world.session, e); }},
      {"tensor", "tandem_sequence_append", kInvalid, "k.reserved", "10",
       [&](tandem_error** e) {
         return tandem_sequence_append(world.cache, world.sequence, 0, &k.view, &v.view, nullptr, e);
       }},
  };
  check_all_refused(world, cases, &out);
}

void test_tensor_init(void**) {
  float data[24];
  const int64_t shape[] = {2, 3, 4, 1};
  tandem_tensor t;
  std::memset(&t, 0xa5, sizeof t);
  OK(tandem_tensor_init, &t, TANDEM_F32, data, 4, shape);
  assert_int_equal(t.struct_size, sizeof t);
  assert_int_equal(t.dtype, TANDEM_F32);
  assert_int_equal(t.device_type, TANDEM_DEVICE_HOST);
  assert_int_equal(t.device_index, 0);
  assert_ptr_equal(t.data, data);
  assert_int_equal(t.n_dims, 4);
  assert_int_equal(t.reserved, 0);
  const int64_t stride[] = {12, 4, 1, 1};
  assert_memory_equal(t.shape, shape, sizeof shape);
  assert_memory_equal(t.stride, stride, sizeof stride);

  OK(tandem_tensor_init, &t, TANDEM_F16, data, 2, shape);
  assert_int_equal(t.stride[0], 3);
  assert_int_equal(t.shape[2], 0);
  assert_int_equal(t.shape[3], 0);
  const int64_t empty[] = {5, 0, 4};  // no elements, no data; strides stay positive
  OK(tandem_tensor_init, &t, TANDEM_BF16, nullptr, 3, empty);
  assert_int_equal(t.stride[0], 4);
  assert_int_equal(t.stride[1], 4);
}

void test_tensor_init_refuses(void**) {
  World world;
  Outputs out;
  auto* t = out.at<tandem_tensor>();
  alignas(8) static char data[64];
  static const int64_t shape[] = {2, 3, 4, 1}, negative[] = {2, -3, 4}, huge[] = {int64_t{1} << 31, int64_t{1} << 31, 4},
                       long_row[] = {int64_t{1} << 62};
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
  const char* f = "tandem_tensor_init";
  const std::vector<Refused> cases = {
      {"null tensor", f, kInvalid, "tensor", "NULL",
       [&](auto e) { return tandem_tensor_init(nullptr, 1, data, 1, shape, e); }},
      {"null shape", f, kInvalid, "shape", "NULL", [&](auto e) { return tandem_tensor_init(t, 1, data, 1, nullptr, e); }},
      {"null data", f, kInvalid, "tensor.data", "NULL",
       [&](auto e) { return tandem_tensor_init(t, 1, nullptr, 1, shape, e); }},
      {"dtype 0", f, kInvalid, "tensor.dtype", "0", [&](auto e) { return tandem_tensor_init(t, 0, data, 1, shape, e); }},
      {"dtype 99", f, kInvalid, "tensor.dtype", "99", [&](auto e) { return tandem_tensor_init(t, 99, data, 1, shape, e); }},
      {"0 dims", f, kInvalid, "n_dims", "0", [&](auto e) { return tandem_tensor_init(t, 1, data, 0, shape, e); }},
      {"5 dims", f, kInvalid, "n_dims", "5", [&](auto e) { return tandem_tensor_init(t, 1, data, 5, shape, e); }},
      {"negative", f, kInvalid, "tensor.shape[1]", "-3",
       [&](auto e) { return tandem_tensor_init(t, 1, data, 3, negative, e); }},
      {"too large", f, kInvalid, "shape", "2147483648", [&](auto e) { return tandem_tensor_init(t, 1, data, 3, huge, e); }},
      {"too many bytes", f, kInvalid, "tensor.shape[0]", "4611686018427387904",
       [&](auto e) { return tandem_tensor_init(t, 1, data, 1, long_row, e); }},
      {"misaligned", f, kInvalid, "tensor.data", "not aligned to f32",
       [&](auto e) { return tandem_tensor_init(t, 1, data + 2, 1, shape, e); }},
      {"misaligned f16", f, kInvalid, "tensor.data", "not aligned to f16",
       [&](auto e) { return tandem_tensor_init(t, 2, data + 1, 1, shape, e); }},
      {"past the end", f, kInvalid, "tensor.data", "past the end",
       [&](auto e) { return tandem_tensor_init(t, 1, reinterpret_cast<void*>(~uintptr_t{15}), 3, shape, e); }},
  };
  check_all_refused(world, cases, &out);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_sizes),       cmocka_unit_test(test_layer_sizes),         cmocka_unit_test(test_reserved),
      cmocka_unit_test(test_tensor_init), cmocka_unit_test(test_tensor_init_refuses),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
