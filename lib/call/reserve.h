// SPDX-License-Identifier: MIT
// The device memory that a session's calls need. The memory plan and the calls ask the same functions.
//
// A Reservation has named counts and areas in bytes. Within a chunk the reserve functions add up. Between chunks, layers and
// calls, which follow each other, include() takes the maximum. DeviceSession::hold() allocates the memory.
//
//   memory                             reserved by                     defined in
//   windows, slots, descriptors        reserve_ticket(), reserve_step() lib/device/device_session.cc
//   speculative queries                reserve_guess()                  lib/attend/guess.cc
//   keys that callers name             reserve_named()                  lib/attend/named_call.cc
//   keys that selectors name           reserve_search()                 lib/attend/search_call.cc
//   keys that head patterns name       reserve_patterns()               lib/attend/pattern_call.cc
//   pieces of the routes               KeyRoute::reserve()              lib/routes/
//   chunks of long appends             reserve_long()                   lib/routes/prefill_size.cc
#pragma once

#include "lib/call/call_shape.h"

namespace tandem {

struct PrefillSize;

struct Reservation {
  int64_t window_pages = 0;                                    // pages in the rings of all sequences
  int64_t slot_rows = 0;                                       // new tokens that a ticket's slot holds
  int64_t n_evicted = 0;                                       // evicted tokens whose MAW a slot holds
  int64_t descriptor_bytes = 0;                                // DeviceSequences, key lists and page tables of an eager call
  int64_t step_sequences = 0, step_lists = 0, step_pages = 0;  // for a planned step; step_lists: per sequence and layer
  int64_t slot_idx = 0;                                        // indices of named keys that a slot holds
  int64_t sent_idx = 0;                                        // indices that come from host memory
  int64_t n_lists = 0, n_granules = 0;        // key lists that the device makes in an eager call; granules of them
  int64_t step_named = 0, step_granules = 0;  // for a planned step: such lists of a sequence; granules of each list
  int64_t block_list_bytes = 0;               // lists of query blocks that no sequence keeps; choices of patterns
  int64_t search_bytes = 0;                   // work space of the device's module, for searches and head patterns
  int64_t has_part_states = 0;                // 1: there is room for the states of pieces
  int64_t prefill_bytes = 0;                  // area of long appends
  int64_t workspace_bytes = 0;                // work space of the device's module

  void add_descriptors(int64_t n_sequences, int64_t n_table_entries);
  void add_lists(int64_t n);
  void include(const Reservation& other);
  // Returns whether the held memory has room for a call. Windows are not compared: each sequence owns its own.
  bool has_room(const Reservation& call) const;
  bool operator==(const Reservation& other) const = default;
};
// Returns the work space of attend() for calls of up to q_len queries in each of n_sequences sequences.
int64_t workspace_bytes(const Device& device, const Layer& layer, int64_t n_sequences, int64_t q_len);
int64_t power_of_two(int64_t n);  // the least power of two that is >= n
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void reserve_ticket(const SizeTerms& terms, const CallShape& shape, Reservation* needs);
void reserve_step(const SizeTerms& terms, const CallShape& shape, Reservation* needs);
void reserve_guess(const SizeTerms& terms, const CallShape& shape, Reservation* needs);
void reserve_named(const SizeTerms& terms, const CallShape& shape, Reservation* needs);
void reserve_search(const SizeTerms& terms, const CallShape& shape, int64_t most_tokens, Reservation* needs);
void reserve_patterns(const SizeTerms& terms, const CallShape& shape, int64_t most_tokens, Reservation* needs);
int64_t pair_totals_bytes(const Patterns& patterns);  // per session; 0 where the host makes all key lists of head patterns
void reserve_long(const SizeTerms& terms, const CallShape& shape, const PrefillSize& size, Reservation* needs);

}  // namespace tandem
