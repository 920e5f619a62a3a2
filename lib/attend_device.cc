// SPDX-License-Identifier: MIT
// One attend call on device tensors. Appends of many tokens go in chunks, one ticket each (lib/device.h):
//
// clang-format off
//   enter      as for host tensors
//   reserve    memory of all kinds for the whole call
//   prepare    of a chunk: which keys, where they are; the task: what the host's part computes, where the new rows go
//   fill       what the window should have and has not, after appends on the host, forks, truncations: from the store
//   launch     append | post the task | attend to the window | to what comes over the bus (lib/routes/stream.cc) |
//              merge, where the host has a part | observe, where MAW are
//              kept (lib/observe_device.cc)
//   commit     lengths
// clang-format on
//
// Where a chunk fails, the call takes the earlier ones back. It returns when all is on its way, and waits for the device
// where memory has to grow, a window to be filled, or more tasks are under way than there is room for.
#include <algorithm>
#include <chrono>
#include <mutex>

#include "lib/attend_call.h"
#include "lib/device_session.h"
#include "lib/device_status.h"
#include "lib/placement.h"

namespace tandem {

DeviceRows rows_of(const TensorView& view) {
  const int64_t bytes = row_bytes(view.dtype, 1);
  return {view.data, view.dtype, 0, view.token_stride / bytes, view.head_stride / bytes};
}

TensorView from_row(const TensorView& view, int64_t row, int64_t n_rows) {
  TensorView part = view;
  part.data += row * view.token_stride;
  part.n_tokens = n_rows;
  return part;
}

namespace {

// Where keys are rotated, append() has left them rotated.
DeviceRows attended_q(const DeviceAppend& call) {
  const Layer& layer = *call.layer;
  if (!rotates_queries(layer)) return call.q;
  return {call.rotated_q, TANDEM_F32, 0, int64_t{layer.n_q_heads} * layer.k_head_dim, layer.k_head_dim};
}

Status check_rows(const TensorView* view, const char* name) {
  if (view == nullptr || is_tensor_float(view->dtype)) return {};
  const std::string field = std::string(name) + ".dtype";
  return fail(TANDEM_ERROR_UNSUPPORTED, field.c_str(), "%s = %d (%s): in device memory f32, f16 and bf16 are appended",
              field.c_str(), view->dtype, find_dtype(view->dtype)->name);
}

}  // namespace

Status AttendCall::check_device_call(bool* captures) const {
  Status fault = session_.device_ != nullptr ? session_.device_->hand_over().fault() : Status();
  if (!fault.ok()) {
    if (session_.plan_.is_open) return fault;
    std::unique_lock lock(cache_.mutex());
    return session_.meet_fault(args_.stream);
  }
  TANDEM_TRY(is_capturing(*cache_.engine().device(), args_.stream, captures));
  if (*captures && !session_.plan_.is_open)
    return fail(TANDEM_ERROR_INVALID_STATE, "stream",
                "stream = %p is being captured, and no step is open that was begun on a stream", args_.stream);
  if (args_.speculative) TANDEM_TRY(check_guess());
  TANDEM_TRY(check_rows(args_.k, "k"));
  return check_rows(args_.v, "v");
}

Status AttendCall::run_on_device() {
  bool captures = false;
  TANDEM_TRY(check_device_call(&captures));
  if (session_.plan_.is_open) return run_in_plan(captures);
  {
    const auto lock = cache_.lock_settled(&session_);
    if (session_.device_ == nullptr)
      TANDEM_TRY(DeviceSession::create(cache_, session_.policies_, session_.options_, &session_.device_));
    TANDEM_TRY(enter());
  }
  const AtEnd in_flight([this] {
    std::unique_lock lock(cache_.mutex());
    leave();
  });
  if (scratch_.calls.empty()) return {};
  int64_t most = 0;
  {
    std::unique_lock lock(cache_.mutex());
    TANDEM_TRY(reserve_on_device(&most));
  }
  Status status;
  try {
    if (args_.speculative) most = DeviceSession::kMostTokens;  // each query is a sequence of its own
    for (ChunkPlace place; status.ok() && place.call < scratch_.calls.size();) {
      const int64_t n = prefill_len(place);
      status = n > 0 ? run_prefill(n, &place) : run_chunk(most, &place);
    }
  } catch (...) {
    take_back();
    throw;
  }
  if (status.ok()) return status;
  take_back();
  // A fault that this call tells of is not told again.
  HandOver& hand_over = session_.device_->hand_over();
  if (!hand_over.can_start_over() || status.code() != hand_over.fault().code()) return status;
  std::unique_lock lock(cache_.mutex());
  return session_.meet_fault(args_.stream);
}

// No layer has grown. What is under way may still write to the state.
void AttendCall::take_back() {
  if (args_.k == nullptr) return;
  std::unique_lock lock(cache_.mutex());
  session_.device_->hand_over().drain();
  for (const SequenceCall& call : scratch_.calls) cache_.cut_layer(session_, *call.sequence, layer_idx_, call.first_query);
}

CutArgs::CutArgs(const AttendArgs& whole, int64_t first_row, int64_t n_rows) : args(whole) {
  args.q = from_row(whole.q, first_row, n_rows);
  args.o = from_row(whole.o, first_row, n_rows);
  if (whole.k != nullptr) k = from_row(*whole.k, first_row, n_rows), args.k = &k;
  if (whole.v != nullptr) v = from_row(*whole.v, first_row, n_rows), args.v = &v;
  if (whole.x != nullptr) x = from_row(*whole.x, first_row, n_rows), args.x = &x;
  if (args.lse != nullptr) args.lse += first_row * args.lse_token_stride;
}

// Without what follows from windows.
CallShape AttendCall::make_shape() {
  scratch_.shapes.assign(scratch_.calls.size(), {});
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    const SequenceCall& call = scratch_.calls[i];
    scratch_.shapes[i].q_len = call.q_len;
    scratch_.shapes[i].length = call.length;
    scratch_.shapes[i].has_gaps = !call.sequence->positions.empty();
  }
  CallShape shape{&layer_, layer_idx_, scratch_.shapes};
  shape.appends = args_.k != nullptr;
  shape.is_speculative = args_.speculative;
  // What graphs hold does not grow any more: steps larger than that are refused.
  shape.has_room_to_step = !session_.device_->is_frozen();
  return shape;
}

