// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"strings"
	"unsafe"
)

// Values of options.
const (
	RopeCaller       int32 = C.TANDEM_ROPE_CALLER       // keys and queries arrive as they are to be used
	RopeHalves       int32 = C.TANDEM_ROPE_HALVES       // rotated by the library: dim i pairs with i + RopeDims / 2
	RopeInterleaved  int32 = C.TANDEM_ROPE_INTERLEAVED  // likewise: dim 2 i pairs with 2 i + 1
	RotationDefault  int32 = C.TANDEM_ROTATION_DEFAULT  // RotationHadamard for keys in 4 bits where it can be, else RotationNone
	RotationHadamard int32 = C.TANDEM_ROTATION_HADAMARD // keys are multiplied by a Walsh-Hadamard matrix; queries follow
	RotationNone     int32 = C.TANDEM_ROTATION_NONE
)

// EngineOptions is how an engine is made. It begins as DefaultEngineOptions(): zero has a meaning of its own in some members.
type EngineOptions struct {
	structSize  uint32
	NThreads    int32      // CPU workers, the calling thread included; 0: affinity mask and cgroup quota decide
	CpuIsa      string     // "amx", "avx3", "avx2", ...: exactly this one; "": $TANDEM_CPU_ISA, else the best
	Backend     string     // device backend, "cuda"; "": none, the CPU does every part
	BackendPath string     // absolute path of its file, the only one tried
	Allocator   *Allocator // host memory of caches and sessions; nil: huge-page-friendly mappings
	Log         Log        // nil: silent
	SpinNs      int64      // how long idle workers spin before they sleep; -1: default (50 us); 0: never
	PinThreads  int32      // -1: default (1): bind each worker to a core; 0: leave to the system
	MatmulRows  int32      // query rows of a KV head from which a call goes through matrix products; 0: where they are faster
}

// LayerOptions is the geometry of one layer. Zero members are defaults.
type LayerOptions struct {
	NQHeads             int32     // a multiple of NKvHeads
	NKvHeads            int32     // = NQHeads: MHA; 1: MQA
	KHeadDim            int32     // 64, 80, 96, 112, 128, 192, 256; 576 with VHeadDim 512 that aliases it (MLA)
	VHeadDim            int32     // 0: KHeadDim
	VAliasesK           bool      // V is the first VHeadDim dims of K, stored and read once
	SmScale             float32   // 0: 1 / sqrt(KHeadDim)
	SoftCap             float32   // 0: off
	SlidingWindowTokens int64     // 0: off; else a query at position p sees keys at positions > p - this
	Sinks               []float32 // [NQHeads] learned sink logits; nil: none
	Rope                int32     // RopeCaller, ...
	RopeDims            int32     // rotated leading dims, even; 0: KHeadDim
	RopeTheta           float64   // 0: 10000
	RopePositionScale   float64   // 0: 1
	RopeInvFreq         []float32 // [RopeDims / 2]; nil: from RopeTheta
	RopeAttnFactor      float64   // 0: 1

	Projection *Projection // nil: K and V are not to be made of hidden states
}

// CacheOptions is how keys and values are stored. Zero members are defaults.
type CacheOptions struct {
	KType           Dtype   // storage type of keys; 0: BF16
	VType           Dtype   // storage type of values; 0: KType
	PageTokens      int32   // tokens per page, a power of two from 16 to 4096; 0: 128
	HostCapBytes    int64   // hard cap on pages, MAW and selections in host memory; 0: none
	DeviceCapBytes  int64   // the same on windows and work space in device memory; 0: none
	LayerKTypes     []Dtype // [n_layers] or nil: overrides KType per layer
	LayerVTypes     []Dtype // [n_layers] or nil: overrides VType per layer
	KRotation       int32   // RotationDefault, ...
	XType           Dtype   // F16, BF16, Q8_0, ...: hidden states of layers with a projection are kept too, and appends bring them; 0: none
}

