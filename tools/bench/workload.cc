// SPDX-License-Identifier: MIT
#include "tools/bench/workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "examples/generate/interrupt.h"
#include "examples/generate/progress_bar.h"
#include "tools/common/flags.h"
#include "tools/common/random_rows.h"

namespace tools {
namespace {

constexpr int64_t kFillTokens = 4096;  // tokens per append
constexpr int64_t kPoolTokens = 5000;  // not a multiple of a page, so each append takes another range
constexpr int64_t kObservedTokens = 32;
constexpr float kLogitDeviation = 3.0f;
constexpr float kSharedDirection = 0.95f;  // the rest, sqrt(1 - 0.95^2), differs for each token

tandem_layer_options layer_options(const BenchOptions& options) {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = static_cast<int32_t>(options.n_q_heads);
  layer.n_kv_heads = static_cast<int32_t>(options.n_kv_heads);
  layer.k_head_dim = static_cast<int32_t>(options.head_dim);
  layer.v_head_dim = static_cast<int32_t>(options.v_head_dim);
  layer.v_aliases_k = options.v_aliases_k ? 1 : 0;
  layer.rope = options.rope_theta > 0 ? TANDEM_ROPE_HALVES : TANDEM_ROPE_CALLER;
  layer.rope_theta = options.rope_theta;
  return layer;
}

tandem_cache_options cache_options(const BenchOptions& options, int32_t kv_type) {
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  cache.k_type = kv_type;
  cache.v_type = options.v_type;
  cache.k_rotation = options.k_rotation;
  cache.page_tokens = static_cast<int32_t>(options.page_tokens);
  return cache;
}

// The options of a session, and the heads that they point to: the heads of one layer, repeated for each of n_layers.
struct SessionSettings {
  std::vector<tandem_head_pattern> heads;
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;