// most: queries of a sequence in one chunk.
Status AttendCall::reserve_on_device(int64_t* most) {
  DeviceSession& device = *session_.device_;
  CallShape shape = make_shape();
  TANDEM_TRY(device.most_queries(layer_idx_, session_.terms().wanted_queries(shape), most));
  shape.most_queries = *most;
  for (size_t i = 0; i < scratch_.calls.size(); ++i) {
    SequenceCall& call = scratch_.calls[i];
    SequenceShape& sized = scratch_.shapes[i];
    Sequence& sequence = *call.sequence;
    if (args_.k != nullptr) TANDEM_TRY(cache_.ensure(sequence, std::max(sequence.longest(), call.length), "q_lens"));
    if (args_.parent_idx == nullptr)
      cache_.extend_positions(sequence, call.length);
    else
      sequence.parents.reserve(static_cast<size_t>(call.q_len));
    TANDEM_TRY(session_.reserve_window(sequence, *most, &sized.window_pages));
    SequenceState& state = *session_.state(sequence.id);
    call.state = &state.layers[layer_idx_];
    call.window = &state.window;
    TANDEM_TRY(flush_host_appends(call));
    sized.window_begin = call.state->window_begin;
    if (layer_.sliding_window > 0)
      sized.first_seen = cache_.first_within(sequence, sequence.position(call.first_query), layer_.sliding_window);
  }
  TANDEM_TRY(take_routes(shape));
  if (taken_.streams) {
    Status status;
    do {
      TANDEM_TRY(take_prefill(shape));
      status = device.hold(reserve_call(session_.terms(), shape, taken_), args_.stream);
    } while (!status.ok() && take_less_for_prefill(status));
    if (status.ok()) return {};
    TANDEM_TRY(give_streams_up(std::move(status)));
  }
  return device.hold(reserve_call(session_.terms(), shape, taken_), args_.stream);
}

// Where the sequences begin that are of the last one's kind: single queries, or appends. Kernels for several queries would
// take single ones as if they were several, so a call that has the single queries together goes in chunks of one kind.
size_t AttendCall::first_of_last_kind() const {
  size_t first = scratch_.calls.size() - 1;
  while (first > 0 && scratch_.calls[first - 1].is_append == scratch_.calls[first].is_append) --first;
  return first;
}

