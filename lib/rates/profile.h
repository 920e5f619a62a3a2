// SPDX-License-Identifier: MIT
// The rates of routes on this machine, kept with the engine. They are measured once, by the first call that could use them
// (lib/routes/trial.cc), and updated from the parts of calls.
//
//   CPU      ns of a key under a number of queries, alone and while the bus is busy: by shape and power of two of queries
//   bus      ns of a byte, alone, and while the CPU is busy with keys of a shape under a number of queries
//
//   device   ns to make K and V of a hidden state, and of a block's step of a long append, by shape of layer: measured alone
//
// The device's own time over pieces of K and V is left out: at most 512 queries meet a piece, and the bus takes several
// times as long. If the device makes keys, parts show more than the trial: how much slower the bus is beside products, how
// long the device takes from the last hidden state to the end, and how long from the CPU's answer, which the device reads
// between products, to the end. If the bus is the faster of the two, parts also show the device's time per key.
//
// Trials read a few thousand keys, which may still be in a cache that calls have long outgrown. So a trial is imprecise.
// Until a part of a call has replaced the CPU's trial, its time counts as a share of what it measured. Near the break-even
// of routes this gives the CPU a first part, which replaces the trial. Far from the break-even such a factor does not
// matter. A part moves a known rate by a share of the difference, and at most by a factor of two. So splits move smoothly,
// and one late call does not overturn them.
//
// If CPU and bus were both busy in a part, times count from the arrival of its queries. The one that ended first was slowed
// all the way. The other ran its remaining work at full speed, and so did the bus before the queries arrived.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

#include "lib/model/layer.h"
#include "lib/rates/planner.h"

namespace tandem {

// A part in which both CPU and bus had keys. Keys are counted over the layer's KV heads.
struct JointPart {
  int64_t n_queries = 0;  // per sequence
  int64_t host_keys = 0;  // each under n_queries queries
  double host_ns = 0.0;
  int64_t bus_bytes = 0;
  double bus_ns = 0.0;      // since the queries arrived
  double ahead_ns = 0.0;    // bus time before the queries arrived
  int64_t ahead_bytes = 0;  // maximum that the bus could bring before the queries arrived
  bool bus_tells = true;    // false: the bus waited for the device, so only the CPU's time is informative
};

// A part whose keys were made from hidden states. Times count from the arrival of its queries to the arrival of the queries
// of a part that follows at once.
struct RebuiltTimes {
  int64_t x_bytes = 0;     // 0: other keys crossed the bus or were attended by the CPU as well
  int64_t n_rows = 0;      // rows that were made
  double bus_ns = 0.0;     // from the moment when the bus was free until it had brought all
  double late_ns = 0.0;    // the share of bus_ns after the queries arrived
  double host_ns = 0.0;    // until the CPU had answered
  double total_ns = 0.0;   // until the states were merged
  bool is_steady = false;  // as in PartReading
};

// Factors by which CPU and bus slow each other while both work, as a trial measured them.
struct Slowed {
  double host = 1.0, bus = 1.0;
};

// Heads, dims and types of a layer. RebuiltShape adds those of its hidden states.
using LayerShape = std::array<int32_t, 6>;
using RebuiltShape = std::array<int32_t, 8>;

class Profile {
 public:
  bool knows_host(const Layer& layer, int64_t n_queries) const;
  bool knows_bus() const;
  void note_trial(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns);
  // Start-up time of the CPU, from trials with two numbers of keys.
  void note_begin_trial(const Layer& layer, int64_t n_queries, double ns);
  void note_slowed_trial(const Layer& layer, int64_t n_queries, const Slowed& slowed);
  void note_bus_trial(double bytes_per_ns);
  bool knows_rebuild(const Layer& layer) const;
  void note_rebuild_trial(const Layer& layer, double ns);  // per key, over all KV heads
  // Learns from a finished part with made keys.
  void note_rebuilt(const Layer& layer, const RebuiltTimes& times) noexcept;
  // Notes a part whose keys could have been made from hidden states but were not.
  void note_not_rebuilt(const Layer& layer) noexcept;
  // Returns the bytes of K and V that cross the bus in the time of x_bytes of hidden states.
  int64_t as_keys(const Layer& layer, int64_t x_bytes) const;
  // ns of a tile (lib/routes/prefill_size.h); 0: unknown.
  void note_prefill_trial(const Layer& layer, double ns);
  double prefill_tile_ns(const Layer& layer) const;
  // Learns from the pieces of a long append: they took `ns`, and expected_ns was predicted with this tile_ns. Neither
  // includes the time that does not depend on tile_ns.
  void note_prefill(const Layer& layer, double tile_ns, double expected_ns, double ns) noexcept;
  // Learn from parts of calls: the CPU had all keys, the bus had all, or each had some. Without memory to learn, they do
  // nothing.
  void note_host(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) noexcept;
  void note_bus(int64_t bytes, double ns) noexcept;
  // Like note_bus(), but the bus may have waited at times: the time is an upper bound.
  void note_bus_at_most(int64_t bytes, double ns) noexcept;
  // Learns from a part whose bytes had all crossed the bus before the queries arrived. So the CPU attended its keys while
  // the bus was idle.
  void note_ahead(const Layer& layer, const JointPart& part) noexcept;
  // CPU and bus were both busy after the queries had arrived.
  void note_joint(const Layer& layer, const JointPart& part) noexcept;
  // Notes a part whose keys all crossed the bus, as happens if the CPU is believed to be slow.
  void note_idle_host(const Layer& layer, int64_t n_queries) noexcept;
  // Returns how many keys the CPU should get to check whether it is still slow, once the bus has had many parts alone
  // (note_idle_host()). Before that returns 0. total_ns: the part's time.
  int64_t host_due_keys(const Layer& layer, int64_t n_queries, double total_ns) const;

