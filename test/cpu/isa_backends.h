// SPDX-License-Identifier: MIT
// Makes a backend on a local pool for each instruction set of this processor.
#pragma once

#include <memory>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/local_pool.h"

namespace tandem::test {

struct IsaBackend {
  const cpu::KernelTable* kernels = nullptr;
  Backend backend;

  IsaBackend(const cpu::KernelTable& table, int32_t n_workers) : kernels(&table) {
    if (!cpu::make_cpu_backend(table, {}, std::make_unique<LocalPool>(n_workers), &backend).ok()) std::abort();
  }
  IsaBackend(IsaBackend&& other) noexcept : kernels(other.kernels), backend(other.backend) { other.backend = {}; }
  ~IsaBackend() {
    if (backend.table != nullptr) backend.table->destroy(backend.self);
  }
};

inline std::vector<IsaBackend> isa_backends(int32_t n_workers) {
  std::vector<IsaBackend> all;
  for (int32_t i = 0; const cpu::KernelTable* table = cpu::isa_table(i); ++i)
    if (cpu::isa_available(*table) && cpu::enable_isa(*table)) all.emplace_back(*table, n_workers);
  return all;
}

}  // namespace tandem::test
