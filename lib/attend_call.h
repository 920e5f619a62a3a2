// SPDX-License-Identifier: MIT
// One attend call. lib/attend.cc has its order of work, lib/attend_prepare.cc what comes before the first key is read.
#pragma once

#include "lib/attend_scratch.h"
#include "lib/session.h"

namespace tandem {

class AttendCall {
 public:
  AttendCall(Session& session, const AttendArgs& args);
  Status run();

 private:
  // Before: everything that can fail and changes nothing. The cache's mutex is held exclusively from enter() on, except
  // while waiting for refreshes.
  Status enter();  // finds the sequences and marks them as in flight
  void wait_for_refreshes();
  Status prepare();
  Status check_state(const SequenceCall& call) const;
  void choose_keys(SequenceCall& call);
  void choose_streaming(SequenceCall& call);
  void set_visibility(SequenceCall& call);
  void set_tree(SequenceCall& call);
  void prepare_refresh(SequenceCall& call);
  void lay_out(SequenceCall& call);
  void add_jobs(const SequenceCall& call);
  void find_spans(const SequenceCall& call, int64_t begin, int64_t end, std::vector<PageSpan>* spans) const;
  void add_runs(const SequenceCall& call, const std::vector<PageSpan>& spans, int32_t kv_head);
  void add_selected_runs(const SequenceCall& call, int32_t kv_head);
  void finish_jobs();

  // The work.
  void append_rows();
  void pack_queries();
  Status attend_and_merge();
  void observe();
  void write_outputs();
  void save_queries(const SequenceCall& call);

  // After: cannot fail.
  void commit_and_settle();
  void settle(SequenceCall& call);
  void refresh();
  void count_bytes(const SequenceCall& call);
  void leave();

  static void pack_task(void* context, int64_t task_idx, int32_t worker_idx);
  static void write_task(void* context, int64_t task_idx, int32_t worker_idx);
  static void observe_task(void* context, int64_t task_idx, int32_t worker_idx);
  void for_tokens(TaskFn task);

  Session& session_;
  Cache& cache_;
  const AttendArgs& args_;
  const Layer& layer_;
  const size_t layer_idx_;
  const Policy& policy_;
  const Backend& cpu_;
  AttendScratch& scratch_;
};

}  // namespace tandem
