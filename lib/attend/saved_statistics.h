// SPDX-License-Identifier: MIT
// What a session knows of a saved sequence: a section for each layer, with the name of its policy, where its window began,
// and what its selector visits.
#pragma once

#include <vector>

#include "lib/attend/session_states.h"
#include "lib/store/saved_stream.h"

namespace tandem {

// Payload bytes of each layer's section: [n_layers].
Status measure_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state,
                          std::vector<int64_t>* bytes);
Status save_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state,
                       const std::vector<int64_t>& bytes, SavedWriter* writer);
// CORRUPT; INVALID_ARGUMENT (session): another policy, or other options that what was saved depends on.
Status load_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state, SavedReader* reader);

}  // namespace tandem
