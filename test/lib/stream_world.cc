// SPDX-License-Identifier: MIT
#include "lib/stream_world.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace harness {

using reference::QueryWeights;
using reference::RefLayer;
using reference::SequenceModel;
using reference::Truth;

namespace {

RefLayer draw_layer(reference::Random* random, bool hgca) {
  RefLayer layer;
  layer.n_kv_heads = random->pick({1, 2});
  layer.n_q_heads = layer.n_kv_heads * random->pick({1, 2, 3});
  layer.k_head_dim = random->pick({64, 64, 80, 96});
  layer.v_head_dim = random->chance(0.7) ? layer.k_head_dim : 64;
  const auto storage_type = [&] {
    return random->pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0});
  };
  layer.k_type = storage_type();
  layer.v_type = random->chance(0.7) ? layer.k_type : storage_type();
  if (random->chance(0.2)) layer.soft_cap = 20.0f;
  if (random->chance(hgca ? 0.1 : 0.25)) layer.sliding_window = random->pick({3, 16, 40});
  if (random->chance(0.2))
    for (int32_t h = 0; h < layer.n_q_heads; ++h) layer.sinks.push_back(static_cast<float>(random->normal()));
  if (random->chance(0.15) && layer.v_head_dim <= layer.k_head_dim) {
    layer.v_aliases_k = true;
    layer.v_type = layer.k_type;
  }
  return layer;
}

tandem_session_options hgca_options(const reference::HgcaOptions& from) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = "hgca";
  options.window_tokens = from.window_tokens;
  options.sink_tokens = from.sink_tokens;
  options.halo_tokens = from.halo_tokens;
  options.alpha = from.alpha;
  options.beta = from.beta;
  return options;
}

bool is_exact(Policies policies) {
  return policies == Policies::kExact || policies == Policies::kDevice || policies == Policies::kDeviceStream ||
         policies == Policies::kDeviceRebuild;
}

// Draws a buffer size. The smallest is the memory of 64 tokens of a KV head.
int64_t draw_buffer_bytes(const std::vector<RefLayer>& layers, reference::Random* random) {
  int64_t row_bytes = 0;
  for (const RefLayer& layer : layers)
    row_bytes = std::max(row_bytes, tandem_dtype_row_bytes(layer.k_type, layer.k_head_dim) +
                                        (layer.v_aliases_k ? 0 : tandem_dtype_row_bytes(layer.v_type, layer.v_head_dim)));
  return 64 * row_bytes * random->pick({1, 1, 2, 3, 8}) + random->integer(0, row_bytes);
}

// Draws a session that makes all or some keys from hidden states.
void draw_rebuilding(const std::vector<RefLayer>& layers, reference::Random* random, tandem_session_options* options) {
  options->window_tokens = random->pick<int64_t>({0, 1, 5, 20, 100});
  options->route = random->chance(0.9) ? "recompute" : "auto";
  if (random->chance(0.5) && options->route[0] == 'r') options->recompute_share = random->pick({0.1, 0.5, 0.9});
  int64_t x_bytes = 0;
  for (const RefLayer& layer : layers)
    x_bytes = std::max<int64_t>(x_bytes, 2 * layer.n_kv_heads * (layer.k_head_dim + layer.v_head_dim));
  options->stream_buffer_bytes = 128 * x_bytes * random->pick({4, 5, 8}) + random->integer(0, x_bytes);
}

// Draws how keys cross the bus.
void draw_streaming(const std::vector<RefLayer>& layers, uint64_t seed, reference::Random* random,
                    tandem_session_options* options) {
  options->window_tokens = random->pick<int64_t>({0, 1, 5, 20, 100});
  options->route = "stream";
  if (random->chance(0.6)) {
    options->route = "host+stream";
    options->stream_fraction = random->pick({0.0, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0});
  }
  options->stream_buffer_bytes = draw_buffer_bytes(layers, random);
  constexpr int64_t kTokens[] = {0, 1, 3, 16, 30}, kHeads[] = {0, 0, 1, 2};
  options->append_tokens = kTokens[seed % 5];
  options->stream_heads = kHeads[seed / 5 % 4];
}

}  // namespace

