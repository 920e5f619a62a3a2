// SPDX-License-Identifier: MIT
// From how many query rows of a KV head on matrix products are faster than the kernels that read the stored rows.
//
// It depends on the processor and on oneDNN: between 8 and 200 rows. A job near it takes about as long either way, but its
// last bits differ. So the number comes from a table, by instruction set and maker of the processor, and every process on a
// machine computes the same bits. Where a caller asks for it (matmul_rows of tandem_engine_options is -1) it is measured,
// some milliseconds on the thread that starts the first such engine, and kept for the process.
#pragma once

#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"

namespace tandem::cpu {

struct Crossover {
  int32_t rows_bf16 = 24;  // where q, K and V are exact in bf16 and K needs no rotation
  int32_t rows = 128;      // all others
};

// What the table says; an instruction set that it does not name has the values above.
Crossover usual_crossover(const KernelTable& kernels);

Status measure_crossover(const KernelTable& kernels, Crossover* crossover);

// What this process has measured.
Status process_crossover(const KernelTable& kernels, Crossover* crossover);

}  // namespace tandem::cpu
