// SPDX-License-Identifier: MIT
// Views on the caller's tensors, checked against what a call expects. lib/tensors/tensor.cc is the one place that checks
// tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/base/status.h"
#include "lib/base/tensor_view.h"

namespace tandem {

// What a call expects of a tensor: dimensions by name, kAnyLength where the tensor itself decides.
inline constexpr int64_t kAnyLength = -1;
struct TensorDim {
  const char* name;
  int64_t length;
};
enum class TensorTypes {
  kF32,
  kFloat,    // f32, f16, bf16
  kKeys,     // these and every other type of keys and values
  kAll,      // of hidden states too
  kIndices,  // i32
};
// Where a tensor may be; device_index is that of the engine's device, -1 where it has none.
struct TensorPlace {
  bool host = true, device = false;
  int32_t device_index = 0;
  const char* why = nullptr;  // it may not be elsewhere: "q is in host memory"; null: the call takes no other
};
struct TensorSpec {
  const char* name;  // of the parameter: "q", "o[3]"
  int32_t n_dims;
  TensorDim dims[4];
  TensorTypes types = TensorTypes::kFloat;
  TensorPlace place = {};
  bool any_order = false;  // strides may order the outer dimensions in any way, not just as the shape does
};

// Bytes that an argument occupies: n_rows pieces of row_bytes, row_stride apart.
struct Footprint {
  uintptr_t begin = 0;
  int64_t n_rows = 0;
  int64_t row_bytes = 0;
  int64_t row_stride = 0;
};
// Whether the two have a byte in common. Exact where both have one row stride (slices of one fused buffer) or lie apart;
// otherwise the whole ranges count, gaps included.
bool overlap(const Footprint& a, const Footprint& b);
// An array of n elements.
Footprint array_footprint(const void* data, int64_t n, size_t element_bytes);

struct CheckedTensor {
  char name[32] = "";
  tandem_tensor tensor = {};
  Footprint footprint;

  int64_t length(int32_t dim) const { return tensor.shape[dim]; }
};

// Size, type, device, shape, strides, extent in bytes, data pointer and its alignment.
Status check_tensor(const tandem_tensor* tensor, const TensorSpec& spec, CheckedTensor* checked);
// INVALID_ARGUMENT where they overlap; output is a tensor that the call writes.
Status check_disjoint(const CheckedTensor& output, const CheckedTensor& other);
Status check_disjoint(const CheckedTensor& output, const Footprint& other, const char* other_name);
// Same memory, same layout: an output that replaces its input.
bool same_tensor(const CheckedTensor& a, const CheckedTensor& b);

struct Layer;
// INVALID_ARGUMENT where hidden states of new tokens come and the layer keeps none, or none come and it does.
Status refuse_hidden(const Layer& layer, const tandem_tensor* x);

int64_t stride_bytes(const CheckedTensor& checked, int32_t dim);  // from an index of the dimension to the next
TensorView view_of(const CheckedTensor& checked);                 // of three dimensions, or of two: a head is missing

}  // namespace tandem
