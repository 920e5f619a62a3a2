// SPDX-License-Identifier: MIT
#include "llama_config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "json_text.h"
#include "text_file.h"

namespace generate {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxField = int64_t{1} << 24;  // far above every dimension of a real model; products fit int64_t

// The fields of one JSON object. Messages name file and field.
struct Fields {
  std::string path;
  const Json& json;

  Failure refuse(const char* name, const std::string& why) const { return {path + ": " + name + " " + why}; }
  // JSON null counts as absent.
  const Json* find(const char* name) const {
    const auto it = json.find(name);
    return it == json.end() || it->is_null() ? nullptr : &*it;
  }
  // absent: the value if the field is missing; -1: the field must exist.
  Failure count(const char* name, int64_t absent, int64_t* value) const {
    const Json* field = find(name);
    if (field == nullptr) {
      *value = absent;
      return absent < 0 ? refuse(name, "is missing") : Failure{};
    }
    // The parser turns whole numbers of more than 64 bits into floating point.
    if (field->is_number_float() && std::abs(field->get<double>()) > static_cast<double>(kMaxField))
      return refuse(name, "= " + brief(*field) + " is out of range");
    if (!field->is_number_integer()) return refuse(name, "= " + brief(*field) + " is not a whole number");
    // A large unsigned number turns negative as int64_t, which is out of range as well.
    *value = field->get<int64_t>();
    if (*value < 1 || *value > kMaxField) return refuse(name, "= " + brief(*field) + " is out of range");
    return {};
  }
  Failure positive(const char* name, double absent, double* value) const {
    const Json* field = find(name);
    *value = absent;
    if (field == nullptr) return {};
    if (!field->is_number()) return refuse(name, "= " + brief(*field) + " is not a number");
    *value = field->get<double>();
    return *value > 0 && std::isfinite(*value) ? Failure{} : refuse(name, "= " + brief(*field) + " is not positive");
  }
  Failure flag(const char* name, bool absent, bool* value) const {
    const Json* field = find(name);
    *value = absent;
    if (field == nullptr) return {};
    if (!field->is_boolean()) return refuse(name, "= " + brief(*field) + " is neither true nor false");
    *value = field->get<bool>();
    return {};
  }
  Failure word(const char* name, const char* absent, std::string* value) const {
    const Json* field = find(name);
    *value = absent;
    if (field == nullptr) return {};
    if (!field->is_string()) return refuse(name, "= " + brief(*field) + " is not a word");
    *value = field->get<std::string>();
    return {};
  }
};

// Refuses models that rotate only some of a head's dimensions.
Failure check_partial_rotary(const Fields& fields) {
  double factor = 1;
  GENERATE_TRY(fields.positive("partial_rotary_factor", 1, &factor));
  return factor == 1 ? Failure{}
                     : fields.refuse("partial_rotary_factor",
                                     "= " + brief(*fields.find("partial_rotary_factor")) + " is not supported (1 is)");
}

// Reads the description of a rotation. Refuses kinds and settings that are not computed here.
Failure read_rope_object(const Fields& fields, ModelConfig* config) {
  for (const char* name : {"rope_type", "type"}) {  // the newer and the older name
    std::string type;
    GENERATE_TRY(fields.word(name, "default", &type));
    if (type != "default") return fields.refuse(name, brief(type) + " is not supported (default is)");
  }
  GENERATE_TRY(check_partial_rotary(fields));
  for (const auto& [name, value] : fields.json.items()) {
    const bool known = name == "rope_type" || name == "type" || name == "rope_theta" || name == "partial_rotary_factor";
    if (!known && !value.is_null())
      return fields.refuse(brief_text(name).c_str(), "= " + brief(value) + " is not supported");
  }
  return fields.positive("rope_theta", config->rope_theta, &config->rope_theta);
}

Failure read_rope(const Fields& fields, ModelConfig* config) {
  GENERATE_TRY(fields.positive("rope_theta", 10000, &config->rope_theta));
  GENERATE_TRY(check_partial_rotary(fields));
  // Older files have rope_scaling beside rope_theta. Newer ones have both inside rope_parameters.
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const Json* rope = fields.find(name);
    if (rope == nullptr) continue;
    if (!rope->is_object()) return fields.refuse(name, "= " + brief(*rope) + " is not an object");
    GENERATE_TRY(read_rope_object({fields.path + ": " + name, *rope}, config));
  }
  return {};
}

