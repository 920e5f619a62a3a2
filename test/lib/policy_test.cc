// SPDX-License-Identifier: MIT
// The HGCA rule on plain data, the options of sessions, and the length of evictions.
#include "lib/policy/policy.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "lib/select/hgca.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

std::vector<int32_t> select(const PolicyOptions& options, bool eviction, int64_t host_len,
                            const std::vector<std::vector<float>>& maw) {
  std::vector<const float*> rows;
  for (const auto& row : maw) rows.push_back(row.data());
  SelectInput input;
  input.options = &options;
  input.eviction = eviction;
  input.host_len = host_len;
  input.group_size = static_cast<int32_t>(rows.size());
  input.maw = rows.data();
  input.n_tokens = static_cast<int64_t>(maw[0].size());
  int64_t halo_left = 0;
  input.halo_left = &halo_left;
  std::vector<int32_t> kept(maw[0].size());
  kept.resize(static_cast<size_t>(hgca_select(input, kept.data())));
  return kept;
}

void keeps_what_any_head_keeps(void**) {
  PolicyOptions options;
  options.halo_len = 0;
  options.window_len = 10;
  options.beta = 1.0f;
  // The threshold at eviction is 1 / 10, and a MAW must exceed it.
  const std::vector<std::vector<float>> maw = {{0.0f, 0.11f, 0.1f, 0.05f, 0.0f}, {0.2f, 0.0f, 0.1f, 0.09f, 0.0f}};
  assert_true(select(options, true, 1000, maw) == (std::vector<int32_t>{0, 1}));
  options.beta = 0.85f;
  assert_true(select(options, true, 1000, maw) == (std::vector<int32_t>{0, 1, 2, 3}));
}

void threshold_follows_the_host_size(void**) {
  PolicyOptions options;
  options.halo_len = 0;
  options.window_len = 10;
  options.beta = 1.0f;
  const std::vector<std::vector<float>> maw = {{0.0f, 0.02f, 0.009f, 0.011f}};
  assert_true(select(options, false, 100, maw) == (std::vector<int32_t>{1, 3}));
  assert_true(select(options, true, 100, maw).empty());
  options.beta = 0.0f;  // selects every key that was ever attended
  assert_true(select(options, false, 100, maw) == (std::vector<int32_t>{1, 2, 3}));
  options.beta = 1.0f;  // no division by zero
  assert_true(select(options, false, 0, maw).empty());
}

void strong_keys_keep_their_halo(void**) {
  PolicyOptions options;
  options.beta = 1.0f;
  options.halo_len = 2;
  // Threshold 1 / 200. A second strong key restarts the halo. A key that is kept but not strong has no halo.
  const std::vector<std::vector<float>> maw = {{0.0f, 0.5f, 0.0f, 0.02f, 0.0f, 0.0f, 0.0f, 0.006f, 0.0f}};
  assert_true(select(options, false, 200, maw) == (std::vector<int32_t>{1, 2, 3, 4, 5, 7}));
  // The halo continues in the next block of tokens.
  float next[3] = {0.0f, 0.0f, 0.0f};
  const float* rows[] = {next};
  int64_t halo_left = 2;
  SelectInput input;
  input.options = &options;
  input.host_len = 200;
  input.group_size = 1;
  input.maw = rows;
  input.n_tokens = 3;
  input.halo_left = &halo_left;
  int32_t kept[3];
  assert_int_equal(hgca_select(input, kept), 2);
  assert_int_equal(halo_left, 0);
}

void evictions_come_in_blocks(void**) {
  assert_int_equal(evict_len(1024, 128), 128);
  assert_int_equal(evict_len(4096, 128), 128);
  assert_int_equal(evict_len(64, 128), 8);
  assert_int_equal(evict_len(7, 128), 1);
  assert_int_equal(evict_len(0, 128), 1);
}

void refuses_bad_options(void**) {
  const auto code = [](void (*change)(tandem_session_options&), const char* field) {
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    change(options);
    LayerPolicies policies;
    PolicyOptions resolved;
    Status status = LayerPolicies::resolve(options, {Layer(), Layer()}, &policies);
    if (status.ok()) status = resolve_policy_options(options, &resolved);
    if (field != nullptr) assert_string_equal(status.info().field.c_str(), field);
    return status.code();
  };
  assert_int_equal(code([](auto&) {}, nullptr), TANDEM_OK);
  assert_int_equal(code([](auto& o) { o.policy = "nothing"; }, "policy"), TANDEM_ERROR_NOT_FOUND);
  static const char* const names[] = {"hgca", "nothing"};
  static const char* const missing[] = {"all", nullptr};
  static const auto set = [](tandem_session_options& o, const char* const* policies, int64_t n) {
    o.layer_policies = policies;
    o.n_layer_policies = n;
  };
  assert_int_equal(code([](auto& o) { set(o, names, 2); }, "layer_policies[1]"), TANDEM_ERROR_NOT_FOUND);
  assert_int_equal(code([](auto& o) { set(o, missing, 2); }, "layer_policies[1]"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { set(o, names, 1); }, "n_layer_policies"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { set(o, nullptr, 2); }, "layer_policies"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.window_tokens = -2; }, "window_tokens"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.sink_tokens = INT64_MAX; }, "sink_tokens"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.halo_tokens = -2; }, "halo_tokens"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.alpha = 1.5f; }, "alpha"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.alpha = NAN; }, "alpha"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.beta = -0.5f; }, "beta"), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(code([](auto& o) { o.beta = INFINITY; }, "beta"), TANDEM_ERROR_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace tandem

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tandem::keeps_what_any_head_keeps),   cmocka_unit_test(tandem::threshold_follows_the_host_size),
      cmocka_unit_test(tandem::strong_keys_keep_their_halo), cmocka_unit_test(tandem::evictions_come_in_blocks),
      cmocka_unit_test(tandem::refuses_bad_options),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
