// SPDX-License-Identifier: MIT
// Decode with tandem_attend_tensors(): time of whole calls, as a share of the read bandwidth of the same run.
//
//   tensors_bench [threads] [keys] [rounds] [q heads] [KV heads] [head dim]
//
// One query token over K and V in several types, head-major and token-major. Layers rotate over more memory than the caches
// hold. Each round times every contestant once, and the bandwidth before and after it. Prints a line of JSON for each
// contestant: medians over the rounds, and the largest error of one output against attention in double precision.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tandem/tandem.h"
#include "tools/bench/machine_facts.h"
#include "tools/bench/pinned_team.h"
#include "tools/bench/read_bandwidth.h"
#include "tools/common/random_rows.h"

namespace {

struct Options {
  int32_t n_threads = 2;
  int64_t n_keys = 32768;
  int64_t n_rounds = 30;
  int64_t n_q_heads = 32, n_kv_heads = 8, head_dim = 128;
};

struct Kind {
  int32_t type;
  bool head_major;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void check(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) return;
  std::fprintf(stderr, "tensors_bench: %s\n", tandem_error_message(error));
  std::exit(1);
}

int64_t element_block(int32_t type) { return type == TANDEM_Q8_0 || type == TANDEM_Q4_0 ? 32 : 1; }
int64_t block_bytes(int32_t type) {
  return type == TANDEM_Q8_0 ? 34 : type == TANDEM_Q4_0 ? 18 : type == TANDEM_F32 ? 4 : 2;
}

uint16_t f16_of(float x) {  // for normal numbers and 0
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  if ((bits & 0x7fffffff) < 0x38800000) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | (((bits & 0x7fffffff) - (112u << 23) + 0x1000) >> 13));
}
float f32_of_f16(uint16_t x) {
  const uint32_t rest = x & 0x7fffu,
                 bits = static_cast<uint32_t>(x & 0x8000) << 16 | (rest == 0 ? 0 : (rest << 13) + (112u << 23));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Stores n numbers in a type and returns the stored values.
void store(int32_t type, const float* from, int64_t n, uint8_t* to, float* stored) {
  for (int64_t i = 0; i < n; i += element_block(type), to += block_bytes(type)) {
    if (type == TANDEM_F32) {
      std::memcpy(to, from + i, 4);
      stored[i] = from[i];
    } else if (type == TANDEM_BF16 || type == TANDEM_F16) {
      const uint16_t bits = type == TANDEM_BF16 ? tools::bf16_of(from[i]) : f16_of(from[i]);
      std::memcpy(to, &bits, 2);
      stored[i] = type == TANDEM_BF16 ? tools::f32_of(bits) : f32_of_f16(bits);
    } else {
      float largest = 0;
      for (int64_t j = 0; j < 32; ++j) largest = std::max(largest, std::fabs(from[i + j]));
      const float most = type == TANDEM_Q8_0 ? 127.0f : 7.0f;
      const uint16_t scale = f16_of(largest / most);
      const float d = f32_of_f16(scale);
      std::memcpy(to, &scale, 2);
      std::memset(to + 2, 0, static_cast<size_t>(block_bytes(type) - 2));
      for (int64_t j = 0; j < 32; ++j) {
        const int code = static_cast<int>(std::lround(from[i + j] / d));
        stored[i + j] = d * static_cast<float>(code);
        if (type == TANDEM_Q8_0)
          to[2 + j] = static_cast<uint8_t>(code);
        else
          to[2 + j % 16] = static_cast<uint8_t>(to[2 + j % 16] | (code + 8) << (j < 16 ? 0 : 4));
      }
    }
  }
}

// K and V of enough layers for cold reads.
class Contestant {
 public:
  Contestant(const Options& options, const Kind& kind, int64_t n_bytes) : options_(options), kind_(kind) {
    row_bytes_ = options.head_dim / element_block(kind.type) * block_bytes(kind.type);
    plane_bytes_ = options.n_keys * options.n_kv_heads * row_bytes_;
    n_layers_ = std::max<int64_t>(1, n_bytes / (2 * plane_bytes_));
    const auto size = static_cast<size_t>(n_layers_ * 2 * plane_bytes_);
    memory_ = static_cast<uint8_t*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED) std::exit(1);
    madvise(memory_, size, MADV_HUGEPAGE);
    fill();
  }
  Contestant(const Contestant&) = delete;
  Contestant& operator=(const Contestant&) = delete;

  int64_t call_bytes() const { return 2 * plane_bytes_; }
  const Kind& kind() const { return kind_; }

  double time_one(tandem_engine* engine) {
    attend(engine, next_layer_);  // warms q and the engine's work space; the next keys are cold
    next_layer_ = (next_layer_ + 1) % n_layers_;
    constexpr int kCalls = 4;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      attend(engine, next_layer_);
      next_layer_ = (next_layer_ + 1) % n_layers_;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kCalls;
  }

  // Checks query head 0 and the last one, in layer 0.
  double largest_error(tandem_engine* engine) {
    attend(engine, 0);
    double worst = 0;
    for (const int64_t head : {int64_t{0}, options_.n_q_heads - 1}) worst = std::max(worst, error_of(head));
    return worst;
  }

  std::vector<double> seconds, rates;

 private:
  uint8_t* row(int64_t layer, bool is_v, int64_t key, int64_t head) const {
    const int64_t at = kind_.head_major ? head * options_.n_keys + key : key * options_.n_kv_heads + head;
    return memory_ + (2 * layer + (is_v ? 1 : 0)) * plane_bytes_ + at * row_bytes_;
  }

  // Fills rows from a pool of random rows.
  void fill() {
    constexpr int64_t kPool = 512;
    const int64_t dim = options_.head_dim;
    std::vector<float> values(static_cast<size_t>(kPool * dim));
    tools::fill_normal(values.data(), kPool * dim, 7);
    std::vector<uint8_t> rows(static_cast<size_t>(kPool * row_bytes_));
    pool_.resize(values.size());
    for (int64_t i = 0; i < kPool; ++i)
      store(kind_.type, values.data() + i * dim, dim, rows.data() + i * row_bytes_, pool_.data() + i * dim);
    for (int64_t layer = 0; layer < n_layers_; ++layer)
      for (int64_t key = 0; key < options_.n_keys; ++key)
        for (int64_t head = 0; head < options_.n_kv_heads; ++head)
          for (const bool is_v : {false, true})
            std::memcpy(row(layer, is_v, key, head), rows.data() + pool_idx(key, head, is_v) * row_bytes_,
                        static_cast<size_t>(row_bytes_));
    q_.resize(static_cast<size_t>(options_.n_q_heads * dim));
    tools::fill_normal(q_.data(), options_.n_q_heads * dim, 8);
    o_.resize(q_.size());
  }
  static int64_t pool_idx(int64_t key, int64_t head, bool is_v) { return (key * 31 + head * 7 + (is_v ? 13 : 0)) % 509; }

  tandem_tensor view(uint8_t* data) const {
    tandem_tensor t = {};
    t.struct_size = sizeof t;
    t.dtype = kind_.type;
    t.data = data;
    t.n_dims = 3;
    t.shape[0] = options_.n_keys;
    t.shape[1] = options_.n_kv_heads;
    t.shape[2] = options_.head_dim;
    t.stride[0] = kind_.head_major ? options_.head_dim : options_.n_kv_heads * options_.head_dim;
    t.stride[1] = kind_.head_major ? options_.n_keys * options_.head_dim : options_.head_dim;
    t.stride[2] = 1;
    return t;
  }

  void attend(tandem_engine* engine, int64_t layer) {
    tandem_error* error = nullptr;
    tandem_tensor q, o;
    const int64_t shape[3] = {1, options_.n_q_heads, options_.head_dim};
    check(tandem_tensor_init(&q, TANDEM_F32, q_.data(), 3, shape, &error), error);
    check(tandem_tensor_init(&o, TANDEM_F32, o_.data(), 3, shape, &error), error);
    const tandem_tensor k = view(row(layer, false, 0, 0)), v = view(row(layer, true, 0, 0));
    tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.o = &o;
    check(tandem_attend_tensors(engine, &args, &error), error);
  }

  double error_of(int64_t q_head) const {
    const int64_t dim = options_.head_dim, head = q_head / (options_.n_q_heads / options_.n_kv_heads);
    std::vector<double> logits(static_cast<size_t>(options_.n_keys)), o(static_cast<size_t>(dim), 0.0);
    double largest = -1e300, sum = 0, worst = 0;
    for (int64_t key = 0; key < options_.n_keys; ++key) {
      const float* k = pool_.data() + pool_idx(key, head, false) * dim;
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q_[static_cast<size_t>(q_head * dim + d)]) * k[d];
      logits[static_cast<size_t>(key)] = dot / std::sqrt(static_cast<double>(dim));
      largest = std::max(largest, logits[static_cast<size_t>(key)]);
    }
    for (int64_t key = 0; key < options_.n_keys; ++key) {
      const double weight = std::exp(logits[static_cast<size_t>(key)] - largest);
      const float* v = pool_.data() + pool_idx(key, head, true) * dim;
      sum += weight;
      for (int64_t d = 0; d < dim; ++d) o[static_cast<size_t>(d)] += weight * static_cast<double>(v[d]);
    }
    for (int64_t d = 0; d < dim; ++d)
      worst = std::max(worst, std::fabs(o[static_cast<size_t>(d)] / sum -
                                        static_cast<double>(o_[static_cast<size_t>(q_head * dim + d)])));
    return worst;
  }

  const Options options_;
  const Kind kind_;
  int64_t row_bytes_ = 0, plane_bytes_ = 0, n_layers_ = 0, next_layer_ = 0;
  uint8_t* memory_ = nullptr;
  std::vector<float> pool_, q_, o_;
};

