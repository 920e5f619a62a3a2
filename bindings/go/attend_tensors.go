// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"math"
	"runtime"
)

// AttendTensors holds the arguments of attention over K and V that the caller owns. It needs no cache and no session. Tensors
// of four dimensions are padded, with n_sequences first: sequence i has the first QLens[i] tokens and the first KVLens[i] keys.
// Tensors of three dimensions are packed: the sequences' tokens follow one another. Strides may order tokens and heads either
// way.
type AttendTensors struct {
	Q                   Tensor    // [n_tokens, n_q_heads, k_head_dim]
	K                   Tensor    // [n_keys, n_kv_heads, k_head_dim]
	V                   Tensor    // [n_keys, n_kv_heads, v_head_dim]; none: V is the first v_head_dim dims of K
	Mask                Tensor    // [n_tokens, n_columns], padded [1 or n_sequences, 1 or n_q_heads, n_tokens, n_keys]; none: no mask
	O                   Tensor    // [n_tokens, n_q_heads, v_head_dim], written
	Lse                 Tensor    // [n_tokens, n_q_heads], f32, written; none: not wanted
	QLens               []int64   // tokens of each sequence; nil: all tokens, and one sequence if tensors are packed
	KVLens              []int64   // keys of each sequence; nil: all keys, and one sequence if tensors are packed
	Causal              bool      // the last query of a sequence sees all keys, each earlier query one key less; not with Mask
	SlidingWindowTokens int64     // 0: off; else, with Causal, the number of newest keys that a query sees, its own included
	SmScale             float32   // 0: 1 / sqrt(k_head_dim)
	SoftCap             float32   // 0: off
	Sinks               []float32 // [n_q_heads] learned sink logits; nil: none
	AlibiSlopes         []float32 // [n_q_heads]; nil: none. With a mask, the mask's values are multiplied by the slopes

	Progress func(done, total int64) // as in Attend
}

var attendTensorsNames = []string{"q", "k", "v", "mask", "o", "lse"}

// nSequences returns the number of sequences that Q and the lengths give. The library reads that many lengths.
func (a *AttendTensors) nSequences(function string) (int, error) {
	shape, n := a.Q.Shape(), 1
	switch {
	case len(shape) == 4:
		n = int(shape[0])
	case a.QLens != nil:
		n = len(a.QLens)
	case a.KVLens != nil:
		n = len(a.KVLens)
	}
	if n > math.MaxInt32 || n == 0 && len(shape) != 4 {
		return 0, refuse(function, "n_sequences", "= %d is not from 1 to %d", n, math.MaxInt32)
	}
	return n, nil
}

// check refuses wrong slice lengths, which the library cannot see. It returns the number of sequences.
func (a *AttendTensors) check(function string) (nSequences int, err error) {
	if err := firstErr(function, attendTensorsNames, &a.Q, &a.K, &a.V, &a.Mask, &a.O, &a.Lse); err != nil {
		return 0, err
	}
	if nSequences, err = a.nSequences(function); err != nil {
		return 0, err
	}
	shape, nQHeads := a.Q.Shape(), 0
	if len(shape) > 1 {
		nQHeads = int(shape[len(shape)-2])
	}
	slices := []struct {
		name  string
		isNil bool
		n     int
		must  int
	}{
		{"q_lens", a.QLens == nil, len(a.QLens), nSequences}, {"kv_lens", a.KVLens == nil, len(a.KVLens), nSequences},
		{"sinks", a.Sinks == nil, len(a.Sinks), nQHeads}, {"alibi_slopes", a.AlibiSlopes == nil, len(a.AlibiSlopes), nQHeads},
	}
	for _, slice := range slices {
		if !slice.isNil && slice.n != slice.must {
			return 0, refuse(function, slice.name, "has %d values, must have %d", slice.n, slice.must)
		}
	}
	return nSequences, nil
}

// AttendTensors computes o = softmax(logits) V and its lse over the caller's K and V, without a copy. Calls of one engine run
// one after another. Errors: ErrInvalidArgument (shapes, strides, an output that overlaps an input), ErrUnsupported (head dims
// without kernels, q4_64), ErrCapacity, ErrOutOfMemory.
func (e *Engine) AttendTensors(a *AttendTensors) error { return e.attendTensors(a, nil) }

// AttendTensorsContext does the same and stops when the context is done. It then returns ErrCancelled, which also matches the
// context's error, and may have written part of O and Lse.
func (e *Engine) AttendTensorsContext(ctx context.Context, a *AttendTensors) error {
	return withContext(ctx, func(cancel *int32) error { return e.attendTensors(a, cancel) })
}

func (e *Engine) attendTensors(a *AttendTensors, cancel *int32) error {
	const function = "tandem_attend_tensors"
	if a == nil {
		return refuse(function, "args", "is nil")
	}
	nSequences, err := a.check(function)
	if err != nil {
		return err
	}
	if err := e.held().use(function); err != nil {
		return err
	}
	defer e.handle.done()
	args := &C.tandem_go_attend_tensors_args{
		n_sequences: C.int32_t(nSequences), sm_scale: C.float(a.SmScale), soft_cap: C.float(a.SoftCap),
		sliding_window_tokens: C.int64_t(a.SlidingWindowTokens),
		q:                     a.Q.description, k: a.K.description, v: a.V.description, mask: a.Mask.description, o: a.O.description,
		lse: a.Lse.description,
	}
	if a.Causal {
		args.flags = C.TANDEM_TENSORS_CAUSAL
	}
	if a.Progress != nil {
		l := &listener{progress: a.Progress}
		number := listeners.add(l)
		args.progress = C.uintptr_t(number)
		defer func() {
			listeners.remove(number)
			l.goOn()
		}()
	}
	result := C.tandem_go_attend_tensors(e.raw(), args, int64s(a.QLens), int64s(a.KVLens), floats(a.Sinks), floats(a.AlibiSlopes),
		(*C.int32_t)(cancel), a.Q.at(), a.K.at(), a.V.at(), a.Mask.at(), a.O.at(), a.Lse.at())
	runtime.KeepAlive(a)
	return failure(result.status, result.error)
}

func floats(values []float32) *C.float {
	if len(values) == 0 {
		return nil
	}
	return (*C.float)(&values[0])
}
