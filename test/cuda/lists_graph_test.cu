// SPDX-License-Identifier: MIT
// Key lists that a kernel writes in a graph, before the attention that reads them: each replay must attend the lists that it
// has written. The kernel lets the next one start at once and writes late, so a list that is read too early is that of the
// replay before.
#include "graph_time.h"
#include "window_checks.h"
#include "with_cmocka.h"

namespace {

using namespace tandem::test;
using tandem::DeviceKeys;
using tandem::KeyGranule;

OpenDevice* device = nullptr;

struct Staged {
  const DeviceKeys* keys;
  const KeyGranule* granules;
  int n_keys, n_granules;
};

__global__ void write_lists(const Staged* staged, DeviceKeys* keys, KeyGranule* granules) {
#if __CUDA_ARCH__ >= 900  // older devices start no kernel before the previous one has ended
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  for (int i = 0; i < 30; ++i) __nanosleep(1000);
  for (int i = static_cast<int>(threadIdx.x); i < staged->n_keys; i += static_cast<int>(blockDim.x))
    keys[i] = staged->keys[i];
  for (int i = static_cast<int>(threadIdx.x); i < staged->n_granules; i += static_cast<int>(blockDim.x))
    granules[i] = staged->granules[i];
}

void replays_attend_their_own_lists(void**) {
  struct {
    TypePair types;
    int32_t q_len;
  } const kCases[] = {{{TANDEM_BF16, TANDEM_BF16}, 2},
                      {{TANDEM_Q8_0, TANDEM_Q8_0}, 2},
                      {{TANDEM_F32, TANDEM_F32}, 2},
                      {{TANDEM_BF16, TANDEM_BF16}, 64}};
  for (const auto& of : kCases) {
    WindowOptions options = options_of(of.types, 3, 128, 4, {{0, 3000, 1}, {50, 900, of.q_len}, {0, 5000, 1}});
    options.lists.n_heads = 3;
    options.lists.share = 0.2;
    options.lists.unit = 4;
    options.lists.newest = 100;
    options.lists.hides_others = false;
    options.lists.by_kernels = true;
    WindowCase c(*device, options);
    const int64_t most = NamedKeys::most_granules(options.lists, {{0, 5000}, {0, 5000}, {0, 5000}});
    auto* keys = static_cast<DeviceKeys*>(device->allocate(9 * sizeof(DeviceKeys)));
    auto* granules = static_cast<KeyGranule*>(device->allocate(most * static_cast<int64_t>(sizeof(KeyGranule))));
    auto* staged = static_cast<Staged*>(device->allocate(sizeof(Staged)));
    const Graph graph([&](cudaStream_t stream) {
      write_lists<<<1, 256, 0, stream>>>(staged, const_cast<DeviceKeys*>(c.lists().keys),
                                         const_cast<KeyGranule*>(c.lists().granules));
      c.attend(0, stream);
    });
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      c.name_others(seed);
      const NamedKeys& named = c.named();
      device->upload(keys, named.keys().data(), static_cast<int64_t>(named.keys().size() * sizeof(DeviceKeys)));
      device->upload(granules, named.granules().data(), static_cast<int64_t>(named.granules().size() * sizeof(KeyGranule)));
      const Staged now = {keys, granules, static_cast<int>(named.keys().size()), static_cast<int>(named.granules().size())};
      device->upload(staged, &now, sizeof now);
      c.clear_output();
      graph.replay();
      const reference::GateVerdict verdict = c.check();
      if (!verdict.pass)
        fail_msg("%s, replay %d: %s", describe(options).c_str(), static_cast<int>(seed), verdict.message.c_str());
    }
    for (void* data : {static_cast<void*>(keys), static_cast<void*>(granules), static_cast<void*>(staged)})
      device->table->release(device->self, data);
  }
}

}  // namespace

int main(int argc, char** argv) {
  OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {cmocka_unit_test(replays_attend_their_own_lists)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
