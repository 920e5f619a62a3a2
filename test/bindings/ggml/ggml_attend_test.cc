// SPDX-License-Identifier: MIT
// The node against ggml_flash_attn_ext() on the same numbers and mask, and against double precision: every head dim, groups
// of query heads, soft cap, sinks, sliding windows, types of K and V, two sequences that prefill, append and decode. Also
// the layouts of tensors that the node takes.
#include "api/saved_world.h"
#include "ggml_world.h"
#include "reference/gate.h"
#include "reference/sequence_model.h"

namespace {

using namespace ggml_test;

constexpr double kMostNmse = 5e-4;  // the limit of ggml's own tests of flash attention

struct Case {
  ggml_type type = GGML_TYPE_F32;  // type of K and V, as given and as stored
  int32_t k_dim = 64, v_dim = 64, n_kv_heads = 2, group = 1;
  float soft_cap = 0.0f;
  bool has_sinks = false;
  int64_t window = 0;
  int n_threads = 1;

  int32_t n_q_heads() const { return n_kv_heads * group; }
  std::vector<float> sinks() const {
    std::vector<float> sinks;
    for (int32_t i = 0; has_sinks && i < n_q_heads(); ++i) sinks.push_back(4.0f * noise(i, 99));
    return sinks;
  }
};

tandem_layer_options layer_of(const Case& of, const std::vector<float>& sinks) {
  tandem_layer_options layer = plain_layer(of.n_q_heads(), of.n_kv_heads, of.k_dim);
  layer.v_head_dim = of.v_dim;
  layer.soft_cap = of.soft_cap;
  layer.sliding_window_tokens = of.window;
  layer.sinks = sinks.empty() ? nullptr : sinks.data();
  return layer;
}

reference::RefLayer reference_layer(const Case& of) {
  reference::RefLayer layer;
  layer.n_q_heads = of.n_q_heads();
  layer.n_kv_heads = of.n_kv_heads;
  layer.k_head_dim = of.k_dim;
  layer.v_head_dim = of.v_dim;
  layer.k_type = layer.v_type = tandem_ggml_dtype(of.type);
  layer.soft_cap = of.soft_cap;
  layer.sliding_window = of.window;
  layer.sinks = of.sinks();
  return layer;
}

std::vector<double> widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// One sequence as ggml and the reference see it.
struct History {
  std::vector<float> k, v;  // [n_tokens, n_kv_heads, dim], as stored
  reference::SequenceModel model;
  explicit History(const std::vector<reference::RefLayer>* layers) : model(layers) {}
};

// Returns ggml_flash_attn_ext() of the last q_len tokens, with the mask of a causal layer with this window.
std::vector<float> flash(const Case& of, const History& history, const float* q, int64_t q_len) {
  const Graph graph;
  ggml_context* c = graph.ctx();
  const int64_t n_kv = static_cast<int64_t>(history.k.size()) / (of.n_kv_heads * of.k_dim);
  const auto stored = [&](int64_t dim, const std::vector<float>& values) {
    ggml_tensor* tensor = ggml_new_tensor_3d(c, of.type, dim, of.n_kv_heads, n_kv);
    Graph::round_into(tensor, values.data());
    return ggml_permute(c, tensor, 0, 2, 1, 3);
  };
  ggml_tensor* queries = ggml_new_tensor_3d(c, GGML_TYPE_F32, of.k_dim, of.n_q_heads(), q_len);
  Graph::round_into(queries, q);
  ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, n_kv, q_len);
  for (int64_t t = 0; t < q_len; ++t)
    for (int64_t key = 0; key < n_kv; ++key) {
      const int64_t own = n_kv - q_len + t;
      const bool is_seen = key <= own && (of.window == 0 || key > own - of.window);
      static_cast<ggml_fp16_t*>(mask->data)[t * n_kv + key] = ggml_fp32_to_fp16(is_seen ? 0.0f : -INFINITY);
    }
  const float scale = 1.0f / std::sqrt(static_cast<float>(of.k_dim));
  ggml_tensor* o = ggml_flash_attn_ext(c, ggml_permute(c, queries, 0, 2, 1, 3), stored(of.k_dim, history.k),
                                       stored(of.v_dim, history.v), mask, scale, 0.0f, of.soft_cap);
  const std::vector<float> sinks = of.sinks();
  if (!sinks.empty()) {
    ggml_tensor* tensor = ggml_new_tensor_1d(c, GGML_TYPE_F32, of.n_q_heads());
    Graph::round_into(tensor, sinks.data());
    ggml_flash_attn_ext_add_sinks(o, tensor);
  }
  graph.compute(o);
  return values_of(o);
}

