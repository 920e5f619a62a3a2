/* SPDX-License-Identifier: MIT
 * The cost of a node compared with the call from C: decode steps of one layer from `keys` keys on, in one session, in turns
 * over two sequences of the same content. The last outputs of a round are compared bit by bit. Prints the medians of the
 * rounds.
 *
 *   ggml_overhead_bench [keys] [threads of ggml and of Tandem] [rounds] [calls] [query heads] [product] [spin_ns]
 *
 * product: rows and columns of a matrix whose product all of ggml's threads compute before the node, as in a model. The call
 * from C then comes after a graph with that product alone. spin_ns: as in tandem_engine_options. */
#include <ggml-cpu.h>
#include <time.h>

#include "tandem-ggml.h"

enum { kDim = 64, kMostRounds = 999 };

static int n_keys = 512, n_threads = 1, n_rounds = 21, n_calls = 2000, n_q_heads = 8, product_size = 0, spin_ns = -1,
           n_kv_heads;
static tandem_engine* engine;
static tandem_model* model;
static tandem_cache* cache;
static tandem_session* session;
static int64_t sequences[2]; /* the call's and the node's */
static tandem_ggml* state;
static struct ggml_context* ctx;

typedef struct Graph {
  struct ggml_cgraph* graph;
  struct ggml_cplan plan;
} Graph;

/* Tensors of a step, for both ways. The step appends k and v of one token. */
static struct ggml_tensor *q, *k, *v, *node, *product;
static float* o;
static Graph with_node, without_node;

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

static void fill(float* values, int64_t n, int of) {
  int64_t i;
  for (i = 0; i < n; ++i) values[i] = (float)(i * 7919 % of) / (float)of;
}

static void open_world(void) {
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  tandem_ggml_options ggml_options;
  tandem_error* error = NULL;
  options.n_threads = n_threads;
  options.spin_ns = spin_ns;
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
  if (tandem_ggml_create(&state, &ggml_options, NULL) != TANDEM_OK) exit(1);
}

static void append_keys(void) {
  const int64_t shape[3] = {n_keys, n_kv_heads, kDim}, n = shape[0] * shape[1] * shape[2];
  float *keys = malloc((size_t)n * sizeof *keys), *values = malloc((size_t)n * sizeof *values);
  tandem_tensor views[2];
  tandem_error* error = NULL;
  fill(keys, n, 11);
  fill(values, n, 13);
  ok(tandem_tensor_init(&views[0], TANDEM_F32, keys, 3, shape, &error), error);
  ok(tandem_tensor_init(&views[1], TANDEM_F32, values, 3, shape, &error), error);
  ok(tandem_sequence_create(&sequences[0], cache, &error), error);
  ok(tandem_sequence_append(cache, sequences[0], 0, &views[0], &views[1], NULL, &error), error);
  ok(tandem_sequence_fork(&sequences[1], cache, sequences[0], &error), error);
  free(keys);
  free(values);
}

static struct ggml_tensor* filled(int64_t first, int64_t second, int of) {
  struct ggml_tensor* tensor = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, first, second, 1);
  fill(tensor->data, ggml_nelements(tensor), of);
  return tensor;
}

static Graph graph_of(struct ggml_tensor* last, struct ggml_threadpool* pool) {
  Graph made;
  made.graph = ggml_new_graph(ctx);
  if (product != NULL) ggml_build_forward_expand(made.graph, product);
  if (last != NULL) ggml_build_forward_expand(made.graph, last);
  made.plan = ggml_graph_plan(made.graph, n_threads, pool);
  made.plan.work_data = malloc(made.plan.work_size + 1);
  return made;
}

static void make_graphs(struct ggml_threadpool* pool) {
  q = filled(kDim, n_q_heads, 7);
  k = filled(kDim, n_kv_heads, 5);
  v = filled(kDim, n_kv_heads, 3);
  o = calloc((size_t)ggml_nelements(q), sizeof *o);
  if (product_size > 0) product = ggml_mul_mat(ctx, filled(product_size, product_size, 17), filled(product_size, 1, 19));
  node = tandem_ggml_attend(ctx, state, 0, q, k, v);
  with_node = graph_of(node, pool);
  without_node = graph_of(NULL, pool);
}

