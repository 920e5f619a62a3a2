/* SPDX-License-Identifier: MIT
 *
 * Tandem's attention as a node of a ggml graph. The node replaces ggml_flash_attn_ext() and the copies into a KV cache.
 * bindings/ggml/README.md shows the change to a runtime like llama.cpp.
 *
 *   tandem_ggml_create(&tandem, &options, &why);
 *   for each batch:
 *     tandem_ggml_begin(tandem, &batch);                          names the tokens' sequences
 *     o = tandem_ggml_attend(ctx, tandem, layer_idx, q, k, v);    once per layer, unless the graph is reused
 *     ggml_graph_compute(...);
 *     if (tandem_ggml_end(tandem) != TANDEM_OK) puts(tandem_ggml_message(tandem));
 *
 * Shapes are those of q, k and v before ggml_permute(). Dimensions are counted as in ggml, innermost first:
 *   q [k_head_dim, n_q_heads, n_tokens]     k [k_head_dim, n_kv_heads, n_tokens]    v [v_head_dim, n_kv_heads, n_tokens]
 *   o [v_head_dim, n_q_heads, n_tokens]     f32, contiguous
 * Rows are contiguous. Heads and tokens may have gaps, so views of a wider product need no copy. q is f32, f16 or bf16. k
 * and v are of these types or ggml's blocks (q8_0, q4_0). K and V are only those of the batch's tokens: earlier ones are in
 * Tandem's cache, in the cache's types. Scale, soft cap, sinks and sliding window are the model's (tandem_layer_options).
 *
 * Errors cannot be returned through ggml. The state keeps the first error of a batch: status, field and message. From then
 * on outputs are NaN. tandem_ggml_end() returns the error and rolls back the batch: every sequence gets its old length. If
 * the caller has not read an error, the next tandem_ggml_begin() returns it.
 *
 * Threads: ggml calls a node on each of its threads. The first thread calls Tandem, whose own pool computes. The others
 * yield until it has finished. Only one graph at a time may use a state, or its session.
 *
 * A state owns only itself: cache and session may be released before or after it. It must outlive every computation of its
 * nodes.
 */
#ifndef TANDEM_TANDEM_GGML_H_
#define TANDEM_TANDEM_GGML_H_

#include <ggml-backend.h>
#include <ggml.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tandem/tandem.h"

typedef struct tandem_ggml tandem_ggml;

/* Waits for the stream. Returns 0, or another number if the stream failed. cudaStreamSynchronize() does, but has another
 * type. */
typedef int32_t (*tandem_ggml_wait_fn)(void* stream);

/* Zero means default. */
typedef struct tandem_ggml_options {
  tandem_cache* cache;
  tandem_session* session;            /* a session of this cache */
  const tandem_layer_options* layers; /* [n_layers] as given to tandem_model_create(); copied */
  int32_t n_layers;
  int32_t n_sequences;
  const int64_t* sequences; /* [n_sequences] Tandem's id of ggml's sequence i. Borrowed. tandem_ggml_begin() reads it, so
                             * the caller may change it between batches (fork, drop) */
  int32_t device_index;     /* device of tensors in device memory */
  void* stream;             /* CUDA stream of calls on these tensors */
  tandem_ggml_wait_fn wait; /* for tandem_ggml_eval() and tensors in device memory */
} tandem_ggml_options;

/* Tokens, in the order of q, k and v. The members are those of llama_batch and llama_ubatch. tandem_ggml_begin() reads the
 * arrays; *cancel is read until the batch ends. */
typedef struct tandem_ggml_batch {
  int32_t n_tokens;
  uint32_t flags;          /* 0 or TANDEM_ATTEND_PARTIAL: a chunk of a longer prompt, not its last */
  const int32_t* pos;      /* [n_tokens] or NULL. Positions must continue where the sequence ends */
  const int32_t* n_seq_id; /* [n_tokens], each 1, or NULL: 1 each */
  int32_t* const* seq_id;  /* [n_tokens][1] or NULL: sequence 0 */
  const int32_t* cancel;   /* NULL, or a flag that any thread may set. Other than 0, it stops a call on host tensors */
} tandem_ggml_batch;

