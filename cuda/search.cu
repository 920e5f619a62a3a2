// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/kernel_setup.h"
#include "cuda/kernels/search.cuh"
#include "cuda/layer_check.h"
#include "cuda/room_plan.h"
#include "cuda/search.h"

namespace tandem::cuda {

// The table ends with an entry of no heads. A module without code for 9.0 has only that entry.
#ifdef TANDEM_WIDE_SEARCH
extern const WideKernels kWideKernels[];
#else
static const WideKernels kWideKernels[] = {{}};
#endif

namespace {

using BoundChunksKernel = void (*)(BoundChunksCall);

constexpr int32_t kBlocksAtOnce = 2;    // blocks on a multiprocessor; 1 where a judge reads keys in f32
constexpr int64_t kRounds = 4;          // rounds of blocks that the device runs, where there is work for them
constexpr int32_t kMostPieces = 128;    // pieces of a KV head's candidates
constexpr int32_t kMostBlocks = 65535;  // blocks in a grid's second and third dimension
constexpr int32_t kMostQueries = 64;    // queries of a query block
constexpr int32_t kMostChunkShift = 8;
constexpr int32_t kMostShared = 64 << 10;  // bytes of query rows
constexpr int32_t kMostWideShared = 178 << 10;
constexpr int32_t kLeastWideQueries = 16;
constexpr int32_t kTileBytes = 32 * sizeof(uint4);  // bytes of a chunk of eight query rows, as one summand

// Indices: whether q is bf16; whether rows of bounds are read in one step.
constexpr SearchKernel kBoundsKernels[2][2] = {{search_kernel<BoundsJudge<3, false>>, search_kernel<BoundsJudge<3, true>>},
                                               {search_kernel<BoundsJudge<1, false>>, search_kernel<BoundsJudge<1, true>>}};

constexpr struct {
  int32_t k_type;
  SearchKernel exact[2], descent[2];  // index of exact: q is bf16; of descent: q is plain
  BoundChunksKernel bound;
} kKernels[] = {
#define TANDEM_SEARCH(type)                                                                                            \
  {                                                                                                                    \
    type, {search_kernel<ExactJudge<type, 3>>, search_kernel<ExactJudge<type, 1>>},                                    \
        {search_kernel<DescentJudge<type, false>>, search_kernel<DescentJudge<type, true>>}, bound_chunks_kernel<type> \
  }
    TANDEM_SEARCH(TANDEM_F32),  TANDEM_SEARCH(TANDEM_F16),  TANDEM_SEARCH(TANDEM_BF16),
    TANDEM_SEARCH(TANDEM_E4M3), TANDEM_SEARCH(TANDEM_Q8_0), TANDEM_SEARCH(TANDEM_Q4_0),
#undef TANDEM_SEARCH
};

const auto& kernels_of(int32_t k_type) {
  return *std::find_if(std::begin(kKernels), std::end(kKernels), [&](const auto& of) { return of.k_type == k_type; });
}

int32_t n_lists_of(const DeviceSearch& call) { return call.shares_lists != 0 ? 1 : call.layer->n_kv_heads; }

// ---- sizes --------------------------------------------------------------------------------------------------------------

// True if `other` is there at every length at which `stage` is.
bool covers(const DeviceSearchStage& other, const DeviceSearchStage& stage) {
  return other.from_len <= stage.from_len && (other.to_len == 0 || (stage.to_len != 0 && other.to_len >= stage.to_len));
}

// True if both stages are there at some length.
bool meet(const DeviceSearchStage& a, const DeviceSearchStage& b) {
  return (a.to_len == 0 || b.from_len < a.to_len) && (b.to_len == 0 || a.from_len < b.to_len);
}

int64_t most_candidates(const DeviceSearch& call, int32_t idx) {
  const DeviceSearchStage& stage = call.stages[idx];
  int64_t most = 0;
  bool may_be_first = true;
  for (int32_t i = 0; i < idx; ++i) {
    const DeviceSearchStage& before = call.stages[i];
    may_be_first = may_be_first && !covers(before, stage);
    if (meet(before, stage)) most = std::max(most, int64_t{before.most_kept} << (before.chunk_shift - stage.chunk_shift));
  }
  const int64_t n_keys = stage.to_len == 0 ? call.most_keys : std::min(call.most_keys, stage.to_len);
  return may_be_first ? std::max(most, (n_keys >> stage.chunk_shift) + 1) : most;
}

bool may_normalise(const DeviceSearch& call, int32_t idx) {
  const DeviceSearchStage& stage = call.stages[idx];
  const int32_t n_heads = call.shares_lists != 0 ? call.layer->n_q_heads : call.layer->group_size;
  if (stage.judge != TANDEM_JUDGE_EXACT || n_heads == 1) return false;
  return std::none_of(call.stages + idx + 1, call.stages + call.n_stages,
                      [&](const DeviceSearchStage& later) { return covers(later, stage); });
}

// True if the launch of a stage has blocks that make the bounds of new chunks.
bool bounds_chunks(const DeviceSearch& call, int32_t idx) { return idx == 0 && call.keeps_lists != 0 && call.n_bounds > 0; }

// Returns the judging blocks that run at once.
int64_t n_at_once_of(const DeviceSearch& call, int32_t idx, int32_t n_multiprocessors) {
  const bool is_large = call.stages[idx].judge != TANDEM_JUDGE_BOUNDS && window_layer(*call.layer).k_type == TANDEM_F32;
  return int64_t{n_multiprocessors} * (is_large ? 1 : kBlocksAtOnce);
}

// Returns the most blocks that it pays to share the candidates of a query block and KV head among. Each warp has 16 rows.
int64_t most_pieces(const DeviceSearch& call, int32_t idx) {
  const DeviceSearchStage& stage = call.stages[idx];
  const int64_t n_rows = most_candidates(call, idx) << (stage.judge == TANDEM_JUDGE_EXACT ? stage.chunk_shift : 0);
  return std::min<int64_t>(n_rows / (kTileKeys * kSearchWarps) + 1, kMostPieces);
}

int64_t n_pairs_of(const DeviceSearch& call) {
  return std::max<int64_t>(1, int64_t{call.sequences.n_sequences} * call.layer->n_kv_heads);
}

// Returns the number of blocks that share the candidates of a query block and KV head: as many as run at once. Where that
// would leave a part of the device idle, more, so that small parts end at about the same time.
int32_t n_pieces_of(const DeviceSearch& call, int32_t idx, int32_t n_multiprocessors) {
  const int64_t n_pairs = n_pairs_of(call), n_at_once = n_at_once_of(call, idx, n_multiprocessors);
  const int64_t n_wanted = n_pairs * kRounds <= n_at_once ? n_at_once / n_pairs - (bounds_chunks(call, idx) ? 1 : 0)
                                                          : kRounds * n_at_once / n_pairs;
  return static_cast<int32_t>(std::clamp<int64_t>(n_wanted, 1, most_pieces(call, idx)));
}

// Returns the sums that all pieces of all query blocks and KV heads have. A call of fewer query blocks has more pieces for
// each, so this is enough for such calls, too.
int64_t most_sums(const DeviceSearch& call, int32_t idx, int32_t n_multiprocessors) {
  const int64_t n_pairs = n_pairs_of(call);
  const int64_t n = std::max(kRounds * n_at_once_of(call, idx, n_multiprocessors), n_pairs);
  return std::min(n, n_pairs * most_pieces(call, idx)) * call.sequences.max_q_len * call.layer->group_size;
}

// Counters come first, and their number never changes: they are 0 between calls of any shape.
int64_t plan_room(const DeviceSearch& call, int32_t n_multiprocessors, SearchCall* to) {
  const int64_t n_blocks = call.sequences.n_sequences, n_heads = call.layer->n_kv_heads, n_lists = n_lists_of(call);
  int64_t n_sums = 0;
  to->most_candidates = to->most_best = to->head_scores = 1;
  to->most_rows = int64_t{call.sequences.max_q_len} * call.layer->group_size;
  for (int32_t i = 0; i < call.n_stages; ++i) {
    const int64_t n = most_candidates(call, i);
    to->most_candidates = std::max(to->most_candidates, n);
    if (call.stages[i].plus_next != 0) to->most_best = std::max<int64_t>(to->most_best, call.stages[i].most_kept);
    to->head_scores = std::max(to->head_scores, may_normalise(call, i) ? n * to->most_rows : n);
    if (may_normalise(call, i)) n_sums = std::max(n_sums, most_sums(call, i, n_multiprocessors));
  }
  RoomPlan plan(call.workspace);
  to->counters = plan.take<int32_t>(kMostSearchLists);
  to->ordered = plan.take<uint32_t>(n_blocks * n_lists * to->most_candidates);
  to->best = plan.take<int32_t>(n_blocks * n_lists * to->most_best);
  to->scores = plan.take<float>(n_blocks * n_heads * to->head_scores);
  to->sums = plan.take<float_pair>(n_sums);
  return plan.bytes();
}

// ---- checks -------------------------------------------------------------------------------------------------------------

int32_t check_bounds(const DeviceBounds* bounds, int32_t n, const char* field, DeviceError* error) {
  if (n < 0 || n > kMostSearchStages)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, field, "n_bounds = %d is not from 0 to %d", n, kMostSearchStages);
  for (int32_t i = 0; i < n; ++i)
    if (bounds[i].data == nullptr || bounds[i].chunk_shift < 0 || bounds[i].chunk_shift > kMostChunkShift ||
        reinterpret_cast<uintptr_t>(bounds[i].data) % 16 != 0 || bounds[i].head_stride % 16 != 0)
      return fail(error, TANDEM_ERROR_INTERNAL, 0, field,
                  "bounds[%d]: null, or of chunks of 2^%d tokens (at most 2^%d), or not at multiples of 16 bytes", i,
                  bounds[i].chunk_shift, kMostChunkShift);
  return TANDEM_OK;
}

int32_t check_stage(const DeviceSearch& call, int32_t idx, DeviceError* error) {
  const DeviceSearchStage& stage = call.stages[idx];
  const int32_t shift = stage.chunk_shift;
  if (stage.judge != TANDEM_JUDGE_DESCENT && stage.judge != TANDEM_JUDGE_BOUNDS && stage.judge != TANDEM_JUDGE_EXACT)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "judge", "stages[%d].judge = %d: this module has no such judge", idx,
                stage.judge);
  if (shift < 0 || shift > kMostChunkShift)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "chunk_shift",
                "stages[%d].chunk_shift = %d: this module has chunks of up to 2^%d tokens", idx, shift, kMostChunkShift);
  for (int32_t i = 0; i < idx; ++i)
    if (meet(call.stages[i], stage) && call.stages[i].chunk_shift < shift)
      return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "chunk_shift",
                  "stages[%d].chunk_shift = %d is more than that of a stage before it", idx, shift);
  if ((call.sink_len & ((int64_t{1} << shift) - 1)) != 0)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "sink_len", "sink_len = %lld is no whole number of chunks of 2^%d tokens",
                static_cast<long long>(call.sink_len), shift);
  const int64_t n_kept = stage.keep_len >> shift;
  if (n_kept < 1 + stage.plus_next || n_kept > stage.most_kept)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "keep_len", "stages[%d]: %lld chunks are kept, with room for %d", idx,
                static_cast<long long>(n_kept), stage.most_kept);
  if (stage.judge != TANDEM_JUDGE_BOUNDS) return TANDEM_OK;
  if (stage.bounds_idx >= 0 && stage.bounds_idx < call.n_bounds && call.bounds[stage.bounds_idx].chunk_shift == shift)
    return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "bounds_idx", "stages[%d].bounds_idx = %d: no bounds of such chunks", idx,
              stage.bounds_idx);
}

