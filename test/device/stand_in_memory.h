// SPDX-License-Identifier: MIT
// The memory of the stand-in. What a device and its host share is mapped twice: an address of one side is none of the other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stand_in {

void* allocate_memory(int64_t bytes);  // null: there is none. 0xff, which is NaN in every type, in every byte
bool release_memory(void* data);       // whether it had been allocated
bool share_memory(int64_t bytes, void** host, void** device);
bool pin_memory(void* data, int64_t bytes);  // of the host: operations may read it when they run
bool unpin_memory(void* data);
bool unshare_memory(void* host);
void unmap_all_memory();  // whoever looks at it now is told by a signal

// That are allocated now, that are shared, that are pinned.
struct MemoryBytes {
  int64_t device = 0, shared = 0, pinned = 0;
};
MemoryBytes memory_bytes();

// Whether all these bytes are memory that a device reads and writes at this address.
bool is_device_memory(const void* data, int64_t bytes);
// The same, or shared memory at an address of the host: what is copied when a stream gets there, and not before.
bool is_known_memory(const void* data, int64_t bytes);

}  // namespace stand_in