/* ---- private, up to the next line ---------------------------------------------------------------------------------- */

typedef struct tandem_ggml_layer {
  tandem_ggml* owner;
  int32_t layer_idx; /* -1: for nodes of a layer that the model lacks */
  int32_t n_q_heads;
  int32_t n_kv_heads;
  int32_t k_head_dim;
  int32_t v_head_dim;
  int32_t has_grown; /* 1: the open batch has appended to the layer */
} tandem_ggml_layer;

struct tandem_ggml {
  tandem_ggml_options options;
  tandem_ggml_layer* layers; /* [n_layers + 1], the last for layers that the model lacks */
  int64_t* open_ids;         /* [n_sequences] sequences of the open batch, in its order */
  int64_t* q_lens;           /* [n_sequences] their tokens in the batch */
  int64_t* lengths;          /* [n_sequences] their lengths before the batch */
  tandem_ggml_batch batch;
  int32_t n_open; /* number of sequences of the open batch */
  int32_t is_open;
  int32_t is_running; /* atomic: a node is being computed */
  int32_t is_told;    /* the caller has read the status */
  int32_t status;
  char field[64];
  char message[448];
};

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static inline int32_t
tandem_ggml_fail(tandem_ggml* state, int32_t status, const char* field, const char* format, ...) {
  va_list values;
  /* The first error stays, until the batch has ended and the caller has read it. */
  if (state->status != TANDEM_OK && (state->is_open || !state->is_told)) return state->status;
  state->status = status;
  state->is_told = 0;
  snprintf(state->field, sizeof state->field, "%s", field);
  va_start(values, format);
  vsnprintf(state->message, sizeof state->message, format, values);
  va_end(values);
  return status;
}

/* Keeps the result of a call of Tandem, and releases its error. */
static inline int32_t tandem_ggml_keep(tandem_ggml* state, int32_t status, tandem_error* error) {
  if (status != TANDEM_OK) tandem_ggml_fail(state, status, tandem_error_field(error), "%s", tandem_error_message(error));
  tandem_error_release(error);
  return status;
}

static inline int32_t tandem_ggml_dtype(enum ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return TANDEM_F32;
    case GGML_TYPE_F16:
      return TANDEM_F16;
    case GGML_TYPE_BF16:
      return TANDEM_BF16;
    case GGML_TYPE_Q8_0:
      return TANDEM_Q8_0;
    case GGML_TYPE_Q4_0:
      return TANDEM_Q4_0;
    default:
      return 0;
  }
}

static inline ggml_backend_buffer_t tandem_ggml_buffer(const struct ggml_tensor* tensor) {
  return tensor->view_src != NULL ? tensor->view_src->buffer : tensor->buffer;
}

/* Returns where the tensor's memory is. Without a buffer, the caller's `device_type` is trusted. */
static inline int32_t tandem_ggml_place_of(const struct ggml_tensor* tensor, int32_t device_type) {
  const ggml_backend_buffer_t buffer = tandem_ggml_buffer(tensor);
  if (buffer == NULL) return device_type;
  return ggml_backend_buffer_is_host(buffer) ? TANDEM_DEVICE_HOST : TANDEM_DEVICE_CUDA;
}

typedef struct tandem_ggml_role {
  const char* name;
  int64_t head_dim;
  int64_t n_heads;
  int32_t device_type;
} tandem_ggml_role;

