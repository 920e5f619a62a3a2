// SPDX-License-Identifier: MIT
#include "lib/gate_case.h"

#include <algorithm>
#include <memory>

#include "reference/rounding.h"

namespace harness {

using reference::dtype_name;
using reference::GateShares;
using reference::Random;
using reference::RefLayer;
using reference::SequenceModel;

namespace {

std::string list(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (int64_t value : values) text.append(text.size() > 1 ? "," : "").append(std::to_string(value));
  return text.append("]");
}

double flops(const GateCase& c) {
  double sum = 0.0;
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    const double kv = static_cast<double>(c.kv_lens[i] + c.q_lens[i]);
    sum += kv * static_cast<double>(c.q_lens[i]) * c.layer.n_q_heads * (c.layer.k_head_dim + c.layer.v_head_dim);
    sum += 20.0 * kv * c.layer.n_kv_heads * (c.layer.k_head_dim + c.layer.v_head_dim);
  }
  return sum;
}

void draw_rope(RefLayer* layer, Random* random) {
  layer->rope = random->pick({TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED});
  if (random->chance(0.4)) layer->rope_dims = static_cast<int32_t>(2 * random->integer(1, layer->k_head_dim / 2));
  if (random->chance(0.5)) layer->rope_theta = random->pick({500.0, 10000.0, 500000.0, 1e6});
  if (random->chance(0.4)) layer->rope_position_scale = random->pick({2.0, 4.0, 8.0});
  if (random->chance(0.3)) layer->rope_attn_factor = 1.0 + 0.3 * random->uniform();
  if (random->chance(0.3))
    for (int32_t i = 0; i < layer->rotated_dims() / 2; ++i)
      layer->rope_inv_freq.push_back(static_cast<float>(std::exp(-9.0 * random->uniform())));
}

RefLayer random_layer(Random* random) {
  RefLayer layer;
  const int32_t group = random->pick({1, 2, 3, 4, 7, 8, 32});
  layer.n_kv_heads = group >= 8 ? 1 : random->pick({1, 2, 3});
  layer.n_q_heads = layer.n_kv_heads * group;
  layer.k_head_dim = random->pick({64, 80, 96, 112, 128, 192, 256});
  layer.v_head_dim = random->chance(0.6) ? layer.k_head_dim : random->pick({64, 80, 96, 112, 128, 192, 256});
  const auto storage_type = [&] {
    return random->pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0});
  };
  layer.k_type = storage_type();
  layer.v_type = random->chance(0.6) ? layer.k_type : storage_type();
  if (random->chance(0.3)) layer.sm_scale = static_cast<float>(0.05 + 0.1 * random->uniform());
  if (random->chance(0.2)) layer.soft_cap = random->pick({2.0f, 20.0f, 50.0f});
  if (random->chance(0.25)) layer.sliding_window = random->pick({1, 2, 7, 16, 63, 128, 1000, 5000});
  if (random->chance(0.25))
    for (int32_t h = 0; h < layer.n_q_heads; ++h) layer.sinks.push_back(static_cast<float>(4.0 * random->normal()));
  if (random->chance(0.35)) draw_rope(&layer, random);
  return layer;
}

int64_t random_kv_len(Random* random) {
  const int64_t boundary = random->pick<int64_t>({0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096});
  if (random->chance(0.7)) return std::max<int64_t>(0, boundary + random->integer(-2, 2));
  return random->integer(0, random->chance(0.3) ? 5000 : 600);
}

}  // namespace

