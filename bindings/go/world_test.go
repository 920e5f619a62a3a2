// SPDX-License-Identifier: MIT

package tandem

import (
	"errors"
	"math"
	"strings"
	"testing"
)

// Shared by the tests: numbers, a cache with content, attention in double precision.
const (
	qHeads  = 8
	kvHeads = 2
	dim     = 64
	qToken  = qHeads * dim
	kvToken = kvHeads * dim
)

var nan = float32(math.NaN())

// numbers returns numbers from -1 to 1, the same in every run.
func numbers(n int, seed uint64) []float32 {
	state := seed*0x9e3779b97f4a7c15 | 1
	out := make([]float32, n)
	for i := range out {
		state = state*6364136223846793005 + 1442695040888963407
		out[i] = float32(state>>40)/(1<<23) - 1
	}
	return out
}

// unset returns NaN, which a call must overwrite.
func unset(n int) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = nan
	}
	return out
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func layer() LayerOptions { return LayerOptions{NQHeads: qHeads, NKVHeads: kvHeads, KHeadDim: dim} }

func engineOptions() *EngineOptions {
	return &EngineOptions{NThreads: 2, NoPinning: true}
}

func sessionOptions(policy string) *SessionOptions {
	return &SessionOptions{Policy: policy, WindowTokens: 64, SinkTokens: 16}
}

// world is an f32 cache with one sequence of n tokens in each layer, and its content.
type world struct {
	engine   *Engine
	model    *Model
	cache    *Cache
	sequence SequenceID
	k, v     []float32 // [n, kvHeads, dim]
}

func newWorld(t testing.TB, n, nLayers int) *world {
	return newWorldOn(t, must(NewEngine(engineOptions())), n, nLayers)
}

func newWorldOn(t testing.TB, engine *Engine, n, nLayers int) *world {
	layers := make([]LayerOptions, nLayers)
	for i := range layers {
		layers[i] = layer()
	}
	w := &world{engine: engine, model: must(NewModel(layers...))}
	w.cache = must(NewCache(w.engine, w.model, &CacheOptions{KType: F32, PageTokens: 16}))
	w.sequence = must(w.cache.CreateSequence())
	w.k, w.v = numbers(n*kvToken, 1), numbers(n*kvToken, 2)
	for i := int32(0); i < int32(nLayers); i++ {
		check(t, w.cache.Append(w.sequence, i, kv(w.k), kv(w.v)))
	}
	t.Cleanup(func() {
		w.cache.Close()
		w.model.Close()
		w.engine.Close()
	})
	return w
}

func (w *world) session(t testing.TB, policy string) *Session {
	session := must(NewSession(w.cache, sessionOptions(policy)))
	t.Cleanup(func() { session.Close() })
	return session
}

func kv(data []float32) Tensor    { return Float32s(data, len(data)/kvToken, kvHeads, dim) }
func heads(data []float32) Tensor { return Float32s(data, len(data)/qToken, qHeads, dim) }

// decode attends one query over the sequence's keys and returns o and lse.
func decode(t testing.TB, session *Session, sequence SequenceID, q []float32) ([]float32, []float32) {
	t.Helper()
	o, lse := unset(len(q)), unset(qHeads)
	check(t, session.Attend(&Attend{Sequences: []SequenceID{sequence}, QLens: []int64{1}, Q: heads(q), O: heads(o),
		Lse: Float32s(lse, 1, qHeads)}))
	return o, lse
}

// reference is textbook attention of one query [qHeads, dim] over keys and values [n, kvHeads, dim]. It returns o [qHeads, dim]
// and lse [qHeads].
func reference(q, k, v []float32) (o, lse []float64) {
	n := len(k) / kvToken
	for head := 0; head < qHeads; head++ {
		row := func(token int) int { return (token*kvHeads + head/(qHeads/kvHeads)) * dim }
		logits, most := make([]float64, n), math.Inf(-1)
		for token := range logits {
			for d := 0; d < dim; d++ {
				logits[token] += float64(q[head*dim+d]) * float64(k[row(token)+d])
			}
			logits[token] /= math.Sqrt(dim)
			most = math.Max(most, logits[token])
		}
		sum := 0.0
		for _, logit := range logits {
			sum += math.Exp(logit - most)
		}
		lse = append(lse, most+math.Log(sum))
		for d := 0; d < dim; d++ {
			x := 0.0
			for token, logit := range logits {
				x += math.Exp(logit-most) / sum * float64(v[row(token)+d])
			}
			o = append(o, x)
		}
	}
	return o, lse
}

func closeTo(t testing.TB, got []float32, expected []float64) {
	t.Helper()
	if len(got) != len(expected) {
		t.Fatalf("%d values, expected %d", len(got), len(expected))
	}
	for i := range got {
		if !(math.Abs(float64(got[i])-expected[i]) <= 1e-5) {
			t.Fatalf("%d: %g, expected %g", i, got[i], expected[i])
		}
	}
}

func equal[T comparable](t testing.TB, got, expected []T) {
	t.Helper()
	if len(got) != len(expected) {
		t.Fatalf("%d values %v, expected %d", len(got), got, len(expected))
	}
	for i := range got {
		if got[i] != expected[i] {
			t.Fatalf("%d: %v, expected %v", i, got[i], expected[i])
		}
	}
}

func joined[T any](parts ...[]T) (all []T) {
	for _, part := range parts {
		all = append(all, part...)
	}
	return all
}

// refused checks the code, field and message of a refused call.
func refused(t testing.TB, err error, code Code, field, message string) {
	t.Helper()
	var e *Error
	if !errors.Is(err, code) || !errors.As(err, &e) {
		t.Fatalf("%v is not %v", err, code)
	}
	if e.Field != field || !strings.Contains(e.Error(), message) {
		t.Fatalf("field %q: %v: expected %q and %q", e.Field, e, field, message)
	}
}
