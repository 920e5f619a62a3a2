// SPDX-License-Identifier: MIT
// Shared by the calls of the stand-in. check() tests a call's arguments when the call is made. perform() runs when the
// stream gets there, and only then reads device memory. Both throw Failure. perform() returns false and does nothing if
// the host does not answer in time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "device/stand_in.h"
#include "device/stand_in_memory.h"
#include "device/stand_in_stream.h"
#include "lib/tables/device.h"
#include "reference/rounding.h"

namespace stand_in {

extern Counts counts;
int32_t most_list_rows();  // the limit that tests control
inline void note_largest(std::atomic<int64_t>* largest, int64_t n) {
  int64_t before = *largest;
  while (n > before && !largest->compare_exchange_weak(before, n)) {
  }
}

void check(const tandem::DeviceAppend& call);
void check(const tandem::DeviceAttend& call);
void check(const tandem::DeviceMerge& call);
void check(const tandem::DeviceObserve& call);
void check(const tandem::DeviceAccumulate& call);
void check(const tandem::DeviceNamedKeys& call);
void check(const tandem::DeviceBoundChunks& call);
void check(const tandem::DeviceSearch& call);
int64_t search_bytes(const tandem::DeviceSearch& call);  // of the work space
void check(const tandem::DevicePatterns& call);
int64_t pattern_bytes(const tandem::DevicePatterns& call);  // of the work space
void index_patterns(const tandem::DevicePatterns& call);
void list_patterns(const tandem::DevicePatterns& call);
void check(const tandem::DeviceRebuild& call);
bool perform(const tandem::DeviceAppend& call);
bool perform(const tandem::DeviceAttend& call);
bool perform(const tandem::DeviceMerge& call);
bool perform(const tandem::DeviceObserve& call);
bool perform(const tandem::DeviceAccumulate& call);
bool perform(const tandem::DeviceNamedKeys& call);
bool perform(const tandem::DeviceBoundChunks& call);
bool perform(const tandem::DeviceSearch& call);

// A rebuild in two steps: reading the inputs of the products, and writing the rows that they give.
using HiddenRows = std::vector<std::vector<double>>;
HiddenRows read_hidden(const tandem::DeviceRebuild& call);
void write_rebuilt(const tandem::DeviceRebuild& call, const HiddenRows& x);

// These refuse, by the field's name, layers for which a device has no kernels.
void check_layer(const tandem::Layer& layer);
void check_rebuilt(const tandem::Layer& layer);
int64_t rebuild_work_bytes(const tandem::Layer& layer, int64_t n_rows);
void check_pages(const tandem::DevicePages& pages);
void check_sequences(const tandem::DeviceSequences& all);  // checks their addresses

// Returns the descriptors as they are now, after a check of each. n_rows: rows of the call; -1: the call does not say.
const tandem::DeviceSequence* read_sequences(const tandem::DeviceSequences& all, int64_t n_rows);
void check_table(const tandem::DeviceSequences& all, const tandem::DeviceSequence& sequence, int32_t page_len);

// Returns `data` after a check that a device can use the address.
template <typename T>
T* on_device(T* data, int64_t bytes, const char* otherwise) {
  require(is_device_memory(data, bytes), otherwise);
  return data;
}

inline std::byte* row_at(const tandem::DeviceRows& rows, int64_t token, int64_t head, int32_t dim, const char* otherwise) {
  const int64_t size = reference::element_bytes(rows.dtype), element = token * rows.token_stride + head * rows.head_stride;
  return on_device(static_cast<std::byte*>(rows.data) + element * size, dim * size, otherwise);
}

// The rows of a sequence's keys in the window.
struct WindowRows {
  const tandem::Layer& layer;
  const tandem::DevicePages& pages;
  const int64_t* table;
  int32_t table_len;

  template <typename DeviceCall>
  WindowRows(const DeviceCall& call, const tandem::DeviceSequence& sequence)
      : layer(*call.layer),
        pages(call.pages),
        table(call.sequences.page_tables + sequence.table_begin),
        table_len(sequence.table_len) {}
  std::byte* row(tandem::Plane plane, int32_t kv_head, int64_t token) const;
  float* maw(int32_t head, int64_t token) const;
};

// Where the granules of a key list go, and where its pages are.
struct GranulePlace {
  const int64_t* table;
  int32_t table_len, page_len;
  int32_t n_granules;  // room of the list
  tandem::KeyGranule* granules;
};
// Adds granules to a list that has none yet. tokens: ascending.
void write_granules(const GranulePlace& to, const std::vector<int64_t>& tokens, tandem::DeviceKeys* keys);

}  // namespace stand_in
