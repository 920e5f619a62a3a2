// SPDX-License-Identifier: MIT
#include "lib/weights.h"

#include <algorithm>
#include <cstring>

#include "lib/device_memory.h"
#include "lib/device_status.h"
#include "lib/process_end.h"
#include "lib/trace.h"

namespace tandem {
namespace {

constexpr int64_t kUnit = 256;  // places begin at multiples of this many bytes

int64_t padded(int64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

// Which blocks stay: of every stretch of the order about the same share, then whatever still fits. [n_blocks]
std::vector<bool> choose_resident(const std::vector<WeightBlock>& blocks, int64_t resident_bytes) {
  int64_t total = 0, passed = 0, kept = 0;
  for (const WeightBlock& block : blocks) total += padded(block.bytes);
  std::vector<bool> stays(blocks.size());
  const double share = total > 0 ? std::min(1.0, static_cast<double>(resident_bytes) / static_cast<double>(total)) : 0.0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const int64_t bytes = padded(blocks[b].bytes);
    passed += bytes;
    if (static_cast<double>(kept + bytes) > share * static_cast<double>(passed)) continue;
    stays[b] = true;
    kept += bytes;
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (stays[b] || kept + padded(blocks[b].bytes) > resident_bytes) continue;
    stays[b] = true;
    kept += padded(blocks[b].bytes);
  }
  return stays;
}

}  // namespace

Weights::Weights(std::shared_ptr<Engine> engine, const tandem_weights_options& options)
    : engine_(std::move(engine)),
      device_(*engine_->device()),
      host_tier_("host_cap_bytes", options.host_cap_bytes, engine_->allocator()),
      device_tier_("device_cap_bytes", options.device_cap_bytes, device_allocator(&device_)) {}

Status Weights::create(std::shared_ptr<Engine> engine, const std::vector<WeightBlock>& blocks,
                       const tandem_weights_options& options, std::shared_ptr<Weights>* weights) {
  if (engine->device() == nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "engine", "the engine has no device that weights could be sent to");
  const std::vector<bool> stays = choose_resident(blocks, options.resident_bytes);
  int64_t largest = 0, pair = 0, before = 0, first = 0, resident_bytes = 0;
  std::shared_ptr<Weights> made(new Weights(std::move(engine), options));
  for (size_t b = 0; b < blocks.size(); ++b) {
    Block& block = made->blocks_.emplace_back();
    block.bytes = blocks[b].bytes;
    const int64_t bytes = padded(block.bytes);
    if (stays[b]) {
      block.resident_at = resident_bytes;
      resident_bytes += bytes;
      continue;
    }
    pair = std::max(pair, before + bytes);
    before = bytes;
    first = first == 0 ? bytes : first;
    largest = std::max(largest, bytes);
  }
  // One in use and the one behind it, the first behind the last too: a ring has to hold them wherever they begin.
  const int64_t wanted = options.buffer_bytes > 0 ? options.buffer_bytes : std::max(pair, before + first) + largest;
  if (wanted < largest)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "buffer_bytes",
                "buffer_bytes = %lld is less than the %lld bytes of the largest block that is streamed",
                static_cast<long long>(wanted), static_cast<long long>(largest));
  if (resident_bytes > 0) TANDEM_TRY(Buffer::create(made->device_tier_, resident_bytes, Use::kKv, &made->resident_));
  if (largest > 0) TANDEM_TRY(Buffer::create(made->device_tier_, wanted, Use::kStream, &made->ring_));
  TANDEM_TRY(call_device(made->device_, &DeviceTable::create_stream, &made->stream_));
  made->has_stream_ = true;
  TANDEM_TRY(made->make_events());
  TANDEM_TRY(made->copy_blocks(blocks));
  TANDEM_TRY(made->send_ahead());
  *weights = std::move(made);
  return {};
}

// What was done() is waited for by the stream of the copies.
Weights::~Weights() {
  if (process_ends()) return;
  DeviceError ignored;
  if (has_stream_) device_.table->wait(device_.self, stream_, &ignored);
  for (const Block& block : blocks_)
    for (int64_t at = 0; at < block.pinned_bytes; at += most_pinned_bytes)
      device_.table->unpin(device_.self, block.host.data() + at);
  for (const Events& events : events_)
    for (void* event : {events.filled, events.freed})
      if (event != nullptr) device_.table->destroy_event(device_.self, event);
  if (has_stream_) device_.table->destroy_stream(device_.self, stream_);
}

