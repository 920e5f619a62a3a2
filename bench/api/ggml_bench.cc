// SPDX-License-Identifier: MIT
// Decode, appends and prefills beside ggml's CPU attention, in turns: the same keys and values and the same threads. Layers
// rotate over more memory than the caches hold. Errors are against attention in double precision on the stored numbers. Only
// attention is timed. All keys and values are in place before, including those of the queries' tokens.
//
//   ggml_bench [threads] [GiB of keys and values] [rounds] [part ...]
//
// Parts: decode, append-32, prefill-512 and prefill-4096. Default: all but the last one, whose logits take 4 GiB in ggml.
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "ggml_ways.h"
#include "rival.h"
#include "tandem/tandem.hpp"

namespace rivals {
namespace {

// Attends the first n_keys keys of layer 0 with one query.
std::vector<double> attend_in_double(const Pool& pool, const float* q, int64_t kv_head, int64_t n_keys) {
  const auto widen = ggml_get_type_traits(pool.type)->to_float;
  std::vector<double> logits, o(kDim, 0.0);
  float row[kDim];
  for (int64_t t = 0; t < n_keys; ++t) {
    widen(pool.row(pool.stored_k, 0, t, kv_head), row, kDim);
    double dot = 0.0;
    for (size_t i = 0; i < kDim; ++i) dot += double{q[i]} * double{row[i]};
    logits.push_back(dot * double{kScale});
  }
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (int64_t t = 0; t < n_keys; ++t) {
    widen(pool.row(pool.stored_v, 0, t, kv_head), row, kDim);
    const double p = std::exp(logits[static_cast<size_t>(t)] - largest);
    sum += p;
    for (size_t i = 0; i < kDim; ++i) o[i] += p * double{row[i]};
  }
  for (double& x : o) x /= sum;
  return o;
}

// Returns the largest error of o [q_len, kQHeads, kDim] in some heads of the first, the middle and the last query, relative
// to the largest element.
double error_of(const Pool& pool, const Shape& shape, const Floats& q, const Floats& o) {
  double worst = 0.0, size = 0.0;
  for (int64_t t : std::set<int64_t>{0, shape.q_len / 2, shape.q_len - 1}) {
    for (int64_t head : {int64_t{0}, int64_t{13}, kQHeads - 1}) {
      const int64_t at = (t * kQHeads + head) * kDim;
      const auto expected = attend_in_double(pool, q.data() + at, head / kGroup, shape.n_keys - shape.q_len + t + 1);
      for (size_t i = 0; i < kDim; ++i) {
        const double error = std::fabs(expected[i] - double{o[static_cast<size_t>(at) + i]});
        if (!(error <= worst) && !std::isnan(worst)) worst = error;  // a NaN is kept
        size = std::max(size, std::fabs(expected[i]));
      }
    }
  }
  return worst / size;
}

// Makes queries that are close to their own token's key, which they see, and closer to the next token's key, which they do
// not see. So a mask that is off by one shows.
Floats peaked(const Pool& pool, const Shape& shape, const Floats& noise_q) {
  Floats q = noise_q;
  for (float& x : q) x *= 3.0f;
  for (int64_t t = 0; t + 1 < shape.q_len; ++t) {
    const int64_t token = shape.n_keys - shape.q_len + t;
    for (int64_t head = 0; head < kQHeads; ++head) {
      const float* own = pool.k.data() + (Pool::token_row(0, token) * kKvHeads + head / kGroup) * kDim;
      const float* next = pool.k.data() + (Pool::token_row(0, token + 1) * kKvHeads + head / kGroup) * kDim;
      float* to = q.data() + (t * kQHeads + head) * kDim;
      for (int64_t i = 0; i < kDim; ++i) to[i] += own[i] + 2.0f * next[i];
    }
  }
  return q;
}

// The layers that Tandem's contestants share, filled from the pool.
class TandemLayers {
 public:
  TandemLayers(const Pool& pool, const Shape& shape)
      : engine_(options(shape.n_threads)),
        model_(layers(shape.n_layers)),
        cache_(engine_, model_, types(pool)),
        session_(cache_, all()) {
    sequence_ = cache_.create_sequence();
    cache_.reserve(sequence_, shape.n_keys);
    for (int64_t layer = 0; layer < shape.n_layers; ++layer) fill(pool, layer, shape.n_keys);
  }
  // Attends with the queries of the last tokens.
  void attend(int64_t layer, int64_t q_len, const tandem_tensor& q, const tandem_tensor& o) {
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = static_cast<int32_t>(layer);
    args.n_sequences = 1;
    args.sequences = &sequence_;
    args.q_lens = &q_len;
    args.q = &q;
    args.o = &o;
    session_.attend(args);
  }

