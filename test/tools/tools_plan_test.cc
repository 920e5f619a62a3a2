// SPDX-License-Identifier: MIT
// tandem-plan prints the results of tandem_plan_memory() and tandem_plan() for the same model, cache and session.

#include <fstream>
#include <nlohmann/json.hpp>

#include "tandem/tandem.h"
#include "tools/run_program.h"
#include "with_cmocka.h"
#include "with_flags.h"

namespace {

using Json = nlohmann::json;

constexpr int64_t kKvLen = 50000, kBatch = 2;

// With a window if the policy or a device has one, and without sinks.
std::vector<std::string> plan_command(const std::vector<std::string>& flags) {
  std::vector<std::string> command = {TANDEM_PLAN, "--layers",   "3",  "--q-heads", "8",    "--kv-heads",
                                      "4",         "--head-dim", "64", "--kv-type", "f16",  "--v-type",
                                      "q8_0",      "--batch",    "2",  "--kv-len",  "50000"};
  const auto has = [&](const char* word) { return std::find(flags.begin(), flags.end(), word) != flags.end(); };
  if (has("hgca") || has("--backend")) command.insert(command.end(), {"--window", "512"});
  if (has("hgca")) command.insert(command.end(), {"--sinks", "0"});
  return with_flags(command, flags);
}

Json plan_json(std::vector<std::string> flags, int exit_code = 0) {
  flags.push_back("--json");
  const ProgramRun run = run_program(plan_command(flags));
  const Json json = Json::parse(run.out, nullptr, false);
  if (run.exit_code != exit_code || !json.is_object())
    fail_test("exit code %d: %s%s", run.exit_code, run.out.c_str(), run.err.c_str());
  return json;
}

// Computes the same by calls into the library. The caller sets the session's options.
struct Library {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;

  Library(bool with_device, int32_t x_type) {
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    if (with_device) {
      options.backend = "standin";
      options.backend_path = STAND_IN_MODULE;
    }
    assert_int_equal(tandem_engine_create(&engine, &options, nullptr), TANDEM_OK);
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = 8;
    layer.n_kv_heads = 4;
    layer.k_head_dim = 64;
    tandem_layer_projection projection = TANDEM_LAYER_PROJECTION_INIT;
    projection.hidden_dim = 8 * 64;
    projection.w_type = TANDEM_BF16;
    if (x_type != 0) layer.projection = &projection;
    const std::vector<tandem_layer_options> layers(3, layer);
    assert_int_equal(tandem_model_create(&model, layers.data(), 3, nullptr), TANDEM_OK);
    cache.k_type = TANDEM_F16;
    cache.v_type = TANDEM_Q8_0;
    cache.x_type = x_type;
    session.window_tokens = 512;
    session.sink_tokens = 0;
  }
  ~Library() {
    tandem_model_release(model);
    tandem_engine_release(engine);
  }

