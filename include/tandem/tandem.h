/* SPDX-License-Identifier: MIT
 *
 * Tandem: attention over key/value caches larger than the GPU.
 *
 * Softmax attention over a set of keys gives a state (o, lse): the output normalised within the set and the natural
 * log of the sum of exp of its logits. States over disjoint sets merge exactly, so each part of a cache is attended
 * where its keys are. An engine owns the processors, a model the geometry, a cache the keys and values of many
 * sequences, a session how they are attended; tandem_attend() is the one call that matters.
 *
 * Holds for every function unless its comment says otherwise:
 *
 *   Errors    A function returns TANDEM_OK or a negative status. The last parameter may be NULL; otherwise *error is set
 *             to NULL on success and to an object that the caller releases on failure. A failing call changes nothing.
 *             TANDEM_ERROR_INVALID_HANDLE, _INVALID_ARGUMENT (NULL, alignment, struct_size, range) and, in a child after fork(),
 *             _INVALID_STATE may come from every call that returns a status and are not repeated below.
 *   Threads   Engine, model and weights: any thread, at any time. Cache: any thread; a writer lock serialises changes.
 *             Session: one thread at a time. Functions without any of these: any thread. The caller's affinity, signal mask,
 *             floating-point mode and locale are left as found. Signal handlers may run during a call; a signal may wait
 *             some milliseconds for a matrix product. Nothing is printed, nothing aborts, no C++ exception crosses a call.
 *   Structs   Their first member is struct_size = sizeof the struct; tandem_*_init() and TANDEM_*_INIT fill in defaults.
 *             Zero means default; where zero is a value of its own, -1 is the default. Structs only grow at the end; a
 *             larger one than the library knows is accepted when the rest is zero. Reserved members are zero.
 *   Pointers  Each is aligned to the type it points to: structs, arrays, what is written. A misaligned one is refused by its
 *             name; where `error` itself is misaligned, the status alone says so.
 *   Memory    Options, arrays and names are copied before return. Tensors are borrowed until the call returns (host) or
 *             until the stream has passed the call (device). Output tensors may not overlap inputs or each other.
 *   Units     Lengths are tokens, sizes bytes (_bytes), times nanoseconds (_ns), strides elements.
 *   Streams   `stream` is a CUDA stream as void *, for tensors in device memory (NULL is the legacy default stream there);
 *             with tensors in host memory it is NULL, and a call has finished when it returns. Functions without it take
 *             tensors in host memory. On a device a call returns when its work is on its way; it waits for the device where
 *             memory has to grow, a window lacks what the host has, another session has calls under way on the same cache,
 *             more than two steps are (64 calls at least), keys to be streamed have yet to reach the host, or a route's
 *             costs are measured. The caller orders calls of one session: one stream, or events between several.
 *   Version   Introduced in 0.2 unless said otherwise. Programs and bindings for 0.1 are compiled again (CHANGELOG.md).
 *
 * This is the one file to include. At its end it brings tensors.h (attention over the caller's own K and V), weights.h
 * (projections, offloaded weights), selection.h (keys that the caller names), pruning.h, patterns.h, saving.h (sequences to
 * files) and plan.h (memory, routes, what is supported, statistics), of which the same holds.
 */
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

/* ---- version ---------------------------------------------------------------------------------------------------- */

#define TANDEM_VERSION_MAJOR 0
#define TANDEM_VERSION_MINOR 2
#define TANDEM_VERSION_PATCH 0
#define TANDEM_VERSION_AT_LEAST(major, minor, patch) \
  (TANDEM_VERSION_MAJOR * 65536 + TANDEM_VERSION_MINOR * 256 + TANDEM_VERSION_PATCH >= (major) * 65536 + (minor) * 256 + (patch))
/* Version of the loaded library: major << 16 | minor << 8 | patch. */
TANDEM_API uint32_t tandem_version(void);

/* Hash over size and member offsets of every public struct as of minor version `minor` of this major version; 0 when the
 * library does not know that minor. A binding compares it with the value it was generated for. */
TANDEM_API uint64_t tandem_abi_fingerprint(uint32_t minor);

/* ---- status and error ------------------------------------------------------------------------------------------- */

#define TANDEM_OK 0
#define TANDEM_ERROR_INVALID_ARGUMENT -1 /* a value is out of range, NULL, misaligned, overlapping, or inconsistent */
#define TANDEM_ERROR_INVALID_HANDLE -2   /* not a live handle of this kind: NULL, released, or foreign */
#define TANDEM_ERROR_INVALID_STATE -3    /* the object cannot do this now (open step, uneven layers, child after fork) */
#define TANDEM_ERROR_UNSUPPORTED -4      /* a valid request that this build or machine has no implementation for */
#define TANDEM_ERROR_OUT_OF_MEMORY -5    /* the operating system or the caller's allocator refused memory */
#define TANDEM_ERROR_CAPACITY -6         /* a cap or a declared maximum would be exceeded */
#define TANDEM_ERROR_BUSY -7             /* another session has the sequence in flight */
#define TANDEM_ERROR_NOT_FOUND -8        /* no such sequence, policy, instruction set or backend */
#define TANDEM_ERROR_CANCELLED -9        /* the caller asked to stop: a flag that it set, or its callback */
#define TANDEM_ERROR_TIMEOUT -10         /* the given time has passed */
#define TANDEM_ERROR_DEVICE_LOST -11     /* the device failed for good; the host store is complete */
#define TANDEM_ERROR_BACKEND -12         /* a requested backend module could not be used */
#define TANDEM_ERROR_IO -13              /* a file operation failed */
#define TANDEM_ERROR_CORRUPT -14         /* a file or a buffer is not what it claims to be */
#define TANDEM_ERROR_SYSTEM -15          /* the operating system refused something other than memory */
#define TANDEM_ERROR_INTERNAL -16        /* a bug in Tandem */

typedef struct tandem_error tandem_error;

