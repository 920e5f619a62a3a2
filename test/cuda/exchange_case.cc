// SPDX-License-Identifier: MIT
#include "exchange_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "device/layer_of.h"
#include "lib/model/dtype.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace tandem::test {
namespace {

constexpr std::byte kUnused{0xff};
constexpr int64_t kUnit = 4096;

int64_t aligned(int64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

bool is_unused(const std::byte* from, int64_t n) {
  return std::all_of(from, from + n, [](std::byte b) { return b == kUnused; });
}

std::string first_difference(const char* what, const std::vector<std::byte>& wanted, const std::byte* found) {
  const auto n = static_cast<int64_t>(wanted.size());
  for (int64_t i = 0; i < n; ++i)
    if (wanted[static_cast<size_t>(i)] != found[i])
      return std::string(what) + ": byte " + std::to_string(i) + " of " + std::to_string(n) + " is " +
             std::to_string(std::to_integer<int>(found[i])) + ", not " +
             std::to_string(std::to_integer<int>(wanted[static_cast<size_t>(i)]));
  return "";
}

}  // namespace

// ---- the host's side ---------------------------------------------------------------------------------------------------

AnsweringHost::AnsweringHost(ExchangeFlags* flags, std::function<void(uint64_t)> answer)
    : thread_([this, flags, answer = std::move(answer)] {
        std::atomic_ref<uint64_t> arrived(flags->arrived), answered(flags->answered);
        uint64_t ticket = answered.load();
        for (uint64_t turn = 1; !stops_.load(std::memory_order_relaxed); ++turn) {
          if (ticket == arrived.load(std::memory_order_acquire)) {
            if (turn % 4096 == 0) std::this_thread::yield();  // for machines with few processors
            continue;
          }
          answer(ticket);
          answered.store(++ticket, std::memory_order_release);
        }
      }) {}

AnsweringHost::~AnsweringHost() {
  stops_ = true;
  thread_.join();
}

// ---- construction ------------------------------------------------------------------------------------------------------

ExchangeCase::ExchangeCase(const OpenDevice& device, const ExchangeOptions& options) : device_(device), options_(options) {
  if (options_.max_tokens == 0)
    for (const ExchangeSequence& sequence : options_.sequences) options_.max_tokens += sequence.q_len;
  make_layer();
  reference::Random random(options_.seed);
  q_ = make_tensor(random, layer_.n_q_heads, layer_.k_head_dim);
  k_ = make_tensor(random, layer_.n_kv_heads, layer_.k_head_dim);
  v_ = make_tensor(random, layer_.n_kv_heads, layer_.v_head_dim);
  if (options_.x_type != 0) x_ = make_tensor(random, 1, options_.hidden_dim);
  make_pool();
  make_exchange();
  append_call.layer = merge_call.layer = &layer_;
  append_call.n_tokens = merge_call.n_tokens = options_.max_tokens;
  append_call.q = q_.rows;
  if (options_.has_rows) append_call.k = k_.rows, append_call.v = v_.rows, append_call.x = x_.rows;
  append_call.tag = 77;
  make_merge();
  set_sequences(options_.sequences);
}

ExchangeCase::~ExchangeCase() {
  device_.wait();
  for (void* data : owned_) device_.table->release(device_.self, data);
  for (void* data : shared_) device_.table->release_shared(device_.self, data);
}

void ExchangeCase::make_layer() {
  layer_ = layer_of(options_.layer);
  row_bytes_ = plane_bytes(layer_);
  if (options_.x_type == 0) return;
  projection_.hidden_dim = options_.hidden_dim;
  layer_.projection = &projection_;
  layer_.x_type = options_.x_type;
}

void* ExchangeCase::own(const void* from, int64_t bytes) {
  owned_.push_back(device_.allocate(bytes));
  if (from != nullptr) device_.upload(owned_.back(), from, bytes);
  return owned_.back();
}

// Returns zeros, ties, numbers too large or too small for a type, and now and then NaN or infinity.
double ExchangeCase::wild_number(reference::Random& random) const {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN(), kInfinite = std::numeric_limits<double>::infinity();
  const double usual = random.normal();
  switch (random.integer(0, 60)) {
    case 0:
      return random.pick({0.0, -0.0});
    case 1:
      return random.pick({464.0, -464.0, 464.5, 448.0, 65520.0, 65519.0, -65504.0, 3e38});
    case 2:
      return random.pick({0x1p-24, 0x1p-25, 0x1.8p-25, 0x1p-9, 0x1p-10, 0x1.8p-10, 0x1p-14, -0x1p-6, 0x1p-140});
    case 3:
      return std::round(usual * 8.0) / 16.0;
    case 4:
      return random.chance(0.02) ? random.pick({kNone, kInfinite, -kInfinite}) : usual;
    default:
      return usual;
  }
}

ExchangeCase::Tensor ExchangeCase::make_tensor(reference::Random& random, int64_t n_heads, int64_t dim) {
  Tensor tensor;
  const int64_t element = reference::element_bytes(options_.tensor_type), gap = options_.gap;
  tensor.n_heads = n_heads;
  tensor.dim = dim;
  tensor.rows.dtype = options_.tensor_type;
  tensor.rows.head_stride = dim + gap;
  tensor.rows.token_stride = n_heads * (dim + gap) + gap;
  tensor.batch_bytes = options_.max_tokens * tensor.rows.token_stride * element;
  tensor.bytes.assign(static_cast<size_t>(options_.n_batches * tensor.batch_bytes), kUnused);
  const int64_t n_rows = int64_t{options_.n_batches} * options_.max_tokens * n_heads;
  tensor.numbers.resize(static_cast<size_t>(n_rows * dim));
  for (int64_t row = 0; row < n_rows; ++row) {
    // Some rows are so small or so large that their scales have no inverse, or are not finite in f16.
    const double size = options_.is_wild ? random.pick({1.0, 1.0, 1.0, 1e-30, 1e-44, 1e30}) : 1.0;
    std::byte* to =
        tensor.bytes.data() + (row / n_heads * tensor.rows.token_stride + row % n_heads * tensor.rows.head_stride) * element;
    for (int64_t i = 0; i < dim; ++i) {
      double& x = tensor.numbers[static_cast<size_t>(row * dim + i)];
      x = reference::round_to(options_.tensor_type, options_.is_wild ? size * wild_number(random) : random.normal());
      reference::store(options_.tensor_type, x, to + i * element);
    }
  }
  tensor.rows.data = own(tensor.bytes.data(), static_cast<int64_t>(tensor.bytes.size()));
  return tensor;
}

// Pages are in any order, with a few bytes between heads. Some pages belong to no sequence.
void ExchangeCase::make_pool() {
  DevicePages& pages = append_call.pages;
  pages.page_len = options_.page_len;
  for (int32_t p = 0; p < kPlanes; ++p) {
    plane_at_[p] = page_bytes_;
    pages.head_stride[p] = row_bytes_.of[p] * options_.page_len + 32;
    page_bytes_ += pages.head_stride[p] * layer_.n_kv_heads;
  }
  const int64_t n_used = static_cast<int64_t>(options_.sequences.size()) * options_.table_len;
  for (int64_t i = 0; i < n_used; ++i) tables_.push_back((i * 7 + 3) % (n_used + 1) * page_bytes_);
  if (n_used % 7 == 6)  // 7 divides n_used + 1
    for (int64_t i = 0; i < n_used; ++i) tables_[static_cast<size_t>(i)] = (n_used - i) * page_bytes_;
  pool_.assign(static_cast<size_t>((n_used + 1) * page_bytes_), kUnused);
  device_pool_ = static_cast<std::byte*>(own(nullptr, static_cast<int64_t>(pool_.size())));
  // Page 0 of the tables is the first sequence's first page, as in a session. Other pages lie before it.
  for (int32_t p = 0; p < kPlanes; ++p)
    pages.planes[p] = row_bytes_.of[p] > 0 ? device_pool_ + tables_[0] + plane_at_[p] : nullptr;
}

void ExchangeCase::make_exchange() {
  DeviceExchange& exchange = append_call.exchange;
  const int64_t n_rows = int64_t{options_.max_tokens} * layer_.n_q_heads;
  int64_t at = kUnit;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at;
    at += aligned(bytes);
    return begin;
  };
  exchange.q_at = place(n_rows * layer_.k_head_dim * 4);
  exchange.o_at = place(n_rows * layer_.v_head_dim * 4);
  exchange.lse_at = place(n_rows * 4);
  for (int32_t p = 0; p < kPlanes; ++p)
    exchange.rows_at[p] = place(int64_t{options_.max_tokens} * layer_.n_kv_heads * row_bytes_.of[p]);
  if (options_.x_type != 0) exchange.x_at = place(options_.max_tokens * layer_.x_bytes());
  exchange.slot_bytes = at;
  exchange.n_slots = options_.n_slots;
  exchange.n_rows = static_cast<int32_t>(options_.max_tokens);
  exchange.timeout_ns = options_.timeout_ns;
  const auto share = [&](int64_t bytes, void** device) {
    void* host = nullptr;
    device_.must(device_.table->allocate_shared(device_.self, bytes, &host, device, &error), error);
    shared_.push_back(host);
    return host;
  };
  void* device = nullptr;
  flags = static_cast<ExchangeFlags*>(share(sizeof(ExchangeFlags), &device));
  exchange.flags = static_cast<ExchangeFlags*>(device);
  host_slots_ = static_cast<std::byte*>(share(at * options_.n_slots, &device));
  exchange.slots = static_cast<std::byte*>(device);
  slots_.assign(static_cast<size_t>(at * options_.n_slots), kUnused);
  std::memcpy(host_slots_, slots_.data(), slots_.size());
  const int64_t zeros[kExchangeWords] = {};
  exchange.state = static_cast<int64_t*>(own(zeros, sizeof zeros));
  merge_call.exchange = exchange;
}

