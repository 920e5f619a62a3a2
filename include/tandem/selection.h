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

#define TANDEM_SELECTION_ANY_ORDER 1u   /* indices of a row may have any order: the library sorts a
                                         * copy of each row */
#define TANDEM_SELECTION_PLUS_WINDOW 2u /* the query also attends the keys of policy "streaming":
                                         * the first sink_tokens and the newest window_tokens up to
                                         * the query. Each key counts once */

/* Keys that the caller names for each query. For models with an indexer of their own, whose
 * attention over these keys alone is exact. idx is TANDEM_I32 [n_tokens, n_kv_heads, n_idx], or
 * [n_tokens, 1, n_idx] if all KV heads attend the same keys. Index i names the tokens i *
 * unit_tokens to (i + 1) * unit_tokens - 1 of the query's sequence. Tokens are counted as in
 * tandem_sequence_read() after this call's append. A query attends only named tokens that it could
 * see without a selection: none after its own token, none before the sliding window of its layer,
 * and only its own ancestors among speculative tokens. Its own token is attended only if it is
 * named. Indices ascend, and -1 fills the rest of a row. A row of only -1 attends no key: o = 0 and
 * lse = -inf, except that a learned sink counts as always.
 *
 * In calls on device tensors the device attends the named keys inside the window, and the CPU the
 * others, whatever the route. Groups of more than 64 query heads to a KV head are UNSUPPORTED. Some
 * appends go in long chunks (append_tokens): those of more than 512 tokens with units of 64 tokens
 * or more and without PLUS_WINDOW. Under routes "auto" and "stream" the units outside the window
 * that any query of a chunk names then cross the bus, once a chunk, and the device attends them.
 *   - Indices in host memory are checked before anything is done, as with host tensors. Indices in
 *     device memory are checked so, too, if they have ANY_ORDER or belong to an append in long
 *     chunks: they come to the host first, and the call waits for the stream.
 *   - Other indices in device memory are read in the stream's order, without a wait. A row is wrong
 *     if it does not ascend, repeats an index or names a token after the query's own. A wrong row
 *     gives o and lse of NaN for its query and KV heads; tokens that the call has appended stay.
 *     The session reports it once: the next call on device tensors outside a step, or the next
 *     tandem_step_begin() with a stream, does nothing and returns INVALID_ARGUMENT (selection.idx)
 *     with row, head, place and value of the first wrong index.
 *   - In steps that were begun on a stream, indices are in device memory, ascend, and are at most
 *     selection_indices of the session. Each sequence has one query. A graph may be replayed with
 *     other indices in the same memory. Once a step has been captured, calls that name more keys
 *     than any call before are CAPACITY. */
typedef struct tandem_selection {
  uint32_t struct_size;
  uint32_t flags;           /* TANDEM_SELECTION_* */
  int64_t unit_tokens;      /* a power of two from 1 to 256; 0: 1 */
  const tandem_tensor *idx; /* in host memory, read until the call returns; a call on device tensors
                             * also takes indices in device memory */
} tandem_selection;
#define TANDEM_SELECTION_INIT \
  { sizeof(tandem_selection), 0, 0, NULL }
TANDEM_API void tandem_selection_init(tandem_selection *selection);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_SELECTION_H_ */