/* Constant names and texts: "TANDEM_ERROR_BUSY"; "unknown status" for values this version does not know. */
TANDEM_API const char *tandem_status_name(int32_t status);
/* One line naming field and value, e.g. "tandem_cache_create: k_type = 99 is not a storage type". Valid until release;
 * "" for NULL. */
TANDEM_API const char *tandem_error_message(const tandem_error *error);
/* The field that was refused, as the call's parameter or a struct's member is named ("sequences", "q.shape[0]"); "process" in a
 * child after fork(); "" where none applies, as where memory is missing. Valid until release. */
TANDEM_API const char *tandem_error_field(const tandem_error *error);
/* The status the failing call returned; TANDEM_OK for NULL. */
TANDEM_API int32_t tandem_error_status(const tandem_error *error);
/* errno, CUDA result or other code of the layer below; 0 where none applies. */
TANDEM_API int64_t tandem_error_underlying(const tandem_error *error);
/* Accepts NULL. */
TANDEM_API void tandem_error_release(tandem_error *error);

/* ---- tensor ----------------------------------------------------------------------------------------------------- */

/* Element types of tensors and storage types of caches. Queries, outputs and states are f32, f16 or bf16; K and V may be
 * given, stored and read in any but Q4_64, which a cache keeps hidden states in (x_type).
 *
 *   E4M3         8-bit floats without infinities (OCP fp8 e4m3fn): what rounds to more than 448 becomes NaN
 *   Q8_0, Q4_0   8- and 4-bit codes with one f16 scale for each 32 elements along head_dim, rounded as ggml rounds them. A
 *                tensor of such a type is rows of ggml's blocks (34 or 18 bytes for 32 elements): its last dimension and
 *                its other strides, in elements, are multiples of 32. A cache keeps codes and scales apart, and there a
 *                row's last group may be short. A group with a NaN or an infinity is all NaN.
 *   Q4_64        4-bit codes c with an f16 scale d and an f16 minimum m for each 64 elements along hidden_dim: d c + m.
 *                From the group's least and largest number, m is the least and d a 15th of what lies between, each rounded
 *                once; c is the nearest to (x - m) / d in 0 ... 15, and 0 where d is 0, as in a group of equal numbers. A
 *                group whose d or m f16 cannot hold, a group with a NaN or an infinity among them, is all NaN. A block is
 *                36 bytes for 64 elements: d, m and 32 bytes of which byte j holds the codes of elements 2 j (low half) and
 *                2 j + 1 (high half). What is said of blocks above holds with 64 for 32. */
#define TANDEM_F32 1
#define TANDEM_F16 2
#define TANDEM_BF16 3
#define TANDEM_E4M3 4
#define TANDEM_Q8_0 5
#define TANDEM_Q4_0 6
#define TANDEM_Q4_64 7
#define TANDEM_I32 16 /* signed integers, of tandem_selection.idx alone: no type of rows */
/* "f32", "q8_0", ...; NULL for a number that is no type of rows. These are numbered from 1 without gaps. */
TANDEM_API const char *tandem_dtype_name(int32_t dtype);
/* Bytes that a cache keeps of head_dim elements of K, V or hidden states, scales included; 0 for what is no type or no length. */
TANDEM_API int64_t tandem_dtype_row_bytes(int32_t dtype, int32_t head_dim);

#define TANDEM_DEVICE_HOST 0
#define TANDEM_DEVICE_CUDA 1

/* A strided view that owns nothing. The last dimension is contiguous (its stride is 1), other strides are positive and
 * at least what the inner dimensions need; data is aligned to its element type. Dimensions of length 0 are allowed. */
typedef struct tandem_tensor {
  uint32_t struct_size;
  int32_t dtype;        /* TANDEM_F32, ... */
  int32_t device_type;  /* TANDEM_DEVICE_HOST, ... */
  int32_t device_index; /* 0 for the host */
  void *data;           /* never written through for inputs */
  int32_t n_dims;       /* 1 to 4 */
  int32_t reserved;
  int64_t shape[4];  /* elements */
  int64_t stride[4]; /* elements */
} tandem_tensor;

/* Fills *tensor as a contiguous host tensor of n_dims dimensions. shape: [n_dims]. */
TANDEM_API int32_t tandem_tensor_init(tandem_tensor *tensor, int32_t dtype, void *data, int32_t n_dims, const int64_t *shape,
                                      tandem_error **error);

/* ---- engine ----------------------------------------------------------------------------------------------------- */

typedef struct tandem_engine tandem_engine;

#define TANDEM_LOG_ERROR 1
#define TANDEM_LOG_WARNING 2
#define TANDEM_LOG_INFO 3

/* level: TANDEM_LOG_ERROR, ... Called from any thread of the library; must not call back into it. */
typedef void (*tandem_log_fn)(int32_t level, const char *message, void *user);
/* Returns `bytes` bytes aligned to `alignment` (a power of two), or NULL. */
typedef void *(*tandem_alloc_fn)(size_t bytes, size_t alignment, void *user);
typedef void (*tandem_free_fn)(void *data, size_t bytes, void *user);
/* Lends the caller's threads: calls task(i, context) once for each i from 0 to n_tasks - 1, as many at a time as there are
 * threads for, and returns when all calls have returned. A task blocks on no other one, so that fewer threads, or one, are
 * enough. Called from any thread that calls the library and from the library's own, by one thread at a time; n_tasks is
 * n_threads at most. Must not fail, throw or call the library. */
typedef void (*tandem_task_fn)(int64_t task_idx, void *context);
typedef void (*tandem_run_fn)(int64_t n_tasks, tandem_task_fn task, void *context, void *user);

