// SPDX-License-Identifier: MIT
#include "lib/attend/searched_keys.h"

#include <algorithm>
#include <cstring>

#include "lib/machine/device_status.h"
#include "lib/pieces/search_layout.h"

namespace tandem {
namespace {

// The lists of a layer that its last decode call has kept, among those of the sequence.
struct LastLists {
  int32_t place = -1;  // of the stage; -1: no stage was used
  int64_t chunk_len = 0, most_kept = 0, n_lists = 0;
  int64_t at = 0;  // bytes

  LastLists(const SessionCore& core, size_t layer_idx, int64_t named_end) {
    const PruningOfLayer& pruning = core.options.pruning.layers[layer_idx];
    DeviceSearch search;
    n_lists = n_key_lists(core.layers[layer_idx].layer, core.options.pruning);
    describe_record(pruning.decode, bounded_lengths(pruning), n_lists, &search);
    place = last_place(pruning.decode, named_end - 1);
    if (place < 0) return;
    const DeviceSearchStage& stage = search.stages[place];
    chunk_len = int64_t{1} << stage.chunk_shift;
    most_kept = stage.most_kept;
    at = core.device->geometry().layers[layer_idx].kept_at + stage.lists_at;
  }
  // Returns the chunks of a list; none if the search has not made the list under this mark.
  std::vector<int32_t> chunks(const std::vector<std::byte>& lists, int64_t list, uint32_t mark) const {
    KeptList head;
    const std::byte* const from = lists.data() + at + list * kept_list_bytes(most_kept);
    std::memcpy(&head, from, sizeof head);
    std::vector<int32_t> found(head.mark == mark ? static_cast<size_t>(std::min<int64_t>(head.n, most_kept)) : 0);
    if (!found.empty()) std::memcpy(found.data(), from + sizeof head, found.size() * sizeof(int32_t));
    return found;
  }
};

// Returns whether the window still has the lists of the layer's last query.
bool has_lists(const SequenceState& state, size_t layer_idx) {
  return state.layers[layer_idx].on_device == NamedOnDevice::kKept && state.window.kept_lists().bytes() > 0 &&
         state.window.kept_stages(layer_idx).mark == state.window.kept_mark(layer_idx);
}

Status read_lists(const SessionCore& core, const DeviceWindow& window, std::vector<std::byte>* lists) {
  lists->resize(static_cast<size_t>(window.kept_lists().bytes()));
  if (core.searches == nullptr) return {};
  const Device& device = core.device->device();
  TANDEM_TRY(call_device(device, &DeviceTable::copy, lists->data(), window.kept_lists().data(), std::ssize(*lists),
                         core.searches->get()));
  return call_device(device, &DeviceTable::wait, core.searches->get());
}

void put_all(int64_t begin, int64_t end, KeptKeys* kept) {
  for (int64_t t = begin; t < end; ++t) kept->put(t, 0.0f);
}

}  // namespace

int64_t most_searched(const PolicyOptions& options) {
  constexpr int64_t kMost = (int64_t{1} << 30) - 1;  // limit of device modules
  return std::min(options.window_len, kMost);
}

Status follow_searches(SessionCore& core, void* stream) {
  if (core.searches == nullptr) TANDEM_TRY(SideStream::create(core.device->device(), &core.searches));
  return core.searches->fork(stream);
}

int64_t count_searched_keys(const SessionCore& core, const SequenceState& state) {
  int64_t n = 0;
  std::vector<std::byte> lists;
  for (size_t l = 0; l < state.layers.size(); ++l) {
    if (!has_lists(state, l)) continue;
    if (lists.empty() && !read_lists(core, state.window, &lists).ok()) return 0;
    const LastLists last(core, l, state.layers[l].named_end);
    if (last.place < 0) continue;
    const int64_t n_heads_of_list = core.layers[l].layer.n_kv_heads / last.n_lists;
    for (int64_t i = 0; i < last.n_lists; ++i)
      n += n_heads_of_list * last.chunk_len * std::ssize(last.chunks(lists, i, state.window.kept_mark(l)));
  }
  return n;
}

uint64_t* pair_totals(const SessionCore& core, size_t layer_idx) {
  if (core.pair_totals.data() == nullptr || core.options.patterns[layer_idx].are_known_ahead()) return nullptr;
  return core.pair_totals.as<uint64_t>() + 2 * layer_idx;
}

std::vector<ListedPairs> read_listed_pairs(const SessionCore& core) {
  std::vector<ListedPairs> pairs(core.layers.size());
  const int64_t bytes = core.pair_totals.bytes();
  if (bytes == 0 || core.searches == nullptr) return pairs;
  static_assert(sizeof(ListedPairs) == 2 * sizeof(uint64_t));
  const Device& device = core.device->device();
  void* const stream = core.searches->get();
  if (!call_device(device, &DeviceTable::copy, pairs.data(), core.pair_totals.data(), bytes, stream).ok() ||
      !call_device(device, &DeviceTable::wait, stream).ok())
    pairs.assign(pairs.size(), {});
  return pairs;
}

Status list_searched_keys(const SessionCore& core, const HeadOfSequence& head, const SequenceState& state, KeptKeys* kept) {
  const auto l = static_cast<size_t>(head.layer_idx);
  const int64_t end = state.layers[l].named_end;
  if (state.layers[l].on_device == NamedOnDevice::kAll) {
    put_all(0, end, kept);
    return {};
  }
  if (!has_lists(state, l))
    return fail(
        TANDEM_ERROR_UNSUPPORTED, "sequence",
        "sequence = %lld: its last query in layer %d was on a device, in a call whose lists policy \"%s\" does not keep",
        static_cast<long long>(head.sequence), head.layer_idx, core.layers[l].policy.name);
  const LastLists last(core, l, end);
  if (last.place < 0) {
    put_all(0, end, kept);
    return {};
  }
  std::vector<std::byte> lists;
  TANDEM_TRY(read_lists(core, state.window, &lists));
  const PruningRecord& record = core.options.pruning.layers[l].decode;
  const int64_t window_begin = std::max<int64_t>(0, end - record.window_len);
  const int64_t sink_end = std::min(record.sink_len, window_begin);
  put_all(0, sink_end, kept);
  for (const int32_t chunk : last.chunks(lists, last.n_lists == 1 ? 0 : head.kv_head, state.window.kept_mark(l)))
    put_all(std::max(chunk * last.chunk_len, sink_end), std::min((chunk + 1) * last.chunk_len, window_begin), kept);
  put_all(window_begin, end, kept);
  return {};
}

}  // namespace tandem
