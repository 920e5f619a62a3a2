// SPDX-License-Identifier: MIT
// Rows of K and V that a module makes from hidden states, against double precision.
//
//   rebuild_test [MODULE]
//
// Under compute-sanitizer's racecheck the kernels of cuBLAS (nvjet_sm90_...) have hazards of their own. A hazard names its
// kernel. Only those of norm_kernel and store_kernel would be this library's.
//
// The reference normalises in double precision, rounds to the weights' type, and multiplies and rotates in double precision.
// A stored number may be off by its storage type's rounding and by the error of f32 sums.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "device/open_device.h"
#include "lib/model/dtype.h"
#include "reference/random.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;

constexpr int32_t kPageLen = 128;

const test::OpenDevice* device = nullptr;
double largest_share = 0.0;

struct RebuildOptions {
  int32_t k_type = TANDEM_BF16, v_type = TANDEM_BF16, x_type = TANDEM_BF16, w_type = TANDEM_BF16;
  int32_t hidden_dim = 256, n_kv_heads = 2, k_dim = 64, v_dim = 64;
  int32_t norm = TANDEM_NORM_NONE, rope = 0, rope_dims = 64;
  bool is_out_by_in = false, has_bias = false, has_norm_vectors = false;
  bool is_v_first = false;  // in memory, V's weights come before K's
  int64_t n_rows = 150, position = 5;
  double x_middle = 0.0;
  std::vector<int64_t> nan_rows;  // rows of x that belong to no token
  uint64_t seed = 1;
};

// The expected numbers of a plane, and by how much each may be off before it is rounded.
struct Expected {
  std::vector<double> y, slack;  // [n_rows, n_out]
};

class RebuildCase {
 public:
  explicit RebuildCase(const RebuildOptions& options) : o_(options), random_(options.seed) {
    layer_.n_q_heads = layer_.n_kv_heads = o_.n_kv_heads;
    layer_.group_size = 1;
    layer_.k_head_dim = o_.k_dim;
    layer_.v_head_dim = o_.v_dim;
    layer_.k_type = o_.k_type;
    layer_.v_type = o_.v_type;
    layer_.x_type = o_.x_type;
    layer_.projection = &projection_;
    projection_.hidden_dim = o_.hidden_dim;
    projection_.w_type = o_.w_type;
    projection_.is_out_by_in = o_.is_out_by_in;
    projection_.norm = o_.norm;
    projection_.norm_eps = 1e-5f;
    make_inputs();
    make_pages();
  }
  ~RebuildCase() {
    device->wait();
    for (void* data : owned_) device->release(data);
  }
  RebuildCase(const RebuildCase&) = delete;

  void check() {
    DeviceError error;
    device->must(device->table->supports_rebuild(device->self, &layer_, &error), error);
    call_.workspace = device->allocate(device->table->rebuild_bytes(device->self, &layer_, o_.n_rows));
    owned_.push_back(call_.workspace);
    device->must(device->table->rebuild(device->self, &call_, nullptr, &error), error);
    device->wait();
    std::vector<std::byte> pool(static_cast<size_t>(pool_bytes_));
    device->download(pool.data(), pool_, pool_bytes_);
    check_plane(pool, kPlaneK);
    check_plane(pool, kPlaneV);
    for (size_t i = 0; i < pool.size(); ++i)
      if (!is_written_[i] && pool[i] != std::byte{0xff}) fail_msg("byte %zu of the pages was written to", i);
  }

 private:
  template <class T>
  T* own(const T* from, int64_t n) {
    owned_.push_back(device->allocate(n * static_cast<int64_t>(sizeof(T))));
    if (from != nullptr) device->upload(owned_.back(), from, n * static_cast<int64_t>(sizeof(T)));
    return static_cast<T*>(owned_.back());
  }

  // Draws numbers, rounds them to the type and returns their bytes.
  std::vector<std::byte> draw_elements(int32_t type, int64_t n, double size, std::vector<double>* numbers) {
    for (int64_t i = 0; i < n; ++i) numbers->push_back(size * random_.normal());
    reference::round_all(type, numbers->data(), n);
    std::vector<std::byte> elements(static_cast<size_t>(n * reference::element_bytes(type)));
    reference::store_all(type, numbers->data(), n, elements.data());
    return elements;
  }
  // Draws numbers and uploads them.
  const void* draw(int32_t type, int64_t n, double size, std::vector<double>* numbers) {
    const std::vector<std::byte> elements = draw_elements(type, n, size, numbers);
    return own(elements.data(), static_cast<int64_t>(elements.size()));
  }

