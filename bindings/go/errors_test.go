// SPDX-License-Identifier: MIT

package tandem

/* Bad input gives a code, a field and a message with the value. Tests each code that can be provoked without a device or a file.
 * Tests only errors.Is for ErrIO, ErrCorrupt, ErrDeviceLost and ErrInternal. */

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

var codes = map[Code]string{
	ErrInvalidArgument: "INVALID_ARGUMENT", ErrInvalidHandle: "INVALID_HANDLE", ErrInvalidState: "INVALID_STATE",
	ErrUnsupported: "UNSUPPORTED", ErrOutOfMemory: "OUT_OF_MEMORY", ErrCapacity: "CAPACITY", ErrBusy: "BUSY",
	ErrNotFound: "NOT_FOUND", ErrCancelled: "CANCELLED", ErrTimeout: "TIMEOUT", ErrDeviceLost: "DEVICE_LOST",
	ErrBackend: "BACKEND", ErrIO: "IO", ErrCorrupt: "CORRUPT", ErrSystem: "SYSTEM", ErrInternal: "INTERNAL",
}

func TestEveryCodeIsASentinel(t *testing.T) {
	if len(codes) != 16 {
		t.Fatalf("%d codes", len(codes))
	}
	for code, name := range codes {
		err := fmt.Errorf("wrapped: %w", &Error{Code: code, Field: "f", Message: "m", Underlying: 7})
		var e *Error
		var c Code
		if code.Error() != "TANDEM_ERROR_"+name || !errors.As(err, &e) || e.Field != "f" || e.Underlying != 7 ||
			!errors.As(err, &c) || c != code {
			t.Errorf("%d: %v", code, code)
		}
		for other := range codes {
			if errors.Is(err, other) != (other == code) {
				t.Errorf("%v is taken for %v", err, other)
			}
		}
		if bare := (&Error{Code: code}); bare.Error() != code.Error() {
			t.Errorf("%v says %q", code, bare)
		}
	}
	if Code(-17).Error() != "unknown status" {
		t.Error(Code(-17))
	}
}

func TestEngineOptions(t *testing.T) {
	with := func(change func(*EngineOptions)) error {
		options := EngineOptions{}
		change(&options)
		_, err := NewEngine(&options)
		return err
	}
	refused(t, with(func(o *EngineOptions) { o.NThreads = -1 }), ErrInvalidArgument, "n_threads", "-1")
	refused(t, with(func(o *EngineOptions) { o.MatmulRows = -3 }), ErrInvalidArgument, "matmul_rows", "-3")
	refused(t, with(func(o *EngineOptions) { o.CPUISA = "z80" }), ErrNotFound, "cpu_isa", "z80")
	refused(t, with(func(o *EngineOptions) { o.CPUISA = "a\x00b" }), ErrInvalidArgument, "cpu_isa", "zero byte")
	refused(t, with(func(o *EngineOptions) { o.Backend = "abacus" }), ErrBackend, "backend", "abacus")
	refused(t, with(func(o *EngineOptions) { o.BackendPath = "/x" }), ErrInvalidArgument, "backend_path", "/x")
	refused(t, with(func(o *EngineOptions) { o.NoSpin, o.SpinNs = true, 7 }), ErrInvalidArgument, "spin_ns", "= 7 with NoSpin")
	check(t, with(func(o *EngineOptions) { *o = EngineOptions{} }))
}

func TestModelOptions(t *testing.T) {
	with := func(change func(*LayerOptions)) error {
		options := layer()
		change(&options)
		_, err := NewModel(layer(), options)
		return err
	}
	_, err := NewModel()
	refused(t, err, ErrInvalidArgument, "n_layers", "0")
	refused(t, with(func(o *LayerOptions) { o.NKVHeads = 3 }), ErrInvalidArgument, "layers[1].n_q_heads", "8")
	refused(t, with(func(o *LayerOptions) { o.KHeadDim = 65 }), ErrUnsupported, "layers[1].k_head_dim", "65")
	refused(t, with(func(o *LayerOptions) { o.Sinks = make([]float32, 7) }), ErrInvalidArgument, "sinks", "has 7 values, must have n_q_heads = 8")
	refused(t, with(func(o *LayerOptions) { o.RopeInvFreq = make([]float32, 31) }), ErrInvalidArgument, "rope_inv_freq", "rope_dims / 2 = 32")
	check(t, with(func(o *LayerOptions) {
		o.Rope, o.RopeInvFreq, o.Sinks = RopeHalves, numbers(32, 1), make([]float32, 8)
		for i := range o.RopeInvFreq {
			o.RopeInvFreq[i] = 1
		}
	}))
}

