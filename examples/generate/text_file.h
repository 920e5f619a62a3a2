// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_TEXT_FILE_H_
#define EXAMPLES_GENERATE_TEXT_FILE_H_

#include <string>

#include "failure.h"

namespace generate {

// Refuses an existing path that is not a regular file: opening a pipe would wait for a writer.
Failure refuse_irregular(const std::string& path);
// Reads the whole file, at most 1 GiB.
Failure read_text_file(const std::string& path, std::string* text);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_TEXT_FILE_H_
