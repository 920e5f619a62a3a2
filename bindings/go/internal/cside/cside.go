// SPDX-License-Identifier: MIT

// Package cside is what the tests and the benchmark of package tandem need of C: cgo is not to be had in test files.
package cside

/*
#cgo pkg-config: tandem
#cgo CFLAGS: -I${SRCDIR}/../../../rust/tandem/benches
#include <stdlib.h>
#include "overhead.c"
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