 private:
  static tandem_engine_options options(int32_t n_threads) {
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = n_threads;
    return options;
  }
  static std::vector<tandem_layer_options> layers(int64_t n) {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = kQHeads;
    layer.n_kv_heads = kKvHeads;
    layer.k_head_dim = kDim;
    return std::vector<tandem_layer_options>(static_cast<size_t>(n), layer);
  }
  static tandem_cache_options types(const Pool& pool) {
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.k_type = pool.type == GGML_TYPE_Q8_0 ? TANDEM_Q8_0 : pool.type == GGML_TYPE_F16 ? TANDEM_F16 : TANDEM_BF16;
    return options;
  }
  static tandem_session_options all() {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = "all";
    return options;
  }
  // Appends f32 rows, which Tandem rounds and quantises as ggml does.
  void fill(const Pool& pool, int64_t layer, int64_t n_keys) {
    constexpr int64_t kTokens = 4096, kRow = kKvHeads * kDim;
    Floats k(kTokens * kRow), v(kTokens * kRow);
    for (int64_t at = 0; at < n_keys; at += kTokens) {
      const int64_t n = std::min(kTokens, n_keys - at);
      for (int64_t t = 0; t < n; ++t) {
        const int64_t from = Pool::token_row(layer, at + t) * kRow;
        std::copy_n(pool.k.data() + from, kRow, k.data() + t * kRow);
        std::copy_n(pool.v.data() + from, kRow, v.data() + t * kRow);
      }
      const tandem_tensor k_tensor = tandem::tensor(k.data(), {n, kKvHeads, kDim});
      const tandem_tensor v_tensor = tandem::tensor(v.data(), {n, kKvHeads, kDim});
      cache_.append(sequence_, static_cast<int32_t>(layer), &k_tensor, &v_tensor);
    }
  }

  tandem::Engine engine_;
  tandem::Model model_;
  tandem::Cache cache_;
  tandem::Session session_;
  int64_t sequence_ = 0;
};

// Queries are f32, which is not rounded, or bf16, to which ggml rounds them before products with bf16 keys.
class Tandem final : public Rival {
 public:
  Tandem(std::shared_ptr<TandemLayers> layers, const Shape& shape, bool q_is_bf16)
      : layers_(std::move(layers)), q_len_(shape.q_len), q_is_bf16_(q_is_bf16) {
    o_.resize(static_cast<size_t>(q_len_ * kQHeads * kDim));
  }
  const char* name() const override { return q_is_bf16_ ? "tandem, bf16 queries" : "tandem"; }
  Errors largest() const override { return q_is_bf16_ ? Errors{0.01, 0.001} : Errors{1e-5, 1e-5}; }
  void take(const Floats& q) override {
    q_ = q;
    rounded_q_.resize(q.size());
    ggml_fp32_to_bf16_row(q.data(), rounded_q_.data(), static_cast<int64_t>(q.size()));
  }
  void attend(int64_t layer) override {
    const tandem_tensor q = q_is_bf16_ ? tandem::tensor(TANDEM_BF16, rounded_q_.data(), {q_len_, kQHeads, kDim})
                                       : tandem::tensor(q_.data(), {q_len_, kQHeads, kDim});
    layers_->attend(layer, q_len_, q, tandem::tensor(o_.data(), {q_len_, kQHeads, kDim}));
  }
  void give(Floats* o) const override { *o = o_; }

