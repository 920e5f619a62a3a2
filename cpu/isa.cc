// SPDX-License-Identifier: MIT
#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/matrix_unit.h"
#include "hwy/targets.h"

namespace tandem::cpu {

#define TANDEM_ISA(name) extern const KernelTable kernels_##name;
#include "isa_list.inc"
#undef TANDEM_ISA

namespace {

const KernelTable* const kTables[] = {
#define TANDEM_ISA(name) &kernels_##name,
#include "isa_list.inc"
#undef TANDEM_ISA
};

}  // namespace

const KernelTable* isa_table(int32_t idx) {
  return idx >= 0 && static_cast<size_t>(idx) < std::size(kTables) ? kTables[idx] : nullptr;
}

// The target for which this file was compiled always counts as available. Highway would call NEON available only with the
// AES instructions, which some processors lack and no kernel uses.
bool isa_available(const KernelTable& table) {
  if ((table.target & kMatrixUnit) != 0 && !have_matrix_unit()) return false;
  return ((hwy::SupportedTargets() | HWY_STATIC_TARGET) & table.target & ~kMatrixUnit) != 0;
}

bool enable_isa(const KernelTable& table) { return (table.target & kMatrixUnit) == 0 || request_matrix_unit(); }

Status choose_isa(const char* name, const KernelTable** table) {
  const char* field = name != nullptr ? "cpu_isa" : "TANDEM_CPU_ISA";
  if (name == nullptr) name = std::getenv(field);
  const bool any = name == nullptr || *name == '\0';
  std::string available;
  for (const KernelTable* candidate : kTables) {
    if (!isa_available(*candidate)) continue;
    if (any || std::strcmp(name, candidate->name) == 0) {
      if (enable_isa(*candidate)) {
        *table = candidate;
        return {};
      }
      if (!any)
        return fail(TANDEM_ERROR_NOT_FOUND, field, "%s = \"%s\" is refused to this process by the operating system", field,
                    name);
    }
    available += available.empty() ? candidate->name : std::string(", ") + candidate->name;
  }
  return fail(TANDEM_ERROR_NOT_FOUND, field, "%s = \"%s\" is not an instruction set of this build and processor (%s)", field,
              any ? "" : name, available.empty() ? "none" : available.c_str());
}

}  // namespace tandem::cpu

namespace tandem {

const char* cpu_isa_name(int32_t idx) {
  const cpu::KernelTable* table = cpu::isa_table(idx);
  return table != nullptr ? table->name : nullptr;
}

bool cpu_isa_available(const char* name) {
  if (name == nullptr) return false;
  for (int32_t i = 0; const cpu::KernelTable* table = cpu::isa_table(i); ++i)
    if (std::strcmp(name, table->name) == 0) return cpu::isa_available(*table);
  return false;
}

}  // namespace tandem