static inline int32_t tandem_ggml_check(tandem_ggml* state, const struct ggml_tensor* tensor, const tandem_ggml_role* role) {
  const int64_t *ne = tensor->ne, n_tokens = state->batch.n_tokens;
  const size_t *nb = tensor->nb, type_bytes = ggml_type_size(tensor->type);
  if (tandem_ggml_dtype(tensor->type) == 0)
    return tandem_ggml_fail(state, TANDEM_ERROR_UNSUPPORTED, role->name,
                            "tandem_ggml: %s is of type %s, which Tandem has not", role->name, ggml_type_name(tensor->type));
  if (ne[0] != role->head_dim || ne[1] != role->n_heads || ne[2] != n_tokens || ne[3] != 1)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, role->name,
                            "tandem_ggml: %s is [%lld, %lld, %lld, %lld], not [%lld, %lld, %lld]: head_dim, heads and the "
                            "batch's tokens, as before ggml_permute()",
                            role->name, (long long)ne[0], (long long)ne[1], (long long)ne[2], (long long)ne[3],
                            (long long)role->head_dim, (long long)role->n_heads, (long long)n_tokens);
  if (tandem_ggml_place_of(tensor, role->device_type) != role->device_type)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, role->name, "tandem_ggml: %s is in a buffer of %s, %s",
                            role->name, ggml_backend_buffer_name(tandem_ggml_buffer(tensor)),
                            role->device_type == TANDEM_DEVICE_HOST ? "not in host memory" : "not in device memory");
  if (nb[0] != type_bytes || nb[1] % type_bytes != 0 || nb[2] % type_bytes != 0)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, role->name,
                            "tandem_ggml: %s has strides of %llu, %llu and %llu bytes: its rows are not contiguous",
                            role->name, (unsigned long long)nb[0], (unsigned long long)nb[1], (unsigned long long)nb[2]);
  return TANDEM_OK;
}

/* Describes ggml's tensor as a view of [n_tokens, n_heads, head_dim]. The library checks the strides. */
static inline int32_t tandem_ggml_view(tandem_ggml* state, tandem_tensor* view, const struct ggml_tensor* tensor,
                                       const tandem_ggml_role* role) {
  const int64_t per_block = ggml_blck_size(tensor->type);
  int64_t packed = role->head_dim;
  int i;
  if (tandem_ggml_check(state, tensor, role) != TANDEM_OK) return state->status;
  memset(view, 0, sizeof *view);
  view->struct_size = (uint32_t)sizeof *view;
  view->dtype = tandem_ggml_dtype(tensor->type);
  view->device_type = role->device_type;
  view->device_index = role->device_type == TANDEM_DEVICE_HOST ? 0 : state->options.device_index;
  view->data = tensor->data;
  view->n_dims = 3;
  view->shape[2] = tensor->ne[0];
  view->stride[2] = 1;
  for (i = 1; i >= 0; --i) { /* in ggml a dimension of length 1 may have any stride */
    const int64_t stride = (int64_t)(tensor->nb[2 - i] / ggml_type_size(tensor->type)) * per_block;
    view->shape[i] = tensor->ne[2 - i];
    view->stride[i] = view->shape[i] > 1 ? stride : packed;
    packed = view->stride[i] * view->shape[i];
  }
  return TANDEM_OK;
}

static inline int32_t tandem_ggml_call(tandem_ggml_layer* layer, const struct ggml_tensor* const* qkvo,
                                       int32_t device_type) {
  tandem_ggml* state = layer->owner;
  const tandem_ggml_role roles[4] = {{"q", layer->k_head_dim, layer->n_q_heads, device_type},
                                     {"k", layer->k_head_dim, layer->n_kv_heads, device_type},
                                     {"v", layer->v_head_dim, layer->n_kv_heads, device_type},
                                     {"o", layer->v_head_dim, layer->n_q_heads, device_type}};
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  tandem_tensor views[4];
  tandem_error* error = NULL;
  int i;
  if (!state->is_open)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_STATE, "batch",
                            "tandem_ggml: a node is computed outside of tandem_ggml_begin() and tandem_ggml_end()");
  if (state->status != TANDEM_OK) return state->status;
  if (layer->layer_idx < 0)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, "layer_idx",
                            "tandem_ggml: a node is of no layer of the model");
  if (layer->has_grown && qkvo[1] != NULL)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_STATE, "layer_idx",
                            "tandem_ggml: layer %d has the batch's tokens already", (int)layer->layer_idx);
  for (i = 0; i < 4; ++i) {
    if (qkvo[i] == NULL && (i == 0 || i == 3))
      return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, roles[i].name, "tandem_ggml: %s is NULL", roles[i].name);
    if (qkvo[i] != NULL && tandem_ggml_view(state, &views[i], qkvo[i], &roles[i]) != TANDEM_OK) return state->status;
  }
  args.flags = state->batch.flags;
  args.layer_idx = layer->layer_idx;
  args.n_sequences = state->n_open;
  args.sequences = state->open_ids;
  args.q_lens = state->q_lens;
  args.q = &views[0];
  args.k = qkvo[1] != NULL ? &views[1] : NULL;
  args.v = qkvo[2] != NULL ? &views[2] : NULL;
  args.o = &views[3];
  args.stream = device_type == TANDEM_DEVICE_HOST ? NULL : state->options.stream;
  args.cancel = state->batch.cancel;
  i = tandem_attend(state->options.session, &args, &error);
  if (i == TANDEM_OK && args.k != NULL) layer->has_grown = 1;
  return tandem_ggml_keep(state, i, error);
}