// The next rows of the caller's tensors, up to kMostTokens and `most` of a sequence.
Status AttendCall::run_chunk(int64_t most, ChunkPlace* place) {
  HandOver& hand_over = session_.device_->hand_over();
  HandOverTask& task = hand_over.next_task();
  TANDEM_TRY(hand_over.fault());  // its place may be free because what had it is lost: the device has yet to read its upload
  task.step = 0;
  std::vector<SequenceCall>& calls = task.scratch.calls;
  calls.clear();
  const int64_t first_row = scratch_.calls[place->call].first_row + place->query;
  const size_t last_kind = first_of_last_kind(), end = place->call < last_kind ? last_kind : scratch_.calls.size();
  int64_t n_rows = 0;
  while (place->call < end && n_rows < DeviceSession::kMostTokens) {
    const SequenceCall& whole = scratch_.calls[place->call];
    const int64_t first_query = whole.first_query + place->query;
    const int64_t n_left = std::min({whole.q_len - place->query, most, DeviceSession::kMostTokens - n_rows});
    // Kernels are told the position of the first.
    const int64_t n = layer_.rope != nullptr ? consecutive(whole.sequence->positions, first_query, n_left) : n_left;
    SequenceCall& part = calls.emplace_back(whole);
    part.q_len = n;
    part.first_row = n_rows;
    part.first_query = first_query;
    part.length = part.first_query + n;
    n_rows += n;
    place->query += n;
    if (place->query < whole.q_len) break;
    ++place->call;
    place->query = 0;
  }
  const CutArgs cut(args_, first_row, n_rows);
  AttendCall chunk(session_, cut.args, task.scratch);
  if (!session_.refuses_streams_) chunk.taken_ = taken_;  // a chunk before it may have found that memory cannot be pinned
  chunk.taken_.prefill = {};
  return chunk.attend_chunk(&task);
}

Status AttendCall::attend_chunk(HandOverTask* task) {
  {
    std::unique_lock lock(cache_.mutex());
    prepare_chunk(task);
  }
  {
    std::shared_lock lock(cache_.mutex());
    for (const SequenceCall& call : scratch_.calls) TANDEM_TRY(fill_window(call));
    wait_for_streamed_rows();
  }
  DeviceSequences sequences;
  TANDEM_TRY(upload_descriptors(task, &sequences));
  const auto has_host = [](const SequenceCall& call) { return call.has_host; };
  bool is_launched = false;
  const AtEnd cut([&] {
    if (!is_launched && !task->pieces.empty()) session_.device_->stream()->settle(args_.stream);
    if (!is_launched && !task->rebuilt.empty()) session_.device_->rebuild()->settle(args_.stream);
    task->is_cut = !is_launched;
  });
  TANDEM_TRY(launch(sequences, std::any_of(scratch_.calls.begin(), scratch_.calls.end(), has_host), task));
  is_launched = true;
  std::unique_lock lock(cache_.mutex());
  TANDEM_TRY(session_.device_->hand_over().fault());  // what is lost is not committed
  commit_chunk();
  return {};
}

void AttendCall::commit_chunk() {
  for (SequenceCall& call : scratch_.calls) {
    if (args_.speculative) {
      keep_guess(call);
      continue;
    }
    call.window->extend(layer_idx_, std::max(call.resident_begin, call.kept_begin), call.length);
    if (args_.k != nullptr) cache_.set_length(*call.sequence, args_.layer_idx, call.length);
    settle(call);
    count_bytes(call);
    if (!policy_.keeps_maw) continue;
    call.window->set_maw(layer_idx_, call.window_begin);
    call.state->selection->committed(call, false);
  }
}

// Nothing to do but to meet a ticket of so many sequences.
void AttendCall::begin_task(HandOverTask* task) const {
  task->shape = {args_.layer_idx, static_cast<int32_t>(scratch_.calls.size()), 0, 0};
  task->header = reinterpret_cast<const SlotHeader*>(session_.device_->slot(task->ticket));
  task->scratch.host.begin(host_facts(), {session_.device_->slot(task->ticket), session_.device_->exchange(layer_idx_)});
  task->touched.clear();
  task->pieces.clear();
  task->rebuilt.clear();
  task->pieces_at = 0;
  task->streamed = task->sent_hidden = task->merged = nullptr;
  task->streamed_x_bytes = 0;
  task->part = {};
  task->is_cut = false;
}

