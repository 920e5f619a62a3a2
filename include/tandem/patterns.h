/* SPDX-License-Identifier: MIT
 *
 * Head patterns: which keys the queries of an append attend, query head by query head. Options of
 * the policy "patterns". Part of tandem.h, which says what holds for every function.
 *
 * A call with several queries of a sequence appends a prompt, or a part of one. Its queries are
 * taken in blocks of TANDEM_PATTERN_BLOCK, and the blocks in chunks of TANDEM_PATTERN_CHUNK
 * queries. Both are counted from the sequence's first query in the call. In one query head all
 * queries of a block attend the same keys: all keys that the head's patterns name. No query attends
 * keys after its own token. Keys are named in units of TANDEM_PATTERN_UNIT tokens, which begin at
 * multiples of that number. So 13 sinks become 16. Only windows begin at their exact token. The
 * tokens from a block's first query on are always named.
 *
 *   A_SHAPE         the first sink_tokens tokens, rounded up to units, and the window, which begins
 *                   window_tokens - 1 tokens before the block's first query
 *   VERTICAL_SLASH  columns and diagonals, chosen for each chunk by the attention weights of its
 *                   last 64 queries. A column is a token: the vertical_tokens with the largest sums
 *                   of weights are named. A diagonal is a distance between query and key. Diagonals
 *                   are taken in bands of 16 that begin at multiples of 16. The bands with the
 *                   largest sums are named, slash_tokens diagonals in all, rounded up to bands. The
 *                   first band is always one of them
 *   BLOCK_SPARSE    blocks of 64 tokens, at multiples of 64, that end before the query block's
 *                   first query: the n_blocks of them whose mean logit with the mean of the query
 *                   block is largest. Also the tokens between the last block of 64 that ends there
 *                   and the query
 *   FULL            all tokens. A head without patterns is FULL
 *
 * Of equal sums the lower token, band or block is named. (MInference, arXiv 2407.02490, names these
 * patterns; FlexAttn unites several for one head.)
 *
 * Calls with one query of a sequence, and guesses (SPECULATIVE), use only A_SHAPE. A KV head whose
 * query heads all have the pattern A_SHAPE and no other attends sinks and a window: the most sinks,
 * rounded up to units, and the longest window that any of these query heads has. Other KV heads
 * attend all keys. Layers with a sliding window attend their whole window. Trees of speculative
 * tokens are UNSUPPORTED (parent_idx).
 *
 * On device tensors guesses and learned sinks are UNSUPPORTED, too (flags, q.device_type). A chunk
 * may have fewer blocks there (append_tokens), and tandem_session_selection() does not tell which
 * keys a head has chosen. If the session's window lacks keys, an append brings those of its layer
 * to the device, into memory that the session keeps for two layers. In decode calls the CPU attends
 * such keys. The window must have all keys where the library rotates keys, and in calls of several
 * queries without new tokens (CAPACITY, window_tokens). */
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

/* The patterns of one query head. Sizes of a pattern that the head does not have are 0. */
typedef struct tandem_head_pattern {
  uint32_t struct_size;
  uint32_t kinds;          /* TANDEM_PATTERN_*; the head attends the keys of all of them; 0: FULL */
  int64_t sink_tokens;     /* A_SHAPE */
  int64_t window_tokens;   /* A_SHAPE, 1 or more */
  int64_t vertical_tokens; /* VERTICAL_SLASH */
  int64_t slash_tokens;    /* VERTICAL_SLASH */
  int64_t n_blocks;        /* BLOCK_SPARSE */
} tandem_head_pattern;
#define TANDEM_HEAD_PATTERN_INIT \
  { sizeof(tandem_head_pattern), 0, 0, 0, 0, 0, 0 }

/* Read when the session is created. max_distance is for models that get longer texts than they were
 * trained for (LM-Infinite, NAACL 2024). A key whose position is further than that from its query's
 * is attended as if it were max_distance before the query. This needs library RoPE in all layers
 * that follow patterns, and heads with the pattern A_SHAPE and no other. On device tensors it is
 * UNSUPPORTED (q.device_type). Errors: INVALID_ARGUMENT (the member), UNSUPPORTED (max_distance: in
 * a layer that follows patterns the caller applies RoPE; heads[i].kinds: another pattern in such a
 * layer). */
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
  double threshold;      /* heads with a gate of at least this are FULL; -1: the file's median */
  int64_t sink_tokens;   /* sinks of the other heads; -1: 128 */
  int64_t window_tokens; /* window of the other heads; -1: 256 */
} tandem_pattern_file_options;
#define TANDEM_PATTERN_FILE_OPTIONS_INIT \
  { sizeof(tandem_pattern_file_options), 0, 0, -1.0, -1, -1 }
TANDEM_API void tandem_pattern_file_options_init(tandem_pattern_file_options *options);

/* Reads a file of head patterns into heads[0 .. *n_heads), layer by layer. *n_heads and *n_layers
 * get the file's numbers. Each of heads has its own struct_size (all equal). Writes heads only if
 * capacity, in heads, is at least *n_heads. So a call with capacity 0, whose heads may be NULL,
 * asks how many there are. All layers have the same number of heads. Files have two forms:
 *
 *   JSON    as MInference publishes them: a list of layers. Each is an object from the number of a
 *           query head to one of these lists, or to a list of several whose keys are united:
 *             ["vertical_and_slash", vertical_tokens, slash_tokens, score]    VERTICAL_SLASH
 *             ["stream_llm", sink_tokens, window_tokens, score]               A_SHAPE
 *             ["block_sparse", n_blocks, a number that is not read, score]    BLOCK_SPARSE
 *             ["full"]                                                        FULL
 *           The score is not read, and may be left out
 *   gates   as DuoAttention publishes them: a line of numbers for each layer, one number for a KV
 *           head, tabs or spaces between. Heads whose gate is at least the threshold are FULL,
 *           the others A_SHAPE
 *
 * A file has at most 64 MiB. JSON has at most 4,096 layers, and 4,096 heads in a layer. A file of
 * gates has at most 2^24 heads in all.
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
