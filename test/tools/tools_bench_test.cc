// SPDX-License-Identifier: MIT
// Small runs of tandem-bench: their output parses and is complete, and wrong outputs are detected.

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tools/run_program.h"
#include "with_cmocka.h"
#include "with_flags.h"

namespace {

using Json = nlohmann::json;

std::vector<std::string> small_run(const std::string& mode, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {TANDEM_BENCH, mode, "--q-heads", "8", "--kv-heads", "2",
                                        "--head-dim", "64", "--layers",  "2", "--repeats",  "2"};
  if (mode != "wake") arguments.insert(arguments.end(), {"--probe-mib", "8"});  // wake measures no limit
  return with_flags(arguments, more);
}

std::vector<Json> json_lines(const std::string& out) {
  std::vector<Json> lines;
  std::istringstream stream(out);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(Json::parse(line, nullptr, false));
    if (!lines.back().is_object()) fail_test("not a JSON object: %s", line.c_str());
  }
  return lines;
}

std::vector<Json> successful_run(const std::vector<std::string>& arguments) {
  const ProgramRun run = run_program(arguments);
  if (run.exit_code != 0) fail_test("exit code %d: %s%s", run.exit_code, run.out.c_str(), run.err.c_str());
  return json_lines(run.out);
}

void expect_complete(const Json& line) {
  for (const char* name : {"bench", "type", "io_type", "policy", "isa", "state", "check"})
    if (!line.contains(name) || !line[name].is_string()) fail_test("no %s in %s", name, line.dump().c_str());
  for (const char* name : {"median_us", "p10_us", "p90_us", "kv_bytes", "read_gbps", "threads", "kv_len", "q_len", "batch"})
    if (!line.contains(name) || !(line[name].get<double>() > 0)) fail_test("no %s in %s", name, line.dump().c_str());
  if (line["check"] != "ok") fail_test("check is not ok: %s", line.dump().c_str());
  assert_true(line["p10_us"] <= line["median_us"] && line["median_us"] <= line["p90_us"]);
  if (line["bench"] == "wake") return;
  for (const char* name : {"limit_gbps", "share"})
    if (!line.contains(name) || !(line[name].get<double>() > 0)) fail_test("no %s in %s", name, line.dump().c_str());
}

// Compares a figure that is printed with this number of decimals. Slow cases leave few significant digits.
void expect_figure(const Json& line, const char* name, double wanted, double error, int digits) {
  const double most = error + 0.5 * std::pow(10.0, -digits) * 1.000001, got = line[name].get<double>();
  if (!(std::abs(got - wanted) <= most)) fail_test("%s is %.9g, not %.9g", name, got, wanted);
}

void decode_prints_json(void**) {
  const std::vector<Json> lines =
      successful_run(small_run("decode", {"--kv-len", "200,1000", "--kv-type", "bf16,f16,f32", "--output", "json"}));
  assert_int_equal(lines.size(), 6);
  for (size_t i = 0; i < 6; ++i) {
    expect_complete(lines[i]);
    assert_string_equal(lines[i]["type"].get<std::string>().c_str(), i < 2 ? "bf16" : i < 4 ? "f16" : "f32");
    const int64_t kv_len = i % 2 == 0 ? 200 : 1000;
    assert_int_equal(lines[i]["kv_len"].get<int64_t>(), kv_len);
    // Each step of the loop adds a token: K and V of at least kv_len and at most a few more tokens, 2 heads of 64.
    const int64_t token_bytes = 2 * 2 * 64 * (i < 4 ? 2 : 4);
    assert_in_range(lines[i]["kv_bytes"].get<int64_t>(), kv_len * token_bytes, (kv_len + 8) * token_bytes);
    // The numbers behind the figure are rounded too, to 0.01 us and 0.001 GB/s.
    const double us = lines[i]["median_us"].get<double>(), limit = lines[i]["limit_gbps"].get<double>();
    const double gbps = lines[i]["kv_bytes"].get<double>() / us * 1e-3;
    expect_figure(lines[i], "read_gbps", gbps, gbps * 0.006 / us, 3);
    const double share = lines[i]["read_gbps"].get<double>() / limit;
    expect_figure(lines[i], "share", share, (1 + share) * 0.0006 / limit, 4);
  }
}