StreamWorld::StreamWorld(uint64_t seed, tandem_engine* engine, Policies policies, const tandem::test::OpenDevice* device)
    : seed_(seed), policies_(policies), random_(seed), device_(device) {
  const int64_t n_layers = random_.integer(1, 3);
  // Shifting requires it in every layer. Keys that cross the bus are not rotated.
  const bool rope = policies != Policies::kDeviceStream && !keeps_hidden() && random_.chance(device != nullptr ? 0.3 : 0.5);
  for (int64_t l = 0; l < n_layers; ++l) {
    RefLayer layer;
    do {
      layer = draw_layer(&random_, !is_exact(policies));
      if (rope) layer.rope = random_.pick({TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED});
    } while (device_ != nullptr && (!device_takes(layer) || (keeps_hidden() && layer.v_aliases_k)));
    layers_.push_back(layer);
  }
  if (!rope && seed % 4 == 0 && device_ == nullptr) set_latent(&layers_.back());
  page_tokens_ = random_.pick({16, 16, 32, 64});
  cache_ = std::make_unique<Cache>(engine, layers_, CacheSetup{page_tokens_, keeps_hidden()});
  const auto add = [this](Entry entry) {
    tandem_session_options options = entry.hgca ? hgca_options(entry.options) : scope_options(entry.scope);
    if (policies_ != Policies::kExact && is_exact(policies_) && !entry.scope.streaming)
      options.window_tokens = random_.integer(0, 300);
    if (keeps_hidden() && !entry.scope.streaming) draw_rebuilding(layers_, &random_, &options);
    if (policies_ == Policies::kDeviceStream && !entry.scope.streaming) draw_streaming(layers_, seed_, &random_, &options);
    entry.options_of_session = options;
    entry.session = std::make_unique<Session>(*cache_, options);
    sessions_.push_back(std::move(entry));
  };
  const auto draw_scope = [this] {
    return reference::Scope{true, random_.pick<int64_t>({1, 4, 16, 33}), random_.pick<int64_t>({0, 1, 4, 20})};
  };
  if (is_exact(policies)) {
    add({});
    for (int64_t i = random_.integer(1, 2); i > 0; --i) {
      Entry entry;
      entry.scope = draw_scope();
      // Another test covers sinks in a layer with a sliding window.
      if (std::any_of(layers_.begin(), layers_.end(), [](const RefLayer& l) { return l.sliding_window > 0; }))
        entry.scope.sink_tokens = 0;
      add(std::move(entry));
    }
  } else {
    for (int64_t i = random_.integer(1, 2); i > 0; --i) {
      Entry entry;
      entry.hgca = true;
      entry.options = {policies == Policies::kDeviceHgca ? random_.pick<int64_t>({0, 1, 8, 24, 64, 150})
                                                         : random_.pick<int64_t>({0, 1, 8, 24, 64}),
                       random_.pick<int64_t>({0, 1, 4, 16}),
                       random_.pick({0.1f, 0.3f, 1.0f}),
                       random_.pick({0.0f, 0.25f, 0.5f, 1.0f, 2.0f}),
                       page_tokens_,
                       random_.pick<int64_t>({0, 0, 1, 5, 16})};
      add(std::move(entry));
    }
  }
}

void StreamWorld::note(const std::string& text) { history_.push_back(text); }

std::string StreamWorld::where() const {
  std::string text = "stream seed " + std::to_string(seed_) + ", " + std::to_string(layers_.size()) + " layers, page " +
                     std::to_string(page_tokens_) + ";";
  for (const Entry& entry : sessions_) {
    char line[160];
    std::snprintf(line, sizeof line, "\n  session %s window %lld sinks %lld alpha %g beta %g halo %lld",
                  entry.hgca              ? "hgca"
                  : entry.scope.streaming ? "streaming"
                                          : "all",
                  static_cast<long long>(entry.hgca ? entry.options.window_tokens : entry.scope.window_tokens),
                  static_cast<long long>(entry.hgca ? entry.options.sink_tokens : entry.scope.sink_tokens),
                  static_cast<double>(entry.options.alpha), static_cast<double>(entry.options.beta),
                  static_cast<long long>(entry.options.halo_tokens));
    text += line;
  }
  for (const RefLayer& layer : layers_)
    text.append("\n  layer heads ")
        .append(std::to_string(layer.n_q_heads))
        .append("/")
        .append(std::to_string(layer.n_kv_heads))
        .append(", ")
        .append(reference::dtype_name(layer.k_type))
        .append("/")
        .append(reference::dtype_name(layer.v_type))
        .append(" of ")
        .append(std::to_string(layer.k_head_dim))
        .append("/")
        .append(std::to_string(layer.v_head_dim))
        .append(layer.sliding_window ? ", sliding " : ", ")
        .append(std::to_string(layer.sliding_window));
  const size_t n = std::min<size_t>(history_.size(), 40);
  text += "\n  last operations:";
  for (size_t i = history_.size() - n; i < history_.size(); ++i) text += "\n  " + history_[i];
  return text + "\n ";
}