void AttendCall::prepare_chunk(HandOverTask* task) {
  clear_scratch();
  begin_task(task);
  for (SequenceCall& call : scratch_.calls) {
    task->shape.n_tokens += static_cast<int32_t>(call.q_len);
    task->shape.max_q_len = std::max(task->shape.max_q_len, static_cast<int32_t>(call.q_len));
    evict_before(&call);
    if (policy_.keeps_maw && args_.k == nullptr) fade_newer(call);
    (void)set_visibility(call);  // fails when a call is cancelled, which one on a device cannot be
    choose_keys(call);
    choose_for_streaming_heads(call);
    call.cpu_begin = call.host_begin;
    call.gives_queries = policy_.keeps_maw && call.is_append;
    if (args_.speculative) leave_guess_to_host(&call);
  }
  choose_route(task);
  if (!task->pieces.empty()) task->layout = taken_.layout;
  point_visibility();
  scratch_.host.lay_out(scratch_.calls);
  for (const SequenceCall& call : scratch_.calls) {
    if (args_.k != nullptr) scratch_.host.add_rows(call);
    task->touched.push_back({call.sequence->id, args_.k != nullptr ? call.first_query : call.length, call.found_begin});
  }
  if (scratch_.host.selects()) prepare_selection();
}

// A session may find a sequence long: its window is not to hold all of it. The state follows when the call is committed.
void AttendCall::evict_before(SequenceCall* call) {
  call->found_begin = call->state->window_begin;
  call->window_begin = session_.evicted_to(*call->state, call->first_query);
  if (call->window_begin > call->found_begin && policy_.keeps_maw) session_.fetch_maw(*call->sequence);
}

// Rows that the window should have before the call's own.
Status AttendCall::fill_window(const SequenceCall& call) {
  const int64_t end = args_.k != nullptr ? call.first_query : call.length;
  const int64_t in_ring = std::min(call.length, prefill_pages_begin());  // what is written there meanwhile
  call.window->make_way(layer_idx_, args_.speculative ? end : in_ring);
  if (call.resident_begin < end) call.window->make_way_for_older(layer_idx_, call.resident_begin);
  TokenRange valid = call.window->valid(layer_idx_);
  if (valid.end <= call.resident_begin || valid.begin >= end) valid = {end, end};
  const TokenRange missing[] = {{call.resident_begin, std::min(valid.begin, end)}, {valid.end, end}};
  for (const TokenRange& range : missing) {
    if (range.begin >= range.end) continue;
    session_.device_->hand_over().drain();  // the store has the rows
    session_.fetch_maw(*call.sequence);
    TANDEM_TRY(copy_to_window(call, range));
  }
  return policy_.keeps_maw && !args_.speculative ? give_maw(call) : Status();
}

// Of each head and plane, pages side by side in an extent of the store and in the ring are one copy.
Status AttendCall::copy_to_window(const SequenceCall& call, TokenRange range) {
  const WindowGeometry::LayerPlanes& planes = session_.device_->geometry().layers[layer_idx_];
  const int64_t page_bytes = session_.device_->geometry().page_bytes;
  const PlaneSet unrotated =
      layer_.rope != nullptr ? kHeadPlanes & ~PlaneSet{1 << kPlaneK | 1 << kPlaneKScales} : kHeadPlanes;
  for (int64_t t = range.begin, end = 0; layer_.rope != nullptr && t < range.end; t = end) {
    end = std::min(t - t % kDevicePageLen + kDevicePageLen, range.end);
    TANDEM_TRY(copy_rotated(call, {t, end}));
  }
  session_.sums_.filled_kv_bytes += (range.end - range.begin) * layer_.n_kv_heads * planes.row_bytes.total();
  CopyList copies;
  RowCursor rows(cache_.view(*call.sequence), args_.layer_idx, {0, layer_.n_kv_heads}, range, unrotated, RowOrder::kByHead);
  rows.stop_at_multiples(kDevicePageLen);
  int64_t before = 0;
  for (RowRun run; rows.next(&run);) {
    const int64_t page = call.window->page_of(run.token);
    if (run.token == range.begin || (page != before && page != before + page_bytes)) copies.cut();
    before = page;
    copies.add(planes.row(reinterpret_cast<std::byte*>(page), run.plane, run.head, run.token % kDevicePageLen), run);
  }
  for (const StridedCopy& copy : copies.copies())
    TANDEM_TRY(call_device(session_.device_->device(), &DeviceTable::copy_strided, &copy, args_.stream));
  return {};
}

