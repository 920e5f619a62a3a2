/* SPDX-License-Identifier: MIT
 * What Go cannot say to C by itself. Go may hand the address of its memory to C only as an argument of the call and only
 * where that memory holds no addresses of Go memory: so structs that point to tensors, and tensors, which point to data, are
 * put together here, on the stack of the call, from descriptions without addresses and from the addresses one by one. */
#ifndef TANDEM_GO_SHIM_H_
#define TANDEM_GO_SHIM_H_

#include <stdlib.h>
#include <tandem/tandem.h>

/* A tandem_tensor without its address; n_dims = 0: none. */
typedef struct tandem_go_tensor {
  int32_t dtype, device_type, device_index, n_dims;
  uintptr_t address; /* of device memory; 0: memory of Go */
  int64_t shape[4], stride[4];
} tandem_go_tensor;

/* tandem_attend_args without its addresses. */
typedef struct tandem_go_attend_args {
  uint32_t flags;
  int32_t layer_idx, n_sequences;
  uintptr_t stream;
  uintptr_t progress; /* number of the callback; 0: none */
  tandem_go_tensor q, k, v, o, lse, x;
  uint32_t selection_flags;
  int64_t selection_unit_tokens;
  tandem_go_tensor idx; /* of the selection; none: no selection */
} tandem_go_attend_args;

/* tandem_attend_tensors_args without its addresses. */
typedef struct tandem_go_attend_tensors_args {
  uint32_t flags;
  int32_t n_sequences;
  float sm_scale, soft_cap;
  int64_t sliding_window_tokens;
  uintptr_t progress; /* number of the callback; 0: none */
  tandem_go_tensor q, k, v, mask, o, lse;
} tandem_go_attend_tensors_args;

typedef struct tandem_go_result {
  int32_t status;
  tandem_error* error;
} tandem_go_result;

/* session: as a number, since cgo would box a pointer on the heap to look what it points to. */
tandem_go_result tandem_go_attend(uintptr_t session, const tandem_go_attend_args* args, const int64_t* sequences,
                                  const int64_t* q_lens, const int32_t* parent_idx, const int32_t* cancel, char* q, char* k,
                                  char* v, char* o, char* lse, char* x, char* idx);
tandem_go_result tandem_go_attend_tensors(tandem_engine* engine, const tandem_go_attend_tensors_args* args,
                                          const int64_t* q_lens, const int64_t* kv_lens, const float* sinks,
                                          const float* alibi_slopes, const int32_t* cancel, char* q, char* k, char* v,
                                          char* mask, char* o, char* lse);
/* description: [2], of k and v. */
tandem_go_result tandem_go_append(tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                                  const tandem_go_tensor* description, char* k, char* v, uintptr_t stream);
tandem_go_result tandem_go_read(const tandem_cache* cache, int64_t sequence, int32_t layer_idx, int64_t first,
                                const tandem_go_tensor* description, char* k, char* v);
/* description: [3], of k, v and x. */
tandem_go_result tandem_go_append_x(tandem_cache* cache, int64_t sequence, int32_t layer_idx,
                                    const tandem_go_tensor* description, char* k, char* v, char* x);
tandem_go_result tandem_go_read_x(const tandem_cache* cache, int64_t sequence, int32_t layer_idx, int64_t first,
                                  const tandem_go_tensor* description, char* x);
/* description: [2 + 2 n_states], of o_out, lse_out, then o and lse of each state, whose addresses, of C memory, are in it.
 */
tandem_go_result tandem_go_merge(tandem_engine* engine, const tandem_go_tensor* description, int32_t n_states, char* o_out,
                                 char* lse_out, uintptr_t stream);
tandem_go_result tandem_go_step_begin(tandem_session* session, const int64_t* sequences, const int64_t* q_lens,
                                      int32_t n_sequences, uintptr_t stream);
tandem_go_result tandem_go_step_end(tandem_session* session, uintptr_t stream);

typedef struct tandem_go_block {
  int32_t status;
  tandem_error* error;
  uintptr_t data; /* of device memory */
} tandem_go_block;
tandem_go_block tandem_go_weights_use(tandem_weights* weights, int32_t block_idx, uintptr_t stream);
tandem_go_result tandem_go_weights_done(tandem_weights* weights, int32_t block_idx, uintptr_t stream);

/* number: of the file, whose functions are called. *options is copied: its callbacks are filled in here. */
int32_t tandem_go_save(tandem_cache* cache, int64_t sequence, uintptr_t number, const tandem_save_options* options,
                       tandem_error** error);
int32_t tandem_go_load(int64_t* sequence, tandem_cache* cache, uintptr_t number, const tandem_load_options* options,
                       int32_t takes_blobs, tandem_error** error);

/* An address that Go has kept as a number. */
void* tandem_go_address(uintptr_t number);

/* The callbacks, with a number of the handle table as user pointer. */
void tandem_go_set_log(tandem_engine_options* options, uintptr_t number);
void tandem_go_set_allocator(tandem_engine_options* options, uintptr_t number);

#endif /* TANDEM_GO_SHIM_H_ */
