// SPDX-License-Identifier: MIT
// Sequences whose keys and values are made from hidden states by the layer's projection. A twin in double precision makes
// them, so the keys that the device rebuilds must be those of the cache.
#pragma once

#include <cmath>

#include "device/device_side.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace tandem_test {

inline constexpr int32_t kHidden = 64;
inline constexpr int64_t kXBytes = kHidden * 2, kTokenBytes = kKvHeads * kDim * 2 * 2;
inline constexpr int64_t kBuffer = 128 * kXBytes * 3 / 2;  // one and a half pages of hidden states

// The weights of a projection, and the keys and values that they make from hidden states.
class Projected {
 public:
  explicit Projected(int32_t k_rope = 0, int32_t norm = TANDEM_NORM_LAYER, int64_t seed = 71,
                     int32_t kept_type = TANDEM_BF16)
      : x_type(kept_type),
        x_bytes(reference::code_bytes(kept_type, kHidden) + reference::scale_bytes(kept_type, kHidden)),
        w_k_({kKvHeads * kDim, kHidden}, seed),
        w_v_({kKvHeads * kDim, kHidden}, seed + 1),
        b_({kKvHeads * kDim}, seed + 2) {
    for (Tensor* w : {&w_k_, &w_v_}) {
      std::vector<uint16_t>& bits = w == &w_k_ ? bits_k_ : bits_v_;
      for (float& x : w->values) {
        x = static_cast<float>(reference::round_to(TANDEM_BF16, static_cast<double>(x) / 8.0));
        reference::store(TANDEM_BF16, static_cast<double>(x), &bits.emplace_back());
      }
    }
    options = TANDEM_LAYER_PROJECTION_INIT;
    options.hidden_dim = kHidden;
    options.w_type = TANDEM_BF16;
    options.w_order = TANDEM_WEIGHTS_OUT_IN;
    options.norm = norm;
    options.k_rope = k_rope;
    options.w_k = bits_k_.data();
    options.w_v = bits_v_.data();
    options.b_k = options.b_v = b_.values.data();
  }
  Projected(const Projected&) = delete;

  // position: token of x's first row.
  std::vector<float> keys(const std::vector<float>& x, int64_t position) const {
    std::vector<float> k = make(x, w_k_.values);
    if (options.k_rope == 0) return k;
    for (size_t row = 0; row < k.size() / kDim; ++row)
      for (int32_t i = 0; i < kDim / 2; ++i) {
        const bool is_halves = options.k_rope == TANDEM_ROPE_HALVES;
        float &a = k[row * kDim + static_cast<size_t>(is_halves ? i : 2 * i)],
              &b = k[row * kDim + static_cast<size_t>(is_halves ? i + kDim / 2 : 2 * i + 1)];
        const int64_t token = position + static_cast<int64_t>(row) / kKvHeads;
        const double angle = static_cast<double>(token) * std::pow(10000.0, -2.0 * i / kDim);
        const double c = std::cos(angle), s = std::sin(angle), y = static_cast<double>(a), z = static_cast<double>(b);
        a = static_cast<float>(y * c - z * s);
        b = static_cast<float>(y * s + z * c);
      }
    return k;
  }
  std::vector<float> values(const std::vector<float>& x) const { return make(x, w_v_.values); }

  const int32_t x_type;  // type of the hidden states in the cache
  const int64_t x_bytes;
  tandem_layer_projection options;

 private:
  std::vector<float> make(const std::vector<float>& x, const std::vector<float>& w) const {
    std::vector<float> y;
    for (size_t row = 0; row < x.size() / kHidden; ++row) {
      std::vector<double> one(x.begin() + static_cast<std::ptrdiff_t>(row * kHidden),
                              x.begin() + static_cast<std::ptrdiff_t>((row + 1) * kHidden));
      reference::round_row(x_type, one.data(), kHidden);
      double mean = 0.0, square = 0.0;
      for (const double number : one) mean += number / kHidden;
      for (const double number : one) square += (number - mean) * (number - mean) / kHidden;
      for (double& number : one)
        if (options.norm == TANDEM_NORM_LAYER) number = (number - mean) / std::sqrt(square + 1e-5);
      reference::round_all(TANDEM_BF16, one.data(), kHidden);
      for (size_t j = 0; j < w.size() / kHidden; ++j) {
        double sum = static_cast<double>(b_.values[j]);
        for (size_t i = 0; i < kHidden; ++i) sum += one[i] * static_cast<double>(w[j * kHidden + i]);
        y.push_back(static_cast<float>(sum));
      }
    }
    return y;
  }

