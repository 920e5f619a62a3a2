// SPDX-License-Identifier: MIT
// tandem-generate from a user's view: bad input gives one line that names it, and a pass key is found.
#include <stdlib.h>
#include <string.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "haystack.h"
#include "run_command.h"
#include "runtime.h"
#include "shapes_run.h"
#include "stop_test.h"
#include "text_file.h"
#include "with_flags.h"

namespace {

const std::string kModel = TANDEM_EXAMPLES_DIRECTORY "/models/pico";
const std::string kText = TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt";

CommandResult generate_with(std::vector<std::string> args) {
  args.insert(args.begin(), TANDEM_GENERATE_PROGRAM);
  return run_command(args);
}

struct BadInput {
  std::vector<std::string> base;  // a command that works, or lacks the flag of the case
  std::vector<std::string> added;
  std::vector<const char*> named;  // words that the message must contain
  int exit_code = 2;               // 1: an error of a file, the library or the machine, not of the command line
  bool is_extra = false;           // existing flags stay
};

std::vector<std::string> plus(std::vector<std::string> args, const std::vector<std::string>& added) {
  args.insert(args.end(), added.begin(), added.end());
  return args;
}

std::vector<BadInput> bad_inputs() {
  const std::vector<std::string> prompt = {"--model", kModel, "--n-predict", "1", "--prompt", "a"};
  const std::vector<std::string> score = {"--model", kModel, "--score", kText, "--context", "64"};
  return {
      {prompt, {"--nonsense"}, {"--nonsense", "unknown"}},
      {prompt, {"nonsense"}, {"unexpected argument \"nonsense\"", "--help"}},
      {prompt, {"policy"}, {"unexpected argument \"policy\"", "did you mean --policy?"}},
      {prompt, {"-x"}, {"unknown flag -x"}},
      {prompt, {"--model", kModel}, {"--model", "is given twice"}, 2, true},
      {prompt, {"--json", "--json"}, {"--json", "is given twice"}},
      {prompt, {"--n-predict"}, {"--n-predict", "missing"}},
      {prompt, {"--n-predict", "0"}, {"--n-predict", "\"0\""}},
      {prompt, {"--n-predict", "-3"}, {"--n-predict", "\"-3\""}},
      {prompt, {"--n-predict", "1.5"}, {"--n-predict", "\"1.5\""}},
      {prompt, {"--n-predict", "99999999999999999999"}, {"--n-predict", "99999999999999999999", "is not between"}},
      {prompt, {"--n-predict", "16384"}, {"--n-predict", "16384", "max_position_embeddings"}, 1},
      {{"--model", kModel, "--prompt", "a"}, {"--n-predict="}, {"--n-predict", "\"\""}},
      {prompt, {"--json=1"}, {"--json", "\"1\""}},
      {prompt, {"--temperature", "nan"}, {"--temperature", "\"nan\""}},
      {prompt, {"--temperature", "-1"}, {"--temperature", "\"-1\""}},
      {prompt, {"--temperature", "1,5"}, {"--temperature", "\"1,5\""}},
      {prompt, {"--isa", "pentium"}, {"--isa", "pentium"}},
      {prompt, {"--kv-type", "q9"}, {"--kv-type", "q9", "bf16"}},
      {prompt, {"--kv-type", "bf61"}, {"--kv-type", "bf61", "did you mean bf16?"}},
      {prompt, {"--k-rotation", "left"}, {"--k-rotation", "left", "hadamard"}},
      {prompt, {"--k-rotation", "hadamard", "--rope", "library"}, {"k_rotation", "RoPE"}, 1},
      {prompt, {"--rope", "maybe"}, {"--rope", "maybe"}},
      {prompt, {"--threads", "-1"}, {"--threads", "\"-1\""}},
      {prompt, {"--modle", "x"}, {"--modle", "did you mean --model?"}},
      {prompt, {"--chunk", "0"}, {"--chunk", "\"0\""}},
      {prompt, {"--score", kText}, {"--score", "--prompt"}},
      {prompt, {"--context", "64"}, {"--context", "--score"}},
      {score, {"--n-predict", "3"}, {"--n-predict", "--score"}},
      {score, {"--temperature", "1"}, {"--temperature", "--score"}},
      {score, {"--seed", "1"}, {"--seed", "--score"}},
      {score, {"--context", "16385"}, {"--context", "16385", "max_position_embeddings", "16384"}, 1},
      {prompt, {"--model", "/nonexistent"}, {"/nonexistent/config.json"}, 1},
      {prompt, {"--model", TANDEM_EXAMPLES_DIRECTORY}, {"config.json"}, 1},
      {{"--prompt", "a"}, {}, {"--model", "missing"}},
      {{"--model", kModel}, {}, {"--prompt", "0 given"}},
      {{"--model", kModel}, {"--prompt-file", "/nonexistent"}, {"/nonexistent"}, 1},
      {{"--model", kModel}, {"--prompt-file", "/dev/null"}, {"/dev/null", "empty"}, 1},
      {{"--model", kModel}, {"--prompt-file", "/"}, {"/"}, 1},
      {{"--model", kModel, "--score", kText}, {}, {"--context", "missing"}},
      {score, {"--context", "1"}, {"--context", "\"1\""}},
      {score, {"--context", "100000"}, {"haystack.txt", "100000"}, 1},
      {score, {"--offset", "16800"}, {"haystack.txt", "16800"}, 1},
      {score, {"--offset", "1000000"}, {"haystack.txt", "1000000"}, 1},
      {score, {"--decode-last", "64"}, {"--decode-last", "\"64\""}},
      {score, {"--decode-last", "0"}, {"--decode-last", "\"0\""}},
  };
}

std::vector<BadInput> bad_policy_inputs() {
  const std::vector<std::string> prompt = {"--model", kModel, "--n-predict", "1", "--prompt", "a"};
  return {
      {prompt, {"--beta", "1e999"}, {"--beta", "1e999", "is not between"}},
      {prompt, {"--policy", "fancy"}, {"--policy", "fancy", "hgca"}},
      {prompt, {"--policy", "hgac"}, {"--policy", "hgac", "did you mean hgca?"}},
      {prompt, {"--policy", "streaming", "--beta", "1"}, {"--beta", "--policy hgca alone"}},
      {prompt, {"--alpha", "0.5"}, {"--alpha", "--policy hgca alone"}},
      {prompt, {"--halo", "3"}, {"--halo", "--policy hgca alone"}},
      {prompt, {"--sinks", "3"}, {"--sinks", "--policy streaming and hgca alone"}},
      {prompt, {"--window", "3"}, {"--window", "--policy streaming and hgca"}},
      {prompt, {"--seed", "3"}, {"--seed", "--temperature"}},
      {prompt, {"--policy", ""}, {"--policy"}},
      {prompt, {"--policy", "patterns"}, {"--patterns", "needs a file"}},
      {prompt, {"--policy", "patterns", "--patterns", kText}, {"haystack.txt"}, 1},
      {prompt, {"--patterns", kText}, {"--patterns", "--policy patterns alone"}},
      {prompt, {"--window", "-1"}, {"--window", "\"-1\""}},
      {prompt, {"--sinks", "x"}, {"--sinks", "\"x\""}},
      {prompt, {"--alpha", "0"}, {"--alpha", "\"0\""}},
      {prompt, {"--alpha", "1.01"}, {"--alpha", "1.01"}},
      {prompt, {"--beta", "-0.5"}, {"--beta", "-0.5"}},
      {prompt, {"--halo", "-2"}, {"--halo", "\"-2\""}},
      {prompt, {"--seed", "-1"}, {"--seed", "\"-1\""}},
  };
}

std::vector<BadInput> bad_device_inputs() {
  const std::vector<std::string> prompt = {"--model", kModel, "--n-predict", "1", "--prompt", "a"};
  return {
      {prompt, {"--device", "tpu"}, {"--device", "tpu", "cuda"}},
      {prompt, {"--device", "cuda", "--backend-path", "/nonexistent"}, {"--device", "cuda"}, 1},
      {prompt, {"--backend-path", "/nonexistent"}, {"--backend-path", "--device cuda"}},
      {prompt, {"--compute", "bf16"}, {"--compute", "--device cuda"}},
      {prompt, {"--compute", "f64"}, {"--compute", "\"f64\"", "bf16"}},
      {prompt, {"--eager"}, {"--eager", "--device cuda"}},
      {prompt, {"--weights", "host"}, {"--weights", "--device cuda"}},
      {prompt, {"--weights", "disk"}, {"--weights", "\"disk\"", "host"}},
      {prompt, {"--resident-share", "0.5"}, {"--resident-share", "--weights host"}},
      {prompt, {"--resident-share", "1.5"}, {"--resident-share", "1.5"}},
      {prompt, {"--tokens", "3"}, {"--tokens", "--shapes"}},
      {{"--shapes", "llama-3-8b", "--context", "100"}, {}, {"--shapes", "--device cuda"}},
      {{"--shapes", "llama-3-8b", "--context", "100"}, {"--n-predict", "3"}, {"--n-predict", "--shapes"}},
      {{"--shapes", "llama-3-8b", "--device", "cuda"}, {}, {"--context", "--shapes"}},
      {{"--shapes", "llama-3-8", "--device", "cuda"}, {}, {"llama-3-8", "did you mean llama-3-8b?"}},
      {{"--shapes", "llama-3-8b", "--device", "cuda", "--context", "9"}, {"--model", kModel}, {"--shapes", "--model"}},
      {{"--shapes", "llama-3-8b", "--device", "cuda", "--context", "9"}, {"--prompt", "a"}, {"--shapes", "--prompt"}},
  };
}

std::vector<BadInput> bad_route_inputs() {
  const std::vector<std::string> on_cpu = {"--model", kModel, "--n-predict", "1", "--prompt", "a"};
  std::vector<std::string> on_host = on_cpu;
  on_host.insert(on_host.end(), {"--device", "cuda", "--kv", "host"});
  return {
      {on_cpu, {"--kv", "host"}, {"--kv", "\"host\"", "--device cuda"}},
      {on_cpu, {"--kv", "disk"}, {"--kv", "\"disk\"", "host"}},
      {on_cpu, {"--route", "stream"}, {"--route", "--kv host"}},
      {on_cpu, {"--device", "cuda", "--route", "stream"}, {"--route", "--kv host"}},
      {on_cpu, {"--stream-buffer", "65536"}, {"--stream-buffer", "--kv host"}},
      {on_host, {"--route", "fetch"}, {"--route", "\"fetch\"", "recompute"}},
      {on_host, {"--eager"}, {"--eager", "--kv host"}},
      {on_host, {"--route", "host+stream"}, {"--route", "\"host+stream\"", "--stream-share"}},
      {on_host, {"--route", "stream", "--stream-share", "0.5"}, {"--stream-share", "host+stream"}},
      {on_host, {"--route", "host+stream", "--stream-share", "1.5"}, {"--stream-share", "1.5"}},
      {on_host, {"--recompute-share", "0.5"}, {"--recompute-share", "--route recompute"}},
      {on_host, {"--route", "recompute", "--recompute-share", "0"}, {"--recompute-share", "\"0\""}},
      {on_host, {"--route", "stream", "--policy", "hgca"}, {"\"stream\"", "--policy", "\"hgca\""}},
      {on_host, {"--route", "recompute", "--rope", "library"}, {"\"recompute\"", "--rope", "\"library\""}},
      {on_host, {"--route", "recompute", "--k-rotation", "hadamard"}, {"\"recompute\"", "--k-rotation", "\"hadamard\""}},
      {on_host, {"--prefill", "8"}, {"--prefill", "--shapes"}},
      {on_host, {"--policy", "hip"}, {"--kv", "\"host\"", "--policy", "\"hip\""}},
      {{"--shapes", "llama-3-8b", "--device", "cuda", "--context", "9"},
       {"--prefill", "10"},
       {"--prefill", "\"10\"", "--context", "9"}},
  };
}

void bad_input_is_named(void**) {
  std::vector<BadInput> all = bad_inputs();
  for (const BadInput& bad : bad_policy_inputs()) all.push_back(bad);
  for (const BadInput& bad : bad_device_inputs()) all.push_back(bad);
  for (const BadInput& bad : bad_route_inputs()) all.push_back(bad);
  for (const BadInput& bad : all) {
    const CommandResult result = generate_with(bad.is_extra ? plus(bad.base, bad.added) : with_flags(bad.base, bad.added));
    std::string shown;
    for (const std::string& arg : bad.added) shown += arg + " ";
    if (result.exit_code != bad.exit_code || !result.out.empty() || result.err.find('\n') != result.err.size() - 1)
      STOP_TEST("%s: exit code %d, \"%s\"", shown.c_str(), result.exit_code, result.err.c_str());
    for (const char* word : bad.named)
      if (result.err.find(word) == std::string::npos)
        STOP_TEST("%s: \"%s\" does not name %s", shown.c_str(), result.err.c_str(), word);
  }
}

// A missing device is an error that names it. Nothing falls back to the CPU.
void a_device_that_is_not_there_is_refused(void**) {
  for (const char* program : {TANDEM_GENERATE_PROGRAM, TANDEM_DEMO_PROGRAM}) {
    const CommandResult result =
        run_command({program, "--device", "cuda", "--backend-path", "/nonexistent/module.so",
                     program == std::string(TANDEM_DEMO_PROGRAM) ? "--json" : "--prompt=a", "--model", kModel});
    assert_int_equal(result.exit_code, 1);
    assert_string_equal(result.out.c_str(), "");
    const char* reason = TANDEM_HAS_CUDA ? "/nonexistent/module.so" : "TANDEM_GENERATE_CUDA";
    if (!strstr(result.err.c_str(), reason)) STOP_TEST("\"%s\" does not name %s", result.err.c_str(), reason);
  }
}

void help_lists_the_flags(void**) {
  const CommandResult result = generate_with({"--help"});
  assert_int_equal(result.exit_code, 0);
  assert_non_null(strstr(result.out.c_str(), "--policy all|streaming|hgca|hip|patterns"));
  assert_string_equal(generate_with({"--nonsense", "-h"}).out.c_str(), result.out.c_str());
  assert_true(generate_with({"--prompt", "--version", "--model", "/nonexistent"}).exit_code == 1);  // a prompt
  for (const char* flag : {"--model",   "--prompt-file",    "--n-predict",
                           "--policy",  "--window",         "--sinks",
                           "--alpha",   "--beta",           "--kv-type",
                           "--threads", "--json",           "--score",
                           "--offset",  "--context",        "--decode-last",
                           "--device",  "--shapes",         "--kv",
                           "--route",   "tokens are bytes", "python -m tandem.eval"})
    assert_non_null(strstr(result.out.c_str(), flag));
}

// Finds a pass key in 2,048 bytes, like the golden figures, under every policy that can see it.
void pass_key_is_found(void**) {
  std::string source;
  assert_false(static_cast<bool>(generate::read_text_file(kText, &source)));
  std::mt19937_64 random(3);
  std::vector<generate::Fact> facts = {generate::pass_key_fact(&random)};
  const generate::Fact& fact = facts[0];
  const std::string question = fact.question;
  std::string prompt = generate::hide_facts(source, 2048 - static_cast<int64_t>(question.size()), &facts) + question;
  assert_int_equal(prompt.size(), 2048);
  const std::vector<std::vector<std::string>> ways = {
      {"--policy", "all", "--kv-type", "f32"},
      {"--policy", "all", "--rope", "library", "--chunk", "100"},
      {"--policy", "all", "--threads", "1"},
      {"--policy", "all", "--threads", "0"},
      {"--policy", "hgca", "--window", "1536"},
      {"--policy", "streaming", "--window", "1536"},
      {"--policy", "hgca", "--window", "1536", "--k-rotation", "hadamard"},
  };
  for (const std::vector<std::string>& way : ways) {
    std::vector<std::string> args = {"--model", kModel, "--prompt", prompt, "--n-predict", "7", "--json"};
    args.insert(args.end(), way.begin(), way.end());
    const CommandResult result = generate_with(args);
    if (result.exit_code != 0) STOP_TEST("%s: %s", way[1].c_str(), result.err.c_str());
    const nlohmann::json json = nlohmann::json::parse(result.out);
    assert_string_equal(json["answer"].get<std::string>().c_str(), (fact.value + ".\n").c_str());
    assert_int_equal(json["prefill_tokens"].get<int>(), 2048);
    assert_int_equal(json["decode_tokens"].get<int>(), 6);
    assert_true(json["decode_tokens_per_second"].get<double>() > 0);
    const double share = json["kv_read_share"].get<double>();
    assert_true(way[1] == "all" ? share == 1 : share < 0.95 && share > 0.7);
  }
}

// A model whose last norm is NaN gives NaN logits. The program must fail and print no bytes.
void logits_that_are_no_numbers_are_refused(void**) {
  char folder[] = "/tmp/tandem-cli-test-XXXXXX";
  assert_non_null(mkdtemp(folder));
  const std::string directory = folder;
  std::string weights;
  assert_false(static_cast<bool>(generate::read_text_file(kModel + "/model.safetensors", &weights)));
  uint64_t n_header = 0;
  memcpy(&n_header, weights.data(), 8);
  const nlohmann::json header = nlohmann::json::parse(weights.substr(8, n_header));
  const size_t first = header["model.norm.weight"]["data_offsets"][0].get<size_t>();
  memcpy(&weights[8 + n_header + first], "\xc0\x7f", 2);  // a bf16 NaN
  std::ofstream(directory + "/model.safetensors", std::ios::binary) << weights;
  std::filesystem::copy_file(kModel + "/config.json", directory + "/config.json");
  const std::vector<std::vector<std::string>> ways = {{"--prompt", "a"},
                                                      {"--prompt", "a", "--json"},
                                                      {"--prompt", "a", "--temperature", "1"},
                                                      {"--score", kText, "--context", "64"},
                                                      {"--score", kText, "--context", "64", "--decode-last", "4"}};
  for (std::vector<std::string> way : ways) {
    way.insert(way.end(), {"--model", directory});
    const CommandResult result = generate_with(way);
    if (result.exit_code != 1 || !result.out.empty() || !strstr(result.err.c_str(), "not finite") ||
        !strstr(result.err.c_str(), folder))
      STOP_TEST("%s: exit code %d, \"%s\"", way[0].c_str(), result.exit_code, result.err.c_str());
  }
  std::filesystem::remove_all(directory);
}

// A text longer than the model's limit is refused, unless its queries see no key beyond that distance.
void a_largest_distance_takes_longer_texts(void**) {
  char name[] = "/tmp/tandem_generate_XXXXXX";
  const std::string folder = mkdtemp(name), patterns = folder + "/patterns.json";
  std::filesystem::create_symlink(std::filesystem::absolute(kModel + "/model.safetensors"), folder + "/model.safetensors");
  std::string config;
  assert_false(static_cast<bool>(generate::read_text_file(kModel + "/config.json", &config)));
  std::ofstream(folder + "/config.json") << config.replace(config.find("16384"), 5, "300");
  nlohmann::json layer;
  for (int head = 0; head < 6; ++head) layer[std::to_string(head)] = {"stream_llm", 8, 150};
  std::ofstream(patterns) << nlohmann::json(6, layer);
  const auto score = [&](const char* max_distance) {
    return generate_with({"--model", folder, "--score", kText, "--context", "700", "--rope", "library", "--policy",
                          "patterns", "--patterns", patterns, "--max-distance", max_distance, "--json"});
  };
  for (const char* too_long : {"0", "300"})
    assert_non_null(strstr(score(too_long).err.c_str(), "max_position_embeddings = 300"));
  for (const auto& [flag, value] : {std::pair("--rope", "library"), {"--policy", "patterns"}}) {  // one without the other
    const CommandResult refused = generate_with({"--model", kModel, "--prompt", "a", "--max-distance", "9", flag, value});
    assert_int_equal(refused.exit_code, 2);
    assert_non_null(strstr(refused.err.c_str(), "--max-distance: is for --"));
  }
  const CommandResult result = score("299");
  assert_int_equal(result.exit_code, 0);
  const double bits = nlohmann::json::parse(result.out)["bits_per_byte"].get<double>();
  assert_true(bits > 0.5 && bits < 3);
  std::filesystem::remove_all(folder);
}

// A stdout that accepts no bytes ends the decoding at once, before the line about the finished decode.
void a_closed_stdout_ends_it(void**) {
  const std::string program = std::string(TANDEM_GENERATE_PROGRAM) + " --model " + kModel + " --prompt a --n-predict 100";
  for (const char* way : {" >/dev/full", " --json >/dev/full", " --help >/dev/full"}) {
    const CommandResult result = run_command({"/bin/sh", "-c", program + way});
    if (result.exit_code != 1 || !strstr(result.err.c_str(), "stdout: cannot be written"))
      STOP_TEST("%s: exit code %d, \"%s\"", way, result.exit_code, result.err.c_str());
    assert_null(strstr(result.err.c_str(), "decode"));
  }
}

// The bytes of f32 keys and values are known: 6 layers, 2 KV heads, 64 dims, K and V.
void bytes_read_are_counted(void**) {
  const CommandResult result = generate_with(
      {"--model", kModel, "--score", kText, "--context", "256", "--decode-last", "32", "--kv-type", "f32", "--json"});
  assert_int_equal(result.exit_code, 0);
  const nlohmann::json json = nlohmann::json::parse(result.out);
  const double token_bytes = 6 * 2 * 64 * 2 * 4, mean_length = (225 + 256) / 2.0;
  assert_true(json["dense_kv_bytes_per_token"].get<double>() == token_bytes * mean_length);
  assert_true(json["kv_bytes_per_token"].get<double>() == token_bytes * mean_length);
  assert_true(json["bits_per_byte"].get<double>() > 0.5 && json["bits_per_byte"].get<double>() < 3);
}

void sampling_follows_the_seed(void**) {
  const auto sample = [](const char* seed) {
    const CommandResult result = generate_with(
        {"--model", kModel, "--prompt", "It was ", "--n-predict", "40", "--temperature", "1", "--seed", seed, "--progress"});
    assert_int_equal(result.exit_code, 0);
    assert_non_null(strstr(result.err.c_str(), "prefill ["));  // the requested progress bar
    return result.out;
  };
  const std::string first = sample("1");
  assert_true(first == sample("1"));
  assert_true(first != sample("2"));
}

// On a GPU that prunes, the window has room for all tokens of the run. Other windows do not change.
void windows_have_all_keys_where_a_gpu_prunes(void**) {
  using namespace generate;
  EngineOptions cpu, gpu;
  gpu.place = kCuda;
  PolicyOptions pruned, dense;
  pruned.policy = "hip";
  assert_int_equal(window_of(gpu, pruned, 16384), 16384);
  assert_int_equal(window_of(gpu, pruned, 0), -1);  // the library's default, if the length is unknown
  assert_int_equal(window_of(cpu, pruned, 16384), -1);
  assert_int_equal(window_of(gpu, dense, 16384), -1);
  pruned.window_tokens = 1024;
  assert_int_equal(window_of(gpu, pruned, 16384), 16384);
  assert_int_equal(window_of(gpu, pruned, 512), 1024);
  assert_int_equal(window_of(cpu, pruned, 16384), 1024);
  const ShapesRun shapes{5000, 100, 20};
  assert_true(shapes.longest() >= 5020 && shapes.longest() <= 5030);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(bad_input_is_named),
      cmocka_unit_test(help_lists_the_flags),
      cmocka_unit_test(pass_key_is_found),
      cmocka_unit_test(bytes_read_are_counted),
      cmocka_unit_test(sampling_follows_the_seed),
      cmocka_unit_test(logits_that_are_no_numbers_are_refused),
      cmocka_unit_test(a_largest_distance_takes_longer_texts),
      cmocka_unit_test(a_closed_stdout_ends_it),
      cmocka_unit_test(a_device_that_is_not_there_is_refused),
      cmocka_unit_test(windows_have_all_keys_where_a_gpu_prunes),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
