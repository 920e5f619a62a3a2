// SPDX-License-Identifier: MIT
// Measures how much selecting keys slows the decode steps around it: policy hgca, 32 query heads over 8 KV heads of 128,
// bf16.
//
// A sequence of random keys is decoded step by step. A step is one attend per layer with nothing in between. So a background
// refresh finds only those cores idle that the steps leave idle. Phases:
//
//   dense          policy all
//   page           window 4,096, pages of 16: every sixteenth step evicts a page in each layer
//   token          window 15: every step evicts a token in each layer
//   append 32, 512 appends that many tokens at once; then all keys outside the window are judged anew
//
// The bench times the step that needs what the step or append before it has posted: its total time and its waiting time,
// from the session's statistics. Reading these waits too, so they are read before and after such a pair, never in between.
// For appends it also prints their own time, and the rate of re-evaluation, as bytes of K, beside the rate of the dense scan
// (K and V).
//
// First the bench compares one layer's answers after an append with attention in double precision over the keys that the
// session reports as attended. If they differ, it prints no times. Not a test.
//
//   refresh_bench [threads] [keys] [layers] [rounds] [phase]
//
// rounds 0: only the check. phase: "page", "token", "append 32" or "append 512"; runs that one and the dense scan.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/cpu/bench_clock.h"
#include "tandem/tandem.hpp"

namespace {

using tandem::test::median;
using tandem::test::now_ns;

constexpr int64_t kHeads = 8, kGroup = 4, kDim = 128, kQHeads = kHeads * kGroup, kKeyRow = kHeads * kDim;
constexpr int64_t kQueryRow = kQHeads * kDim, kChunk = 2048, kPage = 16;
constexpr double kTokenBytes = 2.0 * 2.0 * kKeyRow;  // K and V of a layer

struct Settings {
  int32_t n_threads = 0;
  int64_t n_keys = 131072;
  int32_t n_layers = 4;
  int n_rounds = 20;
  std::string only;  // name of a phase
};

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

// One engine and one sequence, which several sessions use one after the other.
class World {
 public:
  explicit World(const Settings& settings);
  void reset() { cache_.truncate(sequence_, n_keys_); }
  tandem::Session open(const char* policy, int64_t window);
  double step(tandem::Session& session, int64_t n_tokens);  // in all layers; returns ns
  bool check(tandem::Session& session);
  int64_t length() const { return cache_.length(sequence_); }
  int32_t n_layers() const { return n_layers_; }

 private:
  void draw(int64_t n_tokens, std::vector<float>* rows, int64_t row_len);
  void draw_queries(int64_t n_tokens);
  std::string check_head(tandem::Session& session, int32_t kv_head);

  int64_t n_keys_;
  int32_t n_layers_;
  tandem::Engine engine_;
  tandem::Model model_;
  tandem::Cache cache_;
  int64_t sequence_;
  uint64_t n_drawn_ = 0;
  std::vector<float> noise_, q_, o_, k_, v_;
};

tandem_engine_options engine_options(const Settings& settings) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = settings.n_threads;
  return options;
}

std::vector<tandem_layer_options> layer_options(int32_t n_layers) {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = kQHeads, layer.n_kv_heads = kHeads, layer.k_head_dim = kDim;
  return std::vector<tandem_layer_options>(static_cast<size_t>(n_layers), layer);
}

tandem_cache_options cache_options() {
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  options.page_tokens = kPage;
  return options;
}

World::World(const Settings& settings)
    : n_keys_(settings.n_keys),
      n_layers_(settings.n_layers),
      engine_(engine_options(settings)),
      model_(layer_options(settings.n_layers)),
      cache_(engine_, model_, cache_options()),
      sequence_(cache_.create_sequence()),
      noise_(1 << 20) {
  // Each number is the sum of four uniform numbers, with variance 1.
  for (size_t i = 0; i < noise_.size(); ++i) {
    float sum = 0.0f;
    for (uint64_t part = 0; part < 4; ++part) sum += static_cast<float>(mix(4 * i + part + 1) >> 40) / 16777216.0f - 0.5f;
    noise_[i] = sum * 1.7320508f;
  }
  for (int64_t t = 0; t < n_keys_; t += kChunk) {
    const int64_t n = std::min(kChunk, n_keys_ - t);
    for (int32_t l = 0; l < n_layers_; ++l) {
      draw(n, &k_, kKeyRow);
      draw(n, &v_, kKeyRow);
      const tandem_tensor k = tandem::tensor(k_.data(), {n, kHeads, kDim}), v = tandem::tensor(v_.data(), {n, kHeads, kDim});
      cache_.append(sequence_, l, &k, &v);
    }
  }
}

