// SPDX-License-Identifier: MIT
#include "lent_engine.h"

#include <ggml-backend.h>
#include <ggml-impl.h>

#include <algorithm>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace tandem_ggml_module {
namespace {

void log_line(int32_t level, const char* message, void*) {
  if (level == TANDEM_LOG_ERROR)
    GGML_LOG_ERROR("tandem: %s\n", message);
  else if (level == TANDEM_LOG_WARNING)
    GGML_LOG_WARN("tandem: %s\n", message);
}

#ifdef _OPENMP
// user: the engine's number of threads. With another size of region, the OpenMP runtime would end or start threads.
void run_in_region(int64_t n_tasks, tandem_task_fn task, void* context, void* user) {
  const int n_threads = static_cast<int>(reinterpret_cast<intptr_t>(user));
  if (n_tasks <= 1 || n_threads == 1) {
    for (int64_t i = 0; i < n_tasks; ++i) task(i, context);
    return;
  }
#pragma omp parallel num_threads(n_threads)
  for (int64_t i = omp_get_thread_num(); i < n_tasks; i += omp_get_num_threads()) task(i, context);
}
#endif

}  // namespace

bool ggml_lends_threads() {
#ifdef _OPENMP
  ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
  if (cpu == nullptr) return false;
  auto features_of =
      reinterpret_cast<ggml_backend_get_features_t>(ggml_backend_reg_get_proc_address(cpu, "ggml_backend_get_features"));
  if (features_of == nullptr) return false;
  for (const ggml_backend_feature* feature = features_of(cpu); feature->name != nullptr; ++feature)
    if (std::strcmp(feature->name, "OPENMP") == 0) return std::strcmp(feature->value, "1") == 0;
#endif
  return false;
}

LentEngines::~LentEngines() {
  for (const auto& [n_threads, engine] : engines_) tandem_engine_release(engine);
}

int32_t LentEngines::find(tandem_engine** engine, int n_threads, tandem_error** error) {
  tandem_engine*& found = engines_[n_threads];
  if (found == nullptr) {
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = n_threads;
    options.pin_threads = 0;
    options.log = log_line;
#ifdef _OPENMP
    if (ggml_lends_threads()) {
      options.run = run_in_region;
      options.run_user = reinterpret_cast<void*>(static_cast<intptr_t>(n_threads));
    }
#endif
    const int32_t status = tandem_engine_create(&found, &options, error);
    if (status != TANDEM_OK) return status;
  }
  *engine = found;
  return TANDEM_OK;
}

}  // namespace tandem_ggml_module