  SessionSettings(const BenchOptions& options, int32_t n_layers);
  SessionSettings(const SessionSettings&) = delete;
  SessionSettings& operator=(const SessionSettings&) = delete;
};

SessionSettings::SessionSettings(const BenchOptions& options, int32_t n_layers) {
  session.policy = options.policy.c_str();
  session.window_tokens = options.window;
  session.sink_tokens = options.sinks;
  session.alpha = static_cast<float>(options.alpha);
  session.beta = static_cast<float>(options.beta);
  if (options.policy != "patterns") return;
  const std::vector<tandem_head_pattern>& of_layer = options.patterns.heads;
  for (int32_t i = 0; i < n_layers; ++i) heads.insert(heads.end(), of_layer.begin(), of_layer.end());
  patterns.heads = heads.data();
  patterns.n_heads = std::ssize(heads);
  session.patterns = &patterns;
}

}  // namespace

Result Workload::check_supported(const tandem_engine* engine, const BenchOptions& options, int32_t kv_type) {
  ErrorSlot error;
  const tandem_layer_options layer = layer_options(options);
  const tandem_cache_options cache = cache_options(options, kv_type);
  const SessionSettings settings(options, 1);
  return error.check(tandem_supports(engine, &layer, &cache, &settings.session, error.out()));
}

Result Workload::create(tandem_engine* engine, const BenchOptions& options, const Case& geometry,
                        std::unique_ptr<Workload>* workload) {
  std::unique_ptr<Workload> made(new Workload(engine, options, geometry));
  TOOL_TRY(made->create_objects());
  made->make_inputs();
  *workload = std::move(made);
  return {};
}

Result Workload::create_objects() {
  ErrorSlot error;
  const std::vector<tandem_layer_options> layers(static_cast<size_t>(case_.n_layers), layer_options(options_));
  tandem_model* model = nullptr;
  TOOL_TRY(error.check(tandem_model_create(&model, layers.data(), case_.n_layers, error.out())));
  model_.reset(model);

  const tandem_cache_options of_cache = cache_options(options_, case_.kv_type);
  tandem_cache* cache = nullptr;
  TOOL_TRY(error.check(tandem_cache_create(&cache, engine_, model, &of_cache, error.out())));
  cache_.reset(cache);

  for (int64_t i = 0; i < options_.batch; ++i) {
    int64_t sequence = 0;
    TOOL_TRY(error.check(tandem_sequence_create(&sequence, cache, error.out())));
    sequences_.push_back(sequence);
  }

  const SessionSettings settings(options_, case_.n_layers);
  tandem_session* session = nullptr;
  TOOL_TRY(error.check(tandem_session_create(&session, cache, &settings.session, error.out())));
  session_.reset(session);
  return {};
}

void Workload::make_inputs() {
  const int64_t n_tokens = options_.batch * std::max(case_.q_len, kObservedTokens);
  k_pool_ = random_rows(std::max(kPoolTokens, n_tokens), options_.n_kv_heads * options_.head_dim, 1);
  v_pool_ = random_rows(std::max(kPoolTokens, n_tokens), options_.n_kv_heads * options_.v_head_dim, 2);

  const int64_t row_elements = options_.n_q_heads * options_.head_dim;
  std::vector<float> shared(static_cast<size_t>(row_elements));
  q_f32_.resize(static_cast<size_t>(n_tokens * row_elements));
  fill_normal(shared.data(), row_elements, 3);
  fill_normal(q_f32_.data(), n_tokens * row_elements, 4);
  q_ = {row_elements, std::vector<uint8_t>(q_f32_.size() * static_cast<size_t>(float_bytes(options_.io_type)))};
  const float own = std::sqrt(1.0f - kSharedDirection * kSharedDirection);
  for (int64_t i = 0; i < n_tokens * row_elements; ++i) {
    float& q = q_f32_[static_cast<size_t>(i)];
    q = kLogitDeviation * (kSharedDirection * shared[static_cast<size_t>(i % row_elements)] + own * q);
    if (options_.io_type == TANDEM_BF16) {
      const uint16_t rounded = bf16_of(q);
      std::memcpy(q_.bytes.data() + i * 2, &rounded, 2);
      q = f32_of(rounded);
    } else {
      std::memcpy(q_.bytes.data() + i * 4, &q, 4);
    }
  }
  const int64_t o_elements = options_.n_q_heads * options_.v_head_dim;
  o_ = {o_elements, std::vector<uint8_t>(static_cast<size_t>(n_tokens * o_elements * float_bytes(options_.io_type)))};
  lse_.resize(static_cast<size_t>(n_tokens * options_.n_q_heads));
}

Workload::Rows Workload::random_rows(int64_t n_rows, int64_t row_elements, uint64_t seed) const {
  std::vector<float> values(static_cast<size_t>(n_rows * row_elements));
  fill_normal(values.data(), n_rows * row_elements, seed);
  Rows rows{row_elements, std::vector<uint8_t>(values.size() * static_cast<size_t>(float_bytes(options_.io_type)))};
  if (options_.io_type == TANDEM_F32) {
    std::memcpy(rows.bytes.data(), values.data(), rows.bytes.size());
    return rows;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t rounded = bf16_of(values[i]);
    std::memcpy(rows.bytes.data() + i * 2, &rounded, 2);
  }
  return rows;
}

// [n_rows, n_heads, row_elements / n_heads]
tandem_tensor Workload::tensor(Rows* rows, int64_t first_row, int64_t n_rows, int64_t n_heads) const {
  const int64_t shape[3] = {n_rows, n_heads, rows->row_elements / n_heads};
  tandem_tensor view = {};
  tandem_tensor_init(&view, options_.io_type,
                     rows->bytes.data() + first_row * rows->row_elements * float_bytes(options_.io_type), 3, shape, nullptr);
  return view;
}

Result Workload::fill(int64_t n_tokens) {
  ErrorSlot error;
  const int64_t observed = selects_keys() ? std::min(kObservedTokens, kv_len(0) - case_.q_len) : 0;
  generate::ProgressBar bar("fill", options_.batch * case_.n_layers, "layers");
  for (int64_t i = 0; i < options_.batch; ++i) {
    const int64_t filled = kv_len(i) - case_.q_len;
    TOOL_TRY(error.check(tandem_sequence_reserve(cache_.get(), sequence(i), filled + n_tokens, error.out())));
    for (int32_t layer_idx = 0; layer_idx < case_.n_layers; ++layer_idx) {
      TOOL_TRY(fill_layer(i, layer_idx, filled - observed));
      bar.show(i * case_.n_layers + layer_idx + 1);
    }
  }
  return observed > 0 ? observe(observed) : Result();
}

// Makes one append of several tokens, in which a policy looks at every key again and selects.
Result Workload::observe(int64_t n_tokens) {
  ErrorSlot error;
  TOOL_TRY(step_begin(n_tokens));
  for (int32_t layer_idx = 0; layer_idx < case_.n_layers; ++layer_idx) TOOL_TRY(attend(layer_idx, n_tokens, true));
  TOOL_TRY(step_end());
  return error.check(tandem_engine_drain(engine_, -1, error.out()));
}

Result Workload::fill_layer(int64_t sequence_idx, int32_t layer_idx, int64_t n_tokens) {
  ErrorSlot error;
  uint64_t state = static_cast<uint64_t>(sequence_idx * case_.n_layers + layer_idx);
  for (int64_t done = 0; done < n_tokens;) {
    TOOL_TRY(check_interrupted());
    const int64_t n = std::min(kFillTokens, n_tokens - done);
    const auto first = static_cast<int64_t>(next_random(&state) % static_cast<uint64_t>(kPoolTokens - n + 1));
    const tandem_tensor k = tensor(&k_pool_, first, n, options_.n_kv_heads);
    const tandem_tensor v = tensor(&v_pool_, first, n, options_.n_kv_heads);
    TOOL_TRY(error.check(tandem_sequence_append(cache_.get(), sequence(sequence_idx), layer_idx, &k,
                                                options_.v_aliases_k ? nullptr : &v, nullptr, error.out())));
    done += n;
  }
  return {};
}

Result Workload::step_begin(int64_t q_len) {
  ErrorSlot error;
  q_lens_.assign(sequences_.size(), q_len);
  return error.check(tandem_step_begin(session_.get(), sequences_.data(), q_lens_.data(),
                                       static_cast<int32_t>(options_.batch), nullptr, error.out()));
}

Result Workload::step_end() {
  ErrorSlot error;
  return error.check(tandem_step_end(session_.get(), nullptr, error.out()));
}

Result Workload::attend(int32_t layer_idx, int64_t q_len, bool append) {
  ErrorSlot error;
  const int64_t n_tokens = options_.batch * q_len;
  q_lens_.assign(sequences_.size(), q_len);
  const tandem_tensor q = tensor(&q_, 0, n_tokens, options_.n_q_heads);
  const tandem_tensor k = tensor(&k_pool_, 0, n_tokens, options_.n_kv_heads);
  const tandem_tensor v = tensor(&v_pool_, 0, n_tokens, options_.n_kv_heads);
  const tandem_tensor o = tensor(&o_, 0, n_tokens, options_.n_q_heads);
  tandem_tensor lse = {};
  const int64_t lse_shape[2] = {n_tokens, options_.n_q_heads};
  tandem_tensor_init(&lse, TANDEM_F32, lse_.data(), 2, lse_shape, nullptr);

  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.layer_idx = layer_idx;
  args.n_sequences = static_cast<int32_t>(options_.batch);
  args.sequences = sequences_.data();
  args.q_lens = q_lens_.data();
  args.q = &q;
  args.k = append ? &k : nullptr;
  args.v = append && !options_.v_aliases_k ? &v : nullptr;
  args.o = &o;
  args.lse = &lse;
  args.cancel = generate::interrupt_flag();
  return error.check(tandem_attend(session_.get(), &args, error.out()));
}

Result Workload::truncate() {
  ErrorSlot error;
  for (int64_t i = 0; i < options_.batch; ++i)
    TOOL_TRY(error.check(tandem_sequence_truncate(cache_.get(), sequence(i), kv_len(i) - case_.q_len, error.out())));
  return {};
}

Result Workload::stats(tandem_session_stats* stats) const {
  ErrorSlot error;
  *stats = TANDEM_SESSION_STATS_INIT;
  return error.check(tandem_session_get_stats(stats, session_.get(), error.out()));
}

const float* Workload::q_row(int64_t token, int64_t q_head) const {
  return q_f32_.data() + (token * options_.n_q_heads + q_head) * options_.head_dim;
}

std::vector<float> Workload::o_row(int64_t token, int64_t q_head) const {
  std::vector<float> row(static_cast<size_t>(options_.v_head_dim));
  const int64_t first = (token * options_.n_q_heads + q_head) * options_.v_head_dim;
  for (int64_t d = 0; d < options_.v_head_dim; ++d) {
    if (options_.io_type == TANDEM_F32) {
      std::memcpy(&row[static_cast<size_t>(d)], o_.bytes.data() + (first + d) * 4, 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, o_.bytes.data() + (first + d) * 2, 2);
      row[static_cast<size_t>(d)] = f32_of(bits);
    }
  }
  return row;
}

}  // namespace tools
