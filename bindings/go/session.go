// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"

static void close_session(void *session) { tandem_session_release(session); }
*/
import "C"

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Session says how a cache is attended: a policy and its memory of what was attended. Several sessions may read one cache.
type Session struct {
	handle *handle
	mutex  sync.Mutex              // held by the running call
	args   C.tandem_go_attend_args // arguments of the running call
}

// NewSession makes a session of the cache. options = nil: defaults. Errors: ErrNotFound (policy, pruning.preset),
// ErrUnsupported (policy and model), ErrCapacity, ErrInvalidArgument.
func NewSession(cache *Cache, options *SessionOptions) (*Session, error) {
	a := arena{function: "tandem_session_create"}
	defer a.free()
	raw := options.raw(&a)
	if a.err != nil {
		return nil, a.err
	}
	var session *C.tandem_session
	err := cache.call(a.function, func(cache *C.tandem_cache, err **C.tandem_error) C.int32_t {
		return C.tandem_session_create(&session, cache, raw, err)
	})
	if err != nil {
		return nil, err
	}
	release := func(session unsafe.Pointer) { C.close_session(session) }
	return &Session{handle: newHandle("session", unsafe.Pointer(session), release, cache.handle.log)}, nil
}

// Close releases the session and abandons an open step. It returns nil.
func (s *Session) Close() error {
	s.held().close()
	return nil
}

func (s *Session) held() *handle {
	if s == nil {
		return held(nil, "session")
	}
	return held(s.handle, "session")
}

func (s *Session) raw() *C.tandem_session { return (*C.tandem_session)(s.handle.pointer) }

// begin waits until no other call uses the session. end lets the next call go on.
func (s *Session) begin(function string) error {
	if err := s.held().use(function); err != nil {
		return err
	}
	s.mutex.Lock()
	return nil
}

func (s *Session) end() {
	s.mutex.Unlock()
	s.handle.done()
}

// Attend holds the arguments of a call: one layer, several sequences. In every tensor the sequences' tokens follow one another.
type Attend struct {
	LayerIdx    int32
	Sequences   []SequenceID // each once
	QLens       []int64      // tokens of each
	Q           Tensor       // [n_tokens, n_q_heads, k_head_dim], n_tokens = sum of QLens
	K           Tensor       // [n_tokens, n_kv_heads, k_head_dim], appended first; none: queries are the last tokens
	V           Tensor       // [n_tokens, n_kv_heads, v_head_dim]; none if V aliases K
	O           Tensor       // [n_tokens, n_q_heads, v_head_dim], written
	Lse         Tensor       // [n_tokens, n_q_heads], f32, written; none: not wanted
	X           Tensor       // [n_tokens, hidden_dim], given with K if the layer keeps hidden states
	Speculative bool         // the appended tokens are a guess, kept apart until Commit
	ParentIdx   []int32      // as a tree: each token's parent, counted in its sequence in this call; -1: the last token before
	Selection   *Selection   // the keys that queries attend; nil: the policy chooses
	Partial     bool         // a chunk of a longer append; the last chunk, without it, judges all keys anew
	Stream      uintptr      // a CUDA stream, for tensors in device memory

	// Progress receives how much work is done and how much there is in all, in units of no fixed size. The calling goroutine
	// waits meanwhile. Progress must not call the session or its engine. A panic in it, or runtime.Goexit as in t.FailNow,
	// stops the call as a done context does. It then continues on the calling goroutine.
	Progress func(done, total int64)
}

// Selection names the keys that each query attends, for models with their own indexer. Index i names the tokens i * UnitTokens
// to (i + 1) * UnitTokens - 1 of the query's sequence. A query attends those that it could see without a selection. Indices of
// a row ascend, and -1 fills the rest of the row. A row of -1 attends no key. The layer's policy must be "all" without
// streaming heads. A call on device tensors takes indices in host or device memory. A step on a stream takes them in device
// memory only, and the session then needs SelectionIndices.
type Selection struct {
	Idx        Tensor // Int32s, or OnDevice of I32: [n_tokens, n_kv_heads, n_idx], or [n_tokens, 1, n_idx] for all KV heads alike
	UnitTokens int64  // a power of two from 1 to 256; 0: 1
	AnyOrder   bool   // indices of a row may be in any order: the library sorts a copy of each row
	PlusWindow bool   // also attend the session's SinkTokens first keys and the WindowTokens newest up to the query
}

// check refuses what the library cannot see: missing indices, a slice that is too short.
func (s *Selection) check(function string) error {
	if s.Idx.description.n_dims == 0 && s.Idx.err == nil {
		return refuse(function, "selection.idx", "is none")
	}
	return firstErr(function, []string{"selection.idx"}, &s.Idx)
}

