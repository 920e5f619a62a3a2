// SPDX-License-Identifier: MIT
// tandem-bench: measures attention as a share of what this machine's memory or cores can reach.
//
// Every figure needs a passing check of the same outputs in the same run. Every share needs a limit measured in the same
// run, between the timed repeats. measure.h has the order of work.
#include <cstdio>

#include "examples/generate/interrupt.h"
#include "examples/generate/progress_bar.h"
#include "tools/bench/bench_options.h"
#include "tools/bench/bench_output.h"
#include "tools/bench/machine_facts.h"
#include "tools/bench/measure.h"
#include "tools/bench/workload.h"
#include "tools/common/engine_report.h"
#include "tools/common/flags.h"
#include "tools/common/handles.h"
#include "tools/common/run_tool.h"

namespace tools {
namespace {

// The objects that Bench points to.
struct Machine {
  Engine engine;
  std::unique_ptr<PinnedTeam> team;
  std::unique_ptr<ReadBandwidth> read;
  std::unique_ptr<MatmulRate> matmul_f32, matmul_bf16;
};

Result start_engine(const BenchOptions& options, Machine* machine, Bench* bench) {
  ErrorSlot error;
  tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
  engine_options.n_threads = static_cast<int32_t>(options.threads);
  engine_options.cpu_isa = options.isa.empty() ? nullptr : options.isa.c_str();
  tandem_engine* engine = nullptr;
  TOOL_TRY(error.check(tandem_engine_create(&engine, &engine_options, error.out())));
  machine->engine.reset(engine);
  bench->engine = engine;
  Json report;
  TOOL_TRY(engine_report(engine, &report));
  const Json isa = find_member(report, "isa"), n_workers = find_member(report, "n_workers");
  if (!isa.is_string() || !n_workers.is_number_integer())
    return refuse("the engine's report names no isa or no n_workers: %s", report.dump().c_str());
  bench->isa = isa.get<std::string>();
  bench->n_threads = n_workers.get<int32_t>();
  return matmul_rows_of(report, &bench->matmul_rows);
}

// Size of the read probe's buffer, in last-level caches. With a few, many lines are still cached when the probe reads them
// again. With 16, 2 % of them are.
constexpr int64_t kProbeCaches = 16;

// Starts as many threads as the engine has.
Result start_probes(const BenchOptions& options, Machine* machine, Bench* bench) {
  bench->cache_bytes = last_level_cache_bytes(cpus_by_core());
  if (options.mode == Mode::kWake) return {};
  machine->team = std::make_unique<PinnedTeam>(bench->n_threads);
  bench->team = machine->team.get();
  const int64_t probe_bytes = options.probe_mib > 0 ? options.probe_mib << 20 : kProbeCaches * bench->cache_bytes;
  TOOL_TRY(ReadBandwidth::create(bench->team, probe_bytes, &machine->read));
  bench->read = machine->read.get();
  if (options.mode == Mode::kDecode) return {};
  TOOL_TRY(MatmulRate::create(bench->team, TANDEM_F32, &machine->matmul_f32));
  bench->matmul_f32 = machine->matmul_f32.get();
  if (MatmulRate::create(bench->team, TANDEM_BF16, &machine->matmul_bf16).ok())
    bench->matmul_bf16 = machine->matmul_bf16.get();
  return {};
}

// Measuring continues only while the output can be written.
Result print(const std::string& line) {
  std::fputs(line.c_str(), stdout);
  return flush_stdout();
}

// Prints results as they come.
struct Printer {
  const Bench& bench;
  MarkdownRows markdown;
  bool* all_ok;
  size_t n_printed = 0;

  Result add(const Measurement& measurement) {
    *all_ok = *all_ok && measurement.check == "ok";
    ++n_printed;
    if (bench.options.output == Output::kCsv) return print(csv_line(bench, measurement));
    if (bench.options.output == Output::kJson) return print(json_line(bench, measurement));
    return print(markdown.add(measurement));
  }
};

using Cases = std::vector<std::unique_ptr<CaseTiming>>;

Result repeat_in_turns(const Cases& cases, const std::string& label, int64_t n) {
  generate::ProgressBar bar(label, n, "repeats");
  for (int64_t i = 0; i < n; ++i) {
    for (const auto& each : cases) TOOL_TRY(each->repeat());
    bar.show(i + 1);
  }
  return {};
}

// Repeats the cases in turns and removes them. After Ctrl-C prints those with at least one repeat.
Result run_repeats(Cases* cases, const std::string& label, int64_t n, Printer* printer) {
  if (cases->empty()) return {};
  int64_t rotation_bytes = 0;
  for (const auto& each : *cases) rotation_bytes += each->rotation_bytes();
  for (auto& each : *cases) each->set_rotation_bytes(rotation_bytes);
  const Result repeated = repeat_in_turns(*cases, label, n);
  if (!repeated.ok() && !repeated.is_interrupted()) return repeated;
  for (auto& each : *cases)
    if (each->has_result()) TOOL_TRY(printer->add(each->finish()));
  cases->clear();
  return repeated;
}

Result run_cases(const Bench& bench, Printer* printer) {
  const BenchOptions& options = bench.options;
  if (options.output == Output::kCsv) TOOL_TRY(print(csv_header(options)));
  const size_t n_cases = options.kv_types.size() * options.kv_lens.size();
  size_t n_begun = 0;
  Cases cases;
  for (const int32_t kv_type : options.kv_types) {
    for (const int64_t kv_len : options.kv_lens) {
      const std::string label =
          text("%zu/%zu: %lld keys, %s", ++n_begun, n_cases, static_cast<long long>(kv_len), dtype_name(kv_type));
      cases.emplace_back();
      TOOL_TRY(CaseTiming::create(bench, kv_len, kv_type, &cases.back()));
      if (!options.interleave) TOOL_TRY(run_repeats(&cases, label, options.repeats, printer));
    }
  }
  return run_repeats(&cases, text("%zu cases", n_cases), options.repeats, printer);
}

// Runs all cases. After Ctrl-C reports how many have results.
Result measure(const Bench& bench, bool* all_ok) {
  Printer printer{bench, MarkdownRows(bench), all_ok};
  const Result measured = run_cases(bench, &printer);
  if (!measured.is_interrupted()) return measured;
  const size_t n_cases = bench.options.kv_types.size() * bench.options.kv_lens.size();
  return interrupted("interrupted; rows of %zu cases: %zu", n_cases, printer.n_printed);
}

Result bench_main(int argc, const char* const* argv, bool* all_ok) {
  Bench bench;
  TOOL_TRY(parse_bench_options(argc, argv, &bench.options));
  if (bench.options.asked != Asked::kNothing) return answer(bench.options.asked, "tandem-bench", bench_help());
  generate::catch_interrupts();
  Machine machine;
  TOOL_TRY(start_engine(bench.options, &machine, &bench));
  for (const int32_t kv_type : bench.options.kv_types)
    TOOL_TRY(Workload::check_supported(bench.engine, bench.options, kv_type));
  TOOL_TRY(start_probes(bench.options, &machine, &bench));
  return measure(bench, all_ok);
}

}  // namespace
}  // namespace tools

int main(int argc, char** argv) { return tools::run_tool("tandem-bench", argc, argv, tools::bench_main); }
