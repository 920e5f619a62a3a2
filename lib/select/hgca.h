// SPDX-License-Identifier: MIT
// State of policy "hgca" for one layer of a sequence, and the functions that change it. The rule is in lib/select/hgca.cc.
//
// clang-format off
//   Maw            moving averages of attention weights, for each query head and token
//   HeadSelection  tokens outside the window that a KV head has selected, and copies of their rows
//   HeldQueries    the last queries of an append, counted when keys are judged
//   HeldGuess      queries of speculative tokens, counted if the tokens are kept
// clang-format on
//
// Judging applies the rule to the averages of keys. judge_evicted() judges keys that leave the window. re_evaluate() judges
// all keys outside the window, after an append.
#pragma once

#include <memory>
#include <vector>

#include "lib/call/key_runs.h"
#include "lib/call/sequence_call.h"
#include "lib/machine/worker.h"
#include "lib/policy/policy.h"
#include "lib/policy/selector.h"

namespace tandem {

// Input of the rule: one KV head and some tokens outside the window.
struct SelectInput {
  const PolicyOptions* options = nullptr;
  bool eviction = false;  // true: the tokens leave the window now; false: all tokens outside the window are judged anew
  int64_t host_len = 0;   // tokens outside the window, without the sinks
  int32_t group_size = 0;
  const float* const* maw = nullptr;  // [group_size] -> [n_tokens]
  int64_t n_tokens = 0;
  int64_t* halo_left = nullptr;  // in and out: tokens that a strong key before the first one still keeps
};
// Applies the rule. Writes the ascending indices of the kept tokens to kept [n_tokens] and returns their number.
int64_t hgca_select(const SelectInput& input, int32_t* kept);

// Moving averages of attention weights, in blocks of kBlock tokens, so growing never copies. New tokens start at 0.
class Maw {
 public:
  static constexpr int64_t kBlock = 2048;

  Status reserve(Tier& tier, int32_t n_q_heads, int64_t n_tokens, const Watch& watch = {});
  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * kBlock; }
  // Returns the averages of one head from `token` on, valid up to the end of the token's block.
  float* at(int32_t q_head, int64_t token) const {
    return blocks_[static_cast<size_t>(token / kBlock)].as<float>() + q_head * kBlock + token % kBlock;
  }
  void clear(int32_t n_q_heads, int64_t begin, int64_t end);
  void erase(int32_t n_q_heads, int64_t first, int64_t n_tokens, int64_t length);
  Status copy_from(Tier& tier, const Maw& from);
  Status visit(StateVisitor& visitor, int32_t n_q_heads, int64_t n_tokens) const;

 private:
  std::vector<Buffer> blocks_;
};

// The selected tokens, ascending. Copies of their rows lie together, so attention scans them linearly. There are a few
// blocks of copies, so growing copies little. The indices are authoritative: where the tier has no room for the copies,
// attention reads the store token by token.
struct HeadSelection {
  Buffer token_idx;  // [capacity of the layer] int32
  int64_t n_tokens = 0;
  std::vector<CopiedRows> blocks;  // in the order of the tokens
  // Leading tokens whose rows are in the blocks. Attention uses the copies only if all tokens have one.
  int64_t n_copied = 0;

  int64_t room() const { return token_idx.bytes() / static_cast<int64_t>(sizeof(int32_t)); }
  Status reserve(Tier& tier, int64_t n_tokens);
  Status copy_from(Tier& tier, const PlaneBytes& bytes, const HeadSelection& from);
  Status visit(StateVisitor& visitor, int64_t sink_len, int64_t window_begin);             // the indices, without the rows
  void cut(int64_t end);                                                                   // drops tokens from `end` on
  void erase(const PlaneBytes& bytes, int64_t first, int64_t n_tokens, int64_t sink_len);  // later tokens move up
  int64_t capacity() const { return blocks.empty() ? 0 : blocks.back().first + blocks.back().n_rows; }
  Rows row(const PlaneBytes& bytes, int64_t i) const {  // row of token i < capacity()
    size_t b = blocks.size() - 1;
    while (blocks[b].first > i) --b;
    return blocks[b].row(bytes, i);
  }
};

// Queries that are counted in the MAW of tokens [first_token, end_token), the newest last.
struct CountedQueries {
  const float* q = nullptr;    // of KV head 0, [n][group_size][k_head_dim]
  const float* lse = nullptr;  // of KV head 0, [n][group_size]
  int64_t head_stride = 0;     // rows from one KV head to the next
  int64_t n = 0;
  int64_t n_skipped = 0;
  const int64_t* begin = nullptr;  // [n] visible range of each query
  const int64_t* end = nullptr;
  int64_t first_token = 0, end_token = 0;
};

// Queries that wait to be counted, the newest last: at most as many as alpha lets count.
struct HeldQueries {
  int64_t n = 0;
  int64_t n_skipped = 0;            // older queries of the same appends, too faded to count
  int64_t end_token = 0;            // the queries count in keys before this token; the device has counted them in later keys
  std::vector<float> q;             // [n_kv_heads][capacity][group_size][k_head_dim], rotated
  std::vector<float> lse;           // [n_kv_heads][capacity][group_size]
  std::vector<int64_t> begin, end;  // [capacity] visible range of each query

  void reserve(const Layer& layer, int64_t capacity);
  void add(const Layer& layer, const SequenceCall& call);  // adds the call's last queries; older ones move up or drop out
  void cut(int64_t n_tokens);                              // drops queries of tokens from n_tokens on
  Status visit(StateVisitor& visitor, const Layer& layer, int64_t most, int64_t length);
  void clear() { n = n_skipped = 0; }
};

