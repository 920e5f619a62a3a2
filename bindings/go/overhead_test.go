// SPDX-License-Identifier: MIT

package tandem

import (
	"sort"
	"testing"
	"time"

	"tandem/internal/cside"
)

// Compares the cost of a call through Go with one from C, in one process and on one session: go test -run XXX -bench .
// -benchtime 1x. Each Go call makes its tensors and arguments anew; the C loop makes them once. Answers are compared before the
// timing.
const (
	keys     = 512
	nCalls   = 5    // calls of a batch: shorter than a time slice when other processes want the core
	nBatches = 4000 // batches of each side, alternating
	mostNs   = 1000.0
	nTries   = 4
)

type overhead struct {
	session  *Session
	ids      []SequenceID
	lens     []int64
	q, o, oC []float32
}

func (m *overhead) fromGo(n int) error {
	for i := 0; i < n; i++ {
		err := m.session.Attend(&Attend{Sequences: m.ids, QLens: m.lens,
			Q: Float32s(m.q, 1, qHeads, dim), O: Float32s(m.o, 1, qHeads, dim)})
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *overhead) fromC(n int) int32 {
	return cside.AttendN(m.session.handle.pointer, int64(m.ids[0]), m.q, m.oC, n)
}

// newOverhead prepares both sides and compares their answers.
func newOverhead(t testing.TB) *overhead {
	w := newWorldOn(t, must(NewEngine(&EngineOptions{NThreads: 1})), keys, 1)
	m := &overhead{w.session(t, "all"), []SequenceID{w.sequence}, []int64{1}, numbers(qToken, 3), unset(qToken), unset(qToken)}
	check(t, m.fromGo(1))
	if status := m.fromC(1); status != 0 {
		t.Fatal(Code(status))
	}
	expected, _ := reference(m.q, w.k, w.v)
	closeTo(t, m.o, expected)
	equal(t, m.o, m.oC)
	return m
}

func median(values []float64) float64 {
	sort.Float64s(values)
	return values[len(values)/2]
}

// medians returns the medians over batches of both sides, and of their differences, in ns per call.
func (m *overhead) medians(b *testing.B) (goNs, cNs, difference float64) {
	timed := func(body func()) float64 {
		begin := time.Now()
		body()
		return float64(time.Since(begin).Nanoseconds()) / nCalls
	}
	batch := [2]func(){func() { check(b, m.fromGo(nCalls)) }, func() { m.fromC(nCalls) }}
	var all [3][]float64
	for i := 0; i < b.N || i < nBatches; i++ {
		var ns [2]float64
		for _, side := range []int{i % 2, 1 - i%2} {
			ns[side] = timed(batch[side])
		}
		for j, value := range []float64{ns[0], ns[1], ns[0] - ns[1]} {
			all[j] = append(all[j], value)
		}
	}
	return median(all[0]), median(all[1]), median(all[2])
}

// BenchmarkOverhead fails if a call through Go costs more than mostNs more than one from C.
func BenchmarkOverhead(b *testing.B) {
	m := newOverhead(b)
	b.ResetTimer()
	goNs, cNs, difference := m.medians(b)
	for try := 1; try < nTries && difference > mostNs; try++ { // a process that shares the core may spoil a try, but never all
		goNs, cNs, difference = m.medians(b)
	}
	b.ReportMetric(0, "ns/op") // the time of a batch of both sides, which means nothing
	b.ReportMetric(goNs, "go-ns/call")
	b.ReportMetric(cNs, "c-ns/call")
	b.ReportMetric(difference, "difference-ns/call")
	if difference > mostNs {
		b.Fatalf("a call through Go costs %.0f ns more, at most %.0f are allowed", difference, mostNs)
	}
}

// Attend allocates nothing on the Go side.
func TestACallAllocatesNothing(t *testing.T) {
	m := newOverhead(t)
	if allocated := testing.AllocsPerRun(100, func() { check(t, m.fromGo(1)) }); allocated != 0 {
		t.Fatalf("%g allocations a call", allocated)
	}
}