typedef struct tandem_engine_options {
  uint32_t struct_size;
  int32_t n_threads;         /* CPU workers, the calling thread included; 0: affinity mask and cgroup quota decide; with a backend, one CPU of four or more is left to the program's thread */
  const char *cpu_isa;       /* "amx", "avx3_dl", "avx3", "avx2", ...: exactly this one; NULL: $TANDEM_CPU_ISA, else the best.
                              * "amx" asks Linux for AMX's state: sigaltstack() then wants 8 KiB more of every thread */
  const char *backend;       /* device backend, "cuda": libtandem-cuda.so must load and have a device that can be used; NULL:
                              * none, the CPU does every part. It is looked for in the folders of $TANDEM_BACKEND_PATH
                              * (colons between, absolute, ignored when setuid), beside libtandem, and in the folder that
                              * the build has set, never in the working directory */
  const char *backend_path;  /* absolute path of that file, the only one tried; NULL: the folders above */
  tandem_alloc_fn alloc;     /* host memory of caches and sessions, which stays on the NUMA nodes where it is or is first
                              * written; NULL: huge-page-friendly mappings, each KV head's on the node of its workers */
  tandem_free_fn free;       /* given with alloc */
  void *alloc_user;
  tandem_log_fn log;         /* NULL: silent */
  void *log_user;
  int64_t spin_ns;           /* how long idle workers spin before they sleep; -1: default (50 us); 0: never */
  int32_t pin_threads;       /* -1: default (1): bind each worker to a core; 0: leave to the system */
  int32_t matmul_rows;       /* query rows (q_len * query heads) of a KV head from which a call, decode too, goes through matrix
                              * products: where bf16 queries meet bf16 V they may round weights to bf16. 0: where they are
                              * faster, as a process's first engine measures (some ms). To agree in the last bits, give it */
  tandem_run_fn run;         /* NULL: the engine starts workers. Else it starts no workers, and run() does the CPU's work on threads
                              * of the caller's own, so that no second pool competes for the cores; n_threads, which must be
                              * given, is how many, and pin_threads is not 1. Memory is then placed on no particular NUMA node.
                              * One thread stays the library's own: it makes selections, and sleeps where there are none to make */
  void *run_user;            /* given to run(); NULL without it */
} tandem_engine_options;
#define TANDEM_ENGINE_OPTIONS_INIT \
  { sizeof(tandem_engine_options), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, -1, -1, 0, NULL, NULL }
TANDEM_API void tandem_engine_options_init(tandem_engine_options *options);

/* Starts the CPU pool and loads the device backend if one is named. options may be NULL. Starts threads; allocates.
 * Errors: NOT_FOUND (cpu_isa unknown or not on this processor), BACKEND (no module loads: every path tried, with
 * its reason; or no device of it can be used), SYSTEM (a thread could not be started; sched_getaffinity is refused, as by a
 * sandbox), OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_engine_create(tandem_engine **engine, const tandem_engine_options *options, tandem_error **error);
/* Gives up the caller's reference; caches and sessions keep the engine alive. Accepts NULL, never fails or blocks on a
 * device. A released handle is refused by later calls. */
TANDEM_API void tandem_engine_release(tandem_engine *engine);
/* Waits until calls on device tensors, of all sessions, have reached the host, released sessions have given back what they had,
 * and background work has finished. A planned step counts from its tandem_step_end() on; what else their streams do is theirs. timeout_ns < 0: for ever. Errors: TIMEOUT. */
TANDEM_API int32_t tandem_engine_drain(tandem_engine *engine, int64_t timeout_ns, tandem_error **error);
/* Topology, workers, instruction set, backends (with the reason for each refusal) as JSON. Writes at most buffer_bytes
 * bytes, always 0-terminated when buffer_bytes > 0; *needed_bytes (may be NULL) gets the full size with the 0. */
TANDEM_API int32_t tandem_engine_report(char *buffer, size_t buffer_bytes, size_t *needed_bytes, const tandem_engine *engine,
                                        tandem_error **error);

/* ---- model ------------------------------------------------------------------------------------------------------ */

typedef struct tandem_model tandem_model;

#define TANDEM_ROPE_CALLER 0      /* keys and queries arrive as they are to be used */
#define TANDEM_ROPE_HALVES 1      /* rotated by the library at attend time: dim i pairs with i + rope_dims / 2 */
#define TANDEM_ROPE_INTERLEAVED 2 /* likewise: dim 2 i pairs with 2 i + 1 */

/* Geometry of one layer. logit(q, k) = cap(sm_scale * q.k), cap(x) = soft_cap * tanh(x / soft_cap) where soft_cap > 0.
 * With library RoPE the angle of pair i at position p is (p / rope_position_scale) * f_i, f_i = rope_inv_freq[i] or
 * rope_theta^(-2 i / rope_dims), and rotated vectors are multiplied by rope_attn_factor. */
typedef struct tandem_layer_options {
  uint32_t struct_size;
  int32_t n_q_heads;             /* a multiple of n_kv_heads */
  int32_t n_kv_heads;            /* = n_q_heads: MHA; 1: MQA */
  int32_t k_head_dim;            /* 64, 80, 96, 112, 128, 192, 256; 576 with v_head_dim 512 that aliases it (MLA) */
  int32_t v_head_dim;            /* likewise; 0: k_head_dim */
  int32_t v_aliases_k;           /* 1: V is the first v_head_dim dims of K, stored and read once */
  float sm_scale;                /* 0: 1 / sqrt(k_head_dim) */
  float soft_cap;                /* 0: off */
  int64_t sliding_window_tokens; /* 0: off; else a query at position p sees keys at positions > p - this */
  const float *sinks;            /* [n_q_heads] learned sink logits, merged once as the state (0, logit); NULL: none */
  int32_t rope;                  /* TANDEM_ROPE_* */
  int32_t rope_dims;             /* rotated leading dims, even; 0: k_head_dim */
  double rope_theta;             /* 0: 10000 */
  double rope_position_scale;    /* 0: 1 */
  const float *rope_inv_freq;    /* [rope_dims / 2]; NULL: from rope_theta */
  double rope_attn_factor;       /* 0: 1 */
  const struct tandem_layer_projection *projection; /* weights.h; NULL: K and V are not to be made of hidden states */
} tandem_layer_options;
#define TANDEM_LAYER_OPTIONS_INIT \
  { sizeof(tandem_layer_options), 0, 0, 0, 0, 0, 0.0f, 0.0f, 0, NULL, 0, 0, 0.0, 0.0, NULL, 0.0, NULL }
