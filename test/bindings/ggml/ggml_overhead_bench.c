/* SPDX-License-Identifier: MIT
 * What a node costs beside the call from C: decode steps of one layer from `keys` keys on, the same session, in turns over two
 * sequences of the same content; the last outputs of a round are compared bit by bit. Prints the medians of the rounds in microseconds.
 *
 *   ggml_overhead_bench [keys] [threads of ggml and of Tandem] [rounds] [calls] [query heads]
 *
 * With more than one thread the node stands behind a product that all of ggml's threads compute, as in a model, and the call
 * from C behind a graph with that product alone. */
#include <ggml-cpu.h>
#include <time.h>

#include "tandem-ggml.h"

enum { kDim = 64, kProduct = 256 };

static int n_keys = 512, n_threads = 1, n_rounds = 21, n_calls = 2000, n_q_heads = 8, n_kv_heads;
static tandem_cache* cache;
static tandem_session* session;
static int64_t sequences[2]; /* the call's and the node's, of the same content */
static tandem_ggml* state;
static struct ggml_context* ctx;
static struct ggml_tensor* q;
static tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static void ok(int32_t status, tandem_error* error) {
  if (status == TANDEM_OK) return;
  fprintf(stderr, "%s\n", tandem_error_message(error));
  exit(1);
}

static void open_world(void) {
  tandem_engine* engine = NULL;
  tandem_model* model = NULL;
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  tandem_ggml_options ggml_options;
  tandem_error* error = NULL;
  const char* why = NULL;
  options.n_threads = n_threads;
  layer.n_q_heads = n_q_heads;
  layer.n_kv_heads = n_kv_heads = n_q_heads / 4;
  layer.k_head_dim = kDim;
  ok(tandem_engine_create(&engine, &options, &error), error);
  ok(tandem_model_create(&model, &layer, 1, &error), error);
  ok(tandem_cache_create(&cache, engine, model, NULL, &error), error);
  ok(tandem_session_create(&session, cache, NULL, &error), error);
  memset(&ggml_options, 0, sizeof ggml_options);
  ggml_options.cache = cache;
  ggml_options.session = session;
  ggml_options.layers = &layer;
  ggml_options.sequences = &sequences[1];
  ggml_options.n_layers = ggml_options.n_sequences = 1;
  if (tandem_ggml_create(&state, &ggml_options, &why) != TANDEM_OK) exit(1);
  tandem_engine_release(engine);
  tandem_model_release(model);
}

static void fill(float* values, int64_t n, int of) {
  int64_t i;
  for (i = 0; i < n; ++i) values[i] = (float)(i * 7919 % of) / (float)of;
}

static void append_keys(void) {
  const int64_t shape[3] = {n_keys, n_kv_heads, kDim}, n = shape[0] * shape[1] * shape[2];
  float *k = malloc((size_t)n * sizeof *k), *v = malloc((size_t)n * sizeof *v);
  tandem_tensor views[2];
  tandem_error* error = NULL;
  fill(k, n, 11);
  fill(v, n, 13);
  ok(tandem_tensor_init(&views[0], TANDEM_F32, k, 3, shape, &error), error);
  ok(tandem_tensor_init(&views[1], TANDEM_F32, v, 3, shape, &error), error);
  ok(tandem_sequence_create(&sequences[0], cache, &error), error);
  ok(tandem_sequence_append(cache, sequences[0], 0, &views[0], &views[1], NULL, &error), error);
  ok(tandem_sequence_fork(&sequences[1], cache, sequences[0], &error), error);
  free(k);
  free(v);
}

static struct ggml_tensor* product(void) {
  struct ggml_tensor *a = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kProduct, kProduct),
                     *b = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kProduct, 1);
  fill(a->data, kProduct * kProduct, 17);
  fill(b->data, kProduct, 19);
  return ggml_mul_mat(ctx, a, b);
}

typedef struct Graph {
  struct ggml_cgraph* graph;
  struct ggml_cplan plan;
} Graph;