int32_t check_sizes(const DeviceSearch& call, DeviceError* error) {
  const int64_t n_lists = int64_t{call.sequences.n_sequences} * n_lists_of(call);
  if (n_lists > kMostSearchLists || call.sequences.n_sequences > kMostBlocks || call.layer->n_kv_heads > kMostBlocks)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "n_sequences",
                "%d query blocks with %lld lists: this module has %d at most", call.sequences.n_sequences,
                static_cast<long long>(n_lists), kMostSearchLists);
  const int32_t most_q_len = call.keeps_lists != 0 ? 1 : kMostQueries;
  if (call.sequences.max_q_len > most_q_len)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "max_q_len", "max_q_len = %d: a query block has %d queries at most",
                call.sequences.max_q_len, most_q_len);
  if (call.most_keys > INT32_MAX / 2 || n_lists * call.n_granules > INT32_MAX)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "most_keys",
                "%lld keys, and %lld lists of %d granules: these are too many", static_cast<long long>(call.most_keys),
                static_cast<long long>(n_lists), call.n_granules);
  if (call.workspace != nullptr && call.keys != nullptr && call.granules != nullptr && call.q.data != nullptr &&
      call.list_queries > 0 && call.n_granules >= 0 && call.sink_len >= 0 && call.window_len > 0)
    return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "a search without work space, queries or lists; list_queries = %d",
              call.list_queries);
}

