// SPDX-License-Identifier: MIT
#include "device/plain_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "device/stand_in_sums.h"
#include "tandem/pruning.h"

namespace tandem::test {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t chunk_len_of(const DeviceSearchStage& stage) { return int64_t{1} << stage.chunk_shift; }

// Returns the larger number, or NaN if either is NaN.
double larger(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }

// Returns the last existing stage, or -1.
int64_t last_stage(const PlainSearch& search) {
  int64_t last = -1;
  for (size_t i = 0; i < search.stages.size(); ++i)
    if (search.is_there(i)) last = static_cast<int64_t>(i);
  return last;
}

// Returns the query heads whose logits count in a list.
std::vector<int32_t> heads_of(const PlainSearch& search, int32_t list) {
  std::vector<int32_t> heads;
  for (int32_t head = 0; head < search.n_kv_heads * search.group_size; ++head)
    if (search.shares_lists || head / search.group_size == list) heads.push_back(head);
  return heads;
}

double scaled_dot(const PlainSearch& search, const Row& q, const Row& k) {
  return search.scale * stand_in::dot(q.data(), k.data(), q.size());
}

// The queries of one head of the list, as every judge reads them.
struct HeadRows {
  const PlainSearch& search;
  int32_t kv_head;
  std::vector<Row> rows;

  HeadRows(const PlainSearch& of, int32_t head) : search(of), kv_head(head / of.group_size) {
    for (int64_t query = 0; query < of.q_len; ++query) rows.push_back(of.query(query, head));
  }
  // Returns the logit of a query at a key. A query does not see later tokens.
  double logit(size_t query, int64_t token, const Row& key) const {
    if (token > search.p0 + static_cast<int64_t>(query)) return -kInfinity;
    return scaled_dot(search, rows[query], key);
  }
  double largest_logit(int64_t token) const {
    const Row key = search.key(token, kv_head);
    double most = -kInfinity;
    for (size_t query = 0; query < rows.size(); ++query) most = larger(most, logit(query, token, key));
    return most;
  }
};

double judge_bounds(const HeadRows& head, const DeviceSearchStage& stage, int64_t chunk) {
  const Row both = head.search.bounds(stage.bounds_idx, chunk, head.kv_head);
  const size_t dim = both.size() / 2;
  double most = -kInfinity;
  for (const Row& q : head.rows) {
    double sum = 0.0;
    for (size_t d = 0; d < dim; ++d) sum += q[d] * (q[d] < 0.0 ? both[d] : both[dim + d]);
    most = larger(most, head.search.scale * sum);
  }
  return most;
}

// shifts: for each query, a number that is subtracted from its logits.
double judge_exact(const HeadRows& head, const DeviceSearchStage& stage, int64_t chunk, const std::vector<double>& shifts) {
  const int64_t len = chunk_len_of(stage);
  double most = -kInfinity;
  for (int64_t token = chunk * len; token < (chunk + 1) * len; ++token) {
    const Row key = head.search.key(token, head.kv_head);
    for (size_t query = 0; query < head.rows.size(); ++query)
      most = larger(most, head.logit(query, token, key) - shifts[query]);
  }
  return most;
}

ChunkScore exactly(double value) { return {value, value, value}; }

ChunkScore larger_score(const ChunkScore& a, const ChunkScore& b) {
  return {larger(a.value, b.value), larger(a.least, b.least), larger(a.most, b.most)};
}

// Follows the descent from key `low` on, with `half` as the next step, and every other path that a search with rounding may
// take.
ChunkScore descend(const HeadRows& head, int64_t first, int64_t low, int64_t half) {
  const double of_low = head.largest_logit(first + low);
  if (half == 0) return exactly(of_low);
  const double of_high = head.largest_logit(first + low + half);
  const bool goes_high = of_high > of_low;
  const ChunkScore taken = descend(head, first, goes_high ? low + half : low, half / 2);
  if (of_high == of_low || !(std::abs(of_high - of_low) < tolerance_of(of_high, of_low))) return taken;
  const ChunkScore other = descend(head, first, goes_high ? low : low + half, half / 2);
  return {taken.value, std::min(taken.least, other.least), std::max(taken.most, other.most)};
}

// Returns the tokens over whose keys a row's logits are summed: sinks, candidates and window.
std::set<int64_t> summed_tokens(const PlainSearch& search, const DeviceSearchStage& stage, const Chunks& candidates) {
  std::set<int64_t> tokens;
  for (int64_t token = 0; token < search.sink_len; ++token) tokens.insert(token);
  for (const int64_t chunk : candidates)
    for (int64_t i = 0; i < chunk_len_of(stage); ++i) tokens.insert(chunk * chunk_len_of(stage) + i);
  for (int64_t token = search.window_begin(); token <= search.p0; ++token) tokens.insert(token);
  tokens.erase(tokens.upper_bound(search.p0), tokens.end());
  return tokens;
}

// Returns for each query of the head the log-sum-exp of its logits over the tokens.
std::vector<double> log_sums(const HeadRows& head, const std::set<int64_t>& tokens) {
  std::vector<std::vector<double>> logits(head.rows.size());
  for (const int64_t token : tokens) {
    const Row key = head.search.key(token, head.kv_head);
    for (size_t query = 0; query < head.rows.size(); ++query) logits[query].push_back(head.logit(query, token, key));
  }
  std::vector<double> sums;
  for (const std::vector<double>& row : logits) {
    const double most = *std::max_element(row.begin(), row.end());
    double sum = 0.0;
    for (const double x : row) sum += std::exp(x - most);
    sums.push_back(most + std::log(sum));
  }
  return sums;
}

}  // namespace

