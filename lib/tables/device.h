// SPDX-License-Identifier: MIT
// The table between the core and a device module: a shared object that is opened at run time and never linked
// (lib/machine/device_module.h finds it). Plain data and C functions only, as the two may come from different compilers.
//
// What holds for the CPU's table (lib/tables/backend.h) holds here: the core decides which keys a query sees and where they
// are, a module computes states. Everything is stream-ordered; nothing here waits for the device but wait(), what allocates
// and releases, and copies from or to pageable memory.
//
// The window is pages in device memory. A page is page_len token slots in every layer, KV head and plane
// (lib/tables/planes.h); a sequence's page table says where token t is: slot t % page_len of page table[(t / page_len) %
// table_len].
//
// A call on device tensors is append(), attend(), merge() and, where moving averages of attention weights (MAW) are kept,
// observe(), one after another on a stream; meanwhile the host attends to the keys outside the window. The two hand over
// through memory of the host that both see, by counting and not by waiting for streams, so that a captured graph can do it
// too. Each append() is a ticket, the host answers tickets in their order:
//
//   append()   waits until the ticket's slot is free (ticket + 1 < answered + n_slots); writes the new rows to the window
//              and, with the queries and the indices of the keys that the caller names, to the slot; arrived = ticket + 1
//   host       waits for arrived > ticket; takes the rows into its store; leaves its states in the slot;
//              answered = ticket + 1
//   merge()    where there is a host part: waits for answered > ticket, merges its states with those of the window
//   observe()  counts the weights of the resident keys; leaves the MAW of those that leave the window in the slot;
//              observed = ticket + 1
//   host       where something was handed over: waits for observed > ticket and takes it, before it answers the next ticket
#pragma once

#include <cstdint>

#include "lib/model/layer.h"
#include "lib/tables/key_list.h"
#include "lib/tables/pattern_lists.h"
#include "lib/tables/planes.h"
#include "lib/tables/search.h"