void check_nmse(const Case& of, const std::vector<float>& expected, const float* o) {
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double off = double{o[i]} - double{expected[i]};
    error += off * off;
    size += double{expected[i]} * double{expected[i]};
  }
  if (!(error <= kMostNmse * size))
    fail_msg("%s, dims %d and %d, group %d: NMSE against ggml %g", ggml_type_name(of.type), of.k_dim, of.v_dim, of.group,
             error / size);
}

void check_truth(const Case& of, const reference::RefLayer& layer, const History& history, const float* q, int64_t q_len,
                 const float* o) {
  const reference::Truth truth = history.model.attend(0, q_len, q, {});
  reference::GateCall call;
  call.truth = &truth;
  call.layer = &layer;
  call.o = [&](int64_t token, int32_t head, int32_t dim) {
    return double{o[(token * of.n_q_heads() + head) * of.v_dim + dim]};
  };
  const reference::GateVerdict verdict = reference::check_gate(call);
  if (!verdict.pass)
    fail_msg("%s, dims %d and %d, group %d: %s", ggml_type_name(of.type), of.k_dim, of.v_dim, of.group,
             verdict.message.c_str());
}

// Attends two sequences: a prompt each, a step of decode, an append beside a decode, and a step of the second alone.
void check(const Case& of) {
  const std::vector<float> sinks = of.sinks();
  tandem_cache_options cache = stored_as(tandem_ggml_dtype(of.type));
  cache.k_rotation = TANDEM_ROTATION_NONE;  // so 4-bit keys have ggml's bits
  World world({layer_of(of, sinks)}, cache);
  const std::vector<reference::RefLayer> layers{reference_layer(of)};
  History histories[2] = {History(&layers), History(&layers)};
  const std::vector<std::vector<int64_t>> steps = {{40, 17}, {1, 1}, {9, 1}, {0, 1}};
  int64_t seed = 0;
  for (const std::vector<int64_t>& q_lens : steps) {
    const Graph graph;
    const int64_t n_tokens = q_lens[0] + q_lens[1];
    ggml_tensor* q = graph.heads(GGML_TYPE_F32, of.k_dim, of.n_q_heads(), n_tokens, ++seed);
    ggml_tensor* k = graph.heads(of.type, of.k_dim, of.n_kv_heads, n_tokens, ++seed);
    ggml_tensor* v = graph.heads(of.type, of.v_dim, of.n_kv_heads, n_tokens, ++seed);
    const Batch batch({1, 0}, {q_lens[1], q_lens[0]}, {world.length(1), world.length(0)});
    expect_ok(world.state.get(), tandem_ggml_begin(world.state.get(), &batch.view));
    ggml_tensor* o = tandem_ggml_attend(graph.ctx(), world.state.get(), 0, q, k, v);
    if (of.n_threads > 1) graph.add(ggml_dup(graph.ctx(), q));  // one thread would compute the node if it were alone
    graph.compute(o, of.n_threads);
    expect_ok(world.state.get(), tandem_ggml_end(world.state.get()));
    assert_int_equal(o->ne[0], of.v_dim);
    assert_int_equal(o->ne[1], of.n_q_heads());
    assert_int_equal(o->ne[2], n_tokens);

    const std::vector<float> all_k = values_of(k), all_v = values_of(v), all_q = values_of(q), all_o = values_of(o);
    int64_t first = 0;
    for (const int i : {1, 0}) {
      const int64_t n = q_lens[static_cast<size_t>(i)];
      if (n == 0) continue;
      const auto rows = [&](const std::vector<float>& all, int64_t row) {
        return std::vector<float>(all.begin() + first * row, all.begin() + (first + n) * row);
      };
      const std::vector<float> new_k = rows(all_k, of.n_kv_heads * of.k_dim), new_v = rows(all_v, of.n_kv_heads * of.v_dim);
      History& history = histories[i];
      history.k.insert(history.k.end(), new_k.begin(), new_k.end());
      history.v.insert(history.v.end(), new_v.begin(), new_v.end());
      history.model.append(0, n, widened(new_k).data(), widened(new_v).data());
      const float* own_q = all_q.data() + first * of.n_q_heads() * of.k_dim;
      const float* own_o = all_o.data() + first * of.n_q_heads() * of.v_dim;
      check_nmse(of, flash(of, history, own_q, n), own_o);
      check_truth(of, layers[0], history, own_q, n, own_o);
      first += n;
    }
  }
}

