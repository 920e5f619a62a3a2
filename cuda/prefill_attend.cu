// SPDX-License-Identifier: MIT
#include <algorithm>
#include <limits>

#include "cuda/layer_check.h"
#include "cuda/prefill_attend.h"

namespace tandem::cuda {

#define TANDEM_PREFILL_PAIR(kernels) extern const PrefillKernel kernels[];
#include "prefill_pairs.inc"
#undef TANDEM_PREFILL_PAIR

namespace {

const PrefillKernel* const kPairs[] = {
#define TANDEM_PREFILL_PAIR(kernels) kernels,
#include "prefill_pairs.inc"
#undef TANDEM_PREFILL_PAIR
};

constexpr int64_t kLeastTiles = 4;  // least tiles of keys of a block, as a split costs a merge
constexpr int32_t kFewRows = 64;
constexpr int64_t kMostShared = 4;  // items for each block that runs at once, in calls whose keys are shared out by length

int64_t max_tiles(const DeviceAttend& call, const PrefillKernel& kernel) {
  return (int64_t{call.sequences.max_q_len} * call.layer->group_size + kernel.tile_rows - 1) / kernel.tile_rows;
}

int64_t max_items(const DeviceAttend& call, const PrefillKernel& kernel) {
  return int64_t{call.sequences.n_sequences} * call.layer->n_kv_heads * max_tiles(call, kernel);
}

bool is_of_pieces(const DeviceRows& q) {
  return reinterpret_cast<uintptr_t>(q.data) % 16 == 0 && q.token_stride % 8 == 0 && q.head_stride % 8 == 0;
}

bool serves(const PrefillKernel& kernel, const Layer& layer) {
  return kernel.k_type == layer.k_type && kernel.v_type == layer.v_type && kernel.k_dim == layer.k_head_dim &&
         kernel.v_dim == layer.v_head_dim;
}

// True if a is better than b for n_rows rows that both serve. Prefers the kernel for this device, then the kernel with
// fewer summands to multiply, then the kernel with the fewest rows a tile that n_rows fit into.
bool is_better(const PrefillKernel& a, const PrefillKernel& b, int64_t n_rows) {
  if (a.is_sm90 != b.is_sm90) return a.is_sm90;
  if (a.of_multiprocessor != b.of_multiprocessor) return a.of_multiprocessor > b.of_multiprocessor;
  if (a.most_q_parts != b.most_q_parts) return a.most_q_parts < b.most_q_parts;
  if ((a.tile_rows >= n_rows) != (b.tile_rows >= n_rows)) return a.tile_rows >= n_rows;
  return a.tile_rows >= n_rows ? a.tile_rows < b.tile_rows : a.tile_rows > b.tile_rows;
}

// Returns the clusters of `size` blocks that run at once while an append beside them has n_left multiprocessors, which lie
// side by side. A cluster lies within one of the device's groups of multiprocessors, and a group has 16 or more.
int32_t count_clusters_beside(const PrefillKernel& kernel, int32_t size, int32_t n_left) {
  constexpr int32_t kOfGroup = 16;
  return count_clusters(kernel.function, kernel.n_threads, kernel.shared_bytes, size) -
         (kOfGroup / size - (kOfGroup - n_left) / size);
}

// n: blocks of an item. of_cluster: blocks of a cluster. n_shares above 0: items get clusters by length (PrefillCall), and
// n is not used.
struct Splits {
  int32_t n = 1, of_cluster = 1, n_shares = 0;

