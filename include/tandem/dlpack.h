/* SPDX-License-Identifier: MIT
 *
 * DLPack tensors (NumPy, PyTorch, JAX, CuPy, ...) as Tandem tensors, without a copy:
 *
 *   tandem_tensor q;
 *   const char *why;
 *   if (tandem_tensor_from_dlpack(&q, &managed->dl_tensor, &why) != TANDEM_OK) fprintf(stderr, "q: %s\n", why);
 *
 * The result is a view. The caller keeps the DLPack tensor until the call that reads it has finished. If <dlpack/dlpack.h>
 * is included before this header, tandem_dl_tensor is DLTensor. Otherwise it is a struct of the same layout (DLPack 0.6 to
 * 1.x), and dlpack.h is not needed.
 */
#ifndef TANDEM_DLPACK_H_
#define TANDEM_DLPACK_H_

#include "tandem/tandem.h"

#if defined(DLPACK_DLPACK_H_)
typedef DLTensor tandem_dl_tensor;
#else
typedef struct tandem_dl_tensor {
  void *data;
  struct {
    int32_t device_type; /* 1 host, 2 CUDA, 3 pinned host, 13 CUDA managed */
    int32_t device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code; /* 2 float, 4 bfloat */
    uint8_t bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape;   /* [ndim] */
  int64_t *strides; /* [ndim] elements; NULL: contiguous */
  uint64_t byte_offset;
} tandem_dl_tensor;
#endif

/* Returns TANDEM_F32, ... for a DLPack element type; 0 if Tandem has no such type. */
static inline int32_t tandem_dtype_from_dlpack(int code, int bits, int lanes) {
  if (lanes != 1) return 0;
  if (code == 2 && bits == 32) return TANDEM_F32;
  if (code == 2 && bits == 16) return TANDEM_F16;
  if (code == 4 && bits == 16) return TANDEM_BF16;
  return 0;
}

/* Sets the strides of *tensor. A dimension of length 0 or 1 gets the packed stride, because producers may write any stride
 * there. Returns NULL, or the reason why the strides cannot be used. */
static inline const char *tandem_strides_from_dlpack(tandem_tensor *tensor, const int64_t *strides) {
  int64_t packed = 1;
  int i;
  for (i = tensor->n_dims - 1; i >= 0; --i) {
    const int stepped = strides != NULL && tensor->shape[i] > 1;
    tensor->stride[i] = stepped ? strides[i] : packed;
    if (i == tensor->n_dims - 1 && tensor->stride[i] != 1) return "the last dimension is not contiguous";
    if (tensor->stride[i] < packed) return "strides overlap, are negative, or the dimensions are transposed";
    if (tensor->shape[i] > 1) {
      if (tensor->stride[i] > INT64_MAX / tensor->shape[i]) return "shape times strides is too large";
      packed = tensor->stride[i] * tensor->shape[i];
    }
  }
  return NULL;
}

static inline const char *tandem_fill_from_dlpack(tandem_tensor *tensor, const tandem_dl_tensor *source) {
  const int device = (int)source->device.device_type;
  int i;
  tensor->struct_size = (uint32_t)sizeof *tensor;
  tensor->reserved = 0;
  tensor->n_dims = source->ndim;
  tensor->dtype = tandem_dtype_from_dlpack(source->dtype.code, source->dtype.bits, source->dtype.lanes);
  if (tensor->dtype == 0) return "the element type is not f32, f16 or bf16";
  if (device != 1 && device != 2 && device != 3 && device != 13) return "the device is neither host nor CUDA";
  tensor->device_type = device == 1 || device == 3 ? TANDEM_DEVICE_HOST : TANDEM_DEVICE_CUDA;
  tensor->device_index = tensor->device_type == TANDEM_DEVICE_HOST ? 0 : source->device.device_id;
  if (source->ndim < 1 || source->ndim > 4) return "the tensor does not have 1 to 4 dimensions";
  tensor->data = source->data == NULL ? NULL : (void *)((char *)source->data + source->byte_offset);
  for (i = 0; i < 4; ++i) {
    tensor->shape[i] = i < source->ndim ? source->shape[i] : 0;
    tensor->stride[i] = 0;
    if (tensor->shape[i] < 0) return "a dimension is negative";
  }
  return tandem_strides_from_dlpack(tensor, source->strides);
}

/* Fills *tensor as a view of *source. Returns TANDEM_OK, or TANDEM_ERROR_UNSUPPORTED: then *why (may be NULL) is set to a
 * constant text, and *tensor is unchanged. Any thread; allocates nothing. */
static inline int32_t tandem_tensor_from_dlpack(tandem_tensor *tensor, const tandem_dl_tensor *source, const char **why) {
  tandem_tensor filled;
  const char *reason = tandem_fill_from_dlpack(&filled, source);
  if (why != NULL) *why = reason;
  if (reason != NULL) return TANDEM_ERROR_UNSUPPORTED;
  *tensor = filled;
  return TANDEM_OK;
}

#endif /* TANDEM_DLPACK_H_ */
