// SPDX-License-Identifier: MIT
// Bad arguments of tandem_attend_tensors(). Each gives a typed error that names field and value, and leaves o and lse
// unchanged.
#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kCapacity = TANDEM_ERROR_CAPACITY,
                  kUnsupported = TANDEM_ERROR_UNSUPPORTED;
constexpr int64_t kSequences = 2, kQueries = 3, kKeys = 20, kHuge = INT64_MAX;

enum class Form { kPadded, kPacked };

// A valid call whose outputs lie in `out`. A case changes one thing. Padded: 2 sequences of at most 3 queries and 20 keys.
// Packed: 6 queries and 40 keys of 2 sequences.
struct Call {
  int64_t q_lens[2] = {3, 3}, kv_lens[2] = {20, 20};
  float sinks[kQHeads] = {}, slopes[kQHeads] = {1.0f, 0.5f, 0.25f, 0.125f};
  int32_t cancel = 0;
  Tensor q, k, v, mask;
  tandem_tensor o, lse;
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;

  static std::vector<int64_t> shape(Form form, int64_t n_rows, std::vector<int64_t> rest) {
    if (form == Form::kPacked)
      rest.insert(rest.begin(), kSequences * n_rows);
    else
      rest.insert(rest.begin(), {kSequences, n_rows});
    return rest;
  }
  Call(Form form, Outputs& out)
      : q(shape(form, kQueries, {kQHeads, kDim}), 1),
        k(shape(form, kKeys, {kKvHeads, kDim}), 2),
        v(shape(form, kKeys, {kKvHeads, kDim}), 3),
        mask(form == Form::kPacked ? std::vector<int64_t>{kSequences * kQueries, kKeys}
                                   : std::vector<int64_t>{kSequences, kQHeads, kQueries, kKeys}) {
    const auto o_shape = shape(form, kQueries, {kQHeads, kDim}), lse_shape = shape(form, kQueries, {kQHeads});
    OK(tandem_tensor_init, &o, TANDEM_F32, out.at<float>(), static_cast<int32_t>(o_shape.size()), o_shape.data());
    OK(tandem_tensor_init, &lse, TANDEM_F32, out.at<float>(32768), static_cast<int32_t>(lse_shape.size()), lse_shape.data());
    args.n_sequences = kSequences;
    args.q_lens = q_lens;
    args.kv_lens = kv_lens;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o;
    args.lse = &lse;
  }
  Call(const Call&) = delete;
};

struct Case {
  const char* name;
  int32_t status;
  const char* field;
  const char* value;
  std::function<void(Call&)> change;
};

void check_calls(Form form, const std::vector<Case>& cases) {
  World world;
  Outputs out;
  std::vector<Refused> refused;
  for (const Case& c : cases)
    refused.push_back({c.name, "tandem_attend_tensors", c.status, c.field, c.value, [&, form](tandem_error** e) {
                         Call call(form, out);
                         c.change(call);
                         return tandem_attend_tensors(world.engine, &call.args, e);
                       }});
  check_all_refused(world, refused, &out);
}

// Without changes the calls of the cases are valid.
void test_unchanged_calls_succeed(void**) {
  World world;
  for (const Form form : {Form::kPadded, Form::kPacked})
    for (const bool has_mask : {false, true}) {
      Outputs out;
      Call call(form, out);
      if (has_mask) call.args.mask = &call.mask.view;
      OK(tandem_attend_tensors, world.engine, &call.args);
      for (int64_t i = 0; i < kSequences * kQueries * kQHeads; ++i) assert_true(std::isfinite(out.at<float>(32768)[i]));
    }
}

int32_t go_on(int64_t, int64_t, void*) { return 0; }

