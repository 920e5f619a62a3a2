// SPDX-License-Identifier: MIT
// A whole prompt and the first token decoded after it, by policy: milliseconds per layer, through the C ABI.
//
//   prompt_bench MODULE [threads [tokens [call_lens [layers [window]]]]]     lists with commas; call_len 0: one call
//
// Layers of 32 query heads and 8 KV heads of 128 dims in bf16, one after the other as in a model. Each call goes through all
// of them. Policies take turns, with their default route; "all" is the baseline. Before times are printed, the last outputs
// under "hgca" are compared with those of "all", as a prompt attends every key under both. Then the keys that "hgca" has
// selected are compared with those of another "hgca" session, which appends only the prompt's last 64 tokens. A session of
// policy "all" has appended the tokens before these.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int kRounds = 3;
constexpr int64_t kTail = 64;

// Fills rows with nearly normal numbers of this deviation, computed from their index.
__global__ void fill_rows(__nv_bfloat16* rows, int64_t n, float deviation, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint64_t x = (static_cast<uint64_t>(i) + seed * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 31)) * 0x94D049BB133111EBu;
  x ^= x >> 29;
  float sum = 0.0f;  // sum of four uniform numbers
  for (int part = 0; part < 4; ++part) sum += static_cast<float>(x >> (16 * part) & 0xffff) * 0x1p-16f - 0.5f;
  rows[i] = __float2bfloat16(sum * 1.7320508f * deviation);
}

// The prompt's tensors, in device memory.
struct Prompt {
  int64_t n;
  __nv_bfloat16* rows[4];

  Prompt(int64_t n_tokens, uint64_t seed) : n(n_tokens) {
    for (int i = 0; i < 4; ++i) {
      const int64_t n_numbers = n * dims(i);
      must(cudaMalloc(&rows[i], static_cast<size_t>(n_numbers) * 2));
      // Logits have deviation 3, so each head has a few keys that matter.
      fill_rows<<<static_cast<unsigned>((n_numbers + 255) / 256), 256>>>(rows[i], n_numbers, i == 0 ? 3.0f : 1.0f, seed + i);
    }
    must(cudaDeviceSynchronize());
  }
  Prompt(const Prompt&) = delete;
  ~Prompt() {
    for (__nv_bfloat16* data : rows) cudaFree(data);
  }
  static int64_t dims(int i) { return int64_t{i % 3 == 0 ? kQHeads : kKvHeads} * kDim; }
  // Attends tokens [first, first + n_tokens).
  void attend(HybridSession& session, int64_t first, int64_t n_tokens) const {
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i)
      views[i] = tensor_of(rows[i] + first * dims(i), n_tokens, i % 3 == 0 ? kQHeads : kKvHeads, true);
    session.q_lens.assign(1, n_tokens);
    session.attend_layers(views, true, true);
  }
  std::vector<__nv_bfloat16> output(int64_t first, int64_t n_tokens) const {
    std::vector<__nv_bfloat16> made(static_cast<size_t>(n_tokens * dims(3)));
    must(cudaMemcpy(made.data(), rows[3] + first * dims(3), made.size() * 2, cudaMemcpyDeviceToHost));
    return made;
  }
};

tandem_session_options options_of(const char* policy, int64_t window) {
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.policy = policy;
  options.window_tokens = window;
  return options;
}

struct Run {
  double prompt_ms = 0.0, first_ms = 0.0, later_ms = 0.0, streamed_mb = 0.0, host_mb = 0.0;
  std::vector<__nv_bfloat16> last;  // the last 4,096 outputs
};

std::vector<std::vector<int64_t>> selection_of(const HybridSession& session, int64_t sequence, int64_t n_tokens) {
  std::vector<std::vector<int64_t>> selected;
  for (int32_t h = 0; h < kKvHeads; ++h) {
    std::vector<int64_t> tokens(static_cast<size_t>(n_tokens));
    int64_t n = 0;
    TANDEM(tandem_session_selection, tokens.data(), nullptr, n_tokens, &n, session.session, sequence, 0, h, 0);
    tokens.resize(static_cast<size_t>(n));
    selected.push_back(std::move(tokens));
  }
  return selected;
}

struct Terms {
  int64_t call_len, window;
  int32_t n_layers;
};