// Takes the noise of each head and token from another place.
void World::draw(int64_t n_tokens, std::vector<float>* rows, int64_t row_len) {
  rows->resize(static_cast<size_t>(n_tokens * row_len));
  for (int64_t at = 0; at < n_tokens * row_len; at += kDim)
    std::copy_n(noise_.data() + mix(++n_drawn_) % (noise_.size() - kDim), kDim, rows->data() + at);
}

// Draws queries in one direction for each head, with noise. Logits then have a deviation of 4, so few keys have most of the
// weight, and remain the same for a while.
void World::draw_queries(int64_t n_tokens) {
  draw(n_tokens, &q_, kQueryRow);
  for (int64_t t = 0; t < n_tokens; ++t)
    for (int64_t i = 0; i < kQueryRow; ++i) {
      float& q = q_[static_cast<size_t>(t * kQueryRow + i)];
      q = 3.6f * noise_[static_cast<size_t>(i)] + 1.7f * q;
    }
  o_.resize(q_.size());
}

tandem::Session World::open(const char* policy, int64_t window) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.window_tokens = window;
  options.halo_tokens = 0;
  return {cache_, options};
}

double World::step(tandem::Session& session, int64_t n_tokens) {
  double ns = 0.0;
  tandem::Step step(session, {sequence_}, {n_tokens});
  for (int32_t l = 0; l < n_layers_; ++l) {
    draw_queries(n_tokens);
    draw(n_tokens, &k_, kKeyRow);
    draw(n_tokens, &v_, kKeyRow);
    const tandem_tensor q = tandem::tensor(q_.data(), {n_tokens, kQHeads, kDim}),
                        o = tandem::tensor(o_.data(), {n_tokens, kQHeads, kDim}),
                        k = tandem::tensor(k_.data(), {n_tokens, kHeads, kDim}),
                        v = tandem::tensor(v_.data(), {n_tokens, kHeads, kDim});
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = l;
    args.n_sequences = 1;
    args.sequences = &sequence_;
    args.q_lens = &n_tokens;
    args.q = &q, args.k = &k, args.v = &v, args.o = &o;
    ns -= now_ns();
    session.attend(args);
    ns += now_ns();
  }
  step.end();
  return ns;
}

// Compares the newest query's output in the last layer with attention over its own key and the keys that were selected
// before it.
std::string World::check_head(tandem::Session& session, int32_t kv_head) {
  const int32_t layer_idx = n_layers_ - 1;
  std::vector<int64_t> tokens = session.selection(sequence_, layer_idx, kv_head);
  step(session, 1);
  tokens.push_back(length() - 1);
  std::vector<float> k(static_cast<size_t>(length() * kKeyRow)), v(k.size());
  const tandem_tensor k_all = tandem::tensor(k.data(), {length(), kHeads, kDim}),
                      v_all = tandem::tensor(v.data(), {length(), kHeads, kDim});
  cache_.read(&k_all, &v_all, sequence_, layer_idx);
  for (int64_t g = 0; g < kGroup; ++g) {
    const int64_t at = (kv_head * kGroup + g) * kDim;
    double sum = 0.0, o[kDim] = {};
    for (const int64_t token : tokens) {
      const int64_t row = token * kKeyRow + kv_head * kDim;
      double logit = 0.0;
      for (int64_t i = 0; i < kDim; ++i)
        logit += double{q_[static_cast<size_t>(at + i)]} * double{k[static_cast<size_t>(row + i)]};
      const double weight = std::exp(logit / std::sqrt(double{kDim}));
      sum += weight;
      for (int64_t i = 0; i < kDim; ++i) o[i] += weight * double{v[static_cast<size_t>(row + i)]};
    }
    for (int64_t i = 0; i < kDim; ++i)
      if (!(std::fabs(double{o_[static_cast<size_t>(at + i)]} - o[i] / sum) <= 1e-4))
        return "o of query head " + std::to_string(at / kDim) + ", dim " + std::to_string(i);
  }
  return "";
}

bool World::check(tandem::Session& session) {
  step(session, 32);
  for (const int32_t kv_head : {0, 5}) {
    const std::string wrong = check_head(session, kv_head);
    if (wrong.empty()) continue;
    std::fprintf(stderr, "%s is wrong\n", wrong.c_str());
    return false;
  }
  return true;
}

// Results of a phase, one entry for each round.
struct Series {
  std::vector<double> quiet_ms, step_ms, wait_ms, append_ms, k_gbps;

