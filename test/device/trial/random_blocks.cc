// SPDX-License-Identifier: MIT
// A policy that shows what adding one takes. Outside the window each KV head attends about half of the blocks of 16 tokens,
// chosen by a hash of block and head. The whole policy is this file and one line of policy_table.cc.
#include <algorithm>

#include "lib/call/sequence_call.h"
#include "lib/policy/policy.h"
#include "lib/policy/selector.h"
#include "lib/store/cache.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 16;

bool is_picked(int64_t block, int32_t kv_head) {
  auto x = static_cast<uint64_t>(block * 64 + kv_head + 1) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  return (x * 0xbf58476d1ce4e5b9u) >> 63 != 0;
}

struct PickedBlocks final : SelectState {
  std::vector<std::vector<int32_t>> tokens;  // [n_kv_heads]

  explicit PickedBlocks(int32_t n_kv_heads) : tokens(static_cast<size_t>(n_kv_heads)) {}
  void select(const SequenceCall& call, TicketCopy*) override {
    for (size_t h = 0; h < tokens.size(); ++h) {
      tokens[h].clear();
      for (int64_t t = call.host_end; t < call.resident_begin; ++t)
        if (is_picked(t / kBlock, static_cast<int32_t>(h))) tokens[h].push_back(static_cast<int32_t>(t));
    }
  }
  SelectedTokens selected(int32_t kv_head) const override { return {tokens[static_cast<size_t>(kv_head)], {}}; }
};

struct RandomBlocks final : Selector {
  int32_t n_kv_heads;

  explicit RandomBlocks(const SelectorSetup& setup) : n_kv_heads(setup.cache->layers()[setup.layer_idx].n_kv_heads) {}
  std::unique_ptr<SelectState> make_state() override { return std::make_unique<PickedBlocks>(n_kv_heads); }
};

}  // namespace

extern const Policy kPolicyRandomBlocks = {
    .name = "random blocks",
    .keeps_maw = false,
    .host_keys = [](bool is_append) { return is_append ? HostKeys::kAll : HostKeys::kSelected; },
    .make = [](const SelectorSetup& setup) -> std::unique_ptr<Selector> { return std::make_unique<RandomBlocks>(setup); },
    .bytes = nullptr,
};

}  // namespace tandem
