// SPDX-License-Identifier: MIT
// The forward pass on a GPU: weights and activations in device memory, attention by Tandem on device tensors. Prompts go
// through in chunks; a decode step is a planned step of Tandem's, captured once for each session in a CUDA graph, together
// with everything around it, and replayed.
//
//   input (tokens, position)  ->  embedding  ->  layers  ->  head  ->  logits, most likely token     -> host
//   one copy out of pinned memory                 tandem_attend() in each             two copies into pinned memory
//
// With by_calls (--kv host) decode steps go kernel by kernel, like chunks: then Tandem's routes stream or rebuild K and V.
// From its first replay on a session takes no longer chunks than before (Tandem's CAPACITY): graphs hold addresses.
//
// Weights and activations are f32 or bf16; the residual stream, sums and logits are f32. cuBLAS is opened when the first
// model is loaded: programs start, and run on the CPU, where there is none.
#ifndef EXAMPLES_GENERATE_CUDA_CUDA_TRANSFORMER_H_
#define EXAMPLES_GENERATE_CUDA_CUDA_TRANSFORMER_H_

#include <memory>

#include "safetensors.h"
#include "transformer.h"

namespace generate {

struct CudaOptions {
  int32_t dtype = TANDEM_F32;  // of weights and activations: f32 or bf16
  int64_t chunk_tokens = 512;  // the longest chunk
  bool library_rope = false;
  bool eager = false;
  tandem_engine* engine = nullptr;       // not NULL: the layers' matrices are with the host, and this engine streams them
  double resident_share = 0;             // of these, on the device all the same
  bool by_calls = false;                 // decode in calls of its own, not in planned steps
  bool keeps_hidden = false;             // attention is given the hidden states that K and V are made of
  const WeightFiles* weights = nullptr;  // NULL: random ones
  uint64_t seed = 0;                     // of those
};

// Refuses --device cuda in a build without it.
Failure check_cuda_built();
// Throws a std::exception where device or cuBLAS fail.
Failure make_cuda_transformer(const ModelConfig& config, const CudaOptions& options,
                              std::unique_ptr<Transformer>* transformer);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CUDA_CUDA_TRANSFORMER_H_
