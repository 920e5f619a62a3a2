/* SPDX-License-Identifier: MIT
 *
 * What a cache, a session or a call will take, what an engine supports, and what has been done.
 * Part of tandem.h, which says what holds for every function. */
#ifndef TANDEM_PLAN_H_
#define TANDEM_PLAN_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- planning and capabilities ------------------------------------------------------------ */

/* What a cache with one session will hold. Exact, except that selection_max_bytes is the most that
 * compacted copies of selected keys can take (all keys outside the window), and what is in use is
 * in the statistics. */
typedef struct tandem_memory_plan {
  uint32_t struct_size;
  int32_t reserved;
  int64_t host_kv_bytes;         /* pages of K and V, and of hidden states */
  int64_t host_session_bytes;    /* MAW and selection tables of one session */
  int64_t selection_max_bytes;   /* upper bound */
  int64_t device_window_bytes;   /* windows, for calls of one query a sequence: as many pages as the
                                  * tokens fill, under "hip" with bounds and lists; 0 without a
                                  * device backend. A plan may be of sequences longer than calls
                                  * under "hip" take */
  int64_t device_work_bytes;     /* states, descriptors, work space, for the same calls, in planned
                                  * steps or not */
  int64_t kv_token_bytes;        /* K and V of one token in all layers */
  int64_t shared_bytes;          /* pinned host memory: to hand over, and 32 MiB to fill windows,
                                  * taken by the first call that does */
  int64_t device_stream_bytes;   /* buffers of a session that may stream or rebuild keys, or bring
                                  * them for appends of append_tokens under "patterns", taken by the
                                  * first call that does. "auto" takes them, with their work space,
                                  * where 4 MiB of a layer's keys are outside the windows, unless
                                  * the CPU is faster or steps are planned */
  int64_t device_weights_bytes;  /* projections of the route "recompute", taken once for a cache by
                                  * the first such session */
  int64_t x_token_bytes;         /* hidden states of one token in all layers */
  int64_t device_window_max_bytes; /* windows once each sequence has filled its own, however long it
                                    * becomes */
  int64_t judged_kv_bytes;       /* not held, but read: what the stages of "hip" read to choose keys
                                  * in a decode step of all sequences, on average over the steps
                                  * between which lists are kept. Counted as in tandem_session_stats
                                  */
  int64_t judged_first_bytes;    /* of these, what first stages read, which grows with the length */
  int64_t judged_max_bytes;      /* in a step in which all stages run */
} tandem_memory_plan;
#define TANDEM_MEMORY_PLAN_INIT \
  { sizeof(tandem_memory_plan), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Plan for n_sequences sequences of kv_lens [n_sequences] tokens, without allocating anything.
 * cache and session options may be NULL. Errors: those of the create calls; CAPACITY where a cap is
 * exceeded (*plan is filled in all the same), with "auto" where that leaves the CPU with keys that
 * would have been streamed. */
TANDEM_API int32_t tandem_plan_memory(tandem_memory_plan *plan, const tandem_engine *engine,
                                      const tandem_model *model, const tandem_cache_options *cache,
                                      const tandem_session_options *session, const int64_t *kv_lens,
                                      int64_t n_sequences, tandem_error **error);
/* The same as JSON; buffer as in tandem_engine_report(). */
TANDEM_API int32_t tandem_plan_report(char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                                      const tandem_memory_plan *plan, tandem_error **error);

/* Who will compute over the keys of a call on device tensors, and what that takes. Tokens are sums
 * over the sequences, bytes K and V of these. Times end where an engine has ended, counted from
 * when the call's queries are there, with CPU and bus as slow as they make each other; 0 where
 * nothing is known. */
typedef struct tandem_route_plan {
  uint32_t struct_size;
  int32_t reserved;
  int64_t resident_tokens;    /* in windows, those of the call among them */
  int64_t host_tokens;        /* attended by the CPU */
  int64_t stream_tokens;      /* whose K and V cross the bus */
  int64_t host_bytes;
  int64_t stream_bytes;
  int64_t host_ns;            /* the CPU */
  int64_t bus_ns;             /* the bus, with what it brings before the queries are there, as in
                               * the session's last such calls */
  int64_t device_ns;          /* the device: rebuilt keys, long appends (by a trial of their
                               * kernels); 0 where it hides behind the bus */
  int64_t total_ns;           /* the last of them, without that */
  int64_t host_alone_ns;      /* if the CPU had all keys outside the windows */
  int64_t stream_alone_ns;    /* if the bus had */
  int64_t recompute_tokens;   /* whose hidden states cross the bus; the device makes K and V of them
                               */
  int64_t recompute_bytes;    /* of hidden states */
  int64_t recompute_alone_ns; /* if the device made all keys outside the windows; the bus alone
                               * where making them has not been measured, as where a hidden state is
                               * no smaller than K and V; 0: there are none */
} tandem_route_plan;
#define TANDEM_ROUTE_PLAN_INIT \
  { sizeof(tandem_route_plan), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* The plan of the next such call, by what the engine has measured; where it has not, it measures
 * (some tens of ms). kv_lens [n_sequences]: tokens, those of the call among them; q_lens
 * [n_sequences]: how many these are; NULL: 1 each. Of the session's route; of an append in parts,
 * the last one; changes no output. Errors: INVALID_ARGUMENT (q_lens[i] not from 1 to kv_lens[i]),
 * UNSUPPORTED (no device; a policy that does not attend all keys of the layer), CAPACITY,
 * OUT_OF_MEMORY (of measuring). */
TANDEM_API int32_t tandem_plan(tandem_route_plan *plan, tandem_session *session, int32_t layer_idx,
                               const int64_t *kv_lens, const int64_t *q_lens, int64_t n_sequences,
                               tandem_error **error);
/* The same as JSON; buffer as in tandem_engine_report(). */
TANDEM_API int32_t tandem_route_report(char *buffer, size_t buffer_bytes, size_t *needed_bytes,
                                       const tandem_route_plan *plan, tandem_error **error);
/* TANDEM_OK when an engine can serve such a layer, cache and session (NULL: not asked about), else
 * what the create call would return, *why saying the reason. */
TANDEM_API int32_t tandem_supports(const tandem_engine *engine, const tandem_layer_options *layer,
                                   const tandem_cache_options *cache,
                                   const tandem_session_options *session, tandem_error **why);
/* Names by index from 0, NULL past the end: policies; instruction sets of this build, best first.
 */
TANDEM_API const char *tandem_policy_name(int32_t idx);
TANDEM_API const char *tandem_cpu_isa_name(int32_t idx);
/* 1 when this processor has that instruction set, else 0 (also for NULL and unknown names). */
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
  int64_t host_peak_bytes;      /* most ever in use at once: what host_cap_bytes bounds */
  int64_t device_window_bytes;  /* windows of all sessions, in device memory */
  int64_t device_work_bytes;    /* and what their calls need there */
  int64_t device_peak_bytes;    /* most ever in use at once: what device_cap_bytes bounds */
  int64_t device_stream_bytes;  /* buffers of sessions that stream or rebuild keys */
  int64_t pinned_bytes;         /* of host_kv_bytes, pinned for streams; the driver keeps page
                                 * tables of it, a 512th, on the device */
  int64_t device_weights_bytes; /* projections in device memory */
} tandem_cache_stats;
#define TANDEM_CACHE_STATS_INIT \
  { sizeof(tandem_cache_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Fills *stats. */
TANDEM_API int32_t tandem_cache_get_stats(tandem_cache_stats *stats, const tandem_cache *cache,
                                          tandem_error **error);

/* The ids of the cache's sequences, ascending. Writes at most `capacity`; *n_sequences gets their
 * number. */
TANDEM_API int32_t tandem_cache_sequences(int64_t *sequences, int64_t capacity,
                                          int64_t *n_sequences, const tandem_cache *cache,
                                          tandem_error **error);
/* Gives memory of the host store back that dropped and truncated sequences have left, and unpins
 * it: whole extents (some 2,048 tokens of all layers) of which no sequence has a page. Waits for
 * calls under way on the device. Later appends take memory anew. *n_bytes (may be NULL) gets how
 * much it was. */
TANDEM_API int32_t tandem_cache_trim(int64_t *n_bytes, tandem_cache *cache, tandem_error **error);

/* Sums since the session was created. */
typedef struct tandem_session_stats {
  uint32_t struct_size;
  int32_t reserved;
  int64_t n_attends;             /* calls */
  int64_t n_query_tokens;        /* queries, per layer */
  int64_t resident_kv_bytes_read; /* K and V read by attention inside the window, or brought to the
                                   * device for an append under "patterns"; of calls under "hip" on
                                   * device tensors an upper bound */
  int64_t host_kv_bytes_read;    /* outside it: sinks, selected or all keys, the union over a query
                                  * group */
  int64_t dense_kv_bytes;        /* what policy "all" would have read in the same calls */
  int64_t evicted_tokens;        /* per layer */
  int64_t n_refreshes;           /* selections made: at evictions and re-evaluations; under "hip"
                                  * stages that ran in decode calls */
  int64_t selected_keys;         /* now, over layers, sequences and KV heads. Lists that "hip" keeps
                                  * on a device are copied from there */
  int64_t host_keys;             /* now: what they were selected from, sinks not counted */
  int64_t attend_ns;
  int64_t refresh_ns;            /* making them: at evictions in the background, re-evaluations in
                                  * the append's call or, of device tensors, behind it */
  int64_t refresh_wait_ns;       /* attend calls on host tensors waiting for the background */
  int64_t n_device_attends;      /* of the calls, those on device tensors; their attend_ns ends when
                                  * all is on its way */
  int64_t n_host_parts;          /* parts that the CPU computed for these: one a call, or for each
                                  * 512 tokens */
  int64_t host_part_ns;          /* that: from its queries having arrived to its states being there
                                  */
  int64_t staged_kv_bytes;       /* appended K and V that came from the device to the host store:
                                  * through pinned slots and a worker, and by copies, as those of
                                  * long appends do */
  int64_t filled_kv_bytes;       /* K and V copied from the host store into windows that lacked
                                  * them, and for appends under "patterns" */
  int64_t n_stream_parts;        /* parts outside the window that the device computed: as
                                  * n_host_parts */
  int64_t stream_part_ns;        /* that: from when the bus could begin to the last key being on the
                                  * device */
  int64_t streamed_kv_bytes;     /* K and V that crossed the bus for these */
  int64_t n_joint_parts;         /* of these parts, those of which the CPU computed some keys:
                                  * counted in n_host_parts too */
  int64_t host_part_tokens;      /* keys in all KV heads that the CPU attended, where a policy
                                  * attends all, per layer */
  int64_t stream_part_tokens;    /* those that crossed the bus */
  int64_t n_planned_parts;       /* parts with 4 MiB of keys outside the window of which the engine
                                  * knew what they would take */
  int64_t predicted_part_ns;     /* that, by tandem_plan's program */
  int64_t planned_part_ns;       /* and what they took, from the queries having arrived to the last
                                  * of CPU and bus */
  int64_t streamed_x_bytes;      /* hidden states that crossed the bus, of which K and V were made
                                  * on the device */
  int64_t judged_kv_bytes;       /* K, and bounds of K, that policy "hip" read to choose keys. In a
                                  * descent each query head reads keys of its own; this counts those
                                  * of one query head. Of device tensors an upper bound: it counts
                                  * the last chunk that a stage has kept as whole */
  int64_t pattern_pairs;         /* pairs of a query and a key, query head by query head, that
                                  * appends under "patterns" attended */
  int64_t pattern_dense_pairs;   /* what policy "all" would have attended in the same calls */
} tandem_session_stats;
#define TANDEM_SESSION_STATS_INIT \
  { sizeof(tandem_session_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* Waits for refreshes in flight and for calls under way on the device. */
TANDEM_API int32_t tandem_session_get_stats(tandem_session_stats *stats,
                                            const tandem_session *session, tandem_error **error);

/* pattern_pairs and pattern_dense_pairs of one layer. Waits for calls under way on the device. */
TANDEM_API int32_t tandem_session_pattern_pairs(int64_t *pairs, int64_t *dense_pairs,
                                                const tandem_session *session, int32_t layer_idx,
                                                tandem_error **error);

/* The keys that the next decode query of one KV head would attend: token indices, ascending, sinks
 * and window included. Writes at most `capacity`; *n_kept gets their number. Waits for a refresh in
 * flight. maw (NULL: not wanted) gets, for query head q_head_idx of the group, the share of each
 * key selected outside window and sinks: they sum to 1 over these keys; 0 for the others. After a
 * call that has named its keys (selection.h), those of the sequence's last query in it, until the
 * next call of the layer or a change of the sequence; after an append under "patterns" those of the
 * query head. Under "hip" on device tensors likewise, after decode calls and planned steps: waits
 * for the call's search and copies its lists. Errors: BUSY (the sequence is part of an open planned
 * step), UNSUPPORTED (sequence: its last query was pruned on the device in an append or a call
 * without k, or before a fork; their lists are not kept). */
TANDEM_API int32_t tandem_session_selection(int64_t *token_idx, float *maw, int64_t capacity,
                                            int64_t *n_kept, tandem_session *session,
                                            int64_t sequence, int32_t layer_idx,
                                            int32_t kv_head_idx, int32_t q_head_idx,
                                            tandem_error **error);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_PLAN_H_ */
