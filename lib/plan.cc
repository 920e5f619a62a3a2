// SPDX-License-Identifier: MIT
#include "lib/plan.h"

#include <algorithm>

#include "lib/cache.h"
#include "lib/device_session.h"
#include "lib/dtype.h"
#include "lib/placement.h"
#include "lib/routes/recompute.h"
#include "lib/routes/route.h"
#include "lib/routes/stream_pieces.h"
#include "lib/sequence_state.h"

namespace tandem {
namespace {

struct SessionBytes {
  int64_t state = 0;
  int64_t selection = 0;
};

// One sequence. A selection is copied to a larger buffer when it grows: at that moment one KV head has both.
SessionBytes session_bytes(const std::vector<Layer>& layers, const StoreGeometry& geometry, const PolicyOptions& options,
                           int64_t kv_len) {
  SessionBytes bytes;
  const int64_t n_blocks = (kv_len + Maw::kBlock - 1) / Maw::kBlock;
  const int64_t host_len = std::max<int64_t>(0, kv_len - options.window_len);
  int64_t largest_head = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].sliding_window > 0) continue;
    const int64_t key_bytes = geometry.layers[l].row_bytes.total();
    bytes.state += n_blocks * Maw::kBlock * (layers[l].n_q_heads + layers[l].n_kv_heads) * 4;
    bytes.selection += host_len * layers[l].n_kv_heads * key_bytes;
    largest_head = std::max(largest_head, host_len * key_bytes);
  }
  bytes.selection += largest_head;
  return bytes;
}

// Sessions take these at the first calls of as many sequences, one query each (lib/device_session.h). page_bytes: of
// windows.
Status plan_device(const Engine& engine, const std::vector<Layer>& layers, int64_t page_bytes, const CallSize& size,
                   tandem_memory_plan* plan) {
  plan->device_window_bytes = plan->device_work_bytes = plan->shared_bytes = 0;
  if (engine.device() == nullptr || size.n_sequences == 0) return {};
  const int64_t window_len = size.n_pages / size.n_sequences * kDevicePageLen;
  if (static_cast<double>(size.n_pages) * static_cast<double>(page_bytes) > 0x1p61)
    return fail(TANDEM_ERROR_CAPACITY, "window_tokens", "windows of %lld tokens in %lld sequences are more than 2^61 bytes",
                static_cast<long long>(window_len), static_cast<long long>(size.n_sequences));
  plan->device_window_bytes = size.n_pages * page_bytes;
  DeviceLimits limits;
  for (const Layer& layer : layers) limits.include(device_limits(*engine.device(), layer, size));
  const SessionWork work = make_session_work(layers, limits);
  plan->device_work_bytes = work.work_bytes + constants_bytes(layers);
  plan->shared_bytes = work.shared_bytes;
  return {};
}

// Of a session with options: sequences of these lengths.
struct Sequences {
  const PolicyOptions& options;
  int64_t page_len;
  std::span<const int64_t> kv_lens;

  int64_t size() const { return static_cast<int64_t>(kv_lens.size()); }
  // What the last token of one sees outside the window.
  TokenRange outside(const Layer& layer, int64_t kv_len) const {
    const int64_t block = evict_len(options.window_len, page_len);
    const int64_t end = std::max<int64_t>(0, kv_len - 1 - options.window_len) / block * block;
    const int64_t begin = layer.sliding_window > 0 ? kv_len - layer.sliding_window : 0;
    return {std::clamp<int64_t>(begin, 0, end), end};
  }
};

// Of the layer that takes most of each.
void add_pieces(const std::vector<Layer>& layers, const std::vector<StreamLayout>& streams, const Sequences& sequences,
                CallSize* size) {
  for (size_t l = 0; l < layers.size(); ++l) {
    int64_t n = 0;
    for (const int64_t kv_len : sequences.kv_lens) {
      const TokenRange tokens = sequences.outside(layers[l], kv_len);
      n += count_pieces(streams[l], layers[l].n_kv_heads, tokens.begin, tokens.end);
    }
    size->n_pieces = std::max(size->n_pieces, n);
    size->n_stream_pages = std::max(size->n_stream_pages, streams[l].n_pages);
  }
}

// Likewise.
void add_rebuilt_parts(const std::vector<Layer>& layers, const std::vector<RebuildLayout>& layouts, double share,
                       const Sequences& sequences, CallSize* size) {
  for (size_t l = 0; l < layers.size(); ++l) {
    RebuiltCount count;
    for (const int64_t kv_len : sequences.kv_lens) {
      const TokenRange tokens = sequences.outside(layers[l], kv_len);
      count.add(share, tokens.end - tokens.begin, 1);
    }
    size->n_rebuilt_parts = std::max(size->n_rebuilt_parts, count.all_parts(layouts[l]));
    size->n_rebuilt_pages = std::max(size->n_rebuilt_pages, count.n_pages);
  }
}

struct Routes {
  const RouteOptions& options;
  const Policy& policy;
  int64_t extent_len;
};