  // host_ns(): the CPU's time for n_keys keys, over all KV heads; 0 if no such shape was measured. If this number of queries
  // was not measured, the next larger power of two that was measured serves, or else the largest. stream_ns(): the time of
  // the bus, and until the states are merged; infinity if no bus was measured.
  double host_ns(const Layer& layer, int64_t n_queries, int64_t n_keys) const;
  double stream_ns(int64_t bytes) const;
  // Returns the rates for groups whose host_ns comes from host_ns(). key_bytes: bytes of a key, over all KV heads. If the
  // time of making keys is unknown, the column of made keys has the time of the bus alone, and is not allowed.
  PlanRates rates(const Layer& layer, int64_t n_queries, int64_t key_bytes) const;

 private:
  struct Costs {
    double ns = 0.0;         // per key, the CPU alone
    double slowed_ns = 0.0;  // while the bus is busy; 0: no part has shown it yet
    double bus_ns = 0.0;     // per byte, while the CPU is busy; 0: no part has shown it yet
    double begin_ns = 0.0;   // independent of the number of keys; 0: unknown
    Slowed tried;
    double tried_ns = 0.0, tried_begin_ns = 0.0;
    int64_t n_idle = 0;  // parts since the CPU last had a key
    bool is_trial = true;

    double host_ns() const;
    void note_due(double keys, double taken_ns);
  };
  Costs* costs_or_null(const Layer& layer, int64_t n_queries) noexcept;
  Costs& costs(const Layer& layer, int64_t n_queries);
  const Costs* find_own(const Layer& layer, int64_t n_queries) const;  // of exactly that power of two, or null
  const Costs* find(const Layer& layer, int64_t n_queries, int64_t* of_class) const;

  mutable std::mutex mutex_;
  std::map<LayerShape, std::map<int64_t, Costs>> costs_;  // by power of two of queries
  struct Rebuilt {
    double key_ns = 0.0;       // the device's time per key
    double tried_ns = 0.0;     // the trial's key_ns
    double x_ns = 0.0;         // bus time per byte while the device works; 0: no part has shown it yet
    double end_ns = 0.0;       // from the last hidden state to the end; 0: no part has shown it yet
    double host_end_ns = 0.0;  // from the CPU's answer to the end
  };
  double x_ns(const Rebuilt& known) const;

  std::map<RebuiltShape, Rebuilt> rebuilt_;
  std::map<LayerShape, double> prefill_tile_ns_;
  double bus_ns_ = 0.0;  // per byte; 0: not measured
};

}  // namespace tandem
