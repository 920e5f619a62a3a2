// SPDX-License-Identifier: MIT
#include "lib/attend/saved_sequence.h"

#include <algorithm>
#include <mutex>

#include "lib/attend/saved_statistics.h"
#include "lib/store/saved_format.h"

namespace tandem {
namespace {

constexpr int64_t frame(int64_t payload_bytes) { return kSavedFrameBytes + payload_bytes; }

// Keeps a sequence in flight until the save ends, with copies of data that may grow meanwhile.
class SaveInFlight {
 public:
  explicit SaveInFlight(Cache& cache) : cache_(cache) {}
  SaveInFlight(const SaveInFlight&) = delete;
  ~SaveInFlight() {
    if (sequence_ == nullptr) return;
    const std::unique_lock lock(cache_.mutex());
    --sequence_->n_readers;
    sequence_->is_being_saved = false;
  }

  // *state: the session's state of the sequence; null without a session.
  Status begin(int64_t id, SessionStates* states, SequenceState** state) {
    const auto lock = cache_.lock_settled();
    Sequence* found = nullptr;
    TANDEM_TRY(cache_.find_free(id, nullptr, &found));
    TANDEM_TRY(cache_.check_even(*found));
    extents_.assign(cache_.store().bases().begin(), cache_.store().bases().end());
    if (states != nullptr) {
      TANDEM_TRY(states->on_reserve(*found, found->longest(), {}));
      states->quiesce(*found);
      states->fetch_maw(*found);
      *state = states->find(id);
    }
    ++found->n_readers;
    found->is_being_saved = true;
    sequence_ = found;
    return {};
  }
  const Sequence& sequence() const { return *sequence_; }
  StoreView view() const { return cache_.store().view(sequence_->pages, sequence_->positions, extents_); }

 private:
  Cache& cache_;
  Sequence* sequence_ = nullptr;
  std::vector<std::byte*> extents_;
};

// Calls put(rows, bytes) for the runs of a plane: head by head, and in token order within a head.
template <typename Put>
Status for_plane(const StoreView& view, const StoredPlane& plane, int64_t n_tokens, Put put) {
  for (int64_t head = 0; head < std::ssize(plane.at); ++head)
    for (int64_t t = 0; t < n_tokens;) {
      const TokenRun run = view.run_at(t, n_tokens);
      TANDEM_TRY(put(plane.row(run, head), run.n * plane.row_bytes));
      t += run.n;
    }
  return {};
}

SavedSection section_of(size_t layer_idx, size_t plane_idx, const StoredPlane& plane, int64_t n_tokens) {
  return {static_cast<SavedKind>(plane_idx + 1), static_cast<int32_t>(layer_idx),
          n_tokens * std::ssize(plane.at) * plane.row_bytes};
}

Status save_rows(const StoreView& view, size_t n_layers, int64_t n_tokens, SavedWriter* writer) {
  for (size_t l = 0; l < n_layers; ++l)
    for (size_t p = 0; p < view.layers[l].planes.size(); ++p) {
      const StoredPlane& plane = view.layers[l].planes[p];
      if (plane.row_bytes == 0) continue;
      TANDEM_TRY(writer->begin(section_of(l, p, plane, n_tokens)));
      TANDEM_TRY(
          for_plane(view, plane, n_tokens, [&](const std::byte* rows, int64_t bytes) { return writer->put(rows, bytes); }));
      TANDEM_TRY(writer->end());
    }
  return {};
}

Status save_blobs(const std::vector<SavedBlob>& blobs, SavedWriter* writer) {
  for (const SavedBlob& blob : blobs) {
    const auto name_bytes = static_cast<int64_t>(blob.name.size());
    TANDEM_TRY(writer->begin({SavedKind::kBlob, -1, int64_t{8} + name_bytes + blob.bytes}));
    TANDEM_TRY(writer->put(&name_bytes, sizeof name_bytes));
    TANDEM_TRY(writer->put(blob.name.data(), name_bytes));
    TANDEM_TRY(writer->put(blob.data, blob.bytes));
    TANDEM_TRY(writer->end());
  }
  return {};
}

// A sequence while it is loaded. The destructor drops it unless it has been listed.
class Loading {
 public:
  explicit Loading(Cache& cache) : cache_(cache) {}
  Loading(const Loading&) = delete;
  ~Loading() {
    state_.reset();  // it may read pages
    if (made_ != nullptr) cache_.drop_unlisted(std::move(made_), host_bytes_);
  }

