/* SPDX-License-Identifier: MIT
 * A stand-in of ggml: exactly the names and members that the module of bindings/ggml/module uses, so that its logic can be
 * tested without ggml. Numbers and sizes are not ggml's. ggml never loads a module that is compiled with these headers. */
#ifndef STAND_IN_GGML_H_
#define STAND_IN_GGML_H_

#include <stddef.h>
#include <stdint.h>

#define GGML_MAX_DIMS 4
#define GGML_MAX_SRC 5

#ifdef __cplusplus
extern "C" {
#endif

enum ggml_type { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1 };
enum ggml_op {
  GGML_OP_NONE,
  GGML_OP_RESHAPE,
  GGML_OP_VIEW,
  GGML_OP_PERMUTE,
  GGML_OP_TRANSPOSE,
  GGML_OP_MUL_MAT,
  GGML_OP_FLASH_ATTN_EXT
};
enum ggml_status { GGML_STATUS_ALLOC_FAILED = -2, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS };
enum ggml_log_level { GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR };
#define GGML_TENSOR_FLAG_COMPUTE 16

struct ggml_backend_buffer;
struct ggml_tensor {
  enum ggml_type type;
  struct ggml_backend_buffer* buffer;
  int64_t ne[GGML_MAX_DIMS]; /* elements, innermost dimension first */
  size_t nb[GGML_MAX_DIMS];  /* strides in bytes; nb[0] is the size of a block */
  enum ggml_op op;
  int32_t op_params[16];
  int32_t flags;
  struct ggml_tensor* src[GGML_MAX_SRC];
  struct ggml_tensor* view_src;
  void* data;
  char name[64];
};
struct ggml_cgraph;
typedef uint8_t ggml_guid[16];
typedef ggml_guid* ggml_guid_t;

int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
const char* ggml_type_name(enum ggml_type type);
const char* ggml_op_name(enum ggml_op op);
size_t ggml_tensor_overhead(void);
const char* ggml_version(void);
const char* ggml_commit(void);
int ggml_graph_n_nodes(struct ggml_cgraph* graph);
struct ggml_tensor* ggml_graph_node(struct ggml_cgraph* graph, int i);

#ifdef __cplusplus
}
#endif
#endif /* STAND_IN_GGML_H_ */
