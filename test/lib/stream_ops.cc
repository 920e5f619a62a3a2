// SPDX-License-Identifier: MIT
// The random operations of a world, and its checks.
#include <algorithm>
#include <cmath>

#include "lib/stream_world.h"
#include "reference/rounding.h"

namespace harness {

using reference::SequenceModel;

namespace {
constexpr size_t kMostSequences = 5;
}

int64_t StreamWorld::any_id() {
  auto at = models_.begin();
  std::advance(at, random_.integer(0, static_cast<int64_t>(models_.size()) - 1));
  return at->first;
}

void StreamWorld::run(int64_t n_operations) {
  while (n_operations-- > 0) random_operation();
}

void StreamWorld::random_operation() {
  if (models_.empty() || (models_.size() < 2 && random_.chance(0.3))) {
    create();
    return;
  }
  const double dice = random_.uniform();
  if (dice < 0.45)
    random_forward();
  else if (dice < 0.60)
    random_speculation();
  else
    random_change(any_id());
}

// Attends one to three sequences, even and without pending tokens. Some of them may have no new tokens.
void StreamWorld::random_forward() {
  Pass pass;
  for (const auto& [id, model] : models_)
    if (model.even() && model.n_pending() == 0 && random_.chance(0.6)) {
      pass.ids.push_back(id);
      pass.q_lens.push_back(random_.pick<int64_t>({0, 1, 1, 1, 1, 1, 2, 3, 17, 40}));
    }
  if (pass.ids.empty()) return;
  pass.step = random_.chance(0.4);
  pass.append_first = !pass.step && random_.chance(0.2);
  pass.partial = !pass.step && random_.chance(0.1);
  // Leaves out chunks of one token. Another test checks whether these are appends or decodes.
  if (pass.partial && policies_ != Policies::kHgcaShortChunks)
    for (int64_t& q_len : pass.q_lens) q_len += q_len == 1;
  if (pass.step && random_.chance(0.2))
    pass.n_layers = static_cast<int32_t>(random_.integer(0, static_cast<int64_t>(layers_.size()) - 1));
  const auto session = static_cast<size_t>(random_.integer(0, static_cast<int64_t>(sessions_.size()) - 1));
  forward(session, pass);
  // Several decode steps, which fill the windows.
  if (random_.chance(0.3) && pass.n_layers < 0) {
    Pass decode;
    decode.ids = pass.ids;
    decode.q_lens.assign(pass.ids.size(), 1);
    decode.step = random_.chance(0.5);
    for (int64_t i = random_.integer(1, 20); i > 0; --i) forward(session, decode);
  }
}

// Picks the indices of a random chain in the tree.
int64_t StreamWorld::pick_kept(int64_t id, const std::vector<int32_t>& parents, std::vector<int64_t>* kept) {
  for (auto t = static_cast<int32_t>(random_.integer(-1, static_cast<int64_t>(parents.size()) - 1)); t >= 0;
       t = parents[static_cast<size_t>(t)])
    kept->insert(kept->begin(), t);
  return id;
}

void StreamWorld::random_speculation() {
  const int64_t id = any_id();
  SequenceModel& model = models_.at(id);
  if (!model.even()) return;
  if (model.n_pending() == 0) {
    Pass pass;
    pass.ids = {id};
    pass.q_lens = {random_.integer(1, 12)};
    pass.speculative = true;
    pass.tree = random_.chance(0.8);
    const auto session = static_cast<size_t>(random_.integer(0, static_cast<int64_t>(sessions_.size()) - 1));
    // A window shorter than the tree's depth, and one shorter than the committed tokens, have tests of their own.
    const Entry& entry = sessions_[session];
    if (entry.scope.streaming) pass.tree = pass.tree && entry.scope.window_tokens > pass.q_lens[0];
    const bool fits = !entry.hgca || entry.options.window_tokens > pass.q_lens[0];
    if (!fits && policies_ != Policies::kHgcaLongTrees) return;
    pass.step = random_.chance(0.3);
    forward(session, pass);
    // Only the end of the speculation is allowed.
    if (random_.chance(0.3)) {
      append(id, 0, 1);
      remove(id, 0, 0, false);
      fork(id);
    }
    if (random_.chance(0.3)) return;  // the speculation stays open for a while
  }
  std::vector<int64_t> kept;
  pick_kept(id, parents_.at(id), &kept);
  if (random_.chance(0.15))
    truncate(id, model.shortest());
  else
    commit(speculator_.at(id), id, kept);
  check_sequence(id);
}

void StreamWorld::random_change(int64_t id) {
  SequenceModel& model = models_.at(id);
  const int64_t length = model.shortest();
  switch (random_.integer(0, 9)) {
    case 0:
    case 1:
      if (models_.size() < kMostSequences) fork(id);
      break;
    case 2:
      if (models_.size() > 2) {
        drop(id);
        return;
      }
      break;
    case 3:  // to any length, often by a few tokens or a page
      truncate(id, random_.chance(0.5) ? std::max<int64_t>(0, length - random_.integer(0, 20)) : random_.integer(0, length));
      break;
    case 4:
      truncate(id, length + (random_.chance(0.3) ? 1 : 0));
      break;
    case 5:
    case 6:
      if (length > 0) {
        const int64_t first = random_.integer(0, length - 1);
        remove(id, first, random_.integer(0, std::min<int64_t>(length - first, 40)), random_.chance(0.5));
      }
      break;
    case 7:
      reserve(id, random_.integer(0, 100));
      break;
    case 8:  // appends to every layer without attending
      if (model.n_pending() == 0 && model.even()) {
        const int64_t n = random_.integer(0, 70);
        for (size_t l = 0; l < layers_.size(); ++l) append(id, l, n);
      }
      break;
    default:  // makes the layers uneven; forks are refused until a truncation makes them even
      if (model.n_pending() == 0 && random_.chance(0.5)) {
        append(id, static_cast<size_t>(random_.integer(0, static_cast<int64_t>(layers_.size()) - 1)), random_.integer(1, 5));
        fork(id);
        check_sequence(id);
        truncate(id, models_.at(id).shortest());
      }
  }
  if (models_.count(id)) check_sequence(id);
}

// ---- checks ----

// Speculative tokens do not change the digest before they are committed. Another test checks this.
void StreamWorld::check_digest(int64_t id) {
  if (models_.at(id).n_pending() > 0) return;
  uint64_t digest = 0;
  TANDEM_EXPECT(where(), TANDEM_OK, tandem_sequence_digest(&digest, *cache_, id, &error));
  const std::string content = models_.at(id).content();
  const auto by_content = digests_.try_emplace(content, digest).first;
  TANDEM_CHECK(by_content->second == digest,
               where() + "digest of " + std::to_string(id) + " differs from an equal sequence's");
  const auto by_digest = contents_.try_emplace(digest, content).first;
  TANDEM_CHECK(by_digest->second == content, where() + "digest of " + std::to_string(id) + " is that of another content");
}

void StreamWorld::check_rows(int64_t id, size_t layer) {
  const reference::RefLayer& geometry = layers_[layer];
  const SequenceModel& model = models_.at(id);
  const int64_t length = model.length(layer), first = random_.integer(0, length), n = random_.integer(0, length - first);
  // Reading as f32 returns every stored row exactly.
  Tensor k(TANDEM_F32, n, geometry.n_kv_heads, geometry.k_head_dim, random_layout(&random_));
  Tensor v(TANDEM_F32, n, geometry.n_kv_heads, geometry.v_head_dim, random_layout(&random_));
  const tandem_tensor k_view = k.view(), v_view = v.view();
  TANDEM_EXPECT(where(), TANDEM_OK,
                tandem_sequence_read(&k_view, geometry.v_aliases_k ? nullptr : &v_view, *cache_, id,
                                     static_cast<int32_t>(layer), first, &error));
  const auto same = [&](const Tensor& tensor, const std::vector<float>& rows, int32_t dim) {
    for (int64_t t = 0; t < n; ++t)
      for (int32_t h = 0; h < geometry.n_kv_heads; ++h)
        for (int32_t d = 0; d < dim; ++d) {
          const auto at = static_cast<size_t>(((first + t) * geometry.n_kv_heads + h) * dim + d);
          TANDEM_CHECK(
              tensor.get(t, h, d) == static_cast<double>(rows[at]),
              where() + "row " + std::to_string(first + t) + " of " + std::to_string(id) + " reads back differently");
        }
    TANDEM_CHECK(tensor.padding_untouched(), where() + "padding of a read was written");
  };
  same(k, model.k(layer), geometry.k_head_dim);
  if (!geometry.v_aliases_k) same(v, model.v(layer), geometry.v_head_dim);
}

void StreamWorld::check_sequence(int64_t id) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    int64_t length = -1;
    TANDEM_EXPECT(where(), TANDEM_OK, tandem_sequence_length(&length, *cache_, id, static_cast<int32_t>(l), &error));
    TANDEM_CHECK(length == models_.at(id).length(l), where() + "sequence " + std::to_string(id) + " layer " +
                                                         std::to_string(l) + " has " + std::to_string(length) +
                                                         " tokens, not " + std::to_string(models_.at(id).length(l)));
    if (random_.chance(0.2)) check_rows(id, l);
  }
  check_digest(id);
}

