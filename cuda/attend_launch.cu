// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/attend_launch.h"
#include "cuda/layer_check.h"

namespace tandem::cuda {
namespace {

constexpr int64_t kAlign = 256;

bool is_decode(const Layer& layer, int32_t max_q_len) {
  return int64_t{max_q_len} * layer.group_size <= DecodeLauncher::kMostRows;
}

bool may_decode(const DeviceAttend& call) {
  return call.before_o == nullptr && call.tiles.lists == nullptr && is_decode(*call.layer, call.sequences.max_q_len);
}

int32_t refuse_lists(const DeviceAttend& call, DeviceError* error) {
  const DeviceLists& lists = call.lists;
  if (lists.keys == nullptr && lists.n_heads == 0 && lists.granules == nullptr && lists.has_granules == 0) return TANDEM_OK;
  if (lists.keys == nullptr || reinterpret_cast<uintptr_t>(lists.keys) % alignof(DeviceKeys) != 0)
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "lists", "lists.keys = %p with lists.n_heads = %d",
                static_cast<const void*>(lists.keys), lists.n_heads);
  if ((lists.has_granules & ~1) != 0 || (lists.are_written_by_kernels & ~1) != 0)
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "lists",
                "lists.has_granules = %d and lists.are_written_by_kernels = %d: each is 0 or 1", lists.has_granules,
                lists.are_written_by_kernels);
  if (lists.has_granules != 0 &&
      (lists.granules == nullptr || reinterpret_cast<uintptr_t>(lists.granules) % alignof(KeyGranule) != 0))
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "lists", "lists.granules = %p with lists.has_granules = 1",
                static_cast<const void*>(lists.granules));
  if (call.sequences.n_sequences > 1 && lists.per_sequence < lists.n_heads)
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "lists", "lists.per_sequence = %d is less than lists.n_heads = %d",
                lists.per_sequence, lists.n_heads);
  if (lists.n_heads != 1 && lists.n_heads != call.layer->n_kv_heads)
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "lists", "lists.n_heads = %d: 1 or the layer's %d KV heads",
                lists.n_heads, call.layer->n_kv_heads);
  return TANDEM_OK;
}

int32_t refuse_tiles(const DeviceAttend& call, DeviceError* error) {
  const DeviceTileLists& tiles = call.tiles;
  const auto refuse = [&](int32_t code, const char* field, int64_t value, const char* why) {
    return fail(error, code, 0, "tiles", "tiles.%s = %lld: %s", field, static_cast<long long>(value), why);
  };
  constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;
  const auto at = [](const auto* address) { return reinterpret_cast<intptr_t>(address); };
  if (tiles.lists == nullptr && tiles.keys == nullptr && tiles.n_heads == 0) return TANDEM_OK;
  if (tiles.lists == nullptr || at(tiles.lists) % alignof(DeviceTiles) != 0)
    return refuse(kInvalid, "lists", at(tiles.lists), "not the address of lists of tiles");
  if (tiles.keys == nullptr || at(tiles.keys) % sizeof(KeyTile) != 0)
    return refuse(kInvalid, "keys", at(tiles.keys), "not an address of tiles, a multiple of 16");
  if (call.lists.keys != nullptr) return refuse(kInvalid, "lists", at(tiles.lists), "the call has lists.keys as well");
  if (tiles.n_heads != 1 && tiles.n_heads != call.layer->n_kv_heads)
    return refuse(kInvalid, "n_heads", tiles.n_heads, "1 or the layer's KV heads");
  const int64_t n_lists = (int64_t{call.sequences.max_q_len} * call.layer->group_size + kTileRows - 1) / kTileRows;
  if (tiles.per_head < n_lists)
    return refuse(kInvalid, "per_head", tiles.per_head, "less than a list for every 128 rows of max_q_len * group_size");
  if (call.sequences.n_sequences > 1 && tiles.per_sequence < int64_t{tiles.n_heads} * tiles.per_head)
    return refuse(kInvalid, "per_sequence", tiles.per_sequence, "less than n_heads * per_head");
  if (tiles.most_tiles < 0) return refuse(kInvalid, "most_tiles", tiles.most_tiles, "negative");
  if (tiles.classes_by != kByQuery && tiles.classes_by != kByHead)
    return refuse(kInvalid, "classes_by", tiles.classes_by, "0 (queries) or 1 (heads)");
  if (tiles.classes_by == kByHead && call.layer->group_size > 32)
    return refuse(TANDEM_ERROR_UNSUPPORTED, "classes_by", tiles.classes_by,
                  "classes by head are for groups of up to 32 heads of a KV head, as a tile has so many bits");
  return TANDEM_OK;
}

}  // namespace

