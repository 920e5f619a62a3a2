// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/kernel_setup.h"
#include "cuda/kernels/pattern_blocks.cuh"
#include "cuda/kernels/pattern_choose.cuh"
#include "cuda/kernels/pattern_lists.cuh"
#include "cuda/kernels/pattern_probe.cuh"
#include "cuda/layer_check.h"
#include "cuda/patterns.h"
#include "cuda/room_plan.h"

namespace tandem::cuda {

#ifdef TANDEM_WIDE_PROBES
extern const WideProbeKernels kWideProbes[];
#else
static const WideProbeKernels kWideProbes[] = {{}};
#endif

namespace {

constexpr int64_t kMostBlocks = 65535;     // blocks in a grid's second and third dimension
constexpr int32_t kMostShared = 96 << 10;  // bytes of query rows: 64 of 256 numbers, each the sum of three
constexpr int32_t kMostWideShared = 216 << 10, kLeastProbeStages = 2;
constexpr uint32_t kKnownKinds =
    TANDEM_PATTERN_FULL | TANDEM_PATTERN_A_SHAPE | TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE;

constexpr struct {
  int32_t k_type;
  PatternKernel sums[2], weights[2];  // index: whether q is bf16
  PatternKernel key_means;
} kKernels[] = {
#define TANDEM_PATTERNS(type)                                                                  \
  {                                                                                            \
    type, {probe_sums_kernel<type, 3>, probe_sums_kernel<type, 1>},                            \
        {probe_weights_kernel<type, 3>, probe_weights_kernel<type, 1>}, key_means_kernel<type> \
  }
    TANDEM_PATTERNS(TANDEM_F32),  TANDEM_PATTERNS(TANDEM_F16),  TANDEM_PATTERNS(TANDEM_BF16),
    TANDEM_PATTERNS(TANDEM_E4M3), TANDEM_PATTERNS(TANDEM_Q8_0), TANDEM_PATTERNS(TANDEM_Q4_0),
#undef TANDEM_PATTERNS
};

constexpr PatternKernel kChoiceKernels[] = {count_digit_kernel<0>, count_digit_kernel<1>, count_digit_kernel<2>,
                                            choose_kernel};

const auto& kernels_of(int32_t k_type) {
  return *std::find_if(std::begin(kKernels), std::end(kKernels), [&](const auto& of) { return of.k_type == k_type; });
}

int64_t ceil_divide(int64_t n, int64_t by) { return (n + by - 1) / by; }

// ---- sizes --------------------------------------------------------------------------------------------------------------

ChoicePlaces places_of(const DevicePatterns& call) {
  const PatternChoices choices(call.sequences.max_keys, call.sequences.max_q_len, kQueryBlock);
  return {choices.n_words(),
          choices.bands_at(),
          choices.blocks_at(),
          static_cast<int32_t>(choices.token_words),
          static_cast<int32_t>(choices.band_words),
          static_cast<int32_t>(choices.block_words)};
}

// The counters of search() come first, and stay as they are. Sequences and patterns use the rest one after another.
int64_t plan_room(const DevicePatterns& call, PatternCall* to) {
  const int64_t n_heads = call.layer->n_q_heads, dim = call.layer->k_head_dim;
  to->n_pieces = static_cast<int32_t>(ceil_divide(call.sequences.max_keys, kPieceKeys));
  to->n_runs = to->n_pieces * kSearchWarps;
  to->n_token_parts = static_cast<int32_t>(ceil_divide(call.sequences.max_keys, kTokenPart));
  to->n_band_parts = static_cast<int32_t>(ceil_divide(call.sequences.max_keys / kPatternBand + 1, kBandPart));
  to->n_sums = static_cast<int32_t>(ceil_divide(call.sequences.max_keys, kWidePieceKeys));
  to->n_key_blocks = static_cast<int32_t>(call.sequences.max_keys / kPatternKeyBlock);
  to->n_query_blocks = static_cast<int32_t>(ceil_divide(call.sequences.max_q_len, kQueryBlock));
  RoomPlan plan(call.workspace);
  plan.take<int32_t>(kMostSearchLists);
  RoomPlan of_blocks = plan;
  if ((call.kinds & TANDEM_PATTERN_VERTICAL_SLASH) != 0) {
    to->sums = plan.take<float_pair>(n_heads * to->n_sums * kPatternProbes);
    to->lse = plan.take<float>(n_heads * kPatternProbes);
    to->columns = plan.take<float>(n_heads * call.sequences.max_keys);
    to->bands = plan.take<float>(n_heads * to->n_runs * kRunBands);
    to->bins = plan.take<int>(n_heads * kChoices * kDigits * kBins);
  }
  if ((call.kinds & TANDEM_PATTERN_BLOCK_SPARSE) != 0) {
    to->key_means = of_blocks.take<float>(call.layer->n_kv_heads * to->n_key_blocks * dim);
    to->query_means = of_blocks.take<float>(n_heads * to->n_query_blocks * dim);
    to->block_scores = of_blocks.take<float>(n_heads * to->n_query_blocks * to->n_key_blocks);
  }
  return std::max(plan.bytes(), of_blocks.bytes());
}

PatternCall describe(const DevicePatterns& call) {
  PatternCall described = {};
  described.patterns = call;
  described.keys = keys_of(call.pages, window_layer(*call.layer));
  described.places = places_of(call);
  described.n_q_heads = call.layer->n_q_heads;
  described.group_size = call.layer->group_size;
  described.sm_scale = call.layer->sm_scale;
  plan_room(call, &described);
  return described;
}

// ---- checks -------------------------------------------------------------------------------------------------------------

int32_t check_sizes(const DevicePatterns& call, DeviceError* error) {
  const DeviceSequences& sequences = call.sequences;
  if (sequences.max_q_len > TANDEM_PATTERN_CHUNK)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "max_q_len", "max_q_len = %d: this module has chunks of %d queries",
                sequences.max_q_len, TANDEM_PATTERN_CHUNK);
  const int64_t most_keys =
      std::min<int64_t>(INT32_MAX / 2, kMostBlocks * std::min(kPieceKeys, kScoreTile * kPatternKeyBlock));
  if (sequences.max_keys > most_keys)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "max_keys", "max_keys = %lld: this module has %lld at most",
                static_cast<long long>(sequences.max_keys), static_cast<long long>(most_keys));
  if (sequences.n_sequences > kMostBlocks || call.layer->n_kv_heads > kMostBlocks)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "n_sequences", "%d sequences and %d KV heads: this module has %lld each",
                sequences.n_sequences, call.layer->n_kv_heads, static_cast<long long>(kMostBlocks));
  return TANDEM_OK;
}