// put describes the selection in the arguments of a call and returns the indices' address. nil: no selection.
func (s *Selection) put(args *C.tandem_go_attend_args) *C.char {
	if s == nil {
		args.idx.n_dims = 0
		return nil
	}
	args.selection_flags = 0
	if s.AnyOrder {
		args.selection_flags |= C.TANDEM_SELECTION_ANY_ORDER
	}
	if s.PlusWindow {
		args.selection_flags |= C.TANDEM_SELECTION_PLUS_WINDOW
	}
	args.selection_unit_tokens, args.idx = C.int64_t(s.UnitTokens), s.Idx.description
	return s.Idx.at()
}

var attendNames = []string{"q", "k", "v", "o", "lse", "x"}

// check refuses wrong slice lengths, which the library cannot see.
func (a *Attend) check(function string) error {
	if err := firstErr(function, attendNames, &a.Q, &a.K, &a.V, &a.O, &a.Lse, &a.X); err != nil {
		return err
	}
	if len(a.Sequences) != len(a.QLens) || len(a.Sequences) > math.MaxInt32 {
		return refuse(function, "q_lens", "has %d values for %d sequences", len(a.QLens), len(a.Sequences))
	}
	if a.Selection != nil {
		if err := a.Selection.check(function); err != nil {
			return err
		}
	}
	if a.ParentIdx == nil {
		return nil
	}
	nTokens := int64(0)
	for _, n := range a.QLens {
		if n < 0 || nTokens > math.MaxInt64-n {
			return refuse(function, "q_lens", "= %v is no number of tokens", append([]int64(nil), a.QLens...))
		}
		nTokens += n
	}
	if nTokens != int64(len(a.ParentIdx)) {
		return refuse(function, "parent_idx", "has %d values, must have the sum of q_lens = %d", len(a.ParentIdx), nTokens)
	}
	return nil
}

// Attend appends K and V, then computes o = softmax(logits) V and its lse over the keys that the policy selects. On an error,
// no layer has grown. Errors: ErrNotFound, ErrBusy, ErrCapacity, ErrOutOfMemory, ErrUnsupported, ErrInvalidState (speculative
// tokens pending, more tokens than the step declared), ErrInvalidArgument.
func (s *Session) Attend(a *Attend) error { return s.attend(a, nil) }

// AttendContext does the same and stops when the context is done. It then returns ErrCancelled, which also matches the
// context's error, and the call has had no effect. The library checks the context between pieces of work. Tensors must be in
// host memory, unless the context can never be done.
func (s *Session) AttendContext(ctx context.Context, a *Attend) error {
	return withContext(ctx, func(cancel *int32) error { return s.attend(a, cancel) })
}

// withContext makes the call with a flag that is set when the context is done. The flag is nil if the context can never be
// done.
func withContext(ctx context.Context, call func(cancel *int32) error) error {
	if ctx.Done() == nil {
		return call(nil)
	}
	flag, returned := new(int32), make(chan struct{})
	defer close(returned)
	if ctx.Err() != nil {
		*flag = 1
	} else {
		go func() {
			select {
			case <-ctx.Done():
				atomic.StoreInt32(flag, 1)
			case <-returned:
			}
		}()
	}
	err := call(flag)
	var e *Error
	if errors.As(err, &e) && e.Code == ErrCancelled {
		e.cause = ctx.Err()
	}
	return err
}

func (s *Session) attend(a *Attend, cancel *int32) error {
	const function = "tandem_attend"
	if a == nil {
		return refuse(function, "args", "is nil")
	}
	if err := a.check(function); err != nil {
		return err
	}
	if err := s.begin(function); err != nil {
		return err
	}
	defer s.end()
	args := &s.args
	args.flags = 0
	if a.Speculative || a.ParentIdx != nil {
		args.flags |= C.TANDEM_ATTEND_SPECULATIVE
	}
	if a.Partial {
		args.flags |= C.TANDEM_ATTEND_PARTIAL
	}
	args.layer_idx, args.n_sequences = C.int32_t(a.LayerIdx), C.int32_t(len(a.Sequences))
	args.stream = C.uintptr_t(a.Stream)
	args.q, args.k, args.v = a.Q.description, a.K.description, a.V.description
	args.o, args.lse, args.x = a.O.description, a.Lse.description, a.X.description
	idx := a.Selection.put(args)
	var parents *C.int32_t
	if len(a.ParentIdx) > 0 {
		parents = (*C.int32_t)(&a.ParentIdx[0])
	}
	args.progress = 0
	if a.Progress != nil {
		l := &listener{progress: a.Progress}
		number := listeners.add(l)
		args.progress = C.uintptr_t(number)
		defer func() {
			listeners.remove(number)
			l.goOn()
		}()
	}
	result := C.tandem_go_attend(C.uintptr_t(uintptr(s.handle.pointer)), args, sequences(a.Sequences), int64s(a.QLens), parents,
		(*C.int32_t)(cancel), a.Q.at(), a.K.at(), a.V.at(), a.O.at(), a.Lse.at(), a.X.at(), idx)
	return failure(result.status, result.error)
}

