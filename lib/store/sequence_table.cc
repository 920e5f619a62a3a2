// SPDX-License-Identifier: MIT
#include "lib/store/sequence_table.h"

#include <algorithm>

#include "lib/machine/device_memory.h"

namespace tandem {

int64_t Sequence::longest() const {
  int64_t longest = 0;
  if (speculator == nullptr)
    for (const int64_t length : lengths) longest = std::max(longest, length);
  else
    for (size_t l = 0; l < lengths.size(); ++l) longest = std::max(longest, total(l));
  return longest;
}

int64_t Sequence::shortest() const { return *std::min_element(lengths.begin(), lengths.end()); }

int64_t Sequence::first_within(int64_t position, int64_t distance) const {
  const int64_t least = position - distance + 1;
  if (positions.empty()) return std::max<int64_t>(0, least);
  const auto known = std::lower_bound(positions.begin(), positions.end(), least) - positions.begin();
  if (known < static_cast<std::ptrdiff_t>(positions.size())) return known;
  return std::max<int64_t>(known, known + least - this->position(known));
}

void Sequence::extend_positions(int64_t length) {
  if (positions.empty()) return;
  for (auto t = static_cast<int64_t>(positions.size()); t < length; ++t) positions.push_back(positions.back() + 1);
}

void Sequence::set_length(size_t layer_idx, int64_t length) {
  extend_positions(length);
  lengths[layer_idx] = length;
}

void Sequence::forget_speculation() {
  std::fill(speculative.begin(), speculative.end(), 0);
  parents.clear();
  speculator = nullptr;
  const auto length = static_cast<size_t>(longest());
  if (positions.size() > length) positions.resize(length);
}

SequenceTable::SequenceTable(std::shared_ptr<Engine> engine, std::shared_ptr<const Model> model, std::vector<Layer> layers,
                             int64_t page_len, const tandem_cache_options& options)
    : engine_(std::move(engine)),
      model_(std::move(model)),
      layers_(std::move(layers)),
      host_tier_("host_cap_bytes", options.host_cap_bytes, engine_->allocator()),
      device_tier_("device_cap_bytes", options.device_cap_bytes, device_allocator(engine_->device())),
      store_(layers_, page_len, host_tier_, engine_->cpu()) {}

Sequence* SequenceTable::find(int64_t id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

Status SequenceTable::find_free(int64_t id, const CacheListener* by, Sequence** sequence, const char* field) const {
  Sequence* found = find(id);
  if (found == nullptr)
    return fail(TANDEM_ERROR_NOT_FOUND, field, "%s = %lld is not in this cache", field, static_cast<long long>(id));
  if ((found->writer != nullptr && found->writer != by) || found->n_readers > 0)
    return fail(TANDEM_ERROR_BUSY, field, "%s = %lld is %s", field, static_cast<long long>(id),
                found->is_being_saved ? "being saved" : "in flight");
  *sequence = found;
  return {};
}

Status SequenceTable::find_even(int64_t id, Sequence** sequence) const {
  TANDEM_TRY(find_free(id, nullptr, sequence));
  return check_even(**sequence);
}

Status SequenceTable::check_even(const Sequence& found, const char* field) const {
  int64_t differences = 0;  // without branches, as every step calls this for every sequence
  for (const int64_t length : found.lengths) differences |= length ^ found.lengths[0];
  if (differences == 0 && found.speculator == nullptr) return {};
  for (size_t l = 0; l < found.lengths.size(); ++l) {
    if (found.speculative[l] != 0)
      return fail(TANDEM_ERROR_INVALID_STATE, field, "%s = %lld has %lld speculative tokens in layer %zu", field,
                  static_cast<long long>(found.id), static_cast<long long>(found.speculative[l]), l);
    if (found.lengths[l] != found.lengths[0])
      return fail(TANDEM_ERROR_INVALID_STATE, field, "%s = %lld is uneven: layer %zu has %lld tokens, layer 0 %lld", field,
                  static_cast<long long>(found.id), l, static_cast<long long>(found.lengths[l]),
                  static_cast<long long>(found.lengths[0]));
  }
  return {};
}

std::span<const int32_t> SequenceTable::pages_of(const Sequence& sequence, TokenRange tokens) const {
  const int64_t first = tokens.begin / page_len(), end = (tokens.end + page_len() - 1) / page_len();
  return std::span(sequence.pages).subspan(static_cast<size_t>(first), static_cast<size_t>(end - first));
}

bool SequenceTable::pin(const Sequence& sequence, int32_t layer_idx, TokenRange tokens) {
  return store_.pin(pages_of(sequence, tokens), layer_idx, pinner());
}

SequenceTable::PinnedTokens SequenceTable::pin_ahead(const Sequence& sequence, int32_t layer_idx, TokenRange tokens) {
  const PinnedPages pinned = store_.pin_ahead(pages_of(sequence, tokens), layer_idx, pinner());
  const int64_t end = (tokens.begin / page_len() + pinned.n) * page_len();
  return {std::clamp(end, tokens.begin, tokens.end), pinned.missing_ns, pinned.is_refused};
}

}  // namespace tandem
