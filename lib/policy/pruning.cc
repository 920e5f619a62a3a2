// SPDX-License-Identifier: MIT
#include "lib/policy/pruning.h"

#include <algorithm>
#include <bit>
#include <string>

#include "lib/base/options.h"

namespace tandem {
namespace {

constexpr int64_t kMostChunk = 256;

Status refuse(const std::string& field, int64_t value, const char* why) {
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, field.c_str(), "%s = %lld %s", field.c_str(), static_cast<long long>(value),
              why);
}

bool is_power_of_two(int64_t n) { return n > 0 && std::has_single_bit(static_cast<uint64_t>(n)); }

// name: the stage's name, "pruning.decode[0].stages[1]".
Status take_stage(const tandem_pruning_stage& from, const std::string& name, PruningStage* to) {
  if (from.judge < TANDEM_JUDGE_DESCENT || from.judge > TANDEM_JUDGE_EXACT)
    return refuse(name + ".judge", from.judge, "is none of TANDEM_JUDGE_DESCENT, TANDEM_JUDGE_BOUNDS, TANDEM_JUDGE_EXACT");
  if (!is_power_of_two(from.chunk_tokens) || from.chunk_tokens > kMostChunk)
    return refuse(name + ".chunk_tokens", from.chunk_tokens, "is not a power of two from 1 to 256");
  if (from.query_block != 0 && (!is_power_of_two(from.query_block) || from.query_block > kMostQueryBlock))
    return refuse(name + ".query_block", from.query_block, "is neither 0 nor a power of two from 1 to 64");
  if (from.plus_next != 0 && from.plus_next != 1) return refuse(name + ".plus_next", from.plus_next, "is neither 0 nor 1");
  const int64_t unit = from.plus_next != 0 ? 2 * from.chunk_tokens : from.chunk_tokens;
  if (from.keep_tokens <= 0 || from.keep_tokens > INT32_MAX || from.keep_tokens % unit != 0)
    return refuse(name + ".keep_tokens", from.keep_tokens,
                  from.plus_next != 0 ? "is not a multiple of twice its chunk_tokens, from 1 to 2^31 - 1"
                                      : "is not a multiple of its chunk_tokens, from 1 to 2^31 - 1");
  if (from.refresh_interval < 0 || from.refresh_interval > INT32_MAX)
    return refuse(name + ".refresh_interval", from.refresh_interval, "is not in 0 to 2^31 - 1");
  if (from.from_tokens < 0) return refuse(name + ".from_tokens", from.from_tokens, "is negative");
  if (from.to_tokens != 0 && from.to_tokens <= from.from_tokens)
    return refuse(name + ".to_tokens", from.to_tokens, "is neither 0 nor more than from_tokens");
  to->judge = static_cast<Judge>(from.judge);
  to->chunk_len = from.chunk_tokens;
  to->keep_len = from.keep_tokens;
  to->interval = std::max<int64_t>(1, from.refresh_interval);
  to->plus_next = from.plus_next != 0;
  if (from.query_block != 0) to->query_block = from.query_block;
  to->from_len = from.from_tokens;
  to->to_len = from.to_tokens;
  return {};
}

// True if both stages apply to some query.
bool meet(const PruningStage& a, const PruningStage& b) {
  const auto end = [](const PruningStage& stage) { return stage.to_len == 0 ? INT64_MAX : stage.to_len; };
  return a.from_len < end(b) && b.from_len < end(a);
}

// Checks the stages of a record against each other.
Status check_stages(const PruningRecord& record, const std::string& name) {
  int64_t largest = 0, longest = 0;
  for (size_t i = 0; i < record.stages.size(); ++i) {
    const PruningStage& stage = record.stages[i];
    const std::string field = element_name((name + ".stages").c_str(), static_cast<int64_t>(i));
    largest = std::max(largest, stage.chunk_len);
    longest = std::max(longest, stage.interval);
    for (size_t j = 0; j < i; ++j) {
      const PruningStage& before = record.stages[j];
      if (!meet(before, stage)) continue;
      if (before.chunk_len < stage.chunk_len)
        return refuse(field + ".chunk_tokens", stage.chunk_len, "is more than that of a stage before it");
      if (before.query_block < stage.query_block)
        return refuse(field + ".query_block", stage.query_block, "is more than that of a stage before it");
      if (before.plus_next)
        return refuse(element_name((name + ".stages").c_str(), static_cast<int64_t>(j)) + ".plus_next", 1,
                      "in a stage that is not the last");
    }
  }
  if (record.sink_len % largest != 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, (name + ".sink_tokens").c_str(),
                "%s.sink_tokens = %lld is not a multiple of %lld, the largest chunk_tokens", name.c_str(),
                static_cast<long long>(record.sink_len), static_cast<long long>(largest));
  const int64_t least = 2 * largest + longest - 1;
  if (record.window_len < least)
    return fail(
        TANDEM_ERROR_INVALID_ARGUMENT, (name + ".window_tokens").c_str(),
        "%s.window_tokens = %lld is less than %lld: twice the largest chunk_tokens plus the longest refresh_interval - 1",
        name.c_str(), static_cast<long long>(record.window_len), static_cast<long long>(least));
  return {};
}

Status take_record(const tandem_pruning_record& from, const std::string& name, PruningRecord* to) {
  TANDEM_TRY(check_reserved((name + ".reserved").c_str(), from.reserved));
  if (from.sink_tokens < -1 || from.sink_tokens > INT32_MAX)
    return refuse(name + ".sink_tokens", from.sink_tokens, "is not -1 or in 0 to 2^31 - 1");
  if (from.window_tokens < -1 || from.window_tokens > INT32_MAX)
    return refuse(name + ".window_tokens", from.window_tokens, "is not -1 or in 0 to 2^31 - 1");
  if (from.n_stages < 1 || from.n_stages > kMostStages)
    return refuse(name + ".n_stages", from.n_stages, "is not from 1 to 8");
  const std::string stages = name + ".stages";
  if (from.stages == nullptr)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, stages.c_str(), "%s = NULL with n_stages = %lld", stages.c_str(),
                static_cast<long long>(from.n_stages));
  std::vector<tandem_pruning_stage> given;
  TANDEM_TRY(copy_array_in(from.stages, stages, from.n_stages, &given));
  *to = {};
  if (from.sink_tokens >= 0) to->sink_len = from.sink_tokens;
  if (from.window_tokens >= 0) to->window_len = from.window_tokens;
  for (size_t i = 0; i < given.size(); ++i)
    TANDEM_TRY(take_stage(given[i], element_name(stages.c_str(), static_cast<int64_t>(i)), &to->stages.emplace_back()));
  return check_stages(*to, name);
}