int64_t PlainSearch::window_begin() const { return std::max<int64_t>(p0 + 1 - window_len, 0); }

bool PlainSearch::is_there(size_t stage) const {
  const DeviceSearchStage& of = stages[stage];
  return of.from_len <= p0 + 1 && (of.to_len == 0 || p0 + 1 < of.to_len);
}

uint32_t PlainSearch::places() const {
  uint32_t bits = 0;
  for (size_t i = 0; i < stages.size(); ++i)
    if (is_there(i)) bits |= 1u << i;
  return bits;
}

int64_t PlainSearch::candidates_end() const {
  int64_t overlap = 0;
  for (size_t i = 0; i < stages.size(); ++i)
    if (keeps_lists && is_there(i)) overlap = std::max<int64_t>(overlap, stages[i].interval - 1);
  return p0 + 1 - window_len + overlap;
}

double tolerance_of(double a, double b) { return kScoreTolerance * std::max({1.0, std::abs(a), std::abs(b)}); }

Chunks find_candidates(const PlainSearch& search, size_t stage, int64_t before, const Chunks& kept_before) {
  const int64_t len = chunk_len_of(search.stages[stage]), end = search.candidates_end();
  Chunks found;
  if (end <= search.sink_len) return found;
  if (before < 0) {
    for (int64_t chunk = search.sink_len / len; chunk * len < end; ++chunk) found.push_back(chunk);
    return found;
  }
  const int64_t n_parts = chunk_len_of(search.stages[static_cast<size_t>(before)]) / len;
  for (const int64_t whole : kept_before)
    for (int64_t part = whole * n_parts; part < (whole + 1) * n_parts; ++part)
      if (part * len < end) found.push_back(part);
  return found;
}

bool keeps_all(const PlainSearch& search, size_t stage, const Chunks& candidates) {
  const DeviceSearchStage& of = search.stages[stage];
  return static_cast<int64_t>(candidates.size()) * chunk_len_of(of) <= of.keep_len;
}

