// SPDX-License-Identifier: MIT
#include "cpu/backend.h"
#include "cpu/isa.h"

namespace tandem {

Status create_cpu_backend(const CpuOptions& options, Backend* backend) {
  const cpu::KernelTable* kernels = nullptr;
  TANDEM_TRY(cpu::choose_isa(options.isa, &kernels));
  std::unique_ptr<cpu::Pool> pool;
  TANDEM_TRY(cpu::Pool::create({options.n_threads, options.spin_ns, options.pin_threads}, &pool));
  return cpu::make_cpu_backend(*kernels, std::move(pool), backend);
}

}  // namespace tandem