int32_t check_search(const DeviceSearch& call, DeviceError* error) {
  if (const int32_t code = check_layer(*call.layer, error); code != TANDEM_OK) return code;
  if (const int32_t code = check_rows(call.q, "q", error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_page_len(call.pages.page_len, error); code != TANDEM_OK) return code;
  if (call.n_stages < 1 || call.n_stages > kMostSearchStages)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "n_stages", "n_stages = %d is not from 1 to %d", call.n_stages,
                kMostSearchStages);
  if (const int32_t code = check_bounds(call.bounds, call.n_bounds, "bounds", error); code != TANDEM_OK) return code;
  for (int32_t i = 0; i < call.n_stages; ++i)
    if (const int32_t code = check_stage(call, i, error); code != TANDEM_OK) return code;
  return check_sizes(call, error);
}

// ---- launches -----------------------------------------------------------------------------------------------------------

// A kernel, and its shared memory for eight query rows.
struct StageKernel {
  SearchKernel kernel;
  int32_t tile_bytes;
};

StageKernel find_kernel(const DeviceSearch& call, const Layer& layer, int32_t judge) {
  const bool is_bf16 = call.q.dtype == TANDEM_BF16;
  const int32_t n_parts = is_bf16 ? 1 : 3;
  if (judge == TANDEM_JUDGE_DESCENT) return {kernels_of(layer.k_type).descent[is_plain(call.q, layer.k_head_dim)], 0};
  if (judge == TANDEM_JUDGE_EXACT) {
    constexpr int kChunks = ExactJudge<TANDEM_BF16, 1>::kChunks;
    const int n_chunks = SixteenRows<TANDEM_BF16, kChunks>::n_steps(layer.k_head_dim) * kChunks;
    return {kernels_of(layer.k_type).exact[is_bf16], n_chunks * n_parts * kTileBytes};
  }
  constexpr int kChunks = BoundsJudge<1, true>::kChunks;
  const int n_chunks = SixteenRows<TANDEM_BF16, kChunks>::n_steps(2 * layer.k_head_dim) * kChunks;
  return {kBoundsKernels[is_bf16][n_chunks == kChunks], n_chunks * n_parts * kTileBytes};
}