// Logits or queries of speculative tokens, from which their weights are counted later.
struct HeldGuess {
  int64_t first_key = 0;  // first key that has logits
  int64_t n_keys = 0;
  std::vector<float> logits;  // [n_kv_heads][q_len][group_size][n_keys]
  std::vector<float> lse;     // [n_kv_heads][q_len][group_size]
  // [n_kv_heads][q_len][group_size][k_head_dim], only of a call on a device, which gives no logits
  std::vector<float> q;

  void end() { n_keys = 0, q.clear(); }
};

class Hgca;

struct HgcaState final : SelectState {
  explicit HgcaState(Hgca& hgca);

  bool has_room(int64_t n_tokens) const override { return n_tokens <= maw.capacity(); }
  Status grow(int64_t n_tokens, const Watch& watch) override;
  Status copy_from(const SelectState& from) override;
  Status visit(StateVisitor& visitor, const Sequence& sequence, int64_t window_begin) override;  // lib/select/hgca_save.cc
  void cut(const Sequence& sequence, int64_t n_tokens, int64_t window_begin) override;
  void erase(const Sequence& sequence, int64_t first, int64_t n_tokens) override;
  Status catch_up(const Sequence& sequence, int64_t window_begin) override;
  int64_t join(const Watch& watch = {}) override;
  void cancel() override;
  SelectedTokens selected(int32_t kv_head) const override;
  float* weights(int32_t q_head, int64_t token) const override { return maw.at(q_head, token); }
  Status prepare_on_host(SequenceCall* call, bool is_speculative) override;
  void prepare_on_device(SequenceCall* call, bool is_speculative, TicketCopy* late, int64_t* n_evicted) override;
  void select(const SequenceCall& call, TicketCopy* late) override;
  void committed(const SequenceCall& call, bool is_speculative) override;
  void finish(const SequenceCall& call, const Watch& watch) override;
  Status prepare_guess(const KeptGuess& kept) override;
  void count_guess(const KeptGuess& kept, bool have_moved, int64_t* window_begin) override;
  void end_guess(int64_t old_window_begin, int64_t window_begin) override;

  // In lib/select/hgca_judge.cc. These functions access this state alone and use the memory that reserve_work() has
  // reserved.
  void judge_evicted();  // on the calling thread
  void re_evaluate();    // on the pool, as the next two: counts the held queries, then judges all keys
  void count_weights(const CountedQueries& queries);
  void count_held();  // does nothing if no queries are held
  void note_copies();
  void reserve_work();  // reserves work space for the keys
  // Swaps in these keys and reserves work space. If `late` is empty, the state keeps its own keys.
  void take_keys(KeyRuns* late);
  void post_eviction(int64_t begin, int64_t end);  // posts a job that judges these tokens, which have left the window

  Hgca& hgca;
  Maw maw;
  std::vector<HeadSelection> heads;  // [n_kv_heads]
  HeldQueries held;
  HeldGuess guess;
  // True if the device has counted an append in the MAW and keys have not been judged since. Only the calling thread uses
  // this.
  bool is_unjudged = false;
  bool due = false;  // queries wait to be counted, and no job is posted yet
  Job job;
  bool eviction = false;  // true: judge tokens [evict_begin, evict_end) only; false: all tokens outside the window
  int64_t evict_begin = 0, evict_end = 0;
  int64_t host_end = 0;  // first token of the window
  // Runs of all tokens when the job is posted; for an eviction at least of the tokens from evict_begin on.
  KeyRuns keys;
  std::atomic<bool> uncopied{false};   // a copy of selected rows found no memory; the next join() logs it
  std::atomic<bool> wants_all{false};  // some head lacks its copy, so the next eviction needs the rows of all tokens
  // Work space.
  std::vector<float> coeff;            // [queries that count]
  std::vector<WeightJob> weight_jobs;  // one for each KV head and block of the MAW
  std::vector<const float*> maw_rows;  // [n_q_heads]
  int64_t halo_reach = 0;              // tokens before an evicted block whose halo may reach into the block
  std::vector<int32_t> discarded;      // [n_kv_heads][halo_reach]

 private:
  void count_guess_of_host(const KeptGuess& kept, int64_t* window_begin);
  void count_guess_of_device(const KeptGuess& kept, int64_t* window_begin);
};

class Hgca final : public Selector {
 public:
  explicit Hgca(const SelectorSetup& setup);
  std::unique_ptr<SelectState> make_state() override { return std::make_unique<HgcaState>(*this); }
  void observe(const Observation& seen) override;  // lib/select/hgca_observe.cc

  Cache& cache() const { return *setup_.cache; }
  const Backend& cpu() const;
  const Layer& layer() const { return layer_; }
  int32_t layer_idx() const { return static_cast<int32_t>(setup_.layer_idx); }
  const PolicyOptions& options() const { return *setup_.options; }
  SelectorSums& sums() const { return *setup_.sums; }
  int64_t n_counted() const { return counted_queries(setup_.options->alpha); }
  int64_t evicted_to(int64_t window_begin, int64_t length) const;  // returns where the window begins at this length

 private:
  const SelectorSetup setup_;
  const Layer& layer_;
};

// Copies the rows of the selected tokens after loading.
void copy_loaded(HgcaState& state, const Sequence& sequence, int64_t window_begin);
// Judges evicted keys of several states of one layer, all heads in parallel.
void judge_evicted_by_all(std::span<SelectState* const> states);

}  // namespace tandem