TANDEM_API void tandem_layer_options_init(tandem_layer_options *options);

/* layers: [n_layers], each with its own struct_size (all equal). Errors: INVALID_ARGUMENT (the layer and member),
 * UNSUPPORTED (a head_dim or combination without kernels, with the reason). */
TANDEM_API int32_t tandem_model_create(tandem_model **model, const tandem_layer_options *layers, int32_t n_layers,
                                       tandem_error **error);
TANDEM_API void tandem_model_release(tandem_model *model); /* as tandem_engine_release() */

/* ---- cache and its sequences ------------------------------------------------------------------------------------ */

typedef struct tandem_cache tandem_cache;

#define TANDEM_ROTATION_DEFAULT 0
#define TANDEM_ROTATION_HADAMARD 1
#define TANDEM_ROTATION_NONE 2

/* Rotation of keys. TANDEM_ROTATION_DEFAULT is TANDEM_ROTATION_HADAMARD for keys stored as q4_0 and TANDEM_ROTATION_NONE
 * for all others. It is NONE for q4_0, too, in a layer that HADAMARD is refused for (see the end of this comment), and in
 * one whose hidden states are kept (x_type), as route "recompute" makes keys that are not rotated. With TANDEM_ROTATION_HADAMARD each row of K is multiplied, in f32, by the Walsh-Hadamard matrix
 * [k_head_dim, k_head_dim] over sqrt(k_head_dim) before it is rounded to k_type, and each row of q likewise, so that q.k stays
 * what it is. An outlier dim is then spread over all dims instead of coarsening the codes of its group (QuaRot, Ashkboos et
 * al., 2024). 4-bit keys of language models lose much less so; with 8 bits and more there is little to gain. The largest
 * element of a row may grow sqrt(k_head_dim) times, perhaps beyond the range of e4m3 or f16. Rotated q are f32: appends and
 * prefill in bf16 lose their bf16 products. A device rotates keys to the same bits as the host; an append is attended 512
 * tokens at a time there once its queries see keys outside the window. K given in blocks is widened,
 * rotated and rounded again; tandem_sequence_read() rotates back; sizes stay the same. HADAMARD is UNSUPPORTED where k_head_dim is not a
 * power of two, where the library applies RoPE (at attend time: keys are stored without) and where V aliases K. */
typedef struct tandem_cache_options {
  uint32_t struct_size;
  int32_t k_type;                /* storage type of keys, not q4_64; 0: TANDEM_BF16 */
  int32_t v_type;                /* likewise of values; 0: k_type */
  int32_t page_tokens;           /* tokens per page, a power of two from 16 to 4096; 0: 128 */
  int64_t host_cap_bytes;        /* hard cap on pages, MAW and selections in host memory (not on work space); 0: none */
  int64_t device_cap_bytes;      /* the same on windows, buffers and work space in device memory, not on a driver's page tables; 0: none */
  const int32_t *layer_k_types;  /* [n_layers] or NULL: overrides k_type per layer */
  const int32_t *layer_v_types;  /* [n_layers] or NULL: overrides v_type per layer */
  int32_t k_rotation;            /* TANDEM_ROTATION_*; rotation of keys before they are rounded, in all layers */
  int32_t x_type;                /* hidden states of layers with a projection are kept too, in this type, and every append brings them:
                                  * f16, bf16; q8_0, q4_0, q4_64 where hidden_dim is a multiple of 64; 0: none are */
} tandem_cache_options;
#define TANDEM_CACHE_OPTIONS_INIT \
  { sizeof(tandem_cache_options), 0, 0, 0, 0, 0, NULL, NULL, 0, 0 }
TANDEM_API void tandem_cache_options_init(tandem_cache_options *options);

/* An empty cache; memory is taken as sequences grow. Errors: UNSUPPORTED (storage type, rotation of keys, x_type),
 * CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_cache_create(tandem_cache **cache, tandem_engine *engine, const tandem_model *model,
                                       const tandem_cache_options *options, tandem_error **error);
TANDEM_API void tandem_cache_release(tandem_cache *cache); /* as tandem_engine_release() */

/* Sequences are named by ids that a cache never uses twice. The functions below return NOT_FOUND for an unknown or dropped
 * id, BUSY while a session has the sequence in flight, and INVALID_STATE where a sequence must be even (every layer of
 * the same length) and is not, naming the layer. A sequence's session state (MAW, selections, window) follows each
 * change; a fork gets a copy of it in every session. */

/* A new, empty sequence. Errors: OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_create(int64_t *sequence, tandem_cache *cache, tandem_error **error);
/* *fork gets the same tokens; pages are shared and copied when one side writes. Even sequences only: INVALID_STATE
 * otherwise. A page that is not full is copied at once: CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_fork(int64_t *fork, tandem_cache *cache, int64_t sequence, tandem_error **error);
/* The pages that nobody else holds serve other sequences from then on; tandem_cache_trim() gives their memory back. */
TANDEM_API int32_t tandem_sequence_drop(tandem_cache *cache, int64_t sequence, tandem_error **error);
/* Takes pages, and session state of every attached session, for n_tokens more tokens in every layer: until these are
 * used up, or given back by a truncation or a removal of the last tokens, no append returns an error for memory, whatever
 * other sequences and sessions take: tandem_session_create() takes state for the reservations it finds, or is refused. An open
 * step's tokens are reserved in the same way. Pages are address space until they are
 * written: on a system that promises more than it has, host_cap_bytes is what keeps the process within it. Errors:
 * CAPACITY, OUT_OF_MEMORY. */
