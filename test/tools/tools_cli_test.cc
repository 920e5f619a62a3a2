// SPDX-License-Identifier: MIT
// Bad input to the tools: exit code 1, nothing on standard output, and a message that names flag and value.

#include <cstdio>
#include <fstream>

#include "tools/run_program.h"
#include "with_cmocka.h"

namespace {

struct BadInput {
  std::vector<std::string> arguments;
  std::vector<std::string> in_message;
};

const std::vector<BadInput> kBadBench = {
    {{}, {"decode", "append", "prefill", "wake"}},
    {{"decoed"}, {"decoed"}},
    {{"--kv-len", "128"}, {"--kv-len"}},
    {{"decode", "extra"}, {"extra"}},
    {{"decode", "-h"}, {"-h", "--help"}},
    {{"decode", "--no-such-flag"}, {"--no-such-flag"}},
    {{"decode", "--no-such-flag=3"}, {"--no-such-flag"}},
    {{"decode", "--help=yes"}, {"--help", "yes"}},
    {{"decode", "--kv-len"}, {"--kv-len", "needs a value"}},
    {{"decode", "--kv-len", ""}, {"--kv-len"}},
    {{"decode", "--kv-len="}, {"--kv-len"}},
    {{"decode", "--kv-len", "12k"}, {"--kv-len", "12k"}},
    {{"decode", "--kv-len", "0"}, {"--kv-len", "0"}},
    {{"decode", "--kv-len", "-5"}, {"--kv-len", "-5"}},
    {{"decode", "--kv-len", "1024,"}, {"--kv-len", "1024,"}},
    {{"decode", "--kv-len", "1024,,2048"}, {"--kv-len", "1024,,2048"}},
    {{"decode", "--kv-len", "99999999999999999999"}, {"--kv-len", "99999999999999999999"}},
    {{"decode", "--kv-len", "2000000000"}, {"--kv-len", "2000000000", "GiB"}},
    {{"decode", "--q-len", "4"}, {"--q-len", "4"}},
    {{"append", "--kv-len", "16"}, {"--kv-len", "16", "--q-len", "32"}},
    {{"append", "--q-len", "0"}, {"--q-len", "0"}},
    {{"decode", "--q-heads", "7"}, {"--q-heads", "7", "--kv-heads", "8"}},
    {{"decode", "--q-heads", "x"}, {"--q-heads", "x"}},
    {{"decode", "--kv-heads", "0"}, {"--kv-heads", "0"}},
    {{"decode", "--head-dim", "100000"}, {"--head-dim", "100000"}},
    {{"decode", "--head-dim", "100", "--kv-len", "64", "--layers", "1"}, {"k_head_dim", "100"}},
    {{"decode", "--kv-type", "bf17"}, {"--kv-type", "bf17", "bf16"}},
    {{"decode", "--kv-type", "bf16,"}, {"--kv-type", "bf16,"}},
    {{"decode", "--io-type", "f16"}, {"--io-type", "f16"}},
    {{"decode", "--policy", "some"}, {"--policy", "some", "streaming"}},
    {{"decode", "--beta", "nan"}, {"--beta", "nan"}},
    {{"decode", "--beta", "-1"}, {"--beta", "-1"}},
    {{"decode", "--beta", "1e"}, {"--beta", "1e"}},
    {{"decode", "--alpha", "2"}, {"--alpha", "2"}},
    {{"decode", "--window", "-1"}, {"--window", "-1"}},
    {{"decode", "--sinks", "1.5"}, {"--sinks", "1.5"}},
    {{"decode", "--batch", "0"}, {"--batch", "0"}},
    {{"decode", "--threads", "9999"}, {"--threads", "9999"}},
    {{"decode", "--repeats", "0"}, {"--repeats", "0"}},
    {{"decode", "--probe-mib", "1.5"}, {"--probe-mib", "1.5"}},
    {{"decode", "--isa", "mmx"}, {"--isa", "mmx"}},
    {{"decode", "--output", "xml"}, {"--output", "xml", "json"}},
};

const std::vector<BadInput> kBadInfo = {
    {{"plan"}, {"plan"}},
    {{"--plans"}, {"--plans"}},
    {{"--json=1"}, {"--json", "1"}},
    {{"--plan", "--model"}, {"--model", "needs a value"}},
    {{"--plan", "--model", "/no/such/folder"}, {"--model", "/no/such/folder/config.json"}},
    {{"--plan", "--kv-len", "ten"}, {"--kv-len", "ten"}},
    {{"--plan", "--kv-type", "q9"}, {"--kv-type", "q9"}},
    {{"--plan", "--policy", "h2o"}, {"--policy", "h2o"}},
    {{"--plan", "--host-cap-gib", "0"}, {"--host-cap-gib", "0"}},
    {{"--plan", "--host-cap-gib", "inf"}, {"--host-cap-gib", "inf"}},
    {{"--plan", "--q-heads", "30"}, {"--q-heads", "30", "--kv-heads", "8"}},
    {{"--plan", "--page-tokens", "100"}, {"page_tokens", "100"}},
    {{"--plan", "--layers", "0"}, {"--layers", "0"}},
    {{"--isa", "mmx"}, {"--isa", "mmx"}},
    {{"--threads", "-1"}, {"--threads", "-1"}},
};

void expect_refused(const char* program, const BadInput& bad) {
  std::vector<std::string> arguments = {program};
  std::string line = program;
  for (const std::string& argument : bad.arguments) {
    arguments.push_back(argument);
    line += " \"" + argument + "\"";
  }
  const ProgramRun run = run_program(arguments);
  bool good = run.exit_code == 1 && run.out.empty() && run.err.rfind("tandem-", 0) == 0;
  for (const std::string& part : bad.in_message) good = good && run.err.find(part) != std::string::npos;
  good = good && run.err.find('\n') == run.err.size() - 1;
  if (!good)
    fail_test("%s: exit code %d, stdout \"%s\", stderr \"%s\"", line.c_str(), run.exit_code, run.out.c_str(),
              run.err.c_str());
}

void bench_refuses(void**) {
  for (const BadInput& bad : kBadBench) expect_refused(TANDEM_BENCH, bad);
}

void info_refuses(void**) {
  for (const BadInput& bad : kBadInfo) expect_refused(TANDEM_INFO, bad);
}

// A config.json that lacks something, or has nonsense in it.
void info_refuses_configs(void**) {
  const struct {
    const char* config;
    const char* in_message;
  } kConfigs[] = {
      {"", "not a JSON object"},
      {"[1, 2]", "not a JSON object"},
      {"{\"num_hidden_layers\": 2}", "num_attention_heads"},
      {"{\"num_hidden_layers\": -2, \"num_attention_heads\": 4, \"head_dim\": 64}", "num_hidden_layers = -2"},
      {"{\"num_hidden_layers\": \"two\", \"num_attention_heads\": 4, \"head_dim\": 64}", "num_hidden_layers = \"two\""},
      {"{\"num_hidden_layers\": 2, \"num_attention_heads\": 4}", "hidden_size"},
      {"{\"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"hidden_size\": 256}", "hidden_size = 256"},
  };
  const std::string folder = TANDEM_TEST_FOLDER;
  for (const auto& bad : kConfigs) {
    std::ofstream(folder + "/config.json") << bad.config;
    expect_refused(TANDEM_INFO, {{"--plan", "--model", folder}, {"--model", "config.json", bad.in_message}});
  }
}

void helps(void**) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {TANDEM_BENCH, "--help"}, {TANDEM_BENCH, "append", "--help"}, {TANDEM_INFO, "--help"}}) {
    const ProgramRun run = run_program(arguments);
    assert_int_equal(run.exit_code, 0);
    assert_string_equal(run.err.c_str(), "");
    assert_true(run.out.find("--kv-len") != std::string::npos);
    assert_true(run.out.find("--policy all|streaming|hgca") != std::string::npos);
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(bench_refuses),
      cmocka_unit_test(info_refuses),
      cmocka_unit_test(info_refuses_configs),
      cmocka_unit_test(helps),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
