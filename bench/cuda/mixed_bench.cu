// SPDX-License-Identifier: MIT
// A call with single queries of some sequences and an append to another one, compared with two calls that do the same one
// after the other: microseconds, through the C ABI, interleaved.
//
//   mixed_bench MODULE [threads [lengths [decodes [appended [window]]]]]     lists with commas
//
// One layer of 32 query heads and 8 KV heads of 128 dims in bf16. Sequences have `length` tokens when a call begins. New
// tokens are truncated away after it, untimed. The mixed call has the single queries first. Before times are printed, its
// outputs are compared with those of the two calls.
#include <cstdio>

#include "cuda/hybrid_case.h"

using namespace tandem::test;

namespace {

constexpr int kRounds = 40;

struct Batch {
  const HybridCache& cache;
  HybridSession session;
  Call call;
  int64_t n_decodes, n_appended;

  Batch(const HybridCache& on, const tandem_session_options& options, int64_t appended)
      : cache(on), session(on, options), call(on.batch - 1 + appended), n_decodes(on.batch - 1), n_appended(appended) {}

  // Attends sequences [first, first + n), with rows from `first` on.
  void attend(int64_t first, int64_t n) const {
    std::vector<int64_t> q_lens(static_cast<size_t>(n), 1);
    if (first + n == cache.batch) q_lens.back() = n_appended;
    int64_t n_rows = 0;
    for (const int64_t q_len : q_lens) n_rows += q_len;
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i) {
      const int32_t n_heads = i % 3 == 0 ? kQHeads : kKvHeads;
      views[i] = tensor_of(static_cast<__nv_bfloat16*>(call.device[i]) + first * n_heads * kDim, n_rows, n_heads, true);
    }
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = static_cast<int32_t>(n);
    args.sequences = cache.sequences.data() + first;
    args.q_lens = q_lens.data();
    args.q = &views[0];
    args.k = &views[1];
    args.v = &views[2];
    args.o = &views[3];
    args.stream = session.stream;
    TANDEM(tandem_attend, session.session, &args);
  }
  double time(bool is_mixed) const {
    const auto begin = Clock::now();
    if (is_mixed) {
      attend(0, cache.batch);
    } else {
      attend(0, n_decodes);
      attend(n_decodes, 1);
    }
    session.wait();
    const double us = us_since(begin);
    for (const int64_t id : cache.sequences) TANDEM(tandem_sequence_truncate, cache.cache, id, cache.length);
    return us;
  }
};

void measure(tandem_engine* engine, int64_t length, int64_t n_decodes, int64_t appended, int64_t window) {
  const HybridCache cache(engine, 1, length, n_decodes + 1);
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
  options.window_tokens = window > 0 ? window : length + appended;
  const Batch batch(cache, options, appended);
  std::vector<double> mixed, apart;
  std::vector<__nv_bfloat16> outputs[2];
  for (int round = 0; round < kRounds + 3; ++round)
    for (const bool is_mixed : {true, false}) {
      const double us = batch.time(is_mixed);
      if (round == 0) outputs[is_mixed ? 0 : 1] = batch.call.device_output();
      if (round >= 3) (is_mixed ? mixed : apart).push_back(us);
    }
  double most = 0.0;
  for (size_t i = 0; i < outputs[0].size(); ++i) {
    const double d = std::abs(static_cast<double>(__bfloat162float(outputs[0][i])) - __bfloat162float(outputs[1][i]));
    most = d > most || !(d == d) ? d : most;
  }
  if (!(most < 0.05)) {
    std::printf("outputs differ by %.2e\n", most);
    std::exit(1);
  }
  std::printf("%7lld tokens, %3lld single queries and %5lld appended: one call %8.1f us, two calls %8.1f us, %.3f\n",
              static_cast<long long>(length), static_cast<long long>(n_decodes), static_cast<long long>(appended),
              median(mixed), median(apart), median(mixed) / median(apart));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "mixed_bench MODULE [threads [lengths [decodes [appended [window]]]]]\n");
    return 2;
  }
  const auto list = [&](int at, const char* otherwise) { return numbers_of(argc > at ? argv[at] : otherwise); };
  tandem_engine* engine = make_engine(argv[1], argc > 2 ? std::atoi(argv[2]) : 0);
  for (const int64_t length : list(3, "4096,16384"))
    for (const int64_t decodes : list(4, "8,32"))
      for (const int64_t appended : list(5, "256,2048"))
        measure(engine, length, decodes, appended, argc > 6 ? std::atoll(argv[6]) : 0);
  tandem_engine_release(engine);
  return 0;
}
