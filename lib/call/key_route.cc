// SPDX-License-Identifier: MIT
#include "lib/call/key_route.h"

#include "lib/model/dtype.h"
#include "lib/pieces/route_line.h"

namespace tandem {

void order_launches(const std::array<size_t, kMostRoutes>& n_pieces, std::vector<Launch>* launches) {
  launches->clear();
  std::array<size_t, kMostRoutes> done{};
  for (;;) {
    size_t next = kMostRoutes;  // the route with the least share done; of equal ones, the last in the table
    for (size_t r = 0; r < kMostRoutes; ++r) {
      if (done[r] == n_pieces[r]) continue;
      if (next == kMostRoutes || done[r] * n_pieces[next] <= done[next] * n_pieces[r]) next = r;
    }
    if (next == kMostRoutes) return;
    launches->push_back({next, done[next]++});
  }
}

void point_states(const HeadStates& to, DeviceAttend* call) {
  const int64_t dim = call->layer->v_head_dim;
  call->o = {to.o, TANDEM_F32, 0, to.n_heads * dim, dim};
  call->lse = to.lse;
  call->lse_token_stride = to.n_heads;
  call->lse_head_stride = 1;
}

DeviceAttend restrict_to_heads(const DeviceAttend& call, int32_t first_head, int32_t n_heads, Layer* layer) {
  *layer = *call.layer;
  layer->n_kv_heads = n_heads;
  layer->n_q_heads = n_heads * layer->group_size;
  layer->sinks = nullptr;
  DeviceAttend part = call;
  part.layer = layer;
  part.q.data = static_cast<std::byte*>(call.q.data) +
                int64_t{first_head} * layer->group_size * row_bytes(call.q.dtype, 1) * call.q.head_stride;
  for (int32_t p = 0; p < kPlanes; ++p)
    if (call.pages.planes[p] != nullptr) part.pages.planes[p] += first_head * call.pages.head_stride[p];
  if (call.lists.n_heads > 1) {
    part.lists.keys += first_head;
    part.lists.n_heads = n_heads;
  }
  return part;
}

Status make_routes(const RouteSetup& setup, Routes* routes) {
  const std::span<const RouteLine> table = route_table();
  // The last route first: its error says more than the errors of the routes before it.
  for (size_t r = table.size(); r-- > 0;) TANDEM_TRY(table[r].make(setup, r, &(*routes)[r]));
  return {};
}

std::span<const StreamLayout> layouts_of(const Routes& routes) {
  for (const auto& route : routes)
    if (route != nullptr && !route->layouts().empty()) return route->layouts();
  return {};
}

}  // namespace tandem
