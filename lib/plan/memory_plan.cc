// SPDX-License-Identifier: MIT
#include "lib/plan/memory_plan.h"

#include <algorithm>
#include <array>

#include "lib/device/device_session.h"
#include "lib/machine/placement.h"
#include "lib/patterns/pattern.h"
#include "lib/pieces/search_counts.h"
#include "lib/pieces/stream_buffers.h"
#include "lib/pieces/window_staging.h"
#include "lib/routes/routes_taken.h"
#include "lib/store/cache_options.h"

namespace tandem {
namespace {

constexpr int64_t kMostRounding = 2048;  // tokens by which a policy may round up a length

struct SessionBytes {
  int64_t state = 0;
  int64_t selection = 0;
};

// Bytes of one sequence.
SessionBytes session_bytes(const std::vector<Layer>& layers, const LayerPolicies& policies, const PolicyOptions& options,
                           int64_t kv_len) {
  SessionBytes bytes;
  int64_t growth = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (policies[l].bytes == nullptr) continue;
    const SelectorBytes of_layer = policies[l].bytes(layers[l], options, l, kv_len);
    bytes.state += of_layer.state;
    bytes.selection += of_layer.selection;
    growth = std::max(growth, of_layer.growth);
  }
  bytes.selection += growth;
  return bytes;
}

// Needs of the calls that append the last tokens of each sequence.
struct PlannedCalls {
  const SizeTerms& terms;
  Reservation needs;
  int64_t n_window_pages = 0;  // of all sequences, at the given lengths
  std::array<bool, kMostRoutes> uses = {};
  std::array<std::vector<Layer>, kMostRoutes> served = {};  // layers whose calls take a route, one per projection
  int64_t whole_layer_bytes = 0;                            // bytes of a buffer for all keys of a layer

  // Adds one call. Sets *moves if keys move to the device.
  Status add(const CallShape& shape, bool* moves) {
    RoutesTaken taken = possible_routes(terms, shape);
    *moves = taken.any();
    TANDEM_TRY(size_long(terms, shape, taken.uses[kPlanStream], &taken.prefill));
    needs.include(reserve_call(terms, shape, taken));
    whole_layer_bytes = std::max(
        whole_layer_bytes, tandem::whole_layer_bytes(terms.window->layers[shape.layer_idx], taken.prefill.whole_tokens));
    for (size_t r = 0; r < kMostRoutes; ++r) {
      std::vector<Layer>& layers = served[r];
      uses[r] = uses[r] || taken.uses[r];
      if (taken.uses[r] && (layers.empty() || layers.back().projection != shape.layer->projection))
        layers.push_back(*shape.layer);
    }
    return {};
  }
};

// Adds a layer's calls: one of all sequences and, if keys cross the bus, one of each sequence. The pieces of the latter may
// be laid out differently.
Status add_layer(const CallShape& all, PlannedCalls* calls) {
  bool streams = false;
  TANDEM_TRY(calls->add(all, &streams));
  for (size_t i = 0; streams && i < all.sequences.size(); ++i) {
    CallShape one = all;
    one.sequences = all.sequences.subspan(i, 1);
    one.most_queries = std::min(all.most_queries, calls->terms.wanted_queries(one));
    bool ignored = false;
    if (i == 0 || one.sequences[0].length != all.sequences[i - 1].length) TANDEM_TRY(calls->add(one, &ignored));
  }
  return {};
}

// Every sequence counts as having at least one token.
Status plan_calls(const SizeTerms& terms, std::span<const int64_t> kv_lens, PlannedCalls* calls) {
  std::vector<std::vector<SequenceShape>> sequences(terms.layers.size());
  std::vector<CallShape> shapes;
  int64_t n_pages = 0;
  for (size_t l = 0; l < terms.layers.size(); ++l) {
    const Layer& layer = terms.layers[l];
    for (const int64_t kv_len : kv_lens) {
      const int64_t length = std::max<int64_t>(1, kv_len), q_len = std::max<int64_t>(1, terms.routes.append_tokens);
      sequences[l].push_back(planned_sequence(layer, length, std::min(length, q_len)));
    }
    CallShape& shape = shapes.emplace_back(CallShape{&layer, l, sequences[l]});
    TANDEM_TRY(most_queries(*terms.device, windowed_layer(layer, terms.policies[l], terms.options), &shape.most_queries));
    shape.most_queries = std::min(shape.most_queries, terms.wanted_queries(shape));
    n_pages = std::max(n_pages, ring_pages(terms.options, terms.store.page_len, shape.most_queries));
  }
  const auto n_sequences = static_cast<int64_t>(kv_lens.size());
  if (static_cast<double>(n_sequences * n_pages) * static_cast<double>(terms.window->page_bytes) > 0x1p61)
    return fail(TANDEM_ERROR_CAPACITY, "window_tokens", "windows of %lld tokens in %lld sequences are more than 2^61 bytes",
                static_cast<long long>(n_pages * kDevicePageLen), static_cast<long long>(n_sequences));
  for (const int64_t kv_len : kv_lens) calls->n_window_pages += filled_pages(n_pages, std::max<int64_t>(1, kv_len));
  for (size_t l = 0; l < shapes.size(); ++l) {
    for (SequenceShape& sequence : sequences[l]) sequence.window_pages = n_pages;  // a window serves all layers
    TANDEM_TRY(add_layer(shapes[l], calls));
  }
  return {};
}

// Bytes that a decode step of all sequences reads to judge keys. on_device: keys are in the types of the device's window.
void plan_reads(const std::vector<Layer>& layers, const LayerPolicies& policies, const Pruning& pruning,
                std::span<const int64_t> kv_lens, bool on_device, tandem_memory_plan* plan) {
  double mean = 0.0, first = 0.0, most = 0.0;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!policies[l].prunes) continue;
    const Layer layer = on_device ? window_layer(layers[l]) : layers[l];
    PlannedJudging one;
    for (size_t i = 0; i < kv_lens.size(); ++i) {
      if (i == 0 || kv_lens[i] != kv_lens[i - 1])
        one = plan_judging(
            {pruning.layers[l].decode, layer, pruning.shares_lists, true, std::max<int64_t>(0, kv_lens[i] - 1), 1});
      mean += one.mean_bytes;
      first += one.first_mean_bytes;
      most += one.most_bytes;
    }
  }
  constexpr double kMost = 0x1p62;
  plan->judged_kv_bytes = static_cast<int64_t>(std::min(mean, kMost));
  plan->judged_first_bytes = static_cast<int64_t>(std::min(first, kMost));
  plan->judged_max_bytes = static_cast<int64_t>(std::min(most, kMost));
}