bool StreamWorld::can_shift() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const RefLayer& l) { return l.rope != TANDEM_ROPE_CALLER; });
}

reference::HgcaModel& StreamWorld::hgca(Entry& entry, int64_t id) {
  return entry.models.try_emplace(id, &layers_, entry.options).first->second;
}

StreamWorld::Rows StreamWorld::draw_rows(size_t layer, int64_t n_tokens) {
  const RefLayer& geometry = layers_[layer];
  const auto any_type = [this] {
    return keeps_hidden() ? TANDEM_BF16 : random_.pick({TANDEM_F32, TANDEM_F16, TANDEM_BF16});
  };
  Rows rows;
  rows.k = Tensor(any_type(), n_tokens, geometry.n_kv_heads, geometry.k_head_dim, random_layout(&random_));
  rows.v = Tensor(any_type(), n_tokens, geometry.n_kv_heads, geometry.v_head_dim, random_layout(&random_));
  // Some keys are larger, so that sparse policies find them.
  const double scale = random_.chance(0.3) ? 3.0 : 1.0;
  rows.k_dense = fill(&rows.k, geometry.n_kv_heads, geometry.k_head_dim, draw_normal, scale, &random_);
  rows.v_dense = fill(&rows.v, geometry.n_kv_heads, geometry.v_head_dim, draw_normal, 1.0, &random_);
  if (keeps_hidden()) join_rows(layer, n_tokens, &rows);
  return rows;
}

// Draws bf16 numbers that projections pick out. The keys that the device makes then equal those that the caller passes.
void StreamWorld::join_rows(size_t layer, int64_t n_tokens, Rows* rows) {
  const RefLayer& geometry = layers_[layer];
  const int32_t k_dims = geometry.n_kv_heads * geometry.k_head_dim, v_dims = geometry.n_kv_heads * geometry.v_head_dim;
  rows->x = Tensor(TANDEM_BF16, n_tokens, k_dims + v_dims, 0, random_layout(&random_));
  for (int64_t t = 0; t < n_tokens; ++t)
    for (int32_t i = 0; i < k_dims + v_dims; ++i)
      rows->x.set(t, i, 0,
                  i < k_dims ? rows->k_dense[static_cast<size_t>(t * k_dims + i)]
                             : rows->v_dense[static_cast<size_t>(t * v_dims + i - k_dims)]);
}

// ---- sequences ----

int64_t StreamWorld::create() {
  const int64_t id = cache_->create_sequence(where());
  note("create -> " + std::to_string(id));
  TANDEM_CHECK(models_.find(id) == models_.end(), where() + "an id came back");
  models_.emplace(id, SequenceModel(&layers_));
  return id;
}

int64_t StreamWorld::fork(int64_t id) {
  note("fork " + std::to_string(id));
  SequenceModel& model = models_.at(id);
  int64_t made = -1;
  if (!model.even() || model.n_pending() > 0) {
    TANDEM_EXPECT(where(), TANDEM_ERROR_INVALID_STATE, tandem_sequence_fork(&made, *cache_, id, &error));
    return -1;
  }
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_sequence_fork(&made, *cache_, id, &error));
  TANDEM_CHECK(models_.find(made) == models_.end(), where() + "an id came back");
  models_.emplace(made, model);
  for (Entry& entry : sessions_) {
    if (!entry.hgca) continue;
    hgca(entry, id).settle_all();
    entry.models.emplace(made, hgca(entry, id));
  }
  return made;
}

void StreamWorld::drop(int64_t id) {
  note("drop " + std::to_string(id));
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_sequence_drop(*cache_, id, &error));
  int64_t length = 0;
  TANDEM_EXPECT(where(), TANDEM_ERROR_NOT_FOUND, tandem_sequence_length(&length, *cache_, id, 0, &error));
  models_.erase(id);
  parents_.erase(id);
  for (Entry& entry : sessions_) {
    entry.models.erase(id);
    entry.guess.erase(id);
  }
}