StreamWorld::Listed StreamWorld::list_selection(size_t session, int64_t id, size_t layer, int32_t kv_head) {
  const reference::RefLayer& geometry = layers_[layer];
  const int64_t length = models_.at(id).length(layer);
  const auto g = static_cast<int32_t>(random_.integer(0, geometry.group_size() - 1));
  Listed listed;
  listed.layer = layer;
  listed.kv_head = kv_head;
  listed.q_head = kv_head * geometry.group_size() + g;
  listed.keys.resize(static_cast<size_t>(length + 1));
  listed.share.assign(static_cast<size_t>(length + 1), -1.0f);
  int64_t n_kept = -1;
  TANDEM_EXPECT(where(), TANDEM_OK,
                tandem_session_selection(listed.keys.data(), listed.share.data(), length + 1, &n_kept,
                                         *sessions_[session].session, id, static_cast<int32_t>(layer), kv_head, g, &error));
  TANDEM_CHECK(n_kept >= 0 && n_kept <= length, where() + "selection of more keys than there are");
  listed.keys.resize(static_cast<size_t>(n_kept));
  listed.where = where() + "selection of session " + std::to_string(session) + " sequence " + std::to_string(id) +
                 " layer " + std::to_string(layer) + " head " + std::to_string(kv_head);
  TANDEM_CHECK(std::is_sorted(listed.keys.begin(), listed.keys.end()) &&
                   std::adjacent_find(listed.keys.begin(), listed.keys.end()) == listed.keys.end(),
               listed.where + " is not ascending");
  return listed;
}