Status plan_device(const SizeTerms& terms, std::span<const int64_t> kv_lens, tandem_memory_plan* plan) {
  plan->device_window_bytes = plan->device_window_max_bytes = plan->device_work_bytes = plan->shared_bytes = 0;
  plan->device_stream_bytes = plan->device_weights_bytes = 0;
  if (terms.device == nullptr || kv_lens.empty()) return {};
  PlannedCalls calls{terms, {}};
  TANDEM_TRY(plan_calls(terms, kv_lens, &calls));
  const SessionWork work = make_session_work(terms.layers, calls.needs);
  const int64_t kept_bytes = std::ssize(kv_lens) * terms.window->kept_bytes;
  plan->device_window_bytes = calls.n_window_pages * terms.window->page_bytes + kept_bytes;
  plan->device_window_max_bytes = calls.needs.window_pages * terms.window->page_bytes + kept_bytes;
  plan->device_work_bytes = work.work_bytes + constants_bytes(terms.layers) + pair_totals_bytes(terms.options.patterns);
  plan->device_stream_bytes = StreamBuffers::kBuffers * calls.whole_layer_bytes;
  plan->shared_bytes = work.shared_bytes + WindowStaging::bytes_of(*terms.window);
  for (size_t r = 0; r < kMostRoutes; ++r) {
    if (!calls.uses[r]) continue;
    const RouteBytes bytes = terms.key_routes[r]->bytes(terms, calls.served[r]);
    plan->device_stream_bytes += bytes.buffers;
    plan->device_weights_bytes += bytes.weights;
  }
  return {};
}

Status resolve_policies(const tandem_session_options& session, const std::vector<Layer>& layers, LayerPolicies* policies,
                        PolicyOptions* options) {
  TANDEM_TRY(resolve_policy_options(session, options));
  TANDEM_TRY(LayerPolicies::resolve(session, layers, policies));
  TANDEM_TRY(resolve_pruning(session, policies->prune(), layers, &options->pruning));
  return resolve_patterns(session, known_pattern_kinds(), policies->follow_patterns(), layers, &options->patterns);
}

}  // namespace

