// SPDX-License-Identifier: MIT
// Checks a module's file before the dynamic linker maps it.
//
// dlopen() maps the segments that the ELF program headers describe and trusts those headers. A full disk or an interrupted
// copy leaves a truncated file. dlopen() then raises SIGBUS at the first page that the file lacks.
#pragma once

#include <string>

namespace tandem {

// Returns why the file is not a complete shared object for this machine, or "" if it is one. Never blocks on a pipe.
std::string module_file_refusal(const std::string& path);

}  // namespace tandem
