// SPDX-License-Identifier: MIT
// Bad input to the tools: standard output stays empty, and a message names flag and value. The exit code is 2 for a wrong
// command line, and 1 for an error of the library, this machine or a file.

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "tools/run_program.h"
#include "with_cmocka.h"

namespace {

struct BadInput {
  std::vector<std::string> arguments;
  std::vector<std::string> in_message;
  int exit_code = 2;
};

const std::vector<BadInput> kBadBench = {
    {{}, {"decode", "append", "prefill", "wake"}},
    {{"decoed"}, {"decoed", "did you mean decode?"}},
    {{"--kv-len", "128"}, {"--kv-len"}},
    {{"decode", "extra"}, {"unexpected argument \"extra\"", "--help"}},
    {{"decode", "kv-len", "3"}, {"unexpected argument \"kv-len\"", "did you mean --kv-len?"}},
    {{"decode", "-x"}, {"unknown flag -x", "--help"}},
    {{"decode", "--kv-len", "3", "--kv-len=4"}, {"--kv-len is given twice"}},
    {{"decode", "--ragged", "--batch", "2", "--ragged"}, {"--ragged is given twice"}},
    {{"decode", "--kvlen", "3"}, {"--kvlen", "did you mean --kv-len?"}},
    {{"decode", "--no-such-flag"}, {"--no-such-flag"}},
    {{"decode", "--no-such-flag=3"}, {"--no-such-flag"}},
    {{"decode", "--help=yes"}, {"--help", "yes"}},
    {{"decode", "--kv-len"}, {"--kv-len", "needs a value"}},
    {{"decode", "--kv-len", ""}, {"--kv-len"}},
    {{"decode", "--kv-len="}, {"--kv-len"}},
    {{"decode", "--kv-len", "12k"}, {"--kv-len", "12k"}},
    {{"decode", "--kv-len", "0"}, {"--kv-len", "0", "out of range"}},
    {{"decode", "--kv-len", "-5"}, {"--kv-len", "-5"}},
    {{"decode", "--kv-len", "1024,"}, {"--kv-len", "1024,"}},
    {{"decode", "--kv-len", "1024,,2048"}, {"--kv-len", "1024,,2048"}},
    {{"decode", "--kv-len", "99999999999999999999"}, {"--kv-len", "99999999999999999999", "out of range"}},
    {{"decode", "--kv-len", "2000000000", "--probe-mib", "8"}, {"--kv-len", "2000000000", "GiB"}, 1},
    {{"decode", "--kv-len", "2147483648"}, {"--kv-len", "2147483648", "out of range"}},
    // More bytes than 64 bits can count, for all layers or for one.
    {{"decode", "--kv-len", "2147483647", "--batch", "4096", "--q-heads", "4096", "--kv-heads", "4096", "--head-dim", "256",
      "--layers", "65536", "--probe-mib", "8"},
     {"--kv-len", "2147483647", "GiB"},
     1},
    {{"decode", "--kv-len", "2147483647", "--batch", "4096", "--q-heads", "4096", "--kv-heads", "4096", "--head-dim", "256",
      "--probe-mib", "8"},
     {"--kv-len", "2147483647", "GiB"},
     1},
    {{"decode", "--q-len", "4"}, {"--q-len", "4"}},
    {{"decode", "--policy", "hip"}, {"--policy", "hip", "pruning_bench"}},
    {{"decode", "--policy", "patterns"}, {"--policy", "patterns", "--patterns FILE is missing"}},
    {{"decode", "--patterns", "/no/such/file"}, {"--patterns", "--policy patterns"}},
    {{"append", "--policy", "hgca", "--pattern-layer", "1"}, {"--pattern-layer", "--policy patterns"}},
    {{"append", "--policy", "patterns", "--patterns", "/no/such/file"}, {"path = /no/such/file"}, 1},
    {{"append", "--kv-len", "16"}, {"--kv-len", "16", "--q-len", "32"}},
    {{"append", "--q-len", "0"}, {"--q-len", "0"}},
    {{"decode", "--q-heads", "7"}, {"--q-heads", "7", "--kv-heads", "8"}},
    {{"decode", "--q-heads", "x"}, {"--q-heads", "x"}},
    {{"decode", "--kv-heads", "0"}, {"--kv-heads", "0"}},
    {{"decode", "--head-dim", "100000"}, {"--head-dim", "100000"}},
    {{"decode", "--head-dim", "100", "--kv-len", "64", "--layers", "1", "--probe-mib", "8"}, {"k_head_dim", "100"}, 1},
    {{"decode", "--kv-type", "bf17"}, {"--kv-type", "bf17", "(did you mean bf16?)"}},
    {{"decode", "--kv-type", "f32,q80"}, {"--kv-type", "f32,q80", "(did you mean q8_0?)"}},
    {{"decode", "--policy", "pattern"}, {"--policy", "pattern", "(did you mean patterns?)"}},
    {{"decode", "--alpha", "0.5"}, {"--alpha is for --policy hgca alone"}},
    {{"decode", "--policy", "streaming", "--beta", "2"}, {"--beta is for --policy hgca alone"}},
    {{"decode", "--window", "100"}, {"--window is for --policy streaming and hgca alone"}},
    {{"decode", "--policy", "all", "--sinks", "4"}, {"--sinks is for --policy streaming and hgca alone"}},
    {{"decode", "--ragged"}, {"--ragged needs --batch"}},
    {{"wake", "--probe-mib", "8"}, {"--probe-mib is unused in wake"}},
    {{"decode", "--kv-type", "bf16,"}, {"--kv-type", "bf16,"}},
    {{"decode", "--v-type", "bf17"}, {"--v-type", "bf17", "bf16"}},
    {{"decode", "--v-type", "bf16,f32"}, {"--v-type", "bf16,f32"}},
    {{"decode", "--k-rotation", "givens"}, {"--k-rotation", "givens", "hadamard"}},
    {{"decode", "--page-tokens", "8"}, {"--page-tokens", "8"}},
    // Errors of the library come before the header of the results.
    {{"decode", "--output", "csv", "--page-tokens", "100"}, {"page_tokens", "100"}, 1},
    {{"decode", "--output", "csv", "--head-dim", "96", "--k-rotation", "hadamard"}, {"k_rotation", "96"}, 1},
    {{"decode", "--output", "csv", "--head-dim", "576", "--v-head-dim", "512", "--v-aliases-k", "--v-type", "q4_0"},
     {"v_type", "q4_0", "aliases"},
     1},
    {{"decode", "--io-type", "f16"}, {"--io-type", "f16"}},
    {{"decode", "--policy", "some"}, {"--policy", "some", "streaming"}},
    {{"decode", "--beta", "nan"}, {"--beta", "nan"}},
    {{"decode", "--beta", "-1"}, {"--beta", "-1", "out of range"}},
    {{"decode", "--beta", "1e999"}, {"--beta", "1e999", "out of range"}},
    {{"decode", "--beta", "1e"}, {"--beta", "1e"}},
    {{"decode", "--alpha", "2"}, {"--alpha", "2"}},
    {{"decode", "--window", "-1"}, {"--window", "-1"}},
    {{"decode", "--output", "csv", "--window", "2147483648"}, {"--window", "2147483648", "out of range"}},
    {{"decode", "--output", "csv", "--sinks", "2147483648"}, {"--sinks", "2147483648", "out of range"}},
    {{"decode", "--sinks", "1.5"}, {"--sinks", "1.5"}},
    {{"decode", "--batch", "0"}, {"--batch", "0"}},
    {{"decode", "--batch", "3", "--ragged", "--kv-len", "100"}, {"--kv-len", "100", "--batch", "3"}},
    {{"append", "--batch", "4", "--ragged", "--kv-len", "100"}, {"--kv-len", "100", "--batch", "4", "--q-len", "32"}},
    {{"decode", "--threads", "9999"}, {"--threads", "9999"}},
    {{"decode", "--repeats", "0"}, {"--repeats", "0"}},
    {{"decode", "--probe-mib", "1.5"}, {"--probe-mib", "1.5"}},
    {{"decode", "--isa", "mmx"}, {"--isa", "mmx"}},
    {{"decode", "--output", "xml"}, {"--output", "xml", "json"}},
};

const std::vector<BadInput> kBadInfo = {
    {{"plan"}, {"unexpected argument \"plan\"", "did you mean --plan?"}},
    {{"--plan", "--kv-len", "3", "--kv-len", "4"}, {"--kv-len is given twice"}},
    {{"--plans"}, {"--plans"}},
    {{"--json=1"}, {"--json", "1"}},
    {{"--plan", "--model"}, {"--model", "needs a value"}},
    {{"--plan", "--model", "/no/such/folder"}, {"--model", "/no/such/folder/config.json"}, 1},
    {{"--plan", "--kv-len", "ten"}, {"--kv-len", "ten"}},
    {{"--plan", "--kv-type", "q9"}, {"--kv-type", "q9"}},
    {{"--plan", "--v-type", "q9"}, {"--v-type", "q9"}},
    {{"--v-type", "q4_0"}, {"--v-type", "--plan"}},
    {{"--plan", "--policy", "h2o"}, {"--policy", "h2o"}},
    {{"--plan", "--host-cap-gib", "0"}, {"--host-cap-gib", "0"}},
    {{"--plan", "--host-cap-gib", "inf"}, {"--host-cap-gib", "inf"}},
    {{"--plan", "--q-heads", "30"}, {"--q-heads", "30", "--kv-heads", "8"}},
    {{"--plan", "--page-tokens", "100"}, {"page_tokens", "100"}, 1},
    {{"--plan", "--layers", "0"}, {"--layers", "0"}},
    {{"--plan", "--layers", "99999999999999999999"}, {"--layers", "99999999999999999999", "out of range"}},
    {{"--kv-len", "128"}, {"--kv-len", "--plan"}},
    {{"--model", "/"}, {"--model", "--plan"}},
    {{"--plan", "--model", "/", "--layers", "3"}, {"--layers", "--model"}},
    {{"--plan", "--model", "/", "--q-heads", "3"}, {"--q-heads", "--model"}},
    {{"--plan", "--model", "/", "--kv-heads", "3"}, {"--kv-heads", "--model"}},
    {{"--plan", "--model", "/", "--head-dim", "64"}, {"--head-dim", "--model"}},
    {{"--isa", "mmx"}, {"--isa", "mmx"}},
    {{"--threads", "-1"}, {"--threads", "-1"}},
    {{"--backend", ""}, {"--backend", "a text"}},
    {{"--backend-path", "/no/such/file"}, {"--backend-path", "/no/such/file", "--backend is missing"}},
};

const std::vector<BadInput> kBadPlan = {
    {{"128"}, {"unexpected argument \"128\""}},
    {{"--model", "a", "--model", "b"}, {"--model is given twice"}},
    {{"--window", "100"}, {"--window is for --policy streaming and hgca", "--backend"}},
    {{"--policy", "hip", "--sinks", "4"}, {"--sinks is for --policy streaming and hgca alone"}},
    {{"--policy", "hgac"}, {"--policy", "hgac", "(did you mean hgca?)"}},
    {{"--hidden-dim", "64"}, {"--hidden-dim is for --x-type"}},
    {{"--kv-type", "bf61"}, {"--kv-type", "(did you mean bf16?)"}},
    {{"--kvlen", "128"}, {"--kvlen", "did you mean --kv-len?"}},
    {{"--kv-len", "ten"}, {"--kv-len", "ten"}},
    {{"--kv-len", "3", "--context", "3"}, {"--kv-len", "--context"}},
    {{"--kv-len", "3", "--q-len", "4"}, {"--q-len", "4", "--kv-len", "3"}},
    {{"--model", "/", "--hidden-dim", "64"}, {"--hidden-dim", "--model"}},
    {{"--model", "/no/such/folder"}, {"--model", "/no/such/folder/config.json"}, 1},
    {{"--route", "bus"}, {"--route", "bus", "host+stream"}},
    {{"--route", "steam"}, {"--route", "(did you mean stream?)"}},
    {{"--route", "stream"}, {"--route", "--backend"}},
    {{"--device-cap-gib", "1"}, {"--device-cap-gib", "--backend"}},
    {{"--backend", "standin", "--route", "host+stream"}, {"host+stream", "--stream-share"}},
    {{"--backend", "standin", "--route", "stream", "--stream-share", "1"}, {"--stream-share", "host+stream"}},
    {{"--backend", "standin", "--route", "stream", "--recompute-share", "1"}, {"--recompute-share", "--route recompute"}},
    {{"--backend", "abacus"}, {"backend = \"abacus\""}, 1},
    {{"--head-dim", "100"}, {"k_head_dim", "100"}, 1},
};

void expect_refused(const char* program, const BadInput& bad) {
  std::vector<std::string> arguments = {program};
  std::string line = program;
  for (const std::string& argument : bad.arguments) {
    arguments.push_back(argument);
    line += " \"" + argument + "\"";
  }
  const ProgramRun run = run_program(arguments);
  bool good = run.exit_code == bad.exit_code && run.out.empty() && run.err.rfind("tandem-", 0) == 0;
  for (const std::string& part : bad.in_message) good = good && run.err.find(part) != std::string::npos;
  good = good && run.err.find('\n') == run.err.size() - 1;
  if (!good)
    fail_test("%s: exit code %d, stdout \"%s\", stderr \"%s\"", line.c_str(), run.exit_code, run.out.c_str(),
              run.err.c_str());
}

void bench_refuses(void**) {
  for (const BadInput& bad : kBadBench) expect_refused(TANDEM_BENCH, bad);
}

void plan_refuses(void**) {
  for (const BadInput& bad : kBadPlan) expect_refused(TANDEM_PLAN, bad);
}

void info_refuses(void**) {
  for (const BadInput& bad : kBadInfo) expect_refused(TANDEM_INFO, bad);
}

// A config.json with missing or invalid entries.
void info_refuses_configs(void**) {
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  const struct {
    std::string config, in_message;
  } kConfigs[] = {
      {"", "not a JSON object"},
      {"[1, 2]", "not a JSON object"},
      {"{\"num_hidden_layers\": 2}", "num_attention_heads"},
      {"{\"num_hidden_layers\": -2, \"num_attention_heads\": 4, \"head_dim\": 64}", "num_hidden_layers = -2"},
      {"{\"num_hidden_layers\": \"two\", \"num_attention_heads\": 4, \"head_dim\": 64}", "num_hidden_layers = \"two\""},
      {"{\"num_hidden_layers\": 2, \"num_attention_heads\": 4}", "hidden_size"},
      {"{\"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"hidden_size\": 256}", "hidden_size = 256"},
      {"{\"num_hidden_layers\": 2, \"num_attention_heads\": 6, \"num_key_value_heads\": 4, \"head_dim\": 64}",
       "num_attention_heads = 6 is not a multiple of num_key_value_heads = 4"},
      {"{\"num_hidden_layers\": 2000000}", "num_hidden_layers = 2000000 is out of range"},
      {"{\"num_hidden_layers\": 99999999999999999999}", "is out of range"},
      {"{\"num_hidden_layers\": 1.5}", "num_hidden_layers = 1.5 is not a whole number"},
      {"{\"num_hidden_layers\": " + deep + "}", "num_hidden_layers = ..."},
      {"{\"num_hidden_layers\": {\"a\": " + deep + "}}", "num_hidden_layers = ..."},
  };
  const std::string folder = TANDEM_TEST_FOLDER;
  for (const auto& bad : kConfigs) {
    std::ofstream(folder + "/config.json") << bad.config;
    expect_refused(TANDEM_INFO, {{"--plan", "--model", folder}, {"--model", "config.json", bad.in_message}, 1});
  }
}

// Reading a folder fails late, and opening a pipe without a writer never returns.
void info_refuses_other_kinds_of_files(void**) {
  const std::string config = std::string(TANDEM_TEST_FOLDER) + "/config.json";
  alarm(60);
  std::remove(config.c_str());
  assert_int_equal(mkdir(config.c_str(), 0700), 0);
  expect_refused(TANDEM_INFO, {{"--plan", "--model", TANDEM_TEST_FOLDER}, {config.c_str(), "regular"}, 1});
  assert_int_equal(rmdir(config.c_str()), 0);
  assert_int_equal(mkfifo(config.c_str(), 0600), 0);
  expect_refused(TANDEM_INFO, {{"--plan", "--model", TANDEM_TEST_FOLDER}, {config.c_str(), "regular"}, 1});
  std::remove(config.c_str());
  alarm(0);
}

// 8 GB for the queries alone, with a limit of 4 GB: one line on stderr, and no abort.
void bench_survives_a_lack_of_memory(void**) {
#ifndef TANDEM_TEST_SANITIZE  // sanitizers reserve more memory than that
  const ProgramRun run = run_program({"/bin/sh", "-c",
                                      "ulimit -v 4000000; exec " TANDEM_BENCH
                                      " decode --batch 4096 --q-heads 4096 --kv-heads 1 --head-dim 256 --kv-len 1 --layers 1"
                                      " --probe-mib 8 --repeats 1"});
  if (run.exit_code != 1 || run.err.find("memory") == std::string::npos)
    fail_test("exit code %d, stderr \"%s\"", run.exit_code, run.err.c_str());
#endif
}

void full_disks_are_noticed(void**) {
  for (const std::string& command :
       {std::string(TANDEM_INFO) + " --help", std::string(TANDEM_INFO) + " --json", std::string(TANDEM_INFO),
        std::string(TANDEM_PLAN), std::string(TANDEM_PLAN) + " --json", std::string(TANDEM_BENCH) + " --help",
        std::string(TANDEM_BENCH) + " wake --kv-len 1 --head-dim 64 --layers 1 --repeats 1",
        std::string(TANDEM_BENCH) + " wake --kv-len 1 --head-dim 64 --layers 1 --repeats 1 --output csv"}) {
    const ProgramRun run = run_program({"/bin/sh", "-c", command + " >/dev/full"});
    if (run.exit_code != 1 || run.err.find("stdout") == std::string::npos)
      fail_test("%s: exit code %d, stderr \"%s\"", command.c_str(), run.exit_code, run.err.c_str());
  }
}

void helps(void**) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{TANDEM_BENCH, "--help"},
                                                                     {TANDEM_BENCH, "-h"},
                                                                     {TANDEM_BENCH, "append", "--help"},
                                                                     {TANDEM_BENCH, "append", "-h"},
                                                                     {TANDEM_PLAN, "--help"},
                                                                     {TANDEM_PLAN, "-h"}}) {
    const ProgramRun run = run_program(arguments);
    assert_int_equal(run.exit_code, 0);
    assert_string_equal(run.err.c_str(), "");
    assert_true(run.out.find("--kv-len") != std::string::npos);
    assert_true(run.out.find("--policy all|streaming|hgca") != std::string::npos);
  }
  const ProgramRun info = run_program({TANDEM_INFO, "-h"});
  assert_int_equal(info.exit_code, 0);
  assert_string_equal(info.out.c_str(), run_program({TANDEM_INFO, "--help"}).out.c_str());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(bench_refuses),
      cmocka_unit_test(info_refuses),
      cmocka_unit_test(plan_refuses),
      cmocka_unit_test(info_refuses_configs),
      cmocka_unit_test(info_refuses_other_kinds_of_files),
      cmocka_unit_test(bench_survives_a_lack_of_memory),
      cmocka_unit_test(full_disks_are_noticed),
      cmocka_unit_test(helps),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
