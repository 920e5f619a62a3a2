// SPDX-License-Identifier: MIT
// Entry points: saved sequences.
#include <cstring>

#include "lib/abi/api_session.h"
#include "lib/attend/saved_sequence.h"
#include "lib/base/options.h"

namespace tandem {
namespace {

// Finds the session's states. Another thread may use the session, so all work on the sequence needs the cache's mutex.
// *states: null without a session.
Status find_states(const tandem_session* session, const Cache& cache, std::shared_ptr<SessionObject>* object,
                   SessionStates** states) {
  if (session == nullptr) return {};
  TANDEM_TRY(resolve(session, "session", object));
  if (&(*object)->session->cache() != &cache)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "session", "session = %p is of another cache",
                static_cast<const void*>(session));
  *states = &(*object)->session->states();
  return {};
}

Status copy_blob(const tandem_saved_blob& blob, const std::string& prefix, SavedBlob* to) {
  TANDEM_TRY(check_reserved((prefix + "reserved").c_str(), blob.reserved));
  TANDEM_TRY(require(blob.name, (prefix + "name").c_str()));
  const auto n = static_cast<int64_t>(strnlen(blob.name, static_cast<size_t>(kMostBlobName) + 1));
  if (n < 1 || n > kMostBlobName)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, (prefix + "name").c_str(), "%sname has %s bytes, not 1 to %lld",
                prefix.c_str(), n == 0 ? "0" : "more", static_cast<long long>(kMostBlobName));
  TANDEM_TRY(require_range((prefix + "n_bytes").c_str(), blob.n_bytes, 0, int64_t{1} << 48));
  if (blob.n_bytes > 0) TANDEM_TRY(require(blob.data, (prefix + "data").c_str()));
  *to = {std::string(blob.name, static_cast<size_t>(n)), blob.data, blob.n_bytes};
  return {};
}

Status copy_blobs(const tandem_save_options& options, std::vector<SavedBlob>* blobs) {
  TANDEM_TRY(require_range("n_blobs", options.n_blobs, 0, kMostBlobs));
  if (options.n_blobs == 0) return require_aligned(options.blobs, "blobs");
  TANDEM_TRY(require(options.blobs, "blobs"));
  std::vector<tandem_saved_blob> given;
  TANDEM_TRY(copy_array_in(options.blobs, "blobs", options.n_blobs, &given));
  blobs->resize(given.size());
  for (size_t i = 0; i < given.size(); ++i)
    TANDEM_TRY(copy_blob(given[i], element_name("blobs", static_cast<int64_t>(i)) + ".", &(*blobs)[i]));
  return {};
}

// Functions have no alignment to check.
template <typename Function>
Status require_function(Function function, const char* parameter) {
  return function == nullptr ? refuse_null(parameter) : Status();
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_sequence_save(tandem_cache* cache, int64_t sequence, tandem_write_fn write, void* write_user,
                             const tandem_save_options* options, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(require_function(write, "write"));
    tandem_save_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    TANDEM_TRY(check_reserved("reserved", copy.reserved));
    SaveArgs args;
    std::shared_ptr<SessionObject> session;
    TANDEM_TRY(find_states(copy.session, *object, &session, &args.states));
    TANDEM_TRY(copy_blobs(copy, &args.blobs));
    args.write = write;
    args.write_user = write_user;
    args.model_id = copy.model_id;
    return save_sequence(*object, sequence, args);
  });
}

int32_t tandem_sequence_load(int64_t* sequence, tandem_cache* cache, tandem_read_fn read, void* read_user,
                             const tandem_load_options* options, tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    TANDEM_TRY(require(sequence, "sequence"));
    std::shared_ptr<Cache> object;
    TANDEM_TRY(resolve(cache, "cache", &object));
    TANDEM_TRY(require_function(read, "read"));
    tandem_load_options copy;
    TANDEM_TRY(copy_in_or_default(options, "", &copy));
    TANDEM_TRY(check_reserved("reserved", copy.reserved));
    TANDEM_TRY(require_range("file_bytes", copy.file_bytes, -1, INT64_MAX));
    if (copy.blob == nullptr && copy.blob_user != nullptr)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "blob_user", "blob_user = %p without blob", copy.blob_user);
    LoadArgs args;
    std::shared_ptr<SessionObject> session;
    TANDEM_TRY(find_states(copy.session, *object, &session, &args.states));
    args.read = read;
    args.read_user = read_user;
    args.model_id = copy.model_id;
    args.file_bytes = copy.file_bytes;
    args.blob = copy.blob;
    args.blob_user = copy.blob_user;
    return load_sequence(*object, args, sequence);
  });
}