TANDEM_API int32_t tandem_sequence_reserve(tandem_cache *cache, int64_t sequence, int64_t n_tokens, tandem_error **error);
/* Keeps the first n_tokens tokens of every layer; uneven sequences become even. Speculative tokens are given up. */
TANDEM_API int32_t tandem_sequence_truncate(tandem_cache *cache, int64_t sequence, int64_t n_tokens, tandem_error **error);
/* Removes tokens [first, first + n_tokens). shift_positions = 1 moves the positions of later tokens down by n_tokens; 0
 * keeps them. Errors: UNSUPPORTED (shift with caller-rotated keys in a layer: they carry their position). */
TANDEM_API int32_t tandem_sequence_remove(tandem_cache *cache, int64_t sequence, int64_t first, int64_t n_tokens,
                                          int32_t shift_positions, tandem_error **error);
/* Appends k: [n_tokens, n_kv_heads, k_head_dim] and v: [n_tokens, n_kv_heads, v_head_dim] (any type; v NULL where it aliases k)
 * to one layer without attending; rounded once to the storage type, to nearest even (see TANDEM_Q8_0, TANDEM_Q4_0).
 * From host memory: stream is NULL, and tensors in device memory are UNSUPPORTED (tandem_attend() appends such). Errors: CAPACITY. */
TANDEM_API int32_t tandem_sequence_append(tandem_cache *cache, int64_t sequence, int32_t layer_idx, const tandem_tensor *k,
                                          const tandem_tensor *v, void *stream, tandem_error **error);
/* The same where the layer keeps hidden states (x_type of tandem_cache_options): x [n_tokens, hidden_dim], f32, f16 or bf16, is
 * rounded once to x_type. INVALID_ARGUMENT where it keeps none, and of tandem_sequence_append() where it does. */
TANDEM_API int32_t tandem_sequence_append_x(tandem_cache *cache, int64_t sequence, int32_t layer_idx, const tandem_tensor *k,
                                            const tandem_tensor *v, const tandem_tensor *x, void *stream, tandem_error **error);
/* Reads the hidden states of tokens [first, first + shape[0]) of one layer back. INVALID_ARGUMENT where it keeps none. */
TANDEM_API int32_t tandem_sequence_read_x(const tandem_tensor *x, const tandem_cache *cache, int64_t sequence,
                                          int32_t layer_idx, int64_t first, tandem_error **error);
/* Reads tokens [first, first + shape[0]) of one layer back, as stored; k and v as in append, either may be NULL. Rotated keys
 * are rotated back in f32. */
TANDEM_API int32_t tandem_sequence_read(const tandem_tensor *k, const tandem_tensor *v, const tandem_cache *cache,
                                        int64_t sequence, int32_t layer_idx, int64_t first, tandem_error **error);
/* Committed tokens of one layer. */
TANDEM_API int32_t tandem_sequence_length(int64_t *n_tokens, const tandem_cache *cache, int64_t sequence, int32_t layer_idx,
                                          tandem_error **error);
/* Hash of lengths, positions and stored bytes of every layer, hidden states too: equal for equal content in other pages too. */
TANDEM_API int32_t tandem_sequence_digest(uint64_t *digest, const tandem_cache *cache, int64_t sequence, tandem_error **error);

/* ---- session ---------------------------------------------------------------------------------------------------- */

typedef struct tandem_session tandem_session;

/* Policies: "all" attends every key (exact); "streaming" the first sink_tokens and the last window_tokens; "hgca" these
 * and, of the rest, what each head's moving average of attention weights (MAW) calls salient (HGCA, section 3): after a
 * query with weights w, maw += alpha * (w - maw). A KV head keeps what any of its query heads keeps. An append of several
 * tokens attends everything, and after it every token outside the window is judged anew: kept when maw > beta / (tokens
 * outside, sinks not counted). With host tensors the append judges them before it returns. With device tensors the next query
 * does that is not of an append, and takes longer: so a prompt in chunks has them judged once. Tokens that leave the window
 * later are judged in the background, for the next call of the same layer: kept when maw > beta / window_tokens. Outputs are
 * never rescaled. The window gives up tokens in blocks of an eighth of its length, at most a page, so that the newest
 * window_tokens are always inside. A key with a MAW above 0.01 also keeps the halo_tokens keys after it (not in the paper: heads that copy a passage
 * attend its next key at the next step). Layers with a sliding window bound their own cost: "hgca" attends all of it,
 * "streaming" has no sinks there.
 *
 * Routes: who computes over the keys outside the window, in calls on device tensors. "host": the CPU, where they are. "stream":
 * the device, to which they cross the bus in pieces through two buffers that do not grow with the length (HeadInfer); the host
 * store is pinned as far as it is read, which calls wait for. "host+stream": both at the same time; of each sequence,
 * stream_fraction of the keys outside the window, the oldest, cross the bus (to the nearest 16 tokens). "recompute": the device as
 * with "stream", but of the first recompute_share of these keys the hidden states cross the bus, and K and V are made of them
 * there, by cuBLAS (KVPR); the others are streamed. It pays where a hidden state is smaller than K and V, as with as many KV heads
 * as query heads: half of them. Keys and values made so agree with those in the store as far as the caller's do with the layer's
 * projection: to the rounding of products in w_type. Every layer needs a projection, and the cache an x_type. "auto": each call as
 * takes the least time by measurements of the bus, of the CPU and of both at once, which the first calls that could stream take,
 * but not a first token that fills its window (some tens of ms, once in an engine for a shape of heads and a power of two of
 * queries), and later calls correct: one of them, or both with the split at which all end (tandem_plan; KVPR's linear program),
 * hidden states included where they are less than K and V, anew in each call, as the last bits of outputs are; "host" below 4 MiB,
 * in planned steps (a graph's copies cannot follow a sequence), where the store cannot be pinned and where there is no memory for
 * the buffers (said in the log); it is pinned in the background, and the CPU attends what is not yet. Only keys that a policy
 * attends in full are streamed: those of "all", of layers with a sliding window, and of appends under "hgca"; not those that the
 * library rotates, nor in speculative calls. The keys that "hgca" has selected are the CPU's, whatever the route; it has no route
 * "recompute". The statistics say which route served.
 *
 * An append of more than 512 tokens is attended in chunks of up to append_tokens. Where it streams ("stream", "auto"), all
 * queries of a chunk meet a piece while it is on the device: keys outside the window cross the bus once a chunk, all of them.
 * Whatever the route, a chunk may also have so many tokens where its queries see no key outside the window, as the first
 * chunk of a prompt: also under "hgca", where the library rotates keys, and with sliding windows. Other chunks have up to 512
 * tokens: with "host", "host+stream" and "recompute", and in layers with rotated keys, those whose queries see keys outside the
 * window; all chunks under policy "streaming", where queries name keys in units of less
 * than 64 tokens or with PLUS_WINDOW, in layers with streaming heads where nothing is
 * streamed, in a session that has captured a graph and has no room for longer ones, and where there is no memory for these
 * (said in the log). What a chunk takes of device memory does not grow with the length: its keys of one layer, two buffers
 * for its rows, and, where it streams, the states of stream_heads KV heads. Copies bring its rows to the host store, which is
 * pinned for that, while the chunk is attended; where the device refuses to pin it, rows go through pinned slots, 512 tokens
 * at a time (said in the log, once). */
