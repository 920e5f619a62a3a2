// SPDX-License-Identifier: MIT
// The table between the core and a device module. A module is a shared object that is opened at run time and never linked
// (lib/machine/device_module.h finds it). The table has plain data and C functions only, as core and module may come from
// different compilers.
//
// The rules of the CPU's table (lib/tables/backend.h) hold here too: the core decides which keys a query sees and where they
// are, and a module computes states. All work is stream-ordered. These functions alone wait for the device: wait(),
// functions that allocate or release, and copies from or to pageable memory.
//
// The window is pages in device memory. A page is page_len token slots in every layer, KV head and plane
// (lib/tables/planes.h). Token t of a sequence is in slot t % page_len of page table[(t / page_len) % table_len], where
// table is the sequence's page table.
//
// A call on device tensors is append(), attend(), merge() and, where moving averages of attention weights (MAW) are kept,
// observe(), in this order on a stream. Meanwhile the host attends the keys outside the window. Host and device hand over
// through shared host memory. They count instead of waiting for streams, so a captured graph can hand over too. Each
// append() takes a ticket, and the host answers tickets in order:
//
//   append()   waits until the ticket's slot is free (ticket + 1 < answered + n_slots); writes the new rows to the window;
//              writes the new rows, the queries and the indices of named keys to the slot; arrived = ticket + 1
//   host       waits for arrived > ticket; takes the rows into its store; leaves its states in the slot;
//              answered = ticket + 1
//   merge()    if there is a host part: waits for answered > ticket, merges the host's states with those of the window
//   observe()  counts the weights of the resident keys; leaves the MAW of keys that leave the window in the slot;
//              observed = ticket + 1
//   host       if the device left MAW: waits for observed > ticket and takes them, before it answers the next ticket
#pragma once

#include <cstdint>

#include "lib/model/layer.h"
#include "lib/tables/key_list.h"
#include "lib/tables/pattern_lists.h"
#include "lib/tables/planes.h"
#include "lib/tables/search.h"