func TestCacheAndSessionOptions(t *testing.T) {
	w := newWorld(t, 10, 2)
	cache := func(options CacheOptions) error {
		cache, err := NewCache(w.engine, w.model, &options)
		if err == nil {
			cache.Close()
		}
		return err
	}
	refused(t, cache(CacheOptions{PageTokens: 48}), ErrInvalidArgument, "page_tokens", "48")
	refused(t, cache(CacheOptions{HostCapBytes: -1}), ErrInvalidArgument, "host_cap_bytes", "-1")
	refused(t, cache(CacheOptions{HostCapBytes: 1000}), ErrCapacity, "host_cap_bytes", "1000")
	refused(t, cache(CacheOptions{KType: 99}), ErrInvalidArgument, "k_type", "99")
	refused(t, cache(CacheOptions{LayerVTypes: []Dtype{F16}}), ErrInvalidArgument, "layer_v_types", "has 1 values, must have n_layers = 2")
	check(t, cache(CacheOptions{LayerKTypes: []Dtype{F16, Q4_0}}))
	refused(t, cache(CacheOptions{LayerKTypes: []Dtype{F16, Q4_64}}), ErrUnsupported, "layer_k_types[1]", "q4_64")

	session := func(change func(*SessionOptions)) error {
		options := SessionOptions{}
		change(&options)
		_, err := NewSession(w.cache, &options)
		return err
	}
	refused(t, session(func(o *SessionOptions) { o.Policy = "dice" }), ErrNotFound, "policy", "dice")
	refused(t, session(func(o *SessionOptions) { o.Route = "dice" }), ErrNotFound, "route", "dice")
	refused(t, session(func(o *SessionOptions) { o.Policy = "a\x00" }), ErrInvalidArgument, "policy", "zero byte")
	refused(t, session(func(o *SessionOptions) { o.WindowTokens = -2 }), ErrInvalidArgument, "window_tokens", "-2")
	refused(t, session(func(o *SessionOptions) { o.Alpha = nan }), ErrInvalidArgument, "alpha", "nan")
	refused(t, session(func(o *SessionOptions) { o.NoWindow, o.WindowTokens = true, 5 }), ErrInvalidArgument, "window_tokens",
		"= 5 with NoWindow")
	refused(t, session(func(o *SessionOptions) { o.ZeroBeta, o.Beta = true, 0.5 }), ErrInvalidArgument, "beta", "= 0.5 with ZeroBeta")
	refused(t, session(func(o *SessionOptions) { o.ZeroStreamFraction = true }), ErrInvalidArgument, "stream_fraction", "0")
	check(t, session(func(o *SessionOptions) { *o = SessionOptions{Policy: "hgca"} }))
}

func TestSequences(t *testing.T) {
	w := newWorld(t, 10, 1)
	s := w.sequence
	_, err := w.cache.Digest(1000)
	refused(t, err, ErrNotFound, "sequence", "1000")
	_, err = w.cache.Length(s, 1)
	refused(t, err, ErrInvalidArgument, "layer_idx", "1")
	refused(t, w.cache.Truncate(s, 11), ErrInvalidArgument, "n_tokens", "11")
	refused(t, w.cache.Remove(s, 5, 1, true), ErrUnsupported, "shift_positions", "1")
	refused(t, w.cache.Reserve(s, math.MaxInt64), ErrCapacity, "n_tokens", "9223372036854775807")
	refused(t, w.cache.Read(s, 0, 0, Tensor{}, Tensor{}), ErrInvalidArgument, "k", "NULL")
	if err := w.cache.Read(s, 0, 0, kv(unset(11*kvToken)), Tensor{}); !errors.Is(err, ErrInvalidArgument) {
		t.Fatal(err)
	}
	refused(t, w.cache.Append(s, 0, kv(w.k), Tensor{}), ErrInvalidArgument, "v", "NULL")
	refused(t, w.cache.Append(s, 0, Float32s(w.k, 11, kvHeads, dim), kv(w.v)), ErrInvalidArgument, "k", "k: tensor: data has 1280")
	equal(t, []int64{must(w.cache.Length(s, 0))}, []int64{10})
}

