// SPDX-License-Identifier: MIT

//go:build cgo

package tandem

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// handle is a handle of the library, released once: by Close, or by the garbage collector where that was forgotten, and not
// before the calls that use it have returned. The library counts its own references, so handles may be closed in any order.
type handle struct {
	kind    string // "engine", as the library names the parameter
	pointer unsafe.Pointer
	release func(unsafe.Pointer)
	log     *logEntry    // as long as any handle made from its engine is there
	users   atomic.Int64 // calls under way, and one until it is closed; 0: released
	closed  atomic.Bool
}

func newHandle(kind string, pointer unsafe.Pointer, release func(unsafe.Pointer), log *logEntry) *handle {
	h := &handle{kind: kind, pointer: pointer, release: release, log: log.share()}
	h.users.Store(1)
	runtime.SetFinalizer(h, (*handle).close)
	return h
}

// held is the handle of an object, h; of one that is nil or that this package has not made, a closed one.
func held(h *handle, kind string) *handle {
	if h != nil {
		return h
	}
	none := &handle{kind: kind}
	none.closed.Store(true)
	return none
}

// use keeps the handle until done() is called; for a closed one it is an error.
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
