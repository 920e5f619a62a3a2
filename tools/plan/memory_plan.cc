// SPDX-License-Identifier: MIT
#include "tools/plan/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "tools/common/flags.h"
#include "tools/common/handles.h"
#include "tools/common/text_table.h"

namespace tools {
namespace {

Result make_model(const PlanOptions& options, Model* model) {
  ErrorSlot error;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = static_cast<int32_t>(options.n_q_heads);
  layer.n_kv_heads = static_cast<int32_t>(options.n_kv_heads);
  layer.k_head_dim = static_cast<int32_t>(options.head_dim);
  layer.v_head_dim = static_cast<int32_t>(options.v_head_dim);
  layer.v_aliases_k = options.v_aliases_k ? 1 : 0;
  tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;  // without weights: a plan needs only their shapes
  projection.hidden_dim = static_cast<int32_t>(options.hidden_dim);
  projection.w_type = TANDEM_BF16;
  if (options.x_type != 0) layer.projection = &projection;
  const std::vector<tandem_layer_options> layers(static_cast<size_t>(options.n_layers), layer);
  tandem_model* made = nullptr;
  TOOL_TRY(error.check(tandem_model_create(&made, layers.data(), static_cast<int32_t>(options.n_layers), error.out())));
  model->reset(made);
  return {};
}

tandem_cache_options cache_options(const PlanOptions& options) {
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  cache.k_type = options.kv_type;
  cache.v_type = options.v_type;
  cache.x_type = options.x_type;
  cache.page_tokens = static_cast<int32_t>(options.page_tokens);
  cache.host_cap_bytes = static_cast<int64_t>(std::llround(options.host_cap_gib * 0x1p30));
  cache.device_cap_bytes = static_cast<int64_t>(std::llround(options.device_cap_gib * 0x1p30));
  return cache;
}

// A device that prunes has all keys of a sequence in its window. So has one that follows head patterns, unless --window is
// given.
int64_t window_of(const PlanOptions& options, bool has_device) {
  const bool has_all = options.prunes() || (options.follows_patterns() && options.window < 0);
  if (!has_device || !has_all) return options.window;
  return std::max(options.window, *std::max_element(options.kv_lens.begin(), options.kv_lens.end()));
}

// The structs that a session's options point to.
struct PolicySettings {
  explicit PolicySettings(const PlanOptions& options) {
    if (!options.pruning.empty()) pruning.preset = options.pruning.c_str();
    patterns.heads = options.heads.heads.data();
    patterns.n_heads = std::ssize(options.heads.heads);
  }
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  tandem_patterns patterns = TANDEM_PATTERNS_INIT;
};

tandem_session_options session_options(const PlanOptions& options, bool has_device, const PolicySettings& settings) {
  constexpr int64_t kMostAppended = 32768;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
  session.policy = tandem_policy_name(options.policy);
  session.pruning = options.prunes() ? &settings.pruning : nullptr;
  session.patterns = options.follows_patterns() ? &settings.patterns : nullptr;
  session.window_tokens = window_of(options, has_device);
  session.sink_tokens = options.sinks;
  session.route = options.route_name();
  session.stream_fraction = options.stream_share;
  session.recompute_share = options.recompute_share;
  if (options.q_len > 1) session.append_tokens = std::min(options.q_len, kMostAppended);
  return session;
}

std::string bytes_text(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 1 << 10) return text("%lld B", static_cast<long long>(bytes));
  if (bytes < 1 << 20) return text("%.1f KiB", value / 0x1p10);
  if (bytes < 1 << 30) return text("%.1f MiB", value / 0x1p20);
  return text("%.2f GiB", value / 0x1p30);
}

struct PlanRow {
  const char* tier;
  const char* what;
  int64_t (*bytes)(const tandem_memory_plan& plan);
};
constexpr PlanRow kPlanRows[] = {
    {"host", "K, V, hidden states", [](const tandem_memory_plan& plan) { return plan.host_kv_bytes; }},
    {"host", "session: MAW, tables", [](const tandem_memory_plan& plan) { return plan.host_session_bytes; }},
    {"host", "selected keys, at most", [](const tandem_memory_plan& plan) { return plan.selection_max_bytes; }},
    {"host", "all of these",
     [](const tandem_memory_plan& plan) { return plan.host_kv_bytes + plan.host_session_bytes + plan.selection_max_bytes; }},
    {"device", "window", [](const tandem_memory_plan& plan) { return plan.device_window_bytes; }},
    {"device", "states, flags, staging", [](const tandem_memory_plan& plan) { return plan.device_work_bytes; }},
    {"device", "buffers of streams", [](const tandem_memory_plan& plan) { return plan.device_stream_bytes; }},
    {"device", "projections", [](const tandem_memory_plan& plan) { return plan.device_weights_bytes; }},
    {"device", "all of these",
     [](const tandem_memory_plan& plan) {
       return plan.device_window_bytes + plan.device_work_bytes + plan.device_stream_bytes + plan.device_weights_bytes;
     }},
    {"pinned", "hand-over", [](const tandem_memory_plan& plan) { return plan.shared_bytes; }},
    {"read", "stage 1, a decode step on average", [](const tandem_memory_plan& plan) { return plan.judged_first_bytes; }},
    {"read", "all stages, on average", [](const tandem_memory_plan& plan) { return plan.judged_kv_bytes; }},
    {"read", "where all of them run", [](const tandem_memory_plan& plan) { return plan.judged_max_bytes; }},
};

bool is_shown(const PlanRow& row, const PlanOptions& options, bool has_device) {
  const std::string_view tier = row.tier;
  if (tier == "read") return options.prunes();
  return has_device || tier == "host";
}

}  // namespace

