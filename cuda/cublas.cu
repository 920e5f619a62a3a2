// SPDX-License-Identifier: MIT
#include "cuda/cublas.h"

#if __has_include(<cublas_v2.h>)
#include <cublas_v2.h>
#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <type_traits>

namespace tandem::cuda {
namespace {

struct Functions {
  decltype(&cublasCreate_v2) create;
  decltype(&cublasDestroy_v2) destroy;
  decltype(&cublasSetStream_v2) set_stream;
  decltype(&cublasSetWorkspace_v2) set_workspace;
  // Spelled out, as cublasGemmEx is overloaded in C++ and decltype cannot name one overload.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void* alpha,
                         const void* a, cudaDataType_t, int lda, const void* b, cudaDataType_t, int ldb, const void* beta,
                         void* c, cudaDataType_t, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
  cublasStatus_t (*gemms)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void* alpha,
                          const void* a, cudaDataType_t, int lda, long long a_stride, const void* b, cudaDataType_t, int ldb,
                          long long b_stride, const void* beta, void* c, cudaDataType_t, int ldc, long long c_stride,
                          int n_of, cublasComputeType_t, cublasGemmAlgo_t);
  decltype(&cublasGetStatusString) status_text;
  std::string refusal;  // "": all functions were found
};

template <typename Function>
void find(void* library, Function* function, const char* name, std::string* refusal) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && refusal->empty()) *refusal = std::string(TANDEM_CUBLAS " has no ") + name;
}

// Opens the library where the loader finds it, else where it was when this module was built. Never closes it.
Functions open_library() {
  Functions made = {};
  void* library = dlopen(TANDEM_CUBLAS, RTLD_NOW | RTLD_LOCAL);
  const char* why = library == nullptr ? dlerror() : nullptr;
  if (library == nullptr) made.refusal = why != nullptr ? why : TANDEM_CUBLAS ": cannot be opened";
  if (library == nullptr) library = dlopen(TANDEM_CUBLAS_FOLDER "/" TANDEM_CUBLAS, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return made;
  made.refusal.clear();
  find(library, &made.create, "cublasCreate_v2", &made.refusal);
  find(library, &made.destroy, "cublasDestroy_v2", &made.refusal);
  find(library, &made.set_stream, "cublasSetStream_v2", &made.refusal);
  find(library, &made.set_workspace, "cublasSetWorkspace_v2", &made.refusal);
  find(library, &made.gemm, "cublasGemmEx", &made.refusal);
  find(library, &made.gemms, "cublasGemmStridedBatchedEx", &made.refusal);
  find(library, &made.status_text, "cublasGetStatusString", &made.refusal);
  return made;
}

const Functions& functions() {
  static const Functions opened = open_library();
  return opened;
}

int32_t check(cublasStatus_t status, const char* what, DeviceError* error) {
  if (status == CUBLAS_STATUS_SUCCESS) return TANDEM_OK;
  const cudaError_t lost = cudaPeekAtLastError();
  if (ends_context(lost)) return cuda::check(lost, what, error);
  return fail(error, status == CUBLAS_STATUS_ALLOC_FAILED ? TANDEM_ERROR_OUT_OF_MEMORY : TANDEM_ERROR_BACKEND, status, "",
              "%s: %s", what, functions().status_text(status));
}

}  // namespace

Cublas::~Cublas() {
  if (handle_ != nullptr) functions().destroy(static_cast<cublasHandle_t>(handle_));
}

int32_t Cublas::open(DeviceError* error) {
  if (handle_ != nullptr) return TANDEM_OK;
  if (!functions().refusal.empty())
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "route", "keys are rebuilt by cuBLAS: %s", functions().refusal.c_str());
  cublasHandle_t made = nullptr;
  const int32_t code = check(functions().create(&made), "cublasCreate", error);
  handle_ = made;
  return code;
}

int32_t Cublas::begin(cudaStream_t stream, void* workspace, DeviceError* error) {
  if (const int32_t code = open(error); code != TANDEM_OK) return code;
  const auto handle = static_cast<cublasHandle_t>(handle_);
  if (const int32_t code = check(functions().set_stream(handle, stream), "cublasSetStream", error); code != TANDEM_OK)
    return code;
  return check(functions().set_workspace(handle, workspace, kWorkspaceBytes), "cublasSetWorkspace", error);
}

// cuBLAS is column-major, so its matrices are ours transposed.
int32_t Cublas::multiply(const Product& product, DeviceError* error) {
  const float one = 1.0f, zero = 0.0f;
  const auto n_in = static_cast<int>(product.n_in), n_out = static_cast<int>(product.n_out);
  const cudaDataType_t type = product.dtype == TANDEM_F16 ? CUDA_R_16F : CUDA_R_16BF;
  const auto handle = static_cast<cublasHandle_t>(handle_);
  const cublasOperation_t order = product.is_out_by_in ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int n_rows = static_cast<int>(product.n_rows), w_row = product.is_out_by_in ? n_in : n_out;
  if (product.w_2 == nullptr)
    return check(functions().gemm(handle, order, CUBLAS_OP_N, n_out, n_rows, n_in, &one, product.w, type, w_row, product.x,
                                  type, n_in, &zero, product.y, CUDA_R_32F, n_out, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                 "cublasGemmEx", error);
  const int64_t apart = static_cast<const std::byte*>(product.w_2) - static_cast<const std::byte*>(product.w);
  return check(functions().gemms(handle, order, CUBLAS_OP_N, n_out, n_rows, n_in, &one, product.w, type, w_row, apart / 2,
                                 product.x, type, n_in, 0, &zero, product.y, CUDA_R_32F, n_out,
                                 product.n_rows * product.n_out, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "cublasGemmStridedBatchedEx", error);
}

}  // namespace tandem::cuda

#else

namespace tandem::cuda {

Cublas::~Cublas() = default;
int32_t Cublas::open(DeviceError* error) {
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "route",
              "keys are rebuilt by cuBLAS, whose header this module was built without");
}
int32_t Cublas::begin(cudaStream_t, void*, DeviceError* error) { return open(error); }
int32_t Cublas::multiply(const Product&, DeviceError* error) { return open(error); }

}  // namespace tandem::cuda

#endif