func sequences(ids []SequenceID) *C.int64_t {
	if len(ids) == 0 {
		return nil
	}
	return (*C.int64_t)(&ids[0])
}

func int64s(values []int64) *C.int64_t {
	if len(values) == 0 {
		return nil
	}
	return (*C.int64_t)(&values[0])
}

// Commit ends speculation in a sequence. The speculative tokens at keptIdx stay; the others are dropped. keptIdx ascends and is
// a chain of the tree. Errors: ErrInvalidState (nothing speculative, or layers uneven), ErrInvalidArgument (not a chain).
func (s *Session) Commit(sequence SequenceID, keptIdx []int64) error {
	if err := s.begin("tandem_session_commit"); err != nil {
		return err
	}
	defer s.end()
	var rawErr *C.tandem_error
	kept, n := int64s(keptIdx), C.int64_t(len(keptIdx))
	return failure(C.tandem_session_commit(s.raw(), C.int64_t(sequence), kept, n, &rawErr), rawErr)
}

// Step is an open step of a session.
type Step struct {
	session *Session
	stream  uintptr
	once    sync.Once
}

// Step opens a step: Attend calls will append qLens[i] tokens to sequence ids[i] in every layer. Errors: those of
// Cache.Reserve; ErrBusy; ErrInvalidState (a step is open).
func (s *Session) Step(ids []SequenceID, qLens []int64) (*Step, error) {
	return s.StepOn(0, ids, qLens)
}

// StepOn opens a planned step, for tensors in device memory, on a CUDA stream. Errors: those of Step; ErrUnsupported.
func (s *Session) StepOn(stream uintptr, ids []SequenceID, qLens []int64) (*Step, error) {
	const function = "tandem_step_begin"
	if len(ids) != len(qLens) || len(ids) > math.MaxInt32 {
		return nil, refuse(function, "q_lens", "has %d values for %d sequences", len(qLens), len(ids))
	}
	if err := s.begin(function); err != nil {
		return nil, err
	}
	defer s.end()
	result := C.tandem_go_step_begin(s.raw(), sequences(ids), int64s(qLens), C.int32_t(len(ids)), C.uintptr_t(stream))
	if err := failure(result.status, result.error); err != nil {
		return nil, err
	}
	return &Step{session: s, stream: stream}, nil
}

// End closes the step. Later calls of End do nothing. If a layer got fewer tokens than declared, the sequences are rolled back
// and End returns ErrInvalidState.
func (s *Step) End() (err error) {
	s.once.Do(func() {
		if err = s.session.begin("tandem_step_end"); err != nil {
			return
		}
		defer s.session.end()
		result := C.tandem_go_step_end(s.session.raw(), C.uintptr_t(s.stream))
		err = failure(result.status, result.error)
	})
	return err
}

// UseWeights gives WK and WV of a layer whose projection has none: from the next call on they are blocks of weights. The
// session keeps weights alive after Close. Route "recompute" uses the blocks while it makes keys, and "auto" does if that saves
// time. Without UseWeights, "recompute" returns ErrInvalidState and "auto" makes no keys. May be called again. Errors:
// ErrInvalidArgument (layerIdx; a missing block or one of another size; weights of another engine), ErrUnsupported (no
// projection, or one with its own weights).
func (s *Session) UseWeights(layerIdx int32, weights *Weights, wKBlock, wVBlock int32) error {
	const function = "tandem_session_use_weights"
	if err := s.begin(function); err != nil {
		return err
	}
	defer s.end()
	return weights.call(function, func(weights *C.tandem_weights, err **C.tandem_error) C.int32_t {
		return C.tandem_session_use_weights(s.raw(), C.int32_t(layerIdx), weights, C.int32_t(wKBlock), C.int32_t(wVBlock), err)
	})
}

// PatternPairs returns, for one layer, the (query, key) pairs that appends under "patterns" attended, summed over query heads.
// densePairs counts what policy "all" would have attended.
func (s *Session) PatternPairs(layerIdx int32) (pairs, densePairs int64, err error) {
	if err := s.begin("tandem_session_pattern_pairs"); err != nil {
		return 0, 0, err
	}
	defer s.end()
	var n, nDense C.int64_t
	var rawErr *C.tandem_error
	status := C.tandem_session_pattern_pairs(&n, &nDense, s.raw(), C.int32_t(layerIdx), &rawErr)
	return int64(n), int64(nDense), failure(status, rawErr)
}

