// SPDX-License-Identifier: MIT
#include "lib/routes/recompute.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "lib/attend_call.h"
#include "lib/device_projections.h"
#include "lib/device_status.h"

namespace tandem {
namespace {

Status check_rebuilt(const Layer& layer, size_t l) {
  const char* why = nullptr;
  if (layer.projection == nullptr)
    why = "has no projection (tandem_layer_options)";
  else if (layer.x_type == 0)
    why = "has no hidden states in the cache (x_type = 0 of tandem_cache_options)";
  else if (layer.rope != nullptr)
    why = "has keys that the library rotates, which the store has as they were before";
  else if (layer.k_rotation != TANDEM_ROTATION_NONE)
    why = "has keys that are rotated as they are stored (k_rotation)";
  if (why == nullptr) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"recompute\": layer %zu %s", l, why);
}

// Pages of the last piece there is, at most.
int64_t most_pages(const RebuildLayout& layout, const RebuiltPieces& pieces) {
  if (pieces.planned_pages == 0) return layout.n_pages;
  const int64_t few = layout.few_pages(), left = pieces.planned_pages - pieces.pieces.back().first_page;
  if (pieces.pieces.size() == 1 || left <= few) return few;
  return std::min(left - few, layout.n_pages);
}

// In device memory, once for all sessions of the cache.
Status projection_of(Cache& cache, const Layer& layer, const DeviceProjection** projection) {
  std::shared_ptr<ProjectionsOnDevice>& all = cache.projections();
  if (all == nullptr) all = std::make_shared<ProjectionsOnDevice>();
  return all->get(*cache.engine().device(), cache.device_tier(), layer, projection);
}

}  // namespace

Status make_rebuild_layouts(const std::vector<Layer>& layers, int64_t buffer_bytes, std::vector<RebuildLayout>* layouts) {
  for (size_t l = 0; l < layers.size(); ++l) {
    TANDEM_TRY(check_rebuilt(layers[l], l));
    RebuildLayout made;
    made.x_bytes = layers[l].x_bytes();
    // As many as in 16 bits, whatever they are kept in: K, V and sums of a piece take several times its memory.
    const int64_t least_bytes = RebuildLayout::kPageLen * 2 * layers[l].hidden_dim();
    made.n_pages = std::min(buffer_bytes / least_bytes, RebuildLayout::kMostPages);
    if (made.n_pages == 0)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes",
                  "stream_buffer_bytes = %lld is less than the %lld bytes of %d hidden states in 16 bits",
                  static_cast<long long>(buffer_bytes), static_cast<long long>(least_bytes), RebuildLayout::kPageLen);
    made.page_bytes = made.lay_out(layers[l], layers[l].n_kv_heads, RebuildLayout::kPageLen);
    layouts->push_back(made);
  }
  return {};
}

bool is_rebuild_less(const Layer& layer) { return layer.x_type != 0 && layer.x_bytes() < token_kv_bytes(layer); }

Status find_rebuild_layouts(const Device& device, const std::vector<Layer>& layers, const LayerPolicies& policies,
                            const RouteOptions& routes, bool has_streaming_heads, std::vector<RebuildLayout>* layouts) {
  const bool is_asked = routes.route == Route::kRecompute;
  if (has_streaming_heads && is_asked)
    return fail(TANDEM_ERROR_UNSUPPORTED, "streaming_heads",
                "streaming_heads with route \"recompute\": all heads of a layer are made at once");
  if (has_streaming_heads) return {};
  if (!is_asked && (routes.route != Route::kAuto || policies.any([](const Policy& policy) {
        return !can_stream(policy, false);
      }) || !std::any_of(layers.begin(), layers.end(), is_rebuild_less)))
    return {};
  Status status = make_rebuild_layouts(layers, routes.buffer_bytes, layouts);
  for (size_t l = 0; l < layers.size() && status.ok(); ++l)
    status = call_device(device, &DeviceTable::supports_rebuild, &layers[l]);
  if (status.ok()) return {};
  layouts->clear();
  if (is_asked) return status;
  return {};
}

int64_t rebuilt_tokens(int64_t wanted, int64_t begin, int64_t end) {
  if (wanted <= 0) return 0;
  if (wanted >= end - begin) return end - begin;
  const int64_t page_end =
      (begin + wanted + RebuildLayout::kPageLen - 1) / RebuildLayout::kPageLen * RebuildLayout::kPageLen;
  return std::min(page_end, end) - begin;
}

