// SPDX-License-Identifier: MIT
// The CPU backend: kernels of one instruction set on a pool of workers.
//
// attend() makes a plan (cpu/attend_plan.h), makes room for partial states, and runs the tasks. A unit that is its job's
// only piece writes the job's o and lse. Other units leave partial states, and the worker that finishes a tile's last piece
// merges them in their order. All workers merge the partial states of matrix products, at the end. Buffers grow when a call
// has a larger shape than all earlier ones, before any work begins.
//
// Only one attend, attn_weights or run_alone runs at a time: the mutex guards plan, partial states and the workers' scratch.
// Functions marked concurrent in lib/tables/backend.h use only the calling thread's stack.
#include "cpu/backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>

#include "cpu/attend_plan.h"
#include "cpu/matmul_attend.h"
#include "lib/model/dtype.h"

namespace tandem::cpu {

namespace {

struct CpuBackend {
  const KernelTable* kernels = nullptr;
  Crossover crossover;
  std::unique_ptr<Pool> pool;
  std::mutex attend_mutex;
  AttendPlan plan;
  GrowBuffer<float> parts;
  GrowBuffer<std::atomic<int32_t>> parts_left;  // [n_groups]
  GrowBuffer<SpanScratch> scratch;              // [n_workers]
  GrowBuffer<int32_t> weight_nodes;             // [n_jobs]
  std::unique_ptr<MatmulAttend> matmul;         // created for the first call that needs it
};

CpuBackend& backend_of(void* self) { return *static_cast<CpuBackend*>(self); }

// Progress of a watched call, and the reason to stop it.
struct Watched {
  const Watch& watch;
  int64_t total = 0;  // cost of all units
  std::atomic<int64_t> done{0};
  std::atomic<int32_t> answer{0};  // last answer of the progress callback; not 0: stop

