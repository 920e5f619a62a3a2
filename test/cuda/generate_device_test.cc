// SPDX-License-Identifier: MIT
// tandem-generate --device cuda: the model pico on a GPU against its golden values and the CPU, and graphs against launches.
#include <bit>
#include <limits>

#include "cuda/cuda_memory.h"
#include "cuda/layer_kernels.h"
#include "examples/pico_golden.h"
#include "shapes_run.h"

namespace {

using namespace pico;

std::string module_path = TANDEM_MODULE;
constexpr int64_t kSmallWindow = 256;     // the host attends a part of the 1,024 tokens
constexpr double kMostRecomputed = 5e-3;  // of logits: hidden states are rounded to f16

EngineOptions cuda_options() {
  EngineOptions options = f32_options();
  options.place = kCuda;
  options.backend_path = module_path;
  return options;
}

PolicyOptions windowed(int64_t window_tokens, const char* policy = "all") {
  PolicyOptions options;
  options.policy = policy;
  options.window_tokens = window_tokens;
  return options;
}

DeviceMemoryReport report_of(Opened& opened, const PolicyOptions& policy) {
  DeviceMemoryReport report;
  require(opened.runtime.device_memory(policy, opened.context.n_tokens, &report));
  return report;
}

void prefill_gives_golden_logits(void**) {
  const Golden golden;
  for (const int64_t window : {int64_t{4096}, kSmallWindow}) {
    Opened opened(cuda_options(), windowed(window));
    require(opened.runtime.append(&opened.context, golden.prompt));
    const double most = max_difference(opened.runtime.logits(512 - 32, 32), golden.logits.data(), 32 * 256);
    print_message("window %lld: logits differ by at most %.2e\n", static_cast<long long>(window), most);
    assert_true(most <= kMostDifference);
    assert_true(most > 0);  // GPU and CPU add in different orders, so equal numbers would mean one program ran twice
  }
}

void decode_gives_golden_logits(void**) {
  const Golden golden;
  for (const int64_t window : {int64_t{4096}, kSmallWindow}) {
    Opened opened(cuda_options(), windowed(window));
    require(opened.runtime.append(&opened.context, std::string_view(golden.prompt).substr(0, 1024 - 32)));
    double most = 0;
    for (int64_t i = 0; i < 32; ++i) {
      require(opened.runtime.step_byte(&opened.context, golden.prompt[1024 - 32 + i]));
      const float* logits = opened.runtime.last_logits();
      assert_int_equal(opened.runtime.most_likely(), std::max_element(logits, logits + 256) - logits);
      most = std::max(most, max_difference(logits, &golden.logits[i * 256], 256));
    }
    print_message("window %lld: decoded logits differ by at most %.2e\n", static_cast<long long>(window), most);
    assert_true(most <= kMostDifference);
    assert_int_equal(report_of(opened, windowed(window)).use.n_replayed, 31);
  }
}

void same_bits(Opened& a, const Context& at_a, Opened& b, const Context& at_b, char token) {
  Context to_a = at_a, to_b = at_b;
  require(a.runtime.step_byte(&to_a, token));
  const std::vector<float> logits(a.runtime.last_logits(), a.runtime.last_logits() + 256);
  require(b.runtime.step_byte(&to_b, token));
  const auto same = [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); };
  if (!std::equal(logits.begin(), logits.end(), b.runtime.last_logits(), same))
    STOP_TEST("other bits after %lld tokens", static_cast<long long>(at_a.n_tokens));
}

