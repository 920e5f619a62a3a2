// SPDX-License-Identifier: MIT
// The flags that control how an engine is created.
#pragma once

#include <string>
#include <vector>

#include "tools/common/flags.h"
#include "tools/common/handles.h"

namespace tools {

struct EngineFlags {
  int64_t threads = 0;  // 0: the library's default
  int32_t isa = -1;     // index of tandem_cpu_isa_name(); -1: the library's default
  std::string backend, backend_path;

  void declare(std::vector<Flag>* flags);
  Result check();  // makes backend_path absolute
  Result start(Engine* engine) const;
};

}  // namespace tools
