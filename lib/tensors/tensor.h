// SPDX-License-Identifier: MIT
// Views of the caller's tensors, checked against the call's requirements. All tensors are checked in lib/tensors/tensor.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/base/status.h"
#include "lib/base/tensor_view.h"

namespace tandem {

// The dimensions that a call requires, by name. kAnyLength: the tensor decides.
inline constexpr int64_t kAnyLength = -1;
struct TensorDim {
  const char* name;
  int64_t length;
};
enum class TensorTypes {
  kF32,
  kFloat,    // f32, f16, bf16
  kKeys,     // kFloat, and every other type of keys and values
  kAll,      // kKeys, and the types of hidden states
  kIndices,  // i32
};
// The memory in which a tensor may be. device_index: the engine's device, -1 if it has none.
struct TensorPlace {
  bool host = true, device = false;
  int32_t device_index = 0;
  const char* why = nullptr;  // why no other memory is allowed: "q is in host memory"; null: the call never takes it
};
struct TensorSpec {
  const char* name;  // the parameter's name: "q", "o[3]"
  int32_t n_dims;
  TensorDim dims[4];
  TensorTypes types = TensorTypes::kFloat;
  TensorPlace place = {};
  bool any_order = false;  // strides may order the outer dimensions freely, not only as the shape does
};

// Bytes that an argument occupies: n_rows rows of row_bytes, row_stride apart.
struct Footprint {
  uintptr_t begin = 0;
  int64_t n_rows = 0;
  int64_t row_bytes = 0;
  int64_t row_stride = 0;
};
// Returns whether two footprints share a byte. Exact if both have one row stride (slices of one fused buffer) or are
// disjoint ranges. Otherwise gaps count as occupied.
bool overlap(const Footprint& a, const Footprint& b);
// Returns the footprint of an array of n elements.
Footprint array_footprint(const void* data, int64_t n, size_t element_bytes);

struct CheckedTensor {
  char name[32] = "";
  tandem_tensor tensor = {};
  Footprint footprint;

  int64_t length(int32_t dim) const { return tensor.shape[dim]; }
};

// Checks size, type, device, shape, strides, extent in bytes, data pointer and its alignment.
Status check_tensor(const tandem_tensor* tensor, const TensorSpec& spec, CheckedTensor* checked);
// Fails with INVALID_ARGUMENT if they overlap. output: a tensor that the call writes.
Status check_disjoint(const CheckedTensor& output, const CheckedTensor& other);
Status check_disjoint(const CheckedTensor& output, const Footprint& other, const char* other_name);
// Returns whether both have the same memory and layout, as an output that replaces its input.
bool same_tensor(const CheckedTensor& a, const CheckedTensor& b);

struct Layer;
// Fails with INVALID_ARGUMENT if new tokens come with hidden states that the layer does not keep, or without ones that it
// keeps.
Status refuse_hidden(const Layer& layer, const tandem_tensor* x);

int64_t stride_bytes(const CheckedTensor& checked, int32_t dim);  // from an index of the dimension to the next
TensorView view_of(const CheckedTensor& checked);                 // for three dimensions, or two: without heads

}  // namespace tandem
