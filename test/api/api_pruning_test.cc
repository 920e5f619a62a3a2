// SPDX-License-Identifier: MIT
// Policy "hip" on layers and caches of every kind. A record that keeps everything gives the answers of policy "all". A
// record that prunes gives attention over the keys that it lists. Those must be the keys with the largest logits, which
// attention with single keys measures.
#include "one_in.h"
#include "pruned_world.h"

using namespace tandem_test;

namespace {

constexpr int32_t kDescent = TANDEM_JUDGE_DESCENT, kBounds = TANDEM_JUDGE_BOUNDS, kExact = TANDEM_JUDGE_EXACT;

struct Case {
  std::string name;
  std::vector<tandem_layer_options> layers;
  tandem_cache_options cache = short_pages();
};

tandem_layer_options layer_of(int32_t group, int32_t n_kv_heads, int32_t dim) {
  tandem_layer_options layer = plain_layer();
  layer.n_q_heads = group * n_kv_heads;
  layer.n_kv_heads = n_kv_heads;
  layer.k_head_dim = dim;
  return layer;
}

tandem_layer_options latent_layer() {
  tandem_layer_options layer = layer_of(4, 1, 576);
  layer.v_head_dim = 512;
  layer.v_aliases_k = 1;
  return layer;
}

tandem_layer_options rotated_layer(int32_t rope, int32_t rope_dims = 0) {
  tandem_layer_options layer = layer_of(2, 2, 64);
  layer.rope = rope;
  layer.rope_dims = rope_dims;
  return layer;
}

std::vector<Case> shapes() {
  std::vector<Case> cases;
  for (const int32_t group : {1, 4, 7})
    for (const int32_t dim : {64, 80, 256})
      cases.push_back({"group " + std::to_string(group) + ", dim " + std::to_string(dim), {layer_of(group, 2, dim)}});
  cases.push_back({"MLA", {latent_layer()}});
  cases.push_back({"RoPE, halves", {rotated_layer(TANDEM_ROPE_HALVES)}});
  cases.push_back({"RoPE, interleaved, 32 dims", {rotated_layer(TANDEM_ROPE_INTERLEAVED, 32)}});
  tandem_cache_options rotating = short_pages(TANDEM_Q8_0);
  rotating.k_rotation = TANDEM_ROTATION_HADAMARD;
  cases.push_back({"Hadamard", {layer_of(4, 2, 64)}, rotating});
  return cases;
}

std::vector<Case> storage_types() {
  std::vector<Case> cases;
  for (const int32_t k_type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0})
    for (const int32_t v_type : {k_type, k_type % TANDEM_Q4_0 + 1})
      cases.push_back({std::string(tandem_dtype_name(k_type)) + " and " + tandem_dtype_name(v_type),
                       {layer_of(2, 2, 64)},
                       short_pages(k_type, v_type)});
  return cases;
}

std::vector<Case> logit_options() {
  static const std::vector<float> sinks = {0.5f, -1.0f, 2.0f, 0.0f};
  tandem_layer_options with_sinks = layer_of(2, 2, 64), capped = layer_of(2, 2, 64), sliding = layer_of(2, 2, 64);
  with_sinks.sinks = sinks.data();
  capped.soft_cap = 1.5f;
  sliding.sliding_window_tokens = 100;
  return {
      {"learned sinks", {with_sinks}}, {"soft cap", {capped}}, {"sliding windows beside", {capped, sliding, with_sinks}}};
}

bool has_bounds(const Case& of) { return of.layers[0].k_head_dim <= 288; }

// Visits appends of all lengths around a block of 64 queries, alone, side by side and next to decodes, then queries of
// stored tokens, and decode calls over more than one refresh. Calls visit(q_lens, seed, appends).
template <typename Visit>
void converse(Visit visit) {
  const std::vector<std::vector<int64_t>> turns = {{200, 65, 0}, {1, 64, 63}, {1, 1, 1},
                                                   {2, 1, 200},  {1, 130, 1}, {64, 2, 1}};
  int64_t seed = 1;
  for (const auto& q_lens : turns) visit(q_lens, seed++ * 1000, true);
  visit({3, 1, 70}, seed++ * 1000, false);
  for (int i = 0; i < 13; ++i) visit({1, 1, 1}, seed++ * 1000, true);
}

void answers_as_all(const Case& of, int32_t first_judge, int32_t last_judge) {
  const Machine machine(of.layers);
  const Pruned kept(16, 64, keeping_stages(first_judge, last_judge));
  const Keeper hip(machine, kept.options, of.cache, 3), all(machine, dense_options(), of.cache, 3);
  hip.scatter();
  converse([&](const std::vector<int64_t>& q_lens, int64_t seed, bool appends) {
    assert_close_to(hip.turn(q_lens, seed, appends), all.turn(q_lens, seed, appends),
                    of.name + ", turn " + std::to_string(seed / 1000));
  });
}

