// SPDX-License-Identifier: MIT
// Names that the pages leave to the reader: docs_commands_test.py puts this before each excerpt that it compiles.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tandem/tandem.h>

#define N_LAYERS 2
#define N_Q_HEADS 8

// As the CUDA runtime's header declares them.
typedef struct CUstream_st* cudaStream_t;
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
int cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
int cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
int cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
int cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);

#ifdef __cplusplus
// As ggml-backend.h declares them.
typedef struct ggml_backend_device* ggml_backend_dev_t;
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_ACCEL = 3 };
ggml_backend_dev_type ggml_backend_dev_type_of(ggml_backend_dev_t device);
ggml_backend_dev_t ggml_backend_dev_by_type(enum ggml_backend_dev_type type);
#define ggml_backend_dev_type(device) ggml_backend_dev_type_of(device) // the type and the function have one name there
extern ggml_backend_dev_t device_fused;
#endif

extern tandem_engine* engine;
extern tandem_cache* cache;
extern tandem_session* session;
extern tandem_error* error;
extern tandem_engine_options engine_options, options;
extern tandem_session_options session_options;
extern tandem_attend_args args;
extern tandem_tensor tensors[4];
extern int64_t sequence, sequences[4], loaded, q_len, q_lens[4], n;
extern int32_t i, n_layers, token, n_tokens;
extern void* pool;
extern FILE* file;
extern cudaStream_t stream;
extern cudaGraph_t graph;
extern cudaGraphExec_t replay, graph_exec;