// Cases that take turns: the bytes read between two calls on a layer are those of all cases, and no case reports another's
// figures.
void cases_in_turns(void**) {
  const std::vector<Json> lines = successful_run(
      small_run("decode", {"--kv-len", "200,1000", "--kv-type", "bf16,q8_0", "--interleave", "--output", "json"}));
  assert_int_equal(lines.size(), 4);
  int64_t rotation_bytes = 0;
  for (size_t i = 0; i < 4; ++i) {
    expect_complete(lines[i]);
    assert_string_equal(lines[i]["type"].get<std::string>().c_str(), i < 2 ? "bf16" : "q8_0");
    const int64_t kv_len = i % 2 == 0 ? 200 : 1000, token_bytes = 2 * 2 * (i < 2 ? 128 : 68);
    assert_int_equal(lines[i]["kv_len"].get<int64_t>(), kv_len);
    assert_in_range(lines[i]["kv_bytes"].get<int64_t>(), kv_len * token_bytes, (kv_len + 8) * token_bytes);
    rotation_bytes += 2 * kv_len * token_bytes;  // two layers
  }
  for (const Json& line : lines) assert_int_equal(line["rotation_bytes"].get<int64_t>(), rotation_bytes);
}

void every_policy_and_shape(void**) {
  const std::vector<std::vector<std::string>> kRuns = {
      {"decode", "--policy", "streaming", "--window", "100", "--sinks", "4", "--batch", "3"},
      {"decode", "--policy", "hgca", "--window", "128", "--sinks", "16", "--batch", "2"},
      {"decode", "--v-head-dim", "128", "--io-type", "f32"},
      {"decode", "--rope-theta", "500000", "--io-type", "f32", "--kv-type", "f32"},
      {"decode", "--rope-theta", "10000", "--policy", "hgca", "--window", "128"},
      {"append", "--rope-theta", "10000", "--q-len", "40"},
      {"decode", "--rope-theta", "10000", "--batch", "4", "--ragged"},
      {"decode", "--rope-theta", "10000", "--batch", "4", "--ragged", "--policy", "hgca", "--window", "128"},
      {"append", "--rope-theta", "10000", "--batch", "4", "--ragged", "--q-len", "5"},
      {"decode", "--q-heads", "16", "--kv-heads", "2"},
      {"decode", "--q-heads", "40", "--kv-heads", "2", "--policy", "hgca", "--window", "128"},
      {"decode", "--q-heads", "32", "--kv-heads", "1", "--kv-type", "q8_0", "--v-type", "bf16"},
      {"decode", "--head-dim", "576", "--v-head-dim", "512", "--v-aliases-k", "--q-heads", "128", "--kv-heads", "1"},
      {"decode", "--head-dim", "576", "--v-head-dim", "512", "--v-aliases-k", "--q-heads", "16", "--kv-heads", "1"},
      {"decode", "--head-dim", "576", "--v-head-dim", "512", "--v-aliases-k", "--policy", "hgca", "--window", "128"},
      {"append", "--head-dim", "576", "--v-head-dim", "512", "--v-aliases-k", "--q-heads", "32", "--kv-type", "q8_0"},
      {"append", "--q-len", "5", "--batch", "2"},
      {"decode", "--batch", "4", "--ragged"},
      {"append", "--q-len", "5", "--batch", "3", "--ragged"},
      {"append", "--q-len", "33", "--kv-type", "f32", "--io-type", "f32"},
      {"append", "--q-len", "40", "--kv-type", "q8_0", "--v-type", "bf16"},
      {"append", "--q-len", "40", "--kv-type", "bf16", "--v-type", "f32"},
      {"append", "--q-len", "40", "--k-rotation", "hadamard"},
      {"append", "--q-len", "40", "--policy", "streaming", "--window", "100", "--sinks", "4"},
      {"append", "--policy", "hgca", "--window", "128", "--sinks", "16"},
      {"prefill", "--q-len", "300"},
      {"prefill", "--q-len", "600", "--threads", "1"},
  };
  for (const auto& run : kRuns) {
    std::vector<std::string> more(run.begin() + 1, run.end());
    more.insert(more.end(), {"--kv-len", "600", "--output", "json"});
    const std::vector<Json> lines = successful_run(small_run(run[0], more));
    assert_int_equal(lines.size(), 1);
    expect_complete(lines[0]);
    if (run[0] == "decode") continue;
    for (const char* name : {"gflops", "limit_gflops"}) assert_true(lines[0].at(name).get<double>() > 0);
  }
}

