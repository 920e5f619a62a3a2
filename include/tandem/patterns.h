/* SPDX-License-Identifier: MIT
 *
 * Head patterns: which keys the queries of an append attend, query head by query head. What the
 * policy "patterns" is told. Part of tandem.h, which says what holds for every function.
 *
 * A call with several queries of a sequence appends a prompt, or a part of one. Its queries are
 * taken in blocks of TANDEM_PATTERN_BLOCK, and these in chunks of TANDEM_PATTERN_CHUNK, both
 * counted from the sequence's first query in the call. All queries of a block attend the same keys
 * of a query head, but none behind its own token: the union of what the head's patterns name. Keys
 * are named in units of TANDEM_PATTERN_UNIT tokens, which begin at multiples of that, so that 13
 * sinks are 16. Windows alone begin at their exact token. The tokens from a block's first query on
 * are always named.
 *
 *   A_SHAPE         the first sink_tokens tokens, rounded up to units, and the window, which begins
 *                   window_tokens - 1 tokens before the block's first query
 *   VERTICAL_SLASH  columns and diagonals, chosen for each chunk by the attention weights of its
 *                   last 64 queries. A column is a token: the vertical_tokens with the largest sums
 *                   of weights are named. A diagonal is a distance between query and key. Diagonals
 *                   are taken in bands of 16 that begin at multiples of 16: those with the largest
 *                   sums are named, slash_tokens diagonals in all, rounded up to bands, of which
 *                   the first band is always one
 *   BLOCK_SPARSE    the n_blocks blocks of 64 tokens, at multiples of 64, whose mean logit with the
 *                   mean of the block's queries is largest, of the blocks that end before the
 *                   block's first query; and the tokens between these and the query
 *   FULL            all tokens. So does a head without patterns
 *
 * Of equal sums the lower token, band or block is named. (MInference, arXiv 2407.02490, names these
 * patterns; FlexAttn unites several for one head.)
 *
 * In calls with one query of a sequence, and of guesses (SPECULATIVE), a KV head whose query heads
 * all have the pattern A_SHAPE and no other attends the most sinks, rounded up to units, and the
 * longest window that any of these query heads has; other KV heads attend all keys. Layers with a
 * sliding window attend their whole window. Trees of speculative tokens are UNSUPPORTED
 * (parent_idx). On device tensors so are guesses and learned sinks (flags, q.device_type); a chunk
 * may have fewer blocks there (append_tokens), and tandem_session_selection() does not tell which
 * keys a head has chosen. An append whose session's window lacks keys brings those of its layer to
 * the device, into memory that the session keeps for two layers; in decode calls the CPU attends
 * them. Where the library rotates keys, and in calls of several queries without new tokens, the
 * window has to have all keys (CAPACITY, window_tokens). */
#ifndef TANDEM_PATTERNS_H_
#define TANDEM_PATTERNS_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_PATTERN_BLOCK 128
#define TANDEM_PATTERN_CHUNK 8192
#define TANDEM_PATTERN_UNIT 8

#define TANDEM_PATTERN_FULL 1u
#define TANDEM_PATTERN_A_SHAPE 2u
#define TANDEM_PATTERN_VERTICAL_SLASH 4u
#define TANDEM_PATTERN_BLOCK_SPARSE 8u

/* Of one query head. Sizes of a pattern that the head does not have are 0. */
typedef struct tandem_head_pattern {
  uint32_t struct_size;
  uint32_t kinds;          /* TANDEM_PATTERN_*, of which keys are united; 0: FULL */
  int64_t sink_tokens;     /* A_SHAPE */
  int64_t window_tokens;   /* A_SHAPE, 1 or more */
  int64_t vertical_tokens; /* VERTICAL_SLASH */
  int64_t slash_tokens;    /* VERTICAL_SLASH */
  int64_t n_blocks;        /* BLOCK_SPARSE */
} tandem_head_pattern;
#define TANDEM_HEAD_PATTERN_INIT \
  { sizeof(tandem_head_pattern), 0, 0, 0, 0, 0, 0 }