Status plan_memory(const Engine& engine, std::vector<Layer> layers, const tandem_cache_options& cache,
                   const tandem_session_options* session, std::span<const int64_t> kv_lens, tandem_memory_plan* plan) {
  int64_t page_len = 0;
  TANDEM_TRY(resolve_cache_options(cache, &layers, &page_len));
  LayerPolicies policies = LayerPolicies::all_of(kPolicyAll, layers);
  PolicyOptions options;
  RouteOptions routes;
  std::vector<HeadKinds> heads;
  if (session != nullptr) TANDEM_TRY(resolve_policies(*session, layers, &policies, &options));
  if (session != nullptr) TANDEM_TRY(resolve_route_options(*session, policies, layers, &routes));
  if (session != nullptr) TANDEM_TRY(resolve_streaming_heads(*session, policies, layers, &heads));
  if (engine.device() != nullptr) TANDEM_TRY(check_layers(*engine.device(), layers));
  const StoreGeometry geometry = make_store_geometry(layers, page_len, n_nodes(engine.cpu()));
  int64_t n_pages = 0;
  SessionBytes bytes;
  double longest = 0.0;
  double bytes_at_most =
      3.0 * static_cast<double>(geometry.token_bytes + geometry.x_token_bytes);  // keeps the sums below from overflowing
  for (const Layer& layer : layers) bytes_at_most += 4.0 * (layer.n_q_heads + layer.n_kv_heads);
  for (size_t i = 0; i < kv_lens.size(); ++i) {
    if (kv_lens[i] < 0 || kv_lens[i] > INT32_MAX)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "kv_lens", "kv_lens[%zu] = %lld is not in 0 to 2^31 - 1", i,
                  static_cast<long long>(kv_lens[i]));
    longest += static_cast<double>(kv_lens[i] + geometry.page_len * geometry.pages_per_extent + kMostRounding);
    if (longest * bytes_at_most > 0x1p62)
      return fail(TANDEM_ERROR_CAPACITY, "kv_lens", "kv_lens up to [%zu] = %lld add up to more than 2^62 bytes", i,
                  static_cast<long long>(kv_lens[i]));
    n_pages += (kv_lens[i] + page_len - 1) / page_len;
    const SessionBytes one = session_bytes(layers, policies, options, kv_lens[i]);
    bytes.state += one.state;
    bytes.selection += one.selection;
  }
  const int64_t n_extents = (n_pages + geometry.pages_per_extent - 1) / geometry.pages_per_extent;
  plan->host_kv_bytes = n_extents * geometry.extent_bytes;
  plan->host_session_bytes = bytes.state;
  plan->selection_max_bytes = bytes.selection;
  Routes key_routes;
  if (engine.device() != nullptr)
    TANDEM_TRY(make_routes({*engine.device(), layers, policies, routes, geometry.extent_len(), !heads.empty(), nullptr},
                           &key_routes));
  const WindowGeometry window = make_window_geometry(layers, policies, options.pruning);
  TANDEM_TRY(plan_device(
      {engine.device(), layers, geometry, policies, options, routes, heads, key_routes, layouts_of(key_routes), &window},
      kv_lens, plan));
  plan_reads(layers, policies, options.pruning, kv_lens, engine.device() != nullptr, plan);
  plan->kv_token_bytes = geometry.token_bytes;
  plan->x_token_bytes = geometry.x_token_bytes;
  const int64_t needed = plan->host_kv_bytes + plan->host_session_bytes;
  const int64_t on_device =
      plan->device_window_bytes + plan->device_work_bytes + plan->device_stream_bytes + plan->device_weights_bytes;
  if (cache.device_cap_bytes > 0 && on_device > cache.device_cap_bytes)
    return fail(TANDEM_ERROR_CAPACITY, "device_cap_bytes", "device_cap_bytes = %lld: the plan needs %lld",
                static_cast<long long>(cache.device_cap_bytes), static_cast<long long>(on_device));
  if (cache.host_cap_bytes > 0 && needed > cache.host_cap_bytes)
    return fail(TANDEM_ERROR_CAPACITY, "host_cap_bytes", "host_cap_bytes = %lld: the plan needs %lld",
                static_cast<long long>(cache.host_cap_bytes), static_cast<long long>(needed));
  return {};
}

}  // namespace tandem
