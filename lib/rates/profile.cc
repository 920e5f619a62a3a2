// SPDX-License-Identifier: MIT
#include "lib/rates/profile.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include "lib/rates/part_times.h"

namespace tandem {
namespace {

constexpr double kNewest = 0.3;       // weight of the newest measurement
constexpr double kMostChange = 2.0;   // largest factor of one change
constexpr double kHostNs = 10'000.0;  // the CPU's start-up, to wake the workers, before any trial
constexpr double kLeastHostNs = 2'000.0, kMostHostNs = 100'000.0;
constexpr double kTrialShare = 0.8;       // share of a trial's time that counts
constexpr double kLeastShare = 0.5;       // least share of a part's work and time, in the shared span, that shows a rate
constexpr double kLeastNs = 200'000.0;    // shortest time that shows a rate: moments are known to some microseconds
constexpr double kLeastBytes = 0.15;      // least share of bytes that arrive after the queries, to show a rate
constexpr double kMostSlowed = 1.3;       // most that the CPU slows the bus: a lone pace that implies more is wrong
constexpr double kLeastWork = 0.25;       // least share of the time that is not start-up
constexpr double kForgotten = 0.02;       // shift towards the trial's rate, for each part that does not measure the rate
constexpr int64_t kIdleParts = 64;        // parts without keys after which the CPU is tried again
constexpr double kBesideProducts = 1.15;  // slowdown of the bus beside products, until a part shows it: that of an H200
constexpr double kLeastOfBus = 0.7;       // least share of its lone pace that the bus keeps unless the device delays it
constexpr double kLittle = 0.03;          // share of a part's time for which an idle CPU gets keys, by the trial's rate
constexpr double kNever = std::numeric_limits<double>::infinity();

void correct(double* known, double ns) {
  if (!(ns > 0.0)) return;
  if (*known <= 0.0) {
    *known = ns;
    return;
  }
  *known += kNewest * (std::clamp(ns, *known / kMostChange, *known * kMostChange) - *known);
}

// A plan avoids a route whose known time is too long, so no later part would correct this time. The first part may include
// one-time work of the process. So its time does not become the known one, but moves the default a little.
void correct_end(double* known, double ns) {
  if (*known <= 0.0) *known = kStreamEndNs;
  correct(known, ns);
}

// Moves a known time a little towards the trial's, unless the known time is shorter.
void forget(double* known, double tried) {
  if (*known > tried && tried > 0.0) *known += kForgotten * (tried - *known);
}

// Returns the time without the start-up time.
double without(double begin_ns, double ns) { return std::max(ns - begin_ns, kLeastWork * ns); }

// Returns the pace, in ns per unit, of CPU or bus while the other was busy too. After the other ended (others_ns), this one
// went on at its lone pace alone_ns, and that span is taken off. The average over all of ns is returned if this one ended
// first, if the shared span is too short to measure, or if alone_ns must be wrong. In the latter two cases it is too fast.
double slowed_ns(double units, double ns, double others_ns, double alone_ns) {
  if (ns <= others_ns || ns < kLeastNs || others_ns < kLeastShare * ns) return ns / units;
  const double units_before = units - (ns - others_ns) / alone_ns;
  return units_before > kLeastShare * units ? std::min(others_ns / units_before, kMostChange * ns / units) : ns / units;
}

int64_t class_of(int64_t n_queries) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n_queries < 1 ? 1 : n_queries)));
}

LayerShape shape_of(const Layer& layer) {
  return {layer.k_type, layer.v_type, layer.k_head_dim, layer.v_head_dim, layer.n_kv_heads, layer.group_size};
}

RebuiltShape rebuilt_shape_of(const Layer& layer) {
  RebuiltShape shape;
  const LayerShape keys = shape_of(layer);
  std::copy(keys.begin(), keys.end(), shape.begin());
  shape[6] = layer.hidden_dim();
  shape[7] = layer.x_type;
  return shape;
}

}  // namespace

