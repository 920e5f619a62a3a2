// SPDX-License-Identifier: MIT
// Keys that the caller names: refusals, proof that no other key is read, counts, and calls of many queries. gate_test
// compares the numbers with the reference.
#include <cmath>
#include <limits>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT, kUnsupported = TANDEM_ERROR_UNSUPPORTED;

// A world with another session on its cache, of policy "all".
struct Dense {
  World world;
  tandem_session* session = nullptr;

  Dense() {
    tandem_session_options options = world_session_options();
    options.policy = "all";
    OK(tandem_session_create, &session, world.cache, &options);
  }
  ~Dense() { tandem_session_release(session); }
  Dense(const Dense&) = delete;
};

// Queries of the last n tokens of a sequence. Each has n_idx indices for each of both KV heads, or one row for both.
struct Named {
  Tensor q, o, lse;
  int64_t sequence, q_len;
  std::vector<int32_t> idx;
  tandem_tensor idx_view;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;

  Named(int64_t of, int64_t n, int64_t n_heads, std::vector<int32_t> indices, int64_t seed = 7)
      : q({n, kQHeads, kDim}, seed),
        o({n, kQHeads, kDim}),
        lse({n, kQHeads}),
        sequence(of),
        q_len(n),
        idx(std::move(indices)) {
    const int64_t shape[] = {n, n_heads, std::ssize(idx) / (n * n_heads)};
    OK(tandem_tensor_init, &idx_view, TANDEM_I32, idx.data(), 3, shape);
    selection.idx = &idx_view;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &q_len;
    args.q = &q.view;
    args.o = &o.view;
    args.lse = &lse.view;
    args.selection = &selection;
  }
  Named(const Named&) = delete;
};

void refuses_structs(void**) {
  const Dense dense;
  Outputs out;
  struct Case {
    int32_t status;
    const char* field;
    const char* value;
    std::function<void(Named&)> change;
  };
  const std::vector<Case> cases = {
      {kInvalid, "selection.struct_size", "3", [](Named& n) { n.selection.struct_size = 3; }},
      {kInvalid, "selection.flags", "0x4", [](Named& n) { n.selection.flags = 4; }},
      {kInvalid, "selection.unit_tokens", "-1", [](Named& n) { n.selection.unit_tokens = -1; }},
      {kInvalid, "selection.unit_tokens", "3", [](Named& n) { n.selection.unit_tokens = 3; }},
      {kInvalid, "selection.unit_tokens", "512", [](Named& n) { n.selection.unit_tokens = 512; }},
      {kInvalid, "selection.idx", "NULL", [](Named& n) { n.selection.idx = nullptr; }},
      {kInvalid, "selection.idx.dtype", "1 (f32)", [](Named& n) { n.idx_view.dtype = TANDEM_F32; }},
      {kInvalid, "selection.idx.data", "is not aligned to i32",
       [](Named& n) { n.idx_view.data = reinterpret_cast<std::byte*>(n.idx_view.data) + 2; }},
      {kInvalid, "selection.idx.n_dims", "2", [](Named& n) { n.idx_view.n_dims = 2; }},
      {kInvalid, "selection.idx.shape[0]", "2", [](Named& n) { n.idx_view.shape[0] = 2; }},
      {kInvalid, "selection.idx.shape[1]", "4, must be 1 or n_kv_heads = 2",
       [](Named& n) { n.idx_view.shape[1] = 4, n.idx_view.shape[2] = n.idx_view.stride[1] = 2; }},
      {kInvalid, "selection.idx.shape[2]", "-1", [](Named& n) { n.idx_view.shape[2] = -1; }},
      {kInvalid, "selection.idx.device_type", "1 (CUDA), but q is in host memory",
       [](Named& n) { n.idx_view.device_type = TANDEM_DEVICE_CUDA; }},
      {kInvalid, "q.dtype", "16 (i32)", [](Named& n) { n.q.view.dtype = TANDEM_I32; }},
  };
  std::vector<Refused> refused;
  for (const Case& c : cases)
    refused.push_back({c.field, "tandem_attend", c.status, c.field, c.value, [&](tandem_error** e) {
                         Named named(dense.world.sequence, 1, 2, {1, 2, 1, 2, 1, 2, 1, 2});
                         c.change(named);
                         named.o.view.data = out.at<float>();
                         return tandem_attend(dense.session, &named.args, e);
                       }});
  check_all_refused(dense.world, refused, &out);
}