void test_arguments(void**) {
  World world;
  Outputs out;
  Call good(Form::kPadded, out);
  const char* f = "tandem_attend_tensors";
  check_all_refused(
      world,
      {{"null", f, kInvalid, "args", "NULL", [&](auto e) { return tandem_attend_tensors(world.engine, nullptr, e); }},
       {"no engine", f, TANDEM_ERROR_INVALID_HANDLE, "engine", "NULL",
        [&](auto e) { return tandem_attend_tensors(nullptr, &good.args, e); }},
       {"no engine", f, TANDEM_ERROR_INVALID_HANDLE, "engine", "engine",
        [&](auto e) { return tandem_attend_tensors(reinterpret_cast<tandem_engine*>(world.cache), &good.args, e); }}},
      &out);
  check_calls(
      Form::kPadded,
      {
          {"size", kInvalid, "struct_size", "0", [](auto& c) { c.args.struct_size = 0; }},
          {"size", kInvalid, "struct_size", "143", [](auto& c) { c.args.struct_size = 143; }},
          {"flags", kInvalid, "flags", "0x2", [](auto& c) { c.args.flags = 2; }},
          {"flags", kInvalid, "flags", "0x80000001", [](auto& c) { c.args.flags = 0x80000001u; }},
          {"reserved", kInvalid, "reserved", "7", [](auto& c) { c.args.reserved = 7; }},
          {"stream", kInvalid, "stream", "must be NULL", [](auto& c) { c.args.stream = &c; }},
          {"mask and flag", kInvalid, "mask", "with TANDEM_TENSORS_CAUSAL",
           [](auto& c) { c.args.mask = &c.mask.view, c.args.flags = TANDEM_TENSORS_CAUSAL; }},
          {"window", kInvalid, "sliding_window_tokens", "5 without TANDEM_TENSORS_CAUSAL",
           [](auto& c) { c.args.sliding_window_tokens = 5; }},
          {"window", kInvalid, "sliding_window_tokens", "-1",
           [](auto& c) { c.args.sliding_window_tokens = -1, c.args.flags = TANDEM_TENSORS_CAUSAL; }},
          {"window", kInvalid, "sliding_window_tokens", "-9223372036854775808",
           [](auto& c) { c.args.sliding_window_tokens = INT64_MIN, c.args.flags = TANDEM_TENSORS_CAUSAL; }},
          {"user", kInvalid, "progress_user", "without progress", [](auto& c) { c.args.progress_user = &c; }},
          {"scale", kInvalid, "sm_scale", "nan", [](auto& c) { c.args.sm_scale = NAN; }},
          {"scale", kInvalid, "sm_scale", "-0.5", [](auto& c) { c.args.sm_scale = -0.5f; }},
          {"scale", kInvalid, "sm_scale", "inf", [](auto& c) { c.args.sm_scale = INFINITY; }},
          {"cap", kInvalid, "soft_cap", "-1", [](auto& c) { c.args.soft_cap = -1.0f; }},
          {"cap", kInvalid, "soft_cap", "nan", [](auto& c) { c.args.soft_cap = NAN; }},
          {"cap", kInvalid, "soft_cap", "e-42", [](auto& c) { c.args.soft_cap = 1e-42f; }},
          {"sink", kInvalid, "sinks[3]", "nan", [](auto& c) { c.args.sinks = c.sinks, c.sinks[3] = NAN; }},
          {"sink", kInvalid, "sinks[0]", "inf", [](auto& c) { c.args.sinks = c.sinks, c.sinks[0] = INFINITY; }},
          {"slope", kInvalid, "alibi_slopes[2]", "nan", [](auto& c) { c.args.alibi_slopes = c.slopes, c.slopes[2] = NAN; }},
          {"slope", kInvalid, "alibi_slopes[0]", "-inf",
           [](auto& c) { c.args.alibi_slopes = c.slopes, c.slopes[0] = -INFINITY; }},
      });
}

template <typename T>
T* misaligned(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 1);
}

