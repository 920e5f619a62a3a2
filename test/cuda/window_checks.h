// SPDX-License-Identifier: MIT
// What the tests of decode and of prefill do alike.
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

// K that the library rotates is in the window in f32, V in what the store has: pairs with kernels of some dims.
inline constexpr TypePair kRotatedPairs[] = {{TANDEM_F32, TANDEM_F16}, {TANDEM_F32, TANDEM_BF16}, {TANDEM_F32, TANDEM_Q8_0}};
bool has_kernels(TypePair types, int32_t dim);  // of kPairs or kRotatedPairs

// The pair that argv[2] names, all where there is none; ends the program where it names nothing.
std::span<const TypePair> pairs_of(int argc, char** argv);

WindowOptions options_of(TypePair types, int32_t n_kv_heads, int32_t dim, int32_t group,
                         std::vector<WindowSequence> sequences);
std::string describe(const WindowOptions& options);

// What else than types and dims it depends on which kernel serves.
struct KernelCall {
  int32_t group, q_type;
  float soft_cap;
};
// A call for every kernel of a pair, of f32 those of kRotatedPairs too, over few keys and every other time within a sliding
// window: for tools that look at every access.
void for_every_kernel(TypePair types, const std::vector<WindowSequence>& sequences, std::span<const KernelCall> calls,
                      const std::function<void(const WindowOptions&)>& check);

// A number that is none reaches what sees it and nothing else: in turn of a key so many before the last, of query -n - 1.
// "": so it is.
std::string check_bad_numbers(const OpenDevice& device, WindowOptions options, std::span<const int64_t> places);

// Calls whose weights go far down, of every dim and group: where the keys that weigh most have zeros for values, the others
// count.
void for_far_weights(TypePair types, const std::vector<WindowSequence>& sequences, std::span<const int32_t> groups,
                     const std::function<void(const WindowOptions&)>& check);

}  // namespace tandem::test