  // Draws hidden states in the format of stored rows.
  void draw_hidden() {
    const int64_t dim = o_.hidden_dim, bytes = layer_.x_bytes();
    std::vector<std::byte> rows(static_cast<size_t>(o_.n_rows * bytes));
    for (int64_t row = 0; row < o_.n_rows; ++row) {
      for (int64_t i = 0; i < dim; ++i) x_.push_back(o_.x_middle + 1.5 * random_.normal());
      std::byte* const codes = rows.data() + row * bytes;
      reference::store_row(o_.x_type, x_.data() + row * dim, dim, codes, codes + layer_.x_code_bytes());
      reference::load_row(o_.x_type, codes, codes + layer_.x_code_bytes(), dim, x_.data() + row * dim);
    }
    call_.x = own(rows.data(), static_cast<int64_t>(rows.size()));
  }

  void make_inputs() {
    const int64_t n_k = int64_t{o_.n_kv_heads} * o_.k_dim, n_v = int64_t{o_.n_kv_heads} * o_.v_dim, dim = o_.hidden_dim;
    call_.layer = &layer_;
    call_.n_rows = o_.n_rows;
    draw_hidden();
    const int64_t row_bytes = layer_.x_bytes();
    for (const int64_t row : o_.nan_rows) {
      const std::vector<std::byte> nans(static_cast<size_t>(row_bytes), std::byte{0xff});
      device->upload(static_cast<std::byte*>(const_cast<void*>(call_.x)) + row * row_bytes, nans.data(), row_bytes);
    }
    const double size = 1.0 / std::sqrt(static_cast<double>(dim));
    const std::vector<std::byte> w_k = draw_elements(o_.w_type, n_k * dim, size, &w_k_),
                                 w_v = draw_elements(o_.w_type, n_v * dim, size, &w_v_);
    std::vector<std::byte> both(o_.is_v_first ? w_v : w_k);
    const size_t second = both.size();
    both.insert(both.end(), (o_.is_v_first ? w_k : w_v).begin(), (o_.is_v_first ? w_k : w_v).end());
    const std::byte* const there = own(both.data(), static_cast<int64_t>(both.size()));
    call_.projection.w_k = there + (o_.is_v_first ? second : 0);
    call_.projection.w_v = there + (o_.is_v_first ? 0 : second);
    const auto vector = [&](bool is_there, int64_t n, std::vector<double>* numbers) {
      return is_there ? static_cast<const float*>(draw(TANDEM_F32, n, 0.5, numbers)) : nullptr;
    };
    call_.projection.b_k = vector(o_.has_bias, n_k, &b_k_);
    call_.projection.b_v = vector(o_.has_bias, n_v, &b_v_);
    call_.projection.norm_weight = vector(o_.has_norm_vectors, dim, &norm_weight_);
    call_.projection.norm_bias = vector(o_.has_norm_vectors && o_.norm == TANDEM_NORM_LAYER, dim, &norm_bias_);
    if (o_.rope == 0) return;
    for (int32_t i = 0; i < o_.rope_dims / 2; ++i) inv_freq_.push_back(std::pow(10000.0, -2.0 * i / o_.rope_dims));
    table_ = make_rope_table(inv_freq_.data(), o_.rope_dims / 2, o_.rope == TANDEM_ROPE_INTERLEAVED, 1.0f);
    projection_.rope = &table_;
    call_.projection.rope = own(table_.cos_sin.get(), n_floats(table_));
    std::vector<int64_t> positions;
    for (int64_t p = 0; p * kPageLen < o_.n_rows; ++p) positions.push_back(o_.position + 1000 * p);
    call_.page_positions = own(positions.data(), static_cast<int64_t>(positions.size()));
  }

