// SPDX-License-Identifier: MIT
// Facts that a binding asks about the loaded library: version, layout of the public structs, names of statuses.
//
// The fingerprint of a minor version is FNV-1a (64 bits) over a list of numbers, each as four bytes, lowest first. The list
// has, for every public struct in the order of the header, its size and then the offset of each member, as of that minor. A
// later minor that appends members adds a list of its own and keeps this one, whose sizes are then written as numbers. The
// list is generated from the header (lib/base/abi_layout.h).
#include <cstddef>
#include <cstdint>

#include "lib/base/abi_layout.h"
#include "tandem/tandem.h"

namespace tandem {
namespace {

#define TANDEM_SIZE(type, bytes) static_cast<uint32_t>(sizeof(type)),
#define TANDEM_AT(type, member, offset) static_cast<uint32_t>(offsetof(type, member)),
constexpr uint32_t kLayout2[] = {TANDEM_ABI_LAYOUT(TANDEM_SIZE, TANDEM_AT)};
#undef TANDEM_SIZE
#undef TANDEM_AT

template <size_t n>
constexpr uint64_t fnv1a(const uint32_t (&numbers)[n]) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint32_t number : numbers)
    for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((number >> shift) & 0xff)) * 0x100000001b3u;
  return hash;
}

static_assert(sizeof(void*) != 8 || fnv1a(kLayout2) == TANDEM_ABI_FINGERPRINT);

struct StatusName {
  int32_t status;
  const char* name;
};

constexpr StatusName kStatusNames[] = {
    {TANDEM_OK, "TANDEM_OK"},
    {TANDEM_ERROR_INVALID_ARGUMENT, "TANDEM_ERROR_INVALID_ARGUMENT"},
    {TANDEM_ERROR_INVALID_HANDLE, "TANDEM_ERROR_INVALID_HANDLE"},
    {TANDEM_ERROR_INVALID_STATE, "TANDEM_ERROR_INVALID_STATE"},
    {TANDEM_ERROR_UNSUPPORTED, "TANDEM_ERROR_UNSUPPORTED"},
    {TANDEM_ERROR_OUT_OF_MEMORY, "TANDEM_ERROR_OUT_OF_MEMORY"},
    {TANDEM_ERROR_CAPACITY, "TANDEM_ERROR_CAPACITY"},
    {TANDEM_ERROR_BUSY, "TANDEM_ERROR_BUSY"},
    {TANDEM_ERROR_NOT_FOUND, "TANDEM_ERROR_NOT_FOUND"},
    {TANDEM_ERROR_CANCELLED, "TANDEM_ERROR_CANCELLED"},
    {TANDEM_ERROR_TIMEOUT, "TANDEM_ERROR_TIMEOUT"},
    {TANDEM_ERROR_DEVICE_LOST, "TANDEM_ERROR_DEVICE_LOST"},
    {TANDEM_ERROR_BACKEND, "TANDEM_ERROR_BACKEND"},
    {TANDEM_ERROR_IO, "TANDEM_ERROR_IO"},
    {TANDEM_ERROR_CORRUPT, "TANDEM_ERROR_CORRUPT"},
    {TANDEM_ERROR_SYSTEM, "TANDEM_ERROR_SYSTEM"},
    {TANDEM_ERROR_INTERNAL, "TANDEM_ERROR_INTERNAL"},
};

}  // namespace
}  // namespace tandem

// Exists only in the archive: lib/tandem.map does not export it from the shared library. `pkg-config --static --libs tandem`
// makes the link require it, so the link fails if -ltandem is the shared library.
extern "C" const char tandem_archive_is_linked_by_tandem_static_pc;
const char tandem_archive_is_linked_by_tandem_static_pc = 1;

uint32_t tandem_version(void) { return TANDEM_VERSION_MAJOR << 16 | TANDEM_VERSION_MINOR << 8 | TANDEM_VERSION_PATCH; }

uint64_t tandem_abi_fingerprint(uint32_t minor) { return minor == 2 ? tandem::fnv1a(tandem::kLayout2) : 0; }

const char* tandem_status_name(int32_t status) {
  for (const tandem::StatusName& entry : tandem::kStatusNames)
    if (entry.status == status) return entry.name;
  return "unknown status";
}