void ExchangeCase::make_merge() {
  const int64_t n_heads = layer_.n_q_heads, dim = layer_.v_head_dim, gap = options_.gap;
  const int64_t n_rows = options_.max_tokens * n_heads;
  window_o_.resize(static_cast<size_t>(n_rows * dim));
  window_lse_.resize(static_cast<size_t>(n_rows));
  merge_call.o = static_cast<float*>(own(nullptr, n_rows * dim * 4));
  merge_call.lse = static_cast<float*>(own(nullptr, n_rows * 4));
  load_window_states(options_.seed);
  merge_call.o_out.dtype = options_.o_type;
  merge_call.o_out.head_stride = dim + gap;
  merge_call.o_out.token_stride = n_heads * (dim + gap) + gap;
  o_bytes_ = (options_.max_tokens + 1) * merge_call.o_out.token_stride * reference::element_bytes(options_.o_type);
  merge_call.o_out.data = own(nullptr, o_bytes_);
  merge_call.lse_head_stride = 2;
  merge_call.lse_token_stride = 2 * n_heads + 1;
  merge_call.lse_out = static_cast<float*>(own(nullptr, lse_bytes()));
  if (!options_.layer.sinks.empty())
    merge_call.sinks = static_cast<const float*>(own(options_.layer.sinks.data(), n_heads * 4));
}

