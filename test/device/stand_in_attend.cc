// SPDX-License-Identifier: MIT
// Attention over pages as the table's comments say it, one row of logits at a time, with the oracle's own arithmetic for
// storage types.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "device/stand_in.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace stand_in {
namespace {

using namespace tandem;

// What the queries of one sequence and KV head read: row i is token begin + i.
struct Keys {
  std::vector<double> k;  // [n, k_head_dim]
  std::vector<double> v;  // [n, v_head_dim]
};

std::byte* row_at(const DeviceRows& rows, int64_t token, int64_t head) {
  const int64_t element = token * rows.token_stride + head * rows.head_stride;
  return static_cast<std::byte*>(rows.data) + element * reference::element_bytes(rows.dtype);
}

const std::byte* plane_row(const DeviceAttend& call, const DeviceSequence& sequence, Plane plane, int32_t kv_head,
                           int64_t token) {
  const DevicePages& pages = call.pages;
  const int64_t* table = call.sequences.page_tables + sequence.table_begin;
  const int64_t page = table[token / pages.page_len % sequence.table_len];
  const std::byte* head = pages.planes[plane] + page + kv_head * pages.head_stride[plane];
  return head + token % pages.page_len * plane_bytes(*call.layer).of[plane];
}

Keys load_keys(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head) {
  const Layer& layer = *call.layer;
  const auto n = static_cast<size_t>(sequence.end - sequence.begin);
  const auto k_dim = static_cast<size_t>(layer.k_head_dim), v_dim = static_cast<size_t>(layer.v_head_dim);
  const Plane v_codes = layer.v_aliases_k ? kPlaneK : kPlaneV;
  const Plane v_scales = layer.v_aliases_k ? kPlaneKScales : kPlaneVScales;
  Keys keys{std::vector<double>(n * k_dim), std::vector<double>(n * v_dim)};
  const auto load = [&](Plane codes, Plane scales, int32_t dtype, int64_t token, double* to, int32_t dim) {
    const bool has_scales = reference::has_groups(dtype);
    reference::load_row(dtype, plane_row(call, sequence, codes, kv_head, token),
                        has_scales ? plane_row(call, sequence, scales, kv_head, token) : nullptr, dim, to);
  };
  for (size_t i = 0; i < n; ++i) {
    const int64_t token = sequence.begin + static_cast<int64_t>(i);
    load(kPlaneK, kPlaneKScales, layer.k_type, token, keys.k.data() + i * k_dim, layer.k_head_dim);
    load(v_codes, v_scales, layer.v_type, token, keys.v.data() + i * v_dim, layer.v_head_dim);
  }
  return keys;
}

double logit(const Layer& layer, const std::vector<double>& q, const double* k) {
  double dot = 0.0;
  for (size_t c = 0; c < q.size(); ++c) dot += q[c] * k[c];
  dot *= static_cast<double>(layer.sm_scale);
  const auto cap = static_cast<double>(layer.soft_cap);
  return cap > 0.0 ? cap * std::tanh(dot / cap) : dot;
}

// Query t of a sequence, one head.
void attend_row(const DeviceAttend& call, const DeviceSequence& sequence, const Keys& keys, int32_t t, int32_t head) {
  const Layer& layer = *call.layer;
  const int64_t row = sequence.first_row + t, self = sequence.end - sequence.q_len + t;
  std::vector<double> q(static_cast<size_t>(layer.k_head_dim)), o(static_cast<size_t>(layer.v_head_dim), 0.0);
  reference::load_all(call.q.dtype, row_at(call.q, row, head), layer.k_head_dim, q.data());
  const int64_t reach = layer.sliding_window > 0 ? layer.sliding_window : std::numeric_limits<int64_t>::max();
  const int64_t first = std::max(sequence.begin, reach > self ? 0 : self - reach + 1);

  double m = call.sinks != nullptr ? static_cast<double>(call.sinks[head]) : -INFINITY;
  std::vector<double> logits;
  for (int64_t token = first; token <= self; ++token) {
    logits.push_back(logit(layer, q, keys.k.data() + (token - sequence.begin) * layer.k_head_dim));
    m = std::max(m, logits.back());
  }
  double sum = call.sinks != nullptr ? std::exp(static_cast<double>(call.sinks[head]) - m) : 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - m);
    const double* v = keys.v.data() + (first - sequence.begin + static_cast<int64_t>(i)) * layer.v_head_dim;
    sum += p;
    for (size_t c = 0; c < o.size(); ++c) o[c] += p * v[c];
  }
  if (sum > 0.0)
    for (double& x : o) x /= sum;
  reference::store_all(call.o.dtype, o.data(), layer.v_head_dim, row_at(call.o, row, head));
  if (call.lse != nullptr)
    call.lse[row * call.lse_token_stride + head * call.lse_head_stride] =
        sum > 0.0 ? static_cast<float>(m + std::log(sum)) : -std::numeric_limits<float>::infinity();
}

const char* check(const DeviceAttend& call) {
  const auto* workspace = static_cast<const std::byte*>(call.workspace);
  if (workspace == nullptr) return "there is no workspace";
  if (std::any_of(workspace, workspace + kWorkspaceBytes, [](std::byte b) { return b != std::byte{0}; }))
    return "the workspace is not zero";
  if (call.pages.page_len <= 0 || call.pages.page_len % 64 != 0) return "page_len is no multiple of 64";
  if (call.layer->rope != nullptr) return "keys that the library rotates";
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    const DeviceSequence& sequence = call.sequences.sequences[i];
    const int64_t n_keys = sequence.end - sequence.begin, first_page = sequence.begin / call.pages.page_len;
    if (sequence.begin < 0 || n_keys < 0 || n_keys > call.sequences.max_keys)
      return "a sequence has more than max_keys keys";
    if (sequence.q_len < 0 || sequence.q_len > call.sequences.max_q_len) return "a sequence has more than max_q_len queries";
    if (sequence.q_len > sequence.end) return "a sequence has more queries than tokens";
    if (n_keys > 0 && (sequence.end - 1) / call.pages.page_len - first_page >= sequence.table_len)
      return "a sequence's keys are more than its page table holds";
  }
  return "";
}

}  // namespace

const char* attend(const DeviceAttend& call) {
  const char* reason = check(call);
  if (*reason != '\0') return reason;
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    for (int32_t kv_head = 0; kv_head < call.layer->n_kv_heads; ++kv_head) {
      const Keys keys = load_keys(call, call.sequences.sequences[i], kv_head);
      for (int32_t t = 0; t < call.sequences.sequences[i].q_len; ++t)
        for (int32_t g = 0; g < call.layer->group_size; ++g)
          attend_row(call, call.sequences.sequences[i], keys, t, kv_head * call.layer->group_size + g);
    }
  }
  return "";
}

}  // namespace stand_in
