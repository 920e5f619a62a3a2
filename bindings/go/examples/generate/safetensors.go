// SPDX-License-Identifier: MIT

package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
)

// weights is a safetensors file: a length, a JSON header, the data of the tensors that it lists.
type weights struct {
	path   string
	header map[string]json.RawMessage
	data   []byte
}

func openWeights(path string) (*weights, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(data) < 8 || binary.LittleEndian.Uint64(data) > uint64(len(data)-8) {
		return nil, fmt.Errorf("%s: header beyond the end", path)
	}
	begin := 8 + binary.LittleEndian.Uint64(data)
	w := &weights{path: path, data: data[begin:]}
	if err := json.Unmarshal(data[8:begin], &w.header); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return w, nil
}

// find gives the bytes of a tensor of this shape, and its type.
func (w *weights) find(name string, shape ...int) ([]byte, string, error) {
	var entry struct {
		Dtype   string
		Shape   []int
		Offsets [2]uint64 `json:"data_offsets"`
	}
	raw, found := w.header[name]
	if !found {
		return nil, "", fmt.Errorf("%s: tensor %s is missing", w.path, name)
	}
	if err := json.Unmarshal(raw, &entry); err != nil {
		return nil, "", fmt.Errorf("%s: tensor %s: %w", w.path, name, err)
	}
	if !reflect.DeepEqual(entry.Shape, shape) {
		return nil, "", fmt.Errorf("%s: tensor %s has shape %v, expected %v", w.path, name, entry.Shape, shape)
	}
	if entry.Offsets[0] > entry.Offsets[1] || entry.Offsets[1] > uint64(len(w.data)) {
		return nil, "", fmt.Errorf("%s: tensor %s lies beyond the end", w.path, name)
	}
	return w.data[entry.Offsets[0]:entry.Offsets[1]], entry.Dtype, nil
}

// readF32 gives the same widened to f32.
func (w *weights) readF32(name string, shape ...int) ([]float32, error) {
	bytes, dtype, err := w.find(name, shape...)
	if err != nil {
		return nil, err
	}
	n := 1
	for _, length := range shape {
		n *= length
	}
	values := make([]float32, n)
	switch {
	case dtype == "F32" && len(bytes) == 4*n:
		for i := range values {
			values[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
		}
	case dtype == "BF16" && len(bytes) == 2*n:
		for i := range values {
			values[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(bytes[2*i:])) << 16)
		}
	default:
		return nil, fmt.Errorf("%s: tensor %s is %d bytes of %s (F32 and BF16 are read)", w.path, name, len(bytes), dtype)
	}
	return values, nil
}