// Blocks have 32 elements along a row.
bool has_rows(ggml_type type, int32_t dim) { return dim % ggml_blck_size(type) == 0; }

void every_head_dim_and_group(void**) {
  for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
    for (const int32_t group : {1, 4, 8}) {
      Case of;
      of.k_dim = of.v_dim = dim;
      of.group = group;
      of.type = group == 4 ? GGML_TYPE_F16 : group == 8 ? GGML_TYPE_BF16 : GGML_TYPE_F32;
      check(of);
    }
}

void every_type_of_k_and_v(void**) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0})
    for (const int32_t dim : {64, 128, 192}) {
      assert_true(has_rows(type, dim));
      Case of;
      of.type = type;
      of.k_dim = of.v_dim = dim;
      of.group = 4;
      check(of);
    }
}

void soft_cap_sinks_and_windows(void**) {
  for (const int32_t dim : {64, 128, 256})
    for (int variant = 3; variant < 24; ++variant) {
      const int features = variant / 3, groups[3] = {1, 4, 8};
      Case of;
      of.k_dim = of.v_dim = dim;
      of.group = groups[variant % 3];
      of.type = dim == 128 ? GGML_TYPE_F16 : GGML_TYPE_F32;
      of.soft_cap = (features & 1) != 0 ? 5.0f : 0.0f;
      of.has_sinks = (features & 2) != 0;
      of.window = (features & 4) != 0 ? 13 : 0;
      check(of);
    }
}

void k_and_v_of_different_head_dims(void**) {
  Case of;
  of.k_dim = 192;
  of.v_dim = 128;
  of.group = 4;
  check(of);
}

void any_number_of_threads(void**) {
  for (const int n_threads : {2, 3}) {
    Case of;
    of.n_threads = n_threads;
    check(of);
  }
}

// q, k and v are views of one product, whose rows are longer than theirs: the same bits as from copies.
void views_of_a_wider_product(void**) {
  constexpr int64_t kDim = 64, kQ = 4, kKv = 2, kTokens = 19, kWide = (kQ + 2 * kKv) * kDim;
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16}) {
    std::vector<float> outputs[2];
    for (const bool is_copied : {false, true}) {
      World world;
      const Graph graph;
      ggml_context* c = graph.ctx();
      ggml_tensor* product = graph.heads(type, kWide, kTokens, 1, 7);
      const size_t element = ggml_type_size(type);
      ggml_tensor* parts[3];
      const int64_t first[3] = {0, kQ * kDim, (kQ + kKv) * kDim}, heads[3] = {kQ, kKv, kKv};
      for (int i = 0; i < 3; ++i) {
        parts[i] = ggml_view_3d(c, product, kDim, heads[i], kTokens, kDim * element, kWide * element,
                                static_cast<size_t>(first[i]) * element);
        if (is_copied) parts[i] = ggml_cont(c, parts[i]);
      }
      const Batch batch({0}, {kTokens});
      expect_ok(world.state.get(), tandem_ggml_begin(world.state.get(), &batch.view));
      ggml_tensor* o = tandem_ggml_attend(c, world.state.get(), 0, parts[0], parts[1], parts[2]);
      graph.compute(o);
      expect_ok(world.state.get(), tandem_ggml_end(world.state.get()));
      outputs[is_copied] = values_of(o);
    }
    assert_memory_equal(outputs[0].data(), outputs[1].data(), outputs[0].size() * sizeof(float));
  }
}

