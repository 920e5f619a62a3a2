/* SPDX-License-Identifier: MIT
 *
 * Tandem: attention over key/value caches larger than the GPU.
 *
 * Softmax attention over a set of keys gives a state (o, lse): the output normalised within the set
 * and the natural log of the sum of exp of its logits. States over disjoint sets merge exactly, so
 * each part of a cache is attended where its keys are. An engine owns the processors, and a model
 * describes the layers. A cache holds the keys and values of many sequences. A session says how a
 * cache is attended. tandem_attend() is the central call.
 *
 * These rules hold for every function unless its comment says otherwise:
 *
 *   Errors    A function returns TANDEM_OK or a negative status. The last parameter may be NULL;
 *             otherwise *error is NULL after success, and after a failure an object that the caller
 *             releases. A failing call changes nothing. TANDEM_ERROR_INVALID_HANDLE,
 *             _INVALID_ARGUMENT (NULL, alignment, struct_size, range) and, in a child after fork(),
 *             _INVALID_STATE may come from every call that returns a status and are not repeated
 *             below.
 *   Threads   Engine, model and weights: any thread, at any time. Cache: any thread; a writer lock
 *             serialises changes. Session: one thread at a time. A second one gets INVALID_STATE.
 *             Functions without any of these: any thread. The library leaves the caller's affinity,
 *             signal mask, floating-point mode and locale as they are. Signal handlers may run
 *             during a call; a matrix product may delay a signal by some milliseconds. The library
 *             prints nothing, and no C++ exception leaves a call. Nothing ends the process, except
 *             libraries below that lack memory (tandem-memory(7)).
 *   Structs   The first member is struct_size = sizeof the struct. tandem_*_init() and
 *             TANDEM_*_INIT fill in defaults. Zero means default; where zero is a value of its own,
 *             -1 is the default. New versions add members only at the end. A larger struct than the
 *             library knows is accepted if the rest is zero. Reserved members are zero.
 *   Pointers  Results come first in a parameter list: tandem_engine_create(&engine, ...). Every
 *             pointer is aligned to the type it points to. The error names a pointer that is not;
 *             where `error` itself is misaligned, only the status says so.
 *   Memory    Options, arrays and names are copied before a call returns. The library uses tensors
 *             until the call returns (host) or until the stream has passed the call (device).
 *             Output tensors may not overlap inputs or each other.
 *   Units     Lengths are tokens, sizes bytes (_bytes), times nanoseconds (_ns), strides elements.
 *   Streams   `stream` is a CUDA stream as void *, for tensors in device memory (NULL: the legacy
 *             default stream); for tensors in host memory it is NULL, and a call has finished when
 *             it returns. Functions without it take tensors in host memory. On a device a call
 *             returns once its work is enqueued, or waits for the device as tandem-streams(7) says.
 *             The caller orders calls of one session: by one stream, or by events between streams.
 *   Version   Everything here came with 0.2 unless a comment says otherwise. Programs and bindings
 *             for 0.1 must be compiled again (CHANGELOG.md).
 *
 * Include this file only. At its end it includes tensors.h (attention over the caller's own K and
 * V), weights.h (projections, offloaded weights), selection.h (keys that the caller names),
 * pruning.h, patterns.h, saving.h (sequences to files) and plan.h (memory, routes, what is
 * supported, statistics). The same rules hold for them. */
#ifndef TANDEM_TANDEM_H_
#define TANDEM_TANDEM_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TANDEM_API
#else
#define TANDEM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version ------------------------------------------------------------------------------ */

#define TANDEM_VERSION_MAJOR 0
#define TANDEM_VERSION_MINOR 2
#define TANDEM_VERSION_PATCH 0
#define TANDEM_VERSION_AT_LEAST(major, minor, patch)                                            \
  (TANDEM_VERSION_MAJOR * 65536 + TANDEM_VERSION_MINOR * 256 + TANDEM_VERSION_PATCH >=          \
   (major) * 65536 + (minor) * 256 + (patch))
/* Version of the loaded library: major << 16 | minor << 8 | patch. */
TANDEM_API uint32_t tandem_version(void);

/* Hash over size and member offsets of every public struct as of minor version `minor` of this
 * major version; 0 if that is unknown. A binding compares it with the value it was generated for.
 */
TANDEM_API uint64_t tandem_abi_fingerprint(uint32_t minor);

/* ---- status and error --------------------------------------------------------------------- */

#define TANDEM_OK 0
#define TANDEM_ERROR_INVALID_ARGUMENT -1 /* out of range, NULL, misaligned, overlapping,
                                          * inconsistent */
#define TANDEM_ERROR_INVALID_HANDLE -2   /* no live handle of this kind: NULL, released, foreign */
#define TANDEM_ERROR_INVALID_STATE -3    /* an open step, uneven layers, a session in use, after
                                          * fork */