// ---- blocks of many queries ----------------------------------------------------------------------------------------------

int32_t wide_shared(const DeviceSearch& call, int32_t idx, int32_t n_heads) {
  const int32_t n_numbers = call.layer->k_head_dim * (call.stages[idx].judge == TANDEM_JUDGE_BOUNDS ? 2 : 1);
  constexpr int32_t kAlign = 1024;
  return kAlign + wide_bytes(n_heads, n_numbers);
}

// Returns the kernels for a stage of a call with blocks of many queries. They serve as many heads at a time as a KV head
// has, as far as these fit into shared memory. Null: the other kernels serve the stage.
const WideKernels* find_wide(const DeviceSearch& call, int32_t idx, const LaunchOn& on) {
  const Layer layer = window_layer(*call.layer);
  const bool has_rows = call.stages[idx].judge == TANDEM_JUDGE_BOUNDS || layer.k_type == TANDEM_BF16;
  if (!on.has_90a || call.keeps_lists != 0 || call.sequences.max_q_len < kLeastWideQueries || !has_rows ||
      !is_plain(call.q, layer.k_head_dim))
    return nullptr;
  const WideKernels* found = nullptr;
  for (const WideKernels* each = kWideKernels; each->n_heads > 0; ++each)
    if (wide_shared(call, idx, each->n_heads) <= kMostWideShared && (found == nullptr || each->n_heads >= layer.group_size))
      found = each;
  return found;
}

