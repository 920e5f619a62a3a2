// SPDX-License-Identifier: MIT
// Bad arguments of attend, commit, step, selection, statistics and plan.
#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kCapacity = TANDEM_ERROR_CAPACITY,
                  kNotFound = TANDEM_ERROR_NOT_FOUND, kState = TANDEM_ERROR_INVALID_STATE,
                  kUnsupported = TANDEM_ERROR_UNSUPPORTED;

// A valid attend of two sequences with 3 + 2 tokens. Its outputs lie in `out`. A case changes one thing.
struct Attend {
  int64_t sequences[2];
  int64_t q_lens[2] = {3, 2};
  int32_t parent_idx[5] = {-1, 0, 0, -1, 0};
  Tensor q{{5, kQHeads, kDim}, 1}, k{{5, kKvHeads, kDim}, 2}, v{{5, kKvHeads, kDim}, 3};
  tandem_tensor o, lse;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;

  Attend(const World& world, Outputs& out) : sequences{world.sequence, world.other} {
    const int64_t o_shape[] = {5, kQHeads, kDim}, lse_shape[] = {5, kQHeads};
    OK(tandem_tensor_init, &o, TANDEM_F32, out.at<float>(), 3, o_shape);
    OK(tandem_tensor_init, &lse, TANDEM_F32, out.at<float>(32768), 2, lse_shape);
    args.n_sequences = 2;
    args.sequences = sequences;
    args.q_lens = q_lens;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o;
    args.lse = &lse;
  }
  Attend(const Attend&) = delete;
};

struct Case {
  const char* name;
  int32_t status;
  const char* field;
  const char* value;
  std::function<void(Attend&)> change;
};

void check_attends(const World& world, const std::vector<Case>& cases) {
  Outputs out;
  std::vector<Refused> refused;
  for (const Case& c : cases)
    refused.push_back({c.name, "tandem_attend", c.status, c.field, c.value, [&world, &out, &c](tandem_error** e) {
                         Attend attend(world, out);
                         c.change(attend);
                         return tandem_attend(world.session, &attend.args, e);
                       }});
  check_all_refused(world, refused, &out);
}

