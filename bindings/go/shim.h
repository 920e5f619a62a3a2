/* SPDX-License-Identifier: MIT
 * Go may pass the address of Go memory to C only as a call argument, and only if that memory holds no Go addresses. So Go
 * cannot build structs that point to tensors, nor tensors, which point to data. The functions below build them in C, from
 * descriptions without addresses and from the addresses one by one. */
#ifndef TANDEM_GO_SHIM_H_
#define TANDEM_GO_SHIM_H_

#include <stdlib.h>
#include <tandem/tandem.h>

/* A tandem_tensor without its address. n_dims = 0: no tensor. */
typedef struct tandem_go_tensor {
  int32_t dtype, device_type, device_index, n_dims;
  uintptr_t address; /* of device memory or C memory; 0: Go memory, whose address is an argument */
  int64_t shape[4], stride[4];
} tandem_go_tensor;

/* tandem_attend_args without its addresses. */
typedef struct tandem_go_attend_args {
  uint32_t flags;
  int32_t layer_idx, n_sequences;
  uintptr_t stream;
  uintptr_t progress; /* number of the progress callback; 0: none */
  tandem_go_tensor q, k, v, o, lse, x;
  uint32_t selection_flags;
  int64_t selection_unit_tokens;
  tandem_go_tensor idx; /* indices of the selection; none: no selection */
} tandem_go_attend_args;

/* tandem_attend_tensors_args without its addresses. */
typedef struct tandem_go_attend_tensors_args {
  uint32_t flags;
  int32_t n_sequences;
  float sm_scale, soft_cap;
  int64_t sliding_window_tokens;
  uintptr_t progress; /* number of the progress callback; 0: none */
  tandem_go_tensor q, k, v, mask, o, lse;
} tandem_go_attend_tensors_args;

typedef struct tandem_go_result {
  int32_t status;
  tandem_error* error;
} tandem_go_result;

/* session is a number, because cgo would move a pointer to the heap to check what it points to. */
tandem_go_result tandem_go_attend(uintptr_t session, const tandem_go_attend_args* args, const int64_t* sequences,
                                  const int64_t* q_lens, const int32_t* parent_idx, const int32_t* cancel, char* q, char* k,
                                  char* v, char* o, char* lse, char* x, char* idx);
tandem_go_result tandem_go_attend_tensors(tandem_engine* engine, const tandem_go_attend_tensors_args* args,
                                          const int64_t* q_lens, const int64_t* kv_lens, const float* sinks,
                                          const float* alibi_slopes, const int32_t* cancel, char* q, char* k, char* v,
                                          char* mask, char* o, char* lse);
/* description: [2], k and v. */
tandem_go_result tandem_go_append(tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                                  const tandem_go_tensor* description, char* k, char* v, uintptr_t stream);
tandem_go_result tandem_go_read(const tandem_cache* cache, int64_t sequence, int32_t layer_idx, int64_t first,
                                const tandem_go_tensor* description, char* k, char* v);
/* description: [3], k, v and x. */
tandem_go_result tandem_go_append_x(tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                                    const tandem_go_tensor* description, char* k, char* v, char* x);
tandem_go_result tandem_go_read_x(const tandem_cache* cache, int64_t sequence, int32_t layer_idx, int64_t first,
                                  const tandem_go_tensor* description, char* x);
/* description: [2 + 2 n_states], o_out, lse_out, then o and lse of each state. Only the states' addresses are in it; they
 * are C memory. */
tandem_go_result tandem_go_merge(tandem_engine* engine, const tandem_go_tensor* description, int32_t n_states, char* o_out,
                                 char* lse_out, uintptr_t stream);
tandem_go_result tandem_go_step_begin(tandem_session* session, const int64_t* sequences, const int64_t* q_lens,
                                      int32_t n_sequences, uintptr_t stream);
tandem_go_result tandem_go_step_end(tandem_session* session, uintptr_t stream);

typedef struct tandem_go_block {
  int32_t status;
  tandem_error* error;
  uintptr_t data; /* address in device memory */
} tandem_go_block;
tandem_go_block tandem_go_weights_use(tandem_weights* weights, int32_t block_idx, uintptr_t stream);
tandem_go_result tandem_go_weights_done(tandem_weights* weights, int32_t block_idx, uintptr_t stream);

/* number: the entry of `files` whose reader or writer is called. *options is copied, and its callbacks are filled in here.
 */
int32_t tandem_go_save(tandem_cache* cache, int64_t sequence, uintptr_t number, const tandem_save_options* options,
                       tandem_error** error);
int32_t tandem_go_load(int64_t* sequence, tandem_cache* cache, uintptr_t number, const tandem_load_options* options,
                       int32_t takes_blobs, tandem_error** error);

/* Returns an address that Go has kept as a number. */
void* tandem_go_address(uintptr_t number);

/* Set the callbacks. number, of the entry in the Go table, becomes the user pointer. */
void tandem_go_set_log(tandem_engine_options* options, uintptr_t number);
void tandem_go_set_allocator(tandem_engine_options* options, uintptr_t number);

#endif /* TANDEM_GO_SHIM_H_ */
