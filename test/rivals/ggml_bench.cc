// SPDX-License-Identifier: MIT
// Decode beside ggml's CPU attention: the same keys and values, the same threads, in turn, layers rotating over more memory
// than the caches hold. Errors of both are against attention in double precision on the stored numbers.
//
//   ggml_bench [threads] [GiB of keys and values] [rounds]
//
// ggml computes each layer as one graph: matrix products and softmax with V transposed (the whole query group per key), its
// flash attention over head-major keys, and over token-major keys, which is how llama.cpp lays out its cache.
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tandem/tandem.hpp"

namespace {

constexpr int64_t kDim = 128, kQHeads = 32, kKvHeads = 8, kGroup = kQHeads / kKvHeads;
constexpr int64_t kPoolTokens = 5000;  // tokens repeat, places in memory do not
constexpr float kScale = 0.08838834764f;

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

// About normal, variance 1.
Floats noise(int64_t n, uint64_t seed, float mean) {
  Floats x(static_cast<size_t>(n));
  for (float& value : x) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(seed >> 40) / 16777216.0f - 0.5f;
    }
    value = mean + sum * 1.7320508f;
  }
  return x;
}

// The pool's rows as ggml stores them; token t of a layer is row token_row(layer, t).
struct Pool {
  ggml_type type;
  Floats k = noise(kPoolTokens * kKvHeads * kDim, 1, 0.0f), v = noise(kPoolTokens * kKvHeads * kDim, 2, 0.5f);
  Bytes stored_k, stored_v;
  size_t row_bytes;

  explicit Pool(ggml_type of) : type(of), row_bytes(ggml_row_size(of, kDim)) {
    for (auto [from, to] : {std::pair{&k, &stored_k}, std::pair{&v, &stored_v}}) {
      to->resize(row_bytes * static_cast<size_t>(kPoolTokens * kKvHeads));
      ggml_quantize_chunk(type, from->data(), to->data(), 0, kPoolTokens * kKvHeads, kDim, nullptr);
    }
  }
  static int64_t token_row(int64_t layer, int64_t token) { return (token * 7 + layer * 131) % kPoolTokens; }
  const uint8_t* row(const Bytes& of, int64_t layer, int64_t token, int64_t head) const {
    return of.data() + static_cast<size_t>(token_row(layer, token) * kKvHeads + head) * row_bytes;
  }
};

