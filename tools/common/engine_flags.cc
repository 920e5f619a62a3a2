// SPDX-License-Identifier: MIT
#include "tools/common/engine_flags.h"

#include <filesystem>

namespace tools {

void EngineFlags::declare(std::vector<Flag>* flags) {
  flags->push_back(number_flag("--threads", &threads, 0, 4096, "CPU workers (0: affinity mask and quota decide)"));
  flags->push_back(choice_flag("--isa", &isa, library_choices(tandem_cpu_isa_name), "instruction set (the best there is)"));
  flags->push_back(text_flag("--backend", "NAME", &backend, "also a device backend, by its name: cuda (none)"));
  flags->push_back(text_flag("--backend-path", "FILE", &backend_path, "its module (looked for by the library)"));
}

Result EngineFlags::check() {
  if (isa >= 0 && !tandem_cpu_isa_available(tandem_cpu_isa_name(isa)))
    return refuse("--isa = %s: this processor does not have it", tandem_cpu_isa_name(isa));
  if (!backend_path.empty() && backend.empty())
    return usage_error("--backend-path = %s: --backend is missing", backend_path.c_str());
  // The library takes only absolute paths.
  if (!backend_path.empty()) backend_path = std::filesystem::absolute(backend_path);
  return {};
}

Result EngineFlags::start(Engine* engine) const {
  ErrorSlot error;
  tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
  options.n_threads = static_cast<int32_t>(threads);
  options.cpu_isa = isa < 0 ? nullptr : tandem_cpu_isa_name(isa);
  options.backend = backend.empty() ? nullptr : backend.c_str();
  options.backend_path = backend_path.empty() ? nullptr : backend_path.c_str();
  tandem_engine* made = nullptr;
  TOOL_TRY(error.check(tandem_engine_create(&made, &options, error.out())));
  engine->reset(made);
  return {};
}

}  // namespace tools
