/* SPDX-License-Identifier: MIT
 * The C side of the benchmark: n decode calls whose arguments are made once. */
#include <stdint.h>
#include <tandem/tandem.h>

static int32_t attend_n(tandem_session* session, int64_t sequence, float* q, float* o, int32_t n) {
  const int64_t shape[3] = {1, 8, 64}, q_len = 1;
  tandem_tensor tensors[2];
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  int32_t status = tandem_tensor_init(&tensors[0], TANDEM_F32, q, 3, shape, NULL);
  if (status == TANDEM_OK) status = tandem_tensor_init(&tensors[1], TANDEM_F32, o, 3, shape, NULL);
  args.n_sequences = 1;
  args.sequences = &sequence;
  args.q_lens = &q_len;
  args.q = &tensors[0];
  args.o = &tensors[1];
  for (; n > 0 && status == TANDEM_OK; --n) status = tandem_attend(session, &args, NULL);
  return status;
}
