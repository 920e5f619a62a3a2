// SPDX-License-Identifier: MIT
// Runs a cache's life in small steps with the N-th allocation failing, for every N until no allocation fails.
//
// A failing step must return TANDEM_ERROR_OUT_OF_MEMORY, leave every sequence and output unchanged, and succeed when it is
// called again with enough memory. At the end the answers must equal those of a run without failures.
#pragma once

#include <algorithm>
#include <map>

#include "api_world.h"

namespace tandem_test {

// How memory fails: the scenario calls `arm` before each call and `disarm` after it.
struct Failures {
  std::function<void()> arm;
  std::function<void()> disarm;
};

class Scenario {
 public:
  // aliases: V aliases K in layer 1. Sessions on the stand-in refuse such layers.
  Scenario(const tandem_engine_options& options, bool is_long, bool aliases = true)
      : options_(options), layers_(world_layers()) {
    layers_[1].v_aliases_k = aliases;
    add_steps(is_long);
  }
  ~Scenario() {
    tandem_session_release(dense_);
    tandem_session_release(session_);
    tandem_cache_release(cache_);
    tandem_model_release(model_);
    tandem_engine_release(engine_);
  }
  Scenario(const Scenario&) = delete;

  // Returns the number of failed calls.
  int run(const Failures& failures) {
    int n_failed = 0;
    for (const Step& step : steps_) {
      const State before = state();
      tandem_error* error = nullptr;
      failures.arm();
      int32_t status = step.call(&error);
      failures.disarm();
      if (status != TANDEM_OK) {
        ++n_failed;
        const bool typed = status == TANDEM_ERROR_OUT_OF_MEMORY && tandem_error_status(error) == status &&
                           tandem_error_message(error)[0] != '\0';
        if (!typed) print_error("%s: %s\n", step.name, tandem_error_message(error));
        tandem_error_release(error);
        error = nullptr;
        assert_true(typed);
        if (!(before == state())) print_error("%s: the failing call has changed something\n", step.name);
        assert_true(before == state());
        status = step.call(&error);
        if (status != TANDEM_OK) print_error("%s: still failing\n", step.name);
      }
      expect_ok(status, error);
      keep_output();
    }
    return n_failed;
  }

  const std::vector<float>& answers() const { return answers_; }
  std::map<int64_t, uint64_t> digests() const { return state().digests; }
  size_t n_steps() const { return steps_.size(); }

 private:
  struct Step {
    const char* name;
    std::function<int32_t(tandem_error**)> call;
  };
  struct State {
    std::map<int64_t, uint64_t> digests;
    std::vector<int64_t> lengths;
    std::vector<float> output;
    const void* handles[5];
    bool operator==(const State& other) const {
      return digests == other.digests && lengths == other.lengths &&
             std::memcmp(output.data(), other.output.data(), output.size() * sizeof(float)) == 0 &&
             std::memcmp(handles, other.handles, sizeof handles) == 0;
    }
  };

  State state() const {
    State now;
    for (const int64_t id : {a_, b_}) {
      if (id == 0) continue;
      OK(tandem_sequence_digest, &now.digests[id], cache_, id);
      for (int32_t l = 0; l < kLayers; ++l) {
        now.lengths.push_back(0);
        OK(tandem_sequence_length, &now.lengths.back(), cache_, id, l);
      }
    }
    now.output = output_;
    const void* handles[] = {engine_, model_, cache_, session_, dense_};
    std::memcpy(now.handles, handles, sizeof handles);
    return now;
  }

  // Adds the output of a step to the answers and fills the buffer with the pattern again.
  void keep_output() {
    for (float& value : output_) {
      if (value != kPattern) answers_.push_back(value);
      value = kPattern;
    }
  }

  void add(const char* name, std::function<int32_t(tandem_error**)> call) { steps_.push_back({name, std::move(call)}); }

