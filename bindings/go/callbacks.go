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

// LogLevel is the severity of a message.
type LogLevel int32

// The levels of the C ABI.
const (
	LogError   LogLevel = 1 // something failed
	LogWarning LogLevel = 2 // something works, but not as well as it should
	LogInfo    LogLevel = 3 // all is well
)

// Log receives the library's messages. A library thread waits while it runs, so it must not call the library. A panic in Log,
// or runtime.Goexit, ends only that call of Log.
type Log func(level LogLevel, message string)

// HostAllocator allocates the host memory of caches and sessions. The library calls it from any thread. A panic in Alloc counts
// as a refusal, a panic in Free is ignored. Neither may end its goroutine.
type HostAllocator interface {
	// Alloc returns C memory, not Go memory: at least bytes bytes, aligned to alignment (a power of two). It returns nil if
	// there is no memory.
	Alloc(bytes, alignment uintptr) unsafe.Pointer
	// Free releases memory that Alloc returned. bytes is the size that Alloc was asked for.
	Free(data unsafe.Pointer, bytes uintptr)
}

// table holds the Go callbacks that the library may call. C gets a number instead of an address, so a late call finds no entry.
// Numbers are never used twice.
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

// outcome tells how a callback of the caller ended.
type outcome struct {
	panics bool
	value  any  // the panic's value
	exits  bool // ended by runtime.Goexit, as t.FailNow does
}

// apart runs a callback for the library, whose C frames must not be unwound. The callback gets its own goroutine, because only
// the end of a goroutine stops Goexit. apart returns when the callback has ended.
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

// recovered runs body. It returns true and the panic's value if body panicked; panic(nil) counts as a panic.
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

// goOn repeats the callback's panic or Goexit on the goroutine that made the call.
func (o outcome) goOn() {
	if o.exits {
		runtime.Goexit()
	}
	if o.panics {
		panic(o.value)
	}
}

// listener holds a call's progress callback and how the callback ended.
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

// logEntry is an entry of logs. It is removed when the last handle that shares it is released.
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

// Allocator is a registered HostAllocator, for EngineOptions. It stays registered until the process ends, because memory may be
// freed as late as the last cache is.
type Allocator struct {
	number uintptr
}

// NewAllocator registers the allocator with the library.
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

// contain stops a panic of an allocator before it reaches the library.
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