// What the kernels read of each sequence: here for the copy to a place there.
void AttendCall::describe_sequences(DeviceSequence* to, int64_t* tables, int64_t* n_entries) const {
  for (const SequenceCall& call : scratch_.calls) {
    *to = {};
    to->begin = call.resident_begin;
    to->end = call.length;
    to->q_len = static_cast<int32_t>(call.q_len);
    to->first_row = static_cast<int32_t>(call.first_row);
    to->table_begin = static_cast<int32_t>(*n_entries);
    to->table_len = static_cast<int32_t>(call.window->n_pages());
    to->has_host_part = call.has_cpu_part() || call.only_counts ? 1 : 0;
    to->evict_end = std::max(call.evict_end, call.resident_begin);
    to->first_evicted = static_cast<int32_t>(call.first_evicted);
    to->wants_lse = policy_.keeps_maw && (args_.speculative || call.counts_on_host()) ? 1 : 0;
    to->position = call.sequence->position(call.first_query);
    for (const int64_t page : call.window->table()) tables[(*n_entries)++] = session_.device_->page_offset(page);
    ++to;
  }
}

Status AttendCall::upload_descriptors(HandOverTask* task, DeviceSequences* sequences) {
  DeviceSession& device = *session_.device_;
  std::byte* upload = device.upload(task->idx);
  const size_t n_described = scratch_.calls.size() * static_cast<size_t>(session_.terms().n_described()) +
                             (args_.speculative ? static_cast<size_t>(args_.q.n_tokens) : 0);
  const auto sequence_bytes = static_cast<int64_t>(n_described * sizeof(DeviceSequence));
  int64_t n_entries = 0;
  describe_sequences(reinterpret_cast<DeviceSequence*>(upload), reinterpret_cast<int64_t*>(upload + sequence_bytes),
                     &n_entries);
  sequences->n_sequences = static_cast<int32_t>(scratch_.calls.size());
  sequences->sequences = reinterpret_cast<const DeviceSequence*>(device.descriptors());
  if (heads_ != nullptr) {
    auto* const described = reinterpret_cast<DeviceSequence*>(upload);
    describe_streaming_heads(described, described + scratch_.calls.size());
    streaming_sequences_ = sequences->sequences + scratch_.calls.size();
  }
  sequences->page_tables = reinterpret_cast<const int64_t*>(device.descriptors() + sequence_bytes);
  sequences->max_q_len = task->shape.max_q_len;
  for (const SequenceCall& call : scratch_.calls)
    sequences->max_keys = std::max(sequences->max_keys, call.length - call.resident_begin);
  int64_t bytes = sequence_bytes + n_entries * static_cast<int64_t>(sizeof(int64_t));
  if (args_.speculative) bytes = describe_guess(upload, bytes, *sequences);
  if (!task->pieces.empty()) {
    task->pieces_at = bytes;
    auto* pieces = reinterpret_cast<DeviceSequence*>(upload + bytes);
    describe_pieces(*task, pieces, reinterpret_cast<int64_t*>(pieces + task->pieces.size()));
    bytes += static_cast<int64_t>(task->pieces.size() * sizeof(DeviceSequence)) +
             task->layout.n_pages * static_cast<int64_t>(sizeof(int64_t));
  }
  if (!task->rebuilt.empty()) {
    task->rebuilt_at = bytes;
    bytes += describe_rebuilt(*task, upload + bytes);
  }
  return call_device(device.device(), &DeviceTable::copy, device.descriptors(), upload, bytes, args_.stream);
}

