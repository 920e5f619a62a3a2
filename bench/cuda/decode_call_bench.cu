// SPDX-License-Identifier: MIT
// Whole decode calls and short appends over keys that the window has, through the C ABI: microseconds a layer.
//
//   decode_call_bench MODULE [threads [cases]]     cases: lists with commas of KEYSxSEQUENCESxQUERIES
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16, so many that their keys are 600 MB and more, one after the
// other as a step that a graph replays: each call appends its rows and attends them with the rest. Beside it the same calls
// without a plan. Medians of rounds that take turns, until the stream is done, divided by the layers. Before a case is
// timed, its output is compared with the CPU's, which attends the same keys in the host store. A JSON line for each case;
// decode_rivals.py has what others take.
#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int64_t kLeastBytes = int64_t{600} << 20;
constexpr int kRounds = 21;

struct Case {
  int64_t keys = 0, batch = 1, queries = 1;
};

Case case_of(const std::string& word) {
  Case of;
  if (std::sscanf(word.c_str(), "%ldx%ldx%ld", &of.keys, &of.batch, &of.queries) >= 1) return of;
  std::fprintf(stderr, "%s is no KEYSxSEQUENCESxQUERIES\n", word.c_str());
  std::exit(2);
}

bool measure(tandem_engine* engine, const Case& of, const char* card) {
  const int64_t layer_bytes = of.keys * of.batch * kTokenBytes;
  const auto n_layers = static_cast<int32_t>(std::max<int64_t>(2, (kLeastBytes + layer_bytes - 1) / layer_bytes));
  const HybridCache cache(engine, n_layers, of.keys, of.batch);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = of.keys + (2 * kRounds + 8) * of.queries;
  options.route = "host";
  HybridSession session(cache, options);
  session.q_lens.assign(session.q_lens.size(), of.queries);
  Call call(of.batch * of.queries);
  const auto pass = [&](bool replays) {
    const auto begin = Clock::now();
    if (replays)
      session.step(call.device_view, true);
    else
      session.attend_layers(call.device_view, true, true);
    session.wait();
    return us_since(begin) / n_layers;
  };
  pass(false);  // fills the windows
  double error = 0.0;
  for (const bool replays : {false, true, true}) {  // its last layer's output, and the CPU's of the same queries
    pass(replays);
    session.attend(n_layers - 1, call.host_view, false, false);
    error = std::max(error, distance_of(call));
  }
  std::vector<double> planned, eager;
  for (int i = 0; i < kRounds; ++i) {
    planned.push_back(pass(true));
    eager.push_back(pass(false));
  }
  const bool is_right = error < 1e-2;
  std::printf(
      "{\"card\": \"%s\", \"keys\": %ld, \"sequences\": %ld, \"queries\": %ld, \"layers\": %d, \"planned_us\": %.1f, "
      "\"eager_us\": %.1f, \"error\": %.1e, \"is_right\": %s}\n",
      card, of.keys, of.batch, of.queries, n_layers, median(planned), median(eager), error, is_right ? "true" : "false");
  std::fflush(stdout);
  return is_right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "decode_call_bench MODULE [threads [cases]]\n");
    return 2;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0));
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  bool are_right = true;
  for (const std::string& word : words_of(argc > 3 ? argv[3] : "4096x1x1,16384x1x1,65536x1x1,131072x1x1,4096x16x1"))
    are_right = measure(engine, case_of(word), device.name) && are_right;
  tandem_engine_release(engine);
  return are_right ? 0 : 1;
}