// The area of states has the room that any kernel needs on this device. Calls of different shapes may share a workspace,
// and no call may leave a state where another call counts.
AttendLauncher::AttendLauncher(const DeviceLimits& limits)
    : decode_(limits),
      prefill_(limits),
      states_bytes_((std::max(decode_.states_bytes(), prefill_.states_bytes()) + kAlign - 1) / kAlign * kAlign) {}

// Decode kernels read a sequence's keys once for each tile of query rows. The prefill kernel for up to 64 rows reads them
// once. For calls of 9 to 16 rows a decode kernel with tiles of 16 may exist. With one sequence and one or two KV heads
// such calls go to the prefill kernel: they take 0.62 to 0.91 of the time there up to 65,536 keys, and as long at 200,000.
// With 8 KV heads and 100,000 keys they would take 9 % longer, and the prefill kernel shares out the keys of many sequences
// less evenly.
bool AttendLauncher::is_decode(const DeviceAttend& call) const {
  constexpr int64_t kTileRows = 8;
  constexpr int32_t kFewHeads = 2;
  if (!may_decode(call)) return false;
  const bool has_few_rows = int64_t{call.sequences.max_q_len} * call.layer->group_size <= kTileRows;
  if (call.lists.has_granules != 0 || has_few_rows) return true;
  const bool is_narrow = call.sequences.n_sequences == 1 && call.layer->n_kv_heads <= kFewHeads;
  if (!is_narrow && decode_.has_one_tile(call)) return true;
  return !prefill_.serves_few_rows({*call.layer, call.q, call.sequences.max_q_len, kNoNames});
}

int32_t AttendLauncher::most_list_rows(const Layer& stored, const DeviceRows& q) const {
  return prefill_.takes_granules(window_layer(stored), q) ? INT32_MAX : static_cast<int32_t>(DecodeLauncher::kMostRows);
}

int32_t AttendLauncher::refuse_granules(const DeviceAttend& call, DeviceError* error) const {
  if (call.lists.has_granules == 0) return TANDEM_OK;
  if (call.before_o != nullptr)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "lists", "lists.has_granules = 1 with before_o: take ranges alone");
  const int64_t n_rows = int64_t{call.sequences.max_q_len} * call.layer->group_size;
  const int32_t most_rows = most_list_rows(*call.layer, call.q);
  if (n_rows <= most_rows) return TANDEM_OK;
  return fail(
      error, TANDEM_ERROR_UNSUPPORTED, 0, "lists",
      "lists.has_granules = 1 with %d queries of a sequence and %d heads of a KV head: for such queries, no more than "
      "%d rows",
      call.sequences.max_q_len, call.layer->group_size, most_rows);
}

int32_t AttendLauncher::supports(const Layer& stored, int32_t max_q_len, DeviceError* error) const {
  if (const int32_t code = check_layer(stored, error); code != TANDEM_OK) return code;
  const Layer layer = window_layer(stored);
  int32_t n_blocks = 0;
  if (tandem::cuda::is_decode(layer, max_q_len)) {
    const DecodeKernel* kernel = nullptr;
    return decode_.choose(layer, max_q_len, false, &kernel, &n_blocks, error);
  }
  for (const int32_t q_type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16}) {
    const PrefillKernel* kernel = nullptr;
    DeviceRows q;
    q.dtype = q_type;
    if (const int32_t code = prefill_.choose({layer, q, max_q_len, kNoNames}, &kernel, &n_blocks, error); code != TANDEM_OK)
      return code;
  }
  return TANDEM_OK;
}

int64_t AttendLauncher::workspace_bytes(const DeviceAttend& of) const {
  const Layer layer = window_layer(*of.layer);
  DeviceAttend call = of;
  call.layer = &layer;
  // A call may have fewer queries than this one, and so go to the other launcher.
  return states_bytes_ + std::max(decode_.counters_bytes(call), prefill_.counters_bytes(call));
}

int32_t AttendLauncher::launch(const DeviceAttend& of, cudaStream_t stream, DeviceError* error) const {
  const Layer layer = window_layer(*of.layer);
  DeviceAttend call = of;
  call.layer = &layer;
  if (const int32_t code = refuse_page_len(call.pages.page_len, error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_lists(call, error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_granules(call, error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_tiles(call, error); code != TANDEM_OK) return code;
  return is_decode(call) ? decode_.launch(call, states_bytes_, stream, error)
                         : prefill_.launch(call, states_bytes_, stream, error);
}

}  // namespace tandem::cuda