int32_t check_patterns(const DevicePatterns& call, DeviceError* error) {
  if (const int32_t code = check_layer(*call.layer, error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_page_len(call.pages.page_len, error); code != TANDEM_OK) return code;
  if ((call.kinds & ~kKnownKinds) != 0)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "kinds", "kinds = %#x: this module knows %#x", call.kinds, kKnownKinds);
  if (const int32_t code = check_sizes(call, error); code != TANDEM_OK) return code;
  if (call.heads != nullptr && call.choices != nullptr) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "head patterns without heads or choices");
}

int32_t check_index(const DevicePatterns& call, DeviceError* error) {
  if (const int32_t code = check_patterns(call, error); code != TANDEM_OK) return code;
  if (const int32_t code = check_rows(call.q, "q", error); code != TANDEM_OK) return code;
  if (call.workspace != nullptr && call.q.data != nullptr) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "head patterns without work space or queries");
}

int32_t check_lists(const DevicePatterns& call, DeviceError* error) {
  if (const int32_t code = check_patterns(call, error); code != TANDEM_OK) return code;
  if (call.keys == nullptr || call.granules == nullptr || call.totals == nullptr || call.list_queries < 1 ||
      call.n_granules < 0)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "no place for lists or totals; list_queries = %d, n_granules = %d",
                call.list_queries, call.n_granules);
  const int64_t last_head = call.first_head + (int64_t{call.n_lists} - 1) * call.head_step;
  if (call.n_lists < 0 || call.n_lists > kMostBlocks || call.first_head < 0 || call.head_step < 0 ||
      last_head >= call.layer->n_q_heads)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "n_lists", "%d lists of heads from %d on, each %d behind the one before",
                call.n_lists, call.first_head, call.head_step);
  const int64_t n_lists = ceil_divide(call.sequences.max_q_len, kQueryBlock) * call.n_lists;  // lists of a sequence
  if (n_lists * call.n_granules <= INT32_MAX) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "n_granules", "%lld lists of %d granules: these are too many",
              static_cast<long long>(n_lists), call.n_granules);
}