Profile::Costs& Profile::costs(const Layer& layer, int64_t n_queries) {
  return costs_[shape_of(layer)][class_of(n_queries)];
}

bool Profile::knows_rebuild(const Layer& layer) const {
  const std::lock_guard lock(mutex_);
  const auto known = rebuilt_.find(rebuilt_shape_of(layer));
  return known != rebuilt_.end() && known->second.key_ns > 0.0;
}

void Profile::note_rebuild_trial(const Layer& layer, double ns) {
  const std::lock_guard lock(mutex_);
  Rebuilt& known = rebuilt_[rebuilt_shape_of(layer)];
  known.key_ns = known.tried_ns = ns;
}

double Profile::x_ns(const Rebuilt& known) const { return known.x_ns > 0.0 ? known.x_ns : kBesideProducts * bus_ns_; }

int64_t Profile::as_keys(const Layer& layer, int64_t x_bytes) const {
  if (x_bytes == 0) return 0;
  const std::lock_guard lock(mutex_);
  const auto known = rebuilt_.find(rebuilt_shape_of(layer));
  if (known == rebuilt_.end() || bus_ns_ <= 0.0) return x_bytes;
  return std::llround(static_cast<double>(x_bytes) * x_ns(known->second) / bus_ns_);
}

// If the bus took much longer than it does alone, it was waiting for free buffers, and so for the device. Then the part
// shows the device's time per key.
void Profile::note_rebuilt(const Layer& layer, const RebuiltTimes& times) noexcept {
  if (times.n_rows <= 0 || !(times.total_ns > 0.0)) return;
  const std::lock_guard lock(mutex_);
  Rebuilt* found = nullptr;
  try {
    found = &rebuilt_[rebuilt_shape_of(layer)];
  } catch (const std::bad_alloc&) {  // no memory: learn from the next part
    return;
  }
  Rebuilt& known = *found;
  const double end_ns = std::max(1.0, times.total_ns - times.late_ns);
  if (times.x_bytes == 0) {  // learn from CPU or bus, whichever ended last
    if (times.host_ns > times.late_ns + known.end_ns)
      correct_end(&known.host_end_ns, times.total_ns - times.host_ns);
    else if (times.late_ns > 0.0 && times.is_steady)
      correct_end(&known.end_ns, end_ns);
    return;
  }
  const double key_ns = times.total_ns / static_cast<double>(times.n_rows), bytes = static_cast<double>(times.x_bytes);
  if (kLeastOfBus * times.bus_ns > bytes * bus_ns_) return correct(&known.key_ns, key_ns);
  if (times.late_ns == 0.0) return;  // it is unknown how many keys the device had made before the queries arrived
  if (known.key_ns > key_ns) correct(&known.key_ns, key_ns);
  if (!times.is_steady) return;
  correct(&known.x_ns, times.bus_ns / bytes);
  correct_end(&known.end_ns, end_ns);
}

// As in note_idle_host(): a rate that no part measures any more may come from a busy moment. So it moves towards the trial's
// rate or the default.
void Profile::note_not_rebuilt(const Layer& layer) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = rebuilt_.find(rebuilt_shape_of(layer));
  if (found == rebuilt_.end()) return;
  Rebuilt& known = found->second;
  forget(&known.key_ns, known.tried_ns);
  forget(&known.x_ns, kBesideProducts * bus_ns_);
  forget(&known.end_ns, kStreamEndNs);
  forget(&known.host_end_ns, kStreamEndNs);
}

void Profile::note_prefill_trial(const Layer& layer, double ns) {
  const std::lock_guard lock(mutex_);
  prefill_tile_ns_[shape_of(layer)] = ns;
}

void Profile::note_prefill(const Layer& layer, double tile_ns, double expected_ns, double ns) noexcept {
  if (!(ns > 0.0 && expected_ns > 0.0)) return;
  const std::lock_guard lock(mutex_);
  try {
    correct(&prefill_tile_ns_[shape_of(layer)], tile_ns * ns / expected_ns);
  } catch (const std::bad_alloc&) {  // no memory: learn from the next part
  }
}