Failure read_sliding_window(const Fields& fields, ModelConfig* config) {
  bool use = true;  // Mistral has a sliding window if it has a length, Qwen2 only if this flag is true
  GENERATE_TRY(fields.flag("use_sliding_window", config->model_type != "qwen2", &use));
  if (!use || fields.find("sliding_window") == nullptr) return {};
  return fields.count("sliding_window", -1, &config->sliding_window_tokens);
}

}  // namespace

Failure read_model_config(ModelConfig* config, const std::string& directory) {
  std::string text;
  const std::string path = directory + "/config.json";
  GENERATE_TRY(refuse_irregular(path));
  GENERATE_TRY(read_text_file(path, &text));
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return {path + ": is not a JSON object"};
  const Fields fields{path, json};

  std::string activation;
  GENERATE_TRY(fields.word("model_type", "", &config->model_type));
  if (config->model_type != "llama" && config->model_type != "mistral" && config->model_type != "qwen2")
    return fields.refuse("model_type", brief(config->model_type) + " is not supported (llama, mistral, qwen2 are)");
  GENERATE_TRY(fields.word("hidden_act", "silu", &activation));
  if (activation != "silu") return fields.refuse("hidden_act", brief(activation) + " is not supported (silu is)");
  GENERATE_TRY(fields.count("hidden_size", -1, &config->hidden_size));
  GENERATE_TRY(fields.count("num_hidden_layers", -1, &config->n_layers));
  if (config->n_layers > 4096) return fields.refuse("num_hidden_layers", "is above 4096");
  GENERATE_TRY(fields.count("num_attention_heads", -1, &config->n_q_heads));
  GENERATE_TRY(fields.count("num_key_value_heads", config->n_q_heads, &config->n_kv_heads));
  if (config->n_q_heads % config->n_kv_heads != 0)
    return fields.refuse("num_attention_heads",
                         "= " + std::to_string(config->n_q_heads) +
                             " is not a multiple of num_key_value_heads = " + std::to_string(config->n_kv_heads));
  if (fields.find("head_dim") == nullptr && config->hidden_size % config->n_q_heads != 0)
    return fields.refuse("head_dim", "is missing and hidden_size is not a multiple of num_attention_heads");
  GENERATE_TRY(fields.count("head_dim", config->hidden_size / config->n_q_heads, &config->head_dim));
  if (config->head_dim % 2 != 0) return fields.refuse("head_dim", "= " + std::to_string(config->head_dim) + " is odd");
  GENERATE_TRY(fields.count("intermediate_size", -1, &config->ffn_size));
  GENERATE_TRY(fields.count("vocab_size", -1, &config->vocab_size));
  GENERATE_TRY(fields.count("max_position_embeddings", 0, &config->max_tokens));
  GENERATE_TRY(fields.positive("rms_norm_eps", 1e-6, &config->rms_eps));
  GENERATE_TRY(fields.flag("tie_word_embeddings", false, &config->tied_embeddings));
  GENERATE_TRY(read_rope(fields, config));
  return read_sliding_window(fields, config);
}

Failure check_length(const std::string& directory, const std::string& what, int64_t n_tokens) {
  ModelConfig config;
  GENERATE_TRY(read_model_config(&config, directory));
  if (config.max_tokens == 0 || n_tokens <= config.max_tokens) return {};
  return {what + " is more than max_position_embeddings = " + std::to_string(config.max_tokens) + " in " + directory +
          "/config.json"};
}

}  // namespace generate
