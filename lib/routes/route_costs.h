// SPDX-License-Identifier: MIT
// What routes cost on this machine, for the route "auto": measured once in an engine, when the first call could stream, and
// kept up to date by the CPU's own parts.
//
//   host     keys x what the CPU takes for a key under so many queries: for each shape of heads and power of two of queries
//   stream   bytes / the bus's rate, as it is while the device attends what has come, and a little to begin and to end
//
// The first measurement of the CPU is a trial over a few thousand keys, and may be wrong by a tenth or two. So it counts as
// less than it said until a part of a call has replaced it: near the crossover the CPU gets a first try, and far from it
// such a factor does not matter.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

#include "lib/layer.h"

namespace tandem {

class RouteCosts {
 public:
  // A part of n_keys keys, in all KV heads, under n_queries queries a sequence took so long on the CPU. Where there is no
  // memory to learn it, nothing is learned.
  void note_host(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) noexcept;
  void note_trial(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) {
    note(layer, n_queries, n_keys, ns, true);
  }
  bool knows_host(const Layer& layer, int64_t n_queries) const;
  void note_bus(double bytes_per_ns);
  bool knows_bus() const;
  // Of what is known; of queries that are not, by the next power of two that is.
  double host_ns(const Layer& layer, int64_t n_queries, int64_t n_keys) const;
  double stream_ns(int64_t bytes) const;

 private:
  using Shape = std::array<int32_t, 6>;
  struct Rate {
    double ns = 0.0;  // of a key
    bool is_trial = true;
  };
  static Shape shape_of(const Layer& layer);
  void note(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns, bool is_trial);

  mutable std::mutex mutex_;
  std::map<Shape, std::map<int64_t, Rate>> host_;  // by the power of two
  double bytes_per_ns_ = 0.0;                      // 0: not measured
};

}  // namespace tandem
