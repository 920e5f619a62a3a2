// SPDX-License-Identifier: MIT
// Attention over pages as the table's comments say it, one row of logits at a time, with the oracle's own arithmetic for
// storage types.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "device/stand_in_call.h"
#include "device/stand_in_sums.h"
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

Keys load_keys(const DeviceAttend& call, const DeviceSequence& sequence, int32_t kv_head) {
  const Layer& layer = *call.layer;
  const auto n = static_cast<size_t>(sequence.end - sequence.begin);
  const auto k_dim = static_cast<size_t>(layer.k_head_dim), v_dim = static_cast<size_t>(layer.v_head_dim);
  const WindowRows window(call, sequence);
  Keys keys{std::vector<double>(n * k_dim), std::vector<double>(n * v_dim)};
  const auto load = [&](Plane codes, Plane scales, int32_t dtype, int64_t token, double* to, int32_t dim) {
    const std::byte* of_scales = reference::has_groups(dtype) ? window.row(scales, kv_head, token) : nullptr;
    reference::load_row(dtype, window.row(codes, kv_head, token), of_scales, dim, to);
  };
  for (size_t i = 0; i < n; ++i) {
    const int64_t token = sequence.begin + static_cast<int64_t>(i);
    load(kPlaneK, kPlaneKScales, window_layer(layer).k_type, token, keys.k.data() + i * k_dim, layer.k_head_dim);
    load(kPlaneV, kPlaneVScales, layer.v_type, token, keys.v.data() + i * v_dim, layer.v_head_dim);
  }
  return keys;
}

double logit(const Layer& layer, const std::vector<double>& q, const double* k) {
  const double x = dot(q.data(), k, q.size()) * static_cast<double>(layer.sm_scale);
  const auto cap = static_cast<double>(layer.soft_cap);
  return cap > 0.0 ? cap * std::tanh(x / cap) : x;
}

// Of a row over other keys.
struct Before {
  double lse = -INFINITY;
  const float* o = nullptr;
};

Before find_before(const DeviceAttend& call, int64_t row, int32_t head) {
  if (call.before_o == nullptr) return {};
  const int64_t at = row * call.layer->n_q_heads + head, dim = call.layer->v_head_dim;
  return {static_cast<double>(*on_device(call.before_lse + at, 4, "lse of before is no device memory")),
          on_device(call.before_o + at * dim, 4 * dim, "o of before is no device memory")};
}

// Query t of a sequence, one head.
void attend_row(const DeviceAttend& call, const DeviceSequence& sequence, const Keys& keys, int32_t t, int32_t head) {
  const Layer& layer = *call.layer;
  const int64_t row = sequence.first_row + t, self = sequence.end + sequence.n_after - sequence.q_len + t;
  std::vector<double> q(static_cast<size_t>(layer.k_head_dim)), o(static_cast<size_t>(layer.v_head_dim), 0.0);
  reference::load_all(call.q.dtype, row_at(call.q, row, head, layer.k_head_dim, "q is no device memory"), layer.k_head_dim,
                      q.data());
  const int64_t reach = layer.sliding_window > 0 ? layer.sliding_window : std::numeric_limits<int64_t>::max();
  const int64_t first = std::max(sequence.begin, reach > self ? 0 : self - reach + 1);

  const Before before = find_before(call, row, head);
  double m = call.sinks != nullptr ? static_cast<double>(call.sinks[head]) : -INFINITY;
  std::vector<double> logits;
  logits.reserve(static_cast<size_t>(std::max<int64_t>(0, sequence.end - first)));
  for (int64_t token = first; token <= std::min(self, sequence.end - 1); ++token) {
    logits.push_back(logit(layer, q, keys.k.data() + (token - sequence.begin) * layer.k_head_dim));
    m = std::max(m, logits.back());
  }
  m = std::max(m, before.lse);
  const double from = m == -INFINITY ? 0.0 : m;
  double sum = call.sinks != nullptr ? std::exp(static_cast<double>(call.sinks[head]) - from) : 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - from);
    const double* v = keys.v.data() + (first - sequence.begin + static_cast<int64_t>(i)) * layer.v_head_dim;
    sum += p;
    add_scaled(o.data(), p, v, o.size());
  }
  if (before.lse != -INFINITY) {
    const double p = std::exp(before.lse - from);
    sum += p;
    for (size_t c = 0; c < o.size(); ++c) o[c] += p * static_cast<double>(before.o[c]);
  }
  if (sum != 0.0)  // NaN is no empty state
    for (double& x : o) x /= sum;
  reference::store_all(call.o.dtype, o.data(), layer.v_head_dim,
                       row_at(call.o, row, head, layer.v_head_dim, "o is no device memory"));
  if (call.lse != nullptr)
    *on_device(call.lse + row * call.lse_token_stride + head * call.lse_head_stride, 4, "lse is no device memory") =
        sum != 0.0 ? static_cast<float>(from + std::log(sum)) : -std::numeric_limits<float>::infinity();
}

}  // namespace

void check(const DeviceAttend& call) {
  check_layer(*call.layer);
  check_pages(call.pages);
  check_sequences(call.sequences);
  require(call.workspace != nullptr, "there is no workspace");
  on_device(call.workspace, kWorkspaceBytes, "the workspace is no device memory");
  require((call.before_o == nullptr) == (call.before_lse == nullptr), "half a state of before");
  on_device(call.sinks, call.sinks != nullptr ? int64_t{4} * call.layer->n_q_heads : 0, "the sinks are no device memory");
}

bool perform(const DeviceAttend& call) {
  const auto* workspace = static_cast<const std::byte*>(call.workspace);
  require(std::all_of(workspace, workspace + kWorkspaceBytes, [](std::byte b) { return b == std::byte{0}; }),
          "the workspace is not zero");
  const DeviceSequence* sequences = read_sequences(call.sequences, -1);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) check_table(call.sequences, sequences[i], call.pages.page_len);
  for (int32_t i = 0; i < call.sequences.n_sequences; ++i) {
    for (int32_t kv_head = 0; kv_head < call.layer->n_kv_heads; ++kv_head) {
      const Keys keys = load_keys(call, sequences[i], kv_head);
      for (int32_t t = 0; t < sequences[i].q_len; ++t)
        for (int32_t g = 0; g < call.layer->group_size; ++g)
          attend_row(call, sequences[i], keys, t, kv_head * call.layer->group_size + g);
    }
  }
  return true;
}

}  // namespace stand_in
