// SPDX-License-Identifier: MIT

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"os"
	"reflect"
	"sort"
)

const maxHeaderBytes = 100_000_000 // the format's own limit

var elementBytes = map[string]uint64{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
	"I16": 2, "U16": 2, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "BOOL": 1}

type weight struct {
	dtype      string
	shape      []int
	first, end uint64 // the tensor's bytes in the data
}

// weights is a safetensors file: a length, a JSON header, and the data of the tensors that the header lists. As in the format's
// reference implementation, no key may appear twice, and the tensors cover the data without overlaps or holes.
type weights struct {
	path    string
	tensors map[string]weight
	data    []byte
}

// readRegular reads a regular file. Other kinds are refused: reading a pipe would wait for a writer, and a device may have no
// end.
func readRegular(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: is not a regular file", path)
	}
	return os.ReadFile(path)
}

// brief quotes a text for a message, cut to 60 characters.
func brief(text string) string {
	if runes := []rune(text); len(runes) > 60 {
		return fmt.Sprintf("%q…", string(runes[:60]))
	}
	return fmt.Sprintf("%q", text)
}

func openWeights(path string) (*weights, error) {
	data, err := readRegular(path)
	if err != nil {
		return nil, err
	}
	if len(data) < 8 {
		return nil, fmt.Errorf("%s: too short for a header length", path)
	}
	length := binary.LittleEndian.Uint64(data)
	if length > maxHeaderBytes || length > uint64(len(data)-8) {
		return nil, fmt.Errorf("%s: header beyond the end", path)
	}
	begin := 8 + length
	w := &weights{path: path, tensors: map[string]weight{}, data: data[begin:]}
	header, err := object(data[8:begin])
	if err != nil {
		return nil, fmt.Errorf("%s: header: %w", path, err)
	}
	delete(header, "__metadata__")
	for name, entry := range header {
		if w.tensors[name], err = parseWeight(entry, uint64(len(w.data))); err != nil {
			return nil, fmt.Errorf("%s: tensor %s %w", path, brief(name), err)
		}
	}
	if err := w.checkCover(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return w, nil
}

// object parses a JSON object and refuses equal keys. encoding/json would keep the last of them.
func object(text []byte) (map[string]json.RawMessage, error) {
	if !json.Valid(text) {
		return nil, fmt.Errorf("is not JSON")
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return nil, fmt.Errorf("is not an object")
	}
	members := map[string]json.RawMessage{}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return nil, err
		}
		key := token.(string) // a string, because the text is valid JSON
		if _, twice := members[key]; twice {
			return nil, fmt.Errorf("has the key %s twice", brief(key))
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, err
		}
		members[key] = value
	}
	return members, nil
}

// parseWeight reads an entry of the header and checks it against the length of the data.
func parseWeight(entry []byte, nDataBytes uint64) (w weight, err error) {
	members, err := object(entry)
	if err != nil {
		return w, err
	}
	var offsets []uint64
	if json.Unmarshal(members["dtype"], &w.dtype) != nil {
		return w, fmt.Errorf("has no dtype")
	}
	if json.Unmarshal(members["shape"], &w.shape) != nil || w.shape == nil {
		return w, fmt.Errorf("has no shape of lengths")
	}
	if json.Unmarshal(members["data_offsets"], &offsets) != nil || len(offsets) != 2 {
		return w, fmt.Errorf("has no data_offsets")
	}
	nBytes := elementBytes[w.dtype]
	if nBytes == 0 {
		return w, fmt.Errorf("has dtype %s, which is unknown", brief(w.dtype))
	}
	for _, length := range w.shape {
		high, low := bits.Mul64(nBytes, uint64(length))
		if length < 0 || high != 0 {
			return w, fmt.Errorf("has a shape with a length of %d, negative or too large", length)
		}
		nBytes = low
	}
	w.first, w.end = offsets[0], offsets[1]
	if w.first > w.end || w.end > nDataBytes {
		return w, fmt.Errorf("has data_offsets %d outside the %d bytes of data", offsets, nDataBytes)
	}
	if w.end-w.first != nBytes {
		return w, fmt.Errorf("has data_offsets %d, but its shape of %s takes %d bytes", offsets, w.dtype, nBytes)
	}
	return w, nil
}

// checkCover checks that the tensors follow one another from the first byte of the data to the last.
func (w *weights) checkCover() error {
	names := make([]string, 0, len(w.tensors))
	for name := range w.tensors {
		names = append(names, name)
	}
	sort.Slice(names, func(i, j int) bool {
		a, b := w.tensors[names[i]], w.tensors[names[j]]
		if a.first != b.first {
			return a.first < b.first
		}
		return a.end < b.end || (a.end == b.end && names[i] < names[j])
	})
	covered, before := uint64(0), ""
	for _, name := range names {
		tensor := w.tensors[name]
		if tensor.first < covered {
			return fmt.Errorf("tensor %s overlaps tensor %s", brief(name), brief(before))
		}
		if tensor.first > covered {
			return fmt.Errorf("bytes %d to %d of the data belong to no tensor", covered, tensor.first)
		}
		covered, before = tensor.end, name
	}
	if covered != uint64(len(w.data)) {
		return fmt.Errorf("bytes %d to %d of the data belong to no tensor", covered, len(w.data))
	}
	return nil
}

// find returns the bytes and type of a tensor, which must have this shape.
func (w *weights) find(name string, shape ...int) ([]byte, string, error) {
	tensor, found := w.tensors[name]
	if !found {
		return nil, "", fmt.Errorf("%s: tensor %s is missing", w.path, name)
	}
	if !reflect.DeepEqual(tensor.shape, shape) {
		return nil, "", fmt.Errorf("%s: tensor %s has shape %v, expected %v", w.path, name, tensor.shape, shape)
	}
	return w.data[tensor.first:tensor.end], tensor.dtype, nil
}

// readF32 returns a tensor widened to f32.
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