  void make_pages() {
    const PlaneBytes bytes = plane_bytes(layer_);
    call_.pages.page_len = kPageLen;
    for (int32_t p = 0; p < kPlanes; ++p) {
      at_[p] = call_.page_bytes;
      call_.pages.head_stride[p] = bytes.of[p] * kPageLen;
      call_.page_bytes += call_.pages.head_stride[p] * layer_.n_kv_heads;
    }
    pool_bytes_ = call_.page_bytes * ((o_.n_rows + kPageLen - 1) / kPageLen);
    pool_ = own<std::byte>(nullptr, pool_bytes_);
    is_written_.assign(static_cast<size_t>(pool_bytes_), false);
    for (int32_t p = 0; p < kPlanes; ++p) call_.pages.planes[p] = pool_ + at_[p];
  }

  // Returns a row as input of the products. slack: by how much each element may be off, because f32 may round the normalised
  // number to the other side.
  std::vector<double> products_row(int64_t row, std::vector<double>* slack) const {
    const int64_t dim = o_.hidden_dim;
    std::vector<double> x(x_.begin() + row * dim, x_.begin() + (row + 1) * dim);
    double mean = 0.0, square = 0.0;
    for (const double one : x) mean += one / static_cast<double>(dim);
    if (o_.norm != TANDEM_NORM_LAYER) mean = 0.0;
    for (const double one : x) square += (one - mean) * (one - mean) / static_cast<double>(dim);
    const double scale =
        o_.norm == TANDEM_NORM_NONE ? 1.0 : 1.0 / std::sqrt(square + static_cast<double>(projection_.norm_eps));
    slack->assign(x.size(), 0.0);
    for (size_t i = 0; i < x.size(); ++i) {
      double off = std::abs(x[i]) + std::abs(mean);  // bounds what f32 rounds on the way
      x[i] = (x[i] - mean) * scale;
      if (!norm_weight_.empty()) x[i] *= norm_weight_[i], off *= std::abs(norm_weight_[i]);
      if (!norm_bias_.empty()) x[i] += norm_bias_[i];
      if (o_.norm == TANDEM_NORM_NONE) continue;
      off = 0x1p-21 * (off * scale + std::abs(x[i]));
      (*slack)[i] = reference::round_to(o_.w_type, x[i] + off) - reference::round_to(o_.w_type, x[i] - off);
    }
    reference::round_all(o_.w_type, x.data(), dim);
    return x;
  }

  Expected expect(bool is_k) const {
    const std::vector<double>&w = is_k ? w_k_ : w_v_, &bias = is_k ? b_k_ : b_v_;
    const int64_t dim = is_k ? o_.k_dim : o_.v_dim, n_out = o_.n_kv_heads * dim, n_in = o_.hidden_dim;
    Expected expected;
    for (int64_t row = 0; row < o_.n_rows; ++row) {
      std::vector<double> x_slack;
      const std::vector<double> x = products_row(row, &x_slack);
      for (int64_t j = 0; j < n_out; ++j) {
        double y = bias.empty() ? 0.0 : bias[static_cast<size_t>(j)], sum = std::abs(y), flips = 0.0;
        for (int64_t i = 0; i < n_in; ++i) {
          const double weight = w[static_cast<size_t>(o_.is_out_by_in ? j * n_in + i : i * n_out + j)];
          const double one = x[static_cast<size_t>(i)] * weight;
          y += one;
          sum += std::abs(one);
          flips += x_slack[static_cast<size_t>(i)] * std::abs(weight);
        }
        expected.y.push_back(y);
        expected.slack.push_back(0x1p-20 * sum + flips);
      }
      for (int64_t head = 0; is_k && o_.rope != 0 && head < o_.n_kv_heads; ++head)
        rotate(row, &expected.y[static_cast<size_t>(row * n_out + head * dim)],
               &expected.slack[static_cast<size_t>(row * n_out + head * dim)]);
    }
    return expected;
  }

  void rotate(int64_t row, double* y, double* slack) const {
    const int64_t page = row / kPageLen;
    const auto position = static_cast<double>(o_.position + 1000 * page + row % kPageLen);
    for (int32_t i = 0; i < o_.rope_dims / 2; ++i) {
      const bool is_interleaved = o_.rope == TANDEM_ROPE_INTERLEAVED;
      const int32_t a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + o_.rope_dims / 2;
      const double angle = position * inv_freq_[static_cast<size_t>(i)], x = y[a], z = y[b];
      y[a] = x * std::cos(angle) - z * std::sin(angle);
      y[b] = x * std::sin(angle) + z * std::cos(angle);
      slack[a] = slack[b] = slack[a] + slack[b] + 1e-6 * (std::abs(x) + std::abs(z));
    }
  }