void test_misaligned_pointers(void**) {
  std::vector<Case> cases = {
      {"sinks", kInvalid, "sinks", "not aligned", [](auto& c) { c.args.sinks = misaligned(c.sinks); }},
      {"slopes", kInvalid, "alibi_slopes", "not aligned", [](auto& c) { c.args.alibi_slopes = misaligned(c.slopes); }},
      {"q_lens", kInvalid, "q_lens", "not aligned", [](auto& c) { c.args.q_lens = misaligned(c.q_lens); }},
      {"kv_lens", kInvalid, "kv_lens", "not aligned", [](auto& c) { c.args.kv_lens = misaligned(c.kv_lens); }},
      {"cancel", kInvalid, "cancel", "not aligned", [](auto& c) { c.args.cancel = misaligned(&c.cancel); }},
      {"q", kInvalid, "q", "not aligned", [](auto& c) { c.args.q = misaligned(c.args.q); }},
      {"k", kInvalid, "k", "not aligned", [](auto& c) { c.args.k = misaligned(c.args.k); }},
      {"v", kInvalid, "v", "not aligned", [](auto& c) { c.args.v = misaligned(c.args.v); }},
      {"o", kInvalid, "o", "not aligned", [](auto& c) { c.args.o = misaligned(c.args.o); }},
      {"lse", kInvalid, "lse", "not aligned", [](auto& c) { c.args.lse = misaligned(c.args.lse); }},
      {"mask", kInvalid, "mask", "not aligned", [](auto& c) { c.args.mask = misaligned(&c.mask.view); }},
  };
  check_calls(Form::kPadded, cases);
  check_calls(Form::kPacked, cases);
  World world;
  Outputs out;
  Call good(Form::kPadded, out);
  check_all_refused(world,
                    {{"args", "tandem_attend_tensors", kInvalid, "args", "not aligned",
                      [&](auto e) { return tandem_attend_tensors(world.engine, misaligned(&good.args), e); }}},
                    &out);
}

void set_lengths(Call& call, int64_t first, int64_t second) {
  call.q_lens[0] = first;
  call.q_lens[1] = second;
}

void test_lengths(void**) {
  const std::vector<Case> both = {
      {"count", kInvalid, "n_sequences", "-1", [](auto& c) { c.args.n_sequences = -1; }},
      {"count", kInvalid, "n_sequences", "-2147483648", [](auto& c) { c.args.n_sequences = INT32_MIN; }},
      {"count", kInvalid, "n_sequences", "65537", [](auto& c) { c.args.n_sequences = 65537; }},
      {"q_len", kInvalid, "q_lens[1]", "-1 is not from 0", [](auto& c) { c.q_lens[1] = -1; }},
      {"q_len", kInvalid, "q_lens[0]", "9223372036854775807", [](auto& c) { c.q_lens[0] = kHuge; }},
      {"q_len", kInvalid, "q_lens[1]", "-9223372036854775808", [](auto& c) { c.q_lens[1] = INT64_MIN; }},
      {"kv_len", kInvalid, "kv_lens[0]", "-1 is not from 0", [](auto& c) { c.kv_lens[0] = -1; }},
      {"kv_len", kInvalid, "kv_lens[1]", "9223372036854775807", [](auto& c) { c.kv_lens[1] = kHuge; }},
      {"kv_len", kInvalid, "kv_lens[0]", "-9223372036854775808", [](auto& c) { c.kv_lens[0] = INT64_MIN; }},
  };
  check_calls(Form::kPadded, both);
  check_calls(Form::kPacked, both);
  check_calls(
      Form::kPadded,
      {
          {"count", kInvalid, "q.shape[0]", "2, must be n_sequences = 3", [](auto& c) { c.args.n_sequences = 3; }},
          {"count", kInvalid, "q.shape[0]", "65537", [](auto& c) { c.args.n_sequences = 0, c.q.view.shape[0] = 65537; }},
          {"count", kInvalid, "q.shape[0]", "-1", [](auto& c) { c.args.n_sequences = 0, c.q.view.shape[0] = -1; }},
          {"q_len", kInvalid, "q_lens[0]", "4 is not from 0 to the 3 tokens", [](auto& c) { c.q_lens[0] = 4; }},
          {"kv_len", kInvalid, "kv_lens[1]", "21 is not from 0 to the 20 keys", [](auto& c) { c.kv_lens[1] = 21; }},
      });
  check_calls(Form::kPacked,
              {
                  {"null", kInvalid, "q_lens", "NULL with n_sequences = 2", [](auto& c) { c.args.q_lens = nullptr; }},
                  {"null", kInvalid, "kv_lens", "NULL with n_sequences = 2", [](auto& c) { c.args.kv_lens = nullptr; }},
                  {"sum", kInvalid, "q_lens", "add up to 5, must be the 6", [](auto& c) { c.q_lens[1] = 2; }},
                  {"sum", kInvalid, "q_lens", "add up to 12, must be the 6", [](auto& c) { set_lengths(c, 6, 6); }},
                  {"sum", kInvalid, "kv_lens", "add up to 39, must be the 40", [](auto& c) { c.kv_lens[0] = 19; }},
                  {"one", kInvalid, "q_lens", "add up to 3, must be the 6", [](auto& c) { c.args.n_sequences = 0; }},
              });
}

