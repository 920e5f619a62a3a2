/* SPDX-License-Identifier: MIT
 * Three texts in one batch: while one prompt is still being appended, the other texts decode. */
#include "toy.h"

enum { kTexts = 3, kChunk = 128, kSteps = 12 };

int main(void) {
  static const int64_t prompts[kTexts] = {40, 300, 1000};
  int64_t sequences[kTexts], q_lens[kTexts], lengths[kTexts] = {0};
  double worst = 0;
  tandem_engine* engine;
  tandem_cache* cache;
  tandem_session* session;
  tandem_model* model = toy_model();
  TRY(tandem_engine_create(&engine, NULL, error));
  TRY(tandem_cache_create(&cache, engine, model, NULL, error));
  TRY(tandem_session_create(&session, cache, NULL, error));
  for (int s = 0; s < kTexts; ++s) TRY(tandem_sequence_create(&sequences[s], cache, error));
  for (int step = 0; step < kSteps; ++step) {
    int64_t n = 0;
    for (int s = 0; s < kTexts; ++s) {
      const int64_t left = prompts[s] - lengths[s];
      q_lens[s] = left <= 0 ? 1 : left < kChunk ? left : kChunk;
      n += q_lens[s];
    }
    toy_call* call = toy_call_create(n, sequences, q_lens, kTexts);
    TRY(tandem_step_begin(session, sequences, q_lens, kTexts, NULL, error));
    for (int l = 0; l < kLayers; ++l) {
      int64_t row = 0;
      for (int s = 0; s < kTexts; row += q_lens[s++]) toy_fill(call, row, s, l, lengths[s], q_lens[s]);
      call->args.layer_idx = l;
      TRY(tandem_attend(session, &call->args, error)); /* one call has the rows of all sequences, one after another */
      row = 0;
      for (int s = 0; s < kTexts; ++s) {
        row += q_lens[s];
        worst = fmax(worst, toy_error(call->o + (row - 1) * kQRow, s, l, lengths[s] + q_lens[s] - 1));
      }
    }
    TRY(tandem_step_end(session, NULL, error));
    for (int s = 0; s < kTexts; ++s) lengths[s] += q_lens[s];
    toy_call_free(call);
  }
  printf("lengths %lld, %lld and %lld, %.0e from attention in double precision\n", (long long)lengths[0],
         (long long)lengths[1], (long long)lengths[2], worst);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return worst < 1e-2 ? 0 : 1;
}
