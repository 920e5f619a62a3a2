// SPDX-License-Identifier: MIT
#include "tools/bench/bench_output.h"

#include <algorithm>
#include <cmath>

#include "tools/common/engine_report.h"
#include "tools/common/flags.h"

namespace tools {
namespace {

double rounded(double value, double digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

bool is_compute(Mode mode) { return mode == Mode::kAppend || mode == Mode::kPrefill; }

double share_of(const BenchOptions& options, const Measurement& m) {
  return is_compute(options.mode) ? m.gflops / m.limit_gflops : m.read_gbps / m.limit_gbps;
}

const char* rotation_name(int32_t k_rotation) { return k_rotation == TANDEM_ROTATION_HADAMARD ? "hadamard" : "none"; }

// Returns "q8_0", or "q8_0, q4_0" if V has another type.
std::string type_names(const BenchOptions& options, int32_t kv_type) {
  const int32_t v_type = options.v_type_beside(kv_type);
  return v_type == kv_type ? dtype_name(kv_type) : text("%s, %s", dtype_name(kv_type), dtype_name(v_type));
}

// Returns a measurement as JSON; times and rates only if the check has passed.
Json record(const Bench& bench, const Measurement& m) {
  const BenchOptions& options = bench.options;
  Json json;
  json["bench"] = options.mode_name;
  json["type"] = dtype_name(m.kv_type);
  json["v_type"] = dtype_name(options.v_type_beside(m.kv_type));
  json["k_rotation"] = rotation_name(options.k_rotation_of(m.kv_type));
  json["io_type"] = dtype_name(options.io_type);
  json["kv_len"] = m.kv_len;
  json["q_len"] = m.q_len;
  json["batch"] = options.batch;
  json["ragged"] = options.ragged;
  json["q_heads"] = options.n_q_heads;
  json["kv_heads"] = options.n_kv_heads;
  json["head_dim"] = options.head_dim;
  json["v_head_dim"] = options.v_head_dim;
  json["v_aliases_k"] = options.v_aliases_k;
  json["rope_theta"] = options.rope_theta;
  json["page_tokens"] = options.page_tokens;
  json["policy"] = options.policy;
  json["patterns"] = options.patterns.path;
  json["pattern_layer"] = options.patterns.layer_idx;
  json["window"] = options.window;
  json["sinks"] = options.sinks;
  json["alpha"] = options.alpha;
  json["beta"] = options.beta;
  json["isa"] = bench.isa;
  json["threads"] = bench.n_threads;
  json["layers"] = m.n_layers;
  json["repeats"] = m.n_repeats;
  json["state"] = m.cold ? "cold" : "warm";
  json["rotation_bytes"] = m.rotation_bytes;
  json["check"] = m.check;
  if (m.check != "ok") return json;
  json["median_us"] = rounded(m.us.median, 2);
  json["p10_us"] = rounded(m.us.p10, 2);
  json["p90_us"] = rounded(m.us.p90, 2);
  json["kv_bytes"] = m.kv_bytes;
  json["dense_kv_bytes"] = m.dense_kv_bytes;
  json["pairs"] = m.pairs;
  json["dense_pairs"] = m.dense_pairs;
  json["read_gbps"] = rounded(m.read_gbps, 3);
  if (options.mode == Mode::kWake) return json;
  json["limit_gbps"] = rounded(m.limit_gbps, 3);
  json["limit_buffer_bytes"] = bench.read->buffer_bytes();
  json["limit_way"] = bench.read->best_way();
  if (is_compute(options.mode)) {
    json["gflops"] = rounded(m.gflops, 2);
    json["limit_gflops"] = rounded(m.limit_gflops, 2);
    json["limit_type"] = dtype_name(m.limit_type);
    json["limit_shape"] = (m.limit_type == TANDEM_BF16 ? bench.matmul_bf16 : bench.matmul_f32)->best_shape();
  }
  json["share"] = rounded(share_of(options, m), 4);
  return json;
}

std::vector<std::string> columns(Mode mode) {
  std::vector<std::string> names = {
      "bench",   "type",     "v_type",         "k_rotation", "io_type",        "kv_len",      "q_len",      "batch",
      "ragged",  "q_heads",  "kv_heads",       "head_dim",   "v_head_dim",     "v_aliases_k", "rope_theta", "page_tokens",
      "policy",  "patterns", "pattern_layer",  "window",     "sinks",          "alpha",       "beta",       "isa",
      "threads", "layers",   "repeats",        "state",      "rotation_bytes", "check",       "median_us",  "p10_us",
      "p90_us",  "kv_bytes", "dense_kv_bytes", "pairs",      "dense_pairs",    "read_gbps"};
  if (mode == Mode::kWake) return names;
  names.insert(names.end(), {"limit_gbps", "limit_buffer_bytes", "limit_way"});
  if (is_compute(mode)) names.insert(names.end(), {"gflops", "limit_gflops", "limit_type", "limit_shape"});
  names.push_back("share");
  return names;
}

std::string csv_cell(const Json& value) {
  if (!value.is_string()) return value.dump();
  const std::string plain = value.get<std::string>();
  if (plain.find_first_of(",\"\n") == std::string::npos) return plain;
  std::string quoted = "\"";
  for (const char c : plain) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string joined(const std::vector<std::string>& cells) {
  std::string line;
  for (const std::string& cell : cells) line += (line.empty() ? "" : ",") + cell;
  return line + "\n";
}

constexpr size_t kNumberWidth = 8;  // width of most figures: 123456.7, 12345678

struct Column {
  std::string header;
  bool right;
  std::string cell;
};

std::vector<Column> markdown_row(const Bench& bench, const Measurement& m) {
  const BenchOptions& options = bench.options;
  const auto number = [](int64_t value) { return std::to_string(value); };
  std::vector<Column> row = {{"K, V", false, type_names(options, m.kv_type)}, {"keys", true, number(m.kv_len)}};
  if (is_compute(options.mode)) row.push_back({"queries", true, number(m.q_len)});
  if (options.batch > 1) row.push_back({options.ragged ? "ragged batch" : "batch", true, number(options.batch)});
  row.push_back({"policy", false, options.policy});
  const bool ok = m.check == "ok";
  const auto real = [&](const char* header, int digits, double value) {
    row.push_back({header, true, ok ? text("%.*f", digits, value) : ""});
  };
  const double us_digits = m.us.median < 100 ? 2 : m.us.median < 10000 ? 1 : 0;
  const int digits = static_cast<int>(us_digits);
  real("median us", digits, m.us.median);
  real("p10", digits, m.us.p10);
  real("p90", digits, m.us.p90);
  real("KV MiB", 2, static_cast<double>(m.kv_bytes) / 0x1p20);
  if (options.policy != "all") real("of dense", 3, static_cast<double>(m.kv_bytes) / static_cast<double>(m.dense_kv_bytes));
  if (options.policy == "patterns" && options.q_len > 1)
    real("of pairs", 3, static_cast<double>(m.pairs) / static_cast<double>(m.dense_pairs));
  if (is_compute(options.mode)) {
    real("GFLOP/s", 0, m.gflops);
    real("limit", 0, m.limit_gflops);
  } else if (options.mode == Mode::kDecode) {
    real("GB/s", 1, m.read_gbps);
    real("limit", 1, m.limit_gbps);
  }
  if (options.mode != Mode::kWake) real("share", 2, share_of(options, m));
  row.push_back({"state", false, m.cold ? "cold" : "warm"});
  row.push_back({"check", false, m.check});
  return row;
}

std::string title(const Bench& bench) {
  const BenchOptions& options = bench.options;
  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  std::string line = text("%s: one layer, %lld query heads, %lld KV heads of %lld, %d threads, %s",
                          options.mode_name.c_str(), number(options.n_q_heads), number(options.n_kv_heads),
                          number(options.head_dim), bench.n_threads, bench.isa.c_str());
  const auto is_rotated = [&](int32_t type) { return options.k_rotation_of(type) == TANDEM_ROTATION_HADAMARD; };
  if (options.k_rotation == TANDEM_ROTATION_HADAMARD)
    line += ", K rotated (hadamard)";
  else if (std::any_of(options.kv_types.begin(), options.kv_types.end(), is_rotated))
    line += ", 4-bit K rotated (hadamard)";
  if (options.policy == "patterns")
    line += text(", layer %lld of %s", number(options.patterns.layer_idx), options.patterns.path.c_str());
  else if (options.policy != "all")
    line += text(", window %lld, sinks %lld", number(options.window), number(options.sinks));
  if (is_compute(options.mode))
    line += ". The limit is oneDNN's matrix product in the same run";
  else if (options.mode == Mode::kDecode)
    line += ". The limit is the memory's read bandwidth in the same run";
  return line + ".\n\n";
}

}  // namespace

std::string json_line(const Bench& bench, const Measurement& measurement) {
  return record(bench, measurement).dump() + "\n";
}

std::string csv_header(const BenchOptions& options) { return joined(columns(options.mode)); }

std::string csv_line(const Bench& bench, const Measurement& measurement) {
  const Json json = record(bench, measurement);
  std::vector<std::string> cells;
  for (const std::string& name : columns(bench.options.mode))
    cells.push_back(json.contains(name) ? csv_cell(json[name]) : "");
  return joined(cells);
}

MarkdownRows::MarkdownRows(const Bench& bench) : bench_(bench) {
  for (const int32_t type : bench.options.kv_types)
    type_width_ = std::max(type_width_, type_names(bench.options, type).size());
  for (const int64_t kv_len : bench.options.kv_lens) keys_width_ = std::max(keys_width_, std::to_string(kv_len).size());
}

std::string MarkdownRows::add(const Measurement& measurement) {
  const std::vector<Column> row = markdown_row(bench_, measurement);
  std::vector<std::string> cells;
  for (const Column& column : row) cells.push_back(column.cell);
  if (has_head_) return table_.row(cells);
  has_head_ = true;
  std::vector<std::string> header;
  std::vector<bool> right_aligned;
  std::vector<size_t> widths;
  for (const Column& column : row) {
    header.push_back(column.header);
    right_aligned.push_back(column.right);
    widths.push_back(column.right ? kNumberWidth : column.cell.size());
  }
  widths[0] = std::max(widths[0], type_width_);
  widths[1] = keys_width_;
  widths.back() = 0;  // the message of a failed check is long
  table_ = RowTable(header, right_aligned, widths);
  return title(bench_) + table_.head() + table_.row(cells);
}

}  // namespace tools
