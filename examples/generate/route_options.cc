// SPDX-License-Identifier: MIT
#include "route_options.h"

#include "runtime.h"

namespace generate {
namespace {

std::vector<std::string> route_names() { return {"auto", "host", "stream", "host+stream", "recompute"}; }

}  // namespace

void RouteOptions::declare(Flags* flags) {
  flags->choice("--route",
                "with --kv host: who attends keys outside the window: auto (default), host (the CPU), stream (they cross\n"
                "the bus), host+stream, recompute (hidden states cross it, K and V are made of them)",
                route_names(), &route);
  flags->real("--stream-share", "with --route host+stream, which needs it: share of these keys that crosses the bus", 0, 1,
              &stream_share);
  flags->real("--recompute-share", "with --route recompute: share of these keys that is made (default 1)", 1e-9, 1,
              &recompute_share);
  flags->choice("--x-type", "with --route recompute: storage type of hidden states (default 16 bits, as --compute has them)",
                storage_types(), &x_type, 1);
  flags->integer("--stream-buffer", "with --kv host: bytes of each of the two buffers on the device (default 16 MiB)", 1,
                 int64_t{1} << 40, &buffer_bytes);
}

Failure RouteOptions::check(const Flags& flags, const EngineOptions& engine, const PolicyOptions& policy) const {
  if (engine.kv_place != kOnHost)
    return flags.refuse_given({"--route", "--stream-share", "--recompute-share", "--x-type", "--stream-buffer"},
                              "is for --kv host alone");
  if (has_all_keys(engine, policy))
    return {"--kv: \"host\" with --policy \"" + policy.policy + "\": the GPU has all keys then"};
  if (engine.eager) return {"--eager: is unused with --kv host, which decodes in calls of its own"};
  const std::string given = "--route: \"" + route + "\"";
  if (route != "host+stream") GENERATE_TRY(flags.refuse_given({"--stream-share"}, "is for --route host+stream alone"));
  if (route == "host+stream" && stream_share < 0) return {given + " needs --stream-share"};
  if (!recomputes()) GENERATE_TRY(flags.refuse_given({"--recompute-share", "--x-type"}, "is for --route recompute alone"));
  if (route.empty() || route == "auto" || route == "host") return {};
  if (policy.policy != "all") return {given + " with --policy \"" + policy.policy + "\": only all keys can be sent"};
  if (engine.rope == 1) return {given + " with --rope \"library\": the host store has keys that are not rotated yet"};
  if (recomputes() && engine.k_rotation == TANDEM_ROTATION_HADAMARD)
    return {given + " with --k-rotation \"hadamard\": the host store has keys that are rotated"};
  return {};
}

}  // namespace generate