// Runs the prompt in calls of call_len, and decodes after it.
Run run_once(tandem_engine* engine, const Prompt& prompt, const Prompt& decoded, const char* policy, const Terms& terms) {
  const int64_t call_len = terms.call_len;
  const int32_t n_layers = terms.n_layers;
  const HybridCache cache(engine, n_layers, 0, 1);
  TANDEM(tandem_sequence_reserve, cache.cache, cache.sequences[0], prompt.n + 1000);
  HybridSession session(cache, options_of(policy, terms.window));
  Run run;
  auto begin = Clock::now();
  for (int64_t first = 0; first < prompt.n; first += call_len)
    prompt.attend(session, first, std::min(call_len, prompt.n - first));
  session.wait();
  run.prompt_ms = us_since(begin) / n_layers * 1e-3;
  run.last = prompt.output(std::max<int64_t>(0, prompt.n - 4096), std::min<int64_t>(prompt.n, 4096));
  std::vector<double> times;
  for (int64_t t = 0; t < decoded.n; ++t) {
    begin = Clock::now();
    decoded.attend(session, t, 1);
    session.wait();
    times.push_back(us_since(begin) / n_layers * 1e-3);
  }
  run.first_ms = times[0];
  run.later_ms = median({times.begin() + 1, times.end()});
  const tandem_session_stats stats = session.stats();
  run.streamed_mb = static_cast<double>(stats.streamed_kv_bytes) / n_layers * 1e-6;
  run.host_mb = static_cast<double>(stats.host_kv_bytes_read) / n_layers * 1e-6;
  return run;
}

// Compares the selection of "hgca" after the whole prompt with its selection after another session has appended all but the
// tail.
void compare_selections(tandem_engine* engine, const Prompt& prompt, int64_t window) {
  const HybridCache cache(engine, 1, 0, 1);
  HybridSession whole(cache, options_of("hgca", window));
  const HybridCache other(cache, 0, 1);  // another sequence of the same cache
  HybridSession appended(other, options_of("all", window)), found(other, options_of("hgca", window));
  prompt.attend(whole, 0, prompt.n);
  whole.wait();
  prompt.attend(appended, 0, prompt.n - kTail);
  appended.wait();
  prompt.attend(found, prompt.n - kTail, kTail);
  found.wait();
  const auto a = selection_of(whole, cache.sequences[0], prompt.n), b = selection_of(found, other.sequences[0], prompt.n);
  size_t n_all = 0, n_both = 0;
  for (int32_t h = 0; h < kKvHeads; ++h) {
    std::vector<int64_t> both;
    std::set_intersection(a[h].begin(), a[h].end(), b[h].begin(), b[h].end(), std::back_inserter(both));
    n_both += both.size();
    n_all += a[h].size() + b[h].size() - both.size();
  }
  const double share = static_cast<double>(n_both) / static_cast<double>(n_all);
  std::printf("selected %zu keys of %lld x %d; in common with a prompt that policy \"all\" has appended: %.6f\n", n_both,
              static_cast<long long>(prompt.n), kKvHeads, share);
  if (!(share > 0.999) || n_both == 0) std::exit(1);
}

void measure(tandem_engine* engine, const Prompt& prompt, const Terms& terms) {
  const Prompt decoded(9, 77);
  const char* policies[] = {"all", "hgca"};
  std::vector<Run> runs[2];
  for (int round = 0; round < kRounds; ++round)
    for (int i = 0; i < 2; ++i) runs[i].push_back(run_once(engine, prompt, decoded, policies[i], terms));
  const double far = distance(runs[1].back().last, runs[0].back().last);
  if (!(far < 0.01)) {
    std::printf("relative distance of outputs: %.2e\n", far);
    std::exit(1);
  }
  double sums[2] = {};
  for (int i = 0; i < 2; ++i) {
    const auto middle = [&](double Run::*member) {
      std::vector<double> values;
      for (const Run& run : runs[i]) values.push_back(run.*member);
      return median(values);
    };
    const double prompt_ms = middle(&Run::prompt_ms), first_ms = middle(&Run::first_ms);
    sums[i] = prompt_ms + first_ms;
    std::printf(
        "  %-5s calls of %6lld: prompt %8.2f ms  first token %7.2f ms  later %6.2f ms  streamed %7.0f MB  by the CPU "
        "%7.0f MB\n",
        policies[i], static_cast<long long>(terms.call_len), prompt_ms, first_ms, middle(&Run::later_ms),
        runs[i].back().streamed_mb, runs[i].back().host_mb);
  }
  std::printf("  hgca / all, prompt and first token: %.3f (outputs differ by %.1e)\n", sums[1] / sums[0], far);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "prompt_bench MODULE [threads [tokens [call_lens [layers [window]]]]]\n");
    return 2;
  }
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  const int64_t window = argc > 6 ? std::atoll(argv[6]) : 4096;
  const int32_t n_layers = argc > 5 ? std::atoi(argv[5]) : 1;
  for (const int64_t n : numbers_of(argc > 3 ? argv[3] : "131072")) {
    const Prompt prompt(n, 5);
    compare_selections(engine, prompt, window);
    for (const int64_t call_len : numbers_of(argc > 4 ? argv[4] : "0,4096"))
      measure(engine, prompt, {call_len == 0 ? n : call_len, window, n_layers});
  }
  tandem_engine_release(engine);
  return 0;
}