// The library sees a tensor as [n_tokens, n_heads, head_dim] with strides in elements, and with whole blocks counted.
void layouts_are_the_abi_s(void**) {
  World world;
  const Graph graph;
  ggml_context* c = graph.ctx();
  tandem_ggml* state = world.state.get();
  const tandem_ggml_role role = {"k", 64, 2, TANDEM_DEVICE_HOST};
  state->batch.n_tokens = 3;
  struct Layout {
    ggml_type type;
    int32_t dtype;
  };
  for (const Layout& layout :
       {Layout{GGML_TYPE_F32, TANDEM_F32}, Layout{GGML_TYPE_F16, TANDEM_F16}, Layout{GGML_TYPE_BF16, TANDEM_BF16},
        Layout{GGML_TYPE_Q8_0, TANDEM_Q8_0}, Layout{GGML_TYPE_Q4_0, TANDEM_Q4_0}}) {
    ggml_tensor* wide = graph.heads(layout.type, 96, 5, 7, 1);
    ggml_tensor* part = ggml_view_3d(c, wide, 64, 2, 3, wide->nb[1], wide->nb[2], wide->nb[1]);
    tandem_tensor view;
    assert_int_equal(tandem_ggml_view(state, &view, part, &role), TANDEM_OK);
    assert_int_equal(view.struct_size, sizeof view);
    assert_int_equal(view.dtype, layout.dtype);
    assert_int_equal(view.device_type, TANDEM_DEVICE_HOST);
    assert_int_equal(view.n_dims, 3);
    const int64_t shape[4] = {3, 2, 64, 0}, stride[4] = {5 * 96, 96, 1, 0};
    assert_memory_equal(view.shape, shape, sizeof shape);
    assert_memory_equal(view.stride, stride, sizeof stride);
    assert_ptr_equal(view.data, static_cast<uint8_t*>(wide->data) + wide->nb[1]);
  }
  // With one token and one head, strides may have any value.
  const tandem_ggml_role single = {"k", 64, 1, TANDEM_DEVICE_HOST};
  state->batch.n_tokens = 1;
  ggml_tensor* odd = graph.heads(GGML_TYPE_F32, 64, 1, 1, 1);
  odd->nb[1] = 4, odd->nb[2] = 8;
  tandem_tensor view;
  assert_int_equal(tandem_ggml_view(state, &view, odd, &single), TANDEM_OK);
  assert_int_equal(view.stride[0], 64);
  assert_int_equal(view.stride[1], 64);
}

// Layers that share keys and values append nothing and attend the keys that exist. V that aliases K is not passed.
void layers_that_append_nothing_or_alias(void**) {
  tandem_layer_options aliasing = plain_layer(4, 1, 576);
  aliasing.v_head_dim = 512;
  aliasing.v_aliases_k = 1;
  World world({plain_layer(), aliasing});
  tandem_ggml* state = world.state.get();
  const Graph graph;
  const Batch batch({0}, {9}, {0});
  ggml_tensor* q = graph.heads(GGML_TYPE_F32, 64, 4, 9, 1);
  ggml_tensor* first = tandem_ggml_attend(graph.ctx(), state, 0, q, graph.heads(GGML_TYPE_F32, 64, 2, 9, 2),
                                          graph.heads(GGML_TYPE_F32, 64, 2, 9, 3));
  ggml_tensor* again = tandem_ggml_attend(graph.ctx(), state, 0, q, nullptr, nullptr);
  ggml_tensor* latent = graph.heads(GGML_TYPE_F16, 576, 1, 9, 4);
  ggml_tensor* mla = tandem_ggml_attend(graph.ctx(), state, 1, graph.heads(GGML_TYPE_F32, 576, 4, 9, 5), latent, nullptr);
  assert_int_equal(mla->ne[0], 512);
  expect_ok(state, tandem_ggml_begin(state, &batch.view));
  for (ggml_tensor* node : {first, again}) graph.add(node);
  graph.compute(mla);
  expect_ok(state, tandem_ggml_end(state));
  assert_memory_equal(first->data, again->data, ggml_nbytes(first));
  const std::vector<float> o = values_of(mla), k = values_of(latent);
  for (size_t i = 0; i < 512; ++i) assert_true(std::fabs(o[i] - k[i]) <= 1e-5f);  // the first token attends only itself
}

