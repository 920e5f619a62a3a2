// SPDX-License-Identifier: MIT
// tandem: one name for all programs. `tandem info --json` becomes the program tandem-info in the same folder.
//
// The commands are separate programs, as those of git are, because their dependencies differ: tandem-info needs the library,
// tandem-demo draws with Cairo. One program would need all dependencies for every command. A package may leave a command
// out. tandem itself links nothing, so it can still say what is missing.
//
// A command's program is searched in the folder of tandem itself, with symbolic links resolved. The working directory and
// PATH are not searched, so a foreign tandem-info is never run.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "examples/generate/nearest_name.h"
#include "examples/generate/standard_flags.h"

namespace {

constexpr int kFailed = 1, kUsage = 2;  // exit codes of every program

struct Command {
  const char* name;
  const char* summary;
  const char* how_to_get;  // for a missing program
};
constexpr Command kCommands[] = {
    {"info", "what the library finds: processor, memory, devices, versions", "CMake builds it with TANDEM_BUILD_TOOLS=ON"},
    {"plan", "memory and routes of a model and a context, nothing allocated", "CMake builds it with TANDEM_BUILD_TOOLS=ON"},
    {"patterns", "which keys each head attends, by a file; what that takes", "CMake builds it with TANDEM_BUILD_TOOLS=ON"},
    {"bench", "speed of attention, checked, against this machine's limits", "CMake builds it with TANDEM_BUILD_TOOLS=ON"},
    {"generate", "continue or score a text with a model whose tokens are bytes",
     "CMake builds it with TANDEM_BUILD_EXAMPLES=ON"},
    {"demo", "a model answers from 16,384 tokens, dense and hybrid", "CMake builds it with TANDEM_BUILD_EXAMPLES=ON"},
};

const Command* find_command(std::string_view name) {
  for (const Command& command : kCommands)
    if (name == command.name) return &command;
  return nullptr;
}

// Returns the folder of this program's file.
std::filesystem::path own_folder(std::error_code* error) {
  return std::filesystem::read_symlink("/proc/self/exe", *error).parent_path();
}

std::string help() {
  std::error_code error;
  const std::filesystem::path folder = own_folder(&error);
  std::string out =
      "tandem: attention over key/value caches that are larger than the GPU\n\n"
      "usage: tandem COMMAND [flags]\n\n";
  for (const Command& command : kCommands) {
    std::string line = "  " + std::string(command.name);
    line.resize(12, ' ');
    const bool is_here = access((folder / ("tandem-" + std::string(command.name))).c_str(), X_OK) == 0;
    out += line + (is_here ? command.summary : "(not part of this installation)") + "\n";
  }
  return out +
         "\n"
         "  tandem help COMMAND   the flags of a command; also: tandem COMMAND --help\n"
         "  tandem --version\n\n"
         "  tandem plan --model DIR --kv-len 131072\n"
         "  tandem bench decode --kv-len 32768 --kv-type bf16,q8_0\n"
         "  tandem generate --model DIR --prompt \"Once upon a time\"\n\n"
         "Exit codes: 0: done; 1: failed, or the answer is no; 2: a wrong command line;\n"
         "130: ended by Ctrl-C.\n";
}

// Prints one line on stderr, with only printable text of the user's input.
int fail(int exit_code, std::string message) {
  for (char& c : message)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  std::fprintf(stderr, "tandem: %s\n", message.c_str());
  return exit_code;
}

int print(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) return fail(kFailed, "stdout cannot be written");
  return 0;
}

int unknown_command(const std::string& given) {
  std::vector<std::string> names = {"help", "--help", "--version"};
  for (const Command& command : kCommands) names.emplace_back(command.name);
  return fail(kUsage, (given.rfind('-', 0) == 0 ? "unknown flag " : "unknown command ") + given +
                          generate::did_you_mean(given, names) + "; tandem --help lists the commands");
}

// Replaces this process by the command's program. Returns only on failure.
int run(const Command& command, std::vector<char*> arguments) {
  std::error_code error;
  const std::filesystem::path folder = own_folder(&error);
  if (error) return fail(kFailed, "/proc/self/exe cannot be read: " + error.message());
  std::string path = folder / ("tandem-" + std::string(command.name));
  arguments.insert(arguments.begin(), path.data());
  arguments.push_back(nullptr);
  execv(path.c_str(), arguments.data());
  if (errno == ENOENT)
    return fail(kFailed, "the command " + std::string(command.name) + " is not part of this installation: there is no " +
                             path + " (" + command.how_to_get + ")");
  return fail(kFailed, path + " cannot be run: " + std::strerror(errno));
}

int serve(const std::vector<char*>& arguments) {
  if (arguments.empty()) {
    std::fputs(help().c_str(), stderr);
    return kUsage;
  }
  const std::string first = arguments[0];
  if (const Command* command = find_command(first)) return run(*command, {arguments.begin() + 1, arguments.end()});
  const bool asks_help = first == "help" || first == "--help" || first == "-h";
  if (!asks_help && first != "--version") return unknown_command(first);
  const bool names_command = first == "help" && arguments.size() == 2;
  if (arguments.size() > 1 && !names_command)
    return fail(kUsage, "unexpected argument " + std::string(arguments.back()) + " after " + first);
  if (names_command && std::strcmp(arguments[1], "help") != 0) {
    const Command* command = find_command(arguments[1]);
    if (command == nullptr) return unknown_command(arguments[1]);
    char flag[] = "--help";
    return run(*command, {flag});
  }
  if (asks_help) return print(help());
  return print(generate::version_text("tandem"));
}

}  // namespace

int main(int argc, char** argv) {
  return serve(argc > 0 ? std::vector<char*>(argv + 1, argv + argc) : std::vector<char*>());
}