namespace tandem {

// Keys that are not in the window may cross the bus in pieces (lib/routes/stream.cc): copy_batch() on a stream of the
// session's own fills a buffer, attend() attends it as it does pages of the window, and accumulate() takes its states into
// those of the window, where attend() has not added those before to its own. Events say when a buffer is full, or free.

// Or, instead of K and V, the hidden states that they come from cross the bus (lib/pieces/rebuilt_pieces.cc), rebuild()
// makes rows of K and V of them as they would lie in pages, and these are attended like any others.

// Changes with every struct here and with Layer, unless they only grow at the end and say how far they are filled.
inline constexpr uint32_t kDeviceAbi = 15;
inline constexpr char kDeviceEntry[] = "tandem_device_module";

// Why a call failed; code is a TANDEM_ERROR_*, underlying the driver's.
struct DeviceError {
  int32_t code = 0;
  int32_t reserved = 0;
  int64_t underlying = 0;
  char field[32] = "";
  char message[256] = "";
};

struct DeviceInfo {
  char name[256] = "";
  char refusal[128] = "";  // why the device cannot be used; "" where it can
  int64_t memory_bytes = 0;
  int32_t n_multiprocessors = 0;
  int32_t compute_capability = 0;  // 90 is 9.0
};

// Keys that the library rotates (Layer::rope) are in the window as they are used: rotated, as f32. Rounded to k_type once
// more they would have fewer bits than the host's, and rotated at every read they would cost more than the bytes that this
// does. append() rotates them, and the queries for attend() and observe(). A token's position never changes while it is in a
// window. Rows in slots are as stored. This is what the window has of a layer:
inline Layer window_layer(Layer layer) {
  if (layer.rope != nullptr) layer.k_type = TANDEM_F32;
  return layer;
}

// Whether append() rotates queries. Keys that are rotated before they are stored (Layer::k_rotation) are rotated by
// append(), too, bit for bit as lib/model/hadamard.h does it, and then rounded: window, slots and the host's store have the
// same rows.
inline bool rotates_queries(const Layer& layer) {
  return layer.rope != nullptr || layer.k_rotation == TANDEM_ROTATION_HADAMARD;
}

// Of its cos_sin.
inline int64_t n_floats(const RopeTable& table) { return int64_t{RopeTable::kDigits} * 256 * 2 * table.n_pairs; }

// K and V of one layer in the pool. Planes and strides are multiples of 16 bytes.
struct DevicePages {
  std::byte* planes[kPlanes] = {};    // of KV head 0, slot 0 in the page that tables call 0
  int64_t head_stride[kPlanes] = {};  // bytes from one KV head to the next
  int32_t page_len = 0;               // a multiple of 64
  float* maw = nullptr;               // in that page [n_q_heads][page_len]; null: none are kept
};

// One sequence of a call, in device memory: a graph is replayed while these change.
struct DeviceSequence {
  int64_t begin = 0;  // the keys are tokens [begin, end);
  int64_t end = 0;    //   the queries are the last of [0, end + n_after)
  int32_t q_len = 0;
  int32_t first_row = 0;    // of the queries in q, o and lse
  int32_t table_begin = 0;  // of its page table in page_tables
  int32_t table_len = 0;
  int32_t has_host_part = 0;  // the host leaves states for all its rows
  int32_t step = 0;           // of the call, in its first sequence: handed back in the header
  int64_t evict_end = 0;      // tokens [begin, evict_end) leave the window with this call
  int32_t first_evicted = 0;  // place of the first of them in a slot's rows of MAW
  int32_t wants_lse = 0;      // of the merged states, where there is a host part: in the slot
  int64_t position = 0;       // of the first query; those of the others follow
  int64_t n_after = 0;        // in attend(), of a piece: tokens behind its keys, up to the last query; else 0
  // Of search() and bound_chunks() (lib/tables/search.h), 0 in other calls.
  std::byte* kept_lists = nullptr;  // where the lists of the sequence in this layer are, in device memory
  int64_t bounded = 0;              // tokens [0, bounded): the chunks in there have bounds
  uint32_t kept_mark = 0;           // lists that were made under another mark are not there any more; never 0
  int32_t first_list = 0;           // of a block: attend()'s first sequence that has its list
};

// The sequences of a call, in device memory: they change between the replays of a graph. Copies write them and the page
// tables, not kernels: calls may look at them before the kernel in front of theirs has ended.
struct DeviceSequences {
  const DeviceSequence* sequences = nullptr;  // [n_sequences]
  const int64_t* page_tables = nullptr;       // bytes from the page called 0 to this one
  int32_t n_sequences = 0;
  int32_t max_q_len = 0;  // of any sequence, now and in every replay
  int64_t max_keys = 0;   // likewise
};

// An index of a call that names no unit of the sequence up to the query's own token, or that is out of order. The device
// writes one where n_told = n_taken, and adds 1 to n_told; the host takes it, and adds 1 to n_taken.
struct BadIndex {
  uint32_t n_told = 0, n_taken = 0;
  int32_t layer_idx = 0, head = 0, value = 0;
  int64_t row = 0, place = 0, own = 0;  // of the call's tensor: token, index in the row; the query's token in its sequence
};

// Counts in memory that both see, each written by one side alone; zero at first.
struct ExchangeFlags {
  alignas(64) uint64_t arrived = 0;   // device
  alignas(64) uint64_t answered = 0;  // host
  alignas(64) uint64_t observed = 0;  // device; of tickets without observe() nothing is said
  alignas(64) uint32_t busy = 0;      // host: it is computing. The device must not time out while this is 1
  alignas(64) uint8_t ended = 0;      // device, by fill(): the last step that has ended, counted modulo 256
  alignas(64) uint32_t fault = 0;     // device: it has waited too long for the host (kFault...) and does no more work
  alignas(64) BadIndex bad_index;     // the first that was wrong since the host has taken the one before
};
inline constexpr uint32_t kFaultSlot = 1, kFaultAnswer = 2;

// The first bytes of a slot; what was asked for, for the host to compare.
struct SlotHeader {
  uint64_t ticket = 0;
  int32_t tag = 0;
  int32_t n_sequences = 0;
  int32_t step = 0;  // of the first sequence; 0 where there is none
  // Of the call's DeviceIndices. idx_heads = 0: the call names no keys.
  int32_t n_idx = 0, idx_heads = 0;
  int16_t unit_shift = 0, plus_window = 0;
};

// All addresses are the device's. Rows of q, o and lse in a slot begin with those of the sequence's first_row; within a
// sequence they are ordered [n_kv_heads][q_len][group_size].
struct DeviceExchange {
  ExchangeFlags* flags = nullptr;
  std::byte* slots = nullptr;  // [n_slots][slot_bytes], each begins with its header
  int64_t* state = nullptr;    // [kExchangeWords] in device memory, zero at first: the module's
  int64_t slot_bytes = 0;
  int64_t timeout_ns = 0;  // of a wait on the device
  int32_t n_slots = 0;
  int32_t n_rows = 0;  // of a KV head that a slot has room for: at least the call's n_tokens
  // Bytes in a slot: f32 [n_tokens * n_q_heads, k_head_dim], of sequences with a host part; rotated where keys are.
  int64_t q_at = 0;
  int64_t o_at = 0, lse_at = 0;   // f32 [n_tokens * n_q_heads, v_head_dim], f32 [n_tokens * n_q_heads]
  int64_t rows_at[kPlanes] = {};  // the new rows [n_kv_heads][n_tokens] of each plane, as stored
  int64_t x_at = 0;               // the new hidden states [n_tokens][hidden_dim], as stored
  int64_t maw_at = 0;             // f32 [n_q_heads][n_evicted]
  int64_t idx_at = 0;             // int32 [n_tokens][idx_heads][n_idx], of all sequences
  int64_t n_idx = 0;              // indices that a slot has room for
  int32_t n_evicted = 0;          // likewise, tokens whose MAW are handed over
  int32_t reserved = 0;