namespace tandem {

// Keys outside the window may cross the bus in pieces (lib/routes/stream.cc). copy_batch() fills a buffer on one of the
// session's own streams. attend() attends the buffer like pages of the window. accumulate() merges its states into those of
// the window, unless attend() has merged earlier states into its own. Events tell when a buffer is full or free.

// Hidden states may cross the bus instead of K and V (lib/pieces/rebuilt_pieces.cc). rebuild() then makes rows of K and V
// from them, laid out as in pages, and attend() attends these rows like any others.

// Changes when a struct here or Layer changes. Structs that only grow at the end and state their size are exempt.
inline constexpr uint32_t kDeviceAbi = 15;
inline constexpr char kDeviceEntry[] = "tandem_device_module";

// Why a call failed. code is a TANDEM_ERROR_*, underlying the driver's code.
struct DeviceError {
  int32_t code = 0;
  int32_t reserved = 0;
  int64_t underlying = 0;
  char field[32] = "";
  char message[256] = "";
};

struct DeviceInfo {
  char name[256] = "";
  char refusal[128] = "";  // why the device cannot be used; "" if it can
  int64_t memory_bytes = 0;
  int32_t n_multiprocessors = 0;
  int32_t compute_capability = 0;  // 90 is 9.0
};

// Returns the layer as it is in the window. Keys that the library rotates (Layer::rope) are in the window rotated, as f32.
// Rounding them to k_type again would leave fewer bits than the host has. Rotating at every read would cost more than the
// extra bytes. append() rotates these keys, and the queries for attend() and observe(). A token's position never changes
// while the token is in a window. Rows in slots are as stored.
inline Layer window_layer(Layer layer) {
  if (layer.rope != nullptr) layer.k_type = TANDEM_F32;
  return layer;
}

// Returns whether append() rotates queries. append() also rotates keys that are rotated before they are stored
// (Layer::k_rotation), bit for bit as lib/model/hadamard.h does, and then rounds them. So window, slots and host store have
// the same rows.
inline bool rotates_queries(const Layer& layer) {
  return layer.rope != nullptr || layer.k_rotation == TANDEM_ROTATION_HADAMARD;
}

// Returns the number of floats in the table's cos_sin.
inline int64_t n_floats(const RopeTable& table) { return int64_t{RopeTable::kDigits} * 256 * 2 * table.n_pairs; }

// K and V of one layer in the pool. Planes and strides are multiples of 16 bytes.
struct DevicePages {
  std::byte* planes[kPlanes] = {};    // address of KV head 0 and slot 0, in the page that page tables call 0
  int64_t head_stride[kPlanes] = {};  // bytes from one KV head to the next
  int32_t page_len = 0;               // a multiple of 64
  float* maw = nullptr;               // MAW of the same page, [n_q_heads][page_len]; null: no MAW are kept
};

// One sequence of a call, in device memory. It may change between replays of a graph.
struct DeviceSequence {
  int64_t begin = 0;  // the keys are tokens [begin, end);
  int64_t end = 0;    // the queries are the last of [0, end + n_after)
  int32_t q_len = 0;
  int32_t first_row = 0;    // first row of the queries in q, o and lse
  int32_t table_begin = 0;  // begin of the sequence's page table in page_tables
  int32_t table_len = 0;
  int32_t has_host_part = 0;  // the host leaves states for all rows of the sequence
  int32_t step = 0;           // in the call's first sequence: the call's step, which the slot's header returns
  int64_t evict_end = 0;      // tokens [begin, evict_end) leave the window with this call
  int32_t first_evicted = 0;  // where the first of these tokens is in a slot's rows of MAW
  int32_t wants_lse = 0;      // with a host part: the merged lse also go to the slot
  int64_t position = 0;       // position of the first query; later queries follow
  int64_t n_after = 0;        // attend() of a piece: tokens behind its keys, up to the last query; else 0
  // For search() and bound_chunks() (lib/tables/search.h); 0 in other calls.
  std::byte* kept_lists = nullptr;  // lists of the sequence in this layer, in device memory
  int64_t bounded = 0;              // complete chunks of tokens [0, bounded) have bounds
  uint32_t kept_mark = 0;           // lists with another mark are not valid; never 0
  int32_t first_list = 0;           // for a block: first of attend()'s sequences that have its list
};

// The sequences of a call, in device memory. They change between the replays of a graph. Copies, not kernels, write them and
// the page tables, so a kernel may read them before the kernel in front of it has ended.
struct DeviceSequences {
  const DeviceSequence* sequences = nullptr;  // [n_sequences]
  const int64_t* page_tables = nullptr;       // bytes from the page called 0 to each page
  int32_t n_sequences = 0;
  int32_t max_q_len = 0;  // most queries of a sequence, now and in every replay
  int64_t max_keys = 0;   // most keys of a sequence, now and in every replay
};

// Reports a wrong index of a call: it names no unit at or before the query's own token, or is out of order. The device
// writes a report where n_told = n_taken and then adds 1 to n_told. The host takes the report and adds 1 to n_taken.
struct BadIndex {
  uint32_t n_told = 0, n_taken = 0;
  int32_t layer_idx = 0, head = 0, value = 0;
  // In the call's tensor: row is the token, place the index in the row. own: the query's token in its sequence.
  int64_t row = 0, place = 0, own = 0;
};

// Counters in shared memory. One side alone writes each of them. All start at 0.
struct ExchangeFlags {
  alignas(64) uint64_t arrived = 0;   // written by the device
  alignas(64) uint64_t answered = 0;  // written by the host
  alignas(64) uint64_t observed = 0;  // written by the device; tickets without observe() do not count
  alignas(64) uint32_t busy = 0;      // written by the host: it is computing. The device must not time out while this is 1
  alignas(64) uint8_t ended = 0;      // written by the device, by fill(): the last step that has ended, modulo 256
  // Written by the device: it has waited too long for the host (kFault...) and does no more work.
  alignas(64) uint32_t fault = 0;
  alignas(64) BadIndex bad_index;  // the first wrong index since the host took the last report
};
inline constexpr uint32_t kFaultSlot = 1, kFaultAnswer = 2;

// The first bytes of a slot: the device's request, for the host to compare.
struct SlotHeader {
  uint64_t ticket = 0;
  int32_t tag = 0;
  int32_t n_sequences = 0;
  int32_t step = 0;  // step of the first sequence; 0 if there is none
  // From the call's DeviceIndices. idx_heads = 0: the call names no keys.
  int32_t n_idx = 0, idx_heads = 0;
  int16_t unit_shift = 0, plus_window = 0;
};

// All addresses are device addresses. In a slot, a sequence's rows of q, o and lse begin with row first_row. Within a
// sequence they are ordered [n_kv_heads][q_len][group_size].
struct DeviceExchange {
  ExchangeFlags* flags = nullptr;
  std::byte* slots = nullptr;  // [n_slots][slot_bytes], each begins with its header
  int64_t* state = nullptr;    // [kExchangeWords] in device memory for the module, zero at first
  int64_t slot_bytes = 0;
  int64_t timeout_ns = 0;  // longest wait on the device
  int32_t n_slots = 0;
  int32_t n_rows = 0;  // rows of a KV head that fit in a slot: at least the call's n_tokens
  // Offsets in a slot in bytes. q: f32 [n_tokens * n_q_heads, k_head_dim] of sequences with a host part, rotated as keys.
  int64_t q_at = 0;
  int64_t o_at = 0, lse_at = 0;   // f32 [n_tokens * n_q_heads, v_head_dim], f32 [n_tokens * n_q_heads]
  int64_t rows_at[kPlanes] = {};  // the new rows [n_kv_heads][n_tokens] of each plane, as stored
  int64_t x_at = 0;               // the new hidden states [n_tokens][hidden_dim], as stored
  int64_t maw_at = 0;             // f32 [n_q_heads][n_evicted]
  int64_t idx_at = 0;             // int32 [n_tokens][idx_heads][n_idx], of all sequences
  int64_t n_idx = 0;              // indices that fit in a slot
  int32_t n_evicted = 0;          // tokens whose MAW fit in a slot
  int32_t reserved = 0;

