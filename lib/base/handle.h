// SPDX-License-Identifier: MIT
// Handles: the pointers that the C ABI calls tandem_engine *, tandem_model *, tandem_cache *, tandem_session * and
// tandem_weights *.
//
// A handle is the address of a small block that holds a reference to an object. Blocks live in slabs that are never freed.
// (The first slab is part of the library and goes when the library is unloaded.) An address is checked against the slabs'
// ranges without being dereferenced. So NULL, foreign handles, released handles and handles of another kind are recognised
// safely. A running call holds its own reference: if another thread releases the handle, the object lives until the call
// ends.
//
// Released blocks are reused in the order of their release, once kQuarantine later blocks have been released. So a stale
// handle is refused and does not refer to a newer object. Slabs double in size: 256 blocks, 512, ... Their addresses are in
// a static array, so leak checkers report nothing. No code runs before main() or at exit.
#pragma once

#include <cstdint>
#include <memory>

#include "lib/base/status.h"

namespace tandem {

enum class HandleKind : uint32_t {
  kNone = 0,
  kEngine = 0x54454e47,   // "TENG"
  kModel = 0x544d4f44,    // "TMOD"
  kCache = 0x54434348,    // "TCCH"
  kSession = 0x54534553,  // "TSES"
  kWeights = 0x54574754,  // "TWGT"
};

inline constexpr int64_t kQuarantine = 1024;  // number of released blocks that are held back from reuse

// Returns the address of a block that holds the object. Throws std::bad_alloc.
void* make_handle(HandleKind kind, std::shared_ptr<void> object);
// Finds the handle's object. INVALID_HANDLE names the parameter and says what was passed instead.
Status find_handle(const void* handle, HandleKind kind, const char* parameter, std::shared_ptr<void>* object);
// Gives up the handle's reference. Does nothing for NULL, released handles, foreign handles and handles of another kind.
void release_handle(const void* handle, HandleKind kind) noexcept;

// From the first handle on, the library recognises a child process made by fork(). The child lacks the library's threads,
// and its locks may be held for ever. So every call in the child is refused before it takes a lock.
void watch_fork();  // throws std::bad_alloc
bool is_forked_child() noexcept;

}  // namespace tandem
