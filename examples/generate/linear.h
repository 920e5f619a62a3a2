// SPDX-License-Identifier: MIT
// Linear layers, y = x W^T + b, by oneDNN in f32. oneDNN also does the operation after the layer, on the rows that it has
// just computed: SiLU, the product with the gate, or the residual sum.
//
// Threads: a call with one row runs only on the calling thread. Decode alternates with Tandem's pool on the same cores,
// where OpenMP's team would keep spinning. A call with several rows runs on n_threads.
#ifndef EXAMPLES_GENERATE_LINEAR_H_
#define EXAMPLES_GENERATE_LINEAR_H_

#include <cstdint>
#include <memory>
#include <vector>

namespace generate {

enum class After {
  kNothing,
  kAddToOutput,  // y += x W^T + b
  kSilu,         // y = silu(x W^T + b)
  kTimes,        // y = (x W^T + b) * other, other: [n_rows, n_out]
};

class Linear {
 public:
  // weight: [n_out, n_in]; bias: [n_out] or empty.
  Linear(const std::vector<float>& weight, const std::vector<float>& bias, int64_t n_in, int64_t n_out, After after,
         int32_t n_threads);
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;
  ~Linear();

  // x: [n_rows, n_in], y: [n_rows, n_out]; `other` for kTimes only. Throws dnnl::error, a std::exception, if oneDNN has no
  // memory.
  void apply(float* y, const float* x, int64_t n_rows, const float* other = nullptr);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Ends OpenMP's team, which spins for milliseconds after its last work. The next call with several rows restarts it.
void pause_linear_threads();

}  // namespace generate

#endif  // EXAMPLES_GENERATE_LINEAR_H_