// Gives sequence 0 q_lens[0] more tokens and sequence 1 q_lens[1], by a node in one world and by tandem_attend() in the
// other. Both must give the same outputs.
void expect_same_by_call(const World& by_node, const World& by_call, const std::vector<int64_t>& q_lens, int64_t seed) {
  const Graph graph;
  tandem_ggml* state = by_node.state.get();
  const int64_t n_tokens = q_lens[0] + q_lens[1], heads[4] = {4, 2, 2, 4};
  ggml_tensor* tensors[4];
  tandem_tensor views[4];
  for (int i = 0; i < 4; ++i) {
    const int64_t shape[3] = {n_tokens, heads[i], 64};
    tensors[i] = graph.heads(GGML_TYPE_F32, 64, heads[i], n_tokens, 4 * seed + i);
    assert_int_equal(tandem_tensor_init(&views[i], TANDEM_F32, tensors[i]->data, 3, shape, nullptr), TANDEM_OK);
  }
  const Batch batch({0, 1}, q_lens);
  expect_ok(state, tandem_ggml_begin(state, &batch.view));
  ggml_tensor* o = tandem_ggml_attend(graph.ctx(), state, 0, tensors[0], tensors[1], tensors[2]);
  graph.compute(o);
  expect_ok(state, tandem_ggml_end(state));
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 2;
  args.sequences = by_call.sequences.data();
  args.q_lens = q_lens.data();
  args.q = &views[0], args.k = &views[1], args.v = &views[2], args.o = &views[3];
  OK(tandem_attend, by_call.session.get(), &args);
  const std::vector<float> got = values_of(o), wanted = values_of(tensors[3]);
  for (size_t i = 0; i < wanted.size(); ++i)
    if (!(std::fabs(got[i] - wanted[i]) <= 1e-6f)) fail_msg("element %zu: %g instead of %g", i, got[i], wanted[i]);
}

tandem_session_stats stats_of(const World& world) {
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
  OK(tandem_session_get_stats, &stats, world.session.get());
  return stats;
}

// Prompts, decode, and a chunk of a prompt beside decode, under the policy "patterns".
void head_patterns_are_those_of_a_call(void**) {
  const FourPatterns patterns;
  const World by_node({plain_layer()}, stored_as(TANDEM_F32), two_threads(), patterns.session);
  const World by_call({plain_layer()}, stored_as(TANDEM_F32), two_threads(), patterns.session);
  int64_t seed = 0;
  for (const std::vector<int64_t>& q_lens : std::vector<std::vector<int64_t>>{{300, 140}, {1, 1}, {150, 1}, {1, 30}})
    expect_same_by_call(by_node, by_call, q_lens, ++seed);
  const tandem_session_stats node = stats_of(by_node), call = stats_of(by_call);
  assert_int_equal(node.pattern_pairs, call.pattern_pairs);
  assert_true(node.pattern_pairs > 0 && node.pattern_pairs < node.pattern_dense_pairs);
}

