// SPDX-License-Identifier: MIT
// Entry points: session, commit, step, statistics, selection.
#include "lib/abi/api_session.h"

#include <algorithm>

#include "lib/base/options.h"

namespace tandem {

SessionCall::~SessionCall() {
  if (object_ != nullptr) object_->in_use.store(false, std::memory_order_release);
}

Status SessionCall::begin(const tandem_session* session) {
  std::shared_ptr<SessionObject> object;
  TANDEM_TRY(resolve(session, "session", &object));
  if (object->in_use.exchange(true, std::memory_order_acquire))
    return fail(TANDEM_ERROR_INVALID_STATE, "session", "session = %p is in use by another thread",
                static_cast<const void*>(session));
  object_ = std::move(object);
  return {};
}

Status check_sequences(const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences, std::vector<int64_t>* sorted) {
  TANDEM_TRY(require_range("n_sequences", n_sequences, 0, INT32_MAX));
  TANDEM_TRY(require_aligned(sequences, "sequences"));
  TANDEM_TRY(require_aligned(q_lens, "q_lens"));
  if (n_sequences == 0) return {};
  TANDEM_TRY(require(sequences, "sequences"));
  TANDEM_TRY(require(q_lens, "q_lens"));
  bool ascending = true;
  for (int32_t i = 0; i < n_sequences; ++i) {
    if (q_lens[i] < 0 || q_lens[i] > kMaxTokens) {
      const std::string field = element_name("q_lens", i);
      return require_tokens(field.c_str(), q_lens[i]);
    }
    ascending = ascending && (i == 0 || sequences[i - 1] < sequences[i]);
  }
  if (ascending) return {};
  sorted->assign(sequences, sequences + n_sequences);
  std::sort(sorted->begin(), sorted->end());
  const auto twice = std::adjacent_find(sorted->begin(), sorted->end());
  if (twice == sorted->end()) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "sequences", "sequences: %lld is given twice", static_cast<long long>(*twice));
}

namespace {

Status check_kept(const int64_t* kept_idx, int64_t n_kept) {
  TANDEM_TRY(require_range("n_kept", n_kept, 0, kMaxTokens));
  TANDEM_TRY(n_kept > 0 ? require(kept_idx, "kept_idx") : require_aligned(kept_idx, "kept_idx"));
  for (int64_t i = 0; i < n_kept; ++i) {
    const int64_t least = i == 0 ? 0 : kept_idx[i - 1] + 1;
    if (kept_idx[i] >= least && kept_idx[i] < kMaxTokens) continue;
    const std::string field = element_name("kept_idx", i);
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = %lld is not ascending from 0", field.c_str(),
                static_cast<long long>(kept_idx[i]));
  }
  return {};
}

// Without a device, refuses a stream other than NULL. With one, accepts any stream, because the step's tensors may be in
// device memory.
Status check_step_stream(const Cache& cache, const void* stream) {
  return cache.engine().device() != nullptr ? Status() : require_host_stream(stream);
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_session_create(tandem_session** session, tandem_cache* cache, const tandem_session_options* options,
                              tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(session, "session"));
    std::shared_ptr<Cache> cache_object;
    TANDEM_TRY(resolve(cache, "cache", &cache_object));
    tandem_session_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    TANDEM_TRY(check_session_options(copy));
    auto object = std::make_shared<SessionObject>();
    TANDEM_TRY(Session::create(std::move(cache_object), copy, &object->session));
    *session = publish<tandem_session>(std::move(object));
    return {};
  });
}

void tandem_session_release(tandem_session* session) { release_handle(session, HandleKind::kSession); }

int32_t tandem_session_commit(tandem_session* session, int64_t sequence, const int64_t* kept_idx, int64_t n_kept,
                              tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    TANDEM_TRY(check_kept(kept_idx, n_kept));
    return call->commit(sequence, kept_idx, n_kept);
  });
}

int32_t tandem_step_begin(tandem_session* session, const int64_t* sequences, const int64_t* q_lens, int32_t n_sequences,
                          void* stream, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    TANDEM_TRY(check_sequences(sequences, q_lens, n_sequences, call.sorted()));
    TANDEM_TRY(check_step_stream(call->cache(), stream));
    return call->step_begin(sequences, q_lens, n_sequences, stream);
  });
}

int32_t tandem_step_end(tandem_session* session, void* stream, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    TANDEM_TRY(check_step_stream(call->cache(), stream));
    return call->step_end(stream);
  });
}

int32_t tandem_session_get_stats(tandem_session_stats* stats, const tandem_session* session, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(check_out(stats, "stats"));
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    tandem_session_stats known = AbiStruct<tandem_session_stats>::defaults();
    TANDEM_TRY(call->stats(&known));
    copy_out(known, stats);
    return {};
  });
}

int32_t tandem_session_pattern_pairs(int64_t* pairs, int64_t* dense_pairs, const tandem_session* session, int32_t layer_idx,
                                     tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(pairs, "pairs"));
    TANDEM_TRY(require(dense_pairs, "dense_pairs"));
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    const auto n_layers = static_cast<int64_t>(call->cache().layers().size());
    TANDEM_TRY(require_range("layer_idx", layer_idx, 0, n_layers - 1));
    const AttendedPairs counted = call->pattern_pairs(static_cast<size_t>(layer_idx));
    *pairs = counted.n;
    *dense_pairs = counted.n_dense;
    return {};
  });
}

int32_t tandem_session_selection(int64_t* token_idx, float* maw, int64_t capacity, int64_t* n_kept, tandem_session* session,
                                 int64_t sequence, int32_t layer_idx, int32_t kv_head_idx, int32_t q_head_idx,
                                 tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(n_kept, "n_kept"));
    TANDEM_TRY(require_range("capacity", capacity, 0, INT64_MAX));
    TANDEM_TRY(capacity > 0 ? require(token_idx, "token_idx") : require_aligned(token_idx, "token_idx"));
    TANDEM_TRY(require_aligned(maw, "maw"));
    SessionCall call;
    TANDEM_TRY(call.begin(session));
    const std::vector<Layer>& layers = call->cache().layers();
    TANDEM_TRY(require_range("layer_idx", layer_idx, 0, static_cast<int64_t>(layers.size()) - 1));
    const Layer& layer = layers[static_cast<size_t>(layer_idx)];
    TANDEM_TRY(require_range("kv_head_idx", kv_head_idx, 0, layer.n_kv_heads - 1));
    TANDEM_TRY(require_range("q_head_idx", q_head_idx, 0, layer.group_size - 1));
    KeptKeys kept{token_idx, maw, capacity};
    TANDEM_TRY(call->selection({sequence, layer_idx, kv_head_idx, q_head_idx}, &kept));
    *n_kept = kept.n;
    return {};
  });
}
