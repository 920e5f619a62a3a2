// SPDX-License-Identifier: MIT
#include "reference/hgca_model.h"

#include <algorithm>
#include <cmath>

namespace reference {

HgcaModel::HgcaModel(const std::vector<RefLayer>* layers, const HgcaOptions& options)
    : layers_(layers), options_(options), states_(layers->size()) {
  for (size_t l = 0; l < layers->size(); ++l) {
    states_[l].maw.resize(static_cast<size_t>((*layers)[l].n_q_heads));
    states_[l].heads.resize(static_cast<size_t>((*layers)[l].n_kv_heads));
  }
}

int64_t HgcaModel::sink_end(size_t layer) const { return std::min(options_.sink_tokens, states_[layer].window_begin); }

bool HgcaModel::attended(size_t layer, int32_t kv_head, int64_t token) const {
  if (!keeps(layer) || token >= states_[layer].window_begin || token < options_.sink_tokens) return true;
  const std::vector<int64_t>& kept = selected(layer, kv_head);
  return std::binary_search(kept.begin(), kept.end(), token);
}

const std::vector<int64_t>& HgcaModel::selected(size_t layer, int32_t kv_head) const {
  return states_[layer].heads[static_cast<size_t>(kv_head)].selected;
}

const std::vector<int64_t>& HgcaModel::uncertain(size_t layer, int32_t kv_head) const {
  return states_[layer].heads[static_cast<size_t>(kv_head)].uncertain;
}

void HgcaModel::adopt(size_t layer, int32_t kv_head, const std::vector<int64_t>& selection) {
  states_[layer].heads[static_cast<size_t>(kv_head)] = {selection, {}};
}

double HgcaModel::maw(size_t layer, int32_t q_head, int64_t token) const {
  const std::vector<double>& row = states_[layer].maw[static_cast<size_t>(q_head)];
  return token < static_cast<int64_t>(row.size()) ? row[static_cast<size_t>(token)] : 0.0;
}

// Adds alpha * (weight - maw) to maw, for the tokens from first_token on that the query could see.
void HgcaModel::count(size_t layer, const QueryWeights& weights, int64_t first_token) {
  const double alpha = options_.alpha;
  for (size_t h = 0; h < states_[layer].maw.size(); ++h) {
    std::vector<double>& maw = states_[layer].maw[h];
    if (static_cast<int64_t>(maw.size()) < weights.end) maw.resize(static_cast<size_t>(weights.end), 0.0);
    for (int64_t j = first_token; j < weights.end; ++j) {
      double& value = maw[static_cast<size_t>(j)];
      value += alpha * (weights.by_head[h][static_cast<size_t>(j)] - value);
    }
  }
}

void HgcaModel::evict(size_t layer, int64_t length) {
  const int64_t block = std::clamp<int64_t>(options_.window_tokens / 8, 1, options_.page_tokens);
  const int64_t over = length - states_[layer].window_begin - options_.window_tokens;
  if (over >= block) states_[layer].window_begin += over / block * block;
}

void HgcaModel::judge(size_t layer, int64_t begin, int64_t end, bool eviction) {
  const RefLayer& geometry = (*layers_)[layer];
  const int64_t host = std::max<int64_t>(0, states_[layer].window_begin - options_.sink_tokens);
  const int64_t size = eviction ? options_.window_tokens : host;
  const double threshold = static_cast<double>(options_.beta) / static_cast<double>(std::max<int64_t>(1, size));
  for (int32_t kv_head = 0; kv_head < geometry.n_kv_heads; ++kv_head) {
    Head& head = states_[layer].heads[static_cast<size_t>(kv_head)];
    int64_t halo_end = 0, unsure_end = 0;  // earlier tokens are kept, or may be, because of a strong key
    const int64_t first = eviction ? begin - options_.halo_tokens : begin;  // earlier keys, whose halo may reach in
    for (int64_t j = std::max(first, options_.sink_tokens); j < end; ++j) {
      double value = 0.0;
      for (int32_t g = 0; g < geometry.group_size(); ++g)
        value = std::max(value, maw(layer, kv_head * geometry.group_size() + g, j));
      const double strong = std::max(threshold, 0.01);
      const auto close = [value](double to) { return std::fabs(value - to) <= 1e-4 * to + 2e-7; };
      if (value > strong) halo_end = std::max(halo_end, j + options_.halo_tokens + 1);
      if (close(strong)) unsure_end = std::max(unsure_end, j + options_.halo_tokens + 1);
      if (j < begin) continue;
      if (value > threshold || j < halo_end) head.selected.push_back(j);
      if (close(threshold) || j < unsure_end) head.uncertain.push_back(j);
    }
  }
}

void HgcaModel::re_evaluate(size_t layer) {
  for (Head& head : states_[layer].heads) head = {};
  judge(layer, 0, states_[layer].window_begin, false);
}

void HgcaModel::settle_pending(size_t layer) {
  State& state = states_[layer];
  if (!state.due) return;
  state.due = false;
  count_pending(layer);
  re_evaluate(layer);
}

void HgcaModel::count_pending(size_t layer) {
  for (const QueryWeights& weights : states_[layer].pending) count(layer, weights, 0);
  states_[layer].pending.clear();
}

void HgcaModel::settle_all() {
  for (size_t l = 0; l < states_.size(); ++l)
    if (keeps(l)) settle_pending(l);
}

void HgcaModel::after_decode(size_t layer, const QueryWeights& weights, int64_t length) {
  if (!keeps(layer)) return;
  const int64_t before = states_[layer].window_begin;
  count(layer, weights, before);
  evict(layer, length);
  judge(layer, before, states_[layer].window_begin, true);
}

void HgcaModel::after_append(size_t layer, std::vector<QueryWeights> weights, int64_t length, bool partial) {
  if (!keeps(layer)) return;
  State& state = states_[layer];
  state.due = true;
  for (QueryWeights& query : weights) state.pending.push_back(std::move(query));
  evict(layer, length);
  if (!partial) settle_pending(layer);
}

void HgcaModel::after_commit(size_t layer, const std::vector<QueryWeights>& kept, int64_t length_before) {
  if (!keeps(layer)) return;
  const int64_t before = states_[layer].window_begin;
  for (size_t i = 0; i < kept.size(); ++i) {
    count(layer, kept[i], states_[layer].window_begin);
    evict(layer, length_before + static_cast<int64_t>(i) + 1);
  }
  judge(layer, before, states_[layer].window_begin, true);
}

void HgcaModel::truncate(int64_t n_tokens) {
  for (State& state : states_) {
    std::erase_if(state.pending, [&](const QueryWeights& weights) { return weights.end > n_tokens; });
    state.window_begin = std::min(state.window_begin, std::max<int64_t>(0, n_tokens - options_.window_tokens));
    for (std::vector<double>& maw : state.maw)
      if (static_cast<int64_t>(maw.size()) > n_tokens) maw.resize(static_cast<size_t>(n_tokens));
    for (Head& head : state.heads) {
      const auto gone = [&](int64_t j) { return j >= state.window_begin; };
      std::erase_if(head.selected, gone);
      std::erase_if(head.uncertain, gone);
    }
  }
}

void HgcaModel::remove(int64_t first, int64_t n_tokens, int64_t length) {
  const int64_t last = first + n_tokens;
  for (State& state : states_) {
    if (state.window_begin >= last)
      state.window_begin -= n_tokens;
    else
      state.window_begin = std::min(state.window_begin, first);
    for (std::vector<double>& maw : state.maw) {
      maw.resize(static_cast<size_t>(std::max<int64_t>(length, static_cast<int64_t>(maw.size()))), 0.0);
      maw.erase(maw.begin() + first, maw.begin() + last);
    }
    for (Head& head : state.heads)
      for (std::vector<int64_t>* list : {&head.selected, &head.uncertain}) {
        std::erase_if(*list, [&](int64_t j) {
          return (j >= first && j < last) || (j >= last ? j - n_tokens : j) < options_.sink_tokens;
        });
        for (int64_t& j : *list)
          if (j >= last) j -= n_tokens;
      }
  }
  truncate(length - n_tokens);
}

}  // namespace reference
