// SPDX-License-Identifier: MIT
// Memory of a device, and pinned host memory that the device reads and writes. Failures are thrown.
#ifndef EXAMPLES_GENERATE_CUDA_CUDA_MEMORY_H_
#define EXAMPLES_GENERATE_CUDA_CUDA_MEMORY_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace generate {

inline void must(cudaError_t result, const std::string& what) {
  if (result != cudaSuccess) throw std::runtime_error("--device cuda: " + what + ": " + cudaGetErrorString(result));
}

enum class Side { kDevice, kPinned };

template <class T, Side side = Side::kDevice>
class CudaArray {
 public:
  CudaArray() = default;
  explicit CudaArray(int64_t n) : n_(n) {
    const size_t bytes = static_cast<size_t>(n) * sizeof(T);
    void* data = nullptr;
    const bool on_device = side == Side::kDevice;
    must(on_device ? cudaMalloc(&data, bytes) : cudaMallocHost(&data, bytes),
         (on_device ? "cudaMalloc of " : "cudaMallocHost of ") + std::to_string(bytes) + " bytes");
    data_ = static_cast<T*>(data);
  }
  CudaArray(CudaArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)), n_(std::exchange(other.n_, 0)) {}
  CudaArray& operator=(CudaArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_, other.n_);
    return *this;
  }
  ~CudaArray() { side == Side::kDevice ? cudaFree(data_) : cudaFreeHost(data_); }
  T* get() const { return data_; }
  int64_t size() const { return n_; }
  int64_t bytes() const { return n_ * static_cast<int64_t>(sizeof(T)); }

 private:
  T* data_ = nullptr;
  int64_t n_ = 0;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUDA_MEMORY_H_
