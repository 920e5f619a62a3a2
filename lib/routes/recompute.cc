// SPDX-License-Identifier: MIT
#include "lib/routes/recompute.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>

#include "lib/base/trace.h"
#include "lib/device/device_session.h"
#include "lib/machine/device_status.h"
#include "lib/pieces/device_projections.h"
#include "lib/pieces/projection_weights.h"
#include "lib/routes/routes_taken.h"
#include "lib/store/cache.h"

namespace tandem {

struct RecomputeRoute::Notes final : RouteNotes {
  RebuiltPieces pieces;
  const DeviceSequence* described = nullptr;  // device address of each part's descriptor
  const std::byte* uploaded = nullptr;        // host address of the same data
  DeviceProjection projection;
  std::optional<WeightsInUse> weights;  // from open() to close()

  // Behind the descriptors lie page tables, then positions of pages, each with one number per page.
  const int64_t* page_tables() const { return reinterpret_cast<const int64_t*>(described + pieces.parts.size()); }
  const std::byte* positions(int64_t first_page) const {
    return uploaded + pieces.parts.size() * sizeof(DeviceSequence) + (pieces.n_pages() + first_page) * 8;
  }
  std::span<const RebuiltPart> parts_of(const RebuiltPiece& piece) const {
    return std::span(pieces.parts).subspan(piece.first_part, piece.n_parts);
  }
};

namespace {

// Returns the layer's projection in device memory, shared by all sessions of the cache.
Status projection_of(Cache& cache, const Layer& layer, const DeviceProjection** projection) {
  std::shared_ptr<ProjectionsOnDevice>& all = cache.projections();
  if (all == nullptr) all = std::make_shared<ProjectionsOnDevice>();
  return all->get(*cache.engine().device(), cache.device_tier(), layer, projection);
}

// Returns how many of these tokens, from the first on, one piece may have. Rotated keys need consecutive positions.
int64_t follow_positions(const Layer& layer, const Sequence& sequence, TokenRange tokens) {
  const int64_t n = tokens.end - tokens.begin;
  return layer.projection->rope != nullptr ? consecutive(sequence.positions, tokens.begin, n) : n;
}

bool may_rebuild(const RouteSetup& setup) {
  const auto selects = [](const Policy& policy) { return !can_stream(policy, false); };
  return setup.options.is_auto() && !setup.policies.any(selects) &&
         std::any_of(setup.layers.begin(), setup.layers.end(), is_rebuild_less);
}

}  // namespace

// Makes the route for sessions that ask for it, whose device must then be able to make keys. For "auto", makes it if a layer
// may gain.
Status RecomputeRoute::make(const RouteSetup& setup, size_t idx, std::unique_ptr<KeyRoute>* route) {
  const bool is_asked = setup.options.asks_for(idx);
  if (setup.has_streaming_heads && is_asked)
    return fail(TANDEM_ERROR_UNSUPPORTED, "streaming_heads",
                "streaming_heads with route \"recompute\": all heads of a layer are made at once");
  if (setup.has_streaming_heads || (!is_asked && !may_rebuild(setup))) return {};
  std::vector<RebuildLayout> layouts;
  Status status = make_rebuild_layouts(setup.layers, setup.options.buffer_bytes, &layouts);
  for (size_t l = 0; l < setup.layers.size() && status.ok(); ++l)
    status = call_device(setup.device, &DeviceTable::supports_rebuild, &setup.layers[l]);
  if (status.ok())
    route->reset(new RecomputeRoute(idx, setup, std::move(layouts)));
  else if (is_asked)
    return status;
  return {};
}

RecomputeRoute::RecomputeRoute(size_t idx, const RouteSetup& setup, std::vector<RebuildLayout> layouts)
    : KeyRoute(idx),
      device_(setup.device),
      layers_(setup.layers),
      is_asked_(setup.options.asks_for(idx)),
      rebuilt_share_(setup.options.rebuilt_share),
      weights_(setup.weights),
      layouts_(std::move(layouts)),
      projections_(setup.layers.size(), nullptr) {}

// Measures the time of making keys if it could beat sending K and V, once per engine and shape. The cache's mutex is held
// exclusively.
Status RecomputeRoute::try_out(Cache& cache, DeviceSession* session, size_t layer_idx) {
  const Layer& layer = layers_[layer_idx];
  Profile& profile = cache.engine().profile();
  if (layouts_.empty() || (!is_asked_ && !may_gain(layer_idx))) return {};
  TANDEM_TRY(weights_->check(layer_idx));
  if (profile.knows_rebuild(layer)) return {};
  if (session != nullptr) session->hand_over().drain();
  const auto measure = [&]() -> Status {
    const DeviceProjection* projection = nullptr;
    std::unique_ptr<RebuildBuffers> buffers;
    double ns = 0.0;
    TANDEM_TRY(projection_of(cache, layer, &projection));
    TANDEM_TRY(RebuildBuffers::create(device_, cache.device_tier(), layers_, layouts_, &buffers));
    DeviceProjection with_weights = *projection;
    WeightsInUse weights(nullptr);
    TANDEM_TRY(weights_->use(layer_idx, &weights, &with_weights));
    // The weights have arrived then, for all streams.
    TANDEM_TRY(call_device(device_, &DeviceTable::wait, static_cast<void*>(nullptr)));
    TANDEM_TRY(buffers->measure(layer, layouts_[layer_idx], with_weights, &ns));
    TANDEM_TRY(weights.done());
    profile.note_rebuild_trial(layer, ns);
    return {};
  };
  Status status = measure();
  if (status.ok() || is_asked_ || !is_for_lack_of_memory(status)) return status;
  give_up(cache, status);
  return {};
}

RebuildTerms RecomputeRoute::terms(size_t layer_idx) const {
  if (layouts_.empty()) return {};
  const RebuildLayout& layout = layouts_[layer_idx];
  return {is_asked_ || may_gain(layer_idx), is_asked_ ? rebuilt_share_ : 0.0, layout.few_pages() * RebuildLayout::kPageLen,
          RebuildBuffers::kBuffers * layout.n_rows()};
}

// Returns whether making the layer's keys may be faster than sending them, judged by the bytes on the bus. False while the
// weights are unknown, as planners do not rebuild such layers.
bool RecomputeRoute::may_gain(size_t layer_idx) const {
  return is_rebuild_less(layers_[layer_idx]) && weights_->check(layer_idx).ok();
}

Status RecomputeRoute::hold(const RouteHold& call) {
  const size_t l = call.shape.layer_idx;
  TANDEM_TRY(weights_->check(l));
  TANDEM_TRY(projection_of(call.cache, layers_[l], &projections_[l]));
  if (buffers_ == nullptr)
    TANDEM_TRY(RebuildBuffers::create(device_, call.cache.device_tier(), layers_, layouts_, &buffers_));
  for (size_t i = 0; i < call.sequences.size(); ++i) {
    const TokenRange tokens = call.terms.streamed(call.shape, call.sequences[i]);
    int64_t& n_runs = call.sequences[i].n_runs = 0;
    for (int64_t t = tokens.begin; t < tokens.end; ++n_runs)
      t += follow_positions(layers_[l], *call.calls[i].sequence, {t, tokens.end});
  }
  return {};
}

bool RecomputeRoute::give_up(Cache& cache, const Status& why) {
  layouts_.clear();
  cache.engine().log(TANDEM_LOG_WARNING, "no keys are made of hidden states, as there is no memory for that: %s",
                     why.info().message.c_str());
  return true;
}

// Reserves descriptors and page tables of all parts, and positions of pages. The room is for the keys that a call's last
// chunk may find outside its windows.
void RecomputeRoute::reserve(const SizeTerms& terms, const CallShape& shape, const RoutesTaken&, Reservation* needs) const {
  if (layouts_.empty()) return;  // the route has been given up
  RebuiltCount count;
  for (const SequenceShape& sequence : shape.sequences) {
    const TokenRange tokens = terms.streamed(shape, sequence);
    count.add(tokens.end - tokens.begin, sequence.n_runs);
  }
  needs->add_descriptors(count.all_parts(layouts_[shape.layer_idx]), 2 * count.n_pages);
  needs->has_part_states = 1;
}

RouteBytes RecomputeRoute::bytes(const SizeTerms& terms, const std::vector<Layer>& layers) const {
  return {RebuildBuffers::bytes_of(device_, terms.layers, layouts_), ProjectionsOnDevice::bytes_of(layers)};
}

std::unique_ptr<RouteNotes> RecomputeRoute::make_notes() const { return std::make_unique<Notes>(); }

RecomputeRoute::Notes& RecomputeRoute::notes_of(const RouteCall& call) const {
  return static_cast<Notes&>(*call.task.notes[idx()]);
}

// Cuts a part into pieces. Sequences with adjacent rows share pieces. After a gap in its positions, a sequence continues in
// the next piece.
void RecomputeRoute::cut(const RouteCall& call, const KeyPart& part, RebuiltPieces* pieces) const {
  const SequenceCall& of = call.calls[part.call];
  bool continues = false;
  if (!pieces->empty()) {
    const SequenceCall& before = call.calls[pieces->parts.back().call];
    continues = pieces->parts.back().call != part.call && before.first_row + before.q_len == of.first_row;
  }
  for (int64_t t = part.tokens.begin; t < part.tokens.end; continues = false) {
    const int64_t n = follow_positions(call.layer, *of.sequence, {t, part.tokens.end});
    add_rebuilt(layout_of(call), part.call, {t, t + n}, continues, pieces);
    t += n;
  }
}

// Orders the parts' pages in each piece like those of the store. Pages at a constant distance then become one copy.
void RecomputeRoute::order_pages(const RouteCall& call, RebuiltPieces* pieces) {
  std::vector<RebuiltPart*> parts;
  const auto stored = [&](const RebuiltPart* part) {
    return call.calls[part->call].sequence->pages[static_cast<size_t>(part->begin / call.cache.page_len())];
  };
  for (const RebuiltPiece& piece : pieces->pieces) {
    parts.clear();
    for (size_t i = piece.first_part; i < piece.first_part + piece.n_parts; ++i) parts.push_back(&pieces->parts[i]);
    std::sort(parts.begin(), parts.end(), [&](const RebuiltPart* a, const RebuiltPart* b) {
      return std::tuple(stored(a), a->first_page) < std::tuple(stored(b), b->first_page);
    });
    int64_t page = 0;
    for (RebuiltPart* part : parts) part->first_page = std::exchange(page, page + part->n_pages());
  }
}

void RecomputeRoute::choose(const RouteCall& call, std::span<const KeyPart> parts, const StreamLayout&) {
  HandOverTask& task = call.task;
  RebuiltPieces& pieces = notes_of(call).pieces;
  pieces.clear();
  int64_t n_tokens = 0;
  for (const KeyPart& part : parts) {
    n_tokens += part.tokens.end - part.tokens.begin;
    for (int64_t t = part.tokens.begin; t < part.tokens.end;) {
      const int64_t end = t + follow_positions(call.layer, *call.calls[part.call].sequence, {t, part.tokens.end});
      pieces.planned_pages += RebuiltPart{0, t, end, 0}.n_pages();
      t = end;
    }
  }
  for (const KeyPart& part : parts) cut(call, part, &pieces);
  task.n_pieces[idx()] = pieces.pieces.size();
  if (pieces.empty()) return;
  order_pages(call, &pieces);
  task.part.x_bytes = n_tokens * call.layer.x_bytes();
  task.part.n_made_rows = pieces.n_pages() * RebuildLayout::kPageLen;
  task.sent[idx()] = call.device.shared().flag(idx(), task.idx);
  task.merged = call.device.shared().flag(kMergedFlag, task.idx);
  task.merged_mark = call.device.shared().merged_mark(task.idx);
  for (uint8_t* flag : {task.sent[idx()], task.merged}) std::atomic_ref(*flag).store(0, std::memory_order_relaxed);
}

// Positions of pages are copied with the pieces, not with the descriptors.
int64_t RecomputeRoute::describe(const RouteCall& call, std::byte* upload, const std::byte* descriptors) {
  Notes& notes = notes_of(call);
  const RebuildLayout& layout = layout_of(call);
  const int64_t n_pages = notes.pieces.n_pages();
  auto* const described = reinterpret_cast<DeviceSequence*>(upload);
  auto* const tables = reinterpret_cast<int64_t*>(described + notes.pieces.parts.size());
  int64_t* const positions = tables + n_pages;
  for (const RebuiltPiece& piece : notes.pieces.pieces)
    for (size_t i = piece.first_part; i < piece.first_part + piece.n_parts; ++i) {
      const RebuiltPart& part = notes.pieces.parts[i];
      const SequenceCall& of = call.calls[part.call];
      DeviceSequence& one = described[i];
      one = {};
      one.begin = part.begin;
      one.end = part.end;
      one.q_len = static_cast<int32_t>(of.q_len);
      one.first_row = static_cast<int32_t>(of.first_row);
      one.table_begin = static_cast<int32_t>(piece.first_page + part.first_page);
      one.table_len = static_cast<int32_t>(part.n_pages());
      one.evict_end = part.begin;
      one.n_after = of.length - part.end;
      const int64_t first = part.begin / RebuildLayout::kPageLen, position = of.sequence->position(part.begin) - part.begin;
      for (int64_t p = 0; p < part.n_pages(); ++p) {
        tables[one.table_begin + (first + p) % one.table_len] = (part.first_page + p) * layout.page_bytes;
        positions[one.table_begin + p] = position + (first + p) * RebuildLayout::kPageLen;
      }
    }
  notes.described = reinterpret_cast<const DeviceSequence*>(descriptors);
  notes.uploaded = upload;
  return static_cast<int64_t>(notes.pieces.parts.size() * sizeof(DeviceSequence)) + n_pages * 8;
}

// The store may grow meanwhile, so only the task's own view of the store is used.
Status RecomputeRoute::send(const RouteCall& call, const RebuiltPiece& piece) {
  const TraceRange range("load x", static_cast<int32_t>(call.layer_idx), "recompute");
  const Notes& notes = notes_of(call);
  const RebuildLayout& layout = layout_of(call);
  StreamBuffers& buffers = buffers_->x();
  CopyList copies;
  std::byte* const buffer = buffers.next();
  std::vector<const RebuiltPart*> parts;
  for (const RebuiltPart& part : notes.parts_of(piece)) parts.push_back(&part);
  std::sort(parts.begin(), parts.end(),
            [](const RebuiltPart* a, const RebuiltPart* b) { return a->first_page < b->first_page; });
  for (const RebuiltPart* part : parts) {
    std::byte* const first =
        buffer + (part->first_page * RebuildLayout::kPageLen + part->begin % RebuildLayout::kPageLen) * layout.x_bytes;
    RowCursor rows(call.cache.store().view(call.calls[part->call].sequence->pages, {}, call.task.bases),
                   static_cast<int32_t>(call.layer_idx), {}, {part->begin, part->end}, kHiddenPlane, RowOrder::kByRun);
    for (RowRun run; rows.next(&run);) copies.add(first + (run.token - part->begin) * layout.x_bytes, run);
  }
  if (call.layer.projection->rope != nullptr) {
    copies.cut();
    copies.add(buffer + layout.positions_at(), notes.positions(piece.first_page), piece.n_pages * 8);
  }
  TANDEM_TRY(buffers.send(copies.copies()));
  if (&piece != &notes.pieces.pieces.back()) return {};
  return buffers.mark(call.device.shared().flag_on_device(idx(), call.task.idx));
}

Status RecomputeRoute::begin(const RouteCall& call) {
  const RebuiltPieces& pieces = notes_of(call).pieces;
  const size_t n = std::min(pieces.pieces.size(), static_cast<size_t>(RebuildBuffers::kBuffers));
  for (size_t i = 0; i < n; ++i) TANDEM_TRY(send(call, pieces.pieces[i]));
  return {};
}

// Makes the weights readable that the model does not have (tandem_session_use_weights). Both lanes of the buffers use them
// from here to close().
Status RecomputeRoute::open(const RouteCall& call) {
  Notes& notes = notes_of(call);
  notes.projection = *projections_[call.layer_idx];
  notes.weights.emplace(buffers_->first_stream());
  TANDEM_TRY(weights_->use(call.layer_idx, &*notes.weights, &notes.projection));
  return notes.weights->any() ? buffers_->fork() : Status();
}

Status RecomputeRoute::close(const RouteCall& call) {
  std::optional<WeightsInUse>& weights = notes_of(call).weights;
  if (weights->any()) TANDEM_TRY(buffers_->join());
  TANDEM_TRY(weights->done());
  weights.reset();
  return {};
}

// Rebuilds the next piece on the stream of its lane (lib/pieces/rebuilt_pieces.h). The caller's stream waits until the
// piece's pages are made.
Status RecomputeRoute::rebuild(const RouteCall& call, const RebuiltPiece& piece) {
  const RebuildLayout& layout = layout_of(call);
  const TraceRange range("rebuild", static_cast<int32_t>(call.layer_idx), "recompute");
  std::byte* x = nullptr;
  TANDEM_TRY(buffers_->x().take(buffers_->stream(), &x));
  DeviceRebuild rebuild = buffers_->call_of(call.layer, layout, notes_of(call).projection);
  rebuild.x = x;
  rebuild.n_rows = piece.n_pages * RebuildLayout::kPageLen;
  if (call.layer.projection->rope != nullptr)
    rebuild.page_positions = reinterpret_cast<const int64_t*>(x + layout.positions_at());
  rebuild.read = buffers_->x().done_event();
  rebuild.writable = buffers_->pages_freed();
  TANDEM_TRY(call_device(device_, &DeviceTable::rebuild, &rebuild, buffers_->stream()));
  buffers_->x().done_by_event();
  return buffers_->hand_pages(call.stream);
}

Status RecomputeRoute::attend_pages(const RouteCall& call, const DeviceAttend& window, const RebuiltPiece& piece,
                                    const HeadStates& to) {
  const Notes& notes = notes_of(call);
  Layer layer = *window.layer;
  layer.sinks = nullptr;
  DeviceAttend attend = window;
  attend.layer = &layer;
  attend.pages = layout_of(call).pages(buffers_->pages(), RebuildLayout::kPageLen);
  attend.sequences.sequences = notes.described + piece.first_part;
  attend.sequences.page_tables = notes.page_tables();
  attend.sequences.n_sequences = static_cast<int32_t>(piece.n_parts);
  attend.sequences.max_keys = 0;
  for (const RebuiltPart& part : notes.parts_of(piece))
    attend.sequences.max_keys = std::max(attend.sequences.max_keys, part.end - part.begin);
  point_states(to, &attend);
  TANDEM_TRY(call_device(device_, &DeviceTable::attend, &attend, call.stream));
  return buffers_->take_pages_back(call.stream);
}

Status RecomputeRoute::attend(const RouteCall& call, const DeviceAttend& window, size_t piece_idx, const HeadStates& to) {
  const std::vector<RebuiltPiece>& pieces = notes_of(call).pieces.pieces;
  TANDEM_TRY(rebuild(call, pieces[piece_idx]));
  const size_t next = piece_idx + static_cast<size_t>(RebuildBuffers::kBuffers);
  if (next < pieces.size()) TANDEM_TRY(send(call, pieces[next]));
  return attend_pages(call, window, pieces[piece_idx], to);
}

DeviceAccumulate RecomputeRoute::states_of(const RouteCall& call, size_t piece_idx) const {
  const Notes& notes = notes_of(call);
  const std::span<const RebuiltPart> parts = notes.parts_of(notes.pieces.pieces[piece_idx]);
  const SequenceCall& first = call.calls[parts.front().call];
  const SequenceCall& last = call.calls[parts.back().call];
  DeviceAccumulate states;
  states.first_row = static_cast<int32_t>(first.first_row);
  states.n_rows = static_cast<int32_t>(last.first_row + last.q_len - first.first_row);
  states.n_heads = call.layer.n_q_heads;
  return states;
}

void RecomputeRoute::wait_after_failure(const RouteCall& call) noexcept {
  buffers_->settle(call.stream);
  notes_of(call).weights.reset();
}

}  // namespace tandem