double Profile::prefill_tile_ns(const Layer& layer) const {
  const std::lock_guard lock(mutex_);
  const auto found = prefill_tile_ns_.find(shape_of(layer));
  return found != prefill_tile_ns_.end() ? found->second : 0.0;
}

// After kIdleParts parts without keys, the CPU's next part may lower its known time per key straight to what this part
// measured. Otherwise rates move slowly.
void Profile::Costs::note_due(double keys, double taken_ns) {
  if (std::exchange(n_idle, 0) < kIdleParts) return;
  if (!is_trial) ns = std::min(ns, taken_ns / keys);
  slowed_ns = std::min(slowed_ns, taken_ns / keys);
}

// Until a part has measured the CPU alone, a part in which the bus slowed it shows more than the trial. The trial's slowdown
// is divided out.
double Profile::Costs::host_ns() const {
  if (!is_trial) return ns;
  return slowed_ns > 0.0 ? slowed_ns / tried.host : ns * kTrialShare;
}

const Profile::Costs* Profile::find_own(const Layer& layer, int64_t n_queries) const {
  const auto found = costs_.find(shape_of(layer));
  if (found == costs_.end()) return nullptr;
  const auto of_queries = found->second.find(class_of(n_queries));
  return of_queries != found->second.end() ? &of_queries->second : nullptr;
}

const Profile::Costs* Profile::find(const Layer& layer, int64_t n_queries, int64_t* of_class) const {
  const auto found = costs_.find(shape_of(layer));
  if (found == costs_.end() || found->second.empty()) return nullptr;
  auto of_queries = found->second.lower_bound(class_of(n_queries));
  if (of_queries == found->second.end()) --of_queries;
  *of_class = of_queries->first;
  return &of_queries->second;
}

bool Profile::knows_host(const Layer& layer, int64_t n_queries) const {
  const std::lock_guard lock(mutex_);
  return find_own(layer, n_queries) != nullptr;
}

bool Profile::knows_bus() const {
  const std::lock_guard lock(mutex_);
  return bus_ns_ > 0.0;
}

Profile::Costs* Profile::costs_or_null(const Layer& layer, int64_t n_queries) noexcept {
  try {
    return &costs(layer, n_queries);
  } catch (const std::bad_alloc&) {  // no memory: learn from the next part
    return nullptr;
  }
}

// Costs are stored for the number of queries of their class, a power of two.
void Profile::note_trial(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) {
  if (n_keys <= 0 || n_queries <= 0) return;
  const std::lock_guard lock(mutex_);
  Costs& known = costs(layer, n_queries);
  if (!known.is_trial) return;
  known.ns = without(known.begin_ns, ns) / static_cast<double>(n_keys) * static_cast<double>(class_of(n_queries)) /
             static_cast<double>(n_queries);
  known.tried_ns = kTrialShare * known.ns;
}

void Profile::note_begin_trial(const Layer& layer, int64_t n_queries, double ns) {
  const std::lock_guard lock(mutex_);
  Costs& known = costs(layer, n_queries);
  known.begin_ns = known.tried_begin_ns = std::clamp(ns, kLeastHostNs, kMostHostNs);
}

void Profile::note_slowed_trial(const Layer& layer, int64_t n_queries, const Slowed& slowed) {
  const std::lock_guard lock(mutex_);
  costs(layer, n_queries).tried = {std::clamp(slowed.host, 1.0, 3.0), std::clamp(slowed.bus, 1.0, 3.0)};
}

void Profile::note_bus_trial(double bytes_per_ns) {
  const std::lock_guard lock(mutex_);
  bus_ns_ = 1.0 / bytes_per_ns;
}