  Status load(const LoadArgs& args, int64_t* id) {
    SavedReader reader(args.read, args.read_user);
    TANDEM_TRY(read_saved_header({cache_.layers(), args.model_id, args.file_bytes}, &reader, &header_));
    const bool has_statistics = (header_.flags & kSavedStatistics) != 0;
    if (args.states != nullptr && !has_statistics)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "session", "session: the sequence was saved without a session");
    host_bytes_ = cache_.host_tier().used(Use::kKv);
    made_ = cache_.create_unlisted();
    TANDEM_TRY(load_rows(&reader));
    for (size_t l = 0; l < cache_.layers().size(); ++l) made_->lengths[l] = header_.n_tokens;
    if ((header_.flags & kSavedPositions) != 0) TANDEM_TRY(load_positions(&reader));
    if (args.states != nullptr) {
      TANDEM_TRY(args.states->make(header_.n_tokens, &state_));
      TANDEM_TRY(load_statistics(args.states->core(), *made_, *state_, &reader));
    } else if (has_statistics) {
      TANDEM_TRY(skip_statistics(&reader));
    }
    TANDEM_TRY(load_blobs(args, &reader));
    if (reader.n_taken() != header_.bytes)
      return reader.corrupt("the last section ends at byte " + std::to_string(reader.n_taken()) + ", the file at " +
                            std::to_string(header_.bytes));
    TANDEM_TRY(give_blobs(args));
    const auto adopt = [&](int64_t made_id) {
      if (args.states != nullptr) args.states->adopt(made_id, std::move(state_));
    };
    return cache_.list(made_, adopt, id);
  }

 private:
  // Allocates pages as rows arrive, so a header alone takes no memory.
  Status grow(int64_t token) {
    if (token < n_held_) return {};
    n_held_ = std::min(header_.n_tokens, token + cache_.store().geometry().extent_len());
    return cache_.grow_unlisted(*made_, n_held_, &extents_);
  }

  Status load_plane(const StoredPlane& plane, SavedReader* reader) {
    for (int64_t head = 0; head < std::ssize(plane.at); ++head)
      for (int64_t t = 0; t < header_.n_tokens;) {
        TANDEM_TRY(grow(t));
        const TokenRun run = cache_.store().view(made_->pages, {}, extents_).run_at(t, n_held_);
        TANDEM_TRY(reader->take(plane.row(run, head), run.n * plane.row_bytes));
        t += run.n;
      }
    return {};
  }

  Status load_rows(SavedReader* reader) {
    for (size_t l = 0; l < cache_.layers().size(); ++l) {
      const std::vector<StoredPlane>& planes = cache_.store().planes(static_cast<int32_t>(l)).planes;
      for (size_t p = 0; p < planes.size(); ++p) {
        if (planes[p].row_bytes == 0) continue;
        SavedSection section = section_of(l, p, planes[p], header_.n_tokens);
        ++n_read_;
        TANDEM_TRY(reader->begin(&section));
        TANDEM_TRY(load_plane(planes[p], reader));
        TANDEM_TRY(reader->end());
      }
    }
    return {};
  }

  Status load_positions(SavedReader* reader) {
    SavedSection section{SavedKind::kPositions, -1, header_.n_tokens * int64_t{4}};
    ++n_read_;
    TANDEM_TRY(reader->begin(&section));
    std::vector<int32_t>& positions = made_->positions;
    positions.resize(static_cast<size_t>(header_.n_tokens));
    TANDEM_TRY(reader->take(positions.data(), section.bytes));
    for (size_t i = 0; i < positions.size(); ++i)
      if (positions[i] < 0 || (i > 0 && positions[i] <= positions[i - 1]) || positions[i] == INT32_MAX)
        return reader->corrupt("position " + std::to_string(positions[i]) + " of token " + std::to_string(i) +
                               (i == 0 ? " is not from 0 to 2^31 - 2"
                                       : " is not from 1 + " + std::to_string(positions[i - 1]) + " to 2^31 - 2"));
    return reader->end();
  }

  Status skip_statistics(SavedReader* reader) const {
    for (int32_t l = 0; l < static_cast<int32_t>(cache_.layers().size()); ++l) {
      SavedSection section{SavedKind::kStatistics, l, -1};
      TANDEM_TRY(reader->begin(&section));
      TANDEM_TRY(reader->skip(section.bytes));
      TANDEM_TRY(reader->end());
    }
    return {};
  }

  // Memory grows as bytes arrive.
  static Status take_all(SavedReader* reader, int64_t bytes, std::vector<std::byte>* data) {
    constexpr int64_t kStep = 1 << 20;
    while (std::ssize(*data) < bytes) {
      const int64_t at = std::ssize(*data), n = std::min(bytes - at, std::max(kStep, at));
      data->resize(static_cast<size_t>(at + n));
      TANDEM_TRY(reader->take(data->data() + at, n));
    }
    return {};
  }