  bool operator==(const DeviceExchange& other) const = default;
};
inline constexpr int32_t kExchangeWords = 16;

// Strided rows [n_tokens, n_heads, head_dim] in device memory; strides in elements.
struct DeviceRows {
  void* data = nullptr;  // inputs are never written
  int32_t dtype = 0;     // f32, f16 or bf16
  int32_t reserved = 0;
  int64_t token_stride = 0, head_stride = 0;
};

// Writes k and v, rounded as the host's backend rounds them, to the last q_len tokens of each sequence, and hands over.
//
// With exchange.flags null, append() takes no ticket and hands nothing over. The rows for a slot then go to exchange.slots,
// which is device memory in this case, as rows_at, x_at and n_rows say. No sequence has a host part.
struct DeviceAppend {
  const Layer* layer = nullptr;
  DevicePages pages;
  DeviceSequences sequences;
  DeviceRows q, k, v;    // k.data null: nothing is appended. v.data is also null where V aliases K
  int32_t n_tokens = 0;  // rows of q, k and v; replays have at most as many
  int32_t tag = 0;       // for the slot's header
  DeviceExchange exchange;
  // Used if layer->rope is set: the table's cos_sin in device memory. Used if rotates_queries(*layer): rotated_q, [n_tokens,
  // n_q_heads, k_head_dim], output, which attend() and observe() take as q. q.data is not null then.
  const float* rope = nullptr;
  float* rotated_q = nullptr;
  // [n_tokens] in device memory, instead of the positions in sequences; null: those in sequences
  const int32_t* positions = nullptr;
  // [n_tokens, 1, hidden_dim], sent to the host alone. data null: the layer keeps none, or nothing is appended
  DeviceRows x;
  // Room for kernels that run at the same time. 1: append uses an eighth of the device, 2: as little as possible.
  int32_t leaves_room = 0;
  int32_t reserved = 0;
  DeviceIndices idx;  // handed over unchanged
  // Not 0: the module may write the window's rows before the slot's rows, and signals this by the number, so that attend()
  // or search() can run at the same time (DeviceAttend::append, DeviceSearch::append). Each such call of an exchange has
  // another number; replays of a call keep its number. merge() follows them.
  int64_t epoch = 0;
};

// Makes key lists from indices. Here each query is a sequence with one query, whose own token is end + n_after - 1. It sees
// no key before `begin` and none from `end` on. Its list has the tokens of the named units in [begin, end). With plus_window
// it also has the first sink_len tokens of the sequence and the newest window_len tokens up to the query's own. A wrong row
// gives a wrong list (DeviceKeys::n) and a BadIndex.
struct DeviceNamedKeys {
  int32_t page_len = 0;
  int32_t layer_idx = 0;      // for BadIndex
  int64_t first_row = 0;      // for BadIndex: row of the first token, in the call's tensor
  DeviceSequences sequences;  // the queries, in the order of their rows
  DeviceIndices idx;
  int64_t sink_len = 0, window_len = 0;
  // [n_tokens] in device memory: positions of speculative tokens, whose newest tokens are counted along their chains. Null:
  // the newest tokens of a query are those up to its own.
  const int32_t* positions = nullptr;
  DeviceKeys* keys = nullptr;      // [n_sequences][idx.n_heads]
  KeyGranule* granules = nullptr;  // [n_sequences][idx.n_heads][n_granules]
  int32_t n_granules = 0;          // room of a list, in granules
  int32_t n_lists = 0;             // room in `keys`, in lists
  ExchangeFlags* flags = nullptr;
  int64_t* state = nullptr;  // the exchange's
};

// Computes bounds of complete chunks that have none. In each sequence and for each of these chunk lengths, these are the
// chunks whose last tokens are in [bounded, end).
struct DeviceBoundChunks {
  const Layer* layer = nullptr;  // as in attend()
  DevicePages pages;
  DeviceSequences sequences;
  DeviceBounds bounds[kMostSearchStages];
  int32_t n_bounds = 0;
  int32_t reserved = 0;
};

// Searches for the chunks that query blocks attend. lib/tables/search.h defines the result. A search runs one stage after
// another on the stream and writes a key list for attend(), for each block and list.
//
// With window_begin = max(p0 + 1 - window_len, 0), a block's key list names these tokens before window_begin: the sinks [0,
// sink_len) and the chunks that the last stage has kept. The list's range begins at window_begin. Tokens of kept chunks that
// are in the window are only in the range. If no stage is active, the range begins at 0 and the list names nothing else.
struct DeviceSearch {
  const Layer* layer = nullptr;  // as in attend()
  DevicePages pages;
  DeviceSequences sequences;  // the query blocks, without those that have no queries
  DeviceRows q;               // as in attend()
  DeviceSearchStage stages[kMostSearchStages];
  DeviceBounds bounds[kMostSearchStages];
  int32_t n_stages = 0, n_bounds = 0;
  int64_t sink_len = 0, window_len = 0;
  int32_t shares_lists = 0;
  // 1: blocks have one query each, and lists are kept between calls. A stage runs again in four cases: its interval has
  // passed since it ran (p0 - ran_at >= interval), the stage before it runs, its list has another mark, or other stages were
  // active then. Otherwise its list stays. Candidates reach into the window by the overlap. For each length in `bounds`, the
  // newest chunk that is complete before p0 gets its bounds.
  // 0: all stages run, and the lists are of no use afterwards.
  int32_t keeps_lists = 0;
  void* workspace = nullptr;  // search_bytes() bytes; zeroed once, then reused by one search after another
  int64_t most_keys = 0;      // most tokens of a sequence, now and in every replay, for which the work space has room
  // Output. Key list l of block b is keys[sequence * n_lists + l], for each of the block's sequences in attend(): first_list
  // .. first_list + ceil(q_len / list_queries) - 1. Granules of list l of a block: granules[(b * n_lists + l) * n_granules
  // ..].
  DeviceKeys* keys = nullptr;
  KeyGranule* granules = nullptr;
  int32_t n_granules = 0;    // room of a list, in granules
  int32_t list_queries = 1;  // queries of the block in each of attend()'s sequences
  // The append() before the search on this stream, as in DeviceAttend::append. The search begins as soon as the window has
  // the append's rows. append() may still hand rows over to the host then. Neither the search nor attend() waits for its
  // end, but merge() does (DeviceMerge::append).
  const DeviceAppend* append = nullptr;
};

// Head patterns, which lib/tables/pattern_lists.h defines. index_patterns() chooses keys for all query heads. Then
// list_patterns(), called once or more, writes the key lists of n_lists of these heads.
struct DevicePatterns {
  const Layer* layer = nullptr;  // as in attend()
  DevicePages pages;
  DeviceSequences sequences;                 // whole sequences: max_keys is the largest `end`, max_q_len the largest q_len
  DeviceRows q;                              // as in attend()
  const DeviceHeadPattern* heads = nullptr;  // [n_q_heads] in device memory; copies write them
  uint32_t kinds = 0;                        // all kinds that any head has
  int32_t n_granules = 0;                    // room of a list, in granules; a list that needs more is wrong (DeviceKeys::n)
  void* workspace = nullptr;  // pattern_bytes() bytes; zeroed once, then reused by one call after another, search() included
  uint32_t* choices = nullptr;  // [n_sequences][n_q_heads][PatternChoices::n_words()]
  // For list_patterns(): list i belongs to query head first_head + i * head_step. Block b of sequence s has the key lists
  // keys[sequence * n_lists + i], for attend()'s sequences first_list + b * parts up to first_list + (b + 1) * parts. Here
  // first_list is that of s, and parts = ceil(kPatternBlock / list_queries), or as many as the last block's queries need.
  // The granules of these lists are granules[block * n_lists + i][n_granules], where block = first_list / parts + s + b,
  // rounded down: a different number for each block, less than the call's blocks + n_sequences.
  int32_t first_head = 0, head_step = 1, n_lists = 0;
  int32_t list_queries = 1;  // queries in each of attend()'s sequences; the last of a block has fewer
  DeviceKeys* keys = nullptr;
  KeyGranule* granules = nullptr;
  // [2] in device memory. list_patterns() adds to totals[0] the pairs of a query and a key before the query's range_begin.
  // It adds to totals[1] the number of such keys, for each block and list.
  uint64_t* totals = nullptr;
};

// Where output rows [n_tokens, n_q_heads, v_head_dim] and, if not null, their lse with these strides are written. sinks: the
// learned sinks [n_q_heads], merged once, where no more keys follow; null: none.
struct DeviceOutput {
  DeviceRows o;
  float* lse = nullptr;
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;
};

// Attends the resident keys of several sequences in one layer. Query t of a sequence is token end + n_after - q_len + t. It
// sees tokens up to its own and, with a sliding window, only those that the window reaches. o is normalised. Where a query
// sees nothing, o is 0 and lse is -inf.
struct DeviceAttend {
  const Layer* layer = nullptr;
  DevicePages pages;
  DeviceSequences sequences;
  DeviceRows q, o;
  float* lse = nullptr;  // [n_tokens, n_q_heads] with these strides, or null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;  // [n_q_heads], merged once, here, where no more keys follow; null: none
  // States over other keys, [n_tokens, n_q_heads, v_head_dim] and [n_tokens, n_q_heads], to which the new states are added.
  // They may be the memory of o and lse. Null: there are none.
  const float *before_o = nullptr, *before_lse = nullptr;
  // workspace_bytes() of a call with at least as many sequences and queries. Zeroed once, then reused by one call after
  // another.
  void* workspace = nullptr;
  // Null: each head attends all keys. With granules, a sequence's queries times group_size are at most most_list_rows(), and
  // before_o is null.
  DeviceLists lists;
  // With tiles, which exclude `lists`, a kernel reads their keys only. All their tokens are in [begin, end) of the
  // DeviceSequence, which may be one piece of the keys.
  DeviceTileLists tiles;
  // Where rows of sequences without a host part are written, instead of o and lse. merge() then has nothing to do for them
  // (DeviceMerge::leaves_finished). o.data null: not used. Otherwise before_o is null.
  DeviceOutput finished;
  // The append() before this call on the stream, if it has an epoch. If the module writes the window's rows first, attention
  // begins once the window has them, while append() still hands over. Null: attention begins when the kernel before it has
  // ended.
  const DeviceAppend* append = nullptr;
};

// Merges the states of the window and the host into one, the learned sinks last.
struct DeviceMerge {
  const Layer* layer = nullptr;
  DeviceSequences sequences;
  int32_t n_tokens = 0;  // as in DeviceAppend; any number if no sequence has a host part
  // observe() follows: the merged lse replace the window's and, where wanted, the host's.
  int32_t is_observed = 0;
  int32_t leaves_finished = 0;  // 1: attend() has finished the rows of sequences without a host part
  int32_t reserved = 0;
  const float* o = nullptr;  // the window's, [n_tokens, n_q_heads, v_head_dim]
  float* lse = nullptr;      // [n_tokens, n_q_heads]
  DeviceRows o_out;
  float* lse_out = nullptr;  // with these strides, or null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;  // [n_q_heads] in device memory, or null
  DeviceExchange exchange;
  // An append for whose end no earlier kernel has waited. merge() waits for it, and no sequence has a host part. Null:
  // earlier kernels have waited.
  const DeviceAppend* append = nullptr;
};

// Updates the MAW. With w_i the weights exp(logit - lse) of query i = 0 .. n - 1 of a sequence over its resident keys, or 0
// for keys that the query does not see and where lse is not finite:
//
//   maw = (1 - alpha)^n maw + sum_i alpha (1 - alpha)^(n - 1 - i) w_i
//
// The sum is over the last n_counted queries, as older ones have faded. Tokens that the call has appended start at 0.
struct DeviceObserve {
  const Layer* layer = nullptr;
  DevicePages pages;
  DeviceSequences sequences;
  DeviceRows q;
  const float* lse = nullptr;  // [n_tokens, n_q_heads], merged
  int32_t n_tokens = 0;        // as in DeviceAppend
  int32_t has_appended = 0;    // the call's tokens are new
  float alpha = 0.0f;
  int32_t n_counted = 0;
  DeviceExchange exchange;
};

// Merges a part's states into existing states over disjoint keys: those of n_heads query heads from first_head on, for
// tokens [first_row, first_row + n_rows). Rows of both are [.., n_q_heads, v_head_dim] of the layer. An empty state (lse
// -inf) has no effect, whatever its o is.
struct DeviceAccumulate {
  const Layer* layer = nullptr;
  int32_t first_row = 0, n_rows = 0, first_head = 0, n_heads = 0;
  float* o = nullptr;
  float* lse = nullptr;  // [.., n_q_heads]
  const float* part_o = nullptr;
  const float* part_lse = nullptr;
};

// A layer's projection in device memory. Members are null for parts that the projection lacks.
struct DeviceProjection {
  const void *w_k = nullptr, *w_v = nullptr;
  const float *b_k = nullptr, *b_v = nullptr;
  const float *norm_weight = nullptr, *norm_bias = nullptr;
  const float* rope = nullptr;  // cos_sin
};

// Computes rows of K and V of all heads from hidden states (lib/model/projection.h defines how). Sums are in f32. Normalised
// numbers are rounded to w_type. Each number of K and V is rounded once, to its storage type, as append() rounds it. Row i
// of x goes to slot i % page_len of page i / page_len. Rows are independent, so rows that no query will attend may hold
// anything.
struct DeviceRebuild {
  const Layer* layer = nullptr;  // x_type is the type of x
  DeviceProjection projection;
  const void* x = nullptr;  // [n_rows, hidden_dim]
  int64_t n_rows = 0;
  DevicePages pages;
  int64_t page_bytes = 0;                   // from a page to the next
  const int64_t* page_positions = nullptr;  // where keys are rotated: position of slot 0 of each page, in device memory
  void* workspace = nullptr;                // rebuild_bytes() bytes, 256-byte aligned
  void* read = nullptr;                     // event or null; recorded once x and page_positions have been read
  // Event or null. Pages are written only after this event; all other work may begin before.
  void* writable = nullptr;
};

// n_rows rows of row_bytes bytes, at the given strides. Copies go from any memory to device memory, or from device memory to
// pinned memory.
struct StridedCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t row_bytes = 0, n_rows = 0;
  int64_t to_stride = 0, from_stride = 0;
};