void StreamWorld::truncate(int64_t id, int64_t n_tokens) {
  note("truncate " + std::to_string(id) + " to " + std::to_string(n_tokens));
  if (n_tokens > models_.at(id).shortest()) {
    TANDEM_EXPECT(where(), TANDEM_ERROR_INVALID_ARGUMENT, tandem_sequence_truncate(*cache_, id, n_tokens, &error));
    return;
  }
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_sequence_truncate(*cache_, id, n_tokens, &error));
  models_.at(id).truncate(n_tokens);
  parents_.erase(id);
  for (Entry& entry : sessions_) {
    entry.guess.erase(id);
    if (entry.hgca) hgca(entry, id).truncate(n_tokens);
  }
}

void StreamWorld::remove(int64_t id, int64_t first, int64_t n_tokens, bool shift) {
  note("remove " + std::to_string(id) + " [" + std::to_string(first) + ", +" + std::to_string(n_tokens) + ")" +
       (shift ? " shift" : ""));
  SequenceModel& model = models_.at(id);
  const bool busy = !model.even() || model.n_pending() > 0;
  const int32_t wanted = busy ? TANDEM_ERROR_INVALID_STATE : shift && !can_shift() ? TANDEM_ERROR_UNSUPPORTED : TANDEM_OK;
  TANDEM_EXPECT(where(), wanted, tandem_sequence_remove(*cache_, id, first, n_tokens, shift ? 1 : 0, &error));
  if (wanted != TANDEM_OK || n_tokens == 0) return;
  for (Entry& entry : sessions_) {
    if (!entry.hgca) continue;
    hgca(entry, id).settle_all();
    hgca(entry, id).remove(first, n_tokens, model.length(0));
  }
  model.remove(first, n_tokens, shift);
}

void StreamWorld::reserve(int64_t id, int64_t n_tokens) {
  note("reserve " + std::to_string(id) + " " + std::to_string(n_tokens));
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_sequence_reserve(*cache_, id, n_tokens, &error));
}

void StreamWorld::append(int64_t id, size_t layer, int64_t n_tokens) {
  note("append " + std::to_string(n_tokens) + " to " + std::to_string(id) + " layer " + std::to_string(layer));
  const Rows rows = draw_rows(layer, n_tokens);
  const tandem_tensor k = rows.k.view(), v = rows.v.view();
  const bool pending = models_.at(id).pending_in(layer) > 0;
  const tandem_tensor* const given_v = layers_[layer].v_aliases_k ? nullptr : &v;
  const int32_t wanted = pending ? TANDEM_ERROR_INVALID_STATE : TANDEM_OK, at = static_cast<int32_t>(layer);
  if (keeps_hidden()) {
    const tandem_tensor x = rows.x.view();
    TANDEM_EXPECT(where(), wanted, tandem_sequence_append_x(*cache_, id, at, &k, given_v, &x, nullptr, &error));
  } else {
    TANDEM_EXPECT(where(), wanted, tandem_sequence_append(*cache_, id, at, &k, given_v, nullptr, &error));
  }
  if (!pending) models_.at(id).append(layer, n_tokens, rows.k_dense.data(), rows.v_dense.data());
}

// ---- attend ----

void StreamWorld::grow_model(const Pass& pass, size_t layer, const LayerCall& call) {
  const RefLayer& geometry = layers_[layer];
  int64_t first = 0;
  for (size_t i = 0; i < pass.ids.size(); ++i) {
    const int64_t q_len = pass.q_lens[i];
    SequenceModel& model = models_.at(pass.ids[i]);
    const double* k = call.rows.k_dense.data() + first * geometry.n_kv_heads * geometry.k_head_dim;
    const double* v = call.rows.v_dense.data() + first * geometry.n_kv_heads * geometry.v_head_dim;
    if (pass.speculative && q_len > 0)
      model.append_pending(layer, q_len, k, v, pass.tree ? call.parents.data() + first : nullptr);
    else if (!pass.speculative)
      model.append(layer, q_len, k, v);
    first += q_len;
  }
}

