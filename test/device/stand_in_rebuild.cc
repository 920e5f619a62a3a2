// SPDX-License-Identifier: MIT
// rebuild(): rows of K and V from hidden states, with sums in double precision.
#include <cmath>
#include <cstring>
#include <vector>

#include "device/stand_in_rotate.h"
#include "reference/stored_row.h"

namespace stand_in {
using namespace tandem;

namespace {

constexpr char kNoVector[] = "a vector of a projection is no device memory";

// Returns element i of a vector in device memory, or `otherwise` if the vector is null.
double at(const float* vector, int64_t i, double otherwise) {
  return vector == nullptr ? otherwise : static_cast<double>(vector[i]);
}

// Returns a row as input of the products: normalised in double precision and rounded to the weights' type.
std::vector<double> products_row(const DeviceRebuild& call, int64_t row) {
  const Projection& projection = *call.layer->projection;
  const auto dim = static_cast<size_t>(projection.hidden_dim);
  std::vector<double> x(dim);
  const std::byte* const codes = static_cast<const std::byte*>(call.x) + row * call.layer->x_bytes();
  reference::load_row(call.layer->x_type, codes, codes + call.layer->x_code_bytes(), projection.hidden_dim, x.data());
  double mean = 0.0, square = 0.0, scale = 1.0;
  if (projection.norm == TANDEM_NORM_LAYER)
    for (const double one : x) mean += one / static_cast<double>(dim);
  for (const double one : x) square += (one - mean) * (one - mean) / static_cast<double>(dim);
  if (projection.norm != TANDEM_NORM_NONE) scale = 1.0 / std::sqrt(square + static_cast<double>(projection.norm_eps));
  for (size_t i = 0; i < dim; ++i)
    x[i] = (x[i] - mean) * scale * at(call.projection.norm_weight, static_cast<int64_t>(i), 1.0) +
           at(call.projection.norm_bias, static_cast<int64_t>(i), 0.0);
  reference::round_all(projection.w_type, x.data(), projection.hidden_dim);
  return x;
}

// Returns the weights as [n_in, n_out], whatever their order in memory.
std::vector<double> weights(const Projection& projection, const void* from, int64_t n_out) {
  const int64_t n_in = projection.hidden_dim;
  std::vector<double> given(static_cast<size_t>(n_in * n_out)), made(given.size());
  reference::load_all(projection.w_type, from, n_in * n_out, given.data());
  for (int64_t i = 0; i < n_in; ++i)
    for (int64_t j = 0; j < n_out; ++j)
      made[static_cast<size_t>(i * n_out + j)] =
          given[static_cast<size_t>(projection.is_out_by_in ? j * n_in + i : i * n_out + j)];
  return made;
}

struct Target {
  const DeviceRebuild& call;
  Plane plane;
  int32_t dim, dtype;