int64_t ExchangeCase::lse_bytes() const { return (options_.max_tokens + 1) * (2 * layer_.n_q_heads + 1) * 4; }

void ExchangeCase::set_sequences(const std::vector<ExchangeSequence>& sequences) {
  const bool is_first = descriptors_.empty();
  descriptors_.clear();
  int32_t first_row = 0;
  for (const ExchangeSequence& from : sequences) {
    DeviceSequence to;
    to.begin = from.begin;
    to.end = from.end;
    to.q_len = from.q_len;
    to.first_row = first_row;
    to.table_begin = static_cast<int32_t>(descriptors_.size()) * options_.table_len;
    to.table_len = options_.table_len;
    to.has_host_part = from.has_host_part;
    to.wants_lse = from.wants_lse;
    first_row += from.q_len;
    descriptors_.push_back(to);
  }
  const auto bytes = static_cast<int64_t>(descriptors_.size() * sizeof(DeviceSequence));
  DeviceSequences& call = append_call.sequences;
  if (is_first) {
    call.sequences = static_cast<const DeviceSequence*>(own(nullptr, bytes));
    std::vector<int64_t> from_first = tables_;
    for (int64_t& page : from_first) page -= tables_[0];
    call.page_tables = static_cast<const int64_t*>(own(from_first.data(), static_cast<int64_t>(from_first.size() * 8)));
    call.n_sequences = static_cast<int32_t>(descriptors_.size());
    call.max_q_len = options_.max_tokens;
    call.max_keys = int64_t{options_.page_len} * options_.table_len;
    merge_call.sequences = call;
  }
  device_.upload(const_cast<DeviceSequence*>(call.sequences), descriptors_.data(), bytes);
}