// Cases for every tensor. Dimension 0 is that of the sequences or of the tokens.
const std::vector<TensorCase> kTensorCases = {
    {kInvalid, "struct_size", "95", [](auto& t) { t.struct_size = 95; }},
    {kInvalid, "dtype", "-1", [](auto& t) { t.dtype = -1; }},
    {kInvalid, "dtype", "8", [](auto& t) { t.dtype = 8; }},
    {kInvalid, "device_type", "-1", [](auto& t) { t.device_type = -1; }},
    {kInvalid, "device_index", "-1", [](auto& t) { t.device_index = -1; }},
    {kUnsupported, "device_type", "1 (CUDA)", [](auto& t) { t.device_type = TANDEM_DEVICE_CUDA; }},
    {kInvalid, "reserved", "3", [](auto& t) { t.reserved = 3; }},
    {kInvalid, "n_dims", "1, must be", [](auto& t) { t.n_dims = 1; }},
    {kInvalid, "n_dims", "5", [](auto& t) { t.n_dims = 5; }},
    {kInvalid, "n_dims", "-1", [](auto& t) { t.n_dims = -1; }},
    {kInvalid, "shape[0]", "-5", [](auto& t) { t.shape[0] = -5; }},
    {kInvalid, "shape[0]", "-9223372036854775808", [](auto& t) { t.shape[0] = INT64_MIN; }},
    {kInvalid, "shape[1]", "-1", [](auto& t) { t.shape[1] = -1; }},
    {kInvalid, "stride[0]", "0 is not positive", [](auto& t) { t.stride[0] = 0; }},
    {kInvalid, "stride[0]", "-64 is not positive", [](auto& t) { t.stride[0] = -64; }},
    {kInvalid, "stride[0]", "-9223372036854775808", [](auto& t) { t.stride[0] = INT64_MIN; }},
    {kInvalid, "shape[0]", "more than memory can hold", [](auto& t) { t.stride[0] = kHuge / 3 * 2; }},
    {kInvalid, "data", "NULL", [](auto& t) { t.data = nullptr; }},
    {kInvalid, "data", "not aligned", [](auto& t) { t.data = static_cast<char*>(t.data) + 1; }},
    {kInvalid, "data", "past the end", [](auto& t) { t.data = reinterpret_cast<void*>(~uintptr_t{63}); }},
};

const char* const kNames[] = {"q", "k", "v", "o", "lse", "mask"};
tandem_tensor& tensor_of(Call& c, int which) {
  tandem_tensor* const tensors[] = {&c.q.view, &c.k.view, &c.v.view, &c.o, &c.lse, &c.mask.view};
  return *tensors[which];
}

void check_tensors_of(Form form) {
  std::vector<Case> cases;
  std::vector<std::string> fields;
  fields.reserve(std::size(kNames) * kTensorCases.size());
  for (int which = 0; which < 6; ++which)
    for (const TensorCase& c : kTensorCases) {
      fields.push_back(std::string(kNames[which]) + "." + c.member);
      cases.push_back({c.member, c.status, fields.back().c_str(), c.value, [which, &c](Call& call) {
                         if (which == 5) call.args.mask = &call.mask.view;
                         c.change(tensor_of(call, which));
                       }});
    }
  check_calls(form, cases);
}

void test_tensors(void**) {
  check_tensors_of(Form::kPadded);
  check_tensors_of(Form::kPacked);
}

