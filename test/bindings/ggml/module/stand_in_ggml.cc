// SPDX-License-Identifier: MIT
#include "stand_in_ggml.h"

#include <ggml-impl.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace stand_in_ggml {

State& state() {
  static State state;
  return state;
}

namespace {

struct Type {
  const char* name;
  int64_t block;
  size_t bytes;
};
const Type& type_of(ggml_type type) {
  static const Type types[] = {{"f32", 1, 4},    {"f16", 1, 2},    {"bf16", 1, 2},
                               {"q8_0", 32, 34}, {"q4_0", 32, 18}, {"q5_1", 32, 24}};
  return types[type];
}

ggml_backend_feature* features(ggml_backend_reg_t) {
  static ggml_backend_feature with[] = {{"AVX2", "1"}, {"OPENMP", "1"}, {nullptr, nullptr}};
  static ggml_backend_feature without[] = {{"AVX2", "1"}, {nullptr, nullptr}};
  return state().has_openmp ? with : without;
}
void* cpu_proc(ggml_backend_reg_t, const char* name) {
  return std::strcmp(name, "ggml_backend_get_features") == 0 ? reinterpret_cast<void*>(features) : nullptr;
}

}  // namespace
}  // namespace stand_in_ggml

using stand_in_ggml::state;
using stand_in_ggml::type_of;

extern "C" {
int64_t ggml_blck_size(ggml_type type) { return type_of(type).block; }
size_t ggml_type_size(ggml_type type) { return type_of(type).bytes; }
const char* ggml_type_name(ggml_type type) { return type_of(type).name; }
const char* ggml_op_name(ggml_op op) { return op == GGML_OP_FLASH_ATTN_EXT ? "FLASH_ATTN_EXT" : "another"; }
size_t ggml_tensor_overhead(void) { return 32 + sizeof(ggml_tensor); }
const char* ggml_version(void) { return state().version.c_str(); }
const char* ggml_commit(void) { return "c0ffee"; }
int ggml_graph_n_nodes(ggml_cgraph* graph) { return static_cast<int>(graph->nodes.size()); }
ggml_tensor* ggml_graph_node(ggml_cgraph* graph, int i) { return graph->nodes[static_cast<size_t>(i)]; }

void ggml_log_internal(ggml_log_level, const char* format, ...) {
  char line[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(line, sizeof line, format, values);
  va_end(values);
  state().log += line;
}

ggml_backend_reg_t ggml_backend_reg_by_name(const char* name) {
  static ggml_backend_reg cpu = {GGML_BACKEND_API_VERSION, {nullptr, nullptr, nullptr, stand_in_ggml::cpu_proc}, nullptr};
  return std::strcmp(name, "CPU") == 0 ? &cpu : nullptr;
}
void* ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char* name) {
  return reg->iface.get_proc_address(reg, name);
}
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device) {
  return state().moves_reg ? nullptr : device->reg;
}
ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t backend) { return backend->device; }
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void) {
  static char type;
  return reinterpret_cast<ggml_backend_buffer_type_t>(&type);
}
bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t type) { return type == ggml_backend_cpu_buffer_type(); }
}
