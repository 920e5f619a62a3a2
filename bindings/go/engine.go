// SPDX-License-Identifier: MIT

// Package tandem computes attention over key/value caches larger than the GPU: Go on top of libtandem's C ABI.
//
// An Engine owns the processors. A Model holds the geometry of the layers. A Cache holds the keys and values of many sequences.
// A Session says how they are attended; Session.Attend is the call that does the work. Names, units and defaults are those of
// tandem/tandem.h, which says more about each.
//
// Ownership: close objects in any order and as often as you like. The library counts references, so a session keeps its cache
// alive, and a cache its engine and model. A closed object refuses calls with ErrInvalidHandle. The garbage collector releases
// objects that were not closed.
//
// Options: zero members are defaults. Where 0 is a value of its own and the default is another number, a flag asks for 0:
// NoWindow, ZeroBeta.
//
// Goroutines: any goroutine may use Engine, Model, Cache and Weights at any time. A Session makes one call at a time; further
// calls wait. The caller keeps the calls of a step together. Close may come during calls; the object is released when they
// return.
//
// Memory: the library borrows slices until the call returns. It writes only to O, Lse, the K, V and x of Read and ReadX, and
// the outputs of Merge. Attend neither allocates nor copies on the Go side.
//
// Errors: each error is an *Error with code, field and message. A failing call changes nothing.
package tandem

/*
#cgo pkg-config: tandem
#include "shim.h"

static void close_engine(void *engine) { tandem_engine_release(engine); }
static void close_model(void *model) { tandem_model_release(model); }
*/
import "C"

import (
	"math"
	"time"
	"unsafe"
)

// Engine owns the processors: the CPU pool and, if Backend is given, a device backend.
type Engine struct {
	handle *handle
}

// NewEngine starts the CPU pool and loads the device backend, if one is named. options = nil: defaults. Errors: ErrNotFound
// (CPUISA), ErrBackend, ErrSystem (a thread could not be started), ErrOutOfMemory, ErrInvalidArgument.
func NewEngine(options *EngineOptions) (*Engine, error) {
	if err := checkABI(); err != nil {
		return nil, err
	}
	var log *logEntry
	if options != nil {
		log = newLogEntry(options.Log).share()
		defer log.drop()
	}
	a := arena{function: "tandem_engine_create"}
	defer a.free()
	raw := options.raw(&a, log)
	if a.err != nil {
		return nil, a.err
	}
	var engine *C.tandem_engine
	var rawErr *C.tandem_error
	if err := failure(C.tandem_engine_create(&engine, &raw, &rawErr), rawErr); err != nil {
		return nil, err
	}
	release := func(engine unsafe.Pointer) { C.close_engine(engine) }
	return &Engine{newHandle("engine", unsafe.Pointer(engine), release, log)}, nil
}

func (e *Engine) held() *handle {
	if e == nil {
		return held(nil, "engine")
	}
	return held(e.handle, "engine")
}

func (e *Engine) raw() *C.tandem_engine { return (*C.tandem_engine)(e.handle.pointer) }

// Close releases the engine; caches and sessions keep it alive. It returns nil.
func (e *Engine) Close() error {
	e.held().close()
	return nil
}

// Drain waits until background work has finished. timeout < 0: wait for ever. Errors: ErrTimeout.
func (e *Engine) Drain(timeout time.Duration) error {
	if err := e.held().use("tandem_engine_drain"); err != nil {
		return err
	}
	defer e.handle.done()
	var rawErr *C.tandem_error
	return failure(C.tandem_engine_drain(e.raw(), C.int64_t(timeout), &rawErr), rawErr)
}

// Report returns topology, workers, instruction set and backends as JSON.
func (e *Engine) Report() (string, error) {
	if err := e.held().use("tandem_engine_report"); err != nil {
		return "", err
	}
	defer e.handle.done()
	return text(func(buffer *C.char, bytes C.size_t, needed *C.size_t, rawErr **C.tandem_error) C.int32_t {
		return C.tandem_engine_report(buffer, bytes, needed, e.raw(), rawErr)
	})
}

// State is the result of attention over a set of keys: O [n_tokens, n_heads, head_dim] and Lse [n_tokens, n_heads], f32.
type State struct {
	O, Lse Tensor
}

