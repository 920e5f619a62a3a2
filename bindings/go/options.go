// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"strings"
	"unsafe"
)

// Values of options.
const (
	RopeCaller       int32 = C.TANDEM_ROPE_CALLER       // keys and queries arrive ready for use
	RopeHalves       int32 = C.TANDEM_ROPE_HALVES       // the library rotates: dim i pairs with i + RopeDims / 2
	RopeInterleaved  int32 = C.TANDEM_ROPE_INTERLEAVED  // the library rotates: dim 2 i pairs with 2 i + 1
	RotationDefault  int32 = C.TANDEM_ROTATION_DEFAULT  // RotationHadamard for 4-bit keys where possible, else RotationNone
	RotationHadamard int32 = C.TANDEM_ROTATION_HADAMARD // keys and queries are multiplied by a Walsh-Hadamard matrix
	RotationNone     int32 = C.TANDEM_ROTATION_NONE
)

// EngineOptions configures an engine. Zero members are defaults.
type EngineOptions struct {
	NThreads    int32      // CPU workers, the calling thread included; 0: from the affinity mask and cgroup quota
	CPUISA      string     // "amx", "avx3", "avx2", ...: exactly this one; "": $TANDEM_CPU_ISA, else the best
	Backend     string     // device backend, "cuda"; "": none, the CPU does every part
	BackendPath string     // absolute path of the backend's file; no other file is tried
	Allocator   *Allocator // host memory of caches and sessions; nil: huge-page-friendly mappings
	Log         Log        // nil: silent
	SpinNs      int64      // how long idle workers spin before they sleep, in ns; 0: 50 us
	NoSpin      bool       // idle workers sleep at once; SpinNs is 0
	NoPinning   bool       // true: the system places workers; false: each is bound to a core
	MatmulRows  int32      // fewest query rows of a KV head for matrix products in a call; 0: by instruction set; -1: measured
}

// LayerOptions is the geometry of one layer. Zero members are defaults.
type LayerOptions struct {
	NQHeads             int32     // a multiple of NKVHeads
	NKVHeads            int32     // = NQHeads: MHA; 1: MQA
	KHeadDim            int32     // 64, 80, 96, 112, 128, 192, 256; 576 with VHeadDim 512 that aliases it (MLA)
	VHeadDim            int32     // 0: KHeadDim
	VAliasesK           bool      // V is the first VHeadDim dims of K, stored and read once
	SmScale             float32   // 0: 1 / sqrt(KHeadDim)
	SoftCap             float32   // 0: off
	SlidingWindowTokens int64     // 0: off; else a query at position p sees keys at positions > p - SlidingWindowTokens
	Sinks               []float32 // [NQHeads] learned sink logits; nil: none
	Rope                int32     // RopeCaller, ...
	RopeDims            int32     // rotated leading dims, even; 0: KHeadDim
	RopeTheta           float64   // 0: 10000
	RopePositionScale   float64   // 0: 1
	RopeInvFreq         []float32 // [RopeDims / 2]; nil: from RopeTheta
	RopeAttnFactor      float64   // 0: 1

	Projection *Projection // how K and V are made of hidden states; nil: they are not
}

// arena is C memory for the time of a call: the strings and arrays that option structs point to. It keeps its first error.
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

// address turns a C address that was kept as a number into a pointer.
func (a *arena) address(number C.uintptr_t) unsafe.Pointer { return C.tandem_go_address(number) }

func (a *arena) refuse(field, format string, values ...any) {
	if a.err == nil {
		a.err = refuse(a.function, field, format, values...)
	}
}

// text copies a string to C memory. "" becomes NULL.
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

// texts copies strings to an array in C memory. "" becomes NULL.
func (a *arena) texts(field string, texts []string) (**C.char, C.int64_t) {
	if len(texts) == 0 {
		return nil, 0
	}
	block := C.calloc(C.size_t(len(texts)), C.size_t(unsafe.Sizeof((*C.char)(nil))))
	a.blocks = append(a.blocks, block)
	for i, text := range texts {
		unsafe.Slice((**C.char)(block), len(texts))[i] = a.text(fmt.Sprintf("%s[%d]", field, i), text)
	}
	return (**C.char)(block), C.int64_t(len(texts))
}

// array copies values to C memory. Their number must be `expected`. nil becomes NULL.
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

// flags copies flags to C memory, one byte each. No flags become NULL.
func (a *arena) flags(flags []bool) (*C.uint8_t, C.int64_t) {
	if len(flags) == 0 {
		return nil, 0
	}
	data := make([]byte, len(flags))
	for i, is := range flags {
		data[i] = byte(flag(is))
	}
	return (*C.uint8_t)(a.bytes(data)), C.int64_t(len(flags))
}

func flag(is bool) C.int32_t {
	if is {
		return 1
	}
	return 0
}

type number interface {
	~int32 | ~int64 | ~float32 | ~float64
}

// given sets *raw, which holds a default other than 0: to value if that is not 0, or to 0 if the flag `zero` asks for it.
func given[R, V number](a *arena, raw *R, value V, field string, zero bool, flag string) {
	if zero && value != 0 {
		a.refuse(field, "= %v with %s", value, flag)
	}
	if zero || value != 0 {
		*raw = R(value)
	}
}

func (o *EngineOptions) raw(a *arena, log *logEntry) C.tandem_engine_options {
	var raw C.tandem_engine_options
	C.tandem_engine_options_init(&raw)
	if o == nil {
		return raw
	}
	raw.n_threads = C.int32_t(o.NThreads)
	raw.cpu_isa = a.text("cpu_isa", o.CPUISA)
	raw.backend = a.text("backend", o.Backend)
	raw.backend_path = a.text("backend_path", o.BackendPath)
	given(a, &raw.spin_ns, o.SpinNs, "spin_ns", o.NoSpin, "NoSpin")
	if o.NoPinning {
		raw.pin_threads = 0
	}
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
	raw.n_kv_heads = C.int32_t(o.NKVHeads)
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
