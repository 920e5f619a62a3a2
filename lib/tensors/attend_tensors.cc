// SPDX-License-Identifier: MIT
#include "lib/tensors/attend_tensors.h"

#include <algorithm>
#include <cstring>

#include "lib/base/scratch_floats.h"
#include "lib/tensors/convert.h"
#include "lib/tensors/mask_groups.h"

namespace tandem {
namespace {

constexpr int64_t kWorthSpreading = 32768;  // elements
constexpr int64_t kTaskTokens = 16;

// Result of scanning one mask: of a sequence, or of one of its heads.
struct MaskScan {
  struct Part {  // kTaskTokens tokens
    std::vector<KeyRange> ranges;
    int64_t ends[kTaskTokens];  // index behind the last range of each token
    bool has_values = false;
  };
  std::vector<Part> parts;
  std::vector<MaskRow> rows;  // [q_len]
  MaskGroups groups;
  bool has_values = false;
};

// Where a sequence's rows are in the work space: [n_kv_heads][q_len][group_size].
struct SequenceRows {
  size_t q_at = 0, o_at = 0, lse_at = 0;  // indices into floats
  size_t first_token = 0;                 // first token, counted over all sequences
};

}  // namespace

struct TensorAttention::Scratch : FloatRows {
  std::vector<SequenceRows> sequences;
  std::vector<MaskScan> scans;      // [n_sequences][1 or n_kv_heads]
  std::vector<int64_t> begin, end;  // for all tokens, if there is no mask
  std::vector<KvRun> runs;
  std::vector<size_t> job_runs;  // [n_jobs + 1] index of the first run
  std::vector<AttendJob> jobs;
  std::vector<Visibility> visibilities;  // [n_jobs]
  std::vector<LogitBias> biases;         // [n_jobs]
  std::vector<MergeJob> merges;
  std::vector<const float*> states;  // o and lse of each merge
};

namespace {

class TensorCall {
 public:
  using Scratch = TensorAttention::Scratch;
  TensorCall(const Backend& cpu, const TensorsArgs& args, Scratch& scratch)
      : cpu_(cpu), args_(args), layer_(args.layer), scratch_(scratch) {}

  Status run() {
    TANDEM_TRY(args_.watch.check());
    lay_out();
    if (args_.mask.dtype != 0)
      scan_masks();
    else
      set_causal();
    TANDEM_TRY(args_.watch.check());
    add_jobs();
    point_jobs();
    for_tokens(&TensorCall::pack_token);
    TANDEM_TRY(args_.watch.check());
    TANDEM_TRY(attend_and_merge());
    for_tokens(&TensorCall::write_token);
    return args_.watch.check();
  }

 private:
  // Calls visit(i) for i in [0, n), on the pool if `spread` is true.
  template <class Visit>
  void for_each(int64_t n, bool spread, const Visit& visit) {
    const auto task = [](void* context, int64_t i, int32_t) { (*static_cast<const Visit*>(context))(i); };
    if (spread && n > 1) return cpu_.table->run(cpu_.self, n, task, const_cast<Visit*>(&visit));
    for (int64_t i = 0; i < n; ++i) visit(i);
  }

  // Calls (this->*visit)(sequence, token) for every token. Skips the rest once the call is cancelled.
  void for_tokens(void (TensorCall::*visit)(size_t sequence_idx, int64_t t)) {
    for (size_t i = 0; i < args_.sequences.size(); ++i) {
      const int64_t q_len = args_.sequences[i].q_len, n_tasks = (q_len + kTaskTokens - 1) / kTaskTokens;
      for_each(n_tasks, q_len * layer_.n_q_heads * layer_.k_head_dim >= kWorthSpreading, [&](int64_t task) {
        if (args_.watch.is_cancelled()) return;
        const int64_t end = std::min(q_len, (task + 1) * kTaskTokens);
        for (int64_t t = task * kTaskTokens; t < end; ++t) (this->*visit)(i, t);
      });
    }
  }

  void lay_out();
  void scan_masks();
  void scan_mask(const TensorSequence& sequence, const std::byte* mask, MaskScan* scan);
  void set_causal();
  void add_jobs();
  void add_job(size_t sequence_idx, int32_t head, int64_t first_token, int64_t n_tokens);
  void add_causal_job(size_t sequence_idx, int32_t head);
  void add_run(size_t sequence_idx, int32_t head, const KeyRange& keys);
  LogitBias bias_of(size_t sequence_idx, int32_t head, int64_t first_token) const;
  void point_jobs();
  void add_merge(size_t sequence_idx, int32_t head);
  Status attend_and_merge();
  void pack_token(size_t sequence_idx, int64_t t);
  void write_token(size_t sequence_idx, int64_t t);