// The query is token 89 of 90.
void refuses_indices(void**) {
  const Dense dense;
  Outputs out;
  struct Case {
    const char* value;
    std::vector<int32_t> idx;
    uint32_t flags = 0;
    int64_t unit = 1;
  };
  const std::vector<Case> cases = {
      {"[0, 1, 2] = 90 names no token up to the query's own", {1, 2, 3, 4, 5, 90}},
      {"[0, 0, 0] = -2 names no token", {-2, -1, -1, 1, 2, 3}},
      {"[0, 0, 2] = 23 names no token", {1, 2, 23, 1, 2, 3}, 0, 4},
      {"[0, 0, 1] = 5 stands there twice", {5, 5, 6, 1, 2, 3}},
      {"[0, 1, 1] = 3 is less than the index before it", {1, 2, 3, 4, 3, 5}},
      {"[0, 1, 1] = 3 stands behind a pad", {1, 2, 3, -1, 3, 5}},
      {"[0, 0, 2] = 7 stands there twice", {7, 2, 7, 1, 2, 3}, TANDEM_SELECTION_ANY_ORDER},
      {"[0, 1, 1] = 2147483647 names no token", {7, 2, -1, 1, INT32_MAX, -1}, TANDEM_SELECTION_ANY_ORDER},
      {"[0, 0, 0] = -2147483648 names no token", {INT32_MIN, 2, -1, 1, 2, -1}, TANDEM_SELECTION_ANY_ORDER, 256},
  };
  std::vector<Refused> refused;
  for (const Case& c : cases)
    refused.push_back({c.value, "tandem_attend", kInvalid, "selection.idx", c.value, [&](tandem_error** e) {
                         LayerCall append(dense.world.sequence, 0, 1, 3);  // token 90 becomes the query
                         Named named(dense.world.sequence, 1, 2, c.idx);
                         named.selection.flags = c.flags;
                         named.selection.unit_tokens = c.unit;
                         named.o.view.data = out.at<float>();
                         return tandem_attend(dense.session, &named.args, e);
                       }});
  check_all_refused(dense.world, refused, &out);
}

// A refused call appends none of its tokens.
void appends_nothing_when_refused(void**) {
  const Dense dense;
  LayerCall call(dense.world.sequence, 0, 2, 3);
  std::vector<int32_t> idx = {90, 91, 92};  // the second query is token 91
  std::vector<int32_t> both = {5, 90, -1};
  both.insert(both.end(), idx.begin(), idx.end());
  const int64_t shape[] = {2, 1, 3};
  tandem_tensor view;
  OK(tandem_tensor_init, &view, TANDEM_I32, both.data(), 3, shape);
  tandem_selection selection = TANDEM_SELECTION_INIT;
  selection.idx = &view;
  call.args.selection = &selection;
  check_all_refused(dense.world, {{"append", "tandem_attend", kInvalid, "selection.idx", "[1, 0, 2] = 92",
                                   [&](tandem_error** e) { return tandem_attend(dense.session, &call.args, e); }}});
  both[5] = -1;
  OK(tandem_attend, dense.session, &call.args);
}

void refuses_other_policies(void**) {
  const World world;
  const Named named(world.sequence, 1, 1, {1, 2});
  check_all_refused(world, {{"hgca", "tandem_attend", kUnsupported, "selection", "\"hgca\"",
                             [&](tandem_error** e) { return tandem_attend(world.session, &named.args, e); }}});
  const uint8_t flags[] = {0, 1, 0, 0};
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.streaming_heads = flags;
  options.n_streaming_heads = 2 * kKvHeads;
  tandem_session* session = nullptr;
  OK(tandem_session_create, &session, world.cache, &options);
  check_all_refused(world, {{"streaming heads", "tandem_attend", kUnsupported, "selection", "streaming_heads",
                             [&](tandem_error** e) { return tandem_attend(session, &named.args, e); }}});
  tandem_session_release(session);
}

