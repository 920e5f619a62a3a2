// SPDX-License-Identifier: MIT
// tandem-patterns profile: the content of its file, preserved results, refusals, and times between two rows.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tools/patterns/profile_curve.h"
#include "tools/run_program.h"
#include "tools/stand_in_driver.h"
#include "with_cmocka.h"
#include "with_flags.h"

namespace {

using Json = nlohmann::json;

std::string path_of(const std::string& name) { return std::string(TANDEM_TEST_FOLDER) + "/" + name; }

std::string write_file(const std::string& name, const std::string& text) {
  std::ofstream(path_of(name)) << text;
  return path_of(name);
}

std::string contents(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

ProgramRun run(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {}) {
  std::vector<std::string> command = {TANDEM_PATTERNS, "profile"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_program(command, environment);
}

std::string out_of(const std::vector<std::string>& arguments) {
  const ProgramRun profile = run(arguments);
  if (profile.exit_code != 0) fail_test("exit code %d: %s", profile.exit_code, profile.err.c_str());
  return profile.out;
}

std::vector<Json> lines_of(const std::string& out) {
  std::vector<Json> lines;
  std::stringstream stream(out);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

// A layer whose measurement takes milliseconds.
std::vector<std::string> measuring(const std::string& lengths, const std::vector<std::string>& more) {
  const std::vector<std::string> arguments = {"--shape",   "4/2x64", "--chunk",   "256", "--lengths", lengths,
                                              "--repeats", "2",      "--threads", "1",   "--json"};
  return with_flags(arguments, more);
}

void expect_in(const std::string& out, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    if (out.find(part) == std::string::npos) fail_test("%s is not in %s", part.c_str(), out.c_str());
}

void rows_have_sizes_times_and_pairs(void**) {
  const std::string path = path_of("rows.json");
  const std::vector<Json> printed =
      lines_of(out_of(measuring("1024,512", {"--pattern", "a_shape=4/60", "--pattern=block_sparse=2+a_shape=0/64",
                                             "--pattern", "full", "--out", path})));
  const Json profile = Json::parse(contents(path));
  assert_true(profile["shape"] == Json({{"q_heads", 4}, {"kv_heads", 2}, {"head_dim", 64}}));
  assert_true(profile["kv_type"] == "bf16" && profile["io_type"] == "bf16");
  assert_true(profile["threads"] == 1 && profile["chunk"] == 256);
  for (const char* fact : {"processor", "isa", "cpus", "cache_bytes"}) assert_false(profile["machine"][fact].is_null());
  const char* const kNames[] = {"full", "a_shape 4/60", "a_shape 0/64 + block_sparse 2"};
  assert_int_equal(profile["rows"].size(), 6);
  assert_int_equal(printed.size(), 6);
  for (size_t i = 0; i < 6; ++i) {
    const Json& row = profile["rows"][i];
    assert_true(row == printed[i]);
    assert_true(row["pattern"] == kNames[i % 3]);
    const int64_t kv_len = i < 3 ? 512 : 1024, ns = row["ns"].get<int64_t>();
    assert_int_equal(row["kv_len"].get<int64_t>(), kv_len);
    assert_true(ns > 0);
    assert_int_equal(row["ns_of_head"].get<int64_t>(), (ns + 2) / 4);
    // Each query attends the keys up to its own, in each of the four heads.
    const int64_t dense = 4 * (256 * kv_len - 256 * 255 / 2);
    assert_int_equal(row["dense_pairs"].get<int64_t>(), dense);
    if (i % 3 == 0)
      assert_int_equal(row["pairs"].get<int64_t>(), dense);
    else
      assert_true(row["pairs"].get<int64_t>() < dense);
  }
  const Json& both = profile["rows"][2];
  assert_true(both["kinds"] == Json({"a_shape", "block_sparse"}));
  assert_true(both["sink_tokens"] == 0 && both["window_tokens"] == 64 && both["n_blocks"] == 2);
  assert_false(std::filesystem::exists(path + ".partial"));
}

void file_gives_each_pattern_once(void**) {
  const std::string heads = write_file("heads.json", R"([{"0": ["full"], "1": ["stream_llm", 4, 60, 1]},
    {"0": ["stream_llm", 4, 60, 2], "1": ["vertical_and_slash", 8, 64]}])");
  std::vector<std::string> arguments = measuring("512", {"--pattern", "a_shape=4/60"});
  arguments.insert(arguments.begin(), heads);
  std::vector<std::string> names;
  for (const Json& row : lines_of(out_of(arguments))) names.push_back(row["pattern"]);
  assert_true(names == std::vector<std::string>({"full", "a_shape 4/60", "vertical_slash 8/64"}));
}

void append_measures_nothing_twice(void**) {
  const std::string path = path_of("kept.json");
  std::filesystem::remove(path);
  const auto appended = [&](const std::string& lengths, std::vector<std::string> more) {
    more.insert(more.end(), {"--out", path, "--append"});
    return lines_of(out_of(measuring(lengths, more))).size();
  };
  assert_int_equal(appended("512", {}), 1);
  const Json first = Json::parse(contents(path));
  assert_int_equal(appended("512", {}), 0);
  assert_true(Json::parse(contents(path)) == first);
  assert_int_equal(appended("512,768", {"--pattern", "a_shape=4/60"}), 3);
  const Json last = Json::parse(contents(path));
  assert_int_equal(last["rows"].size(), 4);
  assert_true(last["rows"][0] == first["rows"][0]);
}

void append_refuses_other_facts(void**) {
  const std::string path = path_of("facts.json");
  out_of(measuring("512", {"--out", path}));
  const Json profile = Json::parse(contents(path));
  const auto refused = [&](const std::string& file, const std::vector<std::string>& more, const std::string& fact) {
    const std::vector<std::string> arguments = with_flags(measuring("768", {"--out", file, "--append"}), more);
    const std::string before = contents(file);
    const ProgramRun wrong = run(arguments);
    if (wrong.exit_code != 1 || wrong.err.find(fact) == std::string::npos)
      fail_test("exit code %d, %s is not in %s", wrong.exit_code, fact.c_str(), wrong.err.c_str());
    assert_string_equal(contents(file).c_str(), before.c_str());
  };
  refused(path, {"--chunk", "128"}, "chunk is 256 there and 128 here");
  refused(path, {"--kv-type", "f32"}, "kv_type is \"bf16\" there");
  refused(path, {"--shape", "4/4x64"}, "shape.kv_heads is 2 there and 4 here");
  refused(path, {"--threads", "2"}, "threads is 1 there and 2 here");
  Json other = profile;
  other["machine"]["processor"] = "Another One";
  refused(write_file("other.json", other.dump()), {}, "machine.processor is \"Another One\" there");
}

// Runs with the stand-in, and with a driver whose memory is the stand-in's.
ProgramRun run_on_device(std::vector<std::string> arguments, const std::string& driver = "") {
  arguments.insert(arguments.end(), {"--backend", "standin", "--backend-path", STAND_IN_MODULE});
  return run(arguments, {"LD_LIBRARY_PATH=" STAND_IN_DRIVER_FOLDER, "TANDEM_TEST_DRIVER=" + driver});
}

std::vector<Json> rows_on_device(const std::vector<std::string>& arguments, const std::string& driver = "") {
  const ProgramRun profile = run_on_device(arguments, driver);
  if (profile.exit_code != 0) fail_test("exit code %d: %s", profile.exit_code, profile.err.c_str());
  expect_in(profile.err, {"the context is given back"});
  if (profile.err.find("buffers that are left") != std::string::npos) fail_test("%s", profile.err.c_str());
  return lines_of(profile.out);
}

const std::vector<std::string> kEveryPattern = {"--pattern",           "a_shape=4/60", "--pattern",
                                                "vertical_slash=8/64", "--pattern",    "block_sparse=2+a_shape=0/64"};

void device_attends_the_same_pairs(void**) {
  const std::string path = path_of("device.json");
  std::vector<std::string> with_file = kEveryPattern;
  with_file.insert(with_file.end(), {"--out", path});
  const std::vector<Json> on_device = rows_on_device(measuring("512,1024", with_file));
  const std::vector<Json> on_host = lines_of(out_of(measuring("512,1024", kEveryPattern)));
  assert_int_equal(on_device.size(), 8);
  assert_int_equal(on_host.size(), 8);
  for (size_t i = 0; i < 8; ++i) {
    assert_true(on_device[i]["ns"].get<int64_t>() > 0);
    for (const char* member : {"pattern", "kinds", "kv_len", "pairs", "dense_pairs", "repeats"})
      if (on_device[i][member] != on_host[i][member])
        fail_test("%s: %s, not %s", member, on_device[i].dump().c_str(), on_host[i].dump().c_str());
  }
  const Json profile = Json::parse(contents(path));
  assert_true(profile["machine"]["device"] == "Stand-in \"0\"");
  for (size_t i = 0; i < 8; ++i) assert_true(profile["rows"][i] == on_device[i]);
}

// A call only queues its work. Each operation is slow here, so the measured time must be long.
void times_end_when_the_device_has_finished(void**) {
  for (const Json& row : rows_on_device(measuring("256", {"--pattern", "a_shape=4/60", "--repeats", "1"}), "delay"))
    if (row["ns"].get<int64_t>() < 2 * kDelayNs) fail_test("%s", row.dump().c_str());
}

void profiles_are_of_one_processor(void**) {
  const std::string host = path_of("host.json"), device = path_of("of_device.json");
  out_of(measuring("512", {"--out", host}));
  rows_on_device(measuring("512", {"--out", device}));
  const auto refused = [&](const std::string& file, bool with_device, const std::string& fact) {
    const std::string before = contents(file);
    const std::vector<std::string> arguments = measuring("768", {"--out", file, "--append"});
    const ProgramRun wrong = with_device ? run_on_device(arguments) : run(arguments);
    if (wrong.exit_code != 1 || wrong.err.find(fact) == std::string::npos)
      fail_test("exit code %d, %s is not in %s", wrong.exit_code, fact.c_str(), wrong.err.c_str());
    assert_string_equal(contents(file).c_str(), before.c_str());
  };
  refused(host, true, R"(machine.device is null there and "Stand-in \"0\"" here)");
  refused(device, false, R"(machine.device is "Stand-in \"0\"" there and null here)");
  assert_int_equal(rows_on_device(measuring("512,768", {"--out", device, "--append"})).size(), 1);
  // A file that names no device was measured on the CPU.
  Json of_before = Json::parse(contents(host));
  of_before["machine"].erase("device");
  const std::string old = write_file("old.json", of_before.dump());
  refused(old, true, "machine.device is null there");
  assert_int_equal(lines_of(out_of(measuring("512,768", {"--out", old, "--append"}))).size(), 1);
}

void failures_of_the_driver_are_told(void**) {
  const auto failed = [](const ProgramRun& wrong, const std::vector<std::string>& parts) {
    if (wrong.exit_code != 1 || !wrong.out.empty()) fail_test("exit code %d: %s", wrong.exit_code, wrong.err.c_str());
    expect_in(wrong.err, parts);
  };
  const std::vector<std::string> arguments = measuring("512", {});
  failed(run_on_device(arguments, "cuMemAlloc_v2"),
         {"libcuda.so.1: cuMemAlloc of 131072 bytes: CUDA_ERROR_OUT_OF_MEMORY (2)"});
  failed(run_on_device(arguments, "nan"), {"give other outputs than policy \"all\""});
  const std::string folder = path_of("no_driver");
  std::filesystem::create_directories(folder);
  write_file("no_driver/libcuda.so.1", "this is no driver, and long enough to be looked at as one would be looked at");
  std::vector<std::string> on_device = arguments;
  on_device.insert(on_device.end(), {"--backend", "standin", "--backend-path", STAND_IN_MODULE});
  failed(run(on_device, {"LD_LIBRARY_PATH=" + folder}), {"device memory needs CUDA's driver: ", "libcuda.so.1: "});
}

constexpr const char* kHandmade = R"({"machine": {"isa": "none"}, "shape": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
  "kv_type": "bf16", "io_type": "bf16", "threads": 2, "chunk": 256, "rows": [
  {"pattern": "full", "kv_len": 8192, "ns": 9000}, {"pattern": "full", "kv_len": 1024, "ns": 1000},
  {"pattern": "full", "kv_len": 2048, "ns": 2000}, {"pattern": "a_shape 4/60", "kv_len": 1024, "ns": 500},
  {"pattern": "a_shape 4/60", "kv_len": 2048, "ns": 600}]})";

void times_lie_between_rows(void**) {
  const std::string path = write_file("handmade.json", kHandmade);
  const std::vector<Json> rows = lines_of(out_of({"--from", path, "--at", "1536,2048", "--json"}));
  assert_int_equal(rows.size(), 4);
  const struct {
    const char* pattern;
    int64_t kv_len, ns, ns_of_head;
  } kRows[] = {{"full", 1536, 1500, 375},
               {"a_shape 4/60", 1536, 550, 138},
               {"full", 2048, 2000, 500},
               {"a_shape 4/60", 2048, 600, 150}};
  for (size_t i = 0; i < rows.size(); ++i)
    assert_true(rows[i] == Json({{"pattern", kRows[i].pattern},
                                 {"kv_len", kRows[i].kv_len},
                                 {"ns", kRows[i].ns},
                                 {"ns_of_head", kRows[i].ns_of_head}}));
  // One pattern, and no result for the other.
  expect_in(out_of({"--from", path, "--at", "5120", "--pattern", "full"}), {"| full    |    5120 |      0.005 |"});
}

void curve_is_piecewise_linear(void**) {
  const std::vector<tools::ProfilePoint> points = {{1000, 10.0}, {2000, 30.0}, {6000, 50.0}};
  const auto is = [&](int64_t kv_len, double ns) { return tools::time_at(points, kv_len) == ns; };
  assert_true(is(1000, 10.0) && is(1500, 20.0) && is(2000, 30.0) && is(3000, 35.0) && is(6000, 50.0));
  assert_false(tools::time_at(points, 999) || tools::time_at(points, 6001) || tools::time_at({}, 1000));
  assert_true(tools::time_at({{1000, 10.0}}, 1000) == 10.0);
  assert_false(tools::time_at({{1000, 10.0}}, 1001).has_value());
}

void picture_has_a_line_for_each_pattern(void**) {
  const std::string picture = path_of("picture.svg");
  std::filesystem::remove(picture);
  out_of({"--from", write_file("handmade.json", kHandmade), "--svg", picture});
  expect_in(contents(picture), {"<svg ", "prefers-color-scheme:dark", "<title>full, 8192 keys: 0.009 ms</title>",
                                "<title>a_shape 4/60, 2048 keys: 0.0006 ms</title>", ">a_shape 4/60</text>", "</svg>\n"});
  std::filesystem::remove(picture);
  out_of(measuring("512", {"--svg", picture}));
  expect_in(contents(picture), {"<title>full, 512 keys: "});
}

void slips_are_named(void**) {
  const std::string path = write_file("handmade.json", kHandmade), no_rows = write_file("norows.json", "{\"rows\": 5}");
  const std::string twice = write_file("twice.json", R"({"shape": {"q_heads": 1}, "rows": [
    {"pattern": "full", "kv_len": 8, "ns": 1}, {"pattern": "full", "kv_len": 8, "ns": 2}]})");
  const struct {
    std::vector<std::string> arguments;
    int exit_code;
    const char* in_err;
  } kSlips[] = {
      {{"--pattern", "a_shape=100"}, 2, "--pattern = a_shape=100 is not full, a_shape=SINKS/WINDOW"},
      {{"--pattern", "a_shape=100/0"}, 2, "--pattern = a_shape=100/0 is not"},
      {{"--pattern", "block_sparse=1+block_sparse=2"}, 2, "--pattern = block_sparse=1+block_sparse=2 is not"},
      {{"--pattern", "stripes=3"}, 2, "--pattern = stripes=3 is not"},
      {{"--shape", "32-8-128"}, 2, "--shape = 32-8-128 is not"},
      {{"--shape", "32/7x128"}, 2, "--shape = 32/7x128 is out of range"},
      {{"--lengths", "4096"}, 2, "--lengths = 4096 is less than --chunk = 8192"},
      {{"--chunk", "1"}, 2, "--chunk = 1 is out of range"},
      {{"--backend", "abacus"}, 1, "backend = \"abacus\": no module can be used"},
      {{"--backend-path", "/nonexistent"}, 2, "--backend-path = /nonexistent: --backend is missing"},
      {{"--backend", "cpu", "--backend-path", "/nonexistent"}, 2, "--backend-path = /nonexistent: --backend is missing"},
      {{"--from", path, "--at", "1500", "--backend", "cuda"}, 2, "--backend: --from = "},
      {{"--append"}, 2, "--append: --out is missing"},
      {{"--at", "600"}, 2, "--at = 600: --from is missing"},
      {{"/nonexistent"}, 1, "path = /nonexistent: "},
      {measuring("512", {"--out", "/nonexistent/profile.json"}), 1, "--out = /nonexistent/profile.json cannot be written"},
      {{"--from", path}, 2, "--at or --svg is missing"},
      {{"--from", path, "--at", "1023"}, 1, "--at = 1023: full was measured from 1024 to 8192 keys"},
      {{"--from", path, "--at", "1500,5120"}, 1, "--at = 5120: a_shape 4/60 was measured from 1024 to 2048 keys"},
      {{"--from", path, "--at", "1500", "--pattern", "block_sparse=9"}, 1, "--pattern: block_sparse 9 is not in --from"},
      {{"--from", path, "--at", "1500", "--chunk", "64"}, 2, "--chunk: --from = "},
      {{path, "--from", path, "--at", "1500"}, 2, "the patterns are given by --pattern"},
      {{"--from", "/nonexistent", "--at", "1500"}, 1, "--from = /nonexistent cannot be read"},
      {{"--from", no_rows, "--at", "1500"}, 1, "norows.json is no profile: it has no rows"},
      {{"--from", twice, "--at", "8"}, 1, "twice.json is no profile: full and 8 keys have two rows"},
  };
  for (const auto& slip : kSlips) {
    const ProgramRun wrong = run(slip.arguments);
    const bool is_named =
        wrong.err.find("tandem-patterns: ") != std::string::npos && wrong.err.find(slip.in_err) != std::string::npos;
    if (wrong.exit_code != slip.exit_code || !is_named || !wrong.out.empty())
      fail_test("exit code %d, not %d, \"%s\": %s", wrong.exit_code, slip.exit_code, slip.in_err, wrong.err.c_str());
  }
}

