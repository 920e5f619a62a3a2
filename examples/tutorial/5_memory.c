/* SPDX-License-Identifier: MIT
 * Plans the memory of two contexts, caps the cache at it, and shows an allocation beyond the cap. */
#include "toy.h"

enum { kText = 5 };

int main(void) {
  const int64_t kv_lens[2] = {3000, 5000};
  int64_t sequences[2], n, n_refused = 0;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  tandem_engine* engine;
  tandem_cache* cache;
  tandem_error* refusal = NULL;
  tandem_model* model = toy_model();
  TRY(tandem_engine_create(&engine, NULL, error));
  options.k_type = options.v_type = TANDEM_Q8_0;
  TRY(tandem_plan_memory(&plan, engine, model, &options, NULL, kv_lens, 2, error));
  printf("contexts of 3,000 and 5,000 tokens: %.1f MB of keys and values\n", (double)plan.host_kv_bytes / 1e6);
  options.host_cap_bytes = plan.host_kv_bytes;
  TRY(tandem_cache_create(&cache, engine, model, &options, error));
  for (int s = 0; s < 2; ++s) {
    TRY(tandem_sequence_create(&sequences[s], cache, error));
    TRY(tandem_sequence_reserve(cache, sequences[s], kv_lens[s], error)); /* appends of so many tokens find their memory */
  }
  for (int64_t extra;;) { /* one context more than planned */
    TRY(tandem_sequence_create(&extra, cache, error));
    if (tandem_sequence_reserve(cache, extra, 3000, &refusal) == TANDEM_OK) break;
    if (tandem_error_status(refusal) != TANDEM_ERROR_CAPACITY || ++n_refused == 2) break;
    printf("%s\n", tandem_error_message(refusal));
    tandem_error_release(refusal);
    TRY(tandem_sequence_drop(cache, extra, error));
    TRY(tandem_sequence_drop(cache, sequences[0], error)); /* an engine would choose the one that has waited longest */
  }
  TRY(tandem_cache_get_stats(&stats, cache, error));
  n = stats.host_kv_bytes;
  printf("in use %.1f MB, at most %.1f MB at any time\n", (double)n / 1e6, (double)stats.host_peak_bytes / 1e6);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return n_refused == 1 && stats.host_peak_bytes <= options.host_cap_bytes ? 0 : 1;
}