#define TANDEM_ERROR_UNSUPPORTED -4      /* valid, but this build or machine cannot do it */
#define TANDEM_ERROR_OUT_OF_MEMORY -5    /* the system or the caller's allocator refused memory */
#define TANDEM_ERROR_CAPACITY -6         /* a cap or a declared maximum would be exceeded */
#define TANDEM_ERROR_BUSY -7             /* a call, a step or a save has the sequence in flight */
#define TANDEM_ERROR_NOT_FOUND -8        /* no such sequence, policy, instruction set or backend */
#define TANDEM_ERROR_CANCELLED -9        /* the caller's flag or callback stopped the call */
#define TANDEM_ERROR_TIMEOUT -10         /* the given time has passed */
#define TANDEM_ERROR_DEVICE_LOST -11     /* the device failed; tokens not yet on the host are
                                          * gone */
#define TANDEM_ERROR_BACKEND -12         /* a requested backend module could not be used */
#define TANDEM_ERROR_IO -13              /* a file operation failed */
#define TANDEM_ERROR_CORRUPT -14         /* a file or a buffer is not what it claims to be */
#define TANDEM_ERROR_SYSTEM -15          /* the operating system refused something else */
#define TANDEM_ERROR_INTERNAL -16        /* a bug in Tandem */

typedef struct tandem_error tandem_error;

/* "TANDEM_ERROR_BUSY"; "unknown status" for values that this version does not know. */
TANDEM_API const char *tandem_status_name(int32_t status);
/* One line with the field and its value, e.g. "tandem_cache_create: k_type = 99 is not a storage
 * type". Valid until release; "" for NULL. */
TANDEM_API const char *tandem_error_message(const tandem_error *error);
/* The refused field, named as the call's parameter or the struct's member ("sequences",
 * "q.shape[0]"); "process" in a child after fork(); "" for none, as without memory. Valid until
 * release. */
TANDEM_API const char *tandem_error_field(const tandem_error *error);
/* The status that the failing call returned; TANDEM_OK for NULL. */
TANDEM_API int32_t tandem_error_status(const tandem_error *error);
/* errno, a CUDA result or another code of the layer below; 0 if there is none. */
TANDEM_API int64_t tandem_error_underlying(const tandem_error *error);
/* Releases an error and its texts. Accepts NULL. */
TANDEM_API void tandem_error_release(tandem_error *error);

/* ---- tensor ------------------------------------------------------------------------------- */

/* Element types of tensors and storage types of caches. Queries, outputs and states are f32, f16 or
 * bf16. K and V may have any type except Q4_64, in which a cache keeps hidden states only (x_type).
 * A tensor of codes has rows of blocks, laid out as in ggml. Its last dimension and its other
 * strides are multiples of a block's elements. tandem-types(7) says how numbers are rounded. */
#define TANDEM_F32 1
#define TANDEM_F16 2
#define TANDEM_BF16 3
#define TANDEM_E4M3 4  /* 8-bit floats without infinities (OCP fp8 e4m3fn): numbers that round to
                        * more than 448 become NaN */
#define TANDEM_Q8_0 5  /* 8-bit codes with an f16 scale: blocks of 34 bytes for 32 elements */
#define TANDEM_Q4_0 6  /* 4-bit codes with an f16 scale: blocks of 18 bytes for 32 elements */
#define TANDEM_Q4_64 7 /* 4-bit codes with an f16 scale and an f16 minimum: blocks of 36 bytes for
                        * 64 elements */
#define TANDEM_I32 16 /* signed integers, only for tandem_selection.idx: not a type of rows */
/* "f32", "q8_0", ...; NULL if dtype is no type of rows. These have numbers from 1 without gaps. */
TANDEM_API const char *tandem_dtype_name(int32_t dtype);
/* Bytes that a cache keeps for head_dim elements of K, V or hidden states, scales included; 0 if
 * dtype is not a type of rows or head_dim is not a length. */
TANDEM_API int64_t tandem_dtype_row_bytes(int32_t dtype, int32_t head_dim);

#define TANDEM_DEVICE_HOST 0
#define TANDEM_DEVICE_CUDA 1

/* A strided view that owns nothing. The last dimension is contiguous (its stride is 1). Other
 * strides are positive and at least what the inner dimensions need. data is aligned to its element
 * type. Dimensions of length 0 are allowed. */
typedef struct tandem_tensor {
  uint32_t struct_size;
  int32_t dtype;        /* TANDEM_F32, ... */
  int32_t device_type;  /* TANDEM_DEVICE_HOST, ... */
  int32_t device_index; /* 0 for the host */
  void *data;           /* the library never writes to inputs */
  int32_t n_dims;       /* 1 to 4 */
  int32_t reserved;
  int64_t shape[4];     /* elements */
  int64_t stride[4];    /* elements */
} tandem_tensor;

