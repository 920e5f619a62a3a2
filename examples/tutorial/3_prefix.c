/* SPDX-License-Identifier: MIT
 * One prompt, three continuations: the forks share the prompt's pages. One fork drops its last tokens. */
#include "toy.h"

enum { kPrompt = 2048, kForks = 3, kTokens = 5, kText = 1 };

static void append(tandem_session* session, int64_t sequence, int64_t first, int64_t n, double* worst) {
  toy_call* call = toy_call_create(n, &sequence, &n, 1);
  for (int l = 0; l < kLayers; ++l) {
    toy_fill(call, 0, kText, l, first, n);
    call->args.layer_idx = l;
    TRY(tandem_attend(session, &call->args, error));
    *worst = fmax(*worst, toy_error(call->o + (n - 1) * kQRow, kText, l, first + n - 1));
  }
  toy_call_free(call);
}

int main(void) {
  int64_t prompt, forks[kForks];
  uint64_t digests[2];
  double worst = 0;
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  tandem_engine* engine;
  tandem_cache* cache;
  tandem_session* session;
  tandem_model* model = toy_model();
  TRY(tandem_engine_create(&engine, NULL, error));
  TRY(tandem_cache_create(&cache, engine, model, NULL, error));
  TRY(tandem_session_create(&session, cache, NULL, error));
  TRY(tandem_sequence_create(&prompt, cache, error));
  append(session, prompt, 0, kPrompt, &worst);
  for (int f = 0; f < kForks; ++f) {
    TRY(tandem_sequence_fork(&forks[f], cache, prompt, error));
    append(session, forks[f], kPrompt, kTokens, &worst);
  }
  TRY(tandem_cache_get_stats(&stats, cache, error));
  printf("%lld pages are shared, %lld are not\n", (long long)stats.n_pages_shared,
         (long long)(stats.n_pages_used - stats.n_pages_shared));
  TRY(tandem_sequence_truncate(cache, forks[0], kPrompt, error));
  TRY(tandem_sequence_digest(&digests[0], cache, forks[0], error));
  TRY(tandem_sequence_digest(&digests[1], cache, prompt, error));
  printf("cut to the prompt, a fork has %s\n", digests[0] == digests[1] ? "the prompt's bytes" : "other bytes");
  for (int f = 0; f < kForks; ++f) TRY(tandem_sequence_drop(cache, forks[f], error));
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return worst < 1e-2 && digests[0] == digests[1] && stats.n_pages_shared > 0 ? 0 : 1;
}