// Facts about the layers that resolving needs.
struct PrunedLayers {
  const std::vector<bool>& prunes;
  const std::vector<Layer>& layers;

  // Returns the record's first stage that the layer has no kernels for; -1: none.
  int64_t first_unsupported(const PruningRecord& record, size_t l) const {
    if (!prunes[l] || layers[l].k_head_dim <= kMostBoundedDim) return -1;
    const auto found = std::find_if(record.stages.begin(), record.stages.end(),
                                    [](const PruningStage& stage) { return stage.judge == Judge::kBounds; });
    return found == record.stages.end() ? -1 : found - record.stages.begin();
  }
  Status refuse_bounds(const std::string& field, size_t l) const {
    return fail(TANDEM_ERROR_UNSUPPORTED, field.c_str(),
                "%s wants bounds of keys: those of layer %zu have %d dimensions, and bounds are kept of up to %d",
                field.c_str(), l, layers[l].k_head_dim, kMostBoundedDim);
  }
};

// Takes the records of one kind from the caller. Without any, checks the preset's records, which *to already holds.
Status take_records(const tandem_pruning_record* from, int64_t n, const char* kind, const PrunedLayers& of,
                    PruningRecord PruningOfLayer::*record, std::vector<PruningOfLayer>* to) {
  const std::string field = std::string("pruning.") + kind, count = std::string("pruning.n_") + kind;
  if (from == nullptr) {
    if (n != 0) return refuse(count, n, "with NULL for the records");
    for (size_t l = 0; l < to->size(); ++l)
      if (of.first_unsupported((*to)[l].*record, l) >= 0) return of.refuse_bounds("pruning.preset", l);
    return {};
  }
  if (n != 1 && n != std::ssize(*to)) return refuse(count, n, "is neither 1 nor the model's number of layers");
  std::vector<tandem_pruning_record> given;
  TANDEM_TRY(copy_array_in(from, field, n, &given));
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string name = element_name(field.c_str(), static_cast<int64_t>(i));
    PruningRecord taken;
    TANDEM_TRY(take_record(given[i], name, &taken));
    for (size_t l = 0; l < to->size(); ++l) {
      if (n != 1 && l != i) continue;
      const int64_t stage = of.first_unsupported(taken, l);
      if (stage >= 0) return of.refuse_bounds(element_name((name + ".stages").c_str(), stage) + ".judge", l);
      (*to)[l].*record = taken;
    }
  }
  return {};
}

}  // namespace

Status resolve_pruning(const tandem_session_options& options, const std::vector<bool>& prunes,
                       const std::vector<Layer>& layers, Pruning* pruning) {
  *pruning = {};
  if (std::find(prunes.begin(), prunes.end(), true) == prunes.end()) {
    if (options.pruning == nullptr) return {};
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "pruning", "pruning is given, and no layer has a policy that prunes");
  }
  tandem_pruning given;
  TANDEM_TRY(copy_in_or_default(options.pruning, "pruning.", &given));
  if (given.shared_lists != 0 && given.shared_lists != 1)
    return refuse("pruning.shared_lists", given.shared_lists, "is neither 0 nor 1");
  Pruning made;
  made.shares_lists = given.shared_lists != 0;
  made.layers.resize(layers.size());
  const char* const preset = given.preset == nullptr ? "small" : given.preset;
  for (size_t l = 0; l < layers.size(); ++l)
    if (!find_pruning_preset(preset, l, &made.layers[l]))
      return fail(TANDEM_ERROR_NOT_FOUND, "pruning.preset", "pruning.preset = \"%.64s\" is not one of %s", preset,
                  pruning_preset_names());
  const PrunedLayers of{prunes, layers};
  TANDEM_TRY(take_records(given.decode, given.n_decode, "decode", of, &PruningOfLayer::decode, &made.layers));
  TANDEM_TRY(take_records(given.append, given.n_append, "append", of, &PruningOfLayer::append, &made.layers));
  *pruning = std::move(made);
  return {};
}

}  // namespace tandem