/* Fills *tensor as a contiguous host tensor of n_dims dimensions. shape: [n_dims]. */
TANDEM_API int32_t tandem_tensor_init(tandem_tensor *tensor, int32_t dtype, void *data,
                                      int32_t n_dims, const int64_t *shape, tandem_error **error);

/* ---- engine ------------------------------------------------------------------------------- */

typedef struct tandem_engine tandem_engine;

#define TANDEM_LOG_ERROR 1
#define TANDEM_LOG_WARNING 2
#define TANDEM_LOG_INFO 3

/* level: TANDEM_LOG_ERROR, ... Threads of the caller and of the library call it. It must not call
 * the library. */
typedef void (*tandem_log_fn)(int32_t level, const char *message, void *user);
/* Returns `bytes` bytes aligned to `alignment` (a power of two), or NULL. */
typedef void *(*tandem_alloc_fn)(size_t bytes, size_t alignment, void *user);
typedef void (*tandem_free_fn)(void *data, size_t bytes, void *user);
/* Runs tasks on the caller's threads: calls task(i, context) once for each i from 0 to n_tasks - 1,
 * and returns when all calls have returned. It runs as many calls at a time as it has threads. No
 * task waits for another one, so one thread is enough. Threads of the caller and of the library
 * call it, one at a time. n_tasks is at most n_threads. Must not fail, throw or call the library.
 */
typedef void (*tandem_task_fn)(int64_t task_idx, void *context);
typedef void (*tandem_run_fn)(int64_t n_tasks, tandem_task_fn task, void *context, void *user);

typedef struct tandem_engine_options {
  uint32_t struct_size;
  int32_t n_threads;        /* CPU workers, the calling thread included; 0: affinity mask and cgroup
                             * quota decide, and with a backend one CPU of four or more is left to
                             * the program */
  const char *cpu_isa;      /* "amx", "avx3_dl", "avx3", "avx2", ...: exactly this one; NULL:
                             * $TANDEM_CPU_ISA, else the best. "amx" asks Linux for AMX's state: the
                             * sigaltstack() of every thread then needs 8 KiB more */
  const char *backend;      /* device backend, "cuda": libtandem-cuda.so must load and find a usable
                             * device; NULL: none, the CPU does everything. It is looked for in the
                             * folders of $TANDEM_BACKEND_PATH (absolute, colons between, ignored
                             * when setuid), beside libtandem, and in the folder set at build time,
                             * never in the working directory */
  const char *backend_path; /* absolute path of the only file to try; NULL: the folders above */
  tandem_alloc_fn alloc;    /* allocates host memory of caches and sessions, which stays on the NUMA
                             * nodes where it is or is first written; NULL: huge-page-friendly
                             * mappings, each KV head's on the node of its workers */
  tandem_free_fn free;      /* required with alloc */
  void *alloc_user;
  tandem_log_fn log;        /* NULL: silent */
  void *log_user;
  int64_t spin_ns;          /* how long idle workers spin before they sleep; -1: default (50 us);
                             * 0: never */
  int32_t pin_threads;      /* -1: default (1): bind each worker to a core; 0: the system decides */
  int32_t matmul_rows;      /* query rows (q_len * query heads) of a KV head from which a call uses
                             * matrix products, a decode call too. These may round weights to bf16
                             * where queries and V are bf16. 0: from a table, by instruction set, so
                             * that every process gets the same bits; -1 measures it (some ms) */
  tandem_run_fn run;        /* NULL: the engine starts workers. Else run() does the CPU's work on
                             * the caller's threads, so that no second pool competes for the cores.
                             * n_threads must say how many, and pin_threads is not 1. Memory is then
                             * placed on no particular NUMA node. The library keeps one thread,
                             * which makes selections and sleeps while there are none */
  void *run_user;           /* passed to run(); NULL without it */
} tandem_engine_options;
#define TANDEM_ENGINE_OPTIONS_INIT \
  { sizeof(tandem_engine_options), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, -1, -1, 0, \
    NULL, NULL }
TANDEM_API void tandem_engine_options_init(tandem_engine_options *options);

/* Starts the CPU pool, and loads the device backend if one is named. options may be NULL. Starts
 * threads; allocates. Errors: NOT_FOUND (cpu_isa: unknown, or not on this processor), BACKEND (no
 * module loads: every path tried, with its reason; or no usable device), SYSTEM (a thread could not
 * be started; sched_getaffinity is refused, as by a sandbox), OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_engine_create(tandem_engine **engine,
                                        const tandem_engine_options *options, tandem_error **error);
/* Gives up the caller's reference; caches and sessions keep the engine alive. Accepts NULL, never
 * fails and never waits for a device. Later calls refuse a released handle. */
