// SPDX-License-Identifier: MIT
#include "lib/plan.h"

#include <algorithm>

#include "lib/cache.h"
#include "lib/device_projections.h"
#include "lib/device_session.h"
#include "lib/dtype.h"
#include "lib/placement.h"
#include "lib/routes/call_plan.h"
#include "lib/routes/prefill_size.h"
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

// Sessions take these at the first calls of as many sequences (lib/device_session.h). page_bytes: of windows; limits: what
// calls and steps come to beside `size`.
Status plan_device(const Engine& engine, const std::vector<Layer>& layers, int64_t page_bytes, const CallSize& size,
                   DeviceLimits limits, tandem_memory_plan* plan) {
  plan->device_window_bytes = plan->device_work_bytes = plan->shared_bytes = 0;
  if (engine.device() == nullptr || size.n_sequences == 0) return {};
  const int64_t window_len = size.n_pages / size.n_sequences * kDevicePageLen;
  if (static_cast<double>(size.n_pages) * static_cast<double>(page_bytes) > 0x1p61)
    return fail(TANDEM_ERROR_CAPACITY, "window_tokens", "windows of %lld tokens in %lld sequences are more than 2^61 bytes",
                static_cast<long long>(window_len), static_cast<long long>(size.n_sequences));
  plan->device_window_bytes = size.n_pages * page_bytes;
  for (const Layer& layer : layers) limits.include(device_limits(*engine.device(), layer, size));
  const SessionWork work = make_session_work(layers, limits);
  plan->device_work_bytes = work.work_bytes + constants_bytes(layers);
  plan->shared_bytes = work.shared_bytes;
  return {};
}

// What calls may stream of sequences of kv_lens, whose last tokens they append.
struct Streaming {
  const Policy& policy;
  const PolicyOptions& options;
  const RouteOptions& routes;
  const StoreGeometry& store;
  std::span<const int64_t> kv_lens;
  std::span<const HeadKinds> heads;

  const HeadKinds* kinds(size_t l) const { return kinds_of_layer(heads, l); }
  int64_t appended(int64_t kv_len) const { return std::min(kv_len, std::max<int64_t>(1, routes.append_tokens)); }
  // "auto" has a layer's keys sent where it is worth planning, unless the CPU is faster, which is not known here.
  bool may_stream(const std::vector<Layer>& layers, size_t l) const {
    const Layer& layer = retrieval_layer(kinds(l), layers[l]);
    if (layer.n_kv_heads == 0) return false;
    if (routes.route == Route::kHost || layer.rope != nullptr || !can_stream(policy_of_layer(policy, layer))) return false;
    int64_t n_tokens = 0;
    for (const int64_t kv_len : kv_lens) {
      const TokenRange tokens = streamed(layer, kv_len);
      n_tokens += tokens.end - tokens.begin;
    }
    return routes.always_streams() || is_worth_planning(n_tokens * token_kv_bytes(layer));
  }
  bool may_stream(const std::vector<Layer>& layers) const {
    for (size_t l = 0; l < layers.size(); ++l)
      if (may_stream(layers, l)) return true;
    return false;
  }
  TokenRange streamed(const Layer& layer, int64_t kv_len) const {
    const int64_t n = appended(kv_len);
    const int64_t last = n > DeviceSession::kMostTokens ? kv_len - 1 : kv_len - n;  // the first query of the last chunk
    return outside_of(layer, options, store.page_len, kv_len - n, last);
  }
};

// Of the layer that takes most of each.
void add_pieces(const std::vector<Layer>& layers, const std::vector<StreamLayout>& streams, const Streaming& calls,
                CallSize* size) {
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!calls.may_stream(layers, l)) continue;
    int64_t n = 0, longest = 0;
    for (const int64_t kv_len : calls.kv_lens) {
      const TokenRange tokens = calls.streamed(layers[l], kv_len);
      longest = std::max(longest, tokens.end - tokens.begin);
    }
    const StreamLayout layout = shorten_pages(layers[l], streams[l], longest);
    for (const int64_t kv_len : calls.kv_lens) {
      const TokenRange tokens = calls.streamed(layers[l], kv_len);
      n += count_pieces(layout, HeadRuns::retrieval(calls.kinds(l), layers[l]).get(), tokens.begin, tokens.end);
    }
    size->n_pieces = std::max(size->n_pieces, n);
    size->n_stream_pages = std::max(size->n_stream_pages, layout.n_pages);
  }
}

// Likewise.
void add_rebuilt_parts(const std::vector<Layer>& layers, const std::vector<RebuildLayout>& layouts, const Streaming& calls,
                       CallSize* size) {
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!calls.may_stream(layers, l)) continue;
    RebuiltCount count;
    for (const int64_t kv_len : calls.kv_lens) {
      const TokenRange tokens = calls.streamed(layers[l], kv_len);
      count.add(tokens.end - tokens.begin, 1);
    }
    size->n_rebuilt_parts = std::max(size->n_rebuilt_parts, count.all_parts(layouts[l]));
    size->n_rebuilt_pages = std::max(size->n_rebuilt_pages, count.n_pages);
  }
}

// What crosses the bus, and what a session takes for that.
struct RouteLayouts {
  std::vector<StreamLayout> streams;
  std::vector<RebuildLayout> rebuilt;
};

