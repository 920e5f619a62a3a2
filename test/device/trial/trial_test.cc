// SPDX-License-Identifier: MIT
// A policy and a route that the library does not have, each added as a developer would add it: a file, and a line in a
// table.
#include <algorithm>
#include <cmath>

#include "device/device_side.h"

using namespace tandem_test;

namespace {

std::vector<int64_t> kept_tokens(const Side& side, int32_t kv_head) {
  std::vector<int64_t> tokens(static_cast<size_t>(side.length()));
  int64_t n = 0;
  OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, side.session, side.sequence, 0, kv_head, 0);
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

std::vector<float> stored(const Side& side, bool is_v) {
  Tensor rows({side.length(), kKvHeads, kDim});
  const tandem_tensor* const k = is_v ? nullptr : &rows.view;
  const tandem_tensor* const v = is_v ? &rows.view : nullptr;
  OK(tandem_sequence_read, k, v, side.cache, side.sequence, 0, 0);
  return rows.values;
}

// Returns attention of the call's only query, in double precision, over the tokens that the session says its head has kept.
std::vector<float> reference(const Side& side, const Call& call) {
  const std::vector<float> k = stored(side, false), v = stored(side, true);
  std::vector<float> o;
  for (int32_t h = 0; h < kQHeads; ++h) {
    const int32_t kv_head = h / (kQHeads / kKvHeads);
    const std::vector<int64_t> tokens = kept_tokens(side, kv_head);
    std::vector<double> sums(kDim, 0.0);
    double weights = 0.0;
    for (const int64_t token : tokens) {
      const size_t row = static_cast<size_t>(token * kKvHeads + kv_head) * kDim;
      double logit = 0.0;
      for (size_t d = 0; d < kDim; ++d)
        logit += static_cast<double>(call.q.values[static_cast<size_t>(h) * kDim + d]) * static_cast<double>(k[row + d]);
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(kDim)));
      weights += weight;
      for (size_t d = 0; d < kDim; ++d) sums[d] += weight * static_cast<double>(v[row + d]);
    }
    for (const double sum : sums) o.push_back(static_cast<float>(sum / weights));
  }
  return o;
}

// A prompt, appends, and decode calls whose heads attend blocks of their own.
void attends_random_blocks(bool on_device) {
  const Side side(on_device, "random blocks");
  int64_t seed = 7, n_kept = 0, n_outside = 0;
  for (const int64_t n : {kPrompt, int64_t{1}, int64_t{1}, int64_t{40}, int64_t{1}, int64_t{1}}) {
    Call call(n, seed++);
    if (on_device) call.to_device();
    attend(side, call);
    const std::vector<float> o = call.output();
    if (n > 1) continue;
    assert_close(o, reference(side, call));
    for (int32_t h = 0; h < kKvHeads; ++h) n_kept += std::ssize(kept_tokens(side, h)) - kWindow;
    n_outside += kKvHeads * (side.length() - kWindow);
  }
  assert_in_range(n_kept, n_outside / 4, 3 * n_outside / 4);
  assert_true(kept_tokens(side, 0) != kept_tokens(side, 1));
}

void attends_random_blocks_on_the_host(void**) { attends_random_blocks(false); }
void attends_random_blocks_on_a_device(void**) { attends_random_blocks(true); }

void is_listed(void**) {
  const char* name = nullptr;
  int32_t n = 0;
  while (name = tandem_policy_name(n), name != nullptr) ++n;
  assert_int_equal(n, 4);
  assert_string_equal(tandem_policy_name(3), "random blocks");
}

// A refused call changes nothing. A call with no key outside the window has no keys to move, so it is not refused.
void refuses_calls_that_take_the_route(void**) {
  Side side(true);
  tandem_session_options options = Side::options_of("all");
  options.route = "refusing";
  change_session(&side, options);
  Call first(kPrompt, 3);
  first.to_device();
  attend(side, first);
  const uint64_t before = side.digest();
  Call next(1, 4);
  next.to_device();
  const tandem_attend_args args = next.args(side);
  tandem_error* error = nullptr;
  const int32_t got = tandem_attend(side.session, &args, &error);
  assert_refused(got, error, TANDEM_ERROR_UNSUPPORTED, "route", "takes no keys");
  assert_int_equal(side.digest(), before);
  options.route = "refuse";
  refuse_session(side, options, TANDEM_ERROR_NOT_FOUND, "route", "auto, host, stream, host+stream, recompute, refusing");
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(is_listed, forget),
      cmocka_unit_test_teardown(attends_random_blocks_on_the_host, forget),
      cmocka_unit_test_teardown(attends_random_blocks_on_a_device, forget),
      cmocka_unit_test_teardown(refuses_calls_that_take_the_route, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
