// SPDX-License-Identifier: MIT

package tandem

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"tandem/internal/cside"
)

// Tests which objects keep others alive, on which goroutines, and what happens to a panic in a callback.

// Closes engine, model, cache and session in every order, and uses the rest after each.
func TestTeardownInAnyOrder(t *testing.T) {
	q := numbers(qToken, 3)
	for order := 0; order < 24; order++ {
		w := newWorld(t, 40, 1)
		expected, _ := reference(q, w.k, w.v)
		session, left := w.session(t, "hgca"), []int{0, 1, 2, 3}
		for _, digit := range []int{order % 4, order / 4 % 3, order / 12, 0} {
			closed := left[digit]
			left = append(left[:digit:digit], left[digit+1:]...)
			check(t, []interface{ Close() error }{w.engine, w.model, w.cache, session}[closed].Close())
			for _, kept := range left {
				switch kept {
				case 0:
					check(t, w.engine.Drain(-1))
				case 2:
					equal(t, []int64{must(w.cache.Length(w.sequence, 0))}, []int64{40})
				case 3:
					o, _ := decode(t, session, w.sequence, q)
					closeTo(t, o, expected)
				}
			}
		}
	}
}

// A step that is never ended ends with its session.
func TestAForgottenStepEndsWithTheSession(t *testing.T) {
	w := newWorld(t, 40, 1)
	session, ids := w.session(t, "all"), []SequenceID{w.sequence}
	must(session.Step(ids, []int64{1}))
	_, err := session.Step(ids, []int64{1})
	refused(t, err, ErrInvalidState, "session", "open already")
	session.Close()
	check(t, w.cache.Truncate(w.sequence, 10))
}

// The garbage collector releases forgotten objects: the log's entry with the last handle, the sequences with their cache.
func TestForgottenObjectsAreCollected(t *testing.T) {
	before := logs.count()
	func() {
		options := engineOptions()
		options.Log = func(LogLevel, string) {}
		engine := must(NewEngine(options))
		cache := must(NewCache(engine, must(NewModel(layer())), nil))
		must(NewSession(cache, nil))
		if logs.count() != before+1 {
			t.Error("the log is not there")
		}
	}()
	for i := 0; i < 6000 && logs.count() > before; i++ {
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	if logs.count() != before {
		t.Fatal("a log outlives its engine")
	}
}

func (t *table[T]) count() int {
	t.mutex.RLock()
	defer t.mutex.RUnlock()
	return len(t.entries)
}

// 64 goroutines share one engine and one cache, each with its own session and sequence, while the collector runs.
func TestSixtyFourGoroutinesOnOneEngine(t *testing.T) {
	w := newWorld(t, 200, 1)
	w.n64(t, 12)
	if stats := must(w.cache.Stats()); stats.NSequences != 1 {
		t.Fatalf("%+v", stats)
	}
}

func (w *world) n64(t *testing.T, nSteps int) {
	var group sync.WaitGroup
	for i := uint64(1); i <= 64; i++ {
		group.Add(1)
		go func(seed uint64) {
			defer group.Done()
			sequence := must(w.cache.Fork(w.sequence))
			session := must(NewSession(w.cache, sessionOptions("all")))
			k, v := joined(w.k), joined(w.v)
			for i := 0; i < nSteps; i++ {
				seed += 1000
				newK, newV, q, o := numbers(kvToken, seed), numbers(kvToken, seed+1), numbers(qToken, seed+2), unset(qToken)
				args := Attend{Sequences: []SequenceID{sequence}, QLens: []int64{1}, Q: heads(q), K: kv(newK), V: kv(newV), O: heads(o)}
				if err := session.Attend(&args); err != nil {
					t.Error(err)
					return
				}
				k, v = append(k, newK...), append(v, newV...)
				if i%6 == 5 { // not every time: the reference is slow
					expected, _ := reference(q, k, v)
					closeTo(t, o, expected)
					runtime.GC()
				}
			}
			if err := w.cache.Drop(sequence); err != nil {
				t.Error(err)
			}
			session.Close()
		}(i)
	}
	group.Wait()
}

// Many goroutines share one session: their calls run one after another. It is closed meanwhile, so each call either succeeds or
// is refused.
func TestOneSessionInManyGoroutines(t *testing.T) {
	w := newWorld(t, 200, 1)
	q := numbers(qToken, 3)
	expected, _ := reference(q, w.k, w.v)
	session, args := w.session(t, "all"), func(o []float32) *Attend {
		return &Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{1}, Q: heads(q), O: heads(o)}
	}
	var group sync.WaitGroup
	var nDone, nRefused atomic.Int64
	for i := 0; i < 8; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for nRefused.Load() == 0 {
				o := unset(qToken)
				if err := session.Attend(args(o)); err != nil {
					refused(t, err, ErrInvalidHandle, "session", "is closed")
					nRefused.Add(1)
					return
				}
				closeTo(t, o, expected)
				nDone.Add(1)
			}
		}()
	}
	for nDone.Load() < 200 {
		time.Sleep(time.Millisecond)
	}
	session.Close()
	group.Wait()
	if session.handle.users.Load() != 0 {
		t.Fatal("the session is not released")
	}
}