func TestAttendArguments(t *testing.T) {
	w := newWorld(t, 10, 1)
	session, s := w.session(t, "all"), w.sequence
	q, o := numbers(qToken, 3), unset(qToken)
	with := func(change func(*Attend)) error {
		args := Attend{Sequences: []SequenceID{s}, QLens: []int64{1}, Q: heads(q), O: heads(o)}
		change(&args)
		return session.Attend(&args)
	}
	refused(t, with(func(a *Attend) { a.QLens = []int64{1, 1} }), ErrInvalidArgument, "q_lens", "has 2 values for 1 sequences")
	refused(t, with(func(a *Attend) { a.QLens = []int64{2} }), ErrInvalidArgument, "q.shape[0]", "must be the sum of q_lens = 2")
	refused(t, with(func(a *Attend) { a.QLens = []int64{-1} }), ErrInvalidArgument, "q_lens[0]", "-1")
	refused(t, with(func(a *Attend) { a.Sequences, a.QLens = []SequenceID{s, s}, []int64{1, 0} }), ErrInvalidArgument, "sequences", "twice")
	refused(t, with(func(a *Attend) { a.Sequences[0] = 99 }), ErrNotFound, "sequences", "99")
	refused(t, with(func(a *Attend) { a.Speculative = true }), ErrInvalidArgument, "k", "nothing to append")
	refused(t, with(func(a *Attend) { a.ParentIdx = []int32{-1, 0} }), ErrInvalidArgument, "parent_idx", "has 2 values")
	refused(t, with(func(a *Attend) { a.ParentIdx, a.QLens = []int32{-1}, []int64{math.MaxInt64} }), ErrInvalidArgument, "parent_idx", "has 1 values")
	refused(t, with(func(a *Attend) { a.Q = Tensor{} }), ErrInvalidArgument, "q", "NULL")
	refused(t, with(func(a *Attend) { a.O = Tensor{} }), ErrInvalidArgument, "o", "NULL")
	refused(t, with(func(a *Attend) { a.O = Float32s(o, 2, qHeads, dim) }), ErrInvalidArgument, "o", "o: tensor: data has 512")
	refused(t, with(func(a *Attend) { a.Q = Float32s(numbers(qHeads*80, 3), 1, qHeads, 80) }), ErrInvalidArgument, "q.shape[2]", "80")
	refused(t, with(func(a *Attend) { a.LayerIdx = 7 }), ErrInvalidArgument, "layer_idx", "7")
	refused(t, with(func(a *Attend) { a.O = a.Q }), ErrInvalidArgument, "o.data", "overlaps q")
	refused(t, with(func(a *Attend) { a.Stream = 1 }), ErrInvalidArgument, "stream", "stream")
	refused(t, with(func(a *Attend) { a.Q = OnDevice(F32, 0, 4096, 1, qHeads, dim) }), ErrUnsupported, "q.device_type", "no device")
	for _, x := range o {
		if x == x {
			t.Fatal("a refused call has written")
		}
	}
	refused(t, session.Commit(s, []int64{0}), ErrInvalidState, "sequence", "no speculative tokens")
	_, err := session.Selection(s, 0, 2)
	refused(t, err, ErrInvalidArgument, "kv_head_idx", "2")
	_, err = session.Step([]SequenceID{s}, []int64{1, 2})
	refused(t, err, ErrInvalidArgument, "q_lens", "has 2 values")
	out := State{heads(o), Float32s(make([]float32, 8), 1, 8)}
	refused(t, w.engine.Merge(out), ErrInvalidArgument, "n_states", "0")
	refused(t, w.engine.Merge(out, State{}), ErrInvalidArgument, "o[0]", "NULL")
	refused(t, w.engine.Merge(State{O: Float32s(o, 9, 9, 9)}, out), ErrInvalidArgument, "o_out", "has 512 elements")
}

