// SPDX-License-Identifier: MIT
// Memory plans of random models, sessions and sequences on the stand-in. The session attends the sequences, each in a call
// of its own and all in one. Then it must hold exactly the planned memory, and never have held more. With "auto" it may hold
// less where the CPU is faster. Other tests check what the calls compute.
#include <chrono>
#include <cstdlib>
#include <thread>

#include "device/device_side.h"
#include "one_in.h"
#include "reference/random.h"

using namespace tandem_test;

namespace {

constexpr int32_t kHidden = 64;

tandem_engine* engine = nullptr;
bool is_full = false;

// One random case, as options of the ABI.
struct Drawn {
  reference::Random random;
  std::vector<tandem_layer_options> layers;
  std::vector<float> learned = std::vector<float>(64, 0.5f);
  std::vector<uint16_t> weights = std::vector<uint16_t>(4 * 96 * kHidden, 0);
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
  std::vector<uint8_t> streaming_heads;
  std::vector<const char*> layer_policies;
  std::vector<int64_t> lengths;
  std::string route = "auto";

  explicit Drawn(uint64_t seed) : random(seed) {
    const char* policy = random.pick({"all", "all", "all", "streaming", "hgca"});
    if (*policy == 'a') route = random.pick({"auto", "host", "stream", "stream", "host+stream", "recompute", "recompute"});
    if (*policy == 'h') route = random.pick({"auto", "host", "stream", "stream", "host+stream"});
    draw_layers();
    draw_session(policy);
    const bool is_long = route == "auto" && random.chance(0.4);  // long enough for keys to be worth streaming
    lengths.resize(static_cast<size_t>(is_long ? 1 : random.pick({1, 1, 2, 3, 5, 20})));
    const int64_t most = is_long ? 12'000 : lengths.size() > 5 ? 100 : random.pick({5, 100, 400, 1200});
    for (int64_t& length : lengths) length = is_long ? most - random.integer(0, 2000) : random.integer(1, most);
    if (is_long || lengths.size() > 5) session.append_tokens = std::min<int64_t>(session.append_tokens, 3);
    if (seed % 2 == 0) prune();
    if (route != "stream" || random.chance(0.5)) return;
    session.append_tokens = random.pick<int64_t>({0, 520, 700});  // a long append, in a chunk of its own
    lengths.assign(static_cast<size_t>(random.integer(1, 2)), 0);
    for (int64_t& length : lengths) length = random.integer(700, 1500);
  }

  void draw_layers() {
    const bool rotates = route != "recompute" && (route == "auto" || route == "host") && random.chance(0.3);
    projection.hidden_dim = kHidden;
    projection.w_type = TANDEM_BF16;
    projection.norm = random.pick({TANDEM_NORM_NONE, TANDEM_NORM_LAYER});
    projection.k_rope = random.pick({TANDEM_ROPE_CALLER, TANDEM_ROPE_HALVES});
    projection.w_k = projection.w_v = weights.data();
    layers.resize(static_cast<size_t>(random.integer(1, 3)), TANDEM_LAYER_OPTIONS_INIT);
    for (tandem_layer_options& layer : layers) {
      layer.n_kv_heads = random.pick({1, 2, 2, 4});
      layer.n_q_heads = layer.n_kv_heads * random.pick({1, 2, 3});
      layer.k_head_dim = random.pick({64, 96});
      if (random.chance(0.3)) layer.sliding_window_tokens = random.pick({10, 100, 700});
      if (random.chance(0.2)) layer.sinks = learned.data();
      if (rotates) layer.rope = TANDEM_ROPE_HALVES;
      if (route == "recompute") layer.projection = &projection;
    }
    cache.k_type = random.pick({TANDEM_F32, TANDEM_BF16, TANDEM_F16, TANDEM_E4M3});
    cache.page_tokens = random.pick({16, 32, 64});
    if (route == "recompute") cache.x_type = random.pick({TANDEM_BF16, TANDEM_Q8_0});
  }