// For policies that choose by position: compares with the keys that the next query would see, without that query.
void StreamWorld::check_visible(const Entry& entry, int64_t id, const Listed& listed) {
  const reference::RefLayer& geometry = layers_[listed.layer];
  SequenceModel next = models_.at(id);
  const int64_t length = next.length(listed.layer);
  const std::vector<double> zeros(
      static_cast<size_t>(geometry.n_kv_heads * std::max(geometry.k_head_dim, geometry.v_head_dim)));
  next.append(listed.layer, 1, zeros.data(), zeros.data());
  std::vector<int64_t> wanted;
  next.visible(listed.layer, length, entry.scope, &wanted);
  if (!wanted.empty() && wanted.back() == length) wanted.pop_back();
  TANDEM_CHECK(listed.keys == wanted, listed.where + " is not what the policy says");
}

// Sinks and window must be complete. Between them only the selected keys may be listed, except keys too close to the
// threshold.
void StreamWorld::check_selected(reference::HgcaModel& state, int64_t length, const Listed& listed) {
  const size_t layer = listed.layer;
  state.before_decode(layer);
  std::vector<int64_t> chosen;
  for (size_t i = 0; i < listed.keys.size(); ++i) {
    const bool resident = listed.keys[i] < state.sink_end(layer) || listed.keys[i] >= state.window_begin(layer);
    TANDEM_CHECK(!resident || listed.share[i] == 0.0f, listed.where + ": a share inside window or sinks");
    if (!resident) chosen.push_back(listed.keys[i]);
  }
  const int64_t n_resident = state.sink_end(layer) + length - std::min(length, state.window_begin(layer));
  TANDEM_CHECK(static_cast<int64_t>(listed.keys.size() - chosen.size()) == n_resident,
               listed.where + " lacks sinks or window");
  std::vector<int64_t> differing;
  const std::vector<int64_t>& wanted = state.selected(layer, listed.kv_head);
  std::set_symmetric_difference(chosen.begin(), chosen.end(), wanted.begin(), wanted.end(), std::back_inserter(differing));
  for (int64_t j : differing) {
    const std::vector<int64_t>& close = state.uncertain(layer, listed.kv_head);
    TANDEM_CHECK(std::find(close.begin(), close.end(), j) != close.end(),
                 listed.where + ": token " + std::to_string(j) +
                     (std::binary_search(chosen.begin(), chosen.end(), j) ? " is" : " is not") +
                     " selected, window begins at " + std::to_string(state.window_begin(layer)) + ", its maw is " +
                     std::to_string(state.maw(layer, listed.q_head, j)));
  }
  check_shares(state, listed, chosen);
  state.adopt(layer, listed.kv_head, chosen);
}

