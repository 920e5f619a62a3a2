// SPDX-License-Identifier: MIT
// From how many query rows of a KV head on matrix products are faster than the kernels that read the stored rows.
//
// It depends on the processor and on oneDNN: between 8 and 200 rows. So it is measured, some milliseconds on the thread that
// starts the first engine, and kept for the process: all its engines compute the same bits. Where two processes
// are to do so as well, the number is given (matmul_rows of tandem_engine_options).
#pragma once

#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"

namespace tandem::cpu {

struct Crossover {
  int32_t rows_bf16 = 24;  // where q, K and V are exact in bf16 and K needs no rotation
  int32_t rows = 128;      // all others
};

Status measure_crossover(const KernelTable& kernels, Crossover* crossover);

// The measurement of this process.
Status process_crossover(const KernelTable& kernels, Crossover* crossover);

}  // namespace tandem::cpu
