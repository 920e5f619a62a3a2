// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import "errors"

// MemoryPlan is the memory that a cache with one session will hold, and what decode steps will read, in bytes.
type MemoryPlan struct {
	HostKVBytes          int64 // pages of K and V, and of hidden states
	HostSessionBytes     int64 // MAW and selection tables of one session
	SelectionMaxBytes    int64 // selected keys, upper bound
	DeviceWindowBytes    int64 // windows of calls with one query a sequence: as many pages as the tokens fill
	DeviceWorkBytes      int64 // states, descriptors and work space of the same calls
	KVTokenBytes         int64 // K and V of one token in all layers
	SharedBytes          int64 // pinned host memory for the handshake of device and host
	DeviceStreamBytes    int64 // buffers of a session that may stream or rebuild keys
	DeviceWeightsBytes   int64 // projections of the route "recompute"
	XTokenBytes          int64 // hidden states of one token in all layers
	DeviceWindowMaxBytes int64 // windows once every sequence has filled its window
	JudgedKVBytes        int64 // not held, but read: by the stages of policy "hip" in a decode step, on average
	JudgedFirstBytes     int64 // the part of JudgedKVBytes that first stages read
	JudgedMaxBytes       int64 // the same as JudgedKVBytes for a step in which all stages run
}

// CacheStats tells what a cache holds.
type CacheStats struct {
	NSequences         int64
	NPagesUsed         int64 // pages held by at least one sequence
	NPagesShared       int64 // pages held by more than one sequence
	HostKVBytes        int64 // pages allocated
	HostSessionBytes   int64
	SelectionBytes     int64
	HostPeakBytes      int64 // largest use so far, which HostCapBytes bounds
	DeviceWindowBytes  int64
	DeviceWorkBytes    int64
	DevicePeakBytes    int64 // largest use so far, which DeviceCapBytes bounds
	DeviceStreamBytes  int64 // buffers of sessions that stream or rebuild keys
	PinnedBytes        int64 // pages pinned for streams
	DeviceWeightsBytes int64 // projections in device memory
}

// SessionStats holds sums since the session was created.
type SessionStats struct {
	NAttends            int64 // calls
	NQueryTokens        int64 // queries, per layer
	ResidentKVBytesRead int64 // K and V read by attention inside the window
	HostKVBytesRead     int64 // K and V read outside the window
	DenseKVBytes        int64 // what policy "all" would have read in the same calls
	EvictedTokens       int64 // tokens that left the window, per layer
	NRefreshes          int64 // selections made
	SelectedKeys        int64 // keys selected now, over layers, sequences and KV heads
	HostKeys            int64 // keys outside the window now, sinks not counted
	AttendNs            int64
	RefreshNs           int64
	RefreshWaitNs       int64 // time that attend calls on host tensors waited for background work
	NDeviceAttends      int64
	NHostParts          int64
	HostPartNs          int64
	StagedKVBytes       int64
	FilledKVBytes       int64
	NStreamParts        int64 // parts outside the window that the device computed
	StreamPartNs        int64
	StreamedKVBytes     int64 // K and V that crossed the bus for these parts
	NJointParts         int64 // of these parts, those with keys that the CPU attended
	HostPartTokens      int64 // keys that the CPU attended under policies that attend all keys
	StreamPartTokens    int64 // keys that crossed the bus
	NPlannedParts       int64 // parts whose time the engine could predict
	PredictedPartNs     int64 // their predicted time
	PlannedPartNs       int64 // their measured time
	StreamedXBytes      int64 // hidden states that crossed the bus, from which the device made K and V
	JudgedKVBytes       int64 // K, and bounds of K, that policy "hip" read to choose keys; on a device an upper bound
	PatternPairs        int64 // (query, key) pairs that appends under "patterns" attended, summed over query heads
	PatternDensePairs   int64 // pairs that policy "all" would have attended in the same calls
}

