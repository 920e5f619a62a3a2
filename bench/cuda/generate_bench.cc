// SPDX-License-Identifier: MIT
// Prefill and decode of a whole model over K and V in host memory, by context length and route: tokens per second, the
// prediction of tandem_plan, and device memory against its plan.
//
//   generate_bench MODULE [lengths [routes [kv_type [chunk [steps [shapes [window [buffer_mib [compute]]]]]]]]]
//     lists with commas
//
// The model has the shapes of `shapes` (llama-3-8b) and random weights, in bf16 or f32. Up to each length it has random keys
// and values that no pass computed, as rows of HeadInfer's tables 4 and 5.
//
// "prefill" appends `chunk` tokens to these, through all layers and the head of the last one. It is the speed at that
// length, not the mean over a prompt. "decode" is the median of `steps`, from token to token. An untimed chunk, and an
// untimed step whose logits are compared with those of route "host", run first. With f32 the logits agree to 1e-4 of their
// length. In bf16 different roundings grow over the layers to some hundredths, on any route.
//
// "planned" is relative to the measured time: tandem_plan's time for each layer plus the time of a chunk and a step with
// nothing outside the window, measured in the same run. "parts" are ms of the last layer in a step: the planned times of the
// CPU and the bus and, behind the stroke, the measured ones, as a mean over layers. A route may be "host+stream@0.6", with
// the share that crosses the bus.
//
// Memory: the device's count from before a session to after its calls, beside tandem_plan_memory() and the driver's page
// tables for memory that the session's calls have pinned. These do not belong to the session: the next session finds them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "program.h"
#include "runtime.h"
#include "shapes_run.h"

namespace {

using namespace generate;
using Clock = std::chrono::steady_clock;

constexpr int32_t kToken = 1;

double ms_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

std::vector<std::string> words_of(const std::string& list) {
  std::vector<std::string> words;
  std::stringstream stream(list);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}

struct Wanted {
  std::vector<std::string> lengths, routes;
  int64_t chunk = 4096, steps = 5;
  PolicyOptions policy;
};

class Bench {
 public:
  Bench(Runtime* runtime, const Wanted& wanted) : runtime_(runtime), wanted_(wanted) {}

  Failure run() {
    GENERATE_TRY(runtime_->new_sequence(&at_.sequence));
    GENERATE_TRY(warm());
    std::printf("%9s %-8s %6s %8s %9s %8s %9s %9s %8s %7s  %s\n", "tokens", "route", "fill s", "distance", "prefill/s",
                "planned", "decode/s", "ms/step", "planned", "by bus",
                "parts; device MB: planned, held, of page tables, counted; buffers");
    for (const std::string& length : wanted_.lengths) GENERATE_TRY(measure_length(std::atoll(length.c_str())));
    for (const int64_t length : {int64_t{1} << 20, int64_t{4} << 20}) {
      DeviceMemoryReport memory;
      GENERATE_TRY(runtime_->device_memory(policy_of("stream"), length, &memory));
      std::printf("plan of %lld tokens: device window %.1f MB, buffers and work space %.1f MB\n",
                  static_cast<long long>(length), 1e-6 * static_cast<double>(memory.planned.window_bytes),
                  1e-6 * static_cast<double>(memory.planned.work_bytes + memory.planned.stream_bytes));
    }
    return {};
  }