void test_shapes(void**) {
  check_calls(
      Form::kPadded,
      {
          {"null", kInvalid, "q", "NULL", [](auto& c) { c.args.q = nullptr; }},
          {"null", kInvalid, "k", "NULL", [](auto& c) { c.args.k = nullptr; }},
          {"null", kInvalid, "o", "NULL", [](auto& c) { c.args.o = nullptr; }},
          {"k is packed", kInvalid, "k.n_dims", "3, must be 4", [](auto& c) { c.k.view.n_dims = 3; }},
          {"sequences of k", kInvalid, "k.shape[0]", "1, must be n_sequences = 2", [](auto& c) { c.k.view.shape[0] = 1; }},
          {"sequences of o", kInvalid, "o.shape[0]", "3, must be n_sequences = 2", [](auto& c) { c.o.shape[0] = 3; }},
          {"sequences of lse", kInvalid, "lse.shape[0]", "1, must be n_sequences = 2", [](auto& c) { c.lse.shape[0] = 1; }},
          {"tokens of o", kInvalid, "o.shape[1]", "2, must be n_tokens = 3", [](auto& c) { c.o.shape[1] = 2; }},
          {"tokens of lse", kInvalid, "lse.shape[1]", "4, must be n_tokens = 3", [](auto& c) { c.lse.shape[1] = 4; }},
          {"keys of v", kInvalid, "v.shape[1]", "19, must be n_keys = 20", [](auto& c) { c.v.view.shape[1] = 19; }},
          {"heads of v", kInvalid, "v.shape[2]", "1, must be n_kv_heads = 2", [](auto& c) { c.v.view.shape[2] = 1; }},
          {"heads of o", kInvalid, "o.shape[2]", "3, must be n_q_heads = 4", [](auto& c) { c.o.shape[2] = 3; }},
          {"heads of lse", kInvalid, "lse.shape[2]", "5, must be n_q_heads = 4", [](auto& c) { c.lse.shape[2] = 5; }},
          {"dims of k", kInvalid, "k.shape[3]", "32, must be k_head_dim = 64", [](auto& c) { c.k.view.shape[3] = 32; }},
          {"dims of v", kInvalid, "v.shape[3]", "32, must be v_head_dim = 64", [](auto& c) { c.v.view.shape[3] = 32; }},
          {"heads", kInvalid, "n_q_heads", "= 3: the axes of q are [n_sequences, n_tokens, n_q_heads",
           [](auto& c) {
             c.k.view.shape[2] = c.v.view.shape[2] = 3, c.k.view.stride[1] = c.v.view.stride[1] = 192,
             c.k.view.shape[1] = c.v.view.shape[1] = 1, c.args.kv_lens = nullptr;
           }},
          {"no heads", kInvalid, "n_kv_heads", "0 is not from 1",
           [](auto& c) { c.k.view.shape[2] = c.v.view.shape[2] = 0; }},
          {"no heads", kInvalid, "n_q_heads", "0 is not from 1",
           [](auto& c) { c.q.view.shape[2] = c.o.shape[2] = c.lse.shape[2] = 0; }},
          {"too many heads", kInvalid, "n_q_heads", "is not from 1",
           [](auto& c) {
             c.q.view.shape[1] = c.o.shape[1] = c.lse.shape[1] = 0, c.args.q_lens = nullptr,
             c.q.view.shape[2] = c.o.shape[2] = c.lse.shape[2] = INT64_C(1) << 40;
           }},
          {"no dims", kInvalid, "k_head_dim", "0 is not positive",
           [](auto& c) { c.q.view.shape[3] = c.k.view.shape[3] = 0; }},
          {"no dims", kInvalid, "v_head_dim", "0 is not positive", [](auto& c) { c.o.shape[3] = c.v.view.shape[3] = 0; }},
          {"dims", kUnsupported, "k_head_dim", "63 has no kernels",
           [](auto& c) { c.q.view.shape[3] = c.k.view.shape[3] = 63; }},
          {"dims", kUnsupported, "v_head_dim", "32 has no kernels", [](auto& c) { c.o.shape[3] = c.v.view.shape[3] = 32; }},
          {"heads overlap", kInvalid, "k.stride[2]", "63 is less than the 64", [](auto& c) { c.k.view.stride[2] = 63; }},
          {"tokens overlap", kInvalid, "v.stride[1]", "127 is less than the 128", [](auto& c) { c.v.view.stride[1] = 127; }},
          {"sequences overlap", kInvalid, "q.stride[0]", "767 is less than the 768",
           [](auto& c) { c.q.view.stride[0] = 767; }},
          {"dims lie apart", kInvalid, "q.stride[3]", "2, must be 1", [](auto& c) { c.q.view.stride[3] = 2; }},
          {"dims lie apart", kInvalid, "lse.stride[2]", "2, must be 1", [](auto& c) { c.lse.stride[2] = 2; }},
          {"dims lie apart", kInvalid, "mask.stride[3]", "0, must be 1",
           [](auto& c) { c.args.mask = &c.mask.view, c.mask.view.stride[3] = 0; }},
      });
  check_calls(Form::kPacked,
              {
                  {"k is padded", kInvalid, "k.n_dims", "4, must be 3", [](auto& c) { c.k.view.n_dims = 4; }},
                  {"o is padded", kInvalid, "o.n_dims", "4, must be 3", [](auto& c) { c.o.n_dims = 4; }},
                  {"lse has dims", kInvalid, "lse.n_dims", "3, must be 2", [](auto& c) { c.lse.n_dims = 3; }},
                  {"keys of v", kInvalid, "v.shape[0]", "41, must be n_keys = 40", [](auto& c) { c.v.view.shape[0] = 41; }},
                  {"tokens of o", kInvalid, "o.shape[0]", "5, must be n_tokens = 6", [](auto& c) { c.o.shape[0] = 5; }},
                  {"heads and tokens overlap", kInvalid, "k.stride[0]", "64 is less than the 128",
                   [](auto& c) { c.k.view.stride[0] = 64, c.k.view.stride[1] = 64; }},
              });
}

