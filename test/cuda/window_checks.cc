// SPDX-License-Identifier: MIT
#include "window_checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "lib/model/dtype.h"

namespace tandem::test {

std::span<const TypePair> pairs_of(int argc, char** argv) {
  const std::span<const TypePair> all = kPairs;
  if (argc <= 2) return all;
  char* end = nullptr;
  const long only = std::strtol(argv[2], &end, 10);
  if (*end != 0 || end == argv[2] || only < 0 || only >= static_cast<long>(all.size())) {
    std::fprintf(stderr, "PAIR = %s is none of 0 to %zu\n", argv[2], all.size() - 1);
    std::exit(2);
  }
  return all.subspan(static_cast<size_t>(only), 1);
}

bool has_kernels(TypePair types, int32_t dim) {
  return types.k != TANDEM_F32 || types.v == TANDEM_F32 || (dim != 80 && dim != 112 && dim != 192);
}

WindowOptions options_of(TypePair types, int32_t n_kv_heads, int32_t dim, int32_t group,
                         std::vector<WindowSequence> sequences) {
  WindowOptions options;
  options.layer.n_kv_heads = n_kv_heads;
  options.layer.n_q_heads = n_kv_heads * group;
  options.layer.k_head_dim = options.layer.v_head_dim = dim;
  options.layer.k_type = types.k;
  options.layer.v_type = types.v;
  options.sequences = std::move(sequences);
  return options;
}

std::string describe(const WindowOptions& options) {
  char text[120];
  std::snprintf(text, sizeof text, "%s/%s dims %d, %d heads of %d, q %s", find_dtype(options.layer.k_type)->name,
                find_dtype(options.layer.v_type)->name, options.layer.k_head_dim, options.layer.n_kv_heads,
                options.layer.group_size(), find_dtype(options.q_type)->name);
  return text;
}

std::string check_bad_numbers(const OpenDevice& device, WindowOptions options, std::span<const int64_t> places) {
  WindowCase good(device, options);
  good.attend(0);
  for (const double value : {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)})
    for (const int64_t place : places) {
      options.bad_query = place < 0 ? -place - 1 : -1;
      options.bad_key = place < 0 ? -1 : place;
      options.bad_value = value;
      WindowCase bad(device, options);
      bad.clear_output();
      bad.attend(0);
      if (const std::string fault = bad.check_bad(good); !fault.empty())
        return describe(options) + " with " + std::to_string(value) + " at " + std::to_string(place) + ": " + fault;
    }
  return "";
}

namespace {

// Returns a spread that reaches the smallest weights in f16 if weights are rounded to f16, and further otherwise.
double spread_of(const WindowOptions& options) {
  int32_t most_q_len = 0;
  for (const WindowSequence& sequence : options.sequences) most_q_len = std::max(most_q_len, sequence.q_len);
  const bool rounds_p = reference::device_rounds_p(options.layer, options.q_type, most_q_len);
  return rounds_p && options.layer.v_type != TANDEM_BF16 ? 28.0 : 60.0;
}

}  // namespace

void for_far_weights(TypePair types, const std::vector<WindowSequence>& sequences, std::span<const int32_t> groups,
                     const std::function<void(const WindowOptions&)>& check) {
  std::vector<TypePair> pairs = {types};
  if (types.k == TANDEM_F32)  // if V is f32, a sum of logits of one sign is too long
    pairs.assign(std::begin(kRotatedPairs), std::end(kRotatedPairs));
  uint64_t seed = 1;
  for (const TypePair pair : pairs)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const int32_t group : groups)
        for (const int32_t q_type : {TANDEM_F32, TANDEM_BF16}) {
          if (!has_kernels(pair, dim)) continue;
          WindowOptions options = options_of(pair, 2, dim, group, sequences);
          options.q_type = q_type;
          options.q_mean = 1.0;
          options.q_size = 0.02;
          options.spread = spread_of(options);
          options.seed = seed++;
          check(options);
        }
}

void for_every_kernel(TypePair types, const std::vector<WindowSequence>& sequences, std::span<const KernelCall> calls,
                      const std::function<void(const WindowOptions&)>& check) {
  std::vector<TypePair> pairs = {types};
  if (types.k == TANDEM_F32) pairs.insert(pairs.end(), std::begin(kRotatedPairs), std::end(kRotatedPairs));
  uint64_t seed = 1;
  for (const TypePair pair : pairs)
    for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
      for (const KernelCall& call : calls) {
        if (!has_kernels(pair, dim)) continue;
        WindowOptions options = options_of(pair, 2, dim, call.group, sequences);
        options.q_type = call.q_type;
        options.layer.soft_cap = call.soft_cap;
        options.seed = seed++;
        if (options.seed % 2 == 0) {
          options.layer.sliding_window = 100;
          options.layer.sinks.assign(static_cast<size_t>(options.layer.n_q_heads), 0.5f);
        }
        check(options);
      }
}

}  // namespace tandem::test