void test_arguments(void**) {
  World world;
  check_all_refused(world, {{"null", "tandem_attend", kInvalid, "args", "NULL",
                             [&](auto e) { return tandem_attend(world.session, nullptr, e); }}});
  check_attends(
      world,
      {
          {"flags", kInvalid, "flags", "0x4", [](auto& a) { a.args.flags = 4; }},
          {"flags", kInvalid, "flags", "0x80000001", [](auto& a) { a.args.flags = 0x80000001u; }},
          {"flags", kInvalid, "flags", "0x3",
           [](auto& a) { a.args.flags = TANDEM_ATTEND_SPECULATIVE | TANDEM_ATTEND_PARTIAL; }},
          {"layer", kInvalid, "layer_idx", "2", [](auto& a) { a.args.layer_idx = 2; }},
          {"layer", kInvalid, "layer_idx", "-1", [](auto& a) { a.args.layer_idx = -1; }},
          {"count", kInvalid, "n_sequences", "-1", [](auto& a) { a.args.n_sequences = -1; }},
          {"fewer", kInvalid, "q.shape[0]", "5, must be the sum of q_lens = 3", [](auto& a) { a.args.n_sequences = 1; }},
          {"none", kInvalid, "q.shape[0]", "5, must be the sum of q_lens = 0", [](auto& a) { a.args.n_sequences = 0; }},
          {"null", kInvalid, "sequences", "NULL", [](auto& a) { a.args.sequences = nullptr; }},
          {"null", kInvalid, "q_lens", "NULL", [](auto& a) { a.args.q_lens = nullptr; }},
          {"twice", kInvalid, "sequences", "is given twice", [](auto& a) { a.sequences[1] = a.sequences[0]; }},
          {"unknown", kNotFound, "sequences", "1000", [](auto& a) { a.sequences[1] = 1000; }},
          {"unknown", kNotFound, "sequences", "-9223372036854775808", [](auto& a) { a.sequences[0] = INT64_MIN; }},
          {"dropped", kNotFound, "sequences", "= 3", [](auto& a) { a.sequences[1] = 3; }},
          {"negative", kInvalid, "q_lens[1]", "-2", [](auto& a) { a.q_lens[1] = -2; }},
          {"huge", kCapacity, "q_lens[0]", "9223372036854775807", [](auto& a) { a.q_lens[0] = INT64_MAX; }},
          {"sum", kInvalid, "q.shape[0]", "sum of q_lens = 4", [](auto& a) { a.q_lens[1] = 1; }},
          {"sum", kInvalid, "q.shape[0]", "sum of q_lens = 4294967294",
           [](auto& a) { a.q_lens[0] = a.q_lens[1] = INT32_MAX; }},
          {"null", kInvalid, "q", "NULL", [](auto& a) { a.args.q = nullptr; }},
          {"null", kInvalid, "o", "NULL", [](auto& a) { a.args.o = nullptr; }},
          {"v alone", kInvalid, "k", "NULL", [](auto& a) { a.args.k = nullptr; }},
          {"k alone", kInvalid, "v", "NULL", [](auto& a) { a.args.v = nullptr; }},
          {"aliased", kInvalid, "v", "V aliases K", [](auto& a) { a.args.layer_idx = 1; }},
          {"nothing", kInvalid, "k", "NULL with TANDEM_ATTEND_SPECULATIVE",
           [](auto& a) { a.args.k = a.args.v = nullptr, a.args.flags = TANDEM_ATTEND_SPECULATIVE; }},
          {"stream", kInvalid, "stream", "must be NULL", [](auto& a) { a.args.stream = &a; }},
          {"tree", kInvalid, "parent_idx", "without TANDEM_ATTEND_SPECULATIVE",
           [](auto& a) { a.args.parent_idx = a.parent_idx; }},
          {"tree", kInvalid, "parent_idx[0]", "-2",
           [](auto& a) { a.args.parent_idx = a.parent_idx, a.args.flags = 1, a.parent_idx[0] = -2; }},
          {"own", kInvalid, "parent_idx[1]", "= 1 ",
           [](auto& a) { a.args.parent_idx = a.parent_idx, a.args.flags = 1, a.parent_idx[1] = 1; }},
          {"later", kInvalid, "parent_idx[2]", "2147483647",
           [](auto& a) { a.args.parent_idx = a.parent_idx, a.args.flags = 1, a.parent_idx[2] = INT32_MAX; }},
          {"of another sequence", kInvalid, "parent_idx[3]", "= 2 ",
           [](auto& a) { a.args.parent_idx = a.parent_idx, a.args.flags = 1, a.parent_idx[3] = 2; }},
          {"too many queries", kInvalid, "q_lens", "2", [](auto& a) { a.args.k = a.args.v = nullptr; }},
      });
}

const std::vector<TensorCase> kTensorCases = {
    {kInvalid, "struct_size", "95", [](auto& t) { t.struct_size = 95; }},
    {kInvalid, "dtype", "-1", [](auto& t) { t.dtype = -1; }},
    {kInvalid, "dtype", "8", [](auto& t) { t.dtype = 8; }},
    {kInvalid, "device_type", "-1", [](auto& t) { t.device_type = -1; }},
    {kInvalid, "device_index", "-1", [](auto& t) { t.device_index = -1; }},
    {kInvalid, "reserved", "3", [](auto& t) { t.reserved = 3; }},
    {kInvalid, "n_dims", "4", [](auto& t) { t.n_dims = 4; }},
    {kInvalid, "n_dims", "0", [](auto& t) { t.n_dims = 0; }},
    {kInvalid, "shape[0]", "-5", [](auto& t) { t.shape[0] = -5; }},
    {kInvalid, "shape[1]", "5", [](auto& t) { t.shape[1] = 5; }},
    {kInvalid, "shape[1]", "0", [](auto& t) { t.shape[1] = 0; }},
    {kInvalid, "stride[0]", "0", [](auto& t) { t.stride[0] = 0; }},
    {kInvalid, "stride[0]", "3 is less", [](auto& t) { t.stride[0] = 3; }},
    {kInvalid, "shape[0]", "more than memory can hold", [](auto& t) { t.stride[0] = INT64_MAX / 3; }},
    {kInvalid, "data", "NULL", [](auto& t) { t.data = nullptr; }},
    {kInvalid, "data", "not aligned", [](auto& t) { t.data = static_cast<char*>(t.data) + 1; }},
    {kInvalid, "data", "past the end", [](auto& t) { t.data = reinterpret_cast<void*>(~uintptr_t{63}); }},
};

