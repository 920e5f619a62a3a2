// SPDX-License-Identifier: MIT
// What the tests of policy "patterns" on a device share: sets of heads, and sessions on a device and on the host that get
// the same calls.
#pragma once

#include <numeric>

#include "api/patterned_world.h"
#include "device/device_side.h"

namespace tandem_test {

// Of each query head: those of the second KV head have one form, so its decode calls attend less.
inline std::vector<tandem_head_pattern> some_heads() { return {kFull, a_shape(20, 90), a_shape(4, 30), a_shape(20, 60)}; }
inline std::vector<tandem_head_pattern> without_sinks() { return {a_shape(0, 70), kFull, a_shape(0, 50), a_shape(0, 50)}; }

// The heads of each group are, so one launch serves them.
inline std::vector<tandem_head_pattern> alike() { return {kFull, kFull, a_shape(12, 80), a_shape(12, 80)}; }

// Heads whose keys the device chooses, beside others. Every KV head attends all keys in decode calls.
inline std::vector<tandem_head_pattern> choosing() {
  return {vertical_slash(12, 40), block_sparse(2), both(vertical_slash(5, 16), a_shape(20, 90)), kFull};
}
inline std::vector<tandem_head_pattern> more_choosing() {
  return {both(block_sparse(1), vertical_slash(30, 0)), a_shape(3, 40), both(block_sparse(3), a_shape(9, 200)),
          vertical_slash(0, 100)};
}

inline bool chooses(const Patterned& patterned) {
  return std::any_of(patterned.heads.begin(), patterned.heads.end(), [](const tandem_head_pattern& head) {
    return (head.kinds & (TANDEM_PATTERN_VERTICAL_SLASH | TANDEM_PATTERN_BLOCK_SPARSE)) != 0;
  });
}

inline std::vector<int64_t> listed(const Side& side, int32_t q_head) {
  std::vector<int64_t> tokens(1 << 13);
  int64_t n = 0;
  constexpr int32_t kGroup = kQHeads / kKvHeads;
  OK(tandem_session_selection, tokens.data(), nullptr, std::ssize(tokens), &n, side.session, side.sequence, 0,
     q_head / kGroup, q_head % kGroup);
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

// A call on the device and its twin's on the host.
struct Twins {
  Side side{true}, twin{false};
  const bool chooses_keys;  // whose appends' lists are the device's alone
  int64_t seed = 1;

  explicit Twins(const Patterned& patterned) : chooses_keys(chooses(patterned)) {
    change_session(&side, patterned.options);
    change_session(&twin, patterned.options);
  }
  void attend(int64_t n) {
    Call on_device(n, seed), on_host(n, seed);
    ++seed;
    for (Call* call : {&on_device, &on_host})
      for (float& x : call->q.values) x *= 8.0f;  // so that softmax prefers some keys
    on_device.to_device();
    for (const auto& [call, of] : {std::pair(&on_device, &side), std::pair(&on_host, &twin)}) {
      const tandem_attend_args args = call->args(*of);
      OK(tandem_attend, of->session, &args);
    }
    const std::string context = "call " + std::to_string(seed - 1);
    assert_close_to(on_device.output(), on_host.output(), context);
    for (int32_t h = 0; h < kQHeads && (n == 1 || !chooses_keys); ++h)
      if (listed(side, h) != listed(twin, h)) fail_msg("%s: other keys of head %d", context.c_str(), h);
    const tandem_session_stats now = side.stats(), now_twin = twin.stats();
    assert_int_equal(now.pattern_pairs, now_twin.pattern_pairs);
    assert_int_equal(now.pattern_dense_pairs, now_twin.pattern_dense_pairs);
    assert_int_equal(now.resident_kv_bytes_read + now.host_kv_bytes_read,
                     now_twin.resident_kv_bytes_read + now_twin.host_kv_bytes_read);
  }
};

// Several sequences: q_lens of each call. Every call's answers are those of its twin on the host. The last call has these
// flags, besides.
inline void attend_batches(const Patterned& patterned, const std::vector<std::vector<int64_t>>& calls,
                           uint32_t flags_of_last = 0) {
  std::vector<std::vector<float>> answers[2];
  for (const bool on_device : {true, false}) {
    Side side(on_device);
    change_session(&side, patterned.options);
    std::vector<int64_t> ids(calls[0].size(), side.sequence);
    for (size_t s = 1; s < ids.size(); ++s) OK(tandem_sequence_create, &ids[s], side.cache);
    for (const std::vector<int64_t>& q_lens : calls) {
      Call call(std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0}), q_lens[0]);
      if (on_device) call.to_device();
      tandem_attend_args args = call.args(side);
      args.n_sequences = static_cast<int32_t>(ids.size());
      args.sequences = ids.data();
      args.q_lens = q_lens.data();
      args.flags = &q_lens == &calls.back() ? flags_of_last : 0;
      OK(tandem_attend, side.session, &args);
      answers[on_device].push_back(call.output());
    }
  }
  for (size_t i = 0; i < calls.size(); ++i) assert_close_to(answers[1][i], answers[0][i], "call " + std::to_string(i));
}

// One sequence has a query, the other many.
inline const std::vector<std::vector<int64_t>> kBothKinds = {{250, 40}, {1, 333}, {140, 65}, {1, 1}};
// Single queries stand before, between and behind appends, and three appends have more rows than a ticket.
inline const std::vector<std::vector<int64_t>> kAnyOrder = {{300, 300, 300}, {1, 140, 1}, {65, 1, 150}};

}  // namespace tandem_test