  void put(int64_t row, int32_t head, double* x) const {
    std::vector<std::byte> codes(4096), scales(4096);
    reference::store_row(dtype, x, dim, codes.data(), scales.data());
    copy(plane, row, head, codes.data());
    if (reference::has_groups(dtype)) copy(static_cast<Plane>(plane + 1), row, head, scales.data());
  }
  void copy(Plane to, int64_t row, int32_t head, const std::byte* from) const {
    const int64_t bytes = plane_bytes(*call.layer).of[to], page_len = call.pages.page_len;
    std::byte* at = call.pages.planes[to] + row / page_len * call.page_bytes + head * call.pages.head_stride[to] +
                    row % page_len * bytes;
    std::memcpy(on_device(at, bytes, "a rebuilt row goes to no device memory"), from, static_cast<size_t>(bytes));
  }
};

void rebuild_plane(const DeviceRebuild& call, const HiddenRows& x, const Target& target) {
  const Layer& layer = *call.layer;
  const int64_t n_out = int64_t{layer.n_kv_heads} * target.dim;
  const bool is_k = target.plane == kPlaneK;
  const std::vector<double> w = weights(*layer.projection, is_k ? call.projection.w_k : call.projection.w_v, n_out);
  const float* const bias = is_k ? call.projection.b_k : call.projection.b_v;
  std::vector<double> y(static_cast<size_t>(n_out));
  for (int64_t row = 0; row < call.n_rows; ++row) {
    for (int64_t j = 0; j < n_out; ++j) y[static_cast<size_t>(j)] = at(bias, j, 0.0);
    for (size_t i = 0; i < x[static_cast<size_t>(row)].size(); ++i)
      for (int64_t j = 0; j < n_out; ++j)
        y[static_cast<size_t>(j)] +=
            x[static_cast<size_t>(row)][i] * w[i * static_cast<size_t>(n_out) + static_cast<size_t>(j)];
    for (int32_t head = 0; head < layer.n_kv_heads; ++head) {
      double* const one = y.data() + int64_t{head} * target.dim;
      if (is_k && layer.projection->rope != nullptr)
        rotate(*layer.projection->rope, call.projection.rope,
               call.page_positions[row / call.pages.page_len] + row % call.pages.page_len, one);
      target.put(row, head, one);
    }
  }
}

void check_vector(const float* vector, int64_t n) {
  if (vector != nullptr) on_device(vector, 4 * n, kNoVector);
}

}  // namespace

int64_t rebuild_work_bytes(const Layer& layer, int64_t n_rows) { return 256 + 2 * n_rows * layer.hidden_dim(); }

void check_rebuilt(const Layer& layer) {
  Layer types = layer;  // rows of K and of V are made separately, so any two dims work
  types.v_head_dim = types.k_head_dim;
  check_layer(types);
  require(layer.projection != nullptr && layer.x_type != 0 && layer.rope == nullptr,
          "a layer whose keys are not made of hidden states");
}

void check(const DeviceRebuild& call) {
  const Layer& layer = *call.layer;
  check_rebuilt(layer);
  check_pages(call.pages);
  const Projection& projection = *layer.projection;
  const int64_t n_k = int64_t{layer.n_kv_heads} * layer.k_head_dim, n_v = int64_t{layer.n_kv_heads} * layer.v_head_dim;
  require(call.n_rows >= 0 && call.page_bytes > 0 && call.page_bytes % 16 == 0, "rows or pages of no size");
  on_device(call.x, call.n_rows * layer.x_bytes(), "hidden states are no device memory");
  on_device(call.projection.w_k, 2 * n_k * projection.hidden_dim, "W_K is no device memory");
  on_device(call.projection.w_v, 2 * n_v * projection.hidden_dim, "W_V is no device memory");
  check_vector(call.projection.b_k, n_k);
  check_vector(call.projection.b_v, n_v);
  check_vector(call.projection.norm_weight, projection.hidden_dim);
  check_vector(call.projection.norm_bias, projection.hidden_dim);
  on_device(static_cast<std::byte*>(call.workspace), rebuild_work_bytes(layer, call.n_rows), "work space of no size");
  require(reinterpret_cast<uintptr_t>(call.workspace) % 256 == 0, "work space is not aligned");
  if (projection.rope == nullptr) return;
  const int64_t n_pages = (call.n_rows + call.pages.page_len - 1) / call.pages.page_len;
  on_device(call.projection.rope, 4 * n_floats(*projection.rope), "the angles are no device memory");
  on_device(call.page_positions, 8 * n_pages, "positions of pages are no device memory");
}

HiddenRows read_hidden(const DeviceRebuild& call) {
  HiddenRows x;
  for (int64_t row = 0; row < call.n_rows; ++row) x.push_back(products_row(call, row));
  return x;
}

void write_rebuilt(const DeviceRebuild& call, const HiddenRows& x) {
  const Layer& layer = *call.layer;
  std::memset(call.workspace, 0xff, static_cast<size_t>(rebuild_work_bytes(layer, call.n_rows)));
  rebuild_plane(call, x, {call, kPlaneK, layer.k_head_dim, layer.k_type});
  rebuild_plane(call, x, {call, kPlaneV, layer.v_head_dim, layer.v_type});
}

}  // namespace stand_in