 private:
  std::shared_ptr<TandemLayers> layers_;
  int64_t q_len_;
  bool q_is_bf16_;
  Floats q_, o_;
  std::vector<ggml_bf16_t> rounded_q_;
};

struct Contender {
  std::unique_ptr<Rival> rival;
  Errors errors{};
  std::vector<double> ms;
};

// Makes the contestants. Times are relative to the first one.
std::vector<Contender> contenders(const Pool& pool, const Shape& shape) {
  std::vector<Contender> all;
  const auto layers = std::make_shared<TandemLayers>(pool, shape);
  all.push_back({std::make_unique<Tandem>(layers, shape, false), {}, {}});
  if (pool.type == GGML_TYPE_BF16) all.push_back({std::make_unique<Tandem>(layers, shape, true), {}, {}});
  for (Way way : {Way::kProducts, Way::kFlash, Way::kFlashTokenMajor})
    if (way != Way::kProducts || pool.type != GGML_TYPE_Q8_0) all.push_back({make_ggml(pool, way, shape), {}, {}});
  return all;
}

// Returns false if a contestant is wrong. Afterwards all contestants have the peaked queries.
bool check(const Pool& pool, const Shape& shape, std::vector<Contender>* all) {
  const Floats noise_q = noise(shape.q_len * kQHeads * kDim, 3, 0.0f), peaked_q = peaked(pool, shape, noise_q);
  Floats diffuse_q = noise_q, o(noise_q.size());
  for (float& x : diffuse_q) x *= 0.05f;
  for (Contender& each : *all) {
    const auto error_with = [&](const Floats& q) {
      each.rival->take(q);
      each.rival->attend(0);
      each.rival->give(&o);
      return error_of(pool, shape, q, o);
    };
    each.errors.diffuse = error_with(diffuse_q);
    each.errors.peaked = error_with(peaked_q);
    const Errors largest = each.rival->largest();
    if (each.errors.peaked <= largest.peaked && each.errors.diffuse <= largest.diffuse) continue;
    std::printf("%s is wrong: relative errors %g and %g\n", each.rival->name(), each.errors.peaked, each.errors.diffuse);
    return false;
  }
  return true;
}

// A contestant's consecutive calls, each on another layer. Before it gets its turn again, all others have passed through the
// caches.
constexpr int64_t kTurn = 3;

void time(const Shape& shape, int n_rounds, std::vector<Contender>* all) {
  for (int round = 0; round < n_rounds; ++round) {
    for (Contender& each : *all) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // lets the previous contestant's threads stop spinning
      for (int64_t repeat = 0; repeat < kTurn; ++repeat) {
        const auto begin = std::chrono::steady_clock::now();
        each.rival->attend((round * kTurn + repeat) % shape.n_layers);
        each.ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
      }
    }
  }
}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

struct Part {
  const char* name;
  int64_t q_len;
  std::vector<ggml_type> types;
  std::vector<int64_t> n_keys;
};

const Part kParts[] = {
    {"decode", 1, {GGML_TYPE_F16, GGML_TYPE_Q8_0}, {8192, 32768, 131072}},
    {"append-32", 32, {GGML_TYPE_F16, GGML_TYPE_BF16}, {8192}},
    {"prefill-512", 512, {GGML_TYPE_F16, GGML_TYPE_BF16}, {8192}},
    {"prefill-4096", 4096, {GGML_TYPE_F16, GGML_TYPE_BF16}, {8192}},
};

// Counts floating-point operations of unmasked pairs of query and key.
void print(const char* part, const Pool& pool, const Shape& shape, const std::vector<Contender>& all) {
  const double n_pairs = static_cast<double>(shape.q_len * (2 * shape.n_keys - shape.q_len + 1)) / 2.0 * kQHeads;
  for (const Contender& each : all) {
    const double ms = median(each.ms);
    std::printf("%-12s %-5s %7lld keys  %-46s %9.3f ms %6.2fx %8.1f GFLOP/s  error peaked %.1e, diffuse %.1e\n", part,
                ggml_type_name(pool.type), static_cast<long long>(shape.n_keys), each.rival->name(), ms,
                ms / median(all[0].ms), n_pairs * 4.0 * kDim / ms * 1e-6, each.errors.peaked, each.errors.diffuse);
  }
  std::fflush(stdout);
}

struct Setup {
  int32_t n_threads;
  double gib;
  int n_rounds;
};

// Returns false if a contestant is wrong. Then nothing is timed.
bool compare(const Setup& setup, const Part& part, const Pool& pool, int64_t n_keys) {
  const double layer_bytes = 2.0 * static_cast<double>(pool.row_bytes * static_cast<size_t>(kKvHeads * n_keys));
  const auto n_layers = std::max(kTurn, static_cast<int64_t>(setup.gib * 0x1p30 / layer_bytes));
  const Shape shape{setup.n_threads, n_layers, n_keys, part.q_len};
  std::vector<Contender> all = contenders(pool, shape);
  if (!check(pool, shape, &all)) return false;
  time(shape, setup.n_rounds, &all);
  print(part.name, pool, shape, all);
  return true;
}

// Returns the named parts, by default all but the last one. Returns no parts if a name is unknown.
std::vector<Part> parts_named(char** names, int n_names) {
  if (n_names == 0) return {std::begin(kParts), std::end(kParts) - 1};
  std::vector<Part> parts;
  for (int i = 0; i < n_names; ++i) {
    const auto* part = std::find_if(std::begin(kParts), std::end(kParts),
                                    [&](const Part& each) { return std::strcmp(each.name, names[i]) == 0; });
    if (part == std::end(kParts)) {
      std::fprintf(stderr, "ggml_bench: part = %s is none of decode, append-32, prefill-512, prefill-4096\n", names[i]);
      return {};
    }
    parts.push_back(*part);
  }
  return parts;
}

int run(int argc, char** argv) {
  const Setup setup{argc > 1 ? std::atoi(argv[1]) : 2, argc > 2 ? std::atof(argv[2]) : 1.0,
                    argc > 3 ? std::atoi(argv[3]) : 9};
  if (setup.n_threads < 1 || !(setup.gib > 0.0) || setup.n_rounds < 1) {
    std::fprintf(stderr, "ggml_bench: threads = %d, GiB = %g, rounds = %d: each is more than 0\n", setup.n_threads,
                 setup.gib, setup.n_rounds);
    return 2;
  }
  const std::vector<Part> parts = parts_named(argv + std::min(argc, 4), std::max(argc - 4, 0));
  if (parts.empty()) return 2;
  // ggml's threads are created before Tandem binds this thread to a core, as they would inherit the binding.
  int n_made = 0;
#pragma omp parallel num_threads(setup.n_threads) reduction(+ : n_made)
  n_made += 1;
  std::printf("%d threads, ggml has %d\n", setup.n_threads, n_made);
  ggml_cpu_init();
  for (const Part& part : parts) {
    for (ggml_type type : part.types) {
      const Pool pool(type);
      for (int64_t n_keys : part.n_keys)
        if (!compare(setup, part, pool, n_keys)) return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace rivals

int main(int argc, char** argv) { return rivals::run(argc, argv); }