func TestNamedKeysAreChecked(t *testing.T) {
	w := newWorld(t, 10, 1)
	q, o := numbers(qToken, 3), unset(qToken)
	attend := func(policy string, selection Selection) error {
		return w.session(t, policy).Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{1}, Q: heads(q), O: heads(o),
			Selection: &selection})
	}
	for _, bad := range []struct {
		idx            Tensor
		field, message string
	}{
		{Int32s([]int32{0, 1, 2, 10}, 1, 2, 2), "selection.idx", "selection.idx[0, 1, 1] = 10 names no token"},
		{Int32s([]int32{4, 3}, 1, 1, 2), "selection.idx", "selection.idx[0, 0, 1] = 3 is less"},
		{Int32s([]int32{-1, 3}, 1, 1, 2), "selection.idx", "stands behind a pad of -1"},
		{Int32s([]int32{0, 1, 2}, 1, 3, 1), "selection.idx.shape[1]", "3, must be 1 or n_kv_heads = 2"},
		{Int32s([]int32{0, 1}, 2, 1, 1), "selection.idx.shape[0]", "2"},
		{Int32s([]int32{0, 1}, 1, 2), "selection.idx.n_dims", "2"},
		{Int32s([]int32{0, 1}, 1, 1, 3), "selection.idx", "selection.idx: tensor: data has 2 elements"},
		{heads(q), "selection.idx.dtype", "must be TANDEM_I32"},
		{Tensor{}, "selection.idx", "is none"},
	} {
		refused(t, attend("all", Selection{Idx: bad.idx}), ErrInvalidArgument, bad.field, bad.message)
	}
	twice := Selection{Idx: Int32s([]int32{4, 2, 4}, 1, 1, 3), AnyOrder: true}
	refused(t, attend("all", twice), ErrInvalidArgument, "selection.idx", "= 4 stands there twice")
	one := Int32s([]int32{0}, 1, 1, 1)
	refused(t, attend("all", Selection{Idx: one, UnitTokens: 3}), ErrInvalidArgument, "selection.unit_tokens", "3")
	refused(t, attend("streaming", Selection{Idx: one}), ErrUnsupported, "selection", "streaming")
	err := w.session(t, "all").Attend(&Attend{Sequences: []SequenceID{w.sequence}, QLens: []int64{1},
		Q: Int32s(make([]int32, qToken), 1, qHeads, dim), O: heads(o)})
	refused(t, err, ErrInvalidArgument, "q.dtype", "i32")
	for _, x := range o {
		if x == x {
			t.Fatal("a refused call has written")
		}
	}
}

func TestASequenceInFlightIsBusy(t *testing.T) {
	w := newWorld(t, 10, 1)
	one, other, ids := w.session(t, "all"), w.session(t, "all"), []SequenceID{w.sequence}
	step := must(one.Step(ids, []int64{1}))
	_, err := other.Step(ids, []int64{1})
	refused(t, err, ErrBusy, "sequences", "in flight")
	refused(t, w.cache.Truncate(w.sequence, 0), ErrBusy, "sequence", "in flight")
	refused(t, step.End(), ErrInvalidState, "q_lens", "layer 0")
	one.Close()
	check(t, w.cache.Truncate(w.sequence, 0))
}

func TestClosedObjectsAreRefused(t *testing.T) {
	w := newWorld(t, 10, 1)
	session := w.session(t, "all")
	step := must(session.Step([]SequenceID{w.sequence}, []int64{1}))
	for _, object := range []io.Closer{session, w.cache, w.model, w.engine} {
		check(t, object.Close())
		check(t, object.Close())
	}
	_, stats := session.Stats()
	_, create := w.cache.CreateSequence()
	_, cache := NewCache(w.engine, w.model, nil)
	_, model := NewCache(must(NewEngine(engineOptions())), w.model, nil)
	_, newSession := NewSession(w.cache, nil)
	_, report := w.engine.Report()
	for i, err := range []error{stats, create, cache, model, newSession, report, step.End(), w.engine.Drain(0),
		session.Attend(&Attend{}), w.engine.Merge(State{}), w.engine.Supports(nil, nil, nil)} {
		kind := []string{"session", "cache", "engine", "model", "cache", "engine", "session", "engine", "session", "engine", "engine"}[i]
		refused(t, err, ErrInvalidHandle, kind, kind+" is closed")
	}
}