// Blocks of 128 queries begin with a sequence's first token in the batch, so the cuts of a prompt move them.
void blocks_of_queries_begin_with_batches(void**) {
  FourPatterns patterns;
  for (tandem_head_pattern& head : patterns.heads) head = patterns.heads[0];
  const auto pairs_of = [&](const std::vector<int64_t>& cuts) {
    const World world({plain_layer()}, stored_as(TANDEM_F32), two_threads(), patterns.session);
    for (const int64_t n_tokens : cuts) {
      const Graph graph;
      const Batch batch({0}, {n_tokens});
      expect_ok(world.state.get(), tandem_ggml_begin(world.state.get(), &batch.view));
      graph.compute(tandem_ggml_attend(graph.ctx(), world.state.get(), 0, graph.heads(GGML_TYPE_F32, 64, 4, n_tokens, 1),
                                       graph.heads(GGML_TYPE_F32, 64, 2, n_tokens, 2),
                                       graph.heads(GGML_TYPE_F32, 64, 2, n_tokens, 3)));
      expect_ok(world.state.get(), tandem_ggml_end(world.state.get()));
    }
    return stats_of(world).pattern_pairs;
  };
  // A block attends the first 8 tokens, the 31 before its own, and its own. The first block attends only its own.
  constexpr int64_t kOwn128 = 128 * 129 / 2, kBefore = 8 + 31;
  assert_int_equal(pairs_of({256}), 4 * (2 * kOwn128 + 128 * kBefore));
  assert_int_equal(pairs_of({128, 128}), pairs_of({256}));
  constexpr int64_t kOwn100 = 100 * 101 / 2, kOwn28 = 28 * 29 / 2;
  assert_int_equal(pairs_of({100, 156}), 4 * (kOwn100 + kOwn128 + kOwn28 + 156 * kBefore));
}

// The last chunk of a prompt judges the keys outside the window.
void chunks_of_a_prompt(void**) {
  for (const uint32_t flags : {0u, TANDEM_ATTEND_PARTIAL}) {
    const World world({plain_layer()}, stored_as(TANDEM_F32), two_threads(), tandem_test::world_session_options());
    tandem_ggml* state = world.state.get();
    const Graph graph;
    Batch batch({0}, {100});
    batch.view.flags = flags;
    expect_ok(state, tandem_ggml_begin(state, &batch.view));
    graph.compute(tandem_ggml_attend(graph.ctx(), state, 0, graph.heads(GGML_TYPE_F32, 64, 4, 100, 1),
                                     graph.heads(GGML_TYPE_F32, 64, 2, 100, 2), graph.heads(GGML_TYPE_F32, 64, 2, 100, 3)));
    expect_ok(state, tandem_ggml_end(state));
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &stats, world.session.get());
    assert_int_equal(stats.n_refreshes > 0, flags == 0);
  }
}

// As with llama_state_seq_get_data() and _set_data(): a sequence is saved between batches, and the loaded one takes its
// number.
void a_sequence_is_saved_and_loaded(void**) {
  const auto session = tandem_test::world_session_options();
  World by_node({plain_layer()}, stored_as(TANDEM_F32), two_threads(), session);
  const World by_call({plain_layer()}, stored_as(TANDEM_F32), two_threads(), session);
  int64_t seed = 0;
  for (const std::vector<int64_t>& q_lens : std::vector<std::vector<int64_t>>{{100, 40}, {1, 1}, {1, 1}})
    expect_same_by_call(by_node, by_call, q_lens, ++seed);
  tandem_test::MemoryFile file = tandem_test::save(by_node.cache.get(), by_node.sequences[0], by_node.session.get());
  const int64_t loaded = tandem_test::load(by_node.cache.get(), file, by_node.session.get());
  by_node.cache.drop(by_node.sequences[0]);
  by_node.sequences[0] = loaded;
  for (const std::vector<int64_t>& q_lens : std::vector<std::vector<int64_t>>{{1, 1}, {1, 1}, {9, 1}, {1, 1}})
    expect_same_by_call(by_node, by_call, q_lens, ++seed);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(every_head_dim_and_group),
      cmocka_unit_test(every_type_of_k_and_v),
      cmocka_unit_test(soft_cap_sinks_and_windows),
      cmocka_unit_test(k_and_v_of_different_head_dims),
      cmocka_unit_test(any_number_of_threads),
      cmocka_unit_test(views_of_a_wider_product),
      cmocka_unit_test(layouts_are_the_abi_s),
      cmocka_unit_test(layers_that_append_nothing_or_alias),
      cmocka_unit_test(head_patterns_are_those_of_a_call),
      cmocka_unit_test(blocks_of_queries_begin_with_batches),
      cmocka_unit_test(chunks_of_a_prompt),
      cmocka_unit_test(a_sequence_is_saved_and_loaded),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