std::string describe(const GateCase& c) {
  const RefLayer& l = c.layer;
  std::string text = "seed " + std::to_string(c.seed) + ": heads " + std::to_string(l.n_q_heads) + "/" +
                     std::to_string(l.n_kv_heads) + " dims " + std::to_string(l.k_head_dim) + "/" +
                     std::to_string(l.v_head_dim) + (l.v_aliases_k ? " alias" : "") + " store " + dtype_name(l.k_type) +
                     "/" + dtype_name(l.v_type) + " q " + dtype_name(c.q_type) + " o " + dtype_name(c.o_type) + " k " +
                     dtype_name(c.k_in_type) + " v " + dtype_name(c.v_in_type) + " page " + std::to_string(c.page_tokens) +
                     " kv " + list(c.kv_lens) + " q_len " + list(c.q_lens) + " data " +
                     std::to_string(static_cast<int>(c.data));
  if (l.sm_scale != 0.0f) text += " sm_scale " + std::to_string(l.sm_scale);
  if (l.soft_cap > 0.0f) text += " soft_cap " + std::to_string(l.soft_cap);
  if (l.sliding_window) text += " sliding " + std::to_string(l.sliding_window);
  if (!l.sinks.empty()) text += " learned-sinks";
  if (l.rope) {
    text += std::string(" rope ") + (l.rope == TANDEM_ROPE_HALVES ? "halves" : "interleaved") + " dims " +
            std::to_string(l.rotated_dims()) + " theta " + std::to_string(l.rope_theta) + " scale " +
            std::to_string(l.rope_position_scale) + " factor " + std::to_string(l.rope_attn_factor);
    if (!l.rope_inv_freq.empty()) text += " inv_freq";
  }
  if (c.scope.streaming)
    text += " streaming window " + std::to_string(c.scope.window_tokens) + " sinks " + std::to_string(c.scope.sink_tokens);
  if (c.tree) text += " tree";
  if (c.chain) text += " chain";
  if (c.no_append) text += " no-append";
  if (c.shift) text += " removed-range";
  if (c.named.unit > 0)
    text += " named units of " + std::to_string(c.named.unit) + ", " + std::to_string(c.named.n_idx) + " of share " +
            std::to_string(c.named.share) + (c.named.shared ? " shared" : "") + (c.named.any_order ? " any-order" : "") +
            (c.named.plus_window ? " plus-window" : "");
  return text;
}

// Excludes three corner cases, so that other failures show: a window of no tokens, trees under a window of either kind, and
// sinks in a layer with a sliding window. They have tests of their own.
void keep_to_common_scopes(GateCase* c) {
  if (c->tree) c->scope = {};
  if (c->tree) c->layer.sliding_window = 0;
  if (c->scope.window_tokens == 0) c->scope.window_tokens = 1;
  if (c->layer.sliding_window > 0) c->scope.sink_tokens = 0;
}

void limit_flops(GateCase* c, double max_flops) {
  while (flops(*c) > max_flops) {
    const auto largest = std::max_element(c->q_lens.begin(), c->q_lens.end());
    if (c->q_lens.size() > 1 && (c->seed + c->q_lens.size()) % 2) {
      c->q_lens.pop_back();
      c->kv_lens.pop_back();
    } else if (*largest > 1) {
      *largest = *largest > 64 ? 64 : *largest > 17 ? 17 : *largest > 3 ? 3 : 1;
    } else if (c->q_lens.size() > 1) {
      c->q_lens.pop_back();
      c->kv_lens.pop_back();
    } else {
      break;
    }
  }
}

GateCase random_case(uint64_t seed, double max_flops) {
  Random random(seed);
  GateCase c;
  c.seed = seed;
  c.layer = random_layer(&random);
  const auto any_type = [&] { return random.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16}); };
  c.q_type = any_type();
  c.o_type = random.chance(0.5) ? TANDEM_F32 : any_type();
  const auto row_type = [&] { return random.chance(0.1) ? TANDEM_E4M3 : any_type(); };
  c.k_in_type = row_type();
  c.v_in_type = row_type();
  c.data = random.chance(0.5) ? Data::kNormal : static_cast<Data>(random.integer(1, 4));
  c.page_tokens = random.pick({0, 16, 64, 128, 256});
  const int64_t n_sequences = random.chance(0.5) ? 1 : random.integer(2, 9);
  for (int64_t i = 0; i < n_sequences; ++i) {
    c.kv_lens.push_back(random_kv_len(&random));
    c.q_lens.push_back(random.pick<int64_t>({1, 1, 1, 1, 2, 3, 17, 64, 200}));
    if (n_sequences > 1 && random.chance(0.15)) c.q_lens.back() = 0;
  }
  if (random.chance(0.3))
    c.scope = {true, random.pick<int64_t>({0, 1, 5, 16, 100, 1000}), random.pick<int64_t>({0, 1, 4, 64})};
  c.tree = random.chance(0.2);
  c.chain = !c.tree && random.chance(0.05);
  c.no_append = !c.tree && !c.chain && random.chance(0.15);
  c.want_lse = random.chance(0.8);
  c.shift = random.chance(0.15);
  limit_flops(&c, max_flops);
  return c;
}

