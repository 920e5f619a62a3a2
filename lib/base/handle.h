// SPDX-License-Identifier: MIT
// Handles: what the C ABI calls tandem_engine *, tandem_model *, tandem_cache *, tandem_session * and
// tandem_weights *.
//
// A handle is the address of a small block that holds a reference to an object. Blocks live in slabs that are never given
// back (the first one belongs to the library itself and goes when it is unloaded). So whether an address is a handle is
// answered by comparing it with the slabs' ranges, without reading what it points to: NULL, foreign and released handles and
// handles of another kind are told apart safely. A call takes its own reference while it runs, so that a release by another
// thread ends the handle and not the object.
//
// Released blocks are used again in the order of their release, and not before kQuarantine others wait, so that a stale
// handle is refused and does not mean a newer object. Slabs double in size: 256 blocks, 512, ...; their addresses are in
// a static array, which keeps leak checkers content, and nothing runs before main() or at exit.
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

inline constexpr int64_t kQuarantine = 1024;  // released blocks kept back

// The address of a block that now holds the object. Throws std::bad_alloc.
void* make_handle(HandleKind kind, std::shared_ptr<void> object);
// INVALID_HANDLE, naming the parameter and what was passed instead.
Status find_handle(const void* handle, HandleKind kind, const char* parameter, std::shared_ptr<void>* object);
// Gives up the reference; does nothing for NULL, released and foreign handles and those of another kind.
void release_handle(const void* handle, HandleKind kind) noexcept;

// From the first handle on, a process knows whether it is a child made by fork(): its threads are gone and locks may be
// held for ever, so every call is refused before it takes one.
void watch_fork();  // throws std::bad_alloc
bool is_forked_child() noexcept;

}  // namespace tandem
