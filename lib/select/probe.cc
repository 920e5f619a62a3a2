// SPDX-License-Identifier: MIT
#include "lib/select/probe.h"

#include <algorithm>
#include <cmath>

#include "lib/store/cache_rows.h"

namespace tandem {

// Lays out the pieces. Logits and states of a piece lie behind those of the pieces before it.
void ProbeRunner::lay_out(const ProbedKeys& keys, const Probe& probe) {
  const Layer& layer = *keys.layer;
  const int64_t n_rows = probe.n_rows(), n_keys = probe.n_keys(), n_pieces = (n_keys + kProbePiece - 1) / kProbePiece;
  logits_.resize(static_cast<size_t>(n_rows * n_keys));
  o_.resize(static_cast<size_t>(n_pieces * n_rows * layer.v_head_dim));
  lse_of_pieces_.resize(static_cast<size_t>(n_pieces * n_rows));
  lse_.resize(static_cast<size_t>(n_rows));
  begin_.assign(static_cast<size_t>(n_rows), 0);
  visibility_ = {};
  visibility_.begin = begin_.data();
  visibility_.end = probe.ends.data();
  pieces_.clear();
  jobs_.clear();
  runs_.clear();
  for (int64_t t = 0; t < n_keys;) {
    const int64_t end = std::min(n_keys, t / kProbePiece * kProbePiece + kProbePiece);
    const TokenRun at = key_tokens(*keys.stored, layer, {t, end});
    runs_.push_back(keys_of(*keys.stored, layer, keys.layer_idx, at, keys.kv_head));
    t += at.n;
  }
  const KvRun* run = runs_.data();
  for (int64_t p = 0; p < n_pieces; ++p) {
    const int64_t first = p * kProbePiece, n = std::min(kProbePiece, n_keys - first);
    AttendJob& job = jobs_.emplace_back();
    job.layer = &layer;
    job.q = probe.q.data();
    job.n_rows = static_cast<int32_t>(n_rows);
    job.node = kAllNodes;
    job.runs = run;
    while (job.n_keys < n) job.n_keys += run->n_tokens, ++run, ++job.n_runs;
    job.visibility = &visibility_;
    job.o = o_.data() + p * n_rows * layer.v_head_dim;
    job.lse = lse_of_pieces_.data() + p * n_rows;
    job.logits = logits_.data() + first * n_rows;
    pieces_.push_back({&probe, first, n, job.logits, lse_.data()});
  }
}

void ProbeRunner::sum_up(const Probe& probe) {
  const int64_t n_rows = probe.n_rows();
  for (int64_t r = 0; r < n_rows; ++r) {
    float most = -INFINITY;
    for (size_t p = 0; p < pieces_.size(); ++p)
      most = std::max(most, lse_of_pieces_[p * static_cast<size_t>(n_rows) + static_cast<size_t>(r)]);
    double sum = 0.0;
    for (size_t p = 0; p < pieces_.size() && most > -INFINITY; ++p)
      sum += std::exp(lse_of_pieces_[p * static_cast<size_t>(n_rows) + static_cast<size_t>(r)] - most);
    lse_[static_cast<size_t>(r)] = most + static_cast<float>(std::log(sum));
  }
}

Status ProbeRunner::run(const ProbedKeys& keys, const Probe& probe, const Watch& watch, PatternIndex* index) {
  if (probe.n_keys() == 0) return {};
  lay_out(keys, probe);
  const BackendTable& cpu = *keys.cpu->table;
  Watch silent = watch;  // the attention itself reports progress
  silent.progress = nullptr;
  TANDEM_TRY(cpu.attend_watched(keys.cpu->self, jobs_.data(), static_cast<int32_t>(jobs_.size()), silent));
  sum_up(probe);
  struct Take {
    std::span<const ProbePiece> pieces;
    PatternIndex* index;
  } all{pieces_, index};
  const auto take_one = [](void* of, int64_t i, int32_t) {
    const Take& take = *static_cast<const Take*>(of);
    take.index->take(take.pieces[static_cast<size_t>(i)]);
  };
  cpu.run(keys.cpu->self, std::ssize(pieces_), take_one, &all);
  return watch.check();
}

}  // namespace tandem
