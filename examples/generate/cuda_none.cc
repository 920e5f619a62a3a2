// SPDX-License-Identifier: MIT
// Replaces the CUDA part in builds without it.
#include "cuda/cuda_transformer.h"

namespace generate {

Failure check_cuda_built() {
  return {"--device: \"cuda\" is not in this build (TANDEM_GENERATE_CUDA was off, or nvcc or cuBLAS not found)"};
}

Failure make_cuda_transformer(const ModelConfig& /*config*/, const CudaOptions& /*options*/,
                              std::unique_ptr<Transformer>* /*transformer*/) {
  return check_cuda_built();
}

}  // namespace generate