// A window that is too short is lengthened. The lists of CPU and GPU differ only where scores nearly tie.
void pruned_steps_are_as_on_the_cpu(void**) {
  const Golden golden;
  PolicyOptions policy = windowed(kSmallWindow, "hip");
  policy.pruning = "16/64/bounds:16:256:4/exact:8:128:2";
  Opened on_device(cuda_options(), policy), on_host(f32_options(), policy);
  for (Opened* opened : {&on_device, &on_host})
    require(opened->runtime.append(&opened->context, std::string_view(golden.prompt).substr(0, 900)));
  int64_t n_far = 0;
  for (int64_t i = 900; i < 1024; ++i) {
    for (Opened* opened : {&on_device, &on_host}) require(opened->runtime.step_byte(&opened->context, golden.prompt[i]));
    const float *const got = on_device.runtime.last_logits(), *const wanted = on_host.runtime.last_logits();
    n_far += max_difference(got, wanted, 256) > 10 * kMostDifference ? 1 : 0;
  }
  print_message("pruned: logits of %lld of 124 steps differ\n", static_cast<long long>(n_far));
  assert_true(n_far <= 12);
  tandem_session_stats stats, stats_of_host;
  require(session_stats(on_device.session.get(), &stats));
  require(session_stats(on_host.session.get(), &stats_of_host));
  assert_int_equal(stats.n_refreshes, stats_of_host.n_refreshes);
  assert_true(stats.selected_keys > 0 && stats.judged_kv_bytes > 0);
  const DeviceMemoryReport report = report_of(on_device, policy);
  assert_int_equal(report.use.n_replayed, 123);
  assert_int_equal(report.held.window_bytes, report.planned.window_bytes);
}

// While tokens leave the window, and in a second sequence of the session.
void graph_and_launches_give_the_same_bits(void**) {
  const Golden golden;
  EngineOptions options = cuda_options();
  for (const int32_t compute : {1, 2}) {
    options.compute = compute;
    options.eager = false;
    Opened replayed(options, windowed(kSmallWindow));
    options.eager = true;
    Opened launched(options, windowed(kSmallWindow));
    const std::string_view prompt = std::string_view(golden.prompt).substr(0, 500);
    Context fork_of_replayed, fork_of_launched;
    for (Opened* opened : {&replayed, &launched}) {
      require(opened->runtime.append(&opened->context, prompt));
      require(opened->runtime.fork(opened->context, opened->session.get(),
                                   opened == &replayed ? &fork_of_replayed : &fork_of_launched));
    }
    for (int64_t i = 0; i < 200; ++i) {
      same_bits(replayed, replayed.context, launched, launched.context, golden.prompt[500 + i]);
      ++replayed.context.n_tokens, ++launched.context.n_tokens;
    }
    for (int64_t i = 0; i < 20; ++i) {
      same_bits(replayed, fork_of_replayed, launched, fork_of_launched, golden.prompt[i]);
      ++fork_of_replayed.n_tokens, ++fork_of_launched.n_tokens;
    }
    const DeviceUse use = report_of(replayed, windowed(kSmallWindow)).use;
    assert_int_equal(use.n_replayed, 219);
    assert_int_equal(use.n_launched, 1);
    assert_int_equal(report_of(launched, windowed(kSmallWindow)).use.n_launched, 220);
  }
}

// Matrices that come from the host in every step, some or all of them, give the products of resident ones.
void weights_may_come_from_the_host(void**) {
  const Golden golden;
  EngineOptions options = cuda_options();
  options.eager = true;
  Opened resident(options, windowed(kSmallWindow));
  for (const double share : {0.0, 0.5}) {
    options.weights_place = kOnHost;
    options.resident_share = share;
    Opened streamed(options, windowed(kSmallWindow));
    for (Opened* opened : {&resident, &streamed}) {
      opened->context.n_tokens = 0;
      require(opened->runtime.new_sequence(&opened->context.sequence));
      require(opened->runtime.append(&opened->context, std::string_view(golden.prompt).substr(0, 500)));
    }
    for (int64_t i = 0; i < 50; ++i) {
      same_bits(resident, resident.context, streamed, streamed.context, golden.prompt[500 + i]);
      ++resident.context.n_tokens, ++streamed.context.n_tokens;
    }
    const tandem_weights_stats weights = report_of(streamed, windowed(kSmallWindow)).use.weights;
    assert_true(share == 0.0 ? weights.n_resident == 0 : weights.n_resident > 0 && weights.n_resident < weights.n_blocks);
    assert_int_equal(weights.n_ahead, weights.n_streamed_uses);
    assert_int_equal(weights.pinned_bytes, weights.host_bytes);
  }
}