void keeps_everything(const std::vector<Case>& cases) {
  tandem::test::TakesOneIn is_taken;
  for (const Case& of : cases)
    if (is_taken()) answers_as_all(of, has_bounds(of) ? kBounds : kDescent, kExact);
}

void keeps_everything_of_shapes(void**) { keeps_everything(shapes()); }
void keeps_everything_of_types(void**) { keeps_everything(storage_types()); }
void keeps_everything_of_logit_options(void**) { keeps_everything(logit_options()); }

// A layer that prunes attends its list. A layer with a sliding window attends all keys of that window.
void check_lists(Keeper& hip, const Batch& batch, const std::string& context) {
  const tandem_layer_options& layer = hip.machine.layers[static_cast<size_t>(batch.args.layer_idx)];
  std::vector<std::vector<int64_t>> lists;
  for (int32_t h = 0; h < layer.n_kv_heads; ++h)
    lists.push_back(hip.listed(batch.sequences.back(), h, batch.args.layer_idx));
  const int64_t length = hip.length(batch.sequences.back(), batch.args.layer_idx);
  if (layer.sliding_window_tokens > 0)
    for (const auto& list : lists) assert_int_equal(list.size(), std::min(length, layer.sliding_window_tokens - 1));
  if (layer.sliding_window_tokens > 0) return;
  for (const auto& list : lists) assert_true(length < 400 || std::ssize(list) < length);
  std::vector<float> lse;
  const std::vector<float> o = hip.over(batch, lists, &lse);
  const auto tail = [](const std::vector<float>& of, size_t n) { return std::vector<float>(of.end() - n, of.end()); };
  assert_close_to(tail(batch.o.values, o.size()), o, context);
  assert_close_to(tail(batch.lse.values, lse.size()), lse, context);
}

// A pruned answer equals attention over its list.
void answers_over_lists(const Case& of) {
  const Machine machine(of.layers);
  const Pruned pruned(16, 64,
                      {stage_of(has_bounds(of) ? kBounds : kExact, 16, 128, 4), stage_of(kDescent, 8, 64, 2, 32),
                       stage_of(kExact, 4, 32, 1, 16)});
  Keeper hip(machine, pruned.options, of.cache);
  hip.scatter();
  int64_t seed = 1;
  for (const int64_t n : {400, 1, 1, 65, 1, 1, 1, 1, 1, 200, 1})
    for (int32_t l = 0; l < static_cast<int32_t>(of.layers.size()); ++l) {
      const Batch batch(machine, l, {{hip.ids[0], n}}, 10 * seed++);
      OK(tandem_attend, hip.session, &batch.args);
      if (n == 1) check_lists(hip, batch, of.name + ", call " + std::to_string(seed));
    }
}

void attends_what_it_tells(void**) {
  tandem::test::TakesOneIn is_taken;
  for (const auto& cases : {shapes(), storage_types(), logit_options()})
    for (const Case& of : cases)
      if (is_taken()) answers_over_lists(of);
}

// Returns a KV head's scores of keys under its judge: the logits of attention with a single key. A judge that normalises
// subtracts the head's lse over all keys.
std::vector<float> scores_of(const std::vector<std::vector<float>>& logits, const std::vector<float>& less, int32_t kv_head,
                             int32_t group) {
  std::vector<float> scores;
  for (const auto& of_key : logits) {
    float most = -INFINITY;
    for (size_t h = static_cast<size_t>(kv_head * group); h < static_cast<size_t>((kv_head + 1) * group); ++h)
      most = std::max(most, of_key[h] - (less.empty() ? 0.0f : less[h]));
    scores.push_back(most);
  }
  return scores;
}

constexpr int64_t kSinks = 16, kWindow = 64, kLength = 300;

// Checks that a KV head's list has n_kept keys between sinks and window, those with the largest scores.
void check_kept(const std::vector<int64_t>& list, const std::vector<float>& scores, int64_t n_kept, float slack,
                const std::string& context) {
  const int64_t length = std::ssize(scores);
  float least = INFINITY, most = -INFINITY;
  int64_t n = 0;
  for (int64_t t = 0; t < length; ++t) {
    const bool is_listed = std::binary_search(list.begin(), list.end(), t);
    if (t < kSinks || t > length - 1 - kWindow) assert_true(is_listed);
    if (t < kSinks || t > length - 1 - kWindow) continue;
    n += is_listed;
    (is_listed ? least : most) =
        is_listed ? std::min(least, scores[static_cast<size_t>(t)]) : std::max(most, scores[static_cast<size_t>(t)]);
  }
  assert_int_equal(n, n_kept);
  if (!(least >= most - slack))
    fail_msg("%s: a key with %g is kept, one with %g is not", context.c_str(), static_cast<double>(least),
             static_cast<double>(most));
}