func TestObjectsThatAreNoneAreRefused(t *testing.T) {
	w := newWorld(t, 10, 1)
	var engine *Engine
	_, cache := NewCache(nil, w.model, nil)
	_, cacheOfNoModel := NewCache(w.engine, nil, nil)
	_, session := NewSession(nil, nil)
	_, weights := NewWeights(nil, nil, make([]byte, 8))
	_, report := engine.Report()
	_, plan := w.engine.PlanMemory(nil, nil, nil, 10)
	_, stats := (*Weights)(nil).Stats()
	for i, err := range []error{cache, cacheOfNoModel, session, weights, report, plan, stats, (*Session)(nil).Attend(&Attend{}),
		(&Session{}).Attend(&Attend{}), (&Cache{}).Drop(1), (&Step{}).End()} {
		kind := []string{"engine", "model", "cache", "engine", "engine", "model", "weights", "session", "session", "cache",
			"session"}[i]
		refused(t, err, ErrInvalidHandle, kind, kind+" is nil")
	}
	for _, object := range []io.Closer{engine, (*Model)(nil), (*Cache)(nil), (*Session)(nil), (*Weights)(nil), &Engine{}, &Model{},
		&Cache{}, &Session{}, &Weights{}} {
		check(t, object.Close())
	}
	refused(t, w.session(t, "all").Attend(nil), ErrInvalidArgument, "args", "is nil")
}

func TestAnAllocatorThatPanicsRefuses(t *testing.T) {
	heap, options := newHeap()
	w := newWorldOn(t, must(NewEngine(options)), 10, 1)
	heap.panics.Store(true)
	if err := w.cache.Reserve(w.sequence, 100_000); !errors.Is(err, ErrOutOfMemory) {
		t.Fatal(err)
	}
	heap.panics.Store(false)
	check(t, w.cache.Reserve(w.sequence, 100_000))
}

// A background selection waits for memory, and Drain returns after its timeout. Another goroutine appends the tokens, because
// the append after the one that started the selection waits for it.
func TestADrainThatTakesTooLong(t *testing.T) {
	heap, options := newHeap()
	w := newWorldOn(t, must(NewEngine(options)), 0, 1)
	heap.waits.Store(true)
	session := evicting(w)
	defer session.Close()
	appended := make(chan struct{})
	go func() {
		defer close(appended)
		for end := time.Now().Add(time.Minute); !heap.waiting.Load() && time.Now().Before(end); {
			appendOne(t, session, w.sequence)
		}
	}()
	for done := false; !done && !heap.waiting.Load(); {
		select {
		case <-appended:
			done = true
		case <-time.After(time.Millisecond):
		}
	}
	err := w.engine.Drain(20 * time.Millisecond)
	heap.waits.Store(false)
	<-appended
	refused(t, err, ErrTimeout, "timeout_ns", "timeout_ns = 20000000")
	check(t, w.engine.Drain(-1))
}

// Starts more threads than there is stack space for, in a process of its own with limited address space.
func TestThreadsThatCannotBeStarted(t *testing.T) {
	const variable = "TANDEM_TEST_LIMITED"
	if os.Getenv(variable) == "" {
		command := exec.Command(os.Args[0], "-test.run=^TestThreadsThatCannotBeStarted$", "-test.v")
		command.Env = append(os.Environ(), variable+"=1")
		if output, err := command.CombinedOutput(); err != nil || !strings.Contains(string(output), "\n--- PASS") {
			t.Fatalf("%v: %s", err, output)
		}
		return
	}
	statm := strings.Fields(string(must(os.ReadFile("/proc/self/statm"))))
	var pages uint64
	must(fmt.Sscan(statm[0], &pages))
	limit := pages*uint64(os.Getpagesize()) + 512<<20
	check(t, syscall.Setrlimit(syscall.RLIMIT_AS, &syscall.Rlimit{Cur: limit, Max: limit}))
	_, err := NewEngine(&EngineOptions{NThreads: 1000})
	var e *Error
	if !errors.As(err, &e) || e.Code != ErrSystem || e.Underlying != int64(syscall.EAGAIN) {
		t.Fatalf("%+v", err)
	}
}
