/* SPDX-License-Identifier: MIT
 *
 * Memory and route plans, what an engine supports, statistics.
 * Part of tandem.h, which says what holds for every function. */
#ifndef TANDEM_PLAN_H_
#define TANDEM_PLAN_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- planning and capabilities ------------------------------------------------------------ */

/* Memory that a cache with one session will hold. The numbers are exact, except
 * selection_max_bytes: that is an upper bound, for copies of all keys outside the window. The
 * statistics say how much is in use. */
typedef struct tandem_memory_plan {
  uint32_t struct_size;
  int32_t reserved;
  int64_t host_kv_bytes;         /* pages of K and V, and of hidden states */
  int64_t host_session_bytes;    /* MAW and selection tables of one session */
  int64_t selection_max_bytes;   /* copies of selected keys, side by side: upper bound */
  int64_t device_window_bytes;   /* windows, for calls of one query a sequence: as many pages as the
                                  * tokens fill, under "hip" with bounds and lists; 0 without a
                                  * device backend. Sequences of a plan may be longer than calls
                                  * under "hip" accept */
  int64_t device_work_bytes;     /* states, descriptors and work space for the same calls, in
                                  * planned steps or not */
  int64_t kv_token_bytes;        /* K and V of one token in all layers */
  int64_t shared_bytes;          /* pinned host memory: the slots that host and device exchange, and
                                  * 32 MiB to fill windows, which the first call that fills one
                                  * takes */
  int64_t device_stream_bytes;   /* buffers of a session that may stream or rebuild keys, or bring
                                  * them for appends of append_tokens under "patterns". The first
                                  * call that does so takes them. "auto" takes them, with their work
                                  * space, if 4 MiB of a layer's keys are outside the windows,
                                  * unless the CPU is faster or steps are planned */
  int64_t device_weights_bytes;  /* projections of the route "recompute"; the first session with
                                  * that route takes them, once for a cache */
  int64_t x_token_bytes;         /* hidden states of one token in all layers */
  int64_t device_window_max_bytes; /* windows once each sequence has filled its own; they do not
                                    * grow beyond that */
  int64_t judged_kv_bytes;       /* bytes read, not held: what the stages of "hip" read to choose
                                  * keys in a decode step of all sequences, on average over the
                                  * steps between two runs of a stage. Counted as in
                                  * tandem_session_stats */
  int64_t judged_first_bytes;    /* the part of judged_kv_bytes that first stages read; it grows
                                  * with the length */
  int64_t judged_max_bytes;      /* the same as judged_kv_bytes, in a step in which all stages
                                  * run */
} tandem_memory_plan;
#define TANDEM_MEMORY_PLAN_INIT \
  { sizeof(tandem_memory_plan), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Plans n_sequences sequences of kv_lens [n_sequences] tokens, without allocating anything. cache
 * and session options may be NULL. Errors: those of the create calls; CAPACITY (a cap is exceeded;
 * *plan is filled in all the same; under "auto" also if the cap leaves keys to the CPU that would
 * have been streamed). */
TANDEM_API int32_t tandem_plan_memory(tandem_memory_plan *plan, const tandem_engine *engine,
                                      const tandem_model *model, const tandem_cache_options *cache,
                                      const tandem_session_options *session, const int64_t *kv_lens,
                                      int64_t n_sequences, tandem_error **error);
/* The same as JSON; buffer as in tandem_engine_report(). */
TANDEM_API int32_t tandem_plan_report(char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                                      const tandem_memory_plan *plan, tandem_error **error);

/* Who will attend the keys of a call on device tensors, and how long that takes. Tokens are summed
 * over the sequences; bytes are those of their K and V. A time is 0 if nothing is known. Each time
 * runs from the arrival of the call's queries until that engine has finished. CPU and bus are taken
 * to be as slow as they make each other. */
typedef struct tandem_route_plan {
  uint32_t struct_size;
  int32_t reserved;
  int64_t resident_tokens;    /* in windows, the call's own tokens included */
  int64_t host_tokens;        /* attended by the CPU */
  int64_t stream_tokens;      /* K and V cross the bus */
  int64_t host_bytes;
  int64_t stream_bytes;
  int64_t host_ns;            /* the CPU */
  int64_t bus_ns;             /* the bus. Includes copies that it makes before the queries arrive,
                               * if the session's last such calls made some */
  int64_t device_ns;          /* the device: rebuilt keys, long appends (by a trial of their
                               * kernels); 0 where this is hidden behind the bus */
  int64_t total_ns;           /* until the last engine has finished, without copies before the
                               * queries arrive */
  int64_t host_alone_ns;      /* if the CPU attended all keys outside the windows */
  int64_t stream_alone_ns;    /* if all keys outside the windows crossed the bus */
  int64_t recompute_tokens;   /* hidden states cross the bus; the device makes K and V from them */
  int64_t recompute_bytes;    /* bytes of these hidden states */
  int64_t recompute_alone_ns; /* if the device made all keys outside the windows. Only the bus
                               * counts where making them has not been measured, as for a hidden
                               * state that is no smaller than K and V; 0: the cache has no hidden
                               * states */
} tandem_route_plan;
#define TANDEM_ROUTE_PLAN_INIT \
  { sizeof(tandem_route_plan), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Plans the next such call from what the engine has measured. Measures first where it has not (some
 * tens of ms). kv_lens [n_sequences]: tokens of each sequence, the call's own included. q_lens
 * [n_sequences]: the call's own tokens; NULL: 1 each. The plan is for the session's route. An
 * append in chunks gets the plan of its last chunk. Outputs do not change. Errors: INVALID_ARGUMENT
 * (q_lens[i] not from 1 to kv_lens[i]), UNSUPPORTED (no device; a policy that does not attend all
 * keys of the layer), CAPACITY, OUT_OF_MEMORY (of measuring). */
TANDEM_API int32_t tandem_plan(tandem_route_plan *plan, tandem_session *session, int32_t layer_idx,
                               const int64_t *kv_lens, const int64_t *q_lens, int64_t n_sequences,
                               tandem_error **error);
/* The same as JSON; buffer as in tandem_engine_report(). */
TANDEM_API int32_t tandem_route_report(char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                                       const tandem_route_plan *plan, tandem_error **error);
/* TANDEM_OK if an engine supports such a layer, cache and session (NULL: not asked about).
 * Otherwise returns the status that the create call would return, and *why says the reason. */
TANDEM_API int32_t tandem_supports(const tandem_engine *engine, const tandem_layer_options *layer,
                                   const tandem_cache_options *cache,
                                   const tandem_session_options *session, tandem_error **why);
/* Names by index from 0, NULL past the end: of policies, and of this build's instruction sets, best
 * first. */
TANDEM_API const char *tandem_policy_name(int32_t idx);
TANDEM_API const char *tandem_cpu_isa_name(int32_t idx);
/* 1 if this processor has that instruction set, else 0, also for NULL and unknown names. */
TANDEM_API int32_t tandem_cpu_isa_available(const char *name);

/* ---- statistics and trace ----------------------------------------------------------------- */

/* What a cache holds now, and the most that it has held. */
typedef struct tandem_cache_stats {
  uint32_t struct_size;
  int32_t reserved;
  int64_t n_sequences;
  int64_t n_pages_used;         /* held by at least one sequence */
  int64_t n_pages_shared;       /* held by more than one */
  int64_t host_kv_bytes;        /* pages allocated, as in the plan */
  int64_t host_session_bytes;
  int64_t selection_bytes;
  int64_t host_peak_bytes;      /* most that was ever in use at once; host_cap_bytes bounds it */
  int64_t device_window_bytes;  /* windows of all sessions, in device memory */
  int64_t device_work_bytes;    /* work space of the sessions' calls, in device memory */
  int64_t device_peak_bytes;    /* most that was ever in use at once; device_cap_bytes bounds it */
  int64_t device_stream_bytes;  /* buffers of sessions that stream or rebuild keys */
  int64_t pinned_bytes;         /* the part of host_kv_bytes that is pinned for streams; the driver
                                 * keeps page tables for it on the device, a 512th of its size */
  int64_t device_weights_bytes; /* projections in device memory */
} tandem_cache_stats;
#define TANDEM_CACHE_STATS_INIT \
  { sizeof(tandem_cache_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Fills *stats. */
TANDEM_API int32_t tandem_cache_get_stats(tandem_cache_stats *stats, const tandem_cache *cache,
                                          tandem_error **error);

/* Ids of the cache's sequences, ascending. Writes at most `capacity` of them; *n_sequences gets the
 * number of sequences. */
TANDEM_API int32_t tandem_cache_sequences(int64_t *sequences, int64_t capacity,
                                          int64_t *n_sequences, const tandem_cache *cache,
                                          tandem_error **error);
/* Gives back host memory that dropped and truncated sequences have left, and unpins it. Frees whole
 * extents (some 2,048 tokens of all layers) in which no sequence has a page. Waits for calls under
 * way on the device. Later appends take memory anew. *n_bytes (may be NULL) gets the number of
 * bytes. */
TANDEM_API int32_t tandem_cache_trim(int64_t *n_bytes, tandem_cache *cache, tandem_error **error);

/* Sums since the session was created. */
typedef struct tandem_session_stats {
  uint32_t struct_size;
  int32_t reserved;
  int64_t n_attends;             /* calls */
  int64_t n_query_tokens;        /* queries, per layer */
  int64_t resident_kv_bytes_read; /* K and V that attention read inside the window, or that were
                                   * brought to the device for an append under "patterns"; an upper
                                   * bound for calls under "hip" on device tensors */
  int64_t host_kv_bytes_read;    /* K and V read outside the window: sinks, selected or all keys,
                                  * the union over a query group */
  int64_t dense_kv_bytes;        /* what policy "all" would have read in the same calls */
  int64_t evicted_tokens;        /* per layer */
  int64_t n_refreshes;           /* selections made, at evictions and re-evaluations; under "hip"
                                  * runs of stages in decode calls */
  int64_t selected_keys;         /* now selected, over layers, sequences and KV heads. Lists that
                                  * "hip" keeps on a device are copied to the host for this */
  int64_t host_keys;             /* keys now outside the window, sinks not counted: selected_keys
                                  * were chosen from these */
  int64_t attend_ns;
  int64_t refresh_ns;            /* time to make selections. At evictions this is in the background;
                                  * a re-evaluation is part of the append's call or, with device
                                  * tensors, comes after it */
  int64_t refresh_wait_ns;       /* time that attend calls on host tensors waited for the
                                  * background */
  int64_t n_device_attends;      /* calls on device tensors, a part of n_attends; attend_ns counts
                                  * them until their work is enqueued */
  int64_t n_host_parts;          /* parts that the CPU computed for calls on device tensors: one a
                                  * call, or one for each 512 tokens */
  int64_t host_part_ns;          /* time of these parts, from the arrival of the queries until the
                                  * states are ready */
  int64_t staged_kv_bytes;       /* appended K and V that came from the device to the host store,
                                  * through pinned slots and a worker, or by copies (long
                                  * appends) */
  int64_t filled_kv_bytes;       /* K and V copied from the host store into windows that lacked
                                  * them, or for appends under "patterns" */
  int64_t n_stream_parts;        /* parts outside the window that the device computed, counted as in
                                  * n_host_parts */
  int64_t stream_part_ns;        /* time of these parts, from when the bus could begin until the
                                  * last key is on the device */
  int64_t streamed_kv_bytes;     /* K and V that crossed the bus for these parts */
  int64_t n_joint_parts;         /* parts of n_stream_parts in which the CPU attended some keys;
                                  * n_host_parts has them too */
  int64_t host_part_tokens;      /* keys in all KV heads that the CPU attended, per layer, where a
                                  * policy attends all */
  int64_t stream_part_tokens;    /* keys in all KV heads that crossed the bus, per layer */
  int64_t n_planned_parts;       /* parts with 4 MiB of keys outside the window whose time the
                                  * engine could predict */
  int64_t predicted_part_ns;     /* predicted time of these parts, by tandem_plan()'s program */
  int64_t planned_part_ns;       /* measured time of these parts, from the arrival of the queries
                                  * until CPU and bus have finished */
  int64_t streamed_x_bytes;      /* hidden states that crossed the bus; the device made K and V from
                                  * them */
  int64_t judged_kv_bytes;       /* K, and bounds of K, that "hip" read to choose keys. In a descent
                                  * each query head reads its own keys; only those of one query head
                                  * are counted. An upper bound for device tensors: a stage's last
                                  * chunk counts as whole */
  int64_t pattern_pairs;         /* pairs of a query and a key that appends under "patterns"
                                  * attended, summed over query heads */
  int64_t pattern_dense_pairs;   /* pairs that policy "all" would have attended in the same calls */
} tandem_session_stats;
#define TANDEM_SESSION_STATS_INIT \
  { sizeof(tandem_session_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Waits for refreshes in flight and for calls under way on the device. */
TANDEM_API int32_t tandem_session_get_stats(tandem_session_stats *stats,
                                            const tandem_session *session, tandem_error **error);

/* pattern_pairs and pattern_dense_pairs of tandem_session_stats, for one layer. Waits for calls
 * under way on the device. */
TANDEM_API int32_t tandem_session_pattern_pairs(int64_t *pairs, int64_t *dense_pairs,
                                                const tandem_session *session, int32_t layer_idx,
                                                tandem_error **error);

/* Token indices of the keys that the next decode query of one KV head would attend: ascending,
 * sinks and window included. Writes at most `capacity`; *n_kept gets the number of keys. Waits for
 * a refresh in flight. maw (NULL: not wanted) gets a number for each key, for query head q_head_idx
 * of the group. For keys selected outside window and sinks it is their share, and the shares sum to
 * 1. For other keys it is 0.
 *
 * After some calls the result is what the sequence's last query attended, until the next call of
 * the layer or a change of the sequence: after a call that has named its keys (selection.h), and
 * after an append under "patterns", for the query head. So it is under "hip" on device tensors
 * after decode calls and planned steps: it waits for the call's search and copies its lists. Under
 * "hip" on host tensors it tells all keys while a sequence has no lists: after a fork, a
 * truncation, a removal or tandem_sequence_append(), until the next call of the layer.
 *
 * Errors: BUSY (the sequence is part of an open planned step), UNSUPPORTED (sequence: the device
 * pruned its last query in an append, in a call without k, or before a fork; these lists are not
 * kept). */
TANDEM_API int32_t tandem_session_selection(int64_t *token_idx, float *maw, int64_t capacity,
                                            int64_t *n_kept, tandem_session *session,
                                            int64_t sequence, int32_t layer_idx,
                                            int32_t kv_head_idx, int32_t q_head_idx,
                                            tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_PLAN_H_ */
