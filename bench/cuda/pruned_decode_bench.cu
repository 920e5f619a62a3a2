// SPDX-License-Identifier: MIT
// Decode and appends under policy "hip" over keys in the window, through the C ABI: microseconds per layer.
//
//   pruned_decode_bench MODULE [threads [lengths [presets]]]     lists with commas
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16, as many as fit 24 GiB of keys, at least 4 and at most 16.
// They run one after the other in planned steps that a graph replays. Each call appends a row, finds the keys and attends
// them. Times are the stream's, from the graph's first kernel to its last, divided by the layers. A line of JSON for each
// length and preset:
//
//   all_us      steps in which every stage runs          cached_us   steps in which no stage runs
//   average_us  all steps, over 96 tokens                dense_us    the same calls under policy "all"
//   append_us   one unplanned call of 2,048 queries      dense_append_us   the same call under policy "all"
//
// Before a preset is timed, the outputs of a step in which every stage runs, and of an append of 300 queries, are compared
// with those of the CPU's own search and attention over the host store. Keys repeat every 4,096 tokens, so chunks have equal
// scores, of which the lower ones are kept.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kMostBytes = int64_t{24} << 30, kSteps = 96, kAppended = 2048, kChecked = 300, kRoom = 4096;

struct Preset {
  std::string name;
  std::vector<int64_t> intervals;  // refresh intervals of its stages for more than 32K tokens

  bool runs_all(int64_t step) const { return step % intervals.front() == 0; }
  bool runs_none(int64_t step) const { return step % intervals.back() != 0; }
};

Preset find_preset(const std::string& name) {
  const Preset all[] = {{"small", {16, 8, 4}},     {"3k", {16, 8, 4}}, {"3k-fast", {32, 16, 8}},
                        {"3k-flash", {96, 24, 8}}, {"5k", {16, 8, 4}}, {"16k-shallow", {16}}};
  for (const Preset& preset : all)
    if (preset.name == name) return preset;
  std::fprintf(stderr, "%s is no preset of this bench\n", name.c_str());
  std::exit(2);
}

void remove_new_tokens(const HybridCache& on) {
  TANDEM(tandem_sequence_truncate, on.cache, on.sequences[0], on.length);
  TANDEM(tandem_sequence_reserve, on.cache, on.sequences[0], kAppended + 8);
}

// Runs steps of one token each, and appends.
class Steps {
 public:
  Steps(const HybridCache& cache, const tandem_session_options& options)
      : session_(cache, options), call_(1), append_(kAppended), checked_(kChecked) {
    must(cudaEventCreate(&begin_));
    must(cudaEventCreate(&end_));
  }
  ~Steps() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  // Removes new tokens, so all stages run in the next step.
  void begin_anew() { remove_new_tokens(session_.on); }
  // Returns microseconds per layer.
  double step() {
    const HybridCache& on = session_.on;
    TANDEM(tandem_step_begin, session_.session, on.sequences.data(), session_.q_lens.data(), 1, session_.stream);
    if (session_.replay == nullptr) capture();
    must(cudaEventRecord(begin_, session_.stream));
    must(cudaGraphLaunch(session_.replay, session_.stream));
    must(cudaEventRecord(end_, session_.stream));
    TANDEM(tandem_step_end, session_.session, session_.stream);
    session_.wait();
    float ms = 0.0f;
    must(cudaEventElapsedTime(&ms, begin_, end_));
    return 1e3 * ms / on.n_layers;
  }
  // Returns the larger distance from the CPU's output in the last layer: of a step in which every stage runs, and of an
  // append. NaN is larger than any number.
  double error() {
    begin_anew();
    append(checked_);
    const double of_append = error_of(checked_);
    session_.q_lens[0] = 1;
    begin_anew();
    step();
    const double of_step = error_of(call_);
    return of_step > of_append || std::isnan(of_step) ? of_step : of_append;
  }
  // Returns microseconds per layer.
  double append_us() {
    std::vector<double> times;
    for (int i = 0; i < 4; ++i) {
      begin_anew();
      session_.wait();
      const auto begin = Clock::now();
      append(append_);
      if (i > 0) times.push_back(us_since(begin) / session_.on.n_layers);
    }
    session_.q_lens[0] = 1;
    begin_anew();
    return median(times);
  }

