// SPDX-License-Identifier: MIT
// Checks a module's file before the dynamic linker maps it.
//
// dlopen() maps the segments that the ELF program headers describe and believes those headers. A file that was cut short, by
// a full disk or a copy that was interrupted, then raises SIGBUS inside dlopen() at the first page that the file lacks.
#pragma once

#include <string>

namespace tandem {

// Why the file is not a whole shared object for this machine; "" where it is one. Never blocks on a pipe.
std::string module_file_refusal(const std::string& path);

}  // namespace tandem
