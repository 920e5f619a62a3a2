// SPDX-License-Identifier: MIT
// Owners of the library's handles.
#pragma once

#include <memory>

#include "tandem/tandem.h"

namespace tools {

struct Release {
  void operator()(tandem_engine* handle) const { tandem_engine_release(handle); }
  void operator()(tandem_model* handle) const { tandem_model_release(handle); }
  void operator()(tandem_cache* handle) const { tandem_cache_release(handle); }
  void operator()(tandem_session* handle) const { tandem_session_release(handle); }
};

using Engine = std::unique_ptr<tandem_engine, Release>;
using Model = std::unique_ptr<tandem_model, Release>;
using Cache = std::unique_ptr<tandem_cache, Release>;
using Session = std::unique_ptr<tandem_session, Release>;

}  // namespace tools
