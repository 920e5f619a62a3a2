// SPDX-License-Identifier: MIT
// The number of query rows of a KV head from which matrix products are faster than the kernels that read the stored rows.
//
// The number depends on the processor and on oneDNN: between 8 and 200 rows. Near it both ways take about as long, but their
// last bits differ. So the default comes from a table, by instruction set and maker of the processor, and every process on a
// machine computes the same bits. If a caller asks for it (matmul_rows of tandem_engine_options is -1) the number is
// measured. That takes some milliseconds on the thread that creates the first such engine; the process keeps the result.
#pragma once

#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"

namespace tandem::cpu {

struct Crossover {
  int32_t rows_bf16 = 24;  // for jobs whose q, K and V are exact in bf16 and whose K needs no rotation
  int32_t rows = 128;      // for all other jobs
};

// Returns the table's numbers. An instruction set that the table does not name gets the defaults above.
Crossover usual_crossover(const KernelTable& kernels);

Status measure_crossover(const KernelTable& kernels, Crossover* crossover);

// Measures once and returns the process's measured numbers.
Status process_crossover(const KernelTable& kernels, Crossover* crossover);

}  // namespace tandem::cpu
