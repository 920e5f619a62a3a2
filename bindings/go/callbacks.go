// SPDX-License-Identifier: MIT

package tandem

/*
#include <stdint.h>
#include <stddef.h>
*/
import "C"

import (
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"
)

// LogLevel is how much a message matters.
type LogLevel int32

// The levels of the C ABI.
const (
	LogError   LogLevel = 1 // something failed
	LogWarning LogLevel = 2 // something works, but not as well as it should
	LogInfo    LogLevel = 3 // all is well
)

// Log gets the library's messages, while one of its threads waits. It must not call into the library; that it panics, or ends its
// goroutine, is ignored.
type Log func(level LogLevel, message string)

// HostAllocator gives host memory of caches and sessions, from any thread. A panic in Alloc counts as a refusal, one in Free is
// ignored; neither may end its goroutine.
type HostAllocator interface {
	// Alloc returns memory of C, not of Go, of at least bytes bytes aligned to alignment, a power of two; nil: there is none.
	Alloc(bytes, alignment uintptr) unsafe.Pointer
	// Free takes back what Alloc gave for bytes.
	Free(data unsafe.Pointer, bytes uintptr)
}

// table holds what the library calls. C is given a number instead of an address: a call that comes after its entry is gone
// finds nothing. Numbers are never used twice.
type table[T any] struct {
	mutex   sync.RWMutex
	entries map[uintptr]T
	last    uintptr
}

func (t *table[T]) add(entry T) uintptr {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.entries == nil {
		t.entries = map[uintptr]T{}
	}
	t.last++
	t.entries[t.last] = entry
	return t.last
}

func (t *table[T]) find(number uintptr) (T, bool) {
	t.mutex.RLock()
	defer t.mutex.RUnlock()
	entry, found := t.entries[number]
	return entry, found
}

func (t *table[T]) remove(number uintptr) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	delete(t.entries, number)
}

var (
	logs       table[Log]
	allocators table[HostAllocator]
	listeners  table[*listener]
)

// outcome is how code of the caller ended.
type outcome struct {
	panics bool
	value  any  // of the panic
	exits  bool // by runtime.Goexit, as t.FailNow does
}

// apart runs code of the caller for the library, whose frames it may not unwind: on a goroutine of its own, since nothing but its end
// stops Goexit. The caller of apart waits.
func apart(body func()) (o outcome) {
	ended := make(chan struct{})
	o.exits = true
	go func() {
		defer close(ended)
		o.panics, o.value = recovered(body)
		o.exits = false // not reached after Goexit
	}()
	<-ended
	return o
}

// recovered runs body and says what it panicked with: panic(nil) is one too.
func recovered(body func()) (panics bool, value any) {
	panics = true
	defer func() {
		if panics {
			value = recover()
		}
	}()
	body()
	return false, nil
}

// goOn does to the goroutine that made the call what its callback did to the one that it ran on.
func (o outcome) goOn() {
	if o.exits {
		runtime.Goexit()
	}
	if o.panics {
		panic(o.value)
	}
}

// listener is the progress callback of a call, and how it ended.
type listener struct {
	progress func(done, total int64)
	outcome
}

//export tandemGoProgress
func tandemGoProgress(done, total C.int64_t, number C.uintptr_t) C.int32_t {
	l, found := listeners.find(uintptr(number))
	if !found {
		return 0
	}
	l.outcome = apart(func() { l.progress(int64(done), int64(total)) })
	if l.panics || l.exits {
		return 1
	}
	return 0
}

// logEntry is an entry of logs, removed when the last handle that shares it is released.
type logEntry struct {
	number uintptr
	owners atomic.Int64
}

func newLogEntry(log Log) *logEntry {
	if log == nil {
		return nil
	}
	return &logEntry{number: logs.add(log)}
}

func (l *logEntry) share() *logEntry {
	if l != nil {
		l.owners.Add(1)
	}
	return l
}

func (l *logEntry) drop() {
	if l != nil && l.owners.Add(-1) == 0 {
		logs.remove(l.number)
	}
}

// Allocator is a HostAllocator as engine options take it. It stays until the process ends: memory may come back as late as the
// last cache goes.
type Allocator struct {
	number uintptr
}

// NewAllocator makes it known to the library.
func NewAllocator(allocator HostAllocator) *Allocator {
	return &Allocator{number: allocators.add(allocator)}
}

//export tandemGoLog
func tandemGoLog(level C.int32_t, message *C.char, number C.uintptr_t) {
	if log, found := logs.find(uintptr(number)); found {
		text := C.GoString(message)
		apart(func() { log(LogLevel(level), text) })
	}
}

// contain keeps a panic of an allocator from the library.
func contain() { _ = recover() }

//export tandemGoAlloc
func tandemGoAlloc(bytes, alignment C.size_t, number C.uintptr_t) (data unsafe.Pointer) {
	defer contain()
	if allocator, found := allocators.find(uintptr(number)); found {
		return allocator.Alloc(uintptr(bytes), uintptr(alignment))
	}
	return nil
}

//export tandemGoFree
func tandemGoFree(data unsafe.Pointer, bytes C.size_t, number C.uintptr_t) {
	defer contain()
	if allocator, found := allocators.find(uintptr(number)); found {
		allocator.Free(data, uintptr(bytes))
	}
}