/* Read when the session is created. max_distance is for models that meet longer texts than they
 * were trained for (LM-Infinite, NAACL 2024): a key whose position is further than that from its
 * query's is attended as if it were max_distance before the query. The library applies RoPE then,
 * in all layers that follow patterns, and their heads have the pattern A_SHAPE and no other. On
 * device tensors it is UNSUPPORTED (q.device_type). Errors: INVALID_ARGUMENT (the member),
 * UNSUPPORTED (max_distance: a layer follows patterns whose RoPE is the caller's; heads[i].kinds:
 * another pattern in such a layer). */
typedef struct tandem_patterns {
  uint32_t struct_size;
  int32_t reserved;              /* 0 */
  const tandem_head_pattern *heads; /* the query heads of all layers, layer by layer, each with its
                                     * own struct_size (all equal) */
  int64_t n_heads;               /* query heads of all layers */
  int64_t max_distance;          /* between query and key, as RoPE sees it; 0: no limit */
} tandem_patterns;
#define TANDEM_PATTERNS_INIT \
  { sizeof(tandem_patterns), 0, NULL, 0, 0 }
TANDEM_API void tandem_head_pattern_init(tandem_head_pattern *pattern);
TANDEM_API void tandem_patterns_init(tandem_patterns *patterns);

/* How a file of head patterns is read. */
typedef struct tandem_pattern_file_options {
  uint32_t struct_size;
  int32_t reserved;      /* 0 */
  int64_t group_size;    /* query heads of a KV head, for files of gates; 0: 1 */
  double threshold;      /* gates from this on are of FULL heads; -1: the file's median */
  int64_t sink_tokens;   /* of the other heads; -1: 128 */
  int64_t window_tokens; /* likewise; -1: 256 */
} tandem_pattern_file_options;
#define TANDEM_PATTERN_FILE_OPTIONS_INIT \
  { sizeof(tandem_pattern_file_options), 0, 0, -1.0, -1, -1 }
TANDEM_API void tandem_pattern_file_options_init(tandem_pattern_file_options *options);

/* Reads a file of head patterns into heads[0 .. *n_heads), layer by layer; *n_layers: of the file.
 * Each of heads has its own struct_size (all equal). Writes heads only where capacity, in heads, is
 * at least *n_heads; so a call with capacity 0, whose heads may be NULL, asks how many there are.
 * Every layer has as many heads. Files are of two forms:
 *
 *   JSON    as MInference publishes them: a list of layers, each an object from the number of a
 *           query head to one of these lists, or to a list of several, whose patterns are united:
 *             ["vertical_and_slash", vertical_tokens, slash_tokens, score]    VERTICAL_SLASH
 *             ["stream_llm", sink_tokens, window_tokens, score]               A_SHAPE
 *             ["block_sparse", n_blocks, a number that is not read, score]    BLOCK_SPARSE
 *             ["full"]                                                        FULL
 *           The score is not read, and may be left out
 *   gates   as DuoAttention publishes them: a line of numbers for each layer, one for each KV head,
 *           with tabs or spaces between them. Heads whose gate is at least the threshold are FULL,
 *           the others A_SHAPE
 *
 * A file has at most 64 MiB; JSON has at most 4,096 layers and as many heads a layer, a file of
 * gates 2^24 heads in all.
 * options: NULL for the defaults. Errors: IO (path: it cannot be opened or read), INVALID_ARGUMENT
 * (path: the line or the layer and head that is wrong; a member of options). */
TANDEM_API int32_t tandem_patterns_read(tandem_head_pattern *heads, int64_t capacity,
                                        int64_t *n_heads, int64_t *n_layers, const char *path,
                                        const tandem_pattern_file_options *options,
                                        tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_PATTERNS_H_ */
