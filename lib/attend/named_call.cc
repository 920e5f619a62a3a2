// SPDX-License-Identifier: MIT
#include "lib/attend/named_call.h"

#include <algorithm>
#include <utility>

#include "lib/machine/device_status.h"

namespace tandem {
namespace {

Status check_all(const Call& call, const NamedKeys& as_given) {
  for (const SequenceCall& of : call.calls())
    for (int64_t t = 0; t < of.q_len; t += kManyTokens) {
      TANDEM_TRY(call.args.watch.check());
      TANDEM_TRY(check_named(call.scratch.named, as_given, of.first_row + t, std::min(kManyTokens, of.q_len - t),
                             of.first_query + t));
    }
  return {};
}

// Copies the indices from the device to scratch.brought_idx, rows contiguous, in as few copies as the strides allow. Waits
// for the stream.
Status bring_indices(Call& call, const NamedKeys& named) {
  const Device& device = *call.cache().engine().device();
  const int64_t n_tokens = call.args.q.n_tokens, of_token = named.n_heads * named.n_idx;
  std::vector<int32_t>& brought = call.scratch.brought_idx;
  brought.resize(static_cast<size_t>(n_tokens * of_token));
  const bool has_dense_tokens = named.head_stride == named.n_idx || named.n_heads == 1;
  const bool is_dense = has_dense_tokens && named.token_stride == of_token;
  const int64_t n_copies = is_dense ? 1 : has_dense_tokens ? n_tokens : n_tokens * named.n_heads;
  const int64_t n_of_copy = std::ssize(brought) / std::max<int64_t>(1, n_copies);
  for (int64_t i = 0; i < n_copies && n_of_copy > 0; ++i) {
    const int64_t token = is_dense ? 0 : has_dense_tokens ? i : i / named.n_heads;
    const auto head = static_cast<int32_t>(has_dense_tokens ? 0 : i % named.n_heads);
    TANDEM_TRY(call_device(device, &DeviceTable::copy, brought.data() + i * n_of_copy, named.row(token, head).data(),
                           n_of_copy * static_cast<int64_t>(sizeof(int32_t)), call.args.stream));
  }
  return call_device(device, &DeviceTable::wait, call.args.stream);
}

}  // namespace

Status check_named_layer(const Call& call) {
  if (call.args.named == nullptr) return {};
  const Policy& policy = call.facts.policy;
  if (policy.host_keys(false) != HostKeys::kAll)
    return fail(TANDEM_ERROR_UNSUPPORTED, "selection",
                "selection with policy \"%s\" in layer %d: keys are named under \"all\"", policy.name, call.args.layer_idx);
  if (call.facts.heads != nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "selection", "selection in layer %d, which has streaming_heads",
                call.args.layer_idx);
  if (!call.args.on_device) return {};
  const NamedKeys& named = *call.args.named;
  if (named.n_idx << named.unit_shift > INT32_MAX)
    return fail(TANDEM_ERROR_UNSUPPORTED, "selection.idx.shape[2]",
                "selection.idx.shape[2] = %lld units of %d tokens: on device tensors 2^31 - 1 tokens at most",
                static_cast<long long>(named.n_idx), 1 << named.unit_shift);
  if (call.layer().group_size <= kMostListRows) return {};
  return fail(
      TANDEM_ERROR_UNSUPPORTED, "selection",
      "selection in layer %d, which has %d query heads to a KV head: on device tensors keys are named for %d at most",
      call.args.layer_idx, call.layer().group_size, kMostListRows);
}

namespace {

// Returns whether the call may have lists of tiles. The host makes them, for units of at least a tile, without sinks and
// newest keys.
bool may_have_tiles(const Call& call) {
  const NamedKeys& named = *call.args.named;
  if (!call.args.on_device || !call.appends() || call.args.speculative || named.plus_window) return false;
  if (int64_t{1} << named.unit_shift < kTileTokens || named.n_idx == 0) return false;
  return std::any_of(call.calls().begin(), call.calls().end(),
                     [](const SequenceCall& of) { return of.q_len > kMostTicketTokens; });
}

}  // namespace

Status take_named(Call& call) {
  const NamedKeys* const given = call.args.named;
  if (given == nullptr) return {};
  AttendScratch& scratch = call.scratch;
  scratch.named = *given;
  if (given->on_device && !given->any_order && !may_have_tiles(call)) return {};
  NamedKeys as_given = *given;
  if (given->on_device) {
    TANDEM_TRY(bring_indices(call, *given));
    as_given.idx = scratch.brought_idx.data();
    as_given.head_stride = given->n_idx;
    as_given.token_stride = given->n_heads * given->n_idx;
    as_given.on_device = false;
    scratch.named = as_given;
  }
  // A call on device tensors sends contiguous rows.
  if (call.args.on_device || given->any_order) copy_named(call.args.q.n_tokens, &scratch.named, &scratch.named_idx);
  return check_all(call, as_given);
}

namespace {

// Returns the most granules of a list: n_idx units of any length, and sinks, over a window of n_pages pages.
int64_t most_granules(int64_t n_idx, int64_t sink_len, int64_t n_pages) {
  constexpr int64_t kOfUnit = kMostUnitTokens / kGranuleKeys;
  return std::min(n_idx * kOfUnit + sink_len / kGranuleKeys + 2, n_pages * kDevicePageLen / kGranuleKeys + 1);
}

}  // namespace

void size_named(const Call& call, CallShape* shape) {
  const NamedKeys* const named = call.args.named;
  if (named == nullptr) return;
  constexpr int64_t kMostBytes = int64_t{32} << 20;  // limit for a chunk's lists and indices
  const SizeTerms terms = call.session.terms();
  shape->idx_heads = named->n_heads;
  shape->n_idx = named->n_idx;
  shape->idx_unit_shift = named->unit_shift;
  shape->may_be_long = may_have_tiles(call);
  shape->has_host_idx = !call.scratch.named.on_device;
  const int64_t n_pages = ring_pages(terms.options, terms.store.page_len, shape->most_queries);
  const int64_t of_list =
      most_granules(named->n_idx, terms.options.sink_len, n_pages) * static_cast<int64_t>(sizeof(KeyGranule)) +
      2 * named->n_idx * static_cast<int64_t>(sizeof(int32_t));
  if (call.args.speculative) return;  // never cut
  shape->most_tokens = std::clamp<int64_t>(kMostBytes / (of_list * named->n_heads), 1, kMostTicketTokens);
}

// Reserves memory for a call that names keys, and for the layer's calls in planned steps that may name keys.
void reserve_named(const SizeTerms& terms, const CallShape& shape, Reservation* needs) {
  const int64_t in_steps = terms.names_in_steps(shape.layer_idx) ? terms.options.selection_len : 0;
  if (shape.idx_heads == 0 && in_steps == 0) return;
  const int64_t n_kv_heads = shape.layer->n_kv_heads, n_rows = std::min(shape.n_tokens(), shape.most_tokens);
  const int64_t n_pages = ring_pages(terms.options, terms.store.page_len, shape.most_queries);
  const int64_t in_step = in_steps > 0 ? needs->step_sequences * n_kv_heads * in_steps : 0;
  needs->slot_idx = std::max(n_rows * shape.idx_heads * shape.n_idx, in_step);
  if (in_steps > 0) {
    needs->step_named = n_kv_heads;
    needs->step_granules = most_granules(in_steps, terms.options.sink_len, n_pages);
  }
  needs->n_lists = n_rows * shape.idx_heads;
  needs->n_granules = needs->n_lists * most_granules(shape.n_idx, terms.options.sink_len, n_pages);
  if (shape.idx_heads == 0) return;
  if (shape.has_host_idx) needs->sent_idx = n_rows * shape.idx_heads * shape.n_idx;
  if (shape.max_q_len() == 1) return;
  needs->add_descriptors(n_rows, 0);
  const int64_t n_queries = n_rows + static_cast<int64_t>(shape.sequences.size());
  needs->workspace_bytes = std::max(needs->workspace_bytes, workspace_bytes(*terms.device, *shape.layer, n_queries, 1));
}

Status check_named_in_step(const Call& call) {
  const NamedKeys* const named = call.args.named;
  if (named == nullptr) return {};
  if (!named->on_device)
    return fail(TANDEM_ERROR_UNSUPPORTED, "selection.idx.device_type",
                "selection.idx is in host memory, in a step that was begun on a stream: it would not be read in a replay");
  if (named->any_order)
    return fail(TANDEM_ERROR_UNSUPPORTED, "selection.flags",
                "selection.flags = TANDEM_SELECTION_ANY_ORDER in a step that was begun on a stream: indices ascend there");
  if (call.session.step.max_q_len > 1)
    return fail(TANDEM_ERROR_UNSUPPORTED, "selection",
                "selection in a step that was begun on a stream, with %lld queries of a sequence: it has one of each",
                static_cast<long long>(call.session.step.max_q_len));
  const int64_t most = call.session.options.selection_len;
  if (most > 0 && named->n_idx <= most) return {};
  return fail(TANDEM_ERROR_CAPACITY, "selection.idx.shape[2]",
              "selection.idx.shape[2] = %lld in a step that was begun on a stream: the session's selection_indices has room "
              "for %lld",
              static_cast<long long>(named->n_idx), static_cast<long long>(most));
}

DeviceIndices indices_of(const NamedKeys& named, int64_t first_row) {
  return {named.idx + first_row * named.token_stride,
          named.token_stride,
          named.head_stride,
          static_cast<int32_t>(named.n_idx),
          named.n_heads,
          named.unit_shift,
          named.plus_window ? 1 : 0};
}

Status send_indices(Call& chunk) {
  if (chunk.args.named == nullptr || !chunk.has_host_idx) return {};
  const int64_t bytes = chunk.args.q.n_tokens * chunk.indices.token_stride * static_cast<int64_t>(sizeof(int32_t));
  int32_t* const to = chunk.device().work().sent_idx();
  const int32_t* const from = std::exchange(chunk.indices.data, to);
  if (bytes == 0) return {};
  return call_device(chunk.device().device(), &DeviceTable::copy, to, from, bytes, chunk.args.stream);
}

Status name_keys(Call& call, const DeviceSequences& sequences) {
  if (call.args.named == nullptr) return {};
  const DeviceSession& device = call.device();
  if (call.queries.sequences == nullptr) call.queries = sequences;
  DeviceNamedKeys names;
  names.page_len = kDevicePageLen;
  names.layer_idx = call.args.layer_idx;
  names.first_row = call.first_row;
  names.sequences = call.queries;
  names.idx = call.indices;
  names.sink_len = call.layer().sliding_window > 0 ? 0 : call.session.options.sink_len;
  names.window_len = call.session.options.window_len;
  names.positions = call.positions;
  names.keys = device.work().list_keys();
  names.granules = device.work().granules();
  const int64_t n_lists = int64_t{names.sequences.n_sequences} * call.indices.n_heads;
  names.n_granules = static_cast<int32_t>(device.work().at.n_granules / std::max<int64_t>(1, n_lists));
  names.n_lists = static_cast<int32_t>(device.work().at.n_lists);
  const DeviceExchange exchange = device.exchange(call.facts.idx);
  names.flags = exchange.flags;
  names.state = exchange.state;
  call.lists = {names.keys, names.granules, call.indices.n_heads, call.indices.n_heads, 1, 1};
  return call_device(device.device(), &DeviceTable::name_keys, &names, call.args.stream);
}

}  // namespace tandem
