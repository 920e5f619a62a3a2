// SPDX-License-Identifier: MIT
// Runs tandem-demo and checks that its figures are consistent and its picture is valid.
#include <stdlib.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "run_command.h"
#include "stop_test.h"
#include "text_file.h"

namespace {

using Json = nlohmann::json;

std::string folder;  // removed at the end

Json run_demo(std::vector<std::string> args) {
  args.insert(args.begin(), TANDEM_DEMO_PROGRAM);
  args.push_back("--json");
  if (args[1] != "--passkey" && args[1] != "--numbers") args.insert(args.end(), {"--pictures", folder});
  const CommandResult result = run_command(args);
  if (result.exit_code != 0) STOP_TEST("exit code %d: %s", result.exit_code, result.err.c_str());
  return Json::parse(result.out);  // stdout has nothing else
}

void check_picture(const char* name) {
  std::string png;
  if (generate::read_text_file(folder + "/" + name, &png)) {
    print_message("no picture: built without Cairo\n");
    return;
  }
  assert_true(png.size() > 10000 && png.compare(0, 8, "\x89PNG\r\n\x1a\n") == 0);
}

// With a window over half of the text, hgca finds every fact that dense finds, and reads less.
void facts_are_found_side_by_side(void**) {
  const Json json = run_demo({"--context", "2048", "--window", "1536", "--beta", "0.05", "--decode", "64"});
  assert_int_equal(json["all"]["asked"].get<int>(), 6);
  assert_int_equal(json["all"]["right"].get<int>(), 6);
  assert_true(json["hgca"]["right"].get<int>() >= 5);
  assert_true(json["all"]["kv_read_share"].get<double>() == 1.0);
  assert_true(json["hgca"]["kv_read_share"].get<double>() < 1.0 && json["hgca"]["kv_read_share"].get<double>() > 0.7);
  assert_true(json["hgca"]["bits_per_byte"].get<double>() < 1.02 * json["all"]["bits_per_byte"].get<double>());
  check_picture("kept.png");
}

void pass_keys_are_found(void**) {
  const Json json = run_demo({"--passkey", "3", "--context", "2048", "--policies", "all"});
  assert_int_equal(json["all"]["right"].get<int>(), 3);
}

void numbers_are_found(void**) {
  const Json json = run_demo({"--numbers", "4", "--context", "2048", "--policies", "all,streaming", "--window", "256"});
  assert_int_equal(json["all"]["right"].get<int>(), 4);
  // A decode step that sees only sinks and window cannot read four numbers out of 2,048 bytes.
  assert_true(json["streaming"]["right"].get<int>() < 4);
}

void curve_has_its_points(void**) {
  const Json json = run_demo({"--curve", TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt", "--offset", "0", "--context",
                              "2048", "--decode", "64", "--betas", "0.5,2", "--windows", "10,50"});
  assert_int_equal(json.size(), 5);
  assert_true(json[0]["kv_read_share"].get<double>() == 1.0);
  // A larger beta reads less, and so does a smaller window.
  assert_true(json[2]["kv_read_share"].get<double>() < json[1]["kv_read_share"].get<double>());
  assert_true(json[2]["kv_read_share"].get<double>() < json[4]["kv_read_share"].get<double>());
  check_picture("curve.png");
}

// Codes take fewer bytes than f16 and give nearly the same answers. Bytes: 6 layers of 2 KV heads of 64.
void a_pair_of_types_costs_little(void**) {
  const CommandResult result =
      run_command({TANDEM_DEMO_PROGRAM, "--loss", TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt", "--offset", "0",
                   "--context", "2048", "--kv-type", "q8_0", "--v-type", "q4_0", "--json"});
  if (result.exit_code != 0) STOP_TEST("exit code %d: %s", result.exit_code, result.err.c_str());
  const Json json = Json::parse(result.out);
  assert_int_equal(json.size(), 2);
  const Json &exact = json[0], &codes = json[1];
  assert_true(exact["k_type"] == "f16" && exact["v_type"] == "f16");
  assert_true(codes["k_type"] == "q8_0" && codes["v_type"] == "q4_0" && codes["k_rotation"] == "none");
  assert_int_equal(exact["kv_token_bytes"].get<int64_t>(), 6 * 2 * 2 * 64 * 2);
  assert_int_equal(codes["kv_token_bytes"].get<int64_t>(), 6 * 2 * ((64 + 4) + (32 + 4)));
  assert_true(exact["divergence_bits"].get<double>() == 0);
  const double divergence = codes["divergence_bits"].get<double>();
  assert_true(divergence > 0.001 && divergence < 0.02);
  assert_true(codes["worst_divergence_bits"].get<double>() > divergence);
  const double bits = exact["bits_per_byte"].get<double>(), change = codes["bits_per_byte"].get<double>() / bits - 1;
  assert_true(bits > 1 && bits < 2 && change != 0 && change > -0.01 && change < 0.01);
}

// A window of 0 tokens is a window: only the first row is dense.
void a_window_of_nothing_is_no_dense_row(void**) {
  const Json json = run_demo({"--curve", TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt", "--offset", "0", "--context",
                              "2048", "--decode", "16", "--betas", "1", "--windows", "0"});
  assert_int_equal(json.size(), 2);
  assert_true(json[0]["policy"] == "all" && json[1]["policy"] == "hgca");
  assert_true(json[1]["kv_read_share"].get<double>() < 1);
  const CommandResult result =
      run_command({TANDEM_DEMO_PROGRAM, "--curve", TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt", "--offset", "0",
                   "--context", "2048", "--decode", "16", "--betas", "1", "--windows", "0", "--pictures", folder});
  assert_int_equal(result.exit_code, 0);
  const size_t dense = result.out.find("\ndense ");
  assert_true(dense != std::string::npos && result.out.find("\ndense ", dense + 1) == std::string::npos);
}

// Built without Cairo, the program reports the missing picture, but not where it writes the JSON.
void a_missing_picture_is_no_part_of_the_json(void**) {
  const std::string text = TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt";
  const std::vector<std::vector<std::string>> ways = {
      {"--policies", "hgca", "--context", "2048", "--decode", "4"},
      {"--curve", text, "--offset", "0", "--context", "2048", "--decode", "4", "--betas", "1", "--windows", "10"}};
  for (std::vector<std::string> way : ways) {
    way.insert(way.begin(), TANDEM_DEMO_WITHOUT_PICTURES);
    way.push_back("--json");
    const CommandResult result = run_command(way);
    assert_int_equal(result.exit_code, 0);
    assert_false(Json::parse(result.out, nullptr, false).is_discarded());
    assert_true(result.err.find("No picture") != std::string::npos);
  }
}

// Bad input is refused before the program computes or prints anything.
void bad_input_is_named(void**) {
  const std::string text = TANDEM_EXAMPLES_DIRECTORY "/data/haystack.txt";
  const struct {
    std::vector<std::string> args, named;
    int exit_code = 2;  // 1: the command line is valid, but a file or the model is not
  } kBad[] = {
      {{"--context", "16385"}, {"--context", "16385", "max_position_embeddings", "16384"}, 1},
      {{"--passkey", "2", "--context", "20000"}, {"--context", "20000", "max_position_embeddings"}, 1},
#ifdef TANDEM_TEST_PICTURES  // without Cairo the program writes no pictures
      {{"--pictures", "/dev/null/pictures"}, {"--pictures", "/dev/null/pictures"}, 1},
      {{"--pictures", text}, {"--pictures", text}, 1},
      {{"--curve", text, "--pictures", "/dev/null/pictures"}, {"--pictures", "/dev/null/pictures"}, 1},
#endif
      {{"--passkey", "2", "--numbers", "2"}, {"--passkey", "--numbers"}},
      {{"--policies", "some"}, {"--policies", "some"}},
      {{"--contxt", "4096"}, {"--contxt", "did you mean --context?"}},
      {{"extra"}, {"unexpected argument \"extra\""}},
      {{"--seed", "1", "--seed", "1"}, {"--seed", "is given twice"}},
      {{"--policies", "all,hgac"}, {"--policies", "hgac", "did you mean hgca?"}},
      {{"--policies", "all", "--beta", "1"}, {"--beta", "hgca"}},
      {{"--policies", "all", "--window", "9"}, {"--window", "hgca"}},
      {{"--pruning", "3k"}, {"--pruning", "hip"}},
      {{"--passkey", "2", "--pictures", "/tmp"}, {"--pictures", "--passkey"}},
      {{"--betas", "1"}, {"--betas", "--curve"}},
      {{"--windows", "1"}, {"--windows", "--curve"}},
      {{"--numbers", "2", "--decode", "64"}, {"--decode", "--numbers"}},
      {{"--curve", text, "--policies", "all"}, {"--policies", "--curve"}},
      {{"--curve", text, "--window", "256"}, {"--window", "--curve"}},
      {{"--loss", text, "--window", "256"}, {"--window", "--loss"}},
      {{"--loss", text, "--v-type", "q4_0"}, {"--v-type", "--kv-type", "--loss"}},
      {{"--betas", "1,99999999999999999999999"}, {"--betas", "99999999999999999999999", "is not between"}},
  };
  for (const auto& bad : kBad) {
    std::vector<std::string> args = bad.args;
    args.insert(args.begin(), TANDEM_DEMO_PROGRAM);
    const CommandResult result = run_command(args);
    if (result.exit_code != bad.exit_code || !result.out.empty())
      STOP_TEST("%s: exit code %d, \"%s\"", args[1].c_str(), result.exit_code, result.out.c_str());
    for (const std::string& word : bad.named)
      if (result.err.find(word) == std::string::npos)
        STOP_TEST("%s: \"%s\" does not name %s", args[1].c_str(), result.err.c_str(), word.c_str());
  }
}

int make_folder(void**) {
  char name[] = "/tmp/tandem-demo-test-XXXXXX";
  if (mkdtemp(name) == nullptr) return -1;
  folder = name;
  return 0;
}

int remove_folder(void**) {
  std::filesystem::remove_all(folder);
  return 0;
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(facts_are_found_side_by_side),
      cmocka_unit_test(pass_keys_are_found),
      cmocka_unit_test(numbers_are_found),
      cmocka_unit_test(curve_has_its_points),
      cmocka_unit_test(a_pair_of_types_costs_little),
      cmocka_unit_test(a_window_of_nothing_is_no_dense_row),
      cmocka_unit_test(a_missing_picture_is_no_part_of_the_json),
      cmocka_unit_test(bad_input_is_named),
  };
  return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
