// SPDX-License-Identifier: MIT
// Computes the logits of a few query rows with all keys of a KV head, for head patterns that choose keys by logits
// (lib/patterns/pattern.h). The pool attends the keys in pieces and then gives these pieces to the pattern.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/status.h"
#include "lib/patterns/pattern.h"
#include "lib/store/row_cursor.h"
#include "lib/tables/backend.h"

namespace tandem {

// The keys of a KV head, for a layer in which each query head has its own KV head.
struct ProbedKeys {
  const Backend* cpu = nullptr;
  const Layer* layer = nullptr;  // with one query head for each KV head
  int32_t layer_idx = 0;
  int32_t kv_head = 0;  // in the store
  const StoreView* stored = nullptr;
};

class ProbeRunner {
 public:
  // Gives `index` the logits of all keys that the probe's rows see. Returns CANCELLED. May throw bad_alloc.
  Status run(const ProbedKeys& keys, const Probe& probe, const Watch& watch, PatternIndex* index);

 private:
  void lay_out(const ProbedKeys& keys, const Probe& probe);
  void sum_up(const Probe& probe);

  std::vector<ProbePiece> pieces_;
  std::vector<KvRun> runs_;
  std::vector<AttendJob> jobs_;
  std::vector<float> logits_, o_, lse_of_pieces_, lse_;
  std::vector<int64_t> begin_;
  Visibility visibility_;
};

}  // namespace tandem