TANDEM_API void tandem_engine_release(tandem_engine *engine);
/* Waits until calls on device tensors of all sessions have reached the host, released sessions have
 * given their memory back, and background work has finished. A planned step counts from its
 * tandem_step_end() on. Does not wait for other work on the streams. timeout_ns < 0: no limit.
 * Errors: TIMEOUT. */
TANDEM_API int32_t tandem_engine_drain(tandem_engine *engine, int64_t timeout_ns,
                                       tandem_error **error);
/* Topology, workers, instruction set and backends (with the reason for each refusal) as JSON.
 * Writes at most buffer_bytes bytes, 0-terminated if buffer_bytes > 0. *needed_bytes (may be NULL)
 * gets the full size, the 0 included. */
TANDEM_API int32_t tandem_engine_report(char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                                        const tandem_engine *engine, tandem_error **error);

/* ---- model -------------------------------------------------------------------------------- */

typedef struct tandem_model tandem_model;

#define TANDEM_ROPE_CALLER 0      /* the library uses keys and queries as they arrive */
#define TANDEM_ROPE_HALVES 1      /* the library rotates at attend time: dim i pairs with i +
                                   * rope_dims / 2 */
#define TANDEM_ROPE_INTERLEAVED 2 /* the same, but dim 2 i pairs with 2 i + 1 */

/* Geometry of one layer. logit(q, k) = cap(sm_scale * q.k); cap(x) = soft_cap * tanh(x / soft_cap)
 * if soft_cap > 0, else x. With library RoPE the angle of pair i at position p is (p /
 * rope_position_scale) * f_i, f_i = rope_inv_freq[i] or rope_theta^(-2 i / rope_dims). Rotated
 * vectors are multiplied by rope_attn_factor. */
typedef struct tandem_layer_options {
  uint32_t struct_size;
  int32_t n_q_heads;             /* a multiple of n_kv_heads */
  int32_t n_kv_heads;            /* = n_q_heads: MHA; 1: MQA */
  int32_t k_head_dim;            /* 64, 80, 96, 112, 128, 192, 256; or 576 with v_aliases_k and
                                  * v_head_dim 512 (MLA) */
  int32_t v_head_dim;            /* the same lengths, or 512 (MLA); 0: k_head_dim */
  int32_t v_aliases_k;           /* 1: V is the first v_head_dim dims of K, stored and read once */
  float sm_scale;                /* 0: 1 / sqrt(k_head_dim) */
  float soft_cap;                /* 0: off */
  int64_t sliding_window_tokens; /* 0: off; else a query at position p sees keys at positions above
                                  * p - sliding_window_tokens */
  const float *sinks;            /* [n_q_heads] learned sink logits, merged once as state (0,
                                  * logit); NULL: none */
  int32_t rope;                  /* TANDEM_ROPE_* */
  int32_t rope_dims;             /* rotated leading dims, even; 0: k_head_dim */
  double rope_theta;             /* 0: 10000 */
  double rope_position_scale;    /* 0: 1 */
  const float *rope_inv_freq;    /* [rope_dims / 2]; NULL: from rope_theta */
  double rope_attn_factor;       /* 0: 1 */
  const struct tandem_layer_projection *projection; /* weights.h; NULL: the device cannot make K and
                                                     * V from hidden states */
} tandem_layer_options;
#define TANDEM_LAYER_OPTIONS_INIT \
  { sizeof(tandem_layer_options), 0, 0, 0, 0, 0, 0.0f, 0.0f, 0, NULL, 0, 0, 0.0, 0.0, NULL, 0.0, \
    NULL }
TANDEM_API void tandem_layer_options_init(tandem_layer_options *options);

/* layers: [n_layers], each with its own struct_size (all equal). Errors: INVALID_ARGUMENT (the
 * layer and member), UNSUPPORTED (a head_dim or combination without kernels, with the reason). */
TANDEM_API int32_t tandem_model_create(tandem_model **model, const tandem_layer_options *layers,
                                       int32_t n_layers, tandem_error **error);
TANDEM_API void tandem_model_release(tandem_model *model); /* as tandem_engine_release() */

/* ---- cache and its sequences -------------------------------------------------------------- */

typedef struct tandem_cache tandem_cache;

/* Rotation of keys by the Walsh-Hadamard matrix before they are rounded. Queries are rotated too,
 * so q.k stays the same. 4-bit keys then lose less (QuaRot, 2024). tandem-types(7) says which
 * layers cannot be rotated, and what else changes. */
#define TANDEM_ROTATION_DEFAULT 0  /* rotates keys stored as q4_0, in layers that can be rotated */
#define TANDEM_ROTATION_HADAMARD 1 /* UNSUPPORTED if k_head_dim is no power of two, the library
                                    * applies RoPE, or V aliases K */
#define TANDEM_ROTATION_NONE 2