  int32_t n_masks() const { return args_.mask.per_head ? layer_.n_kv_heads : 1; }
  MaskScan& scan_of(size_t sequence_idx, int32_t head) {
    return scratch_
        .scans[sequence_idx * static_cast<size_t>(n_masks()) + static_cast<size_t>(args_.mask.per_head ? head : 0)];
  }
  // Returns the row of query head `head` of token t among the rows of its sequence.
  int64_t row_of(const TensorSequence& sequence, int64_t t, int32_t head) const {
    return (head / layer_.group_size * sequence.q_len + t) * layer_.group_size + head % layer_.group_size;
  }

  const Backend& cpu_;
  const TensorsArgs& args_;
  const Layer& layer_;
  Scratch& scratch_;
};

void TensorCall::lay_out() {
  scratch_.n_floats = 0;
  scratch_.sequences.clear();
  size_t n_tokens = 0;
  for (const TensorSequence& sequence : args_.sequences) {
    const int64_t n_rows = sequence.q_len * layer_.n_q_heads;
    SequenceRows rows;
    rows.q_at = scratch_.take(n_rows * layer_.k_head_dim);
    rows.o_at = scratch_.take(n_rows * layer_.v_head_dim);
    rows.lse_at = scratch_.take(n_rows);
    rows.first_token = n_tokens;
    n_tokens += static_cast<size_t>(sequence.q_len);
    scratch_.sequences.push_back(rows);
  }
  scratch_.floats.reserve(scratch_.n_floats);
}

void TensorCall::scan_masks() {
  if (scratch_.scans.size() < args_.sequences.size() * static_cast<size_t>(n_masks()))
    scratch_.scans.resize(args_.sequences.size() * static_cast<size_t>(n_masks()));
  for (size_t i = 0; i < args_.sequences.size(); ++i)
    for (int32_t h = 0; h < n_masks(); ++h)
      scan_mask(args_.sequences[i], args_.sequences[i].mask + h * args_.mask.head_stride, &scan_of(i, h));
}

void TensorCall::scan_mask(const TensorSequence& sequence, const std::byte* mask, MaskScan* scan) {
  const int64_t n_parts = (sequence.q_len + kTaskTokens - 1) / kTaskTokens;
  if (static_cast<int64_t>(scan->parts.size()) < n_parts) scan->parts.resize(static_cast<size_t>(n_parts));
  for_each(n_parts, sequence.q_len * sequence.kv_len >= kWorthSpreading, [&](int64_t i) {
    MaskScan::Part& part = scan->parts[static_cast<size_t>(i)];
    part.ranges.clear();
    part.has_values = false;
    const int64_t first = i * kTaskTokens, end = std::min(sequence.q_len, first + kTaskTokens);
    for (int64_t t = first; t < end && !args_.watch.is_cancelled(); ++t) {
      const std::byte* row = mask + t * args_.mask.row_stride;
      part.has_values = scan_mask_row(args_.mask.dtype, row, sequence.kv_len, &part.ranges) || part.has_values;
      part.ends[t - first] = static_cast<int64_t>(part.ranges.size());
    }
  });
  if (args_.watch.is_cancelled()) return;
  scan->rows.clear();
  scan->has_values = false;
  for (int64_t t = 0; t < sequence.q_len; ++t) {
    const MaskScan::Part& part = scan->parts[static_cast<size_t>(t / kTaskTokens)];
    const int64_t first = t % kTaskTokens == 0 ? 0 : part.ends[t % kTaskTokens - 1];
    scan->rows.push_back({part.ranges.data() + first, part.ends[t % kTaskTokens] - first});
    scan->has_values = scan->has_values || part.has_values;
  }
  group_tokens(scan->rows, &scan->groups);
}

void TensorCall::set_causal() {
  scratch_.begin.clear();
  scratch_.end.clear();
  for (const TensorSequence& sequence : args_.sequences)
    for (int64_t t = 0; t < sequence.q_len; ++t) {
      const int64_t end = args_.causal ? std::max<int64_t>(0, sequence.kv_len - sequence.q_len + t + 1) : sequence.kv_len;
      scratch_.end.push_back(end);
      scratch_.begin.push_back(layer_.sliding_window > 0 ? std::max<int64_t>(0, end - layer_.sliding_window) : 0);
    }
}

void TensorCall::add_run(size_t sequence_idx, int32_t head, const KeyRange& keys) {
  const TensorSequence& sequence = args_.sequences[sequence_idx];
  const int64_t k_head = head / args_.heads_per_k;
  KvRun run;
  run.k = sequence.k.row(keys.begin, k_head);
  run.v = layer_.v_aliases_k ? run.k : sequence.v.row(keys.begin, k_head);
  run.n_tokens = keys.end - keys.begin;
  run.token_idx = keys.begin;
  scratch_.runs.push_back(run);
}

LogitBias TensorCall::bias_of(size_t sequence_idx, int32_t head, int64_t first_token) const {
  const TensorSequence& sequence = args_.sequences[sequence_idx];
  LogitBias bias;
  bias.first_position = sequence.kv_len - sequence.q_len + first_token;
  if (sequence.mask != nullptr) {
    const int64_t head_at = args_.mask.per_head ? head * args_.mask.head_stride : 0;
    bias.mask = sequence.mask + head_at + first_token * args_.mask.row_stride;
    bias.mask_type = args_.mask.dtype;
    bias.row_bytes = args_.mask.row_stride;
  }
  if (args_.alibi_slopes != nullptr) bias.slopes = args_.alibi_slopes + int64_t{head} * layer_.group_size;
  return bias;
}

// Adds a job over the runs that the caller adds next. point_jobs() sets pointers into vectors that still grow.
void TensorCall::add_job(size_t sequence_idx, int32_t head, int64_t first_token, int64_t n_tokens) {
  const TensorSequence& sequence = args_.sequences[sequence_idx];
  const SequenceRows& rows = scratch_.sequences[sequence_idx];
  const int64_t first_row = (head * sequence.q_len + first_token) * layer_.group_size;
  AttendJob job;
  job.layer = &layer_;
  job.q = scratch_.at(rows.q_at) + first_row * layer_.k_head_dim;
  job.n_rows = static_cast<int32_t>(n_tokens * layer_.group_size);
  job.q_is_bf16 = sequence.q.dtype == TANDEM_BF16;
  job.node = kAllNodes;
  job.o = scratch_.at(rows.o_at) + first_row * layer_.v_head_dim;
  job.lse = scratch_.at(rows.lse_at) + first_row;
  scratch_.jobs.push_back(job);
  scratch_.job_runs.push_back(scratch_.runs.size());
  scratch_.visibilities.emplace_back();
  scratch_.biases.push_back(bias_of(sequence_idx, head, first_token));
}

void TensorCall::add_causal_job(size_t sequence_idx, int32_t head) {
  const TensorSequence& sequence = args_.sequences[sequence_idx];
  const size_t first = scratch_.sequences[sequence_idx].first_token, last = first + static_cast<size_t>(sequence.q_len) - 1;
  add_job(sequence_idx, head, 0, sequence.q_len);
  scratch_.visibilities.back().begin = scratch_.begin.data() + first;
  scratch_.visibilities.back().end = scratch_.end.data() + first;
  const KeyRange keys{scratch_.begin[first], scratch_.end[last]};
  if (keys.begin < keys.end) add_run(sequence_idx, head, keys);
}

void TensorCall::add_jobs() {
  scratch_.runs.clear();
  scratch_.jobs.clear();
  scratch_.job_runs.clear();
  scratch_.visibilities.clear();
  scratch_.biases.clear();
  for (size_t i = 0; i < args_.sequences.size(); ++i) {
    if (args_.sequences[i].q_len == 0) continue;
    for (int32_t h = 0; h < layer_.n_kv_heads; ++h) {
      if (args_.mask.dtype == 0) {
        add_causal_job(i, h);
        continue;
      }
      const MaskGroups& groups = scan_of(i, h).groups;
      for (const TokenGroup& group : groups.groups) {
        add_job(i, h, group.first, group.end - group.first);
        scratch_.visibilities.back() = groups.visibility_of(group);
        if (!scan_of(i, h).has_values) scratch_.biases.back().mask = nullptr;
        for (const KeyRange& keys : group.keys) add_run(i, h, keys);
      }
    }
  }
  scratch_.job_runs.push_back(scratch_.runs.size());
}

void TensorCall::point_jobs() {
  for (size_t j = 0; j < scratch_.jobs.size(); ++j) {
    AttendJob& job = scratch_.jobs[j];
    job.runs = scratch_.runs.data() + scratch_.job_runs[j];
    job.n_runs = static_cast<int32_t>(scratch_.job_runs[j + 1] - scratch_.job_runs[j]);
    job.runs_are_keys = job.n_runs > 0;
    for (int32_t r = 0; r < job.n_runs; ++r) {
      job.n_keys += job.runs[r].n_tokens;
      job.runs_are_keys = job.runs_are_keys && job.runs[r].n_tokens == 1;
    }
    // A single token sees every key of its job.
    if (job.n_rows > layer_.group_size) job.visibility = &scratch_.visibilities[j];
    const LogitBias& bias = scratch_.biases[j];
    const bool by_distance = args_.alibi_slopes != nullptr && args_.mask.dtype == 0;
    if (bias.mask != nullptr || by_distance) job.bias = &bias;
  }
}

Status TensorCall::attend_and_merge() {
  const auto n_jobs = static_cast<int32_t>(scratch_.jobs.size());
  if (n_jobs == 0) return {};
  const bool is_watched = args_.watch.cancel != nullptr || args_.watch.progress != nullptr;
  TANDEM_TRY(is_watched ? cpu_.table->attend_watched(cpu_.self, scratch_.jobs.data(), n_jobs, args_.watch)
                        : cpu_.table->attend(cpu_.self, scratch_.jobs.data(), n_jobs));
  if (layer_.sinks == nullptr) return {};
  scratch_.merges.clear();
  scratch_.states.clear();
  scratch_.states.reserve(2 * args_.sequences.size() * static_cast<size_t>(layer_.n_kv_heads));
  for (size_t i = 0; i < args_.sequences.size(); ++i)
    for (int32_t h = 0; h < layer_.n_kv_heads; ++h) add_merge(i, h);
  return cpu_.table->merge_watched(cpu_.self, scratch_.merges.data(), static_cast<int32_t>(scratch_.merges.size()),
                                   args_.watch);
}

// Merges the learned sink of a head into the state of its keys.
void TensorCall::add_merge(size_t sequence_idx, int32_t head) {
  const SequenceRows& rows = scratch_.sequences[sequence_idx];
  MergeJob merge;
  merge.n_rows = args_.sequences[sequence_idx].q_len * layer_.group_size;
  merge.head_dim = layer_.v_head_dim;
  merge.n_states = 1;
  merge.o_out = scratch_.at(rows.o_at) + head * merge.n_rows * layer_.v_head_dim;
  merge.lse_out = scratch_.at(rows.lse_at) + head * merge.n_rows;
  scratch_.states.push_back(merge.o_out);
  scratch_.states.push_back(merge.lse_out);
  merge.o = scratch_.states.data() + scratch_.states.size() - 2;
  merge.lse = merge.o + 1;
  merge.sinks = layer_.sinks + int64_t{head} * layer_.group_size;
  merge.sink_period = layer_.group_size;
  scratch_.merges.push_back(merge);
}

void TensorCall::pack_token(size_t sequence_idx, int64_t t) {
  const TensorSequence& sequence = args_.sequences[sequence_idx];
  float* rows = scratch_.at(scratch_.sequences[sequence_idx].q_at);
  for (int32_t h = 0; h < layer_.n_q_heads; ++h)
    convert_row(cpu_, sequence.q.dtype, sequence.q.row(t, h), TANDEM_F32, rows + row_of(sequence, t, h) * layer_.k_head_dim,
                layer_.k_head_dim);
}

void TensorCall::write_token(size_t sequence_idx, int64_t t) {
  const TensorSequence& sequence = args_.sequences[sequence_idx];
  const SequenceRows& rows = scratch_.sequences[sequence_idx];
  const float *o = scratch_.at(rows.o_at), *lse = scratch_.at(rows.lse_at);
  for (int32_t h = 0; h < layer_.n_q_heads; ++h) {
    const int64_t row = row_of(sequence, t, h);
    convert_row(cpu_, TANDEM_F32, o + row * layer_.v_head_dim, sequence.o.dtype, sequence.o.row(t, h), layer_.v_head_dim);
    if (sequence.lse != nullptr) sequence.lse[t * args_.lse_token_stride + h * args_.lse_head_stride] = lse[row];
  }
}

}  // namespace

TensorAttention::TensorAttention() : scratch_(std::make_unique<Scratch>()) {}
TensorAttention::~TensorAttention() = default;

Status TensorAttention::attend(const Backend& cpu, const TensorsArgs& args) {
  const std::lock_guard lock(mutex_);
  return TensorCall(cpu, args, *scratch_).run();
}

}  // namespace tandem