// PlanMemory plans sequences of kvLens tokens without allocating memory. nil options: defaults. If a cap is exceeded, it
// returns both the plan and ErrCapacity. Other errors are those of NewCache and NewSession.
func (e *Engine) PlanMemory(model *Model, cache *CacheOptions, session *SessionOptions, kvLens ...int64) (MemoryPlan, error) {
	const function = "tandem_plan_memory"
	if err := e.held().use(function); err != nil {
		return MemoryPlan{}, err
	}
	defer e.handle.done()
	if err := model.held().use(function); err != nil {
		return MemoryPlan{}, err
	}
	defer model.handle.done()
	a := arena{function: function}
	defer a.free()
	rawCache, rawSession := cache.raw(&a, model.nLayers), session.raw(&a)
	if a.err != nil {
		return MemoryPlan{}, a.err
	}
	raw := C.tandem_memory_plan{struct_size: C.sizeof_tandem_memory_plan}
	var rawErr *C.tandem_error
	status := C.tandem_plan_memory(&raw, e.raw(), model.raw(), rawCache, rawSession, int64s(kvLens), C.int64_t(len(kvLens)), &rawErr)
	err := failure(status, rawErr)
	if err != nil && !errors.Is(err, ErrCapacity) {
		return MemoryPlan{}, err
	}
	return MemoryPlan{
		HostKVBytes:          int64(raw.host_kv_bytes),
		HostSessionBytes:     int64(raw.host_session_bytes),
		SelectionMaxBytes:    int64(raw.selection_max_bytes),
		DeviceWindowBytes:    int64(raw.device_window_bytes),
		DeviceWorkBytes:      int64(raw.device_work_bytes),
		KVTokenBytes:         int64(raw.kv_token_bytes),
		SharedBytes:          int64(raw.shared_bytes),
		DeviceStreamBytes:    int64(raw.device_stream_bytes),
		DeviceWeightsBytes:   int64(raw.device_weights_bytes),
		XTokenBytes:          int64(raw.x_token_bytes),
		DeviceWindowMaxBytes: int64(raw.device_window_max_bytes),
		JudgedKVBytes:        int64(raw.judged_kv_bytes),
		JudgedFirstBytes:     int64(raw.judged_first_bytes),
		JudgedMaxBytes:       int64(raw.judged_max_bytes),
	}, err
}

// Report returns the plan as JSON.
func (p MemoryPlan) Report() (string, error) {
	raw := C.tandem_memory_plan{
		struct_size:             C.sizeof_tandem_memory_plan,
		host_kv_bytes:           C.int64_t(p.HostKVBytes),
		host_session_bytes:      C.int64_t(p.HostSessionBytes),
		selection_max_bytes:     C.int64_t(p.SelectionMaxBytes),
		device_window_bytes:     C.int64_t(p.DeviceWindowBytes),
		device_work_bytes:       C.int64_t(p.DeviceWorkBytes),
		kv_token_bytes:          C.int64_t(p.KVTokenBytes),
		shared_bytes:            C.int64_t(p.SharedBytes),
		device_stream_bytes:     C.int64_t(p.DeviceStreamBytes),
		device_weights_bytes:    C.int64_t(p.DeviceWeightsBytes),
		x_token_bytes:           C.int64_t(p.XTokenBytes),
		device_window_max_bytes: C.int64_t(p.DeviceWindowMaxBytes),
		judged_kv_bytes:         C.int64_t(p.JudgedKVBytes),
		judged_first_bytes:      C.int64_t(p.JudgedFirstBytes),
		judged_max_bytes:        C.int64_t(p.JudgedMaxBytes),
	}
	return text(func(buffer *C.char, bytes C.size_t, needed *C.size_t, rawErr **C.tandem_error) C.int32_t {
		return C.tandem_plan_report(buffer, bytes, needed, &raw, rawErr)
	})
}

// Supports returns nil if the engine can serve the layer, cache and session, else the error that creating them would return. A
// nil argument is not checked.
func (e *Engine) Supports(layer *LayerOptions, cache *CacheOptions, session *SessionOptions) error {
	const function = "tandem_supports"
	if err := e.held().use(function); err != nil {
		return err
	}
	defer e.handle.done()
	a := arena{function: function}
	defer a.free()
	var rawLayer *C.tandem_layer_options
	if layer != nil {
		raw := layer.raw(&a)
		rawLayer = &raw
	}
	rawCache, rawSession := cache.raw(&a, 1), session.raw(&a)
	if a.err != nil {
		return a.err
	}
	var why *C.tandem_error
	return failure(C.tandem_supports(e.raw(), rawLayer, rawCache, rawSession, &why), why)
}