typedef struct tandem_session_options {
  uint32_t struct_size;
  int32_t sleep_between_calls; /* 1: a step without a stream does not keep the CPU workers awake between its calls; each call
                           * wakes them, and they spin for spin_ns after it. For programs whose own threads compute on the same
                           * cores in between, as PyTorch's do. 0: they spin from the step's begin to its end */
  const char *policy;     /* NULL: "all"; or "streaming", "hgca", "hip", "patterns": which keys outside the window are attended */
  const char *const *layer_policies; /* names of policies, one for each layer, or NULL: policy is for all layers. Layers whose
                                        attention no few keys can hold are best left to "all" */
  int64_t n_layer_policies;          /* layers of the model; 0 with NULL */
  int64_t window_tokens;  /* newest tokens, always attended, resident on the device; -1: 4096; 0: none. Under "hip" it says where keys
                           * are and nothing else: calls on device tensors want it as long as their sequences become */
  int64_t sink_tokens;    /* first tokens, always attended; -1: 64; 0: none */
  float alpha;            /* MAW factor in (0, 1]; 0: 0.3 */
  float beta;             /* MAW threshold factor, >= 0; -1: 1 */
  int64_t halo_tokens;    /* keys kept after a strongly attended one; -1: 128; 0: none, the rule of the paper alone */
  const char *route;      /* NULL: "auto"; or "host", "stream", "host+stream", "recompute": who computes over these, for device tensors */
  int64_t stream_buffer_bytes; /* each of the buffers that keys, or hidden states in 16 bits, go through; 0: 16 MiB */
  double stream_fraction;      /* share of these keys that crosses the bus, 0 to 1; with route "host+stream" and not without it; -1: not given */
  int64_t append_tokens;  /* most tokens of an append that are attended together, and 32768 at most, in layers of policy "hip"
                             2048; 0: 16384, and memory plans
                             have room for single queries alone, else, whatever the route, for appends of so many tokens */
  int64_t stream_heads;   /* KV heads of what is streamed at a time, at most; 0: as many as take the least time */
  double recompute_share; /* share of these keys that is made of hidden states, in (0, 1]; with route "recompute"; 0: 1 */
  const uint8_t *streaming_heads; /* flags of all layers' KV heads, layer by layer, or NULL: none. 1: its queries see the first
                                     sink_tokens and the window_tokens newest up to their own */
  int64_t n_streaming_heads;      /* KV heads of all layers; 0 with NULL */
  int64_t selection_indices;      /* room in planned steps for so many indices of a tandem_selection, per query and KV head; 0: calls
                                     of planned steps name no keys. With it the CPU's part of a step begins when the layer's queries
                                     have come, not with the step, as nobody knows before which keys it has */
  const struct tandem_pruning *pruning; /* what policy "hip" prunes (pruning.h), NULL: its defaults; INVALID_ARGUMENT where no layer has
                                           that policy. Read when the session is created */
  const struct tandem_patterns *patterns; /* what heads attend under policy "patterns" (patterns.h), and NULL under others */
} tandem_session_options;
#define TANDEM_SESSION_OPTIONS_INIT \
  { sizeof(tandem_session_options), 0, NULL, NULL, 0, -1, -1, 0.0f, -1.0f, -1, NULL, 0, -1.0, 0, 0, 0.0, NULL, 0, 0, \
    NULL, NULL }
TANDEM_API void tandem_session_options_init(tandem_session_options *options);

/* Several sessions may read one cache. Where the engine has a device, every layer must be one that the device can attend, also of a
 * session that gets host tensors alone: UNSUPPORTED names the layer, its storage types and dims, and what the device's module
 * lacks (an engine without a backend serves such layers on the CPU), or a model of more than 2048 layers.
 * Errors: NOT_FOUND (policy, route), UNSUPPORTED (policy and model; routes that stream
 * with a policy that does not attend all keys, or without a device; "recompute" where a projection, hidden states or cuBLAS are
 * missing), CAPACITY and OUT_OF_MEMORY (no room for its state of the tokens that sequences have reserved); INVALID_ARGUMENT
 * (stream_buffer_bytes below what 64 tokens of a KV head take, or with "recompute" 128 hidden
 * states in 16 bits; stream_fraction or recompute_share without its route, or "host+stream" without stream_fraction; streaming_heads of a
 * layer with a sliding window; sleep_between_calls that is neither 0 nor 1). streaming_heads are for policy "all" and not for "recompute" (UNSUPPORTED), speculative calls
 * are not for layers that have any. */
TANDEM_API int32_t tandem_session_create(tandem_session **session, tandem_cache *cache, const tandem_session_options *options,
                                         tandem_error **error);