struct Judged {
  int32_t judge;
  float slack;  // largest amount by which a score may exceed its logit
  int64_t length = kLength, n_kept = 24;
  bool shares_lists = false;
};

// With chunks of one key, the list has the keys with the largest scores.
void judges_single_keys(const Case& of, const Judged& by) {
  const Machine machine(of.layers);
  Pruned pruned(kSinks, kWindow, {stage_of(by.judge, 1, by.n_kept, 1)});
  pruned.pruning.shared_lists = by.shares_lists ? 1 : 0;
  Keeper hip(machine, pruned.options, of.cache);
  hip.scatter();
  hip.append(hip.ids[0], by.length - 1, 7);
  const Batch batch(machine, 0, {{hip.ids[0], 1}}, 70);
  OK(tandem_attend, hip.session, &batch.args);
  std::vector<std::vector<int64_t>> lists;
  const tandem_layer_options& layer = of.layers[0];
  const int32_t group = layer.n_q_heads / layer.n_kv_heads;
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) lists.push_back(hip.listed(hip.ids[0], h));
  std::vector<std::vector<float>> logits(static_cast<size_t>(by.length));
  for (int64_t t = 0; t < by.length; ++t) (void)hip.over(batch, {{t}}, &logits[static_cast<size_t>(t)]);
  std::vector<float> less;
  if (by.judge == kExact && (by.shares_lists ? layer.n_q_heads : group) > 1) (void)hip.over(batch, {}, &less);
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    const std::vector<float> scores =
        by.shares_lists ? scores_of(logits, less, 0, layer.n_q_heads) : scores_of(logits, less, h, group);
    check_kept(lists[static_cast<size_t>(h)], scores, by.n_kept, by.slack,
               of.name + ", judge " + std::to_string(by.judge) + ", KV head " + std::to_string(h));
  }
}

void judges_keys_as_attention_sees_them(void**) {
  tandem::test::TakesOneIn is_taken;
  for (const auto& cases : {shapes(), storage_types()})
    for (const Case& of : cases) {
      if (!is_taken()) continue;
      judges_single_keys(of, {kDescent, 1e-4f});
      judges_single_keys(of, {kExact, 1e-4f});
      if (has_bounds(of))
        judges_single_keys(of, {kBounds, 0.06f * std::sqrt(static_cast<float>(of.layers[0].k_head_dim) / 64)});
    }
}

// A KV head's candidates are cut into several pieces whose rows are normalised together. 1,400 keys of 512 bytes are more
// than 20 times the smallest piece. The list is long enough to include the keys of all query heads.
void judges_in_pieces(void**) {
  for (const int32_t group : {1, 4})
    for (const bool shares_lists : {false, true})
      judges_single_keys({"pieces, group " + std::to_string(group), {layer_of(group, 2, 128)}},
                         {kExact, 1e-4f, 1480, 400, shares_lists});
}

// Descents give the same lists for chunks in one page and chunks across several pages.
void descends_alike_in_any_pages(void**) {
  const Pruned pruned(64, 160, {stage_of(kDescent, 64, 256, 1), stage_of(kDescent, 32, 96, 1, 32)});
  tandem::test::TakesOneIn is_taken;
  for (const int32_t dim : {64, 80, 256})
    for (const int32_t k_type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0}) {
      if (!is_taken()) continue;
      const Machine machine({layer_of(4, 2, dim)});
      tandem_cache_options long_pages = short_pages(k_type);
      long_pages.page_tokens = 128;
      const Keeper in_many(machine, pruned.options, short_pages(k_type)), in_few(machine, pruned.options, long_pages);
      in_many.scatter();
      for (const Keeper* each : {&in_many, &in_few}) each->append(each->ids[0], 900, 7);
      for (const int64_t n : {1, 40}) {
        assert_close_to(in_many.turn({n}, 50), in_few.turn({n}, 50), tandem_dtype_name(k_type));
        for (int32_t h = 0; h < 2; ++h) assert_true(in_many.listed(in_many.ids[0], h) == in_few.listed(in_few.ids[0], h));
      }
    }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(keeps_everything_of_shapes),         cmocka_unit_test(keeps_everything_of_types),
      cmocka_unit_test(keeps_everything_of_logit_options),  cmocka_unit_test(attends_what_it_tells),
      cmocka_unit_test(judges_keys_as_attention_sees_them), cmocka_unit_test(judges_in_pieces),
      cmocka_unit_test(descends_alike_in_any_pages),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