// Returns the blocks that share the candidates of a query block and KV head. A multiprocessor runs one at a time. Each
// loads all query rows, so more blocks are used only where the last round of blocks would leave much of the device idle.
int32_t wide_pieces(const DeviceSearch& call, int32_t idx, int32_t n_multiprocessors) {
  constexpr double kWorth = 0.05;  // share of the device that more blocks have to gain
  const int64_t n_pairs = n_pairs_of(call), n = n_multiprocessors;
  const int64_t most = std::clamp<int64_t>(kRounds * n / n_pairs, 1, most_pieces(call, idx));
  int64_t best = 1;
  double best_share = 0.0;  // share of the device that has work
  for (int64_t p = 1; p <= most; ++p) {
    const int64_t n_blocks = n_pairs * p, n_places = (n_blocks + n - 1) / n * n;
    const double share = static_cast<double>(n_blocks) / static_cast<double>(n_places);
    if (share > best_share + kWorth) best = p, best_share = share;
  }
  return static_cast<int32_t>(best);
}

int32_t launch_wide(const DeviceSearch& call, int32_t idx, const WideKernels& kernels, const LaunchOn& on,
                    SearchCall described, DeviceError* error) {
  described.stage = idx;
  described.n_pieces = wide_pieces(call, idx, on.n_multiprocessors);
  const dim3 n_blocks(static_cast<unsigned>(described.n_pieces), static_cast<unsigned>(call.layer->n_kv_heads),
                      static_cast<unsigned>(call.sequences.n_sequences));
  LaunchOn with_shared = on;
  with_shared.shared_bytes = wide_shared(call, idx, kernels.n_heads);
  const auto launch = [&](SearchKernel kernel) {
    return launch_kernel(kernel, n_blocks, kSearchWarps, described, with_shared, error);
  };
  const int32_t judge = call.stages[idx].judge;
  if (judge == TANDEM_JUDGE_BOUNDS) return launch(kernels.bounds);
  if (judge == TANDEM_JUDGE_DESCENT) return launch(kernels.descent);
  described.has_sums = 1;
  if (may_normalise(call, idx))
    if (const int32_t code = launch(kernels.sums); code != TANDEM_OK) return code;
  return launch(kernels.exact);
}

int32_t launch_stage(const DeviceSearch& call, int32_t idx, const LaunchOn& on, SearchCall described, DeviceError* error) {
  if (const WideKernels* wide = find_wide(call, idx, on)) return launch_wide(call, idx, *wide, on, described, error);
  const Layer layer = window_layer(*call.layer);
  const StageKernel of = find_kernel(call, layer, call.stages[idx].judge);
  const int64_t n_tiles = (described.most_rows + kColumns - 1) / kColumns;
  described.stage = idx;
  described.n_pieces = n_pieces_of(call, idx, on.n_multiprocessors);
  described.most_tiles =
      of.tile_bytes == 0 ? 1 : static_cast<int32_t>(std::clamp<int64_t>(n_tiles, 1, kMostShared / of.tile_bytes));
  const dim3 n_blocks(static_cast<unsigned>(described.n_pieces + (bounds_chunks(call, idx) ? 1 : 0)),
                      static_cast<unsigned>(layer.n_kv_heads), static_cast<unsigned>(call.sequences.n_sequences));
  LaunchOn with_shared = on;
  with_shared.shared_bytes = described.most_tiles * of.tile_bytes;
  return launch_kernel(of.kernel, n_blocks, kSearchWarps, described, with_shared, error);
}

}  // namespace

