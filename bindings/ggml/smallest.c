/* SPDX-License-Identifier: MIT
 * A ggml graph of one node: tokens of two sequences are appended and attend, as in a batch of llama.cpp's.
 * cc smallest.c $(pkg-config --cflags --libs tandem ggml) -lggml-cpu -lggml-base */
#include <ggml-cpu.h>
#include <tandem/tandem-ggml.h>

enum { kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kTokens = 3 };

static tandem_engine* engine;
static tandem_model* model;
static tandem_cache* cache;
static tandem_session* session;
static tandem_ggml* attention;
static int64_t sequences[2];
static tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;

static int32_t open_all(tandem_error** error) {
  int32_t status;
  layer.n_q_heads = kQHeads;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kHeadDim;
  if ((status = tandem_engine_create(&engine, NULL, error)) || (status = tandem_model_create(&model, &layer, 1, error)) ||
      (status = tandem_cache_create(&cache, engine, model, NULL, error)) ||
      (status = tandem_session_create(&session, cache, NULL, error)) ||
      (status = tandem_sequence_create(&sequences[0], cache, error)))
    return status;
  return tandem_sequence_create(&sequences[1], cache, error);
}

/* Returns the output's first number; every value is 3. */
static float attend(struct ggml_context* ctx) {
  struct ggml_tensor* q = ggml_set_f32(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kHeadDim, kQHeads, kTokens), 2.0f);
  struct ggml_tensor* k = ggml_set_f32(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kHeadDim, kKvHeads, kTokens), 1.0f);
  struct ggml_tensor* v = ggml_set_f32(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kHeadDim, kKvHeads, kTokens), 3.0f);
  int32_t ids[2] = {0, 1}, *seq_id[kTokens] = {&ids[0], &ids[0], &ids[1]}, pos[kTokens] = {0, 1, 0};
  tandem_ggml_batch batch = {kTokens, 0, pos, NULL, seq_id, NULL};

  struct ggml_tensor* o = tandem_ggml_attend(ctx, attention, 0, q, k, v); /* o: [head_dim, n_q_heads, n_tokens] */
  struct ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, o);
  if (tandem_ggml_begin(attention, &batch) == TANDEM_OK) { /* whose tokens they are: two of sequence 0, one of 1 */
    ggml_graph_compute_with_ctx(ctx, graph, 2);
    tandem_ggml_end(attention); /* the first error since begin, and then everything as it was */
  }
  if (tandem_ggml_status(attention) != TANDEM_OK) fprintf(stderr, "%s\n", tandem_ggml_message(attention));
  return ggml_get_f32_1d(o, 0);
}

int main(void) {
  tandem_error* error = NULL;
  tandem_ggml_options options = {0};
  struct ggml_init_params memory = {(size_t)16 << 20, NULL, false};
  struct ggml_context* ctx = ggml_init(memory);
  const char* why = NULL;
  int failed = 1;
  if (open_all(&error) == TANDEM_OK) {
    options.cache = cache, options.session = session, options.layers = &layer, options.sequences = sequences;
    options.n_layers = 1, options.n_sequences = 2;
    if (tandem_ggml_create(&attention, &options, &why) == TANDEM_OK) failed = printf("%g\n", attend(ctx)) < 0;
  }
  if (failed) fprintf(stderr, "%s\n", why != NULL ? why : tandem_error_message(error));
  if (attention != NULL) failed |= tandem_ggml_status(attention) != TANDEM_OK;
  tandem_error_release(error);
  tandem_ggml_release(attention);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  ggml_free(ctx);
  return failed;
}
