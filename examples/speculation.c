/* SPDX-License-Identifier: MIT
 * Speculative decoding. Four guessed tokens are appended as a chain and attended in one call. Two of them are kept. The
 * sequence then has the same bytes as one to which only these two were appended.
 *
 *   cc speculation.c $(pkg-config --cflags --libs tandem) && ./a.out */
#include <inttypes.h>
#include <stdio.h>
#include <tandem/tandem.h>

enum { kQHeads = 8, kKvHeads = 2, kDim = 64, kPrompt = 1000, kGuesses = 4, kKept = 2, kTokens = kPrompt + kGuesses };

static float q[kTokens * kQHeads * kDim], o[kTokens * kQHeads * kDim];
static float k[kTokens * kKvHeads * kDim], v[kTokens * kKvHeads * kDim]; /* [tokens, n_kv_heads, head_dim] */

static void fill(float* x, size_t n) { /* from -0.5 to 0.5 */
  uint32_t state = 1;
  for (size_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    x[i] = (float)(state >> 8) / 16777216.0f - 0.5f;
  }
}

/* Appends tokens first to first + n_tokens - 1 of the arrays, and attends them. flags: TANDEM_ATTEND_... */
static int32_t append(tandem_session* session, int64_t sequence, int64_t first, int64_t n_tokens, uint32_t flags,
                      tandem_error** error) {
  const int64_t q_shape[3] = {n_tokens, kQHeads, kDim}, kv_shape[3] = {n_tokens, kKvHeads, kDim};
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor tq, to, tk, tv;
  int32_t status;
  if ((status = tandem_tensor_init(&tq, TANDEM_F32, q + first * kQHeads * kDim, 3, q_shape, error)) ||
      (status = tandem_tensor_init(&to, TANDEM_F32, o + first * kQHeads * kDim, 3, q_shape, error)) ||
      (status = tandem_tensor_init(&tk, TANDEM_F32, k + first * kKvHeads * kDim, 3, kv_shape, error)) ||
      (status = tandem_tensor_init(&tv, TANDEM_F32, v + first * kKvHeads * kDim, 3, kv_shape, error)))
    return status;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &n_tokens;
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.o = &to;
  args.flags = flags;
  return tandem_attend(session, &args, error); /* a model with more layers calls this for each of them */
}

int main(void) {
  tandem_engine* engine = NULL;
  tandem_model* model = NULL;
  tandem_cache* cache = NULL;
  tandem_session* session = NULL;
  tandem_error* error = NULL;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  int64_t guessed = 0, plain = 0, length = 0;
  const int64_t kept[kKept] = {0, 1}; /* indices of guesses, from 0: a chain that begins with the first guess */
  uint64_t digests[2] = {0, 1};
  int is_wrong = 1;

  fill(q, sizeof q / sizeof *q);
  fill(k, sizeof k / sizeof *k);
  fill(v, sizeof v / sizeof *v);
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  if (tandem_engine_create(&engine, NULL, &error) || tandem_model_create(&model, &layer, 1, &error) ||
      tandem_cache_create(&cache, engine, model, NULL, &error) || tandem_session_create(&session, cache, NULL, &error) ||
      tandem_sequence_create(&guessed, cache, &error) || tandem_sequence_create(&plain, cache, &error) ||
      /* The guesses stay apart: the length does not count them, and o has an output for each of them. The caller compares
       * what its model makes of these outputs with the guesses, and keeps those that were right. */
      append(session, guessed, 0, kPrompt, 0, &error) ||
      append(session, guessed, kPrompt, kGuesses, TANDEM_ATTEND_SPECULATIVE, &error) ||
      tandem_sequence_length(&length, cache, guessed, 0, &error))
    goto done;
  printf("%" PRId64 " tokens before the commit\n", length);
  if (tandem_session_commit(session, guessed, kept, kKept, &error) ||
      tandem_sequence_length(&length, cache, guessed, 0, &error) || append(session, plain, 0, kPrompt, 0, &error) ||
      append(session, plain, kPrompt, kKept, 0, &error) || tandem_sequence_digest(&digests[0], cache, guessed, &error) ||
      tandem_sequence_digest(&digests[1], cache, plain, &error))
    goto done;
  is_wrong = digests[0] != digests[1];
  printf("%" PRId64 " tokens after it, %s those of a sequence without guesses\n", length, is_wrong ? "not" : "equal to");

done:
  if (error) fprintf(stderr, "%s\n", tandem_error_message(error));
  tandem_error_release(error);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return is_wrong;
}
