// SPDX-License-Identifier: MIT
#include "tools/common/run_tool.h"

#include <cstdio>
#include <exception>
#include <new>

#include "examples/generate/interrupt.h"

namespace tools {
namespace {

Result guarded(int argc, const char* const* argv, ToolFn run, bool* good) {
  try {
    return run(argc, argv, good);
  } catch (const std::bad_alloc&) {
    return refuse("there is not enough memory for this");
  } catch (const std::exception& exception) {
    return refuse("%s", exception.what());
  }
}

}  // namespace

Result flush_stdout() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return refuse("stdout cannot be written");
  return {};
}

int run_tool(const char* name, int argc, const char* const* argv, ToolFn run) {
  bool good = true;
  Result result = guarded(argc, argv, run, &good);
  if (result.ok()) result = flush_stdout();
  if (result.ok()) return good ? 0 : 1;
  // The message may contain names from files. It must stay one line and send only text to the terminal.
  std::string line = result.message();
  for (char& c : line)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  std::fprintf(stderr, "%s: %s\n", name, line.c_str());
  if (result.is_interrupted()) return generate::interrupt_exit_code();
  return result.is_usage() ? 2 : 1;
}

}  // namespace tools
