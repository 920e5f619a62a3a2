/* SPDX-License-Identifier: MIT
 *
 * A model's weights: projections that make keys and values from hidden states, and blocks that the
 * device has no room for. Part of tandem.h, which says what holds for every function. */
#ifndef TANDEM_WEIGHTS_H_
#define TANDEM_WEIGHTS_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- projections of hidden states --------------------------------------------------------- */

#define TANDEM_NORM_NONE 0
#define TANDEM_NORM_RMS 1   /* x / sqrt(mean(x^2) + eps) * weight */
#define TANDEM_NORM_LAYER 2 /* (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias */

#define TANDEM_WEIGHTS_IN_OUT 0 /* [hidden_dim, n_kv_heads * head_dim], contiguous */
#define TANDEM_WEIGHTS_OUT_IN 1 /* [n_kv_heads * head_dim, hidden_dim], contiguous, as checkpoints
                                 * have them */

/* How keys and values of a layer are made from the hidden states x of its tokens, for the route
 * "recompute" (KVPR, Jiang et al., 2024): k = rotate(norm(x) W_K + b_K), v = norm(x) W_V + b_V.
 * This must be what the caller's model does, because given K and V and those made from x replace
 * each other. Products are of numbers of w_type with sums in f32. The result of the norm is rounded
 * to w_type. Each number of K and V is rounded once, to its storage type. */
typedef struct tandem_layer_projection {
  uint32_t struct_size;
  int32_t hidden_dim;       /* of x; a multiple of 8 up to 65,536 */
  int32_t w_type;           /* of both weights: TANDEM_F16 or TANDEM_BF16 */
  int32_t w_order;          /* TANDEM_WEIGHTS_* */
  int32_t device_type;      /* where both weights are: in host memory (copied) or on the device
                             * (borrowed while the model lives) */
  int32_t norm;             /* TANDEM_NORM_* */
  float norm_eps;           /* 0: 1e-5 */
  int32_t k_rope;           /* how the caller rotates keys, with rope_dims, rope_theta, ... of the
                             * layer: TANDEM_ROPE_HALVES or TANDEM_ROPE_INTERLEAVED, by the cache's
                             * positions; 0: the caller does not rotate keys */
  const void *w_k;          /* 16-byte aligned in device memory. NULL, and w_v too:
                             * tandem_session_use_weights() names the weights */
  const void *w_v;
  const float *b_k;         /* [n_kv_heads * k_head_dim] or NULL; this and the members below are in
                             * host memory and copied */
  const float *b_v;         /* [n_kv_heads * v_head_dim] or NULL */
  const float *norm_weight; /* [hidden_dim]; NULL: ones */
  const float *norm_bias;   /* [hidden_dim] or NULL; with TANDEM_NORM_LAYER only */
} tandem_layer_projection;
#define TANDEM_LAYER_PROJECTION_INIT \
  { sizeof(tandem_layer_projection), 0, 0, 0, 0, 0, 0.0f, 0, NULL, NULL, NULL, NULL, NULL, NULL }
TANDEM_API void tandem_layer_projection_init(tandem_layer_projection *projection);

/* ---- offloaded weights -------------------------------------------------------------------- */

/* A model's weights of which the device has room for only some. They are blocks of bytes, in the
 * order in which a token uses them (say attention's matrices of layer 0, its MLP's, attention's of
 * layer 1, ...). Some blocks stay on the device. The others cross the bus again and again, while
 * the work before them computes. The library does not know what the bytes mean. */
typedef struct tandem_weights tandem_weights;

typedef struct tandem_weights_options {
  uint32_t struct_size;
  int32_t reserved;
  int64_t resident_bytes;   /* device memory for blocks that stay, spread evenly over the order; 0:
                             * no block stays */
  int64_t buffer_bytes;     /* device memory for the other blocks to pass through, at least the
                             * largest of them; 0: any two consecutive blocks and the largest once
                             * more */
  int64_t host_cap_bytes;   /* cap on host memory, CAPACITY beyond; 0: none */
  int64_t device_cap_bytes;
} tandem_weights_options;
#define TANDEM_WEIGHTS_OPTIONS_INIT \
  { sizeof(tandem_weights_options), 0, 0, 0, 0, 0 }
TANDEM_API void tandem_weights_options_init(tandem_weights_options *options);

/* Copies block i, n_bytes[i] bytes of host memory at data[i]: to the device if it stays there, else
 * to pinned host memory of the library. Begins to send the first blocks. options may be NULL. Waits
 * for the device. Errors: UNSUPPORTED (the engine has no device), INVALID_ARGUMENT, OUT_OF_MEMORY,
 * CAPACITY, DEVICE_LOST. */
TANDEM_API int32_t tandem_weights_create(tandem_weights **weights, tandem_engine *engine,
                                         const void *const *data, const int64_t *n_bytes,
                                         int32_t n_blocks, const tandem_weights_options *options,
                                         tandem_error **error);