namespace {

// A tensor of random numbers and its dense content.
struct Drawn {
  std::vector<double> dense;
  Tensor tensor;
};

Drawn draw(const GateCase& c, int32_t dtype, int64_t n_tokens, int32_t dim, double scale, Random* random) {
  Drawn drawn;
  drawn.tensor = Tensor(dtype, n_tokens, c.layer.n_kv_heads, dim, random_layout(random));
  drawn.dense = fill(&drawn.tensor, c.layer.n_kv_heads, dim, draw_normal, scale, random);
  return drawn;
}

// Returns the factor on K that gives logits the spread of the case's data. add_trend() adds the trend of rising data.
double key_scale(const GateCase& c) {
  switch (c.data) {
    case Data::kPeaked:
      return 6.0;
    case Data::kDiffuse:
      return 0.02;
    default:
      return 1.0;
  }
}

// Rising and falling data: the last dim of the keys goes from -limit to limit along the sequence. The logits of one query
// may span more than exp can represent (88) but keep some digits in f32. No trend is added where V would get it too, or
// where it would exceed the range of e4m3.
void add_trend(const GateCase& c, int64_t first, int64_t total, Drawn* k) {
  if ((c.data != Data::kRising && c.data != Data::kFalling) || c.layer.v_aliases_k) return;
  if (c.layer.k_type == TANDEM_E4M3 || c.k_in_type == TANDEM_E4M3) return;
  const double sign = c.data == Data::kRising ? 1.0 : -1.0, limit = 25.0 / c.layer.scale();
  const int32_t dim = c.layer.k_head_dim;
  for (int64_t t = 0; t < k->tensor.n_tokens(); ++t) {
    const double factor = sign * limit * (2.0 * static_cast<double>(first + t) / static_cast<double>(total) - 1.0);
    for (int64_t h = 0; h < c.layer.n_kv_heads; ++h) {
      double& x = k->dense[static_cast<size_t>((t * c.layer.n_kv_heads + h) * dim + dim - 1)];
      x = reference::round_to(k->tensor.dtype(), factor);
      k->tensor.set(t, h, dim - 1, x);
    }
  }
}

// State of the test while a case runs.
struct Bench {
  const GateCase& c;
  Cache& cache;
  Random random;
  std::vector<RefLayer> layers;
  std::vector<int64_t> ids;
  std::vector<SequenceModel> models;
  int32_t layer = 0;  // the layer in use; other layers stay empty
};

void append_rows(Bench* bench, size_t i, int64_t n_tokens, int64_t total) {
  const GateCase& c = bench->c;
  const std::string context = describe(c);
  while (n_tokens > 0) {
    const int64_t n = bench->random.chance(0.5) ? n_tokens : bench->random.integer(1, n_tokens);
    Drawn k = draw(c, c.k_in_type, n, c.layer.k_head_dim, key_scale(c), &bench->random);
    add_trend(c, bench->models[i].length(static_cast<size_t>(bench->layer)), total, &k);
    Drawn v = draw(c, c.v_in_type, n, c.layer.v_head_dim, 1.0, &bench->random);
    const tandem_tensor k_view = k.tensor.view(), v_view = v.tensor.view();
    TANDEM_EXPECT(context, TANDEM_OK,
                  tandem_sequence_append(bench->cache, bench->ids[i], bench->layer, &k_view,
                                         c.layer.v_aliases_k ? nullptr : &v_view, nullptr, &error));
    bench->models[i].append(static_cast<size_t>(bench->layer), n, k.dense.data(), v.dense.data());
    n_tokens -= n;
  }
}

void prepare_sequences(Bench* bench) {
  const GateCase& c = bench->c;
  for (size_t i = 0; i < c.kv_lens.size(); ++i) {
    bench->ids.push_back(bench->cache.create_sequence(describe(c)));
    bench->models.emplace_back(&bench->layers);
    const int64_t before = c.kv_lens[i] + (c.no_append ? c.q_lens[i] : 0);
    append_rows(bench, i, before, before + c.q_lens[i] + 1);
  }
}

struct CallTensors {
  Tensor q, k, v, o, lse;
  std::vector<float> q_dense;
  std::vector<int32_t> parents;
  std::vector<int32_t> idx;  // [n_tokens][n_heads or 1][n_idx]
};

int64_t n_lists(const GateCase& c) { return c.named.shared ? 1 : c.layer.n_kv_heads; }

// Draws a row of indices: pads, and units that begin no later than the query's own token, sorted or not.
void draw_row(const NamedCase& named, int64_t own, Random* random, int32_t* row) {
  const int64_t n_units = own / named.unit + 1;
  const auto n = std::min(n_units, static_cast<int64_t>(static_cast<double>(named.n_idx) * named.share));
  std::vector<int32_t> units;
  while (std::ssize(units) < n) {
    const auto unit = static_cast<int32_t>(random->integer(0, n_units - 1));
    if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }
  std::fill_n(row, named.n_idx, -1);
  if (!named.any_order) std::sort(units.begin(), units.end());
  std::copy(units.begin(), units.end(), row);
  if (named.any_order)
    for (int64_t i = named.n_idx; i > 1; --i) std::swap(row[i - 1], row[random->integer(0, i - 1)]);
}

void draw_indices(const Bench& bench, CallTensors* call) {
  const GateCase& c = bench.c;
  if (c.named.unit == 0) return;
  Random random(c.seed ^ 0x1d8);
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    const auto layer = static_cast<size_t>(bench.layer);
    const int64_t length = bench.models[i].length(layer) + bench.models[i].pending_in(layer);
    for (int64_t t = 0; t < c.q_lens[i]; ++t)
      for (int64_t list = 0; list < n_lists(c); ++list) {
        call->idx.resize(call->idx.size() + static_cast<size_t>(c.named.n_idx));
        draw_row(c.named, length - c.q_lens[i] + t, &random, call->idx.data() + call->idx.size() - c.named.n_idx);
      }
  }
}

