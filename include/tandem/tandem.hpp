// SPDX-License-Identifier: MIT
//
// tandem.h for C++11 and later, header only: handles that release themselves, errors that throw.
//
//   tandem::Engine engine;
//   tandem::Model model({layer, layer});
//   tandem::Cache cache(engine, model);
//   tandem::Session session(cache);
//   int64_t sequence = cache.create_sequence();
//   session.attend(args);
//
// Every object owns one handle. Objects can be moved but not copied. get() returns the handle, for any function of tandem.h.
// Objects may be destroyed in any order: a handle keeps alive the handles that it needs. At its end this header includes
// saving.hpp: sequences in files.
#ifndef TANDEM_TANDEM_HPP_
#define TANDEM_TANDEM_HPP_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "tandem/tandem.h"

namespace tandem {
// An inner namespace: the static library has classes of the same names, and a program linked with it must not mix these up
// with the inline functions here.
inline namespace cpp {

// Thrown by a call that fails: status() is TANDEM_ERROR_*, field() the member or parameter that was refused ("" for none).
class Error : public std::exception {
 public:
  Error(int32_t status, const tandem_error* error)
      : status_(status),
        underlying_(tandem_error_underlying(error)),
        field_(error != nullptr ? tandem_error_field(error) : ""),
        message_(error != nullptr ? tandem_error_message(error) : tandem_status_name(status)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  int32_t status() const noexcept { return status_; }
  int64_t underlying() const noexcept { return underlying_; }
  const std::string& field() const noexcept { return field_; }
  const std::string& message() const noexcept { return message_; }

 private:
  int32_t status_;
  int64_t underlying_;
  std::string field_;
  std::string message_;
};

namespace detail {

template <typename T, void (*kRelease)(T*)>
struct Release {
  void operator()(T* handle) const noexcept { kRelease(handle); }
};

// Receives the error object of a call and owns it.
class Caught {
 public:
  Caught() = default;
  Caught(const Caught&) = delete;
  Caught& operator=(const Caught&) = delete;
  ~Caught() { tandem_error_release(error_); }
  operator tandem_error**() { return &error_; }  // NOLINT(google-explicit-constructor): it stands for the last argument
  void check(int32_t status) const {
    if (status != TANDEM_OK) throw Error(status, error_);
  }

 private:
  tandem_error* error_ = nullptr;
};

// Calls function(args..., error) and throws what it reports.
template <typename Function, typename... Args>
void call(Function function, Args... args) {
  Caught caught;
  caught.check(function(args..., caught));
}

// Returns the text of a function that fills a buffer. Calls it twice: for the size, then for the text.
template <typename Function, typename Subject>
std::string report(Function function, Subject subject) {
  std::size_t bytes = 0;
  call(function, nullptr, std::size_t{0}, &bytes, subject);
  std::string text(bytes, '\0');
  call(function, &text[0], text.size(), &bytes, subject);
  text.resize(text.find('\0') == std::string::npos ? text.size() : text.find('\0'));
  return text;
}

inline int32_t length(std::size_t n) { return static_cast<int32_t>(n); }

}  // namespace detail

// A contiguous view of host memory as a tensor; the memory stays the caller's.
inline tandem_tensor tensor(int32_t dtype, void* data, std::initializer_list<int64_t> shape) {
  tandem_tensor view;
  detail::call(tandem_tensor_init, &view, dtype, data, detail::length(shape.size()), shape.begin());
  return view;
}
inline tandem_tensor tensor(float* data, std::initializer_list<int64_t> shape) { return tensor(TANDEM_F32, data, shape); }

// Lets the program's own threads do the CPU's part instead of workers. tandem.h describes options.run and options.run_user.
inline void lend_threads(tandem_engine_options& options, int32_t n_threads, tandem_run_fn run, void* user = nullptr) {
  options.n_threads = n_threads;
  options.run = run;
  options.run_user = user;
}

class Engine {
 public:
  Engine() : Engine(nullptr) {}
  explicit Engine(const tandem_engine_options& options) : Engine(&options) {}
  tandem_engine* get() const { return handle_.get(); }
  // Waits for background work and everything in flight; throws TANDEM_ERROR_TIMEOUT. timeout_ns < 0: no limit.
  void drain(int64_t timeout_ns = -1) { detail::call(tandem_engine_drain, get(), timeout_ns); }
  std::string report() const { return detail::report(tandem_engine_report, static_cast<const tandem_engine*>(get())); }
  // Attention over K and V where they lie: tandem_attend_tensors().
  void attend_tensors(const tandem_attend_tensors_args& args) { detail::call(tandem_attend_tensors, get(), &args); }

 private:
  explicit Engine(const tandem_engine_options* options) {
    tandem_engine* handle = nullptr;
    detail::call(tandem_engine_create, &handle, options);
    handle_.reset(handle);
  }
  std::unique_ptr<tandem_engine, detail::Release<tandem_engine, tandem_engine_release>> handle_;
};

class Model {
 public:
  explicit Model(const std::vector<tandem_layer_options>& layers) {
    tandem_model* handle = nullptr;
    detail::call(tandem_model_create, &handle, layers.data(), detail::length(layers.size()));
    handle_.reset(handle);
  }
  tandem_model* get() const { return handle_.get(); }

 private:
  std::unique_ptr<tandem_model, detail::Release<tandem_model, tandem_model_release>> handle_;
};

class Cache {
 public:
  Cache(const Engine& engine, const Model& model) : Cache(engine, model, nullptr) {}
  Cache(const Engine& engine, const Model& model, const tandem_cache_options& options) : Cache(engine, model, &options) {}
  tandem_cache* get() const { return handle_.get(); }

  int64_t create_sequence() {
    int64_t sequence = 0;
    detail::call(tandem_sequence_create, &sequence, get());
    return sequence;
  }
  int64_t fork(int64_t sequence) {
    int64_t fork = 0;
    detail::call(tandem_sequence_fork, &fork, get(), sequence);
    return fork;
  }
  void drop(int64_t sequence) { detail::call(tandem_sequence_drop, get(), sequence); }
  std::vector<int64_t> sequences() const {
    int64_t n = 0;
    detail::call(tandem_cache_sequences, nullptr, 0, &n, get());
    for (;;) {
      std::vector<int64_t> ids(static_cast<size_t>(n));
      detail::call(tandem_cache_sequences, ids.data(), n, &n, get());
      if (n <= static_cast<int64_t>(ids.size())) return ids.resize(static_cast<size_t>(n)), ids;
    }
  }
  int64_t trim() {
    int64_t n_bytes = 0;
    detail::call(tandem_cache_trim, &n_bytes, get());
    return n_bytes;
  }
  void reserve(int64_t sequence, int64_t n_tokens) { detail::call(tandem_sequence_reserve, get(), sequence, n_tokens); }
  void truncate(int64_t sequence, int64_t n_tokens) { detail::call(tandem_sequence_truncate, get(), sequence, n_tokens); }
  void remove(int64_t sequence, int64_t first, int64_t n_tokens, bool shift_positions = false) {
    detail::call(tandem_sequence_remove, get(), sequence, first, n_tokens, shift_positions ? 1 : 0);
  }
  // v is null if it aliases k.
  void append(int64_t sequence, int32_t layer_idx, const tandem_tensor* k, const tandem_tensor* v, void* stream = nullptr) {
    detail::call(tandem_sequence_append, get(), sequence, layer_idx, k, v, stream);
  }
  // append() for a layer that keeps hidden states.
  void append_x(int64_t sequence, int32_t layer_idx, const tandem_tensor* k, const tandem_tensor* v, const tandem_tensor* x,
                void* stream = nullptr) {
    detail::call(tandem_sequence_append_x, get(), sequence, layer_idx, k, v, x, stream);
  }
  void read_x(const tandem_tensor* x, int64_t sequence, int32_t layer_idx, int64_t first = 0) const {
    detail::call(tandem_sequence_read_x, x, get(), sequence, layer_idx, first);
  }
  void read(const tandem_tensor* k, const tandem_tensor* v, int64_t sequence, int32_t layer_idx, int64_t first = 0) const {
    detail::call(tandem_sequence_read, k, v, get(), sequence, layer_idx, first);
  }
  int64_t length(int64_t sequence, int32_t layer_idx = 0) const {
    int64_t n_tokens = 0;
    detail::call(tandem_sequence_length, &n_tokens, get(), sequence, layer_idx);
    return n_tokens;
  }
  uint64_t digest(int64_t sequence) const {
    uint64_t digest = 0;
    detail::call(tandem_sequence_digest, &digest, get(), sequence);
    return digest;
  }
  tandem_cache_stats stats() const {
    tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
    detail::call(tandem_cache_get_stats, &stats, get());
    return stats;
  }

 private:
  Cache(const Engine& engine, const Model& model, const tandem_cache_options* options) {
    tandem_cache* handle = nullptr;
    detail::call(tandem_cache_create, &handle, engine.get(), model.get(), options);
    handle_.reset(handle);
  }
  std::unique_ptr<tandem_cache, detail::Release<tandem_cache, tandem_cache_release>> handle_;
};

// How a stage gives a chunk its score: TANDEM_JUDGE_* in pruning.h.
enum class Judge : int32_t { kDescent = TANDEM_JUDGE_DESCENT, kBounds = TANDEM_JUDGE_BOUNDS, kExact = TANDEM_JUDGE_EXACT };

// A stage scores chunks of tokens and keeps the best.
struct PruningStage {
  PruningStage(Judge how, int64_t chunk, int64_t keep) : judge(how), chunk_tokens(chunk), keep_tokens(keep) {}

  Judge judge;
  int64_t chunk_tokens;          // a power of two up to 256, no more than in the stage before
  int64_t keep_tokens;           // a multiple of chunk_tokens, with plus_next a multiple of twice that
  int64_t refresh_interval = 0;  // tokens between two runs in decode calls; 0: 1, the stage runs in every call
  int32_t query_block = 0;       // queries of an append that share a list: a power of two up to 64; 0: 64
  bool plus_next = false;        // last stage: half of keep_tokens is kept by score, and the chunk after each of these
  int64_t from_tokens = 0;       // the stage applies to queries that see at least this many tokens,
  int64_t to_tokens = 0;         // and fewer than these; 0: no limit
};

// Which keys a layer's queries attend: sinks, window, and the chunks that the last stage has kept.
struct PruningRecord {
  int64_t sink_tokens = -1;    // first tokens, a multiple of the first stage's chunk_tokens; -1: 64
  int64_t window_tokens = -1;  // newest, at least 2 * chunk_tokens + refresh_interval - 1, the largest of each; -1: 1024
  std::vector<PruningStage> stages;  // 1 to 8, one after another
};

// What policy "hip" prunes. Records: one for all layers or one per layer; none: the preset's.
struct Pruning {
  bool shared_lists = false;          // all KV heads share one list
  std::string preset = "small";       // or "3k", "3k-fast", "3k-flash", "5k", "3k-5k", "16k-shallow"
  std::vector<PruningRecord> decode;  // for calls with one query of a sequence, and for speculative tokens
  std::vector<PruningRecord> append;  // for calls with several queries of a sequence
};

// A copy of a Pruning in the form of tandem.h: options.pruning = copy.get(), valid while the copy lives.
class PruningCopy {
 public:
  explicit PruningCopy(const Pruning& from) : preset_(from.preset) {
    raw_.shared_lists = from.shared_lists ? 1 : 0;
    raw_.preset = preset_.c_str();
    decode_.assign(from.decode);
    append_.assign(from.append);
    raw_.decode = decode_.get();
    raw_.n_decode = static_cast<int64_t>(from.decode.size());
    raw_.append = append_.get();
    raw_.n_append = static_cast<int64_t>(from.append.size());
  }
  PruningCopy(const PruningCopy&) = delete;
  PruningCopy& operator=(const PruningCopy&) = delete;
  const tandem_pruning* get() const { return &raw_; }

 private:
  class Records {
   public:
    void assign(const std::vector<PruningRecord>& from) {
      stages_.resize(from.size());
      for (std::size_t i = 0; i < from.size(); ++i) {
        for (const PruningStage& stage : from[i].stages) stages_[i].push_back(raw(stage));
        tandem_pruning_record record = TANDEM_PRUNING_RECORD_INIT;
        record.sink_tokens = from[i].sink_tokens;
        record.window_tokens = from[i].window_tokens;
        record.stages = stages_[i].data();
        record.n_stages = static_cast<int64_t>(stages_[i].size());
        records_.push_back(record);
      }
    }
    const tandem_pruning_record* get() const { return records_.empty() ? nullptr : records_.data(); }

   private:
    static tandem_pruning_stage raw(const PruningStage& from) {
      tandem_pruning_stage stage = TANDEM_PRUNING_STAGE_INIT;
      stage.judge = static_cast<int32_t>(from.judge);
      stage.query_block = from.query_block;
      stage.plus_next = from.plus_next ? 1 : 0;
      stage.chunk_tokens = from.chunk_tokens;
      stage.keep_tokens = from.keep_tokens;
      stage.refresh_interval = from.refresh_interval;
      stage.from_tokens = from.from_tokens;
      stage.to_tokens = from.to_tokens;
      return stage;
    }
    std::vector<std::vector<tandem_pruning_stage>> stages_;  // [n_records]
    std::vector<tandem_pruning_record> records_;
  };
  std::string preset_;
  Records decode_, append_;
  tandem_pruning raw_ = TANDEM_PRUNING_INIT;
};

// The keys that heads attend under policy "patterns": the query heads of all layers, layer by layer.
struct Patterns {
  std::vector<tandem_head_pattern> heads;  // each begins as TANDEM_HEAD_PATTERN_INIT
  int64_t n_layers = 0;                    // layers of the file that read() has read

  // A file as MInference or DuoAttention publishes it.
  static Patterns read(const std::string& path, const tandem_pattern_file_options* options = nullptr) {
    Patterns patterns;
    int64_t n_heads = 0;
    do {  // the second time with room for all, unless the file grows
      const tandem_head_pattern all_tokens = TANDEM_HEAD_PATTERN_INIT;
      patterns.heads.assign(static_cast<std::size_t>(n_heads), all_tokens);
      detail::call(tandem_patterns_read, patterns.heads.data(), n_heads, &n_heads, &patterns.n_layers, path.c_str(), options);
    } while (n_heads > static_cast<int64_t>(patterns.heads.size()));
    patterns.heads.resize(static_cast<std::size_t>(n_heads));
    return patterns;
  }
  // The form of tandem.h, valid until heads change.
  tandem_patterns raw() const {
    tandem_patterns patterns = TANDEM_PATTERNS_INIT;
    patterns.heads = heads.data();
    patterns.n_heads = static_cast<int64_t>(heads.size());
    return patterns;
  }
};

class Weights;

class Session {
 public:
  explicit Session(Cache& cache) : Session(cache, nullptr) {}
  Session(Cache& cache, const tandem_session_options& options) : Session(cache, &options) {}
  // Policy "hip" uses `pruning`. options.pruning is ignored.
  Session(Cache& cache, tandem_session_options options, const Pruning& pruning) {
    const PruningCopy copy(pruning);
    options.pruning = copy.get();
    create(cache, &options);
  }
  // Policy "patterns" uses `patterns`. options.patterns is ignored.
  Session(Cache& cache, tandem_session_options options, const Patterns& patterns) {
    const tandem_patterns raw = patterns.raw();
    options.patterns = &raw;
    create(cache, &options);
  }
  tandem_session* get() const { return handle_.get(); }

  void attend(const tandem_attend_args& args) { detail::call(tandem_attend, get(), &args); }
  void commit(int64_t sequence, const std::vector<int64_t>& kept_idx) {
    detail::call(tandem_session_commit, get(), sequence, kept_idx.data(), static_cast<int64_t>(kept_idx.size()));
  }
  tandem_session_stats stats() const {
    tandem_session_stats stats = TANDEM_SESSION_STATS_INIT;
    detail::call(tandem_session_get_stats, &stats, get());
    return stats;
  }
  // Names W_K and W_V for a layer whose projection has none: tandem_session_use_weights().
  void use_weights(int32_t layer_idx, Weights& weights, int32_t w_k_block, int32_t w_v_block);
  // Who will compute the next call on device tensors: tandem_plan(). q_lens: empty for 1 each.
  tandem_route_plan plan(int32_t layer_idx, const std::vector<int64_t>& kv_lens, const std::vector<int64_t>& q_lens = {}) {
    if (!q_lens.empty() && q_lens.size() != kv_lens.size()) throw Error(TANDEM_ERROR_INVALID_ARGUMENT, nullptr);
    tandem_route_plan plan = TANDEM_ROUTE_PLAN_INIT;
    detail::call(tandem_plan, &plan, get(), layer_idx, kv_lens.data(), q_lens.empty() ? nullptr : q_lens.data(),
                 static_cast<int64_t>(kv_lens.size()));
    return plan;
  }
  struct PatternPairs {
    int64_t attended, dense;
  };
  PatternPairs pattern_pairs(int32_t layer_idx) const {
    PatternPairs pairs{0, 0};
    detail::call(tandem_session_pattern_pairs, &pairs.attended, &pairs.dense, get(), layer_idx);
    return pairs;
  }
  // Token indices that the next decode query of a KV head would attend.
  std::vector<int64_t> selection(int64_t sequence, int32_t layer_idx, int32_t kv_head_idx) {
    std::vector<int64_t> token_idx;
    int64_t n_kept = 0;
    do {
      token_idx.resize(static_cast<std::size_t>(n_kept));
      detail::call(tandem_session_selection, token_idx.data(), nullptr, static_cast<int64_t>(token_idx.size()), &n_kept,
                   get(), sequence, layer_idx, kv_head_idx, 0);
    } while (n_kept > static_cast<int64_t>(token_idx.size()));
    token_idx.resize(static_cast<std::size_t>(n_kept));
    return token_idx;
  }

 private:
  Session(Cache& cache, const tandem_session_options* options) { create(cache, options); }
  void create(Cache& cache, const tandem_session_options* options) {
    tandem_session* handle = nullptr;
    detail::call(tandem_session_create, &handle, cache.get(), options);
    handle_.reset(handle);
  }
  std::unique_ptr<tandem_session, detail::Release<tandem_session, tandem_session_release>> handle_;
};

// A step of a session. The constructor begins it. end() ends it and throws if that fails. The destructor ends it silently.
class Step {
 public:
  Step(Session& session, const std::vector<int64_t>& sequences, const std::vector<int64_t>& q_lens, void* stream = nullptr)
      : session_(session.get()), stream_(stream) {
    if (sequences.size() != q_lens.size()) throw Error(TANDEM_ERROR_INVALID_ARGUMENT, nullptr);
    detail::call(tandem_step_begin, session_, sequences.data(), q_lens.data(), detail::length(sequences.size()), stream_);
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() {
    if (session_ != nullptr) tandem_step_end(session_, stream_, nullptr);
  }
  void end() {
    tandem_session* session = session_;
    session_ = nullptr;
    detail::call(tandem_step_end, session, stream_);
  }

 private:
  tandem_session* session_;
  void* stream_;
};

// A model's weights, if the device has no room for all of them: tandem_weights_create().
class Weights {
 public:
  // Block i is n_bytes[i] bytes at data[i], which are copied.
  Weights(const Engine& engine, const std::vector<const void*>& data, const std::vector<int64_t>& n_bytes)
      : Weights(engine, data, n_bytes, nullptr) {}
  Weights(const Engine& engine, const std::vector<const void*>& data, const std::vector<int64_t>& n_bytes,
          const tandem_weights_options& options)
      : Weights(engine, data, n_bytes, &options) {}
  tandem_weights* get() const { return handle_.get(); }
  tandem_weights_stats stats() const {
    tandem_weights_stats stats = TANDEM_WEIGHTS_STATS_INIT;
    detail::call(tandem_weights_get_stats, &stats, get());
    return stats;
  }

 private:
  Weights(const Engine& engine, const std::vector<const void*>& data, const std::vector<int64_t>& n_bytes,
          const tandem_weights_options* options) {
    if (data.size() != n_bytes.size()) throw Error(TANDEM_ERROR_INVALID_ARGUMENT, nullptr);
    tandem_weights* handle = nullptr;
    detail::call(tandem_weights_create, &handle, engine.get(), data.data(), n_bytes.data(), detail::length(data.size()),
                 options);
    handle_.reset(handle);
  }
  std::unique_ptr<tandem_weights, detail::Release<tandem_weights, tandem_weights_release>> handle_;
};

inline void Session::use_weights(int32_t layer_idx, Weights& weights, int32_t w_k_block, int32_t w_v_block) {
  detail::call(tandem_session_use_weights, get(), layer_idx, weights.get(), w_k_block, w_v_block);
}

// A block that later work on the stream uses. done() ends the use and throws if that fails. The destructor ends it silently.
class Block {
 public:
  Block(Weights& weights, int32_t block_idx, void* stream = nullptr)
      : weights_(weights.get()), block_idx_(block_idx), stream_(stream) {
    detail::call(tandem_weights_use, &data_, weights_, block_idx_, stream_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (weights_ != nullptr) tandem_weights_done(weights_, block_idx_, stream_, nullptr);
  }
  const void* data() const { return data_; }  // in device memory
  void done() {
    tandem_weights* weights = weights_;
    weights_ = nullptr;
    detail::call(tandem_weights_done, weights, block_idx_, stream_);
  }

 private:
  tandem_weights* weights_;
  int32_t block_idx_;
  void* stream_;
  void* data_ = nullptr;
};

// Merges states over disjoint keys: tandem_merge().
inline void merge(const tandem_tensor& o_out, const tandem_tensor& lse_out, const std::vector<const tandem_tensor*>& o,
                  const std::vector<const tandem_tensor*>& lse, const Engine& engine, void* stream = nullptr) {
  if (o.size() != lse.size()) throw Error(TANDEM_ERROR_INVALID_ARGUMENT, nullptr);
  detail::call(tandem_merge, &o_out, &lse_out, o.data(), lse.data(), detail::length(o.size()), engine.get(), stream);
}

}  // namespace cpp
}  // namespace tandem

#include "tandem/saving.hpp"

#endif  // TANDEM_TANDEM_HPP_
