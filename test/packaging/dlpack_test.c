/* SPDX-License-Identifier: MIT
 * Converts DLPack tensors to Tandem tensors: copied fields, corrected strides, and refusals. */
#include "tandem/dlpack.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static float values[64];

static tandem_dl_tensor f32_2x3x4(int64_t* shape, int64_t* strides) {
  tandem_dl_tensor source;
  memset(&source, 0, sizeof source);
  source.data = values;
  source.device.device_type = 1;
  source.ndim = 3;
  source.dtype.code = 2;
  source.dtype.bits = 32;
  source.dtype.lanes = 1;
  shape[0] = 2, shape[1] = 3, shape[2] = 4;
  source.shape = shape;
  source.strides = strides;
  return source;
}

static void takes_views_over(void** state) {
  int64_t shape[3], strides[3] = {24, 8, 1};
  tandem_dl_tensor source = f32_2x3x4(shape, strides);
  tandem_tensor tensor;
  const char* why = "stale";
  (void)state;
  source.byte_offset = 8;
  assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, &why), TANDEM_OK);
  assert_null(why);
  assert_ptr_equal(tensor.data, values + 2);
  assert_int_equal(tensor.struct_size, sizeof tensor);
  assert_int_equal(tensor.dtype, TANDEM_F32);
  assert_int_equal(tensor.n_dims, 3);
  assert_memory_equal(tensor.shape, shape, sizeof shape);
  assert_memory_equal(tensor.stride, strides, sizeof strides);

  source.strides = NULL;
  assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, NULL), TANDEM_OK);
  assert_int_equal(tensor.stride[0], 12);
  assert_int_equal(tensor.stride[1], 4);
  assert_int_equal(tensor.stride[2], 1);
}

/* PyTorch may give a dimension of length 1 any stride, even an overlapping one. */
static void puts_strides_of_short_dimensions_right(void** state) {
  int64_t shape[3], strides[3] = {7, 4, 1};
  tandem_dl_tensor source = f32_2x3x4(shape, strides);
  tandem_tensor tensor;
  (void)state;
  shape[0] = 1;
  assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, NULL), TANDEM_OK);
  assert_int_equal(tensor.stride[0], 12);
  shape[0] = 5, shape[1] = 0, shape[2] = 1;
  strides[0] = 1, strides[1] = -9, strides[2] = 100;
  assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, NULL), TANDEM_OK);
  assert_int_equal(tensor.stride[0], 1);
  assert_int_equal(tensor.stride[1], 1);
  assert_int_equal(tensor.stride[2], 1);
}

static void knows_types_and_devices(void** state) {
  static const int32_t types[][4] = {{2, 32, 1, TANDEM_F32}, {2, 16, 1, TANDEM_F16}, {4, 16, 1, TANDEM_BF16},
                                     {2, 64, 1, 0},          {0, 32, 1, 0},          {2, 32, 4, 0}};
  static const int32_t devices[][2] = {
      {1, TANDEM_DEVICE_HOST}, {2, TANDEM_DEVICE_CUDA}, {3, TANDEM_DEVICE_HOST}, {13, TANDEM_DEVICE_CUDA}, {10, -1}};
  int64_t shape[3];
  tandem_dl_tensor source;
  tandem_tensor tensor;
  size_t i;
  (void)state;
  for (i = 0; i < sizeof types / sizeof types[0]; ++i) {
    source = f32_2x3x4(shape, NULL);
    source.dtype.code = (uint8_t)types[i][0];
    source.dtype.bits = (uint8_t)types[i][1];
    source.dtype.lanes = (uint16_t)types[i][2];
    assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, NULL), types[i][3] ? TANDEM_OK : TANDEM_ERROR_UNSUPPORTED);
    if (types[i][3]) assert_int_equal(tensor.dtype, types[i][3]);
  }
  for (i = 0; i < sizeof devices / sizeof devices[0]; ++i) {
    const int known = devices[i][1] >= 0;
    source = f32_2x3x4(shape, NULL);
    source.device.device_type = devices[i][0];
    source.device.device_id = 3;
    assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, NULL), known ? TANDEM_OK : TANDEM_ERROR_UNSUPPORTED);
    if (!known) continue;
    assert_int_equal(tensor.device_type, devices[i][1]);
    assert_int_equal(tensor.device_index, devices[i][1] == TANDEM_DEVICE_CUDA ? 3 : 0);
  }
}

static void refuses_and_leaves_the_tensor_alone(void** state) {
  static const int64_t bad_strides[][3] = {{12, 4, 2}, {12, 3, 1}, {4, 8, 1}, {-12, 4, 1}, {0, 4, 1}};
  int64_t shape[5] = {1, 1, 1, 1, 1}, strides[3];
  tandem_tensor tensor, before;
  tandem_dl_tensor source;
  const char* why;
  size_t i;
  (void)state;
  memset(&tensor, 0x5a, sizeof tensor);
  before = tensor;
  for (i = 0; i < sizeof bad_strides / sizeof bad_strides[0]; ++i) {
    memcpy(strides, bad_strides[i], sizeof strides);
    source = f32_2x3x4(shape, strides);
    assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, &why), TANDEM_ERROR_UNSUPPORTED);
    assert_non_null(why);
  }
  for (i = 0; i < 2; ++i) {
    source = f32_2x3x4(shape, NULL);
    source.ndim = i == 0 ? 0 : 5;
    assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, &why), TANDEM_ERROR_UNSUPPORTED);
  }
  source = f32_2x3x4(shape, NULL);
  shape[1] = -1;
  assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, &why), TANDEM_ERROR_UNSUPPORTED);
  source = f32_2x3x4(shape, NULL);
  shape[0] = shape[1] = INT64_C(1) << 31;
  assert_int_equal(tandem_tensor_from_dlpack(&tensor, &source, &why), TANDEM_ERROR_UNSUPPORTED);
  assert_memory_equal(&tensor, &before, sizeof tensor);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(takes_views_over),
      cmocka_unit_test(puts_strides_of_short_dimensions_right),
      cmocka_unit_test(knows_types_and_devices),
      cmocka_unit_test(refuses_and_leaves_the_tensor_alone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
