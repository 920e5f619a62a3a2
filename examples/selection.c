/* SPDX-License-Identifier: MIT
 * A small indexer. It keeps the mean of the keys of each unit of 64 tokens. A query attends the units whose mean has the
 * largest product with the query, and the newest unit. The output is compared with attention over all keys.
 *
 *   cc selection.c $(pkg-config --cflags --libs tandem) -lm && ./a.out */
#include <math.h>
#include <stdio.h>
#include <tandem/tandem.h>

enum { kQHeads = 8, kKvHeads = 2, kDim = 64, kTokens = 4096, kUnit = 64, kUnits = kTokens / kUnit, kChosen = 8 };

static float q[kQHeads * kDim], dense[kQHeads * kDim], sparse[kQHeads * kDim];
static float k[kTokens * kKvHeads * kDim], v[kTokens * kKvHeads * kDim];
static float means[kUnits][kKvHeads][kDim];
static int32_t idx[kKvHeads][kChosen]; /* one query's indices: [n_tokens = 1, n_kv_heads, n_idx] */

static float noise(void) { /* from -0.5 to 0.5 */
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 16777216.0f - 0.5f;
}

/* Makes keys of noise. Only those of three units also point in the query's direction. */
static void make_rows(void) {
  for (int i = 0; i < kQHeads * kDim; ++i) q[i] = 1.0f;
  for (int t = 0; t < kTokens; ++t)
    for (int i = 0; i < kKvHeads * kDim; ++i) {
      const int unit = t / kUnit, is_strong = unit == 5 || unit == 20 || unit == 41;
      k[t * kKvHeads * kDim + i] = noise() + (is_strong ? 1.0f : 0.0f);
      v[t * kKvHeads * kDim + i] = noise() + (is_strong ? 1.0f : 0.0f);
      means[unit][i / kDim][i % kDim] += k[t * kKvHeads * kDim + i] / kUnit;
    }
}

static float score(int unit, int kv_head) { /* the query heads of a KV head share one choice */
  float sum = 0;
  for (int h = kv_head * kQHeads / kKvHeads; h < (kv_head + 1) * kQHeads / kKvHeads; ++h)
    for (int d = 0; d < kDim; ++d) sum += q[h * kDim + d] * means[unit][kv_head][d];
  return sum;
}

/* Chooses the newest unit and the best other units. Their indices ascend. */
static void choose(int kv_head) {
  int is_chosen[kUnits] = {0}, n = 0;
  is_chosen[kUnits - 1] = 1;
  for (int i = 1; i < kChosen; ++i) {
    int best = -1;
    for (int u = 0; u < kUnits; ++u)
      if (!is_chosen[u] && (best < 0 || score(u, kv_head) > score(best, kv_head))) best = u;
    is_chosen[best] = 1;
  }
  for (int u = 0; u < kUnits; ++u)
    if (is_chosen[u]) idx[kv_head][n++] = u;
}

int main(void) {
  tandem_engine* engine = NULL;
  tandem_model* model = NULL;
  tandem_cache* cache = NULL;
  tandem_session* session = NULL;
  tandem_error* error = NULL;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  tandem_tensor tq, tdense, tsparse, tk, tv, tidx;
  int64_t sequence = 0, q_len = 1;
  const int64_t q_shape[3] = {1, kQHeads, kDim}, kv_shape[3] = {kTokens, kKvHeads, kDim},
                idx_shape[3] = {1, kKvHeads, kChosen};
  float most = 0;

  make_rows();
  for (int h = 0; h < kKvHeads; ++h) choose(h);
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &tq;
  args.o = &tdense;
  selection.unit_tokens = kUnit;
  selection.idx = &tidx;
  if (tandem_engine_create(&engine, NULL, &error) || tandem_model_create(&model, &layer, 1, &error) ||
      tandem_cache_create(&cache, engine, model, NULL, &error) || tandem_session_create(&session, cache, NULL, &error) ||
      tandem_sequence_create(&sequence, cache, &error) || tandem_tensor_init(&tq, TANDEM_F32, q, 3, q_shape, &error) ||
      tandem_tensor_init(&tdense, TANDEM_F32, dense, 3, q_shape, &error) ||
      tandem_tensor_init(&tsparse, TANDEM_F32, sparse, 3, q_shape, &error) ||
      tandem_tensor_init(&tk, TANDEM_F32, k, 3, kv_shape, &error) ||
      tandem_tensor_init(&tv, TANDEM_F32, v, 3, kv_shape, &error) ||
      tandem_tensor_init(&tidx, TANDEM_I32, idx, 3, idx_shape, &error) ||
      tandem_sequence_append(cache, sequence, 0, &tk, &tv, NULL, &error) || tandem_attend(session, &args, &error))
    goto done;
  args.o = &tsparse;
  args.selection = &selection;
  if (tandem_attend(session, &args, &error)) goto done;
  for (int i = 0; i < kQHeads * kDim; ++i) most = fmaxf(most, fabsf(dense[i] - sparse[i]));
  printf("%d of %d tokens attended; the largest difference from attention over all keys is %.4f\n", kChosen * kUnit, kTokens,
         most);

done:
  if (error) fprintf(stderr, "%s\n", tandem_error_message(error));
  q_len = error != NULL;
  tandem_error_release(error);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return (int)q_len;
}