std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = std::string(TANDEM_TEST_FOLDER) + "/" + name;
  std::ofstream(path) << text;
  return path;
}

// Layer 0 has each pattern, a union, and a group with only sinks and windows. The keys of layer 1's heads are known in
// advance.
std::string heads_file() {
  return write_file("heads.json", R"([
    {"0": ["full"], "1": ["stream_llm", 20, 60], "2": ["vertical_and_slash", 8, 64],
     "3": [["block_sparse", 2, 0], ["stream_llm", 4, 60]],
     "4": ["stream_llm", 4, 33], "5": ["stream_llm", 10, 90], "6": ["stream_llm", 7, 50], "7": ["stream_llm", 4, 60]},
    {"0": ["full"], "1": ["full"], "2": ["full"], "3": ["full"],
     "4": ["stream_llm", 8, 64], "5": ["stream_llm", 8, 64], "6": ["stream_llm", 8, 64], "7": ["stream_llm", 8, 64]}])");
}

Json patterns_run(const std::string& mode, const std::string& layer, std::vector<std::string> more) {
  more.insert(more.end(), {"--policy", "patterns", "--patterns", heads_file(), "--pattern-layer", layer, "--kv-len", "600",
                           "--output", "json"});
  const std::vector<Json> lines = successful_run(small_run(mode, more));
  assert_int_equal(lines.size(), 1);
  expect_complete(lines[0]);
  assert_true(lines[0]["patterns"] == heads_file() && lines[0]["pattern_layer"] == std::stoi(layer));
  return lines[0];
}

// The check of each run computes the keys of heads that are known in advance and counts their pairs.
void patterns_are_those_of_the_files_layer(void**) {
  for (const char* layer : {"0", "1"}) {
    patterns_run("decode", layer, {"--batch", "2"});
    for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
             {}, {"--batch", "3", "--ragged"}, {"--q-len", "300"}, {"--kv-type", "q8_0"}, {"--rope-theta", "10000"}}) {
      const Json append = patterns_run("append", layer, more);
      assert_true(append["pairs"] < append["dense_pairs"] && append["pairs"].get<int64_t>() > 0);
    }
  }
  // One block of 32 queries: four full heads, and four with 8 sinks and a window that begins 63 tokens before the block.
  const Json append = patterns_run("append", "1", {});
  constexpr int64_t kOwn = 32 * 33 / 2, kDense = 32 * 568 + kOwn, kNarrow = 32 * (8 + 63) + kOwn;
  assert_int_equal(append["dense_pairs"].get<int64_t>(), 8 * kDense);
  assert_int_equal(append["pairs"].get<int64_t>(), 4 * kDense + 4 * kNarrow);
  // One query: 8 + 64 keys of the second KV head, and all keys of the first.
  const int64_t all_bytes = patterns_run("wake", "1", {})["kv_bytes"], key_bytes = 2 * 64 * 2;
  assert_int_equal(all_bytes, (600 + 72) * key_bytes);
}

void gates_are_of_kv_heads(void**) {
  const std::string gates = write_file("gates.tsv", "0.9 0.1\n0.2 0.8\n");
  const std::vector<Json> lines = successful_run(
      small_run("append", {"--policy", "patterns", "--patterns", gates, "--kv-len", "2000", "--output", "json"}));
  expect_complete(lines.at(0));
  const double share = lines[0]["pairs"].get<double>() / lines[0]["dense_pairs"].get<double>();
  assert_true(share > 0.5 && share < 0.75);
}

