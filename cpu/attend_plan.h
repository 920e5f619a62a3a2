// SPDX-License-Identifier: MIT
// How a list of attention jobs is cut for the workers.
//
//   job    one (sequence, KV head), given by the core
//   unit   a piece of a job's keys x a tile of its query rows: one call of a kernel
//   task   consecutive units that one worker takes at once
//
// Units depend on the job alone, so an answer is bit for bit the same for every number of threads and whatever else is
// in the call. A job of n keys is cut into pieces of whole blocks that become smaller: a quarter of what is left (an eighth
// in layers of few heads), 2 sqrt(64 n) keys at most and a block at least. First come the first pieces of all jobs, so that
// the last units of a call are small and all workers finish together. 8K make 11 pieces, 128K 34, for each has to be begun
// and joined; below 2,048 keys that would take too long, and four (eight) pieces are alike. Their states are joined in their
// order by the worker that finishes last.
//
// A job for matrix products has hundreds of rows and is not cut where its layer has as many heads and tiles of rows.
// Where it has fewer (decode with MLA: one KV head, one tile of 128 rows) it is cut as well, so that the units of one
// sequence are about as many. Their states are large, 256 KiB each: all workers join them, when the last unit is done.
//
// Tasks depend on the number of workers: tiny neighbours (the heads of a short sequence) share one, fewer towards the end.
//
// Where the rows of all heads of a token lie side by side, the units of one piece may form a band, which one worker attends
// a block of keys of each head in turn (cpu/backend.cc): the same arithmetic in an order that suits the memory. A band is as
// much work as all heads' units, so there are bands only if each worker gets several.
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
  int32_t rows;  // of a tile
  int64_t n_tiles;
  int64_t most_keys, least_keys, step;  // of a piece
  int32_t share_bits;  // a piece is 2^-share_bits of the keys that are left, in whole steps, within the bounds
  int64_t n_pieces;
  int64_t first_start, first_group;  // of the job
  int64_t piece, key_begin;          // of the piece that comes next
  int64_t row_bytes;                 // of a key and its value
  int32_t n_heads;                   // of the bands that begin with this job's units; 1: no band begins there
};

// Whether a job goes through matrix products.
bool use_matmul(const AttendJob& job, const Crossover& crossover);

struct AttendUnit {
  int32_t n_heads = 1;  // more: this unit and those behind it, so many in all, are a band
  int32_t job_idx = 0;
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t part_idx = 0;    // of its group
  int64_t group_idx = -1;  // -1: the only piece of its rows
  int64_t key_begin = 0;
  int64_t key_end = 0;
  KeyRef first;
  int64_t cost = 0;  // bytes, as if bound by memory
  bool by_matmul = false;
};

// The pieces of one tile of rows.
struct AttendGroup {
  int32_t job_idx = 0;
  int32_t row_begin = 0;
  int64_t floats_at = 0;  // of its partial states
  bool by_matmul = false;
  PartialStates states;  // parts is set when the floats have a place
};

// Memory that only grows. T needs no construction.
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
    data_.reset(data);  // what was there is not kept
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
  // Fails with OUT_OF_MEMORY alone; allocates only for a shape larger than any before. pool: whose workers share the work
  // where jobs have many runs (of single keys, say), or null.
  Status make(const AttendJob* jobs, int32_t n_jobs, int32_t n_workers, const Crossover& crossover, Pool* pool = nullptr);

  int64_t n_units() const { return n_units_; }
  int64_t n_tasks() const { return n_tasks_; }
  int64_t n_groups() const { return n_groups_; }
  int64_t n_floats() const { return n_floats_; }            // of all partial states
  int64_t n_matmul_rows() const { return n_matmul_rows_; }  // of all groups by matmul
  const AttendUnit& unit(int64_t i) const { return units_[i]; }
  AttendGroup& group(int64_t i) const { return groups_[i]; }
  int64_t task_begin(int64_t task) const { return task_begins_[task]; }  // first unit; [n_tasks()] = n_units()
  const int32_t* task_nodes() const { return task_nodes_.data(); }

 private:
  Status cut_jobs(const AttendJob* jobs, int32_t n_jobs, const Crossover& crossover);
  void find_bands(const AttendJob* jobs, int32_t n_jobs, int32_t n_workers);
  void find_starts(const AttendJob& job, const JobCut& cut);
  void add_groups(const AttendJob& job, JobCut* cut);
  void add_piece(const AttendJob& job, JobCut* cut);
  void cut_tasks(const AttendJob* jobs, int32_t n_workers);

  GrowBuffer<JobCut> cuts_;    // of the jobs with pieces left
  GrowBuffer<KeyRef> starts_;  // of all pieces
  GrowBuffer<AttendUnit> units_;
  GrowBuffer<AttendGroup> groups_;
  GrowBuffer<int64_t> task_begins_;
  GrowBuffer<int32_t> task_nodes_;
  int64_t n_units_ = 0, n_tasks_ = 0, n_groups_ = 0, n_floats_ = 0, n_matmul_rows_ = 0;
};

}  // namespace tandem::cpu
