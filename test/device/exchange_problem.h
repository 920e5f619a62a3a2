// SPDX-License-Identifier: MIT
// Tensors, a window, states and an exchange, set up as arguments of append(), attend() and merge().
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "device/hand_over.h"
#include "reference/random.h"
#include "reference/reference_layer.h"
#include "reference/rounding.h"

namespace stand_in {

using namespace tandem;

struct ExchangeCase {
  const char* name;
  int32_t k_type = TANDEM_F32, v_type = TANDEM_F32;
  int32_t k_dim = 64, v_dim = 64, n_q_heads = 4, n_kv_heads = 2;
  int32_t tensor_type = TANDEM_F32;
  int64_t sliding_window = 0;
  float soft_cap = 0.0f;
  bool has_sinks = false, has_lse = true;
  bool is_replayed = false;
  int32_t n_slots = 2;
};

inline constexpr int32_t kPageLen = 64, kTableLen = 4;

// One step of one sequence.
struct Span {
  int64_t begin, end;
  int32_t q_len;
};

inline Layer layer_of(const ExchangeCase& of) {
  Layer layer;
  layer.n_q_heads = of.n_q_heads;
  layer.n_kv_heads = of.n_kv_heads;
  layer.group_size = of.n_q_heads / of.n_kv_heads;
  layer.k_head_dim = of.k_dim;
  layer.v_head_dim = of.v_dim;
  layer.k_type = of.k_type;
  layer.v_type = of.v_type;
  layer.sm_scale = 0.17f;
  layer.soft_cap = of.soft_cap;
  layer.sliding_window = of.sliding_window;
  return layer;
}

inline reference::RefLayer reference_of(const ExchangeCase& of, const std::vector<float>& sinks) {
  reference::RefLayer layer;
  layer.n_q_heads = of.n_q_heads;
  layer.n_kv_heads = of.n_kv_heads;
  layer.k_head_dim = of.k_dim;
  layer.v_head_dim = of.v_dim;
  layer.k_type = of.k_type;
  layer.v_type = of.v_type;
  layer.sm_scale = 0.17f;
  layer.soft_cap = of.soft_cap;
  if (of.has_sinks) layer.sinks = sinks;
  return layer;
}

// The tensors of a call, its window and its exchange. Each has the layout that append(), attend() and merge() expect.
class ExchangeProblem {
 public:
  ExchangeProblem(const ExchangeCase& of, const std::vector<Span>& first, int32_t n_tokens, uint64_t seed)
      : of_(of), layer_(layer_of(of)), random_(seed), hand_over(&host, layer_, of.n_slots, n_tokens) {
    append.layer = attend.layer = merge.layer = &layer_;
    append.n_tokens = merge.n_tokens = n_tokens;
    append.exchange = merge.exchange = hand_over.exchange;
    make_rows(&append.q, n_tokens * of.n_q_heads, of.n_q_heads, of.k_dim);
    make_rows(&append.k, n_tokens * of.n_kv_heads, of.n_kv_heads, of.k_dim);
    make_rows(&append.v, n_tokens * of.n_kv_heads, of.n_kv_heads, of.v_dim);
    make_rows(&merge.o_out, n_tokens * of.n_q_heads, of.n_q_heads, of.v_dim);
    make_pool(static_cast<int32_t>(first.size()));
    make_states(n_tokens);
    descriptors = host.upload(describe(first));
    DeviceSequences& all = append.sequences;
    all.sequences = descriptors;
    all.page_tables = host.upload(page_tables_);
    all.n_sequences = static_cast<int32_t>(first.size());
    all.max_q_len = n_tokens;
    all.max_keys = kPageLen * kTableLen;
    attend.sequences = merge.sequences = all;
  }

  std::vector<DeviceSequence> describe(const std::vector<Span>& spans) const {
    std::vector<DeviceSequence> sequences;
    int32_t first_row = 0;
    for (const Span& span : spans) {
      DeviceSequence sequence;
      sequence.begin = span.begin;
      sequence.end = span.end;
      sequence.q_len = span.q_len;
      sequence.first_row = first_row;
      sequence.table_begin = static_cast<int32_t>(sequences.size()) * kTableLen;
      sequence.table_len = kTableLen;
      sequence.has_host_part = span.begin > 0 ? 1 : 0;
      first_row += span.q_len;
      sequences.push_back(sequence);
    }
    return sequences;
  }

