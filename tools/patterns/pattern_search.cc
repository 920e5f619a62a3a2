// SPDX-License-Identifier: MIT
#include "tools/patterns/pattern_search.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

extern char** environ;

namespace tools {
namespace {

constexpr const char* kPython = "python3";
constexpr const char* kModule = "tandem.patterns";

// execvp() and its variants take pointers to non-const char but do not write to them.
std::vector<char*> pointers_to(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// Checks that Python can import the package. Python prints the reason itself: the package is missing, or one of its
// libraries is.
Result find_module() {
  const std::vector<std::string> words = {kPython, "-c", std::string("import ") + kModule};
  pid_t child = 0;
  if (const int error = posix_spawnp(&child, kPython, nullptr, nullptr, pointers_to(words).data(), environ); error != 0)
    return refuse("search needs Python, and %s cannot be run: %s", kPython, std::strerror(error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return refuse("%s cannot be waited for: %s", kPython, std::strerror(errno));
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return refuse("search needs Python, and %s cannot be run", kPython);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return refuse(
        "search needs Tandem's Python package, and %s cannot import %s: pip install 'bindings/python[transformers]', or "
        "name its folder in PYTHONPATH",
        kPython, kModule);
  return {};
}

}  // namespace

Result run_pattern_search(int argc, const char* const* argv) {
  TOOL_TRY(find_module());
  std::vector<std::string> words = {kPython, "-m", kModule};
  words.insert(words.end(), argv + 1, argv + argc);
  execvp(kPython, pointers_to(words).data());
  return refuse("%s cannot be run: %s", kPython, std::strerror(errno));
}

}  // namespace tools