// Any share of a call's keys may be all of a sequence's, and either end may lie within a page.
void RebuiltCount::add(int64_t n_tokens, int64_t n_runs) {
  if (n_tokens == 0) return;
  n_pages += n_tokens / RebuildLayout::kPageLen + 2 + n_runs;
  n_parts += n_runs;
}

void add_rebuilt(const RebuildLayout& layout, size_t call, TokenRange tokens, bool continues, RebuiltPieces* pieces) {
  for (int64_t t = tokens.begin; t < tokens.end; continues = false) {
    if (!continues || pieces->empty() || pieces->pieces.back().n_pages >= most_pages(layout, *pieces))
      pieces->pieces.push_back({pieces->parts.size(), 0, 0, pieces->n_pages()});
    RebuiltPiece& piece = pieces->pieces.back();
    const int64_t room_end =
        (t / RebuildLayout::kPageLen + most_pages(layout, *pieces) - piece.n_pages) * RebuildLayout::kPageLen;
    pieces->parts.push_back({call, t, std::min(tokens.end, room_end), piece.n_pages});
    piece.n_pages += pieces->parts.back().n_pages();
    ++piece.n_parts;
    t = pieces->parts.back().end;
  }
}

// How many of these tokens, from the first on, one piece may have: keys that are rotated have positions.
int64_t AttendCall::follow_positions(const Sequence& sequence, TokenRange tokens) const {
  const int64_t n = tokens.end - tokens.begin;
  return layer_.projection->rope != nullptr ? consecutive(sequence.positions, tokens.begin, n) : n;
}

// Descriptors and page tables of all parts, and positions of pages. Memory is for what the last chunk of a call may find
// outside its windows.
void reserve_rebuilt(const SizeTerms& terms, const CallShape& shape, Reservation* needs) {
  RebuiltCount count;
  for (const SequenceShape& sequence : shape.sequences) {
    const TokenRange tokens = terms.streamed(shape, sequence);
    count.add(tokens.end - tokens.begin, sequence.n_runs);
  }
  needs->add_descriptors(count.all_parts(terms.rebuilt[shape.layer_idx]), 2 * count.n_pages);
  needs->has_part_states = 1;
}

// Weights and buffers. With "auto" only where the plan has anything to rebuild.
Status AttendCall::take_rebuilds(const CallShape& shape) {
  const bool is_auto = session_.routes_.route == Route::kAuto;
  taken_.rebuilds = false;
  if (session_.rebuild_layouts_.empty() || (is_auto && scratch_.plan.n_rebuilt() == 0)) return {};
  TANDEM_TRY(session_.check_weights(layer_idx_));
  Status status = projection_of(cache_, layer_, &taken_.projection);
  if (status.ok()) status = session_.device_->reserve_rebuild(cache_.layers(), session_.rebuild_layouts_);
  if (!status.ok()) return session_.give_rebuilds_up(std::move(status));
  taken_.rebuilds = true;
  const SizeTerms terms = session_.terms();
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    const TokenRange tokens = terms.streamed(shape, scratch_.shapes[i]);
    int64_t& n_runs = scratch_.shapes[i].n_runs = 0;
    for (int64_t t = tokens.begin; t < tokens.end; ++n_runs)
      t += follow_positions(*scratch_.calls[i].sequence, {t, tokens.end});
  }
  return {};
}

// Memory that "auto" cannot have leaves it with K and V.
Status Session::give_rebuilds_up(Status status) {
  if (routes_.route != Route::kAuto || !is_for_lack_of_memory(status)) return status;
  rebuild_layouts_.clear();
  cache_->engine().log(TANDEM_LOG_WARNING, "no keys are made of hidden states, as there is no memory for that: %s",
                       status.info().message.c_str());
  return {};
}