// Weights and activations are rounded: the logits are close to the golden ones and not those of f32.
void bf16_is_near_the_golden_logits(void**) {
  const Golden golden;
  EngineOptions options = cuda_options();
  options.compute = 2;
  options.k_type = TANDEM_BF16;
  Opened opened(options);
  require(opened.runtime.append(&opened.context, golden.prompt));
  const float* logits = opened.runtime.logits(512 - 32, 32);
  double difference = 0, size = 0;
  for (size_t i = 0; i < golden.logits.size(); ++i) {
    difference += std::pow(static_cast<double>(logits[i]) - golden.logits[i], 2);
    size += std::pow(static_cast<double>(golden.logits[i]), 2);
  }
  const double distance = std::sqrt(difference / size);
  print_message("bf16: %.2e of the logits' length apart\n", distance);
  assert_true(distance < 0.02);
  assert_true(distance > 1e-5);
}

void streaming_is_as_on_the_cpu(void**) {
  const Golden golden;
  Opened on_device(cuda_options(), windowed(kSmallWindow, "streaming")),
      on_cpu(f32_options(), windowed(kSmallWindow, "streaming"));
  double most = 0;
  for (Opened* opened : {&on_device, &on_cpu})
    require(opened->runtime.append(&opened->context, std::string_view(golden.prompt).substr(0, 900)));
  for (int64_t i = 900; i < 1000; ++i) {
    for (Opened* opened : {&on_device, &on_cpu}) require(opened->runtime.step_byte(&opened->context, golden.prompt[i]));
    most = std::max(most, max_difference(on_device.runtime.last_logits(), on_cpu.runtime.last_logits(), 256));
  }
  print_message("streaming: logits differ from the CPU's by at most %.2e\n", most);
  assert_true(most <= kMostDifference);
}

void bits_per_byte_are_golden(void**) {
  if (!has_scored_text()) skip();
  const std::string text = scored_text(2048);
  const double expected = golden_bits_per_byte(2048);
  for (const int64_t window : {int64_t{4096}, kSmallWindow}) {
    Opened scored(cuda_options(), windowed(window)), decoded(cuda_options(), windowed(window));
    Outcome by_prefill, by_decode;
    require(score_text(&scored.runtime, &scored.context, text, &by_prefill));
    require(score_decode(&decoded.runtime, &decoded.context, text, 1024, &by_decode));
    print_message("window %lld: %.5f bits per byte, decoded %.5f, golden %.5f\n", static_cast<long long>(window),
                  by_prefill.bits_per_byte, by_decode.bits_per_byte, expected);
    assert_true(std::abs(by_prefill.bits_per_byte - expected) <= kMostBits);
    assert_true(std::abs(by_decode.bits_per_byte - expected) <= kMostBits);
  }
}

// Decode over a context that no call computed takes the planned memory.
void memory_is_as_planned(void**) {
  const PolicyOptions policy = windowed(kSmallWindow);
  Opened opened(cuda_options(), policy);
  require(opened.runtime.fill(&opened.context, 1000));
  for (int i = 0; i < 3; ++i) require(opened.runtime.step(&opened.context, 'a'));
  assert_true(opened.runtime.most_likely() >= 0);
  const DeviceMemoryReport report = report_of(opened, policy);
  assert_int_equal(report.held.window_bytes, report.planned.window_bytes);
  assert_true(report.use.loaded_bytes >= report.use.runtime_bytes / 2);
  assert_true(report.use.now_bytes >= report.use.loaded_bytes);
  print_message("windows %lld, work space %lld, planned %lld and %lld\n", static_cast<long long>(report.held.window_bytes),
                static_cast<long long>(report.held.work_bytes), static_cast<long long>(report.planned.window_bytes),
                static_cast<long long>(report.planned.work_bytes));
  assert_true(report.held.work_bytes >= report.planned.work_bytes);
  require(opened.runtime.take_back(&opened.context, 2));
  require(opened.runtime.step(&opened.context, 'a'));
  assert_int_equal(opened.context.n_tokens, 1002);
}

// As --shapes does it, with a part for the host.
void steps_are_timed_and_compared(void**) {
  Opened opened(cuda_options(), windowed(kSmallWindow));
  ShapesOutcome outcome;
  require(run_shapes(&opened.runtime, &opened.context, {1000, 0, 20}, &outcome));
  assert_int_equal(opened.context.n_tokens, 1000 + 1 + 3 + 20);
  assert_true(outcome.replay_distance < 1e-5);
  assert_true(outcome.median_ms > 0 && outcome.median_ms <= outcome.most_ms);
  const DeviceUse use = report_of(opened, windowed(kSmallWindow)).use;
  assert_int_equal(use.n_launched, 1);
  assert_int_equal(use.n_replayed, 24);
}