// The largest error of o [kQHeads, kDim] in some heads, relative to the largest element.
double error_of(const Pool& pool, const Floats& q, const Floats& o, int64_t n_keys) {
  const auto widen = ggml_get_type_traits(pool.type)->to_float;
  double worst = 0.0, size = 0.0;
  for (int64_t head : {int64_t{0}, int64_t{13}, kQHeads - 1}) {
    std::vector<double> logits, sums(kDim, 0.0);
    float row[kDim];
    for (int64_t t = 0; t < n_keys; ++t) {
      widen(pool.row(pool.stored_k, 0, t, head / kGroup), row, kDim);
      double dot = 0.0;
      for (int64_t i = 0; i < kDim; ++i) dot += double{q[static_cast<size_t>(head * kDim + i)]} * double{row[i]};
      logits.push_back(dot * double{kScale});
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (int64_t t = 0; t < n_keys; ++t) {
      widen(pool.row(pool.stored_v, 0, t, head / kGroup), row, kDim);
      const double p = std::exp(logits[static_cast<size_t>(t)] - largest);
      sum += p;
      for (size_t i = 0; i < kDim; ++i) sums[i] += p * double{row[i]};
    }
    for (size_t i = 0; i < kDim; ++i) {
      worst = std::max(worst, std::fabs(sums[i] / sum - double{o[static_cast<size_t>(head * kDim) + i]}));
      size = std::max(size, std::fabs(sums[i] / sum));
    }
  }
  return worst / size;
}

class Rival {
 public:
  virtual ~Rival() = default;
  virtual const char* name() const = 0;
  virtual void attend(int64_t layer, const Floats& q, Floats* o) = 0;
};

class Tandem final : public Rival {
 public:
  Tandem(const Pool& pool, int32_t n_threads, int64_t n_layers, int64_t n_keys)
      : engine_(options(n_threads)),
        model_(layers(n_layers)),
        cache_(engine_, model_, types(pool)),
        session_(cache_, all()) {
    sequence_ = cache_.create_sequence();
    cache_.reserve(sequence_, n_keys);
    for (int64_t layer = 0; layer < n_layers; ++layer) fill(pool, layer, n_keys);
  }
  const char* name() const override { return "tandem"; }
  void attend(int64_t layer, const Floats& q, Floats* o) override {
    const int64_t q_len = 1;
    const tandem_tensor q_tensor = tandem::tensor(const_cast<float*>(q.data()), {1, kQHeads, kDim});
    const tandem_tensor o_tensor = tandem::tensor(o->data(), {1, kQHeads, kDim});
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.layer_idx = static_cast<int32_t>(layer);
    args.n_sequences = 1;
    args.sequences = &sequence_;
    args.q_lens = &q_len;
    args.q = &q_tensor;
    args.o = &o_tensor;
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
    options.k_type = pool.type == GGML_TYPE_Q8_0 ? TANDEM_Q8_0 : TANDEM_F16;
    return options;
  }
  static tandem_session_options all() {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = "all";
    return options;
  }
  // From f32: rounded and quantised as ggml does.
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

enum class Way { kProducts, kFlash, kFlashTokenMajor };

class Ggml final : public Rival {
 public:
  Ggml(const Pool& pool, Way way, int32_t n_threads, int64_t n_layers, int64_t n_keys)
      : pool_(pool), way_(way), n_threads_(n_threads), n_keys_(n_keys) {
    for (int64_t layer = 0; layer < n_layers; ++layer) layers_.push_back(make_layer(layer));
  }
  ~Ggml() override {
    for (const Layer& layer : layers_) {
      ggml_free(layer.context);
      std::free(layer.k);
      std::free(layer.v);
    }
  }
  const char* name() const override {
    if (way_ == Way::kProducts) return "ggml, matrix products";
    return way_ == Way::kFlash ? "ggml, flash attention, head-major" : "ggml, flash attention, token-major (llama.cpp)";
  }
  void attend(int64_t idx, const Floats& q, Floats* o) override {
    const Layer& layer = layers_[static_cast<size_t>(idx)];
    std::memcpy(layer.q->data, q.data(), q.size() * sizeof(float));
    ggml_cplan plan = ggml_graph_plan(layer.graph, n_threads_, nullptr);
    if (work_.size() < plan.work_size) work_.resize(plan.work_size);
    plan.work_data = work_.data();
    ggml_graph_compute(layer.graph, &plan);
    std::memcpy(o->data(), layer.o->data, o->size() * sizeof(float));
  }

 private:
  struct Layer {
    uint8_t *k, *v;
    ggml_context* context;
    ggml_cgraph* graph;
    ggml_tensor *q, *o;
  };

  // Every element of K and V is written before it is read.
  uint8_t* allocate() const {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t bytes = pool_.row_bytes * static_cast<size_t>(n_keys_ * kKvHeads);
    return static_cast<uint8_t*>(std::aligned_alloc(kHugePage, (bytes + kHugePage) / kHugePage * kHugePage));
  }

  void place(int64_t layer, uint8_t* k, uint8_t* v) const {
    const size_t row = pool_.row_bytes;
#pragma omp parallel for
    for (int64_t head = 0; head < kKvHeads; ++head) {
      for (int64_t t = 0; t < n_keys_; ++t) {
        const int64_t at = way_ == Way::kFlashTokenMajor ? t * kKvHeads + head : head * n_keys_ + t;
        const uint8_t* from = pool_.row(pool_.stored_v, layer, t, head);
        std::memcpy(k + static_cast<size_t>(at) * row, pool_.row(pool_.stored_k, layer, t, head), row);
        if (way_ != Way::kProducts) {
          std::memcpy(v + static_cast<size_t>(at) * row, from, row);
          continue;
        }
        for (int64_t i = 0; i < kDim; ++i) std::memcpy(v + ((head * kDim + i) * n_keys_ + t) * 2, from + i * 2, 2);
      }
    }
  }

  // kq and its softmax are the largest things in a context.
  Layer make_layer(int64_t idx) const {
    Layer layer{};
    layer.k = allocate();
    layer.v = allocate();
    place(idx, layer.k, layer.v);
    const size_t room = way_ == Way::kProducts ? static_cast<size_t>(kQHeads * n_keys_) * 3 * sizeof(float) : 0;
    layer.context = ggml_init({room + (size_t{4} << 20), nullptr, false});
    ggml_context* c = layer.context;
    const bool token_major = way_ == Way::kFlashTokenMajor;
    const int64_t second = token_major ? kKvHeads : n_keys_, third = token_major ? n_keys_ : kKvHeads;
    ggml_set_no_alloc(c, true);
    ggml_tensor* k = ggml_new_tensor_3d(c, pool_.type, kDim, second, third);
    ggml_tensor* v = way_ == Way::kProducts ? ggml_new_tensor_3d(c, pool_.type, n_keys_, kDim, kKvHeads)
                                            : ggml_new_tensor_3d(c, pool_.type, kDim, second, third);
    ggml_set_no_alloc(c, false);
    k->data = layer.k;
    v->data = layer.v;
    if (way_ == Way::kProducts) {
      layer.q = ggml_new_tensor_3d(c, GGML_TYPE_F32, kDim, kGroup, kKvHeads);
      layer.o = ggml_mul_mat(c, v, ggml_soft_max_ext(c, ggml_mul_mat(c, k, layer.q), nullptr, kScale, 0.0f));
    } else {
      layer.q = ggml_new_tensor_3d(c, GGML_TYPE_F32, kDim, 1, kQHeads);
      if (token_major) k = ggml_permute(c, k, 0, 2, 1, 3), v = ggml_permute(c, v, 0, 2, 1, 3);
      layer.o = ggml_flash_attn_ext(c, layer.q, k, v, nullptr, kScale, 0.0f, 0.0f);
    }
    layer.graph = ggml_new_graph(c);
    ggml_build_forward_expand(layer.graph, layer.o);
    return layer;
  }

  const Pool& pool_;
  Way way_;
  int32_t n_threads_;
  int64_t n_keys_;
  std::vector<Layer> layers_;
  Bytes work_;
};

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

struct Setup {
  int32_t n_threads;
  double gib;
  int n_rounds;
};

struct Errors {
  double sharp, diffuse;
};

Errors errors_of(Rival& rival, const Pool& pool, const Floats& noise_q, int64_t n_keys) {
  const auto with = [&](float size) {
    Floats q = noise_q, o(noise_q.size());
    for (float& x : q) x *= size;
    rival.attend(0, q, &o);
    return error_of(pool, q, o, n_keys);
  };
  return {with(3.0f), with(0.05f)};
}

// False where Tandem is wrong: then nothing is timed.
bool compare(const Setup& setup, const Pool& pool, int64_t n_keys) {
  const double layer_bytes = 2.0 * static_cast<double>(pool.row_bytes * static_cast<size_t>(kKvHeads * n_keys));
  const auto n_layers = std::max<int64_t>(2, static_cast<int64_t>(setup.gib * 0x1p30 / layer_bytes));
  std::vector<std::unique_ptr<Rival>> rivals;
  rivals.push_back(std::make_unique<Tandem>(pool, setup.n_threads, n_layers, n_keys));
  for (Way way : {Way::kProducts, Way::kFlash, Way::kFlashTokenMajor})
    if (way != Way::kProducts || pool.type == GGML_TYPE_F16)
      rivals.push_back(std::make_unique<Ggml>(pool, way, setup.n_threads, n_layers, n_keys));

  Floats q = noise(kQHeads * kDim, 3, 0.0f), o(q.size());
  std::vector<Errors> errors;
  for (const auto& rival : rivals) errors.push_back(errors_of(*rival, pool, q, n_keys));
  if (!(std::max(errors[0].sharp, errors[0].diffuse) < 1e-5)) {
    std::printf("tandem is wrong: relative errors %g and %g\n", errors[0].sharp, errors[0].diffuse);
    return false;
  }
  for (float& x : q) x *= 3.0f;
  std::vector<std::vector<double>> ms(rivals.size());
  for (int round = 0; round < setup.n_rounds; ++round) {
    for (size_t i = 0; i < rivals.size(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the other's threads stop waiting busily
      for (int64_t repeat = 0; repeat < 3; ++repeat) {
        const auto begin = std::chrono::steady_clock::now();
        rivals[i]->attend((round * 3 + repeat) % n_layers, q, &o);
        ms[i].push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
      }
    }
  }
  for (size_t i = 0; i < rivals.size(); ++i)
    std::printf("%-5s %7lld keys  %-46s %9.3f ms %6.2fx  error peaked %.1e, diffuse %.1e\n", ggml_type_name(pool.type),
                static_cast<long long>(n_keys), rivals[i]->name(), median(ms[i]), median(ms[i]) / median(ms[0]),
                errors[i].sharp, errors[i].diffuse);
  std::fflush(stdout);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const Setup setup{argc > 1 ? std::atoi(argv[1]) : 2, argc > 2 ? std::atof(argv[2]) : 1.0,
                    argc > 3 ? std::atoi(argv[3]) : 9};
  // ggml's threads are made before Tandem binds this one to a core, which they would inherit.
  int n_made = 0;
#pragma omp parallel num_threads(setup.n_threads) reduction(+ : n_made)
  n_made += 1;
  std::printf("%d threads, ggml has %d\n", setup.n_threads, n_made);
  ggml_cpu_init();
  for (ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    const Pool pool(type);
    for (int64_t n_keys : {8192, 32768, 131072})
      if (!compare(setup, pool, n_keys)) return 1;
  }
  return 0;
}
