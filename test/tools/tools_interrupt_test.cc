// SPDX-License-Identifier: MIT
// Ctrl-C: the exit code is 130, finished measurements are printed, and the terminal keeps no partial line. Progress is only
// shown on terminals, on stderr.

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "examples/generate/interrupt.h"
#include "examples/generate/progress_bar.h"
#include "tools/run_program.h"
#include "with_cmocka.h"

namespace {

#ifdef TANDEM_TEST_SANITIZE
constexpr auto kWhile = std::chrono::seconds(15);
#else
constexpr auto kWhile = std::chrono::seconds(4);  // enough time for some repeats
#endif

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Pair {
  int ours = -1, theirs = -1;
};

Pair make_pipe() {
  int ends[2];
  assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
  return {ends[0], ends[1]};
}

Pair make_terminal() {
  Pair pair;
  winsize size = {24, 100, 0, 0};
  assert_int_equal(openpty(&pair.ours, &pair.theirs, nullptr, nullptr, &size), 0);
  fcntl(pair.ours, F_SETFD, FD_CLOEXEC);
  fcntl(pair.theirs, F_SETFD, FD_CLOEXEC);
  return pair;
}

struct Way {
  std::vector<std::string> arguments;
  std::function<bool(const ProgramRun&)> is_time;  // whether to send the signal, by the output; NULL: no signal
  bool on_terminal = false;                        // stderr is a terminal
  std::string terminal = "TERM=xterm";
  int signal = SIGINT;
};

pid_t start(const Way& way, int out, int err) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
  std::vector<char*> words, variables = {const_cast<char*>(way.terminal.c_str())};
  for (const std::string& word : way.arguments) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  for (char** variable = environ; *variable; ++variable)
    if (std::string(*variable).rfind("TERM=", 0) != 0) variables.push_back(*variable);
  variables.push_back(nullptr);
  pid_t child = 0;
  assert_int_equal(posix_spawn(&child, words[0], &actions, nullptr, words.data(), variables.data()), 0);
  posix_spawn_file_actions_destroy(&actions);
  return child;
}

// Reads both ends until the program closes them.
ProgramRun run_way(const Way& way) {
  const Pair out = make_pipe(), err = way.on_terminal ? make_terminal() : make_pipe();
  const pid_t child = start(way, out.theirs, err.theirs);
  close(out.theirs);
  close(err.theirs);
  ProgramRun run;
  pollfd ends[2] = {{out.ours, POLLIN, 0}, {err.ours, POLLIN, 0}};
  bool is_sent = !way.is_time;
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    if (poll(ends, 2, 20) < 0) break;
    for (int i = 0; i < 2; ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      char piece[4096];
      const ssize_t n = read(ends[i].fd, piece, sizeof piece);  // the end of a terminal is an error
      if (n > 0)
        (i == 0 ? run.out : run.err).append(piece, static_cast<size_t>(n));
      else
        ends[i].fd = -1;
    }
    if (is_sent || !way.is_time(run)) continue;
    is_sent = true;
    kill(child, way.signal);
  }
  close(out.ours);
  close(err.ours);
  int status = 0;
  if (waitpid(child, &status, 0) == child && WIFEXITED(status)) run.exit_code = WEXITSTATUS(status);
  return run;
}

std::function<bool(const ProgramRun&)> once_out_has(const std::string& text) {
  return [=](const ProgramRun& run) { return run.out.find(text) != std::string::npos; };
}

void expect_end(const ProgramRun& run, int exit_code, const std::vector<std::string>& in_out,
                const std::vector<std::string>& in_err) {
  bool good = run.exit_code == exit_code;
  for (const std::string& part : in_out) good = good && run.out.find(part) != std::string::npos;
  for (const std::string& part : in_err) good = good && run.err.find(part) != std::string::npos;
  if (!good) fail_test("exit code %d, stdout \"%s\", stderr \"%s\"", run.exit_code, run.out.c_str(), run.err.c_str());
}