static void call_from_c(void) {
  const int64_t q_shape[3] = {1, n_q_heads, kDim}, kv_shape[3] = {1, n_kv_heads, kDim}, q_len = 1;
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor views[4];
  tandem_error* error = NULL;
  if (product != NULL) ggml_graph_compute(without_node.graph, &without_node.plan);
  ok(tandem_tensor_init(&views[0], TANDEM_F32, q->data, 3, q_shape, &error), error);
  ok(tandem_tensor_init(&views[1], TANDEM_F32, k->data, 3, kv_shape, &error), error);
  ok(tandem_tensor_init(&views[2], TANDEM_F32, v->data, 3, kv_shape, &error), error);
  ok(tandem_tensor_init(&views[3], TANDEM_F32, o, 3, q_shape, &error), error);
  args.n_sequences = 1;
  args.sequences = &sequences[0];
  args.q_lens = &q_len;
  args.q = &views[0];
  args.k = &views[1];
  args.v = &views[2];
  args.o = &views[3];
  ok(tandem_attend(session, &args, &error), error);
}

static void compute_node(void) {
  static const tandem_ggml_batch batch = {1, 0, NULL, NULL, NULL, NULL};
  if (tandem_ggml_begin(state, &batch) == TANDEM_OK) {
    ggml_graph_compute(with_node.graph, &with_node.plan);
    tandem_ggml_end(state);
  }
  if (tandem_ggml_status(state) == TANDEM_OK) return;
  fprintf(stderr, "%s\n", tandem_ggml_message(state));
  exit(1);
}

/* Returns the microseconds of one step. */
static double time_of(void (*step)(void)) {
  const double begin = now_us();
  int call;
  for (call = 0; call < n_calls; ++call) step();
  return (now_us() - begin) / n_calls;
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void measure(void) {
  static double times[2][kMostRounds];
  tandem_error* error = NULL;
  int i, round;
  for (round = 0; round < n_rounds; ++round) {
    times[0][round] = time_of(call_from_c);
    times[1][round] = time_of(compute_node);
    if (memcmp(node->data, o, ggml_nbytes(node)) != 0) {
      fprintf(stderr, "the node's output is not the call's\n");
      exit(1);
    }
    for (i = 0; i < 2; ++i) ok(tandem_sequence_truncate(cache, sequences[i], n_keys, &error), error);
  }
  for (i = 0; i < 2; ++i) qsort(times[i], (size_t)n_rounds, sizeof(double), compare);
  printf("%d keys, %d threads: call %.2f us, node %.2f us, difference %.2f us\n", n_keys, n_threads, times[0][n_rounds / 2],
         times[1][n_rounds / 2], times[1][n_rounds / 2] - times[0][n_rounds / 2]);
}

int main(int argc, char** argv) {
  int* const numbers[7] = {&n_keys, &n_threads, &n_rounds, &n_calls, &n_q_heads, &product_size, &spin_ns};
  struct ggml_threadpool_params pool_params;
  struct ggml_threadpool* pool;
  struct ggml_init_params memory = {(size_t)256 << 20, NULL, false};
  int i;
  for (i = 0; i < 7 && i + 1 < argc; ++i) *numbers[i] = atoi(argv[i + 1]);
  if (n_keys < 1 || n_threads < 1 || n_rounds < 1 || n_rounds > kMostRounds || n_calls < 1 || n_q_heads < 4 ||
      n_q_heads % 4 != 0) {
    fprintf(stderr, "numbers are more than 0, rounds at most %d, query heads a multiple of 4\n", kMostRounds);
    return 2;
  }
  ggml_threadpool_params_init(&pool_params, n_threads);
  pool = ggml_threadpool_new(&pool_params); /* first: ggml's threads inherit the core to which Tandem binds this thread */
  ctx = ggml_init(memory);
  open_world();
  append_keys();
  make_graphs(pool);
  measure();
  tandem_ggml_release(state);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  ggml_threadpool_free(pool);
  ggml_free(ctx);
  return 0;
}