  tandem_tensor tensor(float* data, int64_t n_tokens, int64_t n_heads, int64_t head_dim) const {
    tandem_tensor t = {};
    t.struct_size = sizeof t;
    t.dtype = TANDEM_F32;
    t.data = data;
    t.n_dims = head_dim > 0 ? 3 : 2;
    t.shape[0] = n_tokens, t.shape[1] = n_heads, t.shape[2] = head_dim;
    t.stride[0] = n_heads * std::max<int64_t>(head_dim, 1), t.stride[1] = std::max<int64_t>(head_dim, 1);
    t.stride[2] = head_dim > 0 ? 1 : 0;
    return t;
  }

  // Prepares the tensors before the call, so that only the library allocates while memory fails.
  int32_t attend(const std::vector<int64_t>& ids, int64_t q_len, int32_t layer_idx, uint32_t flags, tandem_error** error) {
    const auto n = static_cast<int64_t>(ids.size()) * q_len;
    const int64_t lens[] = {q_len, q_len};
    const int32_t parents[] = {-1, 0, 0};  // two branches after the first token
    const tandem_tensor q = tensor(q_.data(), n, kQHeads, kDim), k = tensor(k_.data(), n, kKvHeads, kDim),
                        v = tensor(v_.data(), n, kKvHeads, kDim), o = tensor(output_.data(), n, kQHeads, kDim),
                        lse = tensor(output_.data() + kMaxRows * kQHeads * kDim, n, kQHeads, 0);
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.flags = flags;
    args.layer_idx = layer_idx;
    args.n_sequences = static_cast<int32_t>(ids.size());
    args.sequences = ids.data();
    args.q_lens = lens;
    args.q = &q;
    args.k = &k;
    args.v = given_v(layer_idx, v);
    args.o = &o;
    args.lse = &lse;
    args.parent_idx = (flags & TANDEM_ATTEND_SPECULATIVE) != 0 ? parents : nullptr;
    return tandem_attend(session_, &args, error);
  }

  void add_attend(const char* name, std::vector<int64_t*> ids, int64_t q_len, uint32_t flags = 0) {
    for (int32_t l = 0; l < kLayers; ++l)
      add(name, [=, this](tandem_error** e) {
        ids_.clear();
        for (const int64_t* id : ids) ids_.push_back(*id);
        return attend(ids_, q_len, l, flags, e);
      });
  }

  // Attends two queries of a sequence over keys that the caller names, in any order.
  void add_named() {
    add("tandem_session_create", [this](auto e) {
      tandem_session_options options = world_session_options();
      options.policy = "all";
      return tandem_session_create(&dense_, cache_, &options, e);
    });
    for (int32_t l = 0; l < kLayers; ++l)
      add("named keys", [=, this](tandem_error** e) {
        static const int32_t named[2][8] = {{9, 3, 21, 4, -1, 0, 5, 17}, {2, 1, 30, 16, 12, 8, -1, -1}};
        const int64_t q_len = 2;
        const tandem_tensor q = tensor(q_.data(), 2, kQHeads, kDim), o = tensor(output_.data(), 2, kQHeads, kDim);
        tandem_tensor idx = tensor(nullptr, 2, 1, 8);
        idx.dtype = TANDEM_I32;
        idx.data = const_cast<int32_t*>(named[0]);
        tandem_selection selection = TANDEM_SELECTION_INIT;
        selection.flags = TANDEM_SELECTION_ANY_ORDER | TANDEM_SELECTION_PLUS_WINDOW;
        selection.idx = &idx;
        tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
        args.layer_idx = l;
        args.n_sequences = 1;
        args.sequences = &a_;
        args.q_lens = &q_len;
        args.q = &q;
        args.o = &o;
        args.selection = &selection;
        return tandem_attend(dense_, &args, e);
      });
  }

  void add_steps(bool is_long);
  void add_objects();
  void add_saving();