std::vector<Json> json_lines(const std::string& out) {
  std::vector<Json> lines;
  std::istringstream stream(out);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

std::vector<std::string> bench(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {TANDEM_BENCH, "decode", "--q-heads", "8", "--kv-heads",  "2",
                                        "--head-dim", "64",     "--layers",  "2", "--probe-mib", "8"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// The signal comes after the first row, because rows do not wait for the last case.
void bench_keeps_rows(void**) {
  const ProgramRun table = run_way({bench({"--kv-len", "64,100000", "--repeats", "300"}), once_out_has("| ok    |\n")});
  expect_end(table, 130, {"| bf16 |     64 |"}, {"tandem-bench: interrupted; rows of 2 cases: "});
  const ProgramRun json =
      run_way({bench({"--kv-len", "64,100000", "--repeats", "300", "--output", "json"}), once_out_has("}\n")});
  expect_end(json, 130, {}, {"interrupted"});
  const std::vector<Json> lines = json_lines(json.out);
  assert_true(lines[0]["kv_len"] == 64 && lines[0]["repeats"] == 300 && lines[0]["check"] == "ok");
  if (lines.size() > 1) assert_true(lines[1]["repeats"].get<int64_t>() < 300);
}

// Cases that take turns all end together. Each keeps the repeats that it has finished.
void bench_in_turns_keeps_repeats(void**) {
  const auto begin = Clock::now();
  const ProgramRun run = run_way({bench({"--kv-len", "64,100", "--repeats", "100000", "--interleave", "--output", "json"}),
                                  [&](const ProgramRun&) { return Clock::now() - begin > kWhile; }});
  expect_end(run, 130, {}, {"interrupted; rows of 2 cases: 2"});
  const std::vector<Json> lines = json_lines(run.out);
  assert_int_equal(lines.size(), 2);
  const auto n_first = lines[0]["repeats"].get<int64_t>(), n_second = lines[1]["repeats"].get<int64_t>();
  assert_true(n_second > 0 && n_second < 100000 && n_first - n_second >= 0 && n_first - n_second <= 1);
  for (const Json& line : lines) assert_true(line["check"] == "ok" && line["median_us"].get<double>() > 0);
}

// On a terminal that can erase: a line with the time left, erased before other output. Elsewhere: nothing.
void progress_is_for_terminals(void**) {
  const std::vector<std::string> arguments = bench({"--kv-len", "100", "--repeats", "100000"});
  const ProgramRun shown =
      run_way({arguments, [](const ProgramRun& run) { return run.err.find(" left") != std::string::npos; }, true});
  expect_end(shown, 130, {"| ok    |"}, {"\r1/1: 100 keys, bf16 [", " repeats/s  "});
  const size_t last = shown.err.rfind("\r\033[K");
  assert_true(last != std::string::npos && shown.err.find("tandem-bench: interrupted") > last);
  for (size_t at = 0; at < last;) {  // no line is wider than the terminal
    const size_t end = shown.err.find('\r', at + 1);
    assert_true(end - at <= 100 + 4);
    at = end;
  }
  for (const bool on_terminal : {false, true}) {
    const auto begin = Clock::now();
    const auto after_seconds = [&](const ProgramRun&) { return Clock::now() - begin > kWhile; };
    const ProgramRun silent = run_way({arguments, after_seconds, on_terminal, "TERM=dumb"});
    expect_end(silent, 130, {"| ok    |"}, {});
    if (silent.err.rfind("tandem-bench: interrupted", 0) != 0) fail_test("stderr \"%s\"", silent.err.c_str());
  }
}

// Programs under nohup or in a shell's background continue.
void ignored_signals_stay_ignored(void**) {
  std::vector<std::string> arguments = {"/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh"};
  const std::vector<std::string> program = bench({"--kv-len", "64,100", "--repeats", "100"});
  arguments.insert(arguments.end(), program.begin(), program.end());
  const ProgramRun run = run_way({arguments, once_out_has("| ok    |\n")});
  expect_end(run, 0, {"| bf16 |   64 |", "| bf16 |  100 |"}, {});
}

void sigterm_ends_alike(void**) {
  const ProgramRun run = run_way(
      {bench({"--kv-len", "64,100000", "--repeats", "300"}), once_out_has("| ok    |\n"), false, "TERM=xterm", SIGTERM});
  expect_end(run, 143, {"| bf16 |     64 |"}, {"interrupted"});
}

// Runs in a process of its own that never checks the flag. A second Ctrl-C ends it, or a timeout of some seconds.
void deaf_work_is_ended(void**) {
  for (const bool twice : {true, false}) {
    const auto begin = Clock::now();
    const pid_t child = fork();
    if (child == 0) {
      generate::catch_interrupts();
      for (;;) pause();
    }
    usleep(200000);
    assert_int_equal(kill(child, SIGINT), 0);
    if (twice) {
      usleep(800000);
      kill(child, SIGINT);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 130);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    assert_true(twice ? seconds < 4 : seconds > 4.5);
  }
}

void durations_are_short(void**) {
  const std::pair<double, const char*> kTexts[] = {{0.2, "1 s"},         {59, "59 s"},        {60, "1 min 0 s"},
                                                   {125.5, "2 min 6 s"}, {3600, "1 h 0 min"}, {12000, "3 h 20 min"}};
  for (const auto& [seconds, wanted] : kTexts) assert_string_equal(generate::duration_text(seconds).c_str(), wanted);
}

std::string example(const char* program) {
  const std::string front = TANDEM_FRONT;
  return front.substr(0, front.rfind('/') + 1) + program;
}

// Prints the text so far and its speed.
void generate_tells_what_was_done(void**) {
  if (!TANDEM_HAS_EXAMPLES) return;
  const std::vector<std::string> arguments = {example("tandem-generate"),
                                              "--model",
                                              TANDEM_EXAMPLES_FOLDER "/models/pico",
                                              "--prompt",
                                              "It was ",
                                              "--n-predict",
                                              "16000"};
  const ProgramRun text =
      run_way({arguments, [](const ProgramRun& run) { return run.out.size() > 50; }, true});  // no bar on the terminal
  expect_end(text, 130, {"\n"}, {"prefill 7 tokens, ", "\r\ndecode ", "tokens/s", "tandem-generate: interrupted"});
  assert_true(text.err.find('[') == std::string::npos);
  std::vector<std::string> as_json = arguments;
  as_json.push_back("--json");
  const auto has_bar = [](const ProgramRun& run) { return run.err.find("decode [") != std::string::npos; };
  const ProgramRun json = run_way({as_json, has_bar, true});
  expect_end(json, 130, {}, {" left\033[K", "tandem-generate: interrupted"});
  const Json outcome = Json::parse(json.out);
  assert_true(outcome["interrupted"] == true);
  const auto n_bytes = outcome["decode_tokens"].get<int64_t>();
  assert_true(n_bytes > 10 && n_bytes < 15999 && outcome["decode_tokens_per_second"].get<double>() > 0);
}

void scores_are_of_what_was_read(void**) {
  if (!TANDEM_HAS_EXAMPLES) return;
  const auto has_bar = [](const ProgramRun& run) { return run.err.find("decode [") != std::string::npos; };
  const ProgramRun run =
      run_way({{example("tandem-generate"), "--model", TANDEM_EXAMPLES_FOLDER "/models/pico", "--score",
                TANDEM_EXAMPLES_FOLDER "/data/haystack.txt", "--context", "16000", "--decode-last", "15900", "--json"},
               has_bar,
               true});
  expect_end(run, 130, {}, {"interrupted"});
  const Json outcome = Json::parse(run.out);
  const auto n_scored = outcome["scored_bytes"].get<int64_t>();
  assert_true(n_scored > 0 && n_scored < 15900 && outcome["decode_tokens"] == n_scored);
  const double bits = outcome["bits_per_byte"].get<double>();
  assert_true(bits > 0.5 && bits < 4);
}

void demo_ends(void**) {
  if (!TANDEM_HAS_EXAMPLES) return;
  const ProgramRun run = run_way({{example("tandem-demo")}, once_out_has("facts hidden in 16384 tokens")});
  expect_end(run, 130, {"pico: "}, {});
  assert_string_equal(run.err.c_str(), "tandem-demo: interrupted\n");
}

}  // namespace

int main() {
  alarm(400);  // ends a process that ignores the signal
  const CMUnitTest tests[] = {
      cmocka_unit_test(bench_keeps_rows),
      cmocka_unit_test(bench_in_turns_keeps_repeats),
      cmocka_unit_test(progress_is_for_terminals),
      cmocka_unit_test(ignored_signals_stay_ignored),
      cmocka_unit_test(sigterm_ends_alike),
      cmocka_unit_test(deaf_work_is_ended),
      cmocka_unit_test(durations_are_short),
      cmocka_unit_test(generate_tells_what_was_done),
      cmocka_unit_test(scores_are_of_what_was_read),
      cmocka_unit_test(demo_ends),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