/* Fills o with NaN: bytes of 0xff are NaN in f32, f16 and bf16. Device memory without a buffer is left unchanged. */
static inline void tandem_ggml_spoil(struct ggml_tensor* o, int32_t device_type) {
  if (o == NULL || o->data == NULL) return;
  if (tandem_ggml_place_of(o, device_type) == TANDEM_DEVICE_HOST)
    memset(o->data, 0xff, ggml_nbytes(o));
  else if (tandem_ggml_buffer(o) != NULL)
    ggml_backend_tensor_memset(o, 0xff, 0, ggml_nbytes(o));
}

static inline void tandem_ggml_compute(struct ggml_tensor* node, int ith, int nth, void* layer_of_node) {
  tandem_ggml_layer* layer = (tandem_ggml_layer*)layer_of_node;
  const struct ggml_tensor* const qkvo[4] = {node->src[0], node->src[1], node->src[2], node};
  (void)nth;
  if (ith != 0) {
    while (__atomic_load_n(&layer->owner->is_running, __ATOMIC_ACQUIRE)) sched_yield();
    return;
  }
  __atomic_store_n(&layer->owner->is_running, 1, __ATOMIC_RELEASE);
  if (tandem_ggml_call(layer, qkvo, TANDEM_DEVICE_HOST) != TANDEM_OK) tandem_ggml_spoil(node, TANDEM_DEVICE_HOST);
  __atomic_store_n(&layer->owner->is_running, 0, __ATOMIC_RELEASE);
}

/* Returns the layer of nodes that cannot be computed. */
static inline tandem_ggml_layer* tandem_ggml_no_layer(tandem_ggml* state) { return &state->layers[state->options.n_layers]; }

static inline tandem_ggml_layer* tandem_ggml_layer_at(tandem_ggml* state, int32_t layer_idx) {
  if (layer_idx >= 0 && layer_idx < state->options.n_layers) return &state->layers[layer_idx];
  tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, "layer_idx", "tandem_ggml: layer_idx = %d is not in 0 ... %d",
                   (int)layer_idx, (int)state->options.n_layers - 1);
  return tandem_ggml_no_layer(state);
}

/* Returns the layer of a new node; NULL if no node can be built. */
static inline tandem_ggml_layer* tandem_ggml_node_layer(const struct ggml_context* ctx, tandem_ggml* state,
                                                        int32_t layer_idx, const struct ggml_tensor* q) {
  const char* missing = ctx == NULL ? "ctx" : "q";
  if (state == NULL) return NULL;
  if (ctx != NULL && q != NULL) return tandem_ggml_layer_at(state, layer_idx);
  tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, missing, "tandem_ggml_attend: %s is NULL", missing);
  return NULL;
}

/* Marks a node for tandem_ggml_eval(), in its op_params, which ggml does not use for that kind of node. */
typedef struct tandem_ggml_mark {
  char text[16];
  tandem_ggml_layer* layer;
} tandem_ggml_mark;

static inline tandem_ggml_layer* tandem_ggml_marked(const struct ggml_tensor* node) {
  tandem_ggml_mark mark;
  memcpy(&mark, node->op_params, sizeof mark);
  return node->op == GGML_OP_CONT && memcmp(mark.text, "tandem_ggml_cut", 16) == 0 ? mark.layer : NULL;
}