struct DeviceTable {
  uint32_t abi;
  uint32_t struct_size;
  const char* name;
  int32_t (*n_devices)(DeviceError* error);  // returns -1 on failure
  void (*describe)(int32_t device_idx, DeviceInfo* info);
  // The functions below that return int32_t return 0, or a TANDEM_ERROR_* and the reason in *error.
  int32_t (*open)(int32_t device_idx, void** self, DeviceError* error);
  void (*close)(void* self);
  int32_t (*allocate)(void* self, int64_t bytes, void** data, DeviceError* error);  // device memory, 256-byte aligned
  void (*release)(void* self, void* data);
  int32_t (*copy)(void* self, void* to, const void* from, int64_t bytes, void* stream, DeviceError* error);  // any direction
  int32_t (*fill)(void* self, void* data, int32_t byte, int64_t bytes, void* stream, DeviceError* error);
  int32_t (*wait)(void* self, void* stream, DeviceError* error);
  // Host memory that the device can read and write, 256-byte aligned and zeroed, with its address on the device.
  int32_t (*allocate_shared)(void* self, int64_t bytes, void** host, void** device, DeviceError* error);
  void (*release_shared)(void* self, void* host);
  // Checks that the device is still there (DEVICE_LOST). Any thread may call it.
  int32_t (*check)(void* self, DeviceError* error);
  // *is_capturing: true if calls on the stream are captured in a graph instead of run.
  int32_t (*capturing)(void* self, void* stream, int32_t* is_capturing, DeviceError* error);
  // Checks that kernels exist for calls of up to max_q_len queries a sequence. Else UNSUPPORTED and the reason.
  int32_t (*supports)(void* self, const Layer* layer, int32_t max_q_len, DeviceError* error);
  int64_t (*workspace_bytes)(void* self, const DeviceAttend* call);
  // Returns the most query rows (queries of a sequence times group_size) that attend() takes with granules, for queries like
  // q: 64 or more, INT32_MAX if there is no limit.
  int32_t (*most_list_rows)(void* self, const Layer* layer, const DeviceRows* q);
  int32_t (*append)(void* self, const DeviceAppend* call, void* stream, DeviceError* error);
  int32_t (*attend)(void* self, const DeviceAttend* call, void* stream, DeviceError* error);
  int32_t (*merge)(void* self, const DeviceMerge* call, void* stream, DeviceError* error);
  int32_t (*observe)(void* self, const DeviceObserve* call, void* stream, DeviceError* error);
  int32_t (*accumulate)(void* self, const DeviceAccumulate* call, void* stream, DeviceError* error);
  // Creates a stream that waits for no other stream, not even the default stream, unless told to. If the device has room for
  // one call only, this stream's calls come before those of streams that were created elsewhere.
  int32_t (*create_stream)(void* self, void** stream, DeviceError* error);
  void (*destroy_stream)(void* self, void* stream);
  // Work after wait_event() starts once all work before record_event() has finished. wait_event() does not wait for an event
  // that was never recorded.
  int32_t (*create_event)(void* self, void** event, DeviceError* error);
  void (*destroy_event)(void* self, void* event);
  int32_t (*record_event)(void* self, void* event, void* stream, DeviceError* error);
  int32_t (*wait_event)(void* self, void* event, void* stream, DeviceError* error);
  // Reads pinned memory when the stream reaches the copy. Reads other memory at that time or earlier.
  int32_t (*copy_strided)(void* self, const StridedCopy* copy, void* stream, DeviceError* error);
  // As copy_strided(), for all copies of a list, in any order. stream: from create_stream().
  int32_t (*copy_batch)(void* self, const StridedCopy* copies, int64_t n_copies, void* stream, DeviceError* error);
  // Pins host memory, so that copies read it at the bus's full rate, until unpin().
  int32_t (*pin)(void* self, void* data, int64_t bytes, DeviceError* error);
  void (*unpin)(void* self, void* data);
  // Checks that rebuild() can serve the layer. Else UNSUPPORTED and the reason, for example a missing library.
  int32_t (*supports_rebuild)(void* self, const Layer* layer, DeviceError* error);
  int64_t (*rebuild_bytes)(void* self, const Layer* layer, int64_t n_rows);  // work space
  int32_t (*rebuild)(void* self, const DeviceRebuild* call, void* stream, DeviceError* error);
  int32_t (*name_keys)(void* self, const DeviceNamedKeys* call, void* stream, DeviceError* error);
  int32_t (*bound_chunks)(void* self, const DeviceBoundChunks* call, void* stream, DeviceError* error);
  int64_t (*search_bytes)(void* self, const DeviceSearch* call);  // work space for as many blocks and keys
  int32_t (*search)(void* self, const DeviceSearch* call, void* stream, DeviceError* error);
  int64_t (*pattern_bytes)(void* self, const DevicePatterns* call);  // work space for as many keys and queries
  int32_t (*index_patterns)(void* self, const DevicePatterns* call, void* stream, DeviceError* error);
  int32_t (*list_patterns)(void* self, const DevicePatterns* call, void* stream, DeviceError* error);
};

// A module's exported symbol, named kDeviceEntry. Returns the module's table if it serves this core's ABI number, else null.
using DeviceEntryFn = const DeviceTable* (*)(uint32_t abi);

}  // namespace tandem