/* Nodes are NULL where they are not wanted. */
static Graph graph_of(struct ggml_tensor* first, struct ggml_tensor* second, struct ggml_threadpool* pool) {
  Graph made;
  made.graph = ggml_new_graph(ctx);
  if (first != NULL) ggml_build_forward_expand(made.graph, first);
  if (second != NULL) ggml_build_forward_expand(made.graph, second);
  made.plan = ggml_graph_plan(made.graph, n_threads, pool);
  made.plan.work_data = malloc(made.plan.work_size + 64);
  return made;
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  int* const numbers[5] = {&n_keys, &n_threads, &n_rounds, &n_calls, &n_q_heads};
  double times[2][999];
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor views[4];
  tandem_error* error = NULL;
  struct ggml_threadpool_params pool_params;
  struct ggml_init_params memory;
  tandem_ggml_batch batch;
  Graph with, without;
  struct ggml_tensor *node, *first, *k, *v;
  float* o;
  int64_t q_len = 1, shape[3] = {1, 0, kDim};
  int i, round, call;
  for (i = 0; i < 5 && i + 1 < argc; ++i) *numbers[i] = atoi(argv[i + 1]);
  if (n_keys < 1 || n_threads < 1 || n_rounds < 1 || n_rounds > 999 || n_calls < 1 || n_q_heads % 4 != 0) return 2;
  memory.mem_size = (size_t)64 << 20, memory.mem_buffer = NULL, memory.no_alloc = false;
  ctx = ggml_init(memory);
  ggml_threadpool_params_init(&pool_params, n_threads);
  open_world();
  append_keys();

  shape[1] = n_q_heads;
  q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kDim, n_q_heads, 1);
  fill(q->data, ggml_nelements(q), 7);
  o = calloc((size_t)ggml_nelements(q), sizeof *o);
  first = n_threads > 1 ? product() : NULL;
  k = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kDim, n_kv_heads, 1);
  v = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kDim, n_kv_heads, 1);
  fill(k->data, ggml_nelements(k), 5);
  fill(v->data, ggml_nelements(v), 3);
  node = tandem_ggml_attend(ctx, state, 0, q, k, v);
  {
    struct ggml_threadpool* pool = ggml_threadpool_new(&pool_params);
    with = graph_of(first, node, pool);
    without = graph_of(first, NULL, pool);
  }
  ok(tandem_tensor_init(&views[0], TANDEM_F32, q->data, 3, shape, &error), error);
  ok(tandem_tensor_init(&views[1], TANDEM_F32, o, 3, shape, &error), error);
  shape[1] = n_kv_heads;
  ok(tandem_tensor_init(&views[2], TANDEM_F32, k->data, 3, shape, &error), error);
  ok(tandem_tensor_init(&views[3], TANDEM_F32, v->data, 3, shape, &error), error);
  args.k = &views[2];
  args.v = &views[3];
  args.n_sequences = 1;
  args.sequences = sequences;
  args.q_lens = &q_len;
  args.q = &views[0];
  args.o = &views[1];
  memset(&batch, 0, sizeof batch);
  batch.n_tokens = 1;

  for (round = 0; round < n_rounds; ++round) {
    double begin = now_us();
    for (call = 0; call < n_calls; ++call) {
      if (first != NULL) ggml_graph_compute(without.graph, &without.plan);
      ok(tandem_step_begin(session, args.sequences, &q_len, 1, NULL, &error), error);
      ok(tandem_attend(session, &args, &error), error);
      ok(tandem_step_end(session, NULL, &error), error);
    }
    times[0][round] = (now_us() - begin) / n_calls;
    begin = now_us();
    for (call = 0; call < n_calls; ++call) {
      tandem_ggml_begin(state, &batch);
      ggml_graph_compute(with.graph, &with.plan);
      tandem_ggml_end(state);
    }
    times[1][round] = (now_us() - begin) / n_calls;
    if (tandem_ggml_status(state) != TANDEM_OK || memcmp(node->data, o, ggml_nbytes(node)) != 0) {
      fprintf(stderr, "the node's output is not the call's: %s\n", tandem_ggml_message(state));
      return 1;
    }
    for (i = 0; i < 2; ++i) ok(tandem_sequence_truncate(cache, sequences[i], n_keys, &error), error);
  }
  for (i = 0; i < 2; ++i) qsort(times[i], (size_t)n_rounds, sizeof(double), compare);
  printf("%d keys, %d threads: call %.2f us, node %.2f us, difference %.2f us\n", n_keys, n_threads, times[0][n_rounds / 2],
         times[1][n_rounds / 2], times[1][n_rounds / 2] - times[0][n_rounds / 2]);
  return 0;
}
