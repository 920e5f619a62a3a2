// SPDX-License-Identifier: MIT
// Checks that the tests of decode and of prefill share.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "window_case.h"

namespace tandem::test {

struct TypePair {
  int32_t k, v;
};
inline constexpr TypePair kPairs[] = {{TANDEM_F32, TANDEM_F32},   {TANDEM_F16, TANDEM_F16},   {TANDEM_BF16, TANDEM_BF16},
                                      {TANDEM_E4M3, TANDEM_E4M3}, {TANDEM_Q8_0, TANDEM_Q8_0}, {TANDEM_Q4_0, TANDEM_Q4_0},
                                      {TANDEM_Q8_0, TANDEM_Q4_0}};

// K that the library rotates is f32 in the window, V has the store's type. These pairs have kernels for some dims.
inline constexpr TypePair kRotatedPairs[] = {{TANDEM_F32, TANDEM_F16}, {TANDEM_F32, TANDEM_BF16}, {TANDEM_F32, TANDEM_Q8_0}};
bool has_kernels(TypePair types, int32_t dim);  // for pairs of kPairs or kRotatedPairs

// Returns the pair that argv[2] names, or all pairs without that argument. Ends the program if the name is unknown.
std::span<const TypePair> pairs_of(int argc, char** argv);

WindowOptions options_of(TypePair types, int32_t n_kv_heads, int32_t dim, int32_t group,
                         std::vector<WindowSequence> sequences);
std::string describe(const WindowOptions& options);

// Besides types and dims, the properties of a call that select its kernel.
struct KernelCall {
  int32_t group, q_type;
  float soft_cap;
};
// Checks a call of every kernel of a pair, over few keys. With f32, kernels of kRotatedPairs are included. Every other call
// has a sliding window. Meant for tools that watch every memory access.
void for_every_kernel(TypePair types, const std::vector<WindowSequence>& sequences, std::span<const KernelCall> calls,
                      const std::function<void(const WindowOptions&)>& check);

// Checks that NaN or infinity reaches only the rows that attend it. Each place in turn gets the number: n >= 0 is the key n
// tokens before the last one, n < 0 is query -n - 1. "": nothing is wrong.
std::string check_bad_numbers(const OpenDevice& device, WindowOptions options, std::span<const int64_t> places);

// Checks calls with very small weights, for every dim and group. The values of the heaviest keys are 0 in some dims, so
// other keys decide these dims.
void for_far_weights(TypePair types, const std::vector<WindowSequence>& sequences, std::span<const int32_t> groups,
                     const std::function<void(const WindowOptions&)>& check);

}  // namespace tandem::test