/* Accepts NULL, never fails. A planned step that is open is taken back. Calls under way on the device are not waited for: a
 * thread of the library does that, and gives the session's memory back when the device has no more use for it. So long it
 * counts in the cache's statistics and caps, and who reads the sequences waits as for a session that is there. Where no call
 * is under way the memory is back on return, unless the device is busy with other things for more than 100 ms.
 * tandem_engine_drain() waits for all of that: call it before a stream is captured, when CUDA may not free memory. */
TANDEM_API void tandem_session_release(tandem_session *session);

/* ---- attend ----------------------------------------------------------------------------------------------------- */

#define TANDEM_ATTEND_SPECULATIVE 1u /* the appended tokens are a guess: kept apart until tandem_session_commit() */
#define TANDEM_ATTEND_PARTIAL 2u     /* a chunk of a longer append: no re-evaluation yet, the last chunk does it; not both */

/* How much of a call is done, `total` at its end; in units of work, of no fixed size. Called from the thread that made the
 * call, which must get its own return: no longjmp, no exception, no call into the library for this session or engine. Not 0:
 * the call is to stop. */
typedef int32_t (*tandem_progress_fn)(int64_t done, int64_t total, void *user);

/* One layer, several sequences. Tokens of all sequences stand one after another in q, k, v and o:
 *   q [n_tokens, n_q_heads, k_head_dim]    k [n_tokens, n_kv_heads, k_head_dim]    v [n_tokens, n_kv_heads, v_head_dim]
 *   o [n_tokens, n_q_heads, v_head_dim]    lse [n_tokens, n_q_heads], f32 or NULL  with n_tokens = sum of q_lens
 * x [n_tokens, hidden_dim], f32, f16 or bf16, comes with k where the layer keeps hidden states, and is NULL else.
 * k and v NULL: nothing is appended and the queries are the last q_len tokens already there. q and o are f32, f16 or bf16,
 * k and v of any type, each tensor its own. Queries see keys up to their own token (causal at the end of the sequence). parent_idx [n_tokens] makes
 * the appended tokens a tree: a token sees the tokens before the call and its own ancestors; parent_idx counts within the
 * token's sequence in this call, is smaller than the token's own index, and -1 for a child of the last token before. */
typedef struct tandem_attend_args {
  uint32_t struct_size;
  uint32_t flags;             /* TANDEM_ATTEND_* */
  int32_t layer_idx;
  int32_t n_sequences;
  const int64_t *sequences;   /* [n_sequences], each once */
  const int64_t *q_lens;      /* [n_sequences], >= 0 */
  const tandem_tensor *q;
  const tandem_tensor *k;
  const tandem_tensor *v;
  const tandem_tensor *o;     /* written */
  const tandem_tensor *lse;   /* written; NULL: not wanted */
  const int32_t *parent_idx;  /* [n_tokens] or NULL; with TANDEM_ATTEND_SPECULATIVE only */
  void *stream;
  const int32_t *cancel;       /* NULL, or a flag that any thread may set (atomically) during the call: not 0 stops it. Whether
                                * a call notices a flag that is cleared again before it returns is left open */
  tandem_progress_fn progress; /* NULL: not wanted */
  void *progress_user;
  const tandem_tensor *x;      /* hidden states of the appended tokens, or NULL */
  const struct tandem_selection *selection; /* selection.h: the keys that queries attend, or NULL: those of the session's policy. For layers of
                                * policy "all" without streaming heads */
} tandem_attend_args;
#define TANDEM_ATTEND_ARGS_INIT \
  { sizeof(tandem_attend_args), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
    NULL }
TANDEM_API void tandem_attend_args_init(tandem_attend_args *args);

/* Appends k and v, then o = softmax(logits) V over the keys that the policy selects, and its lse. Logits, sums and lse in
 * f32, weights too but for what matmul_rows says. NaN or Inf in q, k or v reaches the rows that see it (as NaN; Inf in v
 * may stay Inf, a logit of -inf may count as no key) and no other; a query that sees no key gives o = 0, lse = -inf. Reads
 * K and V once per KV head. Allocates only when a length or size of a call is reached for the first time. Errors: NOT_FOUND, BUSY, CAPACITY,
 * OUT_OF_MEMORY, UNSUPPORTED, INVALID_STATE (speculative tokens pending, q_len beyond what the step declared), UNSUPPORTED with a selection (another
 * policy, streaming heads, groups of more than 64 query heads on device tensors), INVALID_ARGUMENT (selection.idx: an index that is repeated, does not ascend or
 * names a token behind the query's own, with row, head and place). On any error no
 * layer has grown and o is untouched (but by a call that is cancelled while it writes, and by one on device tensors that is done
 * in several chunks, as it has more than 512 tokens or names very many keys, and fails half-way).
 *
 * CANCELLED: *cancel was set, or progress asked to stop, during a call on host tensors. A call looks at *cancel every few
 * milliseconds from its begin until o is written, and calls progress while it attends. When it stops while it writes, o and lse
 * may be written in part; everything else is as before, except that the pages it has taken stay the sequence's, as after
 * tandem_sequence_reserve(). Once o is written the call counts and returns TANDEM_OK. If *cancel is set then, it does not wait for
 * a long re-evaluation: a thread of the library finishes it, and a later call that needs the selection waits for it. With device
 * tensors, where a call only sends its work, cancel and progress are UNSUPPORTED.
 *
 * Tensors are in host memory or all on the engine's device; calls of the two kinds may follow each other. On the device:
 *   - the window's keys are attended there and the rest at the same time, by the CPU or from buffers on the device (routes of
 *     tandem_session_options); the states are merged on the device;
 *   - MAW of the window's keys are kept there too. What leaves the window is judged, and an append's re-evaluation done, before
 *     the next call of the layer needs it, not before this one returns;
 *   - new rows go to the window and to the host store, so that a key that leaves the window is not moved. Tokens count from the
 *     call on; whoever reads them on the host (tandem_sequence_read, a fork, host tensors, ...) waits until they are there;
 *   - where the library applies RoPE the window has K rotated, as f32: 4 bytes an element, whatever k_type is;
 *   - weights may be rounded to V's type where q has 16 bits, K and V have no more, and a call has more than 64 rows (queries
 *     of a sequence times query heads of a KV head). Where V has fewer bits they may be rounded to f16, and numbers of V in
 *     q8_0 and q4_0 with them: 2^-12 of each, where codes are off by 2^-8 and 2^-4 of their group's largest. Numbers of K and
 *     V beyond an f16's 65,504 make outputs there that are not finite;
 *   - of speculation, what is appended stays in host memory: the host attends to it and the device to the window. A call has up
 *     to 512 such tokens (UNSUPPORTED), and no planned step has any (INVALID_STATE);
 *   - k and v are f32, f16 or bf16 (UNSUPPORTED else). INVALID_STATE where the stream is being captured outside a planned step;
 *   - what the host does for a call when its turn comes may lack memory: the call's output is NaN, what it and calls since have
 *     appended is taken back in their layers (a planned step as a whole), and the next call on device tensors returns
 *     OUT_OF_MEMORY, once, when it has waited for its stream. After that the session works as before;
 *   - DEVICE_LOST when the device fails or host and device wait for each other in vain. From then on the session takes host
 *     tensors alone; the cache has every token that had arrived, layers whose last ones had not are shorter (a truncation makes
 *     the sequence even). */
