// SPDX-License-Identifier: MIT
// pico against what Hugging Face Transformers computed in f32 (examples/models/pico/README.md). K and V are kept in f32
// here, so that what is left between the two is the order of summation.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "generation.h"
#include "safetensors.h"
#include "stop_test.h"
#include "text_file.h"

namespace {

using namespace generate;

const std::string kModel = TANDEM_EXAMPLES_DIRECTORY "/models/pico";
bool long_texts = false;

void require(const Failure& failure) {
  if (failure) STOP_TEST("%s", failure.message.c_str());
}

struct Opened {
  Runtime runtime;
  Session session;
  Context context;
  explicit Opened(int32_t rope = 0, const char* policy = "all", int32_t kv_type = TANDEM_F32) {
    EngineOptions options;
    options.model_directory = kModel;
    options.k_type = kv_type;
    options.rope = rope;
    require(runtime.open(options));
    PolicyOptions policy_options;
    policy_options.policy = policy;
    require(runtime.new_session(policy_options, &session));
    context.session = session.get();
    require(runtime.new_sequence(&context.sequence));
  }
};

struct Golden {
  std::string prompt;
  std::vector<float> logits;  // [32, 256]
  Golden() {
    WeightFiles files;
    WeightView view;
    require(files.open_file(kModel + "/golden.safetensors"));
    require(files.find("prompt", {1024}, &view));
    prompt.assign(reinterpret_cast<const char*>(view.data), view.n_bytes);
    require(files.read_f32("logits_last32", {32, 256}, &logits));
  }
};

double max_difference(const float* logits, const float* golden, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; ++i) {
    assert_true(std::isfinite(logits[i]));
    most = std::max(most, std::abs(static_cast<double>(logits[i]) - golden[i]));
  }
  return most;
}

void check_prefill(int32_t rope, const char* policy) {
  const Golden golden;
  Opened opened(rope, policy);
  require(opened.runtime.append(&opened.context, golden.prompt));
  const double most = max_difference(opened.runtime.logits(512 - 32, 32), golden.logits.data(), 32 * 256);
  print_message("rope %d, policy %s: logits differ by at most %.2e\n", rope, policy, most);
  assert_true(most <= 2e-3);
}

void prefill_gives_golden_logits(void**) {
  check_prefill(0, "all");
  check_prefill(1, "all");
  check_prefill(0, "hgca");  // an append attends everything
}

// The last 32 tokens one at a time, through the other kernels.
void decode_gives_golden_logits(void**) {
  const Golden golden;
  for (const int32_t rope : {0, 1}) {
    Opened opened(rope);
    require(opened.runtime.append(&opened.context, std::string_view(golden.prompt).substr(0, 1024 - 32)));
    double most = 0;
    for (int64_t i = 0; i < 32; ++i) {
      require(opened.runtime.step_byte(&opened.context, golden.prompt[1024 - 32 + i]));
      most = std::max(most, max_difference(opened.runtime.last_logits(), &golden.logits[i * 256], 256));
    }
    print_message("rope %d: decoded logits differ by at most %.2e\n", rope, most);
    assert_true(most <= 2e-3);
  }
}

// The figures of golden.json, and the same text by decode steps: both ways to score must agree.
void bits_per_byte_are_golden(void**) {
  const char* folder = std::getenv("TANDEM_TEST_DATA");
  std::string text, json_text;
  if (folder == nullptr || read_text_file(std::string(folder) + "/wikitext2-test.txt", &text)) {
    print_message("skipped: $TANDEM_TEST_DATA/wikitext2-test.txt is not there\n");
    skip();
  }
  require(read_text_file(kModel + "/golden.json", &json_text));
  const nlohmann::json golden = nlohmann::json::parse(json_text);
  const std::vector<int64_t> contexts = long_texts ? std::vector<int64_t>{8192} : std::vector<int64_t>{2048};
  for (const int64_t n : contexts) {
    const std::string_view slice = std::string_view(text).substr(200000, n + 1);
    const double expected = golden["bits_per_byte_second_half_" + std::to_string(n)].get<double>();
    for (const int32_t kv_type : {TANDEM_F32, TANDEM_BF16}) {
      Opened opened(0, "all", kv_type);
      Outcome outcome;
      require(score_text(&opened.runtime, &opened.context, slice, &outcome));
      print_message("context %lld, KV type %s: %.5f bits per byte, golden %.5f\n", static_cast<long long>(n),
                    tandem_dtype_name(kv_type), outcome.bits_per_byte, expected);
      assert_true(std::abs(outcome.bits_per_byte - expected) <= 0.002);
    }
    Opened opened;
    Outcome outcome;
    require(score_decode(&opened.runtime, &opened.context, slice, n / 2, &outcome));
    print_message("decoded: %.5f\n", outcome.bits_per_byte);
    assert_true(std::abs(outcome.bits_per_byte - expected) <= 0.002);
  }
}

}  // namespace

int main(int argc, char** argv) {
  long_texts = argc > 1 && std::strcmp(argv[1], "--long") == 0;
  const CMUnitTest short_tests[] = {
      cmocka_unit_test(prefill_gives_golden_logits),
      cmocka_unit_test(decode_gives_golden_logits),
      cmocka_unit_test(bits_per_byte_are_golden),
  };
  const CMUnitTest long_tests[] = {cmocka_unit_test(bits_per_byte_are_golden)};
  return long_texts ? cmocka_run_group_tests(long_tests, nullptr, nullptr)
                    : cmocka_run_group_tests(short_tests, nullptr, nullptr);
}