// RoutePlan says which processor will attend the keys of a call on device tensors, and how long that takes. Times run from the
// arrival of the call's queries to the end of each processor's work. They include the slowdown of CPU and bus by each other. 0:
// nothing is known.
type RoutePlan struct {
	ResidentTokens int64 // keys in windows, the call's own included
	HostTokens     int64 // keys that the CPU attends
	StreamTokens   int64 // keys whose K and V cross the bus
	HostBytes      int64 // K and V of HostTokens
	StreamBytes    int64 // K and V of StreamTokens
	HostNs         int64 // time of the CPU
	BusNs          int64 // time of the bus, with transfers before the queries arrive, as in the session's last such calls
	DeviceNs       int64 // device: rebuilt keys, long appends (by a trial of their kernels); 0 if hidden behind the bus
	TotalNs        int64 // the end of the last one, without transfers before the queries arrive
	HostAloneNs    int64 // time if the CPU attended all keys outside the windows
	StreamAloneNs  int64 // time if all these keys crossed the bus

	RecomputeTokens  int64 // keys whose hidden states cross the bus; the device makes K and V of them
	RecomputeBytes   int64 // hidden states of RecomputeTokens
	RecomputeAloneNs int64 // time if the device made all such keys; of the bus alone if not measured; 0: no hidden states
}

// Plan returns the plan of the next such call, from what the engine has measured. It measures what is missing. kvLens counts
// each sequence's tokens, the call's included. qLens counts the call's; nil: 1 each. Errors: ErrInvalidArgument, ErrUnsupported
// (no device; a policy that does not attend all keys), ErrCapacity, ErrOutOfMemory.
func (s *Session) Plan(layerIdx int32, kvLens, qLens []int64) (RoutePlan, error) {
	const function = "tandem_plan"
	if qLens != nil && len(qLens) != len(kvLens) {
		return RoutePlan{}, refuse(function, "q_lens", "has %d values for %d sequences", len(qLens), len(kvLens))
	}
	if err := s.begin(function); err != nil {
		return RoutePlan{}, err
	}
	defer s.end()
	raw := C.tandem_route_plan{struct_size: C.sizeof_tandem_route_plan}
	var rawErr *C.tandem_error
	status := C.tandem_plan(&raw, s.raw(), C.int32_t(layerIdx), int64s(kvLens), int64s(qLens), C.int64_t(len(kvLens)), &rawErr)
	return RoutePlan{
		ResidentTokens: int64(raw.resident_tokens),
		HostTokens:     int64(raw.host_tokens),
		StreamTokens:   int64(raw.stream_tokens),
		HostBytes:      int64(raw.host_bytes),
		StreamBytes:    int64(raw.stream_bytes),
		HostNs:         int64(raw.host_ns),
		BusNs:          int64(raw.bus_ns),
		DeviceNs:       int64(raw.device_ns),
		TotalNs:        int64(raw.total_ns),
		HostAloneNs:    int64(raw.host_alone_ns),
		StreamAloneNs:  int64(raw.stream_alone_ns),

		RecomputeTokens:  int64(raw.recompute_tokens),
		RecomputeBytes:   int64(raw.recompute_bytes),
		RecomputeAloneNs: int64(raw.recompute_alone_ns),
	}, failure(status, rawErr)
}

// Report returns the plan as JSON.
func (p RoutePlan) Report() (string, error) {
	raw := C.tandem_route_plan{
		struct_size:     C.sizeof_tandem_route_plan,
		resident_tokens: C.int64_t(p.ResidentTokens),
		host_tokens:     C.int64_t(p.HostTokens),
		stream_tokens:   C.int64_t(p.StreamTokens),
		host_bytes:      C.int64_t(p.HostBytes),
		stream_bytes:    C.int64_t(p.StreamBytes),
		host_ns:         C.int64_t(p.HostNs),
		bus_ns:          C.int64_t(p.BusNs),
		device_ns:       C.int64_t(p.DeviceNs),
		total_ns:        C.int64_t(p.TotalNs),
		host_alone_ns:   C.int64_t(p.HostAloneNs),
		stream_alone_ns: C.int64_t(p.StreamAloneNs),

		recompute_tokens:   C.int64_t(p.RecomputeTokens),
		recompute_bytes:    C.int64_t(p.RecomputeBytes),
		recompute_alone_ns: C.int64_t(p.RecomputeAloneNs),
	}
	return text(func(buffer *C.char, bytes C.size_t, needed *C.size_t, rawErr **C.tandem_error) C.int32_t {
		return C.tandem_route_report(buffer, bytes, needed, &raw, rawErr)
	})
}