// K and V outside a small window by every route: golden logits after chunks and steps, and the text of resident keys. With
// "recompute" K and V are made from hidden states and weights of 16 bits.
RouteOptions route_of(const char* name) {
  RouteOptions routes;
  routes.route = name;
  if (routes.route == "host+stream") routes.stream_share = 0.5;
  return routes;
}

struct ByRoute : Opened {
  static EngineOptions engine(const char* route, bool on_host, int32_t x_type) {
    EngineOptions options = cuda_options();
    options.kv_place = kOnHost;
    options.weights_place = on_host ? kOnHost : kOnDevice;
    options.keeps_hidden = route_of(route).recomputes();
    options.x_type = x_type;
    options.chunk_tokens = 128;
    return options;
  }
  static PolicyOptions policy(const char* route) {
    PolicyOptions options = windowed(64);
    options.routes = route_of(route);
    return options;
  }
  explicit ByRoute(const char* route, bool weights_on_host = false, int32_t x_type = 0)
      : Opened(engine(route, weights_on_host, x_type), policy(route)) {}
  tandem_session_stats stats() const {
    tandem_session_stats stats;
    require(session_stats(session.get(), &stats));
    return stats;
  }
};

std::string continued(Opened& opened, std::string_view prompt) {
  Outcome outcome;
  SamplingOptions sampling;
  sampling.n_predict = 200;
  require(generate_text(&opened.runtime, &opened.context, prompt, sampling, &outcome));
  return outcome.answer;
}

void check_served(const ByRoute& opened, const std::string& route) {
  const tandem_session_stats stats = opened.stats();
  const bool streams = route == "stream" || route == "host+stream", on_host = route == "host" || route == "host+stream";
  if (route == "auto") return;
  assert_true((stats.streamed_kv_bytes > 0) == streams);
  assert_true((stats.streamed_x_bytes > 0) == (route == "recompute"));
  assert_true((stats.n_host_parts > 0) == on_host);
}

void every_route_gives_golden_logits(void**) {
  const Golden golden;
  for (const char* route : {"auto", "stream", "host", "recompute", "host+stream"}) {
    ByRoute opened(route), decoded(route);
    require(opened.runtime.append(&opened.context, golden.prompt));
    const double most = max_difference(opened.runtime.logits(128 - 32, 32), golden.logits.data(), 32 * 256);
    require(decoded.runtime.append(&decoded.context, std::string_view(golden.prompt).substr(0, 1024 - 32)));
    double most_decoded = 0;
    for (int64_t i = 0; i < 32; ++i) {
      require(decoded.runtime.step_byte(&decoded.context, golden.prompt[1024 - 32 + i]));
      most_decoded = std::max(most_decoded, max_difference(decoded.runtime.last_logits(), &golden.logits[i * 256], 256));
    }
    print_message("%s: logits differ by at most %.2e, decoded by %.2e\n", route, most, most_decoded);
    const double gate = std::string(route) == "recompute" ? kMostRecomputed : kMostDifference;
    assert_true(most <= gate && most_decoded <= gate);
    check_served(opened, route);
    check_served(decoded, route);
  }
}

// Returns the bits per token that are lost by predicting with these logits when `right` is the truth.
double divergence(const float* logits, const float* right) {
  double sums[2] = {}, most[2] = {-INFINITY, -INFINITY}, bits = 0.0;
  const float* rows[] = {logits, right};
  for (size_t r = 0; r < 2; ++r) {
    for (int i = 0; i < 256; ++i) most[r] = std::max(most[r], static_cast<double>(rows[r][i]));
    for (int i = 0; i < 256; ++i) sums[r] += std::exp(static_cast<double>(rows[r][i]) - most[r]);
  }
  for (int i = 0; i < 256; ++i) {
    const double p = static_cast<double>(right[i]) - most[1] - std::log(sums[1]),
                 q = static_cast<double>(logits[i]) - most[0] - std::log(sums[0]);
    bits += std::exp(p) * (p - q) / std::log(2.0);
  }
  return bits;
}