/* Finds the sequences of a batch and their numbers of tokens, in the order of the tokens. */
static inline int32_t tandem_ggml_group(tandem_ggml* state) {
  const tandem_ggml_batch* batch = &state->batch;
  int32_t i, last = -1;
  state->n_open = 0;
  for (i = 0; i < batch->n_tokens; ++i) {
    const int32_t n = batch->n_seq_id != NULL ? batch->n_seq_id[i] : 1;
    const int32_t sequence = batch->seq_id != NULL && n > 0 ? batch->seq_id[i][0] : 0;
    int32_t j;
    if (n != 1)
      return tandem_ggml_fail(state, TANDEM_ERROR_UNSUPPORTED, "n_seq_id",
                              "tandem_ggml_begin: n_seq_id[%d] = %d: a token is of one sequence; fork it after the batch",
                              (int)i, (int)n);
    if (sequence < 0 || sequence >= state->options.n_sequences)
      return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, "seq_id",
                              "tandem_ggml_begin: seq_id[%d] = %d is not in 0 ... %d", (int)i, (int)sequence,
                              (int)state->options.n_sequences - 1);
    if (i > 0 && sequence == last) {
      ++state->q_lens[state->n_open - 1];
      continue;
    }
    last = sequence;
    for (j = 0; j < state->n_open; ++j)
      if (state->open_ids[j] == state->options.sequences[sequence])
        return tandem_ggml_fail(
            state, TANDEM_ERROR_UNSUPPORTED, "seq_id",
            "tandem_ggml_begin: seq_id[%d] = %d again, after others: a sequence's tokens follow one another", (int)i,
            (int)sequence);
    state->open_ids[state->n_open] = state->options.sequences[sequence];
    state->q_lens[state->n_open++] = 1;
  }
  return TANDEM_OK;
}

/* Records the length of sequence i before the batch. Checks that all its layers have that length and that positions continue
 * there, because the causal mask relies on both. */
static inline int32_t tandem_ggml_measure(tandem_ggml* state, int32_t i, int64_t first_token) {
  const int32_t* pos = state->batch.pos;
  int64_t at, length = 0;
  int32_t layer_idx;
  for (layer_idx = 0; layer_idx < state->options.n_layers; ++layer_idx) {
    tandem_error* error = NULL;
    const int32_t status = tandem_sequence_length(&length, state->options.cache, state->open_ids[i], layer_idx, &error);
    if (tandem_ggml_keep(state, status, error) != TANDEM_OK) return status;
    if (layer_idx > 0 && length != state->lengths[i])
      return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_STATE, "seq_id",
                              "tandem_ggml_begin: sequence %lld has %lld tokens in layer 0 and %lld in layer %d",
                              (long long)state->open_ids[i], (long long)state->lengths[i], (long long)length,
                              (int)layer_idx);
    state->lengths[i] = length;
  }
  for (at = 0; pos != NULL && at < state->q_lens[i]; ++at)
    if (pos[first_token + at] != length + at)
      return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, "pos",
                              "tandem_ggml_begin: pos[%lld] = %d, but the token is number %lld of its sequence",
                              (long long)(first_token + at), (int)pos[first_token + at], (long long)(length + at));
  return TANDEM_OK;
}

/* Opens a batch. Takes memory before any node is computed. Opens no step of the session: its workers would spin between
 * attention calls while ggml's threads compute on the same processors. */
static inline int32_t tandem_ggml_open(tandem_ggml* state) {
  int64_t first_token = 0;
  int32_t i, status = tandem_ggml_group(state);
  for (i = 0; status == TANDEM_OK && i < state->n_open; ++i) {
    status = tandem_ggml_measure(state, i, first_token);
    first_token += state->q_lens[i];
  }
  for (i = 0; status == TANDEM_OK && i < state->n_open; ++i) {
    tandem_error* error = NULL;
    status = tandem_sequence_reserve(state->options.cache, state->open_ids[i], state->q_lens[i], &error);
    tandem_ggml_keep(state, status, error);
  }
  for (i = 0; i < state->options.n_layers; ++i) state->layers[i].has_grown = 0;
  state->is_open = status == TANDEM_OK;
  return status;
}