typedef struct tandem_cache_options {
  uint32_t struct_size;
  int32_t k_type;               /* storage type of keys, not q4_64; 0: TANDEM_BF16 */
  int32_t v_type;               /* storage type of values, not q4_64; 0: k_type */
  int32_t page_tokens;          /* tokens in a page, a power of two from 16 to 4096; 0: 128 */
  int64_t host_cap_bytes;       /* hard cap on pages, MAW and selections in host memory (not on work
                                 * space); 0: none */
  int64_t device_cap_bytes;     /* hard cap on windows, buffers and work space in device memory (the
                                 * driver's page tables are not counted); 0: none */
  const int32_t *layer_k_types; /* [n_layers] or NULL: overrides k_type per layer */
  const int32_t *layer_v_types; /* [n_layers] or NULL: overrides v_type per layer */
  int32_t k_rotation;           /* TANDEM_ROTATION_*; rotation of keys before rounding, in all
                                 * layers */
  int32_t x_type;               /* the cache keeps hidden states in this type, for layers with a
                                 * projection, and every append brings them: f16, bf16; q8_0, q4_0,
                                 * q4_64 if hidden_dim is a multiple of 64; 0: none are kept */
} tandem_cache_options;
#define TANDEM_CACHE_OPTIONS_INIT \
  { sizeof(tandem_cache_options), 0, 0, 0, 0, 0, NULL, NULL, 0, 0 }
TANDEM_API void tandem_cache_options_init(tandem_cache_options *options);

/* Creates an empty cache. Memory is taken as sequences grow. Errors: UNSUPPORTED (storage type,
 * rotation of keys, x_type), CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_cache_create(tandem_cache **cache, tandem_engine *engine,
                                       const tandem_model *model,
                                       const tandem_cache_options *options, tandem_error **error);
TANDEM_API void tandem_cache_release(tandem_cache *cache); /* as tandem_engine_release() */

/* A sequence has an id. A cache never uses an id twice. The functions below return NOT_FOUND for an
 * unknown or dropped id, and BUSY while the sequence is in flight (tandem-errors(7)). Where a
 * sequence must be even (every layer of the same length), they return INVALID_STATE and name the
 * layer. The state that sessions keep of a sequence (MAW, selections, window) follows each change.
 * A fork gets a copy of that state in every session. */

/* Creates an empty sequence. Errors: OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_create(int64_t *sequence, tandem_cache *cache,
                                          tandem_error **error);
/* *fork gets the same tokens. Both sequences share pages; a page is copied when one of them writes
 * to it. A page that is not full is copied at once. Errors: INVALID_STATE (the sequence is uneven),
 * CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_fork(int64_t *fork, tandem_cache *cache, int64_t sequence,
                                        tandem_error **error);
/* Removes a sequence. The cache reuses pages that no other sequence shares; tandem_cache_trim()
 * gives their memory back. */
TANDEM_API int32_t tandem_sequence_drop(tandem_cache *cache, int64_t sequence,
                                        tandem_error **error);
/* Reserves memory for n_tokens more tokens in every layer and every attached session. Appends use
 * the reservation up. A truncation, or a removal of the last tokens, gives it back. Until then no
 * append fails for lack of host memory, whatever other sequences and sessions take (calls on device
 * tensors: tandem-device(7)). A session that is created later reserves for these tokens too, or is
 * refused. An open step reserves its tokens in the same way. Pages are address space until they are
 * written: on a system that promises more memory than it has, only host_cap_bytes keeps the process
 * within it. Errors: CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_reserve(tandem_cache *cache, int64_t sequence, int64_t n_tokens,
                                           tandem_error **error);
/* Keeps the first n_tokens tokens of every layer, and drops all speculative tokens. An uneven
 * sequence becomes even. */
TANDEM_API int32_t tandem_sequence_truncate(tandem_cache *cache, int64_t sequence, int64_t n_tokens,
                                            tandem_error **error);
/* Removes tokens [first, first + n_tokens). shift_positions = 1 moves the positions of later tokens
 * down by n_tokens; 0 keeps them. Errors: UNSUPPORTED (shift_positions = 1, and the caller rotates
 * the keys of a layer: these keys carry their position). */
TANDEM_API int32_t tandem_sequence_remove(tandem_cache *cache, int64_t sequence, int64_t first,
                                          int64_t n_tokens, int32_t shift_positions,
                                          tandem_error **error);
/* Appends k: [n_tokens, n_kv_heads, k_head_dim] and v: [n_tokens, n_kv_heads, v_head_dim] (any
 * type; v NULL if it aliases k) to one layer without attending. Numbers are rounded once to the
 * storage type, to nearest even (see TANDEM_Q8_0, TANDEM_Q4_0). stream is NULL. Tensors in device
 * memory are UNSUPPORTED: tandem_attend() appends those. Errors: CAPACITY, OUT_OF_MEMORY (all is as
 * before the call), INVALID_STATE (speculative tokens pending). */
