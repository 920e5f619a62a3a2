/* SPDX-License-Identifier: MIT
 * A small engine: requests wait for memory, prompts come in chunks while other requests decode, and finished requests
 * leave. */
#include "toy.h"

enum { kRequests = 8, kChunk = 256, kMostInBatch = 4 };

typedef struct request {
  int64_t n_prompt, n_tokens; /* requested tokens */
  int64_t sequence, length;   /* 0: the request waits, or is done */
  int is_done;
} request;

/* Admits a request if there is memory for all its tokens. */
static int admit(tandem_cache* cache, request* of) {
  tandem_error* refusal = NULL;
  TRY(tandem_sequence_create(&of->sequence, cache, error));
  const int32_t status = tandem_sequence_reserve(cache, of->sequence, of->n_prompt + of->n_tokens, &refusal);
  if (status == TANDEM_OK) return 1;
  if (status != TANDEM_ERROR_CAPACITY) {
    fprintf(stderr, "%s\n", tandem_error_message(refusal));
    exit(1);
  }
  tandem_error_release(refusal);
  TRY(tandem_sequence_drop(cache, of->sequence, error));
  of->sequence = 0;
  return 0;
}

/* Runs one step of all requests in the batch. Returns the worst difference from double precision. */
static double run_step(tandem_session* session, request* const* batch, int n) {
  int64_t sequences[kMostInBatch], q_lens[kMostInBatch], n_rows = 0;
  double worst = 0;
  for (int i = 0; i < n; ++i) {
    const int64_t left = batch[i]->n_prompt - batch[i]->length;
    sequences[i] = batch[i]->sequence;
    q_lens[i] = left <= 0 ? 1 : left < kChunk ? left : kChunk;
    n_rows += q_lens[i];
  }
  toy_call* call = toy_call_create(n_rows, sequences, q_lens, n);
  TRY(tandem_step_begin(session, sequences, q_lens, n, NULL, error));
  for (int l = 0; l < kLayers; ++l) {
    int64_t row = 0;
    for (int i = 0; i < n; row += q_lens[i++]) toy_fill(call, row, batch[i]->n_prompt, l, batch[i]->length, q_lens[i]);
    call->args.layer_idx = l;
    TRY(tandem_attend(session, &call->args, error));
    const int64_t last = q_lens[0] - 1; /* only one row is checked, as double precision is slow */
    worst = fmax(worst, toy_error(call->o + last * kQRow, batch[0]->n_prompt, l, batch[0]->length + last));
  }
  TRY(tandem_step_end(session, NULL, error));
  for (int i = 0; i < n; ++i) batch[i]->length += q_lens[i];
  toy_call_free(call);
  return worst;
}

int main(void) {
  request requests[kRequests] = {{700, 10, 0, 0, 0}, {90, 30, 0, 0, 0},  {1200, 5, 0, 0, 0}, {33, 25, 0, 0, 0},
                                 {500, 12, 0, 0, 0}, {1500, 4, 0, 0, 0}, {10, 40, 0, 0, 0},  {256, 8, 0, 0, 0}};
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const int64_t longest[2] = {2048, 2048};
  int64_t n_steps = 0, n_done = 0, n_freed = 0;
  int most = 0;
  double worst = 0;
  tandem_engine* engine;
  tandem_cache* cache;
  tandem_session* session;
  tandem_model* model = toy_model();
  TRY(tandem_engine_create(&engine, NULL, error));
  TRY(tandem_plan_memory(&plan, engine, model, &options, NULL, longest, 2, error));
  options.host_cap_bytes = plan.host_kv_bytes + plan.host_session_bytes; /* two long contexts, or several short ones */
  TRY(tandem_cache_create(&cache, engine, model, &options, error));
  TRY(tandem_session_create(&session, cache, NULL, error));
  while (n_done < kRequests) {
    request* batch[kMostInBatch];
    int n = 0;
    for (int r = 0; r < kRequests && n < kMostInBatch; ++r) {
      if (requests[r].is_done || (requests[r].sequence == 0 && !admit(cache, &requests[r]))) continue;
      batch[n++] = &requests[r];
    }
    if (n == 0) return fprintf(stderr, "no request fits into the cache\n"), 1;
    worst = fmax(worst, run_step(session, batch, n));
    most = n > most ? n : most;
    ++n_steps;
    for (int i = 0; i < n; ++i) {
      if (batch[i]->length < batch[i]->n_prompt + batch[i]->n_tokens) continue;
      TRY(tandem_sequence_drop(cache, batch[i]->sequence, error));
      batch[i]->is_done = 1;
      ++n_done;
    }
  }
  TRY(tandem_cache_get_stats(&stats, cache, error));
  TRY(tandem_cache_trim(&n_freed, cache, error));
  printf(
      "%d requests in %lld steps, up to %d at a time, in %.1f MB of %.1f; %.1f MB given back; %.0e from double precision\n",
      kRequests, (long long)n_steps, most, (double)stats.host_peak_bytes / 1e6, (double)options.host_cap_bytes / 1e6,
      (double)n_freed / 1e6, worst);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return worst < 1e-2 && stats.host_peak_bytes <= options.host_cap_bytes ? 0 : 1;
}
