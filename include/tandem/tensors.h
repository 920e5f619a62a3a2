/* SPDX-License-Identifier: MIT
 *
 * Attention over K and V that the caller owns: no cache, no session, no copy. Part of tandem.h,
 * which says what holds for every function. */
#ifndef TANDEM_TENSORS_H_
#define TANDEM_TENSORS_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_TENSORS_CAUSAL 1u /* query t of q_len sees keys 0 to kv_len - q_len + t of its
                                  * sequence; if that is below 0 it sees none */

/* Shapes, in one of two forms. Strides of q, k, v and o may order tokens and heads either way
 * (token-major, head-major) and leave gaps; head_dim is contiguous.
 *
 * Padded: sequence i has the first q_lens[i] tokens and the first kv_lens[i] keys; NULL: all of
 * them. Tokens and keys behind these are neither read nor written.
 *
 *   q     [n_sequences, n_tokens, n_q_heads, k_head_dim]
 *   k     [n_sequences, n_keys, n_kv_heads, k_head_dim]
 *   v     [n_sequences, n_keys, n_kv_heads, v_head_dim]
 *   o     [n_sequences, n_tokens, n_q_heads, v_head_dim]
 *   lse   [n_sequences, n_tokens, n_q_heads]
 *   mask  [1 or n_sequences, 1 or n_q_heads, n_tokens, n_keys]
 *
 * Packed: sequences stand one after another. q_lens add up to n_tokens and kv_lens to n_keys; both
 * may be NULL with one sequence. Column j of the mask is key j of the row's own sequence, and
 * n_columns is at least the largest of kv_lens.
 *
 *   q     [n_tokens, n_q_heads, k_head_dim]
 *   k     [n_keys, n_kv_heads, k_head_dim]
 *   v     [n_keys, n_kv_heads, v_head_dim]
 *   o     [n_tokens, n_q_heads, v_head_dim]
 *   lse   [n_tokens, n_q_heads]
 *   mask  [n_tokens, n_columns]
 *
 * Types: q and o are f32, f16 or bf16; k and v f32, f16, bf16, e4m3, q8_0 or q4_0. The last two are
 * ggml's blocks, in which scales lie between the codes. lse is f32, and mask f32 or f16. Head dims
 * are those of tandem_layer_options. n_q_heads is a multiple of n_kv_heads. */
typedef struct tandem_attend_tensors_args {
  uint32_t struct_size;
  uint32_t flags;                /* TANDEM_TENSORS_*; 0: every query sees every key, or the keys
                                  * that the mask shows */
  int32_t n_sequences;           /* 0: q.shape[0] for padded tensors, 1 for packed tensors */
  float sm_scale;                /* 0: 1 / sqrt(k_head_dim) */
  float soft_cap;                /* 0: off; as in tandem_layer_options */
  int32_t reserved;
  int64_t sliding_window_tokens; /* 0: off; else, with TANDEM_TENSORS_CAUSAL, a query sees only this
                                  * many keys, its own the last */
  const float *sinks;            /* [n_q_heads] learned sink logits, each merged once as the state
                                  * (0, logit); NULL: none */
  const float *alibi_slopes;     /* [n_q_heads] or NULL. Without a mask the logit of key j for query
                                  * t of a sequence gets -slope * |kv_len - q_len + t - j|. With a
                                  * mask its values are multiplied by slope */
  const int64_t *q_lens;         /* [n_sequences], >= 0, or NULL */
  const int64_t *kv_lens;        /* [n_sequences], >= 0, or NULL */
  const tandem_tensor *q;
  const tandem_tensor *k;
  const tandem_tensor *v;        /* NULL: V is the first v_head_dim dims of K, read once (MLA) */
  const tandem_tensor *mask;     /* added to the logits after the soft cap: -inf hides a key, 0
                                  * changes nothing. NULL: none. Not with TANDEM_TENSORS_CAUSAL */
  const tandem_tensor *o;        /* written */
  const tandem_tensor *lse;      /* written; NULL: not wanted */
  void *stream;                  /* NULL: the tensors are in host memory */
  const int32_t *cancel;         /* as in tandem_attend_args */
  tandem_progress_fn progress;   /* as in tandem_attend_args; must not call this engine */
  void *progress_user;
} tandem_attend_tensors_args;
#define TANDEM_ATTEND_TENSORS_ARGS_INIT \
  { sizeof(tandem_attend_tensors_args), 0, 0, 0.0f, 0.0f, 0, 0, NULL, NULL, NULL, NULL, NULL, \
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }
TANDEM_API void tandem_attend_tensors_args_init(tandem_attend_tensors_args *args);

/* Computes o = softmax(logits) V and its lse as tandem_attend() does, over K and V where they lie.
 * Keys that the mask hides from every query are not read. A query that sees no key gives o = 0 and
 * lse = -inf, or, with a sink, the state of the sink alone. A mask value of NaN or +inf makes the
 * output NaN. States over disjoint keys can be merged (tandem_merge()).
 *
 * A mask costs one scan, which turns its rows into ranges of visible keys. Causal ranges, sliding
 * ranges and ranges that queries share are as fast as without a mask. Values that are neither 0 nor
 * -inf, and alibi_slopes, are added key by key, by the kernels for short calls: a long call with
 * them does not use matrix products. With a mask for each query head, K and V are read once per
 * query head.
 *
 * Calls of one engine run one after another, from any thread. Work space grows with the largest
 * call so far and belongs to the engine. Errors: INVALID_ARGUMENT (shapes that do not fit each
 * other, overlapping strides, an output that overlaps an input, sliding_window_tokens without
 * TANDEM_TENSORS_CAUSAL, TANDEM_TENSORS_CAUSAL with a mask), UNSUPPORTED (head dims without
 * kernels; 576 except with v NULL and v_head_dim 512; q4_64; tensors in device memory), CAPACITY
 * (more tokens than a call can have), OUT_OF_MEMORY, CANCELLED (o and lse may be written in part).
 * On any error but CANCELLED o and lse are untouched. */
TANDEM_API int32_t tandem_attend_tensors(tandem_engine *engine,
                                         const tandem_attend_tensors_args *args,
                                         tandem_error **error);

/* ---- merge -------------------------------------------------------------------------------- */

/* Merges n_states states (1 to 65,536) over disjoint keys; they may come from other machines. m =
 * max lse_i, w_i = exp(lse_i - m), o = sum w_i o_i / sum w_i, lse = m + log sum w_i. o[i]:
 * [n_tokens, n_heads, head_dim], lse[i]: [n_tokens, n_heads] f32. lse = -inf is the empty state:
 * its o counts as zero, whatever it holds. If all states are empty the result is (0, -inf). NaN is
 * passed on. o_out and lse_out may be o[0] and lse[0] themselves. States are summed in the order of
 * the arrays. The CPU merges: stream is NULL, and tensors in device memory are UNSUPPORTED. */
TANDEM_API int32_t tandem_merge(const tandem_tensor *o_out, const tandem_tensor *lse_out,
                                const tandem_tensor *const *o, const tandem_tensor *const *lse,
                                int32_t n_states, tandem_engine *engine, void *stream,
                                tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_TENSORS_H_ */