/* Closes the batch. After an error, every sequence gets its old length. */
static inline void tandem_ggml_close(tandem_ggml* state) {
  tandem_error* error = NULL;
  int32_t i;
  for (i = 0; i < state->options.n_layers; ++i)
    if (!state->layers[i].has_grown)
      tandem_ggml_fail(state, TANDEM_ERROR_INVALID_STATE, "layer_idx", "tandem_ggml_end: layer %d has not been computed",
                       (int)i);
  for (i = 0; state->status != TANDEM_OK && i < state->n_open; ++i) {
    const size_t used = strlen(state->message);
    if (tandem_sequence_truncate(state->options.cache, state->open_ids[i], state->lengths[i], &error) == TANDEM_OK) continue;
    snprintf(state->message + used, sizeof state->message - used, "; then %s", tandem_error_message(error));
    tandem_error_release(error);
  }
  state->is_open = 0;
}

/* ---- functions ---------------------------------------------------------------------------------------------------- */

/* Accepts NULL. Rolls back an open batch. */
static inline void tandem_ggml_release(tandem_ggml* state) {
  if (state == NULL) return;
  if (state->is_open) {
    tandem_ggml_fail(state, TANDEM_ERROR_CANCELLED, "batch", "tandem_ggml_release: a batch is open");
    tandem_ggml_close(state);
  }
  free(state->layers);
  free(state->open_ids);
  free(state);
}

/* Return the first error since the last tandem_ggml_begin() that returned TANDEM_OK: its status, its text, which names field
 * and value, and its field. Texts are "" without an error, and valid until the next call with the state. A NULL state gives
 * INVALID_ARGUMENT and "". */
static inline int32_t tandem_ggml_status(tandem_ggml* state) {
  if (state == NULL) return TANDEM_ERROR_INVALID_ARGUMENT;
  state->is_told = 1;
  return state->status;
}
static inline const char* tandem_ggml_message(const tandem_ggml* state) { return state != NULL ? state->message : ""; }
static inline const char* tandem_ggml_field(const tandem_ggml* state) { return state != NULL ? state->field : ""; }

/* Makes a state. Errors: INVALID_ARGUMENT, OUT_OF_MEMORY; *why (may be NULL) gets a constant text. */
static inline int32_t tandem_ggml_create(tandem_ggml** state, const tandem_ggml_options* options, const char** why) {
  const char* reason = NULL;
  tandem_ggml* made = NULL;
  int32_t i;
  if (state == NULL || options == NULL)
    reason = state == NULL ? "state is NULL" : "options is NULL";
  else if (options->cache == NULL || options->session == NULL)
    reason = options->cache == NULL ? "cache is NULL" : "session is NULL";
  else if (options->layers == NULL || options->n_layers < 1)
    reason = options->layers == NULL ? "layers is NULL" : "n_layers is less than 1";
  else if (options->sequences == NULL || options->n_sequences < 1)
    reason = options->sequences == NULL ? "sequences is NULL" : "n_sequences is less than 1";
  if (why != NULL) *why = reason;
  if (reason != NULL) return TANDEM_ERROR_INVALID_ARGUMENT;
  made = (tandem_ggml*)calloc(1, sizeof *made);
  if (made != NULL) {
    made->layers = (tandem_ggml_layer*)calloc((size_t)options->n_layers + 1, sizeof *made->layers);
    made->open_ids = (int64_t*)calloc((size_t)options->n_sequences, 3 * sizeof *made->open_ids);
  }
  if (made == NULL || made->layers == NULL || made->open_ids == NULL) {
    if (why != NULL) *why = "there is no memory for the state";
    tandem_ggml_release(made);
    return TANDEM_ERROR_OUT_OF_MEMORY;
  }
  made->q_lens = made->open_ids + options->n_sequences;
  made->lengths = made->q_lens + options->n_sequences;
  made->options = *options;
  made->options.layers = NULL; /* not borrowed */
  for (i = 0; i <= options->n_layers; ++i) {
    tandem_ggml_layer* layer = &made->layers[i];
    layer->owner = made;
    layer->layer_idx = i < options->n_layers ? i : -1;
    if (layer->layer_idx < 0) break;
    layer->n_q_heads = options->layers[i].n_q_heads;
    layer->n_kv_heads = options->layers[i].n_kv_heads;
    layer->k_head_dim = options->layers[i].k_head_dim;
    layer->v_head_dim = options->layers[i].v_head_dim != 0 ? options->layers[i].v_head_dim : layer->k_head_dim;
  }
  *state = made;
  return TANDEM_OK;
}

