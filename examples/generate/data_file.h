// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_DATA_FILE_H_
#define EXAMPLES_GENERATE_DATA_FILE_H_

#include <string>

namespace generate {

// Path of a file or folder that comes with tandem-demo: models/pico, data/haystack.txt. Looked for from the program's own
// place, so that an installed tree may be moved. Where it is missing, the path at which an install has it.
std::string data_file(const std::string& name);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_DATA_FILE_H_
