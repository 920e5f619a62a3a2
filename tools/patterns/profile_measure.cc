// SPDX-License-Identifier: MIT
#include "tools/patterns/profile_measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "examples/generate/interrupt.h"
#include "examples/generate/progress_bar.h"
#include "tools/bench/machine_facts.h"
#include "tools/common/engine_report.h"
#include "tools/common/flags.h"
#include "tools/common/random_rows.h"

namespace tools {
namespace {

constexpr int64_t kPeriod = 1024;      // tokens after which rows return
constexpr int64_t kFillTokens = 4096;  // tokens per append without attention
constexpr float kBaseScale = 0.6f, kNoiseScale = 0.3f;
constexpr double kMemoryShare = 0.8;  // share of the available memory
constexpr int64_t kCheckedKeys = 4096, kCheckedQueries = 256;
constexpr double kMostDistance = 2e-2;  // between outputs, whose size is near kBaseScale

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

Result check_available(const char* option, int64_t value, double bytes) {
  const auto available = static_cast<double>(available_memory_bytes());
  if (bytes <= kMemoryShare * available) return {};
  return refuse("%s = %lld needs %.1f GiB, of %.1f GiB available", option, static_cast<long long>(value), bytes / 0x1p30,
                available / 0x1p30);
}

// Drops the sequence however the measurement ends.
class OwnedSequence {
 public:
  explicit OwnedSequence(tandem_cache* cache) : cache_(cache) {}
  OwnedSequence(const OwnedSequence&) = delete;
  OwnedSequence& operator=(const OwnedSequence&) = delete;
  ~OwnedSequence() {
    if (is_made_) tandem_sequence_drop(cache_, id_, nullptr);
  }
  Result create() {
    ErrorSlot error;
    TOOL_TRY(error.check(tandem_sequence_create(&id_, cache_, error.out())));
    is_made_ = true;
    return {};
  }
  int64_t id() const { return id_; }

 private:
  tandem_cache* cache_;
  int64_t id_ = 0;
  bool is_made_ = false;
};

}  // namespace

Result ProfileBench::create(const ProfileLayer& layer, std::unique_ptr<ProfileBench>* bench) {
  std::unique_ptr<ProfileBench> made(new ProfileBench(layer));
  // q, k, v, o, and an f32 copy of q while q is generated.
  const int64_t dim_bytes = 2 * (layer.n_q_heads + layer.n_kv_heads) * float_bytes(layer.io_type) + 4 * layer.n_q_heads;
  TOOL_TRY(check_available("--chunk", layer.chunk, static_cast<double>(dim_bytes * layer.head_dim * layer.chunk)));
  TOOL_TRY(made->create_objects());
  TOOL_TRY(made->create_rows());
  *bench = std::move(made);
  return {};
}

Result ProfileBench::create_rows() {
  base_.resize(static_cast<size_t>(kPeriod * layer_.head_dim));
  fill_normal(base_.data(), std::ssize(base_), 1);
  q_ = make_rows(0, layer_.chunk, layer_.n_q_heads, 2);
  k_ = make_rows(0, layer_.chunk, layer_.n_kv_heads, 3);
  v_ = make_rows(0, layer_.chunk, layer_.n_kv_heads, 4);
  o_.n_heads = q_.n_heads;
  o_.bytes = q_.bytes;
  if (device_ == nullptr) return {};
  for (Rows* rows : {&q_, &k_, &v_, &o_}) {
    TOOL_TRY(DeviceBuffer::create(device_.get(), std::ssize(rows->bytes), &rows->on_device));
    TOOL_TRY(rows->on_device.upload(rows->bytes.data()));
  }
  return {};
}

Result ProfileBench::create_objects() {
  ErrorSlot error;
  TOOL_TRY(layer_.engine.start(&engine_));
  if (layer_.on_device()) {
    Json report;
    EngineDevice opened;
    TOOL_TRY(engine_report(engine_.get(), &report));
    TOOL_TRY(open_device_of(report, &opened));
    TOOL_TRY(DeviceMemory::open(opened.idx, &device_));
  }
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = static_cast<int32_t>(layer_.n_q_heads);
  layer.n_kv_heads = static_cast<int32_t>(layer_.n_kv_heads);
  layer.k_head_dim = static_cast<int32_t>(layer_.head_dim);
  tandem_model* model = nullptr;
  TOOL_TRY(error.check(tandem_model_create(&model, &layer, 1, error.out())));
  model_.reset(model);
  tandem_cache_options of_cache = TANDEM_CACHE_OPTIONS_INIT;
  of_cache.k_type = layer_.kv_type;
  tandem_cache* cache = nullptr;
  TOOL_TRY(error.check(tandem_cache_create(&cache, engine_.get(), model, &of_cache, error.out())));
  cache_.reset(cache);
  return {};
}

// pattern: NULL for policy "all". kv_len: length of the longest sequence, whose keys are all in a device's window.
Result ProfileBench::create_session(const tandem_head_pattern* pattern, int64_t kv_len, Session* session) const {
  ErrorSlot error;
  std::vector<tandem_head_pattern> heads;
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  if (device_ != nullptr) options.window_tokens = kv_len;
  if (pattern != nullptr) {
    heads.assign(static_cast<size_t>(layer_.n_q_heads), *pattern);
    patterns.heads = heads.data();
    patterns.n_heads = std::ssize(heads);
    options.policy = "patterns";
    options.patterns = &patterns;
  }
  tandem_session* made = nullptr;
  TOOL_TRY(error.check(tandem_session_create(&made, cache_.get(), &options, error.out())));
  session->reset(made);
  return {};
}

ProfileBench::Rows ProfileBench::make_rows(int64_t first_token, int64_t n_tokens, int64_t n_heads, uint64_t seed) const {
  const int64_t dim = layer_.head_dim, n = n_tokens * n_heads * dim;
  std::vector<float> values(static_cast<size_t>(n));
  fill_normal(values.data(), n, seed + 16 * static_cast<uint64_t>(first_token));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = (first_token + i / (n_heads * dim)) % kPeriod;
    float& value = values[static_cast<size_t>(i)];
    value = kBaseScale * base_[static_cast<size_t>(token * dim + i % dim)] + kNoiseScale * value;
  }
  Rows rows;
  rows.n_heads = n_heads;
  rows.bytes.resize(static_cast<size_t>(n * float_bytes(layer_.io_type)));
  if (layer_.io_type == TANDEM_F32) {
    std::memcpy(rows.bytes.data(), values.data(), rows.bytes.size());
    return rows;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = bf16_of(values[static_cast<size_t>(i)]);
    std::memcpy(rows.bytes.data() + 2 * i, &bits, 2);
  }
  return rows;
}

