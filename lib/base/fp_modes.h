// SPDX-License-Identifier: MIT
// The floating-point modes that Tandem computes in: round to nearest even, keep denormals, no exception traps. A caller may
// flush denormals to zero or trap on division. The same call must still give that caller the same bits.
#pragma once

#include <cstdint>

namespace tandem {

// Sets Tandem's modes; the destructor restores the caller's. Takes some nanoseconds.
class DefaultFpModes {
 public:
  DefaultFpModes() : before_(read()) { write(kDefault); }
  ~DefaultFpModes() { write(before_); }
  DefaultFpModes(const DefaultFpModes&) = delete;
  DefaultFpModes& operator=(const DefaultFpModes&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80;  // MXCSR
  static uint64_t read() { return __builtin_ia32_stmxcsr(); }
  static void write(uint64_t modes) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(modes)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;  // FPCR
  static uint64_t read() {
    uint64_t modes;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
  }
  static void write(uint64_t modes) { asm volatile("msr fpcr, %0" : : "r"(modes)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  uint64_t before_;
};

}  // namespace tandem
