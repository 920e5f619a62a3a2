// SPDX-License-Identifier: MIT
// What routes cost on this machine, for the route "auto": measured once in an engine, when the first call could stream, and
// kept up to date by the CPU's own parts.
//
//   host     keys x what the CPU takes for a key under so many queries: for each shape of heads and power of two of queries
//   stream   bytes / the bus's rate, as it is while the device attends what has come, and a little to begin and to end
//
// Near the crossover both take the same time and it does not matter which is taken; far from it, a factor in the
// measurement does not matter.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

#include "lib/layer.h"

namespace tandem {

class RouteCosts {
 public:
  // A part of n_keys keys, in all KV heads, under n_queries queries a sequence took so long on the CPU.
  void note_host(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns);
  bool knows_host(const Layer& layer, int64_t n_queries) const;
  void note_bus(double bytes_per_ns);
  bool knows_bus() const;
  // Of what is known; of queries that are not, by the next power of two that is.
  double host_ns(const Layer& layer, int64_t n_queries, int64_t n_keys) const;
  double stream_ns(int64_t bytes) const;

 private:
  using Shape = std::array<int32_t, 6>;
  static Shape shape_of(const Layer& layer);

  mutable std::mutex mutex_;
  std::map<Shape, std::map<int64_t, double>> host_;  // by the power of two: ns of a key
  double bytes_per_ns_ = 0.0;                        // 0: not measured
};

}  // namespace tandem