tandem_tensor ProfileBench::tensor(Rows* rows, int64_t n_tokens) const {
  const int64_t shape[3] = {n_tokens, rows->n_heads, layer_.head_dim};
  tandem_tensor view = {};
  tandem_tensor_init(&view, layer_.io_type, rows->bytes.data(), 3, shape, nullptr);
  if (rows->on_device.data() == nullptr) return view;
  view.data = rows->on_device.data();
  view.device_type = TANDEM_DEVICE_CUDA;
  view.device_index = device_->device_idx();
  return view;
}

Result ProfileBench::fill(int64_t sequence, int64_t n_tokens) {
  ErrorSlot error;
  generate::ProgressBar bar("fill", n_tokens, "keys");
  for (int64_t first = 0; first < n_tokens; first += kFillTokens) {
    bar.show(first);
    const int64_t n = std::min(kFillTokens, n_tokens - first);
    TOOL_TRY(check_interrupted());
    Rows k_rows = make_rows(first, n, layer_.n_kv_heads, 5), v_rows = make_rows(first, n, layer_.n_kv_heads, 6);
    const tandem_tensor k = tensor(&k_rows, n), v = tensor(&v_rows, n);
    TOOL_TRY(error.check(tandem_sequence_append(cache_.get(), sequence, 0, &k, &v, nullptr, error.out())));
  }
  return {};
}

Result ProfileBench::check_memory(int64_t kv_len) const {
  const auto row_bytes = static_cast<double>(tandem_dtype_row_bytes(layer_.kv_type, static_cast<int32_t>(layer_.head_dim)));
  return check_available("--lengths", kv_len, 2.0 * row_bytes * static_cast<double>(kv_len * layer_.n_kv_heads));
}

