// SPDX-License-Identifier: MIT
#include "tools/common/engine_report.h"

#include <functional>

namespace tools {
namespace {

using WriteFn = std::function<int32_t(char* buffer, size_t buffer_bytes, size_t* needed_bytes, tandem_error** error)>;

Result read_json(const char* what, const WriteFn& write, Json* json) {
  ErrorSlot error;
  size_t needed_bytes = 0;
  TOOL_TRY(error.check(write(nullptr, 0, &needed_bytes, error.out())));
  std::string buffer(needed_bytes, '\0');
  TOOL_TRY(error.check(write(buffer.data(), buffer.size(), nullptr, error.out())));
  *json = Json::parse(buffer.c_str(), nullptr, false);
  if (json->is_discarded()) return refuse("%s is not JSON: %s", what, buffer.c_str());
  return {};
}

}  // namespace

Result engine_report(const tandem_engine* engine, Json* report) {
  return read_json(
      "the engine's report",
      [=](char* buffer, size_t bytes, size_t* needed, tandem_error** error) {
        return tandem_engine_report(buffer, bytes, needed, engine, error);
      },
      report);
}

Result plan_report(const tandem_memory_plan& plan, Json* report) {
  return read_json(
      "the memory plan's report",
      [&](char* buffer, size_t bytes, size_t* needed, tandem_error** error) {
        return tandem_plan_report(buffer, bytes, needed, &plan, error);
      },
      report);
}

Result route_report(const tandem_route_plan& plan, Json* report) {
  return read_json(
      "the routes' report",
      [&](char* buffer, size_t bytes, size_t* needed, tandem_error** error) {
        return tandem_route_report(buffer, bytes, needed, &plan, error);
      },
      report);
}

Result matmul_rows_of(const Json& report, MatmulRows* rows) {
  const Json member = find_member(report, "matmul_rows");
  const Json bf16 = find_member(member, "bf16"), other = find_member(member, "other");
  if (!bf16.is_number_integer() || !other.is_number_integer())
    return refuse("the engine's report names no matmul_rows of bf16 and other: %s", report.dump().c_str());
  *rows = {bf16.get<int64_t>(), other.get<int64_t>()};
  return {};
}

Result open_device_of(const Json& report, EngineDevice* device) {
  const Json devices = find_member(report, "devices");
  for (const Json& each : devices) {
    const Json idx = find_member(each, "device"), name = find_member(each, "name");
    if (find_member(each, "state") != "open" || !idx.is_number_integer() || !name.is_string()) continue;
    *device = {idx.get<int32_t>(), name.get<std::string>()};
    return {};
  }
  return refuse("the engine's report names no device that is open: %s", devices.dump().c_str());
}

Json find_member(const Json& json, const std::string& name) {
  if (json.is_object() && json.contains(name)) return json.at(name);
  if (!json.is_structured()) return nullptr;
  for (const Json& member : json) {
    Json found = find_member(member, name);
    if (!found.is_null()) return found;
  }
  return nullptr;
}

}  // namespace tools