void test_tensors(void**) {
  World world;
  std::vector<Case> cases;
  std::vector<std::string> fields;
  const char* const names[] = {"q", "k", "v", "o", "lse"};
  fields.reserve(std::size(names) * kTensorCases.size());
  for (int which = 0; which < 5; ++which) {
    for (const TensorCase& c : kTensorCases) {
      fields.push_back(std::string(names[which]) + "." + c.member);
      cases.push_back({c.member, c.status, fields.back().c_str(), c.value, [which, &c](Attend& a) {
                         tandem_tensor* const tensors[] = {&a.q.view, &a.k.view, &a.v.view, &a.o, &a.lse};
                         c.change(*tensors[which]);
                       }});
    }
  }
  const std::vector<Case> more = {
      {"q on a device", kUnsupported, "q.device_type", "the engine has no device",
       [](auto& a) { a.q.view.device_type = TANDEM_DEVICE_CUDA; }},
      {"k on a device", kInvalid, "k.device_type", "1 (CUDA), but q is in host memory",
       [](auto& a) { a.k.view.device_type = TANDEM_DEVICE_CUDA; }},
      {"v on a device", kInvalid, "v.device_type", "1 (CUDA), but q is in host memory",
       [](auto& a) { a.v.view.device_type = TANDEM_DEVICE_CUDA; }},
      {"o on a device", kInvalid, "o.device_type", "1 (CUDA), but q is in host memory",
       [](auto& a) { a.o.device_type = TANDEM_DEVICE_CUDA; }},
      {"lse on a device", kInvalid, "lse.device_type", "1 (CUDA), but q is in host memory",
       [](auto& a) { a.lse.device_type = TANDEM_DEVICE_CUDA; }},
      {"lse type", kInvalid, "lse.dtype", "2 (f16), must be f32", [](auto& a) { a.lse.dtype = TANDEM_F16; }},
      {"lse type", kInvalid, "lse.dtype", "3 (bf16), must be f32", [](auto& a) { a.lse.dtype = TANDEM_BF16; }},
      {"q length", kInvalid, "q.shape[0]", "4, must be",
       [](auto& a) { a.q.view.shape[0] = a.k.view.shape[0] = a.v.view.shape[0] = a.o.shape[0] = a.lse.shape[0] = 4; }},
      {"k length", kInvalid, "k.shape[0]", "4, must be n_tokens = 5: the axes are [n_tokens, n_kv_heads, k_head_dim]",
       [](auto& a) { a.k.view.shape[0] = 4; }},
      {"v length", kInvalid, "v.shape[0]", "6, must be n_tokens = 5", [](auto& a) { a.v.view.shape[0] = 6; }},
      {"o length", kInvalid, "o.shape[0]", "4, must be n_tokens = 5", [](auto& a) { a.o.shape[0] = 4; }},
      {"o heads", kInvalid, "o.shape[1]", "2, must be n_q_heads = 4", [](auto& a) { a.o.shape[1] = 2; }},
      {"o dims", kInvalid, "o.shape[2]", "32, must be v_head_dim = 64", [](auto& a) { a.o.shape[2] = 32; }},
      {"q dims", kInvalid, "q.shape[2]", "128, must be k_head_dim = 64", [](auto& a) { a.q.view.shape[2] = 128; }},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  check_attends(world, cases);
}

template <typename T>
void* moved(T* data, int64_t elements) {
  return static_cast<float*>(static_cast<void*>(data)) + elements;
}

void test_overlap(void**) {
  World world;
  constexpr int64_t kOSize = 5 * kQHeads * kDim;
  check_attends(
      world,
      {
          {"o on q", kInvalid, "o.data", "overlaps q", [](auto& a) { a.o.data = a.q.view.data; }},
          {"end of o on q", kInvalid, "o.data", "overlaps q", [](auto& a) { a.q.view.data = moved(a.o.data, kOSize - 1); }},
          {"o on k", kInvalid, "o.data", "overlaps k", [](auto& a) { a.k.view.data = a.o.data; }},
          {"o on v", kInvalid, "o.data", "overlaps v", [](auto& a) { a.v.view.data = moved(a.o.data, 700); }},
          {"lse on o", kInvalid, "o.data", "overlaps lse", [](auto& a) { a.lse.data = moved(a.o.data, 4); }},
          {"lse on q", kInvalid, "lse.data", "overlaps q", [](auto& a) { a.lse.data = a.q.view.data; }},
          {"lse on sequences", kInvalid, "lse.data", "overlaps sequences", [](auto& a) { a.lse.data = a.sequences; }},
          {"lse on q_lens", kInvalid, "lse.data", "overlaps q_lens", [](auto& a) { a.lse.data = a.q_lens; }},
          {"lse on parents", kInvalid, "lse.data", "overlaps parent_idx",
           [](auto& a) { a.lse.data = a.parent_idx, a.args.parent_idx = a.parent_idx, a.args.flags = 1; }},
          {"a row of q meets the next of o", kInvalid, "o.data", "overlaps q",
           [](auto& a) {
             a.q.view.stride[0] = a.o.stride[0] = 2 * kQHeads * kDim;
             a.q.view.data = moved(a.o.data, kQHeads * kDim + 1);
           }},
          {"rows of o and q meet", kInvalid, "o.data", "overlaps q",
           [](auto& a) {
             a.q.view.stride[0] = a.o.stride[0] = 2 * kQHeads * kDim;
             a.q.view.data = moved(a.o.data, kQHeads * kDim - 1);
           }},
      });
}

// Makes a sequence too long, with one head. With two heads no call can have that many queries.
void test_too_long(void**) {
  World world;
  tandem_layer_options layer = plain_layer();
  layer.n_q_heads = layer.n_kv_heads = 1;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  OK(tandem_model_create, &model, &layer, 1);
  OK(tandem_cache_create, &cache, world.engine, model, nullptr);
  OK(tandem_session_create, &session, cache, nullptr);
  int64_t sequence = 0;
  OK(tandem_sequence_create, &sequence, cache);
  Tensor q({2, 1, kDim}, 1), k({2, 1, kDim}, 2), v({2, 1, kDim}, 3);
  OK(tandem_sequence_append, cache, sequence, 0, &k.view, &v.view, nullptr);
  // The call is refused before it reads or writes anything. o begins where the other tensors end.
  const int64_t q_len = INT32_MAX;
  tandem_tensor o = q.view;
  for (tandem_tensor* tensor : {&q.view, &k.view, &v.view, &o}) tensor->shape[0] = q_len;
  o.data = reinterpret_cast<void*>(uintptr_t{1} << 60);
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &q.view;
  args.k = &k.view;
  args.v = &v.view;
  args.o = &o;
  check_all_refused(world, {{"too long", "tandem_attend", kCapacity, "q_lens", "2147483649 tokens",
                             [&](auto e) { return tandem_attend(session, &args, e); }}});
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
}

// Slices of one buffer do not overlap although their ranges do: q, k, v and o are columns of one matrix.
void test_fused_buffer(void**) {
  World fused, apart;
  constexpr int64_t kQ = kQHeads * kDim, kK = kKvHeads * kDim, kRow = 2 * kQ + 2 * kK;
  std::vector<float> buffer(5 * kRow, 7.0f), o(5 * kQ), lse(5 * kQHeads);
  Outputs out;
  Attend a(fused, out), b(apart, out);
  const auto slice = [&](tandem_tensor& t, int64_t offset, const Tensor* from, int64_t width) {
    for (int64_t i = 0; from != nullptr && i < 5 * width; ++i)
      buffer[static_cast<size_t>(i / width * kRow + offset + i % width)] = from->values[static_cast<size_t>(i)];
    t.data = buffer.data() + offset;
    t.stride[0] = kRow;
  };
  slice(a.q.view, 0, &a.q, kQ);
  slice(a.k.view, kQ, &a.k, kK);
  slice(a.v.view, kQ + kK, &a.v, kK);
  slice(a.o, kQ + 2 * kK, nullptr, kQ);
  a.lse.data = lse.data();
  b.o.data = o.data();
  OK(tandem_attend, fused.session, &a.args);
  OK(tandem_attend, apart.session, &b.args);
  for (int64_t i = 0; i < 5 * kQ; ++i) {
    const float got = buffer[static_cast<size_t>(i / kQ * kRow + kQ + 2 * kK + i % kQ)];
    assert_true(std::fabs(got - o[static_cast<size_t>(i)]) < 1e-6f);
  }
  assert_memory_equal(lse.data(), b.lse.data, lse.size() * sizeof(float));
}

void test_nothing_to_do(void**) {
  World world;
  const Snapshot before(world);
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  OK(tandem_attend, world.session, &args);
  Tensor q({0, kQHeads, kDim}), k({0, kKvHeads, kDim}), v({0, kKvHeads, kDim}), o({0, kQHeads, kDim});
  args.q = &q.view;
  args.k = &k.view;
  args.v = &v.view;
  args.o = &o.view;
  OK(tandem_attend, world.session, &args);
  before.expect_same(Snapshot(world));
}

void test_commit(void**) {
  World world;
  tandem_session* session = world.session;
  const int64_t s = world.sequence;
  const int64_t descending[] = {2, 1}, equal[] = {1, 1}, below[] = {-1}, past[] = {INT64_MAX};
  const char* commit = "tandem_session_commit";
  const std::vector<Refused> cases = {
      {"null", commit, kInvalid, "kept_idx", "NULL",
       [&](auto e) { return tandem_session_commit(session, s, nullptr, 1, e); }},
      {"count", commit, kInvalid, "n_kept", "-1", [&](auto e) { return tandem_session_commit(session, s, below, -1, e); }},
      {"order", commit, kInvalid, "kept_idx[1]", "1",
       [&](auto e) { return tandem_session_commit(session, s, descending, 2, e); }},
      {"order", commit, kInvalid, "kept_idx[1]", "1",
       [&](auto e) { return tandem_session_commit(session, s, equal, 2, e); }},
      {"low", commit, kInvalid, "kept_idx[0]", "-1", [&](auto e) { return tandem_session_commit(session, s, below, 1, e); }},
      {"high", commit, kInvalid, "kept_idx[0]", "9223372036854775807",
       [&](auto e) { return tandem_session_commit(session, s, past, 1, e); }},
      {"nothing", commit, kState, "sequence", "no speculative tokens",
       [&](auto e) { return tandem_session_commit(session, s, nullptr, 0, e); }},
  };
  check_all_refused(world, cases);
}

void test_step(void**) {
  World world;
  tandem_session* session = world.session;
  const int64_t s = world.sequence, pair[] = {s, s};
  const int64_t lens[] = {1, 1}, negative = -1, huge = INT64_MAX, long_step = INT32_MAX;
  int64_t stream = 0;
  const char *begin = "tandem_step_begin", *end = "tandem_step_end";
  const std::vector<Refused> cases = {
      {"null", begin, kInvalid, "sequences", "NULL",
       [&](auto e) { return tandem_step_begin(session, nullptr, lens, 1, nullptr, e); }},
      {"null", begin, kInvalid, "q_lens", "NULL",
       [&](auto e) { return tandem_step_begin(session, &s, nullptr, 1, nullptr, e); }},
      {"count", begin, kInvalid, "n_sequences", "-3",
       [&](auto e) { return tandem_step_begin(session, &s, lens, -3, nullptr, e); }},
      {"twice", begin, kInvalid, "sequences", "twice",
       [&](auto e) { return tandem_step_begin(session, pair, lens, 2, nullptr, e); }},
      {"negative", begin, kInvalid, "q_lens[0]", "-1",
       [&](auto e) { return tandem_step_begin(session, &s, &negative, 1, nullptr, e); }},
      {"huge", begin, kCapacity, "q_lens[0]", "9223372036854775807",
       [&](auto e) { return tandem_step_begin(session, &s, &huge, 1, nullptr, e); }},
      {"long", begin, kCapacity, "q_lens[0]", "2147483647",
       [&](auto e) { return tandem_step_begin(session, &s, &long_step, 1, nullptr, e); }},
      {"stream", begin, kInvalid, "stream", "must be NULL",
       [&](auto e) { return tandem_step_begin(session, &s, lens, 1, &stream, e); }},
      {"stream", end, kInvalid, "stream", "must be NULL", [&](auto e) { return tandem_step_end(session, &stream, e); }},
      {"not open", end, kState, "session", "no step is open", [&](auto e) { return tandem_step_end(session, nullptr, e); }},
  };
  check_all_refused(world, cases);
}

void test_selection_and_stats(void**) {
  World world;
  Outputs out;
  auto* idx = out.at<int64_t>(64);
  auto* n = out.at<int64_t>();
  auto* maw = out.at<float>(4096);
  tandem_session* session = world.session;
  const int64_t s = world.sequence;
  const char* selection = "tandem_session_selection";
  const std::vector<Refused> cases = {
      {"null", selection, kInvalid, "n_kept", "NULL",
       [&](auto e) { return tandem_session_selection(idx, maw, 4, nullptr, session, s, 0, 0, 0, e); }},
      {"null", selection, kInvalid, "token_idx", "NULL",
       [&](auto e) { return tandem_session_selection(nullptr, maw, 4, n, session, s, 0, 0, 0, e); }},
      {"capacity", selection, kInvalid, "capacity", "-4",
       [&](auto e) { return tandem_session_selection(idx, maw, -4, n, session, s, 0, 0, 0, e); }},
      {"layer", selection, kInvalid, "layer_idx", "2",
       [&](auto e) { return tandem_session_selection(idx, maw, 4, n, session, s, 2, 0, 0, e); }},
      {"head", selection, kInvalid, "kv_head_idx", "2",
       [&](auto e) { return tandem_session_selection(idx, maw, 4, n, session, s, 0, 2, 0, e); }},
      {"head", selection, kInvalid, "kv_head_idx", "-1",
       [&](auto e) { return tandem_session_selection(idx, maw, 4, n, session, s, 0, -1, 0, e); }},
      {"head", selection, kInvalid, "q_head_idx", "2",
       [&](auto e) { return tandem_session_selection(idx, maw, 4, n, session, s, 0, 0, 2, e); }},
      {"null", "tandem_session_get_stats", kInvalid, "stats", "NULL",
       [&](auto e) { return tandem_session_get_stats(nullptr, session, e); }},
      {"null", "tandem_cache_get_stats", kInvalid, "stats", "NULL",
       [&](auto e) { return tandem_cache_get_stats(nullptr, world.cache, e); }},
  };
  check_all_refused(world, cases, &out);
}

// Attends two speculative tokens that continue the last token.
int32_t speculate_in_layer_0(tandem_session* session, int64_t sequence, tandem_error** error) {
  Tensor q({2, kQHeads, kDim}), k({2, kKvHeads, kDim}), v({2, kKvHeads, kDim}), to({2, kQHeads, kDim});
  const int64_t two = 2;
  const int32_t parents[] = {-1, -1};
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.flags = TANDEM_ATTEND_SPECULATIVE;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &two;
  args.q = &q.view;
  args.k = &k.view;
  args.v = &v.view;
  args.o = &to.view;
  args.parent_idx = parents;
  return tandem_attend(session, &args, error);
}

// Calls that are refused in a step or while tokens are speculative.
void test_states(void**) {
  World world;
  Outputs out;
  tandem_session *session = world.session, *second = nullptr;
  tandem_cache* cache = world.cache;
  OK(tandem_session_create, &second, cache, nullptr);
  const int64_t s = world.sequence, one = 1;
  OK(tandem_step_begin, session, &s, &one, 1, nullptr);
  check_all_refused(world,
                    {
                        {"open", "tandem_step_begin", kState, "session", "open",
                         [&](auto e) { return tandem_step_begin(session, &s, &one, 1, nullptr, e); }},
                        {"busy", "tandem_step_begin", TANDEM_ERROR_BUSY, "sequences", "in flight",
                         [&](auto e) { return tandem_step_begin(second, &s, &one, 1, nullptr, e); }},
                        {"busy", "tandem_sequence_truncate", TANDEM_ERROR_BUSY, "sequence", "in flight",
                         [&](auto e) { return tandem_sequence_truncate(cache, s, 1, e); }},
                        {"busy", "tandem_sequence_fork", TANDEM_ERROR_BUSY, "sequence", "in flight",
                         [&](auto e) { return tandem_sequence_fork(out.at<int64_t>(), cache, s, e); }},
                        {"busy", "tandem_sequence_drop", TANDEM_ERROR_BUSY, "sequence", "in flight",
                         [&](auto e) { return tandem_sequence_drop(cache, s, e); }},
                    },
                    &out);
  check_all_refused(world, {{"more than declared", "tandem_attend", kState, "q_lens", "2",
                             [&](auto e) { return attend_once(world, s, 0, 2, 0, e); }}});
  tandem_error* error = nullptr;
  assert_int_equal(tandem_step_end(session, nullptr, &error), kState);  // layer 0 did not get its token
  assert_non_null(std::strstr(tandem_error_message(error), "layer 0"));
  tandem_error_release(error);
  tandem_session_release(second);

  const auto speculate = [&](tandem_error** e) { return speculate_in_layer_0(session, s, e); };
  const int32_t status = speculate(&error);
  expect_ok(status, error);
  const int64_t both[] = {0, 1};
  check_all_refused(world,
                    {
                        {"pending", "tandem_attend", kState, "sequences", "speculative", speculate},
                        {"pending", "tandem_sequence_fork", kState, "sequence", "speculative",
                         [&](auto e) { return tandem_sequence_fork(out.at<int64_t>(), cache, s, e); }},
                        {"uneven", "tandem_session_commit", kState, "sequence", "layer 1",
                         [&](auto e) { return tandem_session_commit(session, s, both, 2, e); }},
                    },
                    &out);
}

// Releasing a session drops its speculative tokens, because no other session could commit them.
void test_speculation_ends_with_its_session(void**) {
  World world;
  tandem_session* other = nullptr;
  OK(tandem_session_create, &other, world.cache, nullptr);
  uint64_t before = 0, after = 1;
  OK(tandem_sequence_digest, &before, world.cache, world.sequence);
  OK(speculate_in_layer_0, other, world.sequence);
  tandem_error* error = nullptr;
  assert_int_equal(attend_once(world, world.sequence, 0, 1, 0, &error), kState);
  tandem_error_release(error);
  tandem_session_release(other);
  OK(tandem_sequence_digest, &after, world.cache, world.sequence);
  assert_true(before == after);
  int64_t fork = 0;
  OK(tandem_sequence_fork, &fork, world.cache, world.sequence);
  OK(attend_once, world, world.sequence, 0, 1, 0);
}

void test_plan(void**) {
  World world;
  Outputs out;
  auto* plan = out.at<tandem_memory_plan>();
  tandem_memory_plan good = TANDEM_MEMORY_PLAN_INIT;
  static int64_t lens[] = {10, -1}, long_len = int64_t{1} << 31;
  const char* f = "tandem_plan_memory";
  tandem_engine* engine = world.engine;
  tandem_model* model = world.model;
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  cache.k_type = 77;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
  session.policy = "dice";
  check_all_refused(
      world,
      {
          {"null", f, kInvalid, "plan", "NULL",
           [&](auto e) { return tandem_plan_memory(nullptr, engine, model, nullptr, nullptr, lens, 1, e); }},
          {"not a struct", f, kInvalid, "struct_size", "2779096485",
           [&](auto e) { return tandem_plan_memory(plan, engine, model, nullptr, nullptr, lens, 1, e); }},
          {"null", f, kInvalid, "kv_lens", "NULL",
           [&](auto e) { return tandem_plan_memory(&good, engine, model, nullptr, nullptr, nullptr, 1, e); }},
          {"count", f, kInvalid, "n_sequences", "-1",
           [&](auto e) { return tandem_plan_memory(&good, engine, model, nullptr, nullptr, lens, -1, e); }},
          {"length", f, kInvalid, "kv_lens[1]", "-1",
           [&](auto e) { return tandem_plan_memory(&good, engine, model, nullptr, nullptr, lens, 2, e); }},
          {"length", f, kInvalid, "kv_lens[0]", "2147483648",
           [&](auto e) { return tandem_plan_memory(&good, engine, model, nullptr, nullptr, &long_len, 1, e); }},
          {"type", f, kInvalid, "k_type", "77",
           [&](auto e) { return tandem_plan_memory(&good, engine, model, &cache, nullptr, lens, 1, e); }},
          {"policy", f, kNotFound, "policy", "dice",
           [&](auto e) { return tandem_plan_memory(&good, engine, model, nullptr, &session, lens, 1, e); }},
          {"null", "tandem_plan_report", kInvalid, "plan", "NULL",
           [&](auto e) { return tandem_plan_report(out.at<char>(), 10, out.at<size_t>(64), nullptr, e); }},
          {"null", "tandem_plan_report", kInvalid, "buffer", "NULL",
           [&](auto e) { return tandem_plan_report(nullptr, 10, out.at<size_t>(64), &good, e); }},
          {"null", "tandem_engine_report", kInvalid, "buffer", "NULL",
           [&](auto e) { return tandem_engine_report(nullptr, 10, out.at<size_t>(64), engine, e); }},
          {"type", "tandem_supports", kInvalid, "k_type", "77",
           [&](auto e) { return tandem_supports(engine, nullptr, &cache, nullptr, e); }},
          {"policy", "tandem_supports", kNotFound, "policy", "dice",
           [&](auto e) { return tandem_supports(engine, nullptr, nullptr, &session, e); }},
      },
      &out);
  const tandem_memory_plan untouched = TANDEM_MEMORY_PLAN_INIT;
  assert_memory_equal(&good, &untouched, sizeof good);
  // A plan beyond the cap is refused, and the message says by how much.
  tandem_cache_options capped = TANDEM_CACHE_OPTIONS_INIT;
  capped.host_cap_bytes = int64_t{8} << 20;
  const int64_t long_lens[] = {1 << 20};
  assert_int_equal(tandem_plan_memory(&good, engine, model, &capped, nullptr, long_lens, 1, nullptr), kCapacity);
  assert_true(good.host_kv_bytes > capped.host_cap_bytes);
}

void test_route_plan(void**) {
  World world;
  Outputs out;
  tandem_route_plan routes = TANDEM_ROUTE_PLAN_INIT;
  static int64_t lens[] = {10, -1}, q_len = 11;
  check_all_refused(world,
                    {
                        {"null", "tandem_plan", kInvalid, "plan", "NULL",
                         [&](auto e) { return tandem_plan(nullptr, world.session, 0, lens, nullptr, 1, e); }},
                        {"layer", "tandem_plan", kInvalid, "layer_idx", "-1",
                         [&](auto e) { return tandem_plan(&routes, world.session, -1, lens, nullptr, 1, e); }},
                        {"layer", "tandem_plan", kInvalid, "layer_idx", "7",
                         [&](auto e) { return tandem_plan(&routes, world.session, 7, lens, nullptr, 1, e); }},
                        {"null", "tandem_plan", kInvalid, "kv_lens", "NULL",
                         [&](auto e) { return tandem_plan(&routes, world.session, 0, nullptr, nullptr, 1, e); }},
                        {"length", "tandem_plan", kInvalid, "kv_lens[1]", "-1",
                         [&](auto e) { return tandem_plan(&routes, world.session, 0, lens, nullptr, 2, e); }},
                        {"queries", "tandem_plan", kInvalid, "q_lens[0]", "11",
                         [&](auto e) { return tandem_plan(&routes, world.session, 0, lens, &q_len, 1, e); }},
                        {"device", "tandem_plan", TANDEM_ERROR_UNSUPPORTED, "session", "no device",
                         [&](auto e) { return tandem_plan(&routes, world.session, 0, lens, nullptr, 1, e); }},
                        {"null", "tandem_route_report", kInvalid, "plan", "NULL",
                         [&](auto e) { return tandem_route_report(out.at<char>(), 10, out.at<size_t>(64), nullptr, e); }},
                        {"null", "tandem_route_report", kInvalid, "buffer", "NULL",
                         [&](auto e) { return tandem_route_report(nullptr, 10, out.at<size_t>(64), &routes, e); }},
                    },
                    &out);
  const tandem_route_plan untouched = TANDEM_ROUTE_PLAN_INIT;
  assert_memory_equal(&routes, &untouched, sizeof routes);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_tensors),
      cmocka_unit_test(test_overlap),
      cmocka_unit_test(test_fused_buffer),
      cmocka_unit_test(test_too_long),
      cmocka_unit_test(test_nothing_to_do),
      cmocka_unit_test(test_commit),
      cmocka_unit_test(test_step),
      cmocka_unit_test(test_selection_and_stats),
      cmocka_unit_test(test_states),
      cmocka_unit_test(test_speculation_ends_with_its_session),
      cmocka_unit_test(test_plan),
      cmocka_unit_test(test_route_plan),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