// Where it could be less than sending K and V, it is measured what making them takes: once in an engine for a shape. The
// cache's mutex is held exclusively.
Status Session::try_rebuild(size_t layer_idx) {
  const Layer& layer = cache_->layers()[layer_idx];
  Profile& profile = cache_->engine().profile();
  const bool is_asked = routes_.route == Route::kRecompute;
  if (rebuild_layouts_.empty() || (!is_asked && !may_gain(layer_idx))) return {};
  TANDEM_TRY(check_weights(layer_idx));
  if (profile.knows_rebuild(layer)) return {};
  if (device_ != nullptr) device_->hand_over().drain();
  const Device& device = *cache_->engine().device();
  const auto measure = [&]() -> Status {
    const DeviceProjection* projection = nullptr;
    std::unique_ptr<RebuildBuffers> buffers;
    double ns = 0.0;
    TANDEM_TRY(projection_of(*cache_, layer, &projection));
    TANDEM_TRY(RebuildBuffers::create(device, cache_->device_tier(), cache_->layers(), rebuild_layouts_, &buffers));
    DeviceProjection with_weights = *projection;
    WeightsInUse weights(nullptr);
    TANDEM_TRY(use_weights(layer_idx, &weights, &with_weights));
    TANDEM_TRY(call_device(device, &DeviceTable::wait, static_cast<void*>(nullptr)));  // they are there, for all streams
    TANDEM_TRY(buffers->measure(layer, rebuild_layouts_[layer_idx], with_weights, &ns));
    TANDEM_TRY(weights.done());
    profile.note_rebuild_trial(layer, ns);
    return {};
  };
  if (Status status = measure(); !status.ok()) return give_rebuilds_up(std::move(status));
  return {};
}

// Of the call at hand, or of one that is planned.
RebuildTerms Session::rebuild_terms(size_t layer_idx, bool may) const {
  if (!may || rebuild_layouts_.empty()) return {};
  const bool is_asked = routes_.route == Route::kRecompute;
  const RebuildLayout& layout = rebuild_layouts_[layer_idx];
  return {is_asked || may_gain(layer_idx), is_asked ? routes_.rebuilt_share : 0.0,
          layout.few_pages() * RebuildLayout::kPageLen, RebuildBuffers::kBuffers * layout.n_rows()};
}

// By the bus having less to carry. What has no weights yet is not rebuilt by a planner.
bool Session::may_gain(size_t layer_idx) const {
  return is_rebuild_less(cache_->layers()[layer_idx]) && check_weights(layer_idx).ok();
}

// W_K and W_V that the model has not got, as blocks that cross the bus.
Status Session::set_weights(size_t layer_idx, const ProjectionBlocks& blocks) {
  const Layer& layer = cache_->layers()[layer_idx];
  const Projection* const projection = layer.projection;
  const auto l = static_cast<int32_t>(layer_idx);
  if (projection == nullptr || projection->w_k != nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "layer_idx", "layer_idx = %d: the layer has %s", l,
                projection == nullptr ? "no projection" : "a projection with weights of its own");
  if (blocks.weights->engine() != &cache_->engine())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "weights", "weights: they are of another engine than the session");
  const int64_t row_bytes = int64_t{layer.n_kv_heads} * projection->hidden_dim * 2;
  const std::tuple<const char*, int32_t, int64_t> wanted[] = {{"w_k_block", blocks.w_k, row_bytes * layer.k_head_dim},
                                                              {"w_v_block", blocks.w_v, row_bytes * layer.v_head_dim}};
  for (const auto& [name, block, bytes] : wanted) {
    if (block < 0 || block >= blocks.weights->n_blocks())
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, name, "%s = %d is not in [0, %d]", name, block,
                  blocks.weights->n_blocks() - 1);
    if (blocks.weights->bytes_of(block) != bytes)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, name, "%s = %d has %lld bytes, layer %d's projection takes %lld", name,
                  block, static_cast<long long>(blocks.weights->bytes_of(block)), l, static_cast<long long>(bytes));
  }
  blocks_.resize(cache_->layers().size());
  blocks_[layer_idx] = blocks;
  return {};
}

Status Session::check_weights(size_t layer_idx) const {
  if (cache_->layers()[layer_idx].projection->w_k != nullptr) return {};
  if (layer_idx < blocks_.size() && blocks_[layer_idx].weights != nullptr) return {};
  return fail(
      TANDEM_ERROR_INVALID_STATE, "layer_idx",
      "layer_idx = %zu: its projection has no w_k and w_v, and tandem_session_use_weights() has not said where they are",
      layer_idx);
}

