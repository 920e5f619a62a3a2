// SPDX-License-Identifier: MIT
#include "lib/routes/route_costs.h"

#include <bit>
#include <limits>
#include <new>

namespace tandem {
namespace {

constexpr double kNewest = 0.3;         // share of the newest measurement
constexpr double kStreamNs = 40'000.0;  // to begin and to end a stream
constexpr double kTrialShare = 0.8;     // of what a trial said
constexpr double kNever = std::numeric_limits<double>::infinity();

int64_t class_of(int64_t n_queries) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n_queries < 1 ? 1 : n_queries)));
}

}  // namespace

RouteCosts::Shape RouteCosts::shape_of(const Layer& layer) {
  return {layer.k_type, layer.v_type, layer.k_head_dim, layer.v_head_dim, layer.n_kv_heads, layer.group_size};
}

void RouteCosts::note(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns, bool is_trial) {
  if (n_keys <= 0 || n_queries <= 0) return;
  const int64_t of_class = class_of(n_queries);
  const double rate = ns / static_cast<double>(n_keys) * static_cast<double>(of_class) / static_cast<double>(n_queries);
  const std::lock_guard lock(mutex_);
  Rate& known = host_[shape_of(layer)][of_class];
  if (is_trial && !known.is_trial) return;
  known.ns = is_trial || known.is_trial ? rate : known.ns + kNewest * (rate - known.ns);
  known.is_trial = is_trial;
}

void RouteCosts::note_host(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) noexcept {
  try {
    note(layer, n_queries, n_keys, ns, false);
  } catch (const std::bad_alloc&) {  // the next part tells
  }
}

bool RouteCosts::knows_host(const Layer& layer, int64_t n_queries) const {
  const std::lock_guard lock(mutex_);
  const auto found = host_.find(shape_of(layer));
  return found != host_.end() && found->second.count(class_of(n_queries)) > 0;
}

void RouteCosts::note_bus(double bytes_per_ns) {
  const std::lock_guard lock(mutex_);
  bytes_per_ns_ = bytes_per_ns;
}

bool RouteCosts::knows_bus() const {
  const std::lock_guard lock(mutex_);
  return bytes_per_ns_ > 0.0;
}

double RouteCosts::host_ns(const Layer& layer, int64_t n_queries, int64_t n_keys) const {
  const std::lock_guard lock(mutex_);
  const auto found = host_.find(shape_of(layer));
  if (found == host_.end() || found->second.empty()) return 0.0;
  const int64_t of_class = class_of(n_queries);
  auto rate = found->second.lower_bound(of_class);
  if (rate == found->second.end()) --rate;
  const double ns = rate->second.ns * (rate->second.is_trial ? kTrialShare : 1.0);
  return ns * static_cast<double>(n_keys) * static_cast<double>(n_queries) / static_cast<double>(rate->first);
}

double RouteCosts::stream_ns(int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return bytes_per_ns_ > 0.0 ? static_cast<double>(bytes) / bytes_per_ns_ + kStreamNs : kNever;
}

}  // namespace tandem