// task: waits for the ticket. Null in a planned step, which has posted all of its own.
Status AttendCall::launch(const DeviceSequences& sequences, bool merges, HandOverTask* task) {
  DeviceSession& device = *session_.device_;
  const Layer& layer = device.layer(layer_idx_, sequences.max_q_len > 1);
  const auto n_tokens = static_cast<int32_t>(args_.q.n_tokens);
  const DeviceAppend append{&layer,
                            device.pages(layer_idx_),
                            sequences,
                            rows_of(args_.q),
                            args_.k ? rows_of(*args_.k) : DeviceRows(),
                            args_.v ? rows_of(*args_.v) : DeviceRows(),
                            n_tokens,
                            TicketShape{args_.layer_idx, 0, n_tokens, sequences.max_q_len}.tag(),
                            device.exchange(layer_idx_),
                            device.rope(layer_idx_),
                            rotates_queries(layer) ? device.rotated_q() : nullptr,
                            guess_.positions,
                            args_.x ? rows_of(*args_.x) : DeviceRows()};
  if (task != nullptr) task->asked = std::chrono::steady_clock::now();
  if (task != nullptr) TANDEM_TRY(begin_rebuilt(task));
  if (task != nullptr) TANDEM_TRY(begin_stream(task));
  TANDEM_TRY(ask_device("append", &DeviceTable::append, &append));
  if (task != nullptr)
    device.hand_over().post();
  else
    session_.plan_.n_appended = args_.layer_idx + 1;
  DeviceAttend attend;
  attend.layer = args_.speculative ? &device.layer(layer_idx_, false) : &layer;
  attend.pages = append.pages;
  attend.sequences = args_.speculative ? guess_.queries : sequences;
  attend.q = attended_q(append);
  attend.workspace = device.workspace();
  if (merges || policy_.keeps_maw) {
    attend.o = {device.o(), TANDEM_F32, 0, int64_t{layer.n_q_heads} * layer.v_head_dim, layer.v_head_dim};
    attend.lse = device.lse();
    attend.lse_token_stride = layer.n_q_heads;
    attend.lse_head_stride = 1;
    TANDEM_TRY(attend_window(attend, false));
    if (task != nullptr) TANDEM_TRY(attend_moved(attend, *task));
    TANDEM_TRY(merge_and_observe(append));
    return task != nullptr && task->merged != nullptr ? device.mark_merged(task->idx, args_.stream) : Status();
  }
  attend.o = rows_of(args_.o);
  attend.lse = args_.lse;
  attend.lse_token_stride = args_.lse_token_stride;
  attend.lse_head_stride = args_.lse_head_stride;
  attend.sinks = device.sinks(layer_idx_);
  return attend_window(attend, true);
}

Status AttendCall::merge_and_observe(const DeviceAppend& append) {
  DeviceSession& device = *session_.device_;
  DeviceMerge merge;
  merge.layer = append.layer;
  merge.sequences = append.sequences;
  merge.n_tokens = append.n_tokens;
  merge.is_observed = policy_.keeps_maw;
  merge.o = device.o();
  merge.lse = device.lse();
  merge.o_out = rows_of(args_.o);
  merge.lse_out = args_.lse;
  merge.lse_token_stride = args_.lse_token_stride;
  merge.lse_head_stride = args_.lse_head_stride;
  merge.sinks = device.sinks(layer_idx_);
  merge.exchange = append.exchange;
  TANDEM_TRY(ask_device("merge", &DeviceTable::merge, &merge));
  return policy_.keeps_maw ? observe(append, device.lse()) : Status();
}

// lse: of the call's rows, [n_tokens, n_q_heads].
Status AttendCall::observe(const DeviceAppend& append, const float* lse) {
  DeviceObserve observe;
  observe.layer = append.layer;
  observe.pages = append.pages;
  observe.sequences = append.sequences;
  observe.q = attended_q(append);
  observe.lse = lse;
  observe.n_tokens = append.n_tokens;
  observe.has_appended = append.k.data != nullptr;
  observe.alpha = session_.options_.alpha;
  observe.n_counted = static_cast<int32_t>(counted_queries(observe.alpha));
  observe.exchange = append.exchange;
  if (args_.speculative) {  // nobody's, for now: the lse are handed over
    observe.sequences.n_sequences = 0;
    observe.sequences.max_keys = 0;
    observe.has_appended = 0;
  }
  return ask_device("observe", &DeviceTable::observe, &observe);
}

}  // namespace tandem
