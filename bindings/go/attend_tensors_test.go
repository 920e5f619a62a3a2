// SPDX-License-Identifier: MIT

package tandem

import (
	"context"
	"errors"
	"math"
	"testing"
)

const nTensorKeys = 90

func TestTensorsInEitherOrderOfTokensAndHeads(t *testing.T) {
	engine := must(NewEngine(engineOptions()))
	defer engine.Close()
	q, k, v := numbers(qToken, 3), numbers(nTensorKeys*kvToken, 1), numbers(nTensorKeys*kvToken, 2)
	expected, expectedLse := reference(q, k, v)
	o, lse := unset(qToken), unset(qHeads)
	check(t, engine.AttendTensors(&AttendTensors{Q: heads(q), K: kv(k), V: kv(v), O: heads(o), Lse: Float32s(lse, 1, qHeads)}))
	closeTo(t, o, expected)
	closeTo(t, lse, expectedLse)

	headMajor := func(rows []float32) Tensor { // padded, one sequence
		var turned []float32
		for head := 0; head < kvHeads; head++ {
			for token := 0; token < nTensorKeys; token++ {
				turned = append(turned, rows[(token*kvHeads+head)*dim:][:dim]...)
			}
		}
		return Float32s(turned, 1, nTensorKeys, kvHeads, dim).Strided(nTensorKeys*kvToken, dim, nTensorKeys*dim, 1)
	}
	padded := unset(qToken)
	check(t, engine.AttendTensors(&AttendTensors{Q: Float32s(q, 1, 1, qHeads, dim), K: headMajor(k), V: headMajor(v),
		O: Float32s(padded, 1, 1, qHeads, dim), Causal: true}))
	closeTo(t, padded, expected)
}

func TestTensorsOfSeveralSequences(t *testing.T) {
	engine := must(NewEngine(engineOptions()))
	defer engine.Close()
	q, k, v := numbers(3*qToken, 3), numbers(nTensorKeys*kvToken, 1), numbers(nTensorKeys*kvToken, 2)
	expected := func(token, first, end int) []float64 {
		o, _ := reference(q[token*qToken:][:qToken], k[first*kvToken:end*kvToken], v[first*kvToken:end*kvToken])
		return o
	}
	// Two sequences, of 1 and 2 queries and of 40 and 50 keys.
	attend := func(change func(a *AttendTensors)) []float32 {
		o := unset(len(q))
		a := &AttendTensors{Q: heads(q), K: kv(k), V: kv(v), O: heads(o), QLens: []int64{1, 2}, KVLens: []int64{40, 50}}
		change(a)
		check(t, engine.AttendTensors(a))
		return o
	}
	o := attend(func(a *AttendTensors) { a.Causal = true })
	closeTo(t, o, joined(expected(0, 0, 40), expected(1, 40, 89), expected(2, 40, 90)))
	o = attend(func(a *AttendTensors) { a.Causal, a.SlidingWindowTokens = true, 10 })
	closeTo(t, o, joined(expected(0, 30, 40), expected(1, 79, 89), expected(2, 80, 90)))
	mask := make([]float32, 3*50) // the first query of the second sequence sees its first seven keys
	for i := 57; i < 100; i++ {
		mask[i] = float32(math.Inf(-1))
	}
	o = attend(func(a *AttendTensors) { a.Mask = Float32s(mask, 3, 50) })
	closeTo(t, o, joined(expected(0, 0, 40), expected(1, 40, 47), expected(2, 40, 90)))
}

func TestTensorsThatAreRefused(t *testing.T) {
	engine := must(NewEngine(engineOptions()))
	q, k, o := numbers(2*qToken, 3), numbers(nTensorKeys*kvToken, 1), unset(2*qToken)
	valid := func() *AttendTensors { return &AttendTensors{Q: heads(q), K: kv(k), V: kv(k), O: heads(o)} }
	is := func(code Code, field, message string, change func(a *AttendTensors)) {
		t.Helper()
		a := valid()
		change(a)
		refused(t, engine.AttendTensors(a), code, field, message)
		if o[0] == o[0] || o[len(o)-1] == o[len(o)-1] {
			t.Fatal("o was written")
		}
	}
	is(ErrInvalidArgument, "n_sequences", "= 0 is not", func(a *AttendTensors) { a.QLens = []int64{} })
	is(ErrInvalidArgument, "kv_lens", "NULL with n_sequences = 2", func(a *AttendTensors) { a.QLens = []int64{1, 1} })
	is(ErrInvalidArgument, "kv_lens", "has 1 values, must have 2", func(a *AttendTensors) {
		a.QLens, a.KVLens = []int64{1, 1}, []int64{nTensorKeys}
	})
	is(ErrInvalidArgument, "kv_lens[0]", "-1 is not from 0", func(a *AttendTensors) { a.KVLens = []int64{-1} })
	is(ErrInvalidArgument, "sinks", "has 7 values, must have 8", func(a *AttendTensors) { a.Sinks = make([]float32, 7) })
	is(ErrInvalidArgument, "alibi_slopes", "has 0 values", func(a *AttendTensors) { a.AlibiSlopes = []float32{} })
	is(ErrInvalidArgument, "sm_scale", "-1", func(a *AttendTensors) { a.SmScale = -1 })
	is(ErrInvalidArgument, "mask", "data has 8 elements", func(a *AttendTensors) { a.Mask = Float32s(make([]float32, 8), 2, 90) })
	is(ErrInvalidArgument, "q", "NULL", func(a *AttendTensors) { a.Q = Tensor{} })
	refused(t, engine.AttendTensors(nil), ErrInvalidArgument, "args", "nil")

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := engine.AttendTensorsContext(ctx, valid()); !errors.Is(err, ErrCancelled) || !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	a, nCalls := valid(), 0
	a.Progress = func(done, total int64) { nCalls++ }
	check(t, engine.AttendTensorsContext(context.Background(), a))
	if nCalls == 0 || listeners.count() != 0 || o[0] != o[0] {
		t.Fatalf("%d calls of progress", nCalls)
	}
	engine.Close()
	refused(t, engine.AttendTensors(valid()), ErrInvalidHandle, "engine", "closed")
}
