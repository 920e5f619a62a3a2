// SPDX-License-Identifier: MIT

package tandem

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
)

// Code is why a call failed: TANDEM_ERROR_*. It is an error itself, so that errors.Is(err, tandem.ErrBusy) asks an error for it.
type Code int32

// Each code of the C ABI.
const (
	ErrInvalidArgument Code = C.TANDEM_ERROR_INVALID_ARGUMENT // a value is out of range, misaligned, overlapping or inconsistent
	ErrInvalidHandle   Code = C.TANDEM_ERROR_INVALID_HANDLE   // closed
	ErrInvalidState    Code = C.TANDEM_ERROR_INVALID_STATE    // the object cannot do this now
	ErrUnsupported     Code = C.TANDEM_ERROR_UNSUPPORTED      // a valid request that nothing here implements
	ErrOutOfMemory     Code = C.TANDEM_ERROR_OUT_OF_MEMORY    // the system or the allocator refused memory
	ErrCapacity        Code = C.TANDEM_ERROR_CAPACITY         // a cap or a declared maximum would be exceeded
	ErrBusy            Code = C.TANDEM_ERROR_BUSY             // another session has the sequence in flight
	ErrNotFound        Code = C.TANDEM_ERROR_NOT_FOUND        // no such sequence, policy, instruction set or backend
	ErrCancelled       Code = C.TANDEM_ERROR_CANCELLED        // the caller asked to stop
	ErrTimeout         Code = C.TANDEM_ERROR_TIMEOUT          // the given time has passed
	ErrDeviceLost      Code = C.TANDEM_ERROR_DEVICE_LOST      // the device failed for good; the host store is complete
	ErrBackend         Code = C.TANDEM_ERROR_BACKEND          // a requested backend module could not be used
	ErrIO              Code = C.TANDEM_ERROR_IO               // a file operation failed
	ErrCorrupt         Code = C.TANDEM_ERROR_CORRUPT          // a file or a buffer is not what it claims to be
	ErrSystem          Code = C.TANDEM_ERROR_SYSTEM           // the system refused something other than memory
	ErrInternal        Code = C.TANDEM_ERROR_INTERNAL         // a bug in Tandem
)

// Error gives the name: "TANDEM_ERROR_BUSY".
func (c Code) Error() string {
	return C.GoString(C.tandem_status_name(C.int32_t(c)))
}

// Error is a failed call: every error of this package is one. errors.As gives it, errors.Is compares its code.
type Error struct {
	Code       Code
	Field      string // the option or argument that was refused, "" where none applies
	Message    string // one line that names function, field and value
	Underlying int64  // errno, CUDA result or other code of the layer below; 0 where none applies
	cause      error  // of a context
}

func (e *Error) Error() string {
	if e.Message == "" {
		return e.Code.Error()
	}
	return e.Message
}

// Unwrap gives the code.
func (e *Error) Unwrap() error { return e.Code }

// Is says that a call which a context has cancelled ended with the context's error too.
func (e *Error) Is(target error) bool { return e.cause != nil && errors.Is(e.cause, target) }

// refuse is a refusal by this package, before the library is called.
func refuse(function, field, format string, values ...any) *Error {
	message := function + ": " + field + " " + fmt.Sprintf(format, values...)
	return &Error{Code: ErrInvalidArgument, Field: field, Message: message}
}

// failure takes what a call returned, its error object too.
func failure(status C.int32_t, raw *C.tandem_error) error {
	if status == C.TANDEM_OK {
		return nil
	}
	err := &Error{
		Code:       Code(status),
		Field:      C.GoString(C.tandem_error_field(raw)),
		Message:    C.GoString(C.tandem_error_message(raw)),
		Underlying: int64(C.tandem_error_underlying(raw)),
	}
	C.tandem_error_release(raw)
	return err
}

// text is what a function that fills a buffer says: asked for its size, then for itself.
func text(fill func(buffer *C.char, bytes C.size_t, needed *C.size_t, err **C.tandem_error) C.int32_t) (string, error) {
	var needed C.size_t
	var raw *C.tandem_error
	if err := failure(fill(nil, 0, &needed, &raw), raw); err != nil {
		return "", err
	}
	for {
		buffer := make([]byte, needed)
		raw = nil
		if err := failure(fill(chars(buffer), C.size_t(len(buffer)), &needed, &raw), raw); err != nil {
			return "", err
		}
		if int(needed) <= len(buffer) {
			return string(buffer[:needed-1]), nil
		}
	}
}
