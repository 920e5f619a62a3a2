// SPDX-License-Identifier: MIT
#include "cpu/matrix_unit.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tandem::cpu {
namespace {

// Linux, asm/prctl.h and the layout of XSAVE's state.
constexpr long kRequestPermission = 0x1023;                   // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;                                // XFEATURE_XTILE_DATA
constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // CPUID 7.0, EDX

bool ask() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool have_matrix_unit() {
  static const bool have = ask();
  return have;
}

}  // namespace tandem::cpu

#else

namespace tandem::cpu {
bool have_matrix_unit() { return false; }
}  // namespace tandem::cpu

#endif
