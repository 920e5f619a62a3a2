// SPDX-License-Identifier: MIT
#include "tools/info/model_config.h"

#include <fstream>
#include <nlohmann/json.hpp>

namespace tools {
namespace {

Result read_count(const nlohmann::json& config, const std::string& path, const char* name, int64_t* to) {
  if (!config.contains(name)) return refuse("--model: %s has no %s", path.c_str(), name);
  const nlohmann::json& value = config.at(name);
  if (!value.is_number_integer() || value.get<int64_t>() < 1 || value.get<int64_t>() > 1 << 20)
    return refuse("--model: %s: %s = %s is not a count", path.c_str(), name, value.dump().c_str());
  *to = value.get<int64_t>();
  return {};
}

}  // namespace

Result read_model_config(const std::string& model_dir, InfoOptions* options) {
  const std::string path = model_dir + "/config.json";
  std::ifstream file(path);
  if (!file) return refuse("--model = %s: %s cannot be read", model_dir.c_str(), path.c_str());
  const nlohmann::json config = nlohmann::json::parse(file, nullptr, false);
  if (!config.is_object()) return refuse("--model = %s: %s is not a JSON object", model_dir.c_str(), path.c_str());

  TOOL_TRY(read_count(config, path, "num_hidden_layers", &options->n_layers));
  TOOL_TRY(read_count(config, path, "num_attention_heads", &options->n_q_heads));
  options->n_kv_heads = options->n_q_heads;
  if (config.contains("num_key_value_heads") && !config.at("num_key_value_heads").is_null())
    TOOL_TRY(read_count(config, path, "num_key_value_heads", &options->n_kv_heads));
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
