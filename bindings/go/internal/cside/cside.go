// SPDX-License-Identifier: MIT

// Package cside holds the C code of package tandem's tests and benchmark, because test files cannot use cgo.
package cside

/*
#cgo pkg-config: tandem
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "attend_n.h"

// Controls of the stand-in device, which lives in host memory: the first members of its table.
typedef struct controls {
	void (*reset)(void);
	void (*set_delay)(int64_t ns);
	void (*lose_device)(void);
	void (*fail_call)(int32_t call, int64_t nth, int32_t status);
} controls;

static const controls *controls_of(void *module) {
	typedef const controls *(*function)(void);
	function find = (function)dlsym(module, "stand_in_controls");
	return find == NULL ? NULL : find();
}
static void reset(const controls *c) { c->reset(); }
static void set_delay(const controls *c, int64_t ns) { c->set_delay(ns); }
static void lose_device(const controls *c) { c->lose_device(); }
static void fail_call(const controls *c, int32_t call, int64_t nth, int32_t status) { c->fail_call(call, nth, status); }
static void copy_from(void *to, uintptr_t from, size_t bytes) { memcpy(to, (const void *)from, bytes); }

// Copies after the work of the default stream. Returns 0 or an error of CUDA's driver.
static int copy_from_cuda(void *to, uintptr_t from, size_t bytes) {
	typedef int (*retain_function)(void **context, int device);
	typedef int (*set_function)(void *context);
	typedef int (*copy_function)(void *to, uintptr_t from, size_t bytes);
	void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
	int result = -1;
	if (driver == NULL) return result;
	result = ((retain_function)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0);
	if (result == 0) result = ((set_function)dlsym(driver, "cuCtxSetCurrent"))(context);
	if (result == 0) result = ((copy_function)dlsym(driver, "cuMemcpyDtoH_v2"))(to, from, bytes);
	return result;
}
*/
import "C"

import "unsafe"

// AttendN makes n decode calls of q and o [1, 8, 64] on a session, in a C loop. It returns the last call's status.
func AttendN(session unsafe.Pointer, sequence int64, q, o []float32, n int) int32 {
	if len(q) != 8*64 || len(o) != 8*64 {
		panic("q and o are [1, 8, 64]")
	}
	at := (*C.tandem_session)(session)
	return int32(C.attend_n(at, C.int64_t(sequence), (*C.float)(&q[0]), (*C.float)(&o[0]), C.int32_t(n)))
}

// Alloc returns aligned C memory.
func Alloc(bytes, alignment uintptr) unsafe.Pointer {
	return C.aligned_alloc(C.size_t(alignment), C.size_t((bytes+alignment-1)/alignment*alignment))
}

// Free releases memory of Alloc.
func Free(data unsafe.Pointer) { C.free(data) }

// Module is a device module: CUDA, or the stand-in, which lives in host memory and has controls.
type Module struct{ controls *C.controls }

// OpenModule returns nil if the module cannot be loaded.
func OpenModule(path string) *Module {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if module := C.dlopen(name, C.RTLD_NOW); module != nil {
		return &Module{C.controls_of(module)}
	}
	return nil
}

// Backend returns the backend's name.
func (m *Module) Backend() string {
	if m.controls != nil {
		return "standin"
	}
	return "cuda"
}

// Reset makes the stand-in available, without delay and without failures.
func (m *Module) Reset() {
	if m.controls != nil {
		C.reset(m.controls)
	}
}

// SetDelay sets the delay before each stream operation of the stand-in, in ns.
func (m *Module) SetDelay(ns int64) {
	if m.controls != nil {
		C.set_delay(m.controls, C.int64_t(ns))
	}
}

// LoseDevice makes the stand-in fail until Reset.
func (m *Module) LoseDevice() { C.lose_device(m.controls) }

// FailCreateEvent makes the next create_event() of the stand-in return status.
func (m *Module) FailCreateEvent(status int32) { C.fail_call(m.controls, 16, 1, C.int32_t(status)) }

// Read copies device memory after the work of the default stream. The stand-in's memory is copied at once.
func (m *Module) Read(to []byte, from uintptr) {
	if len(to) == 0 {
		return
	}
	if m.controls != nil {
		C.copy_from(unsafe.Pointer(&to[0]), C.uintptr_t(from), C.size_t(len(to)))
	} else if result := C.copy_from_cuda(unsafe.Pointer(&to[0]), C.uintptr_t(from), C.size_t(len(to))); result != 0 {
		panic(result)
	}
}
