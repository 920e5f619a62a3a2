/* SPDX-License-Identifier: MIT.  cc attend_tensors.c $(pkg-config --cflags --libs tandem) && ./a.out */
#include <stdio.h>
#include <tandem/tandem.h>
enum { kTokens = 3, kKeys = 1000, kQHeads = 8, kKvHeads = 2, kDim = 64, kMarked = 123 };
static float q[kTokens * kQHeads * kDim], o[kTokens * kQHeads * kDim]; /* [kTokens, heads, dim] */
static float k[kKvHeads * kKeys * kDim], v[kKvHeads * kKeys * kDim];   /* [heads, kKeys, dim]: a head after the other */

int main(void) {
  tandem_engine* engine;
  tandem_error* error;
  tandem_tensor tq, to, tk, tv;
  tandem_attend_tensors_args args = TANDEM_ATTEND_TENSORS_ARGS_INIT;
  const int64_t q_shape[3] = {kTokens, kQHeads, kDim}, kv_shape[3] = {kKeys, kKvHeads, kDim};
  const int64_t kv_stride[3] = {kDim, kKeys * kDim, 1};        /* elements from one key, head and dim to the next */
  for (int i = 0; i < kTokens * kQHeads * kDim; ++i) q[i] = 2; /* every key is 0 but one, whose value is 1 */
  for (int h = 0; h < kKvHeads; ++h)
    for (int d = 0; d < kDim; ++d) k[(h * kKeys + kMarked) * kDim + d] = v[(h * kKeys + kMarked) * kDim + d] = 1;
  args.flags = TANDEM_TENSORS_CAUSAL, args.q = &tq, args.k = &tk, args.v = &tv, args.o = &to;
  if (tandem_engine_create(&engine, NULL, &error) || tandem_tensor_init(&tq, TANDEM_F32, q, 3, q_shape, &error) ||
      tandem_tensor_init(&to, TANDEM_F32, o, 3, q_shape, &error) ||
      tandem_tensor_init(&tk, TANDEM_F32, k, 3, kv_shape, &error) ||
      tandem_tensor_init(&tv, TANDEM_F32, v, 3, kv_shape, &error))
    return fprintf(stderr, "%s\n", tandem_error_message(error)), 1;
  for (int d = 0; d < 3; ++d) tk.stride[d] = tv.stride[d] = kv_stride[d];
  if (tandem_attend_tensors(engine, &args, &error)) return fprintf(stderr, "%s\n", tandem_error_message(error)), 1;
  tandem_engine_release(engine);
  return printf("key 123 of 1000 gets %.4f of the attention\n", o[0]) < 0;
}