bool is_named(const GateCase& c, const CallTensors& call, int64_t token, int32_t kv_head, int64_t key) {
  const int64_t row = token * n_lists(c) + (c.named.shared ? 0 : kv_head);
  const auto first = call.idx.begin() + row * c.named.n_idx;
  return std::find(first, first + c.named.n_idx, static_cast<int32_t>(key / c.named.unit)) != first + c.named.n_idx;
}

// Draws the inputs of the call and appends them to the models.
CallTensors draw_call(Bench* bench) {
  const GateCase& c = bench->c;
  Random* random = &bench->random;
  int64_t n_tokens = 0;
  for (int64_t q_len : c.q_lens) n_tokens += q_len;
  CallTensors call;
  call.q = Tensor(c.q_type, n_tokens, c.layer.n_q_heads, c.layer.k_head_dim, random_layout(random));
  call.q_dense = to_float(fill(&call.q, c.layer.n_q_heads, c.layer.k_head_dim, draw_normal, 1.0, random));
  call.o = Tensor(c.o_type, n_tokens, c.layer.n_q_heads, c.layer.v_head_dim, random_layout(random));
  call.lse = Tensor(TANDEM_F32, n_tokens, c.layer.n_q_heads, 0, random_layout(random));
  Drawn k = draw(c, c.k_in_type, n_tokens, c.layer.k_head_dim, key_scale(c), random);
  Drawn v = draw(c, c.v_in_type, n_tokens, c.layer.v_head_dim, 1.0, random);
  int64_t first = 0;
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    const int64_t q_len = c.q_lens[i];
    for (int64_t t = 0; t < q_len; ++t)
      call.parents.push_back(
          static_cast<int32_t>(random->chance(0.2) ? -1 : random->integer(std::max<int64_t>(-1, t - 5), t - 1)));
    const double* k_rows = k.dense.data() + first * c.layer.n_kv_heads * c.layer.k_head_dim;
    const double* v_rows = v.dense.data() + first * c.layer.n_kv_heads * c.layer.v_head_dim;
    if ((c.tree || c.chain) && q_len > 0)
      bench->models[i].append_pending(static_cast<size_t>(bench->layer), q_len, k_rows, v_rows,
                                      c.tree ? call.parents.data() + first : nullptr);
    else if (!c.no_append)
      bench->models[i].append(static_cast<size_t>(bench->layer), q_len, k_rows, v_rows);
    first += q_len;
  }
  call.k = std::move(k.tensor);
  call.v = std::move(v.tensor);
  draw_indices(*bench, &call);
  return call;
}