int run(const Options& options) {
  tandem_error* error = nullptr;
  tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
  engine_options.n_threads = options.n_threads;
  tandem_engine* engine = nullptr;
  check(tandem_engine_create(&engine, &engine_options, &error), error);
  const int64_t cache_bytes = tools::last_level_cache_bytes(tools::cpus_by_core());
  tools::PinnedTeam team(options.n_threads);
  std::unique_ptr<tools::ReadBandwidth> read;
  if (!tools::ReadBandwidth::create(&team, 8 * cache_bytes, &read).ok()) return 1;
  std::vector<std::unique_ptr<Contestant>> all;
  for (const int32_t type : {TANDEM_BF16, TANDEM_F16, TANDEM_F32, TANDEM_Q8_0, TANDEM_Q4_0})
    for (const bool head_major : {true, false})
      all.push_back(std::make_unique<Contestant>(options, Kind{type, head_major}, 4 * cache_bytes));
  for (int64_t round = 0; round < options.n_rounds; ++round)
    for (const auto& each : all) {
      const double before = read->measure();
      each->seconds.push_back(each->time_one(engine));
      each->rates.push_back(static_cast<double>(each->call_bytes()) / each->seconds.back() / 1e9 /
                            std::max(before, read->measure()));
    }
  bool ok = true;
  for (const auto& each : all) {
    const double worst = each->largest_error(engine);
    ok = ok && worst < 1e-4;
    std::printf(
        "{\"type\":\"%s\",\"layout\":\"%s-major\",\"keys\":%lld,\"threads\":%d,\"us\":%.1f,\"share_of_read\":%.3f,"
        "\"error\":%.2g,\"check\":\"%s\"}\n",
        tandem_dtype_name(each->kind().type), each->kind().head_major ? "head" : "token",
        static_cast<long long>(options.n_keys), options.n_threads, median(each->seconds) * 1e6, median(each->rates), worst,
        worst < 1e-4 ? "ok" : "FAILED");
  }
  tandem_engine_release(engine);
  return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  int64_t* const values[] = {nullptr,          &options.n_keys, &options.n_rounds, &options.n_q_heads, &options.n_kv_heads,
                             &options.head_dim};
  for (int i = 1; i < argc && i <= 6; ++i) {
    const long long value = std::atoll(argv[i]);
    if (value < 1) {
      std::fprintf(stderr, "tensors_bench: argument %d = %s is not positive\n", i, argv[i]);
      return 2;
    }
    if (i == 1)
      options.n_threads = static_cast<int32_t>(value);
    else
      *values[i - 1] = value;
  }
  return run(options);
}