Result make_plans(tandem_engine* engine, const PlanOptions& options, bool with_routes, std::vector<PlannedLength>* plans) {
  Model model;
  Cache planned_cache;
  Session planned_session;
  TOOL_TRY(make_model(options, &model));
  const tandem_cache_options cache = cache_options(options);
  const PolicySettings settings(options);
  const tandem_session_options session = session_options(options, with_routes, settings);
  ErrorSlot error;
  if (with_routes) {
    tandem_cache* made_cache = nullptr;
    tandem_session* made_session = nullptr;
    TOOL_TRY(error.check(tandem_cache_create(&made_cache, engine, model.get(), &cache, error.out())));
    planned_cache.reset(made_cache);
    TOOL_TRY(error.check(tandem_session_create(&made_session, made_cache, &session, error.out())));
    planned_session.reset(made_session);
  }
  for (const int64_t kv_len : options.kv_lens) {
    PlannedLength planned;
    planned.kv_len = kv_len;
    planned.has_routes = with_routes;
    const std::vector<int64_t> kv_lens(static_cast<size_t>(options.batch), kv_len);
    const int32_t status =
        tandem_plan_memory(&planned.plan, engine, model.get(), &cache, &session, kv_lens.data(), options.batch, error.out());
    const Result result = error.check(status);
    if (status == TANDEM_ERROR_CAPACITY)
      planned.over_cap = result.message();
    else if (!result.ok())
      return result;
    if (with_routes) TOOL_TRY(make_routes(planned_session.get(), kv_lens, options.q_len, &planned.routes));
    plans->push_back(std::move(planned));
  }
  return {};
}

std::string plans_text(const PlanOptions& options, const std::vector<PlannedLength>& plans) {
  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  std::string types = dtype_name(options.kv_type);
  if (options.v_type != options.kv_type) types = text("K %s, V %s", types.c_str(), dtype_name(options.v_type));
  std::string out = text(
      "memory plan: %lld layers, %lld query heads, %lld KV heads of %lld, %s, policy %s, %lld sequence%s; %s per token\n\n",
      number(options.n_layers), number(options.n_q_heads), number(options.n_kv_heads), number(options.head_dim),
      types.c_str(), tandem_policy_name(options.policy), number(options.batch), options.batch == 1 ? "" : "s",
      bytes_text(plans[0].plan.kv_token_bytes).c_str());
  TextTable table;
  table.header = {"tier", "what"};
  table.right_aligned = {false, false};
  for (const PlannedLength& planned : plans) {
    table.header.push_back(text("%lld tokens", number(planned.kv_len)));
    table.right_aligned.push_back(true);
  }
  for (const PlanRow& row : kPlanRows) {
    if (!is_shown(row, options, plans[0].has_routes)) continue;
    table.rows.push_back({row.tier, row.what});
    for (const PlannedLength& planned : plans) table.rows.back().push_back(bytes_text(row.bytes(planned.plan)));
  }
  out += table.markdown();
  for (const PlannedLength& planned : plans)
    if (!planned.over_cap.empty()) out += text("\n%lld tokens: %s\n", number(planned.kv_len), planned.over_cap.c_str());
  out += "\n";
  if (!plans[0].has_routes) out += "no routes: no device was asked for (--backend cuda), and the CPU attends every key\n";
  for (const PlannedLength& planned : plans)
    if (planned.has_routes) out += routes_text(planned.kv_len, options.q_len, planned.routes);
  return out;
}

Result plans_json(const PlanOptions& options, const std::vector<PlannedLength>& plans, Json* json) {
  *json = Json::object();
  (*json)["layers"] = options.n_layers;
  (*json)["q_heads"] = options.n_q_heads;
  (*json)["kv_heads"] = options.n_kv_heads;
  (*json)["head_dim"] = options.head_dim;
  (*json)["v_head_dim"] = options.v_head_dim;
  (*json)["v_aliases_k"] = options.v_aliases_k;
  (*json)["kv_type"] = dtype_name(options.kv_type);
  (*json)["v_type"] = dtype_name(options.v_type);
  if (options.x_type != 0) (*json)["x_type"] = dtype_name(options.x_type);
  (*json)["policy"] = tandem_policy_name(options.policy);
  const int64_t window = window_of(options, plans[0].has_routes);
  if (window >= 0) (*json)["window"] = window;
  if (!options.pruning.empty()) (*json)["pruning"] = options.pruning;
  if (!options.patterns_path.empty()) (*json)["patterns"] = options.patterns_path;
  if (options.sinks >= 0) (*json)["sinks"] = options.sinks;
  if (options.route >= 0) (*json)["route"] = options.route_name();
  (*json)["batch"] = options.batch;
  (*json)["q_len"] = options.q_len;
  (*json)["lengths"] = Json::array();
  for (const PlannedLength& planned : plans) {
    Json entry, report;
    TOOL_TRY(plan_report(planned.plan, &report));
    entry["kv_len"] = planned.kv_len;
    entry["fits"] = planned.over_cap.empty();
    if (!planned.over_cap.empty()) entry["reason"] = planned.over_cap;
    entry["plan"] = report;
    if (planned.has_routes) TOOL_TRY(routes_json(planned.routes, &entry["routes"]));
    (*json)["lengths"].push_back(entry);
  }
  return {};
}

}  // namespace tools
