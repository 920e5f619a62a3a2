// SPDX-License-Identifier: MIT
// How a list of attention jobs is cut for the workers.
//
//   job    one (sequence, KV head), given by the core
//   unit   a piece of a job's keys x a tile of its query rows: one call of a kernel
//   task   consecutive units that one worker takes at once
//
// Units depend only on their job. So the result is bit for bit the same for every number of threads, and whatever other jobs
// the call has. A job of n keys is cut into pieces of whole blocks that become smaller. Each piece takes a quarter of the
// keys that are left (an eighth in layers of few heads), at most 2 sqrt(64 n) keys and at least a block. The first pieces of
// all jobs come first in the list, so the last units of a call are small and all workers finish together. 8K keys make 11
// pieces and 128K keys 34. Starting and joining a piece takes time, so a job of fewer than 2,048 keys is cut into four
// (eight) equal pieces. The worker that finishes last merges the states of all pieces in their order.
//
// A job for matrix products has hundreds of rows. It is not cut when its layer has enough heads and tiles of rows for all
// workers. In layers with fewer (decode with MLA: one KV head, one tile of 128 rows) it is cut as well, so that a sequence
// has about as many units as elsewhere. Their states are large (256 KiB each), so all workers merge them once the last unit
// is done.
//
// Tasks depend on the number of workers. Tiny neighbours (the heads of a short sequence) share a task. Towards the end a
// task has fewer units.
//
// If the rows of all heads of a token lie side by side, the units of one piece may form a band. One worker attends a band, a
// block of keys of each head in turn (cpu/backend.cc). The arithmetic is the same, in an order that suits the memory. A band
// is as much work as the units of all its heads together, so bands are made only if each worker gets several of them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "cpu/crossover.h"
#include "cpu/kernels/kernels.h"
#include "cpu/pool.h"
#include "lib/base/status.h"

namespace tandem::cpu {

// How a job is cut into pieces of keys and tiles of rows.
struct JobCut {
  int32_t job_idx;
  bool by_matmul;
  int32_t rows;  // rows of a tile
  int64_t n_tiles;
  int64_t most_keys, least_keys, step;  // keys of a piece: bounds and granularity
  int32_t share_bits;  // a piece has 2^-share_bits of the keys that are left, in whole steps, within the bounds
  int64_t n_pieces;
  int64_t first_start, first_group;  // first start and first group of the job
  int64_t piece, key_begin;          // the next piece and its first key
  int64_t row_bytes;                 // bytes of a key and its value
  int32_t n_heads;                   // heads of the bands that begin with this job's units; 1: no band begins there
};

// True if the job is computed by matrix products.
bool use_matmul(const AttendJob& job, const Crossover& crossover);

struct AttendUnit {
  int32_t n_heads = 1;  // above 1: this unit and the next n_heads - 1 units are a band
  int32_t job_idx = 0;
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t part_idx = 0;    // index of its part in the group
  int64_t group_idx = -1;  // -1: the rows have no other piece
  int64_t key_begin = 0;
  int64_t key_end = 0;
  KeyRef first;
  int64_t cost = 0;  // bytes; every unit counts as if memory bandwidth bounded it
  bool by_matmul = false;
};

// The pieces of one tile of rows.
struct AttendGroup {
  int32_t job_idx = 0;
  int32_t row_begin = 0;
  int64_t floats_at = 0;  // offset of its partial states
  bool by_matmul = false;
  PartialStates states;  // `parts` is set once the floats are allocated
};

// A buffer that only grows. It does not construct its elements and drops them when it grows.
template <class T>
class GrowBuffer {
 public:
  T* data() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_.get()[i]; }
  [[nodiscard]] bool reserve(int64_t n) {
    if (n <= capacity_) return true;
    const size_t bytes = (static_cast<size_t>(n + n / 4) * sizeof(T) + 63) / 64 * 64;
    T* data = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (data == nullptr) return false;
    data_.reset(data);  // drops the old contents
    capacity_ = static_cast<int64_t>(bytes / sizeof(T));
    return true;
  }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t capacity_ = 0;
};

class AttendPlan {
 public:
  // Fails only with OUT_OF_MEMORY. Allocates only for a shape larger than all before. `pool` may be null; its workers share
  // the work when jobs have many runs (single keys, for example).
  Status make(const AttendJob* jobs, int32_t n_jobs, int32_t n_workers, const Crossover& crossover, Pool* pool = nullptr);

  int64_t n_units() const { return n_units_; }
  int64_t n_tasks() const { return n_tasks_; }
  int64_t n_groups() const { return n_groups_; }
  int64_t n_floats() const { return n_floats_; }            // floats of all partial states
  int64_t n_matmul_rows() const { return n_matmul_rows_; }  // rows of all groups computed by matrix products
  const AttendUnit& unit(int64_t i) const { return units_[i]; }
  AttendGroup& group(int64_t i) const { return groups_[i]; }
  // first unit of the task; task_begin(n_tasks()) = n_units()
  int64_t task_begin(int64_t task) const { return task_begins_[task]; }
  const int32_t* task_nodes() const { return task_nodes_.data(); }

 private:
  Status cut_jobs(const AttendJob* jobs, int32_t n_jobs, const Crossover& crossover);
  void find_bands(const AttendJob* jobs, int32_t n_jobs, int32_t n_workers);
  void find_starts(const AttendJob& job, const JobCut& cut);
  void add_groups(const AttendJob& job, JobCut* cut);
  void add_piece(const AttendJob& job, JobCut* cut);
  void cut_tasks(const AttendJob* jobs, int32_t n_workers);

  GrowBuffer<JobCut> cuts_;    // jobs that still have pieces
  GrowBuffer<KeyRef> starts_;  // first keys of all pieces
  GrowBuffer<AttendUnit> units_;
  GrowBuffer<AttendGroup> groups_;
  GrowBuffer<int64_t> task_begins_;
  GrowBuffer<int32_t> task_nodes_;
  int64_t n_units_ = 0, n_tasks_ = 0, n_groups_ = 0, n_floats_ = 0, n_matmul_rows_ = 0;
};

}  // namespace tandem::cpu