// Shapes without elements: whatever their other numbers are, the call reads nothing, and no sum or product overflows.
void test_hostile_empty_tensors(void**) {
  check_calls(Form::kPadded, {
                                 {"tokens", kCapacity, "n_tokens", "4611686018427387904",
                                  [](auto& c) {
                                    c.args.q_lens = nullptr;
                                    for (tandem_tensor* t : {&c.q.view, &c.o, &c.lse})
                                      t->shape[1] = INT64_C(1) << 62, t->shape[2] = 0;
                                  }},
                                 {"keys", kCapacity, "n_keys", "9223372036854775807",
                                  [](auto& c) {
                                    c.args.kv_lens = nullptr;
                                    for (tandem_tensor* t : {&c.k.view, &c.v.view}) t->shape[1] = kHuge, t->shape[2] = 0;
                                  }},
                                 {"slopes are not read beyond what a call can have", kInvalid, "n_q_heads", "2147483647",
                                  [](auto& c) {
                                    c.args.q_lens = nullptr, c.args.alibi_slopes = c.slopes;
                                    for (tandem_tensor* t : {&c.q.view, &c.o, &c.lse}) t->shape[1] = 0, t->shape[2] = kHuge;
                                  }},
                             });
  World world;
  for (const Form form : {Form::kPadded, Form::kPacked})
    for (const bool has_mask : {false, true}) {
      Outputs out;
      Call call(form, out);
      call.args.mask = has_mask ? &call.mask.view : nullptr;
      call.kv_lens[0] = call.kv_lens[1] = 0;
      const int tokens = form == Form::kPadded ? 1 : 0;
      for (tandem_tensor* t : {&call.k.view, &call.v.view}) {
        t->shape[tokens] = 0;
        for (int d = 0; d <= tokens + 1; ++d) t->stride[d] = kHuge / 4;
        t->data = nullptr;
      }
      call.mask.view.shape[call.mask.view.n_dims - 1] = 0;
      for (int d = 0; d < call.mask.view.n_dims - 1; ++d) call.mask.view.stride[d] = kHuge / 4;
      call.mask.view.data = nullptr;
      OK(tandem_attend_tensors, world.engine, &call.args);
      for (int64_t i = 0; i < kSequences * kQueries * kQHeads; ++i) {
        assert_true(out.at<float>(32768)[i] == -INFINITY);
        assert_true(out.at<float>()[i * kDim] == 0.0f);
      }
      call.q_lens[0] = call.q_lens[1] = 0;
      for (tandem_tensor* t : {&call.q.view, &call.o, &call.lse}) {
        t->shape[tokens] = 0;
        for (int d = 0; d < t->n_dims - 1; ++d) t->stride[d] = kHuge / 4;
        t->data = nullptr;
      }
      call.mask.view.shape[call.mask.view.n_dims - 2] = 0;
      OK(tandem_attend_tensors, world.engine, &call.args);
    }
}

