// SPDX-License-Identifier: MIT
#include "lib/pieces/route_options.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "lib/pieces/route_line.h"

namespace tandem {
namespace {

constexpr char kShared[] = "host+stream";

Status find_route(const char* name, RouteOptions* options) {
  using Choice = RouteOptions::Choice;
  std::string names;
  bool is_found = false;
  const auto look_at = [&](const char* known, Choice choice, size_t route, bool has_share) {
    names += names.empty() ? known : std::string(", ") + known;
    if (std::strcmp(known, name) != 0) return;
    options->name = known;
    options->choice = choice;
    options->route = route;
    options->has_share = has_share;
    is_found = true;
  };
  look_at("auto", Choice::kAuto, 0, false);
  look_at("host", Choice::kHost, 0, false);
  const std::span<const RouteLine> table = route_table();
  for (size_t r = 0; r < table.size(); ++r) {
    look_at(table[r].name, Choice::kGiven, r, false);
    if (r == kPlanStream) look_at(kShared, Choice::kGiven, r, true);
  }
  if (is_found) return {};
  return fail(TANDEM_ERROR_NOT_FOUND, "route", "route = \"%.64s\" is not one of %s", name, names.c_str());
}

Status resolve_recompute_share(double share, RouteOptions* options) {
  if (share == 0.0) return {};
  if (!(share > 0.0 && share <= 1.0))
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "recompute_share", "recompute_share = %g is not above 0 and at most 1",
                share);
  if (!options->asks_for(kPlanRecompute))
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "recompute_share",
                "recompute_share = %g with route \"%s\", not \"recompute\"", share, options->name);
  options->rebuilt_share = share;
  return {};
}

// Refuses layers whose keys the library rotates: the store holds these keys unrotated.
Status refuse_rotated(const char* route, const std::vector<Layer>& layers) {
  for (size_t l = 0; l < layers.size(); ++l)
    if (layers[l].rope != nullptr)
      return fail(TANDEM_ERROR_UNSUPPORTED, "route",
                  "route = \"%s\": the library rotates the keys of layer %zu, which the store has as they were before",
                  route, l);
  return {};
}

// stream_fraction is required by the route that uses it, and refused with other routes.
Status resolve_stream_share(const tandem_session_options& options, RouteOptions* made) {
  const double share = options.stream_fraction;
  if (!made->has_share && share == -1.0) return {};
  if (!made->has_share)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_fraction",
                "stream_fraction = %g is for route \"host+stream\" alone, route = \"%s\"", share, made->name);
  if (!(share >= 0.0 && share <= 1.0))
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_fraction",
                "stream_fraction = %g is not from 0 to 1, which route \"host+stream\" needs (\"auto\" measures it)", share);
  made->moved_share = share;
  return {};
}

}  // namespace

Status resolve_route_options(const tandem_session_options& options, const LayerPolicies& policies,
                             const std::vector<Layer>& layers, RouteOptions* resolved) {
  RouteOptions made;
  if (options.route != nullptr) TANDEM_TRY(find_route(options.route, &made));
  if (options.stream_buffer_bytes < 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes", "stream_buffer_bytes = %lld is negative",
                static_cast<long long>(options.stream_buffer_bytes));
  constexpr int64_t kUnit = 256, kMost = int64_t{1} << 40;
  if (options.stream_buffer_bytes > kMost)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes", "stream_buffer_bytes = %lld is more than 2^40",
                static_cast<long long>(options.stream_buffer_bytes));
  if (options.stream_buffer_bytes > 0) made.buffer_bytes = (options.stream_buffer_bytes + kUnit - 1) / kUnit * kUnit;
  TANDEM_TRY(resolve_stream_share(options, &made));
  TANDEM_TRY(resolve_recompute_share(options.recompute_share, &made));
  if (options.append_tokens < 0 || options.append_tokens > INT32_MAX)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "append_tokens", "append_tokens = %lld is not in 0 to 2^31 - 1",
                static_cast<long long>(options.append_tokens));
  made.append_tokens = options.append_tokens;
  if (options.stream_heads < 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_heads", "stream_heads = %lld is negative",
                static_cast<long long>(options.stream_heads));
  made.piece_heads = static_cast<int32_t>(std::min<int64_t>(options.stream_heads, INT32_MAX));
  if (made.is_given() && !policies.any([](const Policy& policy) { return can_stream(policy, true); }))
    return fail(TANDEM_ERROR_UNSUPPORTED, "route",
                "route = \"%s\" with policy \"%s\": it attends sinks alone outside the window", made.name, policies[0].name);
  for (size_t l = 0; made.asks_for(kPlanRecompute) && l < layers.size(); ++l)
    if (!can_stream(policies[l], false))
      return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"%s\" with policy \"%s\" in layer %zu: %s", made.name,
                  policies[l].name, l, "keys are made for queries that attend all of them");
  if (made.is_given()) TANDEM_TRY(refuse_rotated(made.name, layers));
  *resolved = made;
  return {};
}

}  // namespace tandem