// SessionOptions is how a cache is attended. It begins as DefaultSessionOptions(): zero has a meaning of its own in some members.
type SessionOptions struct {
	structSize uint32

	// Whether the CPU workers may sleep between the calls of a step without a stream, for programs whose own threads compute on
	// the same cores in between; false: they spin from the step's begin to its end.
	SleepBetweenCalls bool

	Policy       string  // "all", "streaming", "hgca"; "": "all"
	WindowTokens int64   // newest tokens, always attended, resident on the device; -1: 4096; 0: none
	SinkTokens   int64   // first tokens, always attended; -1: 64; 0: none
	Alpha        float32 // MAW factor in (0, 1]; 0: 0.3
	Beta         float32 // MAW threshold factor, >= 0; -1: 1
	HaloTokens   int64   // keys kept after a strongly attended one; -1: 128; 0: none
	Route        string  // who computes over keys outside the window for device tensors: "host", ..., "recompute"; "": "auto"

	StreamBufferBytes int64   // each of the two buffers that keys go through; 0: 16 MiB
	StreamFraction    float64 // with "host+stream": the share of these keys that crosses the bus, 0 to 1; -1: not given
	AppendTokens      int64   // most of an append that meet a streamed key together; 0: 16,384, and plans are of single queries
	StreamHeads       int64   // KV heads of what is streamed at a time, at most; 0: as many as take the least time
	RecomputeShare    float64 // with "recompute": the share, in (0, 1], of these keys that is made of hidden states; 0: 1

	// Of each KV head of each layer, layer by layer, whether its queries see the first SinkTokens and the WindowTokens newest
	// alone; nil: none does.
	StreamingHeads []bool
}

// DefaultEngineOptions gives the library's defaults.
func DefaultEngineOptions() EngineOptions {
	var raw C.tandem_engine_options
	C.tandem_engine_options_init(&raw)
	return EngineOptions{
		structSize: uint32(raw.struct_size),
		SpinNs:     int64(raw.spin_ns),
		PinThreads: int32(raw.pin_threads),
	}
}

// DefaultSessionOptions gives the library's defaults.
func DefaultSessionOptions() SessionOptions {
	var raw C.tandem_session_options
	C.tandem_session_options_init(&raw)
	return SessionOptions{
		structSize:   uint32(raw.struct_size),
		WindowTokens: int64(raw.window_tokens),
		SinkTokens:   int64(raw.sink_tokens),
		Beta:         float32(raw.beta),
		HaloTokens:   int64(raw.halo_tokens),

		StreamFraction: float64(raw.stream_fraction),
	}
}

// arena is C memory for the time of a call: texts and arrays that structs of options point to. Its first error stays.
type arena struct {
	function string
	blocks   []unsafe.Pointer
	err      error
}

func (a *arena) free() {
	for _, block := range a.blocks {
		C.free(block)
	}
}

func (a *arena) bytes(data []byte) unsafe.Pointer {
	block := C.CBytes(data)
	a.blocks = append(a.blocks, block)
	return block
}

// address is what a tensor of C memory, of which only the number is kept, points to.
func (a *arena) address(number C.uintptr_t) unsafe.Pointer { return C.tandem_go_address(number) }

func (a *arena) refuse(field, format string, values ...any) {
	if a.err == nil {
		a.err = refuse(a.function, field, format, values...)
	}
}

// text is NULL for "".
func (a *arena) text(field, text string) *C.char {
	if text == "" {
		return nil
	}
	if strings.IndexByte(text, 0) >= 0 {
		a.refuse(field, "= %q has a zero byte", text)
		return nil
	}
	return (*C.char)(a.bytes(append([]byte(text), 0)))
}

// array is a copy of values, of which there must be `expected`; nil: NULL.
func array[T ~int32 | ~float32](a *arena, field string, values []T, expected int, what string) unsafe.Pointer {
	if values == nil {
		return nil
	}
	if len(values) != expected {
		a.refuse(field, "has %d values, must have %s = %d", len(values), what, expected)
		return nil
	}
	if len(values) == 0 {
		return nil
	}
	return a.bytes(unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), 4*len(values)))
}

func (a *arena) initialised(structSize uint32, name string) {
	if structSize == 0 {
		a.refuse("struct_size", "= 0: %sOptions begin as Default%sOptions()", name, name)
	}
}

func (o *EngineOptions) raw(a *arena, log *logEntry) C.tandem_engine_options {
	var raw C.tandem_engine_options
	C.tandem_engine_options_init(&raw)
	if o == nil {
		return raw
	}
	a.initialised(o.structSize, "Engine")
	raw.n_threads = C.int32_t(o.NThreads)
	raw.cpu_isa = a.text("cpu_isa", o.CpuIsa)
	raw.backend = a.text("backend", o.Backend)
	raw.backend_path = a.text("backend_path", o.BackendPath)
	raw.spin_ns = C.int64_t(o.SpinNs)
	raw.pin_threads = C.int32_t(o.PinThreads)
	raw.matmul_rows = C.int32_t(o.MatmulRows)
	if o.Allocator != nil {
		C.tandem_go_set_allocator(&raw, C.uintptr_t(o.Allocator.number))
	}
	if log != nil {
		C.tandem_go_set_log(&raw, C.uintptr_t(log.number))
	}
	return raw
}