void test_types(void**) {
  check_calls(
      Form::kPadded,
      {
          {"q", kInvalid, "q.dtype", "4 (e4m3), must be f32, f16 or bf16", [](auto& c) { c.q.view.dtype = TANDEM_E4M3; }},
          {"q", kInvalid, "q.dtype", "5 (q8_0), must be f32, f16 or bf16", [](auto& c) { c.q.view.dtype = TANDEM_Q8_0; }},
          {"o", kInvalid, "o.dtype", "6 (q4_0), must be f32, f16 or bf16", [](auto& c) { c.o.dtype = TANDEM_Q4_0; }},
          {"lse", kInvalid, "lse.dtype", "2 (f16), must be f32", [](auto& c) { c.lse.dtype = TANDEM_F16; }},
          {"mask", kInvalid, "mask.dtype", "3 (bf16), must be f32 or f16",
           [](auto& c) { c.args.mask = &c.mask.view, c.mask.view.dtype = TANDEM_BF16; }},
          {"mask", kInvalid, "mask.dtype", "4 (e4m3)",
           [](auto& c) { c.args.mask = &c.mask.view, c.mask.view.dtype = TANDEM_E4M3; }},
          {"q4_64", kUnsupported, "k.dtype", "7 (q4_64)", [](auto& c) { c.k.view.dtype = TANDEM_Q4_64; }},
          {"q4_64", kUnsupported, "v.dtype", "7 (q4_64)", [](auto& c) { c.v.view.dtype = TANDEM_Q4_64; }},
          {"cut block", kInvalid, "k.stride[1]", "144 is not a multiple of 32",
           [](auto& c) { c.k.view.dtype = TANDEM_Q8_0, c.k.view.stride[1] = 144; }},
          {"cut block", kInvalid, "v.shape[3]", "80 is not a multiple of 32",
           [](auto& c) {
             c.v.view.dtype = TANDEM_Q4_0, c.v.view.shape[3] = c.o.shape[3] = 80;
             c.v.view.stride[2] = c.o.stride[2] = 96, c.v.view.stride[1] = 192, c.v.view.stride[0] = 3840,
             c.o.stride[1] = 384, c.o.stride[0] = 1152;
           }},
      });
}

void test_masks(void**) {
  const auto with = [](std::function<void(tandem_tensor&)> change) {
    return [change](Call& c) {
      c.args.mask = &c.mask.view;
      change(c.mask.view);
    };
  };
  check_calls(
      Form::kPadded,
      {
          {"sequences", kInvalid, "mask.shape[0]", "3, must be 1 or 2", with([](auto& t) { t.shape[0] = 3; })},
          {"sequences", kInvalid, "mask.shape[0]", "0, must be 1 or 2", with([](auto& t) { t.shape[0] = 0; })},
          {"heads", kInvalid, "mask.shape[1]", "2, must be 1 or 4", with([](auto& t) { t.shape[1] = 2; })},
          {"rows", kInvalid, "mask.shape[2]", "2, must be n_tokens = 3", with([](auto& t) { t.shape[2] = 2; })},
          {"columns", kInvalid, "mask.shape[3]", "19 is less than the 20 keys", with([](auto& t) { t.shape[3] = 19; })},
          {"packed", kInvalid, "mask.n_dims", "2, must be 4", with([](auto& t) { t.n_dims = 2; })},
          {"rows overlap", kInvalid, "mask.stride[2]", "19 is less than the 20", with([](auto& t) { t.stride[2] = 19; })},
      });
  check_calls(
      Form::kPacked,
      {
          {"rows", kInvalid, "mask.shape[0]", "3, must be n_tokens = 6", with([](auto& t) { t.shape[0] = 3; })},
          {"columns", kInvalid, "mask.shape[1]", "19 is less than the 20 keys", with([](auto& t) { t.shape[1] = 19; })},
          {"padded", kInvalid, "mask.n_dims", "4, must be 2", with([](auto& t) { t.n_dims = 4; })},
      });
}

template <typename T>
void* moved(T* data, int64_t elements) {
  return static_cast<float*>(static_cast<void*>(data)) + elements;
}

