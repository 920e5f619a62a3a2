// SPDX-License-Identifier: MIT
// Random streams of calls compared with the oracle, with tensors in device memory. The device is DEVICE_BACKEND, or that of
// the module named on the command line.
#include <dlfcn.h>

#include <cstdio>
#include <memory>

#include "device/stand_in.h"
#include "lib/stream_world.h"
#include "one_in.h"
#include "with_cmocka.h"

namespace {

using harness::Policies;
using harness::StreamWorld;

const char* module_path = TANDEM_MODULE;
std::unique_ptr<tandem::test::OpenDevice> device;
std::unique_ptr<harness::Engine> engine;
harness::NanAllocator* allocator = nullptr;
const stand_in::Controls* controls = nullptr;
const stand_in::Counts* counts = nullptr;

void run_streams(const char* name, uint64_t first_seed, int64_t n_streams, Policies policies = Policies::kDevice) {
  reference::GateShares shares;
  int64_t n_attends = 0;
  const uint64_t only = harness::seed_override(0);
  for (int64_t i = 0; i < (only ? 1 : n_streams); ++i) {
    StreamWorld world(only ? only : first_seed + static_cast<uint64_t>(i), *engine, policies, device.get());
    world.run(30);
    world.check_everything();
    shares.include(world.shares());
    n_attends += world.n_attends();
    if (controls != nullptr) assert_string_equal(controls->fault(), "");
    assert_string_equal(allocator->fault().c_str(), "");
  }
  std::printf("%-10s %lld attends; share of the bound used: naive %.3f, eps mass %.3f, lse %.3f\n", name,
              static_cast<long long>(n_attends), shares.naive, shares.mass, shares.lse);
}

int64_t n_streams_of(int64_t fast, int64_t full) {
  return tandem::test::some_of((harness::full_run() ? full * harness::full_factor() : fast) / harness::kSlowness);
}

void streams(void**) { run_streams("prompt", 500001, n_streams_of(40, 400)); }

void streams_of_pieces(void**) { run_streams("pieces", 520001, n_streams_of(40, 400), Policies::kDeviceStream); }

// Most of these sessions make keys on the device.
void streams_of_hidden_states(void**) {
  const int64_t n_before = counts != nullptr ? counts->n_rebuilt.load() : 0;
  run_streams("hidden", 540001, n_streams_of(30, 300), Policies::kDeviceRebuild);
  if (counts != nullptr) assert_true(counts->n_rebuilt - n_before > n_streams_of(30, 300));
}

void hgca_streams(void**) { run_streams("hgca", 510001, n_streams_of(40, 400), Policies::kDeviceHgca); }

// Checks the plans of every world's sessions before the sessions make other calls.
void worlds_hold_what_is_planned(void**) {
  for (const Policies policies :
       {Policies::kDevice, Policies::kDeviceStream, Policies::kDeviceRebuild, Policies::kDeviceHgca})
    for (int64_t i = 0; i < n_streams_of(30, 300); ++i) {
      const uint64_t only = harness::seed_override(0);
      StreamWorld world(only ? only : 530001 + static_cast<uint64_t>(i), *engine, policies, device.get());
      world.check_plans();
      world.run(3);
      world.check_everything();
    }
}

// A device that is always behind the host.
void streams_of_a_slow_device(void**) {
  if (controls == nullptr) skip();
  controls->set_delay(300'000);
  run_streams("slow", 600001, n_streams_of(12, 100));
  run_streams("slow pieces", 620001, n_streams_of(12, 100), Policies::kDeviceStream);
  run_streams("slow hgca", 610001, n_streams_of(12, 100), Policies::kDeviceHgca);
  controls->set_delay(0);
}

int set_up(void**) {
  allocator = new harness::NanAllocator;
  device = std::make_unique<tandem::test::OpenDevice>(module_path);
  engine = std::make_unique<harness::Engine>(harness::EngineSetup{2, nullptr, allocator, device->table->name, module_path});
  void* module = dlopen(module_path, RTLD_NOW | RTLD_NOLOAD);
  if (auto* found = reinterpret_cast<stand_in::ControlsFn>(dlsym(module, stand_in::kControlsSymbol))) controls = found();
  if (auto* found = reinterpret_cast<stand_in::CountsFn>(dlsym(module, stand_in::kCountsSymbol))) counts = found();
  return 0;
}

int tear_down(void**) {
  engine.reset();
  device.reset();
  const bool clean = (allocator->n_live() == 0 || harness::any_stopped()) && allocator->fault().empty();
  delete allocator;
  return clean ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) module_path = argv[1];
  const CMUnitTest tests[] = {cmocka_unit_test(streams),
                              cmocka_unit_test(streams_of_pieces),
                              cmocka_unit_test(streams_of_hidden_states),
                              cmocka_unit_test(hgca_streams),
                              cmocka_unit_test(worlds_hold_what_is_planned),
                              cmocka_unit_test(streams_of_a_slow_device)};
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