void Profile::note_host(const Layer& layer, int64_t n_queries, int64_t n_keys, double ns) noexcept {
  if (n_keys <= 0 || n_queries <= 0) return;
  const double share = static_cast<double>(n_queries) / static_cast<double>(class_of(n_queries));
  const std::lock_guard lock(mutex_);
  Costs* const known = costs_or_null(layer, n_queries);
  if (known == nullptr) return;
  const double keys = static_cast<double>(n_keys) * share;
  known->note_due(keys, ns);
  forget(&known->slowed_ns, known->host_ns() * known->tried.host);  // this part does not measure the mutual slowdown
  forget(&known->bus_ns, bus_ns_ * known->tried.bus);
  if (std::exchange(known->is_trial, false)) known->ns = 0.0;
  correct(&known->ns, without(known->begin_ns, ns) / keys);
}

void Profile::note_bus(int64_t bytes, double ns) noexcept {
  if (bytes <= 0) return;
  const std::lock_guard lock(mutex_);
  correct(&bus_ns_, ns / static_cast<double>(bytes));
}

void Profile::note_bus_at_most(int64_t bytes, double ns) noexcept {
  if (bytes <= 0) return;
  const std::lock_guard lock(mutex_);
  const double most = ns / static_cast<double>(bytes);
  if (bus_ns_ > most) correct(&bus_ns_, most);
}

void Profile::note_joint(const Layer& layer, const JointPart& part) noexcept {
  if (part.host_keys <= 0 || part.bus_bytes <= 0 || part.n_queries <= 0) return;
  const std::lock_guard lock(mutex_);
  Costs* const known = costs_or_null(layer, part.n_queries);
  if (known == nullptr) return;
  const double share = static_cast<double>(part.n_queries) / static_cast<double>(class_of(part.n_queries));
  const double host = static_cast<double>(part.host_keys) * share, host_ns = without(known->begin_ns, part.host_ns);
  known->note_due(host, part.host_ns);
  const double host_alone = known->host_ns() > 0.0 ? known->host_ns() : host_ns / host;
  if (known->slowed_ns == 0.0 && known->host_ns() > 0.0) known->slowed_ns = host_alone * known->tried.host;
  correct(&known->slowed_ns, slowed_ns(host, host_ns, part.bus_ns, host_alone));
  if (!known->is_trial && known->ns > known->slowed_ns) correct(&known->ns, known->slowed_ns);
  if (!part.bus_tells) return;
  const double all = static_cast<double>(part.bus_bytes),
               bus_alone = bus_ns_ > 0.0 ? bus_ns_ : (part.ahead_ns + part.bus_ns) / all;
  const double had = part.ahead_ns / bus_alone, room = static_cast<double>(part.ahead_bytes);
  const double bytes = all - std::min(had, room), ns = had < room ? part.bus_ns : without(kFreeNs, part.bus_ns);
  const double least = had < room ? (part.ahead_ns + ns / kMostSlowed) / all : ns / (kMostSlowed * bytes);
  // At least `left` bytes remained when the queries arrived. If no more remained, the bus first waited kFreeNs for a buffer.
  // If more remained, it took less time per byte. So its time per byte is at most this.
  const double left = all - room;
  double most = (part.ahead_ns + part.bus_ns) / all;
  if (left > kLeastBytes * all) most = std::min(most, without(kFreeNs, part.bus_ns) / left);
  if (bus_ns_ > most) correct(&bus_ns_, most);
  if (bus_ns_ > 0.0 && bus_ns_ < least && (had < room || bytes > kLeastBytes * all)) correct(&bus_ns_, least);
  if (bytes > kLeastBytes * all) correct(&known->bus_ns, std::max(bus_alone, slowed_ns(bytes, ns, host_ns, bus_alone)));
}

