/* SPDX-License-Identifier: MIT
 * A prompt in chunks, then tokens one by one, in a model of four layers.
 * cc 1_prompt.c $(pkg-config --cflags --libs tandem) -lm */
#include "toy.h"

enum { kPrompt = 1000, kChunk = 256, kTokens = 20, kText = 7 };

int main(void) {
  tandem_engine* engine;
  tandem_cache* cache;
  tandem_session* session;
  int64_t sequence, length = 0, q_len;
  double worst = 0;
  tandem_model* model = toy_model();
  TRY(tandem_engine_create(&engine, NULL, error));
  TRY(tandem_cache_create(&cache, engine, model, NULL, error));
  TRY(tandem_session_create(&session, cache, NULL, error));
  TRY(tandem_sequence_create(&sequence, cache, error));
  while (length < kPrompt + kTokens) {
    q_len = length >= kPrompt ? 1 : kPrompt - length < kChunk ? kPrompt - length : kChunk;
    toy_call* call = toy_call_create(q_len, &sequence, &q_len, 1);
    TRY(tandem_step_begin(session, &sequence, &q_len, 1, NULL, error));
    for (int l = 0; l < kLayers; ++l) {
      toy_fill(call, 0, kText, l, length, q_len); /* a model computes q, k and v here, and the rest of its layer behind it */
      call->args.layer_idx = l;
      TRY(tandem_attend(session, &call->args, error));
      worst = fmax(worst, toy_error(call->o + (q_len - 1) * kQRow, kText, l, length + q_len - 1));
    }
    TRY(tandem_step_end(session, NULL, error));
    length += q_len;
    toy_call_free(call);
  }
  TRY(tandem_sequence_length(&length, cache, sequence, kLayers - 1, error));
  printf("%lld tokens in each layer, %.0e from attention in double precision\n", (long long)length, worst);
  tandem_session_release(session);
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return worst < 1e-2 ? 0 : 1;
}
