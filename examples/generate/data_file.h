// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_DATA_FILE_H_
#define EXAMPLES_GENERATE_DATA_FILE_H_

#include <string>

namespace generate {

// Returns the path of a file or folder that comes with tandem-demo: models/pico, data/haystack.txt. The search starts at the
// program's own place, so an installed tree may be moved. If the file is missing, returns the path where an install has it.
std::string data_file(const std::string& name);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_DATA_FILE_H_