  tandem_memory_plan plan() const {
    const std::vector<int64_t> kv_lens(kBatch, kKvLen);
    tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
    assert_int_equal(tandem_plan_memory(&plan, engine, model, &cache, &session, kv_lens.data(), kBatch, nullptr), TANDEM_OK);
    return plan;
  }
};

void expect_plan(const Json& json, const tandem_memory_plan& plan) {
  const Json& printed = json["lengths"][0]["plan"];
  assert_int_equal(json["lengths"][0]["kv_len"].get<int64_t>(), kKvLen);
  const std::pair<const char*, int64_t> kMembers[] = {{"host_kv_bytes", plan.host_kv_bytes},
                                                      {"host_session_bytes", plan.host_session_bytes},
                                                      {"selection_max_bytes", plan.selection_max_bytes},
                                                      {"device_window_bytes", plan.device_window_bytes},
                                                      {"device_work_bytes", plan.device_work_bytes},
                                                      {"device_stream_bytes", plan.device_stream_bytes},
                                                      {"device_weights_bytes", plan.device_weights_bytes},
                                                      {"shared_bytes", plan.shared_bytes},
                                                      {"kv_token_bytes", plan.kv_token_bytes},
                                                      {"x_token_bytes", plan.x_token_bytes},
                                                      {"device_window_max_bytes", plan.device_window_max_bytes},
                                                      {"judged_kv_bytes", plan.judged_kv_bytes},
                                                      {"judged_first_bytes", plan.judged_first_bytes},
                                                      {"judged_max_bytes", plan.judged_max_bytes}};
  for (const auto& [name, bytes] : kMembers)
    if (printed[name].get<int64_t>() != bytes)
      fail_test("%s: %s, not %lld", name, printed[name].dump().c_str(), static_cast<long long>(bytes));
}

const std::vector<std::string> kDevice = {"--backend", "standin", "--backend-path", STAND_IN_MODULE};

std::vector<std::string> on_device(std::vector<std::string> flags) {
  flags.insert(flags.end(), kDevice.begin(), kDevice.end());
  return flags;
}

void memory_is_the_librarys(void**) {
  Library host(false, 0);
  expect_plan(plan_json({}), host.plan());
  host.session.policy = "hgca";
  const Json hgca = plan_json({"--policy", "hgca"});
  expect_plan(hgca, host.plan());
  assert_true(host.plan().selection_max_bytes > 0);
  assert_false(hgca["lengths"][0].contains("routes"));
  assert_true(hgca["policy"] == "hgca" && hgca["kv_type"] == "f16" && hgca["v_type"] == "q8_0" && hgca["window"] == 512);

  Library device(true, 0);
  expect_plan(plan_json(on_device({})), device.plan());
  assert_true(device.plan().device_window_bytes > 0);
  device.session.route = "stream";
  device.session.append_tokens = 4096;
  expect_plan(plan_json(on_device({"--route", "stream", "--q-len", "4096"})), device.plan());
}

// The numbers of preset "3k": stage 1 looks at 191 chunks of 256 tokens, 9 keys in each, every 16 tokens. The other stages
// look at kept tokens: 1,024 chunks each, with 6 and 4 keys, every 8 and 4 tokens.
void stages_are_planned_by_length(void**) {
  constexpr int64_t kOfKey = 2 * 64 * 4 * 3 * kBatch;  // bytes, KV heads, layers, sequences
  const Json json = plan_json({"--policy", "hip", "--pruning", "3k"});
  const Json& plan = json["lengths"][0]["plan"];
  constexpr int64_t kFirst = 191 * 9, kSecond = 1024 * 6, kThird = 1024 * 4;
  assert_int_equal(plan["judged_first_bytes"].get<int64_t>(), kFirst * kOfKey / 16);
  assert_int_equal(plan["judged_kv_bytes"].get<int64_t>(),
                   kFirst * kOfKey / 16 + kSecond * kOfKey / 8 + kThird * kOfKey / 4);
  assert_int_equal(plan["judged_max_bytes"].get<int64_t>(), (kFirst + kSecond + kThird) * kOfKey);
  assert_true(json["pruning"] == "3k");
  const ProgramRun text = run_program(plan_command({"--policy", "hip"}));
  assert_true(text.out.find("| read") != std::string::npos && text.out.find("stage 1") != std::string::npos);
  assert_true(run_program(plan_command({})).out.find("| read") == std::string::npos);
  const ProgramRun refused = run_program(plan_command({"--pruning", "3k"}));
  assert_true(refused.exit_code == 2 && refused.err.find("--pruning") != std::string::npos);
}

// On a device that prunes the window has all keys, whatever --window is.
void windows_of_devices_that_prune_have_all_keys(void**) {
  Library device(true, 0);
  device.session.policy = "hip";
  device.session.window_tokens = kKvLen;
  const Json json = plan_json(on_device({"--policy", "hip"}));
  expect_plan(json, device.plan());
  assert_true(json["window"] == kKvLen && device.plan().judged_kv_bytes > 0);
}

std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = std::string(TANDEM_TEST_FOLDER) + "/" + name;
  std::ofstream(path) << text;
  return path;
}

