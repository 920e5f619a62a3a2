/* SPDX-License-Identifier: MIT
 *
 * What the policy "hip" prunes: hierarchical pruning with cached lists (InfiniteHiP, arXiv
 * 2502.08910). Part of tandem.h, which says what holds for every function.
 *
 * A query block is one query of a decode call, or up to query_block consecutive queries of an
 * append. Its queries attend the first sink_tokens tokens, the window, and a list of chunks that
 * was made for the block: one list for each KV head. The window of a block begins window_tokens - 1
 * tokens before its first query, and ends for each query with its own token. If stages have blocks
 * of different lengths, the first query of the first stage's block counts. All tokens of a guess
 * (SPECULATIVE) use the window and the chunks of the guess's first token.
 *
 * Stages make the list, one after another. A chunk is chunk_tokens consecutive tokens and begins at
 * a multiple of that number. The first stage looks at all chunks between the sinks and the window.
 * Each later stage looks at the parts of the chunks that the stage before has kept. A stage gives
 * every chunk a score and keeps the chunks with the highest scores, keep_tokens tokens in all. Of
 * equal scores it keeps the lower chunk. A stage that would keep everything does nothing. Scores
 * are made from logits before the soft cap. The highest score over the queries of the block and the
 * query heads of the list counts.
 *
 * In decode calls the sequence keeps the stages' lists. A stage runs again when refresh_interval
 * tokens have come since its last run, or when a stage before it runs. After an append, a
 * truncation or a removal all stages run. A commit counts as so many decode calls. Stages also look at chunks inside the window, up to the
 * longest refresh_interval - 1 tokens deep, so that no key is forgotten between two runs.
 *
 * For calls on device tensors the device searches. It needs all keys of the sequences:
 * window_tokens of the session must be at least their length, else a call fails with CAPACITY
 * (window_tokens). On a device all stages run in a fork's first decode call, too. UNSUPPORTED on a
 * device are SPECULATIVE calls (flags), appends by records whose stages differ in query_block, and
 * layers with more than 64 query heads to a KV head (q.device_type). A planned step has one token
 * of a sequence. */
#ifndef TANDEM_PRUNING_H_
#define TANDEM_PRUNING_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a stage gives a chunk its score. */
#define TANDEM_JUDGE_DESCENT 1 /* as in the paper: by halving, each query head goes from the chunk's
                                * first key to a representative. The logit of that key is the score.
                                * Reads 1 + log2(chunk_tokens) keys of a chunk for each path */
#define TANDEM_JUDGE_BOUNDS 2  /* an upper bound of every logit in the chunk, from the smallest and
                                * the largest number that its keys have in each dimension. The
                                * library keeps these numbers in bf16: 4 * head_dim bytes for a
                                * chunk and KV head */
#define TANDEM_JUDGE_EXACT 3   /* the largest logit of the chunk's keys; all of them are read. In
                                * the last stage, if a list serves several query heads, the head's
                                * log-sum-exp over the keys that it would attend is subtracted. So
                                * no head with large logits takes the whole list */

typedef struct tandem_pruning_stage {
  uint32_t struct_size;
  int32_t judge;            /* TANDEM_JUDGE_* */
  int32_t query_block;      /* queries of an append, or of a guess, that share a list: a power of
                             * two up to 64; 0: 64. Not more than in any stage before that applies
                             * at the same lengths */
  int32_t plus_next;        /* 1: only in the last stage: half of keep_tokens is kept by score, and
                             * after each such chunk the next chunk */
  int64_t chunk_tokens;     /* a power of two up to 256, and not more than in any stage before that
                             * applies at the same lengths */
  int64_t keep_tokens;      /* a multiple of chunk_tokens; with plus_next a multiple of twice
                             * chunk_tokens */
  int64_t refresh_interval; /* tokens between two runs in decode calls; 0: 1, the stage runs in
                             * every call */
  int64_t from_tokens;      /* the stage applies to blocks whose first query sees at least this many
                             * tokens */
  int64_t to_tokens;        /* and fewer than this many; 0: no limit */
} tandem_pruning_stage;
#define TANDEM_PRUNING_STAGE_INIT \
  { sizeof(tandem_pruning_stage), 0, 0, 0, 0, 0, 0, 0, 0 }

/* What a layer's queries attend. */
typedef struct tandem_pruning_record {
  uint32_t struct_size;
  int32_t reserved;              /* 0 */
  int64_t sink_tokens;           /* first tokens, always attended: a multiple of the largest
                                  * chunk_tokens; -1: 64 */
  int64_t window_tokens;         /* newest tokens, always attended: at least twice the largest
                                  * chunk_tokens plus the longest refresh_interval - 1, in records
                                  * of appends too; -1: 1024 */
  const tandem_pruning_stage *stages; /* [n_stages], each with its own struct_size (all equal) */
  int64_t n_stages;              /* 1 to 8 */
} tandem_pruning_record;
#define TANDEM_PRUNING_RECORD_INIT \
  { sizeof(tandem_pruning_record), 0, -1, -1, NULL, 0 }

/* Read when the session is created. Errors: NOT_FOUND (pruning.preset, even if both kinds of
 * records are given), INVALID_ARGUMENT (the member), UNSUPPORTED
 * (pruning.decode[i].stages[j].judge, or pruning.preset: bounds of keys of more than 288
 * dimensions). */
typedef struct tandem_pruning {
  uint32_t struct_size;
  int32_t shared_lists;          /* 1: one list for all KV heads, as in the paper; 0: one for each
                                  */
  const char *preset;            /* NULL: "small"; or "3k", "3k-fast", "3k-flash", "5k", "3k-5k",
                                  * "16k-shallow": those of the paper */
  const tandem_pruning_record *decode; /* for calls with one query of a sequence, and for guesses:
                                        * [n_decode] records, or NULL: the preset's. Each has its
                                        * own struct_size (all equal) */
  int64_t n_decode;              /* number of layers in the model, or 1: all layers have this
                                  * record; 0 with NULL */
  const tandem_pruning_record *append; /* the same, for calls with several queries of a sequence */
  int64_t n_append;
} tandem_pruning;
#define TANDEM_PRUNING_INIT \
  { sizeof(tandem_pruning), 0, NULL, NULL, 0, NULL, 0 }
TANDEM_API void tandem_pruning_stage_init(tandem_pruning_stage *stage);
TANDEM_API void tandem_pruning_record_init(tandem_pruning_record *record);
TANDEM_API void tandem_pruning_init(tandem_pruning *pruning);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_PRUNING_H_ */