func (o *LayerOptions) raw(a *arena) C.tandem_layer_options {
	var raw C.tandem_layer_options
	C.tandem_layer_options_init(&raw)
	ropeDims := o.RopeDims
	if ropeDims == 0 {
		ropeDims = o.KHeadDim
	}
	raw.n_q_heads = C.int32_t(o.NQHeads)
	raw.n_kv_heads = C.int32_t(o.NKvHeads)
	raw.k_head_dim = C.int32_t(o.KHeadDim)
	raw.v_head_dim = C.int32_t(o.VHeadDim)
	if o.VAliasesK {
		raw.v_aliases_k = 1
	}
	raw.sm_scale = C.float(o.SmScale)
	raw.soft_cap = C.float(o.SoftCap)
	raw.sliding_window_tokens = C.int64_t(o.SlidingWindowTokens)
	raw.sinks = (*C.float)(array(a, "sinks", o.Sinks, int(o.NQHeads), "n_q_heads"))
	raw.rope = C.int32_t(o.Rope)
	raw.rope_dims = C.int32_t(o.RopeDims)
	raw.rope_theta = C.double(o.RopeTheta)
	raw.rope_position_scale = C.double(o.RopePositionScale)
	raw.rope_inv_freq = (*C.float)(array(a, "rope_inv_freq", o.RopeInvFreq, int(ropeDims)/2, "rope_dims / 2"))
	raw.rope_attn_factor = C.double(o.RopeAttnFactor)
	raw.projection = o.Projection.raw(a, o)
	return raw
}

func (o *CacheOptions) raw(a *arena, nLayers int) *C.tandem_cache_options {
	if o == nil {
		return nil
	}
	var raw C.tandem_cache_options
	C.tandem_cache_options_init(&raw)
	raw.k_type = C.int32_t(o.KType)
	raw.v_type = C.int32_t(o.VType)
	raw.page_tokens = C.int32_t(o.PageTokens)
	raw.host_cap_bytes = C.int64_t(o.HostCapBytes)
	raw.device_cap_bytes = C.int64_t(o.DeviceCapBytes)
	raw.layer_k_types = (*C.int32_t)(array(a, "layer_k_types", o.LayerKTypes, nLayers, "n_layers"))
	raw.layer_v_types = (*C.int32_t)(array(a, "layer_v_types", o.LayerVTypes, nLayers, "n_layers"))
	raw.k_rotation = C.int32_t(o.KRotation)
	raw.x_type = C.int32_t(o.XType)
	return &raw
}

func (o *SessionOptions) raw(a *arena) *C.tandem_session_options {
	if o == nil {
		return nil
	}
	a.initialised(o.structSize, "Session")
	var raw C.tandem_session_options
	C.tandem_session_options_init(&raw)
	if o.SleepBetweenCalls {
		raw.sleep_between_calls = 1
	}
	raw.policy = a.text("policy", o.Policy)
	raw.window_tokens = C.int64_t(o.WindowTokens)
	raw.sink_tokens = C.int64_t(o.SinkTokens)
	raw.alpha = C.float(o.Alpha)
	raw.beta = C.float(o.Beta)
	raw.halo_tokens = C.int64_t(o.HaloTokens)
	raw.route = a.text("route", o.Route)
	raw.stream_buffer_bytes = C.int64_t(o.StreamBufferBytes)
	raw.stream_fraction = C.double(o.StreamFraction)
	raw.append_tokens = C.int64_t(o.AppendTokens)
	raw.stream_heads = C.int64_t(o.StreamHeads)
	raw.recompute_share = C.double(o.RecomputeShare)
	flags := make([]byte, len(o.StreamingHeads))
	for i, streams := range o.StreamingHeads {
		if streams {
			flags[i] = 1
		}
	}
	if len(flags) > 0 {
		raw.streaming_heads = (*C.uint8_t)(a.bytes(flags))
		raw.n_streaming_heads = C.int64_t(len(flags))
	}
	return &raw
}