  Status load_blobs(const LoadArgs& args, SavedReader* reader) {
    if ((header_.flags & kSavedStatistics) != 0) n_read_ += cache_.layers().size();
    for (; n_read_ < header_.n_sections; ++n_read_) {
      SavedSection section{SavedKind::kBlob, -1, -1};
      TANDEM_TRY(reader->begin(&section));
      int64_t name_bytes = 0;
      if (section.bytes < 8)
        return reader->corrupt("it has " + std::to_string(section.bytes) + " bytes, too few for the length of its name");
      TANDEM_TRY(reader->take(&name_bytes, sizeof name_bytes));
      if (name_bytes < 1 || name_bytes > kMostBlobName || name_bytes > reader->left())
        return reader->corrupt("its name has " + std::to_string(name_bytes) + " bytes, not from 1 to " +
                               std::to_string(std::min(kMostBlobName, reader->left())));
      Blob blob;
      blob.name.resize(static_cast<size_t>(name_bytes));
      TANDEM_TRY(reader->take(blob.name.data(), name_bytes));
      if (blob.name.find('\0') != std::string::npos) return reader->corrupt("its name has a zero byte");
      if (args.blob != nullptr) {
        TANDEM_TRY(take_all(reader, reader->left(), &blob.data));
        blobs_.push_back(std::move(blob));
      } else {
        TANDEM_TRY(reader->skip(reader->left()));
      }
      TANDEM_TRY(reader->end());
    }
    return {};
  }

  Status give_blobs(const LoadArgs& args) const {
    for (const Blob& blob : blobs_)
      if (args.blob(blob.name.c_str(), blob.data.data(), std::ssize(blob.data), args.blob_user) != 0)
        return fail_with(TANDEM_ERROR_CANCELLED, 0, "blob",
                         "blob: the caller's function did not take \"" + blob.name + "\"");
    return {};
  }

  struct Blob {
    std::string name;
    std::vector<std::byte> data;
  };

  Cache& cache_;
  SavedHeader header_;
  std::unique_ptr<Sequence> made_;
  std::unique_ptr<SequenceState> state_;
  std::vector<std::byte*> extents_;
  int64_t host_bytes_ = 0;  // bytes of the cache's pages before the load
  int64_t n_held_ = 0;      // tokens with pages
  size_t n_read_ = 0;       // sections read so far
  std::vector<Blob> blobs_;
};

}  // namespace

Status save_sequence(Cache& cache, int64_t id, const SaveArgs& args) {
  SaveInFlight save(cache);
  SequenceState* state = nullptr;
  TANDEM_TRY(save.begin(id, args.states, &state));
  const Sequence& sequence = save.sequence();
  SavedHeader header;
  header.n_tokens = sequence.lengths[0];
  header.model_id = args.model_id;
  header.n_sections = static_cast<uint32_t>(args.blobs.size());
  if (!sequence.positions.empty()) header.flags |= kSavedPositions;
  int64_t more_bytes = 0;
  for (const SavedBlob& blob : args.blobs) more_bytes += frame(8 + std::ssize(blob.name) + blob.bytes);
  std::vector<int64_t> statistics;
  if (state != nullptr) {
    header.flags |= kSavedStatistics;
    TANDEM_TRY(measure_statistics(args.states->core(), sequence, *state, &statistics));
    header.n_sections += static_cast<uint32_t>(statistics.size());
    for (const int64_t bytes : statistics) more_bytes += frame(bytes);
  }
  SavedWriter writer(args.write, args.write_user);
  TANDEM_TRY(write_saved_header(cache.layers(), more_bytes, &header, &writer));
  TANDEM_TRY(save_rows(save.view(), cache.layers().size(), header.n_tokens, &writer));
  if (!sequence.positions.empty()) {
    const int64_t bytes = header.n_tokens * int64_t{4};
    TANDEM_TRY(writer.begin({SavedKind::kPositions, -1, bytes}));
    TANDEM_TRY(writer.put(sequence.positions.data(), bytes));
    TANDEM_TRY(writer.end());
  }
  if (state != nullptr) TANDEM_TRY(save_statistics(args.states->core(), sequence, *state, statistics, &writer));
  TANDEM_TRY(save_blobs(args.blobs, &writer));
  return writer.flush();
}

Status load_sequence(Cache& cache, const LoadArgs& args, int64_t* id) {
  Loading loading(cache);
  return loading.load(args, id);
}

}  // namespace tandem
