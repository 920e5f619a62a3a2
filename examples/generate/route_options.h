// SPDX-License-Identifier: MIT
// --kv host: K and V are in host memory. One of Tandem's routes attends the keys outside the window.
#ifndef EXAMPLES_GENERATE_ROUTE_OPTIONS_H_
#define EXAMPLES_GENERATE_ROUTE_OPTIONS_H_

#include <cstdint>
#include <string>

#include "failure.h"
#include "flags.h"

namespace generate {

struct EngineOptions;
struct PolicyOptions;

struct RouteOptions {
  std::string route;                              // empty: Tandem's default, "auto"
  double stream_share = -1, recompute_share = 0;  // shares for "host+stream", which needs one, and for "recompute"; 0: all
  int32_t x_type = 0;                             // type of the hidden states that "recompute" keeps; 0: 16 bits
  int64_t buffer_bytes = 0;                       // bytes of each of two buffers; 0: Tandem's default
  void declare(Flags* flags);
  // Refuses combinations with other options and with each other. The message names flag and value.
  Failure check(const Flags& flags, const EngineOptions& engine, const PolicyOptions& policy) const;
  bool recomputes() const { return route == "recompute"; }
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_ROUTE_OPTIONS_H_