Status Session::use_weights(size_t layer_idx, WeightsInUse* weights, DeviceProjection* projection) const {
  if (cache_->layers()[layer_idx].projection->w_k != nullptr) return {};
  const ProjectionBlocks& blocks = blocks_[layer_idx];
  TANDEM_TRY(weights->use(blocks.weights, blocks.w_k, &projection->w_k));
  return weights->use(blocks.weights, blocks.w_v, &projection->w_v);
}

// Calls whose rows follow each other share pieces. A sequence whose positions have a gap goes on in the next piece.
void AttendCall::cut_rebuilt(const RebuildLayout& layout, size_t i, TokenRange tokens, RebuiltPieces* pieces) const {
  const SequenceCall& call = scratch_.calls[i];
  bool continues = false;
  if (!pieces->empty()) {
    const SequenceCall& before = scratch_.calls[pieces->parts.back().call];
    continues = pieces->parts.back().call != i && before.first_row + before.q_len == call.first_row;
  }
  for (int64_t t = tokens.begin; t < tokens.end; continues = false) {
    const int64_t n = follow_positions(*call.sequence, {t, tokens.end});
    add_rebuilt(layout, i, {t, t + n}, continues, pieces);
    t += n;
  }
}

// In each piece the parts' pages lie as those of the store do: what is there at one distance from each other is one copy.
void AttendCall::order_pages(RebuiltPieces* rebuilt) const {
  std::vector<RebuiltPart*> parts;
  const auto stored = [&](const RebuiltPart* part) {
    return scratch_.calls[part->call].sequence->pages[static_cast<size_t>(part->begin / cache_.page_len())];
  };
  for (const RebuiltPiece& piece : rebuilt->pieces) {
    parts.clear();
    for (size_t i = piece.first_part; i < piece.first_part + piece.n_parts; ++i) parts.push_back(&rebuilt->parts[i]);
    std::sort(parts.begin(), parts.end(), [&](const RebuiltPart* a, const RebuiltPart* b) {
      return std::tuple(stored(a), a->first_page) < std::tuple(stored(b), b->first_page);
    });
    int64_t page = 0;
    for (RebuiltPart* part : parts) part->first_page = std::exchange(page, page + part->n_pages());
  }
}

// Of the keys outside the window: the pieces of those that are rebuilt; the others are streamed. Returns how many tokens
// are.
int64_t AttendCall::choose_rebuilt(HandOverTask* task) {
  int64_t n_tokens = 0;
  for (const SequenceCall& call : scratch_.calls)
    for (int64_t t = call.host_begin; taken_.rebuilds && call.has_host && t < call.rebuilt_end;) {
      const int64_t end = t + follow_positions(*call.sequence, {t, call.rebuilt_end});
      task->rebuilt.planned_pages += RebuiltPart{0, t, end, 0}.n_pages();
      t = end;
    }
  for (size_t i = 0; i < scratch_.calls.size() && taken_.rebuilds; ++i) {
    const SequenceCall& call = scratch_.calls[i];
    if (!call.has_host || call.rebuilt_end <= call.host_begin) continue;
    n_tokens += call.rebuilt_end - call.host_begin;
    cut_rebuilt(session_.rebuild_layouts_[layer_idx_], i, {call.host_begin, call.rebuilt_end}, &task->rebuilt);
  }
  if (task->rebuilt.empty()) return n_tokens;
  order_pages(&task->rebuilt);
  task->streamed_x_bytes = n_tokens * layer_.x_bytes();
  task->sent_hidden = session_.device_->sent_hidden(task->idx);
  task->merged = session_.device_->merged(task->idx);
  task->merged_mark = session_.device_->merged_mark(task->idx);
  for (uint8_t* flag : {task->sent_hidden, task->merged}) std::atomic_ref(*flag).store(0, std::memory_order_relaxed);
  return n_tokens;
}