void ExchangeCase::load_batch(int32_t batch) {
  for (const Tensor* tensor : {&q_, &k_, &v_})
    device_.upload(tensor->rows.data, tensor->bytes.data() + batch * tensor->batch_bytes, tensor->batch_bytes);
}

// ---- states ------------------------------------------------------------------------------------------------------------

// Makes the states of the window. Some are empty, with any o, and some have NaN.
void ExchangeCase::load_window_states(uint64_t seed) {
  const int64_t dim = layer_.v_head_dim;
  for (size_t row = 0; row < window_lse_.size(); ++row) {
    const State state = host_state(~seed, static_cast<int64_t>(row));
    window_lse_[row] = static_cast<float>(state.lse);
    std::copy(state.o.begin(), state.o.end(), window_o_.begin() + static_cast<int64_t>(row) * dim);
  }
  device_.upload(const_cast<float*>(merge_call.o), window_o_.data(), static_cast<int64_t>(window_o_.size() * 4));
  device_.upload(const_cast<float*>(merge_call.lse), window_lse_.data(), static_cast<int64_t>(window_lse_.size() * 4));
}

ExchangeCase::State ExchangeCase::host_state(uint64_t ticket, int64_t row) const {
  reference::Random random(ticket * 1'000'003 + static_cast<uint64_t>(row));
  State state{reference::round_to(TANDEM_F32, 3.0 * random.normal()), {}};
  if (random.chance(0.2)) state.lse = -INFINITY;
  if (random.chance(0.02)) state.lse = NAN;
  for (int32_t i = 0; i < layer_.v_head_dim; ++i)
    state.o.push_back(state.lse == -INFINITY || random.chance(0.001) ? static_cast<double>(NAN)
                                                                     : reference::round_to(TANDEM_F32, random.normal()));
  return state;
}

void ExchangeCase::write_states(uint64_t ticket, std::byte* slot) const {
  const DeviceExchange& exchange = append_call.exchange;
  for (int64_t row = 0; row < int64_t{options_.max_tokens} * layer_.n_q_heads; ++row) {
    const State state = host_state(ticket, row);
    reference::store(TANDEM_F32, state.lse, slot + exchange.lse_at + row * 4);
    reference::store_all(TANDEM_F32, state.o.data(), layer_.v_head_dim, slot + exchange.o_at + row * layer_.v_head_dim * 4);
  }
}

std::function<void(uint64_t)> ExchangeCase::leaves_states() {
  return [this](uint64_t ticket) { write_states(ticket, host_slot(ticket)); };
}

std::byte* ExchangeCase::host_slot(uint64_t ticket) const {
  return host_slots_ + static_cast<int64_t>(ticket) % options_.n_slots * append_call.exchange.slot_bytes;
}

// ---- calls -------------------------------------------------------------------------------------------------------------

int32_t ExchangeCase::append(int32_t place, void* stream) {
  DeviceAppend call = append_call;
  for (const auto& [rows, tensor] : {std::pair{&call.q, &q_}, std::pair{&call.k, &k_}, std::pair{&call.v, &v_}})
    if (rows->data != nullptr) rows->data = static_cast<std::byte*>(rows->data) + place * tensor->batch_bytes;
  return device_.table->append(device_.self, &call, stream, &error);
}