/* Opens a batch, whose tokens nodes attend from here on. The tokens' order is that of q, k and v. Takes memory for them in
 * every layer. Errors: UNSUPPORTED (a token of several sequences, a sequence's tokens not together), INVALID_ARGUMENT
 * (seq_id, pos, flags), INVALID_STATE (a batch is open), those of tandem_sequence_reserve(). Also returns, once, an earlier
 * error that the caller has not read. */
static inline int32_t tandem_ggml_begin(tandem_ggml* state, const tandem_ggml_batch* batch) {
  int32_t status;
  if (state == NULL) return TANDEM_ERROR_INVALID_ARGUMENT;
  if (!state->is_told && state->status != TANDEM_OK) return tandem_ggml_status(state);
  if (state->is_open)
    return tandem_ggml_fail(state, TANDEM_ERROR_INVALID_STATE, "batch", "tandem_ggml_begin: a batch is open");
  state->status = TANDEM_OK;
  state->field[0] = state->message[0] = 0;
  if (batch == NULL || batch->n_tokens < 1 || (batch->flags & ~TANDEM_ATTEND_PARTIAL) != 0) {
    const char* field = batch == NULL ? "batch" : batch->n_tokens < 1 ? "n_tokens" : "flags";
    status = tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, field, "tandem_ggml_begin: %s = %lld", field,
                              batch == NULL         ? 0LL
                              : batch->n_tokens < 1 ? (long long)batch->n_tokens
                                                    : (long long)batch->flags);
  } else {
    state->batch = *batch;
    status = tandem_ggml_open(state);
  }
  state->is_told = 1;
  return status;
}

/* Closes the batch. Returns the first error since tandem_ggml_begin(); every sequence then has its old length. If a layer's
 * node was not computed, the error is INVALID_STATE. */
static inline int32_t tandem_ggml_end(tandem_ggml* state) {
  if (state == NULL) return TANDEM_ERROR_INVALID_ARGUMENT;
  if (state->is_open)
    tandem_ggml_close(state);
  else
    tandem_ggml_fail(state, TANDEM_ERROR_INVALID_STATE, "batch", "tandem_ggml_end: no batch is open");
  return tandem_ggml_status(state);
}

/* Builds the node of a layer. v is NULL if the layer's V aliases K. k and v are NULL if nothing is appended and the queries
 * are of tokens already there (layers that share a cache). The CPU computes the node: in a scheduler with other backends it
 * is a split, to which q, k and v are copied. Shapes and types are checked when the node is computed. Returns NULL if ctx,
 * state or q is NULL. */
static inline struct ggml_tensor* tandem_ggml_attend(struct ggml_context* ctx, tandem_ggml* state, int32_t layer_idx,
                                                     struct ggml_tensor* q, struct ggml_tensor* k, struct ggml_tensor* v) {
  tandem_ggml_layer* layer = tandem_ggml_node_layer(ctx, state, layer_idx, q);
  struct ggml_tensor* qkv[3];
  int is_known;
  if (layer == NULL) return NULL;
  is_known = layer->layer_idx >= 0;
  qkv[0] = q;
  qkv[1] = k;
  qkv[2] = v;
  /* One task: a graph of this node alone needs one thread. */
  return ggml_custom_4d(ctx, GGML_TYPE_F32, is_known ? layer->v_head_dim : q->ne[0], is_known ? layer->n_q_heads : q->ne[1],
                        q->ne[2], 1, qkv, 3, tandem_ggml_compute, 1, layer);
}

/* ---- tensors in device memory --------------------------------------------------------------------------------------- */

/* Attends between two graphs. The first graph has computed q, k and v, and the caller has waited for it. o is an input of
 * the second graph, in f32, f16 or bf16. The call goes on options.stream; the second graph must come after it (options.wait,
 * or an event). */
