// SPDX-License-Identifier: MIT
// The table between the core and the processors.
//
// The core decides which keys a query sees and where they are. A backend gets plain data, lists of jobs over runs of
// consecutive rows, and returns states. It never learns a policy's name and never calls back. The CPU backend is part of the
// library. A device backend is a module that fills a similar table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/base/status.h"
#include "lib/model/layer.h"

namespace tandem {

// For memory: interleaved over all NUMA nodes. For a job: its keys are interleaved, so any worker may take it.
inline constexpr int32_t kAllNodes = -1;

// Consecutive keys of one KV head: row i of K is at k + i * k_stride_of(layer).
struct KvRun {
  const void* k = nullptr;         // [n_tokens, k_head_dim]
  const void* v = nullptr;         // [n_tokens, v_head_dim]; = k where V aliases K (with K's row stride)
  const void* k_scales = nullptr;  // f16 [n_tokens, n_scales(k_type, k_head_dim)]; null for types without scales elsewhere
  const void* v_scales = nullptr;  // the same for V; = k_scales where V aliases K
  int64_t n_tokens = 0;
  int64_t token_idx = 0;               // index of the first key; the others follow. -1: every query sees all keys of the run
  const int32_t* positions = nullptr;  // [n_tokens] for library RoPE; null: first_position + i
  int64_t first_position = 0;
};

// Which tokens a query token t of a call may see:
//   (j < sink_end || j >= begin[t]) && j < end[t] && (j < tree_begin || bit j - tree_begin of tree_bits[t])
// `end` never decreases with t. `begin` does not either, except in a tree, where siblings reach back to the same token.
struct Visibility {
  int64_t sink_end = 0;
  const int64_t* begin = nullptr;       // [q_len]
  const int64_t* end = nullptr;         // [q_len]
  int64_t tree_begin = INT64_MAX;       // first speculative token
  const uint64_t* tree_bits = nullptr;  // [q_len][tree_words]
  int32_t tree_words = 0;
};

// A bias that is added to logits after scale and cap. For query head g of the group, query token t and key token j:
//   (slopes ? slopes[g] : 1) * (mask ? mask[t][j] : -|first_position + t - j|)
// mask is f32 or f16. Its row t begins at mask + t * row_bytes.
struct LogitBias {
  const void* mask = nullptr;
  int32_t mask_type = 0;
  int64_t row_bytes = 0;
  int64_t first_position = 0;
  const float* slopes = nullptr;  // [group_size]
};

// One (sequence, KV head) over one set of keys. Row r of q is query head r % group_size of query token r / group_size.
struct AttendJob {
  const Layer* layer = nullptr;
  const float* q = nullptr;  // [n_rows, k_head_dim], rotated where the library rotates, not scaled
  int32_t n_rows = 0;        // q_len * group_size
  bool q_is_bf16 = false;    // every element of q is a bf16 number, so bf16 products are exact
  int32_t node = 0;          // NUMA node of the keys, or kAllNodes
  int32_t n_runs = 0;
  const KvRun* runs = nullptr;             // ascending in token_idx
  int64_t n_keys = 0;                      // sum of n_tokens
  const Visibility* visibility = nullptr;  // null: every row sees every key
  float* o = nullptr;                      // [n_rows, v_head_dim], normalised within the job; 0 where a row sees nothing
  float* lse = nullptr;                    // [n_rows]; -inf where a row sees nothing
  float* logits = nullptr;                 // null or [n_rows, n_keys]: after scale and cap, -inf where masked
  bool runs_are_keys = false;              // every run is one key, so the i-th key is runs[i]
  const LogitBias* bias = nullptr;         // if set, every run has a token_idx
};

// Merges states over disjoint keys into one, row by row, in the order of the array. A learned sink, if any, comes last.
struct MergeJob {
  int64_t n_rows = 0;
  int32_t head_dim = 0;
  int32_t n_states = 0;
  const float* const* o = nullptr;    // [n_states] -> [n_rows, head_dim]
  const float* const* lse = nullptr;  // [n_states] -> [n_rows]
  const float* sinks = nullptr;       // [sink_period] or null: row r merges (0, sinks[r % sink_period])
  int32_t sink_period = 1;
  float* o_out = nullptr;    // [n_rows, head_dim]; may be o[0]
  float* lse_out = nullptr;  // [n_rows]; may be lse[0]
};

// Adds attention weights of finished queries to moving averages. For query head g of the group and key j:
//   out[g][j] = keep * out[g][j] + sum over tokens t of coeff[t] * exp(logit(t, g, j) - lse(t, g))
// A weight is 0 where the key is masked or lse is not finite. With keep = 0 the old contents of `out` do not matter.
struct WeightJob {
  const Layer* layer = nullptr;
  const float* q = nullptr;  // queries, as in AttendJob
  int32_t n_rows = 0;
  int32_t node = 0;             // NUMA node of the keys, or kAllNodes
  const KvRun* runs = nullptr;  // runs that hold n_keys keys
  int64_t first_offset = 0;     // index of the first key in runs[0]
  int64_t n_keys = 0;
  const Visibility* visibility = nullptr;
  const float* lse = nullptr;    // [n_rows], over all keys
  const float* coeff = nullptr;  // [n_rows / group_size]
  float keep = 0.0f;
  float* out = nullptr;  // [group_size] rows of n_keys
  int64_t out_stride = 0;
};

// Query rows that a ChunkJob processes at a time, and the most that a DescentJob has.
inline constexpr int32_t kJudgedRows = 64;

// Computes the largest logit of some query rows in each chunk of keys. Over all rows r and the keys j of chunk c:
//   largest[c] = max of sm_scale * q[r] . k[j] - shift[r]
// This is before the soft cap. shift is 0, or with `normalises` the log of the sum of exp(logit of the row) over all n_keys
// keys. Chunk c is keys [c * chunk_keys, (c + 1) * chunk_keys) of the runs. Keys behind the last chunk count only in the
// sums. The result for a chunk with a NaN is undefined.
struct ChunkJob {
  const Layer* layer = nullptr;
  const float* q = nullptr;  // [n_rows, k_head_dim], as in AttendJob; rows may be of any query heads
  int32_t n_rows = 0;
  const KvRun* runs = nullptr;  // v is not read
  int64_t n_keys = 0;
  int64_t chunk_keys = 1;  // a power of two up to 256
  int64_t n_chunks = 0;
  bool normalises = false;
  float* row_largest = nullptr;  // work space with normalises: [min(n_rows, kJudgedRows), n_chunks]
  // Null, or output with normalises, for up to kJudgedRows rows. A caller that cuts a row's keys into several jobs knows the
  // shifts only when all jobs are done. Then `largest` is not written. row_largest gets each row's largest logit in each
  // chunk. row_sums [n_rows, 2] gets each row's largest logit and the sum over all n_keys keys of exp(logit - this largest).
  float* row_sums = nullptr;
  float* largest = nullptr;  // [n_chunks]
};

// Descends from each chunk of keys to a representative key by halving, for each query head separately. Each step continues
// in the half whose first key has the larger logit, or in the first half if both are equal. A key's logit is the largest
// over the rows of the head. largest[c] is the largest logit, over the heads, of their representatives. Only for keys of
// types without separate scales and without library RoPE.
struct DescentJob {
  const Layer* layer = nullptr;
  const float* q = nullptr;                 // [n_heads, n_rows, k_head_dim], as in AttendJob
  int32_t n_heads = 0, n_rows = 0;          // n_rows: up to kJudgedRows
  const void* const* first_keys = nullptr;  // [n_chunks]; the other keys of a chunk follow the first in memory
  int64_t chunk_keys = 1;                   // a power of two
  int64_t n_chunks = 0;
  float* largest = nullptr;  // [n_chunks]
};

// Lets a caller cancel a call and see its progress. done and total are in a unit of the backend's choice.
//
// A call that has seen its flag set stays cancelled, even if the caller clears the flag at once: some thread may already
// have skipped work.
struct Watch {
  const int32_t* cancel = nullptr;  // not 0: stop; any thread may set it
  // Called on the calling thread. Returns not 0: stop.
  int32_t (*progress)(int64_t done, int64_t total, void* user) = nullptr;
  void* user = nullptr;
  // Set with `cancel`. Belongs to the call: 0 at its begin, 1 once a thread has seen the flag set.
  int32_t* was_seen = nullptr;