TANDEM_API int32_t tandem_sequence_append(tandem_cache *cache, int64_t sequence, int32_t layer_idx,
                                          const tandem_tensor *k, const tandem_tensor *v,
                                          void *stream, tandem_error **error);
/* Reads tokens [first, first + shape[0]) of one layer, as stored. k and v have the shapes of
 * tandem_sequence_append(); either may be NULL. Rotated keys are rotated back, in f32. */
TANDEM_API int32_t tandem_sequence_read(const tandem_tensor *k, const tandem_tensor *v,
                                        const tandem_cache *cache, int64_t sequence,
                                        int32_t layer_idx, int64_t first, tandem_error **error);
/* Number of committed tokens in one layer. Speculative tokens do not count. */
TANDEM_API int32_t tandem_sequence_length(int64_t *n_tokens, const tandem_cache *cache,
                                          int64_t sequence, int32_t layer_idx,
                                          tandem_error **error);
/* Hash of the lengths, positions and stored bytes of every layer, hidden states included. Equal
 * content gives an equal hash, whichever pages hold it. */
TANDEM_API int32_t tandem_sequence_digest(uint64_t *digest, const tandem_cache *cache,
                                          int64_t sequence, tandem_error **error);

/* ---- session ------------------------------------------------------------------------------ */

typedef struct tandem_session tandem_session;

/* How a cache is attended. Most programs need only the members up to append_tokens; other defaults
 * suit nearly every program. tandem-policies(7) says which keys a policy attends. tandem-routes(7)
 * says who attends the keys outside the window on device tensors, and how long appends are cut. */
typedef struct tandem_session_options {
  uint32_t struct_size;
  int32_t sleep_between_calls;   /* 1: in a step without a stream the CPU workers sleep between
                                  * calls, after they have spun for spin_ns. Use it if the program's
                                  * own threads compute on the same cores between calls, as
                                  * PyTorch's do. 0: they spin until the step ends */
  const char *policy;            /* NULL: "all"; or "streaming", "hgca", "hip", "patterns": which
                                  * keys outside the window are attended */
  int64_t window_tokens;         /* newest tokens, always attended, resident on the device; -1:
                                  * 4096; 0: none. It does not change which keys "all" attends with
                                  * host tensors. Under "hip" it only says where keys are: calls on
                                  * device tensors need it as long as the longest sequence */
  int64_t sink_tokens;           /* first tokens, always attended; -1: 64; 0: none. Not used under
                                  * "hip": its records have their own */
  const char *route;             /* NULL: "auto"; or "host", "stream", "host+stream", "recompute":
                                  * who attends the keys outside the window, for device tensors */
  int64_t append_tokens;         /* most tokens of an append that are attended together: at most
                                  * 32768, in layers of policy "hip" 2048; 0: 16384, and memory
                                  * plans have room for single queries only, else for appends of
                                  * append_tokens */
  const char *const *layer_policies; /* names of policies, one for each layer; NULL: policy is for
                                      * all layers. Use "all" where a layer's attention spreads over
                                      * many keys */
  int64_t n_layer_policies;      /* number of layers in the model; 0 with NULL */
  float alpha;                   /* "hgca": MAW factor in (0, 1]; 0: 0.3 */
  float beta;                    /* "hgca": MAW threshold factor, >= 0; -1: 1 */
  int64_t halo_tokens;           /* "hgca": keys kept after a strongly attended one; -1: 128; 0:
                                  * none, as in the paper */
  int64_t stream_buffer_bytes;   /* size of each buffer through which keys, or hidden states in 16
                                  * bits, cross the bus; 0: 16 MiB */
  double stream_fraction;        /* share of the keys outside the window that crosses the bus, 0 to
                                  * 1, for route "host+stream" alone; -1: not given */
  int64_t stream_heads;          /* most KV heads that are streamed at a time; 0: as many as take
                                  * the least time */
  double recompute_share;        /* share of the keys outside the window that the device makes from
                                  * hidden states, in (0, 1]; with route "recompute"; 0: 1 */
  const uint8_t *streaming_heads; /* flags of the KV heads of all layers, layer by layer; 1: the
                                   * head's queries see the first sink_tokens and the newest
                                   * window_tokens up to their own; NULL: none. For policy "all" */
  int64_t n_streaming_heads;     /* number of KV heads in all layers; 0 with NULL */
  int64_t selection_indices;     /* most indices of a tandem_selection, per query and KV head, that
                                  * planned steps have room for; 0: calls of planned steps name no
                                  * keys. With it the CPU starts on a layer when its queries arrive,
                                  * not with the step, as only they bring the keys */
  const struct tandem_pruning *pruning; /* what policy "hip" prunes (pruning.h); NULL: its defaults;
                                         * INVALID_ARGUMENT if no layer has that policy. Read when
                                         * the session is created */
  const struct tandem_patterns *patterns; /* what heads attend under policy "patterns" (patterns.h);
                                           * NULL under others */
} tandem_session_options;
#define TANDEM_SESSION_OPTIONS_INIT \
  { sizeof(tandem_session_options), 0, NULL, -1, -1, NULL, 0, NULL, 0, 0.0f, -1.0f, -1, 0, -1.0, \
    0, 0.0, NULL, 0, 0, NULL, NULL }
