// SPDX-License-Identifier: MIT
// The saved state of a session for one sequence: a section for each layer with the name of its policy, the window's begin,
// and the data that its selector visits.
#pragma once

#include <vector>

#include "lib/attend/session_states.h"
#include "lib/store/saved_stream.h"

namespace tandem {

// Returns in *bytes the payload size of each layer's section: [n_layers].
Status measure_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state,
                          std::vector<int64_t>* bytes);
Status save_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state,
                       const std::vector<int64_t>& bytes, SavedWriter* writer);
// CORRUPT. INVALID_ARGUMENT (session): the policy differs, or an option on which the saved data depends.
Status load_statistics(const SessionCore& core, const Sequence& sequence, SequenceState& state, SavedReader* reader);

}  // namespace tandem