TANDEM_API int32_t tandem_attend(tandem_session *session, const tandem_attend_args *args, tandem_error **error);

/* Ends speculation in one sequence: of its speculative tokens those at kept_idx [n_kept] (ascending; a chain in the tree,
 * starting below the last token before) stay, in this order, the others go, in every layer. MAW and selections become
 * what appending only these would have given. n_kept = 0 gives all up. Errors: INVALID_STATE (nothing speculative, or
 * layers uneven), INVALID_ARGUMENT (not a chain). */
TANDEM_API int32_t tandem_session_commit(tandem_session *session, int64_t sequence, const int64_t *kept_idx, int64_t n_kept,
                                         tandem_error **error);

/* Opens a step: q_lens[i] tokens will be appended to sequences[i] in every layer, by attend calls or by a graph replay.
 * Reserves everything that needs memory, marks the sequences in flight, and wakes the CPU workers, unless the session has
 * sleep_between_calls. Not captured. Errors: as tandem_sequence_reserve(); INVALID_STATE (a step is open).
 *
 * With a stream (not NULL) the step is planned for device tensors on it: what the host does for each layer is made ready, and
 * lengths are those after the step. Then each layer is attended once, in order, all sequences in one call with the q_lens of
 * the step; these calls launch kernels and do nothing else, may be captured in a CUDA graph, and in later steps a replay of
 * the graph stands for them. A graph serves steps of at most as many tokens, and tokens of a sequence, as the one it was
 * captured in; it may be replayed once a step. From the first captured call on a session takes no larger steps than before:
 * CAPACITY, as are more than 1,024 tokens, and more than one token of a sequence with policy "streaming" and window_tokens = 0,
 * with policies "hip" and "patterns", and in layers with a sliding window where tokens have been removed before; and sequences
 * longer than window_tokens with policy "hip". n_sequences is not 0, attend calls that are not captured are on the same stream,
 * and none is TANDEM_ATTEND_PARTIAL. UNSUPPORTED as tandem_attend() with device tensors, and with routes "stream",
 * "host+stream" and "recompute". Until the step ends its sequences are neither read nor hashed (BUSY).
 *
 * A layer that has not been attended when the stream passes the end of the step takes the step back, with those begun since; so
 * does a graph replayed twice or outside a step, for the next step; and a lack of memory for the host's part, which is said as
 * OUT_OF_MEMORY where else INVALID_STATE is. When this is known, calls of an open step fail with INVALID_STATE, and so does the
 * next tandem_step_begin() with a stream, or tandem_attend() with device tensors outside a step, which waits for its stream (work
 * on others must have ended). From then on the session and its graphs work as before. */
TANDEM_API int32_t tandem_step_begin(tandem_session *session, const int64_t *sequences, const int64_t *q_lens,
                                     int32_t n_sequences, void *stream, tandem_error **error);
/* Closes the step and lets the CPU workers sleep; stream: as in tandem_step_begin(). Where a layer got fewer tokens than declared,
 * every sequence of the step goes back to its length at tandem_step_begin() and the call returns INVALID_STATE naming the layer
 * (a planned step: a later call does, see tandem_step_begin(); but where a layer's call has failed when its rows were on their
 * way already, this one does: it waits for its stream, and until then the layers take no other call). Not captured:
 * INVALID_STATE, and the step stays open. */
TANDEM_API int32_t tandem_step_end(tandem_session *session, void *stream, tandem_error **error);

/* ---- merge ------------------------------------------------------------------------------------------------------ */

/* Merges n_states states (1 to 65,536) over disjoint keys (they may come from other machines): m = max lse_i,
 * w_i = exp(lse_i - m), o = sum w_i o_i / sum w_i, lse = m + log sum w_i. o[i]: [n_tokens, n_heads, head_dim],
 * lse[i]: [n_tokens, n_heads] f32. lse = -inf is the empty state: its o counts as zero, whatever it holds; all empty gives
 * (0, -inf). NaN is passed on. o_out and lse_out may be o[0] and lse[0] themselves. Order of summation is the order of the
 * arrays. On the CPU, in host memory: stream is NULL, and tensors in device memory are UNSUPPORTED. */
TANDEM_API int32_t tandem_merge(const tandem_tensor *o_out, const tandem_tensor *lse_out, const tandem_tensor *const *o,
                                const tandem_tensor *const *lse, int32_t n_states, tandem_engine *engine, void *stream,
                                tandem_error **error);

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
