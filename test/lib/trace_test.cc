// SPDX-License-Identifier: MIT
// Ranges with and without NVTX. The test is compiled for both. With NVTX, the test is the tool that receives the ranges.
#include "lib/base/trace.h"

#include <string>
#include <vector>

#include "with_cmocka.h"

namespace {

std::vector<std::string> ranges;

#ifdef TANDEM_NVTX
int push(const char* name) {
  ranges.emplace_back(name);
  return static_cast<int>(ranges.size()) - 1;
}
int pop() {
  ranges.emplace_back("end");
  return 0;
}

int inject(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned n = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &n) == 0) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

const std::vector<std::string> kWanted = {"tandem attend, layer 3, resident", "end"};
#else
const std::vector<std::string> kWanted;
#endif

void names_ranges(void**) {
#ifdef TANDEM_NVTX
  InitializeInjectionNvtx2_fnptr = inject;
#endif
  { const tandem::TraceRange range("attend", 3, "resident"); }
  assert_true(ranges == kWanted);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(names_ranges)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
