// SPDX-License-Identifier: MIT
// tandem, the front program: every command by both of its names, help that fits a screen, and messages for typing errors.

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tandem/tandem.h"
#include "tools/run_program.h"
#include "with_cmocka.h"

namespace {

namespace fs = std::filesystem;

const fs::path kFront = TANDEM_FRONT;
constexpr const char* kTools[] = {"info", "plan", "patterns", "bench"};
constexpr const char* kExamples[] = {"generate", "demo"};

std::vector<std::string> built_commands() {
  std::vector<std::string> names(std::begin(kTools), std::end(kTools));
  if (TANDEM_HAS_EXAMPLES) names.insert(names.end(), std::begin(kExamples), std::end(kExamples));
  return names;
}

std::string own_program(const std::string& command) { return kFront.parent_path() / ("tandem-" + command); }

void expect(const ProgramRun& run, int exit_code, const std::vector<std::string>& in_err) {
  bool good = run.exit_code == exit_code;
  for (const std::string& part : in_err) good = good && run.err.find(part) != std::string::npos;
  if (exit_code != 0) good = good && run.out.empty() && run.err.find('\n') == run.err.size() - 1;
  if (!good) fail_test("exit code %d, stdout \"%s\", stderr \"%s\"", run.exit_code, run.out.c_str(), run.err.c_str());
}

// Returns an empty folder for this test.
fs::path empty_folder(const char* name) {
  const fs::path folder = fs::path(TANDEM_TEST_FOLDER) / name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

void write_program(const fs::path& path, const std::string& script) {
  std::ofstream(path) << "#!/bin/sh\n" << script << "\n";
  fs::permissions(path, fs::perms::owner_all);
}

void help_fits_the_screen(void**) {
  const ProgramRun help = run_program({kFront, "--help"});
  expect(help, 0, {});
  assert_string_equal(help.err.c_str(), "");
  std::istringstream lines(help.out);
  int n_lines = 0;
  for (std::string line; std::getline(lines, line); ++n_lines)
    if (line.size() > 80) fail_test("%zu columns: %s", line.size(), line.c_str());
  if (n_lines > 24) fail_test("%d lines", n_lines);
  for (const std::string& command : built_commands())
    assert_true(help.out.find("\n  " + command + " ") != std::string::npos);
  for (const char* same : {"-h", "help"}) assert_string_equal(run_program({kFront, same}).out.c_str(), help.out.c_str());
  const ProgramRun nothing = run_program({kFront});
  assert_int_equal(nothing.exit_code, 2);
  assert_string_equal(nothing.err.c_str(), help.out.c_str());
  assert_string_equal(nothing.out.c_str(), "");
}

void version_is_the_headers(void**) {
  char version[32];
  std::snprintf(version, sizeof version, "tandem %d.%d.%d\n", TANDEM_VERSION_MAJOR, TANDEM_VERSION_MINOR,
                TANDEM_VERSION_PATCH);
  const ProgramRun run = run_program({kFront, "--version"});
  assert_int_equal(run.exit_code, 0);
  assert_string_equal(run.out.c_str(), version);
  // Each command prints its version as well, wherever the flag stands.
  for (const std::string& command : built_commands())
    for (const std::vector<std::string>& way : std::vector<std::vector<std::string>>{{}, {"--json"}, {"--nonsense"}}) {
      std::vector<std::string> arguments = {kFront, command};
      arguments.insert(arguments.end(), way.begin(), way.end());
      arguments.push_back("--version");
      const ProgramRun own = run_program(arguments);
      expect(own, 0, {});
      assert_string_equal(own.out.c_str(), ("tandem-" + command + std::string(version).substr(6)).c_str());
    }
}

void commands_are_the_programs(void**) {
  for (const std::string& command : built_commands()) {
    const ProgramRun own = run_program({own_program(command), "--help"});
    expect(own, 0, {});
    if (own.out.rfind("tandem " + command, 0) != 0) fail_test("%s: %s", command.c_str(), own.out.c_str());
    for (const std::vector<std::string>& way :
         std::vector<std::vector<std::string>>{{command, "--help"}, {command, "-h"}, {"help", command}}) {
      std::vector<std::string> arguments = {kFront};
      arguments.insert(arguments.end(), way.begin(), way.end());
      const ProgramRun run = run_program(arguments);
      expect(run, 0, {});
      assert_string_equal(run.out.c_str(), own.out.c_str());
      assert_string_equal(run.err.c_str(), "");
    }
  }
}

// Flags, output and exit codes are passed through.
void commands_get_their_flags(void**) {
  const ProgramRun info = run_program({kFront, "info", "--json", "--threads", "1"});
  expect(info, 0, {});
  assert_true(info.out.find("\"n_workers\":1,") != std::string::npos);
  const ProgramRun all = run_program({kFront, "info", "--json", "--threads", "0"}),
                   own = run_program({kFront, "info", "--json"});
  expect(all, 0, {});
  assert_string_equal(all.out.c_str(), own.out.c_str());
  expect(run_program({kFront, "plan", "--kv-len", "64", "--threads", "0"}), 0, {});
  const ProgramRun plan = run_program({kFront, "plan", "--kv-len", "4096", "--host-cap-gib", "0.1"});
  assert_int_equal(plan.exit_code, 1);  // above its cap
  assert_true(plan.out.find("host_cap_bytes") != std::string::npos);
  expect(run_program({kFront, "bench", "wake", "--kv-len", "1", "--head-dim", "64", "--layers", "1", "--repeats", "1",
                      "--threads", "0"}),
         0, {});
  for (const std::string& command : built_commands())
    expect(run_program({kFront, command, command == "bench" ? "decode" : "--jsn", "--jsn"}), 2,
           {"tandem-" + command, "--jsn"});
  if (!TANDEM_HAS_EXAMPLES) return;
  expect(run_program({kFront, "generate", "--modle", "x"}), 2, {"--modle", "did you mean --model?"});
  expect(run_program({kFront, "generate", "--model", "/nonexistent", "--prompt", "a"}), 1, {"/nonexistent/config.json"});
  expect(run_program({kFront, "demo", "--contxt", "x"}), 2, {"--contxt", "did you mean --context?"});
}

void slips_are_named(void**) {
  const struct {
    std::vector<std::string> arguments;
    std::vector<std::string> in_err;
  } kSlips[] = {
      {{"inof"}, {"unknown command inof", "did you mean info?"}},
      {{"benchmark"}, {"benchmark", "did you mean bench?"}},
      {{"gen", "--model", "x"}, {"gen", "did you mean generate?"}},
      {{"help", "paln"}, {"paln", "did you mean plan?"}},
      {{"--verison"}, {"unknown flag --verison", "did you mean --version?"}},
      {{"xyzzy"}, {"xyzzy; tandem --help"}},  // similar to no command
      {{""}, {"unknown command ;"}},
      {{"--version", "now"}, {"unexpected argument now after --version"}},
      {{"help", "info", "plan"}, {"unexpected argument plan after help"}},
      {{std::string(100000, 'i')}, {"iii; tandem --help"}},
      {{"in\nfo\x1b[2J"}, {"in?fo?[2J"}},
  };
  for (const auto& slip : kSlips) {
    std::vector<std::string> arguments = {kFront};
    arguments.insert(arguments.end(), slip.arguments.begin(), slip.arguments.end());
    std::vector<std::string> in_err = slip.in_err;
    in_err.push_back("tandem: ");
    expect(run_program(arguments), 2, in_err);
  }
}

// A folder with only tandem, for packages that leave out the other programs.
void commands_that_are_not_there(void**) {
  const fs::path folder = empty_folder("alone");
  fs::copy_file(kFront, folder / "tandem");
  const ProgramRun help = run_program({folder / "tandem", "--help"});
  expect(help, 0, {});
  assert_true(help.out.find("(not part of this installation)") != std::string::npos);
  for (const char* command : {"info", "plan", "patterns", "bench", "generate", "demo"}) {
    expect(run_program({folder / "tandem", command}), 1,
           {"the command " + std::string(command) + " is not part of this installation", folder / "tandem-", "=ON"});
    expect(run_program({folder / "tandem", "help", command}), 1, {"not part of this installation"});
  }
}

// A program of that name in the working directory or in PATH is not run. The one beside tandem is, through links as well.
void programs_of_others_are_not_run(void**) {
  const fs::path own = empty_folder("own"), other = empty_folder("other");
  fs::copy_file(kFront, own / "tandem");
  write_program(own / "tandem-info", "echo own $#");
  write_program(other / "tandem-info", "echo other");
  write_program(other / "tandem-plan", "echo other");
  fs::create_symlink(own / "tandem", other / "tandem");
  const std::string path = "PATH=" + other.string() + ":/usr/bin:/bin; export PATH; cd " + other.string() + "; ";
  for (const char* front : {"tandem", "./tandem", "../own/tandem"}) {
    const ProgramRun info = run_program({"/bin/sh", "-c", path + front + " info 'a b' ''"});
    assert_string_equal(info.out.c_str(), "own 2\n");
    const ProgramRun plan = run_program({"/bin/sh", "-c", path + front + " plan"});
    expect(plan, 1, {"not part of this installation"});
  }
}

void full_disks_are_noticed(void**) {
  for (const char* flag : {" --help", " --version"})
    expect(run_program({"/bin/sh", "-c", kFront.string() + flag + " >/dev/full"}), 1, {"stdout"});
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(help_fits_the_screen),
      cmocka_unit_test(version_is_the_headers),
      cmocka_unit_test(commands_are_the_programs),
      cmocka_unit_test(commands_get_their_flags),
      cmocka_unit_test(slips_are_named),
      cmocka_unit_test(commands_that_are_not_there),
      cmocka_unit_test(programs_of_others_are_not_run),
      cmocka_unit_test(full_disks_are_noticed),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