  Tensor w_k_, w_v_, b_;
  std::vector<uint16_t> bits_k_, bits_v_;
};

inline tandem_session_options route_options(double share = 1.0, int64_t buffer_bytes = kBuffer) {
  tandem_session_options options = Side::options_of("all");
  options.route = "recompute";
  options.recompute_share = share;
  options.stream_buffer_bytes = buffer_bytes;
  return options;
}

// A side whose cache keeps hidden states of its layers. With a device, its session rebuilds keys from them.
struct Rebuilding : Side {
  explicit Rebuilding(const Projected& projected, double share = 1.0, int64_t buffer_bytes = kBuffer, bool has_device = true)
      : Rebuilding(projected, has_device ? route_options(share, buffer_bytes) : Side::options_of("all"), has_device) {}
  Rebuilding(const Projected& projected, const tandem_session_options& session_options, bool has_device = true,
             int64_t host_cap_bytes = 0)
      : Side(has_device, "all") {
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.projection = &projected.options;
    tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
    options.x_type = projected.x_type;
    options.host_cap_bytes = host_cap_bytes;
    make_anew(this, layer, 1, options, session_options);
  }
};

// q and o, and x of n tokens with the K and V that x gives.
struct HiddenCall : Call {
  Tensor x;

  HiddenCall(const Projected& projected, int64_t n_tokens, int64_t position, int64_t seed)
      : Call(n_tokens, seed), x({n_tokens, kHidden}, seed + 9) {
    for (float& number : q.values) number *= 6.0f;  // so that softmax tells keys apart
    k.values = projected.keys(x.values, position);
    v.values = projected.values(x.values);
    k.view.data = k.values.data();
    v.view.data = v.values.data();
  }
  void to_device() {
    Call::to_device();
    const auto bytes = static_cast<int64_t>(x.values.size() * sizeof(float));
    memory.push_back(device->allocate(bytes));
    device->upload(memory.back(), x.values.data(), bytes);
    x.view.device_type = TANDEM_DEVICE_CUDA;
    x.view.data = memory.back();
  }
  tandem_attend_args args(const Side& side) const {
    tandem_attend_args args = Call::args(side);
    args.x = &x.view;
    return args;
  }
};

// Appends the rows of a prompt without attending.
inline void append_hidden(const Side& side, const HiddenCall& call) {
  OK(tandem_sequence_append_x, side.cache, side.sequence, kLayer, &call.k.view, &call.v.view, &call.x.view, nullptr);
}

inline void append_both(const Side& side, const Side& twin, const HiddenCall& call) {
  append_hidden(side, call);
  append_hidden(twin, call);
}

inline void attend_hidden(const Side& side, const HiddenCall& call) {
  const tandem_attend_args args = call.args(side);
  OK(tandem_attend, side.session, &args);
}

// Compares outputs. Now and then a rebuilt number rounds to the other side of the number given in f32. Then one key differs
// by a bf16 step.
inline void assert_near(const std::vector<float>& got, const std::vector<float>& wanted, float most = 1e-3f) {
  assert_int_equal(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    if (!(std::fabs(got[i] - wanted[i]) <= most)) fail_msg("element %zu is %g, not %g", i, got[i], wanted[i]);
}

inline void attend_twins(const Projected& projected, const Side& side, const Side& twin, int64_t n_tokens, int64_t seed) {
  HiddenCall on_device(projected, n_tokens, side.length(), seed), on_host(projected, n_tokens, twin.length(), seed);
  on_device.to_device();
  attend_hidden(side, on_device);
  attend_hidden(twin, on_host);
  assert_near(on_device.output(), on_host.output());
}

}  // namespace tandem_test
