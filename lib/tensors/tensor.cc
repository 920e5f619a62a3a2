// SPDX-License-Identifier: MIT
#include "lib/tensors/tensor.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "lib/base/options.h"
#include "lib/model/block_row.h"
#include "lib/model/dtype.h"
#include "lib/model/layer.h"

namespace tandem {
namespace {

constexpr int32_t kInvalid = TANDEM_ERROR_INVALID_ARGUMENT;

// The unit of a tensor's data: an element or a block.
struct Unit {
  int64_t n_elements;
  int64_t bytes;
  int64_t alignment;
};
Unit unit_of(int32_t dtype) {
  if (dtype == TANDEM_I32) return {1, 4, 4};
  if (block_elements(dtype) > 0) return {block_elements(dtype), block_bytes(dtype), 2};
  const int64_t bytes = find_dtype(dtype)->bits / 8;
  return {1, bytes, bytes};
}

Status refuse_with(int32_t code, const char* tensor, const char* member, const char* format, va_list values) {
  char field[64];
  std::snprintf(field, sizeof field, "%s.%s", tensor, member);
  char text[256];
  std::vsnprintf(text, sizeof text, format, values);
  return fail(code, field, "%s = %s", field, text);
}

// Fails with the field "q.member" and a message that begins with it.
[[gnu::format(printf, 4, 5)]] Status refuse(int32_t code, const char* tensor, const char* member, const char* format, ...) {
  va_list values;
  va_start(values, format);
  Status status = refuse_with(code, tensor, member, format, values);
  va_end(values);
  return status;
}

// The same for the field "q.member[idx]".
[[gnu::format(printf, 4, 5)]] Status refuse_at(const char* tensor, const char* member, int32_t idx, const char* format,
                                               ...) {
  char indexed[32];
  std::snprintf(indexed, sizeof indexed, "%s[%d]", member, idx);
  va_list values;
  va_start(values, format);
  Status status = refuse_with(kInvalid, tensor, indexed, format, values);
  va_end(values);
  return status;
}

Status check_type(const tandem_tensor& t, const TensorSpec& spec) {
  const DtypeInfo* info = find_dtype(t.dtype);
  if (spec.types == TensorTypes::kIndices) {
    if (t.dtype == TANDEM_I32) return {};
    return refuse(kInvalid, spec.name, "dtype", "%d (%s), must be TANDEM_I32", t.dtype,
                  info != nullptr ? info->name : "no type");
  }
  if (t.dtype == TANDEM_I32 && spec.types == TensorTypes::kAll) return {};
  if (t.dtype == TANDEM_I32)
    return refuse(kInvalid, spec.name, "dtype", "%d (i32) is for the indices of a selection alone", t.dtype);
  if (info == nullptr)
    return refuse(
        kInvalid, spec.name, "dtype", "%d is not a tensor type (%s)", t.dtype,
        spec.types == TensorTypes::kF32 || spec.types == TensorTypes::kFloat ? "f32, f16, bf16" : key_type_names());
  if (spec.types == TensorTypes::kKeys && !is_key_type(t.dtype))
    return refuse(TANDEM_ERROR_UNSUPPORTED, spec.name, "dtype", "%d (%s), must be one of %s: %s is for hidden states alone",
                  t.dtype, info->name, key_type_names(), info->name);
  if (spec.types == TensorTypes::kF32 && t.dtype != TANDEM_F32)
    return refuse(kInvalid, spec.name, "dtype", "%d (%s), must be f32", t.dtype, info->name);
  if (spec.types == TensorTypes::kFloat && !is_tensor_float(t.dtype))
    return refuse(kInvalid, spec.name, "dtype", "%d (%s), must be f32, f16 or bf16", t.dtype, info->name);
  return {};
}

Status check_place(const tandem_tensor& t, const TensorSpec& spec) {
  const TensorPlace& place = spec.place;
  const bool on_device = t.device_type == TANDEM_DEVICE_CUDA;
  if (!on_device && t.device_type != TANDEM_DEVICE_HOST)
    return refuse(kInvalid, spec.name, "device_type", "%d is not a device type", t.device_type);
  if (!on_device && t.device_index != 0)
    return refuse(kInvalid, spec.name, "device_index", "%d, must be 0 for the host", t.device_index);
  if (on_device ? place.device : place.host) {
    if (!on_device || t.device_index == place.device_index) return {};
    return refuse(kInvalid, spec.name, "device_index", "%d, the engine's device is %d", t.device_index, place.device_index);
  }
  const char* where = on_device ? "CUDA" : "host";
  if (place.why != nullptr)
    return refuse(kInvalid, spec.name, "device_type", "%d (%s), but %s", t.device_type, where, place.why);
  return refuse(TANDEM_ERROR_UNSUPPORTED, spec.name, "device_type", "%d (%s): %s", t.device_type, where,
                place.device_index < 0 ? "the engine has no device" : "this call takes host memory alone");
}

// Returns the axes that a call expects, "[n_tokens, n_q_heads, k_head_dim]". Most wrong shapes have another order of axes.
std::string axes_of(const TensorSpec& spec) {
  std::string axes;
  for (int32_t d = 0; d < spec.n_dims; ++d) axes += (d == 0 ? "[" : ", ") + std::string(spec.dims[d].name);
  return axes + "]";
}

Status check_shape(const tandem_tensor& t, const TensorSpec& spec) {
  if (t.n_dims != spec.n_dims)
    return refuse(kInvalid, spec.name, "n_dims", "%d, must be %d: the axes are %s", t.n_dims, spec.n_dims,
                  axes_of(spec).c_str());
  for (int32_t d = 0; d < spec.n_dims; ++d) {
    const auto length = static_cast<long long>(t.shape[d]);
    if (length < 0) return refuse_at(spec.name, "shape", d, "%lld is negative", length);
    const TensorDim& dim = spec.dims[d];
    if (dim.length != kAnyLength && t.shape[d] != dim.length)
      return refuse_at(spec.name, "shape", d, "%lld, must be %s = %lld: the axes are %s", length, dim.name,
                       static_cast<long long>(dim.length), axes_of(spec).c_str());
  }
  return {};
}

// Checks that rows consist of whole blocks.
Status check_blocks(const tandem_tensor& t, const char* name, const Unit& unit) {
  const int32_t last = t.n_dims - 1;
  for (int32_t d = last; d >= 0; --d) {
    const int64_t elements = d == last ? t.shape[d] : t.stride[d];
    if (elements % unit.n_elements != 0)
      return refuse_at(name, d == last ? "shape" : "stride", d, "%lld is not a multiple of %lld, a block of %s",
                       static_cast<long long>(elements), static_cast<long long>(unit.n_elements), find_dtype(t.dtype)->name);
  }
  return {};
}

// The outer dimensions, starting with the innermost one in memory.
struct DimOrder {
  int32_t dims[3];
  int32_t n = 0;
};
DimOrder order_of(const tandem_tensor& t, bool any_order) {
  DimOrder order;
  for (int32_t d = t.n_dims - 2; d >= 0; --d)
    if (!any_order || t.shape[d] > 1) order.dims[order.n++] = d;
  if (any_order)
    std::stable_sort(order.dims, order.dims + order.n, [&](int32_t a, int32_t b) { return t.stride[a] < t.stride[b]; });
  return order;
}

// Checks strides and computes the footprint. From the innermost dimension outwards, a slice spans (length - 1) * stride +
// inner span elements. Without elements the span is 0, and strides only have to be positive and countable in bytes.
Status check_strides(const tandem_tensor& t, const TensorSpec& spec, Footprint* footprint) {
  const char* name = spec.name;
  const DimOrder order = order_of(t, spec.any_order);
  const int32_t last = t.n_dims - 1;
  const Unit unit = unit_of(t.dtype);
  const bool empty = std::any_of(t.shape, t.shape + t.n_dims, [](int64_t length) { return length == 0; });
  if (!empty) TANDEM_TRY(check_blocks(t, name, unit));
  if (t.stride[last] != 1)
    return refuse_at(name, "stride", last, "%lld, must be 1 in the last dimension", static_cast<long long>(t.stride[last]));
  int64_t span = t.shape[last];  // elements of one slice of dimension d + 1
  int64_t row = span;            // elements of one slice of the outermost dimension
  for (int32_t d = last - 1; d >= 0; --d)
    if (t.stride[d] <= 0) return refuse_at(name, "stride", d, "%lld is not positive", static_cast<long long>(t.stride[d]));
  for (int32_t i = 0; i < order.n && !empty; ++i) {
    const int32_t d = order.dims[i];
    const auto stride = static_cast<long long>(t.stride[d]);
    if (stride < span)
      return refuse_at(name, "stride", d, "%lld is less than the %lld elements of the inner dimensions", stride,
                       static_cast<long long>(span));
    row = span;
    int64_t steps = 0;
    if (__builtin_mul_overflow(t.shape[d] - 1, t.stride[d], &steps) || __builtin_add_overflow(steps, span, &span))
      return refuse_at(name, "shape", d, "%lld with stride %lld is more than memory can hold",
                       static_cast<long long>(t.shape[d]), stride);
  }
  int64_t bytes = 0, stride_bytes = 0;
  if (!empty && __builtin_mul_overflow(span / unit.n_elements, unit.bytes, &bytes))
    return refuse_at(name, "shape", 0, "%lld with stride %lld is more than memory can hold",
                     static_cast<long long>(t.shape[0]), static_cast<long long>(t.stride[0]));
  for (int32_t d = last - 1; d >= 0; --d)  // also for dimensions without a second element
    if (__builtin_mul_overflow(t.stride[d] / unit.n_elements, unit.bytes, &stride_bytes))
      return refuse_at(name, "stride", d, "%lld is more bytes than memory can hold", static_cast<long long>(t.stride[d]));
  *footprint = {};
  if (empty) return {};  // the last dimension may have any length then, so its bytes may overflow
  const int32_t outermost = order.n > 0 ? order.dims[order.n - 1] : -1;
  footprint->n_rows = outermost < 0 ? 1 : t.shape[outermost];
  footprint->row_bytes = row / unit.n_elements * unit.bytes;
  footprint->row_stride = outermost < 0 ? bytes : t.stride[outermost] / unit.n_elements * unit.bytes;
  return {};
}

int64_t total_bytes(const Footprint& f) { return f.n_rows == 0 ? 0 : (f.n_rows - 1) * f.row_stride + f.row_bytes; }

Status check_data(const tandem_tensor& t, const char* name, Footprint* footprint) {
  const int64_t bytes = total_bytes(*footprint);
  footprint->begin = reinterpret_cast<uintptr_t>(t.data);
  if (bytes == 0) return {};
  if (t.data == nullptr)
    return refuse(kInvalid, name, "data", "NULL, but %lld bytes are needed", static_cast<long long>(bytes));
  if (footprint->begin % static_cast<uintptr_t>(unit_of(t.dtype).alignment) != 0)
    return refuse(kInvalid, name, "data", "%p is not aligned to %s", t.data,
                  t.dtype == TANDEM_I32 ? "i32" : find_dtype(t.dtype)->name);
  if (footprint->begin > UINTPTR_MAX - static_cast<uintptr_t>(bytes))
    return refuse(kInvalid, name, "data", "%p + %lld bytes is past the end of memory", t.data,
                  static_cast<long long>(bytes));
  return {};
}

Status refuse_overlap(const char* output, const char* other, const void* data) {
  return refuse(kInvalid, output, "data", "%p overlaps %s", data, other);
}

}  // namespace

bool overlap(const Footprint& a, const Footprint& b) {
  const int64_t a_bytes = total_bytes(a), b_bytes = total_bytes(b);
  if (a_bytes == 0 || b_bytes == 0) return false;
  if (a.begin + static_cast<uintptr_t>(a_bytes) <= b.begin || b.begin + static_cast<uintptr_t>(b_bytes) <= a.begin)
    return false;
  if (a.row_stride != b.row_stride) return true;
  // Rows repeat with one period. Does a row of b fit between two rows of a?
  const auto period = static_cast<uintptr_t>(a.row_stride);
  const uintptr_t offset =
      b.begin >= a.begin ? (b.begin - a.begin) % period : (period - (a.begin - b.begin) % period) % period;
  return offset < static_cast<uintptr_t>(a.row_bytes) || offset + static_cast<uintptr_t>(b.row_bytes) > period;
}

Footprint array_footprint(const void* data, int64_t n, size_t element_bytes) {
  const int64_t bytes = data == nullptr ? 0 : n * static_cast<int64_t>(element_bytes);
  return {reinterpret_cast<uintptr_t>(data), bytes == 0 ? 0 : 1, bytes, bytes};
}

Status check_tensor(const tandem_tensor* tensor, const TensorSpec& spec, CheckedTensor* checked) {
  TANDEM_TRY(require(tensor, spec.name));
  char prefix[32];
  std::snprintf(prefix, sizeof prefix, "%s.", spec.name);
  std::snprintf(checked->name, sizeof checked->name, "%s", spec.name);
  tandem_tensor& t = checked->tensor;
  TANDEM_TRY(copy_in(tensor, prefix, &t));
  if (t.reserved != 0) return refuse(kInvalid, spec.name, "reserved", "%d, must be 0", t.reserved);
  TANDEM_TRY(check_type(t, spec));
  TANDEM_TRY(check_place(t, spec));
  TANDEM_TRY(check_shape(t, spec));
  TANDEM_TRY(check_strides(t, spec, &checked->footprint));
  return check_data(t, spec.name, &checked->footprint);
}

Status check_disjoint(const CheckedTensor& output, const CheckedTensor& other) {
  return check_disjoint(output, other.footprint, other.name);
}

Status check_disjoint(const CheckedTensor& output, const Footprint& other, const char* other_name) {
  return overlap(output.footprint, other) ? refuse_overlap(output.name, other_name, output.tensor.data) : Status();
}

bool same_tensor(const CheckedTensor& a, const CheckedTensor& b) {
  const tandem_tensor &x = a.tensor, &y = b.tensor;
  if (x.data != y.data || x.dtype != y.dtype || x.n_dims != y.n_dims) return false;
  for (int32_t d = 0; d < x.n_dims; ++d)
    if (x.shape[d] != y.shape[d] || (x.shape[d] > 1 && x.stride[d] != y.stride[d])) return false;
  return true;
}

Status refuse_hidden(const Layer& layer, const tandem_tensor* x) {
  if ((x != nullptr) == (layer.x_type != 0)) return {};
  if (x == nullptr)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "x",
                "x = NULL: the cache keeps the hidden states of this layer (x_type = %d)", layer.x_type);
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "x", "x = %p: the cache keeps no hidden states of this layer (%s)",
              static_cast<const void*>(x), layer.projection == nullptr ? "it has no projection" : "x_type = 0");
}

// A tensor without elements may have any strides, whose multiples may overflow. It has nothing to step to.
int64_t stride_bytes(const CheckedTensor& checked, int32_t dim) {
  if (checked.footprint.n_rows == 0) return 0;
  const Unit unit = unit_of(checked.tensor.dtype);
  return checked.tensor.stride[dim] / unit.n_elements * unit.bytes;
}

TensorView view_of(const CheckedTensor& checked) {
  const tandem_tensor& t = checked.tensor;
  if (t.n_dims == 2)
    return {static_cast<std::byte*>(t.data),
            t.dtype,
            t.shape[0],
            1,
            t.shape[1],
            stride_bytes(checked, 0),
            t.shape[1] / unit_of(t.dtype).n_elements * unit_of(t.dtype).bytes};
  return {static_cast<std::byte*>(t.data), t.dtype, t.shape[0], t.shape[1], t.shape[2], stride_bytes(checked, 0),
          stride_bytes(checked, 1)};
}

}  // namespace tandem