// heap is these tests' allocator: libc's, which can be told to refuse, wait and panic.
type heap struct {
	panics, waits, waiting, refusesOthers atomic.Bool
	nLive                                 atomic.Int64
}

func newHeap() (*heap, *EngineOptions) {
	h, options := &heap{}, engineOptions()
	options.Allocator = NewAllocator(h)
	return h, options
}

func (h *heap) Alloc(bytes, alignment uintptr) unsafe.Pointer {
	for h.waits.Load() && inBackground() {
		h.waiting.Store(true)
		time.Sleep(time.Millisecond)
	}
	if h.panics.Load() {
		panic("as the test wants")
	}
	if h.refusesOthers.Load() && inBackground() {
		return nil
	}
	data := cside.Alloc(bytes, alignment)
	if data != nil {
		h.nLive.Add(1)
	}
	return data
}

func (h *heap) Free(data unsafe.Pointer, bytes uintptr) {
	h.nLive.Add(-1)
	cside.Free(data)
	panic("is ignored")
}

// inBackground returns whether a thread of the library calls, not a call of the test.
func inBackground() bool {
	var callers [64]uintptr
	frames := runtime.CallersFrames(callers[:runtime.Callers(0, callers[:])])
	for {
		frame, more := frames.Next()
		if frame.Function == "runtime.cgocall" {
			return false
		}
		if !more {
			return true
		}
	}
}

// evicting returns a session that copies a key with every token: beta = 0 keeps every key.
func evicting(w *world) *Session {
	return must(NewSession(w.cache, &SessionOptions{Policy: "hgca", WindowTokens: 16, NoSinks: true, ZeroBeta: true}))
}

func appendOne(t testing.TB, session *Session, sequence SequenceID) {
	q, k, v, o := numbers(qToken, 3), numbers(kvToken, 4), numbers(kvToken, 5), unset(qToken)
	args := Attend{Sequences: []SequenceID{sequence}, QLens: []int64{1}, Q: heads(q), K: kv(k), V: kv(v), O: heads(o)}
	check(t, session.Attend(&args))
	expected, _ := reference(q, k, v) // all values are equal, so the weights do not matter
	closeTo(t, o, expected)
}

// The background gets no memory and the library logs that. The log panics or ends its goroutine, and calls still return. The
// log's entry goes with its last owner.
func TestAPanicInTheLogStaysThere(t *testing.T) {
	before := logs.count()
	heap, options := newHeap()
	var nMessages, nLevels atomic.Int64
	options.Log = func(level LogLevel, message string) {
		nMessages.Add(1)
		if level >= LogError && level <= LogInfo && message != "" {
			nLevels.Add(1)
		}
		if nMessages.Load()%2 == 0 {
			runtime.Goexit()
		}
		panic(message)
	}
	w := newWorldOn(t, must(NewEngine(options)), 0, 1)
	session := evicting(w)
	w.engine.Close()
	w.model.Close()
	w.cache.Close() // the session keeps the log's entry
	heap.refusesOthers.Store(true)
	for end := time.Now().Add(time.Minute); nMessages.Load() < 2 && time.Now().Before(end); {
		appendOne(t, session, w.sequence)
		time.Sleep(time.Millisecond) // time for the background to make the selection
	}
	if nMessages.Load() < 2 || nLevels.Load() != nMessages.Load() || logs.count() != before+1 {
		t.Fatalf("%d messages, %d of a level, %d logs", nMessages.Load(), nLevels.Load(), logs.count()-before)
	}
	session.Close()
	if logs.count() != before {
		t.Fatal("the log is still there")
	}
	for i := 0; i < 6000 && heap.nLive.Load() != 0; i++ {
		time.Sleep(10 * time.Millisecond)
	}
	if heap.nLive.Load() != 0 {
		t.Fatalf("%d pieces of memory are left", heap.nLive.Load())
	}
}

// A callback that comes after its entry was removed finds nothing.
func TestLateCallsFindNothing(t *testing.T) {
	entry := newLogEntry(func(LogLevel, string) { t.Error("too late") }).share()
	entry.drop()
	tandemGoLog(1, nil, _Ctype_uintptr_t(entry.number))
	if tandemGoAlloc(8, 8, 1<<40) != nil {
		t.Fatal("memory from nowhere")
	}
	tandemGoFree(nil, 8, 1<<40)
}
