/* SPDX-License-Identifier: MIT
 * The smallest complete program: one layer, a cache of 4,096 tokens, one query that also appends its own key and value.
 * cc decode.c $(pkg-config --cflags --libs tandem) */
#include <stdio.h>
#include <tandem/tandem.h>

enum { kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kTokens = 4096, kMarked = 1234 };

static float q[kQHeads * kHeadDim], o[kQHeads * kHeadDim], k[kTokens * kKvHeads * kHeadDim],
    v[kTokens * kKvHeads * kHeadDim];

int main(void) {
  tandem_engine* engine = NULL;
  tandem_model* model = NULL;
  tandem_cache* cache = NULL;
  tandem_session* session = NULL;
  tandem_error* error = NULL;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor tensors[4]; /* q, o, k, v of one token; k and v start as those of the whole context */
  int64_t sequence = 0, q_len = 1, q_shape[3] = {1, kQHeads, kHeadDim}, kv_shape[3] = {kTokens, kKvHeads, kHeadDim};
  int i;

  /* Every key is 0 but that of one token, whose value is 1 and which the query looks for. */
  for (i = 0; i < kQHeads * kHeadDim; ++i) q[i] = 2;
  for (i = 0; i < kKvHeads * kHeadDim; ++i) k[kMarked * kKvHeads * kHeadDim + i] = v[kMarked * kKvHeads * kHeadDim + i] = 1;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kHeadDim;
  if (tandem_engine_create(&engine, NULL, &error) || tandem_model_create(&model, &layer, 1, &error) ||
      tandem_cache_create(&cache, engine, model, NULL, &error) || tandem_session_create(&session, cache, NULL, &error) ||
      tandem_sequence_create(&sequence, cache, &error) ||
      tandem_tensor_init(&tensors[0], TANDEM_F32, q, 3, q_shape, &error) ||
      tandem_tensor_init(&tensors[1], TANDEM_F32, o, 3, q_shape, &error) ||
      tandem_tensor_init(&tensors[2], TANDEM_F32, k, 3, kv_shape, &error) ||
      tandem_tensor_init(&tensors[3], TANDEM_F32, v, 3, kv_shape, &error) ||
      tandem_sequence_append(cache, sequence, 0, &tensors[2], &tensors[3], NULL, &error))
    goto done;

  tensors[2].shape[0] = tensors[3].shape[0] = 1; /* the new token */
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &tensors[0];
  args.o = &tensors[1];
  args.k = &tensors[2];
  args.v = &tensors[3];
  if (tandem_attend(session, &args, &error) == TANDEM_OK)
    printf("token %d of %d gets %.4f of the attention (e^16 / (e^16 + 4096) = 0.9995)\n", kMarked, kTokens, o[0]);

done:
  if (error) fprintf(stderr, "%s\n", tandem_error_message(error));
  i = error != NULL;
  tandem_error_release(error);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return i;
}