Result ProfileBench::attend(tandem_session* session, int64_t sequence, int64_t q_len, double* ns) {
  ErrorSlot error;
  const tandem_tensor q = tensor(&q_, q_len), k = tensor(&k_, q_len), v = tensor(&v_, q_len), o = tensor(&o_, q_len);
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &q;
  args.k = &k;
  args.v = &v;
  args.o = &o;
  if (device_ == nullptr) args.cancel = generate::interrupt_flag();  // a call on device tensors cannot be stopped half-way
  const auto begin = std::chrono::steady_clock::now();
  Result result = error.check(tandem_attend(session, &args, error.out()));
  if (result.ok() && device_ != nullptr) result = device_->wait();
  *ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

// Makes one call of each session at the same length.
Result ProfileBench::repeat(int64_t sequence, int64_t kv_len, const std::vector<Session>& sessions,
                            std::vector<double>* ns) {
  ErrorSlot error;
  ns->resize(sessions.size());
  for (size_t i = 0; i < sessions.size(); ++i) {
    TOOL_TRY(check_interrupted());
    // A truncation may give reserved pages back. So they are reserved again before the clock starts.
    TOOL_TRY(error.check(tandem_sequence_reserve(cache_.get(), sequence, layer_.chunk, error.out())));
    TOOL_TRY(attend(sessions[i].get(), sequence, layer_.chunk, &(*ns)[i]));
    TOOL_TRY(error.check(tandem_sequence_truncate(cache_.get(), sequence, kv_len - layer_.chunk, error.out())));
  }
  return {};
}

Result ProfileBench::measure(int64_t kv_len, const std::vector<tandem_head_pattern>& patterns,
                             std::vector<ProfileTime>* times) {
  ErrorSlot error;
  OwnedSequence sequence(cache_.get());
  TOOL_TRY(sequence.create());
  TOOL_TRY(error.check(tandem_sequence_reserve(cache_.get(), sequence.id(), kv_len, error.out())));
  TOOL_TRY(fill(sequence.id(), kv_len - layer_.chunk));
  std::vector<Session> sessions(patterns.size());
  for (size_t i = 0; i < patterns.size(); ++i) TOOL_TRY(create_session(&patterns[i], kv_len, &sessions[i]));
  std::vector<std::vector<double>> ns(patterns.size());
  times->assign(patterns.size(), {});
  const int64_t n_untimed = device_ != nullptr ? 1 : 0;
  generate::ProgressBar bar(text("%lld keys", static_cast<long long>(kv_len)), n_untimed + layer_.repeats, "rounds");
  for (int64_t round = 0; round < n_untimed + layer_.repeats; ++round) {
    std::vector<double> of_round;
    TOOL_TRY(repeat(sequence.id(), kv_len, sessions, &of_round));
    for (size_t i = 0; i < patterns.size(); ++i) {
      if (round >= n_untimed) ns[i].push_back(of_round[i]);
      if (round > 0) continue;  // the session counts the pairs of all rounds
      ProfileTime& time = (*times)[i];
      TOOL_TRY(error.check(tandem_session_pattern_pairs(&time.pairs, &time.dense_pairs, sessions[i].get(), 0, error.out())));
    }
    bar.show(round + 1);
  }
  for (size_t i = 0; i < patterns.size(); ++i) (*times)[i].ns = median(ns[i]);
  return {};
}

// 0xff is NaN in every type, so outputs that a call does not write are noticed.
Result ProfileBench::forget_outputs() {
  std::fill(o_.bytes.begin(), o_.bytes.end(), uint8_t{0xff});
  return device_ != nullptr ? o_.on_device.upload(o_.bytes.data()) : Result();
}

Result ProfileBench::outputs(int64_t q_len, std::vector<float>* values) {
  if (device_ != nullptr) TOOL_TRY(o_.on_device.download(o_.bytes.data()));
  values->resize(static_cast<size_t>(q_len * layer_.n_q_heads * layer_.head_dim));
  if (layer_.io_type == TANDEM_F32) {
    std::memcpy(values->data(), o_.bytes.data(), values->size() * sizeof(float));
    return {};
  }
  for (size_t i = 0; i < values->size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, o_.bytes.data() + 2 * i, 2);
    (*values)[i] = f32_of(bits);
  }
  return {};
}

Result ProfileBench::compare(int64_t sequence, int64_t kv_len, int64_t q_len) {
  ErrorSlot error;
  tandem_head_pattern whole = TANDEM_HEAD_PATTERN_INIT;
  whole.kinds = TANDEM_PATTERN_A_SHAPE;
  whole.window_tokens = kv_len;
  std::vector<float> of_policy[2];
  const tandem_head_pattern* patterns[2] = {nullptr, &whole};
  for (int i = 0; i < 2; ++i) {
    Session session;
    double ns = 0;
    TOOL_TRY(create_session(patterns[i], kv_len, &session));
    TOOL_TRY(forget_outputs());
    TOOL_TRY(attend(session.get(), sequence, q_len, &ns));
    TOOL_TRY(error.check(tandem_sequence_truncate(cache_.get(), sequence, kv_len - q_len, error.out())));
    TOOL_TRY(outputs(q_len, &of_policy[i]));
  }
  for (size_t i = 0; i < of_policy[0].size(); ++i)
    if (!(std::fabs(of_policy[0][i] - of_policy[1][i]) < kMostDistance))
      return refuse("heads whose window has all keys give other outputs than policy \"all\": %g, not %g", of_policy[1][i],
                    of_policy[0][i]);
  return {};
}

Result ProfileBench::check_outputs(int64_t kv_len) {
  const int64_t n_keys = std::min(kv_len, kCheckedKeys), q_len = std::min(layer_.chunk, std::min(n_keys, kCheckedQueries));
  OwnedSequence sequence(cache_.get());
  TOOL_TRY(sequence.create());
  TOOL_TRY(fill(sequence.id(), n_keys - q_len));
  return compare(sequence.id(), n_keys, q_len);
}

}  // namespace tools
