// SPDX-License-Identifier: MIT

package tandem

import (
	"math"
	"testing"
)

func TestViewsReachToTheLastElementAndNoFurther(t *testing.T) {
	data := make([]float32, 24)
	equal(t, Float32s(data, 2, 3, 4).Strides(), []int64{12, 4, 1})
	equal(t, Float32s(data, 2, 3, 4).Shape(), []int64{2, 3, 4})
	check(t, Float32s(data, 2, 3, 4).Err())
	refused(t, Float32s(data, 5, 5).Err(), ErrInvalidArgument, "data", "has 24 elements, shape [5 5] with strides [5 1] reaches 25")
	check(t, Float32s(data, 2, 2, 4).Strided(16, 4, 1).Err()) // the last element is 16 + 4 + 3 = 23
	refused(t, Float32s(data, 2, 2, 4).Strided(17, 4, 1).Err(), ErrInvalidArgument, "data", "strides [17 4 1] reaches 25")
	refused(t, Float32s(data, 2).Strided(24).Err(), ErrInvalidArgument, "data", "reaches 25")
	refused(t, Float32s(data[:0], 1).Err(), ErrInvalidArgument, "data", "has 0 elements")
	check(t, Float32s(nil, 0, 8, 64).Err())
}

func TestDimensionsAreCounted(t *testing.T) {
	data := make([]float32, 4)
	refused(t, Float32s(data).Err(), ErrInvalidArgument, "shape", "1 to 4")
	refused(t, Float32s(data, 1, 1, 1, 1, 1).Err(), ErrInvalidArgument, "shape", "1 to 4")
	refused(t, Float32s(data, 2, 2).Strided(1).Err(), ErrInvalidArgument, "strides", "2 dimensions")
	refused(t, Float32s(data, 2, -2).Err(), ErrInvalidArgument, "shape", "negative")
	refused(t, Float32s(data, 2, 2).Strided(-2, 1).Err(), ErrInvalidArgument, "strides", "negative")
	refused(t, Float32s(data, 5).Strided(1).Err(), ErrInvalidArgument, "data", "reaches 5") // the first error stays
}

func TestNumbersThatOverflowAreRefused(t *testing.T) {
	data := make([]float32, 4)
	for _, tensor := range []Tensor{
		Float32s(data, math.MaxInt, 2), Float32s(data, 1<<40, 1<<40), Float32s(data, 1<<21, 1<<21, 1<<21, 0),
		Float32s(data, 4, 1).Strided(math.MaxInt/2, 1), Float32s(data, 2, 2).Strided(math.MaxInt, 1),
	} {
		refused(t, tensor.Err(), ErrInvalidArgument, "shape", "more than memory")
	}
}

func TestTypesHoldWhatTheyHold(t *testing.T) {
	blocks := make([]byte, 4*34)
	check(t, Bytes(Q8_0, blocks, 2, 64).Err())
	refused(t, Bytes(Q8_0, blocks, 2, 65).Err(), ErrInvalidArgument, "data", "has 128 elements")
	refused(t, Bytes(Q8_0, blocks[:4*34-1], 2, 64).Err(), ErrInvalidArgument, "data", "has 96 elements")
	refused(t, Bytes(F32, blocks, 1).Err(), ErrInvalidArgument, "dtype", "= f32")
	refused(t, Uint16s(Q8_0, make([]uint16, 64), 1).Err(), ErrInvalidArgument, "dtype", "= q8_0")
	check(t, Uint16s(F16, make([]uint16, 6), 2, 3).Err())
	refused(t, OnDevice(F32, 0, 0, 1, 8).Err(), ErrInvalidArgument, "address", "= 0")
}

// A merge copies from the first element to the end of the last.
func TestSpans(t *testing.T) {
	data := make([]float32, 100)
	for span, tensor := range map[int]Tensor{
		4 * 24: Float32s(data, 2, 3, 4), 4 * 33: Float32s(data, 2, 3).Strided(30, 1), 0: Float32s(data, 2, 0, 3),
		2 * 12: Uint16s(BF16, make([]uint16, 12), 3, 4), 3 * 18: Bytes(Q4_0, make([]byte, 54), 3, 32),
	} {
		if tensor.span() != span {
			t.Errorf("%v %v spans %d bytes, expected %d", tensor.Shape(), tensor.Strides(), tensor.span(), span)
		}
	}
}