// ---- launches -----------------------------------------------------------------------------------------------------------

dim3 grid(int64_t x, int64_t y, int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

// Launches a pattern's kernels for one sequence. After a failed launch the others are left out.
struct Launches {
  const PatternCall& described;
  const LaunchOn& on;
  DeviceError* error;
  int32_t code = TANDEM_OK;

  template <class Call>
  void add(void (*kernel)(Call), const Call& call, dim3 n_blocks, int n_warps, int32_t shared_bytes) {
    LaunchOn with_shared = on;
    with_shared.shared_bytes = shared_bytes;
    if (code == TANDEM_OK) code = launch_kernel(kernel, n_blocks, n_warps, call, with_shared, error);
  }
  void add(PatternKernel kernel, dim3 n_blocks, int n_warps, int32_t shared_bytes = 0) {
    add(kernel, described, n_blocks, n_warps, shared_bytes);
  }
};

// Returns the bytes of the query rows that a block of a probe kernel has in shared memory.
int32_t probe_shared(int32_t dim, int32_t n_parts) {
  const int32_t n_chunks = SixteenRows<TANDEM_BF16, kProbeChunks>::n_steps(dim) * kProbeChunks;
  return kProbeGroups * n_chunks * n_parts * 32 * static_cast<int32_t>(sizeof(uint4));
}

// Returns kernels that multiply the probes of several query heads of a KV head at once: as many heads as the KV head has,
// as far as they fit into shared memory. Null: the other kernels serve the call. A KV head with a single query head gains
// nothing.
const WideProbeKernels* find_wide(const PatternCall& call, const LaunchOn& on) {
  const auto is_aligned = [](const void* at, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(at) | stride) % 16 == 0;
  };
  if (!on.has_90a || call.group_size == 1 || call.keys.type != TANDEM_BF16 || call.keys.dim < kWideStep ||
      !is_plain(call.patterns.q, call.keys.dim) || !is_aligned(call.keys.codes, call.keys.codes_head_stride))
    return nullptr;
  const WideProbeKernels* found = nullptr;
  for (const WideProbeKernels* each = kWideProbes; each->n_heads > 0; ++each)
    if (wide_probe_bytes(each->n_heads, kLeastProbeStages, call.keys.dim) <= kMostWideShared &&
        (found == nullptr || found->n_heads < call.group_size))
      found = each;
  return found;
}

void index_wide(Launches& launches, const WideProbeKernels& kernels) {
  const PatternCall& call = launches.described;
  WidePatternCall wide = {call, kMostProbeStages, call.sm_scale * kLog2E, {}};
  while (wide_probe_bytes(kernels.n_heads, wide.n_stages, call.keys.dim) > kMostWideShared) --wide.n_stages;
  const BoxShape box = {call.keys.row_bytes, kSwizzledRow, kProbeTile};
  if (launches.code == TANDEM_OK) launches.code = make_map(box, &wide.map, launches.error);
  const int64_t n_kv_heads = call.n_q_heads / call.group_size, n_parts = ceil_divide(call.group_size, kernels.n_heads);
  const int64_t n_blocks =  // of a KV head's part: as many as run at once
      std::clamp<int64_t>(launches.on.n_multiprocessors / (n_kv_heads * n_parts), 1, call.n_sums);
  const int32_t shared_bytes = wide_probe_bytes(kernels.n_heads, wide.n_stages, call.keys.dim);
  for (const auto kernel : {kernels.sums, kernels.weights})
    launches.add(kernel, wide, grid(n_blocks, n_kv_heads, n_parts), (kernels.n_heads + 1) * kWideRuns, shared_bytes);
}

