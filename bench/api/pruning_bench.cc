// SPDX-License-Identifier: MIT
// Decode under policy "hip" on the CPU: whole calls of tandem_attend() with one token, in layers of 32 query heads over 8 KV
// heads of 128, K and V in bf16. Compared with policy "all" and with the memory's speed.
//
//   bytes    K, V and bounds that the call reads, from the session's statistics
//   limit    the time for reading these bytes at the speed at which as many threads read memory in this run
//            (tools/bench/read_bandwidth.h)
//   call     median over decode steps of the mean over layers. "due": steps in which all stages run; "cached": steps in
//            which no stage runs; "mean": over whole schedules of refresh intervals
//
// Queries are noise, new for each token and layer, so that lists change. First the bench checks that a record that keeps
// everything gives the answers of "all".
//
//   pruning_bench [threads] [tokens] [pruning,pruning...] [layers] [steps]
//
// threads: 2 by default. pruning: a preset of pruning.h, or all. Not a test.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bench/cpu/bench_clock.h"
#include "tandem/tandem.h"
#include "tools/bench/read_bandwidth.h"

namespace tandem::test {
namespace {

constexpr int32_t kQHeads = 32, kKvHeads = 8, kDim = 128;

void check(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) return;
  std::fprintf(stderr, "%s\n", tandem_error_message(error));
  std::exit(1);
}
#define CHECKED(function, ...)                          \
  do {                                                  \
    tandem_error* error = nullptr;                      \
    const int32_t code = function(__VA_ARGS__, &error); \
    check(code, error);                                 \
  } while (0)

struct Noise {
  uint64_t state;
  float next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<float>(static_cast<double>(state >> 40) / (1 << 23) - 1.0);
  }
};

struct Settings {
  int32_t n_threads = 2, n_layers = 2;
  int64_t n_tokens = 131072, n_steps = 0;
  std::vector<std::string> prunings{"3k", "small"};
};

tandem_tensor tensor(std::vector<float>& rows, int64_t n, int64_t n_heads) {
  const int64_t shape[3] = {n, n_heads, kDim};
  tandem_tensor view;
  CHECKED(tandem_tensor_init, &view, TANDEM_F32, rows.data(), 3, shape);
  return view;
}

struct World {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  int64_t filled = 0;  // the sequence that has the prompt

  explicit World(const Settings& settings) {
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = settings.n_threads;
    CHECKED(tandem_engine_create, &engine, &options);
    std::vector<tandem_layer_options> layers(static_cast<size_t>(settings.n_layers), TANDEM_LAYER_OPTIONS_INIT);
    for (tandem_layer_options& layer : layers)
      layer.n_q_heads = kQHeads, layer.n_kv_heads = kKvHeads, layer.k_head_dim = kDim;
    CHECKED(tandem_model_create, &model, layers.data(), settings.n_layers);
    const tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    CHECKED(tandem_cache_create, &cache, engine, model, &cache_options);
    CHECKED(tandem_sequence_create, &filled, cache);
    fill(settings);
  }
  ~World() {
    tandem_cache_release(cache);
    tandem_model_release(model);
    tandem_engine_release(engine);
  }

  void fill(const Settings& settings) const {
    constexpr int64_t kAtOnce = 4096;
    Noise noise{88172645463325252u};
    std::vector<float> k(kAtOnce * kKvHeads * kDim), v(k.size());
    for (int64_t first = 0; first < settings.n_tokens; first += kAtOnce) {
      const int64_t n = std::min(kAtOnce, settings.n_tokens - first);
      for (int32_t layer = 0; layer < settings.n_layers; ++layer) {
        for (float& x : k) x = noise.next();
        for (float& x : v) x = noise.next();
        const tandem_tensor k_view = tensor(k, n, kKvHeads), v_view = tensor(v, n, kKvHeads);
        CHECKED(tandem_sequence_append, cache, filled, layer, &k_view, &v_view, nullptr);
      }
    }
  }
};

struct Step {
  double ns = 0;  // for a layer
  int64_t bytes = 0, judged = 0, n_refreshes = 0;
};

class Decoder {
 public:
  Decoder(const World& world, const Settings& settings, const char* policy, const tandem_pruning* pruning)
      : world_(world), settings_(settings) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = policy;
    options.pruning = pruning;
    CHECKED(tandem_session_create, &session_, world.cache, &options);
    CHECKED(tandem_sequence_fork, &sequence_, world.cache, world.filled);
  }
  ~Decoder() {
    CHECKED(tandem_sequence_drop, world_.cache, sequence_);
    tandem_session_release(session_);
  }
  Decoder(const Decoder&) = delete;

  Step step() {
    tandem_session_stats before = TANDEM_SESSION_STATS_INIT, after = TANDEM_SESSION_STATS_INIT;
    CHECKED(tandem_session_get_stats, &before, session_);
    Step made;
    for (int32_t layer = 0; layer < settings_.n_layers; ++layer) made.ns += attend(layer) / settings_.n_layers;
    CHECKED(tandem_session_get_stats, &after, session_);
    made.judged = after.judged_kv_bytes - before.judged_kv_bytes;
    made.bytes = made.judged + after.resident_kv_bytes_read - before.resident_kv_bytes_read + after.host_kv_bytes_read -
                 before.host_kv_bytes_read;
    made.n_refreshes = after.n_refreshes - before.n_refreshes;
    made.bytes /= settings_.n_layers;
    made.judged /= settings_.n_layers;
    return made;
  }
  const std::vector<float>& o() const { return o_; }

 private:
  double attend(int32_t layer) {
    for (float& x : q_) x = noise_.next();
    for (float& x : k_) x = noise_.next();
    for (float& x : v_) x = noise_.next();
    tandem_tensor q = tensor(q_, 1, kQHeads), k = tensor(k_, 1, kKvHeads), v = tensor(v_, 1, kKvHeads),
                  o = tensor(o_, 1, kQHeads);
    const int64_t q_len = 1;
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = layer;
    args.n_sequences = 1;
    args.sequences = &sequence_;
    args.q_lens = &q_len;
    args.q = &q, args.k = &k, args.v = &v, args.o = &o;
    const double begin = now_ns();
    CHECKED(tandem_attend, session_, &args);
    return now_ns() - begin;
  }

  const World& world_;
  const Settings& settings_;
  tandem_session* session_ = nullptr;
  int64_t sequence_ = 0;
  Noise noise_{362436069};
  std::vector<float> q_ = std::vector<float>(kQHeads * kDim), o_ = q_, k_ = std::vector<float>(kKvHeads * kDim), v_ = k_;
};

