/* SPDX-License-Identifier: MIT
 *
 * What the policy "hip" prunes: hierarchical pruning with cached lists (InfiniteHiP, arXiv
 * 2502.08910). Part of tandem.h, which says what holds for every function.
 *
 * A query block is one query of a decode call, or up to query_block consecutive queries of an
 * append. Its queries attend the first sink_tokens tokens, the window, and a list of chunks that
 * was made for the block: one list for each KV head. The window of a block begins window_tokens - 1
 * tokens before its first query, and ends for each query with its own token. Where stages have
 * blocks of different lengths, the window begins by the first query of the first stage's block. The
 * tokens of a guess (SPECULATIVE) all have the window, and look at the chunks, of the first of
 * them.
 *
 * Stages make the list, one after another. A chunk is chunk_tokens consecutive tokens and begins at
 * a multiple of that. The first stage looks at all chunks between the sinks and the window, each
 * later stage at the parts of the chunks that the stage before has kept. A stage gives every chunk
 * a score and keeps those with the highest scores, keep_tokens tokens in all; of equal scores it
 * keeps the lower chunk. A stage that would keep everything does nothing. Scores are made of logits
 * before the soft cap, and the highest over the queries of the block and the query heads of the
 * list counts.
 *
 * In decode calls the stages' lists are kept with the sequence, and a stage runs again when
 * refresh_interval tokens have come since it ran last, or when a stage before it runs. After an
 * append, a truncation or a removal all stages run. So that no key is forgotten in between, chunks
 * are looked at up to the longest refresh_interval - 1 tokens inside the window.
 *
 * Calls on device tensors are searched on the device. It has all keys of the sequences then: the
 * session's window_tokens is at least their length, else a call fails with CAPACITY
 * (window_tokens). There all stages run in a fork's first decode call, too. SPECULATIVE calls are
 * UNSUPPORTED there (flags), and appends by records whose stages differ in query_block and layers
 * with more than 64 query heads to a KV head (q.device_type). A planned step has one token of a
 * sequence. */
#ifndef TANDEM_PRUNING_H_
#define TANDEM_PRUNING_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a stage judges a chunk. */
#define TANDEM_JUDGE_DESCENT 1 /* the paper's: by halving, each query head goes from the chunk's
                                * first key to a representative, whose logit is the chunk's score.
                                * Reads 1 + log2(chunk_tokens) keys of a chunk for each path */
#define TANDEM_JUDGE_BOUNDS 2  /* an upper bound of every logit in the chunk, from the smallest and
                                * largest number that its keys have in each dimension. The library
                                * keeps these numbers in bf16: 4 * head_dim bytes a chunk and KV
                                * head */
#define TANDEM_JUDGE_EXACT 3   /* the largest logit of the chunk's keys, all of which are read. In
                                * the last stage, where a list serves several query heads: less the
                                * head's log-sum-exp over what it would attend, so that no head
                                * whose logits are large takes the whole list */

typedef struct tandem_pruning_stage {
  uint32_t struct_size;
  int32_t judge;            /* TANDEM_JUDGE_* */
  int32_t query_block;      /* queries of an append that share a list: a power of two up to 64;
                             * 0: 64. Not more than in the stage before */
  int32_t plus_next;        /* 1: of the last stage: half of keep_tokens is kept by score, and with
                             * each such chunk the chunk behind it */
  int64_t chunk_tokens;     /* a power of two up to 256, and not more than in the stage before */
  int64_t keep_tokens;      /* a multiple of chunk_tokens; with plus_next a multiple of twice
                             * chunk_tokens */
  int64_t refresh_interval; /* tokens from one run to the next in decode calls; 0: 1, it runs in
                             * every call */
  int64_t from_tokens;      /* the stage is there for blocks whose first query sees so many tokens
                             * and more, */
  int64_t to_tokens;        /* and fewer than these; 0: there is no limit */
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
                                  * chunk_tokens and the longest refresh_interval - 1; -1: 1024 */
  const tandem_pruning_stage *stages; /* [n_stages], each with its own struct_size (all equal) */
  int64_t n_stages;              /* 1 to 8 */
} tandem_pruning_record;
#define TANDEM_PRUNING_RECORD_INIT \
  { sizeof(tandem_pruning_record), 0, -1, -1, NULL, 0 }

/* Read when the session is created. Errors: NOT_FOUND (pruning.preset, also where both kinds of
 * records are given), INVALID_ARGUMENT (the member), UNSUPPORTED
 * (pruning.decode[i].stages[j].judge, or pruning.preset: bounds of keys of more than 288
 * dimensions). */
typedef struct tandem_pruning {
  uint32_t struct_size;
  int32_t shared_lists;          /* 1: one list for all KV heads, as in the paper; 0: one for each
                                  */
  const char *preset;            /* NULL: "small"; or "3k", "3k-fast", "3k-flash", "5k", "3k-5k",
                                  * "16k-shallow", those of the paper */
  const tandem_pruning_record *decode; /* of calls with one query of a sequence, and of guesses:
                                        * [n_decode], or NULL: the preset's. Each with its own
                                        * struct_size (all equal) */
  int64_t n_decode;              /* layers of the model, or 1: all layers have this record; 0 with
                                  * NULL */
  const tandem_pruning_record *append; /* likewise of calls with several queries of a sequence */
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
