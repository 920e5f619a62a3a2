// SPDX-License-Identifier: MIT
// A GPU that fails for good. Calls report it soon, the host has every token that had arrived, and the same session goes on
// with host tensors. An engine without a device is the twin. A failed GPU breaks CUDA for the whole process, so each test
// runs in a process of its own.
//
//   lost_device_test [MODULE]
#include <sys/wait.h>
#include <unistd.h>

#include "hybrid_case.h"
#include "with_cmocka.h"

using namespace tandem::test;

namespace {

constexpr int32_t kLayers = 2;
constexpr int64_t kPrompt = 900, kBatch = 2;
constexpr double kRounding = 1.0 / 256;  // of bf16 outputs

const char* module_path = nullptr;

__global__ void trap_kernel() { asm volatile("trap;\n"); }

// Ends the test's process if the condition is false.
void require(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "%s\n", what);
  _exit(1);
}

struct Pair {
  tandem_engine *with_device = make_engine(module_path, 4), *without = nullptr;
  tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;

  explicit Pair(const char* policy) {
    TANDEM(tandem_engine_create, &without, nullptr);
    options.policy = policy;
    options.window_tokens = 256;
  }
  ~Pair() {
    tandem_engine_release(with_device);
    tandem_engine_release(without);
  }
};

uint64_t digest_of(const HybridCache& cache) {
  uint64_t all = 0, digest = 0;
  for (const int64_t id : cache.sequences) {
    TANDEM(tandem_sequence_digest, &digest, cache.cache, id);
    all = all * 31 + digest;
  }
  return all;
}

// Attends the same tokens on both sides, the session on the GPU if on_device, and compares the outputs.
void attend_both(HybridSession& session, HybridSession& twin, uint64_t seed, bool on_device) {
  Call call(kBatch, seed);
  for (int32_t l = 0; l < kLayers; ++l) {
    session.attend(l, on_device ? call.device_view : call.host_view, true, on_device);
    session.wait();
    twin.attend(l, call.host_view, true, false);
    if (on_device) require(distance_of(call) <= kRounding, "outputs differ");
  }
}

// Attends host tensors on both sides. MAW of keys in the window are lost with the GPU, so selections may differ: then
// is_exact is false.
void attend_on_hosts(HybridSession& session, HybridSession& twin, uint64_t seed, bool is_exact) {
  std::vector<__nv_bfloat16> rows[3] = {random_rows(kBatch * kQHeads * kDim, seed),
                                        random_rows(kBatch * kKvHeads * kDim, seed + 1),
                                        random_rows(kBatch * kKvHeads * kDim, seed + 2)};
  for (int32_t l = 0; l < kLayers; ++l) {
    std::vector<__nv_bfloat16> o[2];
    for (HybridSession* one : {&session, &twin}) {
      std::vector<__nv_bfloat16>& out = o[one == &twin];
      out.assign(rows[0].size(), __float2bfloat16(NAN));
      const tandem_tensor views[] = {
          tensor_of(rows[0].data(), kBatch, kQHeads, false), tensor_of(rows[1].data(), kBatch, kKvHeads, false),
          tensor_of(rows[2].data(), kBatch, kKvHeads, false), tensor_of(out.data(), kBatch, kQHeads, false)};
      one->attend(l, views, true, false);
    }
    for (size_t i = 0; i < o[0].size(); ++i)
      require(is_exact ? std::fabs(__bfloat162float(o[0][i]) - __bfloat162float(o[1][i])) <= 0.02f
                       : std::isfinite(__bfloat162float(o[0][i])),
              "host outputs differ");
  }
}

// Repeats a call until it fails, and returns its status.
int32_t call_until_refused(HybridSession& session, const Call& call, bool in_steps) {
  const auto begin = Clock::now();
  tandem_attend_args args = TANDEM_ATTEND_ARGS_INIT;
  args.n_sequences = kBatch;
  args.sequences = session.on.sequences.data();
  args.q_lens = session.q_lens.data();
  args.q = &call.device_view[0], args.k = &call.device_view[1], args.v = &call.device_view[2], args.o = &call.device_view[3];
  args.stream = session.stream;
  for (int32_t status = TANDEM_OK;;) {
    require(us_since(begin) < 10e6, "a lost device is not noticed");
    tandem_error* error = nullptr;
    if (in_steps) status = tandem_step_begin(session.session, args.sequences, args.q_lens, kBatch, session.stream, &error);
    for (args.layer_idx = 0; status == TANDEM_OK && args.layer_idx < kLayers; ++args.layer_idx)
      status = tandem_attend(session.session, &args, &error);
    if (in_steps) {
      tandem_error* at_end = nullptr;
      const int32_t ended = tandem_step_end(session.session, session.stream, &at_end);
      if (status == TANDEM_OK) status = ended;
      tandem_error_release(at_end);
    }
    if (status == TANDEM_OK) continue;
    std::printf("after %.0f us: %s\n", us_since(begin), tandem_error_message(error));
    tandem_error_release(error);
    return status;
  }
}

void lose(const char* policy, bool in_steps) {
  const Pair pair(policy);
  const HybridCache cache(pair.with_device, kLayers, kPrompt, kBatch), twin_cache(pair.without, kLayers, kPrompt, kBatch);
  HybridSession session(cache, pair.options), twin(twin_cache, pair.options);
  for (uint64_t i = 0; i < 40; ++i) attend_both(session, twin, 10 * i, true);
  TANDEM(tandem_engine_drain, pair.with_device, -1);
  const Call call(kBatch, 1);
  trap_kernel<<<1, 1, 0, session.stream>>>();
  require(call_until_refused(session, call, in_steps) == TANDEM_ERROR_DEVICE_LOST, "it is not said to be lost");
  require(call_until_refused(session, call, false) == TANDEM_ERROR_DEVICE_LOST, "it is not lost for good");
  for (const int64_t id : cache.sequences) TANDEM(tandem_sequence_truncate, cache.cache, id, kPrompt + 40);
  require(digest_of(cache) == digest_of(twin_cache), "tokens differ");
  for (uint64_t i = 0; i < 40; ++i) attend_on_hosts(session, twin, 7000 + 10 * i, std::strcmp(policy, "all") == 0);
  require(digest_of(cache) == digest_of(twin_cache), "tokens differ later");
}

void run_apart(const char* policy, bool in_steps) {
  std::fflush(nullptr);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    alarm(60);
    lose(policy, in_steps);
    std::exit(0);  // with everything that ends at exit
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  if (status != 0) fail_msg("%s: the process ended with status 0x%x", policy, status);
}

void calls_say_so(void**) { run_apart("all", false); }
void calls_that_select_say_so(void**) { run_apart("hgca", false); }
void planned_steps_say_so(void**) { run_apart("hgca", true); }

}  // namespace

int main(int argc, char** argv) {
  module_path = argc > 1 ? argv[1] : TANDEM_MODULE;
  const CMUnitTest tests[] = {cmocka_unit_test(calls_say_so), cmocka_unit_test(calls_that_select_say_so),
                              cmocka_unit_test(planned_steps_say_so)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