void StreamWorld::attend_layer(size_t session, size_t layer, const Pass& pass, const std::vector<int32_t>& parents) {
  const RefLayer& geometry = layers_[layer];
  int64_t n_tokens = 0;
  for (int64_t q_len : pass.q_lens) n_tokens += q_len;
  LayerCall call;
  call.parents = parents;
  call.rows = draw_rows(layer, n_tokens);
  call.q = Tensor(random_.pick({TANDEM_F32, TANDEM_BF16}), n_tokens, geometry.n_q_heads, geometry.k_head_dim,
                  random_layout(&random_));
  call.q_dense = to_float(
      fill(&call.q, geometry.n_q_heads, geometry.k_head_dim, draw_normal, random_.chance(0.3) ? 2.0 : 1.0, &random_));
  call.o = Tensor(TANDEM_F32, n_tokens, geometry.n_q_heads, geometry.v_head_dim, random_layout(&random_));
  call.lse = Tensor(TANDEM_F32, n_tokens, geometry.n_q_heads, 0, random_layout(&random_));
  const tandem_tensor q = call.q.view(), k = call.rows.k.view(), v = call.rows.v.view(), o = call.o.view(),
                      lse = call.lse.view(), x = keeps_hidden() ? call.rows.x.view() : tandem_tensor();
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.x = keeps_hidden() && !pass.append_first ? &x : nullptr;
  args.flags = (pass.speculative ? TANDEM_ATTEND_SPECULATIVE : 0u) | (pass.partial ? TANDEM_ATTEND_PARTIAL : 0u);
  args.layer_idx = static_cast<int32_t>(layer);
  args.n_sequences = static_cast<int32_t>(pass.ids.size());
  args.sequences = pass.ids.data();
  args.q_lens = pass.q_lens.data();
  args.q = &q;
  args.k = pass.append_first ? nullptr : &k;
  args.v = pass.append_first || geometry.v_aliases_k ? nullptr : &v;
  args.o = &o;
  args.lse = &lse;
  args.parent_idx = pass.tree ? call.parents.data() : nullptr;
  if (is_for_device()) return attend_on_device(session, layer, pass, args, std::move(call));
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_attend(*sessions_[session].session, &args, &error));
  ++n_attends_;
  if (!pass.append_first) grow_model(pass, layer, call);
  compare(sessions_[session], layer, pass, call);
}

void StreamWorld::compare(Entry& entry, size_t layer, const Pass& pass, const LayerCall& call) {
  int64_t first = 0;
  for (size_t i = 0; i < pass.ids.size(); ++i) {
    if (pass.q_lens[i] > 0) compare_sequence(entry, layer, pass, call, i, first);
    first += pass.q_lens[i];
  }
  TANDEM_CHECK(call.o.padding_untouched() && call.lse.padding_untouched(), where() + "padding of an output was written");
  for (const Tensor* tensor : {&call.o, &call.lse})
    for (unsigned char byte : tensor->payload()) output_hash_ = (output_hash_ ^ byte) * 0x100000001B3u;
}

reference::GateVerdict StreamWorld::judge(const Truth& truth, const RefLayer& layer, const LayerCall& call, int64_t first,
                                          bool device_rounds) {
  reference::GateCall gate_call;
  gate_call.truth = &truth;
  gate_call.layer = &layer;
  gate_call.o = [&](int64_t t, int32_t h, int32_t d) { return call.o.get(first + t, h, d); };
  gate_call.lse = [&](int64_t t, int32_t h) { return call.lse.get(first + t, h, 0); };
  if (call.on_device) gate_call.mass_epsilon = reference::device_mass_epsilon(layer, device_rounds);
  return check_gate(gate_call);
}

