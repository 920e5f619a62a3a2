// SPDX-License-Identifier: MIT
#include "cublas_products.h"

#include <dlfcn.h>

namespace generate {

namespace {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;  // the size that cuBLAS itself takes on large devices

}  // namespace

struct CublasProducts::Functions {
  decltype(&cublasCreate_v2) create;
  decltype(&cublasDestroy_v2) destroy;
  decltype(&cublasSetStream_v2) set_stream;
  decltype(&cublasSetWorkspace_v2) set_workspace;
  decltype(&cublasSetMathMode) set_math_mode;
  // Declared by hand, because in C++ the name is overloaded.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void* alpha,
                         const void* a, cudaDataType_t, int lda, const void* b, cudaDataType_t, int ldb, const void* beta,
                         void* c, cudaDataType_t, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
  decltype(&cublasGetStatusString) status_text;

  // Opens cuBLAS once and keeps it open: from the loader's path, else from its place at build time.
  static const Functions& get() {
    static const Functions functions = open();
    return functions;
  }
  static Functions open() {
    void* library = dlopen(TANDEM_CUBLAS, RTLD_NOW | RTLD_LOCAL);
    const char* why = library == nullptr ? dlerror() : nullptr;
    const std::string first_reason = why == nullptr ? "" : why;
    if (library == nullptr) library = dlopen(TANDEM_CUBLAS_FOLDER "/" TANDEM_CUBLAS, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("--device cuda: " + first_reason);
    Functions functions = {};
    const auto find = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      if (*function == nullptr) throw std::runtime_error(std::string("--device cuda: " TANDEM_CUBLAS " has no ") + name);
    };
    find(&functions.create, "cublasCreate_v2");
    find(&functions.destroy, "cublasDestroy_v2");
    find(&functions.set_stream, "cublasSetStream_v2");
    find(&functions.set_workspace, "cublasSetWorkspace_v2");
    find(&functions.set_math_mode, "cublasSetMathMode");
    find(&functions.gemm, "cublasGemmEx");
    find(&functions.status_text, "cublasGetStatusString");
    return functions;
  }
};

CublasProducts::CublasProducts(cudaStream_t stream) : functions_(Functions::get()), workspace_(kWorkspaceBytes) {
  must_succeed(functions_.create(&handle_), "cublasCreate");
  must_succeed(functions_.set_stream(handle_, stream), "cublasSetStream");
  must_succeed(functions_.set_workspace(handle_, workspace_.get(), kWorkspaceBytes), "cublasSetWorkspace");
  must_succeed(functions_.set_math_mode(handle_, CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
}

CublasProducts::~CublasProducts() {
  if (handle_ != nullptr) functions_.destroy(handle_);
}

void CublasProducts::must_succeed(cublasStatus_t status, const char* what) const {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("--device cuda: ") + what + ": " + functions_.status_text(status));
}

// cuBLAS is column-major: its matrix [n_in, n_out] is our [n_out, n_in].
void CublasProducts::apply(const Product& product) {
  const float one = 1, beta = product.adds ? 1 : 0;
  const int n_in = static_cast<int>(product.n_in), n_out = static_cast<int>(product.n_out);
  must_succeed(functions_.gemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, n_out, static_cast<int>(product.n_rows), n_in, &one,
                               product.weight, product.type, n_in, product.x, product.type, n_in, &beta, product.y,
                               product.y_type, n_out, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
               "cublasGemmEx");
}

}  // namespace generate