int32_t ExchangeCase::merge(void* stream) { return device_.table->merge(device_.self, &merge_call, stream, &error); }

uint64_t ExchangeCase::arrived() const { return std::atomic_ref<uint64_t>(flags->arrived).load(std::memory_order_acquire); }

void ExchangeCase::wait_for_host() const {
  while (std::atomic_ref<uint64_t>(flags->answered).load(std::memory_order_acquire) < arrived()) std::this_thread::yield();
}

bool ExchangeCase::host_finds(uint64_t ticket, int32_t batch) const {
  const std::byte* from = host_slot(ticket);
  SlotHeader header;
  std::memcpy(&header, from, sizeof header);
  if (header.ticket != ticket) return false;
  const int64_t bytes = row_bytes_.of[kPlaneK];
  std::vector<std::byte> codes(static_cast<size_t>(bytes)), scales(static_cast<size_t>(row_bytes_.of[kPlaneKScales]));
  for (int64_t row = 0; row < options_.max_tokens; ++row)
    for (int64_t head = 0; head < layer_.n_kv_heads; ++head) {
      const int64_t at = (batch * int64_t{options_.max_tokens} + row) * layer_.n_kv_heads + head;
      reference::store_row(layer_.k_type, k_.numbers.data() + at * k_.dim, k_.dim, codes.data(), scales.data());
      const std::byte* found = from + append_call.exchange.rows_at[kPlaneK] + (head * options_.max_tokens + row) * bytes;
      if (!std::equal(codes.begin(), codes.end(), found)) return false;
    }
  return true;
}

// ---- the model ---------------------------------------------------------------------------------------------------------

std::byte* ExchangeCase::slot(std::vector<std::byte>& slots, uint64_t ticket) const {
  return slots.data() + static_cast<int64_t>(ticket) % options_.n_slots * append_call.exchange.slot_bytes;
}

void ExchangeCase::expect_row(int32_t plane, const double* numbers, const DeviceSequence& sequence, int32_t token,
                              int32_t head) {
  const bool is_k = plane == kPlaneK;
  std::vector<std::byte> planes[2];
  for (int32_t i = 0; i < 2; ++i) planes[i].resize(static_cast<size_t>(row_bytes_.of[plane + i]));
  reference::store_row(is_k ? layer_.k_type : layer_.v_type, numbers, is_k ? layer_.k_head_dim : layer_.v_head_dim,
                       planes[0].data(), planes[1].data());
  const int64_t key = sequence.end - sequence.q_len + token, entry = key / options_.page_len % sequence.table_len;
  const int64_t page = tables_[static_cast<size_t>(sequence.table_begin + entry)];
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t p = plane + i;
    const int64_t bytes = row_bytes_.of[p], row = int64_t{head} * options_.max_tokens + sequence.first_row + token;
    std::byte* to = slot(slots_, n_appended_) + append_call.exchange.rows_at[p] + row * bytes;
    std::copy(planes[i].begin(), planes[i].end(), to);
    if (key < sequence.begin) continue;
    const int64_t in_pool = plane_at_[p] + page + head * append_call.pages.head_stride[p] + key % options_.page_len * bytes;
    std::copy(planes[i].begin(), planes[i].end(), pool_.begin() + in_pool);
  }
}