static inline int32_t tandem_ggml_attend_device(tandem_ggml* state, int32_t layer_idx, const struct ggml_tensor* q,
                                                const struct ggml_tensor* k, const struct ggml_tensor* v,
                                                struct ggml_tensor* o) {
  const struct ggml_tensor* qkvo[4];
  int32_t status;
  if (state == NULL) return TANDEM_ERROR_INVALID_ARGUMENT;
  qkvo[0] = q;
  qkvo[1] = k;
  qkvo[2] = v;
  qkvo[3] = o;
  status = tandem_ggml_call(tandem_ggml_layer_at(state, layer_idx), qkvo, TANDEM_DEVICE_CUDA);
  if (status != TANDEM_OK) tandem_ggml_spoil(o, TANDEM_DEVICE_CUDA);
  return status;
}

/* Builds a node for a scheduler whose callback is tandem_ggml_eval(). On any backend, the scheduler computes and waits up to
 * the node, and Tandem attends where the tensors are. To ggml the node is a copy of q, which every backend supports. k must
 * not be NULL, v_head_dim is at most k_head_dim, and o has q's type. Without the callback, tandem_ggml_end() returns
 * INVALID_STATE. */
static inline struct ggml_tensor* tandem_ggml_attend_cut(struct ggml_context* ctx, tandem_ggml* state, int32_t layer_idx,
                                                         struct ggml_tensor* q, struct ggml_tensor* k,
                                                         struct ggml_tensor* v) {
  tandem_ggml_mark mark = {"tandem_ggml_cut", NULL};
  struct ggml_tensor *part = q, *node;
  mark.layer = tandem_ggml_node_layer(ctx, state, layer_idx, q);
  if (mark.layer == NULL) return NULL;
  if (k == NULL || mark.layer->v_head_dim > q->ne[0]) {
    tandem_ggml_fail(state, TANDEM_ERROR_UNSUPPORTED, k == NULL ? "k" : "v_head_dim", "tandem_ggml_attend_cut: %s",
                     k == NULL ? "k is NULL" : "v_head_dim is more than q has");
    mark.layer = tandem_ggml_no_layer(state);
  }
  if (mark.layer->layer_idx >= 0 && mark.layer->v_head_dim < q->ne[0])
    part = ggml_view_3d(ctx, q, mark.layer->v_head_dim, q->ne[1], q->ne[2], q->nb[1], q->nb[2], 0);
  node = ggml_cont(ctx, part);
  node->src[1] = k;
  node->src[2] = v;
  node->src[3] = q;
  memcpy(node->op_params, &mark, sizeof mark);
  return node;
}

/* The scheduler's callback: ggml_backend_sched_set_eval_callback(scheduler, tandem_ggml_eval, NULL). An existing callback
 * may call it. For ask, returns true if tandem_ggml_attend_cut() built the node. */
static inline bool tandem_ggml_eval(struct ggml_tensor* node, bool ask, void* user) {
  tandem_ggml_layer* layer = tandem_ggml_marked(node);
  const struct ggml_tensor* const qkvo[4] = {node->src[3], node->src[1], node->src[2], node};
  tandem_ggml* state;
  int32_t device_type;
  (void)user;
  if (layer == NULL || ask) return layer != NULL || !ask;
  state = layer->owner;
  device_type = tandem_ggml_place_of(node, state->options.wait != NULL ? TANDEM_DEVICE_CUDA : TANDEM_DEVICE_HOST);
  if (device_type != TANDEM_DEVICE_HOST && state->options.wait == NULL)
    tandem_ggml_fail(state, TANDEM_ERROR_INVALID_ARGUMENT, "wait",
                     "tandem_ggml_eval: wait is NULL, and o is in a buffer of %s",
                     ggml_backend_buffer_name(tandem_ggml_buffer(node)));
  if (tandem_ggml_call(layer, qkvo, device_type) == TANDEM_OK && device_type != TANDEM_DEVICE_HOST) {
    const int32_t code = state->options.wait(state->options.stream);
    if (code != 0)
      tandem_ggml_fail(state, TANDEM_ERROR_DEVICE_LOST, "wait", "tandem_ggml_eval: wait returned %d", (int)code);
  }
  if (state->status != TANDEM_OK) tandem_ggml_spoil(node, device_type);
  return true;
}

#endif /* TANDEM_TANDEM_GGML_H_ */