// Behind what else is uploaded: descriptors of all parts and page tables, whose bytes are returned; then positions of pages,
// which go with the pieces.
int64_t AttendCall::describe_rebuilt(const HandOverTask& task, std::byte* to) const {
  const RebuildLayout& layout = session_.rebuild_layouts_[layer_idx_];
  const int64_t n_pages = task.rebuilt.n_pages();
  auto* const described = reinterpret_cast<DeviceSequence*>(to);
  auto* const tables = reinterpret_cast<int64_t*>(described + task.rebuilt.parts.size());
  int64_t* const positions = tables + n_pages;
  for (const RebuiltPiece& piece : task.rebuilt.pieces)
    for (size_t i = piece.first_part; i < piece.first_part + piece.n_parts; ++i) {
      const RebuiltPart& part = task.rebuilt.parts[i];
      const SequenceCall& call = scratch_.calls[part.call];
      DeviceSequence& one = described[i];
      one = {};
      one.begin = part.begin;
      one.end = part.end;
      one.q_len = static_cast<int32_t>(call.q_len);
      one.first_row = static_cast<int32_t>(call.first_row);
      one.table_begin = static_cast<int32_t>(piece.first_page + part.first_page);
      one.table_len = static_cast<int32_t>(part.n_pages());
      one.evict_end = part.begin;
      one.n_after = call.length - part.end;
      const int64_t first = part.begin / RebuildLayout::kPageLen,
                    position = call.sequence->position(part.begin) - part.begin;
      for (int64_t p = 0; p < part.n_pages(); ++p) {
        tables[one.table_begin + (first + p) % one.table_len] = (part.first_page + p) * layout.page_bytes;
        positions[one.table_begin + p] = position + (first + p) * RebuildLayout::kPageLen;
      }
    }
  return static_cast<int64_t>(task.rebuilt.parts.size() * sizeof(DeviceSequence)) + n_pages * 8;
}

// As for pieces of K and V, the store is asked for nothing but what the task has of it.
Status AttendCall::send_hidden(const HandOverTask& task, const RebuiltPiece& piece) {
  const TraceRange range("load x", args_.layer_idx, "recompute");
  const RebuildLayout& layout = session_.rebuild_layouts_[layer_idx_];
  StreamBuffers& buffers = session_.device_->rebuild()->x();
  CopyList copies;
  std::byte* const buffer = buffers.next();
  std::vector<const RebuiltPart*> parts;
  for (size_t i = piece.first_part; i < piece.first_part + piece.n_parts; ++i) parts.push_back(&task.rebuilt.parts[i]);
  std::sort(parts.begin(), parts.end(),
            [](const RebuiltPart* a, const RebuiltPart* b) { return a->first_page < b->first_page; });
  for (const RebuiltPart* part : parts) {
    std::byte* const first =
        buffer + (part->first_page * RebuildLayout::kPageLen + part->begin % RebuildLayout::kPageLen) * layout.x_bytes;
    const Sequence& sequence = *scratch_.calls[part->call].sequence;
    RowCursor rows(cache_.store().view(sequence.pages, {}, task.bases), args_.layer_idx, {}, {part->begin, part->end},
                   kHiddenPlane, RowOrder::kByRun);
    for (RowRun run; rows.next(&run);) copies.add(first + (run.token - part->begin) * layout.x_bytes, run);
  }
  if (layer_.projection->rope != nullptr) {
    const std::byte* const described = session_.device_->upload(task.idx) + task.rebuilt_at;
    const auto tables_at = static_cast<int64_t>(task.rebuilt.parts.size() * sizeof(DeviceSequence));
    copies.cut();
    copies.add(buffer + layout.positions_at(), described + tables_at + (task.rebuilt.n_pages() + piece.first_page) * 8,
               piece.n_pages * 8);
  }
  TANDEM_TRY(buffers.send(copies.copies()));
  if (&piece != &task.rebuilt.pieces.back()) return {};
  return buffers.mark(session_.device_->sent_hidden_on_device(task.idx));
}

Status AttendCall::begin_rebuilt(HandOverTask* task) {
  if (task->rebuilt.empty()) return {};
  const size_t n = std::min(task->rebuilt.pieces.size(), static_cast<size_t>(RebuildBuffers::kBuffers));
  for (size_t i = 0; i < n; ++i) TANDEM_TRY(send_hidden(*task, task->rebuilt.pieces[i]));
  return {};
}

// The next piece, on the stream of its lane; the caller's waits for it.
Status AttendCall::rebuild_piece(const DeviceProjection& projection, const RebuiltPiece& piece) {
  RebuildBuffers& buffers = *session_.device_->rebuild();
  const RebuildLayout& layout = session_.rebuild_layouts_[layer_idx_];
  const TraceRange range("rebuild", args_.layer_idx, "recompute");
  std::byte* x = nullptr;
  TANDEM_TRY(buffers.x().take(buffers.stream(), &x));
  DeviceRebuild rebuild = buffers.call_of(layer_, layout, projection);
  rebuild.x = x;
  rebuild.n_rows = piece.n_pages * RebuildLayout::kPageLen;
  if (layer_.projection->rope != nullptr)
    rebuild.page_positions = reinterpret_cast<const int64_t*>(x + layout.positions_at());
  rebuild.read = buffers.x().done_event();
  rebuild.writable = buffers.pages_freed();
  TANDEM_TRY(call_device(session_.device_->device(), &DeviceTable::rebuild, &rebuild, buffers.stream()));
  buffers.x().done_by_event();
  return buffers.hand_pages(args_.stream);
}