// All but 64 of the 1,024 keys are made from hidden states, in each layer.
void hidden_states_may_be_codes(void**) {
  const Golden golden;
  for (const auto& [x_type, gate] : {std::pair{TANDEM_Q8_0, 1e-4}, {TANDEM_Q4_64, 0.01}, {TANDEM_Q4_0, 0.01}}) {
    ByRoute opened("recompute", false, x_type);
    require(opened.runtime.append(&opened.context, golden.prompt));
    const float* const logits = opened.runtime.logits(128 - 32, 32);
    double bits = 0.0;
    for (int64_t i = 0; i < 32; ++i)
      bits += divergence(logits + i * 256, &golden.logits[static_cast<size_t>(i * 256)]) / 32.0;
    print_message("hidden states in %s: logits differ by at most %.2e, %.2e bits lost\n", tandem_dtype_name(x_type),
                  max_difference(logits, golden.logits.data(), 32 * 256), bits);
    assert_true(bits >= 0.0 && bits <= gate);
    check_served(opened, "recompute");
  }
}

void every_route_gives_the_same_text(void**) {
  const Golden golden;
  const std::string_view prompt = std::string_view(golden.prompt).substr(0, 700);
  Opened resident(cuda_options(), windowed(4096));
  const std::string expected = continued(resident, prompt);
  for (const char* route : {"auto", "stream", "host", "recompute", "host+stream"}) {
    for (const bool weights_on_host : {false, true}) {
      ByRoute opened(route, weights_on_host);
      assert_string_equal(continued(opened, prompt).c_str(), expected.c_str());
      const DeviceMemoryReport report = report_of(opened, ByRoute::policy(route));
      assert_int_equal(report.held.window_bytes, report.planned.window_bytes);
      if (opened.stats().streamed_kv_bytes > 0) assert_int_equal(report.held.stream_bytes, report.planned.stream_bytes);
      assert_int_equal(report.use.n_replayed, 0);
    }
  }
}

// Finds the first of equal logits, or -1 if any logit is NaN, wherever it is.
void most_likely_is_the_first_of_the_largest(void**) {
  const CudaArray<int32_t> token(1);
  for (const int64_t n : {int64_t{1}, int64_t{255}, int64_t{256}, int64_t{5000}, int64_t{128256}}) {
    const CudaArray<float> logits(n);
    const auto found = [&](const std::vector<float>& values) {
      int32_t at = -2;
      must(cudaMemcpy(logits.get(), values.data(), logits.bytes(), cudaMemcpyHostToDevice), "logits");
      find_most_likely(token.get(), logits.get(), n, nullptr);
      must(cudaMemcpy(&at, token.get(), 4, cudaMemcpyDeviceToHost), "token");
      return at;
    };
    std::vector<float> values(static_cast<size_t>(n), -5);
    for (const int64_t at : {n - 1, n / 2, int64_t{0}}) {  // the numbers after it are as large
      values[at] = -1;
      assert_int_equal(found(values), at);
      for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity()}) {
        std::vector<float> bad = values;
        bad[n - 1 - at] = wrong;
        assert_int_equal(found(bad), -1);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) module_path = argv[1];
  const CMUnitTest tests[] = {
      cmocka_unit_test(most_likely_is_the_first_of_the_largest),
      cmocka_unit_test(prefill_gives_golden_logits),
      cmocka_unit_test(decode_gives_golden_logits),
      cmocka_unit_test(pruned_steps_are_as_on_the_cpu),
      cmocka_unit_test(graph_and_launches_give_the_same_bits),
      cmocka_unit_test(weights_may_come_from_the_host),
      cmocka_unit_test(bf16_is_near_the_golden_logits),
      cmocka_unit_test(streaming_is_as_on_the_cpu),
      cmocka_unit_test(bits_per_byte_are_golden),
      cmocka_unit_test(memory_is_as_planned),
      cmocka_unit_test(steps_are_timed_and_compared),
      cmocka_unit_test(every_route_gives_golden_logits),
      cmocka_unit_test(hidden_states_may_be_codes),
      cmocka_unit_test(every_route_gives_the_same_text),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
