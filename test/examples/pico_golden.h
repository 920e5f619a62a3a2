// SPDX-License-Identifier: MIT
// The model pico as its tests open it, and the f32 results of Hugging Face Transformers for it
// (examples/models/pico/README.md). TANDEM_EXAMPLES_DIRECTORY names its folder. Include it after the headers of
// with_cmocka.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "generation.h"
#include "safetensors.h"
#include "stop_test.h"
#include "text_file.h"

namespace pico {

using namespace generate;

inline const std::string kModel = TANDEM_EXAMPLES_DIRECTORY "/models/pico";
inline constexpr double kMostDifference = 2e-3;  // of logits; caused by the order of summation
inline constexpr double kMostBits = 0.002;       // of bits per byte

inline void require(const Failure& failure) {
  if (failure) STOP_TEST("%s", failure.message.c_str());
}

// Keeps K and V in f32 by default, so that only the order of summation differs from the reference.
inline EngineOptions f32_options() {
  EngineOptions options;
  options.model_directory = kModel;
  options.k_type = TANDEM_F32;
  return options;
}

struct Opened {
  Runtime runtime;
  Session session;
  Context context;
  explicit Opened(const EngineOptions& options = f32_options(), const PolicyOptions& policy = {}) {
    require(runtime.open(options));
    require(runtime.new_session(policy, &session));
    context.session = session.get();
    require(runtime.new_sequence(&context.sequence));
  }
};

struct Golden {
  std::string prompt;         // 1,024 bytes
  std::vector<float> logits;  // [32, 256] of the prompt's last 32 tokens
  Golden() {
    WeightFiles files;
    WeightView view;
    require(files.open_file(kModel + "/golden.safetensors"));
    require(files.find("prompt", {1024}, &view));
    prompt.assign(reinterpret_cast<const char*>(view.data), view.n_bytes);
    require(files.read_f32("logits_last32", {32, 256}, &logits));
  }
};

inline double max_difference(const float* logits, const float* golden, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; ++i) {
    assert_true(std::isfinite(logits[i]));
    most = std::max(most, std::abs(static_cast<double>(logits[i]) - golden[i]));
  }
  return most;
}

// The text that the golden figures were computed on. Tests without it skip before anything else, because skip() runs no
// destructors.
inline bool has_scored_text() {
  const char* folder = std::getenv("TANDEM_TEST_DATA");
  std::string text;
  const bool is_there = folder != nullptr && !read_text_file(std::string(folder) + "/wikitext2-test.txt", &text);
  if (!is_there) print_message("skipped: $TANDEM_TEST_DATA/wikitext2-test.txt is not there\n");
  return is_there;
}

// Returns the first n bytes of the text and the byte after them.
inline std::string scored_text(int64_t n) {
  std::string text;
  require(read_text_file(std::string(std::getenv("TANDEM_TEST_DATA")) + "/wikitext2-test.txt", &text));
  return text.substr(200000, n + 1);
}

inline double golden_bits_per_byte(int64_t n) {
  std::string json_text;
  require(read_text_file(kModel + "/golden.json", &json_text));
  return nlohmann::json::parse(json_text)["bits_per_byte_second_half_" + std::to_string(n)].get<double>();
}

}  // namespace pico