// Merge merges states over disjoint keys into out, which may be one of them. It copies the input states to C memory first.
func (e *Engine) Merge(out State, states ...State) error {
	const function = "tandem_merge"
	if err := e.held().use(function); err != nil {
		return err
	}
	defer e.handle.done()
	a := arena{function: function}
	defer a.free()
	if len(states) > math.MaxInt32/2-1 {
		return refuse(function, "n_states", "= %d is too large", len(states))
	}
	description := []C.tandem_go_tensor{out.O.description, out.Lse.description}
	names := []string{"o", "lse"}
	if err := firstErr(function, []string{"o_out", "lse_out"}, &out.O, &out.Lse); err != nil {
		return err
	}
	for i := range states {
		if err := firstErr(function, names, &states[i].O, &states[i].Lse); err != nil {
			return err
		}
		description = append(description, a.tensor(&states[i].O), a.tensor(&states[i].Lse))
	}
	result := C.tandem_go_merge(e.raw(), &description[0], C.int32_t(len(states)), out.O.at(), out.Lse.at(), 0)
	return failure(result.status, result.error)
}

// tensor describes t for C. Go memory is copied to C memory first.
func (a *arena) tensor(t *Tensor) C.tandem_go_tensor {
	description := t.description
	if description.n_dims != 0 && description.address == 0 {
		data := unsafe.Slice((*byte)(t.data), t.span())
		if len(data) == 0 {
			data = nothing[:]
		}
		description.address = C.uintptr_t(uintptr(a.bytes(data)))
	}
	return description
}

// Model is the geometry of a model's layers.
type Model struct {
	handle  *handle
	nLayers int
}

// NewModel makes a model of these layers. Errors: ErrInvalidArgument (layers[i].member), ErrUnsupported.
func NewModel(layers ...LayerOptions) (*Model, error) {
	if err := checkABI(); err != nil {
		return nil, err
	}
	a := arena{function: "tandem_model_create"}
	defer a.free()
	raw := make([]C.tandem_layer_options, len(layers)+1) // one more, so that &raw[0] exists
	for i := range layers {
		raw[i] = layers[i].raw(&a)
	}
	if len(layers) > math.MaxInt32 {
		a.refuse("n_layers", "= %d is too large", len(layers))
	}
	if a.err != nil {
		return nil, a.err
	}
	var model *C.tandem_model
	var rawErr *C.tandem_error
	if err := failure(C.tandem_model_create(&model, &raw[0], C.int32_t(len(layers)), &rawErr), rawErr); err != nil {
		return nil, err
	}
	release := func(model unsafe.Pointer) { C.close_model(model) }
	return &Model{newHandle("model", unsafe.Pointer(model), release, nil), len(layers)}, nil
}

func (m *Model) held() *handle {
	if m == nil {
		return held(nil, "model")
	}
	return held(m.handle, "model")
}

func (m *Model) raw() *C.tandem_model { return (*C.tandem_model)(m.handle.pointer) }

// Close releases the model; caches keep it alive. It returns nil.
func (m *Model) Close() error {
	m.held().close()
	return nil
}

// NLayers returns the number of layers.
func (m *Model) NLayers() int { return m.nLayers }

// Version returns the version of the loaded library.
func Version() (major, minor, patch int) {
	version := int(C.tandem_version())
	return version >> 16, version >> 8 & 0xff, version & 0xff
}

func names(name func(idx C.int32_t) *C.char) (all []string) {
	for idx := C.int32_t(0); ; idx++ {
		text := name(idx)
		if text == nil {
			return all
		}
		all = append(all, C.GoString(text))
	}
}

// PolicyNames returns the names of the policies.
func PolicyNames() []string {
	return names(func(idx C.int32_t) *C.char { return C.tandem_policy_name(idx) })
}

// CPUISANames returns the instruction sets of this build, best first.
func CPUISANames() []string {
	return names(func(idx C.int32_t) *C.char { return C.tandem_cpu_isa_name(idx) })
}

// CPUISAAvailable returns whether this processor has the named instruction set.
func CPUISAAvailable(name string) bool {
	var a arena
	defer a.free()
	text := a.text("name", name)
	return a.err == nil && C.tandem_cpu_isa_available(text) == 1
}
