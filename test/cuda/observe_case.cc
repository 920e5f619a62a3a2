// SPDX-License-Identifier: MIT
#include "observe_case.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "device/layer_of.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace tandem::test {
namespace {

constexpr std::byte kUnused{0xff};
constexpr int64_t kUnit = 256;
constexpr double kEpsilon = 0x1p-24;  // of a rounding to f32

int64_t aligned(int64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

float number_at(const std::vector<std::byte>& bytes, int64_t at) {
  float x;
  std::memcpy(&x, bytes.data() + at, sizeof x);
  return x;
}

}  // namespace

// ---- construction ------------------------------------------------------------------------------------------------------

ObserveCase::ObserveCase(const OpenDevice& device, const ObserveOptions& options) : device_(device), options_(options) {
  if (options_.max_tokens == 0)
    for (const ObserveSequence& sequence : options_.sequences) options_.max_tokens += sequence.q_len;
  layer_ = layer_of(options_.layer);
  row_bytes_ = plane_bytes(layer_);
  reference::Random random(options_.seed);
  make_queries(random);
  make_exchange();
  append_call.layer = observe_call.layer = &layer_;
  append_call.n_tokens = observe_call.n_tokens = options_.max_tokens;
  observe_call.has_appended = options_.has_appended;
  observe_call.alpha = options_.alpha;
  observe_call.n_counted = options_.n_counted;
  const auto n_sequences = static_cast<int32_t>(options_.sequences.size());
  const int64_t n_pages = int64_t{n_sequences} * options_.table_len;
  for (int64_t i = 0; i < n_pages; ++i) tables_.push_back(i);
  for (size_t i = tables_.size(); i > 1; --i)
    std::swap(tables_[i - 1], tables_[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  DeviceSequences& sequences = observe_call.sequences;
  sequences.sequences =
      static_cast<const DeviceSequence*>(own(nullptr, static_cast<int64_t>(sizeof(DeviceSequence)) * n_sequences));
  sequences.n_sequences = n_sequences;
  sequences.max_q_len = options_.max_tokens;
  sequences.max_keys = options_.max_keys;
  set_sequences(options_.sequences);
  make_pool(random);
  std::vector<int64_t> from_first = tables_;
  for (int64_t& page : from_first) page -= called_0();
  sequences.page_tables = static_cast<const int64_t*>(own(from_first.data(), n_pages * 8));
  append_call.sequences = sequences;
}

ObserveCase::~ObserveCase() {
  device_.wait();
  for (void* data : owned_) device_.table->release(device_.self, data);
  for (void* data : shared_) device_.table->release_shared(device_.self, data);
}

void* ObserveCase::own(const void* from, int64_t bytes) {
  owned_.push_back(device_.allocate(bytes));
  if (from != nullptr) device_.upload(owned_.back(), from, bytes);
  return owned_.back();
}

void* ObserveCase::share(int64_t bytes, void** device) {
  void* host = nullptr;
  device_.must(device_.table->allocate_shared(device_.self, bytes, &host, device, &error), error);
  shared_.push_back(host);
  return host;
}

void ObserveCase::make_queries(reference::Random& random) {
  const int64_t dim = layer_.k_head_dim, n_rows = int64_t{options_.max_tokens} * layer_.n_q_heads;
  DeviceRows& rows = observe_call.q;
  rows.dtype = options_.q_type;
  rows.head_stride = dim + options_.gap;
  rows.token_stride = layer_.n_q_heads * rows.head_stride + options_.gap;
  const int64_t element = reference::element_bytes(options_.q_type);
  std::vector<std::byte> bytes(static_cast<size_t>((options_.max_tokens + 1) * rows.token_stride * element), kUnused);
  q_.resize(static_cast<size_t>(n_rows * dim));
  for (double& x : q_) x = reference::round_to(options_.q_type, options_.q_size * random.normal());
  for (int64_t row = 0; row < n_rows; ++row) {
    const int64_t at = row / layer_.n_q_heads * rows.token_stride + row % layer_.n_q_heads * rows.head_stride;
    reference::store_all(options_.q_type, q_.data() + row * dim, dim, bytes.data() + at * element);
  }
  rows.data = own(bytes.data(), static_cast<int64_t>(bytes.size()));
  lse_.resize(static_cast<size_t>(n_rows));
  observe_call.lse = static_cast<const float*>(own(nullptr, n_rows * 4));
}

void ObserveCase::make_exchange() {
  DeviceExchange& exchange = observe_call.exchange;
  const int64_t n_rows = int64_t{options_.max_tokens} * layer_.n_q_heads;
  int64_t at = kUnit;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at;
    at += aligned(bytes) + kUnit;
    return begin;
  };
  exchange.q_at = place(n_rows * layer_.k_head_dim * 4);
  exchange.o_at = place(n_rows * layer_.v_head_dim * 4);
  exchange.lse_at = place(n_rows * 4);
  for (int32_t p = 0; p < kPlanes; ++p)
    exchange.rows_at[p] = place(int64_t{options_.max_tokens} * layer_.n_kv_heads * row_bytes_.of[p]);
  exchange.n_evicted = options_.page_len * options_.table_len * static_cast<int32_t>(options_.sequences.size()) + 3;
  exchange.maw_at = place(int64_t{4} * layer_.n_q_heads * exchange.n_evicted);
  exchange.slot_bytes = at;
  exchange.n_slots = 2;
  exchange.n_rows = options_.max_tokens;
  exchange.timeout_ns = 20'000'000'000;
  void* device = nullptr;
  flags = static_cast<ExchangeFlags*>(share(sizeof(ExchangeFlags), &device));
  exchange.flags = static_cast<ExchangeFlags*>(device);
  host_slots_ = static_cast<std::byte*>(share(2 * at, &device));
  exchange.slots = static_cast<std::byte*>(device);
  std::memset(host_slots_, 0xff, static_cast<size_t>(2 * at));
  const int64_t zeros[kExchangeWords] = {};
  exchange.state = static_cast<int64_t*>(own(zeros, sizeof zeros));
  append_call.exchange = exchange;
}

void ObserveCase::make_pool(reference::Random& random) {
  DevicePages& pages = observe_call.pages;
  pages.page_len = options_.page_len;
  for (int32_t p = 0; p < 2; ++p) {
    plane_at_[p] = page_bytes_;
    pages.head_stride[p] = row_bytes_.of[p] * options_.page_len + 32;
    page_bytes_ += pages.head_stride[p] * layer_.n_kv_heads;
  }
  maw_at_ = page_bytes_;
  page_bytes_ += aligned(int64_t{4} * layer_.n_q_heads * options_.page_len);
  for (int64_t& page : tables_) page *= page_bytes_;
  const auto n_pages = static_cast<int64_t>(tables_.size());
  pool_.assign(static_cast<size_t>(n_pages * page_bytes_), kUnused);
  if (options_.is_full) {
    const int64_t n_distinct = options_.n_distinct > 0 ? options_.n_distinct : n_pages;
    for (int64_t i = 0; i < n_pages; ++i)
      if (i < n_distinct)
        for (int32_t slot = 0; slot < options_.page_len; ++slot) fill_slot(random, i * page_bytes_, slot, true);
      else
        std::copy_n(pool_.begin() + i % n_distinct * page_bytes_, page_bytes_, pool_.begin() + i * page_bytes_);
  } else {
    for (const DeviceSequence& sequence : descriptors_)
      for (int64_t token = sequence.begin; token < sequence.end; ++token)
        fill_slot(random, page_of(sequence, token), static_cast<int32_t>(token % options_.page_len),
                  !options_.has_appended || token < sequence.end - sequence.q_len);
  }
  for (int32_t i = 0; i < options_.n_copies; ++i)
    device_pools_.push_back(static_cast<std::byte*>(own(pool_.data(), static_cast<int64_t>(pool_.size()))));
}

void ObserveCase::fill_slot(reference::Random& random, int64_t page, int32_t slot, bool has_maw) {
  std::vector<double> x(static_cast<size_t>(layer_.k_head_dim));
  for (int64_t head = 0; head < layer_.n_kv_heads; ++head) {
    for (double& number : x) number = random.normal();
    const auto row = [&](Plane p) {
      return pool_.data() + page + plane_at_[p] + head * observe_call.pages.head_stride[p] + slot * row_bytes_.of[p];
    };
    reference::store_row(layer_.k_type, x.data(), layer_.k_head_dim, row(kPlaneK), row(kPlaneKScales));
  }
  for (int64_t head = 0; head < layer_.n_q_heads && has_maw; ++head) {
    const auto maw = static_cast<float>(std::exp(-4.0 * random.uniform()));
    std::memcpy(pool_.data() + page + maw_at_ + 4 * (head * options_.page_len + slot), &maw, sizeof maw);
  }
}

// ---- calls -------------------------------------------------------------------------------------------------------------

void ObserveCase::set_sequences(const std::vector<ObserveSequence>& sequences) {
  descriptors_.clear();
  int32_t first_row = 0, first_evicted = 2;
  for (const ObserveSequence& from : sequences) {
    DeviceSequence to;
    to.begin = from.begin;
    to.end = from.end;
    to.q_len = from.q_len;
    to.first_row = first_row;
    to.table_begin = static_cast<int32_t>(descriptors_.size()) * options_.table_len;
    to.table_len = options_.table_len;
    to.evict_end = from.n_evicted > 0 ? from.begin + from.n_evicted : 0;
    to.first_evicted = first_evicted;
    first_row += from.q_len;
    first_evicted += static_cast<int32_t>(from.n_evicted);
    descriptors_.push_back(to);
  }
  device_.upload(const_cast<DeviceSequence*>(observe_call.sequences.sequences), descriptors_.data(),
                 static_cast<int64_t>(descriptors_.size() * sizeof(DeviceSequence)));
  make_lse();
}

// Makes lse of slightly more keys than a query sees, because the host has some, too. Now and then lse is infinite or NaN.
void ObserveCase::make_lse() {
  reference::Random random(~options_.seed + n_sets_++);
  for (const DeviceSequence& sequence : descriptors_)
    for (int64_t row = sequence.first_row; row < sequence.first_row + sequence.q_len; ++row)
      for (int64_t head = 0; head < layer_.n_q_heads; ++head) {
        const auto n_keys = static_cast<double>(sequence.end - sequence.begin + 1);
        double lse = std::log(n_keys) + 0.5 * options_.q_size * options_.q_size + std::fabs(random.normal());
        if (random.chance(0.06)) lse = random.pick<double>({-INFINITY, INFINITY, NAN});
        lse_[static_cast<size_t>(row * layer_.n_q_heads + head)] = static_cast<float>(lse);
      }
  device_.upload(const_cast<float*>(observe_call.lse), lse_.data(), static_cast<int64_t>(lse_.size() * 4));
}

int32_t ObserveCase::append(void* stream) { return device_.table->append(device_.self, &append_call, stream, &error); }

int32_t ObserveCase::observe(void* stream, int32_t copy) {
  DeviceObserve call = observe_call;
  std::byte* const pool = device_pools_[static_cast<size_t>(copy)] + called_0();
  call.pages.planes[kPlaneK] = pool + plane_at_[kPlaneK];
  if (row_bytes_.of[kPlaneKScales] > 0) call.pages.planes[kPlaneKScales] = pool + plane_at_[kPlaneKScales];
  call.pages.maw = reinterpret_cast<float*>(pool + maw_at_);
  return device_.table->observe(device_.self, &call, stream, &error);
}

void ObserveCase::answer(uint64_t n_tickets) const {
  std::atomic_ref<uint64_t>(flags->answered).store(n_tickets, std::memory_order_release);
}

uint64_t ObserveCase::observed() const { return std::atomic_ref<uint64_t>(flags->observed).load(std::memory_order_acquire); }

ObserveCase::Memory ObserveCase::memory() const {
  Memory memory{std::vector<std::byte>(pool_.size()), {host_slots_, host_slots_ + 2 * observe_call.exchange.slot_bytes}};
  device_.download(memory.pool.data(), device_pools_[0], static_cast<int64_t>(pool_.size()));
  return memory;
}

void ObserveCase::restore(const Memory& memory) const {
  device_.upload(device_pools_[0], memory.pool.data(), static_cast<int64_t>(pool_.size()));
  std::copy(memory.slots.begin(), memory.slots.end(), host_slots_);
}

int64_t ObserveCase::k_bytes() const {
  int64_t n = 0;
  for (const DeviceSequence& sequence : descriptors_) n += (sequence.end - sequence.begin) * layer_.n_kv_heads;
  return n * (row_bytes_.of[kPlaneK] + row_bytes_.of[kPlaneKScales]);
}

// ---- expected values ---------------------------------------------------------------------------------------------------

int64_t ObserveCase::page_of(const DeviceSequence& sequence, int64_t token) const {
  return tables_[static_cast<size_t>(sequence.table_begin + token / options_.page_len % sequence.table_len)];
}

std::vector<double> ObserveCase::keys_of(const DeviceSequence& sequence, int32_t kv_head) const {
  const int64_t dim = layer_.k_head_dim;
  std::vector<double> keys(static_cast<size_t>((sequence.end - sequence.begin) * dim));
  for (int64_t token = sequence.begin; token < sequence.end; ++token) {
    const auto row = [&](Plane p) {
      return pool_.data() + page_of(sequence, token) + plane_at_[p] + kv_head * observe_call.pages.head_stride[p] +
             token % options_.page_len * row_bytes_.of[p];
    };
    reference::load_row(layer_.k_type, row(kPlaneK), row(kPlaneKScales), dim, keys.data() + (token - sequence.begin) * dim);
  }
  return keys;
}

// The error bound of a logit in f32. Sums of eight products by fused multiply-adds and five additions of sums are 13
// roundings deep. Each loses half a unit of at most the sum of magnitudes. The scale factor is one more rounding. A soft cap
// adds those of a quotient, a product and tanh.
ObserveCase::Logit ObserveCase::logit_of(int64_t row, int32_t head, const double* key) const {
  const double* q = q_.data() + (row * layer_.n_q_heads + head) * layer_.k_head_dim;
  double sum = 0.0, magnitude = 0.0;
  for (int32_t i = 0; i < layer_.k_head_dim; ++i) {
    sum += q[i] * key[i];
    magnitude += std::fabs(q[i] * key[i]);
  }
  const auto scale = static_cast<double>(layer_.sm_scale), cap = static_cast<double>(layer_.soft_cap);
  const double logit = scale * sum, lost = kEpsilon * (13.0 * scale * magnitude + std::fabs(logit));
  if (cap <= 0.0) return {logit, lost};
  const double capped = cap * std::tanh(logit / cap);
  return {capped, lost + kEpsilon * (std::fabs(logit) + 6.0 * std::fabs(capped))};
}

// An average is a sum of terms, each of which passes the later multiplications and additions: two roundings a query, and the
// rounding of 1 - alpha in each of them. A weight is off by its logit's error, by the rounding of the difference that expf()
// takes, and by two units of expf() itself. The power that replaces the queries that do not count is off by eight units and
// one for each query.
std::string ObserveCase::check_head(const Expected& expected, int32_t head, const Memory& before, Memory* after) const {
  const DeviceSequence& sequence = *expected.sequence;
  const double alpha = static_cast<double>(options_.alpha);
  const int32_t n = sequence.q_len, n_counted = std::min(n, options_.n_counted);
  for (int64_t token = sequence.begin; token < sequence.end; ++token) {
    const int64_t at = page_of(sequence, token) + maw_at_ + 4 * (head * options_.page_len + token % options_.page_len);
    const bool is_new = options_.has_appended && token >= sequence.end - n;
    const double old = is_new ? 0.0 : std::pow(1.0 - alpha, n) * static_cast<double>(number_at(before.pool, at));
    double wanted = old, bound = 0x1p-126 + (n > 0 ? kEpsilon * (3.0 * n + 18.0) * std::fabs(old) : 0.0);
    for (int32_t i = n - n_counted; i < n; ++i) {
      const int64_t row = int64_t{sequence.first_row} + i;
      const auto lse = static_cast<double>(lse_[static_cast<size_t>(row * layer_.n_q_heads + head)]);
      if (!std::isfinite(lse) || token > sequence.end - n + i) continue;
      const Logit logit = logit_of(row, head, expected.keys->data() + (token - sequence.begin) * layer_.k_head_dim);
      const double term = alpha * std::pow(1.0 - alpha, n - 1 - i) * std::exp(logit.value - lse);
      wanted += term;
      bound += term * (1.01 * logit.error + kEpsilon * (std::fabs(logit.value - lse) + 6.0 + 3.0 * (n - i)));
    }
    const float found = number_at(after->pool, at);
    const auto report = [&](const char* what, float is) {
      return std::string(what) + " of token " + std::to_string(token) + ", head " + std::to_string(head) + " is " +
             std::to_string(is) + ", not " + std::to_string(wanted) + " within " + std::to_string(bound / kEpsilon) +
             " / 2^24";
    };
    if (!(std::fabs(static_cast<double>(found) - wanted) <= bound)) return report("window", found);
    std::memcpy(after->pool.data() + at, before.pool.data() + at, 4);
    if (token >= sequence.evict_end) continue;
    const int64_t column = sequence.first_evicted + (token - sequence.begin);
    const int64_t in_slot =
        expected.slot + observe_call.exchange.maw_at + 4 * (int64_t{head} * observe_call.exchange.n_evicted + column);
    const float evicted = number_at(after->slots, in_slot);
    if (std::bit_cast<uint32_t>(evicted) != std::bit_cast<uint32_t>(found)) return report("slot", evicted);
    std::memcpy(after->slots.data() + in_slot, before.slots.data() + in_slot, 4);
  }
  return "";
}

std::string ObserveCase::check(const Memory& before, uint64_t ticket) const {
  Memory after = memory();
  const int64_t slot = static_cast<int64_t>(ticket % 2) * observe_call.exchange.slot_bytes;
  for (size_t i = 0; i < descriptors_.size(); ++i)
    for (int32_t kv_head = 0; kv_head < layer_.n_kv_heads; ++kv_head) {
      const std::vector<double> keys = keys_of(descriptors_[i], kv_head);
      for (int32_t head = kv_head * layer_.group_size; head < (kv_head + 1) * layer_.group_size; ++head) {
        const std::string wrong = check_head({&descriptors_[i], &keys, slot}, head, before, &after);
        if (!wrong.empty()) return "sequence " + std::to_string(i) + ": " + wrong;
      }
    }
  if (after.pool != before.pool) return "something else in the window was written";
  return after.slots != before.slots ? "something else in the slots was written" : "";
}

}  // namespace tandem::test
