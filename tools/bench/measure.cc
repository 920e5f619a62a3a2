// SPDX-License-Identifier: MIT
#include "tools/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tools/bench/bench_reference.h"
#include "tools/bench/machine_facts.h"
#include "tools/bench/workload.h"
#include "tools/common/flags.h"

namespace tools {
namespace {

constexpr int64_t kWarmupSteps = 3;
constexpr int64_t kMostLayers = 1024;
constexpr int64_t kWakeCalls = 100;   // per repeat; a call takes microseconds
constexpr double kMemoryShare = 0.8;  // share of the available memory

// In a decode loop sequences grow. Other calls are repeated at the same length.
bool grows(const BenchOptions& options) { return options.mode == Mode::kDecode; }

int64_t token_kv_bytes(const BenchOptions& options, int32_t kv_type) {
  const int64_t k_bytes = tandem_dtype_row_bytes(kv_type, static_cast<int32_t>(options.head_dim));
  const int64_t v_bytes = tandem_dtype_row_bytes(options.v_type_beside(kv_type), static_cast<int32_t>(options.v_head_dim));
  return options.n_kv_heads * (options.v_aliases_k ? k_bytes : k_bytes + v_bytes);
}

// Returns the least number of keys of a sequence that every call reads. A policy may select more, which is not known
// beforehand.
int64_t least_keys_read(const BenchOptions& options, int64_t kv_len) {
  if (options.policy == "patterns")
    return least_keys(options.patterns.heads, options.n_q_heads / options.n_kv_heads, options.q_len, kv_len);
  if (options.policy == "all" || (options.policy == "hgca" && options.q_len > 1)) return kv_len;
  return std::clamp<int64_t>(options.window + options.sinks, 1, kv_len);
}

// Returns the number of layers for which all reads of a rotation, including those of interleaved cases, are kColdCaches
// times the last-level cache. The argument is a double, because no check has yet shown that so many bytes exist or fit into
// 64 bits.
int32_t n_layers_for(const Bench& bench, double layer_bytes_read) {
  if (bench.options.n_layers > 0) return static_cast<int32_t>(bench.options.n_layers);
  if (bench.options.mode == Mode::kWake) return 1;
  const BenchOptions& options = bench.options;
  const double n_cases = options.interleave ? static_cast<double>(options.kv_types.size() * options.kv_lens.size()) : 1.0;
  const double wanted = static_cast<double>(kColdCaches * bench.cache_bytes) / n_cases, least = std::min(n_cases, 2.0);
  return static_cast<int32_t>(std::clamp(std::ceil(wanted / layer_bytes_read), least, static_cast<double>(kMostLayers)));
}

Result check_memory(int64_t kv_len, int32_t kv_type, double bytes) {
  const auto available = static_cast<double>(available_memory_bytes());
  if (bytes <= kMemoryShare * available) return {};
  return refuse("--kv-len = %lld in %s needs %.1f GiB, of %.1f GiB available", static_cast<long long>(kv_len),
                dtype_name(kv_type), bytes / 0x1p30, available / 0x1p30);
}

// Returns the (query, key) pairs of one query head in which the query sees the key.
int64_t head_pairs(const Workload& workload, int64_t q_head) {
  const BenchOptions& options = workload.options();
  const int64_t q_len = workload.geometry().q_len;
  int64_t pairs = 0;
  for (int64_t i = 0; i < options.batch; ++i)
    for (int64_t token = 0; token < q_len; ++token)
      pairs += visible_range(options, {workload.kv_len(i), q_len, token, q_head}).n_keys();
  return pairs;
}

Result timed_attend(Workload* workload, int32_t layer_idx, double* seconds) {
  const auto start = std::chrono::steady_clock::now();
  Result result = workload->attend(layer_idx);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  *seconds = elapsed.count();
  return result;
}

// Returns the bytes read per call of the step between `before` and `after`, by the session's statistics.
int64_t bytes_per_call(const tandem_session_stats& before, const tandem_session_stats& after, int64_t n_calls) {
  return (after.resident_kv_bytes_read - before.resident_kv_bytes_read + after.host_kv_bytes_read -
          before.host_kv_bytes_read) /
         n_calls;
}

}  // namespace

// The session's statistics tell how much a step has read.
Result CaseTiming::run_step(bool keep) {
  const int32_t n_layers = workload_->geometry().n_layers;
  tandem_session_stats before, after;
  std::vector<double> seconds(static_cast<size_t>(n_layers));
  TOOL_TRY(workload_->stats(&before));
  TOOL_TRY(workload_->step_begin());
  for (int32_t layer_idx = 0; layer_idx < n_layers; ++layer_idx)
    TOOL_TRY(timed_attend(workload_.get(), layer_idx, &seconds[static_cast<size_t>(layer_idx)]));
  TOOL_TRY(workload_->step_end());
  TOOL_TRY(workload_->stats(&after));
  if (!grows(bench_.options)) TOOL_TRY(workload_->truncate());
  if (!keep) return {};
  measurement_.kv_bytes = bytes_per_call(before, after, n_layers);
  measurement_.dense_kv_bytes = (after.dense_kv_bytes - before.dense_kv_bytes) / n_layers;
  measurement_.pairs = (after.pattern_pairs - before.pattern_pairs) / n_layers;
  measurement_.dense_pairs = (after.pattern_dense_pairs - before.pattern_dense_pairs) / n_layers;
  for (const double s : seconds) us_.push_back(s * 1e6);
  return {};
}

Result CaseTiming::repeat() {
  if (measurement_.check != "ok") return {};
  const bool wakes = bench_.options.mode == Mode::kWake;
  TOOL_TRY(check_interrupted());
  for (int64_t i = 0; i < (wakes ? kWakeCalls : 1); ++i) TOOL_TRY(run_step(true));
  ++measurement_.n_repeats;
  if (wakes) return {};
  ErrorSlot error;
  TOOL_TRY(error.check(tandem_engine_drain(bench_.engine, -1, error.out())));
  limit_gbps_.push_back(bench_.read->measure());
  if (matmul_) limit_gflops_.push_back(matmul_->measure());
  return {};
}

// Checks the statistics, because wrong ones would make every figure worthless: policy "all" reads every key once.
std::string CaseTiming::check_bytes() const {
  const BenchOptions& options = bench_.options;
  if (options.policy != "all") return "ok";
  const Case& geometry = workload_->geometry();
  const int64_t last_len = geometry.kv_len + (grows(options) ? kWarmupSteps + measurement_.n_repeats - 1 : 0);
  const int64_t expected = options.batch * last_len * token_kv_bytes(options, geometry.kv_type);
  if (measurement_.kv_bytes == expected) return "ok";
  return text("failed: the session's statistics say %lld bytes of K and V read by a call, %lld are there",
              static_cast<long long>(measurement_.kv_bytes), static_cast<long long>(expected));
}

// Checks the number of pairs if positions alone determine the keys of every head. In calls of one query no pairs are
// counted.
std::string CaseTiming::check_pairs() const {
  const BenchOptions& options = bench_.options;
  const auto searches = [&](const tandem_head_pattern& head) { return !is_known_ahead(head, options.q_len); };
  const std::vector<tandem_head_pattern>& heads = options.patterns.heads;
  const bool counts = options.policy == "patterns" && options.q_len > 1;
  if (!counts || std::any_of(heads.begin(), heads.end(), searches)) return "ok";
  int64_t expected = 0;
  for (int64_t q_head = 0; q_head < options.n_q_heads; ++q_head) expected += head_pairs(*workload_, q_head);
  if (measurement_.pairs == expected) return "ok";
  return text("failed: the session's statistics say %lld pairs of a query and a key in a call, the patterns name %lld",
              static_cast<long long>(measurement_.pairs), static_cast<long long>(expected));
}

// Returns the pairs of all query heads. Only the session's statistics have the pairs of heads that search.
double CaseTiming::call_pairs() const {
  const BenchOptions& options = bench_.options;
  if (options.policy == "patterns") return static_cast<double>(measurement_.pairs);
  return static_cast<double>(options.n_q_heads) * static_cast<double>(head_pairs(*workload_, 0));
}

Measurement CaseTiming::finish() {
  if (measurement_.check == "ok") measurement_.check = check_bytes();
  if (measurement_.check == "ok") measurement_.check = check_pairs();
  measurement_.cold = measurement_.rotation_bytes >= kColdCaches * bench_.cache_bytes;
  if (measurement_.check != "ok") return measurement_;
  measurement_.us = spread_of(us_);
  measurement_.read_gbps = static_cast<double>(measurement_.kv_bytes) / measurement_.us.median * 1e-3;
  measurement_.limit_gbps = spread_of(limit_gbps_).median;
  // Multiplications and additions of both products.
  const double flops = 2.0 * call_pairs() * static_cast<double>(bench_.options.head_dim + bench_.options.v_head_dim);
  measurement_.gflops = flops / measurement_.us.median * 1e-3;
  measurement_.limit_gflops = spread_of(limit_gflops_).median;
  return measurement_;
}

Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {  // interpolates between neighbours
    const double place = share * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
  };
  return {at(0.1), at(0.5), at(0.9)};
}