Status plan_routes(const Engine& engine, const std::vector<Layer>& layers, const Policy& policy, const Streaming& calls,
                   RouteLayouts* made, tandem_memory_plan* plan) {
  const RouteOptions& routes = calls.routes;
  plan->device_stream_bytes = plan->device_weights_bytes = 0;
  if (engine.device() == nullptr || routes.route == Route::kHost) return {};
  TANDEM_TRY(make_stream_layouts(layers, policy, calls.store.extent_len(), routes, &made->streams));
  TANDEM_TRY(find_rebuild_layouts(*engine.device(), layers, policy, routes, !calls.heads.empty(), &made->rebuilt));
  if (calls.kv_lens.empty() || (routes.route == Route::kAuto && !calls.may_stream(layers))) return {};
  if (!made->streams.empty() && routes.streams_keys())
    plan->device_stream_bytes = StreamBuffers::kBuffers * routes.buffer_bytes;
  if (made->rebuilt.empty()) return {};
  plan->device_stream_bytes += RebuildBuffers::bytes_of(*engine.device(), layers, made->rebuilt);
  plan->device_weights_bytes = ProjectionsOnDevice::bytes_of(layers);
  return {};
}

// Long appends, each in a call of its own (lib/routes/prefill.cc).
Status add_prefill(const Device& device, const std::vector<Layer>& layers, const WindowGeometry& window,
                   const Streaming& calls, DeviceLimits* limits) {
  for (size_t l = 0; l < layers.size(); ++l)
    for (const int64_t kv_len : calls.kv_lens) {
      if (!calls.may_stream(layers, l) || rotates_queries(layers[l])) break;
      const int64_t n = calls.appended(kv_len);
      const TokenRange tokens = calls.streamed(layers[l], kv_len);
      if (n <= DeviceSession::kMostTokens || tokens.begin >= tokens.end) continue;
      const PrefillTerms terms{calls.store.extent_len(), calls.routes.buffer_bytes,  device.info.n_multiprocessors,
                               calls.routes.piece_heads, calls.routes.append_tokens, window.layers[l].bytes};
      PrefillSize size;
      TANDEM_TRY(size_prefill(layers[l], terms, n, keys_of_append(layers[l], calls.options, calls.store.page_len, kv_len, n),
                              &size));
      limits->include(
          prefill_limits(device, layers[l], size,
                         count_prefill_pieces(size.layout, calls.kinds(l), layers[l], tokens, calls.options.sink_len),
                         ring_pages(calls.options, calls.store.page_len, size.room_tokens)));
    }
  return {};
}

// Of the first calls of all sequences.
Status plan_calls(const Engine& engine, const std::vector<Layer>& layers, const Policy& policy, const Streaming& calls,
                  const RouteLayouts& made, tandem_memory_plan* plan) {
  const auto n_sequences = static_cast<int64_t>(calls.kv_lens.size());
  const int64_t page_len = calls.store.page_len;
  int64_t q_len = 1, n_tokens = 0;
  for (const int64_t kv_len : calls.kv_lens) {
    n_tokens += std::max<int64_t>(1, calls.appended(kv_len));
    q_len = std::max(q_len, std::min(calls.appended(kv_len), DeviceSession::kMostTokens));
  }
  CallSize size{n_tokens,
                n_sequences,
                q_len,
                n_sequences * ring_pages(calls.options, page_len, q_len),
                evicted_at_once(policy, calls.options, page_len),
                calls.heads.empty() ? 1 : 2};
  const WindowGeometry window = make_window_geometry(layers, policy);
  DeviceLimits limits;
  if (calls.routes.plans_steps()) limits = step_limits(layers, size, limits);
  if (!made.streams.empty()) {
    if (calls.routes.streams_keys()) add_pieces(layers, made.streams, calls, &size);
    if (!made.rebuilt.empty()) add_rebuilt_parts(layers, made.rebuilt, calls, &size);
    if (calls.routes.appends_at_once()) TANDEM_TRY(add_prefill(*engine.device(), layers, window, calls, &limits));
  }
  return plan_device(engine, layers, window.page_bytes, size, limits, plan);
}

}  // namespace

Status plan_memory(const Engine& engine, std::vector<Layer> layers, const tandem_cache_options& cache,
                   const tandem_session_options* session, std::span<const int64_t> kv_lens, tandem_memory_plan* plan) {
  int64_t page_len = 0;
  TANDEM_TRY(resolve_cache_options(cache, &layers, &page_len));
  const Policy* policy = &kPolicyAll;
  PolicyOptions options;
  RouteOptions routes;
  std::vector<HeadKinds> heads;
  if (session != nullptr) TANDEM_TRY(resolve_session_options(*session, &policy, &options));
  if (session != nullptr) TANDEM_TRY(resolve_route_options(*session, *policy, layers, &routes));
  if (session != nullptr) TANDEM_TRY(resolve_streaming_heads(*session, *policy, layers, &heads));
  if (engine.device() != nullptr) TANDEM_TRY(check_layers(*engine.device(), layers));
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
  const Streaming calls{*policy, options, routes, geometry, kv_lens, heads};
  RouteLayouts made;
  TANDEM_TRY(plan_routes(engine, layers, *policy, calls, &made, plan));
  TANDEM_TRY(plan_calls(engine, layers, *policy, calls, made, plan));
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
