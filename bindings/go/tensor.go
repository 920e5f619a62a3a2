// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"math"
	"unsafe"
)

// Dtype is an element type of tensors and a storage type of caches. Queries, outputs and states are F32, F16 or BF16. K and V
// may be given, stored and read in any of them but Q4_64 and I32.
type Dtype int32

// The types; tandem.h says more about each.
const (
	F32   Dtype = C.TANDEM_F32
	F16   Dtype = C.TANDEM_F16
	BF16  Dtype = C.TANDEM_BF16
	E4M3  Dtype = C.TANDEM_E4M3  // 8-bit floats without infinities
	Q8_0  Dtype = C.TANDEM_Q8_0  // 8-bit codes with an f16 scale for each 32 elements
	Q4_0  Dtype = C.TANDEM_Q4_0  // 4-bit codes with an f16 scale for each 32 elements
	Q4_64 Dtype = C.TANDEM_Q4_64 // 4-bit codes with an f16 scale and minimum for each 64 elements; for hidden states only
	I32   Dtype = C.TANDEM_I32   // indices of a Selection only
)

// String returns "f32", "q8_0", ...
func (d Dtype) String() string {
	if name := C.tandem_dtype_name(C.int32_t(d)); name != nil {
		return C.GoString(name)
	}
	return fmt.Sprintf("Dtype(%d)", int32(d))
}

// RowBytes returns the bytes that a cache stores for headDim elements of K or V, scales included. It returns 0 for an invalid
// type or length.
func (d Dtype) RowBytes(headDim int32) int64 {
	return int64(C.tandem_dtype_row_bytes(C.int32_t(d), C.int32_t(headDim)))
}

// block returns the bytes and elements of one block of a type that byte slices hold; 0, 0 for other types.
func (d Dtype) block() (bytes, elements int) {
	switch d {
	case E4M3:
		return 1, 1
	case Q8_0:
		return 34, 32
	case Q4_0:
		return 18, 32
	case Q4_64:
		return 36, 64
	}
	return 0, 0
}

// Tensor is a view of a slice, with a shape and strides. The last element that they reach must lie inside the slice, else the
// call that takes the tensor returns the error that Err returns. The zero Tensor means none. On every call the library checks
// types, alignment, overlap and shapes against the layer.
type Tensor struct {
	data        unsafe.Pointer
	nElements   int // elements that data holds
	description C.tandem_go_tensor
	err         *Error
}

// Float32s returns a view of f32.
func Float32s(data []float32, shape ...int) Tensor {
	var first unsafe.Pointer
	if len(data) > 0 {
		first = unsafe.Pointer(&data[0])
	}
	return view(F32, first, len(data), shape)
}

// Int32s returns a view of indices in host memory, for a Selection. OnDevice with I32 views indices in device memory.
func Int32s(data []int32, shape ...int) Tensor {
	var first unsafe.Pointer
	if len(data) > 0 {
		first = unsafe.Pointer(&data[0])
	}
	return view(I32, first, len(data), shape)
}

// Uint16s returns a view of F16 or BF16 bits.
func Uint16s(dtype Dtype, data []uint16, shape ...int) Tensor {
	if dtype != F16 && dtype != BF16 {
		return Tensor{err: refuse("tensor", "dtype", "= %v is not held by []uint16: f16 and bf16 are", dtype)}
	}
	var first unsafe.Pointer
	if len(data) > 0 {
		first = unsafe.Pointer(&data[0])
	}
	return view(dtype, first, len(data), shape)
}

// Bytes returns a view of E4M3, or of blocks of Q8_0, Q4_0 or Q4_64. The shape counts elements, not bytes.
func Bytes(dtype Dtype, data []byte, shape ...int) Tensor {
	bytes, elements := dtype.block()
	if bytes == 0 {
		return Tensor{err: refuse("tensor", "dtype", "= %v is not held by []byte: e4m3, q8_0, q4_0 and q4_64 are", dtype)}
	}
	var first unsafe.Pointer
	if len(data) > 0 {
		first = unsafe.Pointer(&data[0])
	}
	return view(dtype, first, len(data)/bytes*elements, shape)
}

// OnDevice returns a view of device memory. This package cannot check it. The library reads it in the order of the call's
// stream. The memory must stay unchanged until the stream has passed the call.
func OnDevice(dtype Dtype, deviceIndex int32, address uintptr, shape ...int) Tensor {
	t := view(dtype, nil, math.MaxInt, shape)
	if address == 0 && t.err == nil {
		t.err = refuse("tensor", "address", "= 0 is not device memory")
	}
	t.description.device_type = C.TANDEM_DEVICE_CUDA
	t.description.device_index = C.int32_t(deviceIndex)
	t.description.address = C.uintptr_t(address)
	return t
}

