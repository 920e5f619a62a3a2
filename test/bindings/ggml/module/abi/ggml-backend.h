/* SPDX-License-Identifier: MIT
 * Part of the stand-in of ggml (see ggml.h): the functions of backends that programs call. */
#ifndef STAND_IN_GGML_BACKEND_H_
#define STAND_IN_GGML_BACKEND_H_

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ggml_backend* ggml_backend_t;
typedef struct ggml_backend_buffer_type* ggml_backend_buffer_type_t;
typedef struct ggml_backend_device* ggml_backend_dev_t;
typedef struct ggml_backend_reg* ggml_backend_reg_t;

enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_ACCEL };
struct ggml_backend_dev_caps {
  bool mmap_support;
};
struct ggml_backend_dev_props {
  const char* name;
  const char* description;
  enum ggml_backend_dev_type type;
  struct ggml_backend_dev_caps caps;
};
struct ggml_backend_feature {
  const char* name;
  const char* value;
};
typedef struct ggml_backend_feature* (*ggml_backend_get_features_t)(ggml_backend_reg_t reg);
typedef void (*ggml_backend_set_n_threads_t)(ggml_backend_t backend, int n_threads);

ggml_backend_reg_t ggml_backend_reg_by_name(const char* name);
void* ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char* name);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t backend);
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t type);

#ifdef __cplusplus
}
#endif
#endif /* STAND_IN_GGML_BACKEND_H_ */
