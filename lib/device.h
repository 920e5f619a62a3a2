// SPDX-License-Identifier: MIT
// The table between the core and a device module: a shared object that is opened at run time and never linked
// (lib/device_module.h finds it). Plain data and C functions only, as the two may come from different compilers.
//
// What holds for the CPU's table (lib/backend.h) holds here: the core decides which keys a query sees and where they are, a
// module computes states. Everything is stream-ordered; nothing here waits for the device but wait(), what allocates and
// releases, and copies from or to pageable memory.
//
// The window is a pool of pages in device memory. A page is page_len token slots in every layer, KV head and plane
// (lib/planes.h); a sequence's page table says where token t is: page table[(t / page_len) % table_len], slot t % page_len.
#pragma once

#include <cstdint>

#include "lib/layer.h"
#include "lib/planes.h"

namespace tandem {

// Changes with every struct here and with Layer, unless they only grow at the end and say how far they are filled.
inline constexpr uint32_t kDeviceAbi = 1;
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

// K and V of one layer in the pool. Planes and strides are multiples of 16 bytes.
struct DevicePages {
  std::byte* planes[kPlanes] = {};    // of page 0, KV head 0, slot 0
  int64_t head_stride[kPlanes] = {};  // bytes from one KV head to the next
  int64_t page_stride = 0;            // bytes from one page to the next
  int32_t page_len = 0;               // a multiple of 64
};

// One sequence of a call, in device memory: a graph is replayed while these change.
struct DeviceSequence {
  int64_t begin = 0;  // the resident keys are tokens [begin, end);
  int64_t end = 0;    //   the queries are the last of them
  int32_t q_len = 0;
  int32_t first_row = 0;    // of the queries in q, o and lse
  int32_t table_begin = 0;  // of its page table in DeviceAttend::page_tables
  int32_t table_len = 0;
};

// Strided rows [n_tokens, n_heads, head_dim] in device memory; strides in elements.
struct DeviceRows {
  void* data = nullptr;
  int32_t dtype = 0;  // f32, f16 or bf16
  int32_t reserved = 0;
  int64_t token_stride = 0, head_stride = 0;
};

// One layer, several sequences over their resident keys. Query t of a sequence sees tokens up to end - q_len + t and, with a
// sliding window, no further back than that allows. o is normalised, 0 where a query sees nothing (lse = -inf there).
struct DeviceAttend {
  const Layer* layer = nullptr;
  DevicePages pages;
  const DeviceSequence* sequences = nullptr;  // [n_sequences]
  const int32_t* page_tables = nullptr;
  int32_t n_sequences = 0;
  int32_t max_q_len = 0;  // of any sequence, now and in every replay
  int64_t max_keys = 0;   // likewise
  DeviceRows q, o;
  float* lse = nullptr;  // [n_tokens, n_q_heads] with these strides, or null
  int64_t lse_token_stride = 0, lse_head_stride = 0;
  const float* sinks = nullptr;  // [n_q_heads], merged once, here: where these are all keys there are; null: none
  // Of workspace_bytes(), zeroed once and used by one call at a time: a call leaves what the next expects, whatever that is.
  void* workspace = nullptr;
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
  // Whether attend() has a kernel for calls of up to max_q_len queries a sequence; UNSUPPORTED and the reason.
  int32_t (*supports)(void* self, const Layer* layer, int32_t max_q_len, DeviceError* error);
  int64_t (*workspace_bytes)(void* self, const DeviceAttend* call);
  int32_t (*attend)(void* self, const DeviceAttend* call, void* stream, DeviceError* error);
};

// The symbol a module exports, named kDeviceEntry: its table where it serves this core's ABI number, else null.
using DeviceEntryFn = const DeviceTable* (*)(uint32_t abi);

}  // namespace tandem