void files_of_other_models_are_refused(void**) {
  const auto refused = [](const std::vector<std::string>& more, const std::string& why) {
    std::vector<std::string> flags = {"--policy", "patterns", "--patterns", heads_file()};
    flags.insert(flags.end(), more.begin(), more.end());
    const ProgramRun run = run_program(small_run("append", flags));
    if (run.exit_code != 1 || run.err.find(why) == std::string::npos || !run.out.empty())
      fail_test("exit code %d, not \"%s\": %s", run.exit_code, why.c_str(), run.err.c_str());
  };
  refused({"--pattern-layer", "2"}, "--pattern-layer = 2: --patterns = " + heads_file() + " has layers 0 to 1\n");
  refused({"--q-heads", "6"}, heads_file() + " has 2 layers of 8 query heads, the model has layers of 6\n");
}

void wake_is_labelled_warm(void**) {
  const std::vector<Json> lines =
      successful_run({TANDEM_BENCH, "wake", "--head-dim", "64", "--repeats", "1", "--output", "json"});
  assert_int_equal(lines.size(), 3);
  for (const Json& line : lines) {
    expect_complete(line);
    assert_string_equal(line["state"].get<std::string>().c_str(), "warm");
  }
}

void isa_and_threads_are_obeyed(void**) {
  const std::vector<Json> all = successful_run(small_run("decode", {"--kv-len", "64", "--output", "json"}));
  int32_t n_tried = 0;
  for (const char* name : {"avx3", "avx2", "sse4"}) {
    const ProgramRun run =
        run_program(small_run("decode", {"--kv-len", "64", "--output", "json", "--isa", name, "--threads", "1"}));
    if (run.exit_code != 0) continue;  // this processor lacks the instruction set
    const std::vector<Json> lines = json_lines(run.out);
    assert_int_equal(lines.size(), 1);
    assert_string_equal(lines[0]["isa"].get<std::string>().c_str(), name);
    assert_int_equal(lines[0]["threads"].get<int32_t>(), 1);
    ++n_tried;
  }
  assert_true(n_tried > 0 || all[0]["isa"] == "neon" || all[0]["isa"] == "sve");
}

// The size of the stored rows shows that both types and the page size were used.
void keys_and_values_have_their_own_types(void**) {
  const std::vector<std::string> flags = {"--kv-len", "600",          "--kv-type", "q8_0,bf16",     "--v-type",
                                          "q4_0",     "--k-rotation", "hadamard",  "--page-tokens", "16"};
  std::vector<std::string> as_json = flags;
  as_json.insert(as_json.end(), {"--output", "json"});
  const std::vector<Json> lines = successful_run(small_run("decode", as_json));
  assert_int_equal(lines.size(), 2);
  for (size_t i = 0; i < 2; ++i) {
    expect_complete(lines[i]);
    assert_string_equal(lines[i]["type"].get<std::string>().c_str(), i == 0 ? "q8_0" : "bf16");
    assert_string_equal(lines[i]["v_type"].get<std::string>().c_str(), "q4_0");
    assert_string_equal(lines[i]["k_rotation"].get<std::string>().c_str(), "hadamard");
    assert_int_equal(lines[i]["page_tokens"].get<int64_t>(), 16);
    const int64_t k_bytes = i == 0 ? 64 + 2 * 2 : 64 * 2, token_bytes = 2 * (k_bytes + 32 + 4);  // 2 heads of 64
    assert_int_equal(lines[i]["kv_bytes"].get<int64_t>() % token_bytes, 0);
    assert_in_range(lines[i]["kv_bytes"].get<int64_t>(), 600 * token_bytes, 608 * token_bytes);
  }
  const ProgramRun run = run_program(small_run("decode", flags));
  assert_true(run.out.find("| q8_0, q4_0 |") != std::string::npos);
  assert_true(run.out.find("K rotated (hadamard)") != std::string::npos);
}

// Without an option the library uses threshold factor 1.
void beta_is_the_librarys(void**) {
  const std::vector<Json> lines =
      successful_run(small_run("decode", {"--kv-len", "64", "--policy", "hgca", "--output", "json"}));
  assert_true(lines.at(0)["beta"].get<double>() == 1);
}

