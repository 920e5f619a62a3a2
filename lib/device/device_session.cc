// SPDX-License-Identifier: MIT
#include "lib/device/device_session.h"

#include <algorithm>
#include <cstdio>

#include "lib/machine/device_status.h"
#include "lib/model/dtype.h"
#include "lib/store/cache.h"

namespace tandem {
namespace {

constexpr int64_t kTimeoutNs = 30'000'000'000;  // a host that has not answered by then counts as dead

// Offsets in a slot, for calls of n_tokens rows.
struct SlotLayout {
  int64_t q_at = 0, o_at = 0, lse_at = 0, rows_at[kPlanes] = {}, x_at = 0, maw_at = 0, idx_at = 0, bytes = 0;
};

SlotLayout make_slot_layout(const Layer& layer, const Reservation& needs) {
  const int64_t n_tokens = needs.slot_rows;
  SlotLayout slot;
  slot.bytes = device_aligned(sizeof(SlotHeader));
  const auto take = [&](int64_t bytes) {
    const int64_t at = slot.bytes;
    slot.bytes += device_aligned(bytes);
    return at;
  };
  const int64_t n_rows = n_tokens * layer.n_q_heads;
  slot.q_at = take(n_rows * layer.k_head_dim * 4);
  slot.o_at = take(n_rows * layer.v_head_dim * 4);
  slot.lse_at = take(n_rows * 4);
  const NewRowsLayout rows(layer, n_tokens, slot.bytes);
  std::copy(std::begin(rows.at), std::end(rows.at), slot.rows_at);
  slot.x_at = rows.x_at;
  slot.bytes = rows.end;
  slot.maw_at = take(needs.n_evicted * layer.n_q_heads * 4);
  slot.idx_at = take(needs.slot_idx * 4);
  return slot;
}

}  // namespace

void reserve_ticket(const SizeTerms& terms, const CallShape& shape, Reservation* needs) {
  constexpr int64_t kLeastTokens = 16;
  const auto n_sequences = static_cast<int64_t>(shape.sequences.size());
  const int64_t page_len = terms.store.page_len, n_pages = ring_pages(terms.options, page_len, shape.most_queries);
  for (const SequenceShape& sequence : shape.sequences) needs->window_pages += std::max(sequence.window_pages, n_pages);
  int64_t n_rows = std::min(shape.n_tokens(), shape.most_tokens);
  if (terms.routes.plans_steps() && shape.has_room_to_step)
    n_rows = std::max(n_rows, std::min(n_sequences, kMostStepTokens));
  needs->slot_rows = power_of_two(std::max(kLeastTokens, n_rows));
  needs->add_descriptors(n_sequences, needs->window_pages);
  needs->add_lists(n_sequences * terms.n_lists(shape.layer_idx));
  needs->workspace_bytes = workspace_bytes(*terms.device, *shape.layer, n_sequences, shape.most_queries);
  // Before a call, a window may hold up to evict_len - 1 tokens too many.
  const int64_t evict_len = evicted_at_once(terms.policies[shape.layer_idx], terms.options, page_len);
  if (evict_len > 0) needs->n_evicted = power_of_two(needs->slot_rows + n_sequences * (evict_len - 1));
}

// Descriptors of all layers have the same size. needs: those of the ticket.
void reserve_step(const SizeTerms& terms, const CallShape& shape, Reservation* needs) {
  needs->step_sequences = power_of_two(std::max<int64_t>(std::ssize(shape.sequences), 1));
  needs->step_lists = terms.n_lists(shape.layer_idx);
  needs->step_pages = power_of_two(std::max<int64_t>(needs->window_pages, 1));
}

namespace {

// Constant data that kernels read, with each layer's offsets in floats. Layers may share a table of angles.
struct Constants {
  std::vector<int64_t> sinks_at, rope_at;  // -1: none
  int64_t n_numbers = 0;