// Selection returns the token indices that the next decode query of a KV head would attend, ascending.
func (s *Session) Selection(sequence SequenceID, layerIdx, kvHeadIdx int32) ([]int64, error) {
	tokenIdx, _, err := s.selection(sequence, layerIdx, kvHeadIdx, 0, false)
	return tokenIdx, err
}

// SelectionWithMaw also returns, for query head qHeadIdx of the group, the weight share of each selected key outside window and
// sinks.
func (s *Session) SelectionWithMaw(sequence SequenceID, layerIdx, kvHeadIdx, qHeadIdx int32) ([]int64, []float32, error) {
	return s.selection(sequence, layerIdx, kvHeadIdx, qHeadIdx, true)
}

// selection asks for the number of keys, then for the keys. It asks again if a background refresh has added some.
func (s *Session) selection(sequence SequenceID, layerIdx, kvHeadIdx, qHeadIdx int32, withMaw bool) ([]int64, []float32, error) {
	if err := s.begin("tandem_session_selection"); err != nil {
		return nil, nil, err
	}
	defer s.end()
	var nKept C.int64_t
	for {
		capacity := nKept
		tokenIdx := make([]int64, capacity)
		var maw []float32
		var mawAt *C.float
		if withMaw {
			maw = make([]float32, capacity)
			if capacity > 0 {
				mawAt = (*C.float)(&maw[0])
			}
		}
		var rawErr *C.tandem_error
		status := C.tandem_session_selection(int64s(tokenIdx), mawAt, capacity, &nKept, s.raw(), C.int64_t(sequence),
			C.int32_t(layerIdx), C.int32_t(kvHeadIdx), C.int32_t(qHeadIdx), &rawErr)
		if err := failure(status, rawErr); err != nil {
			return nil, nil, err
		}
		if nKept <= capacity {
			if withMaw {
				maw = maw[:nKept]
			}
			return tokenIdx[:nKept], maw, nil
		}
	}
}

// Stats returns sums since the session was created. It waits for refreshes that are under way.
func (s *Session) Stats() (SessionStats, error) {
	if err := s.begin("tandem_session_get_stats"); err != nil {
		return SessionStats{}, err
	}
	defer s.end()
	raw := C.tandem_session_stats{struct_size: C.sizeof_tandem_session_stats}
	var rawErr *C.tandem_error
	err := failure(C.tandem_session_get_stats(&raw, s.raw(), &rawErr), rawErr)
	return SessionStats{
		NAttends:            int64(raw.n_attends),
		NQueryTokens:        int64(raw.n_query_tokens),
		ResidentKVBytesRead: int64(raw.resident_kv_bytes_read),
		HostKVBytesRead:     int64(raw.host_kv_bytes_read),
		DenseKVBytes:        int64(raw.dense_kv_bytes),
		EvictedTokens:       int64(raw.evicted_tokens),
		NRefreshes:          int64(raw.n_refreshes),
		SelectedKeys:        int64(raw.selected_keys),
		HostKeys:            int64(raw.host_keys),
		AttendNs:            int64(raw.attend_ns),
		RefreshNs:           int64(raw.refresh_ns),
		RefreshWaitNs:       int64(raw.refresh_wait_ns),
		NDeviceAttends:      int64(raw.n_device_attends),
		NHostParts:          int64(raw.n_host_parts),
		HostPartNs:          int64(raw.host_part_ns),
		StagedKVBytes:       int64(raw.staged_kv_bytes),
		FilledKVBytes:       int64(raw.filled_kv_bytes),
		NStreamParts:        int64(raw.n_stream_parts),
		StreamPartNs:        int64(raw.stream_part_ns),
		StreamedKVBytes:     int64(raw.streamed_kv_bytes),
		NJointParts:         int64(raw.n_joint_parts),
		HostPartTokens:      int64(raw.host_part_tokens),
		StreamPartTokens:    int64(raw.stream_part_tokens),
		NPlannedParts:       int64(raw.n_planned_parts),
		PredictedPartNs:     int64(raw.predicted_part_ns),
		PlannedPartNs:       int64(raw.planned_part_ns),
		StreamedXBytes:      int64(raw.streamed_x_bytes),
		JudgedKVBytes:       int64(raw.judged_kv_bytes),
		PatternPairs:        int64(raw.pattern_pairs),
		PatternDensePairs:   int64(raw.pattern_dense_pairs),
	}, err
}