  bool operator==(const DeviceExchange& other) const = default;
};
inline constexpr int32_t kExchangeWords = 16;

// Strided rows [n_tokens, n_heads, head_dim] in device memory; strides in elements.
struct DeviceRows {
  void* data = nullptr;  // never written through for inputs
  int32_t dtype = 0;     // f32, f16 or bf16
  int32_t reserved = 0;
  int64_t token_stride = 0, head_stride = 0;
};

// Writes k and v, rounded as the host's backend rounds them, to the last q_len tokens of each sequence, and hands over.
//
// Where exchange.flags is null it takes no ticket and hands nothing over: the rows that a slot would get go to
// exchange.slots, which is device memory then, by rows_at, x_at and n_rows. No sequence has a host part.
struct DeviceAppend {
  const Layer* layer = nullptr;
  DevicePages pages;
  DeviceSequences sequences;
  DeviceRows q, k, v;    // k.data null: nothing is appended; v.data null also where V aliases K
  int32_t n_tokens = 0;  // rows of these; in replays this or fewer
  int32_t tag = 0;       // of the header
  DeviceExchange exchange;
  // Where layer->rope is set: its cos_sin in device memory. Where rotates_queries(*layer): the rotated queries, [n_tokens,
  // n_q_heads, k_head_dim], which are q of attend() and observe(). q.data is not null then.
  const float* rope = nullptr;
  float* rotated_q = nullptr;
  const int32_t* positions = nullptr;  // [n_tokens] in device memory, instead of what sequences say; null: as they say
  DeviceRows x;  // [n_tokens, 1, hidden_dim], to the host alone; data null where the layer keeps none or nothing is appended
  int32_t leaves_room = 0;  // for calls that run beside it. 1: it takes an eighth of the device, 2: as little as it can
  int32_t reserved = 0;
  DeviceIndices idx;  // handed over as they are
  // Not 0: the module may write the window's rows before the slot's and say so by this number, which no other such call of
  // the exchange has, so that attend() or search() runs beside it (DeviceAttend::append, DeviceSearch::append). merge()
  // follows them. Replays of one call have the same.
  int64_t epoch = 0;
};

// Makes key lists of indices. Each query is a sequence of its own here: of one query, whose own token is end + n_after - 1
// and which can see no key before `begin` and none from `end` on. Its list has the tokens of the named units in [begin, end)
// and, with plus_window, of the first sink_len tokens of the sequence and of the newest window_len up to the query's own. A
// row that is wrong makes a list that is wrong (DeviceKeys::n) and a BadIndex.
struct DeviceNamedKeys {
  int32_t page_len = 0;
  int32_t layer_idx = 0;      // for BadIndex, as
  int64_t first_row = 0;      // of the call's tensor: the row of the first token here
  DeviceSequences sequences;  // the queries, in the order of their rows
  DeviceIndices idx;
  int64_t sink_len = 0, window_len = 0;
  // [n_tokens] in device memory: positions of speculative tokens, which count their newest tokens along their chains. Null:
  // the newest tokens of a query are those up to its own.
  const int32_t* positions = nullptr;
  DeviceKeys* keys = nullptr;      // [n_sequences][idx.n_heads]
  KeyGranule* granules = nullptr;  // [n_sequences][idx.n_heads][n_granules]
  int32_t n_granules = 0;          // that a list has room for
  int32_t n_lists = 0;             // that there is room for
  ExchangeFlags* flags = nullptr;
  int64_t* state = nullptr;  // of the exchange
};

// Bounds of the chunks that are complete, and have none: in each sequence, and for each of these lengths, of the chunks
// whose last tokens are in [bounded, end).
struct DeviceBoundChunks {
  const Layer* layer = nullptr;  // as attend() has it
  DevicePages pages;
  DeviceSequences sequences;
  DeviceBounds bounds[kMostSearchStages];
  int32_t n_bounds = 0;
  int32_t reserved = 0;
};

// A search for the chunks that query blocks attend: lib/tables/search.h says what it finds. It is one stage after another on
// the stream, and writes a key list of each block and list for attend().
//
// The key list of a block names, below window_begin = max(p0 + 1 - window_len, 0): the tokens of the sinks [0, sink_len) and
// of the chunks that the last stage has kept; its range begins at window_begin. Tokens of kept chunks in the window are in
// the range, once. Where no stage is there, the range begins at 0 and the list names nothing else.
struct DeviceSearch {
  const Layer* layer = nullptr;  // as attend() has it
  DevicePages pages;
  DeviceSequences sequences;  // the query blocks. Those without queries are left out
  DeviceRows q;               // as attend() has it
  DeviceSearchStage stages[kMostSearchStages];
  DeviceBounds bounds[kMostSearchStages];
  int32_t n_stages = 0, n_bounds = 0;
  int64_t sink_len = 0, window_len = 0;
  int32_t shares_lists = 0;
  // 1: blocks have one query each, and lists are kept from call to call. A stage runs again where its interval has passed
  // since it ran (p0 - ran_at >= interval), the stage before it runs, its list has another mark, or other stages were there
  // then; else its list stays as it is. Candidates reach into the window by the overlap. The newest chunk of each length of
  // `bounds` that is complete before p0 gets its bounds.
  // 0: all stages run, and lists are of no use afterwards.
  int32_t keeps_lists = 0;
  void* workspace = nullptr;  // of search_bytes(), zeroed once, then for one search after another
  int64_t most_keys = 0;      // tokens of a sequence, now and in every replay: what the work space has room for
  // Out: key list l of block b, for attend()'s sequences first_list .. first_list + ceil(q_len / list_queries) - 1 of it, is
  // keys[sequence * n_lists + l]. Granules of a block's list l: granules[(b * n_lists + l) * n_granules ..].
  DeviceKeys* keys = nullptr;
  KeyGranule* granules = nullptr;
  int32_t n_granules = 0;    // that a list has room for
  int32_t list_queries = 1;  // of the block, that each of attend()'s sequences has
  // As DeviceAttend::append: the search begins once the window has the rows of this append. Neither it nor attend() waits
  // for the append's end then, but merge() does (DeviceMerge::append).
  const DeviceAppend* append = nullptr;
};

// Head patterns: lib/tables/pattern_lists.h says what they mean. index_patterns() chooses for all query heads;
// list_patterns(), which may follow it several times, writes the key lists of n_lists of them.
struct DevicePatterns {
  const Layer* layer = nullptr;  // as attend() has it
  DevicePages pages;
  DeviceSequences sequences;                 // whole: max_keys is the largest `end`, max_q_len the largest q_len
  DeviceRows q;                              // as attend() has it
  const DeviceHeadPattern* heads = nullptr;  // [n_q_heads] in device memory, which copies write
  uint32_t kinds = 0;                        // of any head
  int32_t n_granules = 0;                    // that a list has room for; a list that needs more is wrong (DeviceKeys::n)
  void* workspace = nullptr;    // of pattern_bytes(), zeroed once, then for one call after another, search() included
  uint32_t* choices = nullptr;  // [n_sequences][n_q_heads][PatternChoices::n_words()]
  // Of list_patterns(): list i is of query head first_head + i * head_step. Block b of sequence s has the key lists
  // keys[sequence * n_lists + i] of attend()'s sequences first_list + b * parts up to first_list + (b + 1) * parts, where
  // first_list is that of s and parts = ceil(kPatternBlock / list_queries), or as many as the last block's queries need. The
  // granules of these lists are granules[block * n_lists + i][n_granules], where block = first_list / parts + s + b, rounded
  // down: another number for each block, less than the call's blocks + n_sequences.
  int32_t first_head = 0, head_step = 1, n_lists = 0;
  int32_t list_queries = 1;  // that each of attend()'s sequences has, the last of a block fewer
  DeviceKeys* keys = nullptr;
  KeyGranule* granules = nullptr;
  // [2] in device memory: list_patterns() adds to totals[0] the pairs of a query and a key before its range_begin, and to
  // totals[1] such keys of each block and list.
  uint64_t* totals = nullptr;
};

// Where rows of an output go: [n_tokens, n_q_heads, v_head_dim], and their lse with these strides, or null. The learned
// sinks [n_q_heads], merged once, where these are the last keys there are; null: none.
struct DeviceOutput {
  DeviceRows o;
  float* lse = nullptr;
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;
};

// One layer, several sequences over their resident keys. Query t of a sequence is token end + n_after - q_len + t, sees
// tokens up to its own and, with a sliding window, no further back than that allows. o is normalised, 0 where a query sees
// nothing (lse = -inf there).
struct DeviceAttend {
  const Layer* layer = nullptr;
  DevicePages pages;
  DeviceSequences sequences;
  DeviceRows q, o;
  float* lse = nullptr;  // [n_tokens, n_q_heads] with these strides, or null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;  // [n_q_heads], merged once, here: where these are the last keys there are; null: none
  // States over other keys, [n_tokens, n_q_heads, v_head_dim] and [n_tokens, n_q_heads], which these are added to; they may
  // be where o and lse go. Null: there are none.
  const float *before_o = nullptr, *before_lse = nullptr;
  // As workspace_bytes() of a call of as many or more sequences and queries; zeroed once, then for one call after another.
  void* workspace = nullptr;
  // Without lists each head attends all keys. With granules, queries of a sequence times group_size are at most
  // most_list_rows(), and before_o is null.
  DeviceLists lists;
  // With tiles, of which `lists` has none then, a kernel reads their keys alone: only tokens in [begin, end) of the
  // DeviceSequence, which may cover one piece of the keys.
  DeviceTileLists tiles;
  // Where the rows of sequences without a host part go, instead of o and lse: merge() has nothing to do for these then
  // (DeviceMerge::leaves_finished). o.data null: there is no such place. before_o is null then.
  DeviceOutput finished;
  // The append() before it on the stream, where that has an epoch: where the module writes the window's rows first,
  // attention begins once the window has them, while they are still being handed over. Null: it begins when the kernel
  // before it has ended.
  const DeviceAppend* append = nullptr;
};

// States of the window and of the host into one, the learned sinks last.
struct DeviceMerge {
  const Layer* layer = nullptr;
  DeviceSequences sequences;
  int32_t n_tokens = 0;  // as in DeviceAppend; of any number, where no sequence has a host part
  // observe() follows: the merged lse take the place of the window's and, where wanted, of the host's.
  int32_t is_observed = 0;
  int32_t leaves_finished = 0;  // 1: attend() has finished the rows of sequences without a host part
  int32_t reserved = 0;
  const float* o = nullptr;  // [n_tokens, n_q_heads, v_head_dim], of the window
  float* lse = nullptr;      // [n_tokens, n_q_heads]
  DeviceRows o_out;
  float* lse_out = nullptr;  // with these strides, or null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;  // [n_q_heads] in device memory, or null
  DeviceExchange exchange;
  // An append that no kernel before this one has waited for the end of: it is waited for. Null: they have. No sequence has a
  // host part then.
  const DeviceAppend* append = nullptr;
};

// With w_i the weights of query i = 0 .. n - 1 of a sequence over its resident keys, exp(logit - lse), 0 for keys it does
// not see and where lse is not finite:
//
//   maw = (1 - alpha)^n maw + sum_i alpha (1 - alpha)^(n - 1 - i) w_i
//
// over the last n_counted queries: older ones have faded. Tokens that the call has appended start at 0.
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

// States over disjoint keys into one: of n_heads query heads from first_head on, of tokens [first_row, first_row + n_rows),
// the part's into what is there. Rows of both are [.., n_q_heads, v_head_dim] of the layer; a state that is empty (lse -inf)
// has no say, whatever its o is.
struct DeviceAccumulate {
  const Layer* layer = nullptr;
  int32_t first_row = 0, n_rows = 0, first_head = 0, n_heads = 0;
  float* o = nullptr;
  float* lse = nullptr;  // [.., n_q_heads]
  const float* part_o = nullptr;
  const float* part_lse = nullptr;
};

// A layer's projection in device memory; null where it has no such part.
struct DeviceProjection {
  const void *w_k = nullptr, *w_v = nullptr;
  const float *b_k = nullptr, *b_v = nullptr;
  const float *norm_weight = nullptr, *norm_bias = nullptr;
  const float* rope = nullptr;  // cos_sin
};

// Rows of K and V of all heads, from hidden states (lib/model/projection.h says how). Sums are in f32, what is normalised is
// rounded to w_type, and each number of K and V is rounded once, to its storage type, as append() rounds it. Row i of x goes
// to slot i % page_len of page i / page_len. Rows know nothing of each other: those that nobody will attend may hold
// anything.
struct DeviceRebuild {
  const Layer* layer = nullptr;  // its x_type is that of x
  DeviceProjection projection;
  const void* x = nullptr;  // [n_rows, hidden_dim]
  int64_t n_rows = 0;
  DevicePages pages;
  int64_t page_bytes = 0;                   // from one page to the next
  const int64_t* page_positions = nullptr;  // where keys are rotated: of slot 0 of each page, in device memory
  void* workspace = nullptr;                // of rebuild_bytes(), 256-byte aligned
  void* read = nullptr;                     // event, or null: recorded once x and page_positions have been read
  void* writable = nullptr;                 // event, or null: it is waited for before pages are written to, not before that
};

// n_rows rows of row_bytes bytes, each a stride behind the one before. To device memory from anywhere, or
// from there to memory that is pinned.
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
  int32_t (*n_devices)(DeviceError* error);  // -1: failed
  void (*describe)(int32_t device_idx, DeviceInfo* info);
  // The others return 0, or a TANDEM_ERROR_* and why.
  int32_t (*open)(int32_t device_idx, void** self, DeviceError* error);
  void (*close)(void* self);
  int32_t (*allocate)(void* self, int64_t bytes, void** data, DeviceError* error);  // device memory, 256-byte aligned
  void (*release)(void* self, void* data);
  int32_t (*copy)(void* self, void* to, const void* from, int64_t bytes, void* stream, DeviceError* error);  // any direction
  int32_t (*fill)(void* self, void* data, int32_t byte, int64_t bytes, void* stream, DeviceError* error);
  int32_t (*wait)(void* self, void* stream, DeviceError* error);
  // Host memory that the device reads and writes as well, 256-byte aligned and zero, and its address there.
  int32_t (*allocate_shared)(void* self, int64_t bytes, void** host, void** device, DeviceError* error);
  void (*release_shared)(void* self, void* host);
  // Whether the device is still there (DEVICE_LOST); any thread.
  int32_t (*check)(void* self, DeviceError* error);
  // *is_capturing: whether calls on the stream are recorded, not run.
  int32_t (*capturing)(void* self, void* stream, int32_t* is_capturing, DeviceError* error);
  // Whether there are kernels for calls of up to max_q_len queries a sequence; UNSUPPORTED and the reason.
  int32_t (*supports)(void* self, const Layer* layer, int32_t max_q_len, DeviceError* error);
  int64_t (*workspace_bytes)(void* self, const DeviceAttend* call);
  // The most query rows (queries of a sequence times group_size) that attend() takes with granules, for queries like q: 64
  // or more, INT32_MAX where there is no limit.
  int32_t (*most_list_rows)(void* self, const Layer* layer, const DeviceRows* q);
  int32_t (*append)(void* self, const DeviceAppend* call, void* stream, DeviceError* error);
  int32_t (*attend)(void* self, const DeviceAttend* call, void* stream, DeviceError* error);
  int32_t (*merge)(void* self, const DeviceMerge* call, void* stream, DeviceError* error);
  int32_t (*observe)(void* self, const DeviceObserve* call, void* stream, DeviceError* error);
  int32_t (*accumulate)(void* self, const DeviceAccumulate* call, void* stream, DeviceError* error);
  // A stream that waits for no other, the default stream included, unless it is told to. Where there is room for one call
  // only, its calls come before those of streams that were made elsewhere.
  int32_t (*create_stream)(void* self, void** stream, DeviceError* error);
  void (*destroy_stream)(void* self, void* stream);
  // Work after wait_event() starts once all work before record_event() has finished. An event that was never recorded is not
  // waited for.
  int32_t (*create_event)(void* self, void** event, DeviceError* error);
  void (*destroy_event)(void* self, void* event);
  int32_t (*record_event)(void* self, void* event, void* stream, DeviceError* error);
  int32_t (*wait_event)(void* self, void* event, void* stream, DeviceError* error);
  // From memory that is pinned when the stream gets there, at the latest then else.
  int32_t (*copy_strided)(void* self, const StridedCopy* copy, void* stream, DeviceError* error);
  // Likewise, all of a list, in any order. stream: of create_stream().
  int32_t (*copy_batch)(void* self, const StridedCopy* copies, int64_t n_copies, void* stream, DeviceError* error);
  // Memory of the host stays where it is, and is read by copies at the bus's full rate, until it is unpinned.
  int32_t (*pin)(void* self, void* data, int64_t bytes, DeviceError* error);
  void (*unpin)(void* self, void* data);
  // Whether rebuild() can serve such a layer: UNSUPPORTED and the reason, which may be a library that it needs.
  int32_t (*supports_rebuild)(void* self, const Layer* layer, DeviceError* error);
  int64_t (*rebuild_bytes)(void* self, const Layer* layer, int64_t n_rows);  // of work space
  int32_t (*rebuild)(void* self, const DeviceRebuild* call, void* stream, DeviceError* error);
  int32_t (*name_keys)(void* self, const DeviceNamedKeys* call, void* stream, DeviceError* error);
  int32_t (*bound_chunks)(void* self, const DeviceBoundChunks* call, void* stream, DeviceError* error);
  int64_t (*search_bytes)(void* self, const DeviceSearch* call);  // of work space, for as many blocks and keys
  int32_t (*search)(void* self, const DeviceSearch* call, void* stream, DeviceError* error);
  int64_t (*pattern_bytes)(void* self, const DevicePatterns* call);  // of work space, for as many keys and queries
  int32_t (*index_patterns)(void* self, const DevicePatterns* call, void* stream, DeviceError* error);
  int32_t (*list_patterns)(void* self, const DevicePatterns* call, void* stream, DeviceError* error);
};

// The symbol a module exports, named kDeviceEntry: its table where it serves this core's ABI number, else null.
using DeviceEntryFn = const DeviceTable* (*)(uint32_t abi);

}  // namespace tandem
