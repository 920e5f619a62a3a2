// SPDX-License-Identifier: MIT
#include "lib/attend/session_core.h"

#include <algorithm>

#include "lib/machine/device_status.h"
#include "lib/patterns/pattern.h"
#include "lib/pieces/stream_buffers.h"

namespace tandem {
namespace {

// Checks option selection_indices: in at least one layer, calls of planned steps must be able to name keys.
Status check_may_name(const SessionCore& core) {
  const SizeTerms terms = core.terms();
  for (size_t l = 0; l < terms.layers.size(); ++l)
    if (terms.names_in_steps(l)) return {};
  return fail(
      TANDEM_ERROR_UNSUPPORTED, "selection_indices",
      "selection_indices = %lld: no layer has policy \"all\", no streaming heads and at most %d query heads to a KV head",
      static_cast<long long>(terms.options.selection_len), kMostListRows);
}

// Compares everything but the values behind pointers. Sinks, RoPE tables and projections may differ between the layers: a
// plan depends only on whether a layer has them.
bool are_alike(Layer a, const Layer& b) {
  if (a.sinks != nullptr && b.sinks != nullptr) a.sinks = b.sinks;
  if (a.rope != nullptr && b.rope != nullptr) a.rope = b.rope;
  if (a.projection != nullptr && b.projection != nullptr && a.hidden_dim() == b.hidden_dim()) a.projection = b.projection;
  return a == b;
}

// Layers whose policy names keys have pruning records or head patterns of their own.
size_t first_like(const std::vector<SessionLayer>& layers, const SessionLayer& layer) {
  if (layer.policy.names_keys()) return layer.idx;
  const auto found = std::find_if(layers.begin(), layers.end(), [&](const SessionLayer& other) {
    return other.heads == nullptr && layer.heads == nullptr && &other.policy == &layer.policy &&
           are_alike(other.layer, layer.layer);
  });
  return found == layers.end() ? layer.idx : found->idx;
}

}  // namespace

Status SessionCore::create(std::shared_ptr<Cache> cache, const tandem_session_options& options,
                           std::unique_ptr<SessionCore>* core) {
  auto made = std::make_unique<SessionCore>(std::move(cache));
  const std::vector<Layer>& layers = made->cache->layers();
  TANDEM_TRY(LayerPolicies::resolve(options, layers, &made->policies));
  TANDEM_TRY(resolve_policy_options(options, &made->options));
  TANDEM_TRY(resolve_pruning(options, made->policies.prune(), layers, &made->options.pruning));
  TANDEM_TRY(
      resolve_patterns(options, known_pattern_kinds(), made->policies.follow_patterns(), layers, &made->options.patterns));
  TANDEM_TRY(resolve_route_options(options, made->policies, layers, &made->routes));
  TANDEM_TRY(resolve_streaming_heads(options, made->policies, layers, &made->heads));
  const Device* device = made->cache->engine().device();
  if (made->routes.is_given() && device == nullptr)
    return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"%s\": the engine has no device", made->routes.name);
  if (device != nullptr) {
    TANDEM_TRY(check_layers(*device, layers));
    TANDEM_TRY(make_routes({*device, layers, made->policies, made->routes, made->cache->store().geometry().extent_len(),
                            !made->heads.empty(), &made->weights},
                           &made->key_routes));
  }
  if (device != nullptr && made->options.selection_len > 0) TANDEM_TRY(check_may_name(*made));
  made->keeps_awake = options.sleep_between_calls == 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    const HeadKinds* const kinds = kinds_of_layer(made->heads, l);
    const Policy& policy = made->policies[l];
    made->layers.push_back({l, l, layers[l], by_q_head(layers[l]), kinds, retrieval_layer(kinds, layers[l]),
                            HeadRuns::retrieval(kinds, layers[l]), HeadRuns::all(kinds, layers[l]), policy,
                            policy.make != nullptr
                                ? policy.make({made->cache.get(), &made->options, l, &made->selector_sums})
                                : std::make_unique<Selector>()});
    made->layers[l].like = first_like(made->layers, made->layers[l]);
    made->has_selectors = made->has_selectors || policy.make != nullptr;
  }
  *core = std::move(made);
  return {};
}

SizeTerms SessionCore::terms() const {
  return {cache->engine().device(),
          cache->layers(),
          cache->store().geometry(),
          policies,
          options,
          routes,
          heads,
          key_routes,
          layouts_of(key_routes),
          device != nullptr ? &device->geometry() : nullptr,
          most_long_bytes};
}

Status SessionCore::need_device() {
  if (device != nullptr) return {};
  const int64_t bytes = pair_totals_bytes(options.patterns);
  const Device& of_engine = *cache->engine().device();
  if (bytes > 0 && pair_totals.data() == nullptr) {
    void* const stream = nullptr;
    Buffer totals;
    TANDEM_TRY(Buffer::create(cache->device_tier(), bytes, Use::kSession, &totals));
    TANDEM_TRY(call_device(of_engine, &DeviceTable::fill, totals.data(), 0, bytes, stream));
    TANDEM_TRY(call_device(of_engine, &DeviceTable::wait, stream));
    pair_totals = std::move(totals);
  }
  return DeviceSession::create(*cache, policies, options, &device);
}

BusAhead SessionCore::bus_ahead(size_t layer_idx, int64_t n_queries) const {
  const std::span<const StreamLayout> layouts = layouts_of(key_routes);
  if (device == nullptr || layouts.empty()) return {};
  const StreamLayout& layout = layouts[layer_idx];
  return {device->hand_over().bus_ahead_ns(static_cast<int32_t>(layer_idx), n_queries),
          StreamBuffers::kBuffers * layout.n_pages * layout.page_bytes};
}

RebuildTerms SessionCore::rebuild_terms(size_t layer_idx, bool may) const {
  const KeyRoute* const route = key_routes[kPlanRecompute].get();
  return may && route != nullptr ? route->terms(layer_idx) : RebuildTerms();
}

}  // namespace tandem
