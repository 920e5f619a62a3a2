// SPDX-License-Identifier: MIT
// Bad arguments of every call except attend and merge. Each gives a typed error that names field and value, and changes
// nothing.
#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kCapacity = TANDEM_ERROR_CAPACITY,
                  kNotFound = TANDEM_ERROR_NOT_FOUND, kState = TANDEM_ERROR_INVALID_STATE,
                  kUnsupported = TANDEM_ERROR_UNSUPPORTED;

void* no_memory(size_t, size_t, void*) { return nullptr; }
void no_free(void*, size_t, void*) {}
void run_in_turn(int64_t n_tasks, tandem_task_fn task, void* context, void*) {
  for (int64_t i = 0; i < n_tasks; ++i) task(i, context);
}

template <typename Options>
Options changed(Options options, std::function<void(Options&)> change) {
  change(options);
  return options;
}

void test_engine(void**) {
  World world;
  Outputs out;
  auto** engine = out.at<tandem_engine*>();
  const char* f = "tandem_engine_create";
  const auto with = [&](std::function<void(tandem_engine_options&)> change) {
    return [=](tandem_error** e) {
      const auto options = changed<tandem_engine_options>(small_engine_options(), change);
      return tandem_engine_create(engine, &options, e);
    };
  };
  check_all_refused(
      world,
      {
          {"null", f, kInvalid, "engine", "NULL",
           [](tandem_error** e) { return tandem_engine_create(nullptr, nullptr, e); }},
          {"threads", f, kInvalid, "n_threads", "-1", with([](auto& o) { o.n_threads = -1; })},
          {"threads", f, kInvalid, "n_threads", "2147483647", with([](auto& o) { o.n_threads = INT32_MAX; })},
          {"isa", f, kNotFound, "cpu_isa", "z80", with([](auto& o) { o.cpu_isa = "z80"; })},
          {"empty isa", f, kInvalid, "cpu_isa", "\"\"", with([](auto& o) { o.cpu_isa = ""; })},
          {"newline", f, kNotFound, "cpu_isa", "a?b", with([](auto& o) { o.cpu_isa = "a\nb"; })},
          {"backend", f, TANDEM_ERROR_BACKEND, "backend", "abacus", with([](auto& o) { o.backend = "abacus"; })},
          {"empty backend", f, kInvalid, "backend", "\"\"", with([](auto& o) { o.backend = ""; })},
          {"path", f, kInvalid, "backend_path", "/x", with([](auto& o) { o.backend_path = "/x"; })},
          {"empty path", f, kInvalid, "backend_path", "\"\"", with([](auto& o) { o.backend_path = ""; })},
          {"alloc", f, kInvalid, "free", "free", with([](auto& o) { o.alloc = no_memory; })},
          {"free", f, kInvalid, "alloc", "alloc", with([](auto& o) { o.free = no_free; })},
          {"spin", f, kInvalid, "spin_ns", "-2", with([](auto& o) { o.spin_ns = -2; })},
          {"pin", f, kInvalid, "pin_threads", "2", with([](auto& o) { o.pin_threads = 2; })},
          {"pin", f, kInvalid, "pin_threads", "-2", with([](auto& o) { o.pin_threads = -2; })},
          {"matmul", f, kInvalid, "matmul_rows", "-3", with([](auto& o) { o.matmul_rows = -3; })},
          {"lent threads", f, kInvalid, "n_threads", "n_threads = 0 with run",
           with([](auto& o) { o.run = run_in_turn, o.n_threads = 0; })},
          {"lent threads", f, kInvalid, "n_threads", "-1", with([](auto& o) { o.run = run_in_turn, o.n_threads = -1; })},
          {"lent threads", f, kInvalid, "n_threads", "2147483647",
           with([](auto& o) { o.run = run_in_turn, o.n_threads = INT32_MAX; })},
          {"lent threads", f, kInvalid, "pin_threads", "pin_threads = 1 with run",
           with([](auto& o) { o.run = run_in_turn, o.pin_threads = 1; })},
          {"no lent threads", f, kInvalid, "run_user", "without run", with([](auto& o) { o.run_user = &o; })},
      },
      &out);
}

