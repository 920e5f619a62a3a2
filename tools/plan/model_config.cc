// SPDX-License-Identifier: MIT
#include "tools/plan/model_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tools {
namespace {

constexpr int64_t kMaxCount = 1 << 20;

// Returns a short text for a message, without descending into the value. dump() recurses, and a hostile file may nest deeper
// than the stack.
std::string shown(const nlohmann::json& value) {
  constexpr size_t kMaxChars = 60;
  if (value.is_structured()) return "...";
  const std::string out = value.dump();
  return out.size() <= kMaxChars ? out : out.substr(0, kMaxChars) + "...";
}

// The parser returns whole numbers that fit 64 bits as integers, and larger ones as floating point.
bool is_out_of_range(const nlohmann::json& value) {
  if (value.is_number_float()) return std::abs(value.get<double>()) > static_cast<double>(kMaxCount);
  return value.is_number_integer() && (value.get<int64_t>() < 1 || value.get<int64_t>() > kMaxCount);
}

Result read_count(const nlohmann::json& config, const std::string& path, const char* name, int64_t* to) {
  if (!config.contains(name)) return refuse("--model: %s has no %s", path.c_str(), name);
  const nlohmann::json& value = config.at(name);
  if (is_out_of_range(value))
    return refuse("--model: %s: %s = %s is out of range (1 to %lld)", path.c_str(), name, shown(value).c_str(),
                  static_cast<long long>(kMaxCount));
  if (!value.is_number_integer())
    return refuse("--model: %s: %s = %s is not a whole number", path.c_str(), name, shown(value).c_str());
  *to = value.get<int64_t>();
  return {};
}

}  // namespace

Result read_model_config(const std::string& model_dir, PlanOptions* options) {
  const std::string path = model_dir + "/config.json";
  std::error_code error;  // checked first: opening a pipe would wait for a writer, and reading a folder throws
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    return refuse("--model = %s: %s is not a regular file", model_dir.c_str(), path.c_str());
  std::ifstream file(path);
  if (!file) return refuse("--model = %s: %s cannot be read", model_dir.c_str(), path.c_str());
  const nlohmann::json config = nlohmann::json::parse(file, nullptr, false);
  if (!config.is_object()) return refuse("--model = %s: %s is not a JSON object", model_dir.c_str(), path.c_str());

  TOOL_TRY(read_count(config, path, "num_hidden_layers", &options->n_layers));
  TOOL_TRY(read_count(config, path, "num_attention_heads", &options->n_q_heads));
  options->n_kv_heads = options->n_q_heads;
  if (config.contains("num_key_value_heads") && !config.at("num_key_value_heads").is_null())
    TOOL_TRY(read_count(config, path, "num_key_value_heads", &options->n_kv_heads));
  if (options->n_q_heads % options->n_kv_heads != 0)
    return refuse("--model: %s: num_attention_heads = %lld is not a multiple of num_key_value_heads = %lld", path.c_str(),
                  static_cast<long long>(options->n_q_heads), static_cast<long long>(options->n_kv_heads));
  if (config.contains("hidden_size")) TOOL_TRY(read_count(config, path, "hidden_size", &options->hidden_dim));
  if (config.contains("head_dim") && !config.at("head_dim").is_null())
    return read_count(config, path, "head_dim", &options->head_dim);
  int64_t hidden_size = 0;
  TOOL_TRY(read_count(config, path, "hidden_size", &hidden_size));
  if (hidden_size % options->n_q_heads != 0)
    return refuse("--model: %s: hidden_size = %lld is not a multiple of num_attention_heads = %lld", path.c_str(),
                  static_cast<long long>(hidden_size), static_cast<long long>(options->n_q_heads));
  options->head_dim = hidden_size / options->n_q_heads;
  return {};
}

}  // namespace tools
