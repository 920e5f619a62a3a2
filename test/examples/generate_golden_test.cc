// SPDX-License-Identifier: MIT
// Compares pico on the CPU with its golden values.
#include <cstring>

#include "pico_golden.h"

namespace {

using namespace pico;

bool long_texts = false;

EngineOptions options_with(int32_t rope) {
  EngineOptions options = f32_options();
  options.rope = rope;
  return options;
}

void check_prefill(int32_t rope, const char* policy) {
  const Golden golden;
  PolicyOptions policy_options;
  policy_options.policy = policy;
  Opened opened(options_with(rope), policy_options);
  require(opened.runtime.append(&opened.context, golden.prompt));
  const double most = max_difference(opened.runtime.logits(512 - 32, 32), golden.logits.data(), 32 * 256);
  print_message("rope %d, policy %s: logits differ by at most %.2e\n", rope, policy, most);
  assert_true(most <= kMostDifference);
}

void prefill_gives_golden_logits(void**) {
  check_prefill(0, "all");
  check_prefill(1, "all");
  check_prefill(0, "hgca");  // an append attends everything
}

// Decodes the last 32 tokens one at a time, which uses other kernels.
void decode_gives_golden_logits(void**) {
  const Golden golden;
  for (const int32_t rope : {0, 1}) {
    Opened opened(options_with(rope));
    require(opened.runtime.append(&opened.context, std::string_view(golden.prompt).substr(0, 1024 - 32)));
    double most = 0;
    for (int64_t i = 0; i < 32; ++i) {
      require(opened.runtime.step_byte(&opened.context, golden.prompt[1024 - 32 + i]));
      most = std::max(most, max_difference(opened.runtime.last_logits(), &golden.logits[i * 256], 256));
    }
    print_message("rope %d: decoded logits differ by at most %.2e\n", rope, most);
    assert_true(most <= kMostDifference);
  }
}

// Compares with the figures of golden.json, and with decode steps over the same text. Both ways to score must agree.
void bits_per_byte_are_golden(void**) {
  if (!has_scored_text()) skip();
  const std::vector<int64_t> contexts = long_texts ? std::vector<int64_t>{8192} : std::vector<int64_t>{2048};
  for (const int64_t n : contexts) {
    const std::string text = scored_text(n);
    const double expected = golden_bits_per_byte(n);
    for (const int32_t kv_type : {TANDEM_F32, TANDEM_BF16}) {
      EngineOptions options = f32_options();
      options.k_type = kv_type;
      Opened opened(options);
      Outcome outcome;
      require(score_text(&opened.runtime, &opened.context, text, &outcome));
      print_message("context %lld, KV type %s: %.5f bits per byte, golden %.5f\n", static_cast<long long>(n),
                    tandem_dtype_name(kv_type), outcome.bits_per_byte, expected);
      assert_true(std::abs(outcome.bits_per_byte - expected) <= kMostBits);
    }
    Opened opened;
    Outcome outcome;
    require(score_decode(&opened.runtime, &opened.context, text, n / 2, &outcome));
    print_message("decoded: %.5f\n", outcome.bits_per_byte);
    assert_true(std::abs(outcome.bits_per_byte - expected) <= kMostBits);
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