// Three layers of eight heads. Layer 0 searches for its keys, and the last layer has only sinks and windows.
std::string heads_file() {
  std::string text = "[";
  for (int layer = 0; layer < 3; ++layer) {
    text += layer == 0 ? "{" : ", {";
    for (int head = 0; head < 8; ++head)
      text += (head == 0 ? "\"" : ", \"") + std::to_string(head) +
              "\": " + (layer == 0 ? R"(["vertical_and_slash", 30, 800])" : R"(["stream_llm", 100, 800])");
    text += "}";
  }
  return write_file("heads.json", text + "]");
}

std::vector<tandem_head_pattern> heads_of(const std::string& path, int64_t group_size) {
  tandem_pattern_file_options options = TANDEM_PATTERN_FILE_OPTIONS_INIT;
  options.group_size = group_size;
  std::vector<tandem_head_pattern> heads(3 * 8, TANDEM_HEAD_PATTERN_INIT);
  int64_t n_heads = 0, n_layers = 0;
  assert_int_equal(tandem_patterns_read(heads.data(), 24, &n_heads, &n_layers, path.c_str(), &options, nullptr), TANDEM_OK);
  assert_int_equal(n_heads, 24);
  return heads;
}

// On a device, keys that a layer's window lacks take memory of their own.
void patterns_are_those_of_the_file(void**) {
  const std::string path = heads_file();
  for (const bool with_device : {false, true}) {
    const auto flags = [&](std::vector<std::string> own) { return with_device ? on_device(std::move(own)) : own; };
    Library library(with_device, 0);
    library.session.append_tokens = 4096;
    const std::vector<tandem_head_pattern> heads = heads_of(path, 2);
    tandem_patterns patterns = TANDEM_PATTERNS_INIT;
    patterns.heads = heads.data();
    patterns.n_heads = 24;
    library.session.policy = "patterns";
    library.session.patterns = &patterns;
    const Json json = plan_json(flags({"--policy", "patterns", "--patterns", path, "--q-len", "4096"}));
    expect_plan(json, library.plan());
    assert_true(json["policy"] == "patterns" && json["patterns"] == path);
    if (with_device) assert_true(json["window"] == 512);
    assert_int_equal(library.plan().device_stream_bytes > 0, with_device);
  }
}

// A gate belongs to a KV head, so a line of four gates is a layer of eight query heads.
void gates_are_of_kv_heads(void**) {
  const std::string path = write_file("gates.tsv", "1 0 0 1\n0 1 0 1\n0 0 0 1\n");
  assert_true(plan_json({"--policy", "patterns", "--patterns", path})["patterns"] == path);
  const std::string eight = write_file("eight.tsv", "1 0 0 1 1 0 0 1\n0 1 0 1 1 0 0 1\n0 0 0 1 1 0 0 1\n");
  const ProgramRun refused = run_program(plan_command({"--policy", "patterns", "--patterns", eight}));
  assert_int_equal(refused.exit_code, 1);
  assert_true(refused.err.find("eight.tsv has 3 layers of 16 query heads, the model has 3 layers of 8\n") !=
              std::string::npos);
}

void slips_of_patterns_are_named(void**) {
  const std::string two = write_file("two.json", R"([{"0": ["full"], "1": ["full"]}, {"0": ["full"], "1": ["full"]}])");
  const std::string wrong = write_file("wrong.json", R"([{"0": ["stripes", 1, 2]}])");
  const struct {
    std::vector<std::string> flags;
    int exit_code;
    const char* in_err;
  } kSlips[] = {
      {{"--policy", "patterns"}, 2, "--policy = patterns: --patterns FILE is missing"},
      {{"--patterns", two}, 2, "--patterns is for --policy patterns alone"},
      {{"--policy", "hip", "--patterns", two}, 2, "--patterns is for --policy patterns alone"},
      {{"--policy", "patterns", "--patterns", "/nonexistent"}, 1, "path = /nonexistent: "},
      {{"--policy", "patterns", "--patterns", wrong}, 1, "wrong.json: layer 0: head 0: kind \"stripes\""},
      {{"--policy", "patterns", "--patterns", two},
       1,
       "two.json has 2 layers of 2 query heads, the model has 3 layers of 8\n"},
  };
  for (const auto& slip : kSlips) {
    const ProgramRun run = run_program(plan_command(slip.flags));
    if (run.exit_code != slip.exit_code || run.err.find(slip.in_err) == std::string::npos || !run.out.empty())
      fail_test("exit code %d, not %d, \"%s\": %s", run.exit_code, slip.exit_code, slip.in_err, run.err.c_str());
  }
}