  // Returns n random values that the tensors' type can represent, in rows without gaps.
  std::vector<double> draw(int64_t n) {
    std::vector<double> values(static_cast<size_t>(n));
    for (double& x : values) x = reference::round_to(of_.tensor_type, random_.normal());
    return values;
  }
  // Returns the values as bytes of a tensor with the strides of `rows`. Gaps are 0xff.
  std::vector<std::byte> spread(const DeviceRows& rows, const std::vector<double>& values, int64_t n_heads, int32_t dim) {
    const auto n_rows = static_cast<int64_t>(values.size()) / dim;
    std::vector<std::byte> bytes(static_cast<size_t>(n_rows / n_heads * rows.token_stride * size_of()), std::byte{0xff});
    for (int64_t i = 0; i < n_rows; ++i)
      reference::store_all(of_.tensor_type, values.data() + i * dim, dim,
                           bytes.data() + (i / n_heads * rows.token_stride + i % n_heads * rows.head_stride) * size_of());
    return bytes;
  }
  const std::byte* out_row(const std::byte* out, int64_t token, int64_t head) const {
    return out + (token * merge.o_out.token_stride + head * merge.o_out.head_stride) * size_of();
  }
  int64_t size_of() const { return reference::element_bytes(of_.tensor_type); }
  int64_t out_bytes() const { return (merge.n_tokens + 1) * merge.o_out.token_stride * size_of(); }
  int64_t lse_floats() const { return (merge.n_tokens + 1) * merge.lse_token_stride; }

  Host host;

 protected:
  const ExchangeCase of_;
  const Layer layer_;
  reference::Random random_;

 public:
  HandOver hand_over;
  DeviceAppend append;
  DeviceAttend attend;
  DeviceMerge merge;
  DeviceSequence* descriptors = nullptr;
  std::byte* pool = nullptr;
  int64_t pool_bytes = 0;

 protected:
  std::vector<int64_t> page_tables_;
  std::vector<float> sinks_;

 private:
  void make_rows(DeviceRows* rows, int64_t n_rows, int32_t n_heads, int32_t dim) {
    rows->dtype = of_.tensor_type;
    rows->head_stride = dim + 3;
    rows->token_stride = n_heads * rows->head_stride + 5;
    rows->data = host.allocate((n_rows / n_heads + 1) * rows->token_stride * size_of());
  }

  // Lays pages out backwards, so page 0 of the tables is the last one in memory.
  void make_pool(int32_t n_sequences) {
    const PlaneBytes bytes = plane_bytes(layer_);
    const int32_t n_pages = n_sequences * kTableLen;
    int64_t offsets[kPlanes], page_bytes = 0;
    for (int32_t p = 0; p < kPlanes; ++p) {
      offsets[p] = page_bytes;
      append.pages.head_stride[p] = kPageLen * bytes.of[p] + 16;
      page_bytes += layer_.n_kv_heads * append.pages.head_stride[p];
    }
    pool_bytes = n_pages * page_bytes;
    pool = host.allocate(pool_bytes);
    for (int32_t p = 0; p < kPlanes; ++p) append.pages.planes[p] = pool + pool_bytes - page_bytes + offsets[p];
    append.pages.page_len = kPageLen;
    for (int32_t i = 0; i < n_pages; ++i) page_tables_.push_back(-i * page_bytes);
    attend.pages = append.pages;
  }

  void make_states(int64_t n_tokens) {
    const int64_t n_rows = n_tokens * of_.n_q_heads;
    attend.q = append.q;
    attend.o.data = host.allocate(n_rows * of_.v_dim * 4);
    attend.o.dtype = TANDEM_F32;
    attend.o.head_stride = of_.v_dim;
    attend.o.token_stride = int64_t{of_.n_q_heads} * of_.v_dim;
    attend.lse = reinterpret_cast<float*>(host.allocate(n_rows * 4));
    attend.lse_token_stride = of_.n_q_heads;
    attend.lse_head_stride = 1;
    attend.workspace = host.upload(std::vector<char>(kWorkspaceBytes, 0));
    merge.o = static_cast<const float*>(attend.o.data);
    merge.lse = attend.lse;
    for (int32_t h = 0; h < of_.n_q_heads; ++h) sinks_.push_back(static_cast<float>(random_.normal()));
    if (of_.has_sinks) merge.sinks = host.upload(sinks_);
    merge.lse_head_stride = 2;
    merge.lse_token_stride = 2 * of_.n_q_heads + 1;
    if (of_.has_lse) merge.lse_out = reinterpret_cast<float*>(host.allocate(lse_floats() * 4));
  }
};

}  // namespace stand_in
