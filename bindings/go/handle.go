// SPDX-License-Identifier: MIT

//go:build cgo

package tandem

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// handle is a handle of the library, released once: by Close, or by the garbage collector if Close was forgotten. The release
// waits for calls that use the handle. The library counts its own references, so handles may be closed in any order.
type handle struct {
	kind    string // the library's name of the parameter: "engine"
	pointer unsafe.Pointer
	release func(unsafe.Pointer)
	log     *logEntry    // the engine's log; lives as long as any handle made from that engine
	users   atomic.Int64 // running calls, plus one until the handle is closed; 0: released
	closed  atomic.Bool
}

func newHandle(kind string, pointer unsafe.Pointer, release func(unsafe.Pointer), log *logEntry) *handle {
	h := &handle{kind: kind, pointer: pointer, release: release, log: log.share()}
	h.users.Store(1)
	runtime.SetFinalizer(h, (*handle).close)
	return h
}

// held returns h, or a closed handle if h is nil: a nil object, or one that this package has not made.
func held(h *handle, kind string) *handle {
	if h != nil {
		return h
	}
	none := &handle{kind: kind}
	none.closed.Store(true)
	return none
}

// use keeps the handle alive until done() is called. It returns an error if the handle is closed.
func (h *handle) use(function string) error {
	for !h.closed.Load() {
		n := h.users.Load()
		if n == 0 {
			break
		}
		if h.users.CompareAndSwap(n, n+1) {
			return nil
		}
	}
	state := " is closed"
	if h.pointer == nil {
		state = " is nil"
	}
	return &Error{Code: ErrInvalidHandle, Field: h.kind, Message: function + ": " + h.kind + state}
}

func (h *handle) done() {
	if h.users.Add(-1) == 0 {
		h.release(h.pointer)
		h.log.drop()
	}
	runtime.KeepAlive(h)
}

func (h *handle) close() {
	if !h.closed.Swap(true) {
		runtime.SetFinalizer(h, nil)
		h.done()
	}
}