void test_overlap(void**) {
  constexpr int64_t kOSize = kSequences * kQueries * kQHeads * kDim;
  for (const Form form : {Form::kPadded, Form::kPacked})
    check_calls(
        form,
        {
            {"o on q", kInvalid, "o.data", "overlaps q", [](auto& c) { c.o.data = c.q.view.data; }},
            {"end of o on q", kInvalid, "o.data", "overlaps q",
             [](auto& c) { c.q.view.data = moved(c.o.data, kOSize - 1); }},
            {"o on k", kInvalid, "o.data", "overlaps k", [](auto& c) { c.k.view.data = moved(c.o.data, -100); }},
            {"o on v", kInvalid, "o.data", "overlaps v", [](auto& c) { c.v.view.data = moved(c.o.data, 700); }},
            {"o on mask", kInvalid, "o.data", "overlaps mask",
             [](auto& c) { c.args.mask = &c.mask.view, c.mask.view.data = moved(c.o.data, 1); }},
            {"lse on o", kInvalid, "o.data", "overlaps lse", [](auto& c) { c.lse.data = moved(c.o.data, kOSize - 1); }},
            {"lse on q", kInvalid, "lse.data", "overlaps q", [](auto& c) { c.lse.data = c.q.view.data; }},
            {"lse on k", kInvalid, "lse.data", "overlaps k", [](auto& c) { c.lse.data = c.k.view.data; }},
            {"lse on v", kInvalid, "lse.data", "overlaps v", [](auto& c) { c.lse.data = c.v.view.data; }},
            {"lse on mask", kInvalid, "lse.data", "overlaps mask",
             [](auto& c) { c.args.mask = &c.mask.view, c.lse.data = c.mask.view.data; }},
            {"lse on q_lens", kInvalid, "lse.data", "overlaps q_lens", [](auto& c) { c.lse.data = c.q_lens; }},
            {"lse on kv_lens", kInvalid, "lse.data", "overlaps kv_lens", [](auto& c) { c.lse.data = c.kv_lens + 1; }},
            {"lse on sinks", kInvalid, "lse.data", "overlaps sinks",
             [](auto& c) { c.args.sinks = c.sinks, c.lse.data = c.sinks + 3; }},
            {"lse on slopes", kInvalid, "lse.data", "overlaps alibi_slopes",
             [](auto& c) { c.args.alibi_slopes = c.slopes, c.lse.data = c.slopes + 3; }},
            {"lse on cancel", kInvalid, "lse.data", "overlaps cancel",
             [](auto& c) { c.args.cancel = &c.cancel, c.lse.data = &c.cancel; }},
        });
}

void test_head_dims_of_aliased_v(void**) {
  check_calls(Form::kPacked,
              {
                  {"more of V than of K", kInvalid, "v_head_dim", "80 is more than k_head_dim = 64",
                   [](auto& c) { c.args.v = nullptr, c.o.shape[2] = 80, c.o.stride[1] = 80, c.o.stride[0] = 4 * 80; }},
                  {"V of its own", kUnsupported, "k_head_dim", "576 has kernels with v_head_dim = 512",
                   [](auto& c) {
                     c.args.q_lens = c.args.kv_lens = nullptr, c.args.n_sequences = 0;
                     for (tandem_tensor* t : {&c.q.view, &c.k.view}) t->shape[0] = 1, t->shape[1] = 1, t->shape[2] = 576;
                     for (tandem_tensor* t : {&c.o, &c.v.view}) t->shape[0] = 1, t->shape[1] = 1, t->shape[2] = 512;
                     c.lse.shape[0] = c.lse.shape[1] = 1;
                     c.q.view.stride[0] = c.k.view.stride[0] = 576, c.o.stride[0] = c.v.view.stride[0] = 512;
                   }},
              });
}

int32_t stop(int64_t, int64_t, void*) { return 1; }

void test_cancel_and_progress(void**) {
  check_calls(Form::kPadded, {
                                 {"flag", TANDEM_ERROR_CANCELLED, "cancel", "the call was stopped",
                                  [](auto& c) { c.cancel = 1, c.args.cancel = &c.cancel; }},
                                 {"progress", TANDEM_ERROR_CANCELLED, "progress", "the call was stopped",
                                  [](auto& c) { c.args.progress = stop; }},
                             });
  World world;
  Outputs out;
  Call call(Form::kPadded, out);
  call.args.progress = go_on;
  call.args.cancel = &call.cancel;
  OK(tandem_attend_tensors, world.engine, &call.args);  // the same call again, after the stopped calls
  assert_true(std::isfinite(*out.at<float>(32768)));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_unchanged_calls_succeed),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_misaligned_pointers),
      cmocka_unit_test(test_lengths),
      cmocka_unit_test(test_tensors),
      cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_hostile_empty_tensors),
      cmocka_unit_test(test_types),
      cmocka_unit_test(test_masks),
      cmocka_unit_test(test_overlap),
      cmocka_unit_test(test_head_dims_of_aliased_v),
      cmocka_unit_test(test_cancel_and_progress),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