void StreamWorld::compare_sequence(Entry& entry, size_t layer, const Pass& pass, const LayerCall& call, size_t i,
                                   int64_t first) {
  const RefLayer& geometry = layers_[layer];
  const int64_t id = pass.ids[i], q_len = pass.q_lens[i];
  const SequenceModel& model = models_.at(id);
  const int64_t total = model.layer_rows(layer).n_tokens;
  const bool decode = (q_len == 1 && !pass.partial) || pass.speculative;
  reference::AttendHooks hooks;
  // The CPU's part may round weights, and so may the device.
  const int64_t most_q_len = *std::max_element(pass.q_lens.begin(), pass.q_lens.end());
  const bool device_rounds = call.on_device && reference::device_rounds_p(geometry, call.q.dtype(), most_q_len);
  hooks.naive_rounds_p = rounds_p(geometry, call.q.dtype(), q_len) || device_rounds;
  std::vector<QueryWeights> weights;
  if (entry.hgca) {
    reference::HgcaModel& state = hgca(entry, id);
    if (decode && state.keeps(layer)) state.before_decode(layer);
    if (decode) hooks.attended = [&state, layer](int32_t kv_head, int64_t j) { return state.attended(layer, kv_head, j); };
    weights.resize(static_cast<size_t>(q_len));
    for (int64_t t = 0; t < q_len; ++t) {
      weights[static_cast<size_t>(t)].end = pass.speculative ? total : total - q_len + t + 1;
      weights[static_cast<size_t>(t)].by_head.assign(
          static_cast<size_t>(geometry.n_q_heads),
          std::vector<double>(static_cast<size_t>(weights[static_cast<size_t>(t)].end)));
    }
    hooks.observe = [&weights](int64_t t, int32_t head, const std::vector<int64_t>& keys, const double* w) {
      std::vector<double>& row = weights[static_cast<size_t>(t)].by_head[static_cast<size_t>(head)];
      for (size_t n = 0; n < keys.size(); ++n) row[static_cast<size_t>(keys[n])] = w[n];
    };
  }
  const float* q = call.q_dense.data() + first * geometry.n_q_heads * geometry.k_head_dim;
  const Truth truth = model.attend(layer, q_len, q, entry.scope, 4096, hooks);
  const reference::GateVerdict verdict = judge(truth, geometry, call, first, device_rounds);
  // A wrong selection is reported first, because it explains the wrong output.
  if (!verdict.pass && entry.hgca && decode && !pass.speculative) {
    hgca(entry, id).after_decode(layer, weights[0], total);
    check_selection(static_cast<size_t>(&entry - sessions_.data()), id, layer);
  }
  TANDEM_CHECK(verdict.pass,
               where() + "sequence " + std::to_string(id) + " layer " + std::to_string(layer) + ": " + verdict.message);
  shares_.include(verdict.shares);
  if (!entry.hgca) return;
  reference::HgcaModel& state = hgca(entry, id);
  if (pass.speculative) {
    entry.guess[id].resize(layers_.size());
    entry.guess[id][layer] = std::move(weights);
  } else if (decode) {
    state.after_decode(layer, weights[0], total);
  } else {
    // Appends on a device are judged at the next query that does not belong to an append.
    state.after_append(layer, std::move(weights), total, pass.partial || call.on_device);
    if (call.on_device) state.count_pending(layer);
  }
  // Some keys are too close to the threshold. If only those differ, the library's selection is adopted.
  bool uncertain = false;
  for (int32_t h = 0; h < geometry.n_kv_heads; ++h) uncertain = uncertain || !state.uncertain(layer, h).empty();
  if (uncertain) {
    ++n_uncertain_;
    check_selection(static_cast<size_t>(&entry - sessions_.data()), id, layer);
  }
}

