// SPDX-License-Identifier: MIT
// One wave of blocks, each with a tile of query rows, attends the keys of a piece again and again, for as long as a few
// layers of a long append take. Clock rates fall under such a load. So the last calls, at the lower rates, predict the time
// of appends.
#include "lib/routes/prefill_trial.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>
#include <vector>

#include "lib/device/device_session.h"
#include "lib/machine/device_status.h"
#include "lib/routes/prefill_size.h"

namespace tandem {
namespace {

constexpr int64_t kKeys = 16384;
constexpr int32_t kMostHeads = 2;  // KV heads; several, as blocks of a piece do not all read the same keys
constexpr double kLoadNs = 250e6, kRoundNs = 4e6;
constexpr void* kStream = nullptr;

// Lies in device memory.
struct Described {
  DeviceSequence sequence;
  int64_t page = 0;  // the table's only page
};

double ns_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
}

// Fills memory with numbers near 1 in any type. Zeros would take less power, and so less time.
void make_numbers(std::byte* to, int64_t n_bytes) {
  std::minstd_rand random(1);
  for (int64_t i = 0; i < n_bytes; ++i) {
    const auto bits = static_cast<uint32_t>(random() >> 8);
    to[i] = static_cast<std::byte>(i % 2 == 1 ? (bits & 0x80) | 0x3f : bits & 0x37);
  }
}

// Fills memory with f16 scales of codes: 2^-6.
void make_scales(std::byte* to, int64_t n_bytes) {
  for (int64_t i = 0; i < n_bytes; ++i) to[i] = static_cast<std::byte>(i % 2 == 1 ? 0x24 : 0);
}

// Returns the query type for which this type of K has the fastest kernels.
int32_t query_type(const Layer& layer) {
  return layer.k_type == TANDEM_F32 || layer.k_type == TANDEM_F16 ? layer.k_type : TANDEM_BF16;
}

class PrefillTrial {
 public:
  PrefillTrial(const Device& device, const Layer& layer) : device_(device), layer_(layer) {
    layer_.n_kv_heads = std::min({kMostHeads, layer.n_kv_heads, std::max(device.info.n_multiprocessors, 1)});
    layer_.n_q_heads = layer_.n_kv_heads * layer_.group_size;
    n_queries_ = queries_of_a_wave(layer_, device.info.n_multiprocessors);
    layer_.sinks = nullptr;
    layer_.sliding_window = 0;
    call_.layer = &layer_;
    call_.pages.page_len = kKeys;
    call_.sequences.n_sequences = 1;
    call_.sequences.max_q_len = static_cast<int32_t>(n_queries_);
    call_.sequences.max_keys = kKeys;
  }
  bool is_served() const {
    DeviceError ignored;
    return device_.table->supports(device_.self, &layer_, call_.sequences.max_q_len, &ignored) == TANDEM_OK;
  }

  Status create(Tier& tier) {
    PagePlanes planes;
    const int64_t n_rows = n_queries_ * layer_.n_q_heads;
    int64_t end = planes.lay_out(layer_, layer_.n_kv_heads, kKeys, 0, kDeviceAlignment);
    const auto take = [&end](int64_t n) { return std::exchange(end, end + device_aligned(n)); };
    const int64_t q_at = take(n_rows * row_bytes(query_type(layer_), layer_.k_head_dim)), n_filled = end;
    const int64_t o_at = take(n_rows * layer_.v_head_dim * 4), lse_at = take(n_rows * 4);
    const int64_t described_at = take(sizeof(Described)), workspace_at = end;
    const int64_t workspace_bytes = device_.table->workspace_bytes(device_.self, &call_);
    TANDEM_TRY(Buffer::create(tier, end + device_aligned(workspace_bytes), Use::kStream, &memory_));
    std::byte* const data = memory_.data();
    call_.pages = planes.pages(data, kKeys);
    call_.q = {data + q_at, query_type(layer_), 0, int64_t{layer_.n_q_heads} * layer_.k_head_dim, layer_.k_head_dim};
    call_.o = {data + o_at, TANDEM_F32, 0, int64_t{layer_.n_q_heads} * layer_.v_head_dim, layer_.v_head_dim};
    call_.lse = reinterpret_cast<float*>(data + lse_at);
    call_.lse_token_stride = layer_.n_q_heads;
    call_.lse_head_stride = 1;
    call_.workspace = data + workspace_at;
    TANDEM_TRY(call_device(device_, &DeviceTable::fill, call_.workspace, 0, workspace_bytes, kStream));
    std::vector<std::byte> numbers(static_cast<size_t>(n_filled));
    make_numbers(numbers.data(), n_filled);
    for (const Plane p : {kPlaneKScales, kPlaneVScales})
      make_scales(numbers.data() + planes.at[p], layer_.n_kv_heads * planes.head_stride[p]);
    TANDEM_TRY(call_device(device_, &DeviceTable::copy, data, numbers.data(), n_filled, kStream));
    return describe(data + described_at);
  }

  // Returns the time of a call: the shorter of the last two rounds, as a thread that wakes late lengthens a round.
  Status time(double* ns) {
    const auto begin = std::chrono::steady_clock::now();
    TANDEM_TRY(run(1));  // one-time work
    double last = 0.0;
    TANDEM_TRY(time_round(1, ns));
    const auto n_calls = static_cast<int>(std::clamp(kRoundNs / *ns, 1.0, 100.0));
    do {
      last = *ns;
      TANDEM_TRY(time_round(n_calls, ns));
    } while (ns_since(begin) < kLoadNs);
    *ns = std::min(*ns, last);
    return {};
  }

 private:
  Status describe(std::byte* to) {
    Described described;
    described.sequence.end = kKeys;
    described.sequence.q_len = call_.sequences.max_q_len;
    described.sequence.n_after = n_queries_;
    described.sequence.table_len = 1;
    const auto* const there = reinterpret_cast<const Described*>(to);
    call_.sequences.sequences = &there->sequence;
    call_.sequences.page_tables = &there->page;
    TANDEM_TRY(call_device(device_, &DeviceTable::copy, to, &described, int64_t{sizeof described}, kStream));
    return call_device(device_, &DeviceTable::wait, kStream);
  }
  Status time_round(int n_calls, double* ns) {
    const auto begin = std::chrono::steady_clock::now();
    TANDEM_TRY(run(n_calls));
    *ns = ns_since(begin) / n_calls;
    return {};
  }
  Status run(int n_calls) {
    for (int i = 0; i < n_calls; ++i) TANDEM_TRY(call_device(device_, &DeviceTable::attend, &call_, kStream));
    return call_device(device_, &DeviceTable::wait, kStream);
  }

  const Device& device_;
  Layer layer_;
  int64_t n_queries_ = 0;
  Buffer memory_;
  DeviceAttend call_;
};

}  // namespace

Status try_prefill(const Device& device, Tier& device_tier, const Layer& layer, double* tile_ns) {
  PrefillTrial trial(device, layer);
  *tile_ns = 0.0;
  if (!trial.is_served()) return {};
  double ns = 0.0;
  TANDEM_TRY(trial.create(device_tier));
  TANDEM_TRY(trial.time(&ns));
  *tile_ns = tile_ns_of_wave(ns, kKeys);
  return {};
}

}  // namespace tandem
