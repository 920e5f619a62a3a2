/* SPDX-License-Identifier: MIT
 * The C side of overhead_bench.py: nanoseconds of tandem_attend(), one query of one token over 512 keys that are there, and
 * the same with a new key and value each time. Prints the outputs' sums and the best mean of a round for either.
 * cc overhead_bench.c -ltandem && ./a.out ROUNDS CALLS */
#include <stdio.h>
#include <stdlib.h>
#include <tandem/tandem.h>
#include <time.h>

enum { kQHeads = 8, kKvHeads = 2, kDim = 64, kKeys = 512 };
static float q[kQHeads * kDim], o[kQHeads * kDim], k[kKeys * kKvHeads * kDim], v[kKeys * kKvHeads * kDim];
static tandem_cache* cache;
static tandem_session* session;

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void ok(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) return;
  fprintf(stderr, "%s\n", tandem_error_message(error));
  exit(1);
}

static double best_call(int appends, int rounds, int calls) {
  int64_t q_len = 1, sequence, q_shape[3] = {1, kQHeads, kDim}, kv_shape[3] = {kKeys, kKvHeads, kDim};
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor tensors[4];
  tandem_error* error = NULL;
  double best = 1e30;
  int round, call;
  ok(tandem_tensor_init(&tensors[0], TANDEM_F32, q, 3, q_shape, &error), error);
  ok(tandem_tensor_init(&tensors[1], TANDEM_F32, o, 3, q_shape, &error), error);
  ok(tandem_tensor_init(&tensors[2], TANDEM_F32, k, 3, kv_shape, &error), error);
  ok(tandem_tensor_init(&tensors[3], TANDEM_F32, v, 3, kv_shape, &error), error);
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &tensors[0];
  args.o = &tensors[1];
  for (round = 0; round < rounds; ++round) {
    double start;
    tensors[2].shape[0] = tensors[3].shape[0] = kKeys;
    ok(tandem_sequence_create(&sequence, cache, &error), error);
    ok(tandem_sequence_append(cache, sequence, 0, &tensors[2], &tensors[3], NULL, &error), error);
    tensors[2].shape[0] = tensors[3].shape[0] = 1;
    if (appends) args.k = &tensors[2], args.v = &tensors[3];
    start = now_ns();
    for (call = 0; call < calls; ++call) ok(tandem_attend(session, &args, &error), error);
    start = (now_ns() - start) / calls;
    if (start < best) best = start;
    ok(tandem_sequence_drop(cache, sequence, &error), error);
  }
  return best;
}

int main(int argc, char** argv) {
  tandem_engine* engine = NULL;
  tandem_model* model = NULL;
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  tandem_error* error = NULL;
  double ns[2], sums[2] = {0, 0};
  int i, appends;
  if (argc != 3) return 2;
  for (i = 0; i < kQHeads * kDim; ++i) q[i] = (float)(i % 7) / 7.0f;
  for (i = 0; i < kKeys * kKvHeads * kDim; ++i) k[i] = (float)(i % 11) / 11.0f, v[i] = (float)(i % 13) / 13.0f;
  options.n_threads = 1;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  ok(tandem_engine_create(&engine, &options, &error), error);
  ok(tandem_model_create(&model, &layer, 1, &error), error);
  ok(tandem_cache_create(&cache, engine, model, NULL, &error), error);
  ok(tandem_session_create(&session, cache, NULL, &error), error);
  for (appends = 0; appends < 2; ++appends) {
    ns[appends] = best_call(appends, atoi(argv[1]), atoi(argv[2]));
    for (i = 0; i < kQHeads * kDim; ++i) sums[appends] += o[i];
  }
  printf("%.9g %.9g %.0f %.0f\n", sums[0], sums[1], ns[0], ns[1]);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return 0;
}