std::vector<ChunkScore> judge_chunks(const PlainSearch& search, size_t stage, int32_t list, const Chunks& candidates) {
  const DeviceSearchStage& of = search.stages[stage];
  const std::vector<int32_t> heads = heads_of(search, list);
  const bool normalises =
      of.judge == TANDEM_JUDGE_EXACT && static_cast<int64_t>(stage) == last_stage(search) && heads.size() > 1;
  std::set<int64_t> summed;
  if (normalises) summed = summed_tokens(search, of, candidates);
  std::vector<ChunkScore> scores(candidates.size(), exactly(-kInfinity));
  for (const int32_t head : heads) {
    const HeadRows rows(search, head);
    const std::vector<double> shifts = normalises ? log_sums(rows, summed) : std::vector<double>(rows.rows.size(), 0.0);
    for (size_t i = 0; i < candidates.size(); ++i) {
      ChunkScore score;
      if (of.judge == TANDEM_JUDGE_BOUNDS) score = exactly(judge_bounds(rows, of, candidates[i]));
      if (of.judge == TANDEM_JUDGE_EXACT) score = exactly(judge_exact(rows, of, candidates[i], shifts));
      if (of.judge == TANDEM_JUDGE_DESCENT) score = descend(rows, candidates[i] * chunk_len_of(of), 0, chunk_len_of(of) / 2);
      scores[i] = larger_score(scores[i], score);
    }
  }
  for (ChunkScore& score : scores)
    if (std::isnan(score.value)) score = exactly(kInfinity);
  return scores;
}

int64_t n_best(const DeviceSearchStage& stage) {
  const int64_t n = stage.keep_len >> stage.chunk_shift;
  return stage.plus_next != 0 ? n / 2 : n;
}

Chunks keep_best(const PlainSearch& search, size_t stage, const Chunks& candidates, const std::vector<ChunkScore>& scores) {
  std::vector<size_t> order(candidates.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a].value > scores[b].value; });
  Chunks best;
  for (int64_t i = 0; i < n_best(search.stages[stage]) && i < static_cast<int64_t>(order.size()); ++i)
    best.push_back(candidates[order[static_cast<size_t>(i)]]);
  std::sort(best.begin(), best.end());
  return best;
}

Chunks add_next(const PlainSearch& search, size_t stage, const Chunks& best) {
  const DeviceSearchStage& of = search.stages[stage];
  std::set<int64_t> kept(best.begin(), best.end());
  for (const int64_t chunk : best)
    if (of.plus_next != 0 && (chunk + 1) * chunk_len_of(of) < search.candidates_end()) kept.insert(chunk + 1);
  return {kept.begin(), kept.end()};
}

bool stage_runs(const PlainSearch& search, size_t stage, const KeptList& head, uint32_t mark, bool before_runs) {
  if (!search.keeps_lists || before_runs) return true;
  if (head.mark != mark || head.places != search.places()) return true;
  return search.p0 - head.ran_at >= search.stages[stage].interval;
}

void search_list(const PlainSearch& search, int32_t list, uint32_t mark, std::vector<PlainList>* lists) {
  int64_t before = -1;
  for (size_t i = 0; i < search.stages.size(); ++i) {
    PlainList& own = (*lists)[i];
    own.has_run = false;
    if (!search.is_there(i)) continue;
    const PlainList* const parent = before < 0 ? nullptr : &(*lists)[static_cast<size_t>(before)];
    if (stage_runs(search, i, own.head, mark, parent != nullptr && parent->has_run)) {
      const Chunks candidates = find_candidates(search, i, before, parent == nullptr ? Chunks() : parent->chunks);
      own.chunks = candidates;
      if (!keeps_all(search, i, candidates))
        own.chunks = add_next(search, i, keep_best(search, i, candidates, judge_chunks(search, i, list, candidates)));
      own.head = {mark, search.places(), search.p0, static_cast<int32_t>(own.chunks.size()), 0};
      own.has_run = true;
    }
    before = static_cast<int64_t>(i);
  }
}

std::vector<int64_t> named_tokens(const PlainSearch& search, const std::vector<PlainList>& lists) {
  const int64_t begin = search.window_begin(), last = last_stage(search);
  std::set<int64_t> tokens;
  for (int64_t token = 0; token < begin; ++token)
    if (token < search.sink_len || last < 0) tokens.insert(token);
  if (last >= 0) {
    const int64_t len = chunk_len_of(search.stages[static_cast<size_t>(last)]);
    for (const int64_t chunk : lists[static_cast<size_t>(last)].chunks)
      for (int64_t token = chunk * len; token < (chunk + 1) * len && token < begin; ++token) tokens.insert(token);
  }
  return {tokens.begin(), tokens.end()};
}

}  // namespace tandem::test
