// SPDX-License-Identifier: MIT
// The end of a guess under "hgca". The weights of queries whose tokens are kept are counted as if these tokens had been
// decoded one by one. A guess on host tensors has left logits, over keys at their speculative places. A guess on device
// tensors has left queries, which are multiplied with the store's keys once these have moved to their final places.
#include "lib/select/hgca.h"
#include "lib/store/cache.h"

namespace tandem {

// Gets the runs that judging will read, as this may still fail now.
Status HgcaState::prepare_guess(const KeptGuess& kept) {
  join();
  if (kept.kept_idx.empty()) return {};
  const int64_t length = kept.sequence.lengths[0] + std::ssize(kept.kept_idx);
  keys.fill(hgca.cache(), kept.sequence, hgca.layer_idx(), 0, length);
  reserve_work();
  return {};
}

void HgcaState::count_guess(const KeptGuess& kept, bool have_moved, int64_t* window_begin) {
  const bool is_of_device = !guess.q.empty();
  if (is_of_device != have_moved) return;
  if (is_of_device)
    count_guess_of_device(kept, window_begin);
  else
    count_guess_of_host(kept, window_begin);
}

// Counts each query's weights, then evicts if the window overflows.
void HgcaState::count_guess_of_host(const KeptGuess& kept, int64_t* window_begin) {
  const Layer& layer = hgca.layer();
  const auto l = static_cast<size_t>(hgca.layer_idx());
  const int64_t n_spec = kept.sequence.speculative[l], length = kept.sequence.lengths[l], group = layer.group_size;
  const Backend& cpu = hgca.cpu();
  for (int64_t i = 0; i < std::ssize(kept.kept_idx); ++i) {
    for (int64_t h = 0; h < layer.n_q_heads; ++h) {
      const int64_t row = (h / group * n_spec + kept.kept_idx[static_cast<size_t>(i)]) * group + h % group;
      const float* logits = guess.logits.data() + row * guess.n_keys;
      const float lse = guess.lse[static_cast<size_t>(row)];
      const auto count = [&](int64_t token, int64_t key, int64_t n) {
        cpu.table->observe(cpu.self, maw.at(static_cast<int32_t>(h), token), logits + key - guess.first_key, n, lse,
                           hgca.options().alpha);
      };
      for (int64_t t = *window_begin; t < length;) {
        const int64_t n = std::min(Maw::kBlock - t % Maw::kBlock, length - t);
        count(t, t, n);
        t += n;
      }
      for (int64_t m = 0; m <= i; ++m)
        if (length + m >= *window_begin) count(length + m, length + kept.kept_idx[static_cast<size_t>(m)], 1);
    }
    *window_begin = hgca.evicted_to(*window_begin, length + i + 1);
  }
}

void HgcaState::count_guess_of_device(const KeptGuess& kept, int64_t* window_begin) {
  const Layer& layer = hgca.layer();
  const auto l = static_cast<size_t>(hgca.layer_idx());
  const int64_t length = kept.sequence.lengths[l], group = layer.group_size, begin = 0;
  CountedQueries query;
  query.head_stride = kept.sequence.speculative[l] * group;
  query.n = 1;
  query.begin = &begin;
  for (int64_t i = 0; i < std::ssize(kept.kept_idx); ++i) {
    const int64_t row = kept.kept_idx[static_cast<size_t>(i)] * group, end = length + i + 1;
    query.q = guess.q.data() + row * layer.k_head_dim;
    query.lse = guess.lse.data() + row;
    query.end = &end;
    query.first_token = *window_begin;
    query.end_token = end;
    count_weights(query);
    *window_begin = hgca.evicted_to(*window_begin, end);
  }
}

void HgcaState::end_guess(int64_t old_window_begin, int64_t window_begin) {
  guess.end();
  if (window_begin == old_window_begin) return;
  host_end = window_begin;
  post_eviction(old_window_begin, window_begin);
}

}  // namespace tandem
