// SPDX-License-Identifier: MIT
// tandem-info: its JSON parses and names the machine's parts, and its plan equals the library's.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tandem/tandem.h"
#include "tools/run_program.h"
#include "with_cmocka.h"
#include "with_flags.h"

namespace {

using Json = nlohmann::json;

Json info_json(std::vector<std::string> flags, int exit_code = 0) {
  flags.insert(flags.begin(), {TANDEM_INFO, "--json"});
  const ProgramRun run = run_program(flags);
  if (run.exit_code != exit_code) fail_test("exit code %d: %s", run.exit_code, run.err.c_str());
  const Json json = Json::parse(run.out, nullptr, false);
  if (!json.is_object()) fail_test("not JSON: %s", run.out.c_str());
  return json;
}

void names_what_is_there(void**) {
  const Json info = info_json({});
  char version[32];
  std::snprintf(version, sizeof version, "%d.%d.%d", TANDEM_VERSION_MAJOR, TANDEM_VERSION_MINOR, TANDEM_VERSION_PATCH);
  assert_string_equal(info["versions"]["tandem"].get<std::string>().c_str(), version);
  for (const char* name : {"compiler", "highway", "onednn", "hwloc_api", "abi_fingerprint"})
    assert_true(info["versions"].at(name).is_string());
  const std::string chosen = info["isa"]["chosen"];
  assert_true(tandem_cpu_isa_available(chosen.c_str()));
  size_t n_names = 0;
  for (; tandem_cpu_isa_name(static_cast<int32_t>(n_names)); ++n_names) {
  }
  assert_int_equal(info["isa"]["available"].size() + info["isa"]["not_on_this_processor"].size(), n_names);
  for (const Json& name : info["isa"]["available"]) assert_true(tandem_cpu_isa_available(name.get<std::string>().c_str()));
  for (const Json& name : info["isa"]["not_on_this_processor"])
    assert_false(tandem_cpu_isa_available(name.get<std::string>().c_str()));
  assert_true(info["policies"] == Json({"all", "streaming", "hgca", "hip", "patterns"}));
  assert_true(info["engine"].is_object() && info["engine"].contains("backends"));
  assert_false(info.contains("plan"));
}

// OpenMP binds the calling thread before tandem-info reads its CPUs.
void openmp_settings_take_no_workers(void**) {
  const Json::json_pointer n_cpus("/engine/cpu/pool/allowed_cpus");
  const auto cpus = [&](const std::vector<std::string>& environment) {
    const ProgramRun run = run_program({TANDEM_INFO, "--json"}, environment);
    const Json json = Json::parse(run.out, nullptr, false);
    if (run.exit_code != 0 || !json.contains(n_cpus)) fail_test("%s %s", run.out.c_str(), run.err.c_str());
    return json[n_cpus].get<std::string>();
  };
  const std::string plain = cpus({});
  for (const char* setting : {"OMP_PROC_BIND=true", "OMP_PROC_BIND=close", "OMP_PLACES=cores"})
    assert_string_equal(cpus({setting}).c_str(), plain.c_str());
}

void flags_reach_the_engine(void**) {
  const Json info = info_json({"--threads", "1"});
  assert_true(info["engine"].dump().find("\"n_workers\":1,") != std::string::npos);
  const std::string last = info["isa"]["available"].back();
  assert_string_equal(info_json({"--isa", last})["isa"]["chosen"].get<std::string>().c_str(), last.c_str());
}

// A relative path works on the command line, although the library only takes absolute paths.
void devices_of_a_backend(void**) {
  const std::filesystem::path module = STAND_IN_MODULE;
  for (const std::string& path : {module.string(), std::filesystem::relative(module).string(), std::string()}) {
    std::vector<std::string> flags = {"--backend", "standin", "--backend-path", path};
    const std::string folder = path.empty() ? module.parent_path().string() : "/no/such/folder";
    const std::vector<std::string> environment = {"TANDEM_BACKEND_PATH=" + folder};
    if (path.empty()) flags.resize(2);
    flags.insert(flags.begin(), TANDEM_INFO);
    const ProgramRun text = run_program(flags, environment);
    assert_true(text.out.find("name Stand-in \"1\"") != std::string::npos);
    flags.push_back("--json");
    const ProgramRun run = run_program(flags, environment);
    const Json json = Json::parse(run.out, nullptr, false);
    if (run.exit_code != 0 || !json.is_object()) fail_test("%s %s", run.out.c_str(), run.err.c_str());
    assert_int_equal(json["engine"]["devices"].size(), 2);
    assert_true(json["engine"]["devices"][0]["state"] == "open");
    assert_true(json["engine"]["backends"][1]["name"] == "standin");
  }
}

// If a backend fails, everything else is printed. The reason of the failure is in the list of backends and in one line on
// stderr.
void backends_that_do_not_work_are_told(void**) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> kFailing = {
      {{"--backend", "no/name"}, "backend = \"no/name\""},
      {{"--backend", "abacus"}, "/libtandem-abacus.so: No such file or directory; "},
      {{"--backend", "abacus", "--backend-path", "/no/such/file"}, "/no/such/file: No such file or directory"},
      {{"--backend", "cuda", "--backend-path", "/no/such/file", "--plan"}, "/no/such/file: No such file or directory"}};
  for (const auto& [flags, reason] : kFailing) {
    std::vector<std::string> arguments = {TANDEM_INFO};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const ProgramRun text = run_program(arguments);
    if (text.exit_code != 1 || text.err.rfind("tandem-info: ", 0) != 0 || text.err.find(reason) == std::string::npos ||
        text.err.find('\n') != text.err.size() - 1)
      fail_test("exit code %d, stderr \"%s\"", text.exit_code, text.err.c_str());
    for (const std::string& part : {std::string("\nisa\n"), std::string("n_workers"), std::string("state failed"), reason})
      if (text.out.find(part) == std::string::npos) fail_test("%s is not in %s", part.c_str(), text.out.c_str());
    const Json info = info_json(flags, 1);
    size_t n_found = 0;
    for (const Json& backend : info["engine"]["backends"]) {
      if (backend["name"] != flags[1]) continue;
      ++n_found;
      assert_true(backend["state"] == "failed" && backend["reason"].get<std::string>().find(reason) != std::string::npos);
    }
    assert_int_equal(n_found, 1);
    assert_false(info.contains("plan"));
  }
}