void ExchangeCase::expect_append(int32_t batch) {
  const SlotHeader header{n_appended_, append_call.tag, append_call.sequences.n_sequences, 0, {}};
  std::byte* to = slot(slots_, n_appended_);
  std::memcpy(to, &header, sizeof header);
  for (const DeviceSequence& sequence : descriptors_)
    for (int32_t t = 0; t < sequence.q_len; ++t) {
      const auto numbers = [&](const Tensor& tensor, int64_t head) {
        const int64_t row = int64_t{batch} * options_.max_tokens + sequence.first_row + t;
        return tensor.numbers.data() + (row * tensor.n_heads + head) * tensor.dim;
      };
      for (int32_t head = 0; head < layer_.n_kv_heads && options_.has_rows; ++head) {
        expect_row(kPlaneK, numbers(k_, head), sequence, t, head);
        expect_row(kPlaneV, numbers(v_, head), sequence, t, head);
      }
      if (options_.x_type != 0 && options_.has_rows)
        expect_hidden(numbers(x_, 0), to + append_call.exchange.x_at + (sequence.first_row + t) * layer_.x_bytes());
      for (int32_t head = 0; head < layer_.n_q_heads && sequence.has_host_part; ++head) {
        const int32_t group = layer_.group_size;
        const int64_t row = int64_t{sequence.first_row} * layer_.n_q_heads +
                            (int64_t{head / group} * sequence.q_len + t) * group + head % group;
        reference::store_all(TANDEM_F32, numbers(q_, head), q_.dim,
                             to + append_call.exchange.q_at + row * layer_.k_head_dim * 4);
      }
    }
  ++n_appended_;
}

void ExchangeCase::expect_hidden(const double* x, std::byte* row) const {
  reference::store_row(options_.x_type, x, x_.dim, row, row + layer_.x_code_bytes());
}

void ExchangeCase::expect_states(uint64_t ticket) { write_states(ticket, slot(slots_, ticket)); }

std::string ExchangeCase::check_memory() const {
  const std::vector<std::byte> found = pool();
  const std::string in_window = first_difference("window", pool_, found.data());
  if (!in_window.empty()) return in_window;
  return first_difference("slots", slots_, host_slots_);
}

std::vector<std::byte> ExchangeCase::pool() const {
  std::vector<std::byte> found(pool_.size());
  device_.download(found.data(), device_pool_, static_cast<int64_t>(found.size()));
  return found;
}

std::vector<std::byte> ExchangeCase::output() const {
  std::vector<std::byte> bytes(static_cast<size_t>(o_bytes_ + lse_bytes()));
  device_.download(bytes.data(), merge_call.o_out.data, o_bytes_);
  device_.download(bytes.data() + o_bytes_, merge_call.lse_out, lse_bytes());
  return bytes;
}

void ExchangeCase::clear_output() {
  device_.must(device_.table->fill(device_.self, merge_call.o_out.data, 0xff, o_bytes_, nullptr, &error), error);
  device_.must(device_.table->fill(device_.self, merge_call.lse_out, 0xff, lse_bytes(), nullptr, &error), error);
}

// Returns the states that merge() must merge into a row.
std::vector<ExchangeCase::State> ExchangeCase::states_of(uint64_t ticket, const DeviceSequence& sequence, int32_t token,
                                                         int32_t head) const {
  const int32_t group = layer_.group_size, n_heads = layer_.n_q_heads;
  const int64_t dim = layer_.v_head_dim, row = int64_t{sequence.first_row + token} * n_heads + head;
  const auto window = window_o_.begin() + row * dim;
  std::vector<State> states;
  states.push_back({static_cast<double>(window_lse_[static_cast<size_t>(row)]), {window, window + dim}});
  if (sequence.has_host_part)
    states.push_back(host_state(ticket, int64_t{sequence.first_row} * n_heads +
                                            (int64_t{head / group} * sequence.q_len + token) * group + head % group));
  if (merge_call.sinks != nullptr)
    states.push_back({static_cast<double>(options_.layer.sinks[static_cast<size_t>(head)]),
                      std::vector<double>(static_cast<size_t>(dim), 0.0)});
  return states;
}

