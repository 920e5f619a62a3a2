/* SPDX-License-Identifier: MIT
 * Two sessions over one cache: one attends all keys, the other only keys that its policy selects. */
#include "toy.h"

enum { kPrompt = 4096, kTokens = 8, kText = 3 };

static void attend(tandem_session* session, toy_call* call, int layer) {
  call->args.layer_idx = layer;
  TRY(tandem_attend(session, &call->args, error));
}

int main(void) {
  int64_t sequence, n = kPrompt;
  double worst = 0, sparse_worst = 0;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  tandem_session_stats stats = TANDEM_SESSION_STATS_INIT, sparse_stats = TANDEM_SESSION_STATS_INIT;
  tandem_engine* engine;
  tandem_cache* cache;
  tandem_session *session, *sparse;
  tandem_model* model = toy_model();
  TRY(tandem_engine_create(&engine, NULL, error));
  TRY(tandem_cache_create(&cache, engine, model, NULL, error));
  TRY(tandem_session_create(&session, cache, NULL, error));
  options.policy = "hgca"; /* the window, the first tokens, and keys that recent queries have attended strongly */
  options.window_tokens = 512;
  TRY(tandem_session_create(&sparse, cache, &options, error));
  TRY(tandem_sequence_create(&sequence, cache, error));
  for (int64_t first = 0; first < kPrompt + kTokens; first += n) {
    n = first == 0 ? kPrompt : 1;
    toy_call* call = toy_call_create(n, &sequence, &n, 1);
    for (int l = 0; l < kLayers; ++l) {
      toy_fill(call, 0, kText, l, first, n);
      attend(sparse, call, l); /* appends the rows, too */
      sparse_worst = fmax(sparse_worst, toy_error(call->o + (n - 1) * kQRow, kText, l, first + n - 1));
      if (first == 0) continue;
      call->args.k = call->args.v = NULL; /* they are there already: this call attends, and appends nothing */
      attend(session, call, l);
      call->args.k = &call->tensors[1];
      call->args.v = &call->tensors[2];
      worst = fmax(worst, toy_error(call->o, kText, l, first));
    }
    toy_call_free(call);
    if (first == 0) TRY(tandem_session_get_stats(&sparse_stats, sparse, error));
  }
  const int64_t prompt_bytes = sparse_stats.resident_kv_bytes_read + sparse_stats.host_kv_bytes_read;
  TRY(tandem_session_get_stats(&sparse_stats, sparse, error));
  TRY(tandem_session_get_stats(&stats, session, error));
  const double all = (double)(stats.resident_kv_bytes_read + stats.host_kv_bytes_read) / kTokens;
  const double few =
      (double)(sparse_stats.resident_kv_bytes_read + sparse_stats.host_kv_bytes_read - prompt_bytes) / kTokens;
  printf("all keys: %.1f MB read for a token, %.0e from double precision\n", all / 1e6, worst);
  printf("hgca: %.1f MB read for a token, %.0e\n", few / 1e6, sparse_worst);
  tandem_session_release(sparse);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return worst < 1e-2 && few <= all ? 0 : 1;
}