tandem_memory_plan library_plan(int64_t kv_len, int64_t n_sequences, int64_t host_cap_bytes, int32_t* status) {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  assert_int_equal(tandem_engine_create(&engine, nullptr, nullptr), TANDEM_OK);
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = 12;
  layer.n_kv_heads = 4;
  layer.k_head_dim = 64;
  layer.v_head_dim = 128;
  const std::vector<tandem_layer_options> layers(5, layer);
  assert_int_equal(tandem_model_create(&model, layers.data(), 5, nullptr), TANDEM_OK);
  tandem_cache_options cache = TANDEM_CACHE_OPTIONS_INIT;
  cache.k_type = TANDEM_F16;
  cache.page_tokens = 64;
  cache.host_cap_bytes = host_cap_bytes;
  tandem_session_options session = TANDEM_SESSION_OPTIONS_INIT;
  session.policy = "hgca";
  session.window_tokens = 300;
  session.sink_tokens = 10;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const std::vector<int64_t> kv_lens(static_cast<size_t>(n_sequences), kv_len);
  *status = tandem_plan_memory(&plan, engine, model, &cache, &session, kv_lens.data(), n_sequences, nullptr);
  tandem_model_release(model);
  tandem_engine_release(engine);
  return plan;
}

const std::vector<std::string> kPlanFlags = {
    "--plan", "--layers",  "5",   "--q-heads",     "12",          "--kv-heads", "4",    "--head-dim", "64",  "--v-head-dim",
    "128",    "--kv-type", "f16", "--page-tokens", "64",          "--policy",   "hgca", "--window",   "300", "--sinks",
    "10",     "--batch",   "3",   "--kv-len",      "0,1,300,5000"};

void plan_is_the_librarys(void**) {
  const Json lengths = info_json(kPlanFlags)["plan"]["lengths"];
  const int64_t kv_lens[] = {0, 1, 300, 5000};
  assert_int_equal(lengths.size(), 4);
  for (size_t i = 0; i < 4; ++i) {
    int32_t status = 0;
    const tandem_memory_plan plan = library_plan(kv_lens[i], 3, 0, &status);
    assert_int_equal(status, TANDEM_OK);
    assert_true(lengths[i]["fits"].get<bool>());
    assert_int_equal(lengths[i]["kv_len"].get<int64_t>(), kv_lens[i]);
    const Json& printed = lengths[i]["plan"];
    assert_int_equal(printed["host_kv_bytes"].get<int64_t>(), plan.host_kv_bytes);
    assert_int_equal(printed["host_session_bytes"].get<int64_t>(), plan.host_session_bytes);
    assert_int_equal(printed["selection_max_bytes"].get<int64_t>(), plan.selection_max_bytes);
    assert_int_equal(printed["device_window_bytes"].get<int64_t>(), plan.device_window_bytes);
    assert_int_equal(printed["device_work_bytes"].get<int64_t>(), plan.device_work_bytes);
    assert_int_equal(printed["kv_token_bytes"].get<int64_t>(), 5 * 4 * (64 + 128) * 2);
  }
}

