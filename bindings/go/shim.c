/* SPDX-License-Identifier: MIT */
#include "shim.h"

#include "_cgo_export.h"

/* Fills *to from a description and an address. Returns NULL for a tensor that is not given. */
static const tandem_tensor* tensor(tandem_tensor* to, const tandem_go_tensor* from, char* data) {
  int i;
  if (from->n_dims == 0) return NULL;
  to->struct_size = sizeof(*to);
  to->dtype = from->dtype;
  to->device_type = from->device_type;
  to->device_index = from->device_index;
  to->data = from->address != 0 ? (void*)from->address : data;
  to->n_dims = from->n_dims;
  to->reserved = 0;
  for (i = 0; i < 4; ++i) {
    to->shape[i] = from->shape[i];
    to->stride[i] = from->stride[i];
  }
  return to;
}

static int32_t progress_entry(int64_t done, int64_t total, void* user) {
  return tandemGoProgress(done, total, (uintptr_t)user);
}

tandem_go_result tandem_go_attend(uintptr_t session, const tandem_go_attend_args* args, const int64_t* sequences,
                                  const int64_t* q_lens, const int32_t* parent_idx, const int32_t* cancel, char* q, char* k,
                                  char* v, char* o, char* lse, char* x, char* idx) {
  tandem_go_result result = {TANDEM_OK, NULL};
  tandem_tensor tensors[7];
  tandem_attend_args all = TANDEM_ATTEND_ARGS_INIT;
  tandem_selection selection = TANDEM_SELECTION_INIT;
  all.flags = args->flags;
  all.layer_idx = args->layer_idx;
  all.n_sequences = args->n_sequences;
  all.sequences = sequences;
  all.q_lens = q_lens;
  all.q = tensor(&tensors[0], &args->q, q);
  all.k = tensor(&tensors[1], &args->k, k);
  all.v = tensor(&tensors[2], &args->v, v);
  all.o = tensor(&tensors[3], &args->o, o);
  all.lse = tensor(&tensors[4], &args->lse, lse);
  all.x = tensor(&tensors[5], &args->x, x);
  selection.idx = tensor(&tensors[6], &args->idx, idx);
  if (selection.idx != NULL) {
    selection.flags = args->selection_flags;
    selection.unit_tokens = args->selection_unit_tokens;
    all.selection = &selection;
  }
  all.parent_idx = parent_idx;
  all.stream = (void*)args->stream;
  all.cancel = cancel;
  if (args->progress != 0) {
    all.progress = progress_entry;
    all.progress_user = (void*)args->progress;
  }
  result.status = tandem_attend((tandem_session*)session, &all, &result.error);
  return result;
}

tandem_go_result tandem_go_attend_tensors(tandem_engine* engine, const tandem_go_attend_tensors_args* args,
                                          const int64_t* q_lens, const int64_t* kv_lens, const float* sinks,
                                          const float* alibi_slopes, const int32_t* cancel, char* q, char* k, char* v,
                                          char* mask, char* o, char* lse) {
  tandem_go_result result = {TANDEM_OK, NULL};
  tandem_tensor tensors[6];
  tandem_attend_tensors_args all = TANDEM_ATTEND_TENSORS_ARGS_INIT;
  all.flags = args->flags;
  all.n_sequences = args->n_sequences;
  all.sm_scale = args->sm_scale;
  all.soft_cap = args->soft_cap;
  all.sliding_window_tokens = args->sliding_window_tokens;
  all.sinks = sinks;
  all.alibi_slopes = alibi_slopes;
  all.q_lens = q_lens;
  all.kv_lens = kv_lens;
  all.q = tensor(&tensors[0], &args->q, q);
  all.k = tensor(&tensors[1], &args->k, k);
  all.v = tensor(&tensors[2], &args->v, v);
  all.mask = tensor(&tensors[3], &args->mask, mask);
  all.o = tensor(&tensors[4], &args->o, o);
  all.lse = tensor(&tensors[5], &args->lse, lse);
  all.cancel = cancel;
  if (args->progress != 0) {
    all.progress = progress_entry;
    all.progress_user = (void*)args->progress;
  }
  result.status = tandem_attend_tensors(engine, &all, &result.error);
  return result;
}

tandem_go_result tandem_go_append(tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                                  const tandem_go_tensor* description, char* k, char* v, uintptr_t stream) {
  tandem_go_result result = {TANDEM_OK, NULL};
  tandem_tensor tensors[2];
  const tandem_tensor *keys = tensor(&tensors[0], &description[0], k), *values = tensor(&tensors[1], &description[1], v);
  result.status = tandem_sequence_append(cache, sequence, layer_idx, keys, values, (void*)stream, &result.error);
  return result;
}

tandem_go_result tandem_go_append_x(tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                                    const tandem_go_tensor* description, char* k, char* v, char* x) {
  tandem_go_result result = {TANDEM_OK, NULL};
  tandem_tensor tensors[3];
  const tandem_tensor *keys = tensor(&tensors[0], &description[0], k), *values = tensor(&tensors[1], &description[1], v),
                      *hidden = tensor(&tensors[2], &description[2], x);
  result.status = tandem_sequence_append_x(cache, sequence, layer_idx, keys, values, hidden, NULL, &result.error);
  return result;
}

