// SPDX-License-Identifier: MIT
// Model files from an attacker or a broken download. Each must be refused by a message that names file and field, and none
// may be read out of bounds (the sanitizer build runs this test as well).
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "llama_config.h"
#include "runtime.h"
#include "safetensors.h"
#include "stop_test.h"
#include "text_file.h"

namespace {

using namespace generate;
using Json = nlohmann::ordered_json;

const std::string kModel = TANDEM_EXAMPLES_DIRECTORY "/models/pico";
std::string folder;

void write_file(const std::string& name, const std::string& bytes) {
  std::ofstream(folder + "/" + name, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string read_file(const std::string& path) {
  std::string text;
  if (Failure failure = read_text_file(path, &text)) STOP_TEST("%s", failure.message.c_str());
  return text;
}

std::string with_length(const std::string& header, const std::string& data) {
  const uint64_t n = header.size();
  std::string out(8, 0);
  std::memcpy(out.data(), &n, 8);
  return out + header + data;
}

void expect_refusal(const Failure& failure, const char* what, const std::vector<std::string>& named) {
  if (!failure) STOP_TEST("%s: was accepted", what);
  for (const std::string& word : named)
    if (failure.message.find(word) == std::string::npos)
      STOP_TEST("%s: \"%s\" does not name %s", what, failure.message.c_str(), word.c_str());
}

void expect_bad_file(const char* what, const std::string& bytes, const std::vector<std::string>& named) {
  write_file("bad.safetensors", bytes);
  WeightFiles files;
  std::vector<std::string> all = named;
  all.push_back("bad.safetensors");
  expect_refusal(files.open_file(folder + "/bad.safetensors"), what, all);
}

void hostile_headers_are_refused(void**) {
  const std::string data(64, 'x');
  const auto entry = [](const char* fields) { return std::string("{\"w\":{") + fields + "}}"; };
  expect_bad_file("empty", "", {"0 bytes"});
  expect_bad_file("seven bytes", "1234567", {"7 bytes"});
  expect_bad_file("length beyond the file", std::string("\xff\0\0\0\0\0\0\0{}", 10), {"header length 255"});
  expect_bad_file("length of all ones", std::string(8, '\xff') + "{}", {"header length 18446744073709551615"});
  expect_bad_file("length 2^63", std::string("\0\0\0\0\0\0\0\x80{}", 10), {"header length 9223372036854775808"});
  expect_bad_file("no JSON", with_length("hello", data), {"header"});
  expect_bad_file("cut JSON", with_length("{\"w\":{\"dtype\":\"F32\"", data), {"header"});
  expect_bad_file("an array", with_length("[1,2]", data), {"header"});
  expect_bad_file("bad UTF-8", with_length("{\"\xff\xfe\":1}", data), {"header"});
  expect_bad_file("entry is a number", with_length("{\"w\":7}", data), {"w", "object"});
  expect_bad_file("no dtype", with_length(entry("\"shape\":[4],\"data_offsets\":[0,16]"), data), {"w", "dtype"});
  expect_bad_file("unknown dtype", with_length(entry("\"dtype\":\"F31\",\"shape\":[4],\"data_offsets\":[0,16]"), data),
                  {"F31"});
  expect_bad_file("no shape", with_length(entry("\"dtype\":\"F32\",\"data_offsets\":[0,16]"), data), {"w", "shape"});
  expect_bad_file("negative length", with_length(entry("\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]"), data),
                  {"-4"});
  expect_bad_file("fractional length", with_length(entry("\"dtype\":\"F32\",\"shape\":[4.5],\"data_offsets\":[0,16]"), data),
                  {"4.5"});
  expect_bad_file("overflowing shape",
                  with_length(entry("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), data),
                  {"too large"});
  expect_bad_file("shape that wraps to the size",
                  with_length(entry("\"dtype\":\"F32\",\"shape\":[4611686018427387908],\"data_offsets\":[0,16]"), data),
                  {"w"});
  expect_bad_file("no offsets", with_length(entry("\"dtype\":\"F32\",\"shape\":[4]"), data), {"data_offsets"});
  expect_bad_file("one offset", with_length(entry("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0]"), data),
                  {"data_offsets"});
  expect_bad_file("negative offset", with_length(entry("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[-16,0]"), data),
                  {"-16"});
  expect_bad_file("offsets beyond", with_length(entry("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[56,72]"), data),
                  {"72"});
  expect_bad_file("offsets reversed", with_length(entry("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]"), data),
                  {"16"});
  expect_bad_file("offsets that wrap",
                  with_length(entry("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[18446744073709551608,8]"), data),
                  {"w"});
  expect_bad_file("too few bytes", with_length(entry("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,8]"), data),
                  {"16 bytes"});
  expect_bad_file("deep nesting", with_length(std::string(200000, '[') + std::string(200000, ']'), data), {"header"});
  expect_bad_file("deep nesting in a shape",
                  with_length(entry(("\"dtype\":\"F32\",\"shape\":[" + std::string(200000, '[') + std::string(200000, ']') +
                                     "],\"data_offsets\":[0,16]")
                                        .c_str()),
                              data),
                  {"shape"});
}

// A header of F32 tensors: name, first byte, last byte + 1.
std::string header_of(const std::vector<std::tuple<std::string, int, int>>& tensors) {
  std::string out;
  for (const auto& [name, first, end] : tensors)
    out += (out.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string((end - first) / 4) +
           "],\"data_offsets\":[" + std::to_string(first) + "," + std::to_string(end) + "]}";
  return out + "}";
}

// Refuses the same files as the format's reference implementation: repeated keys, overlapping tensors, bytes of no tensor.
void tensors_cover_the_data_once(void**) {
  const std::string data(64, 'x');
  expect_bad_file("a name twice", with_length(header_of({{"a", 0, 32}, {"b", 32, 64}, {"a", 0, 32}}), data),
                  {"\"a\"", "twice"});
  expect_bad_file("a name twice, escaped", with_length(header_of({{"a", 0, 64}, {"\\u0061", 0, 64}}), data),
                  {"\"a\"", "twice"});
  expect_bad_file("a dtype twice",
                  with_length("{\"a\":{\"dtype\":\"F32\",\"shape\":[16],\"dtype\":\"I32\",\"data_offsets\":[0,64]}}", data),
                  {"\"dtype\"", "twice"});
  expect_bad_file("metadata twice", with_length("{\"__metadata__\":{},\"__metadata__\":{}}", ""), {"__metadata__", "twice"});
  expect_bad_file("tensors that overlap", with_length(header_of({{"b", 28, 64}, {"a", 0, 32}}), data),
                  {"\"b\"", "28 to 64", "overlaps", "\"a\"", "0 to 32"});
  expect_bad_file("the same bytes twice", with_length(header_of({{"a", 0, 64}, {"b", 0, 64}}), data), {"\"b\"", "overlaps"});
  expect_bad_file("a tensor inside another", with_length(header_of({{"a", 0, 64}, {"b", 16, 32}}), data),
                  {"\"b\"", "overlaps"});
  expect_bad_file("a hole at the start", with_length(header_of({{"a", 4, 64}}), data), {"0 to 4", "no tensor"});
  expect_bad_file("a hole", with_length(header_of({{"a", 0, 16}, {"b", 24, 64}}), data), {"16 to 24", "no tensor"});
  expect_bad_file("bytes at the end", with_length(header_of({{"a", 0, 60}}), data), {"60 to 64", "no tensor"});
  expect_bad_file("data without tensors", with_length("{\"__metadata__\":{\"a\":\"b\"}}", data), {"0 to 64", "no tensor"});
  for (const std::string& whole :
       {with_length(header_of({{"b", 32, 64}, {"a", 0, 32}}), data),
        with_length(header_of({{"d", 64, 64}, {"a", 0, 0}, {"b", 0, 64}, {"c", 64, 64}}), data),
        with_length(
            "{\"__metadata__\":{\"dtype\":\"x\"},\"dtype\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[0,64]}}",
            data),
        with_length("{}", "")}) {
    write_file("good.safetensors", whole);
    WeightFiles files;
    if (Failure failure = files.open_file(folder + "/good.safetensors")) STOP_TEST("%s", failure.message.c_str());
  }
}

// A message stays one readable line, however long the text in the file is.
void long_texts_are_cut(void**) {
  const std::string letters(100000, 'L'), accents = [] {
    std::string text;
    for (int i = 0; i < 50000; ++i) text += "é";
    return text;
  }();
  const auto expect_short = [](const std::string& header, const char* named) {
    write_file("bad.safetensors", with_length(header, std::string(64, 'x')));
    WeightFiles files;
    const Failure failure = files.open_file(folder + "/bad.safetensors");
    expect_refusal(failure, named, {"bad.safetensors", named, "…"});
    if (failure.message.size() > 500) STOP_TEST("%zu bytes: %.500s", failure.message.size(), failure.message.c_str());
    if (Json::parse(Json(failure.message).dump(-1, ' ', false, Json::error_handler_t::replace)) != Json(failure.message))
      STOP_TEST("a character was cut in two: %s", failure.message.c_str());
  };
  for (const std::string& text : {letters, accents}) {
    expect_short("{\"w\":{\"dtype\":\"" + text + "\",\"shape\":[16],\"data_offsets\":[0,64]}}", "which is unknown");
    expect_short("{\"" + text + "\":7}", "is not an object");
    expect_short(header_of({{text, 0, 64}, {text, 0, 64}}), "twice");
    expect_short(header_of({{text, 0, 64}, {text + "x", 0, 64}}), "overlaps");
    expect_short("{\"w\":{\"dtype\":\"F32\",\"shape\":[\"" + text + "\"],\"data_offsets\":[0,64]}}", "lengths");
  }
  expect_short(
      "{\"w\":{\"dtype\":\"F32\",\"shape\":[-1,9999999999,9999999999,9999999999,9999999999,9999999999,9999999999],"
      "\"data_offsets\":[0,64]}}",
      "lengths");
}

void other_kinds_of_files_are_refused(void**) {
  WeightFiles files;
  expect_refusal(files.open_file(folder), "a folder", {folder, "regular"});
  assert_int_equal(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  alarm(60);
  expect_refusal(files.open_file(folder + "/pipe"), "a pipe", {folder, "regular"});
  alarm(0);
  expect_refusal(files.open_file("/dev/zero"), "a device", {"/dev/zero", "regular"});
  expect_refusal(files.open_file(folder + "/absent"), "an absent file", {"absent"});
}

// Opens a copy of pico with single changes.
Failure open_model() {
  Runtime runtime;
  EngineOptions options;
  options.model_directory = folder;
  options.n_threads = 1;
  return runtime.open(options);
}

void restore_model() {
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::remove(folder + "/" + name);
    std::filesystem::create_symlink(kModel + "/" + name, folder + "/" + name);
  }
}

void expect_bad_config(const char* field, const Json& value, const std::vector<std::string>& named) {
  Json config = Json::parse(read_file(kModel + "/config.json"));
  if (value.is_discarded())
    config.erase(field);
  else
    config[field] = value;
  std::filesystem::remove(folder + "/config.json");
  write_file("config.json", config.dump());
  expect_refusal(open_model(), field, named);
}

void bad_configurations_are_refused(void**) {
  const Json absent = Json(Json::value_t::discarded);
  restore_model();
  if (Failure failure = open_model()) STOP_TEST("%s", failure.message.c_str());
  for (const char* field : {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    expect_bad_config(field, absent, {"config.json", field, "missing"});
    expect_bad_config(field, "384", {"config.json", field, "384"});
    expect_bad_config(field, 0, {"config.json", field, "0"});
    expect_bad_config(field, -6, {"config.json", field, "-6"});
    expect_bad_config(field, 1.5, {"config.json", field, "1.5"});
    expect_bad_config(field, UINT64_MAX, {"config.json", field});
    expect_bad_config(field, int64_t{1} << 40, {"config.json", field});
  }
  expect_bad_config("model_type", "mamba", {"model_type", "mamba"});
  expect_bad_config("model_type", absent, {"model_type"});
  expect_bad_config("hidden_act", "gelu", {"hidden_act", "gelu"});
  expect_bad_config("vocab_size", 32000, {"vocab_size", "32000", "tokenizer"});
  expect_bad_config("num_key_value_heads", 4, {"num_key_value_heads", "4"});
  expect_bad_config("head_dim", 63, {"head_dim", "63"});
  expect_bad_config("rms_norm_eps", -1e-5, {"rms_norm_eps"});
  expect_bad_config("rope_theta", 0, {"rope_theta"});
  expect_bad_config("rope_theta", "big", {"rope_theta", "big"});
  expect_bad_config("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}, {"rope_scaling", "yarn"});
  expect_bad_config("rope_scaling", {{"type", "linear"}, {"factor", 2}}, {"rope_scaling", "type", "linear"});
  expect_bad_config("rope_scaling", {{"rope_type", "default"}, {"type", "dynamic"}}, {"rope_scaling", "type", "dynamic"});
  expect_bad_config("rope_scaling", {{"factor", 2}}, {"rope_scaling", "factor", "2"});
  expect_bad_config("rope_parameters", {{"type", "llama3"}, {"rope_theta", 1e5}}, {"rope_parameters", "llama3"});
  expect_bad_config("rope_parameters", {{"partial_rotary_factor", 0.25}},
                    {"rope_parameters", "partial_rotary_factor", "0.25"});
  expect_bad_config("partial_rotary_factor", 0.5, {"config.json", "partial_rotary_factor", "0.5"});
  expect_bad_config("partial_rotary_factor", "half", {"partial_rotary_factor", "half"});
  expect_bad_config("max_position_embeddings", 0, {"max_position_embeddings", "0", "out of range"});
  expect_bad_config("max_position_embeddings", "long", {"max_position_embeddings", "long"});
  expect_bad_config("hidden_size", 1e20, {"hidden_size", "out of range"});
  expect_bad_config("rope_scaling", 3, {"rope_scaling", "3"});
  expect_bad_config("tie_word_embeddings", "yes", {"tie_word_embeddings", "yes"});
  expect_bad_config("tie_word_embeddings", false, {"lm_head.weight", "missing"});
  expect_bad_config("hidden_size", 400, {"model.safetensors", "[256, 384]", "[256, 400]"});
  expect_bad_config("num_hidden_layers", 7, {"model.layers.6", "missing"});
  expect_bad_config("num_hidden_layers", 5, {"model.layers.5", "not part"});
  write_file("config.json", "{");
  expect_refusal(open_model(), "cut config", {"config.json"});
  write_file("config.json", "{\"model_type\":" + std::string(200000, '[') + std::string(200000, ']') + "}");
  expect_refusal(open_model(), "deep config", {"config.json", "model_type"});
}

// Opening a pipe waits forever for a writer. The alarm ends a test that does so.
void pipes_are_refused(void**) {
  alarm(60);
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
    restore_model();
    if (std::string(name) == "model.safetensors.index.json") std::filesystem::remove(folder + "/model.safetensors");
    std::filesystem::remove(folder + "/" + name);
    assert_int_equal(mkfifo((folder + "/" + name).c_str(), 0600), 0);
    expect_refusal(open_model(), name, {name, "regular"});
    std::filesystem::remove(folder + "/" + name);
  }
  alarm(0);
}

// Settings without effect are accepted.
void plain_rotations_are_accepted(void**) {
  for (const Json& rope : {Json{{"rope_type", "default"}}, Json{{"type", "default"}, {"factor", nullptr}},
                           Json{{"partial_rotary_factor", 1.0}, {"rope_theta", 1e5}}}) {
    Json config = Json::parse(read_file(kModel + "/config.json"));
    config["rope_scaling"] = rope;
    config["partial_rotary_factor"] = 1;
    config["max_position_embeddings"] = nullptr;
    restore_model();
    std::filesystem::remove(folder + "/config.json");
    write_file("config.json", config.dump());
    if (Failure failure = open_model()) STOP_TEST("%s", failure.message.c_str());
    assert_false(static_cast<bool>(check_length(folder, "--context", int64_t{1} << 40)));
  }
}

// The length in config.json is the largest length that is accepted.
void lengths_beyond_the_models_are_refused(void**) {
  restore_model();
  assert_false(static_cast<bool>(check_length(folder, "--context", 16384)));
  expect_refusal(check_length(folder, "--context: \"16385\"", 16385), "a token too many",
                 {"--context", "16385", "max_position_embeddings", "16384", "config.json"});
}

// Truncates the file in steps, and right after the header, like a broken download.
void truncated_weights_are_refused(void**) {
  restore_model();
  const std::string whole = read_file(kModel + "/model.safetensors");
  std::filesystem::remove(folder + "/model.safetensors");
  std::vector<size_t> lengths = {0, 1, 8, 9, 4096, 6040, 6041, whole.size() - 1};
  for (size_t n = 1; n < 8; ++n) lengths.push_back(whole.size() * n / 8);
  for (const size_t n : lengths) {
    write_file("model.safetensors", whole.substr(0, n));
    expect_refusal(open_model(), ("cut at " + std::to_string(n)).c_str(), {"model.safetensors"});
  }
}

// The same weights as f16 or f32, in two files with an index, give the logits of the single file. A wrong index is refused.
void shards_are_read(void**) {
  restore_model();
  WeightFiles pico;
  assert_false(static_cast<bool>(pico.open_directory(kModel)));
  std::filesystem::remove(folder + "/model.safetensors");
  const std::string whole = read_file(kModel + "/model.safetensors");
  uint64_t n_header = 0;
  std::memcpy(&n_header, whole.data(), 8);
  const Json header = Json::parse(whole.substr(8, n_header));
  std::string data[2];
  Json headers[2], map;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    std::vector<float> values;
    assert_false(static_cast<bool>(pico.read_f32(name, entry["shape"].get<std::vector<int64_t>>(), &values)));
    const int shard = name.find("mlp") != std::string::npos;
    const size_t first = data[shard].size();
    data[shard].append(reinterpret_cast<const char*>(values.data()), 4 * values.size());
    headers[shard][name] = {{"dtype", "F32"}, {"shape", entry["shape"]}, {"data_offsets", {first, data[shard].size()}}};
    map[name] = "part" + std::to_string(shard) + ".safetensors";
  }
  for (int shard = 0; shard < 2; ++shard)
    write_file("part" + std::to_string(shard) + ".safetensors", with_length(headers[shard].dump(), data[shard]));
  write_file("model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  if (Failure failure = open_model()) STOP_TEST("%s", failure.message.c_str());
  WeightFiles shards;
  assert_false(static_cast<bool>(shards.open_directory(folder)));
  std::vector<float> one, other;
  assert_false(static_cast<bool>(pico.read_f32("model.layers.3.mlp.up_proj.weight", {768, 384}, &one)));
  assert_false(static_cast<bool>(shards.read_f32("model.layers.3.mlp.up_proj.weight", {768, 384}, &other)));
  assert_true(one == other);

  for (const char* name : {"../part0.safetensors", "/etc/passwd", "", "absent.safetensors"}) {
    Json lying = map;
    lying["model.norm.weight"] = name;
    write_file("model.safetensors.index.json", Json{{"weight_map", lying}}.dump());
    expect_refusal(open_model(), name, {name});
  }
  Json lying = map;
  lying["model.extra.weight"] = "part0.safetensors";
  write_file("model.safetensors.index.json", Json{{"weight_map", lying}}.dump());
  expect_refusal(open_model(), "a tensor that is not there", {"model.extra.weight", "missing"});
  write_file("model.safetensors.index.json", "{\"weight_map\":[]}");
  expect_refusal(open_model(), "no map", {"weight_map"});
  std::filesystem::remove(folder + "/model.safetensors.index.json");
}

// f16 is read by its definition: sign, exponent, fraction, with subnormals, infinities and NaN.
void half_precision_is_read(void**) {
  const uint16_t bits[] = {0x0000, 0x8000, 0x0001, 0x03ff, 0x0400, 0x3c00, 0xc000, 0x7bff, 0x7c00, 0xfc00, 0x3555};
  const float values[] = {0.0f,  -0.0f,    0x1p-24f, 1023 * 0x1p-24f, 0x1p-14f,       1.0f,
                          -2.0f, 65504.0f, INFINITY, -INFINITY,       0.333251953125f};
  write_file("half.safetensors", with_length("{\"w\":{\"dtype\":\"F16\",\"shape\":[11],\"data_offsets\":[0,22]}}",
                                             std::string(reinterpret_cast<const char*>(bits), 22)));
  WeightFiles files;
  std::vector<float> read;
  assert_false(static_cast<bool>(files.open_file(folder + "/half.safetensors")));
  assert_false(static_cast<bool>(files.read_f32("w", {11}, &read)));
  assert_memory_equal(read.data(), values, sizeof values);
  expect_refusal(files.read_f32("w", {12}, &read), "another shape", {"half.safetensors", "w", "[11]", "[12]"});
  expect_refusal(files.read_f32("x", {11}, &read), "another name", {"half.safetensors", "x", "missing"});
}

int make_folder(void**) {
  char name[] = "/tmp/tandem-files-test-XXXXXX";
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
      cmocka_unit_test(hostile_headers_are_refused),
      cmocka_unit_test(tensors_cover_the_data_once),
      cmocka_unit_test(long_texts_are_cut),
      cmocka_unit_test(other_kinds_of_files_are_refused),
      cmocka_unit_test(bad_configurations_are_refused),
      cmocka_unit_test(pipes_are_refused),
      cmocka_unit_test(plain_rotations_are_accepted),
      cmocka_unit_test(lengths_beyond_the_models_are_refused),
      cmocka_unit_test(truncated_weights_are_refused),
      cmocka_unit_test(shards_are_read),
      cmocka_unit_test(half_precision_is_read),
  };
  return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