TANDEM_API void tandem_session_options_init(tandem_session_options *options);

/* Creates a session. Several sessions may read one cache. If the engine has a device, it must be
 * able to attend every layer, even if the session gets only host tensors; the error names the
 * layer, its types and dims, and what the module lacks. Errors: NOT_FOUND (policy, route),
 * UNSUPPORTED (policy and model; a layer that the device cannot attend; more than 2048 layers with
 * a device; a route that streams without a device, or with a policy that does not attend all keys;
 * "recompute" without a projection, hidden states or cuBLAS, or with streaming_heads), CAPACITY and
 * OUT_OF_MEMORY (no room for the session's state of reserved tokens), INVALID_ARGUMENT
 * (stream_buffer_bytes too small for 64 tokens of a KV head, or with "recompute" for 128 hidden
 * states in 16 bits; stream_fraction or recompute_share without its route, or "host+stream" without
 * stream_fraction; streaming_heads of a layer with a sliding window). */
TANDEM_API int32_t tandem_session_create(tandem_session **session, tandem_cache *cache,
                                         const tandem_session_options *options,
                                         tandem_error **error);
/* Accepts NULL, never fails. An open planned step is taken back. After an open step on host tensors
 * each layer keeps the tokens that it got. Does not wait for the device: a thread of the library
 * gives the session's memory back once the device no longer uses it. Until then the session counts
 * in the cache's statistics and caps, and reads of its sequences wait. Where no call is under way
 * the memory is back on return, unless the device is busy with other work for more than 100 ms.
 * Call tandem_engine_drain() before a stream is captured, as CUDA may not free memory meanwhile. */
TANDEM_API void tandem_session_release(tandem_session *session);

/* ---- attend ------------------------------------------------------------------------------- */

#define TANDEM_ATTEND_SPECULATIVE 1u /* the appended tokens are a guess, kept apart until
                                      * tandem_session_commit() */
#define TANDEM_ATTEND_PARTIAL 2u     /* other chunks follow each append of the call: "hgca" judges
                                      * no key after it; not with SPECULATIVE */

/* Says how much of a call is done, `total` at its end, in units of no fixed size. Called from the
 * thread that made the call. It must return: no longjmp, no exception. It must not call the library
 * for this session or engine. A result other than 0 stops the call. */
typedef int32_t (*tandem_progress_fn)(int64_t done, int64_t total, void *user);

/* One layer, several sequences. Their tokens stand one after another in q, k, v and o:
 *   q    [n_tokens, n_q_heads, k_head_dim]     with n_tokens = sum of q_lens
 *   k    [n_tokens, n_kv_heads, k_head_dim]
 *   v    [n_tokens, n_kv_heads, v_head_dim]
 *   o    [n_tokens, n_q_heads, v_head_dim]
 *   lse  [n_tokens, n_q_heads], f32
 *   x    [n_tokens, hidden_dim], f32, f16 or bf16, if the layer keeps hidden states
 * With k and v NULL nothing is appended, and the queries are the last q_len tokens of the sequence.
 * q and o are f32, f16 or bf16; k and v have any type; types may differ. Queries see keys up to
 * their own token (causal at the end of the sequence). parent_idx [n_tokens] makes the appended
 * tokens a tree: a token sees the tokens before the call and its own ancestors. Positions are
 * depths: children of one token share theirs. parent_idx counts within the token's sequence in this
 * call. It is smaller than the token's own index, and -1 for a child of the last token before. */
typedef struct tandem_attend_args {
  uint32_t struct_size;
  uint32_t flags;                /* TANDEM_ATTEND_* */
  int32_t layer_idx;
  int32_t n_sequences;
  const int64_t *sequences;      /* [n_sequences], each once */
  const int64_t *q_lens;         /* [n_sequences], >= 0 */
  const tandem_tensor *q;
  const tandem_tensor *k;
  const tandem_tensor *v;
  const tandem_tensor *o;        /* written */
  const tandem_tensor *lse;      /* written; NULL: not wanted */
  const int32_t *parent_idx;     /* [n_tokens] or NULL; with TANDEM_ATTEND_SPECULATIVE only */
  void *stream;
  const int32_t *cancel;         /* NULL, or a flag that any thread may set (atomically) during the
                                  * call: a value other than 0 stops it. A call may miss a flag that
                                  * is cleared again before it returns */
  tandem_progress_fn progress;   /* NULL: not wanted */
  void *progress_user;
  const tandem_tensor *x;        /* hidden states of the appended tokens, or NULL */
  const struct tandem_selection *selection; /* selection.h: the keys that queries attend, or NULL:
                                             * those of the session's policy. Only in layers of
                                             * policy "all" without streaming heads */
} tandem_attend_args;
#define TANDEM_ATTEND_ARGS_INIT \
  { sizeof(tandem_attend_args), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
    NULL, NULL, NULL, NULL, NULL }