// The default measurements of `./dev bench`, shortened: every flag is known.
void dev_bench_is_understood(void**) {
  std::ifstream script(TANDEM_DEV_SCRIPT);
  std::vector<std::string> arguments;
  for (std::string line; arguments.empty() && std::getline(script, line);) {
    const size_t begin = line.find("set -- decode ");
    if (begin == std::string::npos) continue;
    std::istringstream words(line.substr(begin + 7));
    arguments.push_back(TANDEM_BENCH);
    for (std::string word; words >> word;) arguments.push_back(word);
  }
  assert_true(arguments.size() > 2);
  const ProgramRun run =
      run_program(with_flags(arguments, {"--kv-len", "64", "--layers", "1", "--repeats", "1", "--probe-mib", "8"}));
  if (run.exit_code != 0) fail_test("exit code %d: %s", run.exit_code, run.err.c_str());
  assert_true(run.out.find(" GB/s |") != std::string::npos);
}

void tables_and_csv(void**) {
  ProgramRun run = run_program(small_run("append", {"--kv-len", "64,128", "--output", "csv"}));
  assert_int_equal(run.exit_code, 0);
  std::istringstream stream(run.out);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  assert_int_equal(lines.size(), 3);
  assert_true(lines[0].find("median_us") != std::string::npos && lines[0].find("share") != std::string::npos);

  run = run_program(small_run("decode", {"--kv-len", "64,12800"}));
  assert_int_equal(run.exit_code, 0);
  size_t width = 0, n_rows = 0;
  std::istringstream table(run.out.substr(run.out.find('|')));
  for (std::string line; std::getline(table, line); ++n_rows) {
    if (width == 0) width = line.size();
    assert_int_equal(line.size(), width);  // aligned
  }
  assert_int_equal(n_rows, 4);
}

#ifdef TANDEM_WRONG_ATTEND
// A library loaded before the real one corrupts the output of tandem_attend(). The program must print no figures.
void wrong_outputs_are_noticed(void**) {
  const auto flags_of = [](const std::string& mode, bool with_patterns) {
    std::vector<std::string> flags = {"--kv-len", "500", "--output", "json"};
    if (with_patterns) flags.insert(flags.end(), {"--policy", "patterns", "--patterns", heads_file()});
    return small_run(mode, flags);
  };
  for (const auto& [mode, with_patterns] :
       std::vector<std::pair<const char*, bool>>{{"decode", false}, {"append", false}, {"append", true}}) {
    for (const char* fault : {"none", "o", "lse", "nan", "last_head", "last_layer"}) {
      const ProgramRun run = run_program(flags_of(mode, with_patterns), {std::string("LD_PRELOAD=") + TANDEM_WRONG_ATTEND,
                                                                         std::string("TANDEM_TEST_FAULT=") + fault});
      const std::vector<Json> lines = json_lines(run.out);
      if (lines.size() != 1) fail_test("%s, fault %s: %s%s", mode, fault, run.out.c_str(), run.err.c_str());
      const bool healthy = std::string(fault) == "none";
      if (run.exit_code != (healthy ? 0 : 1)) fail_test("%s, fault %s: exit code %d", mode, fault, run.exit_code);
      assert_true(lines[0].contains("median_us") == healthy);
      assert_true(lines[0].contains("share") == healthy);
      assert_true((lines[0]["check"] == "ok") == healthy);
      if (!healthy) assert_true(lines[0]["check"].get<std::string>().rfind("failed", 0) == 0);
    }
  }
}
#endif

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(decode_prints_json),
      cmocka_unit_test(cases_in_turns),
      cmocka_unit_test(every_policy_and_shape),
      cmocka_unit_test(patterns_are_those_of_the_files_layer),
      cmocka_unit_test(gates_are_of_kv_heads),
      cmocka_unit_test(files_of_other_models_are_refused),
      cmocka_unit_test(wake_is_labelled_warm),
      cmocka_unit_test(isa_and_threads_are_obeyed),
      cmocka_unit_test(keys_and_values_have_their_own_types),
      cmocka_unit_test(beta_is_the_librarys),
      cmocka_unit_test(dev_bench_is_understood),
      cmocka_unit_test(tables_and_csv),
#ifdef TANDEM_WRONG_ATTEND
      cmocka_unit_test(wrong_outputs_are_noticed),
#endif
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