 private:
  PolicyOptions policy_of(const std::string& route) const {
    PolicyOptions policy = wanted_.policy;
    const size_t at = route.find('@');
    policy.routes.route = route.substr(0, at);
    policy.routes.stream_share = at != std::string::npos ? std::atof(route.c_str() + at + 1) : -1;
    return policy;
  }
  Failure open(const std::string& route, Session* session) {
    policy_ = policy_of(route);
    GENERATE_TRY(runtime_->new_session(policy_, session));
    at_.session = session->get();
    return {};
  }
  Failure fill_to(int64_t length, double* seconds) {
    const auto begin = Clock::now();
    if (length > at_.n_tokens) GENERATE_TRY(runtime_->fill(&at_, length - at_.n_tokens));
    *seconds = 1e-3 * ms_since(begin);
    return {};
  }
  // Runs every route once, so that the device has loaded all its code. Then times a step that finds all keys in its window.
  Failure warm() {
    double ignored = 0;
    const int64_t window = wanted_.policy.window_tokens;
    GENERATE_TRY(fill_to(3 * window, &ignored));
    for (const std::string& route : wanted_.routes) {
      Session session;
      GENERATE_TRY(open(route, &session));
      GENERATE_TRY(time_prefill(runtime_, &at_, wanted_.chunk, &ignored));
      GENERATE_TRY(runtime_->step(&at_, kToken));
      GENERATE_TRY(runtime_->take_back(&at_, wanted_.chunk + 1));
    }
    GENERATE_TRY(runtime_->take_back(&at_, at_.n_tokens - window));
    Session session;
    GENERATE_TRY(open("stream", &session));
    GENERATE_TRY(time_chunk(&base_chunk_ms_));
    GENERATE_TRY(runtime_->take_back(&at_, window / 2));
    GENERATE_TRY(time_steps(20, &base_ms_));
    std::printf("nothing outside the window: a step %.3f ms, a chunk of %lld %.1f ms\n", base_ms_,
                static_cast<long long>(wanted_.chunk), base_chunk_ms_);
    return {};
  }
  Failure time_chunk(double* ms) {
    double per_second = 0;
    GENERATE_TRY(time_prefill(runtime_, &at_, wanted_.chunk, &per_second));
    *ms = 1e3 * static_cast<double>(wanted_.chunk) / per_second;
    return runtime_->take_back(&at_, wanted_.chunk);
  }
  Failure time_steps(int64_t n, double* median_ms) {
    std::vector<double> ms;
    for (int64_t i = 0; i <= n; ++i) {
      const auto begin = Clock::now();
      GENERATE_TRY(runtime_->step(&at_, kToken));
      if (runtime_->most_likely() < 0) return {"logits are not finite"};
      if (i > 0) ms.push_back(ms_since(begin));
    }
    std::sort(ms.begin(), ms.end());
    *median_ms = ms[ms.size() / 2];
    return runtime_->take_back(&at_, n + 1);
  }
  Failure logits_of_a_step(std::vector<float>* logits) {
    GENERATE_TRY(runtime_->step(&at_, kToken));
    logits->assign(runtime_->last_logits(), runtime_->last_logits() + runtime_->config().vocab_size);
    return runtime_->take_back(&at_, 1);
  }
  Failure measure_length(int64_t length) {
    double fill_seconds = 0;
    GENERATE_TRY(fill_to(length, &fill_seconds));
    std::vector<float> expected;
    {
      Session session;
      GENERATE_TRY(open("host", &session));
      GENERATE_TRY(logits_of_a_step(&expected));
    }
    for (const std::string& route : wanted_.routes) {
      const DeviceMemoryReport before = memory();
      Session session;
      GENERATE_TRY(open(route, &session));
      std::vector<float> logits;
      GENERATE_TRY(logits_of_a_step(&logits));
      const double far = distance(logits, expected);
      if (!(far <= most_distance()))
        return {route + ": logits are " + std::to_string(far) + " of their length from those of \"host\""};
      double chunk_ms = 0, step_ms = 0, chunk_planned = 0, step_planned = 0, by_bus = 0;
      GENERATE_TRY(time_chunk(&chunk_ms));
      tandem_session_stats stats[2];
      GENERATE_TRY(stats_of_session(&stats[0]));
      GENERATE_TRY(time_steps(wanted_.steps, &step_ms));
      GENERATE_TRY(stats_of_session(&stats[1]));
      tandem_route_plan plan;
      GENERATE_TRY(planned_ms(wanted_.chunk, &chunk_planned, &by_bus, &plan));
      GENERATE_TRY(planned_ms(1, &step_planned, &by_bus, &plan));
      std::printf("%9lld %-8s %6.1f %8.1e %9.1f %8.2f %9.3f %9.2f %8.2f %7.2f  ", static_cast<long long>(length),
                  route.c_str(), fill_seconds, far, 1e3 * static_cast<double>(wanted_.chunk) / chunk_ms,
                  chunk_planned / chunk_ms, 1e3 / step_ms, step_ms, step_planned / step_ms, by_bus);
      print_parts(plan, stats);
      GENERATE_TRY(print_memory(before));
    }
    return {};
  }
  // Relative to b's length.
  static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
      size += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(difference / size);
  }
  DeviceMemoryReport memory() {
    DeviceMemoryReport report;
    return runtime_->device_memory(wanted_.policy, 1, &report) ? DeviceMemoryReport{} : report;
  }
  double most_distance() const { return runtime_->options().compute == 1 ? 1e-4 : 0.05; }
  // A step takes the time that it takes with nothing outside the window, plus the time that each layer's other keys take
  // once its queries are there. tandem_plan knows from earlier steps what the bus brings before that. by_bus: share of these
  // keys that crosses the bus.
  Failure planned_ms(int64_t n_queries, double* ms, double* by_bus, tandem_route_plan* made) {
    *ms = 0;
    for (int32_t l = 0; l < runtime_->config().n_layers; ++l) {
      const int64_t length = at_.n_tokens + n_queries;
      *made = TANDEM_ROUTE_PLAN_INIT;
      GENERATE_TANDEM(tandem_plan(made, at_.session, l, &length, &n_queries, 1, &error));
      *ms += 1e-6 * static_cast<double>(made->total_ns);
    }
    const tandem_route_plan& plan = *made;
    const int64_t outside = plan.host_tokens + plan.stream_tokens;
    *by_bus = outside > 0 ? static_cast<double>(plan.stream_tokens) / static_cast<double>(outside) : 0.0;
    *ms += base_ms_;
    if (n_queries == 1) return {};
    const double n_layers = runtime_->config().n_layers;
    *ms = std::max(1e-6 * n_layers * static_cast<double>(plan.bus_ns),
                   base_chunk_ms_ + 1e-6 * n_layers * static_cast<double>(std::max(plan.host_ns, plan.device_ns)));
    return {};
  }
  Failure stats_of_session(tandem_session_stats* stats) const {
    *stats = TANDEM_SESSION_STATS_INIT;
    GENERATE_TANDEM(tandem_session_get_stats(stats, at_.session, &error));
    return {};
  }
  static void print_parts(const tandem_route_plan& plan, const tandem_session_stats* stats) {
    const auto mean_ms = [](int64_t ns, int64_t n) {
      return n > 0 ? 1e-6 * static_cast<double>(ns) / static_cast<double>(n) : 0.0;
    };
    std::printf(
        "CPU %.2f/%.2f, bus %.2f/%.2f  ", 1e-6 * static_cast<double>(plan.host_ns),
        mean_ms(stats[1].host_part_ns - stats[0].host_part_ns, stats[1].n_host_parts - stats[0].n_host_parts),
        1e-6 * static_cast<double>(plan.bus_ns),
        mean_ms(stats[1].stream_part_ns - stats[0].stream_part_ns, stats[1].n_stream_parts - stats[0].n_stream_parts));
  }
  Failure print_memory(const DeviceMemoryReport& before) {
    DeviceMemoryReport memory;
    GENERATE_TRY(runtime_->device_memory(policy_, at_.n_tokens + wanted_.chunk, &memory));
    std::printf("%.1f %.1f %.1f %.1f; %.1f\n", 1e-6 * static_cast<double>(memory.planned.total()),
                1e-6 * static_cast<double>(memory.held.total()),
                1e-6 * static_cast<double>(memory.page_table_bytes - before.page_table_bytes),
                1e-6 * static_cast<double>(memory.use.now_bytes - before.use.now_bytes),
                1e-6 * static_cast<double>(memory.held.work_bytes + memory.held.stream_bytes));
    std::fflush(stdout);
    return {};
  }