TANDEM_API void tandem_attend_args_init(tandem_attend_args *args);

/* Appends k and v, then computes o = softmax(logits) V over the keys that the policy selects, and
 * lse. K and V are read once per KV head. Logits, sums and lse are f32; weights too, except where
 * matmul_rows says otherwise. NaN or Inf in q, k or v reaches only the rows that see it. It becomes
 * NaN there; Inf in v may stay Inf, and a logit of -inf may count as no key. A query that sees no
 * key gives o = 0, lse = -inf. Memory is taken only when a length or size of a call is reached for
 * the first time. Tensors are all in host memory, or all on the engine's device: tandem-device(7)
 * says what holds there.
 *
 * After any error no layer has grown. o is untouched, with two exceptions: a call that is stopped
 * while it writes o, and a call on device tensors in several chunks that fails half-way. They may
 * leave o written in part. If *cancel or progress stops a call on host tensors, it returns
 * CANCELLED; the sequence keeps pages that the call has taken. Once o is written the call counts
 * and returns TANDEM_OK. A thread of the library then finishes a long re-evaluation, and a later
 * call that needs the selection waits for it.
 *
 * Errors: NOT_FOUND, BUSY, CAPACITY, OUT_OF_MEMORY, CANCELLED, DEVICE_LOST, INVALID_STATE (another
 * thread uses the session; speculative tokens pending; q_len beyond what the step declared),
 * UNSUPPORTED (cancel or progress with device tensors; a selection under another policy than "all",
 * with streaming heads, or for groups of more than 64 query heads on device tensors),
 * INVALID_ARGUMENT (an index of the selection does not ascend or names a token after its query). */
TANDEM_API int32_t tandem_attend(tandem_session *session, const tandem_attend_args *args,
                                 tandem_error **error);

/* Ends speculation in one sequence, in every layer: the speculative tokens at kept_idx [n_kept]
 * stay, in this order, and the others go. Index 0 is the first speculative token. Indices ascend
 * and are a chain in the tree: the first one is a child of the last committed token. Under "hgca"
 * MAW and selections become what appending only these tokens would have given. n_kept = 0 drops all.
 * Errors: INVALID_STATE (nothing speculative, or layers uneven), INVALID_ARGUMENT (not a chain). */
TANDEM_API int32_t tandem_session_commit(tandem_session *session, int64_t sequence,
                                         const int64_t *kept_idx, int64_t n_kept,
                                         tandem_error **error);

/* Opens a step: q_lens[i] tokens will be appended to sequences[i] in every layer, by attend calls
 * or by a graph replay. Reserves all memory that the step needs, and marks the sequences as in
 * flight until tandem_step_end(). Wakes the CPU workers, unless the session has
 * sleep_between_calls. Must not be captured.
 *
 * With a stream (not NULL) the step is planned, for device tensors on that stream. Each layer is
 * attended once, in order, by a call that only launches kernels. A CUDA graph of these calls may
 * replace them in later steps, once a step. tandem-streams(7) says what such a step may hold, and
 * what follows if a step does not go as planned.
 *
 * Errors: as tandem_sequence_reserve(); INVALID_STATE (a step is open; an earlier planned step did
 * not go as planned, which is told once), CAPACITY (more tokens than the session's graphs or a
 * planned step have room for), UNSUPPORTED (a planned step with routes "stream", "host+stream" and
 * "recompute"). */
TANDEM_API int32_t tandem_step_begin(tandem_session *session, const int64_t *sequences,
                                     const int64_t *q_lens, int32_t n_sequences, void *stream,
                                     tandem_error **error);
/* Closes the step and lets the CPU workers sleep; stream: as in tandem_step_begin(). Must not be
 * captured. If a layer got fewer tokens than declared, every sequence goes back to its length at
 * tandem_step_begin(). So a step with a call that failed may be ended. Errors: INVALID_STATE (a
 * layer got fewer tokens than declared: the error names it, and for a planned step a later call may
 * be the one that says so; or the stream is being captured, and the step stays open). */
TANDEM_API int32_t tandem_step_end(tandem_session *session, void *stream, tandem_error **error);

#ifdef __cplusplus
}
#endif

#include "tandem/tensors.h"
#include "tandem/weights.h"
#include "tandem/selection.h"
#include "tandem/pruning.h"
#include "tandem/patterns.h"
#include "tandem/saving.h"
#include "tandem/plan.h"

#endif /* TANDEM_TANDEM_H_ */
