// SPDX-License-Identifier: MIT
// Every reason for which a batch is refused: status, field and text are right, outputs are NaN, sequences are as before, and
// the state works afterwards. Also objects that are released in any order.
#include <functional>

#include "ggml_world.h"

namespace {

using namespace ggml_test;

constexpr int64_t kDim = 64, kQHeads = 4, kKvHeads = 2;

// A batch of some tokens with the tensors of one layer. Tests may spoil any of them.
struct Call {
  Graph graph;
  ggml_tensor *q, *k, *v, *o = nullptr;
  Batch batch;
  explicit Call(const World& world, int64_t n_tokens = 5)
      : q(graph.heads(GGML_TYPE_F32, kDim, kQHeads, n_tokens, 1)),
        k(graph.heads(GGML_TYPE_F32, kDim, kKvHeads, n_tokens, 2)),
        v(graph.heads(GGML_TYPE_F32, kDim, kKvHeads, n_tokens, 3)),
        batch({0}, {n_tokens}, {world.length(0)}) {}
  int32_t begin(const World& world) const { return tandem_ggml_begin(world.state.get(), &batch.view); }
  void compute(const World& world, int32_t layer_idx = 0) {
    o = tandem_ggml_attend(graph.ctx(), world.state.get(), layer_idx, q, k, v);
    graph.compute(o);
  }
  int32_t run(const World& world) {
    expect_ok(world.state.get(), begin(world));
    compute(world);
    return tandem_ggml_end(world.state.get());
  }
};

void expect(tandem_ggml* state, int32_t got, int32_t status, const char* field, const char* words) {
  const char *said = tandem_ggml_message(state), *named = tandem_ggml_field(state);
  if (got != status || tandem_ggml_status(state) != status || std::strcmp(named, field) != 0 || !std::strstr(said, words))
    fail_msg("%s \"%s\" (%s) instead of %s \"%s\" (%s)", tandem_status_name(got), said, named, tandem_status_name(status),
             words, field);
}

// Asserts that the state takes a good batch, and that the sequence then has only that batch's tokens more.
void works_on(const World& world) {
  const int64_t before = world.length(0);
  Call call(world);
  expect_ok(world.state.get(), call.run(world));
  for (const float x : values_of(call.o)) assert_true(std::isfinite(x));
  assert_int_equal(world.length(0), before + 5);
}

// Lets `spoil` change a call's tensors, batch or state, computes the node and closes the batch. Asserts the error.
void refused(int32_t status, const char* field, const char* words, const std::function<void(Call*)>& spoil) {
  const World world;
  works_on(world);
  Call call(world);
  spoil(&call);
  expect_ok(world.state.get(), call.begin(world));
  call.compute(world);
  expect(world.state.get(), tandem_ggml_end(world.state.get()), status, field, words);
  assert_true(all_nan(call.o));
  assert_int_equal(world.length(0), 5);
  works_on(world);
}

void shapes_types_and_strides(void**) {
  const auto i_arg = TANDEM_ERROR_INVALID_ARGUMENT;
  const auto view = [](Call* call, ggml_tensor* of, int64_t dim, int64_t heads, int64_t tokens) {
    return ggml_view_3d(call->graph.ctx(), of, dim, heads, tokens, of->nb[1], of->nb[2], 0);
  };
  refused(i_arg, "q", "q is [64, 4, 4, 1], not [64, 4, 5]", [&](Call* call) { call->q = view(call, call->q, 64, 4, 4); });
  refused(i_arg, "q", "q is [64, 3, 5, 1]", [&](Call* call) { call->q = view(call, call->q, 64, 3, 5); });
  refused(i_arg, "k", "k is [64, 1, 5, 1]", [&](Call* call) { call->k = view(call, call->k, 64, 1, 5); });
  refused(i_arg, "v", "v is [32, 2, 5, 1]", [&](Call* call) { call->v = view(call, call->v, 32, 2, 5); });
  refused(i_arg, "q", "q is [64, 5, 4, 1]",
          [&](Call* call) { call->q = ggml_permute(call->graph.ctx(), call->q, 0, 2, 1, 3); });
  refused(i_arg, "k", "k is [64, 2, 5, 2]", [&](Call* call) { call->k->ne[3] = 2; });
  refused(TANDEM_ERROR_UNSUPPORTED, "q", "q is of type i32", [&](Call* call) { call->q->type = GGML_TYPE_I32; });
  refused(TANDEM_ERROR_UNSUPPORTED, "v", "v is of type q6_K",
          [&](Call* call) { call->v = ggml_new_tensor_3d(call->graph.ctx(), GGML_TYPE_Q6_K, 256, 2, 5); });
  // Errors that the library reports: quantized queries, heads that overlap, K without V.
  refused(i_arg, "q.dtype", "q.dtype = 5 (q8_0)",
          [&](Call* call) { call->q = call->graph.heads(GGML_TYPE_Q8_0, kDim, kQHeads, 5, 1); });
  refused(i_arg, "k.stride[1]", "less than the 64", [&](Call* call) { call->k->nb[1] = 32 * sizeof(float); });
  refused(i_arg, "k", "strides of 8,", [&](Call* call) { call->k->nb[0] = 8; });
  refused(i_arg, "k", "strides of 4, 258", [&](Call* call) { call->k->nb[1] = 258; });
  refused(i_arg, "v", "v", [&](Call* call) { call->v = nullptr; });
  refused(i_arg, "k", "k", [&](Call* call) { call->k = nullptr; });
}

void batches_that_no_causal_mask_describes(void**) {
  const World world;
  tandem_ggml* state = world.state.get();
  const auto begin = [&](Batch* batch) { return tandem_ggml_begin(state, &batch->view); };
  works_on(world);
  Batch shared({0, 1}, {2, 1}), again({0, 1, 0}, {2, 1, 1}), far({0, 2}, {1, 1}), negative({0}, {1});
  shared.counts_[1] = 2;
  expect(state, begin(&shared), TANDEM_ERROR_UNSUPPORTED, "n_seq_id", "n_seq_id[1] = 2: a token is of one sequence");
  shared.counts_[1] = 0;
  expect(state, begin(&shared), TANDEM_ERROR_UNSUPPORTED, "n_seq_id", "n_seq_id[1] = 0");
  expect(state, begin(&again), TANDEM_ERROR_UNSUPPORTED, "seq_id", "seq_id[3] = 0 again");
  expect(state, begin(&far), TANDEM_ERROR_INVALID_ARGUMENT, "seq_id", "seq_id[1] = 2 is not in 0 ... 1");
  negative.ids_[0] = -1;
  expect(state, begin(&negative), TANDEM_ERROR_INVALID_ARGUMENT, "seq_id", "seq_id[0] = -1");
  const Batch early({0}, {2}, {4}), gap({1, 0}, {1, 1}, {0, 6});
  expect(state, tandem_ggml_begin(state, &early.view), TANDEM_ERROR_INVALID_ARGUMENT, "pos",
         "pos[0] = 4, but the token is number 5");
  expect(state, tandem_ggml_begin(state, &gap.view), TANDEM_ERROR_INVALID_ARGUMENT, "pos", "pos[1] = 6");
  Batch tree({0}, {3}, {5});
  tree.pos_[2] = 6;  // two candidates for one position
  expect(state, begin(&tree), TANDEM_ERROR_INVALID_ARGUMENT, "pos", "pos[2] = 6, but the token is number 7");
  Batch flagged({0}, {1});
  flagged.view.flags = TANDEM_ATTEND_SPECULATIVE;
  expect(state, begin(&flagged), TANDEM_ERROR_INVALID_ARGUMENT, "flags", "flags = 1");
  Batch empty({0}, {0});
  expect(state, begin(&empty), TANDEM_ERROR_INVALID_ARGUMENT, "n_tokens", "n_tokens = 0");
  expect(state, tandem_ggml_begin(state, nullptr), TANDEM_ERROR_INVALID_ARGUMENT, "batch", "batch");
  assert_int_equal(tandem_ggml_begin(nullptr, &flagged.view), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(tandem_ggml_end(nullptr), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(world.length(0), 5);
  assert_int_equal(world.length(1), 0);
  works_on(world);
}

void creation(void**) {
  const World world;
  struct Bad {
    const char* words;
    void (*spoil)(tandem_ggml_options*);
  };
  const Bad all[] = {
      {"cache is NULL", [](tandem_ggml_options* options) { options->cache = nullptr; }},
      {"session is NULL", [](tandem_ggml_options* options) { options->session = nullptr; }},
      {"layers is NULL", [](tandem_ggml_options* options) { options->layers = nullptr; }},
      {"n_layers is less than 1", [](tandem_ggml_options* options) { options->n_layers = 0; }},
      {"sequences is NULL", [](tandem_ggml_options* options) { options->sequences = nullptr; }},
      {"n_sequences is less than 1", [](tandem_ggml_options* options) { options->n_sequences = -1; }},
  };
  tandem_ggml* made = nullptr;
  for (const Bad& bad : all) {
    tandem_ggml_options options = world.options();
    const char* why = nullptr;
    bad.spoil(&options);
    assert_int_equal(tandem_ggml_create(&made, &options, &why), TANDEM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(why, bad.words);
    assert_int_equal(tandem_ggml_create(&made, &options, nullptr), TANDEM_ERROR_INVALID_ARGUMENT);
    assert_null(made);
  }
  const tandem_ggml_options options = world.options();
  assert_int_equal(tandem_ggml_create(nullptr, &options, nullptr), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(tandem_ggml_create(&made, nullptr, nullptr), TANDEM_ERROR_INVALID_ARGUMENT);
}

// Errors of building a node are kept like those of computing it, also if the caller does not ask in between.
void nodes_of_no_layer(void**) {
  const World world;
  tandem_ggml* state = world.state.get();
  for (const int32_t layer_idx : {-1, 1}) {
    Call call(world);
    expect_ok(state, call.begin(world));
    call.compute(world, layer_idx);
    expect(state, tandem_ggml_end(state), TANDEM_ERROR_INVALID_ARGUMENT, "layer_idx", "is not in 0 ... 0");
    assert_true(all_nan(call.o));
  }
  Call early(world);
  early.o = tandem_ggml_attend(early.graph.ctx(), state, 7, early.q, early.k, early.v);
  expect(state, early.begin(world), TANDEM_ERROR_INVALID_ARGUMENT, "layer_idx", "layer_idx = 7");
  expect_ok(state, early.begin(world));  // the error was reported and cleared; the node is as bad as before
  early.graph.compute(early.o);
  expect(state, tandem_ggml_end(state), TANDEM_ERROR_INVALID_ARGUMENT, "layer_idx", "no layer of the model");
  assert_true(all_nan(early.o));

  assert_null(tandem_ggml_attend(early.graph.ctx(), nullptr, 0, early.q, early.k, early.v));
  assert_int_equal(tandem_ggml_status(nullptr), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_string_equal(tandem_ggml_message(nullptr), "");
  assert_string_equal(tandem_ggml_field(nullptr), "");
  assert_null(tandem_ggml_attend(early.graph.ctx(), state, 0, nullptr, early.k, early.v));
  expect(state, tandem_ggml_status(state), TANDEM_ERROR_INVALID_ARGUMENT, "q", "q is NULL");
  works_on(world);
  assert_null(tandem_ggml_attend(nullptr, state, 0, early.q, early.k, early.v));
  expect(state, tandem_ggml_status(state), TANDEM_ERROR_INVALID_ARGUMENT, "ctx", "ctx is NULL");
  works_on(world);
}

void calls_out_of_order(void**) {
  const World world({plain_layer(), plain_layer()});
  tandem_ggml* state = world.state.get();
  const auto i_state = TANDEM_ERROR_INVALID_STATE;
  expect(state, tandem_ggml_end(state), i_state, "batch", "no batch is open");
  {
    Call call(world);
    call.compute(world);
    assert_true(all_nan(call.o));
    expect(state, call.begin(world), i_state, "batch", "");  // of the call before
  }
  {  // a layer is missing; then a node is computed after the batch was closed, and the caller does not ask
    Call call(world);
    expect_ok(state, call.begin(world));
    call.compute(world);
    expect(state, tandem_ggml_end(state), i_state, "layer_idx", "layer 1 has not been computed");
    call.graph.compute(call.o);
    assert_true(all_nan(call.o));
    expect(state, call.begin(world), i_state, "batch", "outside of");
  }
  {  // one layer twice
    Call call(world);
    expect_ok(state, call.begin(world));
    call.graph.add(tandem_ggml_attend(call.graph.ctx(), state, 0, call.q, call.k, call.v));
    call.compute(world, 0);
    expect(state, tandem_ggml_end(state), i_state, "layer_idx", "layer 0 has the batch's tokens already");
    assert_true(all_nan(call.o));
  }
  {  // begun twice
    Call call(world);
    expect_ok(state, call.begin(world));
    expect(state, call.begin(world), i_state, "batch", "a batch is open");
    expect(state, tandem_ggml_end(state), i_state, "batch", "");
  }
  assert_int_equal(world.length(0, 0), 0);
  assert_int_equal(world.length(0, 1), 0);
}

// A node that fails and appends nothing leaves the step complete. The step is rolled back all the same.
void complete_steps_are_taken_back_too(void**) {
  const World world;
  works_on(world);
  Call call(world);
  expect_ok(world.state.get(), call.begin(world));
  call.graph.add(tandem_ggml_attend(call.graph.ctx(), world.state.get(), 0, call.q, call.k, call.v));
  call.k = call.v = nullptr;
  call.q = ggml_view_3d(call.graph.ctx(), call.q, kDim, kQHeads, 3, call.q->nb[1], call.q->nb[2], 0);
  call.compute(world);
  expect(world.state.get(), tandem_ggml_end(world.state.get()), TANDEM_ERROR_INVALID_ARGUMENT, "q", "q is [64, 4, 3, 1]");
  assert_int_equal(world.length(0), 5);
  works_on(world);
}

void sequences_that_are_not_to_be_had(void**) {
  World world;
  works_on(world);
  tandem_ggml* state = world.state.get();
  const int64_t kept = world.sequences[0];
  world.sequences[0] = 12345;
  const Batch unchecked({0}, {5});
  expect(state, tandem_ggml_begin(state, &unchecked.view), TANDEM_ERROR_NOT_FOUND, "sequence", "1");
  world.sequences[0] = kept;
  {
    tandem::Session other(world.cache, TANDEM_SESSION_OPTIONS_INIT);
    const int64_t q_len = 1;
    assert_int_equal(tandem_step_begin(other.get(), &kept, &q_len, 1, nullptr, nullptr), TANDEM_OK);
    Call call(world);
    expect(state, call.begin(world), TANDEM_ERROR_BUSY, "sequence", "in flight");
    tandem_step_end(other.get(), nullptr, nullptr);
  }
  works_on(world);
}

// Another user appends to one layer only.
void uneven_sequences(void**) {
  World world({plain_layer(), plain_layer()});
  const tandem_test::Tensor k({3, kKvHeads, kDim}), v({3, kKvHeads, kDim});
  world.cache.append(world.sequences[0], 1, &k.view, &v.view);
  const Batch batch({0}, {1});
  expect(world.state.get(), tandem_ggml_begin(world.state.get(), &batch.view), TANDEM_ERROR_INVALID_STATE, "seq_id",
         "has 0 tokens in layer 0 and 3 in layer 1");
  assert_int_equal(world.length(0, 1), 3);
}

// A batch that failed and cannot be rolled back, because another session has begun a step with its sequence.
void taken_back_in_vain(void**) {
  World world;
  works_on(world);
  tandem_ggml* state = world.state.get();
  Call call(world);
  expect_ok(state, call.begin(world));
  tandem::Session other(world.cache, TANDEM_SESSION_OPTIONS_INIT);
  const int64_t q_len = 1;
  assert_int_equal(tandem_step_begin(other.get(), world.sequences.data(), &q_len, 1, nullptr, nullptr), TANDEM_OK);
  call.compute(world);
  expect(state, tandem_ggml_end(state), TANDEM_ERROR_BUSY, "sequences", "; then tandem_sequence_truncate");
  tandem_step_end(other.get(), nullptr, nullptr);
  works_on(world);
}

bool memory_is_refused = false;
void* allocate(size_t bytes, size_t alignment, void*) {
  return memory_is_refused ? nullptr : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void release(void* data, size_t, void*) { std::free(data); }

void memory_that_is_not_to_be_had(void**) {
  tandem_engine_options engine_options = two_threads();
  engine_options.alloc = allocate;
  engine_options.free = release;
  const World world({plain_layer()}, stored_as(TANDEM_F32), engine_options);
  const Batch batch({0}, {100000});
  memory_is_refused = true;
  const int32_t status = tandem_ggml_begin(world.state.get(), &batch.view);
  memory_is_refused = false;
  expect(world.state.get(), status, TANDEM_ERROR_OUT_OF_MEMORY, tandem_ggml_field(world.state.get()), "");
  works_on(world);

  tandem_cache_options capped = stored_as(TANDEM_F32);
  capped.host_cap_bytes = 4 << 20;
  const World small({plain_layer()}, capped);
  works_on(small);
  expect(small.state.get(), tandem_ggml_begin(small.state.get(), &batch.view), TANDEM_ERROR_CAPACITY,
         tandem_ggml_field(small.state.get()), "host_cap_bytes");
  works_on(small);
}

void stopped(void**) {
  const World world;
  works_on(world);
  Call call(world);
  const int32_t flag = 1;
  call.batch.view.cancel = &flag;
  expect(world.state.get(), call.run(world), TANDEM_ERROR_CANCELLED, "cancel", "");
  assert_true(all_nan(call.o));
  assert_int_equal(world.length(0), 5);
  works_on(world);
}

// After an error, the rest of the batch does not reach the library.
void the_first_error_wins(void**) {
  const World world({plain_layer(), plain_layer()});
  tandem_ggml* state = world.state.get();
  Call call(world);
  expect_ok(state, call.begin(world));
  ggml_tensor* bad = tandem_ggml_attend(call.graph.ctx(), state, 0, call.k, call.k, call.v);
  call.graph.add(bad);
  call.compute(world, 1);
  expect(state, tandem_ggml_end(state), TANDEM_ERROR_INVALID_ARGUMENT, "q", "q is [64, 2, 5, 1]");
  assert_true(all_nan(bad));
  assert_true(all_nan(call.o));
  assert_int_equal(world.length(0, 1), 0);
}

// Releases cache and session before the state, the state before the graph, and all of them with a batch open.
void released_in_any_order(void**) {
  tandem_ggml* state = nullptr;
  std::vector<int64_t> sequences;  // the state borrows it
  {
    World world;
    works_on(world);
    state = world.state.release();
    Call call(world);
    expect_ok(state, tandem_ggml_begin(state, &call.batch.view));
    call.o = tandem_ggml_attend(call.graph.ctx(), state, 0, call.q, call.k, call.v);
    { const tandem::Session taken(std::move(world.session)); }
    call.graph.compute(call.o);
    assert_true(all_nan(call.o));
    expect(state, tandem_ggml_end(state), TANDEM_ERROR_INVALID_HANDLE, "session", "");
    sequences = std::move(world.sequences);
  }
  const Batch batch({0}, {1});
  expect(state, tandem_ggml_begin(state, &batch.view), TANDEM_ERROR_INVALID_HANDLE, "cache", "");
  tandem_ggml_release(state);

  World world;
  works_on(world);
  Call call(world);
  expect_ok(world.state.get(), call.begin(world));
  call.compute(world);
  world.state = world.make();  // rolls back the old state's batch, although it is complete
  assert_int_equal(world.length(0), 5);
  tandem_ggml_release(nullptr);
  works_on(world);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(shapes_types_and_strides),
      cmocka_unit_test(batches_that_no_causal_mask_describes),
      cmocka_unit_test(creation),
      cmocka_unit_test(nodes_of_no_layer),
      cmocka_unit_test(calls_out_of_order),
      cmocka_unit_test(complete_steps_are_taken_back_too),
      cmocka_unit_test(sequences_that_are_not_to_be_had),
      cmocka_unit_test(memory_that_is_not_to_be_had),
      cmocka_unit_test(uneven_sequences),
      cmocka_unit_test(taken_back_in_vain),
      cmocka_unit_test(stopped),
      cmocka_unit_test(the_first_error_wins),
      cmocka_unit_test(released_in_any_order),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