// Keys and values that no list of their head names are NaN. The count of bytes read covers only named keys.
void reads_named_keys_alone(void**) {
  const Dense dense;
  constexpr int64_t kLength = 400, kFew = 100;
  int64_t sequence = 0;
  OK(tandem_sequence_create, &sequence, dense.world.cache);
  LayerCall call(sequence, 0, kLength, 5);
  for (int64_t t = 0; t < kLength; ++t)
    for (int64_t h = 0; h < kKvHeads; ++h)
      if (t % 4 != h + 1)
        for (int64_t d = 0; d < kDim; ++d)
          call.k.values[(t * kKvHeads + h) * kDim + d] = call.v.values[(t * kKvHeads + h) * kDim + d] = NAN;
  OK(tandem_attend, dense.session, &call.args);
  std::vector<int32_t> idx;
  for (int64_t h = 0; h < kKvHeads; ++h)
    for (int64_t i = 0; i < kFew; ++i) idx.push_back(static_cast<int32_t>(4 * i + h + 1));
  tandem_session_stats before = TANDEM_SESSION_STATS_INIT, after = TANDEM_SESSION_STATS_INIT;
  OK(tandem_session_get_stats, &before, dense.session);
  const Named named(sequence, 1, 2, idx);
  OK(tandem_attend, dense.session, &named.args);
  OK(tandem_session_get_stats, &after, dense.session);
  for (const float x : named.o.values) assert_true(std::isfinite(x));
  for (const float x : named.lse.values) assert_true(std::isfinite(x));
  const int64_t key_bytes = 2 * kDim * 2;  // K and V are bf16
  assert_int_equal(
      after.host_kv_bytes_read + after.resident_kv_bytes_read - before.host_kv_bytes_read - before.resident_kv_bytes_read,
      kKvHeads * kFew * key_bytes);
  assert_int_equal(after.resident_kv_bytes_read - before.resident_kv_bytes_read, kKvHeads * (32 / 4) * key_bytes);
}

void a_row_of_pads_attends_nothing(void**) {
  const Dense dense;
  for (const std::vector<int32_t>& idx : {std::vector<int32_t>{-1, -1}, std::vector<int32_t>{}}) {
    const Named named(dense.world.sequence, 1, 1, idx);
    OK(tandem_attend, dense.session, &named.args);
    for (const float x : named.o.values) assert_true(x == 0.0f);
    for (const float x : named.lse.values) assert_true(x == -std::numeric_limits<float>::infinity());
  }
}

struct Told {
  int64_t n_calls = 0, done = 0, total = 0, most = std::numeric_limits<int64_t>::max();
};
int32_t tell(int64_t done, int64_t total, void* user) {
  Told& told = *static_cast<Told*>(user);
  assert_true(done >= told.done && done <= total && (told.n_calls == 0 || total == told.total));
  told.done = done;
  told.total = total;
  return ++told.n_calls >= told.most ? 1 : 0;
}