  void print(const char* name, double kept) const {
    std::vector<double> share;
    for (size_t i = 0; i < step_ms.size(); ++i) share.push_back(100.0 * wait_ms[i] / step_ms[i]);
    const auto most = [](const std::vector<double>& x) { return *std::max_element(x.begin(), x.end()); };
    const auto middle = [](const std::vector<double>& x) {  // "-" if there are none
      char digits[32] = "-";
      if (!x.empty()) std::snprintf(digits, sizeof digits, "%.2f", median(x));
      return std::string(digits);
    };
    std::printf("| %-10s | %5.1f %% | %7s | %7.2f | %7.2f | %7.2f | %7.2f | %5.1f | %5.1f | %8s | %5s |\n", name,
                100.0 * kept, middle(quiet_ms).c_str(), median(step_ms), most(step_ms), median(wait_ms), most(wait_ms),
                median(share), most(share), middle(append_ms).c_str(), middle(k_gbps).c_str());
  }
};

double kept_share(tandem::Session& session) {
  const tandem_session_stats stats = session.stats();
  return static_cast<double>(stats.selected_keys) / static_cast<double>(stats.host_keys);
}

void measure_evictions(World& world, const char* name, int64_t window, int n_rounds) {
  world.reset();
  tandem::Session session = world.open("hgca", window);
  world.step(session, 32);
  const int64_t block = std::min(kPage, std::max<int64_t>(1, window / 8));
  Series series;
  for (int i = 0; i < n_rounds; ++i) {
    const int64_t window_begin = session.stats().evicted_tokens / world.n_layers();
    while (world.length() + 1 < window_begin + window + block) series.quiet_ms.push_back(world.step(session, 1) / 1e6);
    const double waited = static_cast<double>(session.stats().refresh_wait_ns);
    world.step(session, 1);
    series.step_ms.push_back(world.step(session, 1) / 1e6);
    series.wait_ms.push_back((static_cast<double>(session.stats().refresh_wait_ns) - waited) / 1e6);
  }
  series.print(name, kept_share(session));
}

void measure_appends(World& world, int64_t n_tokens, int n_rounds) {
  world.reset();
  tandem::Session session = world.open("hgca", 4096);
  world.step(session, 32);
  Series series;
  for (int i = 0; i < n_rounds; ++i) {
    series.quiet_ms.push_back(world.step(session, 1) / 1e6);
    const tandem_session_stats before = session.stats();
    series.append_ms.push_back(world.step(session, n_tokens) / 1e6);
    series.step_ms.push_back(world.step(session, 1) / 1e6);
    const tandem_session_stats after = session.stats();
    series.wait_ms.push_back(static_cast<double>(after.refresh_wait_ns - before.refresh_wait_ns) / 1e6);
    series.k_gbps.push_back(kTokenBytes / 2 * static_cast<double>(world.length() * world.n_layers()) /
                            static_cast<double>(after.refresh_ns - before.refresh_ns));
  }
  series.print(("append " + std::to_string(n_tokens)).c_str(), kept_share(session));
}

void measure_dense(World& world, int n_rounds) {
  world.reset();
  tandem::Session session = world.open("all", 4096);
  std::vector<double> ns;
  for (int i = 0; i < n_rounds; ++i) ns.push_back(world.step(session, 1));
  const double bytes = kTokenBytes * static_cast<double>(world.length() * world.n_layers());
  std::printf("dense: %.2f ms a step, %.2f GB/s\n\n", median(ns) / 1e6, bytes / median(ns));
}

int run(const Settings& settings) {
  World world(settings);
  {
    tandem::Session session = world.open("hgca", 256);
    if (!world.check(session)) return 1;
  }
  if (settings.n_rounds == 0) return 0;
  std::printf("%lld keys, %d layers, bf16\n\n", static_cast<long long>(settings.n_keys), settings.n_layers);
  measure_dense(world, settings.n_rounds);
  std::printf(
      "| before it | keys kept | quiet step ms | step ms | worst | wait ms | worst | wait %% | worst | append ms | K GB/s "
      "|\n"
      "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
  const auto wanted = [&](const std::string& phase) { return settings.only.empty() || settings.only == phase; };
  if (wanted("page")) measure_evictions(world, "page", 4096, settings.n_rounds);
  if (wanted("token")) measure_evictions(world, "token", 15, settings.n_rounds);
  for (const int64_t n_tokens : {32, 512})
    if (wanted("append " + std::to_string(n_tokens))) measure_appends(world, n_tokens, std::max(1, settings.n_rounds / 5));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  settings.n_threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  if (argc > 2) settings.n_keys = std::atoll(argv[2]);
  if (argc > 3) settings.n_layers = std::atoi(argv[3]);
  if (argc > 4) settings.n_rounds = std::atoi(argv[4]);
  if (argc > 5) settings.only = argv[5];
  if (settings.n_threads < 1 || settings.n_keys < 1 || settings.n_layers < 1 || settings.n_rounds < 0) {
    std::fprintf(stderr, "refresh_bench [threads] [keys] [layers] [rounds] [phase]\n");
    return 2;
  }
  try {
    return run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
