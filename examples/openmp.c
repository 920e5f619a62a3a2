/* SPDX-License-Identifier: MIT
 * Calls Tandem between the program's own OpenMP loops, on OpenMP's threads ("lent") or on the library's ("own").
 * cc -O2 -fopenmp openmp.c $(pkg-config --cflags --libs tandem) -lm && ./a.out lent && ./a.out own */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tandem/tandem.h>

enum { kQHeads = 32, kKvHeads = 8, kDim = 128, kKeys = 8192, kCalls = 200 };

/* Lends OpenMP's threads (tandem_run_fn). No task waits for another, so fewer threads than tasks are enough. */
static void run(int64_t n_tasks, tandem_task_fn task, void* context, void* user) {
  (void)user;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < n_tasks; ++i) task(i, context);
}

/* The program's own work between two calls. */
static void own_loop(float* x, int64_t n) {
#pragma omp parallel for
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] * 0.5f + 1.0f;
}

static void check(int32_t status, const tandem_error* error) {
  if (status == TANDEM_OK) return;
  fprintf(stderr, "%s\n", tandem_error_message(error));
  exit(1);
}

int main(int argc, char** argv) {
  const int is_lent = argc > 1 && strcmp(argv[1], "lent") == 0;
  const int64_t n = 1 << 18, q_shape[3] = {1, kQHeads, kDim}, kv_shape[3] = {kKeys, kKvHeads, kDim}, q_len = 1;
  float* const own = calloc((size_t)n, sizeof(float));
  float* const keys = calloc((size_t)kKeys * kKvHeads * kDim, sizeof(float));
  float* const q = calloc(2 * (size_t)kQHeads * kDim, sizeof(float));
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor tq, to, tk;
  tandem_engine* engine;
  tandem_model* model;
  tandem_cache* cache;
  tandem_session* session;
  tandem_error* error = NULL;
  int64_t sequence;
  double seconds = 0;
  if (own == NULL || keys == NULL || q == NULL) return 1;
  options.n_threads = omp_get_max_threads();
  if (is_lent) options.run = run;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  check(tandem_engine_create(&engine, &options, &error), error);
  check(tandem_model_create(&model, &layer, 1, &error), error);
  check(tandem_cache_create(&cache, engine, model, NULL, &error), error);
  check(tandem_session_create(&session, cache, NULL, &error), error);
  check(tandem_sequence_create(&sequence, cache, &error), error);
  check(tandem_tensor_init(&tq, TANDEM_F32, q, 3, q_shape, &error), error);
  check(tandem_tensor_init(&to, TANDEM_F32, q + kQHeads * kDim, 3, q_shape, &error), error);
  check(tandem_tensor_init(&tk, TANDEM_F32, keys, 3, kv_shape, &error), error);
  check(tandem_sequence_append(cache, sequence, 0, &tk, &tk, NULL, &error), error);
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &tq;
  args.o = &to;
  for (int i = 0; i < kCalls; ++i) {
    own_loop(own, n);
    const double begin = omp_get_wtime();
    check(tandem_attend(session, &args, &error), error);
    if (i >= kCalls / 4) seconds += omp_get_wtime() - begin;
  }
  printf("threads %s: a call over %d keys takes %.3f ms between loops of OpenMP\n", is_lent ? "of OpenMP" : "of the library",
         kKeys, seconds * 1e3 / (kCalls - kCalls / 4));
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  free(own);
  free(keys);
  free(q);
  return 0;
}
