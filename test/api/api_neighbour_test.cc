// SPDX-License-Identifier: MIT
// The bits of an answer do not depend on other sequences that grow in the same cache, whether a sequence's pages are
// adjacent or pages of another sequence lie between them.
#include <bit>
#include <string>
#include <vector>

#include "api_world.h"

using namespace tandem_test;

namespace {

constexpr int64_t kChunks = 9, kChunkTokens = 37, kSteps = 60;
constexpr int32_t kHeadDim = 128, kGroup = 5;

struct Setting {
  const char* isa;
  const char* policy;
  int64_t sliding_window;
  int32_t kv_type;
};

// A sequence that grows by chunks and then by tokens. Neighbours occupy the places where its largest gaps would be.
struct Growth {
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  tandem_session* session = nullptr;
  int64_t sequence = 0;
  std::vector<float> outputs;

  explicit Growth(const Setting& setting) {
    tandem_engine_options engine_options = small_engine_options();
    engine_options.cpu_isa = setting.isa;
    OK(tandem_engine_create, &engine, &engine_options);
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = kGroup;
    layer.n_kv_heads = 1;
    layer.k_head_dim = kHeadDim;
    layer.sliding_window_tokens = setting.sliding_window;
    OK(tandem_model_create, &model, &layer, 1);
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.k_type = setting.kv_type;
    cache_options.page_tokens = 16;
    OK(tandem_cache_create, &cache, engine, model, &cache_options);
    tandem_session_options session_options = TANDEM_SESSION_OPTIONS_INIT;
    session_options.policy = setting.policy;
    session_options.window_tokens = 50;
    session_options.sink_tokens = 3;
    OK(tandem_session_create, &session, cache, &session_options);
    OK(tandem_sequence_create, &sequence, cache);
  }
  ~Growth() {
    tandem_session_release(session);
    tandem_cache_release(cache);
    tandem_model_release(model);
    tandem_engine_release(engine);
  }
  Growth(const Growth&) = delete;
  Growth& operator=(const Growth&) = delete;

  void attend(int64_t q_len, int64_t seed) {
    Tensor q({q_len, kGroup, kHeadDim}, seed), k({q_len, 1, kHeadDim}, seed + 1), v({q_len, 1, kHeadDim}, seed + 2);
    Tensor o({q_len, kGroup, kHeadDim}), lse({q_len, kGroup});
    for (float& x : q.values) x *= 30.0f;
    tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &q_len;
    args.q = &q.view;
    args.k = &k.view;
    args.v = &v.view;
    args.o = &o.view;
    args.lse = &lse.view;
    OK(tandem_attend, session, &args);
    outputs.insert(outputs.end(), o.values.begin(), o.values.end());
    outputs.insert(outputs.end(), lse.values.begin(), lse.values.end());
  }

  void add_neighbour() const {
    Tensor rows({21, 1, kHeadDim}, 999);
    int64_t neighbour = 0;
    OK(tandem_sequence_create, &neighbour, cache);
    OK(tandem_sequence_append, cache, neighbour, 0, &rows.view, &rows.view, nullptr);
  }

  void run(int64_t n_neighbours) {
    for (int64_t i = 0; i < kChunks + kSteps; ++i) {
      attend(i < kChunks ? kChunkTokens : 1, 10 * i);
      if (i == 0)
        for (int64_t j = 0; j < n_neighbours; ++j) add_neighbour();
    }
  }
};

void neighbours_change_no_bit(void**) {
  for (int32_t i = 0; const char* isa = tandem_cpu_isa_name(i); ++i) {
    if (tandem_cpu_isa_available(isa) == 0) continue;
    for (const char* policy : {"all", "streaming", "hgca"}) {
      for (const int64_t sliding_window : {0, 101}) {
        for (const int32_t kv_type : {TANDEM_BF16, TANDEM_Q8_0}) {
          const Setting setting{isa, policy, sliding_window, kv_type};
          Growth alone(setting), crowded(setting);
          alone.run(0);
          crowded.run(30);
          size_t n_different = 0;
          for (size_t j = 0; j < alone.outputs.size(); ++j)
            n_different += std::bit_cast<uint32_t>(alone.outputs[j]) != std::bit_cast<uint32_t>(crowded.outputs[j]);
          if (n_different == 0) continue;
          print_error("%s, %s, sliding window %lld, %s: %zu of %zu outputs differ\n", isa, policy,
                      static_cast<long long>(sliding_window), tandem_dtype_name(kv_type), n_different, alone.outputs.size());
          _fail(__FILE__, __LINE__);
        }
      }
    }
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(neighbours_change_no_bit)};
  return cmocka_run_group_tests_name("api_neighbour_test", tests, nullptr, nullptr);
}
