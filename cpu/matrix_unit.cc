// SPDX-License-Identifier: MIT
#include "cpu/matrix_unit.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tandem::cpu {
namespace {

// From Linux: asm/prctl.h, and the numbers of XSAVE's state components.
constexpr long kGetSupported = 0x1021, kRequestPermission = 0x1023;  // ARCH_GET_XCOMP_SUPP, ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;                                       // XFEATURE_XTILE_DATA
constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;         // CPUID 7.0, EDX
constexpr unsigned kAvx512Bf16 = 1u << 5;                            // CPUID 7.1, EAX

bool ask() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & kAvx512Bf16) == 0) return false;
  uint64_t supported = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 && (supported >> kTileData & 1) != 0;
}

}  // namespace

bool have_matrix_unit() {
  static const bool have = ask();
  return have;
}

bool request_matrix_unit() { return have_matrix_unit() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

}  // namespace tandem::cpu

#else

namespace tandem::cpu {
bool have_matrix_unit() { return false; }
bool request_matrix_unit() { return false; }
}  // namespace tandem::cpu

#endif