  int64_t n_blocks(int64_t n_items) const { return n_shares > 0 ? (n_shares + n_items) * of_cluster : n_items * n; }
};

// Prefers large clusters, as blocks merge faster in a cluster than through memory. A size is good enough if its clusters
// have at least 3/4 of the blocks that would run without clusters. Rounding may add two blocks that have no tile.
Splits choose_splits(const PrefillKernel& kernel, int64_t n_items, int64_t most_splits, int32_t n_at_once, int32_t n_left) {
  const int64_t n = std::max<int64_t>(std::min((n_at_once - n_left) / n_items, most_splits), 1);
  const Splits alone = {static_cast<int32_t>(n), 1};
  if (!kernel.is_sm90 || n == 1) return alone;
  for (const int32_t size : {8, 4, 2}) {
    const int64_t n_fit = count_clusters_beside(kernel, size, n_left) / n_items;
    const int64_t n_clusters = std::min((n + size / 4) / size, n_fit);
    if (n_clusters > 0 && n_clusters * size * 4 >= n * 3) return {static_cast<int32_t>(n_clusters * size), size};
  }
  return alone;
}

// For sequences of possibly different lengths: the largest clusters of which each item gets one.
Splits choose_shares(const PrefillKernel& kernel, int64_t n_items, int64_t most_splits, int32_t n_at_once, int32_t n_left) {
  for (const int32_t size : {8, 4, 2}) {
    const int32_t n_fit = count_clusters_beside(kernel, size, n_left);
    if (size <= most_splits && n_items <= n_fit) return {size, size, n_fit};
  }
  return {1, 1, std::max(n_at_once - n_left, 1)};
}

}  // namespace

const PrefillKernel* PrefillLauncher::find(const PrefillNeeds& needs) const {
  const auto& [layer, q, max_q_len, names] = needs;
  const int64_t n_rows = int64_t{max_q_len} * layer.group_size;
  const PrefillKernel* found = nullptr;
  for (const PrefillKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel) {
      if (!serves(*kernel, layer)) continue;
      if (!kernel->takes[names]) continue;
      if (kernel->is_sm90 && (!limits_.has_90a() || kernel->shared_bytes > limits_.shared_of_block)) continue;
      if (kernel->of_multiprocessor > limits_.most_size) continue;
      if (!kernel->takes_caps && layer.soft_cap > 0.0f) continue;
      if (kernel->copies_q && (q.dtype != layer.k_type || !is_of_pieces(q))) continue;
      if (count_q_parts(q.dtype, kernel->is_narrow) > kernel->most_q_parts) continue;
      if (found == nullptr || is_better(*kernel, *found, n_rows)) found = kernel;
    }
  return found;
}

bool PrefillLauncher::takes_granules(const Layer& layer, const DeviceRows& q) const {
  return find({layer, q, 1, kGranuleNames}) != nullptr;
}

bool PrefillLauncher::serves_few_rows(const PrefillNeeds& needs) const {
  const PrefillKernel* kernel = find(needs);
  return kernel != nullptr && kernel->is_sm90 && kernel->tile_rows <= kFewRows;
}

int32_t PrefillLauncher::choose(const PrefillNeeds& needs, const PrefillKernel** kernel, int32_t* n_blocks,
                                DeviceError* error) const {
  if (const int32_t code = check_layer(needs.layer, error); code != TANDEM_OK) return code;
  *kernel = find(needs);
  if (*kernel == nullptr) return refuse_types(needs.layer, error);
  const PrefillKernel& found = **kernel;
  int32_t n_fit = 0;
  if (const int32_t code = set_up_kernel({found.function, found.n_threads, found.shared_bytes, found.k_dim, found.v_dim},
                                         limits_, &n_fit, error);
      code != TANDEM_OK)
    return code;
  *n_blocks = std::min(n_fit, found.n_blocks) * limits_.n_multiprocessors;
  return TANDEM_OK;
}

int64_t PrefillLauncher::states_bytes() const {
  int64_t bytes = 0;
  for (const PrefillKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      bytes = std::max(
          bytes, int64_t{std::min(limits_.most_blocks(kernel->shared_bytes), kernel->n_blocks)} * kernel->state_floats * 4);
  return bytes * limits_.n_multiprocessors;
}

int64_t PrefillLauncher::counters_bytes(const DeviceAttend& call) const {
  int64_t n_items = 0;
  for (const PrefillKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      if (serves(*kernel, *call.layer)) n_items = std::max(n_items, max_items(call, *kernel));
  // Clusters that leave states have a count for each of their blocks. Shares from 1.25 on are rounded up to 2, so division
  // by length makes up to 1.6 times as many clusters as run at once.
  return std::max(n_items, 2 * int64_t{limits_.n_multiprocessors}) * 4;
}

int32_t PrefillLauncher::launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream,
                                DeviceError* error) const {
  const bool has_tiles = call.tiles.lists != nullptr;
  const PrefillKernel* kernel = nullptr;
  int32_t n_at_once = 0;
  const KeyNames names = has_tiles ? kTileNames : call.lists.has_granules != 0 ? kGranuleNames : kNoNames;
  if (const int32_t code = choose({*call.layer, call.q, call.sequences.max_q_len, names}, &kernel, &n_at_once, error);
      code != TANDEM_OK)
    return code;
  const int64_t n_items = max_items(call, *kernel);
  if (n_items > std::numeric_limits<int32_t>::max())
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "q_lens", "%d sequences of up to %d queries are more than a grid has",
                call.sequences.n_sequences, call.sequences.max_q_len);
  if (n_items == 0) return TANDEM_OK;
  PrefillCall described = {describe_call(call, kernel->is_narrow, limits_),
                           1,
                           0,
                           tile_words(call.layer->group_size, call.tiles.classes_by),
                           call.before_o,
                           call.before_lse,
                           call.tiles};
  described.max_tiles = static_cast<int32_t>(max_tiles(call, *kernel));
  described.states = static_cast<float*>(call.workspace);
  described.counters = reinterpret_cast<int32_t*>(static_cast<std::byte*>(call.workspace) + states_bytes);
  const int64_t most_keys = has_tiles ? int64_t{call.tiles.most_tiles} * kTileTokens : call.sequences.max_keys;
  const int64_t least_keys = (kernel->is_sm90 ? 1 : kLeastTiles) * kernel->tile_keys;  // clusters merge fast
  // With more than kMostShared rounds of blocks, even the longest sequence's blocks start early enough.
  const bool by_length = kernel->is_sm90 && call.sequences.n_sequences > 1 && !has_tiles && call.lists.keys == nullptr &&
                         n_items <= kMostShared * n_at_once;
  const int32_t n_left = kernel->is_sm90 ? left_to_append(call, limits_) : 0;
  const Splits splits =
      (by_length ? choose_shares : choose_splits)(*kernel, n_items, most_keys / least_keys, n_at_once, n_left);
  described.n_splits = splits.n;
  described.n_shares = splits.n_shares;
  CUtensorMap maps[2];  // of K and V, whose rows have one length; of granules
  BoxShape box = kernel->box;
  if (box.keys > 0)
    if (const int32_t code = make_map(box, &maps[0], error); code != TANDEM_OK) return code;
  box.keys = kGranuleKeys;
  if (kernel->takes[kGranuleNames])
    if (const int32_t code = make_map(box, &maps[1], error); code != TANDEM_OK) return code;
  void* arguments[] = {&described, &maps};  // a kernel takes as many as it has
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(splits.of_cluster), 1, 1};
  // Kernels for 9.0 may start before the kernel before them has ended. They wait for its end themselves.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(splits.n_blocks(n_items)));
  config.blockDim = dim3(static_cast<unsigned>(kernel->n_threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel->shared_bytes);
  config.stream = stream;
  config.attrs = splits.of_cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = !kernel->is_sm90 ? 0 : splits.of_cluster > 1 ? 2 : 1;
  TANDEM_CUDA_TRY(cudaLaunchKernelExC(&config, kernel->function, arguments), error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
