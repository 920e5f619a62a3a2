// SPDX-License-Identifier: MIT
#include "lib/weights/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "lib/base/process_end.h"
#include "lib/base/trace.h"
#include "lib/machine/device_memory.h"
#include "lib/machine/device_status.h"

namespace tandem {
namespace {

constexpr int64_t kUnit = 256;  // bytes; places begin at multiples of this
// Bytes: the least that is sent behind a piece, unless the block is due before the next piece.
constexpr int64_t kTurn = int64_t{8} << 20;

int64_t padded(int64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

// Chooses the blocks that stay on the device: about the same share of every stretch of the order, then any others that still
// fit. Returns [n_blocks].
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
  // The ring must hold a block in use and the next one, wherever they begin. The first block follows the last.
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
  made->device_.bus->join(made.get());
  *weights = std::move(made);
  return {};
}

// Waits for all uses up to their done().
Weights::~Weights() {
  device_.bus->leave(this);
  if (process_ends()) return;
  DeviceError ignored;
  for (Place& place : places_) static_cast<void>(wait_for_uses(&place.behind));
  static_cast<void>(wait_for_uses(&done_with_));
  if (has_stream_) device_.table->wait(device_.self, stream_, &ignored);
  for (const Block& block : blocks_)
    for (int64_t at = 0; at < block.pinned_bytes; at += most_pinned_bytes)
      device_.table->unpin(device_.self, block.host.data() + at);
  for (const Events& events : events_)
    for (void* event : {events.filled, events.freed[0], events.freed[1]})
      if (event != nullptr) device_.table->destroy_event(device_.self, event);
  if (has_stream_) device_.table->destroy_stream(device_.self, stream_);
}

// A block has one place in the ring, and a second one while an earlier place is freed but not overwritten yet.
Status Weights::make_events() {
  const size_t n = 2 * static_cast<size_t>(std::count_if(blocks_.begin(), blocks_.end(),
                                                         [](const Block& block) { return block.resident_at < 0; }));
  events_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    TANDEM_TRY(call_device(device_, &DeviceTable::create_event, &events_[i].filled));
    for (void*& freed : events_[i].freed) TANDEM_TRY(call_device(device_, &DeviceTable::create_event, &freed));
    free_events_.push_back(i);
  }
  return {};
}

// Pins the block piece by piece, until the device refuses one.
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
  return call_device(device_, &DeviceTable::wait, stream_);  // afterwards the caller's memory has been read
}

Weights::Place* Weights::find(int32_t block_idx) {
  for (Place& place : places_)
    if (place.block_idx == block_idx && !place.is_free) return &place;
  return nullptr;
}

// Finds room behind the newest place, or at the ring's begin if that is free again.
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

void Weights::place(int32_t block_idx, int64_t at) {
  Place made{block_idx, at, at + padded(blocks_[static_cast<size_t>(block_idx)].bytes), free_events_.back()};
  made.others_at = n_others_;
  places_.push_back(std::move(made));
  places_.back().behind.swap(done_with_);
  events_[free_events_.back()].n_streams = 0;
  free_events_.pop_back();
  last_placed_ = block_idx;
  n_unfollowed_ = 0;
}

// Sends up to `most` bytes of a block that are not sent yet.
Status Weights::send(Place* place, int64_t most) {
  const TraceRange range("load weights", place->block_idx, "stream");
  const Block& block = blocks_[static_cast<size_t>(place->block_idx)];
  TANDEM_TRY(wait_for_uses(&place->behind));
  while (place->sent_bytes < block.bytes && most > 0) {
    const int64_t at = place->sent_bytes, piece_left = most_pinned_bytes - at % most_pinned_bytes;
    const int64_t n = std::min({block.bytes - at, most, piece_left});  // a copy must not cross pinned pieces
    const StridedCopy copy{ring_.data() + place->begin + at, block.host.data() + at, n, 1, n, n};
    TANDEM_TRY(call_device(device_, &DeviceTable::copy_strided, &copy, stream_));
    place->sent_bytes += n;
    streamed_bytes_ += n;
    most -= n;
  }
  if (place->sent_bytes < block.bytes) return {};
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, events_[place->events].filled, stream_));
  place->is_sent = true;
  return {};
}

// Returns how many bytes are due behind pieces of piece_bytes bytes, so that each block arrives before its use. Assumes that
// as many bytes of sessions' pieces precede the use as last time. For each block, the share of these pieces in all pieces
// still to come before its use is applied to the unsent bytes of all blocks up to it. The largest result counts.
Weights::Due Weights::due_behind(int64_t piece_bytes) const {
  int64_t left = 0;
  Due due;
  for (const Place& place : places_) {
    if (place.is_free || place.is_sent) continue;
    const Block& block = blocks_[static_cast<size_t>(place.block_idx)];
    left += std::max<int64_t>(block.bytes - place.sent_bytes, 1);
    const int64_t others_left = std::max<int64_t>(0, place.others_at + block.others - n_others_);
    const double share =
        others_left == 0 ? 1.0 : static_cast<double>(piece_bytes) / static_cast<double>(piece_bytes + others_left);
    due.bytes = std::max(due.bytes, static_cast<int64_t>(std::ceil(share * static_cast<double>(left))));
    due.is_last_call = due.is_last_call || others_left == 0;
  }
  return due;
}

Status Weights::send_due(int64_t bytes) {
  for (Place& place : places_) {
    if (bytes <= 0) break;
    if (place.is_free || place.is_sent) continue;
    const int64_t before = place.sent_bytes;
    TANDEM_TRY(send(&place, bytes));
    bytes -= std::max<int64_t>(place.sent_bytes - before, 1);
  }
  return {};
}