// window: as in attend_stream(), whose pieces come behind these.
Status AttendCall::attend_pages(const DeviceAttend& window, const HandOverTask& task, const RebuiltPiece& piece) {
  DeviceSession& device = *session_.device_;
  const auto* described = reinterpret_cast<const DeviceSequence*>(device.descriptors() + task.rebuilt_at);
  const auto* tables = reinterpret_cast<const int64_t*>(described + task.rebuilt.parts.size());
  Layer layer = *window.layer;
  layer.sinks = nullptr;
  DeviceAttend attend = window;
  attend.layer = &layer;
  attend.pages = session_.rebuild_layouts_[layer_idx_].pages(device.rebuild()->pages(), RebuildLayout::kPageLen);
  attend.sequences.sequences = described + piece.first_part;
  attend.sequences.page_tables = tables;
  attend.sequences.n_sequences = static_cast<int32_t>(piece.n_parts);
  attend.sequences.max_keys = 0;
  for (size_t i = piece.first_part; i < piece.first_part + piece.n_parts; ++i)
    attend.sequences.max_keys = std::max(attend.sequences.max_keys, task.rebuilt.parts[i].end - task.rebuilt.parts[i].begin);
  attend.o.data = device.part_o();
  attend.lse = device.part_lse();
  TANDEM_TRY(call_device(device.device(), &DeviceTable::attend, &attend, args_.stream));
  return device.rebuild()->take_pages_back(args_.stream);
}

// idx: of the task's rebuilt pieces.
Status AttendCall::attend_rebuilt(const DeviceAttend& window, const HandOverTask& task, const DeviceProjection& projection,
                                  size_t idx) {
  const RebuiltPiece& piece = task.rebuilt.pieces[idx];
  TANDEM_TRY(rebuild_piece(projection, piece));
  const size_t next = idx + static_cast<size_t>(RebuildBuffers::kBuffers);
  if (next < task.rebuilt.pieces.size()) TANDEM_TRY(send_hidden(task, task.rebuilt.pieces[next]));
  TANDEM_TRY(attend_pages(window, task, piece));
  const SequenceCall& first = scratch_.calls[task.rebuilt.parts[piece.first_part].call];
  const SequenceCall& last = scratch_.calls[task.rebuilt.parts[piece.first_part + piece.n_parts - 1].call];
  DeviceAccumulate sum;
  sum.layer = window.layer;
  sum.first_row = static_cast<int32_t>(first.first_row);
  sum.n_rows = static_cast<int32_t>(last.first_row + last.q_len - first.first_row);
  sum.n_heads = layer_.n_q_heads;
  return add_part(sum);
}

// Pieces of both kinds take turns, as many of each as there are: the engines that work on them end together.
Status AttendCall::attend_moved(const DeviceAttend& window, const HandOverTask& task) {
  const size_t n_rebuilt = task.rebuilt.pieces.size(), n_streamed = task.pieces.size();
  DeviceProjection projection;
  WeightsInUse weights(n_rebuilt > 0 ? session_.device_->rebuild()->first_stream() : nullptr);
  if (n_rebuilt > 0) {
    projection = *taken_.projection;
    TANDEM_TRY(session_.use_weights(layer_idx_, &weights, &projection));
  }
  const bool has_weights = weights.any();
  if (has_weights) TANDEM_TRY(session_.device_->rebuild()->fork());
  for (size_t r = 0, s = 0; r + s < n_rebuilt + n_streamed;)
    if (is_rebuilt_next(r, n_rebuilt, s, n_streamed))
      TANDEM_TRY(attend_rebuilt(window, task, projection, r++));
    else
      TANDEM_TRY(attend_streamed(window, task, s++));
  if (has_weights) TANDEM_TRY(session_.device_->rebuild()->join());
  return weights.done();
}

}  // namespace tandem