  Runtime* runtime_;
  const Wanted& wanted_;
  Context at_;
  PolicyOptions policy_;                    // policy of the session in at_
  double base_ms_ = 0, base_chunk_ms_ = 0;  // time of a step and of a chunk that find all keys in the window
};

Failure run(int argc, char** argv) {
  const auto word = [&](int i, const char* otherwise) { return std::string(argc > i ? argv[i] : otherwise); };
  if (argc < 2)
    return {"generate_bench MODULE [lengths [routes [kv_type [chunk [steps [shapes [window [buffer_mib [compute]]]]]]]]]"};
  Wanted wanted;
  wanted.lengths = words_of(word(2, "10240,40960,102400"));
  wanted.routes = words_of(word(3, "auto,stream,host"));
  wanted.chunk = std::atoll(word(5, "4096").c_str());
  wanted.steps = std::atoll(word(6, "5").c_str());
  wanted.policy.window_tokens = std::atoll(word(8, "4096").c_str());
  wanted.policy.routes.buffer_bytes = std::atoll(word(9, "16").c_str()) << 20;
  EngineOptions options;
  options.place = kCuda;
  options.backend_path = argv[1];
  options.shapes = word(7, "llama-3-8b");
  options.kv_place = kOnHost;
  options.chunk_tokens = wanted.chunk;
  options.compute = word(10, "bf16") == "f32" ? 1 : 2;
  const std::vector<std::string> types = key_types();
  const auto type = std::find(types.begin(), types.end(), word(4, "bf16"));
  if (type == types.end()) return {"kv_type: \"" + word(4, "bf16") + "\" is no storage type"};
  options.k_type = static_cast<int32_t>(type - types.begin()) + 1;
  Runtime runtime;
  GENERATE_TRY(runtime.open(options));
  return Bench(&runtime, wanted).run();
}

}  // namespace

int main(int argc, char** argv) { return run_program("generate_bench", argc, argv, run); }
