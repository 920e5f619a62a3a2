// SPDX-License-Identifier: MIT
// Times one append under policy "patterns": one layer whose query heads all have the same pattern.
//
// A sequence is filled with all of its keys but the last `chunk`. A repeat appends these with their queries by one call of
// tandem_attend(), which is timed, and truncates them again. Patterns take turns, so a busy moment of the machine affects
// all of them. Each pattern has its own session. All share the cache.
//
// With a device, calls use tensors in its memory, and a call's time ends when the device has finished. All keys are in the
// window there. The first call of a session brings them into it and is not timed.
//
// Keys and queries are noise around rows that return every 1,024 tokens. So there are diagonals to find, and they are far
// apart, as in models.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/common/device_memory.h"
#include "tools/common/handles.h"
#include "tools/common/result.h"
#include "tools/patterns/profile_options.h"

namespace tools {

struct ProfileTime {
  double ns = 0;  // median of the repeats
  int64_t pairs = 0, dense_pairs = 0;
};

class ProfileBench {
 public:
  static Result create(const ProfileLayer& layer, std::unique_ptr<ProfileBench>* bench);

  // Refuses a length whose keys do not fit into memory.
  Result check_memory(int64_t kv_len) const;

  // Fails unless heads whose window is longer than the sequence give the outputs of policy "all".
  Result check_outputs(int64_t kv_len);

  // Sets (*times)[i] to the time of patterns[i].
  Result measure(int64_t kv_len, const std::vector<tandem_head_pattern>& patterns, std::vector<ProfileTime>* times);

  const tandem_engine* engine() const { return engine_.get(); }

 private:
  // [n_tokens, n_heads, head_dim] in the type of the call's tensors.
  struct Rows {
    int64_t n_heads = 0;
    std::vector<uint8_t> bytes;
    DeviceBuffer on_device;  // copy on the device, used by calls on device tensors
  };
  explicit ProfileBench(const ProfileLayer& layer) : layer_(layer) {}
  Result create_objects();
  Result create_rows();
  Result create_session(const tandem_head_pattern* pattern, int64_t kv_len, Session* session) const;
  Rows make_rows(int64_t first_token, int64_t n_tokens, int64_t n_heads, uint64_t seed) const;
  tandem_tensor tensor(Rows* rows, int64_t n_tokens) const;
  Result fill(int64_t sequence, int64_t n_tokens);
  Result attend(tandem_session* session, int64_t sequence, int64_t q_len, double* ns);
  Result repeat(int64_t sequence, int64_t kv_len, const std::vector<Session>& sessions, std::vector<double>* ns);
  Result compare(int64_t sequence, int64_t kv_len, int64_t q_len);
  Result forget_outputs();
  Result outputs(int64_t q_len, std::vector<float>* values);

  ProfileLayer layer_;
  std::vector<float> base_;  // [kPeriod, head_dim], the rows that return
  Engine engine_;
  std::unique_ptr<DeviceMemory> device_;  // NULL: calls use host tensors
  Model model_;
  Cache cache_;
  Rows q_, k_, v_, o_;
};

}  // namespace tools