// Compares a row with the merge rule in double precision.
std::string ExchangeCase::check_row(const std::vector<State>& states, const std::byte* o, const std::byte* lse) const {
  double most = -INFINITY, sum = 0.0;
  for (const State& state : states) most = std::fmax(most, state.lse);
  for (const State& state : states) sum += state.lse == -INFINITY ? 0.0 : std::exp(state.lse - most);
  const auto differs = [](double found, double wanted, double bound) {
    if (std::isnan(wanted)) return !std::isnan(found);
    return !(found == wanted || std::fabs(found - wanted) <= bound);
  };
  const auto report = [&](const char* what, double found, double wanted) {
    return std::string(what) + " is " + std::to_string(found) + ", not " + std::to_string(wanted);
  };
  const double rounding = options_.o_type == TANDEM_F32 ? 0.0 : 0.51 * reference::epsilon(options_.o_type);
  for (int64_t i = 0; i < layer_.v_head_dim; ++i) {
    double wanted = 0.0, mass = 0.0;
    for (const State& state : states) {
      if (state.lse == -INFINITY) continue;
      const double term = std::exp(state.lse - most) / sum * state.o[static_cast<size_t>(i)];
      wanted += term;
      mass += std::fabs(term);
    }
    const double found = reference::load(options_.o_type, o + i * reference::element_bytes(options_.o_type));
    if (differs(found, wanted, rounding * std::fabs(wanted) + 0x1p-21 * mass + 0x1p-25)) return report("o", found, wanted);
  }
  const double found = reference::load(TANDEM_F32, lse), wanted = sum == 0.0 ? -INFINITY : most + std::log(sum);
  return differs(found, wanted, 0x1p-21 * (1.0 + std::fabs(wanted))) ? report("lse", found, wanted) : "";
}

// Checks the bytes between the rows of o and lse, and rows of no sequence.
std::string ExchangeCase::check_between() const {
  std::vector<std::byte> bytes = output();
  const int64_t element = reference::element_bytes(options_.o_type);
  for (const DeviceSequence& sequence : descriptors_)
    for (int64_t row = sequence.first_row; row < sequence.first_row + sequence.q_len; ++row)
      for (int64_t head = 0; head < layer_.n_q_heads; ++head) {
        const int64_t o = (row * merge_call.o_out.token_stride + head * merge_call.o_out.head_stride) * element;
        const int64_t lse = o_bytes_ + (row * merge_call.lse_token_stride + head * merge_call.lse_head_stride) * 4;
        std::fill_n(bytes.begin() + o, layer_.v_head_dim * element, kUnused);
        std::fill_n(bytes.begin() + lse, 4, kUnused);
      }
  return is_unused(bytes.data(), static_cast<int64_t>(bytes.size())) ? "" : "merge writes outside its rows";
}

std::string ExchangeCase::check_merge(uint64_t ticket) const {
  const std::vector<std::byte> bytes = output();
  const int64_t element = reference::element_bytes(options_.o_type);
  for (const DeviceSequence& sequence : descriptors_)
    for (int32_t t = 0; t < sequence.q_len; ++t)
      for (int32_t head = 0; head < layer_.n_q_heads; ++head) {
        const int64_t row = sequence.first_row + t;
        const int64_t o = row * merge_call.o_out.token_stride + head * merge_call.o_out.head_stride;
        const int64_t lse = row * merge_call.lse_token_stride + head * merge_call.lse_head_stride;
        const std::string wrong =
            check_row(states_of(ticket, sequence, t, head), bytes.data() + o * element, bytes.data() + o_bytes_ + lse * 4);
        if (!wrong.empty())
          return "ticket " + std::to_string(ticket) + ", row " + std::to_string(row) + ", head " + std::to_string(head) +
                 ": " + wrong;
      }
  return check_between();
}

std::string ExchangeCase::check_all_nan() const {
  const std::vector<std::byte> bytes = output();
  const int64_t element = reference::element_bytes(options_.o_type);
  for (const DeviceSequence& sequence : descriptors_)
    for (int64_t row = sequence.first_row; row < sequence.first_row + sequence.q_len; ++row)
      for (int64_t head = 0; head < layer_.n_q_heads; ++head) {
        const int64_t o = row * merge_call.o_out.token_stride + head * merge_call.o_out.head_stride;
        const int64_t lse = row * merge_call.lse_token_stride + head * merge_call.lse_head_stride;
        for (int64_t i = 0; i < layer_.v_head_dim; ++i)
          if (!std::isnan(reference::load(options_.o_type, bytes.data() + (o + i) * element))) return "a number in o";
        if (!std::isnan(reference::load(TANDEM_F32, bytes.data() + o_bytes_ + lse * 4))) return "a number in lse";
      }
  return "";
}

}  // namespace tandem::test
