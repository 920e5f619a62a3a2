// SPDX-License-Identifier: MIT
// The forward pass on a GPU: weights and activations in device memory, attention by Tandem on device tensors. Prompts run in
// chunks. A decode step is a planned step of Tandem. Each session captures it once, together with everything around it, in a
// CUDA graph and then replays the graph.
//
//   input (tokens, position)  ->  embedding  ->  layers  ->  head  ->  logits, most likely token     -> host
//   one copy out of pinned memory                 tandem_attend() in each             two copies into pinned memory
//
// With by_calls (--kv host) decode steps run kernel by kernel, like chunks, and Tandem's routes stream or rebuild K and V.
// After its first replay a session takes no longer chunks than before (Tandem's CAPACITY), because graphs hold addresses.
//
// Weights and activations are f32 or bf16. The residual stream, sums and logits are f32. cuBLAS is opened when the first
// model is loaded, so programs start, and run on the CPU, without it.
#ifndef EXAMPLES_GENERATE_CUDA_CUDA_TRANSFORMER_H_
#define EXAMPLES_GENERATE_CUDA_CUDA_TRANSFORMER_H_

#include <memory>

#include "safetensors.h"
#include "transformer.h"

namespace generate {

struct CudaOptions {
  int32_t dtype = TANDEM_F32;  // type of weights and activations: f32 or bf16
  int64_t chunk_tokens = 512;  // longest chunk
  bool library_rope = false;
  bool eager = false;
  tandem_engine* engine = nullptr;       // not NULL: the layers' matrices are in host memory, and this engine streams them
  double resident_share = 0;             // share of these matrices that stays on the device
  bool by_calls = false;                 // decode in single calls, not in planned steps
  bool keeps_hidden = false;             // attention gets the hidden states that K and V are made of
  const WeightFiles* weights = nullptr;  // NULL: random weights
  uint64_t seed = 0;                     // seed of the random weights
};

// Refuses --device cuda in a build without it.
Failure check_cuda_built();
// Throws a std::exception if the device or cuBLAS fails.
Failure make_cuda_transformer(const ModelConfig& config, const CudaOptions& options,
                              std::unique_ptr<Transformer>* transformer);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUDA_TRANSFORMER_H_