// With a backend: the route for each length, or the reason why it is unknown.
void routes_of_a_backend(void**) {
  std::vector<std::string> flags = kPlanFlags;
  const auto sinks = std::find(flags.begin(), flags.end(), "--sinks");
  flags.erase(sinks, sinks + 2);  // policy "all" has no sinks
  flags = with_flags(flags, {"--policy", "all", "--window", "300", "--kv-len", "100,50000", "--backend", "standin",
                             "--backend-path", STAND_IN_MODULE});
  const Json lengths = info_json(flags)["plan"]["lengths"];
  for (const Json& length : lengths) {
    const Json& routes = length["routes"];
    const int64_t outside = routes["host_tokens"].get<int64_t>() + routes["stream_tokens"].get<int64_t>();
    assert_int_equal(outside + routes["resident_tokens"].get<int64_t>(), 3 * length["kv_len"].get<int64_t>());
    assert_true((outside > 0) == (length["kv_len"].get<int64_t>() > 300));
    assert_true((routes["total_ns"].get<int64_t>() > 0) == (outside > 0));
  }
  flags.insert(flags.begin(), TANDEM_INFO);
  assert_true(run_program(flags).out.find("50000 tokens: a layer's decode") != std::string::npos);
  flags = with_flags(flags, {"--policy", "hgca"});
  assert_true(run_program(flags).out.find("tandem_plan: session: policy \"hgca\"") != std::string::npos);
  assert_false(info_json(kPlanFlags)["plan"]["lengths"][0].contains("routes"));
}

// Codes and scales: 64 + 2 * 2 bytes for a key of 64, 64 + 2 * 4 for a value of 128.
void values_have_a_type_of_their_own(void**) {
  std::vector<std::string> flags = kPlanFlags;
  flags = with_flags(flags, {"--kv-type", "q8_0", "--v-type", "q4_0"});
  const Json plan = info_json(flags)["plan"];
  assert_true(plan["kv_type"] == "q8_0" && plan["v_type"] == "q4_0");
  assert_int_equal(plan["lengths"][0]["plan"]["kv_token_bytes"].get<int64_t>(), 5 * 4 * (68 + 72));
  flags.insert(flags.begin(), TANDEM_INFO);
  assert_true(run_program(flags).out.find("K q8_0, V q4_0") != std::string::npos);
  assert_true(info_json(kPlanFlags)["plan"]["v_type"] == "f16");
}

// MLA: V is part of K.
void aliased_values_take_nothing(void**) {
  std::vector<std::string> flags = kPlanFlags;
  flags = with_flags(flags, {"--head-dim", "576", "--v-head-dim", "512", "--v-aliases-k"});
  const Json lengths = info_json(flags)["plan"]["lengths"];
  assert_int_equal(lengths[0]["plan"]["kv_token_bytes"].get<int64_t>(), 5 * 4 * 576 * 2);
}

// Above the cap the plan is still printed, with the reason. The exit code reports the failure.
void caps_are_judged(void**) {
  std::vector<std::string> flags = kPlanFlags;
  flags = with_flags(flags, {"--host-cap-gib", "0.05"});
  const int64_t cap_bytes = INT64_C(53687091);
  int32_t status = 0;
  library_plan(5000, 3, cap_bytes, &status);
  assert_int_equal(status, TANDEM_ERROR_CAPACITY);
  const Json lengths = info_json(flags, 1)["plan"]["lengths"];
  assert_true(lengths[1]["fits"].get<bool>());
  assert_false(lengths[3]["fits"].get<bool>());
  assert_true(lengths[3]["reason"].get<std::string>().find("host_cap_bytes") != std::string::npos);
  assert_int_equal(lengths[3]["plan"]["host_kv_bytes"].get<int64_t>(), library_plan(5000, 3, 0, &status).host_kv_bytes);

  flags.insert(flags.begin(), TANDEM_INFO);
  const ProgramRun run = run_program(flags);
  assert_int_equal(run.exit_code, 1);
  assert_true(run.out.find("| host ") != std::string::npos);
  assert_true(run.out.find("host_cap_bytes") != std::string::npos);
}

void geometry_from_a_config(void**) {
  const std::string folder = TANDEM_TEST_FOLDER;
  std::ofstream(folder + "/config.json")
      << R"({"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64})";
  Json plan = info_json({"--plan", "--model", folder, "--kv-len", "128"})["plan"];
  assert_int_equal(plan["layers"].get<int64_t>(), 6);
  assert_int_equal(plan["lengths"][0]["plan"]["kv_token_bytes"].get<int64_t>(), 6 * 2 * 2 * 64 * 2);
  std::ofstream(folder + "/config.json")
      << R"({"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 512, "head_dim": null})";
  plan = info_json({"--plan", "--model", folder, "--kv-len", "128"})["plan"];
  assert_int_equal(plan["kv_heads"].get<int64_t>(), 4);
  assert_int_equal(plan["head_dim"].get<int64_t>(), 128);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(names_what_is_there),
      cmocka_unit_test(openmp_settings_take_no_workers),
      cmocka_unit_test(flags_reach_the_engine),
      cmocka_unit_test(devices_of_a_backend),
      cmocka_unit_test(plan_is_the_librarys),
      cmocka_unit_test(values_have_a_type_of_their_own),
      cmocka_unit_test(aliased_values_take_nothing),
      cmocka_unit_test(caps_are_judged),
      cmocka_unit_test(geometry_from_a_config),
      cmocka_unit_test(routes_of_a_backend),
      cmocka_unit_test(backends_that_do_not_work_are_told),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