void test_cache(void**) {
  World world;
  Outputs out;
  auto** cache = out.at<tandem_cache*>();
  const char* f = "tandem_cache_create";
  static const int32_t types[] = {TANDEM_F32, 8};
  const auto with = [&](std::function<void(tandem_cache_options&)> change) {
    return [=, &world](tandem_error** e) {
      tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
      change(options);
      return tandem_cache_create(cache, world.engine, world.model, &options, e);
    };
  };
  check_all_refused(
      world,
      {
          {"null", f, kInvalid, "cache", "NULL",
           [&](tandem_error** e) { return tandem_cache_create(nullptr, world.engine, world.model, nullptr, e); }},
          {"k_type", f, kInvalid, "k_type", "k_type = 99 is not a storage type (f32, f16,",
           with([](auto& o) { o.k_type = 99; })},
          {"k_type", f, kInvalid, "k_type", "-1", with([](auto& o) { o.k_type = -1; })},
          {"v_type", f, kInvalid, "v_type", "8", with([](auto& o) { o.v_type = 8; })},
          {"layers", f, kInvalid, "layer_k_types[1]", "layer_k_types[1] = 8 is not a storage type (f32, f16,",
           with([](auto& o) { o.layer_k_types = types; })},
          {"layers", f, kInvalid, "layer_v_types[1]", "layer_v_types[1] = 8 is not a storage type (f32, f16,",
           with([](auto& o) { o.layer_v_types = types; })},
          {"alias", f, kInvalid, "v_type", "f16", with([](auto& o) { o.v_type = TANDEM_F16; })},
          {"page", f, kInvalid, "page_tokens", "15", with([](auto& o) { o.page_tokens = 15; })},
          {"page", f, kInvalid, "page_tokens", "48", with([](auto& o) { o.page_tokens = 48; })},
          {"page", f, kInvalid, "page_tokens", "8192", with([](auto& o) { o.page_tokens = 8192; })},
          {"page", f, kInvalid, "page_tokens", "-128", with([](auto& o) { o.page_tokens = -128; })},
          {"cap", f, kInvalid, "host_cap_bytes", "-1", with([](auto& o) { o.host_cap_bytes = -1; })},
          {"cap", f, kInvalid, "device_cap_bytes", "-5", with([](auto& o) { o.device_cap_bytes = -5; })},
          {"cap", f, kCapacity, "host_cap_bytes", "1000", with([](auto& o) { o.host_cap_bytes = 1000; })},
      },
      &out);
}

void test_session(void**) {
  World world;
  Outputs out;
  auto** session = out.at<tandem_session*>();
  const char* f = "tandem_session_create";
  const auto with = [&](std::function<void(tandem_session_options&)> change) {
    return [=, &world](tandem_error** e) {
      const auto options = changed<tandem_session_options>(world_session_options(), change);
      return tandem_session_create(session, world.cache, &options, e);
    };
  };
  check_all_refused(
      world,
      {
          {"null", f, kInvalid, "session", "NULL",
           [&](tandem_error** e) { return tandem_session_create(nullptr, world.cache, nullptr, e); }},
          {"policy", f, kNotFound, "policy", "dice", with([](auto& o) { o.policy = "dice"; })},
          {"policy", f, kInvalid, "policy", "\"\"", with([](auto& o) { o.policy = ""; })},
          {"window", f, kInvalid, "window_tokens", "-2", with([](auto& o) { o.window_tokens = -2; })},
          {"window", f, kInvalid, "window_tokens", "window_tokens = 9223372036854775807 is not",
           with([](auto& o) { o.window_tokens = INT64_MAX; })},
          {"sinks", f, kInvalid, "sink_tokens", "sink_tokens = 2147483648 is not",
           with([](auto& o) { o.sink_tokens = INT64_C(1) << 31; })},
          {"halo", f, kInvalid, "halo_tokens", "halo_tokens = 9007199254740993 is not",
           with([](auto& o) { o.halo_tokens = (INT64_C(1) << 53) + 1; })},
          {"sinks", f, kInvalid, "sink_tokens", "-2", with([](auto& o) { o.sink_tokens = -2; })},
          {"halo", f, kInvalid, "halo_tokens", "-2", with([](auto& o) { o.halo_tokens = -2; })},
          {"alpha", f, kInvalid, "alpha", "nan", with([](auto& o) { o.alpha = NAN; })},
          {"alpha", f, kInvalid, "alpha", "1.5", with([](auto& o) { o.alpha = 1.5f; })},
          {"alpha", f, kInvalid, "alpha", "-0.25", with([](auto& o) { o.alpha = -0.25f; })},
          {"beta", f, kInvalid, "beta", "nan", with([](auto& o) { o.beta = NAN; })},
          {"beta", f, kInvalid, "beta", "inf", with([](auto& o) { o.beta = INFINITY; })},
          {"beta", f, kInvalid, "beta", "-2", with([](auto& o) { o.beta = -2.0f; })},
          {"halo", f, kInvalid, "halo_tokens", "-2", with([](auto& o) { o.halo_tokens = -2; })},
          {"route", f, kNotFound, "route", "ferry", with([](auto& o) { o.route = "ferry"; })},
          {"route", f, kInvalid, "route", "\"\"", with([](auto& o) { o.route = ""; })},
          {"fraction", f, kInvalid, "stream_fraction", "0.5", with([](auto& o) { o.stream_fraction = 0.5; })},
          {"fraction", f, kInvalid, "stream_fraction", "nan", with([](auto& o) { o.stream_fraction = NAN; })},
          {"buffer", f, kInvalid, "stream_buffer_bytes", "-1", with([](auto& o) { o.stream_buffer_bytes = -1; })},
      },
      &out);
}

