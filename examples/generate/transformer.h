// SPDX-License-Identifier: MIT
// The forward pass of a Llama-family model, with everything but attention computed here:
//
//   x = embedding[token]
//   per layer:  x += Wo attend(rope(Wq norm(x)), rope(Wk norm(x)), Wv norm(x))        Tandem keeps K and V
//               x += Wdown(silu(Wgate norm(x)) * Wup norm(x))
//   logits = Wout norm(x)
//
// on the CPU (cpu_transformer.h) or on a GPU (cuda/cuda_transformer.h).
#ifndef EXAMPLES_GENERATE_TRANSFORMER_H_
#define EXAMPLES_GENERATE_TRANSFORMER_H_

#include <tandem/tandem.h>

#include <cstdint>
#include <span>
#include <vector>

#include "failure.h"
#include "llama_config.h"

namespace generate {

// Tokens to append to one sequence in a session, with flags.
struct Chunk {
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  int64_t position = 0;  // tokens already in the sequence
  std::span<const int32_t> tokens;
  uint32_t flags = 0;  // TANDEM_ATTEND_*
};

// The steps and the memory of a transformer on a device.
struct DeviceUse {
  bool is_used = false;
  int64_t n_replayed = 0, n_launched = 0;  // decode steps as a graph, and kernel by kernel
  int64_t runtime_bytes = 0;               // weights, activations and work space, as requested
  // Memory in use as the device counts it, by all processes: after the weights were loaded, and now. Both are relative to
  // the time before loading.
  int64_t loaded_bytes = 0, now_bytes = 0;
  tandem_weights_stats weights = TANDEM_WEIGHTS_STATS_INIT;  // n_blocks 0: all weights are on the device
};

// How a layer makes K and V of its hidden states, with the parts that are not on the device.
struct LayerProjection {
  tandem_layer_projection options = TANDEM_LAYER_PROJECTION_INIT;
  std::vector<uint16_t> weights;  // of K, then of V
  std::vector<float> bias;        // of K, then of V
};

class Transformer {
 public:
  explicit Transformer(const ModelConfig& config) : config_(config) {}
  Transformer(const Transformer&) = delete;
  Transformer& operator=(const Transformer&) = delete;
  virtual ~Transformer() = default;

  // Runs one step: every layer for every token of the chunk. Afterwards logits() gives the logits of its tokens.
  virtual Failure forward(const Chunk& chunk) = 0;
  // Returns logits of tokens [first, first + n) of the last chunk: [n, vocab_size] in host memory, valid until the next
  // call. Throws a std::exception if a device or oneDNN fails.
  virtual const float* logits(int64_t first, int64_t n) = 0;
  // Returns the most likely token after token `row` of the last chunk; -1: its logits are not finite. Throws like logits().
  virtual int32_t most_likely(int64_t row);
  // Called for a new session. State kept for an earlier session at this address is stale.
  virtual void meet(const tandem_session* /*session*/) {}
  // Called between chunks and other work: releases the processors.
  virtual void rest() {}
  virtual DeviceUse device_use() { return {}; }
  // The type for hidden states, after the norm, that attention gets; and the projection that makes K and V of them.
  virtual int32_t hidden_type() const { return 0; }
  virtual Failure projection(int64_t /*layer_idx*/, LayerProjection* /*projection*/) {
    return {"hidden states: are kept with --device cuda alone"};
  }
  const ModelConfig& config() const { return config_; }

 protected:
  const ModelConfig config_;
};

// Returns Tandem's description of one layer. library_rope: keys are passed unrotated, and Tandem rotates them.
tandem_layer_options layer_options(const ModelConfig& config, bool library_rope);
// Returns a view of heads inside the rows of a wider matrix, in host memory.
tandem_tensor heads_view(void* data, int32_t dtype, int64_t n_tokens, int64_t n_heads, int64_t head_dim, int64_t row_stride);
// Returns a view of whole rows.
tandem_tensor rows_view(void* data, int32_t dtype, int64_t n_tokens, int64_t row_size);
// Queries, new keys and values, and outputs of one layer, with the hidden states of K and V if the cache keeps them.
struct HeadsOfChunk {
  tandem_tensor q, k, v, o;
  tandem_tensor x = {};
  bool has_x = false;
};
// Runs the layer's attention. stream: for tensors on a device.
Failure attend_chunk(const Chunk& chunk, int64_t layer_idx, const HeadsOfChunk& heads, void* stream = nullptr);
// Returns the rotation frequencies of a head's pairs of dims: [head_dim / 2].
std::vector<float> inverse_frequencies(const ModelConfig& config);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_TRANSFORMER_H_
