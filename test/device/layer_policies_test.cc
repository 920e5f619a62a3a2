// SPDX-License-Identifier: MIT
// Sessions with a policy for each layer: each layer attends as in a session that has its policy for all layers.
#include <array>

#include "device/device_side.h"

using namespace tandem_test;

namespace {

constexpr std::array<const char*, 3> kPolicies = {"all", "hgca", "streaming"};
constexpr int32_t kLayers = 3;

tandem_session_options mixed_options() {
  tandem_session_options options = Side::options_of("all");
  options.layer_policies = kPolicies.data();
  options.n_layer_policies = kLayers;
  return options;
}

void attends_as_each(bool on_device, const char* route) {
  Side side(on_device, "all", 0, kLayers);
  tandem_session_options options = mixed_options();
  options.route = route;
  options.stream_buffer_bytes = 64 * kDim * 2 * 2 * 3 / 2;
  change_session(&side, options);
  const Side twins[] = {Side(false, kPolicies[0], 0, kLayers), Side(false, kPolicies[1], 0, kLayers),
                        Side(false, kPolicies[2], 0, kLayers)};
  int64_t seed = 1;
  for (const int64_t n : {700, 1, 1, 30, 1, 300, 1, 1, 1}) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      Call mixed(n, seed);
      if (on_device) mixed.to_device();
      attend(side, mixed, layer);
      for (int32_t t = 0; t < kLayers; ++t) {
        Call alone(n, seed);
        attend(twins[t], alone, layer);
        if (t == layer && on_device) assert_close(mixed.output(), alone.output());
        if (t == layer && !on_device) assert_true(mixed.output() == alone.output());
      }
      ++seed;
    }
  }
}

void attends_as_each_on_the_host(void**) { attends_as_each(false, nullptr); }

void attends_as_each_on_a_device(void**) {
  for (const char* route : {"host", "stream", "auto"}) attends_as_each(true, route);
}

void refuses(void**) {
  const Side side(true, "all", 0, kLayers);
  tandem_session_options options = mixed_options();
  options.route = "recompute";
  refuse_session(side, options, TANDEM_ERROR_UNSUPPORTED, "route", "policy \"hgca\" in layer 1");
  const std::array<uint8_t, kLayers* kKvHeads> flags = {1};
  options = mixed_options();
  options.streaming_heads = flags.data();
  options.n_streaming_heads = std::ssize(flags);
  refuse_session(side, options, TANDEM_ERROR_UNSUPPORTED, "streaming_heads", "policy \"hgca\" in layer 1");
  options = mixed_options();
  options.n_layer_policies = 2;
  refuse_session(side, options, TANDEM_ERROR_INVALID_ARGUMENT, "n_layer_policies", "the model has 3 layers");
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test_teardown(attends_as_each_on_the_host, forget),
      cmocka_unit_test_teardown(attends_as_each_on_a_device, forget),
      cmocka_unit_test_teardown(refuses, forget),
  };
  return cmocka_run_group_tests(tests, open_stand_in, close_stand_in);
}