  bool stops() const { return answer.load(std::memory_order_relaxed) != 0 || watch.is_cancelled(); }
  static bool stops_of(const void* watched) { return static_cast<const Watched*>(watched)->stops(); }
  void tell(int64_t n) {
    if (watch.progress != nullptr && !stops()) answer.store(watch.progress(n, total, watch.user), std::memory_order_relaxed);
  }
  // Worker 0 is the calling thread and reports progress. The end is reported once all workers have finished.
  void count(int64_t cost, int32_t worker_idx) {
    const int64_t n = done.fetch_add(cost, std::memory_order_relaxed) + cost;
    if (worker_idx == 0 && n < total) tell(n);
  }
};

struct AttendCall {
  CpuBackend* backend;
  const AttendJob* jobs;
  Watched* watched;  // null: not watched
};

// Merges rows of a group whose pieces are all done.
void join_rows(const AttendCall& call, const AttendGroup& group, int64_t row_begin, int64_t row_end) {
  const AttendJob& job = call.jobs[group.job_idx];
  call.backend->kernels->combine(group.states, row_begin, row_end, job.o + int64_t{group.row_begin} * group.states.head_dim,
                                 job.lse + group.row_begin);
}

void finish_unit(const AttendCall& call, const AttendUnit& unit) {
  CpuBackend& backend = *call.backend;
  if (unit.group_idx < 0 || unit.by_matmul) return;
  if (backend.parts_left[unit.group_idx].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const AttendGroup& group = backend.plan.group(unit.group_idx);
  join_rows(call, group, 0, group.states.n_rows);
}

// The rows of all groups are one range, cut into even shares.
constexpr int64_t kJoinedRows = 8;  // rows of a share

void join_share(void* context, int64_t share, int32_t) {
  const AttendCall& call = *static_cast<const AttendCall*>(context);
  const AttendPlan& plan = call.backend->plan;
  const int64_t begin = share * kJoinedRows, end = begin + kJoinedRows;
  int64_t first = 0;  // first row of the group in the range
  for (int64_t i = 0; i < plan.n_groups() && first < end; ++i) {
    const AttendGroup& group = plan.group(i);
    if (!group.by_matmul) continue;
    const int64_t from = std::max<int64_t>(begin - first, 0), to = std::min<int64_t>(end - first, group.states.n_rows);
    if (from < to) join_rows(call, group, from, to);
    first += group.states.n_rows;
  }
}

// The units of one worker, one after another. The worker takes its next task at the end of the unit before, as soon as it
// has to know what comes next. It can then prefetch for that task; without this, each unit would begin with some
// microseconds of waiting.
class UnitQueue {
 public:
  UnitQueue(const AttendPlan& plan, TaskSource& tasks) : plan_(plan), tasks_(tasks) {}
  // Returns the unit that take() will return, or null.
  const AttendUnit* next() {
    if (unit_ == end_ && !is_empty_) {
      const int64_t task = tasks_.next();
      is_empty_ = task < 0;
      if (!is_empty_) unit_ = plan_.task_begin(task), end_ = plan_.task_begin(task + 1);
    }
    return unit_ < end_ ? &plan_.unit(unit_) : nullptr;
  }
  // Takes a unit, or the first unit of a band. The other units of the band follow it in memory.
  const AttendUnit* take() {
    const AttendUnit* unit = next();
    if (unit != nullptr) unit_ += unit->n_heads;
    return unit;
  }

 private:
  const AttendPlan& plan_;
  TaskSource& tasks_;
  int64_t unit_ = 0, end_ = 0;  // in the current task
  bool is_empty_ = false;
};

// Prefetches q from the caller's cache. Without this each unit would begin with some hundred ns of waiting.
void prefetch_q(const AttendJob& job, const AttendUnit& unit) {
  constexpr int64_t kMostBytes = 4096, kLineBytes = 64;
  const int64_t row_bytes = job.layer->k_head_dim * int64_t{sizeof(float)};
  const char* q = reinterpret_cast<const char*>(job.q) + unit.row_begin * row_bytes;
  const int64_t n_bytes = std::min(kMostBytes, (unit.row_end - unit.row_begin) * row_bytes);
  for (int64_t at = 0; at < n_bytes; at += kLineBytes) __builtin_prefetch(q + at);
}

// Input of next_keys(), which returns the begin of the worker's next unit if that unit has the same layer.
struct NextOf {
  const AttendJob* jobs;
  const Layer* layer;
  UnitQueue* units;
};
NextKeys next_keys(void* context) {
  const NextOf& of = *static_cast<const NextOf*>(context);
  const AttendUnit* next = of.units->next();
  if (next == nullptr || of.jobs[next->job_idx].layer != of.layer || next->key_begin == next->key_end) return {};
  const AttendJob& job = of.jobs[next->job_idx];
  prefetch_q(job, *next);
  return {job.runs + next->first.run_idx, next->first.offset, job.n_runs - next->first.run_idx};
}

Span span_of(const AttendCall& call, const AttendUnit& unit) {
  Span span = whole_span(call.jobs[unit.job_idx], unit.row_begin, unit.row_end);
  span.key_begin = unit.key_begin;
  span.key_end = unit.key_end;
  span.first = unit.first;
  if (call.watched != nullptr) {
    span.is_cancelled = Watched::stops_of;
    span.cancel_context = call.watched;
  }
  if (unit.group_idx >= 0) {
    const PartialStates& states = call.backend->plan.group(unit.group_idx).states;
    span.o = const_cast<float*>(states.parts) + unit.part_idx * states.stride;
    span.m = span.o + int64_t{states.n_rows} * states.head_dim;
    span.sum = span.m + states.n_rows;
    span.lse = nullptr;
  }
  return span;
}

// The place of K and V of all heads at a key of a band. Null: none.
struct BandPlace {
  const uint8_t* k = nullptr;
  const uint8_t* v = nullptr;
};

BandPlace place_in_band(const AttendCall& call, const AttendUnit& first, int64_t key) {
  const AttendJob& job = call.jobs[first.job_idx];
  const auto at = [key](const void* rows, int64_t stride) { return static_cast<const uint8_t*>(rows) + key * stride; };
  return {at(job.runs->k, k_stride_of(*job.layer)), at(job.runs->v, v_stride_of(*job.layer))};
}

// Returns the place that the worker reads after a band: that of the next band, if its layer is the same.
BandPlace band_after(const AttendCall& call, const AttendUnit& first, UnitQueue& units) {
  const AttendUnit* next = units.next();
  if (next == nullptr || next->n_heads == 1 || call.jobs[next->job_idx].layer != call.jobs[first.job_idx].layer) return {};
  return place_in_band(call, *next, next->key_begin);
}

// Attends a block of keys of each head in turn. So the rows of all heads come from memory together, through one prefetcher:
// while a block is attended, the next one is prefetched as one range, a share with each head. If heads were attended one
// after another, their rows would be apart in memory and take 1.2 to 1.6 times as long on two workers.
void run_band(const AttendCall& call, const AttendUnit& first, UnitQueue& units, int32_t worker_idx) {
  CpuBackend& backend = *call.backend;
  const Layer& layer = *call.jobs[first.job_idx].layer;
  const int64_t k_bytes = row_bytes(layer.k_type, layer.k_head_dim), v_bytes = row_bytes(layer.v_type, layer.v_head_dim);
  for (int64_t key = first.key_begin; key < first.key_end; key += kBlockKeys) {
    const int64_t end = std::min(key + kBlockKeys, first.key_end);
    const BandPlace next = end < first.key_end ? place_in_band(call, first, end) : band_after(call, first, units);
    for (int32_t head = 0; head < first.n_heads; ++head) {
      Span span = span_of(call, (&first)[head]);
      span.key_begin = key;
      span.key_end = end;
      span.first.offset += key - first.key_begin;
      span.resumes = key > first.key_begin;
      span.goes_on = end < first.key_end;
      if (next.k != nullptr) {
        span.k_ahead = next.k + head * (end - key) * k_bytes;
        span.v_ahead = next.v + head * (end - key) * v_bytes;
      }
      backend.kernels->attend_span(span, backend.scratch[worker_idx]);
    }
  }
  for (int32_t head = 0; head < first.n_heads; ++head) finish_unit(call, (&first)[head]);
}

void run_unit(const AttendCall& call, const AttendUnit& unit, UnitQueue& units, int32_t worker_idx) {
  CpuBackend& backend = *call.backend;
  const AttendJob& job = call.jobs[unit.job_idx];
  NextOf next{call.jobs, job.layer, &units};
  Span span = span_of(call, unit);
  span.next = next_keys;
  span.next_context = &next;
  if (unit.by_matmul)
    backend.matmul->attend(span, worker_idx);
  else
    backend.kernels->attend_span(span, backend.scratch[worker_idx]);
  finish_unit(call, unit);
}

void run_units(void* context, TaskSource& tasks, int32_t worker_idx) {
  const AttendCall& call = *static_cast<const AttendCall*>(context);
  UnitQueue units(call.backend->plan, tasks);
  while (const AttendUnit* unit = units.take()) {
    if (call.watched != nullptr && call.watched->stops()) return;
    if (unit->n_heads > 1)
      run_band(call, *unit, units, worker_idx);
    else
      run_unit(call, *unit, units, worker_idx);
    if (call.watched != nullptr) call.watched->count(unit->cost * unit->n_heads, worker_idx);
  }
}

Status prepare_matmul(CpuBackend& backend, const AttendJob* jobs, int32_t n_jobs) {
  for (int32_t i = 0; i < n_jobs; ++i) {
    if (!use_matmul(jobs[i], backend.crossover)) continue;
    if (i > 0 && use_matmul(jobs[i - 1], backend.crossover) && jobs[i].layer == jobs[i - 1].layer) continue;
    if (!backend.matmul) TANDEM_TRY(MatmulAttend::create(*backend.kernels, &backend.matmul));
    TANDEM_TRY(backend.matmul->prepare(*jobs[i].layer, backend.pool->n_workers()));
  }
  return {};
}

// Reports the final progress, and returns the reason if the call was stopped.
Status watch_end(Watched& watched) {
  if (!watched.stops()) watched.tell(watched.total);
  if (const int32_t answer = watched.answer; answer != 0)
    return fail(TANDEM_ERROR_CANCELLED, "progress", "progress returned %d: the call was stopped", answer);
  return watched.watch.check();
}

Status attend_jobs(CpuBackend& backend, const AttendJob* jobs, int32_t n_jobs, Watched* watched) {
  const std::lock_guard lock(backend.attend_mutex);
  AttendPlan& plan = backend.plan;
  TANDEM_TRY(plan.make(jobs, n_jobs, backend.pool->n_workers(), backend.crossover, backend.pool.get()));
  if (!backend.parts.reserve(plan.n_floats()) || !backend.parts_left.reserve(plan.n_groups()))
    return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for partial states of %lld floats",
                static_cast<long long>(plan.n_floats()));
  TANDEM_TRY(prepare_matmul(backend, jobs, n_jobs));
  for (int64_t i = 0; i < plan.n_groups(); ++i) {
    AttendGroup& group = plan.group(i);
    group.states.parts = backend.parts.data() + group.floats_at;
    new (&backend.parts_left[i]) std::atomic<int32_t>(group.states.n_parts);
  }
  AttendCall call{&backend, jobs, watched};
  if (watched != nullptr)
    for (int64_t i = 0; i < plan.n_units(); ++i) watched->total += plan.unit(i).cost;
  TasksInTurn one(1);
  if (plan.n_tasks() == 1)
    run_units(&call, one, 0);
  else if (plan.n_tasks() > 1)
    backend.pool->share(plan.n_tasks(), run_units, &call, plan.task_nodes());
  if (watched != nullptr) TANDEM_TRY(watch_end(*watched));
  if (plan.n_matmul_rows() > 0) backend.pool->run((plan.n_matmul_rows() + kJoinedRows - 1) / kJoinedRows, join_share, &call);
  return {};
}

Status attend(void* self, const AttendJob* jobs, int32_t n_jobs) {
  return attend_jobs(backend_of(self), jobs, n_jobs, nullptr);
}

Status attend_watched(void* self, const AttendJob* jobs, int32_t n_jobs, const Watch& watch) {
  Watched watched{watch};
  return attend_jobs(backend_of(self), jobs, n_jobs, &watched);
}

// The rows of all jobs are one range, cut into even shares.
struct MergeCall {
  const KernelTable* kernels;
  const MergeJob* jobs;
  int32_t n_jobs;
  const Watch* watch;
  int64_t n_rows, n_shares;
};

constexpr int64_t kMergedRows = 4096;  // rows between two checks for cancellation

void merge_share(void* context, int64_t share, int32_t) {
  const MergeCall& call = *static_cast<const MergeCall*>(context);
  const int64_t begin = call.n_rows * share / call.n_shares, end = call.n_rows * (share + 1) / call.n_shares;
  int64_t first = 0;  // first row of the job in the range
  for (int32_t i = 0; i < call.n_jobs && first < end; first += call.jobs[i++].n_rows) {
    const MergeJob& job = call.jobs[i];
    const int64_t to = std::min(end - first, job.n_rows);
    for (int64_t from = std::max<int64_t>(begin - first, 0); from < to && !call.watch->is_cancelled(); from += kMergedRows)
      call.kernels->merge(job, from, std::min(from + kMergedRows, to));
  }
}

Status merge_watched(void* self, const MergeJob* jobs, int32_t n_jobs, const Watch& watch) {
  CpuBackend& backend = backend_of(self);
  constexpr int64_t kShareFloats = 64 << 10;
  MergeCall call{backend.kernels, jobs, n_jobs, &watch, 0, 1};
  int64_t n_floats = 0;
  for (int32_t i = 0; i < n_jobs; ++i) {
    call.n_rows += jobs[i].n_rows;
    n_floats += jobs[i].n_rows * jobs[i].head_dim * jobs[i].n_states;
  }
  call.n_shares = std::clamp<int64_t>(n_floats / kShareFloats, 1, 4 * int64_t{backend.pool->n_workers()});
  if (call.n_shares == 1)
    merge_share(&call, 0, 0);
  else
    backend.pool->run(call.n_shares, merge_share, &call);
  return watch.check();
}

Status merge(void* self, const MergeJob* jobs, int32_t n_jobs) { return merge_watched(self, jobs, n_jobs, {}); }

int64_t report(void* self, char* buffer, int64_t buffer_bytes) {
  const CpuBackend& backend = backend_of(self);
  const std::string text = "{\"isa\":\"" + std::string(backend.kernels->name) +
                           "\",\"matmul_rows\":{\"bf16\":" + std::to_string(backend.crossover.rows_bf16) +
                           ",\"other\":" + std::to_string(backend.crossover.rows) + "},\"pool\":" + backend.pool->report() +
                           "}";
  if (buffer_bytes > 0) {
    const size_t n = std::min(text.size(), static_cast<size_t>(buffer_bytes) - 1);
    std::memcpy(buffer, text.data(), n);
    buffer[n] = '\0';
  }
  return static_cast<int64_t>(text.size());
}

struct WeightCall {
  CpuBackend* backend;
  const WeightJob* jobs;
};

void weigh_task(void* context, int64_t task_idx, int32_t worker_idx) {
  const WeightCall& call = *static_cast<const WeightCall*>(context);
  call.backend->kernels->attn_weights(call.jobs[task_idx], call.backend->scratch[worker_idx]);
}

void attn_weights(void* self, const WeightJob* jobs, int32_t n_jobs) {
  CpuBackend& backend = backend_of(self);
  const std::lock_guard lock(backend.attend_mutex);
  WeightCall call{&backend, jobs};
  const bool has_nodes = backend.weight_nodes.reserve(n_jobs);  // without the nodes any worker may take any job
  for (int32_t i = 0; has_nodes && i < n_jobs; ++i) backend.weight_nodes[i] = jobs[i].node;
  if (n_jobs > 0) backend.pool->run(n_jobs, weigh_task, &call, has_nodes ? backend.weight_nodes.data() : nullptr);
}

void run_alone(void* self, int64_t n_tasks, TaskFn task, void* context) {
  CpuBackend& backend = backend_of(self);
  const std::lock_guard lock(backend.attend_mutex);
  backend.pool->run(n_tasks, task, context);
}

void judge_chunks(void* self, const ChunkJob& job, int32_t worker_idx) {
  const CpuBackend& backend = backend_of(self);
  backend.kernels->judge_chunks(job, backend.scratch[worker_idx]);
}

void descend_chunks(void* self, const DescentJob& job, int32_t worker_idx) {
  const CpuBackend& backend = backend_of(self);
  backend.kernels->descend_chunks(job, backend.scratch[worker_idx]);
}

int32_t n_workers(void* self) { return backend_of(self).pool->n_workers(); }

void observe(void* self, float* maw, const float* logits, int64_t n_keys, float lse, float alpha) {
  backend_of(self).kernels->observe(maw, logits, n_keys, lse, alpha);
}

void to_f32(void* self, int32_t dtype, const void* from, const void* scales, float* to, int64_t n) {
  backend_of(self).kernels->to_f32(dtype, from, scales, to, n);
}

void from_f32(void* self, int32_t dtype, const float* from, void* to, void* scales, int64_t n) {
  backend_of(self).kernels->from_f32(dtype, from, to, scales, n);
}

void run(void* self, int64_t n_tasks, TaskFn task, void* context) { backend_of(self).pool->run(n_tasks, task, context); }
void wake(void* self) { backend_of(self).pool->wake(); }
void rest(void* self) { backend_of(self).pool->rest(); }
int32_t n_nodes(void* self) { return backend_of(self).pool->n_nodes(); }
void place(void* self, void* data, int64_t bytes, int32_t node) { backend_of(self).pool->place(data, bytes, node); }
void keep_clear(void* self) { backend_of(self).pool->keep_clear(); }
void destroy(void* self) { delete static_cast<CpuBackend*>(self); }

constexpr BackendTable kTable = {
    kBackendAbi,   sizeof(BackendTable),
    "cpu",         attend,
    merge,         attn_weights,
    observe,       to_f32,
    from_f32,      run,
    wake,          rest,
    report,        n_nodes,
    place,         destroy,
    keep_clear,    attend_watched,
    merge_watched, run_alone,
    judge_chunks,  descend_chunks,
    n_workers,
};

}  // namespace

Status make_cpu_backend(const KernelTable& kernels, const Crossover& crossover, std::unique_ptr<Pool> pool,
                        Backend* backend) {
  auto self = std::make_unique<CpuBackend>();
  self->kernels = &kernels;
  self->crossover = crossover;
  self->pool = std::move(pool);
  const int32_t n_workers = self->pool->n_workers();
  if (!self->scratch.reserve(n_workers)) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for %d workers", n_workers);
  for (int32_t i = 0; i < n_workers; ++i) self->scratch[i].target = 0;
  backend->table = &kTable;
  backend->self = self.release();
  return {};
}

int64_t target_used(const Backend& backend) {
  const CpuBackend& self = backend_of(backend.self);
  for (int32_t i = 0; i < self.pool->n_workers(); ++i)
    if (self.scratch[i].target != 0) return self.scratch[i].target;
  return 0;
}

}  // namespace tandem::cpu
