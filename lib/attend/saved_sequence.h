// SPDX-License-Identifier: MIT
// Saves sequences to the caller's bytes and loads them (saving.h of the ABI; format: docs/saved-sequences.md).
//
// The cache's mutex is held to mark a sequence that is saved and to list one that is loaded, but not while the caller's
// functions run. A sequence is in flight while it is saved: its pages, its positions and the session's state of it do not
// change. A sequence that is being loaded is invisible until it is complete.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/attend/session_states.h"

namespace tandem {

struct SavedBlob {
  std::string name;
  const void* data = nullptr;
  int64_t bytes = 0;
};
inline constexpr int64_t kMostBlobs = 65536, kMostBlobName = 255;

struct SaveArgs {
  tandem_write_fn write = nullptr;
  void* write_user = nullptr;
  SessionStates* states = nullptr;  // null: no session's state is saved
  uint64_t model_id = 0;
  std::vector<SavedBlob> blobs;
};
Status save_sequence(Cache& cache, int64_t id, const SaveArgs& args);

struct LoadArgs {
  tandem_read_fn read = nullptr;
  void* read_user = nullptr;
  SessionStates* states = nullptr;
  uint64_t model_id = 0;
  int64_t file_bytes = -1;
  tandem_blob_fn blob = nullptr;
  void* blob_user = nullptr;
};
Status load_sequence(Cache& cache, const LoadArgs& args, int64_t* id);

}  // namespace tandem
