// SPDX-License-Identifier: MIT
// One case: fills, checks, then times steps and measures the machine's limit after each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/bench/bench_options.h"
#include "tools/bench/matmul_rate.h"
#include "tools/bench/read_bandwidth.h"
#include "tools/bench/workload.h"
#include "tools/common/engine_report.h"
#include "tools/common/result.h"

namespace tools {

// The engine and the limits of its machine.
struct Bench {
  BenchOptions options;
  tandem_engine* engine = nullptr;
  std::string isa;  // from the engine's report
  int32_t n_threads = 0;
  MatmulRows matmul_rows;
  int64_t cache_bytes = 0;  // last level
  PinnedTeam* team = nullptr;
  ReadBandwidth* read = nullptr;
  MatmulRate* matmul_f32 = nullptr;   // for append and prefill
  MatmulRate* matmul_bf16 = nullptr;  // null: oneDNN has no bf16 products
};

struct Spread {
  double p10 = 0, median = 0, p90 = 0;
};
Spread spread_of(std::vector<double> values);

struct Measurement {
  int64_t kv_len = 0, q_len = 0;
  int32_t kv_type = 0;
  int32_t n_layers = 0;
  int64_t rotation_bytes = 0;  // least bytes of K and V read between two calls on the same layer
  bool cold = false;           // rotation_bytes is at least kColdCaches times the last-level cache
  std::string check;           // "ok", or the fault; then the members below are empty
  int64_t n_repeats = 0;       // fewer than requested after Ctrl-C
  Spread us;                   // one attend call
  int64_t kv_bytes = 0;        // K and V read by one call
  int64_t dense_kv_bytes = 0;  // K and V that policy "all" would have read
  double read_gbps = 0;        // median
  double limit_gbps = 0;       // median of the passes between the steps
  int64_t pairs = 0;           // (query, key) pairs that appends under "patterns" attended, in all query heads of a call
  int64_t dense_pairs = 0;     // the pairs of policy "all"
  double gflops = 0;           // over unmasked (query, key) pairs
  double limit_gflops = 0;
  int32_t limit_type = 0;  // type of the limit's products
};

inline constexpr int64_t kColdCaches = 8;

// The phases of a case: create() fills, checks and warms up; then repeat() is called options.repeats times; then finish().
// Repeats of other cases may come between. finish() needs at least one repeat.
class CaseTiming {
 public:
  static Result create(const Bench& bench, int64_t kv_len, int32_t kv_type, std::unique_ptr<CaseTiming>* timing);
  Result repeat();  // times a step over all layers, then measures the limit; does nothing if the check has failed
  Measurement finish();
  // True if finish() has a result to return.
  bool has_result() const { return measurement_.check != "ok" || measurement_.n_repeats > 0; }
  // Bytes of K and V read between two calls on the same layer. Set before finish() if other cases come between.
  int64_t rotation_bytes() const { return measurement_.rotation_bytes; }
  void set_rotation_bytes(int64_t bytes) { measurement_.rotation_bytes = bytes; }

 private:
  explicit CaseTiming(const Bench& bench) : bench_(bench) {}
  Result prepare();
  Result run_step(bool keep);
  std::string check_bytes() const;
  std::string check_pairs() const;
  double call_pairs() const;

  const Bench& bench_;
  std::unique_ptr<Workload> workload_;
  MatmulRate* matmul_ = nullptr;  // null: not needed
  Measurement measurement_;
  std::vector<double> us_, limit_gbps_, limit_gflops_;
};

}  // namespace tools
