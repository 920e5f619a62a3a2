/* SPDX-License-Identifier: MIT
 * Part of the stand-in of ggml (see ggml.h): the tables that a backend fills in. */
#ifndef STAND_IN_GGML_BACKEND_IMPL_H_
#define STAND_IN_GGML_BACKEND_IMPL_H_

#include "ggml-backend.h"

#define GGML_BACKEND_API_VERSION 2

struct ggml_backend_i {
  const char* (*get_name)(ggml_backend_t backend);
  void (*free)(ggml_backend_t backend);
  enum ggml_status (*graph_compute)(ggml_backend_t backend, struct ggml_cgraph* graph);
};
struct ggml_backend {
  ggml_guid_t guid;
  struct ggml_backend_i iface;
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_device_i {
  const char* (*get_name)(ggml_backend_dev_t device);
  const char* (*get_description)(ggml_backend_dev_t device);
  void (*get_memory)(ggml_backend_dev_t device, size_t* free, size_t* total);
  enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t device);
  void (*get_props)(ggml_backend_dev_t device, struct ggml_backend_dev_props* props);
  ggml_backend_t (*init_backend)(ggml_backend_dev_t device, const char* params);
  ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t device);
  bool (*supports_op)(ggml_backend_dev_t device, const struct ggml_tensor* node);
  bool (*supports_buft)(ggml_backend_dev_t device, ggml_backend_buffer_type_t type);
};
struct ggml_backend_device {
  struct ggml_backend_device_i iface;
  ggml_backend_reg_t reg;
  void* context;
};

struct ggml_backend_reg_i {
  const char* (*get_name)(ggml_backend_reg_t reg);
  size_t (*get_device_count)(ggml_backend_reg_t reg);
  ggml_backend_dev_t (*get_device)(ggml_backend_reg_t reg, size_t index);
  void* (*get_proc_address)(ggml_backend_reg_t reg, const char* name);
};
struct ggml_backend_reg {
  int api_version;
  struct ggml_backend_reg_i iface;
  void* context;
};

#endif /* STAND_IN_GGML_BACKEND_IMPL_H_ */