void StreamWorld::forward(size_t session, const Pass& pass) {
  std::string text = "forward session " + std::to_string(session);
  for (size_t i = 0; i < pass.ids.size(); ++i)
    text.append(" ").append(std::to_string(pass.ids[i])).append("+").append(std::to_string(pass.q_lens[i]));
  note(text + (pass.step ? " step" : "") + (pass.append_first ? " append-first" : "") +
       (pass.speculative ? " speculative" : "") + (pass.tree ? " tree" : "") + (pass.partial ? " partial" : "") +
       (pass.n_layers >= 0 ? " layers " + std::to_string(pass.n_layers) : ""));
  std::vector<int32_t> parents;
  for (size_t i = 0; i < pass.ids.size(); ++i) {
    std::vector<int32_t> own;
    for (int64_t t = 0; t < pass.q_lens[i]; ++t)
      own.push_back(static_cast<int32_t>(!pass.tree            ? t - 1
                                         : random_.chance(0.2) ? -1
                                                               : random_.integer(std::max<int64_t>(-1, t - 4), t - 1)));
    parents.insert(parents.end(), own.begin(), own.end());
    if (pass.speculative && !own.empty()) parents_[pass.ids[i]] = own;
    if (pass.speculative && !own.empty()) speculator_[pass.ids[i]] = session;
  }
  std::map<int64_t, std::vector<int64_t>> lengths;
  for (int64_t id : pass.ids)
    for (size_t l = 0; l < layers_.size(); ++l) lengths[id].push_back(models_.at(id).length(l));
  tandem_session* handle = *sessions_[session].session;
  if (pass.step) {
    TANDEM_EXPECT(where(), TANDEM_OK,
                  tandem_step_begin(handle, pass.ids.data(), pass.q_lens.data(), static_cast<int32_t>(pass.ids.size()),
                                    nullptr, &error));
    expect_refusal(session, pass);
  }
  const size_t n_layers = pass.n_layers >= 0 ? static_cast<size_t>(pass.n_layers) : layers_.size();
  for (size_t l = 0; l < n_layers; ++l) {
    if (pass.append_first)
      for (size_t i = 0; i < pass.ids.size(); ++i)
        if (pass.q_lens[i] > 0) append(pass.ids[i], l, pass.q_lens[i]);
    attend_layer(session, l, pass, parents);
  }
  if (!pass.step) return finish_pending();
  const bool complete = n_layers == layers_.size() ||
                        std::all_of(pass.q_lens.begin(), pass.q_lens.end(), [](int64_t q_len) { return q_len == 0; });
  if (!complete) finish_pending();
  TANDEM_EXPECT(where(), complete ? TANDEM_OK : TANDEM_ERROR_INVALID_STATE, tandem_step_end(handle, nullptr, &error));
  if (complete) return finish_pending();
  for (int64_t id : pass.ids) {
    models_.at(id).roll_back(lengths[id]);
    parents_.erase(id);
    for (Entry& entry : sessions_) {
      entry.guess.erase(id);
      if (entry.hgca) hgca(entry, id).truncate(lengths[id][0]);
    }
    check_sequence(id);
  }
}

// While a step is open its sequences are in flight. Changing one is refused, and so is a second step.
void StreamWorld::expect_refusal(size_t session, const Pass& pass) {
  const int64_t id = pass.ids[0];
  int64_t made = -1;
  TANDEM_EXPECT(where(), TANDEM_ERROR_BUSY, tandem_sequence_fork(&made, *cache_, id, &error));
  TANDEM_EXPECT(where(), TANDEM_ERROR_BUSY, tandem_sequence_truncate(*cache_, id, 0, &error));
  TANDEM_EXPECT(where(), TANDEM_ERROR_BUSY, tandem_sequence_drop(*cache_, id, &error));
  TANDEM_EXPECT(where(), TANDEM_ERROR_INVALID_STATE,
                tandem_step_begin(*sessions_[session].session, &id, pass.q_lens.data(), 1, nullptr, &error));
}

void StreamWorld::commit(size_t session, int64_t id, const std::vector<int64_t>& kept) {
  std::string text = "commit " + std::to_string(id) + " keeping";
  for (int64_t k : kept) text.append(" ").append(std::to_string(k));
  note(text);
  SequenceModel& model = models_.at(id);
  const bool possible = model.even() && model.n_pending() > 0;
  const int64_t nothing = 0;
  TANDEM_EXPECT(where(), possible ? TANDEM_OK : TANDEM_ERROR_INVALID_STATE,
                tandem_session_commit(*sessions_[session].session, id, kept.empty() ? &nothing : kept.data(),
                                      static_cast<int64_t>(kept.size()), &error));
  if (!possible) return;
  const auto base = static_cast<size_t>(model.length(0));
  Entry& entry = sessions_[session];
  for (size_t l = 0; entry.hgca && l < layers_.size(); ++l) {
    std::vector<QueryWeights> weights;
    for (size_t i = 0; i < kept.size(); ++i) {
      QueryWeights query;
      query.end = static_cast<int64_t>(base + i + 1);
      for (const std::vector<double>& row : entry.guess.at(id)[l][static_cast<size_t>(kept[i])].by_head) {
        std::vector<double> moved(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(base));
        for (size_t m = 0; m <= i; ++m) moved.push_back(row[base + static_cast<size_t>(kept[m])]);
        query.by_head.push_back(std::move(moved));
      }
      weights.push_back(std::move(query));
    }
    hgca(entry, id).after_commit(l, weights, static_cast<int64_t>(base));
  }
  model.commit(kept);
  parents_.erase(id);
  for (Entry& each : sessions_) each.guess.erase(id);
  for (size_t l = 0; entry.hgca && l < layers_.size(); ++l) check_selection(session, id, l);
}

}  // namespace harness