Result CaseTiming::create(const Bench& bench, int64_t kv_len, int32_t kv_type, std::unique_ptr<CaseTiming>* timing) {
  const BenchOptions& options = bench.options;
  const int64_t token_bytes = options.batch * token_kv_bytes(options, kv_type);
  const double bytes_read = static_cast<double>(least_keys_read(options, kv_len)) * static_cast<double>(token_bytes);
  const Case geometry = {kv_len, options.q_len, kv_type, n_layers_for(bench, bytes_read)};
  const double layer_bytes = static_cast<double>(kv_len) * static_cast<double>(token_bytes);
  TOOL_TRY(check_memory(kv_len, kv_type, layer_bytes * geometry.n_layers));
  std::unique_ptr<CaseTiming> made(new CaseTiming(bench));
  Measurement& measurement = made->measurement_;
  measurement.kv_len = kv_len;
  measurement.q_len = options.q_len;
  measurement.kv_type = kv_type;
  measurement.n_layers = geometry.n_layers;
  measurement.rotation_bytes = static_cast<int64_t>(bytes_read) * geometry.n_layers;
  if (options.mode == Mode::kAppend || options.mode == Mode::kPrefill) {
    const bool bf16_kv = kv_type == TANDEM_BF16 && options.v_type_beside(kv_type) == TANDEM_BF16;
    const bool bf16 = bf16_kv && options.io_type == TANDEM_BF16 && bench.matmul_bf16;
    made->matmul_ = bf16 ? bench.matmul_bf16 : bench.matmul_f32;
    measurement.limit_type = bf16 ? TANDEM_BF16 : TANDEM_F32;
  }
  TOOL_TRY(Workload::create(bench.engine, options, geometry, &made->workload_));
  TOOL_TRY(made->prepare());
  *timing = std::move(made);
  return {};
}

Result CaseTiming::prepare() {
  const BenchOptions& options = bench_.options;
  TOOL_TRY(workload_->fill(options.q_len * (kWarmupSteps + options.repeats + 1)));
  TOOL_TRY(check_outputs(workload_.get(), bench_.matmul_rows, &measurement_.check));
  if (measurement_.check != "ok") return {};
  TOOL_TRY(workload_->truncate());
  for (int64_t i = 0; i < kWarmupSteps; ++i) TOOL_TRY(run_step(false));
  return {};
}

}  // namespace tools