void test_sequences(void**) {
  World world;
  Outputs out;
  auto* id = out.at<int64_t>();
  tandem_cache* cache = world.cache;
  const int64_t s = world.sequence;
  const std::vector<Refused> cases = {
      {"null", "tandem_sequence_create", kInvalid, "sequence", "NULL",
       [=](tandem_error** e) { return tandem_sequence_create(nullptr, cache, e); }},
      {"null", "tandem_sequence_fork", kInvalid, "fork", "NULL",
       [=](tandem_error** e) { return tandem_sequence_fork(nullptr, cache, s, e); }},
      {"null", "tandem_sequence_length", kInvalid, "n_tokens", "NULL",
       [=](tandem_error** e) { return tandem_sequence_length(nullptr, cache, s, 0, e); }},
      {"null", "tandem_sequence_digest", kInvalid, "digest", "NULL",
       [=](tandem_error** e) { return tandem_sequence_digest(nullptr, cache, s, e); }},
      {"layer", "tandem_sequence_length", kInvalid, "layer_idx", "2",
       [=](tandem_error** e) { return tandem_sequence_length(id, cache, s, 2, e); }},
      {"layer", "tandem_sequence_length", kInvalid, "layer_idx", "-1",
       [=](tandem_error** e) { return tandem_sequence_length(id, cache, s, -1, e); }},
      {"negative", "tandem_sequence_reserve", kInvalid, "n_tokens", "-1",
       [=](tandem_error** e) { return tandem_sequence_reserve(cache, s, -1, e); }},
      {"huge", "tandem_sequence_reserve", kCapacity, "n_tokens", "9223372036854775807",
       [=](tandem_error** e) { return tandem_sequence_reserve(cache, s, INT64_MAX, e); }},
      {"long", "tandem_sequence_reserve", kCapacity, "n_tokens", "2147483737",
       [=](tandem_error** e) { return tandem_sequence_reserve(cache, s, INT32_MAX, e); }},
      {"negative", "tandem_sequence_truncate", kInvalid, "n_tokens", "-1",
       [=](tandem_error** e) { return tandem_sequence_truncate(cache, s, -1, e); }},
      {"beyond", "tandem_sequence_truncate", kInvalid, "n_tokens", "91",
       [=](tandem_error** e) { return tandem_sequence_truncate(cache, s, kTokens + 1, e); }},
      {"first", "tandem_sequence_remove", kInvalid, "first", "-1",
       [=](tandem_error** e) { return tandem_sequence_remove(cache, s, -1, 1, 0, e); }},
      {"first", "tandem_sequence_remove", kInvalid, "first", "91",
       [=](tandem_error** e) { return tandem_sequence_remove(cache, s, kTokens + 1, 0, 0, e); }},
      {"count", "tandem_sequence_remove", kInvalid, "n_tokens", "-1",
       [=](tandem_error** e) { return tandem_sequence_remove(cache, s, 5, -1, 0, e); }},
      {"count", "tandem_sequence_remove", kInvalid, "n_tokens", "9223372036854775807",
       [=](tandem_error** e) { return tandem_sequence_remove(cache, s, 5, INT64_MAX, 0, e); }},
      {"flag", "tandem_sequence_remove", kInvalid, "shift_positions", "2",
       [=](tandem_error** e) { return tandem_sequence_remove(cache, s, 5, 1, 2, e); }},
      {"shift", "tandem_sequence_remove", kUnsupported, "shift_positions", "1",
       [=](tandem_error** e) { return tandem_sequence_remove(cache, s, 5, 1, 1, e); }},
  };
  check_all_refused(world, cases, &out);
}