void attend_call(Bench* bench, tandem_session* session, const CallTensors& call) {
  const GateCase& c = bench->c;
  const tandem_tensor q = call.q.view(), k = call.k.view(), v = call.v.view(), o = call.o.view(), lse = call.lse.view();
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.flags = c.tree || c.chain ? TANDEM_ATTEND_SPECULATIVE : 0;
  args.layer_idx = bench->layer;
  args.n_sequences = static_cast<int32_t>(bench->ids.size());
  args.sequences = bench->ids.data();
  args.q_lens = c.q_lens.data();
  args.q = &q;
  args.k = c.no_append ? nullptr : &k;
  args.v = c.no_append || c.layer.v_aliases_k ? nullptr : &v;
  args.o = &o;
  args.lse = c.want_lse ? &lse : nullptr;
  args.parent_idx = c.tree ? call.parents.data() : nullptr;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  tandem_tensor idx;
  if (c.named.unit > 0) {
    const int64_t shape[] = {call.q.n_tokens(), n_lists(c), c.named.n_idx};
    TANDEM_EXPECT(describe(c), TANDEM_OK,
                  tandem_tensor_init(&idx, TANDEM_I32, const_cast<int32_t*>(call.idx.data()), 3, shape, &error));
    selection.idx = &idx;
    selection.unit_tokens = c.named.unit;
    selection.flags =
        (c.named.any_order ? TANDEM_SELECTION_ANY_ORDER : 0) | (c.named.plus_window ? TANDEM_SELECTION_PLUS_WINDOW : 0);
    args.selection = &selection;
  }
  TANDEM_EXPECT(describe(c), TANDEM_OK, tandem_attend(session, &args, &error));
}

// Returns as many rows as a few million products allow. The largest error of a sample is below the largest error of all
// rows.
int64_t naive_rows(const GateCase& c, size_t i) {
  const int64_t row = (c.kv_lens[i] + c.q_lens[i] + 1) * (c.layer.k_head_dim + c.layer.v_head_dim);
  return 24 + 4'000'000 / row;
}

GateShares compare(const Bench& bench, const CallTensors& call) {
  const GateCase& c = bench.c;
  GateShares shares;
  int64_t first = 0;
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    const int64_t q_len = c.q_lens[i];
    const float* q = call.q_dense.data() + first * c.layer.n_q_heads * c.layer.k_head_dim;
    reference::AttendHooks hooks;
    hooks.naive_rounds_p = rounds_p(c.layer, c.q_type, c.named.unit > 0 ? 1 : q_len);
    if (c.named.unit > 0)
      hooks.named = [&](int64_t t, int32_t kv_head, int64_t key) { return is_named(c, call, first + t, kv_head, key); };
    hooks.plus_scope = c.named.plus_window;
    const reference::Truth truth =
        bench.models[i].attend(static_cast<size_t>(bench.layer), q_len, q, c.scope, naive_rows(c, i), hooks);
    reference::GateCall gate_call;
    gate_call.truth = &truth;
    gate_call.layer = &c.layer;
    gate_call.o_type = c.o_type;
    gate_call.o = [&](int64_t t, int32_t h, int32_t d) { return call.o.get(first + t, h, d); };
    if (c.want_lse) gate_call.lse = [&](int64_t t, int32_t h) { return call.lse.get(first + t, h, 0); };
    const reference::GateVerdict verdict = check_gate(gate_call);
    expect(verdict.pass, describe(c) + ": sequence " + std::to_string(i) + ": " + verdict.message);
    shares.include(verdict.shares);
    first += q_len;
  }
  expect(call.o.padding_untouched() && call.lse.padding_untouched(), describe(c) + ": padding of an output was written");
  expect(c.want_lse || call.lse.untouched(), describe(c) + ": lse was written");
  return shares;
}

