/* SPDX-License-Identifier: MIT
 * Part of the stand-in of ggml (see ggml.h): ggml's log. */
#ifndef STAND_IN_GGML_IMPL_H_
#define STAND_IN_GGML_IMPL_H_

#include "ggml.h"

#ifdef __cplusplus
extern "C"
#endif
    void
    ggml_log_internal(enum ggml_log_level level, const char* format, ...);
#define GGML_LOG_WARN(...) ggml_log_internal(GGML_LOG_LEVEL_WARN, __VA_ARGS__)
#define GGML_LOG_ERROR(...) ggml_log_internal(GGML_LOG_LEVEL_ERROR, __VA_ARGS__)

#endif /* STAND_IN_GGML_IMPL_H_ */