// Sequences that were never created, were dropped, or are out of range.
void test_unknown_sequences(void**) {
  World world;
  Outputs out;
  auto* id = out.at<int64_t>();
  auto* digest = out.at<uint64_t>();
  tandem_cache* cache = world.cache;
  tandem_session* session = world.session;
  const int64_t one = 1;
  Tensor k({1, kKvHeads, kDim}), v({1, kKvHeads, kDim});
  for (const int64_t bad : {int64_t{1000}, world.dropped, int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    const std::string value = std::to_string(bad);
    std::vector<Refused> cases;
    const auto add = [&](const char* function, std::function<int32_t(tandem_error**)> call, const char* field = "sequence") {
      cases.push_back({"unknown id", function, kNotFound, field, value.c_str(), std::move(call)});
    };
    add("tandem_sequence_fork", [&](auto e) { return tandem_sequence_fork(id, cache, bad, e); });
    add("tandem_sequence_drop", [&](auto e) { return tandem_sequence_drop(cache, bad, e); });
    add("tandem_sequence_reserve", [&](auto e) { return tandem_sequence_reserve(cache, bad, 1, e); });
    add("tandem_sequence_truncate", [&](auto e) { return tandem_sequence_truncate(cache, bad, 0, e); });
    add("tandem_sequence_remove", [&](auto e) { return tandem_sequence_remove(cache, bad, 0, 0, 0, e); });
    add("tandem_sequence_append",
        [&](auto e) { return tandem_sequence_append(cache, bad, 0, &k.view, &v.view, nullptr, e); });
    add("tandem_sequence_read", [&](auto e) { return tandem_sequence_read(&k.view, &v.view, cache, bad, 0, 0, e); });
    add("tandem_sequence_length", [&](auto e) { return tandem_sequence_length(id, cache, bad, 0, e); });
    add("tandem_sequence_digest", [&](auto e) { return tandem_sequence_digest(digest, cache, bad, e); });
    add("tandem_session_commit", [&](auto e) { return tandem_session_commit(session, bad, nullptr, 0, e); });
    add("tandem_session_selection",
        [&](auto e) { return tandem_session_selection(id + 1, nullptr, 4, id, session, bad, 0, 0, 0, e); });
    add(
        "tandem_step_begin", [&](auto e) { return tandem_step_begin(session, &bad, &one, 1, nullptr, e); }, "sequences");
    check_all_refused(world, cases, &out);
  }
}

void test_uneven(void**) {
  World world;
  Outputs out;
  Tensor k({1, kKvHeads, kDim}), v({1, kKvHeads, kDim});
  OK(tandem_sequence_append, world.cache, world.sequence, 0, &k.view, &v.view, nullptr);
  tandem_cache* cache = world.cache;
  const int64_t s = world.sequence;
  static const int64_t one = 1;
  check_all_refused(world,
                    {
                        {"fork", "tandem_sequence_fork", kState, "sequence", "layer 1",
                         [&](tandem_error** e) { return tandem_sequence_fork(out.at<int64_t>(), cache, s, e); }},
                        {"remove", "tandem_sequence_remove", kState, "sequence", "layer 1",
                         [&](tandem_error** e) { return tandem_sequence_remove(cache, s, 0, 1, 0, e); }},
                        {"step", "tandem_step_begin", kState, "sequences", "layer 1",
                         [&](tandem_error** e) { return tandem_step_begin(world.session, &s, &one, 1, nullptr, e); }},
                    },
                    &out);
}

// Rows to append, and outputs to read them into.
struct RowTensors {
  Tensor k{{2, kKvHeads, kDim}}, v{{2, kKvHeads, kDim}};
  Outputs out;
  tandem_tensor to_k, to_v;

  RowTensors() {
    const int64_t shape[] = {2, kKvHeads, kDim};
    OK(tandem_tensor_init, &to_k, TANDEM_F32, out.at<float>(), 3, shape);
    OK(tandem_tensor_init, &to_v, TANDEM_F32, out.at<float>(4096), 3, shape);
  }
};

const std::vector<TensorCase> kTensorCases = {
    {kInvalid, "dtype", "0", [](auto& t) { t.dtype = 0; }},
    {kInvalid, "dtype", "99", [](auto& t) { t.dtype = 99; }},
    {kInvalid, "device_type", "7", [](auto& t) { t.device_type = 7; }},
    {kUnsupported, "device_type", "takes host memory alone", [](auto& t) { t.device_type = TANDEM_DEVICE_CUDA; }},
    {kInvalid, "device_index", "1", [](auto& t) { t.device_index = 1; }},
    {kInvalid, "data", "NULL", [](auto& t) { t.data = nullptr; }},
    {kInvalid, "data", "not aligned", [](auto& t) { t.data = static_cast<char*>(t.data) + 2; }},
    {kInvalid, "data", "past the end", [](auto& t) { t.data = reinterpret_cast<void*>(~uintptr_t{63}); }},
    {kInvalid, "n_dims", "2", [](auto& t) { t.n_dims = 2; }},
    {kInvalid, "n_dims", "-1", [](auto& t) { t.n_dims = -1; }},
    {kInvalid, "n_dims", "1000000", [](auto& t) { t.n_dims = 1000000; }},
    {kInvalid, "shape[0]", "-2", [](auto& t) { t.shape[0] = -2; }},
    {kInvalid, "shape[1]", "3, must be n_kv_heads = 2", [](auto& t) { t.shape[1] = 3; }},
    {kInvalid, "shape[2]", "63", [](auto& t) { t.shape[2] = 63; }},
    {kInvalid, "shape[0]", "9223372036854775807", [](auto& t) { t.shape[0] = INT64_MAX; }},
    {kInvalid, "stride[2]", "2", [](auto& t) { t.stride[2] = 2; }},
    {kInvalid, "stride[2]", "0", [](auto& t) { t.stride[2] = 0; }},
    {kInvalid, "stride[1]", "0", [](auto& t) { t.stride[1] = 0; }},
    {kInvalid, "stride[1]", "63 is less", [](auto& t) { t.stride[1] = 63; }},
    {kInvalid, "stride[0]", "-128", [](auto& t) { t.stride[0] = -128; }},
    {kInvalid, "stride[0]", "127 is less", [](auto& t) { t.stride[0] = 127; }},
    {kInvalid, "shape[0]", "9223372036854775807 is more", [](auto& t) { t.stride[0] = INT64_MAX; }},
};

void test_row_tensors(void**) {
  World world;
  RowTensors rows;
  tandem_cache* cache = world.cache;
  const int64_t s = world.sequence;
  std::vector<Refused> cases;
  std::vector<std::string> fields;
  fields.reserve(4 * kTensorCases.size());
  for (const TensorCase& c : kTensorCases) {
    for (const char* which : {"k", "v"}) {
      fields.push_back(std::string(which) + "." + c.member);
      const bool is_k = which[0] == 'k';
      cases.push_back({c.member, "tandem_sequence_append", c.status, fields.back().c_str(), c.value, [=, &rows](auto e) {
                         tandem_tensor changed_k = rows.k.view, changed_v = rows.v.view;
                         c.change(is_k ? changed_k : changed_v);
                         return tandem_sequence_append(cache, s, 0, &changed_k, &changed_v, nullptr, e);
                       }});
      cases.push_back({c.member, "tandem_sequence_read", c.status, fields.back().c_str(), c.value, [=, &rows](auto e) {
                         tandem_tensor changed_k = rows.to_k, changed_v = rows.to_v;
                         c.change(is_k ? changed_k : changed_v);
                         return tandem_sequence_read(&changed_k, &changed_v, cache, s, 0, 0, e);
                       }});
    }
  }
  for (const int64_t n_tokens : {0, 1})  // strides that overflow
    cases.push_back({"stride[0]", "tandem_sequence_append", kInvalid, "k.stride[0]", "4611686018427387903 is more bytes",
                     [=, &rows](auto e) {
                       tandem_tensor k = rows.k.view, v = rows.v.view;
                       k.shape[0] = v.shape[0] = n_tokens;
                       k.stride[0] = INT64_MAX / 2;
                       return tandem_sequence_append(cache, s, 0, &k, &v, nullptr, e);
                     }});
  check_all_refused(world, cases, &rows.out);
}

void test_append_and_read(void**) {
  World world;
  RowTensors rows;
  tandem_tensor *k = &rows.k.view, *v = &rows.v.view, *to_k = &rows.to_k, *to_v = &rows.to_v;
  tandem_cache* cache = world.cache;
  const int64_t s = world.sequence;
  const std::vector<Refused> cases = {
      {"null k", "tandem_sequence_append", kInvalid, "k", "NULL",
       [&](auto e) { return tandem_sequence_append(cache, s, 0, nullptr, v, nullptr, e); }},
      {"null v", "tandem_sequence_append", kInvalid, "v", "NULL",
       [&](auto e) { return tandem_sequence_append(cache, s, 0, k, nullptr, nullptr, e); }},
      {"aliased v", "tandem_sequence_append", kInvalid, "v", "V aliases K",
       [&](auto e) { return tandem_sequence_append(cache, s, 1, k, v, nullptr, e); }},
      {"too long", "tandem_sequence_append", kCapacity, "k.shape[0]", "2147483737 tokens",
       [&](auto e) {
         tandem_tensor long_k = *k, long_v = *v;  // refused before anything is read
         long_k.shape[0] = long_v.shape[0] = INT32_MAX;
         return tandem_sequence_append(cache, s, 0, &long_k, &long_v, nullptr, e);
       }},
      {"layer", "tandem_sequence_append", kInvalid, "layer_idx", "2",
       [&](auto e) { return tandem_sequence_append(cache, s, 2, k, v, nullptr, e); }},
      {"layer", "tandem_sequence_append", kInvalid, "layer_idx", "-2147483648",
       [&](auto e) { return tandem_sequence_append(cache, s, INT32_MIN, k, v, nullptr, e); }},
      {"stream", "tandem_sequence_append", kInvalid, "stream", "must be NULL",
       [&](auto e) { return tandem_sequence_append(cache, s, 0, k, v, k, e); }},
      {"null both", "tandem_sequence_read", kInvalid, "k", "NULL",
       [&](auto e) { return tandem_sequence_read(nullptr, nullptr, cache, s, 0, 0, e); }},
      {"aliased v", "tandem_sequence_read", kInvalid, "v", "V aliases K",
       [&](auto e) { return tandem_sequence_read(to_k, to_v, cache, s, 1, 0, e); }},
      {"layer", "tandem_sequence_read", kInvalid, "layer_idx", "2",
       [&](auto e) { return tandem_sequence_read(to_k, to_v, cache, s, 2, 0, e); }},
      {"overlap", "tandem_sequence_read", kInvalid, "k.data", "overlaps v",
       [&](auto e) { return tandem_sequence_read(to_k, to_k, cache, s, 0, 0, e); }},
      {"first", "tandem_sequence_read", kInvalid, "first", "-1",
       [&](auto e) { return tandem_sequence_read(to_k, to_v, cache, s, 0, -1, e); }},
      {"beyond", "tandem_sequence_read", kInvalid, "first", "89",
       [&](auto e) { return tandem_sequence_read(to_k, to_v, cache, s, 0, kTokens - 1, e); }},
      {"far beyond", "tandem_sequence_read", kInvalid, "first", "9223372036854775807",
       [&](auto e) { return tandem_sequence_read(to_k, to_v, cache, s, 0, INT64_MAX, e); }},
  };
  check_all_refused(world, cases, &rows.out);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_engine),
      cmocka_unit_test(test_cache),
      cmocka_unit_test(test_session),
      cmocka_unit_test(test_sequences),
      cmocka_unit_test(test_unknown_sequences),
      cmocka_unit_test(test_uneven),
      cmocka_unit_test(test_row_tensors),
      cmocka_unit_test(test_append_and_read),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
