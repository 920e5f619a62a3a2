/* SPDX-License-Identifier: MIT
 * Replaces a model in the tutorial's programs: rows that depend on layer, token and head, and attention in double
 * precision for comparison. */
#ifndef TANDEM_TUTORIAL_TOY_H_
#define TANDEM_TUTORIAL_TOY_H_

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <tandem/tandem.h>

enum { kLayers = 4, kQHeads = 8, kKvHeads = 2, kDim = 64, kQRow = kQHeads * kDim, kKvRow = kKvHeads * kDim };
enum { kQuery = 1, kKey = 2, kValue = 3 };

/* Ends the program with the library's message if a call fails. */
#define TRY(call)                                            \
  do {                                                       \
    tandem_error* error_ = NULL;                             \
    tandem_error** const error = &error_;                    \
    if ((call) != TANDEM_OK) {                               \
      fprintf(stderr, "%s\n", tandem_error_message(error_)); \
      exit(1);                                               \
    }                                                        \
  } while (0)

/* Returns a number from -1 to 1 that depends on all arguments: element i of a row of a text's token. */
static inline float toy_number(int kind, int64_t text, int layer, int64_t token, int i) {
  uint64_t x = (uint64_t)text * 1000003u + (uint64_t)token * 8191u + (uint64_t)(layer * 4 + kind) * 131071u + (uint64_t)i;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (float)((x >> 40) & 0xffff) / 32768.0f - 1.0f;
}

/* Writes the rows of tokens [first, first + n) to `to`, [n][n_heads][kDim]. */
static inline void toy_rows(float* to, int kind, int64_t text, int layer, int64_t first, int64_t n) {
  const int length = kind == kQuery ? kQRow : kKvRow;
  for (int64_t t = 0; t < n; ++t)
    for (int i = 0; i < length; ++i)
      to[t * length + i] = toy_number(kind, text, layer, first + t, i) * (kind == kQuery ? 3 : 1);
}

/* Returns the largest difference between o [kQHeads][kDim] and exact attention of a text's token to itself and all before
 * it. */
static inline double toy_error(const float* o, int64_t text, int layer, int64_t token) {
  double worst = 0;
  double* const weights = malloc(sizeof(double) * (size_t)(token + 1));
  for (int h = 0; h < kQHeads; ++h) {
    const int kv = h / (kQHeads / kKvHeads);
    double sum = 0, answer[kDim] = {0};
    for (int64_t t = 0; t <= token; ++t) {
      double logit = 0;
      for (int i = 0; i < kDim; ++i)
        logit +=
            3.0 * toy_number(kQuery, text, layer, token, h * kDim + i) * toy_number(kKey, text, layer, t, kv * kDim + i);
      sum += weights[t] = exp(logit / sqrt(kDim));
    }
    for (int64_t t = 0; t <= token; ++t)
      for (int i = 0; i < kDim; ++i) answer[i] += weights[t] / sum * toy_number(kValue, text, layer, t, kv * kDim + i);
    for (int i = 0; i < kDim; ++i) worst = fmax(worst, fabs(answer[i] - o[h * kDim + i]));
  }
  free(weights);
  return worst;
}

/* Returns a model of kLayers equal layers. */
static inline tandem_model* toy_model(void) {
  tandem_model* model;
  tandem_layer_options layers[kLayers];
  for (int l = 0; l < kLayers; ++l) {
    tandem_layer_options_init(&layers[l]);
    layers[l].n_q_heads = kQHeads;
    layers[l].n_kv_heads = kKvHeads;
    layers[l].k_head_dim = kDim;
  }
  TRY(tandem_model_create(&model, layers, kLayers, error));
  return model;
}

/* Returns a tensor [n][n_heads][kDim] over data. */
static inline tandem_tensor toy_tensor(float* data, int64_t n, int n_heads) {
  tandem_tensor tensor;
  const int64_t shape[3] = {n, n_heads, kDim};
  TRY(tandem_tensor_init(&tensor, TANDEM_F32, data, 3, shape, error));
  return tensor;
}

/* The inputs and outputs of one call: rows of all its tokens. */
typedef struct toy_call {
  float *q, *k, *v, *o;
  tandem_tensor tensors[4];
  tandem_attend_args args;
} toy_call;

/* Makes a call for n tokens of all sequences. sequences and q_lens [n_sequences] are borrowed. */
static inline toy_call* toy_call_create(int64_t n, const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences) {
  toy_call* const call = calloc(1, sizeof *call);
  call->q = malloc(sizeof(float) * (size_t)(n * kQRow));
  call->o = malloc(sizeof(float) * (size_t)(n * kQRow));
  call->k = malloc(sizeof(float) * (size_t)(n * kKvRow));
  call->v = malloc(sizeof(float) * (size_t)(n * kKvRow));
  call->tensors[0] = toy_tensor(call->q, n, kQHeads);
  call->tensors[1] = toy_tensor(call->k, n, kKvHeads);
  call->tensors[2] = toy_tensor(call->v, n, kKvHeads);
  call->tensors[3] = toy_tensor(call->o, n, kQHeads);
  tandem_attend_args_init(&call->args);
  call->args.n_sequences = n_sequences;
  call->args.sequences = sequences;
  call->args.q_lens = q_lens;
  call->args.q = &call->tensors[0];
  call->args.k = &call->tensors[1];
  call->args.v = &call->tensors[2];
  call->args.o = &call->tensors[3];
  return call;
}
/* Fills rows from `row` on with those of a text's tokens [first, first + n), in one layer. */
static inline void toy_fill(toy_call* call, int64_t row, int64_t text, int layer, int64_t first, int64_t n) {
  toy_rows(call->q + row * kQRow, kQuery, text, layer, first, n);
  toy_rows(call->k + row * kKvRow, kKey, text, layer, first, n);
  toy_rows(call->v + row * kKvRow, kValue, text, layer, first, n);
}
static inline void toy_call_free(toy_call* call) {
  free(call->q);
  free(call->o);
  free(call->k);
  free(call->v);
  free(call);
}

#endif