  explicit Constants(const std::vector<Layer>& layers) {
    const auto take = [this](int64_t n) {
      const int64_t at = n_numbers;
      n_numbers += device_aligned(n * 4) / 4;
      return at;
    };
    for (size_t l = 0; l < layers.size(); ++l) {
      const Layer& layer = layers[l];
      const auto same =
          std::find_if(layers.begin(), layers.end(), [&](const Layer& other) { return other.rope == layer.rope; });
      const auto first = static_cast<size_t>(same - layers.begin());
      sinks_at.push_back(layer.sinks == nullptr ? -1 : take(layer.n_q_heads));
      rope_at.push_back(layer.rope == nullptr ? -1 : first < l ? rope_at[first] : take(n_floats(*layer.rope)));
    }
  }
};

}  // namespace

int64_t constants_bytes(const std::vector<Layer>& layers) { return 4 * Constants(layers).n_numbers; }

int64_t n_tasks_of(size_t n_layers) { return power_of_two(std::max(kLeastTasks, 2 * static_cast<int64_t>(n_layers))); }

int64_t n_steps_of(size_t n_layers) { return n_tasks_of(n_layers) / static_cast<int64_t>(n_layers) + 1; }

SessionWork make_session_work(const std::vector<Layer>& layers, const Reservation& needs) {
  SessionWork work;
  int64_t o_bytes = 0, lse_bytes = 0, q_bytes = 0;
  for (const Layer& layer : layers) {
    const int64_t n_rows = needs.slot_rows * layer.n_q_heads;
    work.slot_bytes = std::max(work.slot_bytes, make_slot_layout(layer, needs).bytes);
    o_bytes = std::max(o_bytes, n_rows * layer.v_head_dim * 4);
    lse_bytes = std::max(lse_bytes, n_rows * 4);
    if (rotates_queries(layer)) q_bytes = std::max(q_bytes, n_rows * layer.k_head_dim * 4);
  }
  work.upload_bytes = device_aligned(needs.descriptor_bytes);
  work.step_bytes = device_aligned(StepLayout{layers.size(), needs}.tables_at() +
                                   needs.step_pages * static_cast<int64_t>(sizeof(int64_t)));
  work.shared_bytes = device_aligned(sizeof(ExchangeFlags)) + SharedArea::kSlots * work.slot_bytes +
                      n_tasks_of(layers.size()) * work.upload_bytes + n_steps_of(layers.size()) * work.step_bytes;
  work.flags_at = work.shared_bytes;
  work.shared_bytes += static_cast<int64_t>(kTaskFlags) * device_aligned(n_tasks_of(layers.size()));
  work.descriptors_at = device_aligned(kExchangeWords * static_cast<int64_t>(sizeof(int64_t)));
  work.step_at = work.descriptors_at + work.upload_bytes;
  work.o_at = work.step_at + work.step_bytes;
  work.lse_at = work.o_at + device_aligned(o_bytes);
  work.q_at = work.lse_at + device_aligned(lse_bytes);
  work.part_o_at = work.q_at + device_aligned(q_bytes);
  work.part_lse_at = work.part_o_at + needs.has_part_states * device_aligned(o_bytes);
  work.prefill_at = work.part_lse_at + needs.has_part_states * device_aligned(lse_bytes);
  work.list_keys_at = work.prefill_at + device_aligned(needs.prefill_bytes);
  const int64_t step_lists = needs.step_sequences * needs.step_named;
  work.n_lists = std::max(needs.n_lists, step_lists);
  work.n_granules = std::max(needs.n_granules, step_lists * needs.step_granules);
  work.granules_at = work.list_keys_at + device_aligned(work.n_lists * static_cast<int64_t>(sizeof(DeviceKeys)));
  work.sent_idx_at = work.granules_at + device_aligned(work.n_granules * static_cast<int64_t>(sizeof(KeyGranule)));
  work.block_lists_at = work.sent_idx_at + device_aligned(needs.sent_idx * static_cast<int64_t>(sizeof(int32_t)));
  work.search_at = work.block_lists_at + device_aligned(needs.block_list_bytes);
  work.workspace_at = work.search_at + device_aligned(needs.search_bytes);
  work.work_bytes = work.workspace_at + device_aligned(needs.workspace_bytes);
  return work;
}

DeviceSession::DeviceSession(const Device& device, const std::vector<Layer>& layers, const LayerPolicies& policies,
                             const PolicyOptions& options, Tier& device_tier)
    : device_(device),
      plain_layers_(layers),
      windowed_layers_(layers),
      device_tier_(device_tier),
      geometry_(make_window_geometry(layers, policies, options.pruning)),
      most_queries_(layers.size(), 0) {
  int64_t most_heads = 0;
  for (size_t l = 0; l < layers.size(); ++l)
    if (geometry_.layers[l].maw_at >= 0) most_heads = std::max<int64_t>(most_heads, layers[l].n_q_heads);
  maw_page_.resize(static_cast<size_t>(most_heads * kDevicePageLen));
  for (Layer& layer : plain_layers_) layer.sliding_window = 0;
  for (size_t l = 0; l < layers.size(); ++l) windowed_layers_[l] = windowed_layer(layers[l], policies[l], options);
}

Layer windowed_layer(const Layer& layer, const Policy& policy, const PolicyOptions& options) {
  Layer windowed = layer;
  const int64_t window_len = exact_window(policy, options);
  if (window_len > 0)
    windowed.sliding_window = layer.sliding_window > 0 ? std::min(layer.sliding_window, window_len) : window_len;
  return windowed;
}

Status check_layers(const Device& device, const std::vector<Layer>& layers) {
  if (layers.size() > TicketShape::kMostLayers)
    return fail(TANDEM_ERROR_UNSUPPORTED, "model", "model has %zu layers, sessions on a device have %d at most",
                layers.size(), TicketShape::kMostLayers);
  for (size_t l = 0; l < layers.size(); ++l) {
    const Layer& layer = layers[l];
    DeviceError error;
    // A lost device answers DEVICE_LOST. Its sessions still serve host tensors.
    if (device.table->supports(device.self, &layer, 1, &error) != TANDEM_ERROR_UNSUPPORTED) continue;
    char named[160];
    std::snprintf(named, sizeof named, "layer %zu (k_type = %s, k_head_dim = %d, v_type = %s, v_head_dim = %d): device: ", l,
                  find_dtype(layer.k_type)->name, layer.k_head_dim, find_dtype(layer.v_type)->name, layer.v_head_dim);
    return fail_with(TANDEM_ERROR_UNSUPPORTED, error.underlying, text_of(error.field).c_str(), named + reason_of(error));
  }
  return {};
}

Status DeviceSession::create(Cache& cache, const LayerPolicies& policies, const PolicyOptions& options,
                             std::unique_ptr<DeviceSession>* session) {
  Engine& engine = cache.engine();
  std::unique_ptr<DeviceSession> made(
      new DeviceSession(*engine.device(), cache.layers(), policies, options, cache.device_tier()));
  TANDEM_TRY(made->upload_constants());
  TANDEM_TRY(HandOver::create(made->device_, engine.cpu(), n_tasks_of(cache.layers().size()),
                              {&engine.device_calls(), &engine.profile()}, &made->hand_over_));
  *session = std::move(made);
  return {};
}

DeviceSession::~DeviceSession() {
  hand_over_.reset();
  side_.reset();
  if (shared_ != nullptr) device_.table->release_shared(device_.self, shared_);
}

Status DeviceSession::upload_constants() {
  const Constants constants(plain_layers_);
  sinks_at_ = constants.sinks_at;
  rope_at_ = constants.rope_at;
  if (constants.n_numbers == 0) return {};
  std::vector<float> all(static_cast<size_t>(constants.n_numbers), 0.0f);
  for (size_t l = 0; l < plain_layers_.size(); ++l) {
    const Layer& layer = plain_layers_[l];
    if (layer.sinks != nullptr) std::copy_n(layer.sinks, layer.n_q_heads, all.begin() + sinks_at_[l]);
    if (layer.rope != nullptr) std::copy_n(layer.rope->cos_sin.get(), n_floats(*layer.rope), all.begin() + rope_at_[l]);
  }
  const int64_t bytes = 4 * constants.n_numbers;
  TANDEM_TRY(Buffer::create(device_tier_, bytes, Use::kSession, &constants_));
  void* const stream = nullptr;
  TANDEM_TRY(call_device(device_, &DeviceTable::copy, constants_.data(), all.data(), bytes, stream));
  return call_device(device_, &DeviceTable::wait, stream);
}

Status most_queries(const Device& device, const Layer& windowed, int64_t* n) {
  DeviceError error;
  const auto asks = [&](int64_t q_len) {
    return device.table->supports(device.self, &windowed, static_cast<int32_t>(q_len), &error);
  };
  if (const int32_t code = asks(1); code != TANDEM_OK) return device_status(code, error);
  for (*n = kMostTicketTokens; *n > 1 && asks(*n) != TANDEM_OK;) *n /= 2;
  return {};
}

Status DeviceSession::most_queries(size_t layer_idx, int64_t wanted, int64_t* n) {
  int64_t& most = most_queries_[layer_idx];
  if (most == 0) TANDEM_TRY(tandem::most_queries(device_, windowed_layers_[layer_idx], &most));
  *n = std::min(most, wanted);
  return {};
}

Status DeviceSession::reserve_window(DeviceWindow& window, int64_t n_places, int64_t end, int64_t length) {
  TANDEM_TRY(window.reserve(device_tier_, geometry_, n_places, end, length));
  if (base_ == 0) base_ = window.any_page();
  if (geometry_.kept_bytes == 0 || window.kept_lists().bytes() > 0) return {};
  Buffer lists;
  void* const stream = nullptr;
  TANDEM_TRY(Buffer::create(device_tier_, geometry_.kept_bytes, Use::kKv, &lists));
  TANDEM_TRY(call_device(device_, &DeviceTable::fill, lists.data(), 0, geometry_.kept_bytes, stream));
  TANDEM_TRY(call_device(device_, &DeviceTable::wait, stream));
  window.kept_lists() = std::move(lists);
  return {};
}

Status DeviceSession::hold(const Reservation& needs, void* stream) {
  if (held_.has_room(needs)) return {};
  Reservation all = held_;
  all.include(needs);
  all.window_pages = 0;
  if (is_frozen_)
    return fail(
        TANDEM_ERROR_CAPACITY, "q_lens",
        "more tokens, sequences, pages or indices than before the session's first captured call: graphs hold what there "
        "was (%lld tokens, %lld sequences)",
        static_cast<long long>(held_.slot_rows), static_cast<long long>(held_.step_sequences));
  const SessionWork layout = make_session_work(plain_layers_, all);
  void *shared = nullptr, *shared_device = nullptr;
  TANDEM_TRY(call_device(device_, &DeviceTable::allocate_shared, layout.shared_bytes, &shared, &shared_device));
  // Work in flight still uses the old memory.
  hand_over_->drain();
  if (side_ != nullptr) side_->settle();
  Buffer work;
  Status status = Buffer::create(device_tier_, layout.work_bytes, Use::kSession, &work);
  if (is_for_lack_of_memory(status)) status = make_room_for_work(std::move(status), layout.work_bytes, stream, &work);
  if (status.ok()) status = call_device(device_, &DeviceTable::fill, work.data(), 0, layout.work_bytes, stream);
  if (status.ok()) status = call_device(device_, &DeviceTable::wait, stream);
  if (!status.ok()) {
    device_.table->release_shared(device_.self, shared);
    if (work_.bytes() == 0) held_ = {};  // room was made in vain: the next call starts without memory
    return status;
  }
  hand_over_->restart(static_cast<ExchangeFlags*>(shared));
  if (shared_ != nullptr) device_.table->release_shared(device_.self, shared_);
  shared_ = static_cast<std::byte*>(shared);
  shared_device_ = static_cast<std::byte*>(shared_device);
  work_.swap(work);
  held_ = all;
  layout_ = layout;
  return {};
}

// There is no room for the old work space beside the larger one. So the old one is freed first, and restored if that does
// not help. Nothing is in flight. lack: the error to return in that case.
Status DeviceSession::make_room_for_work(Status lack, int64_t bytes, void* stream, Buffer* work) {
  if (work_.bytes() == 0) return lack;
  TANDEM_TRY(hand_over_->fault());
  TANDEM_TRY(call_device(device_, &DeviceTable::wait, stream));
  const int64_t before = work_.bytes();
  work_ = Buffer();
  if (Buffer::create(device_tier_, bytes, Use::kSession, work).ok()) return {};
  Status restored = Buffer::create(device_tier_, before, Use::kSession, &work_);
  if (restored.ok()) restored = call_device(device_, &DeviceTable::fill, work_.data(), 0, before, stream);
  if (restored.ok()) restored = start_over(stream);
  if (!restored.ok()) {  // the next call starts without memory
    work_ = Buffer();
    held_ = {};
  }
  return lack;
}

Status DeviceSession::start_over(void* stream) {
  constexpr auto kBytes = int64_t{kExchangeWords} * static_cast<int64_t>(sizeof(int64_t));
  if (side_ != nullptr) side_->settle();
  TANDEM_TRY(call_device(device_, &DeviceTable::fill, work_.data(), 0, kBytes, stream));
  TANDEM_TRY(call_device(device_, &DeviceTable::wait, stream));
  hand_over_->start_over();
  return {};
}

DeviceExchange DeviceSession::exchange(size_t layer_idx) const {
  const SlotLayout slot = make_slot_layout(plain_layers_[layer_idx], held_);
  DeviceExchange exchange;
  exchange.flags = reinterpret_cast<ExchangeFlags*>(shared_device_);
  exchange.slots = shared_device_ + device_aligned(sizeof(ExchangeFlags));
  exchange.state = work_.as<int64_t>();
  exchange.slot_bytes = layout_.slot_bytes;
  exchange.timeout_ns = kTimeoutNs;
  exchange.n_slots = SharedArea::kSlots;
  exchange.n_rows = static_cast<int32_t>(held_.slot_rows);
  exchange.q_at = slot.q_at;
  exchange.o_at = slot.o_at;
  exchange.lse_at = slot.lse_at;
  std::copy(std::begin(slot.rows_at), std::end(slot.rows_at), exchange.rows_at);
  exchange.x_at = slot.x_at;
  exchange.maw_at = slot.maw_at;
  exchange.idx_at = slot.idx_at;
  exchange.n_idx = held_.slot_idx;
  exchange.n_evicted = static_cast<int32_t>(held_.n_evicted);
  return exchange;
}

SharedArea DeviceSession::shared() const {
  return {shared_, shared_device_, layout_, hand_over_->n_tasks(), n_steps_of(plain_layers_.size())};
}

std::byte* SharedArea::slot(uint64_t ticket) const {
  return host + device_aligned(sizeof(ExchangeFlags)) + static_cast<int64_t>(ticket % kSlots) * at.slot_bytes;
}

std::byte* SharedArea::upload(uint64_t task_idx) const {
  return host + device_aligned(sizeof(ExchangeFlags)) + kSlots * at.slot_bytes +
         static_cast<int64_t>(task_idx) % n_tasks * at.upload_bytes;
}

std::byte* SharedArea::step_upload(uint64_t step) const {
  return upload(0) + n_tasks * at.upload_bytes + static_cast<int64_t>(step) % n_steps * at.step_bytes;
}

Status DeviceSession::reserve_side() { return side_ != nullptr ? Status() : SideStream::create(device_, &side_); }

uint8_t* SharedArea::flag(size_t kind, uint64_t task_idx) const {
  return reinterpret_cast<uint8_t*>(host + at.flags_at + static_cast<int64_t>(kind) * device_aligned(n_tasks)) +
         static_cast<int64_t>(task_idx) % n_tasks;
}

std::byte* SharedArea::flag_on_device(size_t kind, uint64_t task_idx) const {
  return device + (reinterpret_cast<std::byte*>(flag(kind, task_idx)) - host);
}

Status DeviceSession::mark_merged(uint64_t task_idx, void* stream) const {
  return call_device(device_, &DeviceTable::fill, shared().flag_on_device(kMergedFlag, task_idx),
                     shared().merged_mark(task_idx), int64_t{1}, stream);
}

Status DeviceSession::end_step(uint64_t step, void* stream) const {
  auto* ended = shared_device_ + offsetof(ExchangeFlags, ended);
  return call_device(device_, &DeviceTable::fill, ended, static_cast<uint8_t>(step), 1, stream);
}

DevicePages DeviceSession::pages(size_t layer_idx) const {
  const WindowGeometry::LayerPlanes& planes = geometry_.layers[layer_idx];
  DevicePages pages = planes.pages(reinterpret_cast<std::byte*>(base_), kDevicePageLen);
  if (planes.maw_at >= 0) pages.maw = reinterpret_cast<float*>(base_ + planes.maw_at);
  return pages;
}

}  // namespace tandem
