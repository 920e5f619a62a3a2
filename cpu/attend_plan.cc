// SPDX-License-Identifier: MIT
#include "cpu/attend_plan.h"

#include <algorithm>
#include <cmath>

#include "lib/model/dtype.h"

namespace tandem::cpu {
namespace {

constexpr int64_t kMinTaskCost = 64 << 10;  // bytes: some microseconds of work, enough to justify handing a task over
constexpr int64_t kMatmulTaskRows = 512, kMatmulTileKeys = 512, kMaxMatmulPieces = 128;
constexpr int64_t kFewMatmulRows = 64, kLeastMatmulUnits = 16;
constexpr int64_t kMaxLargePieces = 64;  // for 1M keys and more
// walking through them takes some microseconds, more than handing the walk to workers costs
constexpr int64_t kManyRuns = 4096;
constexpr int64_t kUncutKeys = 1024;  // a job with fewer keys is one piece
constexpr int64_t kFewKeys = 2048;    // jobs with fewer keys get equal pieces
constexpr int64_t kEvenStep = 16;     // keys that the matrix unit takes together
// If heads are interleaved, a worker takes the same keys of one head after the other. The keys are few enough for its
// second-level cache, into which the processor has fetched the lines of neighbouring heads (2 to 10 % on 16 threads).
constexpr int64_t kInterleavedKeys = 512, kMaxInterleavedPieces = 512;
// at least; with fewer, the last bands would keep a few workers busy while the others wait
constexpr int64_t kBandsOfWorker = 8;
// heads from which on a quarter of the remaining keys of each is enough for 16 workers
constexpr int32_t kManyHeads = 8;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

int64_t wanted_piece(int64_t n_keys) { return static_cast<int64_t>(std::sqrt(64.0 * static_cast<double>(n_keys))); }

int64_t whole_tiles(int64_t n_keys) {
  return std::max<int64_t>(1, (n_keys + kMatmulTileKeys / 2) / kMatmulTileKeys) * kMatmulTileKeys;
}

// Returns the keys of a piece, larger by the number of heads of the layer and of row tiles of the job, because these already
// multiply the units. A job with few rows and few keys (a decoded token of a layer with few heads, over selected keys) would
// have fewer units than workers. Its pieces shrink, down to a tile of keys, until the heads of a sequence make
// kLeastMatmulUnits units.
int64_t matmul_piece_keys(const AttendJob& job, int64_t n_tiles) {
  const int64_t alone = whole_tiles(std::max(wanted_piece(job.n_keys), job.n_keys / kMaxMatmulPieces));
  const int64_t n_units = n_tiles * job.layer->n_kv_heads, wanted = alone * n_units;
  int64_t n_pieces = (job.n_keys + wanted / 2) / wanted;
  if (job.n_rows <= kFewMatmulRows)
    n_pieces = std::max(n_pieces, std::min(job.n_keys / kMatmulTileKeys, divide_up(kLeastMatmulUnits, n_units)));
  return n_pieces > 1 ? whole_tiles(divide_up(job.n_keys, n_pieces)) : job.n_keys;
}

// Returns the rows of one tile: the tiles are even and consist of whole tiles of the kernel.
int32_t tile_rows(int32_t n_rows, int64_t most) {
  const int64_t n_tiles = std::max<int64_t>(1, divide_up(n_rows, most));
  return static_cast<int32_t>(std::min(most, round_up(divide_up(n_rows, n_tiles), 4)));
}

int64_t keys_of_next(const JobCut& cut, int64_t n_left) {
  // Avoids divisions: a call of one sequence calls this some hundred times before its workers begin.
  const int64_t share = (n_left + (int64_t{1} << cut.share_bits) - 1) >> cut.share_bits;
  return std::min(n_left, std::clamp((share + cut.step - 1) & -cut.step, cut.least_keys, cut.most_keys));
}

// True if heads take turns in memory, so that rows of other heads lie between two rows of a head.
bool are_interleaved(const Layer& layer) { return k_stride_of(layer) > row_bytes(layer.k_type, layer.k_head_dim); }

// Chooses the keys of the pieces for the kernels that read the stored rows.
void cut_keys(const AttendJob& job, JobCut* cut) {
  const int64_t n = job.n_keys;
  cut->share_bits = job.layer->n_kv_heads >= kManyHeads ? 2 : 3;
  cut->step = cut->least_keys = kBlockKeys;
  cut->most_keys = round_up(std::max(2 * wanted_piece(n), n / kMaxLargePieces), kBlockKeys);
  if (n < kFewKeys) {
    cut->step = kEvenStep;
    cut->least_keys = cut->most_keys = round_up(divide_up(n, int64_t{1} << cut->share_bits), kEvenStep);
  }
  if (n < kUncutKeys) cut->least_keys = cut->most_keys = kUncutKeys;
  if (n >= kFewKeys && are_interleaved(*job.layer))
    cut->least_keys = cut->most_keys = round_up(std::max(kInterleavedKeys, n / kMaxInterleavedPieces), kBlockKeys);
}

int64_t stored_row_bytes(const Layer& layer) {
  return row_bytes(layer.k_type, layer.k_head_dim) + scale_bytes(layer.k_type, layer.k_head_dim) +
         row_bytes(layer.v_type, layer.v_head_dim) + scale_bytes(layer.v_type, layer.v_head_dim);
}

// True for the heads of a sequence, which are cut alike.
bool are_alike(const AttendJob& a, const AttendJob& b) {
  return a.layer == b.layer && a.n_keys == b.n_keys && a.n_rows == b.n_rows && a.q_is_bf16 == b.q_is_bf16;
}

// Returns the number of consecutive jobs, the first included, that attend the same keys and whose rows together fill each
// token's row. These are all heads of a sequence if its K and V are token-major. 1: only the first job.
int32_t heads_side_by_side(const AttendJob* jobs, int32_t n_jobs) {
  const AttendJob& first = jobs[0];
  const Layer& layer = *first.layer;
  const int64_t k_bytes = row_bytes(layer.k_type, layer.k_head_dim), v_bytes = row_bytes(layer.v_type, layer.v_head_dim);
  const int64_t n_heads = k_stride_of(layer) / k_bytes;
  if (n_heads < 2 || n_heads > n_jobs || layer.v_aliases_k) return 1;
  if (n_heads * k_bytes != k_stride_of(layer) || n_heads * v_bytes != v_stride_of(layer)) return 1;
  const auto lies_at = [](const void* rows, const void* of_first, int64_t bytes) {
    return rows == static_cast<const uint8_t*>(of_first) + bytes;
  };
  for (int64_t i = 0; i < n_heads; ++i) {
    const AttendJob& job = jobs[i];
    if (job.n_runs != 1 || job.node != first.node || !are_alike(first, job)) return 1;
    if (!lies_at(job.runs->k, first.runs->k, i * k_bytes) || !lies_at(job.runs->v, first.runs->v, i * v_bytes)) return 1;
  }
  return static_cast<int32_t>(n_heads);
}

JobCut cut_of(const AttendJob& job, int32_t job_idx, const Crossover& crossover) {
  JobCut cut{};
  cut.job_idx = job_idx;
  cut.by_matmul = use_matmul(job, crossover);
  cut.rows = std::max(1, tile_rows(job.n_rows, cut.by_matmul ? kMatmulTaskRows : kSpanRows));
  cut.n_tiles = divide_up(job.n_rows, cut.rows);
  if (cut.by_matmul) {
    cut.step = 1;
    cut.least_keys = cut.most_keys = matmul_piece_keys(job, cut.n_tiles);
  } else {
    cut_keys(job, &cut);
  }
  for (int64_t left = job.n_keys; left > 0; left -= keys_of_next(cut, left)) ++cut.n_pieces;
  cut.n_pieces = std::max<int64_t>(1, cut.n_pieces);
  cut.row_bytes = stored_row_bytes(*job.layer);
  cut.n_heads = 1;
  return cut;
}

}  // namespace

bool use_matmul(const AttendJob& job, const Crossover& crossover) {
  if (job.n_keys == 0 || job.bias != nullptr) return false;  // matrix products add no bias
  const Layer& layer = *job.layer;
  const bool in_bf16 = job.q_is_bf16 && layer.k_type == TANDEM_BF16 && layer.v_type == TANDEM_BF16 && layer.rope == nullptr;
  return job.n_rows >= (in_bf16 ? crossover.rows_bf16 : crossover.rows);
}

void AttendPlan::add_groups(const AttendJob& job, JobCut* cut) {
  cut->first_group = n_groups_;
  for (int64_t tile = 0; cut->n_pieces > 1 && tile < cut->n_tiles; ++tile) {
    AttendGroup& group = groups_[n_groups_++];
    group.job_idx = cut->job_idx;
    group.row_begin = static_cast<int32_t>(tile) * cut->rows;
    group.floats_at = n_floats_;
    group.states.parts = nullptr;
    group.states.n_parts = static_cast<int32_t>(cut->n_pieces);
    group.states.n_rows = std::min(cut->rows, job.n_rows - group.row_begin);
    group.states.head_dim = job.layer->v_head_dim;
    group.states.stride = round_up(int64_t{group.states.n_rows} * (group.states.head_dim + 2), 16);
    n_floats_ += group.states.stride * cut->n_pieces;
    group.by_matmul = cut->by_matmul;
    if (group.by_matmul) n_matmul_rows_ += group.states.n_rows;
  }
}

void AttendPlan::add_piece(const AttendJob& job, JobCut* cut) {
  const int64_t n_keys = keys_of_next(*cut, job.n_keys - cut->key_begin);
  for (int64_t tile = 0; tile < cut->n_tiles; ++tile) {
    AttendUnit& unit = units_[n_units_++];
    unit.job_idx = cut->job_idx;
    unit.n_heads = cut->n_heads;
    unit.row_begin = static_cast<int32_t>(tile) * cut->rows;
    unit.row_end = std::min(job.n_rows, unit.row_begin + cut->rows);
    unit.part_idx = static_cast<int32_t>(cut->piece);
    unit.group_idx = cut->n_pieces > 1 ? cut->first_group + tile : -1;
    unit.key_begin = cut->key_begin;
    unit.key_end = cut->key_begin + n_keys;
    unit.first = starts_[cut->first_start + cut->piece];
    unit.by_matmul = cut->by_matmul;
    unit.cost = n_keys * cut->row_bytes * (8 + unit.row_end - unit.row_begin) / 8;
  }
  ++cut->piece;
  cut->key_begin += n_keys;
}

void AttendPlan::find_bands(const AttendJob* jobs, int32_t n_jobs, int32_t n_workers) {
  for (int32_t i = 0; i < n_jobs; i += cuts_[i].n_heads) {
    JobCut& cut = cuts_[i];
    if (cut.by_matmul || cut.n_tiles > 1 || cut.n_pieces < kBandsOfWorker * n_workers) continue;
    cut.n_heads = heads_side_by_side(jobs + i, n_jobs - i);
  }
}

void AttendPlan::find_starts(const AttendJob& job, const JobCut& cut) {
  KeyRef at;
  int64_t n_left = job.n_keys;
  for (int64_t piece = 0;; ++piece) {
    starts_[cut.first_start + piece] = at;
    if (piece + 1 == cut.n_pieces) return;
    const int64_t n_keys = keys_of_next(cut, n_left);
    n_left -= n_keys;
    if (job.runs_are_keys) {
      at.run_idx += n_keys;
      continue;
    }
    at.offset += n_keys;
    while (at.run_idx < job.n_runs && at.offset >= job.runs[at.run_idx].n_tokens)
      at.offset -= job.runs[at.run_idx++].n_tokens;
  }
}

void AttendPlan::cut_tasks(const AttendJob* jobs, int32_t n_workers) {
  int64_t left = 0;
  for (int64_t i = 0; i < n_units_; ++i) left += units_[i].cost;
  n_tasks_ = 0;
  for (int64_t i = 0; i < n_units_;) {
    const int64_t wanted = std::max(kMinTaskCost, left / (4 * int64_t{n_workers}));
    const int32_t node = jobs[units_[i].job_idx].node;
    task_begins_[n_tasks_] = i;
    task_nodes_[n_tasks_++] = node;
    int64_t cost = 0;
    do {
      for (const int64_t end = i + units_[i].n_heads; i < end; ++i) cost += units_[i].cost;
    } while (i < n_units_ && jobs[units_[i].job_idx].node == node && cost + units_[i].cost <= wanted);
    left -= cost;
  }
  task_begins_[n_tasks_] = n_units_;
}

Status AttendPlan::cut_jobs(const AttendJob* jobs, int32_t n_jobs, const Crossover& crossover) {
  if (!cuts_.reserve(n_jobs)) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for a plan of %d jobs", n_jobs);
  int64_t n_units = 0, n_groups = 0, n_starts = 0;
  for (int32_t i = 0; i < n_jobs; ++i) {
    JobCut& cut = cuts_[i];
    if (i > 0 && are_alike(jobs[i - 1], jobs[i])) {
      cut = cuts_[i - 1];
      cut.job_idx = i;
    } else {
      cut = cut_of(jobs[i], i, crossover);
    }
    cut.first_start = n_starts;
    n_starts += cut.n_pieces;
    n_units += cut.n_pieces * cut.n_tiles;
    n_groups += cut.n_tiles;
  }
  if (!units_.reserve(n_units) || !groups_.reserve(n_groups) || !starts_.reserve(n_starts) ||
      !task_begins_.reserve(n_units + 1) || !task_nodes_.reserve(n_units))
    return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for a plan of %lld units", static_cast<long long>(n_units));
  return {};
}

Status AttendPlan::make(const AttendJob* jobs, int32_t n_jobs, int32_t n_workers, const Crossover& crossover, Pool* pool) {
  TANDEM_TRY(cut_jobs(jobs, n_jobs, crossover));
  find_bands(jobs, n_jobs, n_workers);
  struct Search {
    AttendPlan* plan;
    const AttendJob* jobs;
  } search{this, jobs};
  const auto find = [](void* context, int64_t i, int32_t) {
    const Search& of = *static_cast<const Search*>(context);
    of.plan->find_starts(of.jobs[i], of.plan->cuts_[i]);
  };
  int64_t n_runs = 0;
  for (int32_t i = 0; i < n_jobs; ++i) n_runs += jobs[i].runs_are_keys ? 1 : jobs[i].n_runs;
  if (pool != nullptr && n_runs >= kManyRuns)
    pool->run(n_jobs, find, &search);
  else
    for (int32_t i = 0; i < n_jobs; ++i) find(&search, i, 0);
  n_units_ = n_groups_ = n_floats_ = n_matmul_rows_ = 0;
  for (int32_t i = 0; i < n_jobs; ++i) add_groups(jobs[i], &cuts_[i]);
  for (int32_t n_left = n_jobs; n_left > 0;) {
    int32_t n_kept = 0;
    for (int32_t i = 0; i < n_left; ++i) {
      JobCut& cut = cuts_[i];
      add_piece(jobs[cut.job_idx], &cut);
      if (cut.piece == cut.n_pieces) continue;
      if (n_kept < i) cuts_[n_kept] = cut;
      ++n_kept;
    }
    n_left = n_kept;
  }
  cut_tasks(jobs, n_workers);
  return {};
}

}  // namespace tandem::cpu