  bool is_cancelled() const {
    if (cancel == nullptr) return false;
    if (__atomic_load_n(was_seen, __ATOMIC_RELAXED) != 0) return true;
    if (__atomic_load_n(cancel, __ATOMIC_RELAXED) == 0) return false;
    __atomic_store_n(was_seen, 1, __ATOMIC_RELAXED);
    return true;
  }
  Status check() const {
    return is_cancelled() ? fail(TANDEM_ERROR_CANCELLED, "cancel", "cancel is set: the call was stopped") : Status();
  }
};

using TaskFn = void (*)(void* context, int64_t task_idx, int32_t worker_idx);

inline constexpr uint32_t kBackendAbi = 1;

// Tables only grow at the end; struct_size is the size of a table. Calls may come from any thread. A backend runs them one
// after another, except those marked concurrent.
struct BackendTable {
  uint32_t abi;
  uint32_t struct_size;
  const char* name;
  // Computes every job. Reads nothing outside the runs and writes only o, lse and logits. Finished on return.
  Status (*attend)(void* self, const AttendJob* jobs, int32_t n_jobs);
  Status (*merge)(void* self, const MergeJob* jobs, int32_t n_jobs);
  // Computes every job, each on one worker, with the logits of attend().
  void (*attn_weights)(void* self, const WeightJob* jobs, int32_t n_jobs);
  // maw[j] = (1 - alpha) * maw[j] + alpha * exp(logits[j] - lse); an lse that is not finite gives weights of 0. Concurrent.
  void (*observe)(void* self, float* maw, const float* logits, int64_t n_keys, float lse, float alpha);
  // Convert n elements to and from f32, rounded to nearest even; NaN stays NaN. scales is null for types without scales.
  // With scales the n elements are one row (tandem.h describes the rounding), and a NaN or infinity makes its whole group
  // NaN. Concurrent.
  void (*to_f32)(void* self, int32_t dtype, const void* from, const void* scales, float* to, int64_t n);
  void (*from_f32)(void* self, int32_t dtype, const float* from, void* to, void* scales, int64_t n);
  // Runs task(context, i, worker) for i in [0, n_tasks) on the workers, of which the caller is one.
  void (*run)(void* self, int64_t n_tasks, TaskFn task, void* context);
  // Keep the workers awake between wake() and rest() (around a step).
  void (*wake)(void* self);
  void (*rest)(void* self);
  // Text for the engine report: a JSON object. Same contract as snprintf.
  int64_t (*report)(void* self, char* buffer, int64_t buffer_bytes);
  // Place memory on NUMA node `node` of n_nodes() >= 1, or on kAllNodes. Best effort: the report counts failures. place is
  // concurrent.
  int32_t (*n_nodes)(void* self);
  void (*place)(void* self, void* data, int64_t bytes, int32_t node);
  void (*destroy)(void* self);
  // Keeps the calling thread, which calls attend() and run() often, on CPUs to which no worker is bound, if there are
  // enough. Best effort. Concurrent.
  void (*keep_clear)(void* self);
  // attend() that checks `watch` between pieces of work. After CANCELLED o, lse and logits are undefined.
  Status (*attend_watched)(void* self, const AttendJob* jobs, int32_t n_jobs, const Watch& watch);
  // merge() that checks `watch.cancel` only. After CANCELLED o_out and lse_out are undefined.
  Status (*merge_watched)(void* self, const MergeJob* jobs, int32_t n_jobs, const Watch& watch);
  // run() during which nothing is attended, so that its tasks may call judge_chunks() and descend_chunks().
  void (*run_alone)(void* self, int64_t n_tasks, TaskFn task, void* context);
  // Called from a task of run_alone(), with its worker_idx.
  void (*judge_chunks)(void* self, const ChunkJob& job, int32_t worker_idx);
  void (*descend_chunks)(void* self, const DescentJob& job, int32_t worker_idx);
  int32_t (*n_workers)(void* self);  // upper bound of worker_idx
};

struct Backend {
  const BackendTable* table = nullptr;
  void* self = nullptr;
};

struct CpuOptions {
  int32_t n_threads = 0;      // 0: as the affinity mask and quota allow, less n_others
  int32_t n_others = 0;       // threads that are busy at the same time as the workers and their caller
  const char* isa = nullptr;  // null: the best
  int64_t spin_ns = 50'000;
  bool pin_threads = true;
  int32_t matmul_rows = 0;      // query rows from which a job uses matrix products; 0: from a table, -1: measured
  tandem_run_fn run = nullptr;  // runs tasks on n_threads threads of the caller's; null: the backend starts its own
  void* run_user = nullptr;
};

// Returns the names of this build's instruction sets, best first, null past the end; and whether this processor has one.
const char* cpu_isa_name(int32_t idx);
bool cpu_isa_available(const char* name);
Status create_cpu_backend(const CpuOptions& options, Backend* backend);

}  // namespace tandem
