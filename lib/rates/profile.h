// SPDX-License-Identifier: MIT
// What routes take on this machine, kept with the engine: measured once, when the first call could use it
// (lib/routes/trial.cc), and kept up to date by the parts of calls.
//
//   CPU      ns of a key under so many queries, alone and while the bus is busy: by shape and power of two of queries
//   bus      ns of a byte, alone, and while the CPU is busy with keys of such a shape under so many queries
//
//   device   ns to make K and V of a hidden state, and of a block's step of a long append, by shape of layer: measured alone
//
// The device's own time over pieces of K and V is not among them: at most 512 queries meet a piece, which takes the bus
// several times as long. Where it makes keys, parts say more than the trial: how much slower the bus is beside products, how
// long the device takes from the last hidden state to the end, and from the CPU's answer, which it gets to between products;
// and a key where the bus is the faster of the two.
//
// Trials read a few thousand keys, which may still be in a cache that calls have long outgrown. So the CPU's counts as less
// than it said until a part of a call has replaced it: near the point where routes are even the CPU gets a first try, and
// far from it such a factor does not matter. What a part says moves what is known by a share, and by no more than twice, so
// that splits move smoothly and one late call does not turn them over.
//
// Of a part in which CPU and bus were busy, times count from when its queries had come. What ended first was slowed all the
// way; of the other, what was left then went at the pace of one that is alone, and so did what the bus had brought before
// the queries came.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>

#include "lib/model/layer.h"
#include "lib/rates/planner.h"

namespace tandem {

// A part that both had keys of, in the layer's KV heads.
struct JointPart {
  int64_t n_queries = 0;  // of a sequence
  int64_t host_keys = 0;  // under so many queries
  double host_ns = 0.0;
  int64_t bus_bytes = 0;
  double bus_ns = 0.0;      // from when the queries had come
  double ahead_ns = 0.0;    // that it had before
  int64_t ahead_bytes = 0;  // what it could bring then, at most
  bool bus_tells = true;    // false: it waited for the device, and of the two the CPU alone tells
};

// A part whose keys were made of hidden states. Times count from when its queries had come to when those of a part that
// follows at once would.
struct RebuiltTimes {
  int64_t x_bytes = 0;     // 0: other keys crossed the bus, or were attended by the CPU, as well
  int64_t n_rows = 0;      // that were made
  double bus_ns = 0.0;     // from when the bus was free to when it had brought all
  double late_ns = 0.0;    // of that, behind the queries' coming
  double host_ns = 0.0;    // until the CPU had answered
  double total_ns = 0.0;   // until the states were one
  bool is_steady = false;  // as in PartReading
};

// What a trial with both at work said: how many times as long as alone.
struct Slowed {
  double host = 1.0, bus = 1.0;
};

// Heads, dims and types of a layer; the same, and of its hidden states.
using LayerShape = std::array<int32_t, 6>;
using RebuiltShape = std::array<int32_t, 8>;

class Profile {
 public:
  bool knows_host(const Layer& layer, int64_t n_queries) const;
  bool knows_bus() const;
  void note_trial(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns);
  // To begin with it: of two numbers of keys that took so long.
  void note_begin_trial(const Layer& layer, int64_t n_queries, double ns);
  void note_slowed_trial(const Layer& layer, int64_t n_queries, const Slowed& slowed);
  void note_bus_trial(double bytes_per_ns);
  bool knows_rebuild(const Layer& layer) const;
  void note_rebuild_trial(const Layer& layer, double ns);  // of a key, in all KV heads
  // Of a part, as it came out.
  void note_rebuilt(const Layer& layer, const RebuiltTimes& times) noexcept;
  // A part whose keys might have been made so, and were not.
  void note_not_rebuilt(const Layer& layer) noexcept;
  // As many bytes of K and V as cross the bus in the time of these hidden states.
  int64_t as_keys(const Layer& layer, int64_t x_bytes) const;
  // ns of a tile (lib/routes/prefill_size.h); 0: nobody knows.
  void note_prefill_trial(const Layer& layer, double ns);
  double prefill_tile_ns(const Layer& layer) const;
  // What pieces of a long append took, and were expected to by this tile_ns.
  void note_prefill(const Layer& layer, double tile_ns, double expected_ns, double ns) noexcept;
  // Parts of calls: the CPU had all keys, the bus had, or each had some. Where there is no memory to learn it, nothing is
  // learned.
  void note_host(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) noexcept;
  void note_bus(int64_t bytes, double ns) noexcept;
  // Likewise, but there may have been times when the bus waited: that is the most that it takes.
  void note_bus_at_most(int64_t bytes, double ns) noexcept;
  // And that all of it was there before the queries came, and the CPU's keys were attended without it.
  void note_ahead(const Layer& layer, const JointPart& part) noexcept;
  void note_joint(const Layer& layer, const JointPart& part) noexcept;
  // A part that the bus had alone, as it does when the CPU is thought to be slow.
  void note_idle_host(const Layer& layer, int64_t n_queries) noexcept;
  // After many of these: how many keys of a part that takes so long the CPU is to have, to say if it still is. Else 0.
  int64_t host_due_keys(const Layer& layer, int64_t n_queries, double total_ns) const;

  // Of n_keys keys in all KV heads; of queries that nobody knows of, by the next power of two that somebody does. 0: no
  // shape like this was measured. infinity: no bus was.
  double host_ns(const Layer& layer, int64_t n_queries, int64_t n_keys) const;
  double stream_ns(int64_t bytes) const;
  // For groups whose host_ns is the one above. key_bytes: of a key, in all KV heads. Keys may be made of hidden states where
  // it is known what that takes; where it is not, what it takes is the least that it could: the bus alone.
  PlanRates rates(const Layer& layer, int64_t n_queries, int64_t key_bytes) const;

 private:
  struct Costs {
    double ns = 0.0;         // of a key, the CPU alone
    double slowed_ns = 0.0;  // while the bus is busy; 0: no part has said
    double bus_ns = 0.0;     // of a byte, while the CPU is busy; 0: likewise
    double begin_ns = 0.0;   // whatever the number of keys; 0: nobody has said
    Slowed tried;
    double tried_ns = 0.0, tried_begin_ns = 0.0;
    int64_t n_idle = 0;  // parts since the CPU had one
    bool is_trial = true;

    double host_ns() const;
    void note_due(double keys, double taken_ns);
  };
  Costs* costs_or_null(const Layer& layer, int64_t n_queries) noexcept;
  Costs& costs(const Layer& layer, int64_t n_queries);
  const Costs* find_own(const Layer& layer, int64_t n_queries) const;  // of that power of two, or null
  const Costs* find(const Layer& layer, int64_t n_queries, int64_t* of_class) const;

  mutable std::mutex mutex_;
  std::map<LayerShape, std::map<int64_t, Costs>> costs_;  // by the power of two
  struct Rebuilt {
    double key_ns = 0.0;       // the device
    double tried_ns = 0.0;     // that, as the trial said
    double x_ns = 0.0;         // the bus, of a byte, while the device is at work; 0: no part has said
    double end_ns = 0.0;       // from the last hidden state to the end; 0: likewise
    double host_end_ns = 0.0;  // from the CPU's answer
  };
  double x_ns(const Rebuilt& known) const;

  std::map<RebuiltShape, Rebuilt> rebuilt_;
  std::map<LayerShape, double> prefill_tile_ns_;
  double bus_ns_ = 0.0;  // of a byte; 0: not measured
};

}  // namespace tandem