tandem_go_result tandem_go_read_x(const tandem_cache* cache, int64_t sequence, int32_t layer_idx, int64_t first,
                                  const tandem_go_tensor* description, char* x) {
  tandem_go_result result = {TANDEM_OK, NULL};
  tandem_tensor hidden;
  result.status = tandem_sequence_read_x(tensor(&hidden, description, x), cache, sequence, layer_idx, first, &result.error);
  return result;
}

tandem_go_result tandem_go_read(const tandem_cache* cache, int64_t sequence, int32_t layer_idx, int64_t first,
                                const tandem_go_tensor* description, char* k, char* v) {
  tandem_go_result result = {TANDEM_OK, NULL};
  tandem_tensor tensors[2];
  const tandem_tensor *keys = tensor(&tensors[0], &description[0], k), *values = tensor(&tensors[1], &description[1], v);
  result.status = tandem_sequence_read(keys, values, cache, sequence, layer_idx, first, &result.error);
  return result;
}

tandem_go_result tandem_go_merge(tandem_engine* engine, const tandem_go_tensor* description, int32_t n_states, char* o_out,
                                 char* lse_out, uintptr_t stream) {
  tandem_go_result result = {TANDEM_ERROR_OUT_OF_MEMORY, NULL};
  const size_t n = (size_t)n_states;
  tandem_tensor* tensors = calloc(2 + 2 * n, sizeof(*tensors));
  const tandem_tensor** states = calloc(1 + 2 * n, sizeof(*states)); /* all o, then all lse */
  size_t i;
  if (tensors != NULL && states != NULL) {
    const tandem_tensor* o = tensor(&tensors[0], &description[0], o_out);
    const tandem_tensor* lse = tensor(&tensors[1], &description[1], lse_out);
    for (i = 0; i < 2 * n; ++i) states[i / 2 + i % 2 * n] = tensor(&tensors[2 + i], &description[2 + i], NULL);
    result.status = tandem_merge(o, lse, states, states + n, n_states, engine, (void*)stream, &result.error);
  }
  free(tensors);
  free(states);
  return result;
}

tandem_go_result tandem_go_step_begin(tandem_session* session, const int64_t* sequences, const int64_t* q_lens,
                                      int32_t n_sequences, uintptr_t stream) {
  tandem_go_result result = {TANDEM_OK, NULL};
  result.status = tandem_step_begin(session, sequences, q_lens, n_sequences, (void*)stream, &result.error);
  return result;
}

tandem_go_result tandem_go_step_end(tandem_session* session, uintptr_t stream) {
  tandem_go_result result = {TANDEM_OK, NULL};
  result.status = tandem_step_end(session, (void*)stream, &result.error);
  return result;
}

tandem_go_block tandem_go_weights_use(tandem_weights* weights, int32_t block_idx, uintptr_t stream) {
  tandem_go_block result = {TANDEM_OK, NULL, 0};
  void* data = NULL;
  result.status = tandem_weights_use(&data, weights, block_idx, (void*)stream, &result.error);
  result.data = (uintptr_t)data;
  return result;
}

tandem_go_result tandem_go_weights_done(tandem_weights* weights, int32_t block_idx, uintptr_t stream) {
  tandem_go_result result = {TANDEM_OK, NULL};
  result.status = tandem_weights_done(weights, block_idx, (void*)stream, &result.error);
  return result;
}

static int32_t write_entry(const void* data, int64_t n_bytes, void* user) {
  return tandemGoWrite((void*)data, n_bytes, (uintptr_t)user);
}

static int64_t read_entry(void* data, int64_t n_bytes, void* user) { return tandemGoRead(data, n_bytes, (uintptr_t)user); }

static int32_t blob_entry(const char* name, const void* data, int64_t n_bytes, void* user) {
  return tandemGoBlob((char*)name, (void*)data, n_bytes, (uintptr_t)user);
}

int32_t tandem_go_save(tandem_cache* cache, int64_t sequence, uintptr_t number, const tandem_save_options* options,
                       tandem_error** error) {
  return tandem_sequence_save(cache, sequence, write_entry, (void*)number, options, error);
}

int32_t tandem_go_load(int64_t* sequence, tandem_cache* cache, uintptr_t number, const tandem_load_options* options,
                       int32_t takes_blobs, tandem_error** error) {
  tandem_load_options all = *options;
  if (takes_blobs != 0) {
    all.blob = blob_entry;
    all.blob_user = (void*)number;
  }
  return tandem_sequence_load(sequence, cache, read_entry, (void*)number, &all, error);
}

void* tandem_go_address(uintptr_t number) { return (void*)number; }

static void log_entry(int32_t level, const char* message, void* user) {
  tandemGoLog(level, (char*)message, (uintptr_t)user);
}

static void* alloc_entry(size_t bytes, size_t alignment, void* user) {
  return tandemGoAlloc(bytes, alignment, (uintptr_t)user);
}

static void free_entry(void* data, size_t bytes, void* user) { tandemGoFree(data, bytes, (uintptr_t)user); }

void tandem_go_set_log(tandem_engine_options* options, uintptr_t number) {
  options->log = log_entry;
  options->log_user = (void*)number;
}

void tandem_go_set_allocator(tandem_engine_options* options, uintptr_t number) {
  options->alloc = alloc_entry;
  options->free = free_entry;
  options->alloc_user = (void*)number;
}
