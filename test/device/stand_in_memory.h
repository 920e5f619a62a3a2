// SPDX-License-Identifier: MIT
// The memory of the stand-in. Memory shared by device and host is mapped twice: an address of one side is invalid on the
// other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stand_in {

void* allocate_memory(int64_t bytes);  // filled with 0xff, which is NaN in every type; null: no memory
bool release_memory(void* data);       // false: it was not allocated
bool share_memory(int64_t bytes, void** host, void** device);
bool pin_memory(void* data, int64_t bytes);  // host memory; operations may read it when they run
bool unpin_memory(void* data);
bool unshare_memory(void* host);
void unmap_all_memory();  // later accesses end in a signal

// Bytes that are allocated, shared and pinned now.
struct MemoryBytes {
  int64_t device = 0, shared = 0, pinned = 0;
};
MemoryBytes memory_bytes();

// True if all these bytes are memory that a device reads and writes at this address.
bool is_device_memory(const void* data, int64_t bytes);
// True for the same memory and for shared memory at an address of the host. Copies from and to it happen when the stream
// gets there, not before.
bool is_known_memory(const void* data, int64_t bytes);

}  // namespace stand_in