// No block is in the ring twice but for places that are free again, which need none.
Status Weights::make_events() {
  const size_t n = static_cast<size_t>(
      std::count_if(blocks_.begin(), blocks_.end(), [](const Block& block) { return block.resident_at < 0; }));
  events_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    TANDEM_TRY(call_device(device_, &DeviceTable::create_event, &events_[i].filled));
    TANDEM_TRY(call_device(device_, &DeviceTable::create_event, &events_[i].freed));
    free_events_.push_back(i);
  }
  return {};
}

// Piece by piece, until one is refused.
void Weights::pin(Block* block) {
  DeviceError error;
  while (block->pinned_bytes < block->bytes) {
    const int64_t n = std::min(block->bytes - block->pinned_bytes, most_pinned_bytes);
    if (device_.table->pin(device_.self, block->host.data() + block->pinned_bytes, n, &error) != TANDEM_OK) return;
    block->pinned_bytes += n;
  }
}

Status Weights::copy_blocks(const std::vector<WeightBlock>& blocks) {
  bool are_pinned = true;
  for (size_t b = 0; b < blocks.size(); ++b) {
    Block& block = blocks_[b];
    if (block.resident_at >= 0) {
      TANDEM_TRY(call_device(device_, &DeviceTable::copy, static_cast<void*>(resident_.data() + block.resident_at),
                             blocks[b].data, block.bytes, stream_));
      continue;
    }
    TANDEM_TRY(Buffer::create(host_tier_, block.bytes, Use::kKv, &block.host));
    std::memcpy(block.host.data(), blocks[b].data, static_cast<size_t>(block.bytes));
    if (owns_pages(host_tier_, block.host)) pin(&block);
    are_pinned = are_pinned && block.pinned_bytes == block.bytes;
  }
  if (!are_pinned)
    engine_->log(TANDEM_LOG_WARNING, "weights could not be pinned, or not all: they cross the bus more slowly");
  return call_device(device_, &DeviceTable::wait, stream_);  // the caller's memory has been read
}

Weights::Place* Weights::find(int32_t block_idx) {
  for (Place& place : places_)
    if (place.block_idx == block_idx && !place.is_free) return &place;
  return nullptr;
}

// Behind the newest place, or at the ring's begin where that is free again.
bool Weights::find_room(const std::deque<Place>& places, int64_t bytes, int64_t* at) const {
  *at = 0;
  if (places.empty()) return true;
  const int64_t front = places.front().begin, back = places.back().end;
  const bool is_wrapped = places.back().begin < front;
  if (back + bytes <= (is_wrapped ? front : ring_.bytes())) {
    *at = back;
    return true;
  }
  return !is_wrapped && bytes <= front;
}

int32_t Weights::next_streamed(int32_t block_idx) const {
  do block_idx = (block_idx + 1) % n_blocks();
  while (blocks_[static_cast<size_t>(block_idx)].resident_at >= 0);
  return block_idx;
}

Status Weights::send(int32_t block_idx, int64_t at) {
  const TraceRange range("load weights", block_idx, "stream");
  const Block& block = blocks_[static_cast<size_t>(block_idx)];
  const size_t event = free_events_.back();
  for (int64_t first = 0; first < block.bytes; first += most_pinned_bytes) {  // a copy is of one pinned piece
    const int64_t n = std::min(block.bytes - first, most_pinned_bytes);
    const StridedCopy copy{ring_.data() + at + first, block.host.data() + first, n, 1, n, n};
    TANDEM_TRY(call_device(device_, &DeviceTable::copy_strided, &copy, stream_));
  }
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, events_[event].filled, stream_));
  places_.push_back({block_idx, at, at + padded(block.bytes), event, false, false});
  free_events_.pop_back();
  last_sent_ = block_idx;
  streamed_bytes_ += block.bytes;
  return {};
}

// As far as there is room.
Status Weights::send_ahead() {
  if (ring_.bytes() == 0) return {};
  for (;;) {
    const int32_t next = next_streamed(last_sent_);
    int64_t at;
    if (find(next) != nullptr || !find_room(places_, padded(blocks_[static_cast<size_t>(next)].bytes), &at)) return {};
    TANDEM_TRY(send(next, at));
  }
}

// Copies into the place wait in done().
void Weights::free(Place* place) {
  place->is_free = true;
  free_events_.push_back(place->event);  // who waits for them has been told to
}

void Weights::retire() {
  while (!places_.empty() && places_.front().is_free) places_.pop_front();
}