  static constexpr int64_t kMaxRows = 48;
  static constexpr float kPattern = 12345.5f;
  const tandem_tensor* given_v(int32_t layer_idx, const tandem_tensor& v) const {
    return layers_[static_cast<size_t>(layer_idx)].v_aliases_k == 1 ? nullptr : &v;
  }

  tandem_engine_options options_;
  std::vector<tandem_layer_options> layers_;
  tandem_engine* engine_ = nullptr;
  tandem_model* model_ = nullptr;
  tandem_cache* cache_ = nullptr;
  tandem_session *session_ = nullptr, *dense_ = nullptr;
  int64_t a_ = 0, b_ = 0;
  std::vector<int64_t> ids_ = std::vector<int64_t>(8);
  std::vector<Step> steps_;
  std::vector<float> output_ = std::vector<float>(kMaxRows * kQHeads * (kDim + 1), kPattern);
  std::vector<float> answers_;
  std::vector<float> q_, k_, v_;
  std::vector<std::byte> saved_ = std::vector<std::byte>(size_t{1} << 20);
  size_t n_saved_ = 0, n_read_ = 0;
};

inline void Scenario::add_objects() {
  add("tandem_engine_create", [this](auto e) { return tandem_engine_create(&engine_, &options_, e); });
  add("tandem_model_create", [this](auto e) { return tandem_model_create(&model_, layers_.data(), kLayers, e); });
  add("tandem_cache_create", [this](auto e) {
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.page_tokens = 16;
    return tandem_cache_create(&cache_, engine_, model_, &options, e);
  });
  add("tandem_session_create", [this](auto e) {
    tandem_session_options options = world_session_options();
    options.window_tokens = 24;
    return tandem_session_create(&session_, cache_, &options, e);
  });
}

// Saves a_ and loads the copy. Later steps use the copy as a_.
inline void Scenario::add_saving() {
  add("tandem_sequence_save", [this](auto e) {
    tandem_save_options options = TANDEM_SAVE_OPTIONS_INIT;
    options.session = session_;
    n_saved_ = 0;
    const auto write = [](const void* data, int64_t n_bytes, void* user) {
      auto& self = *static_cast<Scenario*>(user);
      std::memcpy(self.saved_.data() + self.n_saved_, data, static_cast<size_t>(n_bytes));
      self.n_saved_ += static_cast<size_t>(n_bytes);
      return 0;
    };
    return tandem_sequence_save(cache_, a_, write, this, &options, e);
  });
  add("tandem_sequence_load", [this](auto e) {
    tandem_load_options options = TANDEM_LOAD_OPTIONS_INIT;
    options.session = session_;
    n_read_ = 0;
    const auto read = [](void* data, int64_t n_bytes, void* user) {
      auto& self = *static_cast<Scenario*>(user);
      const size_t n = std::min(static_cast<size_t>(n_bytes), self.n_saved_ - self.n_read_);
      std::memcpy(data, self.saved_.data() + self.n_read_, n);
      self.n_read_ += n;
      return static_cast<int64_t>(n);
    };
    return tandem_sequence_load(&a_, cache_, read, this, &options, e);
  });
}

inline void Scenario::add_steps(bool is_long) {
  const int64_t n = is_long ? 2100 : kMaxRows;
  for (int64_t i = 0; i < n * kQHeads * kDim; ++i) q_.push_back(3.0f * noise(i, 1));
  for (int64_t i = 0; i < n * kKvHeads * kDim; ++i) k_.push_back(noise(i, 2)), v_.push_back(noise(i, 3));
  add_objects();
  add("tandem_sequence_create", [this](auto e) { return tandem_sequence_create(&a_, cache_, e); });
  add_attend("prompt", {&a_}, 40);
  for (int i = 0; i < 5; ++i) add_attend("decode", {&a_}, 1);
  add_attend("append", {&a_}, 9);
  add("tandem_sequence_fork", [this](auto e) { return tandem_sequence_fork(&b_, cache_, a_, e); });
  for (int32_t l = 0; l < kLayers; ++l)
    add("tandem_sequence_append", [=, this](auto e) {
      const int64_t n_tokens = is_long ? 2100 : 20;
      const tandem_tensor k = tensor(k_.data(), n_tokens, kKvHeads, kDim), v = tensor(v_.data(), n_tokens, kKvHeads, kDim);
      return tandem_sequence_append(cache_, b_, l, &k, given_v(l, v), nullptr, e);
    });
  add_attend("two sequences", {&b_, &a_}, 1);
  add_saving();
  add("tandem_sequence_reserve", [=, this](auto e) { return tandem_sequence_reserve(cache_, a_, is_long ? 5000 : 50, e); });
  add("tandem_step_begin", [this](auto e) {
    static const int64_t lens[] = {2, 2};
    ids_.assign({a_, b_});
    return tandem_step_begin(session_, ids_.data(), lens, 2, nullptr, e);
  });
  add_attend("in a step", {&a_, &b_}, 2);
  add("tandem_step_end", [this](auto e) { return tandem_step_end(session_, nullptr, e); });
  add_attend("speculative", {&a_}, 3, TANDEM_ATTEND_SPECULATIVE);
  add("tandem_session_commit", [this](auto e) {
    static const int64_t kept[] = {0, 2};
    return tandem_session_commit(session_, a_, kept, 2, e);
  });
  add("tandem_sequence_remove", [this](auto e) { return tandem_sequence_remove(cache_, a_, 7, 5, 0, e); });
  add("tandem_sequence_truncate", [this](auto e) { return tandem_sequence_truncate(cache_, b_, 50, e); });
  for (int i = 0; i < 3; ++i) add_attend("decode", {&b_, &a_}, 1);
  add_named();
  add("tandem_session_selection", [this](auto e) {
    int64_t idx[64], n_kept = 0;
    const int32_t status = tandem_session_selection(idx, nullptr, 64, &n_kept, session_, a_, 0, 1, 0, e);
    if (status == TANDEM_OK) output_[0] = static_cast<float>(n_kept);
    return status;
  });
  add("tandem_merge", [this](auto e) {
    const tandem_tensor o = tensor(output_.data(), 2, 2, kDim), lse = tensor(output_.data() + 1024, 2, 2, 0),
                        q = tensor(q_.data(), 2, 2, kDim), k = tensor(k_.data(), 2, 2, kDim), l = tensor(v_.data(), 2, 2, 0);
    const tandem_tensor* const os[] = {&q, &k};
    const tandem_tensor* const lses[] = {&l, &l};
    return tandem_merge(&o, &lse, os, lses, 2, engine_, nullptr, e);
  });
  add("tandem_supports", [this](auto e) { return tandem_supports(engine_, nullptr, nullptr, nullptr, e); });
  add("tandem_plan_memory", [this](auto e) {
    static const int64_t lens[] = {100, 200};
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    return tandem_plan_memory(&plan, engine_, model_, nullptr, nullptr, lens, 2, e);
  });
  add("tandem_engine_report", [this](auto e) {
    char text[16];
    return tandem_engine_report(text, sizeof text, nullptr, engine_, e);
  });
  add("tandem_engine_drain", [this](auto e) { return tandem_engine_drain(engine_, -1, e); });
}

inline void expect_same_answers(const Scenario& wanted, const Scenario& got) {
  assert_true(wanted.digests() == got.digests());
  assert_int_equal(wanted.answers().size(), got.answers().size());
  for (size_t i = 0; i < wanted.answers().size(); ++i) {
    const float want = wanted.answers()[i], have = got.answers()[i];
    if (!(std::fabs(want - have) <= 1e-4f * (1.0f + std::fabs(want)))) {
      print_error("answer %zu: %.9g, not %.9g\n", i, static_cast<double>(have), static_cast<double>(want));
      assert_true(false);
    }
  }
}

}  // namespace tandem_test