// Returns bytes per nanosecond, the best of some passes.
double read_rate(const Settings& settings) {
  constexpr int64_t kRead = int64_t{1} << 30;
  tools::PinnedTeam team(settings.n_threads);
  std::unique_ptr<tools::ReadBandwidth> read;
  if (!tools::ReadBandwidth::create(&team, kRead, &read).ok()) std::exit(1);
  double best = 0;
  for (int i = 0; i < 5; ++i) best = std::max(best, read->measure());
  return best;
}

void check_answers(const World& world, const Settings& settings) {
  tandem_pruning_stage stage = TANDEM_PRUNING_STAGE_INIT;
  stage.judge = TANDEM_JUDGE_EXACT, stage.chunk_tokens = 8, stage.keep_tokens = int64_t{1} << 30;
  tandem_pruning_record record = TANDEM_PRUNING_RECORD_INIT;
  record.stages = &stage, record.n_stages = 1;
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  pruning.decode = pruning.append = &record, pruning.n_decode = pruning.n_append = 1;
  Decoder all(world, settings, "all", nullptr), kept(world, settings, "hip", &pruning);
  all.step(), kept.step();
  for (size_t i = 0; i < all.o().size(); ++i)
    if (!(std::fabs(all.o()[i] - kept.o()[i]) <= 1e-5f)) std::fprintf(stderr, "answers differ\n"), std::exit(1);
}

double mean_ns(const std::vector<Step>& steps, bool (*counts)(const Step&, int64_t), int64_t most) {
  std::vector<double> ns;
  for (const Step& step : steps)
    if (counts(step, most)) ns.push_back(step.ns);
  return ns.empty() ? NAN : median(ns);
}

void print_row(const char* name, double ns, double bytes, double rate) {
  std::printf("| %s | %.0f | %.2f | %.0f | %.2f |\n", name, ns / 1e3, bytes / 1e6, bytes / rate / 1e3, ns / (bytes / rate));
  std::fflush(stdout);
}

void measure(const World& world, const Settings& settings, const std::string& name, double rate) {
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  pruning.preset = name.c_str();
  const bool prunes = name != "all";
  Decoder decoder(world, settings, prunes ? "hip" : "all", prunes ? &pruning : nullptr);
  const int64_t n_steps = settings.n_steps > 0 ? settings.n_steps : prunes ? 97 : 5;
  std::vector<Step> steps;
  decoder.step();  // computes bounds and takes work space
  for (int64_t i = 1; i < n_steps; ++i) steps.push_back(decoder.step());
  double ns = 0, bytes = 0;
  int64_t most = 0;
  for (const Step& step : steps) {
    ns += step.ns / static_cast<double>(steps.size());
    bytes += static_cast<double>(step.bytes) / static_cast<double>(steps.size());
    most = std::max(most, step.n_refreshes);
  }
  if (!prunes) return print_row("all", ns, bytes, rate);
  const auto bytes_where = [&](int64_t n_refreshes) -> double {
    for (const Step& step : steps)
      if (step.n_refreshes == n_refreshes) return static_cast<double>(step.bytes);
    return NAN;
  };
  print_row((name + ", mean").c_str(), ns, bytes, rate);
  print_row((name + ", due").c_str(),
            mean_ns(
                steps, [](const Step& step, int64_t n) { return step.n_refreshes == n; }, most),
            bytes_where(most), rate);
  print_row((name + ", cached").c_str(),
            mean_ns(
                steps, [](const Step& step, int64_t) { return step.n_refreshes == 0; }, 0),
            bytes_where(0), rate);
}

int run(const Settings& settings) {
  const World world(settings);
  check_answers(world, settings);
  const double rate = read_rate(settings);
  std::printf(
      "%lld tokens, %d layers, read limit %.1f GB/s\n\n| | us a layer | MB | limit, us | call / limit "
      "|\n|---|---|---|---|---|\n",
      static_cast<long long>(settings.n_tokens), settings.n_layers, rate);
  if (settings.n_steps != 1)
    for (const std::string& name : settings.prunings) measure(world, settings, name, rate);
  return 0;
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  tandem::test::Settings settings;
  if (argc > 1) settings.n_threads = std::atoi(argv[1]);
  if (argc > 2) settings.n_tokens = std::atoll(argv[2]);
  if (argc > 3) {
    settings.prunings.clear();
    const std::string names = std::string(argv[3]) + ",";
    for (size_t first = 0; first < names.size(); first = names.find(',', first) + 1)
      settings.prunings.push_back(names.substr(first, names.find(',', first) - first));
  }
  if (argc > 4) settings.n_layers = std::atoi(argv[4]);
  if (argc > 5) settings.n_steps = std::atoll(argv[5]);
  return tandem::test::run(settings);
}