std::string Weights::held() const {
  std::string names;
  for (size_t b = 0; b < blocks_.size(); ++b)
    if (blocks_[b].n_held > 0) names += (names.empty() ? "" : ", ") + std::to_string(b);
  return names;
}

// What was sent for later uses gives way: the model has gone elsewhere.
Status Weights::send_now(int32_t block_idx) {
  std::deque<Place> kept = places_;
  while (!kept.empty() && !kept.back().was_used) kept.pop_back();
  int64_t at;
  if (!find_room(kept, padded(blocks_[static_cast<size_t>(block_idx)].bytes), &at))
    return fail(TANDEM_ERROR_INVALID_STATE, "block_idx",
                "block_idx = %d: the buffer has no room for it beside the blocks in use (%s)", block_idx, held().c_str());
  for (; places_.size() > kept.size(); places_.pop_back())
    if (!places_.back().is_free) free(&places_.back());
  return send(block_idx, at);
}

Status Weights::check(int32_t block_idx, void* stream) const {
  if (block_idx < 0 || block_idx >= n_blocks())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "block_idx", "block_idx = %d is not in [0, %d]", block_idx, n_blocks() - 1);
  bool captures = false;
  TANDEM_TRY(is_capturing(device_, stream, &captures));
  if (captures)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream",
                "stream = %p is being captured: a replay would find other blocks in the buffer", stream);
  return {};
}

Status Weights::use(int32_t block_idx, void* stream, void** data) {
  TANDEM_TRY(check(block_idx, stream));
  const std::lock_guard lock(mutex_);
  Block& block = blocks_[static_cast<size_t>(block_idx)];
  if (block.resident_at >= 0) {
    ++block.n_held;
    ++n_uses_;
    *data = resident_.data() + block.resident_at;
    return {};
  }
  Place* place = find(block_idx);
  const bool is_ahead = place != nullptr;
  if (!is_ahead) {
    TANDEM_TRY(send_now(block_idx));
    place = &places_.back();
  }
  TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, events_[place->event].filled, stream));
  *data = ring_.data() + place->begin;
  place->was_used = true;
  ++block.n_held;
  ++n_uses_;
  ++n_streamed_uses_;
  n_ahead_ += is_ahead ? 1 : 0;
  // What was to come before it has been left out.
  for (Place& earlier : places_) {
    if (&earlier == place) break;
    if (!earlier.was_used && !earlier.is_free) free(&earlier);
  }
  retire();
  return send_ahead();
}

Status Weights::done(int32_t block_idx, void* stream) {
  TANDEM_TRY(check(block_idx, stream));
  const std::lock_guard lock(mutex_);
  Block& block = blocks_[static_cast<size_t>(block_idx)];
  if (block.n_held == 0) return fail(TANDEM_ERROR_INVALID_STATE, "block_idx", "block_idx = %d is not in use", block_idx);
  if (block.resident_at >= 0) {
    --block.n_held;
    return {};
  }
  Place& place = *find(block_idx);
  void* const freed = events_[place.event].freed;
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, freed, stream));
  TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, freed, stream_));
  if (--block.n_held > 0) return {};
  free(&place);
  retire();
  return send_ahead();
}

Status WeightsInUse::use(const std::shared_ptr<Weights>& weights, int32_t block_idx, const void** data) {
  held_.reserve(held_.size() + 1);
  void* at = nullptr;
  TANDEM_TRY(weights->use(block_idx, stream_, &at));
  held_.push_back({weights, block_idx});
  *data = at;
  return {};
}

// What failed is tried once more at the end.
Status WeightsInUse::done() {
  while (!held_.empty()) {
    TANDEM_TRY(held_.back().weights->done(held_.back().block_idx, stream_));
    held_.pop_back();
  }
  return {};
}

void Weights::get_stats(tandem_weights_stats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->n_blocks = n_blocks();
  for (const Block& block : blocks_) {
    stats->n_resident += block.resident_at >= 0 ? 1 : 0;
    stats->resident_bytes += block.resident_at >= 0 ? block.bytes : 0;
    stats->pinned_bytes += block.pinned_bytes;
  }
  stats->host_bytes = host_tier_.total();
  stats->device_bytes = device_tier_.total();
  stats->buffer_bytes = ring_.bytes();
  stats->n_uses = n_uses_;
  stats->n_streamed_uses = n_streamed_uses_;
  stats->n_ahead = n_ahead_;
  stats->streamed_bytes = streamed_bytes_;
}

}  // namespace tandem