// What the routes to the device take there: buffers, weights, and what a call comes to.
Status plan_routes(const Engine& engine, const std::vector<Layer>& layers, const Routes& routes, const Sequences& sequences,
                   CallSize* size, tandem_memory_plan* plan) {
  plan->device_stream_bytes = plan->device_weights_bytes = 0;
  if (engine.device() == nullptr || routes.options.route == Route::kHost) return {};
  std::vector<StreamLayout> streams;
  const int64_t buffer_bytes = routes.options.buffer_bytes;
  TANDEM_TRY(make_stream_layouts(layers, routes.policy, routes.extent_len, buffer_bytes, &streams));
  std::vector<RebuildLayout> rebuilt;
  if (routes.options.route == Route::kRecompute) TANDEM_TRY(make_rebuild_layouts(layers, buffer_bytes, &rebuilt));
  if (sequences.size() == 0) return {};
  const bool streams_keys = !streams.empty() && routes.options.streams_keys();
  if (streams_keys) plan->device_stream_bytes = StreamBuffers::kBuffers * buffer_bytes;
  if (streams_keys && routes.options.is_by_device()) add_pieces(layers, streams, sequences, size);
  if (rebuilt.empty()) return {};
  plan->device_stream_bytes += RebuildBuffers::bytes_of(*engine.device(), layers, rebuilt);
  plan->device_weights_bytes = ProjectionsOnDevice::bytes_of(layers);
  add_rebuilt_parts(layers, rebuilt, routes.options.share, sequences, size);
  return {};
}

}  // namespace

Status plan_memory(const Engine& engine, std::vector<Layer> layers, const tandem_cache_options& cache,
                   const tandem_session_options* session, std::span<const int64_t> kv_lens, tandem_memory_plan* plan) {
  int64_t page_len = 0;
  TANDEM_TRY(resolve_cache_options(cache, &layers, &page_len));
  const Policy* policy = &kPolicyAll;
  PolicyOptions options;
  RouteOptions routes;
  if (session != nullptr) TANDEM_TRY(resolve_session_options(*session, &policy, &options));
  if (session != nullptr) TANDEM_TRY(resolve_route_options(*session, *policy, layers, &routes));
  const StoreGeometry geometry = make_store_geometry(layers, page_len, n_nodes(engine.cpu()));
  int64_t n_pages = 0;
  SessionBytes bytes;
  double longest = 0.0;
  double bytes_at_most =
      3.0 * static_cast<double>(geometry.token_bytes + geometry.x_token_bytes);  // nothing below overflows
  for (const Layer& layer : layers) bytes_at_most += 4.0 * (layer.n_q_heads + layer.n_kv_heads);
  for (size_t i = 0; i < kv_lens.size(); ++i) {
    if (kv_lens[i] < 0 || kv_lens[i] > INT32_MAX)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "kv_lens", "kv_lens[%zu] = %lld is not in 0 to 2^31 - 1", i,
                  static_cast<long long>(kv_lens[i]));
    longest += static_cast<double>(kv_lens[i] + geometry.page_len * geometry.pages_per_extent + Maw::kBlock);
    if (longest * bytes_at_most > 0x1p62)
      return fail(TANDEM_ERROR_CAPACITY, "kv_lens", "kv_lens up to [%zu] = %lld add up to more than 2^62 bytes", i,
                  static_cast<long long>(kv_lens[i]));
    n_pages += (kv_lens[i] + page_len - 1) / page_len;
    if (!policy->keeps_maw) continue;
    const SessionBytes one = session_bytes(layers, geometry, options, kv_lens[i]);
    bytes.state += one.state;
    bytes.selection += one.selection;
  }
  const int64_t n_extents = (n_pages + geometry.pages_per_extent - 1) / geometry.pages_per_extent;
  plan->host_kv_bytes = n_extents * geometry.extent_bytes;
  plan->host_session_bytes = bytes.state;
  plan->selection_max_bytes = bytes.selection;
  const auto n_sequences = static_cast<int64_t>(kv_lens.size());
  CallSize size{n_sequences, n_sequences, 1, n_sequences * ring_pages(options, page_len, 1),
                evicted_at_once(*policy, options, page_len)};
  TANDEM_TRY(
      plan_routes(engine, layers, {routes, *policy, geometry.extent_len()}, {options, page_len, kv_lens}, &size, plan));
  TANDEM_TRY(plan_device(engine, layers, make_window_geometry(layers, *policy).page_bytes, size, plan));
  plan->kv_token_bytes = geometry.token_bytes;
  plan->x_token_bytes = geometry.x_token_bytes;
  const int64_t needed = plan->host_kv_bytes + plan->host_session_bytes;
  // What "auto" cannot have, it goes without.
  const int64_t on_device = plan->device_window_bytes + plan->device_work_bytes +
                            (routes.is_by_device() ? plan->device_stream_bytes + plan->device_weights_bytes : 0);
  if (cache.device_cap_bytes > 0 && on_device > cache.device_cap_bytes)
    return fail(TANDEM_ERROR_CAPACITY, "device_cap_bytes", "device_cap_bytes = %lld: the plan needs %lld",
                static_cast<long long>(cache.device_cap_bytes), static_cast<long long>(on_device));
  if (cache.host_cap_bytes > 0 && needed > cache.host_cap_bytes)
    return fail(TANDEM_ERROR_CAPACITY, "host_cap_bytes", "host_cap_bytes = %lld: the plan needs %lld",
                static_cast<long long>(cache.host_cap_bytes), static_cast<long long>(needed));
  return {};
}

}  // namespace tandem