  // Returns the largest rounding error of the storage type in element i of a row.
  static double rounding(int32_t type, const double* y, int64_t dim, int64_t i) {
    if (!reference::has_groups(type))
      return 0.51 * reference::epsilon(type) * std::abs(y[i]) + (type == TANDEM_E4M3 ? 0x1p-10 : 1e-7);
    const int64_t n = reference::group_elements(type), first = i / n * n;
    double most = 0.0;
    for (int64_t j = first; j < std::min(first + n, dim); ++j) most = std::max(most, std::abs(y[j]));
    return type == TANDEM_Q8_0 ? 0.6 * most / 127.0 : 1.01 * most / 8.0;
  }

  void check_plane(const std::vector<std::byte>& pool, Plane plane) {
    const bool is_k = plane == kPlaneK;
    const Expected expected = expect(is_k);
    const int32_t type = is_k ? o_.k_type : o_.v_type, dim = is_k ? o_.k_dim : o_.v_dim;
    std::vector<double> x(static_cast<size_t>(dim));
    for (int64_t row = 0; row < o_.n_rows; ++row)
      for (int32_t head = 0; head < o_.n_kv_heads; ++head) {
        const std::byte *codes = place(pool, plane, row, head),
                        *scales = place(pool, static_cast<Plane>(plane + 1), row, head);
        if (std::find(o_.nan_rows.begin(), o_.nan_rows.end(), row) != o_.nan_rows.end()) continue;
        reference::load_row(type, codes, scales, dim, x.data());
        const auto first = static_cast<size_t>((row * o_.n_kv_heads + head) * dim);
        for (int32_t i = 0; i < dim; ++i) {
          const double y = expected.y[first + static_cast<size_t>(i)];
          const double bound = expected.slack[first + static_cast<size_t>(i)] + rounding(type, &expected.y[first], dim, i);
          const double off = std::abs(x[static_cast<size_t>(i)] - y);
          largest_share = std::max(largest_share, off / bound);
          if (!(off <= bound))
            fail_msg("%s of row %lld, head %d, element %d: %.9g, should be %.9g (off by %.3g of %.3g)", is_k ? "K" : "V",
                     static_cast<long long>(row), head, i, x[static_cast<size_t>(i)], y, off, bound);
        }
      }
  }

  // Returns the address of a row in the pool and marks its bytes as written.
  const std::byte* place(const std::vector<std::byte>& pool, Plane plane, int64_t row, int32_t head) {
    const int64_t bytes = plane_bytes(layer_).of[plane];
    const int64_t at =
        at_[plane] + row / kPageLen * call_.page_bytes + head * call_.pages.head_stride[plane] + row % kPageLen * bytes;
    std::fill_n(is_written_.begin() + at, bytes, true);
    return pool.data() + at;
  }

  RebuildOptions o_;
  reference::Random random_;
  Layer layer_;
  Projection projection_;
  RopeTable table_;
  DeviceRebuild call_;
  std::vector<double> x_, w_k_, w_v_, b_k_, b_v_, norm_weight_, norm_bias_, inv_freq_;
  std::byte* pool_ = nullptr;
  int64_t pool_bytes_ = 0, at_[kPlanes] = {};
  std::vector<bool> is_written_;
  std::vector<void*> owned_;
};

void check(const RebuildOptions& options) { RebuildCase(options).check(); }

void types(void**) {
  uint64_t seed = 1;
  for (const int32_t type : {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0})
    for (const int32_t w_type : {TANDEM_F16, TANDEM_BF16}) {
      RebuildOptions options;
      options.k_type = options.v_type = type;
      options.w_type = options.x_type = w_type;
      options.seed = seed++;
      check(options);
    }
  RebuildOptions options;
  options.k_type = TANDEM_Q8_0;
  options.v_type = TANDEM_Q4_0;
  options.x_type = TANDEM_F16;  // another type than the weights
  options.has_bias = true;
  check(options);
}