#ifdef TANDEM_WRONG_ATTEND
void wrong_outputs_are_noticed(void**) {
  std::vector<std::string> command = {TANDEM_PATTERNS, "profile"};
  const std::vector<std::string> arguments = measuring("512", {});
  command.insert(command.end(), arguments.begin(), arguments.end());
  const ProgramRun wrong = run_program(command, {"LD_PRELOAD=" TANDEM_WRONG_ATTEND, "TANDEM_TEST_FAULT=nan"});
  assert_int_equal(wrong.exit_code, 1);
  assert_string_equal(wrong.out.c_str(), "");
  expect_in(wrong.err, {"give other outputs than policy \"all\""});
}
#endif

// `timeout` sends the signal of Ctrl-C during the second length, whose repeats take minutes.
void interrupted_profile_keeps_its_rows(void**) {
  const std::string path = path_of("interrupted.json");
  out_of(measuring("512", {"--out", path}));
  const std::string before = contents(path);
  std::vector<std::string> command = {"/usr/bin/timeout", "--preserve-status", "--signal=INT", "2", TANDEM_PATTERNS,
                                      "profile"};
  const std::vector<std::string> arguments =
      measuring("512,1024", {"--repeats", "100000", "--out", path, "--append", "--svg", path_of("interrupted.svg")});
  command.insert(command.end(), arguments.begin(), arguments.end());
  const ProgramRun ended = run_program(command);
  assert_int_equal(ended.exit_code, 130);
  assert_string_equal(ended.out.c_str(), "");
  expect_in(ended.err, {"rows kept of ", "1024 keys; patterns: 1; ", "interrupted; ",
                        "interrupted.json: 1; --append measures the missing ones"});
  assert_string_equal(contents(path).c_str(), before.c_str());
  expect_in(contents(path_of("interrupted.svg")), {"<title>full, 512 keys: "});
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(rows_have_sizes_times_and_pairs),
      cmocka_unit_test(file_gives_each_pattern_once),
      cmocka_unit_test(append_measures_nothing_twice),
      cmocka_unit_test(append_refuses_other_facts),
      cmocka_unit_test(device_attends_the_same_pairs),
      cmocka_unit_test(times_end_when_the_device_has_finished),
      cmocka_unit_test(profiles_are_of_one_processor),
      cmocka_unit_test(failures_of_the_driver_are_told),
      cmocka_unit_test(times_lie_between_rows),
      cmocka_unit_test(curve_is_piecewise_linear),
      cmocka_unit_test(picture_has_a_line_for_each_pattern),
      cmocka_unit_test(slips_are_named),
#ifdef TANDEM_WRONG_ATTEND
      cmocka_unit_test(wrong_outputs_are_noticed),
#endif
      cmocka_unit_test(interrupted_profile_keeps_its_rows),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
