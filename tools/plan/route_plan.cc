// SPDX-License-Identifier: MIT
#include "tools/plan/route_plan.h"

#include "tools/common/flags.h"

namespace tools {

Result make_routes(tandem_session* session, const std::vector<int64_t>& kv_lens, int64_t q_len, PlannedRoutes* routes) {
  ErrorSlot error;
  const std::vector<int64_t> q_lens(kv_lens.size(), q_len);
  const int32_t status = tandem_plan(&routes->plan, session, 0, kv_lens.data(), q_lens.data(),
                                     static_cast<int64_t>(kv_lens.size()), error.out());
  const Result result = error.check(status);
  // CAPACITY: no room for the engine's measurements. INVALID_STATE: "recompute" without weights. The plan of memory is still
  // valid.
  if (status != TANDEM_ERROR_UNSUPPORTED && status != TANDEM_ERROR_CAPACITY && status != TANDEM_ERROR_INVALID_STATE)
    return result;
  routes->reason = result.message();
  return {};
}

std::string routes_text(int64_t kv_len, int64_t q_len, const PlannedRoutes& routes) {
  const auto length = static_cast<long long>(kv_len);
  if (!routes.reason.empty()) return text("%lld tokens: no routes: %s\n", length, routes.reason.c_str());
  const tandem_route_plan& plan = routes.plan;
  const auto ms = [](int64_t ns) { return static_cast<double>(ns) * 1e-6; };
  const std::string rebuilt = plan.recompute_tokens == 0
                                  ? ""
                                  : text(", %lld made of hidden states (%.3f ms)",
                                         static_cast<long long>(plan.recompute_tokens), ms(plan.device_ns));
  return text(
      "%lld tokens: a layer's %s %.3f ms: %lld keys in windows, %lld by the CPU (%.3f ms), "
      "%lld over the bus (%.3f ms)%s; the CPU alone %.3f ms, the bus alone %.3f ms\n",
      length, q_len == 1 ? "decode" : "append", ms(plan.total_ns), static_cast<long long>(plan.resident_tokens),
      static_cast<long long>(plan.host_tokens), ms(plan.host_ns), static_cast<long long>(plan.stream_tokens),
      ms(plan.bus_ns), rebuilt.c_str(), ms(plan.host_alone_ns), ms(plan.stream_alone_ns));
}

Result routes_json(const PlannedRoutes& routes, Json* json) {
  if (!routes.reason.empty()) {
    (*json)["reason"] = routes.reason;
    return {};
  }
  return route_report(routes.plan, json);
}

}  // namespace tools
