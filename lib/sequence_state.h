// SPDX-License-Identifier: MIT
// What a session knows about one sequence: per layer the window's begin, the moving average of attention weights (MAW) of
// every query head and token, and what each KV head has selected of the tokens outside the window.
//
// Selections are refreshed (lib/refresh.cc) after appends and evictions, for the next attend of the same layer and sequence.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lib/cache.h"
#include "lib/device_window.h"
#include "lib/policies/policy.h"
#include "lib/worker.h"

namespace tandem {

class Session;

// MAW of all query heads, in blocks of kBlock tokens so that growing never copies. New tokens start at 0.
class Maw {
 public:
  static constexpr int64_t kBlock = 2048;

  Status reserve(Tier& tier, int32_t n_q_heads, int64_t n_tokens, const Watch& watch = {});
  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * kBlock; }
  // Of one head from token on; valid up to the end of the token's block.
  float* at(int32_t q_head, int64_t token) const {
    return blocks_[static_cast<size_t>(token / kBlock)].as<float>() + q_head * kBlock + token % kBlock;
  }
  void clear(int32_t n_q_heads, int64_t begin, int64_t end);
  void erase(int32_t n_q_heads, int64_t first, int64_t n_tokens, int64_t length);
  Status copy_from(Tier& tier, const Maw& from);

 private:
  std::vector<Buffer> blocks_;
};

// Rows of consecutive selected tokens, side by side.
struct SelectionChunk {
  int64_t first = 0;  // of the head's selected tokens
  int64_t n_rows = 0;
  Buffer planes[kPlanes];  // [n_rows] rows each

  static Status create(Tier& tier, const PlaneBytes& bytes, int64_t first, int64_t n_rows, SelectionChunk* chunk);
  Rows row(const PlaneBytes& bytes, int64_t i) const {  // of selected token i
    Rows rows;
    for (int32_t p = 0; p < kPlanes; ++p) rows.of[p] = planes[p].data();
    return rows.after(bytes, i - first);
  }
};

// The selected tokens of one KV head, ascending, and their rows copied together so that attention scans them linearly, in a
// few chunks so that growing copies little. The indices are the truth: where the tier has no room for the copy, attention
// reads the store token by token.
struct HeadSelection {
  Buffer token_idx;  // [capacity of the layer] int32
  int64_t n_tokens = 0;
  std::vector<SelectionChunk> chunks;  // one behind the other
  int64_t n_copied = 0;                // leading tokens whose rows are in the chunks; all of them, or the copy is not used

  void cut(int64_t end);  // tokens from `end` on are not selected any more
  int64_t capacity() const { return chunks.empty() ? 0 : chunks.back().first + chunks.back().n_rows; }
  Rows row(const PlaneBytes& bytes, int64_t i) const {  // of token i < capacity()
    size_t c = chunks.size() - 1;
    while (chunks[c].first > i) --c;
    return chunks[c].row(bytes, i);
  }
};

// Where the rows of tokens [begin, length) are.
struct KeyRuns {
  std::vector<KvRun> runs;  // of head 0 .. n_kv_heads - 1, n_runs each
  int64_t n_runs = 0;
  int64_t begin = 0, length = 0;
  bool keeps_positions = false;  // positions of keys are not their indices and the library rotates: nothing is copied
};

// Queries whose weights the next refresh will count, newest last, and what it is to do.
struct Refresh {
  Job job;
  Session* session = nullptr;
  struct LayerState* state = nullptr;
  const Layer* layer = nullptr;
  const Policy* policy = nullptr;
  bool due = false;       // queries wait for a refresh that nobody has posted yet
  bool eviction = false;  // only tokens [evict_begin, evict_end) are judged; else all outside the window
  int64_t evict_begin = 0, evict_end = 0;
  int64_t n_queries = 0;               // held
  int64_t n_skipped = 0;               // older queries of the same appends, whose weight has faded
  int64_t held_end = 0;                // the held ones are to count in keys before it: a device has counted them in others
  int64_t host_end = 0;                // where the window begins
  std::vector<float> q;                // [n_kv_heads][capacity][group_size][k_head_dim], rotated
  std::vector<float> lse;              // [n_kv_heads][capacity][group_size]
  std::vector<int64_t> begin, end;     // [capacity] visible range of each query
  KeyRuns keys;                        // of all tokens at the time of posting; of an eviction from evict_begin on, at least
  std::vector<float> coeff;            // [capacity], work space as what follows
  std::vector<WeightJob> weight_jobs;  // a head's tokens of a block of the MAW each
  std::vector<const float*> maw_rows;  // [n_q_heads]
  int64_t halo_reach = 0;              // tokens before an evicted block that may still cast a halo into it
  std::vector<int32_t> discarded;      // [n_kv_heads][halo_reach]
  std::atomic<bool> uncopied{false};   // the job found no room for a copy: logged by the next call
  std::atomic<bool> wants_all{false};  // since then an eviction too is to say where the rows of all tokens are

  void take_keys(KeyRuns* late);  // and room for them; none: it keeps its own
};

// Speculative tokens: the weights of their queries, to be counted if they stay.
struct Speculation {
  int64_t first_key = 0;  // of the resident part
  int64_t n_keys = 0;
  std::vector<float> logits;  // [n_kv_heads][q_len][group_size][n_keys]
  std::vector<float> lse;     // [n_kv_heads][q_len][group_size]
  std::vector<float> q;       // [n_kv_heads][q_len][group_size][k_head_dim] of a call on a device, which gives no logits
};

struct LayerState {
  int64_t window_begin = 0;
  bool is_unjudged = false;  // appends on the device have been counted, and nothing selected since
  Maw maw;
  std::vector<HeadSelection> heads;  // [n_kv_heads]; empty without MAW
  Refresh refresh;
  Speculation speculation;
};

struct SequenceState {
  std::vector<std::unique_ptr<LayerState>> layers;
  DeviceWindow window;  // no pages without a device
};

// Number of last queries that matter: weights of older ones have faded below 1e-6.
int64_t refresh_queries(float alpha);

// Queries to be counted in the MAW of tokens [first_token, end_token), the newest last.
struct CountedQueries {
  const float* q = nullptr;    // of KV head 0, [n][group_size][k_head_dim]
  const float* lse = nullptr;  // likewise
  int64_t head_stride = 0;     // rows from one KV head to the next
  int64_t n = 0;
  int64_t n_skipped = 0;
  const int64_t* begin = nullptr;  // [n] visible range of each
  const int64_t* end = nullptr;
  int64_t first_token = 0, end_token = 0;
};

// They read and write the state alone. The first runs on the calling thread, the others on the pool as well.
void judge_evicted(void* refresh);
void judge_evicted_by_all(const std::vector<Refresh*>& refreshes);  // of one layer
void count_weights(Refresh& refresh, const CountedQueries& queries);
void count_held(Refresh& refresh);   // the queries that it holds, if any; it holds none then
void re_evaluate(Refresh& refresh);  // with these
// Before any of them: of whom and what, and room.
void bind_refresh(Session& session, LayerState& state, size_t layer_idx);
void reserve_refresh(Refresh& refresh);                           // for its keys
void reserve_held(Refresh& refresh);                              // for the queries that it holds
void post_refresh(Refresh& refresh, void (*run)(void* refresh));  // to the engine's thread

}  // namespace tandem
