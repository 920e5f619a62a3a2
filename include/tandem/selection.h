/* SPDX-License-Identifier: MIT
 *
 * The keys that a call's queries attend, named by the caller. Part of tandem.h, which says what
 * holds for every function. */
#ifndef TANDEM_SELECTION_H_
#define TANDEM_SELECTION_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_SELECTION_ANY_ORDER 1u   /* indices of a row may stand in any order: the library
                                         * sorts a copy of each row */
#define TANDEM_SELECTION_PLUS_WINDOW 2u /* beside the named keys those of policy "streaming", each
                                         * key once: sink_tokens and the window_tokens newest up to
                                         * the query */

/* The keys that each query attends, named by the caller: for models with an indexer of their own,
 * whose attention over these keys alone is exact. idx is TANDEM_I32 [n_tokens, n_kv_heads, n_idx],
 * or [n_tokens, 1, n_idx] where all KV heads attend the same keys. Index i names the tokens i *
 * unit_tokens to (i + 1) * unit_tokens - 1 of the query's sequence, counted as
 * tandem_sequence_read() counts them after this call's append. A query attends those of them that
 * it could see without a selection: none behind its own token, in a layer with a sliding window
 * none before that, of speculative tokens its own ancestors. Its own token is attended where it is
 * named. Indices ascend, and -1 fills the rest of a row. A row of -1 attends no key: o = 0 and lse
 * = -inf, but for a learned sink, which counts as always.
 *
 * Calls on device tensors: keys in the window are attended there, the others by the CPU, whatever
 * the route. Groups of more than 64 query heads to a KV head are UNSUPPORTED. Appends of more than
 * 512 tokens with units of 64 tokens and more, without PLUS_WINDOW, go in long chunks
 * (append_tokens): under routes "auto" and "stream" the units outside the window that any query of
 * a chunk names cross the bus, once a chunk, and the device attends them.
 *   - Indices in host memory are checked before anything is done, as with host tensors. So are
 *     those in device memory with ANY_ORDER, and those of such an append: they come to the host
 *     first, and the call waits for the stream.
 *   - Other indices in device memory are read in the stream's order, with no wait. A row of them
 *     that does not ascend, repeats an index or names a token behind the query's own gives o and
 *     lse of NaN for the query, in the KV heads whose row it is; tokens that the call has appended
 *     stay. The session tells it once: the next call on device tensors outside a step, or the next
 *     tandem_step_begin() with a stream, does nothing and returns INVALID_ARGUMENT (selection.idx)
 *     with row, head, place and value of the first wrong index.
 *   - In steps that were begun on a stream indices are in device memory, ascend and are at most the
 *     session's selection_indices, and each sequence has one query. A graph may be replayed with
 *     other indices in the same memory. Once a step has been captured, calls that name more keys
 *     than any before are CAPACITY. */
typedef struct tandem_selection {
  uint32_t struct_size;
  uint32_t flags;           /* TANDEM_SELECTION_* */
  int64_t unit_tokens;      /* a power of two from 1 to 256; 0: 1 */
  const tandem_tensor *idx; /* in host memory, read until the call returns; or, of a call on device
                             * tensors, in device memory */
} tandem_selection;
#define TANDEM_SELECTION_INIT \
  { sizeof(tandem_selection), 0, 0, NULL }
TANDEM_API void tandem_selection_init(tandem_selection *selection);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_SELECTION_H_ */