void types_of_hidden_states(void**) {
  uint64_t seed = 1;
  for (const int32_t x_type : {TANDEM_F16, TANDEM_BF16, TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64})
    for (const int32_t w_type : {TANDEM_F16, TANDEM_BF16})
      for (const int32_t norm : {TANDEM_NORM_NONE, TANDEM_NORM_RMS, TANDEM_NORM_LAYER})
        for (const int32_t hidden_dim : {64, 832, 4096, 8256, 9024}) {  // from 8,192 on a thread reads its row again
          RebuildOptions options;
          options.x_type = x_type;
          options.w_type = w_type;
          options.norm = norm;
          options.hidden_dim = hidden_dim;
          options.x_middle = seed % 2 == 0 ? 0.0 : 3.0;
          options.n_rows = hidden_dim > 4096 ? 5 : 40;
          options.k_type = options.v_type = TANDEM_F32;
          options.seed = seed++;
          check(options);
        }
}

void dims_and_orders(void**) {
  for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256})
    for (const bool is_out_by_in : {false, true}) {
      RebuildOptions options;
      options.k_dim = dim;
      options.v_dim = dim == 192 ? 128 : dim;
      options.is_out_by_in = is_out_by_in;
      options.has_bias = is_out_by_in;
      options.hidden_dim = 8 * dim + 8;
      options.n_rows = is_out_by_in ? 128 : 37;
      options.seed = static_cast<uint64_t>(dim);
      check(options);
    }
}

// V's weights may come first, as when offloaded weights go through a ring. The sizes make cuBLAS use its kernels for Hopper.
void v_may_lie_before_k(void**) {
  for (const bool is_v_first : {false, true})
    for (const bool is_out_by_in : {false, true}) {
      RebuildOptions options;
      options.k_type = options.v_type = options.x_type = options.w_type = TANDEM_F16;
      options.n_kv_heads = 8;
      options.k_dim = options.v_dim = 128;
      options.hidden_dim = 1024;
      options.n_rows = 256;
      options.is_out_by_in = is_out_by_in;
      options.is_v_first = is_v_first;
      check(options);
    }
}

void norms(void**) {
  for (const int32_t norm : {TANDEM_NORM_RMS, TANDEM_NORM_LAYER})
    for (const int32_t hidden_dim : {64, 1000, 2048, 9000})
      for (const bool has_vectors : {false, true}) {
        RebuildOptions options;
        options.norm = norm;
        options.hidden_dim = hidden_dim;
        options.has_norm_vectors = has_vectors;
        options.x_type = has_vectors ? TANDEM_F16 : TANDEM_BF16;
        options.k_type = options.v_type = TANDEM_F32;
        options.n_rows = hidden_dim > 4096 ? 5 : 40;
        check(options);
      }
}

void rotations(void**) {
  for (const int32_t rope : {TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED})
    for (const int32_t rope_dims : {32, 128})
      for (const int32_t k_type : {TANDEM_F32, TANDEM_BF16, TANDEM_Q8_0}) {
        RebuildOptions options;
        options.rope = rope;
        options.rope_dims = rope_dims;
        options.k_dim = options.v_dim = 128;
        options.k_type = options.v_type = k_type;
        options.has_bias = true;
        options.norm = TANDEM_NORM_RMS;
        options.n_rows = 300;
        options.position = 70'001;
        check(options);
      }
}

void rows_know_nothing_of_each_other(void**) {
  RebuildOptions options;
  options.nan_rows = {0, 77, 127, 149};
  options.norm = TANDEM_NORM_LAYER;
  options.has_bias = true;
  check(options);
}

void a_single_row(void**) {
  RebuildOptions options;
  options.n_rows = 1;
  options.rope = TANDEM_ROPE_HALVES;
  check(options);
}

}  // namespace

int main(int argc, char** argv) {
  const test::OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {cmocka_unit_test(types),           cmocka_unit_test(types_of_hidden_states),
                              cmocka_unit_test(dims_and_orders), cmocka_unit_test(v_may_lie_before_k),
                              cmocka_unit_test(norms),           cmocka_unit_test(rotations),
                              cmocka_unit_test(a_single_row),    cmocka_unit_test(rows_know_nothing_of_each_other)};
  const int n_failed = cmocka_run_group_tests(tests, nullptr, nullptr);
  std::printf("share of the bounds used: %.3f\n", largest_share);
  return n_failed;
}