/* Waits until the work that tandem_weights_done() was called for has finished. Accepts NULL. */
TANDEM_API void tandem_weights_release(tandem_weights *weights);
/* Sets *data to block block_idx in device memory, 256-byte aligned. It is valid for later work on
 * `stream`, until tandem_weights_done(). The order of blocks is a ring: the first follows the last.
 * Blocks may be left out. A block out of order is sent when it is asked for. Does not wait for the
 * device. Threads: any, but one stream's calls come in the order of its work. Errors:
 * INVALID_ARGUMENT, INVALID_STATE (the stream is being captured: a replay would find other blocks;
 * blocks in use leave no room for this one), DEVICE_LOST. */
TANDEM_API int32_t tandem_weights_use(void **data, tandem_weights *weights, int32_t block_idx,
                                      void *stream, tandem_error **error);
/* Says that no later work on `stream` reads the block: after the work that is on the stream now,
 * other blocks may be sent to its place. Call it once for each tandem_weights_use(). Errors: as
 * tandem_weights_use(); INVALID_STATE (the block is not in use). */
TANDEM_API int32_t tandem_weights_done(tandem_weights *weights, int32_t block_idx, void *stream,
                                       tandem_error **error);

/* Takes W_K and W_V of a layer whose projection has none from blocks of `weights`, from the
 * session's next call on. The session keeps `weights` alive. Route "recompute" uses the blocks
 * while it makes keys, on a stream of its own; so does "auto" where that gains time. Without this
 * call "recompute" returns INVALID_STATE, and "auto" makes no keys. May be called again.
 *
 * That stream runs ahead of the caller's stream, as calls return once their work is enqueued. If
 * W_K and W_V come before W_Q and W_O in the order of blocks, keys are made while the latter cross
 * the bus. If a layer is done batch by batch (KVPR's column-by-column schedule: one session, a call
 * for each batch's sequences), the keys of the next batch are made while this one computes. The
 * blocks stay between batches if the caller uses them before the layer's first call and calls
 * tandem_weights_done() after its last.
 *
 * Errors: INVALID_ARGUMENT (a block that does not exist or has another size; weights of another
 * engine), UNSUPPORTED (no projection, or one with weights). */
TANDEM_API int32_t tandem_session_use_weights(tandem_session *session, int32_t layer_idx,
                                              tandem_weights *weights, int32_t w_k_block,
                                              int32_t w_v_block, tandem_error **error);

/* Sums since the weights were created, and memory that they hold. */
typedef struct tandem_weights_stats {
  uint32_t struct_size;
  int32_t reserved;
  int64_t n_blocks;
  int64_t n_resident;      /* blocks that stay on the device */
  int64_t resident_bytes;  /* bytes of these blocks, as the caller gave them */
  int64_t host_bytes;      /* copies of the other blocks */
  int64_t pinned_bytes;    /* the part of host_bytes that is pinned: the rest crosses the bus more
                            * slowly */
  int64_t device_bytes;    /* device memory that blocks take, buffer included */
  int64_t buffer_bytes;
  int64_t n_uses;
  int64_t n_streamed_uses; /* uses of blocks that cross the bus */
  int64_t n_ahead;         /* the part of n_streamed_uses whose block was under way or there when it
                            * was asked for */
  int64_t streamed_bytes;  /* bytes sent so far, also those that were sent in vain */
} tandem_weights_stats;
#define TANDEM_WEIGHTS_STATS_INIT \
  { sizeof(tandem_weights_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Fills *stats. */
TANDEM_API int32_t tandem_weights_get_stats(tandem_weights_stats *stats,
                                            const tandem_weights *weights, tandem_error **error);

/* ---- hidden states of a cache -------------------------------------------------------------- */

/* tandem_sequence_append() for a layer that keeps hidden states (x_type of tandem_cache_options). x
 * [n_tokens, hidden_dim], f32, f16 or bf16, is rounded once to x_type. INVALID_ARGUMENT if the
 * layer keeps none; tandem_sequence_append() returns INVALID_ARGUMENT if it does. */
TANDEM_API int32_t tandem_sequence_append_x(tandem_cache *cache, int64_t sequence,
                                            int32_t layer_idx, const tandem_tensor *k,
                                            const tandem_tensor *v, const tandem_tensor *x,
                                            void *stream, tandem_error **error);
/* Reads the hidden states of tokens [first, first + shape[0]) of one layer back. INVALID_ARGUMENT
 * if the layer keeps none. */
TANDEM_API int32_t tandem_sequence_read_x(const tandem_tensor *x, const tandem_cache *cache,
                                          int64_t sequence, int32_t layer_idx, int64_t first,
                                          tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_WEIGHTS_H_ */