void index_weights(Launches& launches) {
  const PatternCall& call = launches.described;
  if (const WideProbeKernels* wide = find_wide(call, launches.on)) {
    index_wide(launches, *wide);
  } else {
    const auto& kernels = kernels_of(call.keys.type);
    const bool is_bf16 = call.patterns.q.dtype == TANDEM_BF16;
    const int32_t shared_bytes = probe_shared(call.keys.dim, is_bf16 ? 1 : 3);
    const dim3 pieces = grid(call.n_q_heads, call.n_pieces);
    launches.add(kernels.sums[is_bf16], pieces, kSearchWarps, shared_bytes);
    launches.add(join_sums_kernel, grid(call.n_q_heads, 1), kPatternProbes / 32);
    launches.add(kernels.weights[is_bf16], pieces, kSearchWarps, shared_bytes);
  }
  const dim3 parts = grid(call.n_q_heads, call.n_token_parts + call.n_band_parts);
  for (const PatternKernel kernel : kChoiceKernels) launches.add(kernel, parts, kSearchWarps);
}

// Without key blocks, no block can be chosen and no bit is written.
void index_blocks(Launches& launches) {
  const PatternCall& call = launches.described;
  if (call.n_key_blocks == 0) return;
  const int32_t n_kv_heads = call.n_q_heads / call.group_size;
  launches.add(kernels_of(call.keys.type).key_means, grid(ceil_divide(call.n_key_blocks, kSearchWarps), n_kv_heads),
               kSearchWarps);
  launches.add(query_means_kernel, grid(call.n_q_heads, call.n_query_blocks), kQueryMeanWarps);
  launches.add(
      score_blocks_kernel,
      grid(call.n_q_heads, ceil_divide(call.n_key_blocks, kScoreTile), ceil_divide(call.n_query_blocks, kScoreTile)),
      kScoreWarps);
  launches.add(choose_blocks_kernel, grid(call.n_q_heads, call.n_query_blocks), kSearchWarps);
}

}  // namespace

int32_t load_pattern_kernels(bool has_90a, DeviceError* error) {
  cudaFuncAttributes attributes;
  for (const WideProbeKernels* each = kWideProbes; has_90a && each->n_heads > 0; ++each)
    for (const auto kernel : {each->sums, each->weights})
      TANDEM_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kMostWideShared),
                      error);
  for (const auto& of_type : kKernels) {
    for (const PatternKernel kernel : {of_type.sums[0], of_type.sums[1], of_type.weights[0], of_type.weights[1]})
      TANDEM_CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
                      error);
    TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(of_type.key_means)), error);
  }
  for (const PatternKernel kernel : kChoiceKernels)
    TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), error);
  for (const PatternKernel kernel :
       {join_sums_kernel, query_means_kernel, score_blocks_kernel, choose_blocks_kernel, pattern_lists_kernel})
    TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), error);
  return TANDEM_OK;
}

int64_t pattern_workspace_bytes(const DevicePatterns& call) {
  PatternCall described = {};
  return plan_room(call, &described);
}

int32_t launch_index_patterns(const DevicePatterns& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_index(call, error); code != TANDEM_OK) return code;
  if (call.sequences.max_q_len == 0 || call.sequences.max_keys == 0) return TANDEM_OK;
  PatternCall described = describe(call);
  Launches launches = {described, on, error};
  for (described.sequence = 0; described.sequence < call.sequences.n_sequences; ++described.sequence) {
    if ((call.kinds & TANDEM_PATTERN_VERTICAL_SLASH) != 0) index_weights(launches);
    if ((call.kinds & TANDEM_PATTERN_BLOCK_SPARSE) != 0) index_blocks(launches);
  }
  return launches.code;
}

int32_t launch_list_patterns(const DevicePatterns& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_lists(call, error); code != TANDEM_OK) return code;
  const int64_t n_blocks = ceil_divide(call.sequences.max_q_len, kQueryBlock);
  if (call.sequences.n_sequences == 0 || call.n_lists == 0 || n_blocks == 0) return TANDEM_OK;
  return launch_kernel(pattern_lists_kernel, grid(n_blocks, call.n_lists, call.sequences.n_sequences), kListWarps,
                       describe(call), on, error);
}

}  // namespace tandem::cuda