  void draw_session(const char* policy) {
    session.policy = policy;
    session.route = route.c_str();
    session.window_tokens = random.pick<int64_t>({0, 1, 20, 64, 300});
    session.sink_tokens = random.pick<int64_t>({0, 4, 20});
    if (route == "host+stream") session.stream_fraction = random.pick({0.0, 0.5, 1.0});
    if (route == "recompute") session.recompute_share = random.pick({0.3, 1.0});
    session.stream_buffer_bytes = random.pick<int64_t>({1 << 16, 100'000, 1 << 18, 1 << 20});
    session.append_tokens = random.pick<int64_t>({0, 0, 1, 3, 40, 300, 600});
    session.stream_heads = random.pick({0, 0, 1, 2});
    if (route != "recompute" && random.chance(0.3)) {
      for (size_t l = 0; l < layers.size(); ++l) layer_policies.push_back(random.pick({"all", "hgca", "streaming"}));
      if (route != "auto" && route != "host") layer_policies[0] = "all";  // so that something is streamed
      session.layer_policies = layer_policies.data();
      session.n_layer_policies = static_cast<int64_t>(layers.size());
      return;
    }
    if (*policy != 'a' || route == "recompute" || random.chance(0.7)) return;
    for (const tandem_layer_options& layer : layers)
      for (int32_t h = 0; h < layer.n_kv_heads; ++h)
        streaming_heads.push_back(layer.sliding_window_tokens == 0 && random.chance(0.5) ? 1 : 0);
    session.streaming_heads = streaming_heads.data();
    session.n_streaming_heads = static_cast<int64_t>(streaming_heads.size());
  }

  // Makes some of the sessions that attend all keys prune them. Their windows have room for all tokens and for those of a
  // step.
  void prune() {
    const bool takes_host = route == "auto" || route == "host";
    if (!takes_host || std::strcmp(session.policy, "all") != 0 || !streaming_heads.empty() || !layer_policies.empty())
      return;
    session.policy = "hip";
    for (int64_t& length : lengths) length -= length > 1 && length % 128 == 0 ? 1 : 0;  // a step takes no page of its own
    session.window_tokens = *std::max_element(lengths.begin(), lengths.end()) + 2;
  }

  int64_t appended(size_t i) const { return std::min(lengths[i], std::max<int64_t>(1, session.append_tokens)); }
};

std::string describe(uint64_t seed, const Drawn& of) {
  std::string text = "seed " + std::to_string(seed) + ", " + of.session.policy + ", " + of.route + ", window " +
                     std::to_string(of.session.window_tokens) + ", append " + std::to_string(of.session.append_tokens) +
                     ", heads " + std::to_string(of.streaming_heads.size()) + ", lengths";
  for (const int64_t length : of.lengths) text += " " + std::to_string(length);
  for (const char* policy : of.layer_policies) text += std::string(", ") + policy;
  for (const tandem_layer_options& layer : of.layers) text += ", sliding " + std::to_string(layer.sliding_window_tokens);
  return text;
}

// The cache, session and sequences of a case.
class Held {
 public:
  Held(Drawn& of, tandem_model* model) : of_(of) {
    OK(tandem_cache_create, &cache_, engine, model, &of.cache);
    OK(tandem_session_create, &session_, cache_, &of.session);
  }
  ~Held() {
    for (void* data : memory_) device->release(data);
    tandem_session_release(session_);
    tandem_cache_release(cache_);
    // A session may end on another thread.
    for (int i = 0; controls.shared_bytes() > 0 && i < 30'000; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Held(const Held&) = delete;

  // Makes the sequences without the tokens that calls append.
  void make_sequences() {
    ids_.resize(of_.lengths.size());
    for (size_t i = 0; i < ids_.size(); ++i) {
      OK(tandem_sequence_create, &ids_[i], cache_);
      const int64_t n = of_.lengths[i] - of_.appended(i);
      for (int32_t l = 0; n > 0 && l < std::ssize(of_.layers); ++l) {
        const tandem_layer_options& layer = of_.layers[static_cast<size_t>(l)];
        const Tensor k({n, layer.n_kv_heads, layer.k_head_dim}), x({n, kHidden});
        if (of_.cache.x_type != 0)
          OK(tandem_sequence_append_x, cache_, ids_[i], l, &k.view, &k.view, &x.view, nullptr);
        else
          OK(tandem_sequence_append, cache_, ids_[i], l, &k.view, &k.view, nullptr);
      }
    }
  }
  void drop_sequences() {
    for (const int64_t id : ids_) OK(tandem_sequence_drop, cache_, id);
  }
  // Attends sequences [first, first + n) in every layer.
  void attend(size_t first, size_t n, int64_t q_len = 0, void* stream = nullptr) {
    int64_t n_tokens = 0;
    std::vector<int64_t> q_lens;
    for (size_t i = first; i < first + n; ++i) q_lens.push_back(q_len > 0 ? q_len : of_.appended(i));
    for (const int64_t one : q_lens) n_tokens += one;
    for (int32_t l = 0; l < std::ssize(of_.layers); ++l) {
      const tandem_layer_options& layer = of_.layers[static_cast<size_t>(l)];
      const tandem_tensor q = on_device({n_tokens, layer.n_q_heads, layer.k_head_dim}),
                          o = on_device({n_tokens, layer.n_q_heads, layer.k_head_dim}),
                          k = on_device({n_tokens, layer.n_kv_heads, layer.k_head_dim}), x = on_device({n_tokens, kHidden});
      tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
      args.layer_idx = l;
      args.n_sequences = static_cast<int32_t>(n);
      args.sequences = ids_.data() + first;
      args.q_lens = q_lens.data();
      args.q = &q;
      args.k = args.v = &k;
      args.o = &o;
      if (of_.cache.x_type != 0) args.x = &x;
      args.stream = stream;
      OK(tandem_attend, session_, &args);
    }
    device->wait();
  }
  // Makes a planned step of one token of each sequence.
  void step() {
    const std::vector<int64_t> q_lens(ids_.size(), 1);
    void* stream = controls.create_stream();
    OK(tandem_step_begin, session_, ids_.data(), q_lens.data(), static_cast<int32_t>(ids_.size()), stream);
    attend(0, ids_.size(), 1, stream);
    OK(tandem_step_end, session_, stream);
    tandem_session_stats done = TANDEM_SESSION_STATS_INIT;
    OK(tandem_session_get_stats, &done, session_);
    assert_true(controls.destroy_stream(stream));
  }

  // is_all: the cache must not hold less, either.
  void compare(const tandem_memory_plan& plan, bool is_all, const std::string& where) const {
    constexpr int64_t kStaging = 2 * (int64_t{16} << 20);  // pinned host memory for filling windows
    tandem_cache_stats held = TANDEM_CACHE_STATS_INIT;
    OK(tandem_cache_get_stats, &held, cache_);
    const struct {
      const char* name;
      int64_t held, planned;
    } all[] = {{"windows", held.device_window_bytes, plan.device_window_bytes},
               {"work", held.device_work_bytes, plan.device_work_bytes},
               {"stream", held.device_stream_bytes, plan.device_stream_bytes},
               {"weights", held.device_weights_bytes, plan.device_weights_bytes},
               {"shared", controls.shared_bytes() + kStaging, plan.shared_bytes}};
    for (const auto& one : all)
      if (one.held > one.planned || (is_all && one.held != one.planned))
        fail_msg("%s: %s: %lld bytes are held, %lld were planned", where.c_str(), one.name, static_cast<long long>(one.held),
                 static_cast<long long>(one.planned));
  }

 private:
  tandem_tensor on_device(const std::vector<int64_t>& shape) {
    std::vector<float> zeros;
    int64_t n = 1;
    for (const int64_t length : shape) n *= length;
    zeros.resize(static_cast<size_t>(n), 0.0f);
    tandem_tensor view = {};
    memory_.push_back(device->allocate(4 * n));
    device->upload(memory_.back(), zeros.data(), 4 * n);
    OK(tandem_tensor_init, &view, TANDEM_F32, memory_.back(), static_cast<int32_t>(shape.size()), shape.data());
    view.device_type = TANDEM_DEVICE_CUDA;
    return view;
  }

  Drawn& of_;
  tandem_cache* cache_ = nullptr;
  tandem_session* session_ = nullptr;
  std::vector<int64_t> ids_;
  std::vector<void*> memory_;
};

// The properties of a trial, for the sums at the end.
struct Seen {
  int n_streamed = 0, n_rebuilt = 0, n_long = 0, n_steps = 0, n_pruned = 0;
};

void run_trial(uint64_t seed, Seen* seen) {
  Drawn of(seed);
  const std::string where = describe(seed, of);
  tandem_model* model = nullptr;
  OK(tandem_model_create, &model, of.layers.data(), static_cast<int32_t>(of.layers.size()));
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  OK(tandem_plan_memory, &plan, engine, model, &of.cache, &of.session, of.lengths.data(),
     static_cast<int64_t>(of.lengths.size()));
  {
    Held held(of, model);
    held.make_sequences();
    for (size_t i = 0; i < of.lengths.size(); ++i) {
      held.attend(i, 1);
      held.compare(plan, false, where + ", sequence " + std::to_string(i));
    }
    held.drop_sequences();
    held.make_sequences();
    held.attend(0, of.lengths.size());
    held.compare(plan, of.route != "auto" || plan.device_stream_bytes == 0, where + ", all");
    if (of.route == "host" || of.route == "auto") {
      held.step();
      held.compare(plan, of.route == "host", where + ", a step");
      ++seen->n_steps;
    }
  }
  seen->n_streamed += plan.device_stream_bytes > 0;
  seen->n_pruned += std::strcmp(of.session.policy, "hip") == 0;
  seen->n_rebuilt += plan.device_weights_bytes > 0;
  seen->n_long += plan.device_stream_bytes > 0 && of.route == "stream" && of.appended(0) > 512;
  tandem_model_release(model);
}

void holds_what_is_planned(void**) {
  const char* only = std::getenv("TANDEM_TEST_SEED");
  const int64_t n_trials = only != nullptr ? 1 : tandem::test::some_of(is_full ? 800 : 50);
  Seen seen;
  for (int64_t i = 0; i < n_trials; ++i)
    run_trial(only != nullptr ? std::strtoull(only, nullptr, 10) : 700'001 + static_cast<uint64_t>(i), &seen);
  print_message("%lld trials; %d streamed keys, %d rebuilt some, %d had long appends, %d had steps, %d were pruned\n",
                static_cast<long long>(n_trials), seen.n_streamed, seen.n_rebuilt, seen.n_long, seen.n_steps, seen.n_pruned);
  if (n_trials < 50) return;
  assert_true(seen.n_streamed > 0 && seen.n_rebuilt > 0 && seen.n_long > 0 && seen.n_steps > 0 && seen.n_pruned > 0);
}

int set_up(void** state) {
  is_full = std::getenv("TANDEM_TEST_FULL") != nullptr;
  open_stand_in(state);
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = 2;
  options.backend = stand_in::kName;
  options.backend_path = STAND_IN_MODULES "/libtandem-standin.so";
  engine = make_engine(options);
  return 0;
}

int tear_down(void** state) {
  tandem_engine_release(engine);
  return close_stand_in(state);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test_teardown(holds_what_is_planned, forget)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