 private:
  void append(Call& call) {
    session_.q_lens[0] = call.o.size() == append_.o.size() ? kAppended : kChecked;
    session_.attend_layers(call.device_view, true, true);
    session_.wait();
  }
  double error_of(Call& call) {
    session_.attend(session_.on.n_layers - 1, call.host_view, false, false);
    return distance_of(call);
  }
  void capture() {
    cudaGraph_t graph;
    must(cudaStreamBeginCapture(session_.stream, cudaStreamCaptureModeThreadLocal));
    session_.attend_layers(call_.device_view, true, true);
    must(cudaStreamEndCapture(session_.stream, &graph));
    must(cudaGraphInstantiate(&session_.replay, graph, 0));
    must(cudaGraphDestroy(graph));
  }

  HybridSession session_;
  Call call_, append_, checked_;
  cudaEvent_t begin_, end_;
};

tandem_session_options options_of(int64_t length) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = length + kRoom;
  options.route = "host";
  return options;
}

struct Dense {
  double step_us, append_us;
};

Dense measure_dense(const HybridCache& cache) {
  const tandem_session_options options = options_of(cache.length);
  Steps steps(cache, options);
  const double append_us = steps.append_us();  // before a graph holds the session's memory
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    const double us = steps.step();
    if (i >= 4) times.push_back(us);
  }
  return {median(times), append_us};
}

bool measure(const HybridCache& cache, const Preset& preset, const Dense& dense, const char* card) {
  tandem_session_options options = options_of(cache.length);
  tandem_pruning pruning = TANDEM_PRUNING_INIT;
  pruning.preset = preset.name.c_str();
  options.policy = "hip";
  options.pruning = &pruning;
  Steps steps(cache, options);
  const double append_us = steps.append_us(), error = steps.error();
  std::vector<double> all, cached, every;
  for (int round = 0; round < 2; ++round) {
    steps.begin_anew();
    for (int64_t i = 0; i < kSteps; ++i) {
      const double us = steps.step();
      if (round == 0) continue;
      every.push_back(us);
      if (preset.runs_all(i)) all.push_back(us);
      if (preset.runs_none(i)) cached.push_back(us);
    }
  }
  double sum = 0.0;
  for (const double us : every) sum += us;
  const bool is_right = error < 1e-2;  // false for NaN
  std::printf(
      "{\"preset\": \"%s\", \"keys\": %lld, \"layers\": %d, \"card\": \"%s\", \"all_us\": %.2f, \"cached_us\": %.2f, "
      "\"average_us\": %.2f, \"dense_us\": %.2f, \"append_us\": %.1f, \"dense_append_us\": %.1f, \"error\": %.1e, "
      "\"is_right\": %s}\n",
      preset.name.c_str(), static_cast<long long>(cache.length), cache.n_layers, card, median(all), median(cached),
      sum / static_cast<double>(every.size()), dense.step_us, append_us, dense.append_us, std::isfinite(error) ? error : 1e9,
      is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 5) {
    std::fprintf(stderr, "pruned_decode_bench MODULE [threads [lengths [presets]]]\n");
    return 2;
  }
  const int32_t n_threads = argc > 2 ? std::atoi(argv[2]) : 0;
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  bool are_right = true;
  for (const int64_t length : numbers_of(argc > 3 ? argv[3] : "32768,131072,524288,1048576")) {
    tandem_engine* engine = make_engine(argv[1], n_threads);
    {
      const auto n_layers = static_cast<int32_t>(std::clamp<int64_t>(kMostBytes / (length * kTokenBytes), 4, 16));
      const HybridCache cache(engine, n_layers, length, 1);
      const Dense dense = measure_dense(cache);
      for (const std::string& name : words_of(argc > 4 ? argv[4] : "small,3k,3k-flash"))
        are_right = measure(cache, find_preset(name), dense, device.name) && are_right;
    }
    tandem_engine_release(engine);
  }
  return are_right ? 0 : 1;
}
