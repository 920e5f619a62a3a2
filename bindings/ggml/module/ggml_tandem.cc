// SPDX-License-Identifier: MIT
// libggml-tandem.so: a backend module of ggml with one device of type ACCEL, which computes FLASH_ATTN_EXT with Tandem.
//
// llama.cpp puts such devices before its CPU backend. The scheduler gives the device each node that it supports and whose
// tensors are in host memory, without copies. All other nodes stay where they are. docs/llama.cpp.md says how to load the
// module.
//
// Tandem leaves two kinds of nodes to ggml although it could compute them:
//
//   Few keys. A node of another backend ends one of ggml's parallel regions and starts another. Below kFewestPairs pairs of
//   tokens and keys, that costs more than attention by ggml.
//
//   The first graph of a context. With `-fa auto`, llama.cpp builds a graph to see whether flash attention runs on the
//   layers' device, here the CPU. If it does not, llama.cpp turns flash attention off. Later graphs have other numbers of
//   tokens. So after a context has opened the device, nodes over an allocated cache are refused until a second number of
//   tokens appears.
#include <ggml-backend-impl.h>
#include <ggml-impl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "attend_node.h"
#include "ggml_layout.h"
#include "lent_engine.h"

namespace tandem_ggml_module {
namespace {

constexpr int64_t kFewestPairs = 512;

// ---- backend: computes for a context of llama.cpp

struct Backend {
  LentEngines engines;
  int n_threads = 4;  // ggml's default, until the program sets another number
};

Backend& backend_of(ggml_backend_t backend) { return *static_cast<Backend*>(backend->context); }

const char* backend_name(ggml_backend_t) { return "TANDEM"; }

void free_backend(ggml_backend_t backend) {
  delete &backend_of(backend);
  delete backend;
}

void set_n_threads(ggml_backend_t backend, int n_threads) { backend_of(backend).n_threads = n_threads < 1 ? 1 : n_threads; }

int32_t attend(Backend& backend, const ggml_tensor& node, tandem_error** error) {
  tandem_engine* engine = nullptr;
  const int32_t status = backend.engines.find(&engine, backend.n_threads, error);
  if (status != TANDEM_OK) return status;
  const AttendNode call(node);
  return tandem_attend_tensors(engine, &call.args(), error);
}

ggml_status fail(const ggml_tensor& node, int32_t status, tandem_error* error) {
  GGML_LOG_ERROR("tandem: node %s: %s: %s\n", node.name, tandem_status_name(status), tandem_error_message(error));
  tandem_error_release(error);
  return status == TANDEM_ERROR_OUT_OF_MEMORY ? GGML_STATUS_ALLOC_FAILED : GGML_STATUS_FAILED;
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph* graph) {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor& node = *ggml_graph_node(graph, i);
    if (node.op != GGML_OP_FLASH_ATTN_EXT || (node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    tandem_error* error = nullptr;
    const int32_t status = attend(backend_of(backend), node, &error);
    if (status != TANDEM_OK) return fail(node, status, error);
  }
  return GGML_STATUS_SUCCESS;
}

ggml_guid_t guid() {
  static ggml_guid id = {0x9d, 0x1c, 0x5e, 0x27, 0xb4, 0x60, 0x4f, 0x8b, 0xa3, 0x72, 0x0e, 0xd8, 0x51, 0x96, 0xc4, 0x3f};
  return &id;
}

// ---- device: answers the scheduler's questions

// Tokens of the first graph of the last opened context. kNotYet: no graph so far; kOver: a second number has appeared.
constexpr int64_t kNotYet = 0, kOver = -1;
std::atomic<int64_t> first_tokens{kOver};

const char* device_name(ggml_backend_dev_t) { return "TANDEM"; }
const char* device_description(ggml_backend_dev_t) { return "attention by Tandem on the CPU"; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_memory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(device);
  props->description = device_description(device);
  props->type = device_type(device);
  props->caps.mmap_support = true;
}

ggml_backend_t open_backend(ggml_backend_dev_t device, const char*) {
  auto* state = new (std::nothrow) Backend;
  auto* backend = new (std::nothrow) ggml_backend{};
  if (state == nullptr || backend == nullptr) {
    delete state;
    delete backend;
    return nullptr;
  }
  backend->guid = guid();
  backend->iface.get_name = backend_name;
  backend->iface.free = free_backend;
  backend->iface.graph_compute = compute_graph;
  backend->device = device;
  backend->context = state;
  first_tokens = kNotYet;
  return backend;
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }
bool takes_buffers(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return ggml_backend_buft_is_host(type); }

// Returns $TANDEM_GGML_FEWEST_PAIRS, for tests and experiments, else kFewestPairs.
int64_t fewest_pairs() {
  static const int64_t fewest = [] {
    const char* given = std::getenv("TANDEM_GGML_FEWEST_PAIRS");
    return given == nullptr ? kFewestPairs : static_cast<int64_t>(std::strtoll(given, nullptr, 10));
  }();
  return fewest;
}

bool is_of_first_graph(const ggml_tensor& node) {
  const ggml_tensor &q = *node.src[0], &k = *node.src[1];
  if (first_tokens == kOver || k.view_src == nullptr || k.view_src->buffer == nullptr) return false;
  const int64_t n_tokens = q.ne[1] * q.ne[3];
  int64_t seen = kNotYet;
  if (first_tokens.compare_exchange_strong(seen, n_tokens) || seen == n_tokens) return true;
  first_tokens = kOver;
  return false;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    case GGML_OP_FLASH_ATTN_EXT:
      return !is_of_first_graph(*node) && node->src[0]->ne[1] * node->src[1]->ne[1] >= fewest_pairs() && can_attend(*node);
    default:
      return false;
  }
}

// ---- registration

const char* reg_name(ggml_backend_reg_t) { return "Tandem"; }
size_t device_count(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t device_of(ggml_backend_reg_t reg, size_t) {
  static ggml_backend_device device = [reg] {
    ggml_backend_device made = {};
    made.iface.get_name = device_name;
    made.iface.get_description = device_description;
    made.iface.get_memory = device_memory;
    made.iface.get_type = device_type;
    made.iface.get_props = device_props;
    made.iface.init_backend = open_backend;
    made.iface.get_buffer_type = buffer_type;
    made.iface.supports_op = supports_op;
    made.iface.supports_buft = takes_buffers;
    made.reg = reg;
    return made;
  }();
  return &device;
}

void* proc_address(ggml_backend_reg_t, const char* name) {
  return std::strcmp(name, "ggml_backend_set_n_threads") == 0 ? reinterpret_cast<void*>(set_n_threads) : nullptr;
}

}  // namespace
}  // namespace tandem_ggml_module

// ggml calls this after it has loaded the module. If it returns NULL, ggml continues without the module.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
  using namespace tandem_ggml_module;
  static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {reg_name, device_count, device_of, proc_address}, nullptr};
  const std::string mismatch = layout_mismatch(&reg);
  if (mismatch.empty()) return &reg;
  GGML_LOG_ERROR("%s\n", mismatch.c_str());
  return nullptr;
}