// Every token is counted once. The requested route has the tokens outside the windows.
void routes_are_the_librarys(void**) {
  const auto routes = [&](const std::vector<std::string>& flags) {
    const Json json = plan_json(on_device(flags))["lengths"][0]["routes"];
    const int64_t resident = json["resident_tokens"].get<int64_t>();
    assert_true(resident >= kBatch * 512 && resident < kBatch * (512 + 64));
    assert_int_equal(resident + json["host_tokens"].get<int64_t>() + json["stream_tokens"].get<int64_t>(), kBatch * kKvLen);
    return json;
  };
  const Json host = routes({"--route", "host"});
  assert_int_equal(host["stream_tokens"].get<int64_t>(), 0);
  const Json stream = routes({"--route", "stream"});
  assert_int_equal(stream["host_tokens"].get<int64_t>(), 0);
  assert_true(stream["bus_ns"].get<int64_t>() > 0);
  const Json both = routes({"--route", "host+stream", "--stream-share", "0.5"});
  const int64_t third = stream["stream_tokens"].get<int64_t>() / 3;
  assert_true(both["stream_tokens"].get<int64_t>() > third && both["host_tokens"].get<int64_t>() > third);

  const ProgramRun text = run_program(plan_command(on_device({"--route", "stream"})));
  assert_int_equal(text.exit_code, 0);
  assert_true(text.out.find("50000 tokens: a layer's decode") != std::string::npos);
  const ProgramRun append = run_program(plan_command(on_device({"--route", "stream", "--q-len", "700"})));
  assert_true(append.out.find("50000 tokens: a layer's append") != std::string::npos);
  const ProgramRun host_alone = run_program(plan_command({}));
  assert_true(host_alone.out.find("--backend cuda") != std::string::npos);
  assert_true(host_alone.out.find("| device") == std::string::npos && text.out.find("| device") != std::string::npos);
}

void hidden_states_are_planned(void**) {
  Library device(true, TANDEM_F16);
  const Json kept = plan_json(on_device({"--x-type", "f16"}));
  expect_plan(kept, device.plan());
  assert_int_equal(kept["lengths"][0]["plan"]["x_token_bytes"].get<int64_t>(), 3 * 8 * 64 * 2);

  device.session.route = "recompute";
  const Json recompute = plan_json(on_device({"--x-type", "f16", "--route", "recompute"}));
  expect_plan(recompute, device.plan());
  assert_true(recompute["lengths"][0]["routes"]["reason"].get<std::string>().find("w_k") != std::string::npos);
}

void device_caps_are_judged(void**) {
  const Json json = plan_json(on_device({"--device-cap-gib", "0.0001"}), 1);
  assert_false(json["lengths"][0]["fits"].get<bool>());
  assert_true(json["lengths"][0]["reason"].get<std::string>().find("device_cap_bytes") != std::string::npos);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(memory_is_the_librarys),
      cmocka_unit_test(stages_are_planned_by_length),
      cmocka_unit_test(windows_of_devices_that_prune_have_all_keys),
      cmocka_unit_test(patterns_are_those_of_the_file),
      cmocka_unit_test(gates_are_of_kv_heads),
      cmocka_unit_test(slips_of_patterns_are_named),
      cmocka_unit_test(routes_are_the_librarys),
      cmocka_unit_test(hidden_states_are_planned),
      cmocka_unit_test(device_caps_are_judged),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