// A call has more queries than one batch. Each query gives the bits that it gives alone. Progress continues from batch to
// batch, and a callback may stop the call.
void goes_on_in_batches(void**) {
  const Dense dense;
  constexpr int64_t kLength = 1200, kFew = 300;
  LayerCall call(dense.world.other, 0, kLength, 5);
  std::vector<int32_t> idx(static_cast<size_t>(kLength * kKvHeads * kFew), -1);
  for (int64_t row = 0; row < kLength * kKvHeads; ++row)
    for (int64_t i = 0, t = row % 3; i < kFew && t <= row / kKvHeads; ++i, t += 1 + (row + i) % 4)
      idx[static_cast<size_t>(row * kFew + i)] = static_cast<int32_t>(t);
  const int64_t shape[] = {kLength, kKvHeads, kFew};
  tandem_tensor view;
  OK(tandem_tensor_init, &view, TANDEM_I32, idx.data(), 3, shape);
  tandem_selection selection = TANDEM_SELECTION_INIT;
  selection.idx = &view;
  call.args.selection = &selection;
  Told told;
  told.most = 2;
  call.args.progress = tell;
  call.args.progress_user = &told;
  tandem_error* error = nullptr;
  assert_int_equal(tandem_attend(dense.session, &call.args, &error), TANDEM_ERROR_CANCELLED);
  tandem_error_release(error);
  int64_t length = -1;
  OK(tandem_sequence_length, &length, dense.world.cache, dense.world.other, 0);
  assert_int_equal(length, 0);
  told = {};
  call.args.progress = tell;
  OK(tandem_attend, dense.session, &call.args);
  assert_true(told.n_calls > 1 && told.done == told.total);
  const LayerCall other_layer(dense.world.other, 1, kLength, 9);  // a fork requires equal lengths in all layers
  OK(tandem_attend, dense.session, &other_layer.args);
  for (const int64_t t : {int64_t{0}, int64_t{1}, int64_t{700}, kLength - 1}) {
    int64_t fork = 0;
    OK(tandem_sequence_fork, &fork, dense.world.cache, dense.world.other);
    OK(tandem_sequence_truncate, dense.world.cache, fork, t + 1);
    const auto first = idx.begin() + t * kKvHeads * kFew;
    Named alone(fork, 1, kKvHeads, std::vector<int32_t>(first, first + kKvHeads * kFew));
    std::copy_n(call.q.values.begin() + t * kQHeads * kDim, kQHeads * kDim, alone.q.values.begin());
    OK(tandem_attend, dense.session, &alone.args);
    assert_memory_equal(alone.o.values.data(), call.o.values.data() + t * kQHeads * kDim, kQHeads * kDim * sizeof(float));
    OK(tandem_sequence_drop, dense.world.cache, fork);
  }
}

// Lists the keys of the last call's last query: the named keys, or those of the policy if the call named none. A truncation
// shortens the sequence and the range of keys that may be named.
void lists_what_was_named(void**) {
  const Dense dense;
  const auto listed = [&](int32_t head) {
    std::vector<int64_t> tokens(kTokens);
    int64_t n = 0;
    OK(tandem_session_selection, tokens.data(), nullptr, kTokens, &n, dense.session, dense.world.sequence, 0, head, 0);
    tokens.resize(static_cast<size_t>(n));
    return tokens;
  };
  Named named(dense.world.sequence, 2, 2, {0, 1, -1, 2, 3, 4, 1, 3, -1, 44, -1, -1});
  named.selection.unit_tokens = 2;
  OK(tandem_attend, dense.session, &named.args);
  assert_true(listed(0) == std::vector<int64_t>({2, 3, 6, 7}));
  assert_true(listed(1) == std::vector<int64_t>({88, 89}));
  named.args.selection = nullptr;
  OK(tandem_attend, dense.session, &named.args);
  assert_int_equal(listed(0).size(), kTokens);
  named.args.selection = &named.selection;
  OK(tandem_attend, dense.session, &named.args);
  OK(tandem_sequence_truncate, dense.world.cache, dense.world.sequence, 50);
  assert_int_equal(listed(1).size(), 50);
}

void follows_truncations(void**) {
  const Dense dense;
  Named named(dense.world.sequence, 1, 1, {3, 80});
  OK(tandem_attend, dense.session, &named.args);
  OK(tandem_sequence_truncate, dense.world.cache, dense.world.sequence, 80);
  check_all_refused(dense.world, {{"behind the end", "tandem_attend", kInvalid, "selection.idx", "[0, 0, 1] = 80",
                                   [&](tandem_error** e) { return tandem_attend(dense.session, &named.args, e); }}});
  named.idx[1] = 79;
  OK(tandem_attend, dense.session, &named.args);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(refuses_structs),
      cmocka_unit_test(refuses_indices),
      cmocka_unit_test(appends_nothing_when_refused),
      cmocka_unit_test(refuses_other_policies),
      cmocka_unit_test(reads_named_keys_alone),
      cmocka_unit_test(a_row_of_pads_attends_nothing),
      cmocka_unit_test(goes_on_in_batches),
      cmocka_unit_test(lists_what_was_named),
      cmocka_unit_test(follows_truncations),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
