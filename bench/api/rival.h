// SPDX-License-Identifier: MIT
// Shared by all contestants of a side-by-side bench: a pool of keys and values as ggml stores them, and an interface. They
// attend layers one after the other, and only attention is timed.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace rivals {

constexpr int64_t kDim = 128, kQHeads = 32, kKvHeads = 8, kGroup = kQHeads / kKvHeads;
// Number of distinct tokens. Longer sequences repeat them, at other addresses. An append has fewer keys than this, so none
// of its masked keys equals a key that is attended.
constexpr int64_t kPoolTokens = 9001;
constexpr float kScale = 0.08838834764f;

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

// Returns n nearly normal numbers of variance 1.
inline Floats noise(int64_t n, uint64_t seed, float mean) {
  Floats x(static_cast<size_t>(n));
  for (float& value : x) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(seed >> 40) / 16777216.0f - 0.5f;
    }
    value = mean + sum * 1.7320508f;
  }
  return x;
}

// The pool's rows as ggml stores them; token t of a layer is row token_row(layer, t).
struct Pool {
  ggml_type type;
  Floats k = noise(kPoolTokens * kKvHeads * kDim, 1, 0.0f), v = noise(kPoolTokens * kKvHeads * kDim, 2, 0.5f);
  Bytes stored_k, stored_v;
  size_t row_bytes;

  explicit Pool(ggml_type of) : type(of), row_bytes(ggml_row_size(of, kDim)) {
    for (auto [from, to] : {std::pair{&k, &stored_k}, std::pair{&v, &stored_v}}) {
      to->resize(row_bytes * static_cast<size_t>(kPoolTokens * kKvHeads));
      ggml_quantize_chunk(type, from->data(), to->data(), 0, kPoolTokens * kKvHeads, kDim, nullptr);
    }
  }
  static int64_t token_row(int64_t layer, int64_t token) { return (token * 7 + layer * 131) % kPoolTokens; }
  const uint8_t* row(const Bytes& of, int64_t layer, int64_t token, int64_t head) const {
    return of.data() + static_cast<size_t>(token_row(layer, token) * kKvHeads + head) * row_bytes;
  }
};

// The queries belong to the last q_len of n_keys tokens.
struct Shape {
  int32_t n_threads;
  int64_t n_layers, n_keys, q_len;
};

// Largest errors, relative to the output's largest element: with few keys that get nearly all weight, and with about equal
// weights.
struct Errors {
  double peaked, diffuse;
};

class Rival {
 public:
  virtual ~Rival() = default;
  virtual const char* name() const = 0;
  virtual Errors largest() const = 0;      // the most that is still correct
  virtual void take(const Floats& q) = 0;  // [q_len, kQHeads, kDim]; not timed
  virtual void attend(int64_t layer) = 0;
  virtual void give(Floats* o) const = 0;  // [q_len, kQHeads, kDim]; not timed
};

}  // namespace rivals
