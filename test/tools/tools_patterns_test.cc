// SPDX-License-Identifier: MIT
// tandem-patterns: the table, the pictures and the JSON of a small file, and messages for wrong command lines.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tools/run_program.h"
#include "with_cmocka.h"

namespace {

using Json = nlohmann::json;

std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = std::string(TANDEM_TEST_FOLDER) + "/" + name;
  std::ofstream(path) << text;
  return path;
}

// A layer with a head of each kind, and a layer of one kind.
std::string all_kinds() {
  return write_file("kinds.json",
                    R"([{"0": ["full"], "1": ["stream_llm", 4, 1020, 1.5], "2": ["vertical_and_slash", 30, 800],
    "3": ["block_sparse", 100, 1000], "4": [["stream_llm", 0, 64], ["block_sparse", 7, 0]]},
    {"0": ["full"], "1": ["full"], "2": ["full"], "3": ["full"], "4": ["full"]}])");
}

ProgramRun run(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {TANDEM_PATTERNS};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_program(command);
}

std::string shown(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "show");
  const ProgramRun show = run(arguments);
  if (show.exit_code != 0 || !show.err.empty()) fail_test("exit code %d: %s", show.exit_code, show.err.c_str());
  return show.out;
}

void expect_in(const std::string& out, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    if (out.find(part) == std::string::npos) fail_test("%s is not in %s", part.c_str(), out.c_str());
}

void text_has_table_and_picture(void**) {
  expect_in(shown({all_kinds()}),
            {"2 layers of 5 heads",
             "|     0 |    1 |       1 |              1 |            1 |               1 | 1 A 0/64 + B 7, ",
             "|     1 |    5 |       0 |              0 |            0 |               0 | 5 F  ", "| 6 F, 1 A 0/64 + B 7, ",
             "\n    0  FAVBU\n    1  FFFFF\n"});
}

void gates_have_flags(void**) {
  const std::string gates = write_file("gates.tsv", "0.5\t0.25\n0.1\t0.75\n");
  expect_in(shown({gates}), {"2 layers of 2 heads", "A 128/256", "\n    0  FA\n    1  AF\n"});
  const std::string grouped =
      shown({gates, "--group-size", "2", "--threshold", "0.25", "--sink-tokens", "0", "--window-tokens", "64"});
  expect_in(grouped, {"2 layers of 4 heads", "2 A 0/64", "\n    0  FFFF\n    1  AAFF\n"});
}

void json_has_every_head(void**) {
  const Json json = Json::parse(shown({all_kinds(), "--json"}));
  assert_int_equal(json["n_layers"].get<int>(), 2);
  assert_int_equal(json["n_heads"].get<int>(), 5);
  assert_true(json["counts"] ==
              Json({{"full", 6}, {"a_shape", 1}, {"vertical_slash", 1}, {"block_sparse", 1}, {"union", 1}}));
  const Json& first = json["layers"][0];
  assert_true(first[0] == Json({{"kinds", {"full"}}}));
  assert_true(first[1] == Json({{"kinds", {"a_shape"}}, {"sink_tokens", 4}, {"window_tokens", 1020}}));
  assert_true(first[2] == Json({{"kinds", {"vertical_slash"}}, {"vertical_tokens", 30}, {"slash_tokens", 800}}));
  assert_true(first[3] == Json({{"kinds", {"block_sparse"}}, {"n_blocks", 100}}));
  assert_true(first[4] ==
              Json({{"kinds", {"a_shape", "block_sparse"}}, {"sink_tokens", 0}, {"window_tokens", 64}, {"n_blocks", 7}}));
}

void picture_is_drawn(void**) {
  const std::string path = std::string(TANDEM_TEST_FOLDER) + "/picture.svg";
  std::remove(path.c_str());
  shown({all_kinds(), "--svg", path});
  std::stringstream svg;
  svg << std::ifstream(path).rdbuf();
  expect_in(svg.str(),
            {"<svg ", "<title>layer 0, head 4: A 0/64 + B 7</title>", "<title>layer 1, head 4: F</title>", "</svg>\n"});
}

void slips_are_named(void**) {
  const std::string path = all_kinds(), bad = write_file("bad.json", "[{\"0\": [\"stripes\"]}]");
  const struct {
    std::vector<std::string> arguments;
    int exit_code;
    std::string in_err;
  } kSlips[] = {
      {{}, 2, "show FILE"},
      {{"sho", path}, 2, "\"sho\" is none of show, search and profile"},
      {{"show"}, 2, "show needs a file"},
      {{"show", "--json", path}, 2, "unexpected argument"},
      {{"show", path, path}, 2, "unexpected argument"},
      {{"show", path, "--jsn"}, 2, "did you mean --json?"},
      {{"shwo", path}, 2, "did you mean show?"},
      {{"show", path, "--json", "--json"}, 2, "--json is given twice"},
      {{"show", path, "--threshold", "0.5"}, 1, "--threshold is for gates, and " + path + " is JSON"},
      {{"show", path, "--window-tokens", "0"}, 2, "--window-tokens = 0 is out of range"},
      {{"show", "/nonexistent"}, 1, "path = /nonexistent: "},
      {{"show", bad}, 1, "layer 0: head 0: kind \"stripes\" is unknown"},
      {{"show", path, "--svg", "/nonexistent/x.svg"}, 1, "--svg = /nonexistent/x.svg cannot be written"},
  };
  for (const auto& slip : kSlips) {
    const ProgramRun wrong = run(slip.arguments);
    const bool is_named = wrong.err.rfind("tandem-patterns: ", 0) == 0 && wrong.err.find(slip.in_err) != std::string::npos;
    if (wrong.exit_code != slip.exit_code || !is_named || !wrong.out.empty())
      fail_test("exit code %d, not %d: %s", wrong.exit_code, slip.exit_code, wrong.err.c_str());
  }
}

// Makes a python3 that cannot import the package, or that prints its arguments and ends with exit code 3.
std::string fake_python(const std::string& name, const std::string& script) {
  const std::filesystem::path folder = std::string(TANDEM_TEST_FOLDER) + "/" + name;
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "python3") << "#!/bin/sh\n" << script;
  std::filesystem::permissions(folder / "python3", std::filesystem::perms::owner_all);
  return "PATH=" + folder.string();
}

void search_is_run_by_python(void**) {
  const std::vector<std::string> search = {TANDEM_PATTERNS, "search", "model dir", "--budget", "0.5"};
  const ProgramRun found =
      run_program(search, {fake_python("good", "[ $1 = -c ] && exit 0\nprintf '<%s>' \"$@\"\nexit 3\n")});
  assert_int_equal(found.exit_code, 3);
  assert_string_equal(found.out.c_str(), "<-m><tandem.patterns><search><model dir><--budget><0.5>");
  const std::vector<std::pair<std::string, const char*>> kSlips = {
      {fake_python("bad", "echo 'No module named tandem' >&2\nexit 1\n"),
       "python3 cannot import tandem.patterns: pip install"},
      {"PATH=/nonexistent", "search needs Python, and python3 cannot be run"}};
  for (const auto& [path, said] : kSlips) {
    const ProgramRun wrong = run_program(search, {path});
    if (wrong.exit_code != 1 || wrong.err.find(said) == std::string::npos)
      fail_test("exit code %d: %s", wrong.exit_code, wrong.err.c_str());
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(text_has_table_and_picture),
      cmocka_unit_test(gates_have_flags),
      cmocka_unit_test(json_has_every_head),
      cmocka_unit_test(picture_is_drawn),
      cmocka_unit_test(slips_are_named),
      cmocka_unit_test(search_is_run_by_python),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