// Compares the shares of the chosen keys: each key's MAW divided by their sum.
void StreamWorld::check_shares(reference::HgcaModel& state, const Listed& listed, const std::vector<int64_t>& chosen) {
  const auto maw = [&](int64_t token) { return state.maw(listed.layer, listed.q_head, token); };
  double sum = 0.0, wanted_sum = 0.0;
  for (int64_t token : chosen) wanted_sum += maw(token);
  // A MAW in f32 has an error of 2e-7, so shares of a sum of that size are meaningless.
  if (chosen.empty() || !(wanted_sum > 1e-6)) return;
  for (size_t i = 0; i < listed.keys.size(); ++i) {
    const int64_t token = listed.keys[i];
    if (!std::binary_search(chosen.begin(), chosen.end(), token)) continue;
    sum += static_cast<double>(listed.share[i]);
    const double expected = maw(token) / wanted_sum;
    TANDEM_CHECK(std::fabs(static_cast<double>(listed.share[i]) - expected) <= 1e-3 * expected + 1e-5 + 2e-7 / wanted_sum,
                 listed.where + ": share of " + std::to_string(token) + " is " + std::to_string(listed.share[i]) + ", not " +
                     std::to_string(expected));
  }
  TANDEM_CHECK(std::fabs(sum - 1.0) <= 1e-5, listed.where + ": shares sum to " + std::to_string(sum));
}

void StreamWorld::check_selection(size_t session, int64_t id, size_t layer) {
  Entry& entry = sessions_[session];
  const bool selects = entry.hgca && hgca(entry, id).keeps(layer);
  for (int32_t kv_head = 0; kv_head < layers_[layer].n_kv_heads; ++kv_head) {
    const Listed listed = list_selection(session, id, layer, kv_head);
    if (selects)
      check_selected(hgca(entry, id), models_.at(id).length(layer), listed);
    else
      check_visible(entry, id, listed);
  }
}

void StreamWorld::check_everything() {
  for (const auto& [id, model] : models_) {
    check_sequence(id);
    for (size_t l = 0; l < layers_.size(); ++l) check_rows(id, l);
    if (!model.even() || model.n_pending() > 0) continue;
    for (size_t s = 0; s < sessions_.size(); ++s)
      for (size_t l = 0; l < layers_.size(); ++l) check_selection(s, id, l);
  }
}

}  // namespace harness
