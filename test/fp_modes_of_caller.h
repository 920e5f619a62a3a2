// SPDX-License-Identifier: MIT
// Floating-point modes that a program may have set. Does nothing on processors whose modes the tests do not know.
#pragma once

#include <cstdint>

namespace tandem_test {

#if defined(__x86_64__)
inline constexpr uint64_t kDefaultFpModes = 0x1f80, kFlushing = 0x9fc0, kTrapping = 0x8040;  // MXCSR; both flush denormals
inline uint64_t fp_modes() { return __builtin_ia32_stmxcsr() & ~0x3fu; }                     // without the sticky exceptions
inline void set_fp_modes(uint64_t modes) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(modes)); }
#elif defined(__aarch64__)
inline constexpr uint64_t kDefaultFpModes = 0, kFlushing = 1u << 24, kTrapping = kFlushing;  // FPCR; traps are optional
inline uint64_t fp_modes() {
  uint64_t modes;
  asm volatile("mrs %0, fpcr" : "=r"(modes));
  return modes;
}
inline void set_fp_modes(uint64_t modes) { asm volatile("msr fpcr, %0" : : "r"(modes) : "memory"); }
#else
inline constexpr uint64_t kDefaultFpModes = 0, kFlushing = 0, kTrapping = 0;
inline uint64_t fp_modes() { return 0; }
inline void set_fp_modes(uint64_t) {}
#endif

}  // namespace tandem_test