// Strided returns the same data with these strides, in elements. The last dimension's stride must be 1.
func (t Tensor) Strided(strides ...int) Tensor {
	if t.err != nil {
		return t
	}
	if len(strides) != int(t.description.n_dims) {
		t.err = refuse("tensor", "strides", "= %v does not have %d dimensions as the shape", clone(strides), int(t.description.n_dims))
		return t
	}
	for i, stride := range strides {
		t.description.stride[i] = C.int64_t(stride)
	}
	t.err = t.check()
	return t
}

// Err returns the reason why every call refuses the tensor, or nil.
func (t Tensor) Err() error {
	if t.err == nil {
		return nil
	}
	return t.err
}

// Shape returns the lengths of the dimensions.
func (t Tensor) Shape() []int64 {
	shape := make([]int64, t.description.n_dims)
	for i := range shape {
		shape[i] = int64(t.description.shape[i])
	}
	return shape
}

// Strides returns the distance in elements between neighbours, for each dimension.
func (t Tensor) Strides() []int64 {
	strides := make([]int64, t.description.n_dims)
	for i := range strides {
		strides[i] = int64(t.description.stride[i])
	}
	return strides
}

// clone copies variadic arguments for a message, so that the arguments themselves stay on the stack.
func clone(values []int) []int { return append([]int(nil), values...) }

// nothing is the address of tensors without elements.
var nothing [64]byte

func view(dtype Dtype, data unsafe.Pointer, nElements int, shape []int) Tensor {
	if data == nil {
		data = unsafe.Pointer(&nothing)
	}
	t := Tensor{data: data, nElements: nElements}
	if len(shape) == 0 || len(shape) > 4 {
		t.err = refuse("tensor", "shape", "= %v does not have 1 to 4 dimensions", clone(shape))
		return t
	}
	t.description.dtype = C.int32_t(dtype)
	t.description.n_dims = C.int32_t(len(shape))
	packed, fits := int64(1), true
	for i := len(shape) - 1; i >= 0; i-- {
		t.description.shape[i], t.description.stride[i] = C.int64_t(shape[i]), C.int64_t(packed)
		length := int64(shape[i])
		if length < 0 {
			t.err = refuse("tensor", "shape", "= %v has a negative length", clone(shape))
			return t
		}
		if length > 1 {
			fits = fits && packed <= math.MaxInt64/length
			packed *= length
		}
	}
	if !fits {
		t.err = refuse("tensor", "shape", "= %v is more than memory can hold", clone(shape))
		return t
	}
	t.err = t.check()
	return t
}

// check returns an error if shape and strides reach beyond the data.
func (t *Tensor) check() *Error {
	d := &t.description
	last, empty, fits := int64(0), false, true
	for i := 0; i < int(d.n_dims); i++ {
		length, stride := int64(d.shape[i]), int64(d.stride[i])
		if length == 0 {
			empty = true
			continue
		}
		if length == 1 {
			continue
		}
		if stride < 0 {
			return refuse("tensor", "strides", "= %v has a negative stride", t.Strides())
		}
		if stride > (math.MaxInt64-1-last)/(length-1) {
			fits = false
			break
		}
		last += (length - 1) * stride
	}
	if !fits {
		return refuse("tensor", "shape", "= %v with strides %v is more than memory can hold", t.Shape(), t.Strides())
	}
	if !empty && last >= int64(t.nElements) {
		const format = "has %d elements, shape %v with strides %v reaches %d"
		return refuse("tensor", "data", format, t.nElements, t.Shape(), t.Strides(), last+1)
	}
	return nil
}

// span returns the number of bytes from the first element to the end of the last.
func (t *Tensor) span() int {
	last := 0
	for i := 0; i < int(t.description.n_dims); i++ {
		if t.description.shape[i] == 0 {
			return 0
		}
		last += (int(t.description.shape[i]) - 1) * int(t.description.stride[i])
	}
	dtype := Dtype(t.description.dtype)
	if bytes, elements := dtype.block(); bytes != 0 {
		return (last/elements + 1) * bytes
	}
	if dtype == F32 || dtype == I32 {
		return 4 * (last + 1)
	}
	return 2 * (last + 1)
}

// at returns the data's address as a call argument. A *char points to no pointers, so cgo's pointer checks skip it.
func (t *Tensor) at() *C.char { return (*C.char)(t.data) }

// firstErr returns the error of the first tensor that has one, with the argument's name.
func firstErr(function string, names []string, tensors ...*Tensor) error {
	for i, t := range tensors {
		if t.err != nil {
			return &Error{Code: t.err.Code, Field: names[i], Message: function + ": " + names[i] + ": " + t.err.Message}
		}
	}
	return nil
}

func chars(data []byte) *C.char {
	if len(data) == 0 {
		return nil
	}
	return (*C.char)(unsafe.Pointer(&data[0]))
}