// Small copies are slow, so pieces are counted until enough bytes are due.
void Weights::follow(int64_t bytes, void* event) {
  const std::lock_guard lock(mutex_);
  n_others_ += bytes;
  n_unfollowed_ += bytes;
  const Due due = due_behind(n_unfollowed_);
  if (due.bytes == 0) n_unfollowed_ = 0;
  if (due.bytes < kTurn && !due.is_last_call) return;
  if (!call_device(device_, &DeviceTable::wait_event, event, stream_).ok()) return;
  n_unfollowed_ = 0;
  static_cast<void>(send_due(due.bytes));
}

// Places and sends blocks as far as there is room.
Status Weights::send_ahead() {
  if (ring_.bytes() == 0) return {};
  for (;;) {
    const int32_t next = next_streamed(last_placed_);
    int64_t at;
    if (find(next) != nullptr || !find_room(places_, padded(blocks_[static_cast<size_t>(next)].bytes), &at)) break;
    place(next, at);
  }
  return send_due(due_behind(0).bytes);
}

// Sends blocks that are not in use yet. If this fails, use() tries again and reports the failure.
void Weights::try_ahead() noexcept {
  try {
    static_cast<void>(send_ahead());
  } catch (const std::bad_alloc&) {
  }
}

// Frees a place. The next place that is taken has its copies wait for the uses of freed places.
void Weights::free(Place* place) {
  done_with_.reserve(done_with_.size() + place->behind.size() + 1);
  place->is_free = true;
  done_with_.insert(done_with_.end(), place->behind.begin(), place->behind.end());
  place->behind.clear();
  if (place->was_used)
    done_with_.push_back(place->events);
  else
    free_events_.push_back(place->events);
}

// Removes free places at both ends, so blocks in use occupy only their own room.
void Weights::retire() {
  while (!places_.empty() && places_.front().is_free) places_.pop_front();
  while (!places_.empty() && places_.back().is_free) places_.pop_back();
}

std::string Weights::held() const {
  std::string names;
  for (size_t b = 0; b < blocks_.size(); ++b)
    if (blocks_[b].n_held > 0) names += (names.empty() ? "" : ", ") + std::to_string(b);
  return names;
}

// Drops blocks that were sent for later uses, as the model has left the usual order.
Status Weights::place_now(int32_t block_idx) {
  std::deque<Place> kept = places_;
  while (!kept.empty() && !kept.back().was_used) kept.pop_back();
  int64_t at;
  if (!find_room(kept, padded(blocks_[static_cast<size_t>(block_idx)].bytes), &at))
    return fail(TANDEM_ERROR_INVALID_STATE, "block_idx",
                "block_idx = %d: the buffer has no room for it beside the blocks in use (%s)", block_idx, held().c_str());
  for (; places_.size() > kept.size(); places_.pop_back())
    if (!places_.back().is_free) free(&places_.back());
  place(block_idx, at);
  return {};
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
  const bool is_placed = place != nullptr, is_ahead = is_placed && place->is_sent;
  if (!is_placed) {
    TANDEM_TRY(place_now(block_idx));
    place = &places_.back();
  }
  // Blocks before this one were skipped. Uses that their copies would have waited for may have been in this block's place
  // too.
  for (Place& earlier : places_) {
    if (&earlier == place) break;
    if (earlier.was_used || earlier.is_free) continue;
    if (!is_ahead) place->behind.insert(place->behind.end(), earlier.behind.begin(), earlier.behind.end());
    if (!is_ahead) earlier.behind.clear();
    free(&earlier);
  }
  if (!is_ahead) TANDEM_TRY(send_due(INT64_MAX));
  TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, events_[place->events].filled, stream));
  retire();
  try_ahead();
  *data = ring_.data() + place->begin;
  if (!place->was_used) block.others = n_others_ - place->others_at;
  place->was_used = true;
  ++block.n_held;
  ++n_uses_;
  ++n_streamed_uses_;
  n_ahead_ += is_ahead ? 1 : 0;
  return {};
}

Status Weights::note_use_ends(Place* place, void* stream) {
  Events& events = events_[place->events];
  size_t i = 0;
  while (i < events.n_streams && events.streams[i] != stream) ++i;
  if (i == Events::kStreams) {  // more streams than there is room for, so wait for the first at once
    i = 0;
    TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, events.freed[i], stream_));
  }
  TANDEM_TRY(call_device(device_, &DeviceTable::record_event, events.freed[i], stream));
  events.streams[i] = stream;
  events.n_streams = std::max(events.n_streams, i + 1);
  return {};
}

// places: indices in events_.
Status Weights::wait_for_uses(std::vector<size_t>* places) {
  for (; !places->empty(); places->pop_back()) {
    const Events& events = events_[places->back()];
    for (size_t i = 0; i < events.n_streams; ++i)
      TANDEM_TRY(call_device(device_, &DeviceTable::wait_event, events.freed[i], stream_));
    free_events_.push_back(places->back());
  }
  return {};
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
  TANDEM_TRY(note_use_ends(&place, stream));
  if (block.n_held == 1) free(&place);
  if (--block.n_held > 0) return {};
  retire();
  try_ahead();
  return {};
}

Status WeightsInUse::use(const std::shared_ptr<Weights>& weights, int32_t block_idx, const void** data) {
  held_.reserve(held_.size() + 1);
  void* at = nullptr;
  TANDEM_TRY(weights->use(block_idx, stream_, &at));
  held_.push_back({weights, block_idx});
  *data = at;
  return {};
}

WeightsInUse::~WeightsInUse() {
  for (const Held& held : held_) static_cast<void>(held.weights->done(held.block_idx, stream_));
}

// If this fails, the destructor tries once more.
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
