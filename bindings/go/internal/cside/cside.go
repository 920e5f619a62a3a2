// SPDX-License-Identifier: MIT

// Package cside is what the tests and the benchmark of package tandem need of C: cgo is not to be had in test files.
package cside

/*
#cgo pkg-config: tandem
#cgo CFLAGS: -I${SRCDIR}/../../../rust/tandem/benches
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "overhead.c"

// What a test does to a device module that lives in host memory: the first members of its table.
typedef struct controls {
	void (*reset)(void);
	void (*set_delay)(int64_t ns);
	void (*lose_device)(void);
	void (*fail_call)(int32_t call, int64_t nth, int32_t status);
} controls;

static const controls *controls_of(const char *path) {
	typedef const controls *(*function)(void);
	void *module = dlopen(path, RTLD_NOW);
	function find = module == NULL ? NULL : (function)dlsym(module, "stand_in_controls");
	return find == NULL ? NULL : find();
}
static void reset(const controls *c) { c->reset(); }
static void set_delay(const controls *c, int64_t ns) { c->set_delay(ns); }
static void lose_device(const controls *c) { c->lose_device(); }
static void fail_call(const controls *c, int32_t call, int64_t nth, int32_t status) { c->fail_call(call, nth, status); }
static void copy_from(void *to, uintptr_t from, size_t bytes) { memcpy(to, (const void *)from, bytes); }
*/
import "C"

import "unsafe"

// AttendN is n decode calls of q and o [1, 8, 64] on a session, from a loop in C; gives the last one's status.
func AttendN(session unsafe.Pointer, sequence int64, q, o []float32, n int) int32 {
	if len(q) != 8*64 || len(o) != 8*64 {
		panic("q and o are [1, 8, 64]")
	}
	at := (*C.tandem_session)(session)
	return int32(C.attend_n(at, C.int64_t(sequence), (*C.float)(&q[0]), (*C.float)(&o[0]), C.int32_t(n)))
}

// Alloc is aligned memory of C.
func Alloc(bytes, alignment uintptr) unsafe.Pointer {
	return C.aligned_alloc(C.size_t(alignment), C.size_t((bytes+alignment-1)/alignment*alignment))
}

// Free takes it back.
func Free(data unsafe.Pointer) { C.free(data) }

// Module is a device module that lives in host memory.
type Module struct{ controls *C.controls }

// OpenModule finds what controls it; nil where it is no such module.
func OpenModule(path string) *Module {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if controls := C.controls_of(name); controls != nil {
		return &Module{controls}
	}
	return nil
}

// Reset gives a device that is there, does not tarry and does not fail.
func (m *Module) Reset() { C.reset(m.controls) }

// SetDelay is before each operation of a stream.
func (m *Module) SetDelay(ns int64) { C.set_delay(m.controls, C.int64_t(ns)) }

// LoseDevice lasts until Reset.
func (m *Module) LoseDevice() { C.lose_device(m.controls) }

// FailCreateEvent is the next such call's answer.
func (m *Module) FailCreateEvent(status int32) { C.fail_call(m.controls, 16, 1, C.int32_t(status)) }

// Read copies from memory of the module.
func Read(to []byte, from uintptr) {
	if len(to) > 0 {
		C.copy_from(unsafe.Pointer(&to[0]), C.uintptr_t(from), C.size_t(len(to)))
	}
}
