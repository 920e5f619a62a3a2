// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_TEXT_FILE_H_
#define EXAMPLES_GENERATE_TEXT_FILE_H_

#include <string>

#include "failure.h"

namespace generate {

// Refuses what is there and no regular file: opening a pipe waits for somebody who writes into it.
Failure refuse_irregular(const std::string& path);
// The whole file; at most 1 GiB.
Failure read_text_file(const std::string& path, std::string* text);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_TEXT_FILE_H_
