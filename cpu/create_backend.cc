// SPDX-License-Identifier: MIT
#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/lent_pool.h"
#include "cpu/onednn.h"

namespace tandem {

Status create_cpu_backend(const CpuOptions& options, Backend* backend) {
  const cpu::KernelTable* kernels = nullptr;
  TANDEM_TRY(cpu::choose_isa(options.isa, &kernels));
  if (kernels->matrix == nullptr) TANDEM_TRY(cpu::prepare_sgemm());
  cpu::Crossover crossover = cpu::usual_crossover(*kernels);
  if (options.matmul_rows > 0) crossover = {options.matmul_rows, options.matmul_rows};
  if (options.matmul_rows < 0) TANDEM_TRY(cpu::process_crossover(*kernels, &crossover));
  std::unique_ptr<cpu::Pool> pool;
  if (options.run != nullptr)
    pool = cpu::make_lent_pool({options.run, options.run_user, options.n_threads});
  else
    TANDEM_TRY(cpu::Pool::create({options.n_threads, options.spin_ns, options.pin_threads, options.n_others}, &pool));
  return cpu::make_cpu_backend(*kernels, crossover, std::move(pool), backend);
}

}  // namespace tandem
