/* SPDX-License-Identifier: MIT.  cc smallest.c $(pkg-config --cflags --libs tandem) && ./a.out */
#include <stdio.h>
#include <tandem/tandem.h>
static float q[8 * 64], o[8 * 64], k[4096 * 2 * 64], v[4096 * 2 * 64]; /* 8 query heads and 2 KV heads of 64; 4,096 tokens */

int main(void) {
  tandem_engine* engine;
  tandem_model* model;
  tandem_cache* cache;
  tandem_session* session; /* handles may be released in any order; here the end of the process does it */
  tandem_error* error;
  tandem_tensor tq, to, tk, tv;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  int64_t sequence, q_len = 1, q_shape[3] = {1, 8, 64}, kv_shape[3] = {4096, 2, 64};
  for (int i = 0; i < 8 * 64; ++i) q[i] = 2; /* every key is 0 but that of token 1,234, whose value is 1 */
  for (int i = 0; i < 2 * 64; ++i) k[1234 * 2 * 64 + i] = v[1234 * 2 * 64 + i] = 1;
  layer.n_q_heads = 8, layer.n_kv_heads = 2, layer.k_head_dim = 64;
  args.n_sequences = 1, args.sequences = &sequence, args.q_lens = &q_len, args.q = &tq, args.o = &to;
  if (tandem_engine_create(&engine, NULL, &error) || tandem_model_create(&model, &layer, 1, &error) ||
      tandem_cache_create(&cache, engine, model, NULL, &error) || tandem_session_create(&session, cache, NULL, &error) ||
      tandem_sequence_create(&sequence, cache, &error) || tandem_tensor_init(&tq, TANDEM_F32, q, 3, q_shape, &error) ||
      tandem_tensor_init(&to, TANDEM_F32, o, 3, q_shape, &error) ||
      tandem_tensor_init(&tk, TANDEM_F32, k, 3, kv_shape, &error) ||
      tandem_tensor_init(&tv, TANDEM_F32, v, 3, kv_shape, &error) ||
      tandem_sequence_append(cache, sequence, 0, &tk, &tv, NULL, &error) || tandem_attend(session, &args, &error))
    return fprintf(stderr, "%s\n", tandem_error_message(error)), 1;
  return printf("token 1234 of 4096 gets %.4f of the attention\n", o[0]) < 0;
}