int32_t load_search_kernels(bool has_90a, DeviceError* error) {
  cudaFuncAttributes attributes;
  const auto load = [&](SearchKernel kernel, int32_t most_shared = kMostShared) {
    TANDEM_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         most_shared),
                    error);
    return static_cast<int32_t>(TANDEM_OK);
  };
  for (const WideKernels* each = kWideKernels; has_90a && each->n_heads > 0; ++each)
    for (const SearchKernel kernel : {each->bounds, each->exact, each->sums, each->descent})
      if (const int32_t code = load(kernel, kMostWideShared); code != TANDEM_OK) return code;
  for (const auto& of_parts : kBoundsKernels)
    for (const SearchKernel kernel : of_parts)
      if (const int32_t code = load(kernel); code != TANDEM_OK) return code;
  for (const auto& of_type : kKernels) {
    for (const SearchKernel kernel : {of_type.exact[0], of_type.exact[1], of_type.descent[0], of_type.descent[1]})
      if (const int32_t code = load(kernel); code != TANDEM_OK) return code;
    TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(of_type.bound)), error);
  }
  return TANDEM_OK;
}

int64_t search_workspace_bytes(const DeviceSearch& call, int32_t n_multiprocessors) {
  SearchCall described = {};
  return plan_room(call, n_multiprocessors, &described);
}

int32_t launch_search(const DeviceSearch& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_search(call, error); code != TANDEM_OK) return code;
  if (call.sequences.n_sequences == 0 || call.sequences.max_q_len == 0) return TANDEM_OK;
  SearchCall described = {};
  described.search = call;
  described.keys = keys_of(call.pages, window_layer(*call.layer));
  described.n_kv_heads = call.layer->n_kv_heads;
  described.group_size = call.layer->group_size;
  described.n_lists = n_lists_of(call);
  described.sm_scale = call.layer->sm_scale;
  for (int32_t i = 0; i < call.n_stages; ++i) described.list_bytes[i] = kept_list_bytes(call.stages[i].most_kept);
  plan_room(call, on.n_multiprocessors, &described);
  // A first stage that normalises reads the append's rows with loads that treat them as constant. So such a search waits
  // for the append's end.
  if (call.append != nullptr && !may_normalise(call, 0) && runs_beside(*call.append, on.capability)) {
    described.rows_written = rows_written(call.append->exchange);
    described.epoch = call.append->epoch;
  }
  for (int32_t i = 0; i < call.n_stages; ++i)
    if (const int32_t code = launch_stage(call, i, on, described, error); code != TANDEM_OK) return code;
  return TANDEM_OK;
}

// Launches as many blocks as run at once, or fewer where keys are few.
int32_t launch_bound_chunks(const DeviceBoundChunks& call, const LaunchOn& on, DeviceError* error) {
  const Layer layer = window_layer(*call.layer);
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_page_len(call.pages.page_len, error); code != TANDEM_OK) return code;
  if (const int32_t code = check_bounds(call.bounds, call.n_bounds, "bounds", error); code != TANDEM_OK) return code;
  if (call.sequences.n_sequences == 0 || call.n_bounds == 0) return TANDEM_OK;
  if (call.sequences.n_sequences > kMostBlocks || call.sequences.max_keys > INT32_MAX / 2)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "n_sequences", "%d sequences of up to %lld keys are too many",
                call.sequences.n_sequences, static_cast<long long>(call.sequences.max_keys));
  int64_t n_chunks = 1;  // chunks of a sequence, at most
  for (int32_t i = 0; i < call.n_bounds; ++i)
    n_chunks = std::max(n_chunks, call.sequences.max_keys >> call.bounds[i].chunk_shift);
  const int64_t n_wanted = (int64_t{kBlocksAtOnce} * on.n_multiprocessors - 1) / call.sequences.n_sequences + 1;
  const int64_t n_useful = (n_chunks * layer.n_kv_heads - 1) / kBoundWarps + 1;
  const BoundChunksCall described = {call, keys_of(call.pages, layer), layer.n_kv_heads};
  return launch_kernel(
      kernels_of(layer.k_type).bound,
      dim3(static_cast<unsigned>(std::min(n_wanted, n_useful)), static_cast<unsigned>(call.sequences.n_sequences)),
      kBoundWarps, described, on, error);
}

}  // namespace tandem::cuda