// The start-up time and the slowdown of the bus, which no part measures now, may have changed, or may be the reason why the
// CPU is idle. So they move towards the trial's. The CPU's slowness itself is not forgotten: a large share of keys would
// again take too long. A few keys (host_due_keys()) show as well whether it is still slow.
void Profile::note_idle_host(const Layer& layer, int64_t n_queries) noexcept {
  const std::lock_guard lock(mutex_);
  if (find_own(layer, n_queries) == nullptr) return;
  Costs& known = costs(layer, n_queries);
  ++known.n_idle;
  forget(&known.begin_ns, known.tried_begin_ns);
  forget(&known.bus_ns, bus_ns_ * known.tried.bus);
}

int64_t Profile::host_due_keys(const Layer& layer, int64_t n_queries, double total_ns) const {
  const std::lock_guard lock(mutex_);
  const Costs* const known = find_own(layer, n_queries);
  if (known == nullptr || known->n_idle < kIdleParts || known->tried_ns <= 0.0) return 0;
  return static_cast<int64_t>(kLittle * total_ns / known->tried_ns);
}

void Profile::note_ahead(const Layer& layer, const JointPart& part) noexcept {
  if (part.host_keys <= 0 || part.bus_bytes <= 0) return;
  note_host(layer, part.n_queries, part.host_keys, part.host_ns);
  const std::lock_guard lock(mutex_);
  Costs* const known = costs_or_null(layer, part.n_queries);
  if (known == nullptr) return;
  if (known->slowed_ns > 0.0 && known->slowed_ns < known->ns) correct(&known->slowed_ns, known->ns);
  const double most = part.ahead_ns / static_cast<double>(part.bus_bytes);
  if (known->bus_ns > most) correct(&known->bus_ns, most);
}

double Profile::host_ns(const Layer& layer, int64_t n_queries, int64_t n_keys) const {
  const std::lock_guard lock(mutex_);
  int64_t of_class = 1;
  const Costs* known = find(layer, n_queries, &of_class);
  if (known == nullptr) return 0.0;
  return known->host_ns() * static_cast<double>(n_keys) * static_cast<double>(n_queries) / static_cast<double>(of_class);
}

double Profile::stream_ns(int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return bus_ns_ > 0.0 ? static_cast<double>(bytes) * bus_ns_ + kStreamEndNs : kNever;
}

PlanRates Profile::rates(const Layer& layer, int64_t n_queries, int64_t key_bytes) const {
  const std::lock_guard lock(mutex_);
  PlanRates rates;
  rates.host_begin_ns = kHostNs;
  rates.bus_begin_ns = kStreamEndNs;
  PlanColumn& stream = rates.columns[kPlanStream];
  stream.is_allowed = bus_ns_ > 0.0;
  stream.bus_ns = bus_ns_ * static_cast<double>(key_bytes);
  if (layer.x_type != 0) {
    const auto rebuild = rebuilt_.find(rebuilt_shape_of(layer));
    PlanColumn& recompute = rates.columns[kPlanRecompute];
    const Rebuilt known = rebuild != rebuilt_.end() ? rebuild->second : Rebuilt();
    recompute.is_allowed = bus_ns_ > 0.0 && known.key_ns > 0.0;
    recompute.bus_ns = x_ns(known) * static_cast<double>(layer.x_bytes());
    recompute.device_ns = known.key_ns;
    rates.rebuilt_end_ns = known.end_ns;
    rates.rebuilt_host_end_ns = known.host_end_ns;
  }
  int64_t of_class = 1;
  const Costs* known = find(layer, n_queries, &of_class);
  if (known == nullptr) return rates;
  const double host = known->host_ns();
  rates.host_slowed = known->slowed_ns > 0.0 && host > 0.0 ? known->slowed_ns / host : known->tried.host;
  if (known->begin_ns > 0.0) rates.host_begin_ns = known->begin_ns;
  rates.bus_slowed = known->bus_ns > 0.0 && bus_ns_ > 0.0 ? known->bus_ns / bus_ns_ : known->tried.bus;
  rates.host_slowed = std::clamp(rates.host_slowed, 1.0, 4.0);
  rates.bus_slowed = std::clamp(rates.bus_slowed, 1.0, 4.0);
  return rates;
}

}  // namespace tandem
