// SPDX-License-Identifier: MIT
// --pruning: options of policy "hip", as a preset's name or in full.
#ifndef EXAMPLES_GENERATE_PRUNING_OPTIONS_H_
#define EXAMPLES_GENERATE_PRUNING_OPTIONS_H_

#include <tandem/tandem.h>

#include <string>
#include <vector>

#include "failure.h"

namespace generate {

// "3k", or SINKS/WINDOW/STAGE/STAGE..., where a stage is JUDGE:CHUNK:KEEP:INTERVAL and the last may end in +next:
// "64/1024/bounds:64:16384:16/exact:8:2048:4+next". With dense+ before either, appends attend everything and only decode is
// pruned.
class Pruning {
 public:
  // flag: named in the failure. "" means Tandem's default.
  Failure parse(const std::string& text, const char* flag);
  // Returns options that point into this object.
  tandem_pruning get();

 private:
  Failure parse_stage(const std::string& text, const std::string& where);

  std::string preset_;
  tandem_pruning_record record_ = TANDEM_PRUNING_RECORD_INIT;
  std::vector<tandem_pruning_stage> stages_;
  bool appends_all_ = false;
  tandem_pruning_record all_ = TANDEM_PRUNING_RECORD_INIT;
  tandem_pruning_stage all_stage_ = TANDEM_PRUNING_STAGE_INIT;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PRUNING_OPTIONS_H_
