// SPDX-License-Identifier: MIT
// observe(): moving averages of attention weights as the comments of the device's table say, one token and query head at a
// time. The arithmetic between stored numbers is in double precision.
#include <cmath>
#include <utility>
#include <vector>

#include "device/stand_in_exchange.h"
#include "reference/stored_row.h"

namespace stand_in {
namespace {

using namespace tandem;

// One query that counts: its numbers, and the share of its weights that is left at the end of the call.
struct Counted {
  std::vector<double> q;
  double lse, share;
  int64_t self;  // the last token that it sees
};

std::vector<Counted> load_queries(const DeviceObserve& call, const DeviceSequence& sequence, int32_t head) {
  const Layer& layer = *call.layer;
  const auto alpha = static_cast<double>(call.alpha);
  std::vector<Counted> queries;
  for (int32_t t = std::max(0, sequence.q_len - call.n_counted); t < sequence.q_len; ++t) {
    const int64_t row = int64_t{sequence.first_row} + t;
    Counted query{std::vector<double>(static_cast<size_t>(layer.k_head_dim)),
                  static_cast<double>(call.lse[row * layer.n_q_heads + head]),
                  alpha * std::pow(1.0 - alpha, sequence.q_len - 1 - t), sequence.end - sequence.q_len + t};
    reference::load_all(call.q.dtype, row_at(call.q, row, head, layer.k_head_dim, "q is no device memory"), layer.k_head_dim,
                        query.q.data());
    queries.push_back(std::move(query));
  }
  return queries;
}

double weight(const Layer& layer, const Counted& query, const std::vector<double>& k) {
  double logit = 0.0;
  for (size_t c = 0; c < k.size(); ++c) logit += query.q[c] * k[c];
  logit *= static_cast<double>(layer.sm_scale);
  const auto cap = static_cast<double>(layer.soft_cap);
  if (cap > 0.0) logit = cap * std::tanh(logit / cap);
  return std::exp(logit - query.lse);
}

void observe_head(const DeviceObserve& call, const DeviceSequence& sequence, int32_t head, std::byte* slot) {
  const Layer& layer = *call.layer;
  const WindowRows window(call, sequence);
  const int32_t kv_head = head / layer.group_size, k_type = window_layer(layer).k_type;
  const std::vector<Counted> queries = load_queries(call, sequence, head);
  const double kept = std::pow(1.0 - static_cast<double>(call.alpha), sequence.q_len);
  float* evicted = reinterpret_cast<float*>(slot + call.exchange.maw_at) + int64_t{head} * call.exchange.n_evicted;
  std::vector<double> k(static_cast<size_t>(layer.k_head_dim));
  for (int64_t token = sequence.begin; token < sequence.end; ++token) {
    reference::load_row(k_type, window.row(kPlaneK, kv_head, token),
                        reference::has_groups(k_type) ? window.row(kPlaneKScales, kv_head, token) : nullptr,
                        layer.k_head_dim, k.data());
    const bool is_new = call.has_appended != 0 && token >= sequence.end - sequence.q_len;
    float* stored = window.maw(head, token);
    double maw = is_new ? 0.0 : kept * static_cast<double>(*stored);
    for (const Counted& query : queries)
      if (token <= query.self && std::isfinite(query.lse)) maw += query.share * weight(layer, query, k);
    *stored = static_cast<float>(maw);
    if (token < sequence.evict_end) evicted[sequence.first_evicted + (token - sequence.begin)] = *stored;
  }
}

// Checks that each sequence's columns lie in the slot's rows and belong to no other sequence.
void check_evicted(const DeviceObserve& call, const DeviceSequence* sequences) {
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    const DeviceSequence& sequence = sequences[i];
    require(sequence.evict_end <= sequence.end, "a sequence evicts tokens that it has not");
    if (sequence.evict_end <= sequence.begin) continue;
    const int64_t first = sequence.first_evicted, last = first + sequence.evict_end - sequence.begin;
    require(first >= 0 && last <= call.exchange.n_evicted, "a slot has no room for the evicted tokens");
    for (const auto& [begin, end] : taken) require(first >= end || begin >= last, "evicted tokens share a place");
    taken.emplace_back(first, last);
  }
}

}  // namespace

void check(const DeviceObserve& call) {
  const Layer& layer = *call.layer;
  check_layer(layer);
  if (layer.sliding_window != 0)
    throw Failure{TANDEM_ERROR_UNSUPPORTED, 0, "sliding_window", "moving averages of a layer with a sliding window"};
  check_pages(call.pages);
  require(call.pages.maw != nullptr, "there are no moving averages");
  require(reinterpret_cast<uintptr_t>(call.pages.maw) % 16 == 0, "moving averages are not at a multiple of 16 bytes");
  check_sequences(call.sequences);
  check_exchange(call.exchange);
  require(call.n_tokens >= 0, "a negative number of tokens");
  require(call.n_tokens <= call.exchange.n_rows, "more tokens than a slot has rows for");
  require(call.has_appended == 0 || call.has_appended == 1, "has_appended is not 0 or 1");
  require(call.alpha > 0.0f && call.alpha <= 1.0f, "alpha is not above 0 and up to 1");
  require(call.n_counted > 0, "no query is counted");
  std::vector<Part> parts = state_parts(layer, call.exchange, call.n_tokens);
  for (const Part& part : row_parts(layer, call.exchange, call.n_tokens, call.has_appended != 0)) parts.push_back(part);
  check_parts(parts, call.exchange.slot_bytes);
  on_device(call.lse, int64_t{4} * call.n_tokens * layer.n_q_heads, "the merged lse is no device memory");
}

bool perform(const DeviceObserve& call) {
  const Exchange exchange(call.exchange);
  if (exchange.is_faulty()) return false;
  const uint64_t n_tickets = exchange.next_ticket();
  require(n_tickets > 0, "observe() without an append()");
  const DeviceSequence* sequences = read_sequences(call.sequences, call.n_tokens);
  check_evicted(call, sequences);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    check_table(call.sequences, sequences[i], call.pages.page_len);
    for (int32_t head = 0; head < call.layer->n_q_heads && !exchange.has_lost(n_tickets - 1); ++head)
      observe_head(call, sequences[i], head, exchange.slot(n_tickets - 1));
  }
  exchange.observe(n_tickets);
  return true;
}

}  // namespace stand_in