// Removes a range from every sequence that is long enough. Positions of later keys then differ from their indices.
void remove_range(Bench* bench) {
  for (size_t i = 0; i < bench->ids.size(); ++i) {
    const int64_t length = bench->models[i].length(static_cast<size_t>(bench->layer));
    const int64_t spare = length - 1 - (bench->c.no_append ? bench->c.q_lens[i] : 0);
    if (spare < 1) continue;
    const int64_t first = bench->random.integer(0, length - 2);
    const int64_t n = bench->random.integer(1, std::min(spare, length - 1 - first));
    const bool shift = bench->c.layer.rope != TANDEM_ROPE_CALLER && bench->random.chance(0.5);
    TANDEM_EXPECT(describe(bench->c), TANDEM_OK,
                  tandem_sequence_remove(bench->cache, bench->ids[i], first, n, shift, &error));
    bench->models[i].remove(first, n, shift);
  }
}

}  // namespace

GateShares run_case(const GateCase& c, tandem_engine* engine) {
  // An empty layer of a shape that no case has, so that a wrong layer index shows. Removal requires even layers.
  RefLayer other;
  other.n_q_heads = other.n_kv_heads = 5;
  std::vector<RefLayer> layers = {c.layer};
  const bool alone = c.shift || c.one_layer;
  if (!alone) layers.insert(layers.begin(), other);
  Cache cache(engine, layers, {c.page_tokens});
  Bench bench{c, cache, Random(c.seed ^ 0x5eed), layers, {}, {}, alone ? 0 : 1};
  prepare_sequences(&bench);
  if (c.shift) remove_range(&bench);
  GateShares shares;
  {
    tandem_session_options options = scope_options(c.scope);
    if (c.named.unit > 0) options.policy = "all";
    const Session session(cache, options);
    const CallTensors call = draw_call(&bench);
    attend_call(&bench, session, call);
    shares = compare(bench, call);
  }
  return shares;
}

void check_batch_mates(const GateCase& c, tandem_engine* engine) {
  const std::vector<RefLayer> layers = {c.layer};
  Cache cache(engine, layers, {c.page_tokens});
  Bench bench{c, cache, Random(c.seed ^ 0x5eed), layers, {}, {}, 0};
  prepare_sequences(&bench);
  std::vector<int64_t> copies;
  for (int64_t id : bench.ids)
    TANDEM_EXPECT(describe(c), TANDEM_OK, tandem_sequence_fork(&copies.emplace_back(), cache, id, &error));
  const Session session(cache, scope_options(c.scope));
  const CallTensors call = draw_call(&bench);
  attend_call(&bench, session, call);
  int64_t first = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    const int64_t q_len = c.q_lens[i];
    tandem_tensor views[] = {call.q.view(), call.k.view(), call.v.view()};
    for (tandem_tensor& view : views) {
      view.shape[0] = q_len;
      view.data = static_cast<char*>(view.data) + first * view.stride[0] * reference::element_bytes(view.dtype);
    }
    const Tensor o(c.o_type, q_len, c.layer.n_q_heads, c.layer.v_head_dim);
    const tandem_tensor o_view = o.view();
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &copies[i];
    args.q_lens = &q_len;
    args.q = &views[0];
    args.k = &views[1];
    args.v = c.layer.v_aliases_k ? nullptr : &views[2];
    args.o = &o_view;
    TANDEM_EXPECT(describe(c) + " alone", TANDEM_OK, tandem_attend(session, &args, &error));
    for (int64_t t = 0; t < q_len; ++t)
      for (int32_t h = 0; h < c.layer.n_q_heads; ++h)
        for (int32_t d = 0; d < c.layer.v_head_dim; ++d)
          expect(o.get(t, h, d) == call.o.get(first + t, h, d),
                 describe(c) + ": sequence " + std::to_string(i) + " gives other bits alone than among others");
    first += q_len;
  }
}

}  // namespace harness
